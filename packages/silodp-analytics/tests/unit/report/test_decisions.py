"""Thresholds, recalibration and gaps from counts: exact without noise, and with errors that cover noise and sample."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, precision_score, recall_score
from torch import nn

from silodp.report.estimates import Estimate, find_limits
from silodp.report.held_out import CalibrationBin, HeldOut
from silodp_analytics.decisions.decisions import (
    Recalibration,
    find_decisions,
    list_gaps,
    list_thresholds,
    recalibrate,
    recalibrate_silos,
)
from silodp_analytics.decisions.decisions_plots import plot_decisions
from silodp_analytics.evaluation.report import EvaluatedPart, NoisyEvaluation
from silodp_analytics.silo_head.head import SiloHead

MEASURES = (
    "called",
    "sensitivity",
    "specificity",
    "positive_value",
    "negative_value",
    "net_benefit",
    "treat_all",
)
STEPS = 10


def draw(
    records: int, seed: int = 0, scale: float = 1.0, shift: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, and labels that are as likely as the corrected probabilities say."""
    coins = np.random.default_rng(seed)
    logit = coins.normal(0, 1.5, records)
    true = 1 / (1 + np.exp(-(scale * logit + shift)))
    return 1 / (1 + np.exp(-logit)), (coins.random(records) < true).astype(int)


def count(probability: np.ndarray, label: np.ndarray) -> np.ndarray:
    counts = np.zeros((2, STEPS))
    np.add.at(counts, (label, (probability * STEPS).astype(int)), 1)
    return counts


def test_every_measure_is_that_of_the_records() -> None:
    probability, label = draw(500)
    for one in list_thresholds(count(probability, label).tolist(), 0.0):
        called = (probability >= one.probability).astype(int)
        assert one.called is not None
        assert one.called.value == pytest.approx(called.mean())
        assert one.sensitivity is not None
        assert one.sensitivity.value == pytest.approx(recall_score(label, called))
        assert one.specificity is not None
        assert one.specificity.value == pytest.approx(recall_score(1 - label, 1 - called))
        assert one.positive_value is not None
        assert one.positive_value.value == pytest.approx(precision_score(label, called))
        assert one.negative_value is not None
        assert one.negative_value.value == pytest.approx(precision_score(1 - label, 1 - called))
        odds = one.probability / (1 - one.probability)
        assert one.net_benefit is not None
        assert one.net_benefit.value == pytest.approx((called * label - odds * called * (1 - label)).mean())
        assert one.treat_all is not None
        assert one.treat_all.value == pytest.approx((label - odds * (1 - label)).mean())
        assert one.net_benefit.standard_error == 0


@pytest.mark.parametrize("kind", ["noise", "sample"])
def test_errors_are_those_of_many_draws(kind: str) -> None:
    coins, noise_std = np.random.default_rng(1), 4.0
    counts = count(*draw(2000))
    drawn = []
    for seed in range(600):
        again = (
            counts + coins.normal(0, noise_std, counts.shape) if kind == "noise" else count(*draw(2000, seed))
        )
        rows = list_thresholds(again.tolist(), 0.0)
        drawn.append([[getattr(row, name).value for name in MEASURES] for row in rows])
    spread = np.std(drawn, axis=0)
    for row, wanted in zip(list_thresholds(counts.tolist(), noise_std), spread, strict=True):
        for name, expected in zip(MEASURES, wanted, strict=True):
            share = getattr(row, name)
            found = share.standard_error if kind == "noise" else share.sampling_error
            # That of the sample is a little larger where a share is near 0 or 1 (Laplace's rule).
            assert 0.8 * expected <= found <= 1.4 * expected + 1e-4, (row.probability, name)


def test_what_is_lost_in_the_noise_is_not_told() -> None:
    counts = [[50.0] * STEPS, [1.0] * STEPS]
    (first, *_, last) = list_thresholds(counts, 10.0)
    assert first.sensitivity is None
    assert last.positive_value is not None  # fifty negative records are enough to divide by
    assert first.specificity is not None
    assert list_thresholds([[0.0] * STEPS] * 2, 0.0)[0].net_benefit is None


