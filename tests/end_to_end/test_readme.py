"""What the README and the other pages show is run as it stands: programs, configurations, command lines."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click
import pandas as pd
import pytest
import typer
from sklearn.datasets import load_breast_cancer

from silodp.cli import main
from silodp.config.resolve import load_config
from silodp.data._embedded import EMBEDDED_RANGES
from silodp_experiments.method_specs import parse_methods
from support.commands import Silodp
from support.places import SOURCES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = _BLOCK.findall(README)
PROGRAMS = [code for language, code in BLOCKS if language == "python"]
COMMAND = typer.main.get_command(main.app)


def command_lines(text: str) -> Iterator[str]:
    """Every line that is a command, without what is said of it, which stands two spaces or more to the right.

    `silodp data list | check NAME` is two commands.
    """
    for line in text.splitlines():
        said = line.removeprefix("#").strip()
        if said.startswith("silodp "):
            first, *others = said.split("  ")[0].split(" | ")
            yield first
            yield from (f"{first.rpartition(' ')[0]} {other}" for other in others)


def shown_by(page: Path) -> list[str]:
    """The command lines in the blocks of a page that name no language."""
    blocks = [code for language, code in _BLOCK.findall(page.read_text()) if not language]
    return list(chain.from_iterable(map(command_lines, blocks)))


COMMANDS = shown_by(ROOT / "docs" / "commands.md")
SHOWN = COMMANDS + shown_by(ROOT / "docs" / "concepts" / "adversaries.md")
OF_EXAMPLES = [line for example in EXAMPLES for line in command_lines(example.read_text())]


def parsed(line: str) -> click.Context:
    """The command that a line calls, its options and arguments read; raises what click complains of."""
    context, (name, *rest) = None, shlex.split(line)
    command: click.Command = COMMAND
    while True:
        context = command.make_context(name, rest, parent=context)
        if not isinstance(command, click.Group):
            return context
        rest = [*context._protected_args, *context.args]
        name, found, rest = command.resolve_command(context, rest)
        assert name is not None
        assert found is not None
        command = found


def program(arguments: list[str], folder: Path) -> str:
    """What a Python program prints; it must end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- programs ---------------------------------------------------------------------------------------------------


def test_the_readmes_program_prints_what_the_readme_says(tmp_path: Path) -> None:
    [code] = PROGRAMS
    shown = BLOCKS[[code for _, code in BLOCKS].index(code) + 1][1]
    (tmp_path / "program.py").write_text(code)
    printed = program(["program.py"], tmp_path)
    metric = r"\d\.\d+"  # secret noise: it differs from run to run
    assert re.sub(metric + "}", "…}", printed) == re.sub(metric + "}", "…}", shown)
    assert float(re.findall(metric + "(?=})", printed)[0]) > 0.9


@pytest.mark.slow
def test_the_example_with_tables_of_ones_own_learns_and_stays_within_its_budget(tmp_path: Path) -> None:
    printed = program([str(ROOT / "examples" / "own_tables.py")], tmp_path)
    assert "300 patients in 3 hospitals" in printed
    [(untrained, trained)] = re.findall(r"roc_auc: (\S+) untrained, (\S+) trained", printed)
    assert float(trained) > max(0.7, float(untrained))
    [spent] = re.findall(r"released .*?ε = ([\d.]+)", printed)
    assert 0 < float(spent) <= 6


