"""The check of one silo's column of identifiers by an identity profile. Its result stays in the silo."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from silodp.data.identity.linkage import (
    FEW_PERSONS,
    MANY_ROWS,
    MANY_TIMES,
    find_many_rows,
    find_similar,
    is_numbered,
)
from silodp.data.identity.profile import IdentityProfile
from silodp.data.identity.spellings import REASONS, Refusal, compact
from silodp.data.tables.columns import Reader
from silodp.settings import check_type
from silodp.text import pluralize

MAX_ROWS = 10
"""Rows or identifiers that a check lists of each kind."""


@dataclass(frozen=True)
class Suspicion:
    """Identifiers that are accepted and deserve a look.

    Attributes:
        kind: One of the keys of `SUSPICIONS`.
        persons: The number of identifiers that deserve the look.
        rows: The first data row of each of the first `MAX_ROWS` identifiers; the first row after the header is 1.
        identifiers: These first identifiers, which are private.
    """

    kind: str
    persons: int
    rows: tuple[int, ...]
    identifiers: tuple[str, ...] = field(repr=False)


SUSPICIONS: Mapping[str, str] = {
    "spellings": "written in ways that differ in case or leading zeros (one person each)",
    "similar": "different from another one only in case or leading zeros (different persons)",
    "short": "that lack two digits or more, taken for lost zeros (lost_zeros): without its century, a number becomes "
    "another person",
    "repeated": "made of one repeated character, as placeholders are",
    "numbered": "that count from 1 on, as programs number the persons of one table (person_id of OMOP): in another "
    "table the same number is somebody else",
    "many_rows": f"with at least {MANY_ROWS} rows, and {MANY_TIMES} times the median of all persons",
}
"""Kind → what it means, after "3 identifiers"."""


@dataclass(frozen=True)
class IdentityCheck:
    """What a profile reads from one column. Private to the silo, apart from the profile's code.

    Attributes:
        profile: The profile by which the column was read.
        table: The path of the table, for the text.
        column: The name of the column, for the text.
        rows: The number of data rows.
        persons: The number of different identifiers.
        rows_per_person: The smallest number of rows of a person, the median and the largest; zeros without persons.
        dropped: The number of rows that a run would drop because they have no identifier.
        refused: Reason → number of rows that a run would refuse for it.
        first_refused: The first `MAX_ROWS` refused data rows, each with its reason.
        suspicions: What deserves a look among the accepted identifiers.
    """

    profile: IdentityProfile
    table: str
    column: str
    rows: int
    persons: int
    rows_per_person: tuple[int, float, int]
    dropped: int
    refused: Mapping[Refusal, int]
    first_refused: tuple[tuple[int, Refusal], ...]
    suspicions: tuple[Suspicion, ...]

    @property
    def fits_population(self) -> bool:
        """Whether there are no more persons than the profile declares."""
        return self.persons <= self.profile.population

    @property
    def ok(self) -> bool:
        """Whether a run would accept the column."""
        return not self.refused and self.fits_population and self.persons > 0

    @property
    def has_few_persons(self) -> bool:
        """Whether there are one or two persons alone."""
        return 0 < self.persons <= FEW_PERSONS

    def to_dict(self, show_identifiers: bool = False) -> dict[str, Any]:
        """Return the result, JSON-ready; identifiers only where `show_identifiers` asks for them."""
        least, middle, most = self.rows_per_person
        return {
            "ok": self.ok,
            "study": self.profile.study,
            "digest": self.profile.digest,
            "agreement_code": self.profile.agreement_code,
            "table": self.table,
            "column": self.column,
            "rows": self.rows,
            "persons": self.persons,
            "few_persons": self.has_few_persons,
            "population": self.profile.population,
            "fits_population": self.fits_population,
            "rows_per_person": {"least": least, "median": middle, "most": most},
            "dropped_rows": self.dropped,
            "refused": {reason.value: number for reason, number in self.refused.items()},
            "first_refused_rows": [
                {"row": row, "reason": reason.value} for row, reason in self.first_refused
            ],
            "suspicions": [
                {
                    "kind": found.kind,
                    "identifiers": found.persons,
                    "first_rows": list(found.rows),
                    **({"first_identifiers": list(found.identifiers)} if show_identifiers else {}),
                }
                for found in self.suspicions
            ],
        }

    def format(self, show_identifiers: bool = False) -> list[str]:
        """Return the result as lines of text; identifiers only where `show_identifiers` asks for them."""
        profile = self.profile
        least, middle, most = self.rows_per_person
        each = pluralize(most, "row") if least == most else f"{least:,} to {most:,} rows"
        lines = [
            f"Agreement code: {profile.agreement_code}",
            f"  (study {profile.study}; every silo must see the same code: compare it by telephone)",
            f"{self.table}, column {self.column!r}: {pluralize(self.rows, 'row')}, "
            f"{pluralize(self.persons, 'person')}, {each} per person (median {middle:g})",
        ]
        verdict = (
            "fits" if self.fits_population else "does NOT fit: agree on a profile with a larger population"
        )
        lines.append(f"Population {profile.population:,}: {verdict}")
        if self.has_few_persons:
            lines.append(
                "Few persons: check that the column names persons; noise leaves nothing to learn about so few"
            )
        if self.dropped:
            lines.append(
                f"Dropped, because missing = 'drop': {pluralize(self.dropped, 'row')} without an identifier"
            )
        lines.append(f"Refused: {pluralize(sum(self.refused.values()), 'row')}")
        lines += [f"  {number:,} where the cell {REASONS[reason]}" for reason, number in self.refused.items()]
        lines += [f"  data row {row} {REASONS[reason]}" for row, reason in self.first_refused]
        lines += [] if self.suspicions else ["Suspicious: nothing"]
        for found in self.suspicions:
            lines.append(f"Suspicious: {pluralize(found.persons, 'identifier')} {SUSPICIONS[found.kind]}")
            where = ", ".join(map(str, found.rows))
            lines.append(
                f"  first seen in data row {where}" + (" and others" if found.persons > MAX_ROWS else "")
            )
            if show_identifiers:
                lines.append(f"  {', '.join(found.identifiers)}")
        return lines


def check_table(
    profile: IdentityProfile,
    table: str | Path,
    column: str,
    reader: Reader | None = None,
    query: str | None = None,
) -> IdentityCheck:
    """Read one column of a table by a profile, and count what is accepted, refused and suspicious.

    Args:
        profile: the profile.
        table: path of the silo's file.
        column: name of the column of identifiers.
        reader: how the file is written; None takes the defaults of `Reader`.
        query: the query whose result is the table, for a database.

    Raises:
        SilodpError: the table or the column cannot be read.
    """
    from silodp.data.tables._table import read_identifiers  # imports pandas, which takes a second

    check_type("profile", profile, IdentityProfile, "load_profile('identity.toml')")
    cells, places = read_identifiers(Path(table), column, reader, "column", query)
    return check_cells(profile, cells, str(table), column, places)


def check_cells(
    profile: IdentityProfile,
    cells: Sequence[object],
    table: str = "",
    column: str = "",
    places: NDArray[Any] | None = None,
) -> IdentityCheck:
    """Return the check of a column.

    Args:
        profile: the profile.
        cells: the cells of the rows, or the d distinct ones with `places`.
        table, column: for the text.
        places: (n,) the position in `cells` of each row's cell; None: every cell is a row.
    """
    parsed = profile.parse_column(cells)
    places = np.arange(len(cells)) if places is None else places
    counts, first = np.bincount(places, minlength=len(cells)), np.zeros(len(cells), dtype=np.int64)
    first[places[::-1]] = np.arange(len(places), 0, -1)  # the assignment of the first row is the last one
    refused, dropped, rows, first_row = Counter[Refusal](), 0, Counter[str](), dict[str, int]()
    for place in np.argsort(first).tolist():
        value, count = parsed[place], int(counts[place])
        if isinstance(value, str):
            rows[value] += count
            first_row.setdefault(value, int(first[place]))
        elif value.stands_for_none and profile.missing == "drop":
            dropped += count
        else:
            refused[value] += count
    is_refused = np.array([not isinstance(value, str) and value in refused for value in parsed], dtype=bool)
    first_refused = np.flatnonzero(is_refused[places])[:MAX_ROWS].tolist()
    numbers = rows.values()
    found = {
        # Spellings of a national number differ by its rule, as 10 and 12 digits do.
        "spellings": [] if profile.rule is not None else _find_spellings(cells, parsed),
        "similar": find_similar(rows, lambda value: value.casefold().lstrip("0")),
        "short": sorted(
            {
                v
                for cell, v in set(zip(cells, parsed, strict=True))
                if isinstance(v, str) and profile.lacks_digits(cell)
            }
        ),
        "repeated": [value for value in rows if len(value) > 2 and len(set(value)) == 1],
        "numbered": sorted(rows) if is_numbered(rows) else [],
        "many_rows": find_many_rows(rows),
    }
    return IdentityCheck(
        profile=profile,
        table=table,
        column=column,
        rows=len(places),
        persons=len(rows),
        rows_per_person=(min(numbers), float(median(numbers)), max(numbers)) if rows else (0, 0.0, 0),
        dropped=dropped,
        refused=dict(refused.most_common()),
        first_refused=tuple((row + 1, cast(Refusal, parsed[places[row]])) for row in first_refused),
        suspicions=tuple(
            Suspicion(
                kind,
                len(values),
                tuple(first_row[value] for value in values[:MAX_ROWS]),
                tuple(values[:MAX_ROWS]),
            )
            for kind, values in found.items()
            if values
        ),
    )


def _find_spellings(cells: Iterable[object], parsed: Iterable[object]) -> list[str]:
    """Return the identifiers whose cells differ in more than separators and invisible characters."""
    spellings = defaultdict[str, set[str]](set)
    # Distinct pairs only: most rows repeat the spelling of their person.
    for cell, value in set(zip(cells, parsed, strict=True)):
        if isinstance(value, str):
            spellings[value].add(compact(str(cell)))
    return sorted(value for value, written in spellings.items() if len(written) > 1)
