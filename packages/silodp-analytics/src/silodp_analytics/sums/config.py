"""From a table of a configuration that asks for sums to the run that releases them.

The run has the data, the silos and the aggregator of the configuration, and a method in which every public constant is
written out, with its noise. So the run's config.toml says all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from silodp.config.resolve import ResolvedRun, load_config, resolve
from silodp.config.schema import TaskSection
from silodp.config.toml_values import TomlTable, read_toml
from silodp.errors import SilodpError
from silodp.methods import METHODS
from silodp.settings import Epsilon, NoiseMultiplier, Settings
from silodp_analytics.evaluation.series import calibrate_releases
from silodp_analytics.sums.method import SumsMethod

M = TypeVar("M", bound=SumsMethod)

_ATTEMPTS = 20
"""The attempts of a round that encryption is sized for, where an aggregator limits them."""


@dataclass(frozen=True, kw_only=True)
class SumsRequest(Settings):
    """What tables that ask for sums have in common. A subclass has the name of its table as the prefix.

    Attributes:
        epsilon: The ε of all rounds together against whoever sees the sums.
        noise_multiplier: σ instead of ε.
        held_out: Whether records that a schema holds out for testing count like all others.
    """

    epsilon: Epsilon | None = None
    noise_multiplier: NoiseMultiplier | None = None
    held_out: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise SilodpError(
                f"{self._prefix}epsilon and {self._prefix}noise_multiplier both set the noise: keep one.",
                code="argument.conflict",
                field=f"{self._prefix}noise_multiplier",
            )

    def take_epsilon(self, epsilon: float | None, who: str) -> Self:
        """Return the request with an ε in place of its noise, if one is given.

        Args:
            epsilon: The ε; None keeps what is asked for.
            who: What needs noise, for the message, as in "statistics need".

        Raises:
            SilodpError: there is no noise (code argument.missing).
        """
        found = self if epsilon is None else replace(self, epsilon=epsilon, noise_multiplier=None)
        if found.epsilon is None and found.noise_multiplier is None:
            raise SilodpError(
                f"{who} noise: give --epsilon, or set {self._prefix}epsilon.",
                code="argument.missing",
                field=f"{self._prefix}epsilon",
            )
        return found


def load_request(path: str | Path, overrides: Iterable[str] = ()) -> ResolvedRun:
    """Read a configuration that asks for sums, as `load_config` does; it needs no method, nor noise to train with.

    Args:
        path: A TOML file.
        overrides: "key=value" with dotted keys.
    """
    method = read_toml(Path(path)).get("method")
    added = []
    if method is None:
        added = ['method={name="uldp-sgd", noise_multiplier=1.0}']
    elif isinstance(method, Mapping) and "noise_multiplier" not in method:
        kind = METHODS.get(str(method.get("name")))
        if kind is not None and "noise_multiplier" in {one.name for one in fields(kind)}:
            added = ["method.noise_multiplier=1.0"]
    return load_config(path, [*added, *overrides])


def derive_run(
    resolved: ResolvedRun,
    request: SumsRequest,
    method: M,
    to_table: Callable[[M], dict[str, Any]],
    rounds: int,
    **changes: Any,
) -> ResolvedRun:
    """Return the run that releases sums.

    Args:
        resolved: A configuration of a training run, of which the data, the silos, δ, the seed, the limits of silos and
            the aggregator are taken.
        request: What is asked for, with noise (`SumsRequest.take_epsilon`).
        method: The method with every public constant but the noise.
        to_table: Returns the table [method] from which a method is built again.
        rounds: T, the number of rounds.
        changes: Further settings in place of those of the configuration.
    """
    config = resolved.config
    aggregation = dict(config.aggregation)
    if resolved.aggregator.max_rounds is not None:
        # Encryption is sized for the ε of all attempts, and a training run has many more.
        aggregation["attempts"] = min(_ATTEMPTS * rounds, resolved.aggregator.max_rounds)
    changes = {
        "name": f"{config.name[:89]}-{method.name}",
        "data": _count_everybody(config.data) if request.held_out else config.data,
        "rounds": rounds,
        "aggregation": aggregation,
        "task": TaskSection(),  # no model is trained
        "methods": {},
        "budget": None,
        **dict.fromkeys(config.tables),  # no table of another command
        "evaluation": {"across": "none"},
        **changes,
    }

    def add_noise(noise_multiplier: float) -> ResolvedRun:
        table = to_table(replace(method, noise_multiplier=noise_multiplier))
        return resolve(config.model_copy(update=changes | {"method": table}))

    if request.noise_multiplier is not None:
        return add_noise(request.noise_multiplier)
    spec, _ = add_noise(1.0).build_public_spec()
    found = calibrate_releases(
        lambda noise: replace(spec, method=replace(method, noise_multiplier=noise)),
        request.epsilon or 0.0,
        spec.noise_delta,
        rounds,
    )
    return add_noise(found)


def _count_everybody(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return [data] without the rule that holds records out for testing, where a schema has one."""
    schema = data.get("schema")
    if not isinstance(schema, Mapping):
        return data
    left = {name: value for name, value in schema.items() if name not in ("split", "test_share")}
    split = schema.get("split")
    if "silos" in left and split is not None:
        # A mapping may name no column that the schema lacks.
        left["silos"] = {silo: _drop_column(mapping, split) for silo, mapping in left["silos"].items()}
    return {**data, "schema": left}


def _drop_column(mapping: Mapping[str, Any], column: str) -> TomlTable:
    """Return a silo's mapping without what it says of a column."""
    return {
        part: {name: value for name, value in of_columns.items() if name != column}
        for part, of_columns in mapping.items()
    }
