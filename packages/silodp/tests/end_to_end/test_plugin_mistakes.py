"""Mistakes of a plug-in: one sentence with a code that names its class, where silodp takes the value from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from silodp.data import Federation, SiloData
from silodp.methods import ServerOptimizer
from silodp.runtime.checkpoint import Checkpoint, encode_checkpoint, load_checkpoint, save_checkpoint
from support.commands import Silodp, assert_sentence
from support.refusals import refused

CODE = """
from dataclasses import dataclass, field

import numpy as np
import torch

from silodp.accounting import Accountant, Composition
from silodp.aggregators import Plain, PlainServer
from silodp.data import Dataset, Federation, SiloData
from silodp.methods import ServerOptimizer, UldpAvg


@dataclass(frozen=True)
class Alone(ServerOptimizer):
    def step(self, params, total, state, move):
        return params


@dataclass(frozen=True)
class Short(ServerOptimizer):
    def step(self, params, total, state, move):
        return params[:3], {}


@dataclass(frozen=True)
class Wide(ServerOptimizer):
    def step(self, params, total, state, move):
        return params.double(), {}


@dataclass(frozen=True)
class Counts(ServerOptimizer):
    def step(self, params, total, state, move):
        return params, {"n": 1}


@dataclass(frozen=True)
class Taken(ServerOptimizer):
    def initial_state(self, params):
        return {"params": params}

    def step(self, params, total, state, move):
        return params, {}


@dataclass(frozen=True)
class ShortOutput(ServerOptimizer):
    def step(self, params, total, state, move):
        return params, {}

    def output_params(self, params, state):
        return params[:3]


class Number(Accountant):
    name = "number"

    def supports(self, event):
        return True

    def compose(self, charges):
        return 1.0


class NoEpsilon(Composition):
    def epsilon(self, delta):
        return None


class Nothing(Number):
    def compose(self, charges):
        return NoEpsilon()


class Raising(Number):
    def compose(self, charges):
        raise LookupError("nothing here")


@dataclass(frozen=True, repr=False)
class Told(Plain):
    name = "told"
    visibility = ("everybody", "everything")


@dataclass(frozen=True, repr=False)
class Share(Plain):
    name = "share"
    delta_share = 2


class ShortServer(PlainServer):
    def combine(self, shares):
        return shares[0][:2]


@dataclass(frozen=True, repr=False)
class ShortSum(Plain):
    name = "short-sum"

    def server(self, spec):
        return ShortServer(spec)


@dataclass(frozen=True, repr=False)
class RaisingSum(Plain):
    name = "raising-sum"

    def server(self, spec):
        raise LookupError("nothing here")


class Undeclared(UldpAvg):
    root: int = 2


@dataclass(frozen=True, repr=False)
class Untyped(UldpAvg):
    root = 2
    name: str = field(default="untyped", init=False)


@dataclass(frozen=True, repr=False)
class RaisingMethod(UldpAvg):
    name: str = field(default="raising", init=False)

    def local_update(self, context):
        raise LookupError("nothing here")


@dataclass(frozen=True, repr=False)
class Careless(UldpAvg):
    name: str = field(default="careless", init=False)

    def dp_event(self, view):
        return super().dp_event(None)


def load(users: int = 20, silos: int = 2, wrong: bool = False) -> Federation:
    if wrong:
        raise LookupError("nothing here")
    x, y, user = np.zeros((6, 3), np.float32), np.arange(6) % 2, np.arange(6)
    test = SiloData("test", x, y, user)
    parts = tuple(SiloData(f"clinic {s}", x, y, user, test=test) for s in range(silos))
    return Federation(parts, users, test, name="six", classes=2)


SIX = Dataset(name="six", loader=load, record_shape=(3,), classes=2)
WIDE = Dataset(name="six", loader=load, record_shape=(4,), classes=2)
THREE = Dataset(name="six", loader=load, record_shape=(3,), classes=3)


def recall(outputs, targets):
    return 0.5
