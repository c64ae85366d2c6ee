"""What a statistic is: its setting in [statistics], what a record adds to its cells, and how its noisy counts are read.

A statistic is one file and one line in `STATISTICS`, or an entry point of the group "silodp.statistics". A report runs
no code of strangers, so it reads the counts of their statistics by one of the kinds below, which they name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from silodp._lazy import LazyModule, Registry
from silodp.config.resolve import ResolvedRun
from silodp.data.tables.schema import Schema, name_classes
from silodp.errors import SilodpError
from silodp.text import suggest_name
from silodp_analytics.counted import Block, CategoryCells, place_categories, place_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from silodp_analytics.statistics.report import estimates as estimates
    from silodp_analytics.statistics.report import figures as figures
    from silodp_analytics.statistics.report.estimates import (
        Interval,
        LogRank,
        MeanEstimate,
        NarrowerRange,
        NoisyTable,
        SurvivalCurve,
    )
else:  # scipy and matplotlib, which take seconds, and a silo needs neither
    estimates = LazyModule("silodp_analytics.statistics.report.estimates")
    figures = LazyModule("silodp_analytics.statistics.report.figures")


class Columns:
    """The declared columns of a run, of which statistics can be asked.

    Args:
        resolved: The configuration of the run.
        weights: Column → its factor a.
    """

    def __init__(self, resolved: ResolvedRun, weights: Mapping[str, float]) -> None:
        self.schema: Schema | None = resolved.dataset.find_schema(resolved.arguments)
        self.data, self._weights = resolved.read_public_data(), weights
        self.numeric: Mapping[str, Any] = {} if self.schema is None else self.schema.numeric_columns()
        self.categorical: Mapping[str, Any] = {} if self.schema is None else self.schema.categorical_columns()
        self.labels: tuple[str, ...] = ()
        """The name of the label where it is a class."""
        if self.data.labels == "classes" and not self.data.label_shape:
            self.labels = ("label",) if self.schema is None else self.schema.label_columns

    def check_weights(self, others: Iterable[str]) -> None:
        """Refuse a weight of something that is no column, and none of the `others` that have weights."""
        known = {"persons", *self.numeric, *self.categorical, *self.labels, *others}
        for name in self._weights:
            if name not in known:
                raise refuse_column(
                    name, "statistics.weights names it, and it is no column of the schema", known
                )

    def weigh(self, name: str) -> float:
        """Return the factor a of a column."""
        return float(self._weights.get(name, 1.0))

    def place_number(self, name: str, setting: str) -> dict[str, Any]:
        """Return the fields of a `NumberBlock`; a column without a public range is refused.

        Args:
            name: The column.
            setting: The setting of [statistics] that names it, for the message.
        """
        if self.schema is None or name not in self.numeric:
            remedy = (
                f"declare data.schema.numeric.{name} with a public range: a range read from rows would tell"
            )
            raise self._refuse_column(name, setting, self.numeric, remedy)
        return {**place_number(self.schema, name), "weight": self.weigh(name)}

    def place_categories(self, name: str, setting: str) -> CategoryCells:
        """Return the cells of a column; one without public categories is refused. Arguments as above."""
        if self.schema is None or name not in self.categorical:
            remedy = (
                f"declare data.schema.categorical.{name} with public categories: those of rows would tell"
            )
            raise self._refuse_column(name, setting, self.categorical, remedy)
        return place_categories(self.schema, name, self.weigh(name))

    def name_classes(self) -> tuple[str, ...]:
        """Return the names of the classes of the label."""
        return name_classes(self.schema, self.data.classes)

    def _refuse_column(self, name: str, setting: str, known: Mapping[str, Any], problem: str) -> SilodpError:
        """Return the error about a column that has no public constants for a statistic."""
        if name in self.categorical:
            problem = (
                f"statistics.{setting} is for numbers, and it has categories: name it in statistics.count"
            )
        elif name in self.numeric:
            problem = (
                f"statistics.{setting} is for categories, and it is a number: name it in statistics.histogram"
            )
        return refuse_column(name, problem, known)


def refuse_column(name: str, problem: str, known: Iterable[str]) -> SilodpError:
    """Return the error about a column of which there is no such statistic, with the closest of the known ones."""
    hint = suggest_name(name, sorted(known))
    return SilodpError(
        f"statistics of '{name}': {problem}{f' ({hint})' if hint else ''}.",
        code="statistics.column",
        field="statistics",
    )


@dataclass(frozen=True)
class Reading:
    """The noisy counts of one statistic with what is estimated from them; one of cells with names, by default.

    `layout` says how the page shows it: "headline", a "row" of the table of means, "counts" with quantiles, or
    "curves". Each uses the members of that name; None and () where there are none. Parts of a "table_one" are shown
    together.
    """

    table: NoisyTable

    layout: ClassVar[Literal["headline", "row", "counts", "curves", "table_one"]] = "counts"

    @property
    def mean(self) -> MeanEstimate | None:
        """Mean and standard deviation."""
        return None

    @property
    def quantiles(self) -> Mapping[float, Interval] | None:
        """Quantiles by their shares."""
        return None

    @property
    def narrower(self) -> NarrowerRange | None:
        """A range that suits the records better than the declared one."""
        return None

    @property
    def curves(self) -> list[SurvivalCurve]:
        """Survival curves."""
        return []

    @property
    def test(self) -> LogRank | None:
        """The test of equal curves."""
        return None

    def __post_init__(self) -> None:
        if len(self.table.counts) != self.size:  # the file was damaged or edited
            raise ValueError(f"{len(self.table.counts)} counts, and {self.size} cells")

    @property
    def size(self) -> int:
        """The number of cells, by what the table says of them: those with names, or bins between edges."""
        return len(self.table.names) or len(self.table.edges) - 1 + self.table.has_missing

    @property
    def title(self) -> str:
        """The title of its section."""
        return self.table.column

    @property
    def rows(self) -> list[tuple[str, float]]:
        """The names of the cells, each with its noisy count."""
        names = list(self.table.names)
        if not names:
            edges = [f"{edge:,.6g}" for edge in self.table.edges]
            names = [f"{low} to {high}" for low, high in pairwise(edges)]
            names += ["missing"] * self.table.has_missing
        return list(zip(names, self.table.counts, strict=True))

    @property
    def total(self) -> Interval:
        """All counts together."""
        return estimates.estimate_count(
            sum(self.table.counts), self.table.noise_std * math.sqrt(len(self.table.counts))
        )

    def to_json(self) -> dict[str, Any]:
        """Return what is estimated, for statistics.json."""
        return {} if self.narrower is None else {"narrower": vars(self.narrower)}

    def describe(self, counted: str) -> list[str]:
        """Return the lines of the terminal; `counted` is a key of `COUNTED`."""
        counts = ", ".join(f"{name} {show_count(count, self.table.noise_std)}" for name, count in self.rows)
        return [f"{self.table.column}: {counts}"]

    def plot(self, unit: str) -> tuple[str, Figure, str] | None:
        """Return the name of a picture, which begins with "count" or "survival", its figure, and its caption."""
        draw = figures.plot_categories if self.table.names else figures.plot_histogram
        caption = f"{self.table.column}: noisy counts of {unit}; the lines are 95 % intervals of the noise."
        return f"count-{self.table.kind}", draw(self.table, unit), caption

    @property
    def note(self) -> str:
        """The end of a line on a range that is too wide."""
        advice = self.describe_narrower()
        return f"; {advice}" if advice else ""

    def describe_narrower(self) -> str:
        """Return the clause on a range that is too wide; "" where it is not."""
        found, edges = self.narrower, self.table.edges
        if found is None:
            return ""
        smaller = (
            "bins as fine as most values need"
            if found.error is None or self.mean is None
            else f"± {found.error:.2g} in place of ± {self.mean.mean.reach:.2g}"
        )
        return (
            f'a declared range of {found.low:.6g} to {found.high:.6g} with out_of_range = "clip", in place of '
            f"{edges[0]:.6g} to {edges[-1]:.6g}, would give {smaller}"
        )


@dataclass(frozen=True)
class Statistic(Block):
    """Base class of statistics: a frozen dataclass of public constants, of which silos sign every one."""

    asked: ClassVar[Any] = None
    """The type of its setting in [statistics]; None: none asks for it directly."""
    of_columns: ClassVar[bool] = True
    """Whether the columns that it counts have weights; else its name has one."""
    of_persons: ClassVar[bool] = False
    """Whether its cells have the mean over a person's records in a silo, which is never clipped, and not their sum."""
    reading: ClassVar[type[Reading]] = Reading
    """How its noisy counts are read; by `kind` in a report, which reads those of an unknown kind as `Reading`."""

    @classmethod
    def registry(cls) -> Mapping[str, type[Statistic]]:
        """Return the classes that an item of `method.tables` may name."""
        return STATISTICS

    @classmethod
    def read_setting(cls, asked: Any, columns: Columns) -> Iterable[Statistic]:
        """Return what a setting asks for.

        Args:
            asked: A value of the type `asked`.
            columns: The columns of the run.
        """
        raise NotImplementedError

    @property
    def spread(self) -> int:
        """The number of cells among which one record each of all persons is divided, as far as the public knows."""
        return self.size

    def expect(self, noise_std: float, users: float) -> tuple[dict[str, float], list[str]]:
        """Return what a plan adds, JSON-ready, and its warnings, if each of so many users has one record."""
        return {}, []


