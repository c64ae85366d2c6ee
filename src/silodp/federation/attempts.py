"""Attempts at one round, on the server's side and on a silo's (docs/protocols.md, section 2)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from silodp.crypto.keys import Session
from silodp.crypto.secure_aggregation import Attempt
from silodp.errors import SilodpError, counted
from silodp.federation.aggregation import Aggregator, Desk, Handler, Own, Setting
from silodp.federation.hidden_sample import BOX
from silodp.federation.messages import Message
from silodp.federation.sessions import Member, current
from silodp.federation.store import Store
from silodp.federation.transport import Failure

PURPOSE = "update"


@dataclass(frozen=True)
class Attempts:
    """The server's side: who is still in, and what has been tried. Progress is durable before it is acted on."""

    setting: Setting
    desk: Desk
    fewest: int

    def collect(
        self,
        round_: int,
        arrays: Mapping[str, np.ndarray],
        blobs: Callable[[Attempt], Mapping[str, bytes]] = lambda attempt: {},
        boxes: Mapping[str, bytes] | None = None,
    ) -> tuple[dict[str, Message], dict[str, bytes]] | None:
        """(answers, seals) of everyone on the roster of the first attempt that succeeds; None: budget spent.

        `boxes`: what goes to one silo alone, in every attempt, as the blob `BOX`.

        Raises:
            SilodpError: a silo refuses, or too few are left; resuming goes on with the round.
        """
        now, session = self._progress(round_), current(self.desk.store).session
        while True:
            fields = {"session": session, "release": now.release, "roster": list(now.roster)}
            request = Message(
                "update", self.setting.run, round_, now.attempt, fields, dict(arrays), dict(blobs(now))
            )
            requests = {name: request for name in now.roster}
            for name in requests.keys() & (boxes or {}).keys():
                requests[name] = replace(request, blobs={**request.blobs, BOX: (boxes or {})[name]})
            answers, failures = self.desk.ask(requests)
            if failures:  # a release that was charged may have been opened before this process began
                now = self._without(now, failures, now.release + self.desk.charged(round_, now.release))
                continue
            if not self.desk.charge(round_, now.release, len(now.roster)):
                return None
            opening = Message("open", self.setting.run, round_, now.attempt, fields)
            opened, failures = self.desk.ask({name: opening for name in now.roster})
            if failures:  # the others' seals may be open: what comes next is seen beside this
                now = self._without(now, failures, now.release + 1)
                continue
            seals = {name: answer.blobs.get("seal", b"") for name, answer in opened.items()}
            short = [name for name, seal in seals.items() if len(seal) != 32]
            if short:
                raise SilodpError(f"silo '{short[0]}' opened its seal with something that is no key.")
            return answers, seals

    def _progress(self, round_: int) -> Attempt:
        stored = self.desk.store.get(_progress_key(round_))
        if stored is None:
            return Attempt(round_, 0, 0, self.setting.names, PURPOSE)
        fields = Message.decode(stored).fields
        return Attempt(round_, fields["attempt"], fields["release"], tuple(fields["roster"]), PURPOSE)

    def _without(self, last: Attempt, failures: Mapping[str, Failure], release: int) -> Attempt:
        for name, failure in failures.items():
            if failure.kind == "refused":
                raise SilodpError(f"silo '{name}' refused: {failure.reason}")
        roster = tuple(name for name in last.roster if name not in failures)
        if len(roster) < self.fewest:
            reasons = "; ".join(f"'{name}' ({f.kind}: {f.reason})" for name, f in failures.items())
            raise SilodpError(
                f"round {last.round + 1} has {counted(len(roster), 'silo')} left and needs {self.fewest}: no answer "
                f"from {reasons}. Mend it and resume: the round will go on where it is."
            )
        now = Attempt(last.round, last.attempt + 1, release, roster, PURPOSE)
        fields = {"attempt": now.attempt, "release": now.release, "roster": list(roster)}
        kept = Message("progress", self.setting.run, last.round, fields=fields)
        self.desk.store.put(_progress_key(last.round), kept.encode())
        return now


def _progress_key(round_: int) -> str:
    return f"progress/{round_}"


