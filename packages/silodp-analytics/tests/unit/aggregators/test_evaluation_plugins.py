"""Evaluation by sums under aggregators that are not part of the package: who adds, with which noise, at which ε.

ε of an evaluation is computed from the views and the event of the aggregator that adds the counts. If that were not the
aggregator whose noise is drawn, or if it showed more than the run's own, the printed ε or the table of who sees what
would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plugins.trimmed import Trimmed
from silodp.accounting.events import Event, Gaussian, Skellam, to_discrete
from silodp.accounting.ledger import reopen_ledger
from silodp.accounting.views import Adversary, View
from silodp.aggregators import Aggregator, Masked, Plain, RunSpec, SiloAggregator, SiloContext
from silodp.aggregators.base import Handler, LocalUpdateFn
from silodp.mechanisms.quantization import Quantizer
from silodp.methods import Method, UldpAvg
from silodp.report.page import write_report
from silodp.report.run_record import read_run
from silodp.runtime.callback import Result
from silodp.runtime.prepare import prepare_run
from silodp.runtime.train import train
from silodp.training.sgd.local import LocalTraining
from silodp.wire.messages import Message
from silodp_analytics.evaluation.series import Evaluation
from support.oracles import logistic_task, small_federation
from support.refusals import refused

# A model that does not change, so that the true counts are the same under every aggregator.
STILL = UldpAvg(5.0, 0.5, LocalTraining(learning_rate=0.1), server_learning_rate=1e-49)
SUMS = Evaluation("sums", noise_multiplier=0.7, bins=40)


@dataclass(frozen=True, repr=False)
class Mine(Plain):
    name = "mine"


@dataclass(frozen=True, repr=False)
class Integers(Plain):
    """Shares in clear, on a grid, with integer noise; it adds up counts itself."""

    name = "integers"
    adds_integers = True

    def event(self, spec: RunSpec, view: View) -> Event:
        assert spec.bounds is not None
        # Every share moves by an S-th of the clip at least, and fewer grid steps cost more.
        units = Quantizer.from_bounds(spec.bounds).units // spec.population.silos
        return to_discrete(spec.method.dp_event(view), units, spec.sum_size)

    def series_aggregator(self, spec: RunSpec) -> Aggregator | None:
        return self

    def silo(self, spec: RunSpec, context: SiloContext) -> SiloAggregator:
        return IntegerSilo(spec)


@dataclass(frozen=True)
class IntegerSilo:
    spec: RunSpec
    handlers: Mapping[str, Handler] = field(default_factory=dict)

    def group_secret(self, run: str) -> bytes:
        raise NotImplementedError("no users are sampled")

    def update(self, request: Message, work: LocalUpdateFn) -> tuple[Message, int]:
        assert self.spec.bounds is not None
        grid = Quantizer.from_bounds(self.spec.bounds)
        share = work(0).make_share(grid.add_noise)  # type: ignore[arg-type]
        return request.answer(share=share.value * grid.step), share.refused


@dataclass(frozen=True, repr=False)
class AddsElsewhere(Plain):
    """Adds integers, and has its counts added up in floating point by `plain`."""

    name = "adds-elsewhere"
    adds_integers = True


@dataclass(frozen=True, repr=False)
class Hiding(Plain):
    """Says that the server sees the sum alone, and has counts added up by `plain`, under which it sees all shares."""

    name = "hiding"

    def views(self, method: Method, silos: int, survivors: int | None = None) -> dict[Adversary, View]:
        views = super().views(method, silos, survivors)
        return {name: replace(view, sees_shares=False) for name, view in views.items()}


@dataclass(frozen=True, repr=False)
class Assuming(Plain):
    """Has counts added up by `masked`, whose assumptions it does not state."""

    name = "assuming"

    def series_aggregator(self, spec: RunSpec) -> Aggregator | None:
        return Masked()


@dataclass(frozen=True, repr=False)
class Disclosing(Plain):
    """Keeps a part of δ for what it discloses, and adds up counts itself."""

    name = "disclosing"
    delta_share = 0.5

    def disclosure(self, spec: RunSpec) -> Mapping[Adversary, float]:
        return {"server": 1e-9}

    def series_aggregator(self, spec: RunSpec) -> Aggregator | None:
        return self


@dataclass(frozen=True, repr=False)
class AddsNothing(Plain):
    name = "adds-nothing"

    def series_aggregator(self, spec: RunSpec) -> Aggregator | None:
        return None


def evaluate(aggregator: Aggregator, rounds: int = 1, out: Path | None = None, **more: Any) -> Result:
    return train(
        small_federation(held_out=60),
        logistic_task(),
        STILL,
        rounds=rounds,
        aggregator=aggregator,
        seed=0,
        evaluation=replace(SUMS, every=1),
        out=out,
        **more,
    )


def counts_of(result: Result) -> np.ndarray:
    return np.array([row["evaluation"]["counts"] for row in result.metrics if "evaluation" in row])


def charged(out: Path) -> Mapping[Adversary, Event]:
    with reopen_ledger(out / "checkpoint" / "ledger.jsonl") as ledger:
        return next(charge.events for charge in ledger.history if charge.series == "evaluation")


@pytest.mark.parametrize("aggregator", [Mine(), Trimmed(trim=1)], ids=["mine", "trimmed"])
def test_counts_of_a_subclass_of_plain_are_summed_and_charged_as_under_plain(
    aggregator: Plain, tmp_path: Path
) -> None:
    """Also where the subclass does not add: a trimmed mean of shares would be no table of counts."""
    own, plain = evaluate(aggregator, 2, tmp_path / "own"), evaluate(Plain(), 2, tmp_path / "plain")
    assert np.array_equal(counts_of(own), counts_of(plain))
    assert charged(tmp_path / "own") == charged(tmp_path / "plain")
    assert all(isinstance(event, Gaussian) for event in charged(tmp_path / "own").values())
    for adversary, guarantee in plain.guarantees.items():
        assert own.guarantees[adversary].epsilon >= guarantee.epsilon  # type: ignore[operator]
    more = evaluate(aggregator, 3, tmp_path / "own", resume=True)
    assert more.epsilon > own.epsilon  # type: ignore[operator]
    write_report(tmp_path / "own")
    assert read_run(tmp_path / "own").audit is not None


def test_an_aggregator_that_adds_integers_itself_is_charged_for_the_integer_noise_that_it_draws(
    tmp_path: Path,
) -> None:
    result = evaluate(Integers(), 25, tmp_path, accountant="rdp")
    event = charged(tmp_path)["released"]
    assert isinstance(event, Skellam)
    assert all(isinstance(event, Skellam) for event in charged(tmp_path).values())
    derived = prepare_run(
        small_federation(held_out=60),
        logistic_task(),
        STILL,
        rounds=25,
        aggregator=Integers(),
        evaluation=SUMS,
    ).derived["evaluation"]
    assert derived is not None
    assert derived.aggregator == Integers()
    # The counts are the same in all rounds: what differs is the noise, in counts of a person who may be in 3 silos.
    counts = counts_of(result).reshape(25, -1)
    drawn = (counts - counts.mean(axis=0)).std() * np.sqrt(25 / 24)
    assert drawn == pytest.approx(event.noise_multiplier * 3, rel=0.08)
    exact = derived.method.dp_event(Integers().views(derived.method, 3)["released"])
    assert isinstance(exact, Gaussian)
    assert event.noise_multiplier <= exact.noise_multiplier


@pytest.mark.parametrize(
    "aggregator",
    [AddsNothing(), Hiding(), AddsElsewhere(), Assuming(), Disclosing()],
    ids=lambda aggregator: aggregator.name,
)
def test_counts_are_added_by_nothing_that_promises_less_than_the_run(aggregator: Aggregator) -> None:
    settings = {"rounds": 1, "aggregator": aggregator}
    prepare_run(small_federation(held_out=60), logistic_task(), STILL, **settings)  # type: ignore[arg-type]
    with refused("evaluation.aggregator"):
        prepare_run(small_federation(held_out=60), logistic_task(), STILL, evaluation=SUMS, **settings)  # type: ignore[arg-type]
