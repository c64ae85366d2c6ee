"""Table One against plain numpy on the pooled records, how far one person moves its sums, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silodp.config.resolve import ResolvedRun, load_config
from silodp.methods.roles import FederationSize
from silodp.runtime.train import train
from silodp_analytics.statistics.config import derive_statistics
from silodp_analytics.statistics.report.page import find_release
from silodp_analytics.statistics.table_one.table import OVERALL, TableOne
from support.refusals import refused
from support.sums import exact_sum, list_streams

SILOS = ("north", "south", "west")
TABLE = (
    '{ by = "arm", columns = ["age", "score", "smoker", "ward", "ill"], quartiles = { age = 64, score = 8 } }'
)
# Ages of 0 to 64 are exact in float32, as a silo's features are, so the oracle is met to the last digits.
CONFIG = """
name = "trial"
rounds = 5
seed = 1
[data]
source = "tables"
files = { north = "north.csv", south = "south.csv", west = "west.csv" }
[data.schema]
user = "patient"
users = "patients.txt"
label = "ill"
classes = ["no", "yes"]
numeric = { age = [0, 64], score = { range = [0, 64], typical = [16, 8], missing = "indicator" } }
[data.schema.categorical]
arm = { categories = ["A", "B", "?"], missing = "?" }
smoker = { categories = ["unknown", "never", "now", "once"], missing = "unknown", codes = true }
ward = [1, 2]
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.01
[statistics]
noise_multiplier = 0.0
"""


def draw_trial(persons: int, seed: int = 0, silos: int = 3, records: int = 6) -> pd.DataFrame:
    """One row per record; arms and categories change from record to record."""
    rng = np.random.default_rng(seed)
    rows = []
    for person in range(persons):
        for silo in rng.choice(3, rng.integers(1, silos + 1), replace=False):
            for _ in range(rng.integers(1, records + 1)):
                rows.append(
                    {
                        "silo": SILOS[silo],
                        "patient": f"p{person}",
                        "age": rng.integers(0, 65),
                        "score": rng.integers(0, 65) if rng.random() < 0.8 else np.nan,
                        "arm": rng.choice(["A", "B", ""], p=[0.5, 0.4, 0.1]),
                        "smoker": rng.choice(["never", "now", "once", "", "unknown"]),
                        "ward": rng.integers(1, 3),
                        "ill": rng.choice(["no", "yes"], p=[0.7, 0.3]),
                    }
                )
    return pd.DataFrame(rows)


def derive(
    folder: Path, frame: pd.DataFrame, table: str = TABLE, aggregator: str = "plain", **more: str
) -> ResolvedRun:
    for silo in SILOS:
        frame[frame.silo == silo].drop(columns="silo").to_csv(folder / f"{silo}.csv", index=False)
    (folder / "patients.txt").write_text("".join(f"p{n}\n" for n in range(2 * frame.patient.nunique())))
    path = folder / "trial.toml"
    settings = "".join(f"{name} = {value}\n" for name, value in more.items())
    path.write_text(
        f"{CONFIG}{settings}table_one = {table}\n".replace(
            "seed = 1", f'seed = 1\naggregator = "{aggregator}"'
        )
    )
    return derive_statistics(load_config(path))


def count(resolved: ResolvedRun) -> dict[str, Any]:
    federation = resolved.load_federation()
    result = train(federation, resolved.build_task(federation), resolved.method, **resolved.settings())
    found: dict[str, Any] = result.metrics[-1]["statistics"]
    return found


def read(found: dict[str, Any]) -> TableOne:
    release = find_release([{"statistics": found}])
    assert release is not None
    assert release.table_one is not None
    return release.table_one


def cells_of(table: TableOne, column: str, label: str) -> dict[str, Any]:
    (row,) = (one for one in table.rows if one.column == column and one.label.startswith(label))
    names = [*table.heads, *table.difference_heads]
    return dict(zip(names, [*row.cells, *row.differences], strict=False))


def weigh(frame: pd.DataFrame, weighting: str) -> pd.DataFrame:
    """Every person has a weight of 1 in a silo, divided among their records there, and among silos by the rule."""
    records = frame.groupby(["patient", "silo"]).age.transform("size")
    weight = 1 / records
    if weighting == "present":
        weight = weight / frame.groupby("patient").silo.transform("nunique")
    elif weighting == "primary_silo":
        size = frame.groupby(["patient", "silo"]).size().unstack(fill_value=0)[list(SILOS)]
        weight = weight * (frame.silo == frame.patient.map(size.idxmax(axis=1)))
    return frame.assign(weight=weight)


def describe(frame: pd.DataFrame, column: str) -> tuple[float, float]:
    known = frame[frame[column].notna()]
    mean = np.average(known[column], weights=known.weight)
    return mean, np.sqrt(np.average((known[column] - mean) ** 2, weights=known.weight))


@pytest.mark.parametrize("weighting", ["uniform", "present", "primary_silo"])
def test_without_noise_every_cell_is_that_of_the_pooled_records(weighting: str, tmp_path: Path) -> None:
    drawn = draw_trial(60)
    table = read(count(derive(tmp_path, drawn, weighting=f'"{weighting}"')))
    frame = weigh(drawn, weighting)
    known = frame[frame.arm != ""]
    parts = {OVERALL: known, "A": known[known.arm == "A"], "B": known[known.arm == "B"]}
    assert table.heads == list(parts)
    assert table.unknown is not None
    assert table.unknown.found["count"].value == pytest.approx(frame[frame.arm == ""].weight.sum(), rel=1e-9)
    moments: dict[str, list[tuple[float, float]]] = {}
    for name, part in parts.items():
        assert cells_of(table, "", "persons")[name].found["count"].value == pytest.approx(
            part.weight.sum(), rel=1e-9
        )
        for column in ("age", "score"):
            found, expected = cells_of(table, column, "mean")[name].found, describe(part, column)
            assert (found["mean"].value, found["std"].value) == pytest.approx(expected, rel=1e-9)
            moments.setdefault(column, []).append(expected)
        missing = cells_of(table, "score", "missing")[name].found
        without = part[part.score.isna()].weight.sum()
        assert missing["count"].value == pytest.approx(without, rel=1e-9)
        assert missing["share"].value == pytest.approx(without / part.weight.sum(), rel=1e-9)
        # Missing cells, and those that say so, are no category.
        answered = part[~part.smoker.isin(["", "unknown"])]
        for category in ("never", "now", "once"):
            found = cells_of(table, "smoker", category)[name].found
            number = answered[answered.smoker == category].weight.sum()
            share = number / answered.weight.sum()
            assert (found["count"].value, found["share"].value) == pytest.approx((number, share), rel=1e-9)
            moments.setdefault(category, []).append((share, np.sqrt(share * (1 - share))))
        found = cells_of(table, "smoker", "missing")[name].found
        assert found["share"].value == pytest.approx(1 - answered.weight.sum() / part.weight.sum(), rel=1e-9)
        for column, category in (("ward", 2), ("ill", "yes")):
            found = cells_of(table, column, str(category))[name].found
            expected = part[part[column] == category].weight.sum() / part.weight.sum()
            assert found["share"].value == pytest.approx(expected, rel=1e-9)
        # Bins of one year: a quartile is that of the values, to the grid.
        by_age = part.sort_values("age")
        reached = by_age.weight.cumsum() / by_age.weight.sum()
        found = cells_of(table, "age", "median")[name].found
        for place, share in (("lower_quartile", 0.25), ("median", 0.5), ("upper_quartile", 0.75)):
            exact = by_age.age[reached >= share].iloc[0]
            assert found[place].value == pytest.approx(exact, abs=1 + 1e-9)
    for name, ((_, (a, sd_a), (b, sd_b))) in moments.items():
        column, label = (name, "mean") if name in ("age", "score") else ("smoker", name)
        found = cells_of(table, column, label)["B − A"].found["difference"]
        expected = (b - a) / np.sqrt((sd_a**2 + sd_b**2) / 2)
        assert found.value == pytest.approx(expected, rel=1e-9)
        assert (found.low, found.high) == (found.value, found.value)


def test_a_standardized_difference_of_a_category_is_that_of_yang_and_dalton_with_its_sign(
    tmp_path: Path,
) -> None:
    """tableone 0.9.6 gives .307 without a sign for a category whose share is smaller in the second group."""
    drawn = draw_trial(80, silos=1, records=1)
    found = cells_of(read(count(derive(tmp_path, drawn))), "ward", "2")["B − A"].found["difference"].value
    a, b = ((drawn[drawn.arm == arm].ward == 2).to_numpy(float) for arm in "AB")
    differences = np.array([b.mean() - a.mean()])
    covariance = np.array([[(a.var() + b.var()) / 2]])
    distance = np.sqrt(differences @ np.linalg.inv(covariance) @ differences)
    assert abs(found) == pytest.approx(distance, rel=1e-9)
    assert np.sign(found) == np.sign(differences[0])


@pytest.mark.parametrize("weighting", ["uniform", "present", "primary_silo"])
@pytest.mark.parametrize("seed", range(3))
def test_a_person_moves_the_scaled_vector_by_at_most_1(weighting: str, seed: int, tmp_path: Path) -> None:
    others = {"histogram": "{ age = 4 }", "records": "2", "weights": "{ score = 3.0 }"} if seed else {}
    persons = 20
    resolved = derive(tmp_path, draw_trial(persons, seed), weighting=f'"{weighting}"', **others)
    federation, method = resolved.load_federation(), resolved.method
    task, bound = resolved.build_task(federation), method.bounds(FederationSize(3, 40)).sensitivity
    whole = exact_sum(method, federation, task)
    moves = [
        np.linalg.norm(whole - exact_sum(method, federation, task, u)) / bound
        for u in range(federation.users)
    ]
    assert max(moves) <= 1 + 1e-9
    assert max(moves) > 0.4  # the bound is not idle


@given(
    seed=st.integers(0, 1000),
    records=st.integers(1, 12),
    weighting=st.sampled_from(["uniform", "present", "primary_silo"]),
)
@settings(max_examples=15, deadline=None)
def test_no_row_of_a_table_is_clipped(
    seed: int, records: int, weighting: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever records a person has: else the shares of those with many records would be too small."""
    folder = tmp_path_factory.mktemp("trial")
    resolved = derive(folder, draw_trial(12, seed, records=records), weighting=f'"{weighting}"')
    federation = resolved.load_federation()
    task = resolved.build_task(federation)
    for stream, _ in list_streams(resolved.method, federation, task):
        for chunk in stream.chunks:
            assert chunk.factors.numpy() == pytest.approx(1.0, abs=1e-12)


