"""The parts of a Table One: blocks of persons whose cells are those of other statistics, once for each group.

A part is a statistic of its own, with a share of the release: it is divided by its bound (`Block.reach`), so that all
parts have the same sensitivity. Its cells have the mean over the records of a person, so a person counts once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from silodp.data.public import PublicData
from silodp.data.tables.columns import text_of
from silodp.errors import SilodpError
from silodp.settings import Settings, Whole
from silodp_analytics.counted import CategoryCells, Entries, NumberBlock, Records, fall_into_one
from silodp_analytics.statistics.count import ClassCount
from silodp_analytics.statistics.histogram import Histogram
from silodp_analytics.statistics.mean import Mean
from silodp_analytics.statistics.statistic import Columns, Reading, Statistic, estimates, refuse_column

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableOneRequest(Settings, prefix="statistics.table_one."):
    """A Table One.

    Attributes:
        columns: The columns that are described, in this order; the schema says of what kind each is.
        by: The column whose categories, or classes of the label, are the groups; None makes none.
        quartiles: Numeric column → the bins of its histogram, of which median and quartiles are read.
        missing_is_value: Categorical columns whose category for missing cells is a value as any other.
    """

    columns: tuple[str, ...]
    by: str | None = None
    quartiles: Mapping[str, Annotated[int, Whole(2, limit=1000)]] = field(default_factory=dict)
    missing_is_value: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("columns", "missing_is_value"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        twice = [name for name in self.columns if self.columns.count(name) > 1]
        if not self.columns or twice:
            problem = f"names '{twice[0]}' twice: name it once" if twice else "is empty: name columns"
            raise _refuse_setting("columns", problem)
        if self.by in self.columns:
            raise _refuse_setting(
                "by", f"is '{self.by}', which is in columns, too: take it out of one of them"
            )
        for setting, known in (("quartiles", self.columns), ("missing_is_value", (*self.columns, self.by))):
            for name in getattr(self, setting):
                if name not in known:
                    raise _refuse_setting(
                        setting, f"names '{name}', which is none of the columns: add it there"
                    )


def _refuse_setting(setting: str, problem: str) -> SilodpError:
    field_ = f"statistics.table_one.{setting}"
    return SilodpError(f"{field_} {problem}.", code="argument.value", field=field_)


@dataclass(frozen=True)
class Classes(CategoryCells):
    """The categories of a column, or the classes of the label; what missing cells count as is apart.

    Attributes:
        missing: The category that missing cells count as; "": none.
        is_label: Whether these are the classes of the label.
    """

    missing: str = ""
    is_label: bool = False

    @property
    def known(self) -> tuple[str, ...]:
        """The categories but that of missing cells."""
        return tuple(name for name in self.categories if name != self.missing)

    def check(self, data: PublicData) -> None:
        """Refuse another column at the place, or labels of another kind."""
        if self.is_label:
            ClassCount(self.column, classes=self.categories).check(data)
        else:
            super().check(data)

    def find_entries(self, records: Records) -> Entries:
        """Return the place of each record among `known`; that of missing cells is the last."""
        if self.is_label:
            places = ClassCount(self.column, classes=self.categories).find_entries(records)[0]
        else:
            places = super().find_entries(records)[0]
        order = [*self.known, self.missing]
        return fall_into_one(np.array([order.index(name) for name in self.categories])[places[:, 0]])


@dataclass(frozen=True)
class _InGroups(Statistic):
    """Base class of the parts: the cells of another statistic, once for each group.

    Attributes:
        by: The groups; None: all persons are one.
    """

    by: Classes | None = field(default=None, kw_only=True)

    of_persons = True

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups; one without a name where there is no column."""
        return ("",) if self.by is None else self.by.known

    @property
    def cells(self) -> int:
        """The number of cells of a group."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The cells of all groups."""
        return len(self.groups) * self.cells

    @property
    def spread(self) -> int:
        """The number of cells among which persons are divided."""
        return self.size

    def find_inner(self, records: Records) -> Entries:
        """Return the entries of every record in the cells of its group."""
        raise NotImplementedError

    def find_entries(self, records: Records) -> Entries:
        """Return the entries of every record; one of an unknown group adds nothing."""
        cells, added = self.find_inner(records)
        if self.by is None:
            return cells, added
        group = self.by.find_entries(records)[0]
        return np.minimum(group, len(self.groups) - 1) * self.cells + cells, np.where(
            group < len(self.groups), added, 0.0
        )

    def check(self, data: PublicData) -> None:
        """Refuse other groups at their place."""
        if self.by is not None:
            self.by.check(data)

    def describe(self) -> dict[str, Any]:
        """Return the column of the groups and their names."""
        by = {} if self.by is None else {"by": self.by.column}
        return {"column": self.column, "groups": list(self.groups), **by}

    def expect(self, noise_std: float, users: float) -> tuple[dict[str, float], list[str]]:
        """Return half the width of the expected interval in a group, if persons are divided evenly, and advice."""
        return self.expect_in_group(noise_std, users / len(self.groups)), []

    def expect_in_group(self, noise_std: float, persons: float) -> dict[str, float]:
        """Return half the width of the interval of what is read from the cells of a group of so many persons."""
        return {}


