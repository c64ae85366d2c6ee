"""Runs of small consortia, the same run in one process, and waiting for processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from silodp.accounting.ledger import reopen_ledger
from silodp.config.resolve import load_config
from silodp.methods.base import supports
from silodp.runtime.train import train
from support.consortium import Processes

BASE = """
name = "five"
rounds = 3
seed = 7
[data]
source = "embedded"
silos = {silos}
{data}
"""
AVG = """
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.5
server_learning_rate = 20.0
{more}
[method.local]
learning_rate = 0.3
"""
DDP = """
[method]
name = "ddp"
noise_multiplier = 2.0
clip = 1.0
local_steps = 3
record_sampling = 0.1
expected_batch_size = 15.0
local_learning_rate = 0.5
"""
RPDP = """
[method]
name = "rpdp"
clip = 1.0
noise_multiplier = 5.0
local_steps = 4
expected_batch_size = 20.0
local_learning_rate = 0.5
largest_budget = 5.0
[budgets]
distribution = "mixture"
of = "records"
"""
USERS = "users = 40"


TABLES = """
name = "two"
rounds = 2
[data]
source = "tables"
files = {{ north = "north.csv", south = "south.csv" }}
[data.schema]
user = "{user}"
label = "ill"
classes = ["no", "yes"]
numeric = {{ age = [0.0, 100.0] }}
{index}
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
{more}
[method.local]
learning_rate = 0.01
"""


def config(method: str, *, head: str = "", data: str = USERS, silos: int = 3, more: str = "") -> str:
    return head + BASE.format(silos=silos, data=data) + method.replace("{more}", more)


PLAIN = config(AVG)
MASKED = config(AVG, head='aggregator = "masked"\n', silos=4)
LATTICE = (
    config(AVG, head='aggregator = "lattice"\n', more='weighting = "records"')
    + """
[aggregation]
count_cap = 40
attempts = 20"""
)
SELECT = config(AVG, head='aggregator = "select"\n', more='weighting = "primary_silo"')
ROUNDS = 12
LONG = MASKED.replace("rounds = 3", f"rounds = {ROUNDS}")
RUNS = {
    "plain": PLAIN,
    "masked": MASKED,
    "lattice": LATTICE,
    "select": SELECT,
    "sampled": config(AVG, more="user_sampling = 0.5"),
    "rpdp": config(RPDP, data='allocation = "own"'),
    "ddp masked": config(DDP, head='aggregator = "masked"\n', data='allocation = "own"'),
}


def simulate(folder: Path, text: str) -> Path:
    """The same run in one process; return its directory."""
    path = folder / "simulated.toml"
    path.write_text(text)
    settings = load_config(path)
    federation = settings.load_federation()
    train(
        federation,
        settings.build_task(federation),
        settings.method,
        out=folder / "simulated",
        # As `silodp deploy init` sets it where the configuration says nothing.
        **{**settings.settings(), "isolate_units": supports(type(settings.method), "can_isolate_units")},
    )
    return folder / "simulated"


def assert_same_run(processes: Processes, simulated: Path) -> None:
    """The same model, bit for bit, and the same ε against every adversary."""
    ours, theirs = (load_file(run / "model.safetensors") for run in (processes.run, simulated))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    spent = {g["adversary"]: g["epsilon"] for g in processes.guarantees()}
    expected = json.loads((simulated / "guarantee.json").read_text())["guarantees"]
    assert spent == {g["adversary"]: g["epsilon"] for g in expected}


def wait_for(processes: Processes, happened: Callable[[], bool], seconds: float = 90) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if happened():
            return
        time.sleep(0.02)
    raise AssertionError(processes.log("server"))


def wait_for_round(processes: Processes, round_: int) -> None:
    """Wait until the server has done a number of rounds."""
    path = processes.run / "metrics.jsonl"
    wait_for(processes, lambda: path.exists() and len(path.read_text().splitlines()) > round_)


def count_charges(processes: Processes, silo: str) -> int:
    """Number of releases in the ledgers of a silo that was stopped."""
    found = 0
    for path in (processes.home(silo) / "ledgers").iterdir():
        with reopen_ledger(path) as ledger:
            found += len(ledger.history)
    return found


def check_the_end(processes: Processes, simulated: Path, most: int = 1) -> None:
    """Wait for the end, and check model, ε and that silos were charged for all rounds, and for few more."""
    assert processes.wait_for_server(200) == 0, processes.log("server")
    assert_same_run(processes, simulated)
    for silo in processes.names:
        processes.kill(silo)
        assert ROUNDS <= count_charges(processes, silo) <= ROUNDS + most
