import hashlib
import json
from itertools import pairwise

import numpy as np
import pytest

from silodp.assumption import Assumption
from silodp.data import Federation, PublicData, SiloData
from silodp.training.made_up import make_up_records
from support.refusals import refused


def federation(labels: str, **settings) -> Federation:
    y = {
        "classes": np.array([0, 2, 1]),
        "real": np.zeros(3, np.float32),
        "survival": np.ones((3, 2), np.float32),
    }[labels]
    silos = tuple(SiloData(name, np.zeros((3, 2), np.float32), y, np.array([0, 1, 1])) for name in ("a", "b"))
    classes = 3 if labels == "classes" else None
    return Federation(silos, 4, None, ("an assumption",), "toy", classes, **settings)


@pytest.mark.parametrize("labels", ["classes", "real", "survival"])
def test_public_facts_of_loaded_data(labels):
    public = federation(labels, features=("age", "dose")).public()
    assert (public.name, public.silos, public.users) == ("toy", ("a", "b"), 4)
    assert (public.record_shape, public.labels, public.features) == ((2,), labels, ("age", "dose"))
    assert public.classes == (3 if labels == "classes" else None)
    assert (public.assumptions, public.user_budgets, public.record_budgets) == (
        (Assumption.from_text("an assumption"),),
        None,
        False,
    )


@pytest.mark.parametrize("labels", ["classes", "real", "survival"])
def test_synthetic_records_have_the_kind_of_the_data(labels):
    real = federation(labels)
    x, y = make_up_records(real.public(), 4)
    assert (x.dtype, x.shape) == (np.float32, (4, 2))
    assert (y.dtype, y.shape[1:]) == (real.silos[0].y.dtype, real.silos[0].y.shape[1:])
    if labels == "classes":
        assert {0, 2} <= set(y.tolist())
    # Of neighbors with one label, a loss made of labels would not show that it mixes them.
    assert all((one != other).any() for one, other in pairwise(y))


def test_the_digest_is_over_users_keys_and_budgets():
    keys, budgets = ("p", "q", "r", "s"), np.array([1.0, 2.0, 3.0, 4.0])
    plain = federation("real").public()
    assert plain.index_digest == hashlib.sha256(json.dumps([4, None, None]).encode()).hexdigest()
    whole = federation("real", user_keys=keys, user_budgets=budgets).public()
    public = [4, list(keys), budgets.tolist()]
    assert whole.index_digest == hashlib.sha256(json.dumps(public).encode()).hexdigest()
    assert whole.user_budgets == tuple(budgets)


def test_budgets_are_not_printed():
    public = PublicData("toy", ("a",), 1, (2,), "real", user_budgets=(0.125,))
    assert "0.125" not in repr(public)


def test_a_federation_without_silos_is_refused():
    with refused("data.federation"):
        PublicData("toy", (), 1, (2,), "real")
