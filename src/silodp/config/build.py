"""Objects from the tables of a configuration: methods, aggregators, tasks, and code outside the package.

Names, types and defaults are read from the signature of the dataclass or function itself, so a configuration cannot
differ from the Python API. Everything that does not fit is one sentence that names the field, its value and a remedy.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import numpy as np
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from silodp.aggregators import Aggregator
from silodp.aggregators.registry import AGGREGATORS
from silodp.data.dataset import Dataset
from silodp.data.public import PublicData
from silodp.errors import SilodpError, describe_exception, first_line, lookup, shorten, suggest_name
from silodp.methods import METHODS, Method
from silodp.training.losses import LOSSES, Loss
from silodp.training.metrics import METRICS, Metric
from silodp.training.models import MODELS

if TYPE_CHECKING:  # a plan does not import torch, which takes seconds
    from torch import nn

    from silodp.training.task import Task

T = TypeVar("T")


# --- from a table of values to arguments ---------------------------------------------------------------------------


def build(maker: Callable[..., T], values: Mapping[str, Any], what: str, where: str = "") -> T:
    """Call `maker(**values)` after every value is checked against the signature of the maker.

    Args:
        maker: a dataclass or a function; its annotations decide.
        values: as TOML gives them (a list may stand for a tuple, a table for a dataclass).
        what: name of the result for messages, for example "uldp-avg".
        where: section that the values come from, for example "method"; "" for none.

    Returns:
        What the maker returns.

    Raises:
        SilodpError: an unknown field (with the closest one), a missing one, a wrong type, or anything that the maker
            refuses.
    """
    return maker(**validate_arguments(maker, values, what, where))


def validate_arguments(
    maker: Callable[..., Any], values: Mapping[str, Any], what: str, where: str = ""
) -> dict[str, Any]:
    """Return the arguments that `build` would pass, without a call of the maker; arguments and errors as there."""
    fields = get_fields(maker)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in _get_parameters(maker).values())
    for name in values:
        if name not in fields and not takes_any:
            raise SilodpError(
                describe_unknown(name, fields, what, where),
                code="config.unknown_field",
                field=_join(where, name),
            )
    for name, parameter in fields.items():
        if name not in values and parameter.default is parameter.empty:
            raise SilodpError(
                f"{_join(where, name)} is missing: {what} needs it.",
                code="config.missing_field",
                field=_join(where, name),
            )
    hints = _get_hints(maker)
    return {name: _convert(hints.get(name, Any), value, _join(where, name)) for name, value in values.items()}


def get_fields(maker: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters that can be given by name, without `*args` and `**kwargs`."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in _get_parameters(maker).items() if p.kind in by_name}


def get_table_class(maker: Callable[..., Any], field: str) -> type | None:
    """Return the dataclass that a field is a table of; None where it is none, or no field."""
    return _find_dataclass(_get_hints(maker).get(field))


def describe_unknown(name: str, known: Iterable[str], what: str, where: str = "") -> str:
    """Return the sentence about an unknown field, with the closest known one."""
    known = list(known)
    remedy = suggest_name(name, known) or f"use {', '.join(known) or 'none'}."
    return f"{_join(where, shorten(name)[1:-1])} is not a field of {what}: {remedy}"


def convert_validation_error(error: ValidationError) -> SilodpError:
    """Return the first complaint of pydantic as one sentence."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "value_error":
            inner = first["ctx"]["error"]
            if isinstance(inner, SilodpError):
                return inner
            return SilodpError(str(inner), code="config.value", field=field or None)
        case "missing":
            return SilodpError(f"{field} is missing: set it.", code="config.missing_field", field=field)
        case "model_type" | "dict_type":
            return _no_table(field, first["input"])
    return _wrong_value(field, first["input"], error)


def _no_table(field: str, value: object) -> SilodpError:
    return SilodpError(
        f"{field} = {shorten(value)}: it should be a table of fields.", code="config.value", field=field
    )


def _wrong_value(field: str, value: object, error: ValidationError) -> SilodpError:
    expected = re.sub(r"^\w+ should", "it should", error.errors()[0]["msg"])
    return SilodpError(f"{field} = {shorten(value)}: {expected}.", code="config.value", field=field)


