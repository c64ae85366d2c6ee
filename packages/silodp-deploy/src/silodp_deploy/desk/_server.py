"""The server of the desk: HTTP at 127.0.0.1 for one browser, that of the person who has the printed link.

Others can reach the port: programs of other users of the machine, and pages of other sites in the same browser. So a
request is answered only if

- `Host` is this server by its address, and not a name that another site has made point to it (DNS rebinding);
- its path begins with a secret part, and a cookie shows that the link was opened. Browsers send cookies of a host to
  all its ports, where another user may listen: the cookie is bound to the secret path, which nobody there knows;
- a form was sent by a page of this server (`Origin`, `Sec-Fetch-Site`) and has the secret field of its forms.

Source: OWASP, Cross-Site Request Forgery Prevention Cheat Sheet (origin, token, SameSite); RFC 6265bis (cookies).
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qs

from silodp.cli._console import describe_failure
from silodp.report.formatting import FILTERS, make_environment
from silodp_deploy.desk._pages import PAGES, Desk, Page
from silodp_deploy.https import listen_at
from silodp_deploy.https._monitor import PAGE_HEADERS

if TYPE_CHECKING:
    from jinja2 import Environment

_log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
COOKIE = "silodp_desk"
MAX_FORM_BYTES = 16 * 1024
_HEADERS = {
    **PAGE_HEADERS,
    "Content-Security-Policy": f"{PAGE_HEADERS['Content-Security-Policy']}; form-action 'self'",
    # With "no-referrer" a browser would send "Origin: null" with the desk's own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_MAX_FIELDS = 20
_SECONDS = 10.0
"""A connection on which nothing arrives for so long is closed."""
_MAX_STRANGERS = 64
"""Connections that have not shown the cookie yet: for a further one the oldest of them is closed."""
_CLOSED = "This page is for the browser that opened the link of 'silodp desk'. Start the command again for a new link."


class _Refusal(Exception):
    """A request that is not answered with a page of the desk: status and sentence."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(told)
        self.status, self.told = status, told


