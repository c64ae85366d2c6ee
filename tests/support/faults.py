"""Faults that a program like this one could have, each put into the product by patches, for tests of the attack.

A fault changes what silos or the server do, and neither the settings nor the ε that is printed. Those of linkage are no
faults of the program: they are persons that it does not recognize, whose cost the guarantee states.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from silodp.aggregators import limits
from silodp.crypto.sampling import PersonCoins
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.mechanisms import clipping, quantization
from silodp.mechanisms.clipping import ClippedRows, clip_rows
from silodp.mechanisms.noise import Randomness
from silodp.mechanisms.rows import FactoredRows
from silodp.methods import Ddp, UldpAvg, uldp
from silodp.runtime import silo as silo_module
from silodp.runtime.server import Server
from silodp.runtime.silo import Silo
from silodp.runtime.simulation import Simulation
from silodp_budgets.random_allocation import RandomAllocation
from silodp_experiments.uldp_baselines import UldpGroup, UldpNaive

Change = tuple[Any, str, Callable[[Any], Any]]
"""A module or class, the name of a function in it, and a function from the right one to the wrong one."""


@dataclass(frozen=True)
class Fault:
    """A fault of the program.

    Attributes:
        setting: the settings of a run that has it, a key of `METHODS` in the tests.
        changes: all that has to be changed for it; a defense that would stop it is among them.
    """

    setting: str
    changes: tuple[Change, ...]

    @contextmanager
    def inject(self) -> Iterator[None]:
        """Have the fault within the block."""
        with ExitStack() as stack:
            for owner, name, make in self.changes:
                stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))
            yield


# --- Too little noise, or too much ---


def scale_noise(factor: float) -> Change:
    def make(draw):
        return lambda size, std, stream: draw(size, factor * std, stream)

    return clipping, "draw_gaussian", make


def scale_share(method: type, factor: Callable[[int], float]) -> Change:
    """Multiply the noise of `bounds`, which silos draw, by a function of S; events are not made from it."""

    def make(bounds):
        def wrong(self, population):
            right = bounds(self, population)
            return replace(right, noise_multiplier=right.noise_multiplier * factor(population.silos))

        return wrong

    return method, "bounds", make


def change_stream(method: type, change: Callable[[Any, Any, Any], Any]) -> Change:
    """Change what `local_update` returns: change(method, context, stream) is the wrong stream."""

    def make(local_update):
        return lambda self, context: change(self, context, local_update(self, context))

    return method, "local_update", make


def scale_stream(stream, factor: float):
    share = stream.bounds.noise_multiplier * factor
    return replace(stream, bounds=replace(stream.bounds, noise_multiplier=share))


def silence_first_silo(method, context, stream):
    return scale_stream(stream, 0.0) if context.silo == 0 else stream


def add_noise_of_one_step(method, context, stream):
    return scale_stream(stream, 1 / math.sqrt(method.local_steps))


def use_paper_sensitivity(bounds):
    """Theorem 1 of the paper: a person moves a silo's update by C, where it is 2C."""
    return lambda self, population: replace(bounds(self, population), sensitivity=self.clip)


def repeat_rounds(derive):
    return lambda self, request, release: Randomness.from_seed(7).child(self.name)


def repeat_silos(derive):
    return lambda self, request, release: Randomness.from_seed(7).child("round", request.round)


# --- Canaries that move more than the clip ---


def clip_after_weighting(method, context, stream):
    def chunks():
        for chunk in stream.chunks:
            weights = context.weights[chunk.owners]
            yield clip_rows(chunk.owners, chunk.tensor * weights[:, None].to(chunk.tensor), method.clip)

    return replace(stream, chunks=chunks(), weighted=False)


def weigh_with(total: float) -> Change:
    """Give every person weights that add to `total`: after the check of weights, which refuses them."""

    def make(compute):
        return lambda method, counts, population: np.full(
            (population.silos, population.users), total / population.silos
        )

    return silo_module, "compute_user_weights", make


WEIGHT_ONE: Change = (
    silo_module,
    "compute_user_weights",
    lambda compute: lambda method, counts, population: np.ones((population.silos, population.users)),
)
NO_SECOND_LOOK: Change = (ClippedRows, "find_within_clip", lambda find: lambda self: self.factors != 0)
"""`sum_rows` drops rows that are longer than the clip, whoever computed their factors."""

NO_LIMIT: tuple[Change, ...] = ((limits, "check_sum", lambda check: lambda *sum_of_silos: None),)
"""The server refuses sums that are longer than clipped rows can be."""


def skip_clip(clip):
    def wrong(owners, rows, radius, **settings):
        return ClippedRows(owners, rows, torch.ones(len(owners), dtype=torch.float64), radius)

    return wrong


def clip_largest_coordinate(clip):
    def wrong(owners, rows, radius, **settings):
        every = rows.expand() if isinstance(rows, FactoredRows) else rows
        return ClippedRows(owners, rows, (radius / every.double().abs().amax(1)).clamp(max=1), radius)

    return wrong


def turn_round(method, context, stream):
    """Send −Δ in place of Δ: a method may do so, and an attack that guesses the other way sees nothing."""
    flipped = (replace(chunk, factors=-chunk.factors) for chunk in stream.chunks)
    return replace(stream, chunks=flipped)


# --- Samples, groups, charges ---


def toss_own_coins(get_coins):
    def wrong(self):
        secret = hashlib.sha256(self.name.encode()).digest()
        return PersonCoins(secret, self.run, "", map(str, self._persons.tolist()))

    return wrong


def toss_in_every_round(draw):
    return lambda self, coins, round_, rates: coins.toss(round_, rates)


