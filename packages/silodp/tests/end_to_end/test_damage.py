"""Damaged files of a run directory: what is lost in a crash is recovered, anything else is one sentence and a code.

A report that crashes, or shows numbers that somebody wrote into metrics.jsonl by hand, is worth nothing to whoever must
rely on it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from silodp.cli.run import run_config
from silodp.config.resolve import load_config
from silodp.errors import CODES, SilodpError
from silodp.report.page import write_report
from silodp.report.run_record import read_run
from support.commands import CONFIG, Silodp, assert_sentence
from support.rewriting import rebind

DEEP = "[" * 100_000
ROUNDS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four rounds, in a directory that no test changes."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.toml").write_text(CONFIG.replace("rounds = 2", f"rounds = {ROUNDS}"))
    run_config(load_config(folder / "small.toml"), folder / "run")
    return folder / "run"


@pytest.fixture
def directory(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    copied = shutil.copytree(finished, tmp_path / "run")
    os.utime(copied / "guarantee.json")
    return Path(copied)


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def write_rows(directory: Path, rows: list[Any]) -> None:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rebind(directory)


def code_of(act: Callable[[], object]) -> str:
    with pytest.raises(SilodpError) as error:
        act()
    assert "\n" not in str(error.value)
    assert error.value.code in CODES
    return error.value.code


def resume(directory: Path, *arguments: str) -> None:
    config = load_config(directory / "config.toml", arguments)
    run_config(config, directory, resume=True)


LINES = {
    "another byte": b'{"round": 2, "loss": \xff}',
    "a number": b"5",
    "null": b"null",
    "a list": b"[1]",
    "an empty object": b"{}",
    "an empty line": b"",
    "nested": DEEP.encode(),
    "nested inside": b'{"round": 2, "metrics": ' + DEEP.encode(),
    "half of it": b'{"round": 2, "lo',
    "another round": b'{"round": 3}',
    "a round that is true": b'{"round": true}',
    "a round that is not whole": b'{"round": 2.0}',
    "a round that is no number": b'{"round": NaN}',
    "a round as a text": b'{"round": "2"}',
    "a huge round": b'{"round": 1e400}',
    "metrics that are a list": b'{"round": 2, "metrics": [1]}',
    "a metric that is a text": b'{"round": 2, "metrics": {"accuracy": "good"}}',
    "a loss that is a text": b'{"round": 2, "loss": "small"}',
    "a loss of 400 digits": b'{"round": 2, "loss": 1' + b"0" * 400 + b"}",
    "an epsilon that is NaN": b'{"round": 2, "epsilon": {"released": NaN}}',
    "a negative epsilon": b'{"round": 2, "epsilon": {"released": -1}}',
    "bytes that are a text": b'{"round": 2, "bytes": {"down": "many"}}',
    "refused as a list": b'{"round": 2, "refused": {"silo 1": [1]}}',
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_damaged_row_is_refused_by_line(directory: Path, line: bytes) -> None:
    path = directory / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[3:], b""]))
    assert code_of(lambda: write_report(directory)) == "run.metrics_damaged"
    with pytest.raises(SilodpError, match=r"metrics\.jsonl is damaged: line 3 is not"):
        resume(directory, "rounds=5")
    assert path.read_bytes().splitlines()[2] == line  # nothing was written over it


def test_the_command_ends_in_one_sentence(silodp: Silodp, directory: Path) -> None:
    (directory / "metrics.jsonl").write_bytes(b'{"round": 0}\nnull\n')
    again = ("run", directory / "config.toml", "--out", directory, "--resume")
    for arguments in (("report", directory), again):
        assert_sentence(silodp(*arguments), "metrics.jsonl is damaged: line 2 is not the record of round 1")


@pytest.mark.parametrize(
    "last",
    [b'{"round": 5, "lo', b'{"round": 5, "metrics": {"accur\xc3', b'{"round"' + bytes(64) + b"\n", b"\0" * 9],
)
def test_a_line_that_a_crash_cut_off_is_of_a_round_to_be_repeated(directory: Path, last: bytes) -> None:
    with (directory / "metrics.jsonl").open("ab") as file:
        file.write(last)
    assert code_of(lambda: write_report(directory)) == "run.metrics_damaged"
    resume(directory, "rounds=5")
    assert [row["round"] for row in rows_of(directory)] == [0, 1, 2, 3, 4, 5]
    write_report(directory)


def test_a_row_of_a_round_to_be_repeated_is_dropped(directory: Path) -> None:
    before = rows_of(directory)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "loss": 1e9}\n')
    resume(directory, "rounds=5")
    assert rows_of(directory)[:5] == before
    assert rows_of(directory)[5]["loss"] < 10


def test_a_last_line_without_its_end_is_whole(directory: Path) -> None:
    path = directory / "metrics.jsonl"
    path.write_bytes(path.read_bytes().rstrip())  # as an editor leaves it
    before = rows_of(directory)
    write_report(directory)
    resume(directory, "rounds=5")
    assert rows_of(directory)[:5] == before


@pytest.mark.parametrize("left", [0, 1, 4])
def test_rows_before_the_checkpoint_may_not_be_missing(directory: Path, left: int) -> None:
    write_rows(directory, rows_of(directory)[:left])
    with pytest.raises(SilodpError, match=f"no row of round {left}") as error:
        resume(directory, "rounds=5")
    assert error.value.code == "run.metrics_damaged"


def test_lost_metrics_are_begun_anew_with_what_the_ledger_knows(directory: Path) -> None:
    before = rows_of(directory)
    (directory / "metrics.jsonl").unlink()
    assert code_of(lambda: write_report(directory)) == "report.missing"
    resume(directory, "rounds=5")
    rows = rows_of(directory)
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4, 5]
    for row, old in zip(rows, before, strict=False):
        assert row.keys() == {"round", "epsilon"}
        assert row["epsilon"] == pytest.approx(old["epsilon"], rel=1e-9)
    assert "loss" in rows[5]
    write_report(directory)


def test_every_row_is_on_disk_before_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut between the two must not lose a row of a round that is not repeated."""
    events: list[str] = []
    monkeypatch.chdir(tmp_path)
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        events.append(f"replaced {Path(target).name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    (tmp_path / "small.toml").write_text(CONFIG)
    run_config(load_config(tmp_path / "small.toml"), tmp_path / "run")
    steps = [event for event in events if event in ("metrics.jsonl", "replaced state.safetensors")]
    row, state = "metrics.jsonl", "replaced state.safetensors"
    assert steps == [
        state,
        row,
        row,
        state,
        row,
        state,
    ]  # the new run's state, the untrained model's row, two rounds


# --- metrics against the ledger -----------------------------------------------------------------------------


def change(rows: list[dict[str, Any]], how: str) -> list[dict[str, Any]]:
    match how:
        case "all divided":
            for row in rows:
                row["epsilon"] = {name: value / 100 for name, value in row["epsilon"].items()}
        case "one a little":
            rows[3]["epsilon"]["silo"] *= 0.999
        case "none":
            rows[2]["epsilon"]["server"] = 0.0
        case "missing":
            del rows[-1]
        case "missing inside":
            del rows[2]
        case "doubled":
            rows.insert(2, rows[2])
        case "of no round":
            rows.append(rows[-1] | {"round": ROUNDS + 1})
    return rows


@pytest.mark.parametrize("how", ["all divided", "one a little", "none", "missing", "of no round"])
def test_rows_that_the_ledger_contradicts_are_refused(silodp: Silodp, directory: Path, how: str) -> None:
    write_report(directory)
    write_rows(directory, change(rows_of(directory), how))
    assert code_of(lambda: write_report(directory)) == "report.contradicted"
    assert_sentence(silodp("report", directory), "metrics.jsonl is contradicted by the run's ledger")


@pytest.mark.parametrize("how", ["missing inside", "doubled"])
def test_rows_stand_once_and_in_order(directory: Path, how: str) -> None:
    write_rows(directory, change(rows_of(directory), how))
    assert code_of(lambda: write_report(directory)) == "run.metrics_damaged"


def test_more_epsilon_may_be_claimed_than_was_charged(directory: Path) -> None:
    rows = rows_of(directory)
    rows[1]["epsilon"]["released"] *= 1 + 1e-5  # of a coarser grid
    rows[2]["epsilon"] = {}
    write_rows(directory, rows)
    write_report(directory)


def test_an_epsilon_where_nothing_is_promised_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG + "")
    run_config(load_config(path, ["method.weighting=records"]), tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert rows[1]["epsilon"]["server"] is None
    rows[1]["epsilon"]["server"] = 50.0
    write_rows(tmp_path / "run", rows)
    assert code_of(lambda: write_report(tmp_path / "run")) == "report.contradicted"


def test_of_many_rounds_none_can_say_less_than_earlier_ones_cost(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silodp.report.audit._MAX_EXACT", 2)  # rounds 0, 2 and 4
    rows = rows_of(directory)
    rows[3]["epsilon"]["released"] = rows[2]["epsilon"]["released"]
    write_rows(directory, rows)
    write_report(directory)
    rows[3]["epsilon"]["released"] *= 0.999
    write_rows(directory, rows)
    assert code_of(lambda: write_report(directory)) == "report.contradicted"


# --- the other files of a report ----------------------------------------------------------------------------

CONTENTS = {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "nested": DEEP.encode(),
    "nested objects": b'{"a":' * 100_000,
    "null": b"null",
    "a list": b"[]",
    "a huge number": b"1" * 5000,
    "UTF-16": '{"method": "a"}'.encode("utf-16"),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("name", ["guarantee.json", "plots/allocation.json"])
def test_damaged_json_is_one_sentence(silodp: Silodp, directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)
    assert code_of(lambda: write_report(directory)) == "report.damaged"
    assert_sentence(silodp("report", directory), name)


JUNK: list[Any] = [None, True, 5, -1, 1e400, 10**400, "x", [], [1], {}, {"a": 1}, [[[]]]]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, the first three of a list."""
    found = [path] if path else []
    if isinstance(value, dict):
        found += [place for key, inner in value.items() for place in _places(inner, (*path, key))]
    if isinstance(value, list):
        found += [place for i, inner in enumerate(value[:3]) for place in _places(inner, (*path, i))]
    return found


@pytest.mark.slow
def test_no_value_of_a_guarantee_breaks_the_report(directory: Path) -> None:
    """Each value replaced by each kind of junk: a page, or one sentence with a code."""
    path = directory / "guarantee.json"
    whole = path.read_text()
    found: list[str] = []
    for place in _places(json.loads(whole)):
        for junk in JUNK:
            changed = json.loads(whole)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = junk
            path.write_text(json.dumps(changed))
            found.append(outcome_of(rebind(directory)))
    assert set(found) == {"read", "report.damaged", "report.contradicted"}
    assert len(found) > 600
    assert found.count("read") < len(found) / 5


def outcome_of(directory: Path) -> str:
    """What reading a run's files ends in."""
    try:
        read_run(directory)
    except SilodpError as error:
        return error.code if "\n" not in str(error) else "several lines"
    return "read"


def test_whether_a_run_was_a_simulation_is_yes_or_no(directory: Path) -> None:
    path = directory / "guarantee.json"
    said = json.loads(path.read_text())
    assert said["simulation"] is True
    path.write_text(json.dumps({**said, "simulation": "no"}))
    assert code_of(lambda: write_report(directory)) == "report.damaged"


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_damaged_ledger_is_one_sentence(silodp: Silodp, directory: Path, content: bytes) -> None:
    path = directory / "checkpoint" / "ledger.jsonl"
    lines = path.read_bytes().split(b"\n")
    for place in (0, 2):
        path.write_bytes(b"\n".join([*lines[:place], content, *lines[place + 1 :]]))
        assert code_of(lambda: write_report(directory)) == "ledger.damaged"
        assert_sentence(silodp("report", directory), "ledger", f"line {place + 1}")
        again = ("run", directory / "config.toml", "--out", directory, "--resume", "--set", "rounds=5")
        assert_sentence(silodp(*again), "ledger")


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_with_a_damaged_config_the_rest_is_shown_and_what_is_not_checked_is_said(
    silodp: Silodp, directory: Path, content: bytes
) -> None:
    (directory / "config.toml").write_bytes(content)
    outcome = silodp("report", rebind(directory))
    assert (outcome.status, outcome.err) == (0, "")
    assert "Not checked: assumptions" in outcome.out


def test_a_config_of_another_run_is_refused(directory: Path) -> None:
    path = directory / "config.toml"
    path.write_text(path.read_text().replace("noise_multiplier = 5.0", "noise_multiplier = 6.0"))
    assert code_of(lambda: write_report(directory)) == "report.contradicted"


def test_an_assumption_may_not_be_left_out(directory: Path) -> None:
    path = directory / "guarantee.json"
    said = json.loads(path.read_text())
    del said["guarantees"][1]["assumptions"][0]
    path.write_text(json.dumps(said))
    assert code_of(lambda: write_report(rebind(directory))) == "report.contradicted"


@pytest.mark.parametrize("format_", [None, True, 2, 4, "1"])
def test_a_guarantee_of_another_format_is_refused(directory: Path, format_: Any) -> None:
    path = directory / "guarantee.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": format_}))
    assert code_of(lambda: write_report(rebind(directory))) == "report.damaged"


def test_every_entry_of_a_guarantee_is_required(directory: Path) -> None:
    path = directory / "guarantee.json"
    said = json.loads(path.read_text())
    for name in said.keys() - {"starts"}:
        path.write_text(json.dumps({key: value for key, value in said.items() if key != name}))
        assert code_of(lambda: write_report(rebind(directory))) == "report.damaged", name
    for name in said["guarantees"][0]:
        one = {key: value for key, value in said["guarantees"][0].items() if key != name}
        path.write_text(json.dumps(said | {"guarantees": [one, *said["guarantees"][1:]]}))
        assert code_of(lambda: write_report(rebind(directory))) == "report.damaged", name
