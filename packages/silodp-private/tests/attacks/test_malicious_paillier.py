"""An attack on `paillier` by a silo that does not follow the protocol; the limit of a sum makes it slower, no more.

Attacked are the record counts of other silos and the sample. The server decrypts whatever silos multiply together, and
hands the result on as the next model. Its key is that of the whole session, so a silo can have it decrypt the
ciphertexts of earlier rounds, too. The test measures this known limit (docs/protocols.md, section 6).
"""

from __future__ import annotations

import numpy as np
import pytest
from gmpy2 import mpz, powmod

from silodp.aggregators import limits
from silodp_private.paillier.weighting import PaillierServer, PaillierSilo
from support.oracles import small_federation
from support.private import PAILLIER, RECORDS, SAMPLED, Parties, counts_of
from support.refusals import refused

AMPLIFIED, REPEATED = 200, 5
"""Clips by which a sampled person of weight 1 moves a coordinate of the next model; rounds that are averaged."""


def amplify(patch: pytest.MonkeyPatch, parties: Parties, places: list[int], amplified: int) -> None:
    """Let a silo multiply the weights of persons, as the server encrypted them in its first round, into the sum."""
    p, requests, honest = PAILLIER.parameters(parties.spec), [], PaillierSilo.answer

    def lie(self: PaillierSilo, inverses: bytes, *more: object) -> bytes:
        answer = honest(self, inverses, *more)
        if self._index != 2:
            return answer
        requests.append(inverses)
        public = self.public
        earlier = public.ciphertexts_from_bytes(requests[0], p.users, "the server")
        (sum_,) = public.ciphertexts_from_bytes(answer, p.ciphertexts, "this silo")
        for place, user in enumerate(places):
            factor = mpz(amplified * p.row_bound) << (place * p.slot_bits)
            exponent = p.scale * self._blinding[user] * factor % public.n
            sum_ = sum_ * powmod(earlier[user], exponent, public.n_squared) % public.n_squared
        return public.ciphertexts_to_bytes([sum_])

    patch.setattr(PaillierSilo, "answer", lie)


def test_a_malicious_silo_reads_counts_and_an_earlier_sample_from_the_next_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the limit of a sum; within it each of so many clips is a smaller number, and read with as much noise."""
    parties = Parties(PAILLIER, SAMPLED)
    p, grid = PAILLIER.parameters(parties.spec), PAILLIER.grid(parties.spec)
    samples, places = [], list(range(p.dimension))
    drawn = PaillierServer.encrypt_inverses

    def note_sample(self: PaillierServer, sampled: np.ndarray) -> bytes:
        samples.append(sampled)
        return drawn(self, sampled)

    monkeypatch.setattr(PaillierServer, "encrypt_inverses", note_sample)
    monkeypatch.setattr(limits, "check_sum", lambda *sum_: None)
    amplify(monkeypatch, parties, places, AMPLIFIED)
    read = np.zeros((REPEATED, p.users))
    for number in range(REPEATED):
        for first in (0, 5, 7):  # five persons a round, and all of the sample of the very first one
            places[:] = range(first, first + p.dimension)
            total = parties.run_round(len(samples)).numpy()
            read[number, places] = total / (AMPLIFIED * p.row_bound * grid.step)
    counts = counts_of(small_federation(silos=3), PAILLIER.count_cap).sum(axis=0)
    weights = samples[0] / (counts + 1)
    error = 5 / AMPLIFIED / REPEATED**0.5  # the noise is 5 clips
    np.testing.assert_allclose(read.mean(axis=0), weights, atol=7 * error)
    np.testing.assert_array_equal(read.mean(axis=0) > 0.055, samples[0])
    assert len(set(counts)) > 1  # persons of several counts; who of them is sampled is a matter of chance
    assert any((sample != samples[0]).any() for sample in samples)


def test_so_large_a_sum_is_no_honest_one_and_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    parties = Parties(PAILLIER, RECORDS)
    amplify(monkeypatch, parties, list(range(5)), 2 * AMPLIFIED)
    with refused("run.long_sum", "crypto.decryption"):
        parties.run_round(0)
