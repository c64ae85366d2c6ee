"""Mutants of every message that a run sends, for each party that reads it.

A mutant is signed by the party that the reader trusts, unless bytes are mutated after signing. Whatever it is, the
reader answers or raises `SilodpError`; it never ends in another exception.

    mutant          entries and names of a message, with values of any type
    json_mutant     both JSON headers of the encoded message: a value of any type in any place, at every depth
    nested          headers that nest thousands of brackets, with lengths that are not theirs
    flipped         one bit
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from silodp.aggregators import Plain
from silodp.aggregators.masked import Masked
from silodp.crypto.keys import Identity
from silodp.errors import SilodpError
from silodp.wire.messages import Message
from silodp.wire.transport import SERVER, DeliveryFailure, SignedParty, _sign_bytes, sign, verify
from support.oracles import small_federation
from support.private import (
    HALF,
    HIDDEN,
    LATTICE,
    PAILLIER,
    PRIMARY,
    RECORDS,
    SAMPLED,
    SELECT,
    Parties,
    Recording,
)
from support.stores import Backup

RUNS = {
    "plain": (Plain(), SAMPLED),
    "masked": (Masked(), RECORDS),
    "lattice": (LATTICE, SAMPLED),
    "lattice hidden": (HIDDEN["lattice"], HALF),
    "paillier": (PAILLIER, RECORDS),
    "paillier hidden": (HIDDEN["paillier"], HALF),
    "select": (SELECT, replace(PRIMARY, user_sampling=0.5)),
}
_JSON = (
    None, True, False, 0, -1, 1, 2**53, 2**64, 10**400, 0.5, float("nan"), float("inf"), "", "silo0", "0" * 64,
    "\ud800", "a/b", "x" * 10_000, [], {}, [[]], [["silo0"]], ["silo0", 1], {"a": {"b": []}}, [None] * 50,
)  # fmt: skip
_LITERALS = ("1" * 5000, "-" + "1" * 5000, "1e999", "-0", '{"a": 1, "a": []}')
"""JSON that `json.dumps` does not write."""


def _json(generator: random.Random) -> object:
    return generator.choice([*_JSON, *(f"literal {number}" for number in range(len(_LITERALS)))])


def _mutate_json(value: object, generator: random.Random) -> object:
    """JSON with one value, in any place, replaced, wrapped, removed or added."""
    children = (
        list(value) if isinstance(value, dict) else list(range(len(value) if type(value) is list else 0))
    )
    if not children or generator.random() < 0.25:
        return generator.choice([_json(generator), _json(generator), [value], {"a": value}])
    place = generator.choice(children)
    changed = value.copy()
    match generator.random():
        case chance if chance < 0.1:
            del changed[place]
        case chance if chance < 0.2:
            more = _json(generator)
            changed = {**value, "more": more} if isinstance(value, dict) else [*value, more]
        case _:
            changed[place] = _mutate_json(value[place], generator)
    return changed


def _dump_json(value: object) -> bytes:
    text = json.dumps(value)
    for number, literal in enumerate(_LITERALS):
        text = text.replace(f'"literal {number}"', literal)
    return text.encode()


def json_mutant(message: Message, generator: random.Random) -> bytes:
    """The bytes of a message whose JSON, that of safetensors or our own inside it, is mutated."""
    body = message.encode()
    (length,) = struct.unpack("<Q", body[:8])
    outer = json.loads(body[8 : 8 + length])
    if generator.random() < 0.3:
        header = _dump_json(_mutate_json(outer, generator))
    else:
        inner = json.loads(outer["__metadata__"]["message"])
        if generator.random() < 0.5:
            inner["fields"] = _mutate_json(inner["fields"], generator)
        else:
            inner = _mutate_json(inner, generator)
        outer["__metadata__"]["message"] = _dump_json(inner).decode()
        header = json.dumps(outer).encode()
    return struct.pack("<Q", len(header)) + header + body[8 + length :]


def _arrays(generator: random.Random) -> np.ndarray:
    shape = generator.choice([(), (0,), (1,), (3,), (5,), (11,), (12,), (12, 1), (3, 12), (1000,)])
    dtype = generator.choice(
        ["bool", "int8", "uint8", "int64", "uint32", "uint64", "float16", "float32", "float64"]
    )
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(generator.randbytes(size), dtype).reshape(shape)


def _refill(array: np.ndarray | None, generator: random.Random) -> np.ndarray:
    """An array of the same type and shape, of other numbers: no schema refuses it."""
    if array is None:
        return _arrays(generator)
    if generator.random() < 0.5:
        content = generator.randbytes(array.nbytes)
    else:
        content = bytes([generator.choice([0, 1, 0x7F, 0xFF])]) * array.nbytes
    return np.frombuffer(content, array.dtype).reshape(array.shape)


def mutant(message: Message, generator: random.Random) -> Message:
    """The message with one to three parts changed, added or taken away; it may be one that `Message` itself refuses."""
    parts = {"fields": dict(message.fields), "arrays": dict(message.arrays), "blobs": dict(message.blobs)}
    names = {name: getattr(message, name) for name in ("kind", "run", "round", "attempt")}
    for _ in range(generator.randint(1, 3)):
        place = generator.choice(["names", "fields", "fields", "arrays", "arrays", "blobs", "blobs"])
        if place == "names":
            name = generator.choice(list(names))
            names[name] = generator.choice([*_JSON, "update", "open", "setup", "hello", "counts"])
            continue
        known = parts[place]
        name = generator.choice(
            [*known, "more", "sample", "clients", "weights", "session", "roster", "release"]
        )
        if generator.random() < 0.2:
            known.pop(name, None)
        elif place == "fields":
            known[name] = generator.choice(_JSON)
        elif place == "arrays":
            known[name] = (
                _arrays(generator) if generator.random() < 0.5 else _refill(known.get(name), generator)
            )
        else:
            old = known.get(name, b"")
            random_bytes = generator.randbytes(len(old))
            known[name] = generator.choice(
                [
                    b"",
                    old[:-1],
                    old + b"\0",
                    old[::-1],
                    random_bytes,
                    random_bytes[:64],
                    flipped(old, generator),
                ]
            )
    made = replace(message)
    for name, value in {**names, **parts}.items():
        object.__setattr__(made, name, value)
    made.__dict__.pop("_digest", None)
    return made


def flipped(data: bytes, generator: random.Random) -> bytes:
    """One bit, or nothing where there is none."""
    if not data:
        return data
    place = generator.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << generator.randrange(8)]) + data[place + 1 :]


def nested(generator: random.Random) -> bytes:
    """A body whose header claims a length and nests brackets; safetensors' layout."""
    depth = generator.choice([10, 1000, 3000, 100_000])
    header = generator.choice(
        [b"[" * depth, b'{"a":' * depth, b'{"__metadata__":{"message":"' + b"[" * depth + b'"}}']
    )
    claimed = generator.choice([len(header), len(header) + 1, 2**40, 0, 2**63])
    return struct.pack("<Q", claimed) + header


