"""Persons across silos: one person under one key, however it is written down; how many were found in how many silos."""

import unicodedata

import numpy as np
import pandas as pd
import pytest

from silodp.config.resolve import load_config
from silodp.data import Federation, IdentityProfile, SiloData
from silodp.data.federation import count_persons_by_silos
from silodp.data.identity.check import check_cells
from silodp.data.identity.linkage import find_few_persons, list_key_warnings, list_linkage_warnings
from support.refusals import refused
from support.tables import read, schema, write

HEADER = "patient,age,sex,ill\n"


def table(keys, form="NFC"):
    return HEADER + "".join(f"{unicodedata.normalize(form, str(key))},50,f,yes\n" for key in keys)


NAMES = [f"Zoë Müller {i}" for i in range(20)]


def test_both_spellings_of_an_accent_are_one_person(tmp_path):
    built = read(tmp_path, berlin=table(NAMES, "NFC"), paris=table(NAMES, "NFD"))
    assert built.users == 20
    assert count_persons_by_silos(built) == {2: 20}
    assert set(built.user_keys) == set(NAMES)
    assert list_linkage_warnings(built) == []


def test_both_spellings_meet_in_the_list_of_users_categories_classes_and_headers(tmp_path):
    (tmp_path / "users.txt").write_text("\n".join(unicodedata.normalize("NFD", name) for name in NAMES))
    nfd = unicodedata.normalize("NFD", "patient,größe,sex,ill\nZoë Müller 3,50,männlich,krank\n")
    path = tmp_path / "rome.csv"
    path.write_text(nfd)
    plan = schema(
        numeric={"größe": (20, 80)},
        categorical={"sex": ["männlich", "f"]},
        classes=["gesund", "krank"],
        users=tmp_path / "users.txt",
    )
    built = Federation.from_tables([path], plan)
    assert built.users == 20
    assert built.silos[0].user.tolist() == [3]
    assert built.silos[0].x.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(
    "other",
    [
        lambda i: f"{i:05}",
        lambda i: f"{i}\N{ZERO WIDTH SPACE}",
        lambda i: "".join(chr(0xFF10 + int(digit)) for digit in str(i)),  # full-width digits
    ],
)
def test_keys_that_would_meet_are_two_persons_and_warned_of(tmp_path, other):
    built = read(tmp_path, berlin=table(range(1, 21)), paris=table([other(i) for i in range(1, 21)]))
    assert built.users == 40
    assert count_persons_by_silos(built) == {1: 40}
    nobody, similar, *_ = list_linkage_warnings(built)
    assert "no person" in nobody
    assert similar.startswith("40 person keys (in berlin, paris) would be 20 ")


def test_a_number_and_a_text_with_zeros_are_warned_of_too(tmp_path):
    numbers = tmp_path / "rome.parquet"
    pd.DataFrame({"patient": range(7, 17), "age": 30, "sex": "f", "ill": "no"}).to_parquet(numbers)
    texts = write(tmp_path, berlin=table([f"{i:05}" for i in range(7, 17)])).values()
    _, similar = list_linkage_warnings(Federation.from_tables([*texts, numbers], schema()))
    assert similar.startswith("20 person keys ")


def test_case_is_warned_of_and_only_where_both_have_records(tmp_path):
    built = read(tmp_path, berlin=table(["a1", "a2", "b"]), paris=table(["A1", "b", "c"]))
    assert count_persons_by_silos(built) == {1: 4, 2: 1}
    (similar,) = list_linkage_warnings(built)
    assert similar.startswith("2 person keys (in berlin, paris) would be 1 ")
    listed = read(
        tmp_path,
        berlin=table(["a1", "b"]),
        paris=table(["b"]),
        options={"users": ["a1", "A1", "b", "nobody"]},
    )
    assert count_persons_by_silos(listed) == {0: 2, 1: 1, 2: 1}
    assert list_linkage_warnings(listed) == []


def test_the_sentences_name_no_key(tmp_path):
    built = read(tmp_path, berlin=table(["Müller-0815"]), paris=table(["müller-815"]))
    assert len(list_linkage_warnings(built)) == 2
    assert not any("ller" in text or "815" in text for text in list_linkage_warnings(built))


