"""A method with state and a server optimizer, each written outside the package in one file, in whole runs."""

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from plugins.adaptive_clipping import AdaptiveClipping
from plugins.yogi import Yogi
from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Composed, Gaussian, PoissonSampled
from silodp.accounting.views import View
from silodp.aggregators.masked import Masked
from silodp.aggregators.plain import Plain
from silodp.config.build import build_method
from silodp.config.toml_values import resolve_paths
from silodp.mechanisms.clipping import add_noise
from silodp.mechanisms.noise import Randomness
from silodp.mechanisms.quantization import Quantizer
from silodp.methods import (
    FederationSize,
    LocalContext,
    Move,
    NoiseAware,
    ServerAdam,
    ServerSgd,
    TailAverage,
    UldpAvg,
    UldpSgd,
)
from silodp.runtime.server import Server
from silodp.runtime.train import train
from silodp.training import Task, binary_cross_entropy, cox, exponential_survival
from silodp.training.sgd.local import LocalTraining
from silodp_experiments.uldp_baselines import UldpNaive
from support.oracles import judges_std, logistic_task, small_federation, std_is
from support.places import PLUGINS
from support.private import LATTICE, PAILLIER
from support.refusals import refused

TRAIN = LocalTraining(learning_rate=0.1, epochs=2, batch_size=4)
AVG = UldpAvg(5.0, 0.5, TRAIN, server_learning_rate=20.0)
ADAPTIVE = AdaptiveClipping(5.0, 0.5, TRAIN, server_learning_rate=20.0)
METHODS = {
    "adaptive clipping": ADAPTIVE,
    "sampled": replace(ADAPTIVE, user_sampling=0.5),
    "yogi": replace(AVG, server_optimizer=Yogi(), server_learning_rate=0.1),
    "adam": replace(AVG, server_optimizer=ServerAdam(), server_learning_rate=0.1),
    "tail average": replace(AVG, server_optimizer=TailAverage(3, ServerAdam()), server_learning_rate=0.1),
    "noise-aware": replace(AVG, server_optimizer=TailAverage(2, NoiseAware(0.5))),
    "both": replace(ADAPTIVE, server_optimizer=Yogi(), server_learning_rate=0.1),
}


class Died(Exception):
    """The process is gone."""


@pytest.mark.parametrize(
    ("name", "aggregator"),
    [
        pytest.param(
            name, aggregator, marks=pytest.mark.slow if (name == "both") != (aggregator == "masked") else ()
        )
        for name in METHODS
        for aggregator in ("plain", "masked")
    ],
)
def test_a_run_that_dies_and_is_resumed_ends_as_one_that_does_not(name, aggregator, tmp_path, monkeypatch):
    settings = {"rounds": 5, "seed": 3, "aggregator": aggregator}
    whole = train(small_federation(), logistic_task(), METHODS[name], **settings)
    step = Server.step

    def dying(self, before, total):
        if before.round == 3:
            raise Died
        return step(self, before, total)

    with monkeypatch.context() as patch:
        patch.setattr(Server, "step", dying)
        with pytest.raises(Died):
            train(small_federation(), logistic_task(), METHODS[name], **settings, out=tmp_path)
    resumed = train(small_federation(), logistic_task(), METHODS[name], **settings, out=tmp_path, resume=True)
    assert torch.equal(resumed.params, whole.params)
    assert resumed.epsilon == whole.epsilon
    assert resumed.guarantees["released"].rounds == 5
    assert json.loads((tmp_path / "guarantee.json").read_text())["settings"] == repr(METHODS[name])


def context_of(method: AdaptiveClipping, clip: float, seed: int = 0) -> LocalContext:
    federation, task = small_federation(), logistic_task()
    silo, population = federation.silos[0], FederationSize(3, federation.users)
    return LocalContext(
        task,
        torch.zeros(task.size),
        torch.from_numpy(silo.x),
        torch.from_numpy(silo.y),
        torch.from_numpy(silo.user),
        torch.full((federation.users,), 1 / 3, dtype=torch.float64),
        population,
        Randomness.from_seed(seed),
        state={"clip": np.array([clip])},
    )


