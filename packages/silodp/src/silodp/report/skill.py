"""Whether a model predicts better than one constant for everybody: the verdict that output, pages and cards share.

It is decided here alone, from a measurement on held-out records that no ε covers, or from noisy counts that ε covers. A
verdict is as private as what it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import FiniteFloat

from silodp.report.estimates import find_error, find_evaluation
from silodp.report.formatting import Z_95, format_measure
from silodp.runtime.model_description import DESCRIPTION, ModelDescription
from silodp.runtime.run_files import METRICS, read_metrics
from silodp.text import join_names, pluralize

if TYPE_CHECKING:
    from silodp.report.held_out import HeldOut
    from silodp.training.skill import RecordSkill

Verdict = Literal["better", "unclear", "worse"]
SkillCode = Literal["better", "order_only", "unclear", "worse", "equal"]

FEWEST_PERSONS = 10
"""Fewer persons can agree by chance, whatever their errors seem to be."""
_WRONG_FACTOR = 1.25
"""Mean probabilities that are wrong by more than this factor are told."""
_WRONG_SPREADS = 0.25
"""Mean numbers that are wrong by more than this part of the standard deviation of the labels are told."""
PUBLIC_CONSTANTS = {"roc_auc": 0.5, "concordance": 0.5, "r2": 0.0}
"""Metric → what a constant has, whatever the records."""
_CONSTANTS = {
    "roc_auc": "chance",
    "concordance": "chance",
    "accuracy": "the most frequent class",
    "log_loss": "the frequencies alone",
    "brier_score": "the frequencies alone",
    "r2": "the mean alone",
}
"""Metric → what the constant knows."""
_HEADS: dict[SkillCode, str] = {
    "better": "The model predicts better than a constant",
    "order_only": "The model orders records better than chance, but its probabilities are",
    "unclear": "The model is not clearly better than a constant prediction",
    "worse": "The model is worse than a constant prediction",
    "equal": "The model predicts almost the same for everybody",
}


@dataclass(frozen=True)
class Comparison:
    """A metric of the model beside that of the constant.

    Attributes:
        metric: Its name.
        value: That of the model.
        constant: That of the constant.
        gain: How much better the model is; below 0 where it is worse.
        reach: Half the width of the 95 % interval of the gain; None where there are too few persons.
    """

    metric: str
    value: FiniteFloat
    constant: FiniteFloat
    gain: FiniteFloat
    reach: FiniteFloat | None

    @property
    def verdict(self) -> Verdict:
        """Whether the gain is clear of 0."""
        if self.reach is None or abs(self.gain) <= self.reach:
            return "unclear"
        return "better" if self.gain > 0 else "worse"


@dataclass(frozen=True)
class Offset:
    """What is predicted on average, beside what is true on average.

    Attributes:
        label: The name of the class or the label.
        predicted: The mean of the predicted probabilities, or numbers.
        observed: The share of the records that have the class, or the mean of the labels.
        reach: Half the width of the 95 % interval of the difference; None where there are too few persons.
        spread: The standard deviation of labels that are numbers; None for probabilities.
    """

    label: str
    predicted: FiniteFloat
    observed: FiniteFloat
    reach: FiniteFloat | None
    spread: FiniteFloat | None = None

    @property
    def verdict(self) -> Literal["too_small", "too_large"] | None:
        """Whether predictions are clearly, and by much, too small or too large."""
        difference = self.predicted - self.observed
        if self.reach is None or abs(difference) <= self.reach:
            return None
        low, high = sorted((self.predicted, self.observed))
        is_much = (
            high > _WRONG_FACTOR * low if self.spread is None else high - low > _WRONG_SPREADS * self.spread
        )
        return ("too_small" if difference < 0 else "too_large") if is_much else None


@dataclass(frozen=True)
class Skill:
    """What a model predicts better than a constant.

    Attributes:
        comparisons: How well records are told apart, and how good probabilities are.
        offsets: Predictions on average.
        is_equal: Whether all predictions are equal.
        persons: The number of persons whose records were held out; None where it is not known.
    """

    comparisons: tuple[Comparison, ...]
    offsets: tuple[Offset, ...] = ()
    is_equal: bool = False
    persons: int | None = None

    @property
    def code(self) -> SkillCode:
        """The verdict."""
        if self.is_equal:
            return "equal"
        order, probabilities = self._find("order"), self._find("probabilities")
        if order == "better" and probabilities in (None, "better"):
            return "better"
        if order == "better":
            return "order_only"
        if probabilities == "better":
            return "better"
        return "worse" if "worse" in (order, probabilities) else "unclear"

    def _find(self, kind: Literal["order", "probabilities"]) -> Verdict | None:
        """Return the verdict of the first metric of a kind; None where there is none."""
        names = (
            ("log_loss", "brier_score")
            if kind == "probabilities"
            else ("roc_auc", "concordance", "r2", "accuracy")
        )
        known = {one.metric: one.verdict for one in self.comparisons}
        return next((known[name] for name in names if name in known), None)

    def to_dict(self) -> dict[str, Any]:
        """Return all values, JSON-ready."""
        return {
            "code": self.code,
            "persons": self.persons,
            "comparisons": [{**asdict(one), "verdict": one.verdict} for one in self.comparisons],
            "calibration": [{**asdict(one), "verdict": one.verdict} for one in self.offsets],
        }

    @property
    def head(self) -> str:
        """The verdict as the beginning of a sentence."""
        if self.code == "order_only":
            is_worse = self._find("probabilities") == "worse"
            return f"{_HEADS[self.code]} {'worse' if is_worse else 'not clearly better'} than a constant prediction"
        return _HEADS[self.code]

    def find_constant(self, quantity: str, value: float) -> float | None:
        """Return what the constant has in place of a measured quantity; None where that is not known.

        Args:
            quantity: The name of a metric, or "loss".
            value: What the model has: a loss that is no log loss has another value.
        """
        for one in self.comparisons:
            is_loss = (quantity, one.metric) == ("loss", "log_loss") and math.isclose(
                value, one.value, rel_tol=1e-3
            )
            if is_loss or one.metric == quantity:
                return one.constant
        return None

    def describe(self) -> list[str]:
        """Return the verdict as sentences: the model beside a constant, then what predictions are on average."""
        found = self.describe_measures()
        return [f"{self.head}{': ' if found else ''}{found}.", *self.describe_calibration()]

    def describe_published(self, names: Collection[str]) -> str:
        """Return the verdict with metrics of these names alone, beside constants that no record tells."""
        known = [one for one in self.comparisons if one.metric in names and one.metric in PUBLIC_CONSTANTS]
        found = join_names(map(_describe_comparison, known))
        return f"{self.head}{': ' if found else ''}{found}."

    def describe_measures(self) -> str:
        """Return the measures beside those of the constant, as the end of a sentence; "" where there are none."""
        found = join_names(_describe_comparison(one) for one in self.comparisons)
        if not found or self.persons is None:
            return found
        few = ", too few to tell" if self.persons < FEWEST_PERSONS else ""
        return f"{found}, by the held-out records of {pluralize(self.persons, 'person')}{few}"

    def describe_calibration(self) -> list[str]:
        """Return a sentence for each class or label whose predictions are too small, or too large."""
        return [text for text in map(_describe_offset, self.offsets) if text is not None]


def _describe_comparison(one: Comparison) -> str:
    reach = "" if one.reach is None else f" ± {one.reach:.2g}"
    return f"{one.metric} {format_measure(one.value)}{reach} ({_CONSTANTS[one.metric]}: {format_measure(one.constant)})"


def _describe_offset(one: Offset) -> str | None:
    """Return the sentence on predictions that are too small or too large; None where they are not."""
    if one.verdict is None:
        return None
    way = one.verdict.replace("_", " ")
    if one.spread is not None:
        off = abs(one.predicted - one.observed)
        return (
            f"Predictions{f' of {one.label}' if one.label else ''} are {way} by {format_measure(off)} on average: "
            f"{format_measure(one.predicted)}, where the mean is {format_measure(one.observed)}."
        )
    low, high = sorted((one.predicted, one.observed))
    times = f"about {high / low:.2g} times " if low > 0 else ""
    return (
        f"Predicted probabilities of {one.label} are {times}{way}: {one.predicted:.2g} on average, where it is "
        f"{one.observed:.2g} of the records."
    )


def find_skill(held_out: HeldOut | None, evaluation: Any, classes: Sequence[str] = ()) -> Skill | None:
    """Return the verdict on the model of a run: by held-out records, else by noisy counts; None where it is not known.

    Args:
        held_out: What was measured on held-out records, which no ε covers.
        evaluation: The last evaluation by noisy sums.
        classes: The names of the classes.
    """
    if held_out is not None:
        return held_out.skill
    return None if evaluation is None else assess_counts(evaluation, classes)


def read_skill(directory: Path) -> Skill | None:
    """Return the verdict on the model in a directory, by the files that are there; None where none tells.

    Raises:
        SilodpError: a file is damaged.
    """
    from silodp.report.held_out import read_held_out

    metrics, description = directory / METRICS, directory / DESCRIPTION
    rows = read_metrics(metrics, may_be_cut_off=True) if metrics.exists() else []
    classes = ModelDescription.read(description).classes if description.exists() else ()
    return find_skill(read_held_out(directory), find_evaluation(rows), classes)


def average_skills(skills: Sequence[Skill]) -> Skill | None:
    """Return the verdict on the mean of several runs that were measured on the same held-out records; None without any.

    The intervals are those of the sample: they say nothing of other runs.
    """
    if not skills:
        return None
    comparisons = [
        Comparison(
            several[0].metric,
            float(np.mean([one.value for one in several])),
            several[0].constant,
            float(np.mean([one.gain for one in several])),
            _average_reach([one.reach for one in several]),
        )
        for several in zip(*(one.comparisons for one in skills), strict=True)
    ]
    offsets = [
        replace(
            each[0],
            predicted=float(np.mean([one.predicted for one in each])),
            reach=_average_reach([one.reach for one in each]),
        )
        for each in zip(*(one.offsets for one in skills), strict=True)
    ]
    is_equal = all(one.is_equal for one in skills)
    return Skill(tuple(comparisons), tuple(offsets), is_equal, skills[0].persons)


def _average_reach(reaches: Sequence[float | None]) -> float | None:
    """Return the reach of a mean over runs that were measured on the same sample."""
    known = [one for one in reaches if one is not None]
    return float(np.mean(known)) if len(known) == len(reaches) else None


# --- from held-out records --------------------------------------------------------------------------------------------


def assess_records(measured: RecordSkill, users: NDArray[np.int64], names: Sequence[str] = ()) -> Skill:
    """Return the verdict on what was measured record by record; persons, not records, are the sample.

    Args:
        measured: From `measure_skill`.
        users: (n,) whose record it is; −1 is a person of its own.
        names: The names of the classes or labels; their numbers where there are none.
    """
    from scipy.special import stdtrit

    own = np.where(users < 0, np.arange(len(users)) + users.max(initial=0) + 1, users)
    _, person = np.unique(own, return_inverse=True)
    persons = int(person.max(initial=-1)) + 1
    factor = float(stdtrit(persons - 1, 0.975)) if persons >= FEWEST_PERSONS else None

    def find_reach(influence: NDArray[np.float64], least: float = 0.0) -> float | None:
        sums = np.bincount(person, influence, persons)
        error = math.sqrt(persons / max(persons - 1, 1) * float((sums**2).sum()))
        return None if factor is None else factor * max(error, least)

    least = (
        0.0
        if measured.event is None
        else _find_least_error(
            person, measured.event, "concordance" in {one.metric for one in measured.gains}
        )
    )
    comparisons = []
    for one in measured.gains:
        gain = one.constant - one.value if one.metric == "log_loss" else one.value - one.constant
        is_order = one.metric in ("roc_auc", "concordance")
        comparisons.append(
            Comparison(one.metric, one.value, one.constant, gain, find_reach(one.influence, least * is_order))
        )
    offsets = tuple(
        Offset(
            str(names[one.label] if one.label < len(names) else one.label),
            one.predicted,
            one.observed,
            find_reach(one.influence),
            one.spread,
        )
        for one in measured.balances
    )
    return Skill(tuple(comparisons), offsets, measured.is_equal, persons)


def _find_least_error(person: NDArray[np.int64], event: NDArray[np.bool_], is_survival: bool) -> float:
    """Return the standard deviation that the order of persons has by chance, where few have an event, or few have none.

    A model that orders three persons right has no error within the sample, and may have done so by chance.

    Source: Mann and Whitney 1947.
    """
    with_event = len(np.unique(person[event]))
    others = len(np.unique(person if is_survival else person[~event]))
    if min(with_event, others) >= FEWEST_PERSONS:
        return 0.0
    if min(with_event, others) == 0:
        return 0.5
    return math.sqrt((with_event + others + 1) / (12 * with_event * others))


# --- from noisy counts ------------------------------------------------------------------------------------------------


def assess_counts(evaluation: Any, names: Sequence[str] = ()) -> Skill | None:
    """Return the verdict on an evaluation by noisy sums, at no further ε; None where no metric of it has a constant.

    Args:
        evaluation: The evaluation.
        names: The names of the classes.
    """
    comparisons = [
        Comparison(name, one.value, constant, one.value - constant, Z_95 * find_error(one))
        for name, constant in PUBLIC_CONSTANTS.items()
        if (one := evaluation.estimates.get(name)) is not None
    ]
    offsets: list[Offset] = []
    if evaluation.confusion is not None and "accuracy" in evaluation.estimates:
        comparisons.append(_compare_accuracy(evaluation))
        if evaluation.has_steps and (found := _compare_steps(evaluation, names)) is not None:
            comparisons.append(found[0])
            offsets.append(found[1])
    return Skill(tuple(comparisons), tuple(offsets)) if comparisons else None


def _compare_accuracy(evaluation: Any) -> Comparison:
    """Return the accuracy beside that of the most frequent class."""
    table = np.asarray(evaluation.confusion, float)
    total, classes = float(table.sum()), len(table)
    often = int(table.sum(1).argmax())
    # The two differ in the cells of right predictions of other classes, and of wrong ones of the most frequent class.
    signs = np.eye(classes)
    signs[often] -= 1
    gain = float((signs * table).sum()) / total
    inside = np.asarray(evaluation.counts, float).size / classes**2 if evaluation.has_steps else 1.0
    noise = evaluation.noise_std * math.sqrt(inside * float((signs**2).sum()))
    sample = max(float((signs**2 * table).sum()) - gain**2 * total, 0.0)
    reach = Z_95 * math.sqrt(noise**2 + sample) / total
    value = float(table.trace()) / total
    return Comparison("accuracy", value, value - gain, gain, reach)


def _compare_steps(evaluation: Any, names: Sequence[str]) -> tuple[Comparison, Offset] | None:
    """Return the Brier score and the mean of predictions, taken to be in the middle of their steps; None: lost.

    The widths of the steps are added to the reach: nobody knows where in its step a prediction is.
    """
    table = np.asarray(evaluation.counts, float)  # (2, B), by class and step
    total, steps, noise = float(table.sum()), table.shape[1], evaluation.noise_std
    if total <= 3 * noise * math.sqrt(table.size):
        return None
    middle, half = (np.arange(steps) + 0.5) / steps, 0.5 / steps
    share = min(max(float(table[1].sum()) / total, 0.0), 1.0)

    def measure(values: NDArray[np.float64]) -> tuple[float, float]:
        """Return the mean over records of what a record in each cell counts for, and the reach of its 95 % interval."""
        mean = float((table * values).sum()) / total
        noise_of_mean = noise * math.sqrt(float(((values - mean) ** 2).sum())) / total
        sample = max(float((table * (values - mean) ** 2).sum()) / total, 0.0) / total
        return mean, Z_95 * math.sqrt(noise_of_mean**2 + sample)

    wrong = np.stack([middle, 1 - middle])
    constant = np.stack([np.full(steps, share), np.full(steps, 1 - share)])
    gain, reach = measure(constant**2 - wrong**2)
    # A prediction is off the middle by up to half a step, which changes (p − y)² by 2(p − y)·half, and half².
    slack = 2 * half * float(np.abs((np.stack([middle, middle - 1]) * table).sum(0)).sum()) / total + half**2
    brier = share * (1 - share)
    off, reach_of_off = measure(np.stack([middle, middle - 1]))
    label = str(evaluation.name_classes(names)[1])
    return (
        Comparison("brier_score", brier - gain, brier, gain, reach + slack),
        Offset(label, share + off, share, reach_of_off + half),
    )
