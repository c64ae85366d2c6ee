"""Clipped rows as integers: truncated toward zero on a grid, summed exactly, with integer noise added once.

The clip C is `units` grid steps long, so a step has the length g = C/units. Truncation toward zero only
shortens a row, and it is done for each row before anything is added. So where the sum of real rows moves by at
most C, the sum of integer rows moves by at most `units` (docs/privacy.md, section 3). Rounding the sum instead
would let it move by up to √d/2 steps more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Bounds, ClippedRows, ClippedRowStream, MultiStepUpdate
from silodp.mechanisms.noise import MAX_SKELLAM_VARIANCE, draw_skellam
from silodp.mechanisms.rows import cut_blocks

if TYPE_CHECKING:
    from torch import Tensor


Integers = NDArray[np.int64]

# With fewer grid steps to the clip, truncation biases typical coordinates heavily. With more, sums of 2^33 rows would
# not be exact in double precision (`Quantizer._add`).
MIN_UNITS, MAX_UNITS = 1 << 12, 1 << 20
# Columns of a block. Rows up to this length are truncated once, longer ones twice: more columns leave the cache.
_COLUMNS = 1 << 16
# The ring has room for this many standard deviations of noise; a coordinate exceeds them with probability below 1e-32.
_TAIL = 12.0


@dataclass(frozen=True)
class Quantizer:
    """A public grid that divides the clip into steps, and the truncation of rows to it.

    Source: truncation toward zero and its sensitivity: docs/privacy.md, section 3. (Kairouz, Liu and Steinke 2021, "The
    Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation", round at random instead,
    which can lengthen a row.)

    Attributes:
        clip: The clipping norm C, in units of the update's 2-norm.
        units: The number of grid steps to the clip.
    """

    clip: float
    units: int

    @classmethod
    def from_bounds(cls, bounds: Bounds, units: int | None = None, max_units: int = MAX_UNITS) -> Quantizer:
        """Return the finest grid, a power of two, whose noise can be drawn exactly, or the grid of the given `units`.

        Args:
            bounds: of the rows, with the noise of a share.
            units: grid steps to the clip; None: the finest, with at most `max_units`.
            max_units: a power of two.

        Raises:
            SilodpError: with 2^12 steps or more the variance of the noise would exceed 1e12, or it does so on
                the given grid, or the given grid has fewer than 2^12 steps.
        """
        spread = bounds.noise_multiplier * bounds.sensitivity / bounds.clip  # std of a share, in clips
        finest = math.sqrt(MAX_SKELLAM_VARIANCE) / spread if spread > 0 else math.inf
        at_fault = "noise_multiplier" if units is None else "units"
        if units is None:
            units = 1 << int(math.log2(min(finest, max_units))) if finest >= 1 else 0
        # With a power of two, clip/units and all products with it are exact in floating point.
        if units & (units - 1):
            raise SilodpError(
                f"units = {units}: set a power of two, of grid steps to the clip.",
                code="argument.value",
                field="units",
            )
        if units < MIN_UNITS or units > finest:
            raise SilodpError(
                f"a silo's noise has a standard deviation of {spread:.4g} clips: on a grid of {units} steps to the "
                f"clip it cannot be drawn exactly, or truncates too much (2^12 to {finest:.4g} steps are possible); "
                "choose fewer steps, or a smaller noise_multiplier.",
                code="argument.grid",
                field=at_fault,
            )
        return cls(bounds.clip, units)

    @property
    def step(self) -> float:
        """The length g of a grid step, in units of the update."""
        return self.clip / self.units

    def truncate(self, chunk: ClippedRows, weights: Tensor | None = None) -> Integers:
        """Return trunc(weight·factor·row/g) (r, d) for every row; zero for rows that are not finite.

        The integer row's norm is compared with weight·units, exactly; a row that fails counts as zero.
        """
        import torch

        # The comparison is of integers, so that rounding of the factors cannot let a row be longer than charged.
        coefficients, longest = self._coefficients(chunk, weights)
        whole = _truncate(chunk.tensor, coefficients)
        within = torch.linalg.vecdot(whole, whole).sqrt() <= longest
        result: Integers = torch.where(within.unsqueeze(1), whole, 0.0).to(torch.int64).cpu().numpy()
        return result

    def _coefficients(self, chunk: ClippedRows, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the factors (r,) from rows to grid steps, and the largest norm (r,) in grid steps of a row on it."""
        share = chunk.factors.new_ones(()) if weights is None else weights.to(chunk.factors.device)
        # Clipping leaves a margin of 1e-12, so weights that add to 1 (up to rounding) keep the sum within `units`.
        longest = share * (self.units * chunk.clip / self.clip * (1 - 1e-13))
        return chunk.factors * share * (self.units / self.clip), longest.expand(len(chunk.rows))

    def _add(self, chunk: ClippedRows, weights: Tensor | None) -> Tensor:
        """Return the sum (d,) of truncated rows, exactly: double precision holds 2^33 rows of at most 2^20 units."""
        import torch

        rows = chunk.tensor
        coefficients, longest = self._coefficients(chunk, weights)
        total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
        for some, cuts in cut_blocks(rows, _COLUMNS):
            # First the norms, which need all columns of a row, then the sum: a row that is too long counts as zero.
            squares = torch.zeros_like(coefficients[some])
            for columns in cuts:
                whole = _truncate(rows[some, columns], coefficients[some])
                squares += torch.linalg.vecdot(whole, whole)
            within = squares.sqrt() <= longest[some]
            all_within = bool(within.all())
            for columns in cuts:
                if len(cuts) > 1:  # to truncate a long row again is faster than to keep it
                    whole = _truncate(rows[some, columns], coefficients[some])
                # Left out rather than multiplied by 0, which leaves NaN as it is and would empty the whole sum.
                total[columns] += (whole if all_within else whole[within]).sum(0)
        return total

    def fold(self, stream: ClippedRowStream, weights: Tensor) -> IntegerSum:
        """Return Σ of the truncated, weighted rows (d,), exactly."""
        value, refused = np.zeros(stream.size, np.int64), 0
        for part, count in stream.apply(
            partial(self._fold_chunks, stream.size, weights if stream.weighted else None)
        ):
            value += part
            refused += count
        return IntegerSum(value, self, stream.bounds, refused)

    def _fold_chunks(
        self, size: int, weights: Tensor | None, chunks: Iterable[ClippedRows]
    ) -> tuple[Integers, int]:
        """Return the sum (d,) int64 over chunks, and the number of rows that are not finite."""
        import torch

        value, refused = np.zeros(size, np.int64), 0
        for chunk in chunks:
            if chunk.clip > self.clip:
                raise SilodpError(
                    f"rows clipped to {chunk.clip} cannot lie on a grid made for {self.clip}.",
                    code="method.rows",
                )
            # Outer products are multiplied out in groups, as truncation needs the numbers themselves.
            for part in chunk.cut():
                own = None if weights is None else weights[part.owners.to(weights.device)]
                value += self._add(part, own).to(torch.int64).cpu().numpy()
            refused += chunk.refused
        return value, refused

    def add_noise(
        self, update: ClippedRowStream | MultiStepUpdate, weights: Tensor, noise: np.random.Generator
    ) -> IntegerShare:
        """Add up the rows in integers and add this silo's share of Skellam noise once per step.

        Args:
            update: The clipped rows of one silo, in one step or several.
            weights: The weight of each owner, float64 in [0, 1]; see `add_weighted_rows`.
            noise: The secret stream of the noise.

        Returns:
            The noisy sum of all steps, in grid steps, which may be masked and sent.
        """
        import torch

        if isinstance(update, ClippedRowStream):
            share = self.fold(update, weights).add_noise(noise)
            return replace(share, value=update.put_in_place(share.value))
        total = np.zeros(update.size, np.int64)

        def release(stream: ClippedRowStream) -> tuple[Tensor, float, int]:
            share = self.fold(stream, weights).add_noise(noise)
            np.add(total, share.value, out=total)
            # The method continues from the same truncated, noisy sum that leaves the silo, and sees nothing else.
            return torch.from_numpy(share.value * self.step), share.noise_std, share.refused

        return IntegerShare(total, *update.play(release))