@pytest.mark.parametrize("sampling", [1.0, 0.3])
def test_one_release_of_the_row_costs_what_its_two_parts_cost_together(sampling):
    """Andrew et al., Theorem 1: 1/σ² = 1/σ_update² + 1/σ_bit²."""
    method = replace(ADAPTIVE, user_sampling=sampling, bit_share=0.1)
    parts = Composed((Gaussian(5.0 / math.sqrt(0.9)), Gaussian(5.0 / math.sqrt(0.1))))
    event = method.dp_event(View("released", 10))
    if sampling == 1:
        assert compute_epsilon([(event, 20)], 1e-5) == pytest.approx(
            compute_epsilon([(parts, 20)], 1e-5), rel=1e-3
        )
    assert event == (Gaussian(5.0) if sampling == 1 else PoissonSampled(0.3, Gaussian(5.0)))


@pytest.mark.parametrize("clip", [1e-4, 0.05, 10.0])
def test_rows_are_of_norm_one_at_most_and_say_whether_the_update_was_clipped(clip):
    stream = ADAPTIVE.local_update(context_of(ADAPTIVE, clip))
    plain = replace(AVG, clip=clip).local_update(context_of(ADAPTIVE, clip))
    bits, clipped = [], []
    for chunk, other in zip(stream.chunks, plain.chunks, strict=True):
        rows = chunk.tensor.double() * chunk.factors[:, None]
        assert (torch.linalg.vector_norm(rows, dim=1) <= 1).all()
        # Both train by the same operations on the same shapes: the factors, in double precision, alone differ.
        short = other.rows.double() * (other.factors * math.sqrt(0.99) / clip)[:, None]
        torch.testing.assert_close(rows[:, :-1], short, rtol=1e-6, atol=1e-9)
        bits += (rows[:, -1] > 0).tolist()
        clipped += (other.factors < 1).tolist()
    assert bits == [not one for one in clipped]
    assert all(clipped) if clip == 1e-4 else not any(clipped) if clip == 10 else True


