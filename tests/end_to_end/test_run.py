"""Whole runs: what is released, charged, stored and resumed."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Gaussian
from silodp.accounting.ledger import Ledger
from silodp.aggregators import Plain
from silodp.data.federation import SiloData
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.methods import FederationSize, UldpAvg, UldpSgd
from silodp.runtime.server import Server
from silodp.runtime.silo import Silo, make_ledger
from silodp.runtime.train import train
from silodp.training.losses import Loss, cox, cross_entropy, squared_error
from silodp.training.metrics import concordance
from silodp.training.sgd.local import LocalTraining
from silodp.training.task import Task
from silodp.wire.messages import Message
from silodp.wire.store import MemoryStore
from silodp_experiments.uldp_baselines import Default, UldpGroup, UldpNaive
from support.oracles import judges_std, logistic_task, small_federation
from support.refusals import refused
from support.specs import make_spec

TRAIN = LocalTraining(learning_rate=0.1, epochs=2, batch_size=4)
AVG = UldpAvg(5.0, 0.5, TRAIN, server_learning_rate=20.0)
GROUP = UldpGroup(2.0, 0.5, 4, 0.2, local_steps=3, expected_batch_size=4, local_learning_rate=0.5)


@pytest.mark.parametrize(
    "method",
    [
        Default(TRAIN),
        UldpNaive(5.0, 0.5, TRAIN),
        GROUP,
        UldpSgd(5.0, 0.5, server_learning_rate=20.0),
        AVG,
        replace(AVG, weighting="records"),
        replace(AVG, user_sampling=0.5, server_momentum=0.5),
    ],
    ids=lambda method: method.name,
)
def test_every_method_runs_and_repeats_with_its_seed(method):
    federation = small_federation()
    first = train(federation, logistic_task(), method, rounds=3, seed=1)
    again = train(federation, logistic_task(), method, rounds=3, seed=1)
    other = train(federation, logistic_task(), method, rounds=3, seed=2)
    assert torch.equal(first.params, again.params)
    assert not torch.equal(first.params, other.params)
    assert [row["round"] for row in first.metrics] == [0, 1, 2, 3]
    assert all(0 <= row["metrics"]["accuracy"] <= 1 for row in first.metrics)
    assert first.guarantees["released"].private == (method.name != "default")
    assert not first.guarantees["released"].releasable, "noise from a seed is not for release"


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_without_a_seed_no_two_runs_are_alike_and_the_guarantee_may_be_released(aggregator, monkeypatch):
    """From one model on, so that it is the noise that differs, in every coordinate."""
    monkeypatch.setattr(Task, "initial", lambda self, seed: torch.zeros(self.size))
    runs = [
        train(small_federation(), logistic_task(), AVG, rounds=1, aggregator=aggregator) for _ in range(2)
    ]
    assert (runs[0].params != runs[1].params).all()
    assert all(run.guarantees["released"].releasable for run in runs)


def test_learning_happens():
    federation = small_federation(users=60, records=600)
    method = UldpAvg(0.5, 1.0, LocalTraining(learning_rate=0.5, epochs=5), server_learning_rate=10.0)
    result = train(federation, logistic_task(), method, rounds=10, seed=0)
    assert result.metrics[-1]["metrics"]["accuracy"] > 0.85
    assert (
        train(federation, logistic_task(), Default(TRAIN), rounds=10, seed=0).metrics[-1]["metrics"][
            "accuracy"
        ]
        > 0.85
    )


def noise_multiplier_of(printed: float, rounds: int, delta: float) -> float:
    """The σ whose Gaussian mechanism, composed, costs what was printed."""
    low, high = 1e-2, 1e4
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (
            (middle, high)
            if compute_epsilon([(Gaussian(middle), rounds)], delta) > printed
            else (low, middle)
        )
    return low


@pytest.mark.parametrize("weighting", ["uniform", "records"])
def test_the_noise_in_the_model_is_the_noise_of_the_printed_epsilon(weighting):
    """From the guarantee alone, without reading the method's σ: ε → σ → std of what the released models moved by."""
    federation, task = small_federation(silos=4, features=1500), logistic_task(1500)
    clip, rounds = 0.2, 3
    method = UldpAvg(4.0, clip, TRAIN, weighting, server_learning_rate=6.0)
    noisy = train(federation, task, method, rounds=rounds, seed=0)
    # The same updates without noise: clip so small that they vanish beside the noise of the noisy run.
    sigma = noise_multiplier_of(noisy.guarantees["released"].epsilon, rounds, 1e-5)
    start = task.initial(0)
    scale = 6.0 / (federation.users * 4)
    clear = train(federation, task, replace(method, noise_multiplier=0.0), rounds=1, seed=0)
    one = train(federation, task, method, rounds=1, seed=0)
    added = (one.params - clear.params).double().numpy()
    assert judges_std(added, scale * sigma * clip)
    assert np.linalg.norm((clear.params - start).numpy()) <= scale * clip * federation.users * 1.001


