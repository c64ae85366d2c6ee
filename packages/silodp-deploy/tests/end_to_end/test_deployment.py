"""A server and silos in processes of their own over TLS: the model of the simulation, and what goes wrong."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from silodp.accounting.ledger import reopen_ledger
from silodp.errors import SilodpError
from silodp.report.page import write_report
from silodp_deploy.cli.parties import FILTERED_RUNS
from silodp_deploy.consortium import Consortium
from silodp_deploy.policy import Policy
from silodp_deploy.setup import find_free_port
from silodp_deploy.silo import open_silo
from support.commands import Silodp, assert_sentence
from support.consortium import Processes, start_consortium, start_party
from support.deployed import (
    LONG,
    MASKED,
    PLAIN,
    RUNS,
    assert_same_run,
    simulate,
    wait_for,
    wait_for_round,
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "masked" else pytest.mark.slow) for name in RUNS]
)
def test_parties_over_tls_train_the_model_of_the_simulation(name: str, tmp_path: Path) -> None:
    simulated = simulate(tmp_path, RUNS[name])
    # Of the six runs, only "plain" starts each party as a command of its own: to import everything five times takes
    # longer than the run.
    with start_consortium(tmp_path, RUNS[name], forked=name != "plain") as processes:
        processes.start_all()
        assert processes.wait_for_server() == 0, processes.log("server")
        assert_same_run(processes, simulated)
        summary = json.loads((processes.run / "guarantee.json").read_text())
        assert summary["simulation"] is False
        assert "simulation in one process" not in write_report(processes.run).read_text()
        for silo in processes.names:
            audit = processes.audit(silo)
            assert [one["round"] for one in audit if one["kind"] == "update"] == [0, 1, 2]
            assert {one["run"] for one in audit} == {summary["run"]}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_server_needs_no_data(tmp_path: Path) -> None:
    """It runs where no file of a silo exists, and opens none: all of them are moved away."""
    with start_consortium(tmp_path, PLAIN, forked=False) as processes:
        elsewhere = tmp_path / "elsewhere"
        shutil.copytree(processes.public, elsewhere / "public")
        shutil.copytree(processes.home("server"), elsewhere / "server")
        for silo in processes.names:
            processes.start(silo)
        alone = Processes(elsewhere)
        alone.start("server", SILODP_DATA=str(tmp_path / "nothing"))
        try:
            assert alone.wait_for_server() == 0, alone.log("server")
        finally:
            alone.kill("server")


# --- faults ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["silo-2", "server"])
def test_whoever_is_killed_and_started_again_goes_on_with_the_run(victim: str, tmp_path: Path) -> None:
    simulated = simulate(tmp_path, LONG)
    with start_consortium(tmp_path, LONG) as processes:
        processes.start_all()
        for round_ in (2, 6):
            wait_for_round(processes, round_)
            processes.kill(victim)
            processes.start(victim)
        assert processes.wait_for_server() == 0, processes.log("server")
        assert_same_run(processes, simulated)
        for silo in processes.names:  # never less than the server's, and at most one release more
            (path,) = (processes.home(silo) / "ledgers").iterdir()
            processes.kill(silo)
            with reopen_ledger(path) as ledger:
                assert 12 <= len(ledger.history) <= 13


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_who_is_stopped_ends_in_order_and_a_silo_still_says_what_it_has_spent(tmp_path: Path) -> None:
    """As the first process of a container a party without a handler would be killed after a wait."""
    with start_consortium(tmp_path, LONG, forked=False) as processes:
        processes.start_all()
        wait_for_round(processes, 3)
        status = processes.home("silo-2") / "status.json"
        for name in ("server", "silo-2"):
            process = processes.running.pop(name)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert "stopped by SIGTERM; the next start goes on" in processes.log(name)
        before = json.loads(status.read_text())
        assert before["round"] >= 3
        processes.start("silo-2")  # without a server it answers nothing
        wait_for(processes, lambda: json.loads(status.read_text())["written"] > before["written"])
        after = json.loads(status.read_text())
        assert (after["round"], after["epsilon"]) == (before["round"], before["epsilon"])
        assert min(after["epsilon"].values()) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_others_go_on_without_a_silo_that_never_returns(tmp_path: Path) -> None:
    text = LONG + "\n[aggregation]\nmin_silos = 3"
    with start_consortium(tmp_path, text) as processes:
        for silo in processes.names:
            processes.start(silo)
        processes.start("server", "--patience", "4")
        wait_for_round(processes, 2)
        processes.kill("silo-4")
        assert processes.wait_for_server() == 0, processes.log("server")
        spec = Consortium.load(processes.public).spec
        with reopen_ledger(processes.run / "checkpoint" / "ledger.jsonl") as ledger:
            charged = [dict(entry.events) for entry in ledger.history]
        with_all, without = (spec.round_events(survivors) for survivors in (4, 3))
        before = charged.index(without)
        assert before >= 2
        assert charged == [with_all] * before + [without] * (12 - before)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_server_of_the_same_run_is_refused(tmp_path: Path) -> None:
    with start_consortium(tmp_path, LONG) as processes:
        first = processes.start("server")  # it waits for its silos
        wait_for(processes, lambda: "waiting for" in processes.log("server"))
        second = processes.start("server", "--listen", "127.0.0.1:0")
        assert second.wait(60) == 2
        assert "[run.in_use]" in processes.log("server")
        for silo in processes.names:
            processes.start(silo)
        assert first.wait(120) == 0, processes.log("server")


def test_a_silo_refuses_what_its_policy_does_not_allow(tmp_path: Path) -> None:
    with start_consortium(tmp_path, MASKED) as processes:
        consortium = Consortium.load(processes.public)
        policy = Policy.load(processes.home("silo-1") / "policy.toml")
        columns = consortium.list_columns("silo-1")
        policy.check(consortium.digest, consortium.spec, columns)
        for change, code in (
            ({"accepted": ["0" * 64]}, "policy.digest"),
            ({"methods": ["rpdp"]}, "policy.not_allowed"),
            ({"aggregators": ["lattice"]}, "policy.not_allowed"),
            ({"columns": ["age"]}, "policy.not_allowed"),
            ({"min_silos": 5}, "policy.not_allowed"),
            ({"allow_seed": False}, "policy.not_allowed"),
        ):
            with pytest.raises(SilodpError) as caught:
                policy.model_copy(update=change).check(consortium.digest, consortium.spec, columns)
            assert caught.value.code == code


@pytest.mark.timeout(300)
def test_a_silo_with_too_few_persons_sends_nothing_and_says_no_number(tmp_path: Path) -> None:
    with start_consortium(tmp_path, MASKED) as processes:
        home = processes.home("silo-1")
        policy = Policy.load(home / "policy.toml")
        persons = len(np.unique(np.load(home / "records.npz")["user"]))
        many = policy.model_copy(update={"min_persons": persons + 1})
        (home / "policy.toml").write_text(many.to_toml())
        for name in ("silo-2", "silo-3", "server"):
            processes.start(name)
        assert processes.start("silo-1").wait(60) == 2
        told = [json.loads(line) for line in processes.log("silo-1").splitlines()]
        (refusal,) = (one["message"] for one in told if one.get("code") == "policy.few_persons")
        assert not any(map(str.isdigit, refusal))
        assert not (home / "audit.jsonl").exists()  # nothing has left the silo
        said = "".join(processes.log(name) for name in ("silo-2", "silo-3", "server"))
        assert "few_persons" not in said
        assert "min_persons" not in said
        # With exactly as many persons it takes part.
        (home / "policy.toml").write_text(policy.model_copy(update={"min_persons": persons}).to_toml())
        for name in ("silo-1", *(set(processes.names) - set(processes.running))):
            processes.start(name)
        assert processes.wait_for_server() == 0, processes.log("server")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_silo_stops_at_the_epsilon_of_its_policy_over_all_runs(tmp_path: Path) -> None:
    """The server runs the same specification again: for the silo it is a second run on the same people."""
    with start_consortium(tmp_path, PLAIN) as processes:
        processes.start_all()
        assert processes.wait_for_server() == 0, processes.log("server")
        once = {g["adversary"]: g["epsilon"] for g in processes.guarantees()}
        shutil.rmtree(processes.run.resolve())
        for silo in processes.names:  # they have ended with the run
            assert processes.running[silo].wait(60) == 0
            processes.start(silo)
        assert processes.start("server").wait(120) == 2
        assert "gate.budget" in processes.log("server")
        home = processes.home("silo-1")
        assert "over all its runs" in processes.log("silo-1")
        processes.kill("silo-1")
        ledgers = [reopen_ledger(path) for path in (home / "ledgers").iterdir()]
        assert sum(len(ledger.history) for ledger in ledgers) == 3
        limit = Policy.load(home / "policy.toml").lifetime_epsilon["released"]
        assert once["released"] <= limit < 1.1 * once["released"]


def test_a_changed_public_folder_has_another_digest(tmp_path: Path) -> None:
    with start_consortium(tmp_path, MASKED) as processes:
        before = Consortium.load(processes.public)
        text = (processes.public / "config.toml").read_text()
        (processes.public / "config.toml").write_text(
            text.replace("noise_multiplier = 5.0", "noise_multiplier = 4.0")
        )
        after = Consortium.load(processes.public)
        assert after.digest != before.digest
        with pytest.raises(SilodpError) as caught:
            _ = after.spec
        assert caught.value.code == "deploy.spec"


# --- the steps of docs/deployment.md, one after the other ---------------------------------------------------------

TABLES = """
name = "clinics"
rounds = 2
aggregator = "masked"
[data]
source = "tables"
files = { north = "secret-north.csv", south = "secret-south.csv" }
[data.schema]
user = "patient"
label = "ill"
classes = ["no", "yes"]
numeric = { age = [0.0, 100.0] }
users = "persons.txt"
[task]
model = "net.py:Net"
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.5
[method.local]
learning_rate = 0.3
"""
NET = """
import os, torch
with open(os.environ["WHO_EXECUTED"], "a") as log:
    print(__file__, file=log)
