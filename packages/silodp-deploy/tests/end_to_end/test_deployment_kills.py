"""Parties that are killed at random moments, again and again: `make test-deploy` kills 300 times."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from silodp.accounting.views import ADVERSARIES
from silodp.config.resolve import load_config
from silodp.runtime.train import train
from silodp_deploy.setup import find_free_port, make_local
from support.kills import KilledConsortium

KILLS = int(os.environ.get("SILODP_KILLS") or 10)
SEED = int(os.environ.get("SILODP_KILL_SEED") or secrets.randbits(32))
KILLS_PER_RUN = 15
ROUNDS = 25
CONFIG = """
name = "killed"
rounds = {rounds}
seed = 7
isolate_units = true
aggregator = "{aggregator}"
[data]
source = "embedded"
silos = 3
users = 20
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.5
server_learning_rate = 20.0
[method.local]
learning_rate = 0.3
"""


def simulate(folder: Path, config: Path) -> Path:
    """The same run without a kill, in one process; return its directory."""
    settings = load_config(config)
    federation = settings.load_federation()
    train(federation, settings.build_task(federation), settings.method, out=folder, **settings.settings())
    return folder


def check(parties: KilledConsortium, simulated: Path) -> None:
    """Check model, guarantees, ledgers and audit logs of a run that has ended."""
    ours, theirs = (load_file(run / "model.safetensors") for run in (parties.run, simulated))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    stated, expected = (
        {g["adversary"]: g["epsilon"] for g in json.loads((run / "guarantee.json").read_text())["guarantees"]}
        for run in (parties.run, simulated)
    )
    assert stated == expected
    rows = [json.loads(line)["round"] for line in (parties.run / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(ROUNDS + 1))
    with parties.server_ledger() as ledger:
        charged = {(entry.round, entry.release) for entry in ledger.history}
        assert all(ledger.epsilon(adversary) >= stated[adversary] for adversary in ADVERSARIES)
    received = parties.received()
    for name in parties.names:
        with parties.silo_ledger(name) as ledger:
            assert {(entry.round, entry.release) for entry in ledger.history} >= charged
            assert all(ledger.epsilon(adversary) >= stated[adversary] for adversary in ADVERSARIES)
        audit = parties.audit(name)
        assert len(received[name]) > ROUNDS
        assert received[name] <= {line["sha256"] for line in audit}
        # A silo that is asked again gives the same bytes.
        answers: dict[tuple[object, ...], set[object]] = {}
        for line in audit:
            key = tuple(line[part] for part in ("run", "kind", "round", "attempt"))
            answers.setdefault(key, set()).add(line["sha256"])
        assert {len(digests) for digests in answers.values()} == {1}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_random_kills_change_neither_the_model_nor_what_is_charged(tmp_path: Path) -> None:
    print(f"SILODP_KILLS={KILLS} SILODP_KILL_SEED={SEED}", flush=True)
    random, started = Random(SEED), time.monotonic()
    killed: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    simulated: dict[str, Path] = {}
    runs = 0
    while (left := KILLS - killed.total()) > 0:
        aggregator = ("masked", "plain")[runs % 2]
        config = tmp_path / f"{aggregator}.toml"
        if aggregator not in simulated:
            config.write_text(CONFIG.format(aggregator=aggregator, rounds=ROUNDS))
            simulated[aggregator] = simulate(tmp_path / f"simulated-{aggregator}", config)
        settings = load_config(config)
        folder = tmp_path / str(runs)
        make_local(settings, settings.load_federation(), folder, find_free_port())
        parties = KilledConsortium(folder, True, random=random)
        try:
            parties.run_to_the_end(min(left, KILLS_PER_RUN))
        finally:
            for name in list(parties.running):
                parties.kill(name)
        check(parties, simulated[aggregator])
        killed += parties.killed
        ended += parties.ended
        runs += 1
        print(
            f"run {runs} ({aggregator}): {killed.total()} kills after {time.monotonic() - started:.0f} s: "
            f"{dict(killed)}, servers started again after {dict(ended)}",
            flush=True,
        )
    assert min(killed[name] for name in parties.names) > 0 or KILLS < 50
