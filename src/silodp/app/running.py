"""A configured run from data to report, and what to say about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from silodp.app.config import RunConfig
from silodp.app.progress import in_words, shown
from silodp.app.report import write_report
from silodp.federation.run import Result, Row, train
from silodp.federation.store import write_durably


def run(config: RunConfig, directory: Path, resume: bool = False) -> dict[str, Any]:
    """Train as configured, write everything to `directory`; the JSON-ready summary.

    Nothing is written before data, task and method have been accepted.

    Raises:
        SilodpError: for any mistake its maker can mend.
    """
    federation = config.federation()
    task = config.task(federation)
    unwritten = [directory / "config.toml"]

    def on_round(row: Row) -> None:
        if unwritten:  # `train` has taken possession of the directory by the first row
            write_durably(unwritten.pop(), config.to_toml().encode())
        show(row)

    method = config.method()
    with shown(config.rounds) as show:
        result = train(
            federation, task, method, **config.settings(), out=directory, resume=resume, on_round=on_round
        )
    if config.source == "tables":
        page = write_report(directory)
    else:  # who has how many records is private in real tables, and no secret of a published data set
        page = write_report(directory, federation.counts(), [silo.name for silo in federation.silos])
    return _summary(config, directory, result, page)


def _summary(config: RunConfig, directory: Path, result: Result, page: Path) -> dict[str, Any]:
    last: Row = next((row for row in reversed(result.metrics) if "metrics" in row), {})
    released = result.guarantees["released"]
    return {
        "name": config.name,
        "out": str(directory),
        "report": str(page),
        "method": released.method,
        "rounds": released.rounds,
        "stopped": result.stopped,
        "loss": last.get("loss"),
        "metrics": last.get("metrics", {}),
        "epsilon": released.epsilon,
        "delta": released.delta,
        "private": released.private,
        "releasable": released.releasable,
        "guarantees": {name: guarantee.to_dict() for name, guarantee in result.guarantees.items()},
        "in_words": [in_words(guarantee) for guarantee in result.guarantees.values()],
    }


def in_lines(summary: dict[str, Any]) -> list[str]:
    """A summary for reading."""
    utility = {"loss": summary["loss"], **summary["metrics"]}
    head = f"{summary['method']}, {summary['rounds']} rounds"
    if summary["stopped"] == "budget":
        head += " (stopped by the budget)"
    head += "".join(f", {name} {value:.4g}" for name, value in utility.items() if value is not None)
    lines = [head, *summary["in_words"]]
    if summary["private"] and not summary["releasable"]:
        lines.append("Not for release: the noise came from a fixed seed.")
    return [*lines, f"Report: {summary['report']}"]
