"""Plug-ins that a configuration names by their files, through the whole program.

Each of tests/plugins/ is one file: a method, an aggregator, an accountant, a data set and a server optimizer. What a
run directory refers to is code that a report must not run: it would run the code of whoever sent the directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from silodp.accounting.guarantee import OTHER_CODE
from silodp.cli import main
from silodp.config.resolve import load_config
from silodp.report.run_record import read_run
from silodp.runtime.server import Server
from support.commands import Silodp, assert_sentence
from support.places import PLUGINS
from support.refusals import refused

BASE: dict[str, Any] = {
    "rounds": 3,
    "seed": 1,
    "aggregator": "plain",
    "data": {"source": "embedded", "users": 20, "silos": 3},
    "method": {"name": "uldp-avg", "noise_multiplier": 5.0, "clip": 0.1, "local": {"learning_rate": 0.1}},
}


@dataclass(frozen=True)
class Case:
    """What a configuration says instead, and what of a run a report then cannot check."""

    change: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ("runs no code outside silodp",)


CASES = {
    "method": Case(
        method={
            "name": "adaptive_clipping.py:AdaptiveClipping",
            "quantile": 0.6,
        }
    ),
    "aggregator": Case({"aggregator": "trimmed.py:Trimmed", "aggregation": {"trim": 1}}),
    "accountant": Case(
        {"accountant": "few_orders.py:FewOrders"},
        unchecked=("the accountant 'few-orders' is not part of silodp", "need the accountant 'few-orders'"),
    ),
    # Guarantees are derived again from the public facts that the run has stored, not from the data set.
    "data set": Case({"data": {"source": "dosage.py:DOSAGE", "users": 15}}, unchecked=()),
    "server optimizer": Case(
        method={"server_optimizer": {"name": "yogi.py:Yogi", "beta1": 0.5}, "server_learning_rate": 0.1}
    ),
}
CASES["all"] = Case(
    {key: value for case in CASES.values() for key, value in case.change.items()},
    {key: value for case in CASES.values() for key, value in case.method.items()},
    unchecked=("the accountant 'few-orders' is not part of silodp", "runs no code outside silodp"),
)


def write_config(folder: Path, case: Case) -> Path:
    """Write a configuration and, next to it, the files of all plug-ins."""
    for source in PLUGINS.glob("*.py"):
        shutil.copy(source, folder)
    values = {**BASE, **case.change, "method": {**BASE["method"], **case.method}}
    path = folder / "own.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def run_until_killed(config: Path, out: Path) -> int:
    """Run in a fork that dies, -9, in round 2: it was charged and its sum is there, and the model does not have it."""
    pid = os.fork()
    if pid == 0:
        step = Server.step

        def dying(self: Server, before: Any, total: torch.Tensor) -> Any:
            if before.round == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, before, total)

        Server.step = dying  # type: ignore[method-assign]
        try:
            main.main(["run", str(config), "--out", str(out)])
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize(
    "name",  # "all" has each of the slow ones in it
    [
        pytest.param(
            name, marks=pytest.mark.slow if name in ("accountant", "data set", "server optimizer") else ()
        )
        for name in CASES
    ],
)
def test_a_plugin_is_planned_run_killed_resumed_and_reported_on(
    name: str, silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(tmp_path)
    config = write_config(here, CASES[name])  # references are relative to it, not to where a command is given

    planned = silodp("plan", config, "--json").json
    whole = silodp("run", config, "--out", "whole", "--json")
    assert whole.status == 0, whole.err
    assert [planned["adversaries"][a]["epsilon"] for a in ("released", "server", "silo")] == [
        whole.json["guarantees"][a]["epsilon"] for a in ("released", "server", "silo")
    ]

    is_named = name not in ("data set", "server optimizer")  # the latter works on noisy sums
    assert all(
        (asdict(OTHER_CODE) in said["assumptions"]) == is_named for said in whole.json["guarantees"].values()
    )

    assert run_until_killed(config, Path("killed")) == signal.SIGKILL
    assert Path("killed/checkpoint/ledger.jsonl").read_text().count('"kind":"charge"') == 2
    resumed = silodp("run", "killed", "--resume", "--json")
    assert resumed.status == 0, resumed.err
    assert Path("killed/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    assert resumed.json["guarantees"] == whole.json["guarantees"]
    found = read_run(Path("killed")).audit
    assert found is not None
    assert found.rounds == 3

    more = silodp("run", "whole", "--resume", "--set", "rounds=4", "--json")
    assert more.status == 0, more.err
    assert more.json["epsilon"] > whole.json["epsilon"]

    for source in PLUGINS.glob("*.py"):
        (here / source.name).unlink()  # a report needs none of them
    Path("killed/report.html").unlink()
    reported = silodp("report", "killed", "--json")
    assert reported.status == 0, reported.err
    left = reported.json["not_checked"]
    assert len(left) == len(CASES[name].unchecked)
    assert all(says in one for one, says in zip(left, CASES[name].unchecked, strict=True))
    page = Path("killed/report.html").read_text()
    assert all(says.split("'")[0] in page for says in CASES[name].unchecked)


def test_a_run_is_not_resumed_with_other_code_settings(
    silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, CASES["all"])
    assert silodp("run", config, "--out", "a").status == 0
    for change, code in (
        ("method.quantile=0.5", "checkpoint.setup"),
        ("aggregation.trim=0", "checkpoint.setup"),
        ("method.server_optimizer.beta1=0.9", "checkpoint.setup"),
        ("accountant=rdp", "checkpoint.setup"),
        ("data.users=16", "checkpoint.setup"),
    ):
        assert_sentence(
            silodp("run", config, "--set", change, "--set", "rounds=4", "--out", "a", "--resume"), code=code
        )


# --- A report runs no code of others ---

SPY = "from pathlib import Path\nPath({marker!r}).write_text('executed')\nraise ImportError('never mind')\n"


def write_spy(folder: Path) -> tuple[Path, Path]:
    """Write a file that leaves a mark where it is executed; return the mark and the file."""
    marker, spy = folder / "marker", folder / "spy.py"
    spy.write_text(SPY.format(marker=str(marker)))
    return marker, spy


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    folder = tmp_path_factory.mktemp("sender")
    with pytest.raises(SystemExit):
        main.main(["run", str(write_config(folder, Case())), "--out", str(folder / "sent")])
    return folder / "sent"


@pytest.mark.parametrize(
    "change",
    [
        {"aggregator": "{}:Spy"},
        {"accountant": "{}:Spy"},
        {"data": {"source": "{}:Spy"}},
        {"method": {"name": "{}:Spy"}},
        {"methods": {"{}:Spy": {"clip": 1.0}}},
        {"method": {"server_optimizer": {"name": "{}:Spy"}}},
        {"task": {"model": "{}:Spy", "loss": "{}:Spy", "metrics": ["{}:Spy"]}},
    ],
    ids=json.dumps,
)
def test_a_report_does_not_execute_what_a_configuration_refers_to(
    change: dict[str, Any], sent: Path, silodp: Silodp, tmp_path: Path
) -> None:
    """Attack: a run directory is sent to a data-protection officer, who checks it with `silodp report`.

    Its config.toml refers to a file of the sender. Without the defense the report executes that file.
    """
    marker, spy = write_spy(tmp_path)
    received = shutil.copytree(sent, tmp_path / "received")
    change = json.loads(json.dumps(change).replace("{}", str(spy)))
    values = {**BASE, **change, "method": {**BASE["method"], **change.get("method", {})}}
    (received / "config.toml").write_text(tomli_w.dumps(values))
    silodp("report", received)
    assert not marker.exists()
    with refused("config.not_importable"):  # where the user asks for a run the file is executed
        config = load_config(received / "config.toml")
        _ = config.accountant
        config.build_task(config.load_federation())
    assert marker.exists()


def test_a_report_does_not_execute_what_a_guarantee_refers_to(
    sent: Path, silodp: Silodp, tmp_path: Path
) -> None:
    """Attack: as above, but guarantee.json names the sender's file as the aggregator."""
    marker, spy = write_spy(tmp_path)
    received = shutil.copytree(sent, tmp_path / "received")
    said = json.loads((received / "guarantee.json").read_text())
    said["aggregator"] = {"name": f"{spy}:Spy"}
    (received / "guarantee.json").write_text(json.dumps(said))
    silodp("report", received)
    assert not marker.exists()


