"""One round of the lattice weighting, all parties in one process: `python benchmarks/lattice.py [--json] [NAME ...]`.

`--table` prints what a round costs over numbers of parameters and persons, as Markdown.

Vectors are dense and random, of full length C/g; counts are zipf over users and silos, and a pair without records has
no row. Seconds of the processor and of the wall, the making of the vectors left out; every result is checked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silodp_private.crypto.lattice.noise import scale_noise
from silodp_private.crypto.lattice.parameters import LatticeParameters, search_parameters
from silodp_private.crypto.lattice.scheme import LatticeServer, LatticeSilo

CASES: dict[str, dict[str, Any]] = {
    "small": {"dimension": 20_000, "users": 100, "count_cap": 50},
    "small-many-records": {"dimension": 20_000, "users": 100, "count_cap": 400},
    "small-dense": {"dimension": 20_000, "users": 100, "count_cap": 50, "dense": True},
    "large": {"dimension": 10**6, "users": 1_000, "count_cap": 50},
    "large-dense": {"dimension": 10**6, "users": 1_000, "count_cap": 50, "dense": True},
}
SIZES = {
    f"d = 10^{e}, U = {users}": {"dimension": 10**e, "users": users, "count_cap": 50}
    for e in (3, 4, 5, 6)
    for users in (10, 100, 1_000)
}
"""Of the table; records and silos as in the cases without `dense`."""
BY_DEFAULT = ("small", "small-many-records", "small-dense", "large")


def zipf_counts(parameters: LatticeParameters, records: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Counts (S, U): records per user ∝ rank^−½, silos of a user ∝ rank^−2 in a random order."""
    users, silos = parameters.users, parameters.silos
    of_user = np.arange(1, users + 1) ** -0.5
    of_silo = np.arange(1, silos + 1) ** -2.0
    per_user = rng.multinomial(records, of_user / of_user.sum())
    counts = [rng.permutation(rng.multinomial(n, of_silo / of_silo.sum())) for n in per_user]
    return np.asarray(np.minimum(np.array(counts).T, parameters.count_cap), np.int64)


class Clock:
    """Seconds of processor and wall, by phase."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, sign: int = 1) -> Iterator[None]:
        """Adds what happens inside to the phase, or takes it away."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.cpu[name] = self.cpu.get(name, 0.0) + sign * (time.process_time() - cpu)
        self.wall[name] = self.wall.get(name, 0.0) + sign * (time.perf_counter() - wall)


