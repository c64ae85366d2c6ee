"""The configuration of a run: a TOML file with the same settings as the Python API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from silodp.accounting.accountant import ACCOUNTANTS, Accountant
from silodp.accounting.guarantee import Adversary, Unit
from silodp.accounting.ledger import Budget
from silodp.aggregators import Aggregator
from silodp.config.arguments import (
    build,
    convert_validation_error,
    describe_no_name,
    describe_unknown,
    get_fields,
    validate_arguments,
    validate_given,
)
from silodp.config.budgets import BudgetDistribution, build_budget_distribution, format_methods_for
from silodp.config.build import add_defaults, build_aggregator, build_method, build_task, find_method_class
from silodp.config.plugins import find_plugin, import_reference, is_reference
from silodp.config.toml_values import (
    MOST_SILOS,
    TomlTable,
    apply_override,
    check_plain,
    drop_empty_tables,
    merge,
    read_toml,
    resolve_paths,
)
from silodp.data.catalog import DATASETS, find_dataset
from silodp.data.dataset import Dataset
from silodp.data.federation import Federation
from silodp.data.public import PublicData
from silodp.data.tables.subgroups import check_group
from silodp.errors import MOST_WHOLE, SilodpError, check_whole, shorten
from silodp.methods import FederationSize, Method
from silodp.methods.evaluation import Evaluation

if TYPE_CHECKING:
    from silodp.training.task import Task

_SPEC_PART = re.compile(r"(?:[^:]*\.py:)?[^:]+")
"""The parts of a method's specification in `compare --methods`: its name or reference, and its settings."""

ALIASES = {"k": "group_size", "q": "user_sampling", "sigma": "noise_multiplier"}
"""Short names of fields in `compare --methods`."""


_VARIANT = {"weighting", "group_size", "user_sampling", "record_sampling", "noise_multiplier", "personal"}
"""Settings that name a variant of a method; none of them says that its rates were chosen for it."""


@dataclass(frozen=True)
class MethodSpec:
    """One method of a comparison.

    Attributes:
        label: its name there.
        method: the method.
        has_own_settings: whether rates were chosen for it: it is the method of [method], or a setting other than
            those that name a variant was given for it. Else its rates are those of [method], and it is not tuned.
    """

    label: str
    method: Method
    has_own_settings: bool = True


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TaskSection(_Section):
    """[task]: names or references (see `build_task`); a missing field follows from the data."""

    model: str | None = None
    options: TomlTable = Field(default_factory=dict)
    loss: str | None = None
    loss_options: TomlTable | None = None
    metrics: tuple[str, ...] | None = None
    pretrained: bool | None = None


class CardSection(_Section):
    """[card]: what the owner of a model declares for its card; nothing in it changes the run.

    Attributes:
        intended_use, limits, contact, license: sentences.
        data: where, when and how the records were collected.
        publish_metrics: whether the card has metrics on private held-out records, which no ε covers.
        subgroups: column of a feature -> its categories, or ascending bounds between which its subgroups lie.
    """

    intended_use: str | None = None
    limits: str | None = None
    contact: str | None = None
    license: str | None = None
    data: str | None = None
    publish_metrics: bool = False
    subgroups: dict[str, list[str | int | float]] = Field(default_factory=dict)


