"""User sampling with a sample that no party knows, for private weighting (docs/protocols.md, section 5).

    set-up   base transfers, with which silo 0, the first on the roster, later chooses entries of the server
    round    server ─ sample ─► silo 0, which answers with its request for the entries κ_u that all silos derive;
             server ─ chosen: tables made from its own secret i_u ─► silo 0, which opens its entries and answers with
             one sealed box for each other silo; every later attempt at the round carries these boxes

User u takes part if (i_u − κ_u) mod P < k; the server never knows κ, the silos never know i. Each message is
sent once in a round. Its random inputs are stored before it is sent, so that a restarted process does not draw
or ask a second time.

Source: the sub-sampling of ULDP-FL (Kato et al.); the paper states its selection rule the wrong way round,
which is corrected here. Transfers by Chou and Orlandi (LATINCRYPT 2015), extended as by Ishai et al. (CRYPTO
2003).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

from silodp.aggregators._key_agreement import SessionInfo, SiloKeyAgreement, current_session
from silodp.aggregators.base import SEALED_SAMPLE_BLOB, Handler, ServerContext
from silodp.aggregators.run_spec import RunSpec
from silodp.assumption import SILO_OPERATORS, Assumption
from silodp.crypto import sampling
from silodp.crypto.keys import OVERHEAD_BYTES
from silodp.crypto.sampling import MAX_CELLS, SILO_CHOOSES, SamplingRatio
from silodp.errors import SilodpError
from silodp.methods.base import Method
from silodp.wire.messages import Message
from silodp.wire.schemas import Blob, MessageType, session_type
from silodp.wire.store import RoundStore, Store, get_or_make, set_once
from silodp_private.crypto import lookup
from silodp_private.crypto import oblivious_transfer as ot
from silodp_private.crypto.lookup import Lookup

V = TypeVar("V")
SAMPLE_HIDDEN = Assumption(
    "hidden-sample",
    "oblivious transfer over ristretto255 hides choices, and no silo tells the server the silos' common secret, which "
    "with the server's own draws says who was sampled in every round",
    SILO_OPERATORS,
)


def sampling_ratio(method: Method, places: int | None) -> SamplingRatio | None:
    """Return k and P with k/P equal to the method's sampling rate; None where the server draws the sample.

    Raises:
        SilodpError: the rate is 1, or no multiple of 1/P; P is out of range.
    """
    if places is None:
        return None
    rate = method.common_sampling_rate
    if rate is None or (rate == 1 and method.samples_users):
        raise _refusal(
            f"hidden_sample = {places} draws everyone with the same rate, and personal.by = 'sampling' needs one for "
            "each: set personal.by = 'clip', or take hidden_sample out.",
            field="personal.by",
        )
    if rate == 1:
        raise _refusal(
            f"hidden_sample = {places} hides who is sampled, but {method.name} has user_sampling = 1: set "
            "user_sampling below 1, or take hidden_sample out."
        )
    if not 2 <= places <= MAX_CELLS:
        raise _refusal(
            f"hidden_sample = {places}: set a number of cells from 2 to {MAX_CELLS:,}.", "argument.value"
        )
    # Compared as floats, exactly: the rate that is charged must be the rate at which cells are drawn.
    drawn = round(rate * places)
    if drawn < 1 or drawn / places != rate:
        # The float 0.1 is not 1/10: the nearest fraction of a small denominator is what the user means, if it is equal
        # as a float.
        nearest = Fraction(rate).limit_denominator(MAX_CELLS)
        does = float(nearest) == rate
        remedy = (
            f"hidden_sample = {nearest.denominator}" if does else f"user_sampling = {max(drawn, 1)}/{places}"
        )
        raise _refusal(
            f"hidden_sample = {places} needs a rate of k/{places}, and user_sampling = {rate} is no such rate: "
            f"set {remedy}."
        )
    return SamplingRatio(drawn, places)


def _refusal(text: str, code: str = "argument.conflict", field: str = "hidden_sample") -> SilodpError:
    return SilodpError(text, code=code, field=field)


def blame_silo(silo: str, finish: Callable[[], V]) -> V:
    """Call `finish`; if it raises, name the silo whose answer was wrong in the error."""
    try:
        return finish()
    except SilodpError as error:
        raise SilodpError(f"silo '{silo}': {error}", code=error.code) from None


CHOICE_SETUP = (
    session_type("choice base", answer={"offer": Blob.of(ot.OFFER_BYTES)}),
    session_type("choice keys", {"reply": Blob.of(ot.REPLY_BYTES)}),
)
"""The types of the two set-up messages for base transfers; they are sent to silo 0 only."""


def choice_blob(spec: RunSpec, ratio: SamplingRatio) -> Blob:
    """Return the type of silo 0's request for its entries of a round; a table has P entries."""
    return Blob.of(lookup.request_bytes(spec.population.users, ratio.denominator))


