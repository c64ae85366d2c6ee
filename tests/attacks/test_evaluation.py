"""Evaluation across silos: what is told of held-out records, and to whom.

Attacked are persons with held-out records. Without clipping, somebody with many of them moves the counts by as many;
without noise, counts show them outright; without a charge, a server asks again and again and averages the noise away;
without a stored answer, a restart draws fresh noise for the same counts. In each case the run would report the same ε.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Gaussian, Skellam
from silodp.accounting.ledger import Budget, Ledger, reopen_ledger
from silodp.accounting.series_ledger import SeriesLedger
from silodp.accounting.views import ADVERSARIES
from silodp.aggregators import Plain
from silodp.aggregators.masked import Masked
from silodp.aggregators.plain import PlainServer
from silodp.aggregators.series import name_series
from silodp.crypto.keys import Identity
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.methods import Ddp, UldpAvg
from silodp.report.model_card import write_card
from silodp.report.page import write_report
from silodp.runtime.callback import Result
from silodp.runtime.gate import Gate
from silodp.runtime.prepare import prepare_run
from silodp.runtime.run_files import STATE
from silodp.runtime.series import SiloWithSeries, make_silo
from silodp.runtime.server import Server
from silodp.runtime.silo import make_ledger
from silodp.runtime.train import train
from silodp.training.metrics import accuracy, roc_auc
from silodp.training.sgd.local import LocalTraining
from silodp.wire.messages import Message
from silodp.wire.store import DirectoryStore, MemoryStore
from silodp.wire.transport import DeliveryFailure, InProcess
from silodp_analytics.evaluation.methods import EvaluationSums
from silodp_analytics.evaluation.results import LocalMetrics
from silodp_analytics.evaluation.series import Evaluation
from silodp_experiments.uldp_baselines import Default
from support.oracles import logistic_task, small_federation
from support.refusals import refused

STILL = UldpAvg(5.0, 0.5, LocalTraining(learning_rate=0.1), server_learning_rate=1e-49)
"""A move of 1e-49 is none in float32: the model does not change, and the true counts are the same in every round."""
LEARNING = replace(STILL, server_learning_rate=20.0)
RECORDS = Ddp(5.0, 0.5, 1, 0.2, 4.0, 1e-49)
SUMS = Evaluation("sums", noise_multiplier=0.7, bins=40)
AGGREGATORS = {"plain": Plain(), "masked": Masked()}


def evaluate(
    federation: Federation,
    aggregator: str = "plain",
    evaluation: Evaluation = SUMS,
    method=STILL,
    rounds: int = 1,
    seed: int | None = 0,
    **more,
) -> Result:
    return train(
        federation,
        logistic_task(),
        method,
        rounds=rounds,
        aggregator=AGGREGATORS[aggregator],
        seed=seed,
        evaluation=evaluation,
        **more,
    )


def counts_of(result: Result) -> np.ndarray:
    """The noisy counts of all evaluations, (evaluations, cells)."""
    rows = [row["evaluation"]["counts"] for row in result.metrics if "evaluation" in row]
    return np.array(rows).reshape(len(rows), -1)


def true_counts(federation: Federation, result: Result, table=None) -> np.ndarray:
    table = table or EvaluationSums("user", 1.0, 1.0, prepare_table()).table
    task, total = logistic_task(), np.zeros(table.size)
    for silo in federation.silos:
        x, y = task.tensors(silo.held_out.x, silo.held_out.y)
        cells = table.find_cells(task.predict(result.params, x), y)
        total += np.bincount(cells.flatten(), minlength=table.size)
    return total


def prepare_table():
    spec = prepare_run(small_federation(held_out=2), logistic_task(), STILL, rounds=1, evaluation=SUMS)
    return spec.derived["evaluation"].method.table


def with_held_out(federation: Federation, tests: list[SiloData]) -> Federation:
    silos = tuple(replace(silo, test=test) for silo, test in zip(federation.silos, tests, strict=True))
    return replace(federation, silos=silos)


def crowded(persons: int = 20, more: int = 40) -> tuple[Federation, Federation]:
    """Two neighboring worlds: person 0 has `more` equal held-out records in every silo, or none."""
    federation = small_federation(held_out=persons)
    own = federation.silos[0].held_out
    tests, without = [], []
    for silo in federation.silos:
        test = silo.held_out
        x = np.concatenate([test.x, np.repeat(own.x[:1], more, axis=0)])
        y = np.concatenate([test.y, np.repeat(own.y[:1], more)])
        user = np.concatenate([np.arange(1, persons + 1), np.zeros(more, np.int64)])
        tests.append(SiloData(silo.name, x, y, user))
        without.append(SiloData(silo.name, x[user != 0], y[user != 0], user[user != 0]))
    return with_held_out(federation, tests), with_held_out(federation, without)


# --- how far a person moves the counts, and under which noise ---


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("clip", [1.0, 3.0])
def test_a_person_moves_the_sum_by_at_most_the_clip(aggregator, clip):
    """The whole run in both worlds, with the same noise, which cancels: 120 records of a person count as `clip`."""
    both = [evaluate(world, aggregator, replace(SUMS, clip=clip)) for world in crowded()]
    first, second = map(counts_of, both)
    moved = np.linalg.norm(first - second) / 3  # counts are sums over 3 silos of weight 1/3 each, times 3
    assert moved <= clip * (1 + 1e-4)
    assert moved >= clip * 0.99, "the test does not reach the bound"


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_a_record_moves_the_sum_by_at_most_one_where_it_is_the_unit(aggregator):
    federation = small_federation(held_out=20)
    test = federation.silos[0].held_out
    fewer = SiloData(test.name, test.x[1:], test.y[1:], test.user[1:])
    neighbor = with_held_out(federation, [fewer, *(silo.held_out for silo in federation.silos[1:])])
    # By Rényi orders: ε is not what this is about, and the distribution of losses takes longer than the runs.
    both = [evaluate(world, aggregator, method=RECORDS, accountant="rdp") for world in (federation, neighbor)]
    first, second = map(counts_of, both)
    assert np.linalg.norm(first - second) == pytest.approx(1.0, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", [STILL, RECORDS], ids=["persons", "records"])
@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_the_noise_is_that_which_is_charged(aggregator, method, tmp_path):
    """Σ over silos of what was drawn has the standard deviation that the ledger's event states, in every evaluation."""
    federation, evaluation = small_federation(held_out=60), replace(SUMS, every=1, clip=1000.0)
    if method is RECORDS:
        evaluation = replace(evaluation, clip=1.0)
    result = evaluate(
        federation, aggregator, evaluation, method, rounds=25, out=tmp_path / "run", accountant="rdp"
    )
    noise = counts_of(result) - true_counts(federation, result)
    with reopen_ledger(tmp_path / "run" / "checkpoint" / "ledger.jsonl") as ledger:
        (event,) = {c.events["released"] for c in ledger.history if c.series == "evaluation"}
        assert sum(c.series == "evaluation" for c in ledger.history) == 25
    assert isinstance(event, Skellam if aggregator == "masked" else Gaussian)
    spread = 3 if method is STILL else 1
    assert noise.std() == pytest.approx(event.noise_multiplier * evaluation.clip * spread, rel=0.08)
    assert abs(noise.mean()) < 4 * noise.std() / np.sqrt(noise.size)
    assert result.metrics[-1]["evaluation"]["noise_std"] == pytest.approx(noise.std(), rel=0.08)


