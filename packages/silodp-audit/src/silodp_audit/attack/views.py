"""What each adversary of a canary run sees of every canary, in the units of scores and tests of noise."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from silodp.accounting.accountant import EventCount
from silodp.accounting.events import Event, RevealedSample, count_kinds, explain_not_private, select_kind
from silodp.accounting.views import Adversary
from silodp.methods.dp_sgd import DpSgd
from silodp_audit.attack.canaries import Canaries, Directions
from silodp_audit.attack.canary_run import CanaryRun
from silodp_audit.attack.scores import Signal, score_whitened

Array = NDArray[np.float64]
MAX_FEATURES = 60
"""Vectors that a whitened score stacks; of more of them, sums over rounds and over silos are stacked."""
_ARRIVED = 0.2
"""Share of the charged shift that members must be able to have moved what is seen by."""


class NotSeen(Exception):
    """A view cannot be read, or says nothing; the text is the reason."""


@dataclass(frozen=True)
class View:
    """What one adversary sees of the canaries.

    Attributes:
        parts: Sums (rounds, n) along all directions, each scored by itself; scores of parts add up.
        signal: How far a canary moves one entry of a part, by the charged event.
        known: Whether the coin that the adversary sees let a canary in, (rounds, n); None: there is no such coin.
        features: Sums (F, n) for the whitened score, and how far a member moves each of them, (F,); None for none.
    """

    parts: tuple[Array, ...] = field(repr=False)
    signal: Signal
    known: NDArray[np.bool_] | None = field(default=None, repr=False)
    features: tuple[Array, Array] | None = field(default=None, repr=False)

    def score(self, directions: Directions) -> dict[str, Array]:
        """Return the scores (n,) of all canaries, by the name of the score.

        Raises:
            NotSeen: no canary moved what is seen.
        """
        total = np.zeros(directions.size)
        for part in self.parts:
            if not len(part):
                raise NotSeen("no round was seen")
            # In units of the noise that is there: which canary has the larger score depends on it little or not at all.
            noise = part[:, directions.spares]
            scale = max(float(np.sqrt(np.mean(noise**2))), 1e-9 * float(np.abs(part).max()), 1e-300)
            standard = part / scale
            self._check_arrival(standard, directions)
            total += self.signal.score(standard, self.known)
        found = {"likelihood": total}
        if self.features is not None:
            seen, direction = self.features
            found["whitened"] = score_whitened(seen, direction, seen[:, directions.spares])
        return found

    def _check_arrival(self, standard: Array, directions: Directions) -> None:
        members = standard[:, directions.members]
        moved = members if self.known is None else members[self.known[:, directions.members]]
        due = self.signal.mean * self.signal.shift
        if not moved.size or moved.mean() + 4 * moved.std() / np.sqrt(moved.size) < _ARRIVED * due:
            raise NotSeen(
                "no canary moved what is seen as far as was charged, so nothing can be told from it"
            )


@dataclass(frozen=True)
class Observation:
    """A canary run as its adversaries see it.

    Attributes:
        canary_run: The canary run.
        canaries: Its federation.
        events: What a round was charged, by adversary.
    """

    canary_run: CanaryRun
    canaries: Canaries
    events: dict[Adversary, Event]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the silos."""
        return self.canaries.names

    @property
    def has_kinds(self) -> bool:
        """Whether silos have settings of their own, so that their records cost different amounts."""
        return count_kinds(self.events["released"]) is not None

    @property
    def target(self) -> str:
        """The silo that has the canaries, where one silo has all of them."""
        return self.names[0]

    @property
    def curious(self) -> str:
        """The silo that attacks."""
        return self.names[-1]

    def project(self, vectors: Array) -> Array:
        """Return sums (..., k) along the directions."""
        return self.canaries.project(vectors)

    @cached_property
    def rounds_joined(self) -> NDArray[np.intp]:
        """The rounds that the silo with the canaries took part in, where silos are sampled; else all."""
        return np.flatnonzero(self.canary_run.joined[:, 0])

    @cached_property
    def total(self) -> Array:
        """The noisy sums (T, n), as the server computes them.

        Raises:
            NotSeen: the server's part of the aggregator cannot be repeated.
        """
        found = self.canary_run.sums
        if found is None:
            raise NotSeen("what the server computes from the answers could not be repeated")
        return self.project(found)

    @cached_property
    def shares(self) -> dict[str, Array] | None:
        """The noisy shares (T, n) that are sent in clear, by silo; None where there are none."""
        found = self.canary_run.shares
        return None if found is None else {name: self.project(rounds) for name, rounds in found.items()}

    def condition(self, adversary: Adversary) -> tuple[Event, list[EventCount] | None]:
        """Return the event of a round, and the charges where they are conditioned on a coin of the silo.

        All canaries of a silo share the coin that lets it join a round. So claim and score are of the rounds joined.
        """
        event = self.events[adversary]
        # Where silos have settings of their own, the events of those whose records the canaries are.
        event = select_kind(event, 0)
        if self.canary_run.spec.method.samples_silos and isinstance(event, RevealedSample):
            return event.event, [(event.event, len(self.rounds_joined))]
        return event, None

    def see(self, adversary: Adversary) -> View:
        """Return what an adversary sees.

        Raises:
            NotSeen: it cannot be read here.
        """
        signal = self._find_signal(adversary)
        if adversary == "released":
            return self._see_sums(self._released_sums(), signal, self._known(adversary, signal))
        if adversary == "server":
            return self._see_as_server(signal)
        return self._see_as_silo(signal)

    def _find_signal(self, adversary: Adversary) -> Signal:
        event, _ = self.condition(adversary)
        signal = Signal.of(event)
        if (
            signal is None
        ):  # counts in clear, say: how far canaries move sums is charged to those who see only sums
            signal = Signal.of(self.condition("released")[0])
        if signal is None:
            raise NotSeen(
                f"there is no noise to compare with: {explain_not_private(event) or 'nothing is released'}"
            )
        return signal

    def _released_sums(self) -> Array:
        found = self.canary_run.released
        if found is not None:
            return self.project(found)
        # Where the server's step cannot be inverted, its sums: what it makes of them is post-processing, if it does.
        if self.canary_run.sums is None or self.canary_run.count_steps(self.canary_run.sums) < len(
            self.total
        ):
            raise NotSeen("the models are not what the server's optimizer makes of the sums")
        return self.total

    def _see_sums(self, sums: Array, signal: Signal, known: NDArray[np.bool_] | None) -> View:
        rounds = self.rounds_joined
        return View((sums[rounds],), signal, None if known is None else known[rounds])

    def _see_as_server(self, signal: Signal) -> View:
        known = self._known("server", signal)
        view = self.canary_run.spec.views()["server"]
        shares = self.shares
        if shares is None:
            if view.sees_shares:
                raise NotSeen(
                    "the server sees every silo's share, and the answers have no array in which to find it"
                )
            return self._see_sums(self.total, signal, known)
        rounds, method = self.rounds_joined, self.canary_run.spec.method
        features = self._stack_shares(shares)
        if self.canaries.placement.kind == "one silo":
            parts: tuple[Array, ...] = (shares[self.target][rounds],)
        elif method.clips_records:
            # Coins of records fall in every silo anew, so each share is scored by itself.
            parts = tuple(shares[name] for name in self.names)
            draws = max(1, round(signal.draws / len(parts)))
            signal = replace(signal, draws=draws, variance=signal.variance / len(parts))
        else:
            parts = (sum(shares.values(), np.zeros(1)),)
        return View(parts, signal, None if known is None else known[rounds], features)

    def _stack_shares(self, shares: dict[str, Array]) -> tuple[Array, Array] | None:
        """Return the features of the whitened score, and how far a member moves each of them."""
        carrying = self.canaries.placement.count_silos(len(self.names))
        if len(self.rounds_joined) < len(self.total):
            return None  # silos that were not drawn send zeros
        stacked = np.stack([shares[name] for name in self.names])
        moves = np.broadcast_to((np.arange(len(self.names)) < carrying)[:, None], stacked.shape[:2]).astype(
            float
        )
        if moves.size <= MAX_FEATURES:
            return stacked.reshape(moves.size, -1), moves.reshape(-1)
        by_silo, by_round = stacked.sum(axis=1), stacked.sum(axis=0)
        if len(by_round) > MAX_FEATURES:
            return by_silo, moves.sum(axis=1)
        return np.concatenate([by_silo, by_round]), np.concatenate([moves.sum(axis=1), moves.sum(axis=0)])

    def _see_as_silo(self, signal: Signal) -> View:
        if len(self.names) < 2:
            raise NotSeen("there is one silo, and no other one that could attack it")
        total, own = self.total, self.canary_run.find_own_vectors(self.curious)
        spares = self.canaries.directions.spares
        rest = np.empty_like(total)
        for number, vectors in enumerate(own):
            rest[number] = total[number]
            if vectors:
                rest[number] -= find_part(total[number], self.project(np.array(vectors)), spares)
        return self._see_sums(rest, signal, self._known("silo", signal))

    def _known(self, adversary: Adversary, signal: Signal) -> NDArray[np.bool_] | None:
        """Return which coins of persons an adversary sees, (T, n); None where there are none, or it sees none."""
        spec = self.canary_run.spec
        if signal.coin == 1 or not spec.method.samples_users:
            return None
        by = spec.aggregator.sampled_by
        if by == "server" and adversary == "server":
            drawn = [self.canary_run.server_sample(number) for number in range(len(self.canary_run.updates))]
            if any(one is None for one in drawn):
                raise NotSeen("the sample that the server has drawn was not found in its store")
            return np.array(drawn)
        if by == "silos" and adversary == "silo":
            return self.canary_run.silo_sample(self.curious, signal.coin)
        raise NotSeen(
            f"the adversary is charged as one who knows the sample, which {by} draws: it is not read here"
        )


