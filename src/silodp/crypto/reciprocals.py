"""Additive shares of ⌊2ᵏ/N[u]⌋ between server and silos, of all or of sampled users (docs/protocols.md, sections 3, 5).

N[u] counts user u's records over all silos. The server comes to hold a_u, the silos c_u, uniform modulo 2ᵀ each, with
a_u + c_u = v_u = ⌊2ᵏ/N[u]⌋, and 0 where N[u] is 0 or beyond the cap. All that the silos hold follows from the run
secret R, which every silo knows and the server does not. Rounds number the draws: a session makes one draw per round,
rounds only grow, and the transfer counter of a round is the round + 1, so no mask is ever used twice.

Before a request or an answer leaves, its party stores its transfer counter; so no restart repeats a draw. Limits
(docs/protocols.md, section 6): a malicious server can choose other entries, which shows it none of them but sets wrong
weights; a malicious silo 0 can offer wrong tables; one silo that colludes with the server gives it every N[u] and β_u.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from silodp.crypto import lookup, sampling
from silodp.crypto.lookup import Lookup
from silodp.crypto.oblivious_transfer import TransferReceiver, TransferSender
from silodp.crypto.sampling import SamplingRatio, transfer_counter
from silodp.crypto.streams import KEY_BYTES, Integers, Words, derive_key, draw_words
from silodp.errors import require

# Part of every hash of these transfers, so that those of the other direction share nothing with them.
SERVER_CHOOSES = "server chooses among silo 0's entries"  # purpose of the base transfers
_SET_UP = 0  # the transfer counter before the first round


def compute_reciprocals(weight_bits: int, modulus: int, cap: int) -> Words:
    """Return ⌊2ᵏ/N⌋ for 1 ≤ N ≤ cap and 0 for every other N < M.

    Args:
        weight_bits: k < 64.
        modulus: M.
        cap: the largest count, below M.

    Returns:
        shape (M,).
    """
    require(
        1 <= cap < modulus and 0 <= weight_bits < 64,
        f"Shares of reciprocals: {weight_bits} bits of weight, counts to {cap} modulo {modulus}; set k < 64 and "
        "1 ≤ cap < M.",
        code="argument.value",
    )
    # A count beyond the cap cannot be honest; its weight 0 leaves the user out.
    table = np.zeros(modulus, np.uint64)
    table[1 : cap + 1] = np.uint64(1 << weight_bits) // np.arange(1, cap + 1, dtype=np.uint64)
    return table


@dataclass(frozen=True)
class ReciprocalParameters:
    """Public constants of a session.

    Attributes:
        session: The session's id, 32 bytes.
        users: U, the number of users.
        cap: The largest count N[u], silos · n_max; below 2²⁴.
        weight_bits: k; weights are multiples of 2⁻ᵏ.
        word_bits: T > k, the number of bits of a share; at most 64.
    """

    session: bytes
    users: int
    cap: int
    weight_bits: int
    word_bits: int

    def __post_init__(self) -> None:
        require(
            len(self.session) == 32,
            f"Shares of reciprocals: a session id of {len(self.session)} bytes; give the 32 bytes of the session.",
            code="argument.value",
        )
        require(
            self.users >= 1 and 1 <= self.cap < 1 << 24,
            f"Shares of reciprocals: {self.users} users with a cap of {self.cap}; set at least one user and a cap "
            "below 2²⁴.",
            code="argument.value",
        )
        require(
            0 <= self.weight_bits < self.word_bits <= 64,
            f"Shares of reciprocals: {self.weight_bits} bits of weight in words of {self.word_bits}; set k < T ≤ 64.",
            code="argument.value",
        )

    @property
    def modulus(self) -> int:
        """M, the smallest power of two above the cap: the modulus of the masked counts, and the size of the tables."""
        return 1 << self.cap.bit_length()

    def reduce(self, values: Words) -> Words:
        """Return the values modulo 2ᵀ."""
        # Words wrap modulo 2⁶⁴, which 2ᵀ divides: sums and products may be reduced at the end alone.
        return values & np.uint64((1 << self.word_bits) - 1)

    def validate(self, values: NDArray[np.integer], bound: int, what: str) -> Words:
        """Return the values if there is one per user in [0, bound); `what` they are, for the error."""
        require(
            values.shape == (self.users,) and values.min() >= 0 and int(values.max()) < bound,
            f"Shares of reciprocals: the {what} are not {self.users} numbers from 0 below {bound}; correct them.",
            code="argument.value",
        )
        return values.astype(np.uint64)


class SiloShares:
    """The shares that every silo derives from R: shape (U,). Every stream has a key for its session, use and round.

    Args:
        parameters: the public constants of the session.
        secret: R, 32 bytes.
    """

    def __init__(self, parameters: ReciprocalParameters, secret: bytes) -> None:
        self.parameters = parameters
        require(
            len(secret) == KEY_BYTES,
            f"Shares of reciprocals: a run secret of {len(secret)} bytes; give 32 bytes that the silos share.",
            code="argument.value",
        )
        self._secret = secret

    def count_masks(self) -> Words:
        """Return ρ_u, which one silo adds to its counts: exactly uniform modulo M, which is a power of two."""
        # M divides 2⁶⁴, so no residue is more likely than another one.
        return self._words("count masks") % np.uint64(self.parameters.modulus)

    def shares(self) -> Words:
        """Return c_u, the silos' shares of v_u."""
        return self.parameters.reduce(self._words("shares"))

    def masks(self, round: int, use: str) -> Words:
        """Return x_u of a round: the silos' shares of β_u·v_u after `FirstSilo.sample`."""
        return self.parameters.reduce(self._words("masks", transfer_counter(round), use))

    def cells(self, round: int, ratio: SamplingRatio) -> Integers:
        """Return κ_u of a round."""
        return sampling.derive_silo_cells(
            self._secret, self.parameters.session, self.parameters.users, ratio, round
        )

    def await_choices(self, round: int, use: str, part: Lookup) -> PendingLookup:
        """Return what silo 0 awaits of its choices: c'_u. No other silo can derive it; silo 0 passes it on, sealed."""
        return PendingLookup(self.parameters, part, self.masks(round, use))

    def _words(self, *purpose: str | int) -> Words:
        key = derive_key(self._secret, "reciprocals", self.parameters.session.hex(), *purpose)
        return draw_words(key, self.parameters.users, np.uint64).astype(np.uint64)


