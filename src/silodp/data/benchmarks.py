"""The papers' data sets as federations of simulated users, and one table that needs no download.

A user index is simulated by `silodp.data.allocation`; the records are real. Where a loader estimates a
constant from private rows, as the papers do, it says so in `Federation.assumptions`; `normalize="public"`
uses published or declared constants instead and has nothing to say. File facts: data/README.md of the
benchmark data.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

from silodp.data.allocation import allocate
from silodp.data.public_ranges import ACS_LEVELS, ACS_RANGES, EMBEDDED_RANGES, HEART_RANGES, scale_to_range
from silodp.data.silo import Federation, SiloData
from silodp.errors import SilodpError

Normalize = Literal["private", "public"]
Split = Literal["source", "pooled", "tuning"]
Floats = NDArray[Any]

SPLIT_SEED = 0  # of the splits that no source pins; separate from the seed of the allocation


def data_root(root: str | Path | None = None) -> Path:
    """The folder of the data sets: `root`, else $SILODP_DATA, else the nearest shared/data above here.

    Raises:
        SilodpError: none of them is a folder.
    """
    named = root if root is not None else os.environ.get("SILODP_DATA")
    if named:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            where = "root" if root is not None else "SILODP_DATA"
            raise SilodpError(
                f"{where} is {str(named)!r}, which is no folder; run `silodp data fetch NAME` and name its "
                "folder"
            )
        return folder
    for above in (Path.cwd(), *Path.cwd().parents):
        if (above / "shared" / "data").is_dir():
            return above / "shared" / "data"
    raise SilodpError(
        "no folder of data sets found (no root, no SILODP_DATA, no shared/data above here); "
        "run `silodp data fetch NAME` and set SILODP_DATA to its folder"
    )


def _file(root: str | Path | None, dataset: str, name: str) -> Path:
    path = data_root(root) / dataset / name
    if not path.is_file():
        raise SilodpError(f"{path} is missing; get it with `silodp data fetch {dataset}`")
    return path


def _check_normalize(value: str, *allowed: str) -> None:
    if value not in allowed:
        raise SilodpError(f"normalize is {value!r}; choose {' or '.join(map(repr, allowed))}")


def _fixed_silos(
    parts: list[tuple[str, Floats, Floats]], users: int, allocation: str, seed: int, pairs: bool = False
) -> tuple[SiloData, ...]:
    """Silos from (name, x, y), which keep their records; only the users are drawn."""
    sizes = [len(y) for _, _, y in parts]
    generator = np.random.default_rng(seed)
    user, silo = allocate(allocation, users=users, generator=generator, sizes=sizes, pairs=pairs)
    return tuple(SiloData(name, x, y, user[silo == s]) for s, (name, x, y) in enumerate(parts))


def _free_silos(
    x: Floats,
    y: Floats,
    users: int,
    silos: int,
    allocation: str,
    seed: int,
    labels_per_user: int | None = None,
    labels_per_silo: int | None = None,
) -> tuple[SiloData, ...]:
    """Silos and users both drawn."""
    user, silo = allocate(
        allocation,
        users=users,
        generator=np.random.default_rng(seed),
        records=len(y),
        silos=silos,
        labels=y,
        labels_per_user=labels_per_user,
        labels_per_silo=labels_per_silo,
    )
    return tuple(SiloData(f"silo-{s + 1}", x[silo == s], y[silo == s], user[silo == s]) for s in range(silos))


def _persons(allocation: str, users: int, records: int) -> int:
    """U: as asked for, or everybody that has a record."""
    return records if allocation == "own" else users


def _pooled_test(x: Floats, y: Floats) -> SiloData:
    return SiloData("test", x, y, np.full(len(y), -1, dtype=np.int64))


# --- heart disease ------------------------------------------------------------------------------------------

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
    _check_normalize(normalize, "private", "public")
    parts, tests = [], []
    for center in HEART_CENTERS:
        path = _file(root, "heart_disease", f"processed.{center}.data")
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
        raise SilodpError(f"silos is {silos}; heart_disease has 4, or 1 when they are pooled")
    assumptions: tuple[str, ...] = ()
    if normalize == "private":
        assumptions = (
            "Each center's features are standardized by the mean and standard deviation of its own "
            "training rows, which are private; choose normalize='public' for public ranges.",
        )
    return Federation(
        silos=_fixed_silos(parts, users, allocation, seed),
        users=_persons(allocation, users, sum(len(y) for _, _, y in parts)),
        test=_pooled_test(np.concatenate([x for x, _ in tests]), np.concatenate([y for _, y in tests])),
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
    _check_normalize(normalize, "none", "public")
    # "NA" is a tissue source site of its own, not a missing value.
    centers = pd.read_csv(_file(root, "tcga_brca", "centers.csv"), keep_default_na=False)
    folds = pd.read_csv(_file(root, "tcga_brca", "train_test_split.csv"), index_col="pid")["fold"]
    table = pd.read_csv(_file(root, "tcga_brca", "brca.csv"))
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
        silos=_fixed_silos(parts, users, allocation, seed, pairs=True),
        users=_persons(allocation, users, sum(len(y) for _, _, y in parts)),
        test=_pooled_test(x[pooled], y[pooled]),
        name="tcga_brca",
        features=features,
    )


# --- credit card fraud --------------------------------------------------------------------------------------


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
    _check_normalize(normalize, "private", "public")
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
        silos=_free_silos(x[train], y[train], users, silos, allocation, seed, labels_per_user),
        users=_persons(allocation, users, len(train)),
        test=_pooled_test(x[test], y[test]),
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
    table = pd.read_parquet(_file(root, "creditcard", "creditcard_subset.parquet"))
    return table[table["uniform_sample"]]


# --- images -------------------------------------------------------------------------------------------------

PIXELS = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}  # mean and sd of pixels in [0, 1]


def mnist(
    root: str | Path | None = None,
    users: int = 100,
    silos: int = 5,
    allocation: str = "zipf",
    seed: int = 0,
    normalize: Normalize = "private",
    labels_per_user: int | None = None,
    labels_per_silo: int | None = None,
    split: Split = "source",
) -> Federation:
    """MNIST digits: x (n, 1, 28, 28), 60,000 train and 10,000 test, 10 classes.

    `normalize="private"` uses the usual mean .1307 and sd .3081, once computed from the training images;
    "public" maps pixels to [-1, 1]. `split="pooled"`: all 70,000 together, of which .8 are trained on, drawn with
    `seed`; "tuning": of these .8, .7 are trained on and the rest are the test data. With `allocation="own"` every
    record is a person of its own; `labels_per_silo` then gives every silo about so many classes.
    """
    shares = Shares(users, silos, allocation, seed, labels_per_user, labels_per_silo)
    return _images("mnist", root, shares, normalize, split)


def fashion_mnist(
    root: str | Path | None = None,
    users: int = 100,
    silos: int = 5,
    allocation: str = "zipf",
    seed: int = 0,
    normalize: Normalize = "private",
    labels_per_user: int | None = None,
    labels_per_silo: int | None = None,
    split: Split = "source",
) -> Federation:
    """Fashion-MNIST articles: as `mnist`, with mean .2860 and sd .3530."""
    shares = Shares(users, silos, allocation, seed, labels_per_user, labels_per_silo)
    return _images("fashion_mnist", root, shares, normalize, split)


@dataclass(frozen=True)
class Shares:
    """Who holds what, where silos and users are both simulated: the arguments of `allocation.allocate`."""

    users: int
    silos: int
    allocation: str
    seed: int
    labels_per_user: int | None = None
    labels_per_silo: int | None = None


def _images(
    dataset: str, root: str | Path | None, shares: Shares, normalize: Normalize, split: Split
) -> Federation:
    _check_normalize(normalize, "private", "public")
    mean, deviation = PIXELS[dataset] if normalize == "private" else (0.5, 0.5)
    parts = {}
    for part in ("train", "t10k"):
        pixels = read_idx(_file(root, dataset, f"{part}-images-idx3-ubyte.gz"))
        labels = read_idx(_file(root, dataset, f"{part}-labels-idx1-ubyte.gz")).astype(np.int64)
        scale, shift = np.float32(1 / (255 * deviation)), np.float32(mean / deviation)
        parts[part] = (pixels[:, None].astype(np.float32) * scale - shift, labels)
    train, test = _split(parts["train"], parts["t10k"], split, shares.seed)
    assumptions: tuple[str, ...] = ()
    if normalize == "private":
        assumptions = (
            f"Pixels are normalized by the published mean {mean} and standard deviation {deviation}, once "
            "computed "
            "from the training images; choose normalize='public' for [-1, 1].",
        )
    return Federation(
        silos=_free_silos(*train, **asdict(shares)),
        users=_persons(shares.allocation, shares.users, len(train[1])),
        test=_pooled_test(*test),
        assumptions=assumptions,
        name=dataset,
        classes=10,
    )


def _split(
    train: tuple[Floats, Floats], test: tuple[Floats, Floats], split: Split, seed: int
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """Train and test as they come; or pooled and cut at .8; or the first .8 of that cut at .7."""
    if split not in get_args(Split):
        raise SilodpError(f"split is {split!r}; choose one of {', '.join(map(repr, get_args(Split)))}")
    if split == "source":
        return train, test
    x, y = (np.concatenate(both) for both in zip(train, test, strict=True))
    order = np.random.default_rng(seed).permutation(len(y))
    kept, held = np.split(order, [round(0.8 * len(y))])
    if split == "tuning":
        kept, held = np.split(kept, [round(0.7 * len(kept))])
    return (x[kept], y[kept]), (x[held], y[held])


def read_idx(path: str | Path) -> NDArray[np.uint8]:
    """A gzipped idx file of bytes (the MNIST format), in the shape its header says.

    Raises:
        SilodpError: not a whole idx file of unsigned bytes.
    """
    try:
        content = gzip.decompress(Path(path).read_bytes())
        rank = content[3]
        shape = np.frombuffer(content, ">i4", count=rank, offset=4).astype(int)
        if content[:3] != b"\0\0\x08":
            raise ValueError("no idx header of unsigned bytes")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise SilodpError(f"{path} is no whole idx file ({error}); delete it and fetch it again") from error


# --- census income ------------------------------------------------------------------------------------------


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
        raise SilodpError(f"max_per_state is {max_per_state}; give 2 or more, or None for all rows")
    if not 0 < test_share < 1:
        raise SilodpError(f"test_share is {test_share}; give a share between 0 and 1")
    states = pd.read_csv(_file(root, "acs_income", "state_counts.csv")).set_index("fips")["state"]
    table = pd.read_parquet(_file(root, "acs_income", "acs_income_2018_50.parquet"))
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
        test=_pooled_test(np.concatenate(test_x), np.concatenate(test_y)),
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


# --- embedded -----------------------------------------------------------------------------------------------


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
        silos=_free_silos(x[train], y[train], users, silos, allocation, seed),
        users=_persons(allocation, users, len(train)),
        test=_pooled_test(x[test], y[test]),
        name="embedded",
        classes=2,
        features=tuple(EMBEDDED_RANGES),
    )


LOADERS: dict[str, Callable[..., Federation]] = {
    "heart_disease": heart_disease,
    "tcga_brca": tcga_brca,
    "creditcard": creditcard,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "acs_income": acs_income,
    "embedded": embedded,
}
