from __future__ import annotations

import copy
import secrets
from dataclasses import replace

import numpy as np
import pytest
import rbcl
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from silodp.errors import SilodpError
from silodp_private.crypto import oblivious_transfer
from silodp_private.crypto.oblivious_transfer import SECURITY, BaseTransfers, TransferReceiver, TransferSender

SESSION = bytes(range(32))
FIELD_PRIME = 2**255 - 19


def connected(session: bytes = SESSION, purpose: str = "test") -> tuple[TransferReceiver, TransferSender]:
    """Both parties after their base transfers, which exchange bytes alone."""
    base = BaseTransfers(session, purpose)
    sender, reply = TransferSender.accept(session, purpose, base.offer)
    return base.receiver(reply), sender


BASE_RECEIVER, BASE_SENDER = connected()


def pair() -> tuple[TransferReceiver, TransferSender]:
    """The same base transfers again, as if never used."""
    return copy.copy(BASE_RECEIVER), copy.copy(BASE_SENDER)


def flipped(message: bytes, bit: int) -> bytes:
    changed = bytearray(message)
    changed[bit // 8] ^= 128 >> bit % 8
    return bytes(changed)


def bits(count: int) -> NDArray[np.uint8]:
    return np.array([secrets.randbits(1) for _ in range(count)], np.uint8)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=300), st.integers(0, 2**64 - 2))
@settings(max_examples=25, deadline=None)
def test_the_receiver_learns_the_key_it_chose_and_only_that(choices: list[int], counter: int) -> None:
    receiver, sender = pair()
    message, mine = receiver.choose(counter, np.array(choices))
    both = sender.keys(counter, len(choices), message)
    rows = np.arange(len(choices))
    assert (both[choices, rows] == mine).all()
    assert (both[1 - np.array(choices), rows] != mine).any(axis=1).all()


def test_no_two_keys_are_equal_over_transfers_and_counters() -> None:
    receiver, sender = pair()
    keys = [sender.keys(c, 50, receiver.choose(c, bits(50))[0]).reshape(-1, 32) for c in range(3)]
    assert len({key.tobytes() for key in np.concatenate(keys)}) == 300


@pytest.mark.parametrize("part", ["index", "domain", "offer", "point"])
def test_every_base_key_is_bound_to_index_session_and_both_points(part: str) -> None:
    inputs = {"domain": bytes(32), "index": 0, "offer": bytes(32), "point": bytes(32), "shared": bytes(32)}
    changed = inputs | {part: 1 if part == "index" else bytes(31) + b"\1"}
    assert oblivious_transfer._base_key(**inputs) != oblivious_transfer._base_key(**changed)


@pytest.mark.parametrize(("session", "purpose"), [(bytes(32), "test"), (SESSION, "the other direction")])
def test_parties_of_different_sessions_or_directions_do_not_agree(session: bytes, purpose: str) -> None:
    base = BaseTransfers(SESSION, "test")
    sender, reply = TransferSender.accept(session, purpose, base.offer)
    receiver = base.receiver(reply)
    with pytest.raises(SilodpError, match="of another session"):
        sender.keys(0, 9, receiver.choose(0, bits(9))[0])


def test_rows_and_challenges_are_bound_to_the_session() -> None:
    # The same seeds under another domain: base transfers that were carried from one session to the next.
    receiver, sender = pair()
    message, _ = receiver.choose(0, bits(9))
    with pytest.raises(SilodpError, match="columns disagree"):
        replace(sender, domain=bytes(32)).keys(0, 9, message)
    rows = np.zeros((2, 16), np.uint8)
    keys = [oblivious_transfer._row_keys(domain, c, rows) for domain in (bytes(32), SESSION) for c in (0, 1)]
    assert len({key.tobytes() for pair in keys for key in pair}) == 8


INVALID = {
    "identity": bytes(32),
    "not canonical": (FIELD_PRIME + 2).to_bytes(32, "little"),
    "negative": (1).to_bytes(32, "little"),
    "short": bytes(31),
}


@pytest.mark.parametrize("point", INVALID.values(), ids=INVALID)
def test_points_are_validated_on_both_sides(point: bytes) -> None:
    with pytest.raises(SilodpError, match="point is not valid"):
        TransferSender.accept(SESSION, "test", point)
    base = BaseTransfers(SESSION, "test")
    _, reply = TransferSender.accept(SESSION, "test", base.offer)
    with pytest.raises(SilodpError, match=r"not valid|4095 bytes"):
        base.receiver(reply[:-32] + point)


def test_base_transfers_are_answered_once() -> None:
    base = BaseTransfers(SESSION, "test")
    reply = TransferSender.accept(SESSION, "test", base.offer)[1]
    base.receiver(reply)
    with pytest.raises(SilodpError, match="answered before"):
        base.receiver(reply)
    with pytest.raises(SilodpError, match="answered before"):
        base.pack()
    with pytest.raises(SilodpError, match="32 bytes of the session"):
        BaseTransfers(b"short", "test")


