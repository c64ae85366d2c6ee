"""pfl: central noise of a `PrivacyAccountant`; facts are of pfl 0.6.0.

A user of pfl is what is called a client here. The server adds noise of standard deviation noise_parameter · noise_scale
in units of the clipping bound to the sum of a cohort (`GaussianMechanism.from_privacy_accountant`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from silodp.accounting.accountant import MAX_EPSILON, EventCount
from silodp.accounting.events import Gaussian, PoissonSampled, SampledReplacement
from silodp.errors import SilodpError
from silodp_audit.frameworks import base
from silodp_audit.frameworks._stated import compute_pld, compute_prv, compute_rdp


class Pfl(base.Framework):
    """pfl."""

    name = "pfl"
    files = "a flat TOML, JSON or YAML file with the arguments of the privacy accountant"
    without_effect = (
        *("epsilon", "clipping_bound", "initial_clipping_bound", "clipping_indicator_noise_stddev"),
        *("adaptive_clipping_norm_quantile", "log_space_step_size"),
    )

    def check(self, settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
        """Return what holds for users that are drawn by a coin each, or in turn."""
        if "epsilon" in settings and "noise_parameter" not in settings:
            raise SilodpError(
                "noise_parameter is missing: the accountant has chosen it for epsilon; print "
                "accountant.noise_parameter, and give noise_parameter=... with it.",
                code="argument.missing",
                field="noise_parameter",
            )
        claimed, rounds = settings.number("noise_parameter"), settings.whole("num_compositions")
        noise = claimed * settings.share("noise_scale", default=1.0)
        rate, found = settings.share("sampling_probability"), settings.delta(delta, "delta")
        mechanism = settings.choice("mechanism", ("gaussian", "laplace"))
        sampler = settings.choice("user_sampler", ("poisson", "random", "minimize_reuse"))
        accountant = settings.choice("accountant", _ACCOUNTANTS, "PLDPrivacyAccountant")
        # In turn: of all draws a user has at most this share, rounded up, and at most one in a cohort.
        turns = math.ceil(rounds * rate)
        # The bit of adaptive clipping, which a user always sends, changes its sign, so a user counts as replaced.
        has_bit = "initial_clipping_bound" in settings

        def charges(records: int) -> list[EventCount]:
            moved = 2 * records if records or not has_bit else 2
            if sampler == "minimize_reuse":
                return [(Gaussian(noise / max(1, moved)), turns)]
            if records > 1 or rate == 1:
                return [(Gaussian(noise / max(1, moved)), rounds)]
            sampled = SampledReplacement if moved else PoissonSampled
            return [(sampled(rate, Gaussian(noise)), rounds)]

        if sampler == "random":
            bounds = base.no_guarantee(
                base.RELEASED,
                "user_sampler 'random' draws each place of a cohort anew, so a user may be in it several times, each "
                "time with another clip, where the accountant counts one coin for each user",
            )
        elif mechanism == "laplace":
            # Pure differential privacy adds up; a sample that nobody knows makes it smaller for one client.
            is_hidden = sampler == "poisson" and 1 / noise < MAX_EPSILON
            of_release = math.log1p(rate * math.expm1(1 / noise)) if is_hidden else 1 / noise
            times = turns if sampler == "minimize_reuse" else rounds
            bounds = tuple(
                base.Bound(base.RELEASED, unit, times * (2 * records / noise if records else of_release))
                for unit, records in base.UNITS.items()
            )
        else:
            bounds = base.bound_units(base.RELEASED, found, charges)
        stated = _ACCOUNTANTS[accountant](claimed, rate, rounds, found) if mechanism == "gaussian" else None
        differences = [] if stated is None else ["the server adds the noise, so it is not about the server"]
        if noise < claimed:
            differences.append(
                f"it is for noise of {claimed:g} clips, and noise_scale leaves {noise:g}: that is a simulation of "
                "cohorts that are larger"
            )
        if sampler != "poisson":
            differences.append(
                f"it counts a coin of every user with {rate:g}, and user_sampler '{sampler}' tosses none"
            )
        if mechanism == "laplace" and accountant == "PRVPrivacyAccountant":
            differences.append(
                "PRVPrivacyAccountant takes the scale of Laplace noise for its inverse: it states .196 for one release "
                "with a scale of .2, which costs 5"
            )
        return base.Finding(
            self.name,
            f"{mechanism} noise of {noise:g} clips on the sum of a cohort, {sampler} with {rate:g}",
            found,
            rounds,
            (
                *base.no_guarantee(
                    base.SERVER, "the server adds the noise, and sees the sum of a cohort without it"
                ),
                *bounds,
            ),
            stated,
            f"for a client, by {accountant}" if stated is not None else "",
            tuple(differences),
            (
                "nobody learns who was drawn in a round, and the draw does not depend on records"
                if sampler == "poisson"
                else "a draw does not depend on records, and a cohort is no larger than the number of users",
                "a client that is emptied still answers, with an update of 0, and every update is finite",
                "all weights are equal, and metrics stay secret: no noise covers them",
                "nobody knows the seed of the noise",
            ),
        )


def _state_prv(noise: float, rate: float, rounds: int, delta: float) -> float | None:
    found = compute_prv(noise, rate, rounds, delta, 0.07, 1e-10)
    return None if found is None else found[0]


_ACCOUNTANTS: dict[str, Callable[[float, float, int, float], float | None]] = {
    "PLDPrivacyAccountant": compute_pld,
    "PRVPrivacyAccountant": _state_prv,
    "RDPPrivacyAccountant": compute_rdp,
}
