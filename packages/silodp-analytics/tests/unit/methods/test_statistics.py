"""Rows of counts of persons: how far one person moves the sums, what is counted, and the noise on the path of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from silodp.aggregators import Masked, Plain
from silodp.config.resolve import ResolvedRun, load_config
from silodp.data.federation import Federation
from silodp.mechanisms.noise import Randomness
from silodp.methods import LocalContext
from silodp.methods.roles import FederationSize
from silodp.runtime.prepare import prepare_run
from silodp.runtime.train import train
from silodp_analytics.statistics.config import derive_statistics
from silodp_analytics.statistics.histogram import Histogram
from silodp_analytics.statistics.mean import Mean
from silodp_analytics.statistics.method import Statistics
from support.oracles import judges_std, logistic_task, small_federation
from support.refusals import refused
from support.sums import exact_sum
from support.wards import TIMES, draw_wards, write_wards

SILENT = "noise_multiplier = 0.0"


def derive(folder: Path, frame: pd.DataFrame, **settings: str) -> ResolvedRun:
    return derive_statistics(load_config(write_wards(folder, frame, **settings)))


def count(resolved: ResolvedRun, federation: Federation | None = None, **changes: Any) -> dict[str, Any]:
    """The statistics of a run in one process."""
    federation = federation or resolved.load_federation()
    task = resolved.build_task(federation)
    settings = {**resolved.settings(), **changes}
    result = train(federation, task, resolved.method, **settings)
    found: dict[str, Any] = result.metrics[-1]["statistics"]
    return found


def counts_of(found: dict[str, Any], kind: str, column: str) -> np.ndarray:
    (table,) = (one for one in found["tables"] if (one["kind"], one["column"]) == (kind, column))
    return np.array(table["counts"])


@pytest.mark.parametrize("weighting", ["uniform", "present", "records"])
@pytest.mark.parametrize("records", [1, 3])
def test_a_person_moves_the_sum_by_at_most_the_clip(weighting, records, tmp_path: Path) -> None:
    resolved = derive(tmp_path, draw_wards(25, records=8), noise=SILENT)
    federation = resolved.load_federation()
    task = resolved.build_task(federation)
    first, *others = resolved.method.tables
    tables = (replace(first, weight=2.5), *others)
    method = replace(resolved.method, weighting=weighting, records=records, persons=0.5, tables=tables)
    bound = method.bounds(FederationSize(3, federation.users)).sensitivity
    whole = exact_sum(method, federation, task)
    moves = [np.linalg.norm(whole - exact_sum(method, federation, task, u)) for u in range(25)]
    assert max(moves) <= bound * (1 + 1e-9)
    # Somebody with eight records in one silo reaches more than half of it: the bound is not idle.
    assert max(moves) > bound / 2


def test_one_record_is_never_clipped_and_persons_count_in_full(tmp_path: Path) -> None:
    once, often = draw_wards(40, most_silos=2), draw_wards(40, seed=1, records=9)
    for frame, is_clipped in ((once, False), (often, True)):
        found = count(derive(tmp_path, frame, noise=SILENT))
        pairs = len(frame[["patient", "hospital"]].drop_duplicates())
        assert counts_of(found, "persons", "persons") == pytest.approx([pairs], rel=1e-9)
        counted = counts_of(found, "categories", "ward").sum()
        assert bool(counted < len(frame) - 1) is is_clipped
        assert counted == pytest.approx(len(frame)) or is_clipped


def test_counts_without_noise_are_those_of_pandas(tmp_path: Path) -> None:
    frame = draw_wards(200)
    found = count(derive(tmp_path, frame, noise=SILENT))
    ages = np.histogram(frame.age.dropna(), 7, (20, 90))[0]
    assert counts_of(found, "histogram", "age") == pytest.approx([*ages, frame.age.isna().sum()])
    assert counts_of(found, "histogram", "dose") == pytest.approx(np.histogram(frame.dose, 5, (0, 10))[0])
    for column, names in (("ward", "AB"), ("kind", "xyz")):
        expected = [(frame[column] == name).sum() for name in names]
        assert counts_of(found, "categories", column) == pytest.approx(expected)
    scaled = frame.age.dropna() / 35 - 55 / 35
    expected = [scaled.sum(), (scaled**2 - 0.5).sum(), len(scaled)]
    assert counts_of(found, "mean", "age") == pytest.approx(expected, rel=1e-5, abs=1e-4)
    bins = np.digitize(frame.days, TIMES)
    expected = [
        ((frame.ward == ward) & (bins == b) & (frame.dead == event)).sum()
        for ward in "AB" for b in range(6) for event in (0, 1)
    ]  # fmt: skip
    assert counts_of(found, "survival", "days") == pytest.approx(expected)


def test_weights_by_presence_count_different_persons(tmp_path: Path) -> None:
    frame = draw_wards(80, records=4)
    resolved = derive(tmp_path, frame, noise=SILENT + '\nweighting = "present"')
    assert counts_of(count(resolved), "persons", "persons") == pytest.approx([80], rel=1e-9)


@pytest.mark.parametrize("aggregator", [Plain(), Masked()])
def test_the_noise_that_is_added_is_the_noise_that_is_charged(aggregator) -> None:
    federation, task = small_federation(silos=3), logistic_task()
    method = Statistics(2.0, tables=(Histogram("x", bins=600, range=(-3.0, 3.0)),))
    data = replace_features(federation, ("x", "b", "c", "d"))
    spec = prepare_run(data, task, method, rounds=1, aggregator=aggregator)
    result = train(data, task, method, rounds=1, aggregator=aggregator)
    found = result.metrics[-1]["statistics"]
    silent = replace(method, noise_multiplier=0.0)
    exact = exact_sum(silent, federation, task) * 3
    noise = np.concatenate([table["counts"] for table in found["tables"]]) - exact
    charged = spec.round_events()["released"].noise_multiplier * method.clip
    # In the sum σC, and in a count S times that, as every silo weights its counts by 1/S.
    assert judges_std(noise, 3 * charged)
    assert all(table["noise_std"] == pytest.approx(3 * charged) for table in found["tables"])


def replace_features(federation: Federation, names: tuple[str, ...]) -> Federation:
    return Federation(federation.silos, federation.users, federation.test, classes=2, features=names)


def test_a_time_at_an_edge_belongs_to_the_bin_above_it(tmp_path: Path) -> None:
    """Times of records are in single precision, in which 6.1 is less than the double 6.1."""
    frame = draw_wards(60, most_silos=1)
    frame["days"] = np.resize([6.1, 6.05, 12.3, 0.7], len(frame))
    path = write_wards(tmp_path, frame, noise=SILENT)
    path.write_text(path.read_text().replace("times = [60, 120, 240, 480, 720]", "times = [0.7, 6.1, 12.3]"))
    resolved = derive_statistics(load_config(path))
    table = next(one for one in count(resolved)["tables"] if one["kind"] == "survival")
    of_bins = np.reshape(table["counts"], (2, 4, 2)).sum((0, 2))
    each = len(frame) / 4
    assert of_bins.tolist() == pytest.approx([0, 2 * each, each, each])


def test_a_silo_where_nobody_counts_takes_part(tmp_path: Path) -> None:
    """Each of its patients has more records elsewhere."""
    frame = draw_wards(60, most_silos=1)
    frame.loc[frame.hospital == "west", "hospital"] = "north"
    found = []
    for step in (5, 10):  # other patients in the west
        few = frame[frame.index % step == 0].assign(hospital="west")
        noise = SILENT + '\nweighting = "primary_silo"'
        counted = count(derive(tmp_path, pd.concat([frame, frame, few]), noise=noise))
        found.append([one["counts"] for one in counted["tables"]])
    assert found[0] == found[1]


def test_masked_counts_are_plain_ones_up_to_the_grid(tmp_path: Path) -> None:
    resolved = derive(tmp_path, draw_wards(60, records=3), noise="noise_multiplier = 1e-4")
    federation = resolved.load_federation()
    plain, masked = (count(resolved, federation, aggregator=one) for one in (Plain(), Masked()))
    step = resolved.method.clip / Masked().grid_units if hasattr(Masked(), "grid_units") else 1e-3
    for one, other in zip(plain["tables"], masked["tables"], strict=True):
        # The noise of both, at six deviations, and rows that are cut to the grid.
        reach = 6 * 1.5 * one["noise_std"] + 60 * 3 * step
        assert np.abs(np.subtract(one["counts"], other["counts"])).max() < reach


def test_the_bits_of_a_row_do_not_depend_on_others(tmp_path: Path) -> None:
    resolved = derive(tmp_path, draw_wards(20, records=5), noise=SILENT)
    federation = resolved.load_federation()
    silo, task = federation.silos[0], resolved.build_task(federation)

    def rows(keep: np.ndarray) -> dict[int, np.ndarray]:
        x, y = task.tensors(silo.x[keep], silo.y[keep])
        user, population = torch.from_numpy(silo.user[keep]), FederationSize(3, federation.users)
        context = LocalContext(
            task,
            torch.zeros(0),
            x,
            y,
            user,
            torch.ones(federation.users),
            population,
            Randomness.from_seed(0),
        )
        (chunk,) = resolved.method.local_update(context).chunks
        parts = zip(chunk.owners.tolist(), (chunk.rows * chunk.factors[:, None]).numpy(), strict=True)
        return dict(parts)

    everyone = rows(np.ones(len(silo.user), bool))
    for user, row in everyone.items():
        assert np.array_equal(rows(silo.user == user)[user], row)


def test_what_is_no_statistic_of_the_records_is_refused(tmp_path: Path) -> None:
    federation, task = replace_features(small_federation(), ("x", "b", "c", "d")), logistic_task()
    right = Statistics(1.0, tables=(Histogram("x"),))
    with refused("statistics.rounds"):
        prepare_run(federation, task, right, rounds=2)
    with refused("statistics.column"):  # another column at the place: its name in the results would be wrong
        prepare_run(federation, task, Statistics(1.0, tables=(Mean("x", 1),)), rounds=1)
    with refused("statistics.cells"):
        Statistics(1.0, persons=0.0)
    with refused("statistics.cells"):
        Statistics(1.0, tables=tuple(Histogram(f"x{n}", bins=1000) for n in range(101)))


@pytest.mark.parametrize(
    "setting",
    ['histogram = { weight = 5 }', 'histogram = { ward = 5 }', 'mean = ["ward"]', 'count = ["age"]',
     'weights = { nobody = 2.0 }', 'survival = { times = [1.0], by = "age" }'],
)  # fmt: skip
def test_a_column_without_public_constants_is_refused(setting: str, tmp_path: Path) -> None:
    path = write_wards(tmp_path, draw_wards(5))
    name = setting.split(" ")[0]
    with refused("statistics.column"):
        derive_statistics(load_config(path, [f"statistics.{name}={setting.partition('= ')[2]}"]))
