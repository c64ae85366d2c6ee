"""Messages signed by who sent them, so that whatever carries them can only lose them.

A silo's signature covers the request it answers: an answer cannot be played back in another round, attempt or run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from silodp.crypto.keys import Identity
from silodp.errors import SilodpError
from silodp.federation.messages import Message
from silodp.federation.transport import Failure, Party, Traffic, Transport

_SIGNATURE = "of the message"


def signed(message: Message, identity: Identity, about: str = "") -> Message:
    """The message with its sender's signature; `about` is the digest of the request, for an answer."""
    return replace(message, blobs={**message.blobs, _SIGNATURE: identity.sign(_content(message, about))})


def verified(message: Message, public: bytes, sender: str, about: str = "") -> Message:
    """The message without its signature.

    Raises:
        SilodpError: the signature is missing or does not hold; `sender` is named.
    """
    bare = replace(message, blobs={n: blob for n, blob in message.blobs.items() if n != _SIGNATURE})
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(
            message.blobs.get(_SIGNATURE, b""), _content(bare, about)
        )
    except InvalidSignature:
        raise SilodpError(
            f"a message of kind '{message.kind}' in the name of {sender} does not carry its signature: it was altered, "
            "played back, or sent by someone else; nothing was used."
        ) from None
    return bare


@dataclass(frozen=True)
class SignedParty:
    """A silo that answers only the server it has pinned, and signs."""

    party: Party
    identity: Identity
    server: bytes

    def answer(self, request: Message) -> Message:
        """Verify, answer, sign."""
        asked = verified(request, self.server, "the server")
        return signed(self.party.answer(asked), self.identity, asked.digest())


@dataclass(frozen=True)
class SignedTransport:
    """The server's side: requests are signed; an answer that is not its silo's counts as refused."""

    transport: Transport
    identity: Identity
    silos: Mapping[str, bytes]

    @property
    def traffic(self) -> Traffic:
        """As counted beneath, signatures included."""
        return self.transport.traffic

    def ask(
        self, requests: Mapping[str, Message], timeout: float | None = None
    ) -> tuple[dict[str, Message], dict[str, Failure]]:
        """As the transport beneath, but for what does not verify."""
        answers, failures = self.transport.ask(
            {name: signed(request, self.identity) for name, request in requests.items()}, timeout
        )
        genuine: dict[str, Message] = {}
        for name, answer in answers.items():
            try:
                genuine[name] = verified(answer, self.silos[name], f"silo '{name}'", requests[name].digest())
            except SilodpError as error:
                failures[name] = Failure("refused", str(error))
        return genuine, failures


def _content(message: Message, about: str) -> bytes:
    return f"silodp message {message.digest()} {about}".encode()
