"""Each silo in a process of its own, reached through a pipe: nothing is shared but bytes."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.keys import Identity
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.runtime.silo import Silo
from silodp.wire.store import MemoryStore
from silodp.wire.transport import DeliveryFailure, SignedParty, Traffic
from support.oracles import logistic_task, small_federation

_REFUSED = b"refused: "


def serve(pipe: Connection, number: int, spec: RunSpec, seed: int) -> None:
    """A silo: makes its own key, is told the others' by hand (the first message), then answers."""
    data = small_federation(silos=len(spec.names)).silos[number]
    identity = Identity.fresh(data.name)
    pipe.send_bytes(identity.public)
    server = pipe.recv_bytes()
    pins = {name: pipe.recv_bytes() for name in spec.names}
    silo = Silo(data, logistic_task(), spec, Randomness.from_seed(seed), MemoryStore(), identity, pins)
    party = SignedParty(silo, identity, server)
    while request := pipe.recv_bytes():
        try:
            pipe.send_bytes(party.receive(request))
        except SilodpError as error:
            pipe.send_bytes(_REFUSED + str(error).encode())


class Processes:
    """A transport to silos started here; `pins` are their public keys."""

    def __init__(self, spec: RunSpec, server: bytes, seed: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["silodp.runtime.train", "scipy.stats"]
        )  # slow to import: once for all
        self._pipes: dict[str, Connection] = {}
        self.pins: dict[str, bytes] = {}
        self.traffic = Traffic()
        self._processes = []
        for number, name in enumerate(spec.names):
            self._pipes[name], theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, number, spec, seed), daemon=True)
            process.start()
            self._processes.append(process)
            self.pins[name] = self._pipes[name].recv_bytes()
        for pipe in self._pipes.values():
            pipe.send_bytes(server)
            for name in spec.names:
                pipe.send_bytes(self.pins[name])

    def ask(self, requests, timeout=None):
        answers, failures = {}, {}
        for name, request in requests.items():
            self._pipes[name].send_bytes(request)
        for name in requests:
            answer = self._pipes[name].recv_bytes()
            if answer.startswith(_REFUSED):
                failures[name] = DeliveryFailure("refused", answer.removeprefix(_REFUSED).decode())
            else:
                answers[name] = answer
        return answers, failures

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.send_bytes(b"")
        for process in self._processes:
            process.join(20)
            assert process.exitcode == 0
