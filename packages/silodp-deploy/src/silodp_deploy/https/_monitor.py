"""The status page that the server shows at `--monitor`, for a person to look at."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import silodp
from silodp_deploy.certificates import RENEWAL
from silodp_deploy.monitoring import State, describe_epsilon, describe_party

if TYPE_CHECKING:
    from jinja2 import Template

PAGE_HEADERS = {
    # Silos, coordinator and couriers choose names and texts: whatever they write, the page executes and loads nothing.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_LATE_SECONDS = 60.0
"""A silo that waits for a request asks every 20 seconds."""


def render_page(state: State) -> str:
    """Return the status page: one HTML file without scripts, which loads nothing."""
    from silodp.report.guarantee_text import (
        ADVERSARY_LABELS,  # a silo, which imports this package, renders no page
    )

    who = {str(name): told for name, told in ADVERSARY_LABELS.items()}
    silos = [
        {
            "name": name,
            "is_late": name in state.waited_for and (seen is None or seen > _LATE_SECONDS),
            "state": describe_party(state, name) + _tell_wait(seen, name in state.waited_for),
            "answers": state.answers.get(name, 0),
            "days": state.certificate_days.get(name),
        }
        for name, seen in state.seconds_since_seen.items()
    ]
    others = {
        name: days for name, days in state.certificate_days.items() if name not in state.seconds_since_seen
    }
    return _template().render(
        state=state,
        ended=[name for name, days in state.certificate_days.items() if days <= 0],
        renewal=RENEWAL,
        silos=silos,
        others=others,
        heading=_describe_run(state),
        share=min(100.0, 100.0 * state.round / max(1, state.rounds)),
        epsilon={who.get(name, name): describe_epsilon(epsilon) for name, epsilon in state.epsilon.items()},
        version=silodp.__version__,
    )


def _describe_run(state: State) -> str:
    """Return how far the run is, in words."""
    missing = [name for name, seen in state.seconds_since_seen.items() if seen is None]
    if state.stopped is not None:
        return "The run is over"
    if missing and not state.waited_for:
        return f"Waiting for {', '.join(missing)} to connect"
    return f"Round {min(state.round + 1, state.rounds)} of {state.rounds} is in progress"


def _tell_wait(seen: float | None, is_awaited: bool) -> str:
    """Return whether the answer of a silo that has connected is awaited, as a clause."""
    return ", its answer is awaited" if is_awaited and seen is not None else ""


@cache
def _template() -> Template:
    from silodp.report.formatting import make_environment

    return make_environment(Path(__file__).parent).get_template("monitor.html")
