"""Settings for a target ε, chosen by training on synthetic federations: no private row is read, and no ε is spent."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from silodp.accounting.accountant import EventCount, choose_accountant, find_accountant
from silodp.accounting.calibration import calibrate_noise_multiplier
from silodp.accounting.events import explain_not_private
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.aggregators.plain import make_noisy_share
from silodp.aggregators.run_spec import ModelSpec, RunSpec
from silodp.config.resolve import ResolvedRun
from silodp.config.task import build_task
from silodp.data.federation import Federation
from silodp.data.inputs import concatenate
from silodp.data.tables.schema import UNSCALED_LABEL
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.methods import FederationSize, LocalContext, Method, UldpAvg, UldpSgd
from silodp.methods.server_optimizer import start_state, take_step
from silodp.methods.uldp import Weighting
from silodp.planning.plan import check_target, round_safely
from silodp.planning.synthetic import SyntheticSettings, draw_federation
from silodp.report.formatting import make_environment
from silodp.runtime.executor import THIS_PROCESS, Executor, Pool
from silodp.settings import check_choice
from silodp.text import join_names, pluralize
from silodp.training.metrics import ERRORS
from silodp.training.models import name_linear_model
from silodp.training.sgd import LocalTraining

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.training.task import Task

_log = logging.getLogger(__name__)

ROUNDS = (2, 5, 10, 20, 40)
STEPS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
LOCAL_EPOCHS = 5
MAX_USERS = 2000
"""Of a synthetic federation: with more persons, fewer are drawn, and their noise is made smaller in proportion."""
FEDERATIONS = 6
_SEED = 0
"""Of the synthetic federations and the trainings on them; nothing of it is in the run."""
_FIRST_FEDERATIONS = 2
"""Federations on which every candidate is tried."""
_MAX_FINALISTS = 8
"""Candidates that are tried on all federations."""
_MAX_NOISE_TO_SIGNAL = 1.0
"""Above it the noise of every round is longer than the signal, and the plan advises a smaller model."""
_MAX_TOTAL_NOISE = 30.0
"""A candidate whose noise moves the parameters further than this, in all rounds together, is not tried."""
DEFAULT_ROUNDS, DEFAULT_STEP = 10, 1.0
"""What is recommended without tuning, with `uldp-sgd`."""
_REPLACED = {
    "name",
    "noise_multiplier",
    "rounds",
    "delta",
    "step",
    "clip",
    "server_learning_rate",
    "weighting",
    "local",
}
"""Settings of a configured method in whose place those of a candidate stand."""
_MIN_STANDARD_ERRORS = 2.0
"""Standard errors by which a candidate must be better than these; else these are kept."""


@dataclass(frozen=True)
class Candidate:
    """One choice of settings.

    Attributes:
        rounds: The number of rounds T.
        step: The longest move of the parameters in a round.
        weighting: How the weight of a person is divided among the silos.
        epochs: The local epochs of `uldp-avg`; 0 stands for `uldp-sgd`.
        model: "configured", or "linear" for the linear model of the kind of label.
    """

    rounds: int
    step: float
    weighting: Weighting
    epochs: int = 0
    model: str = "configured"

    def method(self, noise_multiplier: float) -> UldpAvg:
        """Return the method of these settings."""
        if self.epochs == 0:
            return UldpSgd(noise_multiplier, weighting=self.weighting, step=self.step)
        local = LocalTraining(learning_rate=0.1, epochs=self.epochs, batch_size=None)
        return UldpAvg(noise_multiplier, local=local, weighting=self.weighting, step=self.step)


def tune(
    resolved: ResolvedRun,
    spec: RunSpec,
    target: float,
    *,
    guess: SyntheticSettings | None = None,
    federations: int = FEDERATIONS,
    on_progress: Callable[[int, int], None] | None = None,
    give_up: Sequence[Adversary] = (),
    executor: Executor = THIS_PROCESS,
) -> dict[str, Any]:
    """Choose T, σ, step, weighting, local epochs and model size for a target ε.

    Every candidate is trained on synthetic federations of the declared schema, with the noise of the target. All are
    tried on two federations; the best eight on all of them; then variants of the best. The best is chosen if it is
    better than T = 10 and step 1 by more than two standard errors of the gain; else these are kept. A weighting that
    has no ε against an adversary, where another one has, is chosen only if that adversary is in `give_up`; else the
    result says what it would gain. It must then be as clearly better than one that has an ε against everyone. σ meets
    the silos' own limits, too.

    Args:
        resolved: its model and metric are tried, and ε is computed by its accountant; where it names none, by the
            tightest that knows the noise.
        spec: its `build_public_spec()`.
        target: ε against the adversary of the budget, or "released".
        guess: what the schema does not say; None for the defaults of `SyntheticSettings`.
        federations: how many are drawn, at least 2.
        on_progress: called with the number of trainings done and planned.
        give_up: adversaries against whom the settings need no ε.
        executor: where candidates are trained.

    Returns:
        JSON-ready: "chosen" settings with σ and "signal", √d/(μU) per model; "left_out", the configured settings of the
        method that no candidate has; "default_kept", whether another candidate was better, but not clearly;
        "dropped_weighting", one that has no ε against somebody and is not clearly better than the chosen one, which has
        one against everyone; "declined", the best weighting that was not chosen since it has no ε against some
        adversary: with its mean "gain" and these adversaries; "candidates" with the mean and the spread of the metric;
        "loss", the mean and the largest difference to the best candidate of each federation; "no_guarantee", also in
        every candidate: the adversaries against whom these settings have no ε.

    Raises:
        SilodpError: records are no table, no weighting has an ε against the adversary, the evaluation costs ε, or
            the configured method protects records, or has budgets of its own.
    """
    if spec.method.unit == "record" or spec.method.budgets.unit is not None:
        raise SilodpError(
            f"method '{spec.method.name}' protects a record, or has a budget for each unit, and --tune chooses "
            'settings of uldp-sgd and uldp-avg, with one ε for all persons: set method.name = "uldp-sgd" for these, '
            "or plan without --tune.",
            code="argument.conflict",
            field="method.name",
        )
    if spec.data.labels == "real" and spec.data.label_typical is None:
        _log.warning(UNSCALED_LABEL)
    for adversary in give_up:
        check_choice("give_up", adversary, ADVERSARIES)
    options = resolved.config.task.loss_options or {}
    guess = replace(guess or SyntheticSettings(), typical_time=float(options.get("typical_time", 1.0)))
    with executor.open_pool() as pool:
        return _Tuner(resolved, spec, target, guess, federations, on_progress, give_up, pool).run()


class _Tuner:
    """The candidates tried so far, and their metric on each federation.

    Attributes:
        configured: The names of the settings in [method].
        scores: The metric by candidate and number of the federation; larger is better, so a loss is negated.
        sigma: Returns σ with which T rounds under a weighting and a model meet the target and the limits.
        users: The number of persons in a synthetic federation, which may be smaller than U.
        limits: The largest ε by adversary: the target, and the limits of the silos.
    """

    def __init__(
        self,
        resolved: ResolvedRun,
        spec: RunSpec,
        target: float,
        guess: SyntheticSettings,
        federations: int,
        on_progress: Callable[[int, int], None] | None,
        give_up: Sequence[Adversary],
        pool: Pool,
    ) -> None:
        self.spec, self.target = spec, target
        self.configured = set(resolved.config.method)
        self.adversary: Adversary = "released" if spec.budget is None else spec.budget.adversary
        limits = dict(spec.silo_limits)
        self.limits = limits | {self.adversary: min(target, limits.get(self.adversary, target))}
        self.users = min(MAX_USERS, spec.population.users)
        self.federations = [  # before a model is built: it refuses what is no table
            draw_federation(spec.data, guess, self.users, np.random.default_rng([_SEED, number]))
            for number in range(max(2, federations))
        ]
        self.tasks = _build_tasks(resolved, spec)
        self.metric = _choose_metric(self.tasks["configured"])
        self.accountant = resolved.accountant or choose_accountant(spec.list_events())
        for adversary, limit in self.limits.items():
            check_target(spec, limit, adversary, find_accountant(self.accountant))
        self.scores: dict[Candidate, dict[int, float]] = {}
        self.sigma = cache(
            self._compute_sigma
        )  # by T, weighting and model: a calibration takes a tenth of a second
        self._on_progress = on_progress
        self._done = 0
        self._pool = pool
        self._give_up = set(give_up)

    def run(self) -> dict[str, Any]:
        """Return the best candidate, found by a grid, then by variants of its leader; see `tune`."""
        possible = self._list_weightings()
        weightings = self._select_weightings(possible)
        first = "records" if "records" in weightings else weightings[0]
        models = list(self.tasks)
        grid = [
            Candidate(rounds, step, first, model=model)
            for model in models
            for rounds in ROUNDS
            for step in STEPS
            # The noise of all rounds moves the parameters by step·T times the noise of one round.
            if step * rounds * self._signal(rounds, first, model) <= _MAX_TOTAL_NOISE or step == STEPS[0]
        ]
        # Fewer and fewer candidates on more and more federations: a training takes seconds, and the grid has sixty.
        everywhere = range(len(self.federations))
        self._try(grid, range(_FIRST_FEDERATIONS))
        best = self._rank(grid)[:_MAX_FINALISTS]
        self._try(best, everywhere)
        leader = self._rank(best)[0]
        variants = [replace(leader, weighting=other) for other in weightings if other != first]
        self._try(variants, everywhere)
        leader = self._rank([leader, *variants])[0]
        longer = replace(leader, epochs=LOCAL_EPOCHS)
        self._try([longer], everywhere)
        leader = self._rank([leader, longer])[0]
        default = Candidate(DEFAULT_ROUNDS, DEFAULT_STEP, first, model=leader.model)
        kept = False
        if default in grid and leader != default:
            self._try([default], everywhere)
            kept = not self._is_clearly_better(leader, default)
        chosen = default if kept else leader
        declined = [replace(chosen, weighting=other) for other in possible if other not in weightings]
        self._try(declined, everywhere)
        missing = self._list_without_guarantee(chosen.weighting)
        if missing:  # a weighting that costs the ε against somebody must be worth it
            others = [w for w in weightings if not self._list_without_guarantee(w)]
            complete = [replace(chosen, weighting=other) for other in others]
            self._try(complete, everywhere)
            for other in self._rank(complete)[:1]:
                if not self._is_clearly_better(chosen, other):
                    return self._describe(other, kept, declined, dropped=chosen.weighting)
        return self._describe(chosen, kept, declined)

    def _select_weightings(self, possible: Sequence[Weighting]) -> list[Weighting]:
        """Return those that cost an ε against nobody whom another one has an ε against, but those to be given up."""
        # Against an adversary who has no ε under any weighting, none can be lost.
        missing = {weighting: set(self._list_without_guarantee(weighting)) for weighting in possible}
        unavoidable = set.intersection(*missing.values())
        found = [weighting for weighting in possible if missing[weighting] <= unavoidable | self._give_up]
        return found or [min(possible, key=lambda weighting: len(missing[weighting]))]

    def _is_clearly_better(self, candidate: Candidate, other: Candidate) -> bool:
        """Return whether the mean gain over the federations is more than chance, for the best of many candidates."""
        # A training that diverged on some federation has −∞ there, and no mean.
        if not math.isfinite(sum(self.scores[other].values())):
            return True
        gains = self._list_gains(candidate, other)
        standard_error = float(np.std(gains, ddof=1)) / math.sqrt(len(gains))
        return float(np.mean(gains)) > _MIN_STANDARD_ERRORS * standard_error

    def _list_gains(self, candidate: Candidate, other: Candidate) -> list[float]:
        """Return by how much a candidate is better than another on each federation that the other was tried on."""
        return [self.scores[candidate][number] - score for number, score in self.scores[other].items()]

    def _list_weightings(self) -> list[Weighting]:
        """Return the weightings that the aggregator has, with an ε against everyone whom the run or a silo limits."""
        found: list[Weighting] = []
        reason = ""
        for weighting in get_args(Weighting):
            spec = self._spec_of(UldpSgd(1.0, weighting=weighting))
            if spec.needs_common_index and spec.data.identity_digest:
                continue  # silos number persons by themselves
            try:
                spec.aggregator.check(spec)
                events = spec.round_events()
                reason = next(filter(None, (explain_not_private(events[a]) for a in self.limits)), "")
            except SilodpError as error:
                reason = str(error)
            if not reason:
                found.append(weighting)
        if not found:
            raise SilodpError(
                f"no weighting of uldp-sgd has an ε against {join_names(map(repr, self.limits))}: {reason}",
                code="plan.no_candidate",
                field="method.weighting",
            )
        return found

    def _list_without_guarantee(self, weighting: Weighting) -> list[Adversary]:
        """Return the adversaries against whom a weighting has no ε."""
        events = self._spec_of(UldpSgd(1.0, weighting=weighting)).round_events()
        return [adversary for adversary, event in events.items() if explain_not_private(event) is not None]

    def _compute_sigma(self, rounds: int, weighting: Weighting, model: str) -> float:
        """Return σ with which T rounds meet the target and the limits of the silos."""

        def make_charges(adversary: Adversary, sigma: float) -> list[EventCount]:
            spec = self._spec_of(UldpSgd(sigma, weighting=weighting), model)
            # A silo cannot know which others answer, so its own ledger charges for the fewest.
            is_of_silos = adversary in spec.silo_limits
            # One event for all rounds: those of uldp-sgd cost alike.
            charged = [(spec, rounds)]
            charged += [(self.spec.derived[one.name], one.count(rounds)) for one in self.spec.charged]
            return [
                ((one.costliest_events() if is_of_silos else one.round_events())[adversary], n)
                for one, n in charged
            ]

        return max(
            calibrate_noise_multiplier(
                partial(make_charges, adversary), limit, self.spec.noise_delta, self.accountant
            )
            for adversary, limit in self.limits.items()
        )

    def _spec_of(self, method: Method, model: str = "configured") -> RunSpec:
        """Return the specification of a run of the method alone."""
        # What other series cost is added where noise is found; none is tried out.
        size = ModelSpec(self.tasks[model].size, self.spec.model.dtype)
        return replace(self.spec, method=method, model=size, budget=None, series=())

    def _signal(self, rounds: int, weighting: Weighting, model: str) -> float:
        """Return √d/(μU): the noise in a round's mean update over the longest that the update itself can be."""
        # T rounds at noise σ are √T/σ-Gaussian DP (Dong, Roth and Su 2022, Corollary 3.3).
        mu = math.sqrt(rounds) / self.sigma(rounds, weighting, model)
        return math.sqrt(self.tasks[model].size) / (mu * self.spec.population.users)

    def _try(self, candidates: Sequence[Candidate], numbers: Iterable[int]) -> None:
        missing = [(c, n) for c in candidates for n in numbers if n not in self.scores.setdefault(c, {})]
        planned = self._done + len(missing)
        # Fewer persons with as much less noise: the noise in the mean update is the same.
        part = self.users / self.spec.population.users
        items = ((c, n, part * self.sigma(c.rounds, c.weighting, c.model)) for c, n in missing)
        for candidate, number, score in self._pool(
            _score, (self.tasks, self.federations, self.metric), items
        ):
            self.scores[candidate][number] = score
            self._done += 1
            if self._on_progress is not None:
                self._on_progress(self._done, planned)
        # Sums are rounded in the order of the federations, and not in that of the results.
        self.scores = {c: dict(sorted(scores.items())) for c, scores in self.scores.items()}

    def _rank(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=lambda c: -float(np.mean(list(self.scores[c].values()))))

    def _describe(
        self,
        chosen: Candidate,
        default_kept: bool,
        declined: Sequence[Candidate],
        dropped: Weighting | None = None,
    ) -> dict[str, Any]:
        complete = [c for c, scores in self.scores.items() if len(scores) == len(self.federations)]
        table = np.array([[self.scores[c][n] for n in range(len(self.federations))] for c in complete])
        missing = {w: self._list_without_guarantee(w) for w in {c.weighting for c in complete}}
        # How far the choice is behind on each federation: what it may lose by serving all of them.
        loss = table.max(axis=0) - table[complete.index(chosen)]
        sign = -1 if self.metric == "loss" else 1  # scores are negated losses
        linear = None if chosen.model == "configured" else _name_linear(self.spec)
        return {
            "epsilon": self.target,
            "adversary": self.adversary,
            "metric": self.metric,
            "users": self.spec.population.users,
            "federations": len(self.federations),
            "trainings": self._done,
            "chosen": {
                "method": "uldp-avg" if chosen.epochs else "uldp-sgd",
                "rounds": chosen.rounds,
                "noise_multiplier": self.sigma(chosen.rounds, chosen.weighting, chosen.model),
                "step": chosen.step,
                "weighting": chosen.weighting,
                "local_epochs": chosen.epochs or None,
                "model": linear,
            },
            "left_out": sorted(self.configured - _REPLACED),
            "default_kept": default_kept,
            "dropped_weighting": dropped,
            "declined": self._describe_declined(chosen, declined),
            "no_guarantee": missing[chosen.weighting],
            "loss": {"mean": float(loss.mean()), "largest": float(loss.max())},
            "candidates": [
                {
                    **vars(c),
                    "mean": sign * float(row.mean()),
                    "sd": float(row.std(ddof=1)),
                    "no_guarantee": missing[c.weighting],
                }
                for c, row in sorted(zip(complete, table, strict=True), key=lambda pair: -pair[1].mean())
            ],
            "signal": {
                name: {"parameters": task.size, "ratio": self._signal(chosen.rounds, chosen.weighting, name)}
                for name, task in self.tasks.items()
            },
        }

    def _describe_declined(self, chosen: Candidate, declined: Sequence[Candidate]) -> dict[str, Any] | None:
        """Return what the best weighting would gain that has no ε against an adversary whom the chosen one covers."""
        for other in self._rank(declined)[:1]:
            return {
                "weighting": other.weighting,
                "gain": float(np.mean(self._list_gains(other, chosen))),
                "no_guarantee": self._list_without_guarantee(other.weighting),
            }
        return None


