"""A program: `killed.py` for runs of `ddp`, and of samples that nobody knows. `killed_hidden.py RUN n`.

No seed fixes a sample that nobody knows. So both parties' draws are written down beside the run, and in place of such a
run's model stands whether it is the twin's in clear that is given these samples. There, operations on disk are counted
from the beginning of the last round, where these are drawn.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from support.distributed import DDP

NAME, STRIDE = sys.argv[1:]
sys.argv[1:] = ["plain", STRIDE]  # `killed` reads them as it is imported

from silodp.aggregators import Plain  # noqa: E402
from silodp.aggregators.masked import Masked  # noqa: E402
from silodp.crypto import sampling  # noqa: E402
from silodp.crypto.sampling import SamplingRatio  # noqa: E402
from silodp.runtime.server import Server  # noqa: E402
from silodp.runtime.silo import Silo  # noqa: E402
from silodp.runtime.train import train  # noqa: E402
from support import killed  # noqa: E402
from support.oracles import logistic_task, small_federation  # noqa: E402
from support.private import LATTICE, PAILLIER, Hidden, in_clear  # noqa: E402

HALF = replace(killed.BY_RECORDS, user_sampling=0.5)
RUNS = {
    "ddp": (Plain(), DDP, 12, 3),
    "ddp, masked": (Masked(), replace(DDP, trajectory="local"), 12, 2),
    "hidden, lattice": (replace(LATTICE, hidden_sample=10), HALF, 4, 2),
    "hidden, paillier": (replace(PAILLIER, hidden_sample=10), HALF, 4, 2),
}
LAW = SamplingRatio(5, 10)


class Watched:
    """What both parties of a run draw, in whichever process, and for which rounds silo 0 was given entries."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.round, self.operation = 0, 0
        die_at, run, child, play, answer = (
            killed.die_at,
            killed.run,
            killed.child,
            Server.run_round,
            Silo.answer,
        )
        places, shifts = sampling.draw_server_cells, sampling.derive_silo_cells

        def later(operation: int) -> None:
            self.operation = operation

        def watched_run(out, resume):  # type: ignore[no-untyped-def]
            self.path = None if out is None else out.parent / "draws.jsonl"
            return run(out, resume)

        def watched_child(out, operation):  # type: ignore[no-untyped-def]
            lived = child(out, operation)
            if lived:
                (out / "model.safetensors").write_bytes(self.verdict(out).encode())
            return lived

        def watched_play(server, round_, params, *state):  # type: ignore[no-untyped-def]
            self.round = round_
            if self.operation and round_ == killed.ROUNDS - 1:
                die_at(self.operation)
            return play(server, round_, params, *state)

        def watched_answer(silo, request):  # type: ignore[no-untyped-def]
            if request.kind == "chosen":
                self.note("given", request.round, [])
            return answer(silo, request)

        def watched_places(users, law):  # type: ignore[no-untyped-def]
            drawn = places(users, law)
            self.note("cells", self.round, drawn.tolist())
            return drawn

        def watched_shifts(secret, session, users, law, round):  # type: ignore[no-untyped-def]
            made = shifts(secret, session, users, law, round)
            self.note("shifts", round, made.tolist())
            return made

        killed.die_at, killed.run, killed.child = later, watched_run, watched_child
        Server.run_round, Silo.answer = watched_play, watched_answer  # type: ignore[method-assign]
        sampling.draw_server_cells, sampling.derive_silo_cells = (
            watched_places,
            watched_shifts,
        )

    def note(self, what: str, round_: int, values: list[int]) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps([what, round_, values]) + "\n")

    def verdict(self, out: Path) -> str:
        seen, given = Hidden(LAW, {}, {}), set[int]()
        for line in (out.parent / "draws.jsonl").read_text().splitlines():
            what, round_, values = json.loads(line)
            if what == "given":
                given.add(round_)
            elif what == "cells" and round_ in given:
                return f"round {round_} was drawn again after silo 0 was given entries of it"
            else:
                (seen.cells if what == "cells" else seen.shifts)[round_] = np.array(values)
        self.path = None
        twin = train(
            small_federation(users=killed.USERS),
            logistic_task(),
            killed.METHOD,
            rounds=killed.ROUNDS,
            aggregator=in_clear(killed.AGGREGATOR, seen.drawn),
            seed=0,
        ).model.state_dict()
        model = load_file(out / "model.safetensors")
        return "the twin's" if all(torch.equal(model[name], twin[name]) for name in twin) else "another"


if __name__ == "__main__":
    killed.AGGREGATOR, killed.METHOD, killed.USERS, killed.ROUNDS = RUNS[NAME]
    if NAME.startswith("hidden"):
        Watched()
    killed.main()
