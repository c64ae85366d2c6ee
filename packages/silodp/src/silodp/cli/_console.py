"""Common parts of all commands: options, the printing of results, and the report of failures.

A failure is an exit status, one sentence with a stable code on standard error, and with --json an object on standard
output. This module imports nothing heavy, so that `silodp --help` answers at once.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import click
import typer

from silodp._lazy import load
from silodp.errors import DISK_FULL, SilodpError, name_file
from silodp.text import describe_exception

if TYPE_CHECKING:
    from silodp.runtime.executor import Executor


class Names(click.ParamType):
    """The type of an option that names one of several parts or choices: `--help` lists the names.

    It accepts any text, which may be the name of a plug-in: whoever looks the name up refuses it, with a code and a
    suggestion that click does not have.

    Args:
        names: The names, or "module:REGISTRY", a registry whose names are listed when help is asked for.
    """

    name = "text"

    def __init__(self, names: Sequence[str] | str) -> None:
        self._names = names

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return what help shows in place of a value, for example "[plain|masked]"."""
        names = load(self._names) if isinstance(self._names, str) else self._names
        return f"[{'|'.join(names)}]"


def out_option(default: str) -> Any:
    """Return the option --out of a command that writes a directory.

    Args:
        default: The directory without the option, as help names it.
    """
    return typer.Option("--out", metavar="DIR", help=f"Output directory. Default: {default}.")


Config = Annotated[
    Path,
    typer.Argument(metavar="CONFIG.toml", help="Configuration file, for example one of examples/*.toml."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a value of the configuration, for example rounds=20 or method.clip=0.5. Can be repeated.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, for an error too.")
]
ModelCode = Annotated[
    str | None,
    typer.Option(
        "--code",
        metavar="FILE.py",
        help="The code of the model, where it is not one of silodp's. It is run only if it is the code of the run.",
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        metavar="DIR",
        help="Folder of the data sets. Default: $SILODP_DATA, else data (fetch) or the nearest shared/data.",
    ),
]

Users = Annotated[
    int | None, typer.Option(help="Number of persons U. Needed for the size of masked sums, not for ε.")
]

Separator = Annotated[
    str | None, typer.Option(help="What separates the cells of a text file, for example ';'.")
]
Decimal = Annotated[str | None, typer.Option(help="Decimal mark of numbers that are text: '.' or ','.")]
Encoding = Annotated[str | None, typer.Option(help="Encoding of a text file, for example cp1252.")]
Sheet = Annotated[str | None, typer.Option(help="Sheet to read, if a workbook has several.")]
Query = Annotated[
    str | None,
    typer.Option(metavar="SQL", help="Query whose result is the table, where TABLE is a database."),
]
OutFile = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Where to write it; default: standard output."),
]
Missing = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Text that stands for no value, for example '?'. Can be repeated."),
]
MissingIn = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN=TEXT",
        help="Text that stands for no value in one column, for example hb=999. Can be repeated.",
    ),
]

Trackers = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="TRACKER[=TARGET]",
        help="Log every round with tensorboard or mlflow, by default into the folder TRACKER of the run's directory. "
        "Can be repeated.",
    ),
]
LogPrivate = Annotated[
    bool | None,
    typer.Option(
        "--log-private/--no-log-private",
        help="Whether --log includes metrics on private records, which no ε covers. "
        "Default: only if the target is on this machine.",
    ),
]

WorkerCount = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="Compute in N processes, with Ray (pip install 'silodp[ray]'); N changes no bit of a model.",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Take the workers from this Ray cluster ('auto': the one of this machine), whose machines then read the "
        "records of all silos.",
    ),
]
GpusPerWorker = Annotated[
    float | None,
    typer.Option(metavar="G", help="The part of a GPU that a worker gets, for models on a GPU."),
]

MISTAKE = 2
UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # as shells report it

_MAX_CHARACTERS = 2000  # of a sentence: it may quote a long value or message
STANDARD_OUTPUT = "standard output"
"""File name in the error of a result that cannot be written."""


def show(result: dict[str, Any], as_json: bool, lines: Sequence[str]) -> None:
    """Print a result, as one JSON object or as lines for reading."""
    # With a flush: else a full disk would be noticed only when Python exits, whose status then says nothing of it.
    with name_file(STANDARD_OUTPUT):
        print(
            json.dumps(result, allow_nan=False, ensure_ascii=False) if as_json else "\n".join(lines),
            flush=True,
        )


def format_command(*words: object) -> str:
    """Return a command line of silodp that a shell reads as these words; a path may have spaces."""
    return shlex.join(["silodp", *map(str, words)])


