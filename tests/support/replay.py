"""Two runs on neighboring federations with the same coins, of which every draw of noise and every message is recorded.

    with record() as first:  # of the federation
        train(...)
    with record(first) as second:  # of its neighbor, in which one unit is removed
        train(...)

The second run is fed what the first one released: wherever noise is added to a sum, the sum is recorded and the first
run's noisy sum is returned, and every round ends with the first run's total. So both are in the same state whenever a
sum is computed, and sums differ by what the unit adds. Nothing is estimated, and no noise hides a difference.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from silodp.accounting import events
from silodp.accounting.ledger import Ledger
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto import sampling
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.mechanisms import noise
from silodp.mechanisms.noise import Randomness
from silodp.runtime.server import Server
from silodp.wire.messages import Message
from silodp.wire.transport import SignedChannel

Purpose = tuple[str | int, ...]
Array = np.ndarray[Any, Any]
Place = tuple[str, int]
"""The name of a series ("" for training), and a round."""

_RECORDS_DRAWN = 256
"""Coins that are tossed for a batch; the records take the first ones, so that removing the last moves no other's."""
_BY_RECORDS = ("batches", "admit")
"""Purposes of streams of which a silo draws as many numbers as it has records: the coins, which stay in the silo."""
_ROUNDING = 1e-9
"""The part of what is charged by which a sum may move farther: sums in double precision are rounded."""


# --- what is recorded ---


@dataclass(eq=False)
class Draw:
    """A draw of noise.

    Attributes:
        purpose: The purpose of its stream.
        function: The name of the function that draws it.
        size: The number of values.
        scale: Their standard deviation, in units of `exact`.
        exact: What the noise is added to, (size,); None where it is added elsewhere, as under encryption.
        noisy: The sum of both, as the run continues with it.
    """

    purpose: Purpose
    function: str
    size: int
    scale: float
    exact: Array | None = None
    noisy: Any = None

    @property
    def silo(self) -> str:
        """The silo that drew it."""
        return str(self.purpose[self.purpose.index("silo") + 1])

    @property
    def place(self) -> Place:
        """The series and the round that it is for."""
        before = self.purpose.index("silo")
        return "/".join(map(str, self.purpose[:before])), int(self.purpose[before + 3])

    @property
    def step(self) -> Purpose:
        """The purpose after that of the silo, the same for all shares of one sum."""
        return self.purpose[self.purpose.index("silo") + 2 :]


@dataclass
class Trace:
    """What is recorded of a run.

    Attributes:
        draws: The draws of noise, in order.
        streams: All draws from streams, in order: purpose, function of the generator, number of values.
        messages: All messages, in order: silo, kind, round, attempt, and the size of every part.
        charges: All charges, in order: "server" or the name of a silo, series, round, release and events.
        totals: What the server computed in each round.
        specs: The specifications of the run and its series.
    """

    draws: list[Draw] = field(default_factory=list)
    streams: list[tuple[Purpose, str, int]] = field(default_factory=list)
    messages: list[tuple[Any, ...]] = field(default_factory=list)
    charges: list[tuple[Any, ...]] = field(default_factory=list)
    totals: dict[Place, torch.Tensor] = field(default_factory=dict)
    specs: dict[str, RunSpec] = field(default_factory=dict)

    def find_events(self, place: Place, ledger: str = "server") -> dict[str, events.Event]:
        """Return the events by adversary that a ledger charged for a round, all releases together; {}: nothing."""
        charged = [dict(charge[4]) for charge in self.charges if charge[:3] == (ledger, *place)]
        return {
            adversary: events.Composed(tuple(release[adversary] for release in charged))
            for adversary in (charged[0] if charged else ())
        }

    def number_draws(self) -> dict[tuple[Purpose, int], Draw]:
        """Return the draws by their purpose and their number among those of the same purpose."""
        seen: Counter[Purpose] = Counter()
        found = {}
        for draw in self.draws:
            found[draw.purpose, seen[draw.purpose]] = draw
            seen[draw.purpose] += 1
        return found


class _Stream(np.random.Generator):
    """A stream that tells what is drawn from it."""

    purpose: Purpose = ()
    streams: list[tuple[Purpose, str, int]]

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or name in ("purpose", "streams", "bit_generator"):
            return found

        def draw(*arguments: Any, **named: Any) -> Any:
            drawn = found(*arguments, **named)
            size = len(drawn) if isinstance(drawn, bytes) else np.size(drawn)
            self.streams.append((self.purpose, name, size))
            return drawn

        return draw


class _GaussianNoise(torch.Tensor):
    """Noise that tells what it is added to: the sum asks the right operand first, as its class is the special one."""

    meet: Callable[[Any, Any], Any]

    def __radd__(self, exact: Any) -> Any:
        return self.meet(exact, exact + self.as_subclass(torch.Tensor))

    __add__ = __radd__


