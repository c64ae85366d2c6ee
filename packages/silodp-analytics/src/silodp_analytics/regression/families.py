"""Families of regression: what a residual, a curvature and their public bounds are. One class a family.

η is the linear predictor in scaled features. It begins at the public guess `typical`, so the first residuals have
bounds of their own, which are smaller. A family has one baseline, the intercept, or several: then a record has an η, a
residual and a curvature for each of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import Registry
from silodp.errors import SilodpError
from silodp.settings import Count, Positive, Range, Settings
from silodp_analytics.times import round_times

Floats = NDArray[np.float64]
INTERCEPT = "(intercept)"
PERSONS = "persons"


@dataclass(frozen=True)
class Corner:
    """How long the score and the curvature of one record can be together.

    Attributes:
        score: Its length, divided by √(1 + terms). With one baseline it is |y − μ|.
        curvature: Its Frobenius norm, divided by 1 + terms. With one baseline it is the derivative of μ.
    """

    score: float
    curvature: float


@dataclass(frozen=True)
class Total:
    """A total over all persons, as the noisy sums of the first iteration tell it.

    Attributes:
        what: For readers, as in "persons".
        value: It, with the noise of a sum.
        error: The standard deviation of that noise.
    """

    what: str
    value: float
    error: float


@dataclass(frozen=True)
class Family(Settings, ABC, prefix="family."):
    """Base class of families: a frozen dataclass of public constants."""

    label: ClassVar[Literal["classes", "real", "survival"]]
    """The kind of the schema's label that it needs."""
    ratio: ClassVar[str | None] = None
    """The name of exp(coefficient); None where it means nothing."""
    unit: ClassVar[str]
    """What a coefficient is the change of, for readers."""
    statsmodels: ClassVar[str]
    """The family of statsmodels by which a center checks its own records."""
    events: ClassVar[str | None] = None
    """What the sum of the outcomes of all persons is, for readers; None where it is not told."""
    same_errors: ClassVar[str] = "GEE of statsmodels and geepack of R"
    """What finds the same standard errors without noise, for readers."""
    early_blocks: ClassVar[tuple[float, float, float]] = (0.7, 0.3, 0.0)
    last_blocks: ClassVar[tuple[float, float, float]] = (0.8, 0.12, 0.08)
    """Weights of score, curvature and M in the squared length of a row, where each is at its longest."""

    @classmethod
    def registry(cls) -> Mapping[str, type[Family]]:
        """Return the classes that `family` may name."""
        return FAMILIES

    @property
    def scale(self) -> float:
        """The unit of the linear predictor, in units of the outcome; 1 for families with a link."""
        return 1.0

    @property
    def baselines(self) -> tuple[str, ...]:
        """The names of the coefficients of no column, K ≥ 1."""
        return (INTERCEPT,)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What readers must know of the numbers besides."""
        return ()

    @property
    @abstractmethod
    def start(self) -> float:
        """The linear predictor of the typical outcome, where the iteration begins."""

    @property
    @abstractmethod
    def first_curvature(self) -> float:
        """The curvature at the start, where all records have the same η."""

    @abstractmethod
    def list_corners(self, terms: int, *, is_first: bool) -> list[Corner]:
        """Return corners so that no record has a longer score and curvature than some point between them.

        Args:
            terms: The number of terms, at least 1; each is at most 1 long.
            is_first: Whether η is that of the start.
        """

    def restart(self, mean: float) -> tuple[float, float, float] | None:
        """Return the mean outcome (nearest possible one), and its η and curvature; None: the start is as good.

        At one η of all records, sums follow from those at another: so the first sums serve for the η of the mean
        outcome. Each baseline has a mean of its own.
        """
        return None

    @property
    def expected_curvatures(self) -> tuple[float, ...]:
        """The curvature of a typical record in each baseline (K,), by the public guess alone."""
        return (self.first_curvature,)

    @property
    def first_mean(self) -> float:
        """μ at the start, in the unit of residuals."""
        return 0.0

    def list_totals(
        self, score: Floats, curvature: Floats, score_std: float, curvature_std: float
    ) -> list[Total]:
        """Return what sums at the start, where all records have the same η, say of all persons.

        Args:
            score: Those of residuals, by baseline (K,).
            curvature: Those of curvatures, by baseline (K,).
            score_std, curvature_std: The deviation of the noise in one of them.
        """
        by, mean = self.first_curvature, self.first_mean
        persons = Total(PERSONS, float(curvature[0]) / by, curvature_std / by)
        if self.events is None:
            return [persons]
        value, error = float(score[0]) + mean * persons.value, math.hypot(score_std, mean * persons.error)
        return [persons, Total(self.events, value, error)]

    def write_check(self, outcome: str, event: str, time: str) -> tuple[list[str], str, str]:
        """Return lines of Python that make the outcome of records, its name there, and further arguments of GLM.

        Args:
            outcome: The column of the outcome.
            event: The class that counts as the event; "" where there is none.
            time: The column of times; "" where there is none.
        """
        column = f"table[{outcome!r}]"
        return [], f"({column} == {event!r}).astype(float)" if event else column, ""

    def name_predictions(self, event: str) -> tuple[str, ...]:
        """Return the names of the numbers that `predict` returns, for an event."""
        return ("prediction",)

    @abstractmethod
    def predict(self, eta: Floats, middle: Floats) -> Floats:
        """Return what is predicted of records (n, numbers).

        Args:
            eta: (n, K).
            middle: η of a record in the middle of all ranges and in the first categories (K,).
        """

    @abstractmethod
    def compare(self, outcome: Floats, eta: Floats) -> tuple[Floats, Floats]:
        """Return residual y − μ and curvature of every record and baseline (n, K), within the limits for any outcome.

        Args:
            outcome: (n, 1); for survival event and time (n, 2).
            eta: (n, K).
        """


@dataclass(frozen=True)
class Logistic(Family):
    """Log odds of an outcome of two classes.

    Attributes:
        typical: A public guess of the share of records with the event.
    """

    typical: Annotated[float, Range(least=0.001, most=0.999)] = 0.5

    label = "classes"
    ratio = "odds ratio"
    events = "events (a person's records count by their share)"
    unit = "log odds"
    statsmodels = "sm.families.Binomial()"
    early_blocks = (1.0, 0.7, 0.0)
    last_blocks = (0.92, 0.7, 0.08)

    @property
    def start(self) -> float:
        """The log odds of the typical share."""
        return math.log(self.typical / (1 - self.typical))

    @property
    def first_mean(self) -> float:
        """The typical share."""
        return self.typical

    def restart(self, mean: float) -> tuple[float, float, float]:
        """Return the share of events, kept away from 0 and 1, with its log odds and variance."""
        share = min(max(mean, 0.01), 0.99)
        return share, math.log(share / (1 - share)), share * (1 - share)

    @property
    def first_curvature(self) -> float:
        """The variance at the typical share."""
        return self.typical * (1 - self.typical)

    def list_corners(self, terms: int, *, is_first: bool) -> list[Corner]:
        """Return the distance of the typical share from 0 and 1, and its variance; later, ends of tangents.

        A residual e of 1 has no curvature, and one of 1/2 the largest. All (|e|, |e|(1 − |e|)) lie below tangents of
        this curve, of which those at a and b meet at (a + b)/2.
        """
        if is_first:
            return [Corner(max(self.typical, 1 - self.typical), self.first_curvature)]
        ends = pairwise(np.linspace(0.5, 1.0, 9).tolist())
        return [*(Corner((a + b) / 2, (a + b) / 2 - a * b) for a, b in ends), Corner(1.0, 0.0)]

    def name_predictions(self, event: str) -> tuple[str, ...]:
        """Return that of the event."""
        return (f"probability_{event}",)

    def predict(self, eta: Floats, middle: Floats) -> Floats:
        """Return the probability of the event."""
        # tanh neither overflows nor warns.
        mean: Floats = 0.5 * (1 + np.tanh(eta / 2))
        return mean

    def compare(self, outcome: Floats, eta: Floats) -> tuple[Floats, Floats]:
        """Return y − μ and μ(1 − μ)."""
        mean = self.predict(eta, eta)
        return outcome - mean, mean * (1 - mean)


@dataclass(frozen=True)
class Linear(Family):
    """Means of a number. Residuals beyond a declared bound count as that bound (Huber).

    Attributes:
        residual: The largest residual that counts in full, in units of the outcome.
        typical: A public guess of the mean outcome.
    """

    residual: Positive
    typical: float = 0.0

    label = "real"
    unit = "outcome"
    statsmodels = "sm.families.Gaussian()"

    @property
    def scale(self) -> float:
        """The bound of residuals: in its unit they are at most 1."""
        return self.residual

    @property
    def start(self) -> float:
        """The typical outcome."""
        return self.typical / self.residual

    @property
    def first_curvature(self) -> float:
        """1."""
        return 1.0

    def list_totals(
        self, score: Floats, curvature: Floats, score_std: float, curvature_std: float
    ) -> list[Total]:
        """Return the persons whose outcome lies within the bound of the typical one: others have no curvature."""
        (persons,) = super().list_totals(score, curvature, score_std, curvature_std)
        within = f"persons whose outcome lies within {self.residual:g} of {self.typical:g}"
        return [Total(within, persons.value, persons.error)]

    def list_corners(self, terms: int, *, is_first: bool) -> list[Corner]:
        """Return 1 and 1."""
        return [Corner(1.0, 1.0)]

    def predict(self, eta: Floats, middle: Floats) -> Floats:
        """Return the mean outcome."""
        return eta * self.scale

    def compare(self, outcome: Floats, eta: Floats) -> tuple[Floats, Floats]:
        """Return the cut residual, and 1 where it is not cut."""
        residual = outcome / self.residual - eta
        return np.clip(residual, -1, 1), (np.abs(residual) <= 1).astype(np.float64)


@dataclass(frozen=True)
class Poisson(Family):
    """Log rates of a count.

    Attributes:
        largest: The largest count that counts in full; larger ones, and larger means, count as it.
        typical: A public guess of the mean count.
    """

    largest: Count
    typical: Positive = 1.0

    label = "real"
    ratio = "rate ratio"
    events = "events (of a person, the mean over their records)"
    unit = "log rate"
    statsmodels = "sm.families.Poisson()"

    @property
    def start(self) -> float:
        """The logarithm of the typical count."""
        return math.log(self.first_mean)

    @property
    def first_mean(self) -> float:
        """The typical count."""
        return min(self.typical, float(self.largest))

    def restart(self, mean: float) -> tuple[float, float, float]:
        """Return the mean count within a factor of 100 of the typical one, its logarithm, and its variance."""
        count = min(max(mean, self.first_mean / 100), 100 * self.first_mean, float(self.largest))
        return count, math.log(count), count

    @property
    def first_curvature(self) -> float:
        """The typical count."""
        return self.first_mean

    def list_corners(self, terms: int, *, is_first: bool) -> list[Corner]:
        """Return the distance of the typical count from 0 and from the largest, and its variance; later, the largest
        twice."""
        mean = self.first_mean
        if is_first:
            return [Corner(max(mean, self.largest - mean), mean)]
        return [Corner(float(self.largest), float(self.largest))]

    def predict(self, eta: Floats, middle: Floats) -> Floats:
        """Return the mean count."""
        mean: Floats = np.exp(np.minimum(eta, 600.0))
        return mean

    def compare(self, outcome: Floats, eta: Floats) -> tuple[Floats, Floats]:
        """Return y − μ and μ, both y and μ cut to the largest count."""
        mean = np.exp(np.minimum(eta, math.log(self.largest)))
        return np.clip(outcome, 0, self.largest) - mean, mean


@dataclass(frozen=True)
class Survival(Family):
    """Log hazards of an event, with a rate of its own in each of some intervals (piecewise exponential).

    It is the model of Cox where intervals are short. A record is followed to the horizon, or to the time at which its
    expected number of events by the model reaches `largest_hazard`. What comes later counts for nothing, an event
    too: so the score keeps mean zero, which it would not if expected numbers alone were cut.

    Attributes:
        horizon: The time at which all follow-up ends, in the unit of the time column.
        cuts: The times at which one interval ends and the next one begins, ascending.
        largest_hazard: The expected number of events at which a record's follow-up ends; None: twice that of the
            typical share, from 0.1 to 0.8. A smaller one costs the events behind it, a larger one more noise.
        typical: A public guess of the share of records with the event by the horizon.
    """

    horizon: Positive
    cuts: tuple[float, ...] = ()
    largest_hazard: Annotated[float, Range(least=0.05, most=100)] | None = None
    typical: Annotated[float, Range(least=0.001, most=0.999)] = 0.3

    label = "survival"
    ratio = "hazard ratio"
    unit = "log hazard"
    statsmodels = "sm.families.Poisson()"
    same_errors = "coxph of R with cluster(), for many short intervals"
    early_blocks = (1.0, 0.5, 0.0)
    last_blocks = (0.92, 0.5, 0.08)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "cuts", tuple(map(float, self.cuts)))
        if not all(a < b for a, b in pairwise(self._rounded_edges)):
            raise SilodpError(
                f"cuts = {list(self.cuts)[:5]}: give ascending times between 0 and horizon = {self.horizon:g}.",
                code="argument.value",
                field="family.cuts",
            )

    @property
    def edges(self) -> tuple[float, ...]:
        """The ends of all intervals, from 0 to the horizon (K + 1,)."""
        return (0.0, *self.cuts, float(self.horizon))

    @property
    def most_events(self) -> float:
        """The expected number of events at which a record's follow-up ends."""
        if self.largest_hazard is not None:
            return self.largest_hazard
        return min(max(-2 * math.log1p(-self.typical), 0.1), 0.8)

    @property
    def _rounded_edges(self) -> Floats:
        """The ends as times of records are compared with them."""
        return round_times(self.edges).astype(np.float64)

    @property
    def baselines(self) -> tuple[str, ...]:
        """One for each interval."""
        return tuple(f"(rate {low:g} to {high:g})" for low, high in pairwise(self.edges))

    @property
    def remarks(self) -> tuple[str, ...]:
        """How ties, late times and large hazards count."""
        return (
            "Hazards are proportional, and constant within an interval. Equal times count as by Breslow's method. R "
            "and lifelines use Efron's, which differs where many times are equal.",
            f"Follow-up of a record ends at {self.horizon:g}, or where the model expects {self.most_events:.3g} "
            "events of it. An event at time 0 counts in the first interval.",
        )

    @property
    def start(self) -> float:
        """The logarithm of the typical rate."""
        return math.log(self.first_mean / self.horizon)

    @property
    def first_mean(self) -> float:
        """The typical cumulative hazard at the horizon."""
        return min(-math.log1p(-self.typical), self.most_events)

    def restart(self, mean: float) -> tuple[float, float, float]:
        """Return a cumulative hazard at the horizon, within a factor of 100 of the typical one, and its log rate."""
        hazard = min(max(mean, self.first_mean / 100), 100 * self.first_mean)
        return hazard, math.log(hazard / self.horizon), hazard

    @property
    def expected_curvatures(self) -> tuple[float, ...]:
        """The share of records with the event in each interval, at the typical rate."""
        left = [math.exp(-self.first_mean * edge / self.horizon) for edge in self.edges]
        return tuple(before - after for before, after in pairwise(left))

    @property
    def first_curvature(self) -> float:
        """The typical cumulative hazard: the curvature of a record that is followed to the horizon."""
        return self.first_mean

    def list_totals(
        self, score: Floats, curvature: Floats, score_std: float, curvature_std: float
    ) -> list[Total]:
        """Return events, and the time at risk: expected events at the typical rate, divided by it."""
        k, rate = len(curvature), self.first_mean / self.horizon
        expected = float(curvature.sum())
        return [
            Total(
                "events", float(score.sum()) + expected, math.sqrt(k) * math.hypot(score_std, curvature_std)
            ),
            Total("time at risk", expected / rate, math.sqrt(k) * curvature_std / rate),
        ]

    def list_corners(self, terms: int, *, is_first: bool) -> list[Corner]:
        """Return the ends of what expected events c ≥ 0 of all intervals, Σc ≤ A, and at most one event d can be.

        The score is (d − c, (Σd − Σc)·x), the curvature Σ_k c_k·(1_k, x)(1_k, x)ᵀ. Both are linear in c, so the longest
        rows are at c = 0 or where one interval has all of A: that of the event or another one.
        """
        most = self.first_mean if is_first else self.most_events
        elsewhere = (1 + most**2 + (1 - most) ** 2 * terms) / (1 + terms)
        with_event = math.sqrt(elsewhere) if self.cuts else abs(1 - most)
        return [Corner(1.0, 0.0), Corner(most, most), Corner(with_event, most)]

    def write_check(self, outcome: str, event: str, time: str) -> tuple[list[str], str, str]:
        """Return lines that split records at the ends of intervals, as the model counts them."""
        lines = [
            f"time, edges = table[{time!r}].to_numpy(float), np.array({list(self.edges)})",
            "exposure = np.clip(time[:, None] - edges[:-1], 0, np.diff(edges))",
            f"event = (table[{outcome!r}].to_numpy(float)[:, None] == 1) & (exposure > 0)",
            "event &= (time[:, None] > edges[:-1]) & (time[:, None] <= edges[1:])",
            "record, interval = np.nonzero(exposure)  # a row for each interval that a record enters",
            "exposure, event = exposure[record, interval], event[record, interval].astype(float)",
            "rates = np.eye(len(edges) - 1)[interval]",
            "X = np.column_stack([rates, X.to_numpy()[record]])  # log rates come first",
            "person, weight = person[record], weight[record]",
        ]
        return lines, "event", ", exposure=exposure"

    def name_predictions(self, event: str) -> tuple[str, ...]:
        """Return the risk by the horizon, and the hazard ratio to a record in the middle."""
        return (f"risk_by_{self.horizon:g}", "hazard_ratio")

    def predict(self, eta: Floats, middle: Floats) -> Floats:
        """Return the probability of an event by the horizon, and the hazard ratio to a record in the middle."""
        hazard = np.exp(np.minimum(eta, 600.0)) @ np.diff(self.edges)
        return np.stack([-np.expm1(-hazard), np.exp(eta[:, 0] - middle[0])], axis=1)

    def compare(self, outcome: Floats, eta: Floats) -> tuple[Floats, Floats]:
        """Return events less expected events, and expected events, of every interval."""
        event, time = outcome[:, :1] > 0.5, outcome[:, 1:]
        # An interval has its end and not its beginning, as risk sets do.
        edges = self._rounded_edges
        low, high = edges[:-1], edges[1:]
        most = self.most_events
        # No exponential overflows, and a sum is above the limit where it was.
        whole = np.minimum(np.clip(time - low, 0, high - low) * np.exp(np.minimum(eta, 600.0)), 2 * most)
        total = np.cumsum(whole, axis=1)
        expected = np.clip(most - (total - whole), 0, whole)
        is_in = (time > np.where(low > 0, low, -np.inf)) & (time <= high)
        events = event & is_in & (total[:, -1:] <= most)
        return events - expected, expected


FAMILIES: Registry[type[Family]] = Registry(
    "regression_families",
    {
        "logistic": "silodp_analytics.regression.families:Logistic",
        "linear": "silodp_analytics.regression.families:Linear",
        "poisson": "silodp_analytics.regression.families:Poisson",
        "survival": "silodp_analytics.regression.families:Survival",
    },
)
"""The families by their names in a configuration."""
