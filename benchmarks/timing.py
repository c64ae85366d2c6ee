"""What benchmarks share: times of several cases, measured in turn in one process, and their help.

Measured in turn, other work on the machine slows down all cases alike.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Case = TypeVar("Case")


def measure_in_turn(
    cases: Mapping[Case, Callable[[], Any]], turns: int, clock: Callable[[], float] = time.process_time
) -> dict[Case, float]:
    """Return the median seconds of each case.

    Args:
        cases: name -> what is measured.
        turns: that count. One more comes first, which traces and fills caches.
        clock: CPU time of this process, or `time.perf_counter`.
    """
    seconds: dict[Case, list[float]] = {name: [] for name in cases}
    for turn in range(turns + 1):
        for name, case in cases.items():
            begin = clock()
            case()
            if turn:
                seconds[name].append(clock() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def show_help(text: str | None) -> None:
    """Print the text of a benchmark and end, where --help or -h is given: most take hours to run."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(text)
        sys.exit()
