"""ε of a number of rounds against an adversary, by the method, aggregator, view and event of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from silodp.accounting.accountant import ACCOUNTANTS, Accountant, choose_accountant, find_accountant
from silodp.accounting.events import Event, Group, list_nested, reveal_samples
from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.views import ADVERSARIES, Adversary, View
from silodp.aggregators.base import check_attempts
from silodp.aggregators.run_spec import ModelSpec, RunSpec
from silodp.assumption import Assumption
from silodp.config.build import build_aggregator, find_method_class, get_fields, validate_arguments
from silodp.data.public import ASSUMED_USERS, PublicData
from silodp.errors import SilodpError
from silodp.methods import FederationSize, Method
from silodp.plugins import find_plugin, find_reference
from silodp.report.guarantee_text import is_only_claimed
from silodp.runtime.guarantees import delta_warning, derive_guarantees, plan_charges, warn_of_delta
from silodp.settings import MAX_SILOS, Delta, Whole, check_choice, check_value

LARGE_DELTA = 0.01
"""δ from which there is a remark where U is not known: 1/U of a hundred persons."""

LARGE_MODEL = 10**6
"""d where it is not given: with integer noise ε grows with d, by less than two percent."""


@dataclass(frozen=True)
class HypotheticalRun(RunSpec):
    """A run that a question is about: its events as one adversary sees them who knows more than in a run.

    Attributes:
        adversary: The adversary that the question is about.
        colluding: The number of silos that pool what they know, the adversary included.
        knows_sample: Whether the adversary knows which users or records were sampled.
        record_sampling: The sampling probability of the record that the question is about, where records are sampled
            by their budgets; else None.
    """

    adversary: Adversary = "released"
    colluding: int = 1
    knows_sample: bool = False
    record_sampling: float | None = None

    def views(self, survivors: int | None = None, round_: int = 0) -> dict[Adversary, View]:
        """As in a run, but for what this adversary knows more."""
        views = super().views(survivors, round_)
        view = views[self.adversary]
        known = view.knows_sample or self.knows_sample
        # The other views stay as in a run: guarantees against them are derived, and not shown.
        return {**views, self.adversary: replace(view, colluding=self.colluding, knows_sample=known)}

    def event(self, view: View) -> Event:
        """As in a run, for the record and the adversary that the question is about."""
        asked = self.record_sampling
        event = super().event(view) if asked is None else self.method.budgets.event_at_sampling(asked)
        if not self.knows_sample or view.adversary != self.adversary:
            return event
        return _reveal_samples(event, self.method)


def compute_epsilon_for(
    method: str,
    fields: Mapping[str, Any],
    *,
    rounds: int,
    delta: float = 1e-5,
    accountant: Accountant | str | None = None,
    adversary: str = "released",
    silos: int | None = None,
    aggregator: str = "plain",
    aggregation: Mapping[str, Any] | None = None,
    users: int | None = None,
    dimension: int = LARGE_MODEL,
    colluding: int = 1,
    knows_sample: bool = False,
) -> dict[str, Any]:
    """Compute ε of a method against one adversary, by the same method, aggregator, view and event as in a run.

    Args:
        method: name or reference.
        fields: of the method; those in its `epsilon_ignores` may be missing. Where every record has a budget,
            `record_sampling` is the sampling probability of one record.
        rounds: T.
        delta: δ.
        accountant: name, reference or object; None takes the tightest that knows the noise.
        adversary: "released", "server" or "silo".
        silos: S; needed where ε depends on it.
        aggregator: name or reference.
        aggregation: settings of the aggregator.
        users: U, None takes `ASSUMED_USERS`; ε depends on it with integer noise only.
        dimension: d; ε depends on it with integer noise only.
        colluding: number of silos that pool what they know, the adversary included.
        knows_sample: whether the adversary knows who was sampled, and where records are sampled, which ones.

    Returns:
        JSON-ready: "epsilon" (None: no guarantee, with the "reason"), where all silos answer; "any_dropouts", the
        largest ε if silos drop out depending on the models; "persons", "claims" and "assumptions"; "linkage", ε of a
        person who is not recognized as one, where the number of silos is given.

    Raises:
        SilodpError: a value out of range, a missing field, an unknown name.

    Source: docs/privacy.md, section 3.
    """
    check_value("delta", delta, Delta)
    for name, value, least in (("rounds", rounds, 0), ("dimension", dimension, 1)):
        Whole(least).check(name, value)
    if users is not None:
        Whole().check("users", users)
    made, sampling = _build_method(method, fields, rounds, delta)
    chosen_aggregator = build_aggregator(aggregator, aggregation or {})
    _check_question(made, adversary, silos, colluding)
    wanted = None if accountant is None else _find_accountant(accountant)
    # Where the number of silos does not matter, any stands for all: `_check_question` asks for it where it does.
    names = tuple(f"silo-{s + 1}" for s in range(silos or 2))
    asked = cast(Adversary, adversary)  # checked above
    spec = HypotheticalRun(
        PublicData("question", names, ASSUMED_USERS if users is None else users, (), "real"),
        ModelSpec(dimension),
        made,
        chosen_aggregator,
        chosen_aggregator.min_silos_for(len(names)),
        rounds=rounds,
        delta=delta,
        adversary=asked,
        colluding=colluding,
        knows_sample=knows_sample,
        record_sampling=sampling,
    )
    chosen_aggregator.check(spec)
    spec = cast(HypotheticalRun, spec.calibrate())
    check_attempts(chosen_aggregator, rounds)
    charges = plan_charges(spec, spec.accountant)
    # Whether the tightest accountant knows the noise is only seen in the events, which the aggregator may have changed.
    chosen = wanted or choose_accountant(charges.charged[asked])
    charges = replace(charges, accountant=chosen)
    found = derive_guarantees(spec, charges)[asked]
    return {
        "method": made.name,
        "unit": made.unit,
        **found.cost.to_dict(),
        "any_dropouts": found.any_dropouts,
        "persons": [{"records": records, **cost.to_dict()} for records, cost in found.persons],
        "claims": [claim for claim in found.claims if is_only_claimed(claim["epsilon"], found.cost.epsilon)],
        # It depends on the number of silos, which a question need not name.
        "linkage": [] if silos is None else list(found.linkage),
        "delta": delta,
        "adversary": adversary,
        "accountant": chosen.name,
        "aggregator": chosen_aggregator.name,
        "rounds": rounds,
        "noise_multiplier": made.noise_setting,
        "assumptions": [
            asdict(_without_fillers(one, made, fields))
            for one in (*found.assumptions, *list_delta_remarks(delta, users))
        ],
    }


def list_delta_remarks(delta: float, users: int | None) -> tuple[Assumption, ...]:
    """Return the remark on a δ that is not below 1/U; where U is None, on one too large for a hundred persons."""
    if users is not None:
        return delta_warning(delta, users)
    if delta < LARGE_DELTA:
        return ()
    return (
        warn_of_delta(
            f"δ = {delta:g} is accepted although it is not below 1/U where there are {math.ceil(1 / delta)} persons or "
            "more: take one well below, or give the number of persons (users)"
        ),
    )


def _without_fillers(one: Assumption, method: Method, given: Mapping[str, Any]) -> Assumption:
    """Return an assumption without the values of constants that were filled in."""
    text = one.text
    for name, value in method.epsilon_ignores.items():
        if name not in given:
            text = text.replace(f"{name} = {value:g} ", f"{name} ")
    return replace(one, text=text)


def format_records(result: Mapping[str, Any]) -> list[str]:
    """Return lines on ε of one record and of persons with several records; none where the unit is a person."""
    if not result["persons"]:
        return []
    numbers = "/".join(str(person["records"]) for person in result["persons"])
    epsilons = "/".join(format_epsilon(person["epsilon"]) for person in result["persons"])
    return ["  for one record", f"  for a person with {numbers} records: ε = {epsilons}"]


def format_linkage(result: Mapping[str, Any]) -> list[str]:
    """Return lines on ε of a person who is not recognized as one."""
    return [
        f"  for a person with {row['case']}: ε = {format_epsilon(row['epsilon'])}"
        + (" (an estimate, not a guarantee)" if row["estimate"] else "")
        for row in result["linkage"]
    ]


def _find_accountant(given: Accountant | str) -> Accountant:
    """Return the given object, or the accountant of a name, an entry point or a reference "file.py:Name"."""
    if isinstance(given, str) and find_reference(given, ACCOUNTANTS) is not None:
        given = find_plugin(given, ACCOUNTANTS, Accountant, "accountant")()
    return find_accountant(given)


def _build_method(
    name: str, fields: Mapping[str, Any], rounds: int, delta: float
) -> tuple[Method, float | None]:
    """Return the method, and the sampling probability where the question is about one record with a budget."""
    maker = find_method_class(name, "method")
    given, sampling = dict(fields), None
    if maker.samples_by_budget:
        if "record_sampling" not in given:
            raise _missing_error(
                "record_sampling", f"{name} draws every record with a different probability, so name one"
            )
        sampling = given.pop("record_sampling")
    if sampling is not None and "largest_budget" in fields:
        raise SilodpError(
            f"largest_budget = {fields['largest_budget']} beside record_sampling: ε is that of a record which is drawn "
            "with record_sampling, whatever its budget; leave largest_budget out.",
            code="argument.conflict",
            field="largest_budget",
        )
    # Constants that ε does not depend on, such as learning rates, are filled in: nobody should have to invent them.
    run = {**maker.epsilon_ignores, "rounds": max(rounds, 1), "delta": delta}
    defaults = {key: value for key, value in run.items() if key in get_fields(maker)}
    made: Method = maker(**validate_arguments(maker, {**defaults, **given}, name))
    return made, sampling


def _reveal_samples(event: Event, method: Method) -> Event:
    """Return the event against an adversary who learns all samples; refuse where no close bound of it is known."""
    # By the accountants' rules for a group around a revealed sample, records that are drawn now and then would cost as
    # much as records that are always in.
    if any(isinstance(inner, Group) and inner.size > 1 for inner in list_nested(event)):
        raise SilodpError(
            f"knows_sample with {method.name}: each record of a person is drawn by a coin of its own, and no bound is "
            "computed against an adversary who sees these coins; leave knows_sample out.",
            code="argument.conflict",
            field="knows_sample",
        )
    return reveal_samples(event)


def _check_question(method: Method, adversary: str, silos: int | None, colluding: int) -> None:
    check_choice("adversary", adversary, ADVERSARIES)
    if silos is None and method.unit is not None:
        if adversary == "silo" and method.unit == "user":
            raise _missing_error("silos", "ε against another silo depends on their number")
        has_bounds_alone = method.bounds(FederationSize(1, 1)) is not None
        if method.unit == "user" and not has_bounds_alone:
            why = f"{method.name} splits a person's records over the silos, so ε depends on their number"
            raise _missing_error("silos", why)
        if method.unit == "record" and has_bounds_alone:
            why = f"in {method.name} the noise of all clients adds up, so ε depends on their number"
            raise _missing_error("clients", why)
    if silos is not None:
        Whole(limit=MAX_SILOS).check("silos", silos)
    Whole(what="silos that pool what they know").check("colluding", colluding)
    if colluding > 1 and adversary != "silo":
        raise SilodpError(
            f"colluding = {colluding} is about silos: set adversary = 'silo', or leave it out.",
            code="argument.conflict",
            field="colluding",
        )


def _missing_error(field: str, why: str) -> SilodpError:
    return SilodpError(f"{field} is missing: {why}.", code="argument.missing", field=field)
