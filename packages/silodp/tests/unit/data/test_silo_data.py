import dataclasses

import numpy as np
import pytest

from silodp.data import Federation, SiloData
from silodp.errors import SilodpError


def silo(name="a", n=3, **changes):
    fields = {
        "name": name,
        "x": np.arange(2 * n, dtype=np.float32).reshape(n, 2),
        "y": np.arange(n) % 2,
        "user": np.arange(n),
    }
    return SiloData(**{**fields, **changes})


def federation(*silos, **changes):
    return Federation(**{"silos": silos or (silo(),), "users": 4, "test": None, "classes": 2, **changes})


def test_counts_are_per_silo_and_user():
    built = federation(silo("a", user=np.array([0, 0, 3])), silo("b", user=np.array([1, 0, 3])))
    np.testing.assert_array_equal(built.counts(), [[2, 0, 0, 1], [1, 1, 0, 1]])
    assert built.counts().dtype == np.int64


def test_empty_silos_and_users_without_records_are_normal():
    built = federation(silo("a"), silo("b", n=0), users=10)
    assert built.counts().sum(axis=1).tolist() == [3, 0]
    assert built.counts()[:, 3:].sum() == 0


def test_test_records_may_belong_to_nobody_but_training_records_may_not():
    nobody = np.full(3, -1)
    assert federation(test=silo("test", user=nobody)).test is not None
    with pytest.raises(SilodpError, match=r"user -1 is outside 0\.\.3"):
        federation(silo(user=nobody))


NAN, INF = np.float32([[0, 1], [np.nan, 0], [0, 0]]), np.float32([[0, 1], [0, 0], [0, np.inf]])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": ""}, "give every silo a name"),
        ({"x": [[1.0, 2.0]]}, "x is a list; give a numpy array"),
        ({"x": np.zeros((3, 2))}, "float64; give .* as float32"),
        ({"x": np.zeros(3, dtype=np.float32)}, r"shape \(3,\)"),
        ({"x": NAN}, "x of record 1 is not finite"),
        ({"x": INF}, "x of record 2 is not finite"),
        ({"y": np.zeros(3)}, "dtype float64; give"),
        ({"y": np.zeros((3, 3), dtype=np.float32)}, r"shape \(3, 3\)"),
        ({"y": np.array([0, np.nan, 0], dtype=np.float32)}, "y of record 1 is not finite"),
        ({"y": np.array([[2, 1]] * 3, dtype=np.float32)}, "event other than 0 or 1"),
        ({"y": np.array([[1, -1]] * 3, dtype=np.float32)}, "negative time"),
        ({"user": np.zeros(3)}, "int64 user numbers"),
        ({"user": np.zeros(2, dtype=np.int64)}, "3, 3 and 2 records"),
    ],
)
def test_silo_refuses(changes, sentence):
    with pytest.raises(SilodpError, match=sentence):
        silo(**changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"silos": ()}, "at least one SiloData"),
        ({"silos": (silo("a"), silo("a"))}, "two silos are named 'a'"),
        ({"users": 0}, "users is 0"),
        ({"users": 2}, r"user 2 is outside 0\.\.1"),
        ({"classes": 1}, "classes is 1"),
        ({"silos": (silo(y=np.array([0, 2, 1])),)}, r"label 2 is outside 0\.\.1"),
        ({"silos": (silo(y=np.zeros(3, dtype=np.float32)),)}, "labels are float32 but classes is 2"),
        ({"silos": (silo(), silo("b", x=np.zeros((3, 5), dtype=np.float32)))}, "the same columns"),
        ({"silos": (silo(), silo("b", y=np.zeros(3, dtype=np.float32)))}, "the same kind of label"),
        ({"test": silo("test", x=np.zeros((3, 5), dtype=np.float32))}, "the same columns"),
        ({"features": ("age",)}, "1 feature names"),
        ({"user_keys": ("a",)}, "1 user keys for 4 users"),
        ({"user_keys": ("a", "b", "c", "a")}, "4 user keys for 4 users; give one each, all different"),
        ({"user_keys": (1, 2, 3, 4)}, "user_keys is"),
        ({"users": 2.0}, r"users is 2\.0"),
        ({"users": True}, "users is True"),
        ({"classes": "2"}, "classes is '2'"),
        ({"classes": 2.5}, r"classes is 2\.5"),
        ({"silos": (1,)}, "a silo or test is a int"),
        ({"test": 3}, "a silo or test is a int"),
    ],
)
def test_federation_refuses(changes, sentence):
    with pytest.raises(SilodpError, match=sentence):
        federation(**changes)


def test_digest_tells_data_apart():
    base = federation()
    assert base.digest() == federation().digest()
    other_x = silo(x=np.zeros((3, 2), dtype=np.float32))
    others = [
        federation(other_x),
        federation(silo("b")),
        federation(silo(user=np.array([0, 1, 3]))),
        federation(users=5),
        federation(name="another"),
        federation(test=silo("test")),
        federation(silo(), silo("b", n=0)),
    ]
    assert len({base.digest(), *(other.digest() for other in others)}) == len(others) + 1


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        silo().name = "b"


@pytest.mark.parametrize("kind", [np.int32, np.uint8, bool])
def test_whole_numbers_are_measurements_in_float32_or_ids_in_int64(kind):
    with pytest.raises(SilodpError) as caught:
        silo(x=np.ones((3, 2), dtype=kind))
    assert caught.value.code == "model.integer_inputs"


def test_records_without_features_are_refused():
    with pytest.raises(SilodpError) as caught:
        silo(x=np.ones((3, 0), dtype=np.float32))
    assert caught.value.code == "data.array"


def test_numbers_of_numpy_are_numbers():
    built = Federation((silo(),), users=np.int64(4), test=None, classes=np.int8(2))
    assert type(built.users) is int
    assert type(built.classes) is int
