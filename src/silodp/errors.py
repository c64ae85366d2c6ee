"""The error that users read, its stable codes, and the check that every number passes first."""

from __future__ import annotations

from numbers import Real
from reprlib import repr as short


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
    "argument.shape": "an array or vector has another shape than is needed",
    "argument.type": "an argument is of another type than is needed",
    "argument.value": "an argument is outside of what it may be",
    "config.missing_field": "a setting that is needed is not there",
    "config.no_signature": "a function that a configuration names does not say which arguments it takes",
    "config.not_importable": "a file or module that a configuration names cannot be imported, or lacks the name",
    "config.unknown_field": "a setting is not known",
    "data.array": "an array of a silo is of another type or shape than is needed, or not finite",
    "data.budgets": "budgets of persons or records are missing, infinite or not above 0",
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
    "invalid": "an argument or setting is not usable",
    "loss.counts_masked_records": "a loss changes with records that are left out by the mask",
    "loss.no_gradient": "a loss has no gradient with respect to the model's outputs",
    "loss.not_callable": "a loss is no function",
    "loss.not_per_record": "a loss of single records does not return one number per record",
    "loss.not_scalar": "a loss does not return one number",
    "loss.not_vectorizable": "a loss cannot be computed for many users at once",
    "loss.output_shape": "a loss or metric needs outputs of another shape than the model gives",
    "loss.raised": "a loss raised an exception of its own",
    "loss.wrong_labels": "a loss does not go with this kind of label or number of classes",
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
