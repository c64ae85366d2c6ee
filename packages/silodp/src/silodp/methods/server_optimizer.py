"""Server optimizers: from the summed updates to the next model, and the model average that may be released.

Whatever a server optimizer does is post-processing of noisy sums: it costs no ε.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from silodp._lazy import Registry, torch
from silodp.errors import SilodpError
from silodp.settings import Momentum, Positive, Settings, Whole
from silodp.text import name_class

if TYPE_CHECKING:
    from torch import Tensor

State = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class ServerOptimizer(Settings, ABC, prefix="server_optimizer."):
    """Base class of server optimizers: a frozen dataclass of public constants.

    `step` must be written. Its state lives in the run's checkpoint, so that a resumed run takes the same steps.
    """

    @classmethod
    def registry(cls) -> Mapping[str, type[ServerOptimizer]]:
        """Return the classes that a table `[method.server_optimizer]` may name."""
        return SERVER_OPTIMIZERS

    def initial_state(self, params: Tensor) -> dict[str, Tensor]:
        """Return the state before the first round.

        Args:
            params: The untrained model (d,).

        Returns:
            Tensors by name, whose names, types and shapes stay the same; none by default. The name "params" and names
            that begin with "method/" are taken.
        """
        return {}

    @abstractmethod
    def step(
        self, params: Tensor, total: Tensor, state: State, learning_rate: float, scale: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the next model and the next state; neither argument is changed in place.

        Args:
            params: The present model (d,), on its device and of its type.
            total: The noisy sum (d,) of the silos' updates, float64 on the CPU, which points downhill.
            state: The state that `initial_state` or the last step returned.
            learning_rate: The method's `server_learning_rate` η_g.
            scale: The method's `server_scale`; scale·total is the mean update.

        Returns:
            The model (d,), and the state.
        """

    def output_params(self, params: Tensor, state: State) -> Tensor:
        """Return the model (d,) that a run returns if it ends after this step; by default the current one."""
        return params


# --- how callers ask an optimizer: a plug-in may return anything, which no checkpoint and no silo must get -----------


def start_state(optimizer: ServerOptimizer, params: Tensor) -> State:
    """Return the checked state of an optimizer before the first round of a model (d,).

    Raises:
        SilodpError: it is no mapping of names to tensors (code plugin.returned).
    """
    return _check_state(optimizer, "initial_state", optimizer.initial_state(params))


def take_step(
    optimizer: ServerOptimizer,
    params: Tensor,
    total: Tensor,
    state: State,
    learning_rate: float,
    scale: float,
) -> tuple[Tensor, State]:
    """Return the next model and state, checked; arguments as for `ServerOptimizer.step`.

    Raises:
        SilodpError: the optimizer returned something else (code plugin.returned).
    """
    found: object = optimizer.step(params, total, state, learning_rate, scale)
    if not (isinstance(found, tuple) and len(found) == 2):
        raise _make_error(optimizer, f"step returned {_describe(found)}: return the pair (params, state)")
    _check_params(optimizer, "step", found[0], params)
    return found[0], _check_state(optimizer, "step", found[1])


def compute_output(optimizer: ServerOptimizer, params: Tensor, state: State) -> Tensor:
    """Return the model (d,) that a run returns if it ends after this step, checked.

    Raises:
        SilodpError: the optimizer returned something else (code plugin.returned).
    """
    found = optimizer.output_params(params, state)
    _check_params(optimizer, "output_params", found, params)
    return found


def _check_params(optimizer: ServerOptimizer, member: str, found: object, params: Tensor) -> None:
    """Refuse what is no model like `params`: silos would refuse it in the next round, and be blamed for it."""
    wanted = params.shape, params.dtype, params.device
    if not (isinstance(found, torch.Tensor) and (found.shape, found.dtype, found.device) == wanted):
        raise _make_error(
            optimizer,
            f"{member} returned {_describe(found)} as the model: return {_describe(params)}, like the params it gets",
        )


