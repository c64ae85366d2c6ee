"""`silodp attack`: made-up persons are hidden in a canary run, and every adversary attacks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from silodp.accounting.views import ADVERSARIES
from silodp.cli._console import Json, Names, Set, log, show
from silodp.errors import SilodpError
from silodp.settings import Whole

FAILED = 1
"""Exit status where a promise is contradicted, or a test of noise fails."""


def attack(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.toml|DIR",
            help="What is attacked: a configuration, or the directory of a finished run.",
        ),
    ],
    set_: Set = None,
    canaries: Annotated[
        int,
        typer.Option(
            metavar="M", help="Made-up persons that are hidden, from 200 on; more see smaller leaks."
        ),
    ] = 1500,
    adversary: Annotated[
        str, typer.Option(click_type=Names((*ADVERSARIES, "all")), help="Who attacks.")
    ] = "all",
    rounds: Annotated[
        int | None,
        typer.Option(
            metavar="T", help="Rounds that are played. Default: all; with fewer, a wrong count is not seen."
        ),
    ] = None,
    level: Annotated[
        float, typer.Option(help="Probability of a false alarm, for all adversaries together.")
    ] = 0.05,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Where attack.json is written. Default: DIR, if a run is attacked."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack what is promised. Hides made-up persons in a canary run, and tries to find them.

    No table is read and no model is kept. Exit status 0: nothing contradicts the promise; 1: a promise or a test of
    noise failed; 2: a mistake.
    """
    if adversary not in (*ADVERSARIES, "all"):
        raise SilodpError(
            f"--adversary {adversary}: name one of {', '.join(ADVERSARIES)}, or all.",
            code="argument.value",
            field="--adversary",
        )
    if rounds is not None:
        Whole().check("rounds", rounds)
    from silodp_audit.attack.targets import load_target, write_attack

    target = load_target(path, set_ or ())
    # What is refused above is refused before torch is imported, which takes seconds.
    from silodp_audit.attack.audit_run import audit_run
    from silodp_audit.report.attacks import describe_result, parse_attack

    if rounds is not None and rounds < target.rounds:
        claimed = target.claimed_rounds or target.rounds
        target = replace(target, rounds=rounds, promises=None, claimed_rounds=claimed)
        log(
            f"warning: {rounds} of {claimed} rounds are played, and ε is theirs: "
            "a wrong count of rounds is not seen"
        )
    asked = ADVERSARIES if adversary == "all" else (adversary,)
    result = audit_run(target, canaries=canaries, adversaries=asked, level=level)  # type: ignore[arg-type]
    content = result.to_dict()
    lines = describe_result(parse_attack(content))
    directory = out or (path if path.is_dir() else None)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        lines.append(f"Written: {write_attack(directory, content)}")
    show(content, as_json, lines)
    if result.verdict != "consistent":
        raise typer.Exit(FAILED)
