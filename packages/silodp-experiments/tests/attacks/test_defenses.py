"""Defenses whose removal no other test noticed: random streams, sampling, weights and the order of writing.

Attacked is the guarantee itself, by a silo or server that skips a step without an error: noise that shares its random
stream with batches or with another round, users sampled at another rate, weights below zero or NaN, or a round that is
asked for before it is on disk. Without these defenses a run would finish and report an ε that its noise does not give.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.views import View
from silodp.aggregators import Plain
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness, draw_gaussian
from silodp.methods import FederationSize, UldpAvg
from silodp.methods.roles import validate_weights
from silodp.runtime.server import Server
from silodp.runtime.silo import Silo
from silodp.runtime.train import train
from silodp.training.sgd.local import LocalTraining
from silodp.training.sgd.records import RecordGradients
from silodp.wire.messages import Message
from silodp.wire.store import MemoryStore
from silodp_experiments.uldp_baselines import UldpGroup
from support.oracles import logistic_task, small_federation
from support.refusals import refused
from support.specs import make_spec

TRAIN = LocalTraining(learning_rate=0.1, epochs=2, batch_size=4)
AVG = UldpAvg(5.0, 0.5, TRAIN, server_learning_rate=20.0)
GROUP = UldpGroup(2.0, 0.5, 4, 0.2, local_steps=3, expected_batch_size=4, local_learning_rate=0.5)


def quiet_party(method, store=None, place=0, ledger=None) -> Silo:
    federation = small_federation()
    quiet = replace(method, noise_multiplier=0.0)
    return Silo(
        federation.silos[place],
        logistic_task(),
        make_spec("run", tuple(silo.name for silo in federation.silos), quiet, FederationSize(3, 12), 5),
        Randomness.secret(),
        store or MemoryStore(),
        ledger=ledger,
    )


def answer(silo: Silo, weights: np.ndarray | None = None) -> np.ndarray:
    arrays = {} if weights is None else {"weights": weights}
    if silo._method.needs_counts:
        silo.answer(Message("counts", "run"))
    silo.answer(Message("setup", "run", arrays=arrays))
    request = Message("update", "run", 0, arrays={"params": np.zeros(5, np.float32)})
    return silo.answer(request).arrays["share"]


def test_a_silo_heeds_weights():
    # Full batches: the same people move the same way, however much they count.
    records = replace(AVG, weighting="records", local=LocalTraining(0.1))
    weights = (small_federation().counts()[0] > 0) / 4
    np.testing.assert_allclose(
        answer(quiet_party(records), weights), answer(quiet_party(records), weights / 2) * 2
    )
    assert (answer(quiet_party(records), np.zeros(12)) == 0).all()


def test_a_silo_uses_only_the_records_it_has_admitted():
    """One of three records: silo 0 may use 1 record of each person, the last silos none (k = 1)."""
    for k, limits in ((1, (1, 0, 0)), (4, (2, 1, 1))):
        method = replace(GROUP, record_sampling=1.0, group_size=k)
        for place, limit in enumerate(limits):
            silo = quiet_party(method, place=place)
            given = answer(silo)
            admitted = silo._load_selection()[0]
            counts = small_federation().counts()[place]
            held = np.bincount(small_federation().silos[place].user[admitted], minlength=12)
            np.testing.assert_array_equal(held, np.minimum(counts, limit))
            assert bool(np.abs(given).max() > 0) == (limit > 0)


def test_who_is_admitted_is_drawn_once_and_survives_a_restart():
    store = MemoryStore()
    silo = quiet_party(GROUP, store)
    answer(silo)
    again = quiet_party(GROUP, store, ledger=silo.gate.ledger)
    again.answer(Message("setup", "run"))
    np.testing.assert_array_equal(silo._load_selection()[0], again._load_selection()[0])
    others = [quiet_party(GROUP) for _ in range(20)]  # few records are left out, so one may agree by chance
    for other in others:
        answer(other)
    assert any(
        not np.array_equal(other._load_selection()[0], silo._load_selection()[0]) for other in others
    ), "it is drawn"


@pytest.mark.parametrize("method", [AVG, replace(AVG, user_sampling=0.5), GROUP], ids=lambda m: m.name)
def test_no_stream_of_random_numbers_is_used_for_two_things(method, monkeypatch):
    """Noise that shares its stream with batches, another silo, step or round is not independent of them."""
    used: Counter[tuple[object, ...]] = Counter()
    derive_key = Randomness.derive_key

    def counted(self: Randomness, *purpose: str | int) -> bytes:
        used[self.prefix + purpose] += 1
        return derive_key(self, *purpose)

    monkeypatch.setattr(Randomness, "derive_key", counted)
    train(small_federation(), logistic_task(), method, rounds=3, seed=0)
    assert len([purpose for purpose in used if purpose[-1] in ("noise", "share noise")]) >= 3 * 3
    # The silos' common secret is the only key that is asked for more than once: all silos toss the same coins with it.
    del used["who is sampled",]
    assert set(used.values()) == {1}


def test_seeds_and_secret_keys_give_streams_of_their_own():
    assert Randomness.from_seed(1).stream("a").random() != Randomness.from_seed(2).stream("a").random()
    keys = {Randomness.secret().derive_key("noise") for _ in range(2000)}
    assert len(keys) == 2000
    assert all(len(key) == 32 for key in keys)


def test_noise_is_drawn_in_double_precision():
    draws = draw_gaussian(100, 1.0, Randomness.from_seed(0).stream())
    assert draws.dtype == torch.float64
    assert (draws.float().double() != draws).sum() > 90


def test_persons_are_sampled_at_their_rate(monkeypatch):
    """Whose weights are not 0 when a silo trains, over all rounds of a run; every round draws its own sample."""
    trained: list[np.ndarray] = []
    update = UldpAvg.local_update

    def recorded(self, context):
        persons = np.unique(context.user.numpy())
        trained.append(context.weights.numpy()[persons] > 0)
        return update(self, context)

    monkeypatch.setattr(UldpAvg, "local_update", recorded)
    federation = small_federation(silos=1, users=300, records=1500)
    method = replace(AVG, user_sampling=0.3, noise_multiplier=50.0)
    train(federation, logistic_task(), method, rounds=30, seed=0)
    drawn = np.array(trained)
    assert drawn.shape[0] == 30
    assert len({row.tobytes() for row in drawn}) == 30
    assert abs(drawn.mean() - 0.3) < 5 * np.sqrt(0.21 / drawn.size)


def test_records_are_sampled_at_their_rate(monkeypatch):
    batches: list[torch.Tensor] = []
    gradients = RecordGradients.of

    def recorded(self, params, batch):
        batches.append(batch)
        return gradients(self, params, batch)

    monkeypatch.setattr(RecordGradients, "of", recorded)
    federation = small_federation(records=3000)
    train(
        federation, logistic_task(), replace(GROUP, group_size=400, noise_multiplier=50.0), rounds=2, seed=0
    )
    sizes = np.array([len(batch) for batch in batches])
    assert len(sizes) == 2 * 3 * 3, "rounds, silos, steps"
    assert abs(sizes.sum() - 0.2 * 3000 * 6) < 5 * np.sqrt(0.16 * 3000 * 6)
    assert len({batch.numpy().tobytes() for batch in batches}) == len(batches), (
        "every step draws its own batch"
    )


def test_weights_below_zero_or_not_numbers_are_refused_and_rounding_is_scaled_away():
    for bad in (np.array([[-0.1], [0.5]]), np.array([[np.nan], [0.5]])):
        with pytest.raises(SilodpError, match="weights of user"):
            validate_weights(bad)
    assert validate_weights(np.array([[0.5], [0.5 + 1e-10]])).sum() <= 1 + 1e-15


class WeighsTwice(UldpAvg):
    """A plug-in that gives everybody the weight 1 in every silo: one person moves the sum by S clips."""

    def user_weights(self, counts, population):
        return np.ones((population.silos, population.users))


class WeighsATraceMore(UldpAvg):
    """A plug-in whose weights add to a millionth more than 1."""

    def user_weights(self, counts, population):
        return np.full((population.silos, population.users), (1 + 1e-6) / population.silos)


class CutsNothing(UldpAvg):
    """A plug-in that says that rows are clipped, and leaves them as they are."""

    def local_update(self, context):
        stream = super().local_update(context)
        rows = (replace(chunk, factors=torch.ones_like(chunk.factors)) for chunk in stream.chunks)
        return replace(stream, chunks=rows)


@pytest.mark.parametrize("plug_in", [WeighsTwice, WeighsATraceMore])
@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_weights_of_a_plug_in_that_add_to_more_than_one_are_refused(aggregator, plug_in):
    with refused("argument.value"):
        train(
            small_federation(),
            logistic_task(),
            plug_in(1.0, 1.0),
            aggregator=aggregator,
            rounds=1,
            seed=0,
        )


def test_rows_of_a_plug_in_that_are_longer_than_the_clip_count_as_zero():
    """The grid of secure aggregation compares norms itself (`tests/unit/mechanisms/test_quantization.py`)."""
    assert np.abs(answer(quiet_party(UldpAvg(5.0, 1e-6, TRAIN)))).max() > 0
    assert not answer(quiet_party(CutsNothing(5.0, 1e-6, TRAIN))).any()


def test_plain_says_who_sees_what():
    views = Plain().views(replace(AVG, weighting="records"), 4)
    assert views["released"] == View("released", 4)
    assert views["server"] == View("server", 4, sees_shares=True, counts_disclosed=True)
    assert views["silo"] == View("silo", 4, knows_sample=True, counts_disclosed=True)
    assert not Plain().views(AVG, 4)["server"].counts_disclosed


def test_a_round_is_on_disk_before_a_silo_is_asked_for_it(tmp_path, monkeypatch):
    lines: list[int] = []
    update = Silo._update

    def watched(self: Silo, request: Message) -> Message:
        lines.append((tmp_path / "checkpoint" / "ledger.jsonl").read_text().count('"kind":"charge"'))
        return update(self, request)

    monkeypatch.setattr(Silo, "_update", watched)
    train(small_federation(), logistic_task(), AVG, rounds=2, out=tmp_path)
    assert lines == [1, 1, 1, 2, 2, 2]


def dies_once(monkeypatch) -> list[np.ndarray]:
    """Lets the process die once, between the silos' answers and the server's step; gives what rounds released."""
    seen: list[np.ndarray] = []
    play = Server.run_round

    def dying(self, round_, params, *state):
        total = play(self, round_, params, *state)
        if total is not None:
            seen.append(total.numpy())
        if len(seen) == 1:
            raise KeyboardInterrupt
        return total

    monkeypatch.setattr(Server, "run_round", dying)
    return seen


@pytest.mark.parametrize(
    "method", [replace(AVG, user_sampling=0.5), replace(AVG, weighting="records"), GROUP]
)
def test_the_round_in_flight_is_repeated_as_it_was_even_when_it_used_up_the_budget(
    method, tmp_path, monkeypatch
):
    """Same sample, same selection, same noise, though all of them are secret; and no second charge to afford."""
    federation, task = small_federation(), logistic_task()
    seen = dies_once(monkeypatch)
    one = Plain().views(method, 3)["released"]
    budget = {"epsilon": compute_epsilon([(method.dp_event(one), 1)], 1e-5) * 1.01, "delta": 1e-5}
    with pytest.raises(KeyboardInterrupt):
        train(federation, task, method, rounds=5, out=tmp_path, budget=budget)
    result = train(federation, task, method, rounds=5, out=tmp_path, budget=budget, resume=True)
    assert result.stopped == "budget"
    assert [row["round"] for row in result.metrics] == [0, 1]
    assert result.guarantees["released"].rounds == 1
    np.testing.assert_array_equal(*seen)


def test_the_server_step_is_heavy_ball_momentum(monkeypatch):
    federation, task = small_federation(), logistic_task()
    method = replace(AVG, server_momentum=0.5, server_learning_rate=2.0)
    seen: list[np.ndarray] = []

    play = Server.run_round

    def watched(self, round_, params, *state):
        seen.append(play(self, round_, params, *state).numpy())
        return torch.from_numpy(seen[-1])

    monkeypatch.setattr(Server, "run_round", watched)
    end = train(federation, task, method, rounds=3, seed=0).params.numpy()
    scale, velocity, params = 2.0 / (3 * 12), np.zeros(5), task.initial(0).numpy().astype(np.float64)
    for total in seen:
        velocity = 0.5 * velocity + total
        params = params + scale * velocity
    np.testing.assert_allclose(end, params, rtol=1e-5, atol=1e-6)
