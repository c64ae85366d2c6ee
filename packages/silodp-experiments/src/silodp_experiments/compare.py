"""`silodp compare`: several methods on the same federation, mean ± sd over seeds.

Every finished run (method, seed) is kept in DIR/runs: a comparison that was stopped continues after the last one.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from silodp.accounting.events import NonPrivate
from silodp.accounting.ledger import Budget
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.aggregators import Plain, RunSpec
from silodp.config.resolve import ResolvedRun
from silodp.config.schema import TaskSection
from silodp.data.federation import Federation
from silodp.errors import SilodpError
from silodp.methods.base import supports
from silodp.parsing import MALFORMED, parse_json
from silodp.plugins import is_reference, locate_code
from silodp.report.divergence import get_measure, list_quantities
from silodp.report.formatting import as_number, format_measure
from silodp.report.guarantee_text import ADVERSARY_LABELS, is_only_claimed
from silodp.report.held_out import measure_skill_of
from silodp.report.skill import Skill, average_skills
from silodp.runtime.executor import THIS_PROCESS, Executor
from silodp.runtime.prepare import prepare_run
from silodp.runtime.simulation import Simulation
from silodp.runtime.train import run
from silodp.settings import Whole
from silodp.text import is_own_module, join_names, pluralize
from silodp.training.task import Task
from silodp.wire.files import write_durably
from silodp_experiments.compare_page import format_table, render_comparison
from silodp_experiments.method_specs import MethodSpec, check_labels, parse_methods

Fields = dict[str, Any]
Progress = Callable[[str], None]
"""A function that is called after every run, with a line of text."""


def compare_methods(
    resolved: ResolvedRun,
    specs: Sequence[MethodSpec],
    seeds: int,
    out: str | Path,
    on_progress: Progress | None = None,
    executor: Executor = THIS_PROCESS,
) -> Fields:
    """Run every method with every seed, and write the comparison to a directory.

    Training without privacy (`default`) is added if no given method is without privacy. Row 0 of every run is
    the untrained model. The budget of the configuration is applied to every method that has a guarantee against
    the adversary of the budget, and `isolate_units` to every method that can compute persons alone. All runs use one
    federation: a seed determines the initial model, the batches and the noise, not the records.

    Args:
        resolved: data, task, rounds, δ, accountant, aggregator.
        specs: the methods, with different labels.
        seeds: runs per method, with seeds 0, 1, …
        out: directory for compare.json, compare.md, compare.html, plots/ and runs/ (finished runs, reused if
            method, settings, model, data, seed and the files of code that the configuration names are the same).
        on_progress: a `Progress`, called after every run.
        executor: where the runs are computed.

    Returns:
        The content of compare.json: for each method ε by adversary and, per quantity, mean and sd by round.

    Raises:
        SilodpError: no seeds, two equal labels, the directory of a run, or a setting that a run refuses; all methods
            are checked before the first one trains.
    """
    Whole(what="runs per method").check("seeds", seeds)
    specs = list(specs)
    if not any(spec.method.unit is None for spec in specs):
        specs += parse_methods(resolved, "default")
    check_labels(specs)
    out = Path(out)
    # Both write plots/, and a comparison removes pictures that are not its own.
    if (out / "run_spec.json").exists():
        raise SilodpError(
            f"{out} is the directory of a run, whose pictures a comparison would replace: choose another.",
            code="run.exists",
            field="out",
        )
    federation = resolved.load_federation()
    if federation.test is None or len(federation.test) == 0:
        raise SilodpError(
            "there are no held-out records to compare methods on: set data.schema.test_share, for "
            "example to 0.2.",
            code="data.no_records",
            field="data.schema.test_share",
        )
    task = resolved.build_task(federation)
    prepared = [_prepare(resolved, federation, task, spec) for spec in specs]
    (out / "runs").mkdir(parents=True, exist_ok=True)
    # Seeds are the inner loop, so that the accountant finds every ε of a method in its cache.
    wanted = [
        (spec.label, replace(run_spec, seed=seed))
        for spec, run_spec in zip(specs, prepared, strict=True)
        for seed in range(seeds)
    ]
    data = federation.digest()
    names = [_digest_run(resolved, task, spec, data) for _, spec in wanted]
    found: dict[str, Fields] = {}

    def note(done: Fields, again: str = "") -> None:
        name = done["fingerprint"]
        found[name] = done
        if on_progress is not None:
            label, spec = wanted[names.index(name)]
            ends = {one: get_measure(done["rows"][-1], one) for one in list_quantities(done["rows"])}
            end = " ".join(f"{one} {format_measure(value)}" for one, value in ends.items())
            on_progress(
                f"run {sum(map(found.__contains__, names))}/{len(names)}  {label}, seed {spec.seed}  {end}{again}"
            )

    for name in names:
        kept = _load_kept(_find_file(out, name), name)
        if kept is not None:
            note(kept, "  (finished before)")
    items = {name: spec for name, (_, spec) in zip(names, wanted, strict=True) if name not in found}
    shared = federation, task, resolved.config.evaluate_every
    with (executor if items else THIS_PROCESS).open_pool() as pool:
        for done in pool(_train, shared, items.items()):
            content = json.dumps(done, ensure_ascii=False).encode()
            write_durably(_find_file(out, done["fingerprint"]), content)
            note(done)
    in_order = [found[name] for name in names]
    runs = [in_order[first : first + seeds] for first in range(0, len(in_order), seeds)]
    result = _summarize(resolved, federation, specs, runs, seeds)
    write_durably(out / "compare.json", (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    write_durably(out / "compare.md", format_table(result).encode())
    write_durably(out / "compare.html", render_comparison(result, out).encode())
    return result


def _prepare(resolved: ResolvedRun, federation: Federation, task: Task, spec: MethodSpec) -> RunSpec:
    """Return the specification of the runs of a method, checked before any method trains."""
    settings = {**resolved.settings(), "seed": 0}
    if spec.method.unit is None:
        settings["aggregator"] = Plain()  # without privacy there is nothing to hide
    settings["evaluation"] = None  # methods are compared on pooled held-out records, by exact metrics
    # Else the whole comparison would be refused for a method that cannot have it; the note says which.
    settings["isolate_units"] &= supports(type(spec.method), "can_isolate_units")
    budget, limits = settings.pop("budget"), settings.pop("silo_limits")
    try:
        tried = prepare_run(federation, task, spec.method, **settings)
        # Budget and limits are not applied against an adversary against whom there is no guarantee.
        private = {
            adversary
            for adversary, event in tried.round_events().items()
            if not isinstance(event, NonPrivate)
        }
        settings["budget"] = budget if budget is not None and budget.adversary in private else None
        settings["silo_limits"] = {a: limit for a, limit in limits.items() if a in private}
        return prepare_run(federation, tried.model, spec.method, **settings)
    except SilodpError as error:
        raise SilodpError(f"method '{spec.label}': {error}", code=error.code, field=error.field) from None


def _digest_run(resolved: ResolvedRun, task: Task, spec: RunSpec, data: str) -> str:
    """Return the SHA-256 (hex) of everything that the stored rows of metrics depend on, with that of the data."""
    parts = [spec.to_json(), list(task.metrics), repr(resolved.config.task), resolved.config.evaluate_every]
    parts += _digest_code(resolved.config.task, spec)
    # With the data: a run on other records must not be taken for this one.
    return hashlib.sha256(json.dumps([*parts, data]).encode()).hexdigest()


def _find_file(out: Path, fingerprint: str) -> Path:
    return out / "runs" / f"{fingerprint[:32]}.json"


def _train(federation: Federation, task: Task, evaluate_every: int, item: tuple[str, RunSpec]) -> Fields:
    """Train one run, and return what is kept of it."""
    fingerprint, spec = item
    started = time.perf_counter()
    result = run(spec, Simulation(federation, task), evaluate_every=evaluate_every)
    skill = measure_skill_of(federation, task, result.params)
    found: Fields = {
        "fingerprint": fingerprint,
        "method": repr(spec.method),
        "seed": spec.seed,
        "stopped": result.stopped,
        "seconds": round(time.perf_counter() - started, 3),
        "skill": _without_nan(asdict(skill)) if skill is not None else None,
        "rows": [_without_nan(row) for row in result.metrics],
        "guarantees": {adversary: result.guarantees[adversary].to_dict() for adversary in ADVERSARIES},
    }
    # As it will be read back: tuples are lists, and a new run compares equal to a stored one.
    kept: Fields = json.loads(json.dumps(found))
    return kept


def _digest_code(task: TaskSection, spec: RunSpec) -> list[str]:
    """Return the SHA-256 of each file of code outside silodp that a run is made by, none where it needs none."""
    named = (task.model, task.loss, *(task.metrics or ()))
    contents = [locate_code(name)[2] for name in named if name is not None and is_reference(name)]
    parts = (*_list_parts(spec.method), spec.aggregator, spec.accountant)
    for module in sorted({type(part).__module__ for part in parts}):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None and not is_own_module(module):
            contents.append(Path(file).read_bytes())
    return [hashlib.sha256(content).hexdigest() for content in contents]


def _list_parts(part: Any) -> Iterator[Any]:
    """Yield a method or what is in one, then the values of its fields, such as a server optimizer, and of theirs."""
    yield part
    if is_dataclass(part):
        for each in fields(part):
            yield from _list_parts(getattr(part, each.name))


def _load_kept(path: Path, fingerprint: str) -> Fields | None:
    """Return a kept run; None where its file is missing, damaged or of another run."""
    try:
        run = parse_json(path.read_text(encoding="utf-8"))
        is_whole = run["fingerprint"] == fingerprint and run["rows"] and run["guarantees"] and "skill" in run
        return run if is_whole else None
    except (OSError, *MALFORMED):
        return None


def _without_nan(value: Any) -> Any:
    """Return a value with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _summarize(
    resolved: ResolvedRun,
    federation: Federation,
    specs: Sequence[MethodSpec],
    runs: Sequence[Sequence[Fields]],
    seeds: int,
) -> Fields:
    config = resolved.config
    # A method may lack a quantity that others have, for example where its loss was never finite.
    everything = [row for of_method in runs for run in of_method for row in run["rows"]]
    names = list_quantities(everything)
    count = len(specs) * seeds
    released = (of_method[0]["guarantees"]["released"] for of_method in runs)
    accountants = sorted({guarantee["accountant"] for guarantee in released if guarantee["private"]})
    methods = [_summarize_method(spec, of_method, names) for spec, of_method in zip(specs, runs, strict=True)]
    untrained = {name: _compute_spread(_at_round(runs, 0, name))["mean"] for name in names}
    methods = [
        {
            **method,
            "warning": explain_no_upper_level(method, methods)
            or explain_no_gain(method, untrained.get("loss")),
        }
        for method in methods
    ]
    warnings = [method["warning"] for method in methods if method["warning"] is not None]
    return {
        "name": config.name,
        "data": federation.name,
        "rounds": config.rounds,
        "delta": config.delta,
        "accountant": join_names(accountants),
        "aggregator": config.aggregator,
        "seeds": seeds,
        "runs": count,
        "private": any(spec.method.unit is not None for spec in specs),
        "note": " ".join(_explain(resolved, specs, methods, count, len(accountants))),
        "warnings": [*explain_no_skill(methods), *warnings],
        "quantities": names,
        "untrained": untrained,
        "methods": methods,
    }


