"""The identity profile: which spellings are one person, which are refused, and that nothing else is ever read.

`support.identifiers` reads cells a second time by the text of the specification. Golden values (digests, codes) were
printed by this program at its first version: they change only with `FORMAT`.
"""

from __future__ import annotations

import logging
import time
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silodp.data import Federation, IdentityProfile, PublicData
from silodp.data.catalog import find_dataset
from silodp.data.federation import count_persons_by_silos
from silodp.data.identity.check import check_cells, check_table
from silodp.data.identity.profile import load_profile, make_test_spellings, parse_profile
from silodp.data.identity.spellings import CHECKS, Refusal, find_wrong_checks
from silodp.data.tables.columns import Reader
from silodp.data.tables.reader import read_person_index
from support.identifiers import REFUSED, passes, read_identifier
from support.refusals import refused
from support.tables import schema, write

HEART = IdentityProfile(
    study="heart-2026",
    kind="digits",
    width=10,
    layouts=("###-###-####", "### ### ####"),
    separators="- ",
    check="mod11",
    placeholders=("0000000000", "9999999999"),
    population=200_000,
    overlap_note="national id",
)
PLAIN = IdentityProfile(
    study="s",
    kind="digits",
    width=10,
    layouts=("###-###-####", "### ### ####"),
    separators="- ",
    population=100,
)
CODE = IdentityProfile(study="s", kind="code", width=6, layouts=("@@-####", "@@####"), population=100)
PSEUDONYM = IdentityProfile(study="s", kind="pseudonym", population=100)

# Published examples: of the NHS data dictionary; of ISO 7812's description; an LEI (ISO 17442) and 123456 with 76.
NHS, LUHN, LEI = "9434765919", "79927398713", "5493001kjtiigc8y1r12"
IBAN = "de89370400440532013000"  # the example of the German banks


def full_width(text: str) -> str:
    return "".join(chr(ord(c) + 0xFEE0) for c in text)


def arabic(text: str) -> str:
    return text.translate({ord("0") + d: 0x0660 + d for d in range(10)})


# --- one person, however it is written ---


@pytest.mark.parametrize(
    "cell",
    [
        "0123456789",
        "123456789",  # leading zeros lost
        "012-345-6789",
        "012 345 6789",
        full_width("0123456789"),
        full_width("012-345-6789"),
        arabic("0123456789"),
        "०१२३४५६७८९",  # Devanagari
        "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗",  # mathematical
        "0123456789\N{ZERO WIDTH SPACE}",
        "\N{ZERO WIDTH NO-BREAK SPACE}0123456789",  # a byte order mark
        "\u200e0123456789\u2060",
        " \t0123456789\u00a0\u3000\r\n",
    ],
)
def test_spellings_of_one_person(cell: str) -> None:
    assert PLAIN.normalize(cell, 1) == "0123456789"


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("123456789.0", Refusal.NUMBER),  # must not become 1234567890, nor 0123456789
        ("123456789.", Refusal.NUMBER),
        ("123456789,0", Refusal.NUMBER),
        (full_width("123456789.0"), Refusal.NUMBER),
        ("1.23E8", Refusal.NUMBER),
        ("1.23E+08", Refusal.NUMBER),
        ("1e+08", Refusal.NUMBER),
        (123456789.0, Refusal.NUMBER),
        (123456789, Refusal.NUMBER),  # the reader of tables gives whole numbers as text
        ("1e8", Refusal.LAYOUT),
        ("12345678901", Refusal.LAYOUT),
        ("-123456789", Refusal.LAYOUT),
        ("+123456789", Refusal.LAYOUT),
        ("0123-456-789", Refusal.LAYOUT),
        ("012-3456789", Refusal.LAYOUT),
        ("012--345-6789", Refusal.LAYOUT),
        ("012\N{EN DASH}345\N{EN DASH}6789", Refusal.LAYOUT),
        ("01234\N{ZERO WIDTH SPACE}56789", Refusal.LAYOUT),  # inside
        ("01234 56789", Refusal.LAYOUT),
        ("0123456789 0123456789", Refusal.LAYOUT),
        ("O123456789", Refusal.LAYOUT),
        ("0123456789\0", Refusal.LAYOUT),
        ("1" * 100_000, Refusal.LAYOUT),
        ("123456789²", Refusal.CHARACTER),  # NFKC alone would read 1234567892
        ("①23456789", Refusal.CHARACTER),
        ("½", Refusal.CHARACTER),
        ("", Refusal.MISSING),
        (" \N{ZERO WIDTH SPACE}", Refusal.MISSING),
        ("NaN", Refusal.MISSING),
        ("N/A", Refusal.MISSING),
    ],
)
def test_everything_else_is_refused(cell: object, reason: Refusal) -> None:
    assert PLAIN.parse(cell) is reason
    with refused("identity.cell") as caught:
        PLAIN.normalize(cell, 17, "a.csv: column 'id'")
    assert "data row 17 " in str(caught.value)
    if reason is not Refusal.MISSING:
        assert str(cell) not in str(caught.value)


