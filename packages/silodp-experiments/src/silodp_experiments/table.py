"""`silodp table`: tables of papers, computed again, each number proven or only claimed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from silodp.cli._console import Json, show

if TYPE_CHECKING:
    from silodp_experiments.averaged_models import BoundRow

table_app = typer.Typer(help="Compute tables of papers again.", no_args_is_help=True)

_CLAIMED = "claimed"
"""After a number without a proof."""


@table_app.callback()
def _keep_group() -> None:
    """Keep the group: typer would replace it by its single command."""


@table_app.command("averaged-models")
def averaged_models(as_json: Json = False) -> None:
    """Compute ε of averaged models. Each cell (DDP, Table 1) is proven or only claimed."""
    # Here, as `silodp --help` imports this module for its commands alone, and must not wait for numpy.
    from silodp_experiments.averaged_models import DELTA, SAMPLING_PROBABILITY, compute_table

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
