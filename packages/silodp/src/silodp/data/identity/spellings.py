"""How one cell becomes an identifier, or is refused: characters, layouts and check digits.

A spelling is accepted only if it can mean one identifier. What is not recognized is refused and never repaired: if all
separators were deleted, "123456789.0" would become "1234567890", which is another person.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MISSING = frozenset({"", "nan", "na", "n/a", "none", "null", "<na>"})
"""Texts that stand for no value in a table, in lower case."""

_NO_KEYS = {"\\N", "#N/A", "(null)", "(NULL)", "<null>", "<NULL>", "NaT"}
"""More texts that databases and programs write where there is no identifier."""

Kind = Literal["digits", "code", "pseudonym"]

MAX_LENGTH = 128
"""Characters of an identifier, at most."""

_MAX_CELL = 1000
_PLACES = {"#": "[0-9]", "@": "[A-Za-z]", "*": "[0-9A-Za-z]"}
_PSEUDONYM = "[0-9A-Za-z._:=+/-]"
# As text of a number: with a decimal point or comma, or with a sign in the exponent. No identifier is read from these.
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]+[.,][0-9]*|[.,][0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?[0-9]+[eE][+-][0-9]+|[+-]?inf(?:inity)?",
    re.IGNORECASE,
)
# Some programs write 1E8 without a sign, which is a regular code as well.
_MAYBE_NUMBER = re.compile(r"[0-9]+[eE][0-9]+")
_NOT_KEPT = re.compile(r"[^0-9A-Za-z]")
_OTHER_SHAPES = {0xFF01 + place: 0x21 + place for place in range(94)}  # full-width forms of ASCII
_SAME_CHARACTER = ("<wide>", "<narrow>", "<font>")
"""Compatibility forms that are only another shape of a letter or digit."""


class Refusal(Enum):
    """Why a cell holds no identifier."""

    MISSING = "missing"
    PLACEHOLDER = "placeholder"
    NUMBER = "number"
    CHARACTER = "character"
    LAYOUT = "layout"
    SHORT = "short"
    CHECK_DIGIT = "check_digit"

    @property
    def stands_for_none(self) -> bool:
        """Whether the cell says that there is no identifier, so that the profile's `missing` decides."""
        return self in (Refusal.MISSING, Refusal.PLACEHOLDER)


REASONS: Mapping[Refusal, str] = {
    Refusal.MISSING: "is empty",
    Refusal.PLACEHOLDER: "holds a placeholder",
    Refusal.NUMBER: "holds a number with a decimal point or an exponent",
    Refusal.CHARACTER: "holds a raised, circled or otherwise combined digit or letter",
    Refusal.LAYOUT: "fits no layout of the profile",
    Refusal.SHORT: "lacks more digits than zeros may be lost",
    Refusal.CHECK_DIGIT: "has a wrong check digit",
}
REMEDIES: Mapping[Refusal, str] = {
    Refusal.MISSING: "fill it in, or set missing = 'drop' in the profile",
    Refusal.PLACEHOLDER: "give the row its identifier, or set missing = 'drop' in the profile",
    Refusal.NUMBER: "export the column as text",
    Refusal.CHARACTER: "write plain digits and letters",
    Refusal.LAYOUT: "correct the cell, or agree with all silos on a profile that has its layout",
    Refusal.SHORT: "write all digits, or, if programs have dropped zeros and no century, agree with all silos on a "
    "profile with larger lost_zeros",
    Refusal.CHECK_DIGIT: "correct the cell",
}


# --- characters ---------------------------------------------------------------------------------------------------


def clean_text(cell: str) -> str | None:
    """Return the text in NFKC with ASCII digits, without white space and invisible characters at its ends.

    Returns:
        None where NFKC would put letters or digits in the place of one character that is more than another shape of
        them: "123²" must not become "1232".
    """
    if cell.isascii():
        return cell.strip()
    shown = cell.translate(_OTHER_SHAPES)
    if shown.isascii():  # NFKC would give the same, more slowly
        return shown.strip()
    if any(map(_is_combined, cell)):
        return None
    text = unicodedata.normalize("NFKC", cell)
    begin, end = 0, len(text)
    while begin < end and _is_invisible(text[begin]):
        begin += 1
    while begin < end and _is_invisible(text[end - 1]):
        end -= 1
    return "".join(map(to_ascii_digit, text[begin:end]))


