"""The report of a run as callbacks; `silodp report`, which follows no run, imports none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from silodp.config.resolve import ResolvedRun
from silodp.data.federation import Federation
from silodp.report.held_out import keep_held_out, measure_held_out
from silodp.report.model_card import write_card
from silodp.report.page import write_report
from silodp.report.run_record import Allocation, RunRecord, keep_allocation, keep_data_warnings, read_run
from silodp.runtime.callback import Callback, Result
from silodp.training.task import Task


class WriteReport(Callback):
    """Writes report and model card when a run has ended.

    Args:
        directory: The directory of the run.

    Attributes:
        run: The files of the run, as they were read for the report.
        page: The path of the report.
        card: The path of the card; None for a run that releases no model.
    """

    run: RunRecord
    page: Path
    card: Path | None

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_end(self, result: Result | None) -> None:
        """Write the report, if the run has a result."""
        if result is not None:
            self.run = read_run(self._directory)
            self.page = write_report(self._directory, self.run)
            self.card = write_card(self._directory, self.run)


@dataclass(frozen=True)
class KeepPrivateResults(Callback):
    """Writes what the report shows of private records: metrics of held-out ones, data warnings, records per person."""

    resolved: ResolvedRun
    federation: Federation
    task: Task
    data_warnings: Sequence[str]
    directory: Path

    def on_end(self, result: Result | None) -> None:
        """Measure the final model, and write the files."""
        if result is None:
            return
        config, rounds = self.resolved.config, result.guarantees["released"].rounds
        # Where silos evaluate by themselves or by noisy sums, nothing else about held-out records may leave them.
        if config.evaluation is None:
            groups = {} if config.card is None else config.card.subgroups
            held_out = measure_held_out(self.federation, self.task, result.params, rounds, groups)
            if held_out is not None:
                keep_held_out(self.directory, held_out)
        keep_data_warnings(self.directory, self.data_warnings)
        # Of data that are not published, the number of records of each person is private, and not even kept.
        if self.resolved.dataset.is_published:
            names = [silo.name for silo in self.federation.silos]
            keep_allocation(self.directory, Allocation.from_counts(self.federation.counts(), names))
