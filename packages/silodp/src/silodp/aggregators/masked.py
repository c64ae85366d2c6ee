"""`masked`: secure aggregation of integers; the server learns only the sum over the silos that answered.

Source: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), with seals
in place of their second mask (docs/protocols.md, section 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp.accounting.events import Event, to_discrete
from silodp.accounting.views import Adversary, View
from silodp.aggregators import attempts, base
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.keys import Session
from silodp.crypto.secure_aggregation import RoundAttempt, WordGroup, apply_masks, open_sum
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import LocallyNoisedUpdate, Update
from silodp.mechanisms.quantization import FIXED_POINT_STEP, Quantizer, choose_ring_bits, to_fixed_point
from silodp.methods.base import Method
from silodp.wire.messages import Message
from silodp.wire.schemas import Array, MessageSchedule, MessageSchema

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class Masked(attempts.MaskedAggregator):
    """Secure aggregation: the silos draw the user sample; the server knows counts where weights are not uniform.

    Source: Bonawitz et al. (CCS 2017), section 4; docs/protocols.md, section 2.

    Args:
        min_silos: m, the fewest silos whose answers are added up; noise is sized for them (None: all must answer).
        units: grid steps to the clip, a power of two (None: the finest that can be drawn exactly, at most 2^20).
    """

    min_silos: int | None = None
    units: int | None = None

    name = "masked"
    assumptions = attempts.MASKING_ASSUMPTIONS
    visibility = (
        base.Visibility(
            "The server",
            "the noisy sum over the silos that answered, and which silos these were; "
            f"{base.DISCLOSED_COUNTS}, silo by silo",
            "who was sampled; any single silo's sum, with noise or without; records; a single person's update",
        ),
        base.Visibility(
            "Each silo",
            "the global models; which silos answered; who was sampled; where weights are not uniform, what its weights "
            "say of its persons' records in other silos",
            base.OTHER_SILOS,
        ),
        base.RECIPIENT,
    )

    def check(self, spec: RunSpec) -> None:
        """Refuse too few silos, or a grid or a ring that does not exist."""
        self.check_min_silos(spec)
        self.ring(spec)

    def views(self, method: Method, silos: int, survivors: int | None = None) -> dict[Adversary, View]:
        """Return what each sees: everyone sees the sum, the first column of docs/privacy.md, section 3."""
        m, disclosed = self.min_silos_for(silos), method.needs_counts
        released = View("released", silos, noise_sized_for=m, survivors=survivors)
        return {
            "released": released,
            "server": replace(released, adversary="server", counts_disclosed=disclosed),
            "silo": replace(released, adversary="silo", knows_sample=True, counts_disclosed=disclosed),
        }

    def event(self, spec: RunSpec, view: View) -> Event:
        """Return the method's event, with Skellam noise.

        Source: docs/privacy.md, section 3; Agarwal, Kairouz and Liu, "The Skellam Mechanism for Differentially Private
        Federated Learning" (NeurIPS 2021).

        What a colluding silo does not know may move by as little as one S-th of the clip; charging it as so few grid
        steps costs more, if anything.
        """
        event = spec.method.dp_event(view)
        if spec.bounds is None:
            return event
        # Where silos clip differently, the smallest clip's steps: with the same noise, fewer steps cost more.
        units = math.floor(Quantizer.from_bounds(spec.bounds, self.units).units * spec.bounds.min_clip_ratio)
        silos, sharing = spec.population.silos, spec.bounds.silos_sharing_weight
        if view.adversary == "silo" and spec.method.unit != "record":
            units //= silos
        else:
            # The event's multiplier is in units of what the n silos in the sum can move, and so are its grid steps.
            units = units * min(view.shares_in_sum, sharing) // sharing
        return to_discrete(event, max(1, units), spec.sum_size)

    def series_aggregator(self, spec: RunSpec) -> base.Aggregator | None:
        """Return `masked` itself, also for subclasses, with as many silos in a sum."""
        return Masked(min_silos=spec.min_silos)

    def ring(self, spec: RunSpec) -> tuple[WordGroup, float]:
        """Return the ring that sums live in, and the size of a grid step in units of the update."""
        if spec.bounds is None:
            # Values with their noise inside have no clip to choose a ring from: 64 bits hold them at a fixed step.
            return WordGroup(spec.sum_size, 64), FIXED_POINT_STEP
        grid = Quantizer.from_bounds(spec.bounds, self.units)
        return WordGroup(spec.sum_size, choose_ring_bits(spec.bounds, grid, spec.population.silos)), grid.step

    def noise_step(self, spec: RunSpec) -> float:
        """Return the step of the ring."""
        return self.ring(spec)[1]

    def describe(self, spec: RunSpec) -> dict[str, Any]:
        """Return grid, ring, and what travels."""
        ring, step = self.ring(spec)
        return {
            "silos needed in a sum": spec.population.min_survivors,
            "grid steps to the clip": None if spec.bounds is None else round(spec.bounds.clip / step),
            "sums modulo": f"2^{ring.bits}",
            "bytes up, per silo and round": spec.sum_size * ring.dtype.itemsize,
            "exactness": "integers, exact",
            "security": "X25519, Ed25519, HKDF-SHA256, ChaCha20: 128 bits",
        }

    def script(self, spec: RunSpec, name: str) -> MessageSchedule:
        """Return set-up, key agreement, then attempts."""
        ring, _ = self.ring(spec)
        answer = MessageSchema(arrays={"masked": Array(ring.dtype.name, (spec.sum_size,))})
        return self.attempt_script(spec, name, answer)

    def server(self, spec: RunSpec) -> base.ServerAggregator:
        """Return the side that relays keys, collects, opens and adds."""
        return _PairwiseMaskServer(spec, self)

    def silo(self, spec: RunSpec, context: base.SiloContext) -> base.SiloAggregator:
        """Return the side that masks and seals."""
        return _Silo(self, spec, context)


@dataclass(frozen=True)
class _PairwiseMaskServer(attempts.MaskedServer):
    aggregator: Masked

    def combine(self, context: base.ServerContext, result: attempts.OpenedAttempt) -> np.ndarray:
        ring, step = self.aggregator.ring(self.spec)
        values = (answer.arrays["masked"] for answer in result.answers.values())
        total: np.ndarray = ring.center(open_sum(values, result.seals, ring)) * step
        return total


class _Silo(attempts.MaskedSilo):
    _aggregator: Masked

    def answer(
        self, request: Message, session: Session, attempt: RoundAttempt, work: base.LocalUpdateFn
    ) -> tuple[Message, int]:
        # What is stored is the noisy sum without masks: masks and seal are of one attempt, the noise is of the release.
        drawn = self.get_or_draw(request, attempt, lambda: self._draw_noisy(work, attempt.release))
        ring, _ = self._aggregator.ring(self._spec)
        value = apply_masks(ring.from_integers(drawn["noisy"]), ring, session, attempt, request.digest())
        return request.answer(masked=value), int(drawn["refused"][0])

    def _draw_noisy(self, work: base.LocalUpdateFn, release: int) -> dict[str, np.ndarray]:
        """Draw the noisy integers (d,) int64 of one release."""
        bounds = self._spec.bounds
        # The grid of all silos, although this one's share of noise may differ.
        grid = None if bounds is None else Quantizer.from_bounds(bounds, self._aggregator.units)
        value, refused = work(release).make_share(partial(_make_integers, grid, self._spec.population.silos))
        return {"noisy": value, "refused": np.array([refused])}


def _make_integers(
    grid: Quantizer | None, silos: int, update: Update, weights: Tensor, noise: np.random.Generator
) -> tuple[np.ndarray, int]:
    """Return the noisy sum (d,) int64 of a silo among so many, and the number of refused rows."""
    if isinstance(update, LocallyNoisedUpdate):
        return to_fixed_point(update.value, silos), update.refused
    if grid is None:
        raise SilodpError("rows that are not noised need a method with bounds.", code="method.rows")
    share = grid.add_noise(update, weights, noise)
    return share.value, share.refused
