"""Additive shares of the weights ⌊2^k/N[u]⌋ between the server and the silos; nobody learns a count N[u].

Set-up, once in a session: masked counts to the server, base transfers with silo 0, one lookup per user. With user
sampling, one transfer per user and round; where nobody is to know the sample, two lookups. Silo 0 is the first on the
roster; it must answer every round if users are sampled.

Source: docs/protocols.md, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from silodp.aggregators._key_agreement import SessionInfo, SiloKeyAgreement, current_session
from silodp.aggregators._private_sampling import (
    OtClient,
    OtServer,
    ask_first_silo,
    blame_silo,
    choice_blob,
    choice_kinds,
    chosen_kind,
)
from silodp.aggregators.base import ServerContext
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto import lookup
from silodp.crypto.keys import Session
from silodp.crypto.lookup import Lookup
from silodp.crypto.oblivious_transfer import (
    OFFER_BYTES,
    REPLY_BYTES,
    BaseTransfers,
    TransferReceiver,
    TransferSender,
)
from silodp.crypto.private_sampling import SamplingRatio
from silodp.crypto.reciprocals import (
    SERVER_CHOOSES,
    FirstSilo,
    PendingLookup,
    ReciprocalParameters,
    ReciprocalServer,
    SiloShares,
    answer_unknown,
)
from silodp.crypto.secure_aggregation import RoundAttempt, Unsigned, WordGroup, apply_pair_masks, sum_values
from silodp.errors import SilodpError
from silodp.wire.messages import Message
from silodp.wire.schemas import Array, Blob, Check, MessageSchema, MessageType, is_digest
from silodp.wire.store import RoundStore, Store

Shares = NDArray[np.uint64]
_USE = "sample of the round"
_SHARES = "weights/shares"


@dataclass(frozen=True)
class ShareConstants:
    """Public constants of the shares.

    Attributes:
        count_cap: n_max.
        weight_bits: k.
        word_bits: T; shares are modulo 2^T.
        ratio: k of P, where nobody may know the sample; None where the server draws it.
    """

    count_cap: int
    weight_bits: int
    word_bits: int
    ratio: SamplingRatio | None = None

    def reciprocals(self, spec: RunSpec, session: str) -> ReciprocalParameters:
        """Return the parameters of the lookups of one session."""
        cap = spec.population.silos * self.count_cap
        return ReciprocalParameters(
            bytes.fromhex(session), spec.population.users, cap, self.weight_bits, self.word_bits
        )


def _make_count_group(plan: ReciprocalParameters, roster: tuple[str, ...]) -> tuple[WordGroup, RoundAttempt]:
    return WordGroup(plan.users, plan.modulus.bit_length() - 1), RoundAttempt(0, 0, 0, roster, "counts")


@dataclass(frozen=True)
class ServerShares:
    """The server's shares a_u of the weights, and a'_u of a round's sampled weights; each is stored and drawn once."""

    spec: RunSpec
    constants: ShareConstants
    context: ServerContext

    def set_up(self, info: SessionInfo) -> None:
        """Collect masked counts, make base transfers, and look up one reciprocal per user."""
        plan, run = self.constants.reciprocals(self.spec, info.session), self.spec.run
        zero = self.spec.names[0]
        base = BaseTransfers(plan.session, SERVER_CHOOSES)
        offered = ask_first_silo(self.spec, self.context, info, "base", offer=base.offer)
        receiver = blame_silo(zero, lambda: base.receiver(offered.blobs["reply"]))
        request = Message("masked counts", run, 0, info.number, {"session": info.session})
        counts = self.context.ask_all({name: request for name in self.spec.names})
        group, _ = _make_count_group(plan, self.spec.names)
        masked = [answer.arrays["masked"].copy() for answer in counts.values()]
        counted: Unsigned = sum_values(masked, group)  # N[u] + ρ_u modulo M
        awaited = ReciprocalServer(plan, receiver).set_up(counted)
        answer = ask_first_silo(self.spec, self.context, info, "reciprocals", request=awaited.message)
        shares = blame_silo(zero, lambda: awaited.finish(answer.blobs["answer"]))
        if self.constants.ratio is not None:
            OtServer(self.spec, self.context).set_up(info)
        self._keep(
            self.context.store.run,
            _SHARES,
            {"shares": shares},
            {"receiver": receiver.pack()},
            {"counter": receiver.counter},
        )

    def round_shares(self, round_: int, sample: NDArray[np.bool_] | None) -> Shares:
        """Return shares (U,) of v_u = ⌊2^k/N[u]⌋, or of β_u·v_u for a sample β (U,)."""
        kept = self._load_kept()
        if sample is None:
            return kept.arrays["shares"]
        done = self.context.store.round(round_).get("weights")
        if done is not None:
            return Message.decode(done).arrays["shares"]
        awaited = self._load_or_make_lookup(round_, sample, kept)
        info = current_session(self.context.store.run)
        answer = ask_first_silo(self.spec, self.context, info, "sample", round_, request=awaited.message)
        shares = blame_silo(self.spec.names[0], lambda: awaited.finish(answer.blobs["answer"]))
        self._keep(self.context.store.round(round_), "weights", {"shares": shares})
        return shares

    def private_round_shares(self, round_: int, ratio: SamplingRatio) -> tuple[Shares, dict[str, bytes]]:
        """Return shares (U,) of β_u·v_u for a sample nobody knows, and silo 0's part, sealed for each other silo."""
        done = self.context.store.round(round_).get("weights")
        if done is not None:
            return Message.decode(done).arrays["shares"], Message.decode(done).blobs
        kept, offers = self._load_kept(), OtServer(self.spec, self.context)
        awaited = self._load_or_make_lookup(round_, ratio, kept)
        asked = offers.request_sample(round_, request=awaited.message)
        shares = blame_silo(self.spec.names[0], lambda: awaited.finish(asked.blobs["answer"]))
        weights = kept.arrays["shares"]
        sealed_samples = offers.relay_entries(
            round_,
            asked,
            lambda sender, choice: answer_unknown(sender, awaited, ratio, weights, choice),
        )
        self._keep(self.context.store.round(round_), "weights", {"shares": shares}, sealed_samples)
        return shares, sealed_samples

    def _load_or_make_lookup(
        self, round_: int, drawn: NDArray[np.bool_] | SamplingRatio, kept: Message
    ) -> PendingLookup:
        """Return the request of a round, stored before it is sent: a second one would show where the samples differ."""
        plan = self.constants.reciprocals(self.spec, current_session(self.context.store.run).session)
        stored = self.context.store.round(round_).get("weights asked")
        if stored is None:
            receiver = TransferReceiver.unpack(kept.blobs["receiver"], kept.fields["counter"])
            server, shares = ReciprocalServer(plan, receiver), kept.arrays["shares"]
            awaited = (
                server.sample_unknown(round_, drawn)
                if isinstance(drawn, SamplingRatio)
                else server.sample(round_, shares, drawn.astype(np.int64))
            )
            parts = {"own": awaited.own}, {"part": awaited.part.pack()}
            self._keep(self.context.store.round(round_), "weights asked", *parts)
            return awaited
        old = Message.decode(stored)
        return PendingLookup(plan, Lookup.unpack(old.blobs["part"]), old.arrays["own"])

    def _keep(
        self,
        store: Store,
        key: str,
        arrays: dict[str, np.ndarray],
        blobs: dict[str, bytes] | None = None,
        fields: dict[str, int] | None = None,
    ) -> None:
        kept = Message("kept", self.spec.run, fields=fields or {}, arrays=arrays, blobs=blobs or {})
        store.put(key, kept.encode())

    def _load_kept(self) -> Message:
        stored = self.context.store.run.get(_SHARES)
        if stored is None:
            raise SilodpError(
                "the server holds no shares of the weights: its store is lost; begin a new run.",
                code="session.missing",
            )
        return Message.decode(stored)


