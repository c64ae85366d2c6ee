"""The report of a run: one HTML file without network, the guarantee first, then pictures and settings.

It is made from the files of the run directory alone, so `silodp report DIR` writes the same text again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from silodp.accounting.guarantee import HELD_OUT, ON_THE_LIST
from silodp.accounting.views import Adversary
from silodp.aggregators.base import Visibility
from silodp.errors import name_file
from silodp.report import guarantee_text, plots
from silodp.report.divergence import describe_refused, find_divergence, get_measure, list_quantities
from silodp.report.estimates import find_evaluation, find_limits, format_estimate
from silodp.report.facts import Facts, ListedAssumption, collect_facts
from silodp.report.figures import inline_svg, render_svg
from silodp.report.formatting import render
from silodp.report.guarantee_text import WHO
from silodp.report.held_out import HeldOut, read_held_out
from silodp.report.model_card import compose_card
from silodp.report.run_record import RunRecord, format_versions, read_run
from silodp.report.sections import group_by_place, list_pictures
from silodp.report.skill import Skill, find_skill
from silodp.report.statements import list_statements
from silodp.runtime.model_description import CARD
from silodp.runtime.run_files import REPORT, MetricsRow
from silodp.text import join_names
from silodp.wire.files import write_durably

MAX_ROWS = 26
"""Rows of the table of rounds; metrics.jsonl has all of them."""
_PICTURES = (
    *("utility", "epsilon", "allocation", "budgets"),
    *("calibration", "confusion", "survival", "silos", "groups"),
)
"""First parts of the file names of a report's pictures."""

_End = tuple[str, float | None, float, int]
"""Name of a quantity, its value of the untrained model, its last value, and the round of the last value."""


@dataclass(frozen=True)
class Picture:
    """A figure on a page: its SVG element and its caption."""

    svg: Markup
    caption: str


def write_report(directory: str | Path, run: RunRecord | None = None) -> Path:
    """Write DIR/report.html and DIR/plots/*.svg from the files in DIR, or the page of a run of statistics.

    Args:
        directory: The directory of a finished run.
        run: Its files, where they have been read.

    Returns:
        The path of the report.

    Raises:
        SilodpError: a file is missing or damaged, or the guarantees contradict the ledger.
    """
    directory = Path(directory)
    pictures = PictureFolder(directory / "plots")
    texts = compose_texts(directory, run or read_run(directory), pictures)
    pictures.remove_old((*_PICTURES, *list_pictures()))
    for name, text in texts.items():
        write_durably(directory / name, text.encode())
    return directory / list(texts)[-1]


def compose_texts(directory: Path, run: RunRecord, pictures: PictureFolder) -> dict[str, str]:
    """Return the texts of the report by the names of their files, the page last, and write the pictures.

    Args:
        directory: The directory of the run.
        run: Its files.
        pictures: The folder of the pictures, which the page also has inside.
    """
    pages = (dict(section.compose_pages(pictures)) for section in run.sections.values())
    return next(filter(None, pages), None) or {REPORT: compose_page(directory, run, pictures)}


def find_outdated(directory: Path, run: RunRecord) -> list[str]:
    """Return the names of page and card that are not as silodp writes them now."""
    with TemporaryDirectory() as folder:
        texts = compose_texts(directory, run, PictureFolder(Path(folder)))
    card = compose_card(directory, run)
    if card is not None:
        texts[CARD] = card
    return [
        name
        for name, text in texts.items()
        if (directory / name).exists() and (directory / name).read_bytes() != text.encode()
    ]


