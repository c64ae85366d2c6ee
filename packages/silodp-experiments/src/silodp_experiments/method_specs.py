"""The methods of a comparison, from the text of `compare --methods` and the tables of a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from silodp.config.build import build_method, find_method_class, get_fields, split_name
from silodp.config.resolve import ResolvedRun
from silodp.config.toml_values import TomlTable, apply_override, merge
from silodp.errors import SilodpError
from silodp.methods import FederationSize, Method

_SPEC_PART = re.compile(r"(?:[^:]*\.py:)?[^:]+")
"""The parts of a method's specification: its name or reference, and its settings."""

_ALIASES = {"k": "group_size", "q": "user_sampling", "sigma": "noise_multiplier"}
"""Short names of fields."""

_VARIANT = {"weighting", "group_size", "user_sampling", "record_sampling", "noise_multiplier", "personal"}
"""Settings that name a variant of a method; none of them says that its rates were chosen for it."""


@dataclass(frozen=True)
class MethodSpec:
    """One method of a comparison.

    Attributes:
        label: The name of the method in the comparison.
        method: The method.
        has_own_settings: Whether rates were chosen for the method: it is that of [method], or it was given a setting
            that does not only name a variant. Else its rates are those of [method], and the method is not tuned.
    """

    label: str
    method: Method
    has_own_settings: bool = True


def parse_methods(resolved: ResolvedRun, text: str) -> list[MethodSpec]:
    """Build the methods of `compare --methods`: "uldp-avg,uldp-avg:weighting=records,uldp-group:k=8".

    A field comes from the specification, else from [methods.NAME], else from [method] where both methods
    have it; but a server_learning_rate only from a method with the same server scale.

    Args:
        resolved: The configuration, with its tables and the public size of the federation.
        text: The specifications of the methods.

    Raises:
        SilodpError: an unknown method or field, or a required field that none of the three gives.
    """
    found = [_build_spec(resolved, part.strip()) for part in text.split(",") if part.strip()]
    if not found:
        raise SilodpError(
            "methods is empty: name at least one, for example uldp-avg.",
            code="argument.value",
            field="methods",
        )
    check_labels(found)
    return found


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


def _build_spec(resolved: ResolvedRun, text: str) -> MethodSpec:
    try:
        return _parse_spec(resolved, text)
    except SilodpError as error:
        if text in str(error):
            raise
        raise SilodpError(f"methods, at '{text}': {error}", code=error.code, field=error.field) from None


def _parse_spec(resolved: ResolvedRun, text: str) -> MethodSpec:
    name, *settings = _SPEC_PART.findall(text)
    if ".py:" in name:  # on a command line it is relative to where the command is given
        name = str(Path.cwd() / Path(name).expanduser())
    fields = get_fields(find_method_class(name, "methods"))
    configured, values = split_name(resolved.config.method, "method", "set it")
    inherited = {key: value for key, value in values.items() if key in fields}
    given: TomlTable = dict(resolved.config.methods.get(name, {}))
    for one in settings:
        key, equals, value = one.partition("=")
        given = apply_override(given, f"{_ALIASES.get(key, key)}{equals}{value}")

    def build_with(inherited: TomlTable) -> Method:
        where, config = f"methods.{name}", resolved.config
        return build_method(name, merge(inherited, given), where, config.rounds, config.delta)

    method = build_with(inherited)
    # Any number of users would do: only whether the two scales are the same function of S and U matters.
    # A run without silos is refused later, where its data are read.
    people = FederationSize(len(resolved.silos) or 2, users=3)
    same_scale = method.server_scale(people) == resolved.method.server_scale(people)
    if "server_learning_rate" not in given and not same_scale:
        # A rate has a meaning only with its scale: 20 on 1/(U·S) is not 20 on 1/S.
        inherited.pop("server_learning_rate", None)
        method = build_with(inherited)
    resolved.check_budgets(method)
    is_tuned = name == configured or bool(given.keys() - _VARIANT)
    return MethodSpec(text, method, has_own_settings=is_tuned)
