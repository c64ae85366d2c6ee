"""The files of a finished run, read back and checked; a missing or damaged file is one sentence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import FiniteFloat, TypeAdapter

from silodp._lazy import find_version
from silodp.accounting.guarantee import FORMAT, Guarantee
from silodp.accounting.ledger import Budget
from silodp.accounting.trade_off import MembershipAttack
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.aggregators.registry import AggregatorRecord
from silodp.config.build import build_aggregator
from silodp.errors import SilodpError
from silodp.parsing import MALFORMED, is_format, parse_json, parse_toml, refuse_malformed
from silodp.plugins import refuse_plugins
from silodp.report.audit import AuditResult, audit_run
from silodp.report.cohort import CohortRecord, read_cohort
from silodp.report.guarantee_text import is_valid_guarantee
from silodp.report.sections import Alarm, ReportSection, read_sections
from silodp.runtime.model_description import DESCRIPTION, WEIGHTS, ModelDescription
from silodp.runtime.run_files import GUARANTEE, METRICS, MetricsRow, read_metrics
from silodp.wire.files import write_durably

_T = TypeVar("_T")

ALLOCATION, DATA_WARNINGS = "allocation.json", "data_warnings.json"
HELD_OUT = "held_out.json"
"""A private file in DIR/plots, beside the pictures; a report is written without it where it is deleted."""
MAX_BARS = 400
"""Of an `Allocation`, however many persons there are."""


@dataclass(frozen=True)
class Allocation:
    """Records per person and silo, ranked by the total of the person; private, but without ids.

    Attributes:
        silos: S names.
        bars: (S, B), records per person of rank b in each silo, an average over `persons_per_bar[b]` persons of
            neighboring ranks; B is at most `MAX_BARS`.
        persons_per_bar: (B,).
        persons: Number of persons U.
        without_records: Persons without any record.
        in_several_silos: Persons with records in more than one silo.
        most_records: The largest number of records of one person.
    """

    silos: tuple[str, ...]
    bars: tuple[tuple[FiniteFloat, ...], ...]
    persons_per_bar: tuple[int, ...]
    persons: int
    without_records: int
    in_several_silos: int
    most_records: int

    def __post_init__(self) -> None:
        if list(map(len, self.bars)) != [len(self.persons_per_bar)] * len(self.silos):
            # The file was damaged or edited.
            raise ValueError("bars of another shape")

    @classmethod
    def from_counts(cls, counts: NDArray[np.int64], names: Sequence[str] = ()) -> Allocation:
        """Rank and average counts (S, U); persons without records are counted, but have no bar."""
        silos = tuple(names) or tuple(f"silo {s + 1}" for s in range(len(counts)))
        # Averages over neighboring ranks bound the size of the file and of the picture, and name no single person.
        totals = counts.sum(axis=0)
        ranked = np.argsort(-totals, kind="stable")[: int((totals > 0).sum())]
        groups = [g for g in np.array_split(ranked, min(MAX_BARS, max(len(ranked), 1))) if len(g)]
        bars = [[round(float(row[group].mean()), 4) for group in groups] for row in counts]
        return cls(
            silos=silos,
            bars=tuple(tuple(row) for row in bars),
            persons_per_bar=tuple(len(group) for group in groups),
            persons=int(counts.shape[1]),
            without_records=int((totals == 0).sum()),
            in_several_silos=int(((counts > 0).sum(axis=0) > 1).sum()),
            most_records=int(totals.max(initial=0)),
        )


@dataclass(frozen=True)
class RunRecord:
    """The files of a finished run.

    Attributes:
        rows: The rows of metrics.jsonl.
        summary: Everything in guarantee.json.
        guarantees: The guarantees, by adversary.
        config: Text of config.toml; None where there is none.
        aggregator: How the silos' updates were added up.
        model_digest: SHA-256 (hex) of model.safetensors; None where there is none.
        allocation: Records per person, private; None where they were not kept.
        data_warnings: Sentences on keys of persons, weights and the loss, private; () where none were kept.
        audit: Result of the comparison with the ledger; None where there is no ledger.
        budget: Privacy budget of the run, if any.
        finished: When the run ended, by guarantee.json.
        cohort: What all runs on the same people had spent; None for a run that is counted in no cohort.
        sections: What else is known of the run, by the names of entry points.
    """

    rows: tuple[MetricsRow, ...]
    summary: dict[str, Any]
    guarantees: dict[Adversary, Guarantee]
    config: str | None
    aggregator: AggregatorRecord
    model_digest: str | None
    allocation: Allocation | None
    audit: AuditResult | None
    budget: Budget | None
    finished: datetime
    data_warnings: tuple[str, ...] = ()
    cohort: CohortRecord | None = None
    sections: Mapping[str, ReportSection] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The id of the run."""
        return str(self.summary["run"])

    @property
    def attacks(self) -> Mapping[Adversary, MembershipAttack]:
        """Bounds on attacks on membership by the charged events; {} without a ledger."""
        return self.audit.attacks if self.audit else {}

    @property
    def alarms(self) -> list[Alarm]:
        """What must not be overlooked."""
        return [section.alarm for section in self.sections.values() if section.alarm is not None]


