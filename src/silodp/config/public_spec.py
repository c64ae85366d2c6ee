"""The specification of a configured run before its data are read."""

from __future__ import annotations

from dataclasses import replace

from silodp.aggregators.run_spec import RunSpec
from silodp.config.schema import RunConfig
from silodp.runtime.prepare import describe_model

ASSUMED_USERS = 1000
"""U where neither the configuration nor the question says it: ε does not depend on it, room for sums does."""


def build_public_spec(config: RunConfig, users: int | None = None) -> tuple[RunSpec, bool]:
    """Return a configured run's specification from its public facts; no data file is opened.

    Args:
        config: of the run.
        users: U, where only the data tell it; None takes what the configuration or its public list declares, else
            `ASSUMED_USERS`.

    Returns:
        the specification, its method calibrated, and whether U is `ASSUMED_USERS`. What `prepare_run` would refuse is
        not refused here.

    Raises:
        SilodpError: the public list of users cannot be read, or budgets cannot be met.
    """
    data = config.public_data(users)
    is_assumed = data.users is None
    data = replace(data, users=ASSUMED_USERS) if is_assumed else data
    aggregator = config.aggregator()
    spec = RunSpec(
        data,
        describe_model(config.task(data)),
        config.method(),
        aggregator,
        aggregator.min_silos_for(len(data.silos)),
        rounds=config.rounds,
        delta=config.delta,
        budget=config.budget(),
        seed=config.seed,
        silo_limits=config.silo_limits,
    )
    return spec.calibrate(), is_assumed
