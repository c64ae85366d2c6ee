"""How long ε takes: `python benchmarks/accounting.py [--json]`.

Groups at σ=5, γ=0.01, 100,000 steps (SPEC section 1, G), and uldp-avg at σ=5, T=100, each from nothing; then
one more step of the same run, which is what a run pays after each round. Then what it takes to calibrate records with
budgets of their own (rPDP-FL, heart_disease: σ=12.25, τ=50, λ=1, T=15, δ=1e-3): the curve, 10⁶ distinct budgets on it,
and the papers' calibrations on 6,000 (Pareto, .5 to 5); binary search on 200 of them, scaled.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from silodp.privacy import accounting, losses, renyi
from silodp.privacy.accounting import epsilon, grid_for
from silodp.privacy.events import Event, Gaussian, Group, KnownSample, PoissonSampled
from silodp.privacy.personal import binary_search, scf, two_stage_curve

DELTA = 1e-5


def measure() -> list[dict[str, Any]]:
    """Rows (name, accountant, seconds, seconds_next_round, epsilon, grid); grid is None by RDP."""
    runs: list[tuple[str, Event, int]] = [
        (f"group k={k}", Group(k, PoissonSampled(0.01, Gaussian(5.0))), 100_000)
        for k in (1, 2, 4, 8, 16, 32, 64)
    ]
    for q in (1.0, 0.5, 0.1):
        runs.append((f"uldp-avg q={q:g}", PoissonSampled(q, Gaussian(5.0)), 100))
        runs.append((f"uldp-avg q={q:g}, known sample", KnownSample(q, Gaussian(5.0)), 100))
    return [
        _row(name, event, count, accountant) for name, event, count in runs for accountant in ("pld", "rdp")
    ]


def _row(name: str, event: Event, count: int, accountant: accounting.Accountant) -> dict[str, Any]:
    for cache in (accounting._epsilon, losses.of_step, renyi.of_step, renyi._sampled_gaussian):
        cache.cache_clear()
    begun = time.perf_counter()
    found = epsilon([(event, count)], DELTA, accountant)
    first = time.perf_counter()
    epsilon([(event, count + 1)], DELTA, accountant)
    then = time.perf_counter()
    return {
        "name": name,
        "accountant": accountant,
        "seconds": round(first - begun, 4),
        "seconds_next_round": round(then - first, 4),
        "epsilon": round(found, 4),
        "grid": grid_for(event, count) if accountant == "pld" else None,
    }


HEART = {"noise_multiplier": 12.25, "local_steps": 50, "client_sampling": 1.0, "rounds": 15, "delta": 1e-3}
SEARCHED = 200


def calibrate() -> list[dict[str, Any]]:
    """Rows (name, seconds, note), all on one machine in one run: compare their ratios."""
    generator = np.random.default_rng(0)
    pareto = 0.5 / (1 - 0.9 * generator.random(6000))  # shape 1, bounded to [.5, 5]
    many = generator.uniform(0.1, 10, 10**6)
    curve, seconds = _timed(lambda: two_stage_curve(**HEART))
    rows = [{"name": "curve of 2,048 points, rdp", "seconds": seconds, "note": ""}]
    met, seconds = _timed(lambda: curve.met_by(many))
    worst = float((curve.spent(met) / many).max())
    rows.append(
        {"name": "10^6 distinct budgets", "seconds": seconds, "note": f"cost/budget at most {worst:.4f}"}
    )
    fitted, seconds = _timed(lambda: scf(pareto, **HEART))
    note = f"{fitted.violations} overspend, cost/budget at most {fitted.worst:.2f}"
    rows.append({"name": "SCF, 6,000 budgets", "seconds": seconds, "note": note})
    _, seconds = _timed(lambda: binary_search(pareto[:SEARCHED], **HEART))
    note = f"{seconds:.1f} s for {SEARCHED}, scaled"
    rows.append({"name": "binary search, 6,000 budgets", "seconds": seconds * 6000 / SEARCHED, "note": note})
    three = generator.choice([0.1, 1.0, 5.0], 6000)
    few, seconds = _timed(lambda: two_stage_curve(**HEART, accountant="pld", budgets=three))
    note = f"{len(few.parameters)} points, met to 1e-3"
    rows.append({"name": "pld curve, three budgets", "seconds": seconds, "note": note})
    coarse, seconds = _timed(lambda: two_stage_curve(**HEART, accountant="pld", budgets=pareto))
    note = f"{len(coarse.parameters)} points, next one up is charged"
    rows.append({"name": "pld curve, 6,000 budgets", "seconds": seconds, "note": note})
    return rows


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    found = work()
    return found, round(time.perf_counter() - begun, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows as one JSON list")
    as_json = parser.parse_args().json
    calibrations = calibrate()
    rows = measure()
    if as_json:
        print(json.dumps(rows + calibrations, indent=1))
        return
    for row in calibrations:
        print(f"{row['name']:32}     {row['seconds']:8.3f} s  {row['note']}")
    for row in rows:
        grid = "-" if row["grid"] is None else f"{row['grid']:g}"
        times = f"{row['seconds']:8.3f} s {row['seconds_next_round']:8.3f} s"
        print(f"{row['name']:32} {row['accountant']} {times}  epsilon {row['epsilon']:12.4f}  grid {grid}")


if __name__ == "__main__":
    main()
