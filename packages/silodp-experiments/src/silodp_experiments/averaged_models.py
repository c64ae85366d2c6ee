"""Table 1 of the DDP paper (secure aggregation with local steps): which of its ε are proven, and which only claimed.

N parties train on disjoint data, each with DP-SGD at ε = 5 by itself, and only the average of their models is released
(DDP, Table 1; docs/decoupled.md): noise of all parties adds up, and whether all of it protects every step depends on
the trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from silodp.accounting.accountant import EventCount, compute_epsilon
from silodp.accounting.events import CorrelatedReleases, Gaussian, PoissonSampled
from silodp.accounting.rdp import RdpAccountant

Conversion = Literal["paper", "rdp", "pld"]
Trajectory = Literal["paper", "local", "decoupled"]
Status = Literal["proven", "claimed"]

SAMPLING_PROBABILITY, DELTA = 0.1, 1e-5
PARTIES = (1, 2, 5, 10)
NOISE_MULTIPLIERS: dict[int, tuple[float, ...]] = {
    1: (0.690, 0.976, 1.544, 2.183),
    10: (0.902, 1.276, 2.017, 2.852),
    50: (1.179, 1.668, 2.637, 3.730),
}
"""σ_total by the number of local steps, for PARTIES; one party's is each party's own (DDP, Table 1; a digit more)."""


@dataclass(frozen=True)
class BoundRow:
    """ε at δ = 1e-5 for one record, q = .1, against whoever sees only the average.

    Attributes:
        steps: The number of local steps J of each party.
        parties: The number of parties N.
        noise_multiplier: The noise multiplier σ_total of the sum over all parties.
        trajectory: The charge of docs/decoupled.md. Under `decoupled` parties move with noise 2σ_total of their own
            besides, so it costs one party more.
        conversion: From Rényi orders to ε: the paper's, ρ + ln(1/δ)/(α−1), or an accountant of silodp.
        epsilon: The resulting ε.
        status: "claimed" where nobody has proven this ε, else "proven".
    """

    steps: int
    parties: int
    noise_multiplier: float
    trajectory: Trajectory
    conversion: Conversion
    epsilon: float
    status: Status


def compute_table() -> tuple[BoundRow, ...]:
    """Compute ε of every cell of Table 1, by steps, then parties.

    Theorem 4.6, `paper`, is proven where there is nobody to share noise with, or nothing but one step to protect.

    Source: DDP, Table 1 and Theorem 4.6.
    """
    return tuple(
        BoundRow(
            steps,
            parties,
            total,
            trajectory,
            conversion,
            _convert(conversion, list_charges(trajectory, steps, noises[0], total)),
            "claimed" if trajectory == "paper" and steps > 1 and parties > 1 else "proven",
        )
        for steps, noises in NOISE_MULTIPLIERS.items()
        for parties, total in zip(PARTIES, noises, strict=True)
        for trajectory in get_args(Trajectory)
        for conversion in get_args(Conversion)
    )


def list_charges(trajectory: Trajectory, steps: int, own: float, total: float) -> list[EventCount]:
    """Return the events of one record: J − 1 steps by the trajectory; the last feeds no gradient, at σ_total."""
    looks: dict[Trajectory, Gaussian | CorrelatedReleases] = {
        "paper": Gaussian(total),
        "local": Gaussian(own),
        "decoupled": CorrelatedReleases(Gaussian(2 * total), Gaussian(total)),
    }
    return [
        # Later gradients are taken at the models after these steps, so what the models show is charged, too.
        (PoissonSampled(SAMPLING_PROBABILITY, looks[trajectory]), steps - 1),
        (PoissonSampled(SAMPLING_PROBABILITY, Gaussian(total)), 1),
    ]


def _convert(conversion: Conversion, spent: list[EventCount]) -> float:
    """Return ε; "paper" is ρ + ln(1/δ)/(α−1) (Mironov 2017, Proposition 3), as the paper converts."""
    if conversion != "paper":
        return compute_epsilon(spent, DELTA, conversion)
    (kind,) = RdpAccountant().compose(spent).kinds
    alpha, rho = kind.curve()
    return float((rho + np.log(1 / DELTA) / (alpha - 1)).min())
