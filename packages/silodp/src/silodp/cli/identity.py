"""`silodp identity`: write the public profile of who is the same person, and check a silo's table by it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli._console import Encoding, Json, Missing, Names, Separator, Sheet, list_reader_settings, show
from silodp.errors import SilodpError, name_file

identity_app = typer.Typer(
    help="Agree on who is the same person: write an identity profile, and check a table by it.",
    no_args_is_help=True,
)


@identity_app.command("new")
def identity_new(
    study: Annotated[str, typer.Option(help="Name of the study, for example heart-2026.")],
    population: Annotated[
        int,
        typer.Option(help="Number of persons U that no data may exceed; public, not counted in the tables."),
    ],
    kind: Annotated[
        str,
        typer.Option(
            click_type=Names(("digits", "code", "pseudonym")),
            help="What an identifier is: digits are a number, a code has letters and digits whose case is ignored, and "
            "pseudonyms are compared exactly.",
        ),
    ] = "digits",
    width: Annotated[int | None, typer.Option(help="Number of letters and digits of an identifier.")] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            help="Accepted spelling with separators: # is a digit, @ a letter, * one of both, for example "
            "###-###-####. Can be repeated."
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(click_type=Names(("mod11", "luhn", "mod97", "iban")), help="Rule of the check digit."),
    ] = None,
    lost_zeros: Annotated[
        int,
        typer.Option(help="The most leading zeros that a number may have lost, and that are put back."),
    ] = 1,
    placeholder: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that stands for no identifier. Can be repeated. Default for digits: 00…0, 99…9."
        ),
    ] = None,
    missing: Annotated[
        str,
        typer.Option(
            click_type=Names(("refuse", "drop")), help="What to do with a row without an identifier."
        ),
    ] = "refuse",
    overlap_note: Annotated[
        str, typer.Option(help="What the identifier is, for example 'national id'.")
    ] = "",
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write.")] = Path(
        "identity.toml"
    ),
    as_json: Json = False,
) -> None:
    """Write an identity profile. It is public, and the same file for every silo."""
    from silodp.data.identity.profile import parse_profile

    given: dict[str, Any] = {
        "study": study,
        "kind": kind,
        "population": population,
        "width": width,
        "layouts": layout or None,
        "check": check,
        "lost_zeros": lost_zeros if kind == "digits" else None,
        "placeholders": _make_placeholders(kind, width) if placeholder is None else placeholder,
        "missing": missing,
        "overlap_note": overlap_note,
    }
    profile = parse_profile(
        {name: value for name, value in given.items() if value is not None}, "identity new"
    )
    try:
        # "x": a profile that silos have agreed on is never replaced by accident.
        with name_file(out), out.open("x", encoding="utf-8") as file:
            file.write(profile.to_toml())
    except FileExistsError:
        raise SilodpError(
            f"{out} exists already: name another file with --out, or remove it.",
            code="identity.exists",
            field="--out",
        ) from None
    result = {"profile": str(out), "digest": profile.digest, "agreement_code": profile.agreement_code}
    lines = [f"{out}: send this file to every silo", f"Agreement code: {profile.agreement_code}"]
    show(result, as_json, lines)


def _make_placeholders(kind: str, width: int | None) -> list[str]:
    """Return the placeholders that tables of numbers usually have."""
    return [digit * width for digit in "09"] if kind == "digits" and width is not None and width < 129 else []


@identity_app.command("check")
def identity_check(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Identity profile, identity.toml.")],
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="The silo's file.")],
    column: Annotated[str, typer.Option(metavar="NAME", help="Column of identifiers.")],
    show_identifiers: Annotated[
        bool,
        typer.Option(
            "--show-identifiers",
            help="Print suspicious identifiers too. Without this option row numbers and counts are printed, and no "
            "identifier.",
        ),
    ] = False,
    separator: Separator = None,
    encoding: Encoding = None,
    sheet: Sheet = None,
    missing: Missing = None,
    as_json: Json = False,
) -> None:
    """Check a silo's table by a profile. Writes and sends nothing; the output is for the silo, apart from the code."""
    from silodp.data.identity import load_profile
    from silodp.data.identity.check import check_table
    from silodp.data.tables.columns import Reader

    settings = list_reader_settings(separator=separator, encoding=encoding, sheet=sheet, missing=missing)
    found = check_table(load_profile(profile), table, column, Reader(**settings))
    show(found.to_dict(show_identifiers), as_json, found.format(show_identifiers))
    # Status 1, as diff has it: the command worked, and the answer is no.
    if not found.ok:
        raise typer.Exit(1)