@dataclass(frozen=True)
class TableOneReading(Reading):
    """The noisy cells of a part. `table.TableOne` puts the parts together."""

    layout = "table_one"

    @property
    def size(self) -> int:
        """The cells of all groups."""
        return len(self.table.groups) * self.cells

    @property
    def cells(self) -> int:
        """The cells of a group."""
        return 1

    def describe(self, counted: str) -> list[str]:
        """Return nothing: the lines are those of the table."""
        return []

    def to_json(self) -> dict[str, Any]:
        """Return nothing: the estimates are those of the table."""
        return {}


@dataclass(frozen=True)
class PersonsReading(TableOneReading):
    """Persons by group, and those of an unknown group last."""

    @property
    def size(self) -> int:
        """A cell for each group, and one for persons of none."""
        return len(self.table.groups) + self.table.has_missing


@dataclass(frozen=True)
class TableOnePersons(_InGroups):
    """The persons of each group; the last cell has those whose group is not known, if there may be any."""

    column: str = "persons"

    kind = "table-one-persons"
    asked = TableOneRequest
    reading = PersonsReading

    @classmethod
    def read_setting(cls, asked: TableOneRequest, columns: Columns) -> Iterator[Statistic]:
        """Return the parts of a Table One."""
        by = None if asked.by is None else _place_classes(columns, asked.by, "by", asked.missing_is_value)
        yield _share_budget(cls(by=by), columns, "persons")
        for name in asked.columns:
            part: Statistic
            if name in columns.numeric:
                part = TableOneMean(**columns.place_number(name, "table_one.columns"), by=by)
                fill = columns.numeric[name].fill
                if fill is not None and not part.has_missing:
                    _log.warning(
                        "Table One: missing cells of '%s' count as %g in its mean, as the schema says: to have them "
                        'apart, declare missing = "indicator"',
                        name,
                        fill,
                    )
            else:
                classes = _place_classes(columns, name, "columns", asked.missing_is_value)
                part = TableOneShares(name, of=classes, by=by)
            yield _share_budget(part, columns, name)
        for name, bins in asked.quartiles.items():
            if name not in columns.numeric:
                problem = (
                    "statistics.table_one.quartiles names it, and it is no number of the schema: take it out"
                )
                raise refuse_column(name, problem, columns.numeric)
            place = columns.place_number(name, "table_one.quartiles")
            yield _share_budget(TableOneQuartiles(**place, bins=bins, by=by), columns, name)

    @property
    def cells(self) -> int:
        """One."""
        return 1

    @property
    def size(self) -> int:
        """A cell for each group, and one for persons of none."""
        return len(self.groups) + self._has_unknown

    @property
    def _has_unknown(self) -> bool:
        return self.by is not None and self.by.missing != ""

    def find_entries(self, records: Records) -> Entries:
        """Return the group of every record."""
        return fall_into_one(np.zeros(len(records[1]))) if self.by is None else self.by.find_entries(records)

    def describe(self) -> dict[str, Any]:
        """Return the groups, and whether there are persons of none."""
        return {**super().describe(), "has_missing": self._has_unknown}

    def expect_in_group(self, noise_std: float, persons: float) -> dict[str, float]:
        """Return that of a number of persons."""
        return {"count_error": estimates.estimate_count(0.0, noise_std).high}


def _place_classes(columns: Columns, name: str, setting: str, as_values: tuple[str, ...]) -> Classes:
    """Return the classes of a categorical column or of the label; another column is refused."""
    if name in columns.labels:
        return Classes(name, categories=columns.name_classes(), is_label=True)
    known = [*columns.categorical, *columns.labels, *(columns.numeric if setting == "columns" else ())]
    if name not in columns.categorical:
        problem = f"statistics.table_one.{setting} names it, and it is no column of public categories" + (
            " or numbers of the schema" if setting == "columns" else " of the schema"
        )
        raise refuse_column(name, problem, known)
    column, cells = columns.categorical[name], columns.place_categories(name, "table_one")
    has_missing = column.missing is not None and name not in as_values
    missing = cells.categories[column.texts.index(text_of(column.missing))] if has_missing else ""
    return Classes(**vars(cells), missing=missing)


def _share_budget(part: Statistic, columns: Columns, name: str) -> Statistic:
    """Return a part divided by its bound, so that all parts have the same sensitivity, times the column's weight."""
    return replace(part, weight=columns.weigh(name) / part.reach)


@dataclass(frozen=True)
class SharesReading(TableOneReading):
    """Counts by group of the categories, and of missing cells last."""

    @property
    def cells(self) -> int:
        """The categories, and one cell for missing ones."""
        return len(self.table.names) + self.table.has_missing


