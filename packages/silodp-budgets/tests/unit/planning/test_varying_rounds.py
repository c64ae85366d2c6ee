"""Plans of methods whose rounds cost different amounts: every number is about all of them, not the first alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from silodp.accounting.accountant import Accountant, Composition, compute_epsilon
from silodp.accounting.events import Event, Gaussian, NonPrivate, PoissonSampled, Skellam
from silodp.accounting.ledger import Budget
from silodp.accounting.views import View, reads_round
from silodp.aggregators import RunSpec
from silodp.methods import FederationSize, UldpAvg
from silodp.planning import plan
from silodp.planning.epsilon import compute_epsilon_for
from silodp.planning.plan import plan_run
from silodp.runtime.guarantees import derive_guarantees, plan_charges
from silodp_budgets.user_budgets import UserBudgets
from support.commands import CONFIG as SMALL
from support.commands import Silodp, assert_sentence
from support.refusals import refused
from support.specs import make_spec

DELTA, ROUNDS = 1e-5, 9
SHAPES: dict[str, Callable[[int], float]] = {
    "falls": lambda t: 2.0 ** -(t // 2),
    "grows": lambda t: 1.0 + t,
    # The first and the last round are alike, and not those between them.
    "alternates": lambda t: 0.5 if t % 2 else 1.0,
    "one cheap round": lambda t: 3.0 if t == 4 else 1.0,
    "one dear round": lambda t: 0.1 if t == 5 else 1.0,
}
"""Noise of a round, relative to the configured one."""


@dataclass(frozen=True, repr=False)
class Uneven(UldpAvg):
    shape: str = "falls"

    def dp_event(self, view: View) -> Event:
        return event_in(self.shape, self.noise_multiplier, view.round, self.user_sampling)


def event_in(shape: str, noise: float, round_: int, sampling: float = 1.0) -> Event:
    noisy = Gaussian(noise * SHAPES[shape](round_))
    return noisy if sampling == 1 else PoissonSampled(sampling, noisy)


def cost(shape: str, rounds: int, noise: float, sampling: float = 1.0) -> float:
    """ε of the first rounds, each charged by itself."""
    return compute_epsilon([(event_in(shape, noise, t, sampling), 1) for t in range(rounds)], DELTA, "pld")


def spec_of(method: Any, rounds: int = ROUNDS, **changes: Any) -> RunSpec:
    spec = make_spec("", ("a", "b"), method, FederationSize(2, 50), 10, delta=DELTA, rounds=rounds)
    return replace(spec, **changes)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_table_of_epsilon_counts_every_round(shape: str) -> None:
    spec = spec_of(Uneven(5.0, 0.1, shape=shape))
    found = plan_run(spec)["adversaries"]["released"]["epsilon"]
    assert found == pytest.approx(cost(shape, ROUNDS, 5.0), rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_settings_for_a_target_meet_it_over_all_rounds(shape: str) -> None:
    target = 1.01 * cost(shape, ROUNDS, 5.0)
    found = plan_run(spec_of(Uneven(5.0, 0.1, shape=shape)), target=target)["target"]
    most, noise = found["rounds"], found["noise_multiplier"]
    assert cost(shape, most, 5.0) <= target
    assert most == plan.MAX_VARYING_ROUNDS or target < cost(shape, most + 1, 5.0)
    assert cost(shape, ROUNDS, noise) <= target < cost(shape, ROUNDS, noise * (1 - 2e-4))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["falls", "alternates"])
def test_the_sampling_probability_for_a_target_meets_it_over_all_rounds(shape: str) -> None:
    rounds = 5  # each is convolved by itself, for every probability that is tried
    target = cost(shape, rounds, 5.0, 0.3)
    spec = spec_of(Uneven(5.0, 0.1, user_sampling=0.5, shape=shape), rounds)
    found = plan_run(spec, target=target)["target"]
    assert found["user_sampling"] == pytest.approx(0.3, rel=1e-3)
    assert cost(shape, rounds, 5.0, found["user_sampling"]) <= target


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("enough", [0, 1, 5, 6, ROUNDS])
def test_a_limit_is_enough_for_the_rounds_that_the_run_affords(shape: str, enough: int) -> None:
    limit = cost(shape, enough, 5.0) * (1 + 1e-6) if enough else 0.5 * cost(shape, 1, 5.0)
    spec = spec_of(
        Uneven(5.0, 0.1, shape=shape), budget=Budget(limit, DELTA), silo_limits={"released": limit}
    )
    result = plan_run(spec)
    for found in (result["budget"], *result["silo_limits"]):
        assert found["rounds"] == enough
        assert found["fits"] == (enough == ROUNDS)


def test_a_limit_that_no_number_of_rounds_reaches_says_so() -> None:
    for shape, rounds in (("grows", plan.MAX_VARYING_ROUNDS), ("falls", None)):
        limit = 2 * cost("grows", 200, 5.0)  # Σ 1/(1 + t)² converges
        result = plan_run(spec_of(Uneven(5.0, 0.1, shape=shape), budget=Budget(limit, DELTA)))
        assert result["budget"].get("unlimited", False) == (rounds is not None)
        assert any("or more" in line for line in plan.format_plan(result)) == (rounds is not None)
        assert rounds in (None, result["budget"]["rounds"])


def test_a_round_without_a_guarantee_ends_those_that_fit() -> None:
    class Silent(Uneven):
        def dp_event(self, view: View) -> Event:
            return super().dp_event(view) if view.round < 5 else NonPrivate("the noise ends")

    spec = spec_of(Silent(5.0, 0.1, shape="grows"), budget=Budget(50.0, DELTA))
    result = plan_run(spec, target=50.0)
    assert result["adversaries"]["released"]["epsilon"] is None
    assert result["budget"]["rounds"] == result["target"]["rounds"] == 5
    assert result["target"]["noise_multiplier"] is None


def test_rounds_that_are_alike_are_asked_for_once_however_many_there_are() -> None:
    asked: list[View] = []

    class Alike(UldpAvg):
        def dp_event(self, view: View) -> Event:
            asked.append(view)
            return super().dp_event(view)

    spec = spec_of(Alike(5.0, 0.1), rounds=10**6, budget=Budget(1e3, DELTA))
    result = plan_run(spec, target=1.0)
    assert result["budget"]["rounds"] == plan_run(replace(spec, method=UldpAvg(5.0, 0.1)))["budget"]["rounds"]
    assert len(asked) < 2000


def test_an_accountant_that_knows_all_rounds_is_chosen() -> None:
    class Turning(UldpAvg):
        def dp_event(self, view: View) -> Event:
            return Gaussian(5.0) if view.round < 3 else Skellam(5.0, 1000.0, 10)

    assert plan_run(spec_of(Turning(5.0, 0.1), rounds=3))["accountant"] == "pld"
    assert plan_run(spec_of(Turning(5.0, 0.1)))["accountant"] == "rdp"


def test_a_claim_counts_every_round() -> None:
    class Wrong(Uneven):
        assumptions = ("the proof is wrong",)

    class Claiming(UldpAvg):
        @property
        def paper_claim(self) -> Wrong:
            return Wrong(50.0, 0.1)

    spec = spec_of(Claiming(5.0, 0.1))
    (claim,) = derive_guarantees(spec, plan_charges(spec, spec.accountant))["released"].claims
    assert claim["epsilon"] == pytest.approx(cost("falls", ROUNDS, 50.0), rel=1e-6)


def test_budgets_of_persons_are_refused_where_rounds_cost_different_amounts() -> None:
    class Kept(UldpAvg):
        def dp_event(self, view: View) -> Event:
            return Gaussian(self.noise_multiplier / (1 + view.round))

    personal = UserBudgets(by="clip", rounds=ROUNDS, largest_budget=2.0)
    assert spec_of(UldpAvg(5.0, 0.1, personal=personal)).calibrate()
    with refused("argument.conflict"):
        spec_of(Kept(5.0, 0.1, personal=personal)).calibrate()


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda view: view.round, True),
        (lambda view: getattr(view, "rou" + "nd"), True),
        (lambda view: vars(view), True),
        (repr, True),
        (hash, True),
        (lambda view: copy(view).round, True),
        (lambda view: replace(view, colluding=2), True),
        (lambda view: (view.adversary, view.shares_in_sum, view.unknown_shares, view.survivors), False),
        (lambda view: replace(view, round=0), False),
    ],
)
def test_reading_the_round_of_a_view_is_seen(read: Callable[[View], object], expected: bool) -> None:
    assert reads_round(read, View("silo", 3)) is expected


# --- a method whose noise has a name of its own, and an accountant in a file ---

SIGMA = """
from dataclasses import dataclass, field
from silodp import LocalTraining
from silodp.accounting.events import Gaussian
from silodp.methods import Method
from silodp.settings import NoiseMultiplier


