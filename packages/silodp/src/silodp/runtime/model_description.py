"""What a run keeps with its model so that it can be used elsewhere: model.json, public constants alone.

The file may be released with model.safetensors and guarantee.json. It names no file, no seed, no silo and no person:
the schema in it says how features are read and scaled, and nothing about persons or labels but the classes' names and
the scaling of a numeric label.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat, StrictBool, TypeAdapter

from silodp._lazy import find_version
from silodp.data.public import LabelKind
from silodp.data.tables.schema import Schema, name_classes
from silodp.errors import SilodpError
from silodp.parsing import MALFORMED, is_format, parse_json
from silodp.training.models import Architecture

if TYPE_CHECKING:  # a report, which reads descriptions, does not import torch
    from torch import Tensor, nn

    from silodp.aggregators.run_spec import RunSpec
    from silodp.training.task import Task

FORMAT = 1
"""Of model.json."""
DESCRIPTION, WEIGHTS, CODE, CARD = "model.json", "model.safetensors", "model.py", "MODEL_CARD.md"
"""Files in the directory of a run; model.py only where the architecture is a user's file."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_Digest = Annotated[str, Field(pattern=f"^{_SHA256.pattern}$")]
_Scaling = tuple[FiniteFloat, Annotated[FiniteFloat, Field(gt=0)]]
"""Center and spread of a label of numbers."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of model.safetensors.

    Attributes:
        shape: Its lengths.
        dtype: torch's name of its type, for example "float32".
        trained: Whether it was trained; the others are constants of the model.
    """

    shape: tuple[int, ...]
    dtype: str
    trained: bool

    @classmethod
    def of(cls, tensor: Tensor, trained: bool = False) -> StoredTensor:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), trained)


