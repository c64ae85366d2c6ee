"""Clipped sums that know their sensitivity, and the one place where noise is added to them.

A stream of `ClippedRows` is folded with weights into a `ClippedSum`; `ClippedSum.release` adds the noise and returns a
`Share`, which cannot be noised again. Noise on a mean, on an unclipped vector, or twice, cannot be written down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from silodp.errors import SilodpError, check_real
from silodp.mechanisms.noise import gaussian

_SLICE = 1 << 20  # numbers turned into double precision at once


@dataclass(frozen=True)
class ClippedRows:
    """Vectors and the factors that bring each into the ball of radius `clip`.

    owners (r,) int64: whose row it is (a user index, or a record position); rows (r, d) as computed;
    factors (r,) float64 with ‖factors[i]·rows[i]‖₂ ≤ clip, and 0 for rows that are not finite.
    """

    owners: Tensor
    rows: Tensor
    factors: Tensor
    clip: float

    @property
    def refused(self) -> int:
        """How many rows were not finite, and count as zero."""
        return int((self.factors == 0).sum())

    def split(self, most: int) -> Iterator[ClippedRows]:
        """The same rows, at most so many at a time."""
        for first in range(0, len(self.rows), most):
            part = slice(first, first + most)
            yield ClippedRows(self.owners[part], self.rows[part], self.factors[part], self.clip)


@dataclass(frozen=True)
class Bounds:
    """The public constants of what silos add up.

    Attributes:
        clip: every row lies in the ball of this radius.
        sensitivity: how far emptying one unit moves the silos' weighted sums together (`uldp-avg`: the clip), or each
            silo's (`uldp-naive`: twice the clip); in units of the update.
        noise_multiplier: one silo's share of the noise, in units of `sensitivity`.
        total: the 2-norm that the sum over all silos cannot exceed, noise aside.
    """

    clip: float
    sensitivity: float
    noise_multiplier: float
    total: float


@dataclass(frozen=True)
class ClippedStream:
    """What a silo is about to add up: clipped rows, chunk by chunk, neither weighted nor noised yet.

    How they are added (in clear, masked, weighted privately) is the aggregator's choice, not the method's.

    Attributes:
        chunks: consumed once.
        size: d.
        bounds: what holds for every row and for the sum.
        weighted: whether a row counts with its owner's weight; otherwise with 1.
    """

    chunks: Iterable[ClippedRows]
    size: int
    bounds: Bounds
    weighted: bool


@dataclass(frozen=True)
class Finished:
    """An update (d,) float64 to which nothing is added: its noise is inside already, or there is no privacy."""

    value: Tensor
    refused: int = 0


Update = ClippedStream | Finished


@dataclass(frozen=True)
class Share:
    """What leaves a silo: value (d,) float64; `noise_std` is the absolute std of the noise added by `release`."""

    value: Tensor
    noise_std: float
    refused: int = 0


@dataclass(frozen=True)
class ClippedSum:
    """Σ weight·clipped row: value (d,) float64, and how far emptying one unit can move it."""

    value: Tensor
    sensitivity: float
    refused: int = 0

    def release(self, noise_multiplier: float, stream: np.random.Generator) -> Share:
        """Add N(0, (noise_multiplier·sensitivity)²) to every coordinate, once."""
        std = noise_multiplier * self.sensitivity
        return Share(self.value + gaussian(self.value.numel(), std, stream), std, self.refused)


def check_clip(clip: float) -> None:
    """Refuse a clip that bounds nothing."""
    check_real("clip", clip)
    if not (math.isfinite(clip) and clip > 0):
        raise SilodpError(
            f"clip = {clip} bounds nothing: set a finite clip > 0, in units of the update's 2-norm."
        )


def clip_rows(owners: Tensor, rows: Tensor, clip: float) -> ClippedRows:
    """min(1, clip/‖row‖₂) for each of the rows (r, d); a row that is not finite gets factor 0.

    A non-finite row becomes zero by itself, as a function of its owner's records alone, so the sensitivity stays
    `clip`; dropping the whole silo instead would make taking part depend on data.
    """
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    # Shrunk a little, so that the rounded product, too, stays within the ball.
    margin = 1 - 1e-12
    factors = torch.clamp(clip * margin / norms.clamp_min(torch.finfo(torch.float64).tiny), max=1.0)
    return ClippedRows(owners, rows, torch.where(torch.isfinite(norms), factors, 0.0), clip)


def fold(stream: ClippedStream, weights: Tensor | None = None) -> ClippedSum:
    """Σ over all rows of weight·factor·row, in double precision.

    Single precision would round a sum of 10⁵ rows by more than one row is worth, and small factors to nothing.

    `weights` (indexed by owner, float64, each within [0, 1]) must add to at most 1 over everything one unit owns, here
    and in other silos; that is `methods.weighting`'s promise. They count only where the stream is `weighted`.
    """
    if stream.weighted and weights is None:
        raise SilodpError("rows that count with their owner's weight cannot be folded without weights.")
    value = torch.zeros(stream.size, dtype=torch.float64)
    per_slice = max(1, _SLICE // stream.size)
    refused = 0
    for chunk in stream.chunks:
        if chunk.clip != stream.bounds.clip:
            raise SilodpError(
                f"rows clipped to {chunk.clip} cannot be folded where {stream.bounds.clip} was declared."
            )
        coefficients = chunk.factors
        if stream.weighted and weights is not None:
            coefficients = coefficients * weights[chunk.owners.to(weights.device)].to(coefficients.device)
        finite = chunk.factors > 0
        rows = chunk.rows
        if not bool(finite.all()):
            rows, coefficients = rows[finite], coefficients[finite]
        for part, own in zip(torch.split(rows, per_slice), torch.split(coefficients, per_slice), strict=True):
            value += (own @ part.double()).cpu()
        refused += chunk.refused
    return ClippedSum(value, stream.bounds.sensitivity, refused)