@cache
def _is_combined(character: str) -> bool:
    form = unicodedata.decomposition(character)
    if not form.startswith("<") or form.startswith(_SAME_CHARACTER):
        return False
    return any(c.isalnum() for c in unicodedata.normalize("NFKC", character))


@cache
def _is_invisible(character: str) -> bool:
    """Return whether a character is white space or of zero width (Unicode's category Cf, the byte order mark too)."""
    return character.isspace() or unicodedata.category(character) in ("Cf", "Zs", "Zl", "Zp")


@cache
def to_ascii_digit(character: str) -> str:
    """Return the ASCII form of a decimal digit of any script, and other characters as they are."""
    digit = unicodedata.decimal(character, None)
    return character if digit is None else str(digit)


def compact(cell: str) -> str:
    """Return only the letters and digits of a cell: spellings that differ here differ in case or leading zeros."""
    return _NOT_KEPT.sub("", clean_text(cell) or "")


# --- layouts ------------------------------------------------------------------------------------------------------


def find_layout_fault(layout: str) -> str | None:
    """Return what is wrong with a layout, as a clause that follows its name; None for a regular one."""
    if not 0 < len(layout) <= MAX_LENGTH or not any(c in _PLACES for c in layout):
        return f"has no place for a character, or more than {MAX_LENGTH} characters"
    if unicodedata.normalize("NFKC", layout) != layout or layout.strip() != layout:
        return "begins or ends with white space, or is not in Unicode's form NFKC"
    for c in layout:
        if c not in _PLACES and not (unicodedata.category(c)[0] == "P" or c == " "):
            # Separators are dropped. A letter or digit among them would be part of an identifier and then lost, and a
            # sign such as + tells persons apart: in Sweden and Finland it stands for a century.
            return (
                f"has {c!r} between its places, where only spaces and punctuation may stand, which are dropped (where "
                "a sign counts, take numbers with the full year, or kind 'pseudonym', which keeps all characters)"
            )
    if _NUMBER.fullmatch(re.sub(r"[#*]", "1", layout)):
        return "is that of a number with decimals"
    return None


def count_places(layout: str) -> int:
    """Return the number of letters and digits that a layout has places for."""
    return sum(c in _PLACES for c in layout)


def has_letters(layout: str) -> bool:
    """Return whether a layout has a place for a letter."""
    return "@" in layout or "*" in layout


