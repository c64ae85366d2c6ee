"""`silodp report`: check a finished run, write page, card and forms, sign and verify; and `silodp report-key`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from silodp.cli._console import Json, Names, format_command, log, show
from silodp.errors import SilodpError, require
from silodp.text import join_names, pluralize

if TYPE_CHECKING:
    from silodp.report.facts import Facts
    from silodp.report.run_record import RunRecord


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
    if verify is not None:
        show(*_verify(directory, verify, as_json))
        return
    from silodp.report.run_record import read_run

    record = read_run(directory)
    if sign is None and template is None and not manifest and checklist is None:
        show(*_write(directory, record, again, as_json))
        return
    from silodp.report.facts import collect_facts

    facts = collect_facts(directory, record)
    if sign is not None:
        show(*_sign(directory, facts, sign, str(name), str(role), checklist, again, as_json))
    elif manifest:
        show(*_print_manifest(directory, facts, checklist, as_json))
    elif template is not None:
        show(*_write_template(directory, facts, template, out, as_json))
    elif checklist is not None:
        show(*_write_checklist(directory, facts, checklist, as_json))


_Shown = tuple[dict[str, Any], bool, list[str]]
"""The arguments of `show`."""


def _check_options(options: dict[str, object]) -> None:
    """Refuse two tasks at once."""
    given = [name for name, value in options.items() if value is not None]
    require(
        len(given) < 2,
        f"--{' and --'.join(given)} are different tasks: give one of them.",
        code="argument.conflict",
        field=given[0] if given else None,
    )


def _write(directory: Path, record: RunRecord, again: bool, as_json: bool) -> _Shown:
    from silodp.report.attacks import describe_attack
    from silodp.report.guarantee_text import describe_guarantee
    from silodp.report.model_card import write_card
    from silodp.report.page import write_report
    from silodp.report.skill import read_skill
    from silodp.runtime.run_files import list_signatures

    signed = list_signatures(directory)
    if signed and not again and (outdated := _find_outdated(directory, record)):
        raise SilodpError(
            f"{directory} is signed ({', '.join(path.name for path in signed)}), and nothing was written: "
            f"{join_names(outdated)} would change, and the signatures would hold no more; add --again to write them, "
            "and have the report signed again.",
            code="report.signed",
        )
    path = write_report(directory, record)
    card = write_card(directory, record)
    audit, skill = record.audit, read_skill(directory)
    unchecked = ("the guarantee: the ledger is missing",) if audit is None else audit.unchecked
    attack, rounds = record.attack, record.guarantees["released"].rounds
    result = {
        "report": str(path),
        "card": None if card is None else str(card),
        "not_checked": unchecked,
        "attack": attack and attack.verdict,
        "skill": None if skill is None else skill.to_dict(),
    }
    lines = [f"Not checked: {what}." for what in unchecked]
    if audit is not None:
        lines = ["The guarantees and the metrics agree with the ledger.", *lines]
        lines += [describe_guarantee(g, audit.attacks.get(a)) for a, g in record.guarantees.items()]
    # First of all: what follows must not be taken for promises that hold.
    lines = [*([attack.alarm] if attack and attack.alarm else []), *lines]
    lines += [] if record.cohort is None else record.cohort.describe()
    lines += [] if skill is None else skill.describe()
    lines += describe_attack(attack, rounds, format_command("attack", directory))
    lines += [f"Report: {path}", *([] if card is None else [f"Model card: {card}"])]
    return result, as_json, lines


def _find_outdated(directory: Path, record: RunRecord) -> list[str]:
    from silodp.report.signature import find_outdated  # most runs are not signed

    return find_outdated(directory, record)


def _write_checklist(directory: Path, facts: Facts, path: Path, as_json: bool) -> _Shown:
    from silodp.report.checklist import list_statements, write_checklist

    statements = list_statements(facts.assumptions)
    write_checklist(path, statements, facts.run.id)
    sign = format_command("report", directory, "--sign", "KEY", "--name", "NAME", "--role", "ROLE")
    lines = [
        f"Wrote {path}: {pluralize(len(statements), 'statement')} that no program can check. Who can know each:",
        *(f"  {one.id}: {one.known_by}" for one in statements),
        f"When all of them are answered: {sign} {format_command('--checklist', path).removeprefix('silodp ')}",
    ]
    result = {"checklist": str(path), "statements": {one.id: one.text for one in statements}}
    return result, as_json, lines


def _sign(
    directory: Path,
    facts: Facts,
    key: Path,
    name: str,
    role: str,
    checklist: Path | None,
    again: bool,
    as_json: bool,
) -> _Shown:
    from silodp.report.signature import MEANING, load_key, sign_report

    path, made = sign_report(directory, facts, load_key(key, name), role, checklist, again)
    unchecked = _list_unchecked(facts.run)
    lines = [
        f"Signed by {name} ({role}): {', '.join(made.files)}; "
        f"{pluralize(len(made.statements), 'statement')} answered.",
        *_describe_denied(made.denied),
        *(f"Not checked: {what}." for what in unchecked),
        MEANING,
        f"Signature: {path}",
    ]
    result = {"signature": str(path), "files": made.files, "denied": made.denied, "not_checked": unchecked}
    return result, as_json, lines


def _describe_denied(ids: tuple[str, ...]) -> list[str]:
    """Return a line on statements that are answered with "no"."""
    return [f'Answered with "no", so what rests on it does not hold: {", ".join(ids)}.'] if ids else []


def _list_unchecked(record: RunRecord) -> tuple[str, ...]:
    return ("the guarantee: the ledger is missing",) if record.audit is None else record.audit.unchecked


def _verify(directory: Path, key: Path, as_json: bool) -> _Shown:
    from silodp.report.signature import MEANING, load_public_key, verify_report
    from silodp.runtime.run_files import LEDGER

    made, others = verify_report(directory, load_public_key(key))
    has_ledger = (directory / LEDGER).exists()
    unchecked = [] if has_ledger else ["the guarantee: the ledger is missing"]
    unchecked += [f"{name}: it was made with another key" for name in others]
    lines = []
    for file, one in made.items():
        lines += [
            f"{file}: signed by {one.name} ({one.role}), {one.time}: {', '.join(one.files)}; "
            f"{pluralize(len(one.statements), 'statement')} answered.",
            *_describe_denied(one.denied),
        ]
    if has_ledger:
        lines.append("The guarantees and the metrics agree with the ledger.")
    lines += [f"Not checked: {what}." for what in unchecked]
    result = {
        "signatures": {
            file: {"name": one.name, "role": one.role, "time": one.time, "denied": one.denied}
            for file, one in made.items()
        },
        "not_checked": unchecked,
    }
    return result, as_json, [*lines, MEANING]


def _print_manifest(directory: Path, facts: Facts, checklist: Path | None, as_json: bool) -> _Shown:
    from silodp.report.signature import MEANING, digest_files, read_answers
    from silodp.runtime.run_files import digest_file

    files = digest_files(directory)
    if checklist is not None:
        read_answers(checklist, facts)  # refuses one that is not filled
        files[os.path.relpath(checklist, directory)] = digest_file(checklist)
    # On standard error: what is printed is the file to sign.
    log(f"note: these are lines for 'sha256sum --check', from inside {directory}. {MEANING}")
    if checklist is None:
        log("note: without --checklist they say nothing of the statements that a person has to answer")
    return {"files": files}, as_json, [f"{digest}  {name}" for name, digest in files.items()]


def _write_template(directory: Path, facts: Facts, name: str, out: Path | None, as_json: bool) -> _Shown:
    from silodp.report.forms import write_form

    path, open_ = write_form(directory, facts, name, out)
    lines = [
        f"Wrote {path}, a draft: the facts come from the files of the run; what is "
        f"marked TO DO ({pluralize(open_, 'place')}) needs a person's judgement, and so does whether the rest suffices."
    ]
    return {"template": str(path), "open": open_}, as_json, lines


def report_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of the secret key.")],
    as_json: Json = False,
) -> None:
    """Make a key with which a person signs reports. The public key is written beside it: FILE.pub."""
    from silodp.report.signature import make_key

    public = make_key(file)
    lines = [
        f"Wrote {file}: keep it, and give it to nobody; whoever has it signs in your name.",
        f"Wrote {public}: give it to those who verify, in person or otherwise so that they know it is yours.",
    ]
    show({"key": str(file), "public": str(public)}, as_json, lines)
