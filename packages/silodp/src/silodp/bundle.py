"""Trained models elsewhere: a run's public files read back, a silo's head, and predictions for new tables.

No pickle is read. A table is read by the schema that the run kept, with the code that read the tables for training, and
the outputs are computed as in an evaluation of the run. So the same rows give the same outputs, bit for bit.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from silodp._lazy import Registry
from silodp.accounting.guarantee import Guarantee
from silodp.accounting.views import Adversary
from silodp.config.task import build_architecture
from silodp.config.toml_values import read_toml
from silodp.data.inputs import NamedArrays, list_arrays, map_arrays
from silodp.data.public import find_label_shape
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.predictor import TablePredictor
from silodp.report.model_card import check_card
from silodp.report.run_record import read_guarantees
from silodp.runtime.model_description import (
    CARD,
    DESCRIPTION,
    WEIGHTS,
    ModelDescription,
    StoredTensor,
    digest_attributes,
    digest_unsaved,
)
from silodp.runtime.run_files import GUARANTEE
from silodp.settings import check_path, check_type
from silodp.text import first_line, suggest_name
from silodp.training.losses import (
    DEFAULT_LOSSES,
    LOSSES,
    Loss,
    adapt_torch_loss,
    flatten_outputs,
    name_class_loss,
)
from silodp.training.sgd.local import LocalTraining
from silodp.training.task import compute_outputs, make_tensor

if TYPE_CHECKING:
    import pandas as pd

    from silodp.data.tables.columns import TableMapping
    from silodp.data.tables.schema import Schema

    TableOrInputs = str | Path | pd.DataFrame | NDArray[Any] | Tensor | Mapping[str, Any] | NamedArrays

__all__ = ["TrainedModel", "load"]

_log = logging.getLogger(__name__)


class ModelHead(Protocol):
    """What a silo keeps beside the shared model of a run, and applies to it."""

    @property
    def run(self) -> str:
        """The id of the run."""

    @property
    def weights(self) -> str:
        """SHA-256 (hex) of the model.safetensors that it belongs to."""

    @property
    def about(self) -> str:
        """What it may tell, and of whom."""

    @property
    def size(self) -> int:
        """How many numbers it has."""

    @property
    def epochs(self) -> int:
        """The passes over the silo's records; 0 without any."""

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
    ) -> ModelHead:
        """Train it on x (n, ...), y (n, ...) and persons (n,); see `TrainedModel.fine_tune`."""

    @classmethod
    def read(cls, path: str) -> ModelHead:
        """Read its file.

        Raises:
            SilodpError: the file is missing or damaged (codes bundle.missing, bundle.damaged).
        """

    def to_bytes(self) -> bytes:
        """Return the content of its file."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Return a copy of the shared model with it."""


HEADS: Registry[type[ModelHead]] = Registry("model_heads", {})
"""The heads by name; that of `TrainedModel.fine_tune` and `load` is "silo"."""