@pytest.mark.parametrize("integers", [False, True])
def test_the_noise_of_every_coordinate_is_that_which_is_charged(integers):
    """m shares of standard deviation σ/√m unit clips: on floats, and on the grid of secure aggregation."""
    bounds = ADAPTIVE.bounds(FederationSize(3, 12))
    assert bounds.clip == bounds.sensitivity == 1
    grid, noise = Quantizer.from_bounds(bounds), Randomness.from_seed(1).stream("noise")
    stream = ADAPTIVE.local_update(context_of(ADAPTIVE, 0.05))
    rows, weights = list(stream.chunks), torch.full((12,), 1 / 3, dtype=torch.float64)
    drawn = []
    for _ in range(2000):
        stream = replace(stream, chunks=rows)
        made = grid.add_noise(stream, weights, noise) if integers else add_noise(stream, weights, noise)
        drawn.append(np.asarray(made.value) * (grid.step if integers else 1))
    samples = np.stack(drawn) * math.sqrt(3)
    for coordinate in (samples - samples.mean(axis=0)).T:
        assert std_is(coordinate, 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_a_run_adds_that_noise_to_the_update_and_to_the_bits(aggregator, monkeypatch):
    totals, play = [], Server.run_round

    def watched(self, round_, params, state):
        total = play(self, round_, params, state)
        totals.append(total.numpy())
        return total

    monkeypatch.setattr(Server, "run_round", watched)
    idle = replace(ADAPTIVE, local=LocalTraining(learning_rate=1e-12), clip_learning_rate=1e-9)
    train(small_federation(), logistic_task(), idle, rounds=200, aggregator=aggregator, evaluate_every=200)
    samples = np.stack(totals)
    assert judges_std(samples[:, :-1].ravel(), 5.0)
    assert judges_std(samples[:, -1] - samples[:, -1].mean(), 5.0)


def test_the_clip_goes_to_the_quantile_of_the_norms():
    method = replace(
        ADAPTIVE, noise_multiplier=1e-3, clip=5.0, clip_learning_rate=1.0, server_learning_rate=1e-9
    )
    seen = []
    step = Server.step

    def watched(self, before, total):
        seen.append(float(before.method["clip"][0]))
        return step(self, before, total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "step", watched)
        train(small_federation(), logistic_task(), method, rounds=60, seed=0)
    norms = []
    for silo in range(3):
        federation = small_federation()
        data = federation.silos[silo]
        context = replace(
            context_of(method, 1e6, silo),
            x=torch.from_numpy(data.x),
            y=torch.from_numpy(data.y),
            user=torch.from_numpy(data.user),
            params=logistic_task().initial(0),
        )
        for chunk in UldpAvg.local_update(replace(method, clip=1e6), context).chunks:
            norms += torch.linalg.vector_norm(chunk.tensor, dim=1).tolist()
    assert seen[0] == 5.0
    assert np.quantile(norms, 0.3) < np.mean(seen[-10:]) < np.quantile(norms, 0.7)


def test_a_silo_refuses_a_state_that_the_method_cannot_have(monkeypatch):
    method = replace(ADAPTIVE, clip_range=(0.1, 1.0))
    for state, code in (
        ({"clip": np.array([1e9])}, "gate.state"),
        ({"clip": np.array([np.nan])}, "message.malformed"),
        ({"clip": np.array([0.5, 0.5])}, "message.malformed"),
        ({}, "message.malformed"),
    ):
        play = Server.run_round
        with monkeypatch.context() as patch, refused(code):
            patch.setattr(
                Server, "run_round", lambda self, r, params, _, s=state, play=play: play(self, r, params, s)
            )
            train(small_federation(), logistic_task(), method, rounds=1)


@pytest.mark.parametrize(
    ("aggregator", "sigma"),
    [
        (Plain(), 1e-3),
        (Masked(), 1e-3),
        (replace(PAILLIER, count_cap=10), 1e-3),
        (replace(LATTICE, count_cap=10), 0.5),
    ],
    ids=["plain", "masked", "paillier", "lattice"],
)
def test_every_aggregator_adds_up_the_extra_coordinate(aggregator, sigma, monkeypatch):
    """All updates are shorter than the clip; weights that nobody sees are n/(N + 1)."""
    method = replace(ADAPTIVE, noise_multiplier=sigma, bit_share=0.5, weighting="records")
    totals, step = [], Server.step

    def watched(self, before, total):
        totals.append(total.numpy())
        return step(self, before, total)

    monkeypatch.setattr(Server, "step", watched)
    train(small_federation(), logistic_task(), method, rounds=1, seed=0, aggregator=aggregator)
    records = small_federation().counts().sum(axis=0)
    weights = records / (records + aggregator.weights_privately)
    assert totals[0].shape == (6,)
    assert totals[0][-1] == pytest.approx(math.sqrt(0.5) * weights.sum(), abs=max(6 * sigma, 1e-2))


def test_the_default_optimizer_takes_the_steps_that_momentum_takes():
    named = replace(AVG, server_optimizer=ServerSgd(0.5))
    runs = [
        train(small_federation(), logistic_task(), method, rounds=4, seed=2)
        for method in (replace(AVG, server_momentum=0.5), named)
    ]
    assert torch.equal(runs[0].params, runs[1].params)
    assert "server_optimizer" not in repr(AVG)
    assert repr(named).endswith("server_optimizer=ServerSgd(momentum=0.5))")


def test_adam_steps_as_published():
    """Reddi et al., Algorithm 2, two rounds by hand."""
    adam, params = ServerAdam(0.9, 0.99, 0.1), torch.zeros(2, dtype=torch.float64)
    state, mean, square, expected = adam.initial_state(params), 0.0, 0.01, 0.0
    for total in (2.0, -1.0):
        update = 0.5 * total
        mean, square = 0.9 * mean + 0.1 * update, 0.99 * square + 0.01 * update**2
        expected += 0.3 * mean / (math.sqrt(square) + 0.1)
        params, state = adam.step(params, torch.full((2,), total, dtype=torch.float64), state, Move(0.3, 0.5))
    assert params.tolist() == pytest.approx([expected] * 2)


@pytest.mark.parametrize(("round_", "left"), [(0, 1.0), (3, 0.25), (4, 0.0)])
def test_noise_aware_steps_are_as_long_as_the_share_of_signal(round_, left):
    params, total = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0], dtype=torch.float64)
    # Of the squared length 25, 2·4 is noise.
    move = Move(learning_rate=7.0, scale=0.1, noise=2.0, round=round_, rounds=4)
    optimizer = NoiseAware(length=0.5)
    start = optimizer.initial_state(params)
    found, _ = optimizer.step(params, total, start, move)
    torch.testing.assert_close(found, params + (0.5 * left * (17 / 25) * total / 5).float())
    for least in (0.0, 0.2):
        for noise in (3.6, 100.0):  # as much as the sum, and more
            found, _ = NoiseAware(0.5, least=least).step(params, total, start, replace(move, noise=noise))
            torch.testing.assert_close(found, params + (0.5 * left * least * total / 5).float())
    none = torch.zeros(2, dtype=torch.float64)
    assert torch.equal(NoiseAware().step(params, none, start, replace(move, noise=0.0))[0], params)


