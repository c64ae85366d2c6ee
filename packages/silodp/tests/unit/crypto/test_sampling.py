"""The coins of persons: the same in all silos, fair, independent, and unknown without the secret."""

from __future__ import annotations

import hashlib
import hmac
import json

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from scipy import stats

from silodp.crypto.sampling import PersonCoins

SECRET = bytes(range(32))


def expand(key: bytes, *purpose: str | int) -> bytes:
    """HKDF-Expand of one block, written out."""
    label = json.dumps(["silodp", *purpose]).encode()
    return hmac.digest(key, label + b"\x01", hashlib.sha256)


def coin(secret: bytes, run: str, profile: str, identifier: str, number: int, purpose: str = "coin") -> int:
    """The coin of one person as docs/protocols.md defines it, in [0, 2⁶⁴)."""
    pseudonym = hmac.digest(expand(secret, "person", run, profile), identifier.encode(), hashlib.sha256)
    block = Cipher(AES(expand(secret, purpose, run, number)), ECB()).encryptor().update(pseudonym[:16])
    return int.from_bytes(block[:8], "little")


def test_coins_are_those_of_the_definition():
    known = [f"{number:05}" for number in range(200)]
    coins = PersonCoins(SECRET, "run", "profile", known)
    for round_, rate in ((0, 0.1), (7, 0.5), (10**6, 1 / 3)):
        limit = int(rate * 2**64)
        expected = [coin(SECRET, "run", "profile", one, round_) < limit for one in known]
        assert coins.toss(round_, rate).tolist() == expected


def test_words_of_another_purpose_are_those_of_the_definition():
    known = [f"{number:05}" for number in range(200)]
    coins = PersonCoins(SECRET, "run", "profile", known)
    words = [coin(SECRET, "run", "profile", one, 7, "allocation") for one in known]
    assert coins.draw("allocation", 7).tolist() == words


def test_a_known_answer_stays():
    # A silo of another version must find the same coins.
    coins = PersonCoins(SECRET, "run", "", [str(number) for number in range(64)])
    found = np.packbits(coins.toss(3, 0.5)).tobytes().hex()
    assert found == "fde3718b3c613d9e"


def test_silos_agree_on_the_persons_they_share():
    first = PersonCoins(SECRET, "run", "p", ["a", "b", "c"])
    second = PersonCoins(SECRET, "run", "p", ["x", "c", "y", "a", "z"])
    for round_ in range(64):
        one, other = first.toss(round_, 0.5), second.toss(round_, 0.5)
        assert (one[0], one[2]) == (other[3], other[1])


@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.5, 0.99])
def test_the_rate_is_kept_and_rounds_are_independent(rate):
    persons = 40_000
    coins = PersonCoins(SECRET, "run", "p", map(str, range(persons)))
    first, second = coins.toss(0, rate), coins.toss(1, rate)
    assert stats.binomtest(int(first.sum()), persons, rate).pvalue > 1e-6
    assert stats.binomtest(int((first & second).sum()), persons, rate**2).pvalue > 1e-6


@pytest.mark.parametrize(
    "other",
    [
        PersonCoins(bytes(32), "run", "p", map(str, range(20_000))),
        PersonCoins(SECRET, "another", "p", map(str, range(20_000))),
        PersonCoins(SECRET, "run", "another", map(str, range(20_000))),
        PersonCoins(SECRET, "run", "p", (f"{number} " for number in range(20_000))),
    ],
    ids=["secret", "run", "profile", "identifier"],
)
def test_another_secret_run_profile_or_person_has_independent_coins(other):
    coins = PersonCoins(SECRET, "run", "p", map(str, range(20_000)))
    same = int((coins.toss(0, 0.5) == other.toss(0, 0.5)).sum())
    assert stats.binomtest(same, 20_000, 0.5).pvalue > 1e-6


def test_everyone_is_in_at_rate_1_and_nobody_at_rate_0():
    coins = PersonCoins(SECRET, "run", "p", map(str, range(1000)))
    assert coins.toss(0, 1.0).all()
    assert not coins.toss(0, 0.0).any()
    assert not coins.toss(0, 2.0**-70).any()  # rounded down, never up


def test_rates_may_differ_and_samples_are_nested():
    coins = PersonCoins(SECRET, "run", "p", map(str, range(1000)))
    few, many = coins.toss(0, 0.2), coins.toss(0, 0.6)
    assert not (few & ~many).any()
    rates = np.where(np.arange(1000) % 2 == 0, 0.2, 1.0)
    mixed = coins.toss(0, rates)
    assert mixed[1::2].all()
    assert (mixed[::2] == few[::2]).all()


def test_a_silo_without_persons_has_no_coins():
    assert PersonCoins(SECRET, "run", "p", []).toss(0, 0.5).shape == (0,)


def test_nothing_of_the_secret_or_the_persons_is_printed():
    text = repr(PersonCoins(SECRET, "run", "p", ["a secret person"]))
    assert "secret" not in text
    assert SECRET.hex() not in text
