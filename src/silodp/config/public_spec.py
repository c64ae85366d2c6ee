"""The specification of a configured run before its data are read."""

from __future__ import annotations

from dataclasses import replace

from silodp.aggregators.run_spec import ModelSpec, RunSpec
from silodp.config.arguments import get_fields
from silodp.config.schema import RunConfig
from silodp.data.public import ASSUMED_USERS, PublicData
from silodp.runtime.prepare import check_separate, describe_model
from silodp.training.losses import LOSSES
from silodp.training.metrics import METRICS
from silodp.training.models import SIZES, name_linear_model


def build_public_spec(config: RunConfig, users: int | None = None) -> tuple[RunSpec, bool]:
    """Return the specification of a configured run from public facts; no data file is opened.

    Args:
        config: the configuration.
        users: U, where it is only in the data; None takes what the configuration or its public list declares, else
            `ASSUMED_USERS`.

    Returns:
        The specification, with a calibrated method, and whether U is `ASSUMED_USERS`. The checks of `prepare_run` are
        not made.

    Raises:
        SilodpError: the public list of users cannot be read, or budgets cannot be met.
    """
    data = config.public_data(users)
    is_assumed = data.users is None
    data = replace(data, users=ASSUMED_USERS) if is_assumed else data
    aggregator = config.aggregator()
    check_separate(bool(config.separate), config.method())
    spec = RunSpec(
        data,
        _count_parameters(config, data) or describe_model(config.task(data)),
        config.method(),
        aggregator,
        aggregator.min_silos_for(len(data.silos)),
        rounds=config.rounds,
        delta=config.delta,
        budget=config.budget(),
        seed=config.seed,
        silo_limits=config.silo_limits,
        evaluation=config.evaluation(),
        separate=bool(config.separate),
    )
    return spec.calibrate(), is_assumed


def _count_parameters(config: RunConfig, data: PublicData) -> ModelSpec | None:
    """Return the size of a model of silodp that fits the records, without building it; None for all others."""
    task, dataset = config.task_section, config.dataset
    name = task.model or dataset.model or name_linear_model(data.classes)
    given = _needs_no_options(task.loss) and METRICS.keys() >= set(task.metrics or ())
    options = task.options or task.loss_options
    is_image = name.startswith("cnn_")
    fits = data.record_shape == (1, 28, 28) and data.classes if is_image else len(data.record_shape) == 1
    if (
        name not in SIZES
        or options
        or not given
        or not fits
        or data.inputs
        or 0 in data.record_shape
        or data.targets
    ):
        return None
    return ModelSpec(SIZES[name](data.record_shape[0], data.classes or 1))


def _needs_no_options(loss: str | None) -> bool:
    """Return whether a loss is one of silodp that can be made without [task.loss_options]."""
    if loss is None:
        return True
    return loss in LOSSES and all(p.default is not p.empty for p in get_fields(LOSSES[loss]).values())
