"""The command line: parses arguments and prints results; other modules do the work.

Heavy modules are imported by the command that needs them, so that `silodp --help` answers at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import click
import typer
import typer.core

from silodp._lazy import Registry, load
from silodp.cli._console import (
    INTERRUPTED,
    MISTAKE,
    STANDARD_OUTPUT,
    Cluster,
    GpusPerWorker,
    Json,
    LogPrivate,
    Set,
    Trackers,
    WorkerCount,
    describe_failure,
    drop_stream,
    make_workers,
    out_option,
    print_or_drop,
    print_warnings,
    redirect_prints,
    show,
)
from silodp.errors import SilodpError
from silodp.text import describe_exception, list_missing_packages

if TYPE_CHECKING:
    from silodp.config.resolve import ResolvedRun
    from silodp.config.schema import RunConfig
    from silodp.runtime.callback import Callback
    from silodp.runtime.executor import Executor

# With rich, Typer escapes "[required]" for its markup, which plain text does not resolve.
typer.core.HAS_RICH = False

COMMANDS: Registry[Callable[..., None] | typer.Typer] = Registry(
    "commands",
    {
        "report": "silodp.cli.report:report",
        "plan": "silodp.cli.plan:plan",
        "epsilon": "silodp.cli.plan:epsilon_app",
        "predict": "silodp.cli.predict:predict",
        "cohort": "silodp.cli.cohort:cohort_app",
        "data": "silodp.cli.data:data_app",
        "identity": "silodp.cli.identity:identity_app",
    },
)
"""The commands, and groups of commands, that other modules define."""


class _Commands(Mapping[str, click.Command]):
    """The commands of this module, and those of `COMMANDS`, each imported when it is called or listed by --help."""

    def __init__(self, own: Mapping[str, click.Command]) -> None:
        self._own = own

    def __getitem__(self, name: str) -> click.Command:
        if name in self._own:
            return self._own[name]
        if name in COMMANDS:
            return self._make_command(name, COMMANDS[name])
        reference = COMMANDS.references[name]
        try:
            return self._make_command(name, load(reference))
        # A stranger's module may raise anything, or call sys.exit; the others are still listed.
        except (Exception, SystemExit) as error:
            return _make_broken_command(name, reference, error)

    def _make_command(self, name: str, found: Callable[..., None] | typer.Typer) -> click.Command:
        # Typer makes commands only of what is registered in an app, so each gets one of its own.
        home = typer.Typer(add_completion=False, rich_markup_mode=None)
        if isinstance(found, typer.Typer):
            # `epsilon` is an app for the sake of its own class of command: it is the command, and no group of them.
            is_command = any(command.name == name for command in found.registered_commands)
            home.add_typer(found, name=None if is_command else name)
        else:
            home.command(name)(found)
        return typer.main.get_group(home).commands[name]

    def __iter__(self) -> Iterator[str]:
        yield from (*self._own, *COMMANDS, *COMMANDS.references)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _make_broken_command(name: str, reference: str, error: BaseException) -> click.Command:
    """Return the command of an entry point whose module cannot be imported: it says so, whatever it is asked."""
    problem = f"cannot be imported ({describe_exception(error)})"

    def fail() -> None:
        message = (
            f"the command {name}: {reference}, of the entry points silodp.commands, {problem}: correct it."
        )
        raise SilodpError(message, code="config.not_importable") from error

    options = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, options, fail, help=problem, short_help=problem, add_help_option=False)


class _CommandGroup(typer.core.TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast("dict[str, click.Command]", _Commands(self.commands))

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(context, args)
        except click.UsageError as error:
            error.message += list_missing_packages()
            raise


app = typer.Typer(cls=_CommandGroup, add_completion=False, rich_markup_mode=None, no_args_is_help=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        from silodp import __version__

        print(f"silodp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """User-level differential privacy for federated learning across silos. To begin, run: silodp demo."""


@app.command()
def run(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.toml",
            help="Configuration file, for example one of examples/*.toml; with --resume, a run's directory too.",
        ),
    ],
    target_epsilon: Annotated[
        float | None,
        typer.Option(help="Take the noise multiplier σ that meets this ε, in place of the configured one."),
    ] = None,
    set_: Set = None,
    out: Annotated[Path | None, out_option("runs/NAME, by the name of the configuration")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run that was stopped: silodp run DIR --resume.")
    ] = False,
    cohort: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Count the run in this cohort (silodp cohort new), and refuse it if it does not fit the limit.",
        ),
    ] = None,
    workers: WorkerCount = None,
    cluster: Cluster = None,
    gpus_per_worker: GpusPerWorker = None,
    log_: Trackers = None,
    log_private: LogPrivate = None,
    as_json: Json = False,
) -> None:
    """Train a model. Writes model, guarantee, metrics and report to the output directory."""
    from silodp.config.callbacks import read_log_options
    from silodp.config.resolve import load_config

    if resume and config.is_dir():
        out, config = out or config, _find_config(config)
    elif resume and out is None and (config.parent / "checkpoint").is_dir():
        out = config.parent  # config.toml of a run
    resolved = (
        load_config(config, set_ or ())
        if target_epsilon is None
        else _meet_target(config, target_epsilon, set_)
    )
    directory = out or Path("runs") / resolved.config.name
    found = make_workers(workers, cluster, gpus_per_worker)
    trackers = read_log_options(log_ or (), log_private)
    _train(resolved, directory, as_json, resume, trackers, cohort, found)


def _meet_target(config: Path, target: float, overrides: Sequence[str] | None) -> ResolvedRun:
    """Return the run with the noise multiplier that meets a target ε; the configuration need not have one."""
    from silodp.config.resolve import load_config
    from silodp.planning.plan import meet_target
    from silodp.settings import Epsilon, check_value

    check_value("target", target, Epsilon)
    resolved = load_config(config, [*(overrides or ()), "method.noise_multiplier=1"])
    return meet_target(resolved, target)


def _find_config(directory: Path) -> Path:
    """Return the configuration in the directory of a run.

    Raises:
        SilodpError: there is none.
    """
    path = directory / "config.toml"
    if not path.is_file():
        raise SilodpError(
            f"{directory} has no config.toml, so 'silodp run' has not trained there: name a configuration and the "
            "directory, silodp run CONFIG.toml --out DIR --resume.",
            code="config.path",
        )
    return path


def load_demo() -> ResolvedRun:
    """Return the configuration of `silodp demo`."""
    from silodp.config.resolve import load_config

    return load_config(Path(__file__).with_name("demo.toml"))


@app.command()
def demo(out: Annotated[Path | None, out_option("runs/demo")] = None, as_json: Json = False) -> None:
    """Train on an included example. Real records, no network, about a minute."""
    directory = out or Path("runs/demo")
    resolved = load_demo()
    # Only what an earlier demo wrote is deleted: a directory with anything else in it is refused by the run.
    if _is_run_of(resolved.config, directory):
        from silodp.runtime.run_directory import LOCK, hold_lock

        # The lock refuses where a demo is still running.
        with hold_lock(directory / "checkpoint" / LOCK):
            shutil.rmtree(directory)
    _train(resolved, directory, as_json)


def _train(
    resolved: ResolvedRun,
    directory: Path,
    as_json: bool,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    cohort: Path | None = None,
    executor: Executor | None = None,
) -> None:
    resolved.dataset.check_files(resolved.arguments)
    from silodp.cli.run import format_summary, run_config

    with redirect_prints():
        summary = run_config(resolved, directory, resume, callbacks, cohort, executor)
    show(summary, as_json, format_summary(summary))


def _is_run_of(config: RunConfig, directory: Path) -> bool:
    """Return whether a directory has only a run of a configuration with the same name and data."""
    from silodp.config.resolve import load_config
    from silodp.runtime.run_files import RUN_FILES

    with contextlib.suppress(SilodpError, OSError):
        old = load_config(directory / "config.toml").config
        return (
            old.name == config.name
            and old.data == config.data
            and {p.name for p in directory.iterdir()} <= RUN_FILES
        )
    return False


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; a mistake is one sentence on standard error and exit status 2.

    Args:
        arguments: None takes those of the process.
    """
    _open_closed_streams()
    with print_warnings():
        status = _run_command(sys.argv[1:] if arguments is None else list(arguments))
    sys.exit(status)


