#!/usr/bin/env bash
# pyreadstat 1.3.7: files of SAS and Stata are read as other days, other times, and fewer rows, without a warning.
#
# SAS has no 29 February in 4000 and 8000, so '31DEC9999'd is 2936547 (read as 29 December; pandas 2.3.3 does the same).
# DTDATE shows the day of a time in seconds: ten minutes after midnight on 1 January 1960 are read as 600 days. Stata's
# %tC counts 27 leap seconds, which stay in the time. Of a transport file (.xpt) that ends early the rows that are left
# are read, and of one with two data sets the first.
# Seen: "9999-12-29 1961-08-23 2020-01-01 00:00:27, 45 of 50 rows, 50 of 100 rows".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check pyreadstat==1.3.7 pandas==2.3.3
cd "$work"
"$work/env/bin/python" -W ignore - <<'PY'
from pathlib import Path

import pandas as pd
import pyreadstat

frame = pd.DataFrame({"D": [2936547.0], "T": [600.0]})
pyreadstat.write_xport(frame, "days.xpt", variable_format={"D": "DATE9.", "T": "DTDATE9."})
days, _ = pyreadstat.read_xport("days.xpt")
milliseconds = (pd.Timestamp("2020-01-01") - pd.Timestamp("1960-01-01")) / pd.Timedelta("1ms")
pyreadstat.write_dta(pd.DataFrame({"t": [milliseconds + 27_000]}), "leap.dta", variable_format={"t": "%tC"})
leap, _ = pyreadstat.read_dta("leap.dta")

pyreadstat.write_xport(pd.DataFrame({"A": [f"p{n:05}" for n in range(50)], "B": [1.0] * 50}), "all.xpt")
whole = Path("all.xpt").read_bytes()
Path("part.xpt").write_bytes(whole[:-80])
Path("two.xpt").write_bytes(whole + whole[whole.index(b"HEADER RECORD*******MEMB") :])
part, two = (len(pyreadstat.read_xport(name)[0]) for name in ("part.xpt", "two.xpt"))

seen = f"{days['D'][0]} {days['T'][0]} {leap['t'][0]}, {part} of 50 rows, {two} of 100 rows"
print(seen)
assert seen == "9999-12-29 1961-08-23 2020-01-01 00:00:27, 45 of 50 rows, 50 of 100 rows", "changed"
PY
