"""Settings chosen on synthetic records: no row is read, the target holds, and the plain loop trains as a run does."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from silodp.config.resolve import load_config
from silodp.data.public import PublicData
from silodp.data.tables.schema import UNSCALED_LABEL
from silodp.mechanisms.noise import Randomness
from silodp.methods import UldpAvg, UldpSgd
from silodp.planning import tuning
from silodp.planning.plan import plan_run
from silodp.planning.synthetic import SyntheticSettings, draw_federation
from silodp.planning.tuning import Candidate, format_tuning, train_without_parties, tune
from silodp.runtime.train import train
from silodp.training.sgd import LocalTraining
from support.commands import assert_sentence
from support.oracles import logistic_task, small_federation
from support.refusals import refused
from support.tuned import check_tuning, configured, shrink_grid


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small grid."""
    shrink_grid(monkeypatch)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_the_chosen_settings_meet_the_target_and_no_table_is_opened(tmp_path, aggregator):
    check_tuning(load_config(configured(tmp_path, aggregator)))


@pytest.mark.usefixtures("few")
def test_against_the_server_only_uniform_weights_are_tried(tmp_path):
    more = '[budget]\nepsilon = 2.0\nadversary = "server"'
    config = load_config(configured(tmp_path, more=more), ())
    spec, _ = config.build_public_spec()
    found = tune(config, spec, 2.0, federations=2)
    assert {candidate["weighting"] for candidate in found["candidates"]} == {"uniform"}
    assert found["no_guarantee"] == []


@pytest.mark.usefixtures("few")
def test_the_chosen_settings_keep_the_limits_of_silos(tmp_path):
    """No weighting without an ε where a silo limits it, and noise for the smaller of target and limit."""
    config = load_config(configured(tmp_path, more="[silo_limits]\nserver = 1.5"), ())
    spec, _ = config.build_public_spec()
    found = tune(config, spec, 2.0, federations=2)
    assert {candidate["weighting"] for candidate in found["candidates"]} == {"uniform"}
    method = UldpSgd(found["chosen"]["noise_multiplier"], step=1.0)
    plan = plan_run(replace(spec, method=method, rounds=found["chosen"]["rounds"]))
    assert 1.49 < plan["adversaries"]["server"]["epsilon"] <= 1.5


@pytest.mark.usefixtures("few")
def test_the_command_prints_settings_that_a_run_takes(tmp_path, silodp):
    path = configured(tmp_path)
    printed = silodp("plan", path, "--tune", "--target-epsilon", 2).out
    assert "no private row was read" in printed
    chosen = tomllib.loads(printed[printed.index("rounds = ") :])
    overrides = [f"method.{name}={value}" for name, value in chosen["method"].items() if name != "local"]
    config = load_config(path, [*overrides, f"rounds={chosen['rounds']}"])
    assert config.method.step == chosen["method"]["step"]
    spent = plan_run(config.build_public_spec()[0])["adversaries"]["released"]["epsilon"]
    assert 1.99 < spent <= 2.0


def test_options_that_would_be_ignored_are_refused(tmp_path, silodp):
    path = configured(tmp_path)
    for unused in (
        ("--records-per-person", 3),
        ("--prevalence", 0.3),
        ("--tune", "--target-epsilon", 2, "--plot", tmp_path / "picture.svg"),
    ):
        assert_sentence(silodp("plan", path, *unused), code="argument.conflict")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("metrics", ['["mean_absolute_error"]', '["mean_absolute_error", "r2"]'])
