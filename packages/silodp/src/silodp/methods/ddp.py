"""DDP: record-level DP with several local steps, the noise of all clients adding up (docs/decoupled.md).

Every client runs J steps of DP-SGD and sends Σ_j g_j, the sum of its clipped gradients, with its share of noise; where
only the sum over clients is seen, a record is hidden by the noise of all of them. That the local model moves meanwhile
is what has to be paid for: `trajectory` says with which noise it moves.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from silodp._lazy import torch
from silodp.accounting import events
from silodp.accounting.views import Unit, View
from silodp.assumption import OFFICERS, SETTING_CHOOSERS, SILO_OPERATORS, Assumption
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.mechanisms import clipping
from silodp.mechanisms.noise import draw_gaussian
from silodp.methods.base import ALL_NOISE_KNOWN, NO_NOISE, LocalContext, Method, conflict_error
from silodp.methods.dp_sgd import RECORD_IN_ONE_SILO, LocalSteps, RecordSampling, check_batch, draw_batch
from silodp.methods.roles import FederationSize
from silodp.settings import Clip, Help, Momentum, NoiseMultiplier, Positive, Whole
from silodp.text import join_names, pluralize

if TYPE_CHECKING:
    from torch import Tensor

Trajectory = Literal["decoupled", "local", "paper"]
CLAIM = "claimed by Theorem 4.6, not proven; a counterexample is in the tests"
COUNTS_PUBLIC = Assumption(
    "counts-public",
    "how many records each silo has is public, and says nothing of what is in a record",
    OFFICERS,
)
LOCAL_MODELS_UNSEEN = Assumption(
    "local-models-unseen",
    "no silo shows its local model, nor the noise that moves it, to anyone",
    SILO_OPERATORS,
)


@dataclass(frozen=True)
class Client:
    """The settings of one client, which may differ between clients.

    Attributes:
        noise_multiplier: The noise multiplier σ_i of one step, in units of the clip.
        clip: The 2-norm C_i that every record's gradient is clipped to.
        steps: The number J_i of local steps in a round.
        learning_rate: The learning rate γ_i of the local model.
        rate: The learning rate in units of the largest one, γ_i/γ_ref.

    Source: DDP (Heikkilä), section A.3.
    """

    noise_multiplier: float
    clip: float
    steps: int
    learning_rate: float
    rate: float

    @property
    def reach(self) -> float:
        """The distance c_i = C_i·γ_i/γ_ref by which one record can move what is sent, in one step."""
        return self.clip * self.rate

    @property
    def variance(self) -> float:
        """The variance J_i(σ_i c_i)² of all the noise in what this client sends."""
        return self.steps * (self.noise_multiplier * self.reach) ** 2


PER_CLIENT = ("noise_multiplier", "clip", "local_steps", "local_learning_rate")
"""The settings, in the order of `Client`'s."""


def read_per_client(method: object) -> dict[str, tuple[Any, ...]]:
    """Return the settings that are given one by one, as tuples.

    Raises:
        SilodpError: there are different numbers of them.
    """
    given = {name: getattr(method, name) for name in PER_CLIENT}
    found = {
        name: tuple(np.asarray(value).tolist())
        for name, value in given.items()
        if isinstance(value, tuple | list | np.ndarray)  # a list, as a config has it
    }
    if len({len(values) for values in found.values()}) > 1 or () in found.values():
        counts = join_names(f"{name} has {len(values)}" for name, values in found.items())
        raise SilodpError(
            f"{counts} values: give one for each client, or one number for all.", code="argument.shape"
        )
    return found


def expand_per_client(settings: Mapping[str, Any], silos: int) -> tuple[Client, ...]:
    """Return all clients' settings, in the public order.

    Raises:
        SilodpError: there are more or fewer values than clients.
    """
    columns = []
    for name in PER_CLIENT:
        value = settings[name]
        if isinstance(value, tuple) and len(value) != silos:
            raise SilodpError(
                f"{name} has {pluralize(len(value), 'value')} for {pluralize(silos, 'client')}: give one for each, "
                "or one number for all.",
                code="argument.shape",
                field=name,
            )
        columns.append((value,) * silos if isinstance(value, Real) else value)
    # The reference γ_ref: with it no client's rows are scaled up, so all stay within their clip.
    largest = max(columns[-1])
    return tuple(
        Client(sigma, clip, steps, rate, rate / largest)
        for sigma, clip, steps, rate in zip(*columns, strict=True)
    )


