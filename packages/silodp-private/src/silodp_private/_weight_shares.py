"""Shares of one word per person between the server and the silos, of all or of sampled persons: the messages.

Set-up, once in a session: base transfers with silo 0, then the exchange of a subclass, from which the server's shares
come. With user sampling, one transfer per person and round; where nobody is to know the sample, two lookups. Silo 0 is
the first on the roster; it must answer every round if users are sampled.

The words are weights ⌊2^k/N[u]⌋ (`_reciprocal_shares`) or primary silos (`_primary_silo_shares`).

Source: docs/protocols.md, sections 3 and 7.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from silodp.aggregators._key_agreement import SessionInfo, current_session
from silodp.aggregators.base import ServerContext, SiloContext
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.keys import Session
from silodp.crypto.sampling import SamplingRatio
from silodp.crypto.streams import Words
from silodp.errors import SilodpError
from silodp.wire.messages import Message
from silodp.wire.schemas import Blob, MessageType, session_type
from silodp.wire.store import get_or_make
from silodp_private import _private_weights
from silodp_private._private_sampling import OtServer, blame_silo, load_transfers
from silodp_private.crypto import lookup
from silodp_private.crypto import oblivious_transfer as ot
from silodp_private.crypto.lookup import Lookup
from silodp_private.crypto.shares import (
    SERVER_CHOOSES,
    FirstSilo,
    PendingLookup,
    ShareParameters,
    ShareServer,
    SiloShares,
    answer_unknown,
)

_USE = "sample of the round"
_SHARES = "weights/shares"
_BASE = "base"


def base_type(name: str = _BASE) -> MessageType:
    """Return the type of a message of the set-up for base transfers in which the server chooses."""
    return session_type(name, {"offer": Blob.of(ot.OFFER_BYTES)}, {"reply": Blob.of(ot.REPLY_BYTES)})


def make_base_transfers(
    spec: RunSpec, context: ServerContext, info: SessionInfo, kind: str, purpose: str, names: Sequence[str]
) -> dict[str, ot.TransferReceiver]:
    """Make base transfers in which the server chooses, with each of some silos its own.

    Silos that had them in common could open what the server chose from another one.

    Args:
        spec: the public constants of the run.
        context: the server.
        info: the session.
        kind: the name of the message, see `base_type`.
        purpose: of the transfers, see `ot.BaseTransfers`.
        names: of the silos.
    """
    bases = {name: ot.BaseTransfers(bytes.fromhex(info.session), purpose) for name in names}
    named = {"session": info.session}
    requests = {
        name: Message(kind, spec.run, 0, info.number, named, blobs={"offer": own.offer})
        for name, own in bases.items()
    }
    answers = context.ask_all(requests)
    return {
        name: blame_silo(name, partial(own.receiver, answers[name].blobs["reply"]))
        for name, own in bases.items()
    }


@dataclass(frozen=True)
class ServerShares:
    """The server's shares a_u, and a'_u of a round's sample; each is stored and drawn once."""

    spec: RunSpec
    context: ServerContext

    @abstractmethod
    def parameters(self, session: bytes) -> ShareParameters:
        """Return the public constants of the shares in a session, whose id has 32 bytes."""

    @abstractmethod
    def exchange(self, info: SessionInfo, server: ShareServer) -> Words:
        """Obtain the shares (U,) with the silos, once in a session."""

    def set_up(self, info: SessionInfo) -> None:
        """Make base transfers with silo 0, and obtain one share per user."""
        parameters = self.parameters(bytes.fromhex(info.session))
        zero = self.spec.names[0]
        receivers = make_base_transfers(self.spec, self.context, info, _BASE, SERVER_CHOOSES, (zero,))
        server = ShareServer(parameters, receivers[zero])
        shares = self.exchange(info, server)
        # The counter after the set-up, so that a lookup of a round can never use the set-up's streams again.
        blobs, counter = {"receiver": server.receiver.pack()}, {"counter": server.receiver.counter}
        kept = Message("kept", self.spec.run, fields=counter, arrays={"shares": shares}, blobs=blobs)
        self.context.store.run.put(_SHARES, kept.encode())

    def round_shares(
        self, round_: int, sample: NDArray[np.bool_] | SamplingRatio | None
    ) -> tuple[Words, Mapping[str, bytes]]:
        """Return this round's shares (U,), and silo 0's part, sealed for each other silo ({} where it has none).

        Args:
            round_: counted from 0.
            sample: None: shares of v_u. β (U,): of β_u·v_u. A rate: of β_u·v_u for a sample that nobody
                knows.
        """
        if sample is None:
            return self._load_kept().arrays["shares"], {}
        found = self._look_up(round_, sample)
        return found.arrays["shares"], found.blobs

    def _look_up(self, round_: int, drawn: NDArray[np.bool_] | SamplingRatio) -> Message:
        """Return the shares of a round and, where nobody knows the sample, what silo 0 sealed; asked for once."""

        def ask() -> bytes:
            kept, offers = self._load_kept(), OtServer(self.spec, self.context)
            awaited = self._load_or_make_lookup(round_, drawn, kept)
            asked = offers.request_sample(round_, request=awaited.message)
            shares = blame_silo(self.spec.names[0], lambda: awaited.finish(asked.blobs["answer"]))
            sealed: dict[str, bytes] = {}
            if isinstance(drawn, SamplingRatio):
                weights = kept.arrays["shares"]
                sealed = offers.relay_entries(
                    round_,
                    asked,
                    lambda sender, choice: answer_unknown(sender, awaited, drawn, weights, choice),
                )
            return Message("kept", self.spec.run, arrays={"shares": shares}, blobs=sealed).encode()

        return Message.decode(get_or_make(self.context.store.round(round_), "weights", ask))

    def _load_or_make_lookup(
        self, round_: int, drawn: NDArray[np.bool_] | SamplingRatio, kept: Message
    ) -> PendingLookup:
        """Return the request of a round, stored before it is sent: a second one would show where the samples differ."""
        session = current_session(self.context.store.run).session
        parameters = self.parameters(bytes.fromhex(session))

        def draw() -> bytes:
            receiver = ot.TransferReceiver.unpack(kept.blobs["receiver"], kept.fields["counter"])
            server = ShareServer(parameters, receiver)
            if isinstance(drawn, SamplingRatio):
                awaited = server.sample_unknown(round_, drawn)
            else:
                awaited = server.sample(round_, kept.arrays["shares"], drawn.astype(np.int64))
            blobs = {"part": awaited.part.pack()}
            return Message("kept", self.spec.run, arrays={"own": awaited.own}, blobs=blobs).encode()

        asked = Message.decode(get_or_make(self.context.store.round(round_), "weights asked", draw))
        return PendingLookup(parameters, Lookup.unpack(asked.blobs["part"]), asked.arrays["own"])

    def _load_kept(self) -> Message:
        stored = self.context.store.run.get(_SHARES)
        if stored is None:
            raise SilodpError(
                "the server holds no shares of the weights: its store is lost; begin a new run.",
                code="session.missing",
            )
        return Message.decode(stored)


