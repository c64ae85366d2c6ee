"""Faults of networks, disks and machines, on real processes; docs/deployment.md lists what was observed here.

Every run ends as the one that nothing happened to, or stops with a code, and no ledger has less than was released.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest

from silodp_deploy.certificates import VALID_DAYS, read_certificates
from silodp_deploy.consortium import Consortium
from silodp_deploy.policy import Policy
from silodp_deploy.setup import find_free_port
from support.consortium import COMMAND, Processes, start_consortium
from support.deployed import LONG, check_the_end, count_charges, simulate, wait_for, wait_for_round
from support.proxy import Proxy, open_relay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SOME = LONG + "\n[aggregation]\nmin_silos = 3"
"""Sums of three of the four silos will do, so that a silo may have missed rounds."""


def start_with(processes: Processes, silo: str, port: int) -> None:
    """Start all parties, one silo with another address of the server."""
    for name in processes.names:
        processes.start(name, *(("--url", f"https://127.0.0.1:{port}") if name == silo else ()))
    processes.start("server")


# --- the network ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut", "outage", "delay", "lost"])
def test_a_network_that_fails_and_comes_back_changes_nothing(fault: str, tmp_path: Path) -> None:
    simulated = simulate(tmp_path, LONG)
    with start_consortium(tmp_path, LONG) as processes:
        proxy = Proxy(Consortium.load(processes.public).sealed.port)
        start_with(processes, "silo-2", proxy.port)
        wait_for_round(processes, 2)
        match fault:
            case "cut":  # in the middle of a body, three times
                for count in (1, 2, 3):
                    proxy.cut_after(700 * count)
                    wait_for(processes, lambda count=count: proxy.cuts >= count)
            case "outage":  # the line is down for a while; nobody closes a connection
                proxy.hold()
                time.sleep(5)
                proxy.restore()
                wait_for_round(processes, 5)
                proxy.refuse()
                wait_for(processes, lambda: "cannot be reached" in processes.log("silo-2"))
                proxy.restore()
            case "delay":
                proxy.delay(0.1)
                wait_for_round(processes, 6)
            case "lost":  # connections of now never say anything again
                proxy.lose()
                time.sleep(2)
                proxy.restore()
        check_the_end(processes, simulated)
        if fault in ("cut", "lost"):
            assert "cannot be reached" in processes.log("silo-2")
        proxy.close()


def test_a_firewall_that_forgets_idle_connections_costs_a_bounded_delay_once(tmp_path: Path) -> None:
    """It says nothing to either end. The silo behind it waits while another one computes, three times."""
    simulated = simulate(tmp_path, LONG)
    with start_consortium(tmp_path, LONG) as processes:
        proxy = Proxy(Consortium.load(processes.public).sealed.port)
        proxy.forget_after(3.0)
        start_with(processes, "silo-2", proxy.port)
        for round_ in (2, 4, 6):
            wait_for_round(processes, round_)
            processes.running["silo-3"].send_signal(signal.SIGSTOP)
            time.sleep(8)
            processes.running["silo-3"].send_signal(signal.SIGCONT)
        check_the_end(processes, simulated)
        # Its first two waits were too long for the firewall: 20 seconds, and 5.
        assert 1 <= proxy.forgotten <= 4
        assert processes.log("silo-2").count("timed out") <= 2
        proxy.close()


def test_requests_that_come_again_or_in_another_order_change_nothing(tmp_path: Path) -> None:
    """By whoever ends TLS between a silo and the server; an old answer in place of a new one stops the server."""
    simulated = simulate(tmp_path, LONG)
    with (
        start_consortium(tmp_path, LONG) as processes,
        open_relay(processes, "silo-2", Random(3)) as (relay, port),
    ):
        start_with(processes, "silo-2", port)
        wait_for_round(processes, 5)
        relay.plays_back = True
        assert processes.wait_for_server() == 2
        assert "[message.signature]" in processes.log("server")
        assert relay.played == 1
        relay.plays_back = False
        processes.start("server")
        check_the_end(processes, simulated)
        assert relay.repeated >= 3
        assert relay.doubled >= 3
        assert "[gate.past]" in processes.log("silo-2")


@pytest.mark.parametrize(
    ("aggregator", "code"), [("plain", "run.no_answer"), ("masked", "run.too_few_silos")]
)
def test_the_server_stops_without_a_silo_that_it_needs_and_goes_on_with_it(
    aggregator: str, code: str, tmp_path: Path
) -> None:
    text = LONG.replace('aggregator = "masked"', f'aggregator = "{aggregator}"')
    simulated = simulate(tmp_path, text)
    with start_consortium(tmp_path, text) as processes:
        for silo in processes.names:
            processes.start(silo)
        processes.start("server", "--patience", "4")
        wait_for_round(processes, 3)
        processes.kill("silo-4")
        assert processes.wait_for_server() == 2
        assert f"[{code}]" in processes.log("server")
        # While it waits again, whoever looks at it still sees the error, and that no round was done since.
        path = processes.home("server") / "status.json"
        ended = json.loads(path.read_text())
        processes.start("server")
        wait_for(processes, lambda: json.loads(path.read_text())["running"])
        again = json.loads(path.read_text())
        assert f"[{code}]" in again["error"]
        assert again["seconds_since_round"] >= ended["seconds_since_round"] >= 4
        processes.start("silo-4")
        check_the_end(processes, simulated)
        assert json.loads(path.read_text())["error"] is None


# --- machines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restored", ["all", "store", "ledgers"])
def test_a_silo_that_was_restored_from_a_backup_is_noticed(restored: str, tmp_path: Path) -> None:
    """Other silos are enough for a sum, so the silo cannot know whether it has only missed some rounds.

    Its server knows, where the whole folder is old. With an old store or old ledgers alone the silo does not start.
    """
    with start_consortium(tmp_path, SOME) as processes:
        for name in processes.names:
            path = processes.home(name) / "policy.toml"  # releases that are repeated without a silo cost more
            policy = Policy.load(path)
            more = {adversary: 3 * epsilon for adversary, epsilon in policy.lifetime_epsilon.items()}
            path.write_text(policy.model_copy(update={"lifetime_epsilon": more}).to_toml())
            processes.start(name)
        processes.start("server", "--patience", "5")
        wait_for_round(processes, 2)
        processes.kill("silo-2")
        home, backup = processes.home("silo-2"), tmp_path / "backup"
        shutil.copytree(home, backup)
        processes.start("silo-2")
        wait_for(processes, lambda: len(processes.audit("silo-2")) > len(backup_audit(backup)) + 2)
        processes.kill("silo-2")
        for part in (home, backup):
            (part / "log.txt").unlink()
        if restored == "all":
            shutil.rmtree(home)
            shutil.copytree(backup, home)
        else:
            shutil.rmtree(home / restored)
            shutil.copytree(backup / restored, home / restored)
        before = count_charges(processes, "silo-2")
        processes.start("silo-2")
        code = "deploy.rollback_detected" if restored == "all" else "gate.rollback_detected"
        wait_for(processes, lambda: f"[{code}]" in processes.log("silo-2"))
        # A silo that is not connected is missing: the others go on.
        assert processes.wait_for_server() == 0, processes.log("server")
        processes.kill("silo-2")
        assert (f"[{code}]" in processes.log("server")) == (restored == "all")
        assert count_charges(processes, "silo-2") == before
        answers: dict[tuple[object, ...], set[object]] = {}
        for line in processes.audit("silo-2"):
            key = tuple(line[part] for part in ("run", "kind", "round", "attempt"))
            answers.setdefault(key, set()).add(line["sha256"])
        assert {len(digests) for digests in answers.values()} == {
            1
        }  # with the newest ledger no round comes again


def backup_audit(folder: Path) -> list[str]:
    return (folder / "audit.jsonl").read_text().splitlines()


def test_two_servers_with_one_identity_and_a_server_that_was_restored(tmp_path: Path) -> None:
    """The copy of an earlier moment asks silos for a round that they have answered: they refuse."""
    simulated = simulate(tmp_path, LONG)
    with start_consortium(tmp_path, LONG) as processes:
        processes.start_all()
        wait_for_round(processes, 3)
        processes.kill("server")
        copy = Processes(tmp_path / "copy", forked=True)
        shutil.copytree(processes.public, copy.public)
        shutil.copytree(processes.home("server"), copy.home("server"), symlinks=True)  # as cp -a
        (copy.home("server") / "log.txt").unlink()
        processes.start("server")
        wait_for_round(processes, 6)
        port = find_free_port()
        processes.kill("silo-1")  # one silo is led to the other server
        processes.start("silo-1", "--url", f"https://127.0.0.1:{port}")
        second = copy.start("server", "--listen", f"127.0.0.1:{port}", "--patience", "8")
        assert second.wait(90) == 2
        assert "[gate.past]" in copy.log("server")
        processes.kill("silo-1")
        processes.start("silo-1")
        check_the_end(processes, simulated)


# --- certificates ----------------------------------------------------------------------------------------------

FAKETIME = shutil.which("faketime")
"""The program of Debian's package faketime: apt-get install faketime."""
_LIFE_SECONDS = 60


