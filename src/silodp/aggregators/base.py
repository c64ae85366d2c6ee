"""How silos' shares become their sum, and therefore who sees what.

An aggregator is public constants with two sides: one for the server, one for each silo. Methods do not know which one
is used; both sides know the same `Setting`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from silodp.accounting.events import Event, costliest_event, without_amplification
from silodp.accounting.guarantee import Adversary, View
from silodp.crypto.keys import Identity
from silodp.mechanisms.clipping import Bounds, LocallyNoisedUpdate, Share, Update, release
from silodp.methods.base import Method, MethodState, Population
from silodp.wire.messages import Message
from silodp.wire.schemas import Array, Kind, Schema, Script
from silodp.wire.store import Store
from silodp.wire.transport import Failure


@dataclass(frozen=True)
class Setting:
    """What everyone in a run knows.

    Attributes:
        run: its id. names: the silos, in order. method, population: as given. size: d, the model's parameters.
        index: digest of the users' index. delta: δ. dtype: numpy's name of the type of parameters.
        rounds: T; a silo answers no more. A run may be resumed with another T, so it is no part of `constants`.
    """

    run: str
    names: tuple[str, ...]
    method: Method
    population: Population
    size: int
    index: str = ""
    delta: float = 1e-5
    dtype: str = "float32"
    rounds: int = 10**6

    @property
    def sum_size(self) -> int:
        """Numbers in what silos add up: d, and the method's extra coordinates."""
        return self.size + self.method.extra_coordinates

    @property
    def bounds(self) -> Bounds | None:
        """What holds for the sums; None where silos finish their updates themselves."""
        return self.method.bounds(self.population)

    def constants(self, aggregator: Aggregator) -> str:
        """All of it as one string, to be compared."""
        public = [
            list(self.names),
            self.population.users,
            repr(self.method),
            self.size,
            self.index,
            self.delta,
            self.dtype,
        ]
        return json.dumps([*public, repr(aggregator)])


T = TypeVar("T")

LocalUpdateFn = Callable[[int], tuple[Update, Tensor, np.random.Generator]]
"""Release number of a round -> the silo's update, its weights (U,) float64, and the stream of its share of noise."""

Handler = Callable[[Message], Message]


class ServerContext(Protocol):
    """What the server lends an aggregator."""

    @property
    def store(self) -> Store:
        """The server's durable memory."""

    def ask(self, requests: dict[str, Message]) -> tuple[dict[str, Message], dict[str, Failure]]:
        """One blocking call; failures are data."""

    def ask_all(self, requests: dict[str, Message]) -> dict[str, Message]:
        """The same where everyone must answer."""

    def charged(self, round_: int, release: int) -> bool:
        """Whether a release was charged before."""

    def affords(self, round_: int, release: int, survivors: int) -> bool:
        """Whether a release may still be charged, or was."""

    def charge(self, round_: int, release: int, survivors: int) -> bool:
        """Charge a release durably, before anything of it can be seen; False if the budget forbids it."""


class ServerAggregator(Protocol):
    """The server's part in adding up."""

    def set_up(self, desk: ServerContext) -> None:
        """Once per run, before the first round."""

    def total(self, desk: ServerContext, round_: int, arrays: Mapping[str, np.ndarray]) -> Tensor | None:
        """Σ_s share_s (d,) float64 of one round, charged; None: the budget forbids it."""


class SiloAggregator(Protocol):
    """A silo's part."""

    handlers: Mapping[str, Handler]
    """Its own kinds of request."""

    def update(self, request: Message, work: LocalUpdateFn) -> tuple[Message, int]:
        """The answer to a round's request, and how many rows were not finite (for the silo alone)."""


@dataclass(frozen=True)
class SiloContext:
    """What only one silo knows; counts and keys do not show when it is printed.

    Attributes:
        identity: its long-term key. pins: the silos' pinned public keys. store: its own. counts: n[s,u] (U,) int64.
        masked: gives the digest of the update that it masked last.
    """

    identity: Identity
    pins: Mapping[str, bytes]
    store: Store = field(repr=False)
    counts: np.ndarray = field(repr=False)
    masked: Callable[[], str] = field(repr=False)


