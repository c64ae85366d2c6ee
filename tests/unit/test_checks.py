"""The checks that every setting passes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from silodp import errors
from silodp.errors import (
    SilodpError,
    check_fields,
    check_real,
    check_shape,
    check_type,
    check_whole,
    optional,
)
from support.refusals import refused


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        ("check_positive", (1e-3, 1, np.float64(2)), (0, -1, math.inf, math.nan)),
        ("check_epsilon", (0.5,), (0, math.inf, math.nan)),
        ("check_delta", (1e-5, 0.5), (0, 1, 2, math.nan, -1e-5)),
        ("check_probability", (1e-5, 1), (0, 1.5, math.nan, -0.1)),
        ("check_momentum", (0, 0.9), (1, -0.1, math.nan)),
        ("check_clip", (0.1,), (0, math.inf, math.nan)),
        ("check_noise_multiplier", (0, 5.0, 1e6), (-1, math.inf, math.nan)),
    ],
)
def test_a_range_lets_pass_what_is_in_it(check: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    function = getattr(errors, check)
    for value in good:
        function("x", value)
    for value in bad:
        with refused("argument.value") as caught:
            function("x", value)
        assert caught.value.field == "x"
    for value in (True, "1", None, 1j):
        with refused("argument.type"):
            function("x", value)
    with refused("argument.out_of_range"):
        function("x", 1e300)


def test_without_a_bound_a_real_number_may_be_anything_that_can_be_squared() -> None:
    for value in (0, math.inf, -math.inf, math.nan, -3.5):
        check_real("x", value)
    for value in (1e-60, 10**400):
        with refused("argument.out_of_range"):
            check_real("x", value)


def test_whole_numbers() -> None:
    check_whole("x", np.int64(3), 3, 3)
    for value in (2, True, 3.0, "3"):
        with refused("argument.value"):
            check_whole("x", value, 3)
    with refused("argument.out_of_range"):
        check_whole("x", 4, 3, 3)


def test_types_choices_and_shapes() -> None:
    check_type("x", 1, (int, str))
    with refused("argument.type"):
        check_type("x", 1.0, (int, str), "1")
    errors.check_choice("x", "a", ("a", "b"))
    with refused("argument.value"):
        errors.check_choice("x", "c", ("a", "b"))
    with refused("argument.value"):
        errors.check_choice("x", [], ("a", "b"))
    check_shape("x", np.zeros((2, 3), int), 2, None, kind="iu")
    for shape in ((2,), (2, 4), (None, None, None)):
        with refused("argument.shape"):
            check_shape("x", np.zeros((2, 3)), *shape)
    with refused("argument.shape"):
        check_shape("x", np.zeros(2), 2, kind="iu")


def test_the_fields_of_a_dataclass() -> None:
    @dataclass
    class Settings:
        clip: float
        rounds: int | None = None

        def __post_init__(self) -> None:
            check_fields(self, "settings.", clip=errors.check_clip, rounds=optional(check_whole))

    Settings(1.0)
    Settings(1.0, 3)
    with pytest.raises(SilodpError) as caught:
        Settings(1.0, 0)
    assert caught.value.field == "settings.rounds"