def test_codes_ignore_case_and_pseudonyms_do_not() -> None:
    assert {CODE.normalize(cell, 1) for cell in ("AB-1234", "ab1234", "aB-1234", full_width("Ab1234"))} == {
        "ab1234"
    }
    assert (
        CODE.parse("ab_1234") is CODE.parse("abc123") is CODE.parse("АВ-1234") is Refusal.LAYOUT
    )  # Cyrillic
    # The Kelvin sign is the letter K in Unicode's canonical forms.
    assert CODE.normalize("\N{KELVIN SIGN}b1234", 1) == "kb1234"
    assert PSEUDONYM.normalize("aB+/=", 1) == "aB+/="
    assert PSEUDONYM.normalize("Ab", 1) != PSEUDONYM.normalize("aB", 1)
    assert PSEUDONYM.parse("1.5") is PSEUDONYM.parse("12E10") is PSEUDONYM.parse("1E+10") is Refusal.NUMBER
    assert replace(PSEUDONYM, width=5).normalize("12E10", 1) == "12E10"
    assert replace(PSEUDONYM, width=5).parse("012E10") is Refusal.LAYOUT  # never padded


def test_composed_and_decomposed_letters_meet() -> None:
    for form in ("NFC", "NFD"):
        assert CODE.parse(unicodedata.normalize(form, "äb1234")) is Refusal.LAYOUT
        assert CODE.normalize(unicodedata.normalize(form, "ab1234"), 1) == "ab1234"
        # Half-width katakana and their marks are layouts of nobody here, whatever their form.
        assert PLAIN.parse(unicodedata.normalize(form, "が123")) is Refusal.LAYOUT


def test_missing_cells_and_placeholders() -> None:
    drop = replace(HEART, missing="drop")
    for cell in ("", "null", "0000000000", "0", "000-000-0000", "9999999999", full_width("9999999999")):
        assert drop.normalize(cell, 1) is None
        with refused("identity.cell"):
            HEART.normalize(cell, 1)
    assert HEART.parse("9999999999") is HEART.parse("0") is Refusal.PLACEHOLDER
    # 9999999999 passes the check digit, 1111111111 too; 8888888880 does not and is known as a placeholder first.
    assert replace(HEART, placeholders=("8888888880",)).parse("8888888880") is Refusal.PLACEHOLDER
    words = replace(PLAIN, placeholders=("unknown", "0"))
    assert words.parse(" UNKNOWN ") is words.parse("0") is Refusal.PLACEHOLDER
    assert words.parse("0000000000") == "0000000000"  # as many zeros as were not declared


@pytest.mark.parametrize(
    ("check", "value"), [("mod11", NHS), ("mod11", "0306406152"), ("luhn", LUHN), ("luhn", "4539578763621486"),
                         ("mod97", "12345676"), ("mod97", LEI), ("iban", IBAN)]
)  # fmt: skip
def test_published_check_digits(check: str, value: str) -> None:
    assert not find_wrong_checks(CHECKS[check], [value])
    for place, character in enumerate(value):  # every wrong single character is found
        others = set("0123456789") - {character} if character.isdigit() else set("abcdefgh") - {character}
        wrong = {value[:place] + other + value[place + 1 :] for other in others}
        assert find_wrong_checks(CHECKS[check], wrong) == wrong
    swapped = value[:-2] + value[-1] + value[-2]
    assert find_wrong_checks(CHECKS[check], [swapped]) == ({swapped} if swapped != value else set())