def test_a_silo_where_nobody_counts_takes_part(tmp_path: Path) -> None:
    """Each of its patients has more records elsewhere."""
    frame = draw_trial(60, silos=1)
    frame.loc[frame.silo == SILOS[2], "silo"] = SILOS[0]
    found = []
    for step in (5, 10):  # other patients in the last silo
        few = frame[frame.index % step == 0].drop_duplicates("patient").assign(silo=SILOS[2])
        counted = count(derive(tmp_path, pd.concat([frame, frame, few]), weighting='"primary_silo"'))
        found.append([(row.label, row.cells) for row in read(counted).rows])
    assert found[0] == found[1]


def test_every_part_has_the_same_bound(tmp_path: Path) -> None:
    """A record at the end of a range moves a mean by 1.5, so its cells are divided by it."""
    method: Any = derive(tmp_path, draw_trial(5)).method
    assert [one.weight * one.reach for one in method.tables] == pytest.approx([1.0] * 8)
    assert method.clip == pytest.approx(np.sqrt(8))
    assert method.persons == 0  # the table has them


def test_other_statistics_beside_a_table_are_clipped_alone(tmp_path: Path) -> None:
    drawn = draw_trial(60, silos=1, records=1)
    found = count(derive(tmp_path, drawn, histogram="{ age = 4 }", persons="true"))
    by_kind = {one["kind"]: one["counts"] for one in found["tables"]}
    assert by_kind["histogram"] == pytest.approx(np.histogram(drawn.age, 4, (0, 64))[0])
    assert by_kind["persons"] == pytest.approx([60])


