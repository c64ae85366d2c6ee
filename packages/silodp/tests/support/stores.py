"""What a party keeps in memory, through the calls that every store has; and the part of a silo that tests drive."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from silodp.accounting.ledger import Ledger
from silodp.aggregators.base import SiloAggregator
from silodp.runtime.silo import Silo
from silodp.wire.store import MemoryStore


@dataclass(frozen=True)
class Backup:
    """A copy of all that a silo keeps of a run."""

    entries: dict[str, bytes]
    ledger: Ledger

    @classmethod
    def of(cls, store: MemoryStore, ledger: Ledger) -> Backup:
        return cls(copy_entries(store), copy.deepcopy(ledger))


def copy_entries(store: MemoryStore) -> dict[str, bytes]:
    """Return everything that a store holds."""
    return {name: store.get(name) or b"" for name in store.names()}


def set_back(store: MemoryStore, entries: Mapping[str, bytes]) -> None:
    """Let a store hold these entries and no others, as a backup that is restored does."""
    for name in store.names():
        store.drop(name)
    for name, value in entries.items():
        store.put(name, value)


def side_of(silo: Silo) -> SiloAggregator:
    """Return the aggregator's side in a silo."""
    return silo._side
