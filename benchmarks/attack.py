"""Attack every method under every aggregator, and print the rows of RESULTS.md, section "Attacked".

    python benchmarks/attack.py                 all rows: about 15 CPU minutes
    python benchmarks/attack.py rpdp ddp        rows of these methods
    python benchmarks/attack.py --brief         few canaries and rounds, about 4 CPU minutes: sees large leaks alone

Rows come from the registries of methods and aggregators, and from `EVALUATED`. A method that is new there needs an
entry in `VARIANTS`; a test fails without it. Nothing has a seed, so numbers differ from call to call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from silodp.accounting.guarantee import format_epsilon
from silodp.aggregators.registry import AGGREGATORS
from silodp.errors import SilodpError
from silodp.methods import METHODS, Ddp, Method, UldpAvg
from silodp.training.sgd import LocalTraining
from silodp_analytics.evaluation.series import Evaluation
from silodp_audit.attack.audit_run import AttackResult, Target, attack_method, audit_evaluation
from silodp_audit.attack.evidence import bound_share
from silodp_budgets.random_allocation import RandomAllocation
from timing import show_help

Settings = dict[str, Any]
EVALUATION = "evaluation"
"""Name of the rows of evaluations, which are no methods that a run may name."""

SUMS: Settings = {"noise_multiplier": 5.0, "clip": 1.0}
TRAINED: Settings = {**SUMS, "local": LocalTraining(learning_rate=0.01)}
STEPS: Settings = {**SUMS, "expected_batch_size": 10.0, "local_learning_rate": 1.0}
GROUP: Settings = {**STEPS, "group_size": 12, "record_sampling": 0.1}
BUDGETS: Settings = {**STEPS, "local_steps": 2, "delta": 1e-5}
COUNTS: Settings = {"noise_multiplier": 1.0}
DDP: Settings = {**STEPS, "noise_multiplier": 3.0, "record_sampling": 0.2}
FOUR_STEPS: Settings = {**DDP, "local_steps": 4}

VARIANTS: dict[str, dict[str, tuple[int, Settings]]] = {
    "default": {"": (10, {"local": LocalTraining(learning_rate=0.01)})},
    "uldp-naive": {"": (10, TRAINED)},
    "uldp-group": {
        "one step": (20, {**GROUP, "local_steps": 1}),
        "five steps": (4, {**GROUP, "local_steps": 5}),
    },
    "uldp-sgd": {
        "uniform": (10, SUMS),
        "by records": (10, {**SUMS, "weighting": "records"}),
        "one of 5 rounds": (20, {**SUMS, "participation": RandomAllocation(5)}),
    },
    "uldp-avg": {
        "uniform": (10, TRAINED),
        "by records": (10, {**TRAINED, "weighting": "records"}),
        "by presence": (10, {**TRAINED, "weighting": "present"}),
        "primary silo": (10, {**TRAINED, "weighting": "primary_silo"}),
        "uniform, q = .3": (10, {**TRAINED, "user_sampling": 0.3}),
        "by records, q = .3": (10, {**TRAINED, "weighting": "records", "user_sampling": 0.3}),
    },
    "rpdp": {
        "λ = 1": (10, {**BUDGETS, "rounds": 10, "largest_budget": 3.0}),
        "λ = .6": (10, {**BUDGETS, "rounds": 10, "largest_budget": 3.0, "client_sampling": 0.6}),
    },
    "rpdp-minimum": {"": (10, {**BUDGETS, "rounds": 10, "budget": 3.0})},
    "rpdp-dropout": {"": (10, {**BUDGETS, "rounds": 10, "threshold": 3.0})},
    "rpdp-filter": {"": (10, {**BUDGETS, "largest_budget": 3.0})},
    "statistics": {
        "uniform": (1, COUNTS),
        "by presence": (1, {**COUNTS, "weighting": "present"}),
        "records = 3": (1, {**COUNTS, "records": 3}),
    },
    "regression": {
        "primary silo": (4, COUNTS),
        "uniform": (4, {**COUNTS, "weighting": "uniform"}),
    },
    "ddp": {
        "one step": (20, {**DDP, "local_steps": 1}),
        "four steps": (5, FOUR_STEPS),
        "four steps, local": (5, {**FOUR_STEPS, "trajectory": "local"}),
    },
}
"""By method: the rounds and settings of its rows, by what is different about them."""

EVALUATED: dict[str, tuple[Settings, Method]] = {
    "persons": ({}, UldpAvg(**TRAINED)),
    "persons, by silo": ({"by_silo": True}, UldpAvg(**TRAINED)),
    "persons, clip 3": ({"clip": 3.0}, UldpAvg(**TRAINED)),
    "persons, weights by records": ({}, UldpAvg(**TRAINED, weighting="records")),
    "records": ({}, Ddp(**{**DDP, "local_steps": 1})),
    "records, by silo": ({"by_silo": True}, Ddp(**{**DDP, "local_steps": 1})),
}
"""Evaluations by sums: their settings, and the method whose models are evaluated."""

PROTOCOLS: dict[str, Settings] = {
    "lattice": {"count_cap": 64, "attempts": 20},
    "paillier": {"count_cap": 64, "key_bits": 512, "insecure_for_tests": True},
}
"""Settings of aggregators that have any to be given; small keys, since no key is attacked."""
CANARIES, FEW_CANARIES = 1500, 300
LEVEL = 0.001
"""Of one run, so that right code fails somewhere in the table of some 67 runs with a probability below 7 %."""
SLOW = {"lattice": 300, "paillier": 300}
"""Canaries of aggregators that encrypt every coordinate."""


@dataclass(frozen=True)
class Row:
    """One run to attack."""

    method: str
    variant: str
    aggregator: str

    @property
    def label(self) -> str:
        """How the table calls it."""
        return ", ".join(part for part in (self.method, self.variant, self.aggregator) if part)

    def attack(self, brief: bool = False, **more: Any) -> AttackResult | None:
        """Attack it; None where the aggregator cannot be used with these settings.

        Args:
            brief: few canaries and at most two rounds, with little noise.
            more: arguments of `attack_method`.
        """
        canaries = min(FEW_CANARIES if brief else CANARIES, SLOW.get(self.aggregator, CANARIES))
        aggregator = AGGREGATORS[self.aggregator](**PROTOCOLS.get(self.aggregator, {}))
        arguments = {"aggregator": aggregator, **more}
        shared = {"canaries": canaries, "level": LEVEL}
        try:
            if self.method == EVALUATION:
                settings, method = EVALUATED[self.variant]
                evaluation = Evaluation("sums", noise_multiplier=1.0, **settings)
                return audit_evaluation(Target(method, ("a", "b", "c"), 1, arguments, evaluation), **shared)
            rounds, settings = VARIANTS[self.method][self.variant]
            return attack_method(
                METHODS[self.method](**settings),
                rounds=min(rounds, 2) if brief else rounds,
                **shared,
                **arguments,
            )
        except SilodpError as error:
            # Weights that this aggregator does not compute, or counts that it does not add up.
            if error.code in ("argument.conflict", "evaluation.aggregator"):
                return None
            raise


def list_rows(methods: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the rows of these methods, or of all."""
    for method in methods or (*VARIANTS, EVALUATION):
        for variant in EVALUATED if method == EVALUATION else VARIANTS[method]:
            for aggregator in AGGREGATORS:
                yield Row(method, variant, aggregator)


