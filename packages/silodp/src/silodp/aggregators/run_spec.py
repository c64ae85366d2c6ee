"""The specification of a run: all its public constants in one object, the same for every party."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from silodp.accounting.accountant import Accountant, find_accountant
from silodp.accounting.events import (
    Event,
    find_costliest_event,
    list_nested,
    remove_amplification,
    select_kind,
)
from silodp.accounting.views import Adversary, View, reads_round
from silodp.aggregators.base import Aggregator
from silodp.aggregators.series import Series, name_series
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.methods.base import Method
from silodp.methods.roles import FederationSize
from silodp.text import is_own

if TYPE_CHECKING:
    from silodp.accounting.ledger import Budget, LedgerHeader
    from silodp.mechanisms.clipping import Bounds

FORMAT = 1
"""Of run_spec.json."""


@dataclass(frozen=True)
class ModelSpec:
    """The public facts of a model and its loss.

    Attributes:
        size: d, the number of trained parameters.
        dtype: Numpy's name of their type.
        architecture: What the module prints as.
        loss: The name of the loss.
        constants: SHA-256 (hex) of frozen parameters, buffers, numbers in attributes, and which modules are in eval
            mode; "" without any.
        start: SHA-256 (hex) of the values that training starts at, if a task says `pretrained=True`; else "".
        keeps_values: Whether some values that the model came with are constants, or the start of training.
        other_code: Whether the model, the loss or a metric is code that came neither with silodp nor with torch. It is
            no part of the run's identity.
    """

    size: int
    dtype: str = "float32"
    architecture: str = ""
    loss: str = ""
    constants: str = ""
    start: str = ""
    keeps_values: bool = False
    other_code: bool = False


@dataclass(frozen=True)
class RunSpec:
    """The public constants of a run, the same for all parties. `prepare_run` makes one that can be run.

    Attributes:
        data: The public facts of the federation; `users` is known.
        model: The public facts of the model.
        method: The method; `prepare_run` calibrates it where units have their own budgets.
        aggregator: The way in which silos' shares become their sum.
        min_silos: m, the smallest number of silos whose shares are added up; noise is sized for them.
        rounds: T, the number of rounds; a silo answers no more.
        delta: The δ at which ε is reported.
        accountant: What composes the rounds' events into ε.
        budget: The ε that ends the run, at `noise_delta`; None: the run ends after T rounds.
        seed: None where all randomness is the operating system's; a number makes the run repeatable and its model
            not for release.
        silo_limits: The ε that every silo's own ledger lets the run spend, at `noise_delta`, by adversary.
        tested: Whether held-out records, pooled, measure the model.
        series: The additional series, in the order in which they release; training is none of them.
        isolate_units: Whether every person (or record, where records are clipped) is computed alone.
        run: The random id of one execution; "" before it begins. It is no part of `digest`.
    """

    data: PublicData
    model: ModelSpec
    method: Method
    aggregator: Aggregator
    min_silos: int
    rounds: int = 10**6
    delta: float = 1e-5
    accountant: Accountant = field(default_factory=lambda: find_accountant("pld"))
    budget: Budget | None = None
    seed: int | None = None
    silo_limits: Mapping[Adversary, float] = field(default_factory=dict, hash=False)
    tested: bool = False
    series: tuple[Series, ...] = ()
    isolate_units: bool = False
    run: str = ""

    # --- what follows from the constants ---

    @property
    def names(self) -> tuple[str, ...]:
        """The silos' names, in order."""
        return self.data.silos

    @cached_property
    def population(self) -> FederationSize:
        """The public size of the federation."""
        return FederationSize(len(self.names), self.data.users or 0, self.min_silos, self.data.user_budgets)

    @property
    def size(self) -> int:
        """Parameters of the model, d."""
        return self.model.size

    @property
    def dtype(self) -> str:
        """numpy's name of the type of the model's parameters."""
        return self.model.dtype

    @property
    def sum_size(self) -> int:
        """Numbers in what silos add up: d, and the method's extra coordinates."""
        return self.method.sum_size(self.size)

    @property
    def needs_common_index(self) -> bool:
        """Whether the server and the silos must number persons alike.

        With uniform weights they need not: each silo gives everyone the weight 1/S, and the coins that decide who takes
        part in a round are tossed by identifiers.
        """
        known = self.method.needs_counts or self.data.user_budgets is not None
        return self.method.unit == "user" and known

    @property
    def has_public_index(self) -> bool:
        """Whether anyone may learn whose identifiers are on a list."""
        return self.needs_common_index or not self.data.identity_digest

    @property
    def bounds(self) -> Bounds | None:
        """What holds for the rows that silos add up; None where silos add the noise themselves."""
        return self.method.bounds(self.population)

    @property
    def noise_delta(self) -> float:
        """The part of δ that noise is accounted at."""
        return self.delta * self.aggregator.delta_share

    @property
    def is_secret(self) -> bool:
        """Whether all randomness is the operating system's."""
        return self.seed is None

    @property
    def ledger_header(self) -> LedgerHeader:
        """What the events of the run's ledger are about."""
        from silodp.accounting.ledger import LedgerHeader

        method = self.method
        return LedgerHeader(method.name, repr(method), method.unit, self.aggregator.name, self.is_secret)

    # --- identity ---

    def to_dict(self) -> dict[str, Any]:
        """Return everything that identifies the run, JSON-ready.

        The rounds, the budget and the silos' limits are no part of it: a run may be resumed with others.
        """
        identity = {
            "data": self.data.to_dict(),
            # models without constants keep their digests
            "model": {
                k: v
                for k, v in vars(self.model).items()
                if k != "other_code" and (k not in ("constants", "start", "keeps_values") or v)
            },
            "method": {"name": self.method.name, "settings": repr(self.method)},
            "aggregator": {"name": self.aggregator.name, "settings": repr(self.aggregator)},
            "min_silos": self.min_silos,
            "delta": self.delta,
            "accountant": self.accountant.name,
            "seed": self.seed,
        }
        if self.series:
            identity["series"] = {one.name: repr(one) for one in self.series}
        if self.isolate_units:
            identity["isolate_units"] = True
        return identity

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical form: the run's identity, which every silo signs at set-up."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_json(self) -> str:
        """Return the content of run_spec.json."""
        limits = {
            "rounds": self.rounds,
            "budget": None if self.budget is None else vars(self.budget),
            "silo_limits": dict(self.silo_limits),
            "tested": self.tested,
        }
        if self.model.other_code:
            limits["other_code"] = True
        stored = {"format": FORMAT, "digest": self.digest, **self.to_dict(), **limits}
        return json.dumps(stored, indent=1, ensure_ascii=False) + "\n"

    # --- what rounds cost ---

    def views(self, survivors: int | None = None, round_: int = 0) -> dict[Adversary, View]:
        """Return what each adversary sees of one round; arguments as of `round_events`."""
        views = self.aggregator.views(self.method, len(self.names), survivors)
        return {name: replace(view, round=round_) for name, view in views.items()}

    def event(self, view: View) -> Event:
        """Return what one round costs against a view."""
        return self.method.budgets.event_for_largest_budget(self.aggregator.event(self, view), view)

    def round_events(self, survivors: int | None = None, round_: int = 0) -> dict[Adversary, Event]:
        """Return what one round costs against each adversary.

        Args:
            survivors: number of silos that answer; None: all.
            round_: counted from 0.
        """
        return {name: self.event(view) for name, view in self.views(survivors, round_).items()}

    @cached_property
    def is_sampled(self) -> bool:
        """Whether chance decides which persons, records or silos take part in a round."""
        events = (inner for event in self.round_events().values() for inner in list_nested(event))
        method = self.method
        return (
            method.samples_users
            or method.samples_silos
            or any(hasattr(event, "sampling_probability") for event in events)
        )

    @property
    def has_plugins(self) -> bool:
        """Whether the method, one of its parts, or the aggregator is code from outside silodp."""
        method = self.method
        parts = (method, method.participation_rule, *method.plugin_parts, self.aggregator)
        return not all(is_own(type(part)) for part in parts)

    @cached_property
    def varies_by_round(self) -> bool:
        """Whether rounds may cost different amounts in any order, as with a plug-in that reads `View.round`."""
        # silodp's own methods read it to know who has retired: there, rounds of equal cost are neighbors.
        if not self.has_plugins:
            return False
        answers = range(self.min_silos, len(self.names) + 1)
        return any(reads_round(self.event, view) for n in answers for view in self.views(n).values())

    @property
    def cost_period(self) -> int:
        """The number of rounds after which costs repeat, of which only the first one differs from the others."""
        return 1 if self.varies_by_round else self.method.participation_rule.rounds_drawn_together

    def number_rounds(self, rounds: int) -> Sequence[int]:
        """Return the numbers of the first rounds, as `count_events` takes them: a range where that is enough."""
        return tuple(range(rounds)) if self.varies_by_round else range(rounds)

    def release_events(
        self, survivors: int | None = None, round_: int = 0, release: int = 0
    ) -> dict[Adversary, Event]:
        """Return what one release of a round costs against each adversary.

        Users are sampled once in a round, so a further release is of the same sample: it is charged without
        amplification. Records are sampled anew, inside a silo, for every release.

        Args:
            survivors: number of silos that answer; None: all.
            round_: counted from 0.
            release: counted from 0 within the round.
        """
        cost = self.round_events(survivors, round_)
        if release == 0 or self.method.clips_records:
            return cost
        return {adversary: remove_amplification(event) for adversary, event in cost.items()}

    def costliest_events(self, round_: int = 0, release: int = 0) -> dict[Adversary, Event]:
        """Return what one release costs at most, whichever of the silos answer it.

        Where the silos that answer are chosen by looking at the earlier models, rounds cost this, and not what the
        numbers that happened to answer would cost (docs/privacy.md, section 3).

        Args:
            round_: counted from 0.
            release: counted from 0 within the round.
        """
        found = [
            self.release_events(survivors, round_, release)
            for survivors in range(self.min_silos, len(self.names) + 1)
        ]
        return {name: find_costliest_event([cost[name] for cost in found]) for name in found[0]}

    def silo_events(self, silo: str, round_: int = 0, release: int = 0) -> dict[Adversary, Event]:
        """Return what one release costs at most for the records of one silo: `costliest_events`, of its kind alone.

        A silo composes these over several runs, whose rosters may list it at other places.

        Args:
            silo: its name.
            round_: counted from 0.
            release: counted from 0 within the round.
        """
        place = self.names.index(silo)
        costliest = self.costliest_events(round_, release)
        return {adversary: select_kind(event, place) for adversary, event in costliest.items()}

    # --- additional series ---

    @cached_property
    def derived(self) -> Mapping[str, RunSpec]:
        """The specification of every additional series in which silos are asked something, by its name.

        Raises:
            SilodpError: a series is not proven for this run.
        """
        return {one.name: one.derive(self) for one in self.series if one.asks_silos}

    @property
    def charged(self) -> tuple[Series, ...]:
        """The additional series that cost ε."""
        return tuple(one for one in self.series if one.is_charged)

    def about(self, series: str) -> RunSpec:
        """Return the specification of a series: this one for training, and for a series that the run has not."""
        return self.derived.get(series, self)

    def for_series(self, series: str, **changes: Any) -> RunSpec:
        """Return the specification of an additional series, with its method, and what else it changes."""
        # The charges are in the ledger of the run, which alone has a budget.
        run = self.run and name_series(self.run, series)
        return replace(self, series=(), budget=None, run=run, **changes)

    @property
    def shows_counts(self) -> bool:
        """Whether silos send each person's number of records in clear."""
        return self.method.needs_counts and not self.aggregator.weights_privately

    @property
    def kinds(self) -> list[str]:
        """What the operator of a silo allows besides training: the kinds of the series; "none" without any."""
        return [one.kind for one in self.series] or ["none"]

    @property
    def is_measured(self) -> bool:
        """Whether a series measures the model, so that pooled held-out records do not."""
        return any(one.measures_model for one in self.series)

    def list_events(self) -> tuple[Event, ...]:
        """Return what rounds of all series cost against all adversaries, each event once."""
        found = [*self.round_events().values()]
        found += [event for one in self.charged for event in self.derived[one.name].round_events().values()]
        last = self.rounds if self.varies_by_round else min(self.rounds, 2)
        found += [event for n in range(1, last) for event in self.round_events(None, n).values()]
        return tuple(dict.fromkeys(found))

    def calibrate(self) -> RunSpec:
        """Return the same run, its method knowing what the units' own budgets allow; every party finds the same.

        Raises:
            SilodpError: budgets cannot be met against the adversary they are for, or rounds cost different amounts.
        """
        if self.method.budgets.max_rounds is None:
            return self
        costs: dict[Adversary, list[tuple[View, Event]]] = {}
        for survivors in range(self.min_silos, len(self.names) + 1):
            for name, view in self.aggregator.views(self.method, len(self.names), survivors).items():
                # What a budget allows is found for T rounds of one cost.
                if reads_round(partial(self.aggregator.event, self), view):
                    raise SilodpError(
                        f"{self.method.name} charges rounds differently (its event depends on View.round), and budgets "
                        "of persons are kept only where all rounds cost the same: leave out method.personal.",
                        code="argument.conflict",
                        field="method.personal",
                    )
                costs.setdefault(name, []).append((view, self.aggregator.event(self, view)))
        return replace(self, method=self.method.calibrate(costs, self.population, self.noise_delta))
