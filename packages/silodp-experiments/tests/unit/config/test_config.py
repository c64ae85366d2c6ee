"""A configuration mirrors the Python API, and every mistake in it is one sentence."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from silodp.accounting.ledger import Budget
from silodp.aggregators import Plain
from silodp.config.resolve import ResolvedRun, load_config
from silodp.config.task import build_task
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.methods import METHODS, UldpAvg, UldpSgd
from silodp.training.sgd.local import LocalTraining
from silodp_experiments.method_specs import parse_methods
from silodp_experiments.uldp_baselines import Default, UldpGroup, UldpNaive
from support.refusals import refused

BASE = """
rounds = 3
[data]
source = "embedded"
users = 20
silos = 2
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.01
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def test_fields_become_the_objects_of_the_python_api(base: Path) -> None:
    config = load_config(
        base,
        [
            "method.local.epochs=7",
            "method.weighting=records",
            "budget.epsilon=2",
            "budget.adversary=server",
            "delta=1e-6",
            "seed=3",
        ],
    )
    assert config.config.name == "base"
    assert config.method == UldpAvg(
        noise_multiplier=5.0, clip=0.1, weighting="records", local=LocalTraining(learning_rate=0.01, epochs=7)
    )
    assert config.budget == Budget(epsilon=2.0, delta=1e-6, adversary="server")
    assert config.settings() == {
        "rounds": 3,
        "aggregator": Plain(),
        "seed": 3,
        "delta": 1e-6,
        "accountant": None,
        "silo_limits": {},
        "budget": config.budget,
        "evaluation": None,
        "isolate_units": False,
    }
    federation = config.load_federation()
    assert (federation.users, len(federation.silos), len(config.silos)) == (20, 2, 2)
    task = config.build_task(federation)
    assert (task.size, task.loss.name, [*task.metrics]) == (
        31,
        "binary_cross_entropy",
        ["accuracy", "roc_auc"],
    )


WITH_TABLES = """
rounds = 3
[data]
source = "tables"
files = { north = "north.csv" }
[data.schema]
user = "patient"
label = "ill"
classes = ["no", "yes"]
numeric = { age = [0, 110] }
[method]
name = "uldp-avg"
noise_multiplier = 5.0
"""


