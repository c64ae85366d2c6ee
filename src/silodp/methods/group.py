"""ULDP-GROUP-k: record-level DP-SGD in each silo, and group privacy for a person with at most k records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np

from silodp.accounting.events import (
    Composed,
    Event,
    Gaussian,
    Group,
    NonPrivate,
    PoissonSampled,
    SelfComposed,
    list_nested,
    scale_shift,
)
from silodp.accounting.views import Unit, View
from silodp.mechanisms.clipping import LocallyNoisedUpdate
from silodp.methods.base import LinkageCase, LocalContext, Method
from silodp.methods.dp_sgd import DpSgd, LocalSteps, RecordSampling
from silodp.methods.roles import FederationSize
from silodp.settings import Clip, Help, NoiseMultiplier, Positive, Range, Whole

_LARGEST_GROUP = 4096  # the accountant's mixture grows with its square; ε has long lost any meaning


@dataclass(frozen=True, repr=False)
class UldpGroup(Method):
    """Each silo runs `local_steps` of DP-SGD (Poisson rate γ, per-record clip C, noise σC) on its part of k records.

    All settings are the same public constants in every silo.

    Attributes:
        noise_multiplier: σ, of every step in every silo.
        clip: C, of every record's gradient.
        group_size: k, the largest number of records of a person that are used, in all silos together; each of S silos
            uses at most k/S of them, the first ones one more where k/S is not whole.
        record_sampling: γ.
        local_steps: the number of steps in a round.
        expected_batch_size: divides every gradient sum; the realized batch size is private and divides nothing.
        local_learning_rate: of the noisy mean gradient.

    Source: Kato et al., ULDP-FL, 2024, Algorithm 2, corrected as in docs/privacy.md, section 4, G.
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

    can_separate: ClassVar[bool] = True

    @property
    def assumptions(self) -> tuple[str, ...]:
        """How the k records are chosen."""
        return (
            f"group_size = {self.group_size} is a public constant, not read off the data; it is split evenly over the "
            "silos, and each silo chooses its part of a person's records by itself",
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
        shuffled = stream.permutation(len(user))
        order = shuffled[np.argsort(user[shuffled], kind="stable")]  # grouped by person, shuffled within
        grouped = user[order]
        position = np.arange(len(order)) - np.searchsorted(grouped, grouped)
        admitted = np.zeros(len(user), dtype=bool)
        admitted[order] = position < split_group(self.group_size, population.silos)[place]
        return admitted

    def local_update(self, context: LocalContext) -> LocallyNoisedUpdate:
        """Run DP-SGD; the noise is inside, and local states are not released."""
        return DpSgd.of(self).train(context, self.record_sampling)

    def bounds(self, population: FederationSize) -> None:
        """Return None: silos add the noise themselves."""

    def dp_event(self, view: View) -> Event:
        """Return the event of one round: every silo's DP-SGD on its part of the k records, with its own noise alone.

        A silo that sees the sum, or every share, has the same event. Silos that pool what they know are charged for the
        others' parts, the largest ones.
        """
        return self._event(view, ids=1)

    def _event(self, view: View, ids: int) -> SelfComposed | Composed | NonPrivate:
        """Return the event of a person whom every silo takes for so many persons."""
        if self.noise_multiplier == 0:
            return NonPrivate("noise_multiplier is 0")
        step = PoissonSampled(self.record_sampling, Gaussian(self.noise_multiplier))
        others = view.silos - (view.colluding if view.adversary == "silo" else 0)
        parts = Counter(split_group(self.group_size, view.silos)[: max(others, 0)])
        events = tuple(
            SelfComposed(Group(ids * size, step), self.local_steps * silos)
            for size, silos in parts.items()
            if size > 0
        )
        if not events:
            return NonPrivate("no silo is left that uses records of a person")
        return events[0] if len(events) == 1 else Composed(events)

    def linkage_cases(self, event: Event, view: View) -> tuple[LinkageCase, ...]:
        """Return the case of docs/privacy.md, section 10: every id brings its part of the k records.

        Ids that differ between silos change nothing. For records under another person's id no bound is known here.
        """
        is_training = any(isinstance(inner, Group) for inner in list_nested(event))
        twice = self._event(view, ids=2) if is_training else scale_shift(event, 2)
        return () if isinstance(twice, NonPrivate) else (LinkageCase("two ids in every silo", twice),)


def split_group(group_size: int, silos: int) -> tuple[int, ...]:
    """Return how many of the k records of a person each silo may use, (S,), descending; they add to k."""
    whole, more = divmod(group_size, silos)
    return tuple(whole + (place < more) for place in range(silos))
