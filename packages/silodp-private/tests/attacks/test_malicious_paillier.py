"""An attack on `paillier` by a silo that does not follow the protocol; no check of the server prevents it.

Attacked are the record counts of other silos and the sample. The server decrypts whatever silos multiply together, and
hands the result on as the next model. Its key is that of the whole session, so a silo can have it decrypt the
ciphertexts of earlier rounds, too. The test measures this known limit (docs/protocols.md, section 6).
"""

from __future__ import annotations

import numpy as np
import pytest
from gmpy2 import mpz, powmod

from silodp_private.paillier.weighting import PaillierServer, PaillierSilo
from support.oracles import small_federation
from support.private import PAILLIER, SAMPLED, Parties, counts_of

AMPLIFIED, REPEATED = 200, 5
"""Clips by which a sampled person of weight 1 moves a coordinate of the next model; rounds that are averaged."""


def test_a_malicious_silo_reads_counts_and_an_earlier_sample_from_the_next_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parties = Parties(PAILLIER, SAMPLED)
    p, grid = PAILLIER.parameters(parties.spec), PAILLIER.grid(parties.spec)
    samples, requests, places = [], [], list(range(p.dimension))
    honest, drawn = PaillierSilo.answer, PaillierServer.encrypt_inverses

    def note_sample(self: PaillierServer, sampled: np.ndarray) -> bytes:
        samples.append(sampled)
        return drawn(self, sampled)

    def lie(self: PaillierSilo, inverses: bytes, *more: object) -> bytes:
        answer = honest(self, inverses, *more)
        if self._index != 2:
            return answer
        requests.append(inverses)
        public = self.public
        earlier = public.ciphertexts_from_bytes(requests[0], p.users, "the server")
        (sum_,) = public.ciphertexts_from_bytes(answer, p.ciphertexts, "this silo")
        for place, user in enumerate(places):
            factor = mpz(AMPLIFIED * p.row_bound) << (place * p.slot_bits)
            exponent = p.scale * self._blinding[user] * factor % public.n
            sum_ = sum_ * powmod(earlier[user], exponent, public.n_squared) % public.n_squared
        return public.ciphertexts_to_bytes([sum_])

    monkeypatch.setattr(PaillierServer, "encrypt_inverses", note_sample)
    monkeypatch.setattr(PaillierSilo, "answer", lie)
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
