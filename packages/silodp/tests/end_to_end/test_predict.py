"""The public files of a run are enough to use its model elsewhere, and predictions are those of the run."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import py_compile
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import silodp
from silodp import SilodpError
from silodp.config.resolve import load_config
from silodp.runtime.callback import Result
from silodp.runtime.train import train
from support.commands import Silodp, assert_sentence
from support.refusals import refused
from support.rewriting import edit_description

PUBLIC = ("model.json", "model.safetensors", "guarantee.json")
HEAD = """
rounds = 2
seed = 5
[data]
source = "tables"
files = {{ north = "north.csv", south = "south.csv" }}
[data.schema]
user = "person_key"
split = "part"
numeric = {{ age = [0, 110], dose = {{ range = [0, 20], typical = [8, 4] }} }}
categorical = {{ ward = ["surgery", "medicine", 3] }}
out_of_range = "clip"
{label}
{task}
[method]
name = "uldp-avg"
noise_multiplier = 1.0
clip = 0.5
server_learning_rate = 20.0
[method.local]
learning_rate = 0.1
"""
CLASSES = 'label = "ill"\nclasses = ["no", "yes"]'
REAL = 'kind = "real"\nlabel = "days"'
SURVIVAL = 'kind = "survival"\nevent = "dead"\ntime = "days"'
CODE = """
from torch import nn
def network(features: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 2))
"""
OWN = '[task]\nmodel = "my_net.py:network"\noptions = { width = 6 }'


def write_tables(folder: Path) -> None:
    coins = random.Random(3)
    for name in ("north", "south"):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["person_key", "dose", "ward", "age", "ill", "dead", "days", "part"])
            for row in range(60):
                values = [round(coins.uniform(-1, 22), 3), coins.choice(["surgery", "medicine", "3"])]
                age, days = coins.randint(18, 99), round(coins.uniform(1, 900), 1)
                sick = coins.choice(["no", "yes"])
                part = "test" if row % 3 == 0 else "train"
                table.writerow([f"p{row % 25}", *values, age, sick, coins.randint(0, 1), days, part])


def run_of(
    folder: Path, label: str, task: str = "", name: str = "run", **changes: object
) -> tuple[Result, Any, Any]:
    path = folder / f"{name}.toml"
    path.write_text(HEAD.format(label=label, task=task))
    settings = load_config(path, [f"{key}={value}" for key, value in changes.items()])
    federation = settings.load_federation()
    made = settings.build_task(federation)
    result = train(federation, made, settings.method, out=folder / name, **settings.settings())
    return result, made, federation


def take_bundle(run: Path, to: Path, *more: str) -> Path:
    """Copy the public files alone."""
    to.mkdir()
    for name in (*PUBLIC, *more):
        shutil.copy(run / name, to)
    return to


def write_test_rows(folder: Path) -> Path:
    """The held-out rows without persons, labels and splits, in the order of an evaluation."""
    tables = [pd.read_csv(folder / f"{name}.csv", dtype=str) for name in ("north", "south")]
    rows = pd.concat(table[table["part"] == "test"] for table in tables)
    path = folder / "rows.csv"
    rows[["ward", "age", "dose"]].to_csv(path, index=False)
    return path


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Result, Any, Any]:
    write_tables(tmp_path)
    return run_of(tmp_path, CLASSES)


@pytest.mark.slow
def test_predictions_elsewhere_are_the_outputs_of_the_runs_evaluation(tmp_path: Path) -> None:
    """In another process and folder, with the public files alone: bit for bit, for every kind of label."""
    write_tables(tmp_path)
    (tmp_path / "my_net.py").write_text(CODE)
    kinds = {
        "classes": (CLASSES, ""),
        "real": (REAL, '[task]\nmodel = "logistic"'),
        "survival": (SURVIVAL, ""),
    }
    kinds["own"] = (CLASSES, OWN)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    expected = {}
    for name, (label, task) in kinds.items():
        result, made, federation = run_of(tmp_path, label, task, name)
        inputs, _ = made.tensors(federation.test.x, federation.test.y)
        expected[name] = made.predict(result.params, inputs).numpy()
        take_bundle(tmp_path / name, elsewhere / name, *(["model.py"] if name == "own" else []))
    shutil.copy(write_test_rows(tmp_path), elsewhere)
    for gone in [*tmp_path.glob("*.csv"), *tmp_path.glob("*.toml"), tmp_path / "my_net.py"]:
        gone.unlink()
    for name in kinds:
        shutil.rmtree(tmp_path / name)
    program = """
