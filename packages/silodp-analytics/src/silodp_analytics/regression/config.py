"""[regression]: which regression is asked for, and the run whose rounds are its iterations.

The run has the data, the silos and the aggregator of the configuration. Its method is `regression`, with every public
constant written out: places of features, ranges, categories and the noise multiplier. So the run's config.toml
says all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from silodp.config.build import build, convert_value
from silodp.config.resolve import ResolvedRun
from silodp.data.public import PublicData
from silodp.data.tables.schema import Schema, name_classes
from silodp.errors import SilodpError
from silodp.methods.uldp import Weighting
from silodp.settings import Delta, Range
from silodp.text import suggest_name
from silodp_analytics.regression.design import make_design
from silodp_analytics.regression.families import FAMILIES, Family
from silodp_analytics.regression.method import Regression, check_labels
from silodp_analytics.regression.newton import Iterations
from silodp_analytics.sums.config import SumsRequest, derive_run


@dataclass(frozen=True)
class RegressionRequest(SumsRequest, prefix="regression."):
    """The table [regression].

    Attributes:
        outcome: The column of the label; for survival, that of the event.
        terms: Columns of the schema, and products such as "age:sex".
        family: A name of `FAMILIES`, or a table of it with its settings.
        event: The class of the outcome that counts as the event; None: the second one.
        delta: δ in place of that of the configuration.
        iterations: The number of iterations.
        interval: The level of intervals.
        weighting: How a person with records in several silos counts; see `Regression`.
    """

    outcome: str
    terms: tuple[str, ...]
    family: Any = "logistic"
    event: str | None = None
    delta: Delta | None = None
    iterations: Iterations = 4
    interval: Annotated[float, Range(above=0.5, below=1)] = 0.95
    weighting: Weighting = "primary_silo"

    @property
    def table(self) -> dict[str, Any]:
        """The table of the family."""
        found = {"name": self.family} if isinstance(self.family, str) else dict(self.family)
        return {"name": "logistic", **found}


def read_request(table: Mapping[str, Any]) -> RegressionRequest:
    """Return what a table [regression] asks for.

    Raises:
        SilodpError: a setting of it does not fit.
    """
    request = build(RegressionRequest, dict(table), "the table of the regression", "regression")
    if not isinstance(request.family, str | Mapping):
        raise SilodpError(
            f"regression.family = {request.family!r}: name one of {', '.join(FAMILIES)}, or give a table with name.",
            code="config.type",
            field="regression.family",
        )
    make_family(request)
    return request


def make_family(request: RegressionRequest) -> Family:
    """Return the family that a request names, with its constants."""
    found: Family = convert_value(Family, request.table, "regression.family")
    return found


def derive_regression(resolved: ResolvedRun, epsilon: float | None = None) -> ResolvedRun:
    """Return the run whose rounds are the iterations of the regression that a configuration asks for.

    Args:
        resolved: A configuration of a training run, of which the data, the silos, δ, the seed, the limits of silos and
            the aggregator are taken.
        epsilon: ε in place of that of [regression].

    Raises:
        SilodpError: no table, no ε, a term that is no column, or an outcome that does not fit (codes argument.missing,
            regression.terms, regression.outcome).
    """
    table = resolved.config.tables.get("regression")
    if table is None:
        raise SilodpError(
            "the configuration has no table [regression]: write one with outcome, terms and epsilon.",
            code="argument.missing",
            field="regression",
        )
    request = read_request(table).take_epsilon(epsilon, "a regression needs")
    delta = resolved.config.delta if request.delta is None else request.delta
    method = _make_method(resolved, request)
    return derive_run(resolved, request, method, Regression.to_table, rounds=request.iterations, delta=delta)


def _make_method(resolved: ResolvedRun, request: RegressionRequest) -> Regression:
    """Return the method with every public constant and σ = 1."""
    schema, data = resolved.dataset.find_schema(resolved.arguments), resolved.read_public_data()
    if schema is None:
        raise SilodpError(
            "a regression needs tables whose columns are declared: set data.source = 'tables' and data.schema.",
            code="regression.terms",
            field="data.schema",
        )
    family = make_family(request)
    _check_outcome(request, schema, data, family)
    event, typical = "", schema.label_typical or (0.0, 1.0)
    design = make_design(schema, request.terms, family.baselines)
    if family.label == "classes":
        classes = list(name_classes(schema, data.classes))
        event = classes[1] if request.event is None else request.event
        if event not in classes:
            raise _refuse_outcome(
                f"event = '{event}' is no class of '{request.outcome}': name one of {', '.join(classes)}",
                "event",
            )
        # The class numbers 0 and 1, turned around where the first class is the event.
        typical = (0.0, 1.0) if event == classes[1] else (1.0, -1.0)
    elif request.event is not None:
        raise _refuse_outcome(
            f"event = '{request.event}', and '{request.outcome}' has no classes: leave it out", "event"
        )
    return Regression(
        1.0,
        family=family,
        features=design.features,
        terms=design.terms,
        outcome=request.outcome,
        event=event,
        time=schema.time or "",
        outcome_typical=(float(typical[0]), float(typical[1])),  # type: ignore[arg-type]  # one label has one pair
        iterations=request.iterations,
        interval=request.interval,
        weighting=request.weighting,
    )


def _check_outcome(request: RegressionRequest, schema: Schema, data: PublicData, family: Family) -> None:
    """Refuse an outcome that is not the label, is a term, or does not fit the family."""
    check_labels(family, data)
    known, setting = (schema.label_columns, "label") if schema.event is None else ((schema.event,), "event")
    if request.outcome not in known:
        hint = suggest_name(request.outcome, known)
        raise _refuse_outcome(
            f"the outcome '{request.outcome}' is not the {setting} of the schema"
            f"{f' ({hint})' if hint else ''}: set data.schema.{setting} to it"
        )


def _refuse_outcome(problem: str, setting: str = "outcome") -> SilodpError:
    return SilodpError(f"regression: {problem}.", code="regression.outcome", field=f"regression.{setting}")
