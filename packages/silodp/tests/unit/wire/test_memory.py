"""Long messages: how often a party holds one in memory, beside the arrays that it works with."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from silodp.crypto.keys import Identity
from silodp.wire.messages import Message
from silodp.wire.store import DirectoryStore
from silodp.wire.transport import InProcess, SignedChannel, SignedParty, sign

SIZE = 10**7
SILO, SERVER = Identity.fresh("north"), Identity.fresh("server")


def measure_peak(work: Callable[[], object]) -> float:
    """Return the most memory that was allocated at a time during the work, in multiples of a message."""
    tracemalloc.start()
    try:
        kept = work()
        _, peak = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return peak / SIZE


@dataclass
class Doubling:
    """A silo that answers with an array of the size of the request."""

    name: str = "north"
    max_bytes: int = 2 * SIZE
    made: list[np.ndarray] = field(default_factory=list)

    def answer(self, request: Message) -> Message:
        return request.answer(sum=2 * request.arrays["params"])


def make_request() -> Message:
    return Message("update", "run", arrays={"params": np.ones(SIZE // 8)})


def test_a_silo_holds_a_long_request_and_its_answer() -> None:
    data = sign(make_request(), SERVER, "north")
    party = SignedParty(Doubling(), SILO, SERVER.public)
    # The request's array, the answer's array, and the answer twice: encoded, and behind its signature.
    assert measure_peak(lambda: party.receive(data)) < 4.1


def test_a_server_holds_a_request_once_for_each_silo_and_no_answer_as_bytes() -> None:
    silos = {name: Identity.fresh(name) for name in ("a", "b", "c", "d")}
    parties = {name: SignedParty(Doubling(name), key, SERVER.public) for name, key in silos.items()}

    class Ready(InProcess):
        """Answers were made before memory is measured."""

        def ask(self, requests, timeout=None):
            if not hasattr(self, "made"):
                self.made, _ = super().ask(requests, timeout)
                return {}, {}
            return {name: bytes(memoryview(data)) for name, data in self.made.items()}, {}

    request = make_request()
    channel = SignedChannel(Ready(parties), SERVER, {name: key.public for name, key in silos.items()})
    channel.ask(dict.fromkeys(silos, request))
    peak = measure_peak(lambda: channel.ask(dict.fromkeys(silos, request)))
    # Four requests while four answers arrive. Each answer is then decoded, and its bytes are given up.
    assert peak < 4 + 4 + 0.1


def test_a_digest_copies_nothing() -> None:
    request = make_request()
    assert measure_peak(request.digest) < 0.1


def test_a_store_copies_nothing_when_it_writes_and_nothing_but_the_value_when_it_reads(
    tmp_path: Path,
) -> None:
    store, value = DirectoryStore(tmp_path / "store"), b"x" * SIZE
    assert measure_peak(lambda: store.put("answer", value)) < 0.1
    assert measure_peak(lambda: store.get("answer")) < 1.1
    assert store.get("answer") == value