class DeskServer(ThreadingHTTPServer):
    """Serves the pages of one silo to one browser.

    Args:
        desk: What the pages show, and what their form does.
        port: Port at 127.0.0.1; 0: a free one.

    Attributes:
        link: The address that lets one browser in, once.

    Raises:
        SilodpError: The port is taken (code deploy.address).
    """

    daemon_threads = True

    def __init__(self, desk: Desk, port: int = 0) -> None:
        super().__init__((ADDRESS, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listen_at((ADDRESS, port), "port")
        self.server_port = int(self.socket.getsockname()[1])
        self.desk, self.one_at_a_time = desk, threading.Lock()
        self._strangers, self._changing = dict[socket.socket, None](), threading.Lock()
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        self.base = f"/{secrets.token_urlsafe(16)}/"
        self.key, self.session, self.form_key = (secrets.token_urlsafe(32) for _ in range(3))
        self.is_open = False
        # Who opens the link, and who is in: two secrets, since a link may be seen on the screen.
        self.link = f"http://{ADDRESS}:{self.server_port}{self.base}open?key={self.key}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; whoever keeps many open without a request takes no place from others."""
        with self._changing:
            self._strangers[request] = None
            if len(self._strangers) > _MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread sees the end, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.admit(request)
        super().shutdown_request(request)

    def use_link(self) -> bool:
        """Use the link up; return whether it was unused."""
        with self._changing:
            was_open, self.is_open = self.is_open, True
        return not was_open

    def admit(self, request: socket.socket) -> None:
        """Keep a connection open however many others there are."""
        with self._changing:
            self._strangers.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a connection failed, as where a browser goes away; the others go on."""
        _log.debug("a connection failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: DeskServer
    timeout = _SECONDS
    server_version = "silodp"
    sys_version = ""
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"
    _names: ClassVar = {name for name, _ in PAGES}

    def do_GET(self) -> None:
        """Answer with a page; nothing is changed, but that the link is used up."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Accept or refuse by the form of the page "decision"."""
        self._answer(self._post)

    def _answer(self, find: Any) -> None:
        try:
            found = find()
        except _Refusal as refusal:
            found = Page("message.html", refusal.told, {"told": ""}, refusal.status)
        except Exception as error:
            failure = describe_failure(error)
            found = Page("message.html", "This page cannot be shown", {"told": failure.sentence}, 500)
        if isinstance(found, str):
            self._send(303, b"", {"Location": self.server.base + found})
        else:
            self._send_page(found)

    def _get(self) -> Page:
        self._check_host()
        path, query = self._split()
        if path == "open":
            return self._open(query.get("key", ""))
        self._check_session()
        if path not in self._names:
            raise _Refusal(404, "There is no such page")
        with self.server.one_at_a_time:
            return self.server.desk.show(path, query)

    def _post(self) -> str | Page:
        self._check_host()
        self._check_origin()
        path, _ = self._split()
        self._check_session()
        form = self._read_form()
        if not secrets.compare_digest(form.get("form_key", "").encode(), self.server.form_key.encode()):
            raise _Refusal(403, "The form is of an earlier desk: open the page again")
        if path != "decision":
            raise _Refusal(404, "There is no such form")
        # One after the other: a second "accept" finds what the first has written.
        with self.server.one_at_a_time:
            return self.server.desk.decide(form)

    def _check_host(self) -> None:
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            raise _Refusal(403, _CLOSED)

    def _check_origin(self) -> None:
        """Refuse a form that no page of this server has sent; every browser says who did."""
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site")
        known = (None, f"http://{self.headers['Host']}")
        if origin not in known or site not in (None, "same-origin") or (origin, site) == (None, None):
            raise _Refusal(403, "The form was not sent by a page of this desk, so nothing was done")

    def _split(self) -> tuple[str, dict[str, str]]:
        """Return the path below the secret part, and the fields of the query."""
        # Not by urlsplit, which raises for some texts that a stranger may send.
        path, _, query = self.path.partition("?")
        base = self.server.base
        if not secrets.compare_digest(path[: len(base)].encode(), base.encode()):
            raise _Refusal(403, _CLOSED)
        return path[len(base) :], _read_fields(query)

    def _check_session(self) -> None:
        # Another program at this address may have set a cookie of the same name, so any of them counts.
        cookies = [one.strip() for one in self.headers.get("Cookie", "").split(";")]
        expected = f"{COOKIE}={self.server.session}".encode()
        if not any(secrets.compare_digest(one.encode(), expected) for one in cookies):
            raise _Refusal(403, _CLOSED)
        self.server.admit(self.connection)

    def _open(self, key: str) -> Page:
        """Let the first browser in that has the link; for one that is in, the link leads to the first page."""
        server = self.server
        is_right = secrets.compare_digest(key.encode(), server.key.encode())
        # Of two at the same time, one finds it used.
        if not (is_right and server.use_link()):
            self._check_session()
        # A page and no redirect: after a click in another site, no cookie that is strict would come with it.
        return Page("open.html", "The desk is open", {"session": server.session})

    def _read_form(self) -> dict[str, str]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or self.headers.get("Transfer-Encoding"):
            raise _Refusal(411, "The form does not say how long it is")
        # By its digits first: Python refuses to read a number of thousands.
        if len(length) > 9 or int(length) > MAX_FORM_BYTES:
            raise _Refusal(413, f"The form has more than {MAX_FORM_BYTES:,} bytes")
        if self.headers.get_content_type() != "application/x-www-form-urlencoded":
            raise _Refusal(415, "This is no form of the desk")
        return _read_fields(self.rfile.read(int(length)).decode(errors="replace"))

    def _send_page(self, page: Page) -> None:
        headers = {"Content-Type": "text/html; charset=utf-8"}
        values = dict(page.values)
        if session := values.pop("session", None):
            headers["Set-Cookie"] = f"{COOKIE}={session}; Path={self.server.base}; HttpOnly; SameSite=Strict"
        is_inside = page.name is not None  # else nobody may have shown a cookie: the page has no secret
        text = (
            _make_environment()
            .get_template(page.template)
            .render(
                title=page.title,
                pages=PAGES if is_inside else (),
                here=page.name,
                form_key=self.server.form_key if is_inside else "",
                **values,
            )
        )
        # A name of a file that is no UTF-8 has half of a character.
        self._send(page.status, text.encode(errors="replace"), headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self) -> None:
        """Add the headers that every response has, an error too."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log no request: its address has the secret part."""


def _read_fields(text: str) -> dict[str, str]:
    """Return the fields of a query or form, the last of each name."""
    try:
        found = parse_qs(text, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise _Refusal(400, f"The form has more than {_MAX_FIELDS} fields") from None
    return {name: values[-1] for name, values in found.items()}


@cache
def _make_environment() -> Environment:
    """Return what renders the pages."""
    environment = make_environment(Path(__file__).parent).overlay(finalize=_show_controls)
    environment.filters |= FILTERS
    return environment


def _show_controls(value: Any) -> Any:
    """Return a text with characters visible that would hide or reorder others: the coordinator wrote it.

    Lines stay, as in a query. What a form sends back is given as `value | e`, which is left as it is.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in value)
