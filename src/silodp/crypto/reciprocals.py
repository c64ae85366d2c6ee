"""Shares of floored reciprocals ⌊2ᵏ/N[u]⌋, and of those of the sampled users alone (docs/protocols.md, sections 3, 5).

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
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from silodp.crypto import lookup, private_sampling
from silodp.crypto.lookup import Lookup
from silodp.crypto.oblivious_transfer import TransferReceiver, TransferSender
from silodp.crypto.private_sampling import SamplingRatio, transfer_counter
from silodp.crypto.streams import KEY_BYTES, Words, derive_key, draw_words
from silodp.errors import SilodpError

SERVER_CHOOSES = "server chooses among silo 0's entries"  # purpose of the base transfers
_SET_UP = 0  # the transfer counter before the first round


def choose_modulus(cap: int) -> int:
    """The smallest power of two above the cap on N[u]: the modulus M of the masked counts."""
    return 1 << cap.bit_length()


def reciprocals(weight_bits: int, modulus: int, cap: int) -> Words:
    """⌊2ᵏ/N⌋ for 1 ≤ N ≤ cap and 0 for every other N: shape (modulus,)."""
    if not (1 <= cap < modulus and 0 <= weight_bits < 64):
        _refuse(
            "argument.value",
            f"{weight_bits} bits of weight, counts to {cap} modulo {modulus}",
            "set k < 64 and 1 ≤ cap < M",
        )
    table = np.zeros(modulus, np.uint64)
    table[1 : cap + 1] = np.uint64(1 << weight_bits) // np.arange(1, cap + 1, dtype=np.uint64)
    return table


@dataclass(frozen=True)
class ReciprocalParameters:
    """What is public: session id, number of users U, cap on N[u] (silos · n_max), k and T (in bits, k < T ≤ 64)."""

    session: bytes
    users: int
    cap: int
    weight_bits: int
    word_bits: int

    def __post_init__(self) -> None:
        if len(self.session) != 32:
            _refuse(
                "argument.value",
                f"a session id of {len(self.session)} bytes",
                "give the 32 bytes of the session",
            )
        if self.users < 1 or not 1 <= self.cap < 1 << 24:
            _refuse(
                "argument.value",
                f"{self.users} users with a cap of {self.cap}",
                "set at least one user and a cap below 2²⁴",
            )
        if not 0 <= self.weight_bits < self.word_bits <= 64:
            _refuse(
                "argument.value",
                f"{self.weight_bits} bits of weight in words of {self.word_bits}",
                "set k < T ≤ 64",
            )

    @property
    def modulus(self) -> int:
        """M: of the masked counts, and the size of the tables."""
        return choose_modulus(self.cap)

    def reduced(self, values: Words) -> Words:
        """Modulo 2ᵀ."""
        return values & np.uint64((1 << self.word_bits) - 1)

    def checked(self, values: NDArray[np.integer], bound: int, what: str) -> Words:
        """The values, if there is one per user in [0, bound)."""
        if values.shape != (self.users,) or values.min() < 0 or int(values.max()) >= bound:
            _refuse(
                "argument.value",
                f"the {what} are not {self.users} numbers from 0 below {bound}",
                "correct them",
            )
        return values.astype(np.uint64)


class SiloShares:
    """What every silo derives from R: shapes (U,). Each stream has its own key, which names session, use and round."""

    def __init__(self, plan: ReciprocalParameters, secret: bytes) -> None:
        self.plan = plan
        if len(secret) != KEY_BYTES:
            _refuse(
                "argument.value", f"a run secret of {len(secret)} bytes", "give 32 bytes that the silos share"
            )
        self._secret = secret

    def count_masks(self) -> Words:
        """ρ_u, which one silo adds to its counts: exactly uniform modulo M, which is a power of two."""
        return self._words("count masks") % np.uint64(self.plan.modulus)

    def shares(self) -> Words:
        """c_u."""
        return self.plan.reduced(self._words("shares"))

    def masks(self, round: int, use: str) -> Words:
        """x_u of this round: the silos' shares of β_u·v_u after `FirstSilo.sample`."""
        return self.plan.reduced(self._words("masks", transfer_counter(round), use))

    def shifts(self, round: int, law: SamplingRatio) -> NDArray[np.int64]:
        """κ_u of this round."""
        return private_sampling.derive_silo_cells(
            self._secret, self.plan.session, self.plan.users, law, round
        )

    def hidden(self, round: int, use: str, part: Lookup) -> PendingLookup:
        """What silo 0 awaits of its choices `part`: c'_u. No other silo can derive it; silo 0 passes it on, sealed."""
        return PendingLookup(self.plan, part, self.masks(round, use))

    def _words(self, *purpose: str | int) -> Words:
        key = derive_key(self._secret, "reciprocals", self.plan.session.hex(), *purpose)
        return draw_words(key, self.plan.users, np.uint64).astype(np.uint64)


