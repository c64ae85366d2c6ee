"""The checks that every setting passes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest

from silodp import settings
from silodp.errors import SilodpError
from silodp.settings import (
    Clip,
    Count,
    Help,
    Momentum,
    Named,
    Positive,
    Range,
    Settings,
    Whole,
    check_choice,
    check_shape,
    check_type,
    check_value,
    find_mark,
    read_hints,
)
from support.refusals import refused

if TYPE_CHECKING:
    from fractions import Fraction


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("Positive", (1e-3, 1, np.float64(2)), (0, -1, math.inf, math.nan)),
        ("Epsilon", (0.5,), (0, math.inf, math.nan)),
        ("Delta", (1e-5, 0.5), (0, 1, 2, math.nan, -1e-5)),
        ("Probability", (1e-5, 1), (0, 1.5, math.nan, -0.1)),
        ("Momentum", (0, 0.9), (1, -0.1, math.nan)),
        ("Clip", (0.1,), (0, math.inf, math.nan)),
        ("NoiseMultiplier", (0, 5.0, 1e6), (-1, math.inf, math.nan)),
    ],
)
def test_a_range_lets_pass_what_is_in_it(kind: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    declared = getattr(settings, kind)
    for value in good:
        check_value("x", value, declared)
    for value in bad:
        with refused("argument.value") as caught:
            check_value("x", value, declared)
        assert caught.value.field == "x"
    for value in (True, "1", None, 1j):
        with refused("argument.type"):
            check_value("x", value, declared)
    with refused("argument.out_of_range"):
        check_value("x", 1e300, declared)


def test_without_a_bound_a_real_number_may_be_anything_that_can_be_squared() -> None:
    for value in (0, math.inf, -math.inf, math.nan, -3.5):
        Range().check("x", value)
    for value in (1e-60, 10**400):
        with refused("argument.out_of_range"):
            Range().check("x", value)


def test_whole_numbers() -> None:
    Whole(3, 3).check("x", np.int64(3))
    for value in (2, True, 3.0, "3"):
        with refused("argument.value"):
            Whole(3).check("x", value)
    with refused("argument.out_of_range"):
        Whole(3, 3).check("x", 4)


def test_types_choices_and_shapes() -> None:
    check_type("x", 1, (int, str))
    with refused("argument.type"):
        check_type("x", 1.0, (int, str), "1")
    check_choice("x", "a", ("a", "b"))
    with refused("argument.value"):
        check_choice("x", "c", ("a", "b"))
    with refused("argument.value"):
        check_choice("x", [], ("a", "b"))
    check_shape("x", np.zeros((2, 3), int), 2, None, kind="iu")
    for shape in ((2,), (2, 4), (None, None, None)):
        with refused("argument.shape"):
            check_shape("x", np.zeros((2, 3)), *shape)
    with refused("argument.shape"):
        check_shape("x", np.zeros(2), 2, kind="iu")


@dataclass(frozen=True)
class Inner(Settings, prefix="inner."):
    momentum: Momentum = 0.0


@dataclass(frozen=True)
class Outer(Settings):
    clip: Annotated[Clip, Help("C")]
    rounds: Count | None = None
    rates: Positive | tuple[Positive, ...] = 1.0
    times: tuple[float, ...] = ()
    size: Annotated[int, Range(), Whole(most=9)] = 1
    way: Literal["up", "down"] = "up"
    plain: float = None  # type: ignore[assignment]  # a default is not checked
    text: str | bool = ""
    shift: Annotated[Positive, Named("run.shift")] = 1.0
    inner: Inner | None = None
    span: Annotated[float | None, Range(above=0)] = 1.0
    odd: Fraction | None = None
    made: int = field(default="no argument", init=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("clip", 0, "argument.value"),
        ("rounds", 0, "argument.value"),
        ("rates", -1.0, "argument.value"),
        ("rates", (1.0, 0.0), "argument.value"),
        ("rates", ("a",), "argument.type"),
        ("times", 3, "argument.type"),
        ("times", (True,), "argument.type"),
        ("size", "a", "argument.type"),
        ("size", 2.5, "argument.value"),
        ("size", 10, "argument.value"),
        ("way", "left", "argument.value"),
        ("plain", "a", "argument.type"),
        ("plain", True, "argument.type"),
        ("text", 1.0, "argument.type"),
        ("shift", 0, "argument.value"),
        ("inner", {"momentum": 0.5}, "argument.type"),
        ("span", 0, "argument.value"),
    ],
)
def test_fields_are_checked_by_their_annotations(field: str, value: Any, code: str) -> None:
    with refused(code) as caught:
        Outer(**{"clip": 1.0, field: value})
    assert caught.value.field == ("run.shift" if field == "shift" else field)


def test_what_an_annotation_allows_passes() -> None:
    made = Outer(
        np.float32(1), 3, (1, 2.0), [0.5], 9, "down", np.int64(1), True, 2, Inner(0.5), None, object()
    )
    assert made.rates == (1, 2.0)
    assert Outer(1).plain is None
    with pytest.raises(SilodpError) as caught:
        Inner(1.0)
    assert caught.value.field == "inner.momentum"


def test_an_annotation_for_type_checkers_only_leaves_the_others_readable() -> None:
    hints = read_hints(Outer)
    assert hints["odd"] is Any
    assert find_mark(hints["clip"], Help) == Help("C")
    assert find_mark(hints["rounds"], Whole) == Whole()
    assert find_mark(hints["plain"], Help) is None