@dataclass(frozen=True, repr=False)
class Ddp(Method):
    """J local steps of DP-SGD per round in each of N clients: Δ = −Σ_j g_j, and noise of variance J(σC)² from each.

    With server_learning_rate 1 the round is FedAvg of the local models. noise_multiplier, clip, local_steps and
    local_learning_rate may be tuples, one value for each client in the public order.

    Attributes:
        noise_multiplier: The noise multiplier σ_i of one client and one step, in units of the clip; the sum over
            clients has σ_total = σ_i·√N for each step.
        clip: The 2-norm C that every record's gradient is clipped to.
        local_steps: The number J of local steps in a round.
        record_sampling: The probability with which a record is in the batch of a step.
        expected_batch_size: The public constant K that divides every sum; the realized batch size divides nothing.
        local_learning_rate: The learning rate of the local model.
        local_momentum: The momentum of the local model.
        trajectory: With which noise the local model moves: "decoupled", with noise of its own, N(0, (σ_a C)²), which is
            never sent; "local", with the very noise that is sent, charged soundly; "paper", with that noise, and beside
            the sound charge what the paper claims. With one step all three are the same.
        trajectory_ratio: The ratio σ_a/σ_total for "decoupled".
        most_batch: The records that a batch is assumed to have at most, where the ring of secure aggregation is sized;
            None stands for 16·K.

    Source: DDP (Heikkilä 2025), Algorithms 1 and 2 and section A.3; Theorem 4.6 is not used, see docs/privacy.md,
    section 9.
    """

    noise_multiplier: NoiseMultiplier | tuple[NoiseMultiplier, ...]
    clip: Clip | tuple[Clip, ...]
    local_steps: LocalSteps | tuple[LocalSteps, ...]
    record_sampling: RecordSampling
    expected_batch_size: Positive
    local_learning_rate: Positive | tuple[Positive, ...]
    local_momentum: Momentum = 0.0
    trajectory: Annotated[Trajectory, Help("Noise of the local models, for ddp.")] = "decoupled"
    trajectory_ratio: Annotated[
        Positive, Help("R, for decoupled: noise of the local models divided by that of the sum.")
    ] = 2.0
    most_batch: Annotated[int, Whole(limit=10**15)] | None = None  # the ring refuses it long before
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    name: str = field(default="ddp", init=False)
    unit: Unit | None = field(default="record", init=False)
    needs_counts: bool = field(default=False, init=False)
    clips_records: bool = field(default=True, init=False, repr=False)

    can_isolate_units: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, value in read_per_client(self).items():
            object.__setattr__(self, name, value)
        super().__post_init__()
        steps = self.local_steps
        if self.trajectory != "decoupled" and isinstance(steps, tuple) and len(set(steps)) > 1:
            raise conflict_error(
                f"local_steps = {steps} with trajectory = '{self.trajectory}': different numbers of steps are proven "
                "only for one step or decoupled; set trajectory = 'decoupled'.",
                "trajectory",
            )

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions of the guarantee beyond those of every method."""
        found = [
            Assumption(
                "batch-public",
                f"expected_batch_size = {self.expected_batch_size:g} and all settings of single clients are public "
                "constants, not read off the data",
                SETTING_CHOOSERS,
            ),
            COUNTS_PUBLIC,
            RECORD_IN_ONE_SILO,
        ]
        if self.trajectory == "decoupled" and self._most_steps > 1:
            found.append(LOCAL_MODELS_UNSEEN)
        return tuple(found)

    def check(self, data: PublicData, rounds: int, delta: float) -> None:
        """Check that every client has at least a batch, and its own settings if any has."""
        check_batch(data, self.expected_batch_size)
        self.clients_of(len(data.silos))

    def local_update(self, context: LocalContext) -> clipping.ClippedRowStream | clipping.MultiStepUpdate:
        """Return −γ_i/γ_ref·Σ_j g_j of this client, as rows that are computed when they are consumed."""
        clients = self.clients_of(context.population.silos)
        own, bounds = clients[context.silo], self.bounds(context.population)
        share = math.sqrt(own.variance) / bounds.clip
        # `bounds` has the largest share of a client; this one adds its own, in units of the common clip C*.
        whole = replace(bounds, noise_multiplier=share)
        if self.trajectory == "decoupled":
            std = self.trajectory_noise(own, clients) * own.clip
            rows = self._stream_decoupled_rows(context, own, std)
            return clipping.ClippedRowStream(rows, context.task.size, whole, weighted=False)
        # J independent shares of variance v/J add up to the variance v of the round.
        one = replace(bounds, noise_multiplier=share / math.sqrt(own.steps))
        return clipping.MultiStepUpdate(
            self._stream_coupled_steps(context, own, one), context.task.size, whole
        )

    def _stream_decoupled_rows(
        self, context: LocalContext, own: Client, std: float
    ) -> Iterator[clipping.ClippedRows]:
        """Yield the rows of all steps; the local model is a function of g_j + ζ_j, its start and public constants."""
        local = _LocalSgd(self, context, own)
        noise = context.randomness.stream("trajectory")
        for step in range(own.steps):
            total = torch.zeros(context.task.size, dtype=torch.float64)
            for rows in local.clip_batch():
                clipping.sum_rows(rows, rows.factors, total)
                yield local.scale_rows(rows)
            if step + 1 < own.steps:  # where the last step leads, no gradient is taken
                local.move(total + draw_gaussian(context.task.size, std, noise))

    def _stream_coupled_steps(
        self, context: LocalContext, own: Client, bounds: clipping.Bounds
    ) -> Generator[clipping.ClippedRowStream, Tensor, None]:
        """Yield the stream of each step; the local model moves with the noisy sum that is released of it."""
        local = _LocalSgd(self, context, own)
        for _ in range(own.steps):
            rows = (local.scale_rows(rows) for rows in local.clip_batch())
            released = yield clipping.ClippedRowStream(rows, context.task.size, bounds, weighted=False)
            # Rows are sent in units of γ_ref, and the local model moves by γ_i: undo the scaling of `scale_rows`.
            local.move(released / own.rate)

    def bounds(self, population: FederationSize) -> clipping.Bounds:
        """Return bounds with C* = max_i c_i and the largest noise share of a client, all steps together."""
        clients = self.clients_of(population.silos)
        reach = max(client.reach for client in clients)
        share = math.sqrt(max(client.variance for client in clients)) / reach
        batch = self.most_batch or math.ceil(16 * self.expected_batch_size)
        # The largest sum sizes the ring of secure aggregation: all clients' batches full, all gradients of norm C_i.
        total = batch * sum(client.steps * client.reach for client in clients)
        return clipping.Bounds(reach, reach, share, total, min(client.reach for client in clients) / reach)

    def longest_sums(
        self, population: FederationSize, record_counts: Sequence[int] | None
    ) -> tuple[float, float]:
        """Return the norms of every record in the batch of every step; `most_batch` is an assumption, and no bound."""
        if record_counts is None:
            return math.inf, math.inf
        clients = self.clients_of(population.silos)
        most = [n * client.steps * client.reach for n, client in zip(record_counts, clients, strict=True)]
        return max(most), sum(most)

    def server_scale(self, population: FederationSize) -> float:
        """Return γ_ref/(K·N), with the largest of the clients' learning rates."""
        rate = max(client.learning_rate for client in self.clients_of(population.silos))
        return rate / (self.expected_batch_size * population.silos)

    def dp_event(self, view: View) -> events.Event:
        """Return the event of one round (docs/decoupled.md): the same for all clients, or one for each.

        Step j of client i is released, at the least, with the part 1/J_i of all the noise in the sum.
        """
        clients = self.clients_of(view.silos)
        # Clients with equal settings cost their records the same, so one event stands for all.
        kinds = clients[:1] if len(set(clients)) == 1 else clients
        costs = tuple(self._event(number, clients, view) for number in range(len(kinds)))
        nothing = next((event for event in costs if isinstance(event, events.NonPrivate)), None)
        return nothing or (costs[0] if len(costs) == 1 else events.WorstOf(costs))

    def _event(self, number: int, clients: tuple[Client, ...], view: View) -> events.Event:
        own = clients[number]
        if view.sees_shares:
            variance = own.variance
        else:
            # Gaussian shares of independent clients add their variances (DDP, Example 4.3).
            # Who else is in the sum is not known beforehand: those who add the least.
            if view.unknown_shares < 1:
                return ALL_NOISE_KNOWN
            others = sorted(client.variance for at, client in enumerate(clients) if at != number)
            variance = own.variance + sum(others[: view.unknown_shares - 1])
        # In units of how far one record moves what is released, which is 1 for the events below.
        released = math.sqrt(variance / own.steps) / own.reach
        looks = self._find_trajectory_event(own, clients, released)
        if released == 0 or looks == events.Gaussian(0.0):
            return NO_NOISE
        last = self._sample_event(events.Gaussian(released))
        return (
            events.Composed((events.SelfComposed(self._sample_event(looks), own.steps - 1), last))
            if looks
            else last
        )

    def _find_trajectory_event(
        self, own: Client, clients: tuple[Client, ...], released: float
    ) -> events.Gaussian | events.CorrelatedReleases | None:
        """Return what each step but the last costs an adversary who is given all that moves the local model."""
        if own.steps == 1:
            return None
        if self.trajectory == "decoupled":
            return events.CorrelatedReleases(
                events.Gaussian(self.trajectory_noise(own, clients)), events.Gaussian(released)
            )
        return events.Gaussian(own.noise_multiplier)

    def _sample_event(
        self, event: events.Gaussian | events.CorrelatedReleases
    ) -> events.Gaussian | events.CorrelatedReleases | events.PoissonSampled:
        return event if self.record_sampling == 1 else events.PoissonSampled(self.record_sampling, event)

    def trajectory_noise(self, own: Client, clients: tuple[Client, ...]) -> float:
        """Return σ_a = R·σ_total in units of the client's clip, by all silos' noise, whoever drops out."""
        total = math.sqrt(sum(client.variance for client in clients) / own.steps) / own.reach
        return self.trajectory_ratio * total

    @property
    def paper_claim(self) -> Ddp | None:
        """The method with the event of Theorem 4.6, where `trajectory` is "paper" and there are several steps."""
        if self.trajectory != "paper" or self._most_steps == 1:
            return None
        return _Claimed(**{f.name: getattr(self, f.name) for f in fields(self) if f.init})

    def clients_of(self, silos: int) -> tuple[Client, ...]:
        """Return all clients' settings, in the public order."""
        return expand_per_client({name: getattr(self, name) for name in PER_CLIENT}, silos)

    @property
    def _most_steps(self) -> int:
        return max(self.local_steps) if isinstance(self.local_steps, tuple) else self.local_steps


