"""The steps of docs/guides/next-run.md with real processes: a second run, renewed certificates, changed parties.

A silo has one folder for life. If a second run, a new key or a renewal led to another folder, its ledgers would begin
at zero, and what the first run has spent on the same persons would be counted nowhere.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from silodp.accounting.accountant import choose_accountant, compute_epsilon
from silodp.accounting.ledger import reopen_ledger
from silodp_deploy.certificates import read_certificates
from silodp_deploy.consortium import Consortium
from silodp_deploy.policy import Policy
from silodp_deploy.setup import find_free_port
from support.commands import Silodp, assert_sentence
from support.consortium import Processes, fork_party, start_consortium
from support.deployed import LONG, wait_for, wait_for_round

CONFIG = """
name = "clinics"
rounds = 2
[data]
source = "tables"
files = {{ {files} }}
[data.schema]
user = "patient"
label = "ill"
classes = ["no", "yes"]
numeric = {{ age = [0.0, 100.0] }}
users = "persons.txt"
[method]
name = "uldp-avg"
noise_multiplier = {noise}
clip = 0.5
[method.local]
learning_rate = 0.3
"""
PARTIES = ("server", "north", "south", "east")


@dataclass
class Consortia:
    """The consortia of a coordinator, one after the other, whose parties have one folder each.

    Attributes:
        folder: of all parties and their tables.
        silodp: runs a command in this process.
    """

    folder: Path
    silodp: Silodp

    def home(self, name: str) -> Path:
        return self.folder / name

    def draft(self, out: str, silos: tuple[str, ...], noise: float, after: str | None = None) -> list[str]:
        """Write a public folder; return the parties that are asked for keys."""
        files = ", ".join(f'{name} = "{name}.csv"' for name in silos)
        (self.folder / "config.toml").write_text(CONFIG.format(files=files, noise=noise))
        more = () if after is None else ("--after", self.folder / after)
        made = self.silodp(
            "deploy", "init", self.folder / "config.toml", "--out", self.folder / out, *more, "--json"
        )
        assert made.status == 0, made.err
        return list(made.json["keys"])

    def make_keys(self, out: str, name: str, *options: str) -> None:
        """Make the keys of a party in its folder, and send the request."""
        made = self.silodp("deploy", "keys", name, "--out", self.home(name), "--json", *options)
        assert made.status == 0, made.err
        shutil.copy(made.json["request"], self.folder / out / "requests")

    def seal(self, out: str, *options: str) -> Consortium:
        seal = ("deploy", "seal", self.folder / out, "--host", "127.0.0.1", "--port", find_free_port())
        sealed = self.silodp(*seal, "--json", *options)
        assert sealed.status == 0, sealed.err
        assert set(sealed.json["valid_until"]) == {"authority", "server", *self.silos(out)}
        return Consortium.load(self.folder / out / "public")

    def silos(self, out: str) -> tuple[str, ...]:
        return Consortium.load(self.folder / out / "public").data.silos

    def accept(self, out: str, name: str, *options: object):
        code = Consortium.load(self.folder / out / "public").code
        public, table = self.folder / out / "public", self.folder / f"{name}.csv"
        accept = ("deploy", "accept", public, self.home(name), "--data", table, "--code", code, "--json")
        return self.silodp(*accept, *options)

    def run(self, out: str) -> None:
        """Start all parties as processes, and wait until the run is over."""
        public, names = self.folder / out / "public", self.silos(out)
        code = Consortium.load(public).code
        accepted = self.silodp("deploy", "accept", public, self.home("server"), "--code", code, "--json")
        assert accepted.status == 0, accepted.err
        processes = Processes(self.folder)
        try:
            for name in (*names, "server"):
                processes.running[name] = fork_party(public, self.home(name), name)
            assert processes.wait_for_server() == 0, (self.home("server") / "log.txt").read_text()
            for name in names:
                assert processes.running[name].wait(60) == 0, (self.home(name) / "log.txt").read_text()
        finally:
            processes.kill_all()

    def guarantee(self, directory: Path | None = None) -> dict[str, object]:
        path = (directory or self.home("server") / "run") / "guarantee.json"
        found: dict[str, object] = json.loads(path.read_text())
        return found

    def spent(self, name: str) -> dict[str, object]:
        shown = self.silodp("audit-log", self.home(name), "--json")
        assert shown.status == 0, shown.err
        found: dict[str, object] = shown.json["spent"]
        return found


@pytest.fixture
def consortia(silodp: Silodp, tmp_path: Path) -> Consortia:
    """Three silos, two of which have accepted the first consortium, with a limit for several runs."""
    (tmp_path / "persons.txt").write_text("".join(f"p{i:02}\n" for i in range(12)))
    for name, persons in (("north", range(8)), ("south", range(4, 12)), ("east", range(2, 10))):
        rows = [f"p{i:02},{30 + 5 * i},{'yes' if i % 3 else 'no'}" for i in persons for _ in range(2)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["patient,age,ill", *rows]) + "\n")
    made = Consortia(tmp_path, silodp)
    assert made.draft("first", ("north", "south"), noise=5.0) == ["server", "north", "south"]
    for name in ("server", "north", "south"):
        made.make_keys("first", name)
    made.seal("first")
    for name in ("north", "south"):
        accepted = made.accept("first", name, "--lifetime-epsilon", 3.0)
        assert accepted.status == 0, accepted.err
        assert accepted.json["exceeded_limits"] == []
    return made


def read_log(home: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (home / "log.txt").read_text().splitlines()]


def compose_ledgers(home: Path) -> float:
    """ε of all ledgers of a silo against whoever sees the models, added up here from their events."""
    ledgers = [reopen_ledger(path) for path in sorted((home / "ledgers").glob("*.jsonl"))]
    counts = sum(
        (ledger.counts("released") for ledger in ledgers), start=type(ledgers[0].counts("released"))()
    )
    for ledger in ledgers:
        ledger.close()
    return compute_epsilon(counts.items(), 1e-5, choose_accountant(counts))


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_second_run_in_the_same_folders_adds_up(consortia: Consortia) -> None:
    """The keys stay, every run has a folder at the server, and every silo counts both."""
    consortia.run("first")
    rounds = [line for line in read_log(consortia.home("north")) if "epsilon" in line]
    assert [line["round"] for line in rounds] == [
        1,
        2,
    ]  # a silo's operator sees every round and what it has spent
    assert rounds[-1]["epsilon"]["released"] == pytest.approx(consortia.spent("north")["epsilon"]["released"])
    status = json.loads((consortia.home("north") / "status.json").read_text())
    assert (status["round"], status["rounds"], status["error"]) == (2, 2, None)
    assert status["epsilon"] == rounds[-1]["epsilon"]
    assert list(status["seconds_since_seen"]) == ["server"]
    first = (consortia.home("server") / "run").resolve()
    before, keys = consortia.guarantee(), (consortia.home("north") / "identity.key").read_bytes()
    once = consortia.spent("north")["epsilon"]["released"]

    assert consortia.draft("second", ("north", "south"), noise=4.0, after="first") == []
    assert (
        consortia.seal("second").sealed.silos
        == Consortium.load(consortia.folder / "first" / "public").sealed.silos
    )
    for name in ("north", "south"):
        assert consortia.accept("second", name).json["exceeded_limits"] == []
    consortia.run("second")
    second = (consortia.home("server") / "run").resolve()
    assert second != first
    assert second.parent == first.parent == consortia.home("server") / "runs"
    assert consortia.guarantee(first) == before
    assert consortia.guarantee()["run"] != before["run"]
    assert consortia.silodp("report", first).status == consortia.silodp("report", second).status == 0
    assert (consortia.home("north") / "identity.key").read_bytes() == keys
    spent = consortia.spent("north")
    assert spent["runs"] == 2
    assert spent["epsilon"]["released"] == pytest.approx(compose_ledgers(consortia.home("north")), rel=1e-9)
    alone = [one["epsilon"] for one in consortia.guarantee()["guarantees"] if one["adversary"] == "released"]
    assert spent["epsilon"]["released"] > max(once, *alone) * 1.1

    # A third one fits alone (ε = 2.29), but not after the others: its operator learns it before it costs anything.
    assert consortia.draft("third", ("north", "south"), noise=2.5, after="second") == []
    consortia.seal("third")
    third = consortia.accept("third", "north")
    assert third.json["exceeded_limits"] == ["released", "server"]
    assert "gate.budget" in third.err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_was_started_again_shows_what_was_released(tmp_path: Path) -> None:
    """While it waits for a silo, its status and its metrics would else say that nothing was spent."""
    with start_consortium(tmp_path, LONG) as processes:
        processes.start_all()
        wait_for_round(processes, 2)
        processes.kill("silo-2")
        processes.kill("server")
        port, path = find_free_port(), processes.home("server") / "status.json"
        processes.start("server", "--monitor", f"127.0.0.1:{port}")

        def read_metrics() -> str:
            with suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
            return ""

        wait_for(processes, lambda: re.search(r"silodp_rounds_done [1-9]", read_metrics()) is not None)
        status = json.loads(path.read_text())
        assert status["error"] is None
        copy = Path(shutil.copy(processes.run / "checkpoint" / "ledger.jsonl", tmp_path))
        with reopen_ledger(copy) as ledger:
            assert status["round"] == ledger.rounds >= 2
            assert status["epsilon"]["released"] == ledger.epsilon("released") > 0
        found = re.search(r'silodp_epsilon\{adversary="released"\} (\S+)', read_metrics())
        assert found is not None
        assert 0 <= float(found[1]) - status["epsilon"]["released"] < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_new_keys_keep_the_ledgers(consortia: Consortia) -> None:
    """A new key changes the digest alone: what was spent stays counted in the same folder."""
    consortia.run("first")
    once = consortia.spent("north")["epsilon"]["released"]
    before = Consortium.load(consortia.folder / "first" / "public")
    consortia.make_keys("first", "north", "--again")  # its old key was lost
    sealed = consortia.seal("first", "--again")
    assert sealed.digest != before.digest
    assert set(read_certificates(sealed.folder, sealed.sealed)) == {"authority", "server", "north", "south"}
    assert_sentence(consortia.accept("first", "north", "--lifetime-epsilon", 9), code="argument.conflict")
    for name in ("north", "south"):
        accepted = consortia.accept("first", name)
        assert accepted.status == 0, accepted.err
        assert len(Policy.load(consortia.home(name) / "policy.toml").accepted) == 2
    consortia.run("first")
    assert len(list((consortia.home("server") / "runs").iterdir())) == 2
    assert consortia.spent("north")["runs"] == 2
    assert consortia.spent("north")["epsilon"]["released"] > once * 1.1
    # The run under the first digest is not begun again, whoever starts its server.
    assert consortia.spent("south")["runs"] == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_party_comes_and_another_one_goes(consortia: Consortia) -> None:
    """Only the new party makes keys; the one that left has no key in the roster, and keeps its ledgers."""
    consortia.run("first")
    assert consortia.draft("second", ("north", "east"), noise=5.0, after="first") == ["east"]
    assert {path.name for path in (consortia.folder / "second" / "requests").iterdir()} == {
        "server.request.json",
        "north.request.json",
    }
    consortia.make_keys("second", "east")
    consortia.seal("second")
    for name in ("north", "east"):
        accepted = consortia.accept("second", name, *(() if name == "north" else ("--lifetime-epsilon", 3.0)))
        assert accepted.status == 0, accepted.err
    assert_sentence(consortia.accept("second", "south"), code="deploy.key")
    south = consortia.spent("south")
    consortia.run("second")
    assert [consortia.spent(name)["runs"] for name in ("north", "east", "south")] == [2, 1, 1]
    assert consortia.spent("south") == south
    answers = json.loads((consortia.home("server") / "status.json").read_text())["answers"]
    assert set(answers) == {"north", "south", "east"}  # a later run still notices that south was set back


def test_an_earlier_consortium_without_requests_is_refused(consortia: Consortia, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    init = ("deploy", "init", tmp_path / "config.toml", "--out", tmp_path / "next")
    assert_sentence(consortia.silodp(*init, "--after", tmp_path / "nothing"), code="deploy.request")
    assert not (tmp_path / "next").exists()
    assert_sentence(
        consortia.silodp(*init, "--after", tmp_path / "first", "--local"), code="argument.conflict"
    )
