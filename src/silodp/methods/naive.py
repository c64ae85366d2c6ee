"""ULDP-NAIVE: clip each silo's whole update, and pay for it in noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from silodp.accounting.events import Event, Gaussian, NonPrivate
from silodp.accounting.guarantee import Unit, View
from silodp.mechanisms.clipping import Bounds, ClippedRowStream, check_clip, clip_rows
from silodp.methods.base import (
    BaseMethod,
    LocalContext,
    Population,
    check_local,
    check_noise_multiplier,
    check_server,
)
from silodp.training.sgd.local import LocalTraining, silo_update


@dataclass(frozen=True)
class UldpNaive(BaseMethod):
    """Each silo trains on all its records and clips its update to C (ULDP-FL, Algorithm 1, corrected).

    Emptying one person moves a silo's clipped update to another point of the same ball: by up to 2C, not C as in the
    paper's Theorem 1, and the sum over S silos by 2CS. So a silo adds N(0, (2σC√S)²), and σ is the true multiplier
    (docs/privacy.md, section 4, N).
    """

    noise_multiplier: float
    clip: float
    local: LocalTraining = field(default_factory=lambda: LocalTraining(learning_rate=0.01))
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    name: str = field(default="uldp-naive", init=False)
    unit: Unit | None = field(default="user", init=False)
    needs_counts: bool = field(default=False, init=False)
    assumptions: tuple[str, ...] = field(default=(), init=False)
    clips_records: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_clip(self.clip)
        check_local(self.local)
        check_server(self.server_learning_rate, self.server_momentum)

    def silo_update(self, work: LocalContext) -> ClippedRowStream:
        """clip_C(Q epochs of SGD on all records), which one person can move by 2C."""
        delta = silo_update(
            work.task, work.params, work.x, work.y, self.local, work.randomness.torch("batches")
        )
        row = clip_rows(torch.zeros(1, dtype=torch.int64), delta[None], self.clip)
        return ClippedRowStream([row], work.task.size, self.bounds(work.population), weighted=False)

    def bounds(self, population: Population) -> Bounds:
        """One person moves every silo's update by up to 2C."""
        share = self.share_multiplier(population.silos)
        return Bounds(self.clip, 2 * self.clip, share, population.silos * self.clip)

    def share_multiplier(self, silos: int) -> float:
        """One silo's noise in units of the 2C its update can move by.

        Of the n silos in a sum each is moved, and each adds noise: the more there are, the smaller the multiplier of
        the sum. So shares are sized for all silos, however many may fail to answer.
        """
        return self.noise_multiplier * math.sqrt(silos)

    def server_scale(self, population: Population) -> float:
        """1/S."""
        return 1.0 / population.silos

    def dp_event(self, view: View) -> Event:
        """A person moves each of the n seen updates by 2C; together they carry n independent shares.

        The sum moves by 2Cn under noise 2C·share·√n; all shares at once move by 2C√n under 2C·share: the same ratio.
        """
        # Colluding silos may have dropped out of the sum, and still see the models.
        seen = min(view.n, view.silos - view.colluding) if view.adversary == "silo" else view.n
        if self.noise_multiplier == 0:
            return NonPrivate("noise_multiplier is 0")
        if seen < 1:
            return NonPrivate("no silo is left whose noise the colluding silos do not know")
        return Gaussian(self.share_multiplier(view.silos) / math.sqrt(seen))
