"""`silodp predict`: predictions of a finished run for the rows of a table."""

from __future__ import annotations

import contextlib
import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from silodp.cli._console import (
    Decimal,
    Encoding,
    Json,
    Missing,
    MissingIn,
    ModelCode,
    Names,
    Separator,
    Sheet,
    list_reader_settings,
    read_pairs,
    show,
)
from silodp.errors import SilodpError, name_file
from silodp.text import pluralize

if TYPE_CHECKING:
    import pandas as pd

    from silodp.report.skill import Skill


def predict(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Directory of a finished run, or a copy of its public files: of a model, model.json, "
            "model.safetensors and guarantee.json.",
        ),
    ],
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="The table; it needs the columns of the features alone.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where predictions are written: .csv or .parquet.")
    ],
    copy: Annotated[
        list[str] | None,
        typer.Option(
            "--copy",
            metavar="COLUMN",
            help="A column of the table to copy, for example an id. Can be repeated.",
        ),
    ] = None,
    code: ModelCode = None,
    head: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The silo's head of the model, made by `silodp fine-tune`, or a recalibration.",
        ),
    ] = None,
    silo: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The silo of the run that wrote TABLE: its reader and its mapping are taken from DIR/config.toml.",
        ),
    ] = None,
    separator: Separator = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    sheet: Sheet = None,
    missing: Missing = None,
    missing_in: MissingIn = None,
    date: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=LAYOUT",
            help="Layout of a column of dates in this table, for example visit=%d.%m.%Y. Can be repeated.",
        ),
    ] = None,
    out_of_range: Annotated[
        str | None,
        typer.Option(
            click_type=Names(("refuse", "clip")),
            help="Rule for numbers outside the ranges of the model: clip moves them to the nearest end. Default: as in "
            "training.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict with what a run has released. Probabilities, numbers or (log) hazards, one row for every row of TABLE."""
    # Checked before torch and the model are loaded, which takes seconds.
    _check_paths(out, table)
    from silodp.predictor import load_predictor
    from silodp.report.guarantee_text import describe_epsilon
    from silodp.report.skill import read_skill

    # What the code of a model prints is no result, and would spoil the JSON object on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        model, skill = load_predictor(directory, code, head), read_skill(directory)
        reader = list_reader_settings(
            separator=separator,
            decimal=decimal,
            encoding=encoding,
            sheet=sheet,
            missing=missing,
            missing_in=missing_in,
            dates=dict(read_pairs("--date", date, "COLUMN=LAYOUT, for example visit=%d.%m.%Y")),
        )
        of_silo, mapping = None, None
        if silo is not None:
            from silodp.bundle import read_silo_settings

            of_silo, mapping = read_silo_settings(directory, silo)
        predictions = model.predict_table(
            table, copy or (), reader, cast(Any, out_of_range), mapping, of_silo
        )
    _write(predictions, out)
    result = {
        "out": str(out),
        "rows": len(predictions),
        "columns": list(model.columns),
        "guarantee": model.guarantees["released"].to_dict(),
        "skill": None if skill is None else skill.to_dict(),
        **model.to_json(),
    }
    show(
        result,
        as_json,
        [
            f"{out}: {pluralize(len(predictions), 'row')} with {', '.join(model.columns)}.",
            describe_epsilon(model.guarantees["released"]),
            *model.describe(),
            *([] if skill is None else _describe_skill(skill, head is not None)),
        ],
    )


def _describe_skill(skill: Skill, has_head: bool) -> list[str]:
    """Return what held-out records said of a model that is no good; a head of the silo may have changed it."""
    found = [] if skill.code == "better" and not skill.describe_calibration() else skill.describe()
    return [*(["Without the head of the silo:"] if found and has_head else []), *found]


def _check_paths(out: Path, table: Path) -> None:
    """Refuse a missing table, and as the output a file of another type, the table itself, and a file that exists."""
    if out.suffix.lower() not in (".csv", ".parquet"):
        raise SilodpError(
            f"--out {out}: name a file that ends in .csv or .parquet.", code="argument.value", field="--out"
        )
    if out.resolve() == table.resolve():
        raise SilodpError(
            f"--out {out} is the table itself: name another file.", code="argument.conflict", field="--out"
        )
    if out.exists():
        raise SilodpError(
            f"--out {out} exists already: name another file, or remove it.", code="run.exists", field="--out"
        )
    if not table.is_file():
        raise SilodpError(f"there is no table {table}: check its path.", code="data.no_file", field="TABLE")


def _write(predictions: pd.DataFrame, out: Path) -> None:
    from silodp.wire.files import write_durably

    buffer = BytesIO()  # written in one step, so that nobody reads half a table
    if out.suffix.lower() == ".csv":
        predictions.to_csv(buffer, index=False, lineterminator="\n")
    else:
        _write_parquet(predictions, buffer)
    with name_file(out):
        write_durably(out, buffer.getvalue())


def _write_parquet(predictions: pd.DataFrame, buffer: BytesIO) -> None:
    """Write a table; a column of several types, as spreadsheets have them, as text."""
    import pyarrow

    # Each column is tried, as the error of a whole table does not name the column that is at fault.
    for column in predictions.columns:
        try:
            pyarrow.array(predictions[column], from_pandas=True)
        except (TypeError, ValueError, OverflowError):
            predictions[column] = predictions[column].map(str, na_action="ignore")
    predictions.to_parquet(buffer, index=False)
