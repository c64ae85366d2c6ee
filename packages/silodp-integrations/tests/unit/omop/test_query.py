"""Each rule of the query, on tables with a few fictional persons, by DuckDB and by PostgreSQL."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from typing import Any

import pytest

from silodp_integrations.omop.query import write_query
from support.omop_tables import PERSON, VISIT, Runner, ask, define, make_cdm, number_events
from support.refusals import refused

pytest.importorskip("duckdb", reason="pip install 'silodp[duckdb]'")

LAB = {"of": "measurement", "concepts": [5], "days": [-30, 0], "take": "last", "range": [0, 1000]}
MG, MMOL, KELVIN = 8840, 8753, 8523


@pytest.fixture(params=["duckdb_file", pytest.param("postgresql", marks=pytest.mark.slow)])
def database(request: pytest.FixtureRequest) -> Runner:
    found: Runner = request.getfixturevalue(request.param)
    return found


def take(database: Runner, path: Path, column: dict[str, Any], **settings: Any) -> list[Any]:
    """Return the cells of one column, by the days of the rows' visits or by their order."""
    rows = ask(database, define(path, columns={"x": column}, **settings))
    return [row["x"] for row in rows]


def test_a_row_is_a_visit_of_the_concepts_and_days(database: Runner, tmp_path: Path) -> None:
    visits = [
        {**VISIT, "visit_occurrence_id": key, "visit_concept_id": concept, "visit_start_date": day, "person_id": person}
        for key, (concept, day, person) in enumerate(
            [
                (9201, "2014-12-31", 1),
                (9201, "2015-01-01", 1),
                (262, "2015-12-31", 2),
                (9201, "2016-01-01", 2),
                (9202, "2015-05-05", 1),
                (0, "2015-05-05", 1),
                (None, "2015-05-05", 1),
            ]
        )
    ]  # fmt: skip
    make_cdm(
        database[0],
        person=[PERSON, {**PERSON, "person_id": 2, "person_source_value": "8"}],
        visit_occurrence=visits,
    )

    def count(**row: Any) -> list[str]:
        return [
            one["person"] for one in ask(database, define(tmp_path, row={"of": "visit", **row}, **with_age))
        ]

    with_age = {"columns": {"age": {"of": "age"}}}
    first, last = datetime.date(2015, 1, 1), datetime.date(2015, 12, 31)
    assert count(concepts=[9201, 262], since=first, until=last) == ["007", "8"]
    assert count(concepts=[9201, 262]) == ["007", "007", "8", "8"]
    assert count() == ["007"] * 5 + ["8"] * 2
    # The first of all, which lies before the days.
    assert count(concepts=[9201, 262], first=True) == ["007", "8"]
    assert count(concepts=[9201, 262], first=True, since=first) == ["8"]


def test_a_row_can_be_a_person_on_a_day(database: Runner, tmp_path: Path) -> None:
    make_cdm(
        database[0],
        person=[PERSON, {**PERSON, "person_id": 2, "person_source_value": "8", "year_of_birth": 1960}],
        measurement=number_events(
            "measurement", {"day": "2020-01-01"}, {"day": "2020-01-02"}, concept=5, value=3, unit=MG
        ),
    )
    row = {"of": "person", "on": datetime.date(2020, 1, 1)}
    columns = {"age": {"of": "age"}, "n": {**LAB, "take": "count"}}
    found = ask(database, define(tmp_path, row=row, columns=columns))
    assert [(one["person"], one["age"], one["n"]) for one in found] == [("007", 69, 1), ("8", 59, 0)]


def test_a_row_can_be_the_first_of_another_event(database: Runner, tmp_path: Path) -> None:
    rows = number_events("condition", {"day": "2012-01-01"}, {"day": "2011-01-01"}, {"day": "2010-01-01", "concept": 4},
                         **{"concept": 7})  # fmt: skip
    make_cdm(database[0], person=[PERSON], condition_occurrence=rows)
    row = {"of": "condition", "concepts": [7], "first": True}
    assert take(database, tmp_path, {"of": "age"}, row=row) == [60]
    what = {"of": "concept", "values": {"7": "gout"}}
    assert take(database, tmp_path, what, row={"of": "condition"}) == ["gout", "gout", "other"]


