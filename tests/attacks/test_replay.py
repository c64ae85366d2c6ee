"""Every part that releases anything is replayed on a neighboring federation, with the same coins and the same models.

Attacked is what the ε of a run rests on: that nothing depends on a person's records but sums, that a person moves these
by no more than is charged, and that all noise is drawn whatever the records are. A canary run (`silodp attack`) has to
see such a fault through the noise; here the noise is the same in both runs, so a small fault shows as well as a large
one. Cases come from the registries: a method, aggregator, statistic, family or series without a case fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from silodp.aggregators.registry import AGGREGATORS
from silodp.aggregators.run_spec import RunSpec
from silodp.aggregators.series import SERIES
from silodp.config.resolve import ResolvedRun, load_config
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.mechanisms import clipping
from silodp.mechanisms.clipping import LocallyNoisedUpdate, clip_rows
from silodp.methods import METHODS, LocalContext, Method, UldpAvg
from silodp.methods.base import supports
from silodp.methods.participation import PARTICIPATIONS
from silodp.methods.roles import PersonalBudgets
from silodp.runtime.train import train
from silodp.training.sgd import LocalTraining
from silodp.training.task import Task
from silodp_analytics.regression.config import derive_regression
from silodp_analytics.regression.families import FAMILIES
from silodp_analytics.statistics.config import derive_statistics
from silodp_analytics.statistics.count import ClassCount
from silodp_analytics.statistics.method import Statistics
from silodp_analytics.statistics.statistic import STATISTICS
from support.clinics import KINDS, draw_clinics, write_clinics
from support.faults import WEIGHT_ONE, Change, Fault, change_stream, scale_stream, silence_first_silo
from support.oracles import logistic_task
from support.replay import (
    Trace,
    compute_precision,
    find_differences,
    find_excess,
    measure_moves,
    put_last,
    record,
    remove_person,
    remove_record,
)
from support.wards import draw_wards, write_wards
from support.wires import Wire, wire  # noqa: F401

Settings = dict[str, Any]
PERSON = 5
"""The person who is removed; silo 2 has nobody else's records, so that it is empty without them."""


def make_federation(size: float = 30.0, silos: int = 3) -> Federation:
    """Five persons with two records in each silo but `silo2`, and one with six equal records of this size in all."""
    rng = np.random.default_rng(0)
    own = (rng.normal(size=4) * size).astype(np.float32)

    def draw(name: str, users: list[int]) -> SiloData:
        user = np.array(users, np.int64)
        x = rng.normal(size=(len(user), 4)).astype(np.float32)
        x[user == PERSON] = own
        y = (x.sum(1) + rng.normal(size=len(x)) > 0).astype(np.int64)
        y[user == PERSON] = 1
        y[-1] = 0  # a model that fits the other records is far from fitting the last one
        return SiloData(name, x, y, user, budget=np.full(len(x), 2.0))

    others = [0, 1, 2, 3, 4] * 2
    drawn = [draw(f"silo{s}", [*(others if s != 2 else []), *[PERSON] * 6]) for s in range(silos)]
    tests = [replace(draw(silo.name, list(silo.user)), budget=None) for silo in drawn]
    drawn = [replace(silo, test=test) for silo, test in zip(drawn, tests, strict=True)]
    return Federation(
        tuple(drawn), users=6, test=None, classes=2, user_budgets=np.array([1.0, 2.0, 3.0, 4.0, 5.0, 5.0])
    )


FEDERATION = make_federation()
LOCAL: Settings = {"local": LocalTraining(0.3, epochs=2, batch_size=4)}
SUMS: Settings = {"noise_multiplier": 5.0, "clip": 0.5}
AVG: Settings = {**SUMS, **LOCAL}
STEPS: Settings = {**SUMS, "local_steps": 3, "expected_batch_size": 2.0, "local_learning_rate": 0.5}
BUDGETS: Settings = {**STEPS, "delta": 1e-5}
DDP: Settings = {**STEPS, "record_sampling": 0.6}

