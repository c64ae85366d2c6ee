"""The default step of uldp-sgd beside the best of 60 settings, chosen with the held-out records.

`python benchmarks/defaults.py TABLE...` prints, for every ε, the metric and the loss of the default (clip .5 and steps
that know the noise, T = 40), of the setting with the best metric, of that with the best loss, of one constant for all
records, and of the untrained model; means over the seeds. The settings: rows of length 1 with step .3 to 30, and rows
clipped at .1, .5 and 2 with a longest move of .3 to 30, each for T = 10, 20 and 40. The choice sees the held-out
records, so it is optimistic. Networks train on `--records` records a person: a round of all of them takes seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frozen_features import embed
from silodp.accounting.calibration import calibrate_noise_multiplier
from silodp.accounting.events import Gaussian
from silodp.aggregators.plain import make_noisy_share
from silodp.config.resolve import load_config
from silodp.data.federation import Federation
from silodp.data.inputs import concatenate
from silodp.data.silo_data import SiloData
from silodp.mechanisms.noise import Randomness
from silodp.methods import FederationSize, LocalContext, Method, UldpSgd
from silodp.methods.server_optimizer import NoiseAware, start_state, take_step
from silodp.training.made_up import make_up_records
from silodp.training.skill import measure_skill
from silodp.training.task import Task

EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "heart": ("heart_disease", {"data.users": 50}),
    "fraud": ("creditcard", {"data.users": 1000, "task.model": "logistic"}),
    "fraud mlp": ("creditcard", {"data.users": 1000}),
    "tcga": ("tcga_brca", {"data.users": 200}),
    "acs": ("acs_income", {}),
    "acs mlp": ("acs_income", {"task.model": "mlp"}),
    "mnist cnn": ("mnist", {"data.users": 1000}),
    "mnist hog": ("mnist", {"data.users": 1000, "task.model": "hog_linear"}),
    "fashion hog": (
        "mnist",
        {"data.source": "fashion_mnist", "data.users": 1000, "task.model": "hog_linear"},
    ),
}
SKLEARN = {
    "cancer": ('label = "target"\nclasses = ["0", "1"]', "load_breast_cancer", 569),
    "cancer 200": ('label = "target"\nclasses = ["0", "1"]', "load_breast_cancer", 200),
    "diabetes": ('label = "target"\nkind = "real"\nlabel_typical = [150, 75]', "load_diabetes", 442),
}
"""Tables of scikit-learn: their label, loader and persons."""
METRICS = ("roc_auc", "concordance", "r2", "accuracy")
ROUNDS, MOVES, CLIPS = (10, 20, 40), (0.3, 1.0, 3.0, 10.0, 30.0), (0.1, 0.5, 2.0)


def list_settings(silos: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield name, T and arguments of the 60 settings."""
    for rounds in ROUNDS:
        for move in MOVES:
            yield f"T {rounds} step {move:g}", rounds, {"step": move}
            for clip in CLIPS:
                rate = {"clip": clip, "server_learning_rate": move * silos / clip}
                yield f"T {rounds} clip {clip:g} move {move:g}", rounds, rate


def load(name: str, records: int) -> tuple[Federation, Task]:
    """Return the records and the task of a table."""
    method = "method={name='uldp-sgd', noise_multiplier=5.0}"
    if name in SKLEARN:
        config = load_config(write_table(Path(tempfile.mkdtemp()), *SKLEARN[name]), [method])
    else:
        example, settings = EXAMPLES[name]
        config = load_config(
            f"examples/{example}.toml", [*(f"{key}={value}" for key, value in settings.items()), method]
        )
    federation = config.load_federation()
    if records:
        federation = replace(federation, silos=tuple(thin(silo, records) for silo in federation.silos))
    task = config.build_task(federation)
    if isinstance(task.model, nn.Sequential) and not [*task.model[0].parameters()]:
        # Fixed features, computed once.
        federation = embed(task.model[0], federation)
        task = Task(task.model[1], task.loss, task.metrics)
    task.use_examples(*make_up_records(federation.public()))
    return federation, task


def thin(silo: SiloData, records: int) -> SiloData:
    """Return the first so many records of every person in a silo."""
    order = np.argsort(silo.user, kind="stable")
    first = np.searchsorted(silo.user[order], silo.user[order])
    kept = np.sort(order[np.arange(len(order)) - first < records])
    return SiloData(silo.name, silo.x[kept], silo.y[kept], silo.user[kept], labels=silo.labels)


def write_table(folder: Path, label: str, loader: str, persons: int) -> Path:
    """Write a table of scikit-learn as those of four silos, and its configuration with ranges rounded outwards."""
    from sklearn import datasets  # type: ignore[import-untyped]

    frame = getattr(datasets, loader)(
        as_frame=True, **({"scaled": False} if loader == "load_diabetes" else {})
    ).frame
    rng = np.random.default_rng(0)
    columns = [column for column in frame.columns if column != "target"][:13]
    frame = frame[[*columns, "target"]]
    numeric = []
    for column in columns:
        center, spread = (float(f"{value:.1g}") for value in (frame[column].mean(), frame[column].std()))
        least, most = frame[column].min(), frame[column].max()
        width = float(f"{most - least:.1g}")
        numeric.append(
            f'"{column}" = {{ range = [{least - width}, {most + width}], typical = [{center}, {spread}] }}'
        )
    frame["person"] = [f"p{one}" for one in rng.permutation(np.arange(len(frame)) % persons)]
    where = rng.integers(0, 4, len(frame))
    for silo in range(4):
        frame[where == silo].to_csv(folder / f"s{silo}.csv", index=False)
    files = ", ".join(f's{silo} = "s{silo}.csv"' for silo in range(4))
    (folder / "table.toml").write_text(
        f'[data]\nsource = "tables"\nfiles = {{ {files} }}\n[data.schema]\nuser = "person"\n{label}\n'
        + "test_share = 0.25\n[data.schema.numeric]\n"
        + "\n".join(numeric)
        + "\n"
    )
    return folder / "table.toml"


