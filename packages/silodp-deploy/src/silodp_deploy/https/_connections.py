"""The sockets of a server, with bounds: a stranger can open connections before any certificate is shown."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import logging
import math
import os
import resource
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from silodp.errors import SilodpError

_log = logging.getLogger(__name__)

_IDLE_SECONDS = 10.0
"""Time that a connection has for the TLS handshake and a request, and again after each request of a silo."""
_SWEEP_SECONDS = 1.0
_REPORT_SECONDS = 60.0
_MAX_CLOSING = 32
"""Connections that are being closed, beside those that are open; further ones wait to be accepted."""
_MAX_HELD = 4
"""Connections of one silo that are kept: one that works, and some that a firewall has forgotten."""
_MAX_UNCOLLECTED = 64
"""Closed connections after which the garbage collector is run; each holds 256 KiB until then."""
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Returns free memory to the system; only glibc has it."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OTHER_DESCRIPTORS = 256
"""File descriptors in reserve, for the files and libraries of the process."""
_Address = tuple[str, int] | None
"""Host and port of the other end of a connection; uvicorn gives None where it knows neither."""


@dataclass
class _Connection:
    """An accepted connection.

    Attributes:
        socket: The connected socket.
        since: When the connection became idle, in seconds of `time.monotonic`.
        silo: Name of the silo whose requests it serves; "" where it is idle.
        requests: Number of the silo's requests that are being answered.
        is_closing: Whether it was shut down, and the event loop has yet to close it.
    """

    socket: socket.socket
    since: float
    silo: str = ""
    requests: int = 0
    is_closing: bool = False


class BoundedListener(socket.socket):
    """A listening socket that bounds its connections in number and in time; for the event loop of asyncio.

    A connection is idle unless a request of a connected silo holds it. Idle ones are closed after `_IDLE_SECONDS`; and
    where as many as allowed are open, the one that has been idle for longest is closed for a new one. So a stranger
    takes no place from a silo, which needs a fraction of a second to show its certificate and its token.

    Args:
        listener: A listening socket, which this object takes over.
        max_open: The largest number of connections that are open at the same time.
    """

    def __init__(self, listener: socket.socket, max_open: int) -> None:
        super().__init__(fileno=listener.detach())
        self._max_open = max_open
        # By the address of the other end; the connection that has been idle for longest comes first.
        self._open: dict[_Address, _Connection] = {}
        self._held: dict[str, deque[_Address]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed_early, self._reported = 0, -_REPORT_SECONDS
        self._uncollected, self._next_collection = 0, -math.inf
        # Held so that a connection can be accepted, and closed, when no other descriptor is left (`_turn_away`).
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, which the loop's thread calls; close an idle one where too many are open.

        Raises:
            BlockingIOError: There is none now.
        """
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)
        self._forget_closed()
        # The loop closes a connection some time after it was shut down. Until then its descriptor counts.
        if len(self._open) >= self._max_open + _MAX_CLOSING:
            raise BlockingIOError(errno.EAGAIN, "connections are being closed")
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self._turn_away()
            raise BlockingIOError(errno.EAGAIN, "no file descriptor is left") from None
        self._open[address[:2]] = _Connection(connection, time.monotonic())
        if sum(not one.is_closing for one in self._open.values()) > self._max_open:
            self._close_one()
        return connection, address

    def close(self) -> None:
        """Close the socket; connections stay open."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        super().close()

    def hold(self, address: _Address, silo: str) -> None:
        """Keep a connection open, since a silo with a token has made a request on it.

        Args:
            address: Host and port of the other end.
            silo: Name of the silo. The last `_MAX_HELD` of its connections are kept.
        """
        connection = self._open.get(address)
        if connection is None:
            return
        connection.requests += 1
        if connection.requests > 1:
            return
        connection.silo = silo
        held = self._held.setdefault(silo, deque())
        held.append(address)
        # A firewall may forget connections without a word: of those of one silo, only the newest are kept.
        if len(held) > _MAX_HELD:
            self._set_idle(held[0])

    def release(self, address: _Address) -> None:
        """Let a connection be idle again when all requests that hold it are answered."""
        connection = self._open.get(address)
        if connection is not None and connection.requests:
            connection.requests -= 1
            if not connection.requests:
                self._set_idle(address)

    def _set_idle(self, address: _Address) -> None:
        connection = self._open.pop(address)
        if connection.silo:
            self._held[connection.silo].remove(address)
        connection.silo, connection.requests, connection.since = "", 0, time.monotonic()
        # Entered anew at the end: a dict keeps this order, so the first idle entry has been idle for longest.
        self._open[address] = connection

    def _forget_closed(self) -> None:
        for address in [a for a, one in self._open.items() if one.socket.fileno() < 0]:
            self._set_idle(address)
            del self._open[address]
            self._uncollected += 1
        if self._uncollected >= _MAX_UNCOLLECTED:
            self._collect()

    def _collect(self) -> None:
        """Free closed connections, of which a stranger can make thousands in a minute.

        asyncio's TLS leaves each that failed in a cycle with its exception, with a buffer of 256 KiB. The collector
        runs by itself after a number of objects, and does not see how large they are; and what it frees stays with the
        allocator of the C library, in pieces, until that is asked for it.
        """
        started = time.monotonic()
        if started < self._next_collection:
            return
        gc.collect()
        if _malloc_trim is not None:
            _malloc_trim(0)
        # At most a quarter of the time, also where a process has many objects.
        self._uncollected = 0
        self._next_collection = time.monotonic() + 3 * (time.monotonic() - started)

    def _close_one(self) -> None:
        """Close the connection that has been idle for longest; the newest is one of them."""
        self._closed_early += 1
        self._shut_down(next(one for one in self._open.values() if not one.silo and not one.is_closing))

    @staticmethod
    def _shut_down(connection: _Connection) -> None:
        connection.is_closing = True  # the loop sees its end, and closes it
        with suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)

    def _turn_away(self) -> None:
        """Accept a connection with the spare descriptor and close it: one left waiting would wake the loop again."""
        self._closed_early += 1
        os.close(self._spare)
        try:
            with suppress(OSError):
                super().accept()[0].close()
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _sweep(self) -> None:
        """Close what has been idle for too long, and say once a minute how many were closed before."""
        now, self._sweeping = time.monotonic(), None
        self._forget_closed()
        for connection in self._open.values():
            if not connection.silo and not connection.is_closing and now > connection.since + _IDLE_SECONDS:
                self._shut_down(connection)
        if self._closed_early and now > self._reported + _REPORT_SECONDS:
            _log.warning(
                "closed %d connections that served no silo, since more than %d were open or no file descriptor was "
                "left: let the firewall admit the silos' addresses only",
                self._closed_early,
                self._max_open,
            )
            self._closed_early, self._reported = 0, now
        if self._open or self._closed_early or self._uncollected >= _MAX_UNCOLLECTED:
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)


def find_max_connections(silos: int) -> int:
    """Return how many connections a server may have open, and raise the process's limit on descriptors for them.

    Raises:
        SilodpError: The process may not have enough descriptors for its silos (code deploy.address).
    """
    # `least` serves every silo with all connections that are held for it, and 16 strangers beside them.
    least, wanted = _MAX_HELD * silos + 16, _MAX_HELD * silos + 256
    beside = _MAX_CLOSING + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + beside:
        soft = wanted + beside if hard == resource.RLIM_INFINITY else min(wanted + beside, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    max_open = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - beside)
    if max_open < least:
        raise SilodpError(
            f"the server may open {soft:,} files at the same time, and needs {least + beside:,} for its connections to "
            "so many silos: raise the limit (ulimit -n, or LimitNOFILE of the unit).",
            code="deploy.address",
            field="listen",
        )
    return max_open


def listen_at(address: tuple[str, int], option: str) -> socket.socket:
    """Return a socket that listens; without a host, on all addresses of IPv4 and IPv6 that the machine has.

    Args:
        address: Host, which may be an IPv6 address without brackets, and port.
        option: The option that gives the address, for the message of an error.

    Raises:
        SilodpError: The address is taken, or is none of this machine (code deploy.address).
    """
    host, port = address
    takes_both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if takes_both or ":" in host else socket.AF_INET
    try:
        return socket.create_server(address, family=family, dualstack_ipv6=takes_both)
    except OSError as error:
        raise SilodpError(
            f"the server cannot listen on {host}:{port} ({error.strerror}): choose another address with "
            f"--{option}, or stop the program that uses it.",
            code="deploy.address",
            field=option,
        ) from error
