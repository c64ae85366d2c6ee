"""Clipping, weighted sums that carry their sensitivity, and the one place where noise is added to them.

`add_weighted_rows` adds up a stream of `ClippedRows` to a `ClippedSum`; `ClippedSum.add_noise` returns a `Share`, which
has no such method. So a program cannot add noise to a mean, to a vector that is not clipped, or twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from silodp.errors import SilodpError
from silodp.mechanisms.noise import draw_gaussian
from silodp.mechanisms.rows import FactoredRows, add_rows, compute_norms

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# Outer products are multiplied out this many numbers at a time: 8 MB in double precision, so that a silo's rows never
# need r·d numbers of memory.
_EXPANDED = 1 << 20
# Below, squares of float64 lose digits, and a factor of clip/norm could miss the ball.
_MIN_NORM = 1e-120
# Clipped rows are shorter than the clip by this fraction: `compute_norms` rounds by less, so that the rounded product
# of a row and its factor stays within the ball, too.
_MARGIN = 1e-12


@dataclass(frozen=True)
class ClippedRows:
    """Vectors and the factors that bring each into the ball of radius `clip`.

    Attributes:
        owners: The user index or record position of each row, (r,) int64.
        rows: The vectors (r, d) before clipping, a tensor or `FactoredRows`.
        factors: One factor per row, (r,) float64, with ‖factors[i]·rows[i]‖₂ ≤ clip; 0 for rows that are not finite.
        clip: The clipping norm C, in units of the update's 2-norm.
        norms: The 2-norms ‖rows[i]‖₂, (r,) float64, as `clip_rows` has computed them; None computes them where they are
            needed. They are no argument, so that `replace` with other rows does not keep them.
    """

    owners: Tensor = field(repr=False)
    rows: Tensor | FactoredRows = field(repr=False)
    factors: Tensor = field(repr=False)
    clip: float
    norms: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def refused(self) -> int:
        """The number of rows that are not finite and count as zero."""
        return int((self.factors == 0).sum())

    def compute_clipped_norms(self) -> Tensor:
        """Return ‖factors[i]·rows[i]‖₂, (r,) float64; NaN for rows that are not finite."""
        norms = compute_norms(self.rows) if self.norms is None else self.norms
        return self.factors.abs() * norms

    def find_within_clip(self) -> Tensor:
        """Return which rows are finite and, multiplied by their factors, no longer than the clip, (r,) bool."""
        return (self.factors != 0) & (self.compute_clipped_norms() <= self.clip)

    def select(self, kept: Tensor) -> ClippedRows:
        """Return the rows at some positions, (k,) int64."""
        some = ClippedRows(self.owners[kept.cpu()], self.rows[kept], self.factors[kept], self.clip)
        object.__setattr__(some, "norms", None if self.norms is None else self.norms[kept])
        return some

    @property
    def tensor(self) -> Tensor:
        """The rows (r, d), multiplied out in double precision, since rounded products could leave the ball."""
        return self.rows.expand() if isinstance(self.rows, FactoredRows) else self.rows

    def cut(self) -> Iterator[ClippedRows]:
        """Yield the same rows; outer products in groups that are small enough to be multiplied out."""
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
        clip: The radius of the ball that holds every row, in units of the update.
        sensitivity: The distance by which emptying one unit moves the silos' weighted sums together (`uldp-avg`: the
            clip), or each silo's (`uldp-naive`: twice the clip), in units of the update.
        noise_multiplier: The standard deviation of one silo's share of the noise, in units of `sensitivity`.
        total: The 2-norm that the sum over all silos cannot exceed, noise aside.
        min_clip_ratio: The smallest clip of any silo, as a fraction of `clip`, where silos clip differently.
        silos_sharing_weight: The number k of silos over which a unit's weight is spread evenly (uniform weights: S).
            One unit moves a sum over n silos by min(n, k)/k of the sensitivity. With 1, one silo may carry the whole
            weight.
    """

    clip: float
    sensitivity: float
    noise_multiplier: float
    total: float
    min_clip_ratio: float = 1.0
    silos_sharing_weight: int = 1


class RowBlocks:
    """The chunks of rows of several blocks of units, which may be computed in several places.

    Args:
        apply: Yields what a function, which can be pickled, returns for the chunks of every block, in order.
    """

    def __init__(self, apply: Callable[[Callable[[Iterable[ClippedRows]], Any]], Iterator[Any]]) -> None:
        self.apply = apply

    def __iter__(self) -> Iterator[ClippedRows]:
        return chain.from_iterable(self.apply(iter))