def test_persons_must_be_observed_around_the_first_day(database: Runner, tmp_path: Path) -> None:
    for begin, end, is_kept in (
        ("2015-06-08", "2015-06-15", True),
        ("2015-06-09", "2015-06-15", False),
        ("2015-06-08", "2015-06-14", False),
        ("2000-01-01", "2099-12-31", True),
    ):
        period = {
            "person_id": 1,
            "observation_period_start_date": begin,
            "observation_period_end_date": end,
        }
        make_cdm(database[0], person=[PERSON], visit_occurrence=[VISIT], observation_period=[period])
        row = {"of": "visit", "observed": [2, 5]}
        assert len(take(database, tmp_path, {"of": "age"}, row=row)) == is_kept


@pytest.mark.parametrize(
    ("how", "expected"),
    [("last", 4.0), ("first", 2.0), ("min", 2.0), ("max", 5.0), ("mean", 3.5), ("count", 5), ("any", 1)],
)
def test_what_becomes_of_the_values_of_a_window(
    how: str, expected: float, database: Runner, tmp_path: Path
) -> None:
    # The borders belong to the window; of one day the latest time counts, of one time the highest key.
    rows = number_events(
        "measurement",
        {"day": "2015-05-11", "value": 2},
        {"day": "2015-06-10", "value": 3, "key": 40, "time": "2015-06-10 09:00"},
        {"day": "2015-06-10", "value": 5, "key": 31, "time": "2015-06-10 10:00"},
        {"day": "2015-06-10", "value": 4, "key": 32, "time": "2015-06-10 10:00"},
        {"day": "2015-06-10", "value": None, "key": 33, "time": "2015-06-10 11:00"},
        {"day": "2015-05-10", "value": 0},
        {"day": "2015-06-11", "value": 9},
        {"day": "2015-06-01", "value": 99, "concept": 6},
        {"day": "2015-06-01", "value": 99, "concept": 0},
        {"day": "2015-06-01", "value": 99, "person": 2},
        concept=5,
        unit=MG,
    )
    make_cdm(database[0], person=[PERSON], visit_occurrence=[VISIT], measurement=rows)
    column = {**LAB, "take": how}
    column |= {} if how in ("count", "any") else {"units": {str(MG): 1}}
    assert take(database, tmp_path, column) == [expected]
    nothing = 0 if how in ("count", "any") else None
    assert take(database, tmp_path, {**column, "concepts": [8]}) == [nothing]
    needed = take(database, tmp_path, {**column, "concepts": [8], "needed": True})
    assert needed == ([] if nothing is None else [0])


def test_windows_may_begin_at_the_end(database: Runner, tmp_path: Path) -> None:
    again = [{**VISIT, "visit_occurrence_id": 11, "visit_start_date": day, "visit_end_date": day} for day in (
        "2015-07-20",)]  # fmt: skip
    make_cdm(database[0], person=[PERSON], visit_occurrence=[VISIT, *again])
    for days, expected in (([1, 30], [0, 1]), ([1, 29], [0, 0]), ([31, 40], [0, 0]), ([-10, 0], [1, 1])):
        column = {
            "of": "visit",
            "concepts": [9201],
            "days": days,
            "take": "any",
            "anchor": "end",
            "range": [0, 1],
        }
        assert sorted(take(database, tmp_path, column)) == expected


@pytest.mark.parametrize("end", ["2099-12-31", "9999-12-31", "2099-01-01", None])
def test_an_open_end_is_no_length_of_stay(end: str | None, database: Runner, tmp_path: Path) -> None:
    make_cdm(database[0], person=[PERSON], visit_occurrence=[{**VISIT, "visit_end_date": end}])
    length = {"of": "length", "range": [0, 400]}
    assert take(database, tmp_path, length) == [None]
    assert take(database, tmp_path, {**length, "needed": True}) == []
    again = {"of": "visit", "days": [1, 30], "take": "any", "anchor": "end"}
    assert take(database, tmp_path, again) == [None]
    assert take(database, tmp_path, {**again, "take": "count", "range": [0, 9]}) == [None]
    make_cdm(database[0], person=[PERSON], visit_occurrence=[{**VISIT, "visit_end_date": "2098-12-31"}])
    assert take(database, tmp_path, {**length, "range": [0, 99999]}) == [30520]


