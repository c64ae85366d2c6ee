"""Additive shares of the weights ⌊2^k/N[u]⌋ between the server and the silos; nobody learns a count N[u].

Set-up, once in a session: masked counts to the server, base transfers with silo 0, one lookup per user. With user
sampling, one transfer per user and round; where nobody is to know the sample, two lookups. Silo 0 is the first on the
roster; it must answer every round if users are sampled.

Source: docs/protocols.md, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from silodp.aggregators import _private_weights
from silodp.aggregators._key_agreement import SessionInfo, current_session
from silodp.aggregators._private_sampling import OtServer, blame_silo, load_transfers
from silodp.aggregators.base import ServerContext, SiloContext
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto import lookup, reciprocals
from silodp.crypto import oblivious_transfer as ot
from silodp.crypto.lookup import Lookup
from silodp.crypto.sampling import SamplingRatio
from silodp.crypto.secure_aggregation import RoundAttempt, Unsigned, WordGroup, apply_pair_masks, sum_values
from silodp.errors import SilodpError
from silodp.wire.messages import Message
from silodp.wire.schemas import Array, Blob, MessageSchema, MessageType, is_digest, session_type
from silodp.wire.store import get_or_make

Shares = NDArray[np.uint64]
_USE = "sample of the round"
_SHARES = "weights/shares"


@dataclass(frozen=True)
class ShareConstants:
    """Public constants of the shares.

    Attributes:
        count_cap: n_max, the largest number of records of one user in one silo.
        weight_bits: k; weights are multiples of 2^-k.
        word_bits: T; shares are integers modulo 2^T.
    """

    count_cap: int
    weight_bits: int
    word_bits: int

    def lookup_parameters(self, spec: RunSpec, session: str) -> reciprocals.ReciprocalParameters:
        """Return the parameters of the lookups of one session."""
        # The largest N[u] that honest silos can cause; a larger one gets the weight 0.
        cap = spec.population.silos * self.count_cap
        return reciprocals.ReciprocalParameters(
            bytes.fromhex(session), spec.population.users, cap, self.weight_bits, self.word_bits
        )


def _make_count_group(
    plan: reciprocals.ReciprocalParameters, roster: tuple[str, ...]
) -> tuple[WordGroup, RoundAttempt]:
    return WordGroup(plan.users, plan.modulus.bit_length() - 1), RoundAttempt(0, 0, 0, roster, "counts")


@dataclass(frozen=True)
class ServerShares:
    """The server's shares a_u of the weights, and a'_u of a round's sampled weights; each is stored and drawn once."""

    spec: RunSpec
    constants: ShareConstants
    context: ServerContext

    def set_up(self, info: SessionInfo) -> None:
        """Collect masked counts, make base transfers, and look up one reciprocal per user."""
        plan, run = self.constants.lookup_parameters(self.spec, info.session), self.spec.run
        zero, offers = self.spec.names[0], OtServer(self.spec, self.context)
        base = ot.BaseTransfers(plan.session, reciprocals.SERVER_CHOOSES)
        offered = offers.ask(info, "base", offer=base.offer)
        receiver = blame_silo(zero, lambda: base.receiver(offered.blobs["reply"]))
        request = Message("masked counts", run, 0, info.number, {"session": info.session})
        counts = self.context.ask_all(dict.fromkeys(self.spec.names, request))
        group, _ = _make_count_group(plan, self.spec.names)
        # Pair masks cancel in the sum; what is left is N[u] + ρ_u modulo M.
        counted: Unsigned = sum_values((answer.arrays["masked"] for answer in counts.values()), group)
        awaited = reciprocals.ReciprocalServer(plan, receiver).set_up(counted)
        answer = offers.ask(info, "reciprocals", request=awaited.message)
        shares = blame_silo(zero, lambda: awaited.finish(answer.blobs["answer"]))
        # The counter after the set-up, so that a lookup of a round can never use the set-up's streams again.
        blobs, counter = {"receiver": receiver.pack()}, {"counter": receiver.counter}
        kept = Message("kept", run, fields=counter, arrays={"shares": shares}, blobs=blobs)
        self.context.store.run.put(_SHARES, kept.encode())

    def round_shares(
        self, round_: int, sample: NDArray[np.bool_] | SamplingRatio | None
    ) -> tuple[Shares, Mapping[str, bytes]]:
        """Return this round's shares (U,), and silo 0's part, sealed for each other silo ({} where it has none).

        Args:
            round_: counted from 0.
            sample: None: shares of v_u = ⌊2^k/N[u]⌋. β (U,): of β_u·v_u. A rate: of β_u·v_u for a sample that nobody
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
                    lambda sender, choice: reciprocals.answer_unknown(
                        sender, awaited, drawn, weights, choice
                    ),
                )
            return Message("kept", self.spec.run, arrays={"shares": shares}, blobs=sealed).encode()

        return Message.decode(get_or_make(self.context.store.round(round_), "weights", ask))

    def _load_or_make_lookup(
        self, round_: int, drawn: NDArray[np.bool_] | SamplingRatio, kept: Message
    ) -> reciprocals.PendingLookup:
        """Return the request of a round, stored before it is sent: a second one would show where the samples differ."""
        plan = self.constants.lookup_parameters(self.spec, current_session(self.context.store.run).session)

        def draw() -> bytes:
            receiver = ot.TransferReceiver.unpack(kept.blobs["receiver"], kept.fields["counter"])
            server = reciprocals.ReciprocalServer(plan, receiver)
            if isinstance(drawn, SamplingRatio):
                awaited = server.sample_unknown(round_, drawn)
            else:
                awaited = server.sample(round_, kept.arrays["shares"], drawn.astype(np.int64))
            blobs = {"part": awaited.part.pack()}
            return Message("kept", self.spec.run, arrays={"own": awaited.own}, blobs=blobs).encode()

        asked = Message.decode(get_or_make(self.context.store.round(round_), "weights asked", draw))
        return reciprocals.PendingLookup(plan, Lookup.unpack(asked.blobs["part"]), asked.arrays["own"])

    def _load_kept(self) -> Message:
        stored = self.context.store.run.get(_SHARES)
        if stored is None:
            raise SilodpError(
                "the server holds no shares of the weights: its store is lost; begin a new run.",
                code="session.missing",
            )
        return Message.decode(stored)


class SharedWeightsSilo(_private_weights.PrivateWeightingSilo):
    """A silo's shares, and silo 0's tables; the gate lets each be asked for once in a session, or in a round.

    Args:
        aggregator, spec, context: as for every silo.
        constants: the public constants of the shares.
    """

    def __init__(
        self,
        aggregator: _private_weights.PrivateWeighting,
        spec: RunSpec,
        context: SiloContext,
        constants: ShareConstants,
    ) -> None:
        super().__init__(aggregator, spec, context)
        self._constants = constants
        answered = {"masked counts": self._counts, "base": self._base, "reciprocals": self._reciprocals}
        self.handlers = {**self.handlers, **answered, "sample": self._sample}

    @property
    def capped_counts(self) -> NDArray[np.int64]:
        """min(n[s,u], n_max) (U,)."""
        capped: NDArray[np.int64] = np.minimum(self._context.counts, self._constants.count_cap)
        return capped

    def round_shares(self, request: Message) -> Shares:
        """Return this silo's shares (U,) of v_u, or of β_u·v_u, for the round of a request."""
        if self._choices is not None:
            return np.frombuffer(self._choices.round_entries(request), "<u8").astype(np.uint64)
        silo = self._shares(request.run)
        return silo.masks(request.round, _USE) if self._spec.method.samples_users else silo.shares()

    def open_chosen(self, request: Message, part: Lookup, answer: bytes) -> bytes:
        """Return the shares that silo 0 opened of the server's answer, 8 bytes for each user."""
        # c'_u = x_u + (β_u·a_u − y_u): silo 0 took x_u off its own table, and the server y_u off the one that was
        # opened here.
        shares = self._shares(request.run).await_choices(request.round, _USE, part).finish(answer)
        return shares.astype("<u8").tobytes()

    def _shares(self, run: str) -> reciprocals.SiloShares:
        session = self._member.session(run)
        return reciprocals.SiloShares(
            self._constants.lookup_parameters(self._spec, session.transcript.hex()),
            self._member.group_secret(run),
        )

    def _counts(self, request: Message) -> Message:
        # Counts are capped here and not at the server, which must see no count.
        session, silo = self._member.session_of(request), self._shares(request.run)
        group, attempt = _make_count_group(silo.parameters, session.roster)
        value = group.from_integers(self.capped_counts)
        # Pair masks cancel in the sum; ρ_u, which only silo 0 adds, hides the sum N[u] from the server.
        if session.name == session.roster[0]:
            value = group.add(value, group.from_integers(silo.count_masks().astype(np.int64)))
        return request.answer(masked=apply_pair_masks(value, group, session, attempt))

    def _base(self, request: Message) -> Message:
        session = self._member.session_of(request)
        sender, reply = ot.TransferSender.accept(
            session.transcript, reciprocals.SERVER_CHOOSES, request.blobs["offer"]
        )
        self._context.store.run.put(self._transfers_key(request), sender.pack())
        return request.reply(reply=reply)

    def _reciprocals(self, request: Message) -> Message:
        return self._answer_offer(request, self._zero(request).set_up)

    def _sample(self, request: Message) -> Message:
        zero, choices = self._zero(request), self._choices
        if choices is None:
            return self._answer_offer(request, lambda asked: zero.sample(request.round, _USE, asked))
        answer = self._answer_offer(
            request, lambda asked: zero.sample_unknown(request.round, _USE, choices.ratio, asked)
        )
        return replace(answer, blobs={**answer.blobs, "choice": choices.choice(request)})

    def _answer_offer(self, request: Message, offer: Callable[[bytes], bytes]) -> Message:
        """Return the answer; end the session's transfers durably if the request fails the consistency check.

        A failed check tells a cheating server one bit of the secret that all transfers rest on, so there is one at
        most.
        """
        try:
            return request.reply(answer=offer(request.blobs["request"]))
        except SilodpError:
            self._context.store.run.put(self._ended_key(request), b"ended")
            raise

    def _ended_key(self, request: Message) -> str:
        return f"transfers ended/{request.fields['session']}"

    def _transfers_key(self, request: Message) -> str:
        """Return a key for one session: pads used again in another session would show counts."""
        return f"transfers/{request.fields['session']}"

    def _zero(self, request: Message) -> reciprocals.FirstSilo:
        session = self._member.session_of(request)
        if self._context.store.run.get(self._ended_key(request)) is not None:
            raise SilodpError(
                f"silo '{session.name}' has ended its transfers, because a request failed their check: begin a new "
                "run, and find out who altered it.",
                code="session.transfers_ended",
            )
        packed = load_transfers(self._context.store.run, self._transfers_key(request), session.name)
        return reciprocals.FirstSilo(self._shares(request.run), ot.TransferSender.unpack(packed, 0))


