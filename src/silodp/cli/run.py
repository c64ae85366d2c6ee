"""`silodp run`: a configured run from data to report, its progress, and how to continue it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from silodp.accounting.accountant import MembershipAttack
from silodp.accounting.views import Adversary
from silodp.aggregators.run_spec import RunSpec
from silodp.cli._console import Interrupted, format_command, log
from silodp.config.plugins import is_reference
from silodp.config.resolve import ResolvedRun, load_config
from silodp.config.schema import RunConfig
from silodp.config.toml_values import drop_empty_tables
from silodp.data.federation import Federation, count_persons_by_silos
from silodp.errors import SilodpError
from silodp.methods import Method
from silodp.report.divergence import describe_refused, find_divergence
from silodp.report.formatting import as_number
from silodp.report.guarantee_text import describe_cover, describe_guarantee, format_guarantees
from silodp.report.held_out import keep_held_out, measure_held_out
from silodp.report.model_card import write_card
from silodp.report.page import write_report
from silodp.report.run_record import format_versions, keep_doubts, read_run
from silodp.runtime.guarantees import delta_warning
from silodp.runtime.model_description import CARD
from silodp.runtime.prepare import find_doubts
from silodp.runtime.run_files import METRICS, read_metrics
from silodp.runtime.simulation import Simulation
from silodp.runtime.train import MetricsRow, OnRound, Result, RoundResult, run
from silodp.text import pluralize
from silodp.tracking import describe_round, format_duration, open_trackers, print_progress
from silodp.wire.files import write_durably

_LONG_SECONDS = 3600.0
"""A run that takes longer says so as soon as its speed is known."""


def run_config(
    resolved: ResolvedRun,
    directory: Path,
    resume: bool = False,
    trackers: Sequence[str] = (),
    log_private: bool | None = None,
) -> dict[str, Any]:
    """Train as configured, and write model, guarantee, metrics and report.

    Nothing is written, and no remark is made, before data, task, method and directory have been accepted.

    Args:
        resolved: The resolved configuration.
        directory: The directory to which everything is written.
        resume: Whether to continue the run in the directory.
        trackers: Trackers as NAME or NAME=TARGET, see `silodp.tracking.make_tracker`.
        log_private: Whether trackers log what no ε covers; None: only if their target is on this machine.

    Returns:
        A JSON-ready summary.

    Raises:
        SilodpError: The user has made a mistake that they can correct.
        Interrupted: on Ctrl-C, with the command that continues the run.
    """
    existed = (directory / "config.toml").exists() and not resume
    try:
        return _run_config(resolved, directory, resume, trackers, log_private)
    except KeyboardInterrupt:
        raise Interrupted(_describe_interruption(directory, existed)) from None


def _run_config(
    resolved: ResolvedRun, directory: Path, resume: bool, trackers: Sequence[str], log_private: bool | None
) -> dict[str, Any]:
    config, method = resolved.config, resolved.method
    _check_before_reading(resolved)
    federation = resolved.load_federation()
    task = resolved.build_task(federation)
    previous = _find_previous(directory) if resume else None
    changes = []
    if previous is not None:
        _check_task(config, previous.config)
        changes = _list_changes(config, previous.config)
    doubts = find_doubts(federation, task, method)
    remarks = [*_list_remarks(federation, directory, changes), *(f"warning: {doubt}" for doubt in doubts)]
    begun = is_estimated = False

    def begin(done: int) -> None:
        nonlocal begun
        begun = True
        header = [f"# Written by {format_versions()}.", *_read_change_notes(directory)]
        if changes:
            header.append(f"# After round {done}: {'; '.join(changes)}.")
        text = "\n".join([*header, config.to_toml()])
        write_durably(directory / "config.toml", text.encode())
        for remark in remarks:
            log(remark)

    def on_round(done: RoundResult) -> None:
        if not begun:  # the run holds the lock of the directory when it makes its first row
            begin(max(done.round - 1, 0))
        show(done)
        nonlocal is_estimated
        if done.seconds_left is not None and not is_estimated:
            is_estimated = True
            if done.seconds_left > _LONG_SECONDS:
                log(
                    f"note: at this speed the other {pluralize(done.rounds - done.round, 'round')} take about "
                    f"{format_duration(done.seconds_left)}; Ctrl-C stops the run, which can be resumed"
                )
        log_round(done)

    try:
        with (
            show_progress(config.rounds) as show,
            open_trackers(trackers, directory, private=log_private) as log_round,
        ):
            spec = resolved.prepare(federation, task)
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
        elif not begun:  # no round used this configuration
            log(f"note: no round was left to do, and {directory / 'config.toml'} is unchanged")
        if config.evaluation is None:
            groups = {} if config.card is None else config.card.subgroups
            rounds = result.guarantees["released"].rounds
            held_out = measure_held_out(federation, task, result.params, rounds, groups)
            if held_out is not None:
                keep_held_out(directory, held_out)
        keep_doubts(directory, doubts)
        if resolved.dataset.is_published:
            page = write_report(directory, federation.counts(), [silo.name for silo in federation.silos])
        else:  # the number of records of each person is private
            page = write_report(directory)
    except SilodpError as error:
        if changes and not begun:
            raise SilodpError(
                f"{error} Different from {directory / 'config.toml'}: {'; '.join(changes)}."
                f"{_explain_rounds(method, previous)}",
                code=error.code,
                field=error.field,
            ) from None
        raise
    record = read_run(directory)
    write_card(directory, record)
    audit = record.audit
    summary = _summarize(config, directory, result, page, {} if audit is None else audit.attacks)
    summary["warnings"] += _warn_infeasible(resolved, spec, federation) + _warn_retired(
        method, summary["rounds"]
    )
    if summary["private"]:
        summary["warnings"] += delta_warning(spec.delta, spec.population.users)
        summary["warnings"] += _warn_scaling(resolved, federation) + _warn_several_records(spec, federation)
    for warning in [*summary["warnings"], *([] if begun else doubts)]:
        log(f"warning: {warning}")
    summary["warnings"] += doubts
    summary["persons_by_silos"] = count_persons_by_silos(federation)
    return summary


def _check_before_reading(resolved: ResolvedRun) -> None:
    """Refuse a run that fails by its public constants before any record is read: grid, ring, settings of clients."""
    if resolved.method.unit != "record" and resolved.read_public_data().users is None:
        return  # the size of sums depends on U
    spec, _ = resolved.build_public_spec()
    spec.aggregator.check(spec)
    spec.round_events()


def _list_remarks(federation: Federation, directory: Path, changes: list[str]) -> list[str]:
    """Return notes for the beginning of a run."""
    remarks = []
    if changes:
        remarks.append(f"note: resumed with changes to {directory / 'config.toml'}: {'; '.join(changes)}")
    if federation.test is None or len(federation.test) == 0:
        remarks.append(
            "note: there are no held-out records, so nothing is measured: hold out a share of the "
            "persons (data.schema.test_share)"
        )
    return remarks


def _warn_infeasible(resolved: ResolvedRun, spec: RunSpec, federation: Federation) -> list[str]:
    """Warn of units that never took part because of their budgets; only the log of their silo says which."""
    unit = spec.method.budgets.unit
    if unit is None:
        return []
    arrays = [federation.user_budgets] if unit == "user" else [silo.budget for silo in federation.silos]
    budgets = np.concatenate([budget for budget in arrays if budget is not None])
    infeasible = spec.method.budgets.count_infeasible(budgets) or 0
    if not infeasible:
        return []
    # A plan reads no tables, so budgets in a column are only in the report.
    shows = "the report" if resolved.budget_distribution is None else "'silodp plan'"
    units = "records" if unit == "record" else "persons"
    return [
        f"{infeasible:,} of {len(budgets):,} {units} take no part: their privacy budgets are too small for any "
        f"sampling probability or clip ({shows} shows which; more noise, fewer rounds or fewer steps include them)"
    ]


def _warn_scaling(resolved: ResolvedRun, federation: Federation) -> list[str]:
    """Warn of features that are scaled by constants of private rows."""
    text = resolved.dataset.private_scaling
    return [f"no ε covers the scaling: {text}"] if text and text in federation.assumptions else []


def _warn_several_records(spec: RunSpec, federation: Federation) -> list[str]:
    """Warn where records are protected, and persons have several."""
    if spec.method.unit != "record":
        return []
    most = int(federation.counts().sum(0).max(initial=0))
    if most < 2:
        return []
    return [
        f"ε is for one record, and in these tables a person has up to {most:,}: their ε is larger (see "
        "ε of a person with several records); a method whose unit is a person, such as uldp-avg, protects all of them"
    ]


def _warn_retired(method: Method, rounds: int) -> list[str]:
    """Warn of more rounds than the budgets of records were planned for, so that records retired."""
    planned = method.budgets.retires_after
    if planned is None or rounds <= planned:
        return []
    return [
        f"privacy budgets were planned for {pluralize(planned, 'round')} and there were {rounds:,}: records "
        "retired when their budgets were used up, many of them soon after that, and later rounds trained on fewer "
        "records or none (without method.rounds, the number is that of the run)"
    ]


def _summarize(
    config: RunConfig,
    directory: Path,
    result: Result,
    page: Path,
    attacks: Mapping[Adversary, MembershipAttack],
) -> dict[str, Any]:
    last: MetricsRow = next((row for row in reversed(result.metrics) if "metrics" in row), {})
    estimates = (last.get("evaluation") or {}).get("estimates", {})
    errors = {name: as_number(one["standard_error"]) for name, one in estimates.items()}
    released = result.guarantees["released"]
    return {
        "name": config.name,
        "out": str(directory),
        "report": str(page),
        "card": str(directory / CARD),
        "method": released.method,
        "aggregator": config.aggregator,
        "rounds": released.rounds,
        "stopped": result.stopped,
        "loss": as_number(last.get("loss")),
        "metrics": {name: as_number(value) for name, value in last.get("metrics", {}).items()},
        **({"standard_errors": errors} if errors else {}),
        "warnings": [*find_divergence(result.metrics), *describe_refused(result.metrics)],
        "epsilon": released.epsilon,
        "delta": released.delta,
        "private": released.private,
        "releasable": released.releasable,
        "guarantees": {name: guarantee.to_dict() for name, guarantee in result.guarantees.items()},
        "attacks": {adversary: asdict(attack) for adversary, attack in attacks.items()},
        "in_words": [
            describe_guarantee(guarantee, attacks.get(name)) for name, guarantee in result.guarantees.items()
        ],
        "beyond": format_guarantees(list(result.guarantees.values())),
    }


def format_summary(summary: dict[str, Any]) -> list[str]:
    """Return a summary as lines of text."""
    results = {"loss": summary["loss"], **summary["metrics"]}
    head = f"{summary['method']}, {pluralize(summary['rounds'], 'round')}"
    if summary["stopped"] == "budget":
        head += " (stopped by the privacy budget)"
    head += "".join(f", {name} {value:.4g}" for name, value in results.items() if value is not None)
    lines = [
        head,
        *_format_errors(summary.get("standard_errors", {}), summary["private"]),
        *summary["in_words"],
    ]
    if summary["private"] and not summary["releasable"]:
        lines.append("Not for release: the noise came from a fixed seed.")
    persons = ", ".join(
        f"{persons:,} in {pluralize(silos, 'silo') if silos else 'no silo'}"
        for silos, persons in summary["persons_by_silos"].items()
    )
    lines.append(f"Persons with training records (private, not for release): {persons}.")
    return [*lines, *summary["beyond"], f"Report: {summary['report']}", f"Model card: {summary['card']}"]


def _format_errors(errors: Mapping[str, float | None], is_private: bool) -> list[str]:
    """Return the line on metrics by noisy sums; none where metrics are measured in another way."""
    if not errors:
        return []
    found = ", ".join(f"{name} {error:.2g}" for name, error in errors.items() if error is not None)
    return [
        f"Metrics by noisy sums, which {describe_cover(is_private)}. Standard error of their noise: {found}."
    ]


# --- progress ------------------------------------------------------------------------------------------------------


@contextmanager
def show_progress(rounds: int) -> Iterator[OnRound]:
    """Yield a function that shows the result of a round: a progress bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield print_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=rounds)
        seen: dict[str, Any] = {"loss": None, "metrics": {}}

        def show_bar(done: RoundResult) -> None:
            if done.metrics or done.loss is not None:  # they stay visible between evaluations
                seen.update(loss=done.loss, metrics=done.metrics)
            progress.update(bar, completed=done.round, description=describe_round(replace(done, **seen)))

        yield show_bar


