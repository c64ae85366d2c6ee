"""A language model of 10⁶ parameters on the docstrings of Python: all of it, or LoRA adapters on a public model.

    pip install peft transformers                                the adapters
    python benchmarks/text_adapters.py pretrain                  the public model, into base.safetensors (5 minutes)
    python benchmarks/text_adapters.py public                    its perplexity, from base.safetensors
    python benchmarks/text_adapters.py train adapters --epsilon 7.94 --step 0.7 --seeds 0 1 2
    python benchmarks/text_adapters.py group --epsilon 7.94 --rate 0.02 --seeds 0 1 2
    python benchmarks/text_adapters.py memory                    peaks of fresh processes

Modules of the standard library stand for persons, in three silos, with at most four rows of 64 characters in each.
Public are the docstrings of numpy, scipy, scikit-learn and pandas, without their tests: no text is in both. "adapters"
trains LoRA on the frozen public model, "tuned" all parameters from the values of the public model, and "fresh" all from
random ones. `group` is `uldp-group` with as many gradients of records as `train` has, in expectation. Printed is the
perplexity of a third of the rows of held-out persons, and ε for all rows of a person, at δ = 10⁻⁵ against whoever sees
the models.

Sources: Hu et al., "LoRA" (ICLR 2022); Charles et al., "Fine-Tuning Large Language Models with User-Level Differential
Privacy" (SaTML 2025).
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import silodp
from silodp.accounting.calibration import calibrate_noise_multiplier
from silodp.accounting.views import View
from silodp.methods import Method, UldpAvg
from silodp.training import LocalTraining, cross_entropy, silo_update, user_updates
from silodp.training.gradients import select_gradient
from silodp.training.metrics import perplexity
from silodp.training.models import causal_lm
from silodp_experiments.benchmarks import docstrings
from silodp_experiments.benchmarks.text import CHARACTERS, LENGTH, encode, read_docstrings
from silodp_experiments.sequences import pack_sequences
from silodp_experiments.uldp_baselines import Default, UldpGroup, split_group

PUBLIC = ("numpy", "scipy", "sklearn", "pandas")
LAYERS = ["query", "key", "value", "out", "wide", "narrow"]
ROWS, ROUNDS, SILOS, DELTA = 4, 5, 3, 1e-5
LOCAL = LocalTraining(learning_rate=0.5, epochs=1, batch_size=2)


def make_network() -> nn.Module:
    """Return the transformer: 1,012,224 parameters."""
    return causal_lm(CHARACTERS, (LENGTH,), width=128, layers=5, heads=4)


# --- the public model ---


def load_public() -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of the docstrings of public packages, and the characters that follow."""
    texts = set[str]()
    for name in PUBLIC:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        for path in Path(spec.origin).parent.rglob("*.py"):
            if "tests" not in path.parts:
                texts |= set(read_docstrings(path))
    rows = [encode(text) for text in sorted(texts)]
    x, y, _ = pack_sequences(rows, [0] * len(rows), LENGTH)
    return torch.from_numpy(x), torch.from_numpy(y)


def pretrain(file: Path, steps: int = 900) -> None:
    """Train the transformer on public rows without privacy, and store it."""
    torch.manual_seed(0)
    x, y = load_public()
    model = make_network()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for _ in range(steps):
        batch = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
    save_file(model.state_dict(), file)
    print(f"{len(x):,} public rows; perplexity of held-out persons {measure(model):.2f}")


def show_public(file: Path) -> None:
    """Print the perplexity of the stored public model, before any private training."""
    model = make_network()
    model.load_state_dict(load_file(file))
    print(f"public model: perplexity of held-out persons {measure(model):.2f}")


def measure(model: nn.Module) -> float:
    """Return the perplexity of the rows of held-out persons."""
    test = load_federation().test
    assert test is not None
    with torch.no_grad():
        return perplexity(model(torch.from_numpy(test.x)), torch.from_numpy(test.y))


# --- training ---


def make_task(way: str, file: Path, rank: int, seed: int) -> silodp.Task:
    """Return the model with what is trained of it."""
    torch.manual_seed(seed)
    network = make_network()
    if way != "fresh":
        network.load_state_dict(load_file(file))
    if way == "adapters":
        from peft import LoraConfig, inject_adapter_in_model

        network = inject_adapter_in_model(LoraConfig(r=rank, target_modules=LAYERS), network)
    metrics = {"perplexity": perplexity}
    return silodp.Task(network, cross_entropy(), metrics, pretrained=True if way == "tuned" else None)


def load_federation() -> silodp.Federation:
    """Return `docstrings` with at most four rows of a person in a silo, and a third of the rows held out."""
    federation, coins = docstrings(SILOS), np.random.default_rng(0)
    silos = []
    for silo in federation.silos:
        order = coins.permutation(len(silo.user))
        order = order[np.argsort(silo.user[order], kind="stable")]
        user = silo.user[order]
        rows = order[np.arange(len(user)) - np.searchsorted(user, user) < ROWS]
        silos.append(replace(silo, x=silo.x[rows], y=silo.y[rows], user=silo.user[rows], test=None))
    test = federation.test
    assert test is not None
    return replace(
        federation, silos=tuple(silos), test=replace(test, x=test.x[::3], y=test.y[::3], user=test.user[::3])
    )


def calibrate(make: Callable[[float], Method], epsilon: float) -> Method:
    """Return the method with the least noise that costs at most ε."""
    view = View("released", SILOS)
    noise = calibrate_noise_multiplier(lambda noise: [(make(noise).dp_event(view), ROUNDS)], epsilon, DELTA)
    return make(noise)