def _explain(
    resolved: ResolvedRun,
    specs: Sequence[MethodSpec],
    methods: Sequence[Fields],
    count: int,
    accountants: int,
) -> list[str]:
    """Return sentences on what the numbers are, and where the methods were not treated alike."""
    config = resolved.config
    of_records = [spec.label for spec in specs if spec.method.unit == "record"]
    of_persons = any(spec.method.unit == "user" for spec in specs)
    together = [
        s.label
        for s in specs
        if config.isolate_units and s.method.unit and not supports(type(s.method), "can_isolate_units")
    ]
    untuned = [method["label"] for method in methods if method["untuned"]]
    found = [
        f"{pluralize(count, 'run')} on the same persons: each adds its ε to those before.",
        f"Each ε here is at δ = {config.delta:g},"
        f"{' for all records of one person,' if of_persons else ''} and of one run with secret noise; these runs "
        "drew their noise from seeds, so their models are not for release.",
        "Values are of the last round, on held-out records, which no ε covers.",
    ]
    if of_records:
        found.append(f"ε of {', '.join(of_records)} is for single records.")
    if config.evaluation is not None:
        found.append("[evaluation] is not used here, and each ε is without it: a run's own ε may be larger.")
    found += _explain_limits(resolved.budget, config.silo_limits, methods)
    if untuned:
        found.append(
            f"Untuned: {', '.join(untuned)}. Their rates are those of [method], which were not chosen for them; "
            "give each its own in [methods.NAME]."
        )
    if together:
        found.append(f"Without isolate_units = true, as they cannot have it: {', '.join(together)}.")
    if accountants > 1:
        found.append("ε by rdp is looser than ε by pld: compare them with care.")
    return found