# --- runs that were stopped ----------------------------------------------------------------------------------------


def _describe_interruption(directory: Path, is_other: bool) -> str:
    """Return the line after Ctrl-C: the last round, and the command that continues.

    Args:
        directory: Directory of the run.
        is_other: Whether the run in it is another one, and this one has not begun.
    """
    if is_other or not (directory / "config.toml").exists():
        return f"interrupted before the first round; start again, in another directory if {directory} exists"
    command = format_command("run", directory, "--resume")
    return f"interrupted after round {_find_last_round(directory)}; continue with: {command}"


def _find_last_round(directory: Path) -> int:
    """Return the round of the last whole line of metrics.jsonl; an interruption may cut the last line off."""
    with suppress(OSError, SilodpError):
        return max(0, len(read_metrics(directory / METRICS, may_be_cut_off=True)) - 1)
    return 0


def _read_change_notes(directory: Path) -> list[str]:
    """Return the comments in config.toml on changes when the run was resumed before."""
    with suppress(OSError, UnicodeDecodeError):
        lines = (directory / "config.toml").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.startswith("# After round ")]
    return []


def _find_previous(directory: Path) -> ResolvedRun | None:
    """Return the configuration in a directory; None for a run from Python, which has none."""
    with suppress(SilodpError):
        return load_config(directory / "config.toml")
    return None


