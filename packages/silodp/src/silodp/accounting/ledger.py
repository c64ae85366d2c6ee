"""The ledger of a run: the event of every release, on disk before the release, and ε against each adversary.

One line for every release of a round, with the event of every adversary, is on disk before `charge` returns, so before
anything of the release can be seen (see `_append_log`). Attempts at one release are charged once. A kill at any moment
can leave a charge for something that was never released, never a release without its charge.

The same file is the history of the run: a silo lists in it every answer before it is sent, and a server every completed
round before it is visible (`accounting/progress.py`). Everything else that a party keeps is a view of this file: what
is older than the file is refused, and what the file is older than is refused too.

ε is computed from counts of events, however many rounds there were. Where units have budgets of different sizes, their
kinds are alternatives of each event (`WorstOf`), and the ledger reports the largest ε of a kind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import attrgetter, index
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from silodp.accounting._append_log import AppendOnlyLog
from silodp.accounting.accountant import Accountant, compose_charges, compute_epsilon, find_accountant
from silodp.accounting.charges import ChargeCounts, compute_cost
from silodp.accounting.events import (
    Composed,
    Event,
    count_kinds,
    event_from_dict,
    event_to_dict,
    explain_not_private,
)
from silodp.accounting.progress import TRAINING, Answer, Progress
from silodp.accounting.views import ADVERSARIES, Adversary, Unit
from silodp.errors import SilodpError
from silodp.parsing import is_format, parse_json, refuse_malformed
from silodp.settings import Delta, Epsilon, Named, Settings, check_value

FORMAT = 1

_MAX_DISCLOSURE: Mapping[Adversary, float] = {"server": 2.0**-40}
"""Disclosure (TV) that is assumed where a ledger with integer noise does not state it: the largest of `lattice`."""


@dataclass(frozen=True)
class Budget(Settings, prefix="budget."):
    """The ε at δ that a run may spend against one adversary (docs/privacy.md, section 3).

    Attributes:
        epsilon: The largest ε that may be spent.
        delta: The δ at which it is counted, which may be another than that of the ledger.
        adversary: The adversary against whom it is counted.
    """

    epsilon: Epsilon
    delta: Annotated[Delta, Named("delta")]
    adversary: Adversary = "released"


@dataclass(frozen=True)
class LedgerHeader:
    """What a run's events are about, so that no guarantee can state something else.

    Attributes:
        method: The name of the method.
        settings: The method with all its constants, as text.
        unit: Who is protected, "user" or "record"; None without privacy.
        aggregator: The name of the aggregator.
        secret: Whether all randomness is the operating system's; if not, whoever knows the seed can remove the noise.
    """

    method: str
    settings: str
    unit: Unit | None
    aggregator: str
    secret: bool


@dataclass(frozen=True)
class SiloHeader:
    """What the charges in a silo's ledger are about, so that only charges of the same persons are added up.

    Attributes:
        unit: Who is protected, "user" or "record"; None without privacy.
        persons: Public facts by which other persons are told apart (`PersonKey`); None where the unit is no person, and
            in simulations.
        plan: All charges that the run plans, as text (`deploy.lifetime.encode_plan`); "" in simulations.
    """

    unit: Unit | None
    persons: Mapping[str, str] | None = None
    plan: str = ""


@dataclass(frozen=True, slots=True)  # a run keeps one per round and party in memory
class LedgerEntry:
    """One line of the ledger: a release and its round, both counted from 0, with an event per adversary.

    Attributes:
        round: The number of the round in its series.
        release: The number of the release in its round.
        events: The event of each adversary.
        request: In a silo's ledger, the digest of the whole request that the release answers; else "".
        series: The name of the additional series that the round belongs to; "" for training.
        after: The last round of training that was charged before a round of an additional series.
    """

    round: int
    release: int
    events: Mapping[Adversary, Event]
    request: str = ""
    series: str = TRAINING
    after: int = 0

    @property
    def place(self) -> tuple[str, int, int]:
        """What is charged once: the series, the round, the release."""
        return self.series, self.round, self.release

    @property
    def training_round(self) -> int:
        """The round of training with which ε counts the release."""
        return self.after if self.series else self.round


class Ledger:
    """The ledger of one run, open in one process at a time.

    It says what is spent (`epsilon`), as a privacy odometer does, and whether a further charge may be made (`affords`),
    as a privacy filter does.

    Source: Rogers, Roth, Ullman and Vadhan 2016 (Privacy odometers and filters) for these two notions.

    Args:
        path: the file, made if it is not there; None keeps the ledger in memory.
        delta: δ at which ε is reported.
        accountant: a name or an object; its name is stored, and another one cannot continue the ledger.
        budget: what may be spent; None for no limit.
        run: the run's id; a ledger of another run is refused.
        subject: what the events are about; None takes what the file states, if it does.
        silo: the same in a silo's ledger.
        disclosure: TV by adversary (`Aggregator.disclosure`), for a file that is made; None: not known.
        is_open: whether lines may be added; if not, the file is not locked, and may be in use elsewhere.

    Attributes:
        disclosure: The TV by adversary, as the file states it.
        progress: What the file lists beside the charges.
        is_first: Whether the first charge here is the first one of all runs of a silo. It is set before that charge.
        reserved: By additional series, the events that the budget must still hold after, whatever is charged before:
            those of its last release. The series are in the order in which they release.
        before_charge: Called with every new entry before it is written; it forbids the charge by raising an exception.
        after_completed: Called when a completed round was written, before anything of it is visible.
        files: The digests by name of the files that the run wrote when it ended; None where a charge came after that.

    Raises:
        SilodpError: the file is another run's or was begun with other settings, is damaged, or is in use.
    """

    series: ClassVar[str] = TRAINING  # as `SeriesLedger` says

    def __init__(
        self,
        path: Path | None,
        delta: float,
        accountant: Accountant | str = "pld",
        budget: Budget | None = None,
        *,
        run: str,
        subject: LedgerHeader | None = None,
        silo: SiloHeader | None = None,
        disclosure: Mapping[Adversary, float] | None = None,
        is_open: bool = True,
    ) -> None:
        check_value("delta", delta, Delta)
        self.path, self.delta, self.budget, self.run = path, delta, budget, run
        self.accountant = find_accountant(accountant)
        kept = _read_header(path)
        self.subject = _read_subject(kept) if subject is None else subject
        self.silo = _read_silo(kept) if silo is None else silo
        self.disclosure = _read_disclosure(path, kept) if kept else disclosure
        self.progress = Progress()
        self.is_first = False
        self.follows: str | None = None
        self.reserved: dict[str, Mapping[Adversary, Event]] = {}
        self.before_charge: Callable[[LedgerEntry], None] = lambda entry: None
        self.after_completed: Callable[[], None] = lambda: None
        self.files: Mapping[str, str] | None = None
        self._charges: dict[tuple[str, int, int], LedgerEntry] = {}
        self._counts: dict[Adversary, Counter[Event]] = {adversary: Counter() for adversary in ADVERSARIES}
        self._reported: dict[tuple[Adversary, float], float] = {}
        self._reasons: dict[Adversary, str] = {}
        header: dict[str, Any] = {
            "format": FORMAT,
            "run": run,
            "delta": delta,
            "accountant": self.accountant.name,
            "budget": None if budget is None else asdict(budget),
        }
        if self.subject is not None:
            header["subject"] = asdict(self.subject)
        if self.silo is not None:
            header["silo"] = asdict(self.silo)
        if self.disclosure is not None:
            header["disclosure"] = dict(self.disclosure)
        self._log = AppendOnlyLog(path, header, self._take)
        if not is_open:
            self._log.read()
            return
        # Locked from here on: what was read of the first line before is compared with the header by the log.
        self._log.lock()

    def charge(
        self,
        round: int,
        release: int,
        events: Mapping[Adversary, Event],
        request: str = "",
        series: str = TRAINING,
    ) -> None:
        """Charge a release of a round against each adversary; on disk when this returns.

        The same events under the same (series, round, release) are charged once. Nothing may be released where this
        raises.

        Args:
            round: The number of the round, from 0.
            release: The number of the release in the round, from 0.
            events: The event of each adversary.
            request: The digest of the request that asks for it; "" in the ledger of a server.
            series: The name of the additional series; "" for training.

        Raises:
            SilodpError: other events stand under (series, round, release), an adversary is missing or new, an event
                is out of range, or the file cannot be written.
        """
        after = max(self.rounds - 1, 0) if series else 0
        charge = LedgerEntry(int(round), int(release), dict(events), request, series, after)
        known = self._charges.get(charge.place)
        if known is None:
            # Checked before it is written: a line that cannot be read again would end the run.
            self._check(charge)
            self.before_charge(charge)
            line: dict[str, Any] = {"kind": "charge", "round": charge.round, "release": charge.release}
            line["events"] = {adversary: event_to_dict(event) for adversary, event in charge.events.items()}
            if series:
                line |= {"series": series, "after": after}
            if request:
                line["request"] = request
            if self.is_first and not self._charges:
                line["first"] = True
            self._log.append(line)
            self._count(charge)
        # A repeated attempt is free only where it costs what was charged.
        elif known.events != charge.events:
            raise SilodpError(
                f"release {charge.release + 1} of round {charge.round + 1}{series and f' of {series}'} is in the "
                "ledger with other events: repeat it as it was charged, or charge a further release.",
                code="ledger.charge",
            )

    def charged(self, round: int, release: int = 0) -> bool:
        """Return whether (round, release) was charged."""
        return self.find_request(round, release) is not None

    def find_request(self, round: int, release: int, series: str = TRAINING) -> str | None:
        """Return the digest of the request that a release was charged for; None where it was not charged."""
        entry = self._charges.get((series, round, release))
        return None if entry is None else entry.request

    # --- what is no charge ---

    @property
    def head(self) -> str:
        """The hash of the last line, which stands for the whole file."""
        return self._log.head

    def contains(self, head: str) -> bool:
        """Return whether the file has a line with this hash: then it is no older than when that line was its last."""
        return self._log.contains(head)

    def note(self, fields: Mapping[str, Any]) -> None:
        """Append a line that is no charge (`Progress.take`); on disk when this returns.

        Raises:
            SilodpError: the file cannot be written.
        """
        self._log.append(dict(fields))
        self.progress.take(fields, len(self._charges))

    @property
    def answers(self) -> list[Answer]:
        """The answers of the set-up and of the last round of training, in order."""
        return self.progress.answers.get(TRAINING, [])

    def record_answer(self, answer: Answer) -> None:
        """List an answer of a silo, before it is sent."""
        self.note(answer.to_line())

    def record_completed(self, rounds: int, checkpoint: str, drawn: str) -> None:
        """List that so many rounds are completed, before anything of the last one is visible.

        Args:
            rounds: their number.
            checkpoint: SHA-256 (hex) of the checkpoint.
            drawn: SHA-256 (hex) of what was drawn for the last one.

        Raises:
            SilodpError: The round was completed before with another result, and nothing was charged since: what
                repeats it (a store of a silo, or of the server) is an old copy (code checkpoint.mismatch).
        """
        known = self.progress.completed.get(rounds)
        if known is not None and known.checkpoint != checkpoint and known.charges == len(self._charges):
            raise SilodpError(
                f"round {rounds} was completed before with another result: a checkpoint or a store of this run is an "
                "old copy; restore the newest ones, or begin a new run, which adds its own ε.",
                code="checkpoint.mismatch",
            )
        about = {} if self.follows is None else {"follows": self.follows}
        self.note({"kind": "completed", "round": rounds, "checkpoint": checkpoint, "drawn": drawn, **about})
        self.after_completed()

    def record_files(self, digests: Mapping[str, str]) -> None:
        """Append digests of the files of the run that ends here; on disk when this returns.

        Args:
            digests: SHA-256 (hex) by name, the same on every computer.

        Raises:
            SilodpError: the ledger cannot be written.
        """
        if digests != self.files:
            self._log.append({"kind": "files", "files": dict(digests)})
        self.files = dict(digests)

    def affords(self, events: Mapping[Adversary, Event], ends: str | None = None) -> bool:
        """Return whether the budget still holds after these events; True without a budget.

        Args:
            events: by adversary.
            ends: the name of the series whose last release they are, which may spend what was reserved for it; None:
                they are no last release.

        Raises:
            SilodpError: nothing is promised to the budget's adversary, so that no budget can be kept.
        """
        if self.budget is None:
            return True
        adversary = self.budget.adversary
        if adversary not in events:
            raise SilodpError(
                f"the budget is for {adversary!r}, and no event says what that adversary sees.",
                code="ledger.charge",
                field="budget.adversary",
            )
        event = events[adversary]
        reason = explain_not_private(event) or self._reasons.get(adversary)
        if reason is not None:
            raise SilodpError(
                f"the budget cannot be kept against {adversary!r}, as nothing is promised there ({reason}): "
                f"change that, or remove the budget.",
                code="accounting.no_guarantee",
                field="budget.adversary",
            )
        # What is kept for the last releases counts as spent. The series before this one have had theirs.
        names = [*self.reserved]
        kept = names[names.index(ends) + 1 :] if ends in names else names
        more = (self.reserved[name][adversary] for name in kept)
        return self._spent(adversary, self.budget.delta, event, *more) <= self.budget.epsilon

    def epsilon(self, adversary: Adversary, delta: float | None = None) -> float | None:
        """Return ε spent against `adversary` at δ (by default the ledger's); None where nothing is promised."""
        if adversary in self._reasons:
            return None
        return _finite_or_none(self._spent(adversary, self.delta if delta is None else delta))

    def epsilon_after(self, events: Mapping[Adversary, Event], adversary: Adversary) -> float | None:
        """Return ε against `adversary` at the ledger's δ if these events were charged too; None without guarantee."""
        event = events[adversary]
        if adversary in self._reasons or explain_not_private(event) is not None:
            return None
        return _finite_or_none(self._spent(adversary, self.delta, event))

    def counts(self, adversary: Adversary) -> Counter[Event]:
        """Return how often each event was charged against `adversary`."""
        return Counter(self._counts[adversary])

    def find_disclosure(self, adversary: Adversary) -> float:
        """Return a bound of what the ciphertexts of the run disclose (a total variation); 0 where there are none."""
        if self.disclosure is not None:
            return self.disclosure.get(adversary, 0.0)
        # The file of a server or of a simulation: ciphertexts hold integers, whose noise "pld" does not account for.
        has_integers = not all(map(find_accountant("pld").supports, self._counts[adversary]))
        return _MAX_DISCLOSURE.get(adversary, 0.0) if has_integers else 0.0

    def epsilon_by_round(
        self, adversary: Adversary, rounds: Collection[int] | None = None
    ) -> dict[int, float | None]:
        """Return ε against `adversary` after each number of rounds, with all releases; None where nothing is promised.

        Args:
            adversary: against whom.
            rounds: numbers of rounds, from 0 on; None: every one up to now.
        """
        wanted = range(self.rounds + 1) if rounds is None else rounds
        counts: Counter[Event] = Counter()
        found: dict[int, float | None] = {0: 0.0} if 0 in wanted else {}
        by_training = attrgetter("training_round")
        for round_, charges in groupby(sorted(self.history, key=by_training), key=by_training):
            counts.update(charge.events[adversary] for charge in charges)
            if round_ + 1 not in wanted:
                continue
            found[round_ + 1] = compute_cost(counts.items(), self.delta, self.accountant).epsilon
        return found

    def to_counts(self) -> ChargeCounts:
        """Return how often each event was charged, from which guarantees are derived."""
        further: dict[str, dict[Adversary, Counter[Event]]] = {}
        for entry in self.history:
            for adversary, event in entry.events.items() if entry.series else ():
                further.setdefault(entry.series, {}).setdefault(adversary, Counter())[event] += 1
        runs_alike = groupby(self._charges, key=lambda place: (place[0], place[2]))
        releases = [(*kind, tuple(number for _, number, _ in places)) for kind, places in runs_alike]
        charged = {adversary: self.counts(adversary) for adversary in ADVERSARIES}
        reported = {adversary: e for (adversary, delta), e in self._reported.items() if delta == self.delta}
        return ChargeCounts(self.delta, self.accountant, self.rounds, charged, further, releases, reported)

    @property
    def rounds(self) -> int:
        """Number of rounds of training charged, each counted once however often it was released."""
        return self.count_rounds(TRAINING)

    def count_rounds(self, series: str) -> int:
        """Return the number of rounds of a series that were charged."""
        return len({number for name, number, _ in self._charges if name == series})

    @property
    def history(self) -> tuple[LedgerEntry, ...]:
        """All entries in the order they were written."""
        return tuple(self._charges.values())

    def close(self) -> None:
        """Close the file; a ledger in a file takes no charges after this."""
        self._log.unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self, fields: dict[str, Any], number: int) -> None:
        """Take over a line of the file; `number` is that of the line."""
        with refuse_malformed(
            lambda error: f"ledger {self.path} cannot be read in line {number}: {error}",
            code="ledger.damaged",
        ):
            match fields["kind"]:
                case "charge":
                    events = {a: event_from_dict(event) for a, event in fields["events"].items()}
                    place = index(fields["round"]), index(fields["release"])
                    request, series = str(fields.get("request", "")), str(fields.get("series", TRAINING))
                    charge = LedgerEntry(*place, events, request, series, index(fields.get("after", 0)))
                    self._check(charge)
                    self.is_first |= fields.get("first") is True
                    self._count(charge)
                case "files":
                    if not all(isinstance(digest, str) for digest in fields["files"].values()):
                        raise ValueError("a digest of a file is no text; restore the ledger from a copy")
                    self.files = fields["files"]
                case _:
                    self.progress.take(fields, len(self._charges))

    def _check(self, charge: LedgerEntry) -> None:
        """Check that every line names the same adversaries, else one would go uncharged, and supported events."""
        if not charge.events or set(charge.events) - set(ADVERSARIES):
            raise SilodpError(
                f"a charge must name adversaries among {', '.join(ADVERSARIES)}.", code="ledger.charge"
            )
        first = next(iter(self._charges.values()), charge)
        if set(first.events) != set(charge.events):
            raise SilodpError(
                f"round {charge.round + 1} charges {', '.join(charge.events)}, and the ledger began with "
                f"{', '.join(first.events)}: charge the same adversaries in every round.",
                code="ledger.charge",
            )
        for adversary, event in charge.events.items():
            compose_charges(self.accountant, [(event, 1)])  # raises where the accountant has no bound for it
            count_kinds(Composed((event, *self._counts[adversary])))

    def _count(self, charge: LedgerEntry) -> None:
        last = next(reversed(self._charges.values()), charge)
        # Rounds that cost the same share one mapping: a run of 10⁵ rounds would else hold as many.
        if last.events == charge.events:
            charge = replace(charge, events=last.events)
        self._charges[charge.place] = charge
        self.files = None  # they are of an earlier moment
        for adversary, event in charge.events.items():
            if (reason := explain_not_private(event)) is not None:
                self._reasons.setdefault(adversary, reason)
            self._counts[adversary][event] += 1

    def _spent(self, adversary: Adversary, delta: float, *more: Event) -> float:
        """Return ε at δ of all charges, and of further events.

        It never falls: a new, smaller kind of event refines the grid of `pld`, which may lower ε by a part in 10⁵.
        """
        # From counts and not entry by entry: a run of 10⁵ rounds composes a few distinct steps.
        counts = self._counts[adversary] + Counter(more)
        spent = compute_epsilon(counts.items(), delta, self.accountant)
        spent = max(spent, self._reported.get((adversary, delta), 0.0))
        if not more:  # a charge that is only considered must not raise what is reported
            self._reported[adversary, delta] = spent
        return spent


