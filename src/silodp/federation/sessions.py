"""How silos come to share keys through a server that only relays (PROTOCOLS 1): hello, roster, confirm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from silodp.crypto.keys import Hello, Identity, Opening, Session
from silodp.errors import SilodpError
from silodp.federation.messages import Message
from silodp.federation.store import Store

Ask = Callable[[dict[str, Message]], dict[str, Message]]
"""Ask silos, all of whom must answer."""


def meet(run: str, names: tuple[str, ...], ask: Ask) -> str:
    """The server's side: relay greetings, signatures and sealed contributions; gives the session's id."""
    hellos = {
        name: answer.blobs["hello"] for name, answer in ask(_to_all(names, Message("hello", run))).items()
    }
    roster = Message("roster", run, blobs=hellos, fields={"order": list(names)})
    seen = ask(_to_all(names, roster))
    confirm = {
        name: Message(
            "confirm",
            run,
            blobs={
                **{f"signature/{peer}": seen[peer].blobs["signature"] for peer in names},
                **{f"sealed/{peer}": seen[peer].blobs[f"to/{name}"] for peer in names if peer != name},
            },
        )
        for name in names
    }
    sessions = {answer.fields["session"] for answer in ask(confirm).values()}
    if len(sessions) != 1:
        raise SilodpError("the silos ended their set-up in different sessions: begin a new run.")
    return str(sessions.pop())


def _to_all(names: tuple[str, ...], message: Message) -> dict[str, Message]:
    return {name: message for name in names}


@dataclass(frozen=True)
class Member:
    """A silo's side of the set-up, and its durable memory of the session.

    `pins`: the long-term keys of all silos of the run. `constants`: what is public, as this silo knows it.
    """

    identity: Identity
    pins: Mapping[str, bytes]
    constants: str
    store: Store

    @property
    def handlers(self) -> dict[str, Callable[[Message], Message]]:
        """By kind of request."""
        return {"hello": self._hello, "roster": self._roster, "confirm": self._confirm}

    def session(self, run: str) -> Session:
        """The session, once confirmed.

        Raises:
            SilodpError: there is none.
        """
        if self.store.get(_key(run, "confirmed")) is None:
            raise SilodpError(
                f"silo '{self.identity.name}' has no confirmed session in run {run}: it was never set up, or its store "
                "is lost; begin a new run."
            )
        return self._met(run)

    def group_secret(self, run: str) -> bytes:
        """R, which all silos know."""
        self.session(run)
        return Message.decode(self._kept(run, "confirmed")).blobs["group"]

    def _hello(self, request: Message) -> Message:
        opening = Opening.fresh(self.identity, request.run)
        secret = {"ephemeral": opening.ephemeral, "nonce": opening.nonce}
        secret |= {"seal": opening.seal, "contribution": opening.contribution}
        self.store.put(_key(request.run, "opening"), Message("opening", request.run, blobs=secret).encode())
        return request.reply(hello=opening.hello.to_bytes())

    def _roster(self, request: Message) -> Message:
        self.store.put(_key(request.run, "roster"), request.encode())
        session = self._met(request.run)
        sealed = {f"to/{peer}": box for peer, box in session.sealed_contributions().items()}
        return request.reply(signature=session.signature(), **sealed)

    def _confirm(self, request: Message) -> Message:
        session = self._met(request.run)
        session.confirm({n: request.blobs.get(f"signature/{n}", b"") for n in session.roster})
        group = session.group_secret({n: request.blobs.get(f"sealed/{n}", b"") for n in session.roster})
        kept = Message("confirmed", request.run, blobs={"group": group})
        self.store.put(_key(request.run, "confirmed"), kept.encode())
        return Message(request.kind, request.run, fields={"session": session.transcript.hex()})

    def _met(self, run: str) -> Session:
        secret = Message.decode(self._kept(run, "opening")).blobs
        roster = Message.decode(self._kept(run, "roster"))
        hellos = [
            Hello.from_bytes(roster.blobs.get(name, b""), name) for name in roster.fields.get("order", [])
        ]
        return Opening(self.identity, run, **secret).meet(hellos, self.pins, self.constants)

    def _kept(self, run: str, what: str) -> bytes:
        kept = self.store.get(_key(run, what))
        if kept is None:
            raise SilodpError(
                f"silo '{self.identity.name}' was asked to go on with a session it never began: begin a new run."
            )
        return kept


def _key(run: str, what: str) -> str:
    return f"{run}/session/{what}"
