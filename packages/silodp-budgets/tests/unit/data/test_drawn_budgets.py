"""Privacy budgets of persons, drawn for a data set in a file: the public ones are those of the loaded data."""

from __future__ import annotations

import numpy as np

from silodp.config.resolve import resolve
from silodp.config.schema import parse_config
from support.places import PLUGINS


def test_user_budgets_are_drawn_as_for_loaded_data() -> None:
    values = {
        "name": "toy",
        "rounds": 1,
        "data": {"source": "dosage.py:DOSAGE", "users": 6},
        "budgets": {"distribution": "pareto", "of": "users"},
        "method": {
            "name": "uldp-avg",
            "noise_multiplier": 5.0,
            "local": {"learning_rate": 0.01},
            "personal": {"by": "clip", "rounds": 1, "largest_budget": 5.0},
        },
    }
    personal = resolve(parse_config(values, PLUGINS))
    drawn = personal.read_public_data().user_budgets
    np.testing.assert_array_equal(drawn, personal.load_federation().user_budgets)