def test_base_transfers_that_were_stored_take_the_reply() -> None:
    base = BaseTransfers(SESSION, "test")
    sender, reply = TransferSender.accept(SESSION, "test", base.offer)
    again = BaseTransfers.unpack(base.pack())
    assert again.offer == base.offer
    choices = bits(16)
    message, keys = again.receiver(reply).choose(0, choices)
    assert (keys == sender.keys(0, 16, message)[choices, np.arange(16)]).all()


def test_the_reply_shows_no_choice() -> None:
    # B = bG or bG + A with b uniform: nothing to see in any bit. (Adding A to a fixed point would be seen.)
    base = BaseTransfers(SESSION, "test")
    sender, reply = TransferSender.accept(SESSION, "test", base.offer)
    points = [reply[32 * i : 32 * i + 32] for i in range(SECURITY)]
    assert len(set(points)) == SECURITY
    unshifted = {rbcl.crypto_core_ristretto255_sub(point, base.offer) for point in points}
    assert not unshifted & set(points)
    assert 30 < sender.delta.sum() < 98  # 6 standard deviations


def test_secrets_of_base_transfers_are_drawn_anew_every_time() -> None:
    # Whoever can guess delta, or one of the scalars that hide it in the reply, reads both keys of every transfer.
    first, second = BaseTransfers(SESSION, "test"), BaseTransfers(SESSION, "test")
    assert first.offer != second.offer
    deltas, hiding = [], []
    for _ in range(2):
        sender, reply = TransferSender.accept(SESSION, "test", first.offer)
        points = [reply[32 * i : 32 * i + 32] for i in range(SECURITY)]
        deltas.append(sender.delta.tobytes())
        hiding.append(
            {
                rbcl.crypto_core_ristretto255_sub(point, first.offer) if choice else point
                for point, choice in zip(points, sender.delta, strict=True)
            }
        )
    assert deltas[0] != deltas[1]
    assert not hiding[0] & hiding[1]


@pytest.mark.parametrize("bit", [0, 77, 255])
def test_a_flipped_bit_in_base_transfers_is_found(bit: int) -> None:
    base = BaseTransfers(SESSION, "test")

    def exchange(offer: bytes, flip: int | None) -> None:
        sender, reply = TransferSender.accept(SESSION, "test", offer)
        receiver = base.receiver(reply if flip is None else flipped(reply, flip))
        sender.keys(0, 9, receiver.choose(0, bits(9))[0])

    with pytest.raises(SilodpError):
        exchange(flipped(base.offer, bit), None)
    base = BaseTransfers(SESSION, "test")
    with pytest.raises(SilodpError):
        exchange(base.offer, 256 * 100 + bit)


def test_a_flipped_bit_in_a_choice_is_found() -> None:
    message = pair()[0].choose(5, bits(20))[0]
    for bit in {*range(0, 8 * len(message), 997), 63, 64, 8 * len(message) - 1}:
        with pytest.raises(SilodpError, match=r"under counter 5|columns disagree"):
            pair()[1].keys(5, 20, flipped(message, bit))
    for wrong in (message[:-1], message + b"\0", b""):
        with pytest.raises(SilodpError, match="not 20 transfers"):
            pair()[1].keys(5, 20, wrong)


def test_a_counter_is_used_once_by_either_party() -> None:
    receiver, sender = pair()
    message, _ = receiver.choose(3, bits(4))
    sender.keys(3, 4, message)
    assert receiver.counter == sender.counter == 4
    for used in (3, 2, 0, -1):
        with pytest.raises(SilodpError, match="was used"):
            receiver.choose(used, bits(4))
        with pytest.raises(SilodpError, match="was used"):
            sender.keys(used, 4, message)
    sender.keys(7, 4, receiver.choose(7, bits(4))[0])  # later counters may be skipped to


def test_a_replayed_counter_would_show_both_keys_and_is_refused() -> None:
    (receiver, sender), (cheat, forgetful) = pair(), pair()
    first, zeros = receiver.choose(0, np.zeros(8, np.uint8))
    again, ones = cheat.choose(0, np.ones(8, np.uint8))
    pads = sender.keys(0, 8, first)
    with pytest.raises(SilodpError, match="was used"):
        sender.keys(0, 8, again)
    # A sender that forgot would lay its second entries under pads of which the cheat has the other half.
    forgotten = forgetful.keys(0, 8, again)
    assert (pads[0] == zeros).all()
    assert (forgotten[1] == ones).all()
    assert (forgotten[1] == pads[0]).all()