def _get_parameters(maker: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(maker).parameters
    except ValueError:  # a function written in C without a signature
        name = getattr(maker, "__name__", repr(maker))
        raise SilodpError(
            f"'{name}' does not say which arguments it takes: wrap it in a Python function.",
            code="config.no_signature",
        ) from None


def _get_hints(maker: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(maker.func if isinstance(maker, partial) else maker)
    except (NameError, AttributeError, TypeError):
        # A user's function may have annotations that are imported for type checkers only: no checks of types then.
        return {}


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Return a value as the annotation wants it; a table becomes the dataclass that it stands for."""
    table = _find_dataclass(hint)
    if table is not None and not (value is None and table is not hint):
        if isinstance(value, table):
            return value
        if not isinstance(value, Mapping):
            raise _no_table(where, value)
        if hasattr(table, "registry"):  # a base class: the `name` in the table selects the class
            table, value = _select_class(table, value, where)
        return build(table, value, where, where)
    if hint is Any:
        return value
    try:
        # As JSON a list may stand for a tuple, while "5" is still no number and true not 1.
        return TypeAdapter(hint).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise _wrong_value(where, value, error) from None
    except PydanticUserError:  # a type that pydantic does not know
        return value


def _select_class(base: Any, table: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """Return the class that a table names, in the registry of its base class or by reference; and the other fields."""
    rest = dict(table)
    name = rest.pop("name", None)
    if not isinstance(name, str):
        raise SilodpError(
            f"{where}.name is missing: use one of {', '.join(base.registry())}, or 'file.py:Name'.",
            code="config.missing_field",
            field=f"{where}.name",
        )
    return find_plugin(name, base.registry(), base, f"{where}.name"), rest


def _find_dataclass(hint: Any) -> type | None:
    """Return the dataclass that a table becomes, also where the hint allows None instead."""
    choices = [choice for choice in get_args(hint) if choice is not type(None)]
    if isinstance(hint, UnionType) and len(choices) == 1:
        return _find_dataclass(choices[0])
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where and name else where or name


# --- code outside the package: "file.py:Name" or "package.module:Name" -------------------------------------------


_RUNS_NO_CODE: ContextVar[bool] = ContextVar("runs_no_code", default=False)


@contextmanager
def refuse_plugins() -> Iterator[None]:
    """Refuse every reference to code outside the package, also as a decorator: `@refuse_plugins()`.

    A report is made of files that may come from elsewhere, so it must not run what they refer to.
    """
    token = _RUNS_NO_CODE.set(True)
    try:
        yield
    finally:
        _RUNS_NO_CODE.reset(token)


def is_reference(name: str) -> bool:
    """Return whether a name refers to code outside the package."""
    return ":" in name


def find_plugin(name: str, registry: Mapping[str, type[T]], base: Any, where: str) -> type[T]:
    """Return the class of a method, an aggregator or an accountant.

    Args:
        name: a name in `registry`, or a reference to a subclass of `base`.
        registry: classes of the package by name.
        base: class that an outside class must be derived from.
        where: field of the configuration, for messages.

    Raises:
        SilodpError: an unknown name, a module that cannot be imported, or an object that is no such class.
    """
    if not is_reference(name):
        return lookup(name, registry, where)
    found = import_reference(name, where)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise SilodpError(
            f"{where} = '{name}' is no class derived from {base.__module__}.{base.__name__}: refer to one.",
            code="config.value",
            field=where,
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if inspect.isabstract(found):
        raise SilodpError(
            f"{where} = '{name}' lacks {', '.join(missing)}, which {base.__name__} leaves to it: define them there.",
            code="config.value",
            field=where,
        )
    return found


def check_own_name(plugin: Any, registry: Mapping[str, type[Any]], where: str) -> None:
    """Check that a plug-in does not bear the name of one of the package's: ledgers and reports name it.

    Raises:
        SilodpError: it does.
    """
    if registry.get(plugin.name, type(plugin)) is not type(plugin):
        raise SilodpError(
            f"{where}: {type(plugin).__name__}.name = '{plugin.name}' is taken by silodp's: give it another name.",
            code="config.value",
            field=where,
        )


def import_reference(reference: str, where: str) -> Any:
    """Import what a reference names.

    Args:
        reference: "package.module:name" or "path/file.py:name"; a leading "python:" is allowed.
        where: field of the configuration, for messages.

    Raises:
        SilodpError: the module cannot be imported, or has no such name, or no such code may be run here.
    """
    if _RUNS_NO_CODE.get():
        raise SilodpError(
            f"it refers to '{reference}', and a report runs no code outside silodp",
            code="report.foreign_code",
            field=where,
        )
    place, _, name = reference.removeprefix("python:").rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        reason = describe_exception(error) if isinstance(error, SystemExit) else first_line(error)
        raise SilodpError(
            f"{where} = '{reference}': {place} cannot be imported ({reason or type(error).__name__}): correct it.",
            code="config.not_importable",
            field=where,
        ) from error
    if not hasattr(module, name):
        raise SilodpError(
            f"{where} = '{reference}': {place} has no '{name}': refer to a function defined there.",
            code="config.not_importable",
            field=where,
        )
    return getattr(module, name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    status = path.stat()
    return _execute(path.resolve(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _execute(path: Path, modified: int, size: int) -> Any:
    # Once for each version of a file: a class that is loaded twice would not be equal to itself.
    # The module's name is the file's alone, so that a file may be called as a module is that exists already.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


# --- methods and aggregators ---------------------------------------------------------------------------------------


def build_method(name: str, fields: Mapping[str, Any], where: str) -> Method:
    """Make the method of a name or reference from its table of fields.

    Args:
        name: a name in `METHODS`, or a reference to a class.
        fields: the table, without the name.
        where: section of the configuration, for messages.

    Raises:
        SilodpError: an unknown name or field, a wrong type, or a value that the method refuses.
    """
    named = f"{where}.name" if where == "method" else "method"
    method: Method = build(find_method_class(name, named), fields, name, where)
    check_own_name(method, METHODS, named)
    return method


def find_method_class(name: str, where: str) -> type[Method]:
    """Return the class of a method by its name, or by a reference "file.py:Name".

    Raises:
        SilodpError: there is none.
    """
    return find_plugin(name, METHODS, Method, where)


def add_defaults(maker: Any, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with those of `defaults` that a class, or a table in it, has and that are not given."""
    tables = {key: get_table_class(maker, key) for key in fields}
    given = {
        key: add_defaults(tables[key], value, defaults)
        if tables[key] and isinstance(value, Mapping)
        else value
        for key, value in fields.items()
    }
    return {**{key: value for key, value in defaults.items() if key in get_fields(maker)}, **given}


def build_aggregator(name: str, fields: Mapping[str, Any]) -> Aggregator:
    """Make the aggregator of a name or reference from an [aggregation] table.

    A setting that only other aggregators have is refused, not ignored: it may say how many silos a sum must hide
    among, and a user who changes the aggregator alone (`--set aggregator=plain`) must learn that this is lost.

    Raises:
        SilodpError: an unknown name or setting, or a value that the aggregator refuses.
    """
    maker = find_plugin(name, AGGREGATORS, Aggregator, "aggregator")
    accepted = {field: value for field, value in fields.items() if field in get_fields(maker)}
    for field in (field for field in fields if field not in accepted):
        others = [other for other, its in AGGREGATORS.items() if field in get_fields(its)]
        if others:
            kept = ", ".join(f"{key} = {json.dumps(value)}" for key, value in accepted.items())
            raise SilodpError(
                f"aggregation.{field} is a setting of {' and '.join(others)}, and the aggregator is {name}: take it "
                f"out of [aggregation], or replace that table by --set 'aggregation={{{kept}}}'.",
                code="config.unknown_field",
                field=f"aggregation.{field}",
            )
    aggregator: Aggregator = build(maker, fields, name, "aggregation")
    check_own_name(aggregator, AGGREGATORS, "aggregator")
    return aggregator


# --- the task: model, loss and metrics -----------------------------------------------------------------------------


def build_task(
    public: PublicData,
    dataset: Dataset | None = None,
    model: str | None = None,
    options: Mapping[str, Any] | None = None,
    loss: str | None = None,
    metrics: tuple[str, ...] | None = None,
    seed: int | None = None,
) -> Task:
    """Build the task of a configuration; None follows from the data set, else from the kind of label.

    Args:
        public: facts of the data: shape of a record, number of classes, kind of label.
        dataset: its defaults of model, loss and metrics.
        model: a name in `MODELS`, or a reference to a function that returns a `torch.nn.Module`; it gets `features`
            and `classes` if it takes them.
        options: further arguments of that function.
        loss: a name in `LOSSES`, or a reference to a `Loss` or to an f(outputs, targets) -> (n,).
        metrics: names in `METRICS` or references.
        seed: for parameters that no layer re-initializes.

    Raises:
        SilodpError: a name or a reference that is not found, or a model that cannot be built.
    """
    from silodp.training.task import Task

    survival = public.labels == "survival"
    if dataset is not None:
        model = dataset.model if model is None else model
        loss = dataset.loss if loss is None else loss
        metrics = dataset.metrics if metrics is None else metrics
    if model is None:
        model = "logistic" if public.classes else "cox_linear"
    network = _build_model(model, options or {}, public, seed)
    if loss is None and public.classes:
        loss = "binary_cross_entropy" if _count_outputs(network, public) == 1 else "cross_entropy"
    elif loss is None:
        loss = "cox" if survival else "squared_error"
    if metrics is None and survival:
        metrics = ("concordance",)
    elif metrics is None:
        metrics = {None: (), 2: ("accuracy", "roc_auc")}.get(public.classes, ("accuracy",))
    return Task(network, _find_loss(loss), {_short_name(name): _find_metric(name) for name in metrics})


def _build_model(name: str, options: Mapping[str, Any], data: PublicData, seed: int | None) -> nn.Module:
    import torch
    from torch import nn

    builder = _find(name, MODELS, "task.model")
    if isinstance(builder, nn.Module):
        return builder
    if not callable(builder):
        raise SilodpError(
            f"task.model = '{name}' is of type {type(builder).__name__}: refer to a function or a module.",
            code="model.not_a_module",
            field="task.model",
        )
    public = {"features": int(np.prod(data.record_shape)), "classes": data.classes}
    taken = {key: value for key, value in public.items() if key in get_fields(builder) and value is not None}
    arguments = validate_arguments(builder, {**taken, **options}, f"the model '{name}'", "task.options")
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            network = builder(**arguments)
        except SilodpError:
            raise
        except (Exception, SystemExit) as error:
            raise SilodpError(
                f"task.model = '{name}' raised {describe_exception(error)}: correct it, or its task.options.",
                code="model.raised",
                field="task.model",
            ) from error
    if not isinstance(network, nn.Module):
        raise SilodpError(
            f"task.model = '{name}' returned an object of type {type(network).__name__}: "
            "let it return a torch.nn.Module.",
            code="model.not_a_module",
            field="task.model",
        )
    return network


def _count_outputs(network: nn.Module, public: PublicData) -> int:
    """Return the number of outputs that the model has per record, counted on made-up records."""
    import torch

    from silodp.training.model_checks import inspect_model, inspect_on

    inspect_model(network)
    example = torch.from_numpy(public.synthetic_batch()[0]).to(next(network.parameters()))
    inspect_on(network, example)
    with torch.no_grad():
        return int(network(example)[0].numel())


def _find_loss(name: str) -> Loss:
    found = _find(name, LOSSES, "task.loss")
    if isinstance(found, Loss):
        return found
    return Loss.per_record(_short_name(name), found) if is_reference(name) else found()


def _find_metric(name: str) -> Metric:
    metric: Metric = _find(name, METRICS, "task.metrics")
    return metric


def _short_name(name: str) -> str:
    return name.rpartition(":")[2].replace("-", "_")


def _find(name: str, registry: Mapping[str, Callable[..., Any]], where: str) -> Any:
    return import_reference(name, where) if is_reference(name) else lookup(name, registry, where)
