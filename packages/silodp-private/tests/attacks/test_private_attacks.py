"""Attacks of a server that lies, and signs its lies, on private weighting.

Attacked are the record counts N[u] and the shares of the weights. Each attack asks a silo for the same thing twice: a
transfer, a table, a blinding, an encryption or a mask. Without the refusals, two answers under one secret differ by
what the secret hides, and the server would learn counts per person or rows without noise.
"""

from dataclasses import replace

import numpy as np
import pytest

from silodp.crypto.sampling import transfer_counter
from silodp.crypto.secure_aggregation import RoundAttempt
from silodp.errors import SilodpError
from silodp.runtime.gate import Gate
from silodp.runtime.silo import Silo
from silodp.wire.messages import Message
from silodp_private import lattice
from silodp_private.crypto.lattice.scheme import LatticeServer
from silodp_private.crypto.lookup import Lookup
from silodp_private.crypto.oblivious_transfer import BaseTransfers, TransferReceiver
from silodp_private.crypto.shares import SERVER_CHOOSES
from silodp_private.paillier.scheme import PrivateKey, prove_modulus
from support.private import LATTICE, PAILLIER, Parties
from support.refusals import refused


def transfers(parties: Parties, counter: int, choices: np.ndarray, size: int) -> bytes:
    """A second choice under a counter that was used, by the server that holds the secrets."""
    packed = parties.kept("weights/shares").blobs["receiver"]
    unused = TransferReceiver.unpack(packed[:32] + bytes(8) + packed[40:], counter)
    return Lookup.ask(unused, counter, choices, size).message


def assert_answered_once(silo: Silo, lie: Message) -> None:
    """Under its own key, and under that of another attempt."""
    for attempt in (lie.attempt, lie.attempt + 1):
        with refused("gate.answered", "gate.order"):
            silo.answer(replace(lie, attempt=attempt))


def test_the_transfer_of_a_round_is_made_once_whatever_attempt_it_calls_itself():
    """c_u − x_u and −x_u, both, give c_u, and with the server's share 2^k/N[u]."""
    parties = Parties(LATTICE)
    parties.run_round(0)
    zero, first = parties.silos["silo0"], parties.last("sample")
    nobody = transfers(parties, transfer_counter(0), np.zeros(12, np.int64), 2)
    assert_answered_once(zero, replace(first, blobs={"request": nobody}))
    assert zero.answer(first).encode() == zero.answer(first).encode(), "the same request has its answer"
    parties.run_round(1)


def test_reciprocals_are_looked_up_once_in_a_session_and_base_transfers_are_not_made_anew():
    """A second entry of one person's table would give N[u] away."""
    parties = Parties(LATTICE)
    plan = LATTICE.constants(parties.spec).parameters(parties.spec, bytes.fromhex(parties.session))
    empty = transfers(parties, 0, np.zeros(12, np.int64), plan.modulus)
    assert_answered_once(
        parties.silos["silo0"], replace(parties.last("reciprocals"), blobs={"request": empty})
    )
    offer = BaseTransfers(plan.session, SERVER_CHOOSES).offer
    assert_answered_once(parties.silos["silo0"], replace(parties.last("base"), blobs={"offer": offer}))


def test_counts_are_blinded_under_one_key_in_a_session():
    """Under two keys the same masks would show who has no record in a silo."""
    parties = Parties(PAILLIER)
    other = PrivateKey.generate(512)
    proof = prove_modulus(other, bytes.fromhex(parties.session))
    lie = {"key": other.public.to_bytes(), "proof": proof}
    assert_answered_once(parties.silos["silo1"], replace(parties.last("blinded counts"), blobs=lie))


@pytest.mark.parametrize("kind", ["base", "reciprocals", "sample"])
def test_only_silo_0_offers_tables(kind):
    parties = Parties(LATTICE)
    parties.run_round(0)
    with refused("gate.kind"):
        parties.silos["silo1"].answer(parties.last(kind))


def encrypted(parties: Parties, asked: Message, key: bytes | None, shares: int) -> Message:
    """The request with other ciphertexts: of this share for everyone."""
    bound = lattice.ciphertext_context(parties.session, RoundAttempt(asked.round, asked.attempt, 0, (), ""))
    everyone = np.full(12, shares, np.uint64)
    return replace(asked, blobs=lattice_server(parties, key).request(everyone, bound, key))


