"""Statistics of the silos' tables, written as a method: one round whose sum is a table of counts, and no model.

Silos add up a row of counts per person, as `uldp-avg` adds up updates, so that noise, weights, masks, gates, charges
and deployments are those of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from silodp._lazy import torch
from silodp.data.inputs import list_arrays
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Bounds, ClippedRows, ClippedRowStream, clip_rows
from silodp.methods.base import LocalContext
from silodp.methods.roles import FederationSize
from silodp.settings import MAX_CELLS, Count, NoiseMultiplier, Range
from silodp.text import is_own
from silodp_analytics._count_rows import give_room, iterate_count_rows
from silodp_analytics.counted import check_entries
from silodp_analytics.statistics.count import ClassCount
from silodp_analytics.statistics.persons import PersonCell
from silodp_analytics.statistics.statistic import Statistic
from silodp_analytics.sums.method import SumsMethod

if TYPE_CHECKING:
    from torch import Tensor

COUNTED = {
    "persons": "persons, each about once",
    "persons_by_silo": "persons, each about once in every silo",
    "persons_in_primary_silo": "persons, each about once, in the silo where they have most records",
    "records": "records, at most about {records} of a person (the average over their silos)",
    "records_by_silo": "records, at most about {records} of a person in a silo",
    "records_in_primary_silo": "records, at most about {records} of a person, in the silo where they have most",
}
"""What a count adds up, and how a reader is told so. A person with records of several kinds counts in part for each."""


@dataclass(frozen=True, repr=False)
class Statistics(SumsMethod):
    """Σ_s Σ_u w[s,u]·clip_C(counts of u's records in s) + noise σC: weights, bounds and events are those of `uldp-avg`.

    A person's row has the blocks of a public table, each multiplied by its weight a_b. Let r_b be the longest that one
    record's part of block b can be (`Block.reach`). Blocks are of two kinds:

    - blocks of records, to which all records of the person in the silo add. This part of the row is clipped to
      R = records·√Σ_b a_b²·r_b²;
    - blocks of persons (`Statistic.of_persons`, such as the cell of persons), which have the mean over the person's
      records. It is no longer than its longest record, so it is never clipped.

    C² = R² + Σ a_b²·r_b² over the blocks of persons. So neither these nor a person with up to `records` records in a
    silo is ever clipped.

    With uniform weights a record counts S·(1/S) = 1 time, and a person once in each of their silos. Where weights are
    "present", a person counts as 1 in all: by the average over the silos in which they have records; "primary_silo": by
    the silo with most of their records. Then the cell of persons is the number of different persons over all silos.

    Attributes:
        noise_multiplier: The multiplier σ of the sum, in units of C.
        weighting: How a person's weight of 1 is divided among silos; see `UldpAvg`.
        tables: The statistics of records, in the order of their cells.
        persons: The weight a_p of the cell of persons; 0 counts none.
        records: The number of records of a person in a silo that always count in full.
    """

    noise_multiplier: NoiseMultiplier
    tables: tuple[Statistic, ...] = ()
    persons: Annotated[float, Range(least=0)] = 1.0
    records: Count = 1

    name: str = field(default="statistics", init=False)

    can_isolate_units: ClassVar[bool] = True  # sums of a person's own entries, in double precision
    can_split: ClassVar[bool] = True

    @property
    def plugin_parts(self) -> tuple[object, ...]:
        """The statistics, which may be code of strangers."""
        return self.tables

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.blocks:
            raise _refuse("there is nothing to count: name a statistic, or count persons")
        if self.sum_size(0) > MAX_CELLS:
            raise _refuse(
                f"the table has {self.sum_size(0):,} cells, more than {MAX_CELLS:,}: take fewer bins or columns"
            )
        of_persons = (block.weight * block.reach for block in self.blocks if block.of_persons)
        object.__setattr__(self, "clip", math.hypot(self._record_clip, *of_persons))

    @property
    def blocks(self) -> tuple[Statistic, ...]:
        """All blocks, in the order of their cells; that of persons is the last."""
        return (*self.tables, *((PersonCell(weight=self.persons),) if self.persons else ()))

    @property
    def _record_clip(self) -> float:
        """R, the clip of the part of a person's row that their records add up to."""
        return self.records * math.hypot(
            *(block.weight * block.reach for block in self.blocks if not block.of_persons)
        )

    def check(self, data: PublicData, rounds: int, delta: float) -> None:
        """Refuse several rounds, and blocks of other columns than the records have."""
        if rounds != 1:
            raise SilodpError(
                f"rounds = {rounds}: statistics are one sum; set rounds = 1.",
                code="statistics.rounds",
                field="rounds",
            )
        for block in self.blocks:
            block.check(data)
            if not is_own(type(block)):
                check_entries(block, data)

    def sum_size(self, size: int) -> int:
        """Return the number of cells, whatever the size of the model."""
        return sum(block.size for block in self.blocks)

    def count_classes(self, classes: int) -> tuple[Statistics, float]:
        """Return the statistics that count so many classes alone, and `records`."""
        block = ClassCount("class", classes=tuple(f"class-{place}" for place in range(classes)))
        return replace(self, tables=(block,), persons=0.0), self.records

    def bounds(self, population: FederationSize) -> Bounds:
        """Return the bounds of `uldp-avg`."""
        return give_room(super().bounds(population), population)

    def local_update(self, context: LocalContext) -> ClippedRowStream:
        """Return one row of clipped counts for every person with records here."""
        size = self.sum_size(context.task.size)
        return ClippedRowStream(self._rows(context), size, self.bounds(context.population), weighted=True)

    def _rows(self, context: LocalContext) -> Iterator[ClippedRows]:
        arrays = {name: array.cpu().numpy() for name, array in list_arrays(context.x).items()}
        records, first = (arrays, context.y.cpu().numpy()), 0
        cells, values, of_persons = [], [], []
        for block in self.blocks:
            found, added = block.find_entries(records)
            cells.append(torch.from_numpy(found + first))
            values.append(torch.from_numpy(added * block.weight))
            of_persons += [block.of_persons] * block.size
            first += block.size
        persons, unit, number = torch.unique(context.user.cpu(), return_inverse=True, return_counts=True)
        is_mean = torch.tensor(of_persons)
        all_cells, all_values = torch.cat(cells, 1).long(), torch.cat(values, 1).double()
        for units, rows in iterate_count_rows(unit, all_cells, self.sum_size(0), all_values):
            owners = persons[units]
            # A mean over any number of records is no longer than the longest of them.
            means = rows[:, is_mean] / number[units][:, None]
            rows[:, is_mean] = 0
            if self._record_clip:
                rows = rows * clip_rows(owners, rows, self._record_clip).factors[:, None]
            rows[:, is_mean] = means
            # Longer than C by rounding alone; and what adds up rows trusts no other clip.
            yield clip_rows(owners, rows, self.clip)

    # --- What the noisy sum says ---

    def spread(self, population: FederationSize) -> int:
        """Return by what sums are multiplied: S where every silo has weighted its counts by 1/S, else 1."""
        return population.silos if self.weighting == "uniform" else 1

    def count_std(self, block: Statistic, population: FederationSize) -> float:
        """Return the standard deviation of the noise in a count of a block, if all silos answer.

        With fewer silos, of which `min_survivors` must answer, it is smaller.

        Args:
            block: One of `blocks`.
            population: The public size of the federation.
        """
        share = self.share_multiplier(population.min_survivors) * self.clip
        return share * math.sqrt(population.silos) * self.spread(population) / block.weight

    @property
    def counted(self) -> str:
        """What a count adds up, a key of `COUNTED`."""
        # With more than one in full, everyone's first records count one by one.
        noun = "records" if self.records > 1 else "persons"
        return noun + {"uniform": "_by_silo", "primary_silo": "_in_primary_silo"}.get(self.weighting, "")

    def describe_sum(self, total: Tensor, population: FederationSize) -> dict[str, Any]:
        """Return the noisy counts of all blocks, each with what its cells mean and the deviation of its noise."""
        tables, first, spread = [], 0, self.spread(population)
        for block in self.blocks:
            counts = total[first : first + block.size].double() * (spread / block.weight)
            first += block.size
            tables.append(
                {
                    "kind": block.kind,
                    **block.describe(),
                    "counts": counts.tolist(),
                    "noise_std": self.count_std(block, population),
                }
            )
        facts = {"counted": self.counted, "silos": population.silos, "records_in_full": self.records}
        return {"statistics": {**facts, "tables": tables}}


def _refuse(problem: str) -> SilodpError:
    return SilodpError(f"statistics: {problem}.", code="statistics.cells", field="statistics")
