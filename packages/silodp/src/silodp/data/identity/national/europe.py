"""Numbers of other European countries."""

from __future__ import annotations

import numpy as np

from silodp.data.identity.national.rule import (
    NumberRule,
    check_places,
    is_date,
    read_number,
    read_pair,
)
from silodp.data.identity.spellings import (
    Columns,
    Mask,
    make_weight_check,
    sum_weighted,
)

# --- Poland, Czechia, Belgium -------------------------------------------------------------------------------------


def _is_issued_pl(v: Columns) -> Mask:
    month = read_pair(v, 2)
    century = np.array([1900, 2000, 2100, 2200, 1800])[month // 20]
    return is_date(read_pair(v, 0) + century, month % 20, read_pair(v, 4))


def _check_cz(v: Columns) -> Mask:
    if len(v) == 9:  # before 1954
        return np.ones(v.shape[1], dtype=bool)
    # Until 1985 a remainder of 10 was written as 0.
    return np.asarray(v[9] == read_number(v[:9]) % 11 % 10)


def _is_issued_cz(v: Columns) -> Mask:
    short, month = read_pair(v, 0), read_pair(v, 2)
    is_old = len(v) == 9
    year = short + np.where(short >= 54, 1800, 1900) + 100 * (not is_old)
    month = month - 50 * (month > 50)
    month = month - 20 * ((month > 20) & (not is_old))  # where the numbers of a day are used up
    was_born = (short < 54) | (short >= 80) if is_old else True
    return np.asarray(is_date(year, month, read_pair(v, 4)) & was_born)


def _check_be(v: Columns) -> Mask:
    number, check = read_number(v[:9]), read_pair(v, 9)
    # A 2 stands before the number of who was born from 2000 on.
    return np.asarray((check == 97 - number % 97) | (check == 97 - (number + 2_000_000_000) % 97))


def _is_issued_be(v: Columns) -> Mask:
    # 20 or 40 more in a bis number; 00 where the month is not known. The day may be any number where it is not known.
    month = read_pair(v, 2)
    return np.asarray(month - np.select([month >= 40, month >= 20], [40, 20], 0) <= 12)


# --- France, Spain, Italy -----------------------------------------------------------------------------------------


def _check_fr(v: Columns) -> Mask:
    # Corsica's 2A and 2B count as 19 and 18.
    plain = v[:13].copy()
    for letter, ones in ((10, 9), (11, 8)):
        is_corsica = v[6] == letter
        plain[5, is_corsica], plain[6, is_corsica] = 1, ones
    return np.asarray(read_pair(v, 13) == 97 - read_number(plain) % 97)


def _is_issued_fr(v: Columns) -> Mask:
    is_department = (v[6] < 10) | ((v[5] == 2) & (v[6] <= 11))
    return np.asarray(np.isin(v[0], [1, 2, 3, 4, 7, 8]) & is_department)


_ES_CHECK = np.array([int(c, 36) for c in "TRWAGMYFPDXBNJZSQVHLCKE"])


def _check_es(v: Columns) -> Mask:
    # X, Y and Z of a foreigner's number count as 0, 1 and 2.
    first = np.where(v[0] > 9, v[0] - int("X", 36), v[0])
    return np.asarray(v[8] == _ES_CHECK[read_number(np.concatenate([first[None], v[1:8]])) % 23])


_IT_ODD = np.array(
    [1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23]
)
_IT_DIGITS = np.full(36, -1000)
_IT_DIGITS[:10] = range(10)
_IT_DIGITS[[int(c, 36) for c in "LMNPQRSTUV"]] = range(10)
_IT_MONTHS = np.zeros(36, dtype=np.int32)
_IT_MONTHS[[int(c, 36) for c in "ABCDEHLMPRST"]] = range(1, 13)


def _check_it(v: Columns) -> Mask:
    values = np.where(v > 9, v - 10, v)
    return np.asarray(values[15] == (_IT_ODD[values[0:15:2]].sum(axis=0) + values[1:15:2].sum(axis=0)) % 26)


def _is_issued_it(v: Columns) -> Mask:
    digits = _IT_DIGITS[v]
    day = read_pair(digits, 9)
    has_digits = (digits[[6, 7, 9, 10, 12, 13, 14]] >= 0).all(axis=0)
    return has_digits & is_date(2000 + read_pair(digits, 6), _IT_MONTHS[v[8]], day - 40 * (day > 40))


# --- Germany, Austria ---------------------------------------------------------------------------------------------


def _check_kvnr(v: Columns) -> Mask:
    letter = v[0] - 9  # A counts as 01, Z as 26
    total = np.zeros(v.shape[1], dtype=np.int64)
    for place, digit in enumerate([letter // 10, letter % 10, *v[1:9]]):
        product = digit * (1 + place % 2)
        total += product - 9 * (product > 9)
    return np.asarray(v[9] == total % 10)


def _check_mod_11_10(v: Columns) -> Mask:
    """Return where ISO 7064, MOD 11,10 holds."""
    rest = np.full(v.shape[1], 10)
    for digit in v[:-1]:
        total = (rest + digit) % 10
        rest = 2 * np.where(total == 0, 10, total) % 11
    return np.asarray(v[-1] == (11 - rest) % 10)


def _is_issued_tax_id(v: Columns) -> Mask:
    counts = np.stack([(v[:10] == digit).sum(axis=0) for digit in range(10)])
    return np.asarray((v[0] > 0) & ((counts > 1).sum(axis=0) == 1) & (counts.max(axis=0) <= 3))


def _is_issued_at(v: Columns) -> Mask:
    # The months 13 to 15 stand where the day is not known, or its numbers are used up.
    month, day = read_pair(v, 6), read_pair(v, 4)
    known = is_date(2000 + read_pair(v, 8), month, day)
    return np.asarray((v[0] > 0) & (known | ((month >= 13) & (month <= 15) & (day >= 1) & (day <= 31))))


def _check_ean(v: Columns) -> Mask:
    return np.asarray(sum_weighted(v, (1, 3) * 6 + (1,)) % 10 == 0)


def _is_issued_jmbg(v: Columns) -> Mask:
    year = read_number(v[4:7]).astype(np.int32)
    return is_date(year + np.where(year < 800, 2000, 1000), read_pair(v, 2), read_pair(v, 0))


RULES = (
    NumberRule(
        country="GB",
        number="nhs",
        title="NHS number, CHI number, H&C number",
        layouts=("##########", "### ### ####", "###-###-####"),
        check=make_weight_check((10, 9, 8, 7, 6, 5, 4, 3, 2), 11, "0_987654321"),
        lost_zeros=True,
        source="NHS Data Model and Dictionary, NHS NUMBER",
        examples=("943 476 5919", "943-476-5919", "9434765919", "9434765918", "9999999999"),
    ),
    NumberRule(
        country="PL",
        number="pesel",
        title="PESEL",
        layouts=("###########",),
        check=make_weight_check((1, 3, 7, 9, 1, 3, 7, 9, 1, 3, 1), 10),
        is_issued=_is_issued_pl,
        lost_zeros=True,
        source="Ustawa o ewidencji ludności, art. 15",
        examples=("44051401359", "44051401358", "02270803624", "44131401350"),
    ),
    NumberRule(
        country="CZ",
        number="rodne-cislo",
        title="rodné číslo",
        layouts=("##########", "######/####", "#########", "######/###"),
        check=_check_cz,
        is_issued=_is_issued_cz,
        note="nine digits without a check digit before 1954",
        source="Zákon č. 133/2000 Sb., § 13; NZIS, Struktura rodného čísla",
        examples=("710319/2745", "7103192745", "991231123", "7103192746", "705015123", "7133192748"),
    ),
    NumberRule(
        country="NL",
        number="bsn",
        title="burgerservicenummer",
        layouts=("#########", "####.##.###"),
        check=make_weight_check((9, 8, 7, 6, 5, 4, 3, 2), 11, "0123456789_"),
        lost_zeros=True,
        source="Besluit burgerservicenummer; Logisch ontwerp BSN",
        examples=("111222333", "1112.22.333", "111222334"),
    ),
    NumberRule(
        country="BE",
        number="rijksregisternummer",
        title="rijksregisternummer, bisnummer",
        layouts=("###########", "##.##.##-###.##", "######-###-##", "###### ### ##"),
        check=_check_be,
        is_issued=_is_issued_be,
        lost_zeros=True,
        note="the check digits say the century",
        source="Koninklijk besluit van 3 april 1984; KSZ, Bisregister",
        examples=("85.07.30-033.28", "85073003328", "85473003317", "85073003329", "85133003302"),
    ),
    NumberRule(
        country="FR",
        number="nir",
        title="numéro d'inscription au répertoire",
        layouts=("#####" + "#*" + "########", "# ## ## #* ### ### ##", "#####" + "#*" + "###### ##"),
        check=_check_fr,
        is_issued=_is_issued_fr,
        note="with its key of two digits; 2A and 2B of Corsica",
        source="INSEE, Numéro d'inscription au répertoire",
        examples=(
            "2 95 10 99 126 111 93",
            "295109912611193",
            "2951099126111 93",
            "253072B07300470",
            "295109912611194",
            "295109C12611112",
            "095109912611196",
        ),
    ),
    NumberRule(
        country="ES",
        number="dni-nie",
        title="DNI, NIE",
        layouts=("########@", "########-@", "@#######@", "@-#######-@"),
        check=_check_es,
        is_issued=lambda v: (v[0] <= 9) | (v[0] >= int("X", 36)),
        note="X, Y and Z of a NIE stay, as they are other persons than the same digits",
        source="Real Decreto 1553/2005; Orden INT/2058/2008",
        examples=("12345678Z", "12345678-z", "X2482300W", "12345678A", "A2345678T"),
    ),
    NumberRule(
        country="IT",
        number="codice-fiscale",
        title="codice fiscale",
        layouts=("@@@@@@**@**@***@", "@@@ @@@ **@** @***@"),
        check=_check_it,
        is_issued=_is_issued_it,
        note="letters that stand for digits (omocodia) stay, as they tell two persons apart; numbers of 11 digits are "
        "refused",
        source="Decreto ministeriale 23 dicembre 1976, n. 13813",
        examples=(
            "RCCMNL83S18D969H",
            "rccmnl83s18d969h",
            "RCCMNL83S18D96VW",
            "RCCMNL83S18D969A",
            "RCCMNL83S78D969N",
            "RCCMNLA3S18D969P",
        ),
    ),
    NumberRule(
        country="PT",
        number="nif",
        title="número de identificação fiscal",
        layouts=("#########", "### ### ###"),
        check=make_weight_check((9, 8, 7, 6, 5, 4, 3, 2), 11, "00987654321"),
        is_issued=lambda v: v[0] > 0,
        note="a check digit of 10 is written as 0",
        source="Decreto-Lei n.º 14/2013",
        examples=("501964843", "501 964 843", "501964842", "012345679"),
    ),
    NumberRule(
        country="DE",
        number="kvnr",
        title="Krankenversichertennummer, unveränderbarer Teil",
        layouts=("@#########",),
        check=_check_kvnr,
        note="the ten characters that stay for life; the number of the insurer that follows is refused",
        source="§ 290 SGB V; GKV-Spitzenverband, Richtlinie zur Krankenversichertennummer",
        examples=("A123456780", "a123456780", "A123456781"),
    ),
    NumberRule(
        country="DE",
        number="steuer-id",
        title="steuerliche Identifikationsnummer",
        layouts=("###########", "## ### ### ###"),
        check=_check_mod_11_10,
        is_issued=_is_issued_tax_id,
        source="§ 139b AO; BZSt, Steuerliche Identifikationsnummer",
        examples=("36 574 261 809", "36574261809", "36574261890", "01123456782", "12345678903"),
    ),
    NumberRule(
        country="AT",
        number="svnr",
        title="Sozialversicherungsnummer",
        layouts=("##########", "#### ######", "####-######"),
        check=check_places(
            (0, 1, 2, 4, 5, 6, 7, 8, 9, 3), make_weight_check((3, 7, 9, 5, 8, 4, 2, 1, 6), 11, "0123456789_")
        ),
        is_issued=_is_issued_at,
        source="Dachverband der Sozialversicherungsträger; Parlament, 4690/AB XXIII. GP",
        examples=("1237 010180", "1237010180", "1237 011380", "2237010180", "0090010180"),
    ),
    NumberRule(
        country="CH",
        number="ahv",
        title="AHV-Nummer",
        layouts=("#############", "###.####.####.##"),
        check=_check_ean,
        is_issued=lambda v: (v[0] == 7) & (v[1] == 5) & (v[2] == 6),
        source="Bundesamt für Sozialversicherungen, AHV-Nummer",
        examples=("756.9217.0769.85", "7569217076985", "756.9217.0769.84", "7579217076984"),
    ),
    NumberRule(
        country="RS",
        number="jmbg",
        title="jedinstveni matični broj građana",
        layouts=("#############",),
        check=make_weight_check((7, 6, 5, 4, 3, 2, 7, 6, 5, 4, 3, 2), 11, "00987654321"),
        is_issued=_is_issued_jmbg,
        lost_zeros=True,
        source="Zakon o jedinstvenom matičnom broju građana",
        examples=("0101006500006", "101006500006", "0101006500007", "3102006500003"),
    ),
)
