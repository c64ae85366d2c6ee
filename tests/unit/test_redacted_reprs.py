"""What holds a secret or private rows does not print them.

Objects end up in logs, notebooks, assertion messages and error reports (which may print a traceback with the `repr` of
every local variable), and from there with people who may see neither keys nor records. Without the redaction the
`repr` of a party's randomness showed the key that all its noise follows from, and `repr(federation)` private rows.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import math
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from silodp.aggregators.attempts import MaskedSilo, ServerAttempts
from silodp.aggregators.base import SiloContext
from silodp.crypto.keys import HandshakeState, Identity, Session
from silodp.crypto.secure_aggregation import WordGroup
from silodp.data.federation import Federation, SiloData
from silodp.data.tables._table import Table
from silodp.data.tables._values import find_distinct
from silodp.data.tables.features import EncodedColumn, Features
from silodp.data.tables.keys import Persons
from silodp.data.tables.reader import _Rows
from silodp.data.tables.schema import Schema
from silodp.mechanisms.clipping import (
    Bounds,
    ClippedRows,
    ClippedRowStream,
    ClippedSum,
    LocallyNoisedUpdate,
    Share,
)
from silodp.mechanisms.noise import Randomness
from silodp.mechanisms.quantization import IntegerShare, IntegerSum, Quantizer
from silodp.wire.messages import Message
from silodp.wire.store import MemoryStore
from silodp.wire.transport import InProcess, SignedChannel, SignedParty
from silodp_private._private_sampling import OtServer
from silodp_private._reciprocal_shares import ReciprocalServerShares
from silodp_private.crypto.lattice.parameters import search_parameters
from silodp_private.crypto.lattice.scheme import LatticeServer, Plaintexts
from silodp_private.crypto.lookup import Lookup
from silodp_private.crypto.oblivious_transfer import BaseTransfers, TransferReceiver, TransferSender
from silodp_private.crypto.products import MaskedRows
from silodp_private.crypto.reciprocals import ReciprocalParameters
from silodp_private.crypto.shares import FirstSilo, PendingLookup, ShareServer, SiloShares
from silodp_private.paillier.parameters import PaillierParameters
from silodp_private.paillier.scheme import PrivateKey
from silodp_private.paillier.weighting import PaillierServer, PaillierSilo
from support.oracles import small_federation
from support.private import HALF, HIDDEN, Parties
from support.stores import side_of
from support.tables import make_cells

SESSION = bytes(range(32))
KEY = bytes(range(100, 132))
ROW = np.array([7001.25, -7002.5, 7003.75, 7004.125])
ROWS = torch.from_numpy(np.stack([ROW, ROW + 100]))
COUNTS = np.array([61, 62, 60, 64, 61, 67])
BOUNDS = Bounds(1.0, 1.0, 1.0, 1.0)


@dataclass
class Numbers:
    """Numbers that must not be shown: not so many of them one after the other."""

    values: Any
    run: int = 4

    def are_in(self, text: str) -> bool:
        """Whether the text, addresses aside, shows them, to three digits."""
        hidden = flat(self.values)
        shown = [
            float(x) for x in re.findall(r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?", re.sub("0x[0-9a-f]+", "", text))
        ]
        run = min(self.run, len(hidden))
        return any(
            all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4) for a, b in zip(some, hidden[i : i + run], strict=True))
            for some in (shown[j : j + run] for j in range(len(shown) - run + 1))
            for i in range(len(hidden) - run + 1)
            if math.isclose(some[0], hidden[i], rel_tol=1e-3, abs_tol=1e-4)
        )  # fmt: skip


def flat(values: Any) -> list[float]:
    array = np.asarray(values)
    return array.reshape(-1).view(array.real.dtype).astype(float).tolist()


Secret = bytes | int | str | Numbers


def shows(text: str, secret: Secret) -> bool:
    """Whether a text shows a secret in any form that `repr`, `hex` or numpy would give it."""
    if isinstance(secret, Numbers):
        return secret.are_in(text)
    if isinstance(secret, str):
        return secret in text
    if not isinstance(secret, bytes):
        return str(secret) in text or f"{secret:x}" in text
    forms = (
        secret.hex(),
        secret.hex().upper(),
        repr(secret)[2:-1],
        base64.b64encode(secret).decode(),
        *(str(int.from_bytes(secret[:64], order)) for order in ("big", "little")),
        secret.decode("latin-1"),
    )
    return any(form in text for form in forms) or Numbers(np.frombuffer(secret, np.uint8), 8).are_in(text)


def contents(held: Any, seen: set[int]) -> Iterator[str]:
    """All that an object leads to, in full: what its `repr` would show if nothing were redacted."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, bytes):
        yield held.hex()
    elif isinstance(held, (np.ndarray, torch.Tensor)):
        array = held.detach().numpy() if isinstance(held, torch.Tensor) else np.asarray(held)
        yield repr(array.tolist())
        yield np.ascontiguousarray(array).tobytes().hex()
    elif isinstance(held, dict):
        for value in held.values():
            yield from contents(value, seen)
    elif isinstance(held, (tuple, list)):
        yield repr(held)
        for value in held:
            yield from contents(value, seen)
    elif isinstance(held, (int, float, str)) or type(held).__name__ == "mpz":
        yield str(held)
    elif hasattr(held, "__self__"):
        yield from contents(held.__self__, seen)
    elif type(held).__module__.startswith("silodp") or type(held).__module__.startswith("support"):
        slots = getattr(held, "__slots__", ())
        for value in (*getattr(held, "__dict__", {}).values(), *(getattr(held, name) for name in slots)):
            yield from contents(value, seen)


