"""Files as earlier versions of silodp left them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from silodp.accounting import _append_log


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


def unseal(description: Path) -> None:
    """Leave model.json without a digest of itself and of the guarantee."""
    fields = json.loads(description.read_text())
    fields["format"] = 1
    for name in ("digest", "guarantee"):
        fields.pop(name, None)
    description.write_text(json.dumps(fields))


def unbind(directory: Path) -> Path:
    """Leave a finished run without digests: what its files say is then compared with ledger and settings alone."""
    ledger = directory / "checkpoint" / "ledger.jsonl"
    write_ledger(ledger, [fields for fields in read_ledger(ledger) if "files" not in fields])
    unseal(directory / "model.json")
    return directory
