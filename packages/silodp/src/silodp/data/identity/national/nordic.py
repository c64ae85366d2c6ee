"""Numbers of Sweden, Norway, Denmark, Finland, Iceland and the Baltic states."""

from __future__ import annotations

import numpy as np

from silodp.data.identity.national.rule import (
    NumberRule,
    all_of,
    check_places,
    is_date,
    read_number,
    read_pair,
)
from silodp.data.identity.spellings import (
    Codes,
    Columns,
    Mask,
    check_luhn,
    make_weight_check,
    sum_weighted,
)

# --- Sweden -------------------------------------------------------------------------------------------------------


def _add_century(codes: Codes, reference_year: int | None) -> tuple[Codes, Mask]:
    """Return Swedish numbers with the full year of birth; the plus stands from the year in which one turns 100."""
    everyone = np.ones(codes.shape[1], dtype=bool)
    if len(codes) >= 12:  # with the full year; a sign says nothing more
        return codes[[*range(8), *range(len(codes) - 4, len(codes))]], ~everyone
    has_sign = len(codes) == 11
    year = 2000
    if has_sign and reference_year is not None:
        year, everyone = reference_year, ~everyone
    short = read_pair(codes.astype(np.int32) - ord("0"), 0)
    born = year - (year - short) % 100
    if has_sign:
        born = born - 100 * (codes[6] == ord("+"))
    century = np.stack([born // 1000, born // 100 % 10]).astype(np.uint8) + np.uint8(ord("0"))
    return np.concatenate([century, codes[:6], codes[-4:]]), everyone


def _is_issued_se(v: Columns) -> Mask:
    year, day = 100 * read_pair(v, 0) + read_pair(v, 2), read_pair(v, 6)
    # 60 is added to the day of a coordination number.
    return (year >= 1800) & (year < 2100) & is_date(year, read_pair(v, 4), day - 60 * (day > 60))


# --- Norway -------------------------------------------------------------------------------------------------------

_FIRST = make_weight_check((3, 7, 6, 1, 8, 9, 4, 5, 2), 11, "0_987654321")
_SECOND = make_weight_check((5, 4, 3, 2, 7, 6, 5, 4, 3, 2), 11, "0_987654321")


def _is_issued_no(v: Columns) -> Mask:
    day, month, short = read_pair(v, 0), read_pair(v, 2), read_pair(v, 4)
    serial = read_number(v[6:9])
    month = month - np.select([month > 80, month > 65], [80, 65], 0)  # synthetic persons
    year = short + np.select(
        [serial < 500, (serial < 750) & (short >= 54), short < 40, serial >= 900],
        [1900, 1800, 2000, 1900],
        -short,
    )
    is_common_help_number = v[0] >= 8  # without a day of birth
    return np.asarray(
        is_common_help_number | ((year > 0) & is_date(year.astype(np.int32), month, day - 40 * (day > 40)))
    )


def _is_local_no(v: Columns) -> Mask:
    month = read_pair(v, 2)
    return np.asarray((v[0] < 8) & (month > 40) & (month <= 52))


# --- Denmark, Finland, Iceland ------------------------------------------------------------------------------------


def _is_issued_dk(v: Columns) -> Mask:
    short, seventh = read_pair(v, 4), v[6]
    year = short + np.select(
        [
            (seventh >= 5) & (seventh <= 8) & (short >= 58),
            (seventh <= 3) | ((seventh % 5 == 4) & (short >= 37)),
        ],
        [1800, 1900],
        2000,
    )
    return is_date(year, read_pair(v, 2), read_pair(v, 0))


_SIGNS_1900, _SIGNS_2000 = "-YXWVU", "ABCDEF"
_FI_CHECK = "0123456789abcdefhjklmnprstuvwxy"


def _check_fi(v: Columns) -> Mask:
    wanted = np.array([int(c, 36) for c in _FI_CHECK])
    return np.asarray(v[10] == wanted[read_number(v[[*range(6), 7, 8, 9]]) % 31])


def _is_issued_fi(v: Columns) -> Mask:
    # A letter has its value, another sign minus its code.
    is_1800, is_2000 = v[6] == -ord("+"), np.isin(v[6], [int(c, 36) for c in _SIGNS_2000])
    year = read_pair(v, 4) + np.select([is_1800, is_2000], [1800, 2000], 1900)
    return is_date(year, read_pair(v, 2), read_pair(v, 0)) & (read_number(v[7:10]) >= 2)


def _is_issued_is(v: Columns) -> Mask:
    century = np.select([v[9] == 8, v[9] == 9, v[9] == 0], [1800, 1900, 2000], 0)
    is_person = (century > 0) & is_date(read_pair(v, 4) + century, read_pair(v, 2), read_pair(v, 0))
    return np.asarray((v[0] >= 8) | is_person)


# --- Baltic states ------------------------------------------------------------------------------------------------


def _check_two_sums(v: Columns) -> Mask:
    """Return where the check digit of Estonia and Lithuania is right: where one sum leaves 10, another one holds."""
    first = sum_weighted(v, (1, 2, 3, 4, 5, 6, 7, 8, 9, 1)) % 11
    second = sum_weighted(v, (3, 4, 5, 6, 7, 8, 9, 1, 2, 3)) % 11 % 10
    return np.asarray(v[10] == np.where(first == 10, second, first))


def _read_baltic_year(v: Columns) -> Columns:
    return np.asarray((1800 + 100 * ((v[0] - 1) // 2) + read_pair(v, 1)).astype(np.int32))


def _is_issued_ee(v: Columns) -> Mask:
    return np.asarray(
        (v[0] >= 1) & (v[0] <= 8) & is_date(_read_baltic_year(v), read_pair(v, 3), read_pair(v, 5))
    )


def _is_issued_lt(v: Columns) -> Mask:
    # Who does not know the month or day has zeros there; numbers that begin with 9 follow no rule.
    month, day = read_pair(v, 3), read_pair(v, 5)
    known = is_date(_read_baltic_year(v), np.maximum(month, 1), np.maximum(day, 1))
    return np.asarray(((v[0] >= 1) & (v[0] <= 6) & known) | (v[0] == 9))


def _is_new_lv(v: Columns) -> Mask:
    """Return which numbers were given from July 2017 on: ten random digits after a 3, the second from 2 to 9."""
    return np.asarray((v[0] == 3) & (v[1] >= 2))


def _check_lv(v: Columns) -> Mask:
    total = 1 + sum_weighted(v, (10, 5, 8, 4, 2, 1, 6, 3, 7, 9))
    return np.asarray(_is_new_lv(v) | (v[10] == total % 11 % 10))


def _is_issued_lv(v: Columns) -> Mask:
    year = 1800 + 100 * v[6] + read_pair(v, 4)
    return np.asarray(_is_new_lv(v) | ((v[6] <= 2) & is_date(year, read_pair(v, 2), read_pair(v, 0))))


RULES = (
    NumberRule(
        country="SE",
        number="personnummer",
        title="personnummer, samordningsnummer",
        layouts=("############", "########~####", "######~####"),
        unclear=("##########",),
        signs="-+",
        canonical=("############",),
        check=check_places(range(2, 12), check_luhn),
        is_issued=_is_issued_se,
        expand=_add_century,
        needs_year=True,
        note="canonical with the full year; ten digits only with their sign and with `reference_year`, as the sign "
        "becomes + in the year in which a person turns 100",
        source="Folkbokföringslag (1991:481), 18 and 18 a §",
        examples=(
            "19811228-9874",
            "811228-9874",
            "811228+9874",
            "8112289874",
            "198112889876",
            "200002309870",
        ),
    ),
    NumberRule(
        country="NO",
        number="fodselsnummer",
        title="fødselsnummer, D-nummer, felles hjelpenummer",
        layouts=("###########", "###### #####", "######-#####"),
        check=all_of(check_places(range(10), _FIRST), _SECOND),
        is_issued=_is_issued_no,
        is_local=_is_local_no,
        lost_zeros=True,
        note="common help numbers (first digit 8 or 9) and synthetic ones (month + 80, + 65) are accepted; help "
        "numbers of one institution (month + 40) are temporary",
        source="Folkeregisterforskriften § 2-2-1; Direktoratet for e-helse, Identifikatorer for personer",
        examples=(
            "15108695088",
            "151086 95088",
            "15108695089",
            "15508695010",
            "80000000098",
            "02815698765",
            "31028100089",
        ),
    ),
    NumberRule(
        country="DK",
        number="cpr",
        title="CPR-nummer",
        layouts=("##########", "######-####"),
        is_issued=_is_issued_dk,
        lost_zeros=True,
        note="no check digit: CPR gives numbers without one since 2007",
        source="CPR-kontoret, Personnummeret i CPR",
        examples=("211062-5629", "2110625629", "310262-5629"),
    ),
    NumberRule(
        country="FI",
        number="hetu",
        title="henkilötunnus",
        layouts=("######~###*",),
        signs="+" + _SIGNS_1900 + _SIGNS_2000,
        check=_check_fi,
        is_issued=_is_issued_fi,
        is_local=lambda v: v[7] == 9,
        note="the sign is part of the number: since 2023 it tells persons of one century apart; temporary numbers "
        "(900 to 999) are refused",
        source="Digi- ja väestötietovirasto, Henkilötunnuksen välimerkkiuudistus",
        examples=(
            "131052-308T",
            "131052y308t",
            "131052A308T",
            "131052-308U",
            "131052-908A",
            "131052-001W",
            "310252-308Y",
        ),
    ),
    NumberRule(
        country="IS",
        number="kennitala",
        title="kennitala, kerfiskennitala",
        layouts=("##########", "######-####"),
        is_issued=_is_issued_is,
        lost_zeros=True,
        note="no check digit: none is computed from 18 February 2026 on; numbers of organizations are refused",
        source="Þjóðskrá, Kennitölur án vartölu",
        examples=("120160-3389", "1201603389", "120160-3399", "892350-1739", "520160-3389"),
    ),
    NumberRule(
        country="EE",
        number="isikukood",
        title="isikukood",
        layouts=("###########",),
        check=_check_two_sums,
        is_issued=_is_issued_ee,
        source="EVS 585:2007",
        examples=("37605030299", "37605030298", "97605030294"),
    ),
    NumberRule(
        country="LV",
        number="personas-kods",
        title="personas kods",
        layouts=("###########", "######-#####"),
        check=_check_lv,
        is_issued=_is_issued_lv,
        lost_zeros=True,
        note="numbers from July 2017 on (first digit 3, second 2 to 9) have neither a day of birth nor a check digit",
        source="Pilsonības un migrācijas lietu pārvalde, Personas koda maiņa",
        examples=("161175-19997", "16117519997", "16117519998", "327361-00000", "16117539998"),
    ),
    NumberRule(
        country="LT",
        number="asmens-kodas",
        title="asmens kodas",
        layouts=("###########",),
        check=_check_two_sums,
        is_issued=_is_issued_lt,
        source="RST 1185-91",
        examples=("33309240064", "33309240065", "73309240063"),
    ),
)