# A directory may come from elsewhere: nothing that its files name is imported, here or in what is called.
@refuse_plugins()
def read_run(directory: Path, *, with_sections: bool = True) -> RunRecord:
    """Read the files of a finished run, and compare its guarantees with its ledger.

    Args:
        directory: The directory of the run.
        with_sections: Whether `RunRecord.sections` are read; not where the file of one is about to be replaced.

    Raises:
        SilodpError: a required file is missing or damaged, or files contradict each other.
    """
    _check_directory(directory)
    rows = _read_rows(directory / METRICS)
    summary, guarantees = read_guarantees(directory)
    config, model = directory / "config.toml", directory / "model.safetensors"
    settings = _read_bytes(config).decode(errors="replace") if config.exists() else None
    aggregator = _read_aggregator(directory / GUARANTEE, summary)
    audit = audit_run(directory, guarantees.values(), summary, aggregator, rows)
    _check_model(directory)
    # The δ of the budget in the ledger may be less: it accounts for the noise alone, and a page shows the whole δ.
    delta = guarantees["released"].delta
    budget = audit.budget if audit else _read_budget(settings, delta)
    data_warnings = read_private(directory, DATA_WARNINGS, _DataWarnings)
    run = RunRecord(
        rows=rows,
        summary=summary,
        guarantees=guarantees,
        config=settings,
        aggregator=aggregator,
        model_digest=hashlib.sha256(_read_bytes(model)).hexdigest() if model.exists() else None,
        allocation=read_private(directory, ALLOCATION, Allocation),
        audit=audit,
        budget=replace(budget, delta=delta) if audit and budget else budget,
        finished=datetime.fromisoformat(summary["finished"]),
        data_warnings=data_warnings.data_warnings if data_warnings else (),
        cohort=read_cohort(directory, summary["run"]),
    )
    return replace(run, sections=read_sections(directory, run)) if with_sections else run


def _check_model(directory: Path) -> None:
    """Refuse model, description and guarantee that do not belong together, also where there is no ledger."""
    path = directory / DESCRIPTION
    if not path.exists():
        return
    description = ModelDescription.read(path)
    # The description states the digests of both, so files of two runs, or of two moments of one run, are found.
    for name in (GUARANTEE, WEIGHTS):
        if (directory / name).exists():
            description.check_content(_read_bytes(directory / name), directory / name)


def read_guarantees(directory: Path) -> tuple[dict[str, Any], dict[Adversary, Guarantee]]:
    """Return everything in guarantee.json, and the guarantees by adversary.

    Raises:
        SilodpError: the file is missing or damaged.
    """
    path = directory / GUARANTEE
    summary = _read_json(path)
    with refuse_malformed(
        f"{path} does not hold a guarantee for each adversary: restore it, or run again.",
        code="report.damaged",
    ):
        _check_summary(summary)
        found = [Guarantee.from_dict(fields) for fields in summary["guarantees"]]
        guarantees = {guarantee.adversary: guarantee for guarantee in found}
        ordered = {adversary: guarantees[adversary] for adversary in ADVERSARIES}
        if not all(map(is_valid_guarantee, ordered.values())):
            raise ValueError
    return summary, ordered


def format_versions() -> str:
    """Return the versions of silodp and torch that run here."""
    return f"silodp {find_version()}, torch {version('torch')}"


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise SilodpError(
            f"run directory {directory} does not exist: name a directory that 'silodp run' has written.",
            code="report.missing",
        )


