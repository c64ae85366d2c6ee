"""Shares of the weights 1/N[u], between the server and the silos; nobody learns a count (docs/protocols.md, section 3).

Set-up, once in a session: masked counts to the server, base transfers with silo 0, one lookup per person. With user
sampling, one transfer per person and round; where nobody is to know the sample, two lookups. Silo 0 is the first on the
roster; it must answer where persons are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from silodp.aggregators._key_agreement import SessionInfo, SiloKeyAgreement, current
from silodp.aggregators._private_sampling import (
    OtClient,
    OtServer,
    blame_silo,
    choice_blob,
    choice_kinds,
    chosen_kind,
    sampling_ratio,
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
    Server,
    SiloShares,
    answer_unknown,
)
from silodp.crypto.secure_aggregation import RoundAttempt, Unsigned, WordGroup, apply_pair_masks, sum_values
from silodp.errors import SilodpError
from silodp.wire.messages import Message
from silodp.wire.schemas import Array, Blob, Check, Kind, Schema, is_digest
from silodp.wire.store import RoundStore, Store

Shares = NDArray[np.uint64]
_USE = "sample of the round"
_SHARES = "weights/shares"


@dataclass(frozen=True)
class Constants:
    """n_max, k and T: what `ReciprocalParameters` needs besides the session; P, where nobody may know the sample."""

    count_cap: int
    weight_bits: int
    word_bits: int
    places: int | None = None

    def plan(self, setting: RunSpec, session: str) -> ReciprocalParameters:
        """For one session."""
        cap = setting.population.silos * self.count_cap
        return ReciprocalParameters(
            bytes.fromhex(session), setting.population.users, cap, self.weight_bits, self.word_bits
        )

    def law(self, setting: RunSpec) -> SamplingRatio | None:
        """How persons are drawn, where nobody is to know whom."""
        return sampling_ratio(setting.method, self.places)


def _counted(plan: ReciprocalParameters, roster: tuple[str, ...]) -> tuple[WordGroup, RoundAttempt]:
    return WordGroup(plan.users, plan.modulus.bit_length() - 1), RoundAttempt(0, 0, 0, roster, "counts")


@dataclass(frozen=True)
class ServerShares:
    """The server's shares a_u of the weights, and a'_u of the sampled ones. Kept durably: each is drawn once."""

    setting: RunSpec
    constants: Constants
    desk: ServerContext

    def set_up(self, met: SessionInfo) -> None:
        """Masked counts, base transfers, one lookup per person."""
        plan, run = self.constants.plan(self.setting, met.session), self.setting.run
        zero = self.setting.names[0]
        base = BaseTransfers(plan.session, SERVER_CHOOSES)
        offered = self._ask_zero("base", met, offer=base.offer)
        receiver = blame_silo(zero, lambda: base.receiver(offered.blobs["reply"]))
        request = Message("masked counts", run, 0, met.number, {"session": met.session})
        counts = self.desk.ask_all({name: request for name in self.setting.names})
        group, _ = _counted(plan, self.setting.names)
        masked = [answer.arrays["masked"].copy() for answer in counts.values()]
        counted: Unsigned = sum_values(masked, group)  # N[u] + ρ_u modulo M
        awaited = Server(plan, receiver).set_up(counted)
        answer = self._ask_zero("reciprocals", met, request=awaited.message)
        shares = blame_silo(zero, lambda: awaited.finish(answer.blobs["answer"]))
        if self.constants.law(self.setting) is not None:
            OtServer(self.setting, self.desk).set_up(met)
        self._keep(
            self.desk.store.run,
            _SHARES,
            {"shares": shares},
            {"receiver": receiver.pack()},
            {"counter": receiver.counter},
        )

    def of_round(self, round_: int, sample: NDArray[np.bool_] | None) -> Shares:
        """Shares of v_u, or of β_u·v_u for a sample β (U,)."""
        kept = self._kept()
        if sample is None:
            return kept.arrays["shares"]
        done = self.desk.store.round(round_).get("weights")
        if done is not None:
            return Message.decode(done).arrays["shares"]
        awaited = self._awaited(round_, sample, kept)
        answer = self._ask_zero("sample", current(self.desk.store.run), round_, request=awaited.message)
        shares = blame_silo(self.setting.names[0], lambda: awaited.finish(answer.blobs["answer"]))
        self._keep(self.desk.store.round(round_), "weights", {"shares": shares})
        return shares

    def of_hidden_round(self, round_: int, law: SamplingRatio) -> tuple[Shares, dict[str, bytes]]:
        """Shares of β_u·v_u for a sample that nobody knows; and silo 0's part, sealed for each other silo."""
        done = self.desk.store.round(round_).get("weights")
        if done is not None:
            return Message.decode(done).arrays["shares"], Message.decode(done).blobs
        kept, offers = self._kept(), OtServer(self.setting, self.desk)
        awaited = self._awaited(round_, law, kept)
        asked = offers.asked(round_, request=awaited.message)
        shares = blame_silo(self.setting.names[0], lambda: awaited.finish(asked.blobs["answer"]))
        own = kept.arrays["shares"]
        boxes = offers.passed_on(
            round_,
            asked,
            lambda sender, choice: answer_unknown(sender, awaited, law, own, choice),
        )
        self._keep(self.desk.store.round(round_), "weights", {"shares": shares}, boxes)
        return shares, boxes

    def _awaited(self, round_: int, drawn: NDArray[np.bool_] | SamplingRatio, kept: Message) -> PendingLookup:
        """The request of a round, stored before it is sent: a second one would show where the two differ."""
        plan = self.constants.plan(self.setting, current(self.desk.store.run).session)
        stored = self.desk.store.round(round_).get("weights asked")
        if stored is None:
            receiver = TransferReceiver.unpack(kept.blobs["receiver"], kept.fields["counter"])
            server, shares = Server(plan, receiver), kept.arrays["shares"]
            awaited = (
                server.sample_unknown(round_, drawn)
                if isinstance(drawn, SamplingRatio)
                else server.sample(round_, shares, drawn.astype(np.int64))
            )
            parts = {"own": awaited.own}, {"part": awaited.part.pack()}
            self._keep(self.desk.store.round(round_), "weights asked", *parts)
            return awaited
        old = Message.decode(stored)
        return PendingLookup(plan, Lookup.unpack(old.blobs["part"]), old.arrays["own"])

    def _ask_zero(self, kind: str, met: SessionInfo, round_: int = 0, **blobs: bytes) -> Message:
        number = 0 if kind == "sample" else met.number
        request = Message(kind, self.setting.run, round_, number, {"session": met.session}, blobs=blobs)
        zero = self.setting.names[0]
        return self.desk.ask_all({zero: request})[zero]

    def _keep(
        self,
        store: Store,
        key: str,
        arrays: dict[str, np.ndarray],
        blobs: dict[str, bytes] | None = None,
        fields: dict[str, int] | None = None,
    ) -> None:
        kept = Message("kept", self.setting.run, fields=fields or {}, arrays=arrays, blobs=blobs or {})
        store.put(key, kept.encode())

    def _kept(self) -> Message:
        stored = self.desk.store.run.get(_SHARES)
        if stored is None:
            raise SilodpError(
                "the server holds no shares of the weights: its store is lost; begin a new run.",
                code="session.missing",
            )
        return Message.decode(stored)


