"""What follows for decisions from counts of two classes by step of the predicted probability.

Which records are called positive at a threshold, how good that is, and how the outputs should be corrected. The counts
may carry noise that ε covers: all here is post-processing of them, and every number has an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from silodp.report.estimates import Estimate, find_error
from silodp.report.held_out import BINS, CalibrationBin, HeldOut, compute_error
from silodp_analytics.counts import MIN_CERTAINTY
from silodp_analytics.evaluation.report import EvaluatedPart, NoisyEvaluation

_ITERATIONS, _RIDGE = 100, 1.0
"""Of Newton's method, and how much a scale of 1 and a shift of 0 are preferred, in units of one record."""


@dataclass(frozen=True)
class Threshold:
    """What is decided if records with at least this probability are called positive; None: lost in the noise.

    Attributes:
        probability: The threshold t.
        called: The share of the records that are called positive.
        sensitivity: The share of them among the positive records.
        specificity: The share of the others among the negative records.
        positive_value: The share of positive records among those that are called positive.
        negative_value: The share of negative records among the others.
        net_benefit: (true positives − t/(1 − t) · false positives) / records.
        treat_all: The net benefit of calling all records positive.
    """

    probability: float
    called: Estimate | None
    sensitivity: Estimate | None
    specificity: Estimate | None
    positive_value: Estimate | None
    negative_value: Estimate | None
    net_benefit: Estimate | None
    treat_all: Estimate | None


def list_thresholds(counts: Sequence[Sequence[float]], noise_std: float) -> tuple[Threshold, ...]:
    """Return what follows from counts for each threshold between two steps of the probability.

    Args:
        counts: (2, B), by class and by step of the probability.
        noise_std: The standard deviation of the noise in a count.

    Source: Vickers and Elkin 2006, "Decision Curve Analysis", for net benefit.
    """
    table = np.asarray(counts, dtype=float)
    steps = table.shape[1]
    found = []
    for place in range(1, steps):
        above = np.arange(steps) >= place
        called = np.stack([above, above])
        positive = np.stack([np.zeros(steps, bool), np.ones(steps, bool)])
        weight = (place / steps) / (1 - place / steps)
        values = np.where(called, np.where(positive, 1.0, -weight), 0.0)
        everyone = np.ones_like(called)
        found.append(
            Threshold(
                place / steps,
                called=_measure_share(table, everyone, called, noise_std),
                sensitivity=_measure_share(table, positive, called, noise_std),
                specificity=_measure_share(table, ~positive, ~called, noise_std),
                positive_value=_measure_share(table, called, positive, noise_std),
                negative_value=_measure_share(table, ~called, ~positive, noise_std),
                net_benefit=_measure_mean(table, values, noise_std),
                treat_all=_measure_mean(table, np.where(positive, 1.0, -weight), noise_std),
            )
        )
    return tuple(found)


def _measure_share(
    table: NDArray[np.float64], within: NDArray[np.bool_], chosen: NDArray[np.bool_], noise_std: float
) -> Estimate | None:
    """Return the share of chosen records among some; None where their number is lost in the noise."""
    total = float(table[within].sum())
    if total <= MIN_CERTAINTY * noise_std * math.sqrt(within.sum()) or total <= 0:
        return None
    value = min(max(float(table[within & chosen].sum()) / total, 0.0), 1.0)
    inside, outside = int((within & chosen).sum()), int((within & ~chosen).sum())
    # The derivative of a/(a + b) by a count of a is (1 − value)/total, and by one of b it is −value/total.
    noise = noise_std * math.hypot((1 - value) * math.sqrt(inside), value * math.sqrt(outside)) / total
    return Estimate(value, noise, value, value, compute_error(value, total))


def _measure_mean(
    table: NDArray[np.float64], values: NDArray[np.float64], noise_std: float
) -> Estimate | None:
    """Return the mean of what a record in each cell counts for; None where their number is lost in the noise."""
    total = float(table.sum())
    if total <= MIN_CERTAINTY * noise_std * math.sqrt(table.size) or total <= 0:
        return None
    mean = float((table * values).sum()) / total
    noise = noise_std * math.sqrt(float(((values - mean) ** 2).sum())) / total
    variance = max(float((table * (values - mean) ** 2).sum()) / total, 0.0)
    return Estimate(mean, noise, mean, mean, math.sqrt(variance / total))


