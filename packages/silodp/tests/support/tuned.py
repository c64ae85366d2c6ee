"""A configuration to tune, and what must hold of the settings that are chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from silodp.config.resolve import ResolvedRun
from silodp.methods import UldpSgd
from silodp.planning import tuning
from silodp.planning.plan import plan_run
from silodp.planning.tuning import format_tuning, tune

CONFIG = """
rounds = 5
aggregator = "{aggregator}"
[data]
source = "tables"
files = {{ north = "no/such/north.csv", south = "no/such/south.csv", east = "no/such/east.csv" }}
[data.schema]
user = "patient_id"
users = "{users}"
label = "readmitted"
classes = [0, 1]
numeric = {{ age = [0, 110], creatinine = [0, 20] }}
categorical = {{ ward = ["surgery", "medicine", "other"] }}
[method]
name = "uldp-sgd"
noise_multiplier = 5.0
step = 1.0
{more}
"""


def shrink_grid(patch: pytest.MonkeyPatch) -> None:
    """Let few settings be tried."""
    patch.setattr(tuning, "ROUNDS", (2, 5))
    patch.setattr(tuning, "STEPS", (0.01, 1.0))


def configured(tmp_path: Path, aggregator: str = "plain", more: str = "") -> Path:
    listed = tmp_path / "users.txt"
    listed.write_text("\n".join(f"p{number}" for number in range(40)))
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(users=listed, aggregator=aggregator, more=more))
    return path


def check_tuning(config: ResolvedRun) -> dict[str, Any]:
    """Check the settings that are chosen for ε = 2: they meet it, learn and tell their price; return them."""
    spec, _ = config.build_public_spec()
    found = tune(config, spec, 2.0, federations=3)
    chosen = found["chosen"]
    method = UldpSgd(chosen["noise_multiplier"], weighting=chosen["weighting"], step=chosen["step"])
    plan = plan_run(replace(spec, method=method, rounds=chosen["rounds"]))
    spent = plan["adversaries"]["released"]["epsilon"]
    assert 1.99 < spent <= 2.0
    assert chosen["step"] == 1.0, "a hundredth of a step learns nothing in five rounds"
    mu = math.sqrt(chosen["rounds"]) / chosen["noise_multiplier"]
    ratio = math.sqrt(6) / (mu * 40)  # two numbers, three wards and the intercept; 40 persons
    assert found["signal"]["configured"] == {"parameters": 6, "ratio": pytest.approx(ratio)}
    assert 0 <= found["loss"]["mean"] <= found["loss"]["largest"]
    private = {a for a, told in plan["adversaries"].items() if told["private"]}
    assert private == {"released", "server", "silo"} - set(found["no_guarantee"])
    lines = format_tuning(found)
    assert f"step = {chosen['step']:g}" in lines
    complete = [line for line in lines if "with an ε against everyone" in line]
    if found["no_guarantee"]:  # then the price of an ε against everyone is told
        uniform = max(c["mean"] for c in found["candidates"] if c["weighting"] == "uniform")
        assert f"weighting uniform: {uniform:.3f}" in complete[0]
    else:
        assert not complete
    return dict(chosen)
