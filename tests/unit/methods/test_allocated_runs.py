"""Runs whose persons are allocated to rounds: what is charged, who takes part, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import silodp
from silodp.accounting import compute_epsilon
from silodp.accounting.accountant import find_accountant
from silodp.accounting.events import Gaussian, Skellam, scale_shift
from silodp.accounting.ledger import Budget
from silodp.accounting.views import View
from silodp.aggregators.masked import Masked
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.methods import UldpAvg, VerifiedIds
from silodp.planning.plan import plan_run
from silodp.runtime.guarantees import plan_charges
from silodp.runtime.prepare import prepare_run
from silodp.training import LocalTraining, Task, cross_entropy
from silodp_budgets.random_allocation import AllocatedRelease, RandomAllocation
from silodp_budgets.user_budgets import UserBudgets
from silodp_private.lattice import Lattice
from support.oracles import small_federation

METHOD = UldpAvg(2.0, local=LocalTraining(0.1), participation=RandomAllocation(4), step=1.0)
DELTA = 1e-5


def make_task() -> Task:
    torch.manual_seed(0)
    return Task(torch.nn.Linear(4, 2), cross_entropy())


def prepare(method=METHOD, rounds=8, **settings):
    return prepare_run(small_federation(silos=4), make_task(), method, rounds=rounds, delta=DELTA, **settings)


def test_the_event_is_that_of_the_view():
    views = {name: View(name, 4, knows_sample=name == "silo") for name in ("released", "silo")}
    first, later = (METHOD.dp_event(replace(views["released"], round=r)) for r in (4, 5))
    assert first == AllocatedRelease(4, Gaussian(2.0))
    assert later == AllocatedRelease(4, Gaussian(2.0), is_first=False)
    known = METHOD.dp_event(views["silo"])
    # Three of four shares of the noise, and of the clip, are unknown to it; it sees who is in which round.
    assert known == AllocatedRelease(4, Gaussian(2.0 / 4**0.5 * 3**0.5 / (3 / 4)), is_seen=True)
    assert METHOD.common_sampling_rate == 0.25
    assert METHOD.server_scale(prepare().population) == 1 / (0.25 * 12)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"user_sampling": 0.5}, "user_sampling"),
        ({"personal": UserBudgets(largest_budget=3.0, by="clip", rounds=8)}, "personal"),
        ({"verified": VerifiedIds(2, 0.5), "weighting": "primary_silo"}, "participation"),
    ],
)
def test_what_cannot_go_together_is_refused(settings, named):
    with pytest.raises(SilodpError, match=named) as raised:
        replace(METHOD, **settings)
    assert raised.value.code == "argument.conflict"


@pytest.mark.parametrize(
    ("aggregator", "weighting", "said"),
    [
        (Masked(min_silos=3), "uniform", "every silo must answer every round"),
        (Lattice(count_cap=3, attempts=20), "records", "they do not draw the sample"),
        (Lattice(count_cap=3, attempts=20, hidden_sample=4), "records", "they do not draw the sample"),
    ],
)
def test_runs_in_which_a_participation_might_go_uncharged_are_refused(aggregator, weighting, said):
    with pytest.raises(SilodpError, match=said) as raised:
        prepare(replace(METHOD, weighting=weighting), aggregator=aggregator)
    assert raised.value.field == "participation"


def test_an_allocation_that_is_cut_short_is_named(caplog):
    prepare(rounds=8)
    assert not caplog.records
    prepare(rounds=10)
    assert "the last allocation ends after 2 of its 4 rounds" in caplog.text


def test_a_plan_and_a_ledger_charge_one_allocation_after_the_other(tmp_path: Path):
    # The last allocation is cut short, and costs as much as a whole one.
    spec = prepare(rounds=10)
    charges = plan_charges(spec, find_accountant("pld"))
    assert sorted(charges.charged["released"].values()) == [3, 7]
    # A plan counts rounds without looking at each; a ledger looks at each.
    many = plan_charges(prepare(rounds=10**9), find_accountant("pld"))
    assert sorted(many.charged["released"].values()) == [250_000_000, 750_000_000]
    planned = {name: charges.compute_cost(name).epsilon for name in ("released", "server", "silo")}
    after = []
    result = silodp.train(
        small_federation(silos=4), make_task(), METHOD, rounds=10, delta=DELTA, seed=1, out=tmp_path / "run",
        callbacks=[lambda done: after.append(done.epsilon["released"])],
    )  # fmt: skip
    assert {name: one.epsilon for name, one in result.guarantees.items()} == planned
    each = [compute_epsilon([(AllocatedRelease(4, Gaussian(2.0)), n)], DELTA) for n in range(4)]
    assert planned["released"] == each[3]
    assert planned["silo"] == pytest.approx(
        compute_epsilon([(Gaussian(2.0 / 4**0.5 * 3**0.5 / (3 / 4)), 3)], DELTA), rel=1e-6
    )
    assert after == pytest.approx([each[(n + 3) // 4] for n in range(11)])


@dataclass(frozen=True, repr=False)
class Uneven(UldpAvg):
    """A plug-in whose events are changed by `change(event, round)`."""

    change: Callable[[AllocatedRelease, int], AllocatedRelease] = field(
        default=None, repr=False, compare=False
    )  # type: ignore[assignment]

    def dp_event(self, view):
        return self.change(super().dp_event(view), view.round)


@pytest.mark.parametrize(
    "change",
    [
        lambda event, number: scale_shift(event, 1.0 if number % 4 == 0 else 50.0),
        lambda event, number: replace(event, is_first=number == 0),
        lambda event, number: replace(event, rounds=8),
        lambda event, number: replace(event, is_seen=number % 4 != 0),
    ],
    ids=["less noise later", "one charged", "other rounds", "seen later"],
)
def test_events_of_a_plug_in_that_cost_more_in_later_rounds_are_refused(change):
    prepare(
        Uneven(
            2.0,
            local=LocalTraining(0.1),
            participation=RandomAllocation(4),
            change=lambda event, number: event,
        )
    )
    with pytest.raises(SilodpError, match="none of its allocation") as raised:
        prepare(Uneven(2.0, local=LocalTraining(0.1), participation=RandomAllocation(4), change=change))
    assert raised.value.code == "plugin.returned"
    with pytest.raises(SilodpError, match="none of its allocation"):
        prepare(
            Uneven(2.0, local=LocalTraining(0.1), change=lambda event, number: AllocatedRelease(4, event))
        )


def test_a_silo_that_does_not_see_the_sample_is_charged_for_a_replacement():
    view = View("silo", 4)
    by_records = replace(METHOD, weighting="present")
    assert by_records.dp_event(view) == AllocatedRelease(4, Gaussian(2.0 / 2 * 3**0.5 / 2), is_seen=True)


def test_numbers_of_numpy_are_numbers():
    method = replace(METHOD, participation=RandomAllocation(np.int64(4)))
    silodp.train(small_federation(silos=4), make_task(), method, rounds=2, delta=DELTA, seed=1)


def test_a_target_is_met_by_noise_and_rounds_and_by_no_coin():
    found = plan_run(prepare(rounds=8), target=1.0)["target"]
    assert "user_sampling" not in found
    events = [(AllocatedRelease(4, Gaussian(found["noise_multiplier"])), 2)]
    assert 0.99 < compute_epsilon(events, DELTA) <= 1.0
    events = [(AllocatedRelease(4, Gaussian(2.0)), found["rounds"] // 4)]
    assert compute_epsilon(events, DELTA) <= 1.0
    assert found["rounds"] % 4 == 0


def test_integers_are_charged_as_such():
    events = prepare(aggregator="masked").round_events()
    assert isinstance(events["server"], AllocatedRelease)
    assert isinstance(events["server"].event, Skellam)
    assert events["silo"].is_seen


def test_a_budget_ends_a_run_before_an_allocation_that_it_cannot_pay_for():
    two = compute_epsilon([(AllocatedRelease(4, Gaussian(2.0)), 2)], DELTA)
    result = silodp.train(
        small_federation(silos=4), make_task(), METHOD, rounds=20, delta=DELTA, seed=1,
        budget=Budget(two * 1.01, DELTA, "released"),
    )  # fmt: skip
    assert result.guarantees["released"].rounds == 8


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_everyone_moves_the_model_once_in_each_allocation(aggregator, tmp_path: Path):
    """Each person's gradient is a direction of its own: in which rounds it is in the sum can be read without noise."""
    users, drawn = 12, []
    x = np.eye(users, dtype=np.float32)
    parts = [SiloData(f"s{s}", x, np.ones(users, np.int64), np.arange(users)) for s in range(3)]
    federation = Federation(tuple(parts), users=users, test=None, classes=2)
    torch.manual_seed(0)
    task = Task(torch.nn.Linear(users, 2, bias=False), cross_entropy())
    models: list[torch.Tensor] = []
    method = UldpAvg(0.0, local=LocalTraining(0.1), step=0.5, participation=RandomAllocation(4))
    for rounds in range(9):
        # Resumed round by round: an allocation goes on where it was.
        result = silodp.train(
            federation, task, method, rounds=rounds, seed=3, aggregator=aggregator, out=tmp_path / "run",
            resume=rounds > 0,
        )  # fmt: skip
        models.append(result.params)
    for before, after in itertools.pairwise(models):
        drawn.append(((after - before).reshape(2, users).abs().sum(0) > 1e-9).numpy())
    assert (np.array(drawn).reshape(2, 4, users).sum(axis=1) == 1).all()
    assert not np.array_equal(drawn[:4], drawn[4:])
