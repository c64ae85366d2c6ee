"""A run as TOML: the Python API one to one, every mistake one sentence."""

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
from silodp.accounting.guarantee import Adversary
from silodp.accounting.ledger import Budget
from silodp.config.budgets import (
    BudgetDistribution,
    budget_unit,
    build_budget_distribution,
    methods_for,
)
from silodp.config.builders import build_aggregator, build_method, find_method_class, with_defaults
from silodp.config.construct import (
    build,
    describe_unknown,
    fields_of,
    format_validation_error,
    validate_arguments,
)
from silodp.config.plugins import find_plugin, is_reference, refer
from silodp.config.toml_values import (
    MOST_SILOS,
    TomlTable,
    apply_override,
    check_plain,
    merge,
    read_toml,
    resolve_paths,
    without_empty,
)
from silodp.data.catalog import DATASETS, find_dataset
from silodp.data.dataset import Dataset
from silodp.data.federation import Federation
from silodp.data.public import PublicData
from silodp.errors import MOST_WHOLE, SilodpError, check_whole, shorten

if TYPE_CHECKING:
    from silodp.aggregators.base import Aggregator
    from silodp.methods import Method
    from silodp.training.task import Task

_SPEC_PART = re.compile(r"(?:[^:]*\.py:)?[^:]+")
"""The parts of a method's specification in `compare --methods`: its name or reference, and its settings."""

ALIASES = {"k": "group_size", "q": "user_sampling", "sigma": "noise_multiplier"}
"""Short names of fields in `compare --methods`."""


@dataclass(frozen=True)
class MethodSpec:
    """One line of a comparison: a method, and what it is called there.

    `has_own_settings`: some were given for it; else all come from [method], and nobody tuned them for this one.
    """

    label: str
    method: Method
    has_own_settings: bool = True


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TaskSection(_Section):
    """[task]: names or references (see `references.task_for`); what is missing follows from the data."""

    model: str | None = None
    options: TomlTable = Field(default_factory=dict)
    loss: str | None = None
    metrics: tuple[str, ...] | None = None


