"""What own parts of the silos change, DIR/plots/own_parts.json, and its section of a report. Private."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import FiniteFloat

from silodp.report.formatting import render
from silodp.report.run_record import keep_private, read_private
from silodp.report.sections import ReportSection

if TYPE_CHECKING:
    from silodp.report.page import PictureFolder
    from silodp.report.run_record import RunRecord

OWN_PARTS = "own_parts.json"
"""A private file in DIR/plots; a report is written without it where it is deleted."""


@dataclass(frozen=True)
class MeasuredPart:
    """A silo's own part of the model, and what it changes on the silo's held-out records.

    Attributes:
        silo: Its name.
        numbers: How many numbers the part has.
        epochs: The passes over the silo's records; 0 where they did not help persons who were left out.
        held_out_records: The number of records that were not trained on.
        shared: The metrics of the shared model on them, by name.
        with_own_part: Those of the model with the part.
    """

    silo: str
    numbers: int
    epochs: int
    held_out_records: int
    shared: Mapping[str, FiniteFloat]
    with_own_part: Mapping[str, FiniteFloat]


@dataclass(frozen=True)
class OwnParts:
    """The own parts of all silos of a simulated run.

    Attributes:
        weights: SHA-256 (hex) of the shared model that they belong to.
        parts: One for each silo.
    """

    weights: str
    parts: tuple[MeasuredPart, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.shared))


@dataclass(frozen=True)
class OwnPartsSection(ReportSection):
    """The own parts of the silos of a simulated run.

    Attributes:
        directory: The directory of the run.
        model_digest: SHA-256 (hex) of the shared model of the run.
    """

    directory: Path
    model_digest: str | None

    place = "after_results"

    @classmethod
    def read(cls, directory: Path, run: RunRecord) -> OwnPartsSection:
        """Return the section."""
        return cls(directory, run.model_digest)

    def compose_html(self, pictures: PictureFolder) -> str:
        """Return the section of the page; "" without parts."""
        found = read_own_parts(self.directory, self.model_digest)
        return "" if found is None else render(Path(__file__).with_name("own_parts.html"), own_parts=found)


def keep_own_parts(directory: Path, found: OwnParts) -> None:
    """Write DIR/plots/own_parts.json, which is private."""
    fields = asdict(found)
    for part in fields["parts"]:
        for which in ("shared", "with_own_part"):
            part[which] = {name: value for name, value in part[which].items() if math.isfinite(value)}
    keep_private(directory, OWN_PARTS, fields)


def read_own_parts(directory: Path, weights: str | None) -> OwnParts | None:
    """Read DIR/plots/own_parts.json; None where it is not there, or is about another model than the run's.

    Raises:
        SilodpError: it is damaged.
    """
    found = read_private(directory, OWN_PARTS, OwnParts)
    return found if found is not None and found.weights == weights else None