def lattice_server(parties: Parties, key: bytes | None) -> LatticeServer:
    return LatticeServer(LATTICE.parameters(parties.spec), key)


def test_a_seed_seen_before_is_refused_and_the_same_request_is_not(monkeypatch):
    """Two encryptions under one seed differ by the difference of what they hold; the silo fails halfway in between."""
    parties, broken = Parties(LATTICE), OSError("disk full")

    def fails(*arguments):
        raise broken

    with monkeypatch.context() as patch:
        patch.setattr(lattice, "apply_masks", fails)
        with pytest.raises(SilodpError, match="disk full"):
            parties.run_round(0)
    silo, asked = parties.silos["silo1"], parties.last("update", "silo1")
    other = encrypted(parties, asked, parties.server.store.round(0).get("request/0"), 1)
    assert other.blobs["nonce"] == asked.blobs["nonce"]
    with refused("gate.charged"):  # another one was charged, and not answered
        silo.answer(other)
    with monkeypatch.context() as patch:  # the defense behind it
        patch.setattr(Gate, "charge", lambda self, request: None)
        with pytest.raises(SilodpError, match="the server sent ciphertexts under a seed seen before"):
            silo.answer(other)
    assert silo.answer(asked).blobs["masked"]


def test_two_attempts_of_one_roster_are_masked_apart():
    """Noise is kept and shares are the server's to choose: the difference would decrypt to rows without noise."""
    parties = Parties(LATTICE)
    parties.transport.lost = lambda silo, m: m.kind == "open"
    asked_of, copies = [], []
    with (
        Parties.watch("silo1", asked_of, copies),
        pytest.raises(SilodpError, match="0 silos left"),
    ):
        parties.run_round(0)
    silo, asked = parties.silos["silo1"], parties.last("update", "silo1")
    digits = LATTICE.parameters(parties.spec).digits
    store, key = parties.stores["silo1"], parties.server.store.round(0).get("request/0")
    sent = [digits.from_bytes(silo.answer(asked).blobs["masked"])]
    # The gate asks for a smaller roster in a further attempt. A ledger and a store that know of no answer do not.
    noise = {name: store.get(name) for name in store.names() if "noisy" in name}
    silo = parties.restored(
        "silo1", next(c for m, c in zip(asked_of, copies, strict=True) if m.kind == "update")
    )
    for name, value in noise.items():
        parties.stores["silo1"].put(name, value)
    again = encrypted(parties, replace(asked, attempt=1), key, 1)
    sent.append(digits.from_bytes(silo.answer(again).blobs["masked"]))
    with pytest.raises(SilodpError, match="does not decrypt"):
        lattice_server(parties, key).decrypt(digits.subtract(*sent))


def test_a_server_that_repeats_its_nonce_gets_other_seeds(monkeypatch):
    claimed: list[bytes] = []
    set_once = lattice.set_once
    monkeypatch.setattr(
        lattice, "set_once", lambda store, key, owner: claimed.append(key) or set_once(store, key, owner)
    )
    monkeypatch.setattr(lattice._LatticeServer, "_key", lambda self, context, attempt: bytes(32))
    parties = Parties(LATTICE)
    for round_ in range(3):
        parties.run_round(round_)
    assert len(claimed) == 9
    seeds = {key.split("/")[-1] for key in claimed}
    assert len(seeds) == 3, "one a round, of the nonce and of session, round and attempt"


@pytest.mark.parametrize("aggregator", [LATTICE, PAILLIER], ids=lambda a: a.name)
def test_old_rounds_are_not_opened_after_a_dropout(aggregator):
    parties = Parties(replace(aggregator, min_silos=3), silos=4)
    parties.transport.lost = lambda silo, m: (silo, m.kind, m.round) == ("silo3", "update", 0)
    parties.run_round(0)
    parties.run_round(1)
    late = parties.last("update", "silo3", round_=0)
    opened = {**late.fields, "request": late.digest()}
    with refused("gate.past"):
        parties.silos["silo0"].answer(replace(late, kind="open", fields=opened, arrays={}, blobs={}))
    with refused("gate.past"):
        parties.silos["silo0"].answer(replace(late, attempt=2))
    if aggregator.name == "lattice":
        old = parties.last("sample", round_=0)
        another = old.blobs["request"][:-1] + bytes([old.blobs["request"][-1] ^ 1])
        with refused("gate.past"):
            parties.silos["silo0"].answer(replace(old, attempt=1, blobs={"request": another}))
