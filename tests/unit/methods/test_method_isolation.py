"""Which methods compute every unit alone, and that what they compute is then computed alone."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from silodp.accounting.guarantee import ISOLATED_ROUNDING, SHARED_ROUNDING
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import LocallyNoisedUpdate
from silodp.methods import Ddp, Method, UldpAvg, UldpSgd
from silodp.methods.base import LocalContext, supports
from silodp.runtime.inspection import inspect_model
from silodp.runtime.prepare import prepare_run
from silodp.runtime.train import train
from silodp.training.losses import binary_cross_entropy
from silodp.training.model_probe import Probe
from silodp.training.sgd import isolation as engine
from silodp.training.task import Task
from silodp_budgets.rpdp.method import Rpdp, RpdpDropout
from silodp_budgets.rpdp.renyi_filter import RpdpFilter
from silodp_experiments.uldp_baselines import Default, UldpGroup, UldpNaive

PERSONS, RECORDS = 6, 18


def small() -> tuple[Federation, Task]:
    rng = np.random.default_rng(0)
    silos = [
        SiloData(
            name,
            rng.normal(size=(RECORDS, 3)).astype(np.float32),
            rng.integers(0, 2, RECORDS),
            np.arange(RECORDS) % PERSONS,
        )
        for name in ("a", "b")
    ]
    return Federation(tuple(silos), PERSONS, None), Task(torch.nn.Linear(3, 1), binary_cross_entropy())


METHODS = [
    UldpAvg(noise_multiplier=1.0, clip=1.0),
    UldpSgd(noise_multiplier=1.0, clip=1.0),
    UldpGroup(
        group_size=4, noise_multiplier=1.0, clip=1.0, local_steps=2, record_sampling=0.5,
        expected_batch_size=3.0, local_learning_rate=0.1,
    ),
    *(
        Ddp(
            noise_multiplier=1.0, clip=1.0, local_steps=2, record_sampling=0.5, expected_batch_size=3.0,
            local_learning_rate=0.1, trajectory=trajectory,
        )
        for trajectory in ("local", "decoupled")
    ),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_unit_is_computed_alone(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, task = small()
    alone: list[int] = []

    @contextmanager
    def isolate(task, seed, unit):
        alone.append(unit)
        with original(task, seed, unit) as generator:
            yield generator

    original = engine.isolate
    monkeypatch.setattr(engine, "isolate", isolate)
    results = {
        isolate_units: train(federation, task, method, rounds=1, seed=1, isolate_units=isolate_units)
        for isolate_units in (False, True)
    }
    if method.clips_records:
        assert set(alone) <= set(range(RECORDS))
        assert len(alone) > 4
    else:
        assert alone == [*range(PERSONS)] * 2
    assert torch.allclose(results[False].params, results[True].params, atol=1e-5)
    for isolate_units, text in ((False, SHARED_ROUNDING), (True, ISOLATED_ROUNDING)):
        found = results[isolate_units].guarantees["released"].assumptions
        assert [one for one in found if one in (SHARED_ROUNDING, ISOLATED_ROUNDING)] == [text]


STEPS = {"clip": 1.0, "local_steps": 8, "expected_batch_size": 1.0, "local_learning_rate": 0.1}
BUDGETED = STEPS | {"delta": 1e-5, "largest_budget": 1.0}


@pytest.mark.parametrize(
    ("method", "records"),
    [
        (Rpdp(noise_multiplier=9.0, rounds=2, **BUDGETED), 3),  # few records are drawn in a step
        (RpdpFilter(noise_multiplier=0.7, **BUDGETED), 3),  # their budgets are spent in the first round
        (Ddp(noise_multiplier=1.0, record_sampling=0.01, **STEPS), 3),
        (Ddp(noise_multiplier=1.0, record_sampling=0.9, **STEPS), 0),
        (UldpGroup(group_size=4, noise_multiplier=1.0, record_sampling=0.01, **STEPS), 3),
    ],
)
@pytest.mark.parametrize("isolate_units", [False, True])
def test_a_batch_without_records_is_a_share_of_noise(
    method: Method, records: int, isolate_units: bool
) -> None:
    """A silo that failed there would tell how many records it drew, or that some have spent their budgets."""
    rng = np.random.default_rng(0)
    silos = tuple(
        SiloData(
            name,
            rng.normal(size=(count, 3)).astype(np.float32),
            np.arange(count) % 2,
            np.arange(count),
            np.full(count, 1.0),
        )
        for name, count in (("a", 3), ("b", records))
    )
    task = Task(torch.nn.Linear(3, 1), binary_cross_entropy())
    federation = Federation(silos, 3, None, classes=2)
    # By Rényi orders: ε is not what this is about.
    more = {"delta": 1e-5, "seed": 1, "isolate_units": isolate_units, "accountant": "rdp"}
    result = train(federation, task, method, rounds=2, **more)
    assert torch.isfinite(result.params).all()
    assert result.params.abs().max() > 0


@pytest.mark.parametrize("method", [UldpNaive(noise_multiplier=1.0, clip=1.0), Default()])
def test_methods_without_rows_of_units_refuse(method: Method) -> None:
    federation, task = small()
    prepare_run(federation, task, method, rounds=1)
    with pytest.raises(SilodpError) as error:
        prepare_run(federation, task, method, rounds=1, isolate_units=True)
    assert (error.value.code, error.value.field) == ("argument.conflict", "isolate_units")


@dataclass(frozen=True, repr=False)
class Together(UldpAvg):
    """It inherits what a method says of itself, and not what that was about."""

    def local_update(self, context: LocalContext) -> LocallyNoisedUpdate:
        return LocallyNoisedUpdate(torch.zeros(context.task.size, dtype=torch.float64))


def test_a_method_that_trains_in_another_way_has_to_say_so_anew() -> None:
    assert supports(type(METHODS[0]), "can_isolate_units")
    assert supports(type(METHODS[1]), "can_isolate_units")
    assert not supports(Together, "can_isolate_units")
    assert RpdpDropout.can_isolate_units


def test_the_setting_is_a_part_of_the_identity_of_a_run() -> None:
    federation, task = small()
    spec = prepare_run(federation, task, METHODS[0], rounds=1)
    alone = prepare_run(federation, task, METHODS[0], rounds=1, isolate_units=True)
    assert "isolate_units" not in spec.to_dict()  # digests of earlier runs stay
    assert alone.to_dict() == {**spec.to_dict(), "isolate_units": True}
    assert alone.digest != spec.digest
    assert replace(alone, isolate_units=False).digest == spec.digest


class Strangers(UldpAvg):
    """The method of a plug-in: nobody knows which gradients it takes."""


@pytest.mark.parametrize(
    "method", [*METHODS, Strangers(noise_multiplier=1.0)], ids=lambda method: method.name
)
def test_gradients_that_a_method_may_take_are_compared_with_autograd(monkeypatch, method):
    compared, compare = set(), Probe.compare_gradients

    def record(probe, builders, splits):
        compared.update(builders)
        compare(probe, builders, splits)

    monkeypatch.setattr(Probe, "compare_gradients", record)
    data, task = small()
    inspect_model(data.public(), task, method)
    takes_none = method.name in ("uldp-avg", "uldp-sgd") and type(method) is not Strangers
    assert compared == ({"user"} if takes_none else {"user", "record"})
