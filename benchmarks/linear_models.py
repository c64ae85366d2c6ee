"""Which predicts better at the same ε per person: `silodp regression`, or uldp-sgd with its default step?

`python benchmarks/linear_models.py` trains both through the commands on the same four silos and predicts the same
held-out persons: area under the curve (or R²) and log loss (or mean squared error), means over the seeds. Incomes are
those of ACS, one record a person; ranges are rounded outwards, and centers and spreads to one digit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn import datasets  # type: ignore[import-untyped]
from sklearn.metrics import log_loss, mean_squared_error, r2_score, roc_auc_score  # type: ignore[import-untyped]
from typer.testing import CliRunner

from silodp.cli.main import app
from silodp.predictor import load_predictor

SILOS = 4
ACS_NUMBERS = ["AGEP", "SCHL", "WKHP"]
ACS_CATEGORIES = {"MAR2": 2, "SEX": 2, "COW": 8}


def load_acs(persons: int, seed: int) -> tuple[pd.DataFrame, list[str], dict[str, list[str]]]:
    """Return records, numeric columns, and categories."""
    whole = pd.read_parquet(Path(os.environ["SILODP_DATA"]) / "acs_income" / "acs_income_2018_50.parquet")
    frame = whole.sample(persons, random_state=seed)
    frame = frame.assign(target=frame["PINCP_gt_50k"].astype(int))
    return frame, ACS_NUMBERS, {name: [str(k + 1) for k in range(n)] for name, n in ACS_CATEGORIES.items()}


def load_sklearn(
    loader: str, persons: int, seed: int
) -> tuple[pd.DataFrame, list[str], dict[str, list[str]]]:
    """Return records in random order, and their first columns."""
    options = {"scaled": False} if loader == "load_diabetes" else {}
    frame = getattr(datasets, loader)(as_frame=True, **options).frame
    numbers = [column for column in frame.columns if column != "target"][:10]
    return frame.sample(min(persons, len(frame)), random_state=seed), numbers, {}


def write(
    folder: Path, frame: pd.DataFrame, numbers: list[str], categories: dict[str, list[str]], seed: int
) -> tuple[Path, pd.DataFrame]:
    """Write the silos' tables and their configuration; return it, and the held-out quarter."""
    is_real = frame["target"].nunique() > 2
    label = 'kind = "real"\nlabel_typical = [150, 75]' if is_real else 'classes = ["0", "1"]'
    columns = [*numbers, *categories, "target"]
    frame = frame[columns].assign(person=[f"p{one}" for one in range(len(frame))])
    held_out, kept = frame[: len(frame) // 4], frame[len(frame) // 4 :]
    where = np.random.default_rng(seed).integers(0, SILOS, len(kept))
    for silo in range(SILOS):
        kept[where == silo].to_csv(folder / f"s{silo}.csv", index=False)
    held_out.to_csv(folder / "held_out.csv", index=False)
    lines = []
    for name in numbers:
        unit = 10 ** math.floor(math.log10(frame[name].max() - frame[name].min()))
        low, high = (
            math.floor(frame[name].min() / unit) * unit,
            math.ceil(frame[name].max() / unit) * unit,
        )
        center, spread = (float(f"{one:.1g}") for one in (frame[name].mean(), frame[name].std()))
        lines.append(f'"{name}" = {{ range = [{low:g}, {high:g}], typical = [{center:g}, {spread:g}] }}')
    files = ", ".join(f's{silo} = "s{silo}.csv"' for silo in range(SILOS))
    path = folder / "config.toml"
    path.write_text(
        f'[data]\nsource = "tables"\nfiles = {{ {files} }}\n[data.schema]\nuser = "person"\nlabel = "target"\n{label}\n'
        "test_share = 0.0\n[data.schema.numeric]\n"
        + "\n".join(lines)
        + "\n[data.schema.categorical]\n"
        + "\n".join(f"{name} = {json.dumps(values)}" for name, values in categories.items())
        + '\n[method]\nname = "uldp-sgd"\nnoise_multiplier = 10\nweighting = "primary_silo"\n'
        + f'[regression]\noutcome = "target"\nterms = {json.dumps([*numbers, *categories])}\n'
        + ('family = { name = "linear", residual = 150 }\n' if is_real else 'family = "logistic"\n')
    )
    return path, held_out


def measure(folder: Path, command: list[str], held_out: pd.DataFrame, name: str) -> tuple[float, float]:
    """Run a command, and return the metric and the loss of its predictions."""
    out = folder / name
    done = CliRunner().invoke(app, [*command, "--out", str(out)])
    if done.exit_code != 0:
        raise RuntimeError(done.output, done.exception)
    found = load_predictor(out).predict_table(folder / "held_out.csv").iloc[:, -1].to_numpy()
    target = held_out["target"].to_numpy()
    if held_out["target"].nunique() > 2:
        return float(r2_score(target, found)), float(mean_squared_error(target, found))
    return float(roc_auc_score(target, found)), float(log_loss(target, found))


def main() -> None:
    """Print one JSON line for each table, number of persons and ε."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tables", nargs="*", default=["acs", "load_breast_cancer", "load_diabetes"])
    parser.add_argument("--persons", type=int, nargs="*", default=[500, 2_000, 10_000])
    parser.add_argument("--epsilon", type=float, nargs="*", default=[1.0, 3.0])
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    for table in arguments.tables:
        for persons in arguments.persons if table == "acs" else [10**6]:
            for epsilon in arguments.epsilon:
                found: dict[str, list[Any]] = {"regression": [], "uldp-sgd": []}
                count = 0
                for seed in range(arguments.seeds):
                    with tempfile.TemporaryDirectory() as place:
                        loaded = (
                            load_acs(persons * 4 // 3, seed)
                            if table == "acs"
                            else load_sklearn(table, persons, seed)
                        )
                        path, held_out = write(Path(place), *loaded, seed)
                        count = len(loaded[0]) - len(held_out)
                        for name, command, option in (
                            ("regression", "regression", "--epsilon"),
                            ("uldp-sgd", "run", "--target-epsilon"),
                        ):
                            line = [command, str(path), option, f"{epsilon:g}"]
                            found[name].append(measure(Path(place), line, held_out, name))
                row = {"table": table, "persons": count, "epsilon": epsilon, "seeds": arguments.seeds}
                means = {
                    name: [round(float(one), 4) for one in np.mean(values, axis=0)]
                    for name, values in found.items()
                }
                print(json.dumps({**row, **means}), flush=True)


if __name__ == "__main__":
    main()
