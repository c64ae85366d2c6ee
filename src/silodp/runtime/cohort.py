"""A run under a cohort: its plan is reserved before it releases anything, and in the end replaced by its ledger.

A crash between the two leaves the reservation. The directory of the run notes under which cohort it was begun, so that
it cannot go on without it; and the cohort notes the start of the run, so that of two copies of a directory one is
refused.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from silodp.accounting.cohort import Cohort, CohortRun, Counts, is_within
from silodp.accounting.events import Event
from silodp.accounting.ledger import Ledger, LedgerEntry, reopen_ledger
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.aggregators.run_spec import RunSpec
from silodp.data.persons import PersonKey
from silodp.errors import SilodpError
from silodp.parsing import parse_json, refuse_unsound
from silodp.runtime.guarantees import plan_charges
from silodp.runtime.run_files import COHORT, GUARANTEE, LEDGER, RUN_SPEC
from silodp.wire.files import PRIVATE_FILE, write_durably

PLACE = Path("checkpoint") / COHORT
"""In the directory of a run: the cohort under which it was begun."""


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
        check_cohort(None, directory, spec, resume)
        yield
        return
    start = secrets.token_hex(16)
    with Cohort(place.path) as cohort:
        noted = _check_same(cohort, directory, spec.run, resume)
        if directory is not None:
            # Before the reservation: a run that died between both is known by either start.
            before = cohort.runs[spec.run].start if spec.run in cohort.runs else noted.get("before", "")
            note = {
                "path": str(place.path.resolve()),
                "cohort": cohort.digest,
                "start": start,
                "before": before,
            }
            write_durably(directory / PLACE, json.dumps(note).encode(), PRIVATE_FILE)
        cohort.reserve(_plan_run(spec, ledger, place, start))
        reserved: Counts = cohort.runs[spec.run].charges

    def check(entry: LedgerEntry) -> None:
        """Reserve what was not planned, for example a further release after silos dropped out."""
        nonlocal reserved
        needed = _add(_count(ledger), entry)
        if is_within(needed, reserved):
            return
        with Cohort(place.path) as cohort:
            known = cohort.runs[spec.run]
            more = {a: Counter(known.charges.get(a, {})) | needed[a] for a in needed}
            cohort.reserve(CohortRun(**{**vars(known), "charges": more, "is_settled": False}))
            reserved = more

    ledger.before_charge = check
    yield
    with Cohort(place.path) as cohort:
        cohort.settle(spec.run, _count(ledger))
        if directory is not None:
            write_durably(directory / COHORT, _describe(cohort, spec.run))


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
    if place is None:
        if (noted := _read_note(directory)) is not None:
            raise _explain_place(directory, f"under the cohort {noted['path']}")
        return
    if not spec.is_secret:
        raise _explain_seed()
    with Cohort(place.path) as cohort:
        _check_same(cohort, directory, spec.run, resume)
        cohort.check(_plan_run(spec, None, place, ""))


def _plan_run(spec: RunSpec, ledger: Ledger | None, place: CohortPlace, start: str) -> CohortRun:
    """Return the run with all that it may be charged for its rounds and evaluations.

    Args:
        spec: The specification of the run.
        ledger: What it was charged so far; None where that is not looked at.
        place: Where the run is counted.
        start: The id of the start.
    """
    planned = plan_charges(spec, spec.accountant).charged
    spent = _count(ledger) if ledger else {a: Counter[Event]() for a in ADVERSARIES}
    disclosed = spec.aggregator.disclosure(spec)
    persons = None if place.persons is None or spec.method.unit == "record" else asdict(place.persons)
    return CohortRun(
        spec.run,
        place.purpose,
        spec.method.unit or "user",
        # A resumed run may have charges beyond its plan; and what was charged is never less than before.
        {a: Counter(planned.get(a, {})) | spent[a] for a in ADVERSARIES},
        {a: disclosed.get(a, 0.0) for a in ADVERSARIES},
        persons,
        start=start,
    )


def _count(ledger: Ledger) -> dict[Adversary, Counter[Event]]:
    return {adversary: ledger.counts(adversary) for adversary in ADVERSARIES}


def _add(counts: Mapping[Adversary, Counter[Event]], entry: LedgerEntry) -> dict[Adversary, Counter[Event]]:
    return {a: counts[a] + Counter([entry.events[a]] if a in entry.events else []) for a in counts}


def _check_same(cohort: Cohort, directory: Path | None, run: str, resume: bool) -> Mapping[str, str]:
    """Return what the directory notes; refuse another cohort than the run's, and a directory that is an old copy."""
    noted, known = _read_note(directory), cohort.runs.get(run)
    if not resume and directory is None:
        return {}
    if noted is None and resume:
        raise _explain_place(directory, "without a cohort")
    if noted is not None and noted["cohort"] != cohort.digest:
        raise _explain_place(
            directory, f"under the cohort {noted['path']}, which is another one than {cohort.path}"
        )
    starts = set() if noted is None else {noted["start"], noted["before"]}
    if (known is not None and known.start not in starts) or (
        noted is not None and known is None and noted["before"]
    ):
        raise SilodpError(
            f"{cohort.path} and {directory} know different starts of run {run}: one of both is an old copy; restore "
            "the newest, since what was spent is not known.",
            code="cohort.settle",
            field="cohort",
        )
    return noted or {}


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


def _read_note(directory: Path | None) -> Mapping[str, str] | None:
    if directory is None or not (directory / PLACE).exists():
        return None
    path = directory / PLACE
    with refuse_unsound(f"{path} is damaged: restore it from a copy.", code="report.damaged"):
        note = parse_json(path.read_bytes())
        return {name: str(note[name]) for name in ("path", "cohort", "start", "before")}


def _describe(cohort: Cohort, run: str) -> bytes:
    """Return the content of DIR/cohort.json, for report and card: public numbers of all runs so far."""
    fields = {
        "format": 1,
        "cohort": cohort.digest,
        "run": run,
        "place": list(cohort.runs).index(run) + 1,
        "delta": cohort.delta,
        "limits": dict(cohort.limits),
        "epsilon": {adversary: cohort.epsilon(adversary) for adversary in ADVERSARIES},
        "unknown": len(cohort.unknown),
    }
    return (json.dumps(fields, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def read_counted_run(directory: Path) -> CohortRun:
    """Return what a finished run has spent, by its ledger and its public specification.

    Args:
        directory: The directory of the run.

    Raises:
        SilodpError: a file is missing or damaged, the run had a seed (code cohort.seed), or it is counted elsewhere.
    """
    if (noted := _read_note(directory)) is not None:
        raise _explain_place(directory, f"under the cohort {noted['path']}, where it is counted")
    for name in (LEDGER, GUARANTEE, RUN_SPEC):
        if not (directory / name).exists():
            raise SilodpError(
                f"{directory} has no {name}, so what the run has spent is not known: note it with its ε (silodp cohort "
                "add FILE --note TEXT --epsilon NUMBER), after which no further run is admitted.",
                code="report.missing",
                field="directory",
            )
    with refuse_unsound(
        f"files in {directory} are damaged: restore them from a copy.", code="report.damaged"
    ):
        unit = parse_json((directory / GUARANTEE).read_bytes())["guarantees"][0]["unit"]
        is_secret = parse_json((directory / RUN_SPEC).read_bytes())["seed"] is None
    if not is_secret:
        raise _explain_seed()
    with reopen_ledger(directory / LEDGER) as ledger:
        disclosed = {adversary: ledger.find_disclosure(adversary) for adversary in ADVERSARIES}
        return CohortRun(ledger.run, "run", unit, _count(ledger), disclosed, is_settled=True)
