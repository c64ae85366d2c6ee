"""A configured run from data to report, and what to say about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from silodp.accounting.accountant import MembershipAttack
from silodp.accounting.guarantee import Adversary
from silodp.aggregators.run_spec import RunSpec
from silodp.cli._resuming import (
    budgeted_rounds,
    differences,
    how_to_go_on,
    notes_of,
    previous_budgeted_rounds,
)
from silodp.cli.progress import Interrupted, describe_guarantee, log, progress_bar
from silodp.config.public_spec import build_public_spec
from silodp.config.schema import RunConfig
from silodp.data.federation import Federation, count_persons_by_silos, find_linkage_doubts
from silodp.errors import SilodpError, counted
from silodp.methods import Method
from silodp.report import guarantee_text
from silodp.report.divergence import divergence_warnings, left_out
from silodp.report.formatting import as_number
from silodp.report.page import write_report
from silodp.report.run_record import read_run, versions
from silodp.runtime.prepare import prepare_run
from silodp.runtime.simulation import Simulation
from silodp.runtime.train import MetricsRow, Result, run
from silodp.wire.store import write_durably


def run_config(config: RunConfig, directory: Path, resume: bool = False) -> dict[str, Any]:
    """Train as configured, write everything to `directory`; the JSON-ready summary.

    Nothing is written, and no remark made, before data, task, method and directory have been accepted.

    Raises:
        SilodpError: for any mistake its maker can mend.
        Interrupted: on Ctrl-C, with the command that goes on.
    """
    method = config.method()
    _check_before_reading(config, method)
    federation = config.federation()
    task = config.task(federation)
    changed = differences(config, directory) if resume else []
    remarks = _remarks(federation, directory, changed)
    begun = False

    def begin(played: int) -> None:
        nonlocal begun
        begun = True
        header = [f"# Written by {versions()}.", *notes_of(directory)]
        if changed:
            header.append(f"# After round {played}: {'; '.join(changed)}.")
        text = "\n".join([*header, config.to_toml()])
        write_durably(directory / "config.toml", text.encode())
        for remark in remarks:
            log(remark)

    def on_round(row: MetricsRow) -> None:
        if not begun:  # `run` has taken possession of the directory by the first row
            begin(max(row["round"] - 1, 0))
        show(row)

    try:
        with progress_bar(config.rounds) as show:
            spec = prepare_run(federation, task, method, **config.settings())
            result = run(
                spec,
                Simulation(federation, task),
                out=directory,
                resume=resume,
                evaluate_every=config.evaluate_every,
                on_round=on_round,
            )
        if not begun and not (directory / "config.toml").exists():  # a program in Python did all rounds
            begin(result.guarantees["released"].rounds)
        elif not begun:  # nothing was done as this configuration says
            log(f"note: no round was left to do, and {directory / 'config.toml'} stays as it was")
        if config.dataset.is_published:
            page = write_report(directory, federation.counts(), [silo.name for silo in federation.silos])
        else:  # who has how many records is private
            page = write_report(directory)
    except KeyboardInterrupt:
        raise Interrupted(how_to_go_on(directory)) from None
    except SilodpError as error:
        if changed and not begun:
            laid_out = _laid_out_anew(config, directory)
            raise SilodpError(
                f"{error} Unlike {directory / 'config.toml'}: {'; '.join(changed)}.{laid_out}",
                code=error.code,
                field=error.field,
            ) from None
        raise
    audit = read_run(directory).audit
    summary = _summary(config, directory, result, page, {} if audit is None else audit.attacks)
    summary["warnings"] += _left_out(config, spec, federation) + _retired(method, summary["rounds"])
    if method.unit == "user":
        summary["warnings"] += find_linkage_doubts(federation)
    summary["persons_by_silos"] = count_persons_by_silos(federation)
    for warning in summary["warnings"]:
        log(f"warning: {warning}")
    return summary


def _check_before_reading(config: RunConfig, method: Method) -> None:
    """Refuse what public constants alone show not to work, before any record is read: grid, ring, clients' settings."""
    if method.unit != "record" and config.public_data().users is None:
        return  # how much room sums need depends on U
    spec, _ = build_public_spec(config)
    spec.aggregator.check(spec)
    spec.round_events()


