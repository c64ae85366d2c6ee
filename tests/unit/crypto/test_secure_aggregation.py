"""Masks cancel over the roster, seals do not, and words are uniform modulo what they are counted in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silodp.crypto.secure_aggregation import RoundAttempt, Words, masked, opened
from silodp.errors import SilodpError
from unit.crypto.test_keys import NAMES, sessions

MET = sessions()


@given(
    st.integers(1, 40), st.sampled_from([7, 11, 31, 32, 33, 63, 64]), st.integers(0, 2**31), st.integers(0, 4)
)
def test_the_opened_sum_is_the_sum(size, bits, seed, left_out):
    rng = np.random.default_rng(seed)
    roster = tuple(name for s, name in enumerate(NAMES) if s != left_out)
    group, attempt = Words(size, bits), RoundAttempt(seed, 1, 0, roster, "test")
    most = 2 ** (bits - 1) // len(roster) - 1
    values = {name: rng.integers(-most, most, size, endpoint=True) for name in roster}
    sent = [masked(group.of(value), group, MET[name], attempt) for name, value in values.items()]
    seals = {name: MET[name].seal_key(*attempt.use) for name in roster}
    total = group.centered(opened(sent, seals, group))
    np.testing.assert_array_equal(total, sum(values.values()))
    if size > 8 and bits > 30:
        for missing in roster:
            fewer = {name: key for name, key in seals.items() if name != missing}
            assert not np.array_equal(group.centered(opened(sent, fewer, group)), total), (
                "every seal is needed"
            )


def test_no_two_attempts_share_a_mask():
    group = Words(64, 64)
    zero = np.zeros(64, np.int64)
    attempts = [
        RoundAttempt(round_, attempt, release, roster, purpose)
        for round_ in range(2)
        for attempt in range(2)
        for release in range(2)
        for roster in (NAMES, NAMES[:3])
        for purpose in ("update", "counts")
    ]
    sent = [masked(group.of(zero), group, MET["north"], attempt) for attempt in attempts]
    assert len({value.tobytes() for value in sent}) == len(attempts)
    first = np.concatenate([value for value in sent])
    assert len(np.unique(first)) == first.size


def test_a_sum_modulo_a_power_of_two_is_masked_modulo_it():
    """Sums masked modulo 2^64 that should be modulo M leave their size open: an unmasked carry shows who is there."""
    group = Words(20_000, 11)
    sent = masked(group.of(np.full(20_000, 3)), group, MET["north"], RoundAttempt(0, 0, 0, NAMES, "counts"))
    assert sent.max() < 2**11
    counts = np.bincount(sent, minlength=2**11)
    assert 0.75 < counts.std() ** 2 / counts.mean() < 1.25


@pytest.mark.parametrize(
    "wrong", [np.zeros(3, np.uint32), np.zeros(4, np.uint64), np.zeros((2, 2), np.uint32)]
)
def test_a_vector_of_another_length_or_width_is_refused_by_name(wrong):
    with pytest.raises(SilodpError, match=r"silo 'east' sent .* of shape .* where 4 words of 32 bits"):
        Words(4, 32).checked(wrong, "east")
