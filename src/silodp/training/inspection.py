"""Refuses models whose gradient of one user is not a function of that user's own records.

User-level clipping bounds a user's influence only if nothing of one record reaches another record's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from silodp.errors import SilodpError

# How far another record's output may move, relative to the largest output, before records count as mixed:
# kernels may sum in another order, mixing layers move outputs by far more.
_TOLERANCE = 1e-4


def inspect_model(model: nn.Module) -> None:
    """Refuse what can be seen without running the model.

    Raises `SilodpError` for batch statistics, no trainable parameters, or parameters that are not all float32
    or all float64 on one device.
    """
    for name, module in model.named_modules():
        where = (
            f"layer '{name}' ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        )
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise SilodpError(
                f"{where} normalizes over the batch, so one person's records change another's gradient: "
                "use GroupNorm or LayerNorm instead"
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            raise SilodpError(
                f"{where} keeps running statistics of the records, which no noise protects: "
                "set track_running_stats=False, or use GroupNorm or LayerNorm instead"
            )
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters(recurse=False)):
            raise SilodpError(
                f"{where} has no shape yet: run the model once on an example before building the task"
            )
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not any(p.numel() for p in trainable):
        raise SilodpError("the model has no trainable parameters: there is nothing to learn")
    kinds = {(p.dtype, p.device) for p in model.parameters()}
    if len(kinds) > 1 or trainable[0].dtype not in (torch.float32, torch.float64):
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise SilodpError(f"parameters must all be float32, or all float64, on one device, not {found}")


def inspect_on(model: nn.Module, example: Tensor) -> None:
    """Refuse what shows on an example input (n, ...): records mixed, states changed, outputs not finite.

    One record of a batch is replaced; outputs of the others must not move, in train and in eval mode.
    """
    if len(example) == 0:
        raise SilodpError("checking a model needs at least one example record")
    batch = example[:8] if len(example) >= 3 else example[:1].expand(3, *example.shape[1:])
    batch = batch.clone()
    changed = batch.clone()
    changed[1] = _another(batch, example)
    states = {name: value.detach().clone() for name, value in model.state_dict().items()}
    training = model.training
    try:
        for mode in (True, False):
            model.train(mode)
            _outputs(model, batch)
            moved = [name for name, value in model.state_dict().items() if not _same(value, states[name])]
            if moved:
                raise SilodpError(
                    f"running the model changes its state '{moved[0]}', which no noise protects: "
                    "use a layer without running state instead"
                )
            _inspect_runs(model, batch, changed)
    finally:
        model.train(training)
        with torch.no_grad():
            for name, value in model.state_dict().items():
                value.copy_(states[name])


def inspect_vectorized(
    forward: Callable[[tuple[Tensor, ...], Tensor], Tensor], params: tuple[Tensor, ...], example: Tensor
) -> None:
    """Refuse, with a `SilodpError`, a model whose gradient `torch.func` cannot take for two users at once."""
    stacked = tuple(torch.stack([p, p]) for p in params)
    two = example[:1].expand(2, 2, *example.shape[1:])
    try:
        with torch.random.fork_rng(devices=[example.device] if example.is_cuda else []):
            vmap(grad(lambda p, x: forward(p, x).sum()), randomness="different")(stacked, two)
    except (RuntimeError, ValueError, TypeError) as problem:
        reason = str(problem).strip().split("\n")[0]
        raise SilodpError(
            f"the model cannot run for many users at once, with parameters of their own: {reason}"
        ) from problem


def _inspect_runs(model: nn.Module, batch: Tensor, changed: Tensor) -> None:
    before, after = _outputs(model, batch), _outputs(model, changed)
    final = before[""]
    if final.dim() == 0 or final.shape[0] != len(batch):
        raise SilodpError(
            f"the model turns {len(batch)} records into an output of shape {tuple(final.shape)}: "
            "it must give one row per record"
        )
    if torch.isfinite(batch).all() and not torch.isfinite(final).all():
        raise SilodpError("the model gives outputs that are not finite on a finite example: scale the inputs")
    others = [i for i in range(len(batch)) if i != 1]
    if not _moved(final, after[""], others):
        return
    # Name the innermost layer, first in order of execution, where a record reached another.
    for name, output in before.items():
        if name and len(output) == len(batch) and _moved(output, after[name], others):
            layer = model.get_submodule(name)
            raise SilodpError(
                f"layer '{name}' ({type(layer).__name__}) mixes the records of a batch, so one person's "
                "records change another's gradient: use a layer that works on each record alone"
            )
    raise SilodpError(
        f"the forward of {type(model).__name__} mixes the records of a batch, so one person's records change "
        "another's gradient: work on each record alone"
    )


def _moved(before: Tensor, after: Tensor, rows: list[int]) -> bool:
    if before.shape != after.shape:
        return True
    scale = before.abs().max().clamp(min=1e-12)
    return bool(((before[rows] - after[rows]).abs().max() > _TOLERANCE * scale).item())


def _outputs(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Floating outputs by layer name in order of completion, '' for the model; same dropout in every call."""
    found: dict[str, Tensor] = {}

    def keep(name: str):  # type: ignore[no-untyped-def]
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 0:
                found[name] = first.detach()

        return hook

    with _hooks([(m, keep(name)) for name, m in model.named_modules() if name]), torch.no_grad():
        devices = [batch.device] if batch.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            try:
                final = model(batch)
            except (RuntimeError, ValueError, TypeError, IndexError) as problem:
                reason = str(problem).strip().split("\n")[0]
                raise SilodpError(
                    f"the model fails on records of shape {tuple(batch.shape[1:])}: {reason}"
                ) from problem
    if not isinstance(final, Tensor):
        raise SilodpError(f"the model must return one tensor, not {type(final).__name__}")
    found[""] = final
    return found


@contextmanager
def _hooks(pairs: list) -> Iterator[None]:  # type: ignore[type-arg]
    handles = [module.register_forward_hook(hook) for module, hook in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _another(batch: Tensor, example: Tensor) -> Tensor:
    """A record far from the batch's second one; whole numbers (token ids) stay among those seen."""
    if not batch.is_floating_point():
        return (
            batch[1].flip(0) if batch.dim() > 1 and not torch.equal(batch[1].flip(0), batch[1]) else batch[0]
        )
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(batch[1].shape, generator=generator, dtype=torch.float64).to(batch)
    return batch[1] + (1 + example.abs().max().nan_to_num(0, 0)) * noise


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))
