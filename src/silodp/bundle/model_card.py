"""The model card of a run, MODEL_CARD.md, which may be shared with the model.

It is made of public constants, of what the guarantee covers, and of what the owner declares in the table [card] of the
configuration. No ε covers metrics on private records, so they are in the card only if the owner declares that they are
published. What is not known is said to be unknown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from silodp.accounting.assumptions import HELD_OUT, TECHNICAL
from silodp.accounting.guarantee import Guarantee
from silodp.accounting.views import ADVERSARIES
from silodp.config.schema import CardSection, parse_card
from silodp.data.public import ASSUMES_INDEX_FROM_TABLES
from silodp.data.tables.subgroups import list_group_names
from silodp.errors import SilodpError, counted
from silodp.parsing import UNSOUND, parse_json, parse_toml, refuse_unsound
from silodp.report.divergence import get_measure, list_quantities
from silodp.report.formatting import format_measure, without_folders
from silodp.report.guarantee_text import collect_texts, describe_cover, describe_guarantee, format_guarantees
from silodp.report.held_out import HeldOut, Part, read_held_out
from silodp.report.run_record import RunRecord, read_run
from silodp.runtime.model_description import CARD, DESCRIPTION, ModelDescription
from silodp.wire.files import write_durably

LEAST_PERSONS = 20
"""Metrics on held-out records of fewer persons are left out of a card: they would be about single ones."""

_UNKNOWN = "Unknown: nobody has declared it ({} in the table [card] of the configuration)."
_UNCOVERED = "on private records, not covered by ε"
_HELD_OUT = "records held out for testing: they are not trained on"  # a card may publish no metric on them


@dataclass(frozen=True)
class _Facts:
    """What a card is made of."""

    run: RunRecord
    spec: Mapping[str, Any]
    description: ModelDescription
    card: CardSection
    held_out: HeldOut | None
    has_readable_config: bool = True

    def list_declared(self) -> list[tuple[str, str]]:
        """Return column and name of every subgroup that [card.subgroups] declares now."""
        schema = None if self.description.inputs is None else self.description.schema
        return [
            (column, name)
            for column, values in self.card.subgroups.items()
            for name in list_group_names(schema, column, values)
        ]


def write_card(directory: Path, run: RunRecord | None = None) -> Path | None:
    """Write DIR/MODEL_CARD.md from the files in DIR.

    Args:
        directory: of a finished run.
        run: its files, where they have been read.

    Returns:
        The path of the card; None for a run of a version that kept no description of its model.

    Raises:
        SilodpError: a file is damaged, guarantee and model are of different runs, or a setting of [card] is wrong.
    """
    if not (directory / DESCRIPTION).exists():
        return None
    run = run or read_run(directory)
    description = ModelDescription.read(directory / DESCRIPTION)
    stated = run.summary.get("run", description.run)  # earlier versions did not state it
    description.check_run(stated, directory / "guarantee.json")
    spec, held_out = _read_spec(directory / "run_spec.json"), read_held_out(directory)
    try:
        section = _read_section(run.config)
        facts = _Facts(run, spec, description, section or CardSection(), held_out, section is not None)
        facts.list_declared()
    except SilodpError as error:
        raise SilodpError(
            f"{directory / 'config.toml'}: {error}", code=error.code, field=error.field
        ) from None
    path = directory / CARD
    write_durably(path, _seal(format_card(facts), (directory / DESCRIPTION).read_bytes()).encode())
    return path


def check_card(path: Path, description: bytes) -> None:
    """Refuse a card that silodp did not write for a model.

    Args:
        path: of the card.
        description: content of model.json.

    Raises:
        SilodpError: it was changed, or is of another run or other rounds (code bundle.mixed).
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if "".join(lines) != _seal("".join(lines[:-2]), description):
        raise SilodpError(
            f"{path} is not the card of this model: 'silodp report' on the run's directory writes it again, with what "
            "the table [card] of config.toml declares; give a text of your own another name.",
            code="bundle.mixed",
        )


def _seal(card: str, description: bytes) -> str:
    """Return a card with digests of model.json, which it is about, and of itself."""
    about = f"- **`{DESCRIPTION}`**: SHA-256 `{hashlib.sha256(description).hexdigest()}`.\n"
    whole = hashlib.sha256((card + about).encode()).hexdigest()
    return f"{card}{about}- **This card**: SHA-256 `{whole}` of all lines above.\n"


