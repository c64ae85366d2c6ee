"""Statistics and evaluations by sums are attacked, and an error in their noise, clip or charge is found.

Every canary has a cell of its own, so one sum of counts attacks hundreds of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from silodp.accounting.events import Gaussian
from silodp.mechanisms.clipping import ClippedRows
from silodp.methods import Ddp, UldpAvg
from silodp.training.sgd import LocalTraining
from silodp_analytics.evaluation import methods as evaluation_module
from silodp_analytics.evaluation.methods import EvaluationSums
from silodp_analytics.evaluation.series import Evaluation
from silodp_analytics.regression.families import Logistic, Survival
from silodp_analytics.regression.method import Regression
from silodp_analytics.statistics import method as statistics_module
from silodp_analytics.statistics.method import Statistics
from silodp_audit.attack import counted
from silodp_audit.attack.audit_run import AttackResult, Target, attack_method, audit_evaluation
from silodp_experiments.uldp_baselines import UldpNaive
from support.refusals import refused

PERSONS = UldpAvg(5.0, 1.0, LocalTraining(learning_rate=0.01))
RECORDS = Ddp(3.0, 1.0, 1, 1.0, 10.0, 1.0)
TRUE_BOUNDS, TRUE_EVENT = EvaluationSums.bounds, EvaluationSums.dp_event


def attack_statistics(**settings: Any) -> AttackResult:
    return attack_method(Statistics(1.0, **settings), rounds=1, seed=3)


def attack_evaluation(method: Any = PERSONS, aggregator: str = "plain", **settings: Any) -> AttackResult:
    evaluation = Evaluation("sums", noise_multiplier=1.0, **settings)
    target = Target(method, ("a", "b", "c"), 1, {"aggregator": aggregator, "seed": 3}, evaluation)
    return audit_evaluation(target)


@pytest.mark.parametrize(
    ("method", "by_silo"),
    [
        (PERSONS, False),
        (PERSONS, True),
        (RECORDS, True),
        pytest.param(RECORDS, False, marks=pytest.mark.slow),
    ],
)
def test_most_of_what_an_evaluation_promises_leaks_and_nothing_more(method, by_silo):
    result = attack_evaluation(method, by_silo=by_silo)
    assert result.verdict == "consistent"
    for row in result.rows:
        assert row.measured.epsilon_lower >= 0.5 * row.promise.epsilon, row.adversary


@pytest.mark.parametrize("settings", [{}, {"records": 3}, {"weighting": "present"}])
def test_most_of_what_statistics_promise_leaks_and_nothing_more(settings):
    result = attack_statistics(**settings)
    assert result.verdict == "consistent"
    assert result.rows[0].measured.epsilon_lower >= 0.6 * result.rows[0].promise.epsilon


@pytest.mark.parametrize("fault", [None, "half", "every round as the shortest"])
def test_a_regression_leaks_what_it_is_charged_and_half_a_charge_is_found(fault, monkeypatch):
    """Rounds have unequal noise: one that was charged as another would be seen."""
    true = Regression.dp_event

    def charge(self: Regression, view: Any) -> Any:
        if fault == "half":
            return Gaussian(2 * true(self, view).noise_multiplier)
        return true(self, replace(view, round=0))

    if fault is not None:
        monkeypatch.setattr(Regression, "dp_event", charge)
    family = Logistic() if fault else Survival(horizon=5.0, cuts=(1.0,))
    method = Regression(1.0, family=family, iterations=3, weighting="uniform")
    result = attack_method(method, rounds=3, seed=3)
    if fault is None:
        assert result.verdict == "consistent"
        assert result.rows[0].measured.epsilon_lower >= 0.3 * result.rows[0].promise.epsilon
    else:
        assert_caught(result)


def assert_caught(result: AttackResult) -> None:
    assert result.verdict in ("violation", "noise")


def keep_long(owners: Any, rows: Any, clip: float) -> ClippedRows:
    return ClippedRows(owners, rows, rows.new_ones(len(rows)), clip)


def test_a_block_with_the_noise_of_a_sum_is_found(monkeypatch):
    def bound(self: EvaluationSums, population: Any) -> Any:
        found = TRUE_BOUNDS(self, population)
        return replace(found, sensitivity=found.clip)  # without √S

    monkeypatch.setattr(EvaluationSums, "bounds", bound)
    assert_caught(attack_evaluation(by_silo=True))


def test_an_evaluation_that_is_charged_half_is_found(monkeypatch):
    def charge(self: EvaluationSums, view: Any) -> Any:
        event = TRUE_EVENT(self, view)
        return Gaussian(2 * event.noise_multiplier)

    monkeypatch.setattr(EvaluationSums, "dp_event", charge)
    assert attack_evaluation().verdict == "violation"


def test_held_out_records_that_are_not_clipped_are_found(monkeypatch):
    monkeypatch.setattr(evaluation_module, "clip_rows", keep_long)
    assert_caught(attack_evaluation(clip=2.0))


def test_records_of_statistics_that_are_not_clipped_are_found(monkeypatch):
    monkeypatch.setattr(statistics_module, "clip_rows", keep_long)
    assert_caught(attack_statistics(records=2))


def test_statistics_with_half_the_noise_are_found(monkeypatch):
    true = Statistics.bounds

    def bound(self: Statistics, population: Any) -> Any:
        found = true(self, population)
        return replace(found, noise_multiplier=found.noise_multiplier / 2)

    monkeypatch.setattr(Statistics, "bounds", bound)
    assert_caught(attack_statistics())


def test_the_attack_of_a_method_tests_its_evaluation_too(monkeypatch):
    evaluation = Evaluation("sums", noise_multiplier=1.0, by_silo=True)
    attack = {"rounds": 1, "canaries": 200, "evaluation": evaluation, "seed": 3}
    right = attack_method(PERSONS, **attack)
    names = {test.test for test in right.noise}
    assert {"evaluation: AUC of the server", "evaluation: shift of members", "noise of silo 0"} <= names
    assert right.verdict == "consistent"
    monkeypatch.setattr(
        EvaluationSums,
        "bounds",
        lambda self, population: replace(TRUE_BOUNDS(self, population), sensitivity=1.0),
    )
    wrong = attack_method(PERSONS, **attack)
    failed = {test.test for test in wrong.noise if not test.passed}
    assert failed
    assert all(name.startswith("evaluation: ") for name in failed)
    assert wrong.verdict != "consistent"


@pytest.mark.parametrize("method", [UldpNaive(5.0, 1.0, LocalTraining(learning_rate=0.01)), PERSONS])
def test_no_method_leaves_its_evaluation_out(method):
    """Nor one that clips whole updates, whose rounds are attacked in another way."""
    evaluation = Evaluation("sums", noise_multiplier=1.0)
    result = attack_method(method, rounds=1, canaries=200, evaluation=evaluation, seed=3)
    assert any(test.test == "evaluation: shift of members" for test in result.noise)
    assert result.level == 0.05


def test_of_many_silos_with_tables_of_their_own_less_is_attacked_or_nothing_and_that_is_said():
    evaluation = Evaluation("sums", noise_multiplier=1.0, by_silo=True)
    attack = {"rounds": 1, "canaries": 200, "evaluation": evaluation, "seed": 3}
    some = attack_method(PERSONS, silos=60, **attack)
    assert some.verdict == "consistent"
    assert any(test.test.startswith("evaluation: ") for test in some.noise)
    assert (
        counted.count_canaries(evaluation, 201)
        < counted.LEAST_CANARIES
        <= counted.count_canaries(evaluation, 200)
    )


@pytest.mark.parametrize("wrong", ["sums", Evaluation("local"), Evaluation("none")])
def test_only_an_evaluation_by_sums_is_attacked(wrong):
    with refused("argument.value"):
        attack_method(PERSONS, rounds=1, canaries=200, evaluation=wrong)
