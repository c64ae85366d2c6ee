"""Attempts at one round, on the server's side and on a silo's (docs/protocols.md, section 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from silodp.aggregators._key_agreement import SiloKeyAgreement, current
from silodp.aggregators.base import Aggregator, Handler, ServerContext, SiloContext
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.keys import Session
from silodp.crypto.secure_aggregation import RoundAttempt
from silodp.errors import SilodpError, counted
from silodp.wire.messages import Message
from silodp.wire.schemas import Array, Blob, Check, Kind, Schema, is_digest, is_roster, is_whole
from silodp.wire.store import RoundStore
from silodp.wire.transport import Failure

PURPOSE = "update"
SEALED_SAMPLE_BLOB = "sampled"
"""The blob of an update that differs between silos: what silo 0 sealed for the one that is asked."""
_SEAL_BYTES = 32
_PROGRESS = "progress"


def model_and_sample(request: Message) -> str:
    """Digest of what a silo's values in a round depend on: the model, and who and which silos take part."""
    return Message("update", request.run, request.round, arrays=request.arrays).digest()


def common_digest(request: Message) -> str:
    """Digest of all that an update says to every silo on its roster alike.

    Masks and seals are derived under it: silos that were asked different things, or one that is asked otherwise after
    its store was set back, share no masks, so nothing of theirs can be subtracted.
    """
    if SEALED_SAMPLE_BLOB not in request.blobs:
        return request.digest()
    return replace(
        request, blobs={n: blob for n, blob in request.blobs.items() if n != SEALED_SAMPLE_BLOB}
    ).digest()


def _fields(setting: RunSpec) -> dict[str, Check]:
    return {"session": is_digest, "release": is_whole, "roster": is_roster(setting.names)}


def update_kind(
    setting: RunSpec, arrays: Mapping[str, Array], blobs: Mapping[str, Blob], answer: Schema
) -> Kind:
    """An update in attempts."""
    return Kind("update", Schema(_fields(setting), arrays, blobs), answer)


def open_kind(setting: RunSpec) -> Kind:
    """The request to open the seal of an attempt, named by its number and the digest of its update."""
    return Kind(
        "open",
        Schema({**_fields(setting), "request": is_digest}),
        Schema(blobs={"seal": Blob.of(_SEAL_BYTES)}),
    )


@dataclass(frozen=True)
class ServerAttempts:
    """The server's side: who is still in, and what has been tried. Progress is durable before it is acted on."""

    setting: RunSpec
    desk: ServerContext
    fewest: int

    def collect(
        self,
        round_: int,
        arrays: Mapping[str, np.ndarray],
        blobs: Callable[[RoundAttempt], Mapping[str, bytes]] = lambda attempt: {},
        boxes: Mapping[str, bytes] | None = None,
    ) -> tuple[dict[str, Message], dict[str, bytes], RoundAttempt] | None:
        """(answers, seals, attempt): of everyone on the roster of the first attempt that succeeds; None: budget spent.

        `boxes`: what goes to one silo alone, in every attempt, as the blob `SEALED_SAMPLE_BLOB`.

        Raises:
            SilodpError: a silo refuses, or too few are left; resuming goes on with the round.
        """
        now, session = self._progress(round_), current(self.desk.store.run).session
        while True:
            if not self.desk.affords(round_, now.release, len(now.roster)):
                return None  # before silos charge for it in ledgers of their own
            fields = {"session": session, "release": now.release, "roster": list(now.roster)}
            request = Message(
                "update", self.setting.run, round_, now.attempt, fields, dict(arrays), dict(blobs(now))
            )
            requests = {name: request for name in now.roster}
            for name in requests.keys() & (boxes or {}).keys():
                requests[name] = replace(
                    request, blobs={**request.blobs, SEALED_SAMPLE_BLOB: (boxes or {})[name]}
                )
            answers, failures = self.desk.ask(requests)
            if failures:  # a release that was charged may have been opened before this process began
                now = self._without(now, failures, now.release + self.desk.charged(round_, now.release))
                continue
            if not self.desk.charge(round_, now.release, len(now.roster)):
                return None
            about = {**fields, "request": request.digest()}
            opening = Message("open", self.setting.run, round_, now.attempt, about)
            opened, failures = self.desk.ask({name: opening for name in now.roster})
            if failures:  # the others' seals may be open: what comes next is seen beside this
                now = self._without(now, failures, now.release + 1)
                continue
            return answers, {name: answer.blobs["seal"] for name, answer in opened.items()}, now

    def _progress(self, round_: int) -> RoundAttempt:
        stored = self.desk.store.round(round_).get(_PROGRESS)
        if stored is None:
            return RoundAttempt(round_, 0, 0, self.setting.names, PURPOSE)
        fields = Message.decode(stored).fields
        return RoundAttempt(round_, fields["attempt"], fields["release"], tuple(fields["roster"]), PURPOSE)

    def _without(self, last: RoundAttempt, failures: Mapping[str, Failure], release: int) -> RoundAttempt:
        for name, failure in failures.items():
            if failure.kind == "refused":
                raise SilodpError(
                    f"silo '{name}' refused: {failure.reason}", code=failure.code or "run.refused"
                )
        roster = tuple(name for name in last.roster if name not in failures)
        if len(roster) < self.fewest:
            reasons = "; ".join(f"'{name}' ({f.kind}: {f.reason})" for name, f in failures.items())
            raise SilodpError(
                f"round {last.round + 1} has {counted(len(roster), 'silo')} left and needs {self.fewest}: no answer "
                f"from {reasons}. Mend it and resume: the round will go on where it is.",
                code="run.too_few_silos",
            )
        now = RoundAttempt(last.round, last.attempt + 1, release, roster, PURPOSE)
        fields = {"attempt": now.attempt, "release": now.release, "roster": list(roster)}
        kept = Message("progress", self.setting.run, last.round, fields=fields)
        self.desk.store.round(last.round).put(_PROGRESS, kept.encode())
        return now


