"""The error that users read, its stable codes, and the check that every number passes first."""

from __future__ import annotations

from numbers import Real
from reprlib import repr as short


class SilodpError(ValueError):
    """A mistake that the caller can correct: one sentence that says what is wrong, where, and what to do.

    Args:
        message: the sentence.
        code: stable identifier "area.problem", listed in `CODES`. Programs compare codes, never sentences.
        field: the setting, argument or column at fault, as the caller wrote it; None where there is no single one.
    """

    def __init__(self, message: str, *, code: str = "invalid", field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


CODES: dict[str, str] = {
    "invalid": "an argument or setting is not usable",
    "ledger.damaged": "a ledger's lines are not those that were written",
    "ledger.version": "a ledger was written by a version of silodp that this one cannot check",
    "report.contradicted": "the files of a run directory contradict each other",
    "report.damaged": "a file of a run directory that a report needs cannot be read",
    "report.missing": "a file of a run directory that a report needs is not there",
    "run.metrics_damaged": "metrics.jsonl does not hold one row for each round",
}
"""Every code that an error can carry, with what it means. Codes are never renamed; new ones may be added."""


def counted(number: int, noun: str) -> str:
    """ "1 round", "1,000 rounds"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def check_real(name: str, value: object) -> None:
    """Refuse what is no real number, before anything compares it; True is not 1."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SilodpError(f"{name} = {short(value)}: set a number.", field=name)
