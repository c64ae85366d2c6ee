"""What a setting may be: declared once, in the annotation of a field, and checked when the dataclass is made.

A class of settings derives from `Settings`. Every field is checked by its annotation, for example

    noise_multiplier: Annotated[float, Range(least=0), Help("σ")]
    group_size: Annotated[int, Whole(most=4096)]
    weighting: Literal["uniform", "records"] = "uniform"
    local: LocalTraining

The reader of configurations takes names, types and defaults from the same annotations, and `silodp epsilon` its options
and their help. A number, text or choice that is no field is checked by `check_value(name, value, annotation)`.

Every check takes the name of a setting and its value, and raises `SilodpError` with the name as `field`:

    Range.check        a real number, with any bounds            argument.type, .out_of_range, .value
    Whole.check        a whole number                            argument.value, .out_of_range
    check_value        what an annotation allows                 as `Range`, `Whole`; argument.type, .value
    check_type         an instance of a class                    argument.type
    check_list         a list, each item an instance of a class  argument.type
    check_path         what can be the path of a file            argument.type, .value
    check_choice       one of some values                        argument.value
    check_shape        the shape of an array or tensor           argument.shape
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from silodp.errors import SilodpError
from silodp.text import is_own, join_names, name_class, shorten

__all__ = [
    "Clip",
    "Count",
    "Delta",
    "Epsilon",
    "Help",
    "Momentum",
    "NoiseMultiplier",
    "Positive",
    "Probability",
    "Range",
    "Settings",
    "Whole",
    "check_value",
]

MIN_REAL, MAX_REAL = 1e-50, 1e38
"""Magnitudes of real numbers that can be squared and put in float32."""
MAX_WHOLE = 10**9
MAX_SILOS = 100_000
"""The most silos of a run: each is an object, in plans too."""
MAX_CELLS = 100_000
"""The most cells of a table of counts: each has its own noise, and a person's row has a number for each."""
MAX_NOISE = 1e6
"""The largest noise multiplier that a method may have and that plans look for: above, accountants take long."""


# --- marks of an annotation -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Help:
    """What a setting is, in a line for users; a field of a method with it is an option of `silodp epsilon`."""

    text: str


@dataclass(frozen=True)
class Named:
    """The name of a setting in messages, where it is not that of the field in its table."""

    name: str


@dataclass(frozen=True)
class Range:
    """A real number (True is not 1) of a magnitude that can be squared and put in float32.

    Without a bound, 0, infinity and NaN pass; with one, the number must be finite.

    Attributes:
        above: The number must be larger than this.
        least: The number must not be smaller than this.
        below: The number must be smaller than this.
        most: The number must not be larger than this.
        limit: The largest number that can be computed with, where it is less than `MAX_REAL`.
        what: The noun of the message, for example "ε".
        tip: A last clause of the message, for example "0 means no privacy".
    """

    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    limit: float | None = None
    what: str = "number"
    tip: str = ""

    def check(self, name: str, value: object) -> None:
        """Check a number.

        Raises:
            SilodpError: "argument.type", "argument.out_of_range" (the magnitude, or `limit`), "argument.value"
                (a bound).
        """
        if isinstance(value, bool) or not isinstance(value, Real):
            raise _refuse(name, value, "set a number", "argument.type")
        number: Any = value
        # Not as a float: a whole number may be too large for one. NaN is unequal to itself, and left to the bounds.
        size = abs(number)
        if size == size and size not in (0, math.inf) and not MIN_REAL <= size <= MAX_REAL:
            remedy = f"set a number whose magnitude is between {MIN_REAL:g} and {MAX_REAL:g}"
            raise _refuse(name, value, remedy, "argument.out_of_range")
        ends = {"> ": self.above, "≥ ": self.least, "< ": self.below, "≤ ": self.most}
        wanted = [f"{sign}{end:g}" for sign, end in ends.items() if end is not None]
        holds = (
            (self.above is None or number > self.above)
            and (self.least is None or number >= self.least)
            and (self.below is None or number < self.below)
            and (self.most is None or number <= self.most)
        )
        if wanted and not (math.isfinite(number) and holds):
            remedy = f"set a finite {self.what} {join_names(wanted)}{self.tip and '; ' + self.tip}"
            raise _refuse(name, value, remedy, "argument.value")
        if self.limit is not None and number > self.limit:
            raise _refuse(name, value, f"set a number of at most {self.limit:g}", "argument.out_of_range")


