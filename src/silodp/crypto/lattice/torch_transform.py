"""The ring's transform through torch, so that a party with a GPU may do its products there.

What comes out is the same to the last bit on every device, because every sum of products is checked or proven exact:
which device a party takes is its own affair, and nobody else can tell but by the time it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from silodp.crypto.lattice.ring import FourierTransform, Integers, Transform
from silodp.errors import SilodpError

Device = Literal["cpu", "cuda"]
"""Where a party may compute."""

_ROWS_AT_A_TIME = {"cpu": 16}  # as in `FourierTransform`: a megabyte, which stays in the cache
_ROWS_ON_A_GPU = 1024  # elsewhere each piece must be large enough to keep the device busy: a tenth of a GB


@dataclass(frozen=True)
class TorchTransform:
    """The transform of `FourierTransform` (size N) on a torch device; spectra are complex128 tensors that stay there.

    Its rounding errors obey the same a-priori bound (docs/protocols.md, section 3), which allows any Cooley-Tukey
    transform with twiddle factors of full precision.
    """

    size: int
    device: str = "cpu"

    @cached_property
    def _twist(self) -> Tensor:
        angles = torch.arange(self.size // 2, dtype=torch.float64) * (torch.pi / self.size)
        return torch.polar(torch.ones_like(angles), angles).to(self.device)

    def forward(self, polynomials: NDArray[Any]) -> Tensor:
        """Integers (r, c, N) to a spectrum (N/2, r, c) on the device."""
        rows, columns, size = polynomials.shape
        half = size // 2
        spectrum = torch.empty((half, rows, columns), dtype=torch.complex128, device=self.device)
        for some in self._pieces(rows, columns):
            # They travel as the integers they are, half as wide as floats.
            integers = torch.tensor(polynomials[some], device=self.device)
            folded = torch.empty((*integers.shape[:2], half), dtype=torch.complex128, device=self.device)
            parts = torch.view_as_real(folded)
            parts[..., 0], parts[..., 1] = integers[..., :half], integers[..., half:]
            spectrum[:, some] = torch.fft.fft(folded.mul_(self._twist)).permute(2, 0, 1)
        return spectrum

    def inverse(self, spectrum: Tensor) -> Integers:
        """A spectrum (N/2, r, c) to integers (r, c, N) in main memory, each rounded to the nearest."""
        half, rows, columns = spectrum.shape
        polynomials = np.empty((rows, columns, 2 * half), np.int64)
        for some in self._pieces(rows, columns):
            folded = torch.fft.ifft(spectrum[:, some].permute(1, 2, 0)).mul_(self._twist.conj())
            # Beyond 2^63 this is garbage, as in `FourierTransform`, and is found out by the check of products.
            parts = torch.view_as_real(folded).round_().to(torch.int64).cpu().numpy()
            polynomials[some, :, :half], polynomials[some, :, half:] = parts[..., 0], parts[..., 1]
        return polynomials

    def _pieces(self, rows: int, columns: int) -> list[slice]:
        at_a_time = _ROWS_AT_A_TIME.get(torch.device(self.device).type, _ROWS_ON_A_GPU)
        step = max(1, at_a_time // max(1, columns))
        return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def transform_on(device: str, size: int) -> Transform:
    """The transform for rings of size N on this device: numpy's on "cpu" (the faster one there), torch's on "cuda".

    Raises:
        SilodpError: the device is not known, or there is none.
    """
    if device == "cpu":
        return FourierTransform(size)
    if device != "cuda":
        raise SilodpError(
            f"device = '{device}' is not known to the lattice: use 'cpu' or 'cuda'.",
            code="argument.value",
            field="device",
        )
    if not torch.cuda.is_available():
        raise SilodpError(
            "device = 'cuda' was asked for and torch finds no CUDA device here: use device = 'cpu', which gives the "
            "same sums.",
            code="argument.value",
            field="device",
        )
    return TorchTransform(size, device)
