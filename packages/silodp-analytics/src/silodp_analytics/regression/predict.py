"""Predictions by the coefficients of a regression, for `silodp predict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp.config.build import build_method
from silodp.data.inputs import list_arrays
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError
from silodp.parsing import MALFORMED, parse_json, parse_toml, refuse_malformed
from silodp.plugins import refuse_plugins
from silodp.predictor import TablePredictor
from silodp.report.run_record import RunRecord, read_guarantees
from silodp_analytics.regression.design import Design, Feature, Floats
from silodp_analytics.regression.method import Regression
from silodp_analytics.regression.section import RESULT

if TYPE_CHECKING:
    from silodp.accounting.guarantee import Guarantee
    from silodp.accounting.views import Adversary


@dataclass(frozen=True, eq=False)
class RegressionPredictor(TablePredictor):
    """Predicts by coefficients.

    Attributes:
        guarantees: What the run guarantees, by adversary.
        method: The regression.
        inputs: How the columns of its terms are read.
        coefficients: In the units of the table (p,).
        lost: The terms whose coefficients are lost in the noise.
    """

    guarantees: Mapping[Adversary, Guarantee]
    method: Regression
    inputs: Schema
    coefficients: Floats
    lost: tuple[str, ...]

    @property
    def schema(self) -> Schema:
        """How the columns of the terms are read; a table needs no others."""
        return self.inputs

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the family."""
        return self.method.family.name_predictions(self.method.event)

    @cached_property
    def _design(self) -> Design:
        """The columns, at their places among the features of the terms alone."""
        features = tuple(Feature.from_schema(self.inputs, one.column) for one in self.method.features)
        return replace(self.method.design, features=features)

    def predict(self, data: Any) -> Floats:
        """Predict for every row of inputs (n, ...), as `read_table` gives them."""
        method, k = self.method, len(self.method.design.baselines)
        design, beta = self._design, self.coefficients / method.family.scale
        scaled = np.asarray(np.linalg.solve(design.change, beta), np.float64)
        x = design.scale(list_arrays(data))[:, 1:]
        eta = scaled[:k] + (x @ scaled[k:])[:, None]
        return method.family.predict(eta, beta[:k] + design.middle @ beta)

    def describe(self) -> list[str]:
        """Return which coefficients say little."""
        if not self.lost:
            return []
        some = f"{', '.join(self.lost[:3])}{', …' if len(self.lost) > 3 else ''}"
        return [
            f"{len(self.lost)} of {len(self.coefficients)} coefficients are lost in the noise ({some}): predictions "
            "that differ by them differ by noise."
        ]

    def to_json(self) -> dict[str, Any]:
        """Return which coefficients say little."""
        return {"lost": list(self.lost)}


def describe_inputs(run: RunRecord, method: Regression) -> dict[str, Any] | None:
    """Return how the columns of the terms are read, JSON-ready, by config.toml; None where it does not say so."""
    columns = {one.column for one in method.features}

    def keep(table: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in table.items() if name in columns}

    try:
        schema = parse_toml(run.config or "")["data"]["schema"]
        found = {name: keep(schema.get(name, {})) for name in ("numeric", "categorical")}
        found |= {name: schema[name] for name in ("out_of_range",) if name in schema}
        reader = schema.get("reader", {})
        of_columns = {name: keep(reader[name]) for name in ("dates", "missing_in") if name in reader}
        return Schema.from_inputs({**found, "reader": {**reader, **of_columns}}).describe_inputs()
    except MALFORMED:
        return None


@refuse_plugins("predictions by a regression run no code outside silodp")
def load_predictor(directory: Path, code: str | None, head: Path | None) -> RegressionPredictor:
    """Load the coefficients of regression.json, with the guarantees of the run.

    Raises:
        SilodpError: a file is missing or damaged, or an option is for a model.
    """
    for option, given in (("--code", code), ("--head", head)):
        if given is not None:
            raise SilodpError(
                f"{option} is for a model, and {directory} holds a regression: leave it out.",
                code="argument.conflict",
                field=option,
            )
    path = directory / RESULT
    summary, guarantees = read_guarantees(directory)
    with refuse_malformed(f"{path} holds no regression: get it again.", code="bundle.damaged"):
        facts = parse_json(path.read_bytes())
        run, inputs, table = facts["run"], facts["inputs"], dict(facts["method"])
        beta = np.array([one["estimate"] for one in facts["coefficients"]], np.float64)
        lost = tuple(str(one["term"]) for one in facts["coefficients"] if one["lost"] is not None)
        table.pop("name")
        method = build_method("regression", table, "method", table["iterations"], 1e-5)
        if not isinstance(method, Regression) or beta.shape != (method.design.size,):
            raise ValueError("other coefficients")
        if not np.isfinite(beta).all():
            raise ValueError("no numbers")
    if run != summary["run"]:
        raise SilodpError(
            f"{path} and guarantee.json are of different runs: copy both files of one run.",
            code="bundle.mixed",
        )
    if inputs is None:
        raise SilodpError(
            f"{path} does not say how a table is read, since the run had no config.toml with a schema: make it with "
            "'silodp regression'.",
            code="bundle.no_schema",
        )
    with refuse_malformed(f"{path} holds no schema: get it again.", code="bundle.damaged"):
        found = RegressionPredictor(guarantees, method, Schema.from_inputs(inputs), beta, lost)
        places = [replace(one, place=0) for one in found._design.features]
        if places != [replace(one, place=0) for one in method.features]:
            raise ValueError("other columns")
    return found