def test_the_same_persons_are_in_all_columns(tmp_path: Path) -> None:
    table = read(count(derive(tmp_path, draw_trial(40))))
    for row in table.rows:
        overall, *groups = (cell.found for cell in row.cells)
        if "count" in overall:
            assert overall["count"].value == pytest.approx(
                sum(one["count"].value for one in groups), rel=1e-9
            )


def test_without_groups_there_is_one_column(tmp_path: Path) -> None:
    drawn = draw_trial(40)
    table = read(count(derive(tmp_path, drawn, '{ columns = ["age", "arm"], missing_is_value = ["arm"] }')))
    assert (table.heads, table.difference_heads, table.unknown) == ([OVERALL], [], None)
    frame = weigh(drawn, "uniform")
    share = cells_of(table, "arm", "?")[OVERALL].found["share"].value
    assert share == pytest.approx(frame[frame.arm == ""].weight.sum() / frame.weight.sum(), rel=1e-9)


def test_groups_may_be_the_classes_of_the_label(tmp_path: Path) -> None:
    drawn = draw_trial(40)
    found = cells_of(read(count(derive(tmp_path, drawn, '{ by = "ill", columns = ["age"] }'))), "age", "mean")
    frame = weigh(drawn, "uniform")
    for name in ("no", "yes"):
        assert found[name].found["mean"].value == pytest.approx(
            describe(frame[frame.ill == name], "age")[0], rel=1e-9
        )