@pytest.mark.parametrize(
    ("begin", "end", "is_ongoing"),
    [
        ("2014-01-01", "2099-12-31", 1),
        ("2014-01-01", None, 1),
        ("2014-01-01", "2015-06-08", 1),
        ("2014-01-01", "2015-06-07", 0),
        ("2015-06-10", "2015-06-30", 1),
        ("2015-06-11", "2099-12-31", 0),
    ],
)
def test_drugs_may_go_on_in_the_window(
    begin: str, end: str | None, is_ongoing: int, database: Runner, tmp_path: Path
) -> None:
    drug = number_events("drug", {"day": begin, "end": end, "concept": 5})
    make_cdm(database[0], person=[PERSON], visit_occurrence=[VISIT], drug_exposure=drug)
    column = {"of": "drug", "concepts": [5], "days": [-2, 0], "take": "any"}
    assert take(database, tmp_path, {**column, "ongoing": True}) == [is_ongoing]
    assert take(database, tmp_path, column) == [int("2015-06-08" <= begin <= "2015-06-10")]


def test_units_are_converted_and_others_stop_the_query(database: Runner, tmp_path: Path) -> None:
    rows = number_events(
        "measurement",
        {"day": "2015-06-01", "value": 90, "unit": MG},
        {"day": "2015-06-02", "value": "5.1", "unit": MMOL},
        {"day": "2015-06-03", "value": "300.5", "unit": KELVIN},
        {"day": "2015-06-04", "value": 7, "unit": 0},
        {"day": "2015-06-05", "value": 8, "unit": None},
        {"day": "2015-05-01", "value": 8, "unit": 777},
        {"day": "2015-06-05", "value": 8, "unit": 777, "concept": 6},
        {"day": "2015-06-05", "value": None, "unit": 777},
        concept=5,
    )
    units: dict[str, Any] = {str(MG): 1.0, str(MMOL): 18.016, str(KELVIN): [1, -273.15], "0": 1}

    def ask_for(rows: list[dict[str, Any]], how: str, *known: str) -> list[Any]:
        make_cdm(database[0], person=[PERSON], visit_occurrence=[VISIT], measurement=rows)
        return take(database, tmp_path, {**LAB, "take": how, "units": {unit: units[unit] for unit in known}})

    expected = [90.0, 5.1 * 18.016, 300.5 - 273.15, 7.0, 8.0]
    assert ask_for(rows, "min", *units) == [7.0]
    assert ask_for(rows, "max", *units) == [5.1 * 18.016]
    assert ask_for(rows, "first", *units) == [90.0]
    for number, value in enumerate(expected):
        assert ask_for(rows[number : number + 1], "last", *units) == [value]
    total = 0.0
    for value in sorted(expected):
        total += value
    assert ask_for(rows, "mean", *units) == [total / 5]
    for number, told in ((1, MMOL), (3, 0), (4, 0)):
        with refused("data.query") as caught:
            ask_for(rows[number : number + 1], "last", str(MG))
        assert f"x: unit_concept_id {told} is not declared" in str(caught.value)
    # Also where the value would not be taken.
    for how in ("last", "first", "min", "max", "mean"):
        for left_out, told in ((str(MMOL), f"unit_concept_id {MMOL} "), ("0", "unit_concept_id 0 ")):
            with refused("data.query") as caught:
                ask_for(rows, how, *(unit for unit in units if unit != left_out))
            assert f"x: {told}" in str(caught.value)


def test_limits_of_detection_are_refused_or_declared(database: Runner, tmp_path: Path) -> None:
    def ask_for(operator: int | None, **column: Any) -> list[Any]:
        row = {"day": "2015-06-01", "value": 4, "unit": MMOL, "operator": operator, "concept": 5}
        rows = number_events("measurement", row)
        make_cdm(database[0], person=[PERSON], visit_occurrence=[VISIT], measurement=rows)
        return take(database, tmp_path, {**LAB, "units": {str(MMOL): [2.0, 1.0]}, **column})

    for equal in (4172703, 0, None):
        assert ask_for(equal) == [9.0]
        assert ask_for(equal, operators={"<": 0.5}) == [9.0]
    for sign, operator in (("<", 4171756), ("<=", 4171754), (">", 4172704), (">=", 4171755)):
        with refused("data.query") as caught:
            ask_for(operator)
        assert f"x: operator_concept_id {operator} " in str(caught.value)
        assert ask_for(operator, operators={sign: 0.5}) == [4.5]
        with refused("data.query"):
            ask_for(operator, operators={"<" if sign == ">" else ">": 0.5})


