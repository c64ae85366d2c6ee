"""Opacus: DP-SGD in one client, alone or in every round of a federation; facts are of opacus 1.6."""

from __future__ import annotations

import math

from silodp.accounting.accountant import EventCount
from silodp.accounting.charges import scale_to_person
from silodp.accounting.events import Event, Gaussian, PoissonSampled
from silodp.errors import SilodpError
from silodp_checks import base


class Opacus(base.Framework):
    """Opacus."""

    name = "opacus"
    files = "a flat TOML, JSON or YAML file with the arguments of make_private"
    without_effect = ("max_grad_norm",)

    def check(self, settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
        """Return what holds: records are drawn anew for every step, or, without Poisson sampling, once per epoch."""
        if "target_epsilon" in settings and "noise_multiplier" not in settings:
            raise SilodpError(
                "noise_multiplier is missing: make_private_with_epsilon has chosen it for target_epsilon; print "
                "optimizer.noise_multiplier after that call, and give noise_multiplier=... instead of target_epsilon.",
                code="argument.missing",
                field="noise_multiplier",
            )
        noise = settings.number("noise_multiplier")
        rounds = settings.whole("rounds", "num_rounds", default=1)
        if "sample_rate" in settings:
            rate = settings.share("sample_rate")
            # 1e-9: 1/0.1 may be a little less than 10 in floating point.
            batches = max(1, math.floor(1 / rate + 1e-9))
        else:
            # As Opacus: one over the number of batches of the loader.
            batches = base.count_batches(settings, settings.whole("dataset_size"))
            rate = 1 / batches
        of_round = settings.whole("steps") if "steps" in settings else settings.whole("epochs") * batches
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
        bounds = (
            *base.no_guarantee(
                base.SERVER, "Opacus protects single records, and a client has many", (base.CLIENT,)
            ),
            *base.bound_units(base.SERVER, found, charges, base.RECORDS),
        )
        differences = []
        if not is_poisson:
            differences.append(
                "it counts every step as a Poisson sample, but batches of a shuffled table are none: an epoch costs as "
                "much as one step with all records"
            )
        if rounds > 1:
            differences.append(
                f"a privacy engine that is made anew in each of the {rounds} rounds counts one round only"
            )
        stated = None
        if differences:
            stated = base.compute_bound([(sampled, of_round)], found).epsilon
        return base.Finding(
            "opacus",
            f"DP-SGD, noise_multiplier {noise:g}, sample rate {rate:.4g}, {steps:,} steps"
            + ("" if is_poisson else ", batches without Poisson sampling"),
            found,
            rounds,
            bounds,
            stated,
            "by the engine's accountant" if stated is not None else "",
            tuple(differences),
            (
                "the number of records and of steps is public",
                "max_grad_norm bounds the gradient of every record, and each is finite (one NaN passes the clip)",
                "no layer mixes records, and statistics of layers such as BatchNorm are not sent",
                "a person's records are at most as many as stated, in all clients together",
                "all noise is drawn by a secure generator (secure_mode=True)"
                + ("" if is_secure else ", which these settings do not ask for: until then no bound holds"),
            ),
        )
