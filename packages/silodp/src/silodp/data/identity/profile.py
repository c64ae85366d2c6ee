"""The identity profile: the public agreement on what identifies a person, and how its spellings are read.

All silos use the same file, `identity.toml`. A profile holds no identifiers. Every silo reads its own column by it, so
that a person has the same text everywhere whatever program exported the table.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property, partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tomli_w

from silodp._lazy import LazyModule
from silodp.data.identity import spellings
from silodp.errors import SilodpError
from silodp.parsing import parse_toml
from silodp.settings import Count, Settings, Whole, check_path
from silodp.text import first_line, shorten, suggest_name

if TYPE_CHECKING:
    from silodp.data.identity import national
else:  # most profiles need none of its rules
    national = LazyModule("silodp.data.identity.national")

FORMAT = 1
"""Version of identity.toml, and of the settings that its digest covers."""

_MAX_BYTES = 1 << 20
_MAX_LISTED = 50
"""The most layouts, and the most placeholders, of a profile."""
_MAX_NOTE = 200
"""The most characters of `IdentityProfile.overlap_note`."""
_LATER = (
    "lost_zeros", "separators", "weights", "modulus", "remainders", "letters", "country", "number", "reference_year"
)  # fmt: skip
_SAID_BY_RULE = (
    "width", "layouts", "separators", "check", "weights", "modulus", "remainders", "letters"
)  # fmt: skip
"""Settings that the rule of a national number says itself."""
_STUDY = re.compile(r"[\w-][\w.-]{0,99}")
_SPELLINGS = 10
_FEW_CELLS = 64
"""So few cells are read sooner one by one."""
_MOD11_DIGITS = 10
_HEADER = (
    "# Who is the same person: an identity profile of silodp. It is public and holds no identifiers.\n"
    "# Every silo uses the same file, and compares its agreement code: silodp identity check.\n"
)

_LETTERS = str.maketrans("0123456789abcdef", "abcdefghjkmnpqrs")
"""Letters for hexadecimal digits, without those that look like a digit."""


@dataclass(frozen=True, kw_only=True)
class IdentityProfile(Settings, error_code="identity.profile"):
    """What identifies a person in all silos, and which spellings of it are accepted. All of it is public.

    A cell is read in this order: Unicode's form NFKC; no white space and no invisible characters at the ends; digits of
    every script as 0-9; one of the accepted spellings; lower case for "code", leading zeros for "digits"; check digit;
    placeholders. Every other cell is refused. A national number is read by its rule (`silodp.data.identity.national`),
    and its identifier begins with the country.

    Attributes:
        study: the name of the study that the profile was made for, for example "heart-2026".
        kind: "digits" (a number of `width` digits, shorter ones have lost leading zeros), "code" (letters and digits,
            upper and lower case alike), "pseudonym" (compared exactly, as a trust center issued it) or "national" (by
            the rule that `country` and `number` name, which says everything else).
        width: number of letters and digits of an identifier. It may be left out for a code that has layouts, and for
            pseudonyms.
        layouts: spellings with separators that are accepted besides plain ones: "#" is a digit, "@" a letter, "*" one
            of both, and everything else stands for itself, for example "###-###-####".
        separators: the characters between places that have no meaning, for example "- ". Layouts with different
            separators need it: where a sign means something, as a century, they would merge two persons.
        lost_zeros: the most leading zeros that a number may have lost (kind "digits"), and that are put back; a number
            that lacks more digits is refused: 10 digits of 12 may be a number without its century, which would become
            another person. None: any, and `lacks_digits` says where there are more than one.
        check: "mod11" (as in NHS numbers, up to 10 digits), "luhn", "mod97" (ISO 7064, MOD 97-10: two check digits at
            the end, as in LEIs), "iban" (ISO 13616: check digits in the third and fourth place), or None.
        weights: in place of `check`: one for each place but the last, which is the check digit of the sum of
            weight · digit; without `remainders` one for each place.
        modulus: what the sum is divided by.
        remainders: the check digit of each remainder from 0 on, "_" where no number is issued: "0_987654321" for NHS
            numbers. None: the sum is divisible by the modulus.
        letters: for codes, the letter of each value from 0 on, "_" where there is none: "_ABC" where A counts as 1.
            None: A counts as 10, Z as 35. A letter that is not listed is refused.
        country: ISO 3166 code of the country whose number it is, for example "SE".
        number: name of the country's number, for example "personnummer".
        reference_year: the year in which all tables were written, for numbers whose sign says whether a person is 100
            years old. It is declared, and never the clock's. None: numbers without the century are refused.
        placeholders: texts that stand for no identifier, for example "0000000000".
        missing: "refuse" an empty cell or a placeholder, or "drop" its row.
        population: U, a public number that no silo's data may exceed. It is declared, never counted in the tables.
        overlap_note: what the identifier is, for reports, for example "national id".

    Raises:
        SilodpError: `identity.profile`, with the field that is at fault.
    """

    study: str
    kind: spellings.Kind
    population: Count
    width: Annotated[int, Whole(most=spellings.MAX_LENGTH)] | None = None
    layouts: tuple[str, ...] = ()
    separators: str = ""
    lost_zeros: Annotated[int, Whole(0, most=spellings.MAX_LENGTH)] | None = None
    check: Literal["mod11", "luhn", "mod97", "iban"] | None = None
    weights: tuple[int, ...] = ()
    modulus: Annotated[int, Whole(2, most=spellings.MAX_LENGTH)] | None = None
    remainders: str | None = None
    letters: str | None = None
    country: str | None = None
    number: str | None = None
    reference_year: Annotated[int, Whole(1900, most=2199)] | None = None
    placeholders: tuple[str, ...] = ()
    missing: Literal["refuse", "drop"] = "refuse"
    overlap_note: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        # json does not write numpy's integers
        for name in ("population", "width", "lost_zeros", "modulus", "reference_year"):
            object.__setattr__(self, name, getattr(self, name) and int(getattr(self, name)))
        object.__setattr__(self, "weights", tuple(map(int, self.weights)))
        if not _STUDY.fullmatch(self.study):
            raise _make_error(
                "study", self.study, "give a name of 1 to 100 letters, digits, dots, hyphens and underscores"
            )
        if len(self.overlap_note) > _MAX_NOTE:
            raise _make_error(
                "overlap_note", self.overlap_note, f"give a text of at most {_MAX_NOTE} characters"
            )
        for name in ("layouts", "placeholders"):
            listed = getattr(self, name)
            if not isinstance(listed, tuple):
                raise _make_error(name, listed, "give a list of texts")
            if len(listed) > _MAX_LISTED or len(set(listed)) < len(listed):
                raise _make_error(name, listed, f"give at most {_MAX_LISTED} texts, all different")
        self._check_shape()
        self._check_placeholders()

    def _check_shape(self) -> None:
        """Check that kind, width, layouts and check digit go together."""
        if self.kind == "national":
            self._check_national()
            return
        for name in ("country", "number", "reference_year"):
            if getattr(self, name) is not None:
                raise _make_error(name, getattr(self, name), "set kind = 'national', or leave it out")
        if self.width is None and (self.kind == "digits" or (self.kind == "code" and not self.layouts)):
            raise _make_error(
                "width", None, f"say how many characters an identifier of kind {self.kind!r} has"
            )
        if self.kind == "pseudonym" and self.check is not None:
            raise _make_error("check", self.check, "leave it out for pseudonyms, which are compared exactly")
        if self.kind != "digits" and self.lost_zeros is not None:
            raise _make_error(
                "lost_zeros", self.lost_zeros, "leave it out: zeros are put back in numbers only"
            )
        self._check_rule()
        for layout in self.layouts:
            fault = spellings.find_layout_fault(layout)
            if fault is not None:
                raise _make_error("layouts", layout, f"it {fault}; write for example '###-###-####'")
            if self.kind == "digits" and spellings.has_letters(layout):
                raise _make_error(
                    "layouts", layout, "use '#' only, because identifiers of kind 'digits' have no letters"
                )
            if self.width is not None and spellings.count_places(layout) != self.width:
                raise _make_error(
                    "layouts",
                    layout,
                    f"give it {self.width} places, as many as the width, and not {spellings.count_places(layout)}",
                )
        self._check_separators()

    def _check_separators(self) -> None:
        """Check that layouts with different separators declare these without meaning."""
        if not all(c == " " or unicodedata.category(c)[0] == "P" for c in self.separators):
            raise _make_error("separators", self.separators, "give spaces and punctuation only, in one text")
        used = {frozenset(spellings.list_separators(layout)) for layout in self.layouts} - {frozenset()}
        if len(used) > 1 and not frozenset[str]().union(*used) <= set(self.separators):
            raise _make_error(
                "layouts",
                list(self.layouts),
                "keep one of those that differ in separators, or list these in separators if they have no meaning: a "
                "sign that tells persons apart would be lost",
            )

    def _check_national(self) -> None:
        """Check that the rule exists, and that nothing is set which it says itself."""
        for name in _SAID_BY_RULE:
            if getattr(self, name):
                raise _make_error(name, getattr(self, name), "leave it out: the national rule says it")
        rule = self.rule
        if rule is None:
            listed = [known.name for known in national.RULES]
            known = suggest_name(f"{self.country or ''} {self.number or ''}".strip(), listed)
            remedy = known or f"choose one of {', '.join(listed)}."
            raise _make_error("number", f"{self.country or ''} {self.number or ''}".strip() or None, remedy)
        if self.reference_year is not None and not rule.needs_year:
            raise _make_error(
                "reference_year", self.reference_year, "leave it out: these numbers say the century"
            )
        if self.lost_zeros and not rule.lost_zeros:
            raise _make_error(
                "lost_zeros", self.lost_zeros, "set 0: these numbers may not be filled with zeros"
            )

    @cached_property
    def rule(self) -> national.NumberRule | None:
        """The rule of the national number; None for other kinds, and where there is none."""
        return national.find_rule(self.country or "", self.number or "") if self.kind == "national" else None

    def _check_rule(self) -> None:
        """Check that the check digit's rule is one for such identifiers."""
        remedy = ""
        if self.weights or self.modulus or self.remainders or self.letters:
            self._check_weights()
        elif self.kind == "code" and self.check in ("mod11", "luhn"):
            remedy = "choose 'mod97' or 'iban' for a code, because the others are for digits"
        elif self.kind == "digits" and self.check == "iban":
            remedy = "set kind = 'code': an IBAN begins with letters"
        elif self.check == "mod11" and (self.width or 0) > _MOD11_DIGITS:
            remedy = f"leave it out: the rule is for numbers of at most {_MOD11_DIGITS} digits"
        elif self.check == "mod97" and self.layouts and all(x.startswith("@@##") for x in self.layouts):
            # The check digits of IBANs and of creditor references (ISO 11649) are not at the end.
            remedy = (
                "choose 'iban' where the third and fourth character are the check digits; 'mod97' takes the last two "
                "(write * for the first places if these are yours)"
            )
        if remedy:
            raise _make_error("check", self.check, remedy)

    def _check_weights(self) -> None:
        """Check that the weights, the modulus and the remainders are a rule for such identifiers."""
        if self.check is not None or self.kind == "pseudonym":
            raise _make_error(
                "weights", list(self.weights), "leave it out, or else check and kind 'pseudonym'"
            )
        if self.modulus is None:
            raise _make_error("modulus", None, "say what the weighted sum is divided by")
        fault = spellings.find_weight_fault(
            self.kind, self.width, self.weights, self.modulus, self.remainders or "", self.letters or ""
        )
        if fault is not None:
            raise _make_error(fault[0], getattr(self, fault[0]), fault[1])

    def _check_placeholders(self) -> None:
        """Check that every placeholder can be met: cells are compared after their characters were normalized."""
        for text in self.placeholders:
            if not 0 < len(text) <= spellings.MAX_LENGTH or spellings.clean_text(text) != text:
                raise _make_error(
                    "placeholders", text, "write it in plain characters, without space around it"
                )

    # --- reading cells ---

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return spellings.compile_layouts(self.kind, self.width, self.layouts)

    @cached_property
    def _folded_placeholders(self) -> frozenset[str]:
        return frozenset(text.casefold() for text in self.placeholders)

    def parse(self, cell: object) -> str | spellings.Refusal:
        """Return the identifier that a cell spells, or why it holds none; see the class for the order.

        Args:
            cell: text. Anything else is refused as a number: a number may have lost digits.
        """
        return self.parse_column([cell])[0]

    def parse_column(self, cells: Iterable[object]) -> list[str | spellings.Refusal]:
        """Return `parse` of every cell; a spelling that occurs in many rows is read once."""
        cells = list(cells)
        read = self._read_all if self.rule is None else partial(self._read_national, self.rule)
        distinct = set(cells)
        if 2 * len(distinct) > len(cells):  # finding the few that repeat would take longer than reading them
            return read(cells)
        known = dict(zip(distinct, read(list(distinct)), strict=True))
        return [known[cell] for cell in cells]

    @cached_property
    def _check_digits(self) -> spellings.Check | None:
        """The rule of the check digit, if there is one."""
        if self.modulus is not None:
            return spellings.make_weight_check(
                self.weights, self.modulus, self.remainders or "", self.letters or ""
            )
        return None if self.check is None else spellings.CHECKS[self.check]

    def _read_all(self, cells: Sequence[object]) -> list[str | spellings.Refusal]:
        """Return what cells spell by the settings of the profile."""
        plain = np.full(len(cells), None, dtype=object)
        if self._plain_layouts and len(cells) > _FEW_CELLS:
            # Normalization of Unicode takes microseconds a cell: most cells have plain characters and need none.
            texts = [cell if isinstance(cell, str) else "" for cell in cells]
            for rows, codes in spellings.match_layouts(texts, self._plain_layouts):
                plain[rows] = spellings.spell_columns(spellings.LOWER_CASE[codes])
        none = spellings.MISSING | self._folded_placeholders | {"inf", "infinity"}
        found = [
            self._read(cell) if value is None or value in none else value
            for cell, value in zip(cells, plain.tolist(), strict=True)
        ]
        if self._check_digits is not None:
            values = (value for value in found if isinstance(value, str))
            if wrong := spellings.find_wrong_checks(self._check_digits, values):
                found = [spellings.Refusal.CHECK_DIGIT if value in wrong else value for value in found]
        return found

    @cached_property
    def _plain_layouts(self) -> list[str]:
        """The layouts, with and without separators, in which every text is an identifier."""
        if self.kind == "pseudonym":
            return []
        plain = ["#" * (self.width or 0)] if self.kind == "digits" else []
        plain += [] if self.kind == "digits" or self.layouts else ["*" * (self.width or 0)]
        bare = (spellings.drop_separators(layout) for layout in self.layouts)
        found = dict.fromkeys([*plain, *self.layouts, *bare])
        return [layout for layout in found if not spellings.can_spell_number(layout)]

    def _read_national(
        self, rule: national.NumberRule, cells: Sequence[object]
    ) -> list[str | spellings.Refusal]:
        """Return what cells spell by a national rule."""
        read = partial(rule.read, reference_year=self.reference_year, lost_zeros=self.lost_zeros or 0)
        found = read([cell if isinstance(cell, str) else "" for cell in cells])
        # What fits no layout as it stands may do so in plain characters.
        texts = {}
        for place, value in enumerate(found):
            if value is spellings.Refusal.LAYOUT:
                found[place], texts[place] = spellings.clean_number(cells[place])
        for place, value in zip(texts, read(list(texts.values())), strict=True):
            if found[place] is spellings.Refusal.LAYOUT:
                found[place] = value
        if self.placeholders:
            none = {v for v in read(self.placeholders) if isinstance(v, str)}
            for place, value in enumerate(found):
                text = spellings.clean_text(str(cells[place])) or ""
                if value in none or text.casefold() in self._folded_placeholders:
                    found[place] = spellings.Refusal.PLACEHOLDER
        return found

    def _read(self, cell: object) -> str | spellings.Refusal:
        """Return the identifier that a cell spells, its check digit not yet checked."""
        if not isinstance(cell, str):
            return spellings.Refusal.NUMBER
        text = spellings.clean_text(cell)
        if text is None:
            return spellings.Refusal.CHARACTER
        if text.casefold() in self._folded_placeholders:
            return spellings.Refusal.PLACEHOLDER
        value = spellings.read_text(text, self.kind, self.width, self.layouts, self._pattern, self.lost_zeros)
        # Before the check digit: a placeholder such as 9999999999 is to be known as one also where its digit is wrong.
        if isinstance(value, str) and value.casefold() in self._folded_placeholders:
            return spellings.Refusal.PLACEHOLDER
        return value

    def lacks_digits(self, cell: object) -> bool:
        """Return whether an accepted cell lacks two digits or more, and `lost_zeros` does not say that it may."""
        if self.kind != "digits" or self.lost_zeros is not None or not isinstance(cell, str):
            return False
        text = spellings.clean_text(cell) or ""
        return text.isdecimal() and spellings.count_lost(text, self.width or 0) > 1

    def normalize(self, cell: object, row: int, where: str = "") -> str | None:
        """Return the identifier in a cell.

        Args:
            cell: text.
            row: number of the data row, the first after the header is 1.
            where: the table and the column, for the message.

        Returns:
            The one form in which silos compare it; None where the cell is empty or a placeholder, and `missing` is
            "drop".

        Raises:
            SilodpError: `identity.cell`; the message has the row and the reason, never the cell.
        """
        return self.normalize_column([cell], where, row)[0]

    def normalize_column(
        self, cells: Iterable[object], where: str = "", first_row: int = 1
    ) -> list[str | None]:
        """Return `normalize` of every cell of a column, or of a part that begins with the data row `first_row`.

        Raises:
            SilodpError: as `normalize`, for the first row that is refused.
        """
        found: list[str | None] = []
        for row, parsed in enumerate(self.parse_column(cells), start=first_row):
            if isinstance(parsed, str):
                found.append(parsed)
            elif parsed.stands_for_none and self.missing == "drop":
                found.append(None)
            else:
                reason = f"data row {row} {spellings.REASONS[parsed]}; {spellings.REMEDIES[parsed]}"
                raise SilodpError(
                    f"{where}{': ' if where else ''}{reason}",
                    code="identity.cell",
                    field="data.schema.identity",
                )
        return found

    # --- identity of the profile ---

    def to_dict(self) -> dict[str, Any]:
        """Return all settings, JSON-ready; layouts and placeholders in sorted order, which has no meaning."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _LATER:  # a setting that was added later changes no other digest
            if settings[name] in (None, (), ""):
                del settings[name]
        return {
            name: sorted(value) if name in ("layouts", "placeholders") else value
            for name, value in settings.items()
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the settings, and of what this program reads from ten fictitious spellings.

        It differs where the profile differs, and where a version of silodp reads cells differently. All parties of a
        run sign it.
        """
        parts = [bytes.fromhex(self.settings_digest)]
        for spelling in make_test_spellings(self):
            parsed = self.parse(spelling)
            found = f"={parsed}" if isinstance(parsed, str) else f"!{parsed.value}"
            parts += [spelling.encode(), found.encode()]
        return hashlib.sha256(_join(parts)).hexdigest()

    @cached_property
    def settings_digest(self) -> str:
        """SHA-256 (hex) of the settings as canonical JSON: sorted keys, ASCII, no spaces."""
        # Not the bytes of the file, in which comments and the order of settings have no meaning.
        settings = {"format": FORMAT, **self.to_dict()}
        canonical = json.dumps(settings, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def agreement_code(self) -> str:
        """Eight groups of four letters, the beginning of the digest, that silos compare by telephone.

        The code of a consortium has digits.
        """
        # 32 letters are 128 bits: who forges a profile with the code of another one needs about 2^128 attempts.
        code = self.digest.translate(_LETTERS)
        return "-".join(code[start : start + 4] for start in range(0, 32, 4))

    # --- files ---

    def to_toml(self) -> str:
        """Return the content of identity.toml; `load_profile` reads the same profile from it."""
        settings = {name: value for name, value in self.to_dict().items() if value not in (None, [], "")}
        return _HEADER + tomli_w.dumps({"format": FORMAT, **settings})


def load_profile(path: str | Path) -> IdentityProfile:
    """Read an identity profile.

    Args:
        path: the path of a TOML file with the attributes of `IdentityProfile`.

    Returns:
        The profile, checked.

    Raises:
        SilodpError: `identity.file` (not readable, or not TOML), `identity.profile` (a setting that does not fit).
    """
    check_path("path", path)
    path = Path(path)
    try:
        with path.open("rb") as file:
            # One byte more than allowed tells a file that is too long from one that just fits.
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES >> 20} MiB")
        values = parse_toml(content.decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise SilodpError(
            f"{path}: not readable as an identity profile ({reason}); name the TOML file that 'silodp identity new' "
            "wrote",
            code="identity.file",
            field="identity",
        ) from None
    return parse_profile(values, str(path))


def parse_profile(values: Mapping[str, Any], source: str = "profile") -> IdentityProfile:
    """Return the profile of plain values as TOML has them; `source` is where they are from, for messages.

    Raises:
        SilodpError: `identity.profile`, with the field that is unknown, missing or has a wrong value.
    """

    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    version = given.pop("format", FORMAT)
    if given.keys() & {"country", "number"}:
        given.setdefault("kind", "national")
    known = [field.name for field in fields(IdentityProfile)]
    required = [field.name for field in fields(IdentityProfile) if field.default is MISSING]
    fault, reason = "", ""
    if unknown := [name for name in given if name not in known]:
        remedy = suggest_name(unknown[0], known) or f"use {', '.join(known)}."
        fault, reason = unknown[0], f"{shorten(unknown[0])} is no setting of an identity profile: {remedy}"
    elif version != FORMAT or isinstance(version, bool):
        remedy = "use the version of silodp that wrote the profile"
        fault, reason = "format", f"format = {shorten(version)} is not known; {remedy}"
    elif missing := [name for name in required if name not in given]:
        fault = missing[0]
        reason = f"{fault} is missing; write it, or make a profile with 'silodp identity new'"
    if reason:
        raise SilodpError(f"{source}: {reason}", code="identity.profile", field=fault)
    try:
        return IdentityProfile(**given)
    except SilodpError as error:
        raise SilodpError(f"{source}: {error}", code=error.code, field=error.field) from None


def make_test_spellings(profile: IdentityProfile) -> list[str]:
    """Return ten fictitious spellings that follow from the profile alone; some of them must be refused."""
    values = _make_identifiers(profile) if profile.rule is None else cycle(profile.rule.examples)
    plain = [next(values) for _ in range(_SPELLINGS)]
    arabic = {ord("0") + digit: 0x0660 + digit for digit in range(10)}
    layout = profile.layouts and sorted(profile.layouts)[0]
    return [
        plain[0],
        "".join(chr(ord(c) + 0xFEE0) for c in plain[1]),  # full-width forms
        plain[2].translate(arabic),
        f"\ufeff{plain[3]}\u200b",
        f" \u00a0{plain[4].swapcase()}\t",
        plain[5].lstrip("0"),
        _insert_separators(plain[6], layout) if layout else plain[6].upper(),
        f"{plain[7]}.0",
        f"{plain[8][0]}.{plain[8][1:]}E+08",
        plain[9][:-1] + chr(ord(plain[9][-1]) ^ 1),  # another last character: a wrong check digit
    ]


def _insert_separators(value: str, layout: str) -> str:
    characters = iter(value)
    return "".join(next(characters) if c in "#@*" else c for c in layout)


def _make_identifiers(profile: IdentityProfile) -> Iterator[str]:
    """Yield identifiers that the profile accepts, every second one with a leading zero where that is possible."""
    first = sorted(profile.layouts)[0] if profile.layouts else ""
    places = "".join(c for c in first if c in "#@*") or ("#" if profile.kind == "digits" else "*") * (
        profile.width or 12
    )
    letters, digits = "abcdefghijklmnopqrstuvwxyz", "0123456789"
    allowed = {"#": digits, "@": letters, "*": digits + letters}
    found = 0
    for attempt in range(1 << 13):
        stream = hashlib.shake_256(f"{profile.settings_digest} {attempt}".encode()).digest(len(places))
        value = "".join(
            # A byte modulo 10 or 36 prefers the first characters a little, which does no harm to made-up identifiers.
            allowed[place][byte % len(allowed[place])]
            for place, byte in zip(places, stream, strict=True)
        )
        # Leading zeros are what programs lose, so half of the made-up identifiers have one.
        if found % 2 and places[0] != "@":
            value = "0" + value[1:]
        if profile.parse(value) == value:
            found += 1
            yield value
    # A width that leaves no identifier but placeholders and wrong check digits.
    while True:
        yield "0" * len(places)


def _join(parts: Iterable[bytes]) -> bytes:
    # With lengths, so that no two lists of parts have the same bytes.
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _make_error(name: str, value: object, remedy: str) -> SilodpError:
    given = f"{name} is missing" if value is None else f"{name} = {shorten(value)}"
    return SilodpError(f"{given}: {remedy}", code="identity.profile", field=name)