@dataclass(frozen=True)
class ClippedRowStream:
    """Clipped rows that a silo is about to add up, chunk by chunk, neither weighted nor noised yet.

    How they are added (in clear, masked, weighted privately) is the aggregator's choice, not the method's.

    Attributes:
        chunks: The clipped rows; they are consumed once. `apply` reads them where they are computed.
        size: The length d of a row.
        bounds: The public constants that hold for every row and for the sum.
        weighted: Whether a row counts with its owner's weight; otherwise it counts with 1.
        place: Where this silo's share lies among `places` blocks of d numbers, counted from 0.
        places: The number of blocks. All others are 0 and have no noise: nobody's records change them.
    """

    chunks: Iterable[ClippedRows]
    size: int
    bounds: Bounds
    weighted: bool
    place: int = 0
    places: int = 1

    def apply(self, function: Callable[[Iterable[ClippedRows]], T]) -> Iterator[T]:
        """Yield what a function, which can be pickled, returns for the chunks of every block of units, in order."""
        if isinstance(self.chunks, RowBlocks):
            return self.chunks.apply(function)
        return iter([function(self.chunks)])

    def put_in_place(self, share: NDArray[Any]) -> NDArray[Any]:
        """Return the noisy share (d,) among the blocks of all silos, (places·d,)."""
        before = self.place * self.size
        return np.pad(share, (before, (self.places - 1) * self.size - before))


@dataclass(frozen=True)
class LocallyNoisedUpdate:
    """An update to which nothing is added: its noise is inside already, or there is no privacy.

    Attributes:
        value: The update (d,) float64.
        refused: The number of rows that were not finite.
        memory: What the silo keeps for its next round (`LocalContext.memory`); it is stored durably before the answer.
    """

    value: Tensor = field(repr=False)
    refused: int = 0
    memory: np.ndarray | None = field(default=None, repr=False)


@dataclass(frozen=True)
class MultiStepUpdate:
    """A multi-step update: each step starts where the earlier noisy sums led.

    Source: local DP-SGD, Abadi et al. 2016, "Deep Learning with Differential Privacy", Algorithm 1, with the silo's
    share of the noise in each step.

    Attributes:
        steps: A generator that is consumed once. It yields the stream of a step, and is sent the noisy sum (d,) float64
            of that step, in the units of the update. The silo sends the total of these sums.
        size: The length d of the update.
        bounds: The public constants of the sum over all steps; the noise multiplier is that of all steps together.
    """

    steps: Generator[ClippedRowStream, Tensor, None]
    size: int
    bounds: Bounds

    def play(self, release: Callable[[ClippedRowStream], tuple[Tensor, float, int]]) -> tuple[float, int]:
        """Run all steps.

        Args:
            release: Adds up one step's rows and adds noise, once. It returns the noisy sum (d,) float64 in the units of
                the update, the standard deviation of its noise, and the number of refused rows.

        Returns:
            The standard deviation of the noise in the total of all steps, and the number of refused rows.
        """
        stds, refused = list[float](), 0
        try:
            stream = next(self.steps)
            while True:
                value, noise_std, count = release(stream)
                stds.append(noise_std)
                refused += count
                stream = self.steps.send(value)
        except StopIteration:
            # Noise of different steps is independent, so variances add.
            return math.hypot(*stds), refused


Update = ClippedRowStream | MultiStepUpdate | LocallyNoisedUpdate


@dataclass(frozen=True)
class Share:
    """A noisy sum that may leave a silo.

    Attributes:
        value: The sum (d,) float64, in units of the update.
        noise_std: The standard deviation of the noise in every coordinate, in units of the update.
        refused: The number of rows that were not finite and count as zero.
    """

    value: Tensor = field(repr=False)
    noise_std: float
    refused: int = 0


