"""The task of a configuration: its model, loss and metrics; and a model that a run has stored, built again."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from silodp.aggregators.run_spec import ModelSpec
from silodp.config.build import build, get_fields, validate_arguments
from silodp.config.schema import TaskSection
from silodp.data.inputs import map_arrays
from silodp.data.public import PublicData
from silodp.errors import SilodpError, lookup
from silodp.plugins import execute_code, import_reference, is_reference, locate_code, read_code
from silodp.text import describe_exception
from silodp.training.dense_labels import MOST_CLASSES
from silodp.training.losses import DEFAULT_LOSSES, LOSSES, Loss, name_class_loss
from silodp.training.metrics import METRICS, Metric, mean_absolute_error
from silodp.training.models import MODELS, SIZES, VERSION, Architecture, mlp, name_linear_model

if TYPE_CHECKING:  # a plan does not import torch, which takes seconds
    from torch import nn

    from silodp.data.dataset import Dataset
    from silodp.runtime.model_description import ModelDescription
    from silodp.training.task import Task

_log = logging.getLogger(__name__)
_LARGE = 20_000_000
"""Parameters of a model whose checks take long enough to say so beforehand."""
_CHECKED_PER_SECOND = 5_000_000
"""Parameters; measured on two cores with one model of 4.9e7."""


def build_task(
    public: PublicData,
    dataset: Dataset | None = None,
    model: str | None = None,
    options: Mapping[str, Any] | None = None,
    loss: str | None = None,
    loss_options: Mapping[str, Any] | None = None,
    metrics: tuple[str, ...] | None = None,
    pretrained: bool | None = None,
    seed: int | None = None,
) -> Task:
    """Build the task of a configuration; None follows from the data set, else from the kind of label.

    Args:
        public: The public facts of the data: shape of a record, number of classes, kind of label.
        dataset: The data set, which has defaults of model, loss and metrics.
        model: A name in `MODELS`, or a reference to a function that returns a `torch.nn.Module`; it gets `features`,
            `record_shape`, `classes`, `categories` (of ids) and `outputs` (number of labels, where there are several)
            if it takes them.
        options: Further arguments of that function.
        loss: A name in `LOSSES`, or a reference to a `Loss`, to a loss of `torch.nn` ("torch.nn:HuberLoss", or an
            object in a file), or to an f(outputs, targets) -> (n,).
        loss_options: Arguments of the function that makes a named loss.
        metrics: Names in `METRICS` or references.
        pretrained: See `Task`.
        seed: The seed of parameters that no layer re-initializes.

    Raises:
        SilodpError: a name or a reference that is not found, or a model that cannot be built.
    """
    from silodp.training.task import Task

    if dataset is not None:
        model = dataset.model if model is None else model
        loss = dataset.loss if loss is None else loss
        metrics = dataset.metrics if metrics is None else metrics
    if model is None and public.label_shape:
        raise SilodpError(
            f"a record has classes for {math.prod(public.label_shape):,} places, and such labels have no default "
            'model: set task.model = "unet" for images, or refer to a function of a file ("my_model.py:network").',
            code="config.missing_field",
            field="task.model",
        )
    if model is None:
        model = name_linear_model(public.classes, public.has_codes)
    if not is_reference(model):
        _check_inputs(model, public)
    network, architecture = _build_model(model, options or {}, public, seed)
    # Said before the model is tried, so that nobody takes the silence of half a minute for a failure.
    size = sum(parameter.numel() for parameter in network.parameters())
    if size > _LARGE:
        _log.warning(
            "the model has %s parameters (%.1f GB): trying it on made-up records takes about %d seconds, and the noise "
            "of a round grows with the root of their number",
            f"{size:,}",
            size * 4 / 1e9,
            round(size / _CHECKED_PER_SECOND, -1),
        )
    if loss is None and public.classes:
        loss = name_class_loss(_count_outputs(network, public), public.label_shape)
    elif loss is None:
        loss = DEFAULT_LOSSES[public.labels]
    found = find_metrics(metrics, loss, public, public.classes)
    return Task(network, find_loss(loss, loss_options), found, architecture, pretrained=pretrained)


def find_metrics(
    names: Sequence[str] | None, loss: str, labels: PublicData | ModelDescription, classes: int | None
) -> dict[str, Metric]:
    """Return metrics by name.

    Args:
        names: Names in `METRICS` or references; None takes those of the kind of label.
        loss: The name of the loss.
        labels: The public facts of the labels.
        classes: The number of classes; None for other kinds of label.
    """
    if names is None and labels.label_shape:
        names = ("accuracy", "dice") if (classes or 0) <= MOST_CLASSES else ("accuracy", "perplexity")
    elif names is None and classes:
        names = ("accuracy", "roc_auc") if classes == 2 else ("accuracy",)
    elif names is None:
        # Of another loss than these it is not known whether the outputs predict the label itself.
        others = ("mean_absolute_error", "r2") if loss == "squared_error" else ()
        names = {"survival": ("concordance",), "multilabel": ("accuracy", "roc_auc")}.get(
            labels.labels, others
        )
    return {_short_name(name): _find_metric(name, labels) for name in names}


def describe_standard_model(public: PublicData, dataset: Dataset, task: TaskSection) -> ModelSpec | None:
    """Return the size of a model of silodp that fits the records, without building it; None for all others."""
    name = task.model or dataset.model or name_linear_model(public.classes)
    given = _needs_no_options(task.loss) and METRICS.keys() >= set(task.metrics or ())
    options = task.options or task.loss_options
    is_image = name.startswith("cnn_")
    shape = public.record_shape
    fits = shape == (1, 28, 28) and public.classes if is_image else len(shape) == 1
    has_one_label = public.targets is None and not public.label_shape
    # Whatever is not sure to be counted right by a formula is built, and counted.
    if name not in SIZES or options or not (given and fits and has_one_label) or public.inputs or 0 in shape:
        return None
    return ModelSpec(SIZES[name](shape[0], public.classes or 1))


def _needs_no_options(loss: str | None) -> bool:
    """Return whether a loss is one of silodp that can be made without [task.loss_options]."""
    if loss is None:
        return True
    return loss in LOSSES and all(p.default is not p.empty for p in get_fields(LOSSES[loss]).values())


def _check_inputs(model: str, public: PublicData) -> None:
    """Refuse a network of silodp that does not take the arrays of the records."""
    # First, so that an unknown name is refused as such, and not for what the records are.
    lookup(model, MODELS, "task.model")
    if model == "causal_lm":
        if isinstance(public.categories, int) and [one.name for one in public.inputs] == [""]:
            return
        raise _refuse_model(
            model,
            "takes rows of ids of tokens, and the records are something else: choose another model",
            "model.inputs",
        )
    if public.has_codes == (model == "embedding") and (public.has_codes or not public.inputs):
        return
    if public.has_codes:
        remedy = (
            'set task.model = "embedding", or refer to a function of a file ("my_model.py:network"), or take '
            "codes = true out of the schema"
        )
        wrong = "takes one array of numbers, and some columns of the records are given as codes"
    elif public.inputs:
        remedy = 'refer to a function of a file ("my_model.py:network")'
        wrong = "does not take the arrays of the records, which hold ids or have names"
    else:
        remedy = "set codes = true for a categorical column of the schema, or choose another model"
        wrong = "embeds columns that are given as codes, and the records have none"
    raise _refuse_model(model, f"{wrong}: {remedy}", "model.inputs")


def build_architecture(architecture: Architecture, code: str | None = None) -> nn.Module:
    """Build a model again that a run has kept; its parameters are fresh.

    Args:
        architecture: Where the model came from.
        code: The file or the module with its code, which the caller thereby trusts; None: no code outside silodp is
            run.

    Raises:
        SilodpError: it is code that the caller did not name, or that has changed; a network of another version; or it
            cannot be built.
    """
    if architecture.source == "silodp":
        if architecture.version != VERSION:
            raise SilodpError(
                f"the model is version {architecture.version} of silodp's network '{architecture.name}', and this "
                f"silodp has version {VERSION}: install the version of silodp that model.json names.",
                code="bundle.architecture",
            )
        return _call_builder(
            lookup(architecture.name, MODELS, "task.model"), architecture.name, architecture.arguments, None
        )
    place, content = _check_code(architecture, code)
    if architecture.source == "module":
        builder = import_reference(f"{place}:{architecture.name}", "code")
    else:
        builder = execute_code(content, place, architecture.name)
    return _call_builder(builder, architecture.name, architecture.arguments, None)


def _check_code(architecture: Architecture, code: str | None) -> tuple[str, bytes]:
    """Return file or module, and its content; refuse what the caller did not name, and what is not the run's code."""
    kept, digest = architecture.module or "model.py", f"SHA-256 {architecture.sha256[:16]}…"
    if code is None:
        problem = (
            f"the architecture of this model is code outside silodp ({kept}, {digest}), and only code that you name is "
            "run: read it, then name it by --code, or in Python by load(DIR, code=…)."
        )
    elif code.endswith(".py") != (architecture.source == "file") or architecture.module not in ("", code):
        expected = "a module" if architecture.source == "module" else "a .py file"
        problem = f"{code} is not the code of this model, which is {expected} ({kept}): name that."
    # Read last: to find a module, Python imports the packages above it, which would run code that is not the model's.
    elif (content := read_code(code)) is None:
        problem = f"{code} is not there ({digest}), and was not run: name the code of the run."
    elif hashlib.sha256(content).hexdigest() != architecture.sha256:
        problem = (
            f"{code} is not the code that the model was trained with ({digest}), and was not run: name that."
        )
    else:
        return code, content
    raise SilodpError(problem, code="bundle.code", field="code")


