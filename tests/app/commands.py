"""What the tests of the commands share: a small run, and what a command left on its two outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

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


def assert_sentence(outcome: Outcome, *says: str) -> None:
    assert outcome.status == 2, outcome
    assert outcome.out == ""
    assert len(outcome.err.splitlines()) == 1, outcome.err
    assert outcome.err.startswith("error: ")
    assert "Traceback" not in outcome.err
    for part in says:
        assert part in outcome.err