def log(text: str) -> None:
    """Print a line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


class _Warnings(logging.Handler):
    """Prints a record as the lines of a command are: "warning: …"."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record on standard error."""
        log(f"{record.levelname.lower()}: {self.format(record)}")


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print warnings of silodp and its libraries until the end of the block, unless somebody configures logging."""
    # The handler of last resort is used only where nobody has configured logging, so a caller's own logging stays.
    before, logging.lastResort = logging.lastResort, _Warnings(logging.WARNING)
    try:
        yield
    finally:
        logging.lastResort = before


@contextmanager
def redirect_prints() -> Iterator[None]:
    """Send everything that is printed meanwhile, by a user's model too, to standard error: results alone go out."""
    with redirect_stdout(sys.stderr):
        yield


def print_or_drop(text: str, stream: TextIO) -> None:
    """Print a line; a stream that cannot be written is dropped."""
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        drop_stream(stream)


def drop_stream(stream: TextIO) -> None:
    """Discard the rest of a stream, which Python would try to write again at exit."""
    # The file itself is replaced, not only Python's object, which other parts of the program may hold.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Interrupted(Exception):
    """Ctrl-C stopped the command; the text says how to continue."""


def list_reader_settings(missing_in: Sequence[str] | None = None, **options: Any) -> dict[str, Any]:
    """Return the options that say how a table is written and that were given, as settings of a reader."""
    texts = dict[str, list[str]]()
    for column, text in read_pairs("--missing-in", missing_in, "COLUMN=TEXT, for example hb=999"):
        texts.setdefault(column, []).append(text)
    options["missing_in"] = texts
    given = {name: value for name, value in options.items() if value}
    if given.get("separator") == r"\t":  # as a shell passes it on
        given["separator"] = "\t"
    return given


def check_new(out: Path | None) -> None:
    """Refuse a file that is there, before anything is read.

    Raises:
        SilodpError: it is there (code run.exists).
    """
    if out is not None and out.exists():
        raise SilodpError(f"{out} exists: choose another file with --out.", code="run.exists", field="out")


def hand_out(name: str, text: str, out: Path | None, as_json: bool, told: str, mode: int = 0o666) -> None:
    """Print a text, or write it to a new file.

    Args:
        name: What it is, the key of the JSON object.
        text: The text.
        out: The file; None prints the text.
        as_json: Whether to print a JSON object.
        told: What is said of the file, behind its name.
        mode: The permissions of the file, less the process's umask.
    """
    from silodp.wire.files import write_durably

    if out is None:
        show({name: text}, as_json, [text.rstrip()])
        return
    write_durably(out, text.encode(), mode)
    show({"path": str(out)}, as_json, [f"{out}: {told}"])


def read_pairs(option: str, given: Sequence[str] | None, form: str) -> list[tuple[str, str]]:
    """Return the columns and texts of an option that can be repeated; `form` says how it is written."""
    found = []
    for one in given or ():
        # From the right: a name of a column may hold "=".
        column, equals, text = one.rpartition("=")
        if not equals:
            raise SilodpError(f"{option} {one}: write {form}.", code="argument.value", field=option)
        found.append((column, text))
    return found


@dataclass(frozen=True)
class CommandFailure:
    """Why a command failed.

    Attributes:
        status: Exit status of the process.
        code: Code of the error, as in `SilodpError`.
        message: One sentence.
        field: The setting or option at fault, as in `SilodpError`; None where there is no single one.
    """

    status: int
    code: str
    message: str
    field: str | None = None

    @property
    def sentence(self) -> str:
        """The message on one line, without the middle of one that is very long."""
        sentence = " ".join(self.message.split())
        if len(sentence) > _MAX_CHARACTERS:
            sentence = f"{sentence[: _MAX_CHARACTERS // 2]} … {sentence[-_MAX_CHARACTERS // 2 :]}"
        return sentence

    def show(self, as_json: bool) -> int:
        """Print the sentence on standard error, and with `as_json` an object on standard output; return the status.

        Where one of them cannot be written, the status and the other one still tell.
        """
        begin, end = ("", "") if self.status == INTERRUPTED else ("error: ", f" [{self.code}]")
        print_or_drop(f"{begin}{self.sentence}{end}", sys.stderr)
        if as_json:
            self.show_object()
        return self.status

    def show_object(self) -> None:
        """Print the failure as an object on standard output."""
        error = {"code": self.code, "field": self.field, "message": self.sentence}
        print_or_drop(json.dumps({"error": error}, ensure_ascii=False), sys.stdout)


