"""A run that nobody has attacked is said to be so, after its guarantees."""

from __future__ import annotations

from pathlib import Path

from support.commands import Silodp


def test_a_report_says_last_that_the_run_was_not_attacked(silodp: Silodp, config: Path) -> None:
    assert silodp("run", config, "--out", "out").status == 0
    lines = [line.partition(":")[0] for line in silodp("report", "out").out.splitlines()]
    assert lines[-3:] == ["Not attacked", "Report", "Model card"]
