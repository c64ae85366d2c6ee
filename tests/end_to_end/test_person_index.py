"""Persons who are recognized by an identity profile: a deployment gives the model of the simulation, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from silodp.data.identity import IdentityProfile
from silodp_deploy.consortium import Consortium
from support.commands import Silodp
from support.consortium import Processes, agree_on_tables, start_party
from support.refusals import refused

CONFIG = """
name = "clinics"
rounds = 3
aggregator = "{aggregator}"
seed = 5
[data]
source = "tables"
files = {{ north = "north.csv", south = "south.csv", west = "west.csv" }}
[data.schema]
user = "patient"
label = "ill"
classes = ["no", "yes"]
numeric = {{ age = [0.0, 100.0] }}
identity = "profile.toml"
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
weighting = "{weighting}"
user_sampling = {sampling}
[method.local]
learning_rate = 0.3
"""
PERSONS = {"north": range(14), "south": range(8, 22), "west": range(4, 18)}
POPULATION = 40


def write_study(folder: Path, **settings: object) -> Path:
    """The configuration, the profile, and three tables in which persons are written in several ways."""
    folder.mkdir()
    profile = IdentityProfile(
        study="s", kind="digits", width=6, layouts=("###-###",), population=POPULATION, missing="drop"
    )
    (folder / "profile.toml").write_text(profile.to_toml())
    for name, persons in PERSONS.items():
        write = {
            "north": lambda text: text,
            "south": lambda text: f"{text[:3]}-{text[3:]}",
            "west": lambda t: f" {t}",
        }
        rows = [
            f"{write[name](f'{100003 + 17 * i}')},{30 + i},{'yes' if i % 3 else 'no'}"
            for i in persons
            for _ in range(1 + i % 2)
        ]
        (folder / f"{name}.csv").write_text("\n".join(["patient,age,ill", *rows]) + "\n")
    (folder / "study.toml").write_text(CONFIG.format(**settings))
    return folder / "study.toml"


def write_index(folder: Path, name: str) -> str:
    """The file of a trust center: the numbers that the simulation gives, which follow the order of identifiers."""
    everyone = sorted({i for persons in PERSONS.values() for i in persons})
    rows = [f"{100003 + 17 * i},{everyone.index(i)}" for i in PERSONS[name]]
    (folder / f"{name}-index.csv").write_text("\n".join(["id,position", *rows]) + "\n")
    return str(folder / f"{name}-index.csv")


def agree(study: Path, folder: Path, *, index: bool) -> Processes:
    folder.mkdir()
    numbers = {name: write_index(folder, name) for name in PERSONS} if index else {}
    return agree_on_tables(study, folder, {name: study.parent / f"{name}.csv" for name in PERSONS}, numbers)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("aggregator", "weighting", "sampling"),
    [("plain", "uniform", 0.5), ("masked", "uniform", 0.5), ("lattice", "records", 1.0)],
)
def test_the_model_is_that_of_the_simulation(
    aggregator: str, weighting: str, sampling: float, silodp: Silodp, tmp_path: Path
) -> None:
    study = write_study(tmp_path / "study", aggregator=aggregator, weighting=weighting, sampling=sampling)
    done = silodp("run", study, "--set", "isolate_units=true", "--out", tmp_path / "simulated")
    assert done.status == 0, done.err
    processes = agree(study, tmp_path / "parties", index=weighting == "records")
    assert not any(b"100003" in path.read_bytes() for path in processes.public.rglob("*.*"))
    try:
        for name in (*PERSONS, "server"):
            processes.running[name] = start_party(processes.public, processes.home(name), name)
        assert processes.wait_for_server() == 0, processes.log("server")
    finally:
        processes.kill_all()
    ours = (processes.run / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "simulated" / "model.safetensors").read_bytes()
    simulated = silodp("report", tmp_path / "simulated")
    assert simulated.status == 0, simulated.err
    assert silodp("report", processes.run).status == 0
    # The server has no table: the schema in the public folder is enough to use the model.
    (tmp_path / "new.csv").write_text("age\n31\n47.5\n")
    for run, out in ((processes.run, "server.csv"), (tmp_path / "simulated", "simulated.csv")):
        done = silodp("predict", run, tmp_path / "new.csv", "--out", tmp_path / out)
        assert done.status == 0, done.err
    found = (tmp_path / "server.csv").read_text()
    assert found == (tmp_path / "simulated.csv").read_text()
    assert found.startswith("probability_no,probability_yes\n")
    card = (processes.run / "MODEL_CARD.md").read_text()
    assert "Unknown: the model was not measured on held-out records." in card
    assert "| `age` | number, 0 to 100 |" in card


def test_weights_by_records_need_the_file_of_a_trust_center(tmp_path: Path) -> None:
    from silodp_deploy.records import load_records

    study = write_study(tmp_path / "study", aggregator="lattice", weighting="records", sampling=1.0)
    processes = agree(study, tmp_path / "parties", index=True)
    consortium = Consortium.load(processes.public)
    table = study.parent / "north.csv"
    with refused("deploy.no_index"):
        load_records(table, "north", consortium)
    path = tmp_path / "parties" / "north-index.csv"
    data = load_records(table, "north", consortium, path)
    assert np.unique(data.user).tolist() == list(range(14))
    lines = path.read_text().splitlines()
    for wrong in (
        [*lines, lines[1]],  # twice
        [*lines, lines[1].split(",")[0] + ",38"],  # a person with two positions
        [*lines[:-1], lines[-1].split(",")[0] + ",40"],  # no number below U
        [*lines[:-1], lines[-1].split(",")[0] + ",-1"],
        [*lines[:-1], lines[-1].split(",")[0] + ",0"],  # the position of another person
        [*lines[:-1], ",39"],
    ):
        path.write_text("\n".join(wrong) + "\n")
        with refused("identity.index"):
            load_records(table, "north", consortium, path)
    path.write_text("\n".join(lines[:-1]) + "\n")  # a person is missing
    with refused("data.value"):
        load_records(table, "north", consortium, path)
