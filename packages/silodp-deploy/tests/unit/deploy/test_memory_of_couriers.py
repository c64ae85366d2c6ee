"""Long messages: a courier holds a request once and its answer once, and copies neither."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from silodp.crypto.keys import Identity
from silodp.wire.transport import Transport
from silodp_deploy.certificates import Authority, make_context, make_request
from silodp_deploy.courier import ask_silo, give_reply, take_request
from silodp_deploy.https import HttpsClient, HttpsServer
from silodp_deploy.sockets import ServerSocket, SiloSocket, SocketOptions

SIZE = 10**7
NORTH = Identity.fresh("north")


class Echo:
    """An endpoint whose answer is the request."""

    def receive(self, data: bytes) -> bytes:
        return data


@contextmanager
def over_https(folder: Path) -> Iterator[Transport]:
    authority = Authority.fresh("test")
    (folder / "ca.pem").write_bytes(authority.certificate)
    tls = {}
    for name in ("server", "north"):
        key, request = make_request(name)
        hosts = ("127.0.0.1",) if name == "server" else ()
        (folder / f"{name}.key").write_bytes(key)
        (folder / f"{name}.pem").write_bytes(authority.sign(request, name, hosts))
        paths = (folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
        tls[name] = make_context(*paths, is_server=name == "server")
    publics = {"north": NORTH.public}
    with HttpsServer(
        ("127.0.0.1", 0), tls["server"], publics, "d" * 64, answer_timeout=60, max_bytes=SIZE
    ) as server:
        url = f"https://127.0.0.1:{server.port}"
        with serving(HttpsClient(url, tls["north"], NORTH, "d" * 64, Echo(), SIZE, 0.2)):
            yield server


@contextmanager
def over_sockets(folder: Path) -> Iterator[Transport]:
    def carry() -> None:
        with suppress(OSError):  # the server has stopped
            while (request := take_request(folder / "server.sock", wait=30)) is not None:
                reply = ask_silo(folder / "north.sock", request.body)
                give_reply(folder / "server.sock", request.exchange, reply)

    silo = SiloSocket(folder / "north.sock", Echo(), SIZE)
    with (
        ServerSocket(
            SocketOptions(folder / "server.sock"), ["north"], answer_timeout=60, max_bytes=SIZE
        ) as server,
        serving(silo),
    ):
        threading.Thread(target=carry, daemon=True).start()
        yield server


@contextmanager
def serving(silo: HttpsClient | SiloSocket) -> Iterator[None]:
    stop = threading.Event()
    threading.Thread(target=silo.run, args=(stop,), daemon=True).start()
    try:
        yield
    finally:
        stop.set()


@pytest.mark.parametrize(
    ("way", "copies"),
    # The silo's request, and the server's answer; between sockets a courier has both once more.
    [(over_https, 2), (over_sockets, 4)],
    ids=["https", "sockets"],
)
def test_a_courier_holds_a_long_message_once(way, copies: int, tmp_path: Path) -> None:
    data = b"x" * SIZE
    with way(tmp_path) as server:
        assert server.ask({"north": b"connect"})[0] == {"north": b"connect"}
        tracemalloc.start()
        try:
            assert server.ask({"north": data}) == ({"north": data}, {})
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # What is being received grows in steps of an eighth.
    assert peak < (copies + 0.4) * SIZE