def _build_tasks(resolved: ResolvedRun, spec: RunSpec) -> dict[str, Task]:
    """Return the configured task, and the linear one of its kind of label where that is smaller."""
    tasks = {"configured": resolved.build_task(spec.data)}
    configured = resolved.config.task
    # A loss of classes follows from the outputs of the model, which the linear one may have fewer of.
    keeps_loss = spec.data.labels == "survival"
    linear = build_task(
        spec.data,
        resolved.dataset,
        model=_name_linear(spec),
        loss=configured.loss if keeps_loss else None,
        loss_options=configured.loss_options if keeps_loss else None,
        metrics=configured.metrics,
    )
    if linear.size < tasks["configured"].size:
        tasks["linear"] = linear
    return tasks


def _name_linear(spec: RunSpec) -> str:
    return name_linear_model(spec.data.classes, spec.data.has_codes)


def _choose_metric(task: Task) -> str:
    """Return the metric to rank by: one that needs no threshold if there is one; "loss" without metrics."""
    # An error is smaller for the better model, so ranking takes the loss instead, whose sign is turned.
    for name in ("roc_auc", "concordance", "r2", "accuracy", *task.metrics):
        if name in task.metrics and name not in ERRORS:
            return name
    return "loss"


def _score(
    tasks: Mapping[str, Task],
    federations: Sequence[Federation],
    metric: str,
    item: tuple[Candidate, int, float],
) -> tuple[Candidate, int, float]:
    """Return a candidate, the number of a federation, and the metric that its training there with a σ leads to."""
    candidate, number, sigma = item
    task, federation = tasks[candidate.model], federations[number]
    randomness = Randomness.from_seed(_SEED).child("tune", number)
    params = train_without_parties(candidate.method(sigma), task, federation, candidate.rounds, randomness)
    return candidate, number, measure(task, params, federation, metric)


