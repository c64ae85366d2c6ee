"""Every method under every aggregator is attacked briefly; and most of what is promised leaks.

Attacked is the program as a whole: what a run charges in its ledger against what its parties see. The rows are those of
benchmarks/attack.py, whose full table is in RESULTS.md.
"""

from __future__ import annotations

import pytest

from silodp.aggregators.registry import AGGREGATORS
from silodp.methods import METHODS, UldpAvg
from silodp.training.sgd import LocalTraining
from silodp_audit.attack.audit_run import attack_method
from silodp_budgets.rpdp.method import Rpdp
from support.attacked import SETTINGS
from support.benchmark_scripts import load_benchmark

BENCHMARK = load_benchmark("attack")
ONCE = {
    ("uldp-avg", "primary silo", "select"),
    ("uldp-avg", "by records", "lattice"),
    ("uldp-avg", "by records", "paillier"),
}
"""Aggregators that encrypt take most of the time, and are attacked with one method; `select` has one weighting."""
ROWS = [
    row
    for row in BENCHMARK.list_rows()
    if row.aggregator not in {aggregator for _, _, aggregator in ONCE}
    or (row.method, row.variant, row.aggregator) in ONCE
]


def test_the_table_has_every_method_and_aggregator() -> None:
    assert BENCHMARK.VARIANTS.keys() == METHODS.keys()
    assert {row.aggregator for row in BENCHMARK.list_rows()} == AGGREGATORS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_nothing_measured_is_more_than_what_was_charged(row) -> None:
    result = row.attack(brief=True, seed=2)
    assert result.verdict == "consistent"
    assert {found.verdict for found in result.rows} <= {"consistent", "no guarantee"}


BUDGETED = Rpdp(**BENCHMARK.BUDGETS, rounds=10, largest_budget=3.0)
PRIMARY = UldpAvg(noise_multiplier=5.0, clip=1.0, local=LocalTraining(0.01), weighting="primary_silo")
TIGHT = {
    "uniform": (*SETTINGS["uniform"], ("released", "server", "silo")),
    "masked": (*SETTINGS["masked"], ("released", "server", "silo")),
    "records": (*SETTINGS["records"], ("released",)),
    "primary_silo": (PRIMARY, "plain", 10, ("released",)),
    "group": (*SETTINGS["group"], ("released", "server")),
    "rpdp": (BUDGETED, "plain", 10, ("server",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TIGHT)
def test_most_of_what_is_promised_leaks(name: str) -> None:
    """Where canaries are placed at their worst, a smaller ε could not be promised."""
    method, aggregator, rounds, adversaries = TIGHT[name]
    result = attack_method(
        method, rounds=rounds, aggregator=aggregator, canaries=1500, adversaries=adversaries, seed=1
    )
    for row in result.rows:
        assert row.promise is not None
        assert row.measured is not None
        assert row.measured.epsilon_lower >= 0.6 * row.promise.epsilon, row.adversary
        assert row.measured.epsilon_lower <= row.promise.epsilon