def test_spellings_in_one_silo_are_warned_of(tmp_path):
    """Both parts of a person are clipped for themselves within the same sum."""
    (similar,) = list_linkage_warnings(read(tmp_path, berlin=table(["a7", "A7", "a007", "b"])))
    assert similar.startswith("3 person keys (in berlin) would be 1 ")
    assert list_linkage_warnings(read(tmp_path, berlin=table(["a", "b"]))) == []


def test_silos_of_one_or_two_persons_are_warned_of(tmp_path):
    """Of so few, all that is public of the silo is about them, and noise leaves nothing."""
    for silos, where in (
        ({"a": ["1", "2"], "b": ["1", "2", "3"]}, "(in a)"),
        ({"a": ["1"], "b": ["2", "3"], "c": ["1", "2", "3"]}, "(in 2 silos)"),
        ({"a": ["1", "2"], "b": ["2"]}, "(in all silos together)"),
        ({"a": ["1", "2", "3"]}, None),
    ):
        built = read(tmp_path, **{name: table(keys) for name, keys in silos.items()})
        warnings = find_few_persons(built.silos)
        assert len(warnings) == (where is not None)
        assert all(where in warning for warning in warnings)


def test_keys_that_became_days_in_a_text_file_are_warned_of():
    keys = dict.fromkeys(["3-40", "7-40", "P12"], 2)
    for changed in ("03-May", "3. Mai", "2026-05-03", "03.05.2026", "5/3/26", "05:03", "TRUE", "May-03"):
        (warning,) = list_key_warnings({"a": {**keys, changed: 1}})
        assert warning.startswith("1 person key (in a) written as a day")
        assert list_key_warnings({"a": {changed: 1}}) == []
    assert (
        list_key_warnings(
            {"a": {**keys, **dict.fromkeys(["3-5", "12/345", "1.2/3", "SEPT1", "20260503"], 1)}}
        )
        == []
    )


def test_nothing_is_warned_of_without_keys():
    silos = tuple(
        SiloData(name, np.zeros((2, 1), np.float32), np.zeros(2, np.int64), np.array(users))
        for name, users in (("a", [0, 1]), ("b", [2, 3]))
    )
    without_keys = Federation(silos, users=5, test=None)
    assert list_linkage_warnings(without_keys) == []
    assert count_persons_by_silos(without_keys) == {0: 1, 1: 4}


def test_placeholders_are_warned_of_in_the_silo_that_has_them(tmp_path):
    """66 of 240 rows had the keys 0, 9999999999 or unknown, and counted as three persons."""
    keys = [f"{1 + i % 60:06}" for i in range(90)] + ["0"] * 11 + ["9999999999"] * 12 + ["unknown"] * 7
    (warning,) = list_linkage_warnings(read(tmp_path, berlin=table(keys), paris=table(keys[:60])))
    assert warning.startswith("3 person keys (in berlin) as programs")
    assert "30 of 120 rows" in warning
    assert not any(key in warning for key in ("9999999999", "000000"))


@pytest.mark.parametrize(
    "key",
    [
        "unknown",
        "UNBEKANNT",
        "<unknown>",
        "n.a.",
        "kein ID",
        "-1",
        "-999",
        "xxx",
        "???",
        "00000000",
        "99999999",
    ],
)
def test_what_names_nobody_is_warned_of_in_one_row_and_in_a_list(key):
    (warning,) = list_key_warnings({"users": dict.fromkeys([*map(str, range(10, 99)), key], 1)})
    assert warning.startswith("1 person key (in users) as programs write for unknown persons")


def test_numbers_that_may_name_persons_are_warned_of_by_their_rows_alone():
    rows = {str(number): 2 for number in range(1000)}
    assert list_key_warnings({"a": rows}) == []
    for key in ("0", "111", "999"):
        (warning,) = list_key_warnings({"a": {**rows, key: 9}})
        assert "9 of 2,007 rows" in warning


@pytest.mark.parametrize(
    ("many", "is_warned"),
    [
        ({"A7": 15}, True),
        ({"A7": 15, "B8": 12}, True),
        ({"A7": 7}, False),
        ({"A7": 15, "B8": 9, "C9": 5}, False),
    ],
)
def test_a_key_with_far_more_rows_than_others_is_warned_of(many, is_warned):
    warnings = list_key_warnings({"a": {**{f"P{n}": 2 for n in range(40)}, **many}})
    assert len(warnings) == is_warned
    if is_warned:
        assert warnings[0].startswith(f"{len(many)} person key")


