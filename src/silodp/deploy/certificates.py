"""TLS certificates of a consortium: one authority at the coordinator, a request and a certificate for every party.

Private keys never leave the party that made them: a party sends a signing request, and gets a certificate back. The
certificates only decide who may connect; what a message may do is decided by its own signature (docs/protocols.md,
section 2).

Source: RFC 5280 (certificates), RFC 2986 (requests), RFC 8446 (TLS 1.3).
"""

from __future__ import annotations

import ipaddress
import logging
import math
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from silodp.deploy import AUTHORITY, CERTIFICATES, TLS_KEY
from silodp.errors import SilodpError
from silodp.wire.transport import SERVER

_log = logging.getLogger(__name__)

VALID_DAYS = 825
"""Days for which certificates of parties are valid."""
AUTHORITY_DAYS = 3650
"""Days for which an authority is valid; it is renewed in time to outlive the certificates that it signs."""
WARN_DAYS = 30
"""Days before the end of a certificate from which on it is warned of."""
_AUTHORITY = "authority"
"""The name of the authority beside those of the parties."""
# The clocks of the parties may differ: a certificate is valid already a day before it was signed.
_CLOCK_DIFFERENCE = timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """The certificate authority of one consortium.

    Attributes:
        certificate: The certificate, as PEM; it is public.
        key: The private key, as PEM; it is secret, and stays at the coordinator.
    """

    certificate: bytes
    key: bytes = field(repr=False)

    @classmethod
    def fresh(cls, name: str) -> Authority:
        """Return an authority with a new key."""
        key = ec.generate_private_key(ec.SECP256R1())
        return cls._self_signed(_name(f"{name} consortium"), key)

    @classmethod
    def _self_signed(cls, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> Authority:
        # The key may sign certificates and lists of revoked ones only; path_length = 0 allows no authority below.
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        certificate = (
            _builder(subject, subject, key.public_key(), AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate.public_bytes(serialization.Encoding.PEM), _key_bytes(key))

    @classmethod
    def load(cls, certificate: Path, key: Path) -> Authority:
        """Read an authority that was made before.

        Raises:
            SilodpError: A file is missing or damaged, or they do not belong together (code deploy.certificate).
        """
        try:
            found = cls(certificate.read_bytes(), key.read_bytes())
            private = serialization.load_pem_private_key(found.key, None)
            public = x509.load_pem_x509_certificate(found.certificate).public_key()
            if private.public_key() != public:
                raise ValueError("they do not belong together")
        except (OSError, ValueError, TypeError) as error:
            raise _refuse(
                f"the authority in {certificate} and {key} cannot be used ({error}): restore both files, or draft a "
                "new consortium.",
            ) from None
        return found

    @property
    def valid_until(self) -> datetime:
        """When its certificate ends."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    def renew(self) -> Authority:
        """Return the authority with a certificate that outlives those that it signs now; its key stays.

        The certificate stays, too, while it lasts long enough. One that ended earlier than a certificate that it has
        signed would end the connections of all parties without a warning.
        """
        # A day more than the certificates that are signed now, whose days are counted from a moment later.
        if self.valid_until > datetime.now(UTC) + timedelta(days=VALID_DAYS + 1):
            return self
        return self._self_signed(x509.load_pem_x509_certificate(self.certificate).subject, self._private_key)

    @property
    def _private_key(self) -> ec.EllipticCurvePrivateKey:
        key = serialization.load_pem_private_key(self.key, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key

    def sign(self, request: bytes, name: str, hosts: tuple[str, ...] = ()) -> bytes:
        """Sign a certificate request.

        Args:
            request: The request, as PEM.
            name: Name of the party. It becomes the subject of the certificate, whatever the request states.
            hosts: Names and addresses of a server; () for a party that only connects to one.

        Returns:
            The certificate, as PEM.

        Raises:
            SilodpError: The request cannot be read, or its signature is wrong (code deploy.request).
        """
        try:
            # The request is signed by the key in it: nobody gets a certificate for a key of somebody else.
            read = x509.load_pem_x509_csr(request)
            if not read.is_signature_valid:
                raise InvalidSignature
        except (ValueError, InvalidSignature):
            raise SilodpError(
                f"the certificate request of '{name}' cannot be read, or was altered: ask '{name}' to send it again.",
                code="deploy.request",
            ) from None
        issuer = x509.load_pem_x509_certificate(self.certificate)
        # A silo that shows its certificate as that of the server is refused by the other silos.
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        key = self._private_key
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
        builder = (
            # Of the request only the key is used: a party that asks for the name of another one does not get it.
            _builder(_name(name), issuer.subject, read.public_key(), VALID_DAYS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(authority, critical=False)
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False
            )
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def make_request(name: str) -> tuple[bytes, bytes]:
    """Return a new private key and a certificate request of a party, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(name)).sign(key, hashes.SHA256())
    return _key_bytes(key), request.public_bytes(serialization.Encoding.PEM)


def make_context(authority: Path, certificate: Path, key: Path, *, is_server: bool) -> ssl.SSLContext:
    """Return the TLS settings of a party: TLS 1.3, and both ends show a certificate of the consortium.

    Args:
        authority: The file with the certificate of the consortium's authority.
        certificate: The file with the party's certificate.
        key: The file with the party's private key.
        is_server: Whether the party is the server's end of connections.

    Raises:
        SilodpError: A file cannot be read, or certificate and key do not belong together (code deploy.certificate).
    """
    # The settings for a client also compare the name in the address with the certificate.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    # Nothing below TLS 1.3: all parties have this version, so nobody can be made to agree on a weaker one.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise _refuse(
            f"certificate {certificate}, key {key} and authority {authority} cannot be used together "
            f"({error.strerror or error}): take the certificate that was signed for this key.",
        ) from error
    return context


