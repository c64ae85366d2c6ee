"""`silodp attack` from the command line: what it reads, writes, prints and refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plugins.adaptive_clipping import AdaptiveClipping
from plugins.trimmed import Trimmed
from silodp.cli.run import run_config
from silodp.config.resolve import load_config
from silodp.methods import UldpAvg
from silodp.training.sgd import LocalTraining
from silodp_audit.attack.audit_run import attack_method
from support.commands import CONFIG, Silodp, assert_sentence
from support.faults import FAULTS

FEW = ("--canaries", "200")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.toml").write_text(CONFIG.replace("seed = 1\n", ""))
    run_config(load_config(folder / "small.toml"), folder / "run")
    return folder / "run"


@pytest.fixture
def directory(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def read_files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_an_attacked_directory_gets_one_file_and_its_report_shows_it(silodp: Silodp, directory: Path) -> None:
    before = read_files(directory)
    (directory / "attack.json").write_text("an attack by another version, which the new one replaces")
    # Every 20th attack on right code is an alarm; this is about files.
    assert silodp("attack", directory, *FEW, "--level", 0.0001).status == 0
    after = read_files(directory)
    assert after.keys() - before.keys() == {directory / "attack.json"}
    assert {path: after[path] for path in before} == before
    assert silodp("report", directory, "--json").json["attack"] == "consistent"


def test_an_attack_on_another_run_is_not_shown(silodp: Silodp, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(CONFIG.replace("noise_multiplier = 5.0", "noise_multiplier = 4.0"))
    done = silodp("attack", tmp_path / "other.toml", *FEW, "--out", directory, "--level", 0.0001)
    assert done.status == 0
    assert_sentence(silodp("report", directory), code="report.contradicted")


def test_without_a_ledger_epsilon_and_delta_alone_are_the_promise(silodp: Silodp, directory: Path) -> None:
    shutil.rmtree(directory / "checkpoint")
    found = silodp("attack", directory, *FEW, "--level", 0.0001, "--json").json
    assert found["verdict"] == "consistent"
    assert all(row["measured"]["epsilon_lower"] is None for row in found["adversaries"])
    # (ε, δ) alone allow more than the charges do, and less than everything.
    assert all(0.55 < row["claim"]["auc"] < 0.9 for row in found["adversaries"])


def test_a_leak_ends_with_status_1(silodp: Silodp, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG.replace("noise_multiplier = 5.0", "noise_multiplier = 2.0"))
    with FAULTS["half of the noise"].inject():
        done = silodp("attack", tmp_path / "small.toml", "--adversary", "server", *FEW)
    assert done.status == 1
    assert not (tmp_path / "attack.json").exists()  # nothing is written that nobody asked for


@pytest.mark.parametrize(
    "wrong",
    ['name = "default"', 'name = "uldp-avg"\nnoise_multiplier = 0.0\nclip = 0.1'],
    ids=["default", "zero"],
)
def test_where_nothing_is_promised_nothing_is_contradicted(
    silodp: Silodp, tmp_path: Path, wrong: str
) -> None:
    right = 'name = "uldp-avg"\nnoise_multiplier = 5.0\nclip = 0.1'
    assert right in CONFIG
    (tmp_path / "open.toml").write_text(CONFIG.replace(right, wrong))
    done = silodp("attack", tmp_path / "open.toml", *FEW, "--json")
    assert done.status == 0
    assert {row["verdict"] for row in done.json["adversaries"]} == {"no guarantee"}


def test_fewer_rounds_are_told(silodp: Silodp, directory: Path) -> None:
    done = silodp("attack", directory, *FEW, "--rounds", 1, "--level", 0.0001, "--json")
    assert (done.json["rounds"], done.json["claimed_rounds"]) == (1, 2)
    assert "1 of 2 rounds" in done.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--canaries", 199), "argument.value"),
        (("--canaries", 20_001), "argument.out_of_range"),
        (("--level", 0.5), "argument.value"),
        (("--level", 0), "argument.value"),
        (("--rounds", 0), "argument.value"),
        (("--adversary", "everybody"), "argument.value"),
        (("--set", "rounds=3"), "argument.conflict"),
    ],
)
def test_what_cannot_be_is_refused(
    silodp: Silodp, directory: Path, arguments: tuple[object, ...], code: str
) -> None:
    assert_sentence(silodp("attack", directory, *arguments), code=code)


def test_plugins_are_attacked_without_being_named() -> None:
    method = AdaptiveClipping(noise_multiplier=2.0, clip=1.0, local=LocalTraining(0.01))
    adaptive = attack_method(method, rounds=2, canaries=200, seed=1)
    trimmed = attack_method(
        silodp_avg(), rounds=2, aggregator=Trimmed(), canaries=200, seed=1, adversaries=("released", "server")
    )
    for result in (adaptive, trimmed):
        assert result.verdict == "consistent"
        assert "consistent" in {row.verdict for row in result.rows}


def silodp_avg() -> UldpAvg:
    return UldpAvg(noise_multiplier=2.0, clip=1.0, local=LocalTraining(0.01))
