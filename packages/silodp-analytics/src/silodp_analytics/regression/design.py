"""From the features of records to the scaled columns of a regression, and from their coefficients to those of the
table.

Every term has columns that together are at most 1 long, by the public constants of the schema alone: a number is
mapped to [−1, 1]; two categories are −1 and 1; the indicators of more categories are centered and stretched
(`Feature.shift`). A product of terms has the products of their columns. That is a linear change of the table's own
columns (numbers in their units, indicators without that of the first category), so coefficients and covariance go
back exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from silodp.data.inputs import CODES, NUMERIC
from silodp.data.public import PublicData
from silodp.data.tables.kinds.categorical import CategoricalColumn
from silodp.data.tables.kinds.numeric import NumericColumn
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError
from silodp.settings import Settings, Whole
from silodp.text import suggest_name
from silodp_analytics.regression.families import INTERCEPT

Floats = NDArray[np.float64]
Polynomial = Mapping[tuple[str, ...], float]
"""Products of the table's columns, each with its factor; () is the constant."""


def refuse_terms(problem: str, field: str = "regression.terms") -> SilodpError:
    """Return the error about terms or columns that cannot be used."""
    return SilodpError(f"regression: {problem}.", code="regression.terms", field=field)


@dataclass(frozen=True)
class Feature(Settings):
    """One column of the schema.

    Attributes:
        column: Its name.
        place: The position of its first feature among those of a record.
        range: The public range of a number; None for categories.
        typical: (center, spread) by which a number was standardized; None where its range scales it.
        has_missing: Whether the next feature says where numbers are missing.
        categories: The public categories; the first one is the reference.
        codes: Whether the categories are given as codes.
    """

    column: str
    place: Annotated[int, Whole(0)]
    range: tuple[float, float] | None = None
    typical: tuple[float, float] | None = None
    has_missing: bool = False
    categories: tuple[str, ...] = ()
    codes: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        # A configuration gives lists; a method is hashed.
        for name in ("range", "typical"):
            pair = getattr(self, name)
            if pair is not None:
                object.__setattr__(self, name, (float(pair[0]), float(pair[1])))
        object.__setattr__(self, "categories", tuple(map(str, self.categories)))
        if (self.range is None) == (len(self.categories) < 2):
            raise refuse_terms(f"'{self.column}' needs a range, or at least two categories")

    @classmethod
    def from_schema(cls, schema: Schema, name: str) -> Feature:
        """Return the constants of a column; one that is no number and has no categories is refused."""
        numeric, categorical = schema.numeric_columns(), schema.categorical_columns()
        if name in numeric:
            column = numeric[name]
            place = schema.features.index(name)
            return cls(name, place, column.range, column.typical, column.has_indicator)
        if name in categorical:
            found = categorical[name]
            texts = found.texts if found.codes else [str(value) for value in found.categories]
            place = schema.features.index(found.list_features(name)[0])
            return cls(name, place, categories=tuple(texts), codes=found.codes)
        known = [*numeric, *categorical]
        hint = suggest_name(name, sorted(known)) or f"the columns are {', '.join(known)}"
        raise refuse_terms(
            f"'{name}' in terms is no number and no category of data.schema; {hint.rstrip('.')}"
        )

    def check(self, data: PublicData) -> None:
        """Refuse a column that the records do not have at its place."""
        if self.range is not None:
            indicator = "indicator" if self.has_missing else None
            names = NumericColumn(self.range, self.typical, indicator).list_features(self.column)
        else:
            names = CategoricalColumn(self.categories, None, self.codes).list_features(self.column)
        found = list(data.features[self.place : self.place + len(names)])
        if found != names:
            raise refuse_terms(
                f"the records have {found or 'no feature'} at place {self.place}, and not {names}"
            )

    @property
    def middle(self) -> tuple[float, float]:
        """The middle of the range, and half its width."""
        low, high = self.range or (0.0, 1.0)
        return low / 2 + high / 2, (high - low) / 2

    @property
    def shift(self) -> tuple[float, float]:
        """What is taken from the indicators of categories, and by what they are multiplied, so that they are at
        most 1 long.

        With K categories the indicator of each but the first is shifted by 1/max(2, K−1): the smallest ball that
        holds all categories then has the radius that the stretch turns into 1 (two categories: −1 and 1, twice as
        far apart as 0 and 1).
        """
        others = len(self.categories) - 1
        by = 1 / max(2, others)
        longest = max((1 - by) ** 2 + (others - 1) * by**2, others * by**2)
        return by, 1 / math.sqrt(longest)

    @property
    def columns(self) -> list[str]:
        """The names of the table's columns that the term has."""
        if self.range is not None:
            return [self.column, f"{self.column} is missing"] if self.has_missing else [self.column]
        return [f"{self.column}={category}" for category in self.categories[1:]]

    @property
    def polynomials(self) -> list[Polynomial]:
        """Each scaled column as a polynomial of the table's columns."""
        if self.range is None:
            by, stretch = self.shift
            return [{(): -by * stretch, (name,): stretch} for name in self.columns]
        middle, half = self.middle
        found: list[Polynomial] = [{(): -middle / half, (self.column,): 1 / half}]
        return [*found, {(name,): 1.0 for name in self.columns[1:]}] if self.has_missing else found

    def scale(self, arrays: Mapping[str, NDArray[Any]]) -> Floats:
        """Return the scaled columns (n, k) of records; a missing number counts as the middle of its range."""
        numbers = arrays[NUMERIC] if NUMERIC in arrays else arrays.get("")
        if self.range is None:
            if self.codes:
                # Codes come last among the features, in an array of their own.
                width = 0 if numbers is None else numbers.shape[1]
                codes = arrays[CODES][:, self.place - width]
            else:
                assert numbers is not None
                codes = numbers[:, self.place : self.place + len(self.categories)].argmax(1)
            by, stretch = self.shift
            found: Floats = ((codes[:, None] == np.arange(1, len(self.categories))) - by) * stretch
            return found
        assert numbers is not None
        value = numbers[:, self.place].astype(np.float64)
        if self.typical is not None:
            center, spread = self.typical
            middle, half = self.middle
            value = (value * spread + center - middle) / half
        value = np.clip(value, -1, 1)
        if not self.has_missing:
            return value[:, None]
        missing = numbers[:, self.place + 1] > 0.5
        return np.stack([np.where(missing, 0.0, value), missing], axis=1)


