"""Credit card fraud, and incomes from the census in fifty states."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from silodp.data.dataset import Dataset, Origin
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData, scale_to_range
from silodp.data.tables.kinds.numeric import NumericColumn
from silodp.settings import Range, Whole, check_choice
from silodp_experiments.benchmarks._common import (
    SPLIT_SEED,
    Normalize,
    Shares,
    data_root,
    federate_free,
    find_file,
    hold_out,
    make_test,
)

if TYPE_CHECKING:
    import pandas as pd


CREDITCARD_FEATURES = ("Time", *(f"V{component}" for component in range(1, 29)), "Amount")

ACS_COLUMNS: dict[str, NumericColumn] = {
    "AGEP": NumericColumn((0, 99), (45, 15)),
    "OCCP": NumericColumn((0, 9999)),
    "POBP": NumericColumn((1, 554)),
    "RELP": NumericColumn((0, 17)),
    "WKHP": NumericColumn((1, 99), (40, 10)),
}
"""Of the numeric columns: ranges from the code book. Typical are a working life from about 20 to 70 years, so 45 ± 15,
and the standard week of 40 hours (Fair Labor Standards Act), ± 10; codes have no typical value."""

CREDITCARD_COMPONENTS = NumericColumn((-20, 20), (0, 1))
"""Of V1 to V28, principal components of columns that the owner keeps secret. Components have the mean 0 by
construction; their spreads are not published, and the variances of standardized columns' components average 1."""

ACS_LEVELS = {"COW": 9, "SCHL": 24, "MAR2": 2, "SEX": 2, "RAC1P5": 5}
"""Number of codes 1..k of the categorical columns."""

ACS_FEATURES = (
    *ACS_COLUMNS,
    *(f"{column}={level + 1}" for column, count in ACS_LEVELS.items() for level in range(count)),
)

_STATES = (
    "AL AK AZ AR CO CT DE FL GA HI ID IL IN IA KS KY LA ME MD MA MI MN MS MO MT NE NV NH NJ NM NY NC ND OH OK OR PA RI "
    "SC SD TN TX UT VT VA WA WV WI WY PR"
)
ACS_STATES = tuple(_STATES.split())
"""The silos in order of their FIPS codes: all states but California, and Puerto Rico."""


def creditcard(
    root: str | Path | None = None,
    users: int = 100,
    silos: int = 5,
    allocation: str = "zipf",
    seed: int = 0,
    normalize: Normalize = "private",
    labels_per_user: int | None = None,
) -> Federation:
    """Load credit card fraud, undersampled to 25,282 train (418 frauds) and 4,462 test records (74): x (n, 30).

    Without the subset file a full Kaggle `creditcard.csv` is undersampled to as many rows (other rows than the
    subset's).

    Args:
        root: folder of the data sets (see `data_root`).
        users: U.
        silos: S.
        allocation: "uniform", "zipf", or "own", which makes every record a user.
        seed: the seed of the allocation.
        normalize: "private" standardizes by the training rows; "public" takes the time in days − 1, principal
            components clipped to [-20, 20], and log(1 + amount)/5 − 1.
        labels_per_user: number of classes that a user may hold; None for no limit.

    Raises:
        SilodpError: missing files, or an argument with another value than those above.
    """
    from sklearn.model_selection import train_test_split

    check_choice("normalize", normalize, ("private", "public"))
    table = _creditcard_table(root)
    features = tuple(column for column in table.columns if column not in ("Class", "uniform_sample"))
    x = table[list(features)].to_numpy(dtype=float)
    y = table["Class"].to_numpy(dtype=np.int64)
    train, test = train_test_split(np.arange(len(y)), test_size=0.15, random_state=SPLIT_SEED, stratify=y)
    if normalize == "private":
        x = (x - x[train].mean(axis=0)) / x[train].std(axis=0)
    else:
        # Two days of records, in seconds; amounts from cents to thousands, so by their logarithm.
        components = CREDITCARD_COMPONENTS.scale(x[:, 1:29])
        x = np.column_stack([x[:, 0] / 86_400 - 1, components, np.log1p(x[:, 29]) / 5 - 1])
    x = x.astype(np.float32)
    shares = Shares(users, silos, allocation, seed, labels_per_user)
    held_out = (x[test], y[test])
    return federate_free(
        CREDITCARD, (x[train], y[train]), held_out, shares, normalize=normalize, features=features
    )


def _creditcard_table(root: str | Path | None) -> pd.DataFrame:
    import pandas as pd

    full = data_root(root) / "creditcard" / "creditcard.csv"
    if full.is_file() and not (full.parent / "creditcard_subset.parquet").is_file():
        table = pd.read_csv(full)
        # All frauds stay: they are a sixth of a percent of the full table.
        honest = table[table["Class"] == 0].sample(29_252, random_state=SPLIT_SEED)
        return pd.concat([table[table["Class"] == 1], honest]).sort_index()
    table = pd.read_parquet(find_file(root, "creditcard", "creditcard_subset.parquet"))
    return table[table["uniform_sample"]]