def compile_layouts(kind: Kind, width: int | None, layouts: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of all accepted spellings but plain numbers: each layout, with and without separators."""
    accepted = set()
    for layout in layouts:
        # Each layout is accepted with its own separators, or with none; a mixture may be another identifier.
        accepted.add("".join(_PLACES.get(c) or re.escape(c) for c in layout))
        accepted.add("".join(_PLACES[c] for c in layout if c in _PLACES))
    if kind != "digits" and not layouts:
        characters = _PLACES["*"] if kind == "code" else _PSEUDONYM
        accepted.add(f"{characters}{{{width or f'1,{MAX_LENGTH}'}}}")
    # Sorted: the order of a set differs from process to process.
    return re.compile("|".join(sorted(accepted)))


def names_no_person(text: str) -> bool:
    """Return whether a text stands for no identifier: rows with it must not become one person."""
    return text.lower() in MISSING or text in _NO_KEYS or not any(map(str.isalnum, text))


def count_lost(text: str, width: int) -> int:
    """Return how many digits a text of digits lacks; 0 for zeros alone, which stand for no person."""
    lost = width - len(text)
    return lost if text.strip("0") else min(lost, 0)


def read_text(
    text: str,
    kind: Kind,
    width: int | None,
    layouts: tuple[str, ...],
    pattern: re.Pattern[str],
    lost_zeros: int | None,
) -> str | Refusal:
    """Return the identifier that a cleaned text spells, not yet checked for check digits and placeholders."""
    if kind == "digits" and text.isdecimal():  # most cells; no decimal digits but ASCII are left in the text
        lost = count_lost(text, width or 0)
        if lost_zeros is not None and lost > lost_zeros:
            return Refusal.SHORT
        return text.zfill(width or 0) if lost >= 0 else Refusal.LAYOUT
    if text.lower() in MISSING:
        return Refusal.MISSING
    if _NUMBER.fullmatch(text) or (width is None and not layouts and _MAYBE_NUMBER.fullmatch(text)):
        return Refusal.NUMBER
    # Long cells are refused before a pattern meets them, so that no cell can take much time.
    if len(text) > _MAX_CELL or not pattern.fullmatch(text):
        return Refusal.LAYOUT
    if kind == "pseudonym" and not layouts:
        return Refusal.LAYOUT if names_no_person(text) else text  # its punctuation is part of it
    value = _NOT_KEPT.sub("", text)
    if kind == "digits":
        return value.zfill(width or 0)
    return value.casefold() if kind == "code" else value


# --- check digits -------------------------------------------------------------------------------------------------

Digits = NDArray[np.int64]  # (n, length) values 0..35 of the characters 0-9 and a-z


def check_mod11(digits: Digits) -> NDArray[np.bool_]:
    """Return where Σ (place from the right)·digit is divisible by 11, as in NHS numbers.

    A number whose check digit would be 10 is not issued. Beyond ten places one of them would count 11 times, and not be
    checked at all, so profiles have no longer numbers with this rule.
    """
    return np.asarray((digits * np.arange(digits.shape[1], 0, -1)).sum(axis=1) % 11 == 0)


def check_luhn(digits: Digits) -> NDArray[np.bool_]:
    """Return where the digits pass Luhn's test: every second one from the right doubled (ISO/IEC 7812-1)."""
    doubled = digits * np.where(np.arange(digits.shape[1], 0, -1) % 2 == 0, 2, 1)
    # The sum of the digits of 10 to 18 is the number minus 9.
    return np.asarray((doubled - 9 * (doubled > 9)).sum(axis=1) % 10 == 0)


def check_mod97(digits: Digits) -> NDArray[np.bool_]:
    """Return where the number is 1 modulo 97 and its last two places are check digits (ISO 7064, MOD 97-10).

    Letters stand for 10 (a) to 35 (z). The rule makes check digits from 02 to 98; 00, 01 and 99, which leave the same
    remainder as 97, 98 and 02, are no others for the same number.
    """
    if digits.shape[1] < 3:
        return np.zeros(len(digits), dtype=bool)
    rest = np.zeros(len(digits), dtype=np.int64)
    # Place by place, as a number of 128 digits does not fit into 64 bits. A letter takes two decimal places.
    for column in digits.T:
        rest = (rest * np.where(column > 9, 100, 10) + column) % 97
    tens, ones = digits[:, -2], digits[:, -1]
    pair = 10 * tens + ones
    return np.asarray((rest == 1) & (tens < 10) & (ones < 10) & (pair >= 2) & (pair <= 98))


def check_iban(digits: Digits) -> NDArray[np.bool_]:
    """Return where two letters of a country and two check digits, moved to the end, pass MOD 97-10 (ISO 13616).

    The length and the form of the rest differ by country, and are not checked.
    """
    if not 15 <= digits.shape[1] <= 34:
        return np.zeros(len(digits), dtype=bool)
    return check_mod97(np.roll(digits, -4, axis=1)) & (digits[:, :2] > 9).all(axis=1)


CHECKS: Mapping[str, Callable[[Digits], NDArray[np.bool_]]] = {
    "mod11": check_mod11,
    "luhn": check_luhn,
    "mod97": check_mod97,
    "iban": check_iban,
}
"""By the name that a profile uses."""


def find_wrong_checks(check: str, values: Iterable[str]) -> set[str]:
    """Return the values whose check digit is wrong; they have ASCII digits and lower-case letters only."""
    by_length: dict[int, list[str]] = {}
    for value in values:
        by_length.setdefault(len(value), []).append(value)
    wrong = set[str]()
    for length, group in by_length.items():
        # All values of one length at once: a check digit at a time would take seconds for a million rows.
        codes = np.frombuffer("".join(group).encode(), dtype=np.uint8).astype(np.int64).reshape(-1, length)
        digits = codes - np.where(codes > ord("9"), ord("a") - 10, ord("0"))
        wrong.update(group[i] for i in np.flatnonzero(~CHECKS[check](digits)))
    return wrong
