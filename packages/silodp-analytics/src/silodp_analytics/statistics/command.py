"""`silodp statistics`: statistics of the silos' tables under ε, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli._console import Config, Json, Set, Users, out_option
from silodp_analytics.sums.command import Cohort, Released, WriteConfig, carry_out

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
    write_config: WriteConfig = None,
    cohort: Cohort = None,
    set_: Set = None,
    out: Annotated[Path | None, out_option("runs/NAME-statistics, by the name of the configuration")] = None,
    as_json: Json = False,
) -> None:
    """Count what [statistics] names over all silos, with noise: Table One, histograms, survival curves."""
    from silodp_analytics.statistics.config import derive_statistics

    carry_out(
        config, set_, users, plan, write_config, cohort, out, as_json,
        derive=lambda resolved: derive_statistics(resolved, epsilon),
        describe_plan=_describe_plan,
        describe_run=_describe_run,
    )  # fmt: skip


def _describe_plan(resolved: ResolvedRun, users: int | None) -> tuple[dict[str, Any], list[str]]:
    """Return ε against every adversary, and the noise of every block."""
    from silodp_analytics.statistics.plan import format_statistics_plan, plan_statistics

    result = plan_statistics(resolved, users)
    return result, format_statistics_plan(result)


def _describe_run(directory: Path) -> Released:
    """Return the statistics of a run."""
    from silodp.report.run_record import read_run
    from silodp.runtime.run_files import STATISTICS
    from silodp_analytics.statistics.report.page import find_release, format_release

    release = find_release(read_run(directory).rows)
    found = [] if release is None else format_release(release)
    shared = str(directory / STATISTICS)
    return Released({"statistics": shared}, found, f"Statistics: {shared}", "statistics")