def _check_state(optimizer: ServerOptimizer, member: str, found: object) -> State:
    """Return a state; refuse what no checkpoint could hold, or would read back as something else."""
    if not isinstance(found, Mapping):
        raise _make_error(
            optimizer, f"{member} returned {_describe(found)} as the state: return a dictionary of tensors"
        )
    for name, value in found.items():
        if not isinstance(name, str) or name == "params" or name.startswith("method/"):
            raise _make_error(
                optimizer,
                f"{member} returned a state with the name {name!r}, which is taken or no text: rename it",
            )
        if not isinstance(value, torch.Tensor):
            raise _make_error(
                optimizer,
                f"{member} returned a state with '{name}' = {_describe(value)}: make it a tensor (torch.tensor(...))",
            )
    return found


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a {dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"a {type(value).__name__}"


def _make_error(optimizer: ServerOptimizer, problem: str) -> SilodpError:
    return SilodpError(
        f"the server optimizer {name_class(type(optimizer))}: {problem}.",
        code="plugin.returned",
        field="method.server_optimizer",
    )


@dataclass(frozen=True)
class ServerSgd(ServerOptimizer):
    """Gradient descent with heavy-ball momentum: v ← momentum·v + total, x ← x + η_g·scale·v.

    Attributes:
        momentum: The factor in [0, 1) of the velocity that is kept from round to round.

    Source: FedAvgM, Hsu, Qi and Brown 2019 (Measuring the Effects of Non-Identical Data Distribution).
    """

    momentum: Momentum = 0.0

    def initial_state(self, params: Tensor) -> dict[str, Tensor]:
        """Return no velocity yet: {"velocity": (d,) float64}."""
        return {"velocity": torch.zeros(params.numel(), dtype=torch.float64)}

    def step(
        self, params: Tensor, total: Tensor, state: State, learning_rate: float, scale: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one step (see `ServerOptimizer.step`)."""
        # In float64, as the noisy sum: only the finished move is rounded to the type of the model.
        velocity = self.momentum * state["velocity"] + total
        rate = learning_rate * scale
        return params + (rate * velocity).to(params), {"velocity": velocity}


@dataclass(frozen=True)
class ServerAdam(ServerOptimizer):
    """FedAdam: m ← β₁m + (1−β₁)Δ, v ← β₂v + (1−β₂)Δ², x ← x + η_g·m/(√v + τ), for the mean update Δ.

    There is no bias correction, and v begins at τ², as published.

    Attributes:
        beta1, beta2: The factors in [0, 1) of the moments that are kept from round to round.
        adaptivity: The constant τ above 0, in units of the mean update; the smaller, the more adaptive.

    Source: Reddi et al., Adaptive Federated Optimization, 2021, Algorithm 2.
    """

    beta1: Momentum = 0.9
    beta2: Momentum = 0.99
    adaptivity: Positive = 1e-3

    def initial_state(self, params: Tensor) -> dict[str, Tensor]:
        """Return the moments before the first round: {"mean", "square"}, each (d,) float64."""
        # v begins at τ² and not at 0, so that the first steps are not divided by τ alone.
        zeros = torch.zeros(params.numel(), dtype=torch.float64)
        return {"mean": zeros, "square": torch.full_like(zeros, self.adaptivity**2)}

    def step(
        self, params: Tensor, total: Tensor, state: State, learning_rate: float, scale: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one step (see `ServerOptimizer.step`)."""
        # Of the mean update, so that τ keeps its meaning whatever the number of silos.
        update = scale * total
        mean = self.beta1 * state["mean"] + (1 - self.beta1) * update
        square = self.beta2 * state["square"] + (1 - self.beta2) * update**2
        move = learning_rate * mean / (square.sqrt() + self.adaptivity)
        return params + move.to(params), {"mean": mean, "square": square}


@dataclass(frozen=True)
class TailAverage(ServerOptimizer):
    """The model that is given out is the average of the last rounds' models; training goes on from the last one.

    The average smooths the noise of single rounds. Every model in it was seen by whoever sees the global models, so it
    costs no ε. The checkpoint grows by `last` models.

    Attributes:
        last: The number of rounds whose models are averaged; fewer, where fewer were run.
        optimizer: The optimizer that takes the steps.

    Source: tail averaging of Jain et al. 2018 (Parallelizing Stochastic Gradient Descent for Least Squares Regression).
    """

    last: Annotated[int, Whole(limit=10_000, what="rounds")]
    optimizer: ServerOptimizer = field(default_factory=ServerSgd)

    def initial_state(self, params: Tensor) -> dict[str, Tensor]:
        """Return no models yet: {"models": (last, d), "rounds": ()}, beside the state of `optimizer`."""
        inner = {f"optimizer/{name}": value for name, value in start_state(self.optimizer, params).items()}
        models = torch.zeros(self.last, params.numel(), dtype=params.dtype)
        return {**inner, "models": models, "rounds": torch.zeros((), dtype=torch.int64)}

    def step(
        self, params: Tensor, total: Tensor, state: State, learning_rate: float, scale: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one step of `optimizer`, and keep its model."""
        prefix = "optimizer/"
        inner = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
        params, after = take_step(self.optimizer, params, total, inner, learning_rate, scale)
        # A ring of fixed shape, newest last: shapes of the state must not change from round to round.
        models = torch.cat([state["models"][1:], params.detach().cpu()[None]])
        kept = {prefix + name: value for name, value in after.items()}
        return params, {**kept, "models": models, "rounds": state["rounds"] + 1}

    def output_params(self, params: Tensor, state: State) -> Tensor:
        """Return the average of the models kept, in double precision and back: (d,)."""
        # The first rows are zeros until so many rounds were run, and are left out.
        kept = min(int(state["rounds"]), self.last)
        return params if kept == 0 else state["models"][-kept:].double().mean(dim=0).to(params)


SERVER_OPTIMIZERS: Registry[type[ServerOptimizer]] = Registry(
    "server_optimizers",
    {
        "sgd": "silodp.methods.server_optimizer:ServerSgd",
        "adam": "silodp.methods.server_optimizer:ServerAdam",
        "tail-average": "silodp.methods.server_optimizer:TailAverage",
    },
)
"""The server optimizers by their names in a configuration."""