class Aggregator(Protocol):
    """Public constants of how shares are added up."""

    @property
    def name(self) -> str:
        """Its name in a config."""

    @property
    def exact(self) -> bool:
        """Whether integers are added, with integer noise, under encryption or masks."""

    @property
    def weights_privately(self) -> bool:
        """Whether silos weight by counts that nobody else gets to know."""

    @property
    def samples_users_privately(self) -> bool:
        """Whether the parties draw each round's user sample between them, so that nobody knows it."""

    @property
    def max_rounds(self) -> int | None:
        """What a run may not exceed, repeated attempts included; None: no limit."""

    @property
    def delta_share(self) -> float:
        """The part of δ that noise is accounted at; the rest pays for what encryption discloses."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What hiding the parts of the sum rests on."""

    def check(self, setting: Setting) -> None:
        """Refuse, before anything runs, what cannot be added up this way."""

    def shares_for(self, silos: int) -> int:
        """m: the fewest silos whose shares are added up, which noise is sized for."""

    def views(self, method: Method, silos: int, survivors: int | None = None) -> dict[Adversary, View]:
        """What each adversary sees of a round that so many silos answer (None: all)."""

    def event(self, setting: Setting, view: View) -> Event:
        """What a round costs against a view, with the noise that is really drawn."""

    def describe(self, setting: Setting) -> dict[str, Any]:
        """What it will cost and is allowed, for people, known before anything runs."""

    def script(self, setting: Setting, name: str) -> Script:
        """The messages that the silo of this name answers."""

    def server(self, setting: Setting) -> ServerAggregator:
        """The server's side of a run."""

    def silo(self, setting: Setting, own: SiloContext) -> SiloAggregator:
        """A silo's side of a run."""


def round_events(
    aggregator: Aggregator, setting: Setting, survivors: int | None = None, round_: int = 0
) -> dict[Adversary, Event]:
    """What one round (counted from 0) costs against each adversary, if so many silos answer."""
    views = aggregator.views(setting.method, setting.population.silos, survivors)
    seen = {name: replace(view, round=round_) for name, view in views.items()}
    largest = setting.method.event_for_largest_budget
    return {name: largest(aggregator.event(setting, view), view) for name, view in seen.items()}


def release_events(
    aggregator: Aggregator, setting: Setting, survivors: int | None, round_: int, release: int
) -> dict[Adversary, Event]:
    """What one release of a round (both counted from 0) costs against each adversary, if so many silos answer.

    Persons are drawn once in a round, so a further release of it is of the same sample: it is charged without
    amplification. Records are drawn anew, inside a silo, for every release.
    """
    cost = round_events(aggregator, setting, survivors, round_)
    if release == 0 or setting.method.clips_records:
        return cost
    return {adversary: without_amplification(event) for adversary, event in cost.items()}


def costliest_events(
    aggregator: Aggregator, setting: Setting, round_: int = 0, release: int = 0
) -> dict[Adversary, Event]:
    """Return what one release costs at most, whichever of the silos answer it.

    Where the silos that answer are chosen by looking at the earlier models, rounds cost this, and not what the
    numbers that happened to answer would cost (docs/privacy.md, section 3).

    Args:
        round_: counted from 0.
        release: counted from 0 within the round.
    """
    population = setting.population
    found = [
        release_events(aggregator, setting, survivors, round_, release)
        for survivors in range(population.m, population.silos + 1)
    ]
    return {name: costliest_event([cost[name] for cost in found]) for name in found[0]}


def setup_kinds(setting: Setting, weights_privately: bool = False) -> tuple[Kind, ...]:
    """The messages of the set-up that do not depend on how shares are added up: counts, if needed, and allotments."""
    persons = (setting.population.users,)
    dtype = None if weights_privately else setting.method.allotment_dtype
    allotment = {} if dtype is None else {"allotment": Array(dtype, persons, finite=True)}
    setup = Kind("setup", Schema(arrays=allotment))
    if weights_privately or not setting.method.needs_counts:
        return (setup,)
    return Kind("counts", answer=Schema(arrays={"counts": Array("int64", persons)})), setup


def round_arrays(setting: Setting, shows_sample: bool = True) -> dict[str, Array]:
    """The arrays of an update: the model, who and which silos take part where the method draws them, and its state."""
    arrays = {"params": Array(setting.dtype, (setting.size,), finite=True)}
    if shows_sample and setting.method.samples_users:
        arrays["sample"] = Array("bool", (setting.population.users,))
    if setting.method.samples_silos:
        arrays["clients"] = Array("bool", (setting.population.silos,))
    initial = setting.method.initial_state(setting.population)
    state = {name: Array(str(value.dtype), value.shape, finite=True) for name, value in initial.items()}
    return {**arrays, **_of_state(state)}


_STATE = "state."


def _of_state(values: Mapping[str, T]) -> dict[str, T]:
    return {_STATE + name: value for name, value in values.items()}


