"""A silo's head of the model: trained during the run, it breaks the guarantee, and trained after it, it does not.

Attacked is the published way (Pillutla et al. 2022, alternating updates), in which a silo first trains its head on
all of its records and then computes the updates of the shared part with it. Every update is clipped, and the noise is
for one clip; but all updates of the silo depend on everyone whom the part was trained on.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import silodp
from silodp.mechanisms.clipping import add_weighted_rows
from silodp.mechanisms.noise import Randomness
from silodp.methods import UldpAvg
from silodp.methods.base import LocalContext
from silodp.methods.roles import FederationSize
from silodp.training import LocalTraining, Task, binary_cross_entropy
from silodp_analytics.silo_head.head import train_silo_head
from support.oracles import small_federation

PERSONS, FEATURES, CLIP = 100, 6, 1.0
METHOD = UldpAvg(noise_multiplier=1.0, clip=CLIP, local=LocalTraining(0.5, 5))


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))


def draw_records() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One record of each person, and thirty of person 0, whose labels are all wrong."""
    coins = np.random.default_rng(0)
    user = np.concatenate([np.arange(PERSONS), np.zeros(300, np.int64)])
    x = coins.standard_normal((len(user), FEATURES)).astype(np.float32)
    return x, ((x[:, 0] > 0) ^ (user == 0)).astype(np.int64), user


def sum_updates(task: Task, records: tuple[np.ndarray, ...]) -> Tensor:
    x, y, user = records
    weights = torch.ones(PERSONS, dtype=torch.float64)
    inputs, targets = task.tensors(x, y)
    data = task.flatten(task.model), inputs, targets, torch.from_numpy(user), weights
    context = LocalContext(task, *data, FederationSize(1, PERSONS), Randomness.from_seed(0))
    return add_weighted_rows(METHOD.local_update(context), weights).value


def measure_moved(alternates: bool) -> float:
    """By how many clips person 0 moves the sum of the updates of the shared part, which is the first layer."""
    sums, records = [], draw_records()
    for world in (records, tuple(part[records[2] != 0] for part in records)):
        network = make_network()
        if alternates:
            x, y, _ = world
            head = torch.optim.SGD(network[2].parameters(), lr=0.5)
            for _ in range(200):
                head.zero_grad()
                outputs = network(torch.from_numpy(x)).squeeze(1)
                nn.functional.binary_cross_entropy_with_logits(
                    outputs, torch.from_numpy(y).float()
                ).backward()
                head.step()
            network[2].requires_grad_(False)
        sums.append(sum_updates(Task(network, binary_cross_entropy(), pretrained=True), world))
    return float((sums[0] - sums[1]).norm()) / CLIP


def test_a_head_that_is_trained_in_turn_lets_one_person_move_the_sum_by_many_clips() -> None:
    moved = measure_moved(alternates=True)
    print(f"one person of {PERSONS} moves the sum by {moved:.1f} clips")
    assert moved > 40


def test_without_it_one_person_moves_the_sum_by_one_clip() -> None:
    assert measure_moved(alternates=False) <= 1 + 1e-6


def test_what_a_run_released_does_not_depend_on_silo_heads(tmp_path: Path) -> None:
    federation = small_federation()
    silo = federation.silos[0]
    network = nn.Linear(silo.x.shape[1], 1)
    task = silodp.Task(network, binary_cross_entropy())
    method = silodp.methods.UldpSgd(noise_multiplier=1.0, step=1.0)
    silodp.train(federation, task, method, rounds=2, out=tmp_path / "run")

    def digest() -> list[str]:
        files = sorted((tmp_path / "run").rglob("*"))
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()]

    before, shared = digest(), silodp.load(tmp_path / "run", model=network)
    weights = [one.clone() for one in shared.model.parameters()]
    tuned = shared.fine_tune(silo, ["*"], seed=1)
    assert tuned.head is not None
    assert digest() == before
    assert all(torch.equal(a, b) for a, b in zip(weights, shared.model.parameters(), strict=True))
    # The function itself leaves the model that it was given as it is.
    train_silo_head(shared.model, binary_cross_entropy(), (silo.x, silo.y, silo.user), ["*"], seed=2)
    assert all(torch.equal(a, b) for a, b in zip(weights, shared.model.parameters(), strict=True))
    train_silo_head(shared.model, binary_cross_entropy(), (silo.x, silo.y, silo.user), seed=2)
    assert all(one.requires_grad for one in shared.model.parameters())