def test_answers_become_categories_and_zero_is_other(database: Runner, tmp_path: Path) -> None:
    column = {
        "of": "observation",
        "concepts": [5],
        "days": [-30, 0],
        "take": "last",
        "values": {"45": "it's", "46": "no"},
    }
    for answers, expected in (
        ([45], "it's"),
        ([45, 46], "no"),
        ([46, 0], "other"),
        ([46, 47], "other"),
        ([46, None], "no"),
        ([None], None),
        ([], None),
    ):
        rows = number_events(
            "observation", *({"answer": answer, "day": "2015-06-10", "concept": 5} for answer in answers)
        )
        make_cdm(database[0], person=[PERSON], visit_occurrence=[VISIT], observation=rows)
        assert take(database, tmp_path, column) == [expected]
        count = {**column, "take": "count", "range": [0, 9]}
        assert take(database, tmp_path, count) == [sum(answer in (45, 46) for answer in answers)]


def test_descendants_count_and_a_missing_vocabulary_stops_the_query(database: Runner, tmp_path: Path) -> None:
    rows = number_events(
        "condition", *({"concept": concept} for concept in (5, 50, 500, 6, 0)), day="2015-06-01"
    )
    pairs = [(5, 50), (5, 500), (50, 500), (7, 7), (0, 0), (9, 0)]
    ancestors = [{"ancestor_concept_id": a, "descendant_concept_id": d} for a, d in pairs]
    make_cdm(
        database[0],
        person=[PERSON],
        visit_occurrence=[VISIT],
        condition_occurrence=rows,
        concept_ancestor=ancestors,
    )
    column = {"of": "condition", "days": [-30, 0], "take": "count", "range": [0, 9]}
    for concepts, descendants, expected in (
        ([5], False, 1),
        ([5], True, 3),
        ([50], True, 2),
        ([7], True, 0),
        ([5, 50, 7], True, 3),
    ):
        asked = {**column, "concepts": concepts, "descendants": descendants}
        assert take(database, tmp_path, asked) == [expected]
    for concepts in ([6], [5, 6]):
        with refused("data.query") as caught:
            take(database, tmp_path, {**column, "concepts": concepts, "descendants": True})
        assert f"concept_ancestor has {len(concepts) - 1} of {len(concepts)} concepts" in str(caught.value)
    row = {"of": "condition", "concepts": [5], "descendants": True}
    assert len(take(database, tmp_path, {"of": "age"}, row=row)) == 3


@pytest.mark.parametrize(
    ("month", "day", "on", "age"),
    [
        (6, 10, "2015-06-09", 64),
        (6, 10, "2015-06-10", 65),
        (2, 29, "2015-02-28", 64),
        (2, 29, "2015-03-01", 65),
        (12, 31, "2015-12-30", 64),
        # Without a day the 15th, without a month 1 July.
        (6, None, "2015-06-14", 64),
        (6, None, "2015-06-15", 65),
        (None, None, "2015-06-30", 64),
        (None, None, "2015-07-01", 65),
        (None, 20, "2015-07-01", 65),
    ],
)
def test_ages_are_completed_years(
    month: int | None, day: int | None, on: str, age: int, database: Runner, tmp_path: Path
) -> None:
    make_cdm(
        database[0],
        person=[{**PERSON, "month_of_birth": month, "day_of_birth": day}],
        visit_occurrence=[{**VISIT, "visit_start_date": on}],
    )
    assert take(database, tmp_path, {"of": "age"}) == [age]


@pytest.mark.parametrize(
    ("concept", "expected"), [(8507, "male"), (8532, "female"), (0, "other"), (8551, "other")]
)
def test_genders_and_other_traits(concept: int, expected: str, database: Runner, tmp_path: Path) -> None:
    person = {**PERSON, "gender_concept_id": concept, "race_concept_id": 8527}
    make_cdm(database[0], person=[person], visit_occurrence=[VISIT])
    assert take(database, tmp_path, {"of": "gender"}) == [expected]
    assert take(database, tmp_path, {"of": "race", "values": {"8527": "white"}}) == ["white"]
    assert take(database, tmp_path, {"of": "ethnicity", "values": {"8527": "white"}}) == ["other"]


