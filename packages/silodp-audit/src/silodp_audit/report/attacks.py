"""What `silodp attack` measured on a run, read back from attack.json and checked, and its sentences for readers.

Bounds on attackers are computed elsewhere, from the ledger; the numbers here are measurements on a canary run, a run of
the same program on made-up persons. They show that the program leaks at least so much, and prove no guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, TypeAdapter

from silodp.accounting.guarantee import Guarantee, format_epsilon
from silodp.accounting.views import Adversary
from silodp.errors import SilodpError, name_file
from silodp.parsing import parse_json, refuse_malformed
from silodp.report.formatting import format_accuracy, format_lower_limit
from silodp.report.guarantee_text import ADVERSARY_LABELS
from silodp.report.rederive import is_covered
from silodp.runtime.run_files import ATTACK, RUN_SPEC
from silodp.text import join_names, pluralize

FORMAT = 1
"""Of attack.json."""
EVALUATION = "evaluation: "
"""How the names of tests of an evaluation begin."""
MAX_POINTS = 60
"""Of a ROC curve."""
LEAKS = "The program leaks more than it promises: do not release models of this version."
OTHER_NOISE = "The program does not add the noise that it states; no leak above ε was measured."
CANNOT_SHOW = (
    "a leak that other made-up persons, or a side channel such as timing, would show",
    "noise that somebody can predict: a seed that they know, a weak generator, the low bits of floating point",
    "whether one person is known under two ids in the real tables",
    "parties that deviate from the protocol or pool what they know, and models that somebody chose for an attack",
    "silos that drop out, metrics that no ε covers, tuning, and several runs on the same people",
    "leaks whose probability is near δ",
)
"""What no attack of this kind can show, one clause each."""

_Probability = Annotated[float, Field(ge=0, le=1)]
_Epsilon = Annotated[FiniteFloat, Field(ge=0)]
_Count = Annotated[int, Field(ge=1, lt=1 << 63)]
_Curve = Annotated[tuple[_Probability, ...], Field(min_length=2, max_length=MAX_POINTS)]


@dataclass(frozen=True)
class ClaimedBounds:
    """What the charges of a canary run promise against one adversary.

    Attributes:
        epsilon: ε at the δ of the record.
        accountant: The accountant that computed it.
        auc: The largest probability that somebody who took part scores above somebody who did not.
        accuracy: The largest share of right guesses from even odds.
        tpr_1: The largest true positive rate at a false positive rate of 1 %.
        tpr_01: The same at 0.1 %.
    """

    epsilon: _Epsilon
    accountant: str
    auc: _Probability
    accuracy: _Probability | None = None
    tpr_1: _Probability | None = None
    tpr_01: _Probability | None = None


@dataclass(frozen=True)
class RocCurve:
    """Measured ROC with its band, and what the claim allows.

    Attributes:
        fpr: (N,), false positive rates, ascending.
        tpr: (N,), measured true positive rates.
        tpr_low: (N,), lower limits.
        tpr_high: (N,), upper limits.
        claimed_tpr: (N,), the largest true positive rates that the claim allows; None without a claim.
    """

    fpr: _Curve
    tpr: _Curve
    tpr_low: _Curve
    tpr_high: _Curve
    claimed_tpr: _Curve | None = None

    def __post_init__(self) -> None:
        curves = (self.tpr, self.tpr_low, self.tpr_high, self.claimed_tpr or self.fpr)
        if {len(self.fpr)} != {len(curve) for curve in curves} or list(self.fpr) != sorted(self.fpr):
            raise ValueError("curves of different lengths, or not ascending")


@dataclass(frozen=True)
class Measurement:
    """What the best score of one adversary reached.

    Attributes:
        pairs: Disjoint pairs of a canary that took part and one that did not.
        wins: Pairs in which the one that took part scored higher.
        auc: The area under the ROC curve, over all pairs.
        auc_lower: Lower limit of the probability of a win at the level of the record.
        auc_upper: Its upper limit.
        score: "likelihood", or "whitened".
        p: Probability that a program which keeps its promise gives as many wins; None without a claim.
        accuracy: Share of right guesses at the best threshold.
        noise_share: The factor by which all noise may be divided so that the claim allows no more than `auc_lower`.
        epsilon_lower: Lower limit of ε, given the kind of noise that is claimed.
        epsilon_delong: The same by the method of DeLong, which holds for many canaries only.
        epsilon_one_run: Lower limit of ε without any assumption on the mechanism.
        detectable: A program that adds this share of its noise is found with 95 % probability.
        roc: The ROC curve.
    """

    pairs: _Count
    wins: Annotated[int, Field(ge=0)]
    auc: _Probability
    auc_lower: _Probability
    auc_upper: _Probability
    score: str = ""
    p: _Probability | None = None
    accuracy: _Probability | None = None
    noise_share: _Epsilon | None = None
    epsilon_lower: _Epsilon | None = None
    epsilon_delong: _Epsilon | None = None
    epsilon_one_run: _Epsilon | None = None
    detectable: _Probability | None = None
    roc: RocCurve | None = None

    def __post_init__(self) -> None:
        if self.wins > self.pairs or self.auc_lower > self.auc_upper:
            raise ValueError("more wins than pairs, or limits in the wrong order")

    @property
    def share(self) -> float:
        """Share of the pairs that were won."""
        return self.wins / self.pairs

    @property
    def limits(self) -> tuple[float, float]:
        """Lower and upper limit of the share in percent, rounded outwards."""
        return math.floor(1000 * self.auc_lower) / 10, math.ceil(1000 * self.auc_upper) / 10

    @property
    def least_cut(self) -> int | None:
        """Percent of the noise; a program that leaves out more is found with 95 % probability. None: not known."""
        return None if self.detectable is None else math.ceil(100 * (1 - self.detectable) - 1e-9)


@dataclass(frozen=True)
class AttackedView:
    """The attack by one adversary.

    Attributes:
        adversary: Who attacked.
        verdict: What follows from the measurement.
        claim: None where there is no guarantee against this adversary.
        measured: None where what this adversary sees was not read.
        reason: Why there is no guarantee, why nothing was read or nothing follows from it, or what the claim is about.
    """

    adversary: Adversary
    verdict: Literal["consistent", "violation", "no guarantee", "not seen"]
    claim: ClaimedBounds | None = None
    measured: Measurement | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        # A verdict on a promise needs both; and without one of them nothing may look as if it had been tested.
        is_tested = self.claim is not None and self.measured is not None
        if is_tested != (self.verdict in ("consistent", "violation")) or (
            self.verdict == "no guarantee" and self.claim is not None
        ):
            raise ValueError("a verdict on a promise that was not tested")

    @property
    def remark(self) -> str:
        """What a reader has to know beside the numbers, a clause; "" where they say everything."""
        if self.verdict in ("consistent", "violation"):
            return f"the promise is that of {self.reason}" if self.reason else ""
        what = "nothing is promised" if self.verdict == "no guarantee" else "nothing was measured"
        return f"{what}: {self.reason}"


@dataclass(frozen=True)
class NoiseTest:
    """One test of noise, shift or sampling against the charged events.

    Attributes:
        test: Its name.
        passed: Whether the program does what it states.
        value: What was measured.
        low: Lower limit of the value.
        high: Upper limit.
        expected: What the charged events imply; the unit is that of the test.
    """

    test: str
    passed: bool
    value: FiniteFloat | None = None
    low: FiniteFloat | None = None
    high: FiniteFloat | None = None
    expected: FiniteFloat | None = None


@dataclass(frozen=True)
class AttackRecord:
    """The content of attack.json.

    Attributes:
        version: The version of silodp that was attacked.
        spec: Digest of the `RunSpec` that was attacked.
        method: The name of the method.
        aggregator: The name of the aggregator.
        silos: Number of silos S.
        dimensions: Number of parameters d of the canary run.
        rounds: Rounds of the canary run.
        claimed_rounds: Rounds of the run that was attacked.
        canaries: Made-up persons that took part, or might have.
        delta: The δ of every ε.
        level: Probability of a false alarm.
        model: "canary" for a linear model, "config" for the model of the run on made-up records.
        adversaries: One entry for each that was tried.
        noise: Tests of noise, shift and sampling.
        verdict: What follows from all of it; "noise" where only a test in `noise` failed.
        unit: Who is protected; None without privacy.
        time: When the attack was made.
        untested: What was not tested, one sentence each.
    """

    version: str
    spec: str
    method: str
    aggregator: str
    silos: _Count
    dimensions: _Count
    rounds: _Count
    claimed_rounds: _Count
    canaries: _Count
    delta: Annotated[float, Field(gt=0, lt=1)]
    level: Annotated[float, Field(gt=0, lt=0.5)]
    model: Literal["canary", "config"]
    adversaries: Annotated[tuple[AttackedView, ...], Field(min_length=1)]
    noise: tuple[NoiseTest, ...]
    verdict: Literal["consistent", "violation", "noise"]
    unit: str | None = None
    time: str = ""
    untested: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        has_leak = any(one.verdict == "violation" for one in self.adversaries)
        has_failed = any(not one.passed for one in self.noise)
        if self.verdict != ("violation" if has_leak else "noise" if has_failed else "consistent"):
            raise ValueError("another verdict than that of its parts")
        if len({one.adversary for one in self.adversaries}) < len(self.adversaries):
            raise ValueError("two entries for one adversary")

    @property
    def alarm(self) -> str | None:
        """The sentence that must not be overlooked; None where nothing contradicts the promise."""
        return {"violation": LEAKS, "noise": OTHER_NOISE}.get(self.verdict)

    @property
    def confidence(self) -> str:
        """Probability that a limit holds, in percent."""
        return f"{100 * (1 - self.level):.4g} %"

    @property
    def stand_in(self) -> str:
        """What was trained in the canary run."""
        if self.model == "canary":
            return "a linear model on made-up records, and not the model of the run"
        return "the model of the run on made-up records"

    def describe_evaluation(self) -> str:
        """Return which ε of a run with an evaluation by sums was attacked, as a sentence."""
        is_attacked = any(one.test.startswith(EVALUATION) for one in self.noise)
        how = "was attacked by itself" if is_attacked else "was not attacked"
        return f"The ε attacked here is that of the rounds of training, without the evaluation, which {how}."

    def group_views(self) -> list[tuple[str, AttackedView]]:
        """Return the attacks with the names of their adversaries; those who see the same share an entry."""
        groups: dict[AttackedView, list[str]] = {}
        for view in self.adversaries:
            groups.setdefault(replace(view, adversary="released"), []).append(
                ADVERSARY_LABELS[view.adversary]
            )
        return [(join_names(names), view) for view, names in groups.items()]

    def describe_views(self) -> list[str]:
        """Return what was measured against each adversary, for readers without statistics."""
        return [f"Against {who}: {self._describe_view(view)}" for who, view in self.group_views()]

    def _describe_view(self, view: AttackedView) -> str:
        measured, claim = view.measured, view.claim
        if measured is None:
            return f"{view.remark}."
        low, high = measured.limits
        shown = (
            f"{100 * measured.share:.1f} % of {pluralize(measured.pairs, 'pair')} "
            f"(lower and upper limit at {self.confidence}: {low:.1f} % and {high:.1f} %)"
        )
        if claim is None:
            return f"{view.remark}. The AUC that was measured: {shown}."
        text = (
            f"the promise allows such an attacker an AUC of at most {format_accuracy(claim.auc)} (of pairs of persons, "
            f"of whom one took part, that one ranks first). Measured: {shown}."
        )
        if view.remark:
            text = f"{text} {view.remark[0].upper()}{view.remark[1:]}."
        if measured.epsilon_lower is not None:
            leak = format_lower_limit(measured.epsilon_lower)
            text = f"{text} So at least ε = {leak} leaks, and {format_epsilon(claim.epsilon)} is promised."
        if view.verdict == "violation":
            return f"{text} This contradicts the promise."
        text = f"{text} Nothing contradicts the promise: only a lower limit above it would"
        if measured.least_cut is None:
            return f"{text}."
        return (
            f"{text}; an error that had cut the noise by more than {measured.least_cut} % would have been found with "
            "95 % probability."
        )


def parse_attack(fields: Mapping[str, Any]) -> AttackRecord:
    """Return the record of the content of attack.json; ValueError where it is none."""
    return TypeAdapter(AttackRecord).validate_python(dict(fields))


def read_attack(directory: Path, guarantees: Mapping[Adversary, Guarantee]) -> AttackRecord | None:
    """Read DIR/attack.json; None where it is not there.

    Args:
        directory: The directory of the run.
        guarantees: The guarantees of the run, by adversary.

    Raises:
        SilodpError: it is damaged, of another format or of another run, or it tested less than the run promises.
    """
    path = directory / ATTACK
    if not path.exists():
        return None
    with name_file(path):
        content = path.read_bytes()
    with refuse_malformed(
        f"{path} is damaged: delete it, or attack the run again with 'silodp attack'.", code="report.damaged"
    ):
        fields: dict[str, Any] = dict(parse_json(content).items())  # a list has no items
        if type(fields["format"]) is not int:  # JSON's true is equal to 1 in Python
            raise ValueError("no format")
        record = parse_attack(fields) if fields["format"] == FORMAT else None
    if record is None:
        raise SilodpError(
            f"{path} has another format than {FORMAT}, which this version of silodp reads: attack the run again with "
            "'silodp attack'.",
            code="report.attack_format",
        )
    wrong = _find_other_run(record, directory) or _find_other_promise(record, guarantees)
    if wrong is not None:
        raise SilodpError(
            f"{path} is not an attack on this run: {wrong}; delete it, or attack the run again with 'silodp attack'.",
            code="report.contradicted",
        )
    return record


def _find_other_run(record: AttackRecord, directory: Path) -> str | None:
    """Return how run_spec.json contradicts an attack."""
    path = directory / RUN_SPEC
    if not path.exists():
        return f"{RUN_SPEC}, which says what was attacked, is missing"
    with refuse_malformed(f"{path} is damaged: restore it from a copy.", code="report.damaged"):
        digest = parse_json(path.read_bytes())["digest"]
    return None if record.spec == digest else f"it is of another digest than {RUN_SPEC}"


def _find_other_promise(record: AttackRecord, guarantees: Mapping[Adversary, Guarantee]) -> str | None:
    """Return where an attack tested a weaker promise than the run makes."""
    for view in record.adversaries:
        promised = guarantees[view.adversary].epsilon
        who = ADVERSARY_LABELS[view.adversary]
        if (view.verdict == "no guarantee" and promised is not None) or (view.claim and promised is None):
            return f"it disagrees with guarantee.json on whether there is a guarantee against {who}"
        # After fewer rounds less was promised; a smaller ε is a stricter test, which a run may be put to.
        is_whole = record.rounds == record.claimed_rounds == guarantees[view.adversary].rounds
        # A claim that is conditioned says in `reason` on what.
        is_same = is_whole and not view.reason
        if view.claim and promised is not None and is_same and not is_covered(promised, view.claim.epsilon):
            return (
                f"it tested ε = {view.claim.epsilon:.6g} against {who}, and the run promises {promised:.6g}"
            )
    return None


def describe_scope(record: AttackRecord, rounds: int) -> list[str]:
    """Return sentences on rounds of the run that were not attacked.

    Args:
        record: The attack.
        rounds: The number of rounds that the run was charged for.
    """
    found = []
    if record.rounds < record.claimed_rounds:
        found.append(
            f"Only {record.rounds:,} of {pluralize(record.claimed_rounds, 'round')} were played: a wrong count of "
            "rounds was not looked for."
        )
    if record.claimed_rounds != rounds:
        found.append(
            f"The run had {pluralize(record.claimed_rounds, 'round')} when it was attacked, and has {rounds:,} now: "
            "attack it again."
        )
    return found


def describe_result(record: AttackRecord) -> list[str]:
    """Return lines for the console of whoever attacked."""
    unit = "persons" if record.unit == "user" else "records"
    failed = [one for one in record.noise if not one.passed]
    return [
        f"{record.method}, {record.aggregator}, {pluralize(record.silos, 'silo')}: {record.canaries:,} made-up {unit} "
        f"were hidden in a canary run of {pluralize(record.rounds, 'round')} with {record.stand_in}.",
        *describe_scope(record, record.claimed_rounds),
        *record.describe_views(),
        f"Noise, shift and sampling: {len(record.noise) - len(failed)} of {len(record.noise)} tests passed.",
        *(
            f"  failed: {one.test}: {one.value:.4g} (from {one.low:.4g} to {one.high:.4g}), "
            f"where {one.expected:.4g} is right"
            for one in failed
        ),
        "Not looked for:",
        *(f"  {what.removesuffix('.')}" for what in (*record.untested, *CANNOT_SHOW)),
        record.alarm or _describe_verdict({one.verdict for one in record.adversaries}),
    ]


def _describe_verdict(verdicts: set[str]) -> str:
    if "consistent" in verdicts:
        return "Nothing contradicts the promise. That is no proof of it."
    return "No promise could be tested." if "not seen" in verdicts else "Nothing is promised."


def describe_attack(record: AttackRecord | None, rounds: int, command: str) -> list[str]:
    """Return lines for a console: what was measured, or how to measure it.

    Args:
        record: The attack; None where there was none.
        rounds: The number of rounds that the run was charged for.
        command: The command line that attacks the run.
    """
    if record is None:
        return [f"Not attacked: '{command}' measures how much this program leaks."]
    views = [f"Attacked: {text[0].lower()}{text[1:]}" for text in record.describe_views()]
    return [*views, *describe_scope(record, rounds)]


def describe_for_card(record: AttackRecord | None, rounds: int, evaluated: bool) -> str:
    """Return what a model card says of an attack.

    Args:
        record: The attack; None where there was none.
        rounds: The number of rounds that the run was charged for.
        evaluated: Whether the run has an evaluation by sums.
    """
    if record is None:
        return "**Attacked**: unknown; `silodp attack` measures how much the program leaks."
    if record.alarm is not None:
        return f"**Attacked**: {record.alarm}"
    leaks = "; ".join(
        f"ε ≥ {format_lower_limit(view.measured.epsilon_lower)} of {format_epsilon(view.claim.epsilon)} against {who}"
        for who, view in record.group_views()
        if view.claim is not None and view.measured is not None and view.measured.epsilon_lower is not None
    )
    if not leaks:
        return "**Attacked**: no leak could be measured."
    parts = [
        f"**Attacked**: {pluralize(record.canaries, 'made-up person')} took part in a canary run of "
        f"{pluralize(record.rounds, 'round')} with {record.stand_in}.",
        *([record.describe_evaluation()] if evaluated else []),
        f"Nothing contradicts {'that' if evaluated else 'these'} ε. What was seen to leak, at {record.confidence}: "
        f"{leaks}.",
        "This tests the program, and proves no guarantee.",
        *describe_scope(record, rounds),
    ]
    return " ".join(parts)
