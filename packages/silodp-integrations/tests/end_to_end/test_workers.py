"""`silodp run --workers`: the same bits for any number of workers, and what a killed worker, driver or node does."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import torch

from silodp._lazy import Registry
from silodp.config.resolve import parse_config, resolve
from silodp.methods import FederationSize, UldpAvg
from silodp.runtime import executor, local_work
from silodp.runtime.executor import THIS_PROCESS
from silodp.runtime.local_work import cut_blocks
from silodp.runtime.simulation import Simulation
from silodp.runtime.train import run
from silodp_integrations.workers import Workers, find_difference
from support.commands import CONFIG, assert_sentence

cluster_utils = pytest.importorskip(
    "ray.cluster_utils", reason="Ray is not installed: pip install 'silodp[ray]'"
)

NOISE = {"noise_multiplier": 5.0, "clip": 0.1}
LOCAL = {"learning_rate": 0.05, "epochs": 2, "batch_size": 4}
AVG = {"name": "uldp-avg", **NOISE, "local": LOCAL}
STEPS = {"local_steps": 2, "expected_batch_size": 4.0, "local_learning_rate": 0.1}
BUDGETS = {"distribution": "three-levels", "of": "records"}
RUNS: dict[str, dict[str, Any]] = {
    "blocks, plain": {"method": {**AVG, "user_sampling": 0.9}},
    "blocks, masked, evaluated": {
        "method": AVG,
        "aggregator": "masked",
        "evaluation": {"across": "sums", "epsilon": 1.0},
    },
    "blocks, select": {"method": {**AVG, "weighting": "primary_silo"}, "aggregator": "select"},
    "several steps": {
        "method": {"name": "ddp", **NOISE, **STEPS, "record_sampling": 0.1, "trajectory": "local"},
        "aggregator": "masked",
    },
    "memory of the silo": {
        "method": {"name": "rpdp-filter", **NOISE, **STEPS, "local_steps": 1, "largest_budget": 5.0},
        "budgets": BUDGETS,
    },
    "one row for a silo": {"method": {"name": "uldp-naive", **NOISE, "local": LOCAL}, "aggregator": "masked"},
}
"""Settings of runs with an update of every kind."""


@pytest.fixture(autouse=True)
def _blocks_of_few_persons(monkeypatch: pytest.MonkeyPatch):
    """Cut blocks as if there were a thousand times as many persons; and compute as workers do, with one thread."""
    monkeypatch.setattr(local_work, "_PERSONS", 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def address():
    """The address of a cluster with two processors."""
    made = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    yield made.address
    made.shutdown()


def train(name, where=THIS_PROCESS, **more):
    """Train with a seed; return the result."""
    values = {"name": "x", "rounds": 3, "seed": 3, "delta": 1e-3, **RUNS[name]}
    resolved = resolve(parse_config({**values, "data": {"source": "embedded", "users": 60, "silos": 3}}))
    federation = resolved.load_federation()
    task = resolved.build_task(federation)
    return run(resolved.prepare(federation, task), Simulation(federation, task, where), **more)


def digest(result):
    return hashlib.sha256(result.params.numpy().tobytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_workers_change_no_bit(name, address):
    alone = train(name)
    for count in (1, 2):
        assert digest(train(name, Workers(count, address))) == digest(alone), count


def find_workers(processes):
    """Return those of these processes that compute for silos."""
    return [one for one in processes if one.is_running() and "_Worker" in " ".join(one.cmdline() or ())]


@pytest.mark.slow
def test_a_killed_worker_is_replaced(address):
    """All are killed after every round, and what is asked of them is computed by those that take their place."""
    killed = []

    def kill(done):
        for worker in find_workers(psutil.Process().children(recursive=True)):
            worker.kill()
            killed.append(worker.pid)

    name = "blocks, masked, evaluated"
    assert digest(train(name, Workers(2, address), callbacks=[kill])) == digest(train(name))
    assert len(set(killed)) >= 4


@pytest.mark.slow
def test_a_lost_node_costs_no_round():
    """One of two machines is lost with the workers on it."""
    made = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    try:
        other, lost = made.add_node(num_cpus=2), []

        def lose(done):
            if done.round == 1:
                made.remove_node(other, allow_graceful=False)
                lost.append(done.round)

        name = "blocks, plain"
        assert digest(train(name, Workers(2, made.address), callbacks=[lose])) == digest(train(name))
        assert lost == [1]
    finally:
        made.shutdown()


@pytest.mark.slow
def test_a_killed_run_is_resumed_without_workers(tmp_path):
    """The process of the run is killed; its workers end, and it is resumed in one process with the same model."""
    config = tmp_path / "c.toml"
    config.write_text(CONFIG.replace("rounds = 2", "rounds = 300"))
    command = [sys.executable, "-m", "silodp", "run", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    started = subprocess.Popen(
        [*command, "--workers", "2", "--out", str(killed)], env=environment, stderr=subprocess.PIPE
    )
    rows = killed / "metrics.jsonl"
    while not rows.exists() or len(rows.read_bytes().splitlines()) < 10:
        assert started.poll() is None, started.stderr.read().decode()
        time.sleep(0.05)
    workers = find_workers(psutil.Process(started.pid).children(recursive=True))
    assert len(workers) == 2
    started.send_signal(signal.SIGKILL)
    started.communicate()
    assert not psutil.wait_procs(workers, timeout=60)[1]
    for more in (["--out", str(killed), "--resume"], ["--out", str(whole)]):
        subprocess.run([*command, *more], env=environment, check=True, capture_output=True)
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_code_of_a_file_travels_to_the_workers(tmp_path, address, silodp):
    """A model and a method that only a file beside the configuration has."""
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from dataclasses import dataclass\n"
        "from silodp.methods import UldpAvg\n"
        "def network(features):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(features, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))\n"
        "@dataclass(frozen=True, repr=False)\n"
        "class Own(UldpAvg):\n"
        "    name = 'own'\n"
    )
    config = tmp_path / "c.toml"
    config.write_text(
        CONFIG.replace('"uldp-avg"', '"own.py:Own"')
        + '[task]\nmodel = "own.py:network"\nloss = "binary_cross_entropy"\n'
    )
    for out, more in (("run", ["--workers", 1, "--cluster", address]), ("alone", [])):
        outcome = silodp("run", config, *more, "--out", tmp_path / out)
        assert outcome.status == 0, outcome.err
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "alone"))
    assert first == second


@pytest.mark.slow
def test_a_model_that_is_another_one_in_another_process_is_refused(tmp_path, silodp, monkeypatch):
    """The hash of a text is another one in each process, and so is what is ordered by it."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "NAMES = ('alpha', 'beta', 'gamma', 'delta', 'epsilon', 'zeta', 'eta', 'theta')\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, features):\n"
        "        super().__init__()\n"
        "        self.parts = torch.nn.ModuleDict({name: torch.nn.Linear(features, 4) for name in NAMES})\n"
        "        self.out = torch.nn.Linear(4, 1)\n"
        "    def forward(self, x):\n"
        "        h = 0\n"
        "        for name in sorted(NAMES, key=hash):\n"
        "            h = torch.tanh(h + self.parts[name](x))\n"
        "        return self.out(h)\n"
        "def network(features):\n"
        "    return Net(features)\n"
    )
    config = tmp_path / "c.toml"
    config.write_text(CONFIG + '[task]\nmodel = "own.py:network"\nloss = "binary_cross_entropy"\n')
    outcome = silodp("run", config, "--workers", 2, "--out", tmp_path / "run", "--json")
    assert json.loads(outcome.out)["error"]["code"] == "workers.differ"
    assert not list((tmp_path / "run").glob("**/releases*"))


