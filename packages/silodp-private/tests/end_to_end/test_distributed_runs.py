"""DDP in whole runs: what the server releases, what is charged, what the guarantee says."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import silodp
from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Composed, Skellam, WorstOf
from silodp.accounting.views import View
from silodp.aggregators.masked import Masked
from silodp.data.federation import Federation, SiloData
from silodp.errors import SilodpError
from silodp.mechanisms.quantization import Quantizer
from silodp.methods import FederationSize
from silodp.methods.ddp import CLAIM
from silodp.runtime.server import Server
from silodp.runtime.train import train
from silodp_private.lattice import Lattice
from support.clear import MaskedInClear, described
from support.distributed import COPIES, DDP, ONE, OTHERS, TRAJECTORIES, counterexample, violated, world
from support.oracles import judges_std, logistic_task, small_federation
from support.specs import make_spec
from support.wires import wire  # noqa: F401

METHODS = [
    DDP,
    replace(DDP, trajectory="local"),
    replace(DDP, trajectory="paper", server_momentum=0.5),
    replace(
        DDP,
        noise_multiplier=(0.5, 1.0, 2.0),
        clip=(0.5, 0.3, 0.2),
        local_steps=(1, 2, 3),
        local_learning_rate=(0.5, 0.2, 0.1),
    ),
]
IDS = ["decoupled", "local", "paper", "own settings"]


def run(aggregator="masked", method=DDP, rounds=2, seed: int | None = 1, silos=3, **more):
    federation = small_federation(silos=silos)
    return train(federation, logistic_task(), method, rounds=rounds, seed=seed, aggregator=aggregator, **more)


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_the_masked_sums_are_the_sums_in_clear_bit_for_bit(method):
    assert described(run("masked", method)) == described(run(MaskedInClear(), method))


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_integers_stay_near_the_floating_sums(method):
    quiet = replace(method, noise_multiplier=0.0)
    torch.testing.assert_close(run("masked", quiet).params, run("plain", quiet).params, rtol=1e-4, atol=1e-4)


def test_it_learns():
    method = replace(DDP, noise_multiplier=0.3, clip=1.0, record_sampling=0.5, expected_batch_size=10.0)
    result = run("masked", method, rounds=15)
    assert result.metrics[-1]["loss"] < 0.6 * result.metrics[0]["loss"]
    assert result.metrics[-1]["metrics"]["accuracy"] > 0.85
    assert result.guarantees["released"].unit == "record"


# Noise


WIDTH = 3000


def idle(silos: int = 3) -> Federation:
    """Silos without records: what is released is noise."""
    empty = np.zeros((0, WIDTH - 1), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64)
    return Federation(tuple(SiloData(f"silo{s}", *empty) for s in range(silos)), 1, None, classes=2)


def released(monkeypatch, aggregator, method, silos: int = 3) -> np.ndarray:
    totals: list[np.ndarray] = []
    play = Server.run_round

    def watched(self, round_, params, *state):
        total = play(self, round_, params, *state)
        totals.append(total.numpy().copy())
        return total

    with monkeypatch.context() as patch:
        patch.setattr(Server, "run_round", watched)
        train(idle(silos), logistic_task(WIDTH - 1), method, rounds=1, aggregator=aggregator)
    return totals[0]


def charged(method, aggregator: Masked, view: View):
    names = tuple(f"silo{s}" for s in range(view.silos))
    population = FederationSize(view.silos, 1, view.noise_sized_for)
    return aggregator.event(make_spec("", names, method, population, WIDTH), view)


def looks_of(event) -> tuple[list, Skellam]:
    """The looks before the last step, and the last step's release."""
    assert isinstance(event, Composed)
    look, last = event.parts[0].event.event, event.parts[1].event
    return ([look.first, look.second] if hasattr(look, "first") else [look]), last


@pytest.mark.parametrize("trajectory", TRAJECTORIES)
def test_the_noise_in_a_sum_is_the_noise_that_is_charged(trajectory, monkeypatch):
    """The released integers have the variance J·σ_total²·s², where each of J steps is charged σ_total²·s²."""
    method, aggregator = replace(DDP, trajectory=trajectory), Masked(units=1 << 14)
    total = released(monkeypatch, aggregator, method)
    steps = total / 0.5 * (1 << 14)
    np.testing.assert_array_equal(steps, np.round(steps))
    _, last = looks_of(charged(method, aggregator, View("released", 3)))
    assert isinstance(last, Skellam)
    assert last.units == 1 << 14
    assert judges_std(steps, math.sqrt(4) * last.noise_multiplier * last.units)


def test_noise_of_different_silos_lies_on_one_grid(monkeypatch):
    """Each silo alone could draw its noise on a finer grid, and then would send in other units than the rest."""
    own = replace(METHODS[3], noise_multiplier=(4.0, 8.0, 16.0))
    bounds = own.bounds(FederationSize(3, 1))
    alone = [math.sqrt(client.variance) / bounds.clip for client in own.clients_of(3)]
    grids = {Quantizer.from_bounds(replace(bounds, noise_multiplier=share)).units for share in alone}
    assert len(grids) > 1
    assert Quantizer.from_bounds(bounds).units == min(grids)
    variance = (4.0 * 0.5) ** 2 + 2 * (8.0 * 0.3 * 0.4) ** 2 + 3 * (16.0 * 0.2 * 0.2) ** 2
    assert judges_std(released(monkeypatch, "masked", own), math.sqrt(variance))
    event = charged(own, Masked(), View("released", 3))
    assert isinstance(event, WorstOf)
    first = event.alternatives[0].event
    assert first.noise_multiplier * 0.5 == pytest.approx(math.sqrt(variance))


