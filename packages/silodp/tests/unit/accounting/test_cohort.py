"""The file of a cohort: what it admits, what it has after any order of lines, and which files and runs it refuses."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from silodp.accounting import cohort as cohort_module
from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.cohort import Cohort, CohortRun, create_cohort
from silodp.accounting.events import Event, Gaussian, NonPrivate, PoissonSampled, WorstOf
from support.refusals import refused
from support.rewriting import read_ledger, write_ledger

DELTA = 1e-5
EASY, HARD = Gaussian(20.0), Gaussian(4.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_cohort(tmp_path / "cohort", {"released": 3.0}, DELTA)
    return tmp_path / "cohort"


def make_run(name: str, event: Event = EASY, rounds: int = 10, **more: Any) -> CohortRun:
    return CohortRun(name, name, "run", "user", {"released": {event: rounds}}, **more)


def test_reservations_count_until_they_are_settled(path: Path) -> None:
    cohort = Cohort(path)
    cohort.reserve(make_run("a", HARD, 4))
    with refused("cohort.budget"):
        cohort.reserve(make_run("b", HARD, 6))
    assert list(cohort.runs) == ["a"]
    cohort.settle("a", "", {"released": {HARD: 1}})  # it stopped early
    cohort.reserve(make_run("b", HARD, 3))
    again = Cohort(path)
    assert [run.is_settled for run in again.runs.values()] == [True, False]
    assert again.epsilon("released") == pytest.approx(compute_epsilon([(HARD, 4)], DELTA))


def test_what_is_admitted_does_not_depend_on_the_order_of_runs(tmp_path: Path) -> None:
    runs = [make_run("a", EASY, 5), make_run("b", HARD, 1), make_run("c", PoissonSampled(0.1, HARD), 20)]
    found = set()
    for number, order in enumerate(permutations(runs[1:])):
        file = tmp_path / str(number)
        create_cohort(file, {"released": 3.0}, DELTA)
        cohort = Cohort(file)
        for run in (runs[0], *order):  # the first one is the plan
            cohort.reserve(run)
        found.add((round(cohort.epsilon("released") or 0, 9), _admits(cohort, make_run("d", HARD, 5))))
    assert len(found) == 1


def _admits(cohort: Cohort, run: CohortRun) -> bool:
    try:
        cohort.check(run)
    except Exception:
        return False
    return True


def test_a_run_is_counted_once_however_often_it_is_reserved(path: Path) -> None:
    cohort = Cohort(path)
    for _ in range(3):
        cohort.reserve(make_run("a", HARD, 3))
    assert cohort.epsilon("released") == pytest.approx(compute_epsilon([(HARD, 3)], DELTA))


def test_no_run_has_more_than_it_reserved(path: Path) -> None:
    cohort = Cohort(path)
    cohort.reserve(make_run("a", EASY, 2))
    with refused("cohort.settle"):
        cohort.settle("a", "", {"released": {EASY: 3}})
    with refused("cohort.settle"):
        cohort.settle("b", "", {"released": {EASY: 1}})


def test_runs_that_were_done_before_are_added_once_and_end_the_cohort_beyond_its_limit(path: Path) -> None:
    cohort = Cohort(path)
    cohort.add(make_run("a", EASY, 2), lambda head: True)
    with refused("cohort.settle"):
        cohort.add(make_run("a", EASY, 2), lambda head: True)
    with refused("cohort.budget"):
        cohort.add(make_run("b", HARD, 50), lambda head: True)
    assert cohort.exceeded is None
    cohort.add(make_run("b", HARD, 50), lambda head: True, over_limit=True)
    assert cohort.exceeded == "released"
    with refused("cohort.budget"):
        cohort.reserve(make_run("c", EASY, 1))


def test_after_a_run_whose_ledger_is_not_known_none_is_admitted(path: Path) -> None:
    cohort = Cohort(path)
    cohort.note_unknown("a run of 2020", 2.0)
    with refused("cohort.unknown"):
        cohort.reserve(make_run("a"))
    again = Cohort(path)
    assert again.unknown == [("a run of 2020", 2.0)]


def test_what_cannot_be_added_up_is_refused(path: Path) -> None:
    column = {"column": "patient"}
    cohort = Cohort(path)
    cohort.reserve(make_run("a", persons=column))
    with refused("cohort.unit"):
        cohort.reserve(replace(make_run("b"), unit="record"))
    with refused("cohort.persons"):
        cohort.reserve(make_run("b", persons={"column": "name"}))
    cohort.reserve(make_run("b", persons=column))
    with refused("accounting.no_guarantee"):
        cohort.reserve(make_run("c", NonPrivate("no noise")))
    kinds = WorstOf((EASY, HARD))
    cohort.reserve(make_run("d", kinds, 1))
    with refused("accounting.unsupported"):
        cohort.reserve(make_run("e", kinds, 1))


def test_a_rule_that_does_not_cover_a_run_says_so(tmp_path: Path) -> None:
    create_cohort(tmp_path / "cohort", {"released": 3.0}, DELTA, ("gaussian",))
    cohort = Cohort(tmp_path / "cohort")
    cohort.reserve(make_run("a", EASY, 5))
    with refused("cohort.rule"):
        cohort.reserve(make_run("b", PoissonSampled(0.1, HARD), 5))


def test_readers_wait_for_nobody_and_writers_for_a_minute(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run ended because somebody looked at the file."""
    cohort, other = Cohort(path), Cohort(path)
    cohort.reserve(make_run("a"))
    with cohort.lock():
        assert list(Cohort(path).runs) == ["a"]
        monkeypatch.setattr(cohort_module, "_WAIT_SECONDS", 0.1)
        with refused("run.in_use"):
            other.reserve(make_run("b"))
    monkeypatch.setattr(cohort_module, "_WAIT_SECONDS", 20.0)
    with ThreadPoolExecutor(1) as threads:
        with cohort.lock():
            waiting = threads.submit(other.reserve, make_run("b"))
            time.sleep(0.2)
            assert not waiting.done()
            cohort.reserve(make_run("c"))
        waiting.result()
    assert list(other.runs) == ["a", "c", "b"], "whoever waited has read what was written meanwhile"


