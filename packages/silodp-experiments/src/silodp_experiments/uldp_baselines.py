"""The methods that ULDP-FL (Kato et al. 2024) is compared with: DEFAULT (no privacy), ULDP-NAIVE and ULDP-GROUP-k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from silodp._lazy import torch
from silodp.accounting import events
from silodp.accounting.views import Unit, View
from silodp.assumption import SETTING_CHOOSERS, Assumption
from silodp.mechanisms.clipping import Bounds, ClippedRowStream, LocallyNoisedUpdate, clip_rows
from silodp.methods import base
from silodp.methods.dp_sgd import DpSgd, LocalSteps, RecordSampling
from silodp.methods.roles import FederationSize
from silodp.settings import Clip, Help, NoiseMultiplier, Positive, Range, Whole
from silodp.training import sgd
from silodp.training.sgd import LocalTraining

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_GROUP = 4096  # the accountant's mixture grows with its square; ε has long lost any meaning


def train_on_all_records(context: base.LocalContext, local: LocalTraining) -> Tensor:
    """Run SGD on all records of a silo, and return the local model minus the global one, (d,)."""
    batches = context.randomness.torch("batches")
    return sgd.silo_update(context.task, context.params, context.x, context.y, local, batches)


@dataclass(frozen=True, repr=False)
class Default(base.Method):
    """FedAvg with a local and a server learning rate: each silo trains on all its records.

    Attributes:
        local: The silo's training.

    Source: McMahan et al. 2017 (FedAvg), Algorithm 1; two learning rates as in ULDP-FL (Kato et al. 2024), section 5.1,
    baseline DEFAULT.
    """

    local: LocalTraining = field(default_factory=lambda: LocalTraining(learning_rate=0.01))
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    name: str = field(default="default", init=False)
    unit: Unit | None = field(default=None, init=False)
    needs_counts: bool = field(default=False, init=False)
    assumptions: tuple[Assumption, ...] = field(default=(), init=False)

    def local_update(self, context: base.LocalContext) -> LocallyNoisedUpdate:
        """Run SGD on the silo's records; nothing is clipped, and no noise is added."""
        return LocallyNoisedUpdate(train_on_all_records(context, self.local).double().cpu())

    def bounds(self, population: FederationSize) -> None:
        """Return None: no noise is added."""

    def dp_event(self, view: View) -> events.Event:
        """Return the event that promises nothing."""
        return events.NonPrivate("the method 'default' adds no noise")


@dataclass(frozen=True, repr=False)
class UldpNaive(base.Method):
    """Each silo trains on all its records and clips its update to C.

    Emptying one person moves a silo's clipped update to another point of the same ball: by up to 2C, not C as in the
    paper's Theorem 1, and the sum over S silos by 2CS. So a silo adds N(0, (2σC√S)²), and σ is the true multiplier
    (docs/privacy.md, section 4, N).

    Attributes:
        noise_multiplier: The multiplier σ of the sum over all silos, in units of how far one person can move it.
        clip: The 2-norm C that a silo's whole update is clipped to.
        local: The silo's training.

    Source: ULDP-FL (Kato et al. 2024), Algorithm 1; it repairs Theorem 1, whose sensitivity is half of the true one.
    """

    noise_multiplier: NoiseMultiplier
    clip: Clip
    local: LocalTraining = field(default_factory=lambda: LocalTraining(learning_rate=0.01))
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    name: str = field(default="uldp-naive", init=False)
    unit: Unit | None = field(default="user", init=False)
    needs_counts: bool = field(default=False, init=False)
    assumptions: tuple[Assumption, ...] = field(default=(), init=False)

    def local_update(self, context: base.LocalContext) -> ClippedRowStream:
        """Run SGD on all records, and clip the update, which one person can move by 2C."""
        delta = train_on_all_records(context, self.local)
        # One row for the silo as a whole, which belongs to nobody: it is neither weighted nor sampled.
        row = clip_rows(torch.zeros(1, dtype=torch.int64), delta[None], self.clip)
        return ClippedRowStream([row], context.task.size, self.bounds(context.population), weighted=False)

    def bounds(self, population: FederationSize) -> Bounds:
        """Return the bounds: one person moves every silo's update by up to 2C."""
        share = self.share_multiplier(population.silos)
        # The sensitivity is twice the clip: two points of a ball of radius C are up to 2C apart.
        return Bounds(self.clip, 2 * self.clip, share, population.silos * self.clip)

    def longest_sums(
        self, population: FederationSize, record_counts: Sequence[int] | None
    ) -> tuple[float, float]:
        """Return the norms of one row, and of one in every silo."""
        return self.clip, population.silos * self.clip

    def share_multiplier(self, silos: int) -> float:
        """Return one silo's noise in units of the 2C its update can move by.

        Of the n silos in a sum each is moved, and each adds noise: the more there are, the smaller the multiplier of
        the sum. So shares are sized for all silos, however many may fail to answer.
        """
        return self.noise_multiplier * math.sqrt(silos)

    def dp_event(self, view: View) -> events.Event:
        """Return the event of one round.

        A person moves each of the n seen updates by 2C; together they carry n independent shares. The sum moves by 2Cn
        under noise 2C·share·√n; all shares at once move by 2C√n under 2C·share: the same ratio.
        """
        seen = base.count_honest_shares(view)
        if self.noise_multiplier == 0:
            return base.NO_NOISE
        if seen < 1:
            return base.ALL_NOISE_KNOWN
        return events.Gaussian(self.share_multiplier(view.silos) / math.sqrt(seen))


