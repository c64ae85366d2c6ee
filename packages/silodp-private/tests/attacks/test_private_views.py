"""What each party sees under private weighting: uniform words, and neither counts nor the sample.

The attacker is honest but curious: it keeps every message it receives, including late answers, and decrypts what its
key opens. Without masks on counts, fresh shares in each round and private transfers, the distribution of these messages
would depend on the records of one silo, or on who is sampled.
"""

from dataclasses import replace

import numpy as np
import pytest
from gmpy2 import invert
from scipy import stats

from silodp.aggregators.masked import Masked
from silodp.errors import SilodpError
from silodp.wire.messages import Message
from silodp_private._reciprocal_shares import ReciprocalServerShares
from silodp_private.crypto.lattice.scheme import LatticeServer
from silodp_private.paillier.weighting import PaillierServer
from support.masked import uniform
from support.oracles import small_federation
from support.private import LATTICE, PAILLIER, SAMPLED, Parties, counts_of, holds, run, spec
from support.stores import side_of
from support.wires import Wire, wire  # noqa: F401

QUIET = replace(SAMPLED, noise_multiplier=0.0)
"""Nothing but masks to hide behind."""
FOUR = small_federation(silos=4)
BOTH = pytest.mark.parametrize("aggregator", [LATTICE, PAILLIER], ids=lambda a: a.name)


def uniform_fractions(fractions: list[float]) -> bool:
    """Of [0, 1), by Kolmogorov and Smirnov."""
    return stats.kstest(fractions, "uniform").pvalue > 1e-6


def vectors(wire: type[Wire], kind: str) -> dict[tuple[str, int, int], Message]:  # noqa: F811
    return {(name, m.round, m.attempt): m for name, m in wire.received if m.kind == kind}


def test_what_the_server_receives_under_lattice_says_nothing_of_one_silo(wire, monkeypatch):  # noqa: F811
    """Not even with its secret key, and late answers included; only the masks and seals stand in its way."""
    private, servers = replace(LATTICE, min_silos=3), []
    begin = LatticeServer.__init__

    def kept(self, *arguments, **named):
        begin(self, *arguments, **named)
        servers.append(self)

    monkeypatch.setattr(LatticeServer, "__init__", kept)
    wire.fails = staticmethod(lambda name, m: "after" if (name, m.kind) == ("silo1", "update") else None)
    run(private, QUIET, federation=FOUR)
    sent = vectors(wire, "update")
    assert all(set(m.blobs) == {"masked"} and not m.arrays for m in sent.values())
    digits = private.parameters(spec(QUIET, 4, 3)).digits
    assert len(sent) == 2 * (4 + 3)
    for message in sent.values():
        assert uniform(np.frombuffer(message.blobs["masked"], np.uint8))
    words = {key: digits.from_bytes(m.blobs["masked"]) for key, m in sent.items()}
    late = digits.zero()
    for s in range(4):
        late = digits.add(late, words[f"silo{s}", 0, 0])
    survivors = digits.zero()
    for s in (0, 2, 3):
        survivors = digits.add(survivors, words[f"silo{s}", 0, 1])
    again = digits.subtract(words["silo0", 0, 0], words["silo0", 0, 1])
    for vector in (*words.values(), late, survivors, again, digits.subtract(late, survivors)):
        with pytest.raises(SilodpError, match="does not decrypt"):
            servers[0].decrypt(vector)
        assert uniform(np.frombuffer(digits.to_bytes(vector), np.uint8))


def test_what_the_server_receives_under_paillier_says_nothing_of_one_silo(wire, monkeypatch):  # noqa: F811
    """Decrypted, every answer is uniform modulo n, and so is the late silo's part."""
    stored: list[bytes] = []
    pack = PaillierServer.pack
    monkeypatch.setattr(PaillierServer, "pack", lambda self: stored.append(pack(self)) or stored[-1])
    wire.fails = staticmethod(lambda name, m: "after" if (name, m.kind) == ("silo1", "update") else None)
    wide = small_federation(silos=4, features=199)
    private = replace(PAILLIER, min_silos=3)
    run(private, QUIET, 1, federation=wide)
    p = private.parameters(spec(QUIET, 4, 3, 200))
    key = PaillierServer.unpack(p, stored[-1])._key
    n = int(key.public.n)
    plain = {
        (name, attempt): [
            key.decrypt(c) % n
            for c in key.public.ciphertexts_from_bytes(m.blobs["answer"], p.ciphertexts, name)
        ]
        for (name, _, attempt), m in vectors(wire, "update").items()
    }
    assert len(plain) == 4 + 3
    for numbers in plain.values():
        assert len(numbers) > 10
        assert uniform_fractions([x / n for x in numbers])
    late = [sum(of) for of in zip(*(plain[f"silo{s}", 0] for s in range(4)), strict=True)]
    survivors = [sum(of) for of in zip(*(plain[f"silo{s}", 1] for s in (0, 2, 3)), strict=True)]
    assert uniform_fractions([x % n / n for x in late])
    assert uniform_fractions([(x - y) % n / n for x, y in zip(late, survivors, strict=True)])


# --- set-up ---

MANY = small_federation(users=600, records=1500)


