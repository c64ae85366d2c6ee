"""What an evaluation tells: metrics of noisy sums of counts, and those that a silo measures for itself alone."""

from __future__ import annotations

import json
import logging
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silodp.aggregators.run_spec import RunSpec
from silodp.data.silo_data import SiloData
from silodp.parsing import MALFORMED, parse_json
from silodp.runtime.run_files import MetricsRow
from silodp.runtime.simulation import measure_records
from silodp.training.task import Task
from silodp.wire.files import PRIVATE_FILE, append_durably
from silodp_analytics.count_parts import CountParts
from silodp_analytics.counts import MIN_CERTAINTY, CountTable
from silodp_analytics.evaluation.methods import EvaluationSums

_log = logging.getLogger(__name__)


def describe_counts(
    method: EvaluationSums, spec: RunSpec, total: np.ndarray, least_group: int = 30
) -> MetricsRow:
    """Return the entries of a row of metrics.jsonl that follow from noisy sums.

    Args:
        method: The method of the evaluation.
        spec: The specification of the evaluation.
        total: The sum over silos, or the blocks of all silos, (sum_size,) float64.
        least_group: The fewest records, by noisy counts, of a part whose metrics are shown.
    """
    parts, table = method.parts or CountParts(), method.table
    # Where the unit is a person and counts are added up, every silo has weighted them by 1/S.
    scaled = torch.from_numpy(np.asarray(total, np.float64)) * method.spread(spec.population)
    blocks = scaled.reshape(parts.silos, parts.tables, table.size)
    std = method.count_std(spec.population)
    over_silos, over_silos_std = blocks.sum(0), std * math.sqrt(parts.silos)
    counts, factor = parts.pool(over_silos)
    noise_std = over_silos_std * factor
    estimates, confusion = table.estimate(counts, noise_std), table.confusion(counts)
    found: list[tuple[str, str, Tensor, float]] = []
    if method.by_silo:
        found += [
            ("silo", name, parts.pool(block)[0], std * factor)
            for name, block in zip(spec.names, blocks, strict=True)
        ]
    found += [
        (column, name, over_silos[number], over_silos_std) for column, name, number in parts.list_tables()
    ]
    evaluation = {
        "noise_std": round(noise_std, 6),
        "estimates": {name: asdict(estimate) for name, estimate in estimates.items()},
        "confusion": None if confusion is None else confusion.round(decimals=3).tolist(),
        # Those of places are the confusion matrix, of which no curve of calibration can be drawn.
        "counts": []
        if table.kind == "dense_labels"
        else counts.reshape(table.shape).round(decimals=3).tolist(),
    }
    if table.kind == "survival":
        evaluation["times"] = list(table.times)
    if found:
        evaluation["least_group"] = least_group
        evaluation["parts"] = [_describe_part(table, least_group, *part) for part in found]
    metrics = {name: estimate.value for name, estimate in estimates.items()}
    return {"loss": None, "metrics": metrics, "evaluation": evaluation}


def _describe_part(
    table: CountTable, least_group: int, of: str, name: str, counts: Tensor, noise_std: float
) -> dict[str, Any]:
    """Return the noisy metrics of a silo or a subgroup; without them where it has too few records, or seems to."""
    records = table.count_records(counts)
    # The rule looks at noisy counts and public numbers alone, so that what is not shown says nothing more.
    shown = records >= max(least_group, MIN_CERTAINTY * table.count_std(noise_std))
    estimates = table.estimate(counts, noise_std) if shown else {}
    by_step = {}
    if shown and of == "silo" and table.kind == "scores":  # a silo may correct its outputs by them
        by_step["counts"] = counts.reshape(table.shape).round(decimals=3).tolist()
    return {
        "of": of,
        "name": name,
        "shown": shown,
        "records": round(records, 1) if shown else None,
        "noise_std": round(noise_std, 6),
        "estimates": {metric: asdict(estimate) for metric, estimate in estimates.items()},
        **by_step,
    }


@dataclass(frozen=True)
class LocalMetrics:
    """What a silo measures for itself alone: none of it leaves the silo, and no ε covers it.

    Attributes:
        data: Held-out records.
        task: The model, its loss and its metrics.
        path: A file, one line for each model; None keeps nothing.
    """

    data: SiloData
    task: Task
    path: Path | None

    def note(self, run: str, params: Tensor, rounds: int) -> None:
        """Evaluate a model and append a line to the file, once for each model.

        Args:
            run: Id of the evaluation.
            params: The parameters (d,) of the model.
            rounds: Number of rounds that led to it.
        """
        place = {"run": run, "round": rounds}
        if place in self._list_places():
            return
        measured = measure_records(self.task, params.to(self.task.device), self.data)
        line = {**place, "records": len(self.data), **measured}
        if self.path is not None:
            append_durably(self.path, json.dumps(line).encode(), PRIVATE_FILE)
        _log.info(
            "silo '%s' evaluated the model after round %d on its %d held-out records: the metrics are in %s, and none "
            "of them was sent",
            self.data.name, rounds, len(self.data), self.path,
        )  # fmt: skip

    def _list_places(self) -> list[dict[str, object]]:
        if self.path is None or not self.path.exists():
            return []
        found = []
        for line in self.path.read_bytes().splitlines():
            with suppress(*MALFORMED):  # a line that a crash cut off: that model is evaluated again
                row = parse_json(line)
                found.append({"run": row["run"], "round": row["round"]})
        return found
