"""The history of a silo: the ledgers of all its runs, by which every other file in its folder is checked.

A ledger lists every charge and every answer of its run, and in its header whose ε it charges (`accounting/ledger.py`).
For every answer a silo writes durably, in this order: the charge in the ledger, the answer in the store, its line in
the ledger, and a line of the audit log with the hash of that line. So wherever the process is killed, the ledger has
all that the audit log knows of, and the store what the ledger lists (`runtime/answers.py`). Anything else is a copy of
another moment, and the silo does not start.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from silodp.accounting.cohort import Counts, decode_charges
from silodp.accounting.ledger import Ledger, reopen_ledger
from silodp.accounting.series_ledger import SeriesLedger
from silodp.accounting.views import ADVERSARIES, Unit
from silodp.aggregators.series import name_series, split_name
from silodp.data.persons import PersonKey
from silodp.errors import SilodpError
from silodp.parsing import parse_json, refuse_malformed
from silodp.runtime.answers import Answers
from silodp.runtime.run_directory import hold_lock
from silodp.wire.files import make_private_folder
from silodp.wire.store import DirectoryStore, RoundStore, Store
from silodp_deploy import AUDIT, LEDGERS, LOCK, STORE
from silodp_deploy.limits import find_last, read_audit

RUN_ID = re.compile(r"[0-9a-f]{32}")


def open_ledgers(
    folder: Path, last: Mapping[str, Mapping[str, Any]], store: Store | None = None, name: str = ""
) -> dict[str, Ledger]:
    """Open the ledgers of all runs of a silo, and check that no file beside them is of another moment.

    Args:
        folder: Folder with one ledger for each run; created if it does not exist.
        last: The last entry of the audit log, by run. The log is read before the ledgers are.
        store: Store of the silo, for all runs; None: the ledgers are read alone, and may be in use elsewhere.
        name: Name of the silo, for messages.

    Returns:
        The ledgers by run.

    Raises:
        SilodpError: A ledger is missing (code ledger.missing) or damaged (code ledger.damaged), or a ledger or the
            store is an old copy (code gate.rollback_detected).
    """
    make_private_folder(folder)
    ledgers: dict[str, Ledger] = {}
    with ExitStack() as closing:
        for path in sorted(folder.glob("*.jsonl")):
            # A file without a complete line: the process was killed when it created it, and nothing was charged.
            if b"\n" in path.read_bytes():
                ledger = reopen_ledger(path, is_open=store is not None)
                ledgers[path.stem] = closing.enter_context(ledger)
        stored = set() if store is None else {key.partition("/")[0] for key in store.names()}
        # Runs without a charge may have no ledger any more: `SiloService` deletes the oldest of them.
        listed = {run for run, entry in last.items() if run in ledgers or entry["charges"]}
        for run in sorted(run for run in {*stored, *listed} if RUN_ID.fullmatch(run)):
            if run not in ledgers:
                raise SilodpError(
                    f"the store or the audit log beside {folder} knows the run {run}, and there is no ledger of it: "
                    "what was spent there is not known; restore the newest ledger.",
                    code="ledger.missing",
                )
            if run in last and not ledgers[run].contains(last[run]["head"]):
                raise SilodpError(
                    f"the ledger of run {run} in {folder} is an old copy: it lacks a line that the audit log beside it "
                    "knows of, so what was spent is not known; restore the newest ledgers, or if there are none read "
                    "'Backup' in docs/deployment_admin.md; nothing is answered until then.",
                    code="gate.rollback_detected",
                )
        for run, ledger in ledgers.items():
            if store is not None and not ledger.progress.is_ended:
                answered = {name_series(run, series) for series in ledger.progress.answers if series}
                for about in sorted({run, *answered, *(one for one in stored if split_name(one)[0] == run)}):
                    charges = SeriesLedger(ledger, split_name(about)[1])
                    Answers(name, RoundStore(store, f"{about}/"), charges)
        # No check has failed: the ledgers stay open for the caller.
        closing.pop_all()
    return ledgers


def list_charged(ledgers: Mapping[str, Ledger]) -> list[Ledger]:
    """Return the ledgers with a charge: a run that was only set up has released nothing, and decides nothing."""
    return [ledger for ledger in ledgers.values() if ledger.history]


def find_plan(ledgers: Mapping[str, Ledger]) -> Counts | None:
    """Return the plan of the run that was charged first, by adversary with counts.

    Returns:
        None before the first charge; without a release where no run, or more than one, says that it was the first.

    Raises:
        SilodpError: The ledger states a plan that this version does not know (code ledger.damaged).
    """
    charged = list_charged(ledgers)
    first = [ledger for ledger in charged if ledger.is_first and ledger.silo is not None and ledger.silo.plan]
    if not charged or len(first) != 1 or first[0].silo is None:
        return {adversary: {} for adversary in ADVERSARIES} if charged else None
    with refuse_malformed(
        f"ledger {first[0].path} states a plan that cannot be read: restore it from a copy.",
        code="ledger.damaged",
    ):
        return decode_charges(parse_json(first[0].silo.plan))


def check_persons(
    ledgers: Mapping[str, Ledger], folder: Path, unit: Unit | None, key: PersonKey, same: Collection[str]
) -> None:
    """Check that a run protects what the charged runs of a silo protect, and assigns records to persons as they do.

    Args:
        ledgers: The ledgers of all runs by run.
        folder: Folder of the silo, for the message.
        unit: The unit of the new run.
        key: The person key of the new run.
        same: Digests of keys that name the same persons as the first one, as the operator declares in the policy.

    Raises:
        SilodpError: The unit is another one (code policy.not_allowed), or the key is (code policy.persons).
    """
    charged = list_charged(ledgers)
    if any(ledger.silo is None or ledger.silo.unit != unit for ledger in charged):
        raise SilodpError(
            f"earlier runs in {folder} protect another unit than this one: their ε cannot be added up, and in another "
            "folder these persons would be counted from zero; ask the coordinator for a method that protects the same "
            "unit.",
            code="policy.not_allowed",
            field="methods",
        )
    # The run that was charged first decides, and every other one is compared with it.
    charged.sort(key=lambda ledger: not ledger.is_first)
    keys = [PersonKey(**ledger.silo.persons) for ledger in charged if ledger.silo and ledger.silo.persons]
    for other in (*keys[1:], key) if keys else ():
        if other == keys[0] or other.digest in same:
            continue
        raise SilodpError(
            f"this run names persons in another way than earlier runs in {folder} ({other.describe_changes(keys[0])}): "
            "a person may be somebody else, so no ε of one person over all runs is known; ask the coordinator for the "
            f"earlier column and profile or list; if both name the same persons, add '{other.digest}' to persons in "
            "policy.toml; use another folder, whose ledgers begin at zero, only if no person is in both.",
            code="policy.persons",
            field="persons",
        )


def end_runs(folder: Path) -> list[str]:
    """End all runs of a silo whose store is damaged, lost or an old copy: nothing more is answered in them.

    What the runs were charged stays counted, and a new run can begin.

    Args:
        folder: Folder of the silo.

    Returns:
        The ids of the runs that were ended here.

    Raises:
        SilodpError: The silo is running (code run.in_use), or a ledger is missing, damaged or an old copy.
    """
    ended, store = [], DirectoryStore(folder / STORE)
    with hold_lock(folder / LOCK, folder):
        last = find_last(read_audit(folder / AUDIT)[0])
        for run in open_ledgers(folder / LEDGERS, last):
            with reopen_ledger(folder / LEDGERS / f"{run}.jsonl") as ledger:
                if not ledger.progress.is_ended:
                    ledger.note({"kind": "end"})
                    ended.append(run)
        # Once more with the store: of a run that it alone knows, nobody knows what was spent.
        for ledger in open_ledgers(folder / LEDGERS, last, store).values():
            ledger.close()
        for key in store.names():
            store.drop(key)
    return ended
