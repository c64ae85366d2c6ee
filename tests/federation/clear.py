"""Aggregators that add up in clear the integers that others hide: same grid, same weights, same seeded noise shares."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch

from silodp.federation.aggregation import Own, Setting, Work
from silodp.federation.masked import Masked
from silodp.federation.messages import Message
from silodp.mechanisms.clipping import Finished
from silodp.mechanisms.grid import Grid, fixed_point


@dataclass(frozen=True)
class MaskedInClear(Masked):
    def server(self, setting: Setting):
        return _Server(self, setting)

    def silo(self, setting: Setting, own: Own):
        return _Silo(self, setting)


@dataclass(frozen=True)
class _Server:
    aggregator: Masked
    setting: Setting

    def set_up(self, desk):
        pass

    def total(self, desk, round_, arrays):
        if not desk.charge(round_, 0, self.setting.population.silos):
            return None
        request = Message("update", self.setting.run, round_, arrays=dict(arrays))
        answers = desk.ask_all({name: request for name in self.setting.names})
        _, step = self.aggregator.ring(self.setting)
        return torch.from_numpy(np.sum([a.arrays["integers"] for a in answers.values()], axis=0) * step)


@dataclass(frozen=True)
class _Silo:
    aggregator: Masked
    setting: Setting
    handlers = {}  # noqa: RUF012

    def update(self, request: Message, work: Work):
        update, weights, noise = work(0)
        if isinstance(update, Finished):
            return request.answer(
                integers=fixed_point(update.value, self.setting.population.silos)
            ), update.refused
        share = Grid.for_(update.bounds, self.aggregator.units).fold(update, weights).release(noise)
        return request.answer(integers=share.value), share.refused


def described(result) -> str:
    """Everything two equal runs share."""
    return json.dumps([result.params.tolist(), [row["metrics"] for row in result.metrics]])