def calibrate_counts(counts: Sequence[Sequence[float]], noise_std: float) -> tuple[CalibrationBin, ...]:
    """Return the calibration that follows from noisy counts, at no further ε; steps lost in the noise are left out.

    Args:
        counts: (2, B), by class and by step of the probability.
        noise_std: Standard deviation of the noise in a count.
    """
    table = np.asarray(counts, dtype=float)
    steps = table.shape[1]
    positive = np.arange(2)[:, None].repeat(steps, 1) == 1
    found = []
    for step in range(steps):
        here = np.arange(steps)[None].repeat(2, 0) == step
        share = _measure_share(table, here, positive, noise_std)
        if share is not None:
            records = float(table[:, step].sum())
            found.append(CalibrationBin((step + 0.5) / steps, share.value, records, find_error(share)))
    return tuple(found)


@dataclass(frozen=True)
class Recalibration:
    """A correction of the outputs: logit p becomes scale · logit p + shift.

    Attributes:
        scale: Below 1 where predictions are too extreme; 1/scale is the temperature.
        shift: Above 0 where positive records are more frequent than predicted.
        scale_error: The standard error of the scale, by noise and sample together.
        shift_error: That of the shift.
        before: The log loss of the predictions, to the width of a step: in all but the outermost steps, or in all of
            them, where logits are drawn in. None where it is lost in the noise.
        after: That of the corrected ones.
        limits: (a, w), where logits beyond ±a are first drawn in, to less than ±(a + w); None where they are not.
        error_at_one: The standard error of the scale if the true one is 1: noise that makes the found one smaller makes
            its error smaller, too.
    """

    scale: float
    shift: float
    scale_error: float
    shift_error: float
    before: float | None
    after: float | None
    limits: tuple[float, float] | None = None
    error_at_one: float = 0.0

    @property
    def most_scale(self) -> float:
        """The scale and twice its standard error."""
        return self.scale + 2 * max(self.scale_error, self.error_at_one)

    @property
    def verdict(self) -> str:
        """What the correction says of the predictions, as a clause; "" where that is in its numbers alone."""
        if self.limits is not None or self.most_scale < 0.9:
            return "predictions are too extreme"
        if self.scale - 2 * self.scale_error > 1.15:
            return "predictions are too cautious"
        if abs(self.scale - 1) <= 2 * self.scale_error and abs(self.shift) <= 2 * self.shift_error:
            return "no change is called for"
        return ""


_UNCHANGED = Recalibration(1.0, 0.0, 0.0, 0.0, None, None)


def recalibrate(counts: Sequence[Sequence[float]], noise_std: float) -> Recalibration | str:
    """Return the scale and the shift under which the counts are likeliest.

    The outermost steps are left out at first: they have no end, so nobody knows which logits are in them. Which records
    are in the others depends on the predictions alone, and so leaves the fit right. Where the share of positive records
    in an outermost step contradicts it, predictions there are too extreme for any scale: their logits are drawn in to
    about the width of one more step, and all steps are used. If the counts leave the scale open, a scale of 1 among
    others, the shift alone is found.

    Under much noise counts may say the reverse of what the model says, and are then no ground for a correction.

    Args:
        counts: (2, B), by class and by step of the probability.
        noise_std: The standard deviation of the noise in a count.

    Returns:
        The correction; where there is none, a clause that says why: a class has no records in these steps, or scale and
        shift are lost in their standard errors.

    Source: Platt 1999, "Probabilistic Outputs for Support Vector Machines", on records by step; Guo et al. 2017, "On
    Calibration of Modern Neural Networks", for the temperature.
    """
    table = np.asarray(counts, dtype=float)
    number = table.shape[1]
    if number < 4:
        return f"there are {number} steps of the probability, and at least 4 are needed"
    edge = math.log(number - 1)
    steps = _Steps.of(table, noise_std, None)
    found = _fit_correction(steps)
    if _is_contradicted(found if _is_clear(found) else _UNCHANGED, table, edge, noise_std):
        steps = _Steps.of(table, noise_std, (edge, edge - math.log((number - 2) / 2)))
        found = _fit_correction(steps)
    if _is_clear(found):
        return found
    if isinstance(found, Recalibration) and found.most_scale < 1:
        return f"the scale of the logits, {found.scale:.2g} ± {found.scale_error:.2g}, is not above 0"
    alone = _fit_correction(steps, _UNCHANGED)
    if isinstance(alone, str) or abs(alone.shift) > 2 * alone.shift_error:
        return alone
    return (
        f"neither a scale of the logits nor their shift, {alone.shift:.2g} ± {alone.shift_error:.2g}, is known to more "
        "than twice its standard error"
    )


