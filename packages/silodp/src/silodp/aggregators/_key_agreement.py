"""Key agreement among silos through a server that only relays.

Every silo sends an X25519 key and a nonce signed by its long-term key, which the others have pinned; the session id is
the hash of all of them and of the run's public constants.

Source: docs/protocols.md, section 2; the first rounds of Bonawitz et al. (CCS 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from silodp.crypto.keys import OVERHEAD_BYTES, ClientHello, HandshakeState, Identity, Session
from silodp.errors import SilodpError
from silodp.wire.messages import Message
from silodp.wire.schemas import HELLO, Blob, MessageSchema, MessageType, is_digest
from silodp.wire.store import Store

if TYPE_CHECKING:
    from silodp.aggregators.base import ServerContext
    from silodp.aggregators.run_spec import RunSpec

_READY, _NUMBER = "session ready", "session number"

_GREETING = Blob(1, 4096)  # JSON: a name of up to 100 characters of 12 bytes, and 192 bytes in hexadecimal
_SIGNATURE, _SEALED = Blob.of(64), Blob.of(32 + OVERHEAD_BYTES)


def key_agreement_kinds(names: tuple[str, ...], silo: str) -> tuple[MessageType, MessageType, MessageType]:
    """Return the messages of the key agreement as the named silo is asked them; `names`: all silos, in order."""
    order, peers = list(names), [name for name in names if name != silo]
    signatures = {f"signature/{name}": _SIGNATURE for name in names}
    hellos = MessageSchema({"order": lambda value: value == order}, blobs=dict.fromkeys(names, _GREETING))
    seen = MessageSchema(blobs={"signature": _SIGNATURE, **{f"to/{name}": _SEALED for name in peers}})
    confirm = MessageSchema(blobs={**signatures, **{f"sealed/{name}": _SEALED for name in peers}})
    return (
        MessageType(HELLO, answer=MessageSchema(blobs={"hello": _GREETING})),
        MessageType("roster", hellos, seen),
        MessageType("confirm", confirm, MessageSchema({"session": is_digest})),
    )


Ask = Callable[[dict[str, Message]], dict[str, Message]]
"""Send requests to silos, all of which must answer."""


@dataclass(frozen=True)
class SessionInfo:
    """A session as the server knows it.

    Attributes:
        session: The id: SHA-256 of the transcript, in hexadecimal.
        number: The number of the session in the run, counted from 0.
    """

    session: str
    number: int


def set_up(
    spec: RunSpec, context: ServerContext, prepare: Callable[[SessionInfo], None] = lambda info: None
) -> None:
    """Set up the run's session: let the silos agree on keys, then call `prepare`; do nothing if one is set up.

    A set-up that was interrupted is not continued: it begins anew, as another session with other secrets.

    Args:
        spec: the public constants of the run.
        context: the server.
        prepare: exchanges what else a session needs; by default nothing.
    """
    store = context.store.run
    if store.get(_READY) is not None:
        return
    stored = store.get(_NUMBER)
    number = 0 if stored is None else int(stored) + 1
    # Counted before the first message: secrets of a session that was interrupted are never used by a later one.
    store.put(_NUMBER, str(number).encode())
    info = SessionInfo(run_key_agreement(spec.run, spec.names, context.ask_all, number), number)
    prepare(info)
    fields = {"session": info.session, "number": number}
    store.put(_READY, Message("session", spec.run, fields=fields).encode())


def current_session(store: Store) -> SessionInfo:
    """Return the session that was set up.

    Raises:
        SilodpError: there is none.
    """
    stored = store.get(_READY)
    if stored is None:
        raise SilodpError("the silos have no session yet: begin a new run.", code="session.missing")
    return SessionInfo(**Message.decode(stored).fields)


def run_key_agreement(run: str, names: tuple[str, ...], ask: Ask, number: int = 0) -> str:
    """Relay keys, signatures and sealed contributions between silos, and return the session's id.

    Args:
        run: the run's id.
        names: the silos, in order.
        ask: sends requests.
        number: of the session in the run, counted from 0.

    Raises:
        SilodpError: the silos have computed different session ids.
    """
    # Round 1: every silo's signed keys. Round 2: every silo gets all of them, signs what it saw, and seals its part of
    # the common secret to each other silo. Round 3: every silo checks these signatures and opens the parts.
    answers = ask(dict.fromkeys(names, Message(HELLO, run, attempt=number)))
    hellos = {name: answer.blobs["hello"] for name, answer in answers.items()}
    roster = Message("roster", run, 0, number, {"order": list(names)}, blobs=hellos)
    seen = ask(dict.fromkeys(names, roster))
    confirm: dict[str, Message] = {}
    for name in names:
        blobs = {f"signature/{peer}": seen[peer].blobs["signature"] for peer in names}
        blobs |= {f"sealed/{peer}": seen[peer].blobs[f"to/{name}"] for peer in names if peer != name}
        confirm[name] = Message("confirm", run, attempt=number, blobs=blobs)
    # Silos have checked each other's transcripts, so only an error of theirs ends here; without this check the masks
    # would not cancel, and the first sum would be noise.
    sessions = {answer.fields["session"] for answer in ask(confirm).values()}
    if len(sessions) != 1:
        raise SilodpError(
            "the silos ended their set-up in different sessions: begin a new run.", code="session.altered"
        )
    return str(sessions.pop())


@dataclass(frozen=True)
class SiloKeyAgreement:
    """A silo's side of the key agreement, and its durable memory of the session.

    Attributes:
        identity: The silo's long-term key pair.
        pins: The long-term Ed25519 public keys of all silos of the run, 32 bytes each, by name.
        constants: The digest of the public constants, as this silo knows them.
        store: The entries of the silo's store that last as long as the run.
    """

    identity: Identity
    pins: Mapping[str, bytes]
    constants: str
    store: Store
    _last_session: dict[tuple[object, ...], Session] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def handlers(self) -> dict[str, Callable[[Message], Message]]:
        """The functions that answer the requests of the key agreement, by kind of request."""
        return {HELLO: self._hello, "roster": self._roster, "confirm": self._confirm}

    def session(self, run: str, session: str | None = None) -> Session:
        """Return the session confirmed last.

        Args:
            run: the run's id.
            session: the id of the session that a request names; None: not compared.

        Raises:
            SilodpError: there is none, or it is not the one that a request names.
        """
        number = self.store.get("session/confirmed")
        if number is None:
            raise SilodpError(
                f"silo '{self.identity.name}' has no confirmed session in run {run}: it was never set up, or its store "
                "is lost; begin a new run.",
                code="session.missing",
            )
        info = self._load_session(run, int(number))
        if session is not None and session != info.transcript.hex():
            raise SilodpError(
                f"silo '{self.identity.name}' was asked in the name of another session: an old message was played "
                "back, or the server has lost its state; nothing was sent.",
                code="session.unknown",
            )
        return info

    def session_of(self, request: Message) -> Session:
        """Return the session that a request names; raise as `session` does."""
        return self.session(request.run, request.fields["session"])

    def group_secret(self, run: str) -> bytes:
        """Return R (32 bytes), which all silos of the session know and the server does not."""
        self.session(run)
        number = int(self._load_kept("confirmed"))
        return Message.decode(self._load_kept(f"group/{number}")).blobs["group"]

    def _hello(self, request: Message) -> Message:
        opening = HandshakeState.fresh(self.identity, request.run)
        secret = {name: getattr(opening, name) for name in ("ephemeral", "nonce", "seal", "contribution")}
        kept = Message("opening", request.run, blobs=secret).encode()
        # Secrets are on disk before their public part is sent: a repeated request gets the same greeting.
        self.store.put(f"session/opening/{request.attempt}", kept)
        return request.reply(hello=opening.hello.to_bytes())

    def _roster(self, request: Message) -> Message:
        # Kept as it came: the session is computed anew from it after a restart, with all its checks.
        self.store.put(f"session/roster/{request.attempt}", request.encode())
        session = self._load_session(request.run, request.attempt)
        sealed = {f"to/{peer}": box for peer, box in session.seal_contributions().items()}
        return request.reply(signature=session.signature(), **sealed)

    def _confirm(self, request: Message) -> Message:
        session = self._load_session(request.run, request.attempt)
        # Signatures first: no part is opened, and none used, of a silo that saw another transcript.
        session.confirm({n: request.blobs.get(f"signature/{n}", b"") for n in session.roster})
        group = session.group_secret({n: request.blobs.get(f"sealed/{n}", b"") for n in session.roster})
        kept = Message("group", request.run, blobs={"group": group})
        self.store.put(f"session/group/{request.attempt}", kept.encode())
        # Last, so that a session counts only when all that belongs to it is on disk.
        self.store.put("session/confirmed", str(request.attempt).encode())
        return replace(request.reply(), fields={"session": session.transcript.hex()})

    def _load_session(self, run: str, number: int) -> Session:
        """Return a session from the store.

        Its signatures are verified and its keys derived once in a process, and again if any input differs from that
        time: the stored secrets and roster, or a pin.
        """
        opening, roster = self._load_kept(f"opening/{number}"), self._load_kept(f"roster/{number}")
        read = (run, number, opening, roster, tuple(sorted(self.pins.items())))
        session = self._last_session.get(read)
        if session is None:
            session = self._agree(run, Message.decode(opening), Message.decode(roster))
            self._last_session.clear()  # secrets of earlier sessions need not stay in memory
            self._last_session[read] = session
        return session

    def _agree(self, run: str, opening: Message, roster: Message) -> Session:
        hellos = [
            ClientHello.from_bytes(roster.blobs.get(name, b""), name)
            for name in roster.fields.get("order", [])
        ]
        return HandshakeState(self.identity, run, **opening.blobs).meet(hellos, self.pins, self.constants)

    def _load_kept(self, what: str) -> bytes:
        kept = self.store.get(f"session/{what}")
        if kept is None:
            raise SilodpError(
                f"silo '{self.identity.name}' was asked to go on with a session it never began: begin a new run.",
                code="session.missing",
            )
        return kept