@dataclass(frozen=True)
class Seals:
    """A silo's side: what it may take part in, what it has drawn, and which attempt it has opened."""

    member: Member
    store: Store
    fewest: int

    @classmethod
    def of(cls, aggregator: Aggregator, setting: Setting, own: Own) -> Seals:
        """Of one silo in a run."""
        member = Member(own.identity, own.pins, setting.constants(aggregator), own.store)
        return cls(member, own.store, setting.population.m)

    @property
    def handlers(self) -> dict[str, Handler]:
        """By kind of request: to meet, and to open."""
        return {**self.member.handlers, "open": self.open}

    def admitted(self, request: Message) -> tuple[Session, Attempt]:
        """The session and attempt a request is about, if this silo may take part in it.

        Raises:
            SilodpError: the session is another; the roster is not a part of the session's, too small or without this
                silo; or this release has been opened.
        """
        session, attempt = self.session(request), self._attempt(request)
        known = tuple(name for name in session.roster if name in attempt.roster)
        if attempt.roster != known or session.name not in known or len(known) < self.fewest:
            raise SilodpError(
                f"silo '{session.name}' was asked to add up with {list(attempt.roster)}: it takes part only with "
                f"itself and at least {counted(self.fewest - 1, 'other')} of its session, in their order."
            )
        if self.store.get(self._opened_key(request, attempt)) is not None:
            raise SilodpError(
                f"silo '{session.name}' has opened release {attempt.release + 1} of round {attempt.round + 1} and will "
                "not mask the same values again: two sums that differ by one silo would show that silo's part."
            )
        return session, attempt

    def session(self, request: Message) -> Session:
        """The session a request names."""
        return self.member.session(request.run, str(request.fields.get("session")))

    def drawn(
        self, request: Message, attempt: Attempt, draw: Callable[[], dict[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """What this silo drew for this release: once, and kept before it is used."""
        kept = self.kept(request, attempt)
        return self.keep(request, attempt, draw()) if kept is None else kept

    def kept(self, request: Message, attempt: Attempt) -> dict[str, np.ndarray] | None:
        """What this silo drew for this release, if it has.

        Raises:
            SilodpError: the request has another model or sample than the one it was drawn for.
        """
        stored = self.store.get(self._kept_key(request, attempt))
        if stored is None:
            return None
        kept = Message.decode(stored)
        if kept.fields["asked"] != _asked(request):
            raise SilodpError(
                f"round {attempt.round + 1} was asked again with another model or sample: within a release both stay."
            )
        return kept.arrays

    def keep(self, request: Message, attempt: Attempt, drawn: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Store what was drawn, durably, and give it back."""
        kept = Message("kept", request.run, attempt.round, fields={"asked": _asked(request)}, arrays=drawn)
        self.store.put(self._kept_key(request, attempt), kept.encode())
        return drawn

    def open(self, request: Message) -> Message:
        """This silo's seal of one attempt: recorded first, and of one attempt per release.

        Raises:
            SilodpError: it was not asked to mask this attempt, or with another roster, or has opened another one.
        """
        session, attempt = self.session(request), self._attempt(request)
        masked = self.store.get(f"{request.run}/masked/{attempt.round}/{attempt.attempt}")
        if masked is None or Message.decode(masked).fields != request.fields:
            raise SilodpError(
                f"silo '{session.name}' was asked to open attempt {attempt.attempt + 1} of round {attempt.round + 1}, "
                "which it never masked with that roster."
            )
        key = self._opened_key(request, attempt)
        opened = self.store.get(key)
        if opened is not None and Message.decode(opened).attempt != attempt.attempt:
            raise SilodpError(
                f"silo '{session.name}' has opened another attempt of round {attempt.round + 1}: of one release it "
                "opens one."
            )
        self.store.put(key, Message("opened", request.run, attempt.round, attempt.attempt).encode())
        return request.reply(seal=session.seal_key(*attempt.use))

    def record(self, request: Message, attempt: Attempt) -> None:
        """Remember, durably, which roster an attempt was masked for."""
        key = f"{request.run}/masked/{attempt.round}/{attempt.attempt}"
        self.store.put(
            key, Message("masked", request.run, attempt.round, attempt.attempt, request.fields).encode()
        )

    def _attempt(self, request: Message) -> Attempt:
        try:
            roster, release = request.fields["roster"], request.fields["release"]
            if type(release) is not int or release < 0:
                raise TypeError
            names = tuple(str(name) for name in roster)
            return Attempt(request.round, request.attempt, release, names, PURPOSE)
        except (KeyError, TypeError):
            raise SilodpError(
                f"a request for round {request.round + 1} names no roster or no release: it was altered, or is of "
                "another version."
            ) from None

    def _opened_key(self, request: Message, attempt: Attempt) -> str:
        return f"{request.run}/opened/{attempt.round}/{attempt.release}"

    def _kept_key(self, request: Message, attempt: Attempt) -> str:
        return f"{request.run}/noisy/{attempt.round}/{attempt.release}"


def _asked(request: Message) -> str:
    """Of what the values depend on: the model and the sample."""
    bare = Message("asked", request.run, request.round, arrays=request.arrays)
    return hashlib.sha256(bare.digest().encode()).hexdigest()
