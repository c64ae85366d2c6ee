"""What heads of silos change, DIR/plots/silo_heads.json, and its section of a report. Private."""

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

SILO_HEADS = "silo_heads.json"
"""A private file in DIR/plots; a report is written without it where it is deleted."""


@dataclass(frozen=True)
class MeasuredHead:
    """A silo's head of the model, and what it changes on the silo's held-out records.

    Attributes:
        silo: Its name.
        numbers: How many numbers the head has.
        epochs: The passes over the silo's records; 0 where they did not help persons who were left out.
        held_out_records: The number of records that were not trained on.
        shared: The metrics of the shared model on them, by name.
        with_head: Those of the model with the head.
    """

    silo: str
    numbers: int
    epochs: int
    held_out_records: int
    shared: Mapping[str, FiniteFloat]
    with_head: Mapping[str, FiniteFloat]


@dataclass(frozen=True)
class SiloHeads:
    """The heads of all silos of a simulated run.

    Attributes:
        weights: SHA-256 (hex) of the shared model that they belong to.
        heads: One for each silo.
    """

    weights: str
    heads: tuple[MeasuredHead, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics."""
        return tuple(dict.fromkeys(name for head in self.heads for name in head.shared))


@dataclass(frozen=True)
class SiloHeadsSection(ReportSection):
    """The heads of the silos of a simulated run.

    Attributes:
        directory: The directory of the run.
        model_digest: SHA-256 (hex) of the shared model of the run.
    """

    directory: Path
    model_digest: str | None

    place = "after_results"

    @classmethod
    def read(cls, directory: Path, run: RunRecord) -> SiloHeadsSection:
        """Return the section."""
        return cls(directory, run.model_digest)

    def compose_html(self, pictures: PictureFolder) -> str:
        """Return the section of the page; "" without heads."""
        found = read_silo_heads(self.directory, self.model_digest)
        return "" if found is None else render(Path(__file__).with_name("silo_heads.html"), silo_heads=found)


def keep_silo_heads(directory: Path, found: SiloHeads) -> None:
    """Write DIR/plots/silo_heads.json, which is private."""
    fields = asdict(found)
    for head in fields["heads"]:
        for which in ("shared", "with_head"):
            head[which] = {name: value for name, value in head[which].items() if math.isfinite(value)}
    keep_private(directory, SILO_HEADS, fields)


def read_silo_heads(directory: Path, weights: str | None) -> SiloHeads | None:
    """Read DIR/plots/silo_heads.json; None where it is not there, or is about another model than the run's.

    Raises:
        SilodpError: it is damaged.
    """
    found = read_private(directory, SILO_HEADS, SiloHeads)
    return found if found is not None and found.weights == weights else None
