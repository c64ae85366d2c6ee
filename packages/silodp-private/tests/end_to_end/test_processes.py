"""The same run with every party in its own process."""

import pytest
import torch

from silodp.accounting.ledger import Ledger
from silodp.aggregators import Plain
from silodp.aggregators.masked import Masked
from silodp.crypto.keys import Identity
from silodp.mechanisms.noise import Randomness
from silodp.methods import FederationSize
from silodp.runtime.checkpoint import Checkpoint
from silodp.runtime.server import Server
from silodp.wire.store import MemoryStore, RoundStore
from silodp.wire.transport import SignedChannel
from support.masked import AVG, run
from support.oracles import logistic_task, small_federation
from support.private import LATTICE, PAILLIER, RECORDS, SAMPLED
from support.processes import Processes
from support.specs import make_spec

AGGREGATORS = [
    pytest.param(Plain(), AVG, marks=pytest.mark.slow),
    (Masked(), AVG),
    (LATTICE, SAMPLED),
    pytest.param(PAILLIER, RECORDS, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("aggregator", "method"), AGGREGATORS, ids=lambda value: value.name)
def test_parties_in_processes_of_their_own_train_the_same_model(aggregator, method):
    federation, task = small_federation(), logistic_task()
    names = tuple(silo.name for silo in federation.silos)
    spec = make_spec(
        "run",
        names,
        method,
        FederationSize(3, 12, aggregator.min_silos_for(3)),
        task.size,
        aggregator=aggregator,
    )
    identity = Identity.fresh("server")
    processes = Processes(spec, identity.public, seed=1)
    accountant = "rdp" if aggregator.adds_integers else "pld"
    server = Server(
        spec,
        SignedChannel(processes, identity, processes.pins),
        Ledger(None, 1e-5, accountant, run="run"),
        RoundStore(MemoryStore()),
        Randomness.from_seed(1),
    )
    server.set_up()
    state = Checkpoint.initial("run", "", task.initial(1), method, spec.population)
    for round_ in range(3):
        state, _ = server.step(state, server.run_round(round_, state.params))
    processes.close()
    assert torch.equal(state.params, run(aggregator, method, rounds=3, seed=1).params)
