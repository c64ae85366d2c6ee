"""How far a run is, by the lines of a ledger that are no charges: starts, completed rounds, answers.

These lines decide which copy of a party's files is the newest. A silo's store and a server's checkpoint and store are
compared with them, and so is the cohort in which the run is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any, Self

TRAINING = ""
"""The name of the series of training; additional series have names of their own."""


@dataclass(frozen=True)
class Answer:
    """An answer of a silo, which is in its store.

    Attributes:
        message: The kind of the request.
        round: The round that the silo was in, counted from 0; -1 in the set-up.
        attempt: The attempt of the request.
        request: The digest of the whole request.
        digest: SHA-256 (hex) of the answer.
        state: The state of the silo's gate after it; it follows from all answers so far.
        series: The name of the series that the request belongs to.
    """

    message: str
    round: int
    attempt: int
    request: str
    digest: str
    state: Mapping[str, Any] = field(compare=False)
    series: str = TRAINING

    def to_line(self) -> dict[str, Any]:
        """Return the fields of the line of a ledger."""
        return {"kind": "answer", **vars(self)}

    @classmethod
    def from_line(cls, fields: Mapping[str, Any]) -> Self:
        """Return the inverse of `to_line`."""
        known = {name: fields[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "state": dict(known["state"])})


@dataclass(frozen=True)
class CompletedRound:
    """What a server had after a round.

    Attributes:
        round: The number of completed rounds.
        checkpoint: SHA-256 (hex) of the checkpoint.
        drawn: SHA-256 (hex) of what was drawn for the last of these rounds (`Participation.digest`).
        charges: The number of charges at that time.
    """

    round: int
    checkpoint: str
    drawn: str
    charges: int


@dataclass(frozen=True)
class Counted:
    """The cohort under which a run was started.

    Attributes:
        cohort: Its digest.
        path: Its file.
        continuation: The id under which the cohort counts what this start continues.
    """

    cohort: str
    path: str
    continuation: str


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        starts: The id of every start, and the number of rounds that were completed then.
        completed: The last two completed rounds, by number; 0 stands for the untrained model.
        answers: The answers of the set-up and of the last round, in order, by the name of the series.
        counted: The cohort of the last start; None: none.
        follows: The hash of the cohort's line that was known last; "" without a cohort.
        is_ended: Whether nothing more is answered in this run.
    """

    starts: list[dict[str, Any]] = field(default_factory=list)
    completed: dict[int, CompletedRound] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    counted: Counted | None = None
    follows: str = ""
    is_ended: bool = False

    def take(self, fields: Mapping[str, Any], charges: int) -> None:
        """Take over a line that is no charge.

        Args:
            fields: Its fields.
            charges: The number of charges before it.
        """
        self.follows = str(fields.get("follows", self.follows))
        match fields["kind"]:
            case "start":
                self.starts.append({"id": str(fields["id"]), "round": index(fields["round"])})
            case "completed":
                done = index(fields["round"])
                entry = CompletedRound(done, str(fields["checkpoint"]), str(fields["drawn"]), charges)
                # A round may be completed twice, if the process died before its checkpoint was written.
                self.completed = {n: one for n, one in self.completed.items() if n == done - 1} | {
                    done: entry
                }
            case "answer":
                answer = Answer.from_line(fields)
                # Answers of earlier rounds are dropped from the store, and not repeated.
                before = self.answers.get(answer.series, [])
                kept = [one for one in before if one.round in (-1, answer.round)]
                self.answers[answer.series] = [*kept, answer]
            case "counted":
                self.counted = Counted(*(str(fields[name]) for name in ("cohort", "path", "continuation")))
            case "end":
                self.is_ended = True
            case kind:
                raise ValueError(f"a line of kind {kind!r}, which this version does not know")
