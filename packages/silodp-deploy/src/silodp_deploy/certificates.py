"""TLS certificates of a consortium: one authority at the coordinator, a request and a certificate for every party.

Private keys never leave the party that made them: a party sends a signing request, and gets a certificate back. The
certificates only decide who may connect; what a message may do is decided by its own signature (docs/protocols.md,
section 2). The roster, which all parties accept, pins the keys of the authority and of all certificates. So a
certificate can be renewed while a run is in progress, and whoever exchanges the files cannot exchange a key.

Source: RFC 5280 (certificates), RFC 2986 (requests), RFC 8446 (TLS 1.3).
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from silodp.errors import SilodpError
from silodp.wire.files import write_durably
from silodp.wire.transport import SERVER
from silodp_deploy import AUTHORITY, CERTIFICATES, TLS_KEY
from silodp_deploy.public_files import read_regular

if TYPE_CHECKING:
    from silodp_deploy.consortium import Consortium, Roster

_log = logging.getLogger(__name__)

VALID_DAYS = 825
"""Days for which certificates of parties are valid."""
AUTHORITY_DAYS = 3650
"""Days for which an authority is valid; it is renewed in time to outlive the certificates that it signs."""
WARN_DAYS = 30
"""Days before the end of a certificate from which on it is warned of."""
RENEWAL = (
    "the coordinator runs 'silodp deploy seal DIR --again', and every party puts ca.pem and certificates/ in place of "
    "those in its public folder; the code stays, and a run in progress goes on (docs/guides/next-run.md)"
)
"""What to do about a certificate that ends."""
AUTHORITY_NAME = "authority"
"""The name of the authority beside those of the parties."""
_MAX_CERTIFICATE_BYTES = 1 << 20
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

    @property
    def key_hash(self) -> bytes:
        """SHA-256 of its public key, as the roster pins it."""
        return hash_key(x509.load_pem_x509_certificate(self.certificate).public_key())

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
        except (ValueError, UnsupportedAlgorithm, InvalidSignature):
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


def hash_request_key(request: str) -> bytes:
    """Return the SHA-256 of the public key in a certificate request (PEM).

    Raises:
        ValueError: It is no request.
    """
    try:
        return hash_key(x509.load_pem_x509_csr(request.encode()).public_key())
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None


def hash_key(key: CertificatePublicKeyTypes) -> bytes:
    """Return the SHA-256 of a public key (RFC 5280, subjectPublicKeyInfo)."""
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).digest()


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
    _fill_context(context, authority, certificate, key)
    return context


def _fill_context(context: ssl.SSLContext, authority: Path, certificate: Path, key: Path) -> None:
    try:
        # OpenSSL would trust every certificate in the file, of which the roster pins the key of the first.
        first = x509.load_pem_x509_certificate(authority.read_bytes())
        context.load_verify_locations(cadata=first.public_bytes(serialization.Encoding.PEM).decode())
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _refuse(
            f"certificate {certificate}, key {key} and authority {authority} cannot be used together "
            f"({reason}): take the certificate that was signed for this key.",
        ) from error


def _refuse(problem: str) -> SilodpError:
    return SilodpError(problem, code="deploy.certificate")


def load_context(consortium: Consortium, party: str, home: Path) -> ssl.SSLContext:
    """Return the TLS settings of a party, from a public folder and the party's own; see `make_context`."""
    return make_context(*_list_files(consortium, party, home), is_server=party == SERVER)


def reload_context(context: ssl.SSLContext, consortium: Consortium, party: str, home: Path) -> None:
    """Have TLS settings from `load_context` use the certificates that are in the folder now, in new connections.

    Only the thread that makes connections with them may call this.
    """
    _fill_context(context, *_list_files(consortium, party, home))


def _list_files(consortium: Consortium, party: str, home: Path) -> tuple[Path, Path, Path]:
    return consortium.folder / AUTHORITY, find_certificate(consortium.folder, party), home / TLS_KEY


def find_certificate(public: Path, party: str) -> Path:
    """Return the file in a public folder with the certificate of a party, or of the authority."""
    return public / AUTHORITY if party == AUTHORITY_NAME else public / CERTIFICATES / f"{party}.pem"


def read_certificates(public: Path, roster: Roster) -> dict[str, x509.Certificate]:
    """Read the certificates of a public folder, each of which must be for the key that the roster pins.

    Args:
        public: The folder with ca.pem and certificates/NAME.pem.
        roster: The roster, which the digest of the public folder covers.

    Returns:
        The certificates by party, and that of the authority.

    Raises:
        SilodpError: A certificate cannot be read, is for another key, or was signed by another authority (code
            deploy.certificate).
    """
    found: dict[str, x509.Certificate] = {}
    for name, pin in {AUTHORITY_NAME: roster.authority, **roster.tls}.items():
        path = find_certificate(public, name)
        try:
            found[name] = read = x509.load_pem_x509_certificate(
                read_regular(path, path, _MAX_CERTIFICATE_BYTES)
            )
            read.verify_directly_issued_by(found[AUTHORITY_NAME])
            is_pinned = hash_key(read.public_key()) == pin
        except SilodpError:  # a link, or a file that is too long
            raise
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
            reason = str(error) or type(error).__name__
            raise _refuse(
                f"{path} cannot be used ({reason}): get the public folder again from the coordinator."
            ) from None
        if not is_pinned:
            raise _refuse(
                f"{path} is for another key than the one of '{name}' in the roster: get the public folder again from "
                "the coordinator."
            )
    return found


