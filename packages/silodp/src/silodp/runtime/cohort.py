"""A run under a cohort: its plan is reserved before it releases anything, and in the end replaced by its ledger.

A crash between the two leaves the reservation. The ledger of the run notes under which cohort it was begun, so that it
cannot go on without it. The cohort knows the last line of the ledger, once a round, before the round is visible: a
directory whose ledger lacks that line is counted as another run. And the ledger notes which line of the cohort it
follows, so that an old copy of the cohort is refused.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from silodp.accounting.cohort import Cohort, CohortRun, is_within
from silodp.accounting.events import Event
from silodp.accounting.ledger import Ledger, LedgerEntry, reopen_ledger
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.aggregators.run_spec import RunSpec
from silodp.data.persons import PersonKey
from silodp.errors import SilodpError
from silodp.parsing import parse_json, refuse_malformed
from silodp.runtime.guarantees import plan_charges
from silodp.runtime.run_files import COHORT, GUARANTEE, LEDGER, RUN_SPEC
from silodp.wire.files import write_durably


@dataclass(frozen=True)
class CohortPlace:
    """Where a run is counted.

    Attributes:
        path: The file of the cohort.
        persons: Who the persons of the run are; None where the unit is a record.
        purpose: What the run is for.
    """

    path: Path
    persons: PersonKey | None
    purpose: str = "run"


@contextmanager
def count_in_cohort(
    place: CohortPlace | None, directory: Path | None, spec: RunSpec, ledger: Ledger, resume: bool
) -> Iterator[None]:
    """Reserve the plan of a run, and settle what its ledger has when the run ends without an error.

    Args:
        place: Where the run is counted; None counts it nowhere.
        directory: The directory of the run; None keeps it in memory, and its reservation stays after a crash.
        spec: The specification of the run, with its id.
        ledger: The open ledger of the run.
        resume: Whether the run was begun earlier.

    Raises:
        SilodpError: the run does not fit, or is not the one that the cohort or its directory knows.
    """
    if place is None:
        _check_uncounted(directory, ledger)
        yield
        return
    cohort = Cohort(place.path)
    with cohort.lock():
        continuation = _find_continuation(cohort, directory, ledger if resume else None)
        # The line of the ledger comes first: a run that died between both reserves again under this id.
        about = {"cohort": cohort.digest, "path": str(place.path.resolve()), "continuation": continuation}
        ledger.note({"kind": "counted", **about, "follows": cohort.head})
        noted = ledger.head
        cohort.reserve(_plan_run(spec, ledger, place, continuation))
        ledger.follows, reserved = cohort.head, cohort.runs[continuation].charges

    def check(entry: LedgerEntry) -> None:
        """Reserve what was not planned, for example a further release after silos dropped out."""
        nonlocal reserved
        needed = _add(_count(ledger), entry)
        if is_within(needed, reserved):
            return
        with cohort.lock():
            known = cohort.check_head(continuation, noted)
            more = {a: Counter(known.charges.get(a, {})) | needed[a] for a in needed}
            cohort.reserve(replace(known, charges=more, is_settled=False))
            ledger.follows, reserved = cohort.head, more

    def note_head() -> None:
        nonlocal noted
        cohort.note_head(continuation, noted, ledger.head)
        ledger.follows, noted = cohort.head, ledger.head

    ledger.before_charge, ledger.after_completed = check, note_head
    yield
    cohort.settle(continuation, noted, _count(ledger))
    if directory is not None:
        write_durably(directory / COHORT, _describe(cohort, spec.run, continuation))


def check_cohort(place: CohortPlace | None, directory: Path | None, spec: RunSpec, resume: bool) -> None:
    """Check that a run fits its cohort, before anything is written.

    Args:
        place: Where the run is counted; None counts it nowhere.
        directory: The directory of the run.
        spec: The specification of the run, with its id.
        resume: Whether the run was begun earlier.

    Raises:
        SilodpError: as `count_in_cohort`.
    """
    path = None if directory is None else directory / LEDGER
    # A run that was killed before it made its ledger has released nothing.
    is_there = resume and path is not None and path.exists() and b"\n" in path.read_bytes()
    ledger = reopen_ledger(path, lambda name: spec.accountant, is_open=False) if path and is_there else None
    if place is None:
        _check_uncounted(directory, ledger)
        return
    if not spec.is_secret:
        raise _explain_seed()
    cohort = Cohort(place.path)
    continuation = _find_continuation(cohort, directory, ledger)
    cohort.check(_plan_run(spec, ledger, place, continuation))


def _check_uncounted(directory: Path | None, ledger: Ledger | None) -> None:
    """Refuse to go on without the cohort under which a run was begun."""
    if ledger is not None and (counted := ledger.progress.counted) is not None:
        raise _explain_place(directory, f"under the cohort {counted.path}")


def _find_continuation(cohort: Cohort, directory: Path | None, ledger: Ledger | None) -> str:
    """Return the id under which a start is counted: that of the run, or a new one for an old copy of it.

    Args:
        cohort: The cohort.
        directory: The directory of the run, for messages.
        ledger: The ledger of the run; None where it begins.

    Raises:
        SilodpError: The run was begun under another cohort or without one (code cohort.required), or the cohort is an
            old copy (code cohort.settle).
    """
    fresh = secrets.token_hex(16)
    counted = None if ledger is None else ledger.progress.counted
    if ledger is None or counted is None:
        if ledger is not None and ledger.history:
            raise _explain_place(directory, "without a cohort")
        return fresh
    if counted.cohort != cohort.digest:
        raise _explain_place(
            directory, f"under the cohort {counted.path}, which is another one than {cohort.path}"
        )
    if not cohort.contains(ledger.progress.follows):
        raise SilodpError(
            f"{cohort.path} is an old copy: it lacks a line that the run in {directory} knows of; restore the newest, "
            "since what was spent is not known.",
            code="cohort.settle",
            field="cohort",
        )
    known = cohort.runs.get(counted.continuation)
    is_newest = known is None or ledger.contains(known.head)
    return counted.continuation if is_newest else fresh


def _plan_run(spec: RunSpec, ledger: Ledger | None, place: CohortPlace, continuation: str) -> CohortRun:
    """Return the run with all that it may be charged for its rounds and evaluations.

    Args:
        spec: The specification of the run.
        ledger: What it was charged so far; None where it begins.
        place: Where the run is counted.
        continuation: The id under which it is counted.
    """
    planned = plan_charges(spec, spec.accountant).charged
    spent = _count(ledger) if ledger else {a: Counter[Event]() for a in ADVERSARIES}
    disclosed = spec.aggregator.disclosure(spec)
    persons = None if place.persons is None or spec.method.unit == "record" else asdict(place.persons)
    return CohortRun(
        spec.run,
        continuation,
        place.purpose,
        spec.method.unit or "user",
        # A resumed run may have charges beyond its plan; and what was charged is never less than before.
        {a: Counter(planned.get(a, {})) | spent[a] for a in ADVERSARIES},
        {a: disclosed.get(a, 0.0) for a in ADVERSARIES},
        persons,
        head="" if ledger is None else ledger.head,
    )


def _count(ledger: Ledger) -> dict[Adversary, Counter[Event]]:
    return {adversary: ledger.counts(adversary) for adversary in ADVERSARIES}


def _add(counts: Mapping[Adversary, Counter[Event]], entry: LedgerEntry) -> dict[Adversary, Counter[Event]]:
    return {a: counts[a] + Counter([entry.events[a]] if a in entry.events else []) for a in counts}


def _explain_seed() -> SilodpError:
    return SilodpError(
        "the run has a seed, from which its noise can be computed, so no ε of it can be counted in a cohort: remove "
        "the seed, or run without --cohort what nobody but you ever sees.",
        code="cohort.seed",
        field="seed",
    )


def _explain_place(directory: Path | None, where: str) -> SilodpError:
    return SilodpError(
        f"the run in {directory} was begun {where}: resume it as it was begun, since its charges are counted there; "
        "a finished run without a cohort is counted with 'silodp cohort add'.",
        code="cohort.required",
        field="cohort",
    )


def _describe(cohort: Cohort, run: str, continuation: str) -> bytes:
    """Return the content of DIR/cohort.json, for report and card: public numbers of all runs so far."""
    fields = {
        "format": 1,
        "cohort": cohort.digest,
        "run": run,
        "place": list(cohort.runs).index(continuation) + 1,
        "delta": cohort.delta,
        "limits": dict(cohort.limits),
        "epsilon": {adversary: cohort.epsilon(adversary) for adversary in ADVERSARIES},
        "unknown": len(cohort.unknown),
    }
    return (json.dumps(fields, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def read_counted_run(directory: Path) -> tuple[CohortRun, Callable[[str], bool]]:
    """Return what a finished run has spent, by its ledger and its public specification.

    Args:
        directory: The directory of the run.

    Returns:
        The run, and whether its ledger has a line with a hash.

    Raises:
        SilodpError: a file is missing or damaged, the run had a seed (code cohort.seed), or it is counted elsewhere.
    """
    for name in (LEDGER, GUARANTEE, RUN_SPEC):
        if not (directory / name).exists():
            raise SilodpError(
                f"{directory} has no {name}, so what the run has spent is not known: note it with its ε (silodp cohort "
                "add FILE --note TEXT --epsilon NUMBER), after which no further run is admitted.",
                code="report.missing",
                field="directory",
            )
    with refuse_malformed(
        f"files in {directory} are damaged: restore them from a copy.", code="report.damaged"
    ):
        unit = parse_json((directory / GUARANTEE).read_bytes())["guarantees"][0]["unit"]
        is_secret = parse_json((directory / RUN_SPEC).read_bytes())["seed"] is None
    if not is_secret:
        raise _explain_seed()
    ledger = reopen_ledger(directory / LEDGER, is_open=False)
    if (counted := ledger.progress.counted) is not None:
        raise _explain_place(directory, f"under the cohort {counted.path}, where it is counted")
    disclosed = {adversary: ledger.find_disclosure(adversary) for adversary in ADVERSARIES}
    run = CohortRun(
        ledger.run,
        secrets.token_hex(16),
        "run",
        unit,
        _count(ledger),
        disclosed,
        is_settled=True,
        head=ledger.head,
    )
    return run, ledger.contains
