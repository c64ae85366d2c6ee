"""Configurations and tables of the tests of commands."""

from __future__ import annotations

from pathlib import Path

PERSONAL = """
name = "personal"
rounds = 2
seed = 1
delta = 1e-4
[data]
source = "embedded"
silos = 2
allocation = "own"
[budgets]
distribution = "three-levels"
levels = [0.5, 1, 5]
seed = 3
[method]
name = "rpdp"
noise_multiplier = 5.0
clip = 1.0
local_steps = 4
expected_batch_size = 16.0
local_learning_rate = 0.5
largest_budget = 5.0
"""
USERS = """
[budgets]
distribution = "mixture"
of = "users"
[method.personal]
by = "clip"
largest_budget = 5.0
"""
TABLE = """
rounds = 1
delta = 1e-3
[data]
source = "tables"
files = {{ a = "a.csv", b = "b.csv" }}
[data.schema]
user = "id"
label = "y"
classes = [0, 1]
budget = "wish"
[data.schema.numeric]
x = [0, 10]
{more}
[method]
name = "rpdp"
noise_multiplier = 5.0
clip = 1.0
local_steps = 2
expected_batch_size = 1.0
local_learning_rate = 0.5
largest_budget = 5.0
"""


def tables(folder: Path, wishes: tuple[str, ...]) -> Path:
    for name in ("a", "b"):
        rows = [f"{name}{i},{i % 2},{i},{wish}" for i, wish in enumerate(wishes)]
        (folder / f"{name}.csv").write_text("\n".join(["id,y,x,wish", *rows]) + "\n")
    path = folder / "tables.toml"
    path.write_text(TABLE.format(more=""))
    return path


TABLES = """
rounds = 1
[data]
source = "tables"
files = { north = "north.csv", south = "south.csv" }
[data.schema]
user = "person"
label = "sick"
classes = ["no", "yes"]
numeric = { age = [0, 100] }
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
"""

DDP = """
name = "steps"
rounds = 2
seed = 1
accountant = "rdp"
[data]
source = "embedded"
silos = 3
allocation = "own"
[method]
name = "ddp"
noise_multiplier = 2.0
clip = 1.0
local_steps = 3
record_sampling = 0.1
expected_batch_size = 15.0
local_learning_rate = 0.5
"""
