"""Tests of the noise, the shifts and the samples of a rehearsal against what was charged.

They are far more sensitive than an attack on membership. A failure is a bug even where no ε is exceeded: the program
does not add the noise that it states. A test of right code fails with a probability of at most its level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class NoiseTest:
    """One test against a charged constant.

    Attributes:
        test: What is tested, for example "noise of silo 0".
        value: The measured value.
        low: The lower end of the interval, at the level of the test.
        high: The upper end.
        expected: The value that was charged.
        passed: Whether the measurement agrees with what was charged.
    """

    test: str
    value: float
    low: float
    high: float
    expected: float
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Samples:
    """Who was drawn, as every silo has it.

    Attributes:
        drawn: Whether a unit was in the sample (silos, rounds, units); one silo where only one is known.
        rate: The sampling probability q that was charged.
    """

    drawn: NDArray[np.bool_]
    rate: float


def run_noise_tests(
    noise: Mapping[str, Array],
    *,
    shifts: Array | None = None,
    samples: Samples | None = None,
    level: float = 0.05,
) -> tuple[NoiseTest, ...]:
    """Run all tests that the data allow; together they fail on right code with a probability of at most `level`.

    Args:
        noise: What each part added to coordinates that no unit moves (rounds, coordinates), divided by the standard
            deviation that was charged for it. A part is "silo 0", "silo 1", … or "the sum"; where silos are given,
            leave out the sum, unless it has noise of its own.
        shifts: How far members moved the sums (rounds, members), divided by the reach that was charged; None leaves
            the test out. Multiply no shift by a sampling probability: give (round, member) that were drawn.
        samples: Who was drawn; None leaves these tests out.
        level: The probability of a false alarm, for all tests together.

    Raises:
        SilodpError: an array has another shape than is needed, or a value is not finite.
    """
    raise NotImplementedError