def test_without_step_and_clip_gradients_are_clipped_and_steps_know_the_noise():
    sgd = UldpSgd(5.0)
    assert (sgd.clip, sgd.step, sgd.gradient_clip, sgd.server_optimizer) == (1, None, 0.5, NoiseAware())
    task = Task(nn.Linear(15, 1), binary_cross_entropy())
    # 5·√16/U beside a fifth: with four times as many persons, gradients are clipped half as much, in the end an eighth.
    found = [sgd.find_clip(task, users) for users in (10, 100, 400, 10**9)]
    assert found == pytest.approx([0.5, 0.5, 1.0, 4.0])
    assert UldpSgd(5.0, user_sampling=0.25).find_clip(task, 1600) == pytest.approx(1.0)
    assert UldpSgd(0.0).find_clip(task, 10) == pytest.approx(4.0)
    for loss, clip in ((cox(), 0.1), (exponential_survival(1.0), 0.5)):
        assert sgd.find_clip(Task(nn.Linear(15, 1), loss), 10) == pytest.approx(clip)
    assert UldpSgd(5.0, server_momentum=0.5).step == 1
    assert UldpSgd(5.0, server_optimizer=ServerAdam()).step == 1
    slower = UldpSgd(5.0, server_optimizer=TailAverage(2, NoiseAware(0.1)))
    assert (slower.gradient_clip, slower.step) == (0.5, None)
    for others in ({"step": 1.0}, {"clip": 0.3}, {"server_learning_rate": 2.0}):
        with refused("argument.conflict"):
            UldpSgd(5.0, gradient_clip=0.5, **others)
    assert replace(sgd, noise_multiplier=1.0).server_optimizer == NoiseAware()
    assert build_method("uldp-sgd", {"noise_multiplier": 5.0}, "method", rounds=1, delta=1e-5) == sgd


@pytest.mark.parametrize(("norm", "longest"), [(0.0, 0.5), (1.0, 0.5), (5.0, 2.0), (100.0, 3.0)])
def test_noise_aware_steps_are_longer_where_the_model_begins_far_from_zero(norm, longest):
    params = torch.tensor([norm, 0.0])
    state = NoiseAware().initial_state(params)
    total = torch.tensor([0.0, 2.0], dtype=torch.float64)
    params, state = NoiseAware().step(params, total, state, Move(1.0, 1.0, 0.0, 0, 10))
    assert float(params[1]) == pytest.approx(longest)


def test_noise_aware_steps_grow_while_the_sums_point_on_and_are_as_long_as_before():
    """Signal without noise, so that all numbers follow by hand: the first move is .5 along (0, 1)."""
    start, optimizer = torch.zeros(2), NoiseAware(momentum=0.0)
    first = torch.tensor([0.0, 2.0], dtype=torch.float64)
    moved, state = optimizer.step(start, first, optimizer.initial_state(start), Move(1.0, 1.0, 0.0, 0, 10))
    assert moved.tolist() == [0.0, 0.5]

    def measure(total: list[float], round_: int, **fields: float) -> float:
        move = Move(1.0, 1.0, 0.0, round_, 10)
        after, _ = replace(optimizer, **fields).step(moved, torch.tensor(total).double(), state, move)
        return float((after - moved).norm()) / (1 - round_ / 10)

    assert measure([0.0, 2.0], 1) == pytest.approx(3 * 0.5 / math.sqrt(2))
    assert measure([0.0, 9.0], 3) == pytest.approx(3 * 0.5 / 2)
    # Half as long as before; in another direction; back; of a length that the caller chose.
    assert measure([0.0, 1.5], 1) == pytest.approx(3 * 0.75**2 * 0.5 / math.sqrt(2))
    for total, fields in (
        ([0.0, 0.5], {}),
        ([3.0, 0.0], {}),
        ([0.0, -2.0], {}),
        ([0.0, 2.0], {"length": 0.5}),
    ):
        assert measure(total, 1, **fields) == pytest.approx(0.5)
    far = state | {"moved": 1000 * first}
    after, _ = optimizer.step(moved, first, far, Move(1.0, 1.0, 0.0, 1, 10))
    assert float((after - moved).norm()) == pytest.approx(5 * 0.9)


