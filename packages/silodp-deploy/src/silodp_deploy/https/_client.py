"""A silo's end of the HTTPS courier."""

from __future__ import annotations

import io
import logging
import re
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx

from silodp.crypto.keys import Identity
from silodp.errors import CODES, SilodpError
from silodp.parsing import parse_texts
from silodp.text import shorten
from silodp.wire.transport import Endpoint
from silodp_deploy import PROTOCOL
from silodp_deploy.https import _protocol
from silodp_deploy.https._outgoing import CONNECT_SECONDS, explain_failure, make_client
from silodp_deploy.https._proxy import Proxy
from silodp_deploy.mailbox import answer_request
from silodp_deploy.status import format_share

_log = logging.getLogger(__name__)

_SILENCE_SECONDS = 60.0
"""Silence after which a call fails: a server that has taken a long answer over a slow line replies late."""
_PROGRESS_SECONDS = 10.0
"""While a long answer is sent, a line of the log says so often how much of it has left."""
_TOKEN = re.compile(r"[0-9a-f]{64}")
_EXCHANGE_ID = re.compile(r"[0-9a-f]{32}")


class _RunIsOverError(Exception):
    """The server says that the run is over."""


class _OddReplyError(Exception):
    """Something answers that is no silodp server, or a broken one; the silo tries again."""


@dataclass(eq=False)
class _RefusedError(Exception):
    """The server refuses a call.

    Attributes:
        status: HTTP status of the reply.
        stated: Code of the error, as the server states it.
    """

    status: int
    stated: str


def _read_reply(reply: httpx.Response, max_bytes: int = _protocol.MAX_JSON) -> bytes:
    """Return the body of a reply that is being received.

    Raises:
        _OddReplyError: It is longer, or compressed; the rest was not read.
    """
    # `iter_raw` expands nothing, or a few bytes could become gigabytes: what is compressed is refused, not misread.
    if "Content-Encoding" in reply.headers:
        raise _OddReplyError("the reply is compressed, and not that of a silodp server")
    body = io.BytesIO()
    for part in reply.iter_raw():
        if body.tell() + len(part) > max_bytes:
            raise _OddReplyError(f"the reply has more than {max_bytes:,} bytes")
        body.write(part)
    return body.getvalue()


def _read_short_reply(reply: httpx.Response) -> bytes:
    """Return the body of a reply that is no request of the run.

    Raises:
        _RefusedError: The server refuses the call.
        _OddReplyError: As `_read_reply`.
    """
    body = _read_reply(reply)
    if not reply.is_success:
        raise _RefusedError(reply.status_code, body.decode(errors="replace"))
    return body


