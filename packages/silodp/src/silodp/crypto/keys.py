"""Identities of silos, and sessions of silos that have authenticated each other (docs/protocols.md, section 2).

Every silo has a long-term Ed25519 key, pinned by the other silos, and for every session a fresh X25519 key and nonce,
signed by the long-term key. The server only relays. All silos sign one transcript, which binds protocol version, run,
roster in its order, keys, nonces and every public constant; keys between two silos are derived under it, so a server
that alters anything separates silos instead of reading them.

Sources: Ed25519, RFC 8032; X25519, RFC 7748; ChaCha20-Poly1305, RFC 8439.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from silodp.crypto.streams import KEY_BYTES, derive_key, derive_secret
from silodp.errors import SilodpError, require
from silodp.parsing import parse_json, refuse_malformed
from silodp.text import shorten

# Every signature and commitment begins with the version and its purpose, so that none passes for another one.
VERSION = "silodp secure aggregation 2"
# Lengths of ChaCha20-Poly1305: RFC 8439, section 2.8.
NONCE_BYTES, TAG_BYTES = 12, 16
OVERHEAD_BYTES = NONCE_BYTES + TAG_BYTES
"""Bytes that encryption between silos adds to a message."""


@dataclass(frozen=True)
class Identity:
    """A silo's long-term Ed25519 key pair (RFC 8032).

    Attributes:
        name: The name of the silo.
        seed: The secret key, 32 bytes.
    """

    name: str
    seed: bytes = field(repr=False)

    @classmethod
    def fresh(cls, name: str) -> Identity:
        """Return an identity with a new key from the operating system."""
        return cls(name, secrets.token_bytes(KEY_BYTES))

    @property
    def public(self) -> bytes:
        """The public key that other silos pin, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Return the Ed25519 signature of a message, 64 bytes."""
        return self._key.sign(message)

    @property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.seed)


@dataclass(frozen=True)
class ClientHello:
    """A silo's signed contribution to a session, all public.

    Attributes:
        name: The name of the silo.
        identity: The long-term Ed25519 public key, 32 bytes.
        ephemeral: The X25519 public key of this session, 32 bytes.
        nonce: Fresh random bytes, 32.
        commitment: SHA-256 of the contribution to the group secret, 32 bytes. A silo fixes its contribution before it
            can know the others', and sends the same one to all.
        signature: The Ed25519 signature by the long-term key, 64 bytes.
    """

    name: str
    identity: bytes
    ephemeral: bytes
    nonce: bytes
    commitment: bytes
    signature: bytes

    def signature_input(self, run: str) -> bytes:
        """Return the bytes that the signature is over."""
        return _encode(VERSION, "hello", run, self.name, *self._parts[:-1])

    def to_bytes(self) -> bytes:
        """Return the bytes on the wire."""
        return json.dumps([self.name, *(p.hex() for p in self._parts)]).encode()

    @property
    def _parts(self) -> tuple[bytes, ...]:
        return self.identity, self.ephemeral, self.nonce, self.commitment, self.signature

    @classmethod
    def from_bytes(cls, data: bytes, sender: str) -> ClientHello:
        """Return the greeting of `to_bytes`.

        Raises:
            SilodpError: it cannot be read; `sender` is named (code message.malformed).
        """
        with refuse_malformed(
            f"the greeting of silo '{sender}' cannot be read: it was cut or altered.",
            code="message.malformed",
        ):
            # Bytes of another party: parsed with a bounded depth, and lengths are checked before any key is used.
            name, *parts = parse_json(data)
            hello = cls(str(name), *(bytes.fromhex(part) for part in parts))
        require(
            [len(part) for part in hello._parts] == [32, 32, 32, 32, 64],
            f"the greeting of silo '{sender}' has keys of a wrong length: it was cut or altered.",
            code="message.malformed",
        )
        return hello


@dataclass(frozen=True)
class HandshakeState:
    """A silo's secrets of a session, before it knows the others; to be kept durably, and by this silo alone.

    Attributes:
        identity: The long-term key pair of the silo.
        run: The id of the run.
        ephemeral: The X25519 private key, 32 bytes (RFC 7748).
        nonce: Fresh random bytes, 32.
        seal: The key from which the silo's seals are derived, 32 bytes.
        contribution: The part of this silo in the group secret, 32 bytes.
    """

    identity: Identity
    run: str
    ephemeral: bytes = field(repr=False)
    nonce: bytes
    seal: bytes = field(repr=False)
    contribution: bytes = field(repr=False)

    @classmethod
    def fresh(cls, identity: Identity, run: str) -> HandshakeState:
        """Return new secrets from the operating system."""
        return cls(identity, run, *(secrets.token_bytes(KEY_BYTES) for _ in range(4)))

    @property
    def hello(self) -> ClientHello:
        """The signed greeting for the other silos."""
        public = self._key.public_key().public_bytes_raw()
        unsigned = ClientHello(
            self.identity.name, self.identity.public, public, self.nonce, _commit(self.contribution), b""
        )
        return replace(unsigned, signature=self.identity.sign(unsigned.signature_input(self.run)))

    def _exchange(self, hello: ClientHello) -> bytes:
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(hello.ephemeral))
        # A point of small order gives zeros, which everyone knows: RFC 7748, section 6.1.
        except ValueError:
            raise SilodpError(
                f"silo '{hello.name}' sent a key that hides nothing: do not go on with it.",
                code="session.pins",
            ) from None

    @property
    def _key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.ephemeral)

    def meet(self, hellos: Sequence[ClientHello], pins: Mapping[str, bytes], constants: str) -> Session:
        """Return the session with these silos, in this order.

        Source: docs/protocols.md, section 2; X25519 (RFC 7748) and HKDF (RFC 5869).

        Args:
            hellos: one of each silo on the roster, this one's included, in the run's order.
            pins: the long-term public key of every silo on the roster.
            constants: everything public that all silos must agree on, as this silo knows it.

        Raises:
            SilodpError: a silo is missing, repeated or unknown, has another key than the pinned one, or a signature
                does not hold; the silo is named.
        """
        names = [hello.name for hello in hellos]
        # Sorted lists and not sets, so that a name that comes twice is found, too.
        if sorted(names) != sorted(pins):
            odd = sorted(set(names) ^ set(pins)) or sorted({n for n in names if names.count(n) > 1})
            shown = shorten(", ".join(odd))  # of no silo that is known here, and a log shows them
            raise SilodpError(
                f"the roster shown to silo '{self.identity.name}' differs from its pinned one in {shown}: "
                "ask the other silos which roster they were shown, and do not go on.",
                code="session.pins",
            )
        for hello in hellos:
            require(
                hello.identity == pins[hello.name],
                f"silo '{hello.name}' appears with a key that silo '{self.identity.name}' has not pinned: check it "
                "with that silo by another channel.",
                code="session.pins",
            )
            _verify(
                hello.identity,
                hello.signature,
                hello.signature_input(self.run),
                f"greeting of silo '{hello.name}'",
            )
        # A greeting of an earlier session is signed by this silo too, but has another key.
        own = next(hello for hello in hellos if hello.name == self.identity.name)
        require(
            own == self.hello,
            f"silo '{self.identity.name}' was shown a greeting in its name that it never sent.",
            code="session.altered",
        )
        # Keys are derived under the hash of everything that was shown: a server that shows two silos different
        # things leaves them with different keys, and learns nothing.
        fields: list[str | bytes] = []
        for hello in hellos:
            fields += [hello.name, *hello._parts]
        # In the roster's order, which decides who of a pair adds the mask: silos that were shown different orders share
        # no key.
        transcript = hashlib.sha256(_encode(VERSION, "transcript", self.run, constants, *fields)).digest()
        pairs = {
            hello.name: derive_secret(self._exchange(hello), transcript, "pair")
            for hello in hellos
            if hello.name != self.identity.name
        }
        commitments = {hello.name: hello.commitment for hello in hellos}
        return Session(
            self, tuple(names), transcript, pairs, {h.name: h.identity for h in hellos}, commitments
        )


@dataclass(frozen=True)
class Session:
    """What one silo knows of a session.

    Attributes:
        opening: The secrets of this silo.
        roster: The names of the silos, in the run's order.
        transcript: SHA-256 of everything that the silos agree on, 32 bytes; its hexadecimal form is the session's id.
        pairs: The secret shared with each other silo, 32 bytes, by the name of that silo.
        identities: The long-term public key of each silo, 32 bytes, by its name.
        commitments: SHA-256 of each silo's contribution to the group secret, 32 bytes, by its name.
    """

    opening: HandshakeState
    roster: tuple[str, ...]
    transcript: bytes
    pairs: Mapping[str, bytes] = field(repr=False)
    identities: Mapping[str, bytes]
    commitments: Mapping[str, bytes]

    @property
    def name(self) -> str:
        """The name of the silo whose view this is."""
        return self.opening.identity.name

    def signature(self) -> bytes:
        """Return this silo's signature of the transcript that it saw."""
        return self.opening.identity.sign(_encode(VERSION, "seen", self.transcript))

    def confirm(self, signatures: Mapping[str, bytes]) -> None:
        """Check that every silo saw the same transcript.

        Raises:
            SilodpError: a silo did not, or its signature is missing; it is named.
        """
        for name in self.roster:
            _verify(
                self.identities[name],
                # An absent signature is an empty one, which never holds.
                signatures.get(name, b""),
                _encode(VERSION, "seen", self.transcript),
                f"transcript of silo '{name}' (as silo '{self.name}' was shown it)",
            )

    def mask_key(self, peer: str, *use: str | int) -> bytes:
        """Return the key that this silo and `peer` share for one use; both get the same, nobody else does."""
        # Both silos derive the same key; which of them adds the mask, and which subtracts it, the roster decides.
        return derive_key(self.pairs[peer], "mask", *use)

    def seal_key(self, *use: str | int) -> bytes:
        """Return this silo's key for one seal; revealing it reveals nothing else."""
        return derive_key(self.opening.seal, "seal", self.transcript.hex(), *use)

    def seal_contributions(self) -> dict[str, bytes]:
        """Return this silo's part of the group secret, encrypted to each other silo, by name."""
        return {peer: self.encrypt(peer, self.opening.contribution, "contribution") for peer in self.pairs}

    def group_secret(self, sealed: Mapping[str, bytes]) -> bytes:
        """Return R, 32 bytes that every silo knows and the server does not, from everyone's contribution.

        Args:
            sealed: what each other silo's `seal_contributions` has for this one, by its name.

        Raises:
            SilodpError: a contribution was altered, or is not the one that its silo has bound itself to before it could
                know the others' (code session.altered).
        """
        parts = [
            # In the roster's order, so that all silos hash the same bytes.
            self.opening.contribution
            if name == self.name
            else self.decrypt(name, sealed.get(name, b""), "contribution")
            for name in self.roster
        ]
        # Without commitments the last silo to send could try contributions until R suits it.
        for name, part in zip(self.roster, parts, strict=True):
            require(
                _commit(part) == self.commitments[name],
                f"silo '{name}' sent silo '{self.name}' another part of the common secret than it had bound itself to: "
                "do not go on with it.",
                code="session.altered",
            )
        # Uniform as long as one silo drew its part at random: the others were bound to theirs before they could see it.
        return derive_secret(b"".join(parts), self.transcript, "group secret")

    def encrypt(self, peer: str, message: bytes, *use: str | int) -> bytes:
        """Encrypt to one silo by ChaCha20-Poly1305 (RFC 8439, section 2.8).

        Args:
            peer: the other silo.
            message: plain.
            use: what the key is derived for.

        Returns:
            nonce and ciphertext, `OVERHEAD_BYTES` longer than the message.
        """
        # The nonce is random although every use has a key: a silo that was set back encrypts twice for one use.
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + ChaCha20Poly1305(derive_key(self.pairs[peer], "to", peer, *use)).encrypt(
            nonce, message, None
        )

    def decrypt(self, peer: str, message: bytes, *use: str | int) -> bytes:
        """Decrypt what `peer` encrypted for this silo and use.

        Raises:
            SilodpError: it was altered, or is of another session; `peer` is named (code session.altered).
        """
        try:
            key = derive_key(self.pairs[peer], "to", self.name, *use)
            nonce, sealed = message[:NONCE_BYTES], message[NONCE_BYTES:]
            return ChaCha20Poly1305(key).decrypt(nonce, sealed, None)
        except (InvalidTag, ValueError):
            raise SilodpError(
                f"what silo '{peer}' sent to silo '{self.name}' was altered, or is of another session.",
                code="session.altered",
            ) from None


def _commit(contribution: bytes) -> bytes:
    # It hides the contribution, which is 32 uniform bytes.
    return hashlib.sha256(_encode(VERSION, "contribution", contribution)).digest()


def _verify(identity: bytes, signature: bytes, message: bytes, what: str) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, message)
    except InvalidSignature:
        raise SilodpError(
            f"the signature on the {what} does not hold: something was altered on the way; do not go on.",
            code="session.altered",
        ) from None


def _encode(*parts: str | bytes) -> bytes:
    """Return the parts one after the other, each with its kind and length, so that none can be read otherwise."""
    return b"".join(
        (b"s" if isinstance(p, str) else b"b")
        + len(raw := p.encode() if isinstance(p, str) else p).to_bytes(8)
        + raw
        for p in parts
    )
