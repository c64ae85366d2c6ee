"""Private weighting by Paillier encryption: ULDP-FL's Protocol 1, repaired (docs/protocols.md, section 4).

The server learns C·[Σ_s Σ_u n[s,u]/N[u]·Δ[s,u] + Σ_s z_s] + Σ_s e_s in the integers, C = lcm(1..N_max), and nothing
else; silos learn nothing of each other's counts, nor who was sampled. z_s is the silo's integer noise and e_s uniform
of width C, without which the sum mod C would be free of noise. With `dummy`, N[u] is one more than the true count.

    setup    server ─ n ─► silos;  silo ─ r_u·n[s,u] + mask ─► server, which inverts r_u·N[u] mod n
    round    server ─ Enc((r_u·N[u])⁻¹), or Enc(0) where u is not sampled ─► silos; where nobody is to know who is
             sampled, silo 0 chooses among such ciphertexts instead, and passes what it chose to the others;
             silo ─ ∏_u (…)^(C·n[s,u]·r_u·Δ[s,u]) · Enc(C·z_s + e_s + mask) ─► server, which multiplies and decrypts

The masks come from the caller's secure aggregation: they add to 0 mod n over the silos that answer.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence

import numpy as np
from gmpy2 import invert, mpz, powmod
from numpy.typing import NDArray

from silodp.crypto.sampling import SamplingRatio
from silodp.crypto.streams import Bytes, Integers, derive_key
from silodp.errors import require
from silodp.settings import check_shape
from silodp_private.paillier import scheme
from silodp_private.paillier.parameters import PaillierParameters
from silodp_private.paillier.scheme import PrivateKey, PublicKey

Rows = Iterable[tuple[Integers, Integers]]
"""Chunks of owners (r,) and their rows (r, d), in grid units."""


class PaillierServer:
    """The server's side: it holds the private key of one session and (r_u·N[u])⁻¹, never N[u].

    Args:
        parameters: public constants.
        key: the private key; None draws one.
        inverses: (r_u·N[u])⁻¹ mod n of every user; None before the counts were received.
    """

    def __init__(
        self, parameters: PaillierParameters, key: PrivateKey | None = None, inverses: list[int] | None = None
    ):
        self.parameters, self._inverses = parameters, inverses
        self._key = PrivateKey.generate(parameters.key_bits) if key is None else key

    def pack(self) -> bytes:
        """Return key and inverses, secret: for the server's durable store."""
        numbers = [int(self._key.p), int(self._key.q), *(self._inverses or [])]
        return scheme.residues_to_bytes(numbers, self.parameters.key_bits // 8)

    @classmethod
    def unpack(cls, parameters: PaillierParameters, stored: bytes) -> PaillierServer:
        """Return the server that was stored."""
        width = parameters.key_bits // 8
        p, q, *inverses = (int.from_bytes(stored[i : i + width], "big") for i in range(0, len(stored), width))
        return cls(parameters, PrivateKey(mpz(p), mpz(q)), inverses or None)

    def public_key(self) -> bytes:
        """Return the modulus n, for every silo."""
        return self._key.public.to_bytes()

    def key_proof(self, context: bytes) -> bytes:
        """Return the proof that n is a Paillier modulus, for every silo; see `scheme.prove_modulus`."""
        return scheme.prove_modulus(self._key, context)

    def receive_counts(self, messages: Sequence[bytes]) -> None:
        """Add up the masked counts, and keep the inverses of r_u·N[u] mod n.

        Without the dummy, users of no record show as 0 here and get no weight.

        Source: Kato et al. (PVLDB 2024), Protocol 1, steps 1 (e) and 1 (f).

        Args:
            messages: masked r_u·n[s,u] of every silo, as `PaillierSilo.blind_counts` returned them.

        Raises:
            SilodpError: counts were received before (other counts or another roster are a new session), a silo is
                missing, or a message is malformed.
        """
        n, users = self._key.public.n, self.parameters.users
        require(
            self._inverses is None,
            "the counts of this session were received before: open a session with new secrets",
            code="crypto.reused",
        )
        require(
            len(messages) == self.parameters.silos,
            f"{len(messages)} of {self.parameters.silos} silos sent counts: ask those missing",
            code="run.too_few_silos",
        )
        received = [
            scheme.residues_from_bytes(m, users, n, f"silo {s} (counts)") for s, m in enumerate(messages)
        ]
        # The masks cancel over all silos, so that r_u·N[u] is left; r_u is unknown to the server.
        totals = [sum(of_user) % n for of_user in zip(*received, strict=True)]
        # A total of 0 has no inverse: the user has no records, and an inverse of 0 gives them the weight 0.
        self._inverses = [int(invert(total, n)) if total else 0 for total in totals]

    def encrypt_inverses(self, sampled: NDArray[np.bool_]) -> bytes:
        """Return a round's request, the same for all silos: fresh ciphertexts of (r_u·N[u])⁻¹.

        Source: Kato et al. (PVLDB 2024), Protocol 1, step 2 (a).

        Args:
            sampled: shape (U,); the ciphertexts of other users are of zero.

        Raises:
            SilodpError: no counts were received, or the sample has another shape.
        """
        require(
            self._inverses is not None,
            "no counts were received in this session: run its setup before the first round",
            code="session.missing",
        )
        require(
            np.shape(sampled) == (self.parameters.users,),
            f"the sample has shape {np.shape(sampled)}: give one entry for each user",
            code="argument.shape",
            field="sampled",
        )
        inverses = self._inverses or []
        chosen = [inverse if taken else 0 for inverse, taken in zip(inverses, sampled, strict=True)]
        return self._key.public.ciphertexts_to_bytes([self._key.encrypt(m) for m in chosen])

    def encrypt_pairs(self) -> bytes:
        """Return, for a round whose sample nobody knows, a ciphertext of zero and one of the inverse for each user."""
        everyone = np.ones(self.parameters.users, bool)
        return self.encrypt_inverses(~everyone) + self.encrypt_inverses(everyone)

    def tables(self, ratio: SamplingRatio, cells: Integers, pairs: bytes) -> Bytes:
        """Return the tables κ ↦ a ciphertext of (r_u·N[u])⁻¹ where β(i_u, κ), else of zero.

        One pair serves all P entries of a user, because only one of them can be opened: what opens it sees one fresh
        ciphertext, whose plaintext is hidden from all but the server, and the server does not see which it is.

        Source: docs/protocols.md, section 5; the idea is in "Private user-level sub-sampling" of Kato et al.

        Args:
            ratio: k/P.
            cells: i_u (U,), the server's.
            pairs: of `encrypt_pairs`, for this round alone.

        Returns:
            shape (U, P, key_bits / 4), one ciphertext to an entry.
        """
        p = self.parameters
        entries = np.frombuffer(pairs, np.uint8).reshape(2, p.users, -1)
        sampled = ratio.select(cells[:, None], np.arange(ratio.denominator)).astype(np.int64)
        return entries[sampled, np.arange(p.users)[:, None]]

    def compute_scaled_sum(self, answers: Sequence[bytes], seals: Sequence[int] | None = None) -> list[int]:
        """Multiply the answers of one attempt and decrypt once: C·(weighted sum + noise) + uniform.

        Source: Kato et al. (PVLDB 2024), Protocol 1, step 2 (c).

        Args:
            answers: one of each silo of the attempt.
            seals: for every ciphertext the sum mod n of what is left of the masks over all silos; it is taken out.

        Returns:
            d integers.

        Raises:
            SilodpError: too many or no answers, or malformed ones; masks that do not cancel (code crypto.decryption).
        """
        p, public = self.parameters, self._key.public
        require(
            1 <= len(answers) <= p.silos,
            f"{len(answers)} answers of {p.silos} silos: pass one of each silo of the attempt",
            code="argument.shape",
            field="answers",
        )
        # Multiplying ciphertexts adds plaintexts: the sum over the silos is decrypted, once, and no silo's part is.
        products = [mpz(1)] * p.ciphertexts
        for s, answer in enumerate(answers):
            ciphertexts = public.ciphertexts_from_bytes(answer, p.ciphertexts, f"answer {s}")
            products = [x * c % public.n_squared for x, c in zip(products, ciphertexts, strict=True)]
        if seals is not None:
            products = [x * public.plain(-seal) for x, seal in zip(products, seals, strict=True)]
        return p.unpack([self._key.decrypt(product) for product in products])

    def round_sum(self, scaled: Sequence[int]) -> Integers:
        """Return the result in grid units (d,): ⌊x/C + ½⌋, at most (S+1)/2 from the exact sum plus integer noise.

        The uniform parts of S silos add an error of mean 0 (to S/2C) and standard deviation √(S/12) before rounding.
        """
        scale = self.parameters.scale
        return np.array([(2 * x + scale) // (2 * scale) for x in scaled], np.int64)


class PaillierSilo:
    """A silo's side: its counts n[s,u], and r_u from the secret that all silos of the session share.

    Args:
        parameters: public constants.
        index: position of the silo in the roster.
        counts: n[s,u] (U,) in 0..count_cap.
        public_key: n, `key_bits`/8 bytes, big-endian.
        secret: R, 32 bytes that the server never knows.
        session: its id, which changes with roster and counts, and with it every r_u.

    Raises:
        SilodpError: counts or key are not what the parameters say.
    """

    def __init__(
        self,
        parameters: PaillierParameters,
        index: int,
        counts: Integers,
        public_key: bytes,
        secret: bytes,
        session: bytes,
    ):
        cap, values = parameters.count_cap, np.asarray(counts)
        require(
            0 <= index < parameters.silos,
            f"silo {index} is not in a roster of {parameters.silos}: number silos from 0",
            code="argument.value",
            field="index",
        )
        check_shape("counts", values, parameters.users, kind="iu")
        require(
            not ((values < 0).any() or (values > cap).any()),
            f"silo {index} has a user with a count outside 0..{cap}: raise count_cap or drop records",
            code="argument.value",
            field="counts",
        )
        self.parameters, self._index, self._counts = parameters, index, [int(n) for n in values]
        self.public = PublicKey.from_bytes(public_key, parameters.key_bits)
        # Bound to session and key: the same r_u in two exchanges would show ratios of counts.
        blinding = derive_key(secret, "paillier blinding", session.hex(), public_key.hex())
        self._blinding = scheme.draw_residues(blinding, parameters.users, self.public.n)  # r_u
        self._counted = False
        self._used_masks: set[bytes] = set()

    def blind_counts(self, masks: Sequence[int]) -> bytes:
        """Return r_u·n[s,u] + mask mod n for every user, once in a session.

        Source: Kato et al. (PVLDB 2024), Protocol 1, steps 1 (d) and 1 (e).

        Args:
            masks: U numbers in 0..n−1, which add to 0 mod n over all silos.
        """
        require(
            not self._counted,
            "this session's counts were sent before: resend the stored message or open a new session",
            code="crypto.reused",
        )
        masks = self._take_masks(masks, self.parameters.users)
        self._counted = True
        n, dummy = self.public.n, self.parameters.dummy and self._index == 0
        blinded = [
            (r * (c + dummy) + m) % n for r, c, m in zip(self._blinding, self._counts, masks, strict=True)
        ]
        return scheme.residues_to_bytes(blinded, self.parameters.key_bits // 8)

    def answer(
        self,
        inverses: bytes,
        chunks: Rows,
        noise: Integers,
        masks: Sequence[int],
        uniform: Sequence[int] | None = None,
    ) -> bytes:
        """Return the answer to a round's request; a repeated request must get the stored bytes instead.

        Every user costs the same operations, with records or without, sampled or not, with a row or without.

        Source: Kato et al. (PVLDB 2024), Protocol 1, steps 2 (b) and 2 (c), with the repairs of
        docs/protocols.md, section 4.

        Args:
            inverses: the request, U ciphertexts.
            chunks: owners (r,) and rows (r, d) in grid units; every user at most once, ‖row‖₂ ≤ C/g.
            noise: the silo's integer noise (d,), grid units.
            masks: one mod n for each ciphertext of the answer.
            uniform: the uniform part (d,), in ±C/2; None draws it.

        Returns:
            `ciphertexts` ciphertexts.

        Raises:
            SilodpError: an input is not what the parameters allow, or masks were used before.
        """
        p, public = self.parameters, self.public
        self._check_noise(noise)
        requests = public.ciphertexts_from_bytes(inverses, p.users, "the server (inverses)")
        bases = [
            self._weight(*of_user) for of_user in zip(requests, self._blinding, self._counts, strict=True)
        ]
        products = scheme.MultiExponentiation(
            public.n_squared, public.blank(), (p.users, p.dimension), p.row_bound, p.slots, p.slot_bits
        )
        # Who has no row is multiplied by a row of zeros, so that the time shows nobody's absence.
        absent = set(range(p.users))
        for owners, rows in chunks:
            self._check_rows(rows)
            for owner, row in zip(owners.tolist(), rows, strict=True):
                require(
                    owner in absent,
                    f"user {owner} is unknown or has a second row: give one row per user and round",
                    code="method.rows",
                )
                absent.remove(owner)
                products.multiply(bases[owner], row)
        for owner in absent:
            products.multiply(bases[owner], np.zeros(p.dimension, np.int64))
        if uniform is None:
            uniform = [secrets.randbelow(p.scale) - p.scale // 2 for _ in range(p.dimension)]
        # Without the uniform part the sum mod C would be free of noise, and would show N[u] and single rows.
        shares = p.pack([p.scale * z + e for z, e in zip(noise.tolist(), uniform, strict=True)])
        parts = zip(products.residues(), shares, self._take_masks(masks, p.ciphertexts), strict=True)
        return public.ciphertexts_to_bytes(
            [self._refresh(x * public.plain(z + mask)) for x, z, mask in parts]
        )

    def _weight(self, ciphertext: mpz, r: int, count: int) -> mpz:
        """Return Enc(C·n[s,u]/N[u]) from Enc((r_u·N[u])⁻¹)."""
        # A random multiple of n, which changes no plaintext, hides the exponent's length in time, 0 included.
        exponent = self.parameters.scale * count * r % self.public.n
        cover = self.public.n * (secrets.randbits(64) | 1 << 63)
        return powmod(ciphertext, exponent + cover, self.public.n_squared)

    def _refresh(self, ciphertext: mpz) -> mpz:
        """Return the same plaintext under fresh randomness; from the old, the server could test guesses at rows."""
        return ciphertext * self.public.blank() % self.public.n_squared

    def _take_masks(self, masks: Sequence[int], count: int) -> list[int]:
        """Return masks in range, once: two messages under one mask give the server their difference."""
        n = self.public.n
        require(
            len(masks) == count and all(0 <= m < n for m in masks),
            f"{len(masks)} masks for {count} numbers, or one not in 0..n−1: draw one mod n for each",
            code="argument.value",
            field="masks",
        )
        digest = hashlib.sha256(scheme.residues_to_bytes(masks, self.parameters.key_bits // 8)).digest()
        require(
            digest not in self._used_masks,
            "these masks were used before: draw them anew for every message",
            code="crypto.reused",
        )
        self._used_masks.add(digest)
        return [int(m) for m in masks]

    def _check_noise(self, noise: Integers) -> None:
        p = self.parameters
        require(
            noise.shape == (p.dimension,) and noise.dtype == np.int64,
            f"the noise is {noise.dtype} of shape {noise.shape}: give {p.dimension} int64",
            code="argument.shape",
            field="noise",
        )
        require(
            max(int(noise.max()), -int(noise.min())) <= p.noise_bound,
            f"the noise leaves ±{p.noise_bound}: raise noise_std ({p.noise_std:g}) to that of this share",
            code="argument.value",
            field="noise_std",
        )

    def _check_rows(self, rows: Integers) -> None:
        p = self.parameters
        require(
            rows.ndim == 2 and rows.shape[1] == p.dimension and rows.dtype == np.int64,
            f"rows are {rows.dtype} of shape {rows.shape}: give int64 of shape (r, {p.dimension})",
            code="method.rows",
        )
        require(  # in Python's integers, which do not overflow
            all(sum(x * x for x in row.tolist()) <= p.row_bound**2 for row in rows),
            f"a row's norm is above row_bound {p.row_bound}: clip, and truncate toward zero on the grid",
            code="method.rows",
        )