def vectors(
    base: NDArray[np.int32],
    owners: NDArray[np.int64],
    factors: NDArray[np.uint64],
    expected: NDArray[np.uint64],
    clock: Clock,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """Chunks of one row; each is added to what the server must find. Its time is not the silo's."""
    for owner in owners:
        with clock.phase("silos", -1):
            row = np.roll(base, 137 * owner)
            expected += row.astype(np.int64).view(np.uint64) * factors[owner]
        yield np.array([owner]), row[None]


def round_of(dense: bool = False, **constants: Any) -> dict[str, Any]:
    """One round; a row of figures."""
    rng, clock, system = np.random.default_rng(1), Clock(), os.times().system
    parameters = search_parameters(
        silos=5, noise_multiplier=5.0, attempts=100, epsilon=10.0, delta=1e-5, **constants
    )
    users, silos, dimension = parameters.users, parameters.silos, parameters.dimension
    counts = zipf_counts(parameters, 25 * users, rng)
    weights = rng.integers(0, 1 << parameters.weight_bits, users).astype(np.uint64)
    with clock.phase("server request"):
        server = LatticeServer(parameters)
        silo_shares = rng.integers(0, 1 << 62, users).astype(np.uint64)
        request = server.request(weights - silo_shares, b"benchmark")
    digits, total, expected = parameters.digits, parameters.digits.zero(), np.zeros(dimension, np.uint64)
    seen: set[bytes] = set()

    def claim(seed: bytes) -> bool:
        fresh = seed not in seen
        seen.add(seed)
        return fresh

    for s in range(silos):
        seen.clear()
        reals = rng.normal(size=dimension)
        base = np.trunc(reals * (parameters.clip_units / np.linalg.norm(reals))).astype(np.int32)
        noise = scale_noise(
            np.rint(rng.normal(0, 5 * 2**17 / silos**0.5, dimension)).astype(np.int64),
            parameters.noise_shift,
            rng,
        )
        expected += noise.view(np.uint64)
        present = np.arange(users) if dense else np.flatnonzero(counts[s])
        rows = vectors(base, present, weights * counts[s].astype(np.uint64), expected, clock)
        with clock.phase("silos"):
            answer = LatticeSilo(parameters, claim).answer(
                request, b"benchmark", counts[s], rows, silo_shares, noise
            )
        with clock.phase("server sum"):
            total = digits.add(total, digits.from_bytes(digits.to_bytes(answer)))
    with clock.phase("server decrypt"):
        found = server.decrypt(total)
    rest = np.uint64(64 - parameters.plaintext_bits)
    exact = bool((((expected << rest).view(np.int64) >> rest.astype(np.int64)) == found).all())
    pairs = int(silos * users if dense else np.count_nonzero(counts))
    lattice = f"{parameters.ring_size}/{parameters.modulus_bits}/{parameters.plaintext_bits}"
    cpu, wall = sum(clock.cpu.values()), sum(clock.wall.values())
    return {
        "exact": exact,
        "d": dimension, "users": users, "silos": silos, "count_cap": parameters.count_cap, "pairs": pairs,
        "lattice": f"{lattice} w={parameters.limb_bits} C/g=2^{parameters.clip_units.bit_length() - 1}",
        "users_a_polynomial": parameters.packed,
        "log2_tv": round(parameters.log2_tv, 1), "planning": round(parameters.planning_bits, 2),
        "bytes_up_per_silo": parameters.digits.size, "bytes_down_per_silo": parameters.bytes_down,
        "cpu": round(cpu, 2), "wall": round(wall, 2),
        "cpu_in_system": round(os.times().system - system, 2),
        "cpu_by_phase": {name: round(value, 3) for name, value in clock.cpu.items()},
        "silo_ns_per_pair_and_parameter": round(1e9 * clock.cpu["silos"] / (pairs * dimension), 2),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }  # fmt: skip


def measure(names: tuple[str, ...] = BY_DEFAULT) -> list[dict[str, Any]]:
    """A row for every case named."""
    cases = CASES | SIZES
    return [{"case": name} | round_of(**cases[name]) for name in names]


def measure_sizes() -> list[dict[str, Any]]:
    """A row for every size of the table, from the smallest to the largest."""
    return measure(tuple(SIZES))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    columns = {
        "parameters d": lambda row: f"10^{round(math.log10(row['d']))}",
        "persons U": lambda row: f"{row['users']:,}",
        "pairs": lambda row: f"{row['pairs']:,}",
        "lattice N/Q/T, limbs, grid": lambda row: row["lattice"],
        "persons a polynomial": lambda row: str(row["users_a_polynomial"]),
        "MB up per silo": lambda row: f"{row['bytes_up_per_silo'] / 1e6:.2f}",
        "MB down per silo": lambda row: f"{row['bytes_down_per_silo'] / 1e6:.2f}",
        "CPU s": lambda row: f"{row['cpu']:.2f}",
        "wall s": lambda row: f"{row['wall']:.2f}",
    }
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(text(row) for text in columns.values())} |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "cases",
        nargs="*",
        default=BY_DEFAULT,
        help=f"of {', '.join(CASES)}, or a size of the table, such as 'd = 10^4, U = 100'",
    )
    parser.add_argument("--json", action="store_true", help="print rows as one JSON list")
    parser.add_argument("--table", action="store_true", help="the table of sizes instead of cases")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(measure_sizes()))
        return
    rows = measure(tuple(arguments.cases))
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print("\n".join(f"{key:32} {value}" for key, value in row.items()), end="\n\n")


if __name__ == "__main__":
    main()