def test_integer_steps_of_the_smallest_clip_are_what_is_charged():
    own = METHODS[3]
    assert own.bounds(FederationSize(3, 1)).min_clip_ratio == pytest.approx(
        0.08
    )  # .2·.2 of the third against .5 of the first
    units = {one.event.units for one in charged(own, Masked(), View("released", 3)).alternatives[:1]}
    grid = round(0.5 / Masked().ring(make_spec("", ("a", "b", "c"), own, FederationSize(3, 1), WIDTH))[1])
    assert units == {math.floor(grid * 0.08)}


def test_a_colluding_silo_is_charged_in_whole_steps():
    """A record moves the sum by one clip, in whoever's eyes."""
    event = charged(DDP, Masked(units=1 << 12), View("silo", 3))
    _, last = looks_of(event)
    assert last.units == 1 << 12
    assert last.noise_multiplier == pytest.approx(0.8 * math.sqrt(2))


def test_dropouts_are_charged_with_the_survivors_noise(tmp_path, wire):  # noqa: F811
    wire.fails = staticmethod(
        lambda name, request: "before" if name == "silo3" and request.kind == "update" else None
    )
    run(Masked(min_silos=3), DDP, rounds=1, silos=4, out=tmp_path / "run")
    lines = (tmp_path / "run" / "checkpoint" / "ledger.jsonl").read_text().splitlines()
    event = next(json.loads(line) for line in lines if "events" in line)["events"]["released"]
    assert event["parts"][1]["event"]["noise_multiplier"] == pytest.approx(0.8 * math.sqrt(3))
    look = event["parts"][0]["event"]["event"]
    assert look["second"]["noise_multiplier"] == pytest.approx(0.8 * math.sqrt(3))
    assert look["first"]["noise_multiplier"] == pytest.approx(2 * 0.8 * math.sqrt(4)), "σ_a stays"


# What is said


def test_each_adversary_is_told_what_it_costs():
    result = run("plain", rounds=3)
    found = {name: guarantee.epsilon for name, guarantee in result.guarantees.items()}
    expected = {
        "released": View("released", 3),
        "server": View("server", 3, sees_shares=True),
        "silo": View("silo", 3),
    }
    for name, view in expected.items():
        assert found[name] == pytest.approx(compute_epsilon([(DDP.dp_event(view), 3)], 1e-5), rel=1e-6)
    assert found["released"] < found["silo"] < found["server"]


def test_the_papers_number_is_a_claim_beside_the_guarantee():
    result = run("masked", METHODS[2])
    for guarantee in result.guarantees.values():
        (claim,) = guarantee.claims
        assert claim["why"] == CLAIM
        assert claim["epsilon"] < guarantee.epsilon - 1
    assert all(guarantee.claims == () for guarantee in run("masked", METHODS[1]).guarantees.values())
    paper, local = run("masked", replace(METHODS[2], server_momentum=0.0)), run("masked", METHODS[1])
    assert paper.epsilon == local.epsilon
    torch.testing.assert_close(paper.params, local.params, rtol=0, atol=0)


@pytest.mark.slow
def test_the_worst_clients_cost_is_the_runs():
    own = METHODS[3]
    result = run("plain", own, rounds=2)
    events = own.dp_event(View("released", 3)).alternatives
    assert result.epsilon == pytest.approx(
        max(compute_epsilon([(event, 2)], 1e-5) for event in events), rel=1e-6
    )


def test_a_persons_records_are_counted():
    guarantee = run("masked").guarantees["released"]
    bounds = dict(guarantee.persons)
    assert guarantee.epsilon < bounds[2] < bounds[4]


def test_weights_that_are_hidden_have_nothing_to_hide():
    with pytest.raises(SilodpError) as refused:
        run(Lattice())
    assert refused.value.code == "argument.conflict"
    assert refused.value.field == "aggregator"


def test_noise_beyond_the_sampler_is_refused_before_anything_runs():
    """√J times a step's noise: 32 clips are drawn on any grid, 64 steps of them are not."""
    loud = replace(DDP, noise_multiplier=32.0, local_steps=64)
    run("masked", replace(loud, local_steps=1), rounds=0)
    with pytest.raises(SilodpError, match="cannot be drawn exactly"):
        run("masked", loud, rounds=0)


# The counterexample, end to end


def test_the_claim_breaks_under_secure_aggregation_and_what_is_charged_does_not(monkeypatch):
    """The attack of tests/unit/methods/test_distributed.py on what a run under `masked` releases: the model itself."""
    # Its model does not look at its inputs, which is refused for real ones (model.ignores_inputs).
    monkeypatch.setattr(silodp.Task, "check", lambda *arguments, **named: None)
    found = []
    method = replace(
        ONE,
        trajectory="paper",
        clip=math.sqrt(COPIES),
        noise_multiplier=1 / math.sqrt(COPIES),
        most_batch=200,
    )
    for target in (True, False):
        result = train(world(target), counterexample(), method, rounds=1, aggregator="masked", seed=9)
        found.append(int((result.params.numpy() * 10 < OTHERS).sum()))  # the mean of ten clients' models
    low = float(stats.beta.ppf(1e-6, found[0], COPIES - found[0] + 1))
    high = float(stats.beta.ppf(1 - 1e-6, found[1] + 1, COPIES - found[1]))
    paper = replace(ONE, trajectory="paper")
    assert violated(paper.paper_claim, low, high)
    assert not violated(paper, low, high)


def test_a_client_with_fewer_records_than_a_batch_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(SilodpError, match="fewer than expected_batch_size = 1000"):
        run("plain", replace(DDP, expected_batch_size=1000.0), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
