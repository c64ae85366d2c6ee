"""Whatever is given for one argument of a public call: it returns, or raises one sentence with a code."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest

from silodp.accounting import compute_epsilon
from silodp.accounting.events import Gaussian
from silodp.errors import SilodpError
from support.bad_arguments import list_calls, list_cases


@pytest.mark.parametrize("part", range(4))
def test_an_argument_of_any_type_ends_in_no_other_exception(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 of some 12,000 cases each; another number of the seed makes other ones."""
    monkeypatch.chdir(tmp_path)
    calls = list_calls(tmp_path)
    cases = list(list_cases(calls))
    random.Random(part).shuffle(cases)
    faults = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, argument, value in cases[:400]:
            function, arguments = calls[name]
            try:
                function(**{**arguments, argument: value})
            except SilodpError:
                continue
            except Exception as error:
                faults.append(f"{name}({argument}={value!r}): {type(error).__name__}: {error}")
    assert not faults


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("Evaluation", "times", 3),
        ("Schema", "readers", 3),
        ("Federation", "user_keys", 3),
        ("Federation", "features", 1),
        ("Federation", "users", 2**63),
        ("Lattice", "count_cap", "x"),
        ("load", "directory", 3.0),
        ("embedded", "silos", 2**63),
        ("train", "resume", None),
        ("train", "callbacks", 3),
        ("train", "out", "a\0b"),
        ("from_tables", "name", float("nan")),
    ],
)
def test_what_was_accepted_or_raised_something_else(
    name: str, argument: str, value: object, tmp_path: Path
) -> None:
    function, arguments = list_calls(tmp_path)[name]
    with pytest.raises(SilodpError) as caught:
        function(**{**arguments, argument: value})
    assert caught.value.code != "data.files", "it is refused for another reason"


def test_a_disclosure_may_be_as_small_as_that_of_ciphertexts() -> None:
    """`lattice` has one of 10⁻¹⁰¹, far below what settings may be."""
    charges = [(Gaussian(5.0), 3)]
    assert compute_epsilon(charges, 1e-5, disclosure=9e-102) == pytest.approx(compute_epsilon(charges, 1e-5))
