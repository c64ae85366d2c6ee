"""The log of a server or a silo: JSON lines with UTC time on standard error, or plain lines on a terminal.

Other commands print warnings by `_console.print_warnings`, and do not import this module.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import typer

from silodp.cli._console import describe_failure
from silodp.errors import SilodpError

LEVELS = ("debug", "info", "warning", "error")
_QUIET = ("httpx", "httpcore", "uvicorn", "asyncio", "matplotlib")
"""Libraries whose records below a warning say nothing of the run."""

_BURST, _REFILL_SECONDS = 60, 60.0
"""Lines that one statement of the code may write at once; after them, one more in each of these times."""

_log = logging.getLogger(__name__)


class JsonLines(logging.Formatter):
    """One JSON object per record, with the fields that it was given as `extra={"fields": …}`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class _RateLimit(logging.Filter):
    """Bounds the lines of each statement of the code: whoever sends messages decides how often it is reached.

    Lines with fields of their own are exempt: a run has one for each round, and one for its failure.
    """

    def __init__(self) -> None:
        super().__init__()
        # By statement: how many lines it may still write, when that was counted, and how many were left out.
        self._states: dict[tuple[str, int], tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written; one after others that were not says how many they were."""
        if record.levelno < logging.INFO or hasattr(record, "fields"):
            return True
        now, statement = time.monotonic(), (record.pathname, record.lineno)
        left, since, left_out = self._states.get(statement, (float(_BURST), now, 0))
        # A token bucket: it refills with time, and every line takes one token.
        left = min(_BURST, left + (now - since) / _REFILL_SECONDS)
        if left < 1:
            self._states[statement] = (left, now, left_out + 1)
            return False
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out:,} such lines were left out)", ()
        self._states[statement] = (left - 1, now, 0)
        return True


@contextmanager
def log_lines(level: str, as_json: bool = False) -> Iterator[None]:
    """Log to standard error until the end of the block; a failure of the block is the last record.

    Args:
        level: "debug", "info", "warning" or "error".
        as_json: Whether a failure is an object on standard output, too.

    Raises:
        SilodpError: The level is another one.
        typer.Exit: the block failed; its status is that of the failure.
    """
    if level not in LEVELS:
        raise SilodpError(
            f"log_level = '{level}': give debug, info, warning or error.",
            code="argument.value",
            field="log_level",
        )
    handler = logging.StreamHandler()
    handler.addFilter(_RateLimit())
    is_terminal = sys.stderr.isatty()
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    handler.setFormatter(plain if is_terminal else JsonLines())
    # A library may have installed a handler when it was imported: it is replaced.
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for library in _QUIET:
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if is_terminal or isinstance(error, typer.Exit):
            raise
        failure = describe_failure(error)
        fields = {"code": failure.code, "field": failure.field}
        _log.error("%s [%s]", failure.sentence, failure.code, extra={"fields": fields})
        if as_json:
            failure.show_object()
        raise typer.Exit(failure.status) from None
