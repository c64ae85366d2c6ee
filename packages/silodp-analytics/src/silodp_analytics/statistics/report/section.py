"""The section of a report that stands in place of the page of a model, for a run of statistics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from silodp.report.sections import ReportSection
from silodp.runtime.run_files import STATISTICS, STATISTICS_PAGE

if TYPE_CHECKING:
    from silodp.report.page import PictureFolder
    from silodp.report.run_record import RunRecord
    from silodp_analytics.statistics.report.page import Release

TABLE_ONE = "table_one.csv"
"""The Table One of a run of statistics, for spreadsheets."""


@dataclass(frozen=True)
class StatisticsSection(ReportSection):
    """The page of a run of statistics.

    Attributes:
        run: The files of the run.
        release: What it has released.
    """

    run: RunRecord
    release: Release

    pictures = ("count", "survival")
    files = (STATISTICS, TABLE_ONE, STATISTICS_PAGE)

    @classmethod
    def read(cls, directory: Path, run: RunRecord) -> StatisticsSection | None:
        """Return the statistics of a run; None for one that trained a model."""
        if not any("statistics" in row for row in run.rows):
            return None
        from silodp_analytics.statistics.report.page import (
            find_release,  # a report of a model need not wait for it
        )

        release = find_release(run.rows)
        return None if release is None else cls(run, release)

    def compose_pages(self, pictures: PictureFolder) -> dict[str, str]:
        """Return statistics.json and statistics.html by name, and write the pictures of the page."""
        from silodp_analytics.statistics.report.page import compose_statistics

        return compose_statistics(self.run, self.release, pictures)
