"""Runs of models with frozen parts: a party with other frozen values is refused, and no message, no noise and no stored
vector of a run covers them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import silodp
from silodp.accounting.guarantee import PUBLIC_VALUES
from silodp.config.resolve import load_config
from silodp.runtime.prepare import prepare_run
from silodp.training import LocalTraining, cross_entropy
from silodp_deploy.consortium import Consortium
from silodp_deploy.server import serve
from silodp_deploy.setup import find_free_port, make_local
from silodp_deploy.silo import open_silo
from silodp_experiments.uldp_baselines import UldpNaive
from support.oracles import small_federation
from support.refusals import refused

WIDTH = 2000
METHODS = {
    "uldp-avg": silodp.methods.UldpAvg(noise_multiplier=1.0, clip=0.5, local=LocalTraining(0.1)),
    "uldp-naive": UldpNaive(noise_multiplier=1.0, clip=0.5, local=LocalTraining(0.1)),
}


def build(seed: int = 0) -> nn.Module:
    """A frozen body of 8,000 parameters and 2,000 buffers that no state keeps, and a head of 10."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.AdaptiveAvgPool1d(4)).requires_grad_(False)
    body.register_buffer("unused", torch.ones(WIDTH), persistent=False)
    torch.manual_seed(9)
    return nn.Sequential(body.eval(), nn.Linear(4, 2))


@pytest.mark.parametrize("name", METHODS)
def test_messages_noise_and_results_have_the_size_of_the_trainable_part(name: str, tmp_path: Path) -> None:
    federation, task = small_federation(features=3), silodp.Task(build(), cross_entropy())
    assert prepare_run(federation, task, METHODS[name], rounds=1).model.size == 10
    result = silodp.train(federation, task, METHODS[name], rounds=2, seed=1, out=tmp_path / "run")
    assert result.params.shape == (10,)
    sent, messages = sum(result.metrics[-1]["bytes"].values()), 2 * len(federation.silos)
    assert 40 * messages < sent < 1000 * messages  # the frozen part has 32 kB
    state = (tmp_path / "run" / "checkpoint" / "state.safetensors").stat().st_size
    assert state < 2000
    assert torch.equal(result.model[0][0].weight, build()[0][0].weight)


class Scaled(nn.Linear):
    """A layer with a parameter that nothing draws anew."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.last = self.Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.last.scale


class Centered(nn.Linear):
    """A layer with constants in a plain attribute."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.center = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - self.center)


class Listed(nn.Linear):
    """A layer with constants in a list."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.center, self.heads = [0.1, 0.2, 0.3], 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - torch.tensor(self.center))


class Counted(nn.Linear):
    """A layer with whole numbers alone, which shapes are made of."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.heads = 4


