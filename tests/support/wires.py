"""Ways to silos for tests: a wire that remembers what the server is sent, and lets silos fail or the wire lie; and a
channel without signatures, for tests that drive parties by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from silodp.errors import SilodpError
from silodp.runtime.silo import Silo
from silodp.wire.messages import Message
from silodp.wire.transport import SIGNED_BYTES, DeliveryFailure, InProcess, SignedParty, Traffic

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
