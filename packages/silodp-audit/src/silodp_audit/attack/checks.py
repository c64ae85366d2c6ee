"""Tests of the noise, the shifts and the samples of a canary run, from what its adversaries see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import LazyModule
from silodp.accounting.events import Composed, select_kind
from silodp_audit.attack.canary_run import CanaryRun
from silodp_audit.attack.noise import NoiseTest, Samples, run_noise_tests
from silodp_audit.attack.scores import Signal
from silodp_audit.attack.views import NotSeen, Observation, find_reach

stats = LazyModule("scipy.stats")

Array = NDArray[np.float64]
Checks = tuple[tuple[NoiseTest, ...], tuple[str, ...]]
"""The tests, and what could not be tested, a sentence each."""

_LEAST_SHIFT = 0.5
"""Share of the charged reach that members move a sum by at least; less of it is a canary that does not arrive."""


def run_checks(observation: Observation, level: float) -> Checks:
    """Test noise, shifts and samples against what was charged.

    Args:
        observation: What was seen of a canary run.
        level: The probability that any test of right code fails.
    """
    signal = Signal.of(observation.condition("released")[0])
    reach = None if signal is None else find_reach(observation, signal)
    if signal is None or reach is None:
        return (), ("noise against a charged constant: how far a unit moves a sum is not known here.",)
    parts = _collect_noise(observation, _find_sum_variance(observation, signal) ** 0.5 * reach)
    gaps = () if parts else ("the noise of sums: it cannot be told apart here.",)
    tests = [*run_noise_tests(parts, level=level / 2)] if parts else []
    try:
        shifts, samples = _compare_shifts(observation, signal, reach, level / 4)
    except NotSeen as unseen:
        return tuple(tests), (*gaps, f"how far members move sums: {unseen}.")
    tests += shifts
    if samples is not None:
        tests += run_noise_tests({}, samples=samples, level=level / 4)
    return tuple(tests), gaps


def _find_sum_variance(observation: Observation, signal: Signal) -> float:
    """Return the variance of the noise in the sum of all silos, in units of the squared reach.

    It is what was charged, unless steps of one release are charged with different noise: whoever is given the local
    models between the steps sees one silo's noise in them, and the sum has that of all.
    """
    event, spec = observation.condition("released")[0], observation.canary_run.spec
    parts = [Signal.of(part) for part in event.parts] if isinstance(event, Composed) else []
    steps = {round(part.variance / part.draws, 9) for part in parts if part is not None}
    if len(steps) < 2:
        return signal.variance
    share = Signal.of(
        select_kind(spec.method.dp_event(replace(spec.views()["released"], sees_shares=True)), 0)
    )
    return signal.variance if share is None else share.variance * len(observation.names)


def _collect_noise(observation: Observation, std: float) -> dict[str, Array]:
    """Return what noise there is along directions that nobody moves, in charged standard deviations, by its name.

    Args:
        observation: What was seen.
        std: The standard deviation that was charged for the sum.
    """
    spec, directions = observation.canary_run.spec, observation.canaries.directions
    quiet = np.concatenate([directions.outsiders, directions.spares])
    rounds, shares = observation.rounds_joined, observation.shares
    # Where silos add noise by themselves, that of the silos with canaries is charged; else that of all together.
    carrying = observation.canaries.placement.count_silos(len(observation.names))
    each_alone, joined = spec.bounds is None, observation.canary_run.joined[rounds].sum(axis=1)
    if shares is None or observation.has_kinds:
        # A sum that is no sum of noise, since every share is seen in it, has a noise of its own kind.
        if spec.views()["released"].sees_shares or (each_alone and observation.has_kinds) or not len(rounds):
            return {}
        stds = std * np.sqrt(joined / carrying if each_alone else np.ones(len(rounds)))
        return {"the sum": observation.total[rounds][:, quiet] / stds[:, None]}
    # In blocks, each silo's noise is that of its own block; a record moves that of its silo alone.
    adding = carrying if each_alone or observation.canaries.blocks > 1 else len(shares)
    share_std = std / np.sqrt(adding)
    # Silos that do not join a round send zeros, and tests of several silos are of the same rounds.
    all_joined = bool(observation.canary_run.joined.all())
    return {
        f"silo {place}": share[rounds][:, quiet] / share_std
        for place, (name, share) in enumerate(shares.items())
        if len(rounds)
        and (name == observation.target or (all_joined and observation.canaries.blocks in (1, carrying)))
    }


def _compare_shifts(
    observation: Observation, signal: Signal, reach: float, level: float
) -> tuple[list[NoiseTest], Samples | None]:
    """Compare how far members move sums with what was charged, and return the sample where a silo knows it."""
    spec, directions = observation.canary_run.spec, observation.canaries.directions
    dense = len(directions.members) - directions.canaries
    total, drawn, samples = observation.total[observation.rounds_joined], None, None
    due = reach * signal.mean
    silo = Signal.of(observation.events["silo"])
    if spec.method.samples_users and spec.aggregator.sampled_by == "silos" and silo is not None:
        drawn = observation.canary_run.silo_sample(observation.curious, silo.coin)
        samples = Samples(drawn[None], silo.coin, spec.method.participation_rule)
        due = due / silo.coin
    moved = total[:, directions.members] / due
    inside = np.ones(moved.shape, bool) if drawn is None else drawn[:, directions.members]
    first = slice(None, directions.canaries)
    # Each test has its part of the level.
    part = level / 3
    tests = [compare_mean("shift of members", moved[:, first][inside[:, first]], 1.0, _LEAST_SHIFT, part)]
    if (
        spec.aggregator.weights_privately
    ):  # such weights may be below 1: only more than was charged is an error
        tests = [compare_mean("shift of members", moved[:, first][inside[:, first]], 1.0, 0.0, part)]
    if dense:
        last = slice(directions.canaries, None)
        tests.append(compare_mean("shift of members, dense", moved[:, last][inside[:, last]], 1.0, 0.0, part))
    if drawn is not None:
        tests.append(compare_mean("shift of members not in the sample", moved[~inside], 0.0, 0.0, part))
    return tests, samples


def compare_mean(test: str, values: Array, expected: float, least: float, level: float) -> NoiseTest:
    """Compare the mean of values (n,) with an interval from `least` to `expected`.

    Args:
        test: What is tested.
        values: Independent values, of any distribution with a variance.
        expected: What was charged.
        least: The smallest mean that is accepted.
        level: The probability that the test of right code fails.
    """
    if len(values) < 2:
        return NoiseTest(test, 0.0, 0.0, 0.0, expected, False)
    width = float(stats.t.isf(level / 2, len(values) - 1)) * float(values.std(ddof=1)) / np.sqrt(len(values))
    mean = float(values.mean())
    # The least relative slack: without any noise the mean is exact up to rounding.
    low, high = float(mean - width - 1e-6 * abs(mean)), float(mean + width + 1e-6 * abs(mean))
    return NoiseTest(test, mean, low, high, expected, bool(low <= expected and high >= least))


def compare_count(test: str, found: int, expected: int) -> NoiseTest:
    """Compare a number of rounds with the number that is right."""
    return NoiseTest(test, found, found, found, expected, found == expected)


def check_whole_updates(inside: CanaryRun, outside: CanaryRun, level: float) -> Checks:
    """Test the noise of two runs, with and without a person who turns every silo's update.

    Args:
        inside: The run with the person.
        outside: The run without.
        level: The probability that any test of right code fails.
    """
    spec = outside.spec
    signal = Signal.of(spec.round_events()["released"])
    if signal is None or spec.bounds is None or outside.sums is None or inside.sums is None:
        return (), ("noise against a charged constant: how far a unit moves a sum is not known here.",)
    # Two points of a ball are two clips apart, in each silo.
    reach = 2 * spec.bounds.clip * len(spec.names)
    std, shares = signal.variance**0.5 * reach, outside.shares
    # Rounds are trials: the second coordinate of all of them is one long row of noise.
    parts = (
        {"the sum": outside.sums[:, 1][None] / std}
        if shares is None
        else {
            f"silo {s}": one[:, 1][None] / (std / np.sqrt(len(shares)))
            for s, one in enumerate(shares.values())
        }
    )
    # As many rounds as are in both runs; each difference is of two independent rounds.
    moved = (inside.sums[:, 0] - outside.sums[:, 0]) / reach
    return (
        *run_noise_tests(parts, level=level / 2),
        compare_mean("shift of members", moved, 1.0, 0.5, level / 2),
    ), ()