def compose_page(directory: Path, run: RunRecord, pictures: PictureFolder) -> str:
    """Return the text of the report, and write its pictures.

    Args:
        directory: The directory of the run.
        run: Its files.
        pictures: The folder of the pictures, which the page also has inside.
    """
    facts = collect_facts(directory, run)
    guarantees, released = run.guarantees.values(), facts.released
    unit = "record" if released.unit == "record" else "person"
    ends, held_out = _list_ends(run.rows), read_held_out(directory)
    evaluation = find_evaluation(run.rows) if run.summary.get("evaluation") == "sums" else None
    evaluated = [row["round"] for row in run.rows if row.get("evaluation")]
    skill = find_skill(held_out, evaluation, facts.classes)
    figure = plots.plot_epsilon(run.rows)
    return render(
        "report.html",
        run=run,
        facts=facts,
        released=released,
        attacks=run.attacks,
        to_sign=list_statements(facts.assumptions),
        technical=_group_assumptions(one for one in facts.assumptions if one.technical),
        visibility=_list_visibility(run),
        not_covered=_list_not_covered(facts),
        diverged=find_divergence(run.rows),
        skill=skill,
        refused=describe_refused(run.rows),
        versions=format_versions(),
        text=guarantee_text,
        who=WHO,
        estimated=format_estimate,
        limits=find_limits,
        unit=unit,
        ends=ends,
        evaluation=evaluation,
        held_out=held_out,
        details=_draw_details(pictures, run, ends, held_out, evaluation, facts.classes),
        gaps=evaluation.list_gaps() if evaluation else (),
        utility=_draw_utility(pictures, run, ends, skill),
        sections=group_by_place(run.sections, lambda one: Markup(one.compose_html(pictures))),
        measurements=next((one.measurements for one in run.sections.values() if one.measurements), None),
        epsilon=figure
        and _add(pictures, "epsilon", figure, guarantees=run.guarantees, who=WHO, evaluated=evaluated),
        allocation=run.allocation
        and _add(pictures, "allocation", plots.plot_allocation(run.allocation), records=run.allocation),
        table=plots.thin(run.rows, MAX_ROWS),
        sent=any(row.get("bytes") for row in run.rows),
        budgets=[
            (spent, _add(pictures, f"budgets-{i}", figure, spent=spent, unit=unit))
            for i, spent in enumerate(guarantee_text.collect_spending(guarantees))
            if (figure := plots.plot_spending(spent.groups, unit)) is not None
        ],
    )


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

    def remove_old(self, prefixes: Iterable[str]) -> None:
        """Delete pictures of an earlier page: files whose names begin with a prefix and that were not added."""
        # One that a page no longer shows may show private counts that somebody has deleted from the run.
        for path in self._folder.glob("*.svg"):
            if path.stem not in self._names and path.stem.startswith(tuple(prefixes)):
                path.unlink()


