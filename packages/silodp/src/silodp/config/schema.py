"""The configuration of a run: a TOML file with the same settings as the Python API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from silodp._lazy import Registry
from silodp.accounting.accountant import ACCOUNTANTS
from silodp.accounting.views import Adversary
from silodp.config.build import convert_validation_error, get_fields, make_unknown_error
from silodp.config.toml_values import (
    TomlTable,
    check_plain,
    drop_empty_tables,
    put_tables_last,
    resolve_paths,
)
from silodp.errors import SilodpError
from silodp.plugins import find_reference
from silodp.settings import MAX_WHOLE
from silodp.text import shorten


class _Section(BaseModel):
    # A setting that is spelled wrongly and ignored may be the one that protects somebody: nothing unknown is accepted.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


TABLES: Registry[Callable[[TomlTable], object]] = Registry("config_tables", {})
"""What refuses a table of the configuration that only commands of other packages read, by the name of the table."""
PACKAGES = {"statistics": "analytics", "regression": "analytics"}
"""The packages of such tables, for the message where one is missing."""


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
        intended_use, limits, contact, license: Sentences for the card.
        data: Where, when and how the records were collected.
        purpose: Why the records are processed.
        controllers: Who decides on that, and is responsible for the records (GDPR Art. 4(7), 26).
        legal_basis: The law, consent or approval by which the records may be used so.
        period: From when to when the records are used.
        recipients: Who gets the model or the report.
        retention: How long model, ledgers and records are kept.
        publish_metrics: Whether the card has metrics on private held-out records, which no ε covers.
        subgroups: By column of features its categories, or ascending bounds between which its subgroups lie.
    """

    intended_use: str | None = None
    limits: str | None = None
    contact: str | None = None
    license: str | None = None
    data: str | None = None
    purpose: str | None = None
    controllers: str | None = None
    legal_basis: str | None = None
    period: str | None = None
    recipients: str | None = None
    retention: str | None = None
    publish_metrics: bool = False
    subgroups: dict[str, list[str | int | float]] = Field(default_factory=dict)


class RunConfig(_Section):
    """Everything that a run depends on, as its file says it; all of it is public.

    [data], [method], [methods.NAME], [aggregation], [budget], [budgets] and [evaluation] hold exactly the arguments
    of the loader, the method, the aggregator, `Budget`, `BudgetDistribution` and `Evaluation`; `resolve` checks them
    against those, and makes these objects. [silo_limits] holds ε by adversary, [card] what the model card says.
    Tables that commands of other packages read, such as [statistics], are extra fields (`tables`); every command checks
    them. [[callbacks]] holds names and arguments of what follows `silodp run` (`config.callbacks`).
    A method with `rounds` and `delta` gets those of the run unless its table sets them.
    """

    model_config = ConfigDict(extra="allow")  # `parse_config` refuses all that no package reads
    __pydantic_extra__: dict[str, TomlTable]

    # It is the name of a directory: no path, and no dot at its beginning.
    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*$", max_length=100)]
    rounds: Annotated[int, Field(ge=0, le=MAX_WHOLE)] = 40
    seed: Annotated[int, Field(ge=0)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    accountant: str | None = None
    aggregator: str = "plain"
    aggregation: TomlTable = Field(default_factory=dict)
    evaluate_every: Annotated[int, Field(ge=1, le=MAX_WHOLE)] = 1
    isolate_units: bool | None = None
    data: TomlTable
    task: TaskSection = Field(default_factory=TaskSection)
    method: TomlTable
    methods: dict[str, TomlTable] = Field(default_factory=dict)
    budget: TomlTable | None = None
    silo_limits: dict[Adversary, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    budgets: TomlTable | None = None
    evaluation: TomlTable | None = None
    callbacks: tuple[TomlTable, ...] | None = None
    card: CardSection | None = None

    @field_validator("accountant")
    @classmethod
    def _check_accountant(cls, name: str | None) -> str | None:
        if name is not None and name not in ACCOUNTANTS and find_reference(name, ACCOUNTANTS) is None:
            raise SilodpError(
                f"accountant = {shorten(name)}: set one of {', '.join(ACCOUNTANTS)}, or 'file.py:Name'.",
                code="config.value",
                field="accountant",
            )
        return name

    @property
    def tables(self) -> dict[str, TomlTable]:
        """The tables that commands of other packages read, by name."""
        return {name: table for name, table in self.__pydantic_extra__.items() if table is not None}

    def to_toml(self) -> str:
        """Return the configuration as TOML; `load_config` reads the same configuration from it."""
        return tomli_w.dumps(drop_empty_tables(self.model_dump(exclude_none=True)))


def parse_config(values: Mapping[str, Any], folder: Path | None = None) -> RunConfig:
    """Make a configuration from plain values; `resolve` makes the objects that it describes.

    Args:
        values: Tables, arrays, numbers and text, as TOML has them.
        folder: Relative paths in the values are relative to it; None is the current folder.

    Raises:
        SilodpError: an unknown or missing setting, or a value of another type or range.
    """
    check_plain(values)
    try:
        # Through JSON, so that pydantic reads arrays as tuples, and is strict all the same: true is no number.
        absolute = resolve_paths(_choose_delta(values), (folder or Path.cwd()).resolve())
        config = RunConfig.model_validate_json(json.dumps(put_tables_last(absolute)))
    except ValidationError as error:
        raise _convert_error(error) from None
    for name in config.tables:
        if name not in TABLES and name not in PACKAGES:
            raise _make_unknown(name, "")
    return config


def _choose_delta(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings with the δ of [budget] for that of the run, where this has none."""
    section = values.get("budget")
    delta = section.get("delta") if isinstance(section, Mapping) else None
    # What is no δ stays in [budget] alone, where it is refused under its own name.
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
    *above, name = map(str, first["loc"])
    # An unknown setting beside the sections is no table, or it would be an extra field.
    is_extra = not above and name not in RunConfig.model_fields and error.title == RunConfig.__name__
    if first["type"] != "extra_forbidden" and not (is_extra and name not in {*TABLES, *PACKAGES}):
        return convert_validation_error(error, RunConfig)
    return _make_unknown(name, ".".join(above))


def _make_unknown(name: str, section: str) -> SilodpError:
    """Return the error about a setting that nobody reads, of a section or ("") beside them."""
    if not section and (home := _find_section(name)):
        return SilodpError(
            f"{name} is not a field of the configuration: write {home}.{name}.",
            code="config.unknown_field",
            field=name,
        )
    owners: dict[str, type[BaseModel]] = {"": RunConfig, "card": CardSection, "task": TaskSection}
    what = f"[{section}]" if section else "the configuration"
    known = [*owners[section].model_fields, *([] if section else TABLES)]
    return make_unknown_error(name, known, what, section)


def _find_section(name: str) -> str | None:
    """Return the section that has a field of this name; None where none has."""
    # Imported for the message alone: methods load torch.
    from silodp.accounting.ledger import Budget
    from silodp.aggregators.registry import AGGREGATORS
    from silodp.aggregators.series import SERIES
    from silodp.methods import METHODS

    sections: dict[str, Iterable[Callable[..., Any]]] = {
        "method": METHODS.values(),
        "budget": [Budget],
        "aggregation": AGGREGATORS.values(),
        **{name: [kind] for name, kind in SERIES.items()},
        "task": [TaskSection],
        "card": [CardSection],
    }
    return next(
        (at for at, makers in sections.items() if any(name in get_fields(one) for one in makers)), None
    )
