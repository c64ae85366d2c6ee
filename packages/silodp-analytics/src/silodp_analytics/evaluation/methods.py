"""Methods of the evaluation on the silos' held-out records; noise, masks and charges are those of a run.

By sums: silos add up a table of counts (`silodp_analytics.counts`). What a unit adds to it is clipped, silos add noise
to their sums, and an evaluation is charged like a round of training. Locally: every silo evaluates the model by itself
and sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from silodp._lazy import torch
from silodp.accounting.events import Composed, Event, Gaussian
from silodp.accounting.views import View
from silodp.assumption import OFFICERS, SILO_OPERATORS, Assumption
from silodp.data.inputs import list_arrays
from silodp.mechanisms.clipping import Bounds, ClippedRows, ClippedRowStream, LocallyNoisedUpdate, clip_rows
from silodp.methods.base import (
    ALL_NOISE_KNOWN,
    NO_NOISE,
    OMIT_NONE,
    LocalContext,
    SeriesMethod,
    count_honest_shares,
)
from silodp.methods.roles import FederationSize
from silodp.methods.uldp import UldpAvg
from silodp_analytics._count_rows import give_room, iterate_count_rows
from silodp_analytics.count_parts import CountParts
from silodp_analytics.counts import CountTable

NOTHING: Event = Composed(())
"""The event of an evaluation in which nothing leaves a silo."""
KNOWN_BY_ONE_ID = Assumption(
    "held-out-same-id",
    "a silo knows all held-out records of a person by one id",
    "whoever gives persons their ids",
)
HELD_OUT_COUNTS = Assumption(
    "held-out-counts-public", "how many held-out records each silo has is public", OFFICERS
)
SILOS_COMPARED = Assumption(
    "silos-compared",
    "whoever gets the metrics sees noisy counts of the held-out records of every silo, although single silos' sums may "
    "be hidden in training: silos agree that their metrics are compared",
    SILO_OPERATORS,
)


@dataclass(frozen=True, repr=False)
class LocalEvaluation(SeriesMethod):
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
class EvaluationSums(SeriesMethod):
    """Σ_s w·Σ_u clip_R(counts of u's held-out records in s) + noise σR, where R = C·√e if a record adds 1 to e cells.

    Where the unit is a person, w = 1/S, as in `uldp-avg` with uniform weights, whose bounds and events these are: all
    that a person has in all silos moves the sum by at most R. Where it is a record, which lies in one silo, w = 1 and
    a record's row has the norm √e; its event is that of `ddp` with one step, all records and equal clients.

    With tables for every silo, w = 1, and each silo fills a block of its own, to which it alone adds noise. All that a
    person has in n silos moves the blocks by √n·R together, because they are orthogonal. So each silo's noise of
    σ·√S·R costs what the noise of the sum costs above, and added up the blocks have the same noise as that sum
    (docs/privacy.md, section 11).

    Attributes:
        noise_multiplier: The multiplier σ of the sum, in units of what a person moves.
        clip: C, in units of the 2-norm √e of one record's row; with 1, one record of a person counts in full.
        table: The cells that are counted.
        parts: Subgroups and silos that have a table each; None counts all records in one table.
    """

    noise_multiplier: float = 0.0
    clip: float = 1.0
    table: CountTable = field(default_factory=lambda: CountTable("scores"))
    parts: CountParts | None = field(default=None, metadata=OMIT_NONE)

    name: str = field(default="evaluation-sums", init=False)

    @property
    def _parts(self) -> CountParts:
        return self.parts or CountParts()

    @property
    def row_clip(self) -> float:
        """R, the 2-norm that a unit's row in a silo is clipped to."""
        return self.clip * math.sqrt(self._parts.repetitions * self.table.entries)

    @property
    def block_size(self) -> int:
        """The number of cells of a silo."""
        return self.table.size * self._parts.tables

    def sum_size(self, size: int) -> int:
        """Return the number of cells of all silos, whatever the size of the model."""
        return self.block_size * self._parts.silos

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions under which the charge of an evaluation holds."""
        by_unit = KNOWN_BY_ONE_ID if self.unit == "user" else HELD_OUT_COUNTS
        return (by_unit, SILOS_COMPARED) if self.by_silo else (by_unit,)

    @property
    def by_silo(self) -> bool:
        """Whether every silo has a block of its own."""
        return self._parts.silos > 1

    def spread(self, population: FederationSize) -> int:
        """Return the number of silos that a unit's weight is spread over: S for persons whose counts are added up."""
        return population.silos if self.unit == "user" and not self.by_silo else 1

    def _reach(self, population: FederationSize) -> float:
        """Return by how much a unit moves the blocks of all silos together, in units of R: √S for persons."""
        return math.sqrt(population.silos) if self.unit == "user" else 1.0

    def bounds(self, population: FederationSize) -> Bounds:
        """Return the bounds of `uldp-avg`; where the unit is a record, one silo may hold all of a unit."""
        clip = self.row_clip
        if self.by_silo:
            bounds = Bounds(clip, clip * self._reach(population), self.noise_multiplier, total=clip)
        else:
            bounds = UldpAvg(self.noise_multiplier, clip).bounds(population)
        # Room for persons with held-out records only, who are not on the public list of users.
        return replace(give_room(bounds, population), silos_sharing_weight=self.spread(population))

    def longest_sums(
        self, population: FederationSize, record_counts: Sequence[int] | None
    ) -> tuple[float, float]:
        """Return infinity: how many persons or records are held out is not public."""
        return math.inf, math.inf

    def dp_event(self, view: View) -> Event:
        """Return the event of one evaluation: all units are in, so nothing is amplified."""
        if self.by_silo:
            return self._event_by_silo(view)
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

    def _event_by_silo(self, view: View) -> Event:
        """Return the event of blocks, each under the noise of its own silo, whoever sees them."""
        if self.noise_multiplier == 0:
            return NO_NOISE
        honest = count_honest_shares(view)
        if honest < 1:
            return ALL_NOISE_KNOWN
        # A person moves the blocks of the n silos that are not the adversary's by √n·R, of √S·R that noise is for.
        return Gaussian(
            self.noise_multiplier * (math.sqrt(view.silos / honest) if self.unit == "user" else 1)
        )

    def count_std(self, population: FederationSize) -> float:
        """Return the largest standard deviation of the noise in a count, over all numbers of silos that may answer.

        It is that of a count in a silo's own table, where each has one.
        """
        if self.by_silo:
            return self.noise_multiplier * self.row_clip * self._reach(population)
        # All S silos may answer, each with a share sized for m of them: that is the most noise.
        share = self.noise_multiplier * self.row_clip / math.sqrt(population.min_survivors)
        return share * math.sqrt(population.silos) * self.spread(population)

    def local_update(self, context: LocalContext) -> ClippedRowStream:
        """Return one row of clipped counts for every unit with held-out records here."""
        stream = ClippedRowStream(
            self._rows(context), self.block_size, self.bounds(context.population), weighted=False
        )
        return replace(stream, place=context.silo, places=self._parts.silos) if self.by_silo else stream

    def _rows(self, context: LocalContext) -> Iterator[ClippedRows]:
        if len(context.x) == 0:
            return
        from silodp.training.sgd.isolation import predict_rows

        outputs = predict_rows(context.task, context.params, context.x, isolate_units=context.isolate_units)
        cells = self.table.find_cells(outputs, context.y)  # comparisons, which round nothing
        shares = self.table.find_shares(context.y)
        if self._parts.columns:
            arrays = {name: array.cpu().numpy() for name, array in list_arrays(context.x).items()}
            cells = self._parts.find_cells((arrays, context.y.cpu().numpy()), cells, self.table.size)
            shares = None if shares is None else shares.repeat(1, self._parts.repetitions)
        if self.unit == "user":
            _, unit = torch.unique(context.user, return_inverse=True)
        else:
            unit = torch.arange(len(cells))
        spread = self.spread(context.population)
        for owners, rows in iterate_count_rows(unit, cells, self.block_size, shares):
            clipped = clip_rows(owners, rows, self.row_clip)
            # The weight is a public constant and becomes a part of the factor, so the server sends no weights.
            yield replace(clipped, factors=clipped.factors / spread, clip=self.row_clip / spread)