def test_values_of_several_lengths_are_checked_apart() -> None:
    assert find_wrong_checks(CHECKS["mod97"], ["12345676", LEI, "12345677", "1", "98", "098"]) == {
        "12345677",
        "1",
        "98",
    }


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(CHECKS)), st.from_regex(r"[0-9]{9}", fullmatch=True))
def test_a_number_has_one_check_digit_at_most(check: str, number: str) -> None:
    """By its remainder alone 97 were 00 as well, 98 were 01, and 02 were 99: one person had two keys."""
    values = {
        "mod11": [f"{number}{digit}" for digit in range(10)],
        "luhn": [f"{number}{digit}" for digit in range(10)],
        "mod97": [f"{number}{pair:02}" for pair in range(100)],
        "iban": [f"no{pair:02}{number}86" for pair in range(100)],
    }[check]
    accepted = set(values) - find_wrong_checks(CHECKS[check], values)
    assert len(accepted) == 1 or (check == "mod11" and not accepted)
    assert accepted == {value for value in values if passes(check, value)}


def test_both_spellings_of_an_iban_are_one_person() -> None:
    bank = IdentityProfile(
        study="s", kind="code", width=22, layouts=("@@## #### #### #### #### ##",), check="iban", population=9
    )
    assert {bank.parse(cell) for cell in (IBAN, IBAN.upper(), "DE89 3704 0044 0532 0130 00")} == {IBAN}
    assert bank.parse("DE98370400440532013000") is Refusal.CHECK_DIGIT
    pair = 98 - int("370400440532013000" + "1200") % 97
    assert find_wrong_checks(CHECKS["iban"], [f"12{pair:02}370400440532013000"])  # it has no country
    with refused("identity.profile") as caught:  # it would refuse every one of them
        replace(bank, check="mod97")
    assert caught.value.field == "check"


# --- the second reading ---

CELL = st.one_of(
    st.from_regex(r"\s?[0-9]{1,11}(\.0)?\s?", fullmatch=True),
    st.from_regex(r"[0-9]{3}[- ][0-9]{3}[- ][0-9]{4}", fullmatch=True),
    st.from_regex(r"[0-9]{1,3}[.,]?[0-9]{0,2}[eE][+-]?[0-9]{1,2}", fullmatch=True),
    st.from_regex(r"[A-Za-z]{2}-?[0-9]{4}", fullmatch=True),
    st.text("0123456789- .,eE+AbZ\u200b\ufeff\u00a0٣５²①Ⅷｅ\u0301", max_size=12),
    st.text(max_size=12),
)


@settings(max_examples=600, deadline=None)
@given(
    CELL,
    st.sampled_from(
        [
            HEART,
            PLAIN,
            CODE,
            replace(PLAIN, check="luhn"),
            replace(CODE, layouts=()),
            *(replace(PLAIN, lost_zeros=zeros) for zeros in (0, 1, 3)),
            replace(PLAIN, check="mod97"),
        ]
    ),
)
def test_a_second_reading_agrees(cell: str, profile: IdentityProfile) -> None:
    found = profile.parse(cell)
    expected = read_identifier(
        cell,
        kind=profile.kind,
        width=profile.width or 0,
        layouts=profile.layouts,
        check=profile.check,
        placeholders=profile.placeholders,
        lost_zeros=profile.lost_zeros,
    )
    if isinstance(found, Refusal):
        assert expected == (None if found.stands_for_none else REFUSED)
    else:
        assert found == expected


@settings(max_examples=60, deadline=None)
@given(
    st.lists(CELL, min_size=66, max_size=80, unique=True),
    st.sampled_from(
        [HEART, CODE, replace(CODE, layouts=("**-####", "#@####")), replace(CODE, layouts=()), PSEUDONYM]
    ),
)
def test_a_long_column_is_read_as_each_of_its_cells(cells: list[str], profile: IdentityProfile) -> None:
    assert profile.parse_column(cells) == [profile.parse(cell) for cell in cells]


@settings(max_examples=200, deadline=None)
@given(CELL, st.sampled_from([HEART, PLAIN, CODE, PSEUDONYM]))
def test_reading_is_idempotent_and_gives_plain_text(cell: str, profile: IdentityProfile) -> None:
    found = profile.parse(cell)
    if isinstance(found, str):
        assert found.isascii()
        assert found
        assert profile.parse(found) == found


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**10 - 1), st.integers(0, 10**10 - 1))
def test_different_numbers_stay_different(first: int, second: int) -> None:
    spellings = [f"{n:010}" for n in (first, second)]
    layouts = [f"{text[:3]}-{text[3:6]}-{text[6:]}" for text in spellings]
    for a, b in ((spellings[0], str(second)), (layouts[0], full_width(spellings[1]))):
        assert (PLAIN.parse(a) == PLAIN.parse(b)) == (first == second)


