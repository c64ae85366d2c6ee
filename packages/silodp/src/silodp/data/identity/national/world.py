"""Numbers of countries outside Europe, and of bank accounts and legal entities."""

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
    check_iban,
    check_luhn,
    check_mod97,
    make_weight_check,
    sum_weighted,
)

# --- Asia ---------------------------------------------------------------------------------------------------------


def _check_tr(v: Columns) -> Mask:
    first = (7 * v[0:9:2].sum(axis=0) - v[1:9:2].sum(axis=0)) % 10
    return np.asarray((v[9] == first) & (v[10] == v[:10].sum(axis=0) % 10))


def _make_verhoeff() -> tuple[Columns, Columns]:
    """Return the multiplication of the dihedral group of order 10, and the powers of Verhoeff's permutation."""
    table = np.array(
        [
            [
                (a + b) % 5 if a < 5 and b < 5 else
                5 + (a + b) % 5 if a < 5 else
                5 + (a - 5 - b) % 5 if b < 5 else
                (a - b) % 5
                for b in range(10)
            ]
            for a in range(10)
        ],
        dtype=np.int32,
    )  # fmt: skip
    powers = [np.arange(10), np.array([1, 5, 7, 6, 2, 8, 3, 0, 9, 4])]
    for _ in range(6):
        powers.append(powers[-1][powers[1]])
    return table, np.array(powers, dtype=np.int32)


_DIHEDRAL, _POWERS = _make_verhoeff()


def _check_verhoeff(v: Columns) -> Mask:
    total = np.zeros(v.shape[1], dtype=np.int32)
    for place, column in enumerate(v[::-1]):
        total = _DIHEDRAL[total, _POWERS[place % 8][column]]
    return np.asarray(total == 0)


def _is_issued_in(v: Columns) -> Mask:
    return np.asarray((v[0] >= 2) & ~(v == v[::-1]).all(axis=0))


def _is_issued_kr(v: Columns) -> Mask:
    century = np.array([1800, 1900, 1900, 2000, 2000, 1900, 1900, 2000, 2000, 1800])[v[6]]
    return is_date(century + read_pair(v, 0), read_pair(v, 2), read_pair(v, 4))


_CN_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_CN_REMAINDERS = "10X98765432"


def _expand_cn(codes: Codes, _: int | None) -> tuple[Codes, Mask]:
    """Return numbers of 18 characters: those of 15 digits were given to people born in the 20th century."""
    if len(codes) == 18:
        return codes, np.zeros(codes.shape[1], dtype=bool)
    # Serial numbers from 996 on are of people born earlier.
    is_older = (codes[12] == ord("9")) & (codes[13] == ord("9")) & (codes[14] >= ord("6"))
    century = np.broadcast_to(np.array([[ord("1")], [ord("9")]], dtype=np.uint8), (2, codes.shape[1]))
    body = np.concatenate([codes[:6], century, codes[6:]])
    digits = body.astype(np.int32) - ord("0")
    table = np.frombuffer(_CN_REMAINDERS.encode(), dtype=np.uint8)
    return np.concatenate([body, table[sum_weighted(digits, _CN_WEIGHTS) % 11][None]]), is_older


def _is_issued_cn(v: Columns) -> Mask:
    year = 100 * read_pair(v, 6) + read_pair(v, 8)
    return np.asarray(
        (v[0] > 0) & (year >= 1800) & (year < 2100) & is_date(year, read_pair(v, 10), read_pair(v, 12))
    )


# --- America ------------------------------------------------------------------------------------------------------

_CPF = all_of(
    check_places(range(10), make_weight_check(range(10, 1, -1), 11, "00987654321")),
    make_weight_check(range(11, 1, -1), 11, "00987654321"),
)

_MBI_LETTERS = [int(c, 36) for c in "ACDEFGHJKMNPQRTUVWXY"]


def _is_issued_mbi(v: Columns) -> Mask:
    return np.asarray((v[0] > 0) & ((v < 10) | np.isin(v, _MBI_LETTERS)).all(axis=0))


# --- Australia, New Zealand ---------------------------------------------------------------------------------------

_MEDICARE = make_weight_check((1, 3, 7, 9, 1, 3, 7, 9), 10, "0123456789")


def _drop_issue(codes: Codes, _: int | None) -> tuple[Codes, Mask]:
    """Return Medicare numbers without the issue number, which grows with each new card of the same person."""
    known = np.zeros(codes.shape[1], dtype=bool)
    return (codes if len(codes) == 10 else codes[[*range(9), 10]]), known


