"""Opacus: DP-SGD in one client, alone or in every round of a federation; facts are of opacus 1.6.0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from silodp.accounting.accountant import EventCount
from silodp.accounting.charges import scale_to_person
from silodp.accounting.events import Event, Gaussian, PoissonSampled
from silodp.accounting.pld import compute_gaussian_epsilon
from silodp.errors import SilodpError
from silodp_audit.frameworks import base
from silodp_audit.frameworks._stated import compute_opacus_rdp, compute_prv

_ADAPTIVE = (
    "clipping='adaptive' divides a noisy number of unclipped gradients by the number of records in the batch, which is "
    "private, and the next clip follows from it"
)


class Opacus(base.Framework):
    """Opacus."""

    name = "opacus"
    files = "a flat TOML, JSON or YAML file with the arguments of make_private"
    without_effect: ClassVar[tuple[str, ...]] = ("max_grad_norm",)
    has_one_engine: ClassVar[bool] = False
    """Whether one privacy engine counts all rounds."""
    noise_names: ClassVar[tuple[str, ...]] = ("noise_multiplier",)
    steps_names: ClassVar[tuple[str, ...]] = ("steps",)
    epochs_names: ClassVar[tuple[str, ...]] = ("epochs",)
    loader_prefix: ClassVar[str] = ""
    """Before batch_size and drop_last."""
    rounds_names: ClassVar[tuple[str, ...]] = ("rounds", "num_rounds")
    default_rounds: ClassVar[int | None] = 1
    """In place of a number of rounds; None: it is asked for."""

    def read_rate(self, settings: base.FrameworkSettings) -> tuple[float, int]:
        """Return the sampling rate, and the number of batches of an epoch."""
        if "sample_rate" in settings:
            rate = settings.share("sample_rate")
            # 1e-9: 1/0.1 may be a little less than 10 in floating point.
            return rate, max(1, math.floor(1 / rate + 1e-9))
        # As Opacus: one over the number of batches of the loader.
        batches = base.count_batches(settings, settings.whole("dataset_size"), self.loader_prefix)
        return 1 / batches, batches

    def count_steps(self, settings: base.FrameworkSettings) -> int:
        """Return the number of steps of a round."""
        if any([name in settings for name in self.steps_names]):
            return settings.whole(*self.steps_names)
        return settings.whole(*self.epochs_names) * self.read_rate(settings)[1]

    def check(self, settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
        """Return what holds: records are drawn anew for every step, or, without Poisson sampling, once per epoch."""
        if "target_epsilon" in settings and "noise_multiplier" not in settings:
            raise SilodpError(
                "noise_multiplier is missing: make_private_with_epsilon has chosen it for target_epsilon; print "
                "optimizer.noise_multiplier after that call, and give noise_multiplier=... instead of target_epsilon.",
                code="argument.missing",
                field="noise_multiplier",
            )
        noise = settings.number(*self.noise_names)
        rounds = settings.whole(*self.rounds_names, default=self.default_rounds)
        rate, batches = self.read_rate(settings)
        of_round = self.count_steps(settings)
        steps = rounds * of_round
        is_poisson = settings.flag("poisson_sampling", default=True)
        is_secure = settings.flag("secure_mode", default=True)
        # At rate 1 all records take part, and sampling has nothing to amplify.
        sampled: Event = PoissonSampled(rate, Gaussian(noise)) if rate < 1 else Gaussian(noise)

        def charges(records: int) -> list[EventCount]:
            if is_poisson:
                return [(scale_to_person(sampled, records), steps)]
            # Every record is in one batch of an epoch, and every round begins a new epoch. The worst case for k
            # records is the same batch.
            return [(Gaussian(noise / records), rounds * math.ceil(of_round / batches))]

        found = settings.delta(delta, "target_delta", "delta")
        accountant = settings.choice("accountant", _ACCOUNTANTS, "prv")
        differences = [_DIFFERENCES[accountant]]
        if not is_poisson:
            differences.append(
                "it counts every step as a Poisson sample, but batches of a shuffled table are none: an epoch costs as "
                "much as one step with all records"
            )
        if rounds > 1 and not self.has_one_engine:
            differences.append(
                f"a privacy engine that is made anew in each of the {rounds} rounds counts one round only"
            )
        stated = _ACCOUNTANTS[accountant](noise, rate, steps if self.has_one_engine else of_round, found)
        finding = base.Finding(
            self.name,
            f"DP-SGD, noise_multiplier {noise:g}, sample rate {rate:.4g}, {steps:,} steps"
            + ("" if is_poisson else ", batches without Poisson sampling"),
            found,
            rounds,
            (
                *base.no_guarantee(
                    base.SERVER, "Opacus protects single records, and a client has many", (base.CLIENT,)
                ),
                *(
                    base.no_guarantee(base.SERVER, _ADAPTIVE, (base.RECORD,))
                    if settings.choice("clipping", ("flat", "per_layer", "adaptive"), "flat") == "adaptive"
                    else base.bound_units(base.SERVER, found, charges, base.RECORDS)
                ),
            ),
            stated,
            f"for a record, by accountant={accountant}" if stated is not None else "",
            tuple(differences),
            (
                "the number of records and of steps is public",
                "max_grad_norm bounds the gradient of every record, and each is finite (one NaN passes the clip)",
                "no layer mixes records",
                "a person's records are at most as many as stated, in all clients together",
                "all noise is drawn by a secure generator (secure_mode=True)"
                + ("" if is_secure else ", which these settings do not ask for: until then no bound holds"),
            ),
        )
        return base.exclude_entries(finding, settings, "buffers", base.BUFFERS)


def _state_prv(noise: float, rate: float, steps: int, delta: float) -> float | None:
    found = compute_prv(noise, rate, steps, delta)
    return None if found is None else found[1]


def _state_gdp(noise: float, rate: float, steps: int, delta: float) -> float | None:
    """Return ε by the central limit theorem for Gaussian DP (Bu et al. 2020); it is no bound."""
    try:
        found = compute_gaussian_epsilon(1 / (rate * math.sqrt(steps * math.expm1(noise**-2))), delta)
    except OverflowError:
        return None
    return found if found <= 500 else None  # where Opacus stops


_ACCOUNTANTS: dict[str, Callable[[float, float, int, float], float | None]] = {
    "prv": _state_prv,
    "rdp": compute_opacus_rdp,
    "gdp": _state_gdp,
}
"""By the name in `PrivacyEngine(accountant=...)`; the first one is the default."""
_DIFFERENCES = {
    "prv": "it is an upper bound with an error of .01",
    "rdp": "it is by Rényi orders, which give more than the smallest ε that holds",
    "gdp": "it is a limit for many steps and small rates, and no bound: it can be below the smallest ε that holds",
}
