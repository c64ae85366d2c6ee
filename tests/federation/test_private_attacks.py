"""What a server that lies, and signs its lies, asks of silos under private weighting: they refuse in one sentence."""

from dataclasses import replace

import numpy as np
import pytest

from federation.private import LATTICE, PAILLIER, Parties
from silodp.crypto.lattice import LatticeServer
from silodp.crypto.lookup import Lookup
from silodp.crypto.oblivious_transfer import BaseTransfers, TransferReceiver
from silodp.crypto.paillier import PrivateKey
from silodp.crypto.reciprocals import SERVER_CHOOSES
from silodp.crypto.secure_aggregation import Attempt
from silodp.errors import SilodpError
from silodp.federation import lattice
from silodp.federation.attempts import Seals
from silodp.federation.messages import Message
from silodp.federation.silo import Silo


def transfers(parties: Parties, counter: int, choices: np.ndarray, size: int) -> bytes:
    """A second choice under a counter that was used, by the server that holds the secrets."""
    packed = parties.kept("weights/shares").blobs["receiver"]
    unused = TransferReceiver.unpack(packed[:32] + bytes(8) + packed[40:], counter)
    return Lookup.ask(unused, counter, choices, size).message


def assert_answered_once(silo: Silo, lie: Message) -> None:
    """Under its own key, and under that of another attempt."""
    for attempt in (lie.attempt, lie.attempt + 1):
        with pytest.raises(
            SilodpError, match=f"'{silo.name}' (has answered another request|was asked .* second time)"
        ):
            silo.answer(replace(lie, attempt=attempt))


def test_the_transfer_of_a_round_is_made_once_whatever_attempt_it_calls_itself():
    """c_u − x_u and −x_u, both, give c_u, and with the server's share 2^k/N[u]."""
    parties = Parties(LATTICE)
    parties.play(0)
    zero, first = parties.silos["silo0"], parties.last("sample")
    nobody = transfers(parties, 1, np.zeros(12, np.int64), 2)
    assert_answered_once(zero, replace(first, blobs={"request": nobody}))
    assert zero.answer(first).encode() == zero.answer(first).encode(), "the same request has its answer"
    parties.play(1)


def test_reciprocals_are_looked_up_once_in_a_session_and_base_transfers_are_not_made_anew():
    """A second entry of one person's table would give N[u] away."""
    parties = Parties(LATTICE)
    plan = LATTICE.constants(parties.setting).plan(parties.setting, parties.session)
    empty = transfers(parties, 0, np.zeros(12, np.int64), plan.modulus)
    assert_answered_once(
        parties.silos["silo0"], replace(parties.last("reciprocals"), blobs={"request": empty})
    )
    offer = BaseTransfers(plan.session, SERVER_CHOOSES).offer
    assert_answered_once(parties.silos["silo0"], replace(parties.last("base"), blobs={"offer": offer}))


def test_counts_are_blinded_under_one_key_in_a_session():
    """Under two keys the same masks would show who has no record in a silo."""
    parties = Parties(PAILLIER)
    other = PrivateKey.generate(512).public.to_bytes()
    assert_answered_once(
        parties.silos["silo1"], replace(parties.last("blinded counts"), blobs={"key": other})
    )


@pytest.mark.parametrize("kind", ["base", "reciprocals", "sample"])
def test_only_silo_0_offers_tables(kind):
    parties = Parties(LATTICE)
    parties.play(0)
    with pytest.raises(SilodpError, match="'silo1' was asked to offer tables, which only silo 'silo0' does"):
        parties.silos["silo1"].answer(parties.last(kind))


def encrypted(parties: Parties, asked: Message, key: bytes | None, shares: int) -> Message:
    """The request with other ciphertexts: of this share for everyone."""
    bound = lattice.context(parties.session, Attempt(asked.round, asked.attempt, 0, (), ""))
    everyone = np.full(12, shares, np.uint64)
    return replace(asked, blobs=lattice_server(parties).request(everyone, bound, key))


def lattice_server(parties: Parties) -> LatticeServer:
    return LatticeServer(LATTICE.parameters(parties.setting), parties.server.store.get("lattice key"))


def test_a_seed_seen_before_is_refused_and_the_same_request_is_not(monkeypatch):
    """Two encryptions under one seed differ by the difference of what they hold; the silo fails halfway in between."""
    parties, broken = Parties(LATTICE), OSError("disk full")

    def fails(self, request, attempt):
        raise broken

    with monkeypatch.context() as patch:
        patch.setattr(Seals, "record", fails)
        with pytest.raises(SilodpError, match="disk full"):
            parties.play(0)
    silo, asked = parties.silos["silo1"], parties.last("update", "silo1")
    other = encrypted(parties, asked, parties.server.store.get("request/0/0"), 1)
    assert other.blobs["nonce"] == asked.blobs["nonce"]
    with pytest.raises(SilodpError, match="the server sent ciphertexts under a seed seen before"):
        silo.answer(other)
    assert silo.answer(asked).blobs["masked"]


def test_two_attempts_of_one_roster_are_masked_apart():
    """Noise is kept and shares are the server's to choose: the difference would decrypt to rows without noise."""
    parties = Parties(LATTICE)
    parties.transport.lost = lambda silo, m: m.kind == "open"
    with pytest.raises(SilodpError, match="0 silos left"):
        parties.play(0)
    silo, asked = parties.silos["silo1"], parties.last("update", "silo1")
    digits = LATTICE.parameters(parties.setting).digits
    sent = [
        digits.from_bytes(silo.answer(request).blobs["masked"])
        for request in (asked, encrypted(parties, replace(asked, attempt=1), None, 1))
    ]
    with pytest.raises(SilodpError, match="does not decrypt"):
        lattice_server(parties).decrypt(digits.subtract(*sent))


def test_a_server_that_repeats_its_nonce_gets_other_seeds(monkeypatch):
    claimed: list[bytes] = []
    claim = lattice.claim
    monkeypatch.setattr(
        lattice, "claim", lambda store, key, owner: claimed.append(key) or claim(store, key, owner)
    )
    monkeypatch.setattr(lattice._Server, "_key", lambda self, desk, attempt: bytes(32))
    parties = Parties(LATTICE)
    for round_ in range(3):
        parties.play(round_)
    assert len(claimed) == 9
    seeds = {key.split("/")[-1] for key in claimed}
    assert len(seeds) == 3, "one a round, of the nonce and of session, round and attempt"


@pytest.mark.parametrize("aggregator", [LATTICE, PAILLIER], ids=lambda a: a.name)
def test_old_rounds_are_not_opened_after_a_dropout(aggregator):
    parties = Parties(replace(aggregator, min_silos=3), silos=4)
    parties.transport.lost = lambda silo, m: (silo, m.kind, m.round) == ("silo3", "update", 0)
    parties.play(0)
    parties.play(1)
    late = parties.last("update", "silo3", round_=0)
    with pytest.raises(SilodpError, match=r"'silo0' has answered round 2 and will not repeat round 1"):
        parties.silos["silo0"].answer(replace(late, kind="open", arrays={}, blobs={}))
    with pytest.raises(SilodpError, match=r"'silo0' has answered round 2 and will not repeat round 1"):
        parties.silos["silo0"].answer(replace(late, attempt=2))
    if aggregator.name == "lattice":
        old = parties.last("sample", round_=0)
        with pytest.raises(SilodpError, match=r"'silo0' has answered round 2 and will not repeat round 1"):
            parties.silos["silo0"].answer(replace(old, blobs={"request": b"another"}))
