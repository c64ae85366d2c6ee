"""DIR/statistics.json, DIR/statistics.html and, of a Table One, DIR/table_one.csv: what a run of statistics releases.

They are made from the noisy sums in metrics.jsonl, which the ledger binds, and from the guarantees. So they are covered
by ε, and may be shared wherever the guarantee holds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from silodp.parsing import MALFORMED, parse_toml, refuse_malformed
from silodp.report.formatting import render
from silodp.runtime.run_files import STATISTICS, STATISTICS_PAGE, MetricsRow
from silodp_analytics import sums
from silodp_analytics.statistics import table_one
from silodp_analytics.statistics.method import COUNTED
from silodp_analytics.statistics.report.estimates import NoisyTable
from silodp_analytics.statistics.report.section import TABLE_ONE
from silodp_analytics.statistics.statistic import Reading, read_table, show_count
from silodp_analytics.statistics.table_one.table import TableOne, find_table

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

    counted: Literal[
        "persons",
        "persons_by_silo",
        "persons_in_primary_silo",
        "records",
        "records_by_silo",
        "records_in_primary_silo",
    ]
    silos: int
    records_in_full: int
    tables: tuple[NoisyTable, ...]

    @cached_property
    def readings(self) -> list[Reading]:
        """The tables, each read by its kind."""
        return list(map(read_table, self.tables))

    @cached_property
    def table_one(self) -> TableOne | None:
        """The Table One, if one was asked for."""
        return find_table(self.tables)

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
        release = TypeAdapter(Release).validate_python(found)
        release.readings, release.table_one  # noqa: B018  raise where counts and cells do not belong together
        return release


def compose_statistics(run: RunRecord, release: Release, pictures: PictureFolder) -> dict[str, str]:
    """Return the texts of the files by their names, the page last, and write the pictures of the page."""
    by_layout = {
        layout: [one for one in release.readings if one.layout == layout]
        for layout in ("headline", "row", "table_one")
    }
    page = render(
        Path(__file__).with_name("statistics.html"),
        [Path(sums.__file__).parent, Path(table_one.__file__).parent],
        run=run,
        release=release,
        released=run.guarantees["released"],
        assumptions=[one.text for one in run.guarantees["released"].assumptions],
        persons=next(iter(by_layout["headline"]), None),
        parts=[
            (one, _draw(pictures, one, release.unit))
            for one in release.readings
            if one.layout not in by_layout
        ],
        means=by_layout["row"],
        unit=release.unit,
        exact_unit=release.exact_unit,
        holds_out=_holds_out(run),
        show_count=show_count,
    )
    text = json.dumps(_describe_release(run, release), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    table = {} if release.table_one is None else {TABLE_ONE: release.table_one.to_csv()}
    return {STATISTICS: text, **table, STATISTICS_PAGE: page}


def _holds_out(run: RunRecord) -> bool:
    """Return whether records that are held out for testing may not have been counted."""
    try:
        schema = parse_toml(run.config or "")["data"]["schema"]
        return "split" in schema or "test_share" in schema
    except MALFORMED:  # no tables, or no configuration: nobody knows what the data set holds out
        return True


def _draw(pictures: PictureFolder, one: Reading, unit: str) -> Picture | None:
    column = "".join(x if x.isascii() and x.isalnum() else "-" for x in one.table.column)[:40]
    if (drawn := one.plot(unit)) is None:
        return None
    name, figure, caption = drawn
    return pictures.add(f"{name}-{column}", figure, caption)


# --- statistics.json -------------------------------------------------------------------------------------------------


def _describe_release(run: RunRecord, release: Release) -> dict[str, Any]:
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
        "tables": [_describe_reading(one) for one in release.readings],
        **({} if release.table_one is None else {"table_one": release.table_one.to_json()}),
    }


def _describe_reading(one: Reading) -> dict[str, Any]:
    table = one.table
    found: dict[str, Any] = {"kind": table.kind, "column": table.column, "noise_std": table.noise_std}
    for name in ("edges", "names", "by", "groups"):
        if getattr(table, name):
            found[name] = getattr(table, name)
    found["counts"] = table.counts
    return found | one.to_json()


# --- the command line ------------------------------------------------------------------------------------------------


def format_release(release: Release) -> list[str]:
    """Return the statistics in short, one line each."""
    found = (one.describe(release.counted) for one in release.readings)
    table = [] if release.table_one is None else release.table_one.format()
    return [f"Counts are of {release.exact_unit}.", *table, *itertools.chain.from_iterable(found)]