@dataclass(frozen=True)
class SiloWeights:
    """A silo's shares, and silo 0's tables; the gate lets each be asked for once in a session, or in a round."""

    spec: RunSpec
    constants: ShareConstants
    member: SiloKeyAgreement
    store: RoundStore
    counts: NDArray[np.int64] = field(repr=False)

    @property
    def handlers(self) -> dict[str, Callable[[Message], Message]]:
        """By kind of request."""
        return {
            "masked counts": self._counts,
            "base": self._base,
            "reciprocals": self._reciprocals,
            "sample": self._sample,
            **({} if self._choices is None else self._choices.handlers),
        }

    @property
    def capped_counts(self) -> NDArray[np.int64]:
        """min(n[s,u], n_max) (U,)."""
        return np.minimum(self.counts, self.constants.count_cap)

    def round_shares(self, request: Message) -> Shares:
        """Return this silo's shares (U,) of v_u, or of β_u·v_u, for the round of a request."""
        if self._choices is not None:
            return np.frombuffer(self._choices.round_entries(request), "<u8").astype(np.uint64)
        silo = self._shares(request.run)
        return silo.masks(request.round, _USE) if self.spec.method.samples_users else silo.shares()

    @cached_property
    def _choices(self) -> OtClient | None:
        ratio = self.constants.ratio
        if ratio is None:
            return None
        return OtClient(self.spec, ratio, self.member, self.store, self._open_chosen)

    def _open_chosen(self, request: Message, part: Lookup, answer: bytes) -> bytes:
        shares = self._shares(request.run).await_choices(request.round, _USE, part).finish(answer)
        return shares.astype("<u8").tobytes()

    def _shares(self, run: str) -> SiloShares:
        session = self.member.session(run)
        return SiloShares(
            self.constants.reciprocals(self.spec, session.transcript.hex()), self.member.group_secret(run)
        )

    def _counts(self, request: Message) -> Message:
        session, silo = self._session(request), self._shares(request.run)
        group, attempt = _make_count_group(silo.parameters, session.roster)
        value = group.from_integers(self.capped_counts)
        if session.name == session.roster[0]:
            value = group.add(value, group.from_integers(silo.count_masks().astype(np.int64)))
        return request.answer(masked=apply_pair_masks(value, group, session, attempt))

    def _base(self, request: Message) -> Message:
        session = self._session(request)
        sender, reply = TransferSender.accept(session.transcript, SERVER_CHOOSES, request.blobs["offer"])
        self.store.run.put(self._transfers_key(request), sender.pack())
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
            self.store.run.put(self._ended_key(request), b"ended")
            raise

    def _ended_key(self, request: Message) -> str:
        return f"transfers ended/{request.fields['session']}"

    def _transfers_key(self, request: Message) -> str:
        """Return a key for one session: pads used again in another session would show counts."""
        return f"transfers/{request.fields['session']}"

    def _zero(self, request: Message) -> FirstSilo:
        session = self._session(request)
        if self.store.run.get(self._ended_key(request)) is not None:
            raise SilodpError(
                f"silo '{session.name}' has ended its transfers, because a request failed their check: begin a new "
                "run, and find out who altered it.",
                code="session.transfers_ended",
            )
        packed = self.store.run.get(self._transfers_key(request))
        if packed is None:
            raise SilodpError(
                f"silo '{self.member.identity.name}' was asked for transfers it has no base for.",
                code="session.no_transfers",
            )
        return FirstSilo(self._shares(request.run), TransferSender.unpack(packed, 0))

    def _session(self, request: Message) -> Session:
        return self.member.session(request.run, request.fields["session"])


