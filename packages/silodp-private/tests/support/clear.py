"""Aggregators that add up in clear the integers that others hide: same grid, same weights, same seeded noise shares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest
import torch

from silodp.aggregators.base import LocalUpdateFn, SiloContext, round_arrays, setup_kinds
from silodp.aggregators.masked import Masked
from silodp.aggregators.run_spec import RunSpec
from silodp.mechanisms.clipping import LocallyNoisedUpdate
from silodp.mechanisms.noise import draw_skellam
from silodp.mechanisms.quantization import Quantizer, to_fixed_point
from silodp.runtime.server import Server
from silodp.wire.messages import Message
from silodp.wire.schemas import Array, MessageSchedule, MessageSchema, MessageType, is_roster, is_whole
from silodp_private.crypto.primary_silos import PrimarySiloParameters
from silodp_private.lattice import Lattice
from silodp_private.paillier.aggregator import Paillier
from silodp_private.select import Select


@dataclass(frozen=True)
class MaskedInClear(Masked):
    def script(self, spec: RunSpec, name: str):
        integers = MessageSchema(arrays={"integers": Array("int64", (spec.size,))})
        return MessageSchedule(
            setup_kinds(spec), MessageType("update", MessageSchema(arrays=round_arrays(spec)), integers)
        )

    def server(self, spec: RunSpec):
        return _Server(self, spec)

    def silo(self, spec: RunSpec, own: SiloContext):
        return _Silo(self, spec)


@dataclass(frozen=True)
class _Server:
    aggregator: Masked
    spec: RunSpec

    def set_up(self, desk):
        pass

    def total(self, desk, round_, arrays):
        if not desk.charge(round_, 0, self.spec.population.silos):
            return None
        request = Message("update", self.spec.run, round_, arrays=dict(arrays))
        answers = desk.ask_all({name: request for name in self.spec.names})
        _, step = self.aggregator.ring(self.spec)
        return torch.from_numpy(np.sum([a.arrays["integers"] for a in answers.values()], axis=0) * step)


@dataclass(frozen=True)
class _Silo:
    aggregator: Masked
    spec: RunSpec
    handlers = {}  # noqa: RUF012

    def update(self, request: Message, work: LocalUpdateFn):
        own = work(0)
        update, weights = own.compute_update(), torch.from_numpy(own.release.weights)
        if isinstance(update, LocallyNoisedUpdate):
            return request.answer(
                integers=to_fixed_point(update.value, self.spec.population.silos)
            ), update.refused
        share = Quantizer.from_bounds(self.spec.bounds, self.aggregator.units).add_noise(
            update, weights, own.noise
        )
        return request.answer(integers=share.value), share.refused


# --- weights by records: Σ_s (Σ_u v_u·n[s,u]·Δ[s,u] + noise_s), in Python's integers ---


class _Weighted:
    drawn: Mapping[int, np.ndarray] = MappingProxyType({})
    """By round, the sample β (U,) that nobody knew; see `support.private.hidden_samples`."""

    def script(self, spec: RunSpec, name: str):
        """As of attempts that are opened, with the weights and the answers in clear."""
        users = spec.population.users
        counts = MessageType("counts", answer=MessageSchema(arrays={"counts": Array("int64", (users,))}))
        fields = {"release": is_whole, "roster": is_roster(spec.names)}
        arrays = round_arrays(spec)
        return MessageSchedule(
            (*setup_kinds(spec, weights_privately=True), counts),
            MessageType(
                "update", MessageSchema(fields | {"v": bool}, arrays), MessageSchema({"integers": bool})
            ),
            open=MessageType("open", MessageSchema(fields | {"request": bool})),
        )

    def server(self, spec: RunSpec):
        return _WeightedServer(self, spec)

    def silo(self, spec: RunSpec, own: SiloContext):
        return _WeightedSilo(self, spec, own.identity.name)

    def weights(self, spec, counts: np.ndarray) -> np.ndarray:
        """What rows are multiplied by, (S, U), from the counts (S, U)."""
        capped = np.minimum(counts, self.count_cap)
        v = [self.reciprocal(spec, int(total)) for total in capped.sum(axis=0)]
        return np.array(v, dtype=object) * capped


@dataclass(frozen=True)
class LatticeInClear(_Weighted, Lattice):
    """v_u = ⌊2^k/N[u]⌋; noise 2^r·Skellam + centered uniform of width 2^r."""

    def reciprocal(self, spec, total: int) -> int:
        return 2**self.weight_bits // total if total else 0

    def grid(self, spec) -> Quantizer:
        return Quantizer(spec.bounds.clip, self.parameters(spec).clip_units)

    def noise(self, spec, stream) -> list[int]:
        shift = self.weight_bits + int(np.log2(self.grid(spec).units)) - 17
        std = spec.bounds.noise_multiplier * self.grid(spec).units * 2.0 ** (self.weight_bits - shift)
        coarse = draw_skellam(spec.size, std**2, stream)
        fine = stream.integers(-(2 ** (shift - 1)), 2 ** (shift - 1), spec.size)
        return [int(z) * 2**shift + int(e) for z, e in zip(coarse, fine, strict=True)]

    def value(self, spec, total: list[int]) -> np.ndarray:
        return np.array(total, np.float64) / 2**self.weight_bits * self.grid(spec).step


@dataclass(frozen=True)
class PaillierInClear(_Weighted, Paillier):
    """v_u = C/(N[u]+1) with C = lcm(1..S·n_max+1); noise C·Skellam + centered uniform of width C."""

    def scale(self, spec) -> int:
        return int(np.lcm.reduce(np.arange(1, spec.population.silos * self.count_cap + 2, dtype=object)))

    def reciprocal(self, spec, total: int) -> int:
        assert self.scale(spec) % (total + 1) == 0
        return self.scale(spec) // (total + 1)

    def noise(self, spec, stream) -> list[int]:
        scale, std = self.scale(spec), spec.bounds.noise_multiplier * self.grid(spec).units
        coarse = draw_skellam(spec.size, std**2, stream)
        width = (scale.bit_length() + 128 + 7) // 8
        drawn = stream.bytes(width * spec.size)
        fine = [int.from_bytes(drawn[i : i + width], "little") for i in range(0, len(drawn), width)]
        return [int(z) * scale + e % scale - scale // 2 for z, e in zip(coarse, fine, strict=True)]

    def value(self, spec, total: list[int]) -> np.ndarray:
        scale = self.scale(spec)
        return np.array([(2 * x + scale) // (2 * scale) for x in total]) * self.grid(spec).step


@dataclass(frozen=True)
class SelectInClear(_Weighted, Select):
    """1 in the primary silo; noise on the grid."""

    def weights(self, spec, counts: np.ndarray) -> np.ndarray:
        primary = PrimarySiloParameters(bytes(32), counts.shape[1], len(counts)).find_primary_silos(counts)
        return primary.astype(object)

    def noise(self, spec, stream) -> list[int]:
        std = spec.bounds.noise_multiplier * self.grid(spec).units
        return draw_skellam(spec.size, std**2, stream).tolist()

    def value(self, spec, total: list[int]) -> np.ndarray:
        return np.array(total) * self.grid(spec).step


@dataclass(frozen=True)
class _WeightedServer:
    aggregator: LatticeInClear | PaillierInClear
    spec: RunSpec

    def set_up(self, desk):
        pass

    def total(self, desk, round_, arrays):
        """Asks again without who fails; once anyone was asked to open, the next try has fresh noise and is charged."""
        run, roster, attempt, release = self.spec.run, self.spec.names, 0, 0
        counts = desk.ask_all({name: Message("counts", run) for name in roster})
        weights = self.aggregator.weights(
            self.spec, np.array([counts[name].arrays["counts"] for name in roster])
        )
        sample = arrays.get("sample", np.ones(weights.shape[1], int))
        if self.aggregator.sampled_by == "nobody":
            sample = self.aggregator.drawn[round_]
        drawn = [[str(w * int(b)) for w, b in zip(row, sample, strict=True)] for row in weights]
        v = dict(zip(roster, drawn, strict=True))
        while True:
            fields = {"v": v, "release": release, "roster": list(roster)}
            update = Message("update", run, round_, attempt, fields, {"params": arrays["params"]})
            answers, failures = desk.ask({name: update for name in roster})
            if not failures:
                if not desk.charge(round_, release, len(roster)):
                    return None
                about = {"release": release, "roster": list(roster), "request": update.digest()}
                opening = Message("open", run, round_, attempt, about)
                _, failures = desk.ask({name: opening for name in roster})
                release += 1
            if not failures:
                parts = [[int(x) for x in answers[name].fields["integers"]] for name in roster]
                total = [sum(of_coordinate) for of_coordinate in zip(*parts, strict=True)]
                return torch.from_numpy(self.aggregator.value(self.spec, total))
            roster, attempt = tuple(name for name in roster if name not in failures), attempt + 1


class _WeightedSilo:
    def __init__(self, aggregator, spec: RunSpec, name: str) -> None:
        self.aggregator, self.spec, self.name = aggregator, spec, name
        self.handlers = {"open": lambda request: request.answer()}

    def update(self, request: Message, work: LocalUpdateFn):
        own = work(request.fields["release"])
        update, stream = own.compute_update(), own.noise
        v, grid = [int(x) for x in request.fields["v"][self.name]], self.aggregator.grid(self.spec)
        total = np.array(self.aggregator.noise(self.spec, stream), dtype=object)
        refused = 0
        for chunk in update.chunks:
            refused += chunk.refused
            for u, row in zip(chunk.owners.tolist(), grid.truncate(chunk), strict=True):
                total += v[u] * row.astype(object)
        answer = Message(request.kind, request.run, request.round, request.attempt)
        answer.fields["integers"] = [str(x) for x in total]
        return answer, refused


@contextmanager
def released() -> Iterator[list[np.ndarray]]:
    """What the server releases inside, round by round."""
    totals: list[np.ndarray] = []
    play = Server.run_round

    def watched(self, round_, params, *state):
        total = play(self, round_, params, *state)
        totals.append(total.numpy().copy())
        return total

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "run_round", watched)
        yield totals


def described(result) -> str:
    """Everything two equal runs share."""
    return json.dumps([result.params.tolist(), [row["metrics"] for row in result.metrics]])
