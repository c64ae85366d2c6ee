"""The command line: arguments in, one JSON object or a few lines out; the work is done elsewhere.

Heavy modules are imported by the command that needs them, so that `silodp --help` answers at once.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from silodp.errors import SilodpError

if TYPE_CHECKING:
    from silodp.app.config import RunConfig

_RUN_FILES = {
    "config.toml",
    "metrics.jsonl",
    "guarantee.json",
    "model.safetensors",
    "report.html",
    "plots",
    "checkpoint",
}

app = typer.Typer(
    help="User-level differential privacy for federated learning across silos.",
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
)
data_app = typer.Typer(
    help="The benchmark data: what there is, whether it is right, where to get it.", no_args_is_help=True
)
app.add_typer(data_app, name="data")

Config = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What to run.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value, e.g. rounds=20.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Root = Annotated[
    Path | None, typer.Option("--root", metavar="DIR", help="Folder of the data sets (else $SILODP_DATA).")
]


@app.command()
def run(
    config: Config,
    set_: Set = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in DIR.")] = False,
    as_json: Json = False,
) -> None:
    """Train; write model, guarantee, metrics and report to DIR (default runs/NAME)."""
    from silodp.app.config import load_config

    settings = load_config(config, set_ or ())
    _train(settings, out or Path("runs") / settings.name, resume, as_json)


def load_demo() -> RunConfig:
    """The configuration of `silodp demo`."""
    from silodp.app.config import load_config

    return load_config(Path(__file__).with_name("demo.toml"))


@app.command()
def demo(out: Out = None, as_json: Json = False) -> None:
    """The embedded example: real records, no network, under a minute."""
    directory = out or Path("runs/demo")
    settings = load_demo()
    if _is_run_of(settings, directory):
        shutil.rmtree(directory)
    _train(settings, directory, False, as_json)


@app.command()
def plan(
    config: Config,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Find the σ, T and q that meet this ε.")
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """ε of every adversary before anything is run; touches no data."""
    from silodp.app.config import load_config
    from silodp.app.plan import in_lines
    from silodp.app.plan import plan as plan_

    settings = load_config(config, set_ or ())
    budget = settings.budget()
    result = plan_(
        settings.method(),
        silos=settings.silos,
        rounds=settings.rounds,
        delta=settings.delta,
        accountant=settings.accountant,
        aggregator=settings.aggregator,
        budget=None if budget is None else (budget.epsilon, budget.adversary),
        target=target_epsilon,
    )
    _print({"name": settings.name, **result}, as_json, in_lines(result))


@app.command()
def epsilon(
    method: Annotated[str, typer.Option(help="default, uldp-naive, uldp-group, uldp-sgd or uldp-avg.")],
    rounds: Annotated[int, typer.Option(help="T.")],
    noise_multiplier: Annotated[float | None, typer.Option(help="σ, in units of the sensitivity.")] = None,
    delta: Annotated[float, typer.Option(help="δ.")] = 1e-5,
    user_sampling: Annotated[float | None, typer.Option(help="q, per person and round.")] = None,
    group_size: Annotated[int | None, typer.Option(help="k, for uldp-group.")] = None,
    record_sampling: Annotated[float | None, typer.Option(help="γ, for uldp-group.")] = None,
    steps: Annotated[int | None, typer.Option(help="DP-SGD steps per round, for uldp-group.")] = None,
    accountant: Annotated[str, typer.Option(help="pld or rdp.")] = "pld",
    adversary: Annotated[str, typer.Option(help="released, server or silo.")] = "released",
    silos: Annotated[int | None, typer.Option(help="S.")] = None,
    aggregator: Annotated[str, typer.Option(help="Who sees what: plain.")] = "plain",
    weighting: Annotated[str | None, typer.Option(help="uniform or records.")] = None,
    colluding: Annotated[int, typer.Option(help="Silos that pool what they know.")] = 1,
    knows_sample: Annotated[
        bool, typer.Option("--knows-sample", help="The adversary knows who was sampled.")
    ] = False,
    as_json: Json = False,
) -> None:
    """ε of a method against one adversary."""
    from silodp.app.plan import epsilon as epsilon_
    from silodp.app.progress import rounded_up

    given = {
        "noise_multiplier": noise_multiplier,
        "user_sampling": user_sampling,
        "group_size": group_size,
        "record_sampling": record_sampling,
        "local_steps": steps,
        "weighting": weighting,
    }
    if method == "default":  # it has no noise to set; whatever is asked, there is no privacy
        given["noise_multiplier"] = None
    result = epsilon_(
        method,
        {name: value for name, value in given.items() if value is not None},
        rounds=rounds,
        delta=delta,
        accountant=accountant,
        adversary=adversary,
        silos=silos,
        aggregator=aggregator,
        colluding=colluding,
        knows_sample=knows_sample,
    )
    line = f"ε = {rounded_up(result['epsilon'])} at δ = {delta:g}, after {rounds} rounds, against {adversary}"
    promised = [line, *(f"  assuming that {assumption}" for assumption in result["assumptions"])]
    _print(result, as_json, promised if result["private"] else [f"no guarantee: {result['reason']}"])


@app.command()
def compare(
    config: Config,
    methods: Annotated[str, typer.Option(help="E.g. uldp-avg,uldp-avg:weighting=records,uldp-group:k=8.")],
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 5,
    set_: Set = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Utility against ε of several methods on the same data, mean ± sd."""
    from silodp.app.compare import compare as compare_
    from silodp.app.compare import table
    from silodp.app.config import load_config
    from silodp.app.progress import say

    settings = load_config(config, set_ or ())
    specs = settings.specs(methods)
    if seeds < 1:
        raise SilodpError(f"seeds = {seeds}: run each method at least once.")
    directory = out or Path("runs") / f"{settings.name}-compare"
    with _stdout_is_for_results():
        result = compare_(settings, specs, seeds, directory, say)
    _print(result, as_json, [table(result), f"Report: {directory / 'compare.html'}"])


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Of a finished run.")],
    as_json: Json = False,
) -> None:
    """Rebuild DIR/report.html."""
    from silodp.app.report import write_report

    path = write_report(directory)
    _print({"report": str(path)}, as_json, [str(path)])