def _open_closed_streams() -> None:
    """Let standard streams that are closed lead nowhere: else the next file opened takes their place."""
    # The lowest free numbers are given first: once a number above 2 comes, 0, 1 and 2 are taken.
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


def _run_command(arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        # A terminal may lack ε, a path may not be UTF-8; some streams cannot be reconfigured.
        with contextlib.suppress(OSError, ValueError):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
    as_json = "--json" in arguments
    try:
        if any("\0" in argument for argument in arguments):
            raise SilodpError("an argument has a NUL character: take it out.", code="cli.usage")
        command = typer.main.get_command(app)
        # Not standalone: click would print errors and exit by itself, without codes and without --json.
        status = int(command.main(args=arguments, prog_name="silodp", standalone_mode=False) or 0)
        return status if status != INTERRUPTED else describe_failure(KeyboardInterrupt()).show(as_json)
    except click.exceptions.NoArgsIsHelpError as error:
        print_or_drop(error.format_message(), sys.stderr)
        return MISTAKE
    except Exception as error:
        # A full disk or a closed pipe: nothing more is printed there, and Python must not try again when it exits.
        if isinstance(error, OSError) and error.filename == STANDARD_OUTPUT:
            drop_stream(sys.stdout)
            as_json = False  # standard output cannot be written
        return describe_failure(error).show(as_json)
    except KeyboardInterrupt as error:
        return describe_failure(error).show(as_json)


if __name__ == "__main__":
    main()
