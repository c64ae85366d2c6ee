"""Categorical columns as codes: numbers in the declared order, in an array of their own beside the other columns."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from silodp.data import Federation
from silodp.data.catalog import DATASETS
from silodp.data.inputs import Input
from silodp.data.public import PublicData
from silodp.data.tables.kinds.categorical import CategoricalColumn
from silodp.data.tables.reader import Schema, read_inputs
from silodp.data.tables.subgroups import find_groups
from support.refusals import refused

ROWS = (
    "patient,age,ward,diagnosis,sent,ill\n"
    "p1,50,surgery,I50,yes,no\n"
    "p2,20,medicine,E11,no,yes\n"
    "p1,80,medicine,,1,no\n"
    "p3,35,surgery,I21,0,yes\n"
)
DIAGNOSES = ["I21", "I50", "E11", "other"]
WARDS = ["surgery", "medicine"]


def schema(*, codes=True, diagnoses=DIAGNOSES, **changes):
    fields = {
        "user": "patient",
        "label": "ill",
        "classes": ["no", "yes"],
        "numeric": {"age": (20, 80)},
        "categorical": {
            "diagnosis": {"categories": diagnoses, "missing": "other", "codes": codes},
            "ward": WARDS,
            "sent": {"categories": [False, True], "codes": codes},
        },
    }
    return Schema(**{**fields, **changes})


@pytest.fixture
def path(tmp_path):
    (tmp_path / "north.csv").write_text(ROWS)
    return tmp_path / "north.csv"


def read(path, **changes):
    return Federation.from_tables({"north": path}, schema(**changes))


def public_of(described):
    return DATASETS["tables"].public({"files": {"north": "no/such.csv"}, "schema": described})


def test_codes_are_places_in_the_declared_order(path):
    built = read(path)
    x = built.silos[0].x
    assert list(x.keys()) == ["numeric", "codes"]
    np.testing.assert_array_equal(x["numeric"], np.float32([[0, 1, 0], [-1, 0, 1], [1, 0, 1], [-0.5, 1, 0]]))
    np.testing.assert_array_equal(x["codes"], [[1, 1], [2, 0], [3, 1], [0, 0]])
    assert (x["numeric"].dtype, x["codes"].dtype) == (np.float32, np.int64)
    assert list(built.categories) == [4, 2]
    turned = read(path, diagnoses=DIAGNOSES[::-1]).silos[0].x["codes"]
    np.testing.assert_array_equal(turned[:, 0], 3 - x["codes"][:, 0])


def test_one_hot_columns_are_those_of_the_codes(path):
    coded, one_hot = read(path).silos[0].x, read(path, codes=False).silos[0].x
    diagnosis, sent = np.eye(4)[coded["codes"][:, 0]], np.eye(2)[coded["codes"][:, 1]]
    np.testing.assert_array_equal(
        np.concatenate([coded["numeric"][:, :1], diagnosis, coded["numeric"][:, 1:], sent], 1), one_hot
    )


def test_without_other_columns_there_is_no_array_of_numbers(path):
    built = read(path, numeric={}, categorical={"ward": CategoricalColumn(WARDS, codes=True)})
    assert list(built.silos[0].x.keys()) == ["codes"]
    public = built.public()
    assert (public.feature_count, public.categories, public.has_codes) == (0, [2], True)


def test_an_unknown_category_and_a_missing_cell_without_a_policy_are_refused(path):
    with refused("data.value"):
        read(path, diagnoses=["I21", "I50", "other"])
    with refused("data.value"):
        read(path, categorical={"diagnosis": {"categories": DIAGNOSES, "codes": True}})


@pytest.mark.parametrize("codes", [True, False])
def test_a_missing_cell_may_count_as_true_or_false(tmp_path, codes):
    (tmp_path / "a.csv").write_text("patient,sent,ill\np1,,no\np2,no,yes\np3,Yes,no\n")
    sent = {"categories": [False, True], "missing": True, "codes": codes}
    x = read(tmp_path / "a.csv", numeric={}, categorical={"sent": sent}).silos[0].x
    np.testing.assert_array_equal(x["codes"][:, 0] if codes else x[:, 1], [1, 0, 1])


@pytest.mark.parametrize("codes", ["yes", 1, None, ["diagnosis"]])
def test_codes_is_true_or_false(codes):
    with refused("data.schema"):
        schema(codes=codes)


def test_the_server_knows_names_shapes_and_categories_without_a_table(path):
    declared, loaded = public_of(schema()), read(path).public()
    for field in ("record_shape", "inputs", "features", "labels", "classes"):
        assert getattr(declared, field) == getattr(loaded, field), field
    assert declared.inputs == (Input("numeric", (3,)), Input("codes", (2,), (4, 2)))
    assert (declared.record_shape, declared.feature_count, declared.categories) == ((), 3, [4, 2])
    assert PublicData.from_dict(json.loads(json.dumps(declared.to_dict()))) == declared
    without = public_of(schema(codes=False))
    assert (without.record_shape, without.inputs, without.has_codes) == ((9,), (), False)


def test_the_public_facts_tell_the_setting_and_the_order_of_categories():
    """A run is identified by these facts: no two schemas that read a table differently may lead to the same."""
    some = [
        schema(),
        schema(codes=False),
        schema(diagnoses=DIAGNOSES[::-1]),
        schema(diagnoses=["I21", "I50", "E10", "other"]),
        schema(diagnoses=["I21|I50", "E11", "x", "other"]),
        schema(diagnoses=["I21", "I50|E11", "x", "other"]),
        schema(diagnoses=["I21\\", "I50", "x", "other"]),
    ]
    told = [json.dumps(public_of(one).to_dict(), sort_keys=True) for one in some]
    assert len(set(told)) == len(told)


def test_a_schema_that_was_kept_reads_the_same_codes(path):
    given = schema()
    kept = Schema.from_inputs(json.loads(json.dumps(given.describe_inputs())))
    assert kept.features == given.features
    x = read(path).silos[0].x
    for source in (path, pd.read_csv(path)):
        found, copied = read_inputs(source, kept, ["patient"])
        for name in ("numeric", "codes"):
            np.testing.assert_array_equal(found[name], x[name])
        assert copied["patient"].tolist() == ["p1", "p2", "p1", "p3"]


def test_held_out_records_are_codes_too(path):
    built = read(path, test_share=0.5)
    kept = [len(built.silos[0]), len(built.test)]
    assert sum(kept) == 4
    assert min(kept) > 0
    assert built.test.x["codes"].shape == (kept[1], 2)
    np.testing.assert_array_equal(built.silos[0].test.x["codes"], built.test.x["codes"])


def test_subgroups_are_the_same_by_codes_and_by_one_hot_columns(path):
    groups = {"diagnosis": ["E11", "other"], "ward": ["medicine"], "sent": [True], "age": [20, 50, 80]}
    found = []
    for codes in (True, False):
        built = read(path, codes=codes)
        found.append(find_groups(built.silos[0].x, built.schema, groups))
    for (column, name, rows), (other_column, other_name, other_rows) in zip(*found, strict=True):
        assert (column, name) == (other_column, other_name)
        np.testing.assert_array_equal(rows, other_rows)
    chosen = {(column, name): np.flatnonzero(rows).tolist() for column, name, rows in found[0]}
    assert chosen["diagnosis", "E11"] == [1]
    assert chosen["diagnosis", "other"] == [2]
    assert chosen["sent", "True"] == [0, 2]


def test_a_missing_number_is_in_no_range():
    given = schema(numeric={"age": {"range": (0, 100), "missing": "indicator"}, "dose": (0, 10)})
    x = np.zeros((2, len(given.features)), dtype=np.float32)
    x[1, given.features.index("age is missing")] = 1
    [(_, _, chosen)] = find_groups(x, given, {"age": [40, 60]})
    assert chosen.tolist() == [True, False]