def weight_types(spec: RunSpec, constants: ShareConstants, is_first: bool) -> tuple[MessageType, ...]:
    """Return the messages of the set-up of shares; silo 0, the first, is asked more than the others."""
    plan, users = constants.lookup_parameters(spec, bytes(32).hex()), spec.population.users
    group, _ = _make_count_group(plan, spec.names)
    masked = MessageSchema(arrays={"masked": Array(group.dtype.name, (users,))})
    counts = MessageType("masked counts", MessageSchema({"session": is_digest}), masked)
    if not is_first:
        return (counts,)
    base = session_type("base", {"offer": Blob.of(ot.OFFER_BYTES)}, {"reply": Blob.of(ot.REPLY_BYTES)})
    return base, counts, lookup_type("reciprocals", users, plan.modulus)


def lookup_type(name: str, users: int, size: int, more: Mapping[str, Blob] | None = None) -> MessageType:
    """Return the type of a request for one entry of each user's table, and of its answer.

    Args:
        name: the name of the kind.
        users: U.
        size: number of entries of a table.
        more: further blobs of the answer.
    """
    tables = {"answer": Blob.of(lookup.answer_bytes(users, size)), **(more or {})}
    return session_type(name, {"request": Blob.of(lookup.request_bytes(users, size))}, tables)