def renew_copy(public: Path, copy: Path, roster: Roster) -> bool:
    """Copy the certificates of a public folder that end later than those in a party's copy of it.

    Args:
        public: The public folder, which others may write to.
        copy: The party's copy.
        roster: The roster of the copy.

    Returns:
        Whether there were any.

    Raises:
        SilodpError: As `read_certificates`.
    """
    try:
        known = read_certificates(copy, roster)
    except SilodpError:  # a new copy has none
        known = {}
    renewed = {
        name: one
        for name, one in read_certificates(public, roster).items()
        if name not in known or one.not_valid_after_utc > known[name].not_valid_after_utc
    }
    (copy / CERTIFICATES).mkdir(exist_ok=True)
    for name, one in renewed.items():
        write_durably(find_certificate(copy, name), one.public_bytes(serialization.Encoding.PEM))
    return bool(renewed)


class ExpiryWatch:
    """Counts the days of the certificates in a public folder, warns of their end, and takes renewed ones.

    Args:
        consortium: The public folder, or a party's copy of it.
        party: Name of the party whose process this is.

    Raises:
        SilodpError: As `read_certificates`.
    """

    def __init__(self, consortium: Consortium, party: str) -> None:
        self._consortium, self._party = consortium, party
        self._certificates = read_certificates(consortium.folder, consortium.sealed)
        self._warned, self._told = datetime.min.replace(tzinfo=UTC), set[str]()
        self._problem = ""

    def count_days(self) -> dict[str, float]:
        """Return the days until each certificate ends, by party and for the authority; negative after that."""
        now = datetime.now(UTC)
        return {
            name: (one.not_valid_after_utc - now) / timedelta(days=1)
            for name, one in self._certificates.items()
        }

    def refresh(self) -> bool:
        """Take renewed certificates from the public folder that this one is a copy of, and warn of those that end.

        Returns:
            Whether there were any. New connections use them after `reload_context`.
        """
        folder, source, is_new = self._consortium.folder, self._consortium.source, False
        try:
            is_new = source is not None and renew_copy(source, folder, self._consortium.sealed)
            self._certificates = read_certificates(folder, self._consortium.sealed)
            self._problem = ""
        except (OSError, SilodpError) as error:
            # The certificates that are known go on; a folder on a share may be away for a while.
            if str(error) != self._problem:
                _log.warning("no renewed certificate was taken: %s", error)
            self._problem = str(error)
        if is_new:
            days = self.count_days()
            first = min(days, key=days.__getitem__)
            _log.info(
                "took renewed certificates; the first to end is that of '%s', in %.0f days",
                first,
                days[first],
            )
        self.warn()
        return is_new

    def check(self) -> None:
        """Refuse to connect with a certificate that lets nobody connect, and warn of others.

        Raises:
            SilodpError: The certificate of the party or of the authority has ended, or has not begun (code
                deploy.certificate).
        """
        # Certificates of other parties may have ended, too: it is they who cannot connect then, and are told so.
        days, now = self.count_days(), datetime.now(UTC)
        ours = (self._party, AUTHORITY_NAME)
        early = [name for name in ours if self._certificates[name].not_valid_before_utc > now]
        if early:
            raise _refuse(
                f"the certificate of {' and of '.join(early)} begins later than the time of the clock here, "
                f"{now:%Y-%m-%d %H:%M} UTC: set the clock right, or the coordinator's if that is ahead.",
            )
        if ended := [name for name in ours if days[name] <= 0]:
            raise _refuse(
                f"the certificate of {' and of '.join(ended)} has ended, by the clock here ({now:%Y-%m-%d %H:%M} UTC): "
                f"{RENEWAL}; or set the clock right.",
            )
        self.warn()

    def warn(self) -> None:
        """Log a warning about certificates that end soon, with what to do; once a day, and when one has ended."""
        now, days = datetime.now(UTC), self.count_days()
        soon = sorted((left, name) for name, left in days.items() if left < WARN_DAYS)
        ended = {name for left, name in soon if left <= 0}
        if not soon or (now - self._warned < timedelta(days=1) and ended <= self._told):
            return
        self._warned, self._told = now, ended
        _log.warning(
            "certificates end, of %s: %s",
            ", ".join(f"'{name}' {f'in {left:.0f} days' if left > 0 else 'already'}" for left, name in soon),
            RENEWAL,
        )


def describe_early_end(days: Mapping[str, float], run_days: int) -> str | None:
    """Return a sentence about certificates that may end before a run does; None where none may.

    Args:
        days: As `ExpiryWatch.count_days`.
        run_days: Days that the run may last at most.
    """
    early = sorted((left, name) for name, left in days.items() if left < run_days)
    if not early:
        return None
    left, _ = early[0]
    names = ", ".join(f"'{name}'" for _, name in early)
    return (
        f"certificates may end before the run does, of {names}, the first in {left:.0f} days, while a run may last "
        f"{run_days} days: before that {RENEWAL}."
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