def describe_failure(error: BaseException) -> CommandFailure:
    """Return status, code and sentence for an exception that ended a command."""
    match error:
        case Interrupted() | KeyboardInterrupt() | click.Abort():
            message = (
                str(error) if isinstance(error, Interrupted) else "interrupted; give the same command again"
            )
            return CommandFailure(INTERRUPTED, "cli.interrupted", message)
        case SilodpError():
            return CommandFailure(MISTAKE, error.code, str(error), error.field)
        case click.ClickException():
            # typer 0.20 with click 8.2 names an environment variable that no option has
            message = error.format_message().replace(" (env var: 'None')", "")
            return CommandFailure(
                MISTAKE, "cli.usage", f"{message}{_hint_at_setting(error)}{_see_help(error)}", _field(error)
            )
        case OSError():
            return _describe_file_error(error)
        case MemoryError() | RuntimeError() if _is_memory(error):
            return CommandFailure(
                MISTAKE,
                "cli.memory",
                "there is not enough memory: reduce users, rounds, steps or parameters.",
            )
    return _describe_unexpected(error)


def _is_memory(error: BaseException) -> bool:
    # torch raises a RuntimeError where memory is short.
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def _hint_at_setting(error: click.ClickException) -> str:
    """Return how a setting of a configuration is given, where it was given as an option that a command lacks."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    if not {"config", "set_"} <= {option.name for option in error.ctx.command.params}:
        return ""
    end = "" if error.format_message().endswith("?") else "."
    if error.option_name in ("--epsilon", "--target-epsilon"):
        return (
            f"{end} The noise for an ε is computed by 'silodp plan CONFIG.toml --target-epsilon NUMBER': set "
            "method.noise_multiplier to it; budget.epsilon ends a run before it spends more."
        )
    return f"{end} A setting of the configuration is given by --set KEY=VALUE."


def _see_help(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return "" if context is None else f" See '{context.command_path} --help'."


def _field(error: click.ClickException) -> str | None:
    """Return the option at fault as on the command line, or the name of the argument in the help."""
    parameter = getattr(error, "param", None)
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return None if parameter is None else parameter.human_readable_name


def _describe_file_error(error: OSError) -> CommandFailure:
    name = "a file" if error.filename is None else str(error.filename)
    if error.errno in DISK_FULL:
        return CommandFailure(
            MISTAKE,
            "run.disk_full",
            f"{name} cannot be written: the disk or your quota is full, or the limit on the size of a file (ulimit -f) "
            "is reached; make room and repeat the command (continue a run with --resume).",
        )
    return CommandFailure(
        MISTAKE,
        "cli.file",
        f"{name} cannot be used ({error.strerror or error}){_describe_owner(error)}: check the path and its "
        "permissions, or name another.",
    )


def _describe_owner(error: OSError) -> str:
    """Return whose the file or the folder is that another user may not use, for the sentence; else nothing."""
    if not isinstance(error, PermissionError) or error.filename is None:
        return ""
    for path in (Path(os.fsdecode(error.filename)), *Path(os.fsdecode(error.filename)).parents):
        with suppress(OSError):
            owner = path.stat().st_uid
            return "" if owner == os.geteuid() else f", of user {owner}, while this is user {os.geteuid()}"
    return ""


def _describe_unexpected(error: BaseException) -> CommandFailure:
    """Describe an error of silodp or of a user's code: the sentence names its place, a file has the traceback."""
    from silodp.cli.failed_plugin import find_failed_plugin  # no command that succeeds needs it

    # The innermost frame: the place in a user's model or loss, if the error comes from there.
    frame = (traceback.extract_tb(error.__traceback__) or [None])[-1]
    place = "" if frame is None else f" at {Path(frame.filename).name}:{frame.lineno}"
    text = "".join(traceback.format_exception(error))
    saved = ""
    # Readable by its owner alone, as mkstemp makes it: a traceback can hold values of records.
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix="silodp-traceback-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        saved = f" The traceback is in {name}."
    if plugin := find_failed_plugin(error):
        return CommandFailure(
            MISTAKE,
            "plugin.raised",
            f"{plugin} raised {describe_exception(error)} ({place.strip()}): correct it.{saved}",
        )
    return CommandFailure(
        UNEXPECTED,
        "cli.unexpected",
        f"unexpected {type(error).__name__}{place} ({' '.join(str(error).split())[:200]}): correct it if it comes from "
        f"your code, else please report it.{saved}",
    )


def make_workers(count: int | None, cluster: str | None, gpus: float | None) -> Executor:
    """Return the workers that options ask for; this process where they ask for none.

    Raises:
        SilodpError: Their number is missing, or a setting is outside its range.
    """
    if count is None and (cluster is not None or gpus is not None):
        raise SilodpError(
            "--cluster and --gpus-per-worker say where workers are, and --workers is not given: set their number.",
            code="argument.missing",
            field="workers",
        )
    from silodp.runtime.executor import make_executor
    from silodp.settings import Whole

    if count is not None:
        Whole().check("count", count)  # before torch is imported, which takes seconds
    return make_executor(count, cluster=cluster, gpus=gpus)