# --- the profile ---


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("study", {"study": ""}),
        ("study", {"study": "two words"}),
        ("kind", {"kind": "name"}),
        ("width", {"width": None}),
        ("width", {"width": 0}),
        ("width", {"width": True}),
        ("width", {"width": 129, "layouts": ()}),
        ("width", {"kind": "code", "width": None, "layouts": (), "check": None}),
        ("layouts", {"layouts": "###-###-####"}),
        ("layouts", {"layouts": ("###-###-###",)}),  # nine places
        ("layouts", {"layouts": ("########.##",)}),  # a number with decimals
        ("layouts", {"layouts": ("@##-###-####",)}),
        ("layouts", {"layouts": ("##########",) * 2}),
        ("layouts", {"layouts": ("1##########",)}),  # a digit that would be lost
        ("layouts", {"layouts": ("###\u200b#######",)}),
        ("layouts", {"layouts": ("##########\n",)}),
        ("layouts", {"layouts": (full_width("###-###-####"),)}),
        ("layouts", {"layouts": ("---",)}),
        ("layouts", {"layouts": ("######-####", "######+####")}),  # + is a century in Sweden and Finland
        ("lost_zeros", {"lost_zeros": -1}),
        ("lost_zeros", {"kind": "code", "check": None, "lost_zeros": 0}),
        ("check", {"width": 11, "layouts": ()}),  # a digit that counts 11 times is not checked
        ("check", {"check": "iban"}),
        ("check", {"check": "mod10"}),
        ("check", {"kind": "pseudonym"}),
        ("check", {"kind": "code"}),
        ("placeholders", {"placeholders": (" 0",)}),
        ("placeholders", {"placeholders": ("",)}),
        ("placeholders", {"placeholders": (0,)}),
        ("missing", {"missing": "own"}),  # never: each row its own person
        ("population", {"population": 0}),
        ("population", {"population": 1.5}),
        ("population", {"population": 10**10}),
        ("overlap_note", {"overlap_note": "x" * 201}),
    ],
)
def test_a_profile_is_checked(field: str, changes: dict[str, Any]) -> None:
    with refused("identity.profile") as caught:
        replace(HEART, **changes)
    assert caught.value.field == field


def test_digest_and_code_are_golden() -> None:
    """Also of the version before separators, weights and national numbers: new settings change no other digest."""
    plain = replace(HEART, layouts=("###-###-####",), separators="")
    assert plain.settings_digest == "527acbdd24d8bb3d44832f9eff274f296fc07a24cbb7bcadf68db5fad6717f2d"
    assert plain.digest == "a7a8760e94f71487e303b68bca5659d033973f7ddae1ac464cf8cbfbadb9f9a7"
    assert plain.agreement_code == "mhmj-hgar-kesh-bejh-rdad-ngjn-pmfg-fkqa"
    assert (
        replace(plain, lost_zeros=1).digest
        == "a7db0db2ddd0717d5d6769a1e2b5901b2ce184cc3a4fdea77c5bfb35892bb3aa"
    )
    assert PSEUDONYM.agreement_code == "fjej-jqrd-jmjs-rekq-mrmq-mhbs-nqab-ckpa"
    assert replace(HEART, layouts=HEART.layouts[::-1]).digest == HEART.digest  # the order has no meaning


@pytest.mark.parametrize(
    "changes",
    [
        {"study": "heart-2027"},
        {"width": 9, "layouts": ()},
        {"lost_zeros": 0},
        {"layouts": ("###-###-####",)},
        {"separators": " -"},
        {"check": None},
        {"check": None, "weights": (10, 9, 8, 7, 6, 5, 4, 3, 2, 1), "modulus": 11},
        {"check": "luhn"},
        {"placeholders": ()},
        {"missing": "drop"},
        {"population": 200_001},
        {"overlap_note": ""},
    ],
)
def test_every_setting_changes_digest_and_code(changes: dict[str, Any]) -> None:
    other = replace(HEART, **changes)
    assert other.digest != HEART.digest
    assert other.agreement_code != HEART.agreement_code