def test_printed_epsilon_is_that_of_the_method_and_stops_at_the_budget():
    federation, task = small_federation(), logistic_task()
    result = train(federation, task, AVG, rounds=5, seed=0)
    assert result.epsilon == pytest.approx(compute_epsilon([(Gaussian(5.0), 5)], 1e-5), rel=1e-6)
    budget = {"epsilon": result.epsilon * 1.0001, "delta": 1e-5}
    stopped = train(federation, task, AVG, rounds=50, seed=0, budget=budget)
    assert stopped.stopped == "budget"
    assert len(stopped.metrics) == 6, "the untrained model and five rounds"
    assert stopped.epsilon <= budget["epsilon"]


def test_a_budget_against_someone_who_is_promised_nothing_is_refused():
    with pytest.raises(SilodpError, match="counts"):
        train(
            small_federation(),
            logistic_task(),
            replace(AVG, weighting="records"),
            rounds=1,
            budget={"epsilon": 1.0, "delta": 1e-5, "adversary": "server"},
        )


def test_a_budget_too_small_for_one_round_is_refused_before_anything_is_written(tmp_path):
    budget = {"epsilon": 0.01, "delta": 1e-5}
    with pytest.raises(SilodpError, match="one round"):
        train(small_federation(), logistic_task(), AVG, rounds=1, budget=budget, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_each_adversary_gets_its_own_epsilon():
    result = train(small_federation(), logistic_task(), replace(AVG, user_sampling=0.3), rounds=4, seed=0)
    spent = {adversary: guarantee.epsilon for adversary, guarantee in result.guarantees.items()}
    known = result.guarantees["server"].sample_known
    assert spent["released"] == spent["server"] < spent["silo"] < known, (
        "amplified; knows the sample, and subtracts what is its own; would know the sample"
    )


def test_empty_silos_absent_people_and_empty_samples_are_normal():
    federation = small_federation(users=500)  # most have no record at all
    empty = SiloData("empty", np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    federation = replace(federation, silos=(*federation.silos, empty))
    for method in (
        AVG,
        replace(AVG, user_sampling=1e-9),
        replace(AVG, weighting="records"),
        GROUP,
        Default(TRAIN),
    ):
        result = train(federation, logistic_task(), method, rounds=2, seed=0)
        assert torch.isfinite(result.params).all()


def test_one_diverging_silo_does_not_poison_the_model():
    federation = small_federation()
    huge = replace(federation.silos[0], x=federation.silos[0].x * np.float32(1e38))
    federation = replace(federation, silos=(huge, *federation.silos[1:]))
    for method in (AVG, UldpNaive(5.0, 0.5, TRAIN)):
        result = train(federation, logistic_task(), method, rounds=2, seed=0)
        assert torch.isfinite(result.params).all()
        assert result.metrics[1]["refused"].get("silo0", 0) > 0, "reported"
        assert result.guarantees["released"].rounds == 2, "and charged"
    # Without privacy nothing is clipped; the sum is refused whole and the model stays as it was.
    result = train(federation, logistic_task(), Default(TRAIN), rounds=1, seed=0)
    assert torch.equal(result.params, logistic_task().initial(0))
    assert result.metrics[1]["refused"] == {"(sum)": 1}


class Nan(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) / 0.0 * 0.0


def test_a_loss_that_compares_records_is_refused_where_records_are_clipped(tmp_path):
    task = Task(torch.nn.Linear(4, 1), cox())
    with pytest.raises(SilodpError, match="mean over records"):
        train(small_federation(), task, GROUP, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_that_returns_nan_is_refused_before_anything_is_written(tmp_path):
    task = Task(Nan(), logistic_task().loss)
    with pytest.raises(SilodpError, match=r"(?i)nan|finite"):
        train(small_federation(), task, AVG, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- stored answers ---


NAMES = tuple(silo.name for silo in small_federation().silos)
SETTING = make_spec("run", NAMES, AVG, FederationSize(3, 12), 5)


def party(store: MemoryStore | None = None, ledger: Ledger | None = None) -> Silo:
    federation = small_federation()
    silo = Silo(
        federation.silos[0],
        logistic_task(),
        SETTING,
        Randomness.secret(),
        store or MemoryStore(),
        ledger=ledger,
    )
    silo.answer(Message("setup", "run"))
    return silo


def request(round_: int, value: float = 0.0) -> Message:
    return Message("update", "run", round_, arrays={"params": np.full(5, value, np.float32)})


def test_a_repeated_request_gets_the_same_noise_even_after_a_restart():
    store, ledger = MemoryStore(), make_ledger(SETTING)
    first = party(store, ledger).answer(request(0)).arrays["share"]
    np.testing.assert_array_equal(party(store, ledger).answer(request(0)).arrays["share"], first)
    assert not np.array_equal(party().answer(request(0)).arrays["share"], first), "noise is secret otherwise"


def test_another_request_under_an_answered_key_is_refused():
    silo = party()
    silo.answer(request(0))
    with refused("gate.answered"):
        silo.answer(request(0, value=1.0))


def test_a_round_long_past_is_not_answered_again():
    silo = party()
    silo.answer(request(0))
    silo.answer(request(1))
    with refused("gate.past"):
        silo.answer(replace(request(0), attempt=1))


@pytest.mark.parametrize("another", [{"round": 1}, {"attempt": 1}])
def test_a_silo_is_set_up_once_whatever_the_request_calls_itself(another):
    """Weights that change within a run are not those that its noise is for."""
    silo = party()
    with refused("gate.order"):
        silo.answer(Message("setup", "run", **another))


def test_answers_carry_nothing_but_the_noisy_share():
    answer = party().answer(request(0))
    assert set(answer.arrays) == {"share"}
    assert answer.fields == {}
    assert answer.blobs == {}


def test_an_update_before_the_setup_is_refused():
    federation = small_federation()
    silo = Silo(
        federation.silos[0],
        logistic_task(),
        SETTING,
        Randomness.secret(),
        MemoryStore(),
    )
    with refused("gate.order"):
        silo.answer(request(0))


# --- checkpoint and resume ---


def test_a_run_goes_on_where_it_stopped(tmp_path):
    federation, task = small_federation(), logistic_task()
    method = replace(AVG, user_sampling=0.5, server_momentum=0.5)
    whole = train(federation, task, method, rounds=6, seed=0)
    train(federation, task, method, rounds=2, seed=0, out=tmp_path)
    resumed = train(federation, task, method, rounds=6, seed=0, out=tmp_path, resume=True)
    assert torch.equal(whole.params, resumed.params)
    assert whole.epsilon == pytest.approx(resumed.epsilon, rel=1e-9)
    assert [row["round"] for row in resumed.metrics] == list(range(7))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(7))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"].ravel(), resumed.params[:4])


def test_resuming_without_a_seed_repeats_the_round_in_flight_byte_for_byte(tmp_path, monkeypatch):
    """The process dies after the silos answered and before the server kept the result."""
    federation, task = small_federation(), logistic_task()
    train(federation, task, AVG, rounds=2, out=tmp_path)
    released: list[np.ndarray] = []
    play = Server.run_round

    def dying(self, round_, params, *state):
        released.append(play(self, round_, params, *state).numpy())
        if len(released) == 1:
            raise KeyboardInterrupt
        return torch.from_numpy(released[-1])

    monkeypatch.setattr(Server, "run_round", dying)
    with pytest.raises(KeyboardInterrupt):
        train(federation, task, AVG, rounds=3, out=tmp_path, resume=True)
    result = train(federation, task, AVG, rounds=3, out=tmp_path, resume=True)
    np.testing.assert_array_equal(released[0], released[1])
    assert result.guarantees["released"].rounds == 3, "charged once"


def test_an_output_directory_is_not_overwritten(tmp_path):
    (tmp_path / "something").write_text("precious")
    with pytest.raises(SilodpError, match="not empty"):
        train(small_federation(), logistic_task(), AVG, rounds=1, out=tmp_path)


def damaged(kind: str, path: Path) -> None:
    data = path.read_bytes()
    match kind:
        case "flipped":
            path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "empty":
            path.write_bytes(b"")
        case "missing":
            path.unlink()


@pytest.mark.parametrize("kind", ["flipped", "cut", "empty", "missing"])
@pytest.mark.parametrize("name", ["state.safetensors", "ledger.jsonl"])
def test_a_damaged_checkpoint_or_ledger_is_one_sentence(kind, name, tmp_path):
    federation, task = small_federation(), logistic_task()
    train(federation, task, AVG, rounds=2, seed=0, out=tmp_path)
    damaged(kind, tmp_path / "checkpoint" / name)
    with pytest.raises(SilodpError) as caught:
        train(federation, task, AVG, rounds=4, seed=0, out=tmp_path, resume=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["method", "data", "seed", "model"])
def test_a_foreign_checkpoint_is_refused(change, tmp_path):
    arguments = {"federation": small_federation(), "task": logistic_task(), "method": AVG, "seed": 0}
    train(**arguments, rounds=1, out=tmp_path)
    arguments |= {
        "method": {"method": replace(AVG, noise_multiplier=0.1)},
        "data": {"federation": small_federation(seed=1)},
        "seed": {"seed": 1},
        "model": {"task": Task(torch.nn.Linear(4, 1, bias=False), logistic_task().loss)},
    }[change]
    with pytest.raises(SilodpError, match=r"other settings|other records than this run began with"):
        train(**arguments, rounds=2, out=tmp_path, resume=True)


def test_an_older_checkpoint_beside_a_newer_ledger_is_refused(tmp_path):
    """Otherwise a round could be drawn, and released, twice for one charge."""
    federation, task = small_federation(), logistic_task()
    train(federation, task, AVG, rounds=1, out=tmp_path)
    state = tmp_path / "checkpoint" / "state.safetensors"
    old = state.read_bytes()
    train(federation, task, AVG, rounds=3, out=tmp_path, resume=True)
    state.write_bytes(old)
    with pytest.raises(SilodpError, match="ledger"):
        train(federation, task, AVG, rounds=4, out=tmp_path, resume=True)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a process for every operation; two minutes on an idle core
def test_kill_9_at_every_durable_operation_loses_nothing_and_charges_once():
    """Each fsync, write, rename and deletion of a run in turn is where the process dies; then it is resumed."""
    program = Path(__file__).parents[1] / "support" / "killed.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    outcomes = [json.loads(line) for line in finished.stdout.splitlines()]
    *killed, whole = outcomes
    assert whole[1] == 0, "the last one was not killed"
    assert len(killed) > 50
    assert all(outcome[1] >= 1 for outcome in killed)
    for outcome in killed:
        assert outcome[2:] == whole[2:], (
            f"killed at operation {outcome[0]}: ε, rounds, metrics or model differ"
        )


def test_a_silo_that_lost_its_store_answers_nothing_more(tmp_path):
    """It would draw fresh noise for a round it may have answered: a second release for one charge."""
    federation, task = small_federation(), logistic_task()
    train(federation, task, AVG, rounds=1, out=tmp_path)
    shutil.rmtree(tmp_path / "checkpoint" / "silos" / "001")
    with refused("gate.rollback_detected"):
        train(federation, task, AVG, rounds=2, out=tmp_path, resume=True)


def test_the_checkpoint_holds_no_fingerprint_of_anyones_records(tmp_path):
    """A hash of all rows confirms a guess of the last unknown one; only the silo itself may keep one."""
    federation, task = small_federation(), logistic_task()
    flipped = replace(federation.silos[0], y=1 - federation.silos[0].y)
    other = replace(federation, silos=(flipped, *federation.silos[1:]))
    headers = []
    for name, these in (("a", federation), ("b", other)):
        train(these, task, AVG, rounds=0, seed=0, out=tmp_path / name)
        state = load_checkpoint_header(tmp_path / name / "checkpoint" / "state.safetensors")
        headers.append(state["fingerprint"])
    assert headers[0] == headers[1]


def load_checkpoint_header(path: Path) -> dict[str, object]:
    data = path.read_bytes()[32:]
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["checkpoint"])


@pytest.mark.parametrize(
    "method", [Default(TRAIN), replace(AVG, noise_multiplier=0.0), replace(AVG, weighting="records")]
)
def test_a_run_of_no_rounds_promises_no_more_than_the_method_does(method):
    guarantees = train(small_federation(), logistic_task(), method, rounds=0).guarantees
    assert guarantees["server"].epsilon is None
    assert not guarantees["server"].private
    assert guarantees["server"].reason


def test_dropout_follows_the_runs_randomness_and_not_torchs():
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    task = Task(network, logistic_task().loss)
    quiet = replace(GROUP, noise_multiplier=0.0)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(runs))
        runs.append(train(small_federation(), task, quiet, rounds=1, seed=seed).params)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    torch.manual_seed(0)
    secret = train(small_federation(), task, quiet, rounds=1).params
    torch.manual_seed(0)
    assert not torch.equal(secret, train(small_federation(), task, quiet, rounds=1).params)


def test_a_silo_that_gives_no_answer_is_named_and_the_round_repeated(tmp_path, monkeypatch):
    federation, task = small_federation(), logistic_task()
    train(federation, task, AVG, rounds=1, seed=0, out=tmp_path)
    broken = Silo._update

    def update(self: Silo, message: Message) -> Message:
        if self.name == "silo1":
            raise OSError("disk full")
        return broken(self, message)

    monkeypatch.setattr(Silo, "_update", update)
    with pytest.raises(SilodpError, match=r"silo1.*disk full"):
        train(federation, task, AVG, rounds=3, seed=0, out=tmp_path, resume=True)
    monkeypatch.setattr(Silo, "_update", broken)
    resumed = train(federation, task, AVG, rounds=3, seed=0, out=tmp_path, resume=True)
    assert torch.equal(resumed.params, train(federation, task, AVG, rounds=3, seed=0).params)
    assert resumed.guarantees["released"].rounds == 3


def test_a_loss_of_ones_own_is_used():
    loss = Loss.per_record("double", lambda outputs, targets: 2 * (outputs.squeeze(-1) - targets) ** 2)
    task = Task(torch.nn.Linear(4, 1), loss)
    result = train(small_federation(), task, AVG, rounds=1, seed=0)
    assert result.metrics[-1]["loss"] > 0


def test_numbers_of_numpy_are_numbers(tmp_path):
    plain = train(small_federation(), logistic_task(), AVG, rounds=2, seed=1, delta=1e-5)
    numpy = {
        "rounds": np.int64(2),
        "seed": np.int64(1),
        "delta": np.float64(1e-5),
        "evaluate_every": np.int32(1),
    }
    first = train(small_federation(), logistic_task(), AVG, **numpy | {"rounds": np.int64(1)}, out=tmp_path)
    resumed = train(small_federation(), logistic_task(), AVG, **numpy, out=tmp_path, resume=True)
    assert first.guarantees["released"].rounds == 1
    assert torch.equal(resumed.params, plain.params)


class Tied(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        self[2].weight = self[0].weight


def test_a_model_with_tied_parameters_is_stored_and_resumed(tmp_path):
    task = Task(Tied(), logistic_task().loss)
    train(small_federation(), task, AVG, rounds=1, seed=0, out=tmp_path)
    # As a run of a version that could not store it: everything is spent, and there is neither model nor guarantee.
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "guarantee.json").unlink()
    result = train(small_federation(), task, AVG, rounds=1, seed=0, out=tmp_path, resume=True)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["0.weight"], stored["2.weight"])
    model = Tied()
    model.load_state_dict(stored)
    assert torch.equal(task.flatten(model), result.params)
    assert result.guarantees["released"].rounds == 1
    assert not torch.equal(task.flatten(model), task.initial(0))


