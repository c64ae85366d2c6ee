"""`silodp redcap`: a draft of a configuration from the data dictionary of a REDCap project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silodp.cli._console import Json, OutFile, check_new, hand_out


def redcap(
    dictionary: Annotated[
        Path, typer.Argument(metavar="DICTIONARY.csv", help="The data dictionary; no records are read.")
    ],
    user: Annotated[str, typer.Option("--user", metavar="FIELD", help="The field that names the person.")],
    label: Annotated[
        str,
        typer.Option(
            "--label", metavar="FIELD", help="The field to be predicted; of a checkbox FIELD___CODE."
        ),
    ],
    missing_codes: Annotated[
        str,
        typer.Option(
            "--missing-codes",
            metavar="CODES",
            help="The project's Missing Data Codes, as in 'NA, not asked | -99, refused'.",
        ),
    ] = "",
    out: OutFile = None,
    as_json: Json = False,
) -> None:
    """Draft a configuration for raw exports of a REDCap project, from its public data dictionary."""
    from silodp.errors import SilodpError
    from silodp_integrations.redcap.dictionary import read_choices, read_dictionary
    from silodp_integrations.redcap.draft import draft_schema

    check_new(out)
    try:
        codes = read_choices(missing_codes) if missing_codes.strip() else {}
    except ValueError as error:
        remedy = "write codes and labels as in 'NA, not asked | -99, refused'"
        raise SilodpError(
            f"missing codes: {error}: {remedy}.", code="argument.value", field="missing_codes"
        ) from None
    draft = draft_schema(read_dictionary(dictionary), user, label, codes)
    hand_out("draft", draft, out, as_json, "fill in every setting with FILL IN from public knowledge")
