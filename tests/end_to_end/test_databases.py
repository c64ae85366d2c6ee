"""A hospital with PostgreSQL, one with MariaDB and one with a CSV file train the model of three CSV files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from silodp_deploy.check import check_party
from silodp_deploy.consortium import Consortium
from silodp_deploy.policy import Policy
from support.commands import Silodp
from support.consortium import agree_on_tables
from support.database_servers import serve_mariadb, serve_postgresql, write_connection
from support.deployed import assert_same_run, simulate

pymysql = pytest.importorskip("pymysql", reason="pip install 'silodp[mariadb]'")
dbapi = pytest.importorskip("adbc_driver_postgresql.dbapi", reason="pip install 'silodp[postgresql]'")

CONFIG = """
name = "three"
rounds = 3
seed = 7
[data]
source = "tables"
files = {{ north = "{north}", south = "{south}", east = "east.csv" }}
[data.schema]
user = "person"
users = "persons.txt"
label = "ill"
classes = ["no", "yes"]
numeric = {{ age = [0.0, 100.0], pressure = [0.0, 300.0] }}
{queries}
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.01
"""
QUERIES = """
[data.schema.silos.north]
query = "SELECT person, age, pressure, ill FROM visits WHERE is_open"
[data.schema.silos.south]
query = "SELECT person, age, pressure, ill FROM visits WHERE is_open"
"""
PERSONS = [f"p{number:02}" for number in range(24)]
TABLE = "CREATE TABLE visits (person VARCHAR(9), age INTEGER, pressure DECIMAL(6, 2), ill VARCHAR(3), is_open BOOLEAN)"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with CSV files, the same tables in two servers in another order, and their connection files."""
    folder, coins = tmp_path_factory.mktemp("study"), random.Random(1)
    (folder / "persons.txt").write_text("\n".join(PERSONS))
    (folder / "simulated.toml").write_text("")
    inserted = {}
    for name in ("north", "south", "east"):
        rows = [
            (
                coins.choice(PERSONS),
                coins.randint(18, 99),
                f"{coins.uniform(80, 200):.2f}",
                coins.choice(["no", "yes"]),
            )
            for _ in range(60)
        ]
        # In the order of the queries: by person, age, pressure and label.
        rows.sort(key=lambda row: (row[0], row[1], float(row[2]), row[3]))
        lines = ["person,age,pressure,ill", *(",".join(map(str, row)) for row in rows)]
        (folder / f"{name}.csv").write_text("\n".join(lines))
        coins.shuffle(rows)
        values = ", ".join(f"('{a}', {b}, {c}, '{d}', TRUE)" for a, b, c, d in rows)
        inserted[name] = f"INSERT INTO visits VALUES {values}, ('p00', 1, 1, 'no', FALSE)"
    with ExitStack() as stack:
        home = stack.enter_context(serve_postgresql())
        socket = stack.enter_context(serve_mariadb())
        with (
            dbapi.connect(f"host={home} user=silodp dbname=postgres", autocommit=True) as connection,
            connection.cursor() as cursor,
        ):
            for statement in (TABLE, inserted["north"]):
                cursor.execute(statement)
        with (
            pymysql.connect(unix_socket=str(socket), user="root") as connection,
            connection.cursor() as cursor,
        ):
            for statement in ("CREATE DATABASE study", "USE study", TABLE, inserted["south"], "COMMIT"):
                cursor.execute(statement)
        for name, settings in {
            "north": f'kind = "postgresql"\nhost = "{home}"\nuser = "silodp"\ndatabase = "postgres"\n',
            "south": f'kind = "mariadb"\nhost = "{socket}"\nuser = "root"\ndatabase = "study"\n',
        }.items():
            write_connection(folder / f"{name}.connection.toml", settings)
        yield folder


@pytest.fixture(scope="module")
def expected(study: Path) -> Path:
    """Return the run on the three CSV files, in one process."""
    return simulate(study, CONFIG.format(north="north.csv", south="south.csv", queries=""))


def write_config(study: Path) -> Path:
    path = study / "study.toml"
    ending = "connection.toml"
    path.write_text(CONFIG.format(north=f"north.{ending}", south=f"south.{ending}", queries=QUERIES))
    return path


@pytest.mark.slow
def test_a_simulation_reads_databases(study: Path, expected: Path, silodp: Silodp) -> None:
    done = silodp("run", write_config(study), "--out", study / "run", "--set", "isolate_units=true")
    assert done.status == 0, done.err
    ours, theirs = (load_file(run / "model.safetensors") for run in (study / "run", expected))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_silos_and_a_server_train_from_databases(study: Path, expected: Path, tmp_path: Path) -> None:
    tables = {name: study / f"{name}.connection.toml" for name in ("north", "south")}
    processes = agree_on_tables(write_config(study), tmp_path, {**tables, "east": study / "east.csv"})
    consortium, home = Consortium.load(processes.public), processes.home("north")
    assert len(Policy.load(home / "policy.toml").queries) == 1
    assert Policy.load(processes.home("east") / "policy.toml").queries == []
    found = {one.name: one for one in check_party(home, consortium, table=tables["north"])}
    assert found["query"].is_good
    assert found["table"].is_good
    tables["north"].chmod(0o644)
    try:
        found = {one.name: one for one in check_party(home, consortium, table=tables["north"])}
        for name in ("query", "table"):
            assert not found[name].is_good
            assert "data.connection" in found[name].told
    finally:
        tables["north"].chmod(0o600)
    try:
        processes.start_all()
        assert processes.wait_for_server(500) == 0, processes.log("server")
        assert_same_run(processes, expected)
    finally:
        processes.kill_all()