def written_in_an_error_report(held: object) -> str:
    """A traceback with the local variables of every frame."""

    def fail(argument: object) -> None:
        raise RuntimeError("stop")

    try:
        fail(held)
    except RuntimeError as error:
        report = traceback.TracebackException.from_exception(error, capture_locals=True)
    return "".join(report.format())


# --- objects, each with the secrets in it ---

Case = Callable[[], tuple[object, list[Secret]]]
CASES: dict[str, Case] = {}


def case(make: Case) -> Case:
    CASES[make.__name__] = make
    return make


@case
def identity():
    return (held := Identity("north", KEY)), [held.seed]


@case
def opening():
    held = HandshakeState.fresh(Identity.fresh("north"), "run")
    return held, [held.identity.seed, held.ephemeral, held.seal, held.contribution]


def met() -> Session:
    north, south = (HandshakeState.fresh(Identity.fresh(name), "run") for name in ("north", "south"))
    hellos = [north.hello, south.hello]
    return north.meet(hellos, {hello.name: hello.identity for hello in hellos}, "constants")


@case
def session():
    held = met()
    own = held.opening
    return held, [*held.pairs.values(), own.identity.seed, own.ephemeral, own.seal, own.contribution]


def transfers() -> tuple[TransferReceiver, TransferSender]:
    base = BaseTransfers(SESSION, "test")
    sender, reply = TransferSender.accept(SESSION, "test", base.offer)
    return base.receiver(reply), sender


@case
def base_transfers():
    return (held := BaseTransfers(SESSION, "test")), [held._scalar]


@case
def transfer_receiver():
    held, _ = transfers()
    return held, [Numbers(held.seeds, 8), held.seeds[1, 5].tobytes()]


@case
def transfer_sender():
    _, held = transfers()
    return held, [Numbers(held.delta, 16), Numbers(held.seeds, 8), held.seeds[5].tobytes()]


def looked_up() -> Lookup:
    return Lookup.ask(transfers()[0], 0, COUNTS, 128)


@case
def lookup():
    return (held := looked_up()), [Numbers(COUNTS), Numbers(held.keys, 8), held.keys[2, 1].tobytes()]


PLAN = ReciprocalParameters(SESSION, 6, 100, 20, 40)


@case
def awaited():
    own = np.arange(5, 11, dtype=np.uint64) * np.uint64(10**6 + 3)
    return PendingLookup(PLAN, (part := looked_up()), own), [
        Numbers(own),
        Numbers(part.keys, 8),
        Numbers(COUNTS),
    ]


@case
def silo_shares():
    return SiloShares(PLAN, KEY), [KEY]


@case
def silo_zero():
    held = FirstSilo(SiloShares(PLAN, KEY), transfers()[1])
    return held, [KEY, Numbers(held.sender.seeds, 8), Numbers(held.sender.delta, 16)]


@case
def server_of_shares():
    return (held := ShareServer(PLAN, transfers()[0])), [Numbers(held.receiver.seeds, 8)]