@dataclass(eq=False)
class HttpsClient:
    """A silo's end: it connects to the server, again and again, and lets an endpoint answer.

    Attributes:
        url: Address of the server, for example "https://server.example:8443".
        tls: TLS settings from `certificates.make_context`.
        identity: The silo's long-term key.
        digest: Digest of the public folder that the silo has accepted.
        endpoint: Answers signed requests.
        max_bytes: Bytes of the longest request. A longer one is not read to its end.
        max_pause: Longest pause between two tries to reach the server, in seconds.
        count_answers: Returns how many answers have left the silo.
        keep: Whether the silo goes on when the server says that the run is over.
        on_problem: Called with a sentence when the silo cannot reach its server, and with None when it is connected.
        proxy: The proxy of the silo's network; None: connect directly.
        prepare: Called before each try to connect; an error that it raises is what keeps the silo from its server.
        is_over: Whether the server said at last that the run is over.
        sending: Bytes of the answer that is being sent that have left, and its length; None: none is.
    """

    url: str
    tls: ssl.SSLContext
    identity: Identity
    digest: str
    endpoint: Endpoint
    max_bytes: int
    max_pause: float = 30.0
    count_answers: Callable[[], int] = lambda: 0
    keep: bool = False
    on_problem: Callable[[str | None], None] = lambda problem: None
    proxy: Proxy | None = None
    prepare: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self._token = ""
        self._seen: float | None = None
        self._wait = _protocol.POLL_SECONDS
        self.is_over = False
        self.sending: tuple[int, int] | None = None
        if not self.url.startswith("https://"):
            raise SilodpError(
                f"url = {shorten(self.url)}: give an address that begins with https://.",
                code="argument.value",
                field="url",
            )
        self._client = make_client(self.url, self.tls, self.proxy, _SILENCE_SECONDS)

    def seconds_since_seen(self) -> float | None:
        """Return the seconds since the server's last reply; None before the first one."""
        return None if self._seen is None else time.monotonic() - self._seen

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set, or the run is over; a server that cannot be reached is tried again.

        Raises:
            SilodpError: The proxy does not accept user and password (code deploy.proxy_login).
        """
        pause = 0.1
        with self._client:
            while not stop.is_set():
                try:
                    if not self._token:
                        self.prepare()
                        self._connect()
                        way = "" if self.proxy is None else f" through the proxy at {self.proxy.url}"
                        _log.info("connected to %s%s", self.url, way)
                        self.on_problem(None)
                    self._seen = time.monotonic()
                    self._serve_one()
                    self.is_over = False
                    pause = 0.1
                except _RunIsOverError:
                    self._token, self.is_over = "", True
                    _log.info("the run is over; %s", "waiting for another one" if self.keep else "ending")
                    if not self.keep:
                        return
                    stop.wait(self.max_pause)
                except (_RefusedError, _OddReplyError, httpx.HTTPError, SilodpError) as error:
                    # Whatever failed, the silo connects anew: its number of answers and its version are checked again.
                    self._token = ""
                    if isinstance(error, _RefusedError) and error.status == 401:
                        continue  # the server was restarted: connect again at once
                    problem = self._describe_problem(error)
                    self.on_problem(problem)
                    _log.warning("%s; trying again in %.1f s", problem, pause)
                    # The pause is random, so that the silos of a restarted server do not come back all at once.
                    stop.wait(pause * (0.5 + secrets.randbelow(1000) / 1000))
                    pause = min(2 * pause, self.max_pause)

    def _describe_problem(self, error: Exception) -> str:
        """Return what keeps the silo from its server, and what its operator can do.

        Raises:
            SilodpError: To try again could do harm (code deploy.proxy_login).
        """
        if isinstance(error, _RefusedError):
            code = error.stated if error.stated in CODES else shorten(error.stated)
            known = CODES.get(code, "an unknown reason")
            advice = _protocol.ADVICE.get(code, "ask its operator")
            return f"the server refused the connection: {known}; {advice} [{code}]"
        failure = (
            error
            if isinstance(error, SilodpError)
            else explain_failure(error, self.url, self.tls, self.proxy)
        )
        problem = f"{str(failure).removesuffix('.')} [{failure.code}]"
        # Many networks lock an account after a few wrong passwords.
        if failure.code == "deploy.proxy_login":
            self.on_problem(problem)
            raise failure
        return problem

    def _connect(self) -> None:
        name = self.identity.name
        # The server's random text makes the signature worth nothing in another connection.
        challenge = self._post("/v1/challenge", {"name": name}).get("challenge", "")
        answers = str(self.count_answers())
        text = _protocol.format_connect_text(self.digest, name, challenge, answers)
        fields = {"name": name, "answers": answers, "challenge": challenge, "digest": self.digest}
        fields |= {"protocol": str(PROTOCOL), "signature": self.identity.sign(text).hex()}
        token = self._post("/v1/connect", fields).get("token", "")
        if _TOKEN.fullmatch(token) is None:
            raise _OddReplyError("the reply to /v1/connect is not that of a silodp server")
        self._token = token

    def _post(self, path: str, fields: dict[str, str]) -> dict[str, str]:
        with self._client.stream("POST", path, json=fields) as reply:
            body = _read_short_reply(reply)
        try:
            return parse_texts(body)
        except ValueError:
            raise _OddReplyError(f"the reply to {path} is not that of a silodp server") from None

    def _fetch(self, headers: dict[str, str]) -> tuple[str, bytes] | None:
        """Return the id and the bytes of the next request; None where there is none yet."""
        timeout = httpx.Timeout(self._wait + _protocol.MARGIN_SECONDS, connect=CONNECT_SECONDS)
        headers = {**headers, _protocol.WAIT: str(self._wait)}
        try:
            with self._client.stream("POST", "/v1/next", headers=headers, timeout=timeout) as reply:
                if reply.status_code == _protocol.OVER:
                    raise _RunIsOverError
                if not reply.is_success or reply.status_code == _protocol.NO_REQUEST:
                    _read_short_reply(reply)
                    return None
                exchange = reply.headers.get(_protocol.EXCHANGE, "")
                if _EXCHANGE_ID.fullmatch(exchange) is None:
                    raise _OddReplyError("the reply to /v1/next is not that of a silodp server")
                return exchange, _read_reply(reply, self.max_bytes)
        except httpx.ReadTimeout:
            # A firewall may have forgotten the connection while it was silent: from now on it is silent for less time.
            # Packets of TCP that keep a connection alive would not pass a proxy, and a shorter call does.
            self._wait = max(1, self._wait // 4)
            raise

    def _serve_one(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}"}
        fetched = self._fetch(headers)
        if fetched is None:
            return
        exchange, request = fetched
        reply = answer_request(self.endpoint, request)
        if reply.refused:
            headers[_protocol.REFUSED] = reply.refused
        headers["Content-Length"] = str(len(reply.body))
        # An iterator and a stated length: httpx sends piece by piece, and the server can refuse what is too long.
        content = self._cut_answer(reply.body)
        try:
            with self._client.stream(
                "POST", f"/v1/answer/{exchange}", headers=headers, content=content
            ) as sent:
                # Where the time for the answer was over, the server will ask again, or go on without.
                if sent.status_code != _protocol.OVER:
                    _read_short_reply(sent)
        finally:
            self.sending = None

    def _cut_answer(self, body: bytes) -> Iterator[bytes]:
        """Return the pieces of an answer; note, and tell in the log, how much of it has left."""
        done, told = 0, time.monotonic()
        for piece in _protocol.cut_data(body):
            # The piece before has left when the next one is asked for: the server, or its line, takes what is sent.
            self.sending, self._seen = (done, len(body)), time.monotonic()
            if self._seen >= told + _PROGRESS_SECONDS:
                told = self._seen
                _log.info("sending an answer: %s", format_share(done, len(body)))
            yield piece
            done += len(piece)
