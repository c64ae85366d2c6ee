"""The answers of a silo in a run: each is in its store, and listed in its ledger before it is sent.

For every answer a silo writes durably, in this order: the charge, if it has one; the answer, with the line that the
ledger will have of it; and that line. So wherever the process is killed, the store has at most one answer that the
ledger does not list, and its line is the next one. It is written when the run is opened, as if the answer had been
sent. In every other case store and ledger are copies of different moments, and nothing is answered: a store without an
answer that the ledger lists would answer once more, and a ledger without an answer that the store has would admit
requests that were answered for already.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import NoReturn

from silodp.accounting.progress import Answer
from silodp.accounting.series_ledger import LedgerView
from silodp.errors import SilodpError
from silodp.parsing import parse_json, refuse_malformed
from silodp.wire.messages import Message
from silodp.wire.store import RoundStore, Store

_ANSWER = "answer/"
_PLACE = re.compile(rf"(?:round/(\d+)/)?{_ANSWER}")


def name_answer(message: str, round_: int, attempt: int | str) -> str:
    """Return the key under which a silo stores its answer to a request."""
    return f"{_ANSWER}{message}/{round_}/{attempt}"


class Answers:
    """What a silo has answered in a run.

    Args:
        name: The name of the silo.
        store: The silo's durable store of the run.
        ledger: The ledger of the silo.

    Raises:
        SilodpError: Store and ledger are copies of different moments (code gate.rollback_detected).
    """

    def __init__(self, name: str, store: RoundStore, ledger: LedgerView) -> None:
        self._name, self._store, self._ledger = name, store, ledger
        self._check(ledger.answers)
        # By the chain of hashes: an answer can be listed after no other line than the one that it followed.
        unlisted = self._list_unlisted()
        while following := [key for key, entry in unlisted.items() if entry[1] == ledger.head]:
            ledger.record_answer(unlisted.pop(following[0])[0])
        if unlisted:
            self._refuse("ledger", next(iter(unlisted)))

    def find(self, request: Message, is_setup: bool) -> Message | None:
        """Return the stored answer to a request; None where it was not answered.

        Raises:
            SilodpError: Another request with the same kind, round and attempt was answered (code gate.answered), or the
                store is an old copy (gate.rollback_detected).
        """
        # A store may be restored beside a process that runs: what was sent last must be in it.
        self._check(self._ledger.answers[-1:])
        key = name_answer(request.kind, request.round, request.attempt)
        stored = self._choose(-1 if is_setup else request.round).get(key)
        if stored is None:
            return None
        answer, previous, content = _unpack(stored, key)
        if answer.request != request.digest():
            raise SilodpError(
                f"silo '{self._name}' has answered another request under {request.key}: it answers each key once.",
                code="gate.answered",
            )
        if answer not in self._ledger.answers:
            if previous != self._ledger.head:
                self._refuse("ledger", key)
            self._ledger.record_answer(answer)
        return Message.decode(content)

    def add(self, request: Message, answer: Message, round_: int, state: dict[str, object]) -> None:
        """Store an answer and list it, durably; it may be sent when this returns.

        Args:
            request: The request.
            answer: The answer.
            round_: The round that the silo is in, -1 in the set-up.
            state: The state of the gate after the request.
        """
        content = answer.encode()
        digest = hashlib.sha256(content).hexdigest()
        series = self._ledger.series
        entry = Answer(request.kind, round_, request.attempt, request.digest(), digest, state, series)
        line = {**entry.to_line(), "previous": self._ledger.head}
        packed = json.dumps(line).encode() + b"\n" + content
        self._choose(round_).put(name_answer(request.kind, request.round, request.attempt), packed)
        self._ledger.record_answer(entry)

    def _choose(self, round_: int) -> Store:
        return self._store.run if round_ < 0 else self._store.round(round_)

    def _check(self, answers: Iterable[Answer]) -> None:
        """Refuse a store that lacks a listed answer."""
        for listed in answers:
            key = name_answer(listed.message, max(listed.round, 0), listed.attempt)
            stored = self._choose(listed.round).get(key)
            if stored is None:
                self._refuse("store", key)
            answer, _, content = _unpack(stored, key)
            if answer != listed or hashlib.sha256(content).hexdigest() != listed.digest:
                self._refuse("store", key)

    def _list_unlisted(self) -> dict[str, tuple[Answer, str]]:
        """Return the stored answers that the ledger does not list, each with the hash of the line before it."""
        last = max((answer.round for answer in self._ledger.answers), default=-1)
        found = {}
        for key in self._store.run.names():
            place = _PLACE.match(key)
            # What is left of earlier rounds is dropped with the next answer.
            if place is None or (place[1] and int(place[1]) < last):
                continue
            answer, previous, _ = _unpack(self._store.run.get(key) or b"", key)
            if answer not in self._ledger.answers:
                found[key] = answer, previous
        return found

    def _refuse(self, older: str, key: str) -> NoReturn:
        other = "ledger" if older == "store" else "store"
        raise SilodpError(
            f"silo '{self._name}' has a {older} that is an old copy, or was lost: its {other} has {key}, which the "
            f"{older} does not; restore the newest copies of both, or begin a new run, which adds its own ε; nothing "
            "was sent.",
            code="gate.rollback_detected",
        )


def _unpack(stored: bytes, key: str) -> tuple[Answer, str, bytes]:
    """Return a stored answer: its line, the hash of the line before, and its bytes."""
    line, _, content = stored.partition(b"\n")
    with refuse_malformed(
        f"the stored {key} is damaged, or another version has written it: restore it from a copy.",
        code="checkpoint.damaged",
    ):
        fields = parse_json(line)
        return Answer.from_line(fields), str(fields["previous"]), content
