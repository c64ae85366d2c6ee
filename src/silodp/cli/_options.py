"""What the commands share: options, and one way to print a result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.errors import name_file

Config = Annotated[
    Path, typer.Argument(metavar="CONFIG.toml", help="The configuration; examples/*.toml show some.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a value of the configuration, e.g. rounds=20 or method.clip=0.5; may be repeated.",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, of an error too.")
]
Root = Annotated[
    Path | None, typer.Option("--root", metavar="DIR", help="Folder of the data sets (else $SILODP_DATA).")
]

STANDARD_OUTPUT = "standard output"
"""The file name of an error in writing a result."""


def show(result: dict[str, Any], as_json: bool, lines: Sequence[str]) -> None:
    """Print a result, as one JSON object or as lines for reading."""
    with name_file(STANDARD_OUTPUT):  # a full disk would else show only as Python exits
        print(
            json.dumps(result, allow_nan=False, ensure_ascii=False) if as_json else "\n".join(lines),
            flush=True,
        )