def _explain_limits(
    budget: Budget | None, limits: Mapping[Adversary, float], methods: Sequence[Fields]
) -> list[str]:
    """Return which methods the budget stopped, and which private ones it, or a silo's limit, does not limit."""
    free = {
        adversary: [m["label"] for m in methods if m["unit"] is not None and m["epsilon"][adversary] is None]
        for adversary in ADVERSARIES
    }
    found = []
    if budget is not None:
        name = f"The budget, ε = {budget.epsilon:g} against {ADVERSARY_LABELS[budget.adversary]},"
        ended = [f"{m['label']} after round {m['rounds'][-1]}" for m in methods if m["stopped"] == "budget"]
        if ended:
            found.append(f"{name} stopped {', '.join(ended)}.")
        if free[budget.adversary]:
            found.append(f"{name} did not limit {', '.join(free[budget.adversary])}: no guarantee there.")
    for adversary, limit in limits.items():
        if free[adversary]:  # alone, a run of such a method is refused
            name = f"The limit of every silo, ε = {limit:g} against {ADVERSARY_LABELS[adversary]},"
            refused = ", ".join(free[adversary])
            found.append(f"{name} would refuse {refused}, without a guarantee there; it was not applied.")
    return found


def explain_no_upper_level(method: Fields, methods: Sequence[Fields]) -> str | None:
    """Return a warning if a method without privacy ends with no loss or a larger loss than a private one.

    Such a method cannot show which loss can be reached without noise. In all other cases, return None.
    """
    if method["unit"] is not None:
        return None
    loss = _end_loss(method)
    ends = [
        (end, other["label"])
        for other in methods
        if other["private"] and (end := _end_loss(other)) is not None
    ]
    if not ends or (loss is not None and loss <= min(ends)[0]):
        return None
    best, label = min(ends)
    tune = f"tune its rates in [methods.{method['label'].split(':')[0]}]"
    if loss is None:
        return f"{method['label']}, without noise, has no finite loss at the end; {tune}."
    return (
        f"{method['label']}, without noise, ends at a larger loss ({format_measure(loss)}) than {label} "
        f"({format_measure(best)}), which is private, so it is no reference for training without noise; {tune}."
    )


