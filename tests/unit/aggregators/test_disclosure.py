"""δ that ciphertexts of `lattice` use up: over a run with its evaluations, and over all runs of a silo.

Decryption errors tell the server more than the sum: its view is at total variation distance TV from one that is
(ε, δ') private, so that it is (ε, δ' + (1 + e^ε)·TV) private, at the ε of everything that is released. The tests
compute TV by the formula of docs/protocols.md and ε from ledgers, without the rule that chooses parameters.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from scipy import optimize, stats

from silodp.accounting.accountant import choose_accountant, compute_delta, compute_epsilon, find_accountant
from silodp.accounting.events import Event, Gaussian, reveal_samples, scale_shift
from silodp.accounting.guarantee import SERVER_FOLLOWS
from silodp.accounting.ledger import Ledger, reopen_ledger
from silodp.accounting.views import View
from silodp.aggregators import Aggregator
from silodp.aggregators.masked import Masked
from silodp.aggregators.run_spec import RunSpec
from silodp.methods import FederationSize, UldpAvg
from silodp.planning.epsilon import compute_epsilon_for as plan_epsilon
from silodp.runtime.guarantees import derive_guarantees, plan_charges
from silodp.runtime.prepare import prepare_run
from silodp.runtime.silo import make_ledger
from silodp_analytics.evaluation.series import Evaluation
from silodp_deploy.lifetime import LifetimeLedger, compute_lifetime_cost
from silodp_private.lattice import Lattice
from support.oracles import logistic_task, small_federation
from support.private import run
from support.refusals import refused
from support.specs import Half, make_spec

DELTA, USERS, SIZE, COUNT_CAP = 1e-5, 40, 200, 40
METHOD = UldpAvg(5.0, 0.5, weighting="records")
ONCE = Evaluation("sums", noise_multiplier=0.3)
OFTEN = Evaluation("sums", noise_multiplier=0.9, every=4)


def lattice_spec(
    evaluation: Evaluation | None = None, silos: int = 3, m: int | None = None, rounds: int = 20
) -> RunSpec:
    names = tuple(f"silo{s}" for s in range(silos))
    aggregator = Lattice(count_cap=COUNT_CAP, attempts=rounds, min_silos=m)
    population = FederationSize(silos, USERS, m or silos)
    spec = make_spec(
        "run", names, METHOD, population, SIZE, delta=DELTA, rounds=rounds, aggregator=aggregator
    )
    return replace(
        spec,
        data=replace(spec.data, labels="classes", classes=2),
        series=() if evaluation is None else (evaluation,),
    )


def compute_tv(spec: RunSpec) -> float:
    """TV = attempts·√(N/U₁·B)·⌈U/U₁⌉·S·√U₁·n_max·(C/g)·‖ê‖_∞/2^F with F = Q − T − 2 − ⌈log2 S⌉."""
    p, silos = spec.aggregator.parameters(spec), len(spec.names)
    flooding = p.limb_bits * p.limbs - p.plaintext_bits - 2 - math.ceil(math.log2(silos))
    outputs = p.ring_size // p.packed
    coefficients = outputs * math.ceil(SIZE / outputs)
    norm = math.sqrt(p.packed) * COUNT_CAP * p.clip_units
    errors = math.ceil(USERS / p.packed) * silos * norm * 2**10 * math.sqrt(p.ring_size / 8192)
    return spec.aggregator.attempts * math.sqrt(coefficients) * errors / 2**flooding


def charge_all(spec: RunSpec, ledger: Ledger, releases: int = 1) -> Ledger:
    """Charge all rounds, and all evaluations with so many releases."""
    for round_ in range(spec.rounds):
        ledger.charge(round_, 0, spec.costliest_events(round_))
    for series in spec.charged:
        for number in range(series.count(spec.rounds)):
            for release in range(releases):
                events = spec.derived[series.name].costliest_events(number, release)
                ledger.charge(number, release, events, series=series.name)
    return ledger


def make_lifetime(spec: RunSpec, runs: int) -> LifetimeLedger:
    names = [f"{number:032x}" for number in range(runs)]
    disclosure = spec.aggregator.disclosure(spec)
    made = {name: charge_all(spec, make_ledger(replace(spec, run=name), None, disclosure)) for name in names}
    return LifetimeLedger(DELTA, {"server": 100.0}, made)


# --- one run ---


@pytest.mark.parametrize(
    ("evaluation", "silos", "m"),
    [(None, 3, 3), (ONCE, 3, 3), (OFTEN, 3, 3), (OFTEN, 4, 3)],
)
def test_the_delta_kept_for_ciphertexts_is_enough_at_the_epsilon_of_training_and_evaluations(
    evaluation, silos, m
):
    spec = lattice_spec(evaluation, silos, m)
    ledger = charge_all(spec, make_ledger(spec), releases=1 + silos - m)
    epsilon = ledger.epsilon("server")
    assert ledger.delta == pytest.approx(0.99 * DELTA, rel=1e-12)
    assert (1 + math.exp(epsilon)) * compute_tv(spec) <= 0.01 * DELTA
    if evaluation is not None:
        plain = lattice_spec(None, silos, m)
        assert (1 + math.exp(epsilon)) * compute_tv(plain) > 0.01 * DELTA, (
            "parameters for the training would do"
        )


class Unstated(Half):
    """Keeps half of δ, and does not say for what."""

    disclosure = Aggregator.disclosure  # type: ignore[assignment]


@dataclass(frozen=True, repr=False)
class Decaying(UldpAvg):
    """Noise that falls to a quarter from round to round, and then stays."""

    name: str = field(default="decaying", init=False)

    def dp_event(self, view: View) -> Event:
        return replace(METHOD, noise_multiplier=5.0 * 0.25 ** min(view.round, 2)).dp_event(view)


def test_parameters_are_for_the_costliest_round_where_noise_changes():
    method = Decaying(5.0, 0.5, weighting="records")
    spec = replace(lattice_spec(rounds=3), method=method, accountant=find_accountant("rdp"))
    epsilon = charge_all(spec, make_ledger(spec)).epsilon("server")
    assert (1 + math.exp(epsilon)) * compute_tv(spec) <= 0.01 * DELTA
    alike = lattice_spec(rounds=3)
    assert (1 + math.exp(epsilon)) * compute_tv(alike) > 0.01 * DELTA, "those of round 0 would do"
    assert derive_guarantees(spec, plan_charges(spec, spec.accountant))["server"].cost.epsilon == epsilon


def test_an_aggregator_that_keeps_delta_and_does_not_say_for_what_has_no_guarantee():
    """Its contract: with a smaller `delta_share`, TV is 1 until it is stated, so that no ε holds."""
    spec = replace(lattice_spec(), method=UldpAvg(5.0, 0.5), aggregator=Unstated())
    found = derive_guarantees(spec, plan_charges(spec, spec.accountant))
    assert [one.cost.epsilon for one in found.values()] == [None, None, None]


def test_epsilon_of_persons_with_several_ids_counts_the_ciphertexts_anew():
    """Parameters are chosen at the ε of a person with one id; two to four ids have a larger one."""
    spec = lattice_spec()
    with charge_all(spec, make_ledger(spec)) as ledger:
        guarantee = derive_guarantees(spec, ledger.to_counts())["server"]
    event = spec.costliest_events()["server"]
    flat, stated = [], []
    for ids, row in zip((2, 3, 4), guarantee.linkage, strict=False):
        charges = [(scale_shift(event, float(ids)), spec.rounds)]
        accountant = choose_accountant([charges[0][0]])
        flat.append((1 + math.exp(compute_epsilon(charges, spec.noise_delta, accountant))) * compute_tv(spec))
        stated.append(row["epsilon"])
        if row["epsilon"] is not None:
            needed = compute_delta(charges, row["epsilon"], accountant)
            assert needed + (1 + math.exp(row["epsilon"])) * compute_tv(spec) <= DELTA * (1 + 1e-9)
    assert [extra > 0.01 * DELTA for extra in flat] == [False, True, True]
    assert [epsilon is None for epsilon in stated] == [False, False, True]


@pytest.mark.parametrize(("sigma", "exists"), [(0.7, False), (0.75, True)])
def test_epsilon_if_the_server_learns_the_sample_counts_the_ciphertexts_anew(sigma, exists):
    spec = lattice_spec()
    aggregator = replace(spec.aggregator, hidden_sample=10)
    spec = replace(
        spec, method=replace(METHOD, noise_multiplier=sigma, user_sampling=0.1), aggregator=aggregator
    )
    with charge_all(spec, make_ledger(spec)) as ledger:
        guarantee = derive_guarantees(spec, ledger.to_counts())["server"]
        charges = [(reveal_samples(spec.costliest_events()["server"]), spec.rounds)]
        accountant = choose_accountant([charges[0][0]])
        flat = compute_epsilon(charges, spec.noise_delta, accountant)
    assert (1 + math.exp(flat)) * compute_tv(spec) > 0.01 * DELTA, "the δ kept for ciphertexts would do"
    known = guarantee.sample_known
    assert (known is not None) == exists
    if known is not None:
        assert compute_delta(charges, known, accountant) + (1 + math.exp(known)) * compute_tv(spec) <= DELTA
    settings = {"count_cap": COUNT_CAP, "attempts": spec.rounds, "hidden_sample": 10}
    asked = plan_epsilon(
        "uldp-avg",
        {"noise_multiplier": sigma, "user_sampling": 0.1, "weighting": "records"},
        rounds=spec.rounds, delta=DELTA, adversary="server", silos=3, aggregator="lattice", aggregation=settings,
        users=USERS, dimension=SIZE, knows_sample=True,
    )  # fmt: skip
    assert asked["epsilon"] == (known if known is None else pytest.approx(known, rel=1e-6))


def test_evaluations_for_which_no_parameters_exist_are_refused():
    spec = lattice_spec(replace(ONCE, noise_multiplier=0.05))
    with refused("crypto.parameters"):
        spec.aggregator.check(spec)


@pytest.mark.timeout(20)
def test_a_number_of_attempts_that_nobody_could_make_is_refused_at_once():
    """Each of 4·10⁸ attempts was looked at, which took minutes, also where all cost alike."""
    spec = replace(lattice_spec(ONCE), aggregator=Lattice(count_cap=COUNT_CAP, attempts=400_000_000))
    with refused("crypto.parameters"):
        spec.aggregator.check(spec)


def test_a_run_of_more_rounds_than_parameters_were_chosen_for_is_refused():
    """After more attempts ciphertexts may disclose more than the δ that was kept for them."""
    prepare = partial(
        prepare_run, small_federation(), logistic_task(), METHOD, aggregator=Lattice(8, attempts=2)
    )
    assert prepare(rounds=2).rounds == 2
    with refused("argument.conflict") as caught:
        prepare(rounds=3)
    assert caught.value.field == "rounds"


def test_a_resumed_run_has_no_more_evaluations_than_parameters_were_chosen_for(tmp_path: Path, caplog):
    """Each end of a run that is resumed with more rounds is another evaluation, of which one was planned."""
    federation = small_federation(held_out=4)
    lattice = Lattice(count_cap=8, attempts=4)
    settings = {"federation": federation, "evaluation": Evaluation("sums", noise_multiplier=1.0)}
    run(lattice, rounds=1, out=tmp_path / "run", **settings)
    with caplog.at_level(logging.WARNING):
        result = run(lattice, rounds=2, out=tmp_path / "run", resume=True, **settings)
    assert [("evaluation" in row) for row in result.metrics] == [False, True, False]
    assert "chosen for 1 in all" in caplog.text
    with reopen_ledger(tmp_path / "run" / "checkpoint" / "ledger.jsonl") as ledger:
        assert [entry.series for entry in ledger.history] == ["", "evaluation", ""]
    spec = lattice_spec(ONCE)
    assert spec.derived["evaluation"].rounds == 1  # which the gates of silos enforce
    assert replace(spec, aggregator=Masked()).derived["evaluation"].rounds == spec.rounds


# --- all runs of a silo ---


@pytest.mark.parametrize("runs", [1, 5, 9])
def test_a_lifetime_counts_the_ciphertexts_of_all_runs_at_the_epsilon_of_all_of_them(runs):
    spec = lattice_spec()
    lifetime = make_lifetime(spec, runs)
    epsilon = lifetime.epsilon("server")
    counts = Counter({spec.costliest_events()["server"]: runs * spec.rounds})

    def needed(at: float) -> float:
        noise = compute_delta(counts.items(), at, choose_accountant(counts))
        return noise + runs * (1 + math.exp(at)) * compute_tv(spec)

    assert needed(epsilon) <= DELTA * (1 + 1e-9)
    assert needed(epsilon - 1e-4) > DELTA, "a smaller ε would hold"
    if runs == 1:
        assert compute_lifetime_cost(spec, spec.names[0], DELTA)["server"] == pytest.approx(
            epsilon, rel=1e-12
        )
    if runs == 9:
        flat = compute_epsilon(counts.items(), (1 - 0.01 * runs) * DELTA, choose_accountant(counts))
        assert needed(flat) > DELTA, "1 % of δ for each run would do"


def test_where_no_epsilon_exists_a_further_release_is_refused():
    spec = lattice_spec()
    lifetime = make_lifetime(spec, 10)
    assert lifetime.epsilon("server") is None
    assert lifetime.epsilon("released") is not None  # whoever sees models sees no ciphertexts
    assert "more than any ε" in lifetime.find_exceeded(spec.costliest_events())


def test_a_run_counts_from_its_first_charge_on():
    spec = lattice_spec()
    lifetime = make_lifetime(spec, 6)
    before, event = lifetime.epsilon("server"), spec.costliest_events()["server"]
    begun = make_ledger(replace(spec, run="f" * 32), None, {"server": 1e-9})
    lifetime.runs["f" * 32] = begun
    assert lifetime.epsilon("server") == before
    assert lifetime.epsilon("server", {event: 1}, "0" * 32) is not None
    assert lifetime.epsilon("server", {event: 1}, "f" * 32) is None  # as after the charge
    begun.charge(0, 0, spec.costliest_events())
    assert lifetime.epsilon("server") is None


def test_an_aggregator_that_keeps_delta_and_does_not_say_for_what_has_no_lifetime_epsilon():
    spec = replace(lattice_spec(), method=UldpAvg(5.0, 0.5), aggregator=Unstated())
    assert compute_lifetime_cost(spec, spec.names[0], DELTA) == {}
    assert compute_lifetime_cost(replace(spec, aggregator=Masked()), spec.names[0], DELTA).keys() >= {
        "released",
        "server",
    }


def test_a_ledger_states_the_disclosure_of_its_run(tmp_path: Path):
    spec = lattice_spec()
    path, disclosure = tmp_path / "ledger.jsonl", spec.aggregator.disclosure(spec)
    assert disclosure == {"server": pytest.approx(compute_tv(spec), rel=1e-9)}
    charge_all(spec, make_ledger(spec, path, disclosure)).close()
    with reopen_ledger(path) as ledger:
        assert ledger.disclosure == disclosure
    with make_ledger(spec, path, {"server": 0.0}) as ledger:
        assert ledger.disclosure == disclosure  # that of the beginning stays
    older = tmp_path / "older.jsonl"
    with make_ledger(spec, older) as ledger:
        charge_all(spec, ledger)
        assert ledger.disclosure is None
        bound = make_ledger(replace(spec, run="b"), None, {"server": 2.0**-40})
        known = LifetimeLedger(DELTA, {}, {"b": charge_all(spec, bound)})
        assert LifetimeLedger(DELTA, {}, {"a": ledger}).epsilon("server") == known.epsilon("server")
    for wrong in ({"server": 2.0}, {"server": "no"}, {"nobody": 0.1}, [0.1], [], "", 3):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text(json.dumps({**json.loads(lines[0]), "disclosure": wrong}) + "\n" + "".join(lines[1:]))
        with refused("ledger.damaged"):
            reopen_ledger(path)


@pytest.mark.parametrize(("sigma", "tv"), [(1.0, 1e-9), (0.5, 1e-10), (0.5, 0.0)])
def test_epsilon_with_a_disclosure_solves_the_equation(sigma, tv):
    """Against δ(ε) of a Gaussian in closed form (Balle and Wang 2018, Theorem 8)."""

    def missing(epsilon: float) -> float:
        a, b = 0.5 / sigma, epsilon * sigma
        noise = stats.norm.cdf(a - b) - math.exp(epsilon + stats.norm.logcdf(-a - b))
        return noise + (1 + math.exp(epsilon)) * tv - DELTA

    lowest = optimize.minimize_scalar(missing, bounds=(0, 50), method="bounded").x if tv else 50.0
    expected = optimize.brentq(missing, 0, lowest)
    found = compute_epsilon([(Gaussian(sigma), 1)], DELTA, "pld", tv)
    assert expected <= found + 1e-9
    assert found == pytest.approx(expected, rel=1e-3)
    assert compute_epsilon([(Gaussian(sigma), 1)], DELTA, "pld", 1e-5) == math.inf


@pytest.mark.parametrize("hidden", [True, False])
def test_what_a_protocol_assumes_stands_in_the_guarantees_that_need_it(hidden: bool) -> None:
    spec = lattice_spec(rounds=2)
    if not hidden:
        spec = replace(spec, aggregator=Masked(), method=UldpAvg(5.0, 0.5))
    ledger = make_ledger(spec, disclosure=spec.aggregator.disclosure(spec))
    ledger.charge(0, 0, spec.costliest_events(0))
    found = derive_guarantees(spec, ledger.to_counts())
    # Every person takes part with the same weight where nothing is hidden: the server draws and computes nothing.
    protocol = set(spec.aggregator.assumptions) - (set() if hidden else {SERVER_FOLLOWS})
    assert protocol
    for adversary in ("server", "silo"):
        assert found[adversary].cost.epsilon is not None
        assert protocol <= set(found[adversary].assumptions)
        assert (SERVER_FOLLOWS in found[adversary].assumptions) == hidden
    assert not protocol & set(found["released"].assumptions)


@pytest.mark.parametrize(
    ("weight_bits", "units"), [(1, 1), (1, 2), (2, 2), (4, 8), (4, None), (20, 1), (20, None)]
)
def test_parameters_are_chosen_for_no_smaller_epsilon_than_the_run_has(
    weight_bits: int, units: int | None
) -> None:
    """With few bits of weight on a coarse grid noise has few steps, and costs more: 38.7 where 35.1 was assumed."""
    aggregator = Lattice(count_cap=COUNT_CAP, attempts=100, weight_bits=weight_bits, units=units)
    spec = make_spec(
        "run", ("a", "b", "c"), UldpAvg(2.0, 0.5, weighting="records"), FederationSize(3, USERS, 3), SIZE,
        delta=DELTA, rounds=100, aggregator=aggregator,
    )  # fmt: skip
    event = spec.round_events()["server"]
    epsilon = compute_epsilon([(event, 100)], spec.noise_delta, choose_accountant([event]))
    # Where both count the same steps, they differ by the rounding of the sensitivity to whole steps alone.
    assert aggregator.parameters(spec).epsilon >= epsilon * (1 - 1e-3)
