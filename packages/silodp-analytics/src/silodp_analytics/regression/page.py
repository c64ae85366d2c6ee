"""DIR/regression.json and DIR/regression.html: what a regression releases.

Both are made from the noisy sums in metrics.jsonl, which the ledger binds, and from the guarantees. So they are covered
by ε, and may be shared wherever the guarantee holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.report.formatting import render
from silodp_analytics import sums
from silodp_analytics.regression.families import INTERCEPT, PERSONS
from silodp_analytics.regression.predict import describe_inputs
from silodp_analytics.regression.result import LOST, RegressionResult, format_error
from silodp_analytics.regression.section import PAGE, RESULT

if TYPE_CHECKING:
    from silodp.report.page import PictureFolder
    from silodp.report.run_record import RunRecord

FORMAT = 1
"""Of regression.json."""
_WITHOUT = {
    "primary_silo": "; without persons who have more records in another silo",
    "records": "; persons with records in another silo count there, too",
}
"""Whose records a center's own fit should lack, by weighting."""
_ALT = "Forest plot: coefficients with their intervals; the numbers are in the table."


def compose_regression(run: RunRecord, result: RegressionResult, pictures: PictureFolder) -> dict[str, str]:
    """Return regression.json and regression.html by name, and write the picture of the page."""
    facts: dict[str, Any] = {"format": FORMAT, "run": run.id, "silos": result.silos, **result.to_json()}
    facts |= {"method": result.method.to_table(), "inputs": describe_inputs(run, result.method)}
    facts["releasable"] = run.guarantees["released"].releasable
    page = render(
        Path(__file__).with_name("regression.html"),
        [Path(sums.__file__).parent],
        run=run,
        result=result,
        method=result.method,
        released=run.guarantees["released"],
        assumptions=[one.text for one in run.guarantees["released"].assumptions],
        picture_of=pictures.add("forest-plot", result.plot(), _ALT),
        check=write_check(result),
        lost=LOST,
        error=format_error,
        count=lambda value: f"{float(f'{value:.3g}'):,.0f}",
        ranges=", ".join(
            f"{one.column} {one.range[0]:g} to {one.range[1]:g}"
            for one in result.method.features
            if one.range
        ),
        persons=next((one.value for one in result.totals if one.what == PERSONS and one.value > 0), None),
        lengths=", ".join(f"{one:.3g}" for one in result.method.rounds.scales),
        level=f"{100 * result.method.interval:g}",
    )
    return {RESULT: json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n", PAGE: page}


def write_check(result: RegressionResult) -> str:
    """Return the lines of Python by which a center finds the same coefficients of its own records, without noise."""
    method, lines = result.method, []
    columns = ['"(intercept)": 1.0'] if INTERCEPT in method.family.baselines else []
    for one in method.features:
        cells = f"table[{one.column!r}]"
        if one.categories:
            cells += ".astype(str)"
            # Cells of no category, missing ones too, would all count as the first category.
            lines.append(f"assert {cells}.isin({list(one.categories)}).all()")
            columns += [f"{name!r}: {cells} == {name.split('=', 1)[1]!r}" for name in one.columns]
            continue
        assert one.range is not None
        number = f"{cells}.clip({one.range[0]:g}, {one.range[1]:g})"
        if one.has_missing:
            columns += [
                f"{one.column!r}: {number}.fillna({one.middle[0]:g})",
                f"{one.columns[1]!r}: {cells}.isna()",
            ]
        else:
            columns.append(f"{one.column!r}: {number}")
    lines.append(f"X = pd.DataFrame({{{', '.join(columns)}}}, index=table.index).astype(float)")
    lines += [
        f"X[{name!r}] = {' * '.join(f'X[{part!r}]' for part in name.split(':'))}"
        for name in method.design.names
        if ":" in name and name not in {one for feature in method.features for one in feature.columns}
    ]
    lines += [
        "person = table['person'].to_numpy()",
        "weight = 1 / table.groupby('person')['person'].transform('size').to_numpy()",
    ]
    lines.append(f"assert table[{method.outcome!r}].notna().all()")
    own, y, further = method.family.write_check(method.outcome, method.event, method.time)
    return "\n".join(
        [
            "import numpy as np, pandas as pd, statsmodels.api as sm",
            f"# table: your records, `person` its column of keys{_WITHOUT.get(method.weighting, '')}",
            *lines,
            *own,
            f"fit = sm.GLM({y}, X, {method.family.statsmodels}, freq_weights=weight{further}).fit(",
            "    cov_type='cluster', cov_kwds={'groups': person, 'use_correction': False})",
            "print(fit.summary())",
        ]
    )
