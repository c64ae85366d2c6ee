"""A model beside the best constant: metrics as scikit-learn has them, and errors that hold for persons."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier
from sklearn.metrics import accuracy_score, log_loss, r2_score, roc_auc_score

from silodp.report.skill import assess_records
from silodp.training.metrics import concordance
from silodp.training.skill import RecordSkill, measure_skill

DRAWS = 300


def draw_classes(rng: np.random.Generator, persons: int = 60, records: int = 5, classes: int = 2):
    """Logits that know a little of their classes; records of one person are much alike."""
    user = np.repeat(np.arange(persons), records)
    about = rng.normal(size=(persons, classes))[user]
    true = (about + rng.gumbel(size=(len(user), classes))).argmax(1)
    logits = 0.7 * about + 0.5 * rng.normal(size=about.shape)
    return logits, true, user


def gains_of(measured: RecordSkill | None) -> dict[str, tuple[float, float]]:
    assert measured is not None
    for gain in (*measured.gains, *measured.balances):
        assert gain.influence.sum() == pytest.approx(0, abs=1e-9)
    return {one.metric: (one.value, one.constant) for one in measured.gains}


@pytest.mark.parametrize("shape", ["one logit", "two logits", "five classes"])
def test_classes_are_measured_as_by_scikit_learn(shape: str) -> None:
    logits, true, _ = draw_classes(np.random.default_rng(1), classes=5 if shape == "five classes" else 2)
    outputs = logits[:, 1:] - logits[:, :1] if shape == "one logit" else logits
    found = gains_of(measure_skill(torch.from_numpy(outputs), torch.from_numpy(true), "classes"))
    shown = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    constant = DummyClassifier(strategy="prior").fit(logits, true).predict_proba(logits)
    assert found["log_loss"] == pytest.approx((log_loss(true, shown), log_loss(true, constant)))
    often = np.bincount(true).argmax()
    assert found["accuracy"] == pytest.approx(
        (accuracy_score(true, logits.argmax(1)), accuracy_score(true, np.full(len(true), often)))
    )
    if shape != "five classes":
        assert found["roc_auc"] == pytest.approx((roc_auc_score(true, logits[:, 1] - logits[:, 0]), 0.5))


def test_answers_and_numbers_are_means_over_labels() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(200, 3))
    answers = (logits + rng.logistic(size=logits.shape) > 0.5).astype(np.float32)
    measured = measure_skill(torch.from_numpy(logits), torch.from_numpy(answers), "multilabel")
    found = gains_of(measured)
    each = [roc_auc_score(answers[:, k], logits[:, k]) for k in range(3)]
    assert found["roc_auc"] == pytest.approx((np.mean(each), 0.5))
    assert measured is not None
    assert [one.observed for one in measured.balances] == pytest.approx(answers.mean(0))

    numbers = logits + rng.normal(size=logits.shape)
    typical = [(100.0, 20.0)] * 3
    measured = measure_skill(torch.from_numpy(logits), torch.from_numpy(numbers), "real", typical)
    assert gains_of(measured)["r2"] == pytest.approx((r2_score(numbers, logits), 0.0))
    assert measured is not None
    assert measured.balances[0].observed == pytest.approx(100 + 20 * numbers[:, 0].mean())
    assert measured.balances[0].spread == pytest.approx(20 * numbers[:, 0].std())


def test_survival_counts_pairs_as_the_metric_does() -> None:
    rng = np.random.default_rng(3)
    hazard, time = rng.normal(size=90), np.round(rng.exponential(size=90), 1)  # with equal times
    hazard[::7] = hazard[0]
    targets = torch.from_numpy(np.stack([rng.random(90) < 0.6, time], axis=1))
    outputs = torch.from_numpy(hazard)
    assert gains_of(measure_skill(outputs, targets, "survival"))["concordance"] == pytest.approx(
        (concordance(outputs, targets), 0.5)
    )
    none = torch.stack([torch.zeros(90), targets[:, 1]], 1)
    assert gains_of(measure_skill(outputs, none, "survival")) == {}


def test_places_count_every_record_alike_and_no_unlabeled_one() -> None:
    rng = np.random.default_rng(4)
    true = torch.from_numpy(rng.integers(0, 3, size=(20, 4, 4)))
    true[0] = -100
    true[1, :, 1:] = -100  # a record with four labeled places counts as much as one with sixteen
    logits = torch.from_numpy(rng.normal(size=(20, 3, 4, 4)))
    measured = measure_skill(logits, true, "classes")
    found = gains_of(measured)
    right = [(logits[i].argmax(0) == true[i])[true[i] >= 0].double().mean().item() for i in range(1, 20)]
    assert found["accuracy"][0] == pytest.approx(np.mean(right))
    assert found["log_loss"][1] <= np.log(3)
    assert measured is not None
    assert measured.gains[0].influence[0] == 0


@pytest.mark.parametrize("outputs", [torch.tensor([0.0, float("nan"), 1.0]), torch.zeros(3, 2)[:0]])
def test_what_is_not_finite_has_no_verdict(outputs: torch.Tensor) -> None:
    assert measure_skill(outputs, torch.zeros(len(outputs), dtype=torch.int64), "classes") is None


def test_equal_predictions_are_noticed_whatever_they_round_to() -> None:
    true = torch.tensor([0, 1] * 10)
    same = torch.full((20, 2), 3.0) + 1e-7 * torch.randn(20, 2)
    measured = measure_skill(same, true, "classes")
    assert measured is not None
    assert measured.is_equal
    apart = measure_skill(same + torch.arange(20)[:, None] * torch.tensor([0.0, 0.01]), true, "classes")
    assert apart is not None
    assert not apart.is_equal


@pytest.mark.parametrize("kind", ["classes", "real", "survival"])
def test_the_error_is_that_of_persons_and_not_of_records(kind: str) -> None:
    """Over many draws of persons, the difference varies as much as its error says: more than records alone would."""
    rng = np.random.default_rng(5)
    gains: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    naive: dict[str, list[float]] = {}
    for _ in range(DRAWS):
        logits, true, user = draw_classes(rng)
        outputs = torch.from_numpy(logits[:, 1] - logits[:, 0])
        targets = torch.from_numpy(true)
        if kind == "real":
            about = logits[:, 0] + rng.normal(size=60)[user]
            targets = torch.from_numpy(about)
        elif kind == "survival":
            time = np.exp(-(logits[:, 1] - logits[:, 0]) - rng.normal(size=60)[user]) * rng.exponential(
                size=len(user)
            )
            targets = torch.from_numpy(np.stack([rng.random(len(user)) < 0.7, time], 1))
        measured = measure_skill(outputs, targets, kind)  # type: ignore[arg-type]
        assert measured is not None
        for persons, kept in ((user, errors), (np.arange(len(user)), naive)):
            for one in assess_records(measured, persons).comparisons:
                assert one.reach is not None
                kept.setdefault(one.metric, []).append(one.reach / 2)
                if persons is user:
                    gains.setdefault(one.metric, []).append(one.gain)
    for metric, found in gains.items():
        spread = np.std(found)
        if metric != "accuracy":  # of which the majority changes from draw to draw
            assert np.mean(errors[metric]) == pytest.approx(spread, rel=0.2), metric
            assert np.mean(naive[metric]) < 0.9 * spread, metric
