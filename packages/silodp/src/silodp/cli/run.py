"""`silodp run`: a configured run from data to report, its progress, and how to continue it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from silodp.accounting.guarantee import Guarantee
from silodp.aggregators.run_spec import RunSpec
from silodp.cli._console import Interrupted, format_command, log
from silodp.config.callbacks import make_callbacks
from silodp.config.resolve import ResolvedRun
from silodp.config.run_settings import RunSettings, load_settings
from silodp.config.schema import RunConfig
from silodp.config.toml_values import drop_empty_tables
from silodp.data.federation import Federation, count_persons_by_silos
from silodp.errors import SilodpError
from silodp.methods import Method
from silodp.planning.plan import warn_of_noise
from silodp.plugins import is_reference
from silodp.report.callbacks import KeepPrivateResults, WriteReport
from silodp.report.divergence import describe_refused, find_divergence
from silodp.report.formatting import as_number
from silodp.report.guarantee_text import describe_cover, describe_guarantee, format_guarantees
from silodp.report.run_record import format_versions
from silodp.report.skill import read_skill
from silodp.runtime.callback import Callback, Result, RoundResult
from silodp.runtime.cohort import CohortPlace
from silodp.runtime.data_warnings import list_data_warnings
from silodp.runtime.executor import THIS_PROCESS, Executor
from silodp.runtime.guarantees import delta_warning
from silodp.runtime.run_files import CONFIG, METRICS, MetricsRow, list_signatures, read_metrics
from silodp.runtime.simulation import Simulation
from silodp.runtime.train import run
from silodp.text import format_duration, pluralize
from silodp.tracking import Progress
from silodp.wire.files import write_durably

_LONG_SECONDS = 3600.0
"""A run that takes longer says so as soon as its speed is known."""


def run_config(
    resolved: ResolvedRun,
    directory: Path,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    cohort: Path | None = None,
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Train as configured, and write model, guarantee, metrics and report.

    Nothing is written, and no remark is made, before data, task, method and directory have been accepted.

    Args:
        resolved: The resolved configuration.
        directory: The directory to which everything is written.
        resume: Whether to continue the run in the directory.
        callbacks: What follows the run besides [[callbacks]] of the configuration.
        cohort: The file of the cohort in which the run is counted; None counts it nowhere.
        executor: Where the silos' parts are computed; None: in this process.

    Returns:
        A JSON-ready summary.

    Raises:
        SilodpError: The user has made a mistake that they can correct.
        Interrupted: on Ctrl-C, with the command that continues the run.
    """
    # Whether there was another run before this one began: its rounds are not to be continued by this configuration.
    existed = (directory / CONFIG).exists() and not resume
    try:
        return _run_config(resolved, directory, resume, callbacks, cohort, executor or THIS_PROCESS)
    except KeyboardInterrupt:
        raise Interrupted(_describe_interruption(directory, existed)) from None


class _RunLog(Callback):
    """What a run writes and says while it goes on: config.toml and remarks at its beginning, then its rounds.

    config.toml is written with the first row, when the run holds the lock of its directory: a run that is refused
    leaves the file as it is.
    """

    def __init__(
        self, config: RunConfig, directory: Path, changes: Sequence[str], remarks: Sequence[str]
    ) -> None:
        self.begun = False
        self._config, self._path = config, directory / CONFIG
        self._changes, self._remarks = changes, remarks
        self._is_estimated = False

    def _begin(self, rounds: int) -> None:
        """Write config.toml after so many rounds, and the remarks."""
        self.begun = True
        header = [f"# Written by {format_versions()}.", *_read_change_notes(self._path)]
        if self._changes:
            header.append(f"# After round {rounds}: {'; '.join(self._changes)}.")
        write_durably(self._path, "\n".join([*header, self._config.to_toml()]).encode())
        for remark in self._remarks:
            log(remark)

    def after_round(self, result: RoundResult) -> None:
        """Note a row; as soon as the speed of the run is known, tell of one that takes long."""
        if not self.begun:
            self._begin(max(result.round - 1, 0))
        if result.seconds_left is None or self._is_estimated:
            return
        self._is_estimated = True
        if result.seconds_left > _LONG_SECONDS:
            log(
                f"note: at this speed the other {pluralize(result.rounds - result.round, 'round')} take about "
                f"{format_duration(result.seconds_left)}; Ctrl-C stops the run, which can be resumed"
            )

    def on_end(self, result: Result | None) -> None:
        """Tell where no round was left to do; a run of a program in Python, which has no config.toml, gets one."""
        if result is None or self.begun:
            return
        if not self._path.exists():
            self._begin(result.guarantees["released"].rounds)
        else:
            log(f"note: no round was left to do, and {self._path} is unchanged")


