"""Whatever value any field of a configuration has: a plan, a run, or one sentence with a code."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import random
import re
import shutil
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from silodp.accounting.ledger import Budget
from silodp.aggregators.registry import AGGREGATORS
from silodp.cli.run import run_config
from silodp.config.build import get_fields, get_table_class
from silodp.config.resolve import resolve
from silodp.config.schema import RunConfig, TaskSection, parse_config
from silodp.data.catalog import find_dataset
from silodp.errors import CODES, SilodpError
from silodp.methods import METHODS
from silodp.planning.plan import format_plan, plan_run
from silodp.settings import MAX_REAL, MAX_WHOLE, MIN_REAL
from silodp_budgets.budget_distributions import PREFERENCES
from support.commands import Silodp, assert_sentence
from support.wards import draw_wards, write_wards

TIMES = int(os.environ.get("SILODP_VALUES", "1"))
"""How many times as many values are tried; `make test-fuzz` tries more."""
EXAMPLES = Path(__file__).parents[2] / "examples"

Case = tuple[str, dict[str, Any]]

NOISE = {"noise_multiplier": 5.0, "clip": 1.0}
STEPS = {"local_steps": 5, "expected_batch_size": 4.0, "local_learning_rate": 0.1}
OWN: dict[str, dict[str, Any]] = {
    "default": {},
    "uldp-naive": NOISE,
    "uldp-sgd": NOISE,
    "uldp-avg": NOISE,
    "uldp-group": {**NOISE, **STEPS, "group_size": 8, "record_sampling": 0.1},
    "rpdp": {**NOISE, **STEPS, "largest_budget": 5.0},
    "rpdp-filter": {**NOISE, **STEPS, "largest_budget": 5.0},
    "rpdp-minimum": {**NOISE, **STEPS, "budget": 1.0},
    "rpdp-dropout": {**NOISE, **STEPS, "threshold": 1.0},
    "ddp": {**NOISE, **STEPS, "record_sampling": 0.1},
}
NUMBERS = [-1, 0, 1, 2, 7, 10**6, MAX_WHOLE, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**400, True, False]
REALS = [
    0.5,
    1.0,
    1.5,
    1e-12,
    1e3,
    1e12,
    1e-320,
    5e-324,
    1e300,
    -1e300,
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
]
REALS += [MIN_REAL, MIN_REAL / 2, MAX_REAL, MAX_REAL * 2]
TEXTS = [
    "",
    "x",
    "\0",
    "a" * 200_000,
    "a" * 50_000,
    "\udcff",
    "e\u0301",
    "a/b",
    "a\nb",
    "1",
    "os:getcwd",
    "a:b:c",
]
OTHERS = [
    [],
    [1],
    [0.5, 0.5],
    ["x"],
    [[1.0, 0.5], [2.0, 0.5]],
    [math.nan],
    {},
    {"x": 1},
    {"": 1},
    {"x": {"y": {"z": 1}}},
    datetime.date(2020, 1, 1),
    datetime.datetime(2020, 1, 1),
    datetime.time(1, 2),
]
VALUES = [*NUMBERS, *REALS, *TEXTS, *OTHERS]
ALLOWED = [
    1,
    2,
    3,
    10**6,
    MAX_WHOLE,
    0.0,
    1e-12,
    1e-8,
    0.3,
    0.5,
    1 - 1e-9,
    1.5,
    1e3,
    1e6,
    1e12,
    MIN_REAL,
    MAX_REAL,
]
"""Such as the range check of a single field lets through, to meet one another."""


def base(method: str, aggregator: str = "plain", **fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": "x",
        "rounds": 2,
        "delta": 1e-5,
        "aggregator": aggregator,
        "data": {"source": "embedded", "users": 12, "silos": 3},
        "method": {"name": method, **OWN[method], **fields},
    }
    hidden = {"lattice": "records", "paillier": "records", "select": "primary_silo"}.get(aggregator)
    if hidden is not None and "weighting" in get_fields(METHODS[method]):
        values["method"]["weighting"] = hidden  # else they have nothing to hide
    if method.startswith("rpdp") or "personal" in fields:
        values["budgets"] = {
            "distribution": "three-levels",
            "of": "users" if "personal" in fields else "records",
        }
    return values


def put(values: Any, path: tuple[str, ...], value: Any) -> Any:
    if not path:
        return value
    below = values if isinstance(values, dict) else {}
    return {**below, path[0]: put(below.get(path[0]), path[1:], value)}


def fields_of_method(name: str) -> Iterator[tuple[str, ...]]:
    for field in get_fields(METHODS[name]):
        yield ("method", field)
        table = get_table_class(METHODS[name], field)
        for below in get_fields(table) if table is not None else ():
            yield ("method", field, below)


def cases() -> Iterator[Case]:
    """Every field with every value; the rest is as usual."""
    starts: list[tuple[str, dict[str, Any], list[tuple[str, ...]]]] = []
    for name in OWN:
        for path in fields_of_method(name):
            personal = {"by": "clip", "rounds": 2, "largest_budget": 5.0}
            starts.append(
                (name, base(name, **({"personal": personal} if path[1:2] == ("personal",) else {})), [path])
            )
    top = [(key,) for key in RunConfig.model_fields]
    top += [("task", key) for key in TaskSection.model_fields]
    top += [
        ("data", key)
        for key in [*get_fields(find_dataset("embedded").loader), "source", "root", "files", "schema"]
    ]
    top += [("budget", key) for key in get_fields(Budget)]
    top += [("method", "name"), ("methods", "uldp-avg"), ("methods", "uldp-avg", "clip"), ("bogus",)]
    starts.append(("top", base("uldp-avg"), top))
    for name, maker in AGGREGATORS.items():
        paths = [("aggregation", field) for field in get_fields(maker)]
        paths += [
            ("rounds",),
            ("delta",),
            ("method", "noise_multiplier"),
            ("method", "clip"),
            ("data", "silos"),
        ]
        starts.append((name, base("uldp-avg", name), paths))
    for name, draw in PREFERENCES.items():
        values = put(base("rpdp"), ("budgets", "distribution"), name)
        keys = [key for key in get_fields(draw) if key not in ("count", "generator")]
        starts.append((name, values, [("budgets", key) for key in (*keys, "distribution", "of", "seed")]))
    for start, values, paths in starts:
        for path in paths:
            for value in VALUES:
                yield f"{start} {'.'.join(path)} = {value!r:.60}", put(values, path, value)


def planned(values: dict[str, Any], target: float | None = None) -> None:
    """What `silodp plan` does, the printing included."""
    config = parse_config(values)
    run = resolve(config)
    spec, _ = run.build_public_spec()
    result = plan_run(
        spec,
        accountant=config.accountant,
        target=target,
        distribution=run.budget_distribution,
    )
    format_plan(result)
    json.dumps(result, allow_nan=False).encode()
    assert resolve(parse_config(_read_back(config))).config.to_toml() == config.to_toml()


def _read_back(config: RunConfig) -> dict[str, Any]:
    return tomllib.loads(config.to_toml())


def told(case: str, attempt: Any, *arguments: Any) -> bool:
    """Whether it worked; else it must be one sentence with a known code."""
    refused = None
    try:
        attempt(*arguments)
    except SilodpError as error:
        refused = error
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    if refused is not None:
        text = str(refused)
        assert refused.code in CODES, case
        assert len(text) < 2000, case
        assert "\n" not in text.strip(), case
        assert "\0" not in text, case
    return refused is None


def sampled(number: int, seed: int) -> list[Case]:
    everything = list(cases())
    return random.Random(seed).sample(everything, min(number, len(everything)))


def test_every_method_can_be_written_in_toml() -> None:
    values = {"rounds": 1, "data": {"source": "embedded"}}
    group = {"group_size": 8, "record_sampling": 0.1, "local_steps": 5}
    group |= {"expected_batch_size": 4.0, "local_learning_rate": 0.1}
    noisy = {"noise_multiplier": 5, "clip": 1}
    fields = {"default": {}, "uldp-naive": noisy, "uldp-sgd": noisy, "uldp-avg": noisy}
    fields["uldp-group"] = {**noisy, **group}
    steps = {key: value for key, value in group.items() if key not in ("group_size", "record_sampling")}
    fields["rpdp"] = {**noisy, **steps, "largest_budget": 5}
    fields["rpdp-filter"] = {**noisy, **steps, "largest_budget": 5}
    fields["rpdp-minimum"] = {**noisy, **steps, "budget": 0.1}
    fields["rpdp-dropout"] = {**noisy, **steps, "threshold": 1}
    fields["ddp"] = {**noisy, **steps, "record_sampling": 0.1}
    fields["statistics"] = fields["regression"] = {"noise_multiplier": 5}
    assert fields.keys() == METHODS.keys()
    for name, own in fields.items():
        if name.startswith("rpdp"):
            values["budgets"] = {"distribution": "three-levels"}
        else:
            values.pop("budgets", None)
        made = resolve(parse_config({"name": "x", **values, "method": {"name": name, **own}}))
        assert type(made.method) is METHODS[name]


@pytest.mark.slow
def test_the_usual_values_can_be_planned() -> None:
    """Else all that follows would be refused for another reason."""
    for name in OWN:
        planned(base(name))
    for aggregator in AGGREGATORS:
        planned(base("uldp-avg", aggregator))
    planned(base("uldp-avg", personal={"by": "clip", "rounds": 2, "largest_budget": 5.0}))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [120, pytest.param(600 * TIMES, marks=pytest.mark.slow)])
def test_any_value_of_any_field_gives_a_plan_or_a_sentence(number: int) -> None:
    worked = sum(told(case, planned, values) for case, values in sampled(number, seed=number))
    assert worked > number / 50


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_values_at_the_ends_of_their_ranges_give_a_plan_or_a_sentence_together() -> None:
    random_ = random.Random(7)
    worked = 0
    for _ in range(80 * TIMES):
        name = random_.choice(list(OWN))
        values = base(name, random_.choice([*AGGREGATORS, "plain"]))
        paths = [
            path for path in fields_of_method(name) if len(path) == 2 and path[1] not in ("local", "personal")
        ]
        paths += [("rounds",), ("delta",), ("data", "users"), ("budget", "epsilon")]
        for path in random_.sample(paths, 3):
            values = put(values, path, random_.choice(ALLOWED))
        target = random_.choice([None, None, 1.0, 1e-9, 1e9])
        worked += told(f"{values} target {target}", planned, values, target)
    assert worked > 3 * TIMES


@pytest.mark.slow
@pytest.mark.pictures
@pytest.mark.timeout(900)
def test_any_value_of_any_field_gives_a_run_or_a_sentence(tmp_path: Path) -> None:
    small = [
        value
        for value in [*VALUES, *ALLOWED]
        if isinstance(value, bool | float | str) or value in (-1, 0, 1, 2)
    ]
    random_ = random.Random(3)
    worked = 0
    for turn in range(50 * TIMES):
        name = random_.choice(list(OWN))
        # A reference to code of one's own is another matter.
        paths = [*fields_of_method(name), ("data", "allocation"), ("seed",), ("budget", "epsilon")]
        path = random_.choice([path for path in paths if path[1:2] != ("personal",)])
        values = put(base(name), path, random_.choice(small))
        worked += told(
            f"{path} {values}",
            lambda v=values, t=turn: run_config(resolve(parse_config(v)), tmp_path / str(t)),
        )
    assert worked > 3 * TIMES


REMOVED = object()
TABLES = """
rounds = 2
aggregator = "masked"
[aggregation]
min_silos = 3
[data]
source = "tables"
files = { north = "north.csv", south = "south.csv", west = "west.csv" }
[data.schema]
user = "patient"
label = "dead"
classes = ["0", "1"]
test_share = 0.25
out_of_range = "clip"
categorical = { ward = ["A", "B"] }
numeric = { age = { range = [0, 120], missing = "indicator" }, days = [0, 2000] }
[data.schema.reader]
missing = ["-1"]
[data.schema.readers]
north = { separator = ",", decimal = "." }
[data.schema.silos.south]
columns = { patient = "patient" }
values = { dead = { yes = "1", no = "0" } }
[task]
model = "mlp"
loss = "cross_entropy"
metrics = ["roc_auc", "accuracy"]
[task.options]
width = 6
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.1
epochs = 2
[methods.default]
server_learning_rate = 1.0
[budget]
epsilon = 50.0
adversary = "released"
[silo_limits]
released = 100.0
[evaluation]
across = "sums"
noise_multiplier = 3.0
bins = 10
by = ["ward"]
[card]
publish_metrics = false
[card.subgroups]
age = [0.0, 60.0, 120.0]
[statistics]
epsilon = 2
count = ["ward"]
mean = ["age"]
[statistics.histogram]
days = 5
"""
"""Every table of a configuration that a run on CSV files may have; nothing states the number of persons."""
COMMANDS: list[list[Any]] = [
    ["plan"],
    ["plan", "--target-epsilon", 2],
    ["statistics", "--plan", "--epsilon", 1],
    ["statistics", "--write-config", "written.toml"],
    ["deploy", "init", "--out", "drafted"],
]
TRAININGS: list[list[Any]] = [
    ["run", "--out", "trained"],
    ["statistics", "--epsilon", 1, "--out", "counted"],
    ["compare", "--methods", "uldp-sgd", "--seeds", 1, "--out", "compared"],
]


def list_paths(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from list_paths(value, (*above, key))


def without(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    left = {key: value for key, value in values.items() if key != path[0] or len(path) > 1}
    return {**left, path[0]: without(values[path[0]], path[1:])} if len(path) > 1 else left


def call_with_each_setting(
    silodp: Silodp,
    start: dict[str, Any],
    values: list[Any],
    commands: list[list[Any]],
    paths: Iterable[tuple[str, ...]] = (),
) -> int:
    """Call commands with every setting removed, or replaced by each value; return how many calls worked."""
    worked = 0
    for path, value in itertools.product(paths or list_paths(start), values):
        changed = without(start, path) if value is REMOVED else put(start, path, value)
        Path("case.toml").write_text(tomli_w.dumps(changed))
        for command, *options in commands:
            named = [command, options.pop(0)] if command == "deploy" else [command]
            outcome = silodp(*named, "case.toml", *options)
            if outcome.status != 0:
                told = re.fullmatch(r"error: .+ \[([a-z_.]+)\]", outcome.err.splitlines()[-1])
                assert outcome.status == 2, (named, path, value, outcome)
                assert told is not None, (named, path, value, outcome)
                assert told[1] in CODES, (named, path, value, outcome)
            worked += outcome.status == 0
            for left in ("written.toml", "drafted", "trained", "counted", "compared"):
                shutil.rmtree(left) if Path(left).is_dir() else Path(left).unlink(missing_ok=True)
    return worked


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_wards(tmp_path, draw_wards(60))
    return tmp_path


def test_statistics_are_planned_without_any_table_of_settings(silodp: Silodp, tables: Path) -> None:
    paths = [path for path in list_paths(tomllib.loads(TABLES)) if len(path) == 1]
    assert call_with_each_setting(silodp, tomllib.loads(TABLES), [REMOVED], COMMANDS[2:3], paths) > 6


def test_a_comparison_of_no_silos_is_refused(silodp: Silodp, tables: Path) -> None:
    Path("none.toml").write_text(tomli_w.dumps(put(tomllib.loads(TABLES), ("data", "files"), {})))
    assert_sentence(silodp("compare", "none.toml", "--methods", "uldp-sgd"), code="data.files")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["tables", "heart_disease", *(["mnist_personal"] if TIMES > 1 else [])])
def test_no_command_stumbles_over_a_missing_setting(silodp: Silodp, tables: Path, name: str) -> None:
    start = tomllib.loads(TABLES if name == "tables" else (EXAMPLES / f"{name}.toml").read_text())
    others = [-1, "x", {}] if name == "tables" or TIMES > 1 else []
    assert call_with_each_setting(silodp, start, [REMOVED, *others], COMMANDS) > 30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_training_stumbles_over_a_missing_setting(silodp: Silodp, tables: Path) -> None:
    values = [REMOVED] if TIMES == 1 else [REMOVED, {}]
    assert call_with_each_setting(silodp, tomllib.loads(TABLES), values, TRAININGS) > 30


@pytest.mark.parametrize(
    "option",
    [
        *(
            "--rounds",
            "--noise-multiplier",
            "--delta",
            "--user-sampling",
            "--silos",
            "--users",
            "--dimension",
        ),
        *(
            "--colluding",
            "--weighting",
            "--accountant",
            "--adversary",
            "--set",
            "--aggregator",
            "--aggregation",
            "--method",
        ),
    ],
)
def test_any_value_of_any_option_of_epsilon_is_answered(silodp: Silodp, option: str) -> None:
    usual = {"--method": "uldp-avg", "--noise-multiplier": "5", "--rounds": "3", "--silos": "3"}
    wild = [
        "-1",
        "0",
        "1",
        "1e300",
        "1e-320",
        "nan",
        "inf",
        "",
        "x",
        "9" * 30,
        "9" * 5000,
        "min_silos=0",
        "a=[" + "[" * 999,
    ]
    for value in wild:
        asked = {**usual, option: value}
        found = silodp("epsilon", *[part for pair in asked.items() for part in pair], "--json")
        if found.status != 0:
            assert_sentence(found)
