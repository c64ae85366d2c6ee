"""`silodp predict` by the coefficients of a regression, from regression.json and guarantee.json alone."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

from support.clinics import draw_clinics, write_clinics
from support.commands import Silodp, assert_sentence


def run_regression(
    silodp: Silodp, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: str
) -> dict[str, float]:
    """Fit a regression, copy its public files to "copy", and return its coefficients."""
    monkeypatch.chdir(folder)
    config = write_clinics(
        folder, draw_clinics(300), asked="noise_multiplier = 0.0\niterations = 12", **changes
    )
    assert silodp("regression", config, "--out", "run").status == 0
    Path("copy").mkdir()
    for name in ("regression.json", "guarantee.json"):
        shutil.copy(f"run/{name}", "copy")
    found = json.loads(Path("copy/regression.json").read_text())
    return {one["term"]: one["estimate"] for one in found["coefficients"]}


def predict(silodp: Silodp, *more: Any) -> pd.DataFrame:
    done = silodp("predict", "copy", "new.csv", "--out", "out.csv", *more)
    assert done.status == 0, done.err
    return pd.read_csv("out.csv")


def write_new() -> pd.DataFrame:
    """A table with the columns of the terms in another order, and others."""
    frame = draw_clinics(40, seed=9)[["patient", "dose", "stage", "age", "sex"]]
    frame.to_csv("new.csv", index=False)
    return frame


def linear_part(frame: pd.DataFrame, found: dict[str, float]) -> Any:
    male = (frame.sex == "m").to_numpy(float)
    columns = {"age": frame.age, "sex=m": male, "dose": frame.dose, "age:sex=m": frame.age * male}
    columns |= {f"stage={one}": frame.stage == one for one in ("II", "III")}
    return sum(found[name] * np.asarray(column, float) for name, column in columns.items())


@pytest.mark.parametrize("family", ["logistic", "linear", "poisson"])
def test_predictions_are_those_of_the_table_of_coefficients(
    family: str, silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_regression(silodp, tmp_path, monkeypatch, family=family)
    frame = write_new()
    eta = found["(intercept)"] + linear_part(frame, found)
    name = "probability_yes" if family == "logistic" else "prediction"
    out = predict(silodp, "--copy", "patient")
    assert list(out.columns) == ["patient", name]
    mean = {"logistic": expit, "linear": lambda one: one, "poisson": np.exp}[family](eta)
    assert out[name].to_numpy() == pytest.approx(mean, rel=1e-5)


def test_a_survival_regression_predicts_the_risk_by_the_horizon_and_a_hazard_ratio(
    silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_regression(silodp, tmp_path, monkeypatch, family="survival")
    frame = write_new()
    effect = linear_part(frame, found)
    rates = [found[name] for name in ("(rate 0 to 6)", "(rate 6 to 12.3)", "(rate 12.3 to 30)")]
    hazard = sum(width * np.exp(rate + effect) for width, rate in zip((6, 6.3, 17.7), rates, strict=True))
    out = predict(silodp)
    assert out["risk_by_30"].to_numpy() == pytest.approx(-np.expm1(-hazard), rel=1e-5)
    middle = 58 * found["age"] + 5 * found["dose"]
    assert out["hazard_ratio"].to_numpy() == pytest.approx(np.exp(effect - middle), rel=1e-5)


def test_what_does_not_fit_is_refused(
    silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_regression(silodp, tmp_path, monkeypatch)
    write_new()

    def ask(*more: Any) -> Any:
        return silodp("predict", "copy", "new.csv", "--out", "out.csv", *more)

    assert_sentence(ask("--head", "head.json"), code="argument.conflict")
    assert_sentence(ask("--code", "model.py"), code="argument.conflict")
    path = Path("copy/regression.json")
    whole = json.loads(path.read_text())
    stranger = whole["method"] | {"family": {"name": f"{tmp_path}/evil.py:Evil"}}
    (tmp_path / "evil.py").write_text("open('ran', 'w')")
    term = whole["coefficients"][1]
    for change, code in (
        ({"run": "another"}, "bundle.mixed"),
        ({"inputs": None}, "bundle.no_schema"),
        (
            {"inputs": whole["inputs"] | {"numeric": whole["inputs"]["numeric"] | {"age": [0, 1]}}},
            "bundle.damaged",
        ),
        ({"coefficients": whole["coefficients"][1:]}, "bundle.damaged"),
        ({"coefficients": [term | {"estimate": math.inf}] * 7}, "bundle.damaged"),
        ({"method": stranger}, "bundle.damaged"),
    ):
        path.write_text(json.dumps(whole | change))
        assert_sentence(ask(), code=code)
    path.write_text("{")
    assert_sentence(ask(), code="bundle.damaged")
    assert not Path("ran").exists()
    assert not Path("out.csv").exists()


def test_lost_coefficients_are_named(silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_regression(silodp, tmp_path, monkeypatch)
    write_new()
    path = Path("copy/regression.json")
    whole = json.loads(path.read_text())
    whole["coefficients"][1]["lost"] = "noise"
    path.write_text(json.dumps(whole))
    done = silodp("predict", "copy", "new.csv", "--out", "out.csv", "--json")
    assert done.json["lost"] == ["age"]
    assert done.json["columns"] == ["probability_yes"]
