"""Command lines in messages can be copied into a shell: a path with a space in it is one word."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from silodp.errors import SilodpError
from silodp_deploy.silo import open_silo
from support.commands import CONFIG, Silodp
from support.places import ROOT

COMMAND = re.compile(
    r"silodp (run|report|plan|attack|statistics|cohort|predict|compare|deploy|server|silo|data|identity|table)"
    r"\b[^.;:']*$"
)


def test_no_message_has_a_command_with_an_unquoted_value():
    wrong, found = [], 0
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for text in (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.JoinedStr)
        ):
            before = ""
            for part in text.values:
                if isinstance(part, ast.Constant):
                    before += str(part.value)
                elif COMMAND.search(before):
                    found += 1
                    is_quoted = ast.unparse(part.value).startswith("shlex.quote(")
                    wrong += [] if is_quoted else [f"{path.name}:{part.lineno}"]
                    before += "WORD"
    assert found >= 2
    # The code of a model in a model card is a file name or a module, and DIR and FILE are for the reader to fill in.
    assert [place for place in wrong if not place.startswith(("model_card.py", "_common.py"))] == []


def words_after(text: str, command: str) -> list[list[str]]:
    """Return the words of the command lines in a text that begin with this command."""
    return [shlex.split(line[line.index(command) :]) for line in text.splitlines() if command in line]


def test_commands_that_are_printed_have_paths_as_one_word(silodp: Silodp, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("one.toml").write_text(CONFIG.replace("seed = 1\n", ""))
    local = silodp("deploy", "init", "one.toml", "--local", "--out", "mein Verbund")
    assert words_after(local.out, "silodp deploy up") == [["silodp", "deploy", "up", "mein Verbund"]]
    drafted = silodp("deploy", "init", "one.toml", "--out", "zweiter Verbund")
    assert words_after(drafted.out, "silodp deploy seal")[0][3] == "zweiter Verbund"
    run = silodp("run", "one.toml", "--out", "mein Lauf")
    assert run.status == 0
    refused = silodp("run", "mein Lauf")
    assert words_after(refused.err, "silodp run")[0][2] == "mein Lauf"


def test_a_silo_without_a_policy_names_its_folder_as_one_word(tmp_path: Path):
    with pytest.raises(SilodpError) as caught:
        open_silo(tmp_path / "mein Silo", None).__enter__()
    assert caught.value.code == "policy.missing"
    assert words_after(str(caught.value), "silodp deploy accept")[0][4] == str(tmp_path / "mein Silo")
