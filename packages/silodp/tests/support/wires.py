"""Ways to silos for tests: a wire that remembers what the server is sent, and lets silos fail or the wire lie; and a
channel without signatures, for tests that drive parties by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from silodp.aggregators._key_agreement import run_key_agreement
from silodp.aggregators.masked import Masked
from silodp.crypto.keys import Identity
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.methods import FederationSize
from silodp.runtime.silo import Silo
from silodp.wire.messages import Message
from silodp.wire.store import MemoryStore
from silodp.wire.transport import SIGNED_BYTES, DeliveryFailure, InProcess, SignedParty, Traffic
from support.masked import AVG
from support.oracles import logistic_task, small_federation
from support.specs import make_spec

Tamper = Callable[[str, Message], Message]


def tampered(data: bytes, tamper: Callable[[Message], Message]) -> bytes:
    """Signed bytes with another message under the old signature; the same bytes where nothing was altered."""
    message = Message.decode(data[SIGNED_BYTES:])
    other = tamper(message)
    return data if other is message else data[:SIGNED_BYTES] + other.encode()


class Wire(InProcess):
    """`fails(name, request)` says when a silo is offline: "before" it hears of the request, or "after" it answered."""

    received: list[tuple[str, Message]]
    fails: Callable[[str, Message], str | None]
    to_silo: Tamper
    to_server: Tamper

    def __init__(self, endpoints: Mapping[str, SignedParty], at_once: int = 1) -> None:
        super().__init__(endpoints, at_once)
        self.parties = dict(endpoints)
        type(self).last = self

    last: Wire

    def ask(self, requests, timeout=None):
        answers, failures = {}, {}
        for name, request in requests.items():
            when = type(self).fails(name, Message.decode(request[SIGNED_BYTES:]))
            if when == "before":
                failures[name] = DeliveryFailure("offline", "pulled out")
                continue
            sent = tampered(request, lambda message, name=name: type(self).to_silo(name, message))
            answered, failed = super().ask({name: sent})
            failures |= failed
            for answer in answered.values():
                type(self).received.append((name, Message.decode(answer[SIGNED_BYTES:])))
                if when == "after":
                    failures[name] = DeliveryFailure("timeout", "came late")
                else:
                    answers[name] = tampered(
                        answer, lambda message, name=name: type(self).to_server(name, message)
                    )
        return answers, failures


@pytest.fixture
def wire(monkeypatch) -> type[Wire]:
    class Fresh(Wire):
        received: list[tuple[str, Message]] = []  # noqa: RUF012
        fails = staticmethod(lambda name, request: None)
        to_silo = to_server = staticmethod(lambda name, message: message)

    monkeypatch.setattr("silodp.runtime.simulation.InProcess", Fresh)
    return Fresh


class Direct:
    """A channel to silos without signatures; every message passes through its encoding."""

    def __init__(self, silos: Mapping[str, Silo]) -> None:
        self._silos = dict(silos)
        self.traffic = Traffic()

    def ask(self, requests, timeout=None):
        answers, failures = {}, {}
        for name, request in requests.items():
            try:
                answer = self._silos[name].answer(Message.decode(request.encode()))
                answers[name] = Message.decode(answer.encode())
            except (SilodpError, OSError) as error:
                failures[name] = DeliveryFailure(
                    "refused" if isinstance(error, SilodpError) else "error",
                    str(error),
                    getattr(error, "code", ""),
                )
        return answers, failures


def set_state(silo: Silo, **changes) -> None:
    """As if a silo's gate were somewhere else."""
    state = replace(silo.gate.state, **changes).to_dict()
    if not silo.gate.ledger.answers:
        silo.gate._answers.add(Message("nothing", silo.run), Message("nothing", silo.run), -1, {})
    answers = silo.gate.ledger.answers
    answers[-1] = replace(answers[-1], state=state)


def parts(message: Message) -> list[str]:
    """Everything in a message that can be altered."""
    return [
        *(f"array {name}" for name in message.arrays),
        *(f"blob {name}" for name in message.blobs),
        *(f"field {name}" for name in message.fields),
        "round",
        "attempt",
        "run",
        "kind",
    ]


def altered(message: Message, part: str) -> Message:
    kind, _, name = part.partition(" ")
    match kind:
        case "array":
            array = message.arrays[name].copy()
            array.view(np.uint8).reshape(-1)[0] ^= 1
            return replace(message, arrays={**message.arrays, name: array})
        case "blob":
            blob = message.blobs[name]
            return replace(message, blobs={**message.blobs, name: bytes([blob[0] ^ 1]) + blob[1:]})
        case "field":
            return replace(message, fields={**message.fields, name: "something else"})
        case "run" | "kind":
            return replace(message, **{kind: getattr(message, kind) + "x"})
        case _:
            return replace(message, **{kind: getattr(message, kind) + 1})


class Parties:
    """Three silos in a session, driven by hand."""

    def __init__(self, fewest: int | None = None, silos: int = 4) -> None:
        federation = small_federation(silos=silos)
        self.names = tuple(silo.name for silo in federation.silos)
        aggregator = Masked(min_silos=fewest)
        spec = make_spec(
            "run",
            self.names,
            AVG,
            FederationSize(silos, 12, aggregator.min_silos_for(silos)),
            5,
            aggregator=aggregator,
        )
        identities = {name: Identity.fresh(name) for name in self.names}
        pins = {name: identity.public for name, identity in identities.items()}
        self.silos = {
            data.name: Silo(
                data, logistic_task(), spec, Randomness.secret(), MemoryStore(),
                identities[data.name], pins,
            )
            for data in federation.silos
        }  # fmt: skip
        self.ask({name: Message("setup", "run") for name in self.names})
        self.session = run_key_agreement("run", self.names, self.ask)

    def ask(self, requests: dict[str, Message]) -> dict[str, Message]:
        return {name: self.silos[name].answer(request) for name, request in requests.items()}

    def request(
        self, kind: str, roster=None, *, round_=0, attempt=0, release=0, value=0.0, run="run"
    ) -> Message:
        fields = {
            "session": self.session,
            "release": release,
            "roster": list(self.names if roster is None else roster),
        }
        return Message(kind, run, round_, attempt, fields, {"params": np.full(5, value, np.float32)})

    def opening(self, update: Message, **fields) -> Message:
        """The request to open the attempt of an update."""
        named = {**update.fields, "request": update.digest(), **fields}
        return replace(update, kind="open", fields=named, arrays={}, blobs={})
