"""Integers on a grid: no row leaves its ball, sums are exact, and noise has the variance that is charged."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Bounds, ClippedRows, ClippedRowStream, MultiStepUpdate, clip_rows
from silodp.mechanisms.noise import Randomness, draw_skellam
from silodp.mechanisms.quantization import Quantizer, choose_ring_bits, compute_noise_variance, to_fixed_point
from support.oracles import judges_std


@given(
    st.integers(0, 2**31),
    st.integers(1, 6),
    st.integers(1, 60),
    st.floats(1e-3, 1e3),
    st.sampled_from([12, 16, 20]),
)
def test_weighted_rows_of_one_person_stay_within_the_clip(seed, silos, size, clip, bits):
    """Over all silos, whatever the weights that add to one: exactly, in integers."""
    rng = np.random.default_rng(seed)
    grid = Quantizer(clip, 1 << bits)
    weights = rng.dirichlet(np.ones(silos))
    rows = torch.from_numpy(rng.normal(size=(silos, size)).astype(np.float32) * 10 ** rng.uniform(-4, 4))
    whole = grid.truncate(clip_rows(torch.arange(silos), rows, clip), torch.from_numpy(weights))
    assert sum(math.isqrt(int(sum(int(v) ** 2 for v in row))) for row in whole) <= grid.units
    together = [int(v) for v in np.abs(whole).sum(axis=0)]
    assert sum(v * v for v in together) <= grid.units**2


def test_truncation_is_toward_zero_per_row_before_anything_is_added():
    grid = Quantizer(1.0, 1 << 12)
    rows = torch.tensor([[0.6, -0.6], [0.6, -0.6]]) / 4096
    stream = ClippedRowStream(
        [clip_rows(torch.tensor([0, 1]), rows, 1.0)], 2, Bounds(1.0, 1.0, 1.0, 2.0), True
    )
    assert grid.fold(stream, torch.ones(2, dtype=torch.float64)).value.tolist() == [0, 0]


def test_a_row_that_left_the_ball_counts_as_zero():
    """Factors are trusted with nothing: the integers' norm is compared, exactly, with this row's own clip."""
    rows = torch.eye(3, dtype=torch.float64)[:, :2] + 0.25  # norms 1.27, 1.27, .35
    loose = ClippedRows(torch.arange(3), rows, torch.tensor([0.79, 0.78, 1.0], dtype=torch.float64), 1.0)
    whole = Quantizer(1.0, 1 << 12).truncate(loose)
    assert (whole[0] == 0).all()
    assert whole[1:].tolist() == [[798, 3993], [1024, 1024]]
    own = ClippedRows(loose.owners, rows, loose.factors, 0.5)  # in a silo that clips to half of it
    assert Quantizer(1.0, 1 << 12).truncate(own).tolist() == [[0, 0], [0, 0], [1024, 1024]]
    stream = ClippedRowStream([own], 2, Bounds(1.0, 1.0, 0.0, 3.0), weighted=False)
    assert Quantizer(1.0, 1 << 12).fold(stream, torch.ones(3)).value.tolist() == [1024, 1024]
    slightly = replace(stream, chunks=[loose])
    assert Quantizer(1.0, 1 << 12).fold(slightly, torch.ones(3)).value.tolist() == [1822, 5017]


@given(st.integers(0, 2**31), st.integers(1, 40), st.sampled_from([12, 16, 20]), st.booleans())
def test_sums_are_the_sums_of_the_truncated_rows(seed, rows, bits, weighted):
    """Exactly, however they are cut into chunks; truncation is Python's own."""
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=(rows, 7)) * 10 ** rng.uniform(-3, 1, size=(rows, 1))).astype(np.float32)
    weights = torch.from_numpy(rng.uniform(size=rows))
    grid = Quantizer(0.3, 1 << bits)
    chunk = clip_rows(torch.arange(rows), torch.from_numpy(values), 0.3)
    parts = (
        ClippedRows(chunk.owners[i : i + 3], chunk.rows[i : i + 3], chunk.factors[i : i + 3], 0.3)
        for i in range(0, rows, 3)
    )
    stream = ClippedRowStream(parts, 7, Bounds(0.3, 0.3, 0.0, 99.0), weighted)
    share = weights if weighted else torch.ones(rows, dtype=torch.float64)
    by_hand = [
        [math.trunc(float(v) * (float(f) * float(w) * (grid.units / 0.3))) for v in row]
        for row, f, w in zip(values, chunk.factors, share, strict=True)
    ]
    assert grid.fold(stream, weights).value.tolist() == np.sum(by_hand, axis=0).tolist()
    assert grid.truncate(chunk, weights if weighted else None).tolist() == by_hand


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1, 150_003])
def test_long_rows_are_added_and_judged_as_whole_rows(size):
    """A row that left the ball is left out of every block of columns, though each of its blocks is short enough."""
    rng = np.random.default_rng(size)
    rows = torch.from_numpy(rng.normal(size=(20, size)))
    chunk = clip_rows(torch.arange(20), rows, 1.0)
    chunk.factors[7] *= 1.01
    chunk.rows[3, size - 1] = float("nan")
    chunk.factors[3] = 0.0
    grid = Quantizer(1.0, 1 << 20)
    weights = torch.from_numpy(rng.uniform(0.5, 1.0, size=20))
    stream = ClippedRowStream([chunk], size, Bounds(1.0, 1.0, 0.0, 20.0), weighted=True)
    by_row = grid.truncate(chunk, weights)
    assert [bool((row == 0).all()) for row in by_row] == [u in (3, 7) for u in range(20)]
    assert np.array_equal(grid.fold(stream, weights).value, by_row.sum(axis=0))