@pytest.mark.parametrize(
    ("setting", "wrong", "examples"),
    [
        ("data.files", '"a.csv"', 2),
        ("data.schema.reader.missing", '"?"', 1),
        ("task.loss_options.class_weights", '"balanced"', 1),
        ("task.metrics", '"accuracy"', 1),
    ],
)
def test_a_value_of_another_type_is_refused_with_examples_that_fit(
    tmp_path: Path, setting: str, wrong: str, examples: int
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(WITH_TABLES)

    def load(value: str) -> None:
        config = load_config(path, [f"{setting}={value}"])
        config.build_task(config.read_public_data(20))

    with refused("config.value") as caught:
        load(wrong)
    assert caught.value.field == setting
    found = re.findall(r"such as (\{.*?\}|\[.*?\])", str(caught.value))
    assert len(found) == examples
    for example in found:
        load(example)


@pytest.mark.parametrize(
    ("section", "code"), [("data", "config.missing_field"), ("method", "config.missing_field")]
)
def test_a_missing_table_is_named_as_toml_writes_it(tmp_path: Path, section: str, code: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(re.sub(rf"\[{section}\][^\[]*(\[{section}\.[^\[]*)?", "", BASE))
    with refused(code) as caught:
        load_config(path)
    assert caught.value.field == section
    assert f"[{section}]" in str(caught.value)
    with refused("config.value") as caught:
        load_config(path, [f"{section}=3"])
    assert f"[{section}]" in str(caught.value)


def test_a_schema_that_is_written_and_read_again_has_its_features_in_order(tmp_path: Path) -> None:
    path, copy = tmp_path / "config.toml", tmp_path / "copy.toml"
    numeric = "{ range = [0, 120], typical = [40, 20] }"
    numbered = f"numeric = {{ age = {numeric}, weight = [0, 300], height = {numeric}, pulse = [30, 200] }}"
    schema = f"user = 'person'\nlabel = 'ill'\nclasses = ['0', '1']\n{numbered}\n"
    tables = f"[data]\nsource = 'tables'\nfiles = {{ one = 'one.csv' }}\n[data.schema]\n{schema}"
    path.write_text(re.sub(r"\[data\][^\[]*(\[data\.[^\[]*)*", tables, BASE))
    first = load_config(path).config
    copy.write_text(first.to_toml())
    read, again = (list(one.data["schema"]["numeric"]) for one in (first, load_config(copy).config))
    assert again == read == ["weight", "pulse", "age", "height"]


@pytest.mark.parametrize(
    ("override", "code", "field"),
    [
        ("rouns=3", "config.unknown_field", "rouns"),
        ("noise_multiplier=3", "config.unknown_field", "noise_multiplier"),
        ("method.clipp=1", "config.unknown_field", "method.clipp"),
        ("method.local.epoch=1", "config.unknown_field", "method.local.epoch"),
        ("data.user=1", "config.unknown_field", "data.user"),
        ("task.los=cox", "config.unknown_field", "task.los"),
        ("budget.epsilonn=1", "config.unknown_field", "budget.epsilonn"),
        ("methods.uldp-group.group=1", "config.unknown_field", "methods.uldp-group.group"),
        ("method.name=uldp-avgg", "argument.value", "method.name"),
        ("data.source=heart", "argument.value", "data.source"),
        ("aggregator=plan", "argument.value", "aggregator"),
        ("accountant=moments", "config.value", "accountant"),
        ("method.weighting=equal", "config.value", "method.weighting"),
        ("rounds=many", "config.value", "rounds"),
        ("rounds=true", "config.value", "rounds"),
        ("rounds=-1", "config.value", "rounds"),
        ("method.clip='1'", "config.value", "method.clip"),
        ("method.clip=0", "argument.value", "clip"),
        ("method.clip=nan", "argument.value", "clip"),
        ("method.noise_multiplier=-1", "argument.value", "noise_multiplier"),
        ("method.user_sampling=0", "argument.value", "user_sampling"),
        ("method.local=3", "config.value", "method.local"),
        ("delta=0", "config.value", "delta"),
        ("delta=nan", "config.value", "delta"),
        ("budget.epsilon=0", "argument.value", "budget.epsilon"),
        ("budget={epsilon=1, adversary='nobody'}", "config.value", "budget.adversary"),
        ("name=../up", "config.value", "name"),
        ("rounds", "cli.usage", "--set"),
        ("=3", "cli.usage", "--set"),
        ("rounds.x=3", "config.value", "rounds"),
        ("data=embedded", "config.value", "data"),
        ("method.local={epochs=2}", "config.missing_field", "method.local.learning_rate"),
        ("method={name='uldp-group', noise_multiplier=5.0}", "config.missing_field", "method.clip"),
    ],
)
def test_a_mistake_names_its_field(base: Path, override: str, code: str, field: str) -> None:
    with refused(code) as caught:
        load_config(base, [override])
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "code", "field"),
    [
        ("noise_multiplier = 5.0", "config.missing_field", "method.noise_multiplier"),
        ('source = "embedded"', "config.value", "data.source"),
        ('name = "uldp-avg"', "config.missing_field", "method.name"),
    ],
)
def test_a_required_field_is_asked_for(base: Path, line: str, code: str, field: str) -> None:
    base.write_text(BASE.replace(line, ""))
    with refused(code) as caught:
        load_config(base)
    assert caught.value.field == field


def test_a_file_that_is_not_there_or_not_toml(base: Path, tmp_path: Path) -> None:
    base.write_text("rounds = = 3")
    for path, code in (
        (tmp_path / "nowhere.toml", "config.path"),
        (tmp_path, "config.path"),
        (base, "config.not_toml"),
    ):
        with refused(code):
            load_config(path)


def test_relative_paths_start_at_the_files_folder(base: Path, tmp_path: Path) -> None:
    folder = tmp_path.resolve()
    text = BASE.replace('source = "embedded"\nusers = 20\nsilos = 2', TABLES)
    base.write_text(text + '[task]\nmodel = "nets/net.py:build"\n')
    run = load_config(base)
    config = run.config
    assert config.data["files"] == {"a": str(folder / "a.csv"), "b": str(folder / "tables/b.csv")}
    assert config.data["schema"]["users"] == str(folder / "users.txt")
    assert config.task.model == f"{folder / 'nets/net.py'}:build"
    assert len(run.silos) == 2


TABLES = """source = "tables"
files = { a = "a.csv", b = "tables/b.csv" }
[data.schema]
user = "person"
label = "sick"
classes = ["no", "yes"]
users = "users.txt"
[data.schema.numeric]
age = [0, 100]
"""