@case
def masked_rows():
    keys = np.frombuffer(bytes(range(64)) * 5, np.uint8).reshape(2, 5, 32)
    held = MaskedRows.begin(keys, WordGroup(14, 32))
    held.add(np.arange(5), np.full((5, 14), 7, np.uint32))
    return held, [Numbers(held.corrections, 8), Numbers(held.share, 8)]


PAILLIER = PaillierParameters(2, 6, 4, 100, 1 << 16, 5e5, 1024, insecure_for_tests=True)


@case
def private_key():
    return (held := PrivateKey.generate(512)), [int(held.p), int(held.q)]


@case
def paillier_server():
    held = PaillierServer(PAILLIER)
    held.receive_counts([bytes(127 + 128 * 5) + b"\5", (b"\0" * 127 + b"\7") * 6])
    return held, [int(held._key.p), int(held._key.q), (held._inverses or [])[5]]


@case
def paillier_silo():
    key = PaillierServer(PAILLIER).public_key()
    return (held := PaillierSilo(PAILLIER, 0, COUNTS, key, KEY, SESSION)), [
        held._blinding[3],
        Numbers(COUNTS),
    ]


LATTICE = search_parameters(
    dimension=5, users=6, silos=2, count_cap=100, noise_multiplier=5.0, attempts=2, epsilon=1.0, delta=1e-5
)


@case
def lattice_server():
    return (held := LatticeServer(LATTICE, KEY)), [Numbers(held._secret[:64], 8)]


@case
def multipliers():
    return Plaintexts(LATTICE, COUNTS), [Numbers(COUNTS)]


@case
def randomness():
    return Randomness(KEY).child("silo", "north"), [KEY]


@case
def clipped_rows():
    owners = torch.tensor([61, 62])
    return ClippedRows(owners, ROWS, torch.tensor([0.71, 0.53]), 1.0), [Numbers(ROW, 1), Numbers(owners, 2)]


@case
def clipped_stream():
    return ClippedRowStream([clipped_rows()[0]], 4, BOUNDS, True), [Numbers(ROW, 1)]


@case
def finished():
    return LocallyNoisedUpdate(ROWS[0], 0, ROW + 500), [Numbers(ROW, 1), Numbers(ROW + 500, 1)]


@case
def clipped_sum():
    return ClippedSum(ROWS[0], 1.0), [Numbers(ROW, 1)]


@case
def share():
    return Share(ROWS[0], 1.0), [Numbers(ROW, 1)]


@case
def integer_sum():
    return IntegerSum(COUNTS, Quantizer(1.0, 4096), BOUNDS), [Numbers(COUNTS)]


@case
def integer_share():
    return IntegerShare(COUNTS, 1.0), [Numbers(COUNTS)]


@case
def message():
    held = Message("group", "run", 3, fields={"a": "b" * 64}, arrays={"counts": COUNTS}, blobs={"group": KEY})
    return held, ["b" * 64, Numbers(COUNTS), KEY]


def table_of(name: str) -> SiloData:
    y = np.array([9001.5, 9002.5, 9003.5], np.float32)
    return SiloData(name, np.stack([ROW, ROW + 100, ROW + 200]).astype(np.float32), y, np.array([41, 57, 48]))


ROWS_OF_A_TABLE: list[Secret] = [
    Numbers(np.stack([ROW, ROW + 100, ROW + 200]), 1),
    Numbers([9001.5, 9002.5, 9003.5], 1),
    Numbers([41, 57, 48], 2),
]


@case
def silo_data():
    return replace(table_of("north"), budget=np.array([0.17, 0.29, 0.83])), [
        *ROWS_OF_A_TABLE,
        Numbers([0.17, 0.29, 0.83], 1),
    ]


@case
def federation():
    keys, budgets = tuple(f"patient {u:04}" for u in range(60)), np.full(60, 0.0917)
    held = Federation(
        (table_of("north"), table_of("south")), 60, table_of("test"), user_keys=keys, user_budgets=budgets
    )
    return held, [*ROWS_OF_A_TABLE, "patient 0017", Numbers(budgets, 1)]


