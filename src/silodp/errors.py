"""The error that users read, its stable codes, and the check that every number passes first."""

from __future__ import annotations

from numbers import Real
from reprlib import repr as short

__all__ = ["CODES", "SilodpError", "check_real", "counted", "short"]


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
    "argument.conflict": "two settings exclude each other",
    "argument.grid": "integer noise, or a sum with it, does not fit the grid of steps to the clip",
    "argument.shape": "an array or vector has another shape than is needed",
    "argument.value": "an argument or setting lies outside the values that it may have",
    "checkpoint.damaged": "a file of a run's checkpoint is damaged",
    "checkpoint.format": "a checkpoint was written by another version of silodp",
    "checkpoint.mismatch": "a run's checkpoint and its stores are copies of different moments",
    "checkpoint.setup": "a checkpoint belongs to a run with other settings or data",
    "crypto.decryption": "a sum does not decrypt: a mask is left in it, or an answer was altered",
    "crypto.paillier_modulus": "a Paillier key has another length than was agreed, is weak, or lacks a valid proof",
    "crypto.parameters": "no encryption is safe and exact for these settings",
    "crypto.reused": "a mask, seed, transfer or message that serves once would be used a second time",
    "data.changed": "a silo's records are not those that the run began with",
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
    "message.malformed": "a message cannot be read, or its entries, types or sizes are not those of its kind",
    "message.recipient": "a message is for a silo that the transport does not know",
    "message.signature": "a message does not carry its sender's signature for this recipient and request",
    "message.too_large": "a message is longer than any of its run",
    "message.unexpected": "an answer does not belong to the request",
    "method.rows": "a method gave rows that are not what it declared, or that the aggregator cannot add up",
    "run.attempts": "the server has made all attempts that the run's encryption was chosen for",
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


def counted(number: int, noun: str) -> str:
    """ "1 round", "1,000 rounds"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def check_real(name: str, value: object) -> None:
    """Refuse what is no real number, before anything compares it; True is not 1."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SilodpError(f"{name} = {short(value)}: set a number.", field=name)
