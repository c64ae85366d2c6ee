"""How far the run of a server or silo is: status.json, written by its process and read by `silodp deploy status`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, FiniteFloat

import silodp
from silodp.errors import SilodpError, require
from silodp.parsing import parse_json, refuse_malformed
from silodp.text import describe_exception
from silodp.wire.files import write_durably

STATUS = "status.json"
"""In the folder of a server or silo: how far the run is, who is connected, and the last problem."""
_STATUS_SECONDS = 10.0
"""Longest time until status.json says anew when a silo was seen."""


@dataclass(eq=False)
class StatusFile:
    """The file that `silodp deploy status` reads; the thread of the run and that of the connections write it.

    Attributes:
        path: Path of the file.
        seconds_since_seen: Returns for each silo the seconds since its last call; None before its first.
        rounds: Number of rounds of the run, T.
        answers: Returns for each silo how many answers have left it, at least.
        describe: Returns further entries, anew whenever the file is written.
        on_refresh: Called whenever `keep_fresh` writes the file.
    """

    path: Path
    seconds_since_seen: Callable[[], Mapping[str, float | None]]
    rounds: int
    answers: Callable[[], Mapping[str, int]] = dict
    describe: Callable[[], Mapping[str, Any]] = dict
    on_refresh: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self._fields: dict[str, Any] = {
            **{"round": 0, "rounds": self.rounds, "epsilon": {}, "error": None, "running": True}
        }
        self._lock = threading.Lock()
        self._moved = time.monotonic()

    def seconds_since_round(self) -> float:
        """Return the seconds since the number of rounds changed, or since the process started.

        A process that goes on where another one ended with an error adds the wait of that one (`add_wait`).
        """
        return time.monotonic() - self._moved

    def add_wait(self, seconds: float) -> None:
        """Count so many seconds more since the last round."""
        self._moved -= seconds

    def write(self, **changes: Any) -> None:
        """Write the file with some fields changed."""
        # Both threads write the same temporary file before it is renamed: one at a time.
        with self._lock:
            if changes.get("round", self._fields["round"]) != self._fields["round"]:
                self._moved = time.monotonic()
            self._fields.update(changes)
            # "written" is the clock of the day, which another process can compare; the rest are differences of time.
            since = self.seconds_since_seen()
            seen = {name: None if s is None else round(s, 1) for name, s in since.items()}
            content = {
                "version": silodp.__version__,
                "written": time.time(),
                **self._fields,
                **self.describe(),
                "seconds_since_seen": seen,
            }
            content["seconds_since_round"] = round(self.seconds_since_round(), 1)
            content["answers"] = dict(self.answers())
            write_durably(self.path, (json.dumps(content, indent=1) + "\n").encode())

    def try_write(self, **changes: Any) -> None:
        """Write the file with some fields changed; a full disk, which ends a run elsewhere, is no error here."""
        with suppress(OSError):
            self.write(**changes)

    @contextmanager
    def keep_fresh(self, seconds: float = _STATUS_SECONDS) -> Iterator[None]:
        """Write the file again and again: while a round waits for one silo, the others are seen all the time.

        Args:
            seconds: Seconds between two writes.
        """
        is_over = threading.Event()

        def refresh() -> None:
            while not is_over.wait(seconds):
                self.on_refresh()
                self.try_write()

        thread = threading.Thread(target=refresh, name="status", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    @contextmanager
    def record_end(self) -> Iterator[None]:
        """Write at the end that the process has ended, and with which error.

        Whoever reads the file while the next process starts must not take it for the state of that one.
        """
        try:
            yield
        except Exception as error:
            told = f"{error} [{error.code}]" if isinstance(error, SilodpError) else describe_exception(error)
            self.try_write(error=told)
            raise
        finally:
            self.try_write(running=False)


class _Transfer(BaseModel, strict=True):
    """The bytes of an answer that have passed, and its length."""

    done: int
    size: int


class _Status(BaseModel, strict=True):
    """The entries of status.json that are read; strict, so that true is no number."""

    version: str = ""
    written: FiniteFloat = 0.0
    round: FiniteFloat = 0.0
    rounds: FiniteFloat = 0.0
    error: str | None = None
    running: bool = True
    stopped: str | None = None
    epsilon: dict[str, FiniteFloat | None] = {}
    epsilon_limit: dict[str, FiniteFloat | None] = {}
    certificate_days: dict[str, FiniteFloat] = {}
    seconds_since_round: FiniteFloat | None = None
    seconds_since_seen: dict[str, FiniteFloat | None] = {}
    answers: dict[str, int] = {}
    transfers: dict[str, _Transfer] = {}


def describe_seen(seconds: float | None) -> str:
    """Return when a silo was last seen, in words; None is a silo that was not seen yet."""
    return "not connected yet" if seconds is None else f"last seen {seconds:.0f} s ago"


def list_transfers(found: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
    """Return the answers that are on their way as entries of status.json."""
    return {name: {"done": done, "size": size} for name, (done, size) in found.items()}


def format_share(done: int, size: int) -> str:
    """Return how many of so many bytes are done, as "34 of 120 MB"; without the second where it is not known (0)."""
    return f"{done / 1e6:.1f} of {size / 1e6:.1f} MB" if size else f"{done / 1e6:.1f} MB"


def read_status(path: Path) -> dict[str, Any]:
    """Read status.json.

    Returns:
        "written" (seconds since 1970), "running" (whether the process that wrote it had not ended), "round", "rounds",
        "epsilon" by adversary (None: no guarantee), "error" (None: there was none), "seconds_since_seen" by silo (None:
        not seen yet), "answers" by silo, and "transfers" (by the other party, "done" and "size" of an answer that is on
        its way, in bytes), besides others; the answers alone where an operator wrote nothing else. {}
        where there is no such file.

    Raises:
        SilodpError: The file is damaged (code checkpoint.damaged).
    """
    if not path.exists():
        return {}
    with refuse_malformed(
        f"{path} is damaged: delete it if no silo's machine was restored from a backup.",
        code="checkpoint.damaged",
    ):
        found: dict[str, Any] = parse_json(path.read_bytes())
        _Status.model_validate(found)
    return found


def load_status(folder: Path) -> dict[str, Any]:
    """Read the status of a party's run that was begun.

    Args:
        folder: Folder of the server or of a silo.

    Returns:
        As `read_status`, with all entries named there but "running" and "answers".

    Raises:
        SilodpError: There is no such file (code cli.file), or it is damaged (code checkpoint.damaged).
    """
    path, server = folder / STATUS, folder / "server"
    require(
        path.exists(),
        f"{path} is not there: give the folder of a server, or of a silo over HTTPS, that was started"
        f"{', such as ' + str(server) if server.is_dir() else ''}.",
        code="cli.file",
        field="folder",
    )
    # After a repair an operator may have left the answers alone in the file (docs/deployment_admin.md).
    found = {"epsilon": {}, "error": None, "seconds_since_seen": {}, **read_status(path)}
    if missing := {"round", "rounds", "written"} - found.keys():
        raise SilodpError(
            f"{path} does not say {sorted(missing)[0]}: start the server, which writes the file anew.",
            code="checkpoint.damaged",
        )
    return found
