"""Checks that run a model and a loss on examples: each record's gradient is a function of that record alone.

User-level clipping bounds a user's influence only if no layer mixes the records of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from silodp.data.inputs import get_kind, list_arrays, map_arrays
from silodp.errors import SilodpError
from silodp.text import describe_exception, join_names
from silodp.training import model_state
from silodp.training.losses import Loss, loss_error
from silodp.training.model_structure import RefuseLookups, describe_layer

# How far another record's output may move, relative to the largest output, before records count as mixed: kernels may
# sum in another order, which moves outputs by far less than layers that mix.
_TOLERANCE = 1e-4
_MAX_DRAWS = 10  # runs of random layers, until every parameter has had a gradient
_EXAMPLES = 8  # so many records are enough to see that records mix
# Rows that are added to a batch, to see whether anything depends on them.
_PADDINGS = (1, 3)


def inspect_on(model: nn.Module, example: Any) -> None:
    """Check a model on an example: no records mixed, no state changed, outputs finite.

    One record of a batch is replaced, and then rows of padding are added; outputs of the others must not move, in train
    and in eval mode. One record alone must give an output of the same shape.

    Args:
        model: The model; it is left in the mode and state that it came with.
        example: The records (n, ...), n ≥ 1, a tensor or `NamedArrays`.

    Raises:
        SilodpError: the model fails one of these, or raises.
    """
    if len(example) == 0:
        raise SilodpError("checking a model needs at least one example record", code="data.no_records")
    batch = example[:_EXAMPLES] if len(example) >= 3 else example[[0, 0, 0]]
    changed = map_arrays(_replace_record, batch)
    state = model_state.take_snapshot(model)
    # A model that changes its own state is refused, and must be left as it came all the same.
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    kept = [tensor.clone() for tensor in tensors]
    try:
        for mode in (True, False):
            with model_state.keep_modes(model):
                model_state.set_mode(model, mode)
                before = _run_layers(model, batch)
                model_state.refuse_changes(model, state)
                _inspect_runs(model, batch, before, _run_layers(model, changed))
                _inspect_one_record(model, batch, before[""])
                _inspect_padding(model, batch, before)
                model_state.refuse_changes(model, state)
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                if not model_state.are_equal(tensor, value):
                    tensor.copy_(value)


def inspect_loss(model: nn.Module, loss: Loss, x: Any, y: Tensor, classes: int | None = None) -> None:
    """Check that a loss can train this model, and that it leaves out records whose mask is 0.

    Args:
        model: A model in any mode; its outputs are taken in eval mode.
        loss: The loss to inspect.
        x: Made-up records (n, ...), n ≥ 3.
        y: Made-up labels (n, ...) of the right kind.
        classes: The number of classes; None where it is not known, or where labels are of another kind.

    Raises:
        SilodpError: the loss cannot train the model, or does not leave such records out.
    """
    with model_state.keep_modes(model), torch.enable_grad():
        model_state.set_mode(model, training=False)
        outputs = model_state.call_model(model, x)
    if not outputs.requires_grad:
        raise model_state.model_error(
            f"the outputs of {type(model).__name__} have no gradient with respect to its parameters: write its forward "
            "with differentiable torch operations only (no argmax, no .detach(), no numpy)",
            "model.no_gradient",
        )
    if loss.per_class and classes is not None and outputs.dim() > 1 and 1 < outputs.shape[1] != classes:
        raise model_state.model_error(
            f"the model gives {outputs.shape[1]} outputs for a record, and the labels have {classes} classes: end it "
            f"in a layer of width {classes}, because the loss '{loss.name}' takes one output per class",
            "loss.output_shape",
        )
    # Cut off from the model, so that only the loss is differentiated.
    outputs = outputs.detach().requires_grad_()
    everyone = torch.ones(len(x), dtype=outputs.dtype, device=outputs.device)
    if not _compute_repeatably(loss, outputs, y, everyone).requires_grad:
        raise loss_error(
            f"the loss '{loss.name}' has no gradient with respect to the model's outputs: write it with differentiable "
            "torch operations only (no argmax, no .detach(), no numpy)",
            "loss.no_gradient",
        )
    if _counts_masked_records(loss, outputs, y):
        raise loss_error(
            f"the loss '{loss.name}' of some records changes with records that are left out (mask 0): give every "
            "record a loss of its own, or leave records of mask 0 out of every sum, mean and count",
            "loss.counts_masked_records",
        )


def inspect_parameters(model: nn.Module, x: Any) -> None:
    """Refuse trainable parameters that get no gradient: noise alone would move them, and it adds to that of the others.

    Args:
        model: A model that autograd can differentiate; it is left as it came.
        x: Made-up records (n, ...).

    Raises:
        SilodpError: the outputs do not depend on a parameter, or its gradient is lost on the way (model.no_gradient).
    """
    idle = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    count = len(idle)
    device = next(iter(idle.values())).device
    with model_state.keep_modes(model), torch.enable_grad():
        model_state.set_mode(model, training=True)
        for seed in range(_MAX_DRAWS):  # a model may leave layers out at random
            with model_state.seed_torch(device, seed):
                found = torch.autograd.grad(
                    model_state.call_model(model, x).sum(), list(idle.values()), allow_unused=True
                )
            idle = {name: p for (name, p), g in zip(idle.items(), found, strict=True) if g is None}
            if not idle:
                return
    shown = ", ".join(f"'{name}'" for name in list(idle)[:3]) + (" and others" if len(idle) > 3 else "")
    raise model_state.model_error(
        f"{len(idle)} of the {count} trainable parameters of {type(model).__name__} get no gradient, so noise alone "
        f"would move them: {shown}. Freeze or remove what the forward does not use (requires_grad_(False)), take "
        ".detach() out, and set use_reentrant=False where torch.utils.checkpoint runs a layer.",
        "model.no_gradient",
    )


def _counts_masked_records(loss: Loss, outputs: Tensor, y: Tensor) -> bool:
    """Return whether loss or gradient of some records differ where other records, with mask 0, stand beside them.

    How many do depends on other persons: users train side by side, padded to the longest.
    """
    outputs, y = outputs[:_EXAMPLES].detach().requires_grad_(), y[:_EXAMPLES]
    everyone = list(range(len(outputs)))
    # Padding repeats the first record of a batch. Any other record must not count either, whatever its label.
    other = next((i for i in everyone if not torch.equal(y[i], y[1])), 0)
    swapped, left = [other if i == 1 else i for i in everyone], [i for i in everyone if i != 1]
    every, no_second = [1.0] * len(y), [float(i != 1) for i in everyone]
    differentiate = partial(_differentiate, loss, outputs, y)
    whole = differentiate(everyone, every)
    if not torch.equal(whole[0], differentiate(everyone, every, seed=1)[0]):
        # Other numbers of records draw other random numbers.
        return _differs(differentiate(everyone, no_second), differentiate(swapped, no_second), whole)
    padded = [(everyone + [0] * count, every + [0.0] * count, everyone) for count in _PADDINGS]
    only_second = [float(i == 1) for i in everyone]
    masked = [(everyone, no_second, left), (swapped, no_second, left), (everyone, only_second, [1])]
    return any(
        _differs(differentiate(kept, [1.0] * len(kept)), differentiate(rows, mask), whole)
        for rows, mask, kept in padded + masked
    )


def _differs(expected: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor], whole: Sequence[Tensor]) -> bool:
    """Return whether a loss or its gradient is not what it should be, as far as that is finite."""
    for wanted, value, scale in zip(expected, found, whole, strict=True):
        largest = torch.cat([wanted.flatten(), scale.nan_to_num().flatten()]).abs().max().clamp(min=1e-6)
        if torch.isfinite(wanted).all() and not ((wanted - value).abs() <= _TOLERANCE * largest).all():
            return True
    return False


def _differentiate(
    loss: Loss, outputs: Tensor, y: Tensor, rows: list[int], mask: list[float], seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the loss of these records, and its gradient with respect to all outputs."""
    value = _compute_repeatably(loss, outputs[rows], y[rows], outputs.new_tensor(mask), seed)
    try:
        (gradient,) = torch.autograd.grad(value, outputs, materialize_grads=True)
    except Exception:  # no derivative: refused where the gradient of the model is tried
        gradient = torch.zeros_like(outputs)
    return value.detach(), gradient