def encoded(message: Message) -> bytes | None:
    """Its bytes, if it has any that can be sent."""
    try:
        return message.encode()
    except Exception:  # what cannot be encoded cannot be sent
        return None


@dataclass
class Target:
    """A reader, the messages it was sent in a run, and what they were signed by."""

    name: str
    run: str
    parties: Parties
    sent: list[Message]
    copies: list[Backup]
    server: Identity
    own: Identity

    @classmethod
    def silo(cls, run: str, name: str) -> Target:
        """A silo, with a copy of it as it was before each message that it was sent in set-up and two rounds."""
        aggregator, method = RUNS[run]
        sent: list[Message] = []
        copies: list[Backup] = []
        answer = Parties.watch(name, sent, copies)
        with answer:
            parties = Parties(aggregator, method, federation=small_federation(users=12))
            for round_ in range(2):
                parties.run_round(round_)
        return cls(name, run, parties, sent, copies, Identity.fresh("server"), Identity.fresh(name))

    def attack(self, generator: random.Random) -> str:
        """Send one mutant to a silo in the state of its message; the code of the refusal, or "answered"."""
        place = generator.randrange(len(self.sent))
        silo = self.parties.restored(self.name, self.copies[place])
        silo.gate._begun_here = silo.gate.state.session  # as if its process had begun the session
        party = SignedParty(silo, self.own, self.server.public)
        how = generator.random()
        if how < 0.1:
            data = flipped(sign(self.sent[place], self.server, self.name), generator)
        elif how < 0.15:
            data = generator.randbytes(generator.choice([0, 1, 71, 72, 73, 500]))
        elif how < 0.2:
            data = signed_bytes(nested(generator), self.server, self.name)
        elif how < 0.5:
            data = signed_bytes(json_mutant(self.sent[place], generator), self.server, self.name)
        else:
            body = encoded(mutant(self.sent[place], generator))
            if body is None:
                return "not sent"
            data = signed_bytes(body, self.server, self.name)
        try:
            party.receive(data)
        except SilodpError as error:
            return error.code
        return "answered"