@dataclass(frozen=True)
class SiloWeights:
    """A silo's shares, and silo 0's tables. Each is given once in a session, or in one of its rounds: see its gate."""

    setting: RunSpec
    constants: Constants
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
    def capped(self) -> NDArray[np.int64]:
        """min(n[s,u], n_max)."""
        return np.minimum(self.counts, self.constants.count_cap)

    def of_round(self, request: Message) -> Shares:
        """This silo's shares of v_u, or of β_u·v_u, for the round of a request."""
        if self._choices is not None:
            return np.frombuffer(self._choices.of_round(request), "<u8").astype(np.uint64)
        silo = self._shares(request.run)
        return silo.masks(request.round, _USE) if self.setting.method.samples_users else silo.shares()

    @cached_property
    def _choices(self) -> OtClient | None:
        law = self.constants.law(self.setting)
        if law is None:
            return None
        return OtClient(self.setting, law, self.member, self.store, self._chosen)

    def _chosen(self, request: Message, part: Lookup, answer: bytes) -> bytes:
        shares = self._shares(request.run).hidden(request.round, _USE, part).finish(answer)
        return shares.astype("<u8").tobytes()

    def _shares(self, run: str) -> SiloShares:
        session = self.member.session(run)
        return SiloShares(
            self.constants.plan(self.setting, session.transcript.hex()), self.member.group_secret(run)
        )

    def _counts(self, request: Message) -> Message:
        session, silo = self._session(request), self._shares(request.run)
        group, attempt = _counted(silo.plan, session.roster)
        value = group.from_integers(self.capped)
        if session.name == session.roster[0]:
            value = group.add(value, group.from_integers(silo.count_masks().astype(np.int64)))
        return request.answer(masked=apply_pair_masks(value, group, session, attempt))

    def _base(self, request: Message) -> Message:
        session = self._session(request)
        sender, reply = TransferSender.accept(session.transcript, SERVER_CHOOSES, request.blobs["offer"])
        self.store.run.put(self._transfers(request), sender.pack())
        return request.reply(reply=reply)

    def _reciprocals(self, request: Message) -> Message:
        return self._offered(request, self._zero(request).set_up)

    def _sample(self, request: Message) -> Message:
        zero, choices = self._zero(request), self._choices
        if choices is None:
            return self._offered(request, lambda asked: zero.sample(request.round, _USE, asked))
        answer = self._offered(
            request, lambda asked: zero.sample_unknown(request.round, _USE, choices.law, asked)
        )
        return replace(answer, blobs={**answer.blobs, "choice": choices.choice(request)})

    def _offered(self, request: Message, offer: Callable[[bytes], bytes]) -> Message:
        """The answer; a request that fails the consistency check ends the session's transfers, durably.

        Each failed check would otherwise tell a cheating server one bit of the secret that all transfers rest on.
        """
        try:
            return request.reply(answer=offer(request.blobs["request"]))
        except SilodpError:
            self.store.run.put(self._ended(request), b"ended")
            raise

    def _ended(self, request: Message) -> str:
        return f"transfers ended/{request.fields['session']}"

    def _transfers(self, request: Message) -> str:
        """Of one session: pads of another session's transfers, used again, would show counts."""
        return f"transfers/{request.fields['session']}"

    def _zero(self, request: Message) -> FirstSilo:
        session = self._session(request)
        if self.store.run.get(self._ended(request)) is not None:
            raise SilodpError(
                f"silo '{session.name}' has ended its transfers, because a request failed their check: begin a new "
                "run, and find out who altered it.",
                code="session.transfers_ended",
            )
        packed = self.store.run.get(self._transfers(request))
        if packed is None:
            raise SilodpError(
                f"silo '{self.member.identity.name}' was asked for transfers it has no base for.",
                code="session.no_transfers",
            )
        return FirstSilo(self._shares(request.run), TransferSender.unpack(packed, 0))

    def _session(self, request: Message) -> Session:
        return self.member.session(request.run, request.fields["session"])


