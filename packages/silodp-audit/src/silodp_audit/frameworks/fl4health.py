"""FL4Health: DP-SGD in the clients (instance level), and noise at the server (client level); facts are of 0.4.2."""

from __future__ import annotations

import math

from silodp.accounting.accountant import EventCount
from silodp.accounting.charges import scale_to_person
from silodp.accounting.events import Gaussian, PoissonSampled, RevealedSample, SelfComposed
from silodp.errors import SilodpError
from silodp_audit.frameworks import base
from silodp_audit.frameworks._stated import compute_rdp

_SAMPLING = ("client_sampling_rate", "client_sampling", "fraction_fit")
_ORDERS = [
    1.25,
    1.5,
    1.75,
    2.0,
    2.25,
    2.5,
    3.0,
    3.5,
    4.0,
    4.5,
    *map(float, range(5, 64)),
    128.0,
    256.0,
    512.0,
]
"""`MomentsAccountant.moment_orders`."""
_IN_CLEAR = "clients send the numbers of their records and their metrics in clear; no ε here covers these"
_ROUNDS = ("n_server_rounds", "num_server_rounds", "rounds")


class Fl4Health(base.Framework):
    """FL4Health."""

    name = "fl4health"
    files = "config.yaml of the server"
    without_effect = (
        *(
            "client_clipping",
            "server_clipping",
            "clipping_bound",
            "clipping_learning_rate",
            "clipping_quantile",
        ),
        "buffers",  # at client level the clip and the noise cover all entries
    )

    def check(self, settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
        """Return what holds at the level that the settings are of."""
        if "client_noise_multiplier" in settings:
            return _check_instance_level(settings, delta)
        if "server_noise_multiplier" in settings:
            return _check_client_level(settings, delta)
        raise SilodpError(
            "no level is known by these settings: instance level has client_noise_multiplier, client level has "
            "server_noise_multiplier.",
            code="argument.missing",
            field="framework",
        )


def _check_instance_level(settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
    """Check DP-SGD in clients that are drawn with one coin per round."""
    noise, coin = settings.number("client_noise_multiplier"), settings.share(*_SAMPLING, default=1.0)
    rounds = settings.whole(*_ROUNDS)
    batch, size = settings.whole("batch_size"), settings.whole("client_data_sizes", "client_data_size")
    batches = base.count_batches(settings, size)
    rate = min(1.0, max(batch / size, 1 / batches))  # the second is larger where a batch is dropped
    if "local_steps" in settings:
        if "local_epochs" in settings:
            raise SilodpError(
                "local_steps and local_epochs are both set: FL4Health takes one of them, leave the other out.",
                code="argument.conflict",
                field="local_steps",
            )
        steps = settings.whole("local_steps")
        # As its server: steps become whole epochs, and its accountant knows no batch that is left out.
        epochs = math.ceil(steps * batch / size)
    else:
        epochs = settings.whole("local_epochs", "epochs_per_round")
        steps = epochs * batches
    step = PoissonSampled(rate, Gaussian(noise)) if rate < 1 else Gaussian(noise)

    def charges(records: int) -> list[EventCount]:
        # One coin of the client is for all its steps of a round, and the server sees it.
        of_round = RevealedSample(coin, SelfComposed(step, steps))
        return [(scale_to_person(of_round, records), rounds)]

    found = settings.delta(delta, "target_delta", "delta")
    # As its accountant counts: one Poisson draw for each step, with the product of both rates.
    updates = rounds * epochs * math.ceil(size / batch)
    drawn = coin * batch / size
    stated = compute_rdp(noise, drawn, updates, found, _ORDERS) if drawn <= 1 else None  # it refuses more
    finding = base.Finding(
        "fl4health",
        f"instance level, noise {noise:g}, client sampling {coin:g}, record sampling {rate:.4g}, {steps} steps a round",
        found,
        rounds,
        (
            *base.no_guarantee(
                base.SERVER, "the noise is for single records, and a client has many", (base.CLIENT,)
            ),
            *base.bound_units(base.SERVER, found, charges, base.RECORDS),
        ),
        stated,
        "for a record, by FlInstanceLevelAccountant",
        (
            f"it charges every step as a Poisson sample with {coin:g} · {batch / size:.4g}, but one coin of the client "
            f"is for all {steps} steps of a round, and the server sees it",
        )
        if coin < 1
        else ("it is by Rényi orders, which give more than the smallest ε that holds",),
        (
            "all clients have the same noise, batch size and number of records; name the client with the largest rate",
            "the number of records and of steps is public",
            "a person's records are at most as many as stated, in all clients together",
            "every gradient is finite: one NaN may pass the clip",
            _IN_CLEAR,
        ),
    )
    return base.exclude_entries(finding, settings, "buffers", base.BUFFERS)


def _check_client_level(settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
    """Check noise of std z·C on the sum of the clipped updates of the clients of a round."""
    noise, coin = settings.number("server_noise_multiplier"), settings.share(*_SAMPLING, default=1.0)
    rounds = settings.whole(*_ROUNDS)
    found = settings.delta(delta, "target_delta", "delta")
    reason = None
    is_weighted = settings.flag("weighted_averaging", "weighted_aggregation", default=False)
    if settings.flag("adaptive_clipping", default=False):
        step = settings.number("clipping_learning_rate", default=1.0)
        share = settings.share("clipping_quantile", default=0.5)
        reason = (
            f"the clipping bound is multiplied by exp(-{step:g} · (noisy share of updates below it - {share:g})) after "
            "the updates were clipped and before the noise is added: the noise is for a bound that is smaller by up to "
            f"{1 - math.exp(-step * (1 - share)):.1%} in a round, and by more where the noise of the share is large"
        )
    elif is_weighted:
        reason = (
            "updates are weighted by the clients' numbers of records n_k, as n_k/(fraction_fit · sum of all n_k), and "
            "the noise follows the largest n_k of the round: weights and noise tell private numbers, which one record "
            "changes (the sum is an average already, and it and its noise are divided by the number of clients once "
            "more)"
        )

    def charges(records: int) -> list[EventCount]:
        # In units of the clip: an emptied client 1, k records in up to k clients 2k.
        event = Gaussian(noise / max(1, 2 * records))
        is_sampled = coin < 1 and records < 2
        return [(RevealedSample(coin, event) if is_sampled else event, rounds)]

    return base.Finding(
        "fl4health",
        f"client level, noise {noise:g} at the server, clients drawn with {coin:g}",
        found,
        rounds,
        (
            *base.no_guarantee(
                base.SERVER, "the server adds the noise, and sees each client's update without it"
            ),
            *(
                base.bound_units(base.RELEASED, found, charges)
                if reason is None
                else base.no_guarantee(base.RELEASED, reason)
            ),
        ),
        compute_rdp(noise, coin, rounds, found, _ORDERS),
        "for a client, by FlClientLevelAccountantPoissonSampling",
        (
            "the server adds the noise, so the number is not about the server",
            *(
                [
                    "it assumes that nobody learns how many clients were drawn, but the sum is divided by that number, "
                    "and clients know whether they were drawn"
                ]
                if coin < 1
                else []
            ),
            "a record can move the update of its client by twice the clip",
        ),
        (
            "a client that is emptied still answers, with an update of 0, and every update is finite: one NaN may pass "
            "the clip",
            "clients are drawn by a draw that does not depend on records; who was drawn may be known",
            _IN_CLEAR,
        ),
    )
