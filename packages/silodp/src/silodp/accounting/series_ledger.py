"""The releases of one additional series in the ledger of a run, seen as a ledger of their own."""

from __future__ import annotations

from collections.abc import Mapping

from silodp.accounting.events import Composed, Event
from silodp.accounting.ledger import Ledger, LedgerEntry
from silodp.accounting.progress import Answer
from silodp.accounting.views import Adversary


class SeriesLedger:
    """An additional series in the ledger of a run; the budget and the limits are those of the whole ledger.

    Args:
        ledger: the ledger of the run.
        series: the name of the series.

    Attributes:
        series: The name of the series.
        is_last: Whether what `Ledger.reserved` kept for the series may be spent now.
    """

    def __init__(self, ledger: Ledger, series: str) -> None:
        self._ledger, self.series = ledger, series
        self.is_last = False

    @property
    def history(self) -> tuple[LedgerEntry, ...]:
        """The entries of the series."""
        return tuple(entry for entry in self._ledger.history if entry.series == self.series)

    @property
    def rounds(self) -> int:
        """Number of rounds of the series that were charged."""
        return self._ledger.count_rounds(self.series)

    @property
    def head(self) -> str:
        """As `Ledger.head`."""
        return self._ledger.head

    @property
    def answers(self) -> list[Answer]:
        """The answers about the series, as `Ledger.answers`."""
        return self._ledger.progress.answers.get(self.series, [])

    def record_answer(self, answer: Answer) -> None:
        """As `Ledger.record_answer`."""
        self._ledger.record_answer(answer)

    def charge(self, round: int, release: int, events: Mapping[Adversary, Event], request: str = "") -> None:
        """Charge a release of the series, after the last round of training charged; as `Ledger.charge`.

        What costs nothing against anyone is not written down.
        """
        if all(event == Composed(()) for event in events.values()):
            return
        self._ledger.charge(round, release, events, request, self.series)

    def charged(self, round: int, release: int = 0) -> bool:
        """Return whether a release of the series was charged."""
        return self.find_request(round, release) is not None

    def find_request(self, round: int, release: int) -> str | None:
        """As `Ledger.find_request`."""
        return self._ledger.find_request(round, release, self.series)

    def affords(self, events: Mapping[Adversary, Event]) -> bool:
        """Return whether the budget still holds after these events; the last release may spend what was reserved."""
        return self._ledger.affords(events, self.series if self.is_last else None)

    def epsilon(self, adversary: Adversary) -> float | None:
        """As `Ledger.epsilon`."""
        return self._ledger.epsilon(adversary)

    def epsilon_after(self, events: Mapping[Adversary, Event], adversary: Adversary) -> float | None:
        """As `Ledger.epsilon_after`."""
        return self._ledger.epsilon_after(events, adversary)

    def epsilon_by_round(self, adversary: Adversary) -> dict[int, float | None]:
        """As `Ledger.epsilon_by_round`, by rounds of training."""
        return self._ledger.epsilon_by_round(adversary)


LedgerView = Ledger | SeriesLedger
"""What a server and a gate charge: the rounds of training, or those of an additional series, in one ledger."""