@pytest.mark.pictures
@pytest.mark.parametrize("place", [0, 4, STEPS - 1])
def test_a_curve_is_drawn_where_all_predictions_are_alike(place: int) -> None:
    counts = np.zeros((2, STEPS))
    counts[:, place] = 40, 20
    assert plot_decisions(list_thresholds(counts.tolist(), 0.0)) is not None


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (0.4, 0.0), (0.7, -1.0), (2.0, 0.5)])
def test_a_correction_is_found_again(scale: float, shift: float) -> None:
    counts = count(*draw(200_000, scale=scale, shift=shift))
    found = recalibrate(counts.tolist(), 0.0)
    assert isinstance(found, Recalibration)
    assert found.scale == pytest.approx(scale, rel=0.1)
    assert found.shift == pytest.approx(shift, abs=0.05)
    assert improves(found)
    # The independent oracle, on a record per count at the middle of its step, without the outermost steps.
    middles = ((np.arange(STEPS) + 0.5) / STEPS)[1:-1]
    logits = np.tile(np.log(middles / (1 - middles)), 2)[:, None]
    labels = np.repeat([0, 1], STEPS - 2)
    oracle = LogisticRegression(C=1e6, tol=1e-10).fit(logits, labels, sample_weight=counts[:, 1:-1].ravel())
    assert found.scale == pytest.approx(oracle.coef_[0, 0], rel=1e-3)
    assert found.shift == pytest.approx(oracle.intercept_[0], abs=1e-3)


@pytest.mark.parametrize(("scale", "spread"), [(0.7, 10.0), (0.5, 8.0), (0.5, 3.0)])
def test_extreme_predictions_are_not_called_cautious(scale: float, spread: float) -> None:
    """Most records are in the outermost steps, whose logits are far beyond the middles of these."""
    coins = np.random.default_rng(0)
    logit = coins.normal(0, spread, 100_000)
    label = (coins.random(len(logit)) < 1 / (1 + np.exp(-scale * logit))).astype(int)
    probability = np.minimum(1 / (1 + np.exp(-logit)), 1 - 1e-9)
    found = recalibrate(count(probability, label).tolist(), 0.0)
    assert isinstance(found, Recalibration)
    assert found.scale == pytest.approx(scale, abs=0.1)


@pytest.mark.parametrize("steps", [10, 100])
def test_noise_makes_no_correction_smaller(steps: int) -> None:
    """With negative counts taken for none, 100 steps under this noise gave .71 in place of .96."""
    probability, label = draw(4000)
    counts = np.zeros((2, steps))
    np.add.at(counts, (label, (probability * steps).astype(int)), 1)
    exact = recalibrate(counts.tolist(), 0.0)
    assert isinstance(exact, Recalibration)
    coins, deviations, scales = np.random.default_rng(4), [], []
    for _ in range(200):
        found = recalibrate((counts + coins.normal(0, 8.0, counts.shape)).tolist(), 8.0)
        assert isinstance(found, Recalibration)
        scales.append(found.scale)
        deviations.append((found.scale - exact.scale) / found.scale_error)
    assert np.mean(scales) == pytest.approx(exact.scale, abs=0.06)
    assert np.std(deviations) < 1.1


def test_the_error_of_a_correction_is_that_of_many_draws() -> None:
    coins, counts, noise_std = np.random.default_rng(2), count(*draw(3000, scale=0.6)), 8.0
    found = recalibrate(counts.tolist(), noise_std)
    assert isinstance(found, Recalibration)
    drawn = []
    for seed in range(300):
        again = count(*draw(3000, seed, scale=0.6)) + coins.normal(0, noise_std, counts.shape)
        one = recalibrate(again.tolist(), 0.0)
        assert isinstance(one, Recalibration)
        drawn.append((one.scale, one.shift))
    assert np.allclose((found.scale_error, found.shift_error), np.std(drawn, axis=0), rtol=0.25)


