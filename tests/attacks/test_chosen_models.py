"""Models chosen by the server: what one person's records move in a sum that others are in, too.

Attacked is the bound of a sum: one person moves it by at most one clip. Silos compute the updates of many persons (or
records) side by side, so whether one of them is there decides shapes and code paths of the computation, and with them
the last bits of all others' updates. A model with large weights that cancel each other turns last bits into whole
updates: every value is finite, and the shape is right, so a silo's gate admits it. Then ε, which is charged for one
clip, is not what the server learns.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from silodp.data.silo_data import SiloData
from silodp.mechanisms.clipping import add_weighted_rows, clip_rows
from silodp.mechanisms.noise import Randomness
from silodp.methods import UldpAvg, UldpSgd, uldp
from silodp.methods.base import LocalContext, Method
from silodp.methods.roles import FederationSize
from silodp.training.losses import binary_cross_entropy
from silodp.training.sgd import LocalTraining, RecordGradients
from silodp.training.task import Task
from silodp.wire.messages import Message
from silodp.wire.transport import SERVER, sign, verify
from silodp_analytics.counts import CountTable
from silodp_analytics.evaluation.methods import EvaluationSums
from silodp_deploy.consortium import Consortium
from silodp_deploy.records import save_records
from silodp_deploy.silo import load_identity, open_silo
from support.consortium import make_parties

FEATURES, HIDDEN = 30, 32
PERSONS = 201


def mlp(hidden: int = HIDDEN) -> Task:
    model = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    return Task(model, binary_cross_entropy())


def cancelling_weights(hidden: int = HIDDEN, seed: int = 0) -> Tensor:
    """Return parameters of `mlp`: hidden units that are 1 for every record, and outputs of them that add up to 0."""
    weights = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)) * 1e8
    bias = -weights.double().sum().float()
    return torch.cat([torch.zeros(hidden * FEATURES), torch.ones(hidden), weights.flatten(), bias.reshape(1)])


def records(counts: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    user = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    x = torch.from_numpy(rng.normal(size=(len(user), FEATURES)).astype(np.float32))
    return x, torch.from_numpy(rng.integers(0, 2, len(user))), user


def describe(isolate_units: bool) -> str:
    return "each alone" if isolate_units else "side by side"


def check_moved(moved: float, isolate_units: bool, otherwise: float) -> None:
    """Check that a unit computed alone moves a sum by a clip at most, and side by side by more than a number.

    Whether last bits depend on what is computed side by side is a matter of the CPU and its kernels: where they do not,
    there is nothing to magnify, and the attack is skipped.
    """
    if isolate_units:
        assert moved <= 1 + 1e-6
    elif moved <= otherwise:
        pytest.skip(f"the kernels of this CPU give the same bits: the sum moves by {moved:.2f} clips")


def add_rows(
    method: Method, task: Task, params: Tensor, data: tuple[Tensor, ...], isolate_units: bool = False
) -> Tensor:
    """Return the sum, before noise, of what a method computes of one silo's records (x, y, user), all of weight 1."""
    weights = torch.ones(PERSONS, dtype=torch.float64)
    context = LocalContext(
        task,
        params,
        *data,
        weights,
        FederationSize(1, PERSONS),
        Randomness.from_seed(0),
        isolate_units=isolate_units,
    )
    return add_weighted_rows(method.local_update(context), weights).value


@pytest.mark.parametrize("isolate_units", [False, True])
def test_one_person_moves_a_sum_of_updates_by_many_clips(isolate_units: bool) -> None:
    task, data = mlp(), records([1] * 128 + [17])
    without = tuple(part[data[2] != 128] for part in data)
    method = UldpAvg(noise_multiplier=1.0, clip=1.0, local=LocalTraining(0.1, 5))
    sums = [add_rows(method, task, cancelling_weights(), part, isolate_units) for part in (data, without)]
    moved = float((sums[0] - sums[1]).norm())
    print(
        f"one person of 129, training, {describe(isolate_units)}: the sum of updates moves by {moved:.2f} clips"
    )
    check_moved(moved, isolate_units, 2)


@pytest.mark.parametrize("isolate_units", [False, True])
def test_one_record_moves_a_sum_of_gradients_by_more_than_a_clip(isolate_units: bool) -> None:
    task = mlp(16)
    x, y, _ = records([400])

    def add_gradients(batch: int, seed: int) -> Tensor:
        total = torch.zeros(task.size, dtype=torch.float64)
        gradients = RecordGradients(
            task, x, y, 1, torch.Generator().manual_seed(0), isolate_units=isolate_units
        )
        for rows, values in gradients.of(cancelling_weights(16, seed), torch.arange(batch)):
            clipped = clip_rows(rows, values, 1.0)
            total += clipped.factors @ clipped.tensor.double()
        return total

    moved = max(
        float((add_gradients(n, seed) - add_gradients(n - 1, seed)).norm())
        for n in (4, 8, 16, 28, 32, 64)
        for seed in range(4)
    )
    print(f"one record of a batch, DP-SGD, {describe(isolate_units)}: the sum moves by {moved:.2f} clips")
    check_moved(moved, isolate_units, 1.5)


