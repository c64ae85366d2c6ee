"""A data set as a plug-in: registered ones by name, others in one file that a configuration names."""

import numpy as np
import pytest

from silodp.config.resolve import resolve
from silodp.config.schema import parse_config
from silodp.data import Dataset, Federation, PublicData, SiloData
from silodp.data.catalog import DATASETS, find_dataset
from support.refusals import refused

PLUG_IN = """
import numpy as np
from silodp.data import Dataset, Federation, SiloData


def load(silos: int = 3, users: int = 7, seed: int = 0) -> Federation:
    generator = np.random.default_rng(seed)
    tables = []
    for silo in range(silos):
        x = generator.standard_normal((12, 2), dtype=np.float32)
        tables.append(SiloData(f"silo-{silo + 1}", x, x.sum(axis=1), generator.integers(users, size=12)))
    return Federation(tuple(tables), users, None, name="dosage")


DOSAGE = Dataset(name="dosage", loader=load, record_shape=(2,), labels="real", loss="squared_error", model="logistic")
NOTHING = 3
WRONG = Dataset(name="wrong", loader=lambda silos=2: "no federation")
"""


def config(folder, source, **data):
    (folder / "dosage.py").write_text(PLUG_IN)
    method = {"name": "uldp-avg", "noise_multiplier": 5.0, "clip": 0.1, "local": {"learning_rate": 0.01}}
    values = {"name": "toy", "rounds": 1, "data": {"source": source, **data}, "method": method}
    return resolve(parse_config(values, folder))


def test_a_file_of_its_own_is_a_data_set(tmp_path):
    run = config(tmp_path, "dosage.py:DOSAGE", silos=4, users=9)
    public = run.read_public_data()
    assert len(run.silos) == 4
    assert public == PublicData(
        "dosage", ("silo-1", "silo-2", "silo-3", "silo-4"), 9, (2,), "real", user_budgets=None
    )
    federation = run.load_federation()
    assert (federation.users, len(federation.silos)) == (9, 4)
    task = run.build_task(public)
    assert (task.size, task.loss.name) == (run.build_task(federation).size, "squared_error")
    assert not run.dataset.is_published  # so that the report shows no counts of records
    assert run.config.to_toml().count(str(tmp_path / "dosage.py:DOSAGE")) == 1


@pytest.mark.parametrize(
    ("source", "data", "code"),
    [
        ("dosage.py:DOSAGE", {"silo": 3}, "config.unknown_field"),
        ("dosage.py:DOSAGE", {"silos": 0}, "argument.value"),
        ("dosage.py:NOTHING", {}, "config.value"),
        ("dosage.py:MISSING", {}, "config.not_importable"),
        ("elsewhere.py:DOSAGE", {}, "config.not_importable"),
        ("dosage", {}, "argument.value"),
    ],
)
def test_a_wrong_data_set_is_refused(tmp_path, source, data, code):
    with refused(code):
        config(tmp_path, source, **data)


def test_a_loader_that_returns_no_federation_is_refused(tmp_path):
    run = config(tmp_path, "dosage.py:WRONG")
    with refused("argument.type"):
        run.load_federation()


def test_find_dataset():
    assert find_dataset("embedded") is DATASETS["embedded"]
    with refused("argument.value") as caught:
        find_dataset("embeded")
    assert caught.value.field == "data.source"
    assert "embedded" in str(caught.value)


def test_silos_must_be_declared():
    with refused("argument.missing"):
        Dataset(name="toy", loader=lambda: None, record_shape=(2,)).public({})
    with refused("argument.type"):
        Dataset(name="toy", loader=None)


def test_declared_users():
    def loader(users=5, allocation="zipf"):
        raise NotImplementedError

    dataset = Dataset(name="toy", loader=loader, silos=("a", "b"))
    assert dataset.declared_users({}) == 5
    assert dataset.declared_users({"users": 8}) == 8
    assert dataset.declared_users({"allocation": "own"}) is None
    assert dataset.public({"allocation": "own"}, users=3).users == 3
    fixed = Dataset(name="toy", loader=lambda: None, silos=("a",), users=11)
    assert fixed.public({}).users == 11


def tables(tmp_path, **schema):
    (tmp_path / "a.csv").write_text("id,age,ill,part\np,50,yes,train\n")
    base = {"user": "id", "label": "ill", "classes": ["no", "yes"], "numeric": {"age": [0, 100]}}
    return {"files": {"rome": "a.csv"}, "schema": {**base, **schema}}


@pytest.mark.parametrize("more", [{}, {"split": "part"}, {"test_share": 0.001}])
def test_public_facts_of_tables_are_those_of_the_schema(more, tmp_path):
    run = config(tmp_path, "tables", **tables(tmp_path, out_of_range="clip", **more))
    public = run.read_public_data()
    assert public.users is None
    assert (public.silos, public.features, public.classes) == (("rome",), ("age",), 2)
    loaded = run.load_federation().public()
    assert (public.assumptions, public.labels, public.record_shape) == (
        loaded.assumptions,
        loaded.labels,
        loaded.record_shape,
    )
    assert not run.dataset.is_published


def test_the_public_list_of_users_is_not_read_where_users_are_given(tmp_path):
    run = config(tmp_path, "tables", **tables(tmp_path, users="gone.txt"))
    with refused("data.users"):
        run.read_public_data()
    assert run.read_public_data(users=4).users == 4


def test_a_federation_may_have_names_of_silos_only():
    silo = SiloData("a", np.zeros((0, 3), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert Federation((silo,), 2, None, classes=2).public().silos == ("a",)
