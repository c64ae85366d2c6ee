"""The federation: the tables of all silos, their public facts, and how users are linked across silos."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from silodp.assumption import Assumption, as_assumptions
from silodp.data.budgets import load_budgets
from silodp.data.inputs import Categories, Input, NamedArrays, describe_inputs, find_fault
from silodp.data.persons import PersonKey
from silodp.data.public import ASSUMES_INDEX_FROM_TABLES, LabelKind, PublicData, digest_user_index
from silodp.data.silo_data import SiloData, check_budgets, find_label_kind, find_wrong_class
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError
from silodp.settings import MAX_WHOLE, Settings
from silodp.text import shorten

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Federation(Settings):
    """All silos, the public number of users, and the held-out records.

    Attributes:
        silos: at least one, names distinct, features and label kind alike. A silo may have no records.
        users: U ≥ 1, public. A user may have no records.
        test: held-out records, pooled; user is -1 where not allocated. Not protected by the guarantee.
        assumptions: what the guarantee rests on or does not cover, printed with the guarantee; a plain sentence is
            read by `Assumption.from_text`.
        name: what the data set is called.
        classes: public number of classes (y int64 in 0..classes-1), or None for real or survival targets.
        features: names of the features, or () where they have none (images).
        user_keys: the key of every user, in the order of the index, or None. With an identity profile there may be
            fewer than U: the last users then have no records.
        user_budgets: (U,) float64, the ε that each user may be charged, public; None where users have none.
        identity_digest: digest of the identity profile by which the keys were read, which declares U; "" without one.
        schema: how the features were read and scaled, by public constants alone; a run keeps that part of it with the
            model. None where nobody declared it, or where a constant was estimated from rows.
        categories: public number of categories of the ids (int64) in x, which run from 0: one number for all of them;
            one for each place of the last axis (each column); or such numbers by the name of the array. None where x
            holds real numbers only.

    Raises:
        SilodpError: the parts do not fit together.
    """

    silos: tuple[SiloData, ...]
    users: int
    test: SiloData | None
    assumptions: tuple[Assumption | str, ...] = ()
    name: str = "federation"
    classes: int | None = None
    features: tuple[str, ...] = ()
    user_keys: tuple[str, ...] | None = None
    user_budgets: NDArray[np.float64] | None = None
    identity_digest: str = ""
    schema: Schema | None = field(default=None, repr=False)
    categories: Categories = None

    def __post_init__(self) -> None:
        if not isinstance(self.silos, tuple) or not self.silos:
            raise self._make_error("there is no tuple of silos; give at least one SiloData")
        for part in (*self.silos, *([] if self.test is None else [self.test])):
            if not isinstance(part, SiloData):
                raise self._make_error(f"a silo or test is a {type(part).__name__}; give a SiloData")
        for name, least in (("users", 1), ("classes", 2)):
            value = getattr(self, name)
            if name == "classes" and value is None:
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, Integral)
                or not least <= int(value) <= MAX_WHOLE
            ):
                raise self._make_error(
                    f"{name} is {value!r}; give a whole number from {least} to {MAX_WHOLE}"
                )
            object.__setattr__(self, name, int(value))  # json does not write numpy's integers
        names = [silo.name for silo in self.silos]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise self._make_error(f"two silos are named {twice!r}; rename one")
        for name in ("features", "user_keys"):
            value = getattr(self, name)
            is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            if value is not None and not (is_list and set(map(type, value)) <= {str}):
                raise self._make_error(f"{name} is {shorten(value)}; give a list, every one as text")
        super().__post_init__()
        object.__setattr__(self, "assumptions", as_assumptions(self.assumptions))
        if self.user_keys is not None:
            # A profile declares U for people without records, too, and those have no key here.
            keys = self.users if not self.identity_digest else min(len(self.user_keys), self.users)
            if len(self.user_keys) != keys or len(set(self.user_keys)) < keys:
                raise self._make_error(
                    f"{len(self.user_keys)} user keys for {self.users} users; give one each, all different"
                )
        if self.user_budgets is not None:
            check_budgets(self.user_budgets, self.users, f"federation {self.name!r}", "user")
        first = self.silos[0]
        self.inputs  # noqa: B018  raises where categories do not fit
        if self.features and self._count_columns() != len(self.features):
            raise self._make_error(
                f"{len(self.features)} feature names for {self._count_columns() or 'no'} columns; give one name per "
                "column"
            )
        for silo in self.silos:
            self._check(silo, first, lowest_user=0)
        if self.test is not None:
            self._check(self.test, first, lowest_user=-1)
        self._check_held_out_persons()

    def _check(self, silo: SiloData, first: SiloData, lowest_user: int) -> None:
        """Check a silo's table against that of the first silo and against the public numbers."""
        faults = (find_fault(one.x, self._record_shape, self.inputs) for one in (silo, silo.held_out))
        fault = next((fault for fault in faults if fault is not None), None)
        if fault is not None:
            remedy = ", and ids within the public categories" if self.inputs else ""
            raise self._make_error(f"silo {silo.name!r}: {fault}; give all silos the same columns{remedy}")
        found, wanted = ((one.labels, one.y.dtype, one.y.shape[1:]) for one in (silo, first))
        if found != wanted:
            shown = [f"'{kind}', {dtype}{shape}" for kind, dtype, shape in (found, wanted)]
            raise self._make_error(
                f"silo {silo.name!r} has labels {shown[0]} but silo {first.name!r} {shown[1]}; give all silos the same "
                "kind of label"
            )
        # Test records may have -1, which names no user; as an index it would be the last one.
        outside = silo.user[(silo.user < lowest_user) | (silo.user >= self.users)]
        if outside.size:
            raise self._make_error(
                f"silo {silo.name!r}: user {outside[0]} is outside {lowest_user}..{self.users - 1}; renumber the "
                "users or raise the public number of users"
            )
        if self.classes is None and silo.labels == "classes" and silo.y.ndim > 1:
            raise self._make_error(
                f"silo {silo.name!r}: y has a class in every place of a record, {silo.y.shape[1:]}; give the public "
                "number of classes, or labels of another kind as float32 with SiloData(labels=...)"
            )
        if self.classes is None:
            return
        if silo.y.dtype != np.int64:
            raise self._make_error(
                f"silo {silo.name!r}: labels are {silo.y.dtype} but classes is {self.classes}; give int64 class "
                "numbers, or classes=None"
            )
        for labels in (silo.y, silo.held_out.y):
            if (wrong := find_wrong_class(labels, self.classes)) is not None:
                raise self._make_error(
                    f"silo {silo.name!r}: label {wrong} is outside 0..{self.classes - 1}; correct the label or the "
                    "public number of classes"
                )

    def _check_held_out_persons(self) -> None:
        """Refuse a number of a person that belongs to neither numbering: that of the users, and one of their own."""
        # Persons with held-out records alone are not on the public list, so there may be more of them than users. They
        # are numbered 0, 1, …, so that no number reaches that of all held-out records.
        limit = max(self.users, sum(len(silo.held_out) for silo in self.silos))
        for silo in self.silos:
            outside = silo.held_out.user[silo.held_out.user >= limit]
            if outside.size:
                raise self._make_error(
                    f"silo {silo.name!r}: user {outside[0]} in its test records is outside 0..{limit - 1}; number the "
                    "persons as in the training records, or among themselves from 0"
                )

    def _make_error(self, reason: str) -> SilodpError:
        return SilodpError(f"federation {self.name!r}: {reason}", code="data.federation")

    def __repr__(self) -> str:
        # Neither rows nor users' keys, for the reason given in `SiloData`.
        return (
            f"Federation({self.name!r}, users={self.users}, classes={self.classes}, silos={self.silos}, "
            f"test={self.test}, user_budgets={self.user_budgets is not None})"
        )

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The public facts of the arrays of x; () where it is one array of real numbers."""
        return describe_inputs(self.silos[0].x, self.categories)

    @property
    def _record_shape(self) -> tuple[int, ...]:
        x = self.silos[0].x
        return () if isinstance(x, NamedArrays) else tuple(x.shape[1:])

    def _count_columns(self) -> int:
        """Return the number of columns, of which each has a name; 0 where records are no rows of columns."""
        inputs = self.inputs or (Input("", self._record_shape),)
        return sum(one.shape[0] for one in inputs) if all(len(one.shape) == 1 for one in inputs) else 0

    @property
    def labels(self) -> LabelKind:
        """The kind of label that all silos have."""
        first = self.silos[0]
        return first.labels or find_label_kind(first.y)

    @property
    def targets(self) -> int | None:
        """The number of labels of a record, where it has several yes/no labels or several numbers."""
        y = self.silos[0].y
        return y.shape[1] if self.labels in ("real", "multilabel") and y.ndim == 2 else None

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The places of a record that have a class each; () where a record has one label, or several of its own."""
        return tuple(self.silos[0].y.shape[1:]) if self.labels == "classes" else ()

    @property
    def persons(self) -> PersonKey:
        """How records are assigned to persons; public."""
        # A data set that numbers persons by itself may have a schema for its features.
        has_keys = self.user_keys is not None or self.identity_digest != ""
        return PersonKey.of(self.schema if has_keys else None, self.name, self.users)

    def public(self, with_records: bool = False) -> PublicData:
        """Return the facts that everyone may know, with the digest of the users' index and of their budgets.

        Args:
            with_records: also how many training records each silo has, and their budgets; public only where records are
                the unit of privacy.
        """
        by_silo = [silo.budget for silo in self.silos if silo.budget is not None]
        budgets = None if self.user_budgets is None else tuple(self.user_budgets.tolist())
        return PublicData(
            name=self.name,
            silos=tuple(silo.name for silo in self.silos),
            users=self.users,
            record_shape=self._record_shape,
            labels=self.labels,
            classes=self.classes,
            features=self.features,
            assumptions=as_assumptions(self.assumptions),
            user_budgets=budgets,
            record_budgets=all(silo.budget is not None for silo in self.silos),
            record_counts=tuple(len(silo) for silo in self.silos) if with_records else None,
            silo_budgets=tuple(by_silo) if with_records and by_silo else None,
            # With a profile U and the profile are public, and keys are not: not even their hash is passed on.
            index_digest=digest_user_index(
                self.users, None if self.identity_digest else self.user_keys, budgets
            ),
            identity_digest=self.identity_digest,
            inputs=self.inputs,
            label_typical=None if self.schema is None else self.schema.label_typical,
            targets=self.targets,
            label_shape=self.label_shape,
        )

    def counts(self) -> NDArray[np.int64]:
        """Return the number of records of every user in every silo, n[s,u]: (S, U) int64. Private."""
        # With minlength: users without a record in this silo have a column, too.
        rows = [np.bincount(silo.user, minlength=self.users) for silo in self.silos]
        return np.stack(rows).astype(np.int64)

    def with_budgets(
        self,
        budgets: str
        | Callable[[int, np.random.Generator], NDArray[np.float64]]
        | Sequence[NDArray[np.float64]]
        | NDArray[np.float64],
        seed: int = 0,
        unit: Literal["record", "user"] = "record",
    ) -> Federation:
        """Return the same federation with a privacy budget for every training record, or for every user.

        Args:
            budgets: the name of a distribution ("three-levels", "pareto", "mixture") or a function (count, generator)
                -> (count,), drawn once for all units; or the budgets: one array (n,) over all records in the order of
                the silos, one array per silo, or (U,) for users.
            seed: the seed of the draw.
            unit: "record" or "user".

        Raises:
            SilodpError: an unknown name, another number of budgets than units, or budgets that are not finite and
                above 0.
        """
        if unit not in ("record", "user"):
            raise SilodpError(f"unit is {unit!r}; choose 'record' or 'user'", code="data.federation")
        if isinstance(budgets, str):
            named = load_budgets("distributions")
            if budgets not in named:
                raise SilodpError(
                    f"budgets is {budgets!r}; choose one of {', '.join(named)}", code="data.federation"
                )
            budgets = named[budgets]
        sizes = [len(silo) for silo in self.silos]
        count = self.users if unit == "user" else sum(sizes)
        if callable(budgets):
            given: Any = budgets(count, np.random.default_rng(seed))
        elif isinstance(budgets, np.ndarray):
            given = budgets
        elif isinstance(budgets, Sequence) and len(budgets):
            given = np.concatenate([np.atleast_1d(part) for part in budgets])
        else:
            raise SilodpError(
                f"budgets is a {type(budgets).__name__}; give the name of a distribution, a function, or arrays of one "
                f"ε for every {unit}",
                code="data.federation",
            )
        if np.issubdtype(given.dtype, np.number):
            given = given.astype(np.float64)
        check_budgets(given, count, f"federation {self.name!r}", unit)
        if unit == "user":
            return replace(self, user_budgets=given)
        # Drawn for all silos at once, so that shares of a distribution hold over the federation and not in each silo.
        shares = np.split(given, np.cumsum(sizes)[:-1])
        silos = tuple(replace(silo, budget=part) for silo, part in zip(self.silos, shares, strict=True))
        return replace(self, silos=silos)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of names, U, classes and every array, which tells a checkpoint of other data.

        It fingerprints private rows: keep it local.
        """
        header = (self.name, self.users, self.classes, self.features, self.user_keys, self.test is not None)
        hasher = hashlib.sha256(repr(header).encode())
        if self.inputs:
            hasher.update(repr(self.inputs).encode())
        for silo in (*self.silos, *([self.test] if self.test is not None else [])):
            # Digests have one length, so that no array can pass for the end of another.
            hasher.update(bytes.fromhex(silo.digest()))
        return hasher.hexdigest()

    @classmethod
    def from_tables(
        cls,
        files: Mapping[str, str | Path] | Sequence[str | Path],
        schema: Schema,
        name: str = "federation",
    ) -> Federation:
        """Read one table per silo: CSV, TSV (also with .gz), Parquet or .xlsx; see `Schema.reader`.

        Args:
            files: silo name → path, or a list of paths whose stems are the names.
            schema: what the columns mean; other columns are ignored.
            name: the name of the federation.

        Returns:
            Training records by silo, test records pooled (user -1 for users without a number). `assumptions` says when
            the list of ids was taken from the tables, and that a split column may have a user in both splits. Clipped
            values are counted in the log only: their number is private.

        Raises:
            SilodpError: the first bad input, by file, column and data row (the first after the header is row 1).
        """
        from silodp.data.tables.reader import read_tables  # imports pandas, which takes a second

        tables = read_tables(files, schema)
        if ASSUMES_INDEX_FROM_TABLES in tables.assumptions:
            _log.warning(
                "the list of persons is read from the tables, so it is not secret that each of them has a record "
                "there: to keep that secret, declare data.schema.users (a public list) or data.schema.identity"
            )
        schema.check_readers([silo.name for silo in tables.silos])
        return cls(
            silos=tables.silos,
            users=tables.users,
            test=tables.test,
            assumptions=tables.assumptions,
            name=name,
            classes=None if schema.classes is None else len(schema.classes),
            features=schema.features,
            categories=[len(column.categories) for column in schema.code_columns().values()] or None,
            user_keys=tables.user_keys,
            identity_digest="" if tables.profile is None else tables.profile.digest,
            schema=schema,
        )


def count_persons_by_silos(federation: Federation) -> dict[int, int]:
    """Return how many persons have training records in so many silos.

    Args:
        federation: with S silos.

    Returns:
        Number of silos in 0..S -> persons, for every number that occurs. These are counts of private records: they
        belong in no file that is shared.
    """
    silos = (federation.counts() > 0).sum(axis=0)
    numbers, persons = np.unique(silos, return_counts=True)
    return dict(zip(numbers.tolist(), persons.tolist(), strict=True))
