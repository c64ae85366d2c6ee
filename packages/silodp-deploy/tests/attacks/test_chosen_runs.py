"""Attacked: a limit on ε over several runs, by somebody who sees each model before choosing the next run.

Two kinds of runs cost the same ε at δ, one by many small losses and one by rare large ones. Whoever sees the loss so
far picks the kind that is more likely to bring it beyond ε. Composing all charges and refusing at ε admits every such
path, and the game ends above ε with more than δ. A filter must not: it is what the lifetime limit of a silo rests on.

The game is solved exactly, on privacy loss distributions: the value of a state is the largest expectation of
(1 − e^(ε−L))₊ that the attacker can still reach, and that of the first state is the true δ at ε.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import optimize, signal

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.cohort import Cohort, CohortRun, create_cohort
from silodp.accounting.events import Event, Gaussian, PoissonSampled, RevealedSample, SelfComposed
from silodp.accounting.filters import DEFAULT_BOUNDS, Filter
from silodp.accounting.ledger import Ledger
from silodp.accounting.pld import compose_steps
from silodp.accounting.views import ADVERSARIES
from silodp.errors import SilodpError
from silodp_deploy.lifetime import LifetimeLedger

DELTA = 1e-5
GRID, SPAN = 2e-3, 16.0
Admits = Callable[[Counter[Event]], bool]
Array = NDArray[np.float64]


@cache
def find_noise(sampling: float, known: bool, rounds: int, runs: int, limit: float) -> Event:
    """Return the round with the least noise of which so many runs fit the limit by the accountant."""

    def make(log_noise: float) -> Event:
        release = Gaussian(float(np.exp(log_noise)))
        if sampling == 1:
            return release
        return RevealedSample(sampling, release) if known else PoissonSampled(sampling, release)

    def excess(log_noise: float) -> float:
        return compute_epsilon([(make(log_noise), rounds * runs)], DELTA) - limit * (1 - 5e-4)

    return make(float(optimize.brentq(excess, np.log(0.3), np.log(60), xtol=1e-5)))


def transition(event: Event, rounds: int, direction: int) -> tuple[Array, float]:
    """Return the probabilities of a run's losses on the grid of the game, and that of an infinite loss."""
    losses = compose_steps(((event, rounds),), GRID)[direction]
    half = round(SPAN / GRID)
    places = np.clip(losses.lowest + np.arange(len(losses.probabilities)), -half, half) + half
    return np.bincount(places, losses.probabilities, 2 * half + 1), losses.infinite


def play(options: list[tuple[Event, int]], limit: float, admits: Admits, direction: int) -> float:
    """Return the true δ at the limit for an attacker who chooses runs one by one, and when to stop."""
    steps = [transition(*option, direction) for option in options]
    half = round(SPAN / GRID)
    stopped = np.maximum(0.0, -np.expm1(limit - np.arange(-half, half + 1) * GRID))

    @cache
    def solve(first: int, second: int) -> Array:
        value = stopped
        for more, (probabilities, infinite) in zip(((1, 0), (0, 1)), steps, strict=True):
            taken = (first + more[0], second + more[1])
            charged = Counter({event: rounds * n for (event, rounds), n in zip(options, taken, strict=True)})
            if admits(charged):
                after = np.concatenate([np.full(half, solve(*taken)[0]), solve(*taken), np.ones(half)])
                reached = signal.fftconvolve(after, probabilities[::-1], mode="valid") + infinite
                value = np.maximum(value, reached)
        return value

    return float(solve(0, 0)[half])


# Two kinds of rounds, each (q, whether the sample is known, rounds of a run, runs that fit the limit), the
# limit, and what it really costs by the accountant's rule, in δ.
GAMES = {
    "sampled at .3 or at .001": ((0.3, False, 10, 6), (0.001, False, 500, 6), 2.0, 1.98),
    "everyone or a known sample": ((1.0, False, 5, 6), (0.01, True, 5, 6), 2.0, 1.78),
    "everyone or a larger known sample": ((1.0, False, 5, 6), (0.1, True, 5, 6), 4.0, 1.05),
}
ANY_GAME = [pytest.param("sampled at .3 or at .001", marks=pytest.mark.slow), *list(GAMES)[1:]]
Options = list[tuple[Event, int]]


@pytest.fixture(params=ANY_GAME)
def game(request: pytest.FixtureRequest) -> tuple[Options, float]:
    first, second, limit, _ = GAMES[request.param]
    return [(find_noise(*one, limit), one[2]) for one in (first, second)], limit


def find_delta(options: Options, limit: float, admits: Admits) -> float:
    return max(play(options, limit, admits, direction) for direction in (0, -1))