@dataclass(frozen=True)
class Whole:
    """A whole number (True is not 1).

    Attributes:
        least: The smallest number that is allowed.
        limit: The largest number that can be computed with.
        most: The largest number that makes sense; None: any up to `limit`.
        what: The noun of what is counted, for the message.
    """

    least: int = 1
    limit: int = MAX_WHOLE
    most: int | None = None
    what: str = ""

    def check(self, name: str, value: object) -> None:
        """Check a number.

        Raises:
            SilodpError: "argument.value" (no whole number, below `least` or above `most`), "argument.out_of_range"
                (above `limit`).
        """
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        # What is no whole number is refused with the sentence about one that is too small.
        number = int(cast(Any, value)) if is_whole else self.least - 1
        if number < self.least or (self.most is not None and number > self.most):
            counted_things = f" of {self.what}" if self.what else ""
            end = f"≥ {self.least}" if self.most is None else f"from {self.least} to {self.most:,}"
            raise _refuse(name, value, f"set a whole number{counted_things} {end}", "argument.value")
        if number > self.limit:
            remedy = f"set a whole number of at most {self.limit:,}"
            raise _refuse(name, value, remedy, "argument.out_of_range")


Positive = Annotated[float, Range(above=0)]
Epsilon = Annotated[float, Range(above=0, what="ε")]
Delta = Annotated[float, Range(above=0, below=1, tip="for example 1e-5")]
Probability = Annotated[float, Range(above=0, most=1, what="sampling probability")]
Momentum = Annotated[float, Range(least=0, below=1)]
"""A momentum, dropout or other number in [0, 1)."""
Clip = Annotated[float, Range(above=0, what="clip", tip="it is in units of the update's 2-norm")]
NoiseMultiplier = Annotated[
    float,
    Range(least=0, limit=MAX_NOISE, what="noise multiplier", tip="0 means no privacy"),
    Help("σ: standard deviation of the noise divided by the sensitivity."),
]
Count = Annotated[int, Whole()]


# --- settings -------------------------------------------------------------------------------------------------------


def check_is_dataclass(kind: type) -> None:
    """Refuse a class of settings that declares some and is no frozen dataclass.

    They would be constants of the class, which no configuration can set and which no silo signs. (A dataclass that is
    not frozen cannot be derived from a frozen one, which Python itself refuses.)

    Raises:
        SilodpError: the class, or one that it is derived from, is such a class (code plugin.not_frozen).
    """
    for base in kind.__mro__:
        declared = vars(base).get("__annotations__", {})
        names = [name for name, hint in declared.items() if "ClassVar" not in str(hint)]
        is_plugin = issubclass(base, Settings) and not is_own(base)
        if is_plugin and names and "__dataclass_params__" not in vars(base):
            raise SilodpError(
                f"{name_class(base)} declares the setting {names[0]} and is no frozen dataclass, so that nothing could "
                "set it: write @dataclass(frozen=True) above the class.",
                code="plugin.not_frozen",
            )


