"""The command line: arguments in, one JSON object or a few lines out; the work is done elsewhere.

Heavy modules are imported by the command that needs them, so that `silodp --help` answers at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
import typer.core

from silodp.cli._failures import INTERRUPTED, MISTAKE, failure_of
from silodp.cli._options import STANDARD_OUTPUT, Config, Json, Out, Set, show
from silodp.cli.costs import epsilon, plan
from silodp.cli.data import data_app
from silodp.cli.progress import Interrupted
from silodp.cli.table import table_app
from silodp.errors import SilodpError

if TYPE_CHECKING:
    from silodp.config.schema import RunConfig

_RUN_FILES = {
    "config.toml",
    "metrics.jsonl",
    "guarantee.json",
    "model.safetensors",
    "report.html",
    "plots",
    "checkpoint",
}

# Else Typer escapes "[required]" for rich's markup, which help in plain text never resolves.
typer.core.HAS_RICH = False

app = typer.Typer(
    help="User-level differential privacy for federated learning across silos. Begin with: silodp demo.",
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.command()
def run(
    config: Config,
    set_: Set = None,
    out: Out = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with a run that was stopped: silodp run DIR --resume."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model. Write it, its guarantee, metrics and a report to DIR (else runs/NAME)."""
    from silodp.cli._resuming import configuration_of
    from silodp.config.schema import load_config

    if resume and config.is_dir():
        out, config = out or config, configuration_of(config)
    elif resume and out is None and (config.parent / "checkpoint").is_dir():
        out = config.parent  # a run's own config.toml
    settings = load_config(config, set_ or ())
    _train(settings, out or Path("runs") / settings.name, resume, as_json)


def load_demo() -> RunConfig:
    """The configuration of `silodp demo`."""
    from silodp.config.schema import load_config

    return load_config(Path(__file__).with_name("demo.toml"))


@app.command()
def demo(out: Out = None, as_json: Json = False) -> None:
    """Train on the embedded example. Real records, no network, under a minute."""
    directory = out or Path("runs/demo")
    settings = load_demo()
    if _is_run_of(settings, directory):
        from silodp.runtime.lock import hold_lock
        from silodp.runtime.run_directory import LOCK

        with hold_lock(directory / "checkpoint" / LOCK):  # not under a demo that still runs
            shutil.rmtree(directory)
    _train(settings, directory, False, as_json)


app.command()(plan)
app.command()(epsilon)


@app.command()
def compare(
    config: Config,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods to compare, with settings of their own after colons, e.g. "
            "uldp-avg,uldp-avg:weighting=records,uldp-group:k=8.",
            show_envvar=False,
        ),
    ],
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 5,
    set_: Set = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train several methods and compare them. Utility and ε on the same data, mean ± sd over seeds."""
    from silodp.cli.compare import compare_methods as compare_
    from silodp.cli.compare import table
    from silodp.cli.progress import log
    from silodp.config.schema import load_config

    settings = load_config(config, set_ or ())
    specs = settings.specs(methods)
    directory = out or Path("runs") / f"{settings.name}-compare"
    try:
        with _stdout_is_for_results():
            result = compare_(settings, specs, seeds, directory, log)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command goes on after the last finished run") from None
    show(result, as_json, [table(result), f"Report: {directory / 'compare.html'}"])


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a finished run.")],
    as_json: Json = False,
) -> None:
    """Check the guarantee against the ledger; rebuild DIR/report.html."""
    from silodp.report.page import write_report
    from silodp.report.run_record import read_run

    path = write_report(directory)
    audit = read_run(directory).audit
    left = ("the guarantee: the ledger is not here",) if audit is None else audit.unchecked
    result = {"report": str(path), "not_checked": left}
    show(result, as_json, [str(path), *(f"Not checked: {what}." for what in left)])


app.add_typer(data_app, name="data")
app.add_typer(table_app, name="table")


def _train(settings: RunConfig, directory: Path, resume: bool, as_json: bool) -> None:
    from silodp.cli.run import format_text
    from silodp.cli.run import run_config as run_

    with _stdout_is_for_results():
        summary = run_(settings, directory, resume)
    show(summary, as_json, format_text(summary))


def _is_run_of(settings: RunConfig, directory: Path) -> bool:
    """Whether a directory holds a run of this very configuration's name and data, and nothing else."""
    from silodp.config.schema import load_config

    with contextlib.suppress(SilodpError, OSError):
        old = load_config(directory / "config.toml")
        return (
            old.name == settings.name
            and old.data == settings.data
            and {p.name for p in directory.iterdir()} <= _RUN_FILES
        )
    return False


@contextlib.contextmanager
def _stdout_is_for_results() -> Iterator[None]:
    """Whatever others print while they work, a user's own model included, goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: a user's mistake is one sentence on standard error and exit status 2 (see `failures`)."""
    sys.exit(_status(sys.argv[1:] if arguments is None else list(arguments)))


def _status(arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may not have ε, a path may be no UTF-8
            stream.reconfigure(errors="backslashreplace")
    as_json = "--json" in arguments
    try:
        if any("\0" in argument for argument in arguments):
            raise SilodpError("an argument has a NUL character: take it out.", code="cli.usage")
        command = typer.main.get_command(app)
        status = int(command.main(args=arguments, prog_name="silodp", standalone_mode=False) or 0)
        return status if status != INTERRUPTED else failure_of(KeyboardInterrupt()).show(as_json)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return MISTAKE
    except Exception as error:
        if isinstance(error, OSError) and error.filename == STANDARD_OUTPUT:
            _drop_output()
            as_json = False  # there is nowhere to print it
        return failure_of(error).show(as_json)
    except KeyboardInterrupt as error:
        return failure_of(error).show(as_json)


def _drop_output() -> None:
    """Let Python discard, as it exits, what standard output could not take."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
