"""Public ranges of the benchmark features, written down once and never estimated from the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]


def scale_to_range(x: Floats, low: Floats | float, high: Floats | float) -> NDArray[np.float32]:
    """Clip to the public range [low, high] and map it to [-1, 1]; same shape, float32."""
    clipped = np.clip(x, low, high)
    return np.asarray(2 * (clipped - low) / (np.asarray(high) - low) - 1, dtype=np.float32)


# Public range of every column: what adults are measured at, 0/1 for indicators. `va` codes some missing blood
# pressures as 0 and `switzerland` all cholesterol; clipping puts such a record at the end of the range.
HEART_RANGES: dict[str, tuple[float, float]] = {
    "age": (20, 80),
    "sex": (0, 1),
    "trestbps": (80, 200),
    "chol": (0, 600),
    "fbs": (0, 1),
    "thalach": (60, 220),
    "exang": (0, 1),
    "oldpeak": (-3, 7),
    "cp=2": (0, 1),
    "cp=3": (0, 1),
    "cp=4": (0, 1),
    "restecg=1": (0, 1),
    "restecg=2": (0, 1),
}

ACS_RANGES: dict[str, tuple[int, int]] = {  # the code book's
    "AGEP": (0, 99),
    "OCCP": (0, 9999),
    "POBP": (1, 554),
    "RELP": (0, 17),
    "WKHP": (1, 99),
}
ACS_LEVELS = {"COW": 9, "SCHL": 24, "MAR2": 2, "SEX": 2, "RAC1P5": 5}  # codes 1..k

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