def _truncate(rows: Tensor, coefficients: Tensor) -> Tensor:
    """Return trunc(coefficient·row) (r, d) as whole numbers in double precision.

    Rows of coefficient 0 become zero, whatever is in them. Whole numbers are exact up to 2^53. A sum of squares beyond
    2^53 is rounded, but it is then far above the limit, which is at most 2^40.
    """
    import torch

    used = coefficients != 0
    if not bool(used.all()):
        rows = torch.where(used.unsqueeze(1), rows, 0.0)
    whole = rows.double() if rows.dtype != torch.float64 else rows.clone()
    whole.mul_(coefficients.unsqueeze(1))
    return whole.sub_(whole.frac())  # toward zero, exactly


@dataclass(frozen=True)
class IntegerSum:
    """A sum of truncated rows without noise; it must not leave the silo.

    Attributes:
        value: The sum (d,) int64, in grid steps.
        grid: The grid of the rows.
        bounds: The public constants that the noise is scaled by.
        refused: The number of rows that were not finite and count as zero.
    """

    value: Integers = field(repr=False)
    grid: Quantizer
    bounds: Bounds
    refused: int = 0

    def add_noise(self, stream: np.random.Generator) -> IntegerShare:
        """Add this silo's share of Skellam noise to every coordinate, once.

        Source: Agarwal, Kairouz and Liu 2021, "The Skellam Mechanism for Differentially Private Federated Learning".
        """
        variance = compute_noise_variance(self.bounds, self.grid)
        return IntegerShare(
            self.value + draw_skellam(self.value.size, variance, stream), math.sqrt(variance), self.refused
        )


