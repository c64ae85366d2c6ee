"""Clipping, weighted sums that carry their sensitivity, and the one place where noise is added to them.

`add_weighted_rows` adds up a stream of `ClippedRows` to a `ClippedSum`; `ClippedSum.add_noise` returns a `Share`, which
has no such method. So a program cannot add noise to a mean, to a vector that is not clipped, or twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from silodp.errors import SilodpError
from silodp.mechanisms.noise import draw_gaussian
from silodp.mechanisms.rows import FactoredRows, add_rows, compute_norms

if TYPE_CHECKING:
    from torch import Tensor

_EXPANDED = 1 << 20  # numbers of products that are multiplied out at once


@dataclass(frozen=True)
class ClippedRows:
    """Vectors and the factors that bring each into the ball of radius `clip`.

    Attributes:
        owners: (r,) int64, a user index or a record position for each row.
        rows: (r, d) as computed, a tensor or `FactoredRows`.
        factors: (r,) float64 with ‖factors[i]·rows[i]‖₂ ≤ clip, and 0 for rows that are not finite.
        clip: C, in units of the update's 2-norm.
        norms: (r,) float64, ‖rows[i]‖₂; None: computed where they are needed.
    """

    owners: Tensor = field(repr=False)
    rows: Tensor | FactoredRows = field(repr=False)
    factors: Tensor = field(repr=False)
    clip: float
    norms: Tensor | None = field(default=None, repr=False)

    @property
    def refused(self) -> int:
        """Number of rows that were not finite, and count as zero."""
        return int((self.factors == 0).sum())

    def compute_clipped_norms(self) -> Tensor:
        """Return ‖factors[i]·rows[i]‖₂, (r,) float64; NaN for rows that are not finite."""
        norms = compute_norms(self.rows) if self.norms is None else self.norms
        return self.factors.abs() * norms

    def find_within_clip(self) -> Tensor:
        """Return which rows are finite and, multiplied by their factors, no longer than the clip, (r,) bool."""
        return (self.factors != 0) & (self.compute_clipped_norms() <= self.clip)

    @property
    def tensor(self) -> Tensor:
        """The rows (r, d), multiplied out in double precision, since rounded products could leave the ball."""
        return self.rows.expand() if isinstance(self.rows, FactoredRows) else self.rows

    def cut(self) -> Iterator[ClippedRows]:
        """Yield the same rows, products few at a time, so that they can be multiplied out."""
        if not isinstance(self.rows, FactoredRows):
            yield self
            return
        at_once = max(1, _EXPANDED // self.rows.size)
        for first in range(0, len(self.rows), at_once):
            some = slice(first, first + at_once)
            yield ClippedRows(self.owners[some], self.rows[some], self.factors[some], self.clip)


@dataclass(frozen=True)
class Bounds:
    """The public constants of what silos add up.

    Attributes:
        clip: every row lies in the ball of this radius.
        sensitivity: how far emptying one unit moves the silos' weighted sums together (`uldp-avg`: the clip), or each
            silo's (`uldp-naive`: twice the clip); in units of the update.
        noise_multiplier: one silo's share of the noise, in units of `sensitivity`.
        total: the 2-norm that the sum over all silos cannot exceed, noise aside.
        min_clip_ratio: the smallest clip of any silo, as a fraction of `clip`, where silos clip differently.
        silos_sharing_weight: k, the number of silos over which a unit's weight is spread evenly (uniform weights: S).
            One unit moves a sum over n silos by min(n, k)/k of the sensitivity. 1: one silo may carry the whole weight.
    """

    clip: float
    sensitivity: float
    noise_multiplier: float
    total: float
    min_clip_ratio: float = 1.0
    silos_sharing_weight: int = 1


@dataclass(frozen=True)
class ClippedRowStream:
    """Clipped rows that a silo is about to add up, chunk by chunk, neither weighted nor noised yet.

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
class LocallyNoisedUpdate:
    """An update to which nothing is added: its noise is inside already, or there is no privacy.

    Attributes:
        value: (d,) float64.
        refused: number of rows that were not finite.
        memory: what the silo keeps for its next round (`LocalContext.memory`), durably, before its answer is stored.
    """

    value: Tensor = field(repr=False)
    refused: int = 0
    memory: np.ndarray | None = field(default=None, repr=False)


@dataclass(frozen=True)
class MultiStepUpdate:
    """A multi-step update: each step starts where the earlier noisy sums led.

    Attributes:
        steps: consumed once. Gives a step's stream, and is sent what is released of it: the sum (d,) float64 in the
            units of the update, with that step's share of noise in it, drawn once. What leaves the silo is the sum of
            these over all steps.
        size: d.
        bounds: what holds for the sum over all steps; its noise multiplier is that of all steps together.
    """

    steps: Generator[ClippedRowStream, Tensor, None]
    size: int
    bounds: Bounds

    def play(self, release: Callable[[ClippedRowStream], Tensor]) -> None:
        """Run all steps; `release` adds up one step's rows with its noise and returns the noisy sum (d,)."""
        try:
            stream = next(self.steps)
            while True:
                stream = self.steps.send(release(stream))
        except StopIteration:
            return


Update = ClippedRowStream | MultiStepUpdate | LocallyNoisedUpdate


