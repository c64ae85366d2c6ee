"""How often the intervals of a Table One hold, which cells are lost in the noise, and how they are written."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from silodp_analytics.statistics.report.estimates import NoisyTable
from silodp_analytics.statistics.table_one.table import LOST, Cell, TableOne, find_table

SEEDS = 400
FEWEST, MOST = 365, 395
"""Of 400 intervals that hold with a probability of 95 % each, fewer or more hold with a probability of .05 % each."""
GROUPS = ("A", "B")
STD = 12.0


@cache
def draw_population(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    group = rng.random(1500) < 0.4
    age = np.clip(rng.normal(60 + 4 * group, 14), 20, 100)
    smoker = np.where(rng.random(1500) < 0.1, 3, np.searchsorted([0.5, 0.75], rng.random(1500)))
    rare = (rng.random(1500) < 0.004).astype(int)
    return {"group": group.astype(int), "age": age, "smoker": smoker, "rare": rare}


def make_table(population: dict[str, np.ndarray], std: float, seed: int = 0) -> TableOne:
    """The table of made-up persons, each with one record, with noise."""
    rng, group = np.random.default_rng(seed), population["group"]

    def part(kind: str, column: str, cells: np.ndarray, scale: float = 1.0, **facts: Any) -> NoisyTable:
        noisy = cells + scale * std * rng.standard_normal(cells.shape)
        by = {"groups": GROUPS, "by": "arm"}
        return NoisyTable(kind, column, tuple(noisy.ravel()), scale * std, **by, **facts)

    scaled = (population["age"] - 60) / 40
    sums = np.stack([scaled, scaled**2 - 0.5, np.ones(len(scaled))], axis=1)
    edges = np.linspace(20, 100, 17)
    return TableOne(
        [
            part("table-one-persons", "persons", np.bincount(group, minlength=2)),
            part(
                "table-one-mean", "age",
                np.stack([sums[group == g].sum(0) for g in (0, 1)]),
                1.5, edges=(20.0, 100.0),
            ),
            part(
                "table-one-quartiles", "age",
                np.stack([np.histogram(population["age"][group == g], edges)[0] for g in (0, 1)]),
                edges=tuple(edges),
            ),
            part(
                "table-one-shares", "smoker",
                np.stack([np.bincount(population["smoker"][group == g], minlength=4) for g in (0, 1)]),
                names=("never", "now", "once"), has_missing=True, missing="unknown",
            ),
            part(
                "table-one-shares", "rare",
                np.stack([np.bincount(population["rare"][group == g], minlength=2) for g in (0, 1)]),
                names=("no", "yes"),
            ),
        ]
    )  # fmt: skip


def iterate_estimates(table: TableOne) -> Iterator[tuple[tuple[str, str, str, str], Cell]]:
    for row in table.rows:
        for head, cell in zip(
            [*table.heads, *table.difference_heads], [*row.cells, *row.differences], strict=False
        ):
            for name in cell.found:
                yield (row.column, row.label, head, name), cell


def test_intervals_of_the_noise_hold_what_the_table_shows_without_noise() -> None:
    population = draw_population()
    exact = {key: cell.found[key[3]].value for key, cell in iterate_estimates(make_table(population, 0.0))}
    inside, shown = Counter[Any](), Counter[Any]()
    for seed in range(SEEDS):
        for key, cell in iterate_estimates(make_table(population, STD, seed)):
            one = cell.found[key[3]]
            shown[key] += 1
            # A cell that is lost says only what it is below.
            inside[key] += one.low <= exact[key] <= one.high or (cell.is_lost and exact[key] <= one.high)
    for key in exact:
        is_drowned = key[0] == "rare" and key[3] == "difference"
        assert shown[key] == (0 if is_drowned else SEEDS), key
        assert is_drowned or inside[key] >= FEWEST, key
        # Wider than 95 % are those that end at edges of bins, or at 0 of a rare category.
        assert "quartile" in key[1] or key[0] == "rare" or inside[key] <= MOST, key


def test_intervals_with_the_sample_hold_the_population() -> None:
    everybody = draw_population()
    rng, inside, shown = np.random.default_rng(5), Counter[Any](), Counter[Any]()
    age = {g: everybody["age"][everybody["group"] == g] for g in (0, 1)}
    spread = np.sqrt((age[0].var() + age[1].var()) / 2)
    difference = (age[1].mean() - age[0].mean()) / spread
    for seed in range(SEEDS):
        # Persons of a population in which everyone of `everybody` is equally frequent, groups of fixed size.
        chosen = np.concatenate([rng.choice(np.flatnonzero(everybody["group"] == g), 700) for g in (0, 1)])
        table = make_table({name: one[chosen] for name, one in everybody.items()}, STD, seed)
        for (column, label, head, name), cell in iterate_estimates(table):
            if (column, name) == ("age", "mean") and head in GROUPS:
                value = age[GROUPS.index(head)].mean()
            elif (column, name) == ("age", "difference"):
                value = difference
            elif (label, name) == ("never", "share") and head in GROUPS:
                own = everybody["smoker"][everybody["group"] == GROUPS.index(head)]
                value = float((own == 0).sum() / (own < 3).sum())
            else:
                continue
            shown[column, head] += 1
            inside[column, head] += cell.with_sample[name].low <= value <= cell.with_sample[name].high
    assert len(shown) == 5
    for key, number in shown.items():
        assert number == SEEDS
        assert inside[key] >= FEWEST, key


def test_what_is_lost_in_the_noise_is_told_apart_from_zero() -> None:
    nobody = {**draw_population(), "rare": np.zeros(1500, int)}
    exact, noisy = make_table(nobody, 0.0), make_table(nobody, STD)
    for table, is_lost in ((exact, False), (noisy, True)):
        (row,) = (one for one in table.rows if (one.column, one.label) == ("rare", "yes"))
        assert [cell.is_lost for cell in row.cells] == [is_lost] * 3
        found = row.cells[0].to_json()
        if is_lost:
            assert row.cells[0].text.startswith(LOST)
            assert set(found) == {"lost", "count_below", "share_below"}
            assert found["count_below"] > 0
            assert row.differences[0].is_lost
        else:
            assert row.cells[0].text == "0 (0.0 %)"
            assert found["count"] == {"value": 0.0, "low": 0.0, "high": 0.0}
            assert not row.differences[0].found  # everybody has the same value, which is no difference of 0
    lines = list(csv.DictReader(noisy.to_csv().splitlines()))
    lost = [one for one in lines if (one["column"], one["label"], one["lost"]) == ("rare", "yes", "true")]
    assert {(one["group"], one["estimate"], one["value"]) for one in lost} >= {
        ("A", "count", ""), ("A", "share", ""), ("B − A", "", "")
    }  # fmt: skip


def test_a_table_that_noise_drowns_shows_no_number() -> None:
    table = make_table(draw_population(), 3000.0)
    assert all(cell.is_lost for row in table.rows for cell in (*row.cells, *row.differences))
    assert LOST in "\n".join(table.format())


def test_a_difference_is_lost_where_the_variance_may_be_zero() -> None:
    """All have almost the same age, so noise alone decides by what the difference is divided."""
    same = {**draw_population(), "age": 60 + 0.1 * draw_population()["group"]}
    (row,) = (one for one in make_table(same, STD).rows if one.label == "mean (sd)")
    assert not any(cell.is_lost for cell in row.cells)
    assert row.differences[0].is_lost


def test_a_missing_value_is_no_category_and_has_no_difference() -> None:
    rows = [one for one in make_table(draw_population(), STD).rows if one.column == "smoker"]
    assert [one.is_category for one in rows] == [True, True, True, False]
    assert [len(one.differences) for one in rows] == [1, 1, 1, 0]
    shares = [one.cells[1].found["share"].value for one in rows]
    assert sum(shares[:3]) == pytest.approx(1)


def test_no_table_is_read_from_other_statistics() -> None:
    assert find_table([NoisyTable("mean", "age", (1.0, 1.0, 9.0), 1.0, (0.0, 1.0))]) is None