class Tempered(nn.Linear):
    """A layer with a parameter that the method of its parent does not draw."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize(
    ("model", "pretrained", "is_assumed"),
    [
        (build, None, True),
        (lambda: nn.Linear(3, 2), None, False),
        (lambda: nn.Linear(3, 2), True, True),
        (Scaled, None, True),
        (Centered, None, True),
        (Listed, None, True),
        (Counted, None, False),
        (Tempered, None, True),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), None, False),
    ],
)
def test_a_guarantee_says_where_the_models_values_must_be_public(
    model: Callable[[], nn.Module], pretrained: bool | None, is_assumed: bool
) -> None:
    task = silodp.Task(model(), cross_entropy(), pretrained=pretrained)
    result = silodp.train(small_federation(features=3), task, METHODS["uldp-avg"], rounds=1)
    for guarantee in result.guarantees.values():
        assert (PUBLIC_VALUES in guarantee.assumptions) == is_assumed


def test_a_run_is_resumed_with_the_same_frozen_values_alone(tmp_path: Path) -> None:
    federation, method = small_federation(features=3), METHODS["uldp-avg"]
    whole = silodp.train(federation, silodp.Task(build(), cross_entropy()), method, rounds=2, seed=1)
    silodp.train(
        federation, silodp.Task(build(), cross_entropy()), method, rounds=1, seed=1, out=tmp_path / "run"
    )
    buffer = build()
    buffer[0].unused[0] = 2.0
    mode = build()
    mode[0].train()  # a frozen dropout would now be on
    for model in (build(seed=1), buffer, mode):
        with refused("checkpoint.setup"):
            task = silodp.Task(model, cross_entropy())
            silodp.train(federation, task, method, rounds=2, seed=1, out=tmp_path / "run", resume=True)
    task = silodp.Task(build(), cross_entropy())
    again = silodp.train(federation, task, method, rounds=2, seed=1, out=tmp_path / "run", resume=True)
    assert torch.equal(again.params, whole.params)


def test_a_run_is_resumed_from_the_same_stated_start_alone(tmp_path: Path) -> None:
    """The values of a head that is drawn when the model is built may differ; those of pretrained=True may not."""
    federation, method = small_federation(features=3), METHODS["uldp-avg"]
    for pretrained in (None, True):
        out = tmp_path / str(pretrained)

        def train(rounds: int, shift: float, stated: bool | None = pretrained, out: Path = out) -> None:
            model = build()
            with torch.no_grad():
                model[1].bias += shift
            task = silodp.Task(model, cross_entropy(), pretrained=stated)
            silodp.train(federation, task, method, rounds=rounds, seed=1, out=out, resume=out.exists())

        train(1, 0.0)
        if pretrained:
            with refused("checkpoint.setup"):
                train(2, 1.0)
            train(2, 0.0)
        else:
            train(2, 1.0)


def test_a_loaded_model_has_the_frozen_values_of_the_run(tmp_path: Path) -> None:
    federation, method = small_federation(features=3), METHODS["uldp-avg"]
    result = silodp.train(
        federation, silodp.Task(build(), cross_entropy()), method, rounds=1, seed=1, out=tmp_path / "run"
    )
    x = federation.test.x
    with torch.no_grad():
        wanted = result.model(torch.from_numpy(x))
    loaded = silodp.load(tmp_path / "run", model=build(seed=5))
    assert torch.equal(torch.from_numpy(loaded.compute_outputs(x)), wanted)
    buffer = build()
    buffer[0].unused[0] = 2.0
    with refused("bundle.architecture"):
        silodp.load(tmp_path / "run", model=buffer)


NETWORK = """
from pathlib import Path

from safetensors.torch import load_file
from torch import nn


def network(features: int, weights: str) -> nn.Module:
    body = nn.Linear(features, 4)
    body.load_state_dict(load_file(weights))
    body.train(not Path(weights).with_name("eval").exists())
    return nn.Sequential(body.requires_grad_(False), nn.Tanh(), nn.Linear(4, 1))
"""
CONFIG = """
rounds = 2
[data]
source = "embedded"
users = 20
silos = 3
[task]
model = "net.py:network"
options = {{ weights = "{weights}" }}
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.5
[method.local]
learning_rate = 0.1
"""


def write_weights(path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    save_file(nn.Linear(30, 4).state_dict(), path)


@pytest.fixture(params=["values", "mode"])
def parties(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folders of a consortium whose frozen part was changed on this machine after all had agreed.

    What a model file reads from the machine of a party is no part of the public folder, and no digest of files covers
    it. Without the digest of the values in the run's specification, silos would train heads for features that the
    server's model does not compute.
    """
    weights = tmp_path / "weights.safetensors"
    (tmp_path / "net.py").write_text(NETWORK)
    (tmp_path / "config.toml").write_text(CONFIG.format(weights=weights))
    write_weights(weights, 0)
    config = load_config(tmp_path / "config.toml")
    make_local(config, config.load_federation(), tmp_path / "parties", find_free_port())
    for home in sorted((tmp_path / "parties" / "silos").iterdir()):
        with open_silo(home, Consortium.load(tmp_path / "parties" / "public")) as silo:
            assert silo.name
    if request.param == "values":
        write_weights(weights, 1)
    else:
        (tmp_path / "eval").touch()
    return tmp_path / "parties"


def test_a_silo_with_other_frozen_values_than_agreed_is_refused(parties: Path) -> None:
    for home in sorted((parties / "silos").iterdir()):
        with refused("deploy.spec"), open_silo(home, Consortium.load(parties / "public")):
            pass


@pytest.mark.timeout(30)  # without the refusal it waits for its silos
def test_a_server_with_other_frozen_values_than_agreed_is_refused(parties: Path) -> None:
    with refused("deploy.spec"):
        serve(parties / "server", Consortium.load(parties / "public"))
    assert not (parties / "server" / "run").exists()
