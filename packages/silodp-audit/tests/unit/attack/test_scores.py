"""Scores are the likelihood ratios of charged events, in closed form, and the best linear attack."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from silodp.accounting import events
from silodp_audit.attack.scores import Signal, score_whitened

GAUSSIAN = events.Gaussian(2.0)


@pytest.mark.parametrize(
    ("event", "signal"),
    [
        (GAUSSIAN, Signal(4.0)),
        (events.Skellam(2.0, 4096, 10), Signal(4.0)),
        (events.PoissonSampled(0.3, GAUSSIAN), Signal(4.0, 1, 0.3)),
        (events.RevealedSample(0.3, GAUSSIAN), Signal(4.0, 1, 1.0, 0.3)),
        (events.CorrelatedReleases(events.Gaussian(9.0), GAUSSIAN), Signal(4.0)),
        # Three steps add up: three times the variance, three coins.
        (events.SelfComposed(events.PoissonSampled(0.2, GAUSSIAN), 3), Signal(12.0, 3, 0.2)),
        (events.Group(4, events.PoissonSampled(0.2, GAUSSIAN)), Signal(4.0, 4, 0.2)),
        (events.Composed((GAUSSIAN, events.Gaussian(1.0))), Signal(5.0, 2)),
        (events.NonPrivate("no noise"), None),
        (events.Gaussian(0.0), None),
        (events.Gaussian(float("inf")), None),
    ],
)
def test_a_signal_follows_from_the_charged_event(event: events.Event, signal: Signal | None) -> None:
    found = Signal.of(event)
    assert (found is None) == (signal is None)
    if found is not None and signal is not None:
        assert vars(found) == pytest.approx(vars(signal))


@pytest.mark.parametrize("signal", [Signal(4.0), Signal(4.0, 1, 0.3), Signal(2.0, 5, 0.2)])
def test_a_score_is_the_log_likelihood_ratio(signal: Signal) -> None:
    observed = np.random.default_rng(0).normal(size=(3, 7))
    draws = np.arange(signal.draws + 1)
    chance = stats.binom.pmf(draws, signal.draws, signal.rate)
    inside = (chance * stats.norm.pdf(observed[..., None] - draws * signal.shift)).sum(-1)
    expected = np.log(inside / stats.norm.pdf(observed)).sum(0)
    assert signal.score(observed) == pytest.approx(expected, abs=1e-9)


def test_rounds_whose_coin_kept_a_canary_out_say_nothing() -> None:
    observed = np.random.default_rng(0).normal(size=(3, 7))
    known = np.zeros((3, 7), bool)
    known[1] = True
    signal = Signal(4.0, coin=0.3)
    assert signal.score(observed, known) == pytest.approx(signal.score(observed[1:2]))


def test_the_whitened_score_leans_on_the_part_without_noise() -> None:
    random = np.random.default_rng(0)
    noise = random.normal(size=(3, 2000)) * np.array([1.0, 1.0, 0.01])[:, None]
    noise[:, :50] += 0.1
    score = score_whitened(noise[:, :100], np.ones(3), noise[:, 100:])
    # A shift of 0.1 under noise of 0.01 is ten standard deviations; summed without weights it would be 0.2.
    assert score[:50].min() > score[50:].max()
