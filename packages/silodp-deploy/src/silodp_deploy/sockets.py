"""The sockets at which couriers meet the server and the silos; see `silodp_deploy.courier` for a courier's end.

`ServerSocket` is the mailbox of a server: it offers every request to couriers, again and again, until an answer is
given or the time for it is over. `SiloSocket` lets an endpoint answer. Neither trusts a courier: a message is
authenticated by its signature.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from silodp.errors import SilodpError
from silodp.wire.transport import Endpoint
from silodp_deploy.courier import Reply, receive_frame, send_frame
from silodp_deploy.mailbox import Exchange, Mailbox, answer_request

_log = logging.getLogger(__name__)

_READ_SECONDS = 60.0
"""A courier that sends nothing for so long in the middle of a frame is left."""
_MAX_WAIT = 60.0
_MAX_CALLS, _MAX_REQUESTS = 64, 4
"""Connections at the server's socket, where couriers wait for requests, and at a silo's, where each holds a request."""
_WAIT = re.compile(r"\d{1,6}(\.\d{1,9})?")


# --- a socket in the file system ---


class _Listener:
    """A Unix socket that calls `serve` with every connection, each in a thread of its own.

    Args:
        path: Path where the socket is made. A socket that a stopped process has left there is replaced.
        group: Name of a group whose members may connect too; None: the user of this process alone.
        max_connections: Number of connections that are served at the same time. Further ones wait.
        serve: Called with each connection.
    """

    def __init__(
        self, path: Path, group: str | None, max_connections: int, serve: Callable[[socket.socket], None]
    ) -> None:
        self._path, self._serve = path, serve
        self._free = threading.BoundedSemaphore(max_connections)
        self._stop = threading.Event()
        self._socket = _listen(path, group)
        self._thread = threading.Thread(target=self._accept, name="couriers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        _log.info("couriers can connect at %s", self._path)
        return self

    def __exit__(self, *error: object) -> None:
        # The order matters: `_accept` sees a socket that was shut down, and must find the stop already set.
        self._stop.set()
        self._path.unlink(missing_ok=True)
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._socket.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            # Before `accept`: connections beyond the bound wait in the queue of the system, and take no thread.
            self._free.acquire()
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                self._free.release()
                if not self._stop.is_set():
                    _log.warning("a courier could not connect: %s", error)
                    self._stop.wait(0.1)
                continue
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_READ_SECONDS)
                self._serve(connection)
        except OSError as error:  # the courier may call again
            _log.info("a courier's call failed: %s", error)
        finally:
            self._free.release()


def _listen(path: Path, group: str | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_abandoned(path)
        # Linux makes the socket with these permissions; elsewhere they follow, still before anybody can connect.
        with suppress(OSError):
            os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        path.chmod(0o600)
        if group is not None:
            _give_to_group(path, group)
        listener.listen(64)
    except (OSError, SilodpError) as error:
        listener.close()
        if isinstance(error, SilodpError):
            raise
        raise SilodpError(
            f"no socket can be made at {path} ({error.strerror or error}): choose a path of at most 100 characters, in "
            "a folder that exists and that this user may write to.",
            code="deploy.address",
            field="socket",
        ) from error
    return listener


def _remove_abandoned(path: Path) -> None:
    """Delete a socket at which nobody listens any more; refuse to replace anything else."""
    if not path.exists():
        return
    # After a crash the file of the socket stays. Only a refused connection proves that nobody listens any more.
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                return
    raise SilodpError(
        f"{path} is there, and is in use or no socket: stop the process that uses it, or choose another path with "
        "--socket.",
        code="deploy.address",
        field="socket",
    )


def _give_to_group(path: Path, group: str) -> None:
    """Let the members of a group connect."""
    try:
        shutil.chown(path, group=group)
    except (LookupError, PermissionError) as error:
        if isinstance(error, LookupError):
            raise _refuse_group(group, "this machine has no such group") from None
        raise _refuse_group(
            group,
            f"this user may not give the socket {path} to the group ({error.strerror}): make the user a member of it, "
            "and log in again",
        ) from error
    path.chmod(0o660)


def _refuse_group(group: str, problem: str) -> SilodpError:
    return SilodpError(f"socket_group = '{group}': {problem}.", code="argument.value", field="socket_group")


# --- a silo's end ---


class SiloSocket:
    """A silo's end: an endpoint answers what couriers bring, one request after the other.

    Args:
        path: Path of the socket.
        endpoint: Answers signed requests.
        max_bytes: Bytes of the longest request. A longer one is not read.
        group: Name of the group whose members may connect too; None: this user alone.
    """

    def __init__(self, path: Path, endpoint: Endpoint, max_bytes: int, group: str | None = None) -> None:
        self._endpoint, self._max_bytes = endpoint, max_bytes
        self._requests: queue.SimpleQueue[tuple[bytes, Future[Reply]]] = queue.SimpleQueue()
        self._listener = _Listener(path, group, _MAX_REQUESTS, self._serve)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set.

        The thread that calls this answers: if it is interrupted, no reply leaves in the name of the silo.
        """
        with self._listener:
            while not stop.is_set():
                with suppress(queue.Empty):
                    self._answer_one()

    def _answer_one(self) -> None:
        # A function of its own: variables of the loop would keep a long request and its answer until the next one.
        request, reply = self._requests.get(timeout=0.2)
        reply.set_result(answer_request(self._endpoint, request))

    def _serve(self, connection: socket.socket) -> None:
        # In a thread for each courier, while one thread answers: a slow courier does not keep the silo from others.
        header, body = receive_frame(connection, self._max_bytes)
        if header.get("do") != "answer":
            raise ConnectionError("a call that a silo does not know")
        reply: Future[Reply] = Future()
        self._requests.put((body, reply))
        send_frame(connection, {"refused": reply.result().refused}, reply.result().body)


