"""What a configuration says of a run besides its data: method, aggregator, budget and evaluation, each made once.

A report derives guarantees from these and from the stored public facts of the data. So it needs no data set, model,
loss or metric, and this module imports none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from silodp.accounting.accountant import ACCOUNTANTS, Accountant
from silodp.accounting.ledger import Budget
from silodp.aggregators import Aggregator
from silodp.aggregators.run_spec import ModelSpec, RunSpec
from silodp.aggregators.series import Series, find_series
from silodp.config.build import (
    build,
    build_aggregator,
    build_method,
    find_method_class,
    split_name,
    validate_given,
)
from silodp.config.schema import RunConfig, parse_config
from silodp.config.toml_values import read_toml
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.methods import Method
from silodp.plugins import find_plugin
from silodp.runtime.prepare import assemble_spec, choose_delta


@dataclass(frozen=True)
class RunSettings:
    """A run as configured, without its data. `resolve_settings` makes one.

    Attributes:
        config: The configuration, from which all other attributes follow.
        method: The method of [method]. It has the run's `rounds` and `delta` where its table sets none.
        aggregator: The aggregator of [aggregation].
        budget: The limit on ε of [budget], at the δ of the run; None where there is none.
        evaluation: The evaluation across silos of [evaluation]; None where there is none.
    """

    config: RunConfig
    method: Method
    aggregator: Aggregator
    budget: Budget | None
    evaluation: Series | None

    @cached_property
    def accountant(self) -> Accountant | str | None:
        """An object for a reference, a name for an accountant of silodp, None where none is set.

        A reference is imported at first use: a report reads the configurations of runs whose accountant it may not run.
        """
        # A name of silodp's stays a name: whoever needs the object finds it, and a report states the name.
        name = self.config.accountant
        if name is None or name in ACCOUNTANTS:
            return name
        return find_plugin(name, ACCOUNTANTS, Accountant, "accountant")()

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of `train` and `prepare_run` besides federation, task and method."""
        return {**self._constants, "accountant": self.accountant}

    @property
    def _constants(self) -> dict[str, Any]:
        return {
            "rounds": self.config.rounds,
            "aggregator": self.aggregator,
            "budget": self.budget,
            "seed": self.config.seed,
            "delta": self.config.delta,
            "silo_limits": self.config.silo_limits,
            "evaluation": self.evaluation,
            "isolate_units": bool(self.config.isolate_units),
        }

    def assemble_spec(self, data: PublicData, model: ModelSpec, **more: Any) -> RunSpec:
        """Return the specification of the run, with the default accountant; see `runtime.prepare.assemble_spec`."""
        return assemble_spec(data, model, self.method, **self._constants, **more)


@contextmanager
def convert_plugin_errors() -> Iterator[None]:
    """Raise a SilodpError where a class outside silodp refuses its own fields as Python classes do."""
    try:
        yield
    except SilodpError:
        raise
    except (ValueError, AssertionError) as error:
        raise SilodpError(str(error), code="config.value") from error


@convert_plugin_errors()
def resolve_settings(config: RunConfig) -> RunSettings:
    """Make what a configuration describes besides the data, once.

    Raises:
        SilodpError: an unknown name or field, a value that a method or an aggregator refuses, or settings that do not
            fit together.
    """
    aggregator = build_aggregator(config.aggregator, config.aggregation)
    name, fields = split_name(config.method, "method", 'set a method\'s name, for example name = "uldp-avg"')
    method = build_method(name, fields, "method", config.rounds, config.delta)
    # Tables of methods that this run does not use: `silodp compare` reads them, and completes them from [method].
    for name, fields in config.methods.items():
        if fields:
            validate_given(find_method_class(name, "methods"), fields, name, f"methods.{name}")
    budget = evaluation = None
    if config.budget is not None:
        budget = build(Budget, {"delta": config.delta, **config.budget}, "a budget", "budget")
    # Refuses a budget at another δ than the run's, before any data are read.
    choose_delta(config.delta, budget)
    if config.evaluation is not None:
        evaluation = build(find_series("evaluation"), config.evaluation, "an evaluation", "evaluation")
    return RunSettings(config, method, aggregator, budget, evaluation)


def load_settings(path: Path) -> RunSettings:
    """Read the config.toml of a run, and make what it describes besides the data.

    Raises:
        SilodpError: it is missing, not TOML, or has a setting that does not fit.
    """
    return resolve_settings(parse_config({"name": path.stem, **read_toml(path)}, path.parent))
