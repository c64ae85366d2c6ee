"""Rounds of secure aggregation as attempts, with masks and seals (docs/protocols.md, section 2).

In an attempt every silo on its roster sends its noisy integers under pairwise masks and a seal. If all have answered,
the release is charged and the seals are opened. If one is missing, the others send the same noisy integers again under
fresh masks and seals: nothing was seen, so nothing is charged twice. If one fails only when seals are opened, others
may have opened theirs: the next attempt is a further release, with fresh noise and its own charge.

Source: pairwise masks follow Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
(CCS 2017), section 4; seals take the place of their second mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from silodp.accounting.guarantee import SERVER_FOLLOWS
from silodp.aggregators import _key_agreement, base
from silodp.aggregators.run_spec import RunSpec
from silodp.assumption import SILO_OPERATORS, Assumption
from silodp.crypto.keys import Session
from silodp.crypto.secure_aggregation import RoundAttempt
from silodp.errors import SilodpError
from silodp.settings import Whole
from silodp.text import pluralize
from silodp.wire import schemas
from silodp.wire.messages import Message
from silodp.wire.transport import DeliveryFailure

if TYPE_CHECKING:
    from torch import Tensor


# Part of every key of an attempt: sums of counts, which are masked too, have other keys.
PURPOSE = "update"
# The key of a seal, from which its silo's mask is derived (`Session.seal_key`).
_SEAL_BYTES = 32
_PROGRESS = "progress"


MIN_SUM = 3
"""Silos in a sum: of two, each can subtract its own part and sees the other's."""

KEYS_COMPARED = Assumption(
    "keys-compared",
    "each silo has checked the other silos' long-term keys by another channel (in a simulation, one process makes them "
    "all)",
    SILO_OPERATORS,
)
UNBROKEN = Assumption(
    "mask-cryptography",
    "nobody breaks X25519, Ed25519, SHA-256 or ChaCha20. The protocol was not reviewed outside this project, and hides "
    "no timing",
    technical=True,
)
MASKING_ASSUMPTIONS = (KEYS_COMPARED, SERVER_FOLLOWS, UNBROKEN)


class MaskedAggregator(base.Aggregator):
    """Aggregators whose rounds are attempts; `min_silos` is a field of theirs (None: all silos must answer)."""

    min_silos: int | None

    adds_integers = True

    def min_silos_for(self, silos: int) -> int:
        """Return `min_silos`."""
        if self.min_silos is None:
            return silos
        Whole().check("min_silos", self.min_silos)
        return self.min_silos

    @staticmethod
    def check_min_silos(spec: RunSpec) -> None:
        """Refuse sums of too few silos.

        Raises:
            SilodpError: `min_silos` is below `MIN_SUM`, or above the number of silos.
        """
        silos, fewest = spec.population.silos, spec.population.min_survivors
        # Of two silos each knows the other's part whatever the protocol does, and everybody knows it; a run may have
        # two.
        if not min(MIN_SUM, silos) <= fewest <= silos or silos < 2:
            raise SilodpError(
                f"min_silos = {fewest} of {silos} silos: secure aggregation adds up at least {MIN_SUM} silos (all, "
                "where there are two), and no more than there are.",
                code="argument.value",
                field="min_silos",
            )

    def attempt_script(
        self,
        spec: RunSpec,
        name: str,
        answer: schemas.MessageSchema,
        *,
        setup: tuple[schemas.MessageType, ...] = (),
        prepare: tuple[schemas.MessageType, ...] = (),
        blobs: Mapping[str, schemas.Blob] | None = None,
    ) -> schemas.MessageSchedule:
        """Return the script of one silo: set-up, key agreement, then updates and openings.

        Args:
            spec: public constants.
            name: the silo's.
            answer: what it answers to an update.
            setup: messages of the set-up after the key agreement.
            prepare: messages of a round before its updates.
            blobs: the types of the byte strings of an update.
        """
        private = self.weights_privately
        # A roster lists silos once, in the run's order: keys are derived from it, and two orders would have different
        # keys.
        fields: dict[str, schemas.Check] = {
            "session": schemas.is_digest, "release": schemas.is_whole, "roster": schemas.is_roster(spec.names)
        }  # fmt: skip
        update = schemas.MessageSchema(fields, base.round_arrays(spec), blobs or {})
        opening = schemas.MessageSchema({**fields, "request": schemas.is_digest})
        return schemas.MessageSchedule(
            (*base.setup_kinds(spec, private), *_key_agreement.key_agreement_kinds(spec.names, name), *setup),
            schemas.MessageType("update", update, answer),
            prepare,
            schemas.MessageType(
                "open", opening, schemas.MessageSchema(blobs={"seal": schemas.Blob.of(_SEAL_BYTES)})
            ),
        )


