"""Rules of participation that a stranger wrote: their fields, and the samples that they draw."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from silodp.methods import Participation, UldpAvg
from silodp.runtime.train import train
from silodp.settings import Count
from silodp.training.sgd.local import LocalTraining
from support.oracles import logistic_task, small_federation
from support.refusals import refused


@dataclass(frozen=True)
class Every(Participation):
    """A part of the persons, by what a test returns for it; `period` is a name that an author may choose."""

    period: Count = 2

    @property
    def rate(self) -> float:
        return 1 / self.period

    def draw(self, coins: Any, round_: int, rates: Any) -> Any:
        return coins.draw("part", 0) % np.uint64(self.period) == round_ % self.period

    def sample_event(self, release: Any, view: Any) -> Any:
        return release


METHOD = UldpAvg(5.0, 0.5, LocalTraining(0.1), participation=Every(3))


def run(method: UldpAvg = METHOD) -> Any:
    return train(small_federation(), logistic_task(), method, rounds=4, seed=1)


def test_a_field_named_period_says_nothing_of_the_rounds_that_are_drawn_together() -> None:
    assert Every(3).rounds_drawn_together == 1
    # Four rounds cost as without a sample: nothing smaller is stated by the event.
    assert run().epsilon == run(replace(METHOD, participation=None)).epsilon


@pytest.mark.parametrize("wrong", ["numbers", "all of the federation", "none"])
def test_what_is_no_sample_of_the_persons_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {
        "numbers": lambda self, coins, *_: np.ones(len(coins.draw("", 0))),
        "all of the federation": lambda *_: np.ones(1000, bool),
        "none": lambda *_: None,
    }
    monkeypatch.setattr(Every, "draw", samples[wrong])
    with refused("plugin.returned") as caught:
        run()
    assert "test_participation_plugins.py:Every.draw" in str(caught.value)
