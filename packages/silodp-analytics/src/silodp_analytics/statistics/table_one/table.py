"""A Table One from its noisy parts: cells with their intervals, and standardized differences between groups.

All intervals are at 95 %. Those "of the noise" hold what the table of these persons would show without noise; those
"with the sample" hold the value of the population that the persons are drawn from.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from silodp_analytics.statistics.mean import MOMENT_CENTER
from silodp_analytics.statistics.report.estimates import (
    LEVEL,
    Floats,
    Interval,
    NoisyTable,
    bound_ratio,
    draw_noise,
    estimate_count,
    estimate_mean,
    estimate_quantiles,
    is_certain,
)

OVERALL = "Overall"
LOST, NOBODY = "lost in the noise", "nobody"
_QUARTILES = {"lower_quartile": 0.25, "median": 0.5, "upper_quartile": 0.75}
_TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)


@dataclass(frozen=True)
class Cell:
    """What one row says of one group.

    Attributes:
        found: Estimates by name, with their intervals of the noise. Of a cell that is lost in the noise, what has an
            upper end ("count", "share").
        is_lost: Whether the noise hides it, which is not the same as 0.
        with_sample: The intervals with the sample, by the names of `found`.
    """

    found: Mapping[str, Interval] = field(default_factory=dict)
    is_lost: bool = False
    with_sample: Mapping[str, Interval] = field(default_factory=dict)

    @property
    def most(self) -> int | None:
        """The number that a count which is lost is below; None where no end is known."""
        return math.ceil(self.found["count"].high) if "count" in self.found else None

    @property
    def text(self) -> str:
        """The value as it is shown."""
        if self.is_lost:
            return LOST if self.most is None else f"{LOST} (< {self.most:,})"
        if not self.found:
            return NOBODY
        values = {name: one.value for name, one in self.found.items()}
        if "share" in values:
            return f"{values['count']:,.0f} ({100 * values['share']:.1f} %)"
        if "count" in values:
            return f"{values['count']:,.0f}"
        if "mean" in values:
            std = self.found["std"]
            # Noise alone may make it 0, which says nothing of the values.
            spread = f"{std.value:.3g}" if std.low else f"below {std.high:.3g}"
            return f"{values['mean']:.4g} ({spread})"
        if "median" in values:
            lower, upper = values["lower_quartile"], values["upper_quartile"]
            return f"{values['median']:.3g} [{lower:.3g}, {upper:.3g}]"
        return f"{values['difference']:.3f}"

    @property
    def interval_text(self) -> str:
        """The interval of the noise as it is shown; "" where the cell has none."""
        if self.is_lost or not self.found:
            return ""
        name = next(name for name in ("share", "count", "mean", "median", "difference") if name in self.found)
        low, high = self.found[name].low, self.found[name].high
        if name == "share":
            return f"{100 * low:.1f} to {100 * high:.1f} %"
        shape = {"count": ",.0f", "difference": ".3f"}.get(name, ".4g")
        return f"{low:{shape}} to {high:{shape}}"

    def to_json(self) -> dict[str, Any]:
        """Return the estimates; of a cell that is lost only upper ends, so that nobody takes the rest for a value."""
        if self.is_lost:
            return {"lost": True, **{f"{name}_below": one.high for name, one in self.found.items()}}
        return {
            "lost": False,
            **{name: vars(one) for name, one in self.found.items()},
            **{
                f"{name}_with_sample": {"low": one.low, "high": one.high}
                for name, one in self.with_sample.items()
            },
        }


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        column: The name of the column; "" for persons.
        label: The category, or what the numbers are.
        cells: Those of all groups together, and of each group.
        differences: The standardized differences of the second and all later groups, each less the first.
        is_category: Whether the label is a category of the column.
    """

    column: str
    label: str
    cells: tuple[Cell, ...]
    differences: tuple[Cell, ...] = ()
    is_category: bool = False


