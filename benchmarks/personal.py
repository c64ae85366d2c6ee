"""Records with budgets of their own (rPDP-FL): `python benchmarks/personal.py`.

At the settings of the paper's heart_disease runs (σ=12.25, τ=50, λ=1, T=15, δ=1e-3): the exact curve and 10⁶ distinct
budgets on it, beside the papers' calibrations on 6,000 (Pareto, .5 to 5; binary search on 200 of them, scaled); how
many records Simulation-CurveFitting lets overspend, over σ; and a whole run on heart_disease.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silodp import train
from silodp.config.resolve import load_config
from silodp.errors import SilodpError
from silodp_budgets.budget_distributions import mixture, pareto, three_levels
from silodp_budgets.two_stage import TwoStage, compute_two_stage_curve, fit_scf, search_probabilities
from timing import show_help

ROUNDS = 15
HEART: dict[str, Any] = {"local_steps": 50, "client_sampling": 1.0, "delta": 1e-3}
SIGMA, SEARCHED = 12.25, 200
EXAMPLE = Path(__file__).parents[1] / "examples" / "heart_disease_personal.toml"


def calibrations() -> list[dict[str, Any]]:
    """Rows (name, seconds, note), all on one machine in one run: compare their ratios."""
    run = TwoStage(SIGMA, **HEART)
    generator = np.random.default_rng(0)
    asked = 0.5 / (1 - 0.9 * generator.random(6000))  # Pareto of shape 1, bounded to [.5, 5]
    many = generator.uniform(0.1, 10, 10**6)
    curve, seconds = _timed(lambda: compute_two_stage_curve(run, ROUNDS))
    rows = [{"name": "curve of 2,048 points, rdp", "seconds": seconds, "note": ""}]
    met, seconds = _timed(lambda: curve.parameter_for(many))
    worst = float((curve.spent(met) / many).max())
    rows.append(
        {"name": "10^6 distinct budgets", "seconds": seconds, "note": f"cost/budget at most {worst:.4f}"}
    )
    fitted, seconds = _timed(lambda: fit_scf(run, ROUNDS, asked))
    overspent = run.bound_epsilon(fitted, ROUNDS) / asked
    note = f"{int((overspent > 1).sum())} overspend, cost/budget at most {overspent.max():.2f}"
    rows.append({"name": "SCF, 6,000 budgets", "seconds": seconds, "note": note})
    _, seconds = _timed(lambda: search_probabilities(run, ROUNDS, asked[:SEARCHED]))
    note = f"{seconds:.1f} s for {SEARCHED}, scaled"
    rows.append({"name": "binary search, 6,000 budgets", "seconds": seconds * 6000 / SEARCHED, "note": note})
    three = generator.choice([0.1, 1.0, 5.0], 6000)
    few, seconds = _timed(lambda: compute_two_stage_curve(run, ROUNDS, accountant="pld", budgets=three))
    note = f"{len(few.parameters)} points, met to 1e-3"
    rows.append({"name": "pld curve, three budgets", "seconds": seconds, "note": note})
    coarse, seconds = _timed(lambda: compute_two_stage_curve(run, ROUNDS, accountant="pld", budgets=asked))
    note = f"{len(coarse.parameters)} points, next one up is charged"
    rows.append({"name": "pld curve, 6,000 budgets", "seconds": seconds, "note": note})
    return rows


def violations() -> list[dict[str, Any]]:
    """Rows (σ, law, conversion, share of records that overspend, the worst cost in units of its budget)."""
    rows: list[dict[str, Any]] = []
    for sigma in (1.0, 3.0, 6.0, SIGMA, 20.0):
        for law in (three_levels, pareto, mixture):
            asked = law(6000, np.random.default_rng(0))
            for conversion in ("paper", "tight"):
                row = {"sigma": sigma, "budgets": law.__name__, "conversion": conversion}
                try:
                    run = TwoStage(sigma, **HEART)
                    overspent = run.bound_epsilon(fit_scf(run, ROUNDS, asked, conversion), ROUNDS) / asked
                except SilodpError:
                    rows.append(row | {"overspend": "no curve fits"})
                    continue
                rows.append(
                    row | {"overspend": float((overspent > 1).mean()), "worst": float(overspent.max())}
                )
    return rows


def whole_run() -> list[dict[str, Any]]:
    """Seconds of training as examples/heart_disease_personal.toml has it, by both accountants; loading left out."""
    rows = []
    for accountant in ("rdp", "pld"):
        config = load_config(EXAMPLE, [f"accountant={accountant}"])
        federation = config.load_federation()
        task, method = config.build_task(federation), config.method
        began, used = time.perf_counter(), time.process_time()
        result = train(federation, task, method, **config.settings())
        rows.append(
            {
                "name": f"rpdp on heart_disease, 15 rounds × 50 steps, {accountant}",
                "wall": time.perf_counter() - began,
                "cpu": time.process_time() - used,
                "epsilon": result.epsilon,
            }
        )
    return rows


def measure() -> list[dict[str, Any]]:
    """All of it."""
    return calibrations() + violations() + whole_run()


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    found = work()
    return found, round(time.perf_counter() - begun, 4)


if __name__ == "__main__":
    show_help(__doc__)
    torch.set_num_threads(1)
    for row in measure():
        print(
            "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
            flush=True,
        )
