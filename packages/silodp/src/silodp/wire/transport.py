"""Signed messages, and the transport that carries them: it can only lose, delay or repeat them.

On the wire a message is a fixed number of bytes of marker and signature, then the encoded message. The signature is
checked over those bytes before anything in them is parsed. It covers the recipient, so that a request cannot be
redirected to another silo, and in an answer the digest of the request, so that it cannot be played back in another
round, attempt or run (docs/protocols.md, section 2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from silodp.crypto.keys import Identity
from silodp.errors import SilodpError
from silodp.wire.messages import Message

SERVER = "server"
"""The server's name as a recipient; a silo may have this name too, since its key is another one."""
_MARKER = b"silodp 2"  # the version of this encoding
_SIGNATURE_BYTES = 64
SIGNED_BYTES = len(_MARKER) + _SIGNATURE_BYTES
"""Bytes that a signature adds to an encoded message."""


# --- what carries bytes ---


@dataclass(frozen=True)
class DeliveryFailure:
    """Why a silo gave no answer.

    Attributes:
        kind: What happened: the silo was not reached, too slow, failed, or refused the request.
        reason: One sentence for people.
        code: The code of the error, where a silo refused; else "".
    """

    kind: Literal["offline", "timeout", "error", "refused"]
    reason: str
    code: str = ""


@dataclass(frozen=True)
class Traffic:
    """Traffic of the server with all silos together.

    Attributes:
        down: Bytes from the server to the silos.
        up: Bytes from the silos to the server.
    """

    down: int = 0
    up: int = 0

    def plus(self, down: Iterable[bytes], up: Iterable[bytes]) -> Traffic:
        """Return the traffic after these messages too."""
        return Traffic(self.down + sum(map(len, down)), self.up + sum(map(len, up)))

    def since(self, before: Traffic) -> Traffic:
        """Return the bytes that were added after `before`."""
        return Traffic(self.down - before.down, self.up - before.up)


class Endpoint(Protocol):
    """A silo as a courier sees it."""

    def receive(self, data: bytes) -> bytes:
        """Return the signed answer to a signed request; a repeated request gets the same bytes.

        Raises:
            SilodpError: the silo refuses; the courier reports that as a `DeliveryFailure` of kind "refused".
        """


class Transport(Protocol):
    """A courier: it carries signed bytes, knows no secrets, and can only lose, delay or repeat them.

    This is the interface to implement for another network.
    """

    @property
    def traffic(self) -> Traffic:
        """What was sent so far."""

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None
    ) -> tuple[dict[str, bytes], dict[str, DeliveryFailure]]:
        """Send each silo its request and wait for the answers.

        Args:
            requests: signed bytes by the name of the silo.
            timeout: seconds to wait at most; None: no limit.

        Returns:
            (answers, failures), each by the name of the silo.
        """


def split_outcomes(
    found: Mapping[str, bytes | DeliveryFailure],
) -> tuple[dict[str, bytes], dict[str, DeliveryFailure]]:
    """Return the answers and the failures among what came of requests, by the name of the silo."""
    answers = {name: outcome for name, outcome in found.items() if isinstance(outcome, bytes)}
    failures = {name: outcome for name, outcome in found.items() if isinstance(outcome, DeliveryFailure)}
    return answers, failures


class InProcess:
    """A transport to silos in this process.

    Args:
        endpoints: The silos by name.
        at_once: The number of silos that are called at the same time, in threads.
    """

    def __init__(self, endpoints: Mapping[str, Endpoint], at_once: int = 1) -> None:
        self._endpoints, self._at_once = dict(endpoints), at_once
        self.traffic = Traffic()

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None
    ) -> tuple[dict[str, bytes], dict[str, DeliveryFailure]]:
        """Ask each silo; a direct call cannot be interrupted, so `timeout` has no effect here."""
        with ThreadPoolExecutor(self._at_once) as pool:  # threads start when they are used
            call = map if self._at_once == 1 else pool.map
            outcomes = call(self._ask_one, requests, requests.values())
            answers, failures = split_outcomes(dict(zip(requests, outcomes, strict=True)))
        self.traffic = self.traffic.plus((requests[name] for name in answers), answers.values())
        return answers, failures

    def _ask_one(self, name: str, request: bytes) -> bytes | DeliveryFailure:
        try:
            if name not in self._endpoints:
                raise SilodpError(f"silo '{name}' is not known to this transport.", code="message.recipient")
            return self._endpoints[name].receive(request)
        except SilodpError as error:
            return DeliveryFailure("refused", str(error), error.code)
        except OSError as error:
            return DeliveryFailure("error", str(error))


# --- signatures ---


def sign(message: Message, identity: Identity, recipient: str, request: str = "") -> bytes:
    """Encode and sign a message.

    Args:
        message: what is sent.
        identity: the sender's.
        recipient: the name of the silo, or `SERVER`.
        request: for an answer, the digest of the request that it answers.

    Returns:
        marker, signature and encoded message.
    """
    return _sign_bytes(message.encode(), identity, recipient, request)