def recalibrate_silos(parts: Sequence[EvaluatedPart], common: Recalibration) -> dict[str, Recalibration]:
    """Return the correction of each of some silos: the common scale, and a shift of its own.

    How far silos differ is estimated from all of them, and the shift of each is moved towards the common one by as much
    as its error makes up of its distance: silos that do not differ, or whose counts are lost in the noise, have the
    common shift. The error is that of its own counts alone, which the moved shift does not exceed.

    Args:
        parts: The silos, with their counts.
        common: The correction for all silos.

    Source: DerSimonian and Laird 1986, "Meta-analysis in clinical trials", for the variance between silos.
    """
    steps = {part.name: _Steps.of(np.asarray(part.counts), part.noise_std, common.limits) for part in parts}
    fits = {name: _fit_correction(one, common) for name, one in steps.items()}
    known = [one for one in fits.values() if isinstance(one, Recalibration)]
    variance = np.array([one.shift_error**2 for one in known])
    distance = np.array([one.shift for one in known]) - common.shift
    between = max(0.0, float(np.average(distance**2 - variance, weights=1 / variance))) if known else 0.0
    found = {}
    for name, one in fits.items():
        if isinstance(one, str):
            found[name] = replace(common, before=None, after=None)
            continue
        own = between / (between + one.shift_error**2)
        shift = common.shift + own * (one.shift - common.shift)
        found[name] = replace(one, shift=shift, after=steps[name].compute_log_loss(common.scale, shift))
    return found


def _is_clear(found: Recalibration | str) -> TypeGuard[Recalibration]:
    """Return whether there is a scale above 0, which keeps the order, and it is clear of 0 or of 1."""
    if isinstance(found, str) or found.scale <= 0:
        return False
    return found.scale > 2 * found.scale_error or found.most_scale < 1


def _is_contradicted(
    believed: Recalibration, table: NDArray[np.float64], edge: float, noise_std: float
) -> bool:
    """Return whether records in an outermost step have the class that it predicts less often than believed at its edge.

    Args:
        believed: The correction by the other steps.
        table: Counts (2, B), by class and by step.
        edge: The logit at which the last step begins.
        noise_std: The standard deviation of the noise in a count.
    """
    for step, logit, label in ((0, -edge, 0), (table.shape[1] - 1, edge, 1)):
        total = float(table[:, step].sum())
        if total <= max(0.0, MIN_CERTAINTY * noise_std * math.sqrt(2)):
            continue
        positive = 1 / (1 + math.exp(-(believed.scale * logit + believed.shift)))
        least = positive if label else 1 - positive
        share = min(max(float(table[label, step]) / total, 0.0), 1.0)
        sample = compute_error(share, total)
        noise = noise_std / total * math.hypot(share, 1 - share)
        belief = least * (1 - least) * (believed.scale_error * edge + believed.shift_error)
        # With one more record as is believed, so that a few are no proof.
        share = (share * total + least) / (total + 1)
        if share + MIN_CERTAINTY * math.hypot(sample, noise, belief) < least:
            return True
    return False


