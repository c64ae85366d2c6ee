"""kill -9 in runs of `ddp`, and of samples that nobody knows: the same model, the same ε, everything charged once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "stride"), [("ddp", 13), ("ddp, masked", 37), ("hidden, lattice", 23), ("hidden, paillier", 17)]
)
def test_kill_9_changes_neither_draws_nor_charges(run, stride):
    """At every so many of its operations on disk the process dies, and once more when it is resumed."""
    program = Path(__file__).parents[1] / "support" / "killed_hidden.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), run, str(stride)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    *killed, whole = [json.loads(line) for line in finished.stdout.splitlines()]
    assert whole[1] == 0, "the last one was not killed"
    assert whole[2] is not None, "nothing is promised"
    assert len(killed) >= 6
    if run.startswith("hidden"):
        assert bytes.fromhex(whole[-1]) == b"the twin's"
    for operation, died, *outcome in killed:
        assert died >= 1
        assert outcome == whole[2:], f"killed at operation {operation}: ε, rounds, metrics or model differ"
