"""The error that users read, and its stable codes."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from silodp.text import list_missing_packages, shorten, suggest_name

T = TypeVar("T")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a write that has no room: on the disk, in a quota, or below the limit on the size of a file."""


class SilodpError(ValueError):
    """A mistake that the caller can correct: one sentence that says what is wrong, where, and what to do.

    Args:
        message: The sentence.
        code: Stable identifier "area.problem", listed in `CODES`. Programs compare codes, never sentences.
            The default is for methods and transports of somebody's own, and for copies (pickle); silodp names a code.
        field: The setting, argument or column at fault, as the caller wrote it; None where there is no single one.
    """

    def __init__(self, message: str, *, code: str = "invalid", field: str | None = None) -> None:
        # The message alone: an exception is unpickled by a call with its `args`; code and field follow as attributes.
        super().__init__(message)
        self.code = code
        self.field = field


CODES: dict[str, str] = {
    "accounting.event": "an event is not known to this version, or is in a place where it is not allowed",
    "accounting.events_differ": "the events of a round differ in more than their noise",
    "accounting.no_fit": "the calibration 'scf' finds no curve that fits the costs of these settings",
    "accounting.no_guarantee": "there is no guarantee against the adversary that was named",
    "accounting.out_of_range": "noise, sampling or steps are beyond what an accountant can represent",
    "accounting.unknown": "an accountant is not part of silodp, so its ε cannot be computed here",
    "accounting.unsupported": "an accountant has no rule for this kind of noise or sampling",
    "argument.conflict": "two settings exclude each other",
    "argument.grid": "the grid for integer sums has too few or too many steps for these settings",
    "argument.missing": "an argument that this question or setting needs is not given",
    "argument.out_of_range": "a number is larger or closer to 0 than anything that can be computed with",
    "argument.shape": "an array or vector has another shape than is needed",
    "argument.type": "an argument is of another type than is needed",
    "argument.value": "an argument or setting lies outside the values that it may have",
    "attack.canaries": "a method refuses the made-up records of an attack, so it cannot be attacked with them",
    "attack.nothing_seen": "no adversary's view of a canary run could be read, and no noise tested",
    "budget.out_of_reach": "no value of the setting that is searched for meets the target ε or the budget",
    "bundle.architecture": "the architecture of a stored model is unknown, or has other parameters than the run's",
    "bundle.code": "the code of a stored model was not named, or is not the code that it was trained with",
    "bundle.damaged": "a file of a stored model cannot be read, or is of another format",
    "bundle.missing": "a file that is needed to use a stored model is missing",
    "bundle.mixed": "files of a stored model are of different runs",
    "bundle.no_schema": "a stored model cannot read a table, because its run had no schema with public ranges",
    "bundle.outputs": "the outputs of a stored model do not have the shape of predictions",
    "checkpoint.damaged": "a file of a run's checkpoint is damaged",
    "checkpoint.format": "a checkpoint was written by another version of silodp",
    "checkpoint.mismatch": "a run's checkpoint and its stores are copies of different moments",
    "checkpoint.setup": "a checkpoint belongs to a run with other settings or data",
    "cli.file": "a file or folder cannot be read or written",
    "cli.interrupted": "Ctrl-C stopped the command; the message says how to go on",
    "cli.memory": "there is not enough memory",
    "cli.unexpected": "an unexpected error: a bug in silodp, or in a user's model, loss or metric",
    "cli.usage": "a command, option or argument is unknown, missing or malformed",
    "cohort.budget": "a run would exceed the limit on ε for all runs on the same people",
    "cohort.path": "the file of a cohort is missing, or exists where a new one is to be made",
    "cohort.persons": "the runs of a cohort name persons in one way, and a new run in another",
    "cohort.required": "a run was begun under a cohort, and is continued without it or under another one",
    "cohort.rule": "the rule of a cohort does not cover the releases of a run",
    "cohort.seed": "a run with a fixed seed has no ε that a cohort could count",
    "cohort.settle": "a run has more charges than it has reserved in its cohort, or is added to it twice",
    "cohort.unit": "the runs of a cohort protect persons, and a new one single records, or the reverse",
    "cohort.unknown": "a cohort notes a run whose ledger is not known, so it admits no further run",
    "config.draft": "comments of a draft, which were read off private rows, are still in the configuration",
    "config.missing_field": "a setting that is needed is not there",
    "config.no_signature": "a function that a configuration names does not say which arguments it takes",
    "config.not_importable": "a file or module that a configuration names cannot be imported, or lacks the name",
    "config.not_toml": "the configuration is not TOML in UTF-8",
    "config.path": "the path of the configuration is not a readable file",
    "config.too_large": "the configuration is too long, too deeply nested, or has a number or text that is too long",
    "config.type": "a value has a type or characters that no setting can have",
    "config.unknown_field": "a setting is not known",
    "config.value": "a setting has another type than it needs, or a value that it may not have",
    "crypto.decryption": "a sum cannot be decrypted: a mask was not removed, or an answer was altered",
    "crypto.paillier_modulus": "a Paillier key has another length than was agreed, is weak, or lacks a valid proof",
    "crypto.parameters": "no encryption is safe and exact for these settings",
    "crypto.reused": "a mask, seed, transfer or message that serves once would be used a second time",
    "data.array": "an array of a silo is of another type or shape than is needed, or not finite",
    "data.budgets": "budgets of persons or records are missing, infinite, not above 0, or below what is charged",
    "data.categories": "the public number of categories of ids is missing or does not fit the ids or the model",
    "data.changed": "a silo's records are not those that the run began with",
    "data.column": "a table lacks a column of the schema, or has it twice",
    "data.connection": "the private file that says how to connect to a database is wrong, readable by others, or leads "
    "to no server",
    "data.encoding": "a table is not text in the declared encoding",
    "data.federation": "the parts of a federation do not fit together",
    "data.fetch": "a data set cannot be fetched, or was fetched damaged",
    "data.files": "the list of tables is empty, or names one twice",
    "data.kind": "the schema's label, classes, event or time column do not match its kind of label",
    "data.no_dataset": "a data set's file or folder is not there",
    "data.no_file": "a table is not there, or is a folder",
    "data.no_reader": "a spreadsheet or a database needs a package that is not installed",
    "data.no_records": "there are no records where some are needed",
    "data.omop_definition": "the definition of a table of an OMOP database is wrong",
    "data.omop_person": "persons would be named by a number that every hospital counts anew",
    "data.query": "a database has no query, or one that cannot be run, or that gives too many rows",
    "data.schema": "a schema declares no features, a column twice, or something that is no column or range",
    "data.too_few_records": "a silo has fewer records than a batch, or an allocation in pairs, needs",
    "data.unreadable": "a table is not readable in the format that its name says",
    "data.users": "the public list of users is not readable, or names somebody twice",
    "data.value": "a cell of a table is not what the schema says",
    "data.values": "declared classes or categories are too few, or not all different",
    "deploy.address": "the server cannot listen on, or be found at, an address",
    "deploy.certificate": "a certificate, its key and the consortium's authority do not belong together",
    "deploy.data": "a silo's records do not fit the description of the data that was agreed",
    "deploy.digest": "two parties have different public folders",
    "deploy.intercepted": "the certificate shown in place of the server's is not of the consortium's authority",
    "deploy.key": "a party's key is missing, or is not the one in the roster",
    "deploy.name": "a silo's name cannot be the name of a file, or is that of the server",
    "deploy.no_index": "silos have no common numbering of persons",
    "deploy.not_connected": "a silo called without being connected",
    "deploy.not_installed": "a library that only a deployment needs is not installed",
    "deploy.not_sealed": "a public folder has no roster yet",
    "deploy.proxy": "the proxy between a silo and its server is not set right, not reached, or lets nothing through",
    "deploy.proxy_login": "the proxy of a silo does not accept its user and password, or their file cannot be used",
    "deploy.public": "a file of the public folder is missing, cannot be read, or is none that such a folder may hold",
    "deploy.request": "a party's certificate request is missing or cannot be read",
    "deploy.rollback_detected": "a silo's folder is older than the answers that its server has",
    "deploy.sealed": "a public folder is sealed already",
    "deploy.server_stopped": "the server of a consortium has stopped, or its run is over",
    "deploy.silo_failed": "a silo failed for a reason that only its own log states",
    "deploy.spec": "the run that follows from a public folder is not the one that the folder states",
    "deploy.unknown_silo": "a party that the roster does not list asked to connect",
    "deploy.version": "two parties have versions of silodp with different protocols",
    "evaluation.aggregator": "evaluation by sums of counts is not known under this aggregator",
    "evaluation.by": "subgroups of an evaluation by a column that the schema does not declare, or too many counts",
    "evaluation.labels": "evaluation by sums of counts does not fit the labels",
    "evaluation.no_records": "no silo has held-out records, and the run is to be evaluated across silos",
    "evaluation.noise": "evaluation by sums of counts has no noise, or noise and ε are both set",
    "evaluation.outputs": "evaluation by sums of counts needs one output for each class (or one for two classes)",
    "evaluation.target": "a plan is asked for a target ε that the evaluations of the run cost alone",
    "evaluation.times": "evaluation by sums of counts needs public edges between survival times",
    "evaluation.unit": "evaluation by sums of counts is not proven for the unit of this method",
    "extension.missing": "what is asked for is in an extension package that is not installed",
    "gate.allotment": "a silo refused user weights that the method cannot have computed",
    "gate.answered": "a silo has answered another request under the same kind, round and attempt",
    "gate.attempt": "a silo was asked to repeat an attempt with another request",
    "gate.attempts": "a silo has answered all attempts that the run's encryption was chosen for",
    "gate.budget": "a release would exceed the silo's own limit on ε",
    "gate.charged": "a silo was asked for a release that it has charged for another request, and not answered",
    "gate.kind": "a silo was asked for a kind of message that this run does not have",
    "gate.model": "a silo was asked for one round with two models or samples",
    "gate.open": "a silo was asked to open a seal for something other than what it masked last",
    "gate.order": "a silo was asked out of order, or a second time",
    "gate.past": "a silo was asked for a round before the one that it answered last",
    "gate.release": "a silo was asked for a release that cannot come next",
    "gate.restarted": "a silo was restarted during the set-up of a session; resume the run",
    "gate.rollback_detected": "a silo's store or its ledger was restored from an old copy, or was lost",
    "gate.roster": "a silo was sent a roster with too few silos, without itself, or with a lost silo",
    "gate.round_left_out": "a silo was asked for a round although it has missed one that every silo must answer",
    "gate.rounds": "a silo was asked for more rounds or releases than were agreed",
    "gate.run": "a silo was sent a request of another run than its own",
    "gate.state": "a silo was sent a state that its method cannot have",
    "identity.cell": "a cell holds no identifier that the identity profile accepts",
    "identity.column": "a column of identifiers holds numbers that may have lost digits, or no text",
    "identity.exists": "there is a file already where an identity profile would be written",
    "identity.file": "an identity profile is not there, or is not TOML in UTF-8",
    "identity.index": "the file by which a trust center numbers persons has a wrong or repeated entry",
    "identity.population": "the tables have more persons than the identity profile declares",
    "identity.profile": "a setting of an identity profile is unknown, missing, or has a value that it may not have",
    "invalid": "an error from outside silodp (a method or transport of somebody's own) that names no code",
    "ledger.charge": "a charge lacks an adversary, or differs from the earlier charge of the same release",
    "ledger.closed": "a ledger is closed already",
    "ledger.damaged": "a ledger's lines are not those that were written",
    "ledger.missing": "the ledger of a run that is to go on is not there",
    "ledger.setup": "a ledger was begun with other settings",
    "ledger.version": "a ledger was written by a version of silodp that this one cannot check",
    "ledger.write_failed": "the ledger could not be written; what it would have charged was not released",
    "loss.counts_masked_records": "the value of a loss depends on records that the mask leaves out",
    "loss.no_gradient": "a loss has no gradient with respect to the model's outputs",
    "loss.not_callable": "a loss is no function",
    "loss.not_copyable": "a loss holds an object that cannot be copied",
    "loss.not_per_record": "a loss of single records does not return one number per record",
    "loss.not_scalar": "a loss does not return one number",
    "loss.not_separable": "a method clips single records, and the loss is not a mean over records",
    "loss.output_shape": "a loss or metric needs outputs of another shape than the model gives",
    "loss.raised": "a loss raised an exception of its own",
    "loss.wrong_labels": "a loss does not go with this kind of label or number of classes",
    "message.malformed": "a message cannot be read, or its entries, types or sizes are not those of its kind",
    "message.recipient": "a message is for a silo that the transport does not know",
    "message.signature": "a message does not carry its sender's signature for this recipient and request",
    "message.too_large": "a message is longer than any message of the run may be",
    "message.unexpected": "an answer does not belong to the request",
    "method.not_set_up": "a method was used before its set-up gave it counts or rates",
    "method.rows": "a method gave rows that are not what it declared, or that the aggregator cannot add up",
    "metric.not_callable": "a metric is no function",
    "metric.raised": "a metric raised an exception of its own, or returned no number",
    "metric.wrong_labels": "a metric does not go with this kind of label or number of classes",
    "model.batch_norm": "a layer normalizes over the batch",
    "model.dtype": "the parameters are not all float32, or all float64, on one device",
    "model.embedding": "an embedding changes its weights in forward, or makes gradients that depend on the batch",
    "model.gradient_differs": "a model's gradient in training is not that of autograd on the module itself",
    "model.hidden_random": "a model returns something else when it is run again with the same seed of torch",
    "model.ignores_inputs": "a layer or a model gives the same outputs for all records",
    "model.inputs": "a network of silodp does not take the arrays of the records",
    "model.integer_inputs": "inputs of whole numbers are not declared as ids, or a lookup of ids gets real numbers",
    "model.mixes_records": "a model lets one record of a batch change another's output or gradient",
    "model.no_gradient": "a model's outputs have no gradient with respect to its parameters",
    "model.no_parameters": "a model has nothing to train",
    "model.no_shape": "a lazy layer has no shape yet, because the model was not run once",
    "model.not_a_module": "a configuration names something else than a torch.nn.Module or a function that makes one",
    "model.not_averageable": "models differ, are not finite, or hold values without noise",
    "model.not_copyable": "a model cannot be copied",
    "model.not_finite": "a model gives outputs that are not finite on a finite example",
    "model.not_storable": "a model's state holds something that cannot be stored",
    "model.output_shape": "a model does not return one tensor with one row per record",
    "model.raised": "a model, or the function that makes it, raised an exception of its own",
    "model.running_state": "running a model, a loss or a metric changes its state",
    "model.shared_memory": "two parameters share memory without being one parameter",
    "model.writes_inputs": "a model writes into its inputs",
    "plugin.not_frozen": "a plug-in declares settings and is no frozen dataclass",
    "plugin.raised": "a method, aggregator, accountant, data set or server optimizer raised an exception of its own",
    "plugin.returned": "a plug-in gave something else than it has to",
    "policy.charged": "a silo's policy cannot be replaced, because a run was charged under it",
    "policy.digest": "the operator of a silo, or of the server, has not accepted the digest of the public folder",
    "policy.few_persons": "a silo's table has fewer persons than its policy asks for",
    "policy.limit": "a request would lead beyond a limit of a silo's policy",
    "policy.missing": "a silo has no policy yet",
    "policy.not_allowed": "a silo's policy does not allow the run",
    "policy.persons": "a person is somebody else in a run than in the earlier runs of a silo's folder",
    "regression.outcome": "the outcome of a regression is not the label, or does not fit its family or event",
    "regression.rounds": "a regression has another number of rounds than of iterations, or is not finished",
    "regression.terms": "terms of a regression are no columns, doubled, too many, or lack a part of a product",
    "report.attack_format": "attack.json has a format that this version of silodp does not read",
    "report.checklist": "a checklist of a report cannot be read, or there is nothing to confirm",
    "report.contradicted": "the files of a run directory contradict each other",
    "report.damaged": "a file of a run directory that a report needs cannot be read",
    "report.exists": "there is a file already where a checklist, a form, a key or a signature would be written",
    "report.foreign_code": "a report, or a party of a deployment, would have to run code from outside silodp",
    "report.key": "a key for reports is missing, is a key for something else, or may be read by others",
    "report.missing": "a file of a run directory that a report needs is not there",
    "report.signature": "a signature of a report is missing, was altered, or was not made by the key that was named",
    "report.signed": "files of a signed report would be replaced, and the signature would hold no more",
    "report.unsigned": "a statement of a report that is to be signed has no answer",
    "run.attempts": "the server has made all attempts that the run's encryption was chosen for",
    "run.config_changed": "config.toml in the directory of a run is not the one that the run wrote",
    "run.disk_full": "the disk, or the quota on it, is full",
    "run.exists": "the output directory holds files already, or the output file exists",
    "run.in_use": "another process is running in the output directory",
    "run.long_sum": "a silo's share, or the sum of all, is longer than honest silos send, or not finite",
    "run.metrics_damaged": "metrics.jsonl does not hold one row for each round",
    "run.no_answer": "a silo that must answer did not answer",
    "run.nothing_to_resume": "there is no checkpoint to resume from",
    "run.refused": "a silo refused without a code of its own",
    "run.rounds_done": "a resumed run was asked for fewer rounds than it has done",
    "run.too_few_silos": "fewer silos answered than are needed in a sum (in a deployment: within --patience)",
    "session.altered": "what silos sent each other was altered on the way, or is of another session",
    "session.missing": "a party was never set up in this run, or its store is lost",
    "session.no_transfers": "a silo was asked for oblivious transfers whose set-up it does not have",
    "session.pins": "a silo's key or name is not one that was pinned, or its session key is weak",
    "session.transfers_ended": "a check of the oblivious transfers failed; no more are made in this run",
    "session.unknown": "a silo was sent a request of a session that is not its own",
    "statistics.cells": "a table of statistics has no cell, or too many",
    "statistics.column": "a statistic is asked of a column without public constants for it, or at another place",
    "statistics.rounds": "statistics are asked for in more or less than one round",
    "store.permissions": "others may read a folder that holds keys and stored answers",
    "workers.differ": "a worker computes something else than the process of the run",
    "workers.lost": "processes that compute for a simulation ended again and again",
    "workers.not_installed": "a simulation with workers needs Ray, which is not installed",
    "workers.unreachable": "Ray cannot be started, or does not answer at the address that was given",
}
"""Every code that an error can carry, with what it means. Codes are never renamed; new ones may be added."""