@pytest.mark.parametrize("isolate_units", [False, True])
def test_one_held_out_record_moves_a_sum_of_counts_by_several_clips(isolate_units: bool) -> None:
    task, table = mlp(16), CountTable("scores")
    data = records([1] * 40)
    method = EvaluationSums("user", noise_multiplier=1.0, clip=1.0, table=table)

    def add_counts(first: int, seed: int) -> Tensor:
        return add_rows(
            method, task, cancelling_weights(16, seed), tuple(part[first:] for part in data), isolate_units
        )

    moved = max(float((add_counts(0, seed) - add_counts(1, seed)).norm()) for seed in range(4))
    print(
        f"one held-out record of 40, evaluation, {describe(isolate_units)}: counts move by {moved:.2f} clips"
    )
    check_moved(moved, isolate_units, 2)


def test_a_step_makes_no_whole_updates_of_last_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates scaled to one norm, of persons whose gradient is zero or one last bit: no chosen model is needed."""
    features = 6
    task = Task(nn.Linear(features, 1), binary_cross_entropy())
    rng = np.random.default_rng(0)
    rows, labels, counts = [], [], []
    for _ in range(200):  # every person has as many labels 0 as 1 in each category
        words = rng.integers(0, 3, rng.integers(2, 16))
        x = np.zeros((2 * len(words), features), np.float32)
        x[np.arange(len(x)), np.tile(words, 2)] = 1
        x[:, 3], x[:, 4] = rng.choice([-1, 1]), 0.3
        order = rng.permutation(len(x))
        rows.append(x[order])
        labels.append(np.repeat([0, 1], len(words))[order])
        counts.append(len(x))
    person = rng.normal(size=(40, features)).astype(np.float32)
    data = (
        torch.from_numpy(np.concatenate([*rows, person])),
        torch.from_numpy(np.concatenate([*labels, np.arange(40) % 2])),
        torch.from_numpy(np.repeat(np.arange(201), [*counts, 40])),
    )
    others = tuple(part[data[2] != 200] for part in data)
    method, start = UldpSgd(noise_multiplier=5.0), torch.zeros(task.size)

    def measure() -> float:
        return float((add_rows(method, task, start, data) - add_rows(method, task, start, others)).norm())

    with_least = measure()
    monkeypatch.setattr(uldp, "MIN_GRADIENT_NORM", 0.0)
    without = measure()
    print(f"one person of 201, `step`: {without:.2f} clips without a least norm, {with_least:.4f} with it")
    assert with_least < 1.001
    check_moved(without, False, 2)


# --- silos as they are deployed ------------------------------------------------------------------------------

CONFIG = """
name = "chosen"
rounds = 1
seed = 7
{isolate_units}
[data]
source = "embedded"
users = 129
silos = 2
[task]
model = "network.py:make"
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.1
epochs = 5
"""
NETWORK = f"""
from torch import nn


def make(features, **options):
    return nn.Sequential(nn.Linear(features, {HIDDEN}), nn.ReLU(), nn.Linear({HIDDEN}, 1))
"""


def ask_silos(folder: Path, persons: int) -> Tensor:
    """Return the sum of the answers of all silos of a consortium to the chosen model, in clips.

    Of the first persons each has one record in each silo, and number 128 has 17.
    Noise follows from the seed of the run and is the same in every call.
    """
    consortium, server = Consortium.load(folder / "public"), load_identity(folder / "server", SERVER)
    total = torch.zeros(consortium.spec.size, dtype=torch.float64)
    for number, name in enumerate(consortium.spec.names):
        home = folder / "silos" / name
        x, y, user = (part.numpy() for part in records([1] * 128 + [17], number))
        here = user < persons
        save_records(home / "records.npz", SiloData(name, x[here], y[here], user[here]))
        for kept in ("store", "ledgers"):
            shutil.rmtree(home / kept, ignore_errors=True)
        (home / "audit.jsonl").unlink(missing_ok=True)  # another world, in which nothing was answered yet
        run = secrets.token_hex(16)
        update = Message("update", run, arrays={"params": cancelling_weights().numpy()})
        with open_silo(home, consortium) as silo:
            for message in (Message("setup", run), update):
                answer = silo.receive(sign(message, server, name))
        key = consortium.sealed.silos[name]
        total += torch.from_numpy(verify(answer, key, name, SERVER, update.digest()).arrays["share"])
    return total / 0.1


@pytest.mark.parametrize("isolate_units", [True, False])
def test_one_person_moves_what_silos_answer(isolate_units: bool, tmp_path: Path) -> None:
    """A public folder that `silodp deploy init` drafts has `isolate_units = true`, unless the config denies it."""
    (tmp_path / "network.py").write_text(NETWORK)
    parties = make_parties(
        tmp_path, CONFIG.format(isolate_units="" if isolate_units else "isolate_units = false")
    )
    with_person, without = (ask_silos(parties, persons) for persons in (129, 128))
    moved = float((with_person - without).norm())
    print(f"one person of 129 in 2 deployed silos, {describe(isolate_units)}: {moved:.6f} clips")
    assert moved > 0.5
    check_moved(moved, isolate_units, 2)