def weight_kinds(spec: RunSpec, constants: ShareConstants, name: str) -> tuple[MessageType, ...]:
    """Return the messages of the set-up of shares, as the silo of this name is asked them."""
    plan, users = constants.reciprocals(spec, bytes(32).hex()), spec.population.users
    session: dict[str, Check] = {"session": is_digest}
    group, _ = _make_count_group(plan, spec.names)
    counts = MessageType(
        "masked counts",
        MessageSchema(session),
        MessageSchema(arrays={"masked": Array(group.dtype.name, (users,))}),
    )
    if name != spec.names[0]:
        return (counts,)
    base = MessageType(
        "base",
        MessageSchema(session, blobs={"offer": Blob.of(OFFER_BYTES)}),
        MessageSchema(blobs={"reply": Blob.of(REPLY_BYTES)}),
    )
    reciprocals = _lookup_kind("reciprocals", users, plan.modulus)
    return (base, counts, reciprocals, *(() if constants.ratio is None else choice_kinds()))


def sampling_kinds(spec: RunSpec, constants: ShareConstants, name: str) -> tuple[MessageType, ...]:
    """Return the messages that the silo of this name is asked in a round before its update."""
    ratio, users = constants.ratio, spec.population.users
    if name != spec.names[0] or not spec.method.samples_users:
        return ()
    if ratio is None:
        return (_lookup_kind("sample", users, 2),)
    choice = {"choice": choice_blob(spec, ratio)}
    return _lookup_kind("sample", users, ratio.denominator, choice), chosen_kind(spec, ratio, 1, 8)


def _lookup_kind(name: str, users: int, size: int, more: Mapping[str, Blob] | None = None) -> MessageType:
    return MessageType(
        name,
        MessageSchema({"session": is_digest}, blobs={"request": Blob.of(lookup.request_bytes(users, size))}),
        MessageSchema(blobs={"answer": Blob.of(lookup.answer_bytes(users, size)), **(more or {})}),
    )
