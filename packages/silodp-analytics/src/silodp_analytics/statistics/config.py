"""[statistics]: what is to be counted, and the run of one round that counts it.

The run has the data, the silos and the aggregator of the configuration. Its method is `statistics`, with every public
constant written out: places of features, ranges, bins and the noise multiplier. So the run's config.toml says all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from silodp.config.build import build
from silodp.config.resolve import ResolvedRun, resolve
from silodp.config.schema import TaskSection
from silodp.config.toml_values import TomlTable, to_plain
from silodp.data.tables.schema import Schema, name_classes
from silodp.errors import SilodpError
from silodp.settings import Count, Epsilon, NoiseMultiplier, Positive, Settings, check_value
from silodp.text import suggest_name
from silodp_analytics.counted import (
    Block,
    CategoryCells,
    ClassCells,
    Moments,
    NumericBins,
    SurvivalCells,
    place_categories,
    place_number,
)
from silodp_analytics.evaluation.series import calibrate_one_release
from silodp_analytics.statistics.method import Statistics

_ATTEMPTS = 20
"""The attempts that encryption is sized for, where an aggregator limits them: one round, with room for repetitions."""


@dataclass(frozen=True)
class SurvivalRequest(Settings, prefix="statistics.survival."):
    """Survival times to be counted.

    Attributes:
        times: Public edges between bins of time, ascending.
        by: A categorical column whose categories are compared; None compares nothing.
    """

    times: tuple[float, ...]
    by: str | None = None


@dataclass(frozen=True)
class StatisticsRequest(Settings, prefix="statistics."):
    """The table [statistics].

    Attributes:
        epsilon: The ε of the release against whoever sees the statistics.
        noise_multiplier: σ instead of ε.
        histogram: Column with a public range → number of bins; quantiles follow from a histogram.
        mean: Columns with a public range whose mean and standard deviation are estimated.
        count: Columns with public categories, and the label where it is a class.
        survival: Survival times.
        persons: Whether persons are counted.
        held_out: Whether records that a schema holds out for testing are counted like all others.
        records: The number of records of a person in a silo that always count in full.
        weighting: "uniform" or "present"; None: "present" where nobody else learns who has records where, else
            "uniform".
        weights: Column, "persons" or "survival" → its factor a: more of it means less noise there, and more elsewhere.
    """

    epsilon: Epsilon | None = None
    noise_multiplier: NoiseMultiplier | None = None
    histogram: Mapping[str, int] = field(default_factory=dict)
    mean: tuple[str, ...] = ()
    count: tuple[str, ...] = ()
    survival: SurvivalRequest | None = None
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

    @property
    def names_nothing(self) -> bool:
        """Whether no column is named."""
        return not (self.histogram or self.mean or self.count or self.survival)


def read_request(table: Mapping[str, Any] | None) -> StatisticsRequest:
    """Return what a table [statistics] asks for; without a table, persons and classes alone.

    Raises:
        SilodpError: a setting of it does not fit.
    """
    return build(StatisticsRequest, table or {}, "the table of statistics", "statistics")


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
    method = _make_method(resolved, request)
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
        table = _to_table(replace(method, noise_multiplier=noise_multiplier))
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


def _make_method(resolved: ResolvedRun, request: StatisticsRequest) -> Statistics:
    """Return the method with every public constant, and σ = 1."""
    columns = _Columns(resolved, request)
    is_private = resolved.aggregator.weights_privately
    blocks = list(columns.list_blocks())

    def pick(kind: type[Any]) -> tuple[Any, ...]:
        return tuple(block for block in blocks if type(block) is kind)

    return Statistics(
        1.0,
        weighting=request.weighting or ("present" if is_private else "uniform"),
        histograms=pick(NumericBins),
        means=pick(Moments),
        categories=pick(CategoryCells),
        classes=pick(ClassCells),
        survival=pick(SurvivalCells),
        persons=columns.weigh("persons") if request.persons else 0.0,
        records=request.records,
    )


@dataclass
class _Columns:
    """The declared columns of a run, and what is asked of them."""

    resolved: ResolvedRun
    request: StatisticsRequest

    def __post_init__(self) -> None:
        self.schema: Schema | None = self.resolved.dataset.find_schema(self.resolved.arguments)
        self.data = self.resolved.read_public_data()
        has_survival = self.request.survival is not None
        known = {"persons", *self._numeric, *self._categorical, *self._labels, *["survival"] * has_survival}
        for name in self.request.weights:
            if name not in known:
                raise _refuse(name, "statistics.weights names it, and it is no column of the schema", known)

    @property
    def _numeric(self) -> Mapping[str, Any]:
        return {} if self.schema is None else self.schema.numeric_columns()

    @property
    def _categorical(self) -> Mapping[str, Any]:
        return {} if self.schema is None else self.schema.categorical_columns()

    @property
    def _labels(self) -> tuple[str, ...]:
        """The name of the label where it is a class."""
        if self.data.labels != "classes" or self.data.label_shape:
            return ()
        return ("label",) if self.schema is None else self.schema.label_columns

    def weigh(self, name: str) -> float:
        """Return the factor a of a column."""
        return float(self.request.weights.get(name, 1.0))

    def list_blocks(self) -> Iterator[Block]:
        """Yield the blocks that are asked for."""
        request = self.request
        for name, bins in request.histogram.items():
            yield NumericBins(**self._place_number(name, "histogram"), bins=bins)
        for name in request.mean:
            yield Moments(**self._place_number(name, "mean"))
        # A newcomer who names nothing gets what needs no choice.
        for name in self._labels if request.names_nothing else request.count:
            yield self._count(name)
        if request.survival is not None:
            by = request.survival.by
            groups = None if by is None else self._place_categories(by, "survival.by")
            column = (self.schema.time if self.schema else None) or "time"
            yield SurvivalCells(
                column, times=request.survival.times, by=groups, weight=self.weigh("survival")
            )

    def _place_number(self, name: str, setting: str) -> dict[str, Any]:
        """Return the fields of a block of a numeric column."""
        if name not in self._numeric:
            raise self._refuse_column(name, setting, self._numeric)
        assert self.schema is not None
        return {**place_number(self.schema, name), "weight": self.weigh(name)}

    def _place_categories(self, name: str, setting: str) -> CategoryCells:
        if name not in self._categorical:
            raise self._refuse_column(name, setting, self._categorical)
        assert self.schema is not None
        return place_categories(self.schema, name, self.weigh(name))

    def _count(self, name: str) -> Block:
        if name in self._labels:
            classes = name_classes(self.schema, self.data.classes)
            return ClassCells(name, classes=classes, weight=self.weigh(name))
        return self._place_categories(name, "count")

    def _refuse_column(self, name: str, setting: str, known: Mapping[str, Any]) -> SilodpError:
        """Return the error about a column that has no public constants for a statistic."""
        if name in self._categorical:
            problem = (
                f"statistics.{setting} is for numbers, and it has categories: name it in statistics.count"
            )
        elif name in self._numeric:
            problem = (
                f"statistics.{setting} is for categories, and it is a number: name it in statistics.histogram"
            )
        elif setting in ("histogram", "mean"):
            problem = (
                f"declare data.schema.numeric.{name} with a public range: a range read from rows would tell"
            )
        else:
            problem = (
                f"declare data.schema.categorical.{name} with public categories: those of rows would tell"
            )
        return _refuse(name, problem, known)


def _refuse(name: str, problem: str, known: Any) -> SilodpError:
    hint = suggest_name(name, sorted(known))
    return SilodpError(
        f"statistics of '{name}': {problem}{f' ({hint})' if hint else ''}.",
        code="statistics.column",
        field="statistics",
    )


def _to_table(method: Statistics) -> dict[str, Any]:
    """Return the table [method] from which the method is built again."""
    listed = {one.name: to_plain(getattr(method, one.name)) for one in fields(method) if one.init}
    return {"name": method.name, **{name: value for name, value in listed.items() if value != []}}