@dataclass(frozen=True)
class TableOneShares(_InGroups):
    """Persons with each category in each group; the last cell of a group has those without one.

    Attributes:
        of: The categories.
    """

    of: Classes = field(kw_only=True)

    kind = "table-one-shares"
    reading = SharesReading

    @property
    def cells(self) -> int:
        """The number of categories, with that of missing cells."""
        return self.of.size

    def find_inner(self, records: Records) -> Entries:
        """Return the category of every record."""
        return self.of.find_entries(records)

    def check(self, data: PublicData) -> None:
        """Refuse other columns at the places."""
        super().check(data)
        self.of.check(data)

    def describe(self) -> dict[str, Any]:
        """Return the groups, the categories, and what missing cells count as."""
        return {
            **super().describe(),
            "names": list(self.of.known),
            "has_missing": self.of.missing != "",
            "missing": self.of.missing,
        }

    def expect_in_group(self, noise_std: float, persons: float) -> dict[str, float]:
        """Return those of a share and of its standardized difference, if all categories are equally frequent."""
        number = len(self.of.known)
        share = 1 / number
        reach = estimates.estimate_count(0.0, noise_std).high * math.sqrt(1 - share) / persons
        found = {"share_error": reach}
        if len(self.groups) > 1 and number > 1:
            found["difference_error"] = reach * math.sqrt(2 / (share * (1 - share)))
        return found


@dataclass(frozen=True)
class _NumberInGroups(_InGroups, NumberBlock):
    """Base class of the parts of a numeric column."""

    def check(self, data: PublicData) -> None:
        """Refuse other columns at the places."""
        super().check(data)
        NumberBlock.check(self, data)

    def describe(self) -> dict[str, Any]:
        """Return the groups and the range."""
        return {**super().describe(), "edges": list(self.range)}


@dataclass(frozen=True)
class MeanInGroupsReading(TableOneReading):
    """The three sums by group, and the number of missing cells last."""

    @property
    def cells(self) -> int:
        """The three sums, and one cell for missing ones."""
        return 3 + self.table.has_missing


@dataclass(frozen=True)
class TableOneMean(_NumberInGroups):
    """The sums behind mean and standard deviation of each group; the last cell of a group has missing cells."""

    kind = "table-one-mean"
    reading = MeanInGroupsReading

    @property
    def _mean(self) -> Mean:
        return Mean(self.column, self.place, self.range, self.typical, self.has_missing)

    @property
    def cells(self) -> int:
        """The three sums, and one cell for missing ones."""
        return 3 + self.has_missing

    @property
    def reach(self) -> float:
        """That of the sums: a record has either these or a missing cell."""
        return self._mean.reach

    @property
    def spread(self) -> int:
        """All records of a group are in one sum."""
        return len(self.groups)

    def find_inner(self, records: Records) -> Entries:
        """Return the terms of the sums of every record; a missing cell adds 1 to the last cell alone."""
        cells, added = self._mean.find_entries(records)
        if not self.has_missing:
            return cells, added
        _, known = self.read(records)
        cells = np.column_stack([cells, np.full(len(known), 3)])
        return cells, np.column_stack([added, ~known])

    def describe(self) -> dict[str, Any]:
        """Return the groups, the range, and whether cells may be missing."""
        return {**super().describe(), "has_missing": self.has_missing}

    def expect_in_group(self, noise_std: float, persons: float) -> dict[str, float]:
        """Return those of a mean and of its standardized difference, by what is typical, or values spread evenly."""
        error = self._mean.expect(noise_std, persons)[0]["mean_error"]
        low, high = self.range
        std = self.typical[1] if self.typical else (high - low) / math.sqrt(12)
        difference = {"difference_error": error * math.sqrt(2) / std} if len(self.groups) > 1 else {}
        return {"mean_error": error, **difference}


@dataclass(frozen=True)
class QuartilesReading(TableOneReading):
    """Histograms by group."""

    @property
    def cells(self) -> int:
        """The bins."""
        return len(self.table.edges) - 1


@dataclass(frozen=True)
class TableOneQuartiles(_NumberInGroups):
    """A histogram of each group, of which median and quartiles are read; missing cells are in none.

    Attributes:
        bins: The number of equal bins of the public range.
    """

    bins: Annotated[int, Whole(2, limit=1000)] = 10

    kind = "table-one-quartiles"
    reading = QuartilesReading

    @property
    def _histogram(self) -> Histogram:
        return Histogram(self.column, self.place, self.range, self.typical, self.has_missing, self.bins)

    @property
    def cells(self) -> int:
        """The bins."""
        return self.bins

    def find_inner(self, records: Records) -> Entries:
        """Return the bin of every record; a missing cell adds nothing."""
        cells, added = self._histogram.find_entries(records)
        return np.minimum(cells, self.bins - 1), np.where(cells < self.bins, added, 0.0)

    def describe(self) -> dict[str, Any]:
        """Return the groups and the edges of the bins."""
        return {**super().describe(), "edges": self._histogram.describe()["edges"]}
