"""DIR/statistics.json and DIR/statistics.html: what a run of statistics releases.

Both are made from the noisy sums in metrics.jsonl, which the ledger binds, and from the guarantees. So they are covered
by ε, and may be shared wherever the guarantee holds.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from silodp.parsing import MALFORMED, parse_toml, refuse_malformed
from silodp.report.formatting import render
from silodp.runtime.run_files import STATISTICS, STATISTICS_PAGE, MetricsRow
from silodp_analytics.statistics.method import COUNTED
from silodp_analytics.statistics.report.estimates import (
    Interval,
    LogRank,
    MeanEstimate,
    NarrowerRange,
    NoisyTable,
    SurvivalCurve,
    compare_survival,
    estimate_count,
    estimate_mean,
    estimate_quantiles,
    estimate_survival,
    is_certain,
    suggest_bin_range,
    suggest_mean_range,
)

if TYPE_CHECKING:
    from silodp.report.page import Picture, PictureFolder
    from silodp.report.run_record import RunRecord

FORMAT = 1
"""Of statistics.json."""


@dataclass(frozen=True)
class Release:
    """What a run of statistics has released, as `Statistics.describe_sum` stores it.

    Attributes:
        counted: What a count adds up, a key of `COUNTED`.
        silos: The number of silos.
        records_in_full: The number of records of a person in a silo that count in full.
        tables: The noisy counts.
    """

    counted: Literal["persons", "persons_by_silo", "records", "records_by_silo"]
    silos: int
    records_in_full: int
    tables: tuple[NoisyTable, ...]

    @property
    def unit(self) -> str:
        """The unit of counts, for axes and heads of tables."""
        return {"persons_by_silo": "persons, once per silo"}.get(self.counted, self.counted.split("_")[0])

    @property
    def exact_unit(self) -> str:
        """The unit of counts, and how often a person is in it."""
        return COUNTED[self.counted].format(records=self.records_in_full)


def find_release(rows: Sequence[MetricsRow]) -> Release | None:
    """Return the statistics in the rows of metrics.jsonl; None for a run that trained a model.

    Raises:
        SilodpError: the row is damaged (code report.damaged).
    """
    found = next((row["statistics"] for row in reversed(rows) if "statistics" in row), None)
    if found is None:
        return None
    with refuse_malformed("metrics.jsonl does not hold statistics: restore it.", code="report.damaged"):
        return TypeAdapter(Release).validate_python(found)


def compose_statistics(run: RunRecord, release: Release, pictures: PictureFolder) -> dict[str, str]:
    """Return statistics.json and statistics.html by name, and write the pictures of the page."""
    sections = [_estimate(table) for table in release.tables]
    facts = _describe_release(run, release, sections)
    page = render(
        Path(__file__).with_name("statistics.html"),
        run=run,
        release=release,
        facts=facts,
        released=run.guarantees["released"],
        assumptions=[one.text for one in run.guarantees["released"].assumptions],
        persons=next((one for one in sections if one.table.kind == "persons"), None),
        parts=[
            (one, _draw(pictures, one, release.unit))
            for one in sections
            if one.table.kind not in ("persons", "mean")
        ],
        means=[one for one in sections if one.table.kind == "mean"],
        unit=release.unit,
        exact_unit=release.exact_unit,
        holds_out=_holds_out(run),
        describe_narrower=describe_narrower,
        show_count=show_count,
    )
    text = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return {STATISTICS: text, STATISTICS_PAGE: page}


def _holds_out(run: RunRecord) -> bool:
    """Return whether records that are held out for testing may not have been counted."""
    try:
        schema = parse_toml(run.config or "")["data"]["schema"]
        return "split" in schema or "test_share" in schema
    except MALFORMED:  # no tables, or no configuration: nobody knows what the data set holds out
        return True


@dataclass(frozen=True)
class Section:
    """A block of counts with what is estimated from it; None and {} where it has no such estimate."""

    table: NoisyTable
    mean: MeanEstimate | None = None
    quantiles: Mapping[float, Interval] | None = None
    narrower: NarrowerRange | None = None
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
        mean = estimate_mean(table)
        if mean is None:
            return Section(table)
        narrower = suggest_mean_range(table.edges, mean.mean.value, mean.mean.reach)
        return Section(table, mean=mean, narrower=narrower)
    if table.kind == "histogram":
        quantiles = estimate_quantiles(table)
        return Section(table, quantiles=quantiles, narrower=suggest_bin_range(table, quantiles))
    if table.kind == "survival":
        return Section(table, curves=estimate_survival(table), test=compare_survival(table))
    return Section(table)


def show_count(value: float, noise_std: float) -> str:
    """Return a count for readers: "< x", the upper end of its interval, where it is lost in the noise."""
    if is_certain(value, noise_std):
        return f"{value:,.0f}"
    return f"< {math.ceil(estimate_count(value, noise_std).high):,}"


def describe_narrower(section: Section) -> str:
    """Return the clause on a range that is too wide; "" where it is not."""
    found, table = section.narrower, section.table
    if found is None:
        return ""
    smaller = (
        "bins as fine as most values need"
        if found.error is None or section.mean is None
        else f"± {found.error:.2g} in place of ± {section.mean.mean.reach:.2g}"
    )
    return (
        f'a declared range of {found.low:.6g} to {found.high:.6g} with out_of_range = "clip", in place of '
        f"{table.edges[0]:.6g} to {table.edges[-1]:.6g}, would give {smaller}"
    )


def _draw(pictures: PictureFolder, section: Section, unit: str) -> Picture | None:
    from silodp_analytics.statistics.report import figures  # matplotlib, which takes a second

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
        "run": run.id,
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
    if section.narrower is not None:
        found["narrower"] = vars(section.narrower)
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
    found = (_format_section(_estimate(table), release.counted) for table in release.tables)
    return [f"Counts are of {release.exact_unit}.", *itertools.chain.from_iterable(found)]


def _format_section(section: Section, counted: str) -> list[str]:
    table, advice = section.table, describe_narrower(section)
    note = f"; {advice}" if advice else ""
    if table.kind == "persons":
        is_by_silo = counted.endswith("by_silo")
        how = "persons, once in every silo where they have records" if is_by_silo else "different persons"
        return [f"{show_count(table.counts[0], table.noise_std)} {how} ({_format_whole(section.total)})"]
    if table.kind == "mean":
        if section.mean is None:
            return [f"{table.column}: its mean is lost in the noise"]
        mean, std = section.mean.mean, section.mean.std
        interval = f"{mean.low:.4g} to {mean.high:.4g}"
        # Noise alone may make it 0, which says nothing of the values.
        spread = f"standard deviation {f'{std.value:.3g}' if std.low else f'below {std.high:.3g}'}"
        return [f"{table.column}: mean {mean.value:.4g} ({interval}), {spread}{note}"]
    if table.kind == "survival":
        return [_format_curve(table.column, curve) for curve in section.curves]
    if table.kind == "histogram":
        median = (section.quantiles or {}).get(0.5)
        found = (
            "its quantiles are lost in the noise"
            if median is None
            else (f"median {median.value:.4g} ({median.low:.4g} to {median.high:.4g})")
        )
        return [f"{table.column}: {found}{note}"]
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
