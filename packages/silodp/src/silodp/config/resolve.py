"""A configuration resolved: the objects that it describes, made once, and what a run is made of by them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from silodp.accounting.views import Unit
from silodp.aggregators.run_spec import ModelSpec, RunSpec
from silodp.config.build import get_fields, validate_arguments
from silodp.config.run_settings import RunSettings, convert_plugin_errors, resolve_settings
from silodp.config.schema import PACKAGES, TABLES, RunConfig, parse_config
from silodp.config.task import build_task, describe_standard_model
from silodp.config.toml_values import TomlTable, apply_override, read_toml, to_plain
from silodp.data.budgets import BudgetDistribution, load_budgets
from silodp.data.catalog import DATASETS, find_dataset
from silodp.data.dataset import Dataset
from silodp.data.federation import Federation
from silodp.data.public import ASSUMED_USERS, PublicData
from silodp.data.silo_data import SiloData
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError
from silodp.methods import METHODS, Method
from silodp.plugins import find_reference, import_reference, refuse_plugins
from silodp.runtime.inspection import describe_loop, describe_model
from silodp.runtime.prepare import prepare_run
from silodp.settings import MAX_SILOS, MAX_WHOLE, Whole
from silodp.text import join_names

if TYPE_CHECKING:
    from silodp.training.task import Task


@dataclass(frozen=True)
class ResolvedRun(RunSettings):
    """A run as configured: every object that its configuration describes. `resolve` makes one.

    Attributes:
        dataset: The data set that [data] names.
        arguments: The other settings of [data], which are checked arguments of the data set's loader.
        budget_distribution: The distribution of the privacy budgets of [budgets]; None where there are none.
    """

    dataset: Dataset
    arguments: TomlTable
    budget_distribution: BudgetDistribution | None

    @property
    def silos(self) -> tuple[str, ...]:
        """The silos' names, in order; no data are read."""
        return self.dataset.silo_names(self.arguments)

    @property
    def table_schema(self) -> Schema | None:
        """The schema of the silos' tables; None where the data set declares no tables."""
        found = self.arguments.get("schema")
        return found if isinstance(found, Schema) else None

    # --- data and task ---

    def load_federation(self) -> Federation:
        """Load the data, with the budgets that [budgets] draws.

        Raises:
            SilodpError: the data cannot be read, or do not fit the configuration.
        """
        federation = self.dataset.load(self.arguments)
        if not any(map(len, federation.silos)):
            raise SilodpError(
                "no silo has a training record, so each round would spend ε and learn nothing: check the tables, and "
                "which of their records are held out.",
                code="data.no_records",
                field="data",
            )
        budgets = self.budget_distribution
        return federation if budgets is None else budgets.assign_to(federation)

    def read_public_data(self, users: int | None = None) -> PublicData:
        """Return the public facts of the data and of [budgets]; no private file is opened.

        Args:
            users: U, where it is only in the data; None takes what the configuration or its public list declares.

        Returns:
            The facts; `users` is None where neither the configuration nor the argument states it.

        Raises:
            SilodpError: the public list of users cannot be read.
        """
        public, budgets = self.dataset.public(self.arguments, users), self.budget_distribution
        # That records have budgets is public; how many records have which of them is not.
        if budgets is not None and budgets.unit == "record":
            return replace(public, record_budgets=True)
        if budgets is None or public.users is None:
            return public
        # Persons are numbered publicly, and the seed stands in the configuration: so their budgets are public, too.
        return replace(public, user_budgets=tuple(budgets.draw(public.users).tolist()))

    def build_task(self, data: Federation | PublicData) -> Task:
        """Build model, loss and metrics for these data; missing fields of [task] follow from the data set."""
        public = data.public() if isinstance(data, Federation) else data
        return build_task(public, self.dataset, **dict(self.config.task), seed=self.config.seed)

    # --- the specification of the run ---

    def prepare(self, data: Federation | PublicData, task: Task | ModelSpec) -> RunSpec:
        """Check the run, and return its specification; see `prepare_run`."""
        return prepare_run(data, task, self.method, **self.settings())

    def build_public_spec(self, users: int | None = None) -> tuple[RunSpec, bool]:
        """Return the specification of the run from public facts; no data file is opened.

        Args:
            users: U, where it is only in the data; None takes what the configuration or its public list declares, else
                `ASSUMED_USERS`.

        Returns:
            The specification, with a calibrated method, and whether U is `ASSUMED_USERS`. That it can be run is not
            checked, as `prepare_run` does.

        Raises:
            SilodpError: the public list of users cannot be read, or budgets cannot be met.
        """
        data, is_assumed = self._read_with_users(users)
        # To build a model only to count its parameters takes seconds: torch is imported.
        model = describe_standard_model(data, self.dataset, self.config.task)
        model = model or describe_model(self.build_task(data))
        return self.assemble_spec(data, model).calibrate(), is_assumed

    def _read_with_users(self, users: int | None) -> tuple[PublicData, bool]:
        """Return public facts with a number of users, and whether it is `ASSUMED_USERS`."""
        data = self.read_public_data(users)
        return (replace(data, users=ASSUMED_USERS), True) if data.users is None else (data, False)

    def describe_loop(self, users: int | None = None) -> str | None:
        """Return the sentence about a model that trains one unit after another, with its price; None where it does not.

        Args:
            users: As in `build_public_spec`.
        """
        data, _ = self._read_with_users(users)
        if describe_standard_model(data, self.dataset, self.config.task) is not None:
            return None  # without an import of torch
        return describe_loop(data, self.build_task(data), self.method)

    # --- privacy budgets of records and persons ---

    @cached_property
    def _given_budgets(self) -> dict[Unit, str]:
        """The units that have privacy budgets, each with the setting that gives them."""
        budgets = self.budget_distribution
        given: dict[Unit, str] = {} if budgets is None else {budgets.unit: "[budgets]"}
        if self.dataset.has_record_budgets(self.arguments):
            given.setdefault("record", "data.schema.budget")
        return given

    def check_budgets(self, method: Method) -> None:
        """Refuse a method that needs privacy budgets of records or persons where there are none; no data are needed."""
        unit = method.budgets.unit
        if unit is not None and unit not in self._given_budgets:
            columns = "schema" in self.arguments and unit == "record"
            raise SilodpError(
                f"method {method.name} needs a privacy budget for every {unit}, and there is none: add a table "
                f"[budgets] with a distribution and of = '{unit}s'"
                f"{', or name a column of budgets (data.schema.budget)' if columns else ''}.",
                code="data.budgets",
                field="budgets",
            )

    def check_budgets_are_used(self) -> None:
        """Refuse budgets that [method] would ignore: a unit with a small budget would be charged like all others.

        Other methods of a comparison may ignore them: they stand beside one that keeps them.
        """
        for unit, where in self._given_budgets.items():
            if unit != self.method.budgets.unit:
                raise SilodpError(
                    f"{where} gives every {unit} a privacy budget, and method {self.method.name} ignores them: "
                    f"choose a method that keeps them ({_format_methods_for(unit)}), or take {where} out.",
                    code="argument.conflict",
                    field=where.strip("[]"),
                )