class _SkellamNoise(np.ndarray):  # type: ignore[type-arg]
    """The same in integers; what is made of it by other operations is ordinary."""

    meet: Callable[[Any, Any], Any] | None = None

    def __radd__(self, exact: Any) -> Any:
        noisy = exact + self.view(np.ndarray)
        return noisy if self.meet is None else self.meet(exact, noisy)

    __add__ = __radd__


_DRAWING = ("draw_gaussian", "draw_skellam", "draw_poisson_sample")


@cache
def _import_drawing() -> None:
    """Import all modules of installed packages that name a function of noise: imported later, they would escape."""
    packages = {
        name: module for name, module in sys.modules.items() if name.startswith("silodp") and "." not in name
    }
    for name, package in packages.items():
        folder = Path(package.__path__[0])
        for file in folder.rglob("*.py"):
            if any(function in file.read_text() for function in _DRAWING):
                importlib.import_module(".".join((name, *file.relative_to(folder).with_suffix("").parts)))


class _Recorder:
    """The patches that record a run."""

    def __init__(self, first: Trace | None) -> None:
        self.trace, self._first = Trace(), first
        self._known = {} if first is None else first.number_draws()
        self._seen: Counter[Purpose] = Counter()
        self._cells = np.random.default_rng(0)

    def patch(self, stack: ExitStack) -> None:
        """Record within the stack."""
        _import_drawing()
        for name, wrapped in zip(_DRAWING, (self._gaussian, self._skellam, self._sample), strict=True):
            original = getattr(noise, name)
            # In every module that has imported it, whichever that is: nobody draws unseen.
            for module in [m for n, m in sys.modules.items() if n.partition(".")[0].startswith("silodp")]:
                if vars(module).get(name) is original:
                    stack.enter_context(patch.object(module, name, wrapped(original)))
        for owner, name, wrapped in (
            (Randomness, "stream", self._stream),
            (SignedChannel, "ask", self._ask),
            (Server, "run_round", self._run_round),
            (Ledger, "charge", self._charge),
            # These come from the operating system in every run; both runs draw the same persons.
            (sampling, "draw_server_cells", self._draw_cells),
            (sampling, "derive_silo_cells", lambda _: lambda *given: np.zeros(given[2], np.int64)),
        ):
            stack.enter_context(patch.object(owner, name, wrapped(getattr(owner, name))))

    def _stream(self, stream: Any) -> Any:
        def named(randomness: Randomness, *purpose: str | int) -> _Stream:
            found = _Stream(stream(randomness, *purpose).bit_generator)
            found.purpose, found.streams = (*randomness.prefix, *purpose), self.trace.streams
            return found

        return named

    def _note(self, function: str, size: int, scale: float, stream: _Stream) -> Callable[[Any, Any], Any]:
        draw = Draw(stream.purpose, function, size, scale)
        self.trace.draws.append(draw)
        known = self._known.get((draw.purpose, self._seen[draw.purpose]))
        self._seen[draw.purpose] += 1

        def meet(exact: Any, noisy: Any) -> Any:
            draw.exact = exact.numpy().copy() if isinstance(exact, torch.Tensor) else exact.copy()
            draw.noisy = noisy if known is None or known.noisy is None else known.noisy
            return draw.noisy.clone() if isinstance(draw.noisy, torch.Tensor) else draw.noisy.copy()

        return meet

    def _gaussian(self, draw: Any) -> Any:
        def noted(size: int, std: float, stream: _Stream) -> Any:
            found = draw(size, std, stream).as_subclass(_GaussianNoise)
            found.meet = self._note("draw_gaussian", size, std, stream)
            return found

        return noted

    def _skellam(self, draw: Any) -> Any:
        def noted(size: int, variance: float, stream: _Stream) -> Any:
            found = draw(size, variance, stream).view(_SkellamNoise)
            found.meet = self._note("draw_skellam", size, variance**0.5, stream)
            return found

        return noted

    def _sample(self, draw: Any) -> Any:
        def coupled(count: int, q: Any, stream: _Stream) -> Any:
            if stream.purpose[-1] not in _BY_RECORDS:
                return draw(count, q, stream)
            assert count <= _RECORDS_DRAWN
            return stream.random(_RECORDS_DRAWN)[:count] < q

        return coupled

    def _draw_cells(self, _: Any) -> Any:
        return lambda users, ratio: self._cells.integers(ratio.denominator, size=users)

    def _ask(self, ask: Any) -> Any:
        def noted(channel: SignedChannel, requests: Any, timeout: Any = None) -> Any:
            answers, failures = ask(channel, requests, timeout)
            for kind, sent in (("request", requests), ("answer", answers)):
                self.trace.messages += [(kind, name, *_measure(sent[name])) for name in sorted(sent)]
            self.trace.messages += [("failure", name, failures[name].code) for name in sorted(failures)]
            return answers, failures

        return noted

    def _run_round(self, run_round: Any) -> Any:
        def noted(server: Server, round_: int, *arguments: Any, **named: Any) -> Any:
            place = (server.ledger.series, round_)
            self.trace.specs[place[0]] = server.spec
            total = run_round(server, round_, *arguments, **named)
            if total is None:
                return None
            self.trace.totals[place] = total.clone()
            return total if self._first is None else self._first.totals.get(place, total).clone()

        return noted

    def _charge(self, charge: Any) -> Any:
        def noted(ledger: Ledger, round: int, release: int, charged: Any, *more: Any, **named: Any) -> None:
            series = named.get("series", more[1] if len(more) > 1 else "")
            who = ledger.silo or "server"
            self.trace.charges.append((who, series, round, release, tuple(charged.items())))
            charge(ledger, round, release, charged, *more, **named)

        return noted


