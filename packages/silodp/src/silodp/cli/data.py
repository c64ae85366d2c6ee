"""`silodp data`: the benchmark data sets, and a draft of a configuration for a table."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from silodp._lazy import load_extension
from silodp.cli._console import (
    Decimal,
    Encoding,
    Json,
    Missing,
    MissingIn,
    OutFile,
    Query,
    Root,
    Separator,
    Sheet,
    check_new,
    hand_out,
    list_reader_settings,
    show,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A name from 'silodp data list'.")]

data_app = typer.Typer(
    help="List, check and fetch the benchmark data sets; draft a configuration for a table.",
    no_args_is_help=True,
)


@data_app.command("list")
def data_list(root: Root = None, as_json: Json = False) -> None:
    """List all data sets, and whether their files are present."""
    listed = load_extension("experiments", "fetch:list_datasets")(root)
    lines = [
        # Some are made of what is installed here, which has no published number of rows.
        f"{d.name:14} {f'{d.rows:,}' if d.rows else 'varying':>9} rows  {'present' if d.present else 'missing':8}  "
        f"{d.origin}; {d.license}"
        for d in listed
    ]
    show({"datasets": [vars(d) for d in listed]}, as_json, lines)


@data_app.command("check")
def data_check(name: Name, root: Root = None, as_json: Json = False) -> None:
    """Check a data set. Compares its files with published checksums, and loads it."""
    found = load_extension("experiments", "fetch:check")(name, root)
    files = [{"path": str(file.path), "state": file.state} for file in found.files]
    result = {
        "name": name,
        "ok": found.ok,
        "rows": found.rows,
        "expected_rows": found.expected_rows,
        "files": files,
    }
    verdict = "as published" if found.ok else "NOT as published"
    verdict = f"{name}: {verdict}, {found.rows} of {found.expected_rows} rows"
    show(result, as_json, [*(f"{file['state']:8} {file['path']}" for file in files), verdict])
    # Status 1, as diff has it: the command worked, and the answer is no.
    if not found.ok:
        raise typer.Exit(1)


@data_app.command("fetch")
def data_fetch(name: Name, root: Root = None, as_json: Json = False) -> None:
    """Download a data set from its publisher."""
    import os

    folder = root or Path(os.environ.get("SILODP_DATA") or "data")
    paths = load_extension("experiments", "fetch:fetch")(name, folder)
    result = {"name": name, "root": str(folder), "files": [str(path) for path in paths]}
    show(
        result,
        as_json,
        [*result["files"], f"to use it: export SILODP_DATA={shlex.quote(str(folder.resolve()))}"],
    )


@data_app.command("inspect")
def data_inspect(
    table: Annotated[Path, typer.Argument(metavar="FILE", help="A silo's table.")],
    user: Annotated[str, typer.Option("--user", metavar="COLUMN", help="The column that names the person.")],
    label: Annotated[str, typer.Option("--label", metavar="COLUMN", help="The column to be predicted.")],
    out: OutFile = None,
    separator: Separator = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    sheet: Sheet = None,
    missing: Missing = None,
    missing_in: MissingIn = None,
    query: Query = None,
    as_json: Json = False,
) -> None:
    """Draft a configuration for a table, on this machine. Marks what it read off private rows."""
    from silodp.data.tables.columns import Reader
    from silodp.data.tables.draft import draft_config
    from silodp.wire.files import PRIVATE_FILE

    check_new(out)
    settings = list_reader_settings(
        separator=separator,
        decimal=decimal,
        encoding=encoding,
        sheet=sheet,
        missing=missing,
        missing_in=missing_in,
    )
    draft = draft_config(table, user, label, Reader(**settings), query)
    # Readable by its owner alone: the comments were read off private rows.
    told = "fill in every [] from public knowledge; the comments behind it were read off private rows"
    hand_out("draft", draft, out, as_json, told, mode=PRIVATE_FILE)
