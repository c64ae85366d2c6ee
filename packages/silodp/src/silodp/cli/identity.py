"""`silodp identity`: write the public profile of who is the same person, and check a silo's table by it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli._console import (
    Encoding,
    Json,
    Missing,
    Names,
    Query,
    Separator,
    Sheet,
    list_reader_settings,
    show,
)
from silodp.errors import SilodpError, name_file
from silodp.text import shorten

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
    country: Annotated[
        str | None,
        typer.Option(help="Country of a national number, for example SE (docs/guides/identity.md)."),
    ] = None,
    number: Annotated[
        str | None,
        typer.Option(
            help="Name of a national number, for example personnummer: its rule says everything else."
        ),
    ] = None,
    reference_year: Annotated[
        int | None,
        typer.Option(help="Year in which all tables were written, for Swedish numbers without the century."),
    ] = None,
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
    separators: Annotated[
        str,
        typer.Option(help="Characters without a meaning, where layouts differ in them, for example '- '."),
    ] = "",
    check: Annotated[
        str | None,
        typer.Option(click_type=Names(("mod11", "luhn", "mod97", "iban")), help="Rule of the check digit."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Weights of the check digit, for example 10,9,8,7,6,5,4,3,2, in place of --check."),
    ] = None,
    modulus: Annotated[int | None, typer.Option(help="What the weighted sum is divided by.")] = None,
    remainders: Annotated[
        str | None,
        typer.Option(
            help="Check digit of each remainder, _ where no number is issued, for example 0_987654321."
        ),
    ] = None,
    letters: Annotated[
        str | None,
        typer.Option(
            help="Letters of a code in the order of their values, _ for none, for example _ABC (A is 1)."
        ),
    ] = None,
    lost_zeros: Annotated[
        int | None,
        typer.Option(
            help="The most leading zeros that a number may have lost, and that are put back; by default 1, of "
            "national numbers none."
        ),
    ] = None,
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

    is_national = country is not None or number is not None
    kind = "national" if is_national else kind
    given: dict[str, Any] = {
        "study": study,
        "kind": kind,
        "population": population,
        "country": country,
        "number": number,
        "reference_year": reference_year,
        "width": width,
        "layouts": layout or None,
        "separators": separators,
        "check": check,
        "weights": _parse_weights(weights),
        "modulus": modulus,
        "remainders": remainders,
        "letters": letters,
        "lost_zeros": 1 if lost_zeros is None and kind == "digits" else lost_zeros,
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


def _parse_weights(text: str | None) -> list[int] | None:
    """Return the numbers of "10,9,8".

    Raises:
        SilodpError: `identity.profile`.
    """
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise SilodpError(
            f"--weights {shorten(text)}: write whole numbers and commas, for example 10,9,8,7,6,5,4,3,2.",
            code="identity.profile",
            field="weights",
        ) from None


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
    query: Query = None,
    as_json: Json = False,
) -> None:
    """Check a silo's table by a profile. Writes and sends nothing; the output is for the silo, apart from the code."""
    from silodp.data.identity import load_profile
    from silodp.data.identity.check import check_table
    from silodp.data.tables.columns import Reader

    settings = list_reader_settings(separator=separator, encoding=encoding, sheet=sheet, missing=missing)
    found = check_table(load_profile(profile), table, column, Reader(**settings), query)
    show(found.to_dict(show_identifiers), as_json, found.format(show_identifiers))
    # Status 1, as diff has it: the command worked, and the answer is no.
    if not found.ok:
        raise typer.Exit(1)