def test_own_tables_and_own_model_in_toml(base: Path, tmp_path: Path) -> None:
    for silo in ("a", "tables/b"):
        path = tmp_path / f"{silo}.csv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("person,sick,age\nu1,no,30\nu2,yes,60\n")
    (tmp_path / "users.txt").write_text("u1\nu2\nu3\n")
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def build(features, classes, width=4):\n"
        "    return nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, classes))\n"
        "def off_by(outputs, targets):\n"
        "    return 1.5\n"
    )
    base.write_text(
        BASE.replace('source = "embedded"\nusers = 20\nsilos = 2', TABLES)
        + '[task]\nmodel = "net.py:build"\noptions = { width = 3 }\nmetrics = ["accuracy", "net.py:off_by"]\n'
    )
    config = load_config(base)
    federation = config.load_federation()
    task = config.build_task(federation)
    assert federation.users == 3
    assert task.size == 3 + 3 + 6 + 2
    assert task.loss.name == "cross_entropy"
    found = task.evaluate(task.initial(0), federation.silos[0].x, federation.silos[0].y)
    assert found["off_by"] == 1.5
    with pytest.raises(SilodpError, match=r"task.options.depth is not a field of the model"):
        load_config(base, ["task.options.depth=2"]).build_task(federation)


def test_losses_of_torch_are_taken_as_they_are(base: Path, tmp_path: Path) -> None:
    """A class of torch.nn, and an object in a file with a setting of its own."""
    (tmp_path / "own.py").write_text(
        "import torch\nloss = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]))\n"
    )
    found = {}
    for name in ("binary_cross_entropy", "torch.nn:BCEWithLogitsLoss", "own.py:loss"):
        config = load_config(base, [f"task.loss={name}"])
        federation = config.load_federation()
        task = config.build_task(federation)
        x, y = task.tensors(federation.silos[0].x, federation.silos[0].y)
        found[name] = task.evaluate(task.initial(0), x, y)["loss"]
    assert found["torch.nn:BCEWithLogitsLoss"] == pytest.approx(found["binary_cross_entropy"])
    assert found["own.py:loss"] > 1.1 * found["binary_cross_entropy"]


def test_a_configuration_can_start_at_the_values_of_a_model(base: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def build(features):\n"
        "    net = nn.Linear(features, 1)\n"
        "    nn.init.constant_(net.weight, 0.25)\n"
        "    return net\n"
    )
    for start, kept in (("true", True), ("false", False)):
        config = load_config(base, ["task.model=net.py:build", f"task.pretrained={start}"])
        task = config.build_task(config.load_federation())
        assert bool((task.initial(0)[:-1] == 0.25).all()) is kept


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("task.model=nothere.py:build", "config.not_importable"),
        ("task.model=no_such_module:build", "config.not_importable"),
        ("task.model=math:pi", "model.not_a_module"),
        ("task.model=math:tau2", "config.not_importable"),
        ("task.model=os:getcwd", "model.not_a_module"),
        ("task.model=logistik", "argument.value"),
        ("task.loss=croos_entropy", "argument.value"),
        ("task.metrics=['acc']", "argument.value"),
        ("task.options.width=3", "config.unknown_field"),
    ],
)
def test_a_task_that_cannot_be_built(base: Path, override: str, code: str) -> None:
    config = load_config(base, [override])
    with refused(code) as caught:
        config.build_task(config.load_federation())
    assert caught.value.field == override.partition("=")[0]
    assert "\n" not in str(caught.value)


GROUP = """
[methods.uldp-group]
record_sampling = 0.05
local_steps = 10
expected_batch_size = 6.0
local_learning_rate = 0.001
[methods.default.local]
epochs = 9
"""


def test_specifications_inherit_what_both_methods_have(base: Path) -> None:
    base.write_text(BASE + GROUP)
    text = "uldp-avg,uldp-avg:weighting=records:q=0.5,uldp-group:k=8,uldp-naive:sigma=2:local.epochs=3"
    text += ",uldp-sgd,default"
    specs = parse_methods(load_config(base), text)
    assert [spec.label for spec in specs] == text.split(",")
    local = LocalTraining(learning_rate=0.01)
    assert [spec.method for spec in specs] == [
        UldpAvg(5.0, 0.1, local),
        UldpAvg(5.0, 0.1, local, weighting="records", user_sampling=0.5),
        UldpGroup(5.0, 0.1, 8, 0.05, 10, 6.0, 0.001),
        UldpNaive(2.0, 0.1, LocalTraining(learning_rate=0.01, epochs=3)),
        UldpSgd(5.0, 0.1),
        Default(LocalTraining(learning_rate=0.01, epochs=9)),
    ]


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ("uldp-group:k=8", "config.missing_field", "methods.uldp-group.record_sampling"),
        ("uldp-avg:k=8", "config.unknown_field", "methods.uldp-avg.group_size"),
        ("uldp-avgg", "argument.value", "methods"),
        ("uldp-avg,uldp-avg", "argument.value", "methods"),
        ("", "argument.value", "methods"),
        ("uldp-avg:q=2", "argument.value", "user_sampling"),
        ("uldp-avg:weighting", "cli.usage", "--set"),
    ],
)
def test_a_specification_that_does_not_fit(base: Path, text: str, code: str, field: str) -> None:
    with refused(code) as caught:
        parse_methods(load_config(base), text)
    assert caught.value.field == field


