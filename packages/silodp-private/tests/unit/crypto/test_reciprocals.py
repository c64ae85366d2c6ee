from __future__ import annotations

import copy
import secrets
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from silodp.crypto import sampling
from silodp.crypto.sampling import SILO_CHOOSES, SamplingRatio
from silodp.errors import SilodpError
from silodp_private.crypto import lookup
from silodp_private.crypto.lookup import Lookup
from silodp_private.crypto.oblivious_transfer import BaseTransfers, TransferReceiver, TransferSender
from silodp_private.crypto.reciprocals import ReciprocalParameters, compute_reciprocals
from silodp_private.crypto.shares import SERVER_CHOOSES, FirstSilo, ShareServer, SiloShares, answer_unknown

SESSION = bytes(range(32))
SECRET = secrets.token_bytes(32)


def base_transfers(purpose: str) -> tuple[TransferReceiver, TransferSender]:
    base = BaseTransfers(SESSION, purpose)
    sender, reply = TransferSender.accept(SESSION, purpose, base.offer)
    return base.receiver(reply), sender


SERVER_RECEIVER, SILO_SENDER = base_transfers(SERVER_CHOOSES)
SILO_RECEIVER, SERVER_SENDER = base_transfers(SILO_CHOOSES)


def parties(plan: ReciprocalParameters, secret: bytes = SECRET) -> tuple[ShareServer, FirstSilo]:
    """Both parties, on base transfers as if never used."""
    return ShareServer(plan, copy.copy(SERVER_RECEIVER)), FirstSilo(
        SiloShares(plan, secret), copy.copy(SILO_SENDER)
    )


def choices(plan: ReciprocalParameters, law: SamplingRatio, round: int) -> Lookup:
    """Silo 0's request for entries κ, on base transfers as if never used."""
    cells = sampling.derive_silo_cells(SECRET, plan.session, plan.users, law, round)
    return Lookup.ask(copy.copy(SILO_RECEIVER), sampling.transfer_counter(round), cells, law.denominator)


def plan_for(users: int, cap: int = 20, weight_bits: int = 20, word_bits: int = 49) -> ReciprocalParameters:
    return ReciprocalParameters(SESSION, users, cap, weight_bits, word_bits)


def set_up(server: ShareServer, silo: FirstSilo, counts: NDArray[np.integer]) -> NDArray[np.uint64]:
    """The server's shares; the masked counts are what secure aggregation would give it."""
    plan = server.parameters
    masked = (counts.astype(np.int64) + plan.count_masks(silo.silo).astype(np.int64)) % plan.modulus
    asked = plan.ask(server, masked)
    return asked.finish(plan.offer(silo, asked.message))


def added(plan: ReciprocalParameters, *shares: NDArray[np.uint64]) -> list[int]:
    return [sum(map(int, user)) % 2**plan.word_bits for user in zip(*shares, strict=True)]


@pytest.mark.parametrize(
    ("silos_times_cap", "modulus"), [(1, 2), (2, 4), (2000, 2048), (2047, 2048), (2048, 4096)]
)
def test_the_modulus_exceeds_every_count(silos_times_cap: int, modulus: int) -> None:
    assert ReciprocalParameters(SESSION, 1, silos_times_cap, 20, 49).modulus == modulus


