"""How a command that fails says so: exit status, one sentence, a stable code, and with --json an object of them."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from silodp.cli.progress import Interrupted
from silodp.errors import SilodpError

MISTAKE = 2
UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended

_MOST_CHARACTERS = 2000  # of a sentence: it may quote a long value or somebody else's message
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Failure:
    """Why a command failed; `code` and `field` as in `SilodpError`."""

    status: int
    code: str
    message: str
    field: str | None = None

    def show(self, as_json: bool) -> int:
        """Print the sentence on standard error, with `as_json` also an object on standard output.

        Returns:
            the exit status.
        """
        sentence = " ".join(self.message.split())
        if len(sentence) > _MOST_CHARACTERS:
            sentence = f"{sentence[: _MOST_CHARACTERS // 2]} … {sentence[-_MOST_CHARACTERS // 2 :]}"
        begin, end = ("", "") if self.status == INTERRUPTED else ("error: ", f" [{self.code}]")
        print(f"{begin}{sentence}{end}", file=sys.stderr)
        if as_json:
            error = {"code": self.code, "field": self.field, "message": sentence}
            print(json.dumps({"error": error}, ensure_ascii=False), flush=True)
        return self.status


def failure_of(error: BaseException) -> Failure:
    """Return what to say of an exception that ended a command."""
    match error:
        case Interrupted() | KeyboardInterrupt() | click.Abort():
            said = str(error) if isinstance(error, Interrupted) else "interrupted"
            return Failure(INTERRUPTED, "cli.interrupted", said)
        case SilodpError():
            return Failure(MISTAKE, error.code, str(error), error.field)
        case click.ClickException():
            return Failure(MISTAKE, "cli.usage", f"{error.format_message()}{_see_help(error)}", _field(error))
        case OSError():
            return _about_file(error)
        case MemoryError() | RuntimeError() if isinstance(error, MemoryError) or "allocate memory" in str(
            error
        ):
            return Failure(
                MISTAKE,
                "cli.memory",
                "there is not enough memory: take fewer users, rounds, steps or parameters.",
            )
    return _unexpected(error)


def _see_help(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return "" if context is None else f" See '{context.command_path} --help'."


def _field(error: click.ClickException) -> str | None:
    """The option at fault as it is written on the command line, or the argument's name in the help."""
    parameter = getattr(error, "param", None)
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return None if parameter is None else parameter.human_readable_name


def _about_file(error: OSError) -> Failure:
    name = "a file" if error.filename is None else str(error.filename)
    if error.errno in _FULL:
        return Failure(
            MISTAKE,
            "run.disk_full",
            f"{name} cannot be written: the disk is full, or your quota on it used up; make room and run the command "
            "again (a run goes on with --resume).",
        )
    return Failure(
        MISTAKE,
        "cli.file",
        f"{name} cannot be used ({error.strerror or error}): check the path and its permissions, or give another.",
    )


def _unexpected(error: BaseException) -> Failure:
    """An error of silodp's or of a user's code: the sentence names its place, a file has the traceback."""
    frame = (traceback.extract_tb(error.__traceback__) or [None])[-1]
    place = "" if frame is None else f" at {Path(frame.filename).name}:{frame.lineno}"
    text = "".join(traceback.format_exception(error))
    kept = ""
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix="silodp-traceback-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        kept = f" The traceback is in {name}."
    return Failure(
        UNEXPECTED,
        "cli.unexpected",
        f"silodp did not expect {type(error).__name__}{place} ({' '.join(str(error).split())[:200]}): if code of yours "
        f"is at fault, correct it, else please report this.{kept}",
    )
