"""Averaging models that were trained already: one release, after the fact (docs/decoupled.md; DDP, 5)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp._lazy import torch
from silodp.accounting.accountant import Accountant, find_accountant
from silodp.accounting.charges import compute_cost
from silodp.accounting.events import Gaussian, PoissonSampled
from silodp.accounting.guarantee import NOT_COVERED, Guarantee
from silodp.assumption import Assumption
from silodp.errors import SilodpError
from silodp.methods.ddp import CLAIM
from silodp.settings import NoiseMultiplier, Probability, Whole, check_list, check_value
from silodp.text import pluralize

if TYPE_CHECKING:
    from torch import Tensor, nn


NAME = "average-models"
_TRAINERS = "whoever trained the models"
ASSUMPTIONS = (
    Assumption(
        "trained-by-dp-sgd",
        "every model was trained by DP-SGD as it is told here: each record in each step's batch with probability "
        "record_sampling, its gradient clipped, secret Gaussian noise of noise_multiplier clips added to every sum, "
        "and the sum divided by a public constant",
        _TRAINERS,
    ),
    Assumption(
        "one-public-start",
        "all models were trained from one public start with the same clip, learning rate and divisor, chosen without "
        "looking at anyone's records, by plain gradient steps: an adaptive optimizer (Adam) or low precision would not "
        "let the parties' noise add up",
        _TRAINERS,
    ),
    Assumption("parameters-only", "what is given holds nothing but parameters so trained", _TRAINERS),
    Assumption(
        "models-unseen",
        "the models themselves were shown to nobody the guarantee speaks about, and no record is in two of them",
        _TRAINERS,
    ),
)


@dataclass(frozen=True)
class AveragedModel:
    """The mean of models, of the kind that was given: a module (in eval mode), a state dict, or a vector (d,)."""

    model: Any
    guarantee: Guarantee


def average_models(
    models: Iterable[nn.Module | Mapping[str, Tensor] | Tensor | np.ndarray],
    *,
    noise_multiplier: float | Sequence[float],
    local_steps: int,
    record_sampling: float,
    clients: int | None = None,
    delta: float,
    accountant: Accountant | str = "pld",
) -> AveragedModel:
    """Average models that N parties trained alone, each by DP-SGD, and say what is promised of releasing the mean.

    Args:
        models: N modules, state dicts or vectors (d,), all of one kind and shape.
        noise_multiplier: The multiplier σ_i of each step of each party's training, in units of the clip; one for all,
            or one each.
        local_steps: The number J of steps that each model was trained.
        record_sampling: The probability q with which a record was in the batch of a step.
        clients: The number of parties whose noise is unknown to whoever sees the mean: None for all N, N − t for t
            parties that pool what they know.
        delta: The δ of the guarantee.
        accountant: A name or an object, see `silodp.Accountant`.

    The guarantee is for a record of any party against whoever sees only the mean: with one step the noise of all
    `clients` adds up; with more, only a party's own noise is proven to protect its records (the largest ε over the
    parties), and what the paper says of the sum is listed under `claims`.

    Raises:
        SilodpError: the models differ in kind, names, shapes or counters, or a setting is out of range.

    Source: DDP (Heikkilä), section 5, "Improved Privacy from Model Averaging"; of its Theorem 4.6 only a claim is made.
    """
    # A tensor without dimensions can be iterated by its type alone.
    given = list(models) if isinstance(models, Iterable) and bool(getattr(models, "ndim", True)) else []
    if not given:
        raise SilodpError(
            "models is empty: give at least one trained module, state dict or vector.",
            code="argument.value",
            field="models",
        )
    if isinstance(noise_multiplier, Sequence | np.ndarray) and np.ndim(noise_multiplier):
        check_list("noise_multiplier", list(noise_multiplier), Real)
        noise: list[Any] = [float(sigma) for sigma in noise_multiplier]
    else:
        noise = [noise_multiplier] * len(given)
    if len(noise) != len(given):
        raise SilodpError(
            f"noise_multiplier has {pluralize(len(noise), 'value')} for {pluralize(len(given), 'model')}: give one for "
            "each, or one for all.",
            code="argument.shape",
            field="noise_multiplier",
        )
    for sigma in noise:
        check_value("noise_multiplier", sigma, NoiseMultiplier)
    Whole().check("local_steps", local_steps)
    accountant = find_accountant(accountant)
    check_value("record_sampling", record_sampling, Probability)
    unknown = len(given) if clients is None else clients
    Whole().check("clients", unknown)
    if unknown > len(given):
        raise SilodpError(
            f"clients = {unknown}: only {len(given)} models are averaged; set at most that.",
            code="argument.value",
            field="clients",
        )
    # Of all parties, those whose noise adds least: the worst that a record can have around it.
    joint = math.sqrt(sum(sigma**2 for sigma in sorted(noise)[:unknown]))
    own, whole = (
        compute_cost(
            [(PoissonSampled(record_sampling, Gaussian(sigma)), local_steps)], delta, accountant
        ).epsilon
        for sigma in (min(noise), joint)
    )
    # With several steps each local model moves with its own party's noise alone, which is all that is proven.
    spent = whole if local_steps == 1 else own
    # The claim is listed only where it says more than what is proven.
    claimed = local_steps > 1 and whole is not None and (own is None or whole < own)
    guarantee = Guarantee(
        adversary="released",
        unit="record",
        epsilon=spent,
        delta=delta,
        rounds=1,
        accountant=accountant.name,
        method=NAME,
        private=spent is not None,
        releasable=spent is not None,
        reason="noise_multiplier is 0, or so small that nothing is promised" if spent is None else None,
        assumptions=ASSUMPTIONS,
        not_covered=NOT_COVERED,
        claims=({"epsilon": whole, "why": CLAIM},) if claimed else (),
    )
    return AveragedModel(_average(given), guarantee)


def _refuse(problem: str) -> SilodpError:
    return SilodpError(problem, code="model.not_averageable", field="models")


def _average(models: Sequence[Any], buffers: frozenset[str] = frozenset()) -> Any:
    """Average models of the first one's kind, names and shapes; `buffers` names what no gradient has trained."""
    first = models[0]
    if isinstance(first, torch.nn.Module):
        if not all(type(model) is type(first) for model in models):
            kinds = ", ".join(sorted({type(model).__name__ for model in models}))
            raise _refuse(f"models are of different kinds ({kinds}): give models of one kind.")
        # A copy of the first model would release its hidden tensors as they are, without noise.
        _refuse_hidden_state(first)
        result = copy.deepcopy(first)
        buffers = frozenset(name for name, _ in first.named_buffers())
        result.load_state_dict(_average([model.state_dict() for model in models], buffers))
        return result.eval()
    if isinstance(first, Mapping):
        if not all(isinstance(model, Mapping) and list(model) == list(first) for model in models):
            raise _refuse("models have different parameter names: give state dicts of one model.")
        return {
            name: _average_values(name, [model[name] for model in models], name in buffers) for name in first
        }
    if isinstance(first, torch.Tensor | np.ndarray):
        return _average_values("the vector", models)
    raise SilodpError(
        f"models[0] is a {type(first).__name__}: give torch modules, state dicts, or vectors of parameters.",
        code="argument.type",
        field="models",
    )


