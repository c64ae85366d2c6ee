"""Evaluation by subgroup and by silo: how far a person moves all these counts together, and under which noise.

Attacked are persons with held-out records in every silo. If each subgroup counted them in full, or if each silo's table
had only the noise of a sum over silos, the run would report the same ε and tell more of them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Gaussian, NonPrivate, Skellam
from silodp.accounting.ledger import reopen_ledger
from silodp.accounting.views import View
from silodp.aggregators import Plain
from silodp.aggregators.masked import Masked
from silodp.aggregators.plain import PlainServer
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.methods import Ddp, UldpAvg
from silodp.runtime.callback import Result
from silodp.runtime.prepare import prepare_run
from silodp.runtime.train import train
from silodp.training.sgd.local import LocalTraining
from silodp_analytics.count_parts import CountParts
from silodp_analytics.counted import CategoryCells, NumericRanges
from silodp_analytics.counts import CountTable
from silodp_analytics.evaluation import results as runtime_evaluation
from silodp_analytics.evaluation.methods import EvaluationSums
from silodp_analytics.evaluation.series import Evaluation
from support.oracles import logistic_task, small_federation
from support.refusals import refused

SILOS = 3
AVG = UldpAvg(5.0, 0.5, LocalTraining(learning_rate=0.1), server_learning_rate=1e-49)
RECORDS = Ddp(5.0, 0.5, 1, 0.2, 4.0, 1e-49)
METHODS = {"persons": AVG, "records": RECORDS}
AGGREGATORS = {"plain": Plain(), "masked": Masked()}
SEX = CategoryCells("sex", 1, ("f", "m"))
AGE = NumericRanges("age", 0, range=(-9.0, 9.0), typical=(0.0, 1.0), bounds=(-9.0, -0.5, 0.5, 2.0))
BOTH = {"by": ("sex", "age"), "categories": (SEX,), "ranges": (AGE,)}
PARTS: dict[str, dict[str, Any]] = {
    "silos": {"by_silo": True},
    "groups": BOTH,
    "silos and groups": {"by_silo": True, **BOTH},
}


def federation_of(held_out: int = 60) -> Federation:
    """Three silos whose features are age, and sex as one of two."""
    federation = small_federation(held_out=held_out)

    def name_sex(data: SiloData) -> SiloData:
        x = data.x.copy()
        x[:, 1] = x[:, 1] > 0
        x[:, 2] = 1 - x[:, 1]
        test = None if data.test is None else name_sex(data.test)
        return replace(data, x=x, test=test)

    return replace(
        federation,
        silos=tuple(map(name_sex, federation.silos)),
        test=name_sex(federation.test),
        features=("age", "sex=f", "sex=m", "height"),
    )


def make(noise: float = 0.7, **parts: Any) -> Evaluation:
    return Evaluation("sums", noise_multiplier=noise, bins=10, **parts)


def evaluate(
    federation: Federation, evaluation: Evaluation, aggregator: str = "plain", method: Any = AVG, **more: Any
) -> tuple[Result, np.ndarray]:
    """Run, and return what the server released of every evaluation, in counts of a silo: (evaluations, S', T, k)."""
    totals: list[np.ndarray] = []
    describe = runtime_evaluation.describe_counts

    def keep(sums: EvaluationSums, spec: Any, total: np.ndarray, least_group: int) -> Any:
        parts = sums.parts or CountParts()
        counts = np.asarray(total) * sums.spread(spec.population)
        totals.append(counts.reshape(parts.silos, parts.tables, sums.table.size))
        return describe(sums, spec, total, least_group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_evaluation, "describe_counts", keep)
        result = train(
            federation,
            logistic_task(),
            method,
            aggregator=AGGREGATORS[aggregator],
            evaluation=evaluation,
            **{"rounds": 1, "seed": 0, "accountant": "rdp", **more},
        )
    return result, np.stack(totals)


def count_truly(federation: Federation, params: torch.Tensor) -> np.ndarray:
    """Count by silo, subgroup (sex f, m, then ages), class and score, record by record: (S, 6, 20)."""
    task, found = logistic_task(), np.zeros((SILOS, 6, 2, 10))
    for s, silo in enumerate(federation.silos):
        x, _ = task.tensors(silo.held_out.x, silo.held_out.y)
        probability = torch.sigmoid(task.predict(params, x).double().flatten()).numpy()
        for (age, female, *_), label, p in zip(silo.held_out.x, silo.held_out.y, probability, strict=True):
            ages = [-9 <= age < -0.5, -0.5 <= age < 0.5, 0.5 <= age <= 2]
            groups = [female == 1, female == 0, *ages, not any(ages)]
            found[s, np.flatnonzero(groups), label, math.ceil(p * 10) - 1] += 1
    return found.reshape(SILOS, 6, 20)


def reduce_to(counts: np.ndarray, parts: dict[str, Any]) -> np.ndarray:
    """Return the counts (S, 6, k) of all tables as those that an evaluation with these parts releases."""
    if "by" not in parts:
        counts = counts[:, :2].sum(axis=1, keepdims=True)
    return counts if parts.get("by_silo") else counts.sum(axis=0, keepdims=True)


def crowd(federation: Federation, more: int, silos: int) -> Federation:
    """Add `more` held-out records of person 99 to some silos, all of them equal."""
    parts, own = [], federation.silos[0].held_out
    for place, silo in enumerate(federation.silos):
        test, n = silo.held_out, more * (place < silos)
        x = np.concatenate([test.x, own.x[:1].repeat(n, 0)])
        y = np.concatenate([test.y, own.y[:1].repeat(n)])
        user = np.concatenate([test.user, np.full(n, 99)])
        parts.append(replace(silo, test=SiloData(silo.name, x, y, user)))
    return replace(federation, silos=tuple(parts))


# --- what is counted ---


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("method", METHODS)
def test_without_noise_counts_are_those_of_a_loop_over_records(name, aggregator, method):
    federation = federation_of()
    wide = {} if method == "records" else {"clip": 1000.0}
    evaluation = make(0.0, **wide, **PARTS[name])
    result, (counts,) = evaluate(federation, evaluation, aggregator, METHODS[method])
    expected = reduce_to(count_truly(federation, result.params), PARTS[name])
    # Integers are truncated toward zero: a count of one record loses a part of a grid step.
    assert np.abs(counts - expected).max() < (1e-9 if aggregator == "plain" else 0.15)


def test_pooled_metrics_are_those_without_parts():
    federation = federation_of()
    plain, _ = evaluate(federation, make(0.0, clip=1000.0))
    for parts in PARTS.values():
        result, _ = evaluate(federation, make(0.0, clip=1000.0, **parts))
        expected, found = (one.metrics[-1]["evaluation"] for one in (plain, result))
        assert found["counts"] == expected["counts"]
        for metric, estimate in expected["estimates"].items():
            numbers = {key: value for key, value in estimate.items() if isinstance(value, float)}
            assert {key: found["estimates"][metric][key] for key in numbers} == pytest.approx(numbers)
    silos = [part for part in found["parts"] if part["of"] == "silo"]
    assert [part["name"] for part in silos] == ["silo0", "silo1", "silo2"]
    assert [part["records"] for part in silos] == [60.0] * 3
    names = [(part["of"], part["name"]) for part in found["parts"][3:]]
    ages = [("age", name) for name in ("-9 to below -0.5", "-0.5 to below 0.5", "0.5 to 2", "others")]
    assert names == [("sex", "f"), ("sex", "m"), *ages]
    assert sum(part["records"] or 0 for part in found["parts"] if part["of"] == "sex") == 180


# --- how far a person moves the counts ---


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("silos", [1, SILOS])
def test_a_person_moves_all_counts_by_at_most_what_noise_is_for(name, aggregator, silos):
    """The whole run in both worlds with the same noise, which cancels: 300 records of a person in some silos."""
    federation, evaluation = federation_of(), make(**PARTS[name])
    worlds = (federation, crowd(federation, 300, silos))
    first, second = (evaluate(world, evaluation, aggregator)[1] for world in worlds)
    moved = float(np.linalg.norm(first - second))
    columns = 2 if "by" in PARTS[name] else 1
    # In counts of a silo a person moves each silo's table by √c; sums over silos add these up before the norm.
    together = math.sqrt(silos) if PARTS[name].get("by_silo") else silos
    assert moved == pytest.approx(math.sqrt(columns) * together, rel=2e-3)
    with_parts = {"aggregator": AGGREGATORS[aggregator], "evaluation": evaluation}
    spec = prepare_run(federation, logistic_task(), AVG, rounds=1, **with_parts)
    sums = spec.derived["evaluation"]
    assert moved / sums.method.spread(sums.population) <= sums.bounds.sensitivity * (1 + 1e-9)
    if silos == SILOS:
        assert moved / sums.method.spread(sums.population) >= sums.bounds.sensitivity * 0.99, "not reached"


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("name", PARTS)
def test_a_record_moves_all_counts_by_what_noise_is_for(name, aggregator):
    federation = federation_of()
    own = federation.silos[0]
    fewer = replace(own, test=SiloData(own.name, own.test.x[1:], own.test.y[1:], own.test.user[1:]))
    worlds = (federation, replace(federation, silos=(fewer, *federation.silos[1:])))
    first, second = (evaluate(world, make(**PARTS[name]), aggregator, RECORDS)[1] for world in worlds)
    columns = 2 if "by" in PARTS[name] else 1
    assert np.linalg.norm(first - second) == pytest.approx(math.sqrt(columns), rel=2e-3)


# --- the noise ---


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("aggregator", ["plain", "masked"])
@pytest.mark.parametrize("name", PARTS)
def test_the_noise_is_that_which_is_charged(name, aggregator, method, tmp_path):
    """The charged multiplier times what a unit moves is the deviation of what was drawn, in every cell alike."""
    federation, parts = federation_of(), PARTS[name]
    wide = {} if method == "records" else {"clip": 1000.0}
    evaluation = make(every=1, **wide, **parts)
    out = tmp_path / "run"
    result, counts = evaluate(federation, evaluation, aggregator, METHODS[method], rounds=40, out=out)
    noise = counts - reduce_to(count_truly(federation, result.params), parts)
    with reopen_ledger(out / "checkpoint" / "ledger.jsonl") as ledger:
        (event,) = {c.events["released"] for c in ledger.history if c.series == "evaluation"}
        (server,) = {c.events["server"] for c in ledger.history if c.series == "evaluation"}
    assert isinstance(event, Skellam if aggregator == "masked" else Gaussian)
    assert event.noise_multiplier == pytest.approx(0.7)
    # Who sees each silo's share sees the same blocks: no ε is hidden in a sum.
    if parts.get("by_silo"):
        assert server == event
    columns, by_silo = 2 if "by" in parts else 1, bool(parts.get("by_silo"))
    reach = (math.sqrt(SILOS) if by_silo else SILOS) if method == "persons" else 1.0
    expected = event.noise_multiplier * evaluation.clip * math.sqrt(columns) * reach
    assert noise.std() == pytest.approx(expected, rel=0.06)
    for block in np.moveaxis(noise, 1, 0):
        assert block.std() == pytest.approx(expected, rel=0.15)
    last = result.metrics[-1]["evaluation"]
    # Groups over all silos add up blocks; a silo adds up its groups, once by sex and once by age.
    found = {part["of"]: part["noise_std"] for part in last["parts"]}
    over_silos = math.sqrt(SILOS) if by_silo else 1.0
    pooled = 1 / math.sqrt(1 / 2 + 1 / 4) if columns == 2 else 1.0
    stated = {"sex": expected * over_silos, "silo": expected * pooled}
    assert found.keys() == ({"silo"} if by_silo else set()) | ({"sex", "age"} if columns == 2 else set())
    for of in found.keys() & stated.keys():
        assert found[of] == pytest.approx(stated[of], rel=1e-4)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_metrics_of_silos_cost_the_pooled_ones_no_noise(aggregator):
    """Persons: the blocks of all silos, added up, have the noise of the sum; for records it is √S times as large."""
    federation = federation_of()
    alone, _ = evaluate(federation, make(), aggregator)
    both, _ = evaluate(federation, make(by_silo=True), aggregator)
    first, second = (one.metrics[-1]["evaluation"]["noise_std"] for one in (alone, both))
    assert second == pytest.approx(first)
    for who, guarantee in alone.guarantees.items():
        # In integers a block has more cells, which costs little.
        assert both.guarantees[who].epsilon == pytest.approx(guarantee.epsilon, rel=1e-3)
    records = [evaluate(federation, make(by_silo=b), aggregator, RECORDS)[0] for b in (False, True)]
    first, second = (one.metrics[-1]["evaluation"]["noise_std"] for one in records)
    assert second == pytest.approx(first * math.sqrt(SILOS))


def test_a_silo_adds_noise_to_its_own_block_alone(monkeypatch):
    """So what another silo or the server knows of its own noise hides nobody's records."""
    seen: list[torch.Tensor] = []
    combine = PlainServer.combine
    monkeypatch.setattr(
        PlainServer, "combine", lambda self, shares: seen.append(shares) or combine(self, shares)
    )
    evaluate(federation_of(), make(by_silo=True, **BOTH))
    (shares,) = [one for one in seen if one.shape[1] == SILOS * 6 * 20]
    blocks = shares.reshape(SILOS, SILOS, 6 * 20)
    for silo in range(SILOS):
        for block in range(SILOS):
            assert bool((blocks[silo, block] != 0).all()) == (silo == block)
            assert bool((blocks[silo, block] == 0).all()) == (silo != block)


@pytest.mark.parametrize("silos", [2, 3, 10])
@pytest.mark.parametrize("unit", ["user", "record"])
def test_events_are_the_distance_over_the_noise_for_every_view(silos, unit):
    """Worst case by arithmetic: a unit with a full row in every silo that is in the sum and not the adversary's."""
    method = EvaluationSums(unit, 0.7, 2.0, CountTable("scores"), CountParts((SEX, AGE), silos))
    row = 2.0 * math.sqrt(2)
    std = 0.7 * row * (math.sqrt(silos) if unit == "user" else 1.0)
    for adversary in ("released", "server", "silo"):
        for survivors in range(1, silos + 1):
            for colluding in (1, 2) if adversary == "silo" else (1,):
                view = View(adversary, silos, survivors=survivors, noise_sized_for=1, colluding=colluding)
                # Colluding silos may be those that dropped out.
                honest = min(survivors, silos - colluding) if adversary == "silo" else survivors
                event = method.dp_event(view)
                if honest < 1:
                    assert isinstance(event, NonPrivate)
                    continue
                distance = row * (math.sqrt(honest) if unit == "user" else 1.0)
                assert event.noise_multiplier == pytest.approx(std / distance)


# --- what is shown ---


def test_small_parts_are_not_shown_and_the_rule_looks_at_noisy_counts_alone():
    federation = federation_of()
    shown, _ = evaluate(federation, make(0.0, clip=1000.0, **BOTH, least_group=20))
    parts = {part["name"]: part for part in shown.metrics[-1]["evaluation"]["parts"]}
    truth = count_truly(federation, shown.params).sum(axis=(0, 2))
    assert list(parts) == ["f", "m", "-9 to below -0.5", "-0.5 to below 0.5", "0.5 to 2", "others"]
    for name, records in zip(parts, truth, strict=True):
        assert parts[name]["shown"] == (records >= 20), name
        assert parts[name]["records"] == (records if records >= 20 else None)
        assert bool(parts[name]["estimates"]) == (records >= 20)
    assert {part["shown"] for part in parts.values()} == {True, False}
    # Noise of 3·σ·√2 = 12.7 in each of 20 cells: a group of 60 records is not told from none.
    noisy, _ = evaluate(federation, make(3.0, **BOTH, least_group=1))
    assert not any(part["shown"] for part in noisy.metrics[-1]["evaluation"]["parts"])


def test_settings_that_do_not_fit():
    federation = federation_of()

    def prepare(evaluation: Evaluation) -> Any:
        return prepare_run(federation, logistic_task(), AVG, rounds=1, evaluation=evaluation)

    with refused("evaluation.by"):
        prepare(make(by=("sex",)))  # no schema says its subgroups
    with refused("evaluation.by"):
        prepare(make(by=("sex",), ranges=(AGE,)))
    with refused("statistics.column"):
        prepare(make(by=("sex",), categories=(replace(SEX, place=0),)))
    many = replace(AGE, bounds=tuple(np.linspace(-9, 9, 4000)))
    with refused("evaluation.by"):
        prepare(make(by=("age",), ranges=(many,), by_silo=True))
    with refused("argument.conflict"):
        Evaluation("local", by_silo=True)


def test_evaluations_without_parts_do_not_name_them():
    """Runs hold these texts in their digests."""
    assert repr(make()) == (
        "Evaluation(across='sums', every=None, noise_multiplier=0.7, epsilon=None, clip=1.0, bins=10, times=())"
    )
    assert "parts" not in repr(EvaluationSums("user", 0.7, 1.0, CountTable("scores")))
    assert "spread" not in repr(CountTable("scores"))


def test_each_evaluation_is_charged_once_for_all_its_parts(tmp_path: Path):
    """ε of the run is that of its charges: rounds, and one event for each evaluation."""
    out = tmp_path / "run"
    result, _ = evaluate(federation_of(), make(every=1, by_silo=True, **BOTH), rounds=3, out=out)
    with reopen_ledger(out / "checkpoint" / "ledger.jsonl") as ledger:
        charges = Counter(c.events["released"] for c in ledger.history)
        assert sum(c.series == "evaluation" for c in ledger.history) == 3
    epsilon = compute_epsilon(list(charges.items()), 1e-5, "rdp")
    assert result.guarantees["released"].epsilon == pytest.approx(epsilon, rel=1e-6)


# --- labels, budgets, and ids that are not recognized ---


def with_labels(federation: Federation, labels: list[int]) -> Federation:
    """The first silo's held-out records get these labels first, all of person 0."""
    first, *others = federation.silos
    held = first.held_out
    y, user = held.y.copy(), held.user.copy()
    y[: len(labels)], user[: len(labels)] = labels, 0
    return replace(federation, silos=(replace(first, test=SiloData(first.name, held.x, y, user)), *others))


@pytest.mark.parametrize("label", [-1, 2, 7])
def test_a_held_out_label_of_no_class_is_refused(label):
    """It would count in the rows of other persons, and one person would move the counts by many clips."""
    with refused("data.federation") as error:
        with_labels(federation_of(), [label])
    assert f"label {label} is outside 0..1" in str(error.value)


def test_a_label_that_nobody_checked_moves_no_other_persons_row(monkeypatch):
    """A data set of a plug-in may have passed no check: what is counted stays in the row of whose record it is."""
    monkeypatch.setattr(Federation, "_check", lambda *_, **__: None)
    evaluation, federation = make(5.0, by_silo=True), federation_of()
    spec = prepare_run(federation, logistic_task(), AVG, rounds=1, evaluation=evaluation).derived[
        "evaluation"
    ]
    sums, whole = [], spec.method.spread(spec.population)
    for labels in ([0] * 39, [2 * k + 1 for k in range(1, 40)], [-k for k in range(1, 40)]):
        sums.append(evaluate(with_labels(federation, labels), evaluation)[1] / whole)
    # Records of one person in one silo change: a row of at most a clip becomes another one.
    for other in sums[1:]:
        assert np.linalg.norm(other - sums[0]) <= 2 * spec.bounds.clip


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
@pytest.mark.parametrize("by_silo", [False, True])
def test_an_evaluation_that_the_budget_forbids_does_not_end_the_run(aggregator, by_silo):
    """The next one has its number: silos expect every number, and the last is paid by what was reserved."""
    method = replace(AVG, noise_multiplier=20.0, server_learning_rate=1.0)
    train_with = {"rounds": 6, "aggregator": aggregator, "seed": 0, "accountant": "rdp"}
    once = train(
        federation_of(), logistic_task(), method, evaluation=make(2.0, by_silo=by_silo), **train_with
    )
    budget = {"epsilon": once.epsilon * 1.05, "delta": 1e-5}
    often = make(2.0, by_silo=by_silo, every=2)
    result = train(federation_of(), logistic_task(), method, evaluation=often, budget=budget, **train_with)
    assert result.epsilon <= budget["epsilon"]
    measured = [row["round"] for row in result.metrics if row.get("metrics")]
    assert measured[-1] == result.metrics[-1]["round"]
    assert len(measured) < 3, "one was forbidden"


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_two_ids_in_one_silo_move_counts_side_by_side_as_far_as_is_printed(aggregator):
    """One id has a row in every silo's block, the second one in the first silo's alone: √(2² + S − 1) of √S."""
    # The training costs little, so that what is printed is about the counts.
    noise = {"plain": 1e4, "masked": 300.0}[aggregator]
    method = replace(AVG, noise_multiplier=noise, server_learning_rate=1.0)
    result = train(
        federation_of(), logistic_task(), method, rounds=1, aggregator=aggregator, accountant="rdp",
        evaluation=make(2.0, by_silo=True), seed=0,
    )  # fmt: skip
    for adversary, silos in (("released", SILOS), ("server", SILOS), ("silo", SILOS - 1)):
        guarantee = result.guarantees[adversary]
        printed = {row["case"]: row["epsilon"] for row in guarantee.linkage}["two ids in one silo"]
        # Another silo subtracts its own block; of the noise of the others each block has its own.
        multiplier = 2.0 * math.sqrt(SILOS / silos) / math.sqrt((silos + 3) / silos)
        assert printed >= compute_epsilon([(Gaussian(multiplier), 1)], guarantee.delta, "rdp") * (1 - 1e-6)