def _refuse(problem: str) -> SilodpError:
    return SilodpError(problem, code="deploy.certificate")


def load_context(public: Path, party: str, home: Path) -> ssl.SSLContext:
    """Return the TLS settings of a party, from a public folder and the party's own; see `make_context`."""
    certificate = find_certificate(public, party)
    return make_context(public / AUTHORITY, certificate, home / TLS_KEY, is_server=party == SERVER)


def find_certificate(public: Path, party: str) -> Path:
    """Return the file in a public folder with the certificate of a party."""
    return public / CERTIFICATES / f"{party}.pem"


def read_expiries(public: Path) -> dict[str, datetime]:
    """Return when the certificates in a public folder end, by party and for the authority.

    Args:
        public: The folder with ca.pem and certificates/NAME.pem.

    Raises:
        SilodpError: A certificate cannot be read (code deploy.certificate).
    """
    paths = {_AUTHORITY: public / AUTHORITY}
    paths |= {path.stem: path for path in sorted((public / CERTIFICATES).glob("*.pem"))}
    try:
        return {
            name: x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
            for name, path in paths.items()
        }
    except (OSError, ValueError) as error:
        raise _refuse(
            f"a certificate in {public} cannot be read ({error}): get the public folder again from the coordinator.",
        ) from None


class ExpiryWatch:
    """Counts the days of the certificates in a public folder, and warns of their end once a day.

    Args:
        public: The public folder.
        party: Name of the party whose process this is.

    Raises:
        SilodpError: A certificate cannot be read (code deploy.certificate).
    """

    def __init__(self, public: Path, party: str) -> None:
        self._expiries, self._party = read_expiries(public), party
        self._warned = datetime.min.replace(tzinfo=UTC)

    def count_days(self) -> dict[str, float]:
        """Return the days until each certificate ends, by party and for the authority; negative after that."""
        now = datetime.now(UTC)
        return {name: (end - now) / timedelta(days=1) for name, end in self._expiries.items()}

    def check(self) -> None:
        """Refuse to start with a certificate that lets nobody connect, and warn of others.

        Raises:
            SilodpError: The certificate of the party or of the authority has ended (code deploy.certificate).
        """
        # Certificates of other parties may have ended, too: it is they who cannot connect then, and are told so.
        days = self.count_days()
        ended = [name for name in (self._party, _AUTHORITY) if days.get(name, math.inf) <= 0]
        if ended:
            raise _refuse(
                f"the certificate of {' and of '.join(ended)} has ended, by the clock here: the coordinator runs "
                "'silodp deploy seal --again', and every party accepts the new public folder "
                "(docs/guides/next-run.md); or set the clock right.",
            )
        self.warn()

    def warn(self) -> None:
        """Log a warning about certificates that end soon, with what to do; once a day."""
        now = datetime.now(UTC)
        soon = sorted((left, name) for name, left in self.count_days().items() if left < WARN_DAYS)
        if not soon or now - self._warned < timedelta(days=1):
            return
        self._warned = now
        _log.warning(
            "certificates end, of %s: after this run the coordinator runs 'silodp deploy seal --again', and every "
            "party accepts the new public folder, or nobody connects any more (docs/guides/next-run.md)",
            ", ".join(f"'{name}' {f'in {left:.0f} days' if left > 0 else 'already'}" for left, name in soon),
        )


def _builder(
    subject: x509.Name, issuer: x509.Name, public: CertificatePublicKeyTypes, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_DIFFERENCE)
        .not_valid_after(now + timedelta(days=days))
    )


def _name(name: str) -> x509.Name:
    # RFC 5280, appendix A.1, bounds a common name by 64 characters.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