def lookup(name: str, registry: Mapping[str, T], field: str, also: str = "") -> T:
    """Return the entry of a registry; "-" and "_" are one character here.

    Args:
        name: The name of the entry.
        registry: The entries by name.
        field: The setting that names it, for the message.
        also: What else may be named, for the message, for example "FILE.py:CLASS"; parts that packages of strangers add
            are then named, too.

    Raises:
        SilodpError: `argument.value`, with the closest name, where there is no such entry.
    """
    # Not by its items: a registry imports an entry when it is taken out.
    for known in registry:
        if known.replace("_", "-") == name.replace("_", "-"):
            return registry[known]
    names, others = [*registry], ""
    if also:  # by names alone: nothing of a stranger is imported
        names, others = [*names, *getattr(registry, "references", ())], f", or {also}"
    remedy = suggest_name(name, names) or f"use one of {', '.join(names)}{others}."
    # Only what other packages can extend has a kind (`silodp._lazy.Registry`).
    remedy += list_missing_packages() if hasattr(registry, "kind") else ""
    raise SilodpError(
        f"{field} = '{shorten(name)[1:-1]}' is not known: {remedy}", code="argument.value", field=field
    )


def require(holds: object, message: str, *, code: str, field: str | None = None) -> None:
    """Raise a SilodpError of this message, code and field unless a condition holds."""
    if not holds:
        raise SilodpError(message, code=code, field=field)


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

Every error that a caller can correct is a `silodp.SilodpError`. It has a sentence (`str(error)`), a stable
`code`, and, where a single setting or argument is wrong, its name as `field`: `data.schema.label` where a table
lacks the column of labels. For `data.value`, where a cell is wrong, `field` is the name of its column. Compare codes,
never sentences: sentences may change, codes are never renamed. The table says what each code means; the sentence says
what to do.

On the command line the sentence goes to standard error with the code in brackets. The exit status is 2 (130
after Ctrl-C, 70 for `cli.unexpected`). With `--json` this object is also printed, on standard output:

    {"error": {"code": "config.type", "field": "method.clip", "message": "…"}}

`make errors` writes this page.
"""
