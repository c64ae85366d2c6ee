"""Heads that go with the model of a finished run: a silo's, and a recalibration by noisy counts."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli._console import Json, ModelCode, show
from silodp.errors import SilodpError
from silodp.text import join_names, pluralize, suggest_name

if TYPE_CHECKING:
    from silodp.bundle import TrainedModel
    from silodp.config.schema import RunConfig, TaskSection
    from silodp.data.silo_data import SiloData
    from silodp_analytics.decisions.decisions import Recalibration
    from silodp_analytics.silo_head.silo_heads import MeasuredHead


def train_head(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Directory of a finished run, or a copy of its model.json, model.safetensors, guarantee.json and "
            "config.toml.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="FILE", help="Where the head is written: .safetensors; without TABLE a folder."
        ),
    ],
    table: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TABLE]",
            help="The silo's table, as for training. It is not changed. Without it, each silo of a simulated run gets "
            "a head, from the data of DIR/config.toml.",
        ),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help='A parameter of the model to train, besides scale and shift of the outputs, or a pattern such as "*" '
            "or last.*. Can be repeated.",
        ),
    ] = None,
    silo: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The silo of the run that wrote TABLE. Default: a silo that was not in it; without TABLE, all.",
        ),
    ] = None,
    code: ModelCode = None,
    learning_rate: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Step size of SGD. Default: 0.05.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="The most passes over the table that are tried. Default: 60."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Records per step. Default: 16.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a silo's head of a model on its table. It stays there, and costs no ε.

    Folds and batches are drawn at random, so that two calls give two heads.
    """
    from silodp.config.schema import parse_config
    from silodp.config.toml_values import read_toml

    # Not resolved: that would run the code that a configuration may name, and DIR may come from anywhere.
    config = parse_config({"name": "run", **read_toml(directory / "config.toml")}, directory)
    if table is not None:
        _check_out(out)
    # After what is refused without torch, whose import takes seconds.
    from silodp.bundle import load
    from silodp.report.guarantee_text import describe_epsilon
    from silodp.wire.files import PRIVATE_FILE, write_durably
    from silodp_analytics.silo_head.head import DEFAULT_LOCAL, STATEMENT
    from silodp_analytics.silo_head.silo_heads import MeasuredHead, SiloHeads, keep_silo_heads

    given: dict[str, Any] = {"learning_rate": learning_rate, "epochs": epochs, "batch_size": batch_size}
    local = replace(DEFAULT_LOCAL, **{name: value for name, value in given.items() if value is not None})
    section, heads, lines = config.task, [], []
    records = _find_records(config, directory, table, silo, out)
    with contextlib.redirect_stdout(sys.stderr):
        shared = load(directory, code=code)
        loss = _find_loss(section) or shared.find_loss(records[0][1].x)
    for file, data in records:
        with contextlib.redirect_stdout(sys.stderr):
            tuned = shared.fine_tune(data, parameters or (), local=local, loss=loss)
            measured = [_measure(model, data, section, loss) for model in (shared, tuned)]
        assert tuned.head is not None
        write_durably(file, tuned.head.to_bytes(), PRIVATE_FILE)
        heads.append(
            MeasuredHead(data.name, tuned.head.size, tuned.head.epochs, len(data.held_out), *measured)
        )
        lines += _describe(file, heads[-1])
    if table is None and silo is None:
        keep_silo_heads(directory, SiloHeads(shared.description.weights, tuple(heads)))
        lines.append(f"To see them in the report: silodp report {shlex.quote(str(directory))}")
    about = {"not_covered": STATEMENT, "guarantee": shared.guarantees["released"].to_dict()}
    rows = [{"out": str(file), **asdict(head)} for (file, _), head in zip(records, heads, strict=True)]
    result = {**rows[0], **about} if table is not None else {"silos": rows, **about}
    show(result, as_json, [*lines, STATEMENT, describe_epsilon(shared.guarantees["released"])])


def recalibrate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a finished run.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the correction is written: .safetensors.")
    ],
    silo: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A silo of which the run released counts (evaluation.by_silo): it has the scale of all silos, and "
            "a shift for its own frequency of the second class. Default: the correction for all silos.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Correct the probabilities of two classes by the noisy counts of a run's evaluation. It costs no further ε."""
    _check_out(out)
    from silodp.report.run_record import read_run
    from silodp.runtime.model_description import DESCRIPTION, ModelDescription
    from silodp_analytics.decisions.decisions import find_decisions
    from silodp_analytics.evaluation.report import find_evaluation

    run = read_run(directory)
    if not run.guarantees["released"].private:
        raise SilodpError(
            f"no ε covers the counts of {directory}, because the run has no guarantee: run it with noise, or use "
            "`silodp fine-tune` in each silo.",
            code="evaluation.noise",
            field="evaluation.noise_multiplier",
        )
    decisions = find_decisions(find_evaluation(run.rows), None)
    if decisions is None:
        raise SilodpError(
            f"{directory} has no noisy counts of two classes by which outputs could be corrected: run it with "
            'evaluation.across = "sums", or use `silodp fine-tune` in each silo.',
            code="evaluation.labels",
            field="evaluation.across",
        )
    fix = decisions.recalibration
    if isinstance(fix, str):
        raise SilodpError(
            f"the counts of {directory} give no correction, because {fix}: run it with more held-out records or less "
            "noise (evaluation), or use `silodp fine-tune` in each silo.",
            code="evaluation.labels",
            field="evaluation.noise_multiplier",
        )
    if silo is not None:
        fix = _find_correction(silo, decisions.silos)
    from silodp.wire.files import write_durably
    from silodp_analytics.silo_head.head import RECALIBRATED, SiloHead

    described = ModelDescription.read(directory / DESCRIPTION)
    head = SiloHead.of_recalibration(described.run, described.weights, fix.scale, fix.shift, fix.limits)
    write_durably(out, head.to_bytes())
    result = {"out": str(out), **vars(fix), "about": RECALIBRATED}
    sign = "plus" if fix.shift >= 0 else "minus"
    drawn, where = "", "in all steps but the first and the last"
    if fix.limits is not None:
        drawn = f" beyond ±{fix.limits[0]:.3g} are drawn in to less than ±{sum(fix.limits):.3g}, then all"
        where = "with these drawn in"
    scale = f"{fix.scale:.4g} ± {fix.scale_error:.2g}" if fix.scale_error else f"{fix.scale:.4g} (kept)"
    line = (
        f"{out}: logits{drawn} are multiplied by {scale}, {sign} {abs(fix.shift):.4g} ± {fix.shift_error:.2g} "
        "(standard errors)"
    )
    if fix.before is not None and fix.after is not None:
        line += f"; log loss of the predictions {where}: {fix.before:.4g} before, {fix.after:.4g} after"
    line += f"; {fix.verdict}." if fix.verdict else "."
    show(result, as_json, [line, RECALIBRATED])


