"""A consortium of forked processes that a program kills at random moments, and a supervisor that starts them again."""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from silodp.accounting.ledger import Ledger, reopen_ledger
from support.consortium import Processes, Running

_ANSWER = re.compile(r"answer of silo '(.+)': \d+ bytes, sha256 ([0-9a-f]{64})")
_CODE = re.compile(r'"level": "error".* \[([a-z_.]+)\]"')
RESUMABLE = {"gate.restarted"}
"""Codes with which a server may end because a silo was killed; whoever supervises it starts it again."""


@dataclass
class KilledConsortium(Processes):
    """The processes of a consortium, which a program kills and a supervisor starts again.

    Attributes:
        random: decides who is killed, and when.
        killed: number of kills by party.
        ended: codes with which servers ended by themselves, and were started again.
    """

    random: Random = field(default_factory=Random)
    killed: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)

    def start(self, name: str, *options: str, **environment: str) -> Running:
        """Start one party with options for these tests."""
        more = ("--patience", "60") if name == "server" else ()
        return super().start(name, "--log-level", "debug", *more, *options, **environment)

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
        for name in self.running:
            if self._status(name) in (None, 0):  # a silo ends by itself when the run is over
                continue
            assert name == "server", f"{name} ended: {self.log(name)[-3000:]}"
            code = ["none", *_CODE.findall(self.log("server"))][-1]
            assert code in RESUMABLE, self.log("server")[-3000:]
            self.ended[code] += 1
            self.start("server")
        return self._status("server") is None

    def _status(self, name: str) -> int | None:
        """Return the exit status of a party; None while it runs."""
        try:
            return self.running[name].wait(0)
        except subprocess.TimeoutExpired:
            return None

    # --- what is found afterwards ---

    def server_ledger(self) -> Ledger:
        return reopen_ledger(self.run / "checkpoint" / "ledger.jsonl")

    def silo_ledger(self, name: str) -> Ledger:
        """The only ledger of a silo in which something was charged."""
        ledgers = [reopen_ledger(path) for path in (self.home(name) / "ledgers").glob("*.jsonl")]
        (charged,) = (ledger for ledger in ledgers if ledger.history)
        return charged

    def received(self) -> dict[str, set[str]]:
        """What arrived at the server, by its debug log: silo → SHA-256 of its answers."""
        found: dict[str, set[str]] = {name: set() for name in self.names}
        for name, digest in _ANSWER.findall(self.log("server")):
            found[name].add(digest)
        return found