def train(method: Method, task: Task, federation: Federation, rounds: int, seed: int) -> Tensor:
    """Return the parameters (d,) after a run's rounds, in a plain loop without messages, ledger and guarantee."""
    randomness = Randomness.from_seed(seed)
    population = FederationSize(len(federation.silos), federation.users)
    weights = torch.from_numpy(np.array(method.user_weights(federation.counts(), population))).flatten()
    # One silo that has every pair of silo and person as a person: the same rows and weights, added up at once.
    merged = FederationSize(1, population.users)
    x, y = (concatenate([getattr(silo, field) for silo in federation.silos]) for field in ("x", "y"))
    table = task.tensors(x, y)
    owners = [s * population.users + silo.user for s, silo in enumerate(federation.silos)]
    pair = torch.from_numpy(np.concatenate(owners))
    params = task.initial(int(randomness.stream("start").integers(2**31)))
    optimizer = method.make_server_optimizer()
    state = start_state(optimizer, params)
    for round_ in range(rounds):
        own = randomness.child("round", round_)
        context = LocalContext(task, params, *table, pair, weights, merged, own)
        move = method.server_move(population, round_, rounds)
        total = make_noisy_share(method.local_update(context), weights, own.stream("noise")).value
        params, state = take_step(optimizer, params, total, state, move)
    return params


def score(task: Task, params: Tensor, federation: Federation) -> dict[str, float]:
    """Return the metric, and the log loss where there is one, else the task's loss."""
    assert federation.test is not None
    if not bool(params.isfinite().all()):
        return {"metric": -math.inf, "loss": math.inf}
    found = task.evaluate(params, federation.test.x, federation.test.y)
    if not math.isfinite(found["loss"]):
        return {"metric": -math.inf, "loss": math.inf}
    return {"metric": found[next(name for name in METRICS if name in found)], "loss": found["loss"]}


def find_constant(task: Task, federation: Federation) -> float | None:
    """Return the loss of the best constant; None where skill compares no loss."""
    assert federation.test is not None
    labels = federation.public().labels
    y = torch.as_tensor(np.asarray(federation.test.y))
    if labels == "real":
        return float(y.double().var(unbiased=False))
    x, _ = task.tensors(federation.test.x, federation.test.y)
    skill = measure_skill(task.predict(task.initial(0), x), y, labels)
    return {one.metric: one.constant for one in (() if skill is None else skill.gains)}.get("log_loss")


def average(scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the means."""
    return {name: float(np.mean([one[name] for one in scores])) for name in scores[0]}


def average_runs(
    federation: Federation, task: Task, one_round: float, seeds: int, rounds: int, **fields: Any
) -> dict[str, float]:
    """Return the mean scores of uldp-sgd; T rounds with √T times the noise of one cost as much as that one."""
    method = UldpSgd(math.sqrt(rounds) * one_round, weighting="records", **fields)
    return average(
        [score(task, train(method, task, federation, rounds, one), federation) for one in range(seeds)]
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tables", nargs="*", default=[*EXAMPLES, *SKLEARN])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--records", type=int, default=0, help="at most so many of a person in a silo; 0: all"
    )
    parser.add_argument("--epsilon", type=float, nargs="*", default=[1.0, 3.0])
    parser.add_argument("--thin", type=int, default=1, help="every so many of the 60 settings")
    parser.add_argument(
        "--steps", type=json.loads, default={}, help="settings of the default's NoiseAware, as JSON"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.tables:
        federation, task = load(name, arguments.records)
        about = {
            "table": name,
            "persons": federation.users,
            "d": task.size,
            "seeds": arguments.seeds,
            "constant": find_constant(task, federation),
            "untrained": score(task, task.initial(0), federation),
        }
        for epsilon in arguments.epsilon:
            one_round = calibrate_noise_multiplier(lambda noise: [(Gaussian(noise), 1)], epsilon, 1e-5)

            measure = partial(average_runs, federation, task, one_round, arguments.seeds)
            settings = list(list_settings(len(federation.silos)))[:: arguments.thin]
            found = {label: measure(rounds, **fields) for label, rounds, fields in settings}
            by_metric = max(found, key=lambda label: found[label]["metric"])
            by_loss = min(found, key=lambda label: found[label]["loss"])
            row = {
                **about,
                "epsilon": epsilon,
                "settings": len(settings),
                "default": measure(40, server_optimizer=NoiseAware(**arguments.steps)),
                "best metric": {"setting": by_metric, **found[by_metric]},
                "best loss": {"setting": by_loss, **found[by_loss]},
            }
            print(json.dumps(row, default=float), file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