@dataclass(frozen=True)
class Design:
    """The columns of a regression.

    Attributes:
        features: The columns of the schema.
        terms: Their names and products ("age:sex"), in order.
        baselines: The names of the coefficients of no column, K ≥ 1, which come first.
    """

    features: tuple[Feature, ...]
    terms: tuple[str, ...]
    baselines: tuple[str, ...] = (INTERCEPT,)

    @cached_property
    def parts(self) -> list[list[Feature]]:
        """The features of each term."""
        by_name = {one.column: one for one in self.features}
        found = []
        for term in self.terms:
            names = split_term(term, list(by_name))
            if names is None:
                raise refuse_terms(f"'{term}' names a column that is not among the features")
            found.append([by_name[name] for name in names])
        return found

    @cached_property
    def names(self) -> list[str]:
        """The names of the coefficients, in the units of the table."""
        return [*self.baselines, *map(":".join, self._monomials)]

    @cached_property
    def _monomials(self) -> list[tuple[str, ...]]:
        products = (itertools.product(*(one.columns for one in part)) for part in self.parts)
        return list(itertools.chain.from_iterable(products))

    @property
    def size(self) -> int:
        """p, the number of coefficients."""
        return len(self.baselines) + len(self._monomials)

    @cached_property
    def change(self) -> Floats:
        """The matrix (p, p) from scaled coefficients to those in the units of the table.

        Raises:
            SilodpError: a product without its parts: then scaling would change the model (code regression.terms).
        """
        row = len(self.baselines)
        # A constant moves every baseline.
        place: dict[frozenset[str], Any] = {frozenset(): slice(row)}
        place |= {frozenset(names): row + at for at, names in enumerate(self._monomials)}
        # A column of the scaled features is a row here: what it is of the table's columns.
        found = np.eye(self.size, self.size)
        found[row:] = 0.0
        for term, part in zip(self.terms, self.parts, strict=True):
            for chosen in itertools.product(*(one.polynomials for one in part)):
                for names, factor in _multiply(chosen).items():
                    at = place.get(frozenset(names))
                    if at is None:
                        raise refuse_terms(
                            f"'{term}' is a product, and terms lack a part of it: name its columns as terms, too"
                        )
                    found[row, at] += factor
                row += 1
        return found.T

    @property
    def middle(self) -> Floats:
        """The table's columns (p,), baselines left out (0), of a record in the middle of all ranges and in the first
        categories."""
        values = {one.column: one.middle[0] for one in self.features if one.range is not None}
        products = [math.prod(values.get(name, 0.0) for name in names) for names in self._monomials]
        return np.array([0.0] * len(self.baselines) + products)

    def scale(self, arrays: Mapping[str, NDArray[Any]]) -> Floats:
        """Return the scaled columns (n, 1 + p − K) of records, the first one 1."""
        scaled = {one.column: one.scale(arrays) for one in self.features}
        count = len(next(iter(arrays.values())))
        columns = [np.ones((count, 1))]
        for part in self.parts:
            product = np.ones((count, 1))
            for one in part:
                by = scaled[one.column]
                # No -1: a silo may have no record of a person who counts there.
                width = product.shape[1] * by.shape[1]
                product = (product[:, :, None] * by[:, None, :]).reshape(count, width)
            columns.append(product)
        return np.concatenate(columns, axis=1)