def _read_spec(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    with refuse_unsound(f"{path} is damaged: restore it from a copy.", code="report.damaged"):
        spec: Mapping[str, Any] = parse_json(path.read_bytes())
        return {
            "silos": len(spec["data"]["silos"]),
            "users": spec["data"]["users"],
            "loss": spec["model"]["loss"],
        }


def _read_section(config: str | None) -> CardSection | None:
    """Return [card] of config.toml; None where the file is not TOML.

    Raises:
        SilodpError: the table has a wrong setting.
    """
    try:
        values = parse_toml(config or "")
    except ValueError:
        return None
    return parse_card(values)


def format_card(facts: _Facts) -> str:
    """Return the text of a card."""
    sections = {
        "Intended use": _format_use(facts.card),
        "Privacy guarantee": _format_guarantee(facts),
        "Data": _format_data(facts),
        "Metrics": _format_metrics(facts),
        "Training": _format_training(facts),
        "Files and versions": _format_files(facts),
    }
    lines = ["# Model card", ""]
    if facts.run.audit is None:
        lines += [
            "**Not checked.** When this card was written, the ledger of the run was missing: ε below is what "
            "`guarantee.json` states.",
            "",
        ]
    lines += _format_status(facts)
    if not facts.has_readable_config:
        lines += ["", "What the owner declared in the table [card] is missing: config.toml is not TOML."]
    for title, text in sections.items():
        lines += ["", f"## {title}", "", *text]
    return "\n".join([*lines, ""])


def _format_status(facts: _Facts) -> list[str]:
    released = facts.run.guarantees["released"]
    if not released.private:
        return [
            f"**Not for release.** This model has no privacy guarantee: {released.reason or 'no noise was added'}."
        ]
    if not released.releasable:
        return [
            "**Not for release.** The noise came from a fixed seed, so whoever knows the seed can compute it. The ε "
            "below are those of the same run with secret noise."
        ]
    if facts.card.publish_metrics and facts.held_out is not None:
        return [f"This card has metrics {_UNCOVERED}, which the owner of the data has chosen to publish."]
    return ["All that this card says is public, or is covered by the guarantee below."]


def _format_use(card: CardSection) -> list[str]:
    asked = {
        "Intended use": ("intended_use", card.intended_use),
        "Limits": ("limits", card.limits),
        "Contact": ("contact", card.contact),
        "License": ("license", card.license),
    }
    return [
        f"- **{title}**: {_one_line(text) if text else _UNKNOWN.format(field)}"
        for title, (field, text) in asked.items()
    ]


def _format_guarantee(facts: _Facts) -> list[str]:
    run = facts.run
    attacks = run.audit.attacks if run.audit else {}
    lines = [f"- {describe_guarantee(run.guarantees[a], attacks.get(a))}" for a in ADVERSARIES]
    lines += [f"- {text}" for text in format_guarantees(list(run.guarantees.values()))]
    if run.summary.get("simulation", True):
        lines += [
            "",
            "The run was a simulation: one program read all tables and acted as all parties. The ε hold for a run with "
            "the parties on separate machines.",
        ]
    private = [guarantee for guarantee in run.guarantees.values() if guarantee.private]
    if private:
        lines += ["", "Every ε depends on these assumptions, which a program cannot check:", ""]
        lines += [f"- {text}" for text in _list_once(private, "assumptions")]
        lines += ["", "No ε covers:", ""]
        lines += [f"- {text.replace(HELD_OUT, _HELD_OUT)}" for text in _list_once(private, "not_covered")]
    return [*lines, "", "`guarantee.json` has the same for programs."]


def _list_once(guarantees: Sequence[Guarantee], name: Literal["assumptions", "not_covered"]) -> list[str]:
    """Return each text once, with the adversaries that it is about where these are not all."""
    return [
        ("" if len(against) == len(guarantees) else f"(against {', '.join(against)}) ")
        + text.removeprefix(TECHNICAL)
        for text, against in collect_texts(guarantees, name).items()
    ]


def _format_data(facts: _Facts) -> list[str]:
    described, card = facts.description, facts.card
    kind = {
        "classes": "a class",
        "real": "a number" if described.targets is None else f"{described.targets} numbers",
        "survival": "the time of an event",
        "multilabel": f"{described.targets} answers of yes or no",
    }[described.labels]
    target = f" `{'`, `'.join(map(_code, described.target))}`" if described.target else ""
    silos, users = facts.spec.get("silos"), facts.spec.get("users")
    classes = ", ".join(f"`{_code(name)}`" for name in described.classes)
    scaled = ""
    if described.label_typical is not None:
        pairs: Any = [described.label_typical] if described.targets is None else described.label_typical
        usual = ", ".join(f"{center:.15g} ± {spread:.15g}" for center, spread in pairs)
        rules = ", ".join(f"(value − {center:.15g})/{spread:.15g}" for center, spread in pairs)
        scaled = f", typically {usual}; the model is trained on {rules}"
        if described.predicts_labels:
            scaled += ", and predictions of silodp are in the unit of the value"
    assumed = {text for guarantee in facts.run.guarantees.values() for text in guarantee.assumptions}
    is_counted = ASSUMES_INDEX_FROM_TABLES in assumed
    origin = (
        "counted in the tables: no public list states it" if is_counted else "the public size of the index"
    )
    lines = [
        f"- **Origin, time and place**: {_one_line(card.data) if card.data else _UNKNOWN.format('data')}",
        f"- **Predicted**: {kind}{target}{f': {classes}' if classes else ''}{scaled}.",
        f"- **Silos**: {silos or 'unknown'}. **Persons**: "
        + (f"{users:,}, {origin}." if isinstance(users, int) else "unknown."),
        "- **Records**: their number is private, or not kept; it is not in this card.",
    ]
    inputs = described.inputs
    if inputs is None:
        shape = " × ".join(map(str, described.record_shape)) or "several, by name"
        named = (
            f": {', '.join(f'`{_code(name)}`' for name in described.features)}" if described.features else ""
        )
        return [
            *lines,
            f"- **Inputs**: arrays of shape {shape}{named}. How they are scaled is unknown: no public constants tell.",
        ]
    schema = described.schema
    rule = "refused" if schema.out_of_range == "refuse" else "clipped to it"
    lines += ["", f"The inputs are read by public constants. A number outside its range is {rule}.", ""]
    rows = []
    for column in schema.feature_columns:
        if column in schema.categorical:
            values = ", ".join(
                f"`{_code(str(value))}`" for value in schema.categorical_columns()[column].categories
            )
            missing = schema.categorical_columns()[column].missing
            policy = "refused" if missing is None else f"count as `{_code(str(missing))}`"
            rows.append((f"`{_code(column)}`", f"one of {values}", policy))
        else:
            constants = schema.numeric_columns()[column]
            kind = "number" if constants.since is None else f"date, in days since {constants.since}"
            low, high = constants.range
            typical = (
                "" if constants.typical is None else ", typically {:g} ± {:g}".format(*constants.typical)
            )
            policy = "refused" if constants.fill is None else f"count as {constants.fill:g}"
            policy += ", with an input of 1 beside it" if constants.has_indicator else ""
            rows.append((f"`{_code(column)}`", f"{kind}, {low:g} to {high:g}{typical}", policy))
    return [*lines, *_format_table(("column", "values", "missing cells"), rows)]


def _format_metrics(facts: _Facts) -> list[str]:
    run, card, held_out = facts.run, facts.card, facts.held_out
    how = run.summary.get("evaluation")
    if how == "sums":
        return _format_sums(facts)
    if how == "local":
        return [
            "Unknown here: every silo measured the model on its held-out records by itself, and told nobody."
        ]
    names = list_quantities(run.rows)
    if not names:
        return ["Unknown: the model was not measured on held-out records."]
    if not card.publish_metrics:
        return [
            f"Not in this card: they were measured {_UNCOVERED}. The report of the run has them, for the owners of the "
            "data. To publish them, set `publish_metrics = true` in the table [card] of the configuration."
        ]
    last = run.rows[-1]
    lines = [
        f"Measured {_UNCOVERED}: on held-out records, after the last round. Those of fewer than {LEAST_PERSONS} "
        "persons are left out.",
        "",
    ]
    whole = [format_measure(get_measure(last, name)) for name in names]
    silos = () if held_out is None else held_out.list_parts(True)
    groups = () if held_out is None else held_out.list_parts(False)
    if held_out is None or held_out.persons < LEAST_PERSONS:  # without the file their number is not known
        whole = _leave_out(names)
    rows = [("all silos", *whole), *(_format_part(part, f"silo {_code(part.name)}", names) for part in silos)]
    declared = facts.list_declared()
    measured = {(part.of, part.name): part for part in groups}
    rows += [
        _format_part(measured[one], ": ".join(map(_code, one)), names) for one in declared if one in measured
    ]
    lines += _format_table(("held-out records of", *names), rows)
    if not silos:
        lines += ["", "Per silo: unknown."]
    if not declared:
        lines += ["", "Per subgroup: unknown; none is declared ([card.subgroups])."]
    elif held_out is None:
        lines += ["", "Per subgroup: unknown."]
    elif late := [": ".join(map(_code, one)) for one in declared if one not in measured]:
        lines += ["", f"Declared after the run, so not measured: {'; '.join(late)}."]
    return lines


def _format_sums(facts: _Facts) -> list[str]:
    """Return metrics by noised sums, which ε covers where there is one."""
    covers = describe_cover(facts.run.guarantees["released"].private)
    for row in reversed(facts.run.rows):
        estimates = (row.get("evaluation") or {}).get("estimates")
        if isinstance(estimates, Mapping) and estimates:
            table = [
                (name, f"{format_measure(one.get('value'))} ± {format_measure(one.get('standard_error'))}")
                for name, one in estimates.items()
            ]
            return [
                f"Measured on held-out records by noisy sums over all silos, which {covers}, "
                f"after round {row['round']}; "
                "± is the standard error of the noise.",
                "",
                *_format_table(("metric", "value"), table),
                "",
                "Per silo and per subgroup: unknown; the sums are over all silos and all records.",
            ]
    return [
        "Unknown: no evaluation was made within the privacy budget, or its counts were lost in the noise."
    ]


def _leave_out(names: Sequence[str]) -> list[str]:
    return [f"fewer than {LEAST_PERSONS} persons", *("" for _ in names[1:])]


def _format_part(part: Part, name: str, names: Sequence[str]) -> tuple[str, ...]:
    if part.persons < LEAST_PERSONS:
        return (name, *_leave_out(names))
    return (name, *(format_measure(part.metrics.get(metric)) for metric in names))


def _format_training(facts: _Facts) -> list[str]:
    run, released = facts.run, facts.run.guarantees["released"]
    architecture, tensors = facts.description.architecture, facts.description.tensors.values()
    arguments = ", ".join(f"{name}={value!r}" for name, value in architecture.arguments.items())
    model = {
        "silodp": f"`{architecture.name}({arguments})` of silodp, version {architecture.version}",
        "file": f"code of its owner, `model.py:{architecture.name}({arguments})`, SHA-256 `{architecture.sha256}`",
        "module": f"`{architecture.module}:{architecture.name}({arguments})`, SHA-256 `{architecture.sha256}`",
        "caller": "a module of the program that trained it; its code is unknown here",
    }[architecture.source]
    trained, constant = (
        sum(_count(one.shape) for one in tensors if one.trained is is_it) for is_it in (True, False)
    )
    stopped = "by the privacy budget" if run.summary.get("stopped") == "budget" else "as planned"
    return [
        f"- **Model**: {model}.",
        f"- **Numbers**: {trained:,} trained, {constant:,} constant.",
        f"- **Loss**: `{_code(str(facts.spec.get('loss') or 'unknown'))}`.",
        f"- **Method**: `{_code(without_folders(_describe_method(run)))}`.",
        f"- **Aggregator**: {run.aggregator.name if run.aggregator else 'unknown'}.",
        f"- **Rounds**: {counted(released.rounds, 'round')}, ended {stopped}. **Accountant**: {released.accountant} "
        f"at δ = {released.delta:g}.",
        "- **Tuning**: unknown. Settings chosen by looking at other runs on the same persons add the ε of those runs.",
    ]


def _describe_method(run: RunRecord) -> str:
    """Return the settings of the method as they were declared; all of them for a run without a configuration."""
    try:
        declared = parse_toml(run.config or "")["method"]
        return ", ".join([declared.pop("name"), *_list_settings(declared)])
    except UNSOUND:
        return str(run.summary.get("settings", "unknown"))


def _list_settings(table: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    """Return "name = value" of each setting in a table of TOML, and in the tables in it."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _list_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {json.dumps(value, ensure_ascii=False, default=str)}"


def _count(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _format_files(facts: _Facts) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in facts.description.versions.items())
    return [
        f"- **Trained with**: {versions or 'unknown'}.",
        f"- **`model.safetensors`**: SHA-256 `{facts.description.weights}`.",
        f"- **Use**: {_format_calls(facts.description)}.",
    ]


def _format_calls(description: ModelDescription) -> str:
    """Return the calls that load this model: code outside silodp has to be named in them."""
    architecture = description.architecture
    code = {"file": "model.py", "module": architecture.module}.get(architecture.source)
    options = "" if code is None else f', code="{code}"'
    if architecture.source == "caller":  # a module that a program passed; nothing is known of it
        options = ", model=MODULE"
    in_python = f"`silodp.load(DIR{options})` in Python"
    if architecture.source == "caller" or description.inputs is None:
        return in_python
    named = "" if code is None else f" --code {code}"
    return f"`silodp predict DIR TABLE --out FILE{named}`, or {in_python}"


def _format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [[" ".join(text.split()).replace("|", r"\|") for text in row] for row in (head, *rows)]
    first, *others = (f"| {' | '.join(row)} |" for row in cells)
    return [first, "|" + "---|" * len(head), *others]


def _code(text: str) -> str:
    """Return a name that cannot end its code span."""
    return " ".join(text.split()).replace("`", "'")


def _one_line(text: str) -> str:
    return " ".join(text.split())