def _run_config(
    resolved: ResolvedRun,
    directory: Path,
    resume: bool,
    callbacks: Sequence[Callback],
    cohort: Path | None,
    executor: Executor,
) -> dict[str, Any]:
    config, method = resolved.config, resolved.method
    _check_before_reading(resolved)
    # Made before data are read and the run begins, so that a missing package is refused and does not cost a run.
    callbacks = [*make_callbacks(config.callbacks), *callbacks]
    federation = resolved.load_federation()
    task = resolved.build_task(federation)
    previous = _find_previous(directory) if resume else None
    changes = [] if previous is None else _list_changes(config, previous.config)
    data_warnings = list_data_warnings(federation, task, method)
    remarks = [
        *_list_remarks(resolved, federation, directory, changes),
        *(f"warning: {warning}" for warning in data_warnings),
    ]
    written = WriteReport(directory)
    private = KeepPrivateResults(resolved, federation, task, data_warnings, directory)
    run_log = _RunLog(config, directory, changes, remarks)
    try:
        spec = resolved.prepare(federation, task)
        if (warning := warn_of_noise(spec)) is not None:
            remarks.append(f"warning: {warning}")
        result = run(
            spec,
            Simulation(federation, task, executor),
            out=directory,
            resume=resume,
            evaluate_every=config.evaluate_every,
            # They end in the reverse order: the report is written last.
            callbacks=[written, private, run_log, Progress(), *callbacks],
            cohort=None if cohort is None else CohortPlace(cohort, federation.persons),
        )
    except SilodpError as error:
        if changes and not run_log.begun:
            error.args = (
                f"{error} Different from {directory / CONFIG}: {'; '.join(changes)}."
                f"{_explain_rounds(method, previous)}",
            )
        raise
    summary = _summarize(config, directory, result, written)
    summary["warnings"] += _find_warnings(resolved, spec, federation, result.guarantees["released"])
    if signed := list_signatures(directory):
        names = ", ".join(path.name for path in signed)
        summary["warnings"].append(
            f"{directory} was signed ({names}), and its files were written again: see 'silodp report DIR --verify'"
        )
    for warning in [*summary["warnings"], *([] if run_log.begun else data_warnings)]:
        log(f"warning: {warning}")
    summary["warnings"] += data_warnings
    summary["persons_by_silos"] = count_persons_by_silos(federation)
    return summary


def _check_before_reading(resolved: ResolvedRun) -> None:
    """Refuse a run that fails by its public constants before any record is read: grid, ring, settings of clients."""
    # Reading tables takes minutes; and what they hold should not decide whether settings are refused.
    if resolved.method.unit != "record" and resolved.read_public_data().users is None:
        return  # the size of sums depends on U
    spec, _ = resolved.build_public_spec()
    spec.aggregator.check(spec)
    spec.round_events()


def _list_remarks(
    resolved: ResolvedRun, federation: Federation, directory: Path, changes: list[str]
) -> list[str]:
    """Return notes for the beginning of a run."""
    resumed = f"note: resumed with changes to {directory / CONFIG}: {'; '.join(changes)}"
    unmeasured = (
        "note: there are no held-out records, so nothing is measured: hold out a share of the persons "
        "(data.schema.test_share)"
    )
    series = resolved.evaluation
    local = series and series.describe_start(directory / "checkpoint" / "silo_metrics")
    is_unmeasured = not federation.test and resolved.method.releases_model
    return [resumed] * bool(changes) + [unmeasured] * is_unmeasured + [f"note: {local}"] * bool(local)


def _find_warnings(
    resolved: ResolvedRun, spec: RunSpec, federation: Federation, released: Guarantee
) -> Iterator[str]:
    """Yield what a reader of the results has to know besides the guarantees."""
    budgets, unit = spec.method.budgets, spec.method.budgets.unit
    arrays = [federation.user_budgets] if unit == "user" else [silo.budget for silo in federation.silos]
    if unit is not None:
        given = np.concatenate([budget for budget in arrays if budget is not None])
        # Only the log of their silo says which units never take part.
        if infeasible := budgets.count_infeasible(given):
            # A plan reads no tables, so budgets in a column are only in the report.
            shows = "the report" if resolved.budget_distribution is None else "'silodp plan'"
            units = "records" if unit == "record" else "persons"
            yield (
                f"{infeasible:,} of {len(given):,} {units} take no part: their privacy budgets are too small for any "
                f"sampling probability or clip ({shows} shows which; more noise, fewer rounds or fewer steps include "
                "them)"
            )
    planned = budgets.retires_after
    if planned is not None and released.rounds > planned:
        yield (
            f"privacy budgets were planned for {pluralize(planned, 'round')} and there were {released.rounds:,}: "
            "records retired when their budgets were used up, many of them soon after that, and later rounds trained "
            "on fewer records or none (without method.rounds, the number is that of the run)"
        )
    if not released.private:
        return
    yield from (one.text for one in delta_warning(spec.delta, spec.population.users))
    # Constants of private rows, by which a data set scales its features.
    for one in resolved.dataset.scaling_assumptions:
        if one in federation.assumptions:
            yield f"no ε covers the scaling: {one.text}"
    most = int(federation.counts().sum(0).max(initial=0))
    if spec.method.unit == "record" and most > 1:
        yield (
            f"ε is for one record, and in these tables a person has up to {most:,}: their ε is larger (see ε of a "
            "person with several records); a method whose unit is a person, such as uldp-avg, protects all of them"
        )


