"""Settings that may differ between the clients of `ddp` (docs/decoupled.md; DDP, A.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from silodp.errors import SilodpError
from silodp.text import pluralize


@dataclass(frozen=True)
class Client:
    """One client's settings.

    Attributes:
        noise_multiplier: σ_i, of one step, in units of the clip.
        clip: C_i.
        steps: J_i, the number of local steps in a round.
        learning_rate: γ_i.
        rate: γ_i/γ_ref, the learning rate in units of the largest one.

    Source: DDP (Heikkilä), section A.3.
    """

    noise_multiplier: float
    clip: float
    steps: int
    learning_rate: float
    rate: float

    @property
    def reach(self) -> float:
        """c_i = C_i·γ_i/γ_ref: how far one record can move what is sent, in one step."""
        return self.clip * self.rate

    @property
    def variance(self) -> float:
        """J_i(σ_i c_i)², of all the noise in what this client sends."""
        return self.steps * (self.noise_multiplier * self.reach) ** 2


PER_CLIENT = ("noise_multiplier", "clip", "local_steps", "local_learning_rate")
"""The settings, in the order of `Client`'s."""


def read_per_client(method: object) -> dict[str, tuple[Any, ...]]:
    """Return the settings that are given one by one, as tuples.

    Raises:
        SilodpError: there are different numbers of them.
    """
    given = {name: getattr(method, name) for name in PER_CLIENT}
    found = {
        name: tuple(np.asarray(value).tolist())
        for name, value in given.items()
        if isinstance(value, tuple | list | np.ndarray)  # a list, as a config has it
    }
    if len({len(values) for values in found.values()}) > 1 or () in found.values():
        counts = " and ".join(f"{name} has {len(values)}" for name, values in found.items())
        raise SilodpError(
            f"{counts} values: give one for each client, or one number for all.", code="argument.shape"
        )
    return found


def expand_per_client(settings: Mapping[str, Any], silos: int) -> tuple[Client, ...]:
    """Return all clients' settings, in the public order.

    Raises:
        SilodpError: there are more or fewer values than clients.
    """
    columns = []
    for name in PER_CLIENT:
        value = settings[name]
        if isinstance(value, tuple) and len(value) != silos:
            raise SilodpError(
                f"{name} has {pluralize(len(value), 'value')} for {pluralize(silos, 'client')}: give one for each, "
                "or one number for all.",
                code="argument.shape",
                field=name,
            )
        columns.append((value,) * silos if isinstance(value, Real) else value)
    largest = max(columns[-1])
    return tuple(
        Client(sigma, clip, steps, rate, rate / largest)
        for sigma, clip, steps, rate in zip(*columns, strict=True)
    )