def test_of_errors_the_smaller_is_better(tmp_path, metrics, caplog):
    """A label that is a number is ranked by r2, or else by the loss, which is printed as the loss."""
    path = configured(tmp_path)
    path.write_text(path.read_text().replace("classes = [0, 1]", 'kind = "real"'))
    config = load_config(path, [f"task.metrics={metrics}"])
    found = tune(config, config.build_public_spec()[0], 2.0, federations=2)
    assert found["metric"] == ("r2" if "r2" in metrics else "loss")
    assert UNSCALED_LABEL in caplog.messages
    values = [candidate["mean"] for candidate in found["candidates"]]
    if found["metric"] == "loss":
        assert values == sorted(values)
        assert values[0] > 0
        assert f": {values[0]:.3f} ± " in "\n".join(format_tuning(found))
        assert "shortfall in loss" in "\n".join(format_tuning(found))
    else:
        assert values == sorted(values, reverse=True)
    assert found["chosen"]["step"] == 1.0, "a hundredth of a step learns nothing in five rounds"


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("gains", "kept"), [((0.04, 0.0, -0.01), True), ((0.02, 0.015, 0.016), False)])
def test_the_default_is_kept_unless_another_is_better_by_more_than_chance(tmp_path, monkeypatch, gains, kept):
    monkeypatch.setattr(tuning, "ROUNDS", (5, 10))

    def measured(method, task, federation, rounds, randomness):
        return method, rounds, federation

    def scored(task, found, federation, metric):
        method, rounds, _ = found
        number = next(n for n, each in enumerate(drawn) if each is federation)
        better = (rounds, method.step, method.name, method.weighting) == (5, 1.0, "uldp-sgd", "records")
        return (
            0.8
            + 0.01 * number
            + (gains[number] if better else 0.0)
            - (method.step != 1.0)
            - (rounds == 5 and not better)
        )

    drawn = []
    draw = tuning.draw_federation
    monkeypatch.setattr(tuning, "draw_federation", lambda *some: drawn.append(draw(*some)) or drawn[-1])
    monkeypatch.setattr(tuning, "train_without_parties", measured)
    monkeypatch.setattr(tuning, "measure", scored)
    config = load_config(configured(tmp_path), ["method.server_momentum=0.5"])
    spec = config.build_public_spec()[0]
    found = tune(config, spec, 2.0, federations=3, give_up=["server", "silo"])
    assert found["left_out"] == ["server_momentum"]
    chosen = found["chosen"]
    assert found["default_kept"] is kept
    # With the default settings both weightings are equally good, and only uniform has an ε against everyone.
    expected = (10, 1.0, "uniform") if kept else (5, 1.0, "records")
    assert (chosen["rounds"], chosen["step"], chosen["weighting"]) == expected
    assert found["dropped_weighting"] == ("records" if kept else None)
    assert found["no_guarantee"] == ([] if kept else ["server", "silo"])
    assert any("is not clearly better than uniform" in line for line in format_tuning(found)) is kept
    assert found["candidates"][0]["rounds"] == 5, "on average it is better in both cases"
    assert any("so these are kept" in line for line in format_tuning(found)) is kept


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("give_up", [(), ("server",), ("server", "silo")])
def test_an_adversary_is_given_up_only_where_that_is_asked_for(tmp_path, monkeypatch, give_up):
    """Weights by primary silo are clearly better, and have no ε against server and silos."""

    def scored(task, method, federation, metric):
        number = next(n for n, each in enumerate(drawn) if each is federation)
        return 0.8 + 0.01 * number + 0.1 * (method.weighting == "primary_silo") - (method.step != 1.0)

    drawn = []
    draw = tuning.draw_federation
    monkeypatch.setattr(tuning, "draw_federation", lambda *some: drawn.append(draw(*some)) or drawn[-1])
    monkeypatch.setattr(tuning, "train_without_parties", lambda method, *_: method)
    monkeypatch.setattr(tuning, "measure", scored)
    config = load_config(configured(tmp_path), ())
    found = tune(config, config.build_public_spec()[0], 2.0, federations=3, give_up=give_up)
    asked = len(give_up) == 2
    assert found["chosen"]["weighting"] == ("primary_silo" if asked else "uniform")
    assert found["no_guarantee"] == (["server", "silo"] if asked else [])
    declined = {"weighting": "primary_silo", "gain": pytest.approx(0.1), "no_guarantee": ["server", "silo"]}
    assert found["declined"] == (None if asked else declined)
    offered = [line for line in format_tuning(found) if "--give-up server --give-up silo" in line]
    assert len(offered) == (not asked)


def test_only_adversaries_are_given_up(tmp_path, silodp):
    path = configured(tmp_path)
    outcome = silodp("plan", path, "--tune", "--target-epsilon", 2, "--give-up", "nobody")
    assert_sentence(outcome, code="argument.value")
    assert_sentence(silodp("plan", path, "--give-up", "server"), code="argument.conflict")


@pytest.mark.usefixtures("few")
@pytest.mark.slow
def test_an_assumed_number_of_persons_is_named(tmp_path, silodp):
    path = configured(tmp_path)
    path.write_text(
        path.read_text().replace("delta = 1e-5", "").replace(f'users = "{tmp_path / "users.txt"}"\n', "")
    )
    printed = silodp("plan", path, "--tune", "--target-epsilon", 2, "--set", "delta=0.01").out
    assert "1,000 is assumed; see --users" in printed
    listed = silodp("plan", configured(tmp_path), "--tune", "--target-epsilon", 2, "--set", "delta=0.1").out
    assert "assumed" not in listed
    assert "δ = 0.1" in listed  # not below 1/U


