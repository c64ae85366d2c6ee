"""A HTTP proxy that forwards by CONNECT, and one that intercepts TLS, as hospitals have them."""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import threading
from pathlib import Path

from silodp_deploy.certificates import Authority, make_request

_BUFFER = 1 << 14


class ConnectProxy:
    """Connects whoever asks to a port of this machine, whatever host they name.

    Attributes:
        url: to be set as the proxy.
        login: user and password that it asks for by Basic authentication; None: none.
        status: of its replies to CONNECT, where it is no 200.
        asked: host and port of every connection that was asked for.
        replied: status of every reply.
        seen: all bytes that passed after CONNECT, in both directions.
        interceptor: its TLS settings, where it ends TLS itself; None: it forwards.
        handshakes: version of TLS, or the reason of a failure, of every handshake as an interceptor.
        decrypted: what it has read as an interceptor.
    """

    def __init__(
        self,
        login: tuple[str, str] | None = None,
        status: int = 200,
        interceptor: ssl.SSLContext | None = None,
    ) -> None:
        self.login, self.status, self.interceptor = login, status, interceptor
        self.asked: list[str] = []
        self.replied: list[int] = []
        self.seen, self.decrypted = bytearray(), bytearray()
        self.handshakes: list[str] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := client.recv(_BUFFER)):
                    return
                head += data
            line, *rest = head.decode().split("\r\n")
            method, target, _ = line.split()
            assert method == "CONNECT", line
            headers = dict(one.split(": ", 1) for one in rest if one)
            self.asked.append(target)
            status = self.status
            if self.login is not None:
                wanted = base64.b64encode(":".join(self.login).encode()).decode()
                status = self.status if headers.get("Proxy-Authorization") == f"Basic {wanted}" else 407
            self.replied.append(status)
            if status != 200:
                client.sendall(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode())
                return
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            if self.interceptor is not None:
                self._intercept(client)
                return
            with socket.create_connection(("127.0.0.1", int(target.rpartition(":")[2]))) as server:
                up = threading.Thread(target=self._forward, args=(client, server), daemon=True)
                up.start()
                self._forward(server, client)
                up.join()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_BUFFER):
                self.seen += data
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _intercept(self, client: socket.socket) -> None:
        """Show another certificate, and read what comes."""
        assert self.interceptor is not None
        try:
            with self.interceptor.wrap_socket(client, server_side=True) as opened:
                self.handshakes.append(opened.version() or "")
                while data := opened.recv(_BUFFER):
                    self.decrypted += data
        except ssl.SSLError as error:
            self.handshakes.append(error.reason or "")


def make_interceptor(folder: Path, issuer: str, hosts: tuple[str, ...] = ("127.0.0.1",)) -> ssl.SSLContext:
    """Return the TLS settings of an interceptor with an authority of its own; it asks for no certificate."""
    folder.mkdir(exist_ok=True)
    key, request = make_request("interceptor")
    (folder / "key.pem").write_bytes(key)
    (folder / "shown.pem").write_bytes(Authority.fresh(issuer).sign(request, "interceptor", hosts))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "shown.pem", folder / "key.pem")
    return context