def _multiply(polynomials: Sequence[Polynomial]) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {(): 1.0}
    for one in polynomials:
        found = {names + more: factor * by for names, factor in found.items() for more, by in one.items()}
    return found


def split_term(term: str, columns: Sequence[str]) -> list[str] | None:
    """Return the columns of a term; a name with a colon in it is a column where there is one. None: no such columns."""
    if term in columns:
        return [term]
    for at in (place for place, letter in enumerate(term) if letter == ":"):
        first, rest = term[:at].strip(), term[at + 1 :].strip()
        if first in columns and (others := split_term(rest, columns)) is not None:
            return [first, *others]
    return None


def make_design(schema: Schema, terms: Sequence[str], baselines: tuple[str, ...] = (INTERCEPT,)) -> Design:
    """Return the columns of the terms that a configuration names, with the baselines of its family.

    Raises:
        SilodpError: no terms, a term that is no column, one that is there twice, or a product without its parts (code
            regression.terms).
    """
    if not terms:
        raise refuse_terms("terms is empty: name columns of data.schema, and products such as 'age:sex'")
    columns = schema.feature_columns
    names: list[str] = []
    seen: set[frozenset[str]] = set()
    for term in terms:
        parts = split_term(term, columns)
        # Of what is no product, `Feature.from_schema` says which columns there are.
        parts = [term] if parts is None else parts
        if len(set(parts)) < len(parts):
            raise refuse_terms(f"'{term}' multiplies a column by itself: name each column once")
        if frozenset(parts) in seen:
            raise refuse_terms(f"the term '{term}' is there twice: name it once")
        seen.add(frozenset(parts))
        names += [name for name in parts if name not in names]
    design = Design(tuple(Feature.from_schema(schema, name) for name in names), tuple(terms), baselines)
    design.change  # noqa: B018  raises for a product without its parts
    return design
