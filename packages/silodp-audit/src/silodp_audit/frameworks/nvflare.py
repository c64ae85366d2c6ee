"""NVIDIA FLARE: the filters of a client's result; facts are of nvflare 2.9.0.

Filters are read from the `task_result_filters` of config_fed_client.json, which name their tasks, or of a scope of
privacy.json, where they are for all tasks. Filters of what comes in (`task_data_filters`) protect nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from silodp.config.toml_values import TomlTable
from silodp.errors import SilodpError
from silodp.text import join_names
from silodp_audit.frameworks import base

_DEFAULTS = {"fraction": 0.1, "epsilon": 0.1, "noise_var": 0.1, "gamma": 1e-5}
_WITHOUT_NOISE = {
    "PercentilePrivacy": "PercentilePrivacy leaves out small weights and truncates others; it adds no noise",
    "ExcludeVars": "ExcludeVars leaves out variables; it adds no noise",
}
_ENTRIES = (
    "entries without dimensions, such as num_batches_tracked of BatchNorm, which pass the filter as they are"
)
_FILTER, _TASKS, _TASK = "filter", "tasks", "task"


class NvFlare(base.Framework):
    """NVIDIA FLARE."""

    name = "nvflare"
    files = "config_fed_client.json of the job"
    without_effect = (
        *("tau", "replace", "data_kinds", "percentile", "gamma", "exclude_vars"),
        *("dimension", "num_parameters", "task"),  # they have one for a filter with noise
    )

    def pick(self, content: Any) -> TomlTable:
        """Return the arguments of the filter with noise and its tasks, else the name of the last filter that is known.

        Names of other filters are returned, too, as settings that nothing reads.
        """
        listed = list(_list_result_filters(content))
        noisy = [each for each in listed if each[0] == "SVTPrivacy"]
        others = [each for each in listed if each[0] in _WITHOUT_NOISE]
        if not noisy and not others:
            raise SilodpError(
                "the file has no filter SVTPrivacy, PercentilePrivacy or ExcludeVars among its task_result_filters: "
                "name config_fed_client.json, or privacy.json with the job's scope as default_scope.",
                code="config.value",
            )
        # That of the usual task first, where several tasks have one of their own.
        name, arguments, tasks = next(
            (each for each in noisy if _covers(each[2], "train")), (noisy or others[-1:])[0]
        )
        unread = {other: True for other, _, _ in listed if other != name and other not in _WITHOUT_NOISE}
        return {**unread, **arguments, _FILTER: name, **({} if tasks is None else {_TASKS: tasks})}

    def check(self, settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
        """Return what holds for the filter."""
        rounds = settings.whole("num_rounds", "rounds")
        found = settings.delta(delta, "delta")
        name = settings.values[_FILTER] if _FILTER in settings else "SVTPrivacy"
        if name in _WITHOUT_NOISE:
            return base.Finding(
                "nvflare", name, found, rounds, base.no_guarantee(base.SERVER, _WITHOUT_NOISE[name])
            )
        if name != "SVTPrivacy":
            raise SilodpError(
                f"filter = '{name}' is not known: use SVTPrivacy, {join_names(_WITHOUT_NOISE, 'or')}.",
                code="argument.value",
                field=_FILTER,
            )
        task = str(settings.values[_TASK]) if _TASK in settings else "train"
        tasks = settings.values[_TASKS] if _TASKS in settings else None
        finding = _check_sparse_vector(settings, found, rounds, task)
        finding = base.exclude_entries(finding, settings, "scalar_entries", _ENTRIES)
        if tasks is None or _covers(tasks, task):
            return finding
        reason = (
            f"SVTPrivacy filters the results of {', '.join(map(str, tasks))}, and those of {task} leave the client "
            f"without noise ({_TASK}=NAME, if updates are the results of another task)"
        )
        return replace(finding, bounds=base.no_guarantee(base.SERVER, reason))


def _covers(tasks: Any, task: str) -> bool:
    """Return whether a filter is for a task; None: it is for all."""
    return tasks is None or task in tasks or "*" in tasks


def _check_sparse_vector(
    settings: base.FrameworkSettings, delta: float, rounds: int, task: str
) -> base.Finding:
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
    # As nvflare splits it: 1 : (2c)^(2/3) makes the comparisons most accurate (Lyu, Su and Li 2017).
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
    spent = threshold + query * size / released + values
    # Pure ε adds up over rounds and over clients, whose noise is independent; at any δ it is an upper bound.
    return base.Finding(
        "nvflare",
        f"SVTPrivacy, {released:,} of {size:,} weights a round, gamma {settings.number('gamma', default=1e-5):g}",
        delta,
        rounds,
        tuple(
            base.Bound(base.SERVER, unit, spent * max(1, clients) * rounds)
            for unit, clients in base.UNITS.items()
        ),
        (epsilon + values) * rounds,
        "for a client, by the filter's accountant",
        (
            f"the setting epsilon = {epsilon:g} is for choosing the weights of one round alone; releasing {released:,} "
            f"of them costs {values:,.5g} more in each",
            *(
                ["the choice goes on after its last paid answer, up to all weights"]
                if released < size
                else []
            ),
        ),
        (
            f"no result but those of {task} depends on records, or it is filtered, too: see the job's other tasks, for "
            "example validate and submit_model",
            "the number of local steps, by which updates are scaled, is public",
            f"all results of {task} are of a kind in data_kinds, by default weights and their differences: others pass",
            "whether a client takes part does not depend on its records",
        ),
    )


def _list_result_filters(content: Any) -> Iterator[tuple[str, Mapping[str, Any], list[Any] | None]]:
    """Yield class name, arguments and tasks (None: all) of the filters of a client's results."""
    for entry in _list_entries(_find_scope(content), "task_result_filters"):
        tasks = entry.get("tasks")
        for each in _list_entries(entry, "filters") if "filters" in entry else [entry]:
            path = each.get("path") or each.get("class_path") or each.get("name")
            if isinstance(path, str) and each.get("direction") != "in":
                arguments = each.get("args")
                yield (
                    path.rpartition(".")[2],
                    arguments if isinstance(arguments, Mapping) else {},
                    tasks if isinstance(tasks, list) else None,
                )


def _list_entries(content: Any, key: str) -> list[Mapping[str, Any]]:
    found = content.get(key) if isinstance(content, Mapping) else None
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def _find_scope(content: Any) -> Any:
    """Return the scope of privacy.json that jobs without a scope of their own have; any other content as it is.

    Raises:
        SilodpError: no scope is the default one, and there are several or none.
    """
    if not isinstance(content, Mapping) or "scopes" not in content:
        return content
    scopes, default = _list_entries(content, "scopes"), content.get("default_scope")
    found = [scope for scope in scopes if default is None or scope.get("name") == default]
    if len(found) != 1:
        names = ", ".join(str(scope.get("name")) for scope in scopes)
        raise SilodpError(
            f"default_scope names none of the scopes ({names}): set it to the scope of the job in meta.json.",
            code="config.value",
            field="default_scope",
        )
    return found[0]
