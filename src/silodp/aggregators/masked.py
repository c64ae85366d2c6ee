"""`masked`: secure aggregation of integers; the server learns the sum over the silos that answered, nothing else.

A round is a number of attempts. In each, every silo on the attempt's roster sends its noisy integers under masks and a
seal; if all have, the release is charged and the seals are opened. If one is missing, the same noisy integers are sent
again by the others under fresh masks and seals: nothing has been seen, so nothing is charged twice. If one fails only
when seals are opened, others may have opened theirs: the next attempt is a further release, with fresh noise and its
own charge (docs/protocols.md, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp.accounting.events import Event, to_discrete
from silodp.accounting.guarantee import TECHNICAL, Adversary, View
from silodp.aggregators._key_agreement import key_agreement_kinds, set_up
from silodp.aggregators.attempts import ServerAttempts, SiloAttempts, open_kind, update_kind
from silodp.aggregators.base import (
    DISCLOSED_COUNTS,
    RECIPIENT,
    Aggregator,
    Handler,
    LocalUpdateFn,
    ServerAggregator,
    ServerContext,
    SiloAggregator,
    SiloContext,
    Visibility,
    round_arrays,
    setup_kinds,
)
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.secure_aggregation import WordGroup, apply_masks, open_sum
from silodp.errors import SilodpError, check_whole
from silodp.mechanisms.clipping import LocallyNoisedUpdate
from silodp.mechanisms.quantization import FIXED_POINT_STEP, Quantizer, fixed_point, ring_bits
from silodp.methods.base import Method
from silodp.wire.messages import Message
from silodp.wire.schemas import Array, Schema, Script

if TYPE_CHECKING:
    from torch import Tensor


FEWEST = 3
"""Silos in a sum: of two, each can subtract its own part and sees the other's."""


ASSUMPTIONS = (
    "each silo has checked the other silos' long-term keys by another channel (in a simulation, one process makes them "
    "all)",
    "the server follows the protocol: it draws samples and computes weights as the method says (one silo sees its own "
    "weights only, and cannot check that a person's add to at most 1 over all silos)",
    TECHNICAL
    + "nobody breaks X25519, Ed25519, SHA-256 or ChaCha20. The protocol was not reviewed outside this "
    "project, and hides no timing",
)


class MinSilosMixin:
    """Aggregators that some silos may drop out of; `min_silos` is a field of theirs."""

    min_silos: int | None

    def min_silos_for(self, silos: int) -> int:
        """`min_silos`."""
        if self.min_silos is None:
            return silos
        check_whole("min_silos", self.min_silos)
        return self.min_silos


@dataclass(frozen=True, repr=False)
class Masked(MinSilosMixin, Aggregator):
    """Secure aggregation.

    `min_silos` m: the fewest whose answers are added up; noise is sized for them (None: all silos must answer).
    `units`: grid steps to the clip, a power of two (None: the finest that can be drawn exactly, at most 2^20).
    The server draws the user sample and tells the silos; with weights by records it also knows the counts.
    """

    min_silos: int | None = None
    units: int | None = None

    name = "masked"
    adds_integers = True
    assumptions = ASSUMPTIONS
    visibility = (
        Visibility(
            "The server",
            f"the noisy sum over the silos that answered, and which silos these were; whom it sampled; "
            f"{DISCLOSED_COUNTS}, silo by silo",
            "any single silo's sum, with noise or without; records; a single person's update",
        ),
        Visibility(
            "Each silo",
            "the global models; which silos answered; who was sampled; where weights go by records, for its own "
            "persons also their totals over all silos",
            "other silos' sums, records and separate counts",
        ),
        RECIPIENT,
    )

    def check(self, setting: RunSpec) -> None:
        """A grid and a ring must exist."""
        check_survivors(setting)
        self.ring(setting)

    def views(self, method: Method, silos: int, survivors: int | None = None) -> dict[Adversary, View]:
        """Everyone sees the sum: the first column of docs/privacy.md, section 3."""
        common = {"shares_for": self.min_silos_for(silos), "survivors": survivors}
        knows = {"knows_sample": True, "counts_disclosed": method.needs_counts}
        return {
            "released": View("released", silos, **common),  # type: ignore[arg-type]
            "server": View("server", silos, **common, **knows),  # type: ignore[arg-type]
            "silo": View("silo", silos, **common, **knows),  # type: ignore[arg-type]
        }

    def event(self, setting: RunSpec, view: View) -> Event:
        """The method's, with Skellam noise.

        What a colluding silo does not know may move by as little as one S-th of the clip; charging it as so few grid
        steps costs more, if anything.
        """
        event = setting.method.dp_event(view)
        if setting.bounds is None:
            return event
        # Where silos clip differently, the smallest clip's steps: with the same noise, fewer steps cost more.
        units = math.floor(Quantizer.for_(setting.bounds, self.units).units * setting.bounds.min_clip_ratio)
        silos, spread_over = setting.population.silos, setting.bounds.spread_over
        if view.adversary == "silo" and setting.method.unit != "record":
            units //= silos
        else:
            # The event's multiplier is in units of what the n silos in the sum can move, and so are its grid steps.
            units = units * min(view.n, spread_over) // spread_over
        return to_discrete(event, max(1, units), setting.sum_size)

    def ring(self, setting: RunSpec) -> tuple[WordGroup, float]:
        """The ring that sums live in, and the size of a grid step."""
        if setting.bounds is None:
            return WordGroup(setting.sum_size, 64), FIXED_POINT_STEP
        grid = Quantizer.for_(setting.bounds, self.units)
        return WordGroup(
            setting.sum_size, ring_bits(setting.bounds, grid, setting.population.silos)
        ), grid.step

    def describe(self, setting: RunSpec) -> dict[str, Any]:
        """Grid, ring, and what travels."""
        ring, step = self.ring(setting)
        words = setting.sum_size * ring.dtype.itemsize
        return {
            "silos needed in a sum": setting.population.m,
            "grid steps to the clip": None if setting.bounds is None else round(setting.bounds.clip / step),
            "sums modulo": f"2^{ring.bits}",
            "bytes up, per silo and round": words,
            "exactness": "integers, exact",
            "security": "X25519, Ed25519, HKDF-SHA256, ChaCha20: 128 bits",
        }

    def script(self, setting: RunSpec, name: str) -> Script:
        """Set-up, the silos' meeting, then attempts."""
        ring, _ = self.ring(setting)
        masked = Schema(arrays={"masked": Array(ring.dtype.name, (setting.sum_size,))})
        return Script(
            (*setup_kinds(setting), *key_agreement_kinds(setting.names, name)),
            update_kind(setting, round_arrays(setting), {}, masked),
            open=open_kind(setting),
        )

    def server(self, setting: RunSpec) -> ServerAggregator:
        """Relays greetings; collects, opens, adds."""
        return _Server(self, setting)

    def silo(self, setting: RunSpec, own: SiloContext) -> SiloAggregator:
        """Masks and seals."""
        return _Silo(self, setting, own)


