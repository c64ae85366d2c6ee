"""What a courier calls: take requests at the server's socket, have silos answer them at theirs, give the answers back.

A courier is a program beside the server, and one beside every silo, that carries bytes over some network. It knows no
secrets: server and silos sign every message for its recipient. It can lose, repeat and delay messages, and nothing
else; so it keeps nothing, and may be stopped at any moment. A request that stays unanswered is offered again, and a
silo that is asked twice gives the same answer twice.

This module needs the standard library alone, and imports nothing of silodp: it can be copied, so that a courier runs in
any environment, under a user who cannot read the files of the party. On a socket every call is a connection with one
frame in each direction:

    4 bytes   length of the header, big-endian
    8 bytes   length of the body
    header    a JSON object of texts
    body      a signed message, or nothing
"""

from __future__ import annotations

import io
import json
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

CONNECT_SECONDS = 10.0
_LENGTHS = struct.Struct(">IQ")
_MAX_HEADER, _MAX_PIECE = 4096, 1 << 18


@dataclass(frozen=True)
class Request:
    """A signed request of the server for one silo.

    Attributes:
        exchange: Name of the exchange, 32 hexadecimal digits, with which the answer is given back.
        silo: Name of the silo.
        body: The signed bytes, which are brought to the silo unchanged.
    """

    exchange: str
    silo: str
    body: bytes


@dataclass(frozen=True)
class Reply:
    """What a silo says to a request: a signed answer, or that it refuses.

    Attributes:
        body: The signed answer; empty where the silo refuses.
        refused: Code of the error for which the silo refuses; empty where it answers.
    """

    body: bytes
    refused: str = ""


def take_request(path: str | Path, wait: float = 20.0) -> Request | None:
    """Take a request at the server's socket.

    Args:
        path: Path of the socket (`silodp server --socket PATH`).
        wait: Seconds to wait until there is a request.

    Returns:
        The request; None where there is none yet.

    Raises:
        OSError: No server listens, or the connection broke: try again.
    """
    header, body = _call(path, {"do": "take", "wait": str(wait)}, b"", wait + CONNECT_SECONDS)
    return Request(header["exchange"], header["silo"], body) if "exchange" in header else None


def give_reply(path: str | Path, exchange: str, reply: Reply) -> bool:
    """Give a silo's reply to the server.

    Args:
        path: Path of the server's socket.
        exchange: `Request.exchange` of the request.
        reply: What `ask_silo` has returned.

    Returns:
        Whether the server still waited for it.

    Raises:
        OSError: No server listens, or the connection broke: try again, or leave it; the request is offered again.
    """
    header = {"do": "give", "exchange": exchange, "refused": reply.refused}
    answer, _ = _call(path, header, reply.body, 60.0)
    return answer.get("awaited") == "yes"


def ask_silo(path: str | Path, body: bytes, timeout: float | None = None, wait: float = 0.0) -> Reply:
    """Have a silo answer a request.

    Args:
        path: Path of the silo's socket (`silodp silo --socket PATH`).
        body: `Request.body`, as it was taken at the server.
        timeout: Seconds to wait; None: until the silo answers.
        wait: Seconds for which a silo that starts, or starts again, is tried again; the next offer of the request may
            be much farther away.

    Raises:
        OSError: No silo listens, or the connection broke: try again, or leave it; the request is offered again.
    """
    end = time.monotonic() + wait
    while True:
        try:
            header, answer = _call(path, {"do": "answer"}, body, timeout)
            return Reply(answer, header.get("refused", ""))
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.5)


def _call(
    path: str | Path, header: dict[str, str], body: bytes, timeout: float | None
) -> tuple[dict[str, str], bytes]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(str(path))
        except OSError as error:
            # Python names no file for a socket, and a courier has two: its log has to say which one.
            if error.errno is not None:
                error.filename = str(path)
            raise
        # A silo may compute for minutes before it answers, while a socket that exists answers at once.
        connection.settimeout(timeout)
        send_frame(connection, header, body)
        return receive_frame(connection)


def send_frame(connection: socket.socket, header: dict[str, str], body: bytes = b"") -> None:
    """Send one frame; the body is not copied."""
    encoded = json.dumps(header).encode()
    connection.sendall(_LENGTHS.pack(len(encoded), len(body)) + encoded)
    # Not joined with the header, which would copy a body of gigabytes; and an empty body is not sent, since a peer
    # that has the whole frame may have closed the connection.
    if len(body):
        connection.sendall(body)


def receive_frame(connection: socket.socket, max_bytes: int | None = None) -> tuple[dict[str, str], bytes]:
    """Receive one frame: its header and its body.

    Args:
        connection: The connected socket.
        max_bytes: The largest length of the body in bytes; a longer one is not read. None: no limit.

    Raises:
        OSError: The connection broke, no frame came, or its body is too long.
    """
    header_size, size = _LENGTHS.unpack(_receive_bytes(connection, _LENGTHS.size))
    if header_size > _MAX_HEADER:
        raise ConnectionError("no frame of this version came")
    try:
        header = json.loads(_receive_bytes(connection, header_size))
    except (ValueError, RecursionError):  # Python raises the second one for thousands of nested brackets
        header = None
    if not isinstance(header, dict) or not all(isinstance(text, str) for text in header.values()):
        raise ConnectionError("no frame of this version came")
    # Before a byte of the body is read: the length was chosen by a stranger.
    if max_bytes is not None and size > max_bytes:
        raise ConnectionError(f"{size:,} bytes, more than any message of this run has; they were not read")
    return header, _receive_bytes(connection, size)


def _receive_bytes(connection: socket.socket, size: int) -> bytes:
    """Receive exactly so many bytes; OSError where the connection breaks before."""
    # It grows with what arrives, so a length that is only announced takes no memory; `getvalue` makes no copy.
    received = io.BytesIO()
    while received.tell() < size:
        piece = connection.recv(min(size - received.tell(), _MAX_PIECE))
        if not piece:
            raise ConnectionError("the connection broke in the middle of a frame")
        received.write(piece)
    return received.getvalue()
