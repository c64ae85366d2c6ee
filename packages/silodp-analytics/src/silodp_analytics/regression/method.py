"""Regression as a method: its rounds are the iterations of Newton's method, and no model is trained.

Silos add up one row per person and round, as `uldp-avg` adds up updates, so that noise, weights, masks, gates, charges
and deployments are those of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import torch
from silodp.accounting.events import Event, scale_shift
from silodp.accounting.views import View
from silodp.config.toml_values import to_plain
from silodp.data.inputs import list_arrays
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Bounds, ClippedRows, ClippedRowStream, clip_rows
from silodp.methods.base import LocalContext
from silodp.methods.roles import FederationSize, MethodState
from silodp.methods.uldp import Weighting
from silodp.settings import MAX_CELLS, Count, NoiseMultiplier, Range, check_type
from silodp.text import name_class
from silodp_analytics._count_rows import give_room, iterate_count_rows
from silodp_analytics.regression.design import Design, Feature, refuse_terms
from silodp_analytics.regression.families import FAMILIES, Family, Logistic
from silodp_analytics.regression.newton import MIN_ITERATIONS, Iterations, Path, Rounds
from silodp_analytics.sums.method import SumsMethod

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERS_AT_ONCE = 1 << 22
"""Numbers in the rows that are in memory together."""
_LABELS = {
    "classes": "a label of two classes",
    "real": "one number as the label",
    "survival": "an event and its time as the label",
}


@dataclass(frozen=True, repr=False)
class Regression(SumsMethod):
    """Σ_s Σ_u w[s,u]·(row of u in s) + noise σ·C, C = 1: weights and bounds are those of `uldp-avg`.

    A row of round r is at most s_r ≤ 1 long, by public constants (`newton.Rounds.factors`), so no row is clipped.
    The noise is the same in all rounds: a round costs the event of noise σ/s_r (`dp_event`). The state has the
    sums so far, from which `newton.Rounds.follow` finds the coefficients: whoever sees the sums finds the same ones.

    Attributes:
        noise_multiplier: The multiplier σ of the sum of the last round.
        family: The family with its public constants.
        features: The columns of the schema.
        terms: Their names and products.
        iterations: The number of rounds.
        outcome: The name of the outcome.
        event: The class of the outcome that counts as the event; "" where it has none.
        time: The column of times, for survival; "" else.
        outcome_typical: (center, spread) by which the outcome was standardized; (0, 1): not at all.
        weighting: How a person's weight of 1 is divided among silos; see `UldpAvg`.
        interval: The level of intervals.
    """

    noise_multiplier: NoiseMultiplier
    family: Family = field(default_factory=Logistic)
    features: tuple[Feature, ...] = ()
    terms: tuple[str, ...] = ()
    outcome: str = ""
    iterations: Iterations = MIN_ITERATIONS + 1
    event: str = ""
    time: str = ""
    outcome_typical: tuple[float, float] = (0.0, 1.0)
    interval: Annotated[float, Range(above=0.5, below=1)] = 0.95
    weighting: Weighting = "primary_silo"

    name: str = field(default="regression", init=False)

    can_isolate_units: ClassVar[bool] = True  # sums over a person's own records, in double precision
    can_split: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("family", self.family, Family)
        # A configuration gives lists; a method is hashed.
        for name, kind in (("features", Feature), ("terms", str), ("outcome_typical", (int, float))):
            check_type(name, getattr(self, name), (tuple, list))
            for one in getattr(self, name):
                check_type(name, one, kind)
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.outcome_typical) != 2:
            raise SilodpError(
                f"outcome_typical = {list(self.outcome_typical)}: give [center, spread].",
                code="argument.value",
                field="outcome_typical",
            )
        if self.sum_size(0) > MAX_CELLS:
            size = self.sum_size(0)
            raise refuse_terms(
                f"{self.design.size} coefficients need sums of {size:,} numbers, above {MAX_CELLS:,}: take fewer terms"
            )

    @cached_property
    def design(self) -> Design:
        """The columns."""
        return Design(self.features, self.terms, self.family.baselines)

    @cached_property
    def rounds(self) -> Rounds:
        """The public constants of all iterations."""
        return Rounds(self.design.size, len(self.terms), self.family, self.iterations)

    @property
    def plugin_parts(self) -> tuple[object, ...]:
        """The family, which may be code of strangers."""
        return (self.family,)

    def check(self, data: PublicData, rounds: int, delta: float) -> None:
        """Refuse other numbers of rounds than of iterations, other columns than the records have, and other labels."""
        if rounds != self.iterations:
            raise SilodpError(
                f"rounds = {rounds}: a regression has one round for each iteration; set rounds = {self.iterations}.",
                code="regression.rounds",
                field="rounds",
            )
        for one in self.features:
            one.check(data)
        check_labels(self.family, data)

    def sum_size(self, size: int) -> int:
        """Return the number of entries of a row, whatever the size of the model."""
        return self.rounds.sum_size

    # --- What a round costs, and its noise ---

    def bounds(self, population: FederationSize) -> Bounds:
        """Return the bounds of `uldp-avg`, with the length of the shortest rows."""
        # Fewer steps cost more at the same noise: every round is charged with the steps of the shortest rows.
        shortest = float(self.rounds.scales.min())
        return replace(give_room(super().bounds(population), population), min_clip_ratio=shortest)

    def dp_event(self, view: View) -> Event:
        """Return the event of `uldp-avg` for rows of length s_r: the same noise hides a shift of s_r, not 1."""
        # Rounds beyond the last one are never run; they would cost as much as it.
        scale = float(self.rounds.scales[min(view.round, self.iterations - 1)])
        return scale_shift(super().dp_event(view), scale)

    # --- A round ---

    def initial_state(self, population: FederationSize) -> dict[str, NDArray[Any]]:
        """Return no sums, and coefficients of 0."""
        return {
            "theta": np.zeros(self.design.size),
            "sums": np.zeros((self.iterations, self.rounds.sum_size)),
            "done": np.zeros(1, np.int64),
        }

    def local_update(self, context: LocalContext) -> ClippedRowStream:
        """Return one row for every person of weight above 0."""
        size = self.rounds.sum_size
        theta = (
            np.asarray(context.state["theta"], np.float64) if context.round else np.zeros(self.design.size)
        )
        return ClippedRowStream(
            self._rows(context, theta), size, self.bounds(context.population), weighted=True
        )

    def _rows(self, context: LocalContext, theta: NDArray[np.float64]) -> Iterator[ClippedRows]:
        user = context.user.cpu().numpy()
        weighs = context.weights.cpu().numpy()[user] > 0
        order = np.flatnonzero(weighs)[np.argsort(user[weighs], kind="stable")]
        person = user[order]
        starts = np.flatnonzero(np.diff(person, prepend=-1))
        # Whole persons at a time.
        at_once = max(1, _NUMBERS_AT_ONCE // self.rounds.sum_size)
        ends = [*starts[at_once::at_once], len(person)]
        arrays = {name: array.cpu().numpy() for name, array in list_arrays(context.x).items()}
        labels = context.y.cpu().numpy().astype(np.float64)
        round_ = min(context.round, self.iterations - 1)
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            some = order[first:end]
            features = self.design.scale({name: array[some] for name, array in arrays.items()})
            rows = self.rounds.make_rows(
                features, self.read_outcome(labels[some]), person[first:end], theta, round_
            )
            owners = torch.from_numpy(person[first:end][np.diff(person[first:end], prepend=-1) > 0])
            # No row is longer than this: what adds up rows trusts no other clip.
            yield clip_rows(owners, torch.from_numpy(rows), self.clip)

    def read_outcome(self, labels: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return outcomes (n,) in the units of the table; of survival, event and time (n, 2)."""
        center, spread = self.outcome_typical
        return labels * spread + center

    def split_sum(
        self, total: Tensor, state: MethodState, population: FederationSize
    ) -> tuple[Tensor, dict[str, NDArray[Any]]]:
        """Return the sum, which moves no model, and the state with the coefficients to which all sums lead."""
        if not total.isfinite().all():  # the server then keeps the state
            return total, dict(state)
        done = int(state["done"][0])
        sums = np.array(state["sums"])
        sums[done] = total.numpy()
        path = self.follow(sums[: done + 1], population)
        return total, {"theta": path.theta, "sums": sums, "done": np.array([done + 1], np.int64)}

    def noise_std(self, population: FederationSize) -> float:
        """Return the standard deviation of the noise in each entry of a sum to which all silos add."""
        return float(self.share_multiplier(population.min_survivors) * self.clip * population.silos**0.5)

    def follow(self, sums: NDArray[np.float64], population: FederationSize) -> Path:
        """Return where noisy sums (k, sum_size) lead."""
        return self.rounds.follow(sums, self.noise_std(population))

    def describe_sum(self, total: Tensor, population: FederationSize) -> dict[str, Any]:
        """Return the noisy sum and the deviation of its noise: all that a report computes follows from these."""
        noise_std = self.noise_std(population)
        found = {
            "sum": total.tolist(),
            "noise_std": noise_std,
            "silos": population.silos,
            "method": self.to_table(),
        }
        return {"regression": found}

    def count_classes(self, classes: int) -> tuple[CountedRegression, float]:
        """Return the method whose rows are counts of so many classes, as long as the longest rows of each round."""
        return CountedRegression(
            self.noise_multiplier,
            family=self.family,
            iterations=self.iterations,
            weighting=self.weighting,
            classes=classes,
        ), 1.0

    def to_table(self) -> dict[str, Any]:
        """Return the table [method] from which the method is built again."""
        listed = {one.name: to_plain(getattr(self, one.name)) for one in fields(self) if one.init}
        kind = next((name for name, found in FAMILIES.items() if found is type(self.family)), None)
        listed["family"] = {"name": kind or name_class(type(self.family)), **listed["family"]}
        return {"name": self.name, **{name: value for name, value in listed.items() if value is not None}}


