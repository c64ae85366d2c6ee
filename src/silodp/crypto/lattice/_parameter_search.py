"""The search for a lattice: the cheapest one that meets all of `LatticeParameters.rules`, or a refusal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from silodp.crypto.lattice.parameters import STANDARD_128, LatticeParameters
from silodp.errors import SilodpError, counted

MOST_BYTES_UP = 25.0


def search_parameters(
    *,
    dimension: int,
    users: int,
    silos: int,
    count_cap: int,
    noise_multiplier: float,
    attempts: int,
    epsilon: float,
    delta: float,
    weight_bits: int = 20,
    clip_units: int | None = None,
) -> LatticeParameters:
    """The cheapest encryption that meets every rule, for public constants as `LatticeParameters` names them.

    Without `clip_units` the finest grid C/g ≤ 2^17 for which there is one, not below 64√d (then the charge for
    rounding stays small). Among encryptions those of at most 25 bytes per parameter up come first, then the least work.

    Raises:
        SilodpError: none passes; names the rules that the nearest one breaks.
    """
    if not all(
        x > 0 for x in (dimension, users, silos, count_cap, attempts, delta, weight_bits, clip_units or 1)
    ):
        raise SilodpError(
            "the constants of a private weighting must be positive; check users, silos, caps and delta",
            code="argument.value",
        )
    grids = [1 << bits for bits in range(17, 7, -1) if 1 << bits >= 64 * math.sqrt(dimension)]
    tried: list[LatticeParameters] = []
    for units in [clip_units] if clip_units else grids or [1 << 17]:
        start = LatticeParameters(
            dimension=dimension,
            users=users,
            silos=silos,
            count_cap=count_cap,
            clip_units=units,
            noise_multiplier=noise_multiplier,
            attempts=attempts,
            epsilon=epsilon,
            delta=delta,
            weight_bits=weight_bits,
            ring_size=0,
            limb_bits=0,
            limbs=0,
            plaintext_bits=0,
            dropped=0,
        )
        tried = list(_encryptions(replace(start, plaintext_bits=math.floor(start.sum_bits) + 2)))
        passing = [one for one in tried if all(rule.holds for rule in one.rules())]
        if passing:
            return min(passing, key=lambda one: (one.bytes_up > MOST_BYTES_UP, one.work, one.bytes_up))
    nearest = min(tried, key=lambda one: sum(max(0.0, rule.value - rule.limit) for rule in one.rules()))
    broken = [
        f"{rule.name} {rule.value:.1f} > {rule.limit:.1f}" for rule in nearest.rules() if not rule.holds
    ]
    raise SilodpError(
        f"no lattice holds {counted(users, 'user')} with up to {counted(count_cap, 'record')} a silo at C/g = "
        f"{nearest.clip_units}: the nearest breaks {', '.join(broken)}; lower the count cap, or take fewer rounds or "
        "weight bits",
        code="crypto.parameters",
    )


def _encryptions(start: LatticeParameters) -> Iterator[LatticeParameters]:
    """Every ring and modulus, each with as many limbs dropped as decryption allows."""
    for ring_size in (4096, 8192, 16384):
        for limb_bits in range(12, 25):
            for limbs in range(3, STANDARD_128[ring_size] // limb_bits + 1):
                one = replace(start, ring_size=ring_size, limb_bits=limb_bits, limbs=limbs)
                if one.flooding_bits < 1:
                    continue
                least = min(one.modulus_bits - one.plaintext_bits - 1, one.flooding_bits)
                most = replace(one, dropped=least // limb_bits)
                while most.dropped and most.room_bits >= one.modulus_bits - one.plaintext_bits - 1 - 1e-9:
                    most = replace(most, dropped=most.dropped - 1)
                yield most
