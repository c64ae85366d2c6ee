"""The agreement of a server and its silos on the public folder, where a courier says nothing about it.

Over HTTPS a silo proves when it connects that it has accepted the server's public folder. Over other couriers the
server asks for it: before the first request of a silo, it sends "join" with a random number, and the silo answers with
the digest that it has accepted and the number of its protocol. Both messages are signed, and the answer is bound to the
random number, so that a courier can neither change nor repeat it: a signature over a random number of the other side
(challenge-response identification).

Source: Menezes et al. 1996, Handbook of Applied Cryptography (challenge-response by digital signatures).
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from silodp.crypto.keys import Identity
from silodp.errors import CODES, SilodpError
from silodp.wire.messages import Message
from silodp.wire.schemas import Blob, MessageSchema, MessageType, is_digest, is_whole
from silodp.wire.transport import SERVER, DeliveryFailure, Traffic, Transport, sign, verify
from silodp_deploy import PROTOCOL

_log = logging.getLogger(__name__)

JOIN = MessageType(
    "join",
    MessageSchema(blobs={"nonce": Blob.of(32)}),
    MessageSchema(fields={"digest": is_digest, "protocol": is_whole}),
)
"""Asked outside of any run; a silo answers it whenever it is asked."""
JOIN_BYTES = max(JOIN.request.max_bytes, JOIN.answer.max_bytes)
NO_RUN = "-"
"""The name that "join" has in place of the id of a run."""
_PAUSE_SECONDS = 5.0


def answer_join(request: Message, name: str, digest: str) -> Message:
    """Return a silo's answer to "join".

    Args:
        request: A request of the server whose signature was verified.
        name: Name of the silo.
        digest: Digest of the public folder that the silo has accepted.

    Raises:
        SilodpError: The request is malformed.
    """
    JOIN.request.check(request, f"the server of silo '{name}'")
    fields = {"digest": digest, "protocol": PROTOCOL}
    return Message(JOIN.name, request.run, request.round, request.attempt, fields)


@dataclass(eq=False)
class AgreedTransport:
    """A transport that asks a silo for nothing else before the silo has joined.

    Attributes:
        transport: The transport that carries the bytes.
        identity: The server's long-term key.
        silos: The silos' public keys by name, 32 bytes each.
        digest: Digest of the server's public folder.
        answer_timeout: Seconds that a silo has for an answer.
        on_change: Called when a silo has joined.
        joined: Names of the silos that have joined.
    """

    transport: Transport
    identity: Identity
    silos: Mapping[str, bytes]
    digest: str
    answer_timeout: float
    on_change: Callable[[], object] = lambda: None
    joined: set[str] = field(default_factory=set, init=False)

    @property
    def traffic(self) -> Traffic:
        """What was sent so far."""
        return self.transport.traffic

    def wait_for_silos(self, timeout: float | None = None) -> None:
        """Wait until every silo has joined.

        Args:
            timeout: Seconds to wait at most; None: no limit.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while missing := [name for name in self.silos if name not in self.joined]:
            if (left := end - time.monotonic()) <= 0:
                return
            _log.info("waiting for %s to join", ", ".join(missing))
            started = time.monotonic()
            # Requests and answers may be carried by hand or by a slow job: a courier may need minutes.
            self._ask_or_join({}, missing, min(left, self.answer_timeout))
            # A silo that refuses does so at once; it is asked again when its operator may have done something.
            if self.joined.issuperset(self.silos):
                return
            time.sleep(max(0.0, min(left, _PAUSE_SECONDS) - (time.monotonic() - started)))

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None
    ) -> tuple[dict[str, bytes], dict[str, DeliveryFailure]]:
        """Ask each silo that has joined, and the others as soon as they have joined; see `Transport.ask`."""
        timeout = self.answer_timeout if timeout is None else timeout
        end = time.monotonic() + timeout
        joined = {name: data for name, data in requests.items() if name in self.joined}
        answers, failures = self._ask_or_join(
            joined, [name for name in requests if name not in joined], timeout
        )
        # Silos that have joined in this call still get their request, in the time that is left of the same timeout.
        late = {name: requests[name] for name in requests if name in self.joined and name not in joined}
        if late:
            more, failed = self.transport.ask(late, max(0.0, end - time.monotonic()))
            answers, failures = {**answers, **more}, {**failures, **failed}
        return answers, failures

    def _ask_or_join(
        self, requests: Mapping[str, bytes], new: list[str], timeout: float
    ) -> tuple[dict[str, bytes], dict[str, DeliveryFailure]]:
        """Send requests to some silos, and "join" to others, side by side; return what came of the requests."""
        joins = {name: Message(JOIN.name, NO_RUN, blobs={"nonce": secrets.token_bytes(32)}) for name in new}
        sent = {name: sign(join, self.identity, name) for name, join in joins.items()}
        # In one call: the round of the silos that have joined does not wait for one that is away.
        answers, failures = self.transport.ask({**requests, **sent}, timeout)
        for name, join in joins.items():
            if name in answers:
                code = self._find_refusal(name, join, answers.pop(name))
                if code is None:
                    self.joined.add(name)
                    _log.info("silo '%s' has joined", name)
                    self.on_change()
                else:
                    failures[name] = DeliveryFailure("refused", CODES[code], code)
            if name in failures:
                _log.warning("silo '%s' has not joined: %s", name, failures[name].reason)
        return answers, failures

    def _find_refusal(self, name: str, join: Message, data: bytes) -> str | None:
        """Return the code for which a silo's answer to "join" does not let it take part; None where it does."""
        sender = f"silo '{name}'"
        try:
            # The digest of this very "join", with its random number, is signed: an answer of another day does not fit.
            answer = verify(data, self.silos[name], sender, SERVER, join.digest(), JOIN_BYTES)
            JOIN.answer.check(answer, sender)
        except SilodpError as error:
            return error.code
        # The protocol first: another one may compute the digest of a folder in another way.
        if answer.fields["protocol"] != PROTOCOL:
            return "deploy.version"
        return None if answer.fields["digest"] == self.digest else "deploy.digest"