def _summarize(
    config: RunConfig,
    directory: Path,
    result: Result,
    written: WriteReport,
) -> dict[str, Any]:
    # Not every round is evaluated: the last row with metrics, which may be that of an earlier round.
    last: MetricsRow = next((row for row in reversed(result.metrics) if "metrics" in row), {})
    estimates = (last.get("evaluation") or {}).get("estimates", {})
    errors = {name: as_number(one["standard_error"]) for name, one in estimates.items()}
    released, skill, attacks = result.guarantees["released"], read_skill(directory), written.run.attacks
    return {
        "name": config.name,
        "out": str(directory),
        "report": str(written.page),
        "card": None if written.card is None else str(written.card),
        "method": released.method,
        "aggregator": config.aggregator,
        "rounds": released.rounds,
        "stopped": result.stopped,
        "loss": as_number(last.get("loss")),
        "metrics": {name: as_number(value) for name, value in last.get("metrics", {}).items()},
        "skill": None if skill is None else skill.to_dict(),
        "verdict": [] if skill is None else skill.describe(),
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
        *summary["verdict"],
        *summary["in_words"],
    ]
    if summary["private"] and not summary["releasable"]:
        lines.append("Not for release: the noise came from a fixed seed.")
    persons = ", ".join(
        f"{persons:,} in {pluralize(silos, 'silo') if silos else 'no silo'}"
        for silos, persons in summary["persons_by_silos"].items()
    )
    lines.append(f"Persons with training records (private, not for release): {persons}.")
    card = [] if summary["card"] is None else [f"Model card: {summary['card']}"]
    return [*lines, *summary["beyond"], f"Report: {summary['report']}", *card]


def _format_errors(errors: Mapping[str, float | None], is_private: bool) -> list[str]:
    """Return the line on metrics by noisy sums; none where metrics are measured in another way."""
    if not errors:
        return []
    found = ", ".join(f"{name} {error:.2g}" for name, error in errors.items() if error is not None)
    return [
        f"Metrics by noisy sums, which {describe_cover(is_private)}. Standard error of their noise: {found} (a 95 % "
        "interval is twice as wide to each side)."
    ]


# --- runs that were stopped ----------------------------------------------------------------------------------------


def _describe_interruption(directory: Path, is_other: bool) -> str:
    """Return the line after Ctrl-C: the last round, and the command that continues.

    Args:
        directory: Directory of the run.
        is_other: Whether the run in it is another one, and this one has not begun.
    """
    if is_other or not (directory / CONFIG).exists():
        return f"interrupted before the first round; start again, in another directory if {directory} exists"
    command = format_command("run", directory, "--resume")
    return f"interrupted after round {_find_last_round(directory)}; continue with: {command}"


def _find_last_round(directory: Path) -> int:
    """Return the round of the last whole line of metrics.jsonl; an interruption may cut the last line off."""
    with suppress(OSError, SilodpError):
        return max(0, len(read_metrics(directory / METRICS, may_be_cut_off=True)) - 1)
    return 0


def _read_change_notes(path: Path) -> list[str]:
    """Return the comments in config.toml on changes when the run was resumed before."""
    with suppress(OSError, UnicodeDecodeError):
        lines = path.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.startswith("# After round ")]
    return []


def _find_previous(directory: Path) -> RunSettings | None:
    """Return the settings of the run in a directory; None for a run from Python, which has none."""
    with suppress(SilodpError):
        return load_settings(directory / CONFIG)
    return None


def _list_changes(config: RunConfig, previous: RunConfig) -> list[str]:
    """Return the keys in which a configuration differs from the one before, each with both values.

    Raises:
        SilodpError: The loss, or an option of the model, is another than before (code checkpoint.setup).
    """
    # As config.toml has them, without empty tables: an empty table and a missing one are the same task.
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
    # As JSON, in which a tuple and a list with the same items are equal.
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


def _explain_rounds(method: Method, previous: RunSettings | None) -> str:
    """Return a sentence for a run that is resumed with other rounds than its privacy budgets were planned for."""
    before = None if previous is None else previous.method.budgets.planned_rounds
    if before is None or method.budgets.planned_rounds == before:
        return ""
    table = "method.personal" if method.budgets.unit == "user" else "method"
    return (
        f" Its privacy budgets were planned for {pluralize(before, 'round')}, and spent ε cannot be planned again: "
        f"resume with rounds = {before}, or with {table}.rounds = {before}."
    )