def Net(features):
    return torch.nn.Sequential(torch.nn.Linear(features, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("index", ["users", "identity"])
def test_the_steps_of_the_page_set_up_a_consortium_that_trains(
    index: str, silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each party has a folder of its own; only what the page names is copied from one to another."""
    executed = tmp_path / "executed.txt"
    monkeypatch.setenv("WHO_EXECUTED", str(executed))
    places = {name: tmp_path / name for name in ("coordinator", "server", "north", "south")}
    for place in places.values():
        place.mkdir()
    coordinator = places["coordinator"]
    text = (
        TABLES if index == "users" else TABLES.replace('users = "persons.txt"', 'identity = "profile.toml"')
    )
    (coordinator / "clinics.toml").write_text(text)
    profile = ("identity", "new", "--study", "test", "--kind", "code", "--width", 3, "--population", 50)
    assert silodp(*profile, "--out", coordinator / "profile.toml").status == 0
    (coordinator / "net.py").write_text(NET)
    (coordinator / "persons.txt").write_text("".join(f"p{i:02}\n" for i in range(12)))
    for name, persons in (("north", range(8)), ("south", range(4, 12))):
        rows = [f"p{i:02},{30 + 5 * i},{'yes' if i % 3 else 'no'}" for i in persons for _ in range(2)]
        (places[name] / "table.csv").write_text("\n".join(["patient,age,ill", *rows]) + "\n")

    made = silodp("deploy", "init", coordinator / "clinics.toml", "--out", coordinator / "c", "--json")
    assert made.status == 0, made.err
    public = coordinator / "c" / "public"
    assert not any("secret" in path.read_text() for path in public.rglob("*.*"))
    for name in ("server", "north", "south"):
        done = silodp("deploy", "keys", name, "--out", places[name] / "home", "--json")
        assert done.status == 0, done.err
        shutil.copy(done.json["request"], coordinator / "c" / "requests")
        again = silodp("deploy", "keys", name, "--out", places[name] / "home", "--json")
        assert_sentence(again, code="deploy.key")

    (request := coordinator / "c" / "requests" / "south.request.json").rename(tmp_path / "later")
    seal = ("deploy", "seal", coordinator / "c", "--host", "127.0.0.1", "--port", find_free_port(), "--json")
    assert_sentence(silodp(*seal), code="deploy.request")
    (tmp_path / "later").rename(request)
    sealed = silodp(*seal)
    assert sealed.status == 0, sealed.err
    for name in ("server", "north", "south"):
        shutil.copytree(public, places[name] / "public")
    for name in ("north", "south"):
        accept = (
            "deploy",
            "accept",
            places[name] / "public",
            places[name] / "home",
            "--data",
            "../table.csv",
        )
        assert_sentence(silodp(*accept, "--code", "0000 0000", "--json"), code="deploy.digest")
        (places[name] / "wrong.csv").write_text("patient,ill\np01,yes\n")
        wrong = (*accept[:-1], "../wrong.csv", "--code", sealed.json["code"], "--json")
        assert_sentence(silodp(*wrong), code="data.column")  # before anything waits for this silo
        assert not (places[name] / "home" / "policy.toml").exists()
        told = silodp(*accept, "--code", sealed.json["code"])
        assert told.status == 0, told.err
        assert "Read 16 training records of 8 persons" in told.out
        for part in ("uldp-avg", "masked", "all records of one person", "age", "released", "net.py"):
            assert part in told.err
        assert "a person is a value of the column 'patient'" in told.err
        assert "a person is a value of the column 'patient'" in told.err
        assert sealed.json["code"] not in told.err  # it is to be heard, not read
    served = ("deploy", "accept", places["server"] / "public", places["server"] / "home")
    assert silodp(*served, "--code", sealed.json["code"], "--json").status == 0
    assert {str(coordinator / "net.py")} == set(
        executed.read_text().split()
    )  # before accept no silo runs the model
    changed = places["north"] / "changed"
    shutil.copytree(public, changed)
    with (changed / "net.py").open("a") as file:
        file.write("# another one\n")
    with pytest.raises(SilodpError) as caught, open_silo(places["north"] / "home", Consortium.load(changed)):
        pass
    assert caught.value.code == "policy.digest"
    assert {str(coordinator / "net.py")} == set(executed.read_text().split())
    processes = Processes(tmp_path)
    try:
        for name in ("north", "south", "server"):
            processes.running[name] = start_party(places[name] / "public", places[name] / "home", name)
        assert processes.wait_for_server() == 0, (places["server"] / "home" / "log.txt").read_text()
    finally:
        processes.kill_all()
    run = places["server"] / "home" / "run"
    guarantee = json.loads((run / "guarantee.json").read_text())
    assert guarantee["private"]
    assert guarantee["simulation"] is False
    assert silodp("report", run).status == 0
    left = silodp("audit-log", places["north"] / "home", "--json").json
    assert len(left["entries"]) > 2
    spent, held = left["spent"], {told["adversary"]: told for told in guarantee["guarantees"]}
    assert (spent["runs"], spent["unit"]) == (1, "user")
    for adversary, epsilon in spent["epsilon"].items():
        assert held[adversary]["epsilon"] <= epsilon * (1 + 1e-9) <= spent["limits"][adversary] * (1 + 2e-9)
    lines = silodp("audit-log", places["north"] / "home").out
    assert "spent in 1 run by the ledgers of this silo, at δ = 1e-05 for all records of one person" in lines
    assert FILTERED_RUNS in lines
    assert silodp("deploy", "status", places["server"] / "home", "--json").json["round"] == 2