@dataclass(frozen=True)
class TableOne:
    """A Table One.

    Attributes:
        parts: The noisy cells of its parts, the persons first.
    """

    parts: Sequence[NoisyTable]

    @property
    def by(self) -> str | None:
        """The column of the groups."""
        return self.parts[0].by

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups; () where all persons are one."""
        return self.parts[0].groups if self.by else ()

    @property
    def heads(self) -> list[str]:
        """The names of the columns of cells."""
        return [OVERALL, *self.groups]

    @property
    def difference_heads(self) -> list[str]:
        """The names of the columns of differences: a later group less the first."""
        return [f"{group} − {self.groups[0]}" for group in self.groups[1:]]

    @cached_property
    def unknown(self) -> Cell | None:
        """The number of persons whose group is not known, who are in no column; None where there are none."""
        persons = self.parts[0]
        return _count(persons.counts[-1], persons.noise_std) if persons.has_missing else None

    @cached_property
    def rows(self) -> list[Row]:
        """The rows, in the order of the columns; quartiles follow the mean of their column."""
        found: dict[str, list[Row]] = {}
        for part in self.parts:
            found.setdefault(part.column, []).extend(_READ[part.kind](part))
        return [row for rows in found.values() for row in rows]

    @property
    def is_lost(self) -> bool:
        """Whether a cell or a difference is lost in the noise."""
        return any(cell.is_lost for row in self.rows for cell in (*row.cells, *row.differences))

    def to_json(self) -> dict[str, Any]:
        """Return all rows with their estimates."""
        return {
            "by": self.by,
            "groups": list(self.groups),
            "unknown_group": None if self.unknown is None else self.unknown.to_json(),
            "rows": [
                {
                    "column": row.column,
                    "label": row.label,
                    "is_category": row.is_category,
                    "cells": {name: cell.to_json() for name, cell in self._name_cells(row)},
                }
                for row in self.rows
            ],
        }

    def _name_cells(self, row: Row) -> Iterator[tuple[str, Cell]]:
        yield from zip(self.heads, row.cells, strict=True)
        yield from zip(self.difference_heads, row.differences, strict=False)

    def to_csv(self) -> str:
        """Return one line for each estimate; of one that is lost in the noise the upper end alone, if there is one."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(
            [
                "column",
                "label",
                "group",
                "estimate",
                "value",
                "low",
                "high",
                "sample_low",
                "sample_high",
                "lost",
            ]
        )
        unknown = [] if self.unknown is None else [("", "group unknown", "", self.unknown)]
        cells = [
            (row.column, row.label, name, cell) for row in self.rows for name, cell in self._name_cells(row)
        ]
        for column, label, group, cell in (*cells, *unknown):
            for name, one in cell.found.items():
                if cell.is_lost:
                    numbers: list[float | str] = ["", "", one.high, "", ""]
                else:
                    sample = cell.with_sample.get(name)
                    numbers = [
                        one.value,
                        one.low,
                        one.high,
                        *(("", "") if sample is None else (sample.low, sample.high)),
                    ]
                writer.writerow([column, label, group, name, *numbers, str(cell.is_lost).lower()])
            if cell.is_lost and not cell.found:
                writer.writerow([column, label, group, "", "", "", "", "", "", "true"])
        return out.getvalue()

    def format(self) -> list[str]:
        """Return the table as lines of text."""
        lines = [["", *self.heads, *self.difference_heads]]
        for row in self.rows:
            name = f"{row.column} {row.label}".strip()
            cells = (*row.cells, *row.differences)
            lines.append(
                [
                    name,
                    *(
                        f"{cell.text}{f' [{cell.interval_text}]' * bool(cell.interval_text)}"
                        for cell in cells
                    ),
                ]
            )
        widths = [
            max(len(line[place]) for line in lines if place < len(line)) for place in range(len(lines[0]))
        ]
        found = [
            "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=False)) for line in lines
        ]
        if self.unknown is not None:
            found.append(f"persons whose {self.by} is not known, in no column: {self.unknown.text}")
        return [line.rstrip() for line in found]


