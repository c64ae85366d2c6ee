"""ULDP-GROUP-k: record-level DP-SGD in each silo, and group privacy for a person with at most k records."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral

import numpy as np

from silodp.accounting.events import Event, Gaussian, Group, NonPrivate, PoissonSampled, SelfComposed
from silodp.accounting.guarantee import Unit, View
from silodp.errors import SilodpError, check_real
from silodp.mechanisms.clipping import LocallyNoisedUpdate
from silodp.mechanisms.sampling import check_probability
from silodp.methods.base import BaseMethod, LocalContext, Population, check_server
from silodp.methods.dp_sgd import DpSgd

_LARGEST_GROUP = 4096  # the accountant's mixture grows with its square; ε has long lost any meaning


@dataclass(frozen=True)
class UldpGroup(BaseMethod):
    """Each silo runs `local_steps` of DP-SGD (Poisson rate γ, per-record clip C, noise σC) on ≤ k records per person.

    ULDP-FL, Algorithm 2, corrected as in docs/privacy.md, section 4, G. `expected_batch_size` is a public constant that
    divides every gradient sum; the realized batch size is private and divides nothing. k, γ and the number of steps
    are the same public constants in every silo.
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
        check_server(self.server_learning_rate, self.server_momentum)
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
        """What the selection of k records showed to whom."""
        return (
            f"group_size = {self.group_size} is a public constant, not read off the data",
            "whoever coordinates the selection of at most group_size records per person (here the server) sees how "
            "many records each person has in each silo, and a silo sees how many of a person's records it may use; "
            "ε does not cover that",
        )

    def allotments(
        self, counts: np.ndarray | None, population: Population, stream: np.random.Generator
    ) -> np.ndarray:
        """How many of each person's records each silo may use: k of N[u], uniformly, by coins of her own."""
        if counts is None:
            raise SilodpError(
                "uldp-group needs the record counts of every silo to admit at most group_size records.",
                code="method.not_set_up",
            )
        quota = counts.copy()
        for user in np.flatnonzero(counts.sum(axis=0) > self.group_size):
            quota[:, user] = stream.multivariate_hypergeometric(counts[:, user], self.group_size)
        return quota

    @property
    def allotment_dtype(self) -> str:
        """Quotas of records."""
        return "int64"

    def allotment_problem(
        self, allotment: np.ndarray, counts: np.ndarray, population: Population, silo: int
    ) -> str | None:
        """At most k records of a person, and at most those that are here."""
        within = (allotment >= 0) & (allotment <= np.minimum(counts, self.group_size))
        return None if within.all() else f"is not 0 to {self.group_size} of each person's records here"

    def select_records(
        self,
        user: np.ndarray,
        allotment: np.ndarray | None,
        stream: np.random.Generator,
        budget: np.ndarray | None = None,
    ) -> np.ndarray:
        """`allotment[u]` of each person's records, uniformly."""
        if allotment is None:
            raise SilodpError(
                "uldp-group cannot admit records without allotments: run the set-up first.",
                code="method.not_set_up",
            )
        shuffled = stream.permutation(len(user))
        order = shuffled[np.argsort(user[shuffled], kind="stable")]  # grouped by person, shuffled within
        grouped = user[order]
        position = np.arange(len(order)) - np.searchsorted(grouped, grouped)
        admitted = np.zeros(len(user), dtype=bool)
        admitted[order] = position < allotment[grouped]
        return admitted

    def sample(self, population: Population, stream: np.random.Generator) -> None:
        """Records are sampled inside DP-SGD, persons are not."""

    def silo_update(self, work: LocalContext) -> LocallyNoisedUpdate:
        """DP-SGD (Abadi et al. 2016, Algorithm 1); the noise is inside, and local states are not released."""
        return self._dp_sgd.train(work, self.record_sampling)

    def bounds(self, population: Population) -> None:
        """The update is finished in the silo."""

    def server_scale(self, population: Population) -> float:
        """1/S."""
        return 1.0 / population.silos

    def dp_event(self, view: View) -> Event:
        """Only local noise counts, whoever looks: released = server = silo."""
        if self.noise_multiplier == 0:
            return NonPrivate("noise_multiplier is 0")
        step = PoissonSampled(self.record_sampling, Gaussian(self.noise_multiplier))
        return SelfComposed(Group(self.group_size, step), self.local_steps)