def test_noise_aware_steps_follow_the_mean_of_the_sums_and_its_noise():
    optimizer, params = NoiseAware(length=1.0, momentum=0.5), torch.zeros(2)
    state = optimizer.initial_state(params)
    for number, total in enumerate(([4.0, 0.0], [0.0, 4.0])):
        before = params
        params, state = optimizer.step(
            params, torch.tensor(total).double(), state, Move(1.0, 1.0, 1.0, number, 10)
        )
    # The weights ⅓ and ⅔: the mean is (4, 8)/3, of the squared length 80/9, and 2·5/9 of that is noise.
    share = 1 - (2 * 5 / 9) / (80 / 9)
    torch.testing.assert_close(params - before, 0.9 * share * torch.tensor([1.0, 2.0]) / math.sqrt(5))


@pytest.mark.parametrize("least", [0.0, 0.3])
def test_whoever_sees_the_models_inverts_noise_aware_steps(least):
    optimizer, random = NoiseAware(least=least), torch.Generator().manual_seed(0)
    params = torch.zeros(4)
    state = theirs = optimizer.initial_state(params)
    was_clear = is_clear = False
    for number in range(20):
        signal = torch.full((4,), 0.0 if number < 10 else 3.0, dtype=torch.float64)
        total = signal + torch.randn(4, generator=random, dtype=torch.float64)
        move = Move(1.0, 1.0, 1.0, number, 25)
        after, state = optimizer.step(params, total, state, move)
        moved = (after - params).double()
        found = optimizer.invert(moved, theirs, move)
        again, theirs = optimizer.step(params, found, theirs, move)
        torch.testing.assert_close(again, after)
        is_clear = float(moved.norm()) > least * 0.5 * (1 - number / 25) + 1e-4
        if was_clear and is_clear:
            torch.testing.assert_close(
                found, total, rtol=1e-4, atol=2e-3
            )  # two such moves in turn show a sum
        was_clear, params = is_clear, after
    assert was_clear


@pytest.mark.parametrize("weighting", ["uniform", "records"])
def test_the_noise_that_an_optimizer_is_told_is_in_the_sum(weighting, monkeypatch):
    """A thousand numbers of noise alone: nobody is in the sample."""
    method = UldpAvg(
        5.0,
        0.1,
        weighting=weighting,
        user_sampling=1e-9,
        server_optimizer=NoiseAware(),
        server_learning_rate=2.0,
    )
    found = []
    step = NoiseAware.step

    def watched(self, params, total, state, move):
        found.append((total, move))
        return step(self, params, total, state, move)

    monkeypatch.setattr(NoiseAware, "step", watched)
    train(small_federation(), logistic_task(), method, rounds=200, seed=1)
    assert [move.round for _, move in found] == list(range(200))
    numbers = torch.cat([total for total, _ in found])
    assert float(numbers.std()) == pytest.approx(found[0][1].noise, rel=4 / math.sqrt(2 * len(numbers)))
    assert found[0][1].noise == pytest.approx(0.5)


def test_a_step_by_the_noise_is_refused_where_silos_alone_know_it():
    fields = {"local_steps": 1, "expected_batch_size": 2.0, "local_learning_rate": 0.1, "largest_budget": 1.0}
    made = build_method(
        "rpdp", {"noise_multiplier": 1.0, "clip": 1.0, **fields}, "method", rounds=1, delta=1e-5
    )
    method = replace(made, server_optimizer=TailAverage(2, NoiseAware()))
    with refused("argument.conflict") as caught:
        train(small_federation(), logistic_task(), method, rounds=1, seed=0)
    assert caught.value.field == "method.server_optimizer"


