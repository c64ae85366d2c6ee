"""Random allocation beside Poisson sampling: every person in exactly one of b rounds, or in each with probability 1/b.

    python benchmarks/random_allocation.py epsilon
    python benchmarks/random_allocation.py heart embedded creditcard

`epsilon` prints ε at δ = 10⁻⁵ of the same noise. The other tables print what is learned at the same ε against whoever
sees the models (linear models, `uldp-avg`, Gaussian noise): the best of three moves per round (`step` .3, 1 and 3), as
the mean over seeds with its standard error. Persons are also allocated with the noise of Poisson sampling, so that the
part of the sampling itself can be told from that of its ε.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable

import silodp
from partly_known import measure_step
from silodp.accounting import compute_epsilon
from silodp.accounting.calibration import calibrate_noise_multiplier
from silodp.accounting.events import Gaussian, PoissonSampled, RevealedSample, Skellam
from silodp.data.federation import Federation
from silodp_budgets.random_allocation import AllocatedRelease, RandomAllocation
from silodp_experiments import benchmarks

DELTA = 1e-5
STEPS = (0.3, 1.0, 3.0)
CASES = (
    (10, 5, 2.0), (20, 10, 1.0), (20, 10, 2.0), (20, 10, 5.0), (20, 4, 5.0), (20, 2, 5.0), (40, 10, 0.7),
    (100, 10, 2.0), (100, 20, 1.0), (200, 20, 0.8), (1000, 20, 1.0), (1000, 100, 0.6),
)  # fmt: skip
"""Rounds, rounds of an allocation, noise multiplier."""
TABLES: dict[str, Callable[[], Federation]] = {
    "heart": lambda: benchmarks.heart_disease(users=50, normalize="public"),
    "embedded": lambda: silodp.data.embedded(users=100, silos=5),
    "creditcard": lambda: benchmarks.creditcard(users=1000, silos=5, normalize="public"),
}


def print_epsilon() -> None:
    """Print ε of both, for Gaussian noise, for integer noise, and for silos, which see who takes part."""
    print("| T | b | σ | Gaussian noise | integer noise | silos, who see the sample |")
    print("|---|---|---|---|---|---|", flush=True)
    for rounds, b, sigma in CASES:
        cells = []
        for release, accountant in ((Gaussian(sigma), "pld"), (Skellam(sigma, 2**16, 10**4), "rdp")):
            poisson = compute_epsilon([(PoissonSampled(1 / b, release), rounds)], DELTA, accountant)
            allocated = compute_epsilon([(AllocatedRelease(b, release), rounds // b)], DELTA, accountant)
            cells.append(f"{poisson:.3f} → {allocated:.3f}")
        seen = compute_epsilon([(RevealedSample(1 / b, Gaussian(sigma)), rounds)], DELTA)
        allocated = compute_epsilon([(Gaussian(sigma), rounds // b)], DELTA)
        cells.append(f"{seen:.2f} → {allocated:.2f}")
        print(f"| {rounds} | {b} | {sigma:g} | {' | '.join(cells)} |", flush=True)


def print_utility(name: str, seeds: int) -> None:
    """Print what is learned from one federation, for several ε, T and b."""
    federation = TABLES[name]()
    for epsilon, rounds, b in ((1.0, 10, 5), (1.0, 20, 10), (3.0, 20, 10)):
        poisson, allocated = (
            calibrate_noise_multiplier(events, epsilon, DELTA)
            for events in (
                lambda s, b=b, rounds=rounds: [(PoissonSampled(1 / b, Gaussian(s)), rounds)],
                lambda s, b=b, rounds=rounds: [(AllocatedRelease(b, Gaussian(s)), rounds // b)],
            )
        )
        cells = []
        for noise, sampling in (
            (poisson, {"user_sampling": 1 / b}),
            (poisson, {"participation": RandomAllocation(b)}),
            (allocated, {"participation": RandomAllocation(b)}),
        ):
            found = [measure_step(federation, seeds, noise, rounds, step=s, **sampling) for s in STEPS]
            mean, error = max(found)
            cells.append(f"{mean:.3f} ± {error:.3f} (σ {noise:.2f})")
        print(f"| {name} | {epsilon:g} | {rounds} | {b} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the tables of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", choices=["epsilon", *TABLES])
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if "epsilon" in given.tables:
        print_epsilon()
    named = [name for name in given.tables if name in TABLES]
    if named:
        print("| table | ε | T | b | Poisson | allocated, same σ | allocated, same ε |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for name in named:
        print_utility(name, given.seeds)


if __name__ == "__main__":
    main()
