"""The inputs of a model: one array, or several by name; real numbers, or ids out of a public number of categories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from silodp.errors import SilodpError
from silodp.text import join_names

Categories = int | Sequence[int] | Mapping[str, int | Sequence[int]] | None
"""The public number of categories of ids: of all of them, of each column, or by the name of the array."""


NUMERIC, CODES = "numeric", "codes"
"""Names of the arrays of tables with columns that are given as codes."""


class NamedArrays:
    """Arrays by name, of numpy or torch, with the same number of rows; a model gets them as keyword arguments.

    `arrays["tokens"]` is one array. Every other index applies to the rows of all arrays, as in `arrays[:10]`.
    """

    __slots__ = ("_arrays",)

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = dict(arrays)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._arrays[key]
        return self.map(lambda array: array[key])

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"NamedArrays({', '.join(self._arrays)})"  # no values: they may be private

    def keys(self) -> Iterator[str]:
        """Return the names, which makes `model(**arrays)` work."""
        return iter(self._arrays)

    def map(self, function: Callable[[Any], Any]) -> NamedArrays:
        """Return the same names with a function of each array."""
        return NamedArrays({name: function(array) for name, array in self._arrays.items()})


def list_arrays(x: Any) -> dict[str, Any]:
    """Return inputs by name; one array alone has the name ""."""
    return {name: x[name] for name in x.keys()} if isinstance(x, NamedArrays | Mapping) else {"": x}  # noqa: SIM118


def map_arrays(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to one array, or to each of several; a mapping becomes `NamedArrays`."""
    if isinstance(x, NamedArrays | Mapping):
        return NamedArrays(list_arrays(x)).map(function)
    return function(x)


def concatenate(parts: Sequence[Any]) -> Any:
    """Return the rows of all parts, each one array or `NamedArrays` of the same names."""
    if not isinstance(parts[0], NamedArrays):
        return np.concatenate(parts)
    return NamedArrays({name: np.concatenate([part[name] for part in parts]) for name in parts[0].keys()})  # noqa: SIM118


def get_kind(x: Any) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return name, shape of one record and dtype of every array; inputs of one kind can be computed on alike."""
    return tuple((name, tuple(array.shape[1:]), str(array.dtype)) for name, array in list_arrays(x).items())


def count_bytes(x: Any) -> int:
    """Return the bytes of all arrays."""
    return sum(int(array.nbytes) for array in list_arrays(x).values())


@dataclass(frozen=True)
class Input:
    """The public facts of one array of a record's inputs.

    Attributes:
        name: the keyword argument of the model; "" where there is one array, without a name.
        shape: the shape of one record, without the axis of records.
        categories: None for real numbers (float32). Else the array holds ids (int64), and this is the public number K
            of ids, 0 to K−1: one for all places, or one for each place of the last axis.
    """

    name: str
    shape: tuple[int, ...]
    categories: int | tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        """How messages name the array."""
        return f"x[{self.name!r}]" if self.name else "x"

    def to_dict(self) -> dict[str, Any]:
        """Return the facts, JSON-ready."""
        return {key: list(fact) if isinstance(fact, tuple) else fact for key, fact in vars(self).items()}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Input:
        """Return the facts that `to_dict` gave."""
        found = facts["categories"]
        return cls(
            str(facts["name"]), tuple(facts["shape"]), tuple(found) if isinstance(found, list) else found
        )


def describe_inputs(x: Any, categories: Categories) -> tuple[Input, ...]:
    """Return the public facts of inputs; () for one array of real numbers, whose shape says all.

    Args:
        x: one array or `NamedArrays`; only names, shapes and dtypes are read.
        categories: public numbers of categories. They are declared and never counted in the rows, which are private.

    Raises:
        SilodpError: ids without a declared number, or a number that does not fit (code data.categories).
    """
    arrays = list_arrays(x)
    # Only dtypes are read here: a value would make a public fact depend on private rows.
    holds_ids = {name: array.dtype == np.int64 for name, array in arrays.items()}
    declared = (
        dict(categories)
        if isinstance(categories, Mapping)
        else {name: categories for name, ids in holds_ids.items() if ids}
    )
    if extra := sorted(set(declared) - {name for name, ids in holds_ids.items() if ids}):
        raise _refuse_categories(
            f"categories names {', '.join(map(repr, extra))}, which holds no ids; name arrays of int64 only"
        )
    if categories is not None and not declared:
        raise _refuse_categories(
            "categories is given, and no array holds ids; give ids as int64, or leave it out"
        )
    inputs = []
    for name, array in arrays.items():
        one = Input(name, tuple(array.shape[1:]))
        if holds_ids[name]:
            one = Input(name, one.shape, _check_number(one, declared.get(name)))
        inputs.append(one)
    return () if list(arrays) == [""] and not holds_ids[""] else tuple(inputs)


def find_fault(x: Any, record_shape: tuple[int, ...], inputs: Sequence[Input]) -> str | None:
    """Return what is wrong with inputs, or None.

    Args:
        x: one array or `NamedArrays`.
        record_shape: public shape of one record's features, for one array of real numbers.
        inputs: public facts of the arrays, as `describe_inputs` returns them.

    Returns:
        Text for people of the silo; it names no value and no record.
    """
    inputs = inputs or (Input("", record_shape),)
    expected = tuple(
        (one.name, one.shape, "float32" if one.categories is None else "int64") for one in inputs
    )
    found = get_kind(x)
    if found != expected:
        return f"x is {_format_kind(found)}, not {_format_kind(expected)}"
    arrays = list_arrays(x)
    for one in inputs:
        if one.categories is not None:
            ids = arrays[one.name]
            # Out of range, an id would fail in the model with a message that may show it.
            if bool(((ids < 0) | (ids >= np.asarray(one.categories))).any()):
                return f"{one.label} holds an id outside 0 to K − 1, with the public K = {one.categories}"
    return None


def _check_number(one: Input, given: Any) -> int | tuple[int, ...]:
    if given is None:
        raise SilodpError(
            f"{one.label} holds whole numbers (int64): declare how many ids there are, a public constant "
            "(categories=...), or give measurements as float32",
            code="model.integer_inputs",
            field="categories",
        )
    is_list = isinstance(given, Sequence | np.ndarray) and not isinstance(given, str)
    numbers = list(given) if is_list else [given]
    if any(isinstance(n, bool) or not isinstance(n, Integral) or n < 1 for n in numbers):
        raise _refuse_categories(f"categories of {one.label} is {given!r}; give whole numbers, at least 1")
    if not is_list:
        return int(given)
    if len(numbers) != one.shape[-1]:
        raise _refuse_categories(
            f"categories of {one.label} has {len(numbers)} numbers for {one.shape[-1]} columns; give one each"
        )
    return tuple(int(n) for n in numbers)


def _refuse_categories(reason: str) -> SilodpError:
    return SilodpError(reason, code="data.categories", field="categories")


def _format_kind(kind: Sequence[tuple[str, tuple[int, ...], str]]) -> str:
    return join_names(f"{name + ' ' if name else ''}{dtype}{list(shape)}" for name, shape, dtype in kind)
