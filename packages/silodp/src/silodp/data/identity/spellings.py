"""How one cell becomes an identifier, or is refused: characters, layouts and check digits.

A spelling is accepted only if it can mean one identifier. What is not recognized is refused and never repaired: if all
separators were deleted, "123456789.0" would become "1234567890", which is another person.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from math import gcd
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MISSING = frozenset({"", "nan", "na", "n/a", "none", "null", "<na>"})
"""Texts that stand for no value in a table, in lower case."""

_NO_KEYS = {"\\N", "#N/A", "(null)", "(NULL)", "<null>", "<NULL>", "NaT"}
"""More texts that databases and programs write where there is no identifier."""

Kind = Literal["digits", "code", "pseudonym", "national"]

MAX_LENGTH = 128
"""Characters of an identifier, at most."""

_MAX_CELL = 1000
_MAX_WEIGHT = 1_000_000
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
    CENTURY = "century"
    LOCAL = "local"
    NOT_ISSUED = "not_issued"

    @property
    def stands_for_none(self) -> bool:
        """Whether the cell says that there is no identifier, so that the profile's `missing` decides."""
        return self in (Refusal.MISSING, Refusal.PLACEHOLDER, Refusal.LOCAL)


REASONS: Mapping[Refusal, str] = {
    Refusal.MISSING: "is empty",
    Refusal.PLACEHOLDER: "holds a placeholder",
    Refusal.NUMBER: "holds a number with a decimal point or an exponent",
    Refusal.CHARACTER: "holds a raised, circled or otherwise combined digit or letter",
    Refusal.LAYOUT: "fits no layout of the profile",
    Refusal.SHORT: "lacks more digits than zeros may be lost",
    Refusal.CHECK_DIGIT: "has a wrong check digit",
    Refusal.CENTURY: "does not say the century of birth",
    Refusal.LOCAL: "holds a temporary number, which another institution may give to somebody else",
    Refusal.NOT_ISSUED: "has a day of birth or a prefix that such numbers do not have",
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
    Refusal.CENTURY: "write the full year of birth, or the sign of the century and agree with all silos on a profile "
    "with reference_year",
    Refusal.LOCAL: "write the national number, or set missing = 'drop' in the profile",
    Refusal.NOT_ISSUED: "correct the cell",
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


def can_spell_number(layout: str) -> bool:
    """Return whether a text in a layout may be a number with an exponent, as 1e-05 in "#@-##"."""
    text = layout.replace("#", "1")
    # The only letter of such a number is e.
    found = [text.replace("*", "1").replace("@", "e")]
    found += [
        f"{text[:place]}e{text[place + 1 :]}".replace("*", "1") for place, c in enumerate(text) if c == "*"
    ]
    return any(map(_NUMBER.fullmatch, found))


def list_separators(layout: str) -> set[str]:
    """Return the characters of a layout that are no places."""
    return set(layout) - _PLACES.keys() - {SIGN}


def drop_separators(layout: str) -> str:
    """Return the places of a layout."""
    return "".join(c for c in layout if c in _PLACES)


def has_letters(layout: str) -> bool:
    """Return whether a layout has a place for a letter."""
    return "@" in layout or "*" in layout


def compile_layouts(kind: Kind, width: int | None, layouts: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of all accepted spellings but plain numbers: each layout, with and without separators."""
    accepted = set()
    for layout in layouts:
        # Each layout is accepted with its own separators, or with none; a mixture may be another identifier.
        accepted.add("".join(_PLACES.get(c) or re.escape(c) for c in layout))
        accepted.add("".join(_PLACES[c] for c in drop_separators(layout)))
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


def clean_number(cell: object) -> tuple[Refusal, str]:
    """Return why a cell fits no layout as it stands, and its text in plain characters; LAYOUT if that may fit one."""
    if not isinstance(cell, str):
        return Refusal.NUMBER, ""
    text = clean_text(cell)
    if text is None:
        return Refusal.CHARACTER, ""
    if text.lower() in MISSING:
        return Refusal.MISSING, ""
    return (Refusal.NUMBER, "") if _NUMBER.fullmatch(text) else (Refusal.LAYOUT, text)


# --- columns of cells ---------------------------------------------------------------------------------------------

Codes = NDArray[np.uint8]
"""(length, n) ASCII codes of the characters of n cells, each place in one stretch of memory."""
Mask = NDArray[np.bool_]

SIGN = "~"
"""Stands in a layout of a national number for a separator that has a meaning."""


@cache
def _list_codes(characters: str) -> Mask:
    """Return (256,) bool: which codes are one of some characters, in upper or lower case."""
    return np.isin(np.arange(256), [ord(c) for c in characters.lower() + characters.upper()])


_CODES = {
    place: _list_codes("".join(c for c in map(chr, range(128)) if re.fullmatch(pattern, c)))
    for place, pattern in _PLACES.items()
}


LOWER_CASE = np.array([ord(chr(code).lower()) if code < 128 else code for code in range(256)], dtype=np.uint8)
"""Code → code of the same letter in lower case."""


def match_layouts(
    texts: Sequence[str], layouts: Iterable[str], signs: str = "", lost_zeros: int = 0
) -> Iterator[tuple[NDArray[np.int64], Codes]]:
    """Yield which of some texts fit a layout, and the characters in its places, for each layout that any text fits.

    Args:
        texts: the cells of a column.
        layouts: layouts of which no two fit one text; the first is of digits where zeros may be lost.
        signs: the characters that `SIGN` stands for.
        lost_zeros: the most zeros that a text of digits may lack, which are put back.
    """
    layouts = list(layouts)
    by_length: dict[int, list[str]] = {}
    for layout in layouts:
        by_length.setdefault(len(layout), []).append(layout)
    width = count_places(layouts[0])
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    for length in np.unique(lengths).tolist():
        lost = width - length if 0 < width - length <= lost_zeros else 0
        fitting = ["#" * length] if lost and length else by_length.get(length, [])
        if not fitting:
            continue
        rows = np.flatnonzero(lengths == length)
        group = texts if len(rows) == len(texts) else [texts[row] for row in rows.tolist()]
        # A character that is not ASCII becomes "?", which is in no place.
        flat = np.frombuffer("".join(group).encode("ascii", "replace"), dtype=np.uint8)
        codes = np.ascontiguousarray(flat.reshape(-1, length).T)
        for layout in fitting:
            fits = np.ones(len(rows), dtype=bool)
            for column, place in zip(codes, layout, strict=True):
                allowed = _list_codes(signs) if place == SIGN else _CODES.get(place)
                fits &= column == ord(place) if allowed is None else allowed[column]
            if fits.any():
                places = [index for index, place in enumerate(layout) if place in _CODES or place == SIGN]
                taken = codes[places] if fits.all() else codes[places][:, fits]
                zeros = np.full((lost, taken.shape[1]), ord("0"), dtype=np.uint8)
                yield rows[fits], np.concatenate([zeros, taken])


def spell_columns(codes: Codes) -> NDArray[np.object_]:
    """Return (n,) the texts of n columns of characters."""
    texts = np.ascontiguousarray(codes.T).view(f"S{len(codes)}").ravel().astype(f"U{len(codes)}")
    return texts.astype(object)


# --- check digits -------------------------------------------------------------------------------------------------

Columns = NDArray[np.int32]
"""(length, n) values 0 to 35 of the characters 0-9 and a-z of n identifiers, each place in one stretch of memory."""
Check = Callable[[Columns], Mask]

_NONE = "_"
"""Stands for a remainder without a check digit, and for a value without a letter."""
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


def sum_weighted(columns: Columns, weights: Sequence[int]) -> NDArray[np.int64]:
    """Return (n,) Σ weight · value over the first places, as many as there are weights."""
    total = np.zeros(columns.shape[1], dtype=np.int64)
    for column, weight in zip(columns, weights, strict=False):
        total += column * np.int64(weight)
    return total


def check_mod11(columns: Columns) -> Mask:
    """Return where Σ (place from the right)·digit is divisible by 11, as in NHS numbers.

    A number whose check digit would be 10 is not issued. Beyond ten places one of them would count 11 times, and not be
    checked at all, so profiles have no longer numbers with this rule.
    """
    return np.asarray(sum_weighted(columns, range(len(columns), 0, -1)) % 11 == 0)


def check_luhn(columns: Columns) -> Mask:
    """Return where the digits pass Luhn's test: every second one from the right doubled (ISO/IEC 7812-1)."""
    total = np.zeros(columns.shape[1], dtype=np.int64)
    for place, column in enumerate(columns[::-1]):
        # The sum of the digits of 10 to 18 is the number minus 9.
        total += 2 * column - 9 * (column > 4) if place % 2 else column
    return np.asarray(total % 10 == 0)


def check_mod97(columns: Columns) -> Mask:
    """Return where the number is 1 modulo 97 and its last two places are check digits (ISO 7064, MOD 97-10).

    Letters stand for 10 (a) to 35 (z). The rule makes check digits from 02 to 98; 00, 01 and 99, which leave the same
    remainder as 97, 98 and 02, are no others for the same number.
    """
    if len(columns) < 3:
        return np.zeros(columns.shape[1], dtype=bool)
    rest = np.zeros(columns.shape[1], dtype=np.int64)
    # Place by place, as a number of 128 digits does not fit into 64 bits. A letter takes two decimal places.
    for column in columns:
        rest = (rest * np.where(column > 9, 100, 10) + column) % 97
    tens, ones = columns[-2], columns[-1]
    pair = 10 * tens + ones
    return np.asarray((rest == 1) & (tens < 10) & (ones < 10) & (pair >= 2) & (pair <= 98))


def check_iban(columns: Columns) -> Mask:
    """Return where two letters of a country and two check digits, moved to the end, pass MOD 97-10 (ISO 13616).

    The length and the form of the rest differ by country, and are not checked.
    """
    if not 15 <= len(columns) <= 34:
        return np.zeros(columns.shape[1], dtype=bool)
    return check_mod97(np.roll(columns, -4, axis=0)) & (columns[:2] > 9).all(axis=0)


CHECKS: Mapping[str, Check] = {
    "mod11": check_mod11,
    "luhn": check_luhn,
    "mod97": check_mod97,
    "iban": check_iban,
}
"""By the name that a profile uses."""


def make_weight_check(weights: Sequence[int], modulus: int, remainders: str = "", letters: str = "") -> Check:
    """Return the rule "weighted sum modulo `modulus`".

    Args:
        weights: one for each place but the check digit; with no `remainders`, one for each place.
        modulus: the modulus.
        remainders: the check digit of each remainder from 0 on, "_" where no number is issued; empty: the sum of all
            places is divisible by the modulus.
        letters: the character of each value from 0 on, "_" where there is none, for letters that do not stand for 10
            (a) to 35 (z); a letter that is not listed is refused.
    """
    values = np.arange(36, dtype=np.int32)
    if letters:
        found = {character: value for value, character in enumerate(letters.lower()) if character != _NONE}
        values[10:] = [found.get(letter, -1) for letter in _ALPHABET[10:]]
    wanted = np.array([_ALPHABET.find(character) for character in remainders.lower()], dtype=np.int32)

    def check(columns: Columns) -> Mask:
        meant = values[columns]
        # The check digit itself is compared as it is written.
        is_known = (meant[: -1 if remainders else None] >= 0).all(axis=0)
        total = sum_weighted(meant, weights) % modulus
        return np.asarray(is_known & ((columns[-1] == wanted[total]) if remainders else (total == 0)))

    return check


def find_weight_fault(
    kind: Kind, width: int | None, weights: Sequence[int], modulus: int, remainders: str, letters: str
) -> tuple[str, str] | None:
    """Return the setting at fault and what to do, where some weights and a remainder table are no rule."""
    places = (width or 0) - bool(remainders)
    if width is None or len(weights) != places:
        wanted = (
            "one for each place" if not remainders else "one for each place but the last, the check digit"
        )
        return "weights", f"give {wanted} of the width"
    if not all(0 <= weight <= _MAX_WEIGHT for weight in weights):
        return "weights", f"give whole numbers from 0 to {_MAX_WEIGHT:,}"
    if remainders and (len(remainders) != modulus or not set(remainders.lower()) <= {*_ALPHABET, _NONE}):
        return (
            "remainders",
            "give one letter or digit for each remainder from 0 on, '_' where no number is issued",
        )
    # Otherwise one number had several check digits, and would be several persons.
    if not remainders and (kind != "digits" or modulus < 10 or gcd(weights[-1], modulus) > 1):
        return (
            "modulus",
            "give the check digit of each remainder (remainders), as these weights leave several open",
        )
    named = letters.lower().replace(_NONE, "")
    if letters and (not named.isalpha() or not named.isascii() or len(set(named)) < len(named)):
        return (
            "letters",
            "give each letter of A to Z once, in the order of their values, '_' for values without one",
        )
    if letters and kind != "code":
        return "letters", "leave it out: only codes have letters"
    return None


def find_wrong_checks(check: Check, values: Iterable[str]) -> set[str]:
    """Return the values whose check digit is wrong; they have ASCII digits and lower-case letters only."""
    by_length: dict[int, list[str]] = {}
    for value in values:
        by_length.setdefault(len(value), []).append(value)
    wrong = set[str]()
    for length, group in by_length.items():
        # All values of one length at once: a check digit at a time would take seconds for a million rows.
        codes = np.frombuffer("".join(group).encode(), dtype=np.uint8).reshape(-1, length).T.astype(np.int32)
        columns = codes - np.where(codes > ord("9"), ord("a") - 10, ord("0")).astype(np.int32)
        wrong.update(group[i] for i in np.flatnonzero(~check(columns)))
    return wrong
