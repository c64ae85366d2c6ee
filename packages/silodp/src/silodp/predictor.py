"""What predicts for the rows of a table: the base class, and which one a directory holds.

A result of another kind than a model is one class and one entry point in the group "silodp.predictors".
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from silodp._lazy import Registry
from silodp.errors import SilodpError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from silodp.accounting.guarantee import Guarantee
    from silodp.accounting.views import Adversary
    from silodp.data.inputs import NamedArrays
    from silodp.data.tables.columns import TableMapping
    from silodp.data.tables.schema import Schema

_log = logging.getLogger(__name__)


class TablePredictor(ABC):
    """Base class of what predicts by the public files of a run."""

    guarantees: Mapping[Adversary, Guarantee]
    """What the run guarantees, by adversary."""

    @property
    @abstractmethod
    def schema(self) -> Schema | None:
        """How features are read; None where no public constants say it."""

    @property
    def silo_settings(self) -> tuple[str, ...]:
        """Names of the reader's settings that silos of the run had for themselves."""
        return ()

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Names of the numbers that `predict` returns for a row."""

    @abstractmethod
    def predict(self, data: Any) -> NDArray[np.float64]:
        """Predict for every row of inputs as `read_table` gives them; returns (n, columns)."""

    def describe(self) -> list[str]:
        """Return what readers of predictions must know besides ε."""
        return []

    def to_json(self) -> dict[str, Any]:
        """Return the same for programs."""
        return {}

    def predict_table(
        self,
        table: str | Path | pd.DataFrame,
        copied: Sequence[str] = (),
        reader: Mapping[str, Any] = MappingProxyType({}),
        out_of_range: Literal["refuse", "clip"] | None = None,
        mapping: TableMapping | None = None,
        silo_reader: Mapping[str, Any] | None = None,
    ) -> pd.DataFrame:
        """Predict for every row of a table, and return the predictions beside columns of it.

        Args:
            table: A file, or a data frame: of pandas, or another one that gives its columns to Arrow (polars, DuckDB).
            copied: Columns of the table that come first, as they are.
            reader: How the file is written, where it differs from what the schema of the run says: separator, decimal,
                encoding, sheet, missing, or mappings from columns: dates to layouts, missing_in to texts.
            out_of_range: "refuse" numbers outside the ranges of the model, or "clip" them; None: as in training.
            mapping: How the table differs from the schema of the run (see `read_silo_settings`); None: not at all.
            silo_reader: The settings of the reader of the silo that wrote the table (see `read_silo_settings`); None:
                the run's.

        Raises:
            SilodpError: As `predict`, or a column to copy is missing, named twice or has the name of a prediction.
        """
        import pandas as pd

        for place, column in enumerate(copied):
            problem = "is to be copied twice: name it once" if column in copied[:place] else None
            if column in self.columns:
                problem = "cannot be copied, since a prediction has that name: rename it"
            if problem is not None:
                raise SilodpError(f"column {column!r} {problem}.", code="data.column", field="copied")
        x, kept = self.read_table(table, copied, reader, out_of_range, mapping, silo_reader)
        found = pd.DataFrame(self.predict(x), columns=list(self.columns))
        return pd.concat([kept.reset_index(drop=True), found], axis=1)

    def read_table(
        self,
        table: str | Path | pd.DataFrame,
        copied: Sequence[str] = (),
        reader: Mapping[str, Any] = MappingProxyType({}),
        out_of_range: Literal["refuse", "clip"] | None = None,
        mapping: TableMapping | None = None,
        silo_reader: Mapping[str, Any] | None = None,
    ) -> tuple[NDArray[np.float32] | NamedArrays, pd.DataFrame]:
        """Return a table's inputs as the schema of the run gives them to the model, and the columns to copy.

        Raises:
            SilodpError: The run kept no schema, or as `predict`.
        """
        from silodp.data.tables.columns import read_reader
        from silodp.data.tables.reader import read_inputs  # imports pandas, which takes a second

        schema = self.schema
        if schema is None:
            raise SilodpError(
                "this run kept no schema with public ranges, so it is not known how a table becomes the inputs of the "
                "model: in Python, give silodp.load(DIR).predict an array of inputs as the model takes them.",
                code="bundle.no_schema",
            )
        # What tables of single silos were read by is not in the public files: the common schema may misread this one.
        silent = [name for name in self.silo_settings if name not in reader]
        if silent and mapping is None:
            _log.warning(
                "the silos of this run wrote their tables in different ways ([data.schema.readers] and "
                "[data.schema.silos]), which the model does not keep: this table is read as the common schema says; "
                "name its silo (--silo), or check these settings: %s",
                ", ".join(silent),
            )
        kept = schema.reader if silo_reader is None else read_reader(None, silo_reader, schema.reader)
        schema = replace(
            schema,
            # What the caller says of this table holds before what the run says of it.
            reader=read_reader(None, reader, kept).extend(kept),
            out_of_range=out_of_range or schema.out_of_range,
        )
        return read_inputs(table, schema, copied, mapping)


PREDICTORS: Registry[Callable[[Path, str | None, Path | None], TablePredictor]] = Registry(
    "predictors", {"model": "silodp.bundle:load_predictor"}
)
"""Functions of the directory of a run, code of its model, and a silo's head, by the name of the JSON file that says
what the run has released."""


def load_predictor(directory: Path, code: str | None = None, head: Path | None = None) -> TablePredictor:
    """Load what the directory of a run predicts with; see `silodp.bundle.load`.

    Raises:
        SilodpError: a file is missing or damaged, or an option has no meaning there.
    """
    found = (name for name in PREDICTORS if (directory / f"{name}.json").is_file())
    name = next(found, "model")
    if name == "model":
        # Read before torch is imported, which takes seconds.
        from silodp.runtime.model_description import DESCRIPTION, ModelDescription

        ModelDescription.read(directory / DESCRIPTION)
    return PREDICTORS[name](directory, code, head)
