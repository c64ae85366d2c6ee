"""Whole runs in which every person has a budget of her own: who is sampled, how rows are clipped, when a run ends."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from scipy import stats

from silodp.accounting.ledger import Ledger
from silodp.aggregators import Plain
from silodp.aggregators.masked import Masked
from silodp.aggregators.run_spec import RunSpec
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.methods import FederationSize, UldpAvg
from silodp.runtime.gate import Gate
from silodp.runtime.server import Server
from silodp.wire.messages import Message
from silodp.wire.store import MemoryStore, RoundStore
from silodp_budgets.user_budgets import UserBudgets
from support.clear import released
from support.masked import AVG, TRAIN
from support.oracles import logistic_task, small_federation, without_user
from support.private import LATTICE, PAILLIER, in_clear, run
from support.refusals import refused
from support.specs import make_spec
from support.wires import wire  # noqa: F401

BUDGETS = np.array([0.5, 1.0, 2.0, 100.0] * 3)
MEAN = 0.6
SAMPLING = UserBudgets("sampling", 40, 20.0, adversary="released", mean_sampling=MEAN)
CLIP = UserBudgets("clip", 20, 20.0)
PATHS = ["plain", "masked", LATTICE, PAILLIER]


def name_of(path) -> str:
    return path if isinstance(path, str) else path.name


def federation(budgets=BUDGETS, **more):
    return replace(small_federation(**more), user_budgets=budgets)


def method(personal, path="plain", **more):
    weighting = "uniform" if isinstance(path, str | Masked) else "records"
    return replace(AVG, personal=personal, weighting=weighting, **more)


def known(method, path="plain", whole=None) -> RunSpec:
    """As a run has it."""
    whole = whole or federation()
    aggregator = {"plain": Plain(), "masked": Masked()}.get(path, path) if isinstance(path, str) else path
    names = tuple(silo.name for silo in whole.silos)
    population = FederationSize(
        len(names), whole.users, aggregator.min_silos_for(len(names)), tuple(whole.user_budgets.tolist())
    )
    size = logistic_task(whole.silos[0].x.shape[1]).size
    return make_spec(
        "", names, method, population, size, whole.public().index_digest, aggregator=aggregator
    ).calibrate()


def parameters(spec: RunSpec) -> np.ndarray:
    return spec.method.budget_calibration.parameters(np.array(spec.population.budgets))


@dataclass(frozen=True)
class Watched(UldpAvg):
    """Remembers who has weight in which silo's round, and how long the rows are that it is about to add."""

    weights: list = field(default_factory=list, repr=False, compare=False)
    lengths: list = field(default_factory=list, repr=False, compare=False)

    def local_update(self, context):
        self.weights.append((context.silo, (context.weights > 0).numpy()))
        stream = super().local_update(context)

        def watched(chunks):
            for chunk in chunks:
                rows = chunk.tensor.double() * chunk.factors[:, None]
                long = torch.linalg.vector_norm(chunk.tensor.double(), dim=1)
                for u, after, before in zip(
                    chunk.owners.tolist(), rows.norm(dim=1).tolist(), long.tolist(), strict=True
                ):
                    self.lengths.append((context.silo, u, after, before))
                yield chunk

        return replace(stream, chunks=watched(stream.chunks))


def watched(method) -> Watched:
    names = [
        "noise_multiplier",
        "clip",
        "local",
        "weighting",
        "user_sampling",
        "server_learning_rate",
        "personal",
    ]
    return Watched(**{name: getattr(method, name) for name in names})


# --- sampling ---


@pytest.mark.slow
@pytest.mark.parametrize("path", ["plain", "masked"])
def test_everyone_is_sampled_at_her_own_rate_in_all_silos_at_once(path):
    rounds, whole = 40, federation(np.array([0.5, 1.0, 2.0, 100.0] * 20), users=80, records=400)
    seen = watched(method(SAMPLING))
    run(path, seen, rounds=rounds, federation=whole, evaluate_every=rounds)
    rates = parameters(known(seen, path, whole))
    assert 0 < rates[0] < rates[1] < rates[2] < rates[3] == 1.0
    by_silo = [np.array([drawn for silo, drawn in seen.weights if silo == s]) for s in range(3)]
    here = whole.counts() > 0
    for one, other in ((0, 1), (0, 2), (1, 2)):
        shared = here[one] & here[other]
        assert shared.sum() > 5
        np.testing.assert_array_equal(by_silo[one][:, shared], by_silo[other][:, shared])
    assert not any(drawn[:, ~mine].any() for drawn, mine in zip(by_silo, here, strict=True))
    drawn = np.any(by_silo, axis=0)
    assert drawn.shape == (rounds, 80)
    for budget in range(4):
        of = here.any(axis=0) & (np.arange(80) % 4 == budget)
        count, trials = drawn[:, of].sum(), rounds * of.sum()
        assert agrees(count, trials, rates[budget])
        assert not agrees(count, trials, MEAN), "a test that cannot tell q_u from the mean is none"


