"""Whole runs with a budget for every record: what is charged, told, kept and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Gaussian, PoissonSampled, RevealedSample, SelfComposed
from silodp.accounting.ledger import Ledger
from silodp.methods import FederationSize, Method
from silodp.methods.base import LocalContext
from silodp.methods.dp_sgd import DpSgd
from silodp.runtime.callback import Result
from silodp.runtime.checkpoint import Checkpoint
from silodp.runtime.server import Server
from silodp.runtime.silo import Silo
from silodp.runtime.train import train
from silodp.wire.messages import Message
from silodp.wire.store import DirectoryStore
from silodp_budgets.rpdp.method import Rpdp, RpdpDropout, RpdpMinimum
from silodp_budgets.rpdp.renyi_filter import RpdpFilter
from support.oracles import logistic_task, small_federation
from support.refusals import refused

DELTA = 1e-3
COMMON = {
    "noise_multiplier": 4.0,
    "clip": 0.5,
    "local_steps": 5,
    "delta": DELTA,
    "expected_batch_size": 8.0,
    "local_learning_rate": 0.5,
}
RPDP = Rpdp(**COMMON, rounds=4, largest_budget=3.0)
FILTER = RpdpFilter(**COMMON, largest_budget=3.0)
WHOLE = small_federation(records=90).with_budgets("three-levels", seed=1)
MIXED = small_federation(records=90).with_budgets("mixture", seed=1)


def run(method: Method, rounds: int = 4, **options: object) -> Result:
    federation = options.pop("federation", WHOLE)
    settings = {"seed": 0, "delta": DELTA, "accountant": "rdp", "evaluate_every": 10} | options
    return train(federation, logistic_task(), method, rounds=rounds, **settings)  # type: ignore[arg-type]


@pytest.fixture
def silos(monkeypatch: pytest.MonkeyPatch) -> list[Silo]:
    """The silos of every run, to look into their books."""
    made: list[Silo] = []

    class Seen(Silo):
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, **named)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr("silodp.runtime.series.Silo", Seen)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("aggregator", ["plain", "masked"])
@pytest.mark.parametrize(
    "method",
    [
        RPDP,
        replace(RPDP, client_sampling=0.5, ledger="realized", optimizer="adam"),
        RpdpMinimum(**COMMON, rounds=4, budget=0.1),
        RpdpDropout(**COMMON, rounds=4, threshold=1.0),
        FILTER,
    ],
    ids=lambda method: method.name,
)
def test_every_method_runs_repeats_with_its_seed_and_promises_to_everyone(method, aggregator):
    first, again = (run(method, 2, aggregator=aggregator) for _ in range(2))
    assert torch.equal(first.params, again.params)
    assert not torch.equal(first.params, run(method, 2, aggregator=aggregator, seed=1).params)
    for guarantee in first.guarantees.values():
        assert guarantee.unit == "record"
        assert guarantee.private
        assert guarantee.epsilon > 0
        assert guarantee.epsilon == first.epsilon, (
            "only its silo's own noise protects a record, whoever looks"
        )
        assert guarantee.groups
        assert guarantee.persons
        assert guarantee.persons[0][0] == 2
    json.dumps(first.guarantees["released"].to_dict())


def test_the_ledger_charges_the_two_stage_event_of_the_largest_budget_and_ends_with_the_last_record(tmp_path):
    method = replace(RPDP, client_sampling=0.6)
    last = method.budgets.last
    result = run(method, last + 3, out=tmp_path)
    with Ledger(tmp_path / "checkpoint" / "ledger.jsonl", DELTA, "rdp", run=run_id(tmp_path)) as ledger:
        charged = [charge.events["released"] for charge in ledger.history]
    steps = SelfComposed(PoissonSampled(method.budgets.most, Gaussian(4.0)), 5)
    assert charged[:last] == [RevealedSample(0.6, steps)] * last
    assert charged[last:] == [Gaussian(float("inf"))] * 3
    spent = [row["epsilon"]["released"] for row in result.metrics]
    assert spent[last] == spent[-1] <= 3.0
    assert result.epsilon == pytest.approx(
        compute_epsilon([(RevealedSample(0.6, steps), last)], DELTA, "rdp")
    )


def run_id(directory: Path) -> str:
    with (directory / "checkpoint" / "ledger.jsonl").open() as file:
        return str(json.loads(file.readline())["run"])


@pytest.mark.slow
@pytest.mark.parametrize("book", ["planned", "realized"])
def test_no_record_is_charged_more_than_it_asked_for_in_a_run_of_any_length(book, monkeypatch, silos):
    """From the rates that DP-SGD was really run with, by the records' book and by another accountant (PLD)."""
    method = replace(RPDP, client_sampling=0.5, ledger=book, local_steps=3)
    rates: dict[int, list[tuple[int, np.ndarray]]] = {}
    plain = DpSgd.train

    def spied(self: DpSgd, work: LocalContext, own: np.ndarray, keep: object = None) -> object:
        rates.setdefault(work.silo, []).append((work.round, own.copy()))
        return plain(self, work, own, keep)  # type: ignore[arg-type]

    monkeypatch.setattr(DpSgd, "train", spied)
    rounds = method.budgets.last + 4
    result = run(method, rounds, federation=MIXED)
    for s, silo in enumerate(MIXED.silos):
        joined = np.stack([own for _, own in rates[s]])
        assert 0 < len(joined) < rounds, "it stayed out at times"
        for record in range(0, len(silo), 20):
            drawn = joined[:, record]
            q = float(drawn.max())
            if book == "realized":
                events = [(method.budgets.run.event(q, "realized"), int((drawn > 0).sum()))]
            else:
                last = method.budgets.rates_and_retirement(silo.budget[record : record + 1])[1][0]
                assert not any(own[record] for round_, own in rates[s] if round_ >= last)
                events = [(method.budgets.run.event(q), int(last))]
            assert compute_epsilon(events, DELTA, "rdp") <= silo.budget[record] * (1 + 1e-6)
            if record % 40 == 0:  # it takes longer
                assert compute_epsilon(events, DELTA, "pld") <= silo.budget[record] * (1 + 1e-6)
        spent = silos[s].record_accounts()
        assert (spent["spent"] <= silo.budget).all()
        assert (spent["spent"] > 0.5 * spent["protected"]).any()
    assert sum(group["units"] for group in result.guarantees["released"].groups) == 90
    told = "planned" if book == "planned" else "realized"
    assert all(g[told] <= g["budget"] * (1 + 1e-6) for g in result.guarantees["released"].groups)


