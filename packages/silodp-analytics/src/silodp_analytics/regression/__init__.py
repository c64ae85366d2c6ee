"""Regression with intervals under ε per person: from Python, `regress` and `read_result`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from silodp.errors import SilodpError

if TYPE_CHECKING:
    from silodp_analytics.regression.result import RegressionResult


def regress(
    config: str | Path, *, epsilon: float | None = None, out: str | Path | None = None
) -> RegressionResult:
    """Fit the regression that a configuration names, in one process that reads all tables.

    Args:
        config: A TOML file with a table [regression].
        epsilon: ε in place of that of [regression].
        out: The directory of the run; None keeps everything in memory.

    Returns:
        The result: `table()` is a pandas frame, `to_json()` all numbers, and `plot()` a forest plot.

    Raises:
        SilodpError: a setting or a table that cannot be used.
    """
    from silodp.runtime.train import train
    from silodp_analytics.regression.config import derive_regression
    from silodp_analytics.regression.result import read_rows
    from silodp_analytics.sums.config import load_request

    resolved = derive_regression(load_request(config), epsilon)
    federation = resolved.load_federation()
    task = resolved.build_task(federation)
    trained = train(federation, task, resolved.method, out=out, **resolved.settings())
    result = read_rows(trained.metrics)
    if result is None:
        raise SilodpError(
            "no iteration of the regression was run: raise the budget.", code="regression.rounds"
        )
    return result.with_guarantees(trained.guarantees)


def read_result(directory: str | Path) -> RegressionResult:
    """Return the result in the directory of a run; see `result.read_result`."""
    from silodp_analytics.regression.result import read_result as read

    return read(directory)


__all__ = ["read_result", "regress"]