@dataclass(frozen=True)
class Share:
    """A noisy sum that may leave a silo: value (d,) float64, and the absolute std of the noise in it."""

    value: Tensor = field(repr=False)
    noise_std: float
    refused: int = 0


@dataclass(frozen=True)
class ClippedSum:
    """Σ weight·clipped row: value (d,) float64, and its sensitivity to emptying one unit."""

    value: Tensor = field(repr=False)
    sensitivity: float
    refused: int = 0

    def add_noise(self, noise_multiplier: float, stream: np.random.Generator) -> Share:
        """Add N(0, (noise_multiplier·sensitivity)²) to every coordinate, once."""
        std = noise_multiplier * self.sensitivity
        return Share(self.value + draw_gaussian(self.value.numel(), std, stream), std, self.refused)


_LEAST_NORM = 1e-120  # below, squares of float64 lose digits, and a factor of clip/norm could miss the ball


def clip_rows(
    owners: Tensor,
    rows: Tensor | FactoredRows,
    clip: float,
    clip_fraction: Tensor | None = None,
    min_norm: float | None = None,
) -> ClippedRows:
    """Compute the factor min(1, clip/‖row‖₂) of every row; a row that is not finite gets factor 0.

    A non-finite row becomes zero by itself, as a function of its owner's records alone, so the sensitivity stays
    `clip`; dropping the whole silo instead would make taking part depend on data.

    Args:
        owners: (r,) int64.
        rows: (r, d), a tensor or `FactoredRows`.
        clip: C.
        clip_fraction: (r,) float64 in (0, 1], each row's part of the clip, where some are clipped to less; None: all
            of it.
        min_norm: normalize, so that shorter rows are made as long as the clip, too: the factor is
            clip/max(‖row‖₂, min_norm). None: only shorten rows. (Bu et al. 2023, "Automatic Clipping", divide by
            ‖row‖₂ + min_norm.)

    Returns:
        The rows with their factors, such that ‖factor·row‖₂ ≤ clip_fraction·clip.
    """
    import torch

    norms = compute_norms(rows)
    # Shrunk a little, so that the rounded product, too, stays within the ball.
    margin = 1 - 1e-12
    most = clip * margin if clip_fraction is None else clip * margin * clip_fraction.to(norms)
    factors = most / norms.clamp_min(_LEAST_NORM if min_norm is None else max(min_norm, _LEAST_NORM))
    factors = factors.clamp(max=1.0) if min_norm is None else factors
    return ClippedRows(owners, rows, torch.where(torch.isfinite(norms), factors, 0.0), clip, norms)


def add_weighted_rows(stream: ClippedRowStream, weights: Tensor | None = None) -> ClippedSum:
    """Add up weight·factor·row over all rows, in double precision.

    Single precision would round a sum of 10⁵ rows by more than one row is worth, and small factors to zero.

    Args:
        stream: of clipped rows.
        weights: by owner, float64, each within [0, 1]; over everything one unit owns, here and in other silos, they add
            to at most 1, as `methods.weights.validate_weights` checks. They count only where the stream is `weighted`.

    Raises:
        SilodpError: a weighted stream without weights, or rows clipped to more than was declared.
    """
    import torch

    if stream.weighted and weights is None:
        raise SilodpError(
            "rows that count with their owner's weight cannot be folded without weights.", code="method.rows"
        )
    value = torch.zeros(stream.size, dtype=torch.float64)
    refused = 0
    for chunk in stream.chunks:
        if chunk.clip > stream.bounds.clip:
            raise SilodpError(
                f"rows clipped to {chunk.clip} cannot be folded where {stream.bounds.clip} was declared.",
                code="method.rows",
            )
        coefficients = chunk.factors
        if stream.weighted and weights is not None:
            coefficients = coefficients * weights[chunk.owners.to(weights.device)].to(coefficients.device)
        value += sum_rows(chunk, coefficients)
        refused += chunk.refused
    return ClippedSum(value, stream.bounds.sensitivity, refused)


def sum_rows(chunk: ClippedRows, coefficients: Tensor) -> Tensor:
    """Return Σ coefficient·row (d,) in double precision, on the CPU.

    Rows that are not finite or longer than the clip count as zero, whichever method gave the factors: an error would
    tell that somebody has such a row.
    """
    within = chunk.find_within_clip()
    rows = chunk.rows
    if not bool(within.all()):
        rows, coefficients = rows[within], coefficients[within]
    return add_rows(rows, coefficients).cpu()


def add_noise(
    update: ClippedRowStream | MultiStepUpdate, weights: Tensor, noise: np.random.Generator
) -> Share:
    """Add up the rows in floating point and add this silo's share of Gaussian noise once per step."""
    import torch

    if isinstance(update, ClippedRowStream):
        return add_weighted_rows(update, weights).add_noise(update.bounds.noise_multiplier, noise)
    shares: list[Share] = []
    whole = torch.zeros(update.size, dtype=torch.float64)

    def step(stream: ClippedRowStream) -> Tensor:
        share = add_weighted_rows(stream, weights).add_noise(stream.bounds.noise_multiplier, noise)
        whole.add_(share.value)
        shares.append(Share(whole, share.noise_std, share.refused))
        return share.value

    update.play(step)
    return Share(whole, math.hypot(*(s.noise_std for s in shares)), sum(s.refused for s in shares))
