"""Strangers at the server's port: whoever reaches it can open connections, before any certificate is shown.

Attacked is the server's process: with as many connections as it may have files open it could neither write its ledger
nor accept a silo, and would end. Without bounds in number and in time, 1,100 connections that send nothing ended it.
"""

from __future__ import annotations

import gc
import os
import resource
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from silodp_deploy.consortium import Consortium
from silodp_deploy.https import _connections
from silodp_deploy.https._connections import find_max_connections
from support.consortium import start_consortium
from support.deployed import PLAIN, assert_same_run, simulate, wait_for
from support.echo import Echo
from support.https import Parties, serving, sign_challenge
from support.refusals import refused

DESCRIPTORS = 1024
"""What a process may open on most systems, if nobody has changed it."""
STRANGERS = 1100


class Strangers:
    """Connections that are opened and send nothing more; those that are closed are opened again.

    Args:
        port: of the server.
        number: of connections.
        tls: of a party of the consortium, whose connections begin a request; None: bare TCP.
        begin: the beginning of the request.
        pace: number of connections that are opened in 50 ms, in which a silo shows its certificate.
    """

    def __init__(
        self, port: int, number: int, tls: ssl.SSLContext | None = None, begin: bytes = b"", pace: int = 50
    ) -> None:
        self._port, self._number, self._tls, self._begin, self._pace = port, number, tls, begin, pace
        self._stop = threading.Event()
        self._selector = selectors.DefaultSelector()
        self.opened = self.closed = 0

    @contextmanager
    def come(self) -> Iterator[Strangers]:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join(20)
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def _open(self) -> None:
        one = socket.create_connection(("127.0.0.1", self._port), timeout=5)
        if self._tls is not None:
            one = self._tls.wrap_socket(one, server_hostname="127.0.0.1")
            one.sendall(self._begin)
        one.setblocking(False)
        self._selector.register(one, selectors.EVENT_READ)
        self.opened += 1

    def _run(self) -> None:
        while not self._stop.is_set():
            missing = self._number - len(self._selector.get_map())
            for _ in range(min(missing, self._pace)):
                with suppress(OSError):
                    self._open()
            self._stop.wait(0.05)
            for key, _ in self._selector.select(0):
                with suppress(BlockingIOError, ssl.SSLWantReadError):
                    try:
                        is_over = not key.fileobj.recv(1)
                    except ConnectionError:
                        is_over = True
                    if is_over:
                        self._selector.unregister(key.fileobj)
                        key.fileobj.close()
                        self.closed += 1


@pytest.mark.slow
def test_a_server_survives_more_connections_than_it_may_have_files_and_the_run_ends(tmp_path: Path) -> None:
    simulated = simulate(tmp_path, PLAIN)
    with start_consortium(tmp_path, PLAIN) as processes:
        server = processes.start("server")
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        wait_for(processes, lambda: (processes.home("server") / "status.json").exists())
        strangers = Strangers(Consortium.load(processes.public).sealed.port, STRANGERS)
        with strangers.come():
            wait_for(processes, lambda: strangers.opened >= STRANGERS, 30)
            files = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
            for name in processes.names:
                processes.start(name)
            assert processes.wait_for_server(200) == 0, processes.log("server")
        assert files < DESCRIPTORS / 2
        assert strangers.closed > STRANGERS / 2
        assert_same_run(processes, simulated)
        log = processes.log("server")
        assert len(log.splitlines()) < 100
        assert "closed" in log


def count_tls() -> int:
    """How many connections of TLS this process holds, those included that only the garbage collector can free."""
    return sum(type(one).__name__ == "SSLProtocol" for one in gc.get_objects())


