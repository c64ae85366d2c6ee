"""The public declaration of what the columns of every silo's table mean."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from silodp.assumption import RECORD_OWNERS, Assumption
from silodp.data.identity import IdentityProfile, load_profile
from silodp.data.inputs import CODES, NUMERIC, Input
from silodp.data.public import LabelKind
from silodp.data.tables.columns import (
    SETTINGS,
    Reader,
    TableMapping,
    check_typical,
    check_values,
    header_text,
    read_mapping,
    read_reader,
    refuse_schema,
    text_of,
    to_cell,
)
from silodp.data.tables.kinds.categorical import CategoricalColumn
from silodp.data.tables.kinds.column import COLUMN_KINDS, Column
from silodp.data.tables.kinds.numeric import NumericColumn
from silodp.errors import SilodpError
from silodp.plugins import find_plugin, is_reference, refuse_plugins
from silodp.settings import Range, check_choice, check_type
from silodp.text import first_line, is_own, shorten, suggest_name

ASSUMES_CLIPPING = Assumption(
    "ranges-clip",
    "Numbers outside the declared public ranges are clipped to them, record by record.",
    RECORD_OWNERS,
)
ASSUMES_KINDS = Assumption(
    "column-code",
    "Code from outside silodp computes features; it does so from the own cells of each record alone.",
    RECORD_OWNERS,
)
ASSUMES_SPLIT = Assumption(
    "split-persons",
    "Persons may have records in both the training and the test split; test records are not protected.",
    RECORD_OWNERS,
)
UNSCALED_LABEL = (
    "the label is a number that is used as it is, and a step of 1 moves a prediction by about 1 in a round: declare "
    "what is usual by data.schema.label_typical = [center, spread], public like a range ([0, 1] keeps the label as it "
    "is)"
)

_OF_RECORDS = {
    "user", "label", "kind", "classes", "label_typical", "event", "time", "split", "users", "budget", "identity",
    "test_share", "readers", "silos",
}  # fmt: skip
"""Fields that say nothing about features: a model is stored without them."""


@dataclass(frozen=True)
class Schema:
    """The meaning of the columns of every silo's table. All of it is public.

    Attributes:
        user: column of the key that names a user, equal in all silos.
        label: column of the label (kinds "classes" and "real"), or a list of columns where a record has several (kinds
            "real" and "multilabel").
        kind: "classes", "real" (a number), "multilabel" (several columns of yes and no) or "survival" (`event` and
            `time` instead of `label`).
        classes: the label's values, in the order of the class numbers (kind "classes").
        label_typical: (center, spread) of ordinary labels (kind "real"), a pair for each of several: the model learns
            (label − center)/spread, and its predictions are in the unit of the label again. Without it the label is
            used as it is.
        event, time: columns of 0/1 and of a time ≥ 0 (kind "survival").
        numeric: column → public range (low, high), which is mapped to [-1, 1]; or a `NumericColumn` or a table of its
            fields, which may also give typical = (center, spread), by which values are standardized.
        categorical: column → public categories, one-hot in this order; or a `CategoricalColumn` or a table of its
            fields, which may also say which category a missing cell counts as, and that the column is given as codes.
        other: column → a `Column` of another kind, or a table of `kind` and its fields.
        split: optional column holding "train" or "test".
        test_share: instead of `split`: the share of persons whose records are all for testing, between 0 and 1.
            A public hash of the user key decides, so a person is for testing in every silo or in none.
        users: the public list of user keys, or a text file with one key per line; U is its length. Without it
            U is counted in the tables, and the guarantee says so.
        identity: the file of an `IdentityProfile`, which then says how user keys are read, and declares U. It takes
            the place of `users`.
        out_of_range: "refuse" a number outside its range, or "clip" it to the range.
        budget: optional column of the ε that each training record may be charged, above 0; public like the rest.
        reader: how files are written: separator, decimal mark, encoding, sheet, layouts of dates.
        readers: silo → the settings of its file that differ from `reader`, as a table of them; a `Reader` replaces it.
        silos: silo → how its table differs from this schema, a `TableMapping` or a table of its fields.

    Features are the numeric columns, each with its indicator of missing cells beside it if it has one, then the
    one-hot ones, then those of other kinds, then those given as codes, in the order given here. With codes the inputs
    of the model are two arrays by name (`list_inputs`), else they are one. Values are compared as text in Unicode's
    form NFC, after whole floats have become integers ("1.0" is "1"); where all declared values are true and false,
    cells may be true, yes, 1, false, no or 0.
    """

    user: str
    label: str | Sequence[str] | None = None
    kind: LabelKind = "classes"
    classes: Sequence[Any] | None = None
    event: str | None = None
    time: str | None = None
    numeric: Mapping[str, Any] = field(default_factory=dict)
    categorical: Mapping[str, Any] = field(default_factory=dict)
    split: str | None = None
    users: Sequence[Any] | str | Path | None = None
    out_of_range: Literal["refuse", "clip"] = "refuse"
    budget: str | None = None
    identity: str | Path | None = None
    test_share: float | None = None
    reader: Reader = field(default_factory=Reader)
    readers: Mapping[str, Any] = field(default_factory=dict)
    label_typical: Sequence[float | Sequence[float]] | None = None
    silos: Mapping[str, Any] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_type("data.schema.kind", self.kind, str)
        check_type("data.schema.out_of_range", self.out_of_range, str)
        check_choice("data.schema.out_of_range", self.out_of_range, ("refuse", "clip"))
        if self.kind not in get_args(LabelKind):
            reason = f"kind is {self.kind!r}; choose 'classes', 'real', 'multilabel' or 'survival'"
            raise refuse_schema("kind", reason, "data.kind")
        if self.identity is not None:
            check_type("data.schema.identity", self.identity, (str, Path))
            if self.users is not None:
                reason = "identity and users both declare how many persons there are; keep one of them"
                raise refuse_schema("users", reason, "argument.conflict")
        if self.test_share is not None:
            if self.split is not None:
                reason = "split and test_share both say which records are for testing; keep one of them"
                raise refuse_schema("test_share", reason, "argument.conflict")
            Range(least=0, most=1, what="share of persons").check("data.schema.test_share", self.test_share)
        self._check_label()
        sections = {"numeric": "(low, high)", "categorical": "their categories", "other": "their settings"}
        for section, values in sections.items():
            if not isinstance(getattr(self, section), Mapping):
                reason = f"{section} is {getattr(self, section)!r}; give a mapping from columns to {values}"
                raise refuse_schema(section, reason)
            for name, given in getattr(self, section).items():
                # In TOML a setting belongs to the table above it, which may be that of the columns.
                if name in _SETTINGS and isinstance(given, str | int | float):
                    reason = f"{name} is a setting of the schema, and no column: write it above [data.schema.{section}]"
                    raise refuse_schema(f"{section}.{name}", reason)
        if not self.feature_columns:
            raise refuse_schema("", "no features; declare numeric ranges or categorical values")
        self.kinds  # noqa: B018  raises where one is wrong
        if not isinstance(self.reader, Reader):
            object.__setattr__(self, "reader", read_reader(None, self.reader, Reader()))
        check_type("data.schema.readers", self.readers, Mapping)
        readers = {silo: read_reader(silo, given, self.reader) for silo, given in self.readers.items()}
        object.__setattr__(self, "readers", readers)
        self._check_columns_of_readers()
        columns = self.columns
        for column in columns:
            if not isinstance(column, str):
                raise refuse_schema("", f"{column!r} names no column; give the header's text")
        if (twice := _find_repeated(columns)) is not None:
            setting = self.find_setting(twice).removeprefix("data.schema.")
            raise refuse_schema(setting, f"column {twice!r} is declared twice; give every column one meaning")
        if not isinstance(self.silos, Mapping):
            raise refuse_schema("silos", f"silos is {short(self.silos)}; give silo → its mapping")
        silos = {silo: self._read_mapping(silo, given) for silo, given in self.silos.items()}
        # Checked mappings take the place of what was declared, so that no reader checks them again.
        object.__setattr__(self, "silos", silos)

    def _read_mapping(self, silo: str, given: Any) -> TableMapping:
        """Return a mapping with all values as texts; it gives every column its own name, and cells declared values."""
        mapping = read_mapping(silo, given)
        fault = self._find_mapping_fault(f"silos.{silo}", mapping)
        if fault is not None:
            raise refuse_schema(*fault)
        texts = {
            column: {text_of(text): to_cell(value) for text, value in values.items()}
            for column, values in mapping.values.items()
        }
        return TableMapping(dict(mapping.columns), texts, mapping.query)

    def _find_mapping_fault(self, where: str, mapping: TableMapping) -> tuple[str, str] | None:
        """Return the first setting of a mapping that does not fit this schema, and why; None where all do."""
        for column in (*mapping.columns, *mapping.values):
            if column not in self.columns:
                remedy = suggest_name(str(column), self.columns) or "name a column that the schema declares"
                return where, f"{where} maps {column!r}, which is no column; {remedy}"
        setting = f"{where}.columns"
        names = [mapping.columns.get(column, column) for column in self.columns]
        for name in names:
            if not isinstance(name, str) or not name.strip():
                return setting, f"{setting} names {name!r}; give the header's text"
        if (twice := _find_repeated(map(header_text, names))) is not None:
            return setting, f"{setting} takes two columns from {twice!r}; give each a name of its own"
        for column, values in mapping.values.items():
            setting, declared = f"{where}.values.{column}", self._list_declared(column)
            if not declared:
                return setting, (
                    f"{setting} maps values of a column without public values; map those of categories, classes, "
                    "events and splits only"
                )
            if len(set(map(text_of, values))) < len(values):
                return setting, f"{setting} has two values for one text; keep one"
            # Else a mapped cell would be refused row by row, or become a missing one.
            wrong = [value for value in values.values() if to_cell(value) not in declared]
            if wrong:
                remedy = f"choose one of {', '.join(declared)}"
                return setting, f"{setting} has the value {short(wrong[0])}, which is not declared; {remedy}"
        return None

    def _list_declared(self, column: str) -> list[str]:
        """Return the texts of the values that a column may have; none where it has numbers, keys or days."""
        of_labels = (0, 1) if self.kind == "multilabel" else self.classes or ()
        # Numbers, keys and days have no list of values: a table from texts to them could be private.
        listed: Mapping[str | None, Sequence[Any]] = {
            **{name: found.list_values() for name, found in self.kinds.items()},
            **dict.fromkeys(self.label_columns, of_labels),
            self.event: (0, 1),
            self.split: ("train", "test"),
        }
        return [to_cell(value) for value in listed.get(column, ())]

    def _check_columns_of_readers(self) -> None:
        """Check that readers name columns that there are; a misspelled one would be left out in silence."""
        dates = [name for name, column in self.numeric_columns().items() if column.date is not None]
        for reader in (self.reader, *self.readers.values()):
            for setting, named, known, what, otherwise in (
                ("dates", reader.dates, dates, "no column of dates", "give it date and since in numeric"),
                ("missing_in", reader.missing_in, self.columns, "no column of the schema", "take it out"),
            ):
                for column in named or {}:
                    if column not in known:
                        remedy = suggest_name(str(column), known) or otherwise
                        raise refuse_schema(
                            "reader", f"reader.{setting} names {column!r}, which is {what}; {remedy}"
                        )

    def _check_label(self) -> None:
        """Check that the kind of label and the columns that hold it go together."""
        if not isinstance(self.label, str | None):
            if not isinstance(self.label, Sequence) or not all(isinstance(name, str) for name in self.label):
                raise refuse_schema(
                    "label", f"label is {short(self.label)}; give the name of a column, or a list of names"
                )
            # TOML gives a list, and the rest of the code asks for a tuple where there are several labels.
            object.__setattr__(self, "label", tuple(self.label))
        fault = self._find_kind_fault()
        if fault is not None:
            raise refuse_schema(*fault, "data.kind")
        if self.kind == "classes":
            check_values("classes", self.classes)
        if self.label_typical is None:
            return
        pairs: Any = [self.label_typical] if self.targets is None else self.label_typical
        if not isinstance(pairs, Sequence) or len(pairs) != len(self.label_columns):
            raise refuse_schema(
                "label_typical",
                f"label_typical is {self.label_typical!r} and label has {len(self.label_columns)} columns; give one "
                "pair [center, spread] for each column",
            )
        for column, pair in zip(self.label_columns, pairs, strict=True):
            check_typical(f"the label {column!r}", pair, "label_typical")
        # Floats, so that all parties write the same digits into their specifications.
        given = tuple((float(center), float(spread)) for center, spread in pairs)
        object.__setattr__(self, "label_typical", given[0] if self.targets is None else given)

    def _find_kind_fault(self) -> tuple[str, str] | None:
        """Return the setting that does not go with the kind of label, and why; None where all do."""
        is_several = isinstance(self.label, tuple)
        fits = self.kind in ("real", "multilabel") and len(self.label_columns) > 1
        if not fits if is_several else self.kind == "multilabel":
            return "label", (
                f"kind is {self.kind!r} and label is {self.label!r}; list at least two columns for kind 'multilabel' "
                "(yes and no) or 'real' (numbers), and name one for all others"
            )
        if self.label_typical is not None and self.kind != "real":
            return "label_typical", (
                f"kind is {self.kind!r} and label_typical is {self.label_typical!r}; scale a label of kind 'real' only"
            )
        if self.kind == "survival":
            if self.event is None or self.time is None or self.label is not None or self.classes is not None:
                return "kind", "kind 'survival' takes event and time, and neither label nor classes"
            return None
        if self.label is None or self.event is not None or self.time is not None:
            return "kind", (
                f"kind {self.kind!r} takes label, and neither event nor time; set kind = 'survival' for a label of "
                "event and time"
            )
        if self.kind != "classes" and self.classes is not None:
            return "classes", (
                f"kind is {self.kind!r} and classes is {self.classes!r}; list classes for kind 'classes' only"
            )
        if self.kind == "classes" and self.classes is None:
            return "classes", (
                f"the label {self.label!r} has no classes; list its public values in classes, or set kind = 'real' "
                "where it is a number, or kind = 'survival' with event and time where it is the time until an event"
            )
        return None

    def list_silo_settings(self) -> tuple[str, ...]:
        """Return the names of the settings that a silo changes: of its reader in the order of `SETTINGS`, or silos."""
        changed = [
            name
            for name in SETTINGS
            if any(getattr(one, name) != getattr(self.reader, name) for one in self.readers.values())
        ]
        return (*changed, *(["silos"] if self.silos else []))

    def check_readers(self, silos: Sequence[str]) -> None:
        """Check that `readers` and `silos` name these; else a misspelled name would be left out in silence."""
        for section in ("readers", "silos"):
            for silo in getattr(self, section):
                if silo not in silos:
                    hint = suggest_name(silo, silos) or f"the silos are {', '.join(silos)}."
                    raise SilodpError(
                        f"data.schema.{section}.{silo} names no silo: {hint}",
                        code="data.schema",
                        field=f"{section}.{silo}",
                    )

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What the guarantee does not cover, or rests on, by what is declared here."""
        may_divide = () if self.split is None else (ASSUMES_SPLIT,)  # whether it divides persons is private
        clips = (ASSUMES_CLIPPING,) if self.out_of_range == "clip" and self.numeric_columns() else ()
        return (*may_divide, *clips, *((ASSUMES_KINDS,) if self.has_plugins else ()))

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column the tables must have."""
        named = (self.user, *self.label_columns, self.event, self.time, self.split, self.budget)
        return (*(column for column in named if column is not None), *self.feature_columns)

    def name_columns(self, silo: str) -> dict[str, str]:
        """Return column → its name in the table of a silo, behind that of the sheet where one is set ("May!age")."""
        mapping, sheet = self.silos.get(silo, TableMapping()), self.readers.get(silo, self.reader).sheet
        place = "" if sheet is None else f"{sheet}!"
        return {column: place + header_text(mapping.columns.get(column, column)) for column in self.columns}

    def name_features(self, silo: str) -> tuple[str, ...]:
        """Return what features are made of in the table of a silo, by the names and texts of that table.

        Returns:
            A numeric column's name, and "NAME is missing" for its indicator; for a categorical column "NAME=TEXT" for
            every text that counts as a category, also one that does so because it stands for no value.
        """
        names, mapping = self.name_columns(silo), self.silos.get(silo, TableMapping())
        reader = self.readers.get(silo, self.reader)
        return tuple(
            name
            for column, kind in self.kinds.items()
            for name in kind.name_features(
                names[column], mapping.values.get(column, {}), reader.narrow(column).missing
            )
        )

    def find_setting(self, column: str) -> str:
        """Return the setting that declares a column, for example "data.schema.label" or "data.schema.numeric.age"."""
        for name in ("user", "event", "time", "split", "budget"):
            if getattr(self, name) == column:
                return f"data.schema.{name}"
        if column in self.label_columns:
            return "data.schema.label"
        section = next(one for one in ("numeric", "categorical", "other") if column in getattr(self, one))
        return f"data.schema.{section}.{column}"

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of the label, of which there may be several; none for survival."""
        if self.label is None:
            return ()
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)

    @property
    def targets(self) -> int | None:
        """The number of labels of a record, where it has several."""
        return None if isinstance(self.label, str | None) else len(self.label)

    @property
    def feature_columns(self) -> tuple[str, ...]:
        """The columns that features are made of; a prediction needs no others."""
        return (*self.numeric, *self.categorical, *self.other)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features: a numeric column's, "column=category", or for codes "column=category|category"."""
        coded = self.code_columns()  # an array of their own
        ordered = sorted(self.kinds.items(), key=lambda item: item[0] in coded)
        return tuple(feature for name, column in ordered for feature in column.list_features(name))

    @cached_property
    def kinds(self) -> dict[str, Column]:
        """The columns of features by name, in the order in which they are declared."""
        return {
            **{name: NumericColumn.read(name, given) for name, given in self.numeric.items()},
            **{name: CategoricalColumn.read(name, given) for name, given in self.categorical.items()},
            **{name: _read_other(name, given) for name, given in self.other.items()},
        }

    def numeric_columns(self) -> dict[str, NumericColumn]:
        """Return the numeric columns by name."""
        return {name: kind for name, kind in self.kinds.items() if isinstance(kind, NumericColumn)}

    def categorical_columns(self) -> dict[str, CategoricalColumn]:
        """Return the categorical columns by name."""
        return {name: kind for name, kind in self.kinds.items() if isinstance(kind, CategoricalColumn)}

    def code_columns(self) -> dict[str, CategoricalColumn]:
        """Return the categorical columns that are given as codes by name, in the order of the array of codes."""
        return {name: column for name, column in self.categorical_columns().items() if column.codes}

    @property
    def has_plugins(self) -> bool:
        """Whether code from outside silodp computes features."""
        return not all(is_own(type(kind)) for kind in self.kinds.values())

    def list_inputs(self) -> tuple[Input, ...]:
        """Return the public facts of a record's arrays; () where no column is given as codes.

        Returns:
            "numeric" (float32: the numeric columns and the one-hot ones), which is left out if it has no columns, and
            "codes" (int64: one column each).
        """
        sizes = tuple(len(column.categories) for column in self.code_columns().values())
        if not sizes:
            return ()
        # Each column of codes is one feature; all others are numbers.
        codes, numbers = Input(CODES, (len(sizes),), sizes), len(self.features) - len(sizes)
        return (Input(NUMERIC, (numbers,)), codes) if numbers else (codes,)

    def scale_numbers(self, column: str, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return values of a numeric column, (n,), clipped and scaled as its feature is."""
        return self.numeric_columns()[column].scale(values)

    def describe_inputs(self) -> dict[str, Any]:
        """Return how features are read and scaled, JSON-ready; nothing about persons, labels or files."""
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _OF_RECORDS}
        texts = {
            name: listed
            for name, listed in (self.reader.missing_in or {}).items()
            if name in self.feature_columns
        }
        given["reader"] = replace(self.reader, missing_in=texts or None)
        found = {name: _to_plain(value) for name, value in given.items() if name != "other"}
        others = {name: self.kinds[name] for name in self.other}
        named = {name: {"kind": _name_kind(type(kind)), **_to_plain(kind)} for name, kind in others.items()}
        # Left out where there is none, like settings without a value.
        return {**found, "other": named} if named else found

    @classmethod
    @refuse_plugins("the description of a model runs no code outside silodp")
    def from_inputs(cls, inputs: Mapping[str, Any]) -> Schema:
        """Return a schema that reads features as the one that `describe_inputs` described; its tables have no labels.

        Raises:
            SilodpError, TypeError: it is no such description.
        """
        # A stored model comes from elsewhere: its schema must not say how persons or labels of this table are read.
        if unknown := _OF_RECORDS & set(inputs):
            raise refuse_schema("", f"{min(unknown)} says nothing about features; take it out")
        # No header has a line break, so these two columns are in no table.
        return cls(**{"user": "\nuser", "label": "\nlabel", "kind": "real", **inputs})

    def read_users(self) -> Sequence[Any] | None:
        """Return the public list of user keys as it is written, from its file where `users` is a path.

        Returns:
            (U,) values, not yet normalized; None where U is counted in the tables.

        Raises:
            SilodpError: the file cannot be read, or `users` is neither a list nor a path.
        """
        if isinstance(self.users, str | Path):
            try:
                # Without the mark at the beginning, which would make the first key another person.
                lines = Path(self.users).read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise refuse_users(
                    f"{self.users}: the list of users is not readable ({first_line(error)}); check the path, and save "
                    "it as UTF-8"
                ) from error
            return [line for line in lines if line.strip()]
        if self.users is not None and not isinstance(self.users, Sequence | np.ndarray):
            raise refuse_users(
                f"users is a {type(self.users).__name__}; give a list of keys, or the path of a text file with one "
                "per line"
            )
        return self.users

    def read_identity(self) -> IdentityProfile | None:
        """Return the identity profile that `identity` names, if any.

        Raises:
            SilodpError: the file cannot be read, or has a setting that does not fit.
        """
        return None if self.identity is None else load_profile(self.identity)


def _read_other(name: str, declared: Any) -> Column:
    """Return a column of another kind: the object, or one made of a table of `kind` and its settings.

    Raises:
        SilodpError: there is no such kind, it is code that may not be run here, or its settings do not fit.
    """
    if isinstance(declared, Column):
        return type(declared).read(name, declared)
    kind = declared.get("kind") if isinstance(declared, Mapping) else None
    others = f"a kind of an installed package (entry point silodp.{COLUMN_KINDS.kind})"
    if not isinstance(kind, str) or is_reference(kind):
        known = ", ".join((*COLUMN_KINDS, *COLUMN_KINDS.references))
        reason = f"other column {name!r} is {shorten(declared)}; give a table with kind, one of {known}, or {others}"
        if isinstance(kind, str):
            reason += ": tables are read in every silo, so a kind is not taken from a file or module"
        raise refuse_schema(f"other.{name}", reason)
    settings = {key: value for key, value in declared.items() if key != "kind"}
    return find_plugin(kind, COLUMN_KINDS, Column, f"data.schema.other.{name}.kind", others).read(
        name, settings
    )


def _name_kind(kind: type[Column]) -> str | None:
    """Return the name by which a configuration calls a kind of silodp's; None: it has none."""
    place = f"{kind.__module__}:{kind.__qualname__}"
    return next((name for name, known in COLUMN_KINDS.places.items() if known == place), None)


def _find_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that occurs twice; None where all are different."""
    return next((name for name, number in Counter(names).items() if number > 1), None)


def refuse_users(message: str) -> SilodpError:
    """Return, for the caller to raise, the error about the public list of users."""
    return SilodpError(message, code="data.users", field="data.schema.users")


def _to_plain(value: Any) -> Any:
    """Return a setting of a schema as JSON has it; categories become the texts that they are compared as."""
    if is_dataclass(value) and not isinstance(value, type):
        # Without what is None: a setting that a later version adds does not change how older schemas are stored.
        return {key: _to_plain(item) for key, item in vars(value).items() if item is not None}
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        return [_to_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return float(value) if isinstance(value, Real) else text_of(value)


def name_classes(schema: Schema | None, count: int | None) -> tuple[str, ...]:
    """Return the names of the classes in the order of their numbers; without a schema the numbers are the names."""
    if schema is not None and schema.classes is not None:
        return tuple(map(text_of, schema.classes))
    return tuple(map(str, range(count or 0)))


def find_test_persons(keys: Iterable[str], share: float) -> list[bool]:
    """Return whose records are for testing: a public function of their keys, equal in every silo.

    Args:
        keys: the keys of persons, normalized as in the tables.
        share: the share of persons whose records are for testing, in [0, 1].
    """
    # The first eight bytes of the hash are a number below 2^64 that looks drawn at random, and is the same everywhere.
    limit = math.ceil(share * 2.0**64)
    if limit == 2**64:
        return [True for _ in keys]
    bound, make_hash = limit.to_bytes(8, "big"), hashlib.sha256  # bytes are ordered as the numbers are
    return [make_hash(b"silodp test person " + key.encode()).digest() < bound for key in keys]


def normalize_key(value: object) -> str:
    """Return the form in which user keys are compared: stripped text in NFC, "17.0" (a float-parsed column) as "17".

    An identity profile replaces this rule (see `IdentityProfile`). "007" and "7" stay two keys here (see
    `list_linkage_warnings`). If the keys of two persons fall together, the guarantee holds for both persons
    removed together. For one of them it is weaker: one person's removal may move a sum by up to twice the clip.
    """
    return text_of(value)


_SETTINGS = frozenset(one.name for one in fields(Schema))
"""The names of all settings of a schema."""