def test_every_share_that_the_server_sees_has_its_noise(monkeypatch, tmp_path):
    """Under `plain` the server is charged for seeing S shares, of which a person moves each by C/S."""
    seen = []
    combine = PlainServer.combine
    monkeypatch.setattr(
        PlainServer, "combine", lambda self, shares: seen.append(shares) or combine(self, shares)
    )
    federation = small_federation(held_out=60)
    evaluate(federation, "plain", replace(SUMS, every=1), rounds=25, out=tmp_path / "run")
    shares = torch.stack([share for share in seen if share.shape[1] == 80])  # (25, S, cells)
    noise = shares - shares.mean(dim=0)
    with reopen_ledger(tmp_path / "run" / "checkpoint" / "ledger.jsonl") as ledger:
        (event,) = {c.events["server"] for c in ledger.history if c.series == "evaluation"}
    assert float(noise.std(dim=0).mean()) == pytest.approx(event.noise_multiplier / np.sqrt(3), rel=0.05)


def test_training_and_evaluation_draw_different_noise():
    """With one seed both would have the same stream, if they did not have names of their own."""
    federation = small_federation(held_out=2)
    spec = prepare_run(federation, logistic_task(), STILL, rounds=1, seed=0, evaluation=SUMS)
    silo = make_silo(
        federation.silos[0], logistic_task(), replace(spec, run="r"), Randomness.from_seed(0), MemoryStore(),
        Identity.fresh("silo0"), {}, make_ledger(replace(spec, run="r")),
    )  # fmt: skip
    assert isinstance(silo, SiloWithSeries)
    request = Message("update", "r", 0)
    first, second = (
        one._derive_round_randomness(request, 0).stream("share noise").standard_normal(4)
        for one in (silo.training, silo.series["evaluation"])
    )
    assert not np.allclose(first, second)


