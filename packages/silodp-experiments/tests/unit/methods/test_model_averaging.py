"""Averages of models that were trained already: the mean, what is promised of it, and what is refused."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.errors import SilodpError
from silodp.methods.ddp import CLAIM
from silodp_experiments.model_averaging import average_models
from support.distributed import TABLE

SETTINGS = {"noise_multiplier": 1.0, "local_steps": 10, "record_sampling": 0.1, "delta": 1e-5}


def vectors(count: int = 4, size: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(("steps", "parties", "sigma", "rdp", "pld"), TABLE)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_papers_table_is_proven_for_one_step_and_claimed_for_more(
    steps, parties, sigma, rdp, pld, accountant
):
    """With several steps the guarantee is the one-party column, whatever the number of parties."""
    result = average_models(
        vectors(parties),
        noise_multiplier=sigma / math.sqrt(parties),
        local_steps=steps,
        record_sampling=0.1,
        delta=1e-5,
        accountant=accountant,
    ).guarantee
    says = {"rdp": rdp, "pld": pld}[accountant]
    alone = {1: (4.25, 3.67), 10: (4.25, 3.53), 50: (4.31, 3.79)}[steps][accountant == "pld"]
    if steps == 1:
        assert result.epsilon == pytest.approx(says, abs=0.02)
        assert result.claims == ()
        return
    assert result.epsilon == pytest.approx(alone, abs=0.03)
    if parties > 1:
        (claim,) = result.claims
        assert claim == {"epsilon": pytest.approx(says, abs=0.02), "why": CLAIM}
    else:
        assert result.claims == ()


def test_parties_that_pool_what_they_know_leave_less_noise():
    def spent(clients: int | None, steps: int = 1) -> float:
        return average_models(
            vectors(), **{**SETTINGS, "local_steps": steps}, clients=clients
        ).guarantee.epsilon

    assert spent(None) == spent(4) < spent(3) < spent(1)
    assert spent(4, steps=2) == spent(1, steps=2), "with several steps others' noise is not counted"


def test_the_party_with_the_least_noise_is_the_one_that_counts():
    mixed = {**SETTINGS, "noise_multiplier": [3.0, 1.0, 2.0, 5.0]}
    alone = average_models(vectors(), **SETTINGS).guarantee.epsilon
    assert average_models(vectors(), **mixed).guarantee.epsilon == alone
    one = average_models(vectors(), **{**mixed, "local_steps": 1}).guarantee.epsilon
    total = {**SETTINGS, "local_steps": 1, "noise_multiplier": math.sqrt(39)}
    assert one == pytest.approx(average_models(vectors(1), **total).guarantee.epsilon)
    two = average_models(vectors(), **{**mixed, "local_steps": 1}, clients=2).guarantee.epsilon
    total["noise_multiplier"] = math.sqrt(5)
    assert two == pytest.approx(average_models(vectors(1), **total).guarantee.epsilon)


def test_without_noise_nothing_is_promised():
    guarantee = average_models(vectors(), **{**SETTINGS, "noise_multiplier": 0.0}).guarantee
    assert guarantee.epsilon is None
    assert not guarantee.private
    assert not guarantee.releasable
    assert guarantee.claims == ()
    one_silent = {**SETTINGS, "noise_multiplier": [0.0, 1.0, 1.0, 1.0]}
    guarantee = average_models(vectors(), **one_silent).guarantee
    assert guarantee.epsilon is None
    assert guarantee.claims, "the paper promises something even so"
    assert average_models(vectors(), **{**one_silent, "local_steps": 1}).guarantee.epsilon is not None


def test_what_is_averaged_comes_back_in_kind():
    models = [nn.Sequential(nn.Linear(3, 2), nn.GroupNorm(1, 2)).double() for _ in range(3)]
    result = average_models(models, **SETTINGS).model
    assert isinstance(result, nn.Sequential)
    assert not result.training
    for name, value in result.state_dict().items():
        torch.testing.assert_close(value, sum(model.state_dict()[name] for model in models) / 3)
    assert models[0].training, "the models that were given are left alone"
    state = average_models([model.state_dict() for model in models], **SETTINGS).model
    assert isinstance(state, dict)
    torch.testing.assert_close(state["0.weight"], result[0].weight.detach())
    given = vectors()
    torch.testing.assert_close(average_models(given, **SETTINGS).model, torch.stack(given).mean(0))
    arrays = average_models([vector.numpy() for vector in given], **SETTINGS).model
    torch.testing.assert_close(arrays, torch.stack(given).mean(0))


def test_half_precision_is_averaged_in_double():
    ones = [torch.full((3,), value, dtype=torch.float16) for value in (60000.0, 60000.0, 3.0)]
    assert average_models(ones, **SETTINGS).model.tolist() == [40000.0] * 3


def trained_batch_norm() -> list[nn.Module]:
    models = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    models[0](torch.randn(8, 3))
    return models


class Counting(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.tensor(value))


class Remembering(nn.Linear):
    """Its last batch in a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("last", torch.ones(2), persistent=False)


