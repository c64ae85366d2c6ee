"""kill -9 under secure aggregation and private weighting: nothing is lost, and everything is charged once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "aggregator", ["masked", "lattice", "paillier", "select", "masked evaluated", "plain evaluated"]
)
def test_kill_9_loses_nothing_and_charges_once(aggregator):
    """At every eleventh of a run's operations on disk the process dies, and once more when it is resumed."""
    program = Path(__file__).parents[1] / "support" / "killed.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), aggregator, "11"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    *killed, whole = [json.loads(line) for line in finished.stdout.splitlines()]
    assert whole[1] == 0, "the last one was not killed"
    assert len(killed) > 15
    for operation, died, *outcome in killed:
        assert died >= 1
        assert outcome == whole[2:], f"killed at operation {operation}: ε, rounds, metrics or model differ"