def test_a_share_of_classes_that_no_test_set_can_have_is_refused(tmp_path, silodp):
    outcome = silodp("plan", configured(tmp_path), "--tune", "--target-epsilon", 2, "--prevalence", 0.0001)
    assert_sentence(outcome, code="argument.value")


def test_a_share_of_classes_for_a_label_that_is_a_number_is_refused(tmp_path, silodp):
    path = configured(tmp_path)
    path.write_text(path.read_text().replace("classes = [0, 1]", 'kind = "real"'))
    outcome = silodp("plan", path, "--tune", "--target-epsilon", 2, "--prevalence", 0.3)
    assert_sentence(outcome, code="argument.conflict")


RESULT = {
    "epsilon": 2.0,
    "adversary": "released",
    "metric": "roc_auc",
    "users": 40,
    "federations": 2,
    "trainings": 4,
    "chosen": {
        "method": "uldp-sgd",
        "rounds": 5,
        "step": 1.0,
        "weighting": "records",
        "local_epochs": None,
        "model": None,
    },
    "left_out": ["participation"],
    "default_kept": False,
    "dropped_weighting": None,
    "declined": None,
    "no_guarantee": [],
    "loss": {"mean": 0.0, "largest": 0.0},
    "candidates": [],
    "signal": {"configured": {"parameters": 6, "ratio": 0.1}},
}


@given(st.floats(1e-3, 1e7))
def test_the_printed_noise_is_never_less_than_the_chosen(sigma):
    lines = format_tuning(RESULT | {"chosen": {**RESULT["chosen"], "noise_multiplier": sigma}})
    (printed,) = [float(line.split(" = ")[1]) for line in lines if line.startswith("noise_multiplier")]
    assert sigma * (1 - 1e-12) <= printed <= sigma * (1 + 1.1e-4)


def test_settings_that_are_not_tried_are_named():
    lines = format_tuning(RESULT | {"chosen": {**RESULT["chosen"], "noise_multiplier": 1.0}})
    assert any("method.participation" in line for line in lines)


def test_tuning_needs_a_target_and_tables(tmp_path, silodp):
    assert_sentence(silodp("plan", configured(tmp_path), "--tune"), "give --target-epsilon")
    images = PublicData("images", ("a",), 5, (1, 28, 28), "classes", 10)
    with refused("plan.no_table"):
        draw_federation(images, SyntheticSettings(), 5, np.random.default_rng(0))


@pytest.mark.parametrize("weighting", ["uniform", "present", "records", "primary_silo"])
def test_the_plain_loop_trains_as_a_run_does(weighting):
    """Without noise, and with full batches, the model is that of a real run: all parties, all messages."""
    federation, task = small_federation(), logistic_task()
    local = LocalTraining(learning_rate=0.3, epochs=2, batch_size=None)
    for method in (UldpSgd(0.0, weighting=weighting, step=0.5), UldpAvg(0.0, 0.2, local, weighting)):
        randomness = Randomness.from_seed(3)
        params = train_without_parties(method, task, federation, 3, randomness)
        seed = int(randomness.stream("start").integers(2**31))
        torch.testing.assert_close(
            params, trained_by_run(method, task, federation, seed), rtol=1e-5, atol=1e-6
        )


def trained_by_run(method, task, federation, seed):
    """The released parameters of a run of three rounds from the same start."""
    start = task.initial(seed)
    model = task.load(start)
    same = type(task)(model, task.loss)
    same.initial = lambda _: start
    return train(federation, same, method, rounds=3, seed=0).params


def test_fewer_persons_with_less_noise_have_the_same_noise_in_their_mean():
    """What is drawn for 2,000 of many persons: σ·2000/U, so that σ/U is as it will be."""
    task = logistic_task()
    public = PublicData("table", ("a", "b"), 400, (4,), "classes", 2)
    federation = draw_federation(public, SyntheticSettings(records=0.01), 400, np.random.default_rng(0))
    small = draw_federation(public, SyntheticSettings(records=0.01), 100, np.random.default_rng(0))
    moved = []
    for drawn, sigma in ((federation, 4000.0), (small, 1000.0)):
        ends = [
            train_without_parties(UldpSgd(sigma), task, drawn, 1, Randomness.from_seed(number))
            for number in range(40)
        ]
        moved.append(float(torch.stack(ends).std(dim=0).mean()))
    assert moved[0] == pytest.approx(moved[1], rel=0.2)
    assert moved[0] == pytest.approx(10.0, rel=0.15), "step·σ/U; a share of one silo of two would be 7"