def signed_bytes(body: bytes, identity: Identity, recipient: str, request: str = "") -> bytes:
    """Any bytes, signed."""
    return _sign_bytes(body, identity, recipient, request)


def answer_mutant(answer: Message, generator: random.Random) -> bytes:
    """The bytes of one mutant of an answer."""
    while True:
        how = generator.random()
        if how < 0.05:
            return nested(generator)
        body = json_mutant(answer, generator) if how < 0.4 else encoded(mutant(answer, generator))
        if body is not None:
            return body


_SILO = Identity.fresh("silo0")


def receive_mutant(request: Message, answer: Message, generator: random.Random) -> Message:
    """What the server's channel makes of a mutant that silo0 has signed."""
    digest = request.digest()
    data = signed_bytes(answer_mutant(answer, generator), _SILO, SERVER, digest)
    return verify(data, _SILO.public, "silo 'silo0'", SERVER, digest)


def attack_server(answers: list[tuple[Message, Message]], parties: Parties, generator: random.Random) -> str:
    """Send the server one mutant of an answer; the code of the refusal, or "used"."""
    request, answer = generator.choice(answers)

    class Lying:
        traffic = parties.transport.traffic

        def ask(self, requests, timeout=None):
            return {"silo0": receive_mutant(request, answer, generator)}, {}

    try:
        replace(parties.server, transport=Lying()).ask({"silo0": request})
    except SilodpError as error:
        return error.code
    return "used"


def attack_round(run: str, answers: int, generator: random.Random) -> str:
    """Put a mutant in place of one of silo0's answers in a set-up and a round; the code of the end, or "done".

    Args:
        run: of `RUNS`.
        answers: how many answers silo0 gives in them.
        generator: chooses the answer and the mutant.
    """
    left = generator.randrange(answers)

    class Lying(Recording):
        def ask(self, requests, timeout=None):
            nonlocal left
            found, failures = super().ask(requests, timeout)
            if "silo0" in found:
                left -= 1
                if left == -1:
                    try:
                        found["silo0"] = receive_mutant(requests["silo0"], found["silo0"], generator)
                    except SilodpError as error:  # as `SignedChannel` does
                        del found["silo0"]
                        failures["silo0"] = DeliveryFailure("refused", str(error), error.code)
            return found, failures

    try:
        Parties(*RUNS[run], wire=Lying).run_round(0)
    except SilodpError as error:
        return error.code
    return "done"


def codes(attacks: Iterator[str]) -> dict[str, int]:
    """How often each outcome came."""
    counted: dict[str, int] = {}
    for outcome in attacks:
        counted[outcome] = counted.get(outcome, 0) + 1
    return counted
