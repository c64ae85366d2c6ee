"""The private file that says how to connect to a database server: it holds no password, and says where one is."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from silodp._lazy import load
from silodp.config.toml_values import read_toml
from silodp.data.tables.columns import Reader
from silodp.data.tables.sources.source import Source, Values
from silodp.errors import SilodpError
from silodp.text import first_line
from silodp.wire.files import is_private
from silodp_integrations.databases._database import MAX_ROWS, Database

_KINDS = {
    "postgresql": "silodp_integrations.databases.postgresql:PostgreSQL",
    "mariadb": "silodp_integrations.databases.mariadb:MariaDB",
    "mysql": "silodp_integrations.databases.mariadb:MariaDB",
    "dbapi": "silodp_integrations.databases.dbapi:DBAPI",
}
_MAX_PASSWORD = 4096


class Connection(BaseModel):
    """How to connect to a database server.

    Attributes:
        kind: What the server is; "dbapi" takes any driver of PEP 249, for example for SQL Server and Oracle.
        host: Name or address of the server; the folder, or for MariaDB the file, of a Unix socket.
        port: Its port; None: the usual one.
        database: Name of the database.
        user: Name of a user of the database, who should be allowed to read only.
        password_env: Name of an environment variable with the password.
        password_file: File with the password, beside this file, that only its owner may read.
        tls: Whether the server must prove its name ("verify"), need not ("require"), or nothing is encrypted ("off");
            None: "verify", and "off" on this machine.
        ca: File with the authority that certifies the server, beside this file; None: those of this system.
        max_rows: The most rows that the query may give.
        module: The driver of kind "dbapi".
        arguments: What its `connect` takes, besides the password.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    kind: Literal["postgresql", "mariadb", "mysql", "dbapi"]
    host: str = "localhost"
    port: int | None = Field(default=None, ge=1, le=65535)
    database: str | None = None
    user: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    tls: Literal["verify", "require", "off"] | None = None
    ca: str | None = None
    max_rows: int = Field(default=MAX_ROWS, ge=1)
    module: str | None = None
    arguments: dict[str, str | int | float | bool] = {}

    @property
    def is_socket(self) -> bool:
        """Whether the host is the path of a Unix socket."""
        return self.host.startswith("/")

    def find_tls(self) -> Literal["verify", "require", "off"]:
        """Return `tls`, or what stands for it where it is not set."""
        return self.tls or ("off" if self.is_socket or _is_local(self.host) else "verify")


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_connection(path: Path) -> Connection:
    """Read a connection file.

    Raises:
        SilodpError: Others may read it, or a setting is unknown or wrong (code data.connection).
    """
    _check_private(path)
    table = read_toml(path)
    if unknown := sorted(table.keys() - Connection.model_fields.keys()):
        known = ", ".join(Connection.model_fields)
        remedy = (
            "name the file or variable that holds it" if unknown[0] == "password" else f"known are {known}"
        )
        raise _refuse(path, f"has no setting {unknown[0]!r}; {remedy}", unknown[0])
    try:
        return Connection.model_validate(table)
    except ValidationError as error:
        # Not the value: it may be a secret in the wrong place.
        (first, *_) = error.errors(include_input=False, include_url=False)
        field = ".".join(map(str, first["loc"]))
        raise _refuse(path, f"has a wrong {field}: {first['msg']}; correct it", field) from None


def _check_private(path: Path) -> None:
    with path.open("rb") as file:
        if is_private(os.fstat(file.fileno())):
            return
    raise _refuse(path, f"can be read by others, or belongs to another user; run 'chmod 600 {path}'", "files")


def _read_password(path: Path, settings: Connection) -> str | None:
    """Return the password, without the end of its line."""
    if settings.password_env is not None:
        found = os.environ.get(settings.password_env)
        if found is None:
            raise _refuse(path, "names a variable of the environment that is not set; set it", "password_env")
        return found
    if settings.password_file is None:
        return None
    file = path.parent / settings.password_file
    try:
        _check_private(file)
        return file.read_text()[:_MAX_PASSWORD].rstrip("\r\n")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise _refuse(path, f"names {file}, which cannot be read ({reason})", "password_file") from None


def _refuse(path: Path, reason: str, field: str) -> SilodpError:
    return SilodpError(f"the connection file {path} {reason}.", code="data.connection", field=field)


class Server(Database):
    """The result of a query to a database server.

    Args:
        path: The connection file.
        reader: How cells that are text are written.
        query: The query.
        settings: The content of the file.
    """

    port: int

    def __init__(self, path: Path, reader: Reader, query: str | None, settings: Connection) -> None:
        super().__init__(path, reader, query)
        self.settings, self.max_rows = settings, settings.max_rows

    @cached_property
    def password(self) -> str | None:
        """The password; None where the server asks for none."""
        return _read_password(self.path, self.settings)

    def find_authority(self) -> str | None:
        """Return the path of the authority's file; None without one."""
        return None if self.settings.ca is None else str(self.path.parent / self.settings.ca)

    @contextmanager
    def _reach(self) -> Iterator[None]:
        """Raise an error of a connection as that of the file that describes it."""
        try:
            yield
        except Exception as error:  # every driver has exceptions of its own
            told = self._hide_secrets(first_line(error))
            raise _refuse(
                self.path, f"leads to no connection ({told}); correct it, or ask for access", "host"
            ) from None

    def _hide_secrets(self, text: str) -> str:
        return text.replace(self.password, "***") if self.password else text


class ConnectionFile(Source):
    """The result of a query to the server that a private file names."""

    takes_query = True

    def __init__(self, path: Path, reader: Reader, query: str | None = None) -> None:
        super().__init__(path, reader, query)
        settings = read_connection(path)
        server: type[Server] = load(_KINDS[settings.kind])
        self._server = server(path, reader, query, settings)

    def list_columns(self) -> list[str]:
        """Return the names of the query's columns."""
        return self._server.list_columns()

    def read_columns(self, names: Sequence[str], key: str | None = None) -> Mapping[str, Values]:
        """Return columns of the query, as `Database.read_columns`."""
        return self._server.read_columns(names, key)

    def read_readable(self, names: Sequence[str], key: str | None = None) -> Mapping[str, Values]:
        """Return columns of the query, as `Database.read_readable`."""
        return self._server.read_readable(names, key)