class SharedWeightsSilo(_private_weights.PrivateWeightingSilo):
    """A silo's shares, and silo 0's tables; the gate lets each be asked for once in a session, or in a round."""

    def __init__(
        self, aggregator: _private_weights.PrivateWeighting, spec: RunSpec, context: SiloContext
    ) -> None:
        super().__init__(aggregator, spec, context)
        self.handlers = {**self.handlers, _BASE: self._base, "sample": self._sample}

    @abstractmethod
    def share_parameters(self, session: Session) -> ShareParameters:
        """Return the public constants of the shares in a session."""

    def round_shares(self, request: Message) -> Words:
        """Return this silo's shares (U,) of v_u, or of β_u·v_u, for the round of a request."""
        if self._choices is not None:
            return np.frombuffer(self._choices.round_entries(request), "<u8").astype(np.uint64)
        silo = self.silo_shares(request.run)
        return silo.masks(request.round, _USE) if self._spec.method.samples_users else silo.shares()

    def open_chosen(self, request: Message, part: Lookup, answer: bytes) -> bytes:
        """Return the shares that silo 0 opened of the server's answer, 8 bytes for each user."""
        # c'_u = x_u + (β_u·a_u − y_u): silo 0 took x_u off its own table, and the server y_u off the one that was
        # opened here.
        shares = self.silo_shares(request.run).await_choices(request.round, _USE, part).finish(answer)
        return shares.astype("<u8").tobytes()

    def silo_shares(self, run: str) -> SiloShares:
        """Return the shares that all silos derive."""
        parameters = self.share_parameters(self._member.session(run))
        return SiloShares(parameters, self._member.group_secret(run))

    def offer_tables(self, request: Message, offer: Callable[[FirstSilo, bytes], bytes]) -> Message:
        """Answer, as silo 0, a lookup of the server.

        The session's transfers end, durably, if the request fails the consistency check: a failed check tells a
        cheating server one bit of the secret that all transfers rest on, so there is one at most.
        """
        zero = self._first_silo(request)
        try:
            return request.reply(answer=offer(zero, request.blobs["request"]))
        except SilodpError:
            self._context.store.run.put(self._ended_key(request), b"ended")
            raise

    def accept_transfers(self, request: Message, purpose: str, key: str) -> Message:
        """Answer an offer of base transfers, and store this silo's side of them under a key for one session."""
        session = self._member.session_of(request)
        sender, reply = ot.TransferSender.accept(session.transcript, purpose, request.blobs["offer"])
        self._context.store.run.put(key, sender.pack())
        return request.reply(reply=reply)

    def _base(self, request: Message) -> Message:
        return self.accept_transfers(request, SERVER_CHOOSES, self._transfers_key(request))

    def _sample(self, request: Message) -> Message:
        choices = self._choices
        if choices is None:
            return self.offer_tables(request, lambda zero, asked: zero.sample(request.round, _USE, asked))
        ratio = choices.ratio
        answer = self.offer_tables(
            request, lambda zero, asked: zero.sample_unknown(request.round, _USE, ratio, asked)
        )
        return replace(answer, blobs={**answer.blobs, "choice": choices.choice(request)})

    def _ended_key(self, request: Message) -> str:
        return f"transfers ended/{request.fields['session']}"

    def _transfers_key(self, request: Message) -> str:
        """Return a key for one session: pads used again in another session would show counts."""
        return f"transfers/{request.fields['session']}"

    def _first_silo(self, request: Message) -> FirstSilo:
        session = self._member.session_of(request)
        if self._context.store.run.get(self._ended_key(request)) is not None:
            raise SilodpError(
                f"silo '{session.name}' has ended its transfers, because a request failed their check: begin a new "
                "run, and find out who altered it.",
                code="session.transfers_ended",
            )
        packed = load_transfers(self._context.store.run, self._transfers_key(request), session.name)
        return FirstSilo(self.silo_shares(request.run), ot.TransferSender.unpack(packed, 0))


def sample_types(
    spec: RunSpec, ratio: SamplingRatio | None, choice: Mapping[str, Blob]
) -> tuple[MessageType, ...]:
    """Return the server's lookup of a round's sampled shares in silo 0's tables; () where everyone takes part."""
    if not spec.method.samples_users:
        return ()
    entries = 2 if ratio is None else ratio.denominator
    return (lookup_type("sample", spec.population.users, entries, more=choice),)


def lookup_type(
    name: str, users: int, size: int, width: int = 8, more: Mapping[str, Blob] | None = None
) -> MessageType:
    """Return the type of a request for one entry of each user's table, and of its answer.

    Args:
        name: the name of the kind.
        users: number of tables.
        size: number of entries of a table.
        width: bytes of an entry.
        more: further blobs of the answer.
    """
    tables = {"answer": Blob.of(lookup.answer_bytes(users, size, width)), **(more or {})}
    return session_type(name, {"request": Blob.of(lookup.request_bytes(users, size))}, tables)
