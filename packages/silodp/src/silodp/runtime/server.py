"""The server of a run: it charges each round to the ledger, asks the silos, and computes the next model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from torch import Tensor

from silodp.accounting.events import NonPrivate
from silodp.accounting.progress import Progress
from silodp.accounting.series_ledger import LedgerView
from silodp.accounting.views import Adversary
from silodp.aggregators.base import ServerAggregator, request_state
from silodp.aggregators.run_spec import RunSpec
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness, draw_poisson_sample
from silodp.methods.roles import MethodState, compute_user_weights
from silodp.methods.server_optimizer import compute_output, take_step
from silodp.runtime.checkpoint import Checkpoint, Participation, get_or_draw
from silodp.text import name_class
from silodp.wire.messages import Message
from silodp.wire.schemas import MessageSchedule
from silodp.wire.store import RoundStore
from silodp.wire.transport import Channel, DeliveryFailure


@dataclass(frozen=True)
class Server:
    """The coordinator of a run. It has no records.

    For each round its store keeps what is needed to repeat the round: random draws, requests, and the number of the
    last attempt. For the whole run it keeps user weights, session, shares and keys, the number of attempts in all
    rounds, and whether the oblivious transfers have ended. It is the `ServerContext` of the aggregator.

    Attributes:
        spec: The specification of the run.
        transport: The signed channel to the silos.
        ledger: The ledger of the run.
        store: The durable store of the server for this run.
        randomness: The random streams of the server.
    """

    spec: RunSpec
    transport: Channel
    ledger: LedgerView
    store: RoundStore
    randomness: Randomness

    @property
    def side(self) -> ServerAggregator:
        """The server side of the aggregator."""
        return self.spec.aggregator.server(self.spec)

    def compute_spent(self) -> dict[Adversary, float | None]:
        """Return ε of all charges so far by adversary; None where there is no guarantee."""
        return {
            adversary: None if isinstance(event, NonPrivate) else self.ledger.epsilon(adversary)
            for adversary, event in self.spec.round_events().items()
        }

    def compute_spent_by_round(self) -> list[dict[Adversary, float | None]]:
        """Return the results of `compute_spent` after 0, 1, … rounds, as many as there are rounds plus one."""
        spent = {
            adversary: None if isinstance(event, NonPrivate) else self.ledger.epsilon_by_round(adversary)
            for adversary, event in self.spec.round_events().items()
        }
        return [
            {adversary: None if known is None else known[done] for adversary, known in spent.items()}
            for done in range(self.ledger.rounds + 1)
        ]

    def set_up(self) -> None:
        """Send every silo its user weights and set up the aggregator.

        Where the method weights users by their record counts, the silos are first asked for these counts (unless the
        aggregator computes the weights privately).
        """
        run = self.spec.run
        requests = {name: Message("setup", run) for name in self.spec.names}
        if self.spec.shows_counts:
            # Stored before they are sent: a set-up that is repeated must not give a silo other weights.
            weights = get_or_draw(self.store.run, "weights", run, self._compute_weights)
            for name, own in zip(self.spec.names, weights, strict=True):
                requests[name] = Message("setup", run, arrays={"weights": own})
        self.ask_all(requests)
        self.side.set_up(self)

    def run_round(self, round_: int, params: Tensor, state: MethodState | None = None) -> Tensor | None:
        """Run one round and return the sum of the silos' noisy shares.

        The round is charged before any of its shares can be seen. The caller must have stored the model of the
        earlier rounds durably before: what would be needed to repeat those rounds is deleted here.

        Args:
            round_: Number of the round, from 0.
            params: Parameters (d,) of the model.
            state: Public arrays by name that the method sends with the model; None for none.

        Returns:
            The noisy sum (d + extra coordinates,), float64; None where the privacy budget does not allow the round.

        Raises:
            SilodpError: Too few silos answered; a resumed run repeats the round with the same bytes, and does not
                charge it again. Or the round was completed before (code checkpoint.mismatch).
        """
        self._forget_before(round_)
        if not self.affords_round(round_):
            return None
        arrays = {"params": params.cpu().numpy(), **request_state(state or {})}
        clients = self.participation.draw(round_)
        if clients.size:
            arrays["clients"] = clients
        if self.spec.method.samples_users and self.spec.aggregator.sampled_by == "server":
            # Stored: two releases of a round are charged as of one sample.
            draw = partial(self._draw_sample, round_)
            arrays["sample"] = get_or_draw(self.store.round(round_), "sample", self.spec.run, draw)
        side = self.side
        total: object = side.total(self, round_, arrays)
        if total is None or (isinstance(total, Tensor) and total.shape == (self.spec.sum_size,)):
            return total
        shape = f" of shape {tuple(total.shape)}" if isinstance(total, Tensor) else ""
        raise SilodpError(
            f"the aggregator {name_class(type(side))}: total returned a {type(total).__name__}{shape}: return the sum, "
            f"a tensor of shape ({self.spec.sum_size},).",
            code="plugin.returned",
            field="aggregator",
        )

    def affords_round(self, round_: int) -> bool:
        """Return whether the budget allows a round that every silo answers, or the round was charged before."""
        return self.ledger.charged(round_, 0) or self.ledger.affords(self.spec.round_events(None, round_))

    @property
    def participation(self) -> Participation:
        """The record of which silos take part in which rounds."""
        return Participation(self.spec, self.store, self.randomness)

    def charged(self, round_: int, release: int) -> bool:
        """Return whether a release was charged, so that parts of it may have been seen."""
        return self.ledger.charged(round_, release)

    def affords(self, round_: int, release: int, survivors: int) -> bool:
        """Return whether the budget allows a release, or the release was charged before.

        Per-user budgets are planned for `max_rounds` rounds with one release each, so they allow no further release.

        Args:
            round_: Number of the round, from 0.
            release: Number of the release in the round, from 0.
            survivors: Number of silos whose noise is in the sum.
        """
        max_rounds = self.spec.method.budgets.max_rounds
        if max_rounds is not None and (release > 0 or round_ >= max_rounds):
            return False
        if self.charged(round_, release):
            return True
        return self.ledger.affords(self.spec.release_events(survivors, round_, release))

    def charge(self, round_: int, release: int, survivors: int) -> bool:
        """Charge a release to the ledger if the budget allows it; arguments as for `affords`.

        Returns:
            False where the budget does not allow the release; nothing is charged then.
        """
        if not self.affords(round_, release, survivors):
            return False
        self.ledger.charge(round_, release, self.spec.release_events(survivors, round_, release))
        return True

    def step(self, before: Checkpoint, total: Tensor) -> tuple[Checkpoint, bool]:
        """Return the checkpoint after a round: the next model, and the states of server optimizer and method.

        Args:
            before: The checkpoint before the round.
            total: The noisy sum (d + extra coordinates,), float64.

        Returns:
            The checkpoint, and whether sum and model are finite. If not, the model stays as it was, and the round
            counts, since it was charged.
        """
        method, population = self.spec.method, self.spec.population
        # Everything from here on is computed from the noisy sum and costs no ε (post-processing; Dwork and Roth 2014,
        # proposition 2.1).
        update, state = method.split_sum(total, before.method, population)
        params, optimizer = take_step(
            method.make_server_optimizer(),
            before.params,
            update,
            before.optimizer,
            method.server_move(population, before.round, self.spec.rounds),
        )
        after = replace(before, round=before.round + 1)
        # NaN in a model would stay in it for all later rounds.
        if not (total.isfinite().all() and params.isfinite().all()):
            return after, False
        return replace(after, params=params, optimizer=optimizer, method=state), True

    def find_output(self, state: Checkpoint) -> Tensor:
        """Return the model (d,) that is released: an optimizer may go on from other parameters than their average."""
        return compute_output(self.spec.method.make_server_optimizer(), state.params, state.optimizer)

    def ask(self, requests: dict[str, Message]) -> tuple[dict[str, Message], dict[str, DeliveryFailure]]:
        """Send each silo its request, wait for the answers, and check them.

        Args:
            requests: Requests by the name of the silo.

        Returns:
            (answers, failures), each by the name of the silo.

        Raises:
            SilodpError: An answer is to another request (code message.unexpected), or does not fit its schema (code
                message.malformed). The error names the silo.
        """
        answers, failures = self.transport.ask(requests)
        # The channel has checked signatures and senders. What is checked here is what a silo may answer.
        for name, answer in answers.items():
            if answer.key != requests[name].key:
                raise SilodpError(
                    f"silo '{name}' answered {answer.key} where {requests[name].key} was asked: an old message was "
                    "played back, or the silo has another version; nothing was used.",
                    code="message.unexpected",
                )
            self._schedules[name].kinds[answer.kind].answer.check(answer, f"silo '{name}'")
        return answers, failures

    @cached_property
    def _schedules(self) -> dict[str, MessageSchedule]:
        """The messages of the run by the name of the silo."""
        return {name: self.spec.aggregator.script(self.spec, name) for name in self.spec.names}

    def ask_all(self, requests: dict[str, Message]) -> dict[str, Message]:
        """Ask as `ask` does, and fail if any silo does not answer.

        Args:
            requests: Requests by the name of the silo.

        Returns:
            Answers by the name of the silo.

        Raises:
            SilodpError: A silo refused (with the silo's code) or did not answer (code run.no_answer).
        """
        answers, failures = self.ask(requests)
        if failures:
            name, failure = next(iter(failures.items()))
            raise SilodpError(
                f"silo '{name}' gave no answer ({failure.kind}: {failure.reason}); nothing was released. "
                "Mend it and resume: the round will be repeated and charged once.",
                code=failure.code or "run.no_answer",
            )
        return answers

    def check_store_version(self, round_: int) -> None:
        """Check that the store and the checkpoint are from the same time.

        Args:
            round_: The round, from 0, with which the checkpoint continues.

        Raises:
            SilodpError: The store has completed this round, or has no record of the round before (code
                checkpoint.mismatch).
        """
        completed, _ = self.participation.load_completed()
        if round_ < completed:
            raise SilodpError(
                f"round {round_ + 1} is over, and what was drawn for it is forgotten: the checkpoint is older than the "
                "server's store; restore the newest checkpoint and ledger, or begin a new run, which adds its own ε.",
                code="checkpoint.mismatch",
            )
        # A round that was begun has "clients" in the store. If its checkpoint was written and the next round was not
        # begun, it is not yet counted as completed.
        is_begun = self.store.round(completed).get("clients") is not None
        if round_ > completed + is_begun:
            raise SilodpError(
                f"the server's store knows nothing of round {round_}: it is older than the checkpoint, and how many "
                "attempts were made is not known; restore the newest store, or begin a new run, which adds its own ε.",
                code="checkpoint.mismatch",
            )

    def check_draws(self, progress: Progress) -> None:
        """Check that the store is no older than the ledger, which lists what was drawn for every completed round.

        Args:
            progress: What the ledger lists.

        Raises:
            SilodpError: It is an old copy, and would draw anew (code checkpoint.mismatch).
        """
        completed, _ = self.participation.load_completed()
        for done in progress.completed.values():
            # The draws of a round are dropped when the next one is begun.
            if done.round > completed + 1 or (
                done.round == completed + 1 and done.drawn != self.participation.digest(completed)
            ):
                raise SilodpError(
                    f"the server's store does not have what was drawn for round {done.round}, which the ledger lists "
                    "as completed: it is an old copy; restore the newest store, or begin a new run, which adds its "
                    "own ε.",
                    code="checkpoint.mismatch",
                )

    def _forget_before(self, round_: int) -> None:
        """Persist the number of completed rounds, then delete what was needed to repeat them.

        Raises:
            SilodpError: As for `check_store_version`.
        """
        self.check_store_version(round_)
        # The number comes first: a round that was deleted but not counted would run again with another sample, and
        # under private weighting with one-time pads of silo 0 that were used before.
        completed, _ = self.participation.load_completed()
        if round_ > completed:
            self.participation.complete(round_)
        self.store.drop_rounds_before(round_)

    def _compute_weights(self) -> np.ndarray:
        """Ask the silos for their record counts and return the user weights (S, U)."""
        answers = self.ask_all({name: Message("counts", self.spec.run) for name in self.spec.names})
        counts = np.stack([answers[name].arrays["counts"] for name in self.spec.names])
        return compute_user_weights(self.spec.method, counts, self.spec.population)

    def _draw_sample(self, round_: int) -> np.ndarray:
        """Return which users are sampled in a round, (U,) bool, each alone with its rate (Poisson sampling)."""
        population = self.spec.population
        rates = self.spec.method.sampling_rates(population)
        return draw_poisson_sample(population.users, rates, self.randomness.stream("sample", round_))
