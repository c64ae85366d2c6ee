"""Sampling that nobody knows, in whole runs: the sums are those in clear, and neither party's view tells the sample."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import (
    Gaussian,
    PoissonSampled,
    RevealedSample,
    SampledReplacement,
    remove_amplification,
)
from silodp.crypto import sampling
from silodp.crypto.sampling import SamplingRatio
from silodp.errors import SilodpError
from silodp.training.sgd.local import LocalTraining
from silodp_private._private_sampling import SAMPLE_HIDDEN
from silodp_private.lattice import Lattice
from silodp_private.paillier.aggregator import Paillier
from silodp_private.paillier.scheme import PrivateKey
from silodp_private.paillier.weighting import PaillierServer
from support.clear import described, released
from support.masked import at, charges, uniform
from support.oracles import small_federation
from support.private import (
    BOTH,
    HALF,
    HIDDEN,
    LATTICE,
    LAW,
    PAILLIER,
    RECORDS,
    Parties,
    hidden_samples,
    holds,
    in_clear,
    run,
    spec,
)
from support.stores import side_of
from support.wires import wire  # noqa: F401

# --- the sums ---


def assert_as_in_clear(aggregator, method, federation=None, rounds=2, **more) -> dict[int, np.ndarray]:
    """The same run in clear, given the sample that i and κ make: the same integers, model and ε."""
    with released() as hidden, hidden_samples(aggregator.sampling_ratio(method)) as both:
        result = run(aggregator, method, rounds, federation=federation, **more)
    with released() as clear:
        twin = run(in_clear(aggregator, both.drawn), method, rounds, federation=federation)
    assert len(hidden) == len(both.drawn) == rounds
    np.testing.assert_array_equal(hidden, clear)
    assert described(result) == described(twin)
    assert {k: g.epsilon for k, g in result.guarantees.items()} == {
        k: g.epsilon for k, g in twin.guarantees.items()
    }
    return both.drawn


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(
    name=st.sampled_from(["lattice", "paillier"]),
    silos=st.integers(2, 4),
    users=st.integers(1, 14),
    records=st.integers(0, 60),
    cap=st.integers(1, 6),
    law=st.integers(2, 40).flatmap(lambda p: st.tuples(st.integers(1, p - 1), st.just(p))),
    sigma=st.sampled_from([0.0, 5.0]),
)
@example("lattice", 3, 20, 8, 2, (1, 2), 5.0)  # persons without a record anywhere
@example("paillier", 3, 20, 8, 2, (1, 2), 5.0)
@example("lattice", 2, 3, 60, 1, (1, 40), 5.0)  # hardly anybody drawn; everyone beyond the cap; two silos
@example("paillier", 2, 3, 60, 1, (39, 40), 5.0)
def test_sums_are_those_in_clear(name, silos, users, records, cap, law, sigma):
    federation = small_federation(silos=silos, users=users, records=records)
    aggregator = replace(HIDDEN[name], count_cap=cap, hidden_sample=law[1])
    method = replace(RECORDS, user_sampling=law[0] / law[1], noise_multiplier=sigma)
    assert aggregator.sampling_ratio(method) == SamplingRatio(*law)
    assert_as_in_clear(aggregator, method, federation)


@pytest.mark.parametrize(
    "private",
    [
        Lattice(hidden_sample=10),
        Paillier(count_cap=20, key_bits=512, insecure_for_tests=True, hidden_sample=10),
    ],
    ids=lambda a: a.name,
)
@pytest.mark.slow
def test_a_training_run_on_heart_disease_is_the_one_in_clear(private, heart):
    local = LocalTraining(learning_rate=0.001, epochs=2, batch_size=8)
    method = replace(RECORDS, clip=0.1, local=local, user_sampling=0.3, server_momentum=0.5)
    drawn = assert_as_in_clear(private, method, heart, rounds=3)
    assert len({tuple(beta) for beta in drawn.values()}) == 3, "every round has its own sample"


@BOTH
@pytest.mark.slow
def test_persons_are_drawn_at_the_rate_that_is_charged(aggregator):
    rare = replace(RECORDS, user_sampling=0.3, noise_multiplier=0.0)
    with hidden_samples(SamplingRatio(3, 10)) as both:
        run(aggregator, rare, 2, federation=small_federation(users=300, records=100))
    drawn = np.array(list(both.drawn.values()))
    assert drawn.shape == (2, 300)
    assert stats.binomtest(int(drawn.sum()), drawn.size, 0.3).pvalue > 1e-6
    assert stats.binomtest(int((drawn[0] & drawn[1]).sum()), 300, 0.09).pvalue > 1e-6, (
        "rounds are independent"
    )


@BOTH
def test_a_silo_that_is_lost_takes_nothing_with_it(aggregator, wire, tmp_path):  # noqa: F811
    """Silo 0 itself, once it has chosen: every attempt and every release is of the one sample of its round."""
    wire.fails = at("silo0", "update", 0, "before")
    four = small_federation(silos=4)
    with released() as hidden, hidden_samples(LAW) as both:
        result = run(replace(aggregator, min_silos=3), HALF, federation=four)
    assert len(both.cells) == 2, "one draw a round"
    with released() as clear:
        twin = run(in_clear(replace(aggregator, min_silos=3), both.drawn), HALF, federation=four)
    np.testing.assert_array_equal(hidden, clear)
    assert result.epsilon == twin.epsilon


# --- what it costs ---


@BOTH
def test_everyone_is_charged_for_a_sample_they_do_not_know(aggregator, tmp_path):
    known = replace(aggregator, hidden_sample=None)
    events = {
        name: {view: of.event(spec(HALF), v) for view, v in of.views(HALF, 3).items()}
        for name, of in (("hidden", aggregator), ("known", known))
    }
    assert isinstance(events["known"]["server"], RevealedSample)
    assert events["hidden"]["server"] == events["hidden"]["released"]
    for event in events["hidden"].values():
        assert isinstance(event, PoissonSampled | SampledReplacement)
        assert event.sampling_probability == 0.5
    for adversary in ("released", "silo"):
        assert events["hidden"][adversary].event.noise_multiplier == pytest.approx(
            events["known"][adversary].event.noise_multiplier, rel=1e-3
        )
    run(aggregator, HALF, 1, out=tmp_path)
    (charge,) = charges(tmp_path)
    kinds = {name: event["kind"] for name, event in charge["events"].items()}
    # What another silo knows of a person is replaced when they are emptied elsewhere; others see them removed.
    assert kinds == {"released": "PoissonSampled", "server": "PoissonSampled", "silo": "SampledReplacement"}


@BOTH
def test_a_second_release_of_a_sample_is_charged_as_if_everyone_knew_it(aggregator, wire, tmp_path):  # noqa: F811
    """Two releases of one sample are not two samples."""
    wire.fails = at("silo2", "open", 0, "after")
    with released() as hidden, hidden_samples(LAW) as both:
        run(replace(aggregator, min_silos=3), HALF, 1, federation=small_federation(silos=4), out=tmp_path)
    assert len(both.cells) == 1
    with released() as clear:
        twin = in_clear(replace(aggregator, min_silos=3), both.drawn)
        run(twin, HALF, 1, federation=small_federation(silos=4))
    np.testing.assert_array_equal(hidden, clear)
    first, second = charges(tmp_path)
    assert {event["kind"] for event in first["events"].values()} == {"PoissonSampled", "SampledReplacement"}
    assert {event["kind"] for event in second["events"].values()} == {"Skellam"}


@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 0.5), (0.1, 1.0), (0.3, 5.0)])
def test_the_charge_of_two_releases_covers_what_they_show_and_two_samples_would_not(rate, sigma):
    """Two looks at one sample are one look at half the variance: the truth to hold the ledger to."""
    once, twice = (PoissonSampled(rate, Gaussian(sigma / root)) for root in (1, np.sqrt(2)))
    truth = compute_epsilon([(twice, 1)], 1e-8, "pld")
    assert compute_epsilon([(once, 1), (remove_amplification(once), 1)], 1e-8, "pld") >= truth
    assert compute_epsilon([(once, 2)], 1e-8, "pld") < truth


def test_flooding_is_weighed_against_releases_that_lost_a_silo_too():
    """The ε it is chosen for is at least that of any run of so many attempts, charged as the ledger would."""
    method = replace(RECORDS, user_sampling=0.1)
    private = replace(HIDDEN["lattice"], min_silos=3, attempts=20)
    known = spec(method, silos=4, noise_sized_for=3)
    event = private.event(known, private.views(method, 4, survivors=3)["server"])
    delta = known.delta * private.delta_share
    worst = compute_epsilon([(event, 10), (remove_amplification(event), 10)], delta, "rdp")
    assert private.parameters(known).epsilon >= worst > 2 * compute_epsilon([(event, 20)], delta, "rdp")


# --- who sees what ---

MANY = small_federation(users=200, records=600)


def views_of_the_server(parties: Parties) -> list[np.ndarray]:
    """What silo 0 sends: requests without their counters, and answers to the server's own, as bytes."""
    sent = [m for name, m in parties.transport.answered if m.kind in ("sample", "chosen")]
    blobs = [m.blobs[name][40:] for m in sent for name in sorted(m.blobs)]
    return [np.frombuffer(blob[: len(blob) // 1000 * 1000], np.uint8) for blob in blobs]


@pytest.mark.parametrize(
    "aggregator", [HIDDEN["paillier"], pytest.param(HIDDEN["lattice"], marks=pytest.mark.slow)]
)
def test_the_server_never_holds_the_sample_and_no_message_does(aggregator):
    with hidden_samples(LAW) as both:
        parties = Parties(aggregator, HALF, federation=MANY)
        for round_ in (0, 1):
            parties.run_round(round_)
    secret = [*both.drawn.values(), *both.shifts.values(), *both.cells.values()]
    for message in (m for _, m in parties.transport.asked + parties.transport.answered):
        assert not any(holds(message, vector) for vector in secret), message.kind
    store = parties.server.store.run
    for key in store.names():
        for vector in (*both.drawn.values(), *both.shifts.values()):
            wanted = [vector.astype(kind).tobytes() for kind in ("<u1", "<u2", "<u4", "<i8", "<f8")]
            assert not any(one in (store.get(key) or b"") for one in wanted), key
    assert parties.server.store.round(1).get("clients") is not None, "what is drawn for a round is kept there"
    assert parties.server.store.round(1).get("sample") is None
    old = both.cells[0].tobytes()
    assert not any(old in (store.get(key) or b"") for key in store.names()), "of past rounds i is forgotten"
    for name in parties.names:
        store = parties.store_of(name).run
        kept = [store.get(key) or b"" for key in store.names()]
        for vector in (*both.drawn.values(), *both.cells.values()):
            assert not any(vector.astype("<i8").tobytes() in one for one in kept), name


@BOTH
@pytest.mark.slow
def test_what_the_server_receives_is_uniform_whatever_the_silos_drew(aggregator, monkeypatch):
    """Rerun with another R, and with κ that is 0 for all: nothing tells the three apart, nor from random bytes."""

    def received() -> list[np.ndarray]:
        parties = Parties(aggregator, HALF, federation=MANY)
        parties.run_round(0)
        return views_of_the_server(parties)

    first, second = received(), received()
    monkeypatch.setattr(
        sampling, "derive_silo_cells", lambda secret, session, users, law, round: np.zeros(users, int)
    )
    zeros = received()
    assert [v.size for v in first] == [v.size for v in second] == [v.size for v in zeros]
    for views in (first, second, zeros):
        assert all(uniform(view) for view in views)
    for one, other in ((first, second), (first, zeros)):
        assert all(uniform(a ^ b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_no_silo_gets_a_share_that_depends_on_the_sample():
    """lattice: what silo 0 passes on is uniform among the sampled and among the others, and over rounds."""
    with hidden_samples(LAW) as both:
        parties = Parties(HIDDEN["lattice"], HALF, federation=MANY)
        seen = []
        for round_ in (0, 1):
            parties.run_round(round_)
            weights = [side_of(parties.silos[name]) for name in parties.names]
            asked = [parties.last("update", name, round_) for name in parties.names]
            shares = [w.round_shares(request) for w, request in zip(weights, asked, strict=True)]
            assert not any(shares[0][:4].tobytes() in m.blobs["sampled"] for m in asked[1:]), (
                "the boxes are sealed"
            )
            assert all((share == shares[0]).all() for share in shares), "all silos hold the same"
            seen.append(shares[0])
    bits = LATTICE.constants(parties.spec).word_bits
    assert bits >= 40
    plain = weights[0].silo_shares("run").shares()
    for words in (*seen, seen[0] - seen[1], seen[0] - plain):
        assert uniform(words.view(np.uint8).reshape(-1, 8)[:, :5].ravel()), "the low 40 bits"
        for beta in both.drawn.values():
            for part in (words[beta == 1], words[beta == 0]):
                assert uniform(part.view(np.uint8).reshape(-1, 8)[:, :5].ravel())


def test_silo_0_is_sent_fresh_ciphertexts_and_the_server_does_not_see_which():
    """paillier: the boxes differ per silo and from what was offered; the chosen ones decrypt to the sample."""
    parties = Parties(HIDDEN["paillier"], HALF)
    with hidden_samples(LAW) as both:
        parties.run_round(0)
    p = PAILLIER.parameters(parties.spec)
    server = PaillierServer.unpack(p, parties.server.store.run.get("paillier"))
    chosen = [
        side_of(parties.silos[name])._choices.round_entries(parties.last("update", name))
        for name in parties.names
    ]
    assert chosen[0] == chosen[1] == chosen[2]
    key: PrivateKey = server._key
    decrypted = [key.decrypt(c) for c in key.public.ciphertexts_from_bytes(chosen[0], p.users, "silo 0")]
    assert [x != 0 for x in decrypted] == both.drawn[0].astype(bool).tolist()
    boxes = [parties.last("update", name).blobs["sampled"] for name in parties.names[1:]]
    assert boxes[0] != boxes[1]
    assert not any(chosen[0][:64] in box for box in boxes)
    assert "sampled" not in parties.last("update", "silo0").blobs


# --- settings ---


@BOTH
def test_a_rate_that_is_no_number_of_cells_is_refused(aggregator):
    for rate, cells, said in (
        (0.25, 10, "hidden_sample = 4"),
        (0.3333, 10, "set hidden_sample = 10000"),
        (2**-30, 10, "set user_sampling = 1/10"),
        (0.7000001234567, 10, "set user_sampling = 7/10"),
        (1.0, 10, "set user_sampling below 1"),
        (0.5, 1, "hidden_sample = 1: set a number of cells from 2 to 65,536"),
        (0.5, 1 << 17, "set a number of cells from 2"),
    ):
        with pytest.raises(SilodpError, match=said) as caught:
            replace(aggregator, hidden_sample=cells).check(spec(replace(RECORDS, user_sampling=rate)))
        assert "\n" not in str(caught.value)
    for rate, cells in ((0.3, 10), (0.3, 20), (0.1, 10), (0.7, 10), (1 / 3, 3), (0.25, 4)):
        private = replace(aggregator, hidden_sample=cells)
        private.check(spec(replace(RECORDS, user_sampling=rate)))
        assert private.sampling_ratio(replace(RECORDS, user_sampling=rate)).rate == rate


@BOTH
def test_what_it_costs_is_described_and_what_travels_is_that(aggregator):
    parties = Parties(aggregator, HALF, federation=small_federation(users=200))
    told = aggregator.describe(parties.spec)
    assert "5 of 10 cells" in told["sampling"]
    parties.run_round(0)
    traveled = [
        len(blob)
        for name, m in parties.transport.asked + parties.transport.answered
        for key, blob in m.blobs.items()
        if m.kind in ("sample", "chosen")
    ]
    stated = told["bytes between server and silo 0 for it, per round"]
    assert stated <= sum(traveled) <= 1.05 * stated + 12_000, "beside proofs and tags of fixed length"
    assert "sampling" not in replace(aggregator, hidden_sample=None).describe(parties.spec)
    assert SAMPLE_HIDDEN in aggregator.assumptions


def test_a_grid_that_is_no_power_of_two_is_refused():
    for units in (0, -4, 3, 100_000):
        with pytest.raises(SilodpError, match=rf"units = {units}: set a power of two"):
            Lattice(units=units).check(spec())
    Lattice(units=1 << 14).check(spec())


@BOTH
def test_two_sessions_share_no_draw(aggregator):
    many, law = replace(aggregator, hidden_sample=10_000), SamplingRatio(5000, 10_000)
    with hidden_samples(law) as one:
        Parties(many, HALF).run_round(0)
    with hidden_samples(law) as other:
        Parties(many, HALF).run_round(0)
    assert (one.shifts[0] == other.shifts[0]).mean() < 0.25
    assert (one.cells[0] == other.cells[0]).mean() < 0.25


def test_without_the_option_nothing_changes():
    """No base transfers of the second kind, no box, and the server knows the sample."""
    for aggregator in (LATTICE, PAILLIER):
        parties = Parties(aggregator, HALF)
        parties.run_round(0)
        kinds = {m.kind for _, m in parties.transport.asked}
        assert not kinds & {"choice base", "choice keys", "chosen"}
        assert "sampled" not in parties.last("update").blobs
        assert parties.kept("round/0/sample").arrays["value"].size == 12