def find_part(total: Array, vectors: Array, spares: NDArray[np.int64]) -> Array:
    """Return the part of a sum (n,) that a silo knows from its own vectors (k, n), by least squares over `spares`.

    A silo knows its own part up to a public scale: the multiple that leaves the least of the noise.
    """
    scale = np.linalg.lstsq(vectors[:, spares].T, total[spares], rcond=None)[0]
    part: Array = scale @ vectors
    return part


def read_whole_updates(canary_run: CanaryRun, adversary: Adversary) -> Array:
    """Return what an adversary sees of every round (T, 2) of a run in which one person turns every silo's update.

    Raises:
        NotSeen: it cannot be read here.
    """
    total = canary_run.sums
    if total is None:
        raise NotSeen("what the server computes from the answers could not be repeated")
    if adversary == "released":
        found = canary_run.released
        return total if found is None else found
    if adversary == "server":
        return total
    if len(canary_run.spec.names) < 2:
        raise NotSeen("there is one silo, and no other one that could attack it")
    own = [np.array(vectors) for vectors in canary_run.find_own_vectors(canary_run.spec.names[-1])]
    # The second coordinate of all rounds is noise, by which a silo finds the scale of its own part.
    rounds = np.concatenate(own, axis=1) if own and own[0].size else np.zeros((0, total.size))
    places = np.arange(1, total.size, 2)
    return (total.reshape(-1) - find_part(total.reshape(-1), rounds, places)).reshape(total.shape)


def find_reach(observation: Observation, signal: Signal) -> float | None:
    """Return how far one draw of a canary moves the sum of all silos by the method's constants; None: not known here.

    Only the method's clip and what its noisy steps multiply it by are asked: noise multipliers come from events.

    Args:
        observation: What was seen.
        signal: That of the sum.
    """
    spec = observation.canary_run.spec
    if spec.bounds is not None:
        # A smaller clip that a person's own budget asks for raises the charged multiplier, and not the noise.
        full = Signal.of(select_kind(spec.aggregator.event(spec, spec.views()["released"]), 0))
        own = 1.0 if full is None else (full.variance / signal.variance) ** 0.5
        reach = spec.bounds.clip * own * observation.canaries.carrying_blocks
        return None if spec.bounds.min_clip_ratio < 1 else reach
    try:
        steps = DpSgd.of(spec.method)
    except TypeError:
        return None
    if steps.optimizer != "sgd":  # the others' steps are no multiples of the noisy sums
        return None
    # An event of one release of several steps counts them as one draw.
    at_once = max(1.0, steps.local_steps / signal.draws)
    return steps.clip * steps.local_learning_rate / steps.expected_batch_size * at_once
