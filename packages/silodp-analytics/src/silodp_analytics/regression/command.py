"""`silodp regression`: coefficients with intervals under ε per person, over all silos."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli._console import Config, Json, Set, Users, out_option
from silodp_analytics.sums.command import Cohort, Released, WriteConfig, carry_out

if TYPE_CHECKING:
    from silodp.config.resolve import ResolvedRun


def regression(
    config: Config,
    epsilon: Annotated[
        float | None,
        typer.Option(help="ε of all iterations, in place of regression.epsilon of the configuration."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only show ε and the expected errors. No data are read.")
    ] = False,
    users: Users = None,
    write_config: WriteConfig = None,
    cohort: Cohort = None,
    set_: Set = None,
    out: Annotated[Path | None, out_option("runs/NAME-regression, by the name of the configuration")] = None,
    as_json: Json = False,
) -> None:
    """Fit the regression that [regression] names over all silos, with noise: coefficients, intervals, p-values."""
    from silodp_analytics.regression.config import derive_regression

    carry_out(
        config, set_, users, plan, write_config, cohort, out, as_json,
        derive=lambda resolved: derive_regression(resolved, epsilon),
        describe_plan=_describe_plan,
        describe_run=_describe_run,
    )  # fmt: skip


def _describe_plan(resolved: ResolvedRun, users: int | None) -> tuple[dict[str, Any], list[str]]:
    """Return ε against every adversary, and the expected errors."""
    from silodp_analytics.regression.plan import format_regression_plan, plan_regression

    result = plan_regression(resolved, users)
    return result, format_regression_plan(result)


def _describe_run(directory: Path) -> Released:
    """Return the coefficients of a run."""
    from silodp_analytics.regression.result import read_result
    from silodp_analytics.regression.section import RESULT

    result, found = read_result(directory), str(directory / RESULT)
    facts = {"regression": found, "coefficients": result.to_json()["coefficients"]}
    return Released(facts, result.format(), f"Coefficients: {found}", "coefficients")
