"""Real servers of PostgreSQL and MariaDB for tests: started in a folder, at a Unix socket, and stopped at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from silodp.data.tables.columns import Reader
from silodp.data.tables.sources.source import SOURCES, Source

_ACCOUNT = "nobody"
"""Servers refuse to run as root."""
MARIADB = "SILODP_TEST_MARIADB"
"""Environment variable: the folder into which the packages of MariaDB were unpacked, where they are not installed."""


def open_source(path: Path, query: str | None) -> Source:
    """Return the source of a table by the ending of its name."""
    ending = "connection.toml" if path.name.endswith(".connection.toml") else path.suffix[1:]
    return SOURCES[ending](path, Reader(), query)


def write_connection(path: Path, text: str) -> Path:
    """Write a connection file that its owner alone may read."""
    path.write_text(text)
    path.chmod(0o600)
    return path


class Account:
    """The account that servers run as: this one, or in containers that of nobody."""

    def __init__(self) -> None:
        self.name = _ACCOUNT if os.geteuid() == 0 else None

    @contextmanager
    def make_folder(self) -> Iterator[Path]:
        """Make a folder that belongs to it, outside of those of pytest, which nobody else may enter."""
        with TemporaryDirectory(prefix="silodp-", ignore_cleanup_errors=True) as folder:
            self.own(Path(folder))
            yield Path(folder)

    def own(self, path: Path) -> None:
        """Give it a file or folder."""
        if self.name is not None:
            shutil.chown(path, self.name)

    def run(self, *command: str | Path) -> None:
        """Run a command, and fail with what it says."""
        done = subprocess.run(
            [str(part) for part in command],
            user=self.name,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
        )
        assert done.returncode == 0, done.stdout + done.stderr


def find_program(name: str, *folders: Path) -> Path:
    """Return the path of a program, or skip the test where it is not installed."""
    found = shutil.which(name) or next((str(f / name) for f in folders if (f / name).exists()), None)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return Path(found).resolve()


@contextmanager
def serve_postgresql(port: int = 5432, certificate: bytes | None = None) -> Iterator[Path]:
    """Run a PostgreSQL server; yield the folder of its socket. The user is silodp, without a password.

    Args:
        port: The port, which is open where there is a certificate.
        certificate: The certificate and key of the server in one, as PEM.
    """
    account = Account()
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    initdb, postgres = find_program("initdb", *programs), find_program("postgres", *programs)
    with account.make_folder() as folder:
        data = ["-D", folder / "data"]
        account.run(initdb, *data, "-U", "silodp", "-A", "trust", "-E", "UTF8", "--no-sync", "--locale=C")
        arguments = [postgres, *data, "-k", folder, "-p", port, "-c", "fsync=off"]
        if certificate is None:
            arguments += ["-c", "listen_addresses="]
        else:
            file = _write_certificate(account, folder, certificate)
            arguments += ["-c", "ssl=on", "-c", f"ssl_cert_file={file}", "-c", f"ssl_key_file={file}"]
        with _serve(account, arguments, folder / f".s.PGSQL.{port}", {}):
            yield folder


@contextmanager
def serve_mariadb(port: int = 3306, certificate: bytes | None = None) -> Iterator[Path]:
    """Run a MariaDB server; yield its socket. The user is root, without a password.

    Args:
        port: The port, which is open where there is a certificate.
        certificate: The certificate and key of the server in one, as PEM.
    """
    account = Account()
    unpacked = Path(os.environ.get(MARIADB, "/nowhere"))
    server = find_program("mariadbd", unpacked / "usr/sbin")
    install = find_program("mariadb-install-db", unpacked / "usr/bin")
    base = server.parents[1]
    libraries = {"LD_LIBRARY_PATH": ":".join(map(str, unpacked.glob("usr/lib/*-linux-gnu")))}
    with account.make_folder() as folder:
        data, socket = folder / "data", folder / "m.sock"
        data.mkdir()
        account.own(data)
        options = ["--no-defaults", f"--basedir={base}", f"--datadir={data}"]
        options += [f"--user={account.name}"] if account.name else []
        done = subprocess.run(
            [install, *options, "--auth-root-authentication-method=normal", "--skip-test-db"],
            capture_output=True, text=True, check=False, cwd="/", env={**os.environ, **libraries},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        arguments = [server, *options, f"--socket={socket}", f"--lc-messages-dir={base}/share/mysql"]
        if certificate is None:
            arguments += ["--skip-networking"]
        else:
            file = _write_certificate(account, folder, certificate)
            arguments += [
                "--bind-address=127.0.0.1",
                f"--port={port}",
                f"--ssl-cert={file}",
                f"--ssl-key={file}",
            ]
        with _serve(account, arguments, socket, libraries):
            yield socket


def _write_certificate(account: Account, folder: Path, certificate: bytes) -> Path:
    file = folder / "tls.pem"
    file.write_bytes(certificate)
    file.chmod(0o600)
    account.own(file)
    return file


def make_certificate() -> tuple[bytes, bytes]:
    """Return a certificate for localhost that signs itself, and the same with its key, as PEM."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    signed = made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    return signed, signed + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@contextmanager
def _serve(
    account: Account, arguments: list[Any], socket: Path, environment: dict[str, str]
) -> Iterator[None]:
    log = socket.parent / "log"
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [str(part) for part in arguments], stdout=file, stderr=file, user=account.name, cwd="/",
            env={**os.environ, **environment},
        ) as process,
    ):  # fmt: skip
        try:
            end = time.monotonic() + 60
            while not socket.exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.wait(60)