# --- the charge ---


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_an_evaluation_is_charged_before_a_record_is_looked_at(aggregator, monkeypatch, tmp_path):
    def fail(self, context):
        raise SilodpError("the silo stops here", code="run.refused")

    monkeypatch.setattr(EvaluationSums, "local_update", fail)
    with refused("run.refused"):
        evaluate(small_federation(held_out=2), aggregator, out=tmp_path / "run")
    with reopen_ledger(tmp_path / "run" / "checkpoint" / "silo_ledgers" / "000.jsonl") as ledger:
        assert [charge.place for charge in ledger.history] == [("", 0, 0), ("evaluation", 0, 0)]
        spent = ledger.epsilon("released")
    monkeypatch.undo()
    result = evaluate(small_federation(held_out=2), aggregator, out=tmp_path / "run", resume=True)
    assert spent == pytest.approx(result.epsilon)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_a_silo_refuses_an_evaluation_beyond_its_limit(aggregator, monkeypatch):
    looked = []
    update = EvaluationSums.local_update
    monkeypatch.setattr(
        EvaluationSums, "local_update", lambda self, context: looked.append(1) or update(self, context)
    )
    federation = small_federation(held_out=2)
    aggregation = AGGREGATORS[aggregator]
    training = train(federation, logistic_task(), STILL, rounds=1, aggregator=aggregation, seed=0).epsilon
    whole = evaluate(federation, aggregator).epsilon
    assert whole > training * 1.5
    looked.clear()
    with refused("gate.budget"):
        evaluate(federation, aggregator, silo_limits={"released": whole * 0.99})
    assert not looked
    evaluate(federation, aggregator, silo_limits={"released": whole * 1.01})
    assert len(looked) == 3


def test_ledgers_of_server_and_silos_hold_the_evaluation(tmp_path):
    result = evaluate(
        small_federation(held_out=2), "masked", replace(SUMS, every=2), rounds=3, out=tmp_path / "run"
    )
    ledgers = [tmp_path / "run" / "checkpoint" / "ledger.jsonl"]
    ledgers += sorted((tmp_path / "run" / "checkpoint" / "silo_ledgers").iterdir())
    for path in ledgers:
        with reopen_ledger(path) as ledger:
            assert [(c.training_round, c.series, c.round) for c in ledger.history] == [
                (0, "", 0), (1, "", 1), (1, "evaluation", 0), (2, "", 2), (2, "evaluation", 1)
            ]  # fmt: skip
            assert ledger.rounds == 3
            for adversary, guarantee in result.guarantees.items():
                assert ledger.epsilon(adversary) >= guarantee.epsilon * (1 - 1e-9)
    training = train(
        small_federation(), logistic_task(), STILL, rounds=3, aggregator="masked", seed=0, accountant="rdp"
    )
    for adversary, guarantee in result.guarantees.items():
        assert guarantee.epsilon > training.guarantees[adversary].epsilon * 1.5