def _build_model(
    name: str, options: Mapping[str, Any], data: PublicData, seed: int | None
) -> tuple[nn.Module, Architecture]:
    from torch import nn

    builder = _find(name, MODELS, "task.model")
    public = {
        "features": data.feature_count,
        "record_shape": data.record_shape,
        "classes": data.classes,
        "categories": data.categories,
        "outputs": data.targets,
    }
    given: dict[str, Any] = {}
    if not isinstance(builder, nn.Module):
        fields = get_fields(builder) if callable(builder) else {}
        taken: dict[str, Any] = {
            key: value for key, value in public.items() if key in fields and value is not None
        }
        if builder is mlp and data.classes is None:
            taken["classes"] = None  # its default of two is for data with classes
        given = {**taken, **options}
        asked = fields.get("categories")
        if asked is not None and "categories" not in given and asked.default is asked.empty:
            raise SilodpError(
                f"task.model = '{name}' needs categories, and no column of the data is given as codes: declare codes = "
                "true for a categorical column, or set task.options.categories.",
                code="config.missing_field",
                field="task.options.categories",
            )
    return _call_builder(builder, name, given, seed), _describe_architecture(name, given)


def _describe_architecture(name: str, arguments: Mapping[str, Any]) -> Architecture:
    if not is_reference(name):
        known = next(known for known in MODELS if known.replace("_", "-") == name.replace("_", "-"))
        return Architecture("silodp", known, arguments, version=VERSION)
    module, function, content = locate_code(name)
    if not content:
        # The module has no file, so its code could not be compared later.
        return Architecture()
    # A file travels with the model; of a module only the digest is kept, as the file may need others of its package.
    digest = hashlib.sha256(content).hexdigest()
    if module:
        return Architecture("module", function, arguments, module=module, sha256=digest)
    return Architecture("file", function, arguments, sha256=digest, code=content)


