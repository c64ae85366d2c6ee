"""Masks cancel over the roster, seals do not, and words are uniform modulo what they are counted in."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from silodp.crypto.secure_aggregation import RoundAttempt, WordGroup, apply_masks, open_sum
from support.sessions import NAMES, sessions

MET = sessions()


@given(
    st.integers(1, 40), st.sampled_from([7, 11, 31, 32, 33, 63, 64]), st.integers(0, 2**31), st.integers(0, 4)
)
def test_the_opened_sum_is_the_sum(size, bits, seed, left_out):
    rng = np.random.default_rng(seed)
    roster = tuple(name for s, name in enumerate(NAMES) if s != left_out)
    group, attempt = WordGroup(size, bits), RoundAttempt(seed, 1, 0, roster, "test")
    most = 2 ** (bits - 1) // len(roster) - 1
    values = {name: rng.integers(-most, most, size, endpoint=True) for name in roster}
    sent = [
        apply_masks(group.from_integers(value), group, MET[name], attempt) for name, value in values.items()
    ]
    seals = {name: MET[name].seal_key(*attempt.use) for name in roster}
    total = group.center(open_sum(sent, seals, group))
    np.testing.assert_array_equal(total, sum(values.values()))
    if size > 8 and bits > 30:
        for missing in roster:
            fewer = {name: key for name, key in seals.items() if name != missing}
            assert not np.array_equal(group.center(open_sum(sent, fewer, group)), total), (
                "every seal is needed"
            )


def test_no_two_attempts_share_a_mask():
    group = WordGroup(64, 64)
    zero = np.zeros(64, np.int64)
    attempts = [
        RoundAttempt(round_, attempt, release, roster, purpose)
        for round_ in range(2)
        for attempt in range(2)
        for release in range(2)
        for roster in (NAMES, NAMES[:3])
        for purpose in ("update", "counts")
    ]
    sent = [apply_masks(group.from_integers(zero), group, MET["north"], attempt) for attempt in attempts]
    assert len({value.tobytes() for value in sent}) == len(attempts)
    # Each mask by itself, too: a roster that lost a silo has fewer masks, so that sums of all of them differ anyway.
    assert len({MET["north"].seal_key(*attempt.use) for attempt in attempts}) == len(attempts)
    assert len({MET["north"].mask_key(NAMES[1], *attempt.use) for attempt in attempts}) == len(attempts)
    first = np.concatenate([value for value in sent])
    assert len(np.unique(first)) == first.size


def test_a_sum_modulo_a_power_of_two_is_masked_modulo_it():
    """Sums masked modulo 2^64 that should be modulo M leave their size open: an unmasked carry shows who is there."""
    group = WordGroup(20_000, 11)
    sent = apply_masks(
        group.from_integers(np.full(20_000, 3)), group, MET["north"], RoundAttempt(0, 0, 0, NAMES, "counts")
    )
    assert sent.max() < 2**11
    counts = np.bincount(sent, minlength=2**11)
    assert 0.75 < counts.std() ** 2 / counts.mean() < 1.25
