import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from silodp.data.allocation import zipf, zipf_weights
from silodp.errors import SilodpError
from silodp_experiments.benchmarks.allocation import allocate
from support.refusals import refused

HEART = (199, 172, 30, 85)
TCGA = (248, 156, 164, 129, 129, 40)


def rng(seed=0):
    return np.random.default_rng(seed)


def p_value(counts, law):
    return chisquare(counts, np.asarray(law) / np.sum(law) * np.sum(counts)).pvalue


def test_uniform_law():
    user, silo = allocate("uniform", records=20_000, users=40, silos=5, generator=rng())
    table = np.bincount(user * 5 + silo, minlength=200)
    assert p_value(table, np.ones(200)) > 1e-3
    assert p_value(table, np.repeat(zipf_weights(40, 0.1), 5)) < 1e-6


def test_zipf_law_of_users():
    user, _ = zipf(20_000, 40, 5, rng())
    counts = np.bincount(user, minlength=40)
    assert p_value(counts, zipf_weights(40, 0.5)) > 1e-3
    for wrong in (1 / 3, 3 / 4):
        assert p_value(counts, zipf_weights(40, wrong)) < 1e-6


def test_zipf_law_of_silos_is_in_an_order_per_user():
    user, silo = zipf(60_000, 20, 5, rng())
    table = np.zeros((20, 5), dtype=int)
    np.add.at(table, (user, silo), 1)
    ranked = np.sort(table, axis=1)[:, ::-1].sum(
        axis=0
    )  # 20 users of 3,000 records: ranks are clear but for ties
    share = ranked / ranked.sum()
    np.testing.assert_allclose(share, zipf_weights(5, 2.0), atol=0.01)
    assert len({tuple(np.argsort(-row)) for row in table}) > 10
    # Over many users no silo is preferred.
    _, silo = zipf(60_000, 30_000, 5, rng(1))
    assert np.ptp(np.bincount(silo)) < 0.05 * 12_000


@pytest.mark.parametrize("scheme", ["uniform", "zipf"])
def test_at_most_two_labels(scheme):
    labels = rng(1).integers(10, size=10_000)
    user, silo = allocate(
        scheme, users=60, generator=rng(), records=10_000, silos=5, labels=labels, labels_per_user=2
    )
    held = [len(np.unique(labels[user == u])) for u in range(60)]
    assert max(held) == 2
    assert user.shape == silo.shape == (10_000,)
    per_label = [len(np.unique(user[labels == value])) for value in range(10)]
    assert min(per_label) >= 10  # 120 hands, 12 of each label


def test_labels_need_holders():
    with pytest.raises(SilodpError, match="too few to hold all 10 labels"):
        allocate(
            "zipf", users=4, generator=rng(), records=10, silos=2, labels=np.arange(10), labels_per_user=2
        )
    with pytest.raises(SilodpError, match="give the label of each of the 10 records"):
        allocate("zipf", users=4, generator=rng(), records=10, silos=2, labels_per_user=2)


def test_uniform_fixed_law():
    user, silo = allocate("uniform", users=30, generator=rng(), sizes=(9000, 3000))
    assert np.bincount(silo).tolist() == [9000, 3000]
    assert p_value(np.bincount(user[silo == 0], minlength=30), np.ones(30)) > 1e-3


def test_zipf_fixed_law_of_users():
    user, _ = allocate("zipf", users=40, generator=rng(), sizes=(5000, 5000, 6000))
    counts = np.bincount(user, minlength=40)
    assert p_value(counts, zipf_weights(40, 0.5)) > 1e-3
    assert p_value(counts, zipf_weights(40, 0.75)) < 1e-6


@pytest.mark.parametrize(("sizes", "pairs"), [(HEART, False), (TCGA, True)])
def test_zipf_fixed_sends_four_fifths_to_one_silo(sizes, pairs):
    shares, mains = [], []
    for seed in range(20):
        user, silo = allocate("zipf", users=30, generator=rng(seed), sizes=sizes, pairs=pairs)
        table = np.zeros((30, len(sizes)), dtype=int)
        np.add.at(table, (user, silo), 1)
        many = table[table.sum(axis=1) >= 15]
        shares += (many.max(axis=1) / many.sum(axis=1)).tolist()
        mains += many.argmax(axis=1).tolist()
    assert np.median(shares) == pytest.approx(0.8, abs=0.02)
    assert np.mean(np.abs(np.array(shares) - 0.8) < 0.08) > 0.8  # the rest met a silo that was full
    assert set(mains) == set(range(len(sizes)))