def test_a_sample_is_compared_bit_by_bit_or_up_to_rounding():
    expected = torch.tensor([1.0, -2.0])
    near, far = expected * (1 + 1e-6), torch.tensor([1.0, -1.9])
    assert find_difference(expected.clone(), expected, is_exact=True) is None
    assert find_difference(near, expected, is_exact=False) is None
    for sample, is_exact in (
        (near, True),
        (far, False),
        (expected[:1], False),
        (expected * torch.nan, False),
    ):
        problem = find_difference(sample, expected, is_exact)
        assert problem is not None
        assert problem.code == "workers.differ"


@pytest.mark.slow
def test_a_comparison_has_the_same_numbers(tmp_path, address, silodp):
    config = tmp_path / "c.toml"
    config.write_text(CONFIG)
    command = ["compare", config, "--methods", "uldp-avg,uldp-avg:clip=1", "--seeds", 2]
    more = ["--workers", 2, "--cluster", address]
    outcome = silodp(*command, *more, "--out", tmp_path / "workers")
    assert outcome.status == 0, outcome.err
    assert silodp(*command, "--out", tmp_path / "alone").status == 0
    found, alone = (
        {path.name: json.loads(path.read_text()) for path in (tmp_path / name / "runs").iterdir()}
        for name in ("workers", "alone")
    )
    assert found.keys() == alone.keys()
    assert len(found) == 6
    for name, run_ in found.items():
        assert without_times(run_) == without_times(alone[name])
    again = silodp(*command, *more, "--out", tmp_path / "workers")
    assert again.err.count("finished before") == 6


