"""The error that users read, its stable codes, and the checks that every number passes first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from reprlib import Repr
from typing import Any, TypeVar

T = TypeVar("T")


class SilodpError(ValueError):
    """A mistake that the caller can correct: one sentence that says what is wrong, where, and what to do.

    Args:
        message: the sentence.
        code: stable identifier "area.problem", listed in `CODES`. Programs compare codes, never sentences.
            The default is for methods and transports of somebody's own, and for copies (pickle); silodp names a code.
        field: the setting, argument or column at fault, as the caller wrote it; None where there is no single one.
    """

    def __init__(self, message: str, *, code: str = "invalid", field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


CODES: dict[str, str] = {
    "accounting.event": "an event is not one that this version knows, or stands where it cannot",
    "accounting.events_differ": "the events of a round differ in more than their noise",
    "accounting.no_fit": "no curve of the kind that was asked for fits the costs of these settings",
    "accounting.no_guarantee": "nothing is promised to the adversary that is asked about",
    "accounting.out_of_range": "noise, sampling or steps are beyond what an accountant can represent",
    "accounting.unsupported": "an accountant has no rule for this kind of noise or sampling",
    "argument.conflict": "two settings exclude each other",
    "argument.grid": "integer noise, or a sum with it, does not fit the grid of steps to the clip",
    "argument.missing": "an argument that this question or setting needs is not given",
    "argument.out_of_range": "a number is larger or closer to 0 than anything that can be computed with",
    "argument.shape": "an array or vector has another shape than is needed",
    "argument.type": "an argument is of another type than is needed",
    "argument.value": "an argument or setting lies outside the values that it may have",
    "budget.out_of_reach": "no value of what can be changed meets a target or budget",
    "checkpoint.damaged": "a file of a run's checkpoint is damaged",
    "checkpoint.format": "a checkpoint was written by another version of silodp",
    "checkpoint.mismatch": "a run's checkpoint and its stores are copies of different moments",
    "checkpoint.setup": "a checkpoint belongs to a run with other settings or data",
    "cli.file": "a file or folder cannot be read or written",
    "cli.interrupted": "Ctrl-C stopped the command; the message says how to go on",
    "cli.memory": "there is not enough memory",
    "cli.unexpected": "an error that silodp does not know, of its own or of a user's model, loss or metric",
    "cli.usage": "a command, option or argument is unknown, missing or malformed",
    "config.missing_field": "a setting that is needed is not there",
    "config.no_signature": "a function that a configuration names does not say which arguments it takes",
    "config.not_importable": "a file or module that a configuration names cannot be imported, or lacks the name",
    "config.not_toml": "the configuration is not TOML in UTF-8",
    "config.path": "the configuration's path is no readable file",
    "config.too_large": "the configuration is too long, too deeply nested, or has a number or text that is too long",
    "config.type": "a value has a type or characters that no setting can have",
    "config.unknown_field": "a setting is not known",
    "config.value": "a setting has another type than it needs, or a value that it may not have",
    "crypto.decryption": "a sum does not decrypt: a mask is left in it, or an answer was altered",
    "crypto.paillier_modulus": "a Paillier key has another length than was agreed, is weak, or lacks a valid proof",
    "crypto.parameters": "no encryption is safe and exact for these settings",
    "crypto.reused": "a mask, seed, transfer or message that serves once would be used a second time",
    "data.array": "an array of a silo is of another type or shape than is needed, or not finite",
    "data.budgets": "budgets of persons or records are missing, infinite or not above 0",
    "data.changed": "a silo's records are not those that the run began with",
    "data.column": "a table lacks a column of the schema, or has it twice",
    "data.encoding": "a table is not UTF-8 text",
    "data.federation": "the parts of a federation do not fit together",
    "data.fetch": "a data set cannot be fetched, or was fetched damaged",
    "data.files": "the list of tables is empty, or names one twice",
    "data.kind": "label, classes, event and time do not go with the kind of label",
    "data.no_dataset": "a data set's file or folder is not there",
    "data.no_file": "a table is not there, or is a folder",
    "data.no_records": "there are no records where some are needed",
    "data.schema": "a schema declares no features, a column twice, or something that is no column or range",
    "data.too_few_records": "a silo has fewer records than a batch or pair needs",
    "data.unreadable": "a table is not readable as CSV or Parquet",
    "data.users": "the public list of users is not readable, or names somebody twice",
    "data.value": "a cell of a table is not what the schema says",
    "data.values": "declared classes or categories are too few, or not all different",
    "gate.allotment": "a silo refused an allotment that the method cannot have made",
    "gate.answered": "a silo has answered another request under the same kind, round and attempt",
    "gate.attempt": "a silo was asked to repeat an attempt with another request",
    "gate.attempts": "a silo has answered all attempts that the run's encryption was chosen for",
    "gate.budget": "a release would exceed the silo's own limit on ε",
    "gate.kind": "a silo was asked for a kind of message that this run does not have",
    "gate.model": "a silo was asked for one round with two models or samples",
    "gate.open": "a silo was asked to open something else than what it masked last",
    "gate.order": "a silo was asked out of order, or a second time",
    "gate.past": "a silo was asked for a round before the one that it answered last",
    "gate.release": "a silo was asked for a release that cannot come next",
    "gate.restarted": "a silo was started anew in the midst of a session's set-up; begin another session",
    "gate.roster": "a silo was asked to add up with too few silos, without itself, or with one that had left",
    "gate.round_left_out": "a silo was asked for a round although it has missed one that every silo must answer",
    "gate.rounds": "a silo was asked for more rounds or releases than were agreed",
    "gate.run": "a silo was asked in another run than its own",
    "gate.set_back": "a silo's store or its ledger is an old copy, or was lost",
    "invalid": "an error from outside silodp (a method or transport of somebody's own) that names no code",
    "ledger.charge": "a charge lacks an adversary, or is not what the ledger was charged before",
    "ledger.closed": "a ledger is closed already",
    "ledger.damaged": "a ledger's lines are not those that were written",
    "ledger.missing": "the ledger of a run that is to go on is not there",
    "ledger.setup": "a ledger was begun with other settings",
    "ledger.version": "a ledger was written by a version of silodp that this one cannot check",
    "ledger.write_failed": "the ledger could not be written; what it would have charged was not released",
    "loss.counts_masked_records": "a loss changes with records that are left out by the mask",
    "loss.no_gradient": "a loss has no gradient with respect to the model's outputs",
    "loss.not_callable": "a loss is no function",
    "loss.not_per_record": "a loss of single records does not return one number per record",
    "loss.not_scalar": "a loss does not return one number",
    "loss.not_separable": "a method clips single records, and the loss is not a mean over records",
    "loss.not_vectorizable": "a loss cannot be computed for many users at once",
    "loss.output_shape": "a loss or metric needs outputs of another shape than the model gives",
    "loss.raised": "a loss raised an exception of its own",
    "loss.wrong_labels": "a loss does not go with this kind of label or number of classes",
    "message.malformed": "a message cannot be read, or its entries, types or sizes are not those of its kind",
    "message.recipient": "a message is for a silo that the transport does not know",
    "message.signature": "a message does not carry its sender's signature for this recipient and request",
    "message.too_large": "a message is longer than any of its run",
    "message.unexpected": "an answer does not belong to the request",
    "method.not_set_up": "a method was used before its set-up gave it counts, allotments or rates",
    "method.rows": "a method gave rows that are not what it declared, or that the aggregator cannot add up",
    "metric.not_callable": "a metric is no function",
    "metric.raised": "a metric raised an exception of its own, or returned no number",
    "metric.wrong_labels": "a metric does not go with this kind of label or number of classes",
    "model.batch_norm": "a layer normalizes over the batch",
    "model.dtype": "the parameters are not all float32, or all float64, on one device",
    "model.frozen_batch_norm": "a batch normalization in eval mode is not supported yet",
    "model.integer_inputs": "inputs of whole numbers (token ids) are not supported yet",
    "model.mixes_records": "a model lets one record of a batch change another's output",
    "model.no_gradient": "a model's outputs have no gradient with respect to its parameters",
    "model.no_parameters": "a model has nothing to train",
    "model.no_shape": "a lazy layer has not been run yet",
    "model.not_a_module": "a configuration names something else than a torch.nn.Module or a function that makes one",
    "model.not_averageable": "models cannot be averaged: they differ, are not finite, or hold what carries no noise",
    "model.not_copyable": "a model cannot be copied",
    "model.not_finite": "a model gives outputs that are not finite on a finite example",
    "model.not_storable": "a model's state holds something that cannot be stored",
    "model.not_vectorizable": "a model cannot be run for many users at once",
    "model.output_shape": "a model does not return one tensor with one row per record",
    "model.raised": "a model, or the function that makes it, raised an exception of its own",
    "model.running_state": "running a model changes its state",
    "model.shared_memory": "two parameters share memory without being one parameter",
    "report.contradicted": "the files of a run directory contradict each other",
    "report.damaged": "a file of a run directory that a report needs cannot be read",
    "report.missing": "a file of a run directory that a report needs is not there",
    "run.attempts": "the server has made all attempts that the run's encryption was chosen for",
    "run.disk_full": "the disk, or the quota on it, is full",
    "run.exists": "the output directory holds files already",
    "run.in_use": "another process is running in the output directory",
    "run.metrics_damaged": "metrics.jsonl does not hold one row for each round",
    "run.no_answer": "a silo that must answer did not",
    "run.nothing_to_resume": "there is no checkpoint to resume from",
    "run.refused": "a silo refused without a code of its own",
    "run.rounds_done": "a resumed run was asked for fewer rounds than it has done",
    "run.too_few_silos": "fewer silos answered than are needed in a sum",
    "session.altered": "what silos sent each other was altered on the way, or is of another session",
    "session.missing": "a party was never set up in this run, or its store is lost",
    "session.no_transfers": "a silo was asked for transfers that it has no base for",
    "session.pins": "a silo's key or name is not one that was pinned, or its session key hides nothing",
    "session.transfers_ended": "a request failed the check of its transfers, which ended them",
    "session.unknown": "a silo was asked in the name of a session that is not its own",
    "store.permissions": "others may read a folder that holds keys and stored answers",
}
"""Every code that an error can carry, with what it means. Codes are never renamed; new ones may be added."""


LONGEST_REASON = 200
"""Characters of somebody else's message that a sentence of ours passes on; torch writes up to a thousand."""