def _refuse_model(name: str, problem: str, code: str) -> SilodpError:
    return SilodpError(f"task.model = '{name}' {problem}.", code=code, field="task.model")


def _call_builder(builder: Any, name: str, given: Mapping[str, Any], seed: int | None) -> nn.Module:
    """Return the module that a function builds, or that a reference names, with checked arguments."""
    import torch
    from torch import nn

    if isinstance(builder, nn.Module):
        return builder
    if not callable(builder):
        problem = f"is of type {type(builder).__name__}: refer to a function or a module"
        raise _refuse_model(name, problem, "model.not_a_module")
    arguments = validate_arguments(builder, given, f"the model '{name}'", "task.options")
    # The caller's generator goes on as if no model had been initialized. Models begin on the CPU: CUDA's is not drawn.
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            network = builder(**arguments)
        except SilodpError:
            raise
        except (Exception, SystemExit) as error:
            problem = f"raised {describe_exception(error)}: correct it, or its task.options"
            raise _refuse_model(name, problem, "model.raised") from error
    if not isinstance(network, nn.Module):
        returned = f"returned an object of type {type(network).__name__}"
        raise _refuse_model(name, f"{returned}: let it return a torch.nn.Module", "model.not_a_module")
    return network


def _count_outputs(network: nn.Module, public: PublicData) -> int:
    """Return the number of outputs that the model has per record, counted on made-up records."""
    from silodp.training.made_up import make_up_records
    from silodp.training.model_checks import inspect_outputs
    from silodp.training.model_structure import inspect_structure
    from silodp.training.task import make_tensor

    inspect_structure(network)
    parameter = next(network.parameters())

    to_tensor = partial(make_tensor, device=parameter.device, dtype=parameter.dtype)
    example = map_arrays(to_tensor, make_up_records(public)[0])
    return int(inspect_outputs(network, example)[0].numel())


def find_loss(name: str, options: Mapping[str, Any] | None) -> Loss | nn.Module:
    """Return a loss; arguments as `loss` and `loss_options` of `build_task`."""
    from torch import nn

    found = _find(name, LOSSES, "task.loss")
    if not is_reference(name):
        made: Loss = build(found, options or {}, f"the loss '{name}'", "task.loss_options")
        return made
    if options:
        raise SilodpError(
            f"task.loss_options are for the losses of silodp, and task.loss is '{name}': set them in its code.",
            code="argument.conflict",
            field="task.loss_options",
        )
    if isinstance(found, type) and issubclass(found, nn.Module):
        found = found()
    return found if isinstance(found, Loss | nn.Module) else Loss.per_record(_short_name(name), found)


def _find_metric(name: str, public: PublicData | ModelDescription) -> Metric:
    metric: Metric = _find(name, METRICS, "task.metrics")
    # Tasks predict scaled labels; this metric is given in the unit of the label itself.
    if metric is mean_absolute_error and public.label_typical is not None:
        typical = public.label_typical
        spread: Any = typical[1] if public.targets is None else [one for _, one in cast(Any, typical)]
        return partial(mean_absolute_error, spread=spread)
    return metric


def _short_name(name: str) -> str:
    return name.rpartition(":")[2].replace("-", "_")


def _find(name: str, registry: Mapping[str, Callable[..., Any]], where: str) -> Any:
    return (
        import_reference(name, where) if is_reference(name) else lookup(name, registry, where, "FILE.py:NAME")
    )
