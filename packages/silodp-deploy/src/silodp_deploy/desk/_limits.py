"""The limits of a silo's policy in words, each beside what a run asks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.views import Adversary
from silodp.report.formatting import format_bytes
from silodp.report.guarantee_text import ADVERSARY_LABELS
from silodp.text import pluralize
from silodp_deploy.consortium import Consortium
from silodp_deploy.monitoring import describe_epsilon
from silodp_deploy.policy import Policy, find_max_bytes

MET, NOT_MET, LATER = "met", "not met", "later"


@dataclass(frozen=True)
class Limit:
    """One limit of a policy.

    Attributes:
        field: Name of the field in policy.toml.
        name: What it limits.
        allowed: What the policy allows.
        asked: What the run asks.
        verdict: `MET`, `NOT_MET`, or `LATER` where only the table or the run itself can tell.
        why: Why it is not met; "" where it is.
    """

    field: str
    name: str
    allowed: str
    asked: str
    verdict: str = MET
    why: str = ""

    def describe(self) -> str:
        """Return whether the limit is met, as a sign and words."""
        sign = {MET: "✓ met", NOT_MET: "✗ not met", LATER: "– later"}[self.verdict]
        return f"{sign}: {self.why}" if self.why else sign


def list_limits(
    consortium: Consortium,
    name: str,
    policy: Policy,
    needed: Mapping[Adversary, float],
    runs: int,
    other_persons: str = "",
) -> list[Limit]:
    """Return all limits of a policy that accepts the public folder, those that are not met first.

    Args:
        consortium: The public folder.
        name: Name of the silo.
        policy: Its policy, which lists the folder's digest.
        needed: Result of `find_needed`.
        runs: Number of runs in which the silo was charged.
        other_persons: Why persons are others than in earlier runs; "": they are not.
    """
    spec, columns = consortium.stated_spec, consortium.list_columns(name)
    refused = {
        str(error.field): str(error) for error in policy.find_refusals(consortium.digest, spec, columns)
    }
    rows = [
        ("methods", "Method", _join(policy.methods), spec.method.name),
        ("aggregators", "How answers are added up", _join(policy.aggregators), spec.aggregator.name),
        ("columns", "Columns for training", _join(policy.columns), _join(columns["columns"], "none named")),
        ("labels", "Columns to be predicted", _join(policy.labels), _join(columns["labels"], "none named")),
        ("evaluation", "Evaluation on records held out", _join(policy.evaluation), _join(spec.kinds, "none")),
        ("allow_counts", "Each person's number of records in clear", _say(policy.allow_counts),
         _say(spec.shows_counts)),
        ("require_isolated_units", "Every person computed alone",
         "required" if policy.require_isolated_units else "not required", _say(spec.isolate_units)),
        ("min_silos", "Fewest silos in a sum", str(policy.min_silos), str(spec.min_silos)),
        ("allow_seed", "Noise that others could know", _say(policy.allow_seed), _say(not spec.is_secret)),
        ("max_message_bytes", "Longest message", format_bytes(policy.max_message_bytes),
         format_bytes(find_max_bytes(spec))),
    ]  # fmt: skip
    # Few runs have these: where neither the policy nor the run names one, there is nothing to compare.
    for field, title, allowed in (
        ("budget", "Column with ε of a record", policy.budget),
        ("queries", "Queries to a database", policy.queries),
    ):
        if columns[field] or allowed:
            rows.append((field, title, _join(allowed, "none"), _join(columns[field], "none")))
    found = [Limit(*row, NOT_MET if row[0] in refused else MET, refused.get(row[0], "")) for row in rows]
    spent, persons = (
        _list_spent(policy, needed, runs),
        _list_persons(consortium, name, policy, other_persons),
    )
    # What is not met first: nobody shall have to search for it.
    return sorted([*spent, *found, *persons, *_list_later(policy)], key=lambda one: one.verdict != NOT_MET)


def _list_spent(policy: Policy, needed: Mapping[Adversary, float], runs: int) -> Iterator[Limit]:
    """Yield ε of all runs against each adversary, and the number of runs."""
    for adversary, limit in policy.lifetime_epsilon.items():
        epsilon = needed[adversary]
        told = describe_epsilon(epsilon)
        told = told if math.isinf(epsilon) else f"at most {told}, with all earlier runs"
        is_met = epsilon <= limit
        why = "" if is_met else "the silo would end this run early, before the limit is passed."
        yield Limit("lifetime_epsilon", f"ε of all runs against {ADVERSARY_LABELS[adversary]}",
                    f"at most {format_epsilon(limit)}", told, MET if is_met else NOT_MET, why)  # fmt: skip
    yield Limit("most_runs", "Runs of this silo", f"at most {policy.most_runs}",
                f"{pluralize(runs, 'run')} so far", LATER)  # fmt: skip


def _list_persons(consortium: Consortium, name: str, policy: Policy, why: str) -> Iterator[Limit]:
    """Yield whether persons are those of earlier runs, and the fewest persons."""
    verdict = NOT_MET if why else MET
    column = consortium.identify_persons(name).column
    yield Limit("persons", "Who is one person", "as in earlier runs", f"a value of the column '{column}'" if column else
                "what the data set numbers as one", verdict, why)  # fmt: skip
    asked = "counted when the table is read"
    yield Limit("min_persons", "Fewest persons in this table", str(policy.min_persons or "any"), asked, LATER)


def _list_later(policy: Policy) -> Iterator[Limit]:
    """Yield the limits that are watched while a run is in progress."""
    asked = "watched during the run"
    for field, name, allowed in (
        ("max_run_bytes", "Disk for one run", format_bytes(policy.max_run_bytes)),
        ("max_disk_bytes", "Disk for all runs", format_bytes(policy.max_disk_bytes)),
        ("max_sessions", "Times that a run may be set up", f"{policy.max_sessions:,}"),
        ("max_answers", "Answers in one run", f"{policy.max_answers:,}"),
        ("max_run_days", "Days of one run", f"{policy.max_run_days:,}"),
    ):
        yield Limit(field, name, f"at most {allowed}", asked, LATER)


def _join(names: Sequence[str], none: str = "any that the folder names") -> str:
    return ", ".join(names) or none


def _say(answer: bool) -> str:
    return "yes" if answer else "no"
