"""The model card of a run, MODEL_CARD.md, which may be shared with the model.

It is made of public constants, of what the guarantee covers, and of what the owner declares in the table [card] of the
configuration. No ε covers metrics on private records, so they are in the card only if the owner declares that they are
published. What is not known is said to be unknown.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silodp.accounting.guarantee import HELD_OUT, ON_THE_LIST
from silodp.config.schema import CardSection
from silodp.data.public import ASSUMES_INDEX_FROM_TABLES
from silodp.errors import SilodpError
from silodp.report.divergence import get_measure, list_quantities
from silodp.report.estimates import find_evaluation, format_estimate
from silodp.report.facts import ListedAssumption, ReportData, collect_facts
from silodp.report.formatting import format_code, format_measure, quote_names, render
from silodp.report.guarantee_text import (
    ADVERSARY_LABELS,
    IF_DEPLOYED,
    NOT_PROTECTED,
    describe_cover,
    describe_guarantee,
    format_guarantees,
)
from silodp.report.held_out import HeldOut, Part, read_held_out
from silodp.report.run_record import RunRecord
from silodp.report.sections import group_by_place
from silodp.report.skill import find_skill
from silodp.runtime.model_description import CARD, DESCRIPTION, ModelDescription
from silodp.runtime.run_files import CONFIG, GUARANTEE, MetricsRow
from silodp.text import join_names
from silodp.wire.files import write_durably

MIN_PERSONS = 20
"""Metrics on held-out records of fewer persons are left out of a card: they would be about single ones."""

# What replaces `HELD_OUT`, which speaks of metrics: a card may publish none.
_HELD_OUT = "records held out for testing: they are not trained on"


_Declared = list[tuple[str, str]]
"""Column and name of every subgroup that [card.subgroups] declares now."""


def write_card(directory: Path, run: RunRecord | None = None) -> Path | None:
    """Write DIR/MODEL_CARD.md from the files in DIR.

    Args:
        directory: The directory of a finished run.
        run: Its files, where they have been read.

    Returns:
        The path of the card; None for a run that releases no model.

    Raises:
        SilodpError: a file is damaged, guarantee and model are of different runs, or a setting of [card] is wrong.
    """
    text = compose_card(directory, run)
    if text is None:
        return None
    path = directory / CARD
    write_durably(path, text.encode())
    return path


def compose_card(directory: Path, run: RunRecord | None = None) -> str | None:
    """Return the text of the card; None for a run that releases no model."""
    facts, held_out = collect_facts(directory, run), read_held_out(directory)
    run, description = facts.run, facts.model
    if description is None:
        return None
    description.check_run(run.id, directory / GUARANTEE)
    try:
        declared = _list_declared(description, facts.card)
    except SilodpError as error:
        raise SilodpError(f"{directory / CONFIG}: {error}", code=error.code, field=error.field) from None
    text = render(
        "model_card.jinja",
        run=run,
        facts=facts,
        card=facts.card,
        held_out=held_out,
        pooled=_tabulate_pooled(run.rows, held_out, declared),
        verdict=_describe_skill(facts, held_out),
        **_describe_run(facts),
        **_describe_model(description),
    )
    # jinja drops the end of the last line
    return _seal(f"{text}\n", (directory / DESCRIPTION).read_bytes())


def check_card(path: Path, description: bytes) -> None:
    """Refuse a card that silodp did not write for a model.

    Args:
        path: The path of the card.
        description: Content of model.json.

    Raises:
        SilodpError: it was changed, or is of another run or other rounds (code bundle.mixed).
    """
    # The last two lines are the digests: with them made anew, the whole text must be the same.
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if "".join(lines) != _seal("".join(lines[:-2]), description):
        raise SilodpError(
            f"{path} is not the card of this model: 'silodp report' on the run's directory writes it again, with what "
            "the table [card] of config.toml declares; give a text of your own another name.",
            code="bundle.mixed",
        )


def _seal(card: str, description: bytes) -> str:
    """Return a card with digests of model.json, which it is about, and of itself."""
    # No signature: it finds a card that was edited by hand, or copied from another run, and nobody who makes it anew.
    about = f"- **`{DESCRIPTION}`**: SHA-256 `{hashlib.sha256(description).hexdigest()}`.\n"
    whole = hashlib.sha256((card + about).encode()).hexdigest()
    return f"{card}{about}- **This card**: SHA-256 `{whole}` of all lines above.\n"


def _describe_skill(facts: ReportData, held_out: HeldOut | None) -> list[str]:
    """Return sentences on the model beside a constant prediction, as far as the card may have its metrics."""
    if facts.run.summary.get("evaluation") == "sums":
        skill = find_skill(None, find_evaluation(facts.run.rows), facts.classes)
        return [] if skill is None else skill.describe()
    if not facts.card.publish_metrics or held_out is None or held_out.persons < MIN_PERSONS:
        return []
    # No frequency, mean or number of persons: the owner has chosen to publish the metrics alone.
    return [held_out.skill.describe_published(list_quantities(facts.run.rows))] if held_out.skill else []


def _list_declared(description: ModelDescription, card: CardSection) -> _Declared:
    if not card.subgroups:
        return []
    from silodp.data.tables.subgroups import list_group_names

    schema = None if description.inputs is None else description.schema
    return [
        (column, name)
        for column, values in card.subgroups.items()
        for name in list_group_names(schema, column, values)
    ]


def _describe_run(facts: ReportData) -> dict[str, Any]:
    """Return the values of the template that are about the guarantees and the settings of a run."""
    run = facts.run
    return {
        "min_persons": MIN_PERSONS,
        "released": facts.released,
        "guarantees": _describe_guarantees(run),
        "is_private": bool(facts.private),
        "sections": group_by_place(run.sections, lambda one: one.describe_for_card()),
        "assumptions": [_name_adversaries(one) + one.text for one in facts.assumptions],
        "not_covered": [
            text.replace(HELD_OUT, _HELD_OUT) for text in facts.not_covered if text != ON_THE_LIST
        ],
        "not_protected": NOT_PROTECTED if facts.has_public_list else "",
        "if_deployed": IF_DEPLOYED,
        "is_counted": any(one.id == ASSUMES_INDEX_FROM_TABLES.id for one in facts.assumptions),
        "covers": describe_cover(facts.released.private),
        "sums": _tabulate_sums(find_evaluation(run.rows)),
        "names": list_quantities(run.rows),
        "method": facts.method,
    }


def _name_adversaries(one: ListedAssumption) -> str:
    """Return the adversaries that an assumption is about; "" where these are all."""
    return "" if one.is_shared else f"(against {join_names(ADVERSARY_LABELS[a] for a in one.against)}) "


def _describe_model(described: ModelDescription) -> dict[str, Any]:
    """Return the values of the template that are about a model and its inputs."""
    sizes = [(math.prod(tensor.shape), tensor.trained) for tensor in described.tensors.values()]
    return {
        "model": described,
        "schema": None if described.inputs is None else described.schema,
        "scaling": _list_scaling(described),
        "inputs": _tabulate_inputs(described),
        "arguments": ", ".join(
            f"{name}={value!r}" for name, value in described.architecture.arguments.items()
        ),
        "trained": sum(size for size, trained in sizes if trained),
        "constant": sum(size for size, trained in sizes if not trained),
    }


def _describe_guarantees(run: RunRecord) -> list[str]:
    guarantees = run.guarantees.values()
    return [
        *(describe_guarantee(one, run.attacks.get(one.adversary)) for one in guarantees),
        *format_guarantees(list(guarantees)),
    ]


def _list_scaling(described: ModelDescription) -> Sequence[Any]:
    """Return (center, spread) of each label that is scaled; () where none is."""
    typical = described.label_typical or ()
    return [typical] if typical and described.targets is None else typical


def _tabulate_inputs(described: ModelDescription) -> list[tuple[str, str, str]]:
    """Return column, values and what a missing cell counts as, of every column of features; [] without a schema."""
    if described.inputs is None:
        return []
    schema, rows = described.schema, []
    for column, kind in schema.kinds.items():
        rows.append((quote_names([column]), *kind.describe(quote_names)))
    return rows


def _tabulate_sums(evaluation: Any) -> dict[str, Any] | None:
    """Return metrics by noisy sums: of all records, silos and subgroups; None where there are none."""
    if evaluation is None or not evaluation.estimates:
        return None
    names = list(evaluation.estimates)

    shown = [part for part in evaluation.parts if part.shown]
    has_silos = any(part.of == "silo" for part in evaluation.parts)
    has_groups = any(part.of != "silo" for part in evaluation.parts)
    return {
        "round": evaluation.round,
        "head": ["held-out records of", *names],
        "rows": [
            ("all silos", *(format_estimate(name, one) for name, one in evaluation.estimates.items())),
            *((format_code(part.title), *map(part.describe, names)) for part in shown),
        ],
        "hidden": quote_names(evaluation.list_hidden()),
        "least_group": evaluation.least_group,
        "unknown": [kind for kind, known in (("silo", has_silos), ("subgroup", has_groups)) if not known],
    }


def _tabulate_pooled(
    rows: Sequence[MetricsRow], held_out: HeldOut | None, declared: _Declared
) -> dict[str, Any]:
    """Return metrics on pooled held-out records: of all silos, of each, and of each declared subgroup."""
    last, names = rows[-1], list_quantities(rows)
    parts = () if held_out is None else held_out.parts
    silos = [part for part in parts if part.of == "silo"]
    measured = {(part.of, part.name): part for part in parts if part.of != "silo"}

    def make_row(title: str, persons: int, metrics: Mapping[str, float | None]) -> tuple[str, ...]:
        if persons < MIN_PERSONS:
            return (title, f"fewer than {MIN_PERSONS} persons", *("" for _ in names[1:]))
        return (title, *(format_measure(metrics.get(name)) for name in names))

    def make_part(title: str, part: Part) -> tuple[str, ...]:
        return make_row(title, part.persons, part.metrics)

    # Without the file it is not known of how many persons the records of all silos are.
    persons = 0 if held_out is None else held_out.persons
    titles = {one: ": ".join(map(format_code, one)) for one in declared}
    return {
        "rows": [
            make_row("all silos", persons, {name: get_measure(last, name) for name in names}),
            *(make_part(f"silo {format_code(part.name)}", part) for part in silos),
            *(make_part(titles[one], measured[one]) for one in declared if one in measured),
        ],
        "has_silos": bool(silos),
        "has_subgroups": bool(declared),
        "late": [titles[one] for one in declared if one not in measured],
    }
