import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from silodp.errors import SilodpError
from silodp.mechanisms.clipping import (
    Bounds,
    ClippedRows,
    ClippedRowStream,
    ClippedSum,
    MultiStepUpdate,
    add_noise,
    clip_rows,
)
from silodp.mechanisms.clipping import add_weighted_rows as fold_stream
from silodp.mechanisms.noise import Randomness, draw_poisson_sample
from silodp.settings import Clip, Probability, check_value
from support.oracles import judges_std
from support.refusals import refused


def fold(
    chunks: Iterable[ClippedRows], size: int, clip: float, weights: torch.Tensor | None = None
) -> ClippedSum:
    return fold_stream(
        ClippedRowStream(chunks, size, Bounds(clip, clip, 1.0, math.inf), weights is not None), weights
    )


scales = st.floats(-30, 30).map(lambda e: 10.0**e)


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 50), scales, scales, st.booleans())
def test_no_clipped_row_leaves_the_ball(seed, rows, size, scale, clip, double):
    dtype = torch.float64 if double else torch.float32
    values = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=dtype) * scale
    clipped = clip_rows(torch.arange(rows), values, clip)
    product = values.double() * clipped.factors.unsqueeze(1)  # as `fold` multiplies
    norms = torch.linalg.vector_norm(product, dim=1, dtype=torch.float64)
    finite = torch.isfinite(torch.linalg.vector_norm(values, dim=1, dtype=torch.float64))
    assert (norms[finite] <= clip).all()
    inside = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64) <= clip * (1 - 1e-9)
    assert (clipped.factors[inside & finite] == 1).all(), "a row inside the ball is left alone"


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 50), scales, scales, st.booleans())
def test_a_normalized_row_is_as_long_as_the_clip(seed, rows, size, scale, clip, double):
    dtype = torch.float64 if double else torch.float32
    values = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=dtype) * scale
    clipped = clip_rows(torch.arange(rows), values, clip, min_norm=0.0)
    norms = torch.linalg.vector_norm(values.double() * clipped.factors.unsqueeze(1), dim=1)
    assert (norms <= clip).all()
    assert (norms >= clip * (1 - 1e-9)).all()


