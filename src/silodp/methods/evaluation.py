"""Evaluation on the silos' held-out records, written as a method, so that noise, masks and charges are those of a run.

By sums: silos add up a table of counts (`silodp.training.counts`). What one unit adds to it is clipped, silos add noise
to their sums, and an evaluation is charged like a round of training. Locally: every silo evaluates the model by itself
and sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import numpy as np

from silodp._lazy import torch
from silodp.accounting.events import Composed, Event, Gaussian
from silodp.accounting.views import Unit, View
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Bounds, ClippedRows, ClippedRowStream, LocallyNoisedUpdate, clip_rows
from silodp.methods._count_rows import give_room, iterate_count_rows
from silodp.methods.base import ALL_NOISE_KNOWN, NO_NOISE, LocalContext, Method
from silodp.methods.roles import FederationSize
from silodp.methods.uldp import UldpAvg
from silodp.settings import Clip, Count, Epsilon, Named, NoiseMultiplier, Settings
from silodp.training.counts import CountTable

Across = Literal["none", "local", "sums"]

NOTHING: Event = Composed(())
"""The event of an evaluation in which nothing leaves a silo."""


@dataclass(frozen=True)
class Evaluation(Settings, prefix="evaluation."):
    """How a model is evaluated on the held-out records of the silos; all of it is public.

    Attributes:
        across: The kind of evaluation: "none"; "local", where every silo evaluates the released models on its records
            and sends nothing; "sums", noisy sums of counts over all silos, which are charged.
        every: The number of rounds from one evaluation to the next; None evaluates only after the last round.
        noise_multiplier: The multiplier σ of an evaluation by sums, in units of `clip`.
        epsilon: The ε that one evaluation costs by itself, against whoever sees the metrics; it is given instead of
            `noise_multiplier`.
        clip: The 2-norm C that one unit's counts are clipped to; with 1, one record of a person counts in full.
        bins: The number of bins of scores, which is even.
        times: The edges between bins of survival times, ascending.
    """

    across: Annotated[Across, Named("across")]
    every: Count | None = None
    noise_multiplier: NoiseMultiplier | None = None
    epsilon: Epsilon | None = None
    clip: Clip = 1.0
    bins: int = 10
    times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        # A configuration gives a list; the table of cells compares and hashes a tuple.
        object.__setattr__(self, "times", tuple(float(time) for time in self.times))
        # Made only to check bins and times, with the messages of the class that uses them.
        CountTable("survival", bins=self.bins, times=self.times)
        self._check_used()
        given = self.noise_multiplier is not None, self.epsilon is not None
        if self.across == "sums" and sum(given) != 1:
            raise SilodpError(
                'evaluation across = "sums" needs noise: set either noise_multiplier or epsilon.',
                code="evaluation.noise",
                field="evaluation.noise_multiplier",
            )

    def _check_used(self) -> None:
        """Refuse settings without effect: noise that nobody adds looks like protection."""
        used = {"none": ("across",), "local": ("across", "every"), "sums": tuple(self.__dataclass_fields__)}
        for name, declared in self.__dataclass_fields__.items():
            if name not in used[self.across] and getattr(self, name) != declared.default:
                raise SilodpError(
                    f'evaluation.{name} = {getattr(self, name)} has no effect with across = "{self.across}": take it '
                    "out, or change across.",
                    code="argument.conflict",
                    field=f"evaluation.{name}",
                )

    @property
    def adds_sums(self) -> bool:
        """Whether silos add up counts, which costs ε."""
        return self.across == "sums"

    def is_due(self, round_: int, is_last: bool) -> bool:
        """Return whether the model after so many rounds is evaluated."""
        if self.across == "none" or round_ == 0:
            return False
        return is_last or (self.every is not None and round_ % self.every == 0)

    def count(self, rounds: int) -> int:
        """Return how many evaluations a run of so many rounds has."""
        if self.across == "none" or rounds == 0:
            return 0
        return 1 if self.every is None else math.ceil(rounds / self.every)


@dataclass(frozen=True, repr=False)
class EvaluationMethod(Method):
    """Base of both kinds of evaluation: a request carries the model, and how many rounds led to it.

    Attributes:
        unit: The unit that the run protects.
    """

    unit: Unit | None = "user"

    ROUNDS: ClassVar[str] = "rounds"

    def initial_state(self, population: FederationSize) -> dict[str, np.ndarray]:
        """Return what a request carries beside the model: the number of rounds that led to it."""
        return {self.ROUNDS: np.zeros(1, np.int64)}


@dataclass(frozen=True, repr=False)
class LocalEvaluation(EvaluationMethod):
    """Silos get the released model, evaluate it by themselves, and answer with nothing."""

    name: str = field(default="evaluation-local", init=False)

    def sum_size(self, size: int) -> int:
        """Return 0: nothing is added up."""
        return 0

    def local_update(self, context: LocalContext) -> LocallyNoisedUpdate:
        """Return an empty update; the silo writes its metrics to its folder (`runtime.evaluation`)."""
        return LocallyNoisedUpdate(torch.zeros(0, dtype=torch.float64))

    def bounds(self, population: FederationSize) -> None:
        """Return None: there are no rows."""

    def dp_event(self, view: View) -> Event:
        """Return the event that costs nothing."""
        return NOTHING


@dataclass(frozen=True, repr=False)
class EvaluationSums(EvaluationMethod):
    """Σ_s w·Σ_u clip_C(counts of u's held-out records in s) + noise σC.

    Where the unit is a person, w = 1/S, as in `uldp-avg` with uniform weights, whose bounds and events these are: all
    that a person has in all silos moves the sum by at most C. Where it is a record, which lies in one silo, w = 1 and
    a record is one unit vector; its event is that of `ddp` with one step, all records and equal clients.

    Attributes:
        noise_multiplier: The multiplier σ of the sum, in units of the clip.
        clip: The 2-norm C that one unit's counts are clipped to.
        table: The cells that are counted.
    """

    noise_multiplier: float = 0.0
    clip: float = 1.0
    table: CountTable = field(default_factory=lambda: CountTable("scores"))

    name: str = field(default="evaluation-sums", init=False)

    def sum_size(self, size: int) -> int:
        """Return the number of cells, whatever the size of the model."""
        return self.table.size

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions under which the charge of an evaluation holds."""
        whose = (
            "a silo knows all held-out records of a person by one id"
            if self.unit == "user"
            else "how many held-out records each silo has is public"
        )
        return (
            f"{whose}; ε covers the metrics computed from sums of counts over held-out records, and no other metrics",
        )

    def spread(self, population: FederationSize) -> int:
        """Return the number of silos that a unit's weight is spread over: S for persons, 1 for records."""
        return population.silos if self.unit == "user" else 1

    def bounds(self, population: FederationSize) -> Bounds:
        """Return the bounds of `uldp-avg`; where the unit is a record, one silo may hold all of a unit."""
        bounds = UldpAvg(self.noise_multiplier, self.clip).bounds(population)
        # Room for persons with held-out records only, who are not on the public list of users.
        return replace(give_room(bounds, population), silos_sharing_weight=self.spread(population))

    def dp_event(self, view: View) -> Event:
        """Return the event of one evaluation: all units are in, so nothing is amplified."""
        if self.unit == "user":
            return UldpAvg(self.noise_multiplier, self.clip).dp_event(view)
        if self.noise_multiplier == 0:
            return NO_NOISE
        # A record lies in one silo and moves the sum by at most C, under the noise that the adversary does not know.
        # Whoever sees each share sees the record under the noise of its own silo alone.
        unknown = 1 if view.sees_shares else view.unknown_shares
        if unknown < 1:
            return ALL_NOISE_KNOWN
        return Gaussian(self.noise_multiplier * math.sqrt(unknown / view.min_survivors))

    def count_std(self, population: FederationSize) -> float:
        """Return the largest standard deviation of the noise in a count, over all numbers of silos that may answer."""
        # All S silos may answer, each with a share sized for m of them: that is the most noise.
        share = self.noise_multiplier * self.clip / math.sqrt(population.min_survivors)
        return share * math.sqrt(population.silos) * self.spread(population)

    def local_update(self, context: LocalContext) -> ClippedRowStream:
        """Return one row of clipped counts for every unit with held-out records here."""
        return ClippedRowStream(
            self._rows(context), self.table.size, self.bounds(context.population), weighted=False
        )

    def _rows(self, context: LocalContext) -> Iterator[ClippedRows]:
        if len(context.x) == 0:
            return
        from silodp.training.sgd.separate import predict_rows

        outputs = predict_rows(context.task, context.params, context.x, separate=context.separate)
        cells = self.table.find_cells(outputs, context.y)  # comparisons, which round nothing
        if self.unit == "user":
            _, unit = torch.unique(context.user, return_inverse=True)
        else:
            unit = torch.arange(len(cells))
        spread = self.spread(context.population)
        for owners, rows in iterate_count_rows(unit, cells, self.table.size):
            clipped = clip_rows(owners, rows, self.clip)
            # The weight is a public constant and becomes a part of the factor, so the server sends no weights.
            yield replace(clipped, factors=clipped.factors / spread, clip=self.clip / spread)
