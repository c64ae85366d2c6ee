"""The private file that names a server: who may read it, what it says, and that no error repeats a secret."""

from __future__ import annotations

import socket
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from silodp_integrations.databases.connection import Connection, read_connection
from support.database_servers import (
    make_certificate,
    open_source,
    serve_mariadb,
    serve_postgresql,
    write_connection,
)
from support.refusals import refused

SECRET = "pass'word\\ 1"
DRIVER = '''
"""A driver whose cells are the objects that other drivers give."""
import sqlite3
from datetime import *
from decimal import Decimal
from uuid import UUID

class Cursor:
    def __init__(self, rows):
        self.rows, self.description = rows, [(name,) for name in "kabcd"]
    def execute(self, statement): self.left = [] if "1 = 0" in statement else list(self.rows)
    def fetchmany(self, size): found, self.left = self.left[:2], self.left[2:]; return found
    def close(self): pass

class Opened:
    def __init__(self, rows): self.rows = rows
    def cursor(self): return Cursor(self.rows)
    def close(self): pass

def connect(rows, password=None):
    if password:
        raise ValueError(f"the server knows no {password}")
    return Opened(eval(rows))
'''


def test_a_connection_file_is_private(tmp_path: Path) -> None:
    path = write_connection(tmp_path / "a.connection.toml", 'kind = "postgresql"\n')
    assert read_connection(path).max_rows == 50_000_000
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with refused("data.connection"):
            open_source(path, "SELECT 1")


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (f'password = "{SECRET[:4]}"', "password"),
        ('hosts = "x"', "hosts"),
        (f'port = "{SECRET[:4]}"', "port"),
        ("port = 0", "port"),
        ("max_rows = 0", "max_rows"),
        (f'tls = "{SECRET[:4]}"', "tls"),
    ],
)
def test_wrong_settings_are_named_and_not_repeated(line: str, field: str, tmp_path: Path) -> None:
    path = write_connection(tmp_path / "a.connection.toml", f'kind = "postgresql"\n{line}\n')
    with refused("data.connection") as caught:
        open_source(path, "SELECT 1")
    assert caught.value.field == field
    assert f'"{SECRET[:4]}"' not in str(caught.value)
    assert SECRET[:4] not in str(caught.value).replace("password", "")


def test_a_password_comes_from_the_environment_or_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(line: str) -> str | None:
        path = write_connection(tmp_path / "a.connection.toml", f'kind = "mariadb"\n{line}\n')
        found: str | None = open_source(path, "SELECT 1")._server.password  # type: ignore[attr-defined]
        return found

    assert ask("") is None
    monkeypatch.setenv("NORTH", SECRET)
    assert ask('password_env = "NORTH"') == SECRET
    file = tmp_path / "north.password"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    assert ask('password_file = "north.password"') == SECRET
    file.chmod(0o644)
    for line in ('password_file = "north.password"', 'password_file = "none"', 'password_env = "NOBODY"'):
        with refused("data.connection"):
            ask(line)


def test_a_server_elsewhere_must_prove_its_name() -> None:
    for host, tls in (
        ("localhost", "off"),
        ("127.0.0.1", "off"),
        ("/run/db", "off"),
        ("db.example", "verify"),
    ):
        assert Connection(kind="postgresql", host=host).find_tls() == tls
    assert Connection(kind="postgresql", host="db.example", tls="require").find_tls() == "require"


@pytest.mark.parametrize(
    ("kind", "driver"), [("postgresql", "adbc_driver_postgresql"), ("mariadb", "pymysql")]
)
def test_no_error_of_a_connection_repeats_the_password(
    kind: str, driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(driver)
    monkeypatch.setenv("NORTH", SECRET)
    text = f'kind = "{kind}"\nhost = "127.0.0.1"\nport = 1\nuser = "u"\npassword_env = "NORTH"\n'
    with refused("data.connection") as caught:
        open_source(write_connection(tmp_path / "a.connection.toml", text), "SELECT 1").list_columns()
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.slow
def test_a_wrong_password_is_refused_and_a_right_one_taken(
    postgresql: Any, mariadb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORTH", SECRET)
    mariadb[0](
        "CREATE OR REPLACE USER reader IDENTIFIED BY 'pass\\'word\\\\ 1'", "GRANT SELECT ON t.* TO reader",
        "CREATE TABLE x (a TEXT)", "INSERT INTO x VALUES ('k')",
    )  # fmt: skip
    place = mariadb[1]("SELECT 1")._server.settings.host
    text = f'kind = "mariadb"\nhost = "{place}"\nuser = "reader"\ndatabase = "t"\npassword_env = "NORTH"\n'
    path = write_connection(tmp_path / "a.connection.toml", text)
    assert open_source(path, "SELECT * FROM x").read_columns(["a"])["a"].to_pylist() == ["k"]
    monkeypatch.setenv("NORTH", "another one")
    with refused("data.connection") as caught:
        open_source(path, "SELECT * FROM x").list_columns()
    assert "another one" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_server_elsewhere_that_others_could_be_gets_no_password(kind: str, tmp_path: Path) -> None:
    """Whoever can answer at the server's address would get the password, and give any rows."""
    driver, serve = {
        "postgresql": ("adbc_driver_postgresql", serve_postgresql),
        "mariadb": ("pymysql", serve_mariadb),
    }[kind]
    pytest.importorskip(driver)
    public, secret = make_certificate()
    (tmp_path / "ca.pem").write_bytes(public)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def ask(host: str, *settings: str) -> list[str]:
        lines = [f'kind = "{kind}"', f'host = "{host}"', f"port = {port}", 'user = "silodp"', *settings]
        lines += ['database = "postgres"'] if kind == "postgresql" else []
        path = write_connection(tmp_path / "a.connection.toml", "\n".join(lines))
        return open_source(path, "SELECT 1 AS a").list_columns()

    with serve(port, secret) as place:
        if kind == "mariadb":
            import pymysql

            with pymysql.connect(unix_socket=str(place), user="root") as connection:
                connection.cursor().execute("CREATE USER silodp REQUIRE SSL")
        assert ask("localhost", 'tls = "verify"', 'ca = "ca.pem"') == ["a"]
        assert ask("127.0.0.1", 'tls = "require"') == ["a"]
        for host, *settings in (
            ("localhost", 'tls = "verify"'),
            ("127.0.0.1", 'tls = "verify"', 'ca = "ca.pem"'),
        ):
            with refused("data.connection"):
                ask(host, *settings)


def ask_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], query: str = "SELECT 1"
) -> Any:
    (tmp_path / "fake_driver.py").write_text(DRIVER)
    monkeypatch.syspath_prepend(tmp_path)
    written = repr(rows).replace("datetime.", "")
    text = f'kind = "dbapi"\nmodule = "fake_driver"\n[arguments]\nrows = """{written}"""\n'
    return open_source(write_connection(tmp_path / "a.connection.toml", text), query)


