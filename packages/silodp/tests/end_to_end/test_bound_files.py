"""Files of a finished run that were edited, damaged or swapped are refused, or change no number.

Whoever reads a report, a card or a prediction relies on ε, model and constants being those of one run. Without the
digests in the run's ledger, in model.json and in the card, the model of a run with less noise would be shown under this
run's ε, and one digit in the range of a feature would change every prediction.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import silodp
from silodp.cli.run import run_config
from silodp.config.resolve import load_config
from silodp.errors import CODES, SilodpError
from silodp.report.run_record import RunRecord, read_run
from silodp.runtime.model_description import ModelDescription
from support.commands import CONFIG, Silodp
from support.refusals import refused
from support.rewriting import read_ledger, write_ledger

ROUNDS = 2
CARD = "\n[card]\nlicense = 'MIT'\n"
PUBLIC = ("guarantee.json", "model.json", "model.safetensors", "MODEL_CARD.md")
"""What may be released together."""
REFUSALS = frozenset(
    f"{area}.{what}"
    for area in ("report", "bundle", "run", "ledger")
    for what in ("contradicted", "damaged", "mixed", "metrics_damaged")
)
X = np.linspace(-1, 1, 60, dtype=np.float32).reshape(2, 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, and one with less noise and another seed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "small.toml").write_text(CONFIG + CARD)
    for name, sets in (("one", ()), ("other", ("method.noise_multiplier=1", "seed=2"))):
        run_config(load_config(folder / "small.toml", sets), folder / name)
    return {name: folder / name for name in ("one", "other")}


@pytest.fixture
def directory(runs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs["one"], tmp_path / "run"))


def report_of(directory: Path) -> RunRecord:
    return replace(read_run(directory), finished=datetime(2020, 1, 1, tzinfo=UTC))


def prediction_of(directory: Path) -> tuple[Any, ...]:
    model = silodp.load(directory)
    guarantees = [guarantee.to_dict() for guarantee in model.guarantees.values()]
    constants = replace(model.description, versions={})
    return (json.dumps(guarantees), constants, model.columns, model.predict(X).tolist())


def resumed_of(directory: Path) -> tuple[Any, ...]:
    config = load_config(directory / "config.toml")
    summary = run_config(config, directory, resume=True)
    rows = (directory / "metrics.jsonl").read_text()
    return (json.dumps(summary["guarantees"]), summary["loss"], rows, *prediction_of(directory))


def check(outcome_of: Callable[[Path], Any], directory: Path, expected: Any) -> str:
    """Return the code of a refusal; "same" where every number is as it was."""
    try:
        found = outcome_of(directory)
    except SilodpError as error:
        return error.code if error.code in CODES and "\n" not in str(error) else f"no code: {error}"
    return "same" if found == expected else "accepted"


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    else:
        yield path


def altered(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value * (1 + 1e-9) or 1e-9  # within the tolerance of the comparison with the ledger
        case str():
            return value[:-1] + ("b" if value.endswith("a") else "a")
    return 1


def alter_every_leaf(path: Path) -> Iterator[tuple[Any, ...]]:
    """Write a JSON file with one leaf changed, for every leaf; a file of lines is taken as a list."""
    text = path.read_text()
    is_lines = path.suffix == ".jsonl"
    value = [json.loads(line) for line in text.splitlines()] if is_lines else json.loads(text)
    for place in leaves(value):
        changed = json.loads(json.dumps(value))
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = altered(inner[place[-1]])
        if is_lines:
            path.write_text("".join(json.dumps(row) + "\n" for row in changed))
        else:
            path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n")
        yield place
    path.write_text(text)


@pytest.mark.parametrize("name", ["guarantee.json", "model.json", "run_spec.json", "metrics.jsonl"])
def test_no_value_of_a_file_can_be_changed_unnoticed_by_a_report(directory: Path, name: str) -> None:
    expected = report_of(directory)
    found = {place: check(report_of, directory, expected) for place in alter_every_leaf(directory / name)}
    assert len(found) > 20
    assert {place: code for place, code in found.items() if code not in REFUSALS} == {}
    assert report_of(directory) == expected


@pytest.mark.parametrize("name", ["guarantee.json", "model.json"])
def test_no_value_of_a_public_file_can_be_changed_unnoticed_by_a_prediction(
    directory: Path, tmp_path: Path, name: str
) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for public in PUBLIC[:3]:  # without the card, which has a digest of the description
        shutil.copy(directory / public, bundle)
    expected = prediction_of(bundle)
    found = {place: check(prediction_of, bundle, expected) for place in alter_every_leaf(bundle / name)}
    assert len(found) > 100
    assert {place: code for place, code in found.items() if code not in REFUSALS} == {}


@pytest.mark.parametrize("name", ["model.safetensors", "MODEL_CARD.md"])
def test_no_byte_of_a_public_file_can_be_changed_unnoticed(directory: Path, name: str) -> None:
    expected, content = prediction_of(directory), (directory / name).read_bytes()
    for place in range(0, len(content), 37):
        flipped = bytes([content[place] ^ 1])
        (directory / name).write_bytes(content[:place] + flipped + content[place + 1 :])
        assert check(prediction_of, directory, expected) == "bundle.mixed", place
        if name == "model.safetensors":
            assert check(report_of, directory, None) == "report.contradicted", place
    (directory / name).write_bytes(content[:-1])
    assert check(prediction_of, directory, expected) == "bundle.mixed"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_file_of_another_run_is_refused(runs: dict[str, Path], directory: Path, name: str) -> None:
    shutil.copy(runs["other"] / name, directory)
    assert check(prediction_of, directory, None) == "bundle.mixed"
    if name == "MODEL_CARD.md":
        return  # a report writes it again
    assert check(report_of, directory, None) == "report.contradicted"


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "guarantee.json"])
def test_a_report_without_the_ledger_compares_the_public_files(
    runs: dict[str, Path], directory: Path, name: str
) -> None:
    (directory / "checkpoint" / "ledger.jsonl").unlink()
    assert report_of(directory).audit is None
    shutil.copy(runs["other"] / name, directory)
    assert check(report_of, directory, None) == "bundle.mixed"


def strip(outcome: tuple[Any, ...]) -> list[Any]:
    """An outcome without the digest of the guarantee."""
    return [replace(one, guarantee="") if isinstance(one, ModelDescription) else one for one in outcome]


@pytest.mark.parametrize("name", [*PUBLIC, "run_spec.json"])
def test_resuming_writes_files_again_from_the_checkpoint(
    runs: dict[str, Path], directory: Path, name: str
) -> None:
    expected = resumed_of(Path(shutil.copytree(directory, directory.with_name("untouched"))))
    shutil.copy(runs["other"] / name, directory)
    # The guarantee lists every start of the run, so that its digest in the description differs.
    assert strip(resumed_of(directory)) == strip(expected)
    report_of(directory)


def edits_of_settings(text: str) -> Iterator[str]:
    """A line left out; one digit raised; a setting added."""
    lines = text.splitlines(keepends=True)
    for place, line in enumerate(lines):
        if line.strip() and not line.startswith("#"):
            yield "".join(lines[:place] + lines[place + 1 :])
        for digit in {c for c in line if c.isdigit() and not line.startswith("#")}:
            changed = line.replace(digit, str((int(digit) + 1) % 10), 1)
            yield "".join([*lines[:place], changed, *lines[place + 1 :]])
    yield text.replace("noise_multiplier = 5.0", "noise_multiplier = nan")
    yield text.replace("clip = 0.1", "clip = 0.1\nserver_momentum = true")
    yield text.replace("clip = 0.1", "clip = 0.1\nserver_momentum = 0.5")
    yield text.replace("evaluate_every = 1", "evaluate_every = 2")
    yield text.replace("rounds = 2", "rounds = 3")


@pytest.mark.parametrize("act", [report_of, resumed_of])
def test_settings_that_were_changed_are_refused(directory: Path, act: Callable[[Path], Any]) -> None:
    path = directory / "config.toml"
    text = path.read_text().partition("[card]")[0]
    path.write_text(text)  # what an owner declares may be changed
    expected = report_of(directory)
    number = 0
    for edited in edits_of_settings(text):
        assert edited != text
        path.write_text(edited)
        code = check(act, directory, None if act is resumed_of else expected)
        assert code in CODES, edited
        assert path.read_text() == edited
        number += 1
    assert number > 20


def test_settings_go_on_with_changes_that_are_named(silodp: Silodp, directory: Path) -> None:
    assert silodp("run", directory, "--resume", "--set", "rounds=3").status == 0
    assert len(report_of(directory).rows) == 4
    path = directory / "config.toml"
    path.write_text(path.read_text().replace("MIT", "Apache-2.0"))
    assert silodp("report", directory).status == 0
    assert "Apache-2.0" in (directory / "MODEL_CARD.md").read_text()
    prediction_of(directory)
    path.write_text(path.read_text().replace("rounds = 3", "rounds = 4"))
    with refused("run.config_changed"):
        resumed_of(directory)
    shutil.copy(path, directory.with_name("own.toml"))
    path.unlink()
    own = ("run", directory.with_name("own.toml"), "--out", directory, "--resume")
    assert silodp(*own).status == 0
    assert len(report_of(directory).rows) == 5


def test_a_row_that_was_changed_is_no_result(directory: Path) -> None:
    """Otherwise the digest of an edited row would be taken into the ledger by the next start."""
    path = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["loss"] *= 0.9
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert check(report_of, directory, None) == "report.contradicted"
    assert check(resumed_of, directory, None) == "run.metrics_damaged"


def test_digests_that_were_cut_off_are_missed(directory: Path) -> None:
    ledger = directory / "checkpoint" / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    assert b'"files"' in lines[-1]
    ledger.write_bytes(b"".join(lines[:-1]))
    assert check(report_of, directory, None) == "report.contradicted"
    resumed_of(directory)
    report_of(directory)


def test_digests_of_an_earlier_moment_bind_nothing(directory: Path) -> None:
    """A run that was resumed and killed has a charge after them."""
    ledger = directory / "checkpoint" / "ledger.jsonl"
    entries = read_ledger(ledger)
    charge = next(fields for fields in reversed(entries) if fields.get("kind") == "charge")
    files = entries[-1]
    write_ledger(ledger, [*entries, charge | {"round": charge["round"] + 1}])
    with refused("report.contradicted"):  # ε is of fewer rounds
        read_run(directory)
    (directory / "config.toml").write_text(
        (directory / "config.toml").read_text().replace("rounds = 2", "rounds = 3")
    )
    rows = resumed_of(directory)[2]
    assert len(rows.splitlines()) == 4
    assert read_ledger(ledger)[-1].keys() == files.keys()


@pytest.mark.parametrize("kind", ["a text", "a list", "numbers"])
def test_digests_of_another_form_are_damage(directory: Path, kind: str) -> None:
    ledger = directory / "checkpoint" / "ledger.jsonl"
    *entries, _ = read_ledger(ledger)
    wrong = {"a text": "x", "a list": ["x"], "numbers": {"model.json": 1}}[kind]
    write_ledger(ledger, [*entries, {"kind": "files", "files": wrong}])
    assert check(report_of, directory, None) == "ledger.damaged"
