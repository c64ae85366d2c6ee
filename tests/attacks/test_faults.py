"""Injected faults: what each changes in a run, whatever finds it afterwards.

Without these tests a patch could miss the code that runs, and an attack that finds nothing would look as if the fault
were harmless. The runs have seeds, so their numbers are always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.methods import Ddp, FederationSize, Method, UldpAvg
from silodp.runtime.silo import Silo
from silodp.runtime.train import train
from silodp.training.losses import Loss
from silodp.training.sgd import LocalTraining
from silodp.training.task import Task
from silodp.wire.transport import SignedChannel
from silodp_budgets.random_allocation import RandomAllocation
from silodp_experiments.uldp_baselines import UldpGroup, UldpNaive
from support.faults import FAULTS

SILOS, ROUNDS, MEMBERS, SIZE = 3, 4, 200, 400
STEEP = 1e4
"""The length of a canary's gradient, far above every clip."""
AVG: dict[str, Any] = {"noise_multiplier": 1.0, "clip": 1.0, "local": LocalTraining(0.01)}
STEPS: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "clip": 1.0,
    "record_sampling": 0.5,
    "expected_batch_size": 10.0,
    "local_learning_rate": 1.0,
}
METHODS: dict[str, tuple[Method, str]] = {
    "uniform": (UldpAvg(**AVG), "plain"),
    "sampled": (UldpAvg(**AVG, user_sampling=0.3), "plain"),
    "allocated": (UldpAvg(**AVG, participation=RandomAllocation(2)), "plain"),
    "masked": (UldpAvg(**AVG), "masked"),
    "records": (UldpAvg(**AVG, weighting="records"), "plain"),
    "group": (UldpGroup(**STEPS, group_size=6, local_steps=1), "plain"),
    "ddp": (Ddp(**STEPS, local_steps=4), "plain"),
    "naive": (UldpNaive(**AVG), "plain"),
}


@dataclass
class Seen:
    """What a run shows.

    Attributes:
        sums: (T, d), the noisy sums, by the models.
        shares: (S, T, d), the silos' shares; none where they are masked.
        drawn: (T, S, members) bool, who has a weight above 0.
        epsilon: what is printed.
    """

    sums: np.ndarray
    shares: np.ndarray
    drawn: np.ndarray
    epsilon: float | None

    def members(self) -> float:
        """Return the mean of the sum where canaries are in."""
        return float(self.sums[:, :MEMBERS].mean())

    def noise(self) -> float:
        """Return the standard deviation of the sum where no canary is in."""
        return float(self.sums[:, MEMBERS:].std())

    def first_noise(self) -> float:
        """Return the same of silo 0's share."""
        return float(self.shares[0, :, MEMBERS:].std())

    def drawn_anywhere(self) -> float:
        """Return how many of the members are drawn in some silo."""
        return float(self.drawn.any(1).mean())

    def drawn_once(self) -> float:
        """Return how many of the members are drawn in one of the first two rounds."""
        return float((self.drawn.any(1)[:2].sum(0) == 1).mean())

    def drawn_alike(self) -> float:
        """Return how many of the members are drawn in the first two rounds as in the last two."""
        drawn = self.drawn.any(1)
        return float((drawn[:2] == drawn[2:]).all(0).mean())

    def repeated_rounds(self) -> float:
        """Return the correlation between the noise of two rounds of silo 0."""
        return float(np.corrcoef(self.shares[0, :2, MEMBERS:])[0, 1])

    def repeated_silos(self) -> float:
        """Return the correlation between the noise of two silos in round 0."""
        return float(np.corrcoef(self.shares[:2, 0, MEMBERS:])[0, 1])

    def spent(self) -> float | None:
        """Return ε."""
        return self.epsilon


def make_federation(directions: np.ndarray, setting: str) -> Federation:
    """Every canary in every silo, or in one of them where weights are by records or the unit is a record."""
    lonely, copies = setting in ("records", "ddp"), 6 if setting == "group" else 1
    silos = []
    for s in range(SILOS):
        here = [u for u in range(len(directions)) if not lonely or u % SILOS == s]
        user = np.repeat(np.array(here, np.int64), copies)
        x = directions[user].astype(np.float32)
        silos.append(SiloData(f"s{s}", x, np.full(len(user), STEEP, np.float32), user))
    return Federation(tuple(silos), SIZE, None)