class Settings:
    """Base of dataclasses of settings: every field is checked by its annotation when an object is made.

    A subclass that defines `__post_init__` calls it. Two options of a subclass, as in
    `class Personal(Settings, prefix="personal.")`, hold for its subclasses too: `prefix` is put before the names of
    fields in messages, and `error_code` takes the place of the checks' error codes.
    """

    _prefix, _error_code = "", ""

    def __init_subclass__(cls, prefix: str = "", error_code: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._prefix, cls._error_code = prefix or cls._prefix, error_code or cls._error_code

    def __post_init__(self) -> None:
        """Check every field that is an argument; None passes where it is the default.

        Raises:
            SilodpError: as `check_value` and `check_is_dataclass`.
        """
        for field, name, default, allowed in _list_fields(cast(Any, type(self))):
            value = getattr(self, field)
            try:
                for declared in () if value is None and default is None else allowed:
                    check_value(name, value, declared)
            except SilodpError as error:
                error.code = self._error_code or error.code
                raise


def check_value(name: str, value: Any, declared: Any) -> None:
    """Check a value against an annotation.

    Args:
        name: The setting, as the caller wrote it.
        value: The value that was given.
        declared: Marked numbers (`Delta`), int, float, bool, str, None, `Literal`, classes of settings, lists and
            unions of these; any value passes a part of an annotation that is something else.

    Raises:
        SilodpError: see `Range`, `Whole`, and the functions below.
    """
    kind, members = get_origin(declared), get_args(declared)
    if kind is Annotated:
        # A mark that can check replaces the check of the type, which it includes.
        checks = [mark.check for mark in declared.__metadata__ if hasattr(mark, "check")]
        if value is None and NoneType in get_args(members[0]):
            return
        for check in checks or [partial(check_value, declared=members[0])]:
            check(name, value)
    elif kind is Literal:
        check_choice(name, value, members)
    elif kind in (Union, UnionType):
        # A list is checked item by item, so it must be known which member of the union it stands for.
        lists = [member for member in members if _is_list(member)]
        others = [member for member in members if member not in lists]
        choices = lists if lists and isinstance(value, tuple | list) else others
        if not (value is None and NoneType in members):
            alone = [choice for choice in choices if choice is not NoneType]
            check_value(name, value, alone[0]) if len(alone) == 1 else _check_kinds(name, value, choices)
    elif _is_list(declared):
        check_list(name, value, object)
        if members[0] in _KINDS and set(map(type, value)) <= {members[0]}:
            return  # a list may have the keys of a million persons
        for item in value:
            check_value(name, item, members[0])
    elif isinstance(declared, type) and issubclass(declared, Settings):
        check_type(name, value, declared)
    else:
        _check_kinds(name, value, [declared])


def _is_list(hint: Any) -> bool:
    """Return whether an annotation is a list, or a tuple, of any number of items of one kind."""
    kind, members = get_origin(hint), get_args(hint)
    return kind in (list, Sequence) or (kind is tuple and members[1:] == (Ellipsis,))


_KINDS: dict[Any, type] = {int: Integral, float: Real, bool: bool, str: str, NoneType: NoneType}


def _check_kinds(name: str, value: object, kinds: Sequence[Any]) -> None:
    """Check that a value has one of some simple types; pass where one of these is not simple."""
    if all(kind in _KINDS for kind in kinds):
        is_flag = isinstance(value, bool) and bool not in kinds  # True is not 1
        if is_flag or not isinstance(value, tuple(_KINDS[kind] for kind in kinds)):
            names = join_names(("None" if kind is NoneType else kind.__name__ for kind in kinds), "or")
            raise _refuse(name, value, f"set a value of type {names}", "argument.type")


@lru_cache(maxsize=1024)  # asked for some 30 times while one configuration is read
def read_hints(kind: type) -> Mapping[str, Any]:
    """Return the annotations of a class with their marks; `Any` where a name is imported for type checkers only."""
    hints: dict[str, Any] = {}
    # Class by class, as an annotation is text in the names of the module of its own class. `get_type_hints` would fail
    # for all fields where one names a type that is imported for type checkers only.
    for base in reversed(kind.__mro__):
        names = {**vars(sys.modules.get(base.__module__, sys)), **vars(base)}
        for field, hint in vars(base).get("__annotations__", {}).items():
            # Annotations are code of the class itself, which was run when its module was imported.
            try:
                hints[field] = eval(hint, names) if isinstance(hint, str) else hint
            except Exception:
                hints[field] = Any
    return hints


def find_mark(hint: Any, mark: type[Any] | tuple[type[Any], ...]) -> Any:
    """Return the mark of a kind (or of several) in an annotation or in a member of it; None where there is none."""
    if isinstance(hint, mark):
        return hint
    return next((found for part in get_args(hint) if (found := find_mark(part, mark)) is not None), None)


@lru_cache(maxsize=256)
def _list_fields(kind: Any) -> list[tuple[str, str, Any, list[Any]]]:
    """Return (field, name in messages, default, annotations) of a class's fields that are arguments.

    Raises:
        SilodpError: as `check_is_dataclass`.
    """
    check_is_dataclass(kind)
    hints = read_hints(kind)
    named = {name: find_mark(hint, Named) for name, hint in hints.items()}
    return [
        (
            f.name,
            named[f.name].name if named[f.name] else f"{kind._prefix}{f.name}",
            f.default,
            [hints[f.name], *_find_inherited_range(kind, f.name)],
        )
        for f in fields(kind)
        if f.init
    ]


def _find_inherited_range(kind: type, field: str) -> list[Any]:
    """Return the annotation of a base class whose range still applies, because the class itself states none.

    A subclass that declares `noise_multiplier: float = 5.0` again changes the default, and not the range.
    """
    for base in kind.__mro__:
        if field in vars(base).get("__annotations__", {}):
            hint = read_hints(base)[field]
            if find_mark(hint, (Range, Whole)) is not None or get_origin(hint) is Literal:
                return [] if hint == read_hints(kind)[field] else [hint]
    return []


# --- checks by name -------------------------------------------------------------------------------------------------


def check_type(name: str, value: object, kind: type | tuple[type, ...], example: str = "") -> None:
    """Check that a value is an instance of `kind`; `example` is code that makes one, for the message."""
    if isinstance(value, kind):
        return
    kinds = join_names((one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,))), "or")
    tip = f", for example {example}" if example else ""
    raise SilodpError(
        f"{name} is a {type(value).__name__}: set a {kinds}{tip}.", code="argument.type", field=name
    )


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Check that a value is one of `choices`."""
    choices = tuple(choices)
    # By type first: arrays and tensors answer a comparison with an array.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise _refuse(name, value, f"set one of {', '.join(map(repr, choices))}", "argument.value")


def check_list(name: str, value: object, kind: type) -> None:
    """Check that a value is a list or another sequence, each item of a type."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    # By their types first: a list may have the keys of a million persons.
    if not is_list or not all(
        issubclass(each, kind) for each in set(map(type, cast("Sequence[object]", value)))
    ):
        items = "" if kind is object else f" of {kind.__name__}"
        raise _refuse(name, value, f"give a list{items}", "argument.type")


