"""A data set outside the package, in one file: dosages of made-up patients who visit several hospitals.

In a configuration: [data] source = "dosage.py:DOSAGE". Every other field of [data] is an argument of `load_dosage`.
"""

from __future__ import annotations

import numpy as np

from silodp.data import Dataset, Federation, SiloData


def load_dosage(silos: int = 3, users: int = 20, seed: int = 0) -> Federation:
    """Return `silos` tables of 30 records each, and 60 held-out records of nobody in the federation."""
    generator = np.random.default_rng(seed)

    def draw(name: str, records: int, held_out: bool = False) -> SiloData:
        x = generator.uniform(-1, 1, size=(records, 2)).astype(
            np.float32
        )  # in public units: no scaling by rows
        user = np.full(records, -1) if held_out else generator.integers(users, size=records)
        return SiloData(name, x, (x[:, 0] > x[:, 1]).astype(np.int64), user)

    tables = tuple(draw(f"silo-{silo + 1}", 30) for silo in range(silos))
    return Federation(tables, users, draw("test", 60, held_out=True), name="dosage", classes=2)


DOSAGE = Dataset(
    name="dosage", loader=load_dosage, record_shape=(2,), labels="classes", classes=2, model="logistic"
)