@dataclass(frozen=True, eq=False, repr=False)
class TrainedModel(TablePredictor):
    """The model of a finished run, ready to predict.

    Attributes:
        model: The model, in eval mode, on the CPU, with the weights of the run.
        guarantees: What the run guarantees, by adversary.
        description: Content of model.json.
        head: What a silo keeps beside the shared model, which no ε covers, or a recalibration; None: the shared model.
    """

    model: nn.Module
    guarantees: dict[Adversary, Guarantee]
    description: ModelDescription
    head: ModelHead | None = None

    def __repr__(self) -> str:
        released = " ".join(str(self.guarantees["released"]).split())
        head = "" if self.head is None else f"; {self.head.about}"
        return f"TrainedModel({type(self.model).__name__} → {', '.join(self.columns)}; {released}{head})"

    @property
    def schema(self) -> Schema | None:
        """How features are read; None where no public constants say it."""
        return None if self.description.inputs is None else self.description.schema

    @property
    def silo_settings(self) -> tuple[str, ...]:
        """Names of the reader's settings that silos of the run had for themselves."""
        return self.description.silo_settings

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the numbers that `predict` returns for a row."""
        described = self.description
        if described.predicts_labels:
            kinds = {"classes": "probability", "multilabel": "probability", "survival": "log_hazard"}
            what = kinds.get(described.labels, "prediction")
        else:
            what = "score" if described.labels == "classes" else "output"
        if described.labels == "classes":
            return tuple(f"{what}_{name}" for name in described.classes)
        if described.targets is None:
            return (what,)
        return tuple(f"{what}_{name}" for name in described.target or range(described.targets))

    def predict(self, data: TableOrInputs) -> NDArray[np.float64]:
        """Predict for every row, in the order of the rows.

        Args:
            data: A table, as a file or a data frame, which is read and scaled by the schema of the run and needs the
                columns of its features alone; or inputs as the model takes them, scaled already: an array (n, ...),
                or a mapping of names to such arrays.

        Returns:
            (n, K) probabilities of the classes, or (n, K, ...) where places have classes; (n, 1) numbers in the unit of
            the label, or (n, 1) log hazards, of which a larger one is a higher risk; the columns are `columns`. For k
            labels of a record, (n, k) probabilities of yes, or numbers in the units of the labels. Where the loss is
            none of silodp's or torch's, it is not known what outputs mean: (n, K) scores of classes, which are between
            0 and 1 and sum to 1, or (n, 1) outputs as they are.

        Raises:
            SilodpError: The table cannot be read or has a value that the schema refuses, the array does not fit, or
                the model gives outputs of another shape than its labels have.
        """
        described = self.description
        # In float64, so that the probabilities of a row sum to 1 more closely than in float32.
        outputs = torch.from_numpy(self.compute_outputs(data)).double()
        shape, classes, targets = tuple(outputs.shape[1:]), len(described.classes), described.targets
        is_number = shape in ((), (1,))
        places = described.label_shape
        is_logit = classes == 2 and shape in (places, (1, *places))  # of the second class
        if described.labels == "classes":
            fits, expected = is_logit or shape == (classes, *places), "classes"
        elif targets is None:
            fits, expected = is_number, "one number"
        else:
            fits, expected = shape == (targets,), f"{targets} labels"
        if not fits:
            raise SilodpError(
                f"the model gives outputs of shape {shape} for a row, which are no predictions of {expected}: take "
                "them from compute_outputs.",
                code="bundle.outputs",
            )
        if described.labels == "classes":
            if not is_logit:
                return np.asarray(torch.softmax(outputs, dim=1).numpy())
            positive = torch.sigmoid(outputs.reshape(len(outputs), *places))
            return np.asarray(torch.stack([1 - positive, positive], dim=1).numpy())
        found = flatten_outputs(outputs)[:, None] if targets is None else outputs
        if described.labels == "multilabel" and described.predicts_labels:
            found = torch.sigmoid(found)
        elif described.label_typical is not None and described.predicts_labels:
            # Training scaled the labels by public constants: (label - center) / spread.
            center, spread = torch.tensor(described.label_typical, dtype=torch.float64).unbind(-1)
            found = center + spread * found
        return np.asarray(found.numpy())

    def describe(self) -> list[str]:
        """Return what the silo's head may tell, if there is one."""
        return [] if self.head is None else [self.head.about]

    def to_json(self) -> dict[str, Any]:
        """Return what the silo's head may tell, if there is one."""
        return {} if self.head is None else {"silo_head": self.head.about}

    def fine_tune(
        self,
        data: SiloData,
        parameters: Sequence[str] = (),
        *,
        local: LocalTraining | None = None,
        loss: Loss | nn.Module | None = None,
        seed: int | None = None,
    ) -> TrainedModel:
        """Train a silo's head of the shared model on its records: scale and shift of the outputs, and more.

        No noise is added, and ε of the shared model stays as it is, as long as the head, and what is predicted with it,
        stay where the records are.

        Args:
            data: The records of the silo, scaled as in the run; held-out ones are not used.
            parameters: Names of parameters of the model to train as well, or patterns such as "head.*".
            local: SGD's hyperparameters; how many of its `epochs` are best is found by cross-validation over persons.
                None: a learning rate of .05, at most 60 epochs, and batches of 16 records.
            loss: The loss; None takes the default of the kind of label.
            seed: The seed of folds and batches; None draws one.

        Raises:
            SilodpError: records of fewer than two persons, or of another kind than those of the run; a name that fits
                no parameter; or outputs of which it is not known what they predict, and no loss was given.
        """
        check_type("data", data, SiloData)
        fields = self.description
        inputs = self._check_inputs(data.x)
        shape = find_label_shape(fields.labels, fields.targets, fields.label_shape)
        if (data.labels, data.y.shape[1:]) != (fields.labels, shape):
            raise SilodpError(
                f"the records have labels of kind '{data.labels}' and shape {data.y.shape[1:]}, and the run has "
                f"'{fields.labels}' and {shape}: prepare them as for the run.",
                code="data.kind",
                field="data",
            )
        like = next(self.model.parameters())
        found = self.find_loss(inputs) if loss is None else loss
        if not isinstance(found, Loss):
            found = adapt_torch_loss(found, like.dtype, like.device)
        # From the shared model, also where this one has a head already.
        shared = self.model if self.head is None else cast(nn.Module, self.model.model)
        records = inputs, data.y, data.user
        head = _find_head_class().train(
            fields.run, fields.weights, shared, found, records, parameters, local, seed
        )
        return replace(self, model=head.apply(shared), head=head)

    def find_loss(self, inputs: Any) -> Loss:
        """Return the default loss for the labels and the outputs of the model, which inputs (n, ...) give.

        Raises:
            SilodpError: The run's loss is of another kind.
        """
        if not self.description.predicts_labels:
            raise SilodpError(
                "the run's loss is none of silodp's or torch's, so it is not known what the outputs predict: give the "
                "loss, fine_tune(data, loss=...).",
                code="argument.missing",
                field="loss",
            )
        if self.description.labels != "classes":
            return LOSSES[DEFAULT_LOSSES[self.description.labels]]()
        outputs = self._compute(inputs[:1])[0].size
        return LOSSES[name_class_loss(outputs, self.description.label_shape)]()

    def compute_outputs(self, data: TableOrInputs) -> NDArray[Any]:
        """Return the model's outputs (n, ...), as an evaluation of the run computes them; arguments as for `predict`.

        Numbers are in the scale of `label_typical` of the schema.

        Raises:
            SilodpError: As `predict`.
        """
        table: Any = data
        return self._compute(self.read_table(table)[0] if _is_table(data) else self._check_inputs(data))

    def _check_inputs(self, data: Any) -> Any:
        """Return an array of inputs, or several by name; refuse one of another shape, or without a row."""
        expected, is_named = self.description.record_shape, isinstance(data, Mapping | NamedArrays)
        arrays: Any = map_arrays(lambda one: one if isinstance(one, Tensor) else np.asarray(one), data)
        if is_named or not expected:
            lengths = {len(one) for one in list_arrays(arrays).values()} if is_named else set()
            if expected or len(lengths) != 1 or 0 in lengths:
                raise SilodpError(
                    "the inputs are arrays by name: give as many rows in each, at least one, to a model that was "
                    "trained on such arrays, and one array to others.",
                    code="argument.shape",
                    field="data",
                )
        elif tuple(arrays.shape[1:]) != expected or arrays.shape[0] == 0:
            raise SilodpError(
                f"the inputs have shape {tuple(arrays.shape)}: give an array (n, "
                f"{', '.join(map(str, expected))}) of at least one row.",
                code="argument.shape",
                field="data",
            )
        return arrays

    def _compute(self, inputs: Any) -> NDArray[Any]:
        # On the device of the model, and real numbers in its type; ids stay whole numbers.
        like = next(self.model.parameters())
        tensors = map_arrays(lambda one: make_tensor(one, like.device, like.dtype), inputs)
        try:
            outputs = compute_outputs(self.model, tensors)
        except SilodpError as error:
            cause = error.__cause__
            if not isinstance(cause, IndexError) or "out of range in self" not in str(cause):
                raise
            raise SilodpError(  # torch.nn.functional.embedding has no such row
                "an id in the inputs has no row in an embedding of the model: give ids from 0 to below the number of "
                "categories that the run declared.",
                code="argument.value",
                field="data",
            ) from error
        return np.asarray(outputs.numpy())