@dataclass(frozen=True)
class ClippedSum:
    """A sum of weighted, clipped rows, without noise; it must not leave the silo.

    Attributes:
        value: The sum (d,) float64, in units of the update.
        sensitivity: The distance by which emptying one unit can move the sum.
        refused: The number of rows that were not finite and count as zero.
    """

    value: Tensor = field(repr=False)
    sensitivity: float
    refused: int = 0

    def add_noise(self, noise_multiplier: float, stream: np.random.Generator) -> Share:
        """Add N(0, (noise_multiplier·sensitivity)²) to every coordinate, once.

        Source: the Gaussian mechanism; Dwork and Roth 2014, "The Algorithmic Foundations of Differential Privacy",
        Appendix A.
        """
        std = noise_multiplier * self.sensitivity
        return Share(self.value + draw_gaussian(self.value.numel(), std, stream), std, self.refused)


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
        owners: The user index or record position of each row, (r,) int64.
        rows: The vectors (r, d), a tensor or `FactoredRows`.
        clip: The clipping norm C, in units of the update's 2-norm.
        clip_fraction: Each row's part of the clip, (r,) float64 in (0, 1], where some rows are clipped to less; None
            gives every row the whole clip.
        min_norm: Normalizes rows: shorter ones, too, are made as long as the clip, by the factor
            clip/max(‖row‖₂, min_norm). None only shortens rows.

    Returns:
        The rows with their factors, such that ‖factor·row‖₂ ≤ clip_fraction·clip.

    Source: Abadi et al. 2016, "Deep Learning with Differential Privacy", Algorithm 1, "Clip gradient". Normalized rows:
    Bu et al. 2023, "Automatic Clipping", who divide by ‖row‖₂ + min_norm.
    """
    import torch

    # In double precision: rounded to single precision a norm may be too small, and the row would leave the ball.
    norms = compute_norms(rows)
    radius = clip * (1 - _MARGIN)
    radii = radius if clip_fraction is None else radius * clip_fraction.to(norms)
    factors = radii / norms.clamp_min(_MIN_NORM if min_norm is None else max(min_norm, _MIN_NORM))
    # A row inside the ball stays as it is; normalized rows may grow, never beyond the radius.
    factors = factors.clamp(max=1.0) if min_norm is None else factors
    clipped = ClippedRows(owners, rows, torch.where(torch.isfinite(norms), factors, 0.0), clip)
    object.__setattr__(clipped, "norms", norms)
    return clipped


def add_weighted_rows(stream: ClippedRowStream, weights: Tensor | None = None) -> ClippedSum:
    """Add up weight·factor·row over all rows, in double precision.

    Single precision would round a sum of 10⁵ rows by more than one row is worth, and small factors to zero.

    Args:
        stream: The clipped rows of one silo.
        weights: The weight of each owner, float64 in [0, 1]. Over all that one unit owns, here and in other silos,
            they add to at most 1, as `methods.roles.validate_weights` checks. They count only where the stream is
            `weighted`.

    Raises:
        SilodpError: a weighted stream without weights, or rows clipped to more than was declared.
    """
    import torch

    if stream.weighted and weights is None:
        raise SilodpError(
            "rows that count with their owner's weight cannot be folded without weights.", code="method.rows"
        )
    add = partial(_add_chunks, stream.size, stream.bounds.clip, weights if stream.weighted else None)
    value, refused = None, 0
    for part, count in stream.apply(add):
        value = part if value is None else value.add_(part)
        refused += count
    if value is None:
        value = torch.zeros(stream.size, dtype=torch.float64)
    return ClippedSum(value, stream.bounds.sensitivity, refused)


def _add_chunks(
    size: int, clip: float, weights: Tensor | None, chunks: Iterable[ClippedRows]
) -> tuple[Tensor, int]:
    """Return the sum (d,) of weight·factor·row over chunks, and the number of rows that are not finite."""
    import torch

    # The chunks are summed as they come: all rows of a silo together may not fit its memory.
    value, refused = torch.zeros(size, dtype=torch.float64), 0
    for chunk in chunks:
        # The noise is scaled to the declared clip, so longer rows would be covered by too little of it.
        if chunk.clip > clip:
            raise SilodpError(
                f"rows clipped to {chunk.clip} cannot be folded where {clip} was declared.",
                code="method.rows",
            )
        coefficients = chunk.factors
        if weights is not None:
            coefficients = coefficients * weights[chunk.owners.to(weights.device)].to(coefficients.device)
        sum_rows(chunk, coefficients, value)
        refused += chunk.refused
    return value, refused


def sum_rows(chunk: ClippedRows, coefficients: Tensor, value: Tensor | None = None) -> Tensor:
    """Return Σ coefficient·row (d,) in double precision, on the CPU.

    Rows that are not finite or longer than the clip count as zero, whichever method gave the factors: an error would
    tell that somebody has such a row.

    Args:
        chunk: The rows with their factors.
        coefficients: The number by which each row counts, (r,) float64.
        value: A sum (d,) float64 on the CPU to which the rows are added, in place; None begins at zero.
    """
    # Checked here and not only in `clip_rows`: a method of somebody's own may give factors of its own.
    within = chunk.find_within_clip()
    rows = chunk.rows
    if not bool(within.all()):
        rows, coefficients = rows[within], coefficients[within]
    # In place: filling new memory takes about as long as adding up a batch of outer products.
    if value is not None and value.device == coefficients.device:
        return add_rows(rows, coefficients, value)
    total = add_rows(rows, coefficients).cpu()
    return total if value is None else value.add_(total)


def add_noise(
    update: ClippedRowStream | MultiStepUpdate, weights: Tensor, noise: np.random.Generator
) -> Share:
    """Add up the rows in floating point and add this silo's share of Gaussian noise once per step.

    Args:
        update: The clipped rows of one silo, in one step or several.
        weights: The weight of each owner, float64 in [0, 1]; see `add_weighted_rows`.
        noise: The secret stream of the noise.

    Returns:
        The noisy sum of all steps, which may leave the silo.
    """
    import torch

    def add_step(stream: ClippedRowStream) -> Share:
        return add_weighted_rows(stream, weights).add_noise(stream.bounds.noise_multiplier, noise)

    if isinstance(update, ClippedRowStream):
        share = add_step(update)
        return replace(share, value=torch.from_numpy(update.put_in_place(share.value.numpy())))
    total = torch.zeros(update.size, dtype=torch.float64)

    def release(stream: ClippedRowStream) -> tuple[Tensor, float, int]:
        # The method continues from the noisy sum that leaves the silo, and sees nothing else.
        share = add_step(stream)
        total.add_(share.value)
        return share.value, share.noise_std, share.refused

    return Share(total, *update.play(release))