@dataclass(frozen=True, repr=False)
class Sigma(Method):
    sigma: NoiseMultiplier = 5.0
    user_sampling: float = 1.0
    local: LocalTraining = field(default_factory=lambda: LocalTraining(learning_rate=0.01))
    name: str = field(default="sigma", init=False)
    unit: str = field(default="user", init=False)

    def local_update(self, context):
        raise NotImplementedError

    def bounds(self, population):
        return None

    def dp_event(self, view):
        return Gaussian(self.sigma)
"""
CONFIG = """
rounds = 4
seed = 1
[data]
source = "embedded"
users = 20
silos = 2
[method]
name = "{}:Sigma"
"""
ACCOUNTANT = """
from pathlib import Path
from silodp.accounting.rdp import RdpAccountant

Path(__file__).with_suffix(".ran").touch()


class FewOrders(RdpAccountant):
    def __init__(self):
        super().__init__("few-orders", (2.0, 4.0, 8.0, 16.0))
"""


def test_noise_of_another_name_is_left_out_and_said_so(tmp_path: Path, silodp: Silodp) -> None:
    file, config = tmp_path / "sigma.py", tmp_path / "config.toml"
    file.write_text(SIGMA)
    config.write_text(CONFIG.format(file))
    planned = silodp("plan", config, "--target-epsilon", 5)
    assert planned.status == 0, planned
    assert "σ =" not in planned.out
    assert "  noise_multiplier: sigma has no field of this name" in planned.out
    found = silodp("plan", config, "--target-epsilon", 5, "--json").json
    assert found["noise_multiplier"] is None
    assert found["target"]["noise_multiplier"] is None
    asked = silodp("epsilon", "--method", f"{file}:Sigma", "--rounds", 4, "--silos", 2, "--json")
    assert asked.json["noise_multiplier"] is None
    assert asked.json["epsilon"] == found["adversaries"]["released"]["epsilon"]
    assert_sentence(silodp("plan", config, "--plot", tmp_path / "q.svg"), code="argument.value")


ASKED = ("epsilon", "--method", "uldp-avg", "--noise-multiplier", 5, "--rounds", 4)


def test_epsilon_takes_an_accountant_from_a_file(tmp_path: Path, silodp: Silodp) -> None:
    file = tmp_path / "few.py"
    file.write_text(ACCOUNTANT)
    found = silodp(*ASKED, "--accountant", f"{file}:FewOrders", "--json").json
    assert found["accountant"] == "few-orders"
    assert found["epsilon"] > silodp(*ASKED, "--accountant", "rdp", "--json").json["epsilon"]
    assert_sentence(silodp(*ASKED, "--accountant", f"{file}:Path"), code="config.value")
    assert_sentence(silodp(*ASKED, "--accountant", f"{file}:Missing"), code="config.not_importable")
    assert_sentence(silodp(*ASKED, "--accountant", "rdpp"), code="argument.value")


def test_epsilon_takes_an_accountant_by_an_entry_point(
    tmp_path: Path, silodp: Silodp, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "few_entry.py").write_text(ACCOUNTANT)
    distribution = tmp_path / "few-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: few\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text("[silodp.accountants]\nfew = few_entry:FewOrders\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert silodp(*ASKED, "--json").json["accountant"] == "pld"
    assert not (tmp_path / "few_entry.ran").exists()  # code that nobody named is not run
    assert silodp(*ASKED, "--accountant", "few", "--json").json["accountant"] == "few-orders"


def test_an_accountant_object_answers_as_before() -> None:
    class Zero(Composition):
        def epsilon(self, delta: float) -> float:
            return 7.0

    class Seven(Accountant):
        name = "seven"

        def supports(self, event: Event) -> bool:
            return True

        def compose(self, charges: Iterable[tuple[Event, int]]) -> Composition:
            return Zero()

    found = compute_epsilon_for("uldp-avg", {"noise_multiplier": 5.0}, rounds=4, accountant=Seven())
    assert (found["accountant"], found["epsilon"]) == ("seven", 7.0)


def test_a_refusal_of_an_accountant_speaks_of_that_accountant(tmp_path: Path, silodp: Silodp) -> None:
    file, config = tmp_path / "none.py", tmp_path / "config.toml"
    file.write_text(ACCOUNTANT + "\n    def supports(self, event):\n        return False\n")
    config.write_text(f'accountant = "{file}:FewOrders"\n{SMALL}')
    refusal = silodp("run", config, "--out", tmp_path / "run")
    assert_sentence(refusal, code="accounting.unsupported")
    assert "integer noise" not in refusal.err  # that is what 'pld' has no rule for
