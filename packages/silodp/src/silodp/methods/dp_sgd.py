"""DP-SGD inside one silo, as `uldp-group` and the record-level methods run it: sample, clip, sum, add noise, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np

from silodp._lazy import torch
from silodp.assumption import RECORD_OWNERS, Assumption
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.mechanisms import clipping
from silodp.mechanisms.noise import draw_poisson_sample
from silodp.methods.base import LocalContext
from silodp.settings import Clip, Help, NoiseMultiplier, Positive, Probability, Settings, Whole
from silodp.text import pluralize
from silodp.training import sgd

if TYPE_CHECKING:
    from torch import Tensor


Optimizer = Literal["sgd", "adam"]
LocalSteps = Annotated[
    int, Whole(what="DP-SGD steps"), Help("DP-SGD steps per round, for methods that take several.")
]
RecordSampling = Annotated[Probability, Help("Sampling probability q (γ) of a record in a DP-SGD step.")]

RECORD_IN_ONE_SILO = Assumption(
    "record-in-one-silo",
    "a record lies in one silo only, and copies of it are further records",
    RECORD_OWNERS,
)

Keep = Callable[[clipping.ClippedRows], clipping.ClippedRows]
"""From a step's clipped gradients to those that count, decided record by record."""


@dataclass(frozen=True)
class DpSgd(Settings):
    """The public constants of DP-SGD.

    Every step adds N(0, (σC)²) to the sum of the batch's clipped gradients.

    Attributes:
        noise_multiplier: The noise multiplier σ, in units of the clip.
        clip: The 2-norm C that every record's gradient is clipped to.
        local_steps: The number of steps of a round.
        expected_batch_size: The constant that divides every sum; the realized batch size is private, and not used.
        local_learning_rate: The learning rate of the noisy mean gradient.
        optimizer: The optimizer that takes the steps.

    Source: Abadi et al. 2016 (Deep Learning with Differential Privacy), Algorithm 1, with Poisson samples, and with the
    expected batch size as the divisor.
    """

    noise_multiplier: NoiseMultiplier
    clip: Clip
    local_steps: LocalSteps
    expected_batch_size: Positive
    local_learning_rate: Positive
    optimizer: Optimizer = "sgd"

    @classmethod
    def of(cls, method: object) -> Self:
        """Return the constants among a method's fields; those that it lacks keep their defaults."""
        return cls(**{f.name: getattr(method, f.name) for f in fields(cls) if hasattr(method, f.name)})

    @property
    def bounds(self) -> clipping.Bounds:
        """The bounds of one step; all records may be drawn, so no public constant bounds the sum."""
        return clipping.Bounds(self.clip, self.clip, self.noise_multiplier, total=math.inf)

    def train(
        self, context: LocalContext, rates: float | np.ndarray, keep: Keep | None = None
    ) -> clipping.LocallyNoisedUpdate:
        """Take `local_steps` steps from the global model.

        Local models are not released. The optimizer's state is fresh in every round, and works on noisy sums alone:
        whatever it does is post-processing.

        Args:
            context: The silo's records, the model and the randomness.
            rates: The probability with which each record is drawn into each step's batch, one or (n,).
            keep: Drops records from a step (see `Keep`).

        Returns:
            The local model minus the global one, whose noise is inside.
        """
        params = context.params.clone()
        batches, noise = context.randomness.stream("batches"), context.randomness.stream("noise")
        gradients = context.make_record_gradients(self.local_steps)
        step_of = _STEPS[self.optimizer](self.local_learning_rate)
        refused = 0
        for _ in range(self.local_steps):
            # A fresh Poisson sample in every step, never a shuffled epoch: the accountant's amplification is of that.
            batch = draw_batch(len(context.user), rates, batches)
            clipped = self._clip_gradients(gradients, params, batch, keep)
            step = clipping.ClippedRowStream(clipped, context.task.size, self.bounds, weighted=False)
            # Noise also where the batch is empty: a step without it would show that nobody was drawn.
            noisy = clipping.add_weighted_rows(step).add_noise(self.noise_multiplier, noise)
            # The divisor is public: dividing by the realized batch size would release it without noise.
            params -= step_of(noisy.value, self.expected_batch_size).to(params)
            refused += noisy.refused
        return clipping.LocallyNoisedUpdate((params - context.params).double().cpu(), refused)

    def _clip_gradients(
        self, gradients: sgd.RecordGradients, params: Tensor, batch: Tensor, keep: Keep | None
    ) -> Iterator[clipping.ClippedRows]:
        for records, rows in gradients.of(params, batch):
            clipped = clipping.clip_rows(records, rows, self.clip)
            yield clipped if keep is None else keep(clipped)


def draw_batch(count: int, rates: float | np.ndarray, stream: np.random.Generator) -> Tensor:
    """Draw the record numbers (b,) int64 of a batch: each of `count` records with its own probability."""
    return torch.from_numpy(np.flatnonzero(draw_poisson_sample(count, rates, stream)))


def check_batch(data: PublicData, batch: float) -> None:
    """Check that every silo with records has at least a batch of them.

    The number of records is public where records are the unit: emptied, a record leaves its slot behind.

    Raises:
        SilodpError: a silo has fewer.
    """
    for name, records in zip(data.silos, data.record_counts or (), strict=False):
        if 0 < records < batch:
            raise SilodpError(
                f"silo '{name}' has {pluralize(records, 'record')}, fewer than expected_batch_size = {batch:g}: "
                "lower that, or leave the silo out.",
                code="data.too_few_records",
                field="expected_batch_size",
            )


def _make_sgd(learning_rate: float) -> Callable[[Tensor, float], Tensor]:
    return lambda total, divisor: learning_rate / divisor * total


class _Adam:
    """torch.optim.Adam with its default constants, on the noisy mean gradient, in double precision.

    Source: Kingma and Ba 2015, Algorithm 1.
    """

    _BETAS, _ADAPTIVITY = (0.9, 0.999), 1e-8

    def __init__(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._steps, self._mean, self._square = 0, torch.zeros(()), torch.zeros(())

    def __call__(self, total: Tensor, divisor: float) -> Tensor:
        # Of the noisy sum alone, so that moments and their square roots are post-processing.
        gradient, (first, second) = total / divisor, self._BETAS
        self._steps += 1
        self._mean = first * self._mean + (1 - first) * gradient
        self._square = second * self._square + (1 - second) * gradient**2
        mean = self._mean / (1 - first**self._steps)
        scale = (self._square / (1 - second**self._steps)).sqrt() + self._ADAPTIVITY
        return self._learning_rate * mean / scale


_STEPS: dict[str, Callable[[float], Callable[[Tensor, float], Tensor]]] = {"sgd": _make_sgd, "adam": _Adam}
