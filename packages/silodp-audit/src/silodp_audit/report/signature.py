"""Signatures of reports: who has seen which files of a run, and answered which statements.

A signature is over what was shown, not over the truth of it. It lies in DIR/signatures/NAME.json, canonical JSON with
an Ed25519 signature (RFC 8032) over the names and SHA-256 of files and over all statements with their answers. The key
serves for nothing else: its file has another form than the keys of parties, and the signed bytes begin with a marker
that no message between parties begins with.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import TypeAdapter

from silodp._lazy import find_version
from silodp.crypto.keys import Identity
from silodp.errors import SilodpError, require
from silodp.parsing import MALFORMED, parse_json, refuse_malformed
from silodp.report.facts import ReportData, list_assumptions
from silodp.report.run_record import read_guarantees, read_run
from silodp.report.sections import list_files
from silodp.report.statements import Statement, list_statements
from silodp.runtime.model_description import CARD, DESCRIPTION, WEIGHTS
from silodp.runtime.run_files import (
    ATTACK,
    COHORT,
    GUARANTEE,
    LEDGER,
    REPORT,
    RUN_SPEC,
    SIGNATURES,
    digest_file,
    list_signatures,
)
from silodp.text import join_names, pluralize, shorten
from silodp.wire.files import PRIVATE_FILE, write_durably
from silodp_audit.report.checklist import (
    MAX_BYTES,
    Answer,
    Line,
    read_checklist,
    refuse_existing,
    require_value,
)

FORMAT = 1
"""Of a signature, stored as "format"."""
_OF_RUNS = (GUARANTEE, RUN_SPEC, WEIGHTS, DESCRIPTION, CARD, REPORT, ATTACK, COHORT)
MEANING = (
    "A signature says who has seen these files and gave these answers. It does not say that they are true, nor that "
    "the model may be released."
)
_MARKER = b"silodp report signature 1\n"
# The two ends of a key have different first words, and neither is the bare number that a party of a deployment keeps.
_SECRET, _PUBLIC = "silodp-report-key-1", "silodp-report-public-key-1"
_HEX = {digit for digit in "0123456789abcdef"}


# --- keys ---


def make_key(path: Path) -> Path:
    """Make a key for signatures of reports; a file that is there is never replaced.

    Args:
        path: The file of the secret key; that of the public key has the ending ".pub" beside it.

    Returns:
        The path of the public key.

    Raises:
        SilodpError: one of the files exists (report.exists).
    """
    public = path.with_name(f"{path.name}.pub")
    for one in (path, public):
        refuse_existing(one)
    identity = Identity.fresh("")
    write_durably(path, f"{_SECRET} {identity.seed.hex()}\n".encode(), PRIVATE_FILE)
    write_durably(public, f"{_PUBLIC} {identity.public.hex()}\n".encode())
    return public


def load_key(path: Path, name: str) -> Identity:
    """Read a secret key for signatures of reports.

    Args:
        path: The file that `make_key` wrote.
        name: Name of the person who signs.

    Raises:
        SilodpError: it is missing, is a key for something else, or others may read it (report.key).
    """
    seed = _read_key(path, _SECRET)
    mode = path.stat().st_mode & 0o777
    require(
        not mode & ~PRIVATE_FILE,
        f"others may read the key {path} (mode {mode:04o}), and sign in your name: run 'chmod 600 {path}' if nobody "
        "else has, or make another key.",
        code="report.key",
    )
    return Identity(name, seed)


def load_public_key(path: Path) -> bytes:
    """Read a public key for signatures of reports, 32 bytes."""
    return _read_key(path, _PUBLIC)


def _read_key(path: Path, kind: str) -> bytes:
    try:
        words = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        words = []
    if len(words) == 2 and words[0] == kind and len(words[1]) == 64 and set(words[1]) <= _HEX:
        return bytes.fromhex(words[1])
    what = f"{path} is no {'secret' if kind == _SECRET else 'public'} key of 'silodp report-key'"
    if words and words[0] in (_SECRET, _PUBLIC):
        other = "public" if words[0] == _PUBLIC else "secret"
        what = f"{what}, but the {other} one" if words[0] != kind else f"{what}: it is damaged"
    elif len(words) == 1 and len(words[0]) == 64:
        what = f"{what}: it looks like the key of a party, which signs messages of a deployment"
    remedy = (
        "sign with the secret key, and verify with the file that ends in .pub" if words else "check the path"
    )
    raise SilodpError(
        f"{what}; a key has one purpose: {remedy}, or make a key with 'silodp report-key FILE'.",
        code="report.key",
    )


# --- what is signed ---


@dataclass(frozen=True)
class SignedStatement(Answer, Statement):
    """A statement with its answer, as a signature has it."""


@dataclass(frozen=True)
class Signature:
    """The content of a signature, without the bytes that prove it.

    Attributes:
        run: The id of the run.
        name: Who signed, as they call themselves.
        role: As what.
        time: When, by the clock of their machine, as 2026-11-26T08:30:00Z.
        key: Their public key, 32 bytes in hexadecimal.
        files: SHA-256 (hex) of files, by name.
        statements: All statements of the report with the answers.
        silodp: The version that signed.
    """

    run: str
    name: Line
    role: Line
    time: Line
    key: str
    files: dict[str, str]
    statements: tuple[SignedStatement, ...]
    silodp: str

    @property
    def denied(self) -> tuple[str, ...]:
        """The ids of the statements that are answered with "no"."""
        return tuple(one.id for one in self.statements if one.confirmed == "no")

    def to_bytes(self) -> bytes:
        """Return the bytes that are signed: a marker, then canonical JSON (sorted keys, no spaces, UTF-8)."""
        return _MARKER + _encode(self._fields)

    def seal(self, signature: bytes) -> bytes:
        """Return the content of the file, with the 64 bytes of an Ed25519 signature."""
        return _encode({**self._fields, "signature": signature.hex()})

    @property
    def _fields(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


_SIGNATURE: TypeAdapter[Signature] = TypeAdapter(Signature)


def _encode(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def list_signed_files() -> tuple[str, ...]:
    """Return the files of a run that a signature is over, each if it is there."""
    return (*_OF_RUNS, *list_files())


def digest_files(directory: Path) -> dict[str, str]:
    """Return the SHA-256 (hex) of the files of `list_signed_files` that are there, by name."""
    return {
        name: digest_file(directory / name) for name in list_signed_files() if (directory / name).exists()
    }


def sign_report(
    directory: Path,
    facts: ReportData,
    identity: Identity,
    role: str,
    checklist: Path | None,
    again: bool = False,
) -> tuple[Path, Signature]:
    """Sign the report of a run as it is on disk; nothing of it is written.

    Args:
        directory: The directory of the run.
        facts: What its files state, checked against the ledger where there is one.
        identity: Name and key of the person.
        role: Their role.
        checklist: A filled checklist, of which a copy is kept beside the signature; None where there is no statement.
        again: Whether a signature under this name may be replaced.

    Returns:
        The path of the signature, and its content.

    Raises:
        SilodpError: there is no page or an outdated one (report.missing, report.contradicted), a statement is not
            answered (report.unsigned), or there is a signature under this name (report.exists).
    """
    path = directory / SIGNATURES / f"{_name_file(identity.name)}.json"
    if not again:
        refuse_existing(path)
    write = f"silodp report {shlex.quote(str(directory))}"
    require(
        any((directory / name).exists() for name in (REPORT, *list_files()) if name.endswith(".html")),
        f"{directory / REPORT} is missing, and it is what people sign: write it with '{write}'.",
        code="report.missing",
    )
    answers, content = read_answers(checklist, facts)
    from silodp.report.page import find_outdated  # to verify a signature, no picture is drawn

    # Elsewhere than where the run was made files may be missing that the page was drawn from.
    outdated = find_outdated(directory, facts.run) if facts.run.audit is not None else []
    require(
        not outdated,
        f"{join_names(outdated)} in {directory}: not as silodp writes it from the other files of the run; run "
        f"'{write}', read it again, and then sign.",
        code="report.contradicted",
    )
    files = digest_files(directory)
    if content is not None:
        files[_name_checklist(path)] = hashlib.sha256(content).hexdigest()
    signature = Signature(
        run=facts.run.id,
        name=identity.name,
        role=role,
        time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        key=identity.public.hex(),
        files=files,
        statements=answers,
        silodp=find_version(),
    )
    with refuse_malformed(
        "--name and --role: give each as one line of text of at most 2,000 characters.", code="argument.value"
    ):
        _SIGNATURE.validate_python(asdict(signature))
    path.parent.mkdir(exist_ok=True)
    # The copy first: a signature without its checklist would not verify.
    if content is not None:
        write_durably(directory / _name_checklist(path), content)
    write_durably(path, signature.seal(identity.sign(signature.to_bytes())))
    return path, signature


def read_answers(path: Path | None, facts: ReportData) -> tuple[tuple[SignedStatement, ...], bytes | None]:
    """Return the statements of a report with the answers of a checklist, and the content of this file.

    Raises:
        SilodpError: a statement is not answered (report.unsigned), or `read_checklist` refuses the file.
    """
    statements = list_statements(facts.assumptions)
    if path is None:
        require(
            not statements,
            f"the report has {pluralize(len(statements), 'statement')} without an answer "
            f"({', '.join(one.id for one in statements)}): write a checklist (silodp report DIR --checklist FILE), "
            "fill it, and sign with it.",
            code="report.unsigned",
            field="checklist",
        )
        return (), None
    content = path.read_bytes()
    answers = read_checklist(content, str(path), statements, facts.run.id)
    return tuple(SignedStatement(**asdict(one), **asdict(answers[one.id])) for one in statements), content


def _name_file(name: str) -> str:
    """Return a name as that of a file."""
    letters = "".join(letter if letter.isalnum() else " " for letter in name.lower())
    made = "-".join(letters.split())[:40]
    require(made, f"--name {shorten(name)} has no letter: give the name of a person.", code="argument.value")
    return made


def _name_checklist(path: Path) -> str:
    """Return the name of the copy of a checklist, in the directory of the run, by the path of the signature."""
    return f"{SIGNATURES}/{path.stem}.checklist.toml"


# --- what is verified ---


def verify_report(directory: Path, public: bytes) -> tuple[dict[str, Signature], list[str]]:
    """Check every signature that a key made of the report of a run, and the files that it is over.

    Args:
        directory: The directory of the run.
        public: The public key, 32 bytes.

    Returns:
        (signatures by the names of their files, names of signatures by other keys, which were not checked).

    Raises:
        SilodpError: there is no signature by this key, or it was altered (report.signature); a file was changed,
            removed or added after it, or the guarantee contradicts the ledger (report.contradicted).
    """
    found = {path: _read_signature(path) for path in list_signatures(directory)}
    made = {path: one for path, one in found.items() if one[0].key == public.hex()}
    require(
        made,
        f"{directory / SIGNATURES} has no signature by this key: ask for the file of the signature, or for the public "
        "key of the person who signed.",
        code="report.signature",
    )
    for path, (signature, proof) in made.items():
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(proof, signature.to_bytes())
        except (InvalidSignature, ValueError):
            raise _refuse_signature(path) from None
        _check_files(directory, path, signature)
    if (directory / LEDGER).exists():
        read_run(directory)  # refuses guarantees that contradict the ledger
    return (
        {path.name: signature for path, (signature, _) in made.items()},
        [path.name for path in found if path not in made],
    )


def _read_signature(path: Path) -> tuple[Signature, bytes]:
    """Return the content of a signature and its 64 bytes; none of it is proven yet."""
    content = path.read_bytes()
    try:
        require_value(len(content) <= MAX_BYTES)
        fields = parse_json(content)
        proof = bytes.fromhex(fields.pop("signature"))
        signature = _SIGNATURE.validate_python(fields)
        # Whatever else the file says, or says in another way, was not signed.
        require_value(fields["format"] == FORMAT and signature.seal(proof) == content)
    except MALFORMED:
        raise _refuse_signature(path) from None
    return signature, proof


def _refuse_signature(path: Path) -> SilodpError:
    return SilodpError(
        f"the signature {path} does not hold: it was altered, or another version of silodp made it; ask the person who "
        "signed for it.",
        code="report.signature",
    )


def _check_files(directory: Path, path: Path, signature: Signature) -> None:
    """Compare the files of a run with those that were signed, and the statements with those of the guarantees."""
    known = (*list_signed_files(), _name_checklist(path))
    wrong = None
    for name in sorted({*known, *signature.files}):
        # Of other names nothing is read: a signature may name any path.
        there, signed = name in known and (directory / name).exists(), signature.files.get(name)
        if there and signed is None:
            wrong = f"{name} was added after it was made"
        elif signed is not None and not there:
            wrong = f"{shorten(name)} is missing"
        elif signed is not None and digest_file(directory / name) != signed:
            wrong = f"{name} is not the file that was signed"
        if wrong is not None:
            break
    else:
        _, guarantees = read_guarantees(directory)
        stated = [(one.id, one.text) for one in list_statements(list_assumptions(guarantees))]
        if stated != [(one.id, one.text) for one in signature.statements]:
            wrong = f"its statements are not those of {GUARANTEE}"
    require(
        wrong is None,
        f"the signature of {signature.name} ({path}) does not hold for {directory}: {wrong}; restore the signed files, "
        "or have the report signed again.",
        code="report.contradicted",
    )
