"""How frameworks compute the ε that they state: their orders, grids and conversions, whether the result holds or not.

Several of them call dp_accounting, and so does this module. Those of Opacus and pfl have code of their own, which is
repeated here in closed form; `make test-frameworks` compares both with the installed packages.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import LazyModule

if TYPE_CHECKING:
    from scipy import special
else:  # the help of `silodp epsilon` lists the frameworks, and is shown without it
    special = LazyModule("scipy.special")

Array = NDArray[np.float64]

_OPACUS_ORDERS = np.array([1 + n / 10 for n in range(1, 100)] + [*range(12, 64)], float)
_LARGEST_GRID = 2**23
"""Of `compute_prv`: 8 million points take some seconds."""


def compute_rdp(
    noise: float, rate: float, steps: int, delta: float, orders: Sequence[float] | None = None
) -> float | None:
    """Return ε by `dp_accounting.rdp.RdpAccountant`, which Flower, FL4Health, pfl and jax_privacy call.

    Args:
        noise: noise multiplier σ.
        rate: Poisson sampling rate q; 1: everybody takes part.
        steps: number of releases.
        delta: δ.
        orders: Rényi orders; None: those of the library.
    """
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant(orders)
    return _ask(accountant, noise, rate, steps, delta)


def compute_pld(noise: float, rate: float, steps: int, delta: float, interval: float = 1e-4) -> float | None:
    """Return ε by `dp_accounting.pld.PLDAccountant`, which pfl and jax_privacy call; arguments as of `compute_rdp`.

    Args:
        noise: see there.
        rate: see there.
        steps: see there.
        delta: see there.
        interval: the distance of the grid's points.
    """
    import dp_accounting

    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=interval)
    return _ask(accountant, noise, rate, steps, delta)


def _ask(accountant: Any, noise: float, rate: float, steps: int, delta: float) -> float | None:
    import dp_accounting

    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    # Its series warns, once for each order, where it leaves one out.
    with _quiet():
        return _keep_finite(float(accountant.compose(event, steps).get_epsilon(delta)))


def compute_opacus_rdp(noise: float, rate: float, steps: int, delta: float) -> float | None:
    """Return ε by `opacus.accountants.RDPAccountant`; arguments as of `compute_rdp`.

    Its series converge to the integral that is computed here. It never rounds a negative ε up to 0.

    Source: Mironov, Talwar and Zhang 2019, section 3.3; for the conversion Balle et al. 2020, Theorem 21.
    """
    alpha = _OPACUS_ORDERS
    rho = steps * np.array([_compute_renyi(noise, rate, order) for order in alpha])
    spent = rho - (math.log(delta) + np.log(alpha)) / (alpha - 1) + np.log1p(-1 / alpha)
    return _keep_finite(float(np.nanmin(spent)))


def _compute_renyi(noise: float, rate: float, order: float) -> float:
    """Return the Rényi divergence of the sampled Gaussian mechanism from noise alone."""
    if rate >= 1:
        return order / (2 * noise**2)
    # ∫ φ(x) (1 - q + q·exp((2x - 1)/2σ²))^α dx has its mass within 14 standard deviations of 0 and of α. It bends
    # within σ or σ², and a sum over a finer grid has all digits.
    points = 8 * (order + 28 * noise) / min(noise, noise**2)
    x = np.linspace(-14 * noise, order + 14 * noise, int(min(points, 20001)))
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))
    weight = math.log((x[1] - x[0]) / (noise * math.sqrt(2 * math.pi)))
    return float((special.logsumexp(order * ratio - x**2 / (2 * noise**2)) + weight) / (order - 1))


def compute_prv(
    noise: float, rate: float, steps: int, delta: float, error: float = 0.01, delta_error: float | None = None
) -> tuple[float, float] | None:
    """Return ε by the accountant of Gopi et al. as Opacus and `prv_accountant` have it: an estimate, an upper bound.

    Args:
        noise: noise multiplier σ.
        rate: Poisson sampling rate q.
        steps: number of releases.
        delta: δ.
        error: of ε, by which the upper bound is larger.
        delta_error: of δ, by which the upper bound's δ is smaller; None: δ/1000, as Opacus.

    Returns:
        None where the grid would be larger than is useful.

    Source: Gopi, Lee and Wutschitz 2021 (Numerical composition of differential privacy), Theorem 5.5, remark 5.6,
    propositions B1 and B4.
    """
    delta_error = delta / 1000 if delta_error is None else delta_error
    reach = [
        compute_opacus_rdp(noise, rate, steps, delta_error / 4),
        compute_opacus_rdp(noise, rate, 1, delta_error / (8 * steps)),
        error,
    ]
    mesh = error / math.sqrt(steps / 2 * math.log(12 / delta_error))
    side = max((value for value in reach if value is not None), default=math.inf) + 3
    if None in reach or 2 * side / mesh > _LARGEST_GRID:
        return None
    half = math.ceil(side / mesh)
    grid: Array = mesh * np.arange(
        -half, half + 2, dtype=np.float64
    )  # an even number of points, as the transform below needs
    whole = _compute_loss_cdf(np.concatenate([grid - mesh / 2, grid[-1:] + mesh / 2]), noise, rate)
    ends = _compute_loss_cdf(grid[[0, -1]], noise, rate)
    cut = np.clip((whole - ends[0]) / (ends[1] - ends[0]), 0.0, 1.0)
    cut[0], cut[-1] = 0.0, 1.0
    mass = np.diff(cut)
    # The grid moves by what rounding has changed the mean.
    mean = _compute_mean_loss(noise, rate)
    composed = np.fft.irfft(np.fft.rfft(mass) ** steps, len(mass))
    composed = np.roll(composed, steps - 1 + (len(mass) // 2 if steps % 2 == 0 else 0))
    loss = grid + steps * (mean - grid @ mass)
    above, below = (np.cumsum(part[::-1])[::-1] for part in (composed, composed * np.exp(-loss)))

    def find_epsilon(target: float) -> float:
        first = int(np.searchsorted(np.exp(loss) * below - above, -target))
        return math.log((above[first] - target) / below[first])

    try:
        return find_epsilon(delta), find_epsilon(delta - delta_error) + error
    except (ValueError, IndexError):  # δ is too small for the digits of the grid, where Opacus fails, too
        return None


def _compute_mean_loss(noise: float, rate: float) -> float:
    """Return the mean privacy loss of one release, if the unit is in."""
    if rate >= 1:
        return 1 / (2 * noise**2)
    x, step = np.linspace(-14 * noise, 1 + 14 * noise, 100001, retstep=True)
    loss = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))
    density = np.exp(-(x**2) / (2 * noise**2) + loss)
    return float(loss @ density * step / (noise * math.sqrt(2 * math.pi)))


def _compute_loss_cdf(loss: Array, noise: float, rate: float) -> Array:
    """Return the distribution function of the privacy loss of one release, if the unit is in."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        least = np.log1p(-rate)
        z = np.where(loss > least, np.log((np.exp(loss) + rate - 1) / rate), -np.inf)
        step = z * noise - 0.5 / noise
        with_unit, without = (
            special.erfc(step / math.sqrt(2)),
            special.erfc((step + 1 / noise) / math.sqrt(2)),
        )
    found: Array = 1 - (rate * with_unit + (1 - rate) * without) / 2
    return found


def _keep_finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back dp_accounting's warnings."""
    logger = logging.getLogger("absl")
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was
