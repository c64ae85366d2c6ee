"""A silo's gate: it checks every request, and charges it in the silo's ledger, before the silo acts on it.

A silo treats its server as an adversary. From the run's public constants the gate knows what may be asked at all, and
from the state after the last answer, which its ledger lists, what may be asked next:

    state                       may be asked (of its `MessageSchedule`)          leads to
    set-up, step i              `setup[i]`, once                                 set-up, step i + 1
    set-up, after any "hello"   "hello" of a later session, before any round     the step after "hello"
    set-up complete             `prepare[0]`, or an update of round 0            round 0
    round r                     the next of `prepare`, before an update          round r
                                an update: attempt and roster as below           round r, attempt a
                                "open" of the attempt masked last                round r, release opened
                                the first message of a later round < T           that round

Within a round every further attempt has a strictly smaller roster: at least m silos of the session, in their order,
with this silo among them, and the same model and sample. A further attempt asks for the same release as the
attempt before it or for the next one; once a release was opened, only for the next one. Where every silo must
answer, no round may be skipped: a silo that missed a round has an old copy of its store.

The same table, with the messages of each aggregator, is in docs/protocols.md, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np

from silodp.accounting.events import Composed, Event
from silodp.accounting.ledger import find_exceeded_limit
from silodp.accounting.series_ledger import LedgerView
from silodp.accounting.views import Adversary
from silodp.aggregators.base import common_digest, model_and_sample, state_of
from silodp.aggregators.run_spec import RunSpec
from silodp.errors import SilodpError
from silodp.runtime.answers import Answers
from silodp.text import join_names, pluralize
from silodp.wire.messages import Message
from silodp.wire.schemas import HELLO, MessageSchedule
from silodp.wire.store import RoundStore


@dataclass(frozen=True)
class State:
    """The progress of a silo in a run: every answer is listed in its ledger with the state after it.

    Attributes:
        step: Number of messages of the set-up that were answered.
        session: Number of the session begun last; -1 before the first.
        round: The round of the last request answered, counted from 0; -1 during set-up.
        prepared: Number of messages of `MessageSchedule.prepare` answered in this round.
        attempt: Number of the last attempt answered in this round; -1 before the first.
        release: The release that this attempt belongs to, counted from 0.
        roster: The roster of this attempt; a further attempt has a smaller one.
        asked: Digest of the round's model and sample.
        request: Digest of the part of that attempt's update that is the same for all silos; pair masks are bound to it.
        update: Digest of the whole update; this silo's seal is bound to it.
        opened: Whether the release was opened.
        attempts: Number of updates of the run that were answered.
    """

    step: int = 0
    session: int = -1
    round: int = -1
    prepared: int = 0
    attempt: int = -1
    release: int = 0
    roster: tuple[str, ...] = ()
    asked: str = ""
    request: str = ""
    update: str = ""
    opened: bool = False
    attempts: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return what differs from the state of a silo that has answered nothing, JSON-ready."""
        fields = {name: value for name, value in vars(self).items() if value != getattr(State, name)}
        return fields | ({"roster": list(self.roster)} if self.roster else {})

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> State:
        """Return the inverse of `to_dict`."""
        return cls(**{**fields, "roster": tuple(fields.get("roster", ()))})