def agrees(count: int, of: int, q: float) -> bool:
    return bool(stats.binomtest(int(count), of, q).pvalue > 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["plain", "masked", PAILLIER], ids=name_of)
def test_where_all_budgets_are_alike_the_run_is_that_of_one_rate(path):
    """Bit for bit: the same coins, the same scale."""
    whole = federation(np.full(12, 2.0))
    mine = method(SAMPLING, path)
    q = float(parameters(known(mine, path, whole))[0])
    assert 0.05 < q < 0.95
    mine = replace(mine, personal=replace(SAMPLING, mean_sampling=q))
    common = replace(mine, personal=None, user_sampling=q)
    assert torch.equal(run(path, mine, federation=whole).params, run(path, common, federation=whole).params)


@pytest.mark.slow
@pytest.mark.parametrize("path", [LATTICE, PAILLIER], ids=name_of)
@pytest.mark.parametrize("personal", [replace(SAMPLING, rounds=20), CLIP], ids=lambda p: p.by)
def test_under_hidden_weights_what_is_released_is_what_the_clear_twin_adds_up(path, personal):
    mine, whole = method(personal, path), federation()
    with released() as hidden:
        run(path, mine, rounds=3, federation=whole)
    with released() as clear:
        run(in_clear(path), mine, rounds=3, federation=whole)
    assert len(hidden) == 3
    assert all(np.array_equal(a, b) for a, b in zip(hidden, clear, strict=True))


# --- clips ---


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_every_silo_clips_a_persons_rows_to_her_own_clip(path):
    seen = watched(method(CLIP, path, clip=0.02, local=replace(TRAIN, batch_size=None)))
    run(path, seen, rounds=2, federation=federation())
    own = parameters(known(seen, path)) * 0.02
    assert own[0] < own[1] < own[2] < own[3]
    shortened = set()
    for silo, user, after, before in seen.lengths:
        assert after <= own[user]
        assert after == pytest.approx(min(own[user], before), rel=1e-9)
        if before > own[user]:
            shortened.add((silo, BUDGETS[user]))
    assert shortened >= {(s, b) for s in range(3) for b in (0.5, 1.0, 2.0)}, "else this judges nothing"


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_emptying_a_person_moves_what_is_released_by_her_own_clip_at_most(path):
    """With the same noise, under which it is hidden: the first round's sum, with her and without."""
    mine = method(CLIP, path, clip=0.02, local=replace(TRAIN, batch_size=None))
    own = parameters(known(mine, path)) * 0.02
    # Integers move by what truncation adds besides, and weights by records shift no one else's.
    slack = {"plain": 1e-12, "masked": 1e-12}.get(name_of(path), 0.02 / 64)
    tight = 0
    with released() as totals:
        run(path, mine, rounds=1, federation=federation())
        for user in range(4):
            without = replace(without_user(federation(), user), user_budgets=BUDGETS)
            run(path, mine, rounds=1, federation=without)
            moved = float(np.linalg.norm(totals[0] - totals[-1]))
            assert moved <= own[user] + slack
            tight += moved > 0.5 * own[user]
    assert tight >= 2


def test_where_all_budgets_are_alike_the_run_is_that_of_a_smaller_clip():
    """In clear: noise of the same size in absolute terms."""
    whole = federation(np.full(12, 0.5))
    mine = method(CLIP, local=replace(TRAIN, batch_size=None))
    c = float(parameters(known(mine, whole=whole))[0])
    assert c < 0.5
    alone = replace(mine, personal=None, clip=c * mine.clip, noise_multiplier=mine.noise_multiplier / c)
    torch.testing.assert_close(
        run("plain", mine, federation=whole).params,
        run("plain", alone, federation=whole).params,
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_person_whose_budget_is_too_small_for_any_clip_is_not_trained_on():
    budgets = BUDGETS.copy()
    budgets[5] = 1e-7
    whole = federation(budgets)
    seen = watched(method(CLIP))
    result = run("masked", seen, federation=whole)
    trained = {user for _, user, _, _ in seen.lengths}
    assert trained == set(range(12)) - {5}
    assert all(row.get("refused", {}) == {} for row in result.metrics)


# --- what is charged ---


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=name_of)
@pytest.mark.parametrize("personal", [replace(SAMPLING, rounds=3, adversary="server"), replace(CLIP, rounds=3)],
                         ids=lambda p: p.by)  # fmt: skip
