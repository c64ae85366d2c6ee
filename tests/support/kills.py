"""A consortium of forked processes that a program kills at random moments, and a supervisor that starts them again."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

from silodp.accounting.ledger import Ledger, reopen_ledger
from silodp.deploy.consortium import Consortium

_PRELOAD = ["silodp.cli.main", "silodp.deploy.server", "silodp.runtime.train", "scipy.stats"]
_ANSWER = re.compile(r"answer of silo '(.+)': \d+ bytes, sha256 ([0-9a-f]{64})")
_CODE = re.compile(r"^error: .* \[([a-z_.]+)\]$", re.MULTILINE)
RESUMABLE = {"gate.restarted"}
"""Codes with which a server may end because a silo was killed; whoever supervises it starts it again."""


def run_party(arguments: list[str], log: Path) -> None:
    """Run the command of a party in this process, with its output in a file."""
    from silodp.cli.main import main

    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    main(arguments)


@dataclass
class KilledConsortium:
    """The processes of a consortium, forked from one that has imported everything, so that they start at once.

    Attributes:
        folder: of `make_local`.
        random: decides who is killed, and when.
        killed: number of kills by party.
        ended: codes with which servers ended by themselves, and were started again.
    """

    folder: Path
    random: Random
    killed: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    _running: dict[str, BaseProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self.names = Consortium.load(self.folder / "public").data.silos

    def home(self, name: str) -> Path:
        return self.folder / "server" if name == "server" else self.folder / "silos" / name

    def log(self, name: str) -> str:
        path = self.home(name) / "log.txt"
        return path.read_text() if path.exists() else ""

    @property
    def run(self) -> Path:
        return self.folder / "server" / "run"

    def start(self, name: str) -> None:
        command = [
            "server" if name == "server" else "silo",
            str(self.folder / "public"),
            str(self.home(name)),
        ]
        arguments = [*command, "--log-level", "debug"] + (["--patience", "60"] if name == "server" else [])
        process = self._context.Process(
            target=run_party, args=(arguments, self.home(name) / "log.txt"), daemon=True
        )
        process.start()
        self._running[name] = process

    def kill(self, name: str) -> None:
        """Kill one party with SIGKILL."""
        process = self._running.pop(name)
        process.kill()
        process.join(30)
        process.close()

    def run_to_the_end(self, kills: int, seconds: float = 300) -> int:
        """Start all parties, kill some of them at random moments, start them again, and wait for the server's end.

        Args:
            kills: most kills; fewer where the run ends before.
            seconds: longest time without a kill until the run ends.

        Returns:
            The number of kills.
        """
        done = 0
        for name in (*self.names, "server"):
            self.start(name)
        while done < kills and self._wait_for_moment(seconds):
            victims = self.random.sample(
                [*self.names, "server", "server"], k=self.random.choice((1, 1, 1, 2))
            )
            for name in sorted(set(victims)):
                self.kill(name)
                self.killed[name] += 1
                done += 1
            time.sleep(self.random.choice((0.0, self.random.uniform(0, 0.5))))
            for name in sorted(set(victims)):
                self.start(name)
        end = time.monotonic() + seconds
        while self._is_going():
            assert time.monotonic() < end, self.log("server")[-3000:]
            time.sleep(0.02)
        return done

    def _wait_for_moment(self, seconds: float) -> bool:
        """Wait for a random moment: soon after the last start, or in a later round. False where the run has ended."""
        rounds = self.random.choice((0, 0, 1, 1, 2))
        wait = self.random.uniform(0, 1.0 if rounds == 0 else 0.3)
        end, goal = time.monotonic() + seconds, self._count_rounds() + rounds
        while self._count_rounds() < goal:
            if not self._is_going():
                return False
            assert time.monotonic() < end, self.log("server")[-3000:]
            time.sleep(0.005)
        time.sleep(wait)
        return self._is_going()

    def _count_rounds(self) -> int:
        path = self.run / "metrics.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def _is_going(self) -> bool:
        """Return whether the run goes on; a server that asks to be resumed is started again."""
        for name, process in list(self._running.items()):
            if process.exitcode is None or (name == "server" and process.exitcode == 0):
                continue
            assert name == "server", f"{name} ended: {self.log(name)[-3000:]}"
            code = ["none", *_CODE.findall(self.log("server"))][-1]
            assert code in RESUMABLE, self.log("server")[-3000:]
            self.ended[code] += 1
            self.start("server")
        return self._running["server"].exitcode is None

    def stop(self) -> None:
        for name in list(self._running):
            self.kill(name)

    # --- what is found afterwards ---

    def server_ledger(self) -> Ledger:
        return reopen_ledger(self.run / "checkpoint" / "ledger.jsonl")

    def silo_ledger(self, name: str) -> Ledger:
        """The only ledger of a silo in which something was charged."""
        ledgers = [reopen_ledger(path) for path in (self.home(name) / "ledgers").glob("*.jsonl")]
        (charged,) = (ledger for ledger in ledgers if ledger.history)
        return charged

    def audit(self, name: str) -> list[dict[str, object]]:
        """The lines of a silo's audit log; one that a kill cut off left nothing."""
        found = []
        for line in (self.home(name) / "audit.jsonl").read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                print(f"a line of {name}'s audit log was cut off", file=sys.stderr)
        return found

    def received(self) -> dict[str, set[str]]:
        """What arrived at the server, by its debug log: silo → SHA-256 of its answers."""
        found: dict[str, set[str]] = {name: set() for name in self.names}
        for name, digest in _ANSWER.findall(self.log("server")):
            found[name].add(digest)
        return found