def test_noise_that_says_the_reverse_is_no_ground_for_a_correction() -> None:
    counts = count(*draw(300))
    for table, noise_std, why in (
        (counts[::-1].tolist(), 0.0, "is not above 0"),
        (counts.tolist(), 60.0, "the noise of the counts is too large"),
        (counts.tolist(), 12.0, "is known to more than twice its standard error"),
        ([[0.0] * STEPS] * 2, 0.0, "no records of a class (noisy counts: 0 and 0)"),
        ([[5.0, 5.0], [5.0, 5.0]], 0.0, "at least 4 are needed"),  # no step has two ends
    ):
        found = recalibrate(table, noise_std)
        assert isinstance(found, str)
        assert why in found


def test_one_class_alone_says_that_the_other_is_rarer() -> None:
    found = recalibrate([[5.0] * STEPS, [0.0] * STEPS], 0.0)
    assert isinstance(found, Recalibration)
    assert found.shift < -2 * found.shift_error
    assert math.isfinite(found.shift)


def test_a_shift_is_found_where_the_scale_is_open() -> None:
    """Predictions that hardly differ say nothing of a scale."""
    coins = np.random.default_rng(3)
    logit = coins.normal(0, 0.3, 1000)
    label = (coins.random(1000) < 1 / (1 + np.exp(-logit - 1))).astype(int)
    counts = count(1 / (1 + np.exp(-logit)), label) + coins.normal(0, 10, (2, STEPS))
    found = recalibrate(counts.tolist(), 10.0)
    assert isinstance(found, Recalibration)
    assert (found.scale, found.limits) == (1, None)
    assert abs(found.shift - 1) < 3 * found.shift_error


def test_a_correction_says_what_it_means() -> None:
    verdicts = []
    for scale in (1.0, 0.5, 2.0):
        found = recalibrate(count(*draw(20_000, scale=scale)).tolist(), 0.0)
        assert isinstance(found, Recalibration)
        verdicts.append(found.verdict)
    assert verdicts == [
        "no change is called for",
        "predictions are too extreme",
        "predictions are too cautious",
    ]


@pytest.mark.parametrize(
    ("steps", "records", "noise_std"), [(10, 1000, 10.0), (100, 4000, 40.0), (20, 1000, 40.0)]
)
def test_right_predictions_are_seldom_called_wrong(steps: int, records: int, noise_std: float) -> None:
    """A standard error that takes noise in empty steps for records is too small: one in ten was called too extreme."""
    coins, wrong = np.random.default_rng(7), 0
    for seed in range(200):
        probability, label = draw(records, seed)
        counts = coins.normal(0, noise_std, (2, steps))
        np.add.at(counts, (label, (probability * steps).astype(int)), 1)
        found = recalibrate(counts.tolist(), noise_std)
        wrong += isinstance(found, Recalibration) and found.verdict.startswith("predictions are")
    assert wrong <= 0.08 * 200


def improves(found: Recalibration) -> bool:
    return found.before is not None and found.after is not None and found.after <= found.before


