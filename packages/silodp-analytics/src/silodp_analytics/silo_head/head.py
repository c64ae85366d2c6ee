"""A silo's head of a model: trained further on its records after a run, and kept there.

It is a scale and a shift of the outputs, and parameters that the silo names. What is shared is not changed by it, and
so neither is ε. It must not be trained during the run, in turn with the shared parameters (Pillutla et al. 2022,
"Federated Learning with Partial Model Personalization"): the updates of all persons of a silo would then depend on
everyone whom its head was trained on, and one person would move a sum by many clips (tests/attacks/test_silo_heads.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from silodp.data.inputs import map_arrays
from silodp.errors import SilodpError
from silodp.text import pluralize, suggest_name
from silodp.training import model_state
from silodp.training.losses import Loss
from silodp.training.sgd.local import LocalTraining, silo_update
from silodp.training.task import Task, make_tensor

FOLDS = 5
DEFAULT_LOCAL = LocalTraining(learning_rate=0.05, epochs=60, batch_size=16)
"""The hyperparameters of SGD; `epochs` is the most that is tried."""
STATEMENT = (
    "The head was trained without noise, and may tell of the persons whose records it was trained on: keep it, and "
    "what is predicted with it, where these records are. ε is about the shared model alone."
)
RECALIBRATED = (
    "The outputs are recalibrated by noisy counts of held-out records, which the ε of the run covers: the file may be "
    "given on with the model."
)
_SCALE, _SHIFT, _LIMITS = "outputs.scale", "outputs.shift", "outputs.limits"


@dataclass(frozen=True)
class SiloHead:
    """A head that goes with the model of a run: a silo's, which is private, or a recalibration.

    Attributes:
        run: The id of the run.
        weights: SHA-256 (hex) of the shared model.safetensors, which the head belongs to.
        epochs: The passes over the silo's records; 0 where they did not help persons who were left out.
        tensors: Its parameters, by name.
        about: What the head may tell, and of whom.
    """

    run: str
    weights: str
    epochs: int
    tensors: Mapping[str, Tensor] = field(repr=False)
    about: str = STATEMENT

    @classmethod
    def of_recalibration(
        cls, run: str, weights: str, scale: float, shift: float, limits: tuple[float, float] | None = None
    ) -> SiloHead:
        """Return the head that multiplies the logit of two classes and adds a shift.

        Args:
            run: The id of the run.
            weights: SHA-256 (hex) of the shared model.
            scale: What the logit is multiplied by.
            shift: What is added then.
            limits: (a, w): logits beyond ±a are first drawn in, to less than ±(a + w); None: they are not.
        """
        tensors = {_SCALE: torch.tensor(scale), _SHIFT: torch.tensor([shift])}
        if limits is not None:
            tensors[_LIMITS] = torch.tensor(limits)
        return cls(run, weights, 0, tensors, RECALIBRATED)

    @classmethod
    def train(
        cls,
        run: str,
        weights: str,
        model: nn.Module,
        loss: Loss,
        records: tuple[Any, NDArray[Any], NDArray[np.int64]],
        parameters: Sequence[str],
        local: LocalTraining | None,
        seed: int | None,
    ) -> SiloHead:
        """Return the head of a silo; run and weights as in the class, the rest as for `train_silo_head`."""
        tensors, epochs = train_silo_head(model, loss, records, parameters, local or DEFAULT_LOCAL, seed)
        return cls(run, weights, epochs, tensors)

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    def to_bytes(self) -> bytes:
        """Return the content of a .safetensors file."""
        about = {"run": self.run, "weights": self.weights, "epochs": str(self.epochs), "about": self.about}
        return save_tensors({name: one.contiguous() for name, one in self.tensors.items()}, about)

    @classmethod
    def read(cls, path: str) -> SiloHead:
        """Read what `to_bytes` gave.

        Raises:
            SilodpError: the file is missing or damaged (codes bundle.missing, bundle.damaged).
        """
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
            tensors = load_tensors(Path(path).read_bytes())
            if not {_SCALE, _SHIFT} <= tensors.keys():
                raise ValueError("it lacks scale or shift")
            # No other text: what is printed of a head must not come from a file.
            stated = RECALIBRATED if about["about"] == RECALIBRATED else STATEMENT
            return cls(about["run"], about["weights"], int(about["epochs"]), tensors, stated)
        except FileNotFoundError:
            raise SilodpError(
                f"{path} is missing: make it with `silodp fine-tune` or `silodp recalibrate`.",
                code="bundle.missing",
                field="head",
            ) from None
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise SilodpError(
                f"{path} is no silo's head of a model ({type(error).__name__}): make it with `silodp fine-tune` or "
                "`silodp recalibrate`.",
                code="bundle.damaged",
                field="head",
            ) from None

    def apply(self, model: nn.Module) -> nn.Module:
        """Return a copy of the shared model with this head.

        Raises:
            SilodpError: the head has other parameters than the model (code bundle.mixed).
        """
        size, of_second = self.tensors[_SHIFT].numel(), self.about == RECALIBRATED
        fitted = _HeadOutputs(copy.deepcopy(model), size, of_second)
        parameters = dict(fitted.named_parameters())
        for name, tensor in self.tensors.items():
            place = parameters.get(name)
            if place is not None and self.about == RECALIBRATED:
                tensor = tensor.to(place.dtype)  # a few numbers, made without the model
            if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
                raise SilodpError(
                    f"the head has '{name}', {tuple(tensor.shape)} of {tensor.dtype}, and the model has no such "
                    "parameter: use it with the model that it was trained on.",
                    code="bundle.mixed",
                    field="head",
                )
            place.data.copy_(tensor)
        return fitted.eval()


class _Outputs(nn.Module):
    """A scale of all outputs, and a shift of each class or number; or those of the logit of two classes."""

    def __init__(self, size: int, like: Tensor, of_second: bool) -> None:
        super().__init__()
        self.of_second = of_second
        self.scale = nn.Parameter(like.new_ones(()))
        self.shift = nn.Parameter(like.new_zeros(size))
        if of_second:  # no logit is beyond the limit of a head that has none
            self.limits = nn.Parameter(like.new_tensor([torch.inf, 1.0]), requires_grad=False)

    def forward(self, outputs: Tensor) -> Tensor:
        shift: Tensor = self.shift
        if self.of_second:
            of_two = outputs.shape[1:] == (2,)
            logit = outputs[:, 1:] - outputs[:, :1] if of_two else outputs
            fixed = self._draw_in(logit) * self.scale + shift
            return torch.cat([torch.zeros_like(fixed), fixed], 1) if of_two else fixed
        if shift.numel() == 1:
            return outputs * self.scale + shift.reshape(())
        # Of outputs (n, K, ...) every place of a class is shifted alike.
        return outputs * self.scale + shift.reshape(-1, *[1] * (outputs.dim() - 2))

    def _draw_in(self, logit: Tensor) -> Tensor:
        """Return the logits, those beyond ±a moved to less than ±(a + w) in the same order."""
        edge, width = self.limits
        size = logit.abs()
        beyond = torch.where(size > edge, size - edge, 0)  # inf is not beyond inf, and inf − inf no number
        # Slower than e^(−beyond), so that logits far beyond still differ in float32.
        drawn: Tensor = torch.minimum(size, edge) + width - width**2 / (beyond + width)
        return drawn * logit.sign()


class _HeadOutputs(nn.Module):
    """A model, and what is done to its outputs."""

    def __init__(self, model: nn.Module, size: int, of_second: bool = False) -> None:
        super().__init__()
        self.model = model
        self.outputs = _Outputs(size, next(model.parameters()).detach(), of_second)

    def forward(self, *args: Any, **named: Any) -> Tensor:
        found: Tensor = self.outputs(self.model(*args, **named))
        return found


def train_silo_head(
    model: nn.Module,
    loss: Loss,
    records: tuple[Any, NDArray[Any], NDArray[np.int64]],
    parameters: Sequence[str] = (),
    local: LocalTraining = DEFAULT_LOCAL,
    seed: int | None = None,
) -> tuple[dict[str, Tensor], int]:
    """Train a silo's head of a model, for as many epochs as helps persons who are left out.

    How many epochs are best is found by cross-validation over the persons of the silo, so a silo whose records add
    nothing keeps the shared model, or moves it little. No noise is added.

    Args:
        model: The shared model; it is left as it is.
        loss: The loss.
        records: x (n, ...), y (n, ...), and whose records they are, (n,).
        parameters: Names of further parameters of the model to train, or patterns such as "head.*".
        local: SGD's hyperparameters; `epochs` is the most that is tried.
        seed: The seed of folds and batches; None draws one.

    Returns:
        The parameters of the head by name, and the epochs.

    Raises:
        SilodpError: fewer than two persons, a pattern that fits no parameter, or the model or loss cannot be trained.

    Source: Cheng et al. 2021, "Fine-tuning is Fine in Federated Learning"; Platt 1999 for scale and shift.
    """
    x, y, user = records
    persons, number = np.unique(user, return_inverse=True)
    if len(persons) < 2:
        raise SilodpError(
            f"the records are of {pluralize(len(persons), 'person')}: a head of the model is trained on those of two "
            "or more, and tried on persons whom it was not trained on.",
            code="data.no_records",
        )
    task = _build_task(model, loss, parameters, x[:1], y)
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(int(random.integers(1 << 62)))
    start = task.flatten(task.model)
    folds = min(FOLDS, len(persons))
    fold = random.permutation(np.arange(len(persons)) % folds)[number]
    losses = np.zeros(local.epochs + 1)
    for left_out in range(folds):
        here, there = fold != left_out, fold == left_out
        for epoch, params in enumerate(_train(task, start, x[here], y[here], local, generator)):
            losses[epoch] += task.evaluate(params, x[there], y[there])["loss"] * there.mean()
    # The fewest of equally good ones, and none where training diverges.
    epochs = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
    params = start
    if epochs:
        *_, params = _train(task, start, x, y, replace(local, epochs=epochs), generator)
    return {name: one.clone() for name, one in zip(task.names, task.unflatten(params), strict=True)}, epochs


def _build_task(
    model: nn.Module, loss: Loss, parameters: Sequence[str], example: Any, y: NDArray[Any]
) -> Task:
    """Return a task whose trainable parameters are the head, at the values of the shared model."""
    model = copy.deepcopy(model)
    chosen = _find_parameters(model, parameters)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    like = next(model.parameters())

    with torch.no_grad():
        outputs = model_state.call_model(
            model, map_arrays(lambda one: make_tensor(one, like.device, like.dtype), example)
        )
    # Where one logit decides in every place, the first dimension of an output is one of places.
    is_logit = y.dtype.kind == "i" and tuple(outputs.shape[1:]) == y.shape[1:]
    fitted = _HeadOutputs(model, 1 if is_logit or outputs.dim() == 1 else outputs.shape[1])
    return Task(fitted, loss, pretrained=True)


def _find_parameters(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise SilodpError(
                f"no parameter of the model is named {pattern!r}: "
                f"{suggest_name(pattern, names) or f'its parameters are {shown}.'}",
                code="argument.value",
                field="parameters",
            )
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _train(
    task: Task, start: Tensor, x: Any, y: NDArray[Any], local: LocalTraining, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield the parameters (d,) after 0, 1, 2, ... epochs."""
    once, params = replace(local, epochs=1), start
    yield params
    for _ in range(local.epochs):
        params = params + silo_update(task, params, x, y, once, generator)
        yield params
