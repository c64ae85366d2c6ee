"""`silodp table`: tables of papers, computed again, each number proven or only claimed.

Table 1 of the DDP paper is on secure aggregation with local steps: N parties train on disjoint data, each with DP-SGD
at ε = 5 by itself, and only the average of their models is released (docs/decoupled.md). Noise of all parties adds up;
whether all of it protects every step depends on the trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import numpy as np
import typer

from silodp.accounting.accountant import EventCount, compute_epsilon
from silodp.accounting.events import CorrelatedReleases, Gaussian, PoissonSampled
from silodp.accounting.rdp import RdpAccountant
from silodp.cli._console import Json, show

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


table_app = typer.Typer(help="Compute tables of papers again.", no_args_is_help=True)

_CLAIMED = "claimed"
"""After a number without a proof."""


@table_app.callback()
def _keep_group() -> None:
    """Keep the group: typer would replace it by its single command."""


@table_app.command("averaged-models")
def averaged_models(as_json: Json = False) -> None:
    """Compute ε of averaged models. Each cell (DDP, Table 1) is proven or only claimed."""
    rows = compute_table()
    show(
        {"delta": DELTA, "record_sampling": SAMPLING_PROBABILITY, "rows": [asdict(row) for row in rows]},
        as_json,
        format_table(rows),
    )


def format_table(rows: Sequence[BoundRow]) -> list[str]:
    """Return lines of text: a block for each number of steps, a line for each trajectory and conversion."""
    lines = [
        "ε of one record at δ = 1e-05, q = 0.1, when only the average of the parties' models is released.",
        "The first word of a line is the trajectory (the noise of local models), the second the conversion to ε.",
        "",
    ]
    cells = {(row.steps, row.trajectory, row.conversion, row.parties): row for row in rows}
    kinds = list(dict.fromkeys((row.trajectory, row.conversion) for row in rows))
    for steps in dict.fromkeys(row.steps for row in rows):
        parties = list(dict.fromkeys(row.parties for row in rows if row.steps == steps))
        first = [cells[steps, *kinds[0], number] for number in parties]
        lines.append(
            _format_line(
                f"{steps} step{'s' if steps > 1 else ''}",
                [f"{number} part{'ies' if number > 1 else 'y'}" for number in parties],
            )
        )
        lines.append(_format_line("  σ of the sum", [f"{row.noise_multiplier:.3f}" for row in first]))
        for trajectory, conversion in kinds:
            found = [cells[steps, trajectory, conversion, number] for number in parties]
            lines.append(_format_line(f"  {trajectory}, {conversion}", [_format_cell(row) for row in found]))
        lines.append("")
    return [
        *lines,
        f"{_CLAIMED}: by Theorem 4.6, not proven, no guarantee (a test has a counterexample); all others are proven.",
        "conversion 'paper': ρ + ln(1/δ)/(α - 1), looser than 'rdp'; 'decoupled': local models have noise of 2σ.",
    ]


def _format_line(name: str, cells: Sequence[str]) -> str:
    return f"{name:20}" + "".join(f"{cell:>16}" for cell in cells)


def _format_cell(row: BoundRow) -> str:
    return f"{row.epsilon:.3f} {_CLAIMED if row.status == 'claimed' else '':{len(_CLAIMED)}}"