@dataclass(frozen=True)
class PendingLookup:
    """Shares that wait for the other party's answer to `message`.

    Attributes:
        parameters: The public constants of the session.
        part: The lookup that was asked.
        own: Words (U,) to which the entries of the answer are added.
    """

    parameters: ReciprocalParameters
    part: Lookup
    own: Words = field(repr=False)

    @property
    def message(self) -> bytes:
        """The request that goes to the other party."""
        return self.part.message

    def finish(self, answer: bytes) -> Words:
        """Return this party's shares modulo 2ᵀ, shape (U,), from the other party's answer."""
        return self.parameters.reduce(self.own + self.part.open(answer))


class FirstSilo:
    """The silo that offers the tables (docs/protocols.md, section 3)."""

    def __init__(self, silo: SiloShares, sender: TransferSender) -> None:
        self.parameters, self.silo, self.sender = silo.parameters, silo, sender

    def set_up(self, request: bytes) -> bytes:
        """Offer x ↦ ⌊2ᵏ/(x − ρ_u)⌋ − c_u, once in a session: a second entry of one user would give away N[u].

        Args:
            request: the server's, `Lookup.message`.

        Returns:
            the answer to it.
        """
        entries, size = np.arange(self.parameters.modulus, dtype=np.int64), self.parameters.modulus
        # The server asks at N[u] + ρ_u modulo M, so the entry x of the table belongs to the count x − ρ_u.
        counts = (entries - self.silo.count_masks().astype(np.int64)[:, None]) % size
        table = compute_reciprocals(self.parameters.weight_bits, size, self.parameters.cap)
        # c_u is taken off every entry, so that whichever the server opens is uniform to it.
        return self._offer(_SET_UP, request, table[counts] - self.silo.shares()[:, None])

    def sample(self, round: int, use: str, request: bytes) -> bytes:
        """Offer β ↦ β·c_u − x_u; the silos' shares of β_u·v_u are `SiloShares.masks`."""
        both = np.arange(2, dtype=np.uint64)
        return self._offer(transfer_counter(round), request, self._table(round, use, both))

    def sample_unknown(self, round: int, use: str, ratio: SamplingRatio, request: bytes) -> bytes:
        """Offer i ↦ β(i, κ_u)·c_u − x_u; the silos' shares of β_u·v_u come from silo 0's own choices."""
        sampled = ratio.select(np.arange(ratio.denominator), self.silo.cells(round, ratio)[:, None])
        return self._offer(transfer_counter(round), request, self._table(round, use, sampled))

    def _table(self, round: int, use: str, sampled: Words) -> Words:
        # x_u is of this round alone: two rounds under one mask would show whether β_u differs.
        return sampled * self.silo.shares()[:, None] - self.silo.masks(round, use)[:, None]

    def _offer(self, counter: int, request: bytes, tables: Words) -> bytes:
        return lookup.answer(self.sender, counter, request, self.parameters.reduce(tables))


