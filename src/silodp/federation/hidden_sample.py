"""Sampling that nobody knows (docs/protocols.md, section 5): what `lattice` and `paillier` share of it.

    set-up   base transfers in which silo 0, the first on the roster, will choose among what the server offers
    round    server ─ sample ─► silo 0, which answers with its request for the entries κ_u that all silos derive;
             server ─ chosen: tables made from its own secret i_u ─► silo 0, which opens its entries and answers with
             one sealed box for each other silo; every later attempt at the round carries these boxes

β_u is decided by i_u and κ_u together; the server never knows κ, the silos never i. Each message is sent once in a
round, and what makes it is kept durably first, so that no restart draws, or asks, a second time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from silodp.crypto import hidden_sample
from silodp.crypto.hidden_sample import MOST_PLACES, SILO_CHOOSES, OneOf
from silodp.crypto.keys import Session
from silodp.crypto.lookup import Lookup
from silodp.crypto.oblivious_transfer import BaseTransfers, TransferReceiver, TransferSender
from silodp.errors import SilodpError
from silodp.federation.aggregation import Desk, Handler, Setting
from silodp.federation.messages import Message
from silodp.federation.sessions import Member, Met, current
from silodp.federation.store import Store, claim
from silodp.methods.method import Method

V = TypeVar("V")
ASSUMPTION = (
    "oblivious transfer over ristretto255 hides choices, and no silo tells the server the silos' common secret, which "
    "with the server's own draws says who was sampled in every round"
)
_TAG = 16  # bytes of authentication
BOX = "sampled"
"""The blob of a request that holds what silo 0 passed on, to be opened by the silo that is asked."""


def law_of(method: Method, places: int | None) -> OneOf | None:
    """k of P, so that k/P is the method's sampling rate; None where the server draws the sample.

    Raises:
        SilodpError: the rate is 1, or no k/P.
    """
    if places is None:
        return None
    rate = float(getattr(method, "user_sampling", 1.0))
    if rate == 1:
        raise SilodpError(
            f"hidden_sample = {places} hides whom one rate for all draws, and {method.name} has user_sampling = 1: set "
            "it below 1, or take hidden_sample out."
        )
    if not 2 <= places <= MOST_PLACES:
        raise SilodpError(f"hidden_sample = {places}: set a number of cells from 2 to {MOST_PLACES:,}.")
    drawn = round(rate * places)
    if drawn < 1 or drawn / places != rate:
        nearest = Fraction(rate).limit_denominator(MOST_PLACES)
        does = float(nearest) == rate
        remedy = (
            f"hidden_sample = {nearest.denominator}" if does else f"user_sampling = {max(drawn, 1)}/{places}"
        )
        raise SilodpError(
            f"hidden_sample = {places} draws persons at a rate of k/{places}, and user_sampling = {rate} is none: set "
            f"{remedy}."
        )
    return OneOf(drawn, places)


def named(silo: str, finish: Callable[[], V]) -> V:
    """The result, or an error that names the silo whose answer did not fit."""
    try:
        return finish()
    except SilodpError as error:
        raise SilodpError(f"silo '{silo}': {error}") from None


def as_zero(member: Member, request: Message, what: str, *use: int) -> Session:
    """The session of a request that only silo 0 answers, once in a session (and use)."""
    session = member.session(request.run)
    if session.name != session.roster[0]:
        raise SilodpError(
            f"silo '{session.name}' was asked to {what}, which only silo '{session.roster[0]}' does."
        )
    return member.once(request, *use)


@dataclass(frozen=True)
class Offers:
    """The server's side: it offers silo 0 tables, and does not learn which entries it takes."""

    setting: Setting
    desk: Desk

    def set_up(self, met: Met) -> None:
        """Base transfers; the server's own part of them is kept before silo 0 can use them."""
        zero = self.setting.names[0]
        offer = self._ask("choice base", met, 0, met.number).blobs.get("offer", b"")
        session = bytes.fromhex(met.session)
        sender, reply = named(zero, lambda: TransferSender.accept(session, SILO_CHOOSES, offer))
        self.desk.store.put("hidden/transfers", sender.pack())
        self._ask("choice keys", met, 0, met.number, reply=reply)

    def asked(self, round_: int, request: bytes = b"") -> Message:
        """Silo 0's request for its entries of this round's tables, and its answer to the server's own `request`."""
        return self._ask("sample", current(self.desk.store), round_, 0, request=request)

    def passed_on(
        self, round_: int, asked: Message, size: int, offer: Callable[[TransferSender, bytes], bytes]
    ) -> dict[str, bytes]:
        """What silo 0 sealed for each other silo, `size` bytes of the entries it opened of what `offer` makes.

        Raises:
            SilodpError: silo 0 asks a second time or passes on something else; or its request fails the check, after
                which nothing is offered.
        """
        zero, store = self.setting.names[0], self.desk.store
        choice = asked.blobs.get("choice", b"")
        sender = TransferSender.unpack(store.get("hidden/transfers") or b"", 0)
        if not claim(store, f"hidden/choice {round_}", hashlib.sha256(choice).digest()):
            raise SilodpError(
                f"silo '{zero}' asked for entries of round {round_ + 1} a second time, otherwise than the first time: "
                "two entries of one person would show the server's share; nothing was sent."
            )
        if store.get("hidden/ended") is not None:
            raise SilodpError(
                f"a request of silo '{zero}' failed the check of its transfers, which has ended them: begin a new run, "
                "and find out who altered it."
            )
        try:
            offered = named(zero, lambda: offer(sender, choice))
        except SilodpError:
            # Every further check would tell one bit of the secret that all transfers rest on; a cut request tells none.
            if sender.ended:
                store.put("hidden/ended", b"ended")
            else:
                store.drop(f"hidden/choice {round_}")
            raise
        answer = self._ask("chosen", current(store), round_, 0, answer=offered)
        boxes = {name: answer.blobs.get(f"to/{name}", b"") for name in self.setting.names[1:]}
        for name, box in boxes.items():
            if len(box) != size + _TAG:
                raise SilodpError(
                    f"silo '{zero}' passed on {len(box)} bytes to silo '{name}' where {size + _TAG} were due: it runs "
                    "another version, or was altered; nothing was sent."
                )
        return boxes

    def _ask(self, kind: str, met: Met, round_: int, number: int, **blobs: bytes) -> Message:
        request = Message(kind, self.setting.run, round_, number, {"session": met.session}, blobs=blobs)
        zero = self.setting.names[0]
        return self.desk.ask_all({zero: request})[zero]