@dataclass(frozen=True)
class RoundRequest:
    """What the updates of a round carry.

    Attributes:
        arrays: The arrays of every attempt.
        blobs: A function that returns the blobs of an attempt, the same for all silos; a repeated call returns the same
            bytes.
        own_blobs: A function that returns the blobs of an attempt that go to one silo alone, by its name: of those that
            `base.common_digest` leaves out. A repeated call returns the same bytes.
        keep: A function that gets an attempt, its updates and the answers to them by silo, before anything is decided
            about them; it stores what further attempts at the release will need.
    """

    arrays: Mapping[str, np.ndarray] = field(repr=False)
    blobs: Callable[[RoundAttempt], Mapping[str, bytes]] = field(default=lambda attempt: {}, repr=False)
    own_blobs: Callable[[RoundAttempt], Mapping[str, Mapping[str, bytes]]] = field(
        default=lambda attempt: {}, repr=False
    )
    keep: Callable[[RoundAttempt, Mapping[str, Message], Mapping[str, Message]], None] = field(
        default=lambda attempt, requests, answers: None, repr=False
    )

    @classmethod
    def with_samples(
        cls,
        arrays: Mapping[str, np.ndarray],
        sealed_samples: Mapping[str, bytes],
        blobs: Callable[[RoundAttempt], Mapping[str, bytes]] = lambda attempt: {},
    ) -> RoundRequest:
        """Return what updates carry where silo 0 has sealed the sample for each other silo, by its name."""
        own = {name: {base.SEALED_SAMPLE_BLOB: sealed} for name, sealed in sealed_samples.items()}
        return cls(arrays, blobs, lambda attempt: own)


