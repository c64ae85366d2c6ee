"""How far the run of a server or silo is: status.json, written by its process and read by `silodp deploy status`."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from silodp.errors import SilodpError
from silodp.parsing import UNSOUND, parse_json
from silodp.wire.files import write_durably

STATUS = "status.json"
"""In the folder of a server or silo: how far the run is, who is connected, and the last problem."""
_STATUS_SECONDS = 10.0
"""Longest time until status.json says anew when a silo was seen."""


class StatusFile:
    """The file that `silodp deploy status` reads; the thread of the run and that of the connections write it.

    Args:
        path: Path of the file.
        seconds_since_seen: Returns for each silo the seconds since its last call; None before its first.
        rounds: Number of rounds of the run, T.
        answers: Returns for each silo how many answers have left it, at least.
    """

    def __init__(
        self,
        path: Path,
        seconds_since_seen: Callable[[], Mapping[str, float | None]],
        rounds: int,
        answers: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._path, self._seconds_since_seen, self._answers = path, seconds_since_seen, answers
        self._fields: dict[str, Any] = {"round": 0, "rounds": rounds, "epsilon": {}, "error": None}
        self._lock = threading.Lock()

    def write(self, **changes: Any) -> None:
        """Write the file with some fields changed."""
        with self._lock:
            self._fields.update(changes)
            since = self._seconds_since_seen()
            seen = {name: None if s is None else round(s, 1) for name, s in since.items()}
            content = {
                "written": time.time(),
                **self._fields,
                "seconds_since_seen": seen,
                "answers": dict(self._answers()),
            }
            write_durably(self._path, (json.dumps(content, indent=1) + "\n").encode())

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
                self.try_write()

        thread = threading.Thread(target=refresh, name="status", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def read_status(path: Path) -> dict[str, Any]:
    """Read status.json.

    Returns:
        "written" (seconds since 1970), "round", "rounds", "epsilon" by adversary (None: no guarantee), "error" (None:
        there was none), "seconds_since_seen" by silo (None: not seen yet) and "answers" by silo, besides others; the
        answers alone where an operator wrote nothing else.

    Raises:
        FileNotFoundError: There is no such file.
        SilodpError: The file is damaged (code checkpoint.damaged).
    """
    try:
        found = parse_json(path.read_bytes())
        is_sound = (
            all(_is_number(found[name]) for name in ("written", "round", "rounds") if name in found)
            and isinstance(found.get("error"), str | None)
            and all(_is_number(value, True) for value in found.get("epsilon", {}).values())
            and all(_is_number(value, True) for value in found.get("seconds_since_seen", {}).values())
            and all(type(count) is int for count in found.get("answers", {}).values())
        )
    except UNSOUND:
        is_sound = False
    if not is_sound:
        raise SilodpError(
            f"{path} is damaged: delete it if no silo's machine was restored from a backup.",
            code="checkpoint.damaged",
        )
    return cast(dict[str, Any], found)


def _is_number(value: object, or_none: bool = False) -> bool:
    # True is an int for Python, and no number here.
    if value is None or isinstance(value, bool):
        return value is None and or_none
    return isinstance(value, int | float) and math.isfinite(value)