def _refuse_hidden_state(module: nn.Module) -> None:
    """Refuse tensors that a module keeps beside its state dict: they would be released as they are."""
    for place, part in module.named_modules():
        hidden = [*part._non_persistent_buffers_set]
        hidden += [name for name, value in vars(part).items() if isinstance(value, torch.Tensor)]
        if hidden:
            where = ".".join(filter(None, [place, hidden[0]]))
            raise _refuse(
                f"{where} is kept outside the state dict, where nothing averages it or says what it holds: give state "
                "dicts of parameters instead of modules."
            )


def _average_values(name: str, values: Sequence[Any], buffer: bool = False) -> Tensor:
    """Average in double precision; buffers, and what is no real number, must be the same everywhere."""
    if not all(isinstance(value, torch.Tensor | np.ndarray) for value in values):
        raise _refuse(f"{name} is no tensor in every model: give parameters only.")
    tensors = [torch.as_tensor(value).detach() for value in values]
    first = tensors[0]
    tensors = [tensor.to(first.device) for tensor in tensors]
    if not all(tensor.shape == first.shape and tensor.dtype == first.dtype for tensor in tensors):
        shapes = ", ".join(sorted({f"{tuple(t.shape)} {t.dtype}" for t in tensors}))
        raise _refuse(f"{name} differs between the models ({shapes}): give models of one shape and type.")
    is_statistic = name.endswith(("running_mean", "running_var"))
    if buffer or is_statistic or not first.is_floating_point():
        # What no gradient has trained got no noise. All parties may have one public constant; statistics never are.
        alone = len(tensors) == 1 and is_statistic
        if alone or not all(torch.equal(tensor, first) for tensor in tensors):
            what = "comes from one model alone" if alone else "differs between the models"
            raise _refuse(
                f"{name} {what}: what training has left there carries no noise, so it cannot be released; train "
                "without batch statistics and counters."
            )
        return first.clone()
    mean = torch.stack([tensor.double() for tensor in tensors]).mean(dim=0)
    if not bool(torch.isfinite(mean).all()):
        raise _refuse(f"{name} is not finite in every model: leave out those that diverged.")
    return mean.to(first.dtype)
