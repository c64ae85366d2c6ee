"""The server's end of the HTTPS courier."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import logging
import math
import re
import secrets
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import uvicorn
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import silodp
from silodp.errors import CODES, SilodpError
from silodp.parsing import parse_texts
from silodp.wire.transport import SERVER, DeliveryFailure
from silodp_deploy import PROTOCOL
from silodp_deploy.certificates import AUTHORITY_NAME
from silodp_deploy.courier import Reply
from silodp_deploy.https import _protocol
from silodp_deploy.https._connections import BoundedListener, find_max_connections, listen_at
from silodp_deploy.https._monitor import PAGE_HEADERS, render_page
from silodp_deploy.mailbox import REMINDER_SECONDS, Exchange, Mailbox
from silodp_deploy.monitoring import State, format_metrics

_log = logging.getLogger(__name__)

_CHALLENGE_SECONDS = 60.0
_MAX_MONITORING = 16
"""Connections at the address of /health and /metrics without TLS."""
_HELD = "silodp.held"
"""In the scope of a request that holds its connection."""
_GOODBYE_SECONDS = 10.0
"""Time in which silos that are connected ask again, and learn that the run is over."""


@dataclass
class _SiloConnection:
    """What the server knows of one silo's connection; used by the thread of the event loop alone.

    Attributes:
        name: Name of the silo.
        token: The token that the silo shows in its calls; "" before it has connected.
        knows_the_end: Whether the silo was answered that the run is over.
        reading: The task that reads the body of an answer, one at a time; None while none is read.
        read: Bytes of that body that have arrived, and its length as it was stated; 0: not stated.
        arrived: An event that is set when there is a request for the silo, or the run is over.
    """

    name: str
    token: str = ""
    knows_the_end: bool = False
    reading: asyncio.Task[bytes] | None = None
    read: tuple[int, int] = (0, 0)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class HttpsServer(Mailbox):
    """The server's end: a mailbox that listens for silos while it is entered as a context manager.

    Args:
        listen: Host and port to listen on; port 0 takes a free one.
        tls: TLS settings from `certificates.make_context`.
        silos: Public keys by name, 32 bytes each.
        digest: Digest of the public folder. Silos with another one are refused.
        answer_timeout: Seconds that a silo has for an answer.
        max_bytes: Bytes of the longest answer. A longer one is refused while it arrives.
        answers: Number of answers that have left each silo, at least, as `answers` of an earlier process said. A silo
            that knows of fewer has been set back to an old copy, and is refused.
        monitor: Host and port of a status page, /health and /metrics without TLS, for the machine of the server; None:
            /health and /metrics are shown to parties with a certificate alone.
        describe: Returns what is known of the run, as fields of `monitoring.State`.

    Attributes:
        on_change: Called when a silo connects.
    """

    def __init__(
        self,
        listen: tuple[str, int],
        tls: ssl.SSLContext,
        silos: Mapping[str, bytes],
        digest: str,
        *,
        answer_timeout: float,
        max_bytes: int,
        answers: Mapping[str, int] | None = None,
        monitor: tuple[str, int] | None = None,
        describe: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        super().__init__(silos, answer_timeout, {**dict.fromkeys(silos, 0), **(answers or {})})
        self._describe, self._max_bytes, self._tls = describe, max_bytes, tls
        self._silos, self._digest = dict(silos), digest
        self.on_change: Callable[[], object] = lambda: None
        self._connections = {name: _SiloConnection(name) for name in silos}
        self._refusals: dict[tuple[str, str, bool], float] = {}
        self._secret = secrets.token_bytes(32)
        self._used: dict[str, float] = {}
        self._closing = self._is_over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        watched = [Route("/health", self._health), Route("/metrics", self._metrics)]
        routes = [
            Route("/v1/challenge", self._challenge, methods=["POST"]),
            Route("/v1/connect", self._connect, methods=["POST"]),
            Route("/v1/next", self._next, methods=["POST"]),
            Route("/v1/answer/{exchange}", self._answer, methods=["POST"]),
            *watched,
        ]
        self._socket = BoundedListener(listen_at(listen, "listen"), find_max_connections(len(silos)))
        self._served = [(_make_uvicorn(self._release_after(Starlette(routes=routes)), tls), self._socket)]
        if monitor is not None:
            listener = BoundedListener(listen_at(monitor, "monitor"), _MAX_MONITORING)
            shown = Starlette(routes=[Route("/", self._page), *watched])
            self._served.append((_make_uvicorn(shown, None), listener))
        self._thread = threading.Thread(target=self._run, name="https", daemon=True)

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._socket.getsockname()[1])

    def _release_after(self, app: ASGIApp) -> ASGIApp:
        """Return an application after whose responses a connection is idle."""

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            finally:
                if scope.get(_HELD):
                    self._socket.release(scope.get("client"))

        return respond

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            # One loop for both ports, so that handlers share the connections without a lock.
            await asyncio.gather(*(one.serve(sockets=[its]) for one, its in self._served))

        asyncio.run(serve())

    def __enter__(self) -> Self:
        self._thread.start()
        while not all(one.started for one, _ in self._served):
            if not self._thread.is_alive():
                raise SilodpError("the HTTPS server did not start: see its log.", code="deploy.address")
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._release)
        for one, _ in self._served:
            one.should_exit = True
        self._thread.join(10)
        for _, its in self._served:
            its.close()

    def _release(self) -> None:
        """Let all calls that wait for a request return, and refuse further ones."""
        self._closing = True
        for connection in self._connections.values():
            connection.arrived.set()

    def end_run(self, seconds: float = _GOODBYE_SECONDS) -> None:
        """Answer silos that ask for a request that the run is over.

        Args:
            seconds: Longest time until all of them have asked; the others learn it when the server is started again.
        """
        self._is_over = True
        self._announce(self._connections)
        # Silos ask every POLL_SECONDS at the latest, and those that wait are woken: most learn it within milliseconds.
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(one.knows_the_end for one in self._connections.values()):
            time.sleep(0.02)

    def _announce(self, silos: Iterable[str]) -> None:
        assert self._loop is not None, "the server is entered first"
        for name in silos:
            self._loop.call_soon_threadsafe(self._connections[name].arrived.set)

    def _explain_silence(self, silo: str, timeout: float) -> DeliveryFailure:
        if self.seconds_since_seen()[silo] is None:
            told = f"it has not connected within the {timeout:g} seconds of --patience"
            return DeliveryFailure("offline", told + self._find_cause(silo))
        return super()._explain_silence(silo, timeout)

    def _find_cause(self, silo: str) -> str:
        # Without a certificate a silo cannot say why it stays away.
        ended = [name for name in self._list_ended() if name in (silo, SERVER, AUTHORITY_NAME)]
        return f"; the certificate of {' and of '.join(ended)} has ended" if ended else ""

    def _list_ended(self) -> list[str]:
        """Return the parties whose certificates have ended."""
        return [name for name, days in self._describe().get("certificate_days", {}).items() if days <= 0]

    def transfers(self) -> dict[str, tuple[int, int]]:
        """Return by silo how many bytes of an answer have arrived, and its length, while it arrives."""
        return {name: one.read for name, one in self._connections.items() if one.reading is not None}

    def reload(self, load: Callable[[ssl.SSLContext], object]) -> None:
        """Have a function change the TLS settings; connections that are made afterwards use them."""
        if self._loop is not None:
            # In the thread that makes connections: TLS settings may not be changed while they are read.
            self._loop.call_soon_threadsafe(load, self._tls)

    # --- handlers; they all run in the loop's thread, so the connections need no lock ---

    async def _challenge(self, request: Request) -> Response:
        name = (await _read_json(request)).get("name", "")
        if name not in self._silos:
            raise HTTPException(403, "deploy.unknown_silo")
        challenge = self._make_challenge(name, secrets.token_hex(16), time.monotonic())
        return JSONResponse({"challenge": challenge})

    def _make_challenge(self, name: str, nonce: str, now: float) -> str:
        """Return a challenge that this process recognizes; nothing is kept for one that is not used."""
        # An HMAC in place of a list of open challenges: any member of the consortium may ask for as many as it likes,
        # and fills no memory with them. The name is covered, so a challenge serves the silo that asked for it alone.
        stated = f"{nonce}.{now:.3f}"
        return f"{stated}.{hmac.digest(self._secret, f'{name} {stated}'.encode(), 'sha256').hex()}"

    def _is_open(self, challenge: str, name: str) -> bool:
        """Return whether this process made the challenge for a silo less than a minute ago, and it was not used."""
        nonce, _, rest = challenge.partition(".")
        made, _, _ = rest.rpartition(".")
        try:
            since = time.monotonic() - float(made)
            expected, given = self._make_challenge(name, nonce, float(made)).encode(), challenge.encode()
        except ValueError:
            return False
        self._used = {used: end for used, end in self._used.items() if end > time.monotonic()}
        # In constant time: else the time of a refusal would tell how many digits of a forged challenge are right.
        is_ours = hmac.compare_digest(expected, given)
        return is_ours and 0 <= since + 0.001 < _CHALLENGE_SECONDS and challenge not in self._used

    async def _connect(self, request: Request) -> Response:
        fields = await _read_json(request)
        name, challenge = fields.get("name", ""), fields.get("challenge", "")
        if self._closing:
            raise _make_stopped_error()
        if name not in self._silos or not self._is_open(challenge, name):
            raise HTTPException(403, "deploy.unknown_silo")
        # The signature is verified before anything that it covers is used.
        protocol, digest, stated = (fields.get(key, "") for key in ("protocol", "digest", "answers"))
        unsigned: Request | None = None
        try:
            signature = bytes.fromhex(fields.get("signature", ""))
            key = Ed25519PublicKey.from_public_bytes(self._silos[name])
            key.verify(signature, _protocol.format_connect_text(digest, name, challenge, stated))
            answers = int(stated)
        except (ValueError, InvalidSignature):
            answers, unsigned = -1, request
        # Before a wrong signature is refused: another protocol may sign another text.
        if protocol != str(PROTOCOL):
            raise self._refuse(name, 409, "deploy.version", unsigned)
        if unsigned is not None:
            raise self._refuse(name, 403, "deploy.key", unsigned)
        if digest != self._digest:
            raise self._refuse(name, 409, "deploy.digest")
        # Once only: whoever has recorded the call cannot connect with it again.
        self._used[challenge] = time.monotonic() + _CHALLENGE_SECONDS
        connection = self._connections[name]
        # The silo knows of fewer answers than have arrived here: its folder, ledgers included, is an old copy.
        if answers < self._answers[name]:
            raise self._refuse(name, 409, "deploy.rollback_detected")
        self._answers[name] = answers
        if connection.reading is not None:
            connection.reading.cancel()  # the other connection may be lost; the silo sends its answer again
            connection.reading = None
        # A new token ends the connection that the silo had before: there is one process of a silo at a time.
        connection.token = secrets.token_hex(32)
        self.mark_seen(name)
        _log.info("silo '%s' is connected", name)
        self.on_change()
        return JSONResponse({"token": connection.token})

    def _refuse(self, name: str, status: int, code: str, unsigned: Request | None = None) -> HTTPException:
        """Return the refusal of a connection; it is logged once a minute, as the silo tries again and again.

        Args:
            name: Name of the silo that asks to connect.
            status: HTTP status of the reply.
            code: Code of the error.
            unsigned: The request where it lacks the silo's signature; anyone in the consortium can make such a one.
        """
        now, sender = time.monotonic(), "" if unsigned is None else _find_host(unsigned)
        if now > self._refusals.get((name, code, bool(sender)), -math.inf) + REMINDER_SECONDS:
            self._refusals[name, code, bool(sender)] = now
            _log.warning(
                "refused %s silo '%s': %s; %s operator has to %s [%s]",
                f"a connection from {sender} in the name of" if sender else "the connection of",
                name,
                CODES[code],
                "if it is that silo, its" if sender else "its",
                _protocol.ADVICE[code],
                code,
            )
        return HTTPException(status, code)

    def _find_connection(self, request: Request) -> _SiloConnection:
        """Return the connection whose token a request shows; its silo was heard of."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        for connection in self._connections.values():
            # In constant time, so that the time of a refusal says nothing of the token.
            if connection.token and secrets.compare_digest(connection.token.encode(), token.encode()):
                self.mark_seen(connection.name)
                self._socket.hold(request.scope.get("client"), connection.name)
                request.scope[_HELD] = True
                return connection
        raise HTTPException(401, "deploy.not_connected")

    def _find_exchange(self, connection: _SiloConnection) -> Exchange | None:
        """Return the request that waits for the silo's answer."""
        return next(iter(self.find_pending(connection.name)), None)

    async def _next(self, request: Request) -> Response:
        connection = self._find_connection(request)
        if self._closing:
            raise _make_stopped_error()
        exchange = self._find_exchange(connection)
        if exchange is None and not self._is_over:
            connection.arrived.clear()  # a request after the look above sets it again, later in this thread
            with suppress(TimeoutError):
                await asyncio.wait_for(connection.arrived.wait(), _find_wait(request))
            exchange = self._find_exchange(connection)
        if self._is_over:
            connection.knows_the_end = True
            return Response(status_code=_protocol.OVER)
        if exchange is None:
            return Response(status_code=_protocol.NO_REQUEST)
        return StreamingResponse(
            _cut_async(exchange.request),
            media_type="application/octet-stream",
            headers={_protocol.EXCHANGE: exchange.id, "Content-Length": str(len(exchange.request))},
        )

    async def _answer(self, request: Request) -> Response:
        connection = self._find_connection(request)
        exchange, token = self._find_exchange(connection), connection.token
        over, asked = Response(status_code=_protocol.OVER), request.path_params["exchange"]
        if exchange is None or exchange.id != asked or connection.reading is not None:
            return over
        # A task of its own, so that `_connect` can cancel it when the silo comes back on another connection.
        size = min(int(request.headers.get("Content-Length", 0)), self._max_bytes)
        connection.read = 0, size

        def note(done: int) -> None:
            connection.read = done, size
            self._seen[connection.name] = time.monotonic()  # nobody waits for this: no thread is woken

        reading = connection.reading = asyncio.create_task(_read_body(request, self._max_bytes, note))
        try:
            body = await reading
        except asyncio.CancelledError:
            if connection.token == token:  # the server stops
                raise
            return over
        except ClientDisconnect:  # the silo connects again, and sends the answer again
            return over
        finally:
            if connection.reading is reading:
                connection.reading = None
        # The silo may have connected again, and its number of answers has this one; or the time for it is over.
        if connection.token != token or exchange.outcome is not None:
            return over
        code = request.headers.get(_protocol.REFUSED)
        if code is not None:
            reply = Reply(b"", code or "deploy.silo_failed")
        else:
            reply = Reply(body)
            if _log.isEnabledFor(logging.DEBUG):  # to be compared with the silo's audit log
                digest = hashlib.sha256(body).hexdigest()
                _log.debug("answer of silo '%s': %d bytes, sha256 %s", connection.name, len(body), digest)
            # Before the run's thread can see the answer: status.json states the number.
            self._answers[connection.name] += 1
        return Response(status_code=200) if self.deliver(exchange.id, reply) else over

    async def _health(self, request: Request) -> Response:
        # Nothing goes on without them, so a monitor that reads no more than the code shall notice.
        ended = self._list_ended()
        about: dict[str, Any] = {"status": "certificates have ended" if ended else "ok", "ended": ended}
        about |= {"version": silodp.__version__, "protocol": PROTOCOL, "digest": self._digest}
        return JSONResponse(about, 503 if ended else 200)

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(format_metrics(self._find_state()))

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(render_page(self._find_state()), headers=PAGE_HEADERS)

    def _find_state(self) -> State:
        waited = tuple(one.silo for one in self.find_pending())
        answers = {name: self._answers[name] for name in self._silos}
        since, transfers = self.seconds_since_seen(), self.transfers()
        return State(since, answers, waited, self.traffic, transfers=transfers, **self._describe())