def make_group(
    federation: silodp.Federation, size: int, sampling: float, rate: float, epsilon: float
) -> Method:
    """Return `uldp-group` with as many gradients a round, in expectation, as there are rows."""
    counts = federation.counts()
    used = sum(
        np.minimum(row, most).sum() for row, most in zip(counts, split_group(size, SILOS), strict=True)
    )
    steps = round(counts.sum() / (sampling * used))
    print(f"{counts.sum()} rows, {sampling * used * steps:.0f} gradients a round in {steps} steps")

    def make(noise: float) -> Method:
        return UldpGroup(
            group_size=size,
            noise_multiplier=noise,
            clip=1.0,
            record_sampling=sampling,
            local_steps=steps,
            expected_batch_size=sampling * size * federation.users / SILOS,
            local_learning_rate=rate,
        )

    return calibrate(make, epsilon)


def run(method: Method, given: argparse.Namespace, federation: silodp.Federation) -> None:
    """Train with every seed, and print a line."""
    found, times = [], list[float]()
    for seed in given.seeds:
        task = make_task(given.way, given.base, given.rank, seed)
        ends = list[float]()
        result = silodp.train(
            federation,
            task,
            method,
            rounds=ROUNDS,
            seed=seed,
            evaluate_every=ROUNDS,
            delta=DELTA,
            callbacks=[lambda _, ends=ends: ends.append(time.process_time())],
        )
        found.append(result.metrics[-1]["metrics"].get("perplexity", float("inf")))
        times += np.diff(ends)[:-1].tolist()  # in the last round the model is evaluated, too
    error = np.std(found, ddof=1) / len(found) ** 0.5 if len(found) > 1 else float("nan")
    epsilon = "none" if result.epsilon is None else f"{result.epsilon:.2f}"
    print(
        f"{given.way} d={task.size:,} {method.name} ε={epsilon} perplexity {np.mean(found):.2f} ± {error:.2f} "
        f"({', '.join(f'{one:.2f}' for one in found)}) {np.mean(times):.1f} s a round",
        flush=True,
    )


# --- memory ---


def measure_peak(kind: str, way: str, file: Path, persons: int) -> tuple[float, float]:
    """Return the peak of this process in MB, and the seconds of a round of persons with four rows each.

    Args:
        kind: "empty" only loads the model; "none" trains on batches of 16 rows without privacy; "planned" trains
            persons in the parts that silodp plans; "at once" trains all of them side by side.
        way: What is trained.
        file: The public model.
        persons: How many there are.
    """
    task = make_task(way, file, 1, 0)
    ids = torch.randint(CHARACTERS, (ROWS * persons, LENGTH + 1))
    x, y, user = ids[:, :-1].clone(), ids[:, 1:].clone(), torch.arange(len(ids)) // ROWS
    start, generator, began = task.initial(0), torch.Generator().manual_seed(0), time.process_time()
    if kind == "none":
        silo_update(task, start, x, y, replace(LOCAL, batch_size=16), generator)
    elif kind == "planned":
        for _, rows in user_updates(task, start, x, y, user, LOCAL, generator):
            del rows
    elif kind == "at once":
        compute = select_gradient("user", task, x, y)(task)
        params = task.unflatten(start.repeat(persons, 1))
        with torch.no_grad():
            for batch in (slice(0, 2), slice(2, 4)):
                part = [rows.view(persons, ROWS, LENGTH)[:, batch] for rows in (x, y)]
                LOCAL.step(params, (), compute(params, *part, torch.ones(persons, 2)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, time.process_time() - began


def show_memory(file: Path) -> None:
    """Print a line for each way of training and number of persons, each from a fresh process."""
    cases = [("none", 117), *((kind, persons) for kind in ("planned", "at once") for persons in (8, 32, 117))]
    for way in ("adapters", "tuned"):
        for kind, persons in (("empty", 0), *cases):
            command = [sys.executable, __file__, "peak", way, "--base", str(file)]
            subprocess.run([*command, "--kind", kind, "--persons", str(persons)], check=True)


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["pretrain", "public", "train", "group", "memory", "peak"])
    parser.add_argument("way", choices=["adapters", "tuned", "fresh"], nargs="?", default="adapters")
    parser.add_argument("--base", type=Path, default=Path("base.safetensors"))
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--epsilon", type=float, help="without it, training is not private")
    parser.add_argument("--step", type=float, default=1.0)
    parser.add_argument("--size", type=int, default=3)
    parser.add_argument("--sampling", type=float, default=0.25)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kind", default="planned")
    parser.add_argument("--persons", type=int, default=8)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if given.part == "pretrain":
        pretrain(given.base)
    elif given.part == "public":
        show_public(given.base)
    elif given.part == "memory":
        show_memory(given.base)
    elif given.part == "peak":
        peak, seconds = measure_peak(given.kind, given.way, given.base, given.persons)
        print(f"{given.way} {given.kind} {given.persons} persons: {peak:.0f} MB, {seconds:.1f} s")
    else:
        federation = load_federation()
        if given.part == "group":
            method = make_group(federation, given.size, given.sampling, given.rate, given.epsilon)
        elif given.epsilon is None:
            method = Default(local=replace(LOCAL, learning_rate=given.rate, batch_size=16))
        else:
            method = calibrate(lambda noise: UldpAvg(noise, local=LOCAL, step=given.step), given.epsilon)
        run(method, given, federation)


if __name__ == "__main__":
    main()
