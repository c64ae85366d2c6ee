"""How long ε takes: `python benchmarks/accounting.py [--json]`.

Groups at σ=5, γ=0.01, 100,000 steps (docs/privacy.md, section 4, G), and uldp-avg at σ=5, T=100, each from nothing;
then one more step of the same run, which is what a run pays after each round.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from silodp.accounting import compute_epsilon, pld, rdp
from silodp.accounting.accountant import ACCOUNTANTS
from silodp.accounting.events import Event, Gaussian, Group, PoissonSampled, RevealedSample
from silodp.accounting.steps import flatten_event

DELTA = 1e-5


def measure() -> list[dict[str, Any]]:
    """Rows (name, accountant, seconds, seconds_next_round, epsilon, grid); grid is None by RDP."""
    runs: list[tuple[str, Event, int]] = [
        (f"group k={k}", Group(k, PoissonSampled(0.01, Gaussian(5.0))), 100_000)
        for k in (1, 2, 4, 8, 16, 32, 64)
    ]
    for q in (1.0, 0.5, 0.1):
        runs.append((f"uldp-avg q={q:g}", PoissonSampled(q, Gaussian(5.0)), 100))
        runs.append((f"uldp-avg q={q:g}, known sample", RevealedSample(q, Gaussian(5.0)), 100))
    return [_row(name, event, count, accountant) for name, event, count in runs for accountant in ACCOUNTANTS]


def _row(name: str, event: Event, count: int, accountant: str) -> dict[str, Any]:
    for cache in (pld._epsilon, pld.compute_losses, rdp._epsilon, rdp.compute_rdp, rdp._sampled_gaussian):
        cache.cache_clear()
    begun = time.perf_counter()
    found = compute_epsilon([(event, count)], DELTA, accountant)
    first = time.perf_counter()
    compute_epsilon([(event, count + 1)], DELTA, accountant)
    then = time.perf_counter()
    return {
        "name": name,
        "accountant": accountant,
        "seconds": round(first - begun, 4),
        "seconds_next_round": round(then - first, 4),
        "epsilon": round(found, 4),
        "grid": pld.choose_grid(flatten_event([(event, count)], for_pld=True) or ())
        if accountant == "pld"
        else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows as one JSON list")
    as_json = parser.parse_args().json
    rows = measure()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        grid = "-" if row["grid"] is None else f"{row['grid']:g}"
        times = f"{row['seconds']:8.3f} s {row['seconds_next_round']:8.3f} s"
        print(f"{row['name']:32} {row['accountant']} {times}  epsilon {row['epsilon']:12.4f}  grid {grid}")


if __name__ == "__main__":
    main()
