"""An additional series that is no evaluation: every second round silos release a noisy count of their records.

It is one class with one method. Nothing of the server, gate, ledger, silos, guarantee, plan or canary run knows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Event, Gaussian
from silodp.accounting.ledger import Budget, Ledger, reopen_ledger
from silodp.accounting.series_ledger import SeriesLedger
from silodp.accounting.views import ADVERSARIES, View
from silodp.aggregators import RunSpec
from silodp.aggregators.series import Series, find_series, name_series
from silodp.crypto.keys import Identity
from silodp.mechanisms.clipping import Bounds, ClippedRowStream, clip_rows
from silodp.mechanisms.noise import Randomness
from silodp.methods import FederationSize, LocalContext, UldpAvg
from silodp.methods.base import SeriesMethod
from silodp.planning.plan import plan_run
from silodp.runtime.prepare import prepare_run
from silodp.runtime.series import SiloWithSeries, make_silo
from silodp.runtime.silo import make_ledger
from silodp.runtime.simulation import Simulation
from silodp.runtime.train import train
from silodp.training.sgd.local import LocalTraining
from silodp.wire.messages import Message
from silodp.wire.store import MemoryStore
from silodp_analytics.evaluation.series import Evaluation
from silodp_audit.attack.canary_run import run_canaries
from support.oracles import logistic_task, small_federation
from support.refusals import refused

AVG = UldpAvg(5.0, 0.5, LocalTraining(learning_rate=0.1))


@dataclass(frozen=True, repr=False)
class CountMethod(SeriesMethod):
    """Σ_s 1/S·Σ_u min(records of u in s, clip) + noise."""

    noise_multiplier: float = 1.0
    clip: float = 100.0
    name: str = field(default="record-count", init=False)

    @property
    def _sum(self) -> UldpAvg:
        return UldpAvg(self.noise_multiplier, self.clip)

    def sum_size(self, size: int) -> int:
        return 1

    def bounds(self, population: FederationSize) -> Bounds | None:
        return self._sum.bounds(population)

    def dp_event(self, view: View) -> Event:
        return self._sum.dp_event(view)

    def local_update(self, context: LocalContext) -> ClippedRowStream:
        owners, counts = torch.unique(context.user, return_counts=True)
        rows, silos = clip_rows(owners, counts.double()[:, None], self.clip), context.population.silos
        weighted = replace(rows, factors=rows.factors / silos, clip=self.clip / silos)
        bounds = self.bounds(context.population)
        assert bounds is not None
        return ClippedRowStream(iter([weighted]), 1, bounds, weighted=False)


@dataclass(frozen=True)
class RecordCount(Series):
    noise_multiplier: float = 0.05

    name: ClassVar[str] = "count"

    def is_due(self, round_: int, is_last: bool) -> bool:
        return round_ > 0 and round_ % 2 == 0

    def count(self, rounds: int) -> int:
        return rounds // 2

    def derive(self, spec: RunSpec) -> RunSpec:
        method, aggregator = (
            CountMethod("user", self.noise_multiplier),
            spec.aggregator.series_aggregator(spec),
        )
        return spec.for_series(self.name, method=method, aggregator=aggregator, rounds=self.count_most(spec))

    def describe_release(self, spec: RunSpec, total: np.ndarray | None) -> dict[str, Any]:
        return {} if total is None else {self.name: float(total[0]) * spec.population.silos}


def prepare(rounds: int = 4, **settings: Any) -> RunSpec:
    series = (RecordCount(),)
    return prepare_run(small_federation(), logistic_task(), AVG, rounds=rounds, series=series, **settings)


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_a_series_is_released_charged_and_planned(aggregator: str, tmp_path: Path) -> None:
    federation, task = small_federation(), logistic_task()
    settings: dict[str, Any] = {"rounds": 4, "aggregator": aggregator, "seed": 0, "accountant": "rdp"}
    result = train(federation, task, AVG, series=[RecordCount()], out=tmp_path / "run", **settings)
    alone = train(federation, task, AVG, **settings)
    assert torch.equal(result.params, alone.params)  # its noise is its own
    counted = {row["round"]: row["count"] for row in result.metrics if "count" in row}
    assert [*counted] == [2, 4]
    records = sum(map(len, federation.silos))
    noise = 3 * 0.05 * 100.0
    assert all(abs(count - records) < 5 * noise for count in counted.values())
    assert counted[2] != counted[4]
    # Pooled records measure the model as without it.
    assert [row.get("metrics") for row in result.metrics] == [row.get("metrics") for row in alone.metrics]
    places = [("", 0, 0), ("", 1, 0), ("count", 0, 0), ("", 2, 0), ("", 3, 0), ("count", 1, 0)]
    checkpoint = tmp_path / "run" / "checkpoint"
    for path in (checkpoint / "ledger.jsonl", *(checkpoint / "silo_ledgers").iterdir()):
        with reopen_ledger(path) as ledger:
            assert [entry.place for entry in ledger.history] == places
            assert ledger.rounds == 4
    plan = plan_run(prepare(aggregator=aggregator, accountant="rdp"), accountant="rdp")
    assert plan["count"]["times"] == 2
    for adversary, guarantee in result.guarantees.items():
        assert guarantee.epsilon == pytest.approx(plan["adversaries"][adversary]["epsilon"])
        before, of_count = alone.guarantees[adversary].epsilon, plan["count"]["epsilon"][adversary]
        assert None not in (guarantee.epsilon, before, of_count)
        assert guarantee.epsilon > max(before, of_count)  # type: ignore[operator, type-var]


def test_the_gate_answers_each_number_of_a_series_once() -> None:
    spec = replace(prepare(), run="r")
    silo = make_silo(
        small_federation().silos[0], logistic_task(), spec, Randomness.secret(), MemoryStore(),
        Identity.fresh("silo0"), {}, make_ledger(spec), releases={"count": 2},
    )  # fmt: skip
    assert isinstance(silo, SiloWithSeries)
    run = name_series("r", "count")
    silo.answer(Message("setup", run))

    def ask(number: int, model: float = 0.0) -> Message:
        arrays = {"params": np.full(spec.size, model, np.float32), "state.rounds": np.array([2])}
        return silo.answer(Message("update", run, number, arrays=arrays))

    first = ask(0)
    assert np.array_equal(ask(0).arrays["share"], first.arrays["share"])
    with refused("gate.answered"):
        ask(0, model=1.0)
    ask(1)
    with refused("gate.rounds"):
        ask(2)
    assert [entry.place for entry in silo.training.gate.ledger.history] == [("count", 0, 0), ("count", 1, 0)]


def test_a_canary_run_sees_what_a_series_releases() -> None:
    spec = prepare(accountant="rdp")
    canary_run = run_canaries(spec, Simulation(small_federation(), logistic_task())).of_series("count")
    rows = [row["count"] for row in canary_run.result.metrics if "count" in row]
    assert canary_run.sums is not None
    np.testing.assert_allclose(canary_run.sums[:, 0] * 3, rows)
    assert canary_run.shares is not None
    assert {share.shape for share in canary_run.shares.values()} == {(2, 1)}
    assert {*canary_run.charges.charged["released"].values()} == {2}


def test_two_series_release_in_their_order_and_each_keeps_its_part_of_the_budget() -> None:
    event = dict.fromkeys(ADVERSARIES, Gaussian(2.0))
    room = Budget(compute_epsilon([(Gaussian(2.0), 3)], 1e-5, "pld") * 1.001, 1e-5)
    ledger = Ledger(None, 1e-5, "pld", room, run="run")
    first, second = SeriesLedger(ledger, "first"), SeriesLedger(ledger, "second")
    ledger.reserved = {"first": event, "second": event}
    assert ledger.affords(event)
    ledger.charge(0, 0, event)
    assert not any(one.affords(event) for one in (ledger, first, second))
    first.is_last = second.is_last = True
    assert first.affords(event)
    first.charge(0, 0, event)
    assert not first.affords(event)  # the second one's part
    assert second.affords(event)
    second.charge(0, 0, event)
    assert not second.affords(event)
    assert [entry.place for entry in ledger.history] == [("", 0, 0), ("first", 0, 0), ("second", 0, 0)]


def test_series_have_names_of_their_own() -> None:
    federation, task = small_federation(held_out=20), logistic_task()
    for series in ([RecordCount(), RecordCount()], [RecordCount(), "count"]):
        with refused("argument.value" if len({*map(type, series)}) == 1 else "argument.type"):
            prepare_run(federation, task, AVG, rounds=1, series=series)
    both = prepare_run(
        federation, task, AVG, rounds=4, series=[RecordCount()], evaluation=Evaluation("sums", epsilon=2.0)
    )
    assert [*both.derived] == ["evaluation", "count"]
    assert find_series("evaluation") is Evaluation
    with refused("extension.missing"):
        find_series("nothing")