import sys, numpy, silodp
for name in sys.argv[1:]:
    model = silodp.load(name, code="own/model.py" if name == "own" else None)
    numpy.savez(name, outputs=model.compute_outputs("rows.csv"), predicted=model.predict("rows.csv"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *kinds], cwd=elsewhere, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, outputs in expected.items():
        found = np.load(elsewhere / f"{name}.npz")
        assert found["outputs"].dtype == outputs.dtype
        assert found["outputs"].tobytes() == outputs.tobytes()
        assert np.ptp(outputs) > 0
    positive = np.load(elsewhere / "classes.npz")["predicted"]
    assert positive.shape == (40, 2)
    assert positive[:, 1] == pytest.approx(1 / (1 + np.exp(-expected["classes"].ravel().astype(float))))
    two = np.exp(expected["own"].astype(float))
    assert np.load(elsewhere / "own.npz")["predicted"] == pytest.approx(two / two.sum(1, keepdims=True))
    assert np.load(elsewhere / "real.npz")["predicted"].ravel() == pytest.approx(expected["real"].ravel())


def test_the_description_has_public_constants_alone(trained: Any, tmp_path: Path) -> None:
    text = (tmp_path / "run" / "model.json").read_text()
    for private in (str(tmp_path), "north", "south", "person_key", "part", "seed", "p12", ".csv"):
        assert private not in text, private
    fields = json.loads(text)
    assert fields["classes"] == ["no", "yes"]
    assert fields["features"] == ["age", "dose", "ward=surgery", "ward=medicine", "ward=3"]
    assert fields["inputs"]["numeric"] == {
        "age": [0, 110],
        "dose": {"range": [0, 20], "typical": [8, 4]},
    }
    assert fields["architecture"] == {
        "source": "silodp",
        "name": "logistic",
        "version": 1,
        "arguments": {"features": 5, "classes": 2},
    }
    assert fields["versions"].keys() == {"silodp", "torch", "python"}


def test_the_command_copies_what_is_asked_for_and_keeps_the_order(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silodp: Silodp
) -> None:
    monkeypatch.chdir(tmp_path)
    table = pd.read_csv("south.csv", dtype=str).iloc[::-1]
    table["person_key"] = [f"00{i}" for i in range(len(table))]
    table.to_csv("new.csv", index=False)
    table.drop(columns=["ill", "part"]).astype({"age": int, "dose": float}).to_parquet("new.parquet")
    for given in ("new.csv", "new.parquet"):
        for out in ("found.csv", "found.parquet"):
            Path(out).unlink(missing_ok=True)
            done = silodp("predict", "run", given, "--out", out, "--copy", "person_key", "--json")
            assert done.status == 0, done.err
            assert done.json["rows"] == 60
    text = pd.read_csv("found.csv", dtype={"person_key": str})
    assert text.columns.tolist() == ["person_key", "probability_no", "probability_yes"]
    assert text["person_key"].tolist() == table["person_key"].tolist()
    pd.testing.assert_frame_equal(text, pd.read_parquet("found.parquet"), check_dtype=False)
    model = load_run("run")
    assert text[["probability_no", "probability_yes"]].to_numpy() == pytest.approx(model.predict(table))
    assert np.array_equal(model.predict("new.csv"), model.predict("new.parquet"))
    bare = silodp("predict", "run", "new.csv", "--out", "bare.csv")
    assert "ε =" in bare.out
    assert pd.read_csv("bare.csv").columns.tolist() == ["probability_no", "probability_yes"]


def test_copied_columns_of_several_types_are_written_as_text(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silodp: Silodp
) -> None:
    pytest.importorskip("openpyxl")
    monkeypatch.chdir(tmp_path)
    row = {"age": 50, "dose": 3.5, "ward": "surgery"}
    table = pd.DataFrame([row] * 3).assign(id=[17, "a 1", ""], bed=[1, 2, 3])
    table.to_excel("new.xlsx", index=False)
    copied = ("--copy", "id", "--copy", "bed")
    for out in ("found.parquet", "found.csv"):
        done = silodp("predict", "run", "new.xlsx", "--out", out, *copied)
        assert done.status == 0, done.err
    found = pd.read_parquet("found.parquet")
    assert found["id"].tolist() == ["17", "a 1", ""]
    assert found["bed"].tolist() == [1, 2, 3]
    assert pd.read_csv("found.csv", keep_default_na=False)["id"].tolist() == ["17", "a 1", ""]


def test_a_table_of_another_form_is_read_by_options(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silodp: Silodp
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("new.csv").write_text("age;dose;ward;größe\n50;3,5;surgery;1\n", encoding="cp1252")
    predict = ("predict", "run", "new.csv", "--out", "found.csv", "--copy", "größe")
    options: list[str] = []
    for name, value in (("encoding", "cp1252"), ("separator", ";"), ("decimal", ",")):
        assert f"--{name}" in silodp(*predict, *options).err
        options += [f"--{name}", value]
    done = silodp(*predict, *options)
    assert done.status == 0, done.err
    Path("plain.csv").write_text("age,dose,ward\n50,3.5,surgery\n")
    # pandas rounds the last digit of some numbers unless it is asked to read what was written
    found = pd.read_csv("found.csv", float_precision="round_trip")[["probability_no", "probability_yes"]]
    assert np.array_equal(found.to_numpy(), load_run("run").predict("plain.csv"))
    for cells in ("50,3.5,radiology", "x,3.5,surgery"):
        Path("plain.csv").write_text(f"age,dose,ward\n{cells}\n")
        failed = silodp("predict", "run", "plain.csv", "--out", "failed.csv")
        assert_sentence(failed, code="data.value")
        assert "declare" not in failed.err
        assert "public" not in failed.err


def test_dates_missing_cells_and_numbers_out_of_range_are_read_by_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silodp: Silodp
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tables(tmp_path)
    for name in ("north", "south"):
        pd.read_csv(f"{name}.csv").assign(visit="2020-03-04").to_csv(f"{name}.csv", index=False)
    visit = 'visit = { range = [0, 366], date = "%Y-%m-%d", since = "2020-01-01" }'
    numeric = f"{{ age = [0, 110], days = {{ range = [0, 900], missing = 9 }}, {visit} }}"
    run_of(
        tmp_path,
        CLASSES,
        **{
            "data.schema.out_of_range": "refuse",
            "data.schema.numeric": numeric,
            "data.schema.reader.missing": '["-7"]',
            "data.schema.reader.missing_in": '{ days = ["777"], person_key = ["unknown"] }',
            "data.schema.readers.north.missing": '["-8"]',
            "data.schema.readers.north.missing_in": '{ days = ["888"], person_key = ["unknown"] }',
        },
    )
    Path("new.csv").write_text("age,days,ward,visit\n111,?,surgery,04/02/2020\n")
    predict = ("predict", "run", "new.csv", "--out", "found.csv")
    options: list[str] = []
    for name, value in (("out-of-range", "clip"), ("missing", "?"), ("date", "visit=%m/%d/%Y")):
        assert_sentence(silodp(*predict, *options), code="data.value")
        options += [f"--{name}", value]
    done = silodp(*predict, *options)
    assert done.status == 0, done.err
    found = pd.read_csv("found.csv").to_numpy()
    Path("found.csv").unlink()
    Path("plain.csv").write_text("age,days,ward,visit\n110,9,surgery,2020-04-02\n")
    model = load_run("run")
    assert found == pytest.approx(model.predict("plain.csv"), rel=1e-12)
    reader = {"missing": ["?"], "dates": {"visit": "%m/%d/%Y"}}
    table = model.predict_table("new.csv", reader=reader, out_of_range="clip")
    assert np.array_equal(table, model.predict("plain.csv"))
    Path("run/config.toml").write_text(
        f'[data]\nfiles = {{ north = "north.csv" }}\n[data.schema]\nnumeric = {numeric}\n'
        "[data.schema.readers]\n"
        'north = { missing = ["-8"], missing_in = { days = ["888"], person_key = ["unknown"] } }\n'
    )
    for code, *option in (
        ("999", "--missing-in", "days=999"),  # of the option, the common reader and that of the silo
        ("777",),
        ("777", "--missing-in", "days=999"),  # of one column, too, an option adds to the run's texts
        ("-7",),  # besides "?", which the options name
        ("888", "--silo", "north"),
    ):
        Path("new.csv").write_text(f"age,days,ward,visit\n110,{code},surgery,04/02/2020\n")
        assert silodp(*predict, *options, *option).status == 0
        assert np.array_equal(pd.read_csv("found.csv").to_numpy(), found)
        Path("found.csv").unlink()
    for value in ("777", "-7"):  # in training, north had texts of its own in place of the common ones
        Path("new.csv").write_text(f"age,days,ward,visit\n110,{value},surgery,04/02/2020\n")
        assert silodp(*predict, *options, "--silo", "north").status == 0
        assert not np.array_equal(pd.read_csv("found.csv").to_numpy(), found)
        Path("found.csv").unlink()
    for wrong, code in (
        (("--missing-in", "dys=999"), "data.schema"),
        (("--out-of-range", "drop"), "argument.value"),
        (("--date", "visit"), "argument.value"),
        (("--date", "vsit=%Y-%m-%d"), "data.schema"),
    ):
        assert_sentence(silodp(*predict, *options, *wrong), code=code)


@pytest.mark.parametrize(
    "reader",
    [
        {"seperator": ";"},
        {"separator": ";;"},
        {"dates": "%d.%m.%Y"},
        {"dates": {"ward": "%d.%m.%Y"}},
        ";",
        {1: ";"},
    ],
)
def test_a_wrong_reader_is_refused(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("new.csv").write_text("age;dose;ward\n50;3.5;surgery\n")
    model = load_run("run")
    with refused("data.schema") as caught:
        model.predict_table("new.csv", reader=reader)
    assert caught.value.field == "data.schema.reader"
    assert len(model.predict_table("new.csv", reader={"separator": ";", "dates": None})) == 1


def load_run(*arguments: Any, **more: Any) -> silodp.TrainedModel:
    return silodp.load(*arguments, **more)


def test_wrong_tables_are_refused(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silodp: Silodp
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"age": [50], "dose": [3.0], "ward": ["surgery"], "probability_no": [0]}
    for change, code in (
        ({"ward": ["radiology"]}, "data.value"),
        ({"age": [""]}, "data.value"),
        ({"age": ["old"]}, "data.value"),
    ):
        pd.DataFrame({**row, **change}).to_csv("new.csv", index=False)
        assert_sentence(silodp("predict", "run", "new.csv", "--out", "found.csv"), "data row 1", code=code)
    pd.DataFrame({**row, "age": [111]}).to_csv("new.csv", index=False)  # clipped, as the schema says
    assert silodp("predict", "run", "new.csv", "--out", "found.csv").status == 0
    for arguments, code in (
        (["--copy", "person_key"], "data.column"),
        (["--copy", "probability_no"], "data.column"),
        (["--copy", "age", "--copy", "age"], "data.column"),
        (["--out", "new.csv"], "argument.conflict"),
        (["--out", "new.txt"], "argument.value"),
        (["--out", "found.csv"], "run.exists"),
        (["--out", "nothing/q.csv"], "cli.file"),
    ):
        wrong = silodp("predict", "run", "new.csv", "--out", "other.csv", *arguments)
        assert_sentence(wrong, code=code)
        assert ".partial" not in wrong.err
    pd.DataFrame(row).drop(columns="dose").to_csv("new.csv", index=False)
    failed = silodp("predict", "run", "new.csv", "--out", "other.csv")
    assert_sentence(failed, code="data.column")
    assert not Path("other.csv").exists()


def test_values_outside_a_range_are_refused_where_the_schema_refuses_them(tmp_path: Path) -> None:
    write_tables(tmp_path)
    for name in ("north", "south"):
        table = pd.read_csv(tmp_path / f"{name}.csv")
        table["dose"] = table["dose"].clip(0, 20)
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    run_of(tmp_path, CLASSES, name="strict", **{"data.schema.out_of_range": "refuse"})
    model = silodp.load(tmp_path / "strict")
    good = pd.DataFrame({"age": [110], "dose": [0.0], "ward": [3.0]})
    assert model.predict(good).shape == (1, 2)
    with pytest.raises(SilodpError) as refused:
        model.predict(good.assign(age=110.5))
    assert refused.value.code == "data.value"


def refuse(expected: str, /, *arguments: Any, **more: Any) -> SilodpError:
    with pytest.raises(SilodpError) as refused:
        silodp.load(*arguments, **more)
    assert refused.value.code == expected
    return refused.value


def test_files_that_do_not_belong_together_are_refused(trained: Any, tmp_path: Path) -> None:
    run_of(tmp_path, CLASSES, name="second", seed=6)
    bundle = take_bundle(tmp_path / "run", tmp_path / "bundle")
    for name in PUBLIC:
        kept = (bundle / name).read_bytes()
        (bundle / name).write_bytes((tmp_path / "second" / name).read_bytes())
        refuse("bundle.mixed", bundle)
        (bundle / name).write_bytes(kept[:-9])
        with pytest.raises(SilodpError) as refused:
            silodp.load(bundle)
        assert refused.value.code in ("bundle.damaged", "bundle.mixed", "report.damaged")
        (bundle / name).unlink()
        with pytest.raises(SilodpError) as refused:
            silodp.load(bundle)
        assert refused.value.code == "bundle.missing"
        (bundle / name).mkdir()
        with pytest.raises(SilodpError) as refused:
            silodp.load(bundle)
        assert refused.value.code in ("bundle.damaged", "report.damaged")
        (bundle / name).rmdir()
        (bundle / name).write_bytes(kept)
    assert silodp.load(bundle).guarantees["released"].epsilon is not None
    (bundle / "guarantee.json").write_bytes((tmp_path / "second" / "guarantee.json").read_bytes())
    refuse("bundle.mixed", bundle)


def test_a_description_that_lies_is_refused(trained: Any, tmp_path: Path) -> None:
    def swap_columns(fields: Any) -> None:
        fields["inputs"]["numeric"] = dict(reversed(fields["inputs"]["numeric"].items()))

    changes: list[tuple[str, Callable[[Any], None]]] = [
        ("bundle.damaged", swap_columns),
        ("bundle.damaged", lambda f: f.update(format=2)),
        ("bundle.damaged", lambda f: f.update(format=True)),
        ("bundle.damaged", lambda f: f["inputs"].update(users="/etc/hostname")),
        ("bundle.damaged", lambda f: f["architecture"].update(source="pickle")),
        ("bundle.damaged", lambda f: f["architecture"].update(source="module", module="")),
        ("bundle.architecture", lambda f: f["architecture"].update(version=7)),
        ("bundle.architecture", lambda f: f["architecture"]["arguments"].update(features=4)),
        ("config.unknown_field", lambda f: f["architecture"]["arguments"].update(file="x")),
        ("bundle.architecture", lambda f: f["tensors"]["weight"].update(dtype="float64")),
        ("argument.value", lambda f: f["architecture"].update(name="os.system")),
    ]
    for number, (code, change) in enumerate(changes):
        bundle = take_bundle(tmp_path / "run", tmp_path / f"bundle-{number}")
        edit_description(bundle / "model.json", change)
        refuse(code, bundle)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The public files of a run whose architecture is a user's file."""
    write_tables(tmp_path)
    (tmp_path / "my_net.py").write_text(CODE)
    run_of(tmp_path, CLASSES, OWN, "run")
    return take_bundle(tmp_path / "run", tmp_path / "bundle", "model.py")


def test_code_is_run_only_if_it_is_named_and_the_code_of_the_run(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silodp: Silodp
) -> None:
    """Otherwise whoever hands on a model runs programs on the machine of whoever loads it, as with a pickle."""
    monkeypatch.chdir(tmp_path)
    description = json.loads((own / "model.json").read_text())
    assert description["architecture"]["sha256"] == hashlib.sha256(CODE.encode()).hexdigest()
    assert "my_net" not in json.dumps(description)
    ran = tmp_path / "ran"
    evil = CODE + f"\nopen({str(ran)!r}, 'w')\n"
    (own / "model.py").write_text(evil)
    refuse("bundle.code", own)
    assert "model.py" in str(refuse("bundle.code", own, code=own / "model.py"))
    refuse("bundle.code", own, code=tmp_path / "nothing.py")
    refuse("bundle.code", own, code="os")
    write_test_rows(tmp_path)
    done = silodp("predict", own, "rows.csv", "--out", "found.csv", "--code", own / "model.py")
    assert_sentence(done, code="bundle.code")
    assert not ran.exists()
    (own / "model.py").write_text(CODE)
    with monkeypatch.context() as there:  # the right code is not run unasked either
        there.chdir(own)
        refuse("bundle.code", ".")
    assert load_run(own, code=own / "model.py").predict("rows.csv").shape == (40, 2)
    assert load_run(own, code=tmp_path / "my_net.py").predict("rows.csv").shape == (40, 2)
    assert silodp("predict", own, "rows.csv", "--out", "found.csv", "--code", own / "model.py").status == 0


def test_a_compiled_file_beside_the_code_is_not_run(own: Path, tmp_path: Path) -> None:
    """Python would run it in place of the source, if time and size of the source are those that it states."""
    ran = tmp_path / "ran"
    source = own / "model.py"
    status = source.stat()
    evil = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n" + CODE
    source.write_text(evil)
    compiled = py_compile.compile(str(source), doraise=True)
    source.write_text(CODE)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    content = bytearray(Path(compiled).read_bytes())
    content[8:12] = int(status.st_mtime).to_bytes(4, "little")
    content[12:16] = len(CODE).to_bytes(4, "little")
    Path(compiled).write_bytes(content)
    imported = subprocess.run(
        [sys.executable, "-c", "import model"], cwd=own, capture_output=True, check=False
    )
    assert imported.returncode == 0
    assert ran.exists(), "the compiled file is one that Python would run"
    ran.unlink()
    silodp.load(own, code=source)
    assert not ran.exists()


def test_the_module_of_a_program_is_given_again(tmp_path: Path) -> None:
    write_tables(tmp_path)
    settings_path = tmp_path / "settings.toml"
    settings_path.write_text(HEAD.format(label=CLASSES, task=""))
    settings = load_config(settings_path)
    federation = settings.load_federation()
    task = silodp.Task(
        nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1)), settings.build_task(federation).loss
    )
    result = train(federation, task, settings.method, out=tmp_path / "run", **settings.settings())
    refuse("bundle.architecture", tmp_path / "run")
    assert "'0.bias'" in str(refuse("bundle.architecture", tmp_path / "run", model=nn.Linear(5, 1)))
    wider = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    refuse("bundle.architecture", tmp_path / "run", model=wider)
    refuse(
        "bundle.architecture",
        tmp_path / "run",
        model=nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1)).double(),
    )
    refuse("argument.type", tmp_path / "run", model="my_net.py:network")
    net = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1))
    before = net[0].weight.clone()
    model = silodp.load(tmp_path / "run", model=net)
    assert torch.equal(net[0].weight, before)
    inputs, _ = task.tensors(federation.test.x, federation.test.y)
    expected = task.predict(result.params, inputs).numpy()
    assert np.array_equal(model.compute_outputs(federation.test.x), expected)
    assert np.array_equal(model.compute_outputs(write_test_rows(tmp_path)), expected)
    with pytest.raises(SilodpError) as refused:
        model.predict(federation.test.x[:, :4])
    assert refused.value.code == "argument.shape"