@dataclass(frozen=True)
class Choices:
    """A silo's side: silo 0 chooses for all, and seals what it got for each of the others.

    `opened` makes of a round, silo 0's request and the server's answer what the silos need of it.
    """

    setting: Setting
    law: OneOf
    member: Member
    store: Store
    opened: Callable[[Message, Lookup, bytes], bytes]

    @property
    def handlers(self) -> dict[str, Handler]:
        """By kind of request."""
        return {"choice base": self._base, "choice keys": self._keys, "chosen": self._chosen}

    def sample(self, request: Message) -> Message:
        """Silo 0's request for a round's entries, where it is asked for nothing else."""
        as_zero(self.member, request, "choose for all silos", request.round)
        return request.reply(choice=self.choice(request))

    def choice(self, request: Message) -> bytes:
        """Silo 0's request for a round's entries, the same whenever it is asked for."""
        return self._lookup(request).message

    def of_round(self, request: Message) -> bytes:
        """What was chosen for a round: silo 0's own, or what it sealed for this silo.

        Raises:
            SilodpError: there is none, or the box was not sealed by silo 0 for this silo and round.
        """
        session = self.member.session(request.run)
        zero = session.roster[0]
        if session.name != zero:
            return session.decrypt(zero, request.blobs.get(BOX, b""), *_use(request))
        own = self.store.get(_key(request, "drawn"))
        if own is None:
            raise SilodpError(
                f"silo '{zero}' was asked for round {request.round + 1} before it chose for it: nothing was sent."
            )
        return own

    def _base(self, request: Message) -> Message:
        session = as_zero(self.member, request, "choose for all silos")
        base = BaseTransfers(session.transcript, SILO_CHOOSES)
        self.store.put(f"{request.run}/choices/{request.attempt}/base", base.pack())
        return request.reply(offer=base.offer)

    def _keys(self, request: Message) -> Message:
        as_zero(self.member, request, "choose for all silos")
        place = f"{request.run}/choices/{request.attempt}"
        base = BaseTransfers.unpack(self._stored(f"{place}/base"))
        receiver = base.receiver(request.blobs.get("reply", b""))
        self.store.put(f"{request.run}/choices", receiver.pack())
        self.store.drop(f"{place}/base")
        return request.reply()

    def _chosen(self, request: Message) -> Message:
        session = as_zero(self.member, request, "choose for all silos", request.round)
        drawn = self.opened(request, self._lookup(request), request.blobs.get("answer", b""))
        self.store.put(_key(request, "drawn"), drawn)
        return request.reply(
            **{f"to/{peer}": session.encrypt(peer, drawn, *_use(request)) for peer in session.roster[1:]}
        )

    def _lookup(self, request: Message) -> Lookup:
        stored = self.store.get(_key(request, "choice"))
        if stored is not None:
            return Lookup.unpack(stored)
        receiver = TransferReceiver.unpack(self._stored(f"{request.run}/choices"), 0)
        session = self.member.session(request.run)
        secret, users = self.member.group_secret(request.run), self.setting.population.users
        part = hidden_sample.ask(receiver, secret, session.transcript, users, self.law, request.round)
        self.store.put(_key(request, "choice"), part.pack())
        return part

    def _stored(self, key: str) -> bytes:
        stored = self.store.get(key)
        if stored is None:
            raise SilodpError(
                f"silo '{self.member.identity.name}' was asked for transfers it has no base for: begin a new run."
            )
        return stored


def _use(request: Message) -> tuple[str | int, ...]:
    """What the keys of a round's boxes are derived for."""
    return BOX, request.round


def _key(request: Message, what: str) -> str:
    return f"{request.run}/{what}/{request.round}"
