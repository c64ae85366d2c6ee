"""The parts of commands that plan, configure or run a release of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli._console import format_command, show
from silodp.errors import SilodpError

if TYPE_CHECKING:
    from silodp.config.resolve import ResolvedRun

WriteConfig = Annotated[
    Path | None,
    typer.Option(
        "--write-config",
        metavar="FILE",
        help="Only write the configuration of the run, for 'silodp deploy init'. No data are read.",
    ),
]
Cohort = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Count the release in this cohort (silodp cohort new), and refuse it if it does not fit the limit.",
    ),
]


@dataclass(frozen=True)
class Released:
    """What a command shows of a run besides its guarantee.

    Attributes:
        facts: JSON-ready.
        lines: What stands before the guarantee.
        files: What stands behind it: where the numbers lie.
        noun: What is released, as in "whoever sees the statistics".
    """

    facts: dict[str, Any]
    lines: Sequence[str]
    files: str
    noun: str


def carry_out(
    config: Path,
    set_: Sequence[str] | None,
    users: int | None,
    plan: bool,
    write_config: Path | None,
    cohort: Path | None,
    out: Path | None,
    as_json: bool,
    derive: Callable[[ResolvedRun], ResolvedRun],
    describe_plan: Callable[[ResolvedRun, int | None], tuple[dict[str, Any], list[str]]],
    describe_run: Callable[[Path], Released],
) -> None:
    """Plan, configure or run a release of sums, and print what was found.

    Args:
        config, set_, users, plan, write_config, cohort, out, as_json: The options.
        derive: Returns the run that releases the sums a configuration asks for.
        describe_plan: Returns the plan of such a run with an assumed number of persons, and its lines.
        describe_run: Returns what the directory of a run has released.
    """
    from silodp_analytics.sums.config import load_request

    if users is not None and not plan:
        raise SilodpError(
            "--users has no meaning without --plan: a run counts the persons itself; leave it out.",
            code="argument.conflict",
            field="--users",
        )
    resolved = load_request(config, set_ or ())
    if not plan and write_config is None:
        resolved.dataset.check_files(resolved.arguments)
    resolved = derive(resolved)
    if plan:
        result, lines = describe_plan(resolved, users)
    elif write_config is not None:
        result, lines = _write_config(resolved, write_config)
    else:
        result, lines = _run(resolved, out or Path("runs") / resolved.config.name, cohort, describe_run)
    show(result, as_json, lines)


def _write_config(resolved: ResolvedRun, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Write the configuration of the run, which says all that is released, and the noise."""
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


def _run(
    resolved: ResolvedRun, directory: Path, cohort: Path | None, describe_run: Callable[[Path], Released]
) -> tuple[dict[str, Any], list[str]]:
    """Run all rounds, and return the summary with its lines."""
    from silodp.cli.run import run_config
    from silodp.report.guarantee_text import ADVERSARY_LABELS

    summary = run_config(resolved, directory, cohort=cohort)
    found = describe_run(directory)
    who = f"whoever sees the {found.noun}"
    lines = [
        *found.lines,
        *(text.replace(ADVERSARY_LABELS["released"], who) for text in summary["in_words"]),
    ]
    if summary["private"] and not summary["releasable"]:
        lines.append("Not for release: the noise came from a fixed seed.")
    return {**summary, **found.facts}, [*lines, found.files, f"Page: {summary['report']}"]
