"""Where a party of `lattice` computes is its own affair: nobody else can tell, and the sums are the same to the bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from silodp.aggregators import lattice
from silodp.aggregators.lattice import Lattice
from silodp.crypto.lattice import torch_transform
from silodp.crypto.lattice.ring import FourierTransform
from silodp.crypto.lattice.torch_transform import TorchTransform
from silodp.errors import SilodpError
from silodp.runtime.silo import Silo
from support.clear import released
from support.oracles import small_federation
from support.private import LATTICE, SAMPLED, Parties, run, setting

ON_CUDA = replace(LATTICE, device="cuda")
WIDE = small_federation(features=9000)
"""Two blocks of the ring."""


@pytest.fixture
def used(monkeypatch) -> list[str]:
    """A pretended GPU: torch on the CPU in its place. What was transformed by which library."""
    used: list[str] = []
    for kind in (TorchTransform, FourierTransform):
        honest = kind.forward
        monkeypatch.setattr(
            kind, "forward", lambda self, x, f=honest, k=kind: used.append(k.__name__) or f(self, x)
        )
    on = torch_transform.transform_on
    monkeypatch.setattr(
        lattice, "transform_on", lambda device, n: TorchTransform(n) if device == "cuda" else on(device, n)
    )
    return used


@pytest.fixture
def no_cuda(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("federation", [small_federation(), WIDE], ids=["one block", "two blocks"])
def test_a_run_through_torch_is_the_run_through_numpy_to_the_bit(federation, used):
    with released() as ours:
        torched = run(ON_CUDA, SAMPLED, federation=federation)
    assert set(used) == {"TorchTransform"}
    used.clear()
    with released() as theirs:
        plain = run(LATTICE, SAMPLED, federation=federation)
    assert set(used) == {"FourierTransform"}
    np.testing.assert_array_equal(ours, theirs)
    assert torch.equal(torched.params, plain.params)
    assert torched.epsilon == plain.epsilon


@pytest.mark.parametrize("differs", ["silo1", "the server"])
def test_parties_may_compute_on_different_devices(differs, used, monkeypatch):
    whole = run(LATTICE, SAMPLED)
    used.clear()

    def party(data, task, aggregator, *more):
        own = replace(aggregator, device="cuda" if data.name == differs else "cpu")
        return Silo(data, task, own, *more)

    monkeypatch.setattr("silodp.runtime.simulation.Silo", party)
    mixed = run(ON_CUDA if differs == "the server" else LATTICE, SAMPLED)
    assert set(used) == {"TorchTransform", "FourierTransform"}
    assert torch.equal(mixed.params, whole.params)


def test_the_device_is_no_public_constant(used):
    """Or a session of parties that differ would not come about, and a run could not be resumed elsewhere."""
    assert LATTICE == ON_CUDA
    assert hash(LATTICE) == hash(ON_CUDA)
    assert setting().constants(LATTICE) == setting().constants(ON_CUDA)
    assert "cuda" not in str(ON_CUDA.describe(setting(SAMPLED)))


def test_a_run_goes_on_on_another_device(used, tmp_path):
    whole = run(LATTICE, SAMPLED, rounds=3)
    run(LATTICE, SAMPLED, rounds=1, out=tmp_path)
    used.clear()
    resumed = run(ON_CUDA, SAMPLED, rounds=3, out=tmp_path, resume=True)
    assert set(used) == {"TorchTransform"}
    assert torch.equal(resumed.params, whole.params)


def test_a_device_that_is_not_there_is_refused_before_anything_runs(no_cuda):
    with pytest.raises(
        SilodpError, match=r"^device = 'cuda' was asked for and torch finds no CUDA device here"
    ):
        run(ON_CUDA, SAMPLED, rounds=1)
    with pytest.raises(SilodpError, match="device = 'gpu' is not known to the lattice"):
        run(replace(LATTICE, device="gpu"), SAMPLED, rounds=1)
    ON_CUDA.check(setting(SAMPLED))  # a plan for another machine can be made on this one


def test_either_side_asks_for_its_own_device(no_cuda):
    with pytest.raises(SilodpError, match="finds no CUDA device"):
        ON_CUDA.server(setting(SAMPLED))
    with pytest.raises(SilodpError, match="finds no CUDA device"):
        Parties(ON_CUDA)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("federation", [small_federation(), WIDE], ids=["one block", "two blocks"])
def test_a_run_on_a_gpu_is_the_run_on_the_cpu_to_the_bit(federation):
    on_gpu = run(Lattice(count_cap=3, attempts=20, device="cuda"), SAMPLED, federation=federation)
    assert torch.equal(on_gpu.params, run(LATTICE, SAMPLED, federation=federation).params)
