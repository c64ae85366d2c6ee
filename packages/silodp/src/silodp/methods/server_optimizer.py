"""Server optimizers: from the summed updates to the next model, and the model average that may be released.

Whatever a server optimizer does is post-processing of noisy sums: it costs no ε.
"""

from __future__ import annotations

import math
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

_INNER = "optimizer/"
"""Before the names of the state of an optimizer within another one."""


@dataclass(frozen=True)
class Move:
    """What is public of a round and its noisy sum.

    Attributes:
        learning_rate: The method's `server_learning_rate` η_g.
        scale: The method's `server_scale`; scale·total is the mean update.
        noise: The standard deviation of the noise in each number of the sum; None where only silos know it.
        round: The number of the round, counted from 0.
        rounds: The number T of rounds.
    """

    learning_rate: float
    scale: float
    noise: float | None = None
    round: int = 0
    rounds: int = 1


@dataclass(frozen=True)
class ServerOptimizer(Settings, ABC, prefix="server_optimizer."):
    """Base class of server optimizers: a frozen dataclass of public constants.

    `step` must be written. Its state lives in the run's checkpoint, so that a resumed run takes the same steps.
    """

    @property
    def needs_noise(self) -> bool:
        """Whether steps need `Move.noise`, which methods whose silos add the noise themselves do not know."""
        return False

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
        self, params: Tensor, total: Tensor, state: State, move: Move
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the next model and the next state; neither argument is changed in place.

        Args:
            params: The present model (d,), on its device and of its type.
            total: The noisy sum (d,) of the silos' updates, float64 on the CPU, which points downhill.
            state: The state that `initial_state` or the last step returned.
            move: What is public of the sum.

        Returns:
            The model (d,), and the state.
        """

    def output_params(self, params: Tensor, state: State) -> Tensor:
        """Return the model (d,) that a run returns if it ends after this step; by default the current one."""
        return params

    def invert(self, moved: Tensor, state: State, move: Move) -> Tensor | None:
        """Return the noisy sum whose step moves the model so, as whoever sees the models computes it.

        An attack asks for it. Where many sums make the same move, it is one of them.

        Args:
            moved: The next model less the present one (d,), float64.
            state: The state before the step.
            move: What is public of the sum.

        Returns:
            The sum (d,), float64; None, the default, where nobody wrote how.
        """
        return None


# --- how callers ask an optimizer: a plug-in may return anything, which no checkpoint and no silo must get -----------


def start_state(optimizer: ServerOptimizer, params: Tensor) -> State:
    """Return the checked state of an optimizer before the first round of a model (d,).

    Raises:
        SilodpError: it is no mapping of names to tensors (code plugin.returned).
    """
    return _check_state(optimizer, "initial_state", optimizer.initial_state(params))


def take_step(
    optimizer: ServerOptimizer, params: Tensor, total: Tensor, state: State, move: Move
) -> tuple[Tensor, State]:
    """Return the next model and state, checked; arguments as for `ServerOptimizer.step`.

    Raises:
        SilodpError: the optimizer returned something else (code plugin.returned).
    """
    found: object = optimizer.step(params, total, state, move)
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
        self, params: Tensor, total: Tensor, state: State, move: Move
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one step (see `ServerOptimizer.step`)."""
        # In float64, as the noisy sum: only the finished move is rounded to the type of the model.
        velocity = self.momentum * state["velocity"] + total
        rate = move.learning_rate * move.scale
        return params + (rate * velocity).to(params), {"velocity": velocity}

    def invert(self, moved: Tensor, state: State, move: Move) -> Tensor:
        """Return the sum of a move (see `ServerOptimizer.invert`)."""
        return moved / (move.learning_rate * move.scale) - self.momentum * state["velocity"]


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
        self, params: Tensor, total: Tensor, state: State, move: Move
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one step (see `ServerOptimizer.step`)."""
        # Of the mean update, so that τ keeps its meaning whatever the number of silos.
        update = move.scale * total
        mean = self.beta1 * state["mean"] + (1 - self.beta1) * update
        square = self.beta2 * state["square"] + (1 - self.beta2) * update**2
        step = move.learning_rate * mean / (square.sqrt() + self.adaptivity)
        return params + step.to(params), {"mean": mean, "square": square}


_GROWTH, _FURTHEST = 3.0, 5.0  # benchmarks/defaults.py
"""How fast the longest moves grow, and up to which length."""


@dataclass(frozen=True)
class NoiseAware(ServerOptimizer):
    """x ← x + longest·(1 − t/T)·max(least, 1 − d·ν²/‖g‖²)·g/‖g‖ in round t, for the mean g of the noisy sums so far.

    In the mean, the sum of k rounds ago has the weight momentumᵏ, and ν is the standard deviation of the noise in each
    number of the mean. d·ν² is the expected square of the noise's norm, so the factor estimates which share of the mean
    is signal, as the positive-part estimator of James and Stein does. A mean without noise moves the model by the whole
    length, however many persons there are and however they are clipped, and one of noise alone by the part `least` of
    it: the signal of single rounds may be hidden where that of all rounds is not.

    Longer moves follow where the first ones were too short: longest = 3·(s/s*)²·⟨x − x₀, g⟩/s/√(t + 1), if that is more
    than the first length. s = √(‖g‖² − d·ν²), the norm of the signal, is at least .3·‖g‖ as a divisor, and s* is the
    largest so far: where a model that went far still has to go on, as fast as before, its goal is far away.

    Attributes:
        length: The longest move of the model in a round, in its parameters' units, for all rounds; None: at first two
            fifths of the 2-norm of the untrained model, at least .5 (as for linear models, which begin at 0) and at
            most 3, and later up to 5.
        momentum: The factor in [0, 1) of the sums that are kept from round to round.
        least: The smallest part in [0, 1) of the longest move, by which the noisiest means move the model.

    Source: James and Stein 1961 (Estimation with Quadratic Loss), positive part; distances as lengths: DoG, Ivgi et al.
    2023 (DoG is SGD's Best Friend), here along the gradient.
    """

    length: Positive | None = None
    momentum: Momentum = 0.5
    least: Momentum = 0.3  # 0 left networks of 5,000 parameters near chance (benchmarks/defaults.py)

    @property
    def needs_noise(self) -> bool:
        """True: without it a sum of noise alone would move the model by the whole length."""
        return True

    def initial_state(self, params: Tensor) -> dict[str, Tensor]:
        """Return the first length, and no sums and moves yet.

        That is {"length": (), "sum": (d,), "variance": (), "strongest": (), "moved": (d,)}, float64.
        """
        first = (
            min(max(0.5, 0.4 * float(params.double().norm())), 3.0) if self.length is None else self.length
        )
        nothing, zero = torch.zeros(params.numel(), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        return {
            "length": torch.tensor(first, dtype=torch.float64),
            "sum": nothing,
            "variance": zero,
            "strongest": zero,
            "moved": nothing,
        }

    def step(
        self, params: Tensor, total: Tensor, state: State, move: Move
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one step (see `ServerOptimizer.step`)."""
        after = self._add(total, state, move)
        norm = float(after["sum"].norm())
        if norm == 0:
            return params, after
        moved = self._find_length(after, move) / norm * after["sum"]
        return params + moved.to(params), after | {"moved": state["moved"] + moved}

    def _add(self, total: Tensor, state: State, move: Move) -> dict[str, Tensor]:
        """Return the state with one more sum, and the noise in it."""
        assert move.noise is not None  # `prepare_run` refuses it
        kept, new = self.momentum, 1 - self.momentum
        after = {
            **state,
            "sum": kept * state["sum"] + new * total,
            "variance": kept**2 * state["variance"] + new**2 * move.noise**2,
        }
        return after | {
            "strongest": torch.maximum(state["strongest"], _measure_signal(after) / self._weigh(move))
        }

    def _weigh(self, move: Move) -> float:
        """Return the square of the sum of a mean's weights, which is 1 only in later rounds."""
        return (1 - self.momentum ** (move.round + 1)) ** 2

    def _find_length(self, state: State, move: Move) -> float:
        """Return how far the mean in a state moves the model."""
        square, signal = float(state["sum"] @ state["sum"]), float(_measure_signal(state))
        longest, strongest = float(state["length"]), float(state["strongest"])
        if self.length is None and strongest > 0:
            along = float(state["moved"] @ state["sum"]) / math.sqrt(max(signal, 0.09 * square))
            pace = signal / self._weigh(move) / strongest
            grown = _GROWTH * pace * along / math.sqrt(move.round + 1)
            longest = max(longest, min(grown, _FURTHEST))
        return longest * max(0.0, 1 - move.round / move.rounds) * max(self.least, signal / square)

    def invert(self, moved: Tensor, state: State, move: Move) -> Tensor:
        """Return a sum that makes a move (see `ServerOptimizer.invert`).

        Of the means that move the model so, it is the longest; where they move nothing, it is 0, or what leaves a mean
        of 0.
        """
        nothing = torch.zeros_like(moved)
        length = float(moved.norm())
        variance = moved.numel() * float(self._add(nothing, state, move)["variance"])
        if length == 0 and float((self.momentum * state["sum"]).square().sum()) <= variance:
            return nothing

        def find_sum(norm: float) -> Tensor:
            mean = norm / length * moved if length > 0 else nothing
            return (mean - self.momentum * state["sum"]) / (1 - self.momentum)

        # The move grows with the mean, from one that may be noise alone up to one that hardly has any.
        short, long = math.sqrt(variance), 1e5 * math.sqrt(variance)
        while length > 0 and short < (middle := (short + long) / 2) < long:
            found = self._find_length(self._add(find_sum(middle), state, move), move)
            is_short = found <= length * (1 + 1e-6)  # models are rounded
            short, long = (middle, long) if is_short else (short, middle)
        return find_sum(short)


def _measure_signal(state: State) -> Tensor:
    """Return the square of the norm of a mean, less that of its noise, as far as it is above 0: ()."""
    return (state["sum"] @ state["sum"] - state["sum"].numel() * state["variance"]).clamp_min(0.0)


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

    @property
    def needs_noise(self) -> bool:
        """Whether the steps of `optimizer` need it."""
        return self.optimizer.needs_noise

    def initial_state(self, params: Tensor) -> dict[str, Tensor]:
        """Return no models yet: {"models": (last, d), "rounds": ()}, beside the state of `optimizer`."""
        inner = {_INNER + name: value for name, value in start_state(self.optimizer, params).items()}
        models = torch.zeros(self.last, params.numel(), dtype=params.dtype)
        return {**inner, "models": models, "rounds": torch.zeros((), dtype=torch.int64)}

    def step(
        self, params: Tensor, total: Tensor, state: State, move: Move
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one step of `optimizer`, and keep its model."""
        params, after = take_step(self.optimizer, params, total, self._get_inner(state), move)
        # A ring of fixed shape, newest last: shapes of the state must not change from round to round.
        models = torch.cat([state["models"][1:], params.detach().cpu()[None]])
        kept = {_INNER + name: value for name, value in after.items()}
        return params, {**kept, "models": models, "rounds": state["rounds"] + 1}

    def _get_inner(self, state: State) -> State:
        """Return the state of `optimizer`."""
        return {name[len(_INNER) :]: value for name, value in state.items() if name.startswith(_INNER)}

    def invert(self, moved: Tensor, state: State, move: Move) -> Tensor | None:
        """Return the sum whose step of `optimizer` moves the model so."""
        return self.optimizer.invert(moved, self._get_inner(state), move)

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
        "noise-aware": "silodp.methods.server_optimizer:NoiseAware",
    },
)
"""The server optimizers by their names in a configuration."""
