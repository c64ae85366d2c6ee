"""What stands between a silo and its server: a TCP proxy with faults, and a relay that reads and repeats messages."""

from __future__ import annotations

import contextlib
import http.server
import math
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import httpx

from silodp_deploy.certificates import load_context
from silodp_deploy.consortium import Consortium
from support.consortium import Processes

_BUFFER = 1 << 12


@dataclass
class _Use:
    """When a connection was last used, in either direction, and whether it was forgotten."""

    last: float
    is_forgotten: bool = False


class Proxy:
    """Forwards TCP connections to a port of this machine, with the faults of a network.

    Attributes:
        port: to connect to.
        cuts: number of connections that were cut in the middle of a message.
        forgotten: number of connections that were forgotten, since nobody used them.
    """

    def __init__(self, to: int) -> None:
        self._to = to
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.cuts = 0
        self._cut_after: int | None = None
        self._delay, self._loses, self._refuses = 0.0, False, False
        self._memory = math.inf
        self.forgotten = 0
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def delay(self, seconds: float) -> None:
        """Keep every piece of a message for so long."""
        self._delay = seconds

    def cut_after(self, count: int) -> None:
        """Cut the connection that has next sent so many bytes to the server: the message in it is not whole."""
        self._cut_after = count

    def hold(self) -> None:
        """Forward nothing; what was sent arrives after `restore`, as after an outage of a line."""
        self._open.clear()

    def lose(self) -> None:
        """Drop what the connections of now send, without closing them, as a firewall that was restarted does."""
        self._loses = True

    def forget_after(self, seconds: float) -> None:
        """Drop what a connection sends, in both directions and for ever, once it was silent for so long.

        Nobody is told: so do firewalls that keep a table of the connections in use.
        """
        self._memory = seconds

    def refuse(self) -> None:
        """Close all connections, and every new one."""
        self._refuses = True
        self._close_all()

    def restore(self) -> None:
        """Forward again; connections that lost something stay silent."""
        self._loses = self._refuses = False
        self._open.set()

    def close(self) -> None:
        self._listening.close()
        self._close_all()

    def _close_all(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets.clear()

    def _accept(self) -> None:
        while True:
            try:
                silo, _ = self._listening.accept()
                if self._refuses:
                    silo.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                if self._listening.fileno() < 0:
                    return
                silo.close()  # the server does not listen
                continue
            self._sockets += [silo, server]
            use = _Use(time.monotonic())
            for source, target, is_up in ((silo, server, True), (server, silo, False)):
                threading.Thread(target=self._forward, args=(source, target, is_up, use), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_up: bool, use: _Use) -> None:
        sent, is_lost = 0, False
        with contextlib.suppress(OSError):
            while data := source.recv(_BUFFER):
                time.sleep(self._delay)
                self._open.wait()
                if not use.is_forgotten and time.monotonic() > use.last + self._memory:
                    use.is_forgotten = True
                    self.forgotten += 1
                use.last = time.monotonic()
                is_lost = is_lost or self._loses
                if is_lost or use.is_forgotten:
                    continue
                if is_up and self._cut_after is not None and sent + len(data) > self._cut_after:
                    target.sendall(data[: max(self._cut_after - sent, 0)])
                    self._cut_after = None
                    self.cuts += 1
                    break
                sent += len(data)
                target.sendall(data)
        if use.is_forgotten:
            return  # not even the end of a forgotten connection gets through
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@dataclass
class Relay:
    """Ends the TLS connections of one silo: it can repeat and reorder messages, and play back old answers.

    Attributes:
        repeated: number of old requests that the silo was given in front of a new one.
        doubled: number of answers that were sent to the server twice.
        plays_back: whether the server gets the silo's first update in place of the next answer.
        played: number of answers that were replaced in this way.
    """

    server: httpx.Client
    random: Random
    repeated: int = 0
    doubled: int = 0
    plays_back: bool = False
    played: int = 0
    _requests: list[bytes] = field(default_factory=list)
    _answers: list[bytes] = field(default_factory=list)
    _fresh: tuple[str, bytes] | None = None
    _false: set[str] = field(default_factory=set)

    def handle(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the reply to a call of the silo."""
        if path == "/v1/next":
            return self._next(headers)
        if path.startswith("/v1/answer/"):
            exchange = path.rpartition("/")[2]
            if exchange in self._false:
                return 410, {}, b""
            if self.plays_back and self._answers and "X-Silodp-Refused" not in headers:
                body, self.played = self._answers[0], self.played + 1
            elif body:
                self._answers.append(body)
            sent = self._forward(path, headers, body)
            if self.random.random() < 0.5:
                self._forward(path, headers, body)
                self.doubled += 1
            return sent
        return self._forward(path, headers, body)

    def _next(self, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if self._fresh is not None:
            (exchange, request), self._fresh = self._fresh, None
            return 200, {"X-Silodp-Exchange": exchange}, request
        status, answered, request = self._forward("/v1/next", headers, b"")
        if status != 200 or not self._requests or self.random.random() < 0.5:
            if status == 200:
                self._requests.append(request)
            return status, answered, request
        self._fresh = (answered["x-silodp-exchange"], request)
        self.repeated += 1
        false = secrets.token_hex(16)
        self._false.add(false)
        old = self.random.choice([*self._requests, request])  # the new one too: then it comes twice
        self._requests.append(request)
        return 200, {"X-Silodp-Exchange": false}, old

    def _forward(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        kept = {
            name: value for name, value in headers.items() if name.lower() not in ("host", "content-length")
        }
        reply = self.server.post(path, headers=kept, content=body)
        known = {name: value for name, value in reply.headers.items() if name == "x-silodp-exchange"}
        return reply.status_code, known, reply.content


@contextmanager
def open_relay(processes: Processes, silo: str, random: Random) -> Iterator[tuple[Relay, int]]:
    """Yield a relay between a silo and the server, with the certificates of both, and its port."""
    consortium = Consortium.load(processes.public)

    def tls(name: str) -> ssl.SSLContext:
        return load_context(consortium, name, processes.home(name))

    with httpx.Client(
        base_url=f"https://127.0.0.1:{consortium.sealed.port}", verify=tls(silo), timeout=90
    ) as server:
        relay = Relay(server, random)

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    status, headers, reply = relay.handle(self.path, dict(self.headers), body)
                except httpx.HTTPError:
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: object) -> None: ...

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
            listening.daemon_threads = True
            listening.socket = tls("server").wrap_socket(listening.socket, server_side=True)
            threading.Thread(target=listening.serve_forever, daemon=True).start()
            yield relay, int(listening.server_address[1])
            listening.shutdown()
