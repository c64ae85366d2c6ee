"""The section of a report on decisions by a threshold, and on a correction of the outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from silodp.report.divergence import list_quantities
from silodp.report.estimates import find_limits
from silodp.report.formatting import render
from silodp.report.sections import ReportSection
from silodp_analytics.evaluation.report import find_evaluation

if TYPE_CHECKING:
    from silodp.report.page import Picture, PictureFolder
    from silodp.report.run_record import RunRecord

_CAPTION = (
    "Decision curve: net benefit of calling records positive from a threshold on, with its 95 % interval; "
    "dashed: of calling all positive; dotted: of calling none. "
    "Where the line is not above both others, the model decides nothing better."
)


@dataclass(frozen=True)
class DecisionsSection(ReportSection):
    """What follows for decisions from the held-out records of two classes.

    Attributes:
        directory: The directory of the run.
        run: Its files.
    """

    directory: Path
    run: RunRecord

    pictures = ("decisions",)

    @classmethod
    def read(cls, directory: Path, run: RunRecord) -> DecisionsSection | None:
        """Return the section; None where nothing was measured."""
        return cls(directory, run) if list_quantities(run.rows) else None

    def compose_html(self, pictures: PictureFolder) -> str:
        """Return the section of the page; "" where there are no two classes."""
        # Imported here: a verification need not wait for what a page is made of.
        from silodp.report.facts import collect_facts
        from silodp.report.held_out import read_held_out
        from silodp_analytics.decisions.decisions import Threshold, find_decisions

        def draw(thresholds: tuple[Threshold, ...]) -> Picture | None:
            from silodp_analytics.decisions.decisions_plots import plot_decisions

            figure = plot_decisions(thresholds)
            return None if figure is None else pictures.add("decisions", figure, _CAPTION)

        by_sums = self.run.summary.get("evaluation") == "sums"
        evaluation = find_evaluation(self.run.rows) if by_sums else None
        decisions = find_decisions(evaluation, read_held_out(self.directory))
        if decisions is None:
            return ""
        text = render(
            Path(__file__).with_name("decisions.html"),
            decisions=decisions,
            decision_curve=draw(decisions.thresholds),
            classes=collect_facts(self.directory, self.run).classes,
            released=self.run.guarantees["released"],
            limits=find_limits,
        )
        return text.rstrip("\n")  # the page ends the line
