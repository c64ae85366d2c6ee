"""Checks of a silo's folder against its earlier runs: no ledger is an old copy, and persons are keyed as before.

For every answer a silo writes durably, in this order: its ledger, the answer, the state of its gate with the number of
charges (`runtime/gate.py:State`), and a line of the audit log with the same number. So wherever the process is killed,
a ledger has at least as many charges as the state and the log list. A ledger with fewer is an old copy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path

from silodp.accounting.evaluation_ledger import EvaluationLedger
from silodp.accounting.ledger import Ledger, reopen_ledger
from silodp.aggregators.evaluation import name_evaluation
from silodp.data.persons import PersonKey
from silodp.errors import SilodpError
from silodp.runtime.gate import read_state
from silodp.text import pluralize
from silodp.wire.files import make_private_folder
from silodp.wire.store import RoundStore, Store

RUN_ID = re.compile(r"[0-9a-f]{32}")
PERSONS = "persons"
"""Key in the silo's store: the `PersonKey` of the first run that was charged."""


def open_ledgers(folder: Path, store: Store, listed: Mapping[str, int]) -> dict[str, Ledger]:
    """Open the ledgers of all runs of a silo, and check that none is older than the store or the audit log.

    Args:
        folder: Folder with one ledger for each run; created if it does not exist.
        store: Store of the silo, for all runs.
        listed: By run, the largest number of charges that the audit log lists.

    Returns:
        The open ledgers by run.

    Raises:
        SilodpError: A ledger is missing (code ledger.missing), damaged (code ledger.damaged), or has fewer charges than
            the store or the audit log lists (code gate.set_back).
    """
    make_private_folder(folder)
    ledgers: dict[str, Ledger] = {}
    with ExitStack() as closing:
        for path in sorted(folder.glob("*.jsonl")):
            # A file without a complete line: the process was killed when it created it, and nothing was charged.
            if b"\n" in path.read_bytes():
                ledgers[path.stem] = closing.enter_context(reopen_ledger(path))
        stored = {key.partition("/")[0] for key in store.names()}
        # Runs without a charge may have no ledger any more: `SiloService` deletes the oldest of them.
        charged = {run for run, charges in listed.items() if charges}
        for run in sorted(run for run in {*stored, *charged} if RUN_ID.fullmatch(run)):
            _check_age(folder, run, ledgers.get(run), store, listed.get(run, 0))
        # No check has failed: the ledgers stay open for the caller.
        closing.pop_all()
    return ledgers


def _check_age(folder: Path, run: str, ledger: Ledger | None, store: Store, listed: int) -> None:
    """Raise if the ledger of a run is missing, or older than the store or the audit log."""
    if ledger is None:
        raise SilodpError(
            f"the store or the audit log beside {folder} knows the run {run}, and there is no ledger of it: what was "
            "spent there is not known; restore the newest ledger.",
            code="ledger.missing",
        )
    evaluated = len(EvaluationLedger(ledger).history)
    for what, expected, found in (
        ("the store", _count_charges(store, run), len(ledger.history)),
        # Charges of the evaluation stand in the ledger of its run.
        ("the store", _count_charges(store, name_evaluation(run)), evaluated),
        ("the audit log", listed, len(ledger.history)),
    ):
        if found < expected:
            raise SilodpError(
                f"the ledger of run {run} in {folder} is an old copy: it has {pluralize(found, 'charge')}, and {what} "
                f"beside it lists {expected}, so what was spent is not known; restore the newest ledgers, or if there "
                "are none read 'Backup' in docs/deployment_admin.md; nothing is answered until then.",
                code="gate.set_back",
            )


def _count_charges(store: Store, name: str) -> int:
    """Return the number of charges in the gate's state of a run, or of its evaluation."""
    return read_state(RoundStore(store, f"{name}/")).charges


def check_persons(store: Store, folder: Path, key: PersonKey, same: Collection[str]) -> None:
    """Check that a run assigns records to persons as the earlier runs of a silo did.

    Args:
        store: Store of the silo, for all runs; it has the key of the first run that was charged.
        folder: Folder of the silo, for the message.
        key: Key of the new run.
        same: Digests of keys that name the same persons as the first one, as the operator declares in the policy.

    Raises:
        SilodpError: The key is another one (code policy.persons).
    """
    # Stored at the first charge (`SiloService`): a run that was only set up has released nothing.
    stored = store.get(PERSONS)
    first = key if stored is None else PersonKey(**json.loads(stored))
    if first == key or key.digest in same:
        return
    raise SilodpError(
        f"this run names persons in another way than earlier runs in {folder} ({key.describe_changes(first)}): a "
        "person may be somebody else, so no ε of one person over all runs is known; ask the coordinator for the "
        f"earlier column and profile or list; if both name the same persons, add '{key.digest}' to persons in "
        "policy.toml; use another folder, whose ledgers begin at zero, only if no person is in both.",
        code="policy.persons",
        field="persons",
    )
