"""The allocation of benchmark records to simulated users and to silos.

All functions are pure: the same arguments and generator state give the same allocation. Users are numbered by rank:
under the Zipf laws user 0 has the most records in expectation.

Source: ULDP-FL, section 5.1.1.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from silodp.data.allocation import USER_EXPONENT, Indices, Scheme, deal, draw_silos, zipf_weights
from silodp.errors import SilodpError
from silodp.settings import MAX_WHOLE, Range, Whole, check_choice
from silodp.text import pluralize

MAIN_SHARE = 0.8
"""Share of a user's records in one silo, where silos are fixed."""


def _draw_users(
    records: int,
    weights: NDArray[np.float64],
    generator: np.random.Generator,
    labels: ArrayLike | None,
    labels_per_user: int,
) -> Indices:
    """Draw (n,) users with `weights`, per label, among the users who hold it.

    Every user is first given `labels_per_user` labels, so that all labels are given about equally often. The user of a
    record is then drawn only among the users who have its label, with the same weights.
    """
    users = len(weights)
    if labels is None or len(np.asarray(labels)) != records:
        raise SilodpError(
            f"labels_per_user is {labels_per_user}; give the label of each of the {records} records",
            code="argument.shape",
            field="labels",
        )
    values, label = np.unique(np.asarray(labels), return_inverse=True)
    if labels_per_user < 1 or labels_per_user * users < len(values):
        raise SilodpError(
            f"labels_per_user is {labels_per_user} with {pluralize(users, 'user')}, too few to hold all {len(values)} "
            "labels; raise users or labels_per_user",
            code="argument.value",
            field="labels_per_user",
        )
    # All labels in a random order, repeated: every label has a user, all about the same number of users.
    # Rounded up: the last deck may be dealt in part.
    decks = -(-labels_per_user * users // len(values))
    deck = generator.permuted(np.tile(np.arange(len(values)), (decks, 1)), axis=1).ravel()
    hands = deck[: labels_per_user * users].reshape(users, labels_per_user)
    # The first users, who have most records, must not hold the labels of the first deck alone.
    hands = generator.permutation(hands, axis=0)
    user = np.empty(records, dtype=np.int64)
    for value in range(len(values)):
        mine = np.flatnonzero(label == value)
        holders = np.flatnonzero((hands == value).any(axis=1))
        # Renormalized among the holders, so that users keep their weights relative to each other.
        share = weights[holders] / weights[holders].sum()
        user[mine] = generator.choice(holders, size=len(mine), p=share)
    return user


def uniform_fixed(
    sizes: ArrayLike, users: int, generator: np.random.Generator, pairs: bool = False
) -> list[Indices]:
    """Draw a user for every record, uniformly; the silos' sizes (S,) stay as they are.

    With `pairs`, records of a silo are assigned in pairs, both to the same user. If the number of records is
    odd, the remaining record goes to a user who already has a pair there. So a user has either no record or at
    least two in a silo, which a Cox loss needs.

    Returns:
        one array (sizes[s],) of users per silo.

    Source: ULDP-FL, section 5.1.1, "uniform" for HeartDisease and TcgaBrca.
    """
    units = _count_units(sizes, pairs)
    drawn = [generator.integers(users, size=size) for size in units]
    return _spread(drawn, np.asarray(sizes), generator, pairs)


def zipf_fixed(
    sizes: ArrayLike,
    users: int,
    generator: np.random.Generator,
    pairs: bool = False,
) -> list[Indices]:
    """Draw records per user ∝ rank^-0.5, 80 % in one silo and the rest elsewhere; silo sizes (S,) are given.

    The main silo of a user is drawn with probabilities proportional to the free places in each silo, beginning
    with the users who have most records. Each of the user's other records goes to another silo, drawn uniformly
    from those with free places. If the main silo has too few free places (a small silo, or one of the last
    users), the rest goes to other silos too. `pairs` as in `uniform_fixed`.

    Returns:
        one array (sizes[s],) of users per silo.

    Source: ULDP-FL, section 5.1.1, "zipf" for HeartDisease and TcgaBrca.
    """
    room = _count_units(sizes, pairs)
    drawn: list[list[int]] = [[] for _ in room]
    totals = generator.multinomial(room.sum(), zipf_weights(users, USER_EXPONENT))
    # Users with most records choose first, while there is room for their 80 %.
    for user in np.argsort(-totals, kind="stable"):
        total = int(totals[user])
        if total == 0:
            break
        # By free places, so that small silos are not full before the users with few records come.
        main = int(generator.choice(len(room), p=room / room.sum()))
        here = min(round(MAIN_SHARE * total), int(room[main]))
        taken = np.zeros_like(room)
        taken[main] = here
        for _ in range(total - here):
            free = room - taken > 0
            elsewhere = free & (np.arange(len(room)) != main)
            taken[generator.choice(np.flatnonzero(elsewhere if elsewhere.any() else free))] += 1
        room -= taken
        for silo in np.flatnonzero(taken):
            drawn[silo] += [int(user)] * int(taken[silo])
    return _spread(
        [np.array(users_of, dtype=np.int64) for users_of in drawn], np.asarray(sizes), generator, pairs
    )


def _count_units(sizes: ArrayLike, pairs: bool) -> Indices:
    """Return how many records, or pairs of them, every silo hands out: (S,)."""
    units = np.array(sizes, dtype=np.int64)
    if not pairs:
        return units
    if (units == 1).any():
        silo = int(np.flatnonzero(units == 1)[0])
        raise SilodpError(
            f"silo {silo} has 1 record, which makes no pair; drop it or allocate without pairs",
            code="data.too_few_records",
        )
    return units // 2


def _spread(
    drawn: list[Indices], sizes: Indices, generator: np.random.Generator, pairs: bool
) -> list[Indices]:
    """Lay the drawn users over the records of each silo in random order (tables are often sorted)."""
    result = []
    for users, size in zip(drawn, sizes, strict=True):
        if pairs:
            # An odd record goes to a user with a pair here: alone it would give no Cox loss.
            odd = generator.choice(users, size=size % 2) if size else users
            users = np.concatenate([np.repeat(users, 2), odd])
        result.append(generator.permutation(users))
    return result


def allocate_by_label(
    records: int, silos: int, generator: np.random.Generator, labels: ArrayLike | None, labels_per_silo: int
) -> tuple[Indices, Indices]:
    """Give every record its own user, and every silo about L = `labels_per_silo` different labels.

    The records are sorted by label and cut into S·L shards, of which every silo gets L at random.

    Returns:
        user (n,), which is 0..n-1, and silo (n,) in 0..silos-1.

    Source: McMahan et al. 2017, section 3.
    """
    if labels is None or labels_per_silo < 1:
        raise SilodpError(
            f"labels_per_silo is {labels_per_silo}; give a whole number ≥ 1, for records that have classes",
            code="argument.value",
            field="labels_per_silo",
        )
    order = generator.permutation(records)
    silo = np.empty(records, np.int64)
    # A stable sort keeps the random order within a label, so that shards differ between seeds.
    by_label = order[np.argsort(np.asarray(labels)[order], kind="stable")]
    shards = np.array_split(by_label, silos * labels_per_silo)
    for place, shard in enumerate(generator.permutation(len(shards))):
        silo[shards[shard]] = place // labels_per_silo
    return np.arange(records), silo


def allocate(
    scheme: str,
    *,
    users: int,
    generator: np.random.Generator,
    records: int | None = None,
    silos: int | None = None,
    sizes: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    labels_per_user: int | None = None,
    pairs: bool = False,
    labels_per_silo: int | None = None,
) -> tuple[Indices, Indices]:
    """Allocate every record to a user and a silo.

    Give `records` and `silos` if records may go to any silo. Give `sizes` (S,) if the silo of every record is
    fixed: the records must then be ordered by silo, and the returned silo is 0 `sizes[0]` times, then 1
    `sizes[1]` times, and so on.

    Args:
        scheme: "uniform", "zipf" or "own" (`silodp.data.allocation.deal`).
        users: U; unused by "own".
        generator: the source of all draws.
        records: n.
        silos: S.
        sizes: (S,) records of fixed silos.
        labels: (n,) class of every record.
        labels_per_user: number of classes that a user may hold; None for no limit.
        pairs: whether, with fixed silos, users get records in pairs.
        labels_per_silo: with "own", about how many classes a silo holds.

    Returns:
        user (n,) and silo (n,), int64.

    Raises:
        SilodpError: an unknown scheme, a count below 1, or options that exclude each other.
    """
    check_choice("allocation", scheme, get_args(Scheme))
    for option, value, excluded in (
        ("labels_per_silo", labels_per_silo, scheme != "own"),
        ("labels_per_user", labels_per_user, scheme == "own"),
    ):
        if value is not None and excluded:
            raise SilodpError(
                f"{option} does not go with allocation '{scheme}': leave it out.",
                code="argument.conflict",
                field=option,
            )
    if scheme != "own":
        Range().check("users", users)
        Whole().check("users", users)
    if sizes is not None:
        if any(option is not None for option in (records, silos, labels_per_user, labels_per_silo)):
            raise SilodpError(
                "sizes is given with records, silos, labels_per_user or labels_per_silo: fixed silos take sizes only.",
                code="argument.conflict",
                field="sizes",
            )
        if scheme == "own":
            return np.arange(np.sum(sizes)), np.repeat(np.arange(len(np.asarray(sizes))), np.asarray(sizes))
        law = uniform_fixed if scheme == "uniform" else zipf_fixed
        per_silo = law(sizes, users, generator, pairs)
        return np.concatenate(per_silo), np.repeat(np.arange(len(per_silo)), [len(part) for part in per_silo])
    if silos is not None:
        Whole(-MAX_WHOLE).check("silos", silos)  # below 1 it is refused as missing
    if records is None or silos is None or silos < 1:
        raise SilodpError(
            f"records is {records} and silos is {silos}; give both, or sizes for fixed silos",
            code="argument.missing",
        )
    if pairs:
        raise SilodpError(
            "pairs is set with free silos; allocate in pairs only where the silos' sizes are fixed",
            code="argument.conflict",
            field="pairs",
        )
    if labels_per_silo is not None:
        return allocate_by_label(records, silos, generator, labels, labels_per_silo)
    if labels_per_user is None:
        return deal(scheme, records, users, silos, generator)
    weights = np.full(users, 1 / users) if scheme == "uniform" else zipf_weights(users, USER_EXPONENT)
    user = _draw_users(records, weights, generator, labels, labels_per_user)
    if scheme == "uniform":
        return user, generator.integers(silos, size=records)
    return user, draw_silos(user, users, silos, generator)