class ExtraState(torch.nn.Linear):
    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        pass


def refuses(*_):
    raise LookupError("no")


@pytest.mark.parametrize("held_out", [True, False])
@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: Task(ExtraState(4, 1), logistic_task().loss), "model.not_storable"),
        (lambda: Task(torch.nn.Linear(4, 1), Loss.per_record("own", refuses)), "loss.raised"),
        (
            lambda: Task(
                torch.nn.Linear(4, 1), Loss.per_record("mean", lambda o, t: (o[:, 0] - t).square().mean())
            ),
            "loss.not_per_record",
        ),
        (lambda: Task(torch.nn.Linear(4, 1), cross_entropy()), "loss.output_shape"),
        (lambda: Task(torch.nn.Linear(4, 1), cox()), "loss.wrong_labels"),
        (lambda: Task(torch.nn.Linear(4, 1), torch.nn.MSELoss()), "loss.wrong_labels"),
        (lambda: Task(torch.nn.Linear(4, 1), squared_error()), "loss.wrong_labels"),
    ],
)
def test_what_cannot_be_trained_or_stored_is_refused_before_anything_is_written(
    make, code, held_out, tmp_path
):
    federation = small_federation()
    with pytest.raises(SilodpError) as caught:
        train(federation if held_out else replace(federation, test=None), make(), AVG, rounds=3, out=tmp_path)
    assert caught.value.code == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("metric", "code"), [(concordance, "metric.wrong_labels"), (refuses, "metric.raised")]
)
def test_a_metric_that_cannot_be_measured_is_refused_before_anything_is_written(metric, code, tmp_path):
    task = Task(torch.nn.Linear(4, 1), logistic_task().loss, {"own": metric})
    with pytest.raises(SilodpError) as caught:
        train(small_federation(), task, AVG, rounds=3, out=tmp_path)
    assert caught.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_more_classes_than_a_loss_can_learn_are_refused(tmp_path):
    federation = replace(small_federation(), classes=3)
    with pytest.raises(SilodpError) as caught:
        train(federation, logistic_task(), AVG, rounds=1, out=tmp_path)
    assert caught.value.code == "loss.wrong_labels"