def _check_task(config: RunConfig, previous: RunConfig) -> None:
    """Refuse to go on with another loss, or other options of the model.

    Raises:
        SilodpError: The loss or the options are others than before (code checkpoint.setup).
    """
    # As config.toml has them, without empty tables.
    tasks = [drop_empty_tables(each.task.model_dump(exclude_none=True)) for each in (previous, config)]
    for field in ("options", "loss", "loss_options"):
        before, after = (task.get(field) for task in tasks)
        is_code = all(isinstance(value, str) and is_reference(value) for value in (before, after))
        if before != after and not is_code:  # code may have been moved
            raise SilodpError(
                f"task.{field} was {_format_value(before)}, and is {_format_value(after)} now: a run goes on with the "
                "task that it began with; take the change back, or begin a new run.",
                code="checkpoint.setup",
                field=f"task.{field}",
            )


def _list_changes(config: RunConfig, previous: RunConfig) -> list[str]:
    """Return the keys in which a configuration differs from the one before, each with both values."""
    old, new = (_flatten(each.model_dump(mode="json")) for each in (previous, config))
    return [
        f"{key} was {_format_value(old.get(key))}, now {_format_value(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _format_value(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def _explain_rounds(method: Method, previous: ResolvedRun | None) -> str:
    """Return a sentence for a run that is resumed with other rounds than its privacy budgets were planned for."""
    before = None if previous is None else previous.method.budgets.planned_rounds
    if before is None or method.budgets.planned_rounds == before:
        return ""
    table = "method.personal" if method.budgets.unit == "user" else "method"
    return (
        f" Its privacy budgets were planned for {pluralize(before, 'round')}, and spent ε cannot be planned again: "
        f"resume with rounds = {before}, or with {table}.rounds = {before}."
    )
