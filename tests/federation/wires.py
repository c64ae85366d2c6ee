"""Transports for tests: one that remembers everything the server is sent, and lets silos fail or the wire lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from silodp.federation.messages import Message
from silodp.federation.transport import Failure, InProcess, Party

Tamper = Callable[[str, Message], Message]


class Wire(InProcess):
    """`fails(name, request)` says when a silo is offline: "before" it hears of the request, or "after" it answered."""

    received: list[tuple[str, Message]]
    fails: Callable[[str, Message], str | None]
    to_silo: Tamper
    to_server: Tamper

    def __init__(self, parties: Mapping[str, Party], wire: bool = False) -> None:
        super().__init__(parties, wire)
        self.parties = dict(parties)
        type(self).last = self

    last: Wire

    def ask(self, requests, timeout=None):
        answers, failures = {}, {}
        for name, request in requests.items():
            when = type(self).fails(name, request)
            if when == "before":
                failures[name] = Failure("offline", "pulled out")
                continue
            answered, failed = super().ask({name: type(self).to_silo(name, request)})
            failures |= failed
            for answer in answered.values():
                type(self).received.append((name, answer))
                if when == "after":
                    failures[name] = Failure("timeout", "came late")
                else:
                    answers[name] = type(self).to_server(name, answer)
        return answers, failures


@pytest.fixture
def wire(monkeypatch) -> type[Wire]:
    class Fresh(Wire):
        received: list[tuple[str, Message]] = []  # noqa: RUF012
        fails = staticmethod(lambda name, request: None)
        to_silo = to_server = staticmethod(lambda name, message: message)

    monkeypatch.setattr("silodp.federation.parties.InProcess", Fresh)
    return Fresh