def describe_exception(error: BaseException) -> str:
    """Return "ValueError: message", the message shortened to its first line and `LONGEST_REASON` characters."""
    reason = first_line(error)
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, at most `LONGEST_REASON` characters of it."""
    line = " ".join(str(error).strip().partition("\n")[0].split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 1] + "…"


def counted(number: int, noun: str) -> str:
    """ "1 round", "1,000 rounds"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorten(value: object) -> str:
    """Return `repr(value)`, of a long one the beginning and the end."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return f"a {type(value).__name__} of very many digits"


_REPR = Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 120, 120, 60

LEAST_REAL, MOST_REAL = 1e-50, 1e38
MOST_WHOLE = 10**9


def check_real(name: str, value: object) -> None:
    """Check that a setting is a real number (True is not 1) of a magnitude that can be squared and put in float32.

    0, infinity and NaN pass: which of them a setting may be, its own check says.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SilodpError(f"{name} = {shorten(value)}: set a number.", code="argument.type", field=name)
    size: Any = abs(value)  # of any kind: a whole number may be too large for a float
    if LEAST_REAL <= size <= MOST_REAL or size == 0 or size == math.inf or size != size:
        return
    raise SilodpError(
        f"{name} = {shorten(value)}: set a number whose magnitude is between {LEAST_REAL:g} and {MOST_REAL:g}.",
        code="argument.out_of_range",
        field=name,
    )


