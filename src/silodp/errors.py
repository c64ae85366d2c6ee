"""The error that users read, its stable codes, and the check that every number passes first."""

from __future__ import annotations

from numbers import Real
from reprlib import repr as short

__all__ = ["CODES", "SilodpError", "check_real", "counted", "describe_exception", "first_line", "short"]


class SilodpError(ValueError):
    """A mistake that the caller can correct: one sentence that says what is wrong, where, and what to do.

    Args:
        message: the sentence.
        code: stable identifier "area.problem", listed in `CODES`. Programs compare codes, never sentences.
        field: the setting, argument or column at fault, as the caller wrote it; None where there is no single one.
    """

    def __init__(self, message: str, *, code: str = "invalid", field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


CODES: dict[str, str] = {
    "accounting.events_differ": "the events of a round differ in more than their noise",
    "argument.conflict": "two settings exclude each other",
    "argument.grid": "integer noise, or a sum with it, does not fit the grid of steps to the clip",
    "argument.shape": "an array or vector has another shape than is needed",
    "argument.type": "an argument is of another type than is needed",
    "argument.value": "an argument or setting lies outside the values that it may have",
    "checkpoint.damaged": "a file of a run's checkpoint is damaged",
    "checkpoint.format": "a checkpoint was written by another version of silodp",
    "checkpoint.mismatch": "a run's checkpoint and its stores are copies of different moments",
    "checkpoint.setup": "a checkpoint belongs to a run with other settings or data",
    "config.missing_field": "a setting that is needed is not there",
    "config.no_signature": "a function that a configuration names does not say which arguments it takes",
    "config.not_importable": "a file or module that a configuration names cannot be imported, or lacks the name",
    "config.unknown_field": "a setting is not known",
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
    "data.files": "the list of tables is empty, or names one twice",
    "data.kind": "label, classes, event and time do not go with the kind of label",
    "data.no_file": "a table is not there, or is a folder",
    "data.no_records": "there are no records where some are needed",
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
    "gate.roster": "a silo was asked to add up with too few silos, without itself, or with one that had left",
    "gate.round_left_out": "a silo was asked for a round although it has missed one that every silo must answer",
    "gate.rounds": "a silo was asked for more rounds or releases than were agreed",
    "gate.run": "a silo was asked in another run than its own",
    "invalid": "an argument or setting is not usable",
    "ledger.damaged": "a ledger's lines are not those that were written",
    "ledger.version": "a ledger was written by a version of silodp that this one cannot check",
    "loss.counts_masked_records": "a loss changes with records that are left out by the mask",
    "loss.no_gradient": "a loss has no gradient with respect to the model's outputs",
    "loss.not_callable": "a loss is no function",
    "loss.not_per_record": "a loss of single records does not return one number per record",
    "loss.not_scalar": "a loss does not return one number",
    "loss.not_vectorizable": "a loss cannot be computed for many users at once",
    "loss.output_shape": "a loss or metric needs outputs of another shape than the model gives",
    "loss.raised": "a loss raised an exception of its own",
    "loss.wrong_labels": "a loss does not go with this kind of label or number of classes",
    "message.malformed": "a message cannot be read, or its entries, types or sizes are not those of its kind",
    "message.recipient": "a message is for a silo that the transport does not know",
    "message.signature": "a message does not carry its sender's signature for this recipient and request",
    "message.too_large": "a message is longer than any of its run",
    "message.unexpected": "an answer does not belong to the request",
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
    "run.metrics_damaged": "metrics.jsonl does not hold one row for each round",
    "run.no_answer": "a silo that must answer did not",
    "run.nothing_to_resume": "there is no checkpoint to resume from",
    "run.refused": "a silo refused without a code of its own",
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


def check_real(name: str, value: object) -> None:
    """Refuse what is no real number, before anything compares it; True is not 1."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SilodpError(f"{name} = {short(value)}: set a number.", code="argument.type", field=name)