@dataclass(frozen=True)
class _Steps:
    """Counts of records by class and by logit.

    Attributes:
        counts: (2, k). Negative counts, which noise may make, stay: to count them as none would make every empty step
            look like records.
        logits: (k,), ascending, each in the middle of its step.
        noise_std: The standard deviation of the noise in a count.
        limits: Between which logits are drawn in; None: the outermost steps are left out.
    """

    counts: NDArray[np.float64]
    logits: NDArray[np.float64]
    noise_std: float
    limits: tuple[float, float] | None

    @classmethod
    def of(cls, table: NDArray[np.float64], noise_std: float, limits: tuple[float, float] | None) -> _Steps:
        """Return the steps of counts (2, B) by equal steps of the probability."""
        middles = (np.arange(table.shape[1]) + 0.5) / table.shape[1]
        logits = np.log(middles / (1 - middles))
        if limits is None:
            return cls(table[:, 1:-1], logits[1:-1], noise_std, None)
        logits[[0, -1]] = -limits[0] - limits[1] / 2, limits[0] + limits[1] / 2
        return cls(table, logits, noise_std, limits)

    def compute_log_loss(self, scale: float, shift: float) -> float | None:
        """Return the log loss of predictions with this scale and shift; None where it is lost in the noise."""
        scores, (negative, positive), total = scale * self.logits + shift, self.counts, self.counts.sum()
        losses = positive * np.logaddexp(0, -scores) + negative * np.logaddexp(0, scores)
        is_lost = total <= MIN_CERTAINTY * self.noise_std * math.sqrt(self.counts.size) or total <= 0
        return None if is_lost or losses.sum() < 0 else float(losses.sum() / total)


def _fit_correction(steps: _Steps, kept: Recalibration | None = None) -> Recalibration | str:
    """Return the correction under which the counts are likeliest; a clause that says why, where there is none.

    Args:
        steps: The counts.
        kept: A correction whose scale is kept, so that the shift alone is found; None: the scale is found, too.
    """
    logits, (negative, positive) = steps.logits, steps.counts
    # Of a shift alone one class may say enough: the ridge bounds it.
    if (min if kept is None else sum)((negative.sum(), positive.sum())) <= 0:
        return (
            f"{'all' if steps.limits else 'the inner'} steps of the probability have no records of a class (noisy "
            f"counts: {negative.sum():.0f} and {positive.sum():.0f})"
        )
    total = negative + positive
    start = np.array([1.0, 0.0]) if kept is None else np.array([kept.scale, kept.shift])
    free = slice(0 if kept is None else 1, 2)
    found, step = start.copy(), np.ones(2)
    both = np.stack([logits, np.ones_like(logits)], 1)
    design = both[:, free]
    ridge = _RIDGE * np.eye(design.shape[1])
    for _ in range(_ITERATIONS):
        chance = 1 / (1 + np.exp(-both @ found))
        gradient = design.T @ (total * chance - positive) + _RIDGE * (found - start)[free]
        # Of positive counts, so that it says which way is down also where noise is as large as the counts.
        curvature = np.maximum(total, 0) * chance * (1 - chance)
        hessian = (design * curvature[:, None]).T @ design + ridge
        # A step of at most 1 in each direction, so that a start far from the best one does not overshoot.
        step = np.clip(np.linalg.solve(hessian, gradient), -1, 1)
        found[free] -= step
    if np.abs(step).max() > 1e-6:
        return "no scale and shift are the likeliest ones under these counts"
    errors = []
    for by in (found,) if kept is not None else (start, found):
        chance = 1 / (1 + np.exp(-both @ by))
        weight = design * (chance * (1 - chance))[:, None]
        # Of all counts, as noise in empty steps is no information; and what errors are divided by must be clear of it.
        hessian = (weight * total[:, None]).T @ design + ridge
        noise = steps.noise_std * math.sqrt(2) * np.linalg.norm(weight * design, axis=0)
        if (np.diag(hessian) <= MIN_CERTAINTY * noise).any() or np.linalg.eigvalsh(hessian).min() <= 0:
            return "the noise of the counts is too large for scale and shift"
        # The delta method: a count changes the gradient by (chance − 1)·x or chance·x, the sample by its own variance.
        inverse = np.linalg.inv(hessian)
        by_count = (design * (chance**2 + (1 - chance) ** 2)[:, None]).T @ design
        variance = np.diag(inverse @ (hessian + steps.noise_std**2 * by_count) @ inverse)
        errors.append(np.sqrt(variance))
    scale, shift = map(float, found)
    return Recalibration(
        scale,
        shift,
        scale_error=float(errors[-1][0]) if kept is None else kept.scale_error,
        shift_error=float(errors[-1][-1]),
        before=steps.compute_log_loss(1.0, 0.0),
        after=steps.compute_log_loss(scale, shift),
        limits=steps.limits,
        error_at_one=float(errors[0][0]) if kept is None else kept.error_at_one,
    )


