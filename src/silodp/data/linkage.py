"""How persons are linked across silos: in how many each was found, and which keys may mean one person."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from silodp.data.federation import Federation

_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")


def count_persons_by_silos(federation: Federation) -> dict[int, int]:
    """Return how many persons have training records in so many silos.

    Args:
        federation: with S silos.

    Returns:
        Number of silos in 0..S -> persons, for every number that occurs. These are counts of private records: they
        belong in no file that is shared.
    """
    silos = (federation.counts() > 0).sum(axis=0)
    numbers, persons = np.unique(silos, return_counts=True)
    return dict(zip(numbers.tolist(), persons.tolist(), strict=True))


def find_linkage_doubts(federation: Federation) -> list[str]:
    """Return a sentence for each sign that records of one person carry different keys; empty without keys.

    A person whose keys differ is two persons to every method: each part is clipped and protected for itself, and the
    guarantee for all records of the person does not hold. The sentences name silos and counts, never a key.
    """
    if federation.user_keys is None or len(federation.silos) < 2:
        return []
    doubts = []
    present = federation.counts() > 0
    if not (present.sum(axis=0) > 1).any():
        doubts.append(
            "no person appears in more than one silo: if people have records in several, their keys differ there "
            "(data.schema.user), and nobody is protected across silos"
        )
    groups = _similar(federation.user_keys)
    groups = [group for group in groups if present[:, group].any(axis=0).sum() > 1]
    if groups:
        keys = [key for group in groups for key in group]
        where = [
            silo.name for silo, found in zip(federation.silos, present[:, keys], strict=True) if found.any()
        ]
        doubts.append(
            f"{len(keys):,} person keys (in {', '.join(where)}) would be {len(groups):,} if leading zeros, case and "
            "invisible characters were ignored: where they mean the same people, write them alike in all tables, "
            "because only equal keys are protected as one person"
        )
    return doubts


def _similar(keys: Sequence[str]) -> list[list[int]]:
    """The positions of keys that differ in leading zeros, case or invisible characters only; groups of two or more."""
    groups: dict[str, list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(_folded(key), []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def _folded(key: str) -> str:
    compatible = unicodedata.normalize("NFKC", key).casefold()
    visible = "".join(
        c for c in compatible if not c.isspace() and unicodedata.category(c) not in ("Cf", "Cc")
    )
    return _LEADING_ZEROS.sub("", visible)