CASES: dict[str, dict[str, Settings]] = {
    "uldp-avg": {
        "uniform": AVG,
        "by presence": {**AVG, "weighting": "present"},
        "by records": {**AVG, "weighting": "records"},
        "primary silo": {**AVG, "weighting": "primary_silo"},
        "sampled": {**AVG, "user_sampling": 0.5},
        "allocated": {**AVG, "participation": "random_allocation"},
        "step": {"noise_multiplier": 5.0, "step": 0.3, **LOCAL},
        "defaults": {"noise_multiplier": 5.0},
        "own clips": {**AVG, "personal": {"by": "clip", "largest_budget": 5.0, "rounds": 2}},
    },
    "uldp-sgd": {"uniform": SUMS, "by records": {**SUMS, "weighting": "records"}},
    "ddp": {
        "decoupled": DDP,
        "local": {**DDP, "trajectory": "local", "local_momentum": 0.5},
        "one step": {**DDP, "local_steps": 1},
        "clients differ": {
            **DDP,
            "noise_multiplier": (1.0, 2.0, 3.0),
            "clip": (0.5, 0.4, 0.3),
            "local_steps": 2,
            "local_learning_rate": (0.5, 0.3, 0.2),
        },
    },
    "default": {"": LOCAL},
    "uldp-naive": {"": AVG},
    "uldp-group": {"": {**STEPS, "group_size": 6, "record_sampling": 0.9}},
    "rpdp": {
        "": {**BUDGETS, "rounds": 2, "largest_budget": 3.0},
        "clients": {**BUDGETS, "rounds": 2, "largest_budget": 3.0, "client_sampling": 0.6},
    },
    "rpdp-minimum": {"": {**BUDGETS, "rounds": 2, "budget": 2.0}},
    "rpdp-dropout": {"": {**BUDGETS, "rounds": 2, "threshold": 2.0}},
    "rpdp-filter": {"": {**BUDGETS, "largest_budget": 3.0}},
}
"""By method: its settings by what is different about them."""
OF_TABLES = {"statistics", "regression"}
"""Methods that need tables with a schema."""

AGGREGATED: dict[str, tuple[Settings, tuple[tuple[str, str], ...] | None, Callable[[RunSpec], float]]] = {
    "plain": ({}, None, lambda spec: 1.0),
    "masked": ({}, None, lambda spec: 1.0),
    "select": ({}, (("uldp-avg", "primary silo"),), lambda spec: spec.aggregator.grid(spec).step),
    "lattice": (
        {"count_cap": 6, "attempts": 20},
        (("uldp-avg", "by records"), ("uldp-sgd", "by records")),
        # Noise is drawn in units of the weights' fractions, of which the clip has `row_bound`.
        lambda spec: spec.bounds.clip / spec.aggregator.parameters(spec).row_bound,
    ),
    "paillier": (
        {"count_cap": 6, "key_bits": 512, "insecure_for_tests": True},
        (("uldp-avg", "by records"), ("uldp-avg", "by presence")),
        lambda spec: spec.aggregator.grid(spec).step,
    ),
}
"""By aggregator: its settings, the cases of methods that it is for (None: all), the unit of noise (`find_excess`)."""

EVALUATED: dict[str, dict[str, tuple[str, Settings]]] = {
    "evaluation": {
        "persons": ("uldp-avg", {"across": "sums", "noise_multiplier": 1.0}),
        "persons, by silo": ("uldp-avg", {"across": "sums", "noise_multiplier": 1.0, "by_silo": True}),
        "records": ("ddp", {"across": "sums", "noise_multiplier": 1.0}),
        "records, by silo": ("ddp", {"across": "sums", "noise_multiplier": 1.0, "by_silo": True}),
        "local": ("uldp-avg", {"across": "local"}),
    }
}
"""By series: the method of the run, and the settings of the series."""


def make_method(name: str, variant: str) -> Method:
    settings = dict(CASES[name][variant])
    if "participation" in settings:
        settings["participation"] = PARTICIPATIONS[settings["participation"]](2)
    if "personal" in settings:
        settings["personal"] = PersonalBudgets.implementation()(**settings["personal"])
    return METHODS[name](**settings)


def replay(
    federation: Federation, neighbor: Federation, task: Task, method: Method, **settings: Any
) -> tuple[Trace, Trace]:
    """Run on both federations; the second run is fed what the first one releases."""
    settings = {"rounds": 2, "seed": 1, "accountant": "rdp", **settings}
    with record() as first:
        train(federation, task, method, **settings)
    with record(first) as second:
        train(neighbor, task, method, **settings)
    return first, second


