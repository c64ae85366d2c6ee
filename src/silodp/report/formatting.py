"""Numbers as a reader of a page meets them: ε never rounded down, odds, durations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from silodp.errors import counted

_NEARLY_SURE = 0.999  # a guess this good: little is excluded


def as_number(value: Any) -> float | None:
    """Return the value as a finite number, or None where it is none."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    return float(value) if good and (isinstance(value, float) or abs(value) < 1 << 63) else None


def format_epsilon(epsilon: float | None) -> str:
    """ε rounded up, never down: three figures, at least two decimals below 100; "none" for no guarantee."""
    value = as_number(epsilon)
    if value is None:
        return "none"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(value))) if value < 1 else 2 if value < 100 else 0
    step = 10.0**-digits
    rounded = math.ceil(value / step - 1e-9) * step
    return f"{rounded:,.{digits}f}"


def format_times(epsilon: float) -> str:
    """e^ε in words, rounded up."""
    if epsilon > math.log(1e6):
        return "more than a million"
    factor = math.exp(epsilon)
    return f"{math.ceil(factor * 100) / 100:.2f}" if factor < 10 else f"{math.ceil(factor):,}"


def compute_attack_accuracy(epsilon: float, delta: float = 0.0) -> float:
    """How often an attacker who gives membership even odds is right at most, by ε and δ alone: (e^ε + δ)/(1 + e^ε).

    What is known besides ε and δ makes it smaller: see `silodp.accounting.accountant`.
    """
    return 1 - (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))


def format_accuracy(accuracy: float) -> str:
    """A probability in percent, rounded up."""
    percent = 100 * accuracy
    if percent > 99.99:
        return "nearly 100 %"
    digits = 1 if percent < 99 else 2
    return f"{math.ceil(percent * 10**digits - 1e-9) / 10**digits:.{digits}f} %"


def format_delta(delta: float) -> str:
    """δ with all its zeros as long as they can be counted."""
    return f"{delta:.9f}".rstrip("0") if delta >= 1e-6 else f"{delta:g}"


def format_odds(probability: float) -> str:
    """A small probability as "1 in N", N rounded down; in percent from a tenth on."""
    if probability >= 0.1:
        return format_accuracy(probability)
    return f"1 in {math.floor(1 / probability + 1e-6):,}" if probability > 0 else "0"


def format_measure(value: float | None) -> str:
    """A loss or a metric, four figures."""
    return "–" if value is None else f"{value:.4g}"


def format_bytes(size: int | None) -> str:
    """Bytes as one would say them; "–" where nobody counted."""
    if size is None:
        return "–"
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def format_duration(seconds: float) -> str:
    """Seconds as one would say them."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def is_uninformative(accuracy: float) -> bool:
    """Whether a guess may be nearly certain, so that little is excluded."""
    return accuracy > _NEARLY_SURE


def without_folders(text: str) -> str:
    """A text with every absolute path shortened to its last part: a page is handed on, and names no user's folders."""
    quoted = _QUOTED_PATH.sub(lambda found: f"{found[1]}…/{found[2]}{found[1]}", text)
    return _PATH.sub("…/", quoted)


_START = r"(?:file://)?(?:~|[A-Za-z]:)?[\\/]"
_QUOTED_PATH = re.compile(rf"""(["']){_START}[^"'\n]*?([^"'\\/\n]+)\1""")  # may hold spaces
_PATH = re.compile(r"(?<![\w.…/<:~-])(?:~|[A-Za-z]:)?(?:[\\/][\w.@ +-]*[\w.@+-])+[\\/](?=[\w.])")


def as_clause(sentence: str) -> str:
    """A sentence as the end of another one: "… assumes that", then this."""
    begins = sentence[:2].istitle()  # "SGD …" does not
    return (sentence[:1].lower() + sentence[1:] if begins else sentence).removesuffix(".")


FILTERS: dict[str, Callable[..., Any]] = {
    "epsilon": format_epsilon,
    "measure": format_measure,
    "bytes": format_bytes,
    "duration": format_duration,
    "odds": format_odds,
    "accuracy": format_accuracy,
    "without_folders": without_folders,
    "times": format_times,
    "vague": is_uninformative,
    "delta": format_delta,
    "clause": as_clause,
    "counted": counted,
}
"""By their names in templates."""