@pytest.mark.parametrize("weight_bits", [0, 1, 20, 63])
def test_reciprocals_are_floored_and_zero_outside_the_cap(weight_bits: int) -> None:
    table = compute_reciprocals(weight_bits, 64, 37)
    assert table.tolist() == [2**weight_bits // n if 1 <= n <= 37 else 0 for n in range(64)]


@given(
    counts=st.lists(st.integers(0, 31), min_size=1, max_size=10),
    words=st.integers(1, 64).flatmap(lambda t: st.tuples(st.integers(0, t - 1), st.just(t))),
)
@example(counts=[0, 1, 20, 21, 31], words=(20, 49))
@settings(max_examples=25, deadline=None)
def test_the_shares_add_up_to_the_floored_reciprocal(counts: list[int], words: tuple[int, int]) -> None:
    plan = plan_for(len(counts), 20, *words)
    server, silo = parties(plan)
    shares = set_up(server, silo, np.array(counts))
    expected = [2 ** words[0] // n if 1 <= n <= 20 else 0 for n in counts]
    assert added(plan, shares, silo.silo.shares()) == expected
    assert int(shares.max()) < 2 ** words[1]


@given(st.lists(st.tuples(st.integers(0, 25), st.booleans()), min_size=1, max_size=10), st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_a_sampled_users_shares_add_up_and_the_others_cancel(
    drawn: list[tuple[int, bool]], round: int
) -> None:
    counts, sampled = (np.array(column, int) for column in zip(*drawn, strict=True))
    plan = plan_for(len(drawn))
    server, silo = parties(plan)
    shares = set_up(server, silo, counts)
    asked = server.sample(round, shares, sampled)
    mine = asked.finish(silo.sample(round, "users", asked.message))
    others = SiloShares(plan, SECRET).masks(round, "users")  # what any other silo derives by itself
    expected = [
        b * (2**20 // n if 1 <= n <= 20 else 0) for n, b in zip(counts.tolist(), sampled, strict=True)
    ]
    assert added(plan, mine, others) == expected


def unknown(
    server: ShareServer, silo: FirstSilo, shares: NDArray[np.uint64], round: int, law: SamplingRatio
) -> tuple[NDArray[np.uint64], ...]:
    """One draw that nobody knows: β, both parties' shares, and the entry that each of them opened."""
    asked = server.sample_unknown(round, law)
    answer = silo.sample_unknown(round, "users", law, asked.message)
    waiting = silo.silo.await_choices(round, "users", choices(server.parameters, law, round))
    back = answer_unknown(copy.copy(SERVER_SENDER), asked, law, shares, waiting.message)
    drawn = law.select(asked.part.indices, silo.silo.cells(round, law))
    return drawn, asked.finish(answer), waiting.finish(back), asked.part.open(answer), waiting.part.open(back)


@pytest.mark.parametrize(
    "law", [SamplingRatio(1, 2), SamplingRatio(1, 5), SamplingRatio(3, 10), SamplingRatio(4, 4)]
)
@pytest.mark.parametrize("word_bits", [21, 49, 64])
def test_sampling_that_nobody_knows_adds_up(law: SamplingRatio, word_bits: int) -> None:
    counts = np.arange(40)
    counts[21:] %= 21
    plan = plan_for(40, word_bits=word_bits)
    server, silo = parties(plan)
    shares = set_up(server, silo, counts)
    for round in (0, 3):
        drawn, mine, others, *_ = unknown(server, silo, shares, round, law)
        expected = [int(b) * (2**20 // n if n else 0) for n, b in zip(counts.tolist(), drawn, strict=True)]
        assert added(plan, mine, others) == expected


@pytest.mark.parametrize("law", [SamplingRatio(1, 2), SamplingRatio(3, 10), SamplingRatio(7, 7)])
def test_the_rate_is_exact_for_either_party(law: SamplingRatio) -> None:
    places = np.arange(law.denominator)
    table = law.select(places[:, None], places)
    assert (table.sum(axis=0) == law.numerator).all()  # over the server's draw, whatever the silos'
    assert (table.sum(axis=1) == law.numerator).all()  # over the silos' draw, whatever the server's
    assert law.rate == law.numerator / law.denominator


def uniform(values: NDArray[np.uint64], bits: int) -> bool:
    """Chi-square of the upper and of the lower four bits, each at level 10⁻⁶."""
    parts = (values >> np.uint64(bits - 4), values & np.uint64(15))
    return all(stats.chisquare(np.bincount(part.astype(int), minlength=16)).pvalue > 1e-6 for part in parts)


def test_nothing_that_either_party_opens_depends_on_the_sample() -> None:
    users, law = 400, SamplingRatio(1, 3)
    plan = plan_for(users)
    drawn, seen = [], []
    server, silo = parties(plan)
    shares = set_up(server, silo, np.ones(users, int))
    for round in range(12):
        beta, *view = unknown(server, silo, shares, round, law)
        drawn.append(beta)
        seen.append(view)
    beta = np.concatenate(drawn).astype(bool)
    assert abs(beta.mean() - 1 / 3) < 6 * np.sqrt(2 / 9 / beta.size)
    for values in (np.concatenate(column) for column in zip(*seen, strict=True)):
        assert uniform(values[beta], plan.word_bits)
        assert uniform(values[~beta], plan.word_bits)
    # What a party opened says nothing beside its own share either: not β·share with a mask used twice.
    for own, column in ((shares, 2), (silo.silo.shares(), 3)):
        opened = np.array([view[column] for view in seen])
        for value in (opened[1:] - opened[0], opened[1:] - own):
            assert uniform(plan.reduce(value.ravel()), plan.word_bits)


def test_what_the_server_opens_when_it_knows_the_sample_is_uniform() -> None:
    plan = plan_for(3000)
    server, silo = parties(plan)
    shares = set_up(server, silo, np.ones(3000, int))
    assert uniform(shares, plan.word_bits)
    for round, bit in enumerate((0, 1)):
        asked = server.sample(round, shares, np.full(3000, bit))
        mine = asked.finish(silo.sample(round, "users", asked.message))
        assert uniform(mine, plan.word_bits)
        assert uniform(plan.reduce(mine - shares), plan.word_bits)


def test_derived_streams_are_the_same_for_all_silos_and_differ_in_every_use() -> None:
    plan, law = plan_for(1000, word_bits=64), SamplingRatio(1, 1 << 16)
    one, other = SiloShares(plan, SECRET), SiloShares(plan, SECRET)
    assert (plan.count_masks(one) == plan.count_masks(other)).all()
    streams = [
        (one.shares() == other.shares()) * one.shares(),
        SiloShares(replace(plan, session=bytes(32)), SECRET).shares(),
        SiloShares(plan, bytes(32)).shares(),
        SiloShares(replace(plan, session=bytes(32)), SECRET).masks(0, "users"),
        *(one.masks(round, use) for round in (0, 1) for use in ("users", "records")),
    ]
    assert np.unique(np.concatenate(streams)).size == 1000 * len(streams)
    shifts = [one.cells(round, law) for round in (0, 1)]
    shifts += [
        sampling.derive_silo_cells(*other, 1000, law, 0)
        for other in ((SECRET, bytes(32)), (bytes(32), SESSION))
    ]
    masks = [
        plan.count_masks(SiloShares(replace(plan, session=session), SECRET))
        for session in (SESSION, bytes(32))
    ]
    assert all((a == b).mean() < 0.01 for a in shifts for b in shifts if a is not b)
    assert (masks[0] == masks[1]).mean() < 0.1  # 1/32 by chance


def test_count_masks_and_shifts_are_uniform() -> None:
    plan = plan_for(40_000, cap=20)
    silo = SiloShares(plan, secrets.token_bytes(32))
    assert stats.chisquare(np.bincount(plan.count_masks(silo).astype(int), minlength=32)).pvalue > 1e-6
    shifts = silo.cells(0, SamplingRatio(1, 10))
    assert stats.chisquare(np.bincount(shifts, minlength=10)).pvalue > 1e-6


def test_set_up_happens_once_and_rounds_only_grow() -> None:
    plan = plan_for(5)
    server, silo = parties(plan)
    shares = set_up(server, silo, np.arange(5))
    with pytest.raises(SilodpError, match="was used"):  # with the same ρ this gave n[j, u] exactly
        plan.offer(silo, plan.ask(parties(plan)[0], np.zeros(5, int)).message)
    asked = server.sample(4, shares, np.zeros(5, int))
    silo.sample(4, "users", asked.message)
    for round in (4, 3, 0):
        cheat = parties(plan)[0].sample(round, shares, np.ones(5, int))
        for use in ("users", "another"):
            with pytest.raises(SilodpError, match="was used"):  # −x_u and c_u − x_u together are c_u
                silo.sample(round, use, cheat.message)
        with pytest.raises(SilodpError, match="was used"):
            server.sample(round, shares, np.ones(5, int))


def test_a_draw_that_nobody_knows_is_answered_once_in_its_own_round() -> None:
    plan, law = plan_for(5), SamplingRatio(1, 4)
    server, silo = parties(plan)
    shares = set_up(server, silo, np.arange(5))
    first, sender = server.sample_unknown(0, law), copy.copy(SERVER_SENDER)
    silo.sample_unknown(0, "users", law, first.message)
    waiting = choices(plan, law, 0)
    answer_unknown(sender, first, law, shares, waiting.message)
    with pytest.raises(SilodpError, match="was used"):
        silo.sample_unknown(0, "users", law, first.message)
    cheat = copy.copy(SILO_RECEIVER).choose(sampling.transfer_counter(0), np.ones(10, int))[0]
    for message in (waiting.message, cheat):  # y_u is used for one table
        with pytest.raises(SilodpError, match="was used"):
            answer_unknown(sender, first, law, shares, message)
    second = server.sample_unknown(1, law)
    assert (second.own != first.own).all()
    assert "own" not in repr(second)


def test_the_servers_cells_are_uniform_and_its_own() -> None:
    drawn = [sampling.draw_server_cells(40_000, SamplingRatio(1, 10)) for _ in range(2)]
    assert all(stats.chisquare(np.bincount(i, minlength=10)).pvalue > 1e-6 for i in drawn)
    assert stats.chisquare(np.bincount((drawn[0] - drawn[1]) % 10, minlength=10)).pvalue > 1e-6


def test_what_silo_0_asks_for_is_kept_and_opened_as_stored() -> None:
    plan, law = plan_for(30), SamplingRatio(2, 10)
    part = choices(plan, law, 3)
    again = Lookup.unpack(part.pack())
    assert again.message == part.message
    tables = np.arange(300, dtype=np.uint64).reshape(30, 10)
    sent = lookup.answer(copy.copy(SERVER_SENDER), sampling.transfer_counter(3), part.message, tables)
    shifts = SiloShares(plan, SECRET).cells(3, law)
    assert again.open(sent).tolist() == (10 * np.arange(30) + shifts).tolist()
    assert part.message != choices(plan, law, 3).message, "every request has a filling of its own"


def test_impossible_plans_are_refused() -> None:
    for wrong, message in (
        ({"session": b"short"}, "session id of 5 bytes"),
        ({"users": 0}, "0 users"),
        ({"cap": 0}, "cap of 0"),
        ({"cap": 1 << 24}, "below 2²⁴"),
        ({"weight_bits": 49}, "k < T"),
        ({"word_bits": 65}, "T ≤ 64"),
    ):
        with pytest.raises(SilodpError, match=message):
            replace(plan_for(3), **wrong)
    for drawn, places in ((0, 4), (5, 4), (1, 1), (1, 1 << 17)):
        with pytest.raises(SilodpError, match=rf"a rate of {drawn}/{places}; set"):
            SamplingRatio(drawn, places)
    with pytest.raises(SilodpError, match="cap < M"):
        compute_reciprocals(20, 16, 16)
    with pytest.raises(SilodpError, match="run secret"):
        SiloShares(plan_for(3), b"short")
    server = parties(plan_for(3))[0]
    with pytest.raises(SilodpError, match="masked counts are not 3 numbers from 0 below 32"):
        server.parameters.ask(server, np.array([0, 1, 32]))
    with pytest.raises(SilodpError, match="sampled bits"):
        server.sample(0, np.zeros(3, np.uint64), np.array([0, 2, 1]))
    with pytest.raises(SilodpError, match="number the rounds from 0"):
        server.sample(-1, np.zeros(3, np.uint64), np.array([0, 1, 1]))
