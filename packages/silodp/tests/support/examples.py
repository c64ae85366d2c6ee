"""Properties that are costly to check: a few examples with every run of the tests, many more in the slow ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def few_or_many(
    few: int, many: int, **strategies: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`given` with these strategies, for `few` examples, and in `-m slow` for `many`; other arguments are pytest's."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def checked(examples: int, **arguments: Any) -> None:
            @settings(max_examples=examples, deadline=None)
            @given(**strategies)
            def once(**drawn: Any) -> None:
                test(**arguments, **drawn)

            once()

        names = ["examples", *(name for name in inspect.signature(test).parameters if name not in strategies)]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        checked.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        checked.__name__, checked.__doc__, checked.__module__ = test.__name__, test.__doc__, test.__module__
        checked.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])(checked)

    return decorate