def _measure(message: Message) -> tuple[Any, ...]:
    """Return all about a message but its values."""
    arrays = {name: (str(array.dtype), array.shape) for name, array in sorted(message.arrays.items())}
    blobs = {name: len(blob) for name, blob in sorted(message.blobs.items())}
    place = message.kind, message.round, message.attempt
    return (*place, sorted(message.fields), arrays, blobs, len(message.encode()))


@contextmanager
def record(first: Trace | None = None) -> Iterator[Trace]:
    """Record a run in this process.

    Args:
        first: The run whose releases this one is fed; None: this is the first one.
    """
    recorder = _Recorder(first)
    with ExitStack() as stack:
        recorder.patch(stack)
        yield recorder.trace


# --- neighbors ---


def remove_person(federation: Federation, person: int) -> Federation:
    """Return the federation without any record of a person, held-out ones included."""
    return _keep(federation, lambda silo: silo.user != person)


def remove_record(federation: Federation, place: int) -> Federation:
    """Return the federation without the last record of a silo, and its last held-out one."""
    name = federation.silos[place].name
    return _keep(federation, lambda silo: np.arange(len(silo)) < len(silo) - (silo.name == name))


def put_last(federation: Federation, person: int) -> Federation:
    """Return the federation with a person's records after those of others, so that their coins are the last ones."""
    return _select(federation, lambda silo: np.argsort(silo.user == person, kind="stable"))


def _keep(federation: Federation, find: Callable[[SiloData], Array]) -> Federation:
    return _select(federation, lambda silo: np.flatnonzero(find(silo)))


def _select(federation: Federation, choose: Callable[[SiloData], Array]) -> Federation:
    def select(silo: SiloData) -> SiloData:
        chosen = choose(silo)
        return replace(
            silo,
            x=silo.x[chosen],
            y=silo.y[chosen],
            user=silo.user[chosen],
            budget=None if silo.budget is None else silo.budget[chosen],
            test=None if silo.test is None else select(replace(silo.test, name=silo.name)),
        )

    return replace(federation, silos=tuple(map(select, federation.silos)))


# --- what is compared ---


def find_differences(first: Trace, second: Trace) -> list[str]:
    """Return in what the runs differ besides values: draws of noise, messages, charges. All of it must be public."""

    def describe(draws: Iterable[Draw]) -> list[Any]:
        added = [(draw, draw.exact is not None) for draw in draws]
        return [(one.purpose, one.function, one.size, one.scale, is_added) for one, is_added in added]

    def leave_out(streams: Iterable[tuple[Purpose, str, int]]) -> list[Any]:
        return [stream for stream in streams if stream[0][-1] not in _BY_RECORDS]

    compared = {
        "noise": (describe(first.draws), describe(second.draws)),
        "streams": (leave_out(first.streams), leave_out(second.streams)),
        "messages": (first.messages, second.messages),
        "charges": (first.charges, second.charges),
        "rounds": (list(first.totals), list(second.totals)),
    }
    return [f"{what}: {_find_first(*both)}" for what, both in compared.items() if both[0] != both[1]]


def _find_first(first: list[Any], second: list[Any]) -> str:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return f"number {place} is {one} and {other}"
    return f"{len(first)} and {len(second)}"


@dataclass(frozen=True)
class Moves:
    """How far a unit moves what is released in a round, in standard deviations of the noise, squared: Σ‖Δ‖²/σ².

    Attributes:
        released: Where shares of one sum are added up before they are seen.
        shares: Where each share is seen.
        silo: The most that a silo sees of the others' shares, whose own noise it can subtract.
        moved: The silos whose shares it moves; all of them where shares are added up under encryption.
    """

    released: float = 0.0
    shares: float = 0.0
    silo: float = 0.0
    moved: frozenset[str] = frozenset()


