"""Files of a finished run as somebody leaves them who edits them and makes every digest anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from silodp.accounting import _append_log, guarantee
from silodp.runtime import model_description
from silodp.runtime.run_files import (
    CONFIG,
    GUARANTEE,
    LEDGER,
    METRICS,
    digest_config,
    digest_file,
    digest_rows,
)


def summarize_run(**fields: Any) -> dict[str, Any]:
    """Entries of guarantee.json about a whole run, which its readers require."""
    return {
        "format": guarantee.FORMAT,
        "simulation": True,
        "aggregator": {"name": "plain"},
        "stopped": "rounds",
        "private": True,
        "weighted": True,
        "sampled": True,
        "run": "it",
        "finished": "2026-11-26T08:30:00+00:00",
        **fields,
    }


def write_ledger(path: Path, entries: list[dict[str, Any]]) -> None:
    """Write the lines of a ledger, each with its hash."""
    lines, previous = [], ""
    for fields in entries:
        line = _append_log._line(fields, previous)
        previous = json.loads(line)["hash"]
        lines.append(line)
    path.write_bytes(b"".join(lines))


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger without their hashes."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in fields.items() if k not in ("hash", "previous")} for fields in entries]


def edit_description(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change fields of model.json, with a digest that fits."""
    fields = json.loads(path.read_text())
    del fields["digest"]
    change(fields)
    path.write_text(json.dumps(fields | {"digest": model_description._digest(fields)}))


def rebind(directory: Path) -> Path:
    """Make the digests of a run's files anew: what the files say is then all that can contradict its ledger."""
    if (directory / "model.json").exists():
        stated = digest_file(directory / GUARANTEE)
        edit_description(directory / "model.json", lambda fields: fields.update(guarantee=stated))
    *entries, last = read_ledger(directory / LEDGER)
    last["files"] = {name: _digest(directory / name) for name in last["files"] if (directory / name).exists()}
    write_ledger(directory / LEDGER, [*entries, last])
    return directory


def _digest(path: Path) -> str:
    if path.name == METRICS:
        return digest_rows([json.loads(line) for line in path.read_text().splitlines()])
    return digest_config(path) if path.name == CONFIG else digest_file(path)