_NHI_LETTERS = "_ABCDEFGHJKLMNPQRSTUVWXYZ"
_NHI_OLD = make_weight_check((7, 6, 5, 4, 3, 2), 11, "_0987654321", _NHI_LETTERS)
_NHI_NEW = make_weight_check((7, 6, 5, 4, 3, 2), 23, _NHI_LETTERS[23:0:-1], _NHI_LETTERS)


def _check_nz(v: Columns) -> Mask:
    is_new = v[5] > 9
    return np.where(is_new, _NHI_NEW(v), _NHI_OLD(v)) & ~np.isin(v[6], [int("I", 36), int("O", 36)])


# --- banks --------------------------------------------------------------------------------------------------------

_IBAN_LENGTHS = {
    15: "NO", 16: "BE", 18: "DK FI FK FO GL NL SD", 19: "MK SI", 20: "AT BA EE KZ LT LU MN XK",
    21: "CH HR LI LV", 22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ OM SO TL",
    24: "AD CZ ES MD PK RO SA SE SK TN VG", 25: "LY PT ST", 26: "IS TR", 27: "BI DJ FR GR IT MC MR SM",
    28: "AL AZ BY CY DO GT HN HU LB NI PL SV", 29: "BR EG PS QA UA", 30: "JO KW MU YE", 31: "MT SC", 32: "LC", 33: "RU",
}  # fmt: skip


def _is_issued_iban(v: Columns) -> Mask:
    countries = [36 * int(c[0], 36) + int(c[1], 36) for c in _IBAN_LENGTHS.get(len(v), "").split()]
    return np.isin(36 * v[0] + v[1], countries)


def _space(layout: str) -> str:
    return " ".join(layout[start : start + 4] for start in range(0, len(layout), 4))


_IBANS = tuple("@@##" + "*" * (length - 4) for length in _IBAN_LENGTHS)