def count_by_step(bins: Sequence[CalibrationBin]) -> list[list[float]]:
    """Return counts (2, B) by class and by step, of bins that have them without noise."""
    counts = np.zeros((2, BINS))
    for one in bins:
        place = min(int(one.predicted * BINS + 1e-9), BINS - 1)
        counts[:, place] += (one.records * (1 - one.observed), one.records * one.observed)
    return counts.tolist()


@dataclass(frozen=True)
class Gap:
    """The largest difference of a metric between two subgroups of a column.

    Attributes:
        column: The column.
        metric: The name of the metric.
        low: The name of the subgroup with the lowest value.
        high: The name of that with the highest.
        difference: By how much they differ.
    """

    column: str
    metric: str
    low: str
    high: str
    difference: Estimate


def list_gaps(parts: Sequence[EvaluatedPart]) -> tuple[Gap, ...]:
    """Return the gap of every metric in every column, of subgroups that are shown."""
    columns: dict[str, list[EvaluatedPart]] = {}
    for part in parts:
        columns.setdefault(part.of, []).append(part)
    found = []
    for column, members in columns.items():
        for metric in members[0].estimates:
            known = [(one.name, one.estimates[metric]) for one in members if metric in one.estimates]
            if len(known) < 2:
                continue
            (low, least), (high, most) = (
                choose(known, key=lambda one: one[1].value) for choose in (min, max)
            )
            # Different records with noise of their own: variances add up.
            noise = math.hypot(least.standard_error, most.standard_error)
            of_sample = (least.sampling_error, most.sampling_error)
            sampling = None if None in of_sample else math.hypot(*cast("tuple[float, float]", of_sample))
            value = most.value - least.value
            found.append(Gap(column, metric, low, high, Estimate(value, noise, value, value, sampling)))
    return tuple(found)


@dataclass(frozen=True)
class Decisions:
    """What follows for decisions from the held-out records of two classes.

    Attributes:
        thresholds: By rising probability.
        recalibration: A correction of the outputs, or a clause that says why there is none.
        silos: That of each silo whose counts are known, by its name.
        is_covered: Whether ε covers the counts.
    """

    thresholds: tuple[Threshold, ...]
    recalibration: Recalibration | str
    silos: Mapping[str, Recalibration]
    is_covered: bool


def find_decisions(evaluation: NoisyEvaluation | None, held_out: HeldOut | None) -> Decisions | None:
    """Return what follows from noisy sums, else from held-out records; None where there are no two classes."""
    if evaluation is not None:
        if not evaluation.has_steps:
            return None
        counts: Sequence[Sequence[float]] = evaluation.counts  # type: ignore[assignment]
        noise, is_covered = evaluation.noise_std, True
    elif held_out is not None and held_out.calibration:
        counts, noise, is_covered = count_by_step(held_out.calibration), 0.0, False
    else:
        return None
    steps = len(counts[1])
    # Of many narrow steps, about ten.
    every = max(1, steps // BINS)
    thresholds = list_thresholds(counts, noise)[every - 1 :: every]
    found, silos = recalibrate(counts, noise), {}
    if evaluation is not None and isinstance(found, Recalibration):
        silos = recalibrate_silos([one for one in evaluation.list_parts(True) if one.counts], found)
    return Decisions(thresholds, found, silos, is_covered)