def replay_case(
    method: Method, aggregator: str = "plain", federation: Federation = FEDERATION, **settings: Any
) -> tuple[Trace, Trace]:
    """Run without the person, or for methods that protect a record, without the last record of the first silo."""
    is_record = method.unit == "record"
    neighbor = remove_record(federation, 0) if is_record else remove_person(federation, PERSON)
    options = AGGREGATED[aggregator][0] | settings.pop("options", {})
    made = AGGREGATORS[aggregator](**options)
    return replay(federation, neighbor, logistic_task(), method, aggregator=made, **settings)


def list_rows() -> list[tuple[str, str, str]]:
    """All methods under all aggregators that are installed, but those of tables."""
    return [
        (method, variant, aggregator)
        for aggregator in AGGREGATORS
        for method in METHODS
        for variant in CASES.get(method, {})
        if (fit := AGGREGATED.get(aggregator, ({}, (), None))[1]) is None or (method, variant) in fit
    ]


# --- right code ---


def test_every_part_has_a_case() -> None:
    assert METHODS.keys() <= CASES.keys() | OF_TABLES
    assert AGGREGATORS.keys() <= AGGREGATED.keys()
    assert SERIES.keys() <= EVALUATED.keys()
    rows = list_rows()
    assert {aggregator for _, _, aggregator in rows} == AGGREGATORS.keys()
    rules = {make_method(name, variant).participation_rule for name, variant, _ in rows if name == "uldp-avg"}
    assert set(PARTICIPATIONS.values()) <= set(map(type, rules))


@pytest.mark.parametrize(("name", "variant", "aggregator"), list_rows())
def test_a_method_releases_what_is_charged(name: str, variant: str, aggregator: str) -> None:
    method = make_method(name, variant)
    # Else the bits of a row depend on who is computed beside it (docs/privacy.md, section 7).
    isolated = supports(type(method), "can_isolate_units")
    first, second = replay_case(method, aggregator, isolate_units=isolated)
    assert find_differences(first, second) == []
    assert find_excess(first, second, AGGREGATED[aggregator][2](first.specs[""])) == []
    assert len(first.totals) == 2


@pytest.mark.parametrize(("name", "variant"), [row[:2] for row in list_rows() if row[2] == "plain"])
def test_persons_computed_together_move_others_by_rounding_alone(name: str, variant: str) -> None:
    first, second = replay_case(make_method(name, variant))
    assert find_differences(first, second) == []
    assert find_excess(first, second, rounding=1e-5) == []


@pytest.mark.parametrize("size", [1e19, 1e38])
@pytest.mark.parametrize(
    ("name", "variant", "aggregator"),
    [
        ("uldp-avg", "uniform", "plain"),
        ("uldp-avg", "uniform", "masked"),
        ("ddp", "local", "plain"),
        ("uldp-group", "", "plain"),
        ("rpdp-filter", "", "plain"),
        ("uldp-naive", "", "plain"),
    ],
)
def test_records_at_the_end_of_floats_move_no_more(
    name: str, variant: str, aggregator: str, size: float
) -> None:
    first, second = replay_case(make_method(name, variant), aggregator, make_federation(size))
    assert find_differences(first, second) == []
    assert find_excess(first, second, rounding=1e-5) == []


@pytest.mark.parametrize(
    ("name", "variant", "aggregator"),
    [
        ("uldp-avg", "uniform", "plain"),
        ("uldp-avg", "uniform", "masked"),
        ("uldp-avg", "primary silo", "select"),
        ("uldp-avg", "by records", "lattice"),
        ("ddp", "one step", "plain"),
        ("rpdp", "", "plain"),
    ],
)
def test_the_bound_is_reached(name: str, variant: str, aggregator: str) -> None:
    """Without this the replay could compare nothing, or noise could be wasted."""
    first, second = replay_case(make_method(name, variant), aggregator)
    spec = first.specs[""]
    measured = measure_moves(first, second, AGGREGATED[aggregator][2](spec))
    sees_shares = spec.views()["server"].sees_shares
    reached = [
        (moves.shares if sees_shares else moves.released)
        / compute_precision(first.find_events(place)["server"])
        for place, moves in measured.items()
    ]
    assert max(reached) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
