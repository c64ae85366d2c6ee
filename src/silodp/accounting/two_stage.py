"""Two-stage sampling (rPDP-FL, Lemma 6 and Theorem 1) for many sampling probabilities at once.

A client takes part in a round with probability λ and then runs τ steps of DP-SGD in which a record is drawn with a
probability q of its own. Everything here is by integer Rényi orders, some of those of `renyi`, whose ε is therefore
never larger. Between integers dp_accounting's series is no more than a bound, a loose one for large q: whoever checks a
calibration with it must not find more than was promised, so no sharper value is used there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from silodp.accounting.accountant import check_delta
from silodp.accounting.events import Gaussian
from silodp.accounting.rdp import mixture_rdp, sampled_moments
from silodp.errors import SilodpError, check_real

Array = NDArray[np.float64]


def _integers() -> Array:
    """2–64, then 6 % apart; the best order lies beyond 1,024 only where ε is some thousandths."""
    orders = [*range(2, 65)]
    while orders[-1] < 256:
        orders.append(min(math.ceil(orders[-1] * 1.06), 256))
    return np.array([*orders, 512, 1024, 2048, 4096], float)


ORDERS = _integers()


@dataclass(frozen=True)
class TwoStage:
    """The public constants of a run: noise multiplier σ, τ local steps, client sampling probability λ, and δ."""

    noise_multiplier: float
    local_steps: int
    client_sampling: float
    delta: float

    def __post_init__(self) -> None:
        for name, above in (("noise_multiplier", 0.0), ("local_steps", 0), ("client_sampling", 0.0)):
            value = getattr(self, name)
            check_real(name, value)
            if not above < value < math.inf:
                raise SilodpError(
                    f"{name} is {value!r}: it must be a finite number above 0.",
                    code="argument.value",
                    field=name,
                )
        if self.local_steps != int(self.local_steps):
            raise SilodpError(
                f"local_steps is {self.local_steps!r}: it must be a whole number.",
                code="argument.value",
                field="local_steps",
            )
        if self.client_sampling > 1:
            raise SilodpError(
                f"client_sampling is {self.client_sampling!r}: it must be at most 1.",
                code="argument.value",
                field="client_sampling",
            )
        check_delta(self.delta)

    def joined(self, q: Array) -> Array:
        """ρ(α) of one round in which the client takes part, (orders, n): τ·ρ_PoiSG(α, q)."""
        return self.local_steps * sampled_gaussian(q, self.noise_multiplier)

    def planned(self, q: Array) -> Array:
        """ρ(α) of one round, whether the client joins or not, (orders, n): ln(1 − λ + λe^((α−1)τρ))/(α−1)."""
        joined, rest = self.joined(q), ORDERS[:, None] - 1
        if self.client_sampling == 1:
            return joined
        planned: Array = mixture_rdp(self.client_sampling, rest * joined) / rest
        return planned

    def epsilon(self, rho: Array) -> Array:
        """(n,) the smallest ε over the orders of ρ (orders, n), never below 0."""
        found: Array = np.maximum((rho + conversion(ORDERS, self.delta)[:, None]).min(axis=0), 0.0)
        return found


def conversion(orders: Array, delta: float) -> Array:
    """What ρ(α) lacks of ε at δ: ln(1 − 1/α) − ln(δα)/(α − 1) (Canonne, Kamath and Steinke 2020, Proposition 12)."""
    found: Array = np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return found


def sampled_gaussian(q: Array, sigma: float) -> Array:
    """ρ_PoiSG(α, q) at ORDERS, (orders, n), for q (n,) in [0, 1] (rPDP-FL, Lemma 6)."""
    rho = np.zeros((len(ORDERS), len(q)))
    rho[:, q == 1] = ORDERS[:, None] / (2 * sigma**2)
    inner = (q > 0) & (q < 1)
    if inner.any():
        rho[:, inner] = sampled_moments(q[inner], Gaussian(sigma), ORDERS) / (ORDERS[:, None] - 1)
    return rho