def explain_no_gain(method: Fields, untrained: float | None) -> str | None:
    """Return a warning if a method ends with no loss, or a larger one than that of the untrained model; else None."""
    loss = _end_loss(method)
    if untrained is None or (loss is not None and loss <= untrained):
        return None
    end = (
        "has no finite loss at the end"
        if loss is None
        else f"ends at a larger loss ({format_measure(loss)}) than the untrained model ({format_measure(untrained)})"
    )
    return f"{method['label']} {end}; try a smaller step, clip or learning rate."


def explain_no_skill(methods: Sequence[Fields]) -> list[str]:
    """Return sentences on private methods that do not clearly predict better than a constant, or whose mean is wrong.

    Where none of them does, this is said first, and in one sentence.
    """
    private = [method for method in methods if method["private"] and method["skill"] is not None]
    useless = [method for method in private if method["skill"]["code"] != "better"]
    found = []
    if private and len(useless) == len(private):
        found.append("No private method clearly predicts better than one constant for everybody.")
    for method in private:
        about = method["skill"]["in_words"]
        found += [f"{method['label']}: {text}" for text in (about if method in useless else about[1:])]
    return found


def _end_loss(method: Fields) -> float | None:
    mean: float | None = method["final"].get("loss", {}).get("mean")
    return mean