@pytest.mark.parametrize(("series", "variant"), [(s, v) for s in SERIES for v in EVALUATED.get(s, {})])
def test_a_series_releases_what_is_charged(series: str, variant: str, aggregator: str) -> None:
    name, settings = EVALUATED[series][variant]
    method = make_method(name, "one step" if name == "ddp" else "uniform")
    isolated = supports(type(method), "can_isolate_units")
    made = [SERIES[series](**settings)]
    first, second = replay_case(method, aggregator, series=made, isolate_units=isolated)
    assert find_differences(first, second) == []
    assert find_excess(first, second) == []
    assert {place[0] for place in first.totals} == {"", series}


# --- samples that nobody knows, and silos that drop out ---


@pytest.mark.parametrize(
    "aggregator", [name for name in AGGREGATORS if hasattr(AGGREGATORS[name], "hidden_sample")]
)
def test_a_hidden_sample_moves_what_is_charged_for_those_in_it(aggregator: str) -> None:
    weighting = "primary_silo" if aggregator == "select" else "records"
    method = UldpAvg(**AVG, user_sampling=0.5, weighting=weighting)
    first, second = replay_case(
        method, aggregator, rounds=4, isolate_units=True, options={"hidden_sample": 2}
    )
    unit = AGGREGATED[aggregator][2](first.specs[""])
    assert find_differences(first, second) == []
    assert find_excess(first, second, unit) == []
    is_moved = [moves.released > 0 for moves in measure_moves(first, second, unit).values()]
    assert set(is_moved) == {True, False}, "the person is in some samples, and not in others"


@pytest.mark.parametrize(
    ("kind", "releases"), [("update", 1), ("open", 2)], ids=["before it is masked", "while seals open"]
)
@pytest.mark.parametrize(
    ("name", "variant"), [("uldp-avg", "uniform"), ("uldp-sgd", "uniform"), ("ddp", "one step"), ("rpdp", "")]
)
def test_a_silo_that_drops_out_leaves_what_is_charged(
    name: str,
    variant: str,
    kind: str,
    releases: int,
    wire: type[Wire],  # noqa: F811
) -> None:
    """Silos charge for the fewest survivors, and a second release is charged beside the first."""
    wire.fails = staticmethod(
        lambda silo, request: "before" if (silo, request.kind, request.round) == ("silo1", kind, 1) else None
    )
    method = make_method(name, variant)
    isolated = supports(type(method), "can_isolate_units")
    federation = make_federation(silos=4)
    first, second = replay_case(
        method, "masked", federation, isolate_units=isolated, options={"min_silos": 3}
    )
    assert [charge[2:4] for charge in first.charges if charge[0] == "server"] == [
        (0, 0),
        *((1, release) for release in range(releases)),
    ]
    assert find_differences(first, second) == []
    assert find_excess(first, second) == []


# --- sums of tables ---


def derive_wards(folder: Path) -> ResolvedRun:
    noise = 'noise_multiplier = 2.0\nweighting = "uniform"'
    path = write_wards(folder, draw_wards(12, records=4), noise=noise)
    asked = 'table_one = { by = "ward", columns = ["age", "dose", "kind"], quartiles = { age = 14 } }\n'
    path.write_text(path.read_text() + asked)
    return derive_statistics(load_config(path))


def derive_clinics(folder: Path, family: str) -> ResolvedRun:
    frame = draw_clinics(12, records=2, most_silos=3)
    asked = "noise_multiplier = 2.0\niterations = 4"
    return derive_regression(load_config(write_clinics(folder, frame, asked=asked, family=family)))


def replay_tables(resolved: ResolvedRun, method: Method, aggregator: str) -> tuple[Trace, Trace]:
    federation = put_last(resolved.load_federation(), PERSON)
    settings = {**resolved.settings(), "seed": 1, "accountant": "rdp", "aggregator": aggregator}
    neighbor = remove_person(federation, PERSON)
    return replay(federation, neighbor, resolved.build_task(federation), method, **settings)


COUNT_CLASSES = Statistics(2.0, tables=(ClassCount("class", classes=("no", "yes")),))


