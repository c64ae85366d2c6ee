"""A method outside the package, in one file: ULDP-AVG with a clip that follows a quantile of the updates' norms.

Beside their clipped update, every person sends whether it was shorter than the clip. Both are coordinates of one row of
norm at most 1, so that one Gaussian release of multiplier σ covers them. With θ the angle between the two parts, it is
the composition of a release of the update at σ/cos θ and of one of the bit at σ/sin θ.

Source: Andrew et al., Differentially Private Learning with Adaptive Clipping, 2021, Algorithm 1 and Theorem 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from silodp.errors import SilodpError
from silodp.mechanisms import Bounds, ClippedRows, ClippedRowStream, clip_rows
from silodp.methods import FederationSize, LocalContext, UldpAvg
from silodp.methods.roles import MethodState


@dataclass(frozen=True, repr=False)
class AdaptiveClipping(UldpAvg):
    """ULDP-AVG whose clip C moves by C ← C·exp(−η·(b̄ − γ)), b̄ being the noisy mean of the bits.

    A person without records in a silo has no bit there and moves nothing.

    Attributes:
        clip: C in the first round.
        quantile: γ, the part of the updates that should be shorter than C, in (0, 1).
        clip_learning_rate: η.
        bit_share: sin²θ, the part of a row's squared norm that the bit takes, in (0, 1).
        clip_range: the smallest and the largest C.
    """

    quantile: float = 0.5
    clip_learning_rate: float = 0.2
    bit_share: float = 0.01
    clip_range: tuple[float, float] = (1e-6, 1e6)

    name: str = field(default="adaptive-clipping", init=False)
    extra_coordinates: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.quantile < 1 and 0 < self.bit_share < 1 and self.personal is None):
            raise SilodpError(
                "quantile and bit_share lie in (0, 1), without personal.", code="argument.value"
            )
        if not 0 < self.clip_range[0] <= self.clip <= self.clip_range[1] < math.inf:
            raise SilodpError("clip lies within clip_range.", code="argument.value", field="clip")

    @property
    def longest_bit(self) -> float:
        """The largest |b − γ|."""
        return max(self.quantile, 1 - self.quantile)

    def initial_state(self, population: FederationSize) -> dict[str, np.ndarray]:
        """Return C of the first round."""
        return {"clip": np.array([self.clip])}

    def check_state(self, state: MethodState, population: FederationSize) -> str | None:
        """Check that C lies within its range."""
        least, most = self.clip_range
        return None if least <= state["clip"][0] <= most else f"is not a clip from {least:g} to {most:g}"

    def local_update(self, context: LocalContext) -> ClippedRowStream:
        """Train and clip as ULDP-AVG does with this round's C; then scale to a unit clip, and append the bits."""
        clip = float(context.state["clip"][0])
        stream = UldpAvg.local_update(replace(self, clip=clip), context)
        rows = (self._with_bits(chunk, clip) for chunk in stream.chunks)
        return ClippedRowStream(rows, stream.size + 1, self.bounds(context.population), weighted=True)

    def _with_bits(self, chunk: ClippedRows, clip: float) -> ClippedRows:
        """Return rows (r, d + 1) of norm at most 1; a row that is not finite stays so, and counts as zero."""
        bits = ((chunk.factors == 1).double() - self.quantile) / self.longest_bit
        update = chunk.tensor.double() * (chunk.factors * (math.sqrt(1 - self.bit_share) / clip))[:, None]
        rows = torch.cat([update, math.sqrt(self.bit_share) * bits[:, None]], dim=1)
        return clip_rows(chunk.owners, rows, 1.0)  # once more, since the parts were rounded

    def bounds(self, population: FederationSize) -> Bounds:
        """Return the bounds of ULDP-AVG with a unit clip; `dp_event` is ULDP-AVG's, whatever the clip."""
        return replace(super().bounds(population), clip=1.0, sensitivity=1.0, total=float(population.users))

    def split_sum(
        self, total: Tensor, state: MethodState, population: FederationSize
    ) -> tuple[Tensor, dict[str, np.ndarray]]:
        """Scale the update back by this round's C, and find the next one."""
        clip, expected = float(state["clip"][0]), self.user_sampling * population.users
        mean = float(total[-1]) * self.longest_bit / math.sqrt(self.bit_share) / expected
        step = self.clip_learning_rate * min(max(mean, -1.0), 1.0)  # the noise-free mean lies in there
        after = np.clip(clip * math.exp(-step), *self.clip_range)
        return total[:-1] * (clip / math.sqrt(1 - self.bit_share)), {"clip": np.array([after])}
