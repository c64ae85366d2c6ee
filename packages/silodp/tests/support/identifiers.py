"""A second reading of identifiers, written from the specification's text and not from the code.

It works on one cell at a time, with loops over characters and no regular expressions, and is slow.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

REFUSED = "refused"

EMPTY = ("", "nan", "na", "n/a", "none", "null", "<na>")


def is_invisible(character: str) -> bool:
    return character.isspace() or unicodedata.category(character) in ("Cf", "Zs", "Zl", "Zp")


def is_number(text: str) -> bool:
    """Whether a text is a number as floating-point columns and spreadsheets write them: with a point or an exponent."""
    mantissa, sign, exponent = text.lower().partition("e")
    mantissa = mantissa.lstrip("+-") if text[:1] in ("+", "-") else mantissa
    whole, point, rest = mantissa.replace(",", ".").partition(".")
    digits = all(part == "" or part.isdigit() for part in (whole, rest)) and whole + rest != ""
    if not digits:
        return False
    signed = exponent[:1] in ("+", "-") and exponent[1:].isdigit()
    if sign:
        return signed or (point != "" and exponent.isdigit())
    return point != ""


def fits(text: str, layout: str) -> bool:
    if len(text) != len(layout):
        return False
    for found, wanted in zip(text, layout, strict=True):
        is_letter, is_digit = found in "abcdefghijklmnopqrstuvwxyz", found in "0123456789"
        letter = is_letter or found.lower() in "abcdefghijklmnopqrstuvwxyz"
        if wanted == "#" and not is_digit:
            return False
        if wanted == "@" and not letter:
            return False
        if wanted == "*" and not (letter or is_digit):
            return False
        if wanted not in "#@*" and found != wanted:
            return False
    return True


def passes(check: str | None, value: str) -> bool:
    if check is None:
        return True
    if check == "iban":
        return value[:2].isalpha() and 15 <= len(value) <= 34 and passes("mod97", value[4:] + value[:4])
    if check == "mod97":
        number, pair = (
            "".join(c if c.isdigit() else str(ord(c) - ord("a") + 10) for c in value[:-2]),
            value[-2:],
        )
        return number != "" and pair == f"{98 - 100 * int(number) % 97:02}"
    digits = [int(c) for c in value][::-1]
    if check == "mod11":
        return sum((place + 1) * digit for place, digit in enumerate(digits)) % 11 == 0
    total = 0
    for place, digit in enumerate(digits):
        for figure in str(digit * 2 if place % 2 else digit):
            total += int(figure)
    return total % 10 == 0


def read_identifier(
    cell: str,
    *,
    kind: str,
    width: int,
    layouts: Sequence[str] = (),
    check: str | None = None,
    placeholders: Sequence[str] = (),
    lost_zeros: int | None = None,
) -> str | None:
    """Return the identifier (digits or code), None for an empty cell or a placeholder, `REFUSED` otherwise."""
    for c in cell:
        plain = unicodedata.normalize("NFKC", c)
        same = unicodedata.east_asian_width(c) in ("F", "H") or "MATHEMATICAL" in unicodedata.name(c, "")
        same = same or unicodedata.decomposition(c)[:1] != "<"
        if plain != c and not same and any(each.isalnum() for each in plain):
            return REFUSED
    text = unicodedata.normalize("NFKC", cell)
    while text and is_invisible(text[0]):
        text = text[1:]
    while text and is_invisible(text[-1]):
        text = text[:-1]
    text = "".join(str(unicodedata.decimal(c)) if unicodedata.category(c) == "Nd" else c for c in text)
    if text.lower() in EMPTY or text.lower() in [each.lower() for each in placeholders]:
        return None
    if is_number(text):
        return REFUSED
    plain = [layout for layout in layouts if fits(text, layout)]
    bare = ["".join(c for c in layout if c in "#@*") for layout in layouts]
    is_bare = any(fits(text, layout) for layout in bare) or (not layouts and fits(text, "*" * width))
    if kind == "digits":
        is_bare = 0 < len(text) <= width and fits(text, "#" * len(text))
        lost = 0 if set(text) == {"0"} else width - len(text)
        is_bare = is_bare and (lost_zeros is None or lost <= lost_zeros)
    if not plain and not is_bare:
        return REFUSED
    value = "".join(c for c in text if c.isalnum())
    value = "0" * (width - len(value)) + value if kind == "digits" else value.lower()
    if value in [each.lower() for each in placeholders]:
        return None
    return value if passes(check, value) else REFUSED
