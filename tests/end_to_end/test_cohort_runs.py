"""Runs that are counted in a cohort: refused beyond its limit, counted once, and not continued without it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import silodp as package
from silodp.accounting.cohort import Cohort
from silodp.runtime.cohort import CohortPlace, count_in_cohort
from silodp.runtime.prepare import prepare_run
from silodp.runtime.silo import make_ledger
from support.commands import CONFIG, Silodp, assert_sentence
from support.oracles import logistic_task, small_federation
from support.refusals import refused


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silodp: Silodp) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(CONFIG.replace("seed = 1\n", ""))
    assert silodp("cohort", "new", "people", "--epsilon", 3).status == 0
    return tmp_path


def show(silodp: Silodp) -> Any:
    done = silodp("cohort", "show", "people", "--json")
    assert done.status == 0
    return done.json


def test_runs_add_up_and_one_beyond_the_limit_writes_nothing(silodp: Silodp) -> None:
    for name in ("a", "b"):
        assert silodp("run", "small.toml", "--cohort", "people", "--out", name).status == 0
    alone = json.loads(Path("a/guarantee.json").read_text())["guarantees"][0]["epsilon"]
    found = show(silodp)
    assert [one["settled"] for one in found["runs"]] == [True, True]
    assert alone < found["epsilon"]["released"] < 2 * alone
    refused = silodp("run", "small.toml", "--cohort", "people", "--out", "c", "--set", "rounds=20")
    assert_sentence(refused, code="cohort.budget")
    assert not Path("c").exists()
    assert len(show(silodp)["runs"]) == 2


def test_report_and_card_say_what_all_runs_spent(silodp: Silodp) -> None:
    for name in ("a", "b"):
        assert silodp("run", "small.toml", "--cohort", "people", "--out", name).status == 0
    printed = silodp("report", "b").out
    for text in (printed, Path("b/report.html").read_text(), Path("b/MODEL_CARD.md").read_text()):
        assert "run 2 on these people" in text
        assert "at most ε = 3 " in text
    shutil.copy("a/cohort.json", "b/cohort.json")
    assert_sentence(silodp("report", "b"), code="report.contradicted")
    Path("b/cohort.json").write_text('{"format": true}')
    assert_sentence(silodp("report", "b"), code="report.damaged")


def test_a_run_goes_on_in_the_cohort_in_which_it_was_begun(silodp: Silodp) -> None:
    assert silodp("cohort", "new", "others", "--epsilon", 9).status == 0
    assert silodp("run", "small.toml", "--cohort", "people", "--out", "a").status == 0
    assert silodp("run", "small.toml", "--out", "free").status == 0
    more = ("--resume", "--set", "rounds=3")
    assert_sentence(silodp("run", "a", *more), code="cohort.required")
    assert_sentence(silodp("run", "a", *more, "--cohort", "others"), code="cohort.required")
    assert_sentence(silodp("run", "free", *more, "--cohort", "people"), code="cohort.required")
    before = show(silodp)["epsilon"]["released"]
    assert silodp("run", "a", *more, "--cohort", "people").status == 0
    assert show(silodp)["epsilon"]["released"] > before
    assert len(show(silodp)["runs"]) == 1


def test_of_two_copies_of_a_directory_one_goes_on(silodp: Silodp) -> None:
    assert silodp("run", "small.toml", "--cohort", "people", "--out", "a").status == 0
    shutil.copytree("a", "copy")
    more = ("--resume", "--set", "rounds=3", "--cohort", "people")
    assert silodp("run", "a", *more).status == 0
    assert_sentence(silodp("run", "copy", *more), code="cohort.settle")


@pytest.mark.parametrize("at", [0, 1])
def test_a_run_that_died_keeps_its_reservation_and_is_counted_once(at: int) -> None:
    method = package.methods.UldpAvg(noise_multiplier=5.0, clip=1.0)
    settings = {"rounds": 2, "out": "a", "cohort": "people"}

    def die(done: package.RoundResult) -> None:
        if done.round == at:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        package.train(small_federation(), logistic_task(), method, on_round=die, **settings)
    with Cohort(Path("people")) as cohort:
        (run,) = cohort.runs.values()
        assert not run.is_settled
        assert sum(run.charges["released"].values()) == 2  # the whole plan
    package.train(small_federation(), logistic_task(), method, resume=True, **settings)
    with Cohort(Path("people")) as cohort:
        (run,) = cohort.runs.values()
        assert run.is_settled
        assert sum(run.charges["released"].values()) == 2


def test_noise_that_somebody_can_compute_is_not_counted(silodp: Silodp) -> None:
    seeded = silodp("run", "small.toml", "--cohort", "people", "--set", "seed=1")
    assert_sentence(seeded, code="cohort.seed")
    assert silodp("run", "small.toml", "--set", "seed=1", "--out", "seeded").status == 0
    assert_sentence(silodp("cohort", "add", "people", "seeded"), code="cohort.seed")


def test_a_run_that_was_done_before_is_added(silodp: Silodp) -> None:
    assert silodp("run", "small.toml", "--out", "a").status == 0
    assert silodp("cohort", "add", "people", "a").status == 0
    assert_sentence(silodp("cohort", "add", "people", "a"), code="cohort.settle")
    assert_sentence(silodp("cohort", "add", "people"), code="argument.missing")
    assert_sentence(silodp("cohort", "add", "people", "--note", "x"), code="argument.missing")
    (Path("a") / "checkpoint" / "ledger.jsonl").unlink()
    assert_sentence(silodp("cohort", "add", "people", "a"), code="report.missing")
    assert silodp("cohort", "add", "people", "--note", "a pilot", "--epsilon", 1).status == 0
    assert_sentence(silodp("run", "small.toml", "--cohort", "people"), code="cohort.unknown")


def test_other_people_and_records_have_cohorts_of_their_own(silodp: Silodp) -> None:
    assert silodp("run", "small.toml", "--cohort", "people", "--out", "a").status == 0
    others = silodp("run", "small.toml", "--cohort", "people", "--out", "b", "--set", "data.users=21")
    assert_sentence(others, code="cohort.persons")
    assert_sentence(silodp("cohort", "show", "nobody"), code="cohort.path")
    assert_sentence(silodp("cohort", "new", "people", "--epsilon", 3), code="cohort.path")
    assert_sentence(silodp("cohort", "new", "new", "--epsilon", 0), code="argument.value")


def test_a_further_release_is_reserved_before_it_is_charged() -> None:
    """Silos that drop out under secure aggregation cost a round a second release, which no plan has."""
    federation, path = small_federation(), Path("people")
    method = package.methods.UldpAvg(noise_multiplier=5.0, clip=1.0)
    spec = replace(prepare_run(federation, logistic_task(), method, rounds=2), run="one")
    place, events = CohortPlace(path, federation.persons), spec.round_events()

    def count() -> int:
        with Cohort(path) as cohort:
            return sum(cohort.runs["one"].charges["released"].values())

    ledger = make_ledger(spec)
    with count_in_cohort(place, None, spec, ledger, False):
        assert count() == 2
        for number in range(2):
            ledger.charge(number, 0, events)
        assert count() == 2
        ledger.charge(1, 1, events)
        assert count() == 3
        with refused("cohort.budget"):
            for release in range(2, 100):
                ledger.charge(1, release, events)
        charged = sum(ledger.counts("released").values())
        assert 3 < charged == count() < 100
    assert count() == charged
