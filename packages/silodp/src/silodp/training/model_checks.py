"""Checks that run a copy of a model on an example, before it is trained: what it returns, and what it must not do.

See `model_probe` for whether records mix, and whether gradients are those of autograd.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from silodp.data.inputs import get_kind, list_arrays, map_arrays
from silodp.errors import SilodpError
from silodp.text import describe_exception, join_names
from silodp.training import model_state
from silodp.training.losses import Loss, loss_error
from silodp.training.model_structure import RefuseLookups, describe_layer
from silodp.training.snapshots import Snapshot, are_same

# How far a loss or its gradient may move, relative to the largest: kernels may sum in another order.
_TOLERANCE = 1e-4
_MAX_DRAWS = 10  # runs of random layers, until every parameter has had a gradient
SCALES = (1.0, 300.0)  # of numbers at which gradients of many at once are compared, outliers too
_EXAMPLES = 8  # records of an example that are looked at
# Rows that are added to a batch, to see whether a loss depends on them.
_PADDINGS = (1, 3)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
_log = logging.getLogger(__name__)


def inspect_outputs(model: nn.Module, example: Any) -> Tensor:
    """Check a copy of a model on an example: one row per record, finite, nothing written into inputs or kept.

    Args:
        model: The model; it is left as it came.
        example: The records (n, ...), n ≥ 1, a tensor or `NamedArrays`.

    Returns:
        The outputs in eval mode, of at least three records.

    Raises:
        SilodpError: the model fails one of these, or raises.
    """
    if len(example) == 0:
        raise SilodpError("checking a model needs at least one example record", code="data.no_records")
    model = model_state.copy_model(model)
    batch = take_records(example, min(max(3, len(example)), _EXAMPLES))
    for mode in (True, False):
        with model_state.keep_modes(model):
            model_state.set_mode(model, mode)
            held = Snapshot({"model": model})
            outputs = run_layers(model, batch)[""]
            held.refuse_changes()
            _inspect_rows(batch, outputs)
            _inspect_norms(model, batch, warns=mode)
            _inspect_one_record(model, batch, outputs)
            held.refuse_changes()
    return outputs


def take_records(x: Any, count: int, first: int = 0) -> Any:
    """Return a copy of so many records from one on; behind the last one comes the first."""
    return x[(torch.arange(first, first + count) % len(x)).tolist()]


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
    _inspect_labels(loss, outputs, y)
    for scale in SCALES:
        _inspect_many(loss, scale * outputs.detach(), y)


def _inspect_many(loss: Loss, outputs: Tensor, y: Tensor) -> None:
    """Refuse a loss that draws the same numbers in every call, or is another one for many users at once.

    How many users are computed at once is a matter of other persons.
    """
    count = min(len(y), _EXAMPLES) - 1
    # Of two users, the second one has all but the first record of the other, and one more.
    both = [range(count), range(1, count + 1)]
    many = torch.stack([outputs[list(rows)] for rows in both]).requires_grad_()
    targets = torch.stack([y[list(rows)] for rows in both])
    everyone = torch.ones(2, count, dtype=outputs.dtype, device=outputs.device)
    with torch.enable_grad():
        alone, states = [], []
        for seed in (0, 1):
            with model_state.seed_torch(outputs.device, seed):
                losses = [loss.compute(*one) for one in zip(many, targets, everyone, strict=True)]
                states.append(model_state.get_random_state(outputs.device))
            alone.append(torch.autograd.grad(torch.stack(losses).sum(), many, materialize_grads=True)[0])
        if torch.equal(*states):
            raise loss_error(
                f"the loss '{loss.name}' sets the seed of torch's random numbers, so what a person's records draw "
                "depends on who is computed beside them: leave out torch.manual_seed",
                "model.hidden_random",
            )
        if not torch.equal(*alone):
            return  # at once, each user draws other numbers
        try:
            at_once = vmap(loss.compute, randomness="different")(many, targets, everyone)
        except Exception:  # the users are computed one after another
            return
        (found,) = torch.autograd.grad(at_once.sum(), many, materialize_grads=True)
    if _differs((alone[0], alone[0]), (found, found), (alone[0], alone[0])):
        raise loss_error(
            f"the gradient of the loss '{loss.name}' is another one for many persons at once: leave out hooks, and "
            "code that asks whether a tensor requires a gradient or that catches the exceptions of torch",
            "model.gradient_differs",
        )


def _inspect_labels(loss: Loss, outputs: Tensor, y: Tensor) -> None:
    """Check the loss of one record with each kind of label, and of three: what fails must not depend on records."""
    for place in range(min(len(y), _EXAMPLES)):
        for rows in ([place], [place] * 3):
            value = _compute_repeatably(loss, outputs[rows], y[rows], outputs.new_ones(len(rows)))
            if not value.requires_grad:
                raise loss_error(
                    f"the loss '{loss.name}' has no gradient with respect to the model's outputs for a person whose "
                    "records have some one label: return outputs.sum() * 0 where there is nothing to learn",
                    "loss.no_gradient",
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

    How many do depends on other persons, where users train side by side and padded.
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


def _inspect_rows(batch: Any, outputs: Tensor) -> None:
    """Check that outputs are one finite row per record."""
    if outputs.dim() == 0 or outputs.shape[0] != len(batch):
        raise model_state.model_error(
            f"the model turns {len(batch)} records into an output of shape {tuple(outputs.shape)}: "
            "it must give one row per record",
            "model.output_shape",
        )
    is_finite = all(torch.isfinite(part).all() for part in list_arrays(batch).values())
    if is_finite and not torch.isfinite(outputs).all():
        raise model_state.model_error(
            "the model gives outputs that are not finite on a finite example (before a run, standard normal numbers "
            "are made up, also negative ones): scale the inputs, and bound them where a function needs it, for example "
            "x.clamp(min=1e-6) before a logarithm",
            "model.not_finite",
        )


def _inspect_one_record(model: nn.Module, batch: Any, outputs: Tensor) -> None:
    """Refuse outputs of another shape where a batch has one record, as a person may have: squeeze() drops its row."""
    # By a list of places, so that the dimension of records stays.
    alone = run_layers(model, batch[[0]])[""]
    if alone.shape != (1, *outputs.shape[1:]):
        raise model_state.model_error(
            f"the model turns {len(batch)} records into outputs of shape {tuple(outputs.shape)}, and one record into "
            f"{tuple(alone.shape)}: give one row per record, for example by squeeze(-1) in place of squeeze()",
            "model.output_shape",
        )


def _inspect_norms(model: nn.Module, batch: Any, warns: bool) -> None:
    """Refuse layers that normalize single numbers, which are then the same for all records; warn of pairs."""
    found: dict[str, int] = {}

    def note(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            numbers = _count_normalized(layer, inputs[0])
            found[name] = min(found.get(name, numbers), numbers)

    norms = {name: layer for name, layer in model.named_modules() if isinstance(layer, _NORMS)}
    if not norms:
        return
    with ExitStack() as hooks:
        for name, layer in norms.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(note, name)))
        run_layers(model, batch)
    for name, numbers in found.items():
        where = describe_layer(name, norms[name])
        if numbers == 1:
            raise model_state.model_error(
                f"{where} normalizes every number by itself, so its outputs are the same for all records: normalize "
                "over more numbers (fewer groups, or a wider layer before it), or leave it out",
                "model.ignores_inputs",
            )
        if numbers == 2 and warns:
            _log.warning(
                "%s normalizes pairs of numbers, of which only the sign of their difference is left: normalize over "
                "more numbers (fewer groups, or a wider layer before it)",
                where,
            )


def _count_normalized(layer: nn.Module, x: Tensor) -> int:
    """Return over how many numbers a layer takes each mean."""
    if isinstance(layer, nn.LayerNorm):
        return math.prod(layer.normalized_shape)
    numbers = math.prod(x.shape[2:])
    return numbers * (x.shape[1] // layer.num_groups) if isinstance(layer, nn.GroupNorm) else numbers


def run_layers(model: nn.Module, batch: Any, entered: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return floating outputs by layer name in order of completion, '' for the model; same dropout in every call.

    Args:
        model: The model.
        batch: The records.
        entered: Gets the floating inputs of layers by name.

    Raises:
        SilodpError: the model raises, writes into its inputs, or returns something else than a tensor.
    """
    found: dict[str, Tensor] = {}
    # Embeddings that have begun and not ended, with their ids: whatever the model raises then comes from the first one.
    unfinished: list[tuple[str, nn.Module, Tensor]] = []

    def keep(name: str, _module: nn.Module, inputs: object, output: object) -> None:
        for values, kept in ((output, found), (inputs, {} if entered is None else entered)):
            first = values[0] if isinstance(values, tuple) and values else values
            if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 0:
                kept[name] = first.detach().clone()  # a later layer may write into it

    def begin(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        unfinished.append((name, layer, inputs[0] if inputs else torch.zeros(0)))

    device = next(iter(list_arrays(batch).values())).device
    given = map_arrays(torch.clone, batch)
    with ExitStack() as hooks, RefuseLookups(), torch.no_grad(), model_state.seed_torch(device, 0):
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(keep, name)))
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                hooks.enter_context(module.register_forward_pre_hook(partial(begin, name)))
                hooks.enter_context(module.register_forward_hook(lambda *_: unfinished.clear()))
        try:
            final = model_state.call_model(model, given)
        except SilodpError:
            raise
        except (Exception, SystemExit) as problem:
            refusal = _refuse_lookup(*unfinished[0], list_arrays(batch)) if unfinished else None
            raise refusal or _describe_failed_run(batch, problem) from problem
    if not are_same(list_arrays(given), list_arrays(batch)):
        raise model_state.model_error(
            f"the forward of {type(model).__name__} writes into its inputs, which are a silo's records: work on a copy "
            "(x = x.clone(), or x * 2 in place of x.mul_(2), and inplace=False in the first layer)",
            "model.writes_inputs",
        )
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
