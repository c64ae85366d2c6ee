"""A model that keeps something of one person's records, which made-up records do not show: the silo answers nothing.

Attacked is every way in which a silo computes rows: what the model keeps of one record would move the rows of all
others, so that many clips are released where one is charged. The last line of defense is that a silo compares the model
with what it was before anything leaves it.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import silodp
from silodp.errors import SilodpError
from silodp.methods import Ddp, Method, UldpAvg, UldpSgd
from silodp.training import LocalTraining, binary_cross_entropy
from silodp_experiments.uldp_baselines import UldpGroup

SECRET = 7.25  # no number that is made up before a run, and none so large that its record is computed alone


class KeepsWhatItSaw(nn.Module):
    """Divides by ten times as much once it has seen one number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.divisor = nn.Linear(4, 1), 1.0

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.detach() == SECRET).any()):
            self.divisor = 10.0
        found: Tensor = self.linear(x / self.divisor)
        return found


def federate(secret: bool) -> silodp.Federation:
    rng = np.random.default_rng(0)
    silos = []
    for name in ("a", "b"):
        x = rng.normal(size=(24, 4)).astype(np.float32)
        x[5] = SECRET if secret and name == "a" else 1.0
        y, user = (x[:, 0] > 0).astype(np.int64), np.arange(24) // 2
        silos.append(silodp.SiloData(name, x, y, user, test=silodp.SiloData(name, x, y, user)))
    return silodp.Federation(tuple(silos), users=12, test=silos[1], classes=2)


METHODS: dict[str, Method] = {
    "person": UldpSgd(noise_multiplier=5.0, step=0.1),
    "person, many steps": UldpAvg(noise_multiplier=5.0, clip=1.0, local=LocalTraining(0.1, 10)),
    "group": UldpGroup(
        noise_multiplier=5.0, clip=1.0, group_size=4, record_sampling=0.5, local_steps=12, local_learning_rate=0.1,
        expected_batch_size=8,
    ),
    "record": Ddp(
        noise_multiplier=5.0, clip=1.0, record_sampling=0.5, local_steps=12, local_learning_rate=0.1,
        expected_batch_size=8,
    ),
}  # fmt: skip


def train(method: Method, secret: bool, **options: object) -> silodp.Result:
    task = silodp.Task(KeepsWhatItSaw(), binary_cross_entropy())
    return silodp.train(federate(secret), task, method, rounds=1, seed=0, **options)


@pytest.mark.parametrize("name", METHODS)
def test_a_silo_answers_nothing_once_its_model_has_changed(name: str) -> None:
    method = METHODS[name]
    train(method, secret=False)
    with pytest.raises(SilodpError, match="changes its state 'divisor'"):
        train(method, secret=True)
    # Where each unit is computed by a copy of the model, none moves another, and there is nothing to refuse.
    train(method, secret=True, isolate_units=True)


@pytest.mark.slow
def test_a_worker_returns_nothing_once_its_model_has_changed() -> None:
    cloudpickle = pytest.importorskip("ray").cloudpickle
    here = sys.modules[__name__]  # workers cannot import a test
    cloudpickle.register_pickle_by_value(here)
    with pytest.raises(SilodpError, match="changes its state 'divisor'"):
        train(METHODS["person"], secret=True, workers=2)
    cloudpickle.unregister_pickle_by_value(here)


def test_a_task_that_has_changed_is_of_no_use_any_more() -> None:
    task = silodp.Task(KeepsWhatItSaw(), binary_cross_entropy())
    for secret in (True, False):
        with pytest.raises(SilodpError, match="changes its state 'divisor'"):
            silodp.train(federate(secret), task, METHODS["person"], rounds=1, seed=0)
    assert torch.equal(task.load(task.initial(0)).linear.weight.flatten(), task.initial(0)[:4])
