"""Products of secret bits and rows: the shares add up, and neither party's part says anything."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from silodp.crypto.secure_aggregation import WordGroup
from silodp.crypto.streams import keystream
from silodp.errors import SilodpError
from silodp_private.crypto.products import MaskedRows, add_products


def keys(count: int) -> NDArray[np.uint8]:
    drawn = np.frombuffer(secrets.token_bytes(2 * count * 32), np.uint8)
    return drawn.reshape(2, count, 32)


def chosen(both: NDArray[np.uint8], bits: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return both[bits.astype(int), np.arange(len(bits))]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([32, 64]),
    st.integers(1, 20),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_the_shares_add_up_to_the_rows_that_were_chosen(bits, count, size, seed, some):
    rng = np.random.default_rng(seed)
    group, picked, both = WordGroup(size, bits), rng.random(count) < 0.5, keys(count)
    rows = rng.integers(-(2**20), 2**20, (count, size))
    here = np.flatnonzero(rng.random(count) < 0.5) if some else np.arange(count)
    silo = MaskedRows.begin(both, group)
    silo.add(here, group.from_integers(rows[here]))
    server = add_products(chosen(both, picked), picked, silo.corrections.tobytes(), group)
    expected = rows[here][picked[here]].sum(axis=0)
    assert (group.center(group.add(server, silo.share)) == expected).all()


def test_they_are_those_of_the_definition():
    """x + G(k_0) − G(k_1), and −Σ G(k_0), word by word."""
    group, both = WordGroup(20, 32), keys(3)
    rows = np.arange(60, dtype=np.uint32).reshape(3, 20)
    silo = MaskedRows.begin(both, group)
    silo.add(np.array([0, 1, 2]), rows)
    streams = [[keystream(key.tobytes(), 80).view("<u4").astype(object) for key in half] for half in both]
    for u in range(3):
        due = (rows[u].astype(object) + streams[0][u] - streams[1][u]) % 2**32
        assert silo.corrections[u].tolist() == due.tolist()
    assert silo.share.tolist() == [int(x) for x in -sum(streams[0]) % 2**32]


@pytest.mark.parametrize("size", [5, 300])
def test_corrections_are_uniform_whatever_the_rows(size):
    """Also of persons without records, whose row is 0: all are sent, and all look alike."""
    group = WordGroup(size, 32)
    silo = MaskedRows.begin(keys(6000 // size), group)
    silo.add(np.arange(10), np.full((10, size), 7, np.uint32))
    for part in (silo.corrections[:10], silo.corrections[10:]):
        values = part.view(np.uint8).ravel()
        assert stats.chisquare(np.bincount(values, minlength=256)).pvalue > 1e-6
    assert silo.share.any()


def test_one_key_opens_nothing_without_the_other():
    """With the key that was not chosen a row of bit 0 would be read: corrections are under both streams."""
    group, both = WordGroup(50, 32), keys(1)
    silo = MaskedRows.begin(both, group)
    silo.add(np.array([0]), np.full((1, 50), 7, np.uint32))
    for key in both[:, 0]:
        stream = keystream(key.tobytes(), 200).view("<u4")
        for left in (silo.corrections[0] - stream, silo.corrections[0] + stream):
            assert (left != 7).all()


def test_corrections_of_another_length_are_refused():
    group, both, bits = WordGroup(4, 32), keys(3), np.zeros(3, bool)
    for size in (0, 47, 49, 96):
        with pytest.raises(SilodpError, match="bytes correct 3 rows of 4"):
            add_products(chosen(both, bits), bits, bytes(size), group)