def verify(
    data: bytes, public: bytes, sender: str, recipient: str, request: str = "", max_bytes: int | None = None
) -> Message:
    """Check the signature over the bytes, then decode them; the inverse of `sign`.

    Args:
        data: what arrived.
        public: the sender's pinned Ed25519 key, 32 bytes.
        sender: how the sender is called in an error.
        recipient: who received it.
        request: for an answer, the digest of the request that it answers.
        max_bytes: refuse longer messages before anything else is done with them; None: no limit.

    Raises:
        SilodpError: too long, not signed by the sender for this recipient and request, or malformed (codes
            message.too_large, message.signature, message.malformed).
    """
    if max_bytes is not None and len(data) > max_bytes + SIGNED_BYTES:
        raise SilodpError(
            f"{len(data):,} bytes in the name of {sender} are more than any message of this run has: nothing was read.",
            code="message.too_large",
        )
    # Nothing is parsed before the signature holds: what a stranger sends reaches no decoder.
    signature, body = data[len(_MARKER) : SIGNED_BYTES], memoryview(data)[SIGNED_BYTES:]
    try:
        if data[: len(_MARKER)] != _MARKER:
            raise InvalidSignature
        Ed25519PublicKey.from_public_bytes(public).verify(
            signature, _signature_input(body, recipient, request)
        )
    except InvalidSignature:
        raise SilodpError(
            f"a message in the name of {sender} does not carry its signature for '{recipient}': it was altered, "
            "redirected, played back, or sent by someone else; nothing was used.",
            code="message.signature",
        ) from None
    try:
        return Message.decode(bytes(body))
    except SilodpError as error:
        raise SilodpError(f"{sender} signed what is no message: {error}", code=error.code) from None


def _sign_bytes(body: bytes, identity: Identity, recipient: str, request: str) -> bytes:
    signature = identity.sign(_signature_input(memoryview(body), recipient, request))
    return b"".join((_MARKER, signature, body))


def _signature_input(body: memoryview, recipient: str, request: str) -> bytes:
    # Every part has a fixed length or is hashed, so that none can be read as another.
    # "silodp message" keeps these signatures apart from those of a session, which begin with its version.
    to = hashlib.sha256(recipient.encode()).hexdigest()
    about = hashlib.sha256(request.encode()).hexdigest()
    return f"silodp message to {to} about {about}: {hashlib.sha256(body).hexdigest()}".encode()


# --- the two ends of a signed channel ---


class Party(Protocol):
    """A silo, as its signed channel sees it."""

    @property
    def name(self) -> str:
        """The name that its messages are addressed to."""

    @property
    def max_bytes(self) -> int:
        """Bytes that the longest request of the run may have."""

    def answer(self, request: Message) -> Message:
        """Answer one verified request, or raise SilodpError."""


@dataclass(frozen=True)
class SignedParty:
    """A silo that answers only the server it has pinned, and signs its answers; an `Endpoint`.

    Attributes:
        silo: The party that answers messages.
        identity: The silo's long-term key pair.
        server: The server's pinned Ed25519 public key, 32 bytes.
    """

    silo: Party
    identity: Identity
    server: bytes

    def receive(self, data: bytes) -> bytes:
        """Verify the request, answer it, and sign the answer.

        Raises:
            SilodpError: the request does not verify, or the silo refuses it.
        """
        name = self.silo.name
        # Anybody can call a silo's endpoint; only its pinned server gets beyond this line.
        request = verify(data, self.server, "the server", name, max_bytes=self.silo.max_bytes)
        return sign(self.silo.answer(request), self.identity, SERVER, request.digest())


class Channel(Protocol):
    """What the server asks silos through: messages out, verified messages back."""

    @property
    def traffic(self) -> Traffic:
        """What was sent so far."""

    def ask(
        self, requests: Mapping[str, Message], timeout: float | None = None
    ) -> tuple[dict[str, Message], dict[str, DeliveryFailure]]:
        """Ask each silo: (answers, failures), by silo name."""


@dataclass(frozen=True)
class SignedChannel:
    """The server's end: requests are signed; an answer that its silo did not sign counts as refused.

    Attributes:
        transport: The courier of the bytes.
        identity: The server's long-term key pair.
        silos: The silos' pinned Ed25519 public keys, 32 bytes each, by name.
        max_bytes: The length in bytes of the longest answer of the run; None: no limit.
    """

    transport: Transport
    identity: Identity
    silos: Mapping[str, bytes]
    max_bytes: int | None = None

    @property
    def traffic(self) -> Traffic:
        """As counted by the transport, signatures included."""
        return self.transport.traffic

    def ask(
        self, requests: Mapping[str, Message], timeout: float | None = None
    ) -> tuple[dict[str, Message], dict[str, DeliveryFailure]]:
        """Sign the requests, send them, and verify the answers; see `Transport.ask`."""
        # The transport is not trusted: what it reports as an answer is one only if the signature of its silo holds.
        answers, failures = self.transport.ask(self._sign_all(requests), timeout)
        genuine: dict[str, Message] = {}
        for name in list(answers):
            digest = requests[name].digest()
            try:
                # What is verified is not kept as bytes, too: an answer may be long, and there are many.
                genuine[name] = verify(
                    answers.pop(name), self.silos[name], f"silo '{name}'", SERVER, digest, self.max_bytes
                )
            except SilodpError as error:
                failures[name] = DeliveryFailure("refused", str(error), error.code)
        return genuine, failures

    def _sign_all(self, requests: Mapping[str, Message]) -> dict[str, bytes]:
        encoded = {id(request): request.encode() for request in requests.values()}  # most silos get the same
        return {
            name: _sign_bytes(encoded[id(request)], self.identity, name, "")
            for name, request in requests.items()
        }