@dataclass(frozen=True)
class SiloAttempts:
    """A silo's side: what it has drawn for a release, and its seals. What it may be asked, its gate decides."""

    member: SiloKeyAgreement
    store: RoundStore
    masked: Callable[[], str]

    @classmethod
    def of(cls, aggregator: Aggregator, setting: RunSpec, own: SiloContext) -> SiloAttempts:
        """Of one silo in a run."""
        return cls(
            SiloKeyAgreement(own.identity, own.pins, setting.digest, own.store.run),
            own.store,
            own.masked,
        )

    @property
    def handlers(self) -> dict[str, Handler]:
        """By kind of request: to meet, and to open."""
        return {**self.member.handlers, "open": self.open}

    def session(self, request: Message) -> Session:
        """The session a request names, if it is the silo's."""
        return self.member.session(request.run, request.fields["session"])

    def attempt(self, request: Message) -> RoundAttempt:
        """The attempt that an update is of."""
        return self._attempt(request, common_digest(request))

    def get_or_draw(
        self, request: Message, attempt: RoundAttempt, draw: Callable[[], dict[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """What this silo drew for this release: once, and kept before it is used, for further attempts at it."""
        key, asked = f"noisy/{attempt.release}", model_and_sample(request)
        store = self.store.round(attempt.round)
        stored = store.get(key)
        if stored is not None:
            kept = Message.decode(stored)
            if kept.fields["asked"] == asked:
                return kept.arrays
            # The gate lets no round be asked with two models; what was drawn for one serves no other.
            raise SilodpError(
                f"silo '{self.member.identity.name}' has drawn noise for round {attempt.round + 1} with another model "
                "or sample; nothing was sent.",
                code="gate.model",
            )
        arrays = draw()
        store.put(key, Message("kept", request.run, attempt.round, 0, {"asked": asked}, arrays).encode())
        return arrays

    def open(self, request: Message) -> Message:
        """This silo's seal of the attempt that it masked last."""
        attempt = self._attempt(request, request.fields["request"])
        # Of everything that this silo was asked in its update, what no other silo was sent included.
        return request.reply(seal=self.session(request).seal_key(*attempt.use, self.masked()))

    def _attempt(self, request: Message, digest: str) -> RoundAttempt:
        release, roster = request.fields["release"], tuple(request.fields["roster"])
        return RoundAttempt(request.round, request.attempt, release, roster, PURPOSE, digest)
