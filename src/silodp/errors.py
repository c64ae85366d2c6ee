"""The one error a user is meant to read, how its sentences count, and the check that every number passes first."""

from __future__ import annotations

from numbers import Real
from reprlib import repr as short


class SilodpError(ValueError):
    """A mistake its maker can mend: one sentence that says what, where, and what to do."""


def counted(number: int, noun: str) -> str:
    """ "1 round", "1,000 rounds"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def check_real(name: str, value: object) -> None:
    """Refuse what is no real number, before anything compares it; True is not 1."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SilodpError(f"{name} = {short(value)}: set a number.")
