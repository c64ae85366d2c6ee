"""What both ends of the HTTPS courier know: codes, headers, and the text that a silo signs to connect."""

from __future__ import annotations

from collections.abc import Iterator

POLL_SECONDS = 20
"""A call for the next request is answered after this time at the latest, with or without one."""
MARGIN_SECONDS = 20
"""A silo waits so much longer for the reply to such a call before it connects anew."""
WAIT = "X-Silodp-Wait"
"""Header: whole seconds after which a silo wants such a call to be answered, from 1 to POLL_SECONDS."""
MAX_JSON = 4096
"""Bytes of a reply or a body that is no request or answer of a run."""
NO_REQUEST, OVER = 204, 410
"""Codes: there is no request yet; the run, or this exchange, is over."""
EXCHANGE, REFUSED = "X-Silodp-Exchange", "X-Silodp-Refused"
"""Headers: the id of a request; the code with which a silo refuses it."""

ADVICE = {
    "deploy.digest": "get the public folder again from the coordinator, and accept it",
    "deploy.key": "use the silo's one folder, which has its ledgers, and send the request in it to the coordinator",
    "deploy.server_stopped": "nothing needs to be done",
    # No new run: it would be charged to ledgers that lack what was spent since the copy was made.
    "deploy.rollback_detected": "restore the newest copy of the folder, or read 'Backup' in docs/deployment_admin.md",
    "deploy.unknown_silo": "ask the coordinator which roster the server has",
    "deploy.version": "install a version of silodp with the server's protocol ('silodp deploy check' names both)",
}
"""What a silo's operator can do when the server refuses the connection."""

_PIECE_BYTES = 1 << 18


def format_connect_text(digest: str, name: str, challenge: str, answers: str) -> bytes:
    """Return the bytes that a silo signs to connect.

    Source: Menezes et al. 1996, Handbook of Applied Cryptography (challenge-response by digital signatures).

    Args:
        digest: Digest of the public folder, 64 hexadecimal digits.
        name: Name of the silo.
        challenge: The server's challenge; it has no line break.
        answers: Number of answers that have left the silo, as decimal digits.
    """
    # The first line keeps these signatures apart from those of messages, which the same key makes.
    return f"silodp connect 2\n{digest}\n{name}\n{challenge}\n{answers}".encode()


def cut_data(data: bytes) -> Iterator[bytes]:
    """Return the data piece by piece: a library that gets all at once copies, and encrypts, all at once."""
    with memoryview(data) as view:
        for start in range(0, len(data), _PIECE_BYTES):
            yield bytes(view[start : start + _PIECE_BYTES])