# --- What is no plug-in ---

WRONG = """
from dataclasses import dataclass
from silodp.aggregators import Plain
from silodp.accounting import Accountant
from silodp.methods import Method, ServerOptimizer, UldpAvg

@dataclass(frozen=True, repr=False)
class Unnamed(UldpAvg):
    pass

@dataclass(frozen=True, repr=False)
class Half(Method):
    name: str = "half"

@dataclass(frozen=True)
class Idle(ServerOptimizer):
    pass

@dataclass(frozen=True)
class AlsoPlain(Plain):
    pass

class Silent(Accountant):
    name = "silent"

class Taken(Accountant):
    name = "pld"
    def supports(self, event): return True
    def compose(self, charges): return None

number = 3
"""


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("method.name=wrong.py:Unnamed", "config.value"),
        ("method.name=wrong.py:Half", "config.value"),
        ("method.name=wrong.py:AlsoPlain", "config.value"),
        ("method.name=wrong.py:number", "config.value"),
        ("method.name=wrong.py:absent", "config.not_importable"),
        ("method.server_optimizer.name=wrong.py:Idle", "config.value"),
        ("method.server_optimizer.name=wrong.py:Half", "config.value"),
        ("method.server_optimizer.name=nowhere.py:Idle", "config.not_importable"),
        ("aggregator=wrong.py:AlsoPlain", "config.value"),
        ("aggregator=wrong.py:Half", "config.value"),
        ("accountant=wrong.py:Silent", "config.value"),
        ("accountant=wrong.py:Taken", "argument.value"),
        ("accountant=wrong.py:number", "config.value"),
        ("data.source=wrong.py:number", "config.value"),
    ],
)
def test_what_is_no_plugin_is_refused_before_anything_is_written(
    setting: str, code: str, silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG)
    config = write_config(tmp_path, Case())
    for command in (("run", config, "--out", "a"), ("plan", config)):
        assert_sentence(silodp(*command, "--set", setting), code=code)
    assert not Path("a").exists()


def test_a_file_may_be_called_as_a_module_is_that_exists(tmp_path: Path) -> None:
    """`json.py` beside a configuration is neither the library's module nor takes its place."""
    shutil.copy(PLUGINS / "yogi.py", tmp_path / "json.py")
    path = write_config(tmp_path, Case(method={"server_optimizer": {"name": "json.py:Yogi"}}))
    first, second = load_config(path).method, load_config(path).method
    assert first == second
    assert json.loads("[1]") == [1]
