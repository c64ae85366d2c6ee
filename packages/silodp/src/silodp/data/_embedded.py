"""The data set of the demo: scikit-learn's table of tumors, dealt to simulated persons and silos."""

from __future__ import annotations

import numpy as np

from silodp.data.allocation import deal
from silodp.data.dataset import Dataset, Origin
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData, scale_to_range
from silodp.data.tables.schema import Schema
from silodp.settings import Whole

_SPLIT_SEED = 0
"""Of the split into train and test records, which no publisher pins; separate from the seed of the allocation."""

# Scikit-learn's Wisconsin breast cancer table holds ten measures of cell nuclei (Street, Wolberg and
# Mangasarian 1993), each as mean, standard error and mean of the three largest. The ranges are round numbers
# written down from what the measures are (a nucleus of radius up to 30 px, area up to π·30² ≈ 2800 px²,
# ratios below 1) and from the orders of magnitude in the table's published description; nothing is estimated
# at run time.
EMBEDDED_RANGES: dict[str, tuple[float, float]] = {
    "mean radius": (5, 30),
    "mean texture": (5, 40),
    "mean perimeter": (30, 200),
    "mean area": (0, 2800),
    "mean smoothness": (0.05, 0.2),
    "mean compactness": (0, 0.4),
    "mean concavity": (0, 0.5),
    "mean concave points": (0, 0.25),
    "mean symmetry": (0.1, 0.3),
    "mean fractal dimension": (0.04, 0.1),
    "radius error": (0, 3),
    "texture error": (0, 5),
    "perimeter error": (0, 20),
    "area error": (0, 300),
    "smoothness error": (0, 0.03),
    "compactness error": (0, 0.1),
    "concavity error": (0, 0.2),
    "concave points error": (0, 0.05),
    "symmetry error": (0, 0.08),
    "fractal dimension error": (0, 0.02),
    "worst radius": (5, 40),
    "worst texture": (10, 50),
    "worst perimeter": (40, 250),
    "worst area": (0, 4000),
    "worst smoothness": (0.05, 0.25),
    "worst compactness": (0, 1),
    "worst concavity": (0, 1.2),
    "worst concave points": (0, 0.3),
    "worst symmetry": (0.1, 0.6),
    "worst fractal dimension": (0.05, 0.2),
}


def embedded(users: int = 100, silos: int = 5, allocation: str = "zipf", seed: int = 0) -> Federation:
    """Load the breast cancer table of scikit-learn, without a download: x (n, 30), y = malignant (1) or benign (0).

    455 train and 114 test records, split 80/20 by label with a fixed seed. Features are clipped to the public
    `EMBEDDED_RANGES` and mapped to [-1, 1], so no constant comes from private rows.

    Args:
        users: U.
        silos: S.
        allocation: "uniform", "zipf" or "own" (`allocation.deal`).
        seed: The seed of the allocation.
    """
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    Whole(0).check("seed", seed)
    table = load_breast_cancer()
    low, high = np.array([EMBEDDED_RANGES[str(name)] for name in table.feature_names]).T
    x = scale_to_range(table.data, low, high)
    y = (table.target == 0).astype(np.int64)  # scikit-learn's 0 is malignant
    train, test = train_test_split(np.arange(len(y)), test_size=0.2, random_state=_SPLIT_SEED, stratify=y)
    user, silo = deal(allocation, len(train), users, silos, np.random.default_rng(seed))
    parts = []
    for s in range(silos):
        # In turn, not drawn: the draws for training records stay the same with and without held-out ones. Each
        # held-out record is a person of its own, as no person is simulated for it.
        held_out = test[s::silos]
        name, mine = f"silo-{s + 1}", train[silo == s]
        parts.append(
            SiloData(
                name,
                x[mine],
                y[mine],
                user[silo == s],
                test=SiloData(name, x[held_out], y[held_out], np.arange(len(held_out), dtype=np.int64)),
            )
        )
    return Federation(
        silos=tuple(parts),
        users=len(train) if allocation == "own" else users,
        test=SiloData("test", x[test], y[test], np.full(len(test), -1, dtype=np.int64)),
        name=EMBEDDED.name,
        classes=EMBEDDED.classes,
        features=tuple(EMBEDDED_RANGES),
        schema=EMBEDDED.schema,
    )


EMBEDDED = Dataset(
    name="embedded",
    loader=embedded,
    record_shape=(len(EMBEDDED_RANGES),),
    classes=2,
    features=tuple(EMBEDDED_RANGES),
    schema=Schema(
        user="patient",
        label="diagnosis",
        classes=("benign", "malignant"),
        numeric=EMBEDDED_RANGES,
        out_of_range="clip",
    ),
    origin=Origin(
        rows=569, license="BSD 3-clause (scikit-learn)", publisher="Wisconsin breast cancer, in scikit-learn"
    ),
)
