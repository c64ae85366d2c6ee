"""NVIDIA FLARE: the filters of a client's result; facts are of nvflare 2.9.

Filters are read from config_fed_client.json (`task_result_filters`) or privacy.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from silodp.config.toml_values import TomlTable
from silodp.errors import SilodpError
from silodp.planning.frameworks.base import (
    CLIENT,
    RECORD,
    SERVER,
    Bound,
    Finding,
    Framework,
    Settings,
    list_persons,
    no_guarantee,
)

_DEFAULTS = {"fraction": 0.1, "epsilon": 0.1, "noise_var": 0.1, "gamma": 1e-5}
_WITHOUT_NOISE = {
    "PercentilePrivacy": "PercentilePrivacy leaves out small weights and truncates others; it adds no noise",
    "ExcludeVars": "ExcludeVars leaves out variables; it adds no noise",
}
_FILTER = "filter"


class NvFlare(Framework):
    """NVIDIA FLARE."""

    name = "nvflare"
    files = "config_fed_client.json of the job"
    without_effect = ("tau", "replace", "data_kinds", "percentile", "gamma", "exclude_vars")

    def pick(self, content: Any) -> TomlTable:
        """Return the arguments of the filter with noise, else the name of the last filter that is known."""
        found: TomlTable = {}
        for name, arguments in _list_filters(content):
            if name == "SVTPrivacy":
                return {_FILTER: name, **arguments}
            if name in _WITHOUT_NOISE:
                found = {_FILTER: name}
        if not found:
            raise SilodpError(
                "the file has no filter SVTPrivacy, PercentilePrivacy or ExcludeVars: name config_fed_client.json with "
                "task_result_filters.",
                code="config.value",
            )
        return found

    def check(self, settings: Settings, delta: float | None) -> Finding:
        """Return what holds for the filter."""
        rounds = settings.whole("num_rounds", "rounds")
        found = settings.delta(delta, "delta")
        name = settings.values[_FILTER] if _FILTER in settings else "SVTPrivacy"
        if name in _WITHOUT_NOISE:
            return Finding("nvflare", name, found, rounds, no_guarantee(SERVER, _WITHOUT_NOISE[name]))
        if name != "SVTPrivacy":
            raise SilodpError(
                f"filter = '{name}' is not known: use SVTPrivacy, {' or '.join(_WITHOUT_NOISE)}.",
                code="argument.value",
                field=_FILTER,
            )
        return _check_sparse_vector(settings, found, rounds)


def _check_sparse_vector(settings: Settings, delta: float, rounds: int) -> Finding:
    """Check `SVTPrivacy` (Lyu, Su and Li 2017, Algorithm 7, with c = fraction·d answers, then c noisy values).

    Every query is |w_i| clipped to γ, so it moves by at most γ. The threshold's noise γ/ε₁ costs ε₁. An accepted query
    has noise 2cγ/ε₂ and costs ε₂/c. The filter goes on after c of them have been accepted, up to all d, so the
    selection costs at most ε₁ + (d/c)·ε₂. A released value moves by up to 2γ under Laplace noise 2γ/noise_var: c values
    cost c·noise_var. All this is pure differential privacy of a client's whole update, and adds up over rounds.
    """
    size = settings.whole("dimension", "num_parameters")
    fraction = settings.share("fraction", default=_DEFAULTS["fraction"])
    epsilon = settings.number("epsilon", default=_DEFAULTS["epsilon"])
    released = min(math.ceil(size * fraction), size)
    ratio = (2.0 * released) ** (2 / 3)
    query = settings.number(
        "epsilon_query", default=epsilon - settings.number("epsilon_threshold", default=epsilon / (1 + ratio))
    )
    threshold = settings.number("epsilon_threshold", default=epsilon - query)
    if min(threshold, query) <= 0 or not math.isclose(threshold + query, epsilon):
        raise SilodpError(
            f"epsilon_threshold and epsilon_query must be above 0, with the sum epsilon = {epsilon:g}: leave one of "
            "them out.",
            code="argument.conflict",
            field="epsilon_query",
        )
    values = settings.number(
        "epsilon_release",
        default=released * settings.number("noise_var", default=_DEFAULTS["noise_var"]),
    )
    stated = epsilon + values
    spent = threshold + query * size / released + values
    # Pure ε adds up over rounds and over clients, whose noise is independent; at any δ it is an upper bound.
    units = {CLIENT: 1, RECORD: 1, **list_persons()}
    return Finding(
        "nvflare",
        f"SVTPrivacy, {released:,} of {size:,} weights a round, gamma {settings.number('gamma', default=1e-5):g}",
        delta,
        rounds,
        tuple(Bound(SERVER, unit, spent * clients * rounds) for unit, clients in units.items()),
        epsilon,
        "by the setting epsilon",
        (
            f"epsilon is spent on choosing the weights alone; releasing {released:,} of them costs {values:,.5g} more "
            "in each round",
            *(
                ["the choice goes on after its last paid answer, up to all weights"]
                if released < size
                else []
            ),
            *(["it is about one round, and the rounds add up"] if rounds > 1 else []),
            f"nvflare's own accountant (since 2.8) states {stated * rounds:,.5g}",
        ),
        (
            "all variables are arrays: single numbers pass the filter as they are",
            "the number of local steps, by which updates are scaled, is public",
            "whether a client takes part does not depend on its records",
        ),
    )


def _list_filters(content: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield class name and arguments of everything that looks like a filter, at any depth."""
    if isinstance(content, list):
        for each in content:
            yield from _list_filters(each)
    elif isinstance(content, Mapping):
        path = content.get("path") or content.get("name")
        if isinstance(path, str):
            arguments = content.get("args")
            yield path.rpartition(".")[2], arguments if isinstance(arguments, Mapping) else {}
        for each in content.values():
            yield from _list_filters(each)