def test_the_kind_of_a_column_does_not_follow_from_its_rows(tmp_path: Path) -> None:
    """tableone 0.9.6 takes a 0/1 column for numbers up to 400 rows, and for categories from 401."""
    labels = []
    for persons in (40, 90):
        drawn = draw_trial(persons, silos=1, records=5).assign(age=lambda x: x.age % 2)
        table = read(count(derive(tmp_path, drawn, '{ by = "arm", columns = ["age", "ward"] }')))
        labels.append([row.label for row in table.rows])
    assert labels[0] == labels[1] == ["persons", "mean (sd)", "1", "2"]


def test_a_number_for_missing_cells_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    derive(tmp_path, draw_trial(5))
    assert not caplog.records
    path = tmp_path / "trial.toml"
    path.write_text(path.read_text().replace('missing = "indicator"', "missing = 16"))
    derive_statistics(load_config(path))
    (warning,) = caplog.records
    assert "'score' count as 16" in warning.getMessage()


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ('{ columns = [] }', "argument.value"),
        ('{ columns = ["age", "age"] }', "argument.value"),
        ('{ by = "arm", columns = ["arm"] }', "argument.value"),
        ('{ columns = ["age"], quartiles = { score = 5 } }', "argument.value"),
        ('{ columns = ["age"], quartiles = { age = 1 } }', "argument.value"),
        ('{ columns = ["ward"], missing_is_value = ["arm"] }', "argument.value"),
        ('{ columns = ["height"] }', "statistics.column"),
        ('{ by = "age", columns = ["ward"] }', "statistics.column"),
        ('{ columns = ["ward"], quartiles = { ward = 5 } }', "statistics.column"),
        ('{ by = "arm" }', "config.missing_field"),
        ('{ columns = "age" }', "config.value"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_made_is_refused(table: str, code: str, tmp_path: Path) -> None:
    with refused(code):
        derive(tmp_path, draw_trial(5), table)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    found = count(derive(tmp_path, draw_trial(10)))
    found["tables"][1]["groups"] = ["A", "C"]
    with refused("report.damaged"):
        find_release([{"statistics": found}])
