"""The records of one organization, with their labels, users and budgets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from silodp.data.inputs import NamedArrays, get_kind, list_arrays
from silodp.data.public import UNLABELED, LabelKind
from silodp.errors import SilodpError
from silodp.settings import check_choice, check_list
from silodp.text import shorten

MAX_NAME_LENGTH = 100
"""Characters of a silo's name: it is part of what silos sign and send each other."""


@dataclass(frozen=True, eq=False)
class SiloData:
    """One organization's table.

    Attributes:
        name: unique within a federation.
        x: (n, ...) float32 features, finite, which public constants have scaled already; or (n, ...) int64 ids of
            tokens or categories, whose number `Federation.categories` declares; or a mapping of names to such arrays,
            which the model gets as keyword arguments (kept as `NamedArrays`).
        y: (n,) int64 class numbers, or (n, ...) one for each place of a record (pixels, voxels, tokens), where −100
            marks a place without a label; (n,) float32 real targets, (n, 2) float32 [event 0/1, time ≥ 0], or (n, k)
            float32 several labels, whose kind `labels` declares.
        user: (n,) int64, the number 0..U-1 of the user to whom each record belongs; the numbering is public. In
            test data, -1 marks a record that is assigned to no user.
        budget: (n,) float64, the ε that each record may be charged, finite and above 0; None if records have no
            budgets. Budgets are public. If the unit of privacy is the record, the number of records is public
            too.
        test: held-out records of this organization, with persons numbered among themselves (0, 1, …) and no budgets;
            None where it has none.
        identifiers: what identifies the users, by their numbers, the same text in all silos; None where all silos
            number users alike. It is private.
        labels: kind of y: "multilabel" for k ≥ 2 yes/no labels, "real" for one number or several, "classes" or
            "survival". None: by its type and shape, where two columns are event and time.

    n may be 0. The arrays are kept, not copied: do not write to them.

    Raises:
        SilodpError: a wrong shape or dtype, or a value that is not finite.
    """

    name: str
    x: Any
    y: NDArray[Any]
    user: NDArray[np.int64]
    budget: NDArray[np.float64] | None = None
    test: SiloData | None = None
    identifiers: tuple[str, ...] | None = None
    labels: LabelKind | None = None

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not _is_encodable(name):
            raise SilodpError(
                f"a silo's name is {shorten(name)}; give every silo a name of 1 to {MAX_NAME_LENGTH} characters",
                code="data.array",
                field="name",
            )
        if isinstance(self.x, Mapping):
            object.__setattr__(self, "x", self._name_arrays(self.x))
        arrays = {f"x[{name!r}]" if name else "x": array for name, array in list_arrays(self.x).items()}
        for field, array in {**arrays, "y": self.y, "user": self.user}.items():
            if not isinstance(array, np.ndarray):
                raise self._make_error(f"{field} is a {type(array).__name__}; give a numpy array")
        for field, array in arrays.items():
            self._check_features(field, array)
        self._check_types()
        if self.labels is None:
            object.__setattr__(self, "labels", find_label_kind(self.y))
        if len({len(array) for array in arrays.values()}) > 1:
            raise self._make_error(
                "the arrays of x have different numbers of records; give one row of each per record"
            )
        if not len(self.x) == len(self.y) == len(self.user):
            raise self._make_error(
                f"x, y and user have {len(self.x)}, {len(self.y)} and {len(self.user)} records; give one label and "
                "one user number per record"
            )
        if self.identifiers is not None:
            check_list("identifiers", self.identifiers, str)
        if self.budget is not None:
            check_budgets(self.budget, len(self.x), f"silo {name!r}", "record")
        if self.test is not None:
            self._check_test(self.test)
        for field, array in {**arrays, "y": self.y}.items():
            # Ids and classes are whole numbers, which are all finite.
            finite = np.isfinite(array) if array.dtype.kind == "f" else np.ones((), bool)
            if not finite.all():
                record = int(np.argwhere(~finite)[0][0])
                raise self._make_error(
                    f"{field} of record {record} is not finite; replace or drop NaN and infinite values before training"
                )
        if self.labels == "multilabel" and not np.isin(self.y, (0, 1)).all():
            raise self._make_error("y holds a label other than 0 or 1; give 1 for yes and 0 for no")
        if self.labels == "survival" and not (
            np.isin(self.y[:, 0], (0, 1)).all() and (self.y[:, 1] >= 0).all()
        ):
            raise self._make_error(
                "y holds an event other than 0 or 1, or a negative time; give [event, time] with event 0 (censored) "
                "or 1 and time ≥ 0, or declare what the columns are (labels='real' or 'multilabel')"
            )

    def _check_test(self, test: SiloData) -> None:
        """Check that held-out records are of the same kind as the others, and belong to persons."""
        if not isinstance(test, SiloData):
            raise self._make_error(f"test is a {type(test).__name__}; give a SiloData")
        # Metrics would fail on other columns only after training.
        alike = get_kind(test.x) == get_kind(self.x) and test.y.shape[1:] == self.y.shape[1:]
        alike = alike and test.labels == self.labels
        if not alike or test.y.dtype != self.y.dtype:
            raise self._make_error(
                "test has records of another shape or kind; give both the same columns and label"
            )
        if (test.user < 0).any():
            raise self._make_error("test has records of no person; number their persons from 0")

    def _name_arrays(self, arrays: Mapping[Any, Any]) -> NamedArrays:
        """Return the arrays of a mapping, whose names the model takes as keyword arguments."""
        if not arrays or not all(isinstance(name, str) and name.isidentifier() for name in arrays):
            raise self._make_error(
                f"x has the names {shorten(list(arrays))}; give at least one array, named like an argument of the model"
            )
        return NamedArrays(arrays)

    def _check_features(self, name: str, x: NDArray[Any]) -> None:
        """Check shape and dtype of one array of x."""
        if x.size == 0 and 0 in x.shape[1:]:
            raise self._make_error(f"{name} has shape {x.shape}, so no features; give at least one")
        # Small integers are most often measurements; as ids, a model would embed them. So the caller says which.
        if x.dtype.kind in "iub" and x.dtype != np.int64:
            raise SilodpError(
                f"silo {self.name!r}: {name} holds whole numbers ({x.dtype}); give measurements as float32 "
                "(.astype(numpy.float32)), and ids of tokens or categories as int64",
                code="model.integer_inputs",
                field="x",
            )
        if x.dtype not in (np.float32, np.int64) or x.ndim < 2:
            raise self._make_error(
                f"{name} has shape {x.shape} and dtype {x.dtype}; give (records, features…) as float32, e.g. "
                ".astype(numpy.float32), or ids as int64"
            )

    def _check_types(self) -> None:
        """Check shapes and dtypes of y and user."""
        y, user = self.y, self.user
        if self.labels is not None:
            check_choice("labels", self.labels, get_args(LabelKind))
        is_table = y.dtype == np.float32 and y.ndim == 2 and y.shape[1] >= 2
        is_single = y.dtype == np.float32 and y.ndim == 1
        are_classes = y.dtype == np.int64 and y.ndim >= 1 and 0 not in y.shape[1:]
        fits = {
            None: are_classes or is_single or (is_table and y.shape[1] == 2),
            "classes": are_classes,
            "real": is_single or is_table,
            "survival": is_table and y.shape[1] == 2,
            "multilabel": is_table,
        }
        if not fits[self.labels]:
            declared = "" if self.labels is None else f" (labels='{self.labels}')"
            raise self._make_error(
                f"y has shape {y.shape} and dtype {y.dtype}{declared}; give (n,) or (n, ...) int64 classes, (n,) "
                "float32 targets, (n, 2) float32 [event, time], or (n, k) float32 with labels='multilabel' (k labels "
                "of 0 and 1) or labels='real' (k numbers)"
            )
        if user.dtype != np.int64 or user.ndim != 1:
            raise self._make_error(
                f"user has shape {user.shape} and dtype {user.dtype}; give (n,) int64 user numbers"
            )

    def _make_error(self, reason: str) -> SilodpError:
        return SilodpError(f"silo {self.name!r}: {reason}", code="data.array")

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        # Only shapes: printed text ends up in logs and error reports, which must not contain private rows. A
        # refused table is also printed in an error report, so a field may be something other than an array.
        named = {name: getattr(self, name) for name in ("y", "user", "budget")}
        named = {
            **{f"x.{name}" if name else "x": array for name, array in list_arrays(self.x).items()},
            **named,
        }
        arrays = {name: array for name, array in named.items() if isinstance(array, np.ndarray)}
        shapes = [f"{name}={array.dtype}{array.shape}" for name, array in arrays.items()]
        is_table = isinstance(self.x, NamedArrays) or (isinstance(self.x, np.ndarray) and self.x.ndim)
        records = [f"records={len(self)}"] if is_table else []
        return f"SiloData({', '.join([repr(self.name), *records, *shapes])})"

    @property
    def held_out(self) -> SiloData:
        """The held-out records, of which there may be none."""
        if self.test is not None:
            return self.test
        # Views of no rows keep shapes and types, which callers compare.
        return SiloData(self.name, self.x[:0], self.y[:0], self.user[:0], labels=self.labels)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the name and of the shapes, dtypes and bytes of all arrays.

        It is computed from private rows: keep it local.
        """
        hasher = hashlib.sha256(repr(self.name).encode())
        if isinstance(self.x, NamedArrays):
            hasher.update(repr(list(self.x.keys())).encode())
        features = list_arrays(self.x).values()
        for array in (*features, self.y, self.user, *(() if self.budget is None else (self.budget,))):
            # The same bytes in another shape or type are other data.
            hasher.update(f"{array.shape}{array.dtype.str}".encode())
            hasher.update(np.ascontiguousarray(array).data)
        # Only where it says more than the array: digests of older checkpoints stay as they are.
        if self.labels != find_label_kind(self.y):
            hasher.update(str(self.labels).encode())
        if self.identifiers is not None:
            hasher.update(json.dumps(self.identifiers).encode())
        return hasher.hexdigest()


def find_label_kind(y: NDArray[Any]) -> LabelKind:
    """Return the kind of labels whose kind nobody declared."""
    return "classes" if y.dtype == np.int64 else "survival" if y.ndim == 2 else "real"


def find_wrong_class(y: NDArray[np.int64], classes: int) -> int | None:
    """Return a class number that is none of 0..classes−1, nor marks a place without a label; None: all are right."""
    known = (y >= 0) & (y < classes)
    # The only label of a record cannot be left out: the record would be in no loss and in no count.
    known |= (y == UNLABELED) & (y.ndim > 1)
    return None if known.all() else int(y[~known][0])


def check_budgets(budgets: Any, count: int, where: str, unit: str) -> None:
    """Check that per-unit budgets are finite numbers above 0.

    Args:
        budgets: should be (count,) float64, an ε each.
        count: number of units.
        where: beginning of the message.
        unit: "record" or "user", for the message.

    Raises:
        SilodpError: a budget is wrong; the message says how many are wrong, but no value and no record.
    """
    if not isinstance(budgets, np.ndarray) or budgets.dtype != np.float64 or budgets.shape != (count,):
        raise SilodpError(
            f"{where}: budgets are not an array ({count},) of float64; give one ε for every {unit}",
            code="data.budgets",
        )
    # NaN compares as not above 0, and infinity is refused: it would mean no privacy at all.
    wrong = int((~(np.isfinite(budgets) & (budgets > 0))).sum())
    if wrong:
        raise SilodpError(
            f"{where}: {wrong} of {count} budgets are missing, infinite or not above 0; give every {unit} an ε > 0",
            code="data.budgets",
        )


def scale_to_range(
    x: NDArray[Any], low: NDArray[Any] | float, high: NDArray[Any] | float
) -> NDArray[np.float32]:
    """Clip to the public range [low, high] and map it to [-1, 1]; same shape, float32."""
    clipped = np.clip(x, low, high)  # the ends are public, so that no cell tells of the others
    return np.asarray(2 * (clipped - low) / (np.asarray(high) - low) - 1, dtype=np.float32)


def _is_encodable(text: str) -> bool:
    """Whether a text can be written as UTF-8; a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