def request_state(state: MethodState) -> dict[str, np.ndarray]:
    """Return the method's state as entries of an update's request."""
    return _of_state(state)


def state_of(request: Message) -> dict[str, np.ndarray]:
    """Return the method's state that an update's request carries."""
    return {name[len(_STATE) :]: value for name, value in request.arrays.items() if name.startswith(_STATE)}


def calibrate_setting(aggregator: Aggregator, setting: Setting) -> Setting:
    """The same setting, its method knowing what persons' own budgets allow; every party makes the same.

    Raises:
        SilodpError: budgets cannot be met against the adversary they are for.
    """
    if setting.method.max_rounds is None:
        return setting
    costs: dict[Adversary, list[tuple[View, Event]]] = {}
    for survivors in range(setting.population.m, setting.population.silos + 1):
        views = aggregator.views(setting.method, setting.population.silos, survivors)
        for name, view in views.items():
            costs.setdefault(name, []).append((view, aggregator.event(setting, view)))
    delta = setting.delta * aggregator.delta_share
    return replace(setting, method=setting.method.calibrate(costs, setting.population, delta))


@dataclass(frozen=True)
class Plain:
    """The server adds what it receives: it sees every silo's noisy share, and drew the user sample itself.

    Allotments travel in clear. A silo sees which persons have weight 0 this round, and with weights by records it can
    work out each person's total from its own count.
    """

    name: str = field(default="plain", init=False)
    exact: bool = field(default=False, init=False)
    weights_privately: bool = field(default=False, init=False)
    samples_users_privately: bool = field(default=False, init=False, repr=False)
    max_rounds: None = field(default=None, init=False, repr=False)
    delta_share: float = field(default=1.0, init=False, repr=False)
    assumptions: tuple[str, ...] = field(default=(), init=False, repr=False)

    def check(self, setting: Setting) -> None:
        """Everything can be added in clear."""

    def shares_for(self, silos: int) -> int:
        """All of them."""
        return silos

    def views(self, method: Method, silos: int, survivors: int | None = None) -> dict[Adversary, View]:
        """The server sees every share: the second column of docs/privacy.md, section 3."""
        return {
            "released": View("released", silos),
            "server": View(
                "server", silos, sees_shares=True, knows_sample=True, counts_disclosed=method.needs_counts
            ),
            "silo": View("silo", silos, knows_sample=True, counts_disclosed=method.needs_counts),
        }

    def event(self, setting: Setting, view: View) -> Event:
        """The method's own: noise is Gaussian."""
        return setting.method.dp_event(view)

    def describe(self, setting: Setting) -> dict[str, Any]:
        """What travels."""
        return {"bytes up, per silo and round": 8 * setting.sum_size, "exactness": "floating point"}

    def script(self, setting: Setting, name: str) -> Script:
        """Set-up and updates in clear."""
        share = Schema(arrays={"share": Array("float64", (setting.sum_size,))})
        return Script(setup_kinds(setting), Kind("update", Schema(arrays=round_arrays(setting)), share))

    def server(self, setting: Setting) -> ServerAggregator:
        """Asks, and adds."""
        return _PlainServer(setting)

    def silo(self, setting: Setting, own: SiloContext) -> SiloAggregator:
        """Weights, sums, adds noise, sends."""
        return _PlainSilo()


@dataclass(frozen=True)
class _PlainServer:
    setting: Setting

    def set_up(self, desk: ServerContext) -> None:
        """Nothing to set up."""

    def total(self, desk: ServerContext, round_: int, arrays: Mapping[str, np.ndarray]) -> Tensor | None:
        """Charged before it is asked for."""
        if not desk.charge(round_, 0, self.setting.population.silos):
            return None
        request = Message("update", self.setting.run, round_, arrays=dict(arrays))
        answers = desk.ask_all({name: request for name in self.setting.names})
        shares = [torch.from_numpy(answers[name].arrays["share"]) for name in sorted(answers)]
        return torch.stack(shares).sum(dim=0)  # in the order of the names: float addition depends on it


class _PlainSilo:
    handlers: Mapping[str, Handler] = {}

    def update(self, request: Message, work: LocalUpdateFn) -> tuple[Message, int]:
        """The share as it is."""
        share = share_in_clear(*work(0))
        return request.answer(share=share.value.numpy()), share.refused


def share_in_clear(update: Update, weights: Tensor, noise: np.random.Generator) -> Share:
    """Σ weight·clipped row + Gaussian noise, in floating point."""
    if isinstance(update, LocallyNoisedUpdate):
        return Share(update.value, 0.0, update.refused)
    return release(update, weights, noise)
