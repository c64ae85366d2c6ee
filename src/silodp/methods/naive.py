"""ULDP-NAIVE: each silo's whole update is clipped, so that the noise is large."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from silodp.accounting.events import Event, Gaussian, NonPrivate
from silodp.accounting.views import Unit, View
from silodp.mechanisms.clipping import Bounds, ClippedRowStream, clip_rows
from silodp.methods.base import ALL_NOISE_KNOWN, LocalContext, Method
from silodp.methods.fedavg import train_on_all_records
from silodp.methods.roles import FederationSize
from silodp.settings import Clip, NoiseMultiplier
from silodp.training.sgd import LocalTraining


@dataclass(frozen=True, repr=False)
class UldpNaive(Method):
    """Each silo trains on all its records and clips its update to C.

    Emptying one person moves a silo's clipped update to another point of the same ball: by up to 2C, not C as in the
    paper's Theorem 1, and the sum over S silos by 2CS. So a silo adds N(0, (2σC√S)²), and σ is the true multiplier
    (docs/privacy.md, section 4, N).

    Attributes:
        noise_multiplier: σ of the sum over all silos, in units of what one person can move it by.
        clip: C, of a silo's whole update.
        local: the silo's training.

    Source: Kato et al., ULDP-FL, 2024, Algorithm 1, corrected.
    """

    noise_multiplier: NoiseMultiplier
    clip: Clip
    local: LocalTraining = field(default_factory=lambda: LocalTraining(learning_rate=0.01))
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    name: str = field(default="uldp-naive", init=False)
    unit: Unit | None = field(default="user", init=False)
    needs_counts: bool = field(default=False, init=False)
    assumptions: tuple[str, ...] = field(default=(), init=False)

    def local_update(self, context: LocalContext) -> ClippedRowStream:
        """Run SGD on all records, and clip the update, which one person can move by 2C."""
        import torch

        delta = train_on_all_records(context, self.local)
        row = clip_rows(torch.zeros(1, dtype=torch.int64), delta[None], self.clip)
        return ClippedRowStream([row], context.task.size, self.bounds(context.population), weighted=False)

    def bounds(self, population: FederationSize) -> Bounds:
        """Return the bounds: one person moves every silo's update by up to 2C."""
        share = self.share_multiplier(population.silos)
        return Bounds(self.clip, 2 * self.clip, share, population.silos * self.clip)

    def share_multiplier(self, silos: int) -> float:
        """Return one silo's noise in units of the 2C its update can move by.

        Of the n silos in a sum each is moved, and each adds noise: the more there are, the smaller the multiplier of
        the sum. So shares are sized for all silos, however many may fail to answer.
        """
        return self.noise_multiplier * math.sqrt(silos)

    def dp_event(self, view: View) -> Event:
        """Return the event of one round.

        A person moves each of the n seen updates by 2C; together they carry n independent shares. The sum moves by 2Cn
        under noise 2C·share·√n; all shares at once move by 2C√n under 2C·share: the same ratio.
        """
        # Colluding silos may have dropped out of the sum, and still see the models.
        seen = (
            min(view.shares_in_sum, view.silos - view.colluding)
            if view.adversary == "silo"
            else view.shares_in_sum
        )
        if self.noise_multiplier == 0:
            return NonPrivate("noise_multiplier is 0")
        if seen < 1:
            return ALL_NOISE_KNOWN
        return Gaussian(self.share_multiplier(view.silos) / math.sqrt(seen))