def _remarks(federation: Federation, directory: Path, changed: list[str]) -> list[str]:
    """What someone should know from the start."""
    remarks = []
    if changed:
        remarks.append(f"note: resumed unlike {directory / 'config.toml'}: {'; '.join(changed)}")
    if federation.test is None or len(federation.test) == 0:
        remarks.append(
            "note: no records are held out, so nothing will be measured: mark some as 'test' in a split column "
            "(data.schema.split)"
        )
    return remarks


def _left_out(config: RunConfig, spec: RunSpec, federation: Federation) -> list[str]:
    """How many units never took part because their budgets are too small; whose they are only the silo's log says."""
    unit = spec.method.budget_unit
    if unit is None:
        return []
    own = [federation.user_budgets] if unit == "user" else [silo.budget for silo in federation.silos]
    budgets = np.concatenate([budget for budget in own if budget is not None])
    left_out = spec.method.count_infeasible(budgets) or 0
    if not left_out:
        return []
    # A plan reads no tables: of budgets in a column only the report knows.
    shows = "the report shows" if config.preferences() is None else "'silodp plan' shows"
    people = "records" if unit == "record" else "persons"
    return [
        f"{left_out:,} of {len(budgets):,} {people} take no part: their budgets are too small for any sampling "
        f"probability or clip ({shows} which; more noise, fewer rounds or steps would let them in)"
    ]


def _retired(method: Method, played: int) -> list[str]:
    """That more rounds were played than records' budgets were laid out over, so that records fell away."""
    if method.retires_after is None or played <= method.retires_after:
        return []
    return [
        f"budgets were laid out over {counted(method.retires_after, 'round')} and {played:,} were played: records "
        "retired as their budgets were used up, many of them right after that, and what followed was trained "
        "on fewer records or none (leave method.rounds out, and it is the run's)"
    ]


def _laid_out_anew(config: RunConfig, directory: Path) -> str:
    """A sentence for who resumes with other rounds a run whose budgets were laid out over their number."""
    now, before = budgeted_rounds(config), previous_budgeted_rounds(directory)
    if before is None or now == before:
        return ""
    personal = config.method().budget_unit == "user"
    return (
        f" Its budgets were laid out over {counted(before, 'round')}, and nothing of what was spent can be laid out "
        f"anew: resume with rounds = {before}, or with method{'.personal' if personal else ''}.rounds = {before}."
    )


def _summary(
    config: RunConfig,
    directory: Path,
    result: Result,
    page: Path,
    attacks: Mapping[Adversary, MembershipAttack],
) -> dict[str, Any]:
    last: MetricsRow = next((row for row in reversed(result.metrics) if "metrics" in row), {})
    released = result.guarantees["released"]
    return {
        "name": config.name,
        "out": str(directory),
        "report": str(page),
        "method": released.method,
        "aggregator": config.aggregator_name,
        "rounds": released.rounds,
        "stopped": result.stopped,
        "loss": as_number(last.get("loss")),
        "metrics": {name: as_number(value) for name, value in last.get("metrics", {}).items()},
        "warnings": [*divergence_warnings(result.metrics), *left_out(result.metrics)],
        "epsilon": released.epsilon,
        "delta": released.delta,
        "private": released.private,
        "releasable": released.releasable,
        "guarantees": {name: guarantee.to_dict() for name, guarantee in result.guarantees.items()},
        "attacks": {adversary: asdict(attack) for adversary, attack in attacks.items()},
        "in_words": [describe_guarantee(said, attacks.get(name)) for name, said in result.guarantees.items()],
        "beyond": guarantee_text.format_text(list(result.guarantees.values())),
    }


def format_text(summary: dict[str, Any]) -> list[str]:
    """A summary for reading."""
    utility = {"loss": summary["loss"], **summary["metrics"]}
    head = f"{summary['method']}, {counted(summary['rounds'], 'round')}"
    if summary["stopped"] == "budget":
        head += " (stopped by the budget)"
    head += "".join(f", {name} {value:.4g}" for name, value in utility.items() if value is not None)
    lines = [head, *summary["in_words"]]
    if summary["private"] and not summary["releasable"]:
        lines.append("Not for release: the noise came from a fixed seed.")
    lines.append(_persons_in_words(summary["persons_by_silos"]))
    return [*lines, *summary["beyond"], f"Report: {summary['report']}"]


def _persons_in_words(by_silos: dict[int, int]) -> str:
    """How many persons are in how many silos: counts of private records."""
    parts = [
        f"{persons:,} in {counted(silos, 'silo') if silos else 'no silo'}"
        for silos, persons in by_silos.items()
    ]
    return f"Persons with training records (private, not for release): {', '.join(parts)}."