class RunConfig(_Section):
    """All that a run depends on, public every bit of it.

    [data], [method], [methods.NAME], [aggregation], [budget] and [budgets] hold exactly the arguments of the loader,
    the method, the aggregator, `Budget` and `BudgetDistribution`; they are checked against those when the configuration
    is made. [silo_limits] holds ε by adversary. A method that has `rounds` and `delta` gets the run's unless it
    names its own.
    """

    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*$", max_length=100)]
    rounds: Annotated[int, Field(ge=0, le=MOST_WHOLE)]
    seed: Annotated[int, Field(ge=0)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    accountant: str | None = None
    aggregator_name: str = Field(default="plain", alias="aggregator")
    aggregation: TomlTable = Field(default_factory=dict)
    evaluate_every: Annotated[int, Field(ge=1, le=MOST_WHOLE)] = 1
    data: TomlTable
    task_section: TaskSection = Field(default_factory=TaskSection, alias="task")
    method_section: TomlTable = Field(alias="method")
    methods: dict[str, TomlTable] = Field(default_factory=dict)
    budget_section: TomlTable | None = Field(default=None, alias="budget")
    silo_limits: dict[Adversary, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    budgets_section: TomlTable | None = Field(default=None, alias="budgets")

    @field_validator("accountant")
    @classmethod
    def _check_accountant(cls, name: str | None) -> str | None:
        if name is not None and ":" not in name and name not in ACCOUNTANTS:
            raise SilodpError(
                f"accountant = {shorten(name)}: set one of {', '.join(ACCOUNTANTS)}, or 'file.py:Name'.",
                code="config.value",
                field="accountant",
            )
        return name

    @model_validator(mode="after")
    def _checked(self) -> RunConfig:
        self.aggregator()
        self.load_plan()
        self.method()
        for name, fields in self.methods.items():
            for field in fields:
                maker = find_method_class(name, "methods")
                if field not in fields_of(maker):
                    raise SilodpError(
                        describe_unknown(field, fields_of(maker), name, f"methods.{name}"),
                        code="config.unknown_field",
                        field=f"methods.{name}.{field}",
                    )
        self.budget()
        self.check_budgets(self.method())
        self._check_somebody_reads_budgets()
        return self

    @property
    def source(self) -> str:
        """Where the data come from: a data set's name, or "tables"."""
        return str(self.data["source"])

    @property
    def silos(self) -> int:
        """S, without looking at any data."""
        dataset, arguments = self.load_plan()
        return len(dataset.silo_names(arguments))

    def load_plan(self) -> tuple[Dataset, TomlTable]:
        """Return the data set and the arguments of its loader, checked against the loader's signature.

        Raises:
            SilodpError: an unknown data set, a field that its loader does not take, or a value out of range.
        """
        dataset = self.dataset
        values = {key: value for key, value in self.data.items() if key != "source"}
        if "name" in fields_of(dataset.loader):
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
        if ":" not in source:
            return find_dataset(source)
        found = refer(source, "data.source")
        if not isinstance(found, Dataset):
            raise SilodpError(
                f"data.source = '{source}' is of type {type(found).__name__}: refer to a silodp.data.Dataset.",
                code="config.value",
                field="data.source",
            )
        return found

    def federation(self) -> Federation:
        """Load the data; [budgets] are drawn for them."""
        dataset, arguments = self.load_plan()
        federation = dataset.load(arguments)
        own = self.preferences()
        return federation if own is None else own.on(federation)

    def public_data(self, users: int | None = None) -> PublicData:
        """Return what is public about the data and about [budgets]; no private file is opened.

        Args:
            users: U, where only the data tell it; None takes what the configuration or its public list declares.

        Returns:
            The facts; `users` is None where neither the configuration nor the argument states it.

        Raises:
            SilodpError: the public list of users cannot be read.
        """
        dataset, arguments = self.load_plan()
        public = dataset.public(arguments, users)
        own = self.preferences()
        if own is None:
            return public
        if own.unit == "record":
            return replace(public, record_budgets=True)
        if public.users is None:
            return public
        return replace(public, user_budgets=tuple(own.drawn(public.users).tolist()))

    def task(self, data: Federation | PublicData) -> Task:
        """Build model, loss and metrics for these data; what [task] leaves out follows from the data set."""
        from silodp.config.references import task_for

        public = data.public() if isinstance(data, Federation) else data
        return task_for(public, self.dataset, **dict(self.task_section), seed=self.seed)

    def method(self) -> Method:
        """The method of [method]."""
        name, fields = _named(self.method_section)
        return self._built(name, fields, "method")

    def aggregator(self) -> Aggregator:
        """The aggregator, with the settings of [aggregation]."""
        return build_aggregator(self.aggregator_name, self.aggregation)

    def budget(self) -> Budget | None:
        """The budget, if any, at the run's δ: a plan refuses another one as a run does."""
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

    def preferences(self) -> BudgetDistribution | None:
        """The personal budgets that [budgets] describes, if any."""
        return None if self.budgets_section is None else build_budget_distribution(self.budgets_section)

    def check_budgets(self, method: Method) -> None:
        """Refuse a method that asks for budgets of one's own where there are none; no data are needed."""
        unit = budget_unit(method)
        own = self.preferences()
        given = {own.unit} if own is not None else set()
        dataset, arguments = self.load_plan()
        if dataset.has_record_budgets(arguments):
            given.add("record")
        if unit is not None and unit not in given:
            column = ", or name a column of budgets (data.schema.budget)" if "schema" in arguments else ""
            raise SilodpError(
                f"method {method.name} needs a budget of its own for every {unit}, and there is none: add a table "
                f"[budgets] with a distribution and of = '{unit}s'{column if unit == 'record' else ''}.",
                code="data.budgets",
                field="budgets",
            )

    def _check_somebody_reads_budgets(self) -> None:
        """Refuse budgets that [method] would pass over: who asked for little would be charged as everybody else.

        Other methods of a comparison may be without: they stand beside one that keeps them.
        """
        own = self.preferences()
        dataset, arguments = self.load_plan()
        column = dataset.has_record_budgets(arguments)
        given = [("[budgets]", own.unit)] if own is not None else []
        given += [("data.schema.budget", "record")] if column else []
        method = self.method()
        for where, unit in given:
            if unit != budget_unit(method):
                raise SilodpError(
                    f"{where} gives every {unit} a budget of its own, and method {method.name} reads none of them: "
                    f"choose a method that keeps them ({methods_for(unit)}), or take {where} out.",
                    code="argument.conflict",
                    field=where.strip("[]"),
                )

    def settings(self) -> TomlTable:
        """Return the keyword arguments of `prepare_run` besides federation, task and method."""
        names = ("rounds", "aggregator", "seed", "delta", "silo_limits")
        made = {"aggregator": self.aggregator(), "budget": self.budget()}
        given = {name: getattr(self, name) for name in names}
        return {**given, **made, "accountant": self.build_accountant()}

    def build_accountant(self) -> Accountant | str | None:
        """Return the accountant of a file as an object, one of the package by its name, None where none is named."""
        if self.accountant is None or not is_reference(self.accountant):
            return self.accountant
        known: Mapping[str, type[Accountant]] = {}
        return find_plugin(self.accountant, known, Accountant, "accountant")()

    def specs(self, text: str) -> list[MethodSpec]:
        """The methods of `compare --methods`: "uldp-avg,uldp-avg:weighting=records,uldp-group:k=8".

        A field comes from the specification, else from [methods.NAME], else from [method] where both methods
        have it; but a server_learning_rate only from a method with the same server scale.

        Raises:
            SilodpError: an unknown method or field, or a field that none of the three gives.
        """
        found = [self._named_spec(part.strip()) for part in text.split(",") if part.strip()]
        if not found:
            raise SilodpError(
                "methods is empty: name at least one, for example uldp-avg.",
                code="argument.value",
                field="methods",
            )
        labels = [spec.label for spec in found]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise SilodpError(
                f"methods names '{twice}' twice: once is enough.", code="argument.value", field="methods"
            )
        return found

    def _named_spec(self, text: str) -> MethodSpec:
        """The same, and every refusal names the specification that is at fault."""
        try:
            return self._spec(text)
        except SilodpError as error:
            if text in str(error):
                raise
            raise SilodpError(f"methods, at '{text}': {error}", code=error.code, field=error.field) from None

    def _spec(self, text: str) -> MethodSpec:
        from silodp.methods import Population

        name, *settings = _SPEC_PART.findall(text)
        if ".py:" in name:  # on a command line it is relative to where the command is given
            name = str(Path.cwd() / Path(name).expanduser())
        maker = find_method_class(name, "methods")
        own_name, own = _named(self.method_section)
        inherited: TomlTable = {field: value for field, value in own.items() if field in fields_of(maker)}
        given: TomlTable = dict(self.methods.get(name, {}))
        for setting in settings:
            key, equals, value = setting.partition("=")
            given = apply_override(given, f"{ALIASES.get(key, key)}{equals}{value}")
        method = self._built(name, merge(inherited, given), f"methods.{name}")
        people = Population(self.silos, users=3)
        if "server_learning_rate" not in given and method.server_scale(people) != self.method().server_scale(
            people
        ):
            # A rate means something only with its scale: 20 on 1/(U·S) is not 20 on 1/S.
            inherited.pop("server_learning_rate", None)
            method = self._built(name, merge(inherited, given), f"methods.{name}")
        self.check_budgets(method)
        return MethodSpec(text, method, has_own_settings=bool(given) or name == own_name)

    def _built(self, name: str, fields: TomlTable, where: str) -> Method:
        """The method; rounds and δ that its budgets are for are the run's unless it says others."""
        own = {"rounds": self.rounds, "delta": self.delta}
        if "record_sampling" in fields and find_method_class(name, where).samples_by_budget:
            raise SilodpError(
                f"{where}.record_sampling is not a field of {name}: how often a record is drawn follows from its own "
                f"budget; take it out ('silodp plan' shows every q).",
                code="config.unknown_field",
                field=f"{where}.record_sampling",
            )
        return build_method(name, with_defaults(name, fields, own), where)

    def to_toml(self) -> str:
        """The configuration as TOML; reading it gives it back."""
        return tomli_w.dumps(without_empty(self.model_dump(by_alias=True, exclude_none=True)))


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a TOML file; `overrides` are "key=value" with dotted keys, the value in TOML or else plain text.

    Relative paths inside are relative to the file's folder. The name defaults to the file's.

    Raises:
        SilodpError: no such file, not TOML, or anything that does not fit, in one sentence.
    """
    path = Path(path)
    values = read_toml(path)
    for override in overrides:
        values = apply_override(values, override)
    return parse_config({"name": re.sub(r"[^\w.-]", "-", path.stem), **values}, path.parent)


def parse_config(values: Mapping[str, Any], folder: Path | None = None) -> RunConfig:
    """The configuration of plain values; relative paths are taken from `folder`."""
    check_plain(values)
    try:
        plain = json.dumps(resolve_paths(values, (folder or Path.cwd()).resolve()))
        return RunConfig.model_validate_json(plain)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            *section, name = [str(part) for part in first["loc"]]
            fields = TaskSection.model_fields if section else RunConfig.model_fields
            known = [field.alias or key for key, field in fields.items()]
            what = f"[{'.'.join(section)}]" if section else "the configuration"
            raise SilodpError(
                describe_unknown(name, known, what, ".".join(section)),
                code="config.unknown_field",
                field=".".join([*section, name]),
            ) from None
        raise format_validation_error(error) from None


def _named(section: Mapping[str, Any]) -> tuple[str, TomlTable]:
    name = section.get("name")
    if not isinstance(name, str):
        raise SilodpError(
            'method.name is missing: set a method\'s name, for example name = "uldp-avg".',
            code="config.missing_field",
            field="method.name",
        )
    return name, {key: value for key, value in section.items() if key != "name"}
