"""What the cohort of a run had spent when it ended, read back from cohort.json and checked, and its sentence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat, TypeAdapter

from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.views import Adversary
from silodp.errors import SilodpError
from silodp.parsing import is_format, parse_json, refuse_malformed
from silodp.report.formatting import format_delta
from silodp.report.guarantee_text import ADVERSARY_LABELS
from silodp.runtime.run_files import COHORT

FORMAT = 1
"""Of cohort.json."""
_Epsilon = Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class CohortRecord:
    """All runs on the same people, when one of them ended.

    Attributes:
        run: The id of the run.
        place: Its place among them, from 1.
        delta: δ of the limits.
        limits: The largest ε that the filter admits, by adversary.
        epsilon: ε of all runs if they were fixed beforehand, by adversary; None where nothing is promised.
        unknown: The number of earlier runs whose ledger is not known.
    """

    run: str
    place: Annotated[int, Field(ge=1)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    limits: dict[Adversary, _Epsilon]
    epsilon: dict[Adversary, _Epsilon | None]
    unknown: Annotated[int, Field(ge=0)] = 0

    def describe(self) -> list[str]:
        """Return sentences for readers."""
        found = [f"This is run {self.place} on these people, by the cohort in which they are counted."]
        for adversary, limit in self.limits.items():
            spent = self.epsilon.get(adversary)
            told = (
                "nothing is promised"
                if spent is None
                else f"ε = {format_epsilon(spent)} if they were fixed beforehand"
            )
            found.append(
                f"Together, against {ADVERSARY_LABELS[adversary]}: at most ε = {format_epsilon(limit)} at δ = "
                f"{format_delta(self.delta)}, the limit of the cohort, however each run was chosen after seeing the "
                f"others; so far {told}."
            )
        if self.unknown:
            found.append(
                f"The ledgers of {self.unknown} earlier runs are not known, so these numbers do not count them and the "
                "limit is not kept."
            )
        return found


def read_cohort(directory: Path, run: str) -> CohortRecord | None:
    """Read DIR/cohort.json; None where it is not there.

    Args:
        directory: The directory of the run.
        run: The id of the run, by guarantee.json.

    Raises:
        SilodpError: it is damaged, of another format, or of another run.
    """
    path = directory / COHORT
    if not path.exists():
        return None
    with refuse_malformed(f"{path} is damaged: restore it from a copy.", code="report.damaged"):
        fields = dict(parse_json(path.read_bytes()).items())
        if not is_format(fields["format"], FORMAT):
            raise ValueError("format")
        record = TypeAdapter(CohortRecord).validate_python(fields)
    if record.run != run:
        raise SilodpError(
            f"{path} is of another run than {directory}: restore that of this run.",
            code="report.contradicted",
        )
    return record
