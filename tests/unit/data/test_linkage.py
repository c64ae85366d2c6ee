"""Persons across silos: one person under one key, however it is written down; how many were found in how many silos."""

import unicodedata

import numpy as np
import pandas as pd
import pytest
from test_tables import read, schema, write

from silodp.data import Federation, SiloData
from silodp.data.federation import count_persons_by_silos, find_linkage_doubts

HEADER = "patient,age,sex,ill\n"


def table(keys, form="NFC"):
    return HEADER + "".join(f"{unicodedata.normalize(form, str(key))},50,f,yes\n" for key in keys)


NAMES = [f"Zoë Müller {i}" for i in range(20)]


def test_both_spellings_of_an_accent_are_one_person(tmp_path):
    built = read(tmp_path, berlin=table(NAMES, "NFC"), paris=table(NAMES, "NFD"))
    assert built.users == 20
    assert count_persons_by_silos(built) == {2: 20}
    assert set(built.user_keys) == set(NAMES)
    assert find_linkage_doubts(built) == []


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
def test_keys_that_would_meet_are_two_persons_and_doubted(tmp_path, other):
    built = read(tmp_path, berlin=table(range(1, 21)), paris=table([other(i) for i in range(1, 21)]))
    assert built.users == 40
    assert count_persons_by_silos(built) == {1: 40}
    nobody, similar = find_linkage_doubts(built)
    assert "no person" in nobody
    assert similar.startswith("40 person keys (in berlin, paris) would be 20 ")


def test_a_number_and_a_text_with_zeros_are_doubted_too(tmp_path):
    numbers = tmp_path / "rome.parquet"
    pd.DataFrame({"patient": range(7, 17), "age": 30, "sex": "f", "ill": "no"}).to_parquet(numbers)
    texts = write(tmp_path, berlin=table([f"{i:05}" for i in range(7, 17)])).values()
    _, similar = find_linkage_doubts(Federation.from_tables([*texts, numbers], schema()))
    assert similar.startswith("20 person keys ")


def test_case_is_doubted_and_only_where_both_have_records(tmp_path):
    built = read(tmp_path, berlin=table(["a1", "a2", "b"]), paris=table(["A1", "b", "c"]))
    assert count_persons_by_silos(built) == {1: 4, 2: 1}
    (similar,) = find_linkage_doubts(built)
    assert similar.startswith("2 person keys (in berlin, paris) would be 1 ")
    listed = read(
        tmp_path,
        berlin=table(["a1", "b"]),
        paris=table(["b"]),
        options={"users": ["a1", "A1", "b", "nobody"]},
    )
    assert count_persons_by_silos(listed) == {0: 2, 1: 1, 2: 1}
    assert find_linkage_doubts(listed) == []


def test_the_sentences_name_no_key(tmp_path):
    built = read(tmp_path, berlin=table(["Müller-0815"]), paris=table(["müller-815"]))
    assert len(find_linkage_doubts(built)) == 2
    assert not any("ller" in text or "815" in text for text in find_linkage_doubts(built))


def test_spellings_in_one_silo_are_doubted(tmp_path):
    """Both parts of a person are clipped for themselves within the same sum."""
    (similar,) = find_linkage_doubts(read(tmp_path, berlin=table(["a7", "A7", "a007", "b"])))
    assert similar.startswith("3 person keys (in berlin) would be 1 ")
    assert find_linkage_doubts(read(tmp_path, berlin=table(["a", "b"]))) == []


def test_nothing_is_doubted_without_keys():
    silos = tuple(
        SiloData(name, np.zeros((2, 1), np.float32), np.zeros(2, np.int64), np.array(users))
        for name, users in (("a", [0, 1]), ("b", [2, 3]))
    )
    without_keys = Federation(silos, users=5, test=None)
    assert find_linkage_doubts(without_keys) == []
    assert count_persons_by_silos(without_keys) == {0: 1, 1: 4}