@dataclass(frozen=True)
class OpenedAttempt:
    """The attempt at a round that succeeded, with all answers to its update and all seal keys, by name."""

    attempt: RoundAttempt
    answers: Mapping[str, Message] = field(repr=False)
    seals: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class ServerAttempts:
    """The server's side: attempts at a round with the silos that still answer; progress is stored before it counts.

    Attributes:
        spec: The public constants of the run.
        context: The server.
    """

    spec: RunSpec
    context: base.ServerContext

    def collect(self, round_: int, sent: RoundRequest) -> OpenedAttempt | None:
        """Make attempts until one succeeds.

        Args:
            round_: counted from 0.
            sent: what the updates carry.

        Returns:
            the attempt that succeeded; None if the budget forbids it.

        Raises:
            SilodpError: a silo refuses, or too few are left; resuming goes on with the round.
        """
        now, session = self._progress(round_), _key_agreement.current_session(self.context.store.run).session
        while True:
            # Every turn of this loop returns or loses a silo, and `_drop_silos` raises where too few are left.
            if not self.context.affords(round_, now.release, len(now.roster)):
                return None  # asked before the silos charge the release in their ledgers
            fields = {"session": session, "release": now.release, "roster": list(now.roster)}
            # Blobs are of this attempt alone: ciphertexts that were sent once are never sent for another roster.
            arrays, blobs = dict(sent.arrays), dict(sent.blobs(now))
            request = Message("update", self.spec.run, round_, now.attempt, fields, arrays, blobs)
            # One object for all silos, which is encoded once (`SignedChannel`).
            requests = dict.fromkeys(now.roster, request)
            own = sent.own_blobs(now)
            for name in own.keys() & requests.keys():
                requests[name] = replace(request, blobs={**blobs, **own[name]})
            answers, failures = self.context.ask(requests)
            sent.keep(now, requests, answers)
            if failures:  # a release that was charged may have been opened before this process began
                now = self._drop_silos(now, failures, now.release + self.context.charged(round_, now.release))
                continue
            # Until now every vector is hidden by its seal. The charge is on disk before one of them can be opened.
            if not self.context.charge(round_, now.release, len(now.roster)):
                return None
            about = {**fields, "request": request.digest()}
            opening = Message("open", self.spec.run, round_, now.attempt, about)
            opened, failures = self.context.ask(dict.fromkeys(now.roster, opening))
            if failures:  # the others' seals may be open: what comes next is seen beside this
                now = self._drop_silos(now, failures, now.release + 1)
                continue
            seals = {name: answer.blobs["seal"] for name, answer in opened.items()}
            return OpenedAttempt(now, answers, seals)

    def _progress(self, round_: int) -> RoundAttempt:
        # A restarted server goes on with the attempt that was stored last: silos answer no roster larger than their
        # last one.
        stored = self.context.store.round(round_).get(_PROGRESS)
        if stored is None:
            return RoundAttempt(round_, 0, 0, self.spec.names, PURPOSE)
        fields = Message.decode(stored).fields
        return RoundAttempt(round_, fields["attempt"], fields["release"], tuple(fields["roster"]), PURPOSE)

    def _drop_silos(
        self, last: RoundAttempt, failures: Mapping[str, DeliveryFailure], release: int
    ) -> RoundAttempt:
        for name, failure in failures.items():
            # A silo that refuses has seen something wrong. To go on without it would hide that.
            if failure.kind == "refused":
                raise SilodpError(
                    f"silo '{name}' refused: {failure.reason}", code=failure.code or "run.refused"
                )
        roster = tuple(name for name in last.roster if name not in failures)
        fewest = self.spec.population.min_survivors
        if len(roster) < fewest:
            reasons = "; ".join(f"'{name}' ({f.kind}: {f.reason})" for name, f in failures.items())
            raise SilodpError(
                f"round {last.round + 1} has {pluralize(len(roster), 'silo')} left and needs {fewest}: no answer "
                f"from {reasons}. Mend it and resume: the round will go on where it is.",
                code="run.too_few_silos",
            )
        # Stored before it is sent, so that a restarted server repeats this attempt and begins no other.
        now = RoundAttempt(last.round, last.attempt + 1, release, roster, PURPOSE)
        fields = {"attempt": now.attempt, "release": now.release, "roster": list(roster)}
        kept = Message("progress", self.spec.run, last.round, fields=fields)
        self.context.store.round(last.round).put(_PROGRESS, kept.encode())
        return now


@dataclass(frozen=True)
class MaskedServer(ABC):
    """The server's side of an aggregator whose rounds are attempts."""

    spec: RunSpec

    def set_up(self, context: base.ServerContext) -> None:
        """Let the silos agree on keys, then prepare what else a session needs."""
        _key_agreement.set_up(self.spec, context, lambda session: self.prepare(context, session))

    def prepare(self, context: base.ServerContext, session: _key_agreement.SessionInfo) -> None:  # noqa: B027  # a default
        """Exchange what else a session needs; by default nothing. Called anew if the set-up was interrupted."""

    def total(
        self, context: base.ServerContext, round_: int, arrays: Mapping[str, np.ndarray]
    ) -> Tensor | None:
        """Make attempts at a round until one succeeds, and return the sum (d,) float64; None: budget spent.

        Raises:
            SilodpError: the sum is longer than honest silos send (code run.long_sum).
        """
        import torch

        from silodp.aggregators.limits import check_sum  # a server alone needs it

        result = ServerAttempts(self.spec, context).collect(round_, self.request(context, round_, arrays))
        if result is None:
            return None
        value = self.combine(context, result)
        check_sum(self.spec, value, round_, len(result.attempt.roster))
        return torch.from_numpy(value)

    def request(
        self, context: base.ServerContext, round_: int, arrays: Mapping[str, np.ndarray]
    ) -> RoundRequest:
        """Return what updates of this round carry; by default the arrays alone."""
        return RoundRequest(arrays)

    @abstractmethod
    def combine(self, context: base.ServerContext, result: OpenedAttempt) -> np.ndarray:
        """Return the sum (d,) float64 of an attempt's answers, their seals taken off."""


