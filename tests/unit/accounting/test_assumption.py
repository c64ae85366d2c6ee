"""Assumptions as values: their form, where they are read from a file, and the one table of their ids."""

from __future__ import annotations

import ast
import re
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from silodp.accounting.views import ADVERSARIES
from silodp.aggregators.registry import AGGREGATORS
from silodp.assumption import DECLARERS, Assumption, as_assumptions
from silodp.config.build import get_fields
from silodp.errors import SilodpError
from silodp.methods import METHODS
from silodp.planning.epsilon import compute_epsilon_for
from support.refusals import refused

ROOT = Path(__file__).parents[3]
KNOWN = Assumption("a-b2", "text", "somebody")


def test_an_assumption_is_read_back() -> None:
    assert Assumption.from_dict(asdict(KNOWN)) == KNOWN


@pytest.mark.parametrize(
    "change",
    [
        {"id": "A b"},
        {"id": "a--b"},
        {"id": 3},
        {"text": None},
        {"known_by": ""},
        {"known_by": "a\x1b[2J"},
        {"technical": 1},
        {"technical": True},
        {"more": "x"},
    ],
)
def test_what_is_no_assumption_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="assumption"):
        Assumption.from_dict(asdict(KNOWN) | change)


def test_a_plain_sentence_is_one_that_its_author_answers_for() -> None:
    known, plain = as_assumptions((KNOWN, "technical: nobody looks"))
    assert known is KNOWN
    assert (plain.text, plain.known_by, plain.technical) == ("technical: nobody looks", DECLARERS, False)
    assert plain == Assumption.from_text(plain.text) != Assumption.from_text("another")
    for wrong in ("one sentence", (3,)):
        with refused("argument.type"):
            as_assumptions(wrong)  # type: ignore[arg-type]


# --- the table of docs/concepts/assumptions.md ------------------------------------------------------------------------


def read_table() -> list[str]:
    page = (ROOT / "docs" / "concepts" / "assumptions.md").read_text()
    return re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE)


def test_the_table_lists_every_id_that_the_code_makes_once() -> None:
    made = set[str]()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Assumption":
                assert isinstance(node.args[0], ast.Constant), (path, node.lineno)
                made.add(str(node.args[0].value))
    listed = read_table()
    assert sorted(listed) == sorted(made)


FIELDS: dict[str, Any] = {
    "noise_multiplier": 3.0,
    "user_sampling": 0.3,
    "group_size": 2,
    "record_sampling": 0.1,
    "local_steps": 2,
    "client_sampling": 0.6,
    "largest_budget": 2.0,
}
"""Settings of methods that ε depends on; a question has those that its method has."""
RECORDS = ("rpdp", "rpdp-minimum", "rpdp-dropout")
"""Methods that draw every record with a probability of its own; a question is about one of them."""


def test_every_assumption_that_a_guarantee_prints_is_in_the_table() -> None:
    """Of every method under every aggregator, against every adversary."""
    listed, printed, refusals = {*read_table()}, set[str](), list[str]()
    for method, aggregator, weighting in product(
        METHODS, AGGREGATORS, ("uniform", "records", "primary_silo")
    ):
        asked = FIELDS.keys() & get_fields(METHODS[method]) | (
            {"record_sampling"} if method in RECORDS else set()
        )
        fields = {name: FIELDS[name] for name in asked}
        if "weighting" in get_fields(METHODS[method]):
            fields["weighting"] = weighting
        elif weighting != "uniform":
            continue
        for adversary in ADVERSARIES:
            ask = partial(compute_epsilon_for, method, fields, rounds=1, delta=0.1, accountant="rdp")
            try:
                answer = ask(adversary=adversary, silos=3, users=50, dimension=10, aggregator=aggregator)
            except SilodpError as error:  # not every aggregator can add up the sums of every method
                refusals.append(error.code)
                continue
            printed |= {one["id"] for one in answer["assumptions"]}
            assert len({one["id"] for one in answer["assumptions"]}) == len(answer["assumptions"])
    assert printed <= listed
    assert len(printed) > 25
    assert {*refusals} == {"argument.conflict"}