def test_a_guarantee_of_fewer_rounds_is_refused_beside_a_newer_model(tmp_path: Path) -> None:
    """A run that is resumed keeps its id; its first guarantee states the ε of the first rounds."""
    write_tables(tmp_path)
    run_of(tmp_path, CLASSES)
    bundle = take_bundle(tmp_path / "run", tmp_path / "bundle")
    settings = load_config(tmp_path / "run.toml")
    federation = settings.load_federation()
    more = {**settings.settings(), "rounds": 4}
    train(
        federation,
        settings.build_task(federation),
        settings.method,
        out=tmp_path / "run",
        resume=True,
        **more,
    )
    for name in ("model.json", "model.safetensors"):
        shutil.copy(tmp_path / "run" / name, bundle)
    refuse("bundle.mixed", bundle)
    shutil.copy(tmp_path / "run" / "guarantee.json", bundle)
    assert silodp.load(bundle).guarantees["released"].rounds == 4
    whole = (bundle / "model.json").read_text()
    for name in json.loads(whole).keys() - {"digest"}:
        edit_description(bundle / "model.json", lambda fields, name=name: fields.pop(name))
        refuse("bundle.damaged", bundle)
        (bundle / "model.json").write_text(whole)
    edit_description(bundle / "model.json", lambda fields: fields.update(silo_settings="decimal"))
    refuse("bundle.damaged", bundle)


