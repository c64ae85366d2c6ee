"""Messages over Flower between real processes: the model of the simulation (`make test-flower`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.consortium import start_consortium
from support.deployed import assert_same_run, simulate
from support.flower import BIN, start_flower

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (BIN / "flower-superlink").exists(), reason="Flower is not installed: make test-flower"
    ),
]
HEART = """
[data]
source = "heart_disease"
users = 50
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
server_learning_rate = 10.0
weighting = "uniform"
[method.local]
learning_rate = 0.001
epochs = 5
batch_size = 4
"""


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_four_hospitals_train_the_model_of_the_simulation_over_flower(
    aggregator: str, tmp_path: Path, data: Path
) -> None:
    text = f'name = "flower"\nrounds = 2\nseed = 7\naggregator = "{aggregator}"\n{HEART}'
    simulated = simulate(tmp_path, text)
    with start_consortium(tmp_path, text, forked=False) as processes:
        for name in processes.names:
            processes.start(name, "--socket", str(tmp_path / f"{name}.sock"))
        processes.start("server", "--socket", str(tmp_path / "server.sock"))
        with start_flower(tmp_path, processes) as home:
            assert processes.wait_for_server(500) == 0, (processes.log("server"), list(home.glob("*.log")))
        assert_same_run(processes, simulated)
        for name in processes.names:
            assert [one["round"] for one in processes.audit(name) if one["kind"] == "update"] == [0, 1]
        state = json.loads((processes.home("server") / "status.json").read_text())
        assert None not in state["seconds_since_seen"].values()
