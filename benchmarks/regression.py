"""Coverage, size and width of the intervals of `silodp regression`, by simulation: the mathematics alone, no processes.

    python benchmarks/regression.py --seeds 200 --persons 1000 5000 20000 --epsilon 0.5 1 3 --out FILE.json

Persons have 1 to 5 records with a random effect of .5, spread over four silos; each person counts in the silo with
most of their records. Six coefficients: an intercept, four numbers and a rare category; the third number has the
coefficient 0. For survival, rates in four intervals stand in place of the intercept, and prevalence is roughly the
share with an event. "ratio" is the standard deviation of the estimates by that without noise, "coverage" and "size" (of
the test of the coefficient that is 0, at .05) are over coefficients that are not lost, and "lost" is the share that is.
"naive" is how many times farther from the truth (median over seeds) the same iterations come with noise in sufficient
statistics as one would first write them: eight even rounds of score and curvature, half of the budget each, sums over
records, and the bound of a record times the most records of a person.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import norm

from silodp_analytics.regression.families import Family, Logistic, Survival
from silodp_analytics.regression.newton import Fit, Rounds

Floats = NDArray[np.float64]
SILOS = 4
SLOPES = np.array([0.8, -0.5, 0.0, 0.3, 0.6])
DELTA = 1e-5
MOST_RECORDS = 5
NAIVE_ROUNDS = 8
CUTS, HORIZON = (6.0, 12.0, 24.0), 60.0
RATES = np.array([2.0, 1.3, 0.9, 0.6]) / HORIZON
"""Of survival, by interval."""
Z = float(norm.ppf(0.975))


def find_noise(epsilon: float) -> float:
    """Return σ of one Gaussian release that costs ε at δ."""

    def delta(mu: float) -> float:
        return float(norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2))

    low, high = 1e-6, 50.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) < DELTA else (low, middle)
    return 1 / low


def find_intercept(prevalence: float) -> float:
    """Return an intercept with about this share of events."""
    return -0.95 if prevalence == 0.3 else math.log(prevalence / (1 - prevalence)) - 0.4


def make_family(name: str, prevalence: float) -> Family:
    """Return the family; of survival, with the public guess."""
    return Logistic() if name == "logistic" else Survival(cuts=CUTS, horizon=HORIZON, typical=prevalence)


def find_change(rounds: Rounds) -> Floats:
    """Return the matrix from scaled coefficients to those of a category of 0 and 1, whose feature is −1 and 1."""
    found = np.eye(rounds.size)
    found[: rounds.baselines, -1], found[-1, -1] = -1.0, 2.0
    return found


def make(
    stream: np.random.Generator, persons: int, prevalence: float, correlation: float, family: Family
) -> tuple[Any, ...]:
    """Return features (n, 6), outcomes (n,) or (n, 2), and persons (n,), ascending, of the records that count."""
    records = stream.integers(1, MOST_RECORDS + 1, persons)
    person = np.repeat(np.arange(persons), records)
    silo = stream.integers(0, SILOS, len(person))
    common = stream.uniform(-1, 1, (persons, 1))
    own = stream.uniform(-1, 1, (persons, 5))
    share = math.sqrt(correlation)
    base = share * common + math.sqrt(1 - correlation) * own
    x = np.clip(base[person] * 0.7 + stream.normal(0, 0.3, (len(person), 5)), -1, 1)
    x[:, -1] = np.where(own[person, -1] > 0.6, 1.0, -1.0)
    features = np.column_stack([np.ones(len(person)), x])
    slopes = SLOPES * [1, 1, 1, 1, 0.5]  # per unit of the feature, which is −1 and 1 for the category
    effect = features[:, 1:] @ slopes + SLOPES[-1] / 2 + stream.normal(0, 0.5, persons)[person]
    if isinstance(family, Survival):
        outcome = _draw_times(stream, effect + math.log(-math.log1p(-prevalence)))
    else:
        outcome = (stream.random(len(effect)) < expit(find_intercept(prevalence) + effect)).astype(float)
    counts = np.zeros((persons, SILOS), int)
    np.add.at(counts, (person, silo), 1)
    here = silo == counts.argmax(1)[person]
    return features[here], outcome[here], person[here]


def _draw_times(stream: np.random.Generator, log_hazard: Floats) -> Floats:
    """Return event and time (n, 2): hazards that fall from interval to interval, and records that end by chance."""
    edges = np.array([0.0, *CUTS, HORIZON])
    hazard = np.concatenate([[0.0], np.cumsum(RATES * np.diff(edges))])
    needed = stream.exponential(1, len(log_hazard)) / np.exp(log_hazard)
    times = np.where(needed > hazard[-1], np.inf, np.interp(needed, hazard, edges))
    left = stream.uniform(10, 90, len(times))
    return np.column_stack([times <= left, np.minimum(times, left)])


def estimate(rounds: Rounds, data: tuple[Any, ...], noise: float, stream: np.random.Generator) -> Fit:
    """Return the result of all iterations, with noise of a standard deviation in every sum."""
    sums = np.zeros((0, rounds.sum_size))
    theta = np.zeros(rounds.size)
    path = None
    for round_ in range(rounds.iterations):
        total = rounds.make_rows(data[0], data[1], data[2], theta, round_).sum(0)
        sums = np.vstack([sums, total + stream.normal(0, 1, len(total)) * noise])
        path = rounds.follow(sums, noise)
        theta = path.theta
    assert path is not None
    assert path.fit is not None
    return path.fit


def estimate_naively(
    rounds: Rounds, data: tuple[Any, ...], sigma: float, stream: np.random.Generator
) -> Floats:
    """Return the coefficients by the same iterations with noise as one would first add it (see above)."""
    features, outcome, _ = data
    theta, p = np.zeros(rounds.size), rounds.size
    for round_ in range(NAIVE_ROUNDS):
        place = min(round_, rounds.iterations - 2)
        by_g, by_h, _ = rounds.factors(place)
        total = rounds.make_rows(features, outcome, np.arange(len(features)), theta, place).sum(0)
        square = 1.0 + rounds.terms
        corners = rounds.family.list_corners(rounds.terms, is_first=place == 0)
        longest = [
            max(one.score for one in corners) * math.sqrt(square),
            max(one.curvature for one in corners) * square,
        ]
        each = sigma * math.sqrt(2 * NAIVE_ROUNDS) * MOST_RECORDS
        score = total[:p] / by_g + stream.normal(0, each * longest[0], p)
        triangle = total[p : p + rounds.triangle] / by_h
        triangle = (triangle + stream.normal(0, each * longest[1], len(triangle))) / rounds.roots
        curvature = np.zeros((p, p))
        curvature[rounds.places] = triangle
        curvature += np.triu(curvature, 1).T
        theta = theta + np.linalg.lstsq(curvature, score, rcond=None)[0]
    return theta


def summarize(
    rounds: Rounds,
    truth: Floats,
    epsilon: float,
    seeds: int,
    draw: Callable[[int], tuple[Any, ...]],
) -> dict[str, Any]:
    """Return coverage, size, ratios and the share of lost coefficients; `truth` in scaled coefficients."""
    change, zero = find_change(rounds), rounds.baselines + 2
    whole = find_noise(epsilon)
    sigma = whole * math.sqrt((rounds.scales**2).sum())
    plain = Rounds(rounds.size, rounds.terms, rounds.family, 9)
    estimates, exact, naive, errors, lost = [], [], [], [], []
    for seed in range(seeds):
        data = draw(seed)
        exact.append(change @ estimate(plain, data, 0.0, np.random.default_rng(0)).theta)
        fit = estimate(rounds, data, sigma, np.random.default_rng(10**6 + seed))
        estimates.append(change @ fit.theta)
        naive.append(change @ estimate_naively(rounds, data, whole, np.random.default_rng(10**7 + seed)))
        errors.append(np.sqrt(np.diag(change @ fit.covariance @ change.T)))
        lost.append([why is not None for why in fit.find_lost(change)])
    found, without, error, is_lost = map(np.array, (estimates, exact, errors, lost))
    target = change @ truth
    target[zero] = 0.0
    covered = np.abs(found - target) <= Z * error
    significant = np.abs(found[:, zero]) > Z * error[:, zero]
    is_usable = ~is_lost

    def mean(values: Any, usable: Any) -> float | None:
        return round(float(values[usable].mean()), 4) if usable.any() else None

    def distance(values: Any) -> float:
        return float(np.median(np.linalg.norm(np.asarray(values) - target, axis=1)))

    return {
        "coverage": mean(covered, is_usable),
        "size": mean(significant, is_usable[:, zero]),
        "lost": round(float(is_lost.mean()), 4),
        "ratio": round(float((found.std(0) / without.std(0)).mean()), 3),
        "median_error_ratio": round(float((np.median(error, 0) / without.std(0)).mean()), 3),
        "naive": round(distance(naive) / distance(found), 1),
    }


def main() -> None:
    """Simulate, and write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed of the records")
    parser.add_argument("--persons", type=int, nargs="+", default=[1000, 5000, 20000])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.5, 1.0, 3.0])
    parser.add_argument("--prevalence", type=float, nargs="+", default=[0.3])
    parser.add_argument("--correlation", type=float, nargs="+", default=[0.0])
    parser.add_argument(
        "--family", nargs="+", choices=["logistic", "survival"], default=["logistic", "survival"]
    )
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for name, prevalence, correlation in itertools.product(given.family, given.prevalence, given.correlation):
        family = make_family(name, prevalence)
        size = len(family.baselines) + 5
        rounds = Rounds(size, 5, family, given.iterations)
        # The truth: the coefficients at which the mean score over very many persons is zero.
        many = make(np.random.default_rng(9), 400_000, prevalence, correlation, family)
        truth = estimate(Rounds(size, 5, family, 12), many, 0.0, np.random.default_rng(0)).theta
        for persons, epsilon in itertools.product(given.persons, given.epsilon):

            def draw(seed: int) -> tuple[Any, ...]:
                stream = np.random.default_rng(given.first + seed)
                return make(stream, persons, prevalence, correlation, family)  # noqa: B023

            row = {
                "family": name,
                "persons": persons,
                "epsilon": epsilon,
                "prevalence": prevalence,
                "correlation": correlation,
                "seeds": given.seeds,
                **summarize(rounds, truth, epsilon, given.seeds, draw),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    if given.out is not None:
        given.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
