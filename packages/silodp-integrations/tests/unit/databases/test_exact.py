"""Each value of a database arrives as it is, or is refused with its row, by the real drivers.

Every rule here was broken by a driver or a database on valid rows: two persons became one, or an amount another one.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from support.refusals import refused

SERVERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("postgresql", "mariadb")]
FILES = ["duckdb_file", "sqlite_file"]
Database = tuple[Callable[..., None], Callable[[str | None], Any]]


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Database:
    found: Database = request.getfixturevalue(request.param)
    return found


def in_each(*names: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("database", names, indirect=True)


def read(source: Any, key: str | None = None) -> dict[str, list[Any]]:
    found = source.read_columns(source.list_columns(), key)
    return {
        name: values.tolist() if hasattr(values, "tolist") else values.to_pylist()
        for name, values in found.items()
    }


@in_each(*SERVERS, *FILES)
def test_the_order_of_rows_does_not_depend_on_the_order_in_which_they_were_stored(database: Database) -> None:
    run, ask = database
    long = "x" * 2000
    rows = [
        ("b", 1, None),
        ("a", 2, "B"),
        ("a", 2, "b"),
        ("a", 2, None),
        ("A", 2, "b"),
        ("a ", 2, "b"),
        ("á", 2, "b"),
    ]
    rows += [("c", 3, long + end) for end in "abcd"]
    seen = []
    for seed in range(3):
        random.Random(seed).shuffle(rows)
        values = ", ".join(f"('{a}', {b}, {'NULL' if c is None else repr(c)})" for a, b, c in rows)
        run(
            "DROP TABLE IF EXISTS x",
            "CREATE TABLE x (a VARCHAR(9), b INTEGER, c TEXT)",
            f"INSERT INTO x VALUES {values}",
        )
        source = ask("SELECT * FROM x")
        seen.append(read(source, "a"))
        assert read(source)["c"] == seen[-1]["c"]
        assert source.read_columns(["b"])["b"].to_pylist() == seen[-1]["b"]
    assert seen[0] == seen[1] == seen[2]
    assert sorted(map(repr, zip(*seen[0].values(), strict=True))) == sorted(map(repr, rows))


@in_each(*SERVERS, *FILES)
def test_a_query_is_wrapped_as_it_is(database: Database) -> None:
    run, ask = database
    run("CREATE TABLE x (a VARCHAR(9), b INTEGER)", "INSERT INTO x VALUES ('k', 1), ('l', 2)")
    query = 'WITH y AS (SELECT * FROM x WHERE b > 1) SELECT a AS "the key", b FROM y -- ) at its end'
    if database[1](query).__class__.__name__ == "ConnectionFile":
        query = query.replace('"', "`") if "south" in str(ask(query).path) else query
    source = ask(query)
    assert source.list_columns() == ["the key", "b"]
    assert read(source, "the key") == {"the key": ["l"], "b": [2]}
    # What leaves our brackets would leave our order and our types.
    ends = ("--", "/*", "/* ( ", "#", "WHERE a = '", 'WHERE a = "')
    leaving = [f"SELECT a FROM x) SELECT a, b FROM x {end}" for end in ends]
    for wrong in ("SELECT nothing FROM x", "SELEKT", "SELECT a FROM x) UNION (SELECT 1", *leaving):
        with refused("data.query"):
            ask(wrong).list_columns()
    with refused("data.query"):
        ask(None)


@in_each(*SERVERS, *FILES)
def test_an_empty_result_has_its_columns(database: Database) -> None:
    run, ask = database
    run("CREATE TABLE x (a VARCHAR(9), b INTEGER)")
    assert read(ask("SELECT * FROM x"), "a") == {"a": [], "b": []}


@in_each(*SERVERS, *FILES)
def test_more_rows_than_the_bound_are_refused(database: Database) -> None:
    run, ask = database
    run("CREATE TABLE x (a VARCHAR(9))", "INSERT INTO x VALUES ('k'), ('l'), ('m')")
    for rows, is_allowed in ((3, True), (2, False)):
        source = ask("SELECT * FROM x")
        getattr(source, "_server", source).max_rows = rows
        if is_allowed:
            assert read(source)["a"] == ["k", "l", "m"]
            continue
        with refused("data.query") as caught:
            read(source)
        assert caught.value.field == "max_rows"


@in_each(*SERVERS, "duckdb_file")
def test_whole_and_decimal_numbers_keep_all_digits(database: Database) -> None:
    run, ask = database
    amounts = ["0.000000000000000001", "0.000000000000000002", "12345678901234567890.5", "-1.25"]
    values = ", ".join(f"('{n}', {2**53 + n}, {amount})" for n, amount in enumerate(amounts))
    run("CREATE TABLE x (a VARCHAR(9), b BIGINT, c DECIMAL(38, 18))", f"INSERT INTO x VALUES {values}")
    found = read(ask("SELECT * FROM x"), "b")
    assert found["b"] == [str(2**53 + n) for n in range(4)]
    assert found["c"] == list(map(Decimal, amounts))
    assert ask("SELECT c FROM x").read_columns(["c"])["c"].type == pa.decimal128(38, 18)


@in_each(*SERVERS, "duckdb_file")
@pytest.mark.parametrize(
    ("type_", "value", "row"),
    [
        ("DOUBLE PRECISION", "1", 0),
        ("REAL", "1", 0),
        ("DATE", "'2020-01-01'", 0),
        ("DECIMAL(9, 2)", "12.10", 2),
    ],
)
def test_keys_of_types_that_change_keys_are_refused(
    type_: str, value: str, row: int, database: Database
) -> None:
    run, ask = database
    run(f"CREATE TABLE x (a {type_})", f"INSERT INTO x VALUES (NULL), ({value})")
    with refused("data.value") as caught:
        read(ask("SELECT * FROM x"), "a")
    assert caught.value.field == "a"
    assert not row or f"data row {row} " in str(caught.value)
    assert len(read(ask("SELECT * FROM x"))["a"]) == 2  # as a feature it is read
    source = ask("SELECT 1 AS b, a FROM x")
    assert list(source.read_readable(["b", "a"])) == ["b", "a"]


@in_each(*SERVERS, "duckdb_file")
def test_days_and_times_arrive(database: Database) -> None:
    run, ask = database
    run(
        "CREATE TABLE x (a DATE, b TIMESTAMP NULL)",
        "INSERT INTO x VALUES ('1999-12-31', '2000-01-01 12:30:00'), ('9999-12-31', NULL), (NULL, NULL)",
    )
    found = read(ask("SELECT * FROM x"))
    assert found["a"] == [None, datetime.date(1999, 12, 31), datetime.date(9999, 12, 31)]
    assert [time and time.replace(tzinfo=None) for time in found["b"]] == [
        None, datetime.datetime(2000, 1, 1, 12, 30), None
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("type_", ["DATE", "TIMESTAMP", "TIMESTAMPTZ"])
@pytest.mark.parametrize("value", ["infinity", "-infinity", "0044-03-15 BC", "10000-01-01"])
def test_times_that_no_calendar_of_python_has_are_refused(
    type_: str, value: str, postgresql: Database
) -> None:
    run, ask = postgresql
    run(
        f"CREATE TABLE x (k INT, a {type_})",
        f"INSERT INTO x VALUES (1, NULL), (2, '0001-01-02'), (3, '{value}')",
    )
    with refused("data.value") as caught:
        read(ask("SELECT * FROM x"))
    assert caught.value.field == "a"
    assert "data row 3 " in str(caught.value)
    assert read(ask("SELECT * FROM x WHERE k < 3"))["k"] == [1, 2]


@pytest.mark.parametrize("type_", ["DATE", "TIMESTAMP", "TIMESTAMPTZ", "TIMESTAMP_NS"])
@pytest.mark.parametrize("value", ["infinity", "-infinity", "0044-03-15 (BC)", "10000-01-01"])
def test_such_times_of_duckdb_are_refused(type_: str, value: str, duckdb_file: Database) -> None:
    if type_ == "TIMESTAMP_NS" and "infinity" not in value:
        pytest.skip("out of the range of the type")
    run, ask = duckdb_file
    run(
        f"CREATE TABLE x (k INT, a {type_})",
        f"INSERT INTO x VALUES (1, NULL), (2, '1999-01-02'), (3, '{value}')",
    )
    with refused("data.value") as caught:
        read(ask("SELECT * FROM x"))
    assert "data row 3 " in str(caught.value)


@pytest.mark.slow
def test_numbers_of_postgresql_that_are_none(postgresql: Database) -> None:
    run, ask = postgresql
    run(
        "CREATE TABLE x (k INT, a NUMERIC)",
        "INSERT INTO x VALUES (1, 'NaN'), (2, 1.50), (3, 1e40), (4, 'Infinity')",
    )
    assert read(ask("SELECT * FROM x WHERE k < 4"))["a"] == [None, Decimal("1.5"), Decimal(10**40)]
    with refused("data.value") as caught:
        read(ask("SELECT * FROM x"))
    assert "data row 4 " in str(caught.value)


@pytest.mark.slow
def test_texts_of_postgresql(postgresql: Database) -> None:
    run, ask = postgresql
    run("CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    run(
        "CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
        "CREATE TABLE x (a CHAR(5), b TEXT COLLATE nocase, c UUID, d JSON)",
        "INSERT INTO x VALUES ('k', 'B', 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11', '[2]'), ('k', 'b', NULL, '[1]')",
    )
    found = read(ask("SELECT * FROM x"), "c")
    assert found == {
        "a": ["k", "k"], "b": ["B", "b"], "c": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", None], "d": ["[2]", "[1]"],
    }  # fmt: skip


@pytest.mark.slow
def test_types_of_postgresql_that_are_no_column_of_a_table_come_as_text(postgresql: Database) -> None:
    """The driver gives bytes of an address, and of money a hundred times the amount."""
    run, ask = postgresql
    run(
        "CREATE TABLE x (a INET, b TIME, c INT[], d MONEY)",
        "INSERT INTO x VALUES ('1.2.3.4', '12:00', '{1,2}', 1)",
    )
    assert read(ask("SELECT * FROM x")) == {
        "a": ["1.2.3.4/32"],
        "b": ["12:00:00"],
        "c": ["{1,2}"],
        "d": ["$1.00"],
    }


@in_each(*FILES)
def test_texts_that_a_file_takes_for_equal_are_ordered(database: Database) -> None:
    run, ask = database
    rows = ["('k', 'B')", "('k', 'b')", "('K', 'b')"]
    seen = []
    for values in (rows, rows[::-1]):
        run(
            "DROP TABLE IF EXISTS x", "CREATE TABLE x (a TEXT COLLATE NOCASE, b TEXT COLLATE NOCASE)",
            f"INSERT INTO x VALUES {', '.join(values)}",
        )  # fmt: skip
        seen.append(read(ask("SELECT * FROM x"), "a"))
    assert seen[0] == seen[1] == {"a": ["K", "k", "k"], "b": ["b", "B", "b"]}


@pytest.mark.slow
def test_a_day_of_postgresql_does_not_depend_on_the_zone_of_its_server(postgresql: Database) -> None:
    run, ask = postgresql
    run(
        "ALTER DATABASE postgres SET TimeZone = 'Asia/Tokyo'", "CREATE TABLE x (a TIMESTAMPTZ)",
        "INSERT INTO x VALUES ('2020-01-01 20:00:00+00')",
    )  # fmt: skip
    found = read(ask("SELECT a, a::date AS b FROM x"))
    assert found["a"] == [datetime.datetime(2020, 1, 1, 20, tzinfo=datetime.UTC)]
    assert found["b"] == [datetime.date(2020, 1, 1)]


@pytest.mark.slow
def test_keys_that_mariadb_takes_for_equal_stay_apart(mariadb: Database) -> None:
    run, ask = mariadb
    keys = ["anna", "Anna", "ánna", "anna ", "анна", "𝒳"]
    run(
        "CREATE TABLE x (a VARCHAR(9), b CHAR(9)) CHARACTER SET utf8mb4",
        "INSERT INTO x VALUES " + ", ".join(f"('{k}', '{k}')" for k in keys),
    )
    found = read(ask("SELECT * FROM x"), "a")
    assert found["a"] == sorted(keys, key=str.encode)
    assert set(found["b"]) == {key.strip() for key in keys}  # a CHAR has no trailing blanks


@pytest.mark.slow
def test_numbers_of_mariadb(mariadb: Database) -> None:
    run, ask = mariadb
    run(
        "CREATE TABLE x (a FLOAT, b BIGINT UNSIGNED, c BIT(3))",
        "INSERT INTO x VALUES (0.12345671, 18446744073709551615, b'101'), (0.12345674, 1, b'0')",
    )
    found = read(ask("SELECT * FROM x"))
    assert len(set(found["a"])) == 2  # as text both are 0.123457
    assert found["b"] == [18446744073709551615, 1]
    assert found["c"] == [5, 0]


@pytest.mark.slow
@pytest.mark.parametrize("value", ["0000-00-00", "2020-00-10", "2020-02-30"])
def test_days_of_mariadb_that_are_none_are_refused(value: str, mariadb: Database) -> None:
    """The driver gives the text, or None for some: a day that is none would be a missing cell."""
    run, ask = mariadb
    run(
        "SET sql_mode = 'ALLOW_INVALID_DATES'", "CREATE TABLE x (k INT, a DATE)",
        f"INSERT INTO x VALUES (1, NULL), (2, '{value}')",
    )  # fmt: skip
    with refused("data.value") as caught:
        read(ask("SELECT * FROM x"))
    assert "data row 2 " in str(caught.value)


@pytest.mark.slow
def test_a_time_of_mariadb_does_not_depend_on_the_zone_of_its_server(mariadb: Database) -> None:
    run, ask = mariadb
    run(
        "SET time_zone = '+05:00'", "CREATE TABLE x (a TIMESTAMP NULL)", "INSERT INTO x VALUES ('2020-01-01 05:00:00')",
        "SET GLOBAL time_zone = '+03:00'",
    )  # fmt: skip
    assert read(ask("SELECT * FROM x"))["a"] == [datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)]


@pytest.mark.slow
def test_bytes_are_no_text(mariadb: Database, sqlite_file: Database) -> None:
    for run, ask in (mariadb, sqlite_file):
        run("CREATE TABLE x (k INT, a BLOB)", "INSERT INTO x VALUES (1, NULL), (2, x'ff')")
        with refused("data.value") as caught:
            read(ask("SELECT * FROM x"))
        assert "data row 2 " in str(caught.value)
        assert list(ask("SELECT * FROM x").read_readable(["a", "k"])) == ["k"]


@pytest.mark.parametrize("type_", ["UUID", "ID", "STRING", "INTEGER", ""])
def test_pseudonyms_that_sqlite_has_made_numbers_are_refused(type_: str, sqlite_file: Database) -> None:
    """In a column that is not declared TEXT, 12e3 and 12000 are one person, and 1e999 and 2e999 another one."""
    run, ask = sqlite_file
    run(f"CREATE TABLE x (a {type_})", "INSERT INTO x VALUES ('0012'), ('12e3'), ('1e999'), ('ab12')")
    if type_:
        with refused("data.value") as caught:
            read(ask("SELECT * FROM x"), "a")
        assert caught.value.field == "a"
        assert "data row 1 " in str(caught.value)
    else:  # without a type, cells stay as they were written
        assert read(ask("SELECT * FROM x"), "a")["a"] == ["0012", "12e3", "1e999", "ab12"]


def test_cells_of_sqlite_keep_their_digits_and_their_types(sqlite_file: Database) -> None:
    run, ask = sqlite_file
    amounts = [0.1234567890123, 0.1234567890124]
    run(
        "CREATE TABLE x (k INT, a, b, c, d TEXT COLLATE NOCASE)",
        f"INSERT INTO x VALUES (1, {amounts[0]}, {2**60}, 1, 'B'), (2, {amounts[1]}, 7, 1.5, 'b')",
        "INSERT INTO x VALUES (3, 'x', NULL, 2, 'c')",
    )
    found = read(ask("SELECT * FROM x"))
    assert found["a"] == [*amounts, "x"]
    assert found["b"] == [2**60, 7, None]
    assert found["c"] == [1.0, 1.5, 2.0]
    assert read(ask("SELECT d FROM x"))["d"] == ["B", "b", "c"]
    # As floating-point numbers both would be 2^53.
    assert read(ask(f"SELECT {2**53 + 1} AS a UNION ALL SELECT 1.5"))["a"] == [1.5, 2**53 + 1]


def test_decimals_of_duckdb_after_many_whole_numbers(duckdb_file: Database) -> None:
    run, ask = duckdb_file
    run(
        "CREATE TABLE x AS SELECT range AS k, CAST(range AS DECIMAL(30, 15)) AS a, range::HUGEINT AS b "
        "FROM range(30000)",
        "UPDATE x SET b = 170141183460469231731687303715884105727 WHERE k = 0",
        "UPDATE x SET a = 0.000000000000001 WHERE k = 29999",
        "CREATE TYPE mood AS ENUM ('good', 'bad')",
    )
    found = read(ask("SELECT k, a, b, 'bad'::mood AS m FROM x"), "k")
    order = sorted(range(30000))
    assert found["k"] == list(map(str, order))
    assert found["a"][-1] == Decimal("0.000000000000001")
    assert found["b"][0] == 2**127 - 1
    assert found["m"][0] == "bad"


def test_names_that_stand_twice_are_listed_twice(duckdb_file: Database, sqlite_file: Database) -> None:
    """Within another query the second one would get a new name, and the schema would take the first in silence."""
    for _, ask in (duckdb_file, sqlite_file):
        duckdb_file[0]("SELECT 1")
        sqlite_file[0]("SELECT 1")
        assert ask("SELECT 1 AS a, 2 AS a").list_columns() == ["a", "a"]
