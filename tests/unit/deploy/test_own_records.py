"""A silo alone knows its records: it checks, before it can be asked anything, that the method may have them.

Without the check a deployed `rpdp-minimum` with budget = 2 charged 1.75 to records that had asked for .05: the server's
public facts have no budgets of records, so nothing that the server checks could refuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from silodp.config.resolve import load_config
from silodp.data.silo_data import SiloData
from silodp_deploy.consortium import Consortium
from silodp_deploy.policy import Policy
from silodp_deploy.records import save_records
from silodp_deploy.setup import draft_public
from silodp_deploy.silo import open_silo
from support.commands import Silodp
from support.consortium import Processes, agree_on_tables, make_parties
from support.refusals import refused

RECORDS = 12
NAMES = ("north", "south")
CONFIG = """
name = "budgets"
rounds = 2
delta = 1e-3
[data]
source = "tables"
files = {{ north = "north.csv", south = "south.csv" }}
[data.schema]
user = "id"
label = "ill"
classes = ["no", "yes"]
numeric = {{ age = [0.0, 100.0] }}
users = "users.txt"
{budget}
[method]
noise_multiplier = 5.0
clip = 1.0
expected_batch_size = 5.0
local_learning_rate = 0.1
{method}
"""
STEPS = "local_steps = 2\n"
MINIMUM = f'name = "rpdp-minimum"\nbudget = 2.0\n{STEPS}'
RPDP = f'name = "rpdp"\nlargest_budget = 2.0\n{STEPS}'
DDP = 'name = "ddp"\nlocal_steps = [1, 2]\nrecord_sampling = 0.1\n'
DRAWN = '[budgets]\ndistribution = "three-levels"\nlevels = [0.5, 1.0, 2.0]\nshares = [0.3, 0.3, 0.4]\n'

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write two tables, in which the first records of the north ask for `least`, and the configuration of a run."""

    def write(method: str, budget: str = 'budget = "eps"', least: float = 2.0) -> Path:
        for name in NAMES:
            asks = [least if name == "north" and number < 3 else 2.0 for number in range(RECORDS)]
            rows = [
                f"{name}{number:02},{'yes' * (number % 2) or 'no'},{asks[number]},{30 + number}"
                for number in range(RECORDS)
            ]
            (tmp_path / f"{name}.csv").write_text("\n".join(["id,ill,eps,age", *rows]))
        keys = [f"{name}{number:02}" for name in NAMES for number in range(RECORDS)]
        (tmp_path / "users.txt").write_text("\n".join(keys))
        (tmp_path / "config.toml").write_text(CONFIG.format(budget=budget, method=method))
        return tmp_path / "config.toml"

    return write


def agree(config: Path) -> Processes:
    folder = config.parent
    return agree_on_tables(config, folder / "parties", {name: folder / f"{name}.csv" for name in NAMES})


def opens(parties: Processes, name: str) -> None:
    with open_silo(parties.home(name), Consortium.load(parties.public)) as service:
        assert service.name == name


def test_a_silo_refuses_records_that_ask_for_less_than_everybody_is_charged(write: Write) -> None:
    parties = agree(write(MINIMUM, least=0.05))
    with refused("data.budgets") as caught:
        opens(parties, "north")
    assert f"3 of {RECORDS} records" in str(caught.value)  # of this silo alone
    assert not (parties.home("north") / "store").exists()
    assert not (parties.home("north") / "audit.jsonl").exists()
    opens(parties, "south")


def test_who_accepts_such_a_table_is_told_so(write: Write, silodp: Silodp) -> None:
    parties = agree(write(MINIMUM, least=0.05))
    code = Consortium.load(parties.public).code
    for name, status in (("north", 2), ("south", 0)):
        policy = parties.home(name) / "policy.toml"
        table = Policy.load(policy).data
        policy.unlink()
        told = silodp(
            "deploy", "accept", parties.public, parties.home(name), "--data", table, "--code", code, "--json"
        )
        assert told.status == status
        assert policy.exists() == (status == 0)
        assert status == 0 or told.json["error"]["code"] == "data.budgets"
    shown = silodp("deploy", "accept", parties.public, parties.home("south"), "--data", table, "--code", code)
    assert "assumes     a record lies in one silo only" in shown.err


@pytest.mark.parametrize("method", [MINIMUM, RPDP, DDP])
def test_a_silo_with_fewer_records_than_a_batch_is_refused(method: str, write: Write) -> None:
    parties = agree(write(method, "" if method == DDP else 'budget = "eps"'))
    opens(parties, "north")
    table = parties.folder.parent / "north.csv"
    table.write_text("\n".join(table.read_text().splitlines()[: 1 + 4]))
    with refused("data.too_few_records"):
        opens(parties, "north")
    opens(parties, "south")


def test_arrays_need_budgets_unless_they_are_empty(write: Write) -> None:
    parties = agree(write(RPDP))
    home = parties.home("north")
    policy = Policy.load(home / "policy.toml").model_copy(update={"data": "records.npz"})
    (home / "policy.toml").write_text(policy.to_toml())
    x, y, user = np.zeros((RECORDS, 1), np.float32), np.arange(RECORDS) % 2, np.arange(RECORDS)
    save_records(home / "records.npz", SiloData("north", x, y, user))
    with refused("data.budgets"):
        opens(parties, "north")
    save_records(home / "records.npz", SiloData("north", x, y, user, np.full(RECORDS, 0.5)))
    opens(parties, "north")
    save_records(home / "records.npz", SiloData("north", x[:0], y[:0], user[:0], np.empty(0)))
    opens(parties, "north")


@pytest.mark.parametrize("column", ["", 'budget = "eps"'])
def test_drawn_budgets_of_records_in_tables_are_refused_before_anyone_accepts(
    column: str, write: Write, tmp_path: Path
) -> None:
    """They were sealed and accepted, and the first round failed; with a column they were ignored."""
    config = load_config(write(RPDP + DRAWN, column))
    with refused("data.budgets"):
        draft_public(config, tmp_path / "public", config.read_public_data())
    assert not (tmp_path / "public").exists()


def test_a_test_on_one_machine_may_draw_budgets_of_records(write: Write) -> None:
    config = write(RPDP + DRAWN, "")
    parties = Processes(make_parties(config.parent, config.read_text()))
    opens(parties, "north")