def test_objects_of_a_driver_become_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")
    rows = [
        ("b", 1, Decimal("1.50"), datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=1))), number),
        ("a", 2**63, Decimal("0.000000000000000001"), datetime(2020, 1, 2, tzinfo=UTC), None),
        ("a", None, Decimal(2), None, number),
    ]
    source = ask_driver(tmp_path, monkeypatch, rows)
    found = {name: cells.to_pylist() for name, cells in source.read_columns(list("kabcd"), "k").items()}
    assert found["k"] == ["a", "a", "b"]
    assert found["a"] == [None, Decimal(2**63), Decimal(1)]
    assert found["b"] == [Decimal(2), Decimal("0.000000000000000001"), Decimal("1.5")]
    assert found["c"] == [None, datetime(2020, 1, 2, tzinfo=UTC), datetime(2019, 12, 31, 23, tzinfo=UTC)]
    assert found["d"] == [str(number), None, str(number)]


def test_an_error_that_repeats_the_password_is_told_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ask_driver(tmp_path, monkeypatch, []).path
    monkeypatch.setenv("NORTH", SECRET)
    path.write_text('password_env = "NORTH"\n' + path.read_text())
    with refused("data.connection") as caught:
        open_source(path, "SELECT 1").list_columns()
    assert SECRET not in str(caught.value)
    assert "knows no ***" in str(caught.value)


@pytest.mark.parametrize("key", [1.0, Decimal("1.0"), True, datetime(2020, 1, 1), b"k"])
def test_keys_of_a_driver_that_may_be_others_are_refused(
    key: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("a", 1, 1, 1, 1), (key, 1, 1, 1, 1)]
    with refused("data.value") as caught:
        ask_driver(tmp_path, monkeypatch, rows).read_columns(["k"], "k")
    assert caught.value.field == "k"
    assert "data row 2 " in str(caught.value)


def test_sqlite_is_read_as_any_driver(tmp_path: Path) -> None:
    base = tmp_path / "x.db"
    seen = []
    for rows in (["b", "a", "A"], ["A", "b", "a"]):
        base.unlink(missing_ok=True)
        with closing(sqlite3.connect(base)) as connection:
            connection.execute("CREATE TABLE x (a TEXT COLLATE NOCASE, b REAL)")
            connection.executemany("INSERT INTO x VALUES (?, 1.5)", [(row,) for row in rows])
            connection.commit()
        text = f'kind = "dbapi"\nmodule = "sqlite3"\narguments = {{ database = "{base}" }}\n'
        source = open_source(write_connection(tmp_path / "a.connection.toml", text), "SELECT * FROM x")
        assert source.list_columns() == ["a", "b"]
        seen.append(source.read_columns(["b", "a"], "a")["a"].to_pylist())
    assert seen == [["A", "a", "b"]] * 2
    for leaving in ("SELECT a FROM x) SELECT b FROM x /*", "SELECT a FROM x) SELECT b FROM x --"):
        with refused("data.query"):
            open_source(source.path, leaving).list_columns()


@pytest.mark.parametrize("module", ["", "no_such_driver"])
def test_a_driver_that_is_not_there_is_named(module: str, tmp_path: Path) -> None:
    path = write_connection(tmp_path / "a.connection.toml", f'kind = "dbapi"\nmodule = "{module}"\n')
    with refused("data.no_reader" if module else "data.connection"):
        open_source(path, "SELECT 1").list_columns()
