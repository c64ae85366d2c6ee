"""What the folder of a silo knows of earlier runs: their ledgers, which must be copies of the newest moment.

For every answer a silo writes, in this order, each durably: its ledger, the answer, the state of its gate with the
number of charges (`runtime/gate.py:State`), and a line of the audit log with the same number. So a ledger never has
fewer charges than state or log say, wherever the process was killed. One that has is an old copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from silodp.accounting.evaluation_charges import EvaluationCharges
from silodp.accounting.ledger import Ledger, reopen_ledger
from silodp.aggregators.evaluation import name_evaluation
from silodp.errors import SilodpError, counted
from silodp.runtime.gate import read_state
from silodp.wire.store import RoundStore, Store, make_private_folder

RUN_ID = re.compile(r"[0-9a-f]{32}")


def open_ledgers(folder: Path, store: Store, listed: Mapping[str, int]) -> dict[str, Ledger]:
    """Open the ledgers of all runs of a silo, and compare them with its store and its audit log.

    Args:
        folder: of the ledgers, with one file for each run; made if it is not there.
        store: the silo's durable memory of all runs.
        listed: the largest number of charges that the audit log lists, by run.

    Returns:
        The open ledgers by run.

    Raises:
        SilodpError: a ledger is missing (code ledger.missing), is damaged, or has fewer charges than the store or the
            audit log lists (code gate.set_back).
    """
    make_private_folder(folder)
    ledgers: dict[str, Ledger] = {}
    try:
        for path in sorted(folder.glob("*.jsonl")):
            # Without a whole line the process died when it made the file, and nothing was charged.
            if b"\n" in path.read_bytes():
                ledgers[path.stem] = reopen_ledger(path)
        known = {*(key.partition("/")[0] for key in store.names()), *listed}
        for run in sorted(run for run in known if RUN_ID.fullmatch(run)):
            _check_age(folder, run, ledgers.get(run), store, listed.get(run, 0))
    except BaseException:
        for ledger in ledgers.values():
            ledger.close()
        raise
    return ledgers


def _check_age(folder: Path, run: str, ledger: Ledger | None, store: Store, listed: int) -> None:
    """Refuse a ledger that is older than the store or the audit log."""
    if ledger is None:
        raise SilodpError(
            f"the store or the audit log beside {folder} knows the run {run}, and there is no ledger of it: what was "
            "spent there is not known; restore the newest ledger.",
            code="ledger.missing",
        )
    evaluated = len(EvaluationCharges(ledger).history)
    for what, expected, found in (
        ("the store", _count_charges(store, run), len(ledger.history)),
        ("the store", _count_charges(store, name_evaluation(run)), evaluated),
        ("the audit log", listed, len(ledger.history)),
    ):
        if found < expected:
            raise SilodpError(
                f"the ledger of run {run} in {folder} is an old copy: it has {counted(found, 'charge')}, and {what} "
                f"beside it lists {expected}, so what was spent is not known; restore the newest ledgers, or if there "
                "are none read 'Backup' in docs/deployment_admin.md; nothing is answered until then.",
                code="gate.set_back",
            )


def _count_charges(store: Store, name: str) -> int:
    """Return the number of charges that the state of a gate lists."""
    return read_state(RoundStore(store, f"{name}/")).charges