def test_a_program_that_reads_cells_differently_has_another_code(monkeypatch: pytest.MonkeyPatch) -> None:
    spellings = make_test_spellings(HEART)
    assert len(set(spellings)) == 10
    read = HEART.parse_column(spellings)
    assert sum(isinstance(value, str) for value in read) == 7
    assert {value for value in read if isinstance(value, Refusal)} == {Refusal.NUMBER, Refusal.CHECK_DIGIT}
    before = HEART.agreement_code
    monkeypatch.setitem(CHECKS, "mod11", CHECKS["luhn"])  # type: ignore[index]
    assert replace(HEART).agreement_code != before


@pytest.mark.parametrize(
    "profile",
    [HEART, PLAIN, CODE, PSEUDONYM, replace(HEART, width=1, layouts=(), check="mod97", placeholders=())],
)
def test_every_profile_has_a_code_and_is_read_back(profile: IdentityProfile, tmp_path: Path) -> None:
    groups = profile.agreement_code.split("-")
    assert len(groups) == 8
    assert all(len(group) == 4 for group in groups)
    assert "".join(groups).isalpha()
    (tmp_path / "identity.toml").write_text(profile.to_toml(), encoding="utf-8")
    again = load_profile(tmp_path / "identity.toml")
    assert again.digest == profile.digest
    assert again.to_dict() == profile.to_dict()


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        IdentityProfile,
        study=st.from_regex(r"[a-z0-9.-]{1,20}", fullmatch=True).filter(lambda text: text[0] not in ".-"),
        kind=st.just("digits"),
        width=st.just(8),
        layouts=st.lists(st.sampled_from(["####-####", "## ## ## ##", "########"]), unique=True).map(tuple),
        check=st.sampled_from([None, "mod11", "luhn", "mod97"]),
        placeholders=st.lists(st.from_regex(r"[0-9a-z]{1,8}", fullmatch=True), unique=True, max_size=5).map(
            tuple
        ),
        missing=st.sampled_from(["refuse", "drop"]),
        separators=st.just(" -"),
        population=st.integers(1, 10**9),
        overlap_note=st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
    )
)
def test_any_profile_is_written_and_read_back(profile: IdentityProfile) -> None:
    import tomllib

    again = parse_profile(tomllib.loads(profile.to_toml()))
    assert again.digest == profile.digest


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('study = "s"\nkind = "digits"\nwidth = 3', "population"),
        ('study = "s"\nkind = "digits"\nwidth = 3\npopulation = 5\nsigns = "-"', "signs"),
        ('study = "s"\nkind = "digits"\nwidth = 3\npopulation = "5"', "population"),
        ('study = "s"\nkind = "digits"\nwidth = 3\npopulation = 5\nlayouts = "###"', "layouts"),
        ('format = 2\nstudy = "s"\nkind = "digits"\nwidth = 3\npopulation = 5', "format"),
        ('format = true\nstudy = "s"\nkind = "digits"\nwidth = 3\npopulation = 5', "format"),
        ('study = 2026-01-01\nkind = "digits"\nwidth = 3\npopulation = 5', "study"),
    ],
)
def test_a_profile_file_is_checked(text: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "identity.toml"
    path.write_text(text)
    with refused("identity.profile") as caught:
        load_profile(path)
    assert caught.value.field == field
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"study = ", b"\xff\xfe", b"x = 1\n" * 200_000, b"a = " + b"[" * 10_000])
def test_a_file_that_is_no_profile_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "identity.toml").write_bytes(content)
    for path in (tmp_path / "identity.toml", tmp_path / "none.toml", tmp_path):
        with refused("identity.file"):
            load_profile(path)


def test_a_column_is_read_in_a_third_of_the_time_of_its_cells() -> None:
    rng = np.random.default_rng(0)
    digits = rng.integers(0, 10, (24_000, 9))
    last = -(digits * np.arange(10, 1, -1)).sum(axis=1) % 11
    good = [f"{''.join(map(str, row))}{c}" for row, c in zip(digits, last, strict=True) if c < 10][:20_000]
    assert len(good) == 20_000
    for cells in (good, [f"{c[:3]}-{c[3:6]}-{c[6:]}" for c in good], [full_width(c) for c in good]):
        ratios = []
        for _ in range(3):
            begin = time.process_time()
            column = HEART.normalize_column(cells)
            middle = time.process_time()
            assert column == [HEART.normalize(cell, 1) for cell in cells] == good
            ratios.append((time.process_time() - middle) / (middle - begin))
        assert max(ratios) > 3