def test_the_average_of_the_last_models_is_released_and_costs_nothing():
    averaged = replace(AVG, server_optimizer=TailAverage(3))
    models = {n: train(small_federation(), logistic_task(), AVG, rounds=n, seed=0) for n in (1, 3, 4, 5)}
    for rounds, last in ((1, (1,)), (5, (3, 4, 5))):
        result = train(small_federation(), logistic_task(), averaged, rounds=rounds, seed=0)
        mean = torch.stack([models[n].params.double() for n in last]).mean(dim=0)
        torch.testing.assert_close(result.params, mean.float())
        assert result.epsilon == models[rounds].epsilon


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"server_optimizer": "adam"}, "server_optimizer"),
        ({"server_optimizer": ServerAdam(), "server_momentum": 0.5}, "server_momentum"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, field):
    with refused("argument.type" if field == "server_optimizer" else "argument.conflict"):
        replace(AVG, **settings)
    with refused("argument.value"):
        ServerAdam(beta1=1.0)
    with refused("argument.value"):
        TailAverage(0)


def test_a_configuration_names_a_server_optimizer_and_its_constants():
    settings = {"name": "tail-average", "last": 4, "optimizer": {"name": "adam", "beta1": 0.5}}
    fields = {"noise_multiplier": 5.0, "clip": 0.1}
    made = build_method("uldp-avg", {**fields, "server_optimizer": settings}, "method")
    assert made.server_optimizer == TailAverage(4, ServerAdam(beta1=0.5))
    for wrong, code in (
        ({"name": "adm"}, "argument.value"),
        ({"beta1": 0.5}, "config.missing_field"),
        ({"name": "adam", "momentum": 0.5}, "config.unknown_field"),
        ({"name": "adam", "beta1": 2.0}, "argument.value"),
        ("adam", "config.value"),
    ):
        with refused(code):
            build_method("uldp-avg", {**fields, "server_optimizer": wrong}, "method")


def test_a_configuration_refers_to_plug_ins_of_a_file():
    """As `silodp run` does, with paths beside the configuration."""
    table = {
        "name": "adaptive_clipping.py:AdaptiveClipping",
        "noise_multiplier": 5.0,
        "clip": 0.5,
        "server_optimizer": {"name": "tail-average", "last": 2, "optimizer": {"name": "yogi.py:Yogi"}},
    }
    resolved = resolve_paths({"method": table}, PLUGINS)["method"]
    made = build_method(resolved["name"], {k: v for k, v in resolved.items() if k != "name"}, "method")
    assert repr(made.server_optimizer) == repr(TailAverage(2, Yogi()))
    assert repr(replace(made, server_optimizer=None)) == repr(AdaptiveClipping(5.0, 0.5))
    with refused("config.value"):
        fields = {"noise_multiplier": 5.0, "clip": 0.5}
        build_method("uldp-avg", {**fields, "server_optimizer": {"name": resolved["name"]}}, "method")


@pytest.mark.parametrize(("field", "values"), {
    "noise_multiplier": (-1.0, math.nan, math.inf, 1e9, "x", True),
    "clip": (-1.0, 0.0, math.nan, math.inf),
    "user_sampling": (0.0, -0.5, 1.5, math.nan),
}.items())  # fmt: skip
def test_another_default_is_not_another_range(field, values):
    """A subclass that declares a field anew, for its default, keeps what may be given for it, and its default too."""

    @dataclass(frozen=True, repr=False)
    class Own(UldpAvg):
        noise_multiplier: float = 5.0
        user_sampling: "Unknown" = 0.5  # noqa: F821  a name that only type checkers have
        clip: float = 0.1

    Own()
    for value in values:
        with refused("argument.value", "argument.type", "argument.out_of_range"):
            Own(**{field: value})
        made = type("Own", (Own,), {"__annotations__": {field: "float"}, field: value})
        with refused("argument.value", "argument.type", "argument.out_of_range"):
            dataclass(frozen=True, repr=False)(made)()


def test_a_method_that_states_one_rate_for_all_draws_users_at_it():
    """Its event counts on the sample: a rate that only the event knew would be no sample at all."""

    @dataclass(frozen=True, repr=False)
    class Sampled(UldpNaive):
        user_sampling: float | None = 0.25

        @property
        def common_sampling_rate(self):
            return self.user_sampling

    method = Sampled(noise_multiplier=5.0, clip=0.1)
    assert method.samples_users
    assert method.sampling_rates(FederationSize(3, 10)) == 0.25
    with pytest.raises(NotImplementedError, match="sampling_rates"):
        replace(method, user_sampling=None).sampling_rates(FederationSize(3, 10))
