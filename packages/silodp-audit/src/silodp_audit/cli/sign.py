"""Tasks of `silodp report` for people who answer for a run: checklist, signatures, manifest, forms; and report-key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli._console import Json, format_command, log, show
from silodp.text import pluralize

if TYPE_CHECKING:
    from silodp.report.facts import ReportData
    from silodp.report.run_record import RunRecord

_Shown = tuple[dict[str, Any], list[str]]
"""What is printed with --json, and without."""


def run_task(
    directory: Path,
    *,
    checklist: Path | None,
    sign: Path | None,
    name: str | None,
    role: str | None,
    verify: Path | None,
    manifest: bool,
    template: str | None,
    out: Path | None,
    again: bool,
    as_json: bool,
) -> None:
    """Do the one task that options of `silodp report` name; see there."""
    if verify is not None:
        result, lines = _verify(directory, verify)
        show(result, as_json, lines)
        return
    from silodp.report.facts import collect_facts

    facts = collect_facts(directory)
    if sign is not None:
        result, lines = _sign(directory, facts, sign, str(name), str(role), checklist, again)
    elif manifest:
        result, lines = _print_manifest(directory, facts, checklist)
    elif template is not None:
        result, lines = _write_template(directory, facts, template, out)
    else:
        assert checklist is not None
        result, lines = _write_checklist(directory, facts, checklist)
    show(result, as_json, lines)


def _write_checklist(directory: Path, facts: ReportData, path: Path) -> _Shown:
    from silodp.report.statements import list_statements
    from silodp_audit.report.checklist import write_checklist

    statements = list_statements(facts.assumptions)
    write_checklist(path, statements, facts.run.id)
    sign = format_command("report", directory, "--sign", "KEY", "--name", "NAME", "--role", "ROLE")
    lines = [
        f"Wrote {path}: {pluralize(len(statements), 'statement')} that no program can check. Who can know each:",
        *(f"  {one.id}: {one.known_by}" for one in statements),
        f"When all of them are answered: {sign} {format_command('--checklist', path).removeprefix('silodp ')}",
    ]
    result = {"checklist": str(path), "statements": {one.id: one.text for one in statements}}
    return result, lines


def _sign(
    directory: Path,
    facts: ReportData,
    key: Path,
    name: str,
    role: str,
    checklist: Path | None,
    again: bool,
) -> _Shown:
    from silodp_audit.report.signature import MEANING, load_key, sign_report

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
    return result, lines


def _describe_denied(ids: tuple[str, ...]) -> list[str]:
    """Return a line on statements that are answered with "no"."""
    return [f'Answered with "no", so what rests on it does not hold: {", ".join(ids)}.'] if ids else []


def _list_unchecked(record: RunRecord) -> tuple[str, ...]:
    return ("the guarantee: the ledger is missing",) if record.audit is None else record.audit.unchecked


def _verify(directory: Path, key: Path) -> _Shown:
    from silodp.runtime.run_files import LEDGER
    from silodp_audit.report.signature import MEANING, load_public_key, verify_report

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
    return result, [*lines, MEANING]


def _print_manifest(directory: Path, facts: ReportData, checklist: Path | None) -> _Shown:
    from silodp.runtime.run_files import digest_file
    from silodp_audit.report.signature import MEANING, digest_files, read_answers

    files = digest_files(directory)
    if checklist is not None:
        read_answers(checklist, facts)  # refuses one that is not filled
        files[os.path.relpath(checklist, directory)] = digest_file(checklist)
    # On standard error: what is printed is the file to sign.
    log(f"note: these are lines for 'sha256sum --check', from inside {directory}. {MEANING}")
    if checklist is None:
        log("note: without --checklist they say nothing of the statements that a person has to answer")
    return {"files": files}, [f"{digest}  {name}" for name, digest in files.items()]


def _write_template(directory: Path, facts: ReportData, name: str, out: Path | None) -> _Shown:
    from silodp_audit.report.forms import write_form

    path, open_ = write_form(directory, facts, name, out)
    lines = [
        f"Wrote {path}, a draft: the facts come from the files of the run; what is "
        f"marked TO DO ({pluralize(open_, 'place')}) needs a person's judgement, and so does whether the rest suffices."
    ]
    return {"template": str(path), "open": open_}, lines


def make_report_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of the secret key.")],
    as_json: Json = False,
) -> None:
    """Make a key with which a person signs reports. The public key is written beside it: FILE.pub."""
    from silodp_audit.report.signature import make_key

    public = make_key(file)
    lines = [
        f"Wrote {file}: keep it, and give it to nobody; whoever has it signs in your name.",
        f"Wrote {public}: give it to those who verify, in person or otherwise so that they know it is yours.",
    ]
    show({"key": str(file), "public": str(public)}, as_json, lines)