def find_table(tables: Sequence[NoisyTable]) -> TableOne | None:
    """Return the Table One among noisy tables; None where there is none.

    Raises:
        ValueError: its parts do not belong together.
    """
    parts = [one for one in tables if one.kind in _READ]
    if not parts:
        return None
    if parts[0].kind != "table-one-persons" or any(one.groups != parts[0].groups for one in parts):
        raise ValueError("the parts of a Table One are of different groups")
    return TableOne(parts)


# --- rows ------------------------------------------------------------------------------------------------------------


def _list_groups(part: NoisyTable, counts: Floats) -> list[tuple[Floats, float]]:
    """Return cells and noise of all groups together, and of each group, by counts (groups, cells)."""
    alone = [(one, part.noise_std) for one in counts] if part.by else []
    # Added up, so that groups and all persons are the same ones.
    return [(counts.sum(0), part.noise_std * math.sqrt(len(counts))), *alone]


def _compare(cells: Sequence[Any], compare: Callable[[Any, Any], Cell]) -> tuple[Cell, ...]:
    """Return the difference of the second and all later groups, each less the first; `cells` begin with all persons."""
    return tuple(compare(cells[1], one) for one in cells[2:])


def _count(value: float, noise: float) -> Cell:
    found = {"count": estimate_count(value, noise)}
    return Cell(found, noise > 0 and not is_certain(value, noise))


def _read_persons(part: NoisyTable) -> list[Row]:
    counts = part.values[: len(part.groups)].reshape(-1, 1)
    cells = tuple(_count(float(one[0]), noise) for one, noise in _list_groups(part, counts))
    return [Row("", "persons", cells)]


def _read_shares(part: NoisyTable) -> list[Row]:
    known, rows = len(part.names), []
    groups = _list_groups(part, part.values.reshape(len(part.groups), -1))
    # Shares are among those whose category is known.
    cells = [(one[:known], noise) for one, noise in groups]
    for place, name in enumerate(part.names):
        shares = tuple(_estimate_share(one, place, noise) for one, noise in cells)
        rows.append(
            Row(part.column, name, shares, _compare(cells, _make_share_comparison(place)), is_category=True)
        )
    if part.has_missing:
        everybody = tuple(_estimate_share(one, known, noise) for one, noise in groups)
        rows.append(Row(part.column, f"missing (or '{part.missing}')", everybody))
    return rows


def _estimate_share(counts: Floats, place: int, noise: float) -> Cell:
    """Return a count and its share among all counts."""
    count, total = float(counts[place]), float(counts.sum())
    cell = _count(count, noise)
    if not is_certain(total, noise * math.sqrt(len(counts))):
        # Without noise there is nobody; with it the share may be anything, whatever the count.
        return replace(cell, is_lost=True) if noise else Cell()
    share = min(max(count / total, 0.0), 1.0)

    def bound(of_sample: float) -> Interval:
        return bound_ratio(share, count, total, noise, of_sample, least=0.0, cells=len(counts), shared=1)

    of_sample = total * share * (1 - share)
    return replace(cell, found={**cell.found, "share": bound(0.0)}, with_sample={"share": bound(of_sample)})


def _read_means(part: NoisyTable) -> list[Row]:
    groups = _list_groups(part, part.values.reshape(len(part.groups), -1))
    cells = [(one[:3], noise) for one, noise in groups]
    means = tuple(_estimate_mean(one, noise, part) for one, noise in cells)
    rows = [Row(part.column, "mean (sd)", means, _compare(cells, _compare_means))]
    if part.has_missing:
        # Of the count of values and that of missing ones.
        missing = tuple(_estimate_share(one[2:], 1, noise) for one, noise in groups)
        rows.append(Row(part.column, "missing", missing))
    return rows


def _estimate_mean(sums: Floats, noise: float, part: NoisyTable) -> Cell:
    found = estimate_mean(NoisyTable("mean", part.column, tuple(sums.tolist()), noise, part.edges))
    if found is None:
        return Cell(is_lost=noise > 0)
    return Cell({"mean": found.mean, "std": found.std}, with_sample={"mean": found.with_sample})


def _read_quartiles(part: NoisyTable) -> list[Row]:
    groups = _list_groups(part, part.values.reshape(len(part.groups), -1))
    return [Row(part.column, "median [quartiles]", tuple(_estimate_quartiles(*one, part) for one in groups))]


