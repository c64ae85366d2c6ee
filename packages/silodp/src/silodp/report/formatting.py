"""Numbers as text for readers: ε is never rounded down; odds, sizes and durations; and pages made from templates.

In HTML every value is escaped; templates that end in .jinja are Markdown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.accounting.guarantee import format_epsilon
from silodp.errors import SilodpError
from silodp.text import format_duration, pluralize

if TYPE_CHECKING:
    from jinja2 import Environment

_UNINFORMATIVE_ACCURACY = 0.999
"""An attack accuracy bound above this excludes little."""


PICTURES = ("svg", "pdf", "png")
"""The formats of pictures, by the ends of their file names."""
Z_95 = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution."""


def as_number(value: Any) -> float | None:
    """Return a finite number as float; None for everything else, a whole number of more than 63 bits included."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    return float(value) if good and (isinstance(value, float) or abs(value) < 1 << 63) else None


def find_interval(value: float, error: float, least: float = 0.0, most: float = 1.0) -> tuple[float, float]:
    """Return the 95 % interval value ± 1.96 · standard error, cut off at the least and the most that it can be."""
    return max(value - Z_95 * error, least), min(value + Z_95 * error, most)


def format_factor(epsilon: float) -> str:
    """Return e^ε rounded up, "more than a million" for large ones."""
    if epsilon > math.log(1e6):
        return "more than a million"
    factor = math.exp(epsilon)
    return f"{math.ceil(factor * 100) / 100:.2f}" if factor < 10 else f"{math.ceil(factor):,}"


def format_accuracy(accuracy: float) -> str:
    """Return a probability in percent, rounded up."""
    percent = 100 * accuracy
    if percent > 99.99:
        return "nearly 100 %"
    digits = 1 if percent < 99 else 2
    # The small number undoes rounding errors of floats: 57.0 % must not become 57.1 %.
    return f"{math.ceil(percent * 10**digits - 1e-9) / 10**digits:.{digits}f} %"


def format_rate(rate: float) -> str:
    """Return a true positive rate in percent with three figures, rounded up."""
    if rate >= 0.1 or rate <= 0:
        return format_accuracy(rate)
    digits = 2 - math.floor(math.log10(100 * rate))
    return f"{math.ceil(100 * rate * 10**digits - 1e-9) / 10**digits:.{digits}f} %"


def is_uninformative(accuracy: float) -> bool:
    """Return whether a bound on attack accuracy is so close to 1 that it excludes little."""
    return accuracy > _UNINFORMATIVE_ACCURACY


def format_delta(delta: float) -> str:
    """Return δ with all its zeros, from 1e-6 on; smaller ones as a power of ten."""
    return f"{delta:.9f}".rstrip("0") if delta >= 1e-6 else f"{delta:g}"


def format_odds(probability: float) -> str:
    """Return a small probability as "1 in N", N rounded down; in percent from a tenth on."""
    if probability >= 0.1:
        return format_accuracy(probability)
    # N is rounded down, so that the stated probability is never smaller than the bound.
    return f"1 in {math.floor(1 / probability + 1e-6):,}" if probability > 0 else "0"


def format_measure(value: float | None) -> str:
    """Return a loss or a metric with four figures; "–" where there is none."""
    return "–" if value is None else f"{value:.4g}"


def format_count(value: float) -> str:
    """Return a number of records, which noise has made a fraction, as a whole number."""
    return f"{round(value):,}"


def format_lower_limit(epsilon: float | None) -> str:
    """Return a lower limit of ε rounded down to three figures; "–" for None."""
    if epsilon is None:
        return "–"
    # Down: a limit that is rounded up would claim a leak that was not measured.
    digits = 2 - math.floor(math.log10(epsilon)) if epsilon > 0 else 0
    return f"{math.floor(epsilon * 10.0**digits + 1e-9) / 10.0**digits:.10g}"


def format_bytes(size: int | None) -> str:
    """Return a number of bytes with its unit; "–" where it is not known."""
    if size is None:
        return "–"
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def without_folders(text: str) -> str:
    """Return a text with every absolute path shortened to its last part: a page is shared, and names no folders."""
    # Quoted paths first: they may contain spaces, at which the other pattern ends.
    quoted = _QUOTED_PATH.sub(lambda found: f"{found[1]}…/{found[2]}{found[1]}", text)
    return _PATH.sub("…/", quoted)


_START = r"(?:file://)?(?:~|[A-Za-z]:)?[\\/]"
_QUOTED_PATH = re.compile(rf"""(["']){_START}[^"'\n]*?([^"'\\/\n]+)\1""")  # may contain spaces
_PATH = re.compile(r"(?<![\w.…/<:~-])(?:~|[A-Za-z]:)?(?:[\\/][\w.@ +-]*[\w.@+-])+[\\/](?=[\w.])")


def join_lines(text: str) -> str:
    """Return a text as one line, with single spaces."""
    return " ".join(text.split())


def format_code(name: str) -> str:
    """Return a name for a code span of Markdown, which it cannot end."""
    return join_lines(name).replace("`", "'")


def quote_names(names: Iterable[object]) -> str:
    """Return names as code spans of Markdown, separated by commas."""
    return ", ".join(f"`{format_code(str(name))}`" for name in names)


def format_cell(text: str) -> str:
    """Return a text for a cell of a table of Markdown, which it cannot end."""
    return join_lines(text).replace("|", r"\|")


def as_clause(sentence: str) -> str:
    """Return a sentence as the end of another one, for example after "assuming that"."""
    is_word = sentence[:2].istitle()  # "SGD …" keeps its capitals
    return (sentence[:1].lower() + sentence[1:] if is_word else sentence).removesuffix(".")


def format_yaml(value: object) -> str:
    """Return a value as YAML on one line: JSON is YAML, and a text in it can neither end nor begin anything."""
    text = json.dumps(value, ensure_ascii=False)
    # Readers of YAML 1.1 take 1e-05, without a point, for a text.
    is_bare = isinstance(value, float) and "e" in text and "." not in text
    return text.replace("e", ".0e") if is_bare else text


FILTERS: dict[str, Callable[..., Any]] = {
    "epsilon": lambda value: format_epsilon(as_number(value)),
    "factor": format_factor,
    "measure": format_measure,
    "count": format_count,
    "lower_limit": format_lower_limit,
    "bytes": format_bytes,
    "odds": format_odds,
    "accuracy": format_accuracy,
    "rate": format_rate,
    "uninformative": is_uninformative,
    "without_folders": without_folders,
    "delta": format_delta,
    "clause": as_clause,
    "pluralize": pluralize,
    "duration": format_duration,
    "one_line": join_lines,
    "code": format_code,
    "quoted": quote_names,
    "cell": format_cell,
    "yaml": format_yaml,
}
"""Filters of the templates by name."""


def check_picture_path(path: Path) -> None:
    """Check that a file name ends in one of `PICTURES`."""
    if path.suffix.lower().removeprefix(".") not in PICTURES:
        raise SilodpError(
            f"plot = '{path}': let the file name end in .{', .'.join(PICTURES)}.",
            code="argument.value",
            field="plot",
        )


def render(template: str | Path, folders: Sequence[Path] = (), **values: Any) -> str:
    """Return a page from a template; in HTML every value is escaped unless it is `Markup`.

    Args:
        template: The name of a file in this folder, or a path; a template elsewhere finds those of this folder, too.
        folders: Further folders whose templates it finds.
        values: The values, by their names in the template.
    """
    home = Path(__file__).parent
    path = home / template
    return _make_environment(path.parent, *folders, home).get_template(path.name).render(**values)


@cache
def _make_environment(*folders: Path) -> Environment:
    """Return one environment for all pages of a folder: it keeps the compiled templates."""
    environment = make_environment(*folders)
    environment.filters |= FILTERS
    return environment


def make_environment(*folders: Path) -> Environment:
    """Return what renders the templates of folders; a missing value is an error.

    Every value is escaped as HTML, but in files .jinja, which are Markdown.
    """
    # Imported here: `silodp epsilon`, which formats numbers, renders no page.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=select_autoescape(disabled_extensions=("jinja",), default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