def find_excess(first: Trace, second: Trace, unit: float = 1.0, rounding: float = _ROUNDING) -> list[str]:
    """Return where the removed unit moves more than was charged: by round, ledger and adversary.

    The server's ledger is compared, and that of every silo in which the unit has records.

    Args:
        first: The run of the federation.
        second: The run of its neighbor, fed with the first one's releases.
        unit: The length of what `Draw.scale` counts, in units of the total, where silos add noise under encryption.
        rounding: The part of what is charged by which a sum may move farther.
    """
    found = []
    for place, moves in measure_moves(first, second, unit).items():
        spec = first.specs[place[0]]
        seen = {
            "released": moves.released,
            "server": moves.shares if spec.views()["server"].sees_shares else moves.released,
            "silo": moves.silo,
        }
        answered = {charge[0] for charge in first.charges if charge[1:3] == place} - {"server"}
        for ledger in ("server", *sorted(moves.moved & answered)):
            charged = first.find_events(place, ledger)
            for adversary, moved in seen.items():
                most = compute_precision(charged.get(adversary, events.Composed(())))
                if moved > most * (1 + rounding):
                    found.append(
                        f"{place}: {moved:.6g} against '{adversary}', {most:.6g} is charged by {ledger}"
                    )
    return found


def measure_moves(first: Trace, second: Trace, unit: float = 1.0) -> dict[Place, Moves]:
    """Return how far the removed unit moves what is released in every round, by the arguments of `find_excess`."""
    steps: dict[Place, dict[Any, _Step]] = {place: defaultdict(dict) for place in first.totals}
    others = second.number_draws()
    for (purpose, number), draw in first.number_draws().items():
        other = others.get((purpose, number))
        if draw.exact is not None and other is not None and other.exact is not None:
            moved = draw.exact.astype(np.float64) - other.exact
            steps[draw.place][draw.step, number][draw.silo] = moved, draw.scale**2
    found = {}
    for place, total in first.totals.items():
        moves = _measure_round(list(steps[place].values()), first.specs[place[0]])
        # What was fed is the same in both runs. A total that still moves has noise that was added elsewhere, or none.
        variance = sum(
            (one.scale * unit) ** 2 for one in first.draws if one.place == place and one.exact is None
        )
        rest = _compute_ratio((total - second.totals[place]).numpy(), variance)
        moved = frozenset(first.specs[place[0]].names) if rest else moves.moved
        found[place] = replace(moves, released=moves.released + rest, shares=moves.shares + rest, moved=moved)
    return found


_Step = dict[str, tuple[Array, float]]
"""By silo: how far the unit moves its share of one sum, and the variance of the noise."""


def _measure_round(steps: list[_Step], spec: RunSpec) -> Moves:
    def add_up(step: _Step) -> float:
        moved = sum((moved for moved, _ in step.values()), np.zeros(()))
        return _compute_ratio(moved, sum(variance for _, variance in step.values()))

    def keep_apart(step: _Step) -> float:
        return sum(_compute_ratio(moved, variance) for moved, variance in step.values())

    # Blocks of silos lie side by side in the sum, each under its own noise.
    in_blocks = any(moved.size != spec.sum_size for step in steps for moved, _ in step.values())
    join = keep_apart if in_blocks else add_up
    by_silo = (
        sum(join({name: share for name, share in step.items() if name != own}) for step in steps)
        for own in spec.names
    )
    silos = frozenset(name for step in steps for name, (moved, _) in step.items() if moved.any())
    return Moves(sum(map(join, steps)), sum(map(keep_apart, steps)), max(by_silo), silos)


def _compute_ratio(moved: Array, variance: float) -> float:
    squared = float(np.square(moved).sum())
    return 0.0 if squared == 0 else squared / variance if variance > 0 else np.inf


def compute_precision(event: events.Event) -> float:
    """Return Σ1/σ² over the releases of an event whose units are in every sample: the most that one may move them."""
    match event:
        case events.Gaussian(sigma) | events.Skellam(sigma):
            return sigma**-2 if sigma else np.inf
        case events.CorrelatedReleases(one, other):
            return compute_precision(one) + compute_precision(other)
        case events.SelfComposed(inner, count):
            return count * compute_precision(inner)
        case events.Composed(parts):
            return sum(map(compute_precision, parts))
        case events.WorstOf(alternatives):
            return max(map(compute_precision, alternatives))
        case events.Group(size, inner):
            return size**2 * compute_precision(inner)
        case events.NonPrivate():
            return np.inf
    return compute_precision(event.event)
