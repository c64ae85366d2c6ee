"""What a finished run left in its directory, read back; whatever is missing or damaged is one sentence."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from silodp import __version__
from silodp.accounting.guarantee import ADVERSARIES, Adversary, Guarantee
from silodp.accounting.ledger import Budget
from silodp.aggregators.registry import AggregatorRecord
from silodp.config.builders import build_aggregator
from silodp.config.plugins import refuse_plugins
from silodp.errors import SilodpError, name_file
from silodp.report import plots
from silodp.report.audit import AuditResult, audit_run
from silodp.report.formatting import as_number
from silodp.report.guarantee_text import is_valid_guarantee
from silodp.runtime.run_directory import MetricsRow, read_metrics


@dataclass(frozen=True)
class RunRecord:
    """What a finished run left in its directory.

    `audit` is None where there is no ledger to compare the guarantees with, `aggregator` where no file says which one
    was used. `written` is the file time of guarantee.json, which a copy may have changed.
    """

    rows: tuple[MetricsRow, ...]
    summary: dict[str, Any]
    guarantees: dict[Adversary, Guarantee]
    config: str | None
    aggregator: AggregatorRecord | None
    model_digest: str | None
    allocation: plots.Allocation | None
    audit: AuditResult | None
    budget: Budget | None
    written: datetime


@refuse_plugins()
def read_run(directory: Path) -> RunRecord:
    """The files of a finished run, its guarantees compared with its ledger.

    Raises:
        SilodpError: one that is needed is missing or damaged, or they contradict each other.
    """
    if not directory.is_dir():
        raise SilodpError(
            f"run directory {directory} does not exist: name the directory that `silodp run` wrote.",
            code="report.missing",
        )
    rows = _read_rows(directory / "metrics.jsonl")
    promised = directory / "guarantee.json"
    summary = _read_json(promised)
    guarantees = _guarantees(summary, promised)
    config, model = directory / "config.toml", directory / "model.safetensors"
    settings = config.read_text(encoding="utf-8", errors="replace") if config.exists() else None
    aggregator = _aggregator(summary, settings)
    audit = audit_run(directory, guarantees.values(), summary, aggregator, rows)
    kept = directory / "plots" / "allocation.json"
    delta = guarantees["released"].delta  # the ledger's may be less: it accounts for the noise alone
    return RunRecord(
        rows=rows,
        summary=summary,
        guarantees=guarantees,
        config=settings,
        aggregator=aggregator,
        model_digest=hashlib.sha256(model.read_bytes()).hexdigest() if model.exists() else None,
        allocation=_read_allocation(kept) if kept.exists() else None,
        audit=audit,
        budget=audit.budget and replace(audit.budget, delta=delta) if audit else _budget(settings, delta),
        written=datetime.fromtimestamp(promised.stat().st_mtime, UTC),
    )


def versions() -> str:
    """Of what computes here."""
    return f"silodp {__version__}, torch {version('torch')}"


def _guarantees(summary: dict[str, Any], path: Path) -> dict[Adversary, Guarantee]:
    try:
        _check_summary(summary)
        found = [Guarantee.from_dict(fields) for fields in summary["guarantees"]]
        guarantees = {guarantee.adversary: guarantee for guarantee in found}
        ordered = {adversary: guarantees[adversary] for adversary in ADVERSARIES}
        for said in ordered.values():
            if said.private != (said.epsilon is not None) or not 0 < said.delta < 1:
                raise ValueError
            if said.epsilon is not None and (as_number(said.epsilon) is None or said.epsilon < 0):
                raise ValueError
            if not is_valid_guarantee(said):
                raise ValueError
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise SilodpError(
            f"{path} does not hold a guarantee for each adversary: restore it, or run again.",
            code="report.damaged",
        ) from None
    return ordered


def _check_summary(summary: Mapping[str, Any]) -> None:
    """Raise ValueError if what guarantee.json says of the whole run cannot be shown.

    "simulation" can only be true, or missing in files of format 1: nothing in this version runs parties apart.
    """
    texts = [summary.get(name, "") for name in ("method", "settings", "stopped")]
    if not all(isinstance(text, str) for text in texts) or summary.get("simulation", True) is not True:
        raise ValueError


def _aggregator(summary: dict[str, Any], config: str | None) -> AggregatorRecord | None:
    """As guarantee.json names it, {"name": ..., its settings}; else by config.toml."""
    try:
        if "aggregator" in summary:
            named = dict(summary["aggregator"])
            if "class" in named:
                return AggregatorRecord.from_dict(named)
            return AggregatorRecord.from_aggregator(build_aggregator(named.pop("name"), named))
        if config is not None:
            values = tomllib.loads(config)
            aggregator = build_aggregator(values.get("aggregator", "plain"), values.get("aggregation", {}))
            return AggregatorRecord.from_aggregator(aggregator)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None  # of another version: nothing is said of it, and its ledger is compared as it is
    return None


def _budget(config: str | None, delta: float) -> Budget | None:
    """The budget by config.toml, for a run whose ledger is elsewhere."""
    try:
        section = tomllib.loads(config or "").get("budget")
        return None if section is None else Budget(**{"delta": delta, **section})
    except (ValueError, TypeError, RecursionError):
        return None  # the configuration is shown as it is, right or wrong


def keep_allocation(directory: Path, records: plots.Allocation) -> None:
    """Write the picture's private numbers to DIR/plots/allocation.json."""
    if not directory.is_dir():
        raise SilodpError(
            f"run directory {directory} does not exist: name the directory that `silodp run` wrote.",
            code="report.missing",
        )
    (directory / "plots").mkdir(exist_ok=True)
    text = json.dumps(asdict(records), ensure_ascii=False)
    path = directory / "plots" / "allocation.json"
    with name_file(path):
        path.write_text(text + "\n", encoding="utf-8")


def _read_allocation(path: Path) -> plots.Allocation:
    fields = _read_json(path)
    try:
        lists = {
            "silos": tuple(str(name) for name in fields["silos"]),
            "bars": tuple(tuple(float(value) for value in row) for row in fields["bars"]),
            "persons_per_bar": tuple(int(value) for value in fields["persons_per_bar"]),
        }
        totals = ("persons", "without_records", "in_several_silos", "most_records")
        numbers = {name: int(fields[name]) for name in totals}
        records = plots.Allocation(**{**fields, **lists, **numbers})
        if (
            not all(math.isfinite(value) for row in records.bars for value in row)
            or len(records.bars) != len(records.silos)
            or any(len(row) != len(records.persons_per_bar) for row in records.bars)
        ):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise SilodpError(
            f"{path} is damaged: delete it and the report is written without that picture.",
            code="report.damaged",
        ) from None
    return records


def _read_rows(path: Path) -> tuple[MetricsRow, ...]:
    _read_bytes(path)
    rows = read_metrics(path)
    if not rows:
        raise SilodpError(
            f"{path} is empty: there is no round to report on; run again.", code="run.metrics_damaged"
        )
    return tuple(rows)


def _read_json(path: Path) -> dict[str, Any]:
    content = _read_bytes(path)
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested a thousand deep
        fields = None
    if not isinstance(fields, dict):
        raise SilodpError(
            f"{path} is damaged (it is not a JSON object): restore it, or run again.", code="report.damaged"
        )
    return fields


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SilodpError(
            f"{path} is missing: the run has not ended, or this is no run directory; resume the run or name "
            "another directory.",
            code="report.missing",
        ) from None
    except OSError as error:
        raise SilodpError(
            f"{path} cannot be read ({error.strerror}): restore it, or run again.", code="report.damaged"
        ) from None