def acs_income(
    root: str | Path | None = None,
    seed: int = 0,
    max_per_state: int | None = None,
    test_share: float = 0.2,
    normalize: Literal["ranges", "public"] = "ranges",
) -> Federation:
    """Load ACS income 2018, one state per silo: x (n, 47), y = income over 50,000 USD (1) or not (0).

    5 columns are scaled by public constants, 5 are one-hot. Every training record is a user. All rows take about
    0.3 GB.

    Args:
        root: folder of the data sets (see `data_root`).
        seed: the seed of both draws below.
        max_per_state: rows of each state that are kept, drawn; None for all.
        test_share: share of each state's rows, drawn, that are pooled as test data; between 0 and 1.
        normalize: "ranges" maps the public range of each numeric column to [-1, 1]; "public" takes (age − 45)/15 and
            (weekly hours − 40)/10 for these two columns, which trains better. Both are public (`ACS_COLUMNS`).

    Raises:
        SilodpError: missing files, or an argument out of its range.
    """
    import pandas as pd

    check_choice("normalize", normalize, ("ranges", "public"))
    if max_per_state is not None:
        Whole(2, what="rows of a state").check("max_per_state", max_per_state)
    Range(above=0, below=1, what="share").check("test_share", test_share)
    states = pd.read_csv(find_file(root, "acs_income", "state_counts.csv")).set_index("fips")["state"]
    table = pd.read_parquet(find_file(root, "acs_income", "acs_income_2018_50.parquet"))
    generator = np.random.default_rng(seed)
    silos, test_x, test_y, users = [], [], [], 0
    for code, rows in table.groupby("ST", sort=True):
        order = generator.permutation(len(rows))[:max_per_state]
        x = _acs_features(rows.iloc[order], normalize)
        y = rows["PINCP_gt_50k"].to_numpy()[order].astype(np.int64)
        # Every state has a test record, also where few rows are kept.
        held = max(1, round(test_share * len(y)))
        test_x.append(x[:held])
        test_y.append(y[:held])
        kept = len(y) - held
        # A copy: a view would keep the held-out rows in memory.
        test = hold_out(str(states[code]), x[:held].copy(), y[:held])
        silos.append(
            SiloData(str(states[code]), x[held:].copy(), y[held:], np.arange(users, users + kept), test=test)
        )
        users += kept
    return Federation(
        silos=tuple(silos),
        users=users,
        test=make_test(np.concatenate(test_x), np.concatenate(test_y)),
        name="acs_income",
        classes=2,
        features=ACS_FEATURES,
    )


def _acs_features(rows: pd.DataFrame, normalize: str) -> NDArray[np.float32]:
    """Return (n, 47): scaled columns, then one-hot columns."""
    columns = []
    for name, constants in ACS_COLUMNS.items():
        values = rows[name].to_numpy(dtype=np.float32)
        scaled = (
            constants.scale(values) if normalize == "public" else scale_to_range(values, *constants.range)
        )
        columns.append(scaled[:, None])
    for column, count in ACS_LEVELS.items():
        columns.append(np.eye(count, dtype=np.float32)[rows[column].to_numpy() - 1])
    return np.concatenate(columns, axis=1)


CREDITCARD = Dataset(
    name="creditcard",
    loader=creditcard,
    record_shape=(30,),
    classes=2,
    features=CREDITCARD_FEATURES,
    model="mlp",
    private_scaling="Features are standardized by the mean and standard deviation of all training rows, which are "
    "private; choose normalize='public' for public constants.",
    origin=Origin(
        rows=29_744,
        license="DbCL 1.0",
        publisher="Kaggle, mlg-ulb/creditcardfraud",
        files={
            "creditcard_subset.parquet": "0e89911862ebf0efae054656a2b2b1d972fee42d8506b1665bc608f720b8ef0c"
        },
        manual="Kaggle asks for a login: download creditcard.csv from "
        "https://www.kaggle.com/datasets/mlg-ulb/creditcardfraud and put it there",
        alternative="creditcard.csv",
    ),
)
ACS_INCOME = Dataset(
    name="acs_income",
    loader=acs_income,
    record_shape=(len(ACS_FEATURES),),
    classes=2,
    features=ACS_FEATURES,
    silos=ACS_STATES,
    origin=Origin(
        rows=1_402_639,
        license="US Census PUMS, public use",
        publisher="folktables, ACSIncome 2018",
        files={
            "acs_income_2018_50.parquet": "707a8c33ac7c38b5286de4f7ca4bf6160a2157b101a1b4961117ddeeccc986f0",
            "state_counts.csv": "b438f9ee467053fe48aaf8efc97e249c51fbd0ea983fd5a6e4d02ea77fe29a0a",
        },
        manual="the table is recoded from the Census: download ACSIncome 2018 (1-Year, person) with folktables, keep "
        "AGEP, COW, SCHL, OCCP, POBP, RELP, WKHP and SEX, recode MAR to MAR2 (1 married, 2 else) and RAC1P to RAC1P5 "
        "(1 white, 2 Black, 3 Asian, 4 native, 5 other), add PINCP_gt_50k (bool) and ST (FIPS), and write them there "
        "as acs_income_2018_50.parquet, with state_counts.csv holding columns state and fips",
    ),
)