def _check_summary(summary: Mapping[str, Any]) -> None:
    """Raise ValueError or KeyError if the entries of guarantee.json about the whole run cannot be shown."""
    texts = [
        *(summary[name] for name in ("method", "settings", "stopped", "run")),
        summary.get("evaluation", ""),
    ]
    answers = (summary[name] for name in ("simulation", "weighted", "sampled", "private"))
    if (
        not is_format(summary["format"], FORMAT)
        or not all(isinstance(text, str) for text in texts)
        or not all(type(one) is bool for one in answers)
        or type(summary["rounds"]) is not int
        or datetime.fromisoformat(summary["finished"]).utcoffset() != timedelta(0)
    ):
        raise ValueError


def _read_aggregator(path: Path, summary: dict[str, Any]) -> AggregatorRecord:
    """Return the aggregator that guarantee.json names, {"name": ..., its settings}."""
    with refuse_malformed(
        f"{path} names an aggregator that cannot be read: restore it, or run again.", code="report.damaged"
    ):
        named = dict(summary["aggregator"].items())  # a list has no items
        # A plug-in's settings cannot be read without its code, so what follows from them is stored with it.
        if "class" in named:
            return AggregatorRecord.from_dict(named)
        return AggregatorRecord.from_aggregator(build_aggregator(named.pop("name"), named))


def _read_budget(config: str | None, delta: float) -> Budget | None:
    """Return the budget of config.toml, for a run without its ledger."""
    try:
        section = parse_toml(config or "").get("budget")
        return None if section is None else Budget(**{"delta": delta, **section})
    except MALFORMED:
        # No ledger confirms it anyway; the page shows the configuration as it is, right or wrong.
        return None


@dataclass(frozen=True)
class _DataWarnings:
    """The content of data_warnings.json."""

    data_warnings: tuple[str, ...]


def keep_allocation(directory: Path, allocation: Allocation) -> None:
    """Write DIR/plots/allocation.json, which is private."""
    keep_private(directory, ALLOCATION, asdict(allocation))


def keep_data_warnings(directory: Path, data_warnings: Sequence[str]) -> None:
    """Write DIR/plots/data_warnings.json, which is private."""
    keep_private(directory, DATA_WARNINGS, {"data_warnings": list(data_warnings)})


def keep_private(directory: Path, name: str, fields: Mapping[str, Any]) -> None:
    """Write a private file in DIR/plots, a JSON object."""
    _check_directory(directory)
    path = directory / "plots" / name
    path.parent.mkdir(exist_ok=True)
    # In one step: a report that is written after a full disk finds no half of a file.
    write_durably(path, (json.dumps(fields, ensure_ascii=False) + "\n").encode())


def read_private(directory: Path, name: str, kind: type[_T]) -> _T | None:
    """Read a private file in DIR/plots as an object of a dataclass; None where it is not there.

    Raises:
        SilodpError: it is damaged.
    """
    path = directory / "plots" / name
    if not path.exists():
        return None
    with refuse_malformed(
        f"{path} is damaged: delete it, and the report is written without what it holds.",
        code="report.damaged",
    ):
        return TypeAdapter(kind).validate_python(parse_json(_read_bytes(path)))


def _read_rows(path: Path) -> tuple[MetricsRow, ...]:
    _read_bytes(path)  # a missing file is refused with the remedy of a report
    rows = read_metrics(path)
    if not rows:
        raise SilodpError(
            f"{path} is empty: there is no round to report on; run again.", code="run.metrics_damaged"
        )
    return tuple(rows)


def _read_json(path: Path) -> dict[str, Any]:
    content = _read_bytes(path)
    with refuse_malformed(
        f"{path} is damaged (it is not a JSON object): restore it, or run again.", code="report.damaged"
    ):
        return dict(parse_json(content).items())  # a list has no items


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SilodpError(
            f"{path} is missing: the run has not ended, or this is no run directory; resume the run, or name "
            "another directory.",
            code="report.missing",
        ) from None
    except OSError as error:
        raise SilodpError(
            f"{path} cannot be read ({error.strerror}): restore it, or run again.", code="report.damaged"
        ) from None
