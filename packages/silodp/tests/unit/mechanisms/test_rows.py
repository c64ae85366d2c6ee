"""Rows with outer products: norms, sums, clipping and the grid are those of the rows multiplied out."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from silodp.mechanisms.clipping import (
    Bounds,
    ClippedRowStream,
    RowBlocks,
    add_weighted_rows,
    clip_rows,
    sum_rows,
)
from silodp.mechanisms.quantization import Quantizer
from silodp.mechanisms.rows import FactoredRows, Products, add_rows, compute_norms
from support.refusals import refused

scales = st.floats(-37, 37).map(lambda exponent: 10.0**exponent)


def rows(count: int = 7, seed: int = 0, scale: float = 1.0) -> FactoredRows:
    generator = torch.Generator().manual_seed(seed)
    left, right, bias, matrix = (torch.randn(count, size, generator=generator) for size in (4, 3, 4, 5))
    sums = Products(*(torch.randn(count, 6, size, generator=generator) for size in (3, 2)))
    words = Products(torch.randint(4, (count, 5), generator=generator), sums.right[:, :5], 4)
    return FactoredRows(
        (Products(left * scale, right), bias * scale, Products(bias, matrix), sums, words, matrix)
    )


def test_columns_are_in_the_order_of_the_pieces():
    left, right = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0, 7.0]])
    whole = FactoredRows((Products(left, right), torch.tensor([[11.0]]))).expand()
    assert whole.tolist() == [[3.0, 5.0, 7.0, 6.0, 10.0, 14.0, 11.0]]
    assert whole.dtype == torch.float64


def test_norms_and_sums_are_those_of_the_whole_rows():
    some, weights = rows(), torch.linspace(0, 1, 7, dtype=torch.float64)
    torch.testing.assert_close(compute_norms(some), compute_norms(some.expand()), rtol=1e-13, atol=0)
    torch.testing.assert_close(add_rows(some, weights), weights @ some.expand(), rtol=1e-12, atol=1e-14)
    kept = torch.tensor([True, False] * 3 + [True])
    assert torch.equal(some[kept].expand(), some.expand()[kept])
    assert torch.equal((-some).expand(), -some.expand())
    assert len(some) == 7


@pytest.mark.parametrize("numbers", [1, 30, 1 << 20])
@pytest.mark.parametrize(("m", "n"), [(9, 2), (2, 9)])
def test_rows_are_added_to_a_sum_block_by_block(numbers, m, n, monkeypatch):
    monkeypatch.setattr("silodp.mechanisms.rows._PRODUCTS", numbers)
    monkeypatch.setattr("silodp.mechanisms.rows._FEWEST_PRODUCTS", 1)
    left, right, matrix = torch.randn(7, 6, m), torch.randn(7, 6, n), torch.randn(7, 5)
    words = Products(torch.randint(4, (7, 6)), right, 4)
    some = FactoredRows((Products(left, right), matrix, Products(left[:, 0], right[:, 0]), words))
    clipped, before = clip_rows(torch.arange(7), some, 2.0), torch.randn(some.size, dtype=torch.float64)
    value = before.clone()
    assert sum_rows(clipped, clipped.factors, value) is value
    wanted = before + clipped.factors @ some.expand()
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(sum_rows(clipped, clipped.factors), wanted - before, rtol=1e-10, atol=1e-13)


def test_blocks_that_are_added_up_in_several_places_are_one_sum():
    blocks = [[clip_rows(torch.arange(7), rows(seed=seed), 2.0)] for seed in (0, 1)]
    parts = ClippedRowStream(
        RowBlocks(lambda function: map(function, blocks)), rows().size, Bounds(2.0, 2.0, 1.0, math.inf), False
    )
    wanted = sum(sum_rows(clipped, clipped.factors) for (clipped,) in blocks)
    torch.testing.assert_close(add_weighted_rows(parts).value, wanted, rtol=1e-12, atol=1e-13)
    nothing = ClippedRowStream(
        RowBlocks(lambda function: iter(())), 3, Bounds(2.0, 2.0, 1.0, math.inf), False
    )
    assert add_weighted_rows(nothing).value.tolist() == [0.0, 0.0, 0.0]


@given(st.integers(0, 2**31), scales, st.floats(-30, 30).map(lambda exponent: 10.0**exponent))
def test_no_clipped_row_leaves_the_ball(seed, scale, clip):
    some = rows(3, seed, scale)
    clipped = clip_rows(torch.arange(3), some, clip)
    norms = torch.linalg.vector_norm(clipped.tensor * clipped.factors.unsqueeze(1), dim=1)
    assert bool((norms <= clip).all())
    assert bool((clipped.factors > 0).all())


@pytest.mark.parametrize("least", [None, 1e-6])
def test_the_smallest_and_largest_numbers_are_clipped(least):
    tiny, huge = torch.full((1, 3), 1e-45), torch.full((1, 3), 3e38)
    for left, right in ((tiny, huge), (huge, huge), (tiny, tiny)):
        clipped = clip_rows(torch.arange(1), FactoredRows((Products(left, right),)), 1.0, min_norm=least)
        length = float((clipped.tensor * clipped.factors.unsqueeze(1)).norm())
        assert float(clipped.factors) > 0
        assert length <= 1.0


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("other", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 1])
def test_a_row_that_is_not_finite_counts_as_zero(broken, other, place):
    pair = [torch.ones(2, 2), torch.full((2, 2), other)][:: 1 if place else -1]
    pair[place] = pair[place].clone()
    pair[place][1] = broken
    clipped = clip_rows(torch.arange(2), FactoredRows((Products(*pair),)), 5.0)
    assert clipped.refused == 1
    stream = ClippedRowStream([clipped], 4, Bounds(5.0, 5.0, 1.0, math.inf), False)
    assert add_weighted_rows(stream).value.tolist() == (pair[0][0, :, None] * pair[1][0]).flatten().tolist()


@pytest.mark.parametrize("numbers", [1, 110, 1 << 20])
def test_the_grid_sees_the_rows_multiplied_out(numbers, monkeypatch):
    monkeypatch.setattr("silodp.mechanisms.clipping._EXPANDED", numbers)
    clipped, bounds = clip_rows(torch.arange(7), rows(), 2.0), Bounds(2.0, 2.0, 100.0, math.inf)
    whole = clip_rows(torch.arange(7), rows().expand(), 2.0)
    grid = Quantizer(2.0, 1 << 16)
    assert (grid.truncate(clipped) == grid.truncate(whole)).all()
    sums = [
        grid.fold(ClippedRowStream([each], rows().expand().shape[1], bounds, False), torch.empty(0)).value
        for each in (clipped, whole)
    ]
    assert (sums[0] == sums[1]).all()
    assert sums[0].any()
    assert [len(part.rows) for part in clipped.cut()] == {1: [1] * 7, 110: [2, 2, 2, 1], 1 << 20: [7]}[
        numbers
    ]


def test_products_in_double_precision_are_refused():
    # Their norms can vanish: ‖a‖ of 1e-170 is 0, and a row of norm 1e30 would not be clipped.
    left, right = (
        torch.full((1, 2), 1e-170, dtype=torch.float64),
        torch.full((1, 2), 1e200, dtype=torch.float64),
    )
    with refused("method.rows", "single precision"):
        FactoredRows((Products(left, right),))


@pytest.mark.parametrize("count", [1 << 14, 16_383])
def test_norms_of_equal_numbers_are_rounded_by_far_less_than_the_margin(count):
    for number in np.linspace(0.5, 1.5, 50, dtype=np.float32).tolist():
        factor = torch.full((1, count), number)
        exact = count * Fraction(number) ** 2  # the norm of the product of two such factors
        norm = Fraction(float(compute_norms(FactoredRows((Products(factor, factor),)))))
        assert abs(norm - exact) / exact < 2e-13


@given(st.integers(0, 2**31), st.integers(0, 40), st.floats(-17, 17).map(lambda exponent: 10.0**exponent))
def test_products_that_cancel_are_no_longer_than_their_norms(seed, bits, scale):
    """Of a sum of terms that cancel up to a part of 2^-bits, rounding could leave a norm that is too small."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(3, 8, size, generator=generator) * scale for size in (5, 4))
    left[:, 4:], right[:, 4:] = left[:, :4], -right[:, :4] * (1 + 2.0**-bits)
    places = torch.randint(2, (3, 4), generator=generator).repeat(1, 2)
    for some in (FactoredRows((Products(left, right),)), FactoredRows((Products(places, right, 2),))):
        norms, clip = compute_norms(some), 2.0**-60
        for row, norm in zip(multiply_exactly(some.pieces[0]), norms.tolist(), strict=True):
            assert row <= Fraction(norm) ** 2
        clipped = clip_rows(torch.arange(3), some, clip)
        whole = torch.linalg.vector_norm(clipped.tensor * clipped.factors.unsqueeze(1), dim=1)
        assert bool((whole <= clip).all())
        if bits < 8:
            torch.testing.assert_close(norms, some.expand().norm(dim=1), rtol=1e-7, atol=0)


def multiply_exactly(products: Products) -> list[Fraction]:
    """Return the squares of the exact norms of the rows."""
    squares = []
    for lefts, rights in zip(products.left.tolist(), products.right.tolist(), strict=True):
        if products.height:
            lefts = [[float(place == k) for k in range(products.height)] for place in lefts]
        m, n = products.shape
        total = [[Fraction(0)] * n for _ in range(m)]
        for a, b in zip(lefts, rights, strict=True):
            for i, j in ((i, j) for i in range(m) for j in range(n)):
                total[i][j] += Fraction(a[i]) * Fraction(b[j])
        squares.append(sum((value**2 for row in total for value in row), Fraction(0)))
    return squares


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("height", [0, 3])
def test_a_sum_of_products_that_is_not_finite_counts_as_zero(broken, height):
    left = torch.tensor([[0, 1], [2, 0]]) if height else torch.zeros(2, 2, 3)
    right = torch.ones(2, 2, 2)
    right[1, 1, 0] = broken
    assert clip_rows(torch.arange(2), FactoredRows((Products(left, right, height),)), 5.0).refused == 1
