"""Flower: `LocalDpMod`, and central noise with fixed or adaptive clipping; facts are of flwr 1.42.0.

Clipping (`flwr.supercore.differential_privacy.clip_inputs_inplace`) multiplies each array in place. An entry without
dimensions is no array after the subtraction, and is not changed. Noise is drawn in the type of the array: of an array
of whole numbers it is cut to whole numbers.

Settings are read from `[tool.flwr.app.config]` of pyproject.toml, where the app chooses the names. A name may begin
with "dp-".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from silodp.accounting.accountant import EventCount
from silodp.accounting.events import Gaussian, RevealedSample
from silodp.config.toml_values import TomlTable
from silodp.errors import SilodpError
from silodp_audit.frameworks import base
from silodp_audit.frameworks._stated import compute_rdp

_ROUNDS = ("num_server_rounds", "num_rounds", "rounds")
_SHARES = ("fraction_train", "fraction_fit")
_LEAST = ("min_train_nodes", "min_fit_clients")
_EMPTIED = "a client that is emptied still answers, with an update of almost 0 (flwr 1.42 fails at exactly 0)"
_FINITE = "every update is finite: one with NaN or infinite numbers passes the clip"
_IN_CLEAR = "clients send the numbers of their records and their metrics in clear; no ε here covers these"
_ENTRIES = (
    "entries without dimensions or of whole numbers, such as num_batches_tracked of BatchNorm, which the clip does not "
    "change and the noise does not cover"
)
_WHOLE_MODEL = "the message has the whole update and no other array"


class Flower(base.Framework):
    """Flower."""

    name = "flower"
    files = "pyproject.toml of the app"
    without_effect = (
        "clipping_norm",
        "num_sampled_clients",
        "target_clipped_quantile",
        "clip_norm_lr",
        "clipped_count_stddev",
    )

    def pick(self, content: Any) -> TomlTable:
        """Return `[tool.flwr.app.config]`, without the prefix "dp-"."""
        table = content
        for key in ("tool", "flwr", "app", "config"):
            table = table.get(key) if isinstance(table, Mapping) else None
        if not isinstance(table, Mapping):
            raise SilodpError(
                "the file has no table [tool.flwr.app.config]: name pyproject.toml of a Flower app.",
                code="config.value",
            )
        return {base.normalize(key).removeprefix("dp_"): value for key, value in table.items()}

    def check(self, settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
        """Return what holds for the mechanism that the settings are of."""
        checks = {
            "sensitivity": _check_local,
            "initial_clipping_norm": _refuse_adaptive,
            "noise_multiplier": _check_central,
        }
        for name, check in checks.items():
            if name in settings:
                return base.exclude_entries(check(settings, delta), settings, "scalar_entries", _ENTRIES)
        if "max_grad_norm" in settings:
            raise SilodpError(
                "max_grad_norm is a setting of Opacus in the clients: use --framework opacus, with noise_multiplier, "
                "batch_size and dataset_size of a client, epochs of a round, and rounds.",
                code="argument.missing",
                field="framework",
            )
        raise SilodpError(
            "no mechanism is known by these settings: LocalDpMod has clipping_norm, sensitivity, epsilon and delta; "
            "fixed clipping has noise_multiplier, clipping_norm and num_sampled_clients; adaptive clipping has "
            "initial_clipping_norm.",
            code="argument.missing",
            field="framework",
        )


def _check_local(settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
    """Check `LocalDpMod`: every client clips its update and adds noise of std sensitivity·√(2·ln(1.25/δ))/ε.

    Source of the formula: Dwork and Roth 2014, Theorem A.1, which is for ε < 1.
    """
    clip, sensitivity = settings.number("clipping_norm"), settings.number("sensitivity")
    epsilon, own_delta = settings.number("epsilon"), settings.share("delta")
    rounds = settings.whole(*_ROUNDS)
    # As flwr computes it; the bounds below are from this σ, whatever the formula promises.
    std = sensitivity * math.sqrt(2 * math.log(1.25 / own_delta)) / epsilon

    def charges(records: int) -> list[EventCount]:
        # 0: the client is emptied. Else k records in up to k clients, whose noise is independent.
        return [(Gaussian(std / (2 * clip if records else clip)), rounds * max(records, 1))]

    differences = []
    if sensitivity < clip:
        differences.append(
            f"sensitivity = {sensitivity:g} is an argument that nothing checks; emptying a client moves its update by "
            f"up to clipping_norm = {clip:g}"
        )
    if sensitivity < 2 * clip:
        differences.append(
            f"a record moves the clipped update of its client by up to {2 * clip:g}, from one point of the ball to "
            "another"
        )
    if epsilon >= 1:
        differences.append("the formula √(2·ln(1.25/δ))/ε for the noise is proven for ε below 1 only")
    if rounds > 1:
        differences.append("it is about one round, and the rounds add up")
    return base.Finding(
        "flower",
        f"LocalDpMod, noise with standard deviation {std:.3g} under clip {clip:g}",
        found := settings.delta(delta, "delta"),
        rounds,
        base.bound_units(base.SERVER, found, charges),
        epsilon,
        f"at δ = {own_delta:g}, in each round",
        tuple(differences),
        (
            "a client may be in every round, and whether it is does not depend on its records",
            _EMPTIED,
            _FINITE,
            _WHOLE_MODEL,
            _IN_CLEAR,
        ),
    )


def _check_central(settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
    """Check fixed clipping: the server adds noise of std z·C/n to the average of n clipped updates."""
    noise, clients = settings.number("noise_multiplier"), settings.whole("num_sampled_clients")
    clip = settings.number("clipping_norm")
    rounds = settings.whole(*_ROUNDS)
    are_equal = settings.flag("equal_weights", default=False)
    sampling = 1.0
    if "num_clients" in settings or "num_supernodes" in settings:
        known = settings.whole("num_clients", "num_supernodes")
        if clients > known:
            raise SilodpError(
                f"num_sampled_clients is {clients}, and there are {known} clients: correct one of them.",
                code="argument.conflict",
                field="num_sampled_clients",
            )
        sampling = clients / known
        has_share, has_least = (any([name in settings for name in names]) for names in (_SHARES, _LEAST))
        if has_share or has_least:
            # As FedAvg draws: a share of the clients, and never fewer than a minimum, which is 2 by default.
            drawn = int(settings.share(*_SHARES) * known) if has_share else clients
            drawn = min(known, max(drawn, settings.whole(*_LEAST, default=2)))
            if drawn != clients:
                raise SilodpError(
                    f"num_sampled_clients is {clients}, and Flower draws {drawn} of {known} by the share and the "
                    "minimum of clients that are set: correct one of them.",
                    code="argument.conflict",
                    field="num_sampled_clients",
                )

    def charges(records: int) -> list[EventCount]:
        # What is moved, in units of C/n: an emptied client of equal weight 1, k records in k clients 2k. Two averages,
        # whatever the weights, lie in one ball of radius C: at most 2n.
        reach = 2 * clients
        if are_equal:
            reach = 1 if records == 0 else 2 * min(records, clients)
        event = Gaussian(noise / reach)
        # Of several clients it is more probable that one is drawn, so sampling counts for a single one only.
        is_sampled = sampling < 1 and records < 2
        return [(RevealedSample(sampling, event) if is_sampled else event, rounds)]

    differences = []
    if not are_equal:
        differences.append(
            "FedAvg weights clients by their numbers of records, so one client can carry nearly all the weight, and "
            "the average can move by up to 2 · clipping_norm; noise is for clipping_norm / num_sampled_clients, and "
            "flwr's accountant refuses to state ε (set equal_weights=true if all weights are equal)"
        )
    else:
        differences = [
            "the server adds the noise, so it is not about the server",
            "it is about a client that is emptied: a record can move the update twice as far",
            "it is by Rényi orders, which give more than the smallest ε that holds",
        ]
    found = settings.delta(delta, "target_delta", "delta")
    # Its accountant refuses unequal weights, so none is stated for these.
    stated = compute_rdp(noise, 1.0, rounds, found) if are_equal else None
    return base.Finding(
        "flower",
        f"fixed clipping with central noise, noise_multiplier {noise:g}, clip {clip:g}, {clients} clients a round",
        found,
        rounds,
        (
            *base.no_guarantee(
                base.SERVER,
                "the server adds the noise, and sees the updates (with SecAgg+ their sum) without it",
            ),
            *base.bound_units(base.RELEASED, found, charges),
        ),
        stated,
        "for a client, by flwr's RdpAccountant" if stated is not None else "",
        tuple(differences),
        (
            f"exactly {clients} clients answer in every round, which Flower only warns about",
            "clients are drawn uniformly, by a draw that does not depend on records, and all of them are available; "
            "who was drawn may be known"
            if sampling < 1
            else "a client may be in every round, and whether it is does not depend on its records",
            _EMPTIED,
            _FINITE,
            _IN_CLEAR,
        ),
    )


def _refuse_adaptive(settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
    noise = settings.number("noise_multiplier")
    rate = settings.number("clip_norm_lr", default=0.2)
    share = settings.share("target_clipped_quantile", default=0.5)
    reason = (
        f"the clipping norm is multiplied by exp(-{rate:g} · (noisy share of clipped updates - {share:g})) after the "
        f"updates were clipped and before the noise is added: the noise is for a norm that is smaller by up to "
        f"{1 - math.exp(-rate * (1 - share)):.1%} in a round, and by more where the noise of the share is large"
    )
    runaway = (
        "the share is of updates that were clipped, where the rule (Andrew et al. 2021) needs the share of those that "
        "were not: the norm falls while too many are clipped and grows while too few are, so it runs away from the "
        "quantile, to 0 or without end"
    )
    return base.Finding(
        "flower",
        f"adaptive clipping with central noise, noise_multiplier {noise:g}",
        settings.delta(delta, "target_delta", "delta"),
        settings.whole(*_ROUNDS),
        (
            *base.no_guarantee(base.SERVER, "the server adds the noise"),
            *base.no_guarantee(base.RELEASED, reason),
        ),
        differences=(runaway,),
    )