def test_a_silo_that_is_not_drawn_sends_zeros_and_nobody_else_is_scaled_up(monkeypatch):
    totals = []
    plain = Server.step

    def spied(self: Server, before: Checkpoint, total: torch.Tensor) -> Checkpoint:
        totals.append(total)
        return plain(self, before, total)

    monkeypatch.setattr(Server, "step", spied)
    method = replace(RPDP, client_sampling=0.2, rounds=12)
    result = run(method, 12)
    empty = [bool((total == 0).all()) for total in totals]
    assert any(empty), "an empty round is a round, and it is charged"
    assert not all(empty)
    assert result.guarantees["released"].rounds == 12
    assert method.server_scale(FederationSize(3, 12)) == pytest.approx(1 / 0.6)


class Dies(Exception):
    """The process is gone."""


@pytest.mark.parametrize(
    "method", [replace(RPDP, client_sampling=0.8), FILTER], ids=lambda method: method.name
)
@pytest.mark.slow
def test_a_run_that_dies_between_any_two_writes_goes_on_as_if_it_had_not(method, tmp_path, monkeypatch):
    """Memory is written before the answer: a repeated round reads what was there before it, and spends once."""
    straight = run(method, 3, out=tmp_path / "straight")
    for death in ("/memory/1/0", "/update/1/0", "round/1/clients", "/memory/2/0"):
        for after in (False, True):
            place = tmp_path / death.replace("/", "-") / str(after)
            with monkeypatch.context() as patched:
                patched.setattr(DirectoryStore, "put", dying(death, after))
                with pytest.raises(Dies):
                    run(method, 3, out=place)
                resumed = run(method, 3, out=place, resume=True)
            assert torch.equal(resumed.params, straight.params)
            assert resumed.epsilon == straight.epsilon
            for silo in ("000", "001", "002"):
                assert memory(place, silo) == memory(tmp_path / "straight", silo)
            with Ledger(place / "checkpoint" / "ledger.jsonl", DELTA, "rdp", run=run_id(place)) as ledger:
                assert [(c.round, c.release) for c in ledger.history] == [(0, 0), (1, 0), (2, 0)]


