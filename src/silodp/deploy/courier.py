"""What a courier calls: take requests at the server's socket, have silos answer them at theirs, give the answers back.

A courier is a program beside the server, and one beside every silo, that carries bytes over some network. It knows no
secrets: server and silos sign every message for its recipient. It can lose, repeat and delay messages, and nothing
else; so it keeps nothing, and may be stopped at any moment. A request that stays unanswered is offered again, and a
silo that is asked twice gives the same answer twice.

This module needs the standard library alone, so that a courier runs in any environment, under a user who cannot read
the files of the party. On a socket every call is a connection with one frame in each direction:

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
from dataclasses import dataclass
from pathlib import Path

from silodp.errors import SilodpError
from silodp.parsing import parse_texts

CONNECT_SECONDS = 10.0
_LENGTHS = struct.Struct(">IQ")
_MAX_HEADER, _MAX_PIECE = 4096, 1 << 18


@dataclass(frozen=True)
class Request:
    """A signed request of the server for one silo.

    Attributes:
        exchange: 32 hexadecimal digits; the answer is given back with them.
        silo: name of the silo.
        body: to be brought to the silo unchanged.
    """

    exchange: str
    silo: str
    body: bytes


@dataclass(frozen=True)
class Reply:
    """What a silo says to a request: a signed answer, or that it refuses.

    Attributes:
        body: signed answer; empty where the silo refuses.
        refused: code of the error for which the silo refuses; empty where it answers.
    """

    body: bytes
    refused: str = ""


def take_request(path: str | Path, wait: float = 20.0) -> Request | None:
    """Take a request at the server's socket.

    Args:
        path: of the socket (`silodp server --socket PATH`).
        wait: seconds to wait until there is one.

    Returns:
        The request; None where there is none yet.

    Raises:
        OSError: no server listens, or the connection broke: try again.
    """
    header, body = _call(path, {"do": "take", "wait": str(wait)}, b"", wait + CONNECT_SECONDS)
    return Request(header["exchange"], header["silo"], body) if "exchange" in header else None


def give_reply(path: str | Path, exchange: str, reply: Reply) -> bool:
    """Give a silo's reply to the server.

    Args:
        path: of the server's socket.
        exchange: of the request.
        reply: from `ask_silo`.

    Returns:
        Whether the server still waited for it.

    Raises:
        OSError: no server listens, or the connection broke: try again, or leave it; the request is offered again.
    """
    header = {"do": "give", "exchange": exchange, "refused": reply.refused}
    answer, _ = _call(path, header, reply.body, 60.0)
    return answer.get("awaited") == "yes"


def ask_silo(path: str | Path, body: bytes, timeout: float | None = None) -> Reply:
    """Have a silo answer a request.

    Args:
        path: of the silo's socket (`silodp silo --socket PATH`).
        body: of the request, as it was taken at the server.
        timeout: seconds to wait; None: until the silo answers.

    Raises:
        OSError: no silo listens, or the connection broke: try again, or leave it; the request is offered again.
    """
    header, answer = _call(path, {"do": "answer"}, body, timeout)
    return Reply(answer, header.get("refused", ""))


def _call(
    path: str | Path, header: dict[str, str], body: bytes, timeout: float | None
) -> tuple[dict[str, str], bytes]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(str(path))
        except OSError as error:
            if error.errno is not None:
                error.filename = str(path)  # a courier's log says which socket
            raise
        connection.settimeout(timeout)
        send_frame(connection, header, body)
        return receive_frame(connection)


def send_frame(connection: socket.socket, header: dict[str, str], body: bytes = b"") -> None:
    """Send one frame; the body is not copied."""
    encoded = json.dumps(header).encode()
    connection.sendall(_LENGTHS.pack(len(encoded), len(body)) + encoded)
    if len(body):  # a peer that has the whole frame may have closed the connection
        connection.sendall(body)


def receive_frame(connection: socket.socket, max_bytes: int | None = None) -> tuple[dict[str, str], bytes]:
    """Receive one frame.

    Args:
        connection: a connected socket.
        max_bytes: of the body; None: no limit.

    Raises:
        OSError: the connection broke, or no frame came.
        SilodpError: the body is longer; it was not read (code message.too_large).
    """
    header_size, size = _LENGTHS.unpack(_receive(connection, _LENGTHS.size))
    if header_size > _MAX_HEADER:
        raise ConnectionError("no frame of this version came")
    try:
        header = parse_texts(_receive(connection, header_size))
    except ValueError:
        raise ConnectionError("no frame of this version came") from None
    if max_bytes is not None and size > max_bytes:
        raise SilodpError(
            f"a courier brought {size:,} bytes, more than any message of this run has: nothing was read.",
            code="message.too_large",
        )
    return header, _receive(connection, size)


def _receive(connection: socket.socket, size: int) -> bytes:
    """Return exactly so many bytes."""
    received = io.BytesIO()  # hands out what was written without a copy; it grows with what arrives
    while received.tell() < size:
        piece = connection.recv(min(size - received.tell(), _MAX_PIECE))
        if not piece:
            raise ConnectionError("the connection broke in the middle of a frame")
        received.write(piece)
    return received.getvalue()
