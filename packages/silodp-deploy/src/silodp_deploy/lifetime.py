"""ε of all runs of one silo together: by its ledgers, beside the limits of its policy.

By a filter (`accounting/filters.py`) the limits hold however later runs are chosen after seeing earlier models.
Without one, what they compose is a limit for runs that were fixed beforehand.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from silodp.accounting.accountant import choose_accountant, compute_epsilon
from silodp.accounting.cohort import Counts, encode_charges
from silodp.accounting.events import Event, explain_not_private
from silodp.accounting.filters import Filter
from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.ledger import Ledger, find_exceeded_limit
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.aggregators.run_spec import RunSpec
from silodp.runtime.guarantees import count_charges, plan_releases
from silodp.runtime.silo import make_ledger
from silodp.wire.store import DirectoryStore, RoundStore
from silodp_deploy import AUDIT, LEDGERS, POLICY, STORE
from silodp_deploy.history import find_plan, list_charged, open_ledgers
from silodp_deploy.limits import BEGUN, find_last, read_audit
from silodp_deploy.policy import Policy

_NEW_RUN = "plan"
"""Stands for the id of a run that has not begun, among those of earlier runs."""


@dataclass
class LifetimeLedger:
    """The ledgers of all runs of one silo, and the limits for all runs together.

    Attributes:
        delta: δ of the limits.
        limits: Largest ε by adversary; an adversary that is absent has no limit.
        runs: The ledgers by run.
        filter_bounds: Those of the filter by which the limits hold however runs are chosen; none: the limits hold for
            runs that were fixed beforehand.
        plan: The charges of the filter's plan, with counts.
        checked: By adversary with a limit, ε including the charge that `find_exceeded` checked last, as of a list that
            was fixed beforehand.
    """

    delta: float
    limits: Mapping[Adversary, float]
    runs: dict[str, Ledger] = field(default_factory=dict)
    filter_bounds: tuple[str, ...] = ()
    plan: Counts = field(default_factory=dict)
    checked: dict[Adversary, float | None] = field(default_factory=dict)

    @property
    def charged_runs(self) -> int:
        """The number of runs with a charge."""
        return len(list_charged(self.runs))

    def epsilon(
        self, adversary: Adversary, more: Mapping[Event, int] | None = None, run: str = ""
    ) -> float | None:
        """Return ε of all runs together as of a list that was fixed beforehand; None where there is no guarantee.

        The disclosure by the ciphertexts of all runs is included.

        Source: docs/privacy.md, section 3.

        Args:
            adversary: Against whom.
            more: Charges that are added, with counts.
            run: The run of these charges.
        """
        counts = self._count(adversary, more)
        if counts is None:
            return None
        if not counts:
            return 0.0
        disclosure = self._sum_disclosure(adversary, run)
        epsilon = compute_epsilon(counts.items(), self.delta, choose_accountant(counts), disclosure)
        return epsilon if math.isfinite(epsilon) else None

    def compute_limit(
        self,
        adversary: Adversary,
        more: Mapping[Event, int] | None = None,
        run: str = "",
        limit: float = 0.0,
    ) -> float | None:
        """Return the smallest limit under which all runs are admitted; None where there is none.

        Without a filter it is `epsilon`.

        Args:
            adversary: Against whom.
            more: Charges that are added, with counts.
            run: The run of these charges.
            limit: The limit that is kept. A larger one leaves less room for what ciphertexts disclose.
        """
        if not self.filter_bounds:
            return self.epsilon(adversary, more, run)
        counts = self._count(adversary, more)
        if counts is None:
            return None
        needed = self._filter(adversary).epsilon(counts, self._sum_disclosure(adversary, run), limit)
        return needed if math.isfinite(needed) else None

    def find_exceeded(self, events: Mapping[Adversary, Event], run: str = "") -> str | None:
        """Return a phrase about the first limit that these events of a run would exceed; None if they exceed none."""

        def find_spent(adversary: Adversary) -> float | None:
            more = {events[adversary]: 1}
            self.checked[adversary] = self.epsilon(adversary, more, run)
            if not self.filter_bounds:
                return self.checked[adversary]
            return self.compute_limit(adversary, more, run, self.limits[adversary])

        over = find_exceeded_limit(self.limits, find_spent)
        if over is None:
            return None
        adversary, told = over
        limit, disclosure = self.limits[adversary], self._sum_disclosure(adversary, run)
        if self.filter_bounds and not self._filter(adversary).leaves_room(limit, disclosure):
            return self._filter(adversary).describe_room(limit, disclosure, adversary)
        needs = "a limit of " if self.filter_bounds else ""
        return f"{needs}{told} against '{adversary}' over all its runs, beyond the limit of {limit:g} in its policy"

    def _filter(self, adversary: Adversary) -> Filter:
        return Filter(self.delta, self.filter_bounds, self.plan.get(adversary))

    def _count(self, adversary: Adversary, more: Mapping[Event, int] | None = None) -> Counter[Event] | None:
        """Return how often each event was charged in all runs; None where nothing is promised of them together."""
        # Equal events of all runs are counted together: the accountant composes each kind once, not once per run.
        counts = Counter[Event](more or {})
        for ledger in self.runs.values():
            counts += ledger.counts(adversary)
        return None if any(explain_not_private(event) is not None for event in counts) else counts

    def _sum_disclosure(self, adversary: Adversary, run: str = "") -> float:
        """Return the total variation that the ciphertexts of all runs disclose, that of an uncharged `run` included."""
        seen = [ledger for name, ledger in self.runs.items() if ledger.history or name == run]
        return sum(ledger.find_disclosure(adversary) for ledger in seen)


def count_plan(spec: RunSpec, silo: str) -> dict[Adversary, Counter[Event]]:
    """Return the charges of all rounds and evaluations of a run by adversary, with counts, without further releases.

    Adversaries to whom nothing is promised are left out.

    Args:
        spec: Specification of the run.
        silo: Name of the silo.
    """
    counts = count_charges(
        spec, plan_releases(spec), lambda about, number, release: about.silo_events(silo, number, release)
    )
    return {a: found for a, found in counts.items() if not any(map(explain_not_private, found))}


def encode_plan(plan: Counts) -> str:
    """Return a plan as text; that of the same charges is the same."""
    return json.dumps(encode_charges(plan), sort_keys=True)


def compute_lifetime_cost(
    spec: RunSpec,
    silo: str,
    delta: float,
    earlier: Mapping[str, Ledger] | None = None,
    filter_bounds: tuple[str, ...] = (),
    plan: Counts | None = None,
    limits: Mapping[Adversary, float] | None = None,
) -> dict[Adversary, float]:
    """Return the limit that all runs of a silo need after all T rounds of a new run, without further releases.

    Source: docs/privacy.md, sections 3 and 12.

    Args:
        spec: Specification of the run; its evaluations are included.
        silo: Name of the silo.
        delta: δ of the limits for all runs.
        earlier: Ledgers of earlier runs by run; None: there are none.
        filter_bounds: Those of the policy's filter; none: ε of runs that were fixed beforehand.
        plan: That of the filter; None: it is the run.
        limits: The limits that are kept, where they are fixed already.

    Returns:
        ε by adversary, without adversaries against whom there is no guarantee.
    """
    # Without a charge of its own: it states what the ciphertexts of the run disclose.
    ledger = make_ledger(replace(spec, run=_NEW_RUN), disclosure=spec.aggregator.disclosure(spec))
    counts, runs = count_plan(spec, silo), {**(earlier or {}), _NEW_RUN: ledger}
    lifetime = LifetimeLedger(delta, {}, runs, filter_bounds, counts if plan is None else plan)
    found = {
        adversary: lifetime.compute_limit(adversary, planned, _NEW_RUN, (limits or {}).get(adversary, 0.0))
        for adversary, planned in counts.items()
    }
    return {adversary: epsilon for adversary, epsilon in found.items() if epsilon is not None}


def read_spent(folder: Path, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Read ε of all runs of a silo.

    Args:
        folder: Folder of the silo.
        entries: Entries of the audit log; no ledger may lack a line that they know of.

    Returns:
        JSON-ready: "runs" (that were charged), "unit" ("user" or "record"), "delta", "epsilon" (of runs that were fixed
        beforehand) and "limits" by adversary (None: no guarantee; no limit), and "filter_bounds", by which the limits
        hold however runs are chosen ([]: only for runs that were fixed beforehand). None before the first run.

    Raises:
        SilodpError: A ledger is missing, damaged or an old copy, or there is no policy.
    """
    if not (folder / LEDGERS).exists():
        return None
    policy = Policy.load(folder / POLICY)
    ledgers = read_ledgers(folder, entries)
    lifetime = LifetimeLedger(policy.delta, policy.lifetime_epsilon, ledgers)
    headers = [
        ledger.silo for ledger in (*list_charged(ledgers), *ledgers.values()) if ledger.silo is not None
    ]
    return {
        "runs": lifetime.charged_runs,
        "unit": headers[0].unit if headers else None,
        "delta": policy.delta,
        "epsilon": {adversary: lifetime.epsilon(adversary) for adversary in ADVERSARIES},
        "limits": {adversary: policy.lifetime_epsilon.get(adversary) for adversary in ADVERSARIES},
        "filter_bounds": policy.filter_bounds,
    }


