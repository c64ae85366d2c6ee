"""Canaries are orthonormal, lie where the event is largest, and move a sum as far as a method allows."""

from __future__ import annotations

import numpy as np
import pytest

from silodp.accounting.events import Gaussian, Group, PoissonSampled, SelfComposed
from silodp.methods import UldpAvg
from silodp.methods.base import Method
from silodp.methods.ddp import Ddp
from silodp_audit.attack.canaries import (
    Directions,
    Placement,
    choose_directions,
    choose_placement,
    make_canaries,
)
from silodp_experiments.uldp_baselines import UldpGroup, UldpNaive


def test_directions_are_orthonormal_and_projected_onto_themselves() -> None:
    directions = Directions(3, 5, 16)
    records = np.array([directions.make_record(person) for person in range(directions.size)])
    assert records @ records.T == pytest.approx(np.eye(directions.size), abs=1e-6)
    assert directions.project(records.astype(float)) == pytest.approx(np.eye(directions.size), abs=1e-6)
    together = [*directions.members, *directions.outsiders, *directions.spares]
    assert sorted(together) == list(range(directions.size))
    assert len(directions.members) == len(directions.outsiders)


def group(size: int) -> UldpGroup:
    return UldpGroup(
        noise_multiplier=5.0,
        clip=1.0,
        group_size=size,
        record_sampling=0.1,
        local_steps=1,
        expected_batch_size=10.0,
        local_learning_rate=1.0,
    )


DDP = Ddp(
    noise_multiplier=3.0,
    clip=1.0,
    local_steps=1,
    record_sampling=0.2,
    expected_batch_size=10.0,
    local_learning_rate=1.0,
)


@pytest.mark.parametrize(
    ("method", "placement"),
    [
        (UldpAvg(noise_multiplier=1.0, clip=1.0), Placement("everywhere")),
        (UldpAvg(noise_multiplier=1.0, clip=1.0, weighting="records"), Placement("one silo")),
        (UldpAvg(noise_multiplier=1.0, clip=1.0, weighting="primary_silo"), Placement("one silo")),
        (UldpNaive(noise_multiplier=1.0, clip=1.0), Placement("whole update")),
        (DDP, Placement("one silo")),
        # Each of three silos may use four of the twelve records of a group: a canary has more of them.
        (group(12), Placement("everywhere", 8)),
    ],
)
def test_a_placement_follows_from_what_a_method_states(method: Method, placement: Placement) -> None:
    event = SelfComposed(Group(4, PoissonSampled(0.1, Gaussian(5.0))), 3)
    events = {"released": event} if isinstance(method, UldpGroup) else {"released": Gaussian(1.0)}
    assert choose_placement(method, events, 3) == placement  # type: ignore[arg-type]


def test_there_are_fewer_canaries_where_their_records_would_take_too_much_memory() -> None:
    assert choose_directions(300, 10, Placement("everywhere")).canaries == 300
    assert choose_directions(3000, 10, Placement("everywhere", 8)).canaries < 1500


def test_only_members_have_records() -> None:
    directions = Directions(4, 5, 0)
    made = make_canaries(directions, Placement("one silo"), ("a", "b"), least_records=6)
    first, second = made.federation.silos
    assert (len(first), len(second)) == (6, 0)
    with_gradient = set(first.user[first.y != 0].tolist())
    assert with_gradient == set(directions.members.tolist())
