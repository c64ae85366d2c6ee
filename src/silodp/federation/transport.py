"""How requests reach silos: one blocking call, with failures as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from silodp.errors import SilodpError
from silodp.federation.messages import Message


@dataclass(frozen=True)
class Failure:
    """Why a silo gave no answer, in one sentence."""

    kind: Literal["offline", "timeout", "error", "refused"]
    reason: str


@dataclass(frozen=True)
class Traffic:
    """Bytes from the server to all silos together, and from them to it."""

    down: int = 0
    up: int = 0

    def since(self, before: Traffic) -> Traffic:
        """What came after."""
        return Traffic(self.down - before.down, self.up - before.up)


class Party(Protocol):
    """Whatever answers requests."""

    def answer(self, request: Message) -> Message:
        """The answer; a repeated request gets the same bytes."""


class Transport(Protocol):
    """The seam to deployed engines."""

    @property
    def traffic(self) -> Traffic:
        """What was sent so far."""

    def ask(
        self, requests: Mapping[str, Message], timeout: float | None = None
    ) -> tuple[dict[str, Message], dict[str, Failure]]:
        """Send each silo its request and wait at most `timeout` seconds: (answers, failures), by silo name."""


class InProcess:
    """Silos in this process, called one after the other; `wire` passes every message through its encoding."""

    def __init__(self, parties: Mapping[str, Party], wire: bool = False) -> None:
        self._parties = dict(parties)
        self._wire = wire
        self.traffic = Traffic()

    def ask(
        self, requests: Mapping[str, Message], timeout: float | None = None
    ) -> tuple[dict[str, Message], dict[str, Failure]]:
        """Ask each silo in turn; a direct call cannot be interrupted, so `timeout` has no effect here."""
        answers: dict[str, Message] = {}
        failures: dict[str, Failure] = {}
        for name, request in requests.items():
            try:
                answers[name] = self._ask_one(name, request)
            except SilodpError as error:
                failures[name] = Failure("refused", str(error))
            except OSError as error:
                failures[name] = Failure("error", str(error))
        return answers, failures

    def _ask_one(self, name: str, request: Message) -> Message:
        if name not in self._parties:
            raise SilodpError(f"silo '{name}' is not known to this transport.")
        if not self._wire:
            return self._parties[name].answer(request)
        sent = request.encode()
        received = self._parties[name].answer(Message.decode(sent)).encode()
        self.traffic = Traffic(self.traffic.down + len(sent), self.traffic.up + len(received))
        return Message.decode(received)
