"""Views of a canary run are what the protocols say that each adversary sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from silodp.crypto.secure_aggregation import open_sum
from silodp.methods import UldpAvg
from silodp.methods.base import Method
from silodp.methods.server_optimizer import ServerAdam
from silodp.runtime.prepare import prepare_run
from silodp.runtime.simulation import Simulation
from silodp_audit.attack.canaries import Canaries, Directions, Placement, make_canaries
from silodp_audit.attack.canary_run import CanaryRun, run_canaries
from silodp_audit.attack.views import find_part

NAMES = ("a", "b", "c")
DIRECTIONS = Directions(20, 30, 16)


def run_on_canaries(method: Method, aggregator: str = "plain", rounds: int = 2) -> tuple[CanaryRun, Canaries]:
    made = make_canaries(DIRECTIONS, Placement("everywhere"), NAMES)
    spec = prepare_run(made.federation, made.task, method, rounds=rounds, aggregator=aggregator)
    return run_canaries(spec, Simulation(made.federation, made.task)), made


def uldp(**settings: object) -> UldpAvg:
    return UldpAvg(**{"noise_multiplier": 0.5, "clip": 1.0, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_released_models_show_the_sums_of_the_shares(momentum: float) -> None:
    found, _ = run_on_canaries(uldp(server_momentum=momentum))
    assert found.released is not None
    assert found.shares is not None
    total = sum(found.shares.values())
    # Models are float32, and sums are not.
    assert found.released == pytest.approx(total, abs=1e-3)
    assert found.sums == pytest.approx(total, abs=1e-12)


def test_a_step_that_cannot_be_inverted_is_noticed() -> None:
    found, _ = run_on_canaries(uldp(server_optimizer=ServerAdam()))
    assert found.released is None
    assert found.sums is not None


def test_under_masks_the_server_sees_the_sum_alone() -> None:
    found, _ = run_on_canaries(uldp(), "masked")
    assert found.shares is None
    ring, step = found.spec.aggregator.ring(found.spec)  # type: ignore[attr-defined]
    kept = found.observed.kept
    for number in range(2):
        words = {
            k.silo: k.answer.arrays["masked"]
            for k in kept
            if k.request.kind == "update" and k.request.round == number and k.answer is not None
        }
        seals = {
            k.silo: k.answer.blobs["seal"]
            for k in kept
            if k.request.kind == "open" and k.request.round == number and k.answer is not None
        }
        assert found.sums is not None
        opened = ring.center(open_sum(words.values(), seals, ring)) * step
        assert found.sums[number] == pytest.approx(opened, abs=1e-12)
        # One masked vector alone is uniform: it has nothing to do with the silo's noisy sum.
        own = [v for v in found.find_own_vectors("a")[number]]
        assert len(own) == 1
        alone = ring.center(words["a"].copy()).astype(float)
        assert abs(np.corrcoef(alone, own[0])[0, 1]) < 0.6


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_a_silo_knows_its_own_part_of_a_sum(aggregator: str) -> None:
    found, made = run_on_canaries(uldp(noise_multiplier=5.0), aggregator)
    assert found.sums is not None
    rest = [
        total - find_part(total, np.array(own), made.directions.spares)
        for total, own in zip(found.sums, found.find_own_vectors("c"), strict=True)
    ]
    # Two of three equal shares are left: √(2/3) of the noise, within 5 standard errors of 132 numbers.
    ratio = np.std(rest) / np.std(found.sums)
    assert ratio == pytest.approx(np.sqrt(2 / 3), rel=0.2)


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_a_silo_knows_who_was_sampled(aggregator: str) -> None:
    found, made = run_on_canaries(uldp(user_sampling=0.5), aggregator, rounds=4)
    assert found.sums is not None
    drawn = found.silo_sample("c", 0.5)[:, made.directions.members]
    assert 0.2 < drawn.mean() < 0.8
    moved = made.directions.project(found.sums)[:, made.directions.members]
    # Noise of 0.5 on some 50 numbers each: 5 standard errors are 0.4.
    assert moved[drawn].mean() == pytest.approx(1, abs=0.4)
    assert moved[~drawn].mean() == pytest.approx(0, abs=0.4)


def test_a_canary_run_has_the_charges_of_its_ledger_and_keeps_nothing_on_disk() -> None:
    found, _ = run_on_canaries(uldp())
    assert found.charges.rounds == 2
    assert sum(found.charges.charged["server"].values()) == 2
    assert found.observed.directory.path is None
    assert isinstance(found.result.params, torch.Tensor)