def _compute_repeatably(loss: Loss, outputs: Tensor, targets: Tensor, mask: Tensor, seed: int = 0) -> Tensor:
    """Return the loss, with the same random numbers in every call."""
    with model_state.seed_torch(outputs.device, seed):
        return loss.compute(outputs, targets, mask)


def _inspect_runs(model: nn.Module, batch: Any, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Check outputs on a batch, and that replacing its second record moved no other's."""
    final = before[""]
    if final.dim() == 0 or final.shape[0] != len(batch):
        raise model_state.model_error(
            f"the model turns {len(batch)} records into an output of shape {tuple(final.shape)}: "
            "it must give one row per record",
            "model.output_shape",
        )
    if (
        all(torch.isfinite(part).all() for part in list_arrays(batch).values())
        and not torch.isfinite(final).all()
    ):
        raise model_state.model_error(
            "the model gives outputs that are not finite on a finite example (before a run, standard normal numbers "
            "are made up, also negative ones): scale the inputs, and bound them where a function needs it, for example "
            "x.clamp(min=1e-6) before a logarithm",
            "model.not_finite",
        )
    # The second record was replaced: all others must not notice.
    others = [i for i in range(len(batch)) if i != 1]
    if not _have_moved(final, after[""], others):
        return
    name = _find_layer(before, after, others)
    remedy = "use a layer that works on each record alone" if name else "work on each record alone"
    if name and getattr(model.get_submodule(name), "batch_first", True) is False:
        remedy = "set batch_first=True, because here the first dimension of its inputs is the record"
    raise model_state.model_error(
        f"{_describe_place(model, name)} mixes the records of a batch, so one person's records change another's "
        f"gradient: {remedy}",
        "model.mixes_records",
    )


def _describe_place(model: nn.Module, name: str) -> str:
    """Return how messages call a layer, or with '' the code of the model between its layers."""
    return (
        describe_layer(name, model.get_submodule(name)) if name else f"the forward of {type(model).__name__}"
    )


def _inspect_one_record(model: nn.Module, batch: Any, outputs: Tensor) -> None:
    """Refuse outputs of another shape where a batch has one record, as a person may have: squeeze() drops its row."""
    # By a list of places, so that the dimension of records stays.
    alone = _run_layers(model, batch[[0]])[""]
    if alone.shape != (1, *outputs.shape[1:]):
        raise model_state.model_error(
            f"the model turns {len(batch)} records into outputs of shape {tuple(outputs.shape)}, and one record into "
            f"{tuple(alone.shape)}: give one row per record, for example by squeeze(-1) in place of squeeze()",
            "model.output_shape",
        )


def _find_layer(before: dict[str, Tensor], after: dict[str, Tensor], rows: list[int]) -> str:
    """Return the innermost layer, first in order of execution, whose outputs of some rows have moved; '' for none."""
    for name, output in before.items():
        if name and len(output) > max(rows) and _have_moved(output, after[name], rows):
            return name
    return ""


def _inspect_padding(model: nn.Module, batch: Any, outputs: dict[str, Tensor]) -> None:
    """Refuse outputs that depend on how many rows a batch has: users train side by side, padded to the longest."""
    real = list(range(len(batch)))
    for rows in (real + [0] * count for count in _PADDINGS):
        padded = batch[rows]
        before, after = outputs, _run_layers(model, padded)
        if _have_moved(before[""], after[""], real) and _is_random(model, batch):
            # Another number of rows draws other random numbers: compare without dropout, if that leaves none.
            with model_state.keep_modes(model):
                for layer in model.modules():
                    if isinstance(layer, nn.modules.dropout._DropoutNd):
                        layer.training = False
                before, after = _run_layers(model, batch), _run_layers(model, padded)
                if _is_random(model, batch):
                    continue
        if _have_moved(before[""], after[""], real):
            name = _find_layer(before, after, real)
            raise model_state.model_error(
                f"the outputs of {_describe_place(model, name)} change with the number of rows in a batch, which is "
                "padded to the longest of other persons: work on each record alone, without the length of the batch",
                "model.mixes_records",
            )


def _is_random(model: nn.Module, batch: Any) -> bool:
    """Return whether outputs differ with the random numbers, as with dropout."""
    first, second = (_run_layers(model, batch, seed)[""] for seed in (0, 1))
    return not torch.equal(first.nan_to_num(), second.nan_to_num())


def _have_moved(before: Tensor, after: Tensor, rows: list[int]) -> bool:
    """Return whether these rows differ; `after` may have more rows, of padding."""
    if before.shape[1:] != after.shape[1:] or len(after) < len(before):
        return True
    scale = before.abs().max().clamp(min=1e-12)  # outputs that are all 0 have no scale
    return bool(((before[rows] - after[rows]).abs().max() > _TOLERANCE * scale).item())


def _run_layers(model: nn.Module, batch: Any, seed: int = 0) -> dict[str, Tensor]:
    """Return floating outputs by layer name in order of completion, '' for the model; same dropout in every call."""
    found: dict[str, Tensor] = {}
    # Embeddings that have begun and not ended, with their ids: whatever the model raises then comes from the first one.
    unfinished: list[tuple[str, nn.Module, Tensor]] = []

    def keep(name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 0:
            found[name] = first.detach()

    def begin(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        unfinished.append((name, layer, inputs[0] if inputs else torch.zeros(0)))

    device = next(iter(list_arrays(batch).values())).device
    with ExitStack() as hooks, RefuseLookups(), torch.no_grad(), model_state.seed_torch(device, seed):
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(keep, name)))
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                hooks.enter_context(module.register_forward_pre_hook(partial(begin, name)))
                hooks.enter_context(module.register_forward_hook(lambda *_: unfinished.clear()))
        try:
            final = model_state.call_model(model, batch)
        except SilodpError:
            raise
        except (Exception, SystemExit) as problem:
            refusal = _refuse_lookup(*unfinished[0], list_arrays(batch)) if unfinished else None
            raise refusal or _describe_failed_run(batch, problem) from problem
    if not isinstance(final, Tensor):
        raise model_state.model_error(
            f"the model must return one tensor, not {type(final).__name__}: {_suggest_output(final)}",
            "model.output_shape",
        )
    found[""] = final
    return found


def _describe_failed_run(batch: Any, problem: BaseException) -> SilodpError:
    """Return the error about a model that raises on made-up records."""
    inputs, kinds = list_arrays(batch), get_kind(batch)
    shapes = join_names(f"{name} {shape}".strip() for name, shape, _ in kinds)
    reason = describe_exception(problem)
    if "Long" in reason and any(kind == "torch.int64" for _, _, kind in kinds):
        reason += "; look ids (int64) up in an nn.Embedding, or give numbers as float32"
    called = f", given as the arguments {', '.join(inputs)}" if "" not in inputs else ""
    return model_state.model_error(
        f"the model fails on records of shape {shapes} (tried with made-up numbers{called}): {reason}",
        "model.raised",
    )


def _suggest_output(outputs: object) -> str:
    """Return how a forward gives one tensor in place of a container of several things."""
    if isinstance(outputs, Mapping):  # as the outputs of transformers are, too
        names, place = list(outputs), "outputs[{!r}]"
    elif isinstance(outputs, tuple | list) and not hasattr(outputs, "_fields"):
        names, place = [0], "outputs[{}]"
    else:
        names, place = list(getattr(outputs, "_fields", getattr(outputs, "__dict__", ()))), "outputs.{}"
    if not names:
        return "return the logits alone in its forward"
    return f"return {place.format('logits' if 'logits' in names else names[0])} in its forward"


def _refuse_lookup(
    name: str, layer: nn.Module, asked: Tensor, inputs: dict[str, Tensor]
) -> SilodpError | None:
    """Return the refusal of an embedding layer that failed on made-up records; None where the ids are not at fault."""
    where = describe_layer(name, layer)
    if all(part.is_floating_point() for part in inputs.values()):
        return model_state.model_error(
            f"{where} looks up ids, and the inputs are real numbers: give ids as int64, with their public number "
            "(categories)",
            "model.integer_inputs",
        )
    rows = int(getattr(layer, "num_embeddings", 0))
    if asked.is_floating_point() or not len(asked) or int(asked.max()) < rows:
        return None
    return model_state.model_error(
        f"{where} has {rows} rows and is asked for row {int(asked.max())}, which the public number of ids allows "
        "(categories): set num_embeddings to at least that number",
        "data.categories",
    )


def _replace_record(batch: Tensor) -> Tensor:
    """Return the batch with another second record: a distant one, or other ids among those seen."""
    changed = batch.clone()
    if batch.is_floating_point():
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(batch[1].shape, generator=generator, dtype=torch.float64).to(batch)
        # At the scale of the largest value, so that a layer that mixes records moves the others visibly.
        changed[1] = batch[1] + (1 + batch.abs().max().nan_to_num(0, 0)) * noise
    else:
        # At every place an id that another record has there, and this one has not, if there is one.
        other = (batch != batch[1]).int().argmax(0, keepdim=True)
        changed[1] = batch.gather(0, other)[0]
    return changed
