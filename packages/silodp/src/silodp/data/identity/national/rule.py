"""What a rule for a national number is, and how a column of cells is read by one, in numpy and never cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from silodp.data.identity.spellings import (
    Check,
    Codes,
    Columns,
    Mask,
    Refusal,
    list_separators,
    match_layouts,
    spell_columns,
)

_DAYS = np.array([0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])


_DIGITS, _LETTERS = "0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CAPITALS = np.array([ord(chr(code).upper()) if code < 128 else code for code in range(256)], dtype=np.uint8)
_VALUES = np.array(
    [int(chr(c), 36) if chr(c) in _DIGITS + _LETTERS else -c for c in range(256)], dtype=np.int32
)
"""0 to 35 for a digit or letter; minus its code for a sign."""


@dataclass(frozen=True, kw_only=True)
class NumberRule:
    """How a number of one country is written, checked, and made one canonical text.

    Attributes:
        country: ISO 3166 code in capitals; "" where the number itself names its country.
        number: the name by which profiles choose it.
        title: its official name, and where several kinds are accepted, these.
        layouts: accepted spellings: "#" a digit, "@" a letter, "*" either, "~" one of `signs`. Everything else stands
            for itself, and has no meaning.
        unclear: spellings that lack what names the person, so that `expand` refuses them with its reason.
        signs: the separators that are part of the number, because they name a century.
        check: where the check digits are right; None: the number has none that all its holders have.
        is_issued: where the day of birth and prefix are such as the number has.
        is_local: where the number is one that a single institution gives, which another may give to somebody else.
        canonical: the layouts of canonical identifiers; empty: those of `layouts` that have no separators.
        expand: makes the canonical places of other spellings, given `IdentityProfile.reference_year`; and says where
            the century is not known.
        needs_year: whether some spellings say the century only if the year is known in which they were written.
        lost_zeros: whether leading zeros may be put back: for digits of one length only.
        note: what else a reader must know, for the documentation.
        source: who publishes the rule.
        examples: fictitious or published spellings, from which agreement codes follow: at most seven, of which some are
            refused.
    """

    country: str
    number: str
    title: str
    layouts: tuple[str, ...]
    unclear: tuple[str, ...] = ()
    signs: str = ""
    canonical: tuple[str, ...] = ()
    check: Check | None = None
    is_issued: Callable[[Columns], Mask] | None = None
    is_local: Callable[[Columns], Mask] | None = None
    expand: Callable[[Codes, int | None], tuple[Codes, Mask]] | None = None
    needs_year: bool = False
    lost_zeros: bool = False
    note: str = ""
    source: str
    examples: tuple[str, ...] = field(repr=False)

    @property
    def name(self) -> str:
        """Country and number, for example "SE personnummer"."""
        return f"{self.country} {self.number}".strip()

    @property
    def prefix(self) -> str:
        """The text before the number in canonical identifiers.

        The country is part of an identifier, because the same digits are two persons in two countries: a Danish
        number of ten digits may pass as a British one.
        """
        return f"{self.country}:" if self.country else ""

    @cached_property
    def _accepted(self) -> tuple[str, ...]:
        """The layouts, and those of canonical identifiers."""
        plain = self.canonical or [layout for layout in self.layouts if not list_separators(layout)]
        return tuple(
            dict.fromkeys([*self.layouts, *self.unclear, *(self.prefix + layout for layout in plain)])
        )

    def read(
        self, texts: Sequence[str], reference_year: int | None = None, lost_zeros: int = 0
    ) -> list[str | Refusal]:
        """Return the canonical identifier of each text, or why it holds none; a text that fits no layout: LAYOUT.

        Args:
            texts: cells in plain ASCII characters; others fit no layout.
            reference_year: the year in which all tables were written.
            lost_zeros: the most leading zeros that are put back.
        """
        found = np.full(len(texts), Refusal.LAYOUT, dtype=object)
        for rows, codes in match_layouts(texts, self._accepted, self.signs, lost_zeros):
            found[rows] = self._judge(_CAPITALS[codes], reference_year)
        return cast("list[str | Refusal]", found.tolist())

    def _judge(self, codes: Codes, reference_year: int | None) -> NDArray[np.object_]:
        """Return (n,) the canonical identifiers of spellings that fit a layout, or their refusals."""
        signs = np.isin(codes, [ord(sign) for sign in self.signs]) if self.signs else False
        refused = [(Refusal.PLACEHOLDER, ((codes == codes[0]) | signs).all(axis=0))]
        if self.expand is not None:
            codes, unknown = self.expand(codes, reference_year)
            refused.append((Refusal.CENTURY, unknown))
        values = _VALUES[codes]
        if self.is_local is not None:
            refused.append((Refusal.LOCAL, self.is_local(values)))
        if self.check is not None:
            refused.append((Refusal.CHECK_DIGIT, ~self.check(values)))
        if self.is_issued is not None:
            refused.append((Refusal.NOT_ISSUED, ~self.is_issued(values)))
        prefix = np.frombuffer(self.prefix.encode(), dtype=np.uint8)
        whole = np.concatenate([np.broadcast_to(prefix[:, None], (len(prefix), codes.shape[1])), codes])
        answers = spell_columns(whole)
        for refusal, rows in reversed(refused):  # the first reason is the one that is named
            answers[rows] = refusal
        return answers


# --- parts that rules share ---------------------------------------------------------------------------------------


def read_pair(columns: Columns, place: int) -> NDArray[np.int32]:
    """Return (n,) the number of two digits that begins at a place."""
    return np.asarray(10 * columns[place] + columns[place + 1])


def read_number(columns: Columns) -> NDArray[np.int64]:
    """Return (n,) the number that the places spell."""
    total = np.zeros(columns.shape[1], dtype=np.int64)
    for column in columns:
        total = 10 * total + column
    return total


def is_date(year: NDArray[np.int32] | int, month: NDArray[np.int32], day: NDArray[np.int32]) -> Mask:
    """Return where there is such a day; for a year of two digits without its century, 2000 is added by the caller."""
    is_month = (month >= 1) & (month <= 12)
    days = _DAYS[np.where(is_month, month, 0)]
    year = np.asarray(year)
    is_short = (month == 2) & ((year % 4 != 0) | ((year % 100 == 0) & (year % 400 != 0)))
    return np.asarray(is_month & (day >= 1) & (day <= days - is_short))


def all_of(*checks: Check) -> Check:
    """Return the rule that holds where all of some rules do."""

    def check(columns: Columns) -> Mask:
        return np.asarray(np.logical_and.reduce([one(columns) for one in checks]))

    return check


def check_places(places: Sequence[int], rule: Check) -> Check:
    """Return a rule that looks at some of the places only, in this order."""

    def check(columns: Columns) -> Mask:
        return rule(columns[list(places)])

    return check