def _at_round(runs: Sequence[Sequence[Fields]], round_: int, name: str) -> list[float | None]:
    rows = [row for of_method in runs for run in of_method for row in run["rows"] if row["round"] == round_]
    return [get_measure(row, name) for row in rows]


def _summarize_method(spec: MethodSpec, runs: Sequence[Fields], names: Sequence[str]) -> Fields:
    """Return ε of one run, which is the same for every seed, and mean and sd of every quantity."""
    rows = runs[0]["rows"]
    guarantees = runs[0]["guarantees"]
    measured = [run["skill"] for run in runs if run["skill"] is not None]
    skill = average_skills([TypeAdapter(Skill).validate_python(one) for one in measured])
    last = rows[-1]["round"]
    rounds = [row["round"] for row in rows]
    curves = {}
    for name in names:
        spreads = [_compute_spread(_at_round([runs], round_, name)) for round_ in rounds]
        curves[name] = {key: [spread[key] for spread in spreads] for key in ("mean", "sd", "n")}
    return {
        "label": spec.label,
        "settings": repr(spec.method),
        "unit": spec.method.unit,
        "untuned": not spec.has_own_settings,
        "accountant": guarantees["released"]["accountant"],
        "private": guarantees["released"]["private"],
        "epsilon": {adversary: guarantees[adversary]["epsilon"] for adversary in ADVERSARIES},
        "reasons": {adversary: guarantees[adversary]["reason"] for adversary in ADVERSARIES},
        "groups": guarantees[spec.method.budgets.adversary or "released"]["groups"],
        "claims": [
            claim
            for claim in guarantees["released"]["claims"]
            if is_only_claimed(claim["epsilon"], guarantees["released"]["epsilon"])
        ],
        "stopped": runs[0]["stopped"],
        "rounds": rounds,
        "epsilon_by_round": {a: [as_number(row["epsilon"][a]) for row in rows] for a in ADVERSARIES},
        "curves": curves,
        "final": {name: _compute_spread(_at_round([runs], last, name)) for name in names},
        "skill": None if skill is None else {**skill.to_dict(), "in_words": skill.describe()},
        "refused": sum(sum((row.get("refused") or {}).values()) for run in runs for row in run["rows"]),
        "seconds": round(float(np.mean([run["seconds"] for run in runs])), 3),
    }


def _compute_spread(values: Sequence[float | None]) -> Fields:
    """Return mean, sample standard deviation and number of the values that are not None."""
    good = [value for value in values if value is not None]
    return {
        "mean": float(np.mean(good)) if good else None,
        "sd": float(np.std(good, ddof=1)) if len(good) > 1 else None,
        "n": len(good),
        "of": len(values),
    }
