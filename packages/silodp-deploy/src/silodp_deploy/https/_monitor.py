"""What the server shows at `--monitor`: metrics in the text format of Prometheus, and a status page to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import silodp
from silodp.accounting.guarantee import format_epsilon
from silodp.wire.transport import Traffic
from silodp_deploy.certificates import RENEWAL
from silodp_deploy.status import describe_seen

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


@dataclass(frozen=True)
class State:
    """What is known of a run at one moment; nothing that the server's status.json does not have.

    Attributes:
        seconds_since_seen: Seconds since the last call of each silo; None before its first call.
        answers: Number of answers that have left each silo, at least.
        waited_for: Names of the silos whose answers are awaited.
        traffic: Bytes of the messages to silos and from them.
        name: Name of the consortium.
        code: The digest of its public folder, as operators compare it.
        round: Number of rounds that are done.
        rounds: Number of rounds of the run, T.
        about: A sentence that says at which δ, and for which unit, ε holds.
        epsilon: ε of all that was released, by adversary; None: no guarantee.
        seconds_left: Estimated seconds until the end of the run; None where no estimate is known.
        certificate_days: Days until each certificate ends, by party and for the authority.
        error: The error with which an earlier process of the server stopped; None after the first round that is done,
            or where there was none.
        stopped: Why the run is over; None while it is not.
    """

    seconds_since_seen: Mapping[str, float | None]
    answers: Mapping[str, int]
    waited_for: tuple[str, ...]
    traffic: Traffic
    name: str = ""
    code: str = ""
    round: int = 0
    rounds: int = 0
    about: str = ""
    epsilon: Mapping[str, float | None] = field(default_factory=dict)
    seconds_left: float | None = None
    certificate_days: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    stopped: str | None = None


def format_metrics(state: State) -> str:
    """Return the metrics in the text format of Prometheus.

    Source: "Exposition formats" of the documentation of Prometheus, text-based format, version 0.0.4.
    """
    traffic = {"down": state.traffic.down, "up": state.traffic.up}
    return "".join((
        _format("bytes_total", "counter", "Bytes of messages to silos (down) and from them (up).", "direction",
                traffic),
        _format("answers_total", "counter", "Answers that have left a silo, at least.", "silo", state.answers),
        _format("seconds_since_silo_was_seen", "gauge", "Seconds since the last call of a silo; NaN before its first.",
                "silo", state.seconds_since_seen),
        _format("rounds_done", "gauge", "Rounds done.", None, {"": state.round}),
        _format("rounds", "gauge", "Rounds of the run.", None, {"": state.rounds}),
        _format("epsilon", "gauge", "Privacy loss of all that was released, an upper bound; NaN: no guarantee.",
                "adversary", state.epsilon),
        _format("certificate_days_left", "gauge", "Days until a certificate ends.", "party", state.certificate_days),
    ))  # fmt: skip


def _format(name: str, kind: str, about: str, label: str | None, values: Mapping[str, float | None]) -> str:
    """Return the lines of one metric."""
    text = f"# HELP silodp_{name} {about}\n# TYPE silodp_{name} {kind}\n"
    for key, value in values.items():
        labels = "" if label is None else f'{{{label}="{_escape(key)}"}}'
        text += f"silodp_{name}{labels} {_format_value(value, name == 'epsilon')}\n"
    return text


def _format_value(value: float | None, is_bound: bool) -> str:
    # Without a line there would be no such silo or adversary; NaN says that there is no number yet, or none at all.
    if value is None:
        return "NaN"
    if isinstance(value, int):
        return str(value)
    # A bound is never rounded down: it would promise more than was proven.
    return (
        f"{math.ceil(value * 10_000) / 10_000:.4f}" if is_bound and math.isfinite(value) else f"{value:.3f}"
    )


def _escape(label: str) -> str:
    # By the text format of Prometheus; the backslash first, or it would double those of the others.
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


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
            "state": _describe_silo(seen, name in state.waited_for),
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
        epsilon={
            who.get(name, name): "no guarantee" if epsilon is None else format_epsilon(epsilon)
            for name, epsilon in state.epsilon.items()
        },
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


def _describe_silo(seen: float | None, is_awaited: bool) -> str:
    """Return what is known of a silo, in words."""
    is_told = is_awaited and seen is not None
    return describe_seen(seen) + (", its answer is awaited" if is_told else "")


@cache
def _template() -> Template:
    from silodp.report.formatting import make_environment

    return make_environment(Path(__file__).parent).get_template("monitor.html")
