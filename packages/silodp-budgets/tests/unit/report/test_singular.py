"""One of a thing is not written as several, wherever a reader meets the number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from silodp.accounting.calibration import calibrate_noise_multiplier
from silodp.accounting.events import Gaussian
from silodp.errors import SilodpError
from silodp.methods.ddp import PER_CLIENT, expand_per_client
from silodp.text import join_names, pluralize
from silodp_budgets.user_budgets import UserBudgets
from support.commands import Silodp

WRONG = re.compile(r"(?<![\d.,/])1 (?!is\b|has\b|was\b)[a-z]{2,}s\b")


def test_lists_of_names() -> None:
    lists = [[], ["a"], ["a", "b"], ["a", "b", "c"]]
    assert [join_names(names) for names in lists] == ["", "a", "a and b", "a, b and c"]
    assert join_names(iter("abc"), "or") == "a, b or c"


def test_counts() -> None:
    assert [pluralize(n, "round") for n in (0, 1, 2, 1000)] == [
        "0 rounds",
        "1 round",
        "2 rounds",
        "1,000 rounds",
    ]
    assert WRONG.search("after 1 rounds") is not None
    assert WRONG.search("after 11 rounds, 0.1 rounds, 1/1 rounds, T = 1 is") is None


def test_a_run_of_one_round_is_told_as_one(silodp: Silodp, config: Path) -> None:
    told = [silodp("run", config, "--set", "rounds=1", "--out", "out").out]
    told.append(
        re.sub(r"<(svg|script|style).*?</\1>", "", Path("out/report.html").read_text(), flags=re.DOTALL)
    )
    told.append(silodp("plan", config, "--set", "rounds=1", "--set", "data.silos=1").out)
    told.append(silodp(*["epsilon", "--method", "uldp-avg", "--noise-multiplier", "5", "--rounds", "1"]).out)
    for text in told:
        assert "1 round" in text
        assert WRONG.findall(text) == []


def test_refusals_and_assumptions_about_one_are_about_one() -> None:
    told = [
        one.text
        for one in UserBudgets(by="clip", rounds=1, largest_budget=2.0).assumptions
        if "round" in one.text
    ]
    with pytest.raises(SilodpError) as caught:
        calibrate_noise_multiplier(lambda sigma: [(Gaussian(min(sigma, 1.0)), 1)], 1e-3, 1e-5)
    told.append(str(caught.value))
    settings = dict.fromkeys(PER_CLIENT, 1.0) | {"clip": (1.0,)}
    with pytest.raises(SilodpError) as caught:
        expand_per_client(settings, 3)
    told.append(str(caught.value))
    assert len(told) == 3
    for text in told:
        assert WRONG.findall(text) == [], text
        assert re.search(r"\b1 (round|value)\b", text), text