def repeat_allocations(draw):
    def wrong(self, coins, round_, rates):
        return draw(self, coins, round_ % self.rounds_drawn_together, rates)

    return wrong


def charge_one_allocation(dp_event):
    def wrong(self, view):
        return replace(dp_event(self, view), is_first=view.round == 0)

    return wrong


def double_rate(sampling_rates):
    return lambda self, population: 2 * sampling_rates(self, population)


def take_whole_group(select):
    def wrong(self, user, place, population, stream, budget=None):
        return select(self, user, 0, replace(population, silos=1), stream, budget)

    return wrong


def skip_odd_rounds(charge):
    return lambda self, round_, release, survivors: (
        bool(round_ % 2) or charge(self, round_, release, survivors)
    )


# --- Persons who are not recognized as one ---


def file_copies(where: Callable[[int, int], int]) -> Change:
    """File copies of all records under a second id: those of silo s in silo `where(s, silos)`, -1 for none."""

    def double(federation: Federation) -> Federation:
        persons = np.unique(np.concatenate([silo.user for silo in federation.silos]))
        unused = np.setdiff1d(np.arange(federation.users), persons)[: len(persons)]
        silos = list(federation.silos)
        for s, own in enumerate(federation.silos):
            to = where(s, len(silos))
            if to >= 0:
                x, y = (np.concatenate([getattr(silos[to], name), getattr(own, name)]) for name in ("x", "y"))
                second = unused[np.searchsorted(persons, own.user)]
                silos[to] = SiloData(silos[to].name, x, y, np.concatenate([silos[to].user, second]))
        return replace(federation, silos=tuple(silos))

    def make(open_):
        return lambda self, spec, directory: open_(
            replace(self, federation=double(self.federation)), spec, directory
        )

    return Simulation, "open", make


FAULTS = {
    "half of the noise": Fault("uniform", (scale_noise(0.5),)),
    "noise times .9": Fault("uniform", (scale_noise(0.9),)),
    "σ/S in place of σ/√S": Fault("uniform", (scale_share(UldpAvg, lambda silos: 1 / math.sqrt(silos)),)),
    "1/√S forgotten": Fault("uniform", (scale_share(UldpAvg, math.sqrt),)),
    "clipped after weighting": Fault("uniform", (change_stream(UldpAvg, clip_after_weighting),)),
    "weight 1 in every silo": Fault("uniform", (WEIGHT_ONE,)),
    "weights add to 1.5": Fault("uniform", (weigh_with(1.5),)),
    "a silo without noise": Fault("uniform", (change_stream(UldpAvg, silence_first_silo),)),
    "no clipping": Fault("uniform", ((uldp, "clip_rows", skip_clip), NO_SECOND_LOOK, *NO_LIMIT)),
    "clip of the largest coordinate": Fault(
        "uniform", ((uldp, "clip_rows", clip_largest_coordinate), NO_SECOND_LOOK)
    ),
    "a coin per silo": Fault("sampled", ((Silo, "_get_coins", toss_own_coins),)),
    "samples with 2q": Fault("sampled", ((UldpAvg, "sampling_rates", double_rate),)),
    "a coin in every round": Fault("allocated", ((RandomAllocation, "draw", toss_in_every_round),)),
    "the same round of every allocation": Fault(
        "allocated", ((RandomAllocation, "draw", repeat_allocations),)
    ),
    "one allocation charged": Fault("allocated", ((UldpAvg, "dp_event", charge_one_allocation),)),
    "every second round not charged": Fault("uniform", ((Server, "charge", skip_odd_rounds),)),
    "the same noise in every round": Fault("uniform", ((Silo, "_derive_round_randomness", repeat_rounds),)),
    "the same noise in every silo": Fault("uniform", ((Silo, "_derive_round_randomness", repeat_silos),)),
    "half of the Skellam variance": Fault(
        "masked",
        (
            (
                quantization,
                "compute_noise_variance",
                lambda compute: lambda bounds, grid: compute(bounds, grid) / 2,
            ),
        ),
    ),
    "k records in every silo": Fault("group", ((UldpGroup, "select_records", take_whole_group),)),
    "noise of one step": Fault("ddp", (change_stream(Ddp, add_noise_of_one_step),)),
    "the noise of Theorem 1": Fault("naive", ((UldpNaive, "bounds", use_paper_sensitivity),)),
    "one person under two ids": Fault("records", (file_copies(lambda s, silos: (s + 1) % silos),)),
    "two ids in one silo": Fault("uniform", (file_copies(lambda s, silos: 0 if s == 0 else -1),)),
}
"""By what is wrong."""

BLINDED = {
    "all rows are dropped": Fault("uniform", ((uldp, "clip_rows", skip_clip),)),
    "weights are zero": Fault("uniform", (weigh_with(0.0),)),
    "no record takes part": Fault(
        "group",
        (
            (
                UldpGroup,
                "select_records",
                lambda select: lambda self, user, *more, **named: np.zeros(len(user), bool),
            ),
        ),
    ),
    "models do not move": Fault(
        "uniform",
        (
            (
                Server,
                "step",
                lambda step: lambda self, before, total: (replace(before, round=before.round + 1), True),
            ),
        ),
    ),
    "models move by a constant": Fault(
        "uniform",
        (
            (
                Server,
                "step",
                lambda step: lambda self, before, total: step(self, before, torch.ones_like(total)),
            ),
        ),
    ),
    "updates turned round": Fault("uniform", (change_stream(UldpAvg, turn_round),)),
}
"""What hides canaries from an attack: nothing more leaks, and nothing was looked at either."""