RULES = (
    NumberRule(
        country="TR",
        number="kimlik",
        title="T.C. kimlik numarası",
        layouts=("###########",),
        check=_check_tr,
        is_issued=lambda v: v[0] > 0,
        source="5490 sayılı Nüfus Hizmetleri Kanunu",
        examples=("17291716060", "17291716050", "01234567840"),
    ),
    NumberRule(
        country="IL",
        number="teudat-zehut",
        title="identity number (mispar zehut)",
        layouts=("#########", "########-#"),
        check=check_luhn,
        lost_zeros=True,
        source="Population and Immigration Authority",
        examples=("039337423", "39337423", "03933742-3", "039337422"),
    ),
    NumberRule(
        country="IN",
        number="aadhaar",
        title="Aadhaar",
        layouts=("############", "#### #### ####", "####-####-####"),
        check=_check_verhoeff,
        is_issued=_is_issued_in,
        source="UIDAI, A UID Numbering Scheme (2010)",
        examples=("2341 2341 2346", "234123412346", "234123412347", "123456789010"),
    ),
    NumberRule(
        country="KR",
        number="rrn",
        title="resident registration number, foreigner registration number",
        layouts=("#############", "######-#######"),
        is_issued=_is_issued_kr,
        lost_zeros=True,
        note="no check digit: the last six digits are random since 5 October 2020, also where a number is changed",
        source="Ministry of the Interior and Safety, reform of October 2020",
        examples=("971013-9019902", "9710139019902", "971313-9019902"),
    ),
    NumberRule(
        country="CN",
        number="id",
        title="citizen identity number",
        layouts=("#################*", "###############"),
        canonical=("#################*",),
        check=make_weight_check(_CN_WEIGHTS, 11, _CN_REMAINDERS),
        is_issued=_is_issued_cn,
        expand=_expand_cn,
        note="15 digits become 18: the year takes 19, and a check digit is added; serial numbers from 996 on, of "
        "people born before 1900, are refused",
        source="GB 11643-1999",
        examples=(
            "11010519491231002X",
            "11010519491231002x",
            "110105491231002",
            "110105491231996",
            "110105194912310020",
            "110105179912310024",
        ),
    ),
    NumberRule(
        country="TH",
        number="id",
        title="identification number",
        layouts=("#############", "#-####-#####-##-#"),
        check=make_weight_check(range(13, 1, -1), 11, "10987654321"),
        is_issued=lambda v: (v[0] > 0) & (v[0] < 9),
        source="Department of Provincial Administration",
        examples=("1-2345-45678-78-1", "1234545678781", "1234545678782", "9123456789010"),
    ),
    NumberRule(
        country="BR",
        number="cpf",
        title="CPF",
        layouts=("###########", "###.###.###-##", "#########-##"),
        check=_CPF,
        lost_zeros=True,
        note="a check digit of 10 is written as 0",
        source="Receita Federal, Cadastro de Pessoas Físicas",
        examples=("390.533.447-05", "39053344705", "39053344706", "11111111111"),
    ),
    NumberRule(
        country="BR",
        number="cns",
        title="Cartão Nacional de Saúde",
        layouts=("###############", "### #### #### ####"),
        check=make_weight_check(range(15, 0, -1), 11),
        is_issued=lambda v: np.isin(v[0], [1, 2, 7, 8, 9]),
        note="one person may have several: a provisional number (7, 8, 9) and a final one (1, 2)",
        source="DATASUS, rotina de validação do CNS",
        examples=("898001160660761", "898 0011 6066 0761", "898001160660762", "398001160660700"),
    ),
    NumberRule(
        country="CA",
        number="sin",
        title="social insurance number",
        layouts=("#########", "### ### ###", "###-###-###"),
        check=check_luhn,
        is_issued=lambda v: (v[0] > 0) & (v[0] != 8),
        source="Service Canada, SIN code of practice",
        examples=("123 456 782", "123-456-782", "123456782", "123456783", "812345676"),
    ),
    NumberRule(
        country="US",
        number="mbi",
        title="Medicare Beneficiary Identifier",
        layouts=("#@*#@*#@@##", "#@*#-@*#-@@##"),
        is_issued=_is_issued_mbi,
        note="no check digit",
        source="CMS, Understanding the Medicare Beneficiary Identifier (MBI) Format",
        examples=("1EG4-TE5-MK73", "1eg4te5mk73", "1SG4-TE5-MK73"),
    ),
    NumberRule(
        country="AU",
        number="medicare",
        title="Medicare number with the individual reference number",
        layouts=("###########", "#### ##### # #", "#### ##### #-#", "#### ##### #/#"),
        canonical=("##########",),
        check=check_places(range(9), _MEDICARE),
        is_issued=lambda v: (v[0] >= 2) & (v[0] <= 6) & (v[9] > 0),
        expand=_drop_issue,
        note="canonical without the issue number, which grows with each new card; ten digits are of a family and are "
        "refused",
        source="Services Australia, Medicare card number check digit",
        examples=(
            "2951 87312 5 1",
            "29518731251",
            "2951 87312 6 1",
            "29518731351",
            "19518731151",
            "29518731250",
        ),
    ),
    NumberRule(
        country="AU",
        number="ihi",
        title="Individual Healthcare Identifier",
        layouts=("################", "#### #### #### ####"),
        check=check_luhn,
        is_issued=lambda v: read_number(v[:6]) == 800360,
        source="Healthcare Identifiers Service; AS 4846",
        examples=("8003 6088 3335 7361", "8003608833357361", "8003608833357362", "8003618833357360"),
    ),
    NumberRule(
        country="NZ",
        number="nhi",
        title="National Health Index number",
        layouts=("@@@####", "@@@##@@"),
        check=_check_nz,
        note="the format of today, and that of the years to come (a letter in the sixth place)",
        source="HISO 10046:2024 Consumer Health Identity Standard",
        examples=("ZZZ0016", "zzz0016", "ZBN77VL", "ZZZ0017", "ALU18KZ"),
    ),
    NumberRule(
        country="",
        number="iban",
        title="IBAN",
        layouts=(*_IBANS, *map(_space, _IBANS)),
        check=check_iban,
        is_issued=_is_issued_iban,
        note="the length is that of the country; the form of the rest is not checked",
        source="ISO 13616; SWIFT, IBAN Registry",
        examples=(
            "DE89 3704 0044 0532 0130 00",
            "de89370400440532013000",
            "DE98370400440532013000",
            "DE3600000000000000000000",
        ),
    ),
    NumberRule(
        country="",
        number="lei",
        title="legal entity identifier",
        layouts=("*" * 18 + "##",),
        check=check_mod97,
        source="ISO 17442",
        examples=("5493001KJTIIGC8Y1R12", "5493001kjtiigc8y1r12", "5493001KJTIIGC8Y1R13"),
    ),
)