def test_numbers_in_attributes_must_be_those_of_the_run(trained: Any, tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale, self.linear = scale, nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x * self.scale)

    _, made, federation = trained
    task = silodp.Task(Scaled(0.1), made.loss)
    train(federation, task, silodp.methods.UldpAvg(noise_multiplier=1.0), rounds=1, out=tmp_path / "scaled")
    silodp.load(tmp_path / "scaled", model=Scaled(0.1))
    refuse("bundle.architecture", tmp_path / "scaled", model=Scaled(-1.0))


def test_outputs_under_a_loss_of_ones_own_are_not_called_predictions(tmp_path: Path) -> None:
    """The output of a Poisson model is the log of the expected number, and that of a hinge loss a margin."""
    write_tables(tmp_path)
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def poisson(outputs, targets):\n"
        "    return torch.exp(outputs.squeeze(-1)) - targets * outputs.squeeze(-1)\n"
    )
    own = '[task]\nmodel = "logistic"\nloss = "own.py:poisson"'
    scaled = REAL + "\nlabel_typical = [300, 100]"
    run_of(tmp_path, scaled, own)
    model = silodp.load(tmp_path / "run")
    rows = write_test_rows(tmp_path)
    assert model.columns == ("output",)
    assert np.array_equal(model.predict(rows)[:, 0], model.compute_outputs(rows).ravel())
    for loss, columns in (
        ("own.py:poisson", ("score_no", "score_yes")),
        ("binary_cross_entropy", ("probability_no", "probability_yes")),
    ):
        run_of(tmp_path, CLASSES, own.replace("own.py:poisson", loss), columns[0])
        assert silodp.load(tmp_path / columns[0]).columns == columns