def test_rows_below_the_least_norm_become_shorter_than_the_clip():
    rows = torch.tensor([[3.0, 4.0], [0.03, 0.04], [0.003, 0.004], [0.0, 0.0]])
    clipped = clip_rows(torch.arange(4), rows, 2.0, min_norm=0.01)
    norms = torch.linalg.vector_norm(rows.double() * clipped.factors.unsqueeze(1), dim=1)
    assert norms.tolist() == pytest.approx([2.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize("clip", [1e-3, 1.0, 1e6])
def test_the_shortest_rows_stay_in_the_ball(clip):
    """Squares of float64 below 1e-308 lose their digits, and a norm computed from them may be too small."""
    sizes = [5e-324, 1e-300, 3e-160, 1e-130, 2e-119, 0.0]
    smallest = torch.tensor(sizes, dtype=torch.float64).unsqueeze(1).expand(6, 7)
    assert (smallest[:-1, 0] > 0).all()
    for least in (None, 0.0, 0.01):
        clipped = clip_rows(torch.arange(6), smallest, clip, min_norm=least)
        rows = (smallest * clipped.factors.unsqueeze(1)).tolist()
        assert all(math.hypot(*row) <= clip for row in rows)
        assert clipped.refused == 0
    float32 = torch.tensor([[1.4e-45, 0.0]])
    assert (
        float32.double() * clip_rows(torch.arange(1), float32, clip, min_norm=0.0).factors
    ).norm() > 0.99 * clip


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_normalized_row_that_is_not_finite_counts_as_zero(bad):
    clipped = clip_rows(torch.arange(2), torch.tensor([[0.3, 0.4], [bad, 1.0]]), 1.0, min_norm=0.0)
    assert clipped.refused == 1
    assert clipped.factors.tolist() == [pytest.approx(2.0), 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_counts_as_zero_and_is_counted(bad):
    rows = torch.tensor([[3.0, 4.0], [bad, 1.0]])
    total = fold([clip_rows(torch.arange(2), rows, 1.0)], 2, 1.0)
    assert total.refused == 1
    torch.testing.assert_close(total.value, torch.tensor([0.6, 0.8], dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_row_that_a_factor_leaves_a_millionth_too_long_counts_as_zero():
    rows = torch.tensor([[0.6, 0.8], [0.8, 0.6]], dtype=torch.float64)
    factors = torch.tensor([1 + 1e-6, 1 - 1e-6], dtype=torch.float64)
    chunk = ClippedRows(torch.arange(2), rows, factors, 1.0)
    assert chunk.find_within_clip().tolist() == [False, True]
    torch.testing.assert_close(fold([chunk], 2, 1.0).value, rows[1] * factors[1])


def test_a_zero_row_is_no_division_by_zero():
    total = fold([clip_rows(torch.arange(1), torch.zeros(1, 3), 1.0)], 3, 1.0)
    assert total.refused == 0
    assert (total.value == 0).all()


@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(1, 5))
def test_one_owner_moves_the_sum_by_at_most_the_sensitivity(seed, owners, per_owner):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(owners * per_owner, 3, generator=generator) * 100
    owner = torch.arange(owners).repeat_interleave(per_owner)
    weights = torch.full((owners,), 1 / per_owner, dtype=torch.float64)
    whole = fold([clip_rows(owner, rows, 2.0)], 3, 2.0, weights)
    rest = owner != 0
    without = fold([clip_rows(owner[rest], rows[rest], 2.0)], 3, 2.0, weights)
    assert torch.linalg.vector_norm(whole.value - without.value) <= whole.sensitivity * (1 + 1e-6)


@pytest.mark.parametrize("count", [1_000, 200_000])
def test_a_sum_of_many_rows_moves_by_no_more_than_one_row(count):
    """In single precision the rounding of 10⁵ rows alone is worth more."""
    rows = torch.rand(count, 2, generator=torch.Generator().manual_seed(0)) + 0.5
    whole = fold([clip_rows(torch.arange(count), rows, 0.3)], 2, 0.3)
    for left_out in (0, count // 2, count - 1):
        rest = torch.cat([rows[:left_out], rows[left_out + 1 :]])
        without = fold([clip_rows(torch.arange(count - 1), rest, 0.3)], 2, 0.3)
        assert (whole.value - without.value).norm() <= 0.3 + 1e-9


def test_rows_near_overflow_are_clipped_too():
    """Their factors are below what single precision can hold exactly."""
    for exponent in np.linspace(30, 38, 50):
        row = torch.full((1, 4), 10.0**exponent, dtype=torch.float32)
        weight = torch.tensor([0.001], dtype=torch.float64)
        total = fold([clip_rows(torch.zeros(1, dtype=torch.int64), row, 0.01)], 4, 0.01, weight)
        assert total.value.norm().item() == pytest.approx(1e-5, rel=1e-9)


def test_chunks_do_not_matter():
    rows = torch.randn(10, 4, dtype=torch.float64)
    owners = torch.arange(10)
    weights = torch.rand(10, dtype=torch.float64)
    whole = fold([clip_rows(owners, rows, 1.0)], 4, 1.0, weights).value
    parts = fold(
        (clip_rows(owners[i : i + 3], rows[i : i + 3], 1.0) for i in range(0, 10, 3)), 4, 1.0, weights
    )
    torch.testing.assert_close(whole, parts.value)


def test_rows_of_a_smaller_clip_lie_in_the_ball():
    rows = torch.ones(1, 2)
    total = fold([clip_rows(torch.arange(1), rows, 0.5)], 2, 1.0)
    assert total.value.norm().item() == pytest.approx(0.5)
    assert total.sensitivity == 1.0


@pytest.mark.parametrize(("min_norm", "short"), [(None, 0.1), (0.05, 2.0)])
def test_a_row_of_a_part_of_the_clip_is_no_longer_than_that(min_norm, short):
    rows, part = torch.tensor([[0.1, 0], [30, 40]]), torch.tensor([1, 0.25], dtype=torch.float64)
    clipped = clip_rows(torch.arange(2), rows, 2.0, part, min_norm)
    torch.testing.assert_close(clipped.compute_clipped_norms(), torch.tensor([short, 0.5]).double())


@given(st.integers(1, 3000), st.integers(1, 400))
def test_norms_do_not_depend_on_how_rows_are_cut(rows, size):
    values = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))
    factors = clip_rows(torch.arange(rows), values, 1.0).factors
    norms = np.linalg.norm(values.double().numpy(), axis=1)
    np.testing.assert_allclose(factors.numpy(), np.minimum(1.0, 1 / norms), rtol=1e-11)


@pytest.mark.parametrize("size", [(1 << 14) - 1, 1 << 14, (1 << 14) + 1, 100_003, 300_001])
@pytest.mark.parametrize("double", [False, True])
def test_long_rows_in_blocks_of_columns_stay_in_the_ball(size, double):
    """The norm is over all columns: of one block alone it would let a row be as many clips long as it has blocks."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(5, size, generator=generator, dtype=torch.float64 if double else torch.float32)
    rows *= torch.tensor([1e-30, 1e-3, 1.0, 1e3, 1e30]).unsqueeze(1)
    rows[3, : size // 2] = 0  # all of its length in the last blocks
    clipped = clip_rows(torch.arange(5), rows, 0.5)
    exact = [math.sqrt(math.fsum((row.numpy().astype(np.longdouble) ** 2).tolist())) for row in rows]
    for row, factor, norm in zip(rows, clipped.factors.tolist(), exact, strict=True):
        assert norm * factor <= 0.5
        assert factor == pytest.approx(min(1.0, 0.5 / norm), rel=2e-12)
        one = fold([clip_rows(torch.zeros(1, dtype=torch.int64), row[None], 0.5)], size, 0.5)
        assert math.sqrt(math.fsum((one.value**2).tolist())) <= 0.5
    weights = torch.rand(5, generator=generator, dtype=torch.float64)
    total = fold([clipped], size, 0.5, weights).value
    torch.testing.assert_close(total, (clipped.factors * weights) @ rows.double(), rtol=1e-9, atol=1e-14)


def test_one_number_that_is_not_finite_refuses_all_blocks_of_its_row():
    rows = torch.ones(3, 50_000)
    rows[1, 49_999] = float("nan")
    total = fold([clip_rows(torch.arange(3), rows, 1.0)], 50_000, 1.0)
    assert total.refused == 1
    assert float(total.value.norm()) == pytest.approx(2.0)


def test_rows_that_were_replaced_are_measured_anew():
    """Their norms were those of other rows, and the sum trusts no factors."""
    clipped = clip_rows(torch.tensor([0, 1]), torch.tensor([[0.6, 0.0], [0.0, 0.8]]), 1.0)
    assert clipped.norms is not None
    longer = replace(clipped, rows=clipped.rows * 10)
    stream = ClippedRowStream([longer], 2, Bounds(1.0, 1.0, 0.0, 2.0), weighted=False)
    assert fold_stream(stream, torch.ones(2)).value.tolist() == [0.0, 0.0]
    kept = clipped.select(torch.tensor([1]))
    assert (kept.owners.tolist(), kept.compute_clipped_norms().tolist()) == ([1], [pytest.approx(0.8)])


def test_rows_of_another_clip_are_refused():
    with pytest.raises(SilodpError, match="clip"):
        fold([clip_rows(torch.arange(1), torch.ones(1, 2), 2.0)], 2, 1.0)


def test_weighted_rows_need_weights():
    with pytest.raises(SilodpError, match="weights"):
        fold_stream(ClippedRowStream([], 1, Bounds(1.0, 1.0, 1.0, 1.0), weighted=True))


def test_released_noise_is_multiplier_times_sensitivity():
    share = ClippedSum(torch.zeros(4000, dtype=torch.float64), 0.3).add_noise(
        7.0, Randomness.secret().stream()
    )
    assert share.noise_std == pytest.approx(2.1)
    assert judges_std(share.value.numpy(), 2.1)


def test_a_share_cannot_be_noised_again():
    share = ClippedSum(torch.zeros(1), 1.0).add_noise(1.0, Randomness.secret().stream())
    assert not hasattr(share, "release")


def test_poisson_samples_have_their_rate():
    draws = draw_poisson_sample(20000, 0.3, Randomness.from_seed(0).stream("sample"))
    assert draws.dtype == bool
    assert abs(draws.mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / 20000)
    assert draw_poisson_sample(1000, 1.0, Randomness.from_seed(0).stream("sample")).all()


@pytest.mark.parametrize("wrong", ["a", None, True, np.True_, [0.5], 1j, torch.tensor(0.5)])
def test_a_clip_and_a_probability_are_numbers(wrong):
    with refused("argument.type"):
        check_value("clip", wrong, Clip)
    with refused("argument.type"):
        check_value("user_sampling", wrong, Probability)


def test_steps_see_what_is_released_of_them():
    shown = []

    def steps():
        for length in (0.25, 0.5):
            values = torch.full((2, 4000), length / math.sqrt(4000))
            values[1, 7] = math.inf
            rows = clip_rows(torch.arange(2), values, 1.0)
            shown.append((yield ClippedRowStream([rows], 4000, Bounds(1.0, 1.0, 2.0, 9.0), weighted=False)))

    update = MultiStepUpdate(steps(), 4000, Bounds(1.0, 1.0, math.sqrt(8), 9.0))
    share = add_noise(update, torch.ones(2), Randomness.secret().stream())
    assert (share.noise_std, share.refused) == (pytest.approx(math.sqrt(8)), 2)
    torch.testing.assert_close(share.value, shown[0] + shown[1])
    assert judges_std(shown[0].numpy(), 2.0)
    assert judges_std((share.value - 0.75 / math.sqrt(4000)).numpy(), math.sqrt(8))