class Gate:
    """Decides what one silo may be asked in one run.

    Args:
        name: The name of the silo.
        spec: The specification of the run; its `silo_limits` hold for the ledger of the silo.
        store: The silo's durable store of this run.
        counts: The silo's record counts n[s,u], (U,) int64.
        ledger: The ledger of the silo; it is charged before an update is computed.
        find_exceeded: Function of events that returns a phrase about a limit over all runs of this silo that they
            would exceed, or None where all limits hold. None: there are no such limits.

    Attributes:
        ledger: The ledger of the silo.
        script: The messages of the run, in their order.

    Raises:
        SilodpError: The store and the ledger are copies of different moments (code gate.rollback_detected).
    """

    def __init__(
        self,
        name: str,
        spec: RunSpec,
        store: RoundStore,
        counts: np.ndarray,
        ledger: LedgerView,
        find_exceeded: Callable[[Mapping[Adversary, Event]], str | None] | None = None,
    ) -> None:
        self._name, self._spec = name, spec
        self._counts, self.ledger = counts, ledger
        self._answers = Answers(name, store, ledger)
        self._find_exceeded = find_exceeded or (lambda events: None)
        self.script: MessageSchedule = spec.aggregator.script(spec, name)
        self._setup = tuple(kind.name for kind in self.script.setup)
        self._prepare = tuple(kind.name for kind in self.script.prepare)
        self._begun_here = -1  # the session that was begun in this process

    @property
    def state(self) -> State:
        """The state after the last answer."""
        answers = self.ledger.answers
        return State.from_dict(answers[-1].state) if answers else State()

    def find_answer(self, request: Message) -> Message | None:
        """Return the stored answer to a request; None where it was not answered.

        Raises:
            SilodpError: As `Answers.find`.
        """
        return self._answers.find(request, request.kind in self._setup)

    def commit(self, state: State, request: Message, answer: Message) -> None:
        """Store an answer and list it with the state after it, durably; it may be sent from now on.

        Args:
            state: The state from `next_state`.
            request: The request that was answered.
            answer: The answer.
        """
        self._answers.add(request, answer, state.round, state.to_dict())
        if request.kind == HELLO:
            self._begun_here = state.session

    def next_state(self, request: Message) -> State:
        """Return the state after a request; raise if the request is not allowed in the present state.

        Args:
            request: A request that passed `check_message`.

        Returns:
            The state after the request, to be committed with the answer.

        Raises:
            SilodpError: The request may not be made now (codes gate.*).
        """
        state = self.state
        if request.kind in self._setup:
            return self._admit_setup(request, state)
        if state.step < len(self._setup):
            due = self._find_due(self._setup, state.step)
            self._refuse(
                "gate.order", f"was asked '{request.kind}' before its set-up was complete: it expects '{due}'"
            )
        if request.round >= self._spec.rounds:
            self._refuse(
                "gate.rounds",
                f"was asked for round {request.round + 1} of a run of {pluralize(self._spec.rounds, 'round')}",
            )
        state = self._enter_round(request, state)
        if request.kind in self._prepare:
            return self._admit_prepare(request, state)
        if request.kind == self.script.update.name:
            return self._admit_update(request, state)
        return self._admit_open(request, state)

    def check_message(self, request: Message) -> None:
        """Check what must hold for a request in every state.

        Raises:
            SilodpError: The request is of another run, of a kind that this run does not have, or malformed.
        """
        if request.run != self._spec.run:
            self._refuse("gate.run", f"was asked in run {request.run}, and takes part in {self._spec.run}")
        kind = self.script.kinds.get(request.kind)
        if kind is None:
            self._refuse(
                "gate.kind",
                f"was asked '{request.kind}', which {self._spec.method.name} under "
                f"'{self._spec.aggregator.name}' does not ask of it",
            )
        kind.request.check(request, f"the server of silo '{self._name}'")
        if kind is self.script.update:
            problem = self._spec.method.check_state(state_of(request), self._spec.population)
            if problem is not None:
                self._refuse("gate.state", f"was sent a state of the method that {problem}")

    def _find_due(self, kinds: tuple[str, ...], done: int) -> str:
        """Return the kind that follows the first `done` of some kinds; after all of them, that of an update."""
        return kinds[done] if done < len(kinds) else self.script.update.name

    # --- set-up ---

    def _admit_setup(self, request: Message, state: State) -> State:
        kind, step = request.kind, self._setup.index(request.kind)
        if request.round or state.round >= 0:
            self._refuse("gate.order", f"is set up, and was asked '{kind}': begin a new run")
        # A party was started anew, and lost the secrets of the session: a later one begins with fresh keys.
        if kind == HELLO and step <= state.step and request.attempt > state.session:
            return replace(state, step=step + 1, session=request.attempt)
        in_session = HELLO in self._setup[:step]
        if step != state.step or kind == HELLO or request.attempt != (state.session if in_session else 0):
            due = self._find_due(self._setup, state.step)
            self._refuse(
                "gate.order",
                f"was asked '{kind}' of session {request.attempt + 1}, and expects '{due}' of session "
                f"{max(state.session, 0) + 1}: each message of the set-up is answered once",
            )
        if in_session and state.session != self._begun_here:
            # If the store was restored from an old copy, other tables would be made under the same secrets.
            self._refuse(
                "gate.restarted",
                f"was started anew since it began session {state.session + 1} of the set-up: begin another session "
                "(resuming the run does)",
            )
        if kind == "setup" and "weights" in request.arrays:
            weights, spec = request.arrays["weights"], self._spec
            problem = spec.method.check_weights(weights, self._counts, spec.population)
            if problem is not None:
                self._refuse("gate.allotment", f"was given weights of which one {problem}")
        return replace(state, step=state.step + 1)

    # --- rounds ---

    def _enter_round(self, request: Message, state: State) -> State:
        """Return the state at the beginning of the request's round."""
        if request.round < state.round:
            self._refuse(
                "gate.past",
                f"has answered round {state.round + 1} and will not repeat round {request.round + 1}: the server's "
                "checkpoint is older than its silos",
            )
        if request.round == state.round:
            return state
        if request.kind == "open":
            self._refuse("gate.order", f"was asked to open round {request.round + 1}, which it never masked")
        population = self._spec.population
        # Where silos may be missing, a skipped round is one that went on without this silo.
        if request.round > state.round + 1 and population.min_survivors == population.silos:
            self._refuse(
                "gate.round_left_out",
                f"last answered round {state.round + 1} and was asked for round {request.round + 1}, although every "
                "silo must answer every round: its store is an old copy; restore the newest one, or begin a new run",
            )
        return replace(
            state, round=request.round, prepared=0, attempt=-1, release=0, roster=(), asked="", request="", update="",
            opened=False,
        )  # fmt: skip

    def _admit_prepare(self, request: Message, state: State) -> State:
        due = self._find_due(self._prepare, state.prepared)
        if request.kind != due or state.attempt >= 0 or request.attempt:
            self._refuse(
                "gate.order",
                f"was asked '{request.kind}' of round {request.round + 1} out of order, or a second time: it expects "
                f"'{due}'",
            )
        return replace(state, prepared=state.prepared + 1)

    def _admit_update(self, request: Message, state: State) -> State:
        if state.prepared < len(self._prepare):
            due = self._find_due(self._prepare, state.prepared)
            self._refuse(
                "gate.order", f"was asked for the update of round {request.round + 1} before '{due}'"
            )
        if request.attempt <= state.attempt:
            self._refuse(
                "gate.attempt",
                f"has answered attempt {state.attempt + 1} of round {request.round + 1}, and was sent a "
                f"different request for attempt {request.attempt + 1}",
            )
        asked = model_and_sample(request)
        # Two sums of one round over different models, or over different samples, would be two releases.
        if state.asked not in ("", asked):
            self._refuse(
                "gate.model",
                f"was asked for round {request.round + 1} again with another model or sample: within a round both stay",
            )
        max_attempts = self._spec.aggregator.max_rounds
        if max_attempts is not None and state.attempts >= max_attempts:
            self._refuse(
                "gate.attempts",
                f"has answered the {pluralize(max_attempts, 'attempt')} that the run's encryption was chosen for",
            )
        before, attempts = state, state.attempts + 1
        state = replace(
            state, attempts=attempts, attempt=request.attempt, asked=asked, update=request.digest()
        )
        if self.script.open is None:
            if request.attempt:
                self._refuse(
                    "gate.attempt",
                    f"was asked for round {request.round + 1} a second time as attempt {request.attempt + 1}: a value "
                    "in clear is sent once, and fresh noise under it would be another release",
                )
            return replace(state, request=request.digest())
        roster, release = tuple(request.fields["roster"]), request.fields["release"]
        self._check_roster(roster, before)
        self._check_release(request, release, before)
        return replace(state, release=release, roster=roster, request=common_digest(request), opened=False)

    def _check_roster(self, roster: tuple[str, ...], state: State) -> None:
        min_survivors = self._spec.population.min_survivors
        # Noise is sized for m silos: the shares of fewer add up to less noise than is charged.
        if self._name not in roster or len(roster) < min_survivors:
            self._refuse(
                "gate.roster",
                f"was asked to add up with {list(roster)}: it takes part only with itself and at least "
                f"{pluralize(min_survivors - 1, 'other silo')}",
            )
        # So a round has at most 1 + S - m attempts, and as many releases.
        if state.roster and not set(roster) < set(state.roster):
            self._refuse(
                "gate.roster",
                f"was asked to add up with {list(roster)} after {list(state.roster)} in the same round: a further "
                "attempt has lost a silo",
            )

    def _check_release(self, request: Message, release: int, state: State) -> None:
        if state.attempt < 0:
            allowed = [0]
        else:
            allowed = [state.release + 1] if state.opened else [state.release, state.release + 1]
        if release not in allowed:
            self._refuse(
                "gate.release",
                f"was asked for release {release + 1} of round {request.round + 1}, and may be asked for release "
                f"{join_names((str(one + 1) for one in allowed), 'or')}: values that were opened are not masked "
                "again, since two sums that differ by one silo would show that silo's part",
            )

    def _admit_open(self, request: Message, state: State) -> State:
        masked = (state.attempt, state.release, list(state.roster), state.request)
        fields = request.fields
        if (request.attempt, fields["release"], fields["roster"], fields["request"]) != masked:
            self._refuse(
                "gate.open",
                f"was asked to open attempt {request.attempt + 1} of round {request.round + 1}, which is not the one "
                "it masked last with that roster and request",
            )
        if state.opened:
            self._refuse("gate.open", f"has opened release {state.release + 1} of round {state.round + 1}")
        return replace(state, opened=True)

    # --- the silo's ledger ---

    def charge(self, request: Message) -> None:
        """Charge the release that an update asks for, durably, before anything of it is computed.

        Other requests cost nothing. The charge is that of the costliest number of survivors, since a silo cannot know
        which other silos answer.

        Args:
            request: A request that `next_state` admitted.

        Raises:
            SilodpError: A limit of the silo would be exceeded (code gate.budget), per-user budgets were planned for
                fewer releases (gate.rounds), or the release was charged for another request that was not answered
                (gate.charged); nothing was charged.
        """
        if request.kind != self.script.update.name:
            return
        release = 0 if self.script.open is None else request.fields["release"]
        max_rounds = self._spec.method.budgets.max_rounds
        if max_rounds is not None and (release > 0 or request.round >= max_rounds):
            self._refuse(
                "gate.rounds", "was asked for a release that the personal budgets were not planned for"
            )
        asked = request.digest()
        charged = self.ledger.find_request(request.round, release)
        if charged is not None:
            before = self.state
            is_answered = before.attempt >= 0 and (before.round, before.release) == (request.round, release)
            # Noise is derived from the whole request. Until there is an answer to what was charged, also where that was
            # refused, another request would draw other noise, which is a second release for one charge.
            if charged != asked and not is_answered:
                self._refuse(
                    "gate.charged",
                    f"has charged round {request.round + 1} for another request, and has not answered it: it answers "
                    "that request alone; repeat it, or go on with the next round without this silo",
                )
            return
        # Units retire by what they have spent in this silo. If the silo missed rounds, its own ledger says how
        # many it has answered.
        series = self.ledger.series
        answered = {one.round for one in self.ledger.history if one.series == series} - {request.round}
        events = self._spec.silo_events(self._name, min(request.round, len(answered)), release)
        if self._spec.has_plugins:
            # Whether a plug-in's cost follows from the round itself or from those answered, nobody knows: both.
            others = self._spec.silo_events(self._name, request.round, release)
            events = {
                name: event if event == others[name] else Composed((event, others[name]))
                for name, event in events.items()
            }
        exceeded = find_exceeded_limit(self._spec.silo_limits, partial(self.ledger.epsilon_after, events))
        if exceeded is not None:
            adversary, spent = exceeded
            self._refuse(
                "gate.budget",
                f"would have spent {spent} against '{adversary}' after round {request.round + 1}, beyond its own "
                f"limit of {self._spec.silo_limits[adversary]:g}",
            )
        if (phrase := self._find_exceeded(events)) is not None:
            self._refuse("gate.budget", f"would have spent {phrase}, after round {request.round + 1}")
        self.ledger.charge(request.round, release, events, asked)

    def _refuse(self, code: str, what: str) -> NoReturn:
        raise SilodpError(f"silo '{self._name}' {what}; nothing was sent.", code=code)