@dataclass(frozen=True, repr=False)
class _Claimed(Ddp):
    """The same run, charged J steps at σ_total."""

    def _find_trajectory_event(
        self, own: Client, clients: tuple[Client, ...], released: float
    ) -> events.Gaussian | events.CorrelatedReleases | None:
        return events.Gaussian(released) if own.steps > 1 else None

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The last of them says what is wrong."""
        return (*super().assumptions, Assumption.from_text(CLAIM))

    @property
    def paper_claim(self) -> None:
        """None: this class is the claim itself."""
        return None


class _LocalSgd:
    """SGD with momentum on a client's local model y, with random streams of its own for batches and dropout."""

    def __init__(self, method: Ddp, context: LocalContext, own: Client) -> None:
        self._method, self._own, self._records = method, own, len(context.user)
        # In double precision: it follows sums in double precision, and J small steps in float32 would lose digits.
        self._model = context.params.detach().double().cpu()
        self._velocity = torch.zeros_like(self._model)
        self._batches = context.randomness.stream("batches")
        self._gradients = context.make_record_gradients(own.steps)

    def clip_batch(self) -> Iterator[clipping.ClippedRows]:
        """Yield −clip_C of the gradients of a fresh batch's records, at y."""
        batch = draw_batch(self._records, self._method.record_sampling, self._batches)
        for records, gradients in self._gradients.of(self._model, batch):
            # Negative, because what is sent is added to the model.
            yield clipping.clip_rows(records, -gradients, self._own.clip)

    def scale_rows(self, rows: clipping.ClippedRows) -> clipping.ClippedRows:
        """Return the same rows in units of the largest learning rate."""
        return replace(rows, factors=rows.factors * self._own.rate, clip=self._own.reach)

    def move(self, direction: Tensor) -> None:
        """Take the step y ← y + γ/K·v with v ← momentum·v + direction (d,), which is −(g + noise)."""
        self._velocity = self._method.local_momentum * self._velocity + direction
        self._model += self._own.learning_rate / self._method.expected_batch_size * self._velocity
