"""A privacy budget for each record or person: rPDP-FL with repairs, and per-user budgets."""