def dying(key_end: str, after: bool) -> Callable[[DirectoryStore, str, bytes], None]:
    """A `put` that dies once, before or after it wrote the first key with this end."""
    plain, left = DirectoryStore.put, [True]

    def put(self: DirectoryStore, key: str, value: bytes) -> None:
        dies = left[0] and key.endswith(key_end)
        if not dies or after:
            plain(self, key, value)
        if dies:
            left[0] = False
            raise Dies

    return put


def memory(directory: Path, silo: str) -> dict[str, bytes]:
    """What a silo keeps, by round: a message whose header names the run."""
    store = DirectoryStore(directory / "checkpoint" / "silos" / silo)
    kept = {key.split("/", 1)[1]: store.get(key) for key in store.names() if "/memory/" in key}
    assert len(kept) <= 2, "the last, and the one before it to repeat a round with"
    return {k: Message.decode(v).arrays["memory"].tobytes() for k, v in kept.items() if v is not None}


def test_what_the_filter_has_spent_lives_through_rounds_and_stays_in_the_silo(silos, tmp_path):
    result = run(replace(FILTER, noise_multiplier=6.0), 4, federation=MIXED, out=tmp_path)
    inside = []
    for silo, data in zip(silos, MIXED.silos, strict=True):
        book = silo.record_accounts()
        assert (book["spent"] <= book["limit"]).all()
        assert (book["spent"][book["active"] > 0] > 0).all()
        assert len(book["asked"]) == len(data)
        inside.append(book["active"])
    still = np.concatenate(inside)
    assert 0 < still.sum() < len(still)
    assert all(group["realized"] is None for group in result.guarantees["released"].groups)
    server = DirectoryStore(tmp_path / "checkpoint" / "server")
    assert not any("memory" in key for key in server.names())
    assert "active" not in (tmp_path / "guarantee.json").read_text()


def test_those_left_out_by_dropout_are_in_the_silos_book_with_nothing_spent(silos):
    run(RpdpDropout(**COMMON, rounds=2, threshold=1.0), 2)
    for silo, data in zip(silos, WHOLE.silos, strict=True):
        book = silo.record_accounts()
        np.testing.assert_array_equal(book["spent"] > 0, data.budget >= 1.0)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (
            {"federation": small_federation(records=90)},
            "data.budgets",
        ),
        ({"delta": 1e-5}, "argument.conflict"),
        (
            {"federation": small_federation(records=9).with_budgets("pareto")},
            "data.too_few_records",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(options, code, tmp_path):
    with refused(code):
        run(RPDP, 2, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_scf_reports_its_violations_and_promises_the_true_cost():
    method = replace(RPDP, noise_multiplier=2.0, rounds=15, calibration="scf", largest_budget=5.0)
    result = run(method, 15, federation=MIXED)
    groups = result.guarantees["released"].groups
    assert sum(group["overspent"] for group in groups) > 0
    largest = max(group["planned"] for group in groups)
    assert result.epsilon >= largest
    assert "fitted-curve" in [one.id for one in result.guarantees["released"].assumptions]
