"""Norms and weighted sums of rows (r, d), in double precision and without a copy of all rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from silodp.errors import SilodpError

if TYPE_CHECKING:
    from torch import Tensor

# Numbers that are converted to double precision at once: as many as a processor's cache holds; a GPU is busy with many.
_SLICE = 1 << 18
_SLICE_OF_A_GPU = 1 << 26
# Columns of a block on a CPU. Long rows are cut: one of 10⁷ numbers alone does not fit the cache, nor does its sum.
# 2^14 to 2^16 are equally fast (benchmarks/sums.py), and the smallest is the most exact.
_COLUMNS = 1 << 14
_COLUMNS_OF_A_FACTOR = 1 << 12
# Numbers of the factors of products that are added up at once, and the fewest such products: the whole sum is read
# and written each time.
_PRODUCTS, _FEWEST_PRODUCTS = 1 << 20, 1 << 10
# The rounding of one operation in double precision, relative to its result.
_UNIT = 2.0**-53


@dataclass(frozen=True)
class Products:
    """Blocks of rows that are sums of outer products, Σ over t of left[i, t] ⊗ right[i, t], not multiplied out.

    The gradient of one record at a layer is such a sum over the places where the layer was applied: of its inputs and
    the slopes at its outputs for a linear layer, of the numbers of tokens and the slopes for an embedding.

    Source: one place: Goodfellow 2015, "Efficient Per-Example Gradient Computations". Several: "ghost clipping" in Li
    et al. 2022, "Large Language Models Can Be Strong Differentially Private Learners", section 4.

    Attributes:
        left: The left factors (r, m), or (r, t, m) of several products; or, for rows that are 1 at one place and 0
            elsewhere, these places (r, t) int64.
        right: The right factors (r, n) or (r, t, n).
        height: The number m where `left` are places.
    """

    left: Tensor = field(repr=False)
    right: Tensor = field(repr=False)
    height: int = 0

    def __len__(self) -> int:
        return len(self.left)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers (m, n) of the matrix that a row is."""
        return self.height or self.left.shape[-1], self.right.shape[-1]

    def select(self, places: Tensor | slice) -> Products:
        """Return the rows at these places: a slice, (k,) int64 or (r,) bool."""
        return Products(self.left[places], self.right[places], self.height)

    def negate(self) -> Products:
        """Return minus the rows."""
        return Products(self.left, -self.right, self.height)

    def expand(self) -> Tensor:
        """Return the rows (r, m·n) in double precision."""
        import torch

        right = self.right.double()
        if self.height:
            value = torch.zeros(len(self), *self.shape, dtype=torch.float64, device=right.device)
            rows = torch.arange(len(self), device=right.device).unsqueeze(1).expand_as(self.left)
            return value.index_put_((rows, self.left), right, accumulate=True).flatten(1)
        left = self.left.double()
        if left.dim() == 2:
            return (left.unsqueeze(2) * right.unsqueeze(1)).flatten(1)
        return torch.bmm(left.transpose(1, 2), right).flatten(1)

    def compute_norms(self) -> Tensor:
        """Return bounds (r,) float64 of the 2-norms of rows that are sums of products.

        ‖Σ a⊗b‖² is Σ (AAᵀ ∘ BBᵀ) over pairs of products. Where they cancel, the norm is small beside S = Σ ‖a‖·‖b‖,
        and rounding could make it smaller still. A dot product of k numbers is rounded by less than k·u of the product
        of norms (u = 2⁻⁵³), hence the sum by less than (m + n + t² + 2)·u·S²; and the row, where it is multiplied out,
        by less than (t + 2)·u·S, hence the square of its norm by less than twice as much as the sum. Three times is
        added, so that no row is longer than what is returned, as it is and as it is added up.

        Of rows with places, products at the same place are added up, so that no pairs are needed. That moves the row by
        less than t·u·S, as adding it up does, and squares are added up with less than (n + t)·u·S² of rounding: less
        than three times (n + 2·t + 3)·u·S² in all.

        Source: Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1.
        """
        import torch

        (_, count, n), m = self.right.shape, 1 if self.height else self.shape[0]
        if self.height:
            return self._compute_norms_of_places()
        # The records of a block, in double precision, fit the cache.
        at_once = max(1, _SLICE // (count * (m + n + 2 * count)))
        found: list[Tensor] = []
        for first in range(0, len(self), at_once):
            left, right = (factor[first : first + at_once] for factor in (self.left, self.right))
            b = right.double()
            b, a = torch.bmm(b, b.transpose(1, 2)), left.double()
            pairs = torch.bmm(a, a.transpose(1, 2)).mul_(b)
            # The diagonal holds the squares of ‖a‖·‖b‖.
            total = pairs.diagonal(dim1=1, dim2=2).sqrt().sum(1)
            found.append(_bound_norms(pairs.sum((1, 2)).clamp_min(0), total, m + n + count**2))
        return torch.cat(found)

    def _compute_norms_of_places(self) -> Tensor:
        """Return the bounds of `compute_norms` for rows with places."""
        import torch

        count, n = self.right.shape[1:]
        at_once = max(1, _SLICE // max(1, count * n))
        found: list[Tensor] = []
        for first in range(0, len(self), at_once):
            left, right = self.left[first : first + at_once], self.right[first : first + at_once].double()
            rows = torch.arange(len(left), device=left.device).unsqueeze(1)
            keys = left + rows * self.height
            places, inverse = keys.unique(return_inverse=True)  # type: ignore[no-untyped-call]
            sums = right.new_zeros(len(places), n).index_add_(0, inverse.flatten(), right.flatten(0, 1))
            squares = right.new_zeros(len(left)).index_add_(0, places // self.height, sums.square().sum(1))
            total = torch.linalg.vector_norm(right, dim=2).sum(1)
            found.append(_bound_norms(squares, total, n + 2 * count))
        return torch.cat(found)

    def add_up(self, coefficients: Tensor, value: Tensor) -> None:
        """Add Σ coefficient·row to `value` (m·n,) float64; Σ c·a⊗b = (c·A)ᵀB is one product of matrices."""
        matrix, scale = value.view(self.shape), coefficients.unsqueeze(1)
        left, right = self.left, self.right
        if right.dim() == 3:
            left = left.flatten(0, -1 if self.height else -2)
            right = right.flatten(0, 1)
            scale = scale.repeat_interleave(self.right.shape[1], 0)
        width = right.shape[1] if self.height else sum(self.shape)
        at_once = max(_FEWEST_PRODUCTS, _PRODUCTS // width)  # in double precision, they fit the cache
        for first in range(0, len(right), at_once):
            a, b, c = (each[first : first + at_once] for each in (left, right, scale))
            if self.height:
                matrix.index_add_(0, a, b.double().mul_(c))
            else:
                _add_product(matrix, a.double().mul_(c), b.double())


@dataclass(frozen=True)
class FactoredRows:
    """Rows (r, d) with pieces that are sums of outer products, which are not multiplied out.

    The norm of one product is ‖a‖·‖b‖ (a "ghost norm"), and a weighted sum over rows is one product of matrices, so
    that nothing of size r·d is in memory.

    Attributes:
        pieces: The blocks of columns in their order: matrices (r, k), or `Products` that are the next m·n columns.

    Raises:
        SilodpError: factors that are not in single precision. Products of norms in double precision have room for those
            of single precision, whatever these are; norms of very small numbers in double precision can become zero.
    """

    pieces: tuple[Tensor | Products, ...] = field(repr=False)

    def __post_init__(self) -> None:
        import torch

        factors = (piece for piece in self.pieces if isinstance(piece, Products))
        if any(
            {p.right.dtype, torch.float32 if p.height else p.left.dtype} != {torch.float32} for p in factors
        ):
            raise SilodpError("outer products of rows must be in single precision.", code="method.rows")

    def __len__(self) -> int:
        return len(self.pieces[0])

    @property
    def size(self) -> int:
        """The length d of a row."""
        return sum(
            math.prod(piece.shape if isinstance(piece, Products) else piece.shape[1:])
            for piece in self.pieces
        )

    @cached_property
    def norms(self) -> Tensor:
        """The norms (r,) that `compute_norms` returns, computed once."""
        import torch

        # The slope of a linear layer is a factor of its weight, and the row of its bias.
        known: dict[tuple[int, int], Tensor] = {}

        def compute(matrix: Tensor, columns: int = _COLUMNS_OF_A_FACTOR) -> Tensor:
            key = id(matrix), min(columns, matrix.shape[1])
            if key not in known:
                known[key] = _compute_norms_in_blocks(matrix, columns)
            return known[key]

        norms: list[Tensor] = []
        for piece in self.pieces:
            if not isinstance(piece, Products):
                norms.append(compute(piece, _COLUMNS))
            elif piece.left.dim() == piece.right.dim() == 2:
                norms.append(compute(piece.left) * compute(piece.right))
            else:
                norms.append(piece.compute_norms())
        # Blocks are parts of one row, so their squares add up.
        whole: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        return whole

    def __getitem__(self, places: Tensor | slice) -> FactoredRows:
        """Return the rows at these places: a slice, (k,) int64 or (r,) bool."""
        some = FactoredRows(
            tuple(p.select(places) if isinstance(p, Products) else p[places] for p in self.pieces)
        )
        return some._take_norms(self, places)

    def __neg__(self) -> FactoredRows:
        # Of copies, as two pieces may share a matrix.
        negative = FactoredRows(tuple(p.negate() if isinstance(p, Products) else -p for p in self.pieces))
        return negative._take_norms(self, slice(None))

    def _take_norms(self, other: FactoredRows, places: Tensor | slice) -> FactoredRows:
        """Take the norms of other rows, if they are known; return these rows."""
        if "norms" in vars(other):
            vars(self)["norms"] = other.norms[places]
        return self

    def expand(self) -> Tensor:
        """Return the rows (r, d) in double precision, which holds products of two single-precision numbers exactly."""
        import torch

        return torch.cat([p.expand() if isinstance(p, Products) else p.double() for p in self.pieces], 1)


def _bound_norms(squares: Tensor, total: Tensor, operations: int) -> Tensor:
    """Return norms that rounding cannot have made too short, see `Products.compute_norms`.

    Args:
        squares: The squares of norms (r,).
        total: The sums S (r,) of the norms of the terms.
        operations: By how many times u·S² a square was rounded at most.
    """
    return (squares + 3 * (operations + 3) * _UNIT * total.square()).sqrt()


def compute_norms(rows: Tensor | FactoredRows) -> Tensor:
    """Compute the 2-norms (r,) of rows (r, d) in double precision, or bounds of them (`Products.compute_norms`).

    Squares are added block by block: even if the 2^14 squares of a block were added one after the other, a norm would
    be rounded by less than 10⁻¹² of itself, which is the margin of `clip_rows`. A product of two norms is rounded
    twice, so their blocks are shorter.
    """
    return rows.norms if isinstance(rows, FactoredRows) else _compute_norms_in_blocks(rows)


def _compute_norms_in_blocks(rows: Tensor, columns: int | None = None) -> Tensor:
    import torch

    # In double precision: squares of float32 overflow from 2·10¹⁹ on, and the norm would be infinite.
    if rows.numel() <= _SLICE and rows.shape[1] <= (columns or _COLUMNS):
        whole: Tensor = torch.linalg.vector_norm(rows.double(), dim=1)  # one block
        return whole
    squares = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for some, cuts in cut_blocks(rows, columns):
        for piece in cuts:
            squares[some] += torch.linalg.vector_norm(rows[some, piece].double(), dim=1).square()
    return squares.sqrt()


def add_rows(rows: Tensor | FactoredRows, coefficients: Tensor, value: Tensor | None = None) -> Tensor:
    """Return Σ coefficient·row (d,) in double precision.

    Args:
        rows: Finite rows (r, d).
        coefficients: Their coefficients (r,) float64.
        value: A sum (d,) float64 to which the rows are added, in place; None begins at zero.
    """
    pieces = rows.pieces if isinstance(rows, FactoredRows) else (rows,)
    size = rows.size if isinstance(rows, FactoredRows) else rows.shape[1]
    value, first = coefficients.new_zeros(size) if value is None else value, 0
    for piece in pieces:
        last = first + (math.prod(piece.shape) if isinstance(piece, Products) else piece.shape[1])
        if isinstance(piece, Products):
            piece.add_up(coefficients, value[first:last])
        else:
            _add_up(piece, coefficients, value[first:last])
        first = last
    return value


def _add_product(value: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ·right to `value` (m, n), for matrices (k, m) and (k, n) float64."""
    import torch

    if value.shape[0] > 2 * value.shape[1] and len(left) > value.shape[1]:
        # On a CPU, the product of few rows and many columns takes three quarters of the time.
        value += torch.mm(right.T, left).T
    else:
        value.addmm_(left.T, right)


def _add_up(rows: Tensor, coefficients: Tensor, value: Tensor) -> None:
    """Add Σ coefficient·row to `value` (k,) float64, for a matrix (r, k)."""
    if rows.numel() <= _SLICE and rows.shape[1] <= _COLUMNS:
        value.addmv_(rows.double().T, coefficients)  # one block
        return
    for some, cuts in cut_blocks(rows):
        for columns in cuts:
            value[columns] += coefficients[some] @ rows[some, columns].double()


def cut_blocks(rows: Tensor, columns: int | None = None) -> Iterator[tuple[slice, list[slice]]]:
    """Yield rows of blocks that cover `rows` (r, d), and for each the columns of its blocks.

    A block in double precision fits the cache; copying all rows would take longer than adding them up. On a CPU, a
    block has at most `columns` columns.
    """
    count, size = rows.shape
    numbers = _SLICE if rows.device.type == "cpu" else _SLICE_OF_A_GPU
    columns = max(1, min((columns or _COLUMNS) if rows.device.type == "cpu" else numbers, size))
    at_once = max(1, numbers // columns)
    cuts = [slice(first, first + columns) for first in range(0, size, columns)]
    for first in range(0, count, at_once):
        yield slice(first, first + at_once), cuts