@pytest.mark.skipif(FAKETIME is None, reason="needs faketime: apt-get install faketime")
def test_a_run_outlives_its_certificates_and_goes_on_when_they_are_renewed(tmp_path: Path) -> None:
    """They were signed 825 days less a minute ago. Nobody accepts again, and one silo alone is started again."""
    simulated = simulate(tmp_path, LONG)
    with start_consortium(tmp_path, LONG) as processes:
        sealed = Consortium.load(processes.public)
        seal = [*COMMAND, "deploy", "seal", str(processes.folder), "--again"]
        ago = f"-{VALID_DAYS * 86_400 - _LIFE_SECONDS}s"
        subprocess.run([str(FAKETIME), "-f", ago, *seal], check=True, capture_output=True)
        end = min(
            one.not_valid_after_utc for one in read_certificates(processes.public, sealed.sealed).values()
        )
        assert 0 < (end - datetime.now(UTC)).total_seconds() < _LIFE_SECONDS
        processes.start_all()
        wait_for_round(processes, 3)
        processes.running["silo-2"].send_signal(signal.SIGSTOP)
        done = len((processes.run / "metrics.jsonl").read_text().splitlines())
        time.sleep(max(0.0, (end - datetime.now(UTC)).total_seconds()) + 3)
        processes.running["silo-2"].send_signal(signal.SIGCONT)
        # Whoever looks is told the cause: at the server, at a silo that runs, and at one that is started.
        wait_for(processes, lambda: "'silo-2' already" in processes.log("server"))
        wait_for(processes, lambda: "[deploy.certificate]" in processes.log("silo-2"))
        processes.kill("silo-3")
        assert processes.start("silo-3").wait(60) == 2
        assert "deploy.certificate" in processes.log("silo-3").splitlines()[-1]
        assert len((processes.run / "metrics.jsonl").read_text().splitlines()) <= done + 1
        subprocess.run(seal, check=True, capture_output=True)
        assert Consortium.load(processes.public).digest == sealed.digest
        processes.start("silo-3")
        check_the_end(processes, simulated)
        assert len(list((processes.home("server") / "runs").iterdir())) == 1


# --- disks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", ["silo-2", "server"])
def test_a_full_disk_stops_the_run_until_there_is_room(full: str, tmp_path: Path) -> None:
    """A file that every round is written to becomes /dev/full, where each write fails as on a full disk."""
    simulated = simulate(tmp_path, LONG)
    with start_consortium(tmp_path, LONG) as processes:
        processes.start_all()
        wait_for_round(processes, 3)
        path = processes.run / "metrics.jsonl" if full == "server" else processes.home(full) / "audit.jsonl"
        path.rename(kept := path.with_name("kept"))
        path.symlink_to("/dev/full")
        assert processes.wait_for_server() == 2
        assert "[run.disk_full]" in processes.log("server")
        if full != "server":
            assert "No space left" in processes.log(full)
        path.unlink()
        kept.rename(path)
        processes.start("server")
        check_the_end(processes, simulated)
