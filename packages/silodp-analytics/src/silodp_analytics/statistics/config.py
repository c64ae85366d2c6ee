"""[statistics]: what is to be counted, and the run of one round that counts it.

The run has the data, the silos and the aggregator of the configuration. Its method is `statistics`, with every public
constant written out: places of features, ranges, bins and the noise multiplier. So the run's config.toml says all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from silodp.config.build import build, convert_value, make_unknown_error
from silodp.config.resolve import ResolvedRun
from silodp.config.toml_values import to_plain
from silodp.plugins import find_plugin, find_reference
from silodp.settings import Count, Positive, check_value
from silodp_analytics.statistics.method import Statistics
from silodp_analytics.statistics.statistic import STATISTICS, Columns, Statistic
from silodp_analytics.sums.config import SumsRequest, derive_run


@dataclass(frozen=True)
class StatisticsRequest(SumsRequest, prefix="statistics."):
    """The table [statistics].

    Attributes:
        asked: What is asked of each statistic, by its name in `STATISTICS` or a reference, in the order of the cells.
        persons: Whether persons are counted; None: unless those of a `table_one` are.
        records: The number of records of a person in a silo that always count in full.
        weighting: "uniform", "present" or "primary_silo"; None: "present" where nobody else learns who has records
            where, else "uniform".
        weights: Column, "persons" or "survival" → its factor a: more of it means less noise there, and more elsewhere.
    """

    asked: Mapping[str, Any] = field(default_factory=dict)
    persons: bool | None = None
    records: Count = 1
    weighting: Literal["uniform", "present", "primary_silo"] | None = None
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, weight in self.weights.items():
            check_value(f"statistics.weights.{name}", weight, Positive)


def read_request(table: Mapping[str, Any] | None) -> StatisticsRequest:
    """Return what a table [statistics] asks for; without a table, persons and classes alone.

    Raises:
        SilodpError: a setting of it does not fit.
    """
    common, asked = dict(table or {}), {}
    settings = [one.name for one in fields(StatisticsRequest) if one.name != "asked"]
    own = [name for name, kind in STATISTICS.items() if kind.asked is not None]
    given = [name for name in common if name not in settings]
    for name in sorted(given, key=lambda name: own.index(name) if name in own else len(own)):
        if name not in own and find_reference(name, STATISTICS) is None:
            raise make_unknown_error(name, [*settings, *own], "the table of statistics", "statistics")
        where = f"statistics.{name}"
        asked[name] = convert_value(_find_kind(name).asked, common.pop(name), where)
    found = build(StatisticsRequest, common, "the table of statistics", "statistics")
    return replace(found, asked=asked)


def derive_statistics(resolved: ResolvedRun, epsilon: float | None = None) -> ResolvedRun:
    """Return the run of one round that counts what the table [statistics] of a configuration asks for.

    Args:
        resolved: A configuration of a training run, of which the data, the silos, δ, the seed, the limits of silos and
            the aggregator are taken.
        epsilon: ε in place of that of [statistics].

    Raises:
        SilodpError: no ε, or a column without public constants (code statistics.column).
    """
    asked = read_request(resolved.config.tables.get("statistics"))
    request = asked.take_epsilon(epsilon, "statistics need")
    method, names = _make_method(resolved, request)
    return derive_run(resolved, request, method, lambda made: _to_table(made, names), rounds=1)


def _make_method(resolved: ResolvedRun, request: StatisticsRequest) -> tuple[Statistics, list[str]]:
    """Return the method with every public constant and σ = 1, and the name or reference of each of its statistics."""
    kinds = {name: _find_kind(name) for name in request.asked}
    columns = Columns(resolved, request.weights)
    columns.check_weights(name for name, kind in kinds.items() if not kind.of_columns)
    # A newcomer who names nothing gets what needs no choice.
    asked = request.asked or {"count": columns.labels}
    tables, names = [], []
    for name, value in asked.items():
        for one in _find_kind(name).read_setting(value, columns):
            own = next((key for key, kind in STATISTICS.items() if kind is type(one)), name)
            tables.append(one)
            names.append(own)
    is_private = resolved.aggregator.weights_privately
    counts_persons = "table_one" not in asked if request.persons is None else request.persons
    method = Statistics(
        1.0,
        weighting=request.weighting or ("present" if is_private else "uniform"),
        tables=tuple(tables),
        persons=columns.weigh("persons") if counts_persons else 0.0,
        records=request.records,
    )
    return method, names


def _find_kind(name: str) -> type[Statistic]:
    return find_plugin(name, STATISTICS, Statistic, f"statistics.{name}")


def _to_table(method: Statistics, names: list[str]) -> dict[str, Any]:
    """Return the table [method] from which the method is built again."""
    listed = {one.name: to_plain(getattr(method, one.name)) for one in fields(method) if one.init}
    listed["tables"] = [{"name": name, **table} for name, table in zip(names, listed["tables"], strict=True)]
    return {"name": method.name, **{name: value for name, value in listed.items() if value != []}}