@pytest.mark.parametrize(
    ("settings", "cell"),
    [
        ({"width": 3, "layouts": ()}, "Inf"),
        ({"width": 3, "layouts": ()}, "nan"),
        ({"width": 4, "layouts": ("#@-##",)}, "1e-05"),
        ({"width": 4, "layouts": ("#*-##",)}, "1E-05"),
        ({"placeholders": ("ab0001",)}, "AB-0001"),
        ({}, "ab 0001"),
        ({}, "ab-000１"),
        ({}, 5),
    ],
)
def test_a_long_column_is_read_as_its_cells(settings: dict[str, Any], cell: object) -> None:
    """Long columns are read in numpy; what does not fit there is read as a cell alone."""
    profile = replace(CODE, **settings)
    assert profile.parse_column([cell, *map(str, range(99))])[0] == profile.parse(cell)
    assert profile.parse_column([cell] * 99) == [profile.parse(cell)] * 99


# --- tables ---


def write_profile(folder: Path, profile: IdentityProfile) -> Path:
    path = folder / "identity.toml"
    path.write_text(profile.to_toml(), encoding="utf-8")
    return path


def read(
    folder: Path, profile: IdentityProfile, options: dict[str, Any] | None = None, **tables: str
) -> Federation:
    plan = schema(identity=write_profile(folder, profile), **(options or {}))
    return Federation.from_tables(write(folder, **tables), plan)


def table(*keys: str) -> str:
    return "patient,age,sex,ill\n" + "".join(f"{key},50,f,yes\n" for key in keys)


def test_tables_are_read_by_the_profile(tmp_path: Path) -> None:
    built = read(
        tmp_path,
        replace(PLAIN, population=7),
        berlin=table("0123456789", "012-345-6789", "5"),
        paris=table("123456789", full_width("0000000005"), "6\N{ZERO WIDTH SPACE}"),
    )
    assert built.users == 7
    assert built.user_keys == ("0000000005", "0000000006", "0123456789")
    assert count_persons_by_silos(built) == {0: 4, 1: 1, 2: 2}
    assert built.counts().tolist() == [[1, 0, 2, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]]
    for silo in built.silos:
        assert silo.identifiers == built.user_keys
    assert built.assumptions == (), "whether anyone may learn who is on the list depends on the method"


def test_a_parquet_column_must_be_text_or_whole_numbers(tmp_path: Path) -> None:
    plan = schema(identity=write_profile(tmp_path, PLAIN))
    rest = {"age": [30, 40], "sex": ["f", "m"], "ill": ["no", "no"]}
    for keys in (["17", "0004"], [17, 4], pd.array([17, 4], dtype="Int64"), pd.Categorical(["17", "4"])):
        pd.DataFrame({"patient": keys, **rest}).to_parquet(tmp_path / "a.parquet")
        built = Federation.from_tables([tmp_path / "a.parquet"], plan)
        assert built.user_keys == ("0000000004", "0000000017")
    for keys in ([17.0, 4.0], [17, None], [True, False], pd.to_datetime(["2020-01-01"] * 2)):
        pd.DataFrame({"patient": keys, **rest}).to_parquet(tmp_path / "a.parquet")
        with refused("identity.column"):
            Federation.from_tables([tmp_path / "a.parquet"], plan)


def test_a_workbook_does_not_join_persons_whose_numbers_it_rounds(tmp_path: Path) -> None:
    pytest.importorskip("openpyxl")
    profile, path = replace(PLAIN, width=16, layouts=()), tmp_path / "a.xlsx"
    use: list[Callable[[], object]] = [
        lambda: Federation.from_tables([path], schema(identity=write_profile(tmp_path, profile))),
        lambda: check_table(profile, path, "patient"),
        lambda: read_person_index(path, profile),
    ]
    for keys, is_refused in (((17, 4567890123456780), True), (("17", "4567890123456781"), False)):
        frame = pd.DataFrame({"patient": keys, "age": [30, 40], "sex": ["f", "m"], "ill": ["no", "no"]})
        frame.assign(id=keys, position=[3, 1]).to_excel(path, index=False)
        for one in use:
            if not is_refused:
                one()
                continue
            with refused("identity.column") as caught:
                one()
            assert "data row 2" in str(caught.value)
            assert "4567890123456780" not in str(caught.value)


