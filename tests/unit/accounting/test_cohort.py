"""The file of a cohort: what it admits, what it has after any order of lines, and which files and runs it refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.cohort import Cohort, CohortRun, create_cohort
from silodp.accounting.events import Event, Gaussian, NonPrivate, PoissonSampled, WorstOf
from support.refusals import refused

DELTA = 1e-5
EASY, HARD = Gaussian(20.0), Gaussian(4.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_cohort(tmp_path / "cohort", {"released": 3.0}, DELTA)
    return tmp_path / "cohort"


def make_run(name: str, event: Event = EASY, rounds: int = 10, **more: Any) -> CohortRun:
    return CohortRun(name, "run", "user", {"released": {event: rounds}}, **more)


def test_reservations_count_until_they_are_settled(path: Path) -> None:
    with Cohort(path) as cohort:
        cohort.reserve(make_run("a", HARD, 4))
        with refused("cohort.budget"):
            cohort.reserve(make_run("b", HARD, 6))
        assert list(cohort.runs) == ["a"]
        cohort.settle("a", {"released": {HARD: 1}})  # it stopped early
        cohort.reserve(make_run("b", HARD, 3))
    with Cohort(path) as again:
        assert [run.is_settled for run in again.runs.values()] == [True, False]
        assert again.epsilon("released") == pytest.approx(compute_epsilon([(HARD, 4)], DELTA))


def test_what_is_admitted_does_not_depend_on_the_order_of_runs(tmp_path: Path) -> None:
    runs = [make_run("a", EASY, 5), make_run("b", HARD, 1), make_run("c", PoissonSampled(0.1, HARD), 20)]
    found = set()
    for number, order in enumerate(permutations(runs[1:])):
        file = tmp_path / str(number)
        create_cohort(file, {"released": 3.0}, DELTA)
        with Cohort(file) as cohort:
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
    with Cohort(path) as cohort:
        for _ in range(3):
            cohort.reserve(make_run("a", HARD, 3))
        assert cohort.epsilon("released") == pytest.approx(compute_epsilon([(HARD, 3)], DELTA))


def test_no_run_has_more_than_it_reserved(path: Path) -> None:
    with Cohort(path) as cohort:
        cohort.reserve(make_run("a", EASY, 2))
        with refused("cohort.settle"):
            cohort.settle("a", {"released": {EASY: 3}})
        with refused("cohort.settle"):
            cohort.settle("b", {"released": {EASY: 1}})


def test_runs_that_were_done_before_are_added_once_and_end_the_cohort_beyond_its_limit(path: Path) -> None:
    with Cohort(path) as cohort:
        cohort.add(make_run("a", EASY, 2))
        with refused("cohort.settle"):
            cohort.add(make_run("a", EASY, 2))
        with refused("cohort.budget"):
            cohort.add(make_run("b", HARD, 50))
        assert cohort.exceeded is None
        cohort.add(make_run("b", HARD, 50), over_limit=True)
        assert cohort.exceeded == "released"
        with refused("cohort.budget"):
            cohort.reserve(make_run("c", EASY, 1))


def test_after_a_run_whose_ledger_is_not_known_none_is_admitted(path: Path) -> None:
    with Cohort(path) as cohort:
        cohort.note_unknown("a run of 2020", 2.0)
        with refused("cohort.unknown"):
            cohort.reserve(make_run("a"))
    with Cohort(path) as again:
        assert again.unknown == [("a run of 2020", 2.0)]


def test_what_cannot_be_added_up_is_refused(path: Path) -> None:
    column = {"column": "patient"}
    with Cohort(path) as cohort:
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
    with Cohort(tmp_path / "cohort") as cohort:
        cohort.reserve(make_run("a", EASY, 5))
        with refused("cohort.rule"):
            cohort.reserve(make_run("b", PoissonSampled(0.1, HARD), 5))


def test_a_file_that_is_missing_damaged_or_in_use_is_refused(path: Path, tmp_path: Path) -> None:
    with refused("cohort.path"):
        Cohort(tmp_path / "none")
    with refused("cohort.path"):
        create_cohort(path, {"released": 3.0}, DELTA)
    with Cohort(path) as cohort:
        cohort.reserve(make_run("a"))
        cohort.reserve(make_run("b"))
        with refused("run.in_use", "ledger.in_use"):
            Cohort(path)
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