def _find_correction(silo: str, known: Mapping[str, Recalibration]) -> Recalibration:
    """Return the correction of one silo."""
    if silo not in known:
        hint = suggest_name(silo, list(known)) or (
            f"those of {join_names(known)} are." if known else "run it with evaluation.by_silo = true."
        )
        raise SilodpError(
            f"--silo {silo}: no counts of it are known; {hint}",
            code="argument.value",
            field="--silo",
        )
    return known[silo]


def _check_out(out: Path) -> None:
    """Refuse a file of another type, and one that exists."""
    if out.suffix != ".safetensors" or out.exists():
        why = "is there already" if out.exists() else "does not end in .safetensors"
        raise SilodpError(
            f"--out {out} {why}: name a new .safetensors file.", code="argument.value", field="--out"
        )


def _find_records(
    config: RunConfig, directory: Path, table: Path | None, silo: str | None, out: Path
) -> list[tuple[Path, SiloData]]:
    """Return the records of a table, or of the silos of a run, each with the file of its head."""
    from silodp.bundle import read_silo_settings
    from silodp.config.resolve import load_silos, read_table_schema

    if table is not None:
        schema = read_table_schema(config)
        if schema is not None and silo is not None:
            read_silo_settings(directory, silo)  # refuses a silo that the run does not have
        return [(out, _read_table(schema, table, silo))]
    silos = load_silos(config)
    found = [(out / f"{one.name}.safetensors", one) for one in silos if silo in (None, one.name)]
    if silo is not None and not found:
        names = [one.name for one in silos]
        hint = suggest_name(silo, names) or f"its silos are {join_names(names)}."
        raise SilodpError(
            f"--silo {silo} is no silo of the run: {hint}",
            code="argument.value",
            field="--silo",
        )
    for file, _ in found:
        if file.exists():
            raise SilodpError(
                f"--out {out} has the head {file.name} already: name a new folder.",
                code="argument.value",
                field="--out",
            )
    out.mkdir(parents=True, exist_ok=True)
    return found


def _describe(file: Path, head: MeasuredHead) -> list[str]:
    """Return lines on a head, and what it changed."""
    lines = [f"{file}: {pluralize(head.numbers, 'number')}, trained for {pluralize(head.epochs, 'epoch')}."]
    if head.epochs == 0:
        lines.append("Training did not help persons who were left out: the head changes nothing.")
    records = pluralize(head.held_out_records, "held-out record")
    for name in head.shared:
        measured = (head.shared, head.with_head)
        before, after = (f"{one[name]:.4g}" if name in one else "not defined" for one in measured)
        lines.append(f"{name} on {records} (private): {before} shared, {after} with it.")
    return lines


def _read_table(schema: Any, table: Path, silo: str | None) -> SiloData:
    """Return the records of a table, read as for training."""
    from silodp.data.tables.reader import read_tables

    if schema is None:
        raise SilodpError(
            "the run was not trained on tables: in Python, give silodp.load(DIR).fine_tune a silodp.SiloData.",
            code="bundle.no_schema",
        )
    # Only whose records are whose is needed here, and that needs neither a public list nor a profile.
    (data,) = read_tables({silo or table.stem: table}, replace(schema, users=None, identity=None)).silos
    return data


def _find_loss(section: TaskSection) -> Any:
    """Return the loss of the run; None where it is the default one."""
    from silodp.config.task import find_loss
    from silodp.plugins import is_reference

    if section.loss is None:
        return None
    if is_reference(section.loss) and not section.loss.startswith("torch.nn:"):
        raise SilodpError(
            f"the loss of the run is code, {section.loss}: in Python, give it to silodp.load(DIR).fine_tune(data, "
            "loss=...).",
            code="bundle.code",
            field="task.loss",
        )
    return find_loss(section.loss, section.loss_options)


def _measure(model: TrainedModel, data: SiloData, section: TaskSection, loss: Any) -> dict[str, float]:
    """Return loss and metrics of silodp on the held-out records; nothing where there are none."""
    from silodp.config.task import find_metrics
    from silodp.training.metrics import METRICS
    from silodp.training.task import Task

    if not len(data.held_out):
        return {}
    known = None if section.metrics is None else [name for name in section.metrics if name in METRICS]
    described = model.description
    metrics = find_metrics(known, getattr(loss, "name", ""), described, len(described.classes) or None)
    task = Task(model.model, loss, metrics, pretrained=True)
    return task.evaluate(task.flatten(task.model), data.held_out.x, data.held_out.y)