def test_connections_of_strangers_leave_nothing_in_memory(parties: Parties) -> None:
    """Each that failed kept 256 KiB: 42,000 took the server from 459 MB to 1.2 GB, which stayed."""
    gc.collect()
    gc.disable()  # by itself it comes after a number of objects that is larger in other processes
    try:
        with parties.server() as server:
            for _ in range(5):
                batch = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
                time.sleep(0.1)
                for one in batch:
                    one.close()
            wait_until(
                lambda: (
                    not server._socket._open and server._socket._uncollected < _connections._MAX_UNCOLLECTED
                )
            )
            assert count_tls() < _connections._MAX_UNCOLLECTED
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Parties:
    return Parties(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize(
    "begin",
    [
        b"POST /v1/next HTTP/1.1\r\nHost: x\r\nX-A: ",
        b"POST /v1/challenge HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n{",
        pytest.param(
            b"POST /v1/answer/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n{", marks=pytest.mark.slow
        ),
    ],
    ids=["head", "body", "body of nobody's answer"],
)
def test_requests_without_end_keep_no_silo_out(
    begin: bytes, parties: Parties, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has a certificate of the consortium can make them; they are closed after `_IDLE_SECONDS`."""
    monkeypatch.setattr("silodp_deploy.https._server.find_max_connections", lambda silos: 20)
    monkeypatch.setattr(_connections, "_IDLE_SECONDS", 1.5)
    with parties.server() as server:
        few, many = (Strangers(server.port, number, parties.tls("south"), begin) for number in (10, 80))
        with few.come():  # too few to be closed for others
            wait_until(lambda: few.closed >= 10)
            assert server._socket._closed_early == 0
        with many.come():
            wait_until(lambda: many.opened >= 80)
            with serving(parties, server.port, "north", Echo()):
                for sent in (b"12", b"34"):
                    assert server.ask({"north": sent})[0] == {"north": sent[::-1]}
            assert len(server._socket._open) <= 20 + _connections._MAX_CLOSING
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_the_longest_idle_connection_makes_room_for_a_silo(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silodp_deploy.https._server.find_max_connections", lambda silos: 20)
    monkeypatch.setattr(_connections, "_IDLE_SECONDS", 60)
    with parties.server(answer_timeout=10) as server, Strangers(server.port, 80, pace=2).come() as many:
        wait_until(lambda: many.closed >= 40)
        with serving(parties, server.port, "north", Echo()):
            assert server.ask({"north": b"12"})[0] == {"north": b"21"}


def test_a_silo_that_waits_for_a_request_is_not_idle(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_connections, "_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(_connections, "_SWEEP_SECONDS", 0.1)
    north = Echo()
    with parties.server() as server, serving(parties, server.port, "north", north):
        server.wait_for_silos(0.5)
        wait_until(lambda: server.seconds_since_seen()["north"] is not None)
        token = server._connections["north"].token
        time.sleep(1.5)
        assert server.ask({"north": b"12"})[0] == {"north": b"21"}
        assert token
        assert server._connections["north"].token == token  # it had no reason to connect again


def test_a_silo_holds_few_connections(parties: Parties) -> None:
    """With a token, too, it could take the places of all others."""
    with parties.server() as server, httpx.Client(verify=parties.tls("north")) as client:
        url = f"https://127.0.0.1:{server.port}/v1"
        token = client.post(f"{url}/connect", json=sign_challenge(client, server.port)).json()["token"]
        head = (
            f"POST /v1/next HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 0\r\n\r\n"
        )
        with Strangers(server.port, 30, parties.tls("north"), head.encode()).come() as polls:
            wait_until(lambda: polls.opened >= 30)
            wait_until(lambda: len(server._socket._open) >= 30)
            held = [one for one in server._socket._open.values() if one.silo]
            assert len(held) == _connections._MAX_HELD
            assert polls.closed == 0


def test_a_listener_without_descriptors_turns_away_and_goes_on(
    parties: Parties, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other files of the process may use up what is in reserve."""
    monkeypatch.setattr(_connections, "_REPORT_SECONDS", 0.1)
    with parties.server() as server:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        clients = [socket.socket() for _ in range(5)]
        highest = os.open(os.devnull, os.O_RDONLY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        try:
            for client in clients:
                client.settimeout(10)
                client.connect(("127.0.0.1", server.port))
                assert client.recv(1) == b""  # closed, not left waiting
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(highest)
            for client in clients:
                client.close()
        with serving(parties, server.port, "north", Echo()):
            assert server.ask({"north": b"12"})[0] == {"north": b"21"}
    assert "out of system resource" not in caplog.text


def test_a_server_makes_room_for_its_silos_or_says_that_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [1024, 1024]
    monkeypatch.setattr(_connections.resource, "getrlimit", lambda what: tuple(limits))
    monkeypatch.setattr(
        _connections.resource, "setrlimit", lambda what, new: limits.__setitem__(slice(None), new)
    )
    assert find_max_connections(3) == 268
    assert limits == [1024, 1024]
    assert find_max_connections(150) == 1024 - 288  # fewer strangers, as many silos
    with refused("deploy.address"):
        find_max_connections(200)
    limits[:] = [256, resource.RLIM_INFINITY]
    assert find_max_connections(200) == 4 * 200 + 256
    assert limits[0] == 4 * 200 + 256 + 288


def wait_until(happened, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)