def _estimate_quartiles(counts: Floats, noise: float, part: NoisyTable) -> Cell:
    table = NoisyTable("histogram", part.column, tuple(counts.tolist()), noise, part.edges)
    found = estimate_quantiles(table, tuple(_QUARTILES.values()))
    return Cell(
        {name: found[share] for name, share in _QUARTILES.items()} if found else {}, not found and noise > 0
    )


_READ: Mapping[str, Callable[[NoisyTable], list[Row]]] = {
    "table-one-persons": _read_persons,
    "table-one-shares": _read_shares,
    "table-one-mean": _read_means,
    "table-one-quartiles": _read_quartiles,
}


# --- standardized differences ----------------------------------------------------------------------------------------

_Moments = Callable[[Floats], tuple[Floats, Floats, Floats]]
"""From cells (..., k) to the number of values, their mean and their variance, each (...)."""


def _find_moments(sums: Floats) -> tuple[Floats, Floats, Floats]:
    total, squares, number = np.moveaxis(sums, -1, 0)
    mean = total / number
    return number, mean, squares / number + MOMENT_CENTER - mean**2


def _compare_means(first: tuple[Floats, float], other: tuple[Floats, float]) -> Cell:
    return _standardize(first, other, _find_moments, 1)


def _make_share_comparison(place: int) -> Callable[[tuple[Floats, float], tuple[Floats, float]], Cell]:
    def find(counts: Floats) -> tuple[Floats, Floats, Floats]:
        number = counts.sum(-1)
        share = counts[..., place] / number
        return number, share, share * (1 - share)

    def compare(first: tuple[Floats, float], other: tuple[Floats, float]) -> Cell:
        both, noise = first[0] + other[0], math.sqrt(2) * first[1]
        with_it, others = float(both[place]), float(both.sum() - both[place])
        is_seen = is_certain(with_it, noise) and is_certain(others, noise * math.sqrt(len(both) - 1))
        # Where noise alone decides that anybody differs, it decides the variance, too.
        return Cell(is_lost=True) if noise and not is_seen else _standardize(first, other, find, len(both))

    return compare


def _standardize(
    first: tuple[Floats, float], other: tuple[Floats, float], find: _Moments, added: int
) -> Cell:
    """Return (m_b − m_a)/√((v_a + v_b)/2), for cells and noise of groups a and b.

    It is lost in the noise where a group is, or where the noise leaves open that the variance is 0.

    Args:
        first: Cells (k,) of group a, and the standard deviation of their noise.
        other: Those of group b.
        find: Returns the moments of cells.
        added: The number of cells whose sum is the number of values.

    Source: Cohen 1988, with the variances of both groups; Yang and Dalton 2012 for the error of the sample; the noise
    by simulation.
    """
    cells, noise = np.stack([first[0], other[0]]), first[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        number, mean, variance = find(cells)
        if noise and not all(is_certain(float(one), noise * math.sqrt(added)) for one in number):
            return Cell(is_lost=True)
        draws = draw_noise(cells.size).reshape(-1, *cells.shape) * noise + cells
        _, means, variances = find(draws)
        spread, spreads = float(variance.mean()), variances.mean(-1)
        if not noise and not spread > 0:  # everybody has the same value, or there is nobody
            return Cell()
        if noise and not np.quantile(spreads, _TAILS[0]) > 0:
            return Cell(is_lost=True)
        value = float((mean[1] - mean[0]) / math.sqrt(spread))
        differences = (means[:, 1] - means[:, 0]) / np.sqrt(np.maximum(spreads, np.finfo(float).tiny))
    low, high = (float(one) for one in np.quantile(differences, _TAILS))
    low, high = min(low, value), max(high, value)
    # z standard errors of the sample.
    reach = estimate_count(0.0, math.sqrt((1 / number).sum() + value**2 / (2 * number.sum()))).high
    sample = Interval(value, value - math.hypot(value - low, reach), value + math.hypot(high - value, reach))
    return Cell({"difference": Interval(value, low, high)}, with_sample={"difference": sample})