def test_masked_counts_and_their_sum_are_uniform():
    parties = Parties(LATTICE, federation=MANY)
    modulus = LATTICE.constants(parties.spec).parameters(parties.spec, bytes.fromhex(parties.session)).modulus
    told = [parties.silos[name].answer(parties.last("masked counts", name)) for name in parties.names]
    vectors = [answer.arrays["masked"] for answer in told]
    for vector in (*vectors, sum(vectors) % modulus):
        assert vector.shape == (600,)
        assert vector.max() < modulus
        assert stats.chisquare(np.bincount(vector, minlength=modulus)).pvalue > 1e-6


def test_blinded_counts_and_their_sum_are_uniform():
    parties = Parties(PAILLIER, federation=MANY)
    key = parties.last("blinded counts").blobs["key"]
    n, width = int.from_bytes(key, "big"), len(key)
    told = [parties.silos[name].answer(parties.last("blinded counts", name)) for name in parties.names]
    numbers = [
        [int.from_bytes(m.blobs["counts"][i : i + width], "big") for i in range(0, 600 * width, width)]
        for m in told
    ]
    for vector in (*numbers, [sum(of) % n for of in zip(*numbers, strict=True)]):
        assert uniform_fractions([x / n for x in vector])


@BOTH
def test_a_silo_that_reads_the_messages_of_others_on_their_way_knows_every_count(aggregator):
    """The attack, not a defense: what masks the sum of the counts is known to every silo.

    So who carries messages must hide them from silos (docs/protocols.md, section 1, and docs/couriers.md).
    """
    parties = Parties(aggregator)
    sent = [m for _, m in parties.transport.answered if m.kind in ("masked counts", "blinded counts")]
    assert len(sent) == len(parties.names)
    side = side_of(parties.silos["silo2"])  # any silo
    if aggregator is LATTICE:
        shares = side.silo_shares("run")
        modulus = shares.parameters.modulus
        counts = (
            sum(m.arrays["masked"].astype(int) for m in sent)
            - shares.parameters.count_masks(shares).astype(int)
        ) % modulus
    else:
        silo = side._party("run", side._member.session("run"))
        width = silo.parameters.key_bits // 8
        sums = [
            sum(int.from_bytes(m.blobs["counts"][u * width : (u + 1) * width], "big") for m in sent)
            for u in range(silo.parameters.users)
        ]
        pairs = zip(sums, silo._blinding, strict=True)
        counts = (
            np.array([int(invert(r, silo.public.n) * total % silo.public.n) for total, r in pairs]) - 1
        )  # of silo 0
    np.testing.assert_array_equal(
        counts, counts_of(small_federation(silos=3), aggregator.count_cap).sum(axis=0)
    )


def test_the_servers_shares_are_uniform_and_of_two_rounds_independent():
    """One mask for two rounds would show, in the difference, who is sampled in only one of them."""
    parties = Parties(LATTICE, replace(SAMPLED, user_sampling=0.9), federation=MANY)
    bits = LATTICE.constants(parties.spec).word_bits
    assert bits >= 40
    sample = np.ones(600, dtype=bool)
    shares = ReciprocalServerShares(parties.spec, parties.server, LATTICE.constants(parties.spec))
    rounds = [shares.round_shares(round_, sample)[0] for round_ in (0, 1)]
    np.testing.assert_array_equal(rounds[0], shares.round_shares(0, sample)[0], "once drawn, they stay")
    first = parties.kept("weights/shares").arrays["shares"]
    for words in (first, *rounds, rounds[0] - rounds[1], first - rounds[0]):
        assert uniform(words.view(np.uint8).reshape(-1, 8)[:, :5].ravel()), "the low 40 bits"


# --- every message of a run ---


PERSONS = small_federation(users=40, records=120)
COUNTS = [
    *counts_of(PERSONS),
    *counts_of(PERSONS, 3),
    counts_of(PERSONS).sum(0),
    counts_of(PERSONS, 3).sum(0),
]


def played(aggregator) -> tuple[Parties, list[np.ndarray]]:
    """And each round's sample, which the server forgets afterwards."""
    parties, samples = Parties(aggregator, SAMPLED, federation=PERSONS), []
    for round_ in (0, 1):
        parties.run_round(round_)
        samples.append(parties.kept(f"round/{round_}/sample").arrays["value"])
    return parties, samples


@BOTH
def test_no_message_holds_counts_and_no_silo_is_sent_the_sample(aggregator):
    parties, samples = played(aggregator)
    assert all(8 < sample.sum() < 32 for sample in samples)
    asked = [message for _, message in parties.transport.asked]
    answered = [message for _, message in parties.transport.answered]
    assert {m.kind for m in asked} >= {"setup", "hello", "update", "open"}
    for message in asked + answered:
        assert not any(holds(message, vector) for vector in (*COUNTS, *samples)), message.kind
        assert not {"counts", "sample", "weights"} & set(message.arrays)
    for message in asked:
        if message.kind == "update":
            assert set(message.arrays) <= {"params", "sampled"}
            assert message.arrays.get("sampled", np.ones(1)).tolist() == [1]


def test_where_weights_are_not_private_counts_are_found_and_a_sample_would_be():
    """Else the search above would find nothing anywhere."""
    parties = Parties(Masked(), SAMPLED, federation=PERSONS)
    parties.run_round(0)
    for vector in COUNTS[:3]:
        assert any(holds(message, vector) for _, message in parties.transport.answered)
    sample = np.random.default_rng(0).random(40) < 0.5
    asked = parties.last("update")
    assert not holds(asked, sample)
    for shown in (sample, sample.astype(np.float64), np.packbits(sample)):
        assert holds(replace(asked, arrays={**asked.arrays, "more": shown}), sample)