@dataclass(frozen=True, repr=False)
class UldpGroup(base.Method):
    """Each silo runs `local_steps` of DP-SGD (Poisson rate γ, per-record clip C, noise σC) on its part of k records.

    All settings are the same public constants in every silo.

    Attributes:
        noise_multiplier: The noise multiplier σ of every step in every silo, in units of the clip.
        clip: The 2-norm C that every record's gradient is clipped to.
        group_size: The largest number k of records of a person that are used, in all silos together; each of S silos
            uses at most k/S of them, the first ones one more where k/S is not whole.
        record_sampling: The probability γ with which a record is in the batch of a step.
        local_steps: The number of steps in a round.
        expected_batch_size: The constant that divides every gradient sum; the realized batch size is private, and
            divides nothing.
        local_learning_rate: The learning rate of the noisy mean gradient.

    Source: ULDP-FL (Kato et al. 2024), Algorithm 2; its Lemma 6 and Theorem 2 are repaired by the tight bound of
    docs/privacy.md, section 4, G, and k is split over the silos, so that nobody sees a person's counts.
    """

    noise_multiplier: NoiseMultiplier
    clip: Clip
    group_size: Annotated[
        int,
        Range(),  # a text is of a wrong type
        Whole(most=_LARGEST_GROUP, what="records (with more, clip per person: uldp-avg)"),
        Help("k: most records of a person that are used, for uldp-group."),
    ]
    record_sampling: RecordSampling
    local_steps: LocalSteps
    expected_batch_size: Positive
    local_learning_rate: Positive
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    name: str = field(default="uldp-group", init=False)
    unit: Unit | None = field(default="user", init=False)
    clips_records: bool = field(default=True, init=False, repr=False)

    can_isolate_units: ClassVar[bool] = True

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumption about how the k records are chosen."""
        return (
            Assumption(
                "group-size-public",
                f"group_size = {self.group_size} is a public constant, not read off the data; it is split evenly over "
                "the silos, and each silo chooses its part of a person's records by itself",
                SETTING_CHOOSERS,
            ),
        )

    def select_records(
        self,
        user: np.ndarray,
        place: int,
        population: FederationSize,
        stream: np.random.Generator,
        budget: np.ndarray | None = None,
    ) -> np.ndarray:
        """Draw at most the silo's part of k (`split_group`) of each person's records, uniformly."""
        # Drawn once for the run: other records in every round would let a person contribute more than k in all.
        shuffled = stream.permutation(len(user))
        order = shuffled[np.argsort(user[shuffled], kind="stable")]  # grouped by person, shuffled within
        grouped = user[order]
        # The place of a record among those of its person: 0, 1, 2, … in the shuffled order.
        position = np.arange(len(order)) - np.searchsorted(grouped, grouped)
        admitted = np.zeros(len(user), dtype=bool)
        admitted[order] = position < split_group(self.group_size, population.silos)[place]
        return admitted

    def local_update(self, context: base.LocalContext) -> LocallyNoisedUpdate:
        """Run DP-SGD; the noise is inside, and local states are not released."""
        return DpSgd.of(self).train(context, self.record_sampling)

    def bounds(self, population: FederationSize) -> None:
        """Return None: silos add the noise themselves."""

    def dp_event(self, view: View) -> events.Event:
        """Return the event of one round: every silo's DP-SGD on its part of the k records, with its own noise alone.

        A silo that sees the sum, or every share, has the same event. Silos that pool what they know are charged for the
        others' parts, the largest ones.
        """
        return self._event(view, ids=1)

    def _event(self, view: View, ids: int) -> events.SelfComposed | events.Composed | events.NonPrivate:
        """Return the event of a person who has `ids` ids in every silo, each with a part of the k records."""
        if self.noise_multiplier == 0:
            return base.NO_NOISE
        step = events.PoissonSampled(self.record_sampling, events.Gaussian(self.noise_multiplier))
        others = view.silos - (view.colluding if view.adversary == "silo" else 0)
        # A colluding silo knows its own records; silos with parts of one size have one event, and their steps add up.
        parts = Counter(split_group(self.group_size, view.silos)[: max(others, 0)])
        costs = tuple(
            events.SelfComposed(events.Group(ids * size, step), self.local_steps * silos)
            for size, silos in parts.items()
            if size > 0
        )
        if not costs:
            return events.NonPrivate("no silo is left that uses records of a person")
        return costs[0] if len(costs) == 1 else events.Composed(costs)

    def linkage_cases(self, event: events.Event, view: View) -> tuple[base.LinkageCase, ...]:
        """Return the case of docs/privacy.md, section 10: every id brings its part of the k records.

        Ids that differ between silos change nothing. For records under another person's id no bound is known here.
        """
        # An evaluation by sums has no groups: there, each id adds one more clipped row.
        is_training = any(isinstance(inner, events.Group) for inner in events.list_nested(event))
        twice = self._event(view, ids=2) if is_training else events.scale_shift(event, 2)
        return (
            ()
            if isinstance(twice, events.NonPrivate)
            else (base.LinkageCase("two ids in every silo", twice),)
        )


def split_group(group_size: int, silos: int) -> tuple[int, ...]:
    """Return how many of the k records of a person each silo may use, (S,), descending; they add to k."""
    whole, more = divmod(group_size, silos)
    return tuple(whole + (place < more) for place in range(silos))