def test_a_row_that_is_not_finite_counts_as_zero():
    rows = torch.tensor([[float("inf"), 0.0], [0.3, 0.4]])
    stream = ClippedRowStream(
        [clip_rows(torch.tensor([0, 1]), rows, 1.0)], 2, Bounds(1.0, 1.0, 1.0, 2.0), True
    )
    total = Quantizer(1.0, 1 << 12).fold(stream, torch.ones(2, dtype=torch.float64))
    assert total.refused == 1
    assert total.value.tolist() == [int(0.3 * 4096), int(0.4 * 4096)]


@pytest.mark.parametrize("size", [2, (1 << 16) + 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_factor_that_is_not_finite_empties_its_own_row_alone(bad, size):
    """A method of somebody's own clips by min(1, C/norm), which is NaN for a row that is not finite."""
    rows = torch.zeros(3, size, dtype=torch.float64)
    rows[:, :2] = torch.tensor([[0.6, 0.0], [bad, 0.0], [0.4, 0.6]])
    factors = (1 / rows.norm(dim=1)).clamp(max=1)
    chunk = ClippedRows(torch.arange(3), rows, factors, 1.0)
    stream = ClippedRowStream([chunk], size, Bounds(1.0, 1.0, 0.0, 3.0), weighted=False)
    total = Quantizer(1.0, 1 << 16).fold(stream, torch.ones(3)).value
    assert total[:2].tolist() == [65535, 39321]
    assert not total[2:].any()


def test_rows_clipped_elsewhere_are_refused():
    stream = ClippedRowStream(
        [clip_rows(torch.tensor([0]), torch.ones(1, 2), 2.0)], 2, Bounds(1.0, 1.0, 1.0, 2.0), True
    )
    with pytest.raises(SilodpError, match="clipped to 2"):
        Quantizer(1.0, 1 << 12).fold(stream, torch.ones(1, dtype=torch.float64))


def test_released_integers_carry_the_noise_of_the_share():
    bounds, grid = Bounds(0.5, 1.0, 2.0, 3.0), Quantizer(0.5, 1 << 12)
    stream = ClippedRowStream([], 20_000, bounds, True)
    share = grid.fold(stream, torch.ones(1, dtype=torch.float64)).add_noise(Randomness.secret().stream())
    assert share.noise_std == 2.0 * 2 * 4096
    assert compute_noise_variance(bounds, grid) == share.noise_std**2
    assert judges_std(share.value, share.noise_std)


@pytest.mark.parametrize("variance", [0.0, 0.5, 3.0, 40.0])
def test_the_sampler_draws_skellam_variables(variance):
    draws = draw_skellam(40_000, variance, Randomness.secret().stream())
    values, counts = np.unique(draws, return_counts=True)
    expected = 40_000 * (stats.skellam.pmf(values, variance / 2, variance / 2) if variance else np.ones(1))
    often = expected > 8
    chi = ((counts[often] - expected[often]) ** 2 / expected[often]).sum()
    assert stats.chi2.sf(chi, max(1, often.sum() - 1)) > 1e-6
    assert draws.dtype == np.int64


@pytest.mark.parametrize("variance", [1e6, 1e12])
def test_large_variances_are_drawn_as_they_should(variance):
    assert judges_std(draw_skellam(20_000, variance, Randomness.secret().stream()), math.sqrt(variance))


def test_noise_that_cannot_be_drawn_is_refused():
    for variance in (1.01e12, -1.0, math.nan):
        with pytest.raises(SilodpError, match="cannot be drawn"):
            draw_skellam(1, variance, Randomness.secret().stream())


def test_the_finest_grid_that_can_be_drawn_is_taken():
    assert Quantizer.from_bounds(Bounds(1.0, 1.0, 5 / math.sqrt(5), 100.0)).units == 1 << 18
    assert Quantizer.from_bounds(Bounds(1.0, 1.0, 0.0, 100.0)).units == 1 << 20
    assert Quantizer.from_bounds(Bounds(1.0, 2.0, 5 * math.sqrt(5), 100.0)).units == 1 << 15
    with pytest.raises(SilodpError, match="grid of 0 steps"):
        Quantizer.from_bounds(Bounds(1.0, 1.0, 1e9, 100.0))
    with pytest.raises(SilodpError, match="units = 5000"):
        Quantizer.from_bounds(Bounds(1.0, 1.0, 1.0, 100.0), 5000)
    with pytest.raises(SilodpError, match="grid of 256 steps"):
        Quantizer.from_bounds(Bounds(1.0, 1.0, 1.0, 100.0), 256)


def test_the_ring_has_room_for_the_sum_and_its_noise():
    grid = Quantizer(1.0, 1 << 18)
    assert choose_ring_bits(Bounds(1.0, 1.0, 2.0, 1_000.0), grid, 5) == 32
    assert choose_ring_bits(Bounds(1.0, 1.0, 2.0, 2.0**14), grid, 5) == 64
    with pytest.raises(SilodpError, match="do not fit"):
        choose_ring_bits(Bounds(1.0, 1.0, 2.0, 2.0**50), grid, 5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(2, 50))
def test_finished_updates_keep_nine_digits(values, silos):
    sent = to_fixed_point(torch.tensor(values, dtype=torch.float64), silos)
    np.testing.assert_allclose(sent * 2.0**-32, values, atol=2.0**-31)


def test_a_finished_update_that_is_not_finite_cannot_wrap_the_sum():
    sent = to_fixed_point(torch.tensor([math.inf, -math.inf, math.nan, 1e30]), 5)
    assert sent[2] == 0
    assert abs(5 * int(sent[0])) < 2**63
    assert sent[0] == sent[3] == -sent[1]


def test_steps_are_added_up_with_the_noise_that_they_were_shown():
    """What leaves the silo is, to the unit, the sum of what the steps were given back."""
    bounds, grid, shown = Bounds(1.0, 1.0, 3.0, 99.0), Quantizer(1.0, 1 << 12), []

    def steps():
        for length in (0.25, 0.5, 1.0):
            rows = clip_rows(torch.arange(1), torch.full((1, 4000), length / math.sqrt(4000)), 1.0)
            stream = ClippedRowStream([rows], 4000, Bounds(1.0, 1.0, math.sqrt(3.0), 99.0), weighted=False)
            shown.append((yield stream))

    stream = Randomness.secret().stream()
    share = grid.add_noise(MultiStepUpdate(steps(), 4000, bounds), torch.ones(1), stream)
    assert share.noise_std == pytest.approx(3.0 * 4096)
    np.testing.assert_array_equal(share.value * grid.step, torch.stack(shown).sum(0).numpy())
    assert judges_std(
        share.value - sum(int(v * 4096 / math.sqrt(4000)) for v in (0.25, 0.5, 1.0)), 3.0 * 4096
    )
    for step in shown:
        assert judges_std(step.numpy(), math.sqrt(3.0))