@dataclass(frozen=True, repr=False)
class CountedRegression(Regression):
    """The rounds of a regression with rows that an attack knows: weights, noise and charges are the same.

    Attributes:
        classes: The number of cells; a person's row has the length s_r of the round in the cell of their class.
    """

    classes: Count = 1

    def check(self, data: PublicData, rounds: int, delta: float) -> None:
        """Pass: an attack may play fewer rounds."""

    def sum_size(self, size: int) -> int:
        """Return the number of cells."""
        return self.classes

    def initial_state(self, population: FederationSize) -> dict[str, NDArray[Any]]:
        """Return none: rows depend on no earlier sum."""
        return {}

    def local_update(self, context: LocalContext) -> ClippedRowStream:
        """Return one row for every person with records here."""
        return ClippedRowStream(
            self._count(context), self.classes, self.bounds(context.population), weighted=True
        )

    def _count(self, context: LocalContext) -> Iterator[ClippedRows]:
        persons, unit = torch.unique(context.user.cpu(), return_inverse=True)
        scale = float(self.rounds.scales[min(context.round, self.iterations - 1)])
        for units, rows in iterate_count_rows(unit, context.y.cpu(), self.classes):
            mean = rows / rows.sum(1, keepdim=True)
            yield clip_rows(persons[units], mean * scale, self.clip)

    def split_sum(
        self, total: Tensor, state: MethodState, population: FederationSize
    ) -> tuple[Tensor, dict[str, NDArray[Any]]]:
        """Return the sum, which moves no model."""
        return total, {}

    def describe_sum(self, total: Tensor, population: FederationSize) -> dict[str, Any]:
        """Return nothing: there are no coefficients."""
        return {}


def check_labels(family: Family, data: PublicData) -> None:
    """Refuse labels that a family is not for.

    Raises:
        SilodpError: code regression.outcome.
    """
    name = type(family).__name__.lower()
    if data.labels != family.label or data.targets is not None or data.label_shape:
        raise _refuse_outcome(
            f"the family '{name}' needs {_LABELS[family.label]} (data.schema.kind = '{family.label}')"
        )
    if family.label == "classes" and data.classes != 2:
        raise _refuse_outcome(f"the family '{name}' needs two classes, and the label has {data.classes}")


def _refuse_outcome(problem: str) -> SilodpError:
    return SilodpError(f"regression: {problem}.", code="regression.outcome", field="regression.outcome")
