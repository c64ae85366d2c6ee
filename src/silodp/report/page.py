"""The report of a run: one HTML file without network, the guarantee first, then pictures and settings.

It is made from the files of the run directory alone, so `silodp report DIR` writes the same text again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from silodp.accounting.accountant import MembershipAttack
from silodp.accounting.guarantee import HELD_OUT, NOT_COVERED, TECHNICAL, Guarantee
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.errors import name_file
from silodp.report import guarantee_text, plots
from silodp.report.divergence import describe_refused, find_divergence, get_measure, list_quantities
from silodp.report.figures import inline_svg, render_svg
from silodp.report.formatting import as_number
from silodp.report.guarantee_text import WHO
from silodp.report.held_out import HeldOut, calibrate_counts, read_held_out
from silodp.report.run_record import Allocation, RunRecord, format_versions, keep_allocation, read_run
from silodp.report.templates import render
from silodp.runtime.run_files import MetricsRow
from silodp.training.counts import Estimate

MAX_ROWS = 26
"""Rows of the table of rounds; metrics.jsonl has all of them."""
_PICTURES = (
    "utility",
    "epsilon",
    "allocation",
    "budgets",
    "calibration",
    "confusion",
    "silos",
    "groups",
)  # first parts of the file names of a report

_End = tuple[str, float | None, float, int]
"""Name of a quantity, its value of the untrained model, its last value, and the round of the last value."""

_SEES: dict[Adversary, str] = {
    "released": "every global model of every round, the last one included",
    "server": "everything that reaches the party that coordinates the run",
    "silo": "the models and its own contributions; ε is for records in the other silos",
}


@dataclass(frozen=True)
class AdversaryRow:
    """One adversary on the page.

    Attributes:
        adversary: Its name.
        guarantee: Against it.
        attack: Bound by the charged events; None where there is no ledger or no guarantee.
    """

    adversary: Adversary
    guarantee: Guarantee
    attack: MembershipAttack | None

    @property
    def who(self) -> str:
        """The adversary as the beginning of a sentence."""
        return WHO[self.adversary][0].upper() + WHO[self.adversary][1:]

    @property
    def sees(self) -> str:
        """What the adversary sees, the object of "sees"."""
        return _SEES[self.adversary]

    @property
    def accuracy(self) -> float:
        """Bound on the accuracy of an attack on membership from even odds; without `attack` by ε and δ alone."""
        return guarantee_text.bound_accuracy(self.guarantee, self.attack)


@dataclass(frozen=True)
class Picture:
    """A figure on a page: its SVG element and its caption."""

    svg: Markup
    caption: str


@dataclass(frozen=True)
class EvaluationSection:
    """The last evaluation by noisy sums on the page.

    Attributes:
        round: The round after which it was made.
        noise_std: Standard deviation of the noise in a count.
        estimates: Metrics by name, with their standard errors.
        confusion: Noisy counts by true and predicted class; None for survival.
        counts: Noisy counts by true class and step of the probability; None for other kinds.
    """

    round: int
    noise_std: float
    estimates: Mapping[str, Estimate]
    confusion: Sequence[Sequence[float]] | None
    counts: Sequence[Sequence[float]] | None = None


def write_report(
    directory: str | Path, allocation: NDArray[np.int64] | None = None, silo_names: Sequence[str] = ()
) -> Path:
    """Write DIR/report.html and DIR/plots/*.svg from the files in DIR.

    Args:
        directory: The directory of a finished run.
        allocation: Records of every person in every silo, (S, U), private. It is kept, ranked and without
            ids, in DIR/plots/allocation.json; without it a picture is drawn only if that file is there.
        silo_names: S names, for `allocation`.

    Returns:
        The path of the report.

    Raises:
        SilodpError: a file is missing or damaged, or the guarantees contradict the ledger.
    """
    directory = Path(directory)
    if allocation is not None:
        keep_allocation(directory, Allocation.from_counts(np.asarray(allocation), silo_names))
    run = read_run(directory)
    pictures = PictureFolder(directory / "plots")
    released = run.guarantees["released"]
    unit = "record" if released.unit == "record" else "person"
    ends = _list_ends(run.rows)
    drawn = plots.plot_utility(run.rows)
    by_sums = any(row.get("evaluation") for row in run.rows)
    utility = []
    for i, (name, untrained, last, round_) in enumerate(ends):
        caption = _write_caption(
            "utility", name=name, untrained=untrained, last=last, round=round_, by_sums=by_sums
        )
        utility.append(pictures.add(f"utility-{i}-{_slug(name)}", drawn[name], caption))
    evaluation = _find_evaluation(run)
    held_out = read_held_out(directory)
    figure = plots.plot_epsilon(run.rows)
    adversaries = [
        AdversaryRow(a, run.guarantees[a], run.audit.attacks.get(a) if run.audit else None)
        for a in ADVERSARIES
    ]
    page = render(
        "report.html",
        run=run,
        released=released,
        private=[g for g in run.guarantees.values() if g.private],
        simulation=run.summary.get("simulation", True),
        seeded=any(g.private and not g.releasable for g in run.guarantees.values()),
        adversaries=adversaries,
        example=next((one for one in adversaries if one.guarantee.private), None),
        to_sign=_group_assumptions(run.guarantees, technical=False),
        technical=_group_assumptions(run.guarantees, technical=True),
        not_covered=_list_not_covered(released, run),
        diverged=find_divergence(run.rows),
        refused=describe_refused(run.rows),
        versions=format_versions(),
        who=WHO,
        unit=unit,
        ends=ends,
        evaluation=evaluation,
        held_out=held_out,
        details=_draw_details(pictures, run, ends, held_out, evaluation),
        utility=utility,
        epsilon=figure
        and pictures.add("epsilon", figure, _write_caption("epsilon", guarantees=run.guarantees, who=WHO)),
        allocation=run.allocation
        and pictures.add(
            "allocation",
            plots.plot_allocation(run.allocation),
            _write_caption("allocation", records=run.allocation),
        ),
        table=plots.thin(run.rows, MAX_ROWS),
        sent=any(row.get("bytes") for row in run.rows),
        visibility=run.aggregator.visibility if run.aggregator else (),
        persons=guarantee_text.tabulate_persons(run.guarantees.values()),
        linkage=guarantee_text.tabulate_linkage(run.guarantees.values()),
        budgets=[
            (spent, pictures.add(f"budgets-{i}", figure, _write_caption("budgets", spent=spent, unit=unit)))
            for i, spent in enumerate(guarantee_text.collect_spending(run.guarantees.values()))
            if (figure := plots.plot_spending(spent.groups, unit)) is not None
        ],
        is_exceeded=guarantee_text.is_exceeded,
        claims=guarantee_text.collect_claims(run.guarantees.values()),
        claimed=guarantee_text.CLAIMED,
        seconds=sum(as_number(row.get("seconds")) or 0.0 for row in run.rows),
    )
    pictures.remove_old(_PICTURES)
    path = directory / "report.html"
    with name_file(path):
        path.write_text(page, encoding="utf-8")
    return path


class PictureFolder:
    """The folder of the pictures of a page.

    Args:
        folder: Made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self._names: set[str] = set()

    def add(self, name: str, figure: Figure, caption: str) -> Picture:
        """Write a figure to NAME.svg, and return it for the page."""
        document = render_svg(figure, name)
        path = self._folder / f"{name}.svg"
        with name_file(path):
            path.write_text(document, encoding="utf-8")
        self._names.add(name)
        return Picture(Markup(inline_svg(document, caption)), caption)

    def remove_old(self, prefixes: tuple[str, ...]) -> None:
        """Delete pictures of an earlier page: files whose names begin with a prefix and that were not added."""
        for path in self._folder.glob("*.svg"):
            if path.stem not in self._names and path.stem.startswith(prefixes):
                path.unlink()


def _group_assumptions(
    guarantees: Mapping[Adversary, Guarantee], technical: bool
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the assumptions of all guarantees, then the others by adversaries; each text appears once.

    Args:
        guarantees: The guarantees, by adversary.
        technical: Whether the technical ones are wanted, or those that somebody must sign.
    """
    private = [g for g in guarantees.values() if g.private]
    groups: dict[tuple[Adversary, ...], list[str]] = {}
    for text, against in guarantee_text.collect_texts(private, "assumptions").items():
        if text.startswith(TECHNICAL) == technical:
            groups.setdefault(tuple(against), []).append(text.removeprefix(TECHNICAL))
    everyone = groups.pop(tuple(g.adversary for g in private), [])
    widest_first = sorted(groups.items(), key=lambda group: -len(group[0]))
    return everyone, [(" and ".join(WHO[a] for a in against), texts) for against, texts in widest_first]


def _list_not_covered(released: Guarantee, run: RunRecord) -> list[str]:
    """Return what no ε covers; held-out records only where pooled ones measured the model."""
    measured = any(row.get("loss") is not None for row in run.rows)
    found = [text for text in released.not_covered if measured or text != HELD_OUT]
    if run.summary.get("evaluation") == "sums":
        found = [
            f"{text} (the noised sums below are covered)" if text == NOT_COVERED[0] else text
            for text in found
        ]
    return found


def _list_ends(rows: Sequence[MetricsRow]) -> list[_End]:
    """Return the ends of each measured quantity."""
    ends = []
    for name in list_quantities(rows):
        seen = [(row["round"], value) for row in rows if (value := get_measure(row, name)) is not None]
        untrained = seen[0][1] if seen[0][0] == 0 else None
        ends.append((name, untrained, seen[-1][1], seen[-1][0]))
    return ends


def _find_evaluation(run: RunRecord) -> EvaluationSection | None:
    """Return the last evaluation by sums; None where there is none, or the rows do not hold one."""
    if run.summary.get("evaluation") != "sums":
        return None
    for row in reversed(run.rows):
        found = row.get("evaluation")
        if isinstance(found, dict):
            confusion = found.get("confusion")
            has_two_classes = isinstance(confusion, list) and len(confusion) == 2
            counts = found.get("counts") if has_two_classes else None
            try:
                return TypeAdapter(EvaluationSection).validate_python(
                    {**found, "round": row["round"], "counts": counts}
                )
            except ValidationError:
                return None  # the page shows the metrics of the row all the same
    return None


def _draw_details(
    pictures: PictureFolder,
    run: RunRecord,
    ends: Sequence[_End],
    held_out: HeldOut | None,
    evaluation: EvaluationSection | None,
) -> list[Picture]:
    """Return pictures of calibration, confusion, silos and subgroups, from what the run has; nothing is released."""
    drawn: list[tuple[str, Figure | None, str]] = []
    if held_out is not None:
        second = held_out.classes[1] if len(held_out.classes) == 2 else ""
        how = "held-out records, which no ε covers"
        drawn.append(("calibration", plots.plot_calibration(held_out.calibration, second), how))
        drawn.append(("confusion", plots.plot_confusion(held_out.confusion, held_out.classes), how))
        for name, _, last, _ in ends:
            for kind, parts in (("silos", held_out.list_parts(True)), ("groups", held_out.list_parts(False))):
                drawn.append((f"{kind}-{_slug(name)}", plots.plot_parts(parts, name, last), name))
    elif evaluation is not None and evaluation.confusion is not None:
        private = run.guarantees["released"].private
        how = f"noisy counts of held-out records, which {'ε' if private else 'no ε'} covers"
        names = [str(number) for number in range(len(evaluation.confusion))]
        if evaluation.counts is not None:
            bins = calibrate_counts(evaluation.counts, evaluation.noise_std)
            drawn.append(("calibration", plots.plot_calibration(bins, "class 1"), how))
        drawn.append(("confusion", plots.plot_confusion(evaluation.confusion, names), how))
    return [
        pictures.add(name, figure, _write_caption(name.partition("-")[0], what=what))
        for name, figure, what in drawn
        if figure is not None
    ]


def _write_caption(of: str, **values: Any) -> str:
    return render("captions.jinja", of=of, **values)


def _slug(name: str) -> str:
    """Return a name as a part of a file name."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())[:40]
