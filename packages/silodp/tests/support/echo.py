"""An endpoint for tests of couriers."""

from __future__ import annotations

from collections.abc import Callable


class Echo:
    """An endpoint that answers a request with its bytes in reverse order."""

    def __init__(self, answer: Callable[[bytes], bytes] = lambda data: data[::-1]) -> None:
        self.asked: list[bytes] = []
        self._answer = answer

    def receive(self, data: bytes) -> bytes:
        self.asked.append(data)
        return self._answer(data)
