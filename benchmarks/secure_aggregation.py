"""`masked` against the bare stream cipher it needs: `python benchmarks/secure_aggregation.py`.

One vector of a million words, five silos: mask and seal at every silo, open and add at the server. The floor is the
same number of ChaCha20 streams: four pair masks and a seal per silo, and the five seals again at the server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from silodp.crypto.keys import HandshakeState, Identity
from silodp.crypto.secure_aggregation import RoundAttempt, WordGroup, apply_masks, open_sum
from silodp.crypto.streams import keystream
from silodp.mechanisms.clipping import clip_rows
from silodp.mechanisms.noise import Randomness, draw_skellam
from silodp.mechanisms.quantization import Quantizer
from timing import show_help

SIZE, SILOS, REPETITIONS = 10**6, 5, 5


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def session() -> dict[str, Any]:
    """Five silos that have met."""
    names = [f"silo{s}" for s in range(SILOS)]
    identities = {name: Identity.fresh(name) for name in names}
    openings = [HandshakeState.fresh(identity, "benchmark") for identity in identities.values()]
    pins = {name: identity.public for name, identity in identities.items()}
    hellos = [opening.hello for opening in openings]
    return {opening.identity.name: opening.meet(hellos, pins, "") for opening in openings}


def measure() -> list[dict[str, Any]]:
    """Medians over repetitions, floor and protocol in turn."""
    sessions = session()
    attempt = RoundAttempt(0, 0, 0, tuple(sessions), "benchmark")
    rng = np.random.default_rng(0)
    values = [rng.integers(-(2**20), 2**20, SIZE) for _ in range(SILOS)]
    rows = []
    for bits in (32, 64):
        group = WordGroup(SIZE, bits)

        def floor(width: int = bits // 8) -> None:
            for _ in range(SILOS * SILOS + SILOS):
                keystream(os.urandom(32), SIZE * width)

        def protocol(group: WordGroup = group) -> None:
            sent = [
                apply_masks(group.from_integers(value), group, own, attempt)
                for value, own in zip(values, sessions.values(), strict=True)
            ]
            seals = {name: own.seal_key(*attempt.use) for name, own in sessions.items()}
            total = group.center(open_sum(sent, seals, group))
            if not np.array_equal(total, sum(values)):
                raise SystemExit("the masked sum is not the sum")

        timed = [(seconds(floor), seconds(protocol)) for _ in range(REPETITIONS)]
        bare, ours = np.median(timed, axis=0)
        rows.append(
            {
                "masked": f"d = {SIZE}, S = {SILOS}, {bits}-bit words",
                "seconds": float(ours),
                "bare streams": float(bare),
                "ratio (target 5)": float(ours / bare),
                "bytes per parameter up": bits // 8,
            }
        )
    stream = Randomness.secret().stream()
    rows.append(
        {"noise": f"Skellam, d = {SIZE}", "seconds": seconds(lambda: draw_skellam(SIZE, 1e11, stream))}
    )
    grid, vectors = Quantizer(1.0, 1 << 18), rng.normal(size=(100, 20_000)).astype(np.float32)
    rows.append({"grid": "100 rows × 20,000", "seconds": seconds(lambda: _truncate(grid, vectors))})
    return rows


def _truncate(grid: Quantizer, vectors: np.ndarray) -> None:
    rows = clip_rows(torch.arange(len(vectors)), torch.from_numpy(vectors), grid.clip)
    grid.truncate(rows, torch.full((len(vectors),), 0.2, dtype=torch.float64))


if __name__ == "__main__":
    show_help(__doc__)
    for row in measure():
        print(row)