@data_app.command("list")
def data_list(root: Root = None, as_json: Json = False) -> None:
    """Every data set, and whether it is here."""
    from silodp.data.fetch import list_datasets

    listed = list_datasets(root)
    lines = [
        f"{d.name:14} {d.rows:>9,} rows  {'here' if d.present else 'not here':8}  {d.origin}; {d.license}"
        for d in listed
    ]
    _print({"datasets": [vars(d) for d in listed]}, as_json, lines)


@data_app.command("check")
def data_check(name: str, root: Root = None, as_json: Json = False) -> None:
    """Compare a data set's files with their published checksums, and load it."""
    from silodp.data.fetch import check

    found = check(name, root)
    files = [{"path": str(file.path), "state": file.state} for file in found.files]
    result = {
        "name": name,
        "ok": found.ok,
        "rows": found.rows,
        "expected_rows": found.expected_rows,
        "files": files,
    }
    verdict = "as published" if found.ok else "NOT as published"
    verdict = f"{name}: {verdict}, {found.rows} of {found.expected_rows} rows"
    _print(result, as_json, [*(f"{file['state']:8} {file['path']}" for file in files), verdict])
    if not found.ok:
        raise typer.Exit(1)


@data_app.command("fetch")
def data_fetch(name: str, root: Root = None, as_json: Json = False) -> None:
    """Download a data set from where it is published."""
    import os

    from silodp.data.fetch import fetch

    folder = root or Path(os.environ.get("SILODP_DATA") or "data")
    paths = fetch(name, folder)
    result = {"name": name, "root": str(folder), "files": [str(path) for path in paths]}
    _print(result, as_json, [*result["files"], f"to use it: export SILODP_DATA={folder.resolve()}"])


def _train(settings: RunConfig, directory: Path, resume: bool, as_json: bool) -> None:
    from silodp.app.running import in_lines
    from silodp.app.running import run as run_

    with _stdout_is_for_results():
        summary = run_(settings, directory, resume)
    _print(summary, as_json, in_lines(summary))


def _is_run_of(settings: RunConfig, directory: Path) -> bool:
    """Whether a directory holds a run of this very configuration's name and data, and nothing else."""
    from silodp.app.config import load_config

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


def _print(result: dict[str, Any], as_json: bool, lines: Sequence[str]) -> None:
    if as_json:
        print(json.dumps(result, allow_nan=False, ensure_ascii=False))
    else:
        print("\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: a user's mistake is one sentence on standard error and exit status 2."""
    sys.exit(_status(arguments))


def _status(arguments: Sequence[str] | None) -> int:
    command = typer.main.get_command(app)
    try:
        return int(
            command.main(
                args=None if arguments is None else list(arguments), prog_name="silodp", standalone_mode=False
            )
            or 0
        )
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except click.ClickException as error:
        return _complain(error.format_message())
    except SilodpError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(
            f"{error.filename or 'a file'} cannot be used ({error.strerror or error}): choose another place."
        )
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130


def _complain(sentence: str) -> int:
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
