"""Models, losses, metrics and tables of a user that fail: one sentence, exit status 2, and nothing is spent."""

import json
import logging
import unicodedata
from pathlib import Path

import pytest

from silodp.config.resolve import load_config
from silodp.errors import SilodpError
from support.commands import Silodp, assert_sentence

CODE = """
import sys
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from nowhere import Unknown


def forwards_options(features, **options):
    return torch.nn.Linear(features, 1, **options)


def collects(*args, **options):
    return torch.nn.Linear(30, 1)


def annotated(features: int, extra: "Unknown" = None):
    return torch.nn.Linear(features, 1)


def of_torch_types(features: int, dtype: torch.dtype = torch.float32):
    return torch.nn.Linear(features, 1, dtype=dtype)


def raises(features):
    raise KeyError("x" * 2000)


def leaves(features):
    sys.exit(0)


def scalar_loss(outputs, targets):
    return F.binary_cross_entropy_with_logits(outputs.squeeze(1), targets.float())


def raising_loss(outputs, targets):
    raise LookupError("nothing here")


def raising_metric(outputs, targets):
    raise LookupError("nothing here")


number = 7
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    path = tmp_path / "own.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize("name", ["forwards_options", "collects", "annotated", "of_torch_types"])
def test_functions_that_make_models_may_take_what_they_like(
    silodp: Silodp, config: Path, code: Path, name: str
):
    ran = silodp("run", config, "--set", f"task.model={code}:{name}", "--set", "rounds=1", "--out", "out")
    assert ran.status == 0, ran.err


def test_options_reach_a_function_that_collects_them(config: Path, code: Path):
    settings = load_config(config, [f"task.model={code}:forwards_options", "task.options.bias=false"])
    assert settings.build_task(settings.load_federation()).size == 30


@pytest.mark.parametrize(
    ("task", "error"),
    [
        ("model={}:raises", "model.raised"),
        ("model={}:leaves", "model.raised"),
        ("model={}:number", "model.not_a_module"),
        ("model={}:absent", "config.not_importable"),
        ("model={folder}/leaves.py:build", "config.not_importable"),
        ("model=torch:tensor", "config.no_signature"),
        ("loss={}:scalar_loss", "loss.not_per_record"),
        ("loss={}:raising_loss", "loss.raised"),
        ("loss={}:number", "loss.not_callable"),
        ("loss=cross_entropy", "loss.output_shape"),
        ("loss=cox", "loss.wrong_labels"),
        ('metrics=["{}:raising_metric"]', "metric.raised"),
        ('metrics=["{}:number"]', "metric.not_callable"),
        ('metrics=["concordance"]', "metric.wrong_labels"),
    ],
)
def test_what_fails_is_one_sentence_before_anything_is_spent(
    silodp: Silodp, config: Path, code: Path, task: str, error: str
):
    setting = "task." + task.replace("{folder}", str(code.parent)).replace("{}", str(code))
    ran = silodp("run", config, "--set", setting, "--out", "out")
    assert_sentence(ran, code=error)
    assert len(ran.err) < 700
    assert not Path("out").exists()


TABLES = """
rounds = 1
seed = 1
[data]
source = "tables"
files = { north = "north.csv", south = "south.csv" }
[data.schema]
user = "id"
label = "y"
classes = [0, 1]
numeric = { age = [0, 110] }
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.1
"""


def write_tables(folder: Path, north: list[str], south: list[str]) -> Path:
    for name, keys in (("north", north), ("south", south)):
        lines = [f"{key},{30 + i},{i % 2}" for i, key in enumerate(keys)]
        (folder / f"{name}.csv").write_text("\n".join(["id,age,y", *lines]) + "\n", encoding="utf-8")
    path = folder / "tables.toml"
    path.write_text(TABLES)
    return path


def test_a_run_says_how_many_persons_are_in_how_many_silos(silodp: Silodp, tmp_path: Path):
    names = [f"Zoë {i}" for i in range(12)]
    nfd = [unicodedata.normalize("NFD", name) for name in names[4:]] + ["Ada"]
    config = write_tables(tmp_path, names, nfd)
    ran = silodp("run", config, "--out", tmp_path / "out", "--json")
    assert ran.json["persons_by_silos"] == {"1": 5, "2": 8}
    assert ran.json["warnings"] == []
    in_words = silodp("run", config, "--out", tmp_path / "again")
    assert "5 in 1 silo, 8 in 2 silos" in in_words.out
    for shared in ("guarantee.json", "report.html", "config.toml"):
        assert "persons_by_silos" not in (tmp_path / "out" / shared).read_text()
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["persons_by_silos"] == {"1": 5, "2": 8}


def test_a_run_warns_at_its_start_and_in_its_report_where_keys_do_not_meet(silodp: Silodp, tmp_path: Path):
    config = write_tables(tmp_path, [f"{i:05}" for i in range(10)], [str(i) for i in range(10)])
    ran = silodp("run", config, "--out", tmp_path / "out", "--json")
    assert ran.status == 0
    assert ran.json["persons_by_silos"] == {"1": 20}
    nobody, similar = ran.json["warnings"]
    assert "no person appears in more than one silo" in nobody
    assert "20 person keys (in north, south) would be 10" in similar
    assert [ran.err.count(f"warning: {warning}\n") for warning in (nobody, similar)] == [1, 1]
    for _ in range(2):  # as the run wrote it, and as it is written anew
        page = (tmp_path / "out" / "report.html").read_text()
        assert 'id="data-warnings"' in page
        assert "20 person keys (in north, south) would be 10" in page
        assert silodp("report", tmp_path / "out").status == 0
    for shared in ("guarantee.json", "metrics.jsonl", "MODEL_CARD.md", "model.json"):
        assert "person keys" not in (tmp_path / "out" / shared).read_text()
    (tmp_path / "out" / "plots" / "data_warnings.json").write_text('{"data_warnings": [1]}')
    assert silodp("report", tmp_path / "out", "--json").json["error"]["code"] == "report.damaged"


def test_warnings_of_tables_begin_as_those_of_a_run(
    silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = write_tables(tmp_path, ["a", "b"], ["c", "d"])
    for label, number in (("classes = [0, 1]", 5), ('kind = "real"', 6)):
        config.write_text(config.read_text().replace("classes = [0, 1]", label))
        with monkeypatch.context() as patch:
            patch.setattr(logging.getLogger(), "handlers", [])  # pytest's, which a command does not have
            ran = silodp("run", config, "--out", tmp_path / f"out{number}")
        assert ran.status == 0
        warnings = {line for line in ran.err.splitlines() if not line.startswith(("round ", "note: "))}
        assert len(warnings) == number
        assert all(line.startswith("warning: ") for line in warnings)


def test_a_run_warns_of_weights_that_let_everybody_count_in_part(silodp: Silodp, tmp_path: Path):
    """Uniform weights of persons with records in one of two silos: noise counts twice as much as it need."""
    config = write_tables(tmp_path, [f"N {i}" for i in range(10)], [f"S {i}" for i in range(10)])
    _, weights = silodp("run", config, "--out", tmp_path / "out", "--json").json["warnings"]
    assert "count for 1/2" in weights
    present = silodp(
        "run", config, "--out", tmp_path / "present", "--json", "--set", "method.weighting=present"
    )
    assert not [warning for warning in present.json["warnings"] if "count for" in warning]


def test_simulated_persons_have_no_keys_to_doubt(silodp: Silodp, config: Path):
    ran = silodp("run", config, "--out", "out", "--json")
    assert ran.json["warnings"] == []
    assert sum(ran.json["persons_by_silos"].values()) == 20


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("data.schema.classes=[]", "data.values"),
        ("data.schema.kind=real", "data.kind"),
        ("data.schema.kind=survival", "data.kind"),
    ],
)
def test_what_a_schema_refuses_keeps_its_code_in_a_configuration(tmp_path: Path, change: str, error: str):
    config = write_tables(tmp_path, ["a"], ["b"])
    with pytest.raises(SilodpError) as caught:
        load_config(config, [change])
    assert caught.value.code == error
