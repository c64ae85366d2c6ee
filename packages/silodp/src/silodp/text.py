"""Parts of sentences for users: shortened values, messages of others, numbers with nouns, close names, whose code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from reprlib import Repr
from typing import Any

MAX_REASON_CHARACTERS = 200
"""Characters of somebody else's message that a sentence of ours passes on; torch writes up to a thousand."""
EXTENSIONS = ("analytics", "audit", "budgets", "deploy", "experiments", "integrations", "private")
"""The extension packages of this repository: each is a distribution silodp-NAME with the package silodp_NAME."""
_OURS = frozenset({"silodp", *(f"silodp_{name}" for name in EXTENSIONS)})
"""The packages of this repository."""


def describe_exception(error: BaseException) -> str:
    """Return "ValueError: message", the message shortened to its first line and `MAX_REASON_CHARACTERS` characters."""
    reason = first_line(error)
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, at most `MAX_REASON_CHARACTERS` characters of it."""
    # One line with single spaces: messages of other programs go into sentences, logs and JSON.
    line = " ".join(str(error).strip().partition("\n")[0].split())
    return line if len(line) <= MAX_REASON_CHARACTERS else line[: MAX_REASON_CHARACTERS - 1] + "…"


def format_duration(seconds: float) -> str:
    """Return a duration in seconds, minutes, hours or days."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 4 * 86400 else f"{seconds / 86400:,.0f} days"


def join_names(names: Iterable[str], word: str = "and") -> str:
    """Return "a, b and c", with another word before the last name if it is given; "" where there are no names."""
    *first, last = [*names] or [""]
    return f"{', '.join(first)} {word} {last}" if first else last


def quote(value: Any) -> str:
    """Return text, a number, a list or a table of these as TOML has it on one line, in a comment, too."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{quote(key)} = {quote(one)}' for key, one in value.items())} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def name_extra(extra: str, module: str = "silodp") -> str:
    """Return the commands that install an extra, for messages; a checkout stays editable, with its pinned versions.

    Args:
        extra: The name of the extra, or of an extension package.
        module: A module of the package that needs it.
    """
    package = module.partition(".")[0].replace("_", "-")
    within = f"packages/silodp-{extra}" if extra in EXTENSIONS else f"'packages/{package}[{extra}]'"
    if package != "silodp":  # no index has the core yet, which it needs
        within = f"packages/silodp -e {within}"
    return f"pip install 'silodp[{extra}]', or in a checkout pip install -c constraints.txt -e {within}"


def list_missing_packages() -> str:
    """Return the end of a sentence about an unknown name: which of our packages are not installed; "" if all are."""
    missing = [f"silodp-{name}" for name in EXTENSIONS if find_spec(f"silodp_{name}") is None]
    return f" Or it is of {join_names(missing, 'or')}: not installed here." if missing else ""


def name_package(named: object) -> str:
    """Return the top-level package where a class or function was defined; "" where it names none."""
    return str(getattr(named, "__module__", "")).partition(".")[0]


def is_own(named: object) -> bool:
    """Return whether a class or function is defined in a package of this repository."""
    return name_package(named) in _OURS


def is_own_module(name: str) -> bool:
    """Return whether a module, or "module:name", is of a package of this repository."""
    return name.partition(":")[0].partition(".")[0] in _OURS


def name_class(kind: type) -> str:
    """Return "file.py:Name": where a class is written."""
    # A class of a file that a configuration names has a module whose name no reader knows; the file is known.
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return f"{Path(file).name if file else kind.__module__}:{kind.__qualname__}"


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, for example "1 round" or "1,000 rounds"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorten(value: object) -> str:
    """Return `repr(value)`, of a long one the beginning and the end."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return f"a {type(value).__name__} of very many digits"


_REPR = Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 120, 120, 60


def suggest_name(name: str, known: Sequence[str]) -> str | None:
    """Return "did you mean 'NAME'?" for the closest of the known names; None where none is close."""
    # A beginning that is typed counts as close, however long the rest of the name is.
    beginnings = [word for word in known if name and word.startswith(name)]
    close = get_close_matches(name, known, n=1) or beginnings
    return f"did you mean '{close[0]}'?" if close else None