def test_persons_are_named_by_their_source_value_or_a_linked_pseudonym(
    database: Runner, tmp_path: Path
) -> None:
    make_cdm(database[0], person=[PERSON], visit_occurrence=[VISIT])
    columns = {"age": {"of": "age"}}
    assert [row["person"] for row in ask(database, define(tmp_path, columns=columns))] == ["007"]
    silo = {"north": {"person": {"table": "links", "column": "pseudonym", "key": "patient"}}}
    definition = define(tmp_path, columns=columns, silos=silo)
    fill = "INSERT INTO links VALUES (1, '00a'), (2, '00b')"
    run = database[0]

    def link(*statements: str) -> list[Any]:
        make_cdm(
            lambda *made: run(*made, "DROP TABLE IF EXISTS links",
                              "CREATE TABLE links (patient BIGINT, pseudonym VARCHAR(9))", *statements),
            person=[PERSON], visit_occurrence=[VISIT],
        )  # fmt: skip
        return [row["person"] for row in ask(database, definition)]

    assert link(fill) == ["00a"]
    assert link(fill, fill) == ["00a"]
    assert link() == [None]
    with refused("data.query"):
        link(fill, "INSERT INTO links VALUES (1, '00c')")


def test_a_key_given_twice_does_not_lead_to_events_of_another_person(
    database: Runner, tmp_path: Path
) -> None:
    other = {**PERSON, "person_id": 2, "person_source_value": "8"}
    rows = number_events(
        "measurement", {"day": "2015-06-01", "value": 3, "concept": 5, "unit": MG, "person": 2}
    )
    make_cdm(
        database[0],
        person=[PERSON, other],
        visit_occurrence=[VISIT, {**VISIT, "person_id": 2}],
        measurement=rows,
    )
    found = ask(database, define(tmp_path, columns={"x": {**LAB, "units": {str(MG): 1}}}))
    assert [(row["person"], row["x"]) for row in found] == [("007", None), ("8", 3.0)]


def test_a_visit_of_nobody_has_no_person(database: Runner, tmp_path: Path) -> None:
    make_cdm(database[0], visit_occurrence=[VISIT])
    assert [row["person"] for row in ask(database, define(tmp_path, columns={"age": {"of": "age"}}))] == [
        None
    ]


def test_a_mean_does_not_depend_on_the_order_of_rows(database: Runner, tmp_path: Path) -> None:
    coins = random.Random(5)
    values = [coins.uniform(-1, 1) * 10.0 ** coins.randint(-6, 12) for _ in range(60)]
    seen = set()
    for _ in range(5):
        coins.shuffle(values)
        rows = number_events(
            "measurement", *({"value": f"{v:.9f}"} for v in values), day="2015-06-01", concept=5, unit=MG
        )
        make_cdm(database[0], person=[PERSON], visit_occurrence=[VISIT], measurement=rows)
        seen |= set(take(database, tmp_path, {**LAB, "take": "mean", "units": {str(MG): 1}}))
    assert len(seen) == 1


NASTY = [
    "'; DROP TABLE person; --",
    '"; DROP TABLE person; --',
    "*/ DROP TABLE person /*",
    "it's",
    'a "quoted" one',
    "$1 %s ? :x {y}",
    "SELECT",
    "Größe µ",
    "'''",
    '"""',
]


@pytest.mark.parametrize("text", NASTY)
def test_names_and_categories_cannot_leave_their_quotes(text: str, database: Runner, tmp_path: Path) -> None:
    rows = number_events("observation", {"answer": 45, "day": "2015-06-10", "concept": 5})
    lab = number_events("measurement", {"day": "2015-06-01", "value": 3, "concept": 5, "unit": 777})
    make_cdm(database[0], person=[PERSON], visit_occurrence=[VISIT], observation=rows, measurement=lab)
    column = {"of": "observation", "concepts": [5], "days": [0, 0], "take": "last", "values": {"45": text}}
    found = ask(database, define(tmp_path, columns={text: column}))
    assert [row[text] for row in found] == [text]
    with refused("data.query") as caught:
        ask(database, define(tmp_path, columns={text: {**LAB, "units": {str(MG): 1}}}))
    assert f"{text}: unit_concept_id 777 " in str(caught.value)


def test_a_query_does_not_depend_on_the_order_of_a_run(tmp_path: Path) -> None:
    columns = {f"x{n}": {**LAB, "units": {str(MG): 1, "0": 2}, "operators": {"<": 0.5}} for n in range(5)}
    first, second = (write_query(define(tmp_path, columns=columns), "north") for _ in range(2))
    assert first == second
    assert first.index('AS "x0"') < first.index('AS "x4"')
