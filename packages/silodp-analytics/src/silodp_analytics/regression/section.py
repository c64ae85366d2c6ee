"""The section of a report that stands in place of the page of a model, for a regression."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from silodp.report.sections import ReportSection

if TYPE_CHECKING:
    from silodp.report.page import PictureFolder
    from silodp.report.run_record import RunRecord
    from silodp_analytics.regression.result import RegressionResult

RESULT, PAGE = "regression.json", "regression.html"
"""What a regression releases, for programs and for readers."""


@dataclass(frozen=True)
class RegressionSection(ReportSection):
    """The page of a regression.

    Attributes:
        run: The files of the run.
        result: What it has released.
    """

    run: RunRecord
    result: RegressionResult

    pictures = ("forest",)
    files = (RESULT, PAGE)

    @classmethod
    def read(cls, directory: Path, run: RunRecord) -> RegressionSection | None:
        """Return the regression of a run; None for another run."""
        if not any("regression" in row for row in run.rows):
            return None
        from silodp_analytics.regression.result import (
            read_regression,
        )  # a report of a model need not wait for it

        result = read_regression(run)
        return None if result is None else cls(run, result)

    def compose_pages(self, pictures: PictureFolder) -> dict[str, str]:
        """Return regression.json and regression.html by name, and write the picture of the page."""
        from silodp_analytics.regression.page import compose_regression

        return compose_regression(self.run, self.result, pictures)
