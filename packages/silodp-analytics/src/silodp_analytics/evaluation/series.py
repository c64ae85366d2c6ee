"""The evaluation of a run across its silos: an additional series, whose method adds up counts of held-out records."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np

from silodp._lazy import load
from silodp.accounting.accountant import choose_accountant
from silodp.accounting.calibration import calibrate_noise_multiplier
from silodp.accounting.events import Event
from silodp.accounting.guarantee import SERVER_FOLLOWS
from silodp.accounting.views import View
from silodp.aggregators import base
from silodp.aggregators.run_spec import RunSpec
from silodp.aggregators.series import NOTHING_MEASURED, Observer, Series
from silodp.assumption import as_assumptions
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.settings import MAX_CELLS, Clip, Count, Epsilon, Named, NoiseMultiplier
from silodp.text import join_names, pluralize
from silodp.training.dense_labels import MOST_CLASSES
from silodp.wire.messages import Message
from silodp.wire.schemas import MessageSchedule, MessageSchema, MessageType
from silodp_analytics.count_parts import CountParts, find_groupings
from silodp_analytics.counted import CategoryCells, NumericRanges
from silodp_analytics.counts import CountTable
from silodp_analytics.evaluation.methods import NOTHING, EvaluationSums, LocalEvaluation

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from silodp.data.federation import Federation
    from silodp.data.silo_data import SiloData
    from silodp.data.tables.schema import Schema
    from silodp.training.task import Task

_log = logging.getLogger(__name__)
_RUNTIME = "silodp_analytics.evaluation.results:"
"""Where the parts are that need torch."""


Across = Literal["none", "local", "sums"]

_UNUSED: Mapping[str, Any] = {"by": (), "by_silo": False, "least_group": 30, "categories": (), "ranges": ()}
"""Settings of later versions, as they are where they are not used."""


@dataclass(frozen=True)
class Evaluation(Series, prefix="evaluation."):
    """How a model is evaluated on the held-out records of the silos; all of it is public.

    Attributes:
        across: The kind of evaluation: "none"; "local", where every silo evaluates the released models on its records
            and sends nothing; "sums", noisy sums of counts over all silos, which are charged.
        every: The number of rounds from one evaluation to the next; None evaluates only after the last round.
        noise_multiplier: The multiplier σ of an evaluation by sums, in units of `clip`.
        epsilon: The ε that one evaluation costs by itself, against whoever sees the metrics; it is given instead of
            `noise_multiplier`.
        clip: The 2-norm C that one unit's counts are clipped to; with 1, one record of a person counts in full.
        bins: The number of bins of scores, which is even.
        times: The edges between bins of survival times, ascending.
        by: Columns by whose public subgroups records are counted.
        by_silo: Whether the metrics of every silo are released, besides those of all records.
        least_group: The fewest records, by noisy counts, of which a subgroup or a silo has metrics shown.
        categories: The categorical columns of `by` with their public constants; the program sets it from the schema.
        ranges: The numeric columns of `by`, in the same way.
    """

    name = "evaluation"

    across: Annotated[Across, Named("across")]
    every: Count | None = None
    noise_multiplier: NoiseMultiplier | None = None
    epsilon: Epsilon | None = None
    clip: Clip = 1.0
    bins: int = 10
    times: tuple[float, ...] = ()
    by: tuple[str, ...] = ()
    by_silo: bool = False
    least_group: Count = 30
    categories: tuple[CategoryCells, ...] = ()
    ranges: tuple[NumericRanges, ...] = ()

    def __repr__(self) -> str:
        # Runs hold this text in their digests: settings of later versions are left out where unused.
        shown = {name: value for name, value in vars(self).items() if value != _UNUSED.get(name, self)}
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def __post_init__(self) -> None:
        super().__post_init__()
        # A configuration gives a list; the table of cells compares and hashes a tuple.
        object.__setattr__(self, "times", tuple(float(time) for time in self.times))
        object.__setattr__(self, "by", tuple(self.by))
        object.__setattr__(self, "categories", tuple(self.categories))
        object.__setattr__(self, "ranges", tuple(self.ranges))
        # Made only to check bins and times, with the messages of the class that uses them.
        CountTable("survival", bins=self.bins, times=self.times)
        self._check_used()
        given = self.noise_multiplier is not None, self.epsilon is not None
        if self.across == "sums" and sum(given) != 1:
            raise SilodpError(
                'evaluation across = "sums" needs noise: set either noise_multiplier or epsilon.',
                code="evaluation.noise",
                field="evaluation.noise_multiplier",
            )

    def _check_used(self) -> None:
        """Refuse settings without effect: noise that nobody adds looks like protection."""
        used = {"none": ("across",), "local": ("across", "every"), "sums": tuple(self.__dataclass_fields__)}
        for name, declared in self.__dataclass_fields__.items():
            if name not in used[self.across] and getattr(self, name) != declared.default:
                raise SilodpError(
                    f'evaluation.{name} = {getattr(self, name)} has no effect with across = "{self.across}": take it '
                    "out, or change across.",
                    code="argument.conflict",
                    field=f"evaluation.{name}",
                )

    @property
    def is_charged(self) -> bool:
        """Whether silos add up counts, which costs ε."""
        return self.across == "sums"

    @property
    def asks_silos(self) -> bool:
        """Whether silos are asked anything."""
        return self.across != "none"

    @property
    def measures_model(self) -> bool:
        """True: nothing but the series says how good the model is."""
        return True

    @property
    def shows_silos(self) -> bool:
        """Whether counts of single silos are seen side by side."""
        return self.by_silo

    @property
    def kind(self) -> str:
        """What the operator of a silo allows: `across`, or "sums by silo", which compares silos."""
        return "sums by silo" if self.by_silo else self.across

    @property
    def stated(self) -> str:
        """`across`."""
        return self.across

    @property
    def groups(self) -> tuple[CategoryCells | NumericRanges, ...]:
        """The columns of `by`, with their subgroups."""
        return (*self.categories, *self.ranges)

    def make_parts(self, silos: int) -> CountParts | None:
        """Return the parts into which the records of so many silos are split; None where there are none."""
        parts = CountParts(self.groups, silos if self.by_silo else 1)
        return None if parts == CountParts() else parts

    def is_due(self, round_: int, is_last: bool) -> bool:
        """Return whether the model after so many rounds is evaluated."""
        if self.across == "none" or round_ == 0:
            return False
        return is_last or (self.every is not None and round_ % self.every == 0)

    def count(self, rounds: int) -> int:
        """Return how many evaluations a run of so many rounds has."""
        if self.across == "none" or rounds == 0:
            return 0
        return 1 if self.every is None else math.ceil(rounds / self.every)

    def derive(self, spec: RunSpec) -> RunSpec:
        """As `derive_evaluation`."""
        return derive_evaluation(spec, self)

    def describe_release(self, spec: RunSpec, total: np.ndarray | None) -> dict[str, Any]:
        """Return metrics, and how large their noise is; nothing measured where silos send nothing."""
        if total is None or not self.is_charged:
            return dict(NOTHING_MEASURED)
        row: dict[str, Any] = load(f"{_RUNTIME}describe_counts")(spec.method, spec, total, self.least_group)
        return row

    def place_columns(self, schema: Schema | None, bounds: Mapping[str, Sequence[Any]]) -> Evaluation:
        """Return the evaluation with the subgroups of its columns; arguments as of `find_groupings`."""
        if not self.by or self.groups:
            return self
        found = find_groupings(schema, self.by, bounds)
        return replace(
            self,
            categories=tuple(one for one in found if isinstance(one, CategoryCells)),
            ranges=tuple(one for one in found if isinstance(one, NumericRanges)),
        )

    def fit(self, federation: Federation) -> Evaluation:
        """Return the evaluation with its subgroups; refuse a federation without held-out records."""
        placed = super().fit(federation)
        if self.asks_silos and all(silo.test is None for silo in federation.silos):
            raise SilodpError(
                "evaluation across silos needs held-out records in the silos: set data.schema.test_share or "
                "data.schema.split, or give SiloData.test.",
                code="evaluation.no_records",
                field="evaluation.across",
            )
        return placed

    def check_schema(self, schema: Schema) -> None:
        """Refuse an evaluation across silos where no rule says which records of a table are held out."""
        if self.asks_silos and schema.split is None and schema.test_share is None:
            raise SilodpError(
                "evaluation across silos needs a public rule for held-out records: set data.schema.test_share (whole "
                "persons, the same in every silo) or data.schema.split (a column).",
                code="evaluation.no_records",
                field="evaluation.across",
            )

    def check_task(self, data: PublicData, task: Task, x: Tensor, y: Tensor) -> None:
        """Refuse a model whose outputs have no cells, and warn of metrics that counts do not estimate."""
        if not self.is_charged:
            return
        choose_table(data, self).find_cells(task.predict(task.initial(0), x), y)
        if remark := self.describe_unmeasured(task.metrics, data):
            _log.warning("%s", remark)

    def describe_unmeasured(self, metrics: Iterable[str], data: PublicData) -> str | None:
        """Return a sentence on the metrics (names) that sums of counts cannot estimate; None: there are none."""
        known = choose_table(data, self).metrics if self.is_charged else ()
        missing = [name for name in metrics if name not in known]
        if not self.is_charged or not missing:
            return None
        return (
            f"evaluation by sums estimates {join_names(known)} alone: {join_names(missing)} will not be measured "
            '(task.metrics); evaluation.across = "local" measures every metric within each silo'
        )

    def describe_consent(self, spec: RunSpec) -> str:
        """Return what the operator of a silo agrees to."""
        if self.across == "local":
            return "on this silo's held-out records, by itself; nothing of it leaves the silo"
        sums = pluralize(self.count(spec.rounds), "noisy sum")
        return f"{sums} of counts of held-out records, within the ε above"

    def describe_plan(self, spec: RunSpec) -> dict[str, Any]:
        """Return how many counts there are, and how large the noise in each is."""
        found: dict[str, Any] = {"across": self.across, "cells": None, "noise_std": None}
        if not self.is_charged:
            return found
        derived = spec.derived[self.name]
        noise_std = cast(EvaluationSums, derived.method).count_std(derived.population)
        return found | {"cells": derived.sum_size, "noise_std": noise_std}

    def format_plan(self, spent: str, planned: Mapping[str, Any]) -> list[str]:
        """Return a plan as lines of text."""
        times = pluralize(planned["times"], "evaluation")
        if not self.is_charged:
            return [f"{times} within each silo: nothing leaves a silo, so no ε"]
        return [
            f"of this {times} by sums of {planned['cells']:,} counts: alone {spent}",
            f"  noise in each count: standard deviation {planned['noise_std']:.4g} records",
        ]

    def describe_start(self, metrics: Path) -> str | None:
        """Return where silos keep the metrics that no one else gets."""
        if self.across != "local":
            return None
        return (
            f"every silo keeps the metrics of its own held-out records in {metrics}: none is in metrics.jsonl"
        )

    def select_records(self, data: SiloData) -> SiloData:
        """Return the held-out records."""
        return replace(data.held_out, name=data.name)  # a data set may call these records as it likes

    def make_observer(self, records: SiloData, task: Task, metrics: Path | None) -> Observer | None:
        """Return what measures each model on the held-out records of a silo, where silos do so for themselves."""
        return None if self.is_charged else load(f"{_RUNTIME}LocalMetrics")(records, task, metrics).note


def derive_evaluation(spec: RunSpec, settings: Evaluation) -> RunSpec:
    """Return the specification of the evaluation of a run.

    Args:
        spec: the specification of the run.
        settings: those of its evaluation, in which silos are asked something.

    Raises:
        SilodpError: the evaluation is not proven for this run, or its counts say nothing of its labels
            (codes evaluation.*).
    """
    make = partial(spec.for_series, settings.name)
    if settings.across == "local":
        return make(method=LocalEvaluation(spec.method.unit), aggregator=ModelBroadcast())
    _check_sums(spec)
    aggregator = _find_aggregator(spec)
    table, parts = choose_table(spec.data, settings), settings.make_parts(len(spec.names))
    _check_parts(spec.data, settings, table.size, parts)

    def with_noise(noise_multiplier: float) -> RunSpec:
        clip = settings.clip if spec.method.unit == "user" else 1.0
        method = EvaluationSums(spec.method.unit, noise_multiplier, clip, table, parts)
        return make(method=method, aggregator=aggregator, rounds=settings.count_most(spec))

    noise_multiplier = settings.noise_multiplier
    if noise_multiplier is None:
        noise_multiplier = calibrate_releases(with_noise, settings.epsilon or 0.0, spec.noise_delta)
    derived = with_noise(noise_multiplier)
    aggregator.check(derived)
    _check_promise(spec, derived)
    return derived


def calibrate_releases(
    with_noise: Callable[[float], RunSpec], epsilon: float, delta: float, rounds: int = 1
) -> float:
    """Return the σ at which the releases of all rounds cost ε against whoever sees them.

    Args:
        with_noise: Returns the specification of the releases with a σ.
        epsilon: ε.
        delta: The δ that noise is accounted at.
        rounds: The number of rounds, which may cost different amounts.

    Returns:
        σ, rounded up to three figures, so that all parties find the same one.
    """

    def count(noise_multiplier: float) -> list[tuple[Event, int]]:
        spec = with_noise(noise_multiplier)
        return [*Counter(spec.round_events(None, one)["released"] for one in range(rounds)).items()]

    # For whoever gets the results; every adversary is then charged by its own view.
    events = [event for event, _ in count(1.0)]
    found = calibrate_noise_multiplier(count, epsilon, delta, choose_accountant(events))
    # Less one part in 10⁹, so that a number that has three figures already is not rounded up to the next one. The tail
    # that floating point leaves is cut, since σ is in what silos sign.
    step = 10.0 ** (math.floor(math.log10(found)) - 2)
    return round(math.ceil(found / step * (1 - 1e-9)) * step, 10)


def choose_table(data: PublicData, settings: Evaluation) -> CountTable:
    """Return the cells that fit the labels of a run.

    Raises:
        SilodpError: labels are numbers, survival times without edges, or classes with them (codes evaluation.labels,
            evaluation.times, argument.conflict).
    """
    if data.labels == "survival":
        if not settings.times:
            raise SilodpError(
                "evaluation by sums of counts needs bins of survival times: set evaluation.times to public edges, for "
                "example [365.0, 730.0].",
                code="evaluation.times",
                field="evaluation.times",
            )
        return CountTable("survival", bins=settings.bins, times=settings.times)
    if settings.times:
        raise SilodpError(
            "evaluation.times are edges between survival times, and the labels are of another kind: take them out.",
            code="argument.conflict",
            field="evaluation.times",
        )
    if data.labels == "real" and data.targets is None:
        if data.label_typical is None:
            raise SilodpError(
                "evaluation by sums counts errors in bins of the label's usual spread, and the data declare none: set "
                "data.schema.label_typical = [center, spread] to public numbers.",
                code="evaluation.labels",
                field="data.schema.label_typical",
            )
        return CountTable("numbers", bins=settings.bins, spread=float(data.label_typical[1]))
    if data.labels != "classes" or data.classes is None:
        raise SilodpError(
            f"evaluation by sums of counts is for one class, one number or survival, and the labels are of kind "
            f"'{data.labels}'{' with several numbers' if data.labels == 'real' else ''}: set evaluation.across = "
            '"local" or "none".',
            code="evaluation.labels",
            field="evaluation.across",
        )
    if data.label_shape:
        # A table of all pairs of classes is of use for few of them, and every count has noise of its own.
        kind = "dense_labels" if data.classes <= MOST_CLASSES else "tokens"
    else:
        kind = "scores" if data.classes == 2 else "classes"
    return CountTable(kind, data.classes, settings.bins)  # type: ignore[arg-type]


def _check_parts(data: PublicData, settings: Evaluation, size: int, parts: CountParts | None) -> None:
    """Refuse subgroups of other columns than the records have, and more tables than can be of use."""
    if (placed := sorted(column.column for column in settings.groups)) != sorted(settings.by):
        why = (
            f"evaluation.categories and evaluation.ranges are about {', '.join(placed)}: leave both to the program, "
            "which takes them from the schema"
            if placed
            else "the data have no schema that declares their subgroups: take it out, or use tables"
        )
        raise SilodpError(
            f"evaluation.by names {', '.join(settings.by) or 'no column'}, and {why}.",
            code="evaluation.by",
            field="evaluation.by",
        )
    for column in settings.groups:
        column.check(data)
    cells = size * (parts.tables * parts.silos if parts else 1)
    if cells > MAX_CELLS:
        raise SilodpError(
            f"the evaluation has {cells:,} counts, more than {MAX_CELLS:,}, each with noise of its own: take fewer "
            "bins or columns of subgroups, or leave out by_silo.",
            code="evaluation.by",
            field="evaluation.by",
        )


def _check_sums(spec: RunSpec) -> None:
    method = spec.method
    why = None
    if method.unit is None:
        why = f"'{method.name}' protects nobody"
    elif method.budgets.unit is not None:
        why = f"in '{method.name}' every {method.unit} has a privacy budget, and an evaluation would be charged to all"
    elif method.allows_several_ids:
        why = "a person may have several ids, and an evaluation would count each as a person"
    if why is not None:
        raise SilodpError(
            f'evaluation by sums of counts is not proven for this run: {why}; set evaluation.across = "local" or '
            '"none", or choose another method.',
            code="evaluation.unit",
            field="evaluation.across",
        )


def _find_aggregator(spec: RunSpec) -> base.Aggregator:
    """Return the aggregator of the counts, which the run's names (`Aggregator.series_aggregator`).

    Raises:
        SilodpError: it names none (code evaluation.aggregator).
    """
    found = spec.aggregator.series_aggregator(spec)
    if found is None:
        raise SilodpError(
            f"evaluation by sums of counts is not known under the aggregator '{spec.aggregator.name}': set "
            'evaluation.across = "local" or "none", or choose plain, masked, select, lattice or paillier.',
            code="evaluation.aggregator",
            field="evaluation.across",
        )
    return found


def _check_promise(spec: RunSpec, derived: RunSpec) -> None:
    """Refuse an aggregator of counts under which the guarantee and the table of who sees what would be wrong.

    ε counts what an evaluation costs under any aggregator, by its own views and events. All else that a run states is
    about the aggregator of its training.

    Args:
        spec: the specification of the run.
        derived: the specification of its evaluation.

    Raises:
        SilodpError: an evaluation would show or assume more than a round (code evaluation.aggregator).
    """
    # Asked of what the two state about themselves, so that it holds for plug-ins too.
    ours, theirs, silos = spec.aggregator, derived.aggregator, len(spec.names)
    seen = ours.views(spec.method, silos)
    showing = [who for who, view in theirs.views(derived.method, silos).items() if view.sees_shares]
    why = None
    if more := [who for who in showing if not seen[who].sees_shares]:
        why = f"'{more[0]}' would see every silo's sum of counts, and sees no single share in training"
    elif ours.adds_integers and not theirs.adds_integers:
        why = "its noise is in floating point, and that of the training in integers"
    # Counts of held-out records have no samples and no weights that the server could make wrongly.
    elif not set(as_assumptions(theirs.assumptions)) - {SERVER_FOLLOWS} <= set(
        as_assumptions(ours.assumptions)
    ):
        why = f"it rests on assumptions that '{ours.name}' does not state"
    elif any(theirs.disclosure(derived).values()):
        why = "it discloses more than events describe, and only the training may"
    if why is not None:
        raise SilodpError(
            f"under the aggregator '{ours.name}' counts would be added up by '{theirs.name}', and {why}: set "
            'evaluation.across = "local" or "none", or return another aggregator from series_aggregator.',
            code="evaluation.aggregator",
            field="evaluation.across",
        )


@dataclass(frozen=True, repr=False)
class ModelBroadcast(base.Aggregator):
    """Silos get a model and answer with nothing: an aggregator of no values, for evaluation within silos."""

    name = "delivery"

    def event(self, spec: RunSpec, view: View) -> Event:
        """Return the event that costs nothing."""
        return NOTHING

    def script(self, spec: RunSpec, name: str) -> MessageSchedule:
        """Return the set-up, then models, whose answers have no entries."""
        return MessageSchedule(
            base.setup_kinds(spec),
            MessageType("update", MessageSchema(arrays=base.round_arrays(spec)), MessageSchema()),
        )

    def server(self, spec: RunSpec) -> base.ServerAggregator:
        """Return the side that sends."""
        return _ModelBroadcastServer(spec)

    def silo(self, spec: RunSpec, context: base.SiloContext) -> base.SiloAggregator:
        """Return the side that answers with nothing."""
        return _ModelBroadcastSilo()


@dataclass(frozen=True)
class _ModelBroadcastServer:
    spec: RunSpec

    def set_up(self, context: base.ServerContext) -> None:
        """Do nothing."""

    def total(
        self, context: base.ServerContext, round_: int, arrays: Mapping[str, np.ndarray]
    ) -> Tensor | None:
        """Send the model; a silo that is gone misses it where silos may be missing."""
        import torch

        request = Message("update", self.spec.run, round_, arrays=dict(arrays))
        requests = {name: request for name in self.spec.names}
        # Where every silo must answer a round, every silo must get the model that is evaluated, too.
        if self.spec.min_silos == len(self.spec.names):
            context.ask_all(requests)
        else:
            context.ask(requests)
        return torch.zeros(0, dtype=torch.float64)


class _ModelBroadcastSilo:
    handlers: Mapping[str, base.Handler] = {}

    def group_secret(self, run: str) -> bytes:
        raise NotImplementedError("no users are sampled where nothing is added up")

    def update(self, request: Message, work: base.LocalUpdateFn) -> tuple[Message, int]:
        return request.answer(), 0