def load_predictor(directory: Path, code: str | None, head: Path | None) -> TrainedModel:
    """Load the model of a run for `silodp predict`; see `load`."""
    return load(directory, code=code, head=head)


def _is_table(data: Any) -> bool:
    # A data frame has columns; pandas is not imported for arrays.
    return isinstance(data, str | Path) or hasattr(data, "columns")


def load(
    directory: str | Path,
    model: nn.Module | None = None,
    *,
    code: str | Path | None = None,
    head: str | Path | None = None,
) -> TrainedModel:
    """Load the model of a finished run.

    Args:
        directory: The directory of the run, or a copy of its files model.json, model.safetensors and guarantee.json.
        model: A module with the architecture of the run, for a run that was started from Python with a module. It is
            copied.
        code: Where the architecture is code outside silodp, the file or the dotted module with it, for example
            DIR/model.py. It is run only if it is, byte for byte, the code of the run: read it first.
        head: A silo's head of the model, or a recalibration: a file of `silodp fine-tune` or `silodp recalibrate`.

    Returns:
        The model, with the guarantees of the run.

    Raises:
        SilodpError: A file is missing or damaged, or belongs to another run; the architecture is unknown, is code that
            was not named or has changed, or does not have the parameters of the run.
    """
    check_path("directory", directory)
    directory = Path(directory)
    check_type("model", model, (nn.Module, type(None)), "the module that was trained")
    description = ModelDescription.read(directory / DESCRIPTION)
    # The description has the digests of the files: each is compared with it before it is used.
    stated = _read_file(directory / GUARANTEE)
    summary, guarantees = read_guarantees(directory)
    description.check_run(summary["run"], directory / GUARANTEE)
    description.check_content(stated, directory / GUARANTEE)
    if (directory / CARD).exists():
        check_card(directory / CARD, (directory / DESCRIPTION).read_bytes())
    tensors = _read_tensors(directory / WEIGHTS, description)
    if model is not None:
        network = copy.deepcopy(model).cpu()  # the weights of the run are loaded into it
    elif description.architecture.source == "caller":
        raise SilodpError(
            f"the run in {directory} was started from Python with a module, whose architecture is not kept: give such "
            "a module, silodp.load(DIR, model=net).",
            code="bundle.architecture",
            field="model",
        )
    else:
        built = build_architecture(description.architecture, None if code is None else str(code))
        network = copy.deepcopy(built)  # a reference may name a module object, which its file keeps
    _check_tensors(network, description.tensors)
    # Only now: names, shapes and types of the module are those of the run.
    network.load_state_dict(tensors)
    # Weights are not all that a model computes with: what no file stores must be as it was in the run.
    problem = None
    if digest_unsaved(network) != description.unsaved:
        problem = (
            "buffers outside its state that differ from those of the run: make them with persistent=True, or compute "
            "them from constants"
        )
    elif description.attributes != digest_attributes(network):
        problem = (
            "numbers in plain attributes that differ from those of the run: build it with the same numbers, or keep "
            "them in buffers (register_buffer), which the run stores with the model"
        )
    if problem is not None:
        raise SilodpError(f"the model has {problem}.", code="bundle.architecture", field="model")
    shared = TrainedModel(network.eval(), guarantees, description)
    if head is None:
        return shared
    found = _find_head_class().read(str(head))
    if found.weights != description.weights:
        raise SilodpError(
            f"{head} is a head of another model than that in {directory}: name the run that it was trained on, or make "
            "a new head with `silodp fine-tune`.",
            code="bundle.mixed",
            field="head",
        )
    return replace(shared, model=found.apply(shared.model), head=found)