def test_what_is_stored_goes_on_and_never_goes_back() -> None:
    receiver, sender = pair()
    sender.keys(0, 4, receiver.choose(0, bits(4))[0])
    receiver = TransferReceiver.unpack(receiver.pack(), 1)
    sender = TransferSender.unpack(sender.pack(), 6)
    assert (receiver.counter, sender.counter) == (1, 6)
    choices = bits(40)
    message, mine = receiver.choose(6, choices)
    assert (sender.keys(6, 40, message)[choices, np.arange(40)] == mine).all()
    for party in (receiver, sender):
        with pytest.raises(SilodpError, match="used past 6"):
            party.unpack(party.pack(), 6)
        with pytest.raises(SilodpError, match="damaged"):
            party.unpack(party.pack()[:-1], 9)


def cheating(receiver: TransferReceiver, counter: int, count: int, columns: list[int]) -> bytes:
    """A message that chooses the opposite in these columns and proves the rest as an honest receiver would."""
    size = oblivious_transfer._stream_size(count)
    chosen = bits(8 * size)
    zeros, ones = (oblivious_transfer._columns(seeds, counter, size) for seeds in receiver.seeds)
    difference = zeros ^ ones ^ np.packbits(chosen)
    difference[columns] ^= 255
    challenge = oblivious_transfer._challenge(receiver.domain, counter, count, difference.tobytes())
    folded = oblivious_transfer._fold(np.vstack([chosen, np.unpackbits(zeros, axis=1)]), challenge)
    return counter.to_bytes(8, "big") + difference.tobytes() + np.packbits(folded, axis=1).tobytes()


def test_a_cheating_receiver_is_caught_and_the_base_transfers_end() -> None:
    receiver, sender = pair()
    sender.keys(
        0, 16, cheating(receiver, 0, 16, [])
    )  # the honest case, so that the next refusal is for the columns
    with pytest.raises(SilodpError, match="not 16 transfers"):
        sender.keys(1, 16, b"cut")
    assert not sender.has_ended
    with pytest.raises(SilodpError, match="columns disagree"):
        sender.keys(1, 16, cheating(receiver, 1, 16, list(range(64))))
    assert sender.has_ended
    with pytest.raises(SilodpError, match="has ended"):
        sender.keys(2, 16, receiver.choose(2, bits(16))[0])
    with pytest.raises(SilodpError, match="used past 2"):
        TransferSender.unpack(sender.pack(), 2)


def test_passing_with_one_false_column_is_guessing_one_bit() -> None:
    # The stated limit: each false column is accepted where the sender's bit is 0 (or 1, if the cheat guesses so).
    accepted = []
    for column in range(24):
        receiver, sender = pair()
        try:
            sender.keys(0, 16, cheating(receiver, 0, 16, [column]))
            accepted.append(column)
        except SilodpError:
            assert sender.delta[column] == 1
    assert not sender.delta[accepted].any()
    assert 0 < len(accepted) < 24


def test_messages_are_independent_of_the_choices() -> None:
    # Over fresh seeds each bit of a message is fair, whether all choices are 0 or 1; the choices' fold comes first.
    runs, count = 120, 24
    for choice in (0, 1):
        messages = []
        for _ in range(runs):
            seeds = np.frombuffer(secrets.token_bytes(2 * SECURITY * 32), np.uint8).reshape(2, SECURITY, 32)
            receiver = TransferReceiver(SESSION, seeds)
            messages.append(receiver.choose(0, np.full(count, choice))[0][8:])
        ones = np.unpackbits(np.frombuffer(b"".join(messages), np.uint8).reshape(runs, -1), axis=1).sum(
            axis=0
        )
        spread = (ones - runs / 2) / np.sqrt(runs / 4)
        assert np.abs(spread).max() < 7
        fold = 8 * SECURITY * oblivious_transfer._stream_size(count)
        assert np.abs(spread[fold : fold + 160]).max() < 6


def test_columns_of_two_counters_share_no_stream() -> None:
    # With one stream for both, every column of the sum would be the sum of the choices.
    receiver, _ = pair()
    first, second = (receiver.choose(counter, bits(64))[0] for counter in (0, 1))
    size = oblivious_transfer._stream_size(64)
    both = [
        np.frombuffer(m[8 : 8 + SECURITY * size], np.uint8).reshape(SECURITY, size) for m in (first, second)
    ]
    assert len({column.tobytes() for column in both[0] ^ both[1]}) == SECURITY


def test_secrets_are_not_printed_and_bad_choices_are_refused() -> None:
    receiver, sender = pair()
    for party in (receiver, sender):
        assert "seeds" not in repr(party)
        assert "delta" not in repr(party)
    with pytest.raises(SilodpError, match="neither 0 nor 1"):
        receiver.choose(0, np.array([0, 2]))
    with pytest.raises(SilodpError, match="0 transfers"):
        receiver.choose(1, np.zeros(0, int))