@case
def table():
    frame = pd.DataFrame({"id": ["patient 0017"], "age": ["7001.25"]})
    cells = {name: make_cells(frame[name], name) for name in frame}
    persons = Persons(np.array(["patient 0017"], dtype=object), np.zeros(1, dtype=np.int64))
    schema = Schema(user="id", label="cost", kind="real", numeric={"age": (0, 1e4)})
    made = Table(schema, cells, cells["id"].refusals, ["patient 0017"], identified=persons)
    return made, ["patient 0017", "7001.25"]


@case
def cells():
    return make_cells(pd.Series(["patient 0017"]), "id"), ["patient 0017"]


@case
def distinct():
    return find_distinct(np.array(["patient 0017"], dtype=object)), ["patient 0017"]


@case
def persons():
    keys = np.array(["patient 0017"], dtype=object)
    return Persons(keys, np.array([4, 5, 7])), ["patient 0017", Numbers([4, 5, 7])]


@case
def encoded_column():
    values = np.array([[0.1719], [0.2953]], dtype=np.float32)
    return EncodedColumn(values, np.array([0, 1, 1, 0]), False), [Numbers(values), Numbers([0, 1, 1, 0])]


@case
def silo_rows():
    every, labels = np.array([True, False, True]), np.array([4.125, 5.375, 7.625], dtype=np.float32)
    keys = make_cells(pd.Series(["patient 0017"]), "id")
    persons = Persons(np.array(["patient 0017"], dtype=object), np.array([4, 5, 7]))
    made = _Rows(Features([]), labels, labels.astype(float), persons, every, ~every, keys)
    return made, ["patient 0017", Numbers(labels), Numbers([4, 5, 7])]


# --- the parties of a run ---

PARTIES: list[Parties] = []
SILO_ROWS = Numbers(small_federation().silos[0].x)
SILO_COUNTS = Numbers(np.bincount(small_federation().silos[0].user, minlength=12), 8)


def parties() -> Parties:
    """Of one run under `lattice` with a hidden sample, which has the most secrets; the server's streams have a key."""
    if not PARTIES:
        made = Parties(HIDDEN["lattice"], HALF)
        made.server = replace(made.server, randomness=Randomness(KEY))
        made.run_round(0)
        PARTIES.append(made)
    return PARTIES[0]


def group_secret() -> bytes:
    return side_of(parties().silos["silo0"])._member.group_secret("run")


def own() -> SiloContext:
    return side_of(parties().silos["silo0"])._context


def seed() -> bytes:
    return own().identity.seed


@case
def silo():
    return parties().silos["silo0"], [SILO_ROWS, SILO_COUNTS, seed(), group_secret()]


@case
def gate():
    return parties().silos["silo0"].gate, [SILO_COUNTS, group_secret()]


@case
def what_only_one_silo_knows():
    return own(), [SILO_COUNTS, seed(), group_secret()]


@case
def signed_party():
    held = SignedParty(parties().silos["silo0"], Identity("silo0", KEY), bytes(32))
    return held, [KEY, SILO_ROWS, SILO_COUNTS, group_secret()]


@case
def signed_channel():
    party, secrets = signed_party()
    return SignedChannel(InProcess({"silo0": party}), Identity("server", KEY), {"silo0": bytes(32)}), secrets


def server_secrets() -> list[Secret]:
    receiver = parties().kept("weights/shares").blobs["receiver"]
    return [KEY, receiver[-32:]]


@case
def server():
    return parties().server, server_secrets()


@case
def server_shares():
    side = parties().spec.aggregator
    return ReciprocalServerShares(
        parties().spec, parties().server, side.constants(parties().spec)
    ), server_secrets()


@case
def offers():
    return OtServer(parties().spec, parties().server), server_secrets()


@case
def attempts():
    return ServerAttempts(parties().spec, parties().server), server_secrets()


@case
def member():
    return (held := side_of(parties().silos["silo0"])._member), [
        seed(),
        group_secret(),
        *held.session("run").pairs.values(),
    ]


@case
def seals():
    held = side_of(parties().silos["silo0"])
    assert isinstance(held, MaskedSilo)
    return held, [seed(), group_secret()]


@case
def silo_weights():
    return side_of(parties().silos["silo0"]), [SILO_COUNTS, seed(), group_secret()]


@case
def choices():
    return side_of(parties().silos["silo0"])._choices, [SILO_COUNTS, seed(), group_secret()]