def _find_head_class() -> type[ModelHead]:
    return HEADS.load_required("silo", "analytics", "a silo's head of a model")


def read_silo_settings(directory: str | Path, silo: str) -> tuple[dict[str, Any], TableMapping]:
    """Return how one silo of a run writes its tables, by the config.toml beside the model.

    Args:
        directory: The directory of the run, or a copy of its files with config.toml.
        silo: Its name.

    Returns:
        The settings of its reader that differ from the common ones, and its mapping.

    Raises:
        SilodpError: There is no config.toml with tables, or it has no such silo.
    """
    from silodp.data.tables.columns import read_mapping

    # From config.toml and not from model.json, which is public: a silo's columns and spellings need not be.
    path = Path(directory) / "config.toml"
    data = read_toml(path).get("data", {})
    schema, files = data.get("schema", {}), data.get("files", {})
    names = list(files) if isinstance(files, dict) else [Path(str(file)).stem for file in files]
    if silo not in names:
        hint = suggest_name(silo, names) or f"its silos are {', '.join(names) or 'not those of tables'}."
        raise SilodpError(f"{path} has no silo {silo!r}: {hint}", code="argument.value", field="silo")
    reader = dict(schema.get("readers", {}).get(silo, {}))
    if "missing_in" in reader:  # of labels and keys, too, which a prediction does not read
        features = {name for kind in ("numeric", "categorical", "other") for name in schema.get(kind, {})}
        reader["missing_in"] = {
            name: reader["missing_in"][name] for name in reader["missing_in"] if name in features
        }
    return reader, read_mapping(silo, schema.get("silos", {}).get(silo, {}))


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SilodpError(
            f"{path} is missing: copy it from the directory of the run.", code="bundle.missing"
        ) from None
    except OSError as error:  # for example a folder
        raise SilodpError(
            f"{path} cannot be read ({error.strerror}): copy it from the directory of the run.",
            code="bundle.damaged",
        ) from None


def _read_tensors(path: Path, description: ModelDescription) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors, which must be the file that model.json describes."""
    content = _read_file(path)
    description.check_content(content, path)
    try:
        return dict(load_tensors(content))
    except SafetensorError as error:
        raise SilodpError(
            f"{path} cannot be read ({first_line(error)}): get it again.", code="bundle.damaged"
        ) from None


def _check_tensors(network: nn.Module, expected: Mapping[str, StoredTensor]) -> None:
    """Refuse a module whose state has other names, shapes or types than that of the run."""
    found = {name: StoredTensor.of(tensor) for name, tensor in network.state_dict().items()}
    # `load_state_dict` would convert other types without a word, and names a wrong shape in a text of many lines.
    for name in sorted(found.keys() | expected.keys()):
        here, there = found.get(name), expected.get(name)
        if here is None or there is None or (here.shape, here.dtype) != (there.shape, there.dtype):
            shown = ["none" if one is None else f"{one.dtype} {one.shape}" for one in (here, there)]
            raise SilodpError(
                f"parameter or buffer '{name}' of the module is {shown[0]}, and of the run {shown[1]}: give a module "
                "with the architecture of the run.",
                code="bundle.architecture",
                field="model",
            )