def _make_uvicorn(app: ASGIApp, tls: ssl.SSLContext | None) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http="h11",
        ws="none",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=2,
    )
    config.load()
    config.ssl = tls
    return uvicorn.Server(config)


def _make_stopped_error() -> HTTPException:
    """Return the refusal of a server that closes; the connection ends with it, or it would keep the server open."""
    return HTTPException(503, "deploy.server_stopped", {"Connection": "close"})


def _find_wait(request: Request) -> int:
    """Return the seconds for which a call of a silo is held while there is no request for it."""
    stated = request.headers.get(_protocol.WAIT, "")
    wait = int(stated) if re.fullmatch(r"[0-9]{1,3}", stated) else _protocol.POLL_SECONDS
    return max(1, min(wait, _protocol.POLL_SECONDS))


def _find_host(request: Request) -> str:
    return "an unknown address" if request.client is None else request.client.host


async def _read_body(
    request: Request, max_bytes: int, note: Callable[[int], object] = lambda done: None
) -> bytes:
    body = io.BytesIO()  # hands out what was written without a copy
    # The bound is compared while the body arrives: a stated length may be missing or wrong.
    async for part in request.stream():
        if body.tell() + len(part) > max_bytes:
            raise HTTPException(413, "message.too_large")
        body.write(part)
        note(body.tell())
    return body.getvalue()


async def _cut_async(data: bytes) -> AsyncIterator[bytes]:
    for piece in _protocol.cut_data(data):
        yield piece


async def _read_json(request: Request) -> dict[str, str]:
    """Return the texts of a JSON object."""
    try:
        return parse_texts(await _read_body(request, _protocol.MAX_JSON))
    except (ValueError, ClientDisconnect):
        raise HTTPException(400, "message.malformed") from None