# --- the server's end ---


@dataclass(frozen=True)
class SocketOptions:
    """Where couriers of somebody's own meet the server (docs/couriers.md).

    Attributes:
        path: Path of the Unix socket.
        group: Name of the group whose members may connect too; None: this user alone.
        repeat: Seconds after which a request without an answer is offered to couriers again.
    """

    path: Path
    group: str | None = None
    repeat: float = 30.0


class ServerSocket(Mailbox):
    """The server's end: a mailbox that listens for couriers while it is entered as a context manager.

    Args:
        options: Where couriers meet the server.
        silos: Names of the silos.
        answer_timeout: Seconds that a silo has for an answer.
        max_bytes: Bytes of the longest answer. A longer one is not read.
        answers: Number of answers that have left each silo, see `Mailbox`. They are not counted here.
    """

    def __init__(
        self,
        options: SocketOptions,
        silos: Iterable[str],
        *,
        answer_timeout: float,
        max_bytes: int,
        answers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(silos, answer_timeout, answers)
        self._max_bytes, self._repeat = max_bytes, options.repeat
        self._listener = _Listener(options.path, options.group, _MAX_CALLS, self._serve)

    def __enter__(self) -> Self:
        self._listener.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.__exit__(*error)

    def _serve(self, connection: socket.socket) -> None:
        header, body = receive_frame(connection, self._max_bytes)
        if header.get("do") == "take" and _WAIT.fullmatch(header.get("wait", "")):
            self._offer(connection, min(float(header["wait"]), _MAX_WAIT))
        elif header.get("do") == "give":
            is_awaited = self.deliver(header.get("exchange", ""), Reply(body, header.get("refused", "")))
            send_frame(connection, {"awaited": "yes" if is_awaited else "no"})
        else:
            raise ConnectionError("a call that the server does not know")

    def _offer(self, connection: socket.socket, wait: float) -> None:
        exchange = self._take_due(wait)
        # An empty frame: a courier calls again, and needs no connection that is open for hours.
        if exchange is None:
            send_frame(connection, {})
            return
        try:
            send_frame(connection, {"exchange": exchange.id, "silo": exchange.silo}, exchange.request)
        except OSError:
            with self._changed:
                exchange.due = time.monotonic()  # the courier has gone: another one may take it at once
                self._changed.notify_all()
            raise

    def _take_due(self, wait: float) -> Exchange | None:
        """Return a request that is due, and have it offered again later; None where none is within `wait` seconds."""
        end = time.monotonic() + wait
        with self._changed:
            # The lock is held from the look to the new due time, so that two couriers never take the same request.
            while True:
                now = time.monotonic()
                exchange = min(self.find_pending(), key=lambda one: one.due, default=None)
                if exchange is not None and exchange.due <= now:
                    exchange.due = now + self._repeat
                    return exchange
                if now >= end:
                    return None
                self._changed.wait((end if exchange is None else min(end, exchange.due)) - now)
