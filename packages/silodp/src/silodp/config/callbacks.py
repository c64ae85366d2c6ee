"""Callbacks that a configuration names in [[callbacks]], or the option --log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from silodp._lazy import make_missing_error
from silodp.config.build import build, split_name
from silodp.config.toml_values import TomlTable
from silodp.plugins import find_plugin
from silodp.runtime.callback import CALLBACKS, Callback, Result, RoundResult, RunStart
from silodp.text import describe_exception

_log = logging.getLogger(__name__)


class SafeCallback(Callback):
    """A callback that never stops a run: its first failure is a warning, and it is not called again.

    Args:
        callback: The callback.
        name: Its name, for the warning.
    """

    def __init__(self, callback: Callback, name: str) -> None:
        self._callback: Callback | None = callback
        self._name = name

    def on_start(self, run: RunStart) -> None:
        """Start the callback."""
        self._try(lambda callback: callback.on_start(run), "in this run")

    def before_round(self, round_: int) -> None:
        """Tell it of a round that begins."""
        self._try(lambda callback: callback.before_round(round_), f"from round {round_} on")

    def after_round(self, result: RoundResult) -> None:
        """Tell it of a round."""
        self._try(lambda callback: callback.after_round(result), f"from round {result.round} on")

    def on_end(self, result: Result | None) -> None:
        """End the callback."""
        self._try(lambda callback: callback.on_end(result), "at the end of the run")

    def _try(self, act: Callable[[Callback], None], since: str) -> None:
        """Call it unless it has failed before; `since` says in a warning what is missing after a failure."""
        if self._callback is None:
            return
        # Once it has failed it is not asked again: a server that is gone would hold up every round.
        try:
            act(self._callback)
        except Exception as error:
            # Whatever other code raises: hours of training must not end with it.
            self._callback = None
            _log.warning(
                "%s is not called %s (%s); the run goes on", self._name, since, describe_exception(error)
            )


def make_callbacks(
    tables: Iterable[Mapping[str, Any]] | None, where: str = "callbacks.name"
) -> list[Callback]:
    """Make the callbacks of tables with a name and arguments; none of them stops a run later.

    Args:
        tables: The tables; None: none.
        where: The field or option that names them, for messages.

    Raises:
        SilodpError: A name is not known, an argument does not fit, or a package is not installed.
    """
    made: list[Callback] = []
    for table in tables or ():
        name, values = split_name(
            table, "callbacks", 'set the name of a callback, for example name = "tensorboard"'
        )
        kind = find_plugin(name, CALLBACKS, Callback, where)
        made.append(SafeCallback(build(kind, values, name, "callbacks"), name))
    return made


def read_log_options(texts: Sequence[str], private: bool | None) -> list[Callback]:
    """Make the trackers of the option --log.

    Args:
        texts: NAME, which logs into the folder NAME of the run's directory, or NAME=TARGET.
        private: Whether they log what no ε covers; None: only if the target is on this machine.

    Raises:
        SilodpError: As `make_callbacks`.
    """
    if texts and not CALLBACKS:
        raise make_missing_error("integrations")
    tables: list[TomlTable] = []
    for text in texts:
        name, _, target = text.partition("=")
        tables.append({"name": name, **({"target": target} if target else {})})
        if private is not None:
            tables[-1]["private"] = private
    return make_callbacks(tables, "log")