@pytest.mark.parametrize("labels", ["classes", "real", "survival"])
def test_a_synthetic_federation_has_the_declared_columns(labels):
    features = ("age", "ward=a", "ward=b", "ward=c", "dose")
    public = PublicData("t", ("n", "s"), 30, (5,), labels, 2 if labels == "classes" else None, features)
    federation = draw_federation(
        public, SyntheticSettings(20.0, prevalence=0.2), 30, np.random.default_rng(1)
    )
    assert federation.public().silos == public.silos
    assert federation.labels == labels
    assert federation.counts().sum() == 600
    x = np.concatenate([silo.x for silo in federation.silos])
    assert (x[:, 1:4].sum(axis=1) == 1).all()
    assert np.isin(x[:, 1:4], (0, 1)).all()
    if labels == "classes":
        assert federation.test.y.mean() == pytest.approx(0.2, abs=0.05)
    again = draw_federation(public, SyntheticSettings(20.0, prevalence=0.2), 30, np.random.default_rng(1))
    assert [silo.digest() for silo in again.silos] == [silo.digest() for silo in federation.silos]


def test_synthetic_times_are_in_the_unit_of_the_loss(tmp_path):
    public = PublicData("t", ("n", "s"), 30, (2,), "survival", None, ("age", "dose"))
    one, many = (
        draw_federation(public, SyntheticSettings(typical_time=time), 30, np.random.default_rng(1)).test.y
        for time in (1.0, 60.0)
    )
    np.testing.assert_allclose(many[:, 1], 60 * one[:, 1], rtol=1e-5)
    np.testing.assert_array_equal(many[:, 0], one[:, 0])


@pytest.mark.usefixtures("few")
def test_survival_is_tuned_with_the_configured_loss(tmp_path, monkeypatch):
    """With the default one, that of Cox, the linear model would learn nothing from synthetic persons of one record."""
    path = configured(tmp_path)
    text = path.read_text()
    survival = 'kind = "survival"\nevent = "died"\ntime = "days"\n'
    path.write_text(re.sub(r"label = .*\n(classes = .*\n)?", survival, text))
    task = ["task.loss=exponential_survival", "task.loss_options={typical_time=365}", "task.model=mlp"]
    config = load_config(path, task)
    spec, _ = config.build_public_spec()
    seen = set()
    real = tuning.train_without_parties

    def watch(method, task, federation, rounds, randomness):
        seen.add((task.loss.name, float(federation.test.y[:, 1].mean()) > 20))
        return real(method, task, federation, rounds, randomness)

    monkeypatch.setattr(tuning, "train_without_parties", watch)
    found = tune(config, spec, 2.0, guess=SyntheticSettings(records=1.0), federations=2)
    assert seen == {("exponential_survival", True)}
    assert found["metric"] == "concordance"


def test_candidates_are_methods_of_the_package():
    assert Candidate(10, 0.3, "primary_silo").method(2.0) == UldpSgd(2.0, weighting="primary_silo", step=0.3)
    avg = Candidate(10, 0.3, "uniform", epochs=5).method(2.0)
    assert (avg.local.epochs, avg.step, avg.name) == (5, 0.3, "uldp-avg")


@pytest.mark.usefixtures("few")
def test_with_an_identity_profile_only_uniform_weights_are_tried(tmp_path):
    """Silos number persons by themselves then, so nobody can compare counts."""
    config = load_config(configured(tmp_path), ())
    spec, _ = config.build_public_spec()
    spec = replace(spec, data=replace(spec.data, identity_digest="ab" * 32))
    found = tune(config, spec, 2.0, federations=2)
    assert {candidate["weighting"] for candidate in found["candidates"]} == {"uniform"}


@pytest.mark.usefixtures("few")
def test_of_many_persons_some_are_drawn_with_as_much_less_noise(tmp_path, monkeypatch):
    config = load_config(configured(tmp_path), ())
    spec, _ = config.build_public_spec()
    monkeypatch.setattr(tuning, "MAX_USERS", 10)
    trained = []

    def train(method, task, federation, rounds, randomness):
        trained.append((method.noise_multiplier, rounds, federation.users))
        return torch.zeros(task.size)

    monkeypatch.setattr(tuning, "train_without_parties", train)
    found = tune(config, spec, 2.0, federations=2)
    sigma, rounds = found["chosen"]["noise_multiplier"], found["chosen"]["rounds"]
    assert {users for _, _, users in trained} == {10}
    drawn = [s for s, of, _ in trained if of == rounds]
    assert drawn == pytest.approx([sigma * 10 / 40] * len(drawn))