@pytest.mark.parametrize("name", ANY_GAME)
def test_composing_and_refusing_at_the_limit_is_no_limit(name: str) -> None:
    """The rule of policies without a filter; with it the attacker gains, so the game can tell rules apart."""
    first, second, limit, excess = GAMES[name]
    options = [(find_noise(*one, limit), one[2]) for one in (first, second)]
    found = find_delta(options, limit, lambda charged: compute_epsilon(charged.items(), DELTA) <= limit)
    assert found == pytest.approx(excess * DELTA, rel=0.02)


@pytest.mark.parametrize(
    ("filter_bounds", "most"),
    [
        (("order-4",), 0.16),
        (("order-6",), 0.16),
        (("order-9",), 0.19),
        (("gaussian",), 0.16),
        # The first release is the list, of which there are copies.
        (("plan",), 0.99),
        (DEFAULT_BOUNDS, 0.45),
    ],
)
def test_a_filter_holds_whatever_is_chosen(
    game: tuple[Options, float], filter_bounds: tuple[str, ...], most: float
) -> None:
    options, limit = game
    rule = Filter(DELTA, filter_bounds)
    assert find_delta(options, limit, lambda charged: rule.admits(charged, limit)) <= most * DELTA


@pytest.mark.parametrize("copies", [(3, 2), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize(("filter_bounds", "most"), [(("plan",), 1.0), (DEFAULT_BOUNDS, 0.5)])
def test_copies_of_a_list_hold_whatever_is_chosen(
    game: tuple[Options, float], copies: tuple[int, int], filter_bounds: tuple[str, ...], most: float
) -> None:
    """Each list has so many runs of the first kind, and of the second."""
    options, limit = game
    plan = {event: n * rounds for n, (event, rounds) in zip(copies, options, strict=True) if n}
    rule = Filter(DELTA, filter_bounds, plan)
    assert find_delta(options, limit, lambda charged: rule.admits(charged, limit)) <= most * DELTA


@pytest.mark.parametrize("name", ANY_GAME)
@pytest.mark.parametrize("filter_bounds", [(), DEFAULT_BOUNDS], ids=["list", "filter"])
def test_the_limit_of_a_silo_holds_by_its_filter(filter_bounds: tuple[str, ...], name: str) -> None:
    """The same game through the silo's own rule; without a filter it loses, as the first test says."""
    first, second, limit, excess = GAMES[name]
    options = [(find_noise(*one, limit), one[2]) for one in (first, second)]
    runs = [SelfComposed(event, rounds) for event, rounds in options]

    def admits(charged: Counter[Event]) -> bool:
        counts = [charged[event] // rounds for event, rounds in options]
        charges = [run for run, n in zip(runs, counts, strict=True) for _ in range(n)]
        ledger = Ledger(None, DELTA, run="1")
        for number, event in enumerate(charges[1:]):
            ledger.charge(number, 0, dict.fromkeys(ADVERSARIES, event))
        lifetime = LifetimeLedger(DELTA, {"released": limit}, {"1": ledger}, filter_bounds)
        return lifetime.find_exceeded({"released": charges[0]}) is None

    found = find_delta(options, limit, admits)
    assert found <= 0.45 * DELTA if filter_bounds else found == pytest.approx(excess * DELTA, rel=0.02)


def test_the_limit_of_a_cohort_holds_by_its_filter(game: tuple[Options, float], tmp_path: Path) -> None:
    """The same games through the file of a cohort; its plan is the first run, of the first kind."""
    options, limit = game
    create_cohort(tmp_path / "cohort", {"released": limit}, DELTA)
    first, rounds = options[0]
    cohort = Cohort(tmp_path / "cohort")
    cohort.reserve(CohortRun("1", "1", "run", "user", {"released": {first: rounds}}))

    def admits(charged: Counter[Event]) -> bool:
        try:
            # In the place of the first run: all that is charged together, under the plan of the first run.
            cohort.check(CohortRun("1", "1", "run", "user", {"released": charged}))
        except SilodpError:
            return False
        return True

    assert find_delta(options, limit, admits) <= 0.45 * DELTA
    assert admits(Counter({first: 3 * rounds}))


def test_the_default_filter_leaves_choices(game: tuple[Options, float]) -> None:
    """A rule that admits nothing would hold as well: here at least three runs of the first kind fit."""
    options, limit = game
    (first, rounds), _ = options
    assert Filter(DELTA).admits({first: 3 * rounds}, limit)


def test_the_game_without_a_choice_costs_what_the_accountant_says(game: tuple[Options, float]) -> None:
    """The game's own error: six runs of one kind cost δ at the limit, up to its grid."""
    options, limit = game
    for event, rounds in options:

        def admits(charged: Counter[Event], event: Event = event, rounds: int = rounds) -> bool:
            return +charged <= Counter({event: 6 * rounds})

        assert find_delta(options, limit, admits) == pytest.approx(DELTA, rel=0.03)