def play(setting: str, directions: np.ndarray | None = None) -> Seen:
    """Run on canaries; `directions` (members, d) are theirs, by default one coordinate for each."""
    method, aggregator = METHODS[setting]
    models, shares, drawn = [], [], []
    ask, compute = SignedChannel.ask, Silo._prepare_release

    def asked(self, requests, timeout=None):
        answers, failures = ask(self, requests, timeout)
        if any(request.kind == "update" for request in requests.values()):
            models.append(next(iter(requests.values())).arrays["params"].astype(float))
            shares.extend(answer.arrays["share"] for answer in answers.values() if "share" in answer.arrays)
        return answers, failures

    def computed(self, request, release):
        found = compute(self, request, release)
        drawn.append(found.release.weights[:MEMBERS] > 0)
        return found

    # The gradient of a canary is −STEEP·x, wherever the model is.
    loss = Loss.per_record("canary", lambda outputs, steep: -(steep * outputs.flatten()))
    task = Task(torch.nn.Linear(SIZE, 1, bias=False), loss)
    federation = make_federation(np.eye(SIZE)[:MEMBERS] if directions is None else directions, setting)
    with patch.object(SignedChannel, "ask", asked), patch.object(Silo, "_prepare_release", computed):
        result = train(federation, task, method, rounds=ROUNDS, aggregator=aggregator, seed=1)
    models.append(result.params.double().numpy())
    divisor = method.server_learning_rate * method.server_scale(FederationSize(SILOS, SIZE))
    return Seen(
        np.diff(models, axis=0) / divisor,
        np.array(shares).reshape(ROUNDS, -1, SIZE).swapaxes(0, 1),
        np.array(drawn).reshape(ROUNDS, SILOS, MEMBERS),
        result.guarantees["released"].epsilon,
    )


play_right = cache(play)

ONE = 1 / 3**0.5
"""A silo's share of the noise, σ = 1 over three silos."""


@pytest.mark.parametrize(
    ("name", "look", "right", "wrong"),
    [
        ("half of the noise", Seen.noise, 1, 0.5),
        ("noise times .9", Seen.noise, 1, 0.9),
        ("σ/S in place of σ/√S", Seen.first_noise, ONE, 1 / 3),
        ("1/√S forgotten", Seen.first_noise, ONE, 1),
        ("clipped after weighting", Seen.members, 1, 3),
        ("weight 1 in every silo", Seen.members, 1, 3),
        ("weights add to 1.5", Seen.members, 1, 1.5),
        ("a silo without noise", Seen.first_noise, ONE, 0),
        ("no clipping", Seen.members, 1, 100),  # the gradient's length times the learning rate
        ("a coin per silo", Seen.drawn_anywhere, 0.3, 1 - 0.7**3),
        ("samples with 2q", Seen.drawn_anywhere, 0.3, 0.6),
        ("a coin in every round", Seen.drawn_once, 1, 0.5),
        ("the same round of every allocation", Seen.drawn_alike, 0.5, 1),
        ("one allocation charged", Seen.spent, 5.312, 3.698),  # of two allocations, and of one
        ("every second round not charged", Seen.spent, 9.997, 6.573),  # of four rounds, and of two
        ("the same noise in every round", Seen.repeated_rounds, 0, 1),
        ("the same noise in every silo", Seen.repeated_silos, 0, 1),
        ("half of the Skellam variance", Seen.noise, 1, 0.5**0.5),
        ("k records in every silo", Seen.members, 0.3, 0.9),  # k·q/10 over all silos, and in every one
        ("noise of one step", Seen.first_noise, 2, 1),
        ("the noise of Theorem 1", Seen.noise, 6, 3),  # 2σCS, and half of it
        ("one person under two ids", Seen.members, 1, 2),
        ("two ids in one silo", Seen.members, 1, 4 / 3),
    ],
)
def test_a_fault_changes_what_is_sent(
    name: str, look: Callable[[Seen], float], right: float, wrong: float
) -> None:
    setting = FAULTS[name].setting
    assert look(play_right(setting)) == pytest.approx(right, rel=0.08, abs=0.06)
    with FAULTS[name].inject():
        seen = play(setting)
    assert look(seen) == pytest.approx(wrong, rel=0.08, abs=0.06)
    # What is printed stays as it was, but where charges are the fault.
    if look is not Seen.spent:
        assert seen.epsilon == play_right(setting).epsilon


def test_a_clip_of_the_largest_coordinate_shows_in_dense_directions_only() -> None:
    name = "clip of the largest coordinate"
    dense = np.random.default_rng(1).choice([-1.0, 1.0], (MEMBERS, SIZE)) / SIZE**0.5
    lengths = []
    for directions in (np.eye(SIZE)[:MEMBERS], dense):
        with FAULTS[name].inject():
            sums = play("uniform", directions).sums.mean(0)
        lengths.append(float((directions @ sums).mean()))
    assert lengths[0] == pytest.approx(1, abs=0.1)
    assert lengths[1] > SIZE**0.5 / 2  # each canary √d clips long, and others in its direction


def test_every_fault_is_shown_here() -> None:
    shown = {case[0] for mark in test_a_fault_changes_what_is_sent.pytestmark for case in mark.args[1]}
    assert shown | {"clip of the largest coordinate"} == FAULTS.keys()
