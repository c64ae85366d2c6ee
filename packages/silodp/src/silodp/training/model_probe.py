"""A probe of a model before training: does each record's output and gradient depend on that record alone?

Clipping bounds the influence of a person or record only where it does. A copy of the model is run in double precision,
on batches of several lengths and scales and at several parameters, because a layer that mixes records may stand behind
a weight that starts at zero, or act in the backward pass alone. Each record of a batch is compared with the same record
alone, and the gradients that training will compute with those of plain autograd on the module itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from silodp.accounting.views import Unit
from silodp.data.inputs import list_arrays, map_arrays
from silodp.errors import SilodpError
from silodp.text import describe_exception
from silodp.training import model_state
from silodp.training.gradients import (
    Gradient,
    GradientBuilder,
    ReplaceFunctions,
    build_plain_gradient,
    is_looped,
)
from silodp.training.losses import Loss
from silodp.training.model_checks import SCALES, run_layers, take_records
from silodp.training.model_state import model_error
from silodp.training.model_structure import describe_layer
from silodp.training.sgd._planning import default_memory_budget, measure_cost
from silodp.training.snapshots import Snapshot

if TYPE_CHECKING:
    from silodp.training.task import Task

# How far values may move, relative to the largest: in double precision rounding moves them by far less, and where a
# model computes in single precision by up to the second number.
_DOUBLE, _SINGLE = 1e-7, 1e-4
_OF_GRADIENTS = 10  # so many times as far: they are longer sums
# What is smaller is compared as if it were so large: of sums that cancel, only rounding is left.
_LEAST = 1e-3
# (records of a batch, scale of their numbers, whether parameters are drawn, train mode). A scale of None stands for the
# records of the example. Large numbers come first: what a model keeps of records often shows with them alone.
_BATCHES: tuple[tuple[int, float | None, bool, bool], ...] = (
    (3, 1e3, True, True),
    (3, 1e3, True, False),
    (2, None, False, True),
    (3, 0.0, True, True),
    (8, None, True, True),
    (16, 1.0, False, False),
    (64, 1.0, True, True),
)
_LONGEST = 512  # records of a batch of training that are tried
_FEW = 8  # records of a batch on which the drawing of random numbers is looked at
# Of a model with so many parameters, batches have fewer records: one takes about a tenth of a second.
_LARGE, _MOST_OF_LARGE = 5_000_000, 16
# (records of a batch, scale, whether parameters are drawn, whose gradient is compared with that of the record alone)
_WEIGHTED: tuple[tuple[int, float | None, bool, tuple[int, ...]], ...] = (
    (2, None, True, (0, 1)),
    (3, 1e3, False, (0,)),
    (16, None, True, (-1,)),
)


class Probe:
    """A copy of a model in double precision, whose batches are compared with single records.

    Args:
        task: The task of the model, which is left as it came.
        example: The records (n, ...), n ≥ 1, on the task's device.
        longest: The records of the longest batch of training; None: not known.

    Raises:
        SilodpError: a layer cannot be initialized.
    """

    def __init__(self, task: Task, example: Any, longest: int | None = None) -> None:
        self._name = type(task.model).__name__
        self._random = {True: False, False: False}  # in train mode, and in eval mode
        model, self._example, self._tolerance = _make_precise(task.model, example)
        self._rates = _silence(model)
        # The "labels" of this loss are weights of the outputs, so that gradients are those of any loss.
        self._task = task.replace_model(model, Loss("probe", _weigh))
        self._initial = self._task.unflatten(task.initial(0).to(self._task.dtype))
        # Called as a module, with its parameters' values set in place: whatever refers to them sees them.
        self._module = model
        self._random_numbers = torch.Generator().manual_seed(0)
        self._most = self._count_most_records()
        self._longest = min(longest or 0, _LONGEST)

    def compare_outputs(self) -> None:
        """Check that what a model returns for a record is the same in every batch.

        Raises:
            SilodpError: it is not, or the model keeps something, fails at large numbers, or ignores its inputs.
        """
        responds = False
        with _default_type(self._task.dtype):
            for rows, scale, is_drawn, training in (*_BATCHES, (self._longest, None, True, True)):
                count = min(rows, self._most)
                if count < 2:
                    continue
                x, params = self._make_up(count, scale), self._draw() if is_drawn else self._initial
                try:
                    if scale == 1e3:
                        self._refuse_state(params, x, training)
                    outputs = self._run(params, x, training)
                    self._output_shape = outputs.shape[1:]
                    if not self._random[training]:  # large numbers may hide it
                        self._look_for_randomness(params, x, training, outputs)
                    if scale is None and count <= _FEW:
                        self._refuse_seeds(params, x)
                    self._compare_records(params, x, training, outputs)
                except SilodpError:
                    raise
                except Exception as error:
                    if is_drawn:  # with other weights than it was made for, a model may fail
                        continue
                    raise model_error(
                        f"the model fails on made-up records ({describe_exception(error)}): correct its forward, so "
                        "that it takes all numbers",
                        "model.raised",
                    ) from error
                responds |= is_drawn and self._differs(outputs[0], outputs[-1], outputs)
        if not responds and not _are_alike(self._example):
            raise model_error(
                f"the outputs of {self._name} are the same for all records, at all parameters that were tried: a layer "
                "in it erases its inputs, or the forward does not use them",
                "model.ignores_inputs",
            )

    def compare_gradients(self, builders: Mapping[Unit, GradientBuilder], splits: bool = False) -> None:
        """Check that gradients are sums over records, and those of autograd, also for many users or records at once.

        Args:
            builders: What computes the gradients of users, and of records where training needs them.
            splits: Whether users train by `Task.split_records`.

        Raises:
            SilodpError: they are not.
        """
        with _default_type(self._task.dtype):
            for count, scale, is_drawn, records in _WEIGHTED:
                params, x = (
                    self._draw() if is_drawn else self._initial,
                    self._make_up(min(count, self._most), scale),
                )
                for record in records:
                    self._compare_backward(params, x, record % len(x))
            params = self._draw()
            x, cotangents = self._make_up_weighted(3, 1.0)
            expected = self._differentiate(params, x, cotangents)
            mask = torch.ones(len(cotangents), dtype=self._task.dtype, device=self._task.device)
            trained = self._task.split_records() if splits else self._task
            with model_state.seed_torch(self._task.device, 0):
                found = build_plain_gradient(trained)(params, x, cotangents, mask)
            self._compare(found, expected, "one person")
            # At once, each user draws other numbers.
            with ReplaceFunctions(_CONSTANT) if self._random[True] else nullcontext():
                if self._random[True] and self._draws_still(params, x):
                    return
                for scale in SCALES:
                    for unit, builder in builders.items():
                        if is_looped(builder):  # it computes what was compared above
                            continue
                        if unit == "user":
                            self._compare_users(builder(trained), scale)
                        else:
                            self._compare_single_records(builder(self._task), scale)

    def _draws_still(self, params: tuple[Tensor, ...], x: Any) -> bool:
        one, other = (self._run(params, x, True, seed) for seed in (0, 1))
        return self._differs(one, other, one)

    def _compare_users(self, differentiate: Gradient, scale: float) -> None:
        """Compare the gradients of two users, with parameters and records of their own, with those of each alone."""
        params = [self._draw() for _ in range(2)]
        data = [self._make_up_weighted(2, scale) for _ in range(2)]
        x = map_arrays(torch.cat, _zip_arrays([one for one, _ in data]))
        x = map_arrays(lambda array: array.unflatten(0, (2, 2)), x)
        cotangents = torch.stack([one for _, one in data])
        mask = torch.ones(2, 2, dtype=self._task.dtype, device=self._task.device)
        together = differentiate(
            [torch.stack(parts) for parts in zip(*params, strict=True)], x, cotangents, mask
        )
        for user in range(2):
            expected = self._differentiate(params[user], *data[user])
            self._compare([part[user] for part in together], expected, "many persons at once")

    def _compare_single_records(self, differentiate: Gradient, scale: float) -> None:
        params, (x, cotangents) = self._draw(), self._make_up_weighted(3, scale)
        together = differentiate(params, x, cotangents)
        for record in range(3):
            expected = self._differentiate(params, x[[record]], cotangents[[record]])
            self._compare([part[record] for part in together], expected, "many records at once")

    def _compare_backward(self, params: tuple[Tensor, ...], x: Any, record: int) -> None:
        """Refuse a gradient of one record that is another one in a batch: the outputs are known to be the same."""
        cotangents = torch.zeros(
            len(x), *self._output_shape, dtype=self._task.dtype, device=self._task.device
        )
        cotangents[record] = self._normal(self._output_shape)
        found = self._differentiate(params, x, cotangents)
        reference = (self._replace(x, record), cotangents)
        if not self._random[True]:
            reference = (x[[record]], cotangents[[record]])
        if self._find_difference(found, self._differentiate(params, *reference)):
            raise model_error(
                f"the backward pass of {self._name} mixes the records of a batch, or depends on their number, so one "
                "person's records change another's gradient: let every operation work on each record alone",
                "model.mixes_records",
            )

    def _compare_records(self, params: tuple[Tensor, ...], x: Any, training: bool, outputs: Tensor) -> None:
        """Refuse outputs of a record that are others when it is alone, or beside other records."""
        count = len(x)
        for record in sorted({0, count // 2, count - 1}):
            replaced = self._replace(x, record)
            if not self._random[training]:
                alone = self._run(params, x[[record]], training)
                if not self._differs(alone[0], outputs[record], outputs):
                    continue
                other = x[[record]]
            else:
                other = replaced
            beside = self._run(params, replaced, training)
            mixes = self._differs(beside[record], outputs[record], outputs)
            if not mixes and other is replaced:
                continue
            name = self._find_layer(params, x, replaced if mixes else other, record, training)
            self._refuse_mixing(name, mixes)

    def _look_for_randomness(
        self, params: tuple[Tensor, ...], x: Any, training: bool, outputs: Tensor
    ) -> None:
        again, other = (self._run(params, x, training, seed) for seed in (0, 1))
        if self._differs(again, outputs, outputs):
            raise model_error(
                f"{self._name} returns something else when it is run again with the same seed of torch: draw random "
                "numbers by torch alone (not by numpy or random), and use no clock and no counter",
                "model.hidden_random",
            )
        # Another number of rows draws other numbers: only batches of one length can be compared.
        self._random[training] |= self._differs(other, outputs, outputs)

    def _refuse_seeds(self, params: tuple[Tensor, ...], x: Any) -> None:
        """Refuse a model that draws the same random numbers in every call: a place in a batch would choose a row's.

        Dropout draws here, unlike elsewhere.
        """
        self._load(params, training=True)
        found, silent = [], [dict[str, float]()] * len(self._rates)
        for rates, seed in ((silent, 0), (self._rates, 0), (self._rates, 1)):
            with (
                torch.no_grad(),
                _set_attributes(self._module, rates),
                model_state.seed_torch(self._task.device, seed),
            ):
                outputs = model_state.call_model(self._module, map_arrays(torch.clone, x))
                found.append((outputs, model_state.get_random_state(self._task.device)))
        (quiet, _), (one, state), (other, other_state) = found
        draws_alike = not self._differs(other, one, one) and self._differs(one, quiet, one)
        if torch.equal(state, other_state) or draws_alike:
            raise model_error(
                f"{self._name} sets the seed of torch's random numbers, so what a person's records draw depends on who "
                "is computed beside them: draw constants when the model is built, and leave out torch.manual_seed",
                "model.hidden_random",
            )

    def _refuse_state(self, params: tuple[Tensor, ...], x: Any, training: bool) -> None:
        self._load(params, training)
        held = Snapshot({"model": self._module})
        with torch.no_grad(), model_state.seed_torch(self._task.device, 0):
            model_state.call_model(self._module, map_arrays(torch.clone, x))
        held.refuse_changes()

    def _refuse_mixing(self, name: str, mixes: bool) -> None:
        place = (
            describe_layer(name, self._module.get_submodule(name)) if name else f"the forward of {self._name}"
        )
        if not mixes:
            raise model_error(
                f"the outputs of {place} change with the number of rows in a batch: work on each record alone, without "
                "the length of the batch",
                "model.mixes_records",
            )
        remedy = "use a layer that works on each record alone" if name else "work on each record alone"
        if name and getattr(self._module.get_submodule(name), "batch_first", True) is False:
            remedy = "set batch_first=True, because here the first dimension of its inputs is the record"
        raise model_error(
            f"{place} mixes the records of a batch, so one person's records change another's gradient: {remedy}",
            "model.mixes_records",
        )

    def _find_layer(self, params: tuple[Tensor, ...], x: Any, other: Any, record: int, training: bool) -> str:
        """Return the innermost layer, first in order of execution, whose outputs of a record differ; '' for the model.

        Where its inputs differ already, what is around it has mixed them.
        """
        self._load(params, training)
        entered: list[dict[str, Tensor]] = [{}, {}]
        before, after = (
            run_layers(self._module, one, kept) for one, kept in zip((x, other), entered, strict=True)
        )
        place = record if len(other) > 1 else 0

        def differs(name: str, one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
            if name not in one or name not in two or (len(one[name]), len(two[name])) != (len(x), len(other)):
                return False
            return self._differs(two[name][place], one[name][record], one[name])

        found = next((name for name in before if name and differs(name, before, after)), "")
        return found.rpartition(".")[0] if differs(found, *entered) else found

    def _compare(self, found: Sequence[Tensor], expected: Sequence[Tensor], of: str) -> None:
        if name := self._find_difference(found, expected):
            raise model_error(
                f"the gradient of '{name}' that training computes for {of} is not that of loss.backward() on "
                f"{self._name}: call parameters by the names under which modules have them (not from a list or another "
                "attribute), and leave out hooks of the backward pass, and code that asks whether a tensor requires a "
                "gradient",
                "model.gradient_differs",
            )

    def _find_difference(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
        """Return the name of a parameter whose gradients differ; '' for none. One without a gradient comes first."""
        largest, names = max(_measure_scale(part) for part in expected), list[str]()
        for name, one, other in zip(self._task.names, found, expected, strict=True):
            scale = max(_measure_scale(other), _LEAST * largest, _LEAST)
            if _differ(one, other, _OF_GRADIENTS * self._tolerance * scale):
                names.insert(0 if not one.any() else len(names), name)
        return names[0] if names else ""

    def _differs(self, a: Tensor, b: Tensor, whole: Tensor) -> bool:
        return _differ(a, b, self._tolerance * max(_measure_scale(whole), _LEAST))

    def _run(self, params: tuple[Tensor, ...], x: Any, training: bool, seed: int = 0) -> Tensor:
        """Return outputs as training computes them, or evaluation."""
        x = map_arrays(torch.clone, x)
        with torch.no_grad(), model_state.seed_torch(self._task.device, seed):
            if training:
                return self._task.forward(params, x)
            self._load(params, training)
            outputs: Tensor = model_state.call_model(self._module, x)
            return outputs

    def _differentiate(self, params: tuple[Tensor, ...], x: Any, cotangents: Tensor) -> list[Tensor]:
        """Return the gradients of weighted outputs by plain autograd of the module."""
        self._load(params, training=True)
        self._module.zero_grad()
        with torch.enable_grad(), model_state.seed_torch(self._task.device, 0):
            outputs = model_state.call_model(self._module, map_arrays(torch.clone, x))
            (outputs * cotangents).sum().backward()
        named = dict(self._module.named_parameters())
        return [torch.zeros_like(named[n]) if (g := named[n].grad) is None else g for n in self._task.names]

    def _load(self, params: tuple[Tensor, ...], training: bool) -> None:
        named = dict(self._module.named_parameters())
        model_state.set_mode(self._module, training)
        with torch.no_grad():
            for name, value in zip(self._task.names, params, strict=True):
                named[name].copy_(value)

    def _draw(self) -> tuple[Tensor, ...]:
        """Draw all trainable parameters, so that outputs of a layer are about as large as its inputs."""
        sizes = ((shape, math.prod(shape[1:]) if len(shape) > 1 else 1) for shape in self._task.shapes)
        return tuple(self._normal(shape) / max(1, inputs) ** 0.5 for shape, inputs in sizes)

    def _normal(self, shape: Sequence[int]) -> Tensor:
        # In single precision, which is drawn in a third of the time.
        drawn = torch.randn(tuple(shape), generator=self._random_numbers, dtype=torch.float32)
        return drawn.to(self._task.device, self._task.dtype)

    def _make_up(self, count: int, scale: float | None) -> Any:
        """Return records of the example (ids always are), or with numbers of this scale."""
        x = take_records(self._example, count)
        return x if scale is None else map_arrays(lambda array: self._renew(array, scale), x)

    def _renew(self, array: Tensor, scale: float) -> Tensor:
        return self._normal(array.shape).to(array.dtype) * scale if array.is_floating_point() else array

    def _make_up_weighted(self, count: int, scale: float) -> tuple[Any, Tensor]:
        return self._make_up(count, scale), self._normal((count, *self._output_shape))

    def _replace(self, x: Any, record: int) -> Any:
        """Return the batch with other records in place of all but one: distant ones, or other ids of the example."""

        def replace(array: Tensor) -> Tensor:
            changed = array.roll(1, 0)
            if array.is_floating_point():
                changed = array + (1 + array.abs().max()) * self._normal(array.shape).to(array.dtype)
            changed[record] = array[record]
            return changed

        return map_arrays(replace, x)

    def _count_most_records(self) -> int:
        """Return how many records a batch may have: those that fit in memory with all that a gradient needs."""
        x = self._make_up(2, None)

        def run() -> Any:
            with torch.enable_grad():
                return model_state.call_model(self._module, x)

        with _default_type(self._task.dtype), model_state.seed_torch(self._task.device, 0):
            peak = measure_cost(run).peak
        fitting = max(3, 2 * default_memory_budget(self._task.device) // max(1, peak))
        return min(fitting, _MOST_OF_LARGE) if self._task.size > _LARGE else fitting


def _weigh(outputs: Tensor, cotangents: Tensor, mask: Tensor) -> Tensor:
    return ((outputs * cotangents).reshape(len(mask), -1).sum(1) * mask).sum()


def _differ(a: Tensor, b: Tensor, least: float) -> bool:
    """Return whether numbers differ by more than this, or are finite in one place and not in the other."""
    if a.shape != b.shape:
        return True
    largest = _find_largest(a - b)
    if math.isfinite(largest):
        return largest > least
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return True
    return bool(((a - b).abs()[finite] > least).any())


def _measure_scale(values: Tensor) -> float:
    """Return the largest of the numbers that are finite; 0 for none."""
    largest = _find_largest(values)
    return largest if math.isfinite(largest) else _find_largest(values[values.isfinite()])


def _find_largest(values: Tensor) -> float:
    """Return the largest absolute value, in one pass; not finite where one of the numbers is not."""
    return float(torch.linalg.vector_norm(values, torch.inf)) if values.numel() else 0.0


def _are_alike(x: Any) -> bool:
    """Return whether all records are the same, so that nothing can be seen of what a model does with them."""
    return all(bool((array == array[:1]).all()) for array in list_arrays(x).values())


def _zip_arrays(parts: Sequence[Any]) -> Any:
    """Return one list of arrays for each name."""
    first = list_arrays(parts[0])
    if list(first) == [""]:
        return list(parts)
    return {name: [part[name] for part in parts] for name in first}


def _make_precise(model: nn.Module, example: Any) -> tuple[nn.Module, Any, float]:
    """Return a copy of a model and of records in double precision, and how exactly their values can be compared.

    A model that holds numbers of single precision elsewhere than in parameters and buffers stays as it is.
    """
    precise = model_state.copy_model(model).double()
    x = map_arrays(lambda array: array.double() if array.is_floating_point() else array, example)
    found = _FindSingle()
    try:
        with (
            _default_type(torch.float64),
            torch.no_grad(),
            model_state.seed_torch(_find_device(model), 0),
            found,
        ):
            model_state.call_model(precise, take_records(x, 2))
    except Exception:  # it ran in the precision that it came with
        is_double = next(model.parameters()).dtype == torch.float64
        return model_state.copy_model(model), example, _DOUBLE if is_double else _SINGLE
    return precise, x, _SINGLE if found.single else _DOUBLE


def _find_device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


class _FindSingle(TorchFunctionMode):
    """Notes whether a function returned numbers of less than double precision."""

    single = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.dtype != torch.float64:
            self.single = True
        return result


def _silence(model: nn.Module) -> list[dict[str, float]]:
    """Let the layers of torch that draw random numbers draw none: they do not mix records, and hide what does.

    Returns:
        The attributes of each layer that were changed, with their values before.
    """
    before = []
    for layer in model.modules():
        values: dict[str, float] = {}
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            values = {"p": 0.0}
        elif isinstance(layer, nn.RReLU):
            values = dict.fromkeys(("lower", "upper"), (layer.lower + layer.upper) / 2)
        elif isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
            values = {"dropout": 0.0}
        before.append({key: getattr(layer, key) for key in values})
        vars(layer).update(values)
    return before


@contextmanager
def _set_attributes(model: nn.Module, values: Sequence[Mapping[str, float]]) -> Iterator[None]:
    """Let the layers of a model have other attributes."""
    pairs = list(zip(model.modules(), values, strict=True))
    before = [{key: getattr(layer, key) for key in own} for layer, own in pairs]
    for layer, own in pairs:
        vars(layer).update(own)
    try:
        yield
    finally:
        for (layer, _), own in zip(pairs, before, strict=True):
            vars(layer).update(own)


def _return_first(first: Tensor, *_: Any, **__: Any) -> Tensor:
    return first


def _fill(*size: Any, generator: Any = None, **options: Any) -> Tensor:
    return torch.ones(*size, **options) / 2


def _fill_like(values: Tensor, **options: Any) -> Tensor:
    return torch.full_like(values, 0.5, **options)


def _attend(*args: Any, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(*args[:4], **options | {"dropout_p": 0.0})


_DROPPING = ["dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"]
# Functions that draw nothing, in place of those that draw.
_CONSTANT: dict[Any, Any] = {
    **{getattr(F, name): _return_first for name in _DROPPING},
    F.scaled_dot_product_attention: _attend,
    torch.dropout: _return_first,
    **dict.fromkeys((torch.rand, torch.randn), _fill),
    **dict.fromkeys((torch.rand_like, torch.randn_like), _fill_like),
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), lambda p, **_: (p > 0.5).to(p.dtype)),
}


@contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    """Let torch make numbers of this type where a model does not say of which."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