def train_without_parties(
    method: Method, task: Task, federation: Federation, rounds: int, randomness: Randomness
) -> Tensor:
    """Train as a run does, in a plain loop without messages, ledger and guarantee: for synthetic records only.

    Args:
        method: of persons.
        task: model, loss and metrics.
        federation: synthetic.
        rounds: T.
        randomness: of the start, batches and noise.

    Returns:
        The parameters (d,) after the last round.
    """
    population = FederationSize(len(federation.silos), federation.users)
    weights = torch.from_numpy(np.array(method.user_weights(federation.counts(), population))).flatten()
    # One silo that has every pair of silo and person as a person: the same rows and weights, added up at once.
    merged = FederationSize(1, population.silos * population.users)
    x, y = (concatenate([getattr(silo, field) for silo in federation.silos]) for field in ("x", "y"))
    table = task.tensors(x, y)
    owners = [s * population.users + silo.user for s, silo in enumerate(federation.silos)]
    pair = torch.from_numpy(np.concatenate(owners))
    scale = method.server_scale(population)
    params = task.initial(int(randomness.stream("start").integers(2**31)))
    optimizer = method.make_server_optimizer()
    state = start_state(optimizer, params)
    for round_ in range(rounds):
        own = randomness.child("round", round_)
        context = LocalContext(task, params, *table, pair, weights, merged, own)
        total = make_noisy_share(method.local_update(context), weights, own.stream("noise")).value
        params, state = take_step(optimizer, params, total, state, method.server_learning_rate, scale)
    return params


