"""`silodp report`: check a finished run, write its page and card; its other tasks are those of an extension."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from silodp._lazy import Registry
from silodp.cli._console import Json, Names, show
from silodp.errors import SilodpError, require
from silodp.text import join_names

TASKS: Registry[Callable[..., None]] = Registry("report_tasks", {})
"""What `silodp report` does with options for people who sign: the task "sign" of the package silodp-audit."""


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a finished run.")],
    checklist: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write a checklist of what no program can check, to be filled; with --sign or --manifest, the filled "
            "one.",
        ),
    ] = None,
    sign: Annotated[
        Path | None,
        Option(
            metavar="KEY", help="Sign the report as it is, with a key of 'silodp report-key': DIR/signatures."
        ),
    ] = None,
    name: Annotated[str | None, Option(help="With --sign: name of the person who signs.")] = None,
    role: Annotated[
        str | None, Option(help="With --sign: as what, for example data-protection officer.")
    ] = None,
    verify: Annotated[
        Path | None,
        Option(metavar="PUBLIC", help="Check the signatures that were made with the key of this public key."),
    ] = None,
    manifest: Annotated[
        bool,
        Option("--manifest", help="Print the SHA-256 of what is signed, to sign it with GPG or ssh-keygen."),
    ] = False,
    template: Annotated[
        str | None,
        Option(
            click_type=Names(("dpia", "hipaa", "nist", "registry", "w3c")),
            help="Write a draft for an authority or a registry, with the facts of the run filled in.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option("--out", metavar="FILE", help="With --template: the file. Default: DIR/NAME of the template."),
    ] = None,
    again: Annotated[
        bool, Option("--again", help="Replace files that are signed, or a signature under the same name.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check the guarantee against the ledger. Writes DIR/report.html and DIR/MODEL_CARD.md again.

    With one of --sign, --verify, --manifest, --template, or with --checklist alone, only that is done.
    """
    _check_options({"sign": sign, "verify": verify, "manifest": manifest or None, "template": template})
    require(
        sign is None or (name is not None and role is not None),
        "--sign needs --name and --role: who signs, and as what.",
        code="argument.missing",
        field="name" if name is None else "role",
    )
    if not manifest and all(one is None for one in (checklist, sign, verify, template)):
        _write(directory, again, as_json)
        return
    TASKS.load_required("sign", "audit", "this task of 'silodp report'")(
        directory,
        checklist=checklist,
        sign=sign,
        name=name,
        role=role,
        verify=verify,
        manifest=manifest,
        template=template,
        out=out,
        again=again,
        as_json=as_json,
    )


def _check_options(options: dict[str, object]) -> None:
    """Refuse two tasks at once."""
    given = [name for name, value in options.items() if value is not None]
    require(
        len(given) < 2,
        f"--{' and --'.join(given)} are different tasks: give one of them.",
        code="argument.conflict",
        field=given[0] if given else None,
    )


def _write(directory: Path, again: bool, as_json: bool) -> None:
    from silodp.report.guarantee_text import describe_guarantee
    from silodp.report.model_card import write_card
    from silodp.report.page import find_outdated, write_report
    from silodp.report.run_record import read_run
    from silodp.report.sections import merge_json
    from silodp.report.skill import read_skill
    from silodp.runtime.run_files import list_signatures

    record, signed = read_run(directory), list_signatures(directory)
    if signed and not again and (outdated := find_outdated(directory, record)):
        raise SilodpError(
            f"{directory} is signed ({', '.join(path.name for path in signed)}), and nothing was written: "
            f"{join_names(outdated)} would change, and the signatures would hold no more; add --again to write them, "
            "and have the report signed again.",
            code="report.signed",
        )
    sections = record.sections.values()
    entries = merge_json(sections, ("report", "card", "not_checked", "skill", "error"))
    path = write_report(directory, record)
    card = write_card(directory, record)
    audit, skill = record.audit, read_skill(directory)
    unchecked = ("the guarantee: the ledger is missing",) if audit is None else audit.unchecked
    result: dict[str, Any] = {
        "report": str(path),
        "card": None if card is None else str(card),
        "not_checked": unchecked,
        **entries,
        "skill": None if skill is None else skill.to_dict(),
    }
    lines = [f"Not checked: {what}." for what in unchecked]
    if audit is not None:
        lines = ["The guarantees and the metrics agree with the ledger.", *lines]
        lines += [describe_guarantee(g, audit.attacks.get(a)) for a, g in record.guarantees.items()]
    # First of all: what follows must not be taken for promises that hold.
    lines = [*(alarm.sentence for alarm in record.alarms), *lines]
    lines += [] if record.cohort is None else record.cohort.describe()
    lines += [] if skill is None else skill.describe()
    lines += [line for one in sections for line in one.describe()]
    lines += [f"Report: {path}", *([] if card is None else [f"Model card: {card}"])]
    show(result, as_json, lines)
