"""The cost of computing every person alone (`isolate_units = true`): CPU seconds of all silos' local work, in turn.

SILODP_DATA=DIR python benchmarks/isolation.py

The local work of one round, without evaluation and noise of the server; one thread, medians of three turns.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from silodp.config.resolve import load_config
from silodp.mechanisms.clipping import add_weighted_rows
from silodp.mechanisms.noise import Randomness
from silodp.methods.base import LocalContext
from silodp.methods.roles import FederationSize
from timing import measure_in_turn, show_help

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RUNS = {
    "heart_disease, uldp-avg, 50 persons": ("heart_disease", []),
    "creditcard, uldp-avg with 5 epochs of one batch, 100 persons": (
        "creditcard",
        ["method.local={learning_rate=0.01, epochs=5}"],
    ),
    "creditcard, uldp-sgd, 1,000 persons": (
        "creditcard",
        ["data.users=1000", "method={name='uldp-sgd', noise_multiplier=5.0, clip=0.1}"],
    ),
}


def measure(name: str, settings: list[str]) -> dict[bool, float]:
    """Return the seconds of a round, side by side (False) and alone (True)."""
    config = load_config(EXAMPLES / f"{name}.toml", settings)
    federation = config.load_federation()
    task, method = config.build_task(federation), config.method
    population = FederationSize(len(federation.silos), federation.users)
    weights = torch.from_numpy(method.user_weights(federation.counts(), population).copy())
    params = task.initial(0)

    def train(isolate_units: bool) -> None:
        for place, silo in enumerate(federation.silos):
            context = LocalContext(
                task,
                params,
                *task.tensors(silo.x, silo.y),
                torch.from_numpy(silo.user),
                weights[place],
                population,
                Randomness.from_seed(0).child("silo", silo.name),
                place,
                isolate_units=isolate_units,
            )
            add_weighted_rows(method.local_update(context), weights[place])

    return measure_in_turn(
        {isolate_units: partial(train, isolate_units) for isolate_units in (False, True)}, 3
    )


if __name__ == "__main__":
    show_help(__doc__)
    torch.set_num_threads(1)
    for label, (name, settings) in RUNS.items():
        together, alone = measure(name, settings).values()
        print(f"{label}: {together:.2f} s side by side, {alone:.2f} s alone, ratio {alone / together:.1f}")
