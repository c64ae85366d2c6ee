"""The report of a run: the guarantee in plain words first, then pictures; one file, no network.

Everything is rebuilt from the files of the run directory alone, so `silodp report DIR` gives the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from silodp.accounting.accountant import MembershipAttack
from silodp.accounting.guarantee import ADVERSARIES, NOT_COVERED, TECHNICAL, Adversary, Guarantee
from silodp.errors import counted, name_file
from silodp.report import budget_plots, formatting, guarantee_text, plots
from silodp.report.divergence import divergence_warnings, left_out
from silodp.report.formatting import compute_attack_accuracy, format_epsilon, format_measure
from silodp.report.run_record import RunRecord, keep_allocation, read_run, versions
from silodp.runtime.train import MetricsRow

MOST_ROWS = 26  # of the table of rounds; metrics.jsonl has them all
_OURS = ("utility", "epsilon", "allocation", "budgets")  # how the names of a report's pictures begin
_HELD_OUT = [text for text in NOT_COVERED if text.startswith("records held out")]

_WHO_THEY_ARE: dict[Adversary, tuple[str, str]] = {
    "released": ("Whoever sees the models", "every global model of every round, the last one included"),
    "server": ("The server", "all that reaches the party that coordinates the run"),
    "silo": ("Another silo", "the models, and what that silo itself put in; for records in the other silos"),
}


@dataclass(frozen=True)
class Against:
    """One adversary on the page: who they are, what they see, what is promised, and what an attack could do.

    `attack` is None where there is no ledger, or no promise; `accuracy` follows then from ε and δ alone.
    """

    adversary: Adversary
    who: str
    sees: str
    guarantee: Guarantee
    attack: MembershipAttack | None

    @property
    def accuracy(self) -> float:
        """Of guessing membership from even odds, at most."""
        if self.attack is not None:
            return self.attack.accuracy
        return compute_attack_accuracy(self.guarantee.epsilon or 0.0, self.guarantee.delta)


@dataclass(frozen=True)
class Picture:
    """A figure on a page: its SVG element, and what stands under it."""

    svg: Markup
    caption: str


def write_report(
    directory: str | Path, allocation: NDArray[np.int64] | None = None, silo_names: Sequence[str] = ()
) -> Path:
    """Write DIR/report.html and DIR/plots/*.svg from the files in DIR; the path of the report.

    Args:
        directory: of a finished run.
        allocation: records of every person in every silo, (S, U), private. It is kept, ranked and without
            ids, in DIR/plots/allocation.json; without it a picture is drawn only if that file is there.
        silo_names: S names, for `allocation`.

    Raises:
        SilodpError: a file is missing or damaged, or the guarantees claim more privacy than the ledger bears out.
    """
    directory = Path(directory)
    if allocation is not None:
        keep_allocation(directory, plots.Allocation.of(np.asarray(allocation), silo_names))
    run = read_run(directory)
    pictures = _Pictures(directory)
    released = run.guarantees["released"]
    utility = [
        pictures.add(f"utility-{i}-{_slug(name)}", figure, _utility_caption(run.rows, name))
        for i, (name, figure) in enumerate(plots.utility(run.rows).items())
    ]
    figure = plots.epsilon(run.rows)
    ends = _ends(run.rows)
    against = [
        Against(a, *_WHO_THEY_ARE[a], run.guarantees[a], run.audit.attacks.get(a) if run.audit else None)
        for a in ADVERSARIES
    ]
    page = render(
        "report.html",
        run=run,
        released=released,
        private=[g for g in run.guarantees.values() if g.private],
        seeded=any(g.private and not g.releasable for g in run.guarantees.values()),
        adversaries=against,
        example=next((one for one in against if one.guarantee.private), None),
        to_sign=_assumptions(run.guarantees, technical=False),
        technical=_assumptions(run.guarantees, technical=True),
        not_covered=_not_covered(released, run.rows),
        doubts=divergence_warnings(run.rows),
        left_out=left_out(run.rows),
        versions=versions(),
        who=plots.WHO,
        ends=ends,
        utility=utility,
        epsilon=figure and pictures.add("epsilon", figure, _epsilon_caption(run)),
        allocation=run.allocation
        and pictures.add("allocation", plots.allocation(run.allocation), _allocation_caption(run.allocation)),
        table=_table(run.rows),
        sent=any(row.get("bytes") for row in run.rows),
        sights=run.aggregator.visibility if run.aggregator else (),
        persons=guarantee_text.persons(run.guarantees.values()),
        budgets=[
            (spent, pictures.add(f"budgets-{i}", figure, _budgets_caption(spent, _unit(released))))
            for i, spent in enumerate(guarantee_text.spending(run.guarantees.values()))
            if (figure := budget_plots.spending(spent.groups, _unit(released))) is not None
        ],
        charge=guarantee_text.charge,
        exceeds=guarantee_text.exceeds,
        claims=guarantee_text.claims(run.guarantees.values()),
        claimed=guarantee_text.CLAIMED,
        seconds=sum(formatting.as_number(row.get("seconds")) or 0.0 for row in run.rows),
    )
    pictures.finish()
    path = directory / "report.html"
    with name_file(path):
        path.write_text(page, encoding="utf-8")
    return path


def render(template: str, **values: Any) -> str:
    """A page from a template beside this module; every value is escaped unless it is our own SVG."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= formatting.FILTERS
    return environment.get_template(template).render(**values)


class _Pictures:
    """Saves figures under DIR/plots and gives their inline twins; an earlier report's do not stay behind."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "plots"
        self._folder.mkdir(exist_ok=True)
        self._names: set[str] = set()

    def add(self, name: str, figure: Any, caption: str) -> Picture:
        document = plots.svg(figure, name)
        path = self._folder / f"{name}.svg"
        with name_file(path):
            path.write_text(document, encoding="utf-8")
        self._names.add(name)
        return Picture(Markup(plots.inline(document, caption)), caption)

    def finish(self) -> None:
        for path in self._folder.glob("*.svg"):
            if path.stem not in self._names and path.stem.startswith(_OURS):
                path.unlink()


def _assumptions(
    guarantees: Mapping[Adversary, Guarantee], technical: bool
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Those of every guarantee, then the others by whom they are made against; each text comes once.

    Either the technical ones, or those that somebody must sign.
    """
    private = [g for g in guarantees.values() if g.private]
    made: dict[str, list[Adversary]] = {}
    for guarantee in private:
        for text in dict.fromkeys(guarantee.assumptions):
            if text.startswith(TECHNICAL) == technical:
                made.setdefault(text.removeprefix(TECHNICAL), []).append(guarantee.adversary)
    groups: dict[tuple[Adversary, ...], list[str]] = {}
    for text, against in made.items():
        groups.setdefault(tuple(against), []).append(text)
    everyone = groups.pop(tuple(g.adversary for g in private), [])
    widest_first = sorted(groups.items(), key=lambda group: -len(group[0]))
    return everyone, [(_all_of(against), texts) for against, texts in widest_first]


def _all_of(adversaries: Sequence[Adversary]) -> str:
    """As they stand within a sentence."""
    names = [_WHO_THEY_ARE[adversary][0] for adversary in adversaries]
    return " and ".join(name[0].lower() + name[1:] for name in names)


def _not_covered(released: Guarantee, rows: Sequence[MetricsRow]) -> list[str]:
    """What no ε covers; held-out records only where there were some."""
    measured = any(row.get("loss") is not None for row in rows)
    return [text for text in released.not_covered if measured or text not in _HELD_OUT]


def _ends(rows: Sequence[MetricsRow]) -> list[tuple[str, float | None, float, int]]:
    """Of each quantity: name, value of the untrained model, last value and its round."""
    ends = []
    for name in plots.quantities(rows):
        seen = [(row["round"], value) for row in rows if (value := plots.measured(row, name)) is not None]
        untrained = seen[0][1] if seen[0][0] == 0 else None
        ends.append((name, untrained, seen[-1][1], seen[-1][0]))
    return ends


def _utility_caption(rows: Sequence[MetricsRow], name: str) -> str:
    _, untrained, last, round_ = next(end for end in _ends(rows) if end[0] == name)
    start = (
        f"; untrained (hollow mark, dotted level): {format_measure(untrained)}"
        if untrained is not None
        else ""
    )
    return f"{name} on held-out records: {format_measure(last)} after round {round_}{start}."


def _epsilon_caption(run: RunRecord) -> str:
    parts = [
        f"against {plots.WHO[a]} {format_epsilon(g.epsilon)}"
        if g.private
        else f"against {plots.WHO[a]} no guarantee"
        for a, g in run.guarantees.items()
    ]
    return f"ε spent by the end of the run: {', '.join(parts)}."


def _allocation_caption(records: plots.Allocation) -> str:
    drawn = records.persons - records.without_records
    have = "has" if records.in_several_silos == 1 else "have"
    several = f"{records.in_several_silos:,} of {counted(drawn, 'person')} with records {have} them in several silos"
    empty = f"; {records.without_records:,} without any" if records.without_records else ""
    binned = ""
    if drawn > len(records.persons_per_bar):
        binned = (
            f" Drawn in {len(records.persons_per_bar)} steps of about {max(records.persons_per_bar)} persons "
            "of neighboring rank, each step their average."
        )
    return f"{several}{empty}. The most records of one person: {records.most_records:,}.{binned}"


def _unit(said: Guarantee) -> str:
    return "record" if said.unit == "record" else "person"


def _budgets_caption(spent: guarantee_text.BudgetSpending, unit: str) -> str:
    units = counted(sum(group["units"] for group in spent.groups), unit)
    kept = f"{spent.exceeded:,} were charged more" if spent.exceeded else "nobody was charged more"
    return f"ε asked for by {units}, and what each was charged: {kept} than asked for."


def _table(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """First, last and evenly spread rows between."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    return [rows[i] for i in np.linspace(0, len(rows) - 1, MOST_ROWS).round().astype(int)]


def _slug(name: str) -> str:
    """Fit for a file name."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())[:40]


__all__ = ["Picture", "RunRecord", "read_run", "render", "write_report"]