def check_survivors(setting: RunSpec) -> None:
    """Refuse sums of too few silos."""
    silos, fewest = setting.population.silos, setting.population.m
    if not min(FEWEST, silos) <= fewest <= silos or silos < 2:
        raise SilodpError(
            f"min_silos = {fewest} of {silos} silos: secure aggregation adds up at least {FEWEST} silos (all, where "
            "there are two), and no more than there are.",
            code="argument.value",
            field="min_silos",
        )


@dataclass(frozen=True)
class _Server:
    aggregator: Masked
    setting: RunSpec

    def set_up(self, desk: ServerContext) -> None:
        """Let the silos meet."""
        set_up(self.setting.run, self.setting.names, desk.store.run, desk.ask_all, lambda met: None)

    def total(self, desk: ServerContext, round_: int, arrays: Mapping[str, np.ndarray]) -> Tensor | None:
        """The sum over everyone who answered."""
        import torch

        ring, step = self.aggregator.ring(self.setting)
        attempts = ServerAttempts(self.setting, desk, self.setting.population.m)
        result = attempts.collect(round_, arrays)
        if result is None:
            return None
        answers, seals, _ = result
        values = [answer.arrays["masked"].copy() for answer in answers.values()]
        return torch.from_numpy(ring.center(open_sum(values, seals, ring)) * step)


class _Silo:
    def __init__(self, aggregator: Masked, setting: RunSpec, own: SiloContext) -> None:
        self._aggregator, self._setting = aggregator, setting
        self._seals = SiloAttempts.of(aggregator, setting, own)
        self._member = self._seals.member
        self.handlers: Mapping[str, Handler] = self._seals.handlers

    def update(self, request: Message, work: LocalUpdateFn) -> tuple[Message, int]:
        """The round's noisy integers, drawn once, under this attempt's masks and seal."""
        session, attempt = self._seals.session(request), self._seals.attempt(request)
        drawn = self._seals.get_or_draw(request, attempt, lambda: self._noisy(work, attempt.release))
        ring, _ = self._aggregator.ring(self._setting)
        answer = request.answer(
            masked=apply_masks(ring.from_integers(drawn["noisy"]), ring, session, attempt, request.digest())
        )
        return answer, int(drawn["refused"][0])

    def _noisy(self, work: LocalUpdateFn, release: int) -> dict[str, np.ndarray]:
        update, weights, noise = work(release)
        if isinstance(update, LocallyNoisedUpdate):
            value, refused = fixed_point(update.value, self._setting.population.silos), update.refused
        else:  # the grid of all silos, whatever this one's own share of noise
            grid = Quantizer.for_(self._setting.bounds or update.bounds, self._aggregator.units)
            share = grid.release(update, weights, noise)
            value, refused = share.value, share.refused
        return {"noisy": value, "refused": np.array([refused])}