def _format_methods_for(unit: Unit) -> str:
    """Return the names of the methods that keep budgets of every such unit, for messages."""
    names = [name for name, maker in METHODS.items() if maker.budgets_of == unit]
    with_table = " with [method.personal]" if unit == "user" else ""
    return join_names(names, "or") + with_table


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> ResolvedRun:
    """Read a configuration file, and make what it describes.

    Args:
        path: A TOML file; relative paths in it are relative to its folder. Its name is the default of `name`.
        overrides: "key=value" with dotted keys; a value that is not TOML is text.

    Returns:
        The run as configured; its `config` has the settings.

    Raises:
        SilodpError: no such file, not TOML, or a setting that does not fit.
    """
    path = Path(path)
    values = read_toml(path)
    for override in overrides:
        values = apply_override(values, override)
    # The name becomes that of a directory, so characters of a file name that such a name may not have are replaced.
    return resolve(parse_config({"name": re.sub(r"[^\w.-]", "-", path.stem), **values}, path.parent))


@convert_plugin_errors()
def resolve(config: RunConfig) -> ResolvedRun:
    """Make what a configuration describes, once; no data are read.

    Raises:
        SilodpError: an unknown name or field, a value that a method, an aggregator or a loader refuses, or settings
            that do not fit together.
    """
    settings = resolve_settings(config)
    dataset, arguments = _resolve_data(config)
    distribution = None if config.budgets is None else load_budgets("table")(config.budgets)
    run = ResolvedRun(
        **vars(settings), dataset=dataset, arguments=arguments, budget_distribution=distribution
    )
    run.check_budgets(run.method)
    run.check_budgets_are_used()
    if (series := run.evaluation) is not None:
        bounds = {} if config.card is None else config.card.subgroups
        placed = series.place_columns(dataset.find_schema(arguments), bounds)
        # Written out, so that config.toml says all that ε and the counts depend on, as a report reads it.
        found = {name: to_plain(one) for name, one in vars(placed).items() if one != getattr(series, name)}
        table = {**(config.evaluation or {}), **found}
        run = replace(run, evaluation=placed, config=config.model_copy(update={"evaluation": table}))
    for name, table in config.tables.items():
        # A protection that is spelled wrongly must not pass unseen, in any command.
        TABLES.load_required(name, PACKAGES.get(name, "analytics"), f"the table [{name}]")(table)
    if config.card is not None and config.card.subgroups:
        from silodp.data.tables.subgroups import check_group

        schema = dataset.find_schema(arguments)
        for column, values in config.card.subgroups.items():
            check_group(schema, column, values)
    return run