def _finite_or_none(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def find_exceeded_limit(
    limits: Mapping[Adversary, float], epsilon_after: Callable[[Adversary], float | None]
) -> tuple[Adversary, str] | None:
    """Return the first adversary whose limit would be exceeded, and what would be spent, as text; None if none is.

    Args:
        limits: most ε by adversary.
        epsilon_after: returns ε against an adversary with the charge in question; None where nothing is promised.
    """
    for adversary, limit in limits.items():
        spent = epsilon_after(adversary)
        # No guarantee is more than every limit.
        if spent is None or spent > limit:
            return adversary, "more than any ε" if spent is None else f"ε = {spent:.4g}"
    return None


def reopen_ledger(
    path: Path, find: Callable[[str], Accountant | str] = lambda name: name, is_open: bool = True
) -> Ledger:
    """Open a ledger with the settings in its first line; this checks the hash and the event of every line.

    Args:
        path: the file.
        find: the stored name of the accountant → an object, or a name in `ACCOUNTANTS`.
        is_open: whether lines may be added; if not, the file may be in use elsewhere.

    Raises:
        SilodpError: the file is no ledger, is damaged, is of another version (code ledger.version), or is in use.
    """
    with refuse_malformed(
        f"ledger {path} is damaged in line 1: restore it from a copy.", code="ledger.damaged"
    ):
        with path.open("rb") as file:
            header = parse_json(file.readline())
        version = header["format"]
        budget = None if header["budget"] is None else Budget(**header["budget"])
        delta, accountant, run = float(header["delta"]), str(header["accountant"]), str(header["run"])
    if not is_format(version, FORMAT):
        raise SilodpError(
            f"ledger {path} has format {version}, and this silodp reads {FORMAT}: use the version of silodp that wrote "
            "it; of a silo, begin with a new folder, and the ε that the old ledgers leave.",
            code="ledger.version",
        )
    return Ledger(path, delta, find(accountant), budget, run=run, is_open=is_open)


def _read_subject(header: Mapping[str, Any]) -> LedgerHeader | None:
    """Return what a file states of its events; None where it does not, as the ledger of a silo."""
    with suppress(KeyError, TypeError):
        return LedgerHeader(**header["subject"])
    return None


def _read_silo(header: Mapping[str, Any]) -> SiloHeader | None:
    """Return what a file states of a silo; None where it does not, which differs from its header if it is damaged."""
    with suppress(KeyError, TypeError):
        return SiloHeader(**header["silo"])
    return None


def _read_disclosure(path: Path | None, header: Mapping[str, Any]) -> Mapping[Adversary, float] | None:
    """Return what a file states, which is that of the run's begin; None where it does not."""
    stated = header.get("disclosure")
    with suppress(TypeError):
        is_table = isinstance(stated, dict)
        if stated is None or (
            is_table and all(n in ADVERSARIES and 0 <= tv <= 1 for n, tv in stated.items())
        ):
            return stated
    raise SilodpError(
        f"ledger {path} is damaged in line 1: restore it from a copy.",
        code="ledger.damaged",
        field="disclosure",
    )


def _read_header(path: Path | None) -> dict[str, Any]:
    """Read the first line of a file; {} where there is none (`AppendOnlyLog` checks the rest)."""
    if path is None:
        return {}
    with suppress(OSError, ValueError), path.open("rb") as file:
        header = parse_json(file.readline())
        if isinstance(header, dict):
            return header
    return {}