def sealed_sample_blob(spec: RunSpec, entry: int) -> Blob:
    """Return the type of what silo 0 seals for one other silo: `entry` bytes for each user."""
    return Blob.of(spec.population.users * entry + OVERHEAD_BYTES)


def chosen_type(spec: RunSpec, ratio: SamplingRatio, entry: int) -> MessageType:
    """Return the type of the message that sends silo 0 the tables of entries of `entry` bytes, and of its answer."""
    tables = lookup.answer_bytes(spec.population.users, ratio.denominator, entry)
    sealed = {f"to/{name}": sealed_sample_blob(spec, entry) for name in spec.names[1:]}
    return session_type("chosen", {"answer": Blob.of(tables)}, sealed)


@dataclass(frozen=True)
class OtServer:
    """The server's side: it offers tables to silo 0, and does not learn which entries silo 0 takes."""

    spec: RunSpec
    context: ServerContext

    def ask(self, info: SessionInfo, kind: str, round_: int | None = None, **blobs: bytes) -> Message:
        """Ask silo 0 at the set-up, or before the update of a round; raise if it does not answer.

        Args:
            info: the session.
            kind: the kind of the request.
            round_: counted from 0; None at the set-up, whose requests bear the number of the session.
            blobs: the byte strings of the request.
        """
        place = (0, info.number) if round_ is None else (round_, 0)
        request = Message(kind, self.spec.run, *place, {"session": info.session}, blobs=blobs)
        return self.context.ask_all({self.spec.names[0]: request})[self.spec.names[0]]

    def set_up(self, info: SessionInfo) -> None:
        """Make the base transfers; the server's part of them is stored before silo 0 can use them."""
        zero = self.spec.names[0]
        offer = self.ask(info, "choice base").blobs["offer"]
        session = bytes.fromhex(info.session)
        sender, reply = blame_silo(zero, lambda: ot.TransferSender.accept(session, SILO_CHOOSES, offer))
        # The secret choices of the base transfers must survive a crash: silo 0 takes no second reply.
        self.context.store.run.put("hidden/transfers", sender.pack())
        self.ask(info, "choice keys", reply=reply)

    def request_sample(self, round_: int, **request: bytes) -> Message:
        """Ask silo 0 to send its request for entries of this round's tables.

        `request` holds the server's own lookup request to silo 0, where the aggregator has one.
        """
        info = current_session(self.context.store.run)
        return self.ask(info, "sample", round_, **request)

    def relay_entries(
        self, round_: int, asked: Message, offer: Callable[[ot.TransferSender, bytes], bytes]
    ) -> dict[str, bytes]:
        """Offer silo 0 its entries, and return what it sealed for each other silo.

        Args:
            round_: counted from 0.
            asked: the answer to `request_sample`.
            offer: makes the tables' encryption for a request.

        Raises:
            SilodpError: silo 0 sends a second request for the round that differs from the first, or its request
                fails the consistency check; after a failed check nothing more is offered in this run.
        """
        zero, store = self.spec.names[0], self.context.store.run
        choice = asked.blobs["choice"]
        sender = ot.TransferSender.unpack(store.get("hidden/transfers") or b"", 0)
        # The digest of the first request is stored before anything is answered, so that a restart does not answer two.
        if not set_once(self.context.store.round(round_), "hidden choice", hashlib.sha256(choice).digest()):
            raise SilodpError(
                f"silo '{zero}' sent a second, different request for entries of round {round_ + 1}: with two "
                "entries of one person it could compute the server's share; nothing was sent.",
                code="crypto.reused",
            )
        if store.get("hidden/ended") is not None:
            raise SilodpError(
                f"a request of silo '{zero}' failed the check of its transfers, which has ended them: begin a new run, "
                "and find out who altered it.",
                code="session.transfers_ended",
            )
        try:
            offered = blame_silo(zero, lambda: offer(sender, choice))
        except SilodpError:
            # Every further check would tell silo 0 one bit of the secret that all transfers rest on; a request of the
            # wrong length tells none.
            if sender.has_ended:
                store.put("hidden/ended", b"ended")
            else:
                self.context.store.round(round_).drop("hidden choice")
            raise
        info = current_session(store)
        answer = self.ask(info, "chosen", round_, answer=offered)
        return {name: answer.blobs[f"to/{name}"] for name in self.spec.names[1:]}


