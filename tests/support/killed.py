"""A program: runs of training that kill themselves, -9, at each operation on disk in turn, or at every n-th.

`killed.py [aggregator [n]]`; without them sums are in clear, and every operation's turn comes.
Prints one JSON line per kill point: how often the process died, ε, rounds charged, and the final parameters.
"""

import json
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from silodp.aggregators import Plain
from silodp.aggregators.masked import Masked
from silodp.methods import UldpAvg
from silodp.runtime.train import train
from silodp.training.sgd.local import LocalTraining
from silodp_analytics.evaluation.series import Evaluation
from support.oracles import logistic_task, small_federation
from support.private import LATTICE, PAILLIER, SELECT

METHOD = UldpAvg(
    5.0, 0.5, LocalTraining(learning_rate=0.1, epochs=2, batch_size=4), user_sampling=0.5, server_momentum=0.3
)
BY_RECORDS, PRIMARY = replace(METHOD, weighting="records"), replace(METHOD, weighting="primary_silo")
RUNS = {
    "plain": (Plain(), METHOD, 12, 3, None),
    "masked": (Masked(), METHOD, 12, 3, None),
    "lattice": (LATTICE, BY_RECORDS, 4, 2, None),
    "paillier": (PAILLIER, BY_RECORDS, 4, 2, None),
    "select": (SELECT, PRIMARY, 4, 2, None),
    "masked evaluated": (Masked(), METHOD, 12, 3, Evaluation("sums", noise_multiplier=0.5, every=2)),
    "plain evaluated": (Plain(), METHOD, 12, 3, Evaluation("local", every=2)),
}
NAME, STRIDE = [*sys.argv[1:], *("plain", "1")[len(sys.argv) - 1 :]]
AGGREGATOR, METHOD, USERS, ROUNDS, EVALUATION = RUNS[NAME]


def run(out: Path | None, resume: bool) -> torch.Tensor:
    return train(
        small_federation(users=USERS, held_out=40),
        logistic_task(),
        METHOD,
        rounds=ROUNDS,
        aggregator=AGGREGATOR,
        seed=0,
        out=out,
        resume=resume,
        evaluation=EVALUATION,
    ).params


def die_at(operation: int) -> None:
    """Kill this process when it begins its n-th fsync, write, rename, or deletion."""
    left = [operation]

    def counted(function):  # type: ignore[no-untyped-def]
        def call(*arguments, **named):  # type: ignore[no-untyped-def]
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    os.fsync, os.write = counted(os.fsync), counted(os.write)
    Path.replace = counted(Path.replace)  # type: ignore[method-assign]
    Path.unlink = counted(Path.unlink)  # type: ignore[method-assign]


def child(out: Path, operation: int | None) -> bool:
    """Run or resume in a fork; whether it lived to the end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if operation is not None:
                die_at(operation)
            run(out, (out / "checkpoint" / "state.safetensors").exists())
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        sys.exit(f"a run in {out} could not go on after being killed at operation {operation}")
    return os.WIFEXITED(status)


def main() -> None:
    torch.set_num_threads(1)
    run(None, False)  # what is imported and cached once is inherited by the forks
    operation = 1 - int(STRIDE)
    while True:
        operation += int(STRIDE)
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "run"
            died = not child(out, operation)
            again = died and not child(out, max(1, operation // 2))  # and once more while resuming
            if died:
                while not child(out, None):
                    pass
            guarantee = json.loads((out / "guarantee.json").read_text())["guarantees"][0]
            rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            # A hidden sample follows from no seed, so that the metrics of its model differ from run to run.
            measured = ("round",) if EVALUATION is None else ("round", "metrics", "evaluation")
            rounds = [[row.get(name) for name in measured] for row in rows]
            for path in sorted((out / "checkpoint").glob("silo_metrics/*")):
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                rounds.append([[line["round"], line["loss"]] for line in lines])
            model = (out / "model.safetensors").read_bytes().hex()
            print(
                json.dumps(
                    [operation, died + again, guarantee["epsilon"], guarantee["rounds"], rounds, model]
                )
            )
        if not died:
            return


if __name__ == "__main__":
    main()
