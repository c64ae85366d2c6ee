"""The server of a run: it charges a round, asks the silos, and takes the server's step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from silodp.accounting.evaluation_charges import Charges
from silodp.accounting.events import Event, NonPrivate
from silodp.accounting.guarantee import Adversary
from silodp.aggregators.base import ServerAggregator, request_state
from silodp.aggregators.run_spec import RunSpec
from silodp.errors import SilodpError, counted
from silodp.mechanisms.noise import Randomness
from silodp.mechanisms.sampling import draw_poisson_sample
from silodp.methods.roles import MethodState
from silodp.methods.weights import compute_user_weights
from silodp.runtime.checkpoint import Checkpoint
from silodp.runtime.participation import CHARGES_KEY, Participation, count_charges, get_or_draw
from silodp.wire.messages import Message
from silodp.wire.schemas import Script
from silodp.wire.store import RoundStore
from silodp.wire.transport import Channel, Failure

EMPTY_STATE: MethodState = {}


@dataclass(frozen=True)
class Server:
    """The coordinating party of a run: it holds no records, only what it needs to ask and to add.

    Its store keeps for a round what is needed to repeat it: draws, requests, how far its attempts have come. What lasts
    is the run's: weights, session, shares, keys; how many attempts were made in all; that transfers have ended.
    """

    spec: RunSpec
    transport: Channel
    ledger: Charges
    store: RoundStore
    randomness: Randomness

    @property
    def events(self) -> dict[Adversary, Event]:
        """What a round that every silo answers costs against each adversary."""
        return self.spec.round_events()

    @property
    def side(self) -> ServerAggregator:
        """The aggregator's part in the server."""
        return self.spec.aggregator.server(self.spec)

    def spent(self) -> dict[Adversary, float | None]:
        """ε so far against each adversary; None, from the first round on, where nothing is promised."""
        return {
            adversary: None if isinstance(event, NonPrivate) else self.ledger.epsilon(adversary)
            for adversary, event in self.events.items()
        }

    def spent_by_round(self) -> list[dict[Adversary, float | None]]:
        """`spent` as it was after 0, 1, … rounds."""
        rounds = range(self.ledger.rounds + 1)
        spent: dict[Adversary, dict[int, float | None]] = {
            adversary: dict.fromkeys(rounds)
            if isinstance(event, NonPrivate)
            else self.ledger.epsilon_by_round(adversary)
            for adversary, event in self.events.items()
        }
        return [{adversary: values[i] for adversary, values in spent.items()} for i in rounds]

    def set_up(self) -> None:
        """Give every silo its weights where they go by counts, which are asked for first."""
        run, names = self.spec.run, self.spec.names
        weights: list[dict[str, np.ndarray]] = [{} for _ in names]
        if self.spec.method.needs_counts and not self.spec.aggregator.weights_privately:
            by_counts = get_or_draw(self.store.run, "weights", run, self._weigh)
            weights = [{"weights": own} for own in by_counts]
        self.ask_all(
            {name: Message("setup", run, arrays=own) for name, own in zip(names, weights, strict=True)}
        )
        self.side.set_up(self)

    def run_round(self, round_: int, params: Tensor, state: MethodState = EMPTY_STATE) -> Tensor | None:
        """The sum of the silos' noisy shares for one round, charged before anything of it is seen; None: budget spent.

        Whoever asks for a round has durably kept the model that the rounds before it led to: they are forgotten.

        Raises:
            SilodpError: when too few silos answer; resuming repeats the round, the same bytes, charged once. Or when
                the round is over.
        """
        self._forget_before(round_)
        if not self.affords_round(round_):
            return None
        arrays = {"params": params.cpu().numpy(), **request_state(state)}
        clients = self.participation.draw(round_)
        if clients.size:
            arrays["clients"] = clients
        if self.spec.method.samples_users and self.spec.aggregator.sampled_by == "server":
            draw = partial(self._sample, round_)
            arrays["sample"] = get_or_draw(self.store.round(round_), "sample", self.spec.run, draw)
        return self.side.total(self, round_, arrays)

    def affords_round(self, round_: int) -> bool:
        """Return whether a round that every silo answers may be charged, or was charged before."""
        return self.ledger.charged(round_, 0) or self.ledger.affords(self.spec.round_events(None, round_))

    @property
    def participation(self) -> Participation:
        """Which silos take part in which rounds."""
        return Participation(self.spec, self.store, self.randomness)

    def charged(self, round_: int, release: int) -> bool:
        """Whether this release was charged, so that some of it may have been seen."""
        return self.ledger.charged(round_, release)

    def affords(self, round_: int, release: int, survivors: int) -> bool:
        """Whether one release, with the noise of those who answered, stays within the budget, or was charged before.

        Budgets that units have of their own were met for so many rounds, each released once.
        """
        most = self.spec.method.budgets.max_rounds
        if most is not None and (release > 0 or round_ >= most):
            return False
        cost = self.spec.release_events(survivors, round_, release)
        return self.ledger.charged(round_, release) or self.ledger.affords(cost)

    def charge(self, round_: int, release: int, survivors: int) -> bool:
        """Charge one release with the noise of those who answered; False, and nothing charged, beyond the budget."""
        if not self.affords(round_, release, survivors):
            return False
        cost = self.spec.release_events(survivors, round_, release)
        self.ledger.charge(round_, release, cost)
        return True

    def step(self, before: Checkpoint, total: Tensor) -> Checkpoint:
        """Return the state after a round: the next model, and what the optimizer and the method keep.

        Args:
            before: the state in which the round was asked for.
            total: (d + extra coordinates,) float64, the noisy sum.
        """
        method, population = self.spec.method, self.spec.population
        update, state = method.split_sum(total, before.method, population)
        rate, scale = method.server_learning_rate, method.server_scale(population)
        optimizer = method.make_server_optimizer()
        params, kept = optimizer.step(before.params, update, before.optimizer, rate, scale)
        return replace(before, round=before.round + 1, params=params, optimizer=kept, method=state)

    def ask(self, requests: dict[str, Message]) -> tuple[dict[str, Message], dict[str, Failure]]:
        """One blocking call; an answer must be to what was asked, and of its kind.

        Raises:
            SilodpError: a silo answered something else, or with a malformed message; it is named.
        """
        answers, failures = self.transport.ask(requests)
        for name, answer in answers.items():
            if answer.key != requests[name].key:
                raise SilodpError(
                    f"silo '{name}' answered {answer.key} where {requests[name].key} was asked: an old message was "
                    "played back, or it is of another version; nothing was used.",
                    code="message.unexpected",
                )
            self._scripts[name].kinds[answer.kind].answer.check(answer, f"silo '{name}'")
        return answers, failures

    @cached_property
    def _scripts(self) -> dict[str, Script]:
        """What each silo is asked, and how it must answer."""
        return {name: self.spec.aggregator.script(self.spec, name) for name in self.spec.names}

    def ask_all(self, requests: dict[str, Message]) -> dict[str, Message]:
        """The same where everyone must answer."""
        answers, failures = self.ask(requests)
        if failures:
            name, failure = next(iter(failures.items()))
            raise SilodpError(
                f"silo '{name}' gave no answer ({failure.kind}: {failure.reason}); nothing was released, "
                "mend it and resume: the round will be repeated and charged once.",
                code=failure.code or "run.no_answer",
            )
        return answers

    def check_store_version(self, round_: int) -> None:
        """Refuse to go on before this round where the store is not of the same moment as the checkpoint.

        Raises:
            SilodpError: the store has seen later rounds, or not the one before.
        """
        over, _ = self.participation.load_completed()
        if round_ < over:
            raise SilodpError(
                f"round {round_ + 1} is over, and what was drawn for it is forgotten: the checkpoint is older than the "
                "server's store; restore the newest checkpoint and ledger, or begin a new run, which adds its own ε.",
                code="checkpoint.mismatch",
            )
        if round_ > over + 1 or (round_ > over and self.store.round(over).get("clients") is None):
            raise SilodpError(
                f"the server's store knows nothing of round {round_}: it is older than the checkpoint, and how many "
                "attempts were made is not known; restore the newest store, or begin a new run, which adds its own ε.",
                code="checkpoint.mismatch",
            )

    def keep_charges(self) -> None:
        """Store durably how many charges the ledger has, further releases and evaluations included."""
        self.store.run.put(CHARGES_KEY, str(len(self.ledger.history)).encode())

    def check_charges(self) -> None:
        """Refuse a ledger with fewer charges than it had after the last round: it is an old copy.

        It may have all rounds, and lack a further release or an evaluation.
        """
        kept, found = count_charges(self.store.run), len(self.ledger.history)
        if found < kept:
            raise SilodpError(
                f"the ledger of this run is an old copy: it has {counted(found, 'charge')}, and the server's store "
                f"lists {kept}; restore the newest ledger, or begin a new run, which adds its own ε.",
                code="checkpoint.mismatch",
            )

    def _forget_before(self, round_: int) -> None:
        """Forget what was needed to repeat the rounds before this one; that they are over stands first, durably.

        Played once more, a round would draw another sample, and ask silo 0 for entries under pads that were used.

        Raises:
            SilodpError: this round is over itself, or the store is older than the rounds before it.
        """
        self.check_store_version(round_)
        over, _ = self.participation.load_completed()
        if round_ > over:
            self.participation.complete(round_)
        self.store.drop_rounds_before(round_)

    def _weigh(self) -> np.ndarray:
        answers = self.ask_all({name: Message("counts", self.spec.run) for name in self.spec.names})
        counts = np.stack([answers[name].arrays["counts"] for name in self.spec.names])
        return compute_user_weights(self.spec.method, counts, self.spec.population)

    def _sample(self, round_: int) -> np.ndarray:
        population = self.spec.population
        rates = self.spec.method.sampling_rates(population)
        return draw_poisson_sample(population.users, rates, self.randomness.stream("sample", round_))


def is_finite(total: Tensor) -> bool:
    """Whether a sum may enter the model."""
    return bool(torch.isfinite(total).all())
