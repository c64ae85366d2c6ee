"""Additive shares of one word per user between server and silos, and their products with a round's sample.

A word v_u is shared as a_u (the server's) and c_u (of the silos, all alike), each uniform; what "adding" means is the
parameters': modulo 2ᵀ (`silodp_private.crypto.reciprocals`), or bit by bit modulo 2
(`silodp_private.crypto.primary_silos`). All that the silos hold follows from the run secret R, which every silo knows
and the server does not. Rounds number the
draws: a session makes one draw per round, rounds only grow, and a round has its own transfer counter, so no mask is
ever used twice.

Before a request or an answer leaves, its party stores its transfer counter; so no restart repeats a draw. Limits
(docs/protocols.md, section 6): a malicious server can choose other entries, which shows it none of them but sets wrong
weights; a malicious silo 0 can offer wrong tables; one silo that colludes with the server gives it every v_u and β_u.

Source: docs/protocols.md, sections 3 and 5.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from silodp.crypto import sampling
from silodp.crypto.sampling import SamplingRatio, transfer_counter
from silodp.crypto.streams import KEY_BYTES, Integers, Words, derive_key, draw_words
from silodp.errors import require
from silodp_private.crypto import lookup
from silodp_private.crypto.lookup import Lookup
from silodp_private.crypto.oblivious_transfer import TransferReceiver, TransferSender

# Part of every hash of these transfers, so that those of the other direction share nothing with them.
SERVER_CHOOSES = "server chooses among silo 0's entries"  # purpose of the base transfers


@dataclass(frozen=True)
class ShareParameters(ABC):
    """Public constants of the shares of a session.

    Attributes:
        session: The session's id, 32 bytes.
        users: U, the number of users.
    """

    session: bytes
    users: int

    label: ClassVar[str]
    """Part of every key, so that shares of two kinds have no key in common."""

    def __post_init__(self) -> None:
        require(
            len(self.session) == 32,
            f"Shares of {self.label}: a session id of {len(self.session)} bytes; give the 32 bytes of the session.",
            code="argument.value",
        )
        require(
            self.users >= 1,
            f"Shares of {self.label}: {self.users} users; set at least one.",
            code="argument.value",
        )

    @abstractmethod
    def reduce(self, values: Words) -> Words:
        """Return the words that uniform words of 64 bits stand for, uniform too."""

    @abstractmethod
    def add(self, values: Words, others: Words) -> Words:
        """Return values + others."""

    @abstractmethod
    def subtract(self, values: Words, others: Words) -> Words:
        """Return values − others."""

    def validate(self, values: NDArray[np.integer], bound: int, what: str) -> Words:
        """Return the values if there is one per user in [0, bound); `what` they are, for the error."""
        require(
            values.shape == (self.users,) and values.min() >= 0 and int(values.max()) < bound,
            f"Shares of {self.label}: the {what} are not {self.users} numbers from 0 below {bound}; correct them.",
            code="argument.value",
        )
        return values.astype(np.uint64)


class SiloShares:
    """The shares that every silo derives from R: shape (U,). Every stream has a key for its session, use and round.

    Args:
        parameters: the public constants of the session.
        secret: R, 32 bytes.
    """

    def __init__(self, parameters: ShareParameters, secret: bytes) -> None:
        self.parameters = parameters
        require(
            len(secret) == KEY_BYTES,
            f"Shares of {parameters.label}: a run secret of {len(secret)} bytes; give 32 bytes that the silos share.",
            code="argument.value",
        )
        self._secret = secret

    def shares(self) -> Words:
        """Return c_u, the silos' shares of v_u: uniform."""
        return self.parameters.reduce(self.words("shares"))

    def masks(self, round: int, use: str) -> Words:
        """Return x_u of a round: the silos' shares of β_u·v_u after `FirstSilo.sample`."""
        return self.parameters.reduce(self.words("masks", transfer_counter(round), use))

    def cells(self, round: int, ratio: SamplingRatio) -> Integers:
        """Return κ_u of a round."""
        return sampling.derive_silo_cells(
            self._secret, self.parameters.session, self.parameters.users, ratio, round
        )

    def await_choices(self, round: int, use: str, part: Lookup) -> PendingLookup:
        """Return what silo 0 awaits of its choices: c'_u. No other silo can derive it; silo 0 passes it on, sealed."""
        return PendingLookup(self.parameters, part, self.masks(round, use))

    def words(self, *purpose: str | int) -> Words:
        """Return the uniform words of 64 bits (U,) that all silos draw for one purpose."""
        key = derive_key(self._secret, self.parameters.label, self.parameters.session.hex(), *purpose)
        return draw_words(key, self.parameters.users, np.uint64).astype(np.uint64)