@dataclass(frozen=True)
class PendingLookup:
    """Shares that wait for the other party's answer to `message`: `own` plus the entries it will bring."""

    plan: ReciprocalParameters
    part: Lookup
    own: Words = field(repr=False)

    @property
    def message(self) -> bytes:
        """The request that goes to the other party."""
        return self.part.message

    def finish(self, answer: bytes) -> Words:
        """This party's shares modulo 2ᵀ, shape (U,)."""
        return self.plan.reduced(self.own + self.part.open(answer))


class FirstSilo:
    """The silo that offers the tables."""

    def __init__(self, silo: SiloShares, sender: TransferSender) -> None:
        self.plan, self.silo, self.sender = silo.plan, silo, sender

    def set_up(self, request: bytes) -> bytes:
        """Offers x ↦ ⌊2ᵏ/(x − ρ_u)⌋ − c_u, once in a session: a second entry of one user would give away N[u]."""
        entries, size = np.arange(self.plan.modulus, dtype=np.int64), self.plan.modulus
        counts = (entries - self.silo.count_masks().astype(np.int64)[:, None]) % size
        table = reciprocals(self.plan.weight_bits, size, self.plan.cap)
        return self._offer(_SET_UP, request, table[counts] - self.silo.shares()[:, None])

    def sample(self, round: int, use: str, request: bytes) -> bytes:
        """Offers β ↦ β·c_u − x_u; the silos' shares of β_u·v_u are `SiloShares.masks`."""
        both = np.arange(2, dtype=np.uint64)
        return self._offer(transfer_counter(round), request, self._sampled(round, use, both))

    def sample_unknown(self, round: int, use: str, law: SamplingRatio, request: bytes) -> bytes:
        """Offers i ↦ β(i, κ_u)·c_u − x_u; the silos' shares of β_u·v_u come from silo 0's own choices."""
        sampled = law.sampled(np.arange(law.places), self.silo.shifts(round, law)[:, None])
        return self._offer(transfer_counter(round), request, self._sampled(round, use, sampled))

    def _sampled(self, round: int, use: str, sampled: Words) -> Words:
        return sampled * self.silo.shares()[:, None] - self.silo.masks(round, use)[:, None]

    def _offer(self, counter: int, request: bytes, tables: Words) -> bytes:
        return lookup.answer(self.sender, counter, request, self.plan.reduced(tables))


class Server:
    """The party that chooses."""

    def __init__(self, plan: ReciprocalParameters, receiver: TransferReceiver) -> None:
        self.plan, self.receiver = plan, receiver

    def set_up(self, masked_counts: NDArray[np.integer]) -> PendingLookup:
        """Asks at m_u = N[u] + ρ_u mod M; what is awaited is a_u."""
        counts = self.plan.checked(masked_counts, self.plan.modulus, "masked counts")
        part = Lookup.ask(self.receiver, _SET_UP, counts, self.plan.modulus)
        return PendingLookup(self.plan, part, np.zeros(self.plan.users, np.uint64))

    def sample(self, round: int, shares: Words, sampled: NDArray[np.integer]) -> PendingLookup:
        """Asks at β_u, which is 0 or 1; what is awaited is a'_u, a share of β_u·v_u."""
        chosen = self.plan.checked(sampled, 2, "sampled bits")
        part = Lookup.ask(self.receiver, transfer_counter(round), chosen, 2)
        return PendingLookup(self.plan, part, chosen * shares)

    def sample_unknown(self, round: int, law: SamplingRatio) -> PendingLookup:
        """Asks at a uniform i_u; what is awaited is a'_u, masked by a fresh y_u that no one else knows."""
        places = private_sampling.draw_server_cells(self.plan.users, law)
        part = Lookup.ask(self.receiver, transfer_counter(round), places, law.places)
        return PendingLookup(
            self.plan, part, draw_words(secrets.token_bytes(KEY_BYTES), self.plan.users, np.uint64)
        )


def answer_unknown(
    sender: TransferSender, awaited: PendingLookup, law: SamplingRatio, shares: Words, request: bytes
) -> bytes:
    """The server's offer to silo 0's choices: κ ↦ β(i_u, κ)·a_u − y_u in the round of `awaited`."""
    sampled = law.sampled(awaited.part.indices[:, None], np.arange(law.places))
    tables = awaited.plan.reduced(sampled * shares[:, None] - awaited.own[:, None])
    return lookup.answer(sender, awaited.part.counter, request, tables)


def _refuse(code: str, what: str, remedy: str) -> NoReturn:
    raise SilodpError(f"Shares of reciprocals: {what}; {remedy}.", code=code)
