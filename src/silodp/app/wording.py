"""Numbers as a reader of a page meets them: ε never rounded down, odds, durations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from silodp.app import plots
from silodp.errors import counted

_NEARLY_SURE = 0.999  # a guess this good against a person: ε excludes little


def epsilon_text(epsilon: float | None) -> str:
    """ε rounded up, never down: three figures, at least two decimals below 100; "none" for no guarantee."""
    value = plots.number(epsilon)
    if value is None:
        return "none"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(value))) if value < 1 else 2 if value < 100 else 0
    step = 10.0**-digits
    rounded = math.ceil(value / step - 1e-9) * step
    return f"{rounded:,.{digits}f}"


def times_text(epsilon: float) -> str:
    """e^ε in words, rounded up."""
    if epsilon > math.log(1e6):
        return "more than a million"
    factor = math.exp(epsilon)
    return f"{math.ceil(factor * 100) / 100:.2f}" if factor < 10 else f"{math.ceil(factor):,}"


def guess_text(epsilon: float, delta: float = 0.0) -> str:
    """How often one who starts from 50:50 is right at most, in percent, rounded up: (e^ε + δ)/(1 + e^ε)."""
    wrong = (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))
    percent = 100 * (1 - wrong)
    if percent > 99.99:
        return "nearly 100 %"
    digits = 1 if percent < 99 else 2
    return f"{math.ceil(percent * 10**digits) / 10**digits:.{digits}f} %"


def delta_text(delta: float) -> str:
    """δ with all its zeros as long as they can be counted."""
    return f"{delta:.9f}".rstrip("0") if delta >= 1e-6 else f"{delta:g}"


def odds_text(delta: float) -> str:
    """δ as "1 in N", N rounded down."""
    return f"1 in {math.floor(1 / delta + 1e-6):,}"


def measure_text(value: float | None) -> str:
    """A loss or a metric, four figures."""
    return "–" if value is None else f"{value:.4g}"


def bytes_text(size: int | None) -> str:
    """Bytes as one would say them; "–" where nobody counted."""
    if size is None:
        return "–"
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def duration_text(seconds: float) -> str:
    """Seconds as one would say them."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def is_vague(epsilon: float) -> bool:
    """Whether this ε lets a 50:50 guess become nearly certain."""
    return epsilon > math.log(_NEARLY_SURE / (1 - _NEARLY_SURE))


def clause_text(sentence: str) -> str:
    """A sentence as the end of another one: "… assumes that", then this."""
    begins = sentence[:2].istitle()  # "SGD …" does not
    return (sentence[:1].lower() + sentence[1:] if begins else sentence).removesuffix(".")


FILTERS: dict[str, Callable[..., Any]] = {
    "epsilon": epsilon_text,
    "measure": measure_text,
    "bytes": bytes_text,
    "duration": duration_text,
    "odds": odds_text,
    "guess": guess_text,
    "times": times_text,
    "vague": is_vague,
    "delta": delta_text,
    "clause": clause_text,
    "counted": counted,
}
"""By their names in templates."""
