"""Attacks on a method, a configuration or a finished run: a canary run is made, and every adversary attacks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import find_version
from silodp.accounting.accountant import EventCount, choose_accountant
from silodp.accounting.charges import ChargeCounts, compute_cost
from silodp.accounting.trade_off import TradeOff
from silodp.accounting.views import ADVERSARIES, Adversary, Unit
from silodp.aggregators.base import Aggregator
from silodp.aggregators.registry import AGGREGATORS
from silodp.aggregators.run_spec import RunSpec
from silodp.aggregators.series import SERIES, Series
from silodp.errors import SilodpError, lookup, require
from silodp.methods.base import Method
from silodp.methods.roles import WeightRule
from silodp.report.guarantee_text import ADVERSARY_LABELS
from silodp.runtime.prepare import prepare_run
from silodp.runtime.simulation import Simulation
from silodp.settings import Range, Whole, check_choice, check_value
from silodp.text import shorten
from silodp_audit.attack import canaries as hiding
from silodp_audit.attack import counted
from silodp_audit.attack.canary_run import CanaryRun, MakeParties, run_canaries
from silodp_audit.attack.checks import check_whole_updates, compare_count, run_checks
from silodp_audit.attack.evidence import Evidence, NoiseFamily, weigh_evidence
from silodp_audit.attack.noise import NoiseTest
from silodp_audit.attack.views import MAX_FEATURES, NotSeen, Observation, read_whole_updates
from silodp_audit.report.attacks import EVALUATION, FORMAT

LEAST_CANARIES, MOST_CANARIES = 200, 20_000
_DATA_CODES = ("data.", "loss.", "model.")
Array = NDArray[np.float64]
RowVerdict = Literal["consistent", "violation", "no guarantee", "not seen"]


@dataclass(frozen=True)
class Promise:
    """What was promised against one adversary.

    Attributes:
        charges: What was charged, (event, count); () where only ε and δ are known.
        epsilon: ε at δ; None: nothing is promised.
        reason: Why nothing is promised.
        accountant: The name of the accountant.
    """

    charges: tuple[EventCount, ...] = field(repr=False)
    epsilon: float | None
    reason: str
    accountant: str

    @property
    def family(self) -> NoiseFamily | None:
        """The mechanisms with less noise than was charged; None where charges are not known, or nothing is promised."""
        return NoiseFamily(self.charges) if self.charges and self.epsilon is not None else None

    def compute_trade_off(self, delta: float) -> TradeOff | None:
        """Return the promised curve: of the charges, else of ε and δ alone; None where nothing is promised."""
        if self.epsilon is None:
            return None
        return (
            TradeOff.of_pair(self.epsilon, delta) if self.family is None else self.family.compute_trade_off()
        )


@dataclass(frozen=True)
class Row:
    """What came of one adversary.

    Attributes:
        adversary: The adversary.
        promise: What was promised; None where it is not known.
        claim: The promised curve; None without a guarantee.
        score: The name of the score that is shown, "likelihood" or "whitened"; "" where the view was not read.
        measured: What the scores say; None where the view was not read.
        verdict: "consistent", "violation", "no guarantee" or "not seen".
        reason: Why there is no guarantee, why the view was not read, or under which condition the claim holds.
    """

    adversary: Adversary
    promise: Promise | None
    claim: TradeOff | None = field(repr=False)
    score: str
    measured: Evidence | None = field(repr=False)
    verdict: RowVerdict
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of attack.json."""
        claim, promise = None, self.promise
        if promise is not None and promise.epsilon is not None and self.claim is not None:
            tpr = self.claim.compute_tpr(np.array([0.01, 0.001]))
            claim = {
                "epsilon": promise.epsilon,
                "accountant": promise.accountant,
                "accuracy": self.claim.accuracy,
                "auc": self.claim.auc,
                "tpr_1": float(tpr[0]),
                "tpr_01": float(tpr[1]),
            }
        measured = None
        if self.measured is not None:
            measured = {"score": self.score, **self.measured.to_dict()}
            measured.pop("is_violation", None)
        return {
            "adversary": self.adversary,
            "claim": claim,
            "measured": measured,
            "verdict": self.verdict,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class AttackResult:
    """The result of an attack.

    Attributes:
        spec: The digest of the run that was attacked; that of the canary run where a method was attacked alone.
        method, aggregator: Their names.
        unit: Who is protected.
        silos: The number of silos.
        dimensions: The number of parameters of the canaries' model.
        rounds: The number of rounds that were played.
        claimed_rounds: The number of rounds that were charged.
        canaries: The number of members, and of outsiders who are scored.
        delta: δ.
        level: The probability of a false alarm.
        rows: One row for each adversary.
        noise: The tests of noise, shifts and samples.
        untested: What was not looked for beside `report.attacks.CANNOT_SHOW`, a sentence each.
        time: When it was played, in UTC.
    """

    spec: str
    method: str
    aggregator: str
    unit: Unit | None
    silos: int
    dimensions: int
    rounds: int
    claimed_rounds: int
    canaries: int
    delta: float
    level: float
    rows: tuple[Row, ...]
    noise: tuple[NoiseTest, ...]
    untested: tuple[str, ...]
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def verdict(self) -> Literal["consistent", "violation", "noise"]:
        """ "violation" of a promise; "noise": only a test of noise, shifts or samples failed; else "consistent"."""
        if any(row.verdict == "violation" for row in self.rows):
            return "violation"
        return "consistent" if all(test.passed for test in self.noise) else "noise"

    def to_dict(self) -> dict[str, Any]:
        """Return the content of attack.json."""
        names = ("spec", "method", "aggregator", "unit", "silos", "dimensions", "rounds", "claimed_rounds")
        return {
            "format": FORMAT,
            "version": find_version(),
            **{name: getattr(self, name) for name in (*names, "canaries", "delta", "level", "time")},
            "model": "canary",
            "adversaries": [row.to_dict() for row in self.rows],
            "noise": [test.to_dict() for test in self.noise],
            "verdict": self.verdict,
            "untested": list(self.untested),
        }


@dataclass(frozen=True)
class Target:
    """What is attacked.

    Attributes:
        method: The method.
        names: The names of the silos.
        rounds: The number of rounds that are played.
        settings: The other arguments of `prepare_run`, without an evaluation.
        evaluation: The evaluation by sums of the run; None where it has none.
        promises: What was promised, by adversary; None takes what the ledger of the canary run charges.
        claimed_rounds: The number of rounds of the promise; None: those that the canary run charges.
        spec: The digest of the run; "" takes that of the canary run.
        untested: What else is not looked for, a sentence each.
    """

    method: Method
    names: tuple[str, ...]
    rounds: int
    settings: Mapping[str, Any]
    evaluation: Series | None = None
    promises: Mapping[Adversary, Promise] | None = None
    claimed_rounds: int | None = None
    spec: str = ""
    untested: tuple[str, ...] = ()


def attack_method(
    method: Method,
    *,
    silos: int = 3,
    rounds: int,
    aggregator: str | Aggregator = "plain",
    canaries: int = 1500,
    adversaries: Sequence[Adversary] = ADVERSARIES,
    level: float = 0.05,
    evaluation: Series | None = None,
    make_parties: MakeParties = Simulation,
    **settings: Any,
) -> AttackResult:
    """Attack what a method and an aggregator promise, in a canary run on made-up units.

    Args:
        method: The method; a plug-in is attacked as the others are.
        silos: The number S of silos.
        rounds: The number T of rounds.
        aggregator: The aggregator, or its name.
        canaries: The number m of made-up units that are hidden, from 200 on; as many others are told from them.
        adversaries: Who attacks: "released", "server", "silo".
        level: The probability that right code is called a violation, and that a test of its noise fails.
        evaluation: An evaluation by sums of counts; what it tells is tested too.
        make_parties: Makes the silos from federation and task, for tests of the attack.
        settings: Other arguments of `silodp.train`: delta, accountant, budget, isolate_units, seed.

    Returns:
        A row for each adversary, tests of the noise, a verdict, and what was not looked for.

    Raises:
        SilodpError: an argument is out of range, the method cannot be run on canaries, or nothing could be attacked.
    """
    names = tuple(f"silo-{place + 1}" for place in range(silos))
    target = Target(method, names, rounds, {"aggregator": aggregator, **settings}, evaluation)
    return audit_run(
        target, canaries=canaries, adversaries=adversaries, level=level, make_parties=make_parties
    )


_TOO_MANY_SILOS = (
    "evaluations: with a table for each of so many silos there are too few cells for made-up persons."
)
PRIVATE_WEIGHTS = (
    "private weights at their worst: canaries have one record in one silo, so a silo sees half of what it was charged "
    "for, and weights n/(n + 1) move sums half as far as was charged."
)
PRIMARY_SILOS_THAT_MOVE = (
    "rows that move from one primary silo to another: canaries have records in one silo alone, so a silo sees half of "
    "what it was charged for."
)
_UNTESTED_WEIGHTS: Mapping[WeightRule | None, tuple[str, ...]] = {
    "shares": (PRIVATE_WEIGHTS,),
    "primary_silo": (PRIMARY_SILOS_THAT_MOVE,),
}


def audit_run(
    target: Target,
    *,
    canaries: int = 1500,
    adversaries: Sequence[Adversary] = ADVERSARIES,
    level: float = 0.05,
    make_parties: MakeParties = Simulation,
) -> AttackResult:
    """Make a canary run of a target, and of an evaluation where it has any, and attack them as each adversary.

    See `attack_method`.
    """
    Whole(LEAST_CANARIES, MOST_CANARIES).check("canaries", canaries)
    Whole().check("rounds", target.rounds)
    check_value("level", level, Range(above=0, below=0.5))
    for adversary in adversaries:
        check_choice("adversary", adversary, ADVERSARIES)
    if target.evaluation is None:
        return _audit_rounds(target, canaries, adversaries, level, make_parties)
    _check_evaluation(target.evaluation)
    if counted.count_canaries(target.evaluation, len(target.names)) < counted.LEAST_CANARIES:
        result = _audit_rounds(target, canaries, adversaries, level, make_parties)
        return replace(result, untested=(*result.untested, _TOO_MANY_SILOS))
    # Half of the level for each, so that right code is called wrong as seldom as was asked for.
    part = level / 2
    result = _audit_rounds(target, canaries, adversaries, part, make_parties)
    evaluated = audit_evaluation(
        target, canaries=canaries, adversaries=adversaries, level=part, make_parties=make_parties
    )
    return replace(result, level=level, noise=(*result.noise, *_list_evaluation_tests(evaluated)))


def _check_evaluation(evaluation: Series) -> None:
    require(
        isinstance(evaluation, SERIES.get("evaluation", ())) and evaluation.is_charged,
        f'evaluation = {shorten(evaluation)}: give an Evaluation with across = "sums", which alone costs ε, or '
        "leave it out.",
        code="argument.value",
        field="evaluation",
    )


def _audit_rounds(
    target: Target,
    canaries: int,
    adversaries: Sequence[Adversary],
    level: float,
    make_parties: MakeParties,
) -> AttackResult:
    """Play the rounds of a target and attack them."""
    method, silos = target.method, len(target.names)
    placement = hiding.choose_placement(method, _list_method_events(target), silos)
    if placement.kind == "whole update":
        return _audit_whole_updates(target, placement, canaries, adversaries, level, make_parties)
    features = min(silos * target.rounds, MAX_FEATURES)
    directions = hiding.choose_directions(canaries, features, placement)
    cells = replace(directions, dense=0)
    if (counting := method.count_classes(cells.size)) is not None:
        counter, in_full = counting
        records = counted.count_records(in_full, method.unit)
        made = counted.make_counted(cells, replace(placement, records=records), target.names)
        target = replace(target, method=counter)
    else:
        made = hiding.make_canaries(directions, placement, target.names, _find_least_records(method))
    spec = _prepare(target, made.federation, made.task)
    canary_run = run_canaries(spec, make_parties(made.federation, made.task))
    return _attack(target, made, canary_run, adversaries, level)


def audit_evaluation(
    target: Target,
    *,
    canaries: int = 1500,
    adversaries: Sequence[Adversary] = ADVERSARIES,
    level: float = 0.05,
    make_parties: MakeParties = Simulation,
) -> AttackResult:
    """Attack one evaluation by sums of a target, whose rounds are played but not attacked; see `attack_method`.

    Args:
        target: Its `evaluation` is by sums.
        canaries: As many as there are cells for, 850 at most.
        adversaries, level, make_parties: See `attack_method`.
    """
    assert target.evaluation is not None
    silos, method = len(target.names), target.method
    evaluation = counted.replace_groups(target.evaluation, silos)
    where: hiding.Kind = "one silo" if method.unit == "record" else "everywhere"
    placement = hiding.Placement(where, counted.count_records(evaluation.clip, method.unit))
    made = counted.make_held_out(
        counted.choose_cells(min(canaries, counted.count_canaries(evaluation, silos))),
        placement,
        target.names,
        _find_least_records(method),
        evaluation,
    )
    settings = {**target.settings, "evaluation": evaluation, "budget": None}
    spec = _prepare(replace(target, rounds=1, settings=settings), made.federation, made.task)
    canary_run = run_canaries(spec, make_parties(made.federation, made.task)).of_series(evaluation.name)
    one = replace(target, rounds=1, claimed_rounds=None, promises=None, spec="", untested=())
    return _attack(one, made, canary_run, adversaries, level)


def _attack(
    target: Target,
    made: hiding.Canaries,
    canary_run: CanaryRun,
    adversaries: Sequence[Adversary],
    level: float,
) -> AttackResult:
    observation = Observation(canary_run, made, canary_run.spec.round_events())
    promises = target.promises or find_promises(canary_run.charges, canary_run)
    rows = _judge(observation, promises, adversaries, level)
    noise, gaps = run_checks(observation, level)
    directions = made.directions
    return _summarize(target, canary_run, directions.size, len(directions.members), rows, noise, gaps, level)


def _list_evaluation_tests(result: AttackResult) -> list[NoiseTest]:
    """Return the tests of an evaluation's noise, and how well each adversary guessed, as further tests of a run."""
    found = [replace(test, test=f"{EVALUATION}{test.test}") for test in result.noise]
    for row in result.rows:
        if row.measured is not None and row.claim is not None:
            seen, passed = row.measured, row.verdict != "violation"
            limits = seen.auc, seen.auc_lower, seen.auc_upper
            found.append(
                NoiseTest(
                    f"{EVALUATION}AUC of {ADVERSARY_LABELS[row.adversary]}", *limits, row.claim.auc, passed
                )
            )
    return found


def _list_method_events(target: Target) -> dict[Adversary, Any]:
    """Return the method's own events, without an aggregator's noise: of them only the groups are read."""
    aggregator = target.settings["aggregator"]
    if isinstance(aggregator, str):
        aggregator = lookup(aggregator, AGGREGATORS, "aggregator")()
    views = aggregator.views(target.method, len(target.names))
    return {adversary: target.method.dp_event(view) for adversary, view in views.items()}


def _find_least_records(method: Method) -> int:
    """Return the fewest records of a silo that a method may ask for: a batch, where there are batches."""
    return int(np.ceil(float(vars(method).get("expected_batch_size") or 0)))


def _prepare(target: Target, federation: Any, task: Any) -> RunSpec:
    try:
        return prepare_run(federation, task, target.method, rounds=target.rounds, **target.settings)
    except SilodpError as error:
        if error.code.startswith(_DATA_CODES):
            raise hiding.refuse_canaries(target.method, error) from error
        raise


def find_promises(charges: ChargeCounts, canary_run: CanaryRun) -> dict[Adversary, Promise]:
    """Return what the ledger of a canary run promises."""
    found = {}
    for adversary, events in charges.charged.items():
        cost = charges.compute_cost(adversary)
        found[adversary] = Promise(
            tuple(events.items()), cost.epsilon, cost.reason or "", canary_run.spec.accountant.name
        )
    return found


def _audit_whole_updates(
    target: Target,
    placement: hiding.Placement,
    canaries: int,
    adversaries: Sequence[Adversary],
    level: float,
    make_parties: MakeParties,
) -> AttackResult:
    """Attack a method that clips a silo's whole update: one person turns it, and every round is a trial.

    Each round of a run with the person and of one without them is a member and an outsider of the claim of one round.
    """
    many = replace(target, rounds=canaries, settings={**target.settings, "budget": None})
    played = []
    for inside in (True, False):
        federation, task = hiding.make_targets(target.names, inside, placement), hiding.make_task(2)
        spec = _prepare(many, federation, task)
        played.append(run_canaries(spec, make_parties(federation, task)))
    charges = played[0].charges
    once = {adversary: dict.fromkeys(events, 1) for adversary, events in charges.charged.items()}
    charges = replace(charges, charged=once, reported={})
    rows, spec = [], played[0].spec
    promises = find_promises(charges, played[0])
    for adversary in adversaries:
        try:
            scores = [read_whole_updates(run, adversary) for run in played]
        except NotSeen as unseen:
            rows.append(_make_unseen(adversary, promises[adversary], spec.delta, str(unseen)))
            continue
        parts = {"likelihood": (scores[0][:, 0], scores[1][:, 0])}
        reason = "one round, of which every round of the canary run is a trial"
        rows.append(
            judge_scores(
                adversary, parts, promises[adversary], spec.delta, level, len(adversaries), reason, spec.seed
            )
        )
    noise, gaps = check_whole_updates(played[0], played[1], level)
    gaps = (*gaps, "the composition of rounds: the claim of one round is attacked.")
    return _summarize(
        replace(target, claimed_rounds=None), played[0], 2, canaries, tuple(rows), noise, gaps, level
    )


# --- statements A, B and C ---


def _judge(
    observation: Observation,
    promises: Mapping[Adversary, Promise],
    adversaries: Sequence[Adversary],
    level: float,
) -> tuple[Row, ...]:
    """Return a row for each adversary; all scores share the level."""
    directions = observation.canaries.directions
    seen: dict[Adversary, dict[str, Array] | str] = {}
    for adversary in adversaries:
        try:
            seen[adversary] = observation.see(adversary).score(directions)
        except NotSeen as unseen:
            seen[adversary] = str(unseen)
    tests = max(1, sum(len(scores) for scores in seen.values() if not isinstance(scores, str)))
    rows = []
    for adversary, scores in seen.items():
        promise = promises.get(adversary)
        _, conditioned = observation.condition(adversary)
        reason = ""
        if promise is not None and promise.epsilon is not None and conditioned is not None:
            spec = observation.canary_run.spec
            stated = promise.epsilon
            accountant = choose_accountant(event for event, _ in conditioned)
            cost = compute_cost(conditioned, spec.noise_delta, accountant)
            promise = Promise(tuple(conditioned), cost.epsilon, "", accountant.name)
            reason = f"the rounds that the silo joined; before its coins fell, ε was {stated:.4g}"
        if isinstance(scores, str):
            rows.append(_make_unseen(adversary, promise, observation.canary_run.spec.delta, scores))
            continue
        parts = {
            name: (score[directions.members], score[directions.outsiders]) for name, score in scores.items()
        }
        rows.append(
            judge_scores(
                adversary,
                parts,
                promise,
                observation.canary_run.spec.delta,
                level,
                tests,
                reason,
                observation.canary_run.spec.seed,
            )
        )
    return tuple(rows)


def _make_unseen(adversary: Adversary, promise: Promise | None, delta: float, reason: str) -> Row:
    """Return the row of an adversary whose view was not read."""
    if promise is None or promise.epsilon is None:
        return Row(adversary, promise, None, "", None, "no guarantee", promise.reason if promise else reason)
    return Row(adversary, promise, promise.compute_trade_off(delta), "", None, "not seen", reason)


def judge_scores(
    adversary: Adversary,
    scores: Mapping[str, tuple[Array, Array]],
    promise: Promise | None,
    delta: float,
    level: float,
    tests: int,
    reason: str = "",
    seed: int | None = None,
) -> Row:
    """Return the row of an adversary from the scores of members and outsiders, by the name of the score."""
    has_guarantee = promise is not None and promise.epsilon is not None
    family = None if promise is None else promise.family
    claim = None if promise is None else promise.compute_trade_off(delta)
    random = np.random.default_rng(seed)  # pairs scores; with the seed of a canary run it pairs them alike
    found: dict[str, Evidence] = {}
    for name, (members, others) in scores.items():
        if not _tells_apart(np.concatenate([members, others])):
            return Row(adversary, promise, claim, "", None, "not seen", "many canaries have the same score")
        found[name] = weigh_evidence(
            members, others, claim, delta=delta, family=family, level=level, tests=tests, rng=random
        )
    worst = next((name for name, one in found.items() if one.is_violation), next(iter(found)))
    shown = found[worst]
    if not has_guarantee:
        why = "" if promise is None else promise.reason
        return Row(adversary, promise, None, worst, shown, "no guarantee", why)
    if shown.is_violation:
        return Row(adversary, promise, claim, worst, shown, "violation", reason)
    if shown.auc_upper < 0.5:
        why = "members score lower than the others, so the score is not one of this mechanism"
        return Row(adversary, promise, claim, "", None, "not seen", why)
    if claim is not None and claim.auc**shown.pairs > level / tests:
        why = "what is promised allows almost every guess to be right: no number of canaries could contradict it"
        return Row(adversary, promise, claim, "", None, "not seen", why)
    return Row(adversary, promise, claim, worst, shown, "consistent", reason)


def _tells_apart(scores: Array) -> bool:
    """Return whether scores (n,) differ; canaries whose coins are known to have kept them out have none, which is 0."""
    some = scores[scores != 0]
    return len(some) > 0 and len(np.unique(some)) >= 0.95 * len(some)


# --- the result ---


def _summarize(
    target: Target,
    canary_run: CanaryRun,
    dimensions: int,
    canaries: int,
    rows: tuple[Row, ...],
    noise: tuple[NoiseTest, ...],
    gaps: tuple[str, ...],
    level: float,
) -> AttackResult:
    """Return the result.

    Raises:
        SilodpError: no view could be attacked, and no noise tested.
    """
    if all(row.verdict == "not seen" for row in rows) and not noise:
        raise SilodpError(
            f"nothing of this run could be attacked ({rows[0].reason}): name another adversary or another method.",
            code="attack.nothing_seen",
        )
    spec, charged, played = canary_run.spec, canary_run.charges.rounds, len(canary_run.updates)
    noise = (*noise, compare_count("charged rounds", charged, played))
    if canary_run.sums is not None and spec.method.releases_model:
        noise = (
            *noise,
            compare_count("models made of sums", canary_run.count_steps(canary_run.sums), played),
        )
    claimed = charged if target.claimed_rounds is None else target.claimed_rounds
    few = f"only {played} of {claimed} rounds were played: a wrong count of rounds was not looked for."
    return AttackResult(
        spec=target.spec or spec.digest,
        method=spec.method.name,
        aggregator=spec.aggregator.name,
        unit=spec.method.unit,
        silos=len(target.names),
        dimensions=dimensions,
        rounds=played,
        claimed_rounds=claimed,
        canaries=canaries,
        delta=spec.delta,
        level=level,
        rows=rows,
        noise=noise,
        untested=(
            *([few] if played < claimed else []),
            *gaps,
            *(
                _UNTESTED_WEIGHTS.get(spec.method.weight_rule, ())
                if spec.aggregator.weights_privately
                else ()
            ),
            *target.untested,
        ),
    )
