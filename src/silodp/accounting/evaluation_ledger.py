"""The evaluations in the ledger of a run, seen as a ledger of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from silodp.accounting.events import Composed, Event
from silodp.accounting.ledger import Ledger, LedgerEntry
from silodp.accounting.progress import Answer
from silodp.accounting.views import Adversary


class EvaluationLedger:
    """The evaluations in the ledger of a run, numbered from 0; the budget and the limits are those of the whole ledger.

    Args:
        ledger: the ledger of the run.

    Attributes:
        is_evaluation: True.
        is_last: Whether what `Ledger.reserved` kept may be spent now.
    """

    is_evaluation: ClassVar[bool] = True

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.is_last = False

    @property
    def history(self) -> tuple[LedgerEntry, ...]:
        """The entries of evaluations, with their numbers as rounds."""
        return tuple(
            replace(entry, round=entry.evaluation)
            for entry in self._ledger.history
            if entry.evaluation is not None
        )

    @property
    def rounds(self) -> int:
        """Number of evaluations charged."""
        return len({entry.round for entry in self.history})

    @property
    def head(self) -> str:
        """As `Ledger.head`."""
        return self._ledger.head

    @property
    def answers(self) -> list[Answer]:
        """The answers about the evaluation, as `Ledger.answers`."""
        return self._ledger.progress.answers[True]

    def record_answer(self, answer: Answer) -> None:
        """As `Ledger.record_answer`."""
        self._ledger.record_answer(answer)

    def charge(self, round: int, release: int, events: Mapping[Adversary, Event], request: str = "") -> None:
        """Charge a release of an evaluation, after the last round charged; as `Ledger.charge`.

        What costs nothing against anyone is not written down.
        """
        if all(event == Composed(()) for event in events.values()):
            return
        self._ledger.charge_evaluation(round, release, events, request)

    def charged(self, round: int, release: int = 0) -> bool:
        """Return whether a release of an evaluation was charged."""
        return self.find_request(round, release) is not None

    def find_request(self, round: int, release: int) -> str | None:
        """As `Ledger.find_request`."""
        return self._ledger.find_request(round, release, is_evaluation=True)

    def affords(self, events: Mapping[Adversary, Event]) -> bool:
        """Return whether the budget still holds after these events; the last evaluation may spend what was reserved."""
        reserved = self._ledger.reserved
        # Put back in any case: `Ledger.affords` may refuse.
        try:
            self._ledger.reserved = {} if self.is_last else reserved
            return self._ledger.affords(events)
        finally:
            self._ledger.reserved = reserved

    def epsilon(self, adversary: Adversary) -> float | None:
        """As `Ledger.epsilon`."""
        return self._ledger.epsilon(adversary)

    def epsilon_after(self, events: Mapping[Adversary, Event], adversary: Adversary) -> float | None:
        """As `Ledger.epsilon_after`."""
        return self._ledger.epsilon_after(events, adversary)

    def epsilon_by_round(self, adversary: Adversary) -> dict[int, float | None]:
        """As `Ledger.epsilon_by_round`, by rounds of training."""
        return self._ledger.epsilon_by_round(adversary)


LedgerView = Ledger | EvaluationLedger
"""What a server and a gate charge: the rounds of training, or the evaluations, in one ledger."""