def without_times(value):
    """Return a kept run without what differs between two runs with one seed: its id, and how long it took."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in ("seconds", "run")}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def test_what_is_missing_is_told(tmp_path, silodp, monkeypatch):
    config = tmp_path / "c.toml"
    config.write_text(CONFIG)
    command = ["run", config, "--out", tmp_path / "run"]
    assert_sentence(silodp(*command, "--cluster", "auto"), code="argument.missing")
    assert_sentence(silodp(*command, "--workers", 0), code="argument.value")
    monkeypatch.setitem(sys.modules, "ray", None)
    told = silodp(*command, "--workers", 2)
    assert_sentence(told, code="workers.not_installed")
    monkeypatch.setattr(executor, "EXECUTORS", Registry("executors.of.nobody", {}))
    told = silodp(*command, "--workers", 2)
    assert_sentence(told, code="extension.missing")


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_told(tmp_path, silodp):
    config = tmp_path / "c.toml"
    config.write_text(CONFIG)
    outcome = silodp("run", config, "--workers", 1, "--cluster", "127.0.0.1:1", "--out", tmp_path / "run")
    assert_sentence(outcome, "127.0.0.1:1", code="workers.unreachable")


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_blocks_add_up_to_the_whole(monkeypatch, aggregator):
    """Every person is in one block, and is trained as without blocks: the models differ by rounding alone."""
    monkeypatch.setitem(
        RUNS, "one step", {"method": {**AVG, "local": {"learning_rate": 0.05}}, "aggregator": aggregator}
    )
    people = FederationSize(silos=3, users=60)
    assert len(cut_blocks(UldpAvg(5.0, 0.1), people)) > 1
    blocks = train("one step")
    monkeypatch.setattr(local_work, "_PERSONS", 60)
    assert cut_blocks(UldpAvg(5.0, 0.1), people) == (None,)
    whole = train("one step")
    torch.testing.assert_close(blocks.params, whole.params, rtol=0, atol=1e-6)
    assert whole.params.abs().max() > 0.01


def test_blocks_hold_every_person_once():
    method = UldpAvg(5.0, 0.1, user_sampling=0.5)
    blocks = cut_blocks(method, FederationSize(silos=3, users=1000))
    assert len(blocks) == 32  # 500 persons who are expected, 16 in a block
    assert [person for block in blocks for person in range(block.first, block.end)] == list(range(1000))
    assert cut_blocks(method, FederationSize(silos=3, users=32)) == (None,)


def test_a_method_of_somebody_else_is_cut_only_if_it_says_so():
    """An inherited `can_split` is about the inherited `local_update`."""

    class Own(UldpAvg):
        def local_update(self, context):
            return super().local_update(context)

    assert cut_blocks(Own(5.0, 0.1), FederationSize(silos=3, users=1000)) == (None,)
