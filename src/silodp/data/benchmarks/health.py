"""Heart disease in four hospitals, survival with breast cancer in six regions, and scikit-learn's table of tumors."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

from silodp.data.benchmarks.files import file_of
from silodp.data.benchmarks.sharing import (
    SPLIT_SEED,
    Normalize,
    check_normalize,
    fixed_silos,
    free_silos,
    persons_of,
    pooled_test,
)
from silodp.data.federation import Federation
from silodp.data.public_ranges import EMBEDDED_RANGES, HEART_RANGES, scale_to_range
from silodp.errors import SilodpError

HEART_CENTERS = ("cleveland", "hungarian", "switzerland", "va")


def heart_disease(
    root: str | Path | None = None,
    users: int = 50,
    allocation: str = "zipf",
    seed: int = 0,
    normalize: Normalize = "private",
    silos: Literal[1, 4] = 4,
) -> Federation:
    """UCI heart disease, four hospitals as silos, by FLamby's rule: x (n, 13), y = disease yes (1) or no (0).

    Train 199/172/30/85 records, test 104/89/16/45 pooled; with `silos` 1 the training records are pooled, too.
    `normalize="private"` is FLamby's: each center by the mean and standard deviation of its own training rows;
    "public" maps `HEART_RANGES` to [-1, 1].
    """
    check_normalize(normalize, "private", "public")
    parts, tests = [], []
    for center in HEART_CENTERS:
        path = file_of(root, "heart_disease", f"processed.{center}.data")
        table = pd.read_csv(path, header=None, na_values="?").drop(columns=[10, 11, 12]).dropna()
        # One-hot by the published code book (cp 1..4, restecg 0..2), which is what all centers together hold.
        chest_pain = [table[2] == level for level in (2, 3, 4)]
        ecg = [table[6] == level for level in (1, 2)]
        plain = [table[column] for column in (0, 1, 3, 4, 5, 7, 8, 9)]
        x = np.stack([np.asarray(column, dtype=float) for column in (*plain, *chest_pain, *ecg)], axis=1)
        y = (table[13].to_numpy() > 0).astype(np.int64)
        stratify = y if np.bincount(y, minlength=2).min() > 2 else None
        train, test = train_test_split(
            np.arange(len(y)),
            train_size=0.66,
            test_size=0.34,
            random_state=43,
            shuffle=True,
            stratify=stratify,
        )
        if normalize == "private":
            x = (x - x[train].mean(axis=0)) / (x[train].std(axis=0, ddof=1) + 1e-9)
        else:
            low, high = np.array(list(HEART_RANGES.values()), dtype=float).T
            x = scale_to_range(x, low, high)
        x = x.astype(np.float32)
        parts.append((center, x[train], y[train]))
        tests.append((x[test], y[test]))
    if silos == 1:
        _, features, labels = zip(*parts, strict=True)
        parts = [("pooled", np.concatenate(features), np.concatenate(labels))]
    elif silos != len(parts):
        raise SilodpError(
            f"silos is {silos}; heart_disease has 4, or 1 when they are pooled",
            code="argument.value",
            field="silos",
        )
    assumptions: tuple[str, ...] = ()
    if normalize == "private":
        assumptions = (
            "Each center's features are standardized by the mean and standard deviation of its own "
            "training rows, which are private; choose normalize='public' for public ranges.",
        )
    return Federation(
        silos=fixed_silos(parts, users, allocation, seed),
        users=persons_of(allocation, users, sum(len(y) for _, _, y in parts)),
        test=pooled_test(np.concatenate([x for x, _ in tests]), np.concatenate([y for _, y in tests])),
        assumptions=assumptions,
        name="heart_disease",
        classes=2,
        features=tuple(HEART_RANGES),
    )


# --- breast cancer survival ---------------------------------------------------------------------------------

TCGA_REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")


def tcga_brca(
    root: str | Path | None = None,
    users: int = 50,
    allocation: str = "zipf",
    seed: int = 0,
    normalize: Literal["none", "public"] = "none",
) -> Federation:
    """TCGA-BRCA survival, six regions as silos: x (n, 39), y (n, 2) = [event, days], 866 train and 222 test.

    Users are allocated in pairs, since a Cox loss needs two records of a user in a silo. Age stays in years
    as in FLamby (`normalize="none"`, nothing estimated); "public" maps 20–90 years to [-1, 1]. All other
    features are 0/1.
    """
    check_normalize(normalize, "none", "public")
    # "NA" is a tissue source site of its own, not a missing value.
    centers = pd.read_csv(file_of(root, "tcga_brca", "centers.csv"), keep_default_na=False)
    folds = pd.read_csv(file_of(root, "tcga_brca", "train_test_split.csv"), index_col="pid")["fold"]
    table = pd.read_csv(file_of(root, "tcga_brca", "brca.csv"))
    region = table["pid"].str[5:7].map(dict(zip(centers["TSS Code"], centers["Region"], strict=True)))
    fold = table["pid"].map(folds)
    features = tuple(column for column in table.columns if column not in ("pid", "E", "T"))
    x = table[list(features)].to_numpy(dtype=np.float32)
    if normalize == "public":
        x[:, 0] = scale_to_range(x[:, 0], 20, 90)
    y = table[["E", "T"]].to_numpy(dtype=np.float32)
    parts, test = [], []
    for name in TCGA_REGIONS:
        here = (region == name).to_numpy()
        train = here & (fold == "train").to_numpy()
        test.append(np.flatnonzero(here & (fold == "test").to_numpy()))
        parts.append((name, x[train], y[train]))
    pooled = np.concatenate(test)
    return Federation(
        silos=fixed_silos(parts, users, allocation, seed, pairs=True),
        users=persons_of(allocation, users, sum(len(y) for _, _, y in parts)),
        test=pooled_test(x[pooled], y[pooled]),
        name="tcga_brca",
        features=features,
    )


def embedded(users: int = 100, silos: int = 5, allocation: str = "zipf", seed: int = 0) -> Federation:
    """The breast cancer table that scikit-learn carries: x (n, 30), y = malignant (1) or benign (0); no
    download.

    455 train and 114 test records, split 80/20 by label with a fixed seed. Features are clipped to the public
    ranges `EMBEDDED_RANGES` and mapped to [-1, 1], so no constant comes from private rows.
    """
    table = load_breast_cancer()
    low, high = np.array([EMBEDDED_RANGES[str(name)] for name in table.feature_names]).T
    x = scale_to_range(table.data, low, high)
    y = (table.target == 0).astype(np.int64)  # scikit-learn's 0 is malignant
    train, test = train_test_split(np.arange(len(y)), test_size=0.2, random_state=SPLIT_SEED, stratify=y)
    return Federation(
        silos=free_silos(x[train], y[train], users, silos, allocation, seed),
        users=persons_of(allocation, users, len(train)),
        test=pooled_test(x[test], y[test]),
        name="embedded",
        classes=2,
        features=tuple(EMBEDDED_RANGES),
    )
