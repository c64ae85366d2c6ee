"""`silodp omop`: the public query of a table of an OMOP database, and a database of a folder of CSV files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silodp.cli._console import Json, OutFile, check_new, hand_out, show

Definition = Annotated[
    Path, typer.Argument(metavar="DEFINITION.toml", help="What a row and the columns of the table are.")
]

omop_app = typer.Typer(
    help="Write the query of a table of an OMOP database; load its CSV files.", no_args_is_help=True
)


@omop_app.command("query")
def omop_query(
    definition: Definition,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG.toml", help="The rest of the configuration, with which the part is joined."
        ),
    ] = None,
    out: OutFile = None,
    as_json: Json = False,
) -> None:
    """Write the part of a configuration that a definition stands for, with a query for each silo. No data are read."""
    from silodp.config.toml_values import read_toml
    from silodp_integrations.omop.config import write_config
    from silodp_integrations.omop.definition import read_definition

    check_new(out)
    base = ""
    if config is not None:
        read_toml(config)
        base = config.read_text(encoding="utf-8-sig")
    text = write_config(read_definition(definition), base)
    hand_out("config", text, out, as_json, "read the queries before you agree on them")


@omop_app.command("load")
def omop_load(
    definition: Definition,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder with person.csv and other tables.")
    ],
    silo: Annotated[str, typer.Option(metavar="NAME", help="The silo of the definition whose folder it is.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.duckdb", help="The file to write.")],
    as_json: Json = False,
) -> None:
    """Load what a definition needs of a folder of CSV files into a DuckDB file, with declared types."""
    from silodp_integrations.omop.definition import read_definition
    from silodp_integrations.omop.load import list_tables, load_folder

    rows = load_folder(folder, list_tables(read_definition(definition), silo), out)
    lines = [f"{name}: {number:,} rows" for name, number in rows.items()]
    show({"path": str(out), "rows": rows}, as_json, [*lines, f"{out}: its owner alone may read it"])
