"""What the columns of every silo's table mean, declared and public; see `tables` for reading them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal

import numpy as np

from silodp.errors import SilodpError

_WHOLE = re.compile(r"(-?\d+)\.0+")


@dataclass(frozen=True)
class Schema:
    """What the columns of every silo's table mean. All of it is public.

    Attributes:
        user: column of the key that names a person, equal in all silos.
        label: column of the label (kinds "classes" and "real").
        kind: "classes", "real" (a number) or "survival" (`event` and `time` instead of `label`).
        classes: the label's values, in the order of the class numbers (kind "classes").
        event, time: columns of 0/1 and of a time ≥ 0 (kind "survival").
        numeric: column → public range (low, high), which is mapped to [-1, 1].
        categorical: column → public categories, one-hot in this order.
        split: optional column holding "train" or "test".
        users: the public list of user keys, or a text file with one key per line; U is its length. Without it
            U is counted in the tables, and the guarantee says so.
        out_of_range: "refuse" a number outside its range, or "clip" it to the range.
        budget: optional column of the ε that each training record may be charged, above 0; public like the rest.

    Features are the numeric columns, then the categorical ones, in the order given here. Values are compared
    as text in Unicode's form NFC, after whole floats have become integers ("1.0" is "1").
    """

    user: str
    label: str | None = None
    kind: Literal["classes", "real", "survival"] = "classes"
    classes: Sequence[Any] | None = None
    event: str | None = None
    time: str | None = None
    numeric: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    categorical: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    split: str | None = None
    users: Sequence[Any] | str | Path | None = None
    out_of_range: Literal["refuse", "clip"] = "refuse"
    budget: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("classes", "real", "survival"):
            raise SilodpError(
                f"schema: kind is {self.kind!r}; choose 'classes', 'real' or 'survival'",
                code="data.kind",
                field="data.schema.kind",
            )
        if self.out_of_range not in ("refuse", "clip"):
            raise SilodpError(
                f"schema: out_of_range is {self.out_of_range!r}; choose 'refuse' or 'clip'",
                code="argument.value",
                field="data.schema.out_of_range",
            )
        if self.kind == "survival":
            if self.event is None or self.time is None or self.label is not None or self.classes is not None:
                raise SilodpError(
                    "schema: kind 'survival' takes event and time, and neither label nor classes",
                    code="data.kind",
                    field="data.schema.kind",
                )
        elif self.label is None or self.event is not None or self.time is not None:
            raise SilodpError(
                f"schema: kind {self.kind!r} takes label, and neither event nor time; set kind = 'survival' for a "
                "label of event and time",
                code="data.kind",
                field="data.schema.kind",
            )
        if self.classes is None and self.kind == "classes":
            raise SilodpError(
                f"schema: the label {self.label!r} has no classes; list its public values in classes, or set "
                "kind = 'real' where it is a number",
                code="data.kind",
                field="data.schema.classes",
            )
        if self.classes is not None and self.kind != "classes":
            raise SilodpError(
                f"schema: kind is {self.kind!r} and classes is {self.classes!r}; list classes for kind 'classes' only",
                code="data.kind",
                field="data.schema.classes",
            )
        if self.classes is not None:
            _check_values("classes", self.classes)
        for section in ("numeric", "categorical"):
            if not isinstance(getattr(self, section), Mapping):
                raise SilodpError(
                    f"schema: {section} is {getattr(self, section)!r}; give a mapping from columns to "
                    f"{'(low, high)' if section == 'numeric' else 'their categories'}",
                    code="data.schema",
                    field=f"data.schema.{section}",
                )
        if not self.numeric and not self.categorical:
            raise SilodpError(
                "schema: no features; declare numeric ranges or categorical values",
                code="data.schema",
                field="data.schema",
            )
        for column, bounds in self.numeric.items():
            if not _is_range(bounds):
                raise SilodpError(
                    f"schema: numeric column {column!r} has range {bounds!r}; give finite (low, high), low < high",
                    code="data.schema",
                    field="data.schema.numeric",
                )
        for column, categories in self.categorical.items():
            _check_values(f"categorical column {column!r}", categories)
        columns = self.columns
        for column in columns:
            if not isinstance(column, str):
                raise SilodpError(
                    f"schema: {column!r} names no column; give the header's text",
                    code="data.schema",
                    field="data.schema",
                )
            if columns.count(column) > 1:
                raise SilodpError(
                    f"schema: column {column!r} is declared twice; give every column one meaning",
                    code="data.schema",
                    field=column,
                )

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column the tables must have."""
        named = (self.user, self.label, self.event, self.time, self.split, self.budget)
        return (*(column for column in named if column is not None), *self.numeric, *self.categorical)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features: a numeric column's, or "column=category"."""
        one_hot = [f"{c}={value}" for c, values in self.categorical.items() for value in values]
        return (*self.numeric, *one_hot)


def _is_range(bounds: Any) -> bool:
    pair = isinstance(bounds, Sequence | np.ndarray) and len(bounds) == 2
    numbers = pair and all(isinstance(bound, Real) for bound in bounds)
    return numbers and bool(np.isfinite(bounds).all()) and bool(bounds[0] < bounds[1])


def _check_values(what: str, values: Any) -> None:
    listed = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
    if not listed or len(values) < 2 or len({text_of(value) for value in values}) < len(values):
        raise SilodpError(
            f"schema: {what} are {short(values)}; list at least two values, all different",
            code="data.values",
            field="data.schema",
        )


def text_of(value: object) -> str:
    """Return a cell as text: stripped, in Unicode's form NFC, and a whole float written as an integer."""
    text = unicodedata.normalize("NFC", str(value).strip())
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def normalize_key(value: object) -> str:
    """Return the form in which user keys are compared: stripped text in NFC, "17.0" (a float-parsed column) as "17".

    "007" and "7" stay two keys (see `linkage`). Should two persons' keys fall together, they are protected as one.
    """
    return text_of(value)
