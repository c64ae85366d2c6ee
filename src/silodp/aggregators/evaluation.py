"""The specification of a run's evaluation: a second run of the same silos, whose method adds up counts.

Server and silos treat it as they treat any run: with the same messages, masks, gate, stored answers and noise. Its
charges are in the ledger of the run that is evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from silodp.accounting.accountant import choose_accountant
from silodp.accounting.calibration import calibrate_noise_multiplier
from silodp.accounting.events import Event
from silodp.accounting.guarantee import SERVER_FOLLOWS
from silodp.accounting.views import View
from silodp.aggregators import base
from silodp.aggregators.run_spec import RunSpec
from silodp.assumption import as_assumptions
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.methods.count_parts import CountParts
from silodp.methods.evaluation import NOTHING, Evaluation, EvaluationSums, LocalEvaluation
from silodp.methods.statistics import MAX_CELLS
from silodp.training.counts import CountTable
from silodp.training.places import MOST_CLASSES
from silodp.wire.messages import Message
from silodp.wire.schemas import MessageSchedule, MessageSchema, MessageType

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIX = "-evaluation"


def derive_evaluation(spec: RunSpec, settings: Evaluation) -> RunSpec:
    """Return the specification of the evaluation of a run.

    Args:
        spec: the specification of the run.
        settings: those of its evaluation, in which silos are asked something.

    Raises:
        SilodpError: the evaluation is not proven for this run, or its counts say nothing of its labels
            (codes evaluation.*).
    """
    # The evaluation has no evaluation, and its charges are in the ledger of the run, which alone has a budget.
    base_spec = replace(spec, evaluation=None, budget=None, run=spec.run and name_evaluation(spec.run))
    if settings.across == "local":
        return replace(base_spec, method=LocalEvaluation(spec.method.unit), aggregator=ModelBroadcast())
    _check_sums(spec)
    aggregator = _find_aggregator(spec)
    table, parts = choose_table(spec.data, settings), settings.make_parts(len(spec.names))
    _check_parts(spec.data, settings, table.size, parts)

    def with_noise(noise_multiplier: float) -> RunSpec:
        clip = settings.clip if spec.method.unit == "user" else 1.0
        method = EvaluationSums(spec.method.unit, noise_multiplier, clip, table, parts)
        return replace(base_spec, method=method, aggregator=aggregator, rounds=spec.most_evaluations)

    noise_multiplier = settings.noise_multiplier
    if noise_multiplier is None:
        noise_multiplier = calibrate_one_release(with_noise, settings.epsilon or 0.0, spec.noise_delta)
    derived = with_noise(noise_multiplier)
    aggregator.check(derived)
    _check_promise(spec, derived)
    return derived


def calibrate_one_release(with_noise: Callable[[float], RunSpec], epsilon: float, delta: float) -> float:
    """Return the σ at which one release costs ε against whoever sees it.

    Args:
        with_noise: Returns the specification of the release with a σ.
        epsilon: ε.
        delta: The δ that noise is accounted at.

    Returns:
        σ, rounded up to three figures, so that all parties find the same one.
    """

    def event(noise_multiplier: float) -> Event:
        return with_noise(noise_multiplier).round_events()["released"]

    # For whoever gets the results; every adversary is then charged by its own view.
    found = calibrate_noise_multiplier(
        lambda noise: [(event(noise), 1)], epsilon, delta, choose_accountant([event(1.0)])
    )
    # Less one part in 10⁹, so that a number that has three figures already is not rounded up to the next one. The tail
    # that floating point leaves is cut, since σ is in what silos sign.
    step = 10.0 ** (math.floor(math.log10(found)) - 2)
    return round(math.ceil(found / step * (1 - 1e-9)) * step, 10)


def name_evaluation(run: str) -> str:
    """Return the id under which silos are asked about the evaluation of a run."""
    return run + _SUFFIX


def find_run(name: str) -> str:
    """Return the id of the run that a message belongs to, be it about the run or its evaluation."""
    return name.removesuffix(_SUFFIX)


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
        kind = "places" if data.classes <= MOST_CLASSES else "tokens"
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
    """Return the aggregator of the counts, which the run's names (`Aggregator.evaluation_aggregator`).

    Raises:
        SilodpError: it names none (code evaluation.aggregator).
    """
    found = spec.aggregator.evaluation_aggregator(spec)
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
            'evaluation.across = "local" or "none", or return another aggregator from evaluation_aggregator.',
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
