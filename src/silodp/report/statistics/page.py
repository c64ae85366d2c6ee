"""DIR/statistics.json and DIR/statistics.html: what a run of statistics releases.

Both are made from the noisy sums in metrics.jsonl, which the ledger binds, and from the guarantees. So they are covered
by ε, and may be shared wherever the guarantee holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import TypeAdapter

from silodp.accounting.guarantee import TECHNICAL
from silodp.parsing import refuse_unsound
from silodp.report.formatting import render
from silodp.report.page import Picture, PictureFolder
from silodp.report.run_record import RunRecord
from silodp.report.statistics import figures
from silodp.report.statistics.estimates import (
    Interval,
    LogRank,
    MeanEstimate,
    NoisyTable,
    SurvivalCurve,
    compare_survival,
    estimate_count,
    estimate_mean,
    estimate_quantiles,
    estimate_survival,
    is_certain,
)
from silodp.runtime.run_files import STATISTICS, STATISTICS_PAGE, MetricsRow

FORMAT = 1
"""Of statistics.json."""


@dataclass(frozen=True)
class Release:
    """What a run of statistics has released, as `Statistics.describe_sum` stores it.

    Attributes:
        counted: What counts are of: "records", each one; or "persons", each by the average over their silos.
        silos: The number of silos.
        records_in_full: The number of records of a person in a silo that count in full.
        tables: The noisy counts.
    """

    counted: str
    silos: int
    records_in_full: int
    tables: tuple[NoisyTable, ...]


def find_release(rows: Sequence[MetricsRow]) -> Release | None:
    """Return the statistics in the rows of metrics.jsonl; None for a run that trained a model.

    Raises:
        SilodpError: the row is damaged (code report.damaged).
    """
    found = next((row["statistics"] for row in reversed(rows) if "statistics" in row), None)
    if found is None:
        return None
    with refuse_unsound("metrics.jsonl does not hold statistics: restore it.", code="report.damaged"):
        return TypeAdapter(Release).validate_python(found)


def compose_statistics(run: RunRecord, pictures: PictureFolder) -> dict[str, str]:
    """Return statistics.json and statistics.html by name, and write the pictures of the page.

    Args:
        run: The files of a finished run of statistics.
        pictures: The folder of the pictures, which the page also has inside.

    Raises:
        SilodpError: what it has released is damaged (code report.damaged).
    """
    release = find_release(run.rows)
    assert release is not None
    sections = [_estimate(table) for table in release.tables]
    facts, unit = _describe_release(run, release, sections), _name_counted(release)
    page = render(
        "statistics.html",
        run=run,
        release=release,
        facts=facts,
        released=run.guarantees["released"],
        assumptions=[text.removeprefix(TECHNICAL) for text in run.guarantees["released"].assumptions],
        persons=next((one for one in sections if one.table.kind == "persons"), None),
        parts=[
            (one, _draw(pictures, one, unit)) for one in sections if one.table.kind not in ("persons", "mean")
        ],
        means=[one for one in sections if one.table.kind == "mean"],
        unit=unit,
        show_count=show_count,
    )
    text = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return {STATISTICS: text, STATISTICS_PAGE: page}


@dataclass(frozen=True)
class Section:
    """A block of counts with what is estimated from it; None and {} where it has no such estimate."""

    table: NoisyTable
    mean: MeanEstimate | None = None
    quantiles: Mapping[float, Interval] | None = None
    curves: Sequence[SurvivalCurve] = ()
    test: LogRank | None = None

    @property
    def rows(self) -> list[tuple[str, float]]:
        """The names of the cells of a histogram or of categories, each with its noisy count."""
        names = list(self.table.names)
        if self.table.kind == "histogram":
            edges = [f"{edge:,.6g}" for edge in self.table.edges]
            names = [f"{low} to {high}" for low, high in pairwise(edges)]
            names += ["missing"] * self.table.has_missing
        return list(zip(names, self.table.counts, strict=True))

    @property
    def total(self) -> Interval:
        """All counts of the block together."""
        return estimate_count(
            sum(self.table.counts), self.table.noise_std * math.sqrt(len(self.table.counts))
        )


def _estimate(table: NoisyTable) -> Section:
    if table.kind == "mean":
        return Section(table, mean=estimate_mean(table))
    if table.kind == "histogram":
        return Section(table, quantiles=estimate_quantiles(table))
    if table.kind == "survival":
        return Section(table, curves=estimate_survival(table), test=compare_survival(table))
    return Section(table)


def show_count(value: float, noise_std: float) -> str:
    """Return a count for readers: "< x", the upper end of its interval, where it is lost in the noise."""
    if is_certain(value, noise_std):
        return f"{value:,.0f}"
    return f"< {math.ceil(estimate_count(value, noise_std).high):,}"


def _name_counted(release: Release) -> str:
    return "records" if release.counted == "records" else "persons"


def _draw(pictures: PictureFolder, section: Section, unit: str) -> Picture | None:
    table, name = (
        section.table,
        "".join(x if x.isascii() and x.isalnum() else "-" for x in section.table.column),
    )
    if table.kind == "survival":
        if not any(len(curve.times) for curve in section.curves):
            return None
        caption = "Kaplan-Meier curves; the bands hold the curves of the counted records with 95 %."
        return pictures.add(
            f"survival-{name[:40]}", figures.plot_survival(section.curves, table.column), caption
        )
    draw = figures.plot_histogram if table.kind == "histogram" else figures.plot_categories
    caption = f"{table.column}: noisy counts of {unit}; the lines are 95 % intervals of the noise."
    return pictures.add(f"count-{table.kind}-{name[:40]}", draw(table, unit), caption)


# --- statistics.json -------------------------------------------------------------------------------------------------


def _describe_release(run: RunRecord, release: Release, sections: Sequence[Section]) -> dict[str, Any]:
    released = run.guarantees["released"]
    return {
        "format": FORMAT,
        "run": run.summary.get("run"),
        "counted": release.counted,
        "silos": release.silos,
        "records_in_full": release.records_in_full,
        "epsilon": {adversary: one.epsilon for adversary, one in run.guarantees.items()},
        "delta": released.delta,
        "releasable": released.releasable,
        "interval": 0.95,
        "tables": [_describe_section(one) for one in sections],
    }


def _describe_section(section: Section) -> dict[str, Any]:
    table = section.table
    found: dict[str, Any] = {"kind": table.kind, "column": table.column, "noise_std": table.noise_std}
    for name in ("edges", "names", "by"):
        if getattr(table, name):
            found[name] = getattr(table, name)
    found["counts"] = table.counts
    if table.kind == "persons":
        found["estimate"] = vars(estimate_count(table.counts[0], table.noise_std))
    if section.mean is not None:
        found["estimate"] = {name: vars(one) for name, one in vars(section.mean).items()}
    if section.quantiles is not None:
        found["quantiles"] = {f"{share:g}": vars(one) for share, one in section.quantiles.items()}
    if table.kind == "survival":
        found["curves"] = [
            {name: value if name == "group" else value.tolist() for name, value in vars(curve).items()}
            for curve in section.curves
        ]
        found["log_rank"] = None if section.test is None else vars(section.test)
    return found


# --- the command line ------------------------------------------------------------------------------------------------


def format_release(release: Release) -> list[str]:
    """Return the statistics in short, one line each."""
    return [
        line for table in release.tables for line in _format_section(_estimate(table), _name_counted(release))
    ]


def _format_section(section: Section, unit: str) -> list[str]:
    table = section.table
    if table.kind == "persons":
        how = (
            "different persons"
            if unit == "persons"
            else "persons, once in every silo where they have records"
        )
        return [f"{show_count(table.counts[0], table.noise_std)} {how} ({_format_whole(section.total)})"]
    if table.kind == "mean":
        if section.mean is None:
            return [f"{table.column}: its mean is lost in the noise"]
        mean, std = section.mean.mean, section.mean.std
        interval = f"{mean.low:.4g} to {mean.high:.4g}"
        return [f"{table.column}: mean {mean.value:.4g} ({interval}), standard deviation {std.value:.3g}"]
    if table.kind == "survival":
        return [_format_curve(table.column, curve) for curve in section.curves]
    if table.kind == "histogram":
        median = (section.quantiles or {}).get(0.5)
        found = (
            "its quantiles are lost in the noise"
            if median is None
            else (f"median {median.value:.4g} ({median.low:.4g} to {median.high:.4g})")
        )
        return [f"{table.column}: {found}"]
    counts = ", ".join(f"{name} {show_count(count, table.noise_std)}" for name, count in section.rows)
    return [f"{table.column}: {counts}"]


def _format_curve(column: str, curve: SurvivalCurve) -> str:
    group = f" in group {curve.group}" if curve.group else ""
    if not len(curve.times):
        return f"survival{group}: lost in the noise"
    return (
        f"survival{group} at {column} {curve.times[-1]:g}: {curve.survival[-1]:.3f} "
        f"({curve.low[-1]:.3f} to {curve.high[-1]:.3f})"
    )


def _format_whole(one: Interval) -> str:
    return f"{one.low:,.0f} to {one.high:,.0f}"