def test_two_continuations_of_one_moment_are_two_runs(path: Path) -> None:
    """Whoever notes a line of the ledger that the other does not have decides; the other one is refused."""
    first, copy = Cohort(path), Cohort(path)
    first.reserve(make_run("a", HARD, 3, head="1"))
    first.note_head("a", "1", "2")
    copy.note_head("a", "2", "3 of the copy")
    with refused("cohort.settle"):
        first.note_head("a", "2", "3")
    with refused("cohort.settle"):
        first.settle("a", "2", {"released": {HARD: 3}})
    copy.settle("a", "3 of the copy", {"released": {HARD: 3}})
    # One entry for each of two directories with one id, unless one goes on from the other.
    with refused("cohort.settle"):
        copy.add(make_run("a", HARD, 3), {"1", "2", "3 of the copy"}.__contains__)
    copy.add(replace(make_run("a", HARD, 1), continuation="other"), {"1", "2", "3"}.__contains__)
    assert [run.run for run in copy.runs.values()] == ["a", "a"]
    assert copy.epsilon("released") == pytest.approx(compute_epsilon([(HARD, 4)], DELTA))
    longer = replace(make_run("a", HARD, 4), continuation="another", head="5")
    copy.add(longer, {"1", "2", "3 of the copy", "4", "5"}.__contains__)
    assert copy.epsilon("released") == pytest.approx(compute_epsilon([(HARD, 5)], DELTA))


def test_a_file_that_is_replaced_by_an_older_copy_while_it_is_used_is_refused(path: Path) -> None:
    cohort = Cohort(path)
    cohort.reserve(make_run("a"))
    old = path.read_bytes()
    cohort.reserve(make_run("b"))
    path.write_bytes(old)
    with refused("ledger.damaged"):
        cohort.reserve(make_run("c"))


@pytest.mark.parametrize("format_", [0, 2, True])
def test_a_file_of_another_format_is_refused(path: Path, format_: Any) -> None:
    (header,) = read_ledger(path)
    write_ledger(path, [header | {"format": format_}])
    with refused("ledger.damaged"):
        Cohort(path)


def test_a_file_that_is_missing_or_damaged_is_refused(path: Path, tmp_path: Path) -> None:
    with refused("cohort.path"):
        Cohort(tmp_path / "none")
    with refused("cohort.path"):
        create_cohort(path, {"released": 3.0}, DELTA)
    cohort = Cohort(path)
    cohort.reserve(make_run("a"))
    cohort.reserve(make_run("b"))
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged in (
        lines[0].replace(b"3.0", b"9.0") + lines[1] + lines[2],  # a larger limit
        lines[0] + lines[2],  # a run is gone
        lines[0] + lines[1].replace(b"20.0", b"90.0") + lines[2],
        b"{}\n",
        b"",
    ):
        path.write_bytes(damaged)
        with refused("ledger.damaged"):
            Cohort(path)


@pytest.mark.parametrize("limits", [{}, {"nobody": 1.0}, {"released": 0.0}, {"released": float("inf")}])
def test_limits_that_cannot_be_are_refused(limits: Any, tmp_path: Path) -> None:
    with refused("argument.value"):
        create_cohort(tmp_path / "cohort", limits, DELTA)
    assert not (tmp_path / "cohort").exists()