@pytest.mark.parametrize(
    ("others", "is_warned"), [(3, False), (4, True), (67, True), (68, False)], ids=lambda one: str(one)
)
def test_a_key_is_outlying_among_some_others_and_with_a_share_of_all_rows(others, is_warned):
    """One of two persons may well have most rows, and in a large table one with a few more stands for nobody else."""
    rows = {f"P{n}": 2 for n in range(others)} | {"A7": 15}
    assert len(list_key_warnings({"a": rows})) == is_warned


@pytest.mark.parametrize(
    "key",
    [
        *(f"17{c}" for c in "\N{ZERO WIDTH SPACE}\N{SOFT HYPHEN}\N{HANGUL FILLER}\N{VARIATION SELECTOR-1}"),
        "１７",
        "١٧",
    ],
)
def test_characters_that_another_silo_may_not_have_are_warned_of_without_their_twin(key):
    """In a deployment no party sees the keys of two silos."""
    (warning,) = list_key_warnings({"a": {key: 1, "18": 1}})
    assert warning.startswith("1 person key (in a) with invisible characters")
    assert len(list_key_warnings({"a": {key: 1}, "b": {"17": 1}})) == 2
    assert list_key_warnings({"a": {"Zoë Müller": 1, "Łukasz-3": 1, "김": 1, "17": 1}}) == []


@pytest.mark.parametrize(
    "key", ["#REF!", "#VALUE!", "#DIV/0!", "#NAME?", "#NUM!", "#NULL!", "#SPILL!", "Err:502"]
)
def test_an_error_of_a_spreadsheet_is_no_person(tmp_path, key):
    with refused("data.value"):
        read(tmp_path, berlin=table(["17", key]))
    assert read(tmp_path, berlin=table(["17", "#17", "#AB12", "#REF!x"])).users == 4


def test_a_run_without_a_training_record_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("id,age,y\n")
    (tmp_path / "users.txt").write_text("p1\np2\n")
    config = tmp_path / "config.toml"
    config.write_text(
        """
        rounds = 1
        [data]
        source = "tables"
        files = ["a.csv", "b.csv"]
        [data.schema]
        user = "id"
        label = "y"
        classes = [0, 1]
        numeric = { age = [0, 100] }
        users = "users.txt"
        [method]
        name = "uldp-sgd"
        noise_multiplier = 5.0
        clip = 1.0
        """
    )
    with refused("data.no_records"):
        load_config(config).load_federation()


def test_keys_that_count_from_one_in_several_tables_are_named():
    """Two hospitals of 200 numbered their patients 1 to 200 each: 400 people were 200 persons, without a word."""
    hospitals = {
        "north": {str(n): 2 for n in range(1, 201)},
        "south": {str(n): 1 for n in range(1, 181) if n % 4},
    }
    (warning,) = list_key_warnings(hospitals)
    assert "135 keys" in warning
    assert "north, south" in warning
    for others in (
        {f"{n * 7919 % 9973}": 1 for n in range(1, 200)},  # random numbers
        {f"p{n}": 1 for n in range(1, 200)},
        {str(n): 1 for n in range(1000, 1200)},
        {str(n): 1 for n in range(1, 9)},
        {"1" + "0" * 5000 + str(n): 1 for n in range(20)},  # more digits than Python converts
        {f"{n:03}": 1 for n in range(1, 100)},  # other texts: nobody is shared
    ):
        found = list_key_warnings({"north": hospitals["north"], "south": others})
        assert not any("count from 1" in sentence for sentence in found)
    assert list_key_warnings({"north": hospitals["north"]}) == []  # one table may number its persons
    even, odd = ({str(n): 1 for n in range(first, 200, 2)} for first in (2, 1))
    assert list_key_warnings({"north": even, "south": {**odd, "2": 1}}) == []  # few are shared


def test_a_check_names_a_column_that_counts_from_one():
    profile = IdentityProfile(study="s", kind="digits", width=8, population=500)
    (found,) = check_cells(profile, [f"{n:08}" for n in range(1, 201)] * 2).suspicions
    assert (found.kind, found.persons, found.rows[0]) == ("numbered", 200, 1)
    assert check_cells(profile, [f"{n * 104729 % 10**8:08}" for n in range(1, 201)]).suspicions == ()
