"""A stored file whose bytes are laid out in another way has another format number, so that old files are told apart.

What is compared is everything but the values: keys and their order, types, and how white space is written.
`formats.json` has the SHA-256 of the layout for every number that a format has had. After a change raise FORMAT in the
module that writes the file, and add what `python tests/golden/test_formats.py` prints. The messages between parties
have a test of their own, `tests/unit/crypto/test_vectors.py`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from silodp.accounting.cohort import create_cohort
from silodp.cli.run import run_config
from silodp.config.resolve import load_config, resolve
from silodp.config.schema import parse_config
from silodp.wire.files import read_sealed
from silodp_analytics.regression.config import derive_regression
from silodp_analytics.statistics.config import derive_statistics
from support import clinics, wards
from support.commands import CONFIG
from support.places import ROOT
from support.stored_files import World

FROZEN = Path(__file__).with_name("formats.json")
FILES = {
    "silodp.accounting.cohort": "people",
    "silodp.accounting.guarantee": "run/guarantee.json",
    "silodp.accounting.ledger": "run/checkpoint/ledger.jsonl",
    "silodp.aggregators.run_spec": "run/run_spec.json",
    "silodp.data.identity.profile": "profile.toml",
    "silodp.report.cohort": "counted/cohort.json",
    "silodp.runtime.checkpoint": "run/checkpoint/state.safetensors",
    "silodp.runtime.model_description": "run/model.json",
    "silodp_analytics.regression.page": "regression/regression.json",
    "silodp_analytics.statistics.report.page": "statistics/statistics.json",
    "silodp_audit.report.attacks": "run/attack.json",
    "silodp_audit.report.checklist": "list.toml",
    "silodp_audit.report.signature": "run/signatures/ann-bee.json",
    "silodp_deploy.consortium": "parties/public/roster.json",
}
"""The file of each module that has a FORMAT, in a folder that `store_all` fills."""


def store_all(folder: Path) -> None:
    """Fill a folder with a file of every format."""
    World(folder)
    settings = tomllib.loads(CONFIG)
    del settings["seed"]
    create_cohort(folder / "cohort", {"released": 1e6}, 1e-5)
    run_config(resolve(parse_config(settings)), folder / "counted", cohort=folder / "cohort")
    # So large an ε that nothing is lost in the noise: what is has other entries.
    clinics_config = clinics.write_clinics(folder, clinics.draw_clinics(2000), asked="epsilon = 500.0")
    run_config(derive_regression(load_config(clinics_config)), folder / "regression")
    wards_config = wards.write_wards(
        folder, wards.draw_wards(1000), noise="epsilon = 500.0"
    )  # in the place of the clinics' tables
    run_config(derive_statistics(load_config(wards_config)), folder / "statistics")


def show_layout(path: Path) -> str:
    """Return how a file is laid out, as JSON; of a safetensors file, how its header is."""
    if path.suffix == ".safetensors":
        content = read_sealed(path, path.name)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = {key: find_layout(json.loads(value)) for key, value in header.pop("__metadata__").items()}
        tensors = {name: [entry["dtype"], len(entry["shape"])] for name, entry in header.items()}
        return json.dumps([path.read_bytes().index(content), metadata, tensors])
    text = path.read_text(encoding="utf-8")
    return describe_toml(text) if path.suffix == ".toml" else describe_json(text)


def describe_toml(text: str) -> str:
    return json.dumps(find_layout(tomllib.loads(text)))


def describe_json(text: str) -> str:
    """Return the layout of one JSON value, or of a list with one for each line, behind how white space is written."""
    start = re.match(r'\{(\s*)"(?:[^"\\]|\\.)*"(\s*:\s*)', text)
    assert start is not None, text[:100]
    try:
        found = find_layout(json.loads(text))
    except json.JSONDecodeError:
        found = find_layout([json.loads(line) for line in text.splitlines()])
    return json.dumps([start.groups(), text.endswith("\n"), found])


def find_layout(value: object) -> object:
    """Return the type in place of every value. A list has one entry for each layout that is in it.

    The tables of a table that all have one layout are counted as those of a list: names of silos or assumptions, and
    how many there are, are values.
    """
    if isinstance(value, dict):
        inner = {key: find_layout(one) for key, one in value.items()}
        tables = list(inner.values())
        is_list = len(tables) > 1 and all(isinstance(one, dict) and one == tables[0] for one in tables)
        return {"*": tables[0]} if is_list else inner
    if isinstance(value, list):
        return [json.loads(one) for one in dict.fromkeys(json.dumps(find_layout(one)) for one in value)]
    return type(value).__name__


def digest(layout: str) -> str:
    return hashlib.sha256(layout.encode()).hexdigest()


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("stored")
    store_all(folder)
    return {module: show_layout(folder / name) for module, name in FILES.items()}


@pytest.mark.parametrize("module", FILES)
def test_a_file_of_another_layout_has_another_number(layouts: Mapping[str, str], module: str) -> None:
    number = str(importlib.import_module(module).FORMAT)
    frozen = json.loads(FROZEN.read_text())[module]
    assert number in frozen, f"add format {number} of {module} to {FROZEN.name}"
    assert frozen[number] == digest(layouts[module]), (
        f"{FILES[module]} is laid out in another way than format {number} was: raise FORMAT in {module}. It is now:\n"
        f"{layouts[module]}"
    )


def test_every_format_has_a_file_here() -> None:
    sources = {path: path.read_text() for path in ROOT.glob("packages/*/src/**/*.py")}
    having = {path for path, text in sources.items() if re.search(r"^FORMAT\b.*=", text, re.M)}
    assert {".".join(path.with_suffix("").parts[path.parts.index("src") + 1 :]) for path in having} == set(
        FILES
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1, "b": "x"}\n', '{"a": 23, "b": "y: 1"}\n', True),
        ('{"a": [1, 2]}', '{"a": [3]}', True),
        (
            '{"a": {"n": {"c": 1}, "s": {"c": 2}}}',
            '{"a": {"x": {"c": 1}, "y": {"c": 2}, "z": {"c": 3}}}',
            True,
        ),
        ('{"a": 1}', '{"a": 1.0}', False),
        ('{"a": 1}', '{"a": "1"}', False),
        ('{"a": 1}', '{"a": null}', False),
        ('{"a": [1]}', '{"a": [1, "x"]}', False),
        ('{"a": 1}', '{"b": 1}', False),
        ('{"a": {"b": 1}}', '{"a": {"b": 1, "c": 1}}', False),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', False),
        ('{"a": 1}', '{"a":1}', False),
        ('{"a": 1}', '{\n "a": 1}', False),
        ('{"a": 1}', '{"a": 1}\n', False),
    ],
)
def test_values_are_no_part_of_a_layout_and_all_else_is(one: str, other: str, same: bool) -> None:
    assert (describe_json(one) == describe_json(other)) is same


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        store_all(Path(place))
        layouts_now = {module: digest(show_layout(Path(place) / name)) for module, name in FILES.items()}
    numbers = {module: str(importlib.import_module(module).FORMAT) for module in FILES}
    print(json.dumps({module: {numbers[module]: found} for module, found in layouts_now.items()}, indent=1))