class MaskedSilo(ABC):
    """A silo's side of an aggregator whose rounds are attempts. The silo's gate decides what may be asked.

    It draws noise once for a release, and opens the seal of the attempt that it masked last.
    """

    def __init__(self, aggregator: MaskedAggregator, spec: RunSpec, context: base.SiloContext) -> None:
        self._aggregator, self._spec, self._context = aggregator, spec, context
        self._member = _key_agreement.SiloKeyAgreement(
            context.identity, context.pins, spec.digest, context.store.run
        )
        self.handlers: Mapping[str, base.Handler] = {**self._member.handlers, "open": self.open}

    def group_secret(self, run: str) -> bytes:
        """Return the secret of the session that all silos share."""
        return self._member.group_secret(run)

    def update(self, request: Message, work: base.LocalUpdateFn) -> tuple[Message, int]:
        """Answer an update with this silo's noisy integers under the attempt's masks and seal."""
        return self.answer(request, self._member.session_of(request), self.attempt(request), work)

    @abstractmethod
    def answer(
        self, request: Message, session: Session, attempt: RoundAttempt, work: base.LocalUpdateFn
    ) -> tuple[Message, int]:
        """Return the answer to an update, and how many rows were not finite."""

    def attempt(self, request: Message) -> RoundAttempt:
        """Return the attempt that an update belongs to."""
        return self._attempt(request, base.common_digest(request))

    def get_or_draw(
        self, request: Message, attempt: RoundAttempt, draw: Callable[[], dict[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Return what this silo drew for a release: drawn once, and stored before use, for further attempts at it.

        Args:
            request: the update.
            attempt: one at the release.
            draw: draws named arrays, the noisy integers or the noise.
        """
        # Several attempts at one release have the same noise, so that the server sees one value under different masks,
        # and not two values.
        key, asked = f"noisy/{attempt.release}", base.model_and_sample(request)
        store = self._context.store.round(attempt.round)
        stored = store.get(key)
        if stored is not None:
            kept = Message.decode(stored)
            if kept.fields["asked"] == asked:
                return kept.arrays
            # The gate lets no round be asked with two models; what was drawn for one serves no other.
            raise SilodpError(
                f"silo '{self._member.identity.name}' has drawn noise for round {attempt.round + 1} with another model "
                "or sample; nothing was sent.",
                code="gate.model",
            )
        arrays = draw()
        store.put(key, Message("kept", request.run, attempt.round, 0, {"asked": asked}, arrays).encode())
        return arrays

    def open(self, request: Message) -> Message:
        """Answer "open" with this silo's seal key of the attempt that it masked last."""
        attempt = self._attempt(request, request.fields["request"])
        # The key depends on the whole update that this silo was sent, including the blob that only it was sent.
        session = self._member.session_of(request)
        return request.reply(seal=session.seal_key(*attempt.use, self._context.masked()))

    def _attempt(self, request: Message, digest: str) -> RoundAttempt:
        release, roster = request.fields["release"], tuple(request.fields["roster"])
        return RoundAttempt(request.round, request.attempt, release, roster, PURPOSE, digest)