@dataclass(frozen=True)
class PendingLookup:
    """Shares that wait for the other party's answer to `message`.

    Attributes:
        parameters: The public constants of the session.
        part: The lookup that was asked.
        own: Words (U,) to which the entries of the answer are added.
    """

    parameters: ShareParameters
    part: Lookup
    own: Words = field(repr=False)

    @property
    def message(self) -> bytes:
        """The request that goes to the other party."""
        return self.part.message

    def finish(self, answer: bytes) -> Words:
        """Return this party's shares, shape (U,), from the other party's answer."""
        return self.parameters.add(self.own, self.part.open(answer))


class FirstSilo:
    """The silo that offers the tables (docs/protocols.md, section 3)."""

    def __init__(self, silo: SiloShares, sender: TransferSender) -> None:
        self.parameters, self.silo, self.sender = silo.parameters, silo, sender

    def sample(self, round: int, use: str, request: bytes) -> bytes:
        """Offer β ↦ β·c_u − x_u; the silos' shares of β_u·v_u are `SiloShares.masks`."""
        both = np.arange(2, dtype=np.uint64)
        return self.offer(transfer_counter(round), request, self._table(round, use, both))

    def sample_unknown(self, round: int, use: str, ratio: SamplingRatio, request: bytes) -> bytes:
        """Offer i ↦ β(i, κ_u)·c_u − x_u; the silos' shares of β_u·v_u come from silo 0's own choices."""
        sampled = ratio.select(np.arange(ratio.denominator), self.silo.cells(round, ratio)[:, None])
        return self.offer(transfer_counter(round), request, self._table(round, use, sampled))

    def offer(self, counter: int, request: bytes, tables: NDArray[np.unsignedinteger]) -> bytes:
        """Return the answer to a request for one entry of each table; the counter is used up."""
        return lookup.answer(self.sender, counter, request, tables)

    def _table(self, round: int, use: str, sampled: Words) -> Words:
        # x_u is of this round alone: two rounds under one mask would show whether β_u differs.
        shares, masks = self.silo.shares()[:, None], self.silo.masks(round, use)[:, None]
        return self.parameters.subtract(sampled * shares, masks)


class ShareServer:
    """The server, which chooses in silo 0's tables (docs/protocols.md, section 3)."""

    def __init__(self, parameters: ShareParameters, receiver: TransferReceiver) -> None:
        self.parameters, self.receiver = parameters, receiver

    def sample(self, round: int, shares: Words, sampled: NDArray[np.integer]) -> PendingLookup:
        """Ask at β_u, which is 0 or 1; what is awaited is a'_u, a share of β_u·v_u.

        Args:
            round: counted from 0.
            shares: a_u (U,).
            sampled: β_u (U,).
        """
        # β_u·v_u = β_u·a_u + β_u·c_u: the first term is the server's, the second it looks up under the mask x_u.
        chosen = self.parameters.validate(sampled, 2, "sampled bits")
        return self.ask(transfer_counter(round), chosen, 2, chosen * shares)

    def sample_unknown(self, round: int, ratio: SamplingRatio) -> PendingLookup:
        """Ask at a uniform i_u; what is awaited is a'_u, masked by a fresh y_u that no one else knows."""
        # y_u is this round's alone: with two answers under one mask, silo 0 would see how two samples differ.
        cells = sampling.draw_server_cells(self.parameters.users, ratio)
        masks = self.parameters.reduce(
            draw_words(secrets.token_bytes(KEY_BYTES), self.parameters.users, np.uint64).astype(np.uint64)
        )
        return self.ask(transfer_counter(round), cells, ratio.denominator, masks)

    def ask(self, counter: int, indices: NDArray[np.integer], size: int, own: Words) -> PendingLookup:
        """Ask for one entry of each table of `size` entries, to which `own` is added; the counter is used up."""
        return PendingLookup(self.parameters, Lookup.ask(self.receiver, counter, indices, size), own)


def answer_unknown(
    sender: TransferSender, awaited: PendingLookup, ratio: SamplingRatio, shares: Words, request: bytes
) -> bytes:
    """Return the server's offer to silo 0's choices: κ ↦ β(i_u, κ)·a_u − y_u.

    Args:
        sender: of the base transfers in which silo 0 chooses.
        awaited: of `ShareServer.sample_unknown`, for the same round.
        ratio: k/P.
        shares: a_u (U,).
        request: silo 0's, for the entries κ_u of `sampling.derive_silo_cells`.
    """
    sampled = ratio.select(awaited.part.indices[:, None], np.arange(ratio.denominator))
    tables = awaited.parameters.subtract(sampled * shares[:, None], awaited.own[:, None])
    return lookup.answer(sender, awaited.part.counter, request, tables)