def measure(task: Task, params: Tensor, federation: Federation, metric: str) -> float:
    """Return a metric (the negated loss for "loss") on the held-out records; -inf where it is not finite."""
    if federation.test is None or not bool(torch.isfinite(params).all()):
        return -math.inf
    found = task.evaluate(params, federation.test.x, federation.test.y)
    if not math.isfinite(found["loss"]):
        return -math.inf
    # A test set of one class has no area under the curve: it then says nothing about any candidate.
    return -found["loss"] if metric == "loss" else found.get(metric, 0.0)


def format_tuning(result: Mapping[str, Any]) -> list[str]:
    """Return the choice as lines of text, with the tables of a configuration that make it."""
    environment = make_environment(Path(__file__).parent)
    environment.filters |= {
        "plural": pluralize,
        "round_up": partial(round_safely, up=True),
        "thousands": "{:,}".format,
    }
    text = environment.get_template("tuning.jinja").render(
        **result,
        DEFAULT_ROUNDS=DEFAULT_ROUNDS,
        DEFAULT_STEP=DEFAULT_STEP,
        MAX_NOISE_TO_SIGNAL=_MAX_NOISE_TO_SIGNAL,
        MIN_STANDARD_ERRORS=_MIN_STANDARD_ERRORS,
    )
    return text.rstrip("\n").split("\n")
