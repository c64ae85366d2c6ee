"""Signs that keys do not name persons: one person under several keys, or several persons under one.

A person whose keys differ is two persons to every method: each part is clipped and protected for itself, and the
guarantee for all records of the person does not hold. Persons who share a key are protected together only. The
sentences have private counts and no key: they are for the owner of the records alone.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from statistics import median

import numpy as np

from silodp.data.federation import Federation
from silodp.data.identity.spellings import to_ascii_digit
from silodp.data.silo_data import SiloData
from silodp.text import pluralize

MANY_TIMES, MANY_ROWS = 20, 50
"""A key has very many rows where it has this many times the median, and at least this many."""

FEW_PERSONS = 2
"""A table with records of so many persons is named: the key may name something else, and the table tells of them."""

_MIN_KEYS, _MIN_ROWS, _MIN_SHARE, _TIMES_NEXT = 5, 10, 0.1, 4
"""A table of at least `_MIN_KEYS` keys is searched for a gap: a key above it has at least `_MIN_ROWS` rows, this share
of all rows, and so many times the rows of the next key."""

_TIMES_MEDIAN = 4
"""A number such as 0 or 9999 may name a person. It is taken for a placeholder from so many times the median rows on."""

_MIN_NUMBERED, _NUMBERED_SHARE, _FIRST_NUMBERS = 10, 0.5, 3
"""A table of at least so many keys is numbered where they are so large a share of all numbers up to their largest, and
begin with one of the first."""

_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0]")
"""Characters that are not visible, although Unicode counts them among letters, marks and symbols."""
_PLACEHOLDER = re.compile(
    r"-(1|9+)|(.)\2{7,}|x{2,}|[?.*]+|(unknown|unbekannt|inconnu|desconocido|sconosciuto|onbekend|ukendt|missing|fehlt|fehlend|"
    r"leer|empty|blank|keine?|no[ _-]?id|kein(e)? id|not known|nicht bekannt|ohne|anonym(ous|e|o)?|dummy|test|tbd|"
    r"undefined|unassigned|not available|k\.? ?a\.?|n\.a\.?|nil)"
)
_MONTH = "(jan|feb|m[aä]r|apr|ma[iy]|ju[nl]|aug|sep|o[ck]t|nov|de[cz])[a-zéû]*"
_DAY = re.compile(
    rf"\d{{1,2}}[-. /]+{_MONTH}([-. /]+\d{{2,4}})?|{_MONTH}[-. /]+\d{{1,4}}|\d{{4}}-\d\d-\d\d([ t]\d\d:\d\d(:\d\d)?)?|"
    r"\d{1,2}(?P<mark>[./])\d{1,2}(?P=mark)\d{2,4}|\d{1,2}:\d\d(:\d\d)?( ?[ap]m)?|true|false"
)
_MAYBE_PLACEHOLDER = re.compile(r"-\d+|0+|9+|(.)\1{2,}|12345\d*")


def list_linkage_warnings(federation: Federation) -> list[str]:
    """Return a sentence for each sign in the training records of a federation; nothing without keys."""
    keys = federation.user_keys
    if keys is None:
        return []
    counts = federation.counts()
    warnings = []
    # Some overlap is usual, so none at all in the whole federation is a sign.
    if len(federation.silos) > 1 and not ((counts > 0).sum(axis=0) > 1).any():
        warnings.append(
            "no person appears in more than one silo: if people have records in several, their keys differ there "
            "(data.schema.user), and nobody is protected across silos"
        )
    tables = {
        silo.name: {keys[user]: int(row[user]) for user in np.flatnonzero(row)}
        for silo, row in zip(federation.silos, counts, strict=True)
    }
    return warnings + list_key_warnings(tables)


def find_few_persons(silos: Sequence[SiloData]) -> list[str]:
    """Return a sentence where a silo, or all of them together, have training records of one or two persons alone."""
    few = [silo.name for silo in silos if 0 < len(np.unique(silo.user)) <= FEW_PERSONS]
    if not few:
        return []
    is_whole = len(np.unique(np.concatenate([silo.user for silo in silos]))) <= FEW_PERSONS
    where = few[0] if len(few) == 1 else "all silos together" if is_whole else pluralize(len(few), "silo")
    return [
        f"there are training records of one or two persons alone (in {where}): it is public that a silo takes part, "
        "and noise that hides one person leaves nothing to learn about so few: check that the key names persons "
        "(data.schema.user), or leave the silo out"
    ]


def list_key_warnings(tables: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a sentence for each sign in the keys of some tables.

    Args:
        tables: name of a silo, file or list → key → its number of rows there.
    """
    similar = set(find_similar({key for table in tables.values() for key in table}, _fold_key))
    warnings = []
    if similar:
        persons = len({_fold_key(key) for key in similar})
        where = ", ".join(name for name, table in tables.items() if similar & table.keys())
        warnings.append(
            f"{len(similar):,} person keys (in {where}) would be {persons:,} if leading zeros, case, the kind of "
            "punctuation, the shape of digits and letters, and invisible characters were ignored: where they mean the "
            "same people, write them alike in all tables, because only equal keys are protected as one person"
        )
    numbered = [name for name, table in tables.items() if is_numbered(table)]
    shared = set[str].intersection(*(set(tables[name]) for name in numbered)) if len(numbered) > 1 else set()
    if shared and 2 * len(shared) >= min(len(tables[name]) for name in numbered):
        warnings.append(
            f"the person keys (in {', '.join(numbered)}) count from 1 on in each, and {pluralize(len(shared), 'key')} "
            "stand in all of these: where each table numbers its own persons, as person_id of OMOP does, different "
            "people have equal keys and count as one person, so take a number that names them everywhere "
            "(data.schema.user)"
        )
    for name, table in tables.items():
        rows = sum(table.values())
        # Those of another table may be the same keys in plain characters, which this party cannot see.
        odd = sum(map(_has_odd_characters, table))
        if odd:
            warnings.append(
                f"{pluralize(odd, 'person key')} (in {name}) with invisible characters, or with digits and letters in "
                "another shape than in plain text: write them plainly in all tables, because only equal keys are one "
                "person"
            )
        days = sum(_DAY.fullmatch(key.casefold()) is not None for key in table)
        if 0 < days < len(table):
            warnings.append(
                f"{pluralize(days, 'person key')} (in {name}) written as a day, a time or true, beside others that "
                "are not: a spreadsheet program makes them of keys such as 3-5, in some tables and not in others: "
                "write all keys as the other tables do, because only equal keys are one person"
            )
        none = list(_find_placeholders(table))
        if none:
            warnings.append(
                f"{pluralize(len(none), 'person key')} (in {name}) as programs write for unknown persons, such as 0, "
                f"-1, 9999 or unknown, with {sum(table[key] for key in none):,} of {rows:,} rows: where several people "
                "stand behind one of them, all of them count as one person, so give each row the key of its person, "
                "or leave these rows out"
            )
        # A placeholder is named once, with its own remedy.
        many = set(_find_outlying(table)) - set(none)
        if many:
            warnings.append(
                f"{pluralize(len(many), 'person key')} (in {name}) with far more rows than all others there, "
                f"{sum(table[key] for key in many):,} of {rows:,}: where several people stand behind one of them, all "
                "of them count as one person, so give each row the key of its person, or leave these rows out"
            )
    return warnings