@pytest.mark.parametrize(
    ("profile", "text"),
    [(PLAIN, "999"), (PLAIN, full_width("999")), (PSEUDONYM, "-9"), (PSEUDONYM, "Unknown")],
)
def test_texts_of_a_reader_that_stand_for_no_value_are_no_person(
    profile: IdentityProfile, text: str, tmp_path: Path
) -> None:
    reader = Reader(missing=["unknown", "999", "-9"])
    tables = {"berlin": table("17", text, "4", text)}
    with refused("identity.cell") as caught:
        read(tmp_path, profile, {"reader": reader}, **tables)
    assert "data row 2 is empty" in str(caught.value)
    assert check_table(profile, tmp_path / "berlin.csv", "patient", reader).refused == {Refusal.MISSING: 2}
    dropping = replace(profile, missing="drop")
    assert len(read(tmp_path, dropping, {"readers": {"berlin": reader}}, **tables).silos[0]) == 2


@pytest.mark.parametrize("key", ["123456789.0", "1.2E+08", "", "0000000000", "12-34"])
def test_a_refused_row_is_named_and_its_cell_is_not(key: str, tmp_path: Path) -> None:
    profile = replace(PLAIN, placeholders=("0000000000",))
    with refused("identity.cell") as caught:
        read(tmp_path, profile, berlin=table("17", key, "4"))
    assert "data row 2 " in str(caught.value)
    assert not key or key not in str(caught.value)


def test_rows_without_an_identifier_are_dropped_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = replace(PLAIN, missing="drop", placeholders=("0000000000",))
    rows = "17,20,f,yes,train\n,30,m,no,train\n0,40,f,no,test\n4,80,m,no,train\n17,50,f,no,test\n"
    text = f"patient,age,sex,ill,part\n{rows}"
    with caplog.at_level(logging.WARNING, logger="silodp"):
        built = read(tmp_path, profile, {"split": "part"}, berlin=text)
    assert "2 rows without an identifier dropped" in caplog.text
    assert len(built.silos[0]) == 2
    assert built.silos[0].user.tolist() == [1, 0]
    assert built.silos[0].x[:, 0].tolist() == [-1, 1]
    assert built.test is not None
    assert built.test.user.tolist() == [1]
    with refused("data.no_records"):
        read(tmp_path, profile, berlin=table("", "0"))


def test_the_population_is_declared_and_kept(tmp_path: Path) -> None:
    tables = {"berlin": table("1", "2"), "paris": table("2", "3")}
    assert read(tmp_path, replace(PLAIN, population=3), **tables).users == 3
    with refused("identity.population"):
        read(tmp_path, replace(PLAIN, population=2), **tables)
    with refused("argument.conflict"):
        schema(identity="identity.toml", users=[1, 2])
    with refused("argument.type"):
        schema(identity=7)


def test_the_profile_is_a_public_fact_and_the_keys_are_not(tmp_path: Path) -> None:
    built = read(tmp_path, PLAIN, berlin=table("1", "2"))
    other = read(tmp_path, PLAIN, berlin=table("3", "4"))
    public = built.public()
    assert public.identity_digest == PLAIN.digest
    assert public.index_digest == other.public().index_digest  # not even a hash of the keys
    assert public == PublicData.from_dict(public.to_dict())
    assert built.digest() != other.digest()  # in the silo, a checkpoint knows its data
    declared = find_dataset("tables").public(
        {"schema": schema(identity=tmp_path / "identity.toml"), "files": ["berlin.csv"], "name": "federation"}
    )
    assert replace(public, index_digest="") == declared
    plain = Federation.from_tables(write(tmp_path, berlin=table("1", "2")), schema()).public()
    assert "identity_digest" not in plain.to_dict()


# --- the check of a silo's table ---


