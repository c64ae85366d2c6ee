"""An accountant of a user's own, in one file: what it must give, and where it is refused."""

import math

import numpy as np
import pytest
from torch import nn

import silodp
from silodp.accounting import Accountant, Composition, compute_delta, compute_epsilon
from silodp.accounting.accountant import find_accountant
from silodp.accounting.events import Composed, Gaussian, PoissonSampled, SelfComposed, Skellam, list_nested
from silodp.accounting.ledger import Ledger
from silodp.accounting.rdp import RdpAccountant
from silodp.errors import SilodpError
from silodp.training.losses import cross_entropy
from support.refusals import refused

DELTA = 1e-5


class Zcdp(Composition):
    """ρ-zCDP of Gaussian releases: ε = ρ + 2√(ρ ln(1/δ)) (Bun and Steinke 2016, Proposition 1.3)."""

    def __init__(self, rho):
        self.rho = rho

    def epsilon(self, delta):
        return self.rho + 2 * math.sqrt(self.rho * math.log(1 / delta))


class ZcdpAccountant(Accountant):
    name = "zcdp"

    def supports(self, event):
        return all(isinstance(inner, Gaussian | SelfComposed | Composed) for inner in list_nested(event))

    def compose(self, charges):
        return Zcdp(sum(count * self._rho(event) for event, count in charges))

    def _rho(self, event):
        match event:
            case Gaussian(sigma):
                return 1 / (2 * sigma**2)
            case SelfComposed(inner, count):
                return count * self._rho(inner)
            case Composed(parts):
                return sum(map(self._rho, parts))
        raise SilodpError(f"{event!r} is not Gaussian", code="accounting.unsupported")


def test_a_class_of_three_members_bounds_what_the_exact_accountant_says():
    charges = [(Gaussian(5.0), 40), (SelfComposed(Gaussian(8.0), 3), 2)]
    exact = compute_epsilon(charges, DELTA)
    found = compute_epsilon(charges, DELTA, ZcdpAccountant())
    assert exact < found < 2 * exact
    # What follows from ε alone
    assert compute_delta(charges, found, ZcdpAccountant()) == pytest.approx(DELTA, rel=1e-4)
    assert compute_delta(charges, found) < DELTA
    loose, tight = ZcdpAccountant().compose(charges), find_accountant("pld").compose(charges)
    assert tight.total_variation() <= loose.total_variation() <= 1
    for epsilon in (0.0, 1.0, found):
        assert tight.probability_above(epsilon) <= loose.probability_above(epsilon) <= 1


def test_fewer_orders_are_one_line_and_never_cost_less():
    few = RdpAccountant("few-orders", (2.0, 4.0, 8.0, 16.0))
    for event in (Gaussian(5.0), PoissonSampled(0.1, Gaussian(2.0)), Skellam(3.0, 64, 10)):
        assert compute_epsilon([(event, 9)], DELTA, few) >= compute_epsilon([(event, 9)], DELTA, "rdp")


def test_a_ledger_stores_the_name_and_is_continued_under_it_only(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, DELTA, ZcdpAccountant(), run="r") as ledger:
        ledger.charge(0, 0, {"released": Gaussian(5.0)})
        with refused("accounting.unsupported"):
            ledger.charge(1, 0, {"released": PoissonSampled(0.5, Gaussian(5.0))})
    with Ledger(path, DELTA, ZcdpAccountant(), run="r") as ledger:
        assert ledger.epsilon("released") == compute_epsilon([(Gaussian(5.0), 1)], DELTA, ZcdpAccountant())
    with refused("ledger.setup"):
        Ledger(path, DELTA, "pld", run="r")
    with refused("argument.value"):
        Ledger(path, DELTA, "zcdp", run="r")  # a name alone does not say where the code is


class Broken(ZcdpAccountant):
    name = "broken"

    def compose(self, charges):
        return Zcdp(math.nan)


@pytest.mark.parametrize(
    "given", ["moments", 3, None, ZcdpAccountant, RdpAccountant(orders=(2.0,)), RdpAccountant("")]
)
def test_what_is_no_accountant_or_bears_the_name_of_another_is_refused(given):
    with refused("argument.value") as caught:
        find_accountant(given)
    assert caught.value.field == "accountant"


def test_an_epsilon_that_is_not_a_number_is_refused():
    with refused("accounting.out_of_range"):
        compute_epsilon([(Gaussian(5.0), 1)], DELTA, Broken())


@pytest.fixture
def federation():
    generator = np.random.default_rng(0)
    silos = [
        silodp.SiloData(
            f"s{s}", generator.standard_normal((8, 3), dtype=np.float32), np.arange(8) % 2, np.arange(8) % 4
        )
        for s in range(2)
    ]
    return silodp.Federation(tuple(silos), users=4, test=None, classes=2)


def _train(federation, out=None, **settings):
    task = silodp.Task(nn.Linear(3, 2), cross_entropy())
    method = silodp.methods.UldpAvg(
        noise_multiplier=5.0, clip=0.1, local=silodp.LocalTraining(learning_rate=0.1)
    )
    return silodp.train(federation, task, method, rounds=2, seed=1, out=out, **settings)


def test_a_run_is_accounted_by_the_given_object(federation):
    found = _train(federation, accountant=ZcdpAccountant()).guarantees["released"]
    assert found.accountant == "zcdp"
    assert found.epsilon > _train(federation).guarantees["released"].epsilon


def test_a_run_that_it_does_not_support_is_refused_before_anything_is_written(federation, tmp_path):
    with refused("accounting.unsupported"):
        _train(federation, tmp_path / "run", accountant=ZcdpAccountant(), aggregator="masked")
    assert not (tmp_path / "run").exists()
