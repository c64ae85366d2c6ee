"""The four hospitals of heart_disease and a server over TLS: model, ε and metrics of the simulation, bit for bit.

The records are real ones, so the tests are skipped where the data sets are not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from silodp.config.resolve import load_config
from silodp.runtime.simulation import Simulation
from silodp.runtime.train import train
from support.consortium import start_consortium

HEAD = """
name = "hospitals"
rounds = 3
seed = 7
isolate_units = true
aggregator = "{aggregator}"
[data]
source = "heart_disease"
{data}
"""
AVG = """
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
weighting = "{weighting}"
server_learning_rate = 10.0
[method.local]
learning_rate = 0.001
epochs = 10
batch_size = 4
"""
RPDP = """
[budgets]
distribution = "three-levels"
of = "records"
seed = 0
[method]
name = "rpdp"
noise_multiplier = 12.25
clip = 1.0
client_sampling = 0.7
local_steps = 10
expected_batch_size = 8.0
local_learning_rate = 0.005
optimizer = "adam"
largest_budget = 5.0
"""
DDP = """
[method]
name = "ddp"
noise_multiplier = 2.0
clip = 1.0
local_steps = 3
record_sampling = 0.1
expected_batch_size = 10.0
local_learning_rate = 0.05
"""
PEOPLE, OWN = "users = 50", 'allocation = "own"'
LATTICE = "\n[aggregation]\ncount_cap = 100\n"
RUNS = {
    "plain": HEAD.format(aggregator="plain", data=PEOPLE) + AVG.format(weighting="uniform"),
    "masked": HEAD.format(aggregator="masked", data=PEOPLE) + AVG.format(weighting="uniform"),
    "lattice": HEAD.format(aggregator="lattice", data=PEOPLE) + AVG.format(weighting="records") + LATTICE,
    "rpdp": HEAD.format(aggregator="plain", data=OWN) + RPDP,
    "ddp": HEAD.format(aggregator="masked", data=OWN) + DDP,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_four_hospitals_and_a_server_train_the_model_of_the_simulation(
    name: str, data: Path, tmp_path: Path
) -> None:
    text = RUNS[name].replace('source = "heart_disease"', f'source = "heart_disease"\nroot = "{data}"')
    (tmp_path / "simulated.toml").write_text(text)
    settings = load_config(tmp_path / "simulated.toml")
    federation = settings.load_federation()
    task = settings.build_task(federation)
    out = tmp_path / "simulated"
    simulated = train(federation, task, settings.method, out=out, **settings.settings())
    with start_consortium(tmp_path, text) as processes:
        assert len(processes.names) == 4
        processes.start_all()
        assert processes.wait_for_server(500) == 0, processes.log("server")
        model = load_file(processes.run / "model.safetensors")
        expected = load_file(out / "model.safetensors")
        assert model.keys() == expected.keys()
        assert all(torch.equal(model[part], expected[part]) for part in expected)
        stated, known = (
            json.loads((run / "guarantee.json").read_text())["guarantees"] for run in (processes.run, out)
        )
        assert {g["adversary"]: (g["epsilon"], g["delta"], g["unit"]) for g in stated} == {
            g["adversary"]: (g["epsilon"], g["delta"], g["unit"]) for g in known
        }
        rows = [json.loads(line) for line in (processes.run / "metrics.jsonl").read_text().splitlines()]
        assert [row["epsilon"] for row in rows] == [row["epsilon"] for row in simulated.metrics]
        # The server has no records of the test, so its model is measured here.
        module = task.load(simulated.params)
        module.load_state_dict(model)
        params = torch.cat([value.detach().reshape(-1) for value in module.parameters()])
        assert torch.equal(params, simulated.params)
        last = simulated.metrics[-1]
        measured = Simulation(federation, task).evaluate(params)
        assert measured == {"loss": last["loss"], "metrics": last["metrics"]}
