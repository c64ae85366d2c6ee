from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from silodp.errors import SilodpError
from silodp_private.crypto import lookup
from silodp_private.crypto.lookup import Lookup
from silodp_private.crypto.oblivious_transfer import BaseTransfers, TransferReceiver, TransferSender

BASE = BaseTransfers(bytes(32), "test")
BASE_SENDER, REPLY = TransferSender.accept(bytes(32), "test", BASE.offer)
BASE_RECEIVER = BASE.receiver(REPLY)


def pair() -> tuple[TransferReceiver, TransferSender]:
    """The same base transfers again, as if never used."""
    return copy.copy(BASE_RECEIVER), copy.copy(BASE_SENDER)


def tables_of(users: int, size: int) -> NDArray[np.uint64]:
    return np.random.default_rng(users).integers(0, 2**64, (users, size), np.uint64)


def hidden(answer: bytes, users: int) -> NDArray[np.uint64]:
    return np.frombuffer(answer[32:], "<u8").reshape(users, -1)


@given(st.integers(2, 70), st.data())
@settings(max_examples=30, deadline=None)
def test_everyone_gets_the_entry_asked_for(size: int, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=12)))
    receiver, sender = pair()
    tables = tables_of(len(indices), size)
    asked = Lookup.ask(receiver, 0, indices, size)
    answer = lookup.answer(sender, 0, asked.message, tables)
    assert (asked.open(answer) == tables[np.arange(len(indices)), indices]).all()


@pytest.mark.parametrize(("size", "width"), [(32, 8), (10, 8), (10, 40), (2, 128), (8, 8)])
def test_the_keys_open_no_other_entry(size: int, width: int) -> None:
    """And of the one, every word; also where tables do not fill all the places that so many transfers have."""
    users = 20
    receiver, sender = pair()
    tables = np.random.default_rng(1).integers(0, 2**8, (users, size, width), np.uint8)
    everyone, indices = np.arange(users), np.arange(users) % size
    asked = Lookup.ask(receiver, 0, indices, size)
    answer = lookup.answer(sender, 0, asked.message, tables)
    assert len(answer) == lookup.answer_bytes(users, size, width) == 32 + tables.size
    for part in (asked, Lookup.unpack(asked.pack())):
        assert (part.entries(answer, width) == tables[everyone, indices]).all()
        for shift in range(1, size):
            others = (indices + shift) % size
            opened = replace(part, indices=others).entries(answer, width)
            assert (opened != tables[everyone, others]).reshape(-1, 8).any(axis=1).all()
    assert (hidden(answer, users) != tables.reshape(users, -1).view("<u8")).all()
    with pytest.raises(SilodpError, match="does not belong"):
        asked.entries(answer, width + 1)


def test_equal_entries_of_one_table_do_not_look_equal() -> None:
    """Of two ciphertexts a person, one stands in several places; nor where the receiver takes off the pads it has."""
    receiver, sender = pair()
    asked = Lookup.ask(receiver, 0, np.zeros(1, int), 8)
    left = (
        hidden(lookup.answer(sender, 0, asked.message, np.zeros((1, 8, 4), np.uint64)), 1)
        .reshape(8, 4)
        .copy()
    )
    assert np.unique(left).size == 8 * 4
    for i in range(3):
        pad = lookup._expand_pads(asked.keys[:, i], 3, 32)[0].view("<u8")
        for entry in (entry for entry in range(8) if not entry >> i & 1):
            left[entry] ^= pad[lookup._without_bit(entry, i)]
    assert not left[0].any()
    assert np.unique(left[1:]).size == 7 * 4


def test_entries_cannot_be_combined() -> None:
    # Were the pads the same at every place, those of entries 0, 1, 2 and 3 would cancel.
    receiver, sender = pair()
    tables = tables_of(50, 4)
    asked = Lookup.ask(receiver, 0, np.zeros(50, int), 4)
    answer = lookup.answer(sender, 0, asked.message, tables)
    combined = np.bitwise_xor.reduce(hidden(answer, 50), axis=1)
    assert (combined != np.bitwise_xor.reduce(tables, axis=1)).all()


def test_a_replay_with_other_indices_is_refused() -> None:
    (receiver, sender), (cheat, _) = pair(), pair()
    tables = tables_of(3, 8)
    lookup.answer(sender, 0, Lookup.ask(receiver, 0, np.array([1, 2, 3]), 8).message, tables)
    with pytest.raises(SilodpError, match="was used"):
        lookup.answer(sender, 0, Lookup.ask(cheat, 0, np.array([4, 5, 6]), 8).message, tables)


def test_altered_and_foreign_answers_are_refused() -> None:
    receiver, sender = pair()
    tables, indices = tables_of(3, 8), np.array([1, 2, 3])
    asked = Lookup.ask(receiver, 0, indices, 8)
    answer = lookup.answer(sender, 0, asked.message, tables)
    for place in (0, 31, 32, 100, len(answer) - 1):
        altered = answer[:place] + bytes([answer[place] ^ 1]) + answer[place + 1 :]
        with pytest.raises(SilodpError, match="does not belong"):
            asked.open(altered)
    with pytest.raises(SilodpError, match="does not belong"):
        asked.open(answer[:-8])
    later = Lookup.ask(receiver, 1, indices, 8)
    with pytest.raises(SilodpError, match="does not belong"):
        later.open(answer)
    with pytest.raises(SilodpError, match="does not belong"):
        replace(asked, domain=bytes(32)).open(answer)  # another session's
    assert (asked.open(answer) == tables[np.arange(3), indices]).all()


def test_requests_and_tables_of_different_sizes_are_refused() -> None:
    receiver, sender = pair()
    message = Lookup.ask(receiver, 0, np.array([1, 2, 3, 0]), 64).message  # 24 transfers
    with pytest.raises(SilodpError, match="not 32 transfers"):
        lookup.answer(sender, 0, message, tables_of(4, 256))
    asked = Lookup.ask(receiver, 1, np.array([1, 2, 3, 0]), 64)
    with pytest.raises(SilodpError, match="does not belong"):
        asked.open(lookup.answer(sender, 1, asked.message, tables_of(8, 8)))  # 24 as well


@pytest.mark.parametrize("indices", [[-1], [8], [], [[1]]])
def test_an_index_outside_the_table_is_refused(indices: list[int]) -> None:
    with pytest.raises(SilodpError, match="outside the table of 8"):
        Lookup.ask(pair()[0], 0, np.array(indices, int), 8)


def test_a_table_has_two_entries_and_secrets_are_not_printed() -> None:
    with pytest.raises(SilodpError, match="table of 1 entries"):
        Lookup.ask(pair()[0], 0, np.array([0]), 1)
    shown = repr(Lookup.ask(pair()[0], 0, np.array([3]), 8))
    assert "indices" not in shown
    assert "keys" not in shown
