"""A run that was cut off: how far it came, how to go on, and what is different this time."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from silodp.config.schema import RunConfig, load_config
from silodp.errors import SilodpError


def how_to_go_on(directory: Path) -> str:
    """The line that a person sees who has interrupted a run."""
    config = directory / "config.toml"
    if not config.exists():
        return f"interrupted before the first round; begin again, in another directory if {directory} exists"
    command = shlex.join(["silodp", "run", str(directory), "--resume"])
    return f"interrupted after round {_last_round(directory)}; continue with: {command}"


def configuration_of(directory: Path) -> Path:
    """Return the configuration that a run left in its directory.

    Raises:
        SilodpError: there is none.
    """
    path = directory / "config.toml"
    if not path.is_file():
        raise SilodpError(
            f"{directory} has no config.toml, so 'silodp run' has not trained there: name a configuration and the "
            "directory, silodp run CONFIG.toml --out DIR --resume.",
            code="config.path",
        )
    return path


def notes_of(directory: Path) -> list[str]:
    """Return the comments in a run's config.toml on what was changed when it was resumed before."""
    with suppress(OSError, UnicodeDecodeError):
        lines = (directory / "config.toml").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.startswith("# After round ")]
    return []


def differences(config: RunConfig, directory: Path) -> list[str]:
    """The keys in which a configuration differs from the one that `directory` holds, each with both values."""
    with suppress(SilodpError):
        old, new = (_flat(each.model_dump(mode="json", by_alias=True)) for each in (_kept(directory), config))
        return [
            f"{key} was {_shown(old.get(key))}, now {_shown(new.get(key))}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
        ]
    return []  # a run from Python has no configuration


def budgeted_rounds(config: RunConfig) -> int | None:
    """The rounds that budgets of one's own are laid out over; None where the method has none."""
    return config.method().budgeted_rounds


def previous_budgeted_rounds(directory: Path) -> int | None:
    """The same for the run in `directory`."""
    with suppress(SilodpError):
        return budgeted_rounds(_kept(directory))
    return None


def _kept(directory: Path) -> RunConfig:
    return load_config(directory / "config.toml")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def _last_round(directory: Path) -> int:
    """Of the last whole line of metrics.jsonl; the line being written when the run was stopped may be torn."""
    done = 0
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            done = int(json.loads(line)["round"])
    return done
