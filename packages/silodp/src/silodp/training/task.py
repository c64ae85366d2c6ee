"""The learning task: a model, a loss and metrics, with parameters as one flat vector."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from silodp.accounting.views import Unit
from silodp.data.inputs import get_kind, list_arrays, map_arrays
from silodp.errors import SilodpError
from silodp.settings import check_type
from silodp.text import name_package
from silodp.training import model_state
from silodp.training._loss_copies import copy_loss
from silodp.training.gradients import (
    GradientBuilder,
    build_user_gradient,
    call_each_record,
    computes_alike,
    is_looped,
    select_gradient,
)
from silodp.training.losses import LOSSES, Loss, adapt_torch_loss, describe_raised
from silodp.training.made_up import make_up_inputs_like, make_up_labels_like, repeat_examples
from silodp.training.metrics import Metric
from silodp.training.model_checks import inspect_loss, inspect_outputs, inspect_parameters
from silodp.training.model_probe import Probe
from silodp.training.model_structure import inspect_structure
from silodp.training.models import Architecture
from silodp.training.per_record import is_per_record
from silodp.training.sgd._planning import default_memory_budget, measure_cost
from silodp.training.snapshots import Snapshot

Built = TypeVar("Built")
Call = Callable[[nn.Module, Any], Any]
"""Returns the outputs (n, ...) of a model for inputs (n, ...)."""

_EVALUATION_BATCH = 4096  # records; fewer where the layers' outputs would take more than the memory budget
_KNOWN_CODE = {"silodp", "torch"}
# Entries of a task's cache. 50 silos in one process have hundreds of shapes of steps, and each takes up to a second to
# trace.
_MAX_CACHED = 512


class Task:
    """A `torch.nn.Module`, a loss that is a function of one user's records, and metrics.

    Parameters travel as one flat vector (d,), the trainable ones in the order of `named_parameters()`; frozen ones and
    buffers are constants of the model; a parameter with several names (tied weights) is there once, under its first
    name. The model trains in train mode, except for parts that have no trainable parameter and come in eval mode. Data
    type (float32 or float64) and device follow the model's parameters. `forward` must be a function of parameters,
    inputs and torch's random numbers: no counters, no Python randomness. The model is copied, so later changes to the
    caller's module do not matter.

    Args:
        model: A module that ends in logits, log hazards or real numbers, one row per record.
        loss: A loss of one user's records (see `silodp.training.losses`), or a common loss of `torch.nn`, of which the
            mean over the records is taken.
        metrics: The functions f(outputs, targets) -> float by name, for `evaluate`.
        architecture: Where the model came from, which a run keeps with it; None stands for the caller's program.
        pretrained: Whether training starts at the values that the parameters came with, which then must be public;
            otherwise they are drawn anew. None keeps them only if parts of the model are frozen. With True, the values
            are part of the run's identity; with None they may differ, as a head that is drawn when the model is built.

    Raises:
        SilodpError: a layer breaks per-user gradients (the sentence says which, and what to use instead), or an
            argument has another type. `check` adds the tests that need an example input.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | nn.Module,
        metrics: Mapping[str, Metric] | None = None,
        architecture: Architecture | None = None,
        *,
        pretrained: bool | None = None,
    ) -> None:
        _check_arguments(model, loss, metrics, pretrained)
        inspect_structure(model)
        self.metrics = {} if metrics is None else dict(metrics)
        check_type("architecture", architecture, (Architecture, type(None)))
        self.architecture = Architecture() if architecture is None else architecture
        self._has_stated_start = pretrained is True
        self._hold(model, loss)
        if pretrained is not None:
            self.is_pretrained = pretrained
        self._held = self._take_snapshot()

    def _hold(self, model: nn.Module, loss: Loss | nn.Module) -> None:
        """Keep a copy of a model that was inspected, and all that follows from model and loss alone."""
        self.model = model_state.copy_model(model)
        model_state.set_mode(self.model, training=True)
        # What is released is a copy of this one, which never runs: no module of it can keep anything of a record. It
        # shares the parameters, whose values `load` replaces or which are frozen.
        self._released = model_state.copy_model(self.model, dict((id(p), p) for p in self.model.parameters()))
        # named_parameters lists a tied parameter once, under its first name.
        trainable = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.names = tuple(name for name, _ in trainable)
        self.shapes = tuple(p.shape for _, p in trainable)
        self.sizes = tuple(p.numel() for _, p in trainable)
        self.dtype = trainable[0][1].dtype
        self.device = trainable[0][1].device
        self.loss = loss if isinstance(loss, Loss) else adapt_torch_loss(loss, self.dtype, self.device)
        self._constants = {
            name: p.detach() for name, p in self.model.named_parameters() if not p.requires_grad
        }
        self._constants |= dict(self.model.named_buffers())
        self._buffers = {name for name, _ in self.model.named_buffers()}
        self._caller = _Caller(self.model)
        self.call: Call = model_state.call_model
        self.cloned = tuple(name for name, p in trainable if p.ndim > 2 and p.shape[-1] == 2)
        self._places = {f"model.{place}": name for place, name in model_state.list_places(self.model).items()}
        self.is_pretrained = model_state.has_frozen_parts(self.model)
        self.engine = LruCache(_MAX_CACHED)  # measurements and traces of this model's steps
        self._examples: tuple[Any, Tensor] | None = None
        self._untouched_loss = copy_loss(self.loss)  # as `_released`

    def _take_snapshot(self) -> Snapshot:
        metrics = {f"metric '{name}'": metric for name, metric in self.metrics.items()}
        return Snapshot({"model": self.model, f"loss '{self.loss.name}'": self.loss.function, **metrics})

    def __getstate__(self) -> dict[str, Any]:
        self.refuse_changes()
        return {name: value for name, value in vars(self).items() if name != "_held"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._held = self._take_snapshot()

    def refuse_changes(self) -> None:
        """Refuse a model, loss or metric that holds something else than when the task was made.

        What it took from one record would act on others, and no noise protects it. Once that was seen, the task is of
        no use any more.

        Raises:
            SilodpError: the message says what has changed (code model.running_state).
        """
        self._held.refuse_changes()

    @property
    def size(self) -> int:
        """The number d of trainable parameters."""
        return sum(self.sizes)

    @property
    def constants_digest(self) -> str:
        """The SHA-256 (hex) of the model's constants: frozen parameters, buffers, attributes, modes; "" without any."""
        constants = {**model_state.list_numeric_attributes(self.model), **self._constants}
        if not constants:
            return ""
        # Frozen dropout computes something else in train mode than in eval mode.
        in_eval_mode = [name for name, module in self.model.named_modules() if not module.training]
        return model_state.digest_tensors(constants, *([f"eval {in_eval_mode}"] if in_eval_mode else []))

    @property
    def start_digest(self) -> str:
        """The SHA-256 (hex) of the values that training starts at, where `pretrained=True` was given; else ""."""
        return model_state.digest_tensors({"": self.flatten(self.model)}) if self._has_stated_start else ""

    @property
    def keeps_values(self) -> bool:
        """Whether values that the model came with are constants of it, or the start of training."""
        # A single number is mostly a rate of dropout or a scale.
        numbers = model_state.list_numeric_attributes(self.model).values()
        has_numbers = any(one.is_floating_point() and one.numel() > 1 for one in numbers)
        listed = {id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        # Tensors and arrays that are neither parameters nor buffers.
        has_others = any(root == "model" and id(array) not in listed for root, array in self._held.arrays)
        kept = self.is_pretrained or bool(self._constants) or has_numbers or has_others
        return kept or _keeps_parameters(self.model)

    @property
    def has_other_code(self) -> bool:
        """Whether the model, the loss or a metric is code that came neither with silodp nor with torch."""
        code: list[object] = [self.loss.function, *self.metrics.values()]
        for module in self._held.modules:
            hooks = (f"_{when}_{kind}" for when in ("forward", "backward") for kind in ("hooks", "pre_hooks"))
            if "forward" in vars(module) or any(vars(module)[hook] for hook in hooks):
                return True
            code += [type(module), *filter(callable, vars(module).values())]
        origins = set(map(name_package, code))
        return not origins <= _KNOWN_CODE

    def initial(self, seed: int | None) -> Tensor:
        """Draw fresh parameters (d,): every layer is re-initialized by its `reset_parameters`, a lone linear one by 0.

        The same seed gives the same parameters on every device; `None` draws a seed from the operating system.
        Parameters that no layer re-initializes keep the values the model came with, and so do all parameters of a
        pretrained model.

        Raises:
            SilodpError: a `reset_parameters` raised.
        """
        if self.is_pretrained:
            return self.flatten(self.model).clone()
        # On the CPU: other devices draw other numbers from the same seed.
        model = copy.deepcopy(self.model).cpu()
        with model_state.seed_torch(
            torch.device("cpu"), np.random.SeedSequence(seed).generate_state(1)[0].item()
        ):
            _draw_parameters(model)
        return self.flatten(model).to(self.device)

    def flatten(self, model: nn.Module) -> Tensor:
        """Return the trainable parameters of a module of this kind as a new vector (d,)."""
        named = dict(model.named_parameters())
        return torch.cat([named[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, params: Tensor) -> tuple[Tensor, ...]:
        """Return views of a vector (d,), or of rows (r, d), with the shapes of the model's parameters."""
        parts = params.split(self.sizes, dim=-1)  # type: ignore[no-untyped-call]
        return tuple(
            part.reshape(params.shape[:-1] + shape) for part, shape in zip(parts, self.shapes, strict=True)
        )

    def forward(self, params: tuple[Tensor, ...], x: Any) -> Tensor:
        """Return the model's outputs (n, ...) at the given parameters, one tensor per name; differentiable.

        Several named inputs are the keyword arguments of the model.
        """
        outputs: Tensor = self.call_with(params, partial(self.call, self.model, x))
        return outputs

    def call_with(self, params: tuple[Tensor, ...], function: Callable[[], Any]) -> Any:
        """Return what a function returns while the model carries the given parameters, one tensor per name."""
        values = dict(zip(self.names, params, strict=True)) | self._constants
        # Pairs may be the parts of complex numbers, which torch views only where they lie at even places: not in a row
        # of all parameters.
        values |= {n: values[n].contiguous().clone() for n in self.cloned}
        # A copy for every call: what a model writes into a buffer is lost, and reaches no other person or record.
        values |= {name: values[name].clone() for name in self._buffers}
        places = {place: values[name] for place, name in self._places.items()}
        # With tie_weights, torch sets a module with two names twice and puts back what it set first.
        return functional_call(self._caller, places, (function,), tie_weights=False)

    def objective(self, params: tuple[Tensor, ...], x: Any, y: Tensor, mask: Tensor) -> Tensor:
        """Return the loss (scalar) of one user's records x (n, ...), y (n, ...), mask (n,) of 0/1."""
        with model_state.describe_failures(self.model):
            outputs = self.forward(params, x)
        return self.loss.compute(outputs, y, mask)

    def tensors(self, x: Any, y: Any) -> tuple[Any, Tensor]:
        """Return x (n, ...), y (n, ...) as tensors on this task's device, floating ones in its data type.

        A mapping x of names to arrays becomes `NamedArrays` of tensors.
        """
        return map_arrays(self._tensor, x), self._tensor(y)

    def copy_untouched(self) -> Task:
        """Return this task with copies of model and loss that no record has run through."""
        made = object.__new__(Task)
        model = copy.deepcopy(self._released)
        constants = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        constants |= dict(model.named_buffers())
        own = {"model": model, "loss": copy_loss(self._untouched_loss)}
        vars(made).update(vars(self) | own, _constants=constants, _caller=_Caller(model))
        return made

    def replace_model(self, model: nn.Module, loss: Loss) -> Task:
        """Return this task with another loss, and with its model in another precision; it is not inspected again."""
        made = object.__new__(Task)
        vars(made).update(vars(self))
        made._hold(model, loss)
        return made

    def split_records(self) -> Task:
        """Return this task, whose model now gets every record of a batch in a batch of its own, by vmap.

        So does a loss that is the caller's, if it is separable. No record can then act on another one, whatever the
        model is. For a model that works on each record alone, all values are the same up to rounding.
        """
        made = object.__new__(Task)
        loss = self.loss if self.loss.is_known or not self.loss.separable else self.loss.split_records()
        own = {"call": call_each_record, "loss": loss, "engine": LruCache(_MAX_CACHED)}
        vars(made).update(vars(self) | own)
        return made

    def find_padded(self, builder: GradientBuilder, x: Any, y: Tensor) -> Task | None:
        """Return the task to train where batches are padded; None where padding could change what users compute.

        It is this task if the model is proven to work on each record alone, or if users train one after another,
        without padding. Else it is that of `split_records`, if it computes the same on made-up records: no record is at
        risk where it does not.

        Args:
            builder: The builder of gradients of this task.
            x: Records (n, ...) of the kind to come, of which no value is looked at.
            y: Their targets (n, ...).
        """
        if is_looped(builder) or is_per_record(self, self.list_example_inputs(x)):
            return self
        if builder is not build_user_gradient or not (self.loss.is_known or self.loss.separable):
            return None

        def find() -> Task | None:
            split = self.split_records()
            return split if computes_alike(self, split, x, y) else None

        return self.engine.get(("padded", get_kind(x), get_kind(y)), find)

    def use_examples(self, x: Any, y: Any) -> None:
        """Choose costs, paths and traces on these made-up records x (n, ...), y (n, ...), with labels of every kind."""
        found = self.tensors(x, y)
        if self._examples is not None and _are_equal(found, self._examples):
            return
        self._examples, self.engine = found, LruCache(_MAX_CACHED)

    def list_examples(self, x: Any, y: Tensor) -> tuple[Any, Tensor]:
        """Return made-up records (k, ...) of the kinds of x (n, ...), y (n, ...), whose values are not looked at.

        They are those of `use_examples`, or follow from shapes and data types alone.
        """
        if self._examples is not None and get_kind(self._examples[1]) == get_kind(y):
            return self.list_example_inputs(x), self._examples[1]
        return self.list_example_inputs(x), make_up_labels_like(y)

    def list_example_inputs(self, x: Any) -> Any:
        """Return the inputs of `list_examples`."""
        if self._examples is not None and get_kind(self._examples[0]) == get_kind(x):
            return self._examples[0]
        return self.engine.get(("examples", get_kind(x)), lambda: self._make_up_inputs(x))

    def _make_up_inputs(self, x: Any) -> Any:
        model, made = self.load(self.flatten(self.model)), map_arrays(make_up_inputs_like, x)
        try:
            compute_outputs_at_once(model, made)
        except SilodpError:  # there may be one id alone
            return map_arrays(lambda one: one if one.is_floating_point() else torch.zeros_like(one), made)
        return made

    def repeat_examples(self, x: Any, y: Tensor, *shape: int) -> tuple[Any, Tensor]:
        """Return the records of `list_examples` in turn, (*shape, ...)."""
        inputs, labels = self.list_examples(x, y)
        return repeat_examples(inputs, *shape), repeat_examples(labels, *shape)

    def _tensor(self, values: Any) -> Tensor:
        return make_tensor(values, self.device, self.dtype)

    def validate_params(self, params: Tensor) -> Tensor:
        """Return parameters (d,) on the task's device and in its data type; raise if their number is another."""
        if params.shape != (self.size,):
            raise SilodpError(
                f"the model has {self.size} parameters, the vector {tuple(params.shape)}",
                code="argument.shape",
                field="params",
            )
        return params.detach().to(self.device, self.dtype)

    def load(self, params: Tensor) -> nn.Module:
        """Return a copy of the model that carries these parameters (d,), in eval mode."""
        parts = self.unflatten(self.validate_params(params))
        model = copy.deepcopy(self._released)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in zip(self.names, parts, strict=True):
                named[name].copy_(value)
        return model.eval()

    @contextmanager
    def run_loaded(self, params: Tensor) -> Iterator[nn.Module]:
        """Yield the model of `load`, and refuse it where running it has changed it.

        Raises:
            SilodpError: one record acts on the outputs of others through what has changed (code model.running_state).
        """
        model = self.load(params)
        held = Snapshot({"model": model})
        yield model
        held.refuse_changes()

    def evaluate(self, params: Tensor, x: Any, y: Any) -> dict[str, float]:
        """Measure loss and metrics on records x (n, ...), y (n, ...), in eval mode.

        Returns:
            Name → value; metrics that are undefined on these records are left out.

        Raises:
            SilodpError: there are no records, or the model, the loss or a metric raised.
        """
        inputs, targets = self.tensors(x, y)
        if len(inputs) == 0:
            raise SilodpError("there are no records to evaluate on", code="data.no_records")
        with torch.no_grad():
            # The outputs of all batches before the loss: a Cox loss is not a mean over batches.
            outputs = self.predict(params, inputs)
            everyone = torch.ones(len(outputs), dtype=self.dtype, device=self.device)
            loss = float(self.loss.compute(outputs, targets, everyone))
        values = {name: _measure(name, metric, outputs, targets) for name, metric in self.metrics.items()}
        return {"loss": loss} | {name: value for name, value in values.items() if not math.isnan(value)}

    def predict(self, params: Tensor, inputs: Any) -> Tensor:
        """Return the model's outputs (n, ...) at parameters (d,) for n ≥ 1 inputs (n, ...), in eval mode.

        Raises:
            SilodpError: the model raised.
        """
        with self.run_loaded(params) as model:
            return compute_outputs(model, inputs, self.list_example_inputs(inputs))

    def check(
        self,
        example_x: Any,
        example_y: Any = None,
        classes: int | None = None,
        longest: int | None = None,
        by_record: bool = True,
    ) -> None:
        """Refuse a model or a loss that cannot be trained or stored, before anything is spent on it.

        Run it on public or synthetic inputs of the right shape, or on private records: nothing leaves this call, and
        what copies of the model kept of them is gone at its end.

        Args:
            example_x: Records (n, ...), n ≥ 1.
            example_y: The labels (n, ...) of n ≥ 3 records, with every kind of label; None leaves the loss unchecked.
            classes: The public number of classes; None leaves the number of outputs unchecked.
            longest: The records of the longest batch of training; None: not known.
            by_record: Whether the gradients of single records are compared, too: False for a method that takes none.

        Raises:
            SilodpError: the model mixes records, has gradients that are not those of autograd, keeps something, fails
                on the example or cannot be stored, or the loss does not fit.
        """
        model_state.serialize(self.model, {})
        example = map_arrays(self._tensor, example_x)
        inspect_outputs(self.model, example)
        probe = Probe(self, example, longest)
        probe.compare_outputs()
        if example_y is not None:
            labels, trial = self._tensor(example_y), self.copy_untouched()
            # The loss itself, so that `refuse_changes` sees what it keeps; what the engine finds out is for both.
            trial.loss, trial._examples = self.loss, (example, labels)
            inspect_loss(trial.model, self.loss, example, labels, classes)
            units: tuple[Unit, ...] = ("user", "record") if by_record and self.loss.separable else ("user",)
            builders = {unit: select_gradient(unit, trial, example, labels) for unit in units}
            inspect_parameters(trial.model, example)
            padded = trial.find_padded(builders["user"], example, labels)
            probe.compare_gradients(builders, splits=padded not in (None, trial))
            # Running a model may have left in it what cannot be copied.
            model_state.copy_model(trial.model)
        self.refuse_changes()


def _check_arguments(model: Any, loss: Any, metrics: Any, pretrained: Any) -> None:
    """Raise `SilodpError` for an argument of `Task` that has another type."""
    if isinstance(loss, type) or any(loss is known for known in LOSSES.values()):
        problem = f"loss is {loss.__name__} itself: call it, loss={loss.__name__}()."
        raise SilodpError(problem, code="argument.type", field="loss")
    kinds: tuple[tuple[str, Any, Any, str], ...] = (
        ("model", model, nn.Module, "give a torch.nn.Module, for example torch.nn.Linear(3, 2)."),
        (
            "loss",
            loss,
            Loss | nn.Module,
            "use one of silodp.training's, or wrap your own in Loss.per_record.",
        ),
        (
            "metrics",
            metrics,
            Mapping | None,
            "give a mapping of names to functions, for example {'accuracy': silodp.training.accuracy}.",
        ),
        ("pretrained", pretrained, bool | None, "give True, False or None."),
    )
    for name, value, allowed, remedy in kinds:
        if not isinstance(value, allowed):
            problem = f"{name} is a {type(value).__name__}: {remedy}"
            raise SilodpError(problem, code="argument.type", field=name)
    for name, metric in (metrics or {}).items():
        if not callable(metric):
            raise SilodpError(
                f"metric '{name}' is of type {type(metric).__name__}: give a function of outputs and targets.",
                code="metric.not_callable",
                field="metrics",
            )


class _Caller(nn.Module):
    """Calls a function; `functional_call` on it puts parameters into a model for as long as that takes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


class LruCache:
    """The measurements and traces of a task, by key; the one unused for longest makes room for a new one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._built: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._built)

    def get(self, key: Hashable, build: Callable[[], Built]) -> Built:
        """Return the entry of this key, built if it is not there."""
        if key not in self._built:
            self._built[key] = build()
            if len(self._built) > self._limit:
                self._built.popitem(last=False)
        self._built.move_to_end(key)
        found: Built = self._built[key]
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return LruCache, (self._limit,)  # a copy measures and traces its own


def make_tensor(values: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return values as a tensor on a device; floating-point ones get the data type of a model's parameters."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()  # torch cannot mark a tensor read-only and warns
    tensor = torch.as_tensor(values)
    return tensor.to(device, dtype if tensor.is_floating_point() else None)


def flatten_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows (r, d) of one tensor (r, ...) for each parameter; the inverse of `Task.unflatten`."""
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)


def compute_outputs(
    model: nn.Module, inputs: Any, examples: Any = None, call: Call = model_state.call_model
) -> Tensor:
    """Return the outputs (n, ...) of a model in eval mode for n ≥ 1 inputs (n, ...), a tensor or `NamedArrays`.

    Evaluations and predictions both call this: a batch of another size may round differently.

    Args:
        model: The model.
        inputs: The inputs.
        examples: Made-up inputs of the same kind, on which memory is measured; None measures the inputs themselves,
            where nothing is released.
        call: Returns the outputs of the model for a batch.

    Raises:
        SilodpError: the model raised.
    """
    with torch.no_grad(), model_state.describe_failures(model):
        batch = _choose_evaluation_batch(
            partial(call, model), len(inputs), inputs if examples is None else examples
        )
    starts = range(0, len(inputs), batch)
    return torch.cat([compute_outputs_at_once(model, inputs[i : i + batch], call) for i in starts])


def compute_outputs_at_once(model: nn.Module, inputs: Any, call: Call = model_state.call_model) -> Tensor:
    """Return what `compute_outputs` does, in one batch.

    Raises:
        SilodpError: the model raised.
    """
    with torch.no_grad(), model_state.describe_failures(model):
        outputs: Tensor = call(model, inputs)
    return outputs


def _choose_evaluation_batch(call: Callable[[Any], Any], count: int, examples: Any) -> int:
    """Return how many of `count` records to evaluate at once, by the memory that examples take.

    What n records take is at most n/b of what b of them take, and less where the model computes from its weights alone:
    so twice as many are measured, if they fit, until that shows no longer that more fit.
    """
    enough = min(count, _EVALUATION_BATCH)
    device = next(iter(list_arrays(examples).values())).device
    budget = default_memory_budget(device)
    # Two records at first: some layers refuse a batch of one.
    measured, batch = 2, 1
    with model_state.seed_torch(device, 0):
        while batch < enough and measured <= max(2, batch):
            peak = measure_cost(partial(call, repeat_examples(examples, measured))).peak
            # A power of two, so that some bytes more or less do not change the batch, and thereby how sums are rounded.
            affordable = 1 << max(0, (budget * measured // max(1, peak)).bit_length() - 1)
            if affordable <= batch:
                break
            measured, batch = 2 * measured, affordable
    return min(batch, _EVALUATION_BATCH)


def _are_equal(a: tuple[Any, Tensor], b: tuple[Any, Tensor]) -> bool:
    first, second = ({**list_arrays(x), "label of records": y} for x, y in (a, b))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _draw_parameters(model: nn.Module) -> None:
    """Draw the parameters of all layers anew, as far as they have a `reset_parameters`."""
    for module in reversed(list(model.modules())):  # children first: the choice of a parent wins
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            with describe_raised(partial(_blame_reset, type(module).__name__)):
                reset()
    layers = [
        module for module in model.modules() if next(module.parameters(recurse=False), None) is not None
    ]
    if len(layers) == 1 and type(layers[0]) is nn.Linear:
        # Random weights of a linear model help nothing: noise hides them until the end.
        for parameter in layers[0].parameters():
            nn.init.zeros_(parameter)


def _blame_reset(layer: str, reason: str) -> SilodpError:
    return model_state.model_error(f"{layer}.reset_parameters raised {reason}: correct it.", "model.raised")


def _keeps_parameters(model: nn.Module) -> bool:
    """Return whether some trainable parameter does not get all its values from a `reset_parameters`."""
    trial = copy.deepcopy(model).cpu()
    trained = [p for p in trial.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            # What is still NaN afterwards is drawn by no layer.
            parameter.fill_(math.nan)
    with model_state.seed_torch(torch.device("cpu"), 0):
        _draw_parameters(trial)
    return any(bool(parameter.isnan().any()) for parameter in trained)


def _measure(name: str, metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    """Return the value of a metric; whatever it raises is its author's to correct."""
    with describe_raised(
        lambda reason: SilodpError(
            f"the metric '{name}' raised {reason}: correct it so that it returns one number, or leave it out.",
            code="metric.raised",
            field="task.metrics",
        )
    ):
        return float(metric(outputs, targets))
