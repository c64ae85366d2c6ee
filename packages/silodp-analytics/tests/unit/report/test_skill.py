"""The verdict on a model beside a constant prediction: codes and numbers, and how often it errs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from silodp.report.skill import (
    FEWEST_PERSONS,
    Comparison,
    Offset,
    Skill,
    assess_counts,
    assess_records,
    average_skills,
)
from silodp.training.skill import measure_skill
from silodp_analytics.counts import CountTable
from silodp_analytics.evaluation.report import NoisyEvaluation


def skill(**gains: float) -> Skill:
    """Gains with an interval of ± .1 each."""
    return Skill(tuple(Comparison(name, 0.5, 0.5, gain, 0.1) for name, gain in gains.items()), persons=100)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (skill(roc_auc=0.3, log_loss=0.2), "better"),
        (
            skill(roc_auc=0.3, log_loss=-0.4),
            "order_only",
        ),  # AUC .824, log loss 1.05 where the frequency gives .59
        (skill(roc_auc=0.3, log_loss=0.05), "order_only"),
        (skill(roc_auc=0.05, log_loss=0.02), "unclear"),
        (skill(roc_auc=0.05, log_loss=-0.2), "worse"),
        (skill(roc_auc=-0.3, log_loss=0.0), "worse"),
        (
            skill(accuracy=0.0, log_loss=0.2),
            "better",
        ),  # of five classes, with the most frequent one always likeliest
        (skill(concordance=0.2), "better"),
        (skill(concordance=0.09), "unclear"),
        (skill(r2=-0.2), "worse"),
        (
            skill(roc_auc=0.3, brier_score=0.2, accuracy=-0.2),
            "better",
        ),  # rare classes are not called at one half
        (Skill((Comparison("roc_auc", 0.5, 0.5, 0.0, 0.0),), is_equal=True), "equal"),
        (Skill(()), "unclear"),
    ],
)
def test_the_verdict_is_decided_by_order_and_probabilities(found: Skill, code: str) -> None:
    assert found.code == code
    assert found.to_dict()["code"] == code
    assert found.describe()[0].startswith(found.head)


@pytest.mark.parametrize(
    ("predicted", "observed", "reach", "spread", "verdict"),
    [
        (0.057, 0.22, 0.03, None, "too_small"),
        (0.9, 0.5, 0.1, None, "too_large"),
        (0.2, 0.22, 0.01, None, None),  # clear, and little
        (0.05, 0.22, 0.2, None, None),  # much, and not clear
        (0.05, 0.22, None, None, None),
        (0.0, 0.1, 0.01, None, "too_small"),
        (3.0, 4.0, 0.2, 2.0, "too_small"),
        (3.0, 3.2, 0.1, 2.0, None),
        (-1.0, 1.0, 0.2, 2.0, "too_small"),
    ],
)
def test_predictions_that_are_wrong_on_average_are_told(predicted, observed, reach, spread, verdict) -> None:
    found = Skill((), (Offset("yes", predicted, observed, reach, spread),))
    assert found.offsets[0].verdict == verdict
    assert found.to_dict()["calibration"][0]["verdict"] == verdict
    assert len(found.describe_calibration()) == (verdict is not None)


def assess(logits: np.ndarray, true: np.ndarray, users: np.ndarray) -> Skill:
    measured = measure_skill(torch.from_numpy(logits), torch.from_numpy(true), "classes")
    assert measured is not None
    return assess_records(measured, users, ("no", "yes"))


def test_probabilities_that_are_four_times_too_small_are_told() -> None:
    rng = np.random.default_rng(1)
    about = rng.normal(size=800)
    true = (rng.random(800) < 1 / (1 + np.exp(1.5 - about))).astype(int)
    found = assess(about - 3.7, true, np.arange(800))
    assert found.code == "order_only"
    (offset,) = found.offsets
    assert offset.label == "yes"
    assert offset.verdict == "too_small"
    assert offset.observed / offset.predicted == pytest.approx(
        true.mean() / (1 / (1 + np.exp(3.7 - about))).mean()
    )
    assert assess(about - 1.5, true, np.arange(800)).code == "better"


def test_few_persons_prove_nothing_however_many_records_they_have() -> None:
    users = np.repeat(np.arange(FEWEST_PERSONS - 1), 100)
    true = (users >= 4).astype(int)
    few = assess(8.0 * true - 4, true, users)
    assert few.code == "unclear"
    assert few.persons == 9
    assert all(one.reach is None for one in few.comparisons)
    # One more, and one person alone has the class: nine in ten such orders are wrong, so a right one may be chance.
    users = np.repeat(np.arange(FEWEST_PERSONS), 100)
    alone = assess(np.where(users == 0, 1.0, -1.0), (users == 0).astype(int), users)
    by_metric = {one.metric: one for one in alone.comparisons}
    assert by_metric["roc_auc"].value == 1
    assert by_metric["roc_auc"].verdict == "unclear"


def test_persons_without_a_number_are_persons_of_their_own() -> None:
    rng = np.random.default_rng(2)
    logits, true = rng.normal(size=60), rng.integers(0, 2, 60)
    assert assess(logits, true, np.full(60, -1)).persons == 60
    assert assess(logits, true, np.where(np.arange(60) < 30, 0, -1)).persons == 31


@pytest.mark.parametrize("persons", [12, 60])
def test_a_model_that_knows_nothing_is_called_better_in_few_of_many_draws(persons: int) -> None:
    rng = np.random.default_rng(persons)
    codes = []
    for _ in range(400):
        user = np.repeat(np.arange(persons), 4)
        true = (rng.random(persons) < 0.4)[user].astype(int)  # all records of a person are alike
        score = rng.normal(size=persons)[user] + 0.1 * rng.normal(size=len(user))
        codes.append(assess(0.3 * score - 0.4, true, user).code)
    wrong = sum(code in ("better", "order_only") for code in codes)
    assert wrong < 0.06 * len(codes)  # half of the 5 % of a two-sided interval, and what few persons add


def evaluate(outputs: np.ndarray, true: np.ndarray, std: float, rng: np.random.Generator) -> NoisyEvaluation:
    """An evaluation by noisy sums, as `describe_counts` makes it."""
    table = CountTable("scores", bins=20)
    cells = table.find_cells(torch.from_numpy(outputs), torch.from_numpy(true))[:, 0]
    counts = torch.bincount(cells, minlength=table.size).double()
    counts += torch.from_numpy(std * rng.normal(size=table.size))
    confusion = table.confusion(counts)
    assert confusion is not None
    return NoisyEvaluation(
        1, std, table.estimate(counts, std), confusion.tolist(), counts.reshape(table.shape).tolist()
    )


def test_noisy_counts_give_the_verdict_of_the_records_themselves() -> None:
    rng = np.random.default_rng(4)
    about = rng.normal(size=4000)
    true = (rng.random(4000) < 1 / (1 + np.exp(1.5 - about))).astype(int)
    for shift, code, wrong in ((1.5, "better", None), (4.5, "order_only", "too_small")):
        exact = assess(about - shift, true, np.arange(4000))
        noisy = assess_counts(evaluate(about - shift, true, 3.0, rng), ("no", "yes"))
        assert noisy is not None
        assert exact.code == noisy.code == code
        assert exact.offsets[0].verdict == noisy.offsets[0].verdict == wrong
        ours, theirs = ({one.metric: one for one in found.comparisons} for found in (noisy, exact))
        # Where nearly all records are in the first step, little is known of their order.
        for metric in ("roc_auc", "accuracy")[code != "better" :]:
            assert ours[metric].value == pytest.approx(theirs[metric].value, abs=0.02)
            assert ours[metric].constant == pytest.approx(theirs[metric].constant, abs=0.02)
        probability = 1 / (1 + np.exp(shift - about))
        brier = ((probability - true) ** 2).mean()
        assert abs(ours["brier_score"].value - brier) < ours["brier_score"].reach  # type: ignore[operator]


def test_counts_that_are_mostly_noise_give_no_clear_verdict() -> None:
    rng = np.random.default_rng(5)
    codes = []
    for _ in range(200):
        score, true = rng.normal(size=300), rng.integers(0, 2, 300)
        found = assess_counts(evaluate(score, true, 4.0, rng))
        codes.append("none" if found is None else found.code)
    assert sum(code in ("better", "order_only") for code in codes) < 0.06 * len(codes)


def test_intervals_by_noisy_counts_hold_the_values_without_noise() -> None:
    rng = np.random.default_rng(6)
    about = rng.normal(size=600)
    true = (rng.random(600) < 1 / (1 + np.exp(-about))).astype(int)
    without = assess_counts(evaluate(about, true, 0.0, rng))
    assert without is not None
    exact = {one.metric: one.gain for one in without.comparisons}
    held: dict[str, list[bool]] = {metric: [] for metric in (*exact, "offset")}
    for _ in range(200):
        noisy = assess_counts(evaluate(about, true, 5.0, rng))
        assert noisy is not None
        for one in noisy.comparisons:
            assert one.reach is not None
            held[one.metric].append(abs(one.gain - exact[one.metric]) <= one.reach)
        for offset, kept in zip(noisy.offsets, without.offsets, strict=True):
            assert offset.reach is not None
            off = (offset.predicted - offset.observed) - (kept.predicted - kept.observed)
            held["offset"].append(abs(off) <= offset.reach)
    for metric, found in held.items():
        assert len(found) > 20, metric  # the others are lost in the noise
        assert np.mean(found) > 0.9, metric


def test_what_the_steps_leave_open_is_in_the_interval() -> None:
    """All predictions are at the lower end of their step, and the class is far more frequent."""
    rng = np.random.default_rng(7)
    true = (np.arange(20_000) % 5 > 0).astype(int)
    found = assess_counts(evaluate(np.full(20_000, 0.004), true, 0.0, rng))
    assert found is not None
    by_metric = {one.metric: one for one in found.comparisons}
    exact = np.mean((1 / (1 + np.exp(-0.004)) - true) ** 2)
    assert by_metric["brier_score"].reach is not None
    assert 0.01 < abs(by_metric["brier_score"].value - exact) < by_metric["brier_score"].reach
    (offset,) = found.offsets
    assert offset.reach is not None
    assert 0.01 < abs(offset.predicted - 0.501) < offset.reach


def test_metrics_without_a_known_constant_give_no_verdict() -> None:
    assert assess_counts(NoisyEvaluation(1, 1.0, {})) is None


def test_several_runs_have_the_verdict_of_their_mean() -> None:
    both = average_skills([skill(roc_auc=0.3, log_loss=-0.1), skill(roc_auc=0.1, log_loss=-0.3)])
    assert both is not None
    assert [one.gain for one in both.comparisons] == pytest.approx([0.2, -0.2])
    assert [one.reach for one in both.comparisons] == pytest.approx([0.1, 0.1])
    assert both.code == "order_only"
    assert average_skills([]) is None
