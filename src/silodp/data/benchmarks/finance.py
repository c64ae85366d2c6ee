"""Credit card fraud, and incomes of the census in fifty states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from silodp.data.benchmarks.files import data_root, file_of
from silodp.data.benchmarks.sharing import (
    SPLIT_SEED,
    Normalize,
    check_normalize,
    free_silos,
    persons_of,
    pooled_test,
)
from silodp.data.federation import Federation, SiloData
from silodp.data.public_ranges import ACS_LEVELS, ACS_RANGES, scale_to_range
from silodp.errors import SilodpError


def creditcard(
    root: str | Path | None = None,
    users: int = 100,
    silos: int = 5,
    allocation: str = "zipf",
    seed: int = 0,
    normalize: Normalize = "private",
    labels_per_user: int | None = None,
) -> Federation:
    """Credit card fraud, undersampled to 25,282 train (418 frauds) and 4,462 test records (74): x (n, 30).

    `normalize="private"` standardizes by the training rows; "public" takes the time in days − 1, half of
    every principal component clipped to [-20, 20], and log(1 + amount)/5 − 1. Without the subset file a full
    Kaggle `creditcard.csv` is undersampled to as many rows (other rows than the subset's).
    """
    check_normalize(normalize, "private", "public")
    table = _creditcard_table(root)
    features = tuple(column for column in table.columns if column not in ("Class", "uniform_sample"))
    x = table[list(features)].to_numpy(dtype=float)
    y = table["Class"].to_numpy(dtype=np.int64)
    train, test = train_test_split(np.arange(len(y)), test_size=0.15, random_state=SPLIT_SEED, stratify=y)
    assumptions: tuple[str, ...] = ()
    if normalize == "private":
        x = (x - x[train].mean(axis=0)) / x[train].std(axis=0)
        assumptions = (
            "Features are standardized by the mean and standard deviation of all training rows, which are "
            "private; "
            "choose normalize='public' for public constants.",
        )
    else:
        components = np.clip(x[:, 1:29], -20, 20) / 2
        x = np.column_stack([x[:, 0] / 86_400 - 1, components, np.log1p(x[:, 29]) / 5 - 1])
    x = x.astype(np.float32)
    return Federation(
        silos=free_silos(x[train], y[train], users, silos, allocation, seed, labels_per_user),
        users=persons_of(allocation, users, len(train)),
        test=pooled_test(x[test], y[test]),
        assumptions=assumptions,
        name="creditcard",
        classes=2,
        features=features,
    )


def _creditcard_table(root: str | Path | None) -> pd.DataFrame:
    full = data_root(root) / "creditcard" / "creditcard.csv"
    if full.is_file() and not (full.parent / "creditcard_subset.parquet").is_file():
        table = pd.read_csv(full)
        honest = table[table["Class"] == 0].sample(29_252, random_state=SPLIT_SEED)
        return pd.concat([table[table["Class"] == 1], honest]).sort_index()
    table = pd.read_parquet(file_of(root, "creditcard", "creditcard_subset.parquet"))
    return table[table["uniform_sample"]]


def acs_income(
    root: str | Path | None = None,
    seed: int = 0,
    max_per_state: int | None = None,
    test_share: float = 0.2,
) -> Federation:
    """ACS income 2018, one state per silo (49 and Puerto Rico): x (n, 47), y = income over 50,000 USD.

    5 columns are scaled from public ranges to [-1, 1], 5 are one-hot. Every training record is a user of its
    own. A share `test_share` of each state, drawn with `seed`, is the pooled test data. `max_per_state` keeps
    that many rows of each state, drawn with `seed`. All rows take about 0.3 GB.
    """
    if max_per_state is not None and max_per_state < 2:
        raise SilodpError(
            f"max_per_state is {max_per_state}; give 2 or more, or None for all rows",
            code="argument.value",
            field="max_per_state",
        )
    if not 0 < test_share < 1:
        raise SilodpError(
            f"test_share is {test_share}; give a share between 0 and 1",
            code="argument.value",
            field="test_share",
        )
    states = pd.read_csv(file_of(root, "acs_income", "state_counts.csv")).set_index("fips")["state"]
    table = pd.read_parquet(file_of(root, "acs_income", "acs_income_2018_50.parquet"))
    generator = np.random.default_rng(seed)
    silos, test_x, test_y, users = [], [], [], 0
    for code, rows in table.groupby("ST", sort=True):
        order = generator.permutation(len(rows))[:max_per_state]
        x = _acs_features(rows.iloc[order])
        y = rows["PINCP_gt_50k"].to_numpy()[order].astype(np.int64)
        held = max(1, round(test_share * len(y)))
        test_x.append(x[:held])
        test_y.append(y[:held])
        kept = len(y) - held
        # A copy, lest the view keep the held-out rows in memory.
        silos.append(SiloData(str(states[code]), x[held:].copy(), y[held:], np.arange(users, users + kept)))
        users += kept
    levels = [f"{column}={level + 1}" for column, count in ACS_LEVELS.items() for level in range(count)]
    return Federation(
        silos=tuple(silos),
        users=users,
        test=pooled_test(np.concatenate(test_x), np.concatenate(test_y)),
        name="acs_income",
        classes=2,
        features=(*ACS_RANGES, *levels),
    )


def _acs_features(rows: pd.DataFrame) -> NDArray[np.float32]:
    """(n, 47): scaled columns, then one-hot columns."""
    columns = [
        scale_to_range(rows[c].to_numpy(dtype=np.float32), *ACS_RANGES[c])[:, None] for c in ACS_RANGES
    ]
    for column, count in ACS_LEVELS.items():
        columns.append(np.eye(count, dtype=np.float32)[rows[column].to_numpy() - 1])
    return np.concatenate(columns, axis=1)