class Caching(nn.Module):
    """A tensor as a plain attribute of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 1)
        self.body.cache = torch.ones(2)


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ([], "models is empty"),
        (3, "models is empty"),
        ([3.0], r"models\[0\] is a float"),
        ([torch.ones(2), torch.ones(3)], "the vector differs between the models"),
        ([torch.ones(2), torch.ones(2, dtype=torch.float64)], "the vector differs"),
        ([torch.ones(2), {"a": torch.ones(2)}], "no tensor in every model"),
        ([{"a": torch.ones(2)}, {"b": torch.ones(2)}], "different parameter names"),
        ([{"a": torch.ones(2)}, torch.ones(2)], "different parameter names"),
        ([{"a": torch.ones(2)}, {"a": 1.0}], "a is no tensor"),
        ([nn.Linear(2, 1), nn.Conv1d(2, 1, 1)], "different kinds"),
        ([nn.Linear(2, 1), nn.Linear(3, 1)], "weight differs"),
        ([torch.tensor([math.nan]), torch.ones(1)], "not finite"),
        ([torch.tensor([1]), torch.tensor([2])], "differs between the models: what training"),
        (trained_batch_norm(), "1.running_mean differs"),
        ([model.state_dict() for model in trained_batch_norm()], "1.running_mean differs"),
        ([Counting(1.0), Counting(2.0)], "seen differs"),
        (trained_batch_norm()[:1], "1.running_mean comes from one model alone"),
        ([Remembering(), Remembering()], "last is kept outside the state dict"),
        ([Caching(), Caching()], "body.cache is kept outside the state dict"),
    ],
)
def test_models_that_cannot_be_averaged(models, says):
    with pytest.raises(SilodpError, match=says):
        average_models(models, **SETTINGS)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"noise_multiplier": [1.0, 2.0]}, "noise_multiplier has 2 values for 4 models"),
        ({"noise_multiplier": -1.0}, "noise_multiplier = -1"),
        ({"noise_multiplier": "1"}, "noise_multiplier = '1'"),
        ({"local_steps": 0}, "local_steps = 0"),
        ({"record_sampling": 2.0}, "record_sampling = 2"),
        ({"clients": 5}, "clients = 5"),
        ({"clients": 0}, "clients = 0"),
        ({"delta": 0.0}, "delta = 0"),
        ({"accountant": "prv"}, "accountant = 'prv'"),
    ],
)
def test_settings_that_cannot_be(wrong, says):
    with pytest.raises(SilodpError, match=says):
        average_models(vectors(), **{**SETTINGS, **wrong})


def test_buffers_that_agree_are_kept():
    result = average_models([Counting(2.0), Counting(2.0)], **SETTINGS).model
    assert float(result.seen) == 2.0


def test_numpy_noise_is_a_sequence():
    own = {**SETTINGS, "noise_multiplier": np.full(4, 1.0)}
    assert average_models(vectors(), **own).guarantee == average_models(vectors(), **SETTINGS).guarantee