def test_the_readmes_configuration_trains_on_such_tables(
    silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [text] = [code for language, code in BLOCKS if language == "toml"]
    Path("config.toml").write_text(text)
    coins = random.Random(0)
    for name in ("north.csv", "south.parquet", "east.csv"):
        table = pd.DataFrame(
            {
                "patient_id": [f"P{coins.randrange(30)}" for _ in range(60)],
                "age": [coins.randint(0, 110) for _ in range(60)],
                "creatinine": [coins.uniform(0, 20) for _ in range(60)],
                "ward": [coins.choice(["surgery", "medicine"]) for _ in range(60)],
                "readmitted": [coins.randint(0, 1) for _ in range(60)],
                "split": [coins.choice(["train", "train", "test"]) for _ in range(60)],
            }
        )
        if name.endswith(".csv"):
            table.to_csv(name, index=False)
        else:
            table.to_parquet(name)
    done = silodp("run", "config.toml", "--set", "rounds=2")
    assert done.status == 0, done.err
    assert Path("runs/config/report.html").exists()


# --- command lines ----------------------------------------------------------------------------------------------


def test_command_lines_are_found() -> None:
    assert "silodp run CONFIG --target-epsilon 3" in SHOWN
    assert {"silodp data list", "silodp data check NAME", "silodp data fetch NAME"} <= set(SHOWN)
    assert len(COMMANDS) >= 14
    assert len(SHOWN) >= len(COMMANDS) + 4
    assert len(shown_by(ROOT / "README.md")) >= 3
    assert set(shown_by(ROOT / "README.md")) <= set(COMMANDS)
    assert len(OF_EXAMPLES) >= 15


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid_and_survive_a_round_trip(example: Path, tmp_path: Path) -> None:
    config = load_config(example)
    copy = tmp_path / "config.toml"
    copy.write_text(config.config.to_toml())
    assert load_config(copy) == config
    assert load_config(copy).method == config.method


@pytest.mark.parametrize("line", SHOWN + OF_EXAMPLES)
def test_every_command_line_is_one(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options exist; a configuration that is there can be read, with what is set of it and with the methods named."""
    monkeypatch.chdir(ROOT)
    values = parsed(line).params
    if "config" in values and Path(values["config"]).suffix == ".toml" and "DIR" not in str(values["config"]):
        config = load_config(Path(values["config"]), values["set_"] or ())
        assert "methods" not in values or parse_methods(config, values["methods"])


@pytest.mark.parametrize(
    "line", [line for line in SHOWN if re.match("silodp (epsilon|table|plan examples|data list)", line)]
)
def test_commands_that_need_no_run_answer(silodp: Silodp, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = silodp(*shlex.split(line)[1:])
    assert (done.status, done.err) == (0, "")


@pytest.mark.slow
def test_commands_on_a_run_do_as_the_page_says(silodp: Silodp, config: Path) -> None:
    """In the order of docs/commands.md: plan, run, resume, report, predict; `compare` with fewer seeds."""
    loaded = load_breast_cancer(as_frame=True).data
    loaded.set_axis(list(EMBEDDED_RANGES), axis=1).to_csv("table.csv", index=False)
    named = {"CONFIG": str(config), "DIR": "out", "TABLE": "table.csv", "FILE": "predictions.csv"}
    for line in COMMANDS:
        if "CONFIG" in line or "DIR" in line:
            words = [named.get(word, word) for word in shlex.split(line)[1:]]
            if "compare" in words:
                words[words.index("--seeds") + 1] = "1"
            if "--target-epsilon" in words:
                words += ["--set", "rounds=2"]
            if words[:2] == ["run", str(config)]:
                words += ["--out", "out"]
            done = silodp(*words)
            assert done.status == 0, (line, done.err)
    assert Path("out/report.html").exists()


def options(command: click.Command) -> set[str]:
    """Of a command, or of all commands of a group."""
    own = {name for parameter in command.params for name in parameter.opts}
    if isinstance(command, click.Group):
        return own.union(*(options(sub) for sub in command.commands.values()))
    return own


@pytest.mark.parametrize("page", PAGES + EXAMPLES, ids=lambda page: page.name)
def test_pages_name_no_option_that_does_not_exist(page: Path) -> None:
    """Wherever a page says `silodp COMMAND --option`, and in the README every `--option`."""
    text = page.read_text()
    for said in re.findall(r"`silodp ([^`]+)`", text):
        words = [word.strip("[]") for word in said.split()]
        command: click.Command = COMMAND
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            command = command.commands[words.pop(0)]
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - options(command)
        assert not unknown, f"silodp {said}"
    if page.name == "README.md":
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= options(COMMAND)