def read_ledgers(folder: Path, entries: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Ledger]:
    """Read a silo's ledgers by run; a silo that runs is not disturbed.

    Args:
        folder: Folder of the silo.
        entries: Entries of the audit log, read before; None reads them.

    Raises:
        SilodpError: A ledger is missing, damaged or an old copy.
    """
    if entries is None:
        entries, _ = read_audit(folder / AUDIT)
    return (
        open_ledgers(folder / LEDGERS, find_last(entries)) if entries or (folder / LEDGERS).exists() else {}
    )


def find_shortfall(folder: Path, spec: RunSpec, silo: str, policy: Policy) -> dict[Adversary, float]:
    """Return `find_needed`, with the same arguments and errors, of adversaries whose limit in the policy it exceeds."""
    return select_exceeded(find_needed(folder, spec, silo, policy), policy)


def select_exceeded(needed: Mapping[Adversary, float], policy: Policy) -> dict[Adversary, float]:
    """Return those of `find_needed` that exceed their limit in the policy."""
    return {adversary: e for adversary, e in needed.items() if e > policy.lifetime_epsilon[adversary]}


def find_needed(
    folder: Path, spec: RunSpec, silo: str, policy: Policy, ledgers: Mapping[str, Ledger] | None = None
) -> dict[Adversary, float]:
    """Return the limits that all runs together need, of adversaries with a limit in the silo's policy.

    Args:
        folder: Folder of the silo, with the ledgers of earlier runs. Where the run has begun, all T rounds are counted
            in place of the charges in its ledger.
        spec: Specification of the run.
        silo: Name of the silo.
        policy: Policy of the silo.
        ledgers: Those of the folder, read before; None reads them.

    Returns:
        ε after all T rounds by adversary, infinite where there is no guarantee.

    Raises:
        SilodpError: A ledger is missing, damaged or an old copy.
    """
    earlier = read_ledgers(folder) if ledgers is None else ledgers
    rule, limits = tuple(policy.filter_bounds), policy.lifetime_epsilon
    plan, begun = find_plan(earlier), _find_begun(folder, spec.digest, earlier)
    others = {run: ledger for run, ledger in earlier.items() if run != begun}
    needed = compute_lifetime_cost(spec, silo, policy.delta, others, rule, plan, limits)
    # An adversary that is absent has no guarantee, which is beyond every limit.
    return {adversary: needed.get(adversary, math.inf) for adversary in policy.lifetime_epsilon}


def _find_begun(folder: Path, digest: str, runs: Iterable[str]) -> str | None:
    """Return the id of the newest run of a specification that a silo has begun; None where it has begun none."""
    store = DirectoryStore(folder / STORE, private=False)
    stores = {run: RoundStore(store, f"{run}/").run for run in runs}
    mine = [run for run, one in stores.items() if one.get("spec") == digest.encode()]
    return max(mine, key=lambda run: stores[run].get(BEGUN) or b"", default=None)


def describe_shortfall(short: Mapping[Adversary, float], limits: Mapping[Adversary, float]) -> str:
    """Return a sentence about the limits that a run would exceed, and what to do.

    Args:
        short: Result of `find_shortfall`.
        limits: Limits of the policy, ε by adversary.
    """
    told = "; ".join(
        f"{format_epsilon(e) if math.isfinite(e) else 'no guarantee'} against {name}, of at most {limits[name]:g}"
        for name, e in short.items()
    )
    return (
        f"all runs of this silo together, with all rounds of this one, come to ε = {told}: the silo will end this run "
        "early (gate.budget); raise lifetime_epsilon in policy.toml only if that is what you owe these persons, or ask "
        "the coordinator for a smaller run"
    )
