"""What is known of a run at one moment, its metrics in the text format of Prometheus, and what somebody has to see to.

`/metrics` of a server and `silodp deploy status --metrics` print the same metrics. The alerts of
packaging/prometheus/silodp.rules.yml are the problems that `silodp deploy status --check` finds, by the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from silodp.accounting.guarantee import format_epsilon
from silodp.text import format_duration
from silodp.wire.transport import Traffic
from silodp_deploy.certificates import RENEWAL
from silodp_deploy.status import describe_seen, format_share

URGENT_DAYS = 7
"""A certificate that ends sooner is a problem; logs warn of it for a month before."""
SILENT_SECONDS = 900.0
"""A party that was not heard of for longer is a problem. While a silo computes, it says nothing."""
STUCK_SECONDS = 3600.0
"""A round that takes longer is a problem, unless the operator says otherwise."""
_SPENT, _DONE = 0.95, 0.9
"""Where this share of the agreed ε is spent before this share of the rounds is done, the run will end early."""
_MAX_STATUS_SECONDS = 60.0
"""A process that runs writes its status.json every ten seconds."""


@dataclass(frozen=True)
class State:
    """What is known of a run at one moment.

    Attributes:
        seconds_since_seen: Seconds since the last call of each silo, or at a silo since the server's last reply; None
            before the first.
        answers: Number of answers that have left each silo, at least.
        waited_for: Names of the silos whose answers are awaited.
        traffic: Bytes of the messages to silos and from them; None: not known.
        name: Name of the consortium.
        code: The digest of its public folder, as operators compare it.
        round: Number of rounds that are done.
        rounds: Number of rounds of the run, T.
        about: A sentence that says at which δ, and for which unit, ε holds.
        epsilon: ε of all that was released, by adversary; None: no guarantee.
        epsilon_limit: The most that `epsilon` may become: at the server ε of the whole run as it was agreed, at a silo
            the limits of its policy; None: no guarantee.
        seconds_left: Estimated seconds until the end of the run; None where no estimate is known.
        seconds_since_round: Seconds since a round was done, or since the process started; None: not known.
        certificate_days: Days until each certificate ends, by party and for the authority.
        transfers: While an answer is on its way: by the other party, its bytes that have passed, and its length (0: not
            known).
        error: The last problem: at a server the error with which an earlier process stopped; None after the first
            round that is done, or where there was none.
        stopped: Why the run is over; None while it is not.
        is_running: Whether the process of the party runs.
    """

    seconds_since_seen: Mapping[str, float | None]
    answers: Mapping[str, int]
    waited_for: tuple[str, ...] = ()
    traffic: Traffic | None = None
    name: str = ""
    code: str = ""
    round: int = 0
    rounds: int = 0
    about: str = ""
    epsilon: Mapping[str, float | None] = field(default_factory=dict)
    epsilon_limit: Mapping[str, float | None] = field(default_factory=dict)
    seconds_left: float | None = None
    seconds_since_round: float | None = None
    certificate_days: Mapping[str, float] = field(default_factory=dict)
    transfers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    error: str | None = None
    stopped: str | None = None
    is_running: bool = True


def read_state(found: Mapping[str, Any], since: float) -> State:
    """Return the state that status.json tells.

    Args:
        found: Result of `status.read_status`.
        since: Seconds since the file was written.
    """
    seen = found["seconds_since_seen"]
    passed = found.get("seconds_since_round")
    return State(
        {name: None if seconds is None else seconds + since for name, seconds in seen.items()},
        found.get("answers", {}),
        round=found["round"],
        rounds=found["rounds"],
        epsilon=found["epsilon"],
        epsilon_limit=found.get("epsilon_limit", {}),
        seconds_since_round=None if passed is None else passed + since,
        certificate_days=found.get("certificate_days", {}),
        transfers={name: (one["done"], one["size"]) for name, one in found.get("transfers", {}).items()},
        error=found["error"],
        stopped=found.get("stopped"),
        is_running=since < _MAX_STATUS_SECONDS and found.get("running", True),
    )


def describe_epsilon(epsilon: float | None) -> str:
    """Return ε, rounded up; "no guarantee" for None or infinity."""
    return "no guarantee" if epsilon is None or math.isinf(epsilon) else format_epsilon(epsilon)


def describe_party(state: State, name: str) -> str:
    """Return in words when a party was heard of, and how much of an answer that is on its way has passed."""
    told = describe_seen(state.seconds_since_seen[name])
    if name in state.transfers:
        told += f", {format_share(*state.transfers[name])} of an answer have passed"
    return told


def find_problems(state: State, stuck_seconds: float = STUCK_SECONDS) -> dict[str, str]:
    """Return what somebody has to see to: by the name of the alert, a sentence.

    Args:
        state: What is known.
        stuck_seconds: Seconds that a round may take.
    """
    problems = {}
    if not state.is_running and state.stopped is None:
        problems["SilodpDown"] = (
            "the process of this party has ended, or has not written for a minute: start it again"
        )
    if state.error is not None:
        problems["SilodpError"] = f"last error: {state.error}"
    passed, is_at_work = state.seconds_since_round, state.is_running and state.stopped is None
    if passed is not None and passed > stuck_seconds and is_at_work:
        problems["SilodpStuck"] = (
            f"no round was done for {format_duration(passed)}: see in the log who is waited for"
        )
    silent = [
        name
        for name, seen in state.seconds_since_seen.items()
        if seen is not None and seen > SILENT_SECONDS and is_at_work
    ]
    if silent:
        problems["SilodpSilent"] = f"nothing was heard of {', '.join(silent)}: ask who runs the machine"
    urgent = [name for name, days in state.certificate_days.items() if days < URGENT_DAYS]
    if urgent:
        problems["SilodpCertificateEnds"] = (
            f"certificates end in less than {URGENT_DAYS} days, of {', '.join(urgent)}: {RENEWAL}"
        )
    pairs = {name: (spent, state.epsilon_limit.get(name)) for name, spent in state.epsilon.items()}
    short = [
        name
        for name, (spent, limit) in pairs.items()
        if spent is not None and limit is not None and spent > _SPENT * limit
    ]
    if short and state.round < _DONE * state.rounds:
        problems["SilodpEpsilonShort"] = (
            f"{100 * _SPENT:.0f} % of the agreed ε is spent against {', '.join(short)} after {state.round} of "
            f"{state.rounds} rounds: the run will end early"
        )
    return problems


def format_metrics(state: State, folder: str | None = None) -> str:
    """Return the metrics in the text format of Prometheus.

    Source: "Exposition formats" of the documentation of Prometheus, text-based format, version 0.0.4.

    Args:
        state: What is known.
        folder: A label of all metrics, by which the parties of one machine are told apart; None: no label.
    """
    common = {} if folder is None else {"folder": folder}
    traffic = {} if state.traffic is None else {"down": state.traffic.down, "up": state.traffic.up}
    metrics: list[tuple[str, str, str, str | None, Mapping[str, float | None]]] = [
        ("bytes_total", "counter", "Bytes of messages to silos (down) and from them (up).", "direction", traffic),
        ("answers_total", "counter", "Answers that have left a silo, at least.", "silo", state.answers),
        ("seconds_since_seen", "gauge", "Seconds since a party was heard of; NaN before its first call.", "party",
         state.seconds_since_seen),
        ("transfer_bytes", "gauge", "Bytes of an answer that have passed while it is on its way.", "party",
         {name: done for name, (done, _) in state.transfers.items()}),
        ("transfer_size_bytes", "gauge", "Length of an answer that is on its way; 0: not known.", "party",
         {name: size for name, (_, size) in state.transfers.items()}),
        ("rounds_done", "gauge", "Rounds done.", None, {"": state.round}),
        ("rounds", "gauge", "Rounds of the run.", None, {"": state.rounds}),
        ("seconds_since_round", "gauge", "Seconds since a round was done, or since the start.", None,
         {"": state.seconds_since_round}),
        ("epsilon", "gauge", "Privacy loss of all that was released, an upper bound; NaN: no guarantee.",
         "adversary", state.epsilon),
        ("epsilon_limit", "gauge", "The most that silodp_epsilon may become; NaN: no guarantee.", "adversary",
         state.epsilon_limit),
        ("certificate_days_left", "gauge", "Days until a certificate ends.", "party", state.certificate_days),
        ("running", "gauge", "1 while the process of the party runs.", None, {"": int(state.is_running)}),
        ("error", "gauge", "1 where there was an error, see 'silodp deploy status'.", None,
         {"": int(state.error is not None)}),
        ("run_over", "gauge", "1 when the run is over.", None, {"": int(state.stopped is not None)}),
    ]  # fmt: skip
    return "".join(_format(*one, common) for one in metrics)


def _format(
    name: str,
    kind: str,
    about: str,
    label: str | None,
    values: Mapping[str, float | None],
    common: Mapping[str, str],
) -> str:
    """Return the lines of one metric."""
    if not values:
        return ""
    text = f"# HELP silodp_{name} {about}\n# TYPE silodp_{name} {kind}\n"
    for key, value in values.items():
        labels = {**common, **({} if label is None else {label: key})}
        told = ",".join(f'{one}="{_escape(its)}"' for one, its in labels.items())
        text += f"silodp_{name}{f'{{{told}}}' if told else ''} {_format_value(value, name.startswith('epsilon'))}\n"
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
