"""The paper's Protocol 1 as printed, on small keys, for attacks to succeed on; and all our parties in one place."""

from __future__ import annotations

import math
import secrets

import numpy as np
from gmpy2 import invert, mpz, powmod

from silodp_private.paillier.parameters import PaillierParameters
from silodp_private.paillier.scheme import PrivateKey
from silodp_private.paillier.weighting import PaillierServer, PaillierSilo

BITS = 512


def cancelling_masks(n: int, silos: int, count: int) -> list[list[int]]:
    """Uniform mod n, adding to 0 over the silos: what secure aggregation gives each of them."""
    free = [[secrets.randbelow(n) for _ in range(count)] for _ in range(silos - 1)]
    return [*free, [-sum(column) % n for column in zip(*free, strict=True)]]


class PaperProtocol:
    """Protocol 1 of the ULDP-FL paper: one seed for all r_u, no cap, noise times C, ciphertexts not re-randomized."""

    def __init__(self, counts: np.ndarray, largest_count: int):
        self.counts, self.scale = counts, math.lcm(*range(1, largest_count + 1))
        self.silos, self.users = counts.shape
        self.key = PrivateKey.generate(BITS)
        self.n = int(self.key.public.n)
        self.r = [secrets.randbelow(self.n - 1) + 1 for _ in range(self.users)]
        self.exponent_bits: list[int] = []  # of the exponentiations a silo makes: what its running time shows

    def blinded_totals(self, roster) -> list[int]:
        """What the server adds up in setup, step (e), when these silos take part: r_u·N[u] mod n."""
        totals = [0] * self.users
        for s, masks in zip(roster, cancelling_masks(self.n, len(roster), self.users), strict=True):
            blinded = [(self.r[u] * int(self.counts[s, u]) + masks[u]) % self.n for u in range(self.users)]
            totals = [(a + b) % self.n for a, b in zip(totals, blinded, strict=True)]
        return totals

    def encrypt_inverses(self) -> list[mpz]:
        """Step 2 (a)."""
        return [self.key.encrypt(invert(total, self.n)) for total in self.blinded_totals(range(self.silos))]

    def answer(self, silo: int, inverses, rows: np.ndarray, noise: np.ndarray, masks) -> list[mpz]:
        """Step 2 (b) and (c) for integer rows (U, d) and noise (d,)."""
        public, out = self.key.public, []
        for j, mask in enumerate(masks):
            ciphertext = public.plain(self.scale * int(noise[j]) + mask)
            for u, inverse in enumerate(inverses):
                weight = int(self.counts[silo, u]) * self.r[u] * self.scale % self.n
                weighted = powmod(inverse, weight, public.n_squared)
                encoded = int(rows[u, j]) % self.n
                self.exponent_bits.append(encoded.bit_length())
                ciphertext = ciphertext * powmod(weighted, encoded, public.n_squared) % public.n_squared
            out.append(ciphertext)
        return out

    def compute_scaled_sum(self, answers) -> list[int]:
        """What the server decrypts, before it divides by C."""
        return [
            self.key.decrypt(math.prod(column) % self.key.public.n_squared)
            for column in zip(*answers, strict=True)
        ]

    def run(self, rows: np.ndarray, noise: np.ndarray) -> list[int]:
        """A round over all silos, rows (S, U, d), noise (S, d)."""
        inverses = self.encrypt_inverses()
        masks = cancelling_masks(self.n, self.silos, rows.shape[2])
        parts = zip(rows, noise, masks, strict=True)
        return self.compute_scaled_sum([self.answer(s, inverses, *part) for s, part in enumerate(parts)])


class Parties:
    """Our server and silos with setup done; small keys unless `key_bits` says otherwise."""

    def __init__(
        self, counts: np.ndarray, session: bytes = b"session", secret: bytes | None = None, **constants
    ):
        silos, users = counts.shape
        constants = {
            "count_cap": int(counts.max()),
            "row_bound": 1 << 16,
            "noise_std": 5e5,
            "key_bits": BITS,
        } | constants
        self.parameters = PaillierParameters(silos, users, insecure_for_tests=True, **constants)
        self.server = PaillierServer(self.parameters)
        key = self.server.public_key()
        self.n = int.from_bytes(key, "big")
        secret = secret or secrets.token_bytes(32)
        self.silos = [PaillierSilo(self.parameters, s, counts[s], key, secret, session) for s in range(silos)]
        self.blinded = [
            silo.blind_counts(masks)
            for silo, masks in zip(self.silos, cancelling_masks(self.n, silos, users), strict=True)
        ]
        self.server.receive_counts(self.blinded)

    def masks(self, roster: int | None = None) -> list[list[int]]:
        """Fresh masks of one attempt."""
        return cancelling_masks(self.n, roster or len(self.silos), self.parameters.ciphertexts)

    def answers(self, rows, noise, uniform=None, sampled=None) -> list[bytes]:
        """A round's answers, rows (S, U, d), noise (S, d)."""
        users = self.parameters.users
        request = self.server.encrypt_inverses(np.ones(users, bool) if sampled is None else sampled)
        uniform = uniform or [None] * len(self.silos)
        return [
            silo.answer(request, [(np.arange(users), rows[s])], noise[s], masks, uniform[s])
            for s, (silo, masks) in enumerate(zip(self.silos, self.masks(), strict=True))
        ]

    def run(self, rows, noise, uniform=None, sampled=None) -> list[int]:
        """A round's scaled sum."""
        return self.server.compute_scaled_sum(self.answers(rows, noise, uniform, sampled))


def small_rows(generator: np.random.Generator, shape: tuple[int, ...], bound: int) -> np.ndarray:
    """Integer rows of norm just below `bound` along the last axis, truncated toward zero."""
    rows = generator.normal(size=shape)
    return np.trunc(rows * bound / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.int64)
