"""A statistic that is one class of a file: asked for by its reference, counted, drawn, and stated in the guarantee."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from silodp.cli.run import run_config
from silodp.config.resolve import load_config
from silodp.plugins import refuse_plugins
from silodp.report.page import write_report
from silodp_analytics.statistics.config import derive_statistics
from support.refusals import refused
from support.wards import draw_wards, write_wards

PAGE = Path(__file__).parents[5] / "docs" / "extending.md"
TAILS = re.search(r'^```python title="tails.py"\n(.*?)^```$', PAGE.read_text(), re.M | re.S)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    assert TAILS is not None
    (tmp_path / "tails.py").write_text(TAILS[1])
    path: Path = write_wards(tmp_path, draw_wards(120), head="seed = 1", noise="noise_multiplier = 0.3")
    path.write_text(
        f'{path.read_text()}"tails.py:Tails" = {{ age = 50.0 }}\nmean = []\n'.replace(
            'mean = ["age", "dose"]\n', ""
        )
    )
    return path


def test_a_statistic_of_a_file_is_counted_and_shown_and_its_code_is_stated(
    config: Path, tmp_path: Path
) -> None:
    resolved = derive_statistics(load_config(config))
    run_config(resolved, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "statistics.json").read_text())
    (tails,) = (one for one in found["tables"] if one["kind"] == "tails")
    ages: pd.Series[float] = draw_wards(120).age
    expected = [(ages < 50).sum(), (ages >= 50).sum(), ages.isna().sum()]
    assert tails["counts"] == pytest.approx(expected, abs=6 * tails["noise_std"])
    assert "below" in (tmp_path / "run" / "statistics.html").read_text()
    (released,) = (
        one
        for one in json.loads((tmp_path / "run" / "guarantee.json").read_text())["guarantees"]
        if one["adversary"] == "released"
    )
    assert any(one["id"] == "other-code" for one in released["assumptions"])
    # A report runs no code of the run, and writes the same page.
    (tmp_path / "run" / "statistics.json").unlink()
    write_report(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "statistics.json").read_text()) == found


def test_a_statistic_of_a_file_is_not_imported_where_strangers_code_is_refused(config: Path) -> None:
    with refuse_plugins(), refused("report.foreign_code"):
        derive_statistics(load_config(config))


SEVERAL = """
    def find_entries(self, records):
        values, known = self.read(records)
        cells = np.stack([np.where(known, values > 0, 2), np.full(len(values), 2)], axis=1)
        return cells, np.ones(cells.shape)
"""
REACH = """
    @property
    def reach(self):
        return 2.0
"""


@pytest.mark.parametrize(
    ("code", "accepted"),
    [
        (SEVERAL, False),  # adds 2 to the last cell where the number is missing, else to two cells
        (SEVERAL + REACH, True),
        (SEVERAL + REACH.replace("2.0", "1.5"), False),
        (SEVERAL.replace("return cells,", "return cells[:, 0],"), False),
        (SEVERAL.replace("return cells, np", "return np"), False),
    ],
)
def test_a_statistic_that_adds_more_than_its_reach_is_refused_before_the_run(
    code: str, accepted: bool, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "tails.py").write_text(
        re.sub(r"    def find_entries.*?\n\n", f"{code}\n", TAILS[1] if TAILS else "", flags=re.S)
    )
    resolved = derive_statistics(load_config(config))
    if accepted:
        run_config(resolved, tmp_path / "run")
        return
    with refused("plugin.returned"):
        run_config(resolved, tmp_path / "run")
    assert not (tmp_path / "run" / "statistics.json").exists()
