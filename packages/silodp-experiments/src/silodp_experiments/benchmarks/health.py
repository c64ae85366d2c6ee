"""Heart disease in four hospitals, and breast cancer survival in six regions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from silodp.data.dataset import Dataset, Origin, urls_in
from silodp.data.federation import Federation
from silodp.data.tables.kinds.numeric import NumericColumn
from silodp.data.tables.schema import Schema
from silodp.settings import check_choice
from silodp_experiments.benchmarks._common import (
    Normalize,
    Part,
    Shares,
    federate_fixed,
    find_file,
    pool,
)

HEART_CENTERS = ("cleveland", "hungarian", "switzerland", "va")
TCGA_REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")

# Public constants of every column, written down from what the columns are (UCI's heart-disease.names) and from general
# medical knowledge; nothing is computed from these rows. Ranges are what adults are measured at, 0/1 for indicators.
# `va` codes some missing blood pressures as 0 and `switzerland` all cholesterol; clipping puts such a record at the
# end of the range. Sources of the typical values (center, spread), rounded:
#   age       adults who are referred for coronary angiography are mostly between 45 and 65
#   trestbps  from normal (110) to stage 2 hypertension (150): 130 ± 20 mmHg at rest
#   chol      "desirable" ends at 200 and "high" begins at 240 mg/dl (NCEP ATP III): 220; spread of adults about 45
#   thalach   220 − age is 165 at 55 years; patients reach less: 150 ± 25 beats per minute
#   oldpeak   an ST depression of 1 mm counts as abnormal: 1 ± 1 mm
HEART_COLUMNS: dict[str, NumericColumn] = {
    "age": NumericColumn((20, 80), (55, 10)),
    "sex": NumericColumn((0, 1)),
    "trestbps": NumericColumn((80, 200), (130, 20)),
    "chol": NumericColumn((100, 400), (220, 45)),
    "fbs": NumericColumn((0, 1)),
    "thalach": NumericColumn((60, 220), (150, 25)),
    "exang": NumericColumn((0, 1)),
    "oldpeak": NumericColumn((-3, 7), (1, 1)),
    "cp=2": NumericColumn((0, 1)),
    "cp=3": NumericColumn((0, 1)),
    "cp=4": NumericColumn((0, 1)),
    "restecg=1": NumericColumn((0, 1)),
    "restecg=2": NumericColumn((0, 1)),
}

# Ages at which breast cancer is diagnosed. Mapped to [-1, 1], they weigh as much as the 38 indicators beside them.
TCGA_AGES = NumericColumn((20, 90))


def heart_disease(
    root: str | Path | None = None,
    users: int = 50,
    allocation: str = "zipf",
    seed: int = 0,
    normalize: Normalize = "private",
    silos: Literal[1, 4] = 4,
) -> Federation:
    """Load UCI heart disease, four hospitals as silos, by FLamby's rule: x (n, 13), y = disease yes (1) or no (0).

    Train 199/172/30/85 records, test 104/89/16/45 records, pooled.

    Args:
        root: folder of the data sets (see `data_root`).
        users: U.
        allocation: "uniform", "zipf", or "own", which makes every record a user.
        seed: the seed of the allocation.
        normalize: "private" is FLamby's: each center by the mean and standard deviation of its training rows; "public"
            clips and scales by the constants `HEART_COLUMNS`.
        silos: 4, or 1 to pool the training records, too.

    Raises:
        SilodpError: missing files, or an argument with another value than those above.
    """
    import pandas as pd
    from sklearn.model_selection import train_test_split

    check_choice("normalize", normalize, ("private", "public"))
    check_choice("silos", silos, (1, 4))
    parts, tests = list[Part](), list[Part]()
    for center in HEART_CENTERS:
        path = find_file(root, "heart_disease", f"processed.{center}.data")
        table = pd.read_csv(path, header=None, na_values="?").drop(columns=[10, 11, 12]).dropna()
        # One-hot by the published code book (cp 1..4, restecg 0..2), which is what all centers together hold.
        chest_pain = [table[2] == level for level in (2, 3, 4)]
        ecg = [table[6] == level for level in (1, 2)]
        plain = [table[column] for column in (0, 1, 3, 4, 5, 7, 8, 9)]
        x = np.stack([np.asarray(column, dtype=float) for column in (*plain, *chest_pain, *ecg)], axis=1)
        y = (table[13].to_numpy() > 0).astype(np.int64)
        # FLamby's rule; scikit-learn cannot stratify by a class of one or two records.
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
            # As torch: ddof = 1, and a small number for columns that are constant in a center.
            x = (x - x[train].mean(axis=0)) / (x[train].std(axis=0, ddof=1) + 1e-9)
        else:
            scaled = [column.scale(x[:, i]) for i, column in enumerate(HEART_COLUMNS.values())]
            x = np.stack(scaled, axis=1)
        x = x.astype(np.float32)
        parts.append((center, x[train], y[train]))
        tests.append((center, x[test], y[test]))
    if silos == 1:
        parts, tests = [pool("pooled", parts)], [pool("pooled", tests)]
    schema = HEART_DISEASE.schema if normalize == "public" else None
    return federate_fixed(
        HEART_DISEASE,
        parts,
        tests,
        Shares(users, None, allocation, seed),
        normalize=normalize,
        features=tuple(HEART_COLUMNS),
        schema=schema,
    )


def tcga_brca(
    root: str | Path | None = None,
    users: int = 50,
    allocation: str = "zipf",
    seed: int = 0,
    normalize: Literal["none", "public"] = "none",
) -> Federation:
    """Load TCGA-BRCA survival, six regions as silos: x (n, 39), y (n, 2) = [event, days], 866 train and 222 test.

    Users are allocated in pairs of records, since a Cox loss needs two records of a user in a silo.

    Args:
        root: folder of the data sets (see `data_root`).
        users: U.
        allocation: "uniform", "zipf", or "own", which makes every record a user.
        seed: the seed of the allocation.
        normalize: "none" leaves the age in years as FLamby does (nothing is estimated); "public" maps 20–90 years to
            [-1, 1]. All other features are 0/1.

    Raises:
        SilodpError: missing files, or an argument with another value than those above.
    """
    import pandas as pd

    check_choice("normalize", normalize, ("none", "public"))
    # "NA" is the name of a tissue source site, not a missing value.
    centers = pd.read_csv(find_file(root, "tcga_brca", "centers.csv"), keep_default_na=False)
    folds = pd.read_csv(find_file(root, "tcga_brca", "train_test_split.csv"), index_col="pid")["fold"]
    table = pd.read_csv(find_file(root, "tcga_brca", "brca.csv"))
    # A TCGA barcode has the tissue source site at these places, as in TCGA-A2-A0T2.
    region = table["pid"].str[5:7].map(dict(zip(centers["TSS Code"], centers["Region"], strict=True)))
    fold = table["pid"].map(folds)
    features = tuple(column for column in table.columns if column not in ("pid", "E", "T"))
    x = table[list(features)].to_numpy(dtype=np.float32)
    if normalize == "public":
        # Only the age: all other columns are 0 or 1 already.
        x[:, 0] = TCGA_AGES.scale(x[:, 0])
    y = table[["E", "T"]].to_numpy(dtype=np.float32)
    parts, tests = (
        [(name, x[rows], y[rows]) for name in TCGA_REGIONS for rows in [(region == name) & (fold == part)]]
        for part in ("train", "test")
    )
    shares = Shares(users, None, allocation, seed)
    return federate_fixed(TCGA_BRCA, parts, tests, shares, normalize=normalize, features=features, pairs=True)


class _HeartDisease(Dataset):
    def silo_names(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return ("pooled",) if self.argument(arguments, "silos") == 1 else HEART_CENTERS


_HEART_FILES = {
    "processed.cleveland.data": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "processed.hungarian.data": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "processed.switzerland.data": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "processed.va.data": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}
_FLAMBY = "https://raw.githubusercontent.com/owkin/FLamby/main/flamby/datasets/fed_tcga_brca/"

HEART_DISEASE = _HeartDisease(
    name="heart_disease",
    loader=heart_disease,
    record_shape=(len(HEART_COLUMNS),),
    classes=2,
    features=tuple(HEART_COLUMNS),
    schema=Schema(
        user="patient",
        label="disease",
        classes=("no", "yes"),
        numeric=HEART_COLUMNS,
        out_of_range="clip",
    ),
    private_scaling="Each center's features are standardized by the mean and standard deviation of its own training "
    "rows, which are private; choose normalize='public' for public constants.",
    origin=Origin(
        rows=740,
        license="CC BY 4.0",
        publisher="UCI Machine Learning Repository, id 45",
        files=_HEART_FILES,
        urls=urls_in(
            _HEART_FILES, "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
        ),
    ),
)
TCGA_BRCA = Dataset(
    name="tcga_brca",
    loader=tcga_brca,
    record_shape=(39,),
    labels="survival",
    silos=TCGA_REGIONS,
    origin=Origin(
        rows=1088,
        license="TCGA open-access clinical data; re-identification is forbidden",
        publisher="FLamby, fed_tcga_brca",
        files={
            "brca.csv": "07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020",
            "centers.csv": "d610df2dae0203ea229c9579747ed3eb8d28e137c5378f55acc6fe6b4632bb1d",
            "train_test_split.csv": "1249c6543a4060ff0fdaf8510fc37017755836db6c9fc5e6af96057c36510990",
        },
        urls={
            "brca.csv": (_FLAMBY + "brca.csv",),
            "centers.csv": (_FLAMBY + "centers.csv",),
            "train_test_split.csv": (_FLAMBY + "dataset_creation_scripts/train_test_split.csv",),
        },
    ),
)