def _group_assumptions(
    assumptions: Iterable[ListedAssumption],
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the assumptions of all guarantees, then the others by the adversaries that they are about."""
    # Most assumptions hold against every adversary: they are listed once, before those of single ones.
    everyone: list[str] = []
    groups: dict[tuple[Adversary, ...], list[str]] = {}
    for one in assumptions:
        (everyone if one.is_shared else groups.setdefault(one.against, [])).append(one.text)
    widest_first = sorted(groups.items(), key=lambda group: -len(group[0]))
    return everyone, [(join_names(WHO[a] for a in against), texts) for against, texts in widest_first]


def _list_visibility(run: RunRecord) -> tuple[Visibility, ...]:
    """Return who saw what, by the aggregator; () where a plug-in's author states nothing."""
    return run.aggregator.list_visibility(run.summary["weighted"], run.summary["sampled"])


def _list_not_covered(facts: Facts) -> list[str]:
    """Return what no ε covers, without the list of ids; held-out records only where pooled ones measured the model."""
    measured = any(row.get("loss") is not None for row in facts.run.rows)
    # Without a measurement on pooled records, there is no number about which a reader has to be warned.
    left_out = {ON_THE_LIST} if measured else {ON_THE_LIST, HELD_OUT}
    return [text for text in facts.not_covered if text not in left_out]


def _list_ends(rows: Sequence[MetricsRow]) -> list[_End]:
    """Return the ends of each measured quantity."""
    ends = []
    for name in list_quantities(rows):
        seen = [(row["round"], value) for row in rows if (value := get_measure(row, name)) is not None]
        # A run that was resumed without its metrics.jsonl lacks the row of the untrained model.
        untrained = seen[0][1] if seen[0][0] == 0 else None
        ends.append((name, untrained, seen[-1][1], seen[-1][0]))
    return ends


def _draw_utility(
    pictures: PictureFolder, run: RunRecord, ends: Sequence[_End], skill: Skill | None
) -> list[Picture]:
    """Return pictures against rounds of what was measured more than once."""
    constants = {} if skill is None else {name: skill.find_constant(name, last) for name, _, last, _ in ends}
    drawn = plots.plot_utility(run.rows, constants)
    by_sums = any(row.get("evaluation") for row in run.rows)
    return [
        _add(
            pictures,
            f"utility-{i}-{_slug(name)}",
            drawn[name],
            name=name,
            untrained=untrained,
            constant=constants.get(name),
            last=last,
            round=round_,
            by_sums=by_sums,
        )
        for i, (name, untrained, last, round_) in enumerate(ends)
        if name in drawn
    ]


def _draw_details(
    pictures: PictureFolder,
    run: RunRecord,
    ends: Sequence[_End],
    held_out: HeldOut | None,
    evaluation: Any,
    classes: Sequence[str],
) -> list[Picture]:
    """Return pictures of calibration, confusion, silos and subgroups, from what the run has; nothing is released."""
    drawn: list[tuple[str, Figure | None, str]] = []
    if held_out is not None:
        second = held_out.classes[1] if len(held_out.classes) == 2 else ""
        how = "held-out records, which no ε covers"
        drawn.append(("calibration", plots.plot_calibration(held_out.calibration, second), how))
        drawn.append(("confusion", plots.plot_confusion(held_out.confusion, held_out.classes), how))
        for name, _, last, _ in ends:
            for kind in ("silos", "groups"):
                parts = [
                    (part.name if part.of == "silo" else f"{part.of}: {part.name}", part.metrics[name], None)
                    for part in held_out.list_parts(kind == "silos")
                    if name in part.metrics
                ]
                drawn.append((f"{kind}-{_slug(name)}", plots.plot_parts(parts, name, last), name))
    elif evaluation is not None:
        drawn += _plot_evaluation(run, evaluation, classes)
    return [_add(pictures, name, figure, what=what) for name, figure, what in drawn if figure is not None]


def _plot_evaluation(
    run: RunRecord, evaluation: Any, classes: Sequence[str]
) -> list[tuple[str, Figure | None, str]]:
    """Return pictures of an evaluation by sums, each with its name and what it is from."""
    private = run.guarantees["released"].private
    how = f"noisy counts of held-out records, which {'ε' if private else 'no ε'} covers"
    drawn: list[tuple[str, Figure | None, str]] = []
    if evaluation.confusion is not None:
        names = list(evaluation.name_classes(classes))
        # Of more classes there is no curve of calibration, so counts by step of the probability say nothing here.
        if evaluation.has_steps:
            drawn.append(("calibration", plots.plot_calibration(evaluation.calibrate(), names[1]), how))
        drawn.append(("confusion", plots.plot_confusion(evaluation.confusion, names), how))
    drawn.append(("survival", evaluation.plot_survival(), how))
    for name, whole in evaluation.estimates.items():
        for kind in ("silos", "groups"):
            parts = [
                (part.name if part.of == "silo" else part.title, one.value, find_limits(name, one))
                for part in evaluation.list_parts(kind == "silos")
                if (one := part.estimates.get(name)) is not None
            ]
            figure = plots.plot_parts(parts, name, whole.value)
            drawn.append((f"{kind}-{_slug(name)}", figure, f"{name} with its 95 % interval,"))
    return drawn


def _add(pictures: PictureFolder, name: str, figure: Figure, /, **facts: Any) -> Picture:
    """Add a picture; its caption is made of these facts by the part of captions.jinja that its name begins with."""
    return pictures.add(name, figure, render("captions.jinja", of=name.partition("-")[0], **facts))


def _slug(name: str) -> str:
    """Return a name as a part of a file name."""
    # Names come from users: no path separators, no other alphabets, and a length that every file system takes.
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())[:40]
