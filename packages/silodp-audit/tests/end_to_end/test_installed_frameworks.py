"""What other frameworks state and do, by their installed packages (`make test-frameworks`).

Each framework is asked in a process of the environment that has it: its accountants for the ε that they state, and its
mechanisms for what they do to updates that are made up. Opacus is installed here (tests/unit/planning/test_stated.py).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from silodp_audit.frameworks import Finding, check_framework

ROOT = Path(__file__).parents[4]
PYTHON = Path(os.environ.get("SILODP_FRAMEWORKS", ROOT / ".venv-frameworks")).absolute() / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="other frameworks are not installed: make test-frameworks"
    ),
]


def ask(framework: str) -> dict[str, Any]:
    # Not by its folder, which has modules with the names of frameworks.
    command = [str(PYTHON), "-P", str(ROOT / "tests" / "support" / "ask_frameworks.py"), framework]
    told = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    return json.loads(told.stdout.splitlines()[-1])


def check(framework: str, **given: Any) -> Finding:
    return check_framework(framework, [f"{key}={json.dumps(value)}" for key, value in given.items()])


def state(framework: str, **given: Any) -> float | None:
    return check(framework, **given).stated


def test_flower() -> None:
    told = ask("flower")
    for noise, rounds, theirs in told["stated"]:
        given = {"noise_multiplier": noise, "rounds": rounds, "clipping_norm": 1.0, "num_sampled_clients": 20}
        assert state("flower", **given, equal_weights=True) == pytest.approx(theirs, rel=1e-9)
        assert state("flower", **given) is None
    assert told["refuses_unequal_weights"]
    # Noise of half a unit on entries that one of 20 clients moves by 100 with a clip of 10: 200 standard deviations.
    assert told["std"] == pytest.approx(0.5, rel=0.02)
    for moved in told["entries"].values():
        assert moved == pytest.approx(100.0, abs=5 * told["std"])
    # All updates are clipped and the norm falls; none is and it grows.
    falls, grows = told["adaptive_norms"]
    assert falls < 0.1 * math.exp(-0.1 * 20)
    assert grows > 100 * math.exp(0.1 * 20)
    # Updates were clipped to a norm of 1.
    assert told["adaptive_std"] == pytest.approx(told["adaptive_noise"] * told["adaptive_norm"], rel=0.02)
    assert told["adaptive_norm"] < 0.95
    reach, std = told["local"]
    assert (reach, std) == (pytest.approx(1.0, abs=1e-3), pytest.approx(4.8448e-5, rel=0.02))


def test_nvflare() -> None:
    told = ask("nvflare")
    for arguments, dimension, rounds, theirs in told["stated"]:
        assert state("nvflare", **arguments, dimension=dimension, rounds=rounds) == pytest.approx(theirs)
    assert told["entry"] == 100.0  # as it was


def test_fl4health() -> None:
    told = ask("fl4health")
    for coin, noise, epochs, batch, size, rounds, theirs in told["instance"]:
        given = {"client_sampling": coin, "client_noise_multiplier": noise, "n_server_rounds": rounds}
        given |= {"batch_size": batch, "client_data_sizes": size}
        assert state("fl4health", **given, local_epochs=epochs) == pytest.approx(theirs, rel=1e-9)
        steps = epochs * math.ceil(size / batch)
        if math.ceil(steps * batch / size) == epochs:
            assert state("fl4health", **given, local_steps=steps) == pytest.approx(theirs, rel=1e-9)
    for coin, noise, rounds, theirs in told["client"]:
        given = {"client_sampling": coin, "server_noise_multiplier": noise, "n_server_rounds": rounds}
        assert state("fl4health", **given) == pytest.approx(theirs, rel=1e-9)
    # Two clients with updates of 1 and weights 3/4 and 1/4: their average is 1, and is divided by 2 once more.
    mean, std = told["weighted"]
    assert mean == pytest.approx(0.5)
    assert std == pytest.approx(3 / 4 / 2, rel=0.02)


def test_jax_privacy() -> None:
    told = ask("jax_privacy")
    for interval, method, noise, batch, size, steps, theirs in told["stated"]:
        given: dict[str, Any] = {"noise_multiplier": noise, "batch_size": batch, "train_size": size}
        if interval == 1e-4:
            given |= {"batch_selection": "FixedBatchSampling", "sampling_method": method}
        assert state("jax_privacy", **given, train_steps=steps) == pytest.approx(theirs, rel=1e-9)
    assert told["poisson_by_default"] is False
    # DPKerasConfig accepts ε = 1.83 by one batch, where an update has ten; its own calibration counts 25.2 for these.
    merged = check(
        "jax_privacy",
        noise_multiplier=1.0,
        batch_size=64,
        train_size=6400,
        train_steps=1000,
        gradient_accumulation_steps=10,
        poisson_sampling_in_fit=True,
    )
    assert merged.stated is not None
    assert merged.stated < 1.83 < 5 < told["counted"]


def test_pfl() -> None:
    told = ask("pfl")
    for name, noise, rate, rounds, theirs in told["stated"]:
        given = {"noise_parameter": noise, "sampling_probability": rate, "num_compositions": rounds}
        found = state("pfl", **given, mechanism="gaussian", user_sampler="poisson", accountant=name)
        assert found == pytest.approx(theirs, rel=1e-6)
    # One release with Laplace noise of scale .2, whose ε is 5.
    assert told["laplace"]["PLDPrivacyAccountant"] == pytest.approx(5.0, abs=0.001)
    assert told["laplace"]["PRVPrivacyAccountant"] == pytest.approx(0.196, abs=0.001)
    # In 95 cohorts of 10 of 100 users: at most how often in a cohort, and in all of them.
    assert told["draws"]["random"][0] > 1
    assert told["draws"]["minimize_reuse"] == [1, math.ceil(95 * 10 / 100)]