@case
def memory_store():
    held = MemoryStore()
    held.put("identity", KEY)
    return held, [KEY]


@pytest.fixture(autouse=True)
def everything_is_printed_in_full():
    with np.printoptions(threshold=sys.maxsize):
        torch.set_printoptions(threshold=10**9)
        yield
        torch.set_printoptions(profile="default")


@pytest.mark.parametrize("name", CASES)
def test_what_is_secret_or_private_is_never_printed(name):
    held, secrets = CASES[name]()
    inside = " ; ".join(contents(held, set()))
    assert [secret for secret in secrets if not shows(inside, secret)] == [], "the object does not hold it"
    for text in (repr(held), str(held), f"{held}", f"{[held]}", written_in_an_error_report(held)):
        assert not any(shows(text, secret) for secret in secrets), text[:1000]


def test_what_is_told_of_tables_is_their_shape():
    assert "'north'" in repr(table_of("north"))
    assert {"records=3", "x=float32(3, 4)"} <= set(
        re.findall(r"\w+=\w+(?:\(.*?\))?", repr(table_of("north")))
    )
    held, _ = federation()
    assert {"'north'", "'south'", "60"} <= set(re.findall(r"'\w+'|\d+", repr(held)))
    assert "key" not in repr(Randomness(KEY))


@pytest.mark.parametrize("x", [ROW.tolist(), 7001.25, np.float32(7001.25), None])
def test_a_table_that_was_refused_can_be_printed(x):
    table = table_of("north")
    object.__setattr__(table, "x", x)
    assert "'north'" in repr(table)
    assert "7001" not in repr(table)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (repr(KEY), KEY),
        (f"key={KEY.hex()}", KEY),
        (str(list(KEY)), KEY),
        (str(np.frombuffer(KEY, np.uint8)), KEY),
        (str(torch.frombuffer(bytearray(KEY), dtype=torch.uint8)), KEY),
        (str(int.from_bytes(KEY, "big")), KEY),
        (repr(ROWS), Numbers(ROW, 1)),
        (repr(ROWS.numpy()), Numbers(ROW, 1)),
        (repr(COUNTS), Numbers(COUNTS)),
    ],
)
def test_the_test_sees_what_is_printed(text, secret):
    assert shows(text, secret)


PUBLIC = {
    "ClientHello.identity", "ClientHello.ephemeral", "ClientHello.nonce", "ClientHello.commitment",
    "ClientHello.signature", "HandshakeState.nonce", "Session.transcript", "Session.identities", "Session.commitments",
    "PrimarySiloParameters.session",
    "ReciprocalParameters.session",
    "ShareParameters.session",
    "TransferReceiver.domain", "TransferSender.domain", "Lookup.domain", "Lookup.message",
    "SiloContext.pins", "SiloKeyAgreement.pins", "SignedParty.server", "SignedChannel.silos",
    "PublicKey.n",
    "Checkpoint.params", "Result.params",
    "MultiStepUpdate.steps",
}  # fmt: skip
"""Bytes and arrays that others may see: public keys, what was sent, hashes of these, the model; and a generator, of
which only the name is printed."""
OWN_REPR = {"Message", "SiloData", "Federation"}
"""They have a `repr` of their own, which a case above is about."""


def test_bytes_and_arrays_of_every_dataclass_are_public_or_not_printed():
    """So that the next class with a secret is not forgotten in the list above."""
    data = re.compile(r"\b(bytes|NDArray|ndarray|Tensor|mpz|Integers|Words|Bytes|Shares|Unsigned|Strings)\b")
    printed = set()
    folders = [
        f"silodp.{name}" for name in ("crypto", "mechanisms", "wire", "aggregators", "runtime", "data")
    ]
    for folder in (*folders, "silodp_private", "silodp_budgets"):
        package = importlib.import_module(folder)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for kind in vars(importlib.import_module(module.name)).values():
                if (
                    not (isinstance(kind, type) and dataclasses.is_dataclass(kind))
                    or kind.__module__ != module.name
                ):
                    continue
                if not kind.__dataclass_params__.repr or kind.__name__ in OWN_REPR:
                    continue
                shown = (field for field in dataclasses.fields(kind) if field.repr)
                printed |= {f"{kind.__name__}.{f.name}" for f in shown if data.search(str(f.type))}
    assert printed == PUBLIC