def test_settings_of_single_silos_are_missed_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tables(tmp_path)
    run_of(tmp_path, CLASSES)
    run_of(
        tmp_path, CLASSES + '\nreaders = { north = { missing = ["-9"], separator = "," } }', name="readers"
    )
    rows = write_test_rows(tmp_path)
    for name, options, warns in (
        ("run", {}, False),
        ("readers", {}, True),
        ("readers", {"encoding": "utf-8", "missing": ["-9"]}, True),
        ("readers", {"separator": ",", "missing": ["-9"]}, False),
    ):
        caplog.clear()
        silodp.load(tmp_path / name).predict_table(rows, reader=options)
        assert ("different ways" in caplog.text) is warns


def test_a_table_of_a_silo_is_read_by_its_mapping_and_reader(silodp: Any, tmp_path: Path) -> None:
    """Its table has names, values, missing texts and decimal commas of its own, and gives the same predictions."""
    write_tables(tmp_path)
    columns, values = '{ age = "Alter", ill = "krank" }', '{ ward = { C = "surgery" }, ill = { ja = "yes" } }'
    plain = (tmp_path / "north.csv").read_text()
    given = plain.replace("age,ill", "Alter,krank").replace("surgery", "C").replace(",yes,", ",ja,")
    (tmp_path / "north.csv").write_text(given)
    own = f"\nsilos = {{ north = {{ columns = {columns}, values = {values} }} }}"
    path = tmp_path / "mapped.toml"
    path.write_text(HEAD.format(label=CLASSES + own, task=""))
    assert silodp("run", path, "--out", tmp_path / "run").status == 0
    assert '"Alter"' not in (tmp_path / "run" / "model.json").read_text()  # it is not kept with the model
    (tmp_path / "plain.csv").write_text(plain)
    predict = ("predict", tmp_path / "run")
    assert silodp(*predict, tmp_path / "plain.csv", "--out", tmp_path / "a.csv").status == 0
    own_table = tmp_path / "north.csv"
    assert (
        silodp(*predict, own_table, "--out", tmp_path / "x.csv", "--json").json["error"]["code"]
        == "data.column"
    )
    told = silodp(*predict, own_table, "--silo", "north", "--out", tmp_path / "b.csv", "--copy", "krank")
    assert told.status == 0, told.err
    assert "different ways" not in told.err
    first, second = pd.read_csv(tmp_path / "a.csv"), pd.read_csv(tmp_path / "b.csv")
    assert second.pop("krank").isin(["ja", "no"]).all()
    pd.testing.assert_frame_equal(first, second)
    wrong = silodp(*predict, own_table, "--silo", "nord", "--out", tmp_path / "c.csv", "--json")
    assert wrong.json["error"]["code"] == "argument.value"
    (tmp_path / "run" / "config.toml").unlink()
    gone = silodp(*predict, own_table, "--silo", "north", "--out", tmp_path / "c.csv", "--json")
    assert gone.json["error"]["code"] == "config.path"


