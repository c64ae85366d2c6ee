"""[statistics]: what is to be counted, and the run of one round that counts it.

The run has the data, the silos and the aggregator of the configuration. Its method is `statistics`, with every public
constant written out: places of features, ranges, bins and the noise multiplier. So the run's config.toml says all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from silodp.config.build import build, convert_value, make_unknown_error
from silodp.config.resolve import ResolvedRun, resolve
from silodp.config.schema import TaskSection
from silodp.config.toml_values import TomlTable, to_plain
from silodp.errors import SilodpError
from silodp.plugins import find_plugin, find_reference
from silodp.settings import Count, Epsilon, NoiseMultiplier, Positive, Settings, check_value
from silodp_analytics.evaluation.series import calibrate_one_release
from silodp_analytics.statistics.method import Statistics
from silodp_analytics.statistics.statistic import STATISTICS, Columns, Statistic

_ATTEMPTS = 20
"""The attempts that encryption is sized for, where an aggregator limits them: one round, with room for repetitions."""


@dataclass(frozen=True)
class StatisticsRequest(Settings, prefix="statistics."):
    """The table [statistics].

    Attributes:
        epsilon: The ε of the release against whoever sees the statistics.
        noise_multiplier: σ instead of ε.
        asked: What is asked of each statistic, by its name in `STATISTICS` or a reference, in the order of the cells.
        persons: Whether persons are counted.
        held_out: Whether records that a schema holds out for testing are counted like all others.
        records: The number of records of a person in a silo that always count in full.
        weighting: "uniform" or "present"; None: "present" where nobody else learns who has records where, else
            "uniform".
        weights: Column, "persons" or "survival" → its factor a: more of it means less noise there, and more elsewhere.
    """

    epsilon: Epsilon | None = None
    noise_multiplier: NoiseMultiplier | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)
    persons: bool = True
    held_out: bool = True
    records: Count = 1
    weighting: Literal["uniform", "present"] | None = None
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise SilodpError(
                "statistics.epsilon and statistics.noise_multiplier both set the noise: keep one.",
                code="argument.conflict",
                field="statistics.noise_multiplier",
            )
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
    config = resolved.config
    request = read_request(config.statistics)
    if epsilon is not None:
        request = replace(request, epsilon=epsilon, noise_multiplier=None)
    if request.epsilon is None and request.noise_multiplier is None:
        raise SilodpError(
            "statistics need noise: give --epsilon, or set statistics.epsilon.",
            code="argument.missing",
            field="statistics.epsilon",
        )
    method, names = _make_method(resolved, request)
    aggregation = dict(config.aggregation)
    if resolved.aggregator.max_rounds is not None:
        # Encryption is sized for the ε of all attempts, and a training run has many more.
        aggregation["attempts"] = min(_ATTEMPTS, resolved.aggregator.max_rounds)
    changes = {
        "name": f"{config.name[:89]}-statistics",
        "data": _count_everybody(config.data) if request.held_out else config.data,
        "rounds": 1,
        "aggregation": aggregation,
        "task": TaskSection(),  # no model is trained
        "methods": {},
        "budget": None,
        "statistics": None,
        "evaluation": {"across": "none"},
    }

    def with_noise(noise_multiplier: float) -> ResolvedRun:
        table = _to_table(replace(method, noise_multiplier=noise_multiplier), names)
        return resolve(config.model_copy(update=changes | {"method": table}))

    if request.noise_multiplier is not None:
        return with_noise(request.noise_multiplier)
    spec, _ = with_noise(1.0).build_public_spec()
    found = calibrate_one_release(
        lambda noise: replace(spec, method=replace(method, noise_multiplier=noise)),
        request.epsilon or 0.0,
        spec.noise_delta,
    )
    return with_noise(found)


def _count_everybody(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return [data] without the rule that holds records out for testing, where a schema has one."""
    schema = data.get("schema")
    if not isinstance(schema, Mapping):
        return data
    left = {name: value for name, value in schema.items() if name not in ("split", "test_share")}
    split = schema.get("split")
    if "silos" in left and split is not None:
        # A mapping may name no column that the schema lacks.
        left["silos"] = {silo: _drop_column(mapping, split) for silo, mapping in left["silos"].items()}
    return {**data, "schema": left}


def _drop_column(mapping: Mapping[str, Any], column: str) -> TomlTable:
    """Return a silo's mapping without what it says of a column."""
    return {
        part: {name: value for name, value in of_columns.items() if name != column}
        for part, of_columns in mapping.items()
    }


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
    method = Statistics(
        1.0,
        weighting=request.weighting or ("present" if is_private else "uniform"),
        tables=tuple(tables),
        persons=columns.weigh("persons") if request.persons else 0.0,
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
