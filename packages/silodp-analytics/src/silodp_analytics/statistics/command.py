"""`silodp statistics`: statistics of the silos' tables under ε, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli._console import Config, Json, Set, Users, format_command, out_option, show
from silodp.errors import SilodpError

if TYPE_CHECKING:
    from silodp.config.resolve import ResolvedRun


def statistics(
    config: Config,
    epsilon: Annotated[
        float | None,
        typer.Option(help="ε of the release, in place of statistics.epsilon of the configuration."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only show ε and the noise in each count. No data are read.")
    ] = False,
    users: Users = None,
    write_config: Annotated[
        Path | None,
        typer.Option(
            "--write-config",
            metavar="FILE",
            help="Only write the configuration of the run, for 'silodp deploy init'. No data are read.",
        ),
    ] = None,
    cohort: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Count the release in this cohort (silodp cohort new), and refuse it if it does not fit the limit.",
        ),
    ] = None,
    set_: Set = None,
    out: Annotated[Path | None, out_option("runs/NAME-statistics, by the name of the configuration")] = None,
    as_json: Json = False,
) -> None:
    """Count what [statistics] names over all silos, with noise: persons, histograms, means, survival curves."""
    from silodp.config.resolve import load_config
    from silodp_analytics.statistics.config import derive_statistics

    if users is not None and not plan:
        raise SilodpError(
            "--users has no meaning without --plan: a run counts the persons itself; leave it out.",
            code="argument.conflict",
            field="--users",
        )
    resolved = load_config(config, set_ or ())
    if not plan and write_config is None:
        resolved.dataset.check_files(resolved.arguments)
    resolved = derive_statistics(resolved, epsilon)
    if plan:
        result, lines = _plan(resolved, users)
    elif write_config is not None:
        result, lines = _write_config(resolved, write_config)
    else:
        result, lines = _run(resolved, out or Path("runs") / resolved.config.name, cohort)
    show(result, as_json, lines)


def _plan(resolved: ResolvedRun, users: int | None) -> tuple[dict[str, Any], list[str]]:
    """Return ε against every adversary, and the noise of every block."""
    from silodp_analytics.statistics.plan import format_statistics_plan, plan_statistics

    result = plan_statistics(resolved, users)
    return result, format_statistics_plan(result)


def _write_config(resolved: ResolvedRun, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Write the configuration of the run, which says all that is counted and the noise."""
    from silodp.wire.files import write_durably

    if path.exists():
        raise SilodpError(
            f"{path} is there already, and nothing was written: name another file.",
            code="report.exists",
            field="--write-config",
        )
    write_durably(path, resolved.config.to_toml().encode())
    start = format_command("deploy", "init", path)
    return {"config": str(path)}, [f"Wrote {path}. For parties on separate machines: {start}"]


def _run(resolved: ResolvedRun, directory: Path, cohort: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Run the round, and return its summary with its lines."""
    from silodp.cli.run import run_config
    from silodp.report.guarantee_text import ADVERSARY_LABELS
    from silodp.report.run_record import read_run
    from silodp.runtime.run_files import STATISTICS
    from silodp_analytics.statistics.report.page import find_release, format_release

    summary = run_config(resolved, directory, cohort=cohort)
    release = find_release(read_run(directory).rows)
    found = [] if release is None else format_release(release)
    shared = str(directory / STATISTICS)
    lines = [
        *found,
        *(
            text.replace(ADVERSARY_LABELS["released"], "whoever sees the statistics")
            for text in summary["in_words"]
        ),
    ]
    if summary["private"] and not summary["releasable"]:
        lines.append("Not for release: the noise came from a fixed seed.")
    lines += [f"Statistics: {shared}", f"Page: {summary['report']}"]
    return {**summary, "statistics": shared}, lines