STATISTICS: Registry[type[Statistic]] = Registry(
    "statistics",
    {
        "histogram": "silodp_analytics.statistics.histogram:Histogram",
        "mean": "silodp_analytics.statistics.mean:Mean",
        "count": "silodp_analytics.statistics.count:CategoryCount",
        "class-count": "silodp_analytics.statistics.count:ClassCount",
        "survival": "silodp_analytics.statistics.survival:Survival",
        "table_one": "silodp_analytics.statistics.table_one.parts:TableOnePersons",
        "table-one-shares": "silodp_analytics.statistics.table_one.parts:TableOneShares",
        "table-one-mean": "silodp_analytics.statistics.table_one.parts:TableOneMean",
        "table-one-quartiles": "silodp_analytics.statistics.table_one.parts:TableOneQuartiles",
        "persons": "silodp_analytics.statistics.persons:PersonCell",
    },
)
"""The statistics by their names in a configuration, in the order in which they are counted and shown."""


def read_table(table: NoisyTable) -> Reading:
    """Return how noisy counts are read; those of a kind that is not silodp's are cells with names, or bins.

    Raises:
        ValueError: counts and cells do not belong together.
    """
    kinds = {kind.kind: kind.reading for kind in STATISTICS.values()}
    return kinds.get(table.kind, Reading)(table)


def show_count(value: float, noise_std: float) -> str:
    """Return a count for readers: "< x", the upper end of its interval, where it is lost in the noise."""
    if estimates.is_certain(value, noise_std):
        return f"{value:,.0f}"
    return f"< {math.ceil(estimates.estimate_count(value, noise_std).high):,}"