def test_a_report_finds_a_missing_or_changed_charge(tmp_path):
    run = tmp_path / "run"
    evaluate(small_federation(held_out=2), "plain", out=run)
    write_report(run)
    path = run / "checkpoint" / "ledger.jsonl"
    with reopen_ledger(path) as ledger:
        header = (ledger.delta, ledger.accountant.name, ledger.budget)
        history, name, subject = ledger.history, ledger.run, ledger.subject
    path.unlink()
    with Ledger(path, header[0], header[1], header[2], run=name, subject=subject) as rewritten:
        rewritten.charge(0, 0, history[0].events)
    with refused("report.contradicted"):
        write_report(run)
    path.unlink()
    with Ledger(path, header[0], header[1], header[2], run=name, subject=subject) as rewritten:
        rewritten.charge(0, 0, history[0].events)
        rewritten.charge(0, 0, {a: Gaussian(0.1) for a in history[1].events}, series="evaluation")
    with refused("report.contradicted"):  # ε in guarantee.json is smaller
        write_report(run)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_a_ledger_that_lost_an_evaluation_alone_is_noticed(aggregator, tmp_path):
    """It has all rounds, as an old copy may: ε of what the silos sent would be missing in guarantee and report."""
    federation, out = small_federation(held_out=20), tmp_path / "run"
    evaluate(federation, aggregator, rounds=2, seed=None, out=out)
    path = out / "checkpoint" / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))  # and the digests
    for rounds in (2, 3):
        with refused("checkpoint.mismatch"):
            evaluate(federation, aggregator, rounds=rounds, seed=None, out=out, resume=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
    for row in rows:
        row.pop("evaluation", None)
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with refused("report.contradicted"):
        write_report(out)


def test_files_of_two_runs_are_not_reported_as_one(tmp_path):
    """Alike in settings and rounds, one run may have paid for more releases than the other."""
    first, second = tmp_path / "first", tmp_path / "second"
    for out in (first, second):
        evaluate(small_federation(held_out=2), seed=None, out=out)
        write_card(out)
    ledger = Path("checkpoint") / "ledger.jsonl"
    (first / ledger).write_bytes((second / ledger).read_bytes())
    with refused("report.contradicted"):
        write_report(first)
    (first / STATE).write_bytes((second / STATE).read_bytes())
    with refused("report.contradicted"):
        write_report(first)
    (first / "guarantee.json").write_bytes((second / "guarantee.json").read_bytes())
    with refused("report.contradicted"):  # the model is that of the first run
        write_card(first)


# --- repetition ---


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_a_lost_result_is_repeated_with_the_same_noise(aggregator, monkeypatch, tmp_path):
    """The server dies before it keeps the sum, twice; noise is secret, and the same sum comes again."""
    sums, put, run_round = [], DirectoryStore.put, Server.run_round

    def put_no_result(self, key, value):
        if "result/" in key:
            raise OSError("no space left on device")
        put(self, key, value)

    def listen(self, round_, params, state):
        total = run_round(self, round_, params, state)
        if isinstance(self.spec.method, EvaluationSums):
            sums.append(total)
        return total

    monkeypatch.setattr(Server, "run_round", listen)
    federation, out = small_federation(held_out=20), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(DirectoryStore, "put", put_no_result)
        for resume in (False, True):
            with pytest.raises(OSError, match="no space"):
                evaluate(federation, aggregator, seed=None, out=out, resume=resume)
    result = evaluate(federation, aggregator, seed=None, out=out, resume=True)
    assert len(sums) == 3
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    np.testing.assert_allclose(counts_of(result)[0], sums[0] * 3, atol=6e-4)
    with reopen_ledger(out / "checkpoint" / "ledger.jsonl") as ledger:
        assert [charge.place for charge in ledger.history] == [("", 0, 0), ("evaluation", 0, 0)]


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_an_evaluation_that_was_begun_is_ended_before_the_next(aggregator, monkeypatch, tmp_path):
    """The last one is interrupted, and the run resumed with more rounds: silos answer each number about one model."""
    put, federation, out = DirectoryStore.put, small_federation(held_out=20), tmp_path / "run"

    def put_no_result(self, key, value):
        if "result/" in key:
            raise OSError("no space left on device")
        put(self, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(DirectoryStore, "put", put_no_result)
        with pytest.raises(OSError, match="no space"):
            evaluate(federation, aggregator, method=LEARNING, rounds=2, seed=None, out=out)
    result = evaluate(federation, aggregator, method=LEARNING, rounds=4, seed=None, out=out, resume=True)
    assert [row["round"] for row in result.metrics if "evaluation" in row] == [2, 4]
    with reopen_ledger(out / "checkpoint" / "ledger.jsonl") as ledger:
        assert [(c.series, c.round) for c in ledger.history] == [
            ("", 0), ("", 1), ("evaluation", 0), ("", 2), ("", 3), ("evaluation", 1)
        ]  # fmt: skip
        assert result.epsilon == ledger.epsilon("released")
    write_report(out)


@pytest.mark.parametrize("dies", ["before the sum is kept", "before the first silo is asked"])
@pytest.mark.parametrize("across", ["sums", "local"])
def test_an_evaluation_of_a_model_that_cannot_come_again_is_closed_as_spent(
    monkeypatch, tmp_path, across, dies
):
    """Killed in an evaluation, and resumed without a silo: the round before it has another sum, so another model.

    The others have answered that number about the first model. They do not answer it about the second: the run must
    leave the number, with its charge, and go on with the next one, or it never goes on.
    """
    put, ask = DirectoryStore.put, InProcess.ask
    federation, out = small_federation(silos=4, held_out=20), tmp_path / "run"
    evaluation = SUMS if across == "sums" else Evaluation("local")

    def put_no_result(self, key, value):
        is_early = dies == "before the first silo is asked" and key.startswith("evaluation/round/")
        if key.startswith("evaluation/result/") or is_early:
            raise OSError("no space left on device")
        put(self, key, value)

    def ask_without_one(self, requests, timeout=None):
        answers, failures = ask(self, {name: m for name, m in requests.items() if name != "silo3"})
        lost = {"silo3": DeliveryFailure("offline", "a test")} if "silo3" in requests else {}
        return answers, {**failures, **lost}

    settings = {
        "method": LEARNING, "rounds": 3, "seed": None, "out": out, "evaluation": replace(evaluation, every=1)
    }  # fmt: skip
    monkeypatch.setitem(AGGREGATORS, "masked", Masked(min_silos=3))
    with monkeypatch.context() as patch:
        patch.setattr(DirectoryStore, "put", put_no_result)
        with pytest.raises(OSError, match="no space"):
            evaluate(federation, "masked", **settings)
    monkeypatch.setattr(InProcess, "ask", ask_without_one)
    result = evaluate(federation, "masked", resume=True, **settings)
    assert len(result.metrics) == 4
    is_spent = dies == "before the sum is kept"  # of the three evaluations that the run may have
    with reopen_ledger(out / "checkpoint" / "ledger.jsonl") as ledger:
        numbers = [c.round for c in ledger.history if c.series == "evaluation"]
        assert numbers == ([0, 1, 2] if across == "sums" else [])
        assert result.epsilon == ledger.epsilon("released")
    if across == "sums":
        measured = [row["round"] for row in result.metrics if "evaluation" in row]
        write_report(out)
    else:
        lines = (out / "checkpoint" / "silo_metrics" / "000.jsonl").read_text().splitlines()
        measured = [json.loads(line)["round"] for line in lines]
    assert measured == ([1, 2] if is_spent else [1, 2, 3])


def lone_silo(limits=None, evaluation=SUMS, releases=None) -> SiloWithSeries:
    federation = small_federation(held_out=20)
    spec = prepare_run(
        federation, logistic_task(), STILL, rounds=50, evaluation=evaluation, silo_limits=limits
    )
    spec = replace(spec, run="r")
    silo = make_silo(
        federation.silos[0], logistic_task(), spec, Randomness.secret(), MemoryStore(), Identity.fresh("silo0"), {},
        make_ledger(spec), releases=releases,
    )  # fmt: skip
    assert isinstance(silo, SiloWithSeries)
    silo.answer(Message("setup", name_series("r", "evaluation")))
    return silo


def ask(number: int, model: float = 0.0, rounds: int = 1) -> Message:
    arrays = {"params": np.full(5, model, np.float32), "state.rounds": np.array([rounds])}
    return Message("update", name_series("r", "evaluation"), number, arrays=arrays)


def test_a_server_that_asks_again_gets_the_same_counts():
    silo = lone_silo()
    first = silo.answer(ask(0))
    assert np.array_equal(silo.answer(ask(0)).arrays["share"], first.arrays["share"])
    with refused("gate.answered"):
        silo.answer(ask(0, model=1.0))
    with refused("gate.answered"):
        silo.answer(ask(0, rounds=2))
    with refused("gate.round_left_out"):
        silo.answer(ask(2))
    assert len(silo.training.gate.ledger.history) == 1


def test_a_server_that_averages_the_noise_away_is_stopped_by_the_limit():
    silo, answered = lone_silo({"server": 10.0}), 0
    with refused("gate.budget"):
        for number in range(50):
            silo.answer(ask(number))
            answered += 1
    assert 0 < answered < 20
    spent = silo.training.gate.ledger.epsilon_after({"server": Gaussian(1e5)}, "server")
    assert spent is not None
    assert spent <= 10.01


def test_a_silo_answers_no_more_evaluations_than_were_agreed():
    silo = lone_silo(releases={"evaluation": 2})
    for number in range(2):
        silo.answer(ask(number))
    with refused("gate.rounds"):
        silo.answer(ask(2))


def test_charging_is_what_stops_it(monkeypatch):
    """The same server, with a silo that does not charge: it answers for ever. So the test above can fail."""
    monkeypatch.setattr(Gate, "charge", lambda self, request: None)
    silo = lone_silo({"server": 10.0})
    for number in range(50):
        silo.answer(ask(number))


# --- evaluation within silos ---


def test_nothing_leaves_a_silo_that_evaluates_for_itself(monkeypatch, tmp_path):
    answers = []
    ask_all = InProcess.ask

    def listen(self, requests, timeout=None):
        found = ask_all(self, requests, timeout)
        answers.extend(Message.decode(data[72:]) for data in found[0].values())
        return found

    monkeypatch.setattr(InProcess, "ask", listen)
    federation, task = small_federation(held_out=20), logistic_task()
    evaluation = Evaluation("local", every=2)
    result = evaluate(federation, "plain", evaluation, LEARNING, rounds=3, out=tmp_path / "run")
    about = [answer for answer in answers if answer.run.endswith("-evaluation")]
    assert len(about) == 3 + 2 * 3
    assert all(not (answer.fields or answer.arrays or answer.blobs) for answer in about)
    alone = train(federation, task, LEARNING, rounds=3, aggregator="plain", seed=0)
    assert {a: g.epsilon for a, g in result.guarantees.items()} == {
        a: g.epsilon for a, g in alone.guarantees.items()
    }
    assert torch.equal(result.params, alone.params)
    assert all(row.get("metrics", {}) == {} and row.get("loss") is None for row in result.metrics)
    for place, silo in enumerate(federation.silos):
        path = tmp_path / "run" / "checkpoint" / "silo_metrics" / f"{place:03}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["round"] for row in rows] == [2, 3]
        expected = task.evaluate(result.params, silo.held_out.x, silo.held_out.y)
        assert rows[-1]["loss"] == pytest.approx(expected["loss"])
        assert rows[-1]["metrics"]["accuracy"] == pytest.approx(expected["accuracy"])
        assert path.stat().st_mode & 0o077 == 0


def test_whether_a_metric_fails_on_its_records_does_not_leave_a_silo(monkeypatch, caplog):
    def fail(self, *_):
        raise SilodpError("a record that no metric can take", code="metric.raised")

    monkeypatch.setattr(LocalMetrics, "note", fail)
    silo = lone_silo(evaluation=Evaluation("local"))
    answer = silo.answer(ask(0))
    assert (answer.fields, answer.arrays, answer.blobs) == ({}, {}, {})
    assert "could not evaluate the model" in caplog.text


def test_a_silo_that_answers_more_than_nothing_is_refused():
    spec = prepare_run(
        small_federation(held_out=2), logistic_task(), STILL, rounds=1, evaluation=Evaluation("local")
    )
    derived = spec.derived["evaluation"]
    script = derived.aggregator.script(derived, "silo0")
    with refused("message.malformed"):
        script.update.answer.check(Message("update", "r", arrays={"accuracy": np.ones(1)}), "silo 'silo0'")


# --- the metrics ---


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_without_noise_the_sums_are_the_pooled_metrics(aggregator):
    federation = small_federation(held_out=60)
    exact = Evaluation("sums", noise_multiplier=0.0, clip=1000.0, bins=40)
    result = evaluate(federation, aggregator, exact, LEARNING, rounds=2)
    x = np.concatenate([silo.held_out.x for silo in federation.silos])
    y = torch.from_numpy(np.concatenate([silo.held_out.y for silo in federation.silos]))
    outputs = logistic_task().predict(result.params, torch.from_numpy(x))
    row = result.metrics[-1]
    tolerance = (
        1e-9 if aggregator == "plain" else 0.02
    )  # masked sums are truncated to a grid of 1000/2^20 records
    assert row["metrics"]["accuracy"] == pytest.approx(accuracy(outputs, y), abs=tolerance)
    band = row["evaluation"]["estimates"]["roc_auc"]
    assert band["low"] - tolerance <= roc_auc(outputs, y) <= band["high"] + tolerance
    assert sum(map(sum, row["evaluation"]["counts"])) == pytest.approx(180, abs=1)
    assert result.guarantees["released"].epsilon is None


def test_silos_without_held_out_records_send_noise_alone():
    federation = small_federation(held_out=60)
    nothing = [replace(silo, test=None).held_out for silo in federation.silos[1:]]
    one = with_held_out(federation, [federation.silos[0].held_out, *nothing])
    result = evaluate(one, "masked", replace(SUMS, noise_multiplier=0.01, clip=2.0))
    noise = 3 * 0.01 * 2.0 * np.sqrt(80)
    assert sum(map(sum, result.metrics[-1]["evaluation"]["counts"])) == pytest.approx(60, abs=5 * noise)


def test_a_budget_leaves_room_for_the_last_evaluation():
    federation = small_federation(held_out=20)
    budget = {"epsilon": 8.0, "delta": 1e-5}
    result = evaluate(federation, "plain", rounds=500, budget=budget)
    assert result.stopped == "budget"
    assert result.epsilon <= 8.0
    assert "evaluation" in result.metrics[-1]
    alone = train(federation, logistic_task(), STILL, rounds=500, seed=0, budget=budget)
    assert 1 < result.guarantees["released"].rounds < alone.guarantees["released"].rounds


def test_only_the_last_evaluation_spends_what_is_reserved_for_it():
    event = dict.fromkeys(ADVERSARIES, Gaussian(2.0))
    room_for_two = Budget(compute_epsilon([(Gaussian(2.0), 2)], 1e-5, "pld") * 1.001, 1e-5)
    ledger = Ledger(None, 1e-5, "pld", room_for_two, run="run")
    ledger.reserved, charges = {"evaluation": event}, SeriesLedger(ledger, "evaluation")
    assert charges.affords(event)
    charges.charge(0, 0, event)
    assert not charges.affords(event)
    charges.is_last = True
    assert charges.affords(event)
    assert ledger.reserved == {"evaluation": event}  # a round of training has no room left
    assert not ledger.affords(event)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("evaluation.unit", {"method": Default(LocalTraining(learning_rate=0.1))}),
        ("evaluation.noise", {"evaluation": {"across": "sums"}}),
        ("evaluation.noise", {"evaluation": {"across": "sums", "epsilon": 1.0, "noise_multiplier": 1.0}}),
        ("argument.value", {"evaluation": {"across": "pooled"}}),
        ("argument.value", {"evaluation": {"noise_multiplier": 1.0}}),
        ("argument.type", {"evaluation": "sums"}),
        ("budget.out_of_reach", {"budget": {"epsilon": 1.0, "delta": 1e-5}}),
    ],
)
def test_what_is_not_proven_is_refused(code, changes):
    settings = {"method": STILL, "evaluation": SUMS, "rounds": 1, **changes}
    with refused(code):
        prepare_run(small_federation(held_out=2), logistic_task(), **settings)


def test_noise_for_an_epsilon_costs_at_most_that():
    federation = small_federation(held_out=2)
    for aggregator in AGGREGATORS:
        spec = prepare_run(
            federation, logistic_task(), STILL, rounds=3, aggregator=AGGREGATORS[aggregator],
            evaluation=Evaluation("sums", epsilon=1.5),
        )  # fmt: skip
        with make_ledger(replace(spec, run="r")) as ledger:
            ledger.charge(0, 0, spec.derived["evaluation"].round_events(), series="evaluation")
            assert 1.45 < ledger.epsilon("released") <= 1.5
