"""What the tests of the commands share: a small run, and what a command left on its two outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from silodp.errors import CODES

CONFIG = """
name = "small"
rounds = 2
seed = 1
[data]
source = "embedded"
users = 20
silos = 2
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.01
"""

_BACKGROUND = '<rect width="100%" height="100%" fill="#ffffff"/>'
UNDRAWN = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1">{_BACKGROUND}</svg>'
"""What stands for a picture where a test is not about pictures."""


class Outcome(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on standard output."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Silodp = Callable[..., Outcome]


def assert_sentence(outcome: Outcome, *says: str, code: str | None = None) -> None:
    """A mistake is told in one line, with a code that is on the list; by --json also as an object."""
    assert outcome.status == 2, outcome
    assert len(outcome.err.splitlines()) == 1, outcome.err
    told = re.fullmatch(r"error: (.+) \[([a-z_.]+)\]\n", outcome.err)
    assert told is not None, outcome.err
    assert told[2] in CODES
    assert code in (None, told[2])
    if outcome.out:
        error = outcome.json["error"]
        assert (error["message"], error["code"]) == told.groups()
        assert error.keys() == {"code", "field", "message"}
    assert "Traceback" not in outcome.err
    for part in says:
        assert part in outcome.err
