"""How requests reach silos: opaque signed bytes out, opaque signed bytes back, with failures as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from silodp.errors import SilodpError
from silodp.wire.messages import Message


@dataclass(frozen=True)
class Failure:
    """Why a silo gave no answer, in one sentence; `code` is that of the error, where a silo refused."""

    kind: Literal["offline", "timeout", "error", "refused"]
    reason: str
    code: str = ""


@dataclass(frozen=True)
class Traffic:
    """Bytes from the server to all silos together, and from them to it."""

    down: int = 0
    up: int = 0

    def since(self, before: Traffic) -> Traffic:
        """What came after."""
        return Traffic(self.down - before.down, self.up - before.up)


class Endpoint(Protocol):
    """A silo as a courier sees it."""

    def receive(self, data: bytes) -> bytes:
        """The signed answer to a signed request; a repeated request gets the same bytes.

        Raises:
            SilodpError: the silo refuses; the courier reports that as a `Failure` of kind "refused".
        """


class Transport(Protocol):
    """A courier: it carries signed bytes, knows no secrets, and can only lose, delay or repeat them.

    This is the interface to implement for a network of your own.
    """

    @property
    def traffic(self) -> Traffic:
        """What was sent so far."""

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None
    ) -> tuple[dict[str, bytes], dict[str, Failure]]:
        """Send each silo its request and wait at most `timeout` seconds: (answers, failures), by silo name."""


class Channel(Protocol):
    """What the server asks silos through: messages out, verified messages back."""

    @property
    def traffic(self) -> Traffic:
        """What was sent so far."""

    def ask(
        self, requests: Mapping[str, Message], timeout: float | None = None
    ) -> tuple[dict[str, Message], dict[str, Failure]]:
        """Ask each silo: (answers, failures), by silo name."""


class InProcess:
    """A transport to silos in this process, called one after the other."""

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._endpoints = dict(endpoints)
        self.traffic = Traffic()

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None
    ) -> tuple[dict[str, bytes], dict[str, Failure]]:
        """Ask each silo in turn; a direct call cannot be interrupted, so `timeout` has no effect here."""
        answers: dict[str, bytes] = {}
        failures: dict[str, Failure] = {}
        for name, request in requests.items():
            try:
                answers[name] = self._ask_one(name, request)
            except SilodpError as error:
                failures[name] = Failure("refused", str(error), error.code)
            except OSError as error:
                failures[name] = Failure("error", str(error))
        return answers, failures

    def _ask_one(self, name: str, request: bytes) -> bytes:
        if name not in self._endpoints:
            raise SilodpError(f"silo '{name}' is not known to this transport.", code="message.recipient")
        answer = self._endpoints[name].receive(request)
        self.traffic = Traffic(self.traffic.down + len(request), self.traffic.up + len(answer))
        return answer