def check_path(name: str, value: object) -> None:
    """Check that a value can be the path of a file or folder."""
    check_type(name, value, (str, os.PathLike))
    if "\0" in str(value):
        raise _refuse(name, value, "give a path without zero bytes", "argument.value")


def check_shape(name: str, array: Any, *shape: int | None, kind: str | None = None) -> None:
    """Check the shape of an array or tensor, and of an array its kind of number.

    Args:
        name: The argument, as the caller wrote it.
        array: Anything with `shape`, and with `dtype.kind` where `kind` is given.
        shape: The lengths of its axes; None stands for any.
        kind: The allowed letters of numpy's `dtype.kind`, for example "iu" for whole numbers.

    Raises:
        SilodpError: "argument.shape".
    """
    found = tuple(array.shape)
    fits = len(found) == len(shape) and all(s is None or s == f for s, f in zip(shape, found, strict=True))
    if fits and (kind is None or array.dtype.kind in kind):
        return
    wanted = ", ".join("any" if length is None else str(length) for length in shape)
    of_kind = "" if kind is None else f" of dtype kind '{kind}'"
    raise SilodpError(
        f"{name} has shape {found} and type {array.dtype}: give an array of shape ({wanted}){of_kind}.",
        code="argument.shape",
        field=name,
    )


def _refuse(name: str, value: object, remedy: str, code: str) -> SilodpError:
    return SilodpError(f"{name} = {shorten(value)}: {remedy}.", code=code, field=name)