def weight_kinds(setting: RunSpec, constants: Constants, name: str) -> tuple[Kind, ...]:
    """The set-up of shares, as the silo of this name is asked."""
    plan, users = constants.plan(setting, bytes(32).hex()), setting.population.users
    session: dict[str, Check] = {"session": is_digest}
    group, _ = _counted(plan, setting.names)
    counts = Kind(
        "masked counts", Schema(session), Schema(arrays={"masked": Array(group.dtype.name, (users,))})
    )
    if name != setting.names[0]:
        return (counts,)
    base = Kind(
        "base",
        Schema(session, blobs={"offer": Blob.of(OFFER_BYTES)}),
        Schema(blobs={"reply": Blob.of(REPLY_BYTES)}),
    )
    reciprocals = _lookup_kind("reciprocals", users, plan.modulus)
    return (base, counts, reciprocals, *(() if constants.law(setting) is None else choice_kinds()))


def sampling_kinds(setting: RunSpec, constants: Constants, name: str) -> tuple[Kind, ...]:
    """What the silo of this name is asked in a round before its update."""
    law, users = constants.law(setting), setting.population.users
    if name != setting.names[0] or not setting.method.samples_users:
        return ()
    if law is None:
        return (_lookup_kind("sample", users, 2),)
    choice = {"choice": choice_blob(setting, law)}
    return _lookup_kind("sample", users, law.places, choice), chosen_kind(setting, law, 1, 8)


def _lookup_kind(name: str, users: int, size: int, more: Mapping[str, Blob] | None = None) -> Kind:
    return Kind(
        name,
        Schema({"session": is_digest}, blobs={"request": Blob.of(lookup.request_bytes(users, size))}),
        Schema(blobs={"answer": Blob.of(lookup.answer_bytes(users, size)), **(more or {})}),
    )