class RunConfig(_Section):
    """Everything that a run depends on; all of it is public.

    [data], [method], [methods.NAME], [aggregation], [budget], [budgets] and [evaluation] hold exactly the arguments
    of the loader, the method, the aggregator, `Budget`, `BudgetDistribution` and `Evaluation`; they are checked
    against those when the configuration is made. [silo_limits] holds ε by adversary, [card] what the model card says.
    A method with `rounds` and `delta` gets those of the run unless its table sets them.
    """

    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*$", max_length=100)]
    rounds: Annotated[int, Field(ge=0, le=MOST_WHOLE)]
    seed: Annotated[int, Field(ge=0)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    accountant: str | None = None
    aggregator_name: str = Field(default="plain", alias="aggregator")
    aggregation: TomlTable = Field(default_factory=dict)
    evaluate_every: Annotated[int, Field(ge=1, le=MOST_WHOLE)] = 1
    separate: bool | None = None
    data: TomlTable
    task_section: TaskSection = Field(default_factory=TaskSection, alias="task")
    method_section: TomlTable = Field(alias="method")
    methods: dict[str, TomlTable] = Field(default_factory=dict)
    budget_section: TomlTable | None = Field(default=None, alias="budget")
    silo_limits: dict[Adversary, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    budgets_section: TomlTable | None = Field(default=None, alias="budgets")
    evaluation_section: TomlTable | None = Field(default=None, alias="evaluation")
    card: CardSection | None = None

    @field_validator("accountant")
    @classmethod
    def _check_accountant(cls, name: str | None) -> str | None:
        if name is not None and not is_reference(name) and name not in ACCOUNTANTS:
            raise SilodpError(
                f"accountant = {shorten(name)}: set one of {', '.join(ACCOUNTANTS)}, or 'file.py:Name'.",
                code="config.value",
                field="accountant",
            )
        return name

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        self.aggregator()
        self.resolve_data()
        self.method()
        for name, fields in self.methods.items():
            if fields:
                validate_given(find_method_class(name, "methods"), fields, name, f"methods.{name}")
        self.budget()
        self.evaluation()
        self.check_budgets(self.method())
        self._check_budgets_are_used()
        if self.card is not None and self.card.subgroups:
            schema = self.dataset.find_schema(self.resolve_data()[1])
            for column, values in self.card.subgroups.items():
                check_group(schema, column, values)
        return self

    @property
    def source(self) -> str:
        """Name of the data set, or "tables"."""
        return str(self.data["source"])

    @property
    def silos(self) -> int:
        """Number of silos S; no data are read."""
        dataset, arguments = self.resolve_data()
        return len(dataset.silo_names(arguments))

    def resolve_data(self) -> tuple[Dataset, TomlTable]:
        """Return the data set and the arguments of its loader, checked against the loader's signature.

        Raises:
            SilodpError: an unknown data set, a field that its loader does not take, or a value out of range.
        """
        dataset = self.dataset
        values = {key: value for key, value in self.data.items() if key != "source"}
        if "name" in get_fields(dataset.loader):
            values = {"name": self.name, **values}
        arguments = validate_arguments(dataset.loader, values, f"the data source '{self.source}'", "data")
        for name, least, most in (("users", 1, MOST_WHOLE), ("silos", 1, MOST_SILOS), ("seed", 0, 2**63 - 1)):
            if isinstance(arguments.get(name), int):
                check_whole(f"data.{name}", arguments[name], least, most)
        return dataset, arguments

    @property
    def dataset(self) -> Dataset:
        """The data set that [data] names, by its name or by a file that holds it.

        Raises:
            SilodpError: there is none.
        """
        source = self.data.get("source")
        if not isinstance(source, str):
            raise SilodpError(
                f"data.source = {source!r}: it must be one of {', '.join(DATASETS)}.",
                code="config.value",
                field="data.source",
            )
        if not is_reference(source):
            return find_dataset(source)
        found = import_reference(source, "data.source")
        if not isinstance(found, Dataset):
            raise SilodpError(
                f"data.source = '{source}' is of type {type(found).__name__}: refer to a silodp.data.Dataset.",
                code="config.value",
                field="data.source",
            )
        return found

    def federation(self) -> Federation:
        """Load the data, with the budgets that [budgets] draws.

        Raises:
            SilodpError: the data cannot be read, or do not fit the configuration.
        """
        dataset, arguments = self.resolve_data()
        federation = dataset.load(arguments)
        if not any(map(len, federation.silos)):
            raise SilodpError(
                "no silo has a training record, so each round would spend ε and learn nothing: check the tables, and "
                "which of their records are held out.",
                code="data.no_records",
                field="data",
            )
        budgets = self.budget_distribution()
        return federation if budgets is None else budgets.assign_to(federation)

    def public_data(self, users: int | None = None) -> PublicData:
        """Return the public facts of the data and of [budgets]; no private file is opened.

        Args:
            users: U, where it is only in the data; None takes what the configuration or its public list declares.

        Returns:
            The facts; `users` is None where neither the configuration nor the argument states it.

        Raises:
            SilodpError: the public list of users cannot be read.
        """
        dataset, arguments = self.resolve_data()
        public = dataset.public(arguments, users)
        budgets = self.budget_distribution()
        if budgets is None:
            return public
        if budgets.unit == "record":
            return replace(public, record_budgets=True)
        if public.users is None:
            return public
        return replace(public, user_budgets=tuple(budgets.draw(public.users).tolist()))

    def task(self, data: Federation | PublicData) -> Task:
        """Build model, loss and metrics for these data; missing fields of [task] follow from the data set."""
        public = data.public() if isinstance(data, Federation) else data
        return build_task(public, self.dataset, **dict(self.task_section), seed=self.seed)

    def method(self) -> Method:
        """Build the method of [method]."""
        name, fields = _split_name(self.method_section)
        return self._build_method(name, fields, "method")

    def aggregator(self) -> Aggregator:
        """Build the aggregator with the settings of [aggregation]."""
        return build_aggregator(self.aggregator_name, self.aggregation)

    def budget(self) -> Budget | None:
        """Build the budget, if any, at the δ of the run.

        Raises:
            SilodpError: it has another δ.
        """
        if self.budget_section is None:
            return None
        budget = build(Budget, {"delta": self.delta, **self.budget_section}, "a budget", "budget")
        if budget.delta != self.delta:
            raise SilodpError(
                f"budget.delta = {budget.delta} differs from delta = {self.delta}: set both to the same value.",
                code="argument.conflict",
                field="budget.delta",
            )
        return budget

    def evaluation(self) -> Evaluation | None:
        """Build the evaluation across silos, if any."""
        if self.evaluation_section is None:
            return None
        return build(Evaluation, self.evaluation_section, "an evaluation", "evaluation")

    def budget_distribution(self) -> BudgetDistribution | None:
        """Build the distribution of [budgets], if any."""
        return None if self.budgets_section is None else build_budget_distribution(self.budgets_section)

    def _given_budgets(self) -> dict[Unit, str]:
        """Return the units that have privacy budgets, each with the setting that gives them."""
        dataset, arguments = self.resolve_data()
        budgets = self.budget_distribution()
        given: dict[Unit, str] = {} if budgets is None else {budgets.unit: "[budgets]"}
        if dataset.has_record_budgets(arguments):
            given.setdefault("record", "data.schema.budget")
        return given

    def check_budgets(self, method: Method) -> None:
        """Refuse a method that needs privacy budgets of records or persons where there are none; no data are needed."""
        unit = method.budgets.unit
        if unit is not None and unit not in self._given_budgets():
            columns = "schema" in self.resolve_data()[1] and unit == "record"
            raise SilodpError(
                f"method {method.name} needs a privacy budget for every {unit}, and there is none: add a table "
                f"[budgets] with a distribution and of = '{unit}s'"
                f"{', or name a column of budgets (data.schema.budget)' if columns else ''}.",
                code="data.budgets",
                field="budgets",
            )

    def _check_budgets_are_used(self) -> None:
        """Refuse budgets that [method] would ignore: a unit with a small budget would be charged like all others.

        Other methods of a comparison may ignore them: they stand beside one that keeps them.
        """
        method = self.method()
        for unit, where in self._given_budgets().items():
            if unit != method.budgets.unit:
                raise SilodpError(
                    f"{where} gives every {unit} a privacy budget, and method {method.name} ignores them: "
                    f"choose a method that keeps them ({format_methods_for(unit)}), or take {where} out.",
                    code="argument.conflict",
                    field=where.strip("[]"),
                )

    def settings(self) -> TomlTable:
        """Return the keyword arguments of `prepare_run` besides federation, task and method."""
        return {
            "rounds": self.rounds,
            "aggregator": self.aggregator(),
            "budget": self.budget(),
            "seed": self.seed,
            "delta": self.delta,
            "accountant": self.build_accountant(),
            "silo_limits": self.silo_limits,
            "evaluation": self.evaluation(),
            "separate": bool(self.separate),
        }

    def build_accountant(self) -> Accountant | str | None:
        """Return an object for a reference, a name for an accountant of silodp, None where none is set."""
        if self.accountant is None or not is_reference(self.accountant):
            return self.accountant
        known: Mapping[str, type[Accountant]] = {}
        return find_plugin(self.accountant, known, Accountant, "accountant")()

    def specs(self, text: str) -> list[MethodSpec]:
        """Build the methods of `compare --methods`: "uldp-avg,uldp-avg:weighting=records,uldp-group:k=8".

        A field comes from the specification, else from [methods.NAME], else from [method] where both methods
        have it; but a server_learning_rate only from a method with the same server scale.

        Raises:
            SilodpError: an unknown method or field, or a required field that none of the three gives.
        """
        found = [self._build_spec(part.strip()) for part in text.split(",") if part.strip()]
        if not found:
            raise SilodpError(
                "methods is empty: name at least one, for example uldp-avg.",
                code="argument.value",
                field="methods",
            )
        check_labels(found)
        return found

    def _build_spec(self, text: str) -> MethodSpec:
        try:
            return self._parse_spec(text)
        except SilodpError as error:
            if text in str(error):
                raise
            raise SilodpError(f"methods, at '{text}': {error}", code=error.code, field=error.field) from None

    def _parse_spec(self, text: str) -> MethodSpec:
        name, *settings = _SPEC_PART.findall(text)
        if ".py:" in name:  # on a command line it is relative to where the command is given
            name = str(Path.cwd() / Path(name).expanduser())
        fields = get_fields(find_method_class(name, "methods"))
        configured, values = _split_name(self.method_section)
        inherited: TomlTable = {field: value for field, value in values.items() if field in fields}
        given: TomlTable = dict(self.methods.get(name, {}))
        for one in settings:
            key, equals, value = one.partition("=")
            given = apply_override(given, f"{ALIASES.get(key, key)}{equals}{value}")
        method = self._build_method(name, merge(inherited, given), f"methods.{name}")
        people = FederationSize(self.silos, users=3)
        same_scale = method.server_scale(people) == self.method().server_scale(people)
        if "server_learning_rate" not in given and not same_scale:
            # A rate has a meaning only with its scale: 20 on 1/(U·S) is not 20 on 1/S.
            inherited.pop("server_learning_rate", None)
            method = self._build_method(name, merge(inherited, given), f"methods.{name}")
        self.check_budgets(method)
        is_tuned = name == configured or bool(given.keys() - _VARIANT)
        return MethodSpec(text, method, has_own_settings=is_tuned)

    def _build_method(self, name: str, fields: TomlTable, where: str) -> Method:
        """Build a method; rounds and δ that its privacy budgets are for are those of the run unless it sets them."""
        maker = find_method_class(name, "method.name" if where == "method" else where)
        if "record_sampling" in fields and maker.samples_by_budget:
            raise SilodpError(
                f"{where}.record_sampling is not a field of {name}: the sampling probability of a record follows from "
                "its privacy budget; take it out ('silodp plan' shows every q).",
                code="config.unknown_field",
                field=f"{where}.record_sampling",
            )
        defaults = {"rounds": self.rounds, "delta": self.delta}
        return build_method(name, add_defaults(maker, fields, defaults), where)

    def to_toml(self) -> str:
        """Return the configuration as TOML; `load_config` reads the same configuration from it."""
        return tomli_w.dumps(drop_empty_tables(self.model_dump(by_alias=True, exclude_none=True)))


def check_labels(specs: Iterable[MethodSpec]) -> None:
    """Check that no two methods of a comparison have the same label.

    Raises:
        SilodpError: two have.
    """
    seen: set[str] = set()
    for label in (spec.label for spec in specs):
        if label in seen:
            raise SilodpError(
                f"methods names '{label}' twice: once is enough.", code="argument.value", field="methods"
            )
        seen.add(label)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a configuration file.

    Args:
        path: a TOML file; relative paths in it are relative to its folder. Its name is the default of `name`.
        overrides: "key=value" with dotted keys; a value that is not TOML is text.

    Returns:
        The configuration, checked.

    Raises:
        SilodpError: no such file, not TOML, or a setting that does not fit.
    """
    path = Path(path)
    values = read_toml(path)
    for override in overrides:
        values = apply_override(values, override)
    return parse_config({"name": re.sub(r"[^\w.-]", "-", path.stem), **values}, path.parent)


def parse_config(values: Mapping[str, Any], folder: Path | None = None) -> RunConfig:
    """Make a configuration from plain values.

    Args:
        values: tables, arrays, numbers and text, as TOML has them.
        folder: relative paths in the values are relative to it; None is the current folder.

    Raises:
        SilodpError: a setting that does not fit.
    """
    check_plain(values)
    try:
        plain = json.dumps(resolve_paths(_choose_delta(values), (folder or Path.cwd()).resolve()))
        return RunConfig.model_validate_json(plain)
    except ValidationError as error:
        raise _convert_error(error) from None


def _choose_delta(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings with the δ of [budget] for that of the run, where this has none."""
    section = values.get("budget")
    delta = section.get("delta") if isinstance(section, Mapping) else None
    # What is no δ is refused as that of the budget.
    is_usable = "delta" not in values and isinstance(delta, float) and 0 < delta < 1
    return {**values, "delta": delta} if is_usable else values


def parse_card(values: Mapping[str, Any]) -> CardSection:
    """Return the table [card] of a configuration, whose other settings are not read.

    Raises:
        SilodpError: a setting of it does not fit.
    """
    card = {"card": values.get("card", {})}
    check_plain(card)
    try:
        return _Card.model_validate_json(json.dumps(card)).card
    except ValidationError as error:
        raise _convert_error(error) from None


class _Card(_Section):
    card: CardSection


def _convert_error(error: ValidationError) -> SilodpError:
    """Return the first complaint about a configuration as one sentence."""
    first = error.errors()[0]
    if first["type"] != "extra_forbidden":
        return convert_validation_error(error, RunConfig)
    *section, name = [str(part) for part in first["loc"]]
    owner: type[BaseModel] = RunConfig
    if section:
        owner = CardSection if section[0] == "card" else TaskSection
    known = [field.alias or key for key, field in owner.model_fields.items()]
    what = f"[{'.'.join(section)}]" if section else "the configuration"
    return SilodpError(
        describe_unknown(name, known, what, ".".join(section)),
        code="config.unknown_field",
        field=".".join([*section, name]),
    )


def _split_name(section: Mapping[str, Any]) -> tuple[str, TomlTable]:
    name = section.get("name")
    if name is not None and not isinstance(name, str):
        raise describe_no_name("method.name", name)
    if name is None:
        raise SilodpError(
            'method.name is missing: set a method\'s name, for example name = "uldp-avg".',
            code="config.missing_field",
            field="method.name",
        )
    return name, {key: value for key, value in section.items() if key != "name"}