def test_how_many_persons_are_in_how_many_silos_is_said_in_private_files_only(tmp_path):
    federation = small_federation()
    train(federation, logistic_task(), AVG, rounds=1, seed=0, out=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = np.bincount((federation.counts() > 0).sum(0))
    assert rows[0]["persons_by_silos"] == {str(s): int(n) for s, n in enumerate(expected) if n}
    assert "persons_by_silos" not in rows[1]
    assert "persons_by_silos" not in (tmp_path / "guarantee.json").read_text()


def test_persons_whose_keys_may_be_one_are_warned_of_once_methods_protect_persons(caplog):
    federation = small_federation()
    keys = tuple(f"{u}" for u in range(federation.users))
    same = [replace(silo, user=silo.user % 2 + 2 * s) for s, silo in enumerate(federation.silos)]
    apart = replace(federation, silos=tuple(same), user_keys=keys)
    for linked, method, warned in (
        (apart, AVG, 1),
        (replace(apart, user_keys=None), AVG, 0),
        (apart, GROUP, 1),
    ):
        caplog.clear()
        train(linked, logistic_task(), method, rounds=0, seed=0)
        assert len([r for r in caplog.records if "no person appears" in r.getMessage()]) == warned


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"rounds": "3"}, "argument.value"),
        ({"rounds": True}, "argument.value"),
        ({"evaluate_every": 0}, "argument.value"),
        ({"delta": "x"}, "argument.type"),
        ({"delta": 1}, "argument.value"),
        ({"delta": float("nan")}, "argument.value"),
        ({"out": b"there"}, "argument.type"),
        ({"seed": -1}, "argument.value"),
        ({"budget": 3.0}, "argument.type"),
        ({"aggregator": 3}, "argument.type"),
        ({"aggregator": Plain}, "argument.type"),
        ({"method": UldpAvg}, "argument.type"),
        ({"method": "uldp-avg"}, "argument.type"),
        ({"task": torch.nn.Linear(4, 1)}, "argument.type"),
        ({"federation": None}, "argument.type"),
        ({"callbacks": [3]}, "argument.type"),
        ({"resume": True}, "argument.missing"),
    ],
)
def test_arguments_of_another_kind_are_refused(change, code):
    usual = {"federation": small_federation(), "task": logistic_task(), "method": AVG}
    arguments = {**usual, "rounds": 1, **change}
    first = [arguments.pop(name) for name in usual]
    with refused(code) as caught:
        train(*first, **arguments)
    assert next(iter(change)) in str(caught.value)


def test_a_delta_that_promises_nothing_is_said_to():
    usual, large = (
        train(small_federation(), logistic_task(), AVG, rounds=1, seed=0, delta=delta)
        for delta in (1e-5, 0.2)
    )
    remark = [
        any(a.id == "delta-large" for a in r.guarantees["released"].assumptions) for r in (usual, large)
    ]
    assert remark == [False, True]
