"""The transform through torch against numpy's, alone and in whole lattice rounds; on a GPU where there is one."""

import numpy as np
import pytest
import torch

from silodp.crypto.lattice import torch_transform
from silodp.crypto.lattice.ring import FourierTransform
from silodp.crypto.lattice.torch_transform import TorchTransform, transform_on
from silodp.errors import SilodpError
from support.lattice_rounds import case, plain, round_of, toy

SIZE = 256
HARD = {
    "users": 40,
    "count_cap": 1 << 9,
    "clip_units": 1 << 20,
    "limb_bits": 24,
    "limbs": 7,
    "weight_bits": 20,
}
"""Beyond the planning rule: products are wrong, and computed again in pieces."""
DEVICES = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
        ),
    ],
)


def matrix(rows, columns, dtype, seed=0):
    most = min(np.iinfo(dtype).max, 1 << 20)
    return np.random.default_rng(seed).integers(-most, most + 1, (rows, columns, SIZE)).astype(dtype)


@DEVICES
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (3, 40, 18), (33, 5, 2), (2, 3, 40)])
def test_products_are_those_of_numpy(device, dtype, rows, inner, columns):
    left, right = matrix(rows, inner, dtype), matrix(inner, columns, dtype, 1)
    ours, theirs = TorchTransform(SIZE, device), FourierTransform(SIZE)
    spectrum, wanted = ours.forward(left), theirs.forward(left)
    assert spectrum.shape == wanted.shape == (SIZE // 2, rows, inner)
    np.testing.assert_allclose(spectrum.cpu().numpy(), wanted, rtol=0, atol=1e-9 * np.abs(wanted).max())
    found = ours.inverse(spectrum @ ours.forward(right))
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, theirs.inverse(wanted @ theirs.forward(right)))


@DEVICES
def test_what_a_party_does_with_a_spectrum_it_can_do_with_this_one(device):
    """Adjoints, sums, and matrices taken by columns."""
    left, right = matrix(6, 4, np.int16), matrix(6, 5, np.int16, 1)
    found = []
    for transform in (TorchTransform(SIZE, device), FourierTransform(SIZE)):
        total = transform.forward(left).swapaxes(1, 2) @ transform.forward(right)
        total += transform.forward(left[:1]).swapaxes(1, 2) @ transform.forward(right[:1]).conj()
        found.append(transform.inverse(total.conj()))
    np.testing.assert_array_equal(*found)


@DEVICES
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("changes", [{"users": 40}, HARD], ids=["within the plan", "in pieces"])
def test_a_round_is_exact_bit_for_bit(device, workers, changes):
    parameters = toy(**changes)
    found = round_of(
        parameters, *case(parameters), transform=TorchTransform(parameters.ring_size, device), workers=workers
    )
    np.testing.assert_array_equal(found, plain(parameters, *case(parameters)))


def test_a_wrong_product_is_found_here_as_well(monkeypatch):
    """Rounded elsewhere, the block is computed again in pieces; where these are wrong too, nothing is sent."""
    honest, wrong = TorchTransform.inverse, []

    def inverse(self, spectrum):
        polynomials = honest(self, spectrum)
        if polynomials.shape[1] == 18 and len(wrong) < most:
            wrong.append(polynomials)
            polynomials[0, 3, 100] += 1
        return polynomials

    monkeypatch.setattr(TorchTransform, "inverse", inverse)
    parameters, most = toy(), 1
    found = round_of(parameters, *case(parameters), transform=TorchTransform(256))
    np.testing.assert_array_equal(found, plain(parameters, *case(parameters)))
    assert len(wrong) == 1
    most = 10**9
    with pytest.raises(SilodpError, match="nothing was sent"):
        round_of(parameters, *case(parameters), transform=TorchTransform(256))


@pytest.mark.parametrize("columns", [1, 7, 40])
def test_a_piece_at_a_time_is_copied_however_many_polynomials_there_are(columns, monkeypatch):
    """As with numpy: besides the result there is never more than sixteen polynomials' worth, or one row of them."""
    largest = []
    for name in ("fft", "ifft"):
        plain_transform = getattr(torch.fft, name)
        monkeypatch.setattr(
            torch.fft, name, lambda x, f=plain_transform: largest.append(x.shape[0] * x.shape[1]) or f(x)
        )
    transform = TorchTransform(SIZE)
    transform.inverse(transform.forward(matrix(100, columns, np.int32)))
    assert max(largest) <= max(16, columns)
    assert sum(largest) == 2 * 100 * columns


def test_input_that_may_not_be_written_to_is_taken_as_it_is():
    left = matrix(2, 2, np.int32)
    left.flags.writeable = False
    transform = TorchTransform(SIZE)
    np.testing.assert_array_equal(transform.inverse(transform.forward(left)), left)
    strided = matrix(8, 4, np.int32)[::2, 1:]
    np.testing.assert_array_equal(transform.inverse(transform.forward(strided)), strided)


# --- which device


def test_numpy_stays_the_transform_of_the_cpu():
    assert transform_on("cpu", 8192) == FourierTransform(8192)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:0", "mps"])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(
        SilodpError, match=rf"^device = '{device}' is not known to the lattice: use 'cpu' or 'cuda'\.$"
    ):
        transform_on(device, 8192)


def test_a_gpu_that_is_not_there_is_refused_and_one_that_is_there_is_used(monkeypatch):
    monkeypatch.setattr(torch_transform.torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        SilodpError, match=r"^device = 'cuda' was asked for and torch finds no CUDA device here: [^.]*\.$"
    ):
        transform_on("cuda", 8192)
    monkeypatch.setattr(torch_transform.torch.cuda, "is_available", lambda: True)
    assert transform_on("cuda", 8192) == TorchTransform(8192, "cuda")