def is_numbered(keys: Collection[str]) -> bool:
    """Return whether keys are whole numbers that count from 0 or 1 on; some may be left out."""
    if len(keys) < _MIN_NUMBERED or not all(key.isascii() and key.isdecimal() for key in keys):
        return False
    # A key of more digits than the count has is none of its numbers, and need not be converted.
    if max(len(key.lstrip("0")) for key in keys) > len(str(len(keys))) + 1:
        return False
    numbers = list(map(int, keys))
    return min(numbers) <= _FIRST_NUMBERS and len(keys) >= _NUMBERED_SHARE * max(numbers)


def find_many_rows(rows: Mapping[str, int]) -> list[str]:
    """Return the keys with very many rows, the one with most rows first."""
    if not rows:
        return []
    least = max(MANY_ROWS, MANY_TIMES * median(rows.values()))
    found = [value for value, number in rows.items() if number >= least]
    return sorted(found, key=lambda value: (-rows[value], value))


def _find_outlying(rows: Mapping[str, int]) -> list[str]:
    """Return the keys with very many rows; in a small table those above a gap in the numbers of rows."""
    ranked = Counter(rows).most_common()
    least = max(_MIN_ROWS, _MIN_SHARE * sum(rows.values()))
    if len(ranked) >= _MIN_KEYS:
        # Only the upper half: below, a gap tells of people with few rows, not of a placeholder.
        for place, ((_, number), (_, following)) in enumerate(pairwise(ranked[: len(ranked) // 2])):
            if number < least:
                break
            if number >= _TIMES_NEXT * following:
                return [key for key, _ in ranked[: place + 1]]
    return find_many_rows(rows)


def _find_placeholders(rows: Mapping[str, int]) -> Iterator[str]:
    """Yield the keys that are usual placeholders; numbers that may name persons only where they have many rows."""
    least = max(_MIN_ROWS / 2, _TIMES_MEDIAN * median(rows.values())) if rows else 0
    # 0 or 9999 may be the key of somebody; only many rows make it a placeholder.
    for key, number in rows.items():
        # Brackets are left out, as in <unknown> or (none).
        plain = unicodedata.normalize("NFKC", key).casefold().strip(" <>()[]")
        if _PLACEHOLDER.fullmatch(plain) or (number >= least and _MAYBE_PLACEHOLDER.fullmatch(plain)):
            yield key


def find_similar(keys: Iterable[str], fold: Callable[[str], str]) -> list[str]:
    """Return the keys that differ from another one only in what `fold` leaves out."""
    groups = defaultdict[str, list[str]](list)
    for key in keys:
        groups[fold(key)].append(key)
    return [key for group in groups.values() if len(group) > 1 for key in group]


def _fold_key(key: str) -> str:
    """Return what keys that may mean one person have in common."""
    # Hidden characters first: NFKC keeps some of them.
    compatible = unicodedata.normalize("NFKC", _INVISIBLE.sub("", key)).casefold()
    if not compatible.isascii():
        compatible = "".join(map(to_ascii_digit, compatible))
    if not compatible.isalnum():  # the loop takes most of the time
        kept = ((c, unicodedata.category(c)) for c in compatible if not c.isspace())
        compatible = "".join(
            "-" if kind[0] in "PS" else c for c, kind in kept if kind not in ("Cf", "Cc")
        ).strip("-")
    return _LEADING_ZEROS.sub("", compatible)


def _has_odd_characters(key: str) -> bool:
    """Return whether a key has characters that are not seen, or digits and letters in another shape."""
    if key.isascii():
        return not key.isprintable()
    return any(map(_is_odd, key))


@cache
def _is_odd(character: str) -> bool:
    if character.isascii():
        return not character.isprintable()
    is_hidden = unicodedata.category(character) in ("Cf", "Cc", "Zs", "Zl", "Zp")
    # NFC only composes accents; what NFKC changes beyond that is another shape of a plain character.
    has_shape = unicodedata.normalize("NFKC", character) != unicodedata.normalize("NFC", character)
    return bool(is_hidden or has_shape or character.isdecimal() or _INVISIBLE.match(character))
