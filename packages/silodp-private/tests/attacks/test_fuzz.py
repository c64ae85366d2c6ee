"""Fuzzing: every party is sent 1,000 mutants of real messages, and answers or refuses each with a code.

Attacked are the parsers of the silos and of the server, by anyone who can reach the wire and even sign. Without
complete validation a malformed message would end a party with a traceback, keep it busy, or leave it in a state in
which it answers what it should refuse.
"""

from __future__ import annotations

import os
import random

import pytest

from support.fuzz import RUNS, Target, attack_round, attack_server, codes
from support.private import Parties

MUTANTS = int(os.environ.get("SILODP_MUTANTS", "1000"))
"""For each party of each run; `make test-fuzz` sets more."""
QUICK = "plain"
EVERY_RUN = [run if run == QUICK else pytest.param(run, marks=pytest.mark.slow) for run in RUNS]


@pytest.mark.timeout(0)
@pytest.mark.parametrize("silo", ["silo0", "silo1"])
@pytest.mark.parametrize("run", EVERY_RUN)
def test_a_silo_refuses_mutants_with_a_code(run, silo):
    target, generator = Target.silo(run, silo), random.Random(f"{run} {silo} {MUTANTS}")
    outcomes = codes(target.attack(generator) for _ in range(MUTANTS))
    assert outcomes["message.malformed"] > MUTANTS / 10
    assert outcomes["message.signature"] > MUTANTS / 50
    assert "invalid" not in outcomes, outcomes


@pytest.mark.timeout(0)
@pytest.mark.parametrize("run", EVERY_RUN)
def test_the_server_refuses_mutants_with_a_code(run):
    parties, generator = Parties(*RUNS[run]), random.Random(f"{run} server {MUTANTS}")
    for round_ in range(2):
        parties.run_round(round_)
    answers = {m.key: m for name, m in parties.transport.answered if name == "silo0"}
    pairs = [(m, answers[m.key]) for name, m in parties.transport.asked if name == "silo0"]
    outcomes = codes(attack_server(pairs, parties, generator) for _ in range(MUTANTS))
    assert outcomes["message.malformed"] > MUTANTS / 3
    assert "invalid" not in outcomes, outcomes


@pytest.mark.timeout(0)
@pytest.mark.parametrize("run", EVERY_RUN)
def test_a_round_with_mutants_ends_or_is_refused_with_a_code(run):
    """Beyond the schemas: what the server computes with an answer of the right types and sizes."""
    parties, generator = Parties(*RUNS[run]), random.Random(f"{run} round {MUTANTS}")
    parties.run_round(0)
    answers = sum(name == "silo0" for name, _ in parties.transport.answered)
    outcomes = codes(attack_round(run, answers, generator) for _ in range(MUTANTS // 10))
    assert outcomes["message.malformed"] > MUTANTS / 50
    assert "invalid" not in outcomes, outcomes