def format_row(row: Row, result: AttackResult) -> str:
    """Return the line of a run: for each adversary the claimed ε, and how much of it leaks at least, at 95 %."""
    failed = [test.test for test in result.noise if not test.passed]
    cells = [_format_cell(found, result.delta) for found in result.rows]
    noise = f"{len(result.noise)} tests, {'none failed' if not failed else 'failed: ' + ', '.join(failed)}"
    return f"| {row.label} | {' | '.join(cells)} | {result.canaries:,} | {noise} |"


def _format_cell(found: Any, delta: float) -> str:
    """Return what is claimed and measured; the limit is of this cell alone, and the verdict is that of the table."""
    if found.verdict in ("no guarantee", "not seen"):
        return found.verdict
    family, claimed = found.promise.family, found.promise.epsilon
    low, _ = bound_share(found.measured.wins, found.measured.pairs, 0.05)
    leak = family.compute_epsilon(delta, factor) if (factor := family.find_factor(low)) else 0.0
    alarm = " VIOLATION" if found.verdict == "violation" else ""
    areas = f"{found.measured.auc:.3f} of {found.claim.auc:.3f}"
    return f"{format_epsilon(claimed)}: {areas}, ≥ {leak:.2f} ({leak / claimed:.0%}){alarm}"


def main(arguments: list[str]) -> None:
    """Attack, and print the table as it grows."""
    brief = "--brief" in arguments
    print("| run | whoever sees the models | server | another silo | canaries | noise, shift, sampling |")
    print("|---|---|---|---|---|---|", flush=True)
    for row in list_rows([name for name in arguments if not name.startswith("-")]):
        started = time.process_time()
        result = row.attack(brief)
        if result is not None:
            print(format_row(row, result), flush=True)
            print(f"{row.label}: {time.process_time() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    show_help(__doc__)
    main(sys.argv[1:])