def read_table_schema(config: RunConfig) -> Schema | None:
    """Return the schema of a configuration's tables; None where it names another data set.

    No code that the configuration names is run.

    Raises:
        SilodpError: the schema does not fit together.
    """
    if config.data.get("source") != "tables":
        return None
    with refuse_plugins("no code outside silodp runs here"):
        schema: Schema = _resolve_data(config)[1]["schema"]
    return schema


def load_silos(config: RunConfig) -> tuple[SiloData, ...]:
    """Load the records of all silos of a configuration; no code that it names is run.

    Raises:
        SilodpError: [data] names code (code bundle.code), or the data cannot be read.
    """
    source = config.data.get("source")
    if isinstance(source, str) and find_reference(source, DATASETS) is not None:
        raise SilodpError(
            f"the data of the run are code, {source}: give TABLE, or in Python give silodp.load(DIR).fine_tune a "
            "silodp.SiloData.",
            code="bundle.code",
            field="data.source",
        )
    dataset, arguments = _resolve_data(config)
    return dataset.load(arguments).silos


def _resolve_data(config: RunConfig) -> tuple[Dataset, TomlTable]:
    """Return the data set of [data], and the arguments of its loader, checked against the loader's signature."""
    dataset = _find_dataset(config.data.get("source"))
    values = {key: value for key, value in config.data.items() if key != "source"}
    if "name" in get_fields(dataset.loader):
        values = {"name": config.name, **values}
    arguments = validate_arguments(
        dataset.loader, values, f"the data source '{config.data['source']}'", "data"
    )
    # The loaders of data sets check these, too, but only when the data are read.
    for name, least, most in (("users", 1, MAX_WHOLE), ("silos", 1, MAX_SILOS), ("seed", 0, 2**63 - 1)):
        if isinstance(arguments.get(name), int):
            Whole(least, most).check(f"data.{name}", arguments[name])
    return dataset, arguments


def _find_dataset(source: object) -> Dataset:
    """Return a data set by its name, or by a file that holds it."""
    if not isinstance(source, str):
        raise SilodpError(
            f"data.source = {source!r}: it must be one of {', '.join(DATASETS)}.",
            code="config.value",
            field="data.source",
        )
    reference = find_reference(source, DATASETS)
    if reference is None:
        return find_dataset(source)
    found = import_reference(reference, "data.source")
    if not isinstance(found, Dataset):
        raise SilodpError(
            f"data.source = '{source}' is of type {type(found).__name__}: refer to a silodp.data.Dataset.",
            code="config.value",
            field="data.source",
        )
    return found