@dataclass(frozen=True)
class ModelDescription:
    """The content of model.json.

    Attributes:
        run: Random id of the run, as in guarantee.json.
        labels: Kind of label, as in `PublicData`.
        target: Column or columns of the label, or those of event and time; () where there is no schema.
        classes: Names of the classes in the order of their numbers; () for other kinds.
        record_shape: Shape of one input.
        features: Names of the inputs' columns, or () where they have none.
        inputs: How features are read and scaled (`Schema.describe_inputs`); None where no public constants say it.
        architecture: Where the model came from.
        tensors: The tensors of model.safetensors, by name.
        unsaved: SHA-256 (hex) of buffers that are no part of the model's state; "" without any.
        attributes: SHA-256 (hex) of the numbers in plain attributes of modules; "" without any.
        predicts_labels: Whether outputs are logits of classes, the label, or a log hazard (see `Loss`).
        guarantee: SHA-256 (hex) of guarantee.json.
        silo_settings: Names of the reader's settings that silos had for themselves, for tables written in other ways.
        weights: SHA-256 (hex) of model.safetensors.
        versions: The versions of silodp, torch and python.
        label_typical: (center, spread) by which labels of kind "real" were scaled, one pair for each of several; None
            where they were not.
        targets: Number of labels of a record, where it has several.
        label_shape: Places of a record that have a class each; () where it has one.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # for `TypeAdapter`, which reads model.json

    run: str
    labels: LabelKind
    target: tuple[str, ...]
    classes: tuple[str, ...]
    record_shape: tuple[int, ...]
    features: tuple[str, ...]
    inputs: Mapping[str, Any] | None
    architecture: Architecture
    tensors: Mapping[str, StoredTensor]
    weights: _Digest
    unsaved: str
    attributes: str
    predicts_labels: StrictBool
    guarantee: _Digest
    silo_settings: tuple[str, ...]
    versions: Mapping[str, str]
    label_typical: _Scaling | tuple[_Scaling, ...] | None
    targets: Annotated[int, Field(strict=True, ge=2)] | None
    label_shape: tuple[Annotated[int, Field(strict=True, ge=1)], ...]

    @classmethod
    def of_run(
        cls,
        spec: RunSpec,
        model: nn.Module,
        task: Task,
        schema: Schema | None,
        weights: bytes,
        guarantee: bytes,
    ) -> ModelDescription:
        """Describe the model of a run.

        Args:
            spec: The specification of the run.
            model: The model, as it is stored.
            task: The task that it was trained for.
            schema: The schema of the tables; None where there is none.
            weights: Content of model.safetensors.
            guarantee: Content of guarantee.json.
        """
        data = spec.data
        if schema is not None and schema.features != data.features:
            schema = None  # it does not say how the records were made
        named = () if schema is None else (*schema.label_columns, schema.event, schema.time)
        # Tied parameters have several names in the state, and were trained under each of them.
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return cls(
            run=spec.run,
            labels=data.labels,
            target=tuple(name for name in named if name is not None),
            classes=name_classes(schema, data.classes),
            record_shape=data.record_shape,
            features=data.features,
            # Another reader of the description would have to run the code of a stranger's kind of column.
            inputs=None if schema is None or schema.has_plugins else schema.describe_inputs(),
            architecture=task.architecture,
            tensors={
                name: StoredTensor.of(tensor, name in parameters and parameters[name].requires_grad)
                for name, tensor in model.state_dict().items()
            },
            weights=hashlib.sha256(weights).hexdigest(),
            unsaved=digest_unsaved(model),
            attributes=digest_attributes(model),
            predicts_labels=task.loss.predicts_labels,
            guarantee=hashlib.sha256(guarantee).hexdigest(),
            silo_settings=() if schema is None else schema.list_silo_settings(),
            versions={"silodp": find_version(), "torch": version("torch"), "python": python_version()},
            label_typical=cast(Any, data.label_typical),
            targets=data.targets,
            label_shape=data.label_shape,
        )

    def to_json(self) -> str:
        """Return the content of model.json."""
        fields = {
            "format": FORMAT,
            **vars(self),
            "architecture": self.architecture.to_dict(),
            "tensors": {name: vars(tensor) for name, tensor in self.tensors.items()},
        }
        return json.dumps(fields | {"digest": _digest(fields)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> ModelDescription:
        """Read model.json, which may come from anywhere.

        Raises:
            SilodpError: The file is missing, damaged or of another format (bundle.missing, bundle.damaged).
        """
        try:
            fields = parse_json(path.read_bytes())
            if not is_format(fields["format"], FORMAT) or fields.pop("digest") != _digest(fields):
                raise ValueError("another format, or another digest")
            return cls._from_fields(fields)
        except FileNotFoundError:
            raise SilodpError(
                f"{path} is missing: name the directory of a finished run, or a copy of its public files.",
                code="bundle.missing",
            ) from None
        except (OSError, *MALFORMED) as error:
            raise SilodpError(
                f"{path} was changed, or cannot be read ({type(error).__name__}): get it again, or install the version "
                "of silodp that wrote it.",
                code="bundle.damaged",
            ) from None

    def check_run(self, stated: object, path: Path) -> None:
        """Refuse the guarantee of another run.

        Args:
            stated: The id of the run in the guarantee.
            path: The path of the guarantee.

        Raises:
            SilodpError: The guarantee is of another run (code bundle.mixed).
        """
        if stated != self.run:
            raise SilodpError(
                f"{path} and {DESCRIPTION} are of different runs: copy all files of one run.",
                code="bundle.mixed",
            )

    def check_content(self, content: bytes, path: Path) -> None:
        """Refuse a file of the run that is not the one described.

        Args:
            content: The content of model.safetensors or guarantee.json.
            path: The path of that file.

        Raises:
            SilodpError: It is another file (code bundle.mixed).
        """
        stated = self.weights if path.name == WEIGHTS else self.guarantee
        if stated != hashlib.sha256(content).hexdigest():
            raise SilodpError(
                f"{path} is not the file that {DESCRIPTION} describes, so it is of another run, of other rounds, or "
                "was changed: copy all files of one run again.",
                code="bundle.mixed",
            )

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> ModelDescription:
        del fields["format"]
        known = {one.name for one in dataclasses.fields(Architecture)}
        found = TypeAdapter(cls).validate_python(fields)
        source, labels, targets = found.architecture, found.labels, found.targets
        # The types are right. What contradicts itself would build another model, or scale its numbers wrongly.
        if (
            fields["architecture"].keys() - known
            or (source.source == "module") != bool(source.module)
            or (source.source in ("file", "module") and not _SHA256.fullmatch(source.sha256))
            or (targets is None and labels == "multilabel")
            or (targets is not None and labels not in ("real", "multilabel"))
            or (found.label_shape and labels != "classes")
            or (targets is not None and len(found.target) not in (0, targets))
            or (found.label_typical is not None and labels != "real")
            or (
                found.label_typical is not None
                and np.shape(found.label_typical) != ((2,) if targets is None else (targets, 2))
            )
            or (
                found.inputs is not None and found.schema.features != found.features
            )  # another order of columns
        ):
            raise ValueError("fields that contradict each other")
        return found

    @property
    def schema(self) -> Schema:
        """The part of the schema by which features are read; `inputs` is not None.

        Raises:
            ValueError: `inputs` is no such part.
        """
        return Schema.from_inputs(self.inputs or {})


def _digest(fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of JSON-ready fields, in their order: that of the columns matters."""
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def digest_unsaved(model: nn.Module) -> str:
    """Return the SHA-256 (hex) of the buffers that `state_dict` leaves out; "" where there are none."""
    import torch

    saved = model.state_dict().keys()
    left = {name: tensor for name, tensor in model.named_buffers() if name not in saved}
    if not left:
        return ""
    state = hashlib.sha256()
    for name, tensor in sorted(left.items()):
        # Each tensor's bytes follow its name, type and shape, so that no other buffers give the same input.
        state.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def digest_attributes(model: nn.Module) -> str:
    """Return the SHA-256 (hex) of the numbers that modules hold as plain attributes; "" where there are none."""
    from silodp.training.model_state import digest_tensors, list_numeric_attributes

    # Without any, "" and not the digest of nothing: a file then shows that there was nothing to compare.
    found = list_numeric_attributes(model)
    return digest_tensors(found) if found else ""