def test_zipf_fixed_spreads_the_rest_equally():
    user, silo = allocate("zipf", users=50, generator=rng(), sizes=(20_000,) * 4)
    table = np.zeros((50, 4), dtype=int)
    np.add.at(table, (user, silo), 1)
    rest = np.sort(table[:30], axis=1)[:, :3]  # the heavy users, before any silo is full
    middle = rest.sum(axis=1) / 3
    assert np.abs(rest[:, 1] - middle).max() < 5 * np.sqrt(middle.max())


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40).filter(lambda n: n != 1), min_size=1, max_size=6).filter(
        lambda sizes: sum(sizes) > 0
    ),
    users=st.integers(1, 60),
    scheme=st.sampled_from(["uniform", "zipf"]),
    pairs=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fixed_silos_keep_their_sizes_and_pairs(sizes, users, scheme, pairs, seed):
    user, silo = allocate(scheme, users=users, generator=rng(seed), sizes=sizes, pairs=pairs)
    np.testing.assert_array_equal(silo, np.repeat(np.arange(len(sizes)), sizes))
    assert len(user) == sum(sizes)
    assert user.min() >= 0
    assert user.max() < users
    if pairs:
        table = np.zeros((users, len(sizes)), dtype=int)
        np.add.at(table, (user, silo), 1)
        assert not (table == 1).any()
    again, _ = allocate(scheme, users=users, generator=rng(seed), sizes=sizes, pairs=pairs)
    np.testing.assert_array_equal(user, again)


def test_records_of_a_user_are_not_neighbors_in_the_table():
    user, _ = allocate("zipf", users=20, generator=rng(), sizes=(4000,), pairs=True)
    assert np.mean(user[1:] == user[:-1]) < 0.15


def test_seed_changes_the_allocation():
    first, _ = allocate("zipf", users=50, generator=rng(0), records=500, silos=3)
    second, _ = allocate("zipf", users=50, generator=rng(1), records=500, silos=3)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"scheme": "pareto"}, "argument.value", "allocation"),
        ({"users": 0}, "argument.value", "users"),
        ({"users": 5.0}, "argument.value", "users"),
        ({"users": 2.5, "records": None, "silos": None, "sizes": (4, 5)}, "argument.value", "users"),
        ({"users": "a"}, "argument.type", "users"),
        ({"users": None}, "argument.type", "users"),
        ({"users": True}, "argument.type", "users"),
        ({"silos": None}, "argument.missing", None),
        ({"silos": 0}, "argument.missing", None),
        ({"sizes": (1, 2)}, "argument.conflict", "sizes"),
        ({"pairs": True}, "argument.conflict", "pairs"),
        ({"records": None, "silos": None, "sizes": (4, 1), "pairs": True}, "data.too_few_records", None),
    ],
)
def test_refuses(options, code, field):
    with refused(code) as caught:
        allocate(**{"scheme": "zipf", "users": 5, "generator": rng(), "records": 9, "silos": 2, **options})
    assert caught.value.field == field


def test_large_allocations_take_seconds():
    labels = rng(1).integers(10, size=60_000)
    allocate("zipf", users=10_000, generator=rng(), records=60_000, silos=5, labels=labels, labels_per_user=2)
    user, _ = allocate("zipf", users=10_000, generator=rng(), sizes=(12_000,) * 5)
    assert len(np.unique(user)) > 9_000


def test_own_makes_everyone_a_person_and_silos_equal():
    user, silo = allocate("own", users=3, generator=rng(), records=103, silos=5)
    np.testing.assert_array_equal(user, np.arange(103))
    assert sorted(np.bincount(silo)) == [20, 20, 21, 21, 21]
    assert not (silo == np.arange(103) % 5).all(), "shares are drawn, not dealt in file order"
    user, silo = allocate("own", users=1, generator=rng(), sizes=(4, 0, 2))
    np.testing.assert_array_equal(user, np.arange(6))
    np.testing.assert_array_equal(silo, [0, 0, 0, 0, 2, 2])


def test_own_with_labels_per_silo_deals_shards_of_one_label():
    labels = rng(1).permutation(np.repeat(np.arange(10), 600))
    _, silo = allocate(
        "own", users=1, generator=rng(), records=6000, silos=10, labels=labels, labels_per_silo=5
    )
    assert (np.bincount(silo) == 600).all()
    held = [len(np.unique(labels[silo == s])) for s in range(10)]
    assert max(held) <= 5 < 10
    with refused("argument.conflict"):
        allocate("zipf", users=5, generator=rng(), records=9, silos=2, labels_per_silo=1)
    with pytest.raises(SilodpError, match="labels_per_silo is 0"):
        allocate("own", users=5, generator=rng(), records=9, silos=2, labels=labels[:9], labels_per_silo=0)
