"""`silodp data`: the benchmark data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silodp.cli._console import Json, Root, show

Name = Annotated[str, typer.Argument(metavar="NAME", help="A name from 'silodp data list'.")]

data_app = typer.Typer(help="List, check and fetch the benchmark data sets.", no_args_is_help=True)


@data_app.command("list")
def data_list(root: Root = None, as_json: Json = False) -> None:
    """List all data sets, and whether their files are present."""
    from silodp.data.fetch import list_datasets

    listed = list_datasets(root)
    lines = [
        f"{d.name:14} {d.rows:>9,} rows  {'present' if d.present else 'missing':8}  {d.origin}; {d.license}"
        for d in listed
    ]
    show({"datasets": [vars(d) for d in listed]}, as_json, lines)


@data_app.command("check")
def data_check(name: Name, root: Root = None, as_json: Json = False) -> None:
    """Check a data set. Compares its files with published checksums, and loads it."""
    from silodp.data.fetch import check

    found = check(name, root)
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
    if not found.ok:
        raise typer.Exit(1)


@data_app.command("fetch")
def data_fetch(name: Name, root: Root = None, as_json: Json = False) -> None:
    """Download a data set from its publisher."""
    import os

    from silodp.data.fetch import fetch

    folder = root or Path(os.environ.get("SILODP_DATA") or "data")
    paths = fetch(name, folder)
    result = {"name": name, "root": str(folder), "files": [str(path) for path in paths]}
    show(result, as_json, [*result["files"], f"to use it: export SILODP_DATA={folder.resolve()}"])
