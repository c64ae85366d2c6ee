"""Additional series: releases that a run makes besides those of its training, such as an evaluation by noisy sums.

A series has a name, settings and a specification of its own (`Series.derive`). Server and silos treat it as they treat
any run: with the same messages, masks, gate, stored answers and noise, under a run id and random streams of its own.
Its charges are in the ledger of the run, under its name. A new one is one file: a subclass of `Series`, with a method
derived from `SeriesMethod`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from silodp._lazy import Registry
from silodp.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from silodp.aggregators.run_spec import RunSpec
    from silodp.data.federation import Federation
    from silodp.data.public import PublicData
    from silodp.data.silo_data import SiloData
    from silodp.data.tables.schema import Schema
    from silodp.training.task import Task

SERIES: Registry[type[Series]] = Registry("series", {})
"""The additional series that a configuration can name, by the name of their table."""

NOTHING_MEASURED: Mapping[str, Any] = MappingProxyType({"loss": None, "metrics": {}})
"""Entries of a row of metrics.jsonl without a measurement."""

Observer = Callable[[str, "Tensor", int], None]
"""Run id of a series, parameters (d,) of a model, number of rounds that led to it -> nothing."""


def name_series(run: str, series: str) -> str:
    """Return the id under which silos are asked about a series of a run."""
    return f"{run}-{series}"


def split_name(name: str) -> tuple[str, str]:
    """Return the id of the run that a message is about, and the name of the series; "" for training."""
    run, _, series = name.partition("-")
    return (run, series) if run and series else (name, "")  # what belongs to no run has the id "-"


def find_series(name: str) -> type[Series]:
    """Return a class of series by its name.

    Raises:
        SilodpError: the package that has it is not installed (code extension.missing).
    """
    return SERIES.load_required(name, "analytics", name)


class Series(Settings, ABC):
    """The settings of an additional series; a frozen dataclass of public constants.

    Attributes:
        name: Name in the ledger, in run ids, stores and random streams, in rows and plans: letters and "_".
    """

    name = ""  # no annotation: it is no setting

    # --- what is released, and when ---

    @abstractmethod
    def is_due(self, round_: int, is_last: bool) -> bool:
        """Return whether the series releases after so many rounds of training."""

    @abstractmethod
    def count(self, rounds: int) -> int:
        """Return how often the series releases in a run of so many rounds."""

    @abstractmethod
    def derive(self, spec: RunSpec) -> RunSpec:
        """Return the specification of the series (`RunSpec.for_series`), whose method is a `SeriesMethod`.

        Args:
            spec: The specification of the run.

        Raises:
            SilodpError: the series is not proven for this run.
        """

    @property
    def is_charged(self) -> bool:
        """Whether a release costs ε."""
        return True

    @property
    def asks_silos(self) -> bool:
        """Whether silos are asked anything."""
        return True

    @property
    def measures_model(self) -> bool:
        """Whether the series says how good the model is, so that pooled held-out records do not."""
        return False

    @property
    def shows_silos(self) -> bool:
        """Whether sums of single silos are seen, also where training shows their total alone."""
        return False

    @property
    def kind(self) -> str:
        """What the operator of a silo allows (`Policy.evaluation`)."""
        return self.name

    @property
    def stated(self) -> str:
        """What guarantee.json states under the name."""
        return self.kind

    def count_most(self, spec: RunSpec) -> int:
        """Return the most releases that a run can ever have.

        A run that is resumed with more rounds releases after its last round again. Where the aggregator limits the
        rounds, constants of it may depend on the number of releases, which is then the one planned for this limit.
        """
        most = spec.aggregator.max_rounds
        return spec.rounds if most is None else self.count(most)

    def describe_release(self, spec: RunSpec, total: np.ndarray | None) -> dict[str, Any]:
        """Return entries of a row of metrics.jsonl; numbers of a charged release stand under the name.

        Args:
            spec: The specification of the series.
            total: The noisy sum (k,); None where nothing was released, although it was due.
        """
        return {}

    # --- before the run ---

    def place_columns(self, schema: Schema | None, bounds: Mapping[str, Sequence[Any]]) -> Self:
        """Return the series with all that it takes from a schema.

        Args:
            schema: None where the data have no tables.
            bounds: By column, the public subgroups that the owner declares for the model card.
        """
        return self

    def fit(self, federation: Federation) -> Self:
        """Return the series for a federation; refuse one that has not the records for it."""
        return self.place_columns(federation.schema, {})

    def check_schema(self, schema: Schema) -> None:
        """Refuse a series for which tables of this schema have no records."""

    def check_task(self, data: PublicData, task: Task, x: Tensor, y: Tensor) -> None:
        """Refuse a model with whose outputs the series can do nothing.

        Args:
            data: The public facts of the federation.
            task: The model, its loss and its metrics.
            x, y: Made-up records (n, ...), on which it may be tried.
        """

    def describe_unmeasured(self, metrics: Iterable[str], data: PublicData) -> str | None:
        """Return a sentence on the metrics (names) of a task that the series does not estimate; None: none is left."""
        return None

    def describe_consent(self, spec: RunSpec) -> str:
        """Return what the operator of a silo agrees to."""
        return f"{self.count(spec.rounds)} times, within the ε above"

    def describe_plan(self, spec: RunSpec) -> dict[str, Any]:
        """Return entries of a plan beside "times" and "epsilon", JSON-ready; the specification is the run's."""
        return {}

    def format_plan(self, spent: str, planned: Mapping[str, Any]) -> list[str]:
        """Return a plan as lines of text.

        Args:
            spent: What the series costs against each adversary.
            planned: The plan of the series, with "times" and "epsilon".
        """
        return [f"of this {self.name}, {planned['times']} times: alone {spent}"]

    def describe_start(self, metrics: Path) -> str | None:
        """Return a note for the beginning of a run whose silos may write to a folder; None: there is none."""
        return None

    # --- a silo's side ---

    def select_records(self, data: SiloData) -> SiloData:
        """Return the records of a silo that the series is about."""
        return data

    def make_observer(self, records: SiloData, task: Task, metrics: Path | None) -> Observer | None:
        """Return what a silo does with each model for itself alone, which is never sent; None: nothing.

        Args:
            records: Those of `select_records`.
            task: The model, its loss and its metrics.
            metrics: File for what the silo measures; None keeps nothing.
        """
        return None