@pytest.mark.parametrize("raised", ["ValueError('odd clip')", "AssertionError('odd clip')"])
def test_what_a_plug_in_raises_about_its_fields_is_a_mistake_of_the_configuration(
    base: Path, tmp_path: Path, raised: str
) -> None:
    (tmp_path / "own.py").write_text(
        "from silodp.methods import UldpAvg\n"
        "class Picky(UldpAvg):\n"
        "    name = 'picky'\n"
        "    def __post_init__(self):\n"
        f"        raise {raised}\n"
    )
    with refused("config.value"):
        load_config(base, ["method.name=own.py:Picky"])


def test_every_object_is_made_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    start = UldpAvg.__post_init__
    monkeypatch.setattr(UldpAvg, "__post_init__", lambda self: (made.append(self), start(self))[1])
    run = load_config(base)
    federation = run.load_federation()
    spec = run.prepare(federation, run.build_task(federation))
    assert made == [run.method]
    assert spec.method is run.method


def test_a_configuration_cannot_be_changed(base: Path) -> None:
    run = load_config(base)
    assert isinstance(run, ResolvedRun)
    with pytest.raises(Exception, match="frozen"):
        run.config.rounds = 5  # type: ignore[misc]
    with pytest.raises(Exception, match="cannot assign"):
        run.method = METHODS["default"]()  # type: ignore[misc]


def test_a_seed_fixes_parameters_that_no_layer_resets(base: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.randn(30))\n"
        "    def forward(self, x):\n"
        "        return x @ self.w\n"
    )
    config = load_config(base, ["task.model=own.py:Net", "seed=1"])
    federation = config.load_federation()
    first, second = (config.build_task(federation).initial(1).numpy() for _ in range(2))
    assert np.array_equal(first, second)
    assert math.isfinite(first.sum())


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ('methods.uldp-avg.clip="abc"', "methods.uldp-avg.clip"),
        ("methods.uldp-avg.noise_multiplier=true", "methods.uldp-avg.noise_multiplier"),
        ('methods.uldp-avg.local.learning_rate="x"', "methods.uldp-avg.local.learning_rate"),
        ("methods.uldp-avg.local=3", "methods.uldp-avg.local"),
        (
            "methods.uldp-avg.server_optimizer={name='adam', learning_rate='x'}",
            "methods.uldp-avg.server_optimizer.learning_rate",
        ),
        ("method.name=3", "method.name"),
        ("method.server_optimizer.name=3", "method.server_optimizer.name"),
    ],
)
def test_values_of_methods_that_are_not_trained_have_their_types(
    base: Path, override: str, field: str
) -> None:
    """`plan` builds no method of [methods]; a comparison that runs for hours must not end at its third."""
    with refused("config.value", "config.unknown_field") as caught:
        load_config(base, [override])
    assert caught.value.field == field


def test_values_of_methods_may_be_a_part(base: Path) -> None:
    config = load_config(base, ["methods.uldp-group.group_size=8", "methods.uldp-avg.local.epochs=3"])
    (spec,) = parse_methods(config, "uldp-avg")
    assert isinstance(spec.method, UldpAvg)
    assert spec.method.local == LocalTraining(learning_rate=0.01, epochs=3)


def test_a_large_model_is_named_before_it_is_tried(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A plan of 5.8e8 parameters took two minutes without a word."""
    monkeypatch.setattr("silodp.config.task._LARGE", 1000)
    public = PublicData("toy", ("a", "b"), 9, (4,), "classes", 2)
    for width, expected in ((9, 0), (300, 1)):
        build_task(public, model="mlp", options={"width": width, "layers": 1})
        assert sum("2,702 parameters" in message for message in caplog.messages) == expected
