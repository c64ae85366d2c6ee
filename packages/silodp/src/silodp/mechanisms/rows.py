"""Norms and weighted sums of rows (r, d), in double precision and without a copy of all rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class FactoredRows:
    """Rows (r, d) with pieces that are outer products, which are not multiplied out.

    The gradient of one record at a linear layer is such a product. Its norm is ‖a‖·‖b‖ (a "ghost norm"), and a weighted
    sum over records is one product of matrices, so that nothing of size r·d is in memory.

    Source: Goodfellow 2015, "Efficient Per-Example Gradient Computations"; "ghost clipping" in Li et al. 2022,
    "Large Language Models Can Be Strong Differentially Private Learners", section 4.

    Attributes:
        pieces: The blocks of columns in their order. A block is a matrix (r, k), or a pair of matrices (r, m) and
            (r, n) in single precision, whose products are the next m·n columns.

    Raises:
        SilodpError: a pair in another precision. Products of norms in double precision have room for those of single
            precision, whatever these are; norms of very small numbers in double precision can become zero.
    """

    pieces: tuple[Tensor | tuple[Tensor, Tensor], ...] = field(repr=False)

    def __post_init__(self) -> None:
        import torch

        if any(
            isinstance(piece, tuple) and {p.dtype for p in piece} != {torch.float32} for piece in self.pieces
        ):
            raise SilodpError("outer products of rows must be in single precision.", code="method.rows")

    def __len__(self) -> int:
        first = self.pieces[0]
        return len(first[0] if isinstance(first, tuple) else first)

    @property
    def size(self) -> int:
        """The length d of a row."""
        return sum(p[0].shape[1] * p[1].shape[1] if isinstance(p, tuple) else p.shape[1] for p in self.pieces)

    def __getitem__(self, places: Tensor | slice) -> FactoredRows:
        """Return the rows at these places: a slice, (k,) int64 or (r,) bool."""
        return FactoredRows(
            tuple((p[0][places], p[1][places]) if isinstance(p, tuple) else p[places] for p in self.pieces)
        )

    def __neg__(self) -> FactoredRows:
        # Of copies, as two pieces may share a matrix.
        return FactoredRows(tuple((-p[0], p[1]) if isinstance(p, tuple) else -p for p in self.pieces))

    def expand(self) -> Tensor:
        """Return the rows (r, d) in double precision, which holds products of two single-precision numbers exactly."""
        import torch

        parts = []
        for piece in self.pieces:
            if isinstance(piece, tuple):
                left, right = (factor.double() for factor in piece)
                parts.append((left.unsqueeze(2) * right.unsqueeze(1)).flatten(1))
            else:
                parts.append(piece.double())
        return torch.cat(parts, 1)


def compute_norms(rows: Tensor | FactoredRows) -> Tensor:
    """Compute the 2-norms (r,) of rows (r, d) in double precision.

    Squares are added block by block: even if the 2^14 squares of a block were added one after the other, a norm would
    be rounded by less than 10⁻¹² of itself, which is the margin of `clip_rows`. A product of two norms is rounded
    twice, so their blocks are shorter.
    """
    import torch

    if isinstance(rows, FactoredRows):
        norms = [
            _compute_norms_in_blocks(piece[0], _COLUMNS_OF_A_FACTOR)
            * _compute_norms_in_blocks(piece[1], _COLUMNS_OF_A_FACTOR)
            if isinstance(piece, tuple)
            else _compute_norms_in_blocks(piece)
            for piece in rows.pieces
        ]
        # A block of outer products a⊗b has the norm ‖a‖·‖b‖; blocks are parts of one row, so their squares add up.
        whole: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        return whole
    return _compute_norms_in_blocks(rows)


def _compute_norms_in_blocks(rows: Tensor, columns: int | None = None) -> Tensor:
    import torch

    # In double precision: squares of float32 overflow from 2·10¹⁹ on, and the norm would be infinite.
    squares = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for some, cuts in cut_blocks(rows, columns):
        for piece in cuts:
            squares[some] += torch.linalg.vector_norm(rows[some, piece].double(), dim=1).square()
    return squares.sqrt()


def add_rows(rows: Tensor | FactoredRows, coefficients: Tensor) -> Tensor:
    """Return Σ coefficient·row (d,) in double precision, for finite rows (r, d) and coefficients (r,) float64."""
    import torch

    if isinstance(rows, FactoredRows):
        parts = []
        for piece in rows.pieces:
            if isinstance(piece, tuple):
                # Σ cᵢ·aᵢ⊗bᵢ = (c·A)ᵀB: one product of matrices in place of r outer products.
                left, right = (factor.double() for factor in piece)
                parts.append((left.mul_(coefficients.unsqueeze(1)).T @ right).flatten())
            else:
                parts.append(add_rows(piece, coefficients))
        return torch.cat(parts)
    value = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for some, cuts in cut_blocks(rows):
        for columns in cuts:
            value[columns] += coefficients[some] @ rows[some, columns].double()
    return value


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