def draw_overconfident(records: int, seed: int = 0, often: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Predictions of which nine in ten are below .1, and a label that hardly depends on them."""
    coins = np.random.default_rng(seed)
    logit = coins.normal(-6, 3, records)
    label = (
        coins.random(records) < 1 / (1 + np.exp(-0.05 * (logit + 6) - math.log(often / (1 - often))))
    ).astype(int)
    return 1 / (1 + np.exp(-logit)), label


@pytest.mark.parametrize("noise_std", [0.0, 40.0])
def test_predictions_that_are_too_extreme_for_any_scale_are_drawn_in(noise_std: float) -> None:
    coins = np.random.default_rng(1)
    counts = count(*draw_overconfident(4000)) + coins.normal(0, noise_std or 1e-9, (2, STEPS))
    found = recalibrate(counts.tolist(), noise_std)
    assert isinstance(found, Recalibration)
    assert found.limits is not None
    probability, label = draw_overconfident(4000, 2)
    head = SiloHead.of_recalibration("r", "w", found.scale, found.shift, found.limits)
    logit = torch.from_numpy(np.log(probability / (1 - probability)))[:, None]
    fixed = head.apply(nn.Linear(1, 1, bias=False, dtype=torch.float64))
    next(fixed.parameters()).data.fill_(1.0)
    after = torch.sigmoid(fixed(logit))[:, 0].detach().numpy()
    assert (np.argsort(after) == np.argsort(probability)).all()
    # Far beyond, too, and in single precision.
    extreme = torch.tensor([-np.inf, -60.0, -30.0, -17.0, -16.0, -6.0, 0.0, 9.0, np.inf], dtype=torch.float32)
    single = head.apply(nn.Linear(1, 1, bias=False))
    next(single.parameters()).data.fill_(1.0)
    drawn = single.outputs(extreme[:, None])[:, 0]
    assert (drawn.diff() > 0).all()
    assert log_loss(label, after) < 0.68 < 1.3 < log_loss(label, probability)
    assert improves(found)


def test_extreme_predictions_that_are_right_are_not_drawn_in() -> None:
    coins = np.random.default_rng(0)
    for seed in range(40):
        for counts, noise_std in (
            (count(*draw(3000, seed)), 0.0),
            (count(*draw(1500, seed)) + coins.normal(0, 20.0, (2, STEPS)), 20.0),
        ):
            found = recalibrate(counts.tolist(), noise_std)
            assert isinstance(found, Recalibration)
            assert found.limits is None
    # A single record proves nothing; three of three do.
    for wrong, is_drawn_in in ((1, False), (3, True)):
        counts = count(*draw(300))
        counts[:, -1] = wrong, 0
        found = recalibrate(counts.tolist(), 0.0)
        assert isinstance(found, Recalibration)
        assert (found.limits is not None) is is_drawn_in


def make_silo(name: str, counts: np.ndarray, noise_std: float) -> EvaluatedPart:
    return EvaluatedPart("silo", name, True, float(counts.sum()), noise_std, {}, counts.tolist())


def test_a_silo_has_the_common_scale_and_a_shift_of_its_own() -> None:
    common = recalibrate(count(*draw(50_000, scale=0.6)).tolist(), 0.0)
    assert isinstance(common, Recalibration)
    shifts = {"a": 1.0, "b": 0.0, "c": -0.5}
    parts = [
        make_silo(name, count(*draw(20_000, 4, scale=0.6, shift=shift)), 0.0)
        for name, shift in shifts.items()
    ]
    found = recalibrate_silos([*parts, make_silo("nobody", np.zeros((2, STEPS)), 0.0)], common)
    assert found.pop("nobody") == replace(common, before=None, after=None)
    assert found.keys() == shifts.keys()
    for name, shift in shifts.items():
        assert (found[name].scale, found[name].scale_error) == (common.scale, common.scale_error)
        assert found[name].shift == pytest.approx(shift, abs=0.08)
        assert improves(found[name])


def find_likeliest_shift(counts: np.ndarray, scale: float) -> float:
    """The independent oracle, by the steps between the outermost ones."""
    middles = ((np.arange(STEPS) + 0.5) / STEPS)[1:-1]
    logits, (negative, positive) = scale * np.log(middles / (1 - middles)), counts[:, 1:-1]

    def loss(shift: float) -> float:
        score = logits + shift
        return float((positive * np.logaddexp(0, -score) + negative * np.logaddexp(0, score)).sum())

    return float(minimize_scalar(loss, bounds=(-4, 4), method="bounded").x)


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_shifts_of_silos_are_closer_with_what_all_silos_say(spread: float) -> None:
    """Ten silos of 500 records under noise: the shift by the counts of each alone is further off."""
    coins, noise_std = np.random.default_rng(6), 8.0
    own, moved, is_covered = [], [], []
    for seed in range(30):
        true = coins.normal(0, spread, 10)
        counts = [count(*draw(500, 10 * seed + s, scale=0.6, shift=shift)) for s, shift in enumerate(true)]
        noisy = [one + coins.normal(0, noise_std, one.shape) for one in counts]
        common = recalibrate(sum(noisy, np.zeros((2, STEPS))).tolist(), noise_std * math.sqrt(10))
        assert isinstance(common, Recalibration)
        found = recalibrate_silos([make_silo(f"{s}", one, noise_std) for s, one in enumerate(noisy)], common)
        for s, one in enumerate(noisy):
            own.append(find_likeliest_shift(one, common.scale) - true[s])
            moved.append(found[f"{s}"].shift - true[s])
            is_covered.append(abs(moved[-1]) < 2 * found[f"{s}"].shift_error)
    assert np.std(moved) < 0.9 * np.std(own)
    assert np.mean(is_covered) > 0.93


def make_evaluation(counts: list[list[float]], **fields: object) -> NoisyEvaluation:
    confusion = [[sum(row[:5]), sum(row[5:])] for row in counts]
    return NoisyEvaluation(1, 0.0, {}, confusion, counts, **fields)  # type: ignore[arg-type]


def test_noisy_sums_go_before_private_records_and_places_have_no_steps() -> None:
    counts = count(*draw(400)).tolist()
    covered = find_decisions(make_evaluation(counts), None)
    assert covered is not None
    assert covered.is_covered
    bins = [
        CalibrationBin((b + 0.5) / 10, yes / (no + yes), no + yes, 0.1)
        for b, (no, yes) in enumerate(zip(*counts, strict=True))
        if no + yes
    ]
    private = find_decisions(None, HeldOut(1, 400, parts=(), calibration=tuple(bins)))
    assert private is not None
    assert not private.is_covered
    for one, other in zip(covered.thresholds, private.thresholds, strict=True):
        assert one.net_benefit is not None
        assert other.net_benefit is not None
        assert one.net_benefit.value == pytest.approx(other.net_benefit.value)
    assert find_decisions(NoisyEvaluation(1, 0.0, {}, [[5.0, 1.0], [1.0, 5.0]]), None) is None
    assert find_decisions(None, None) is None
    many = find_decisions(make_evaluation(np.repeat(counts, 4, axis=1).tolist()), None)
    assert many is not None
    assert [one.probability for one in many.thresholds] == [one.probability for one in covered.thresholds]


def test_a_gap_in_another_unit_is_not_cut_off_and_an_error_that_is_not_known_stays_so() -> None:
    parts = [
        EvaluatedPart(
            "sex", name, True, 50.0, 1.0, {"mean_absolute_error": Estimate(value, 1.0, value, value, None)}
        )
        for name, value in (("f", 10.0), ("m", 22.0))
    ]
    (gap,) = list_gaps(parts)
    assert gap.difference.sampling_error is None
    assert find_limits("difference", gap.difference) == pytest.approx(
        (12 - 1.96 * math.sqrt(2), 12 + 1.96 * math.sqrt(2)), abs=1e-3
    )


def test_the_gap_of_a_column_is_between_its_extremes() -> None:
    def part(of: str, name: str, value: float | None) -> EvaluatedPart:
        found = {} if value is None else {"accuracy": Estimate(value, 0.03, value, value, 0.04)}
        return EvaluatedPart(of, name, True, 50.0, 1.0, found)

    parts = [
        part("sex", "f", 0.7),
        part("sex", "m", 0.8),
        part("age", "young", 0.9),
        part("age", "old", None),
    ]
    (gap,) = list_gaps([*parts, part("sex", "x", 0.75)])
    assert (gap.column, gap.low, gap.high) == ("sex", "f", "m")
    assert gap.difference.value == pytest.approx(0.1)
    assert gap.difference.standard_error == pytest.approx(0.03 * math.sqrt(2))
    assert gap.difference.sampling_error == pytest.approx(0.04 * math.sqrt(2))
    assert find_limits("difference", gap.difference)[0] < 0 < find_limits("difference", gap.difference)[1]