def test_a_check_counts_and_suspects() -> None:
    cells = [
        "ab1234",
        "AB-1234",
        "xy0001",
        "xy0001",
        "",
        "1.5",
        "ab-12",
        *["zz0000"] * 60,
        "cd0001",
        "cd0002",
    ]
    found = check_cells(CODE, cells)
    assert (found.rows, found.persons, found.rows_per_person) == (69, 5, (1, 2.0, 60))
    assert found.refused == {Refusal.MISSING: 1, Refusal.NUMBER: 1, Refusal.LAYOUT: 1}
    assert found.first_refused == ((5, Refusal.MISSING), (6, Refusal.NUMBER), (7, Refusal.LAYOUT))
    assert {s.kind: (s.persons, s.rows, s.identifiers) for s in found.suspicions} == {
        "spellings": (1, (1,), ("ab1234",)),
        "many_rows": (1, (8,), ("zz0000",)),
    }
    assert not found.ok
    assert found.fits_population
    small = check_cells(replace(CODE, population=1), ["ab1234", "ab1235"])
    assert (small.ok, small.fits_population) == (False, False)


def test_a_check_finds_repeated_characters_and_pseudonyms_that_differ_in_case() -> None:
    found = check_cells(PSEUDONYM, ["Ab1", "aB1", "0aB1", "xxx", "y"])
    assert {s.kind: s.identifiers for s in found.suspicions} == {
        "similar": ("Ab1", "aB1", "0aB1"),
        "repeated": ("xxx",),
    }
    assert found.ok
    assert check_cells(replace(PLAIN, missing="drop"), ["", "1"]).dropped == 1
    empty = check_cells(replace(PLAIN, missing="drop"), [""])
    assert (empty.ok, empty.persons, empty.rows_per_person) == (False, 0, (0, 0.0, 0))


def test_lost_zeros_are_suspected_and_separators_are_not() -> None:
    found = check_cells(PLAIN, ["0123456789", "123456789", "555-555-5550", "5555555550", "5555555550\u200b"])
    assert [(s.kind, s.identifiers) for s in found.suspicions] == [("spellings", ("0123456789",))]


def test_a_number_without_its_century_is_no_lost_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 12 digits, 10 were filled up with zeros: the same person had two keys, without a word."""
    profile = replace(PLAIN, width=12, layouts=("########-####",))
    cells = ["191201011234", "1201011234", "19120101-1234", "91201011234"]
    found = check_cells(profile, cells)
    assert {s.kind: (s.persons, s.rows) for s in found.suspicions} == {"short": (1, (2,))}
    with caplog.at_level(logging.WARNING):
        read(tmp_path, profile, berlin=table(*cells))
    assert sum("1 identifier lacks" in record.message for record in caplog.records) == 1
    strict = check_cells(replace(profile, lost_zeros=1), cells)
    assert (strict.refused, strict.first_refused, strict.persons) == (
        {Refusal.SHORT: 1},
        ((2, Refusal.SHORT),),
        2,
    )
    assert check_cells(replace(profile, lost_zeros=2), cells).suspicions == ()


def test_a_table_of_one_or_two_persons_is_named() -> None:
    for persons, is_few in ((0, False), (1, True), (2, True), (3, False)):
        found = check_cells(PLAIN, [f"01234567{person}0" for person in range(persons)] * 2)
        assert found.to_dict()["few_persons"] is found.has_few_persons is is_few
        assert any(line.startswith("Few persons") for line in found.format()) is is_few


def test_a_check_shows_no_identifier_unless_asked(tmp_path: Path) -> None:
    cells = [
        "0123456789",
        "123456789",
        "7777777777",
        "31415926535",
        "271828.0",
        "16180-33988",
        *["5772156649"] * 60,
    ]
    path = write(tmp_path, berlin=table(*cells))["berlin"]
    found = check_table(PLAIN, path, "patient")
    assert {s.kind for s in found.suspicions} == {"spellings", "repeated", "many_rows"}
    shown = "\n".join([*found.format(), str(found.to_dict()), repr(found), repr(found.suspicions)])
    assert not any(cell in shown for cell in cells)
    asked = "\n".join(found.format(show_identifiers=True))
    assert all(cell in asked for cell in ("0123456789", "7777777777", "5772156649"))
    assert not any(cell in asked for cell in cells[3:6])  # refused cells are never shown
    assert found.to_dict(show_identifiers=True)["suspicions"][0]["first_identifiers"] == ["0123456789"]


def test_a_table_without_a_header_does_not_show_its_first_row(tmp_path: Path) -> None:
    path = tmp_path / "berlin.csv"
    path.write_text("0123456789,50\n5555555550,40\n")
    with refused("data.column") as caught:
        check_table(PLAIN, path, "patient")
    assert "0123456789" not in str(caught.value)