@dataclass(frozen=True)
class OtClient:
    """A silo's side: silo 0 chooses for all silos, and seals what it received for each of the others.

    Attributes:
        spec: The public constants of the run.
        ratio: The sampling rate k/P.
        member: The silo's side of the key agreement.
        store: The silo's store.
        opened: A function of a round's "chosen" request, silo 0's lookup and the server's answer, which returns the
            bytes that silos need.
    """

    spec: RunSpec
    ratio: SamplingRatio
    member: SiloKeyAgreement
    store: RoundStore
    opened: Callable[[Message, Lookup, bytes], bytes] = field(repr=False)

    @property
    def handlers(self) -> dict[str, Handler]:
        """The functions that answer silo 0's requests, by kind of request."""
        return {"choice base": self._base, "choice keys": self._keys, "chosen": self._answer_chosen}

    def sample(self, request: Message) -> Message:
        """Answer "sample" with silo 0's request for a round's entries, where nothing else is asked."""
        self.member.session_of(request)
        return request.reply(choice=self.choice(request))

    def choice(self, request: Message) -> bytes:
        """Return silo 0's request for a round's entries; every call returns the same bytes."""
        return self._lookup(request).message

    def round_entries(self, request: Message) -> bytes:
        """Return the entries chosen for a round: from silo 0's store, or from the box that it sealed for this silo.

        Raises:
            SilodpError: there is none, or the box was not sealed by silo 0 for this silo and round.
        """
        session = self.member.session(request.run)
        zero = session.roster[0]
        if session.name != zero:
            return session.decrypt(zero, request.blobs[SEALED_SAMPLE_BLOB], *_use(request))
        entries = self.store.round(request.round).get("drawn")
        if entries is None:
            raise SilodpError(
                f"silo '{zero}' was asked for round {request.round + 1} before it chose for it: nothing was sent.",
                code="gate.order",
            )
        return entries

    def _base(self, request: Message) -> Message:
        base = ot.BaseTransfers(self.member.session_of(request).transcript, SILO_CHOOSES)
        self.store.run.put(self._place(request, "choice base"), base.pack())
        return request.reply(offer=base.offer)

    def _keys(self, request: Message) -> Message:
        self.member.session_of(request)
        # Once: the stored offer is dropped when its reply was taken, since a second reply would reuse every stream.
        base = ot.BaseTransfers.unpack(self._load_stored(request, "choice base"))
        receiver = base.receiver(request.blobs["reply"])
        self.store.run.put(self._place(request, "choices"), receiver.pack())
        self.store.run.drop(self._place(request, "choice base"))
        return request.reply()

    def _answer_chosen(self, request: Message) -> Message:
        session = self.member.session_of(request)
        # The same for all silos. Silo 0 keeps it for itself and encrypts it to each other silo, through the server.
        drawn = self.opened(request, self._lookup(request), request.blobs["answer"])
        self.store.round(request.round).put("drawn", drawn)
        return request.reply(
            **{f"to/{peer}": session.encrypt(peer, drawn, *_use(request)) for peer in session.roster[1:]}
        )

    def _place(self, request: Message, what: str) -> str:
        """Return a key for one session: base transfers must not serve two."""
        return f"{what}/{request.fields['session']}"

    def _lookup(self, request: Message) -> Lookup:
        def ask() -> bytes:
            receiver = ot.TransferReceiver.unpack(self._load_stored(request, "choices"), 0)
            secret = self.member.group_secret(request.run)
            session, users = self.member.session(request.run).transcript, self.spec.population.users
            cells = sampling.derive_silo_cells(secret, session, users, self.ratio, request.round)
            counter = sampling.transfer_counter(request.round)
            return Lookup.ask(receiver, counter, cells, self.ratio.denominator).pack()

        # Stored before it is sent: two requests for one round would show combinations of the choices.
        return Lookup.unpack(get_or_make(self.store.round(request.round), "choice", ask))

    def _load_stored(self, request: Message, what: str) -> bytes:
        return load_transfers(self.store.run, self._place(request, what), self.member.identity.name)


def load_transfers(store: Store, key: str, silo: str) -> bytes:
    """Return a silo's stored transfers; raise if it has none (code session.no_transfers)."""
    stored = store.get(key)
    if stored is None:
        raise SilodpError(
            f"silo '{silo}' was asked for transfers it has no base for: begin a new run.",
            code="session.no_transfers",
        )
    return stored


def _use(request: Message) -> tuple[str | int, ...]:
    """Return the purpose that the keys of a round's boxes are derived for."""
    return SEALED_SAMPLE_BLOB, request.round