"""


@pytest.fixture
def code(config: Path) -> Path:
    path = config.parent / "own.py"
    path.write_text(CODE)
    return path


OPTIMIZER, ACCOUNTANT, AGGREGATOR = "method.server_optimizer.name", "accountant", "aggregator"


@pytest.mark.parametrize(
    ("setting", "name", "error"),
    [
        (OPTIMIZER, "Alone", "plugin.returned"),
        (OPTIMIZER, "Short", "plugin.returned"),
        (OPTIMIZER, "Wide", "plugin.returned"),
        (OPTIMIZER, "Counts", "plugin.returned"),
        (OPTIMIZER, "Taken", "plugin.returned"),
        (OPTIMIZER, "ShortOutput", "plugin.returned"),
        (ACCOUNTANT, "Number", "plugin.returned"),
        (ACCOUNTANT, "Nothing", "plugin.returned"),
        (ACCOUNTANT, "Raising", "plugin.raised"),
        (AGGREGATOR, "Told", "plugin.returned"),
        (AGGREGATOR, "Share", "plugin.returned"),
        (AGGREGATOR, "ShortSum", "plugin.returned"),
        (AGGREGATOR, "RaisingSum", "plugin.raised"),
        ("method.name", "Undeclared", "plugin.not_frozen"),
        ("method.name", "RaisingMethod", "plugin.raised"),
        # What it called raised: it is the plug-in's mistake all the same.
        ("method.name", "Careless", "plugin.raised"),
    ],
)
def test_a_mistake_names_the_class(
    silodp: Silodp, config: Path, code: Path, setting: str, name: str, error: str
) -> None:
    ran = silodp("run", config, "--set", f"{setting}={code}:{name}", "--set", "rounds=1", "--out", "out")
    last = ran._replace(err=ran.err.splitlines(keepends=True)[-1])  # after the lines of rounds
    owner = {"ShortSum": "ShortServer"}.get(name, name)
    assert_sentence(last, f"own.py:{owner}", code=error)
    assert ("The traceback is in" in last.err) == (error == "plugin.raised")


@pytest.mark.parametrize("name", ["Told", "Share", "Number"])
def test_a_plan_refuses_what_the_end_of_a_run_would_need(
    silodp: Silodp, config: Path, code: Path, name: str
) -> None:
    setting = ACCOUNTANT if name == "Number" else AGGREGATOR
    planned = silodp("plan", config, "--set", f"{setting}={code}:{name}")
    assert_sentence(planned, code="plugin.returned")


@pytest.mark.parametrize(
    ("data", "error"),
    [("WIDE", "data.federation"), ("THREE", "data.federation"), ("SIX", "plugin.raised")],
)
def test_a_data_set_that_is_not_as_declared_is_refused(
    silodp: Silodp, config: Path, code: Path, data: str, error: str
) -> None:
    wrong = ", wrong=true" if data == "SIX" else ""
    ran = silodp("run", config, "--set", f"data={{source='{code}:{data}'{wrong}}}", "--out", "out")
    assert_sentence(ran, code=error)
    assert not Path("out").exists()


def test_a_name_that_is_not_defined_is_told_by_its_kind(silodp: Silodp, config: Path, code: Path) -> None:
    for setting, name in (
        ("task.loss", "recal"),
        ("task.metrics", "recal"),
        ("method.name", "Careles"),
        ("data.source", "SIXX"),
    ):
        value = f'["{code}:{name}"]' if setting == "task.metrics" else f"{code}:{name}"
        ran = silodp("run", config, "--set", f"{setting}={value}", "--out", "out")
        assert_sentence(ran, code="config.not_importable")
    ran = silodp("epsilon", "--method", "own.py", "--rounds", "1")
    assert_sentence(ran, code="argument.value")


def test_an_attribute_without_a_type_is_no_setting(silodp: Silodp, config: Path, code: Path) -> None:
    settings = ("--set", f"method.name={code}:Untyped", "--set", "method.root=3")
    ran = silodp("plan", config, *settings)
    assert_sentence(ran, code="config.unknown_field")


def test_held_out_persons_have_numbers_of_users_or_of_their_own() -> None:
    def federate(*persons: int) -> Federation:
        x, y = np.zeros((len(persons), 1), np.float32), np.zeros(len(persons), np.int64)
        test = SiloData("north", x, y, np.array(persons))
        silo = SiloData("north", x[:1], y[:1], np.zeros(1, np.int64), test=test)
        return Federation((silo,), 3, None, classes=2)

    federate(2)  # as in the training records
    federate(0, 1, 2, 3, 4)  # more persons than users
    with refused("data.federation"):
        federate(0, 3)


def test_a_state_may_hold_the_model_itself(tmp_path: Path) -> None:
    model = torch.arange(3.0)
    state = Checkpoint("run", "fingerprint", 1, model, {"last": model, "row": torch.ones(3, 2).T[0]})
    save_checkpoint(tmp_path / "state", encode_checkpoint(state))
    loaded = load_checkpoint(tmp_path / "state", "fingerprint")
    assert torch.equal(loaded.optimizer["last"], model)


def test_a_class_of_settings_that_is_no_dataclass_makes_no_object() -> None:
    class Undeclared(ServerOptimizer):
        rate: float = 1.0

        def step(self, params, total, state, move):  # type: ignore[no-untyped-def]
            return params, {}

    with refused("plugin.not_frozen"):
        Undeclared()
