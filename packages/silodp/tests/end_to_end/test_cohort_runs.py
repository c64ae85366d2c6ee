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
from silodp.runtime.run_directory import RunDirectory
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


def copy_during(round_: int, **settings: Any) -> package.Result:
    """A run whose directory is copied after a round, while it goes on."""

    def copy(done: package.RoundResult) -> None:
        if done.round == round_:
            shutil.copytree("a", "copy")

    method = package.methods.UldpAvg(noise_multiplier=5.0, clip=1.0)
    return package.train(
        small_federation(),
        logistic_task(),
        method,
        rounds=4,
        out="a",
        cohort="people",
        callbacks=[copy],
        **settings,
    )


def resume(out: str, cohort: str | None = "people", **settings: Any) -> package.Result:
    method = package.methods.UldpAvg(noise_multiplier=5.0, clip=1.0)
    more = {"rounds": 4, **settings}
    return package.train(
        small_federation(), logistic_task(), method, out=out, resume=True, cohort=cohort, **more
    )


def test_a_copy_that_is_continued_is_another_run(silodp: Silodp) -> None:
    """Both models are released: ε of one was stated for two (2.487 for 3.40), and ten copies went beyond the limit."""
    assert silodp("cohort", "new", "many", "--epsilon", 30).status == 0
    Path("many").replace("people")
    copy_during(2)
    (alone,) = Cohort(Path("people")).runs.values()
    resume("copy")
    runs = list(Cohort(Path("people")).runs.values())
    assert [run.run for run in runs] == [alone.run] * 2
    assert [sum(run.charges["released"].values()) for run in runs] == [4, 4]
    assert len({one["continuation"] for one in show(silodp)["runs"]}) == 2
    assert json.loads(Path("copy/cohort.json").read_text())["place"] == 2
    # Each goes on under its own entry.
    resume("a", rounds=5)
    resume("copy", rounds=6)
    runs = list(Cohort(Path("people")).runs.values())
    assert [sum(run.charges["released"].values()) for run in runs] == [5, 6]
    with refused("cohort.required"):
        resume("copy", None, rounds=6)
    assert_sentence(silodp("cohort", "add", "people", "copy"), code="cohort.required")


def test_copies_do_not_go_beyond_the_limit() -> None:
    copy_during(2)
    shutil.copytree("copy", "another")
    with refused("cohort.budget"):
        for name in ("copy", "another"):
            resume(name, rounds=8)
    assert len(Cohort(Path("people")).runs) < 3


def test_a_run_whose_copy_went_on_first_releases_nothing(silodp: Silodp) -> None:
    assert silodp("cohort", "new", "many", "--epsilon", 30).status == 0
    Path("many").replace("people")
    seen = []

    def continue_copy(done: package.RoundResult) -> None:
        seen.append(done.round)
        if done.round == 2:
            shutil.copytree("a", "copy")
            # As another process: the copy has a lock of its own.
            resume("copy")

    method = package.methods.UldpAvg(noise_multiplier=5.0, clip=1.0)
    with refused("cohort.settle"):
        package.train(
            small_federation(),
            logistic_task(),
            method,
            rounds=4,
            out="a",
            cohort="people",
            callbacks=[continue_copy],
        )
    assert seen == [0, 1, 2], "nothing of round 3 was shown"
    assert len(Path("a/metrics.jsonl").read_text().splitlines()) == 3
    assert len(Cohort(Path("people")).runs) == 1
    resume("a")
    runs = list(Cohort(Path("people")).runs.values())
    assert [sum(run.charges["released"].values()) for run in runs] == [4, 4]


def test_an_old_copy_of_the_cohort_is_noticed_by_a_run_that_is_counted_in_it() -> None:
    copies = []

    def replace_cohort(done: package.RoundResult) -> None:
        copies.append(Path("people").read_bytes())
        if done.round == 3:
            Path("people").write_bytes(copies[1])

    method = package.methods.UldpAvg(noise_multiplier=5.0, clip=1.0)
    with refused("ledger.damaged"):
        package.train(
            small_federation(),
            logistic_task(),
            method,
            rounds=4,
            out="a",
            cohort="people",
            callbacks=[replace_cohort],
        )
    with refused("cohort.settle"):
        resume("a")
    Path("people").write_bytes(copies[-1])
    resume("a")
    assert len(Cohort(Path("people")).runs) == 1


def test_a_run_that_died_before_its_round_was_visible_repeats_it_under_its_entry() -> None:
    """The ledger lists the round, and the cohort or the checkpoint does not know it yet."""
    method = package.methods.UldpAvg(noise_multiplier=5.0, clip=1.0)
    settings = {"rounds": 3, "out": "a", "cohort": "people"}
    for name, patched, calls in ((Cohort, "note_head", 1), (RunDirectory, "save_state", 0)):
        original, left = getattr(name, patched), [calls]

        def dying(self: Any, *arguments: Any, original: Any = original, left: Any = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            original(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(name, patched, dying)
            with pytest.raises(KeyboardInterrupt):
                package.train(
                    small_federation(), logistic_task(), method, resume=Path("a").exists(), **settings
                )
    package.train(small_federation(), logistic_task(), method, resume=True, **settings)
    (run,) = Cohort(Path("people")).runs.values()
    assert sum(run.charges["released"].values()) == 3


@pytest.mark.parametrize("at", [0, 1])
def test_a_run_that_died_keeps_its_reservation_and_is_counted_once(at: int) -> None:
    method = package.methods.UldpAvg(noise_multiplier=5.0, clip=1.0)
    settings = {"rounds": 2, "out": "a", "cohort": "people"}

    def die(done: package.RoundResult) -> None:
        if done.round == at:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        package.train(small_federation(), logistic_task(), method, callbacks=[die], **settings)
    cohort = Cohort(Path("people"))
    (run,) = cohort.runs.values()
    assert not run.is_settled
    assert sum(run.charges["released"].values()) == 2  # the whole plan
    package.train(small_federation(), logistic_task(), method, resume=True, **settings)
    cohort = Cohort(Path("people"))
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
        cohort = Cohort(path)
        return sum(next(iter(cohort.runs.values())).charges["released"].values())

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
