"""The mailbox of a server: the requests of its run wait there for the silos' answers, whatever courier carries them.

`Mailbox` is the `Transport` of the run. The run's thread calls `ask` and waits; the threads of a courier look for
requests and deliver replies. `ServerSocket` and `HttpsServer` are mailboxes that couriers reach over a socket and over
HTTPS. A silo answers with `answer_request` in both cases.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from silodp.errors import CODES, DISK_FULL, SilodpError
from silodp.wire.transport import DeliveryFailure, Endpoint, Traffic, split_outcomes
from silodp_deploy.courier import Reply
from silodp_deploy.status import describe_seen

_log = logging.getLogger(__name__)

REMINDER_SECONDS = 60.0
"""A message about the same thing is logged once in this time."""


def answer_request(endpoint: Endpoint, request: bytes) -> Reply:
    """Let a silo answer; a refusal leaves it as a code from a fixed list.

    The text of an error stays in the silo's log: it may say something about the silo's data.
    """
    try:
        return Reply(endpoint.receive(request))
    except SilodpError as error:
        _log.warning("refused: %s [%s]", error, error.code)
        return Reply(b"", error.code)
    except OSError as error:
        _log.error("failed: %s", error)
        return Reply(b"", "run.disk_full" if error.errno in DISK_FULL else "deploy.silo_failed")
    except Exception:
        _log.exception("failed")
        return Reply(b"", "deploy.silo_failed")


@dataclass
class Exchange:
    """A request that waits for its answer.

    Attributes:
        id: Name of the exchange, 32 hexadecimal digits, with which the reply is delivered.
        silo: Name of the silo.
        request: The request as signed bytes.
        due: Time (`time.monotonic`) from which on a courier at a socket may take the request. Over HTTPS the silo may
            take it at any time.
        outcome: The answer, or why there is none; None while it is awaited.
    """

    id: str
    silo: str
    request: bytes
    due: float = -math.inf
    outcome: bytes | DeliveryFailure | None = None


class Mailbox:
    """Requests and their answers, shared by the thread of the run and those of a courier; a `Transport`.

    Args:
        silos: Names of the silos.
        answer_timeout: Seconds that a silo has for an answer.
        answers: Number of answers that have left each silo, at least, as counted by an earlier process.

    Attributes:
        traffic: Bytes that were sent so far.
    """

    def __init__(
        self, silos: Iterable[str], answer_timeout: float, answers: Mapping[str, int] | None = None
    ) -> None:
        self.traffic = Traffic()
        self._answer_timeout, self._answers = answer_timeout, dict(answers or {})
        self._exchanges: dict[str, Exchange] = {}
        self._seen: dict[str, float | None] = dict.fromkeys(silos)
        self._changed = threading.Condition()  # guards the two dictionaries

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None
    ) -> tuple[dict[str, bytes], dict[str, DeliveryFailure]]:
        """Offer each silo its request until the answer is delivered or the time is over; see `Transport.ask`.

        Args:
            requests: Signed bytes by the name of the silo.
            timeout: Seconds to wait at most; None: `answer_timeout`.
        """
        timeout = self._answer_timeout if timeout is None else timeout
        # Random names: a courier cannot guess the exchange of another silo, and a late reply finds no later exchange.
        asked = [Exchange(secrets.token_hex(16), name, data) for name, data in requests.items()]

        def list_silent() -> list[str]:
            return [one.silo for one in asked if one.outcome is None]

        with self._changed:
            self._exchanges.update({one.id: one for one in asked})
            self._announce(requests)
            try:
                self._wait_for(list_silent, timeout, "the answers of ", REMINDER_SECONDS)
            finally:
                # A reply that comes later finds no exchange, and is not used.
                for one in asked:
                    del self._exchanges[one.id]
        answers, failures = split_outcomes(
            {
                one.silo: self._explain_silence(one.silo, timeout) if one.outcome is None else one.outcome
                for one in asked
            }
        )
        self.traffic = self.traffic.plus(requests.values(), answers.values())
        return answers, failures

    def find_pending(self, silo: str | None = None) -> list[Exchange]:
        """Return the requests without an answer, of one silo or of all."""
        with self._changed:
            return [
                one for one in self._exchanges.values() if one.outcome is None and silo in (None, one.silo)
            ]

    def deliver(self, exchange: str, reply: Reply) -> bool:
        """Take a silo's reply to a request.

        Args:
            exchange: Id of the exchange.
            reply: Reply of the silo. An unknown code of a refusal counts as deploy.silo_failed.

        Returns:
            Whether the reply was awaited; a later or a repeated one is not used.
        """
        with self._changed:
            found = self._exchanges.get(exchange)
            if found is None or found.outcome is not None:
                return False
            # The first reply counts. A silo's later ones are the same bytes, and a courier's inventions do not verify.
            found.outcome = _make_refusal(reply.refused) if reply.refused else reply.body
            # This takes the lock a second time: the lock of a condition is reentrant.
            self.mark_seen(found.silo)
            return True

    def mark_seen(self, silo: str) -> None:
        """Store the present time as the time when the silo was last seen."""
        with self._changed:
            self._seen[silo] = time.monotonic()
            self._changed.notify_all()

    def seconds_since_seen(self) -> dict[str, float | None]:
        """Return for each silo the seconds since it was last seen; None before the first time."""
        # Not the clock of the day, which a time server may set back.
        now = time.monotonic()
        return {name: None if seen is None else now - seen for name, seen in self._seen.items()}

    def answers(self) -> dict[str, int]:
        """Return by silo how many answers have left it, at least.

        They are counted where silos connect by themselves; a courier could raise the number. A silo that is not in this
        run keeps its number for the next one.
        """
        return dict(self._answers)

    def end_run(self) -> None:
        """Tell the silos that the run is over, where the courier can."""

    def wait_for_silos(self, timeout: float | None = None) -> None:
        """Wait until every silo was seen once.

        Args:
            timeout: Seconds to wait at most; None: no limit.
        """
        with self._changed:
            self._wait_for(
                lambda: [name for name, seen in self._seen.items() if seen is None],
                math.inf if timeout is None else timeout,
            )

    def _announce(self, silos: Iterable[str]) -> None:
        """Wake the threads that wait for requests of these silos."""
        self._changed.notify_all()

    def _explain_silence(self, silo: str, timeout: float) -> DeliveryFailure:
        """Return the failure of a silo that did not answer within so many seconds."""
        told = f"it has not answered within the {timeout:g} seconds of --patience, counted from the request"
        return DeliveryFailure("timeout", told + self._find_cause(silo))

    def _find_cause(self, silo: str) -> str:
        """Return what is known to keep a silo away, as a clause; "" where nothing is."""
        return ""

    def _wait_for(
        self, list_missing: Callable[[], list[str]], timeout: float, what: str = "", quiet: float = 0.0
    ) -> None:
        """Wait until no silo is missing or the time is over, and log once a minute which are: one may have died.

        Args:
            list_missing: Returns the names of the silos that are waited for.
            timeout: Seconds to wait at most.
            what: What is awaited of the silos, for the log, for example "the answers of ".
            quiet: Seconds before the first line of the log.
        """
        started = time.monotonic()
        reminder = started + quiet
        while (missing := list_missing()) and (now := time.monotonic()) < started + timeout:
            if now >= reminder:
                since = self.seconds_since_seen()
                told = [f"{name} ({describe_seen(since[name])}{self._find_cause(name)})" for name in missing]
                _log.info("waiting for %s%s", what, ", ".join(told))
                reminder = now + REMINDER_SECONDS
            # `mark_seen` and `deliver` wake this thread; else it wakes for the next line of the log or the end.
            self._changed.wait(min(started + timeout, reminder) - now)


def _make_refusal(stated: str) -> DeliveryFailure:
    # A code that is not on the list could be any text of a courier or a silo, for a log or a page of the server.
    known = stated if stated in CODES else "deploy.silo_failed"
    return DeliveryFailure("refused", f"{CODES[known]} (the silo's own log says more)", known)