def test_a_run_of_all_its_rounds_spends_what_was_planned_and_no_more(path, personal):
    personal = replace(personal, largest_budget=1.0)
    result = run(path, method(personal, path), rounds=3, federation=federation())
    guarantee = result.guarantees["server"]
    assert 0.99 < guarantee.epsilon <= 1.0
    assert [(entry["budget"], entry["units"]) for entry in guarantee.groups] == [
        (0.5, 3), (1.0, 3), (2.0, 3), (100.0, 3)
    ]  # fmt: skip
    for entry in guarantee.groups:
        assert entry["realized"] == entry["planned"] <= min(entry["budget"], 1.0)
    assert "budgets-public" in [one.id for one in guarantee.assumptions]


def test_a_run_that_ends_early_says_so():
    result = run("plain", method(CLIP), rounds=2, federation=federation())
    for entry in result.guarantees["released"].groups:
        assert entry["realized"] < entry["planned"]


def test_more_rounds_than_the_budgets_are_for_are_refused():
    with pytest.raises(SilodpError, match=r"rounds = 21: persons' budgets are met over 20"):
        run("plain", method(CLIP), rounds=21, federation=federation())


@pytest.mark.parametrize("personal", [SAMPLING, CLIP], ids=lambda p: p.by)
def test_missing_budgets_are_refused_before_anything_runs(personal, tmp_path):
    with pytest.raises(SilodpError, match="the federation has none"):
        run("plain", method(personal), federation=small_federation(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_release_is_charged_that_the_budgets_were_not_met_for():
    spec = known(method(CLIP))
    ledger = Ledger(None, 1e-5, "pld", run="run")
    server = Server(spec, None, ledger, RoundStore(MemoryStore()), Randomness.secret())  # type: ignore[arg-type]
    assert server.charge(0, 0, 3)
    assert not server.charge(0, 1, 3), "a second release of the round"
    assert not server.charge(20, 0, 3), "one round more"
    assert server.charge(19, 0, 3)
    assert [(charge.round, charge.release) for charge in ledger.history] == [(0, 0), (19, 0)]


def test_a_silo_charges_no_release_that_the_budgets_were_not_met_for():
    """Whatever the server asks: persons' clips are for one release of each planned round."""
    spec = replace(known(method(CLIP)), aggregator=Masked())
    ledger = Ledger(None, 1e-5, "rdp", run="run")
    gate = Gate(spec.names[0], spec, RoundStore(MemoryStore()), np.zeros(12, np.int64), ledger)

    def charge(round_: int, release: int) -> None:
        arrays = {"params": np.zeros(spec.size, np.float32)}
        gate.charge(Message("update", "run", round_, release, {"release": release}, arrays))

    charge(0, 0)
    for round_, release in ((0, 1), (20, 0)):
        with refused("gate.rounds"):
            charge(round_, release)
    charge(19, 0)
    assert [(entry.round, entry.release) for entry in ledger.history] == [(0, 0), (19, 0)]


def test_a_run_ends_where_a_round_would_have_to_be_released_twice(wire):  # noqa: F811
    """A silo is lost while seals are opened: others may have opened theirs."""
    wire.fails = staticmethod(
        lambda name, m: "before" if (name, m.kind, m.round) == ("silo3", "open", 1) else None
    )
    result = run(Masked(min_silos=3), method(CLIP), rounds=3, federation=federation(silos=4))
    assert result.stopped == "budget"
    assert result.guarantees["server"].rounds == 2
    assert len(result.metrics) == 2, "the untrained model, and one round"


@pytest.mark.parametrize("path", ["plain", "masked"])
@pytest.mark.parametrize("personal", [SAMPLING, CLIP], ids=lambda p: p.by)
def test_a_resumed_run_is_the_same_run(path, personal, tmp_path):
    mine, whole = method(personal), federation()
    once = run(path, mine, rounds=4, federation=whole)
    run(path, mine, rounds=2, federation=whole, out=tmp_path)
    again = run(path, mine, rounds=4, federation=whole, out=tmp_path, resume=True)
    assert torch.equal(once.params, again.params)


@pytest.mark.parametrize("path", ["plain", "masked"])
def test_a_run_is_not_resumed_with_other_budgets(path, tmp_path):
    """Who was promised less from the start had another clip in the rounds before."""
    mine = method(CLIP)
    run(path, mine, rounds=2, federation=federation(), out=tmp_path)
    fewer = BUDGETS.copy()
    fewer[0] = 0.1
    with pytest.raises(SilodpError, match="other"):
        run(path, mine, rounds=4, federation=federation(fewer), out=tmp_path, resume=True)