def test_every_statistic_has_a_case(tmp_path: Path) -> None:
    blocks = (*derive_wards(tmp_path).method.blocks, *COUNT_CLASSES.blocks)
    assert set(STATISTICS.values()) <= set(map(type, blocks))


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
@pytest.mark.parametrize("weighting", ["uniform", "present"])
def test_statistics_release_what_is_charged(weighting: str, aggregator: str, tmp_path: Path) -> None:
    resolved = derive_wards(tmp_path)
    runs = replay_tables(resolved, replace(resolved.method, weighting=weighting), aggregator)
    assert find_differences(*runs) == []
    assert find_excess(*runs) == []


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_counts_of_classes_release_what_is_charged(aggregator: str) -> None:
    runs = replay_case(COUNT_CLASSES, aggregator, rounds=1)
    assert find_differences(*runs) == []
    assert find_excess(*runs) == []


def test_every_family_has_a_case() -> None:
    assert FAMILIES.keys() <= KINDS.keys()


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_regression_releases_what_is_charged(family: str, aggregator: str, tmp_path: Path) -> None:
    resolved = derive_clinics(tmp_path, family)
    runs = replay_tables(resolved, resolved.method, aggregator)
    assert find_differences(*runs) == []
    assert find_excess(*runs) == []
    assert len(runs[0].totals) == 4


# --- faults ---


def scale_noise_by_rows(method: UldpAvg, context: LocalContext, stream: Any) -> Any:
    return scale_stream(stream, 1 + len(context.user) / 1000)


def send_nothing_without_records(method: UldpAvg, context: LocalContext, stream: Any) -> Any:
    return stream if len(context.user) else LocallyNoisedUpdate(torch.zeros(stream.size, dtype=torch.float64))


def clip_after_summing(method: UldpAvg, context: LocalContext, stream: Any) -> Any:
    total = sum(chunk.tensor.double().sum(0) for chunk in stream.chunks) + torch.zeros(1, stream.size)
    row = clip_rows(torch.zeros(1, dtype=torch.int64), total, method.clip)
    return replace(stream, chunks=[row], weighted=False)


def clip_records_apart(local_update: Any) -> Any:
    """Train and clip every record by itself, and add up all rows of a person."""

    def wrong(self: UldpAvg, context: LocalContext) -> Any:
        apart = replace(context, user=torch.arange(len(context.user)), weights=context.weights[context.user])
        stream = local_update(self, apart)
        chunks = (replace(chunk, owners=context.user[chunk.owners]) for chunk in stream.chunks)
        return replace(stream, chunks=chunks)

    return wrong


def divide_by_private_count(add: Any) -> Any:
    """Make a mean over the persons of a silo, times the public number of persons."""

    def wrong(stream: Any, weights: Any = None) -> Any:
        chunks = list(stream.chunks)
        persons = {int(owner) for chunk in chunks for owner in chunk.owners}
        total = add(replace(stream, chunks=chunks), weights)
        return replace(total, value=total.value * (FEDERATION.users / max(len(persons), 1)))

    return wrong


FOUND: dict[str, tuple[tuple[Change, ...], str]] = {
    "noise by the number of rows": ((change_stream(UldpAvg, scale_noise_by_rows),), "differences"),
    "no noise without records": ((change_stream(UldpAvg, send_nothing_without_records),), "differences"),
    "divided by the number of persons": (
        (((clipping, "add_weighted_rows", divide_by_private_count)),),
        "excess",
    ),
    "clipped after summing": ((change_stream(UldpAvg, clip_after_summing),), "excess"),
    "records clipped one by one": (((UldpAvg, "local_update", clip_records_apart),), "excess"),
    "weight 1 in every silo": ((WEIGHT_ONE,), "excess"),
    "a silo without noise": ((change_stream(UldpAvg, silence_first_silo),), "excess"),
}
"""By what is wrong: the changes that make it so, and by which comparison the replay finds it."""


@pytest.mark.parametrize("fault", FOUND)
def test_an_injected_fault_is_found(fault: str) -> None:
    changes, by = FOUND[fault]
    method = make_method("uldp-avg", "uniform")
    with Fault("", changes).inject():
        first, second = replay_case(method)
    found = {
        "differences": find_differences(first, second),
        "excess": find_excess(first, second, rounding=1e-5),
    }
    assert found[by]
