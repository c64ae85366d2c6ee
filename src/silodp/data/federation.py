"""What one organization holds (`SiloData`) and what all of them hold together (`Federation`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from silodp.data.budget_distributions import PREFERENCES, Preference
from silodp.data.public import LabelKind, PublicData, digest_user_index
from silodp.errors import SilodpError, shorten

if TYPE_CHECKING:
    from silodp.data.tables.reader import Schema


MOST_NAME = 100
"""Characters of a silo's name: it is part of what silos sign and send each other."""


def is_encodable(text: str) -> bool:
    """Whether a text has an encoding as UTF-8; one with a lone surrogate has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class SiloData:
    """One organization's table.

    Attributes:
        name: unique within a federation.
        x: (n, ...) float32 features, finite. Public constants have scaled them already.
        y: (n,) int64 class numbers, (n,) float32 real targets, or (n, 2) float32 [event 0/1, time ≥ 0].
        user: (n,) int64, the public index of the person each record is about, 0..U-1 (-1, in test data
            only: nobody of the federation).
        budget: (n,) float64, the ε that each record may be charged, finite and above 0; None where records have none.
            Budgets are public, as the number of records is where records are the unit.

    n may be 0. The arrays are kept, not copied: do not write to them.

    Raises:
        SilodpError: a wrong shape or dtype, or a value that is not finite.
    """

    name: str
    x: NDArray[np.float32]
    y: NDArray[Any]
    user: NDArray[np.int64]
    budget: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if (
            not isinstance(self.name, str)
            or not 0 < len(self.name) <= MOST_NAME
            or not is_encodable(self.name)
        ):
            raise SilodpError(
                f"a silo's name is {shorten(self.name)}; give every silo a name of 1 to {MOST_NAME} characters",
                code="data.array",
                field="name",
            )
        for field in ("x", "y", "user"):
            if not isinstance(getattr(self, field), np.ndarray):
                kind = type(getattr(self, field)).__name__
                raise SilodpError(
                    f"silo {self.name!r}: {field} is a {kind}; give a numpy array", code="data.array"
                )
        if self.x.size == 0 and 0 in self.x.shape[1:]:
            raise SilodpError(
                f"silo {self.name!r}: x has shape {self.x.shape}, so no features; give at least one",
                code="data.array",
            )
        if self.x.dtype.kind in "iub":
            raise SilodpError(
                f"silo {self.name!r}: x holds whole numbers ({self.x.dtype}); give measurements as float32 "
                "(x.astype(numpy.float32)); ids of tokens or categories are not supported as inputs yet: one-hot or "
                "embed them beforehand",
                code="model.integer_inputs",
                field="x",
            )
        if self.x.dtype != np.float32 or self.x.ndim < 2:
            raise SilodpError(
                f"silo {self.name!r}: x has shape {self.x.shape} and dtype {self.x.dtype}; "
                "give (records, features…) as float32, e.g. x.astype(numpy.float32)",
                code="data.array",
            )
        survival = self.y.dtype == np.float32 and self.y.ndim == 2 and self.y.shape[1] == 2
        plain = self.y.dtype in (np.int64, np.float32) and self.y.ndim == 1
        if not (survival or plain):
            raise SilodpError(
                f"silo {self.name!r}: y has shape {self.y.shape} and dtype {self.y.dtype}; give (n,) int64 "
                "classes, (n,) float32 targets or (n, 2) float32 [event, time]",
                code="data.array",
            )
        if self.user.dtype != np.int64 or self.user.ndim != 1:
            raise SilodpError(
                f"silo {self.name!r}: user has shape {self.user.shape} and dtype {self.user.dtype}; "
                "give (n,) int64 user numbers",
                code="data.array",
            )
        if not len(self.x) == len(self.y) == len(self.user):
            raise SilodpError(
                f"silo {self.name!r}: x, y and user have {len(self.x)}, {len(self.y)} and {len(self.user)} "
                "records; give one label and one user number per record",
                code="data.array",
            )
        if self.budget is not None:
            check_budgets(self.budget, len(self.x), f"silo {self.name!r}", "record")
        for field in ("x", "y"):
            finite = np.isfinite(getattr(self, field))
            if not finite.all():
                record = int(np.argwhere(~finite)[0][0])
                raise SilodpError(
                    f"silo {self.name!r}: {field} of record {record} is not finite; "
                    "replace or drop NaN and infinite values before training",
                    code="data.array",
                )
        if survival and not (np.isin(self.y[:, 0], (0, 1)).all() and (self.y[:, 1] >= 0).all()):
            raise SilodpError(
                f"silo {self.name!r}: y holds an event other than 0 or 1, or a negative time; "
                "give [event, time] with event 0 (censored) or 1 and time ≥ 0",
                code="data.array",
            )

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        # Shapes only: what is printed ends up in logs and error reports, where private rows must not be. Arrays that
        # are none are left out, since an error report may print a table that was refused.
        named = {name: getattr(self, name) for name in ("x", "y", "user", "budget")}
        arrays = {name: array for name, array in named.items() if isinstance(array, np.ndarray)}
        shapes = [f"{name}={array.dtype}{array.shape}" for name, array in arrays.items()]
        records = [f"records={len(self)}"] if "x" in arrays and self.x.ndim else []
        return f"SiloData({', '.join([repr(self.name), *records, *shapes])})"

    def digest(self) -> str:
        """SHA-256 (hex) over name, shapes, dtypes and bytes. It fingerprints private rows: keep it local."""
        hasher = hashlib.sha256(repr(self.name).encode())
        for array in (self.x, self.y, self.user, *(() if self.budget is None else (self.budget,))):
            hasher.update(f"{array.shape}{array.dtype.str}".encode())
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()


def check_budgets(budgets: Any, count: int, where: str, unit: str) -> None:
    """Refuse personal budgets that are not `count` finite numbers above 0; how many are wrong is said, not whose."""
    if not isinstance(budgets, np.ndarray) or budgets.dtype != np.float64 or budgets.shape != (count,):
        raise SilodpError(
            f"{where}: budgets are no array ({count},) of float64; give one ε for every {unit}",
            code="data.budgets",
        )
    wrong = int((~(np.isfinite(budgets) & (budgets > 0))).sum())
    if wrong:
        raise SilodpError(
            f"{where}: {wrong} of {count} budgets are missing, infinite or not above 0; give every {unit} an ε > 0",
            code="data.budgets",
        )


@dataclass(frozen=True, eq=False)
class Federation:
    """All silos, the public number of users, and the held-out records.

    Attributes:
        silos: at least one, names distinct, features and label kind alike. A silo may have no records.
        users: U ≥ 1, public. A user may have no records.
        test: held-out records, pooled; user is -1 where not allocated. Not protected by the guarantee.
        assumptions: what was estimated from private rows, one sentence each; printed with the guarantee.
        name: what the data set is called.
        classes: public number of classes (y int64 in 0..classes-1), or None for real or survival targets.
        features: names of the features, or () where they have none (images).
        user_keys: the key of every user, in the order of the index, or None.
        user_budgets: (U,) float64, the ε that each user may be charged, public; None where users have none.

    Raises:
        SilodpError: the parts do not fit together.
    """

    silos: tuple[SiloData, ...]
    users: int
    test: SiloData | None
    assumptions: tuple[str, ...] = ()
    name: str = "federation"
    classes: int | None = None
    features: tuple[str, ...] = ()
    user_keys: tuple[str, ...] | None = None
    user_budgets: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.silos, tuple) or not self.silos:
            raise SilodpError(
                f"federation {self.name!r} has no tuple of silos; give at least one SiloData",
                code="data.federation",
            )
        for part in (*self.silos, *([] if self.test is None else [self.test])):
            if not isinstance(part, SiloData):
                raise SilodpError(
                    f"federation {self.name!r} has a {type(part).__name__} among its silos or as test; give a SiloData",
                    code="data.federation",
                )
        for field, least in (("users", 1), ("classes", 2)):
            value = getattr(self, field)
            if field == "classes" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise SilodpError(
                    f"federation {self.name!r}: {field} is {value!r}; give a whole number, at least {least}",
                    code="data.federation",
                )
            object.__setattr__(self, field, int(value))  # numpy's integers are no JSON
        names = [silo.name for silo in self.silos]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SilodpError(
                f"federation {self.name!r}: two silos are named {twice!r}; rename one", code="data.federation"
            )
        if self.user_keys is not None:
            if len(self.user_keys) != self.users or len(set(self.user_keys)) < self.users:
                raise SilodpError(
                    f"federation {self.name!r}: {len(self.user_keys)} user keys for {self.users} users; give one "
                    "each, all different",
                    code="data.federation",
                )
            if not all(isinstance(key, str) for key in self.user_keys):
                raise SilodpError(
                    f"federation {self.name!r}: a user key is no text; give every key as text",
                    code="data.federation",
                )
        if self.user_budgets is not None:
            check_budgets(self.user_budgets, self.users, f"federation {self.name!r}", "user")
        first = self.silos[0]
        if self.features and first.x.shape[1:] != (len(self.features),):
            raise SilodpError(
                f"federation {self.name!r}: {len(self.features)} feature names for features of shape "
                f"{first.x.shape[1:]}; give one name per column",
                code="data.federation",
            )
        for silo in self.silos:
            self._check(silo, first, lowest_user=0)
        if self.test is not None:
            self._check(self.test, first, lowest_user=-1)

    def _check(self, silo: SiloData, first: SiloData, lowest_user: int) -> None:
        if silo.x.shape[1:] != first.x.shape[1:]:
            raise SilodpError(
                f"silo {silo.name!r} has features of shape {silo.x.shape[1:]} but silo {first.name!r} of "
                f"{first.x.shape[1:]}; give all silos the same columns",
                code="data.federation",
            )
        if silo.y.dtype != first.y.dtype or silo.y.shape[1:] != first.y.shape[1:]:
            raise SilodpError(
                f"silo {silo.name!r} has labels {silo.y.dtype}{silo.y.shape[1:]} but silo {first.name!r} "
                f"{first.y.dtype}{first.y.shape[1:]}; give all silos the same kind of label",
                code="data.federation",
            )
        outside = silo.user[(silo.user < lowest_user) | (silo.user >= self.users)]
        if outside.size:
            raise SilodpError(
                f"silo {silo.name!r}: user {outside[0]} is outside {lowest_user}..{self.users - 1}; "
                "renumber the users or raise the public number of users",
                code="data.federation",
            )
        if self.classes is not None:
            if silo.y.dtype != np.int64:
                raise SilodpError(
                    f"silo {silo.name!r}: labels are {silo.y.dtype} but classes is {self.classes}; "
                    "give int64 class numbers, or classes=None",
                    code="data.federation",
                )
            wrong = silo.y[(silo.y < 0) | (silo.y >= self.classes)]
            if wrong.size:
                raise SilodpError(
                    f"silo {silo.name!r}: label {wrong[0]} is outside 0..{self.classes - 1}; "
                    "correct the label or the public number of classes",
                    code="data.federation",
                )

    def __repr__(self) -> str:
        # Neither rows nor users' keys, as in `SiloData`.
        return (
            f"Federation({self.name!r}, users={self.users}, classes={self.classes}, silos={self.silos}, "
            f"test={self.test}, user_budgets={self.user_budgets is not None})"
        )

    @property
    def labels(self) -> LabelKind:
        """The kind of label that all silos have."""
        y = self.silos[0].y
        return "survival" if y.ndim == 2 else "classes" if y.dtype == np.int64 else "real"

    def public(self) -> PublicData:
        """Return the facts that everyone may know, with the digest of the users' index and of their budgets."""
        budgets = None if self.user_budgets is None else tuple(self.user_budgets.tolist())
        return PublicData(
            name=self.name,
            silos=tuple(silo.name for silo in self.silos),
            users=self.users,
            record_shape=self.silos[0].x.shape[1:],
            labels=self.labels,
            classes=self.classes,
            features=self.features,
            assumptions=self.assumptions,
            user_budgets=budgets,
            record_budgets=all(silo.budget is not None for silo in self.silos),
            index_digest=digest_user_index(self.users, self.user_keys, budgets),
        )

    def counts(self) -> NDArray[np.int64]:
        """Records of every user in every silo: (S, U) int64, n[s,u]. Private."""
        rows = [np.bincount(silo.user, minlength=self.users) for silo in self.silos]
        return np.stack(rows).astype(np.int64)

    def with_budgets(
        self,
        budgets: str | Preference | Sequence[NDArray[np.float64]] | NDArray[np.float64],
        seed: int = 0,
        unit: Literal["record", "user"] = "record",
    ) -> Federation:
        """The same federation with a personal budget for every training record, or for every user.

        Args:
            budgets: a name in `PREFERENCES` or a function (count, generator) -> (count,), drawn once for everyone; or
                the budgets themselves: one array (n,) over all records in the order of the silos, one array per silo,
                or (U,) for users.
            seed: of the draw.
            unit: who has them.

        Raises:
            SilodpError: an unknown name, another number of budgets than units, or budgets that are none, counted.
        """
        if unit not in ("record", "user"):
            raise SilodpError(f"unit is {unit!r}; choose 'record' or 'user'", code="data.federation")
        if isinstance(budgets, str):
            if budgets not in PREFERENCES:
                raise SilodpError(
                    f"budgets is {budgets!r}; choose one of {', '.join(PREFERENCES)}", code="data.federation"
                )
            budgets = PREFERENCES[budgets]
        sizes = [len(silo) for silo in self.silos]
        count = self.users if unit == "user" else sum(sizes)
        if callable(budgets):
            given: Any = budgets(count, np.random.default_rng(seed))
        elif isinstance(budgets, np.ndarray):
            given = budgets
        else:
            parts = [np.atleast_1d(part) for part in budgets] if isinstance(budgets, Sequence) else []
            if not parts:
                raise SilodpError(
                    f"budgets is a {type(budgets).__name__}; give one of {', '.join(PREFERENCES)}, a function, or "
                    f"arrays of one ε for every {unit}",
                    code="data.federation",
                )
            given = np.concatenate(parts)
        if np.issubdtype(given.dtype, np.number):
            given = given.astype(np.float64)
        check_budgets(given, count, f"federation {self.name!r}", unit)
        if unit == "user":
            return replace(self, user_budgets=given)
        shares = np.split(given, np.cumsum(sizes)[:-1])
        silos = tuple(replace(silo, budget=part) for silo, part in zip(self.silos, shares, strict=True))
        return replace(self, silos=silos)

    def digest(self) -> str:
        """SHA-256 (hex) over names, U, classes and every array, to recognize a checkpoint of other data.

        It fingerprints private rows: keep it local.
        """
        header = (self.name, self.users, self.classes, self.features, self.user_keys, self.test is not None)
        hasher = hashlib.sha256(repr(header).encode())
        for silo in (*self.silos, *([self.test] if self.test is not None else [])):
            hasher.update(bytes.fromhex(silo.digest()))
        return hasher.hexdigest()

    @classmethod
    def from_tables(
        cls,
        files: Mapping[str, str | Path] | Sequence[str | Path],
        schema: Schema,
        name: str = "federation",
    ) -> Federation:
        """Read one CSV or Parquet table per silo; see `silodp.data.tables.reader.read_tables`."""
        from silodp.data.tables.reader import read_tables  # tables builds on this module

        return read_tables(files, schema, name)
