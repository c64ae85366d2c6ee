"""The error that users read, its stable codes, and the checks that every number passes first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from reprlib import Repr
from typing import Any


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
    "accounting.out_of_range": "noise, sampling or steps are beyond what an accountant can represent",
    "argument.out_of_range": "a number is larger or closer to 0 than anything that can be computed with",
    "checkpoint.damaged": "a file of a run's checkpoint is damaged",
    "cli.file": "a file or folder cannot be read or written",
    "cli.interrupted": "Ctrl-C stopped the command; the message says how to go on",
    "cli.memory": "there is not enough memory",
    "cli.unexpected": "an error that silodp does not know, of its own or of a user's model, loss or metric",
    "cli.usage": "a command, option or argument is unknown, missing or malformed",
    "config.not_toml": "the configuration is not TOML in UTF-8",
    "config.path": "the configuration's path is no readable file",
    "config.too_large": "the configuration is too long, too deeply nested, or has a number or text that is too long",
    "config.type": "a value has a type or characters that no setting can have",
    "invalid": "an argument or setting is not usable",
    "ledger.write_failed": "the ledger could not be written; what it would have charged was not released",
    "run.disk_full": "the disk, or the quota on it, is full",
    "run.exists": "the output directory holds files already",
    "run.in_use": "another process is running in the output directory",
    "run.nothing_to_resume": "there is no checkpoint to resume from",
    "run.rounds_done": "a resumed run was asked for fewer rounds than it has done",
}
"""Every code that an error can carry, with what it means. Codes are never renamed; new ones may be added."""


def counted(number: int, noun: str) -> str:
    """ "1 round", "1,000 rounds"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorten(value: object) -> str:
    """Return `repr(value)`, of a long one the beginning and the end."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return f"a {type(value).__name__} of very many digits"


_REPR = Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 120, 120, 60

LEAST_REAL, MOST_REAL = 1e-50, 1e38
MOST_WHOLE = 10**9


def check_real(name: str, value: object) -> None:
    """Check that a setting is a real number (True is not 1) of a magnitude that can be squared and put in float32.

    0, infinity and NaN pass: which of them a setting may be, its own check says.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SilodpError(f"{name} = {shorten(value)}: set a number.", field=name)
    size: Any = abs(value)  # of any kind: a whole number may be too large for a float
    if LEAST_REAL <= size <= MOST_REAL or size == 0 or size == math.inf or size != size:
        return
    raise SilodpError(
        f"{name} = {shorten(value)}: set a number whose magnitude is between {LEAST_REAL:g} and {MOST_REAL:g}.",
        code="argument.out_of_range",
        field=name,
    )


def check_whole(name: str, value: object, least: int = 1, most: int = MOST_WHOLE, what: str = "") -> None:
    """Check that a setting is a whole number from `least` to `most`; `what` it counts, for the message."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        counted_things = f" of {what}" if what else ""
        raise SilodpError(
            f"{name} = {shorten(value)}: set a whole number{counted_things} ≥ {least}.", field=name
        )
    if int(value) > most:
        raise SilodpError(
            f"{name} = {shorten(value)}: set a whole number of at most {most:,}.",
            code="argument.out_of_range",
            field=name,
        )


@contextmanager
def name_file(path: Path | str) -> Iterator[None]:
    """Give an OSError raised inside the name of the file it is about: a failed write does not know its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def list_codes() -> str:
    """Return docs/errors.md: every code with what it means."""
    lines = [f"| `{code}` | {meaning} |" for code, meaning in sorted(CODES.items())]
    return "\n".join([_ABOUT_CODES, "| code | meaning |", "|---|---|", *lines, ""])


_ABOUT_CODES = """# Error codes

Every error that a caller can correct is a `silodp.SilodpError` with a sentence (`str(error)`), a stable `code`, and
the `field` at fault where there is a single one. Compare codes, never sentences: sentences may change, codes are never
renamed.

On the command line the sentence goes to standard error with the code in brackets, and the exit status is 2 (130 after
Ctrl-C, 70 for `cli.unexpected`). With `--json` one object more is printed, on standard output:

    {"error": {"code": "config.type", "field": "method.clip", "message": "…"}}

`make errors` writes this page.
"""
