"""`silodp epsilon` and `silodp plan` give one answer to one question."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from silodp.accounting.guarantee import OTHER_CODE
from silodp.accounting.views import ADVERSARIES
from silodp.config.build import build_aggregator, get_fields
from silodp.errors import SilodpError
from silodp.methods import METHODS, FederationSize, UldpAvg
from silodp.planning.epsilon import compute_epsilon_for
from silodp.planning.plan import plan_run
from silodp_budgets.rpdp.method import TwoStageSampling
from silodp_budgets.user_budgets import UserBudgets
from support.commands import Silodp, assert_sentence
from support.refusals import refused
from support.specs import make_spec

ROUNDS, DELTA, SILOS, USERS, SIZE = 30, 1e-4, 3, 500, 1000
CONSTANTS: dict[str, Any] = {
    "noise_multiplier": 3.0,
    "user_sampling": 0.3,
    "group_size": 2,
    "record_sampling": 0.1,
    "local_steps": 4,
    "client_sampling": 0.6,
    "trajectory": "paper",
}
"""What a question to `compute_epsilon_for` says, of those that a method has."""
FILLED: dict[str, Any] = {
    "clip": 0.7,
    "expected_batch_size": 20.0,
    "local_learning_rate": 0.3,
    "rounds": ROUNDS,
    "delta": DELTA,
    "budget": 2.0,
    "threshold": 2.0,
    "largest_budget": 2.0,
}
"""What a run also needs. The filter ends at its largest budget, in the middle of these rounds."""


def planned(method: Any, aggregator: str = "plain", **settings: Any) -> dict[str, Any]:
    adder = build_aggregator(aggregator, settings)
    population = FederationSize(SILOS, USERS, adder.min_silos_for(SILOS))
    names = tuple(f"silo-{s}" for s in range(SILOS))
    spec = make_spec(
        "", names, method, population, SIZE, delta=DELTA, rounds=ROUNDS, aggregator=adder
    ).calibrate()
    return plan_run(spec)


def of(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in values.items() if field in get_fields(METHODS[name])}


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("name", METHODS)
def test_a_question_and_a_plan_have_one_answer(name: str, adversary: Any, aggregator: str) -> None:
    fields = of(name, CONSTANTS)
    made = METHODS[name](**{**of(name, FILLED), **fields})
    expected = planned(made, aggregator)
    if isinstance(made, TwoStageSampling):
        fields["record_sampling"] = made.budgets.most  # the plan is about the record of the largest budget
    if name == "rpdp-filter":
        fields["largest_budget"] = FILLED["largest_budget"]
    found = compute_epsilon_for(
        name,
        fields,
        rounds=ROUNDS,
        delta=DELTA,
        adversary=adversary,
        silos=SILOS,
        aggregator=aggregator,
        users=USERS,
        dimension=SIZE,
    )
    answer = expected["adversaries"][adversary]
    # To all digits but the last: fillers stand for constants, such as the clip, that cancel.
    rounded = answer | ({"epsilon": pytest.approx(answer["epsilon"], rel=1e-9)} if answer["private"] else {})
    assert {key: found[key] for key in answer} == rounded
    if answer["private"]:  # of events without an ε any accountant is as good
        assert found["accountant"] == expected["accountant"]
    assert [(claim["epsilon"], claim["why"]) for claim in found["claims"]] == [
        (pytest.approx(claim["epsilon"], rel=1e-9), claim["why"])
        for claim in expected["claims"]
        if claim["adversary"] == adversary
    ]


def test_the_filter_is_not_asked_without_the_budget_that_ends_it(silodp: Silodp) -> None:
    asked = "epsilon --method rpdp-filter --noise-multiplier 1 --rounds 1 --local-steps 100"
    assert_sentence(silodp(*asked.split()), "largest_budget is missing")
    small, large = (
        silodp(*asked.split(), "--largest-budget", budget, "--json").json["epsilon"] for budget in (1, 100)
    )
    assert 0.9 < small <= 1
    assert 91 < large <= 100


def test_the_filter_ends_after_however_many_rounds(silodp: Silodp) -> None:
    asked = "epsilon --method rpdp-filter --noise-multiplier 5 --local-steps 4 --largest-budget 2 --json"
    spent = [silodp(*asked.split(), "--rounds", rounds).json for rounds in (1, 100, 10_000)]
    assert 0 < spent[0]["epsilon"] < spent[1]["epsilon"] == spent[2]["epsilon"] <= 2
    assert spent[1]["persons"] == spent[2]["persons"]


def test_who_is_charged_by_joined_rounds_is_charged_in_full() -> None:
    fields = {**of("rpdp", CONSTANTS), "record_sampling": 0.1}
    said = {
        ledger: compute_epsilon_for("rpdp", {**fields, "ledger": ledger}, rounds=ROUNDS)["epsilon"]
        for ledger in ("planned", "realized")
    }
    full = compute_epsilon_for("rpdp", {**fields, "client_sampling": 1.0}, rounds=ROUNDS)["epsilon"]
    assert said["planned"] < said["realized"] == full


@pytest.mark.parametrize("name", METHODS)
def test_no_method_ignores_that_the_adversary_knows_the_sample(name: str) -> None:
    """`uldp-group` once printed .448 whoever knew which records were drawn, and `ddp` .93 for about 4.6."""
    fields = of(name, CONSTANTS)
    if issubclass(METHODS[name], TwoStageSampling):
        fields["record_sampling"] = 0.1
    if name == "rpdp-filter":
        fields["largest_budget"] = FILLED["largest_budget"]
    asked = partial(compute_epsilon_for, name, fields, rounds=ROUNDS, silos=SILOS)
    hidden, known = asked()["epsilon"], asked(knows_sample=True)["epsilon"]
    if any(field.endswith("_sampling") for field in fields):
        assert known > 1.3 * hidden
    else:
        assert known == hidden  # nobody is sampled, or there is no guarantee


def test_known_draws_of_records_cost_the_mixture_over_how_often_a_record_was_drawn() -> None:
    q, sigma = 0.1, 3.0
    fields = {"noise_multiplier": sigma, "local_steps": 1, "record_sampling": q}
    found = compute_epsilon_for("ddp", fields, rounds=ROUNDS, delta=DELTA, silos=SILOS, knows_sample=True)
    often = np.arange(1, ROUNDS + 1)
    mu, epsilon = np.sqrt(often / SILOS) / sigma, found["epsilon"]
    above = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert stats.binom.pmf(often, ROUNDS, q) @ above == pytest.approx(DELTA, rel=1e-3)


def test_a_budget_beside_the_probability_of_a_record_is_refused() -> None:
    fields = {**of("rpdp", CONSTANTS), "record_sampling": 0.1, "largest_budget": 0.01}
    with refused("argument.conflict") as caught:
        compute_epsilon_for("rpdp", fields, rounds=ROUNDS)
    assert caught.value.field == "largest_budget"


@pytest.mark.parametrize("by", ["sampling", "clip"])
def test_persons_own_budgets_are_kept_to_in_a_question_too(by: Any) -> None:
    mean = 0.3 if by == "sampling" else None
    personal = UserBudgets(by, rounds=ROUNDS, largest_budget=0.8, mean_sampling=mean)
    fields = {"noise_multiplier": 3.0, "personal": personal}
    expected = planned(UldpAvg(clip=1.0, **fields))
    found = compute_epsilon_for(
        "uldp-avg", fields, rounds=ROUNDS, delta=DELTA, adversary="server", silos=SILOS, users=USERS
    )
    assert found["epsilon"] == expected["adversaries"]["server"]["epsilon"]
    assert 0.75 < found["epsilon"] <= 0.8
    whole = compute_epsilon_for(
        "uldp-avg", {"noise_multiplier": 3.0}, rounds=ROUNDS, delta=DELTA, adversary="server", silos=SILOS
    )
    assert whole["epsilon"] > 2


def test_a_target_for_persons_own_budgets_says_where_to_set_it(silodp: Silodp, config: Path) -> None:
    config.write_text(
        config.read_text()
        + '[method.personal]\nby = "clip"\nlargest_budget = 1.0\n'
        + '[budgets]\ndistribution = "three-levels"\nof = "users"\n'
    )
    asked = ("plan", config, "--target-epsilon", 0.5)
    assert_sentence(
        silodp(*asked), "target epsilon = 0.5", "set method.personal.largest_budget to the target"
    )
    met = silodp("plan", config, "--set", "method.personal.largest_budget=0.5", "--json").json
    assert 0.45 < met["adversaries"]["server"]["epsilon"] <= 0.5


@pytest.mark.parametrize(
    ("delta", "users", "remarked"),
    [
        (0.5, None, True),
        (0.01, None, True),
        (0.0099, None, False),
        (1e-5, None, False),
        (0.0099, 1000, True),
        (1e-3, 1000, True),
        (9.99e-4, 1000, False),
        (0.05, 10, False),
    ],
)
def test_a_delta_that_promises_nothing_is_remarked_on(
    silodp: Silodp, delta: float, users: int | None, remarked: bool
) -> None:
    asked = ["epsilon", "--method", "uldp-avg", "--noise-multiplier", 5, "--rounds", 3, "--delta", delta]
    found = silodp(*asked, *([] if users is None else ["--users", users]))
    assert found.status == 0, found.err
    assert (f"δ = {delta:g} is accepted although it is not below 1/U" in found.out) is remarked
    assert ("not below 1/U = 0.001" in found.out) is (remarked and users is not None)


def test_users_are_counted() -> None:
    with pytest.raises(SilodpError, match="users = 0"):
        compute_epsilon_for("uldp-avg", {"noise_multiplier": 5.0}, rounds=3, users=0)


OWN_FIELD = """
from dataclasses import dataclass, field
from silodp.methods import UldpAvg

@dataclass(frozen=True, kw_only=True, repr=False)
class Warm(UldpAvg):
    warmth: float
    name: str = field(default="warm", init=False)

@dataclass(frozen=True, kw_only=True, repr=False)
class Declared(Warm):
    epsilon_ignores = {**Warm.epsilon_ignores, "warmth": 0.5}
"""


def test_a_method_says_itself_on_which_of_its_fields_epsilon_does_not_depend(tmp_path: Path) -> None:
    path = tmp_path / "warm.py"
    path.write_text(OWN_FIELD)
    asked = partial(compute_epsilon_for, fields={"noise_multiplier": 5.0}, rounds=3)
    found = asked(f"{path}:Declared")
    assert found["epsilon"] == asked("uldp-avg")["epsilon"]
    assert asdict(OTHER_CODE) in found["assumptions"]
    with refused("config.missing_field"):
        asked(f"{path}:Warm")
