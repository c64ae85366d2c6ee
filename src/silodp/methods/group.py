"""ULDP-GROUP-k: record-level DP-SGD in each silo, and group privacy for a person with at most k records."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import ClassVar

import numpy as np

from silodp.accounting.events import Event, Gaussian, Group, NonPrivate, PoissonSampled, SelfComposed
from silodp.accounting.guarantee import Unit, View
from silodp.errors import SilodpError, check_probability, check_real
from silodp.mechanisms.clipping import LocallyNoisedUpdate
from silodp.methods.base import LocalContext, Method, Population
from silodp.methods.dp_sgd import DpSgd

_LARGEST_GROUP = 4096  # the accountant's mixture grows with its square; ε has long lost any meaning


@dataclass(frozen=True, repr=False)
class UldpGroup(Method):
    """Each silo runs `local_steps` of DP-SGD (Poisson rate γ, per-record clip C, noise σC) on ≤ k records per person.

    All settings are the same public constants in every silo.

    Attributes:
        noise_multiplier: σ, of every step in every silo.
        clip: C, of every record's gradient.
        group_size: k, the largest number of records of a person that are used, in all silos together.
        record_sampling: γ.
        local_steps: the number of steps in a round.
        expected_batch_size: divides every gradient sum; the realized batch size is private and divides nothing.
        local_learning_rate: of the noisy mean gradient.

    Source: Kato et al., ULDP-FL, 2024, Algorithm 2, corrected as in docs/privacy.md, section 4, G.
    """

    noise_multiplier: float
    clip: float
    group_size: int
    record_sampling: float
    local_steps: int
    expected_batch_size: float
    local_learning_rate: float
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    name: str = field(default="uldp-group", init=False)
    unit: Unit | None = field(default="user", init=False)
    needs_counts: bool = field(default=True, init=False)
    clips_records: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        self._dp_sgd  # noqa: B018  its constants are checked as it is made
        check_probability("record_sampling", self.record_sampling)
        super().__post_init__()
        check_real("group_size", self.group_size)
        if not (isinstance(self.group_size, Integral) and 1 <= self.group_size <= _LARGEST_GROUP):
            raise SilodpError(
                f"group_size = {self.group_size}: set a whole number of records from 1 to {_LARGEST_GROUP} "
                "(with more, clip per person: uldp-avg).",
                code="argument.value",
                field="group_size",
            )

    @property
    def _dp_sgd(self) -> DpSgd:
        return DpSgd.of(self)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the selection of k records shows to whom."""
        return (
            f"group_size = {self.group_size} is a public constant, not read off the data",
            "whoever coordinates the selection of at most group_size records per person (here the server) sees how "
            "many records each person has in each silo, and a silo sees how many of a person's records it may use; "
            "ε does not cover that",
        )

    limits_records: ClassVar[bool] = True

    def record_quotas(
        self, counts: np.ndarray | None, population: Population, stream: np.random.Generator
    ) -> np.ndarray:
        """Draw which k of each person's N[u] records are used, uniformly: (S, U) how many of them in each silo."""
        if counts is None:
            raise SilodpError(
                "uldp-group needs the record counts of every silo to admit at most group_size records.",
                code="method.not_set_up",
            )
        quota = counts.copy()
        for user in np.flatnonzero(counts.sum(axis=0) > self.group_size):
            quota[:, user] = stream.multivariate_hypergeometric(counts[:, user], self.group_size)
        return quota

    def quotas_problem(
        self, quotas: np.ndarray, counts: np.ndarray, population: Population, silo: int
    ) -> str | None:
        """Check that quotas are at most k, and at most the records that are here."""
        within = (quotas >= 0) & (quotas <= np.minimum(counts, self.group_size))
        return None if within.all() else f"is not 0 to {self.group_size} of each person's records here"

    def select_records(
        self,
        user: np.ndarray,
        quotas: np.ndarray | None,
        stream: np.random.Generator,
        budget: np.ndarray | None = None,
    ) -> np.ndarray:
        """Draw `quotas[u]` of each person's records, uniformly."""
        if quotas is None:
            raise SilodpError(
                "uldp-group cannot admit records without allotments: run the set-up first.",
                code="method.not_set_up",
            )
        shuffled = stream.permutation(len(user))
        order = shuffled[np.argsort(user[shuffled], kind="stable")]  # grouped by person, shuffled within
        grouped = user[order]
        position = np.arange(len(order)) - np.searchsorted(grouped, grouped)
        admitted = np.zeros(len(user), dtype=bool)
        admitted[order] = position < quotas[grouped]
        return admitted

    def local_update(self, context: LocalContext) -> LocallyNoisedUpdate:
        """Run DP-SGD; the noise is inside, and local states are not released."""
        return self._dp_sgd.train(context, self.record_sampling)

    def bounds(self, population: Population) -> None:
        """Return None: silos add the noise themselves."""

    def dp_event(self, view: View) -> Event:
        """Return the event of one round: only the silo's own noise counts, so it is the same against everyone."""
        if self.noise_multiplier == 0:
            return NonPrivate("noise_multiplier is 0")
        step = PoissonSampled(self.record_sampling, Gaussian(self.noise_multiplier))
        return SelfComposed(Group(self.group_size, step), self.local_steps)