@dataclass(frozen=True)
class IntegerShare:
    """A noisy sum that a silo may mask and send.

    Attributes:
        value: The sum (d,) int64, in grid steps.
        noise_std: The standard deviation of the noise in every coordinate, in grid steps.
        refused: The number of rows that were not finite and count as zero.
    """

    value: Integers = field(repr=False)
    noise_std: float
    refused: int = 0


def compute_noise_variance(bounds: Bounds, grid: Quantizer) -> float:
    """Return the variance of one silo's share of noise, in squared grid steps."""
    return (bounds.noise_multiplier * bounds.sensitivity / bounds.clip * grid.units) ** 2


def choose_ring_bits(bounds: Bounds, grid: Quantizer, silos: int) -> int:
    """Return 32 or 64, the bits of a modulus beyond twice the largest sum over silos, noise included.

    Raises:
        SilodpError: 64 bits are too few. Wrap-around would cost accuracy, never privacy.
    """
    # Shares of noise are independent, so variances add; twice the sum, as it may have either sign.
    largest = bounds.total / bounds.clip * grid.units + _TAIL * math.sqrt(
        silos * compute_noise_variance(bounds, grid)
    )
    for bits in (32, 64):
        if 2 * largest < 2.0**bits:
            return bits
    raise SilodpError(
        f"sums of up to 2^{math.log2(largest):.0f} grid steps do not fit 64 bits: use fewer steps.",
        code="argument.grid",
    )


_FRACTION = 32  # bits after the point in fixed point; 30 are left before it, for the sum over all silos


def to_fixed_point(value: Tensor, silos: int) -> Integers:
    """Return a finished update (d,) as integers in steps of 2^-32.

    Values that are not finite become 0; values too large for the 64-bit sum are clamped. A finished update has
    its noise already (or has none), so this is post-processing and costs no privacy.
    """
    import torch

    # Two bits are left of 64: the sign, and one that the sum over all silos may not reach.
    room = 2.0 ** (62 - _FRACTION) / silos
    bounded = torch.nan_to_num(value.double(), nan=0.0, posinf=room, neginf=-room).clamp(-room, room)
    result: Integers = np.trunc(bounded.cpu().numpy() * 2.0**_FRACTION).astype(np.int64)
    return result


FIXED_POINT_STEP = 2.0**-_FRACTION