def check_whole(name: str, value: object, least: int = 1, most: int = MOST_WHOLE, what: str = "") -> None:
    """Check that a setting is a whole number from `least` to `most`; `what` it counts, for the message."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        counted_things = f" of {what}" if what else ""
        raise SilodpError(
            f"{name} = {shorten(value)}: set a whole number{counted_things} ≥ {least}.",
            code="argument.value",
            field=name,
        )
    if int(value) > most:
        raise SilodpError(
            f"{name} = {shorten(value)}: set a whole number of at most {most:,}.",
            code="argument.out_of_range",
            field=name,
        )


def lookup(name: str, registry: Mapping[str, T], field: str) -> T:
    """Return the entry of a registry; "-" and "_" are one character here.

    Args:
        name: of the entry.
        registry: name → entry.
        field: the setting that names it, for the message.

    Raises:
        SilodpError: `argument.value`, with the closest name, where there is no such entry.
    """
    for known, entry in registry.items():
        if known.replace("_", "-") == name.replace("_", "-"):
            return entry
    remedy = suggest_name(name, list(registry)) or f"use one of {', '.join(registry)}."
    raise SilodpError(
        f"{field} = '{shorten(name)[1:-1]}' is not known: {remedy}", code="argument.value", field=field
    )


def suggest_name(name: str, known: Sequence[str]) -> str | None:
    """Return "did you mean 'NAME'?" for the closest of the known names; None where none is close."""
    beginnings = [word for word in known if name and word.startswith(name)]
    close = get_close_matches(name, known, n=1) or beginnings
    return f"did you mean '{close[0]}'?" if close else None


@contextmanager
def name_file(path: Path | str) -> Iterator[None]:
    """Give an OSError raised inside the name of the file it is about: a failed write does not know its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def list_codes() -> str:
    """Return docs/errors.md: every code with what it means."""
    lines = [f"| `{code}` | {meaning} |" for code, meaning in sorted(CODES.items())]
    return "\n".join([_ABOUT_CODES, "| code | meaning |", "|---|---|", *lines, ""])


_ABOUT_CODES = """# Error codes

Every error that a caller can correct is a `silodp.SilodpError` with a sentence (`str(error)`), a stable `code`, and
the `field` at fault where there is a single one. Compare codes, never sentences: sentences may change, codes are never
renamed.

On the command line the sentence goes to standard error with the code in brackets, and the exit status is 2 (130 after
Ctrl-C, 70 for `cli.unexpected`). With `--json` one object more is printed, on standard output:

    {"error": {"code": "config.type", "field": "method.clip", "message": "…"}}

`make errors` writes this page.
"""
