"""ULDP-GROUP-k: record-level DP-SGD in each silo, and group privacy for a person with at most k records."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral

import numpy as np
import torch

from silodp.errors import SilodpError, check_real
from silodp.mechanisms.clipping import Bounds, ClippedStream, Finished, check_clip, clip_rows, fold
from silodp.mechanisms.sampling import check_probability, poisson
from silodp.methods.method import Population, SiloWork, check_noise_multiplier, check_server
from silodp.privacy.events import Event, GroupSampled, NoGuarantee, Repeated
from silodp.privacy.guarantee import Unit, View
from silodp.training.local import record_gradients

_LARGEST_GROUP = 4096  # the accountant's mixture grows with its square; ε has long lost any meaning


@dataclass(frozen=True)
class UldpGroup:
    """Each silo runs `local_steps` of DP-SGD (Poisson rate γ, per-record clip C, noise σC) on ≤ k records per person.

    ULDP-FL, Algorithm 2, with the corrections of SPEC section 1, G. `expected_batch_size` is a public constant that
    divides every gradient sum; the realised batch size is private and divides nothing. k, γ and the number of steps
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
        check_noise_multiplier(self.noise_multiplier)
        check_clip(self.clip)
        check_probability("record_sampling", self.record_sampling)
        check_server(self.server_learning_rate, self.server_momentum)
        for name in ("group_size", "local_steps", "expected_batch_size", "local_learning_rate"):
            check_real(name, getattr(self, name))
        if not (isinstance(self.group_size, Integral) and 1 <= self.group_size <= _LARGEST_GROUP):
            raise SilodpError(
                f"group_size = {self.group_size}: set a whole number of records from 1 to {_LARGEST_GROUP} "
                "(with more, clip per person: uldp-avg)."
            )
        if not (isinstance(self.local_steps, Integral) and self.local_steps >= 1):
            raise SilodpError(f"local_steps = {self.local_steps}: set a whole number of DP-SGD steps ≥ 1.")
        for name in ("expected_batch_size", "local_learning_rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SilodpError(f"{name} = {value}: set a finite number > 0.")

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
                "uldp-group needs the record counts of every silo to admit at most group_size records."
            )
        quota = counts.copy()
        for user in np.flatnonzero(counts.sum(axis=0) > self.group_size):
            quota[:, user] = stream.multivariate_hypergeometric(counts[:, user], self.group_size)
        return quota

    def admit(
        self, user: np.ndarray, allotment: np.ndarray | None, stream: np.random.Generator
    ) -> np.ndarray:
        """`allotment[u]` of each person's records, uniformly."""
        if allotment is None:
            raise SilodpError("uldp-group cannot admit records without allotments: run the set-up first.")
        shuffled = stream.permutation(len(user))
        order = shuffled[np.argsort(user[shuffled], kind="stable")]  # grouped by person, shuffled within
        grouped = user[order]
        position = np.arange(len(order)) - np.searchsorted(grouped, grouped)
        admitted = np.zeros(len(user), dtype=bool)
        admitted[order] = position < allotment[grouped]
        return admitted

    def sample(self, population: Population, stream: np.random.Generator) -> None:
        """Records are sampled inside DP-SGD, persons are not."""

    def silo_update(self, work: SiloWork) -> Finished:
        """DP-SGD (Abadi et al. 2016, Algorithm 1); the noise is inside, and local states are not released."""
        params = work.params.clone()
        batches, noise = work.randomness.stream("batches"), work.randomness.stream("noise")
        dropout = work.randomness.torch("dropout")
        step_size = self.local_learning_rate / self.expected_batch_size
        # As many records as there are may be drawn: what a step adds up to is bounded by no public constant.
        bounds = Bounds(self.clip, self.clip, self.noise_multiplier, total=math.inf)
        refused = 0
        for _ in range(self.local_steps):
            batch = torch.from_numpy(np.flatnonzero(poisson(len(work.user), self.record_sampling, batches)))
            gradients = (
                clip_rows(batch[rows], gradient, self.clip)
                for rows, gradient in record_gradients(
                    work.task, params, work.x[batch], work.y[batch], generator=dropout
                )
            )
            step = ClippedStream(gradients, work.task.size, bounds, weighted=False)
            noisy = fold(step).release(bounds.noise_multiplier, noise)
            params -= (step_size * noisy.value).to(params)
            refused += noisy.refused
        return Finished((params - work.params).double().cpu(), refused)

    def bounds(self, population: Population) -> None:
        """The update is finished in the silo."""

    def server_scale(self, population: Population) -> float:
        """1/S."""
        return 1.0 / population.silos

    def dp_event(self, view: View) -> Event:
        """Only local noise counts, whoever looks: released = server = silo."""
        if self.noise_multiplier == 0:
            return NoGuarantee("noise_multiplier is 0")
        return Repeated(
            GroupSampled(self.group_size, self.record_sampling, self.noise_multiplier), self.local_steps
        )
