"""`silodp cohort`: the limit on ε over all runs on the same people, and what they have spent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.cli._console import Json, Names, show
from silodp.errors import SilodpError
from silodp.text import pluralize

if TYPE_CHECKING:
    from silodp.accounting.cohort import Cohort

cohort_app = typer.Typer(
    help="Limit ε over all runs on the same people, however each run is chosen after seeing the others.",
    no_args_is_help=True,
)
Path_ = Annotated[Path, typer.Argument(metavar="FILE", help="The file of the cohort.")]


@cohort_app.command("new")
def new(
    path: Path_,
    epsilon: Annotated[float, typer.Option(help="The largest ε of all runs together.")],
    delta: Annotated[float, typer.Option(help="δ of the limit.")] = 1e-5,
    adversary: Annotated[
        list[str] | None,
        typer.Option(
            click_type=Names(ADVERSARIES),
            help="Against whom. Can be repeated. Default: against each of them.",
        ),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="plan|gaussian|order-A",
            help="Bound of the filter. Can be repeated. Default: those of a silo's lifetime limit.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the file of a cohort, before the first run on its people. Limit and rule cannot be changed later."""
    from silodp.accounting.cohort import create_cohort
    from silodp.accounting.filters import DEFAULT_BOUNDS

    limits: dict[Adversary, float] = {
        one: epsilon for one in ADVERSARIES if one in (adversary or ADVERSARIES)
    }
    if len(limits) < len(set(adversary or ())):
        raise SilodpError(
            f"--adversary: name one of {', '.join(ADVERSARIES)}.", code="argument.value", field="--adversary"
        )
    filter_bounds = tuple(rule or DEFAULT_BOUNDS)
    create_cohort(path, limits, delta, filter_bounds)
    lines = [
        f"Wrote {path}: all runs that are counted in it stay within ε = {format_epsilon(epsilon)} at δ = {delta:g} "
        f"against {', '.join(limits)}, however each is chosen after seeing the models of the others.",
        "Keep it where no old copy of it is restored: what was spent is known from this file alone.",
    ]
    show(
        {"cohort": str(path), "limits": limits, "delta": delta, "filter_bounds": filter_bounds},
        as_json,
        lines,
    )


@cohort_app.command("show")
def show_cohort(path: Path_, as_json: Json = False) -> None:
    """Show the runs of a cohort, and what they have spent together."""
    from silodp.accounting.cohort import Cohort

    result, lines = _describe(Cohort(path))
    show(result, as_json, lines)


@cohort_app.command("add")
def add(
    path: Path_,
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="Directory of a finished run that was not counted, with its ledger."
        ),
    ] = None,
    note: Annotated[str | None, typer.Option(help="A run whose ledger is not known: what it was.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="With --note: its ε.")] = None,
    over_limit: Annotated[
        bool,
        typer.Option("--over-limit", help="Write it down even if it does not fit; then no run is admitted."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Count a run that was done before without the cohort."""
    from silodp.accounting.cohort import Cohort

    if (directory is None) == (note is None) or (note is None) != (epsilon is None):
        raise SilodpError(
            "name the directory of a finished run, or give --note and --epsilon of one whose ledger is not known.",
            code="argument.missing",
            field="directory",
        )
    cohort = Cohort(path)
    if directory is not None:
        from silodp.runtime.cohort import read_counted_run

        cohort.add(*read_counted_run(directory), over_limit)
    else:
        cohort.note_unknown(str(note), float(epsilon or 0))
    result, lines = _describe(cohort)
    show(result, as_json, lines)


def _describe(cohort: Cohort) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a cohort, and its lines."""
    spent = {adversary: cohort.epsilon(adversary) for adversary in ADVERSARIES}
    runs = [
        {
            "run": one.run,
            "continuation": one.continuation,
            "purpose": one.purpose,
            "settled": one.is_settled,
            "added": one.is_added,
        }
        for one in cohort.runs.values()
    ]
    lines = [f"{pluralize(len(runs), 'run')} in {cohort.path}:"]
    ids = Counter(one.run for one in cohort.runs.values())
    for one in cohort.runs.values():
        state = (
            "done before"
            if one.is_added
            else "done"
            if one.is_settled
            else "reserved: running, or was stopped"
        )
        copied = " (a copy was continued as well)" if ids[one.run] > 1 else ""
        lines.append(f"  {one.run}  {one.purpose}, {state}{copied}")
    lines += [f"  not known: {note}, ε = {format_epsilon(epsilon)}" for note, epsilon in cohort.unknown]
    at_least = "at least " if cohort.unknown else ""
    for adversary, epsilon in spent.items():
        told = "nothing is promised" if epsilon is None else f"{at_least}ε = {format_epsilon(epsilon)}"
        limit = cohort.limits.get(adversary)
        kept = "no limit" if limit is None else f"limit {format_epsilon(limit)}"
        lines.append(
            f"{adversary:9} {told} at δ = {cohort.delta:g} if the runs were fixed beforehand; {kept}"
        )
    if cohort.exceeded is not None:
        lines.append(
            f"The limit against '{cohort.exceeded}' is exceeded by runs that were added: no run is admitted."
        )
    elif not cohort.unknown:
        lines.append("The limit holds however each run was chosen after seeing the others.")
    result = {
        "cohort": str(cohort.path),
        "runs": runs,
        "epsilon": spent,
        "limits": dict(cohort.limits),
        "delta": cohort.delta,
        "exceeded": cohort.exceeded,
        "unknown": [{"note": note, "epsilon": epsilon} for note, epsilon in cohort.unknown],
    }
    return result, lines