class ReciprocalServer:
    """The server, which chooses in silo 0's tables (docs/protocols.md, section 3)."""

    def __init__(self, parameters: ReciprocalParameters, receiver: TransferReceiver) -> None:
        self.parameters, self.receiver = parameters, receiver

    def set_up(self, masked_counts: NDArray[np.integer]) -> PendingLookup:
        """Ask at m_u = N[u] + ρ_u mod M, (U,); what is awaited is a_u."""
        counts = self.parameters.validate(masked_counts, self.parameters.modulus, "masked counts")
        zeros = np.zeros(self.parameters.users, np.uint64)
        return self._ask(_SET_UP, counts, self.parameters.modulus, zeros)

    def sample(self, round: int, shares: Words, sampled: NDArray[np.integer]) -> PendingLookup:
        """Ask at β_u, which is 0 or 1; what is awaited is a'_u, a share of β_u·v_u.

        Args:
            round: counted from 0.
            shares: a_u (U,).
            sampled: β_u (U,).
        """
        # β_u·v_u = β_u·a_u + β_u·c_u: the first term is the server's, the second it looks up under the mask x_u.
        chosen = self.parameters.validate(sampled, 2, "sampled bits")
        return self._ask(transfer_counter(round), chosen, 2, chosen * shares)

    def sample_unknown(self, round: int, ratio: SamplingRatio) -> PendingLookup:
        """Ask at a uniform i_u; what is awaited is a'_u, masked by a fresh y_u that no one else knows."""
        # y_u is this round's alone: with two answers under one mask, silo 0 would see how two samples differ.
        cells = sampling.draw_server_cells(self.parameters.users, ratio)
        masks = draw_words(secrets.token_bytes(KEY_BYTES), self.parameters.users, np.uint64)
        return self._ask(transfer_counter(round), cells, ratio.denominator, masks)

    def _ask(self, counter: int, indices: NDArray[np.integer], size: int, own: Words) -> PendingLookup:
        return PendingLookup(self.parameters, Lookup.ask(self.receiver, counter, indices, size), own)


def answer_unknown(
    sender: TransferSender, awaited: PendingLookup, ratio: SamplingRatio, shares: Words, request: bytes
) -> bytes:
    """Return the server's offer to silo 0's choices: κ ↦ β(i_u, κ)·a_u − y_u.

    Args:
        sender: of the base transfers in which silo 0 chooses.
        awaited: of `Server.sample_unknown`, for the same round.
        ratio: k/P.
        shares: a_u (U,).
        request: silo 0's, for the entries κ_u of `sampling.derive_silo_cells`.
    """
    sampled = ratio.select(awaited.part.indices[:, None], np.arange(ratio.denominator))
    tables = awaited.parameters.reduce(sampled * shares[:, None] - awaited.own[:, None])
    return lookup.answer(sender, awaited.part.counter, request, tables)
