"""Mutants of every message that a run sends, for each party that reads it.

A mutant is signed by the party that the reader trusts, unless bytes are mutated after signing. Whatever it is, the
reader answers or raises `SilodpError`; it never ends in another exception.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from end_to_end.test_private_sampling import HALF, HIDDEN
from silodp.aggregators import Plain
from silodp.aggregators.masked import Masked
from silodp.crypto.keys import Identity
from silodp.errors import SilodpError
from silodp.wire.messages import Message
from silodp.wire.transport import SERVER, SignedParty, sign, verify
from support.oracles import small_federation
from support.private import LATTICE, PAILLIER, RECORDS, SAMPLED, Parties

RUNS = {
    "plain": (Plain(), SAMPLED),
    "masked": (Masked(), RECORDS),
    "lattice": (LATTICE, SAMPLED),
    "lattice hidden": (HIDDEN["lattice"], HALF),
    "paillier": (PAILLIER, RECORDS),
    "paillier hidden": (HIDDEN["paillier"], HALF),
}
_JSON = (
    None, True, False, 0, -1, 1, 2**53, 2**64, 10**400, 0.5, float("nan"), float("inf"), "", "silo0", "0" * 64,
    "\ud800", "a/b", "x" * 10_000, [], {}, [[]], [["silo0"]], ["silo0", 1], {"a": {"b": []}}, [None] * 50,
)  # fmt: skip


def _arrays(generator: random.Random) -> np.ndarray:
    shape = generator.choice([(), (0,), (1,), (3,), (5,), (11,), (12,), (12, 1), (3, 12), (1000,)])
    dtype = generator.choice(
        ["bool", "int8", "uint8", "int64", "uint32", "uint64", "float16", "float32", "float64"]
    )
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(generator.randbytes(size), dtype).reshape(shape)


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
            known[name] = _arrays(generator)
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
    stores: list[dict[str, bytes]]
    server: Identity
    own: Identity

    @classmethod
    def silo(cls, run: str, name: str) -> Target:
        """A silo, with its store as it was before each message that it was sent in set-up and two rounds."""
        aggregator, method = RUNS[run]
        sent: list[Message] = []
        stores: list[dict[str, bytes]] = []
        answer = Parties.watch(name, sent, stores)
        with answer:
            parties = Parties(aggregator, method, federation=small_federation(users=12))
            for round_ in range(2):
                parties.run_round(round_)
        return cls(name, run, parties, sent, stores, Identity.fresh("server"), Identity.fresh(name))

    def attack(self, generator: random.Random) -> str:
        """Send one mutant to a silo in the state of its message; the code of the refusal, or "answered"."""
        place = generator.randrange(len(self.sent))
        silo = self.parties.restored(self.name, self.stores[place])
        silo.gate._met_here = silo.gate.state.session  # as if its process had begun the session
        party = SignedParty(silo, self.own, self.server.public)
        how = generator.random()
        if how < 0.1:
            data = flipped(sign(self.sent[place], self.server, self.name), generator)
        elif how < 0.15:
            data = generator.randbytes(generator.choice([0, 1, 71, 72, 73, 500]))
        elif how < 0.25:
            data = signed_bytes(nested(generator), self.server, self.name)
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


def signed_bytes(body: bytes, identity: Identity, recipient: str) -> bytes:
    """Any bytes, signed."""
    from silodp.wire.transport import _sign_bytes

    return _sign_bytes(body, identity, recipient, "")


def attack_server(answers: list[tuple[Message, Message]], parties: Parties, generator: random.Random) -> str:
    """Send the server one mutant of an answer; the code of the refusal, or "used"."""
    request, answer = generator.choice(answers)
    silo = Identity.fresh("silo0")
    body = nested(generator) if generator.random() < 0.1 else encoded(mutant(answer, generator))
    if body is None:
        return "not sent"

    class Lying:
        traffic = parties.transport.traffic

        def ask(self, requests, timeout=None):
            from silodp.wire.transport import _sign_bytes

            data = _sign_bytes(body, silo, SERVER, request.digest())
            return {"silo0": verify(data, silo.public, "silo 'silo0'", SERVER, request.digest())}, {}

    try:
        replace(parties.server, transport=Lying()).ask({"silo0": request})
    except SilodpError as error:
        return error.code
    return "used"


def codes(attacks: Iterator[str]) -> dict[str, int]:
    """How often each outcome came."""
    counted: dict[str, int] = {}
    for outcome in attacks:
        counted[outcome] = counted.get(outcome, 0) + 1
    return counted
