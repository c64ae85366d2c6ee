"""The files that a run leaves: their names, their digests in the ledger, and the rows of metrics.jsonl.

A report reads a run through this module, which knows nothing of models, stores and checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from silodp.accounting.views import Adversary
from silodp.errors import SilodpError
from silodp.parsing import parse_json, parse_toml
from silodp.runtime.model_description import CARD, CODE, DESCRIPTION, WEIGHTS
from silodp.wire.files import append_durably, write_durably

RUN_SPEC = "run_spec.json"
"""The specification of the run; it is public."""
CONFIG = "config.toml"
"""The configuration of a run of the command line."""
GUARANTEE, METRICS = "guarantee.json", "metrics.jsonl"
LEDGER, STATE = Path("checkpoint") / "ledger.jsonl", Path("checkpoint") / "state.safetensors"
REPORT = "report.html"
ATTACK = "attack.json"
"""What `silodp attack` measured on the settings of the run; no part of it."""
STATISTICS, STATISTICS_PAGE = "statistics.json", "statistics.html"
"""What a run of statistics releases, for programs and for readers."""
BOUND_FILES = (WEIGHTS, DESCRIPTION, CODE, GUARANTEE, RUN_SPEC, CONFIG, METRICS)
"""The files whose digests the ledger of a finished run has, in the order in which they are checked."""
COHORT = "cohort.json"
"""What all runs on the same people spent when the run ended; in checkpoint/, under which cohort the run was begun."""
RUN_FILES = frozenset(
    {*BOUND_FILES, CARD, ATTACK, COHORT, REPORT, STATISTICS, STATISTICS_PAGE, "plots", "checkpoint"}
)
"""All that silodp writes into the directory of a run, but for signatures."""
SIGNATURES = "signatures"
"""Folder of the signatures of a report; it is none of `RUN_FILES`, so no command deletes a signed run by itself."""

MetricsRow = dict[str, Any]
"""One row of metrics.jsonl, for one round; round 0 is the untrained model."""
REFUSED_SUM = "(sum)"
"""Key in a row's "refused", which otherwise has names of silos. It means that the sum was not finite, so the
model did not change."""


class Metrics:
    """The rows of metrics.jsonl, one line per round, each written durably before the checkpoint of its round.

    So when a process dies, the file can only be ahead of the checkpoint: by a line that was cut off, or by one of a
    round that is repeated. Both are dropped; every other difference is damage, and refused.

    Args:
        path: The file; None keeps the rows in memory.
        resumed_round: The round of the checkpoint; None for a new run.
        spent: Returns ε against each adversary after 0, 1, … rounds by the ledger, for rows of a lost file.
        recorded: `digest_rows` of these rows by the ledger; None where it is not known.

    Attributes:
        rows: The rows of rounds 0, 1, 2, …

    Raises:
        SilodpError: The file is damaged or was edited, or ends before the checkpoint.
    """

    def __init__(
        self,
        path: Path | None,
        resumed_round: int | None,
        spent: Callable[[], Sequence[Mapping[Adversary, float | None]]],
        recorded: str | None = None,
    ) -> None:
        self._path = path
        self.rows: list[MetricsRow] = []
        if self._path is None or resumed_round is None:
            return
        if self._path.exists():
            self.rows = read_metrics(self._path, may_be_cut_off=True)[: resumed_round + 1]
            if len(self.rows) <= resumed_round and (self.rows or resumed_round):
                raise _make_damage_error(
                    self._path,
                    f"has no row of round {len(self.rows)}, and the checkpoint is of {resumed_round}",
                )
            if recorded not in (None, digest_rows(self.rows)):
                raise _make_damage_error(self._path, "a row is not the one that the run wrote")
        elif resumed_round:  # the file was lost: of the earlier rounds only ε is known, by the ledger
            known = spent()[: resumed_round + 1]
            self.rows = [{"round": i, "epsilon": dict(epsilon)} for i, epsilon in enumerate(known)]
        write_durably(self._path, "".join(json.dumps(row) + "\n" for row in self.rows).encode())

    def add(self, row: MetricsRow) -> None:
        """Append a row durably."""
        self.rows.append(row)
        if self._path is not None:
            append_durably(self._path, json.dumps(row).encode())


def digest_file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def list_signatures(directory: Path) -> list[Path]:
    """Return the files of all signatures in the directory of a run."""
    return sorted((directory / SIGNATURES).glob("*.json"))


def digest_rows(rows: Sequence[MetricsRow]) -> str:
    """Return the SHA-256 (hex) of the rows of metrics.jsonl, however an editor left their lines."""
    return hashlib.sha256("".join(json.dumps(row) + "\n" for row in rows).encode()).hexdigest()


def digest_config(path: Path) -> str:
    """Return the SHA-256 (hex) of the settings in config.toml, without comments; "" where it is not TOML.

    The table [card] is left out: it changes nothing in the run, and its owner may declare more after it.
    """
    try:
        values = parse_toml(path.read_text(encoding="utf-8"))
    except ValueError:
        return ""
    values.pop("card", None)
    # Sorted: the order of settings is none. As text: TOML has dates, and JSON has not.
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def find_changed_file(
    directory: Path, recorded: Mapping[str, str], rows: Sequence[MetricsRow] | None
) -> str | None:
    """Return the name of the first file of a finished run that is not as the run wrote it; None if all are.

    A file that is missing is not changed.

    Args:
        directory: The directory of the run.
        recorded: `Ledger.files`.
        rows: The rows of metrics.jsonl; None leaves them out.
    """
    for name in BOUND_FILES:
        path = directory / name
        if name not in recorded or not path.exists():
            continue
        if name == METRICS:
            found = "" if rows is None else digest_rows(rows)
        else:
            found = digest_config(path) if name == CONFIG else digest_file(path)
        # "" is not checked here; of a config.toml that is not TOML the report says so.
        if found not in ("", recorded[name]):
            return name
    return None


def read_metrics(path: Path, *, may_be_cut_off: bool = False) -> list[MetricsRow]:
    """Read metrics.jsonl.

    Args:
        path: The file.
        may_be_cut_off: Drop a last line that a crash cut off: without its end, or, after a power cut, with blocks of
            zeros.

    Returns:
        The rows of rounds 0, 1, 2, …, each once and in this order.

    Raises:
        SilodpError: A line is not the row of its round.
    """
    *lines, last = path.read_bytes().split(b"\n")
    rows: list[MetricsRow] = []
    for number, line in enumerate([*lines, last] if last else lines, start=1):
        row = _parse_row(line, len(rows))
        if row is None:
            # A file system may write the length of a file before its content: a power cut leaves zeros.
            is_last = number >= len(lines) + bool(last)
            if may_be_cut_off and is_last and (last or b"\0" in line):
                break
            raise _make_damage_error(path, f"line {number} is not the record of round {len(rows)}")
        rows.append(row)
    return rows


def _parse_row(line: bytes, round_: int) -> MetricsRow | None:
    """Return the row of a round; None if the line is anything else."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    # In Python true is an int, and equal to 1.
    if not isinstance(row, dict) or type(row.get("round")) is not int or row["round"] != round_:
        return None
    sound = (
        _is_number(row.get("loss"))
        and _is_number(row.get("seconds"))
        and all(_are_numbers(row.get(name)) for name in ("metrics", "epsilon", "bytes", "refused"))
        and all(value is None or 0 <= value < math.inf for value in (row.get("epsilon") or {}).values())
    )
    return row if sound else None


def _are_numbers(values: Any) -> bool:
    return values is None or (isinstance(values, dict) and all(map(_is_number, values.values())))


def _is_number(value: Any) -> bool:
    """Return whether a value from JSON is a number, NaN included, or null."""
    # JSON has whole numbers of any size; numpy, with which a report computes, has 64 bits.
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def _make_damage_error(path: Path, how: str) -> SilodpError:
    return SilodpError(
        f"{path} is damaged: {how}; restore it from a copy, or delete it and resume the run: of the earlier rounds "
        "then only ε is known.",
        code="run.metrics_damaged",
    )