def test_buffers_outside_the_state_must_be_those_of_the_run(tmp_path: Path) -> None:
    class Shifted(nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 1)
            self.register_buffer("shift", torch.tensor(shift), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x + self.shift)

    write_tables(tmp_path)
    (tmp_path / "settings.toml").write_text(HEAD.format(label=CLASSES, task=""))
    settings = load_config(tmp_path / "settings.toml")
    federation = settings.load_federation()
    task = silodp.Task(Shifted(0.5), settings.build_task(federation).loss)
    train(federation, task, settings.method, out=tmp_path / "run", **settings.settings())
    silodp.load(tmp_path / "run", model=Shifted(0.5))
    refuse("bundle.architecture", tmp_path / "run", model=Shifted(0.6))


def test_a_run_without_a_schema_predicts_from_arrays(tmp_path: Path) -> None:
    made = silodp.data.embedded(users=20, silos=2)
    plain = silodp.Federation(made.silos, made.users, made.test, classes=2)
    task = silodp.Task(
        nn.Linear(30, 1), silodp.Loss.per_record("squared_error", lambda a, b: (a.squeeze(-1) - b) ** 2)
    )
    silodp.train(
        plain, task, silodp.methods.UldpAvg(noise_multiplier=1.0, clip=1.0), rounds=1, out=tmp_path / "run"
    )
    model = silodp.load(tmp_path / "run", model=nn.Linear(30, 1))
    assert made.test is not None
    assert model.predict(made.test.x).shape == (len(made.test), 2)
    assert model.columns == ("score_0", "score_1")
    with pytest.raises(SilodpError) as refused:
        model.predict(pd.DataFrame(made.test.x))
    assert refused.value.code == "bundle.no_schema"
