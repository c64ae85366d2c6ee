"""Attacks of a server that signs whatever it likes on the gate of a silo.

Attacked are record counts, the noise of a silo, and its audit ledger. Before silos had a gate, each attack here read
counts, removed noise, or obtained releases that nobody charged (S1 to S6, S11 and S13 of the review of version 0.1).
They run against real silos: a silo gives out nothing beyond what the constants of the run allow.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from silodp.accounting.accountant import choose_accountant, compute_epsilon
from silodp.accounting.events import PoissonSampled, select_kind
from silodp.accounting.ledger import Ledger
from silodp.aggregators import Plain
from silodp.aggregators._key_agreement import run_key_agreement
from silodp.aggregators.masked import Masked
from silodp.crypto.keys import Identity
from silodp.errors import SilodpError
from silodp.methods import Ddp
from silodp.runtime.gate import Gate
from silodp.runtime.silo import Silo
from silodp.wire.messages import Message
from silodp.wire.store import MemoryStore
from silodp.wire.transport import SignedParty, sign, verify
from silodp_budgets.rpdp.renyi_filter import RpdpFilter
from silodp_deploy.lifetime import LifetimeLedger
from silodp_experiments.uldp_baselines import Default, UldpGroup, UldpNaive
from silodp_private.crypto.oblivious_transfer import BaseTransfers
from silodp_private.crypto.shares import SERVER_CHOOSES
from silodp_private.select import Select
from support.masked import AVG
from support.oracles import small_federation
from support.private import HALF, HIDDEN, LATTICE, PAILLIER, PRIMARY, RECORDS, SAMPLED, Parties
from support.refusals import refused
from support.stores import copy_entries, set_back, side_of
from support.wires import set_state

GROUP = UldpGroup(2.0, 0.5, 4, 0.2, local_steps=3, expected_batch_size=4, local_learning_rate=0.5)
METHODS = {
    "default": Default(AVG.local),
    "naive": UldpNaive(5.0, 0.5, AVG.local),
    "group": GROUP,
    "uniform": AVG,
    "records": RECORDS,
    "sampled": SAMPLED,
    "uniform sampled": replace(AVG, user_sampling=0.5),
}
RUNS = {
    **{f"plain {name}": (Plain(), method) for name, method in METHODS.items()},
    **{f"masked {name}": (Masked(), method) for name, method in METHODS.items()},
    "lattice": (LATTICE, RECORDS),
    "lattice sampled": (LATTICE, SAMPLED),
    "lattice hidden": (HIDDEN["lattice"], HALF),
    "paillier": (PAILLIER, RECORDS),
    "paillier hidden": (HIDDEN["paillier"], HALF),
}
SHOWN = {"plain records", "masked records", "plain sampled", "masked sampled"}
"""Runs whose guarantee says that counts are disclosed."""


# --- S1: counts ---


@pytest.mark.parametrize("name", RUNS)
def test_counts_are_shown_only_where_the_guarantee_says_so(name):
    parties = Parties(*RUNS[name])
    for silo in parties.silos.values():
        if name in SHOWN:
            assert silo.answer(Message("counts", "run")).arrays["counts"].sum() > 0
            with refused("gate.order"):
                silo.answer(Message("counts", "run", attempt=1))
        else:
            with refused("gate.kind"):
                silo.answer(Message("counts", "run"))


# --- S2: transfers of another session ---


def test_tables_are_not_offered_under_the_pads_of_an_earlier_session():
    """With one pad for two tables their difference gave N[u] of every person."""
    parties = Parties(LATTICE, RECORDS)
    first = parties.last("reciprocals")
    ask = lambda requests: {n: parties.silos[n].answer(m) for n, m in requests.items()}  # noqa: E731
    session = run_key_agreement("run", parties.names, ask, 1)
    zero, fields = parties.silos["silo0"], {"session": session}
    lie = replace(first, attempt=1, fields=fields)
    with refused("gate.order"):
        zero.answer(lie)
    with refused("session.no_transfers"):  # and not by the gate alone
        zero._handlers["reciprocals"](lie)
    zero.answer(replace(parties.last("base"), attempt=1, fields=fields, blobs={"offer": offer(session)}))
    old = replace(first, fields={"session": parties.session})
    with refused("gate.order", "session.unknown"):
        zero.answer(replace(old, attempt=1))


def offer(session: str) -> bytes:
    return BaseTransfers(bytes.fromhex(session), SERVER_CHOOSES).offer


# --- S3: what a request holds ---

WRONG = {
    "silenced silos": ("sampled", {"clients": np.array([True, False, False])}),
    "a sample": ("sampled", {"sample": np.ones(12, bool)}),
    "a sample of one person": ("uniform sampled", {"sample": np.arange(12) == 3}),
    "a sample where nobody is drawn": ("uniform", {"sample": np.ones(12, bool)}),
    "weights in a round": ("records", {"weights": np.full(12, 0.5)}),
    "uniform weights in a round": ("uniform sampled", {"weights": np.full(12, 1 / 3)}),
    "a model too short": ("uniform", {"params": np.zeros(4, np.float32)}),
    "a model of another type": ("uniform", {"params": np.zeros(5)}),
    "a model that is not finite": ("uniform", {"params": np.full(5, np.nan, np.float32)}),
    "something else": ("uniform", {"more": np.zeros(1)}),
}


@pytest.mark.parametrize("aggregator", [Plain(), Masked()], ids=lambda a: a.name)
@pytest.mark.parametrize("lie", WRONG)
def test_arrays_that_the_method_does_not_define_are_refused(lie, aggregator):
    name, arrays = WRONG[lie]
    parties = Parties(aggregator, METHODS[name])
    parties.run_round(0)
    asked = parties.last("update")
    with refused("message.malformed"):
        parties.silos["silo0"].answer(replace(asked, round=1, arrays={**asked.arrays, **arrays}))
    parties.run_round(1)


@pytest.mark.parametrize("weight", [1.5, -0.1])
def test_weights_out_of_range_are_refused(weight):
    parties = Parties(Plain(), RECORDS)
    fresh = parties.restored("silo0")
    fresh.answer(Message("counts", "run"))
    # Of one person who has records here, all others as they are.
    weights = parties.last("setup").arrays["weights"].copy()
    weights[np.argmax(weights)] = weight
    with refused("gate.allotment"):
        fresh.answer(Message("setup", "run", arrays={"weights": weights}))
    for other in (weights[:-1], weights.astype(np.float32), np.full(12, np.inf)):
        with refused("message.malformed"):
            fresh.answer(Message("setup", "run", arrays={"weights": other}))


@pytest.mark.parametrize("name", [name for name in RUNS if name not in SHOWN])
@pytest.mark.parametrize("array", ["weights", "allotment"])
def test_a_silo_takes_no_weights_where_it_knows_them_itself(name, array):
    """A server that gave one person the weight 1 and the others 0 read that person off the sum."""
    parties = Parties(*RUNS[name])
    fresh = parties.restored("silo0")
    one = (np.arange(12) == 3).astype(np.float64)
    for weights in (one, np.full(12, 1 / 3), np.full(12, 5)):
        with refused("message.malformed"):
            fresh.answer(Message("setup", "run", arrays={array: weights}))
    fresh.answer(parties.last("setup"))
    kept = fresh._load_selection()[1]
    np.testing.assert_allclose(
        kept, np.full(12, 1.0 if RUNS[name][0].weights_privately else 1 / 3), rtol=1e-15
    )


def test_a_weight_for_a_person_without_records_is_refused():
    parties = Parties(Plain(), RECORDS, federation=small_federation(users=40, records=12))
    counts = parties.last("setup").arrays["weights"] > 0
    assert not counts.all()
    fresh = parties.restored("silo0")
    fresh.answer(Message("counts", "run"))
    with refused("gate.allotment"):
        fresh.answer(Message("setup", "run", arrays={"weights": np.full(40, 0.5)}))


# --- S4: the silo's own bounds and ledger ---


@pytest.mark.parametrize("name", ["plain uniform", "masked uniform", "lattice sampled", "paillier"])
def test_no_more_than_the_rounds_that_were_agreed(name):
    parties = Parties(*RUNS[name], rounds=2)
    parties.run_round(0)
    parties.run_round(1)
    with refused("gate.rounds"):
        parties.run_round(2)
    for silo in parties.silos.values():
        with refused("gate.run"):
            silo.answer(replace(parties.last("update"), run="another"))


def test_no_more_attempts_than_the_encryption_was_chosen_for():
    """What flooding hides is a part of δ for so many; the server's own count is not the silo's."""
    parties = Parties(replace(LATTICE, attempts=2), RECORDS)
    parties.run_round(0)
    parties.run_round(1)
    asked = parties.last("update")
    with refused("gate.attempts"):
        parties.silos["silo1"].answer(replace(asked, round=2))


def test_a_share_in_clear_is_sent_once_in_a_round():
    """Every attempt would have fresh noise, under the charge of the first: their mean is free of noise."""
    parties = Parties(Plain(), AVG)
    parties.run_round(0)
    silo, asked = parties.silos["silo0"], parties.last("update")
    for lie in (replace(asked, attempt=1), replace(asked, round=1, attempt=1)):
        with refused("gate.attempt"):
            silo.answer(lie)
    parties.run_round(1)
    assert [(c.round, c.release) for c in silo.gate.ledger.history] == [(0, 0), (1, 0)]


def test_releases_of_a_round_end_when_no_silo_is_left_to_lose():
    """400 releases of one round were opened, with fresh noise under each: their mean is free of noise."""
    parties = Parties(Masked(min_silos=3), AVG, silos=5)
    parties.run_round(0)
    asked, opened = parties.last("update"), parties.last("open")
    silo = parties.silos["silo0"]  # it answers with 5, 4 and 3 silos
    for attempt in range(400):
        roster = list(parties.names[: max(5 - attempt, 3)])
        update = replace(
            asked, round=1, attempt=attempt, fields={**asked.fields, "release": attempt, "roster": roster}
        )
        if attempt < 3:
            silo.answer(update)
            about = {**update.fields, "request": update.digest()}
            silo.answer(replace(opened, round=1, attempt=attempt, fields=about))
        else:
            with refused("gate.roster"):
                silo.answer(update)
    assert [(c.round, c.release) for c in silo.gate.ledger.history] == [(0, 0), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("name", ["masked uniform", "masked records", "masked group", "masked naive"])
def test_a_silo_charges_the_number_of_survivors_that_costs_most(name):
    """It cannot know who else answers. For every method, no number from m to S costs more than the ends."""
    parties = Parties(Masked(min_silos=3), METHODS[name.removeprefix("masked ")], silos=5)
    parties.run_round(0)
    aggregator, spec = Masked(min_silos=3), parties.spec
    charged = parties.silos["silo0"].gate.ledger.history[0].events
    for n in range(3, 6):
        for adversary, event in aggregator.views(spec.method, 5, n).items():
            cost = aggregator.event(spec, event)
            if not hasattr(cost, "reason"):
                spent = compute_epsilon([(cost, 10)], 1e-5, "rdp")
                assert spent <= compute_epsilon([(charged[adversary], 10)], 1e-5, "rdp") * (1 + 1e-12)
    assert charged == replace(spec, aggregator=aggregator).costliest_events(0, 0)


@pytest.mark.parametrize(
    "aggregator", [Masked(min_silos=3), replace(LATTICE, min_silos=3)], ids=lambda a: a.name
)
def test_a_silo_adds_up_with_no_fewer_silos_than_noise_is_sized_for(aggregator):
    """In a sum with one accomplice a silo's part, with a fraction of the noise that is charged, lies open."""
    parties = Parties(aggregator, RECORDS if aggregator.name == "lattice" else AVG, silos=4)
    parties.run_round(0)
    asked = parties.last("update")
    for roster in (["silo0"], ["silo0", "silo1"], ["silo1", "silo2", "silo3"]):
        lie = replace(asked, round=1, fields={**asked.fields, "roster": roster})
        with refused("gate.roster"):
            parties.silos["silo0"].answer(lie)
    assert len(parties.silos["silo0"].gate.ledger.history) == 1


@pytest.mark.parametrize("opened", [False, True])
def test_values_that_were_opened_are_not_masked_again_for_fewer_silos(opened):
    """Two sums of the same noisy values, with a silo and without it, show that silo's value."""
    parties = Parties(Masked(min_silos=3), AVG, silos=4)
    parties.transport.lost = lambda name, m: m.kind == "open" and not opened
    if opened:
        parties.run_round(0)
    else:
        with pytest.raises(SilodpError, match="0 silos left"):
            parties.run_round(0)
    asked, silo = parties.last("update"), parties.silos["silo0"]
    fewer = {**asked.fields, "roster": list(parties.names[:3])}
    for release in (0, 2) if opened else (2,):
        with refused("gate.release"):
            silo.answer(replace(asked, attempt=1, fields={**fewer, "release": release}))
    with refused("gate.release"):
        silo.answer(replace(asked, round=1, fields={**asked.fields, "release": 1}))
    due = replace(asked, attempt=1, fields={**fewer, "release": int(opened)})
    with refused("gate.model"):  # a further release is of the same model, too
        silo.answer(nudge(due))
    assert silo.answer(due).arrays


def test_a_silo_charges_a_further_release_of_a_round_as_of_a_sample_that_is_known():
    """Two releases of one sample are not two samples, in a silo's own ledger either."""
    parties = Parties(Masked(min_silos=3), replace(AVG, user_sampling=0.3), silos=4)
    parties.transport.lost = lambda name, m: (name, m.kind) == ("silo3", "open")
    parties.run_round(0)
    for silo in ("silo0", "silo1", "silo2"):
        first, second = parties.silos[silo].gate.ledger.history
        assert (first.release, second.release) == (0, 1)
        for adversary in ("released", "server"):
            assert isinstance(first.events[adversary], PoissonSampled)
            assert second.events[adversary] == first.events[adversary].event


@pytest.mark.parametrize("aggregator", [Plain(), Masked()], ids=lambda a: a.name)
def test_a_silo_is_charged_for_its_own_noise_over_runs_that_list_it_at_other_places(aggregator):
    """The run's ε is of the kind of records that costs most; over two runs that would be two kinds."""
    own, other, rounds = 5.0, 50.0, 3
    ledgers = {}
    for run, noise in (("1" * 32, (own, other)), ("2" * 32, (other, own))):
        method = Ddp(
            noise,
            clip=1.0,
            local_steps=1,
            record_sampling=1.0,
            expected_batch_size=4.0,
            local_learning_rate=0.1,
        )
        parties = Parties(aggregator, method, silos=2)
        for round_ in range(rounds):
            parties.run_round(round_)
        ledgers[run] = parties.silos[f"silo{noise.index(own)}"].gate.ledger
        charges = [(event, rounds) for event in ledgers[run].counts("server")]
        assert [event for event, _ in charges] == [
            select_kind(parties.spec.costliest_events()["server"], noise.index(own))
        ]
    lifetime = LifetimeLedger(1e-5, {}, ledgers)
    costs = [
        (event, count) for ledger in ledgers.values() for event, count in ledger.counts("server").items()
    ]
    needed = compute_epsilon(costs, 1e-5, choose_accountant(event for event, _ in costs))
    assert lifetime.epsilon("server") >= needed * (1 - 1e-12)


@pytest.mark.parametrize(("factor", "rounds"), [(1 - 1e-6, 2), (1, 3), (1 + 1e-6, 3)])
def test_a_silo_stops_at_its_own_limit_whatever_the_server_asks(factor, rounds):
    """The limit is ε of three rounds, or a millionth less or more."""
    parties = Parties(Masked(), AVG)
    one = parties.spec.costliest_events(0, 0)
    three = compute_epsilon([(one["server"], 3)], 1e-5, "rdp")
    spent = compute_epsilon([(one["server"], rounds)], 1e-5, "rdp")
    parties = Parties(Masked(), AVG, limits={"server": three * factor})
    for round_ in range(rounds):
        parties.run_round(round_)
    with refused("gate.budget"):
        parties.run_round(rounds)
    ledger = parties.silos["silo1"].gate.ledger
    assert ledger.rounds == rounds
    assert ledger.epsilon("server") == pytest.approx(spent)


def test_a_silo_stops_before_a_further_release_that_costs_more_than_its_limit_leaves():
    """The limit has room for two samples; the second release is of the same sample, without amplification."""
    method = replace(AVG, user_sampling=0.3)
    event = Parties(Masked(min_silos=3), method, silos=4).spec.costliest_events(0, 0)["server"]
    limit = compute_epsilon([(event, 2)], 1e-5, "rdp")
    parties = Parties(Masked(min_silos=3), method, silos=4, limits={"server": limit})
    parties.transport.lost = lambda name, m: (name, m.kind) == ("silo3", "open")
    with refused("gate.budget"):
        parties.run_round(0)
    assert [charge.release for charge in parties.silos["silo0"].gate.ledger.history] == [0]


def test_a_limit_against_one_to_whom_nothing_is_promised_lets_nothing_out():
    parties = Parties(Masked(), RECORDS, limits={"server": 100.0})
    with refused("gate.budget"):
        parties.run_round(0)


def test_a_charge_is_on_disk_before_the_update_is_computed(tmp_path, monkeypatch):
    """And a silo that dies in between has charged what it then answers once."""
    parties = Parties(Plain(), AVG)
    path = tmp_path / "ledger.jsonl"

    def started() -> Silo:
        return parties.started("silo0", ledger=Ledger(path, 1e-5, "pld", run="run"))

    parties.stores["silo0"] = MemoryStore()
    silo, lines = started(), []
    silo.answer(parties.last("setup"))

    def dying(request):
        lines.append(path.read_text().count('"kind":"charge"'))
        raise KeyboardInterrupt

    update = Message("update", "run", arrays={"params": np.zeros(5, np.float32)})
    silo._handlers["update"] = dying
    with pytest.raises(KeyboardInterrupt):
        silo.answer(update)
    assert lines == [1]
    silo.gate.ledger.close()
    again = started()
    answer = again.answer(update)
    assert again.gate.ledger.rounds == 1
    again.gate.ledger.close()
    assert started().answer(update).encode() == answer.encode()


# --- S5: a store that was set back ---


@pytest.mark.parametrize("aggregator", [Plain(), Masked()], ids=lambda a: a.name)
def test_a_restored_silo_repeats_its_noise_for_a_repeated_request(aggregator):
    """With fresh noise, forty restores gave its noise to a sixth of itself."""
    parties = Parties(aggregator, AVG)
    parties.run_round(0)
    before = parties.backup("silo0")
    asked = replace(parties.last("update"), round=1)
    answers = {parties.restored("silo0", before).answer(asked).encode() for _ in range(5)}
    assert len(answers) == 1
    other = replace(asked, arrays={**asked.arrays, "params": asked.arrays["params"] + 1})
    assert parties.restored("silo0", before).answer(other).encode() not in answers


def test_a_restored_silo_draws_other_noise_for_another_model():
    """Two answers with the same noise differ by two updates in clear."""
    parties = Parties(Plain(), replace(AVG, local=replace(AVG.local, batch_size=None)))
    parties.run_round(0)
    before, asked = parties.backup("silo0"), replace(parties.last("update"), round=1)
    one = parties.restored("silo0", before).answer(asked).arrays["share"]
    nudged = nudge(asked)
    other = parties.restored("silo0", before).answer(nudged).arrays["share"]
    noise = 5.0 * 0.5 / np.sqrt(3)  # one silo's share of σC
    assert np.abs(one - other).max() > 0.05 * noise


def nudge(asked: Message) -> Message:
    """The same request with the smallest change of the model."""
    params = asked.arrays["params"].copy()
    params[0] = np.nextafter(params[0], np.float32(1))
    return replace(asked, arrays={**asked.arrays, "params": params})


def test_a_restored_silo_masks_another_request_under_other_masks():
    """Under the same masks and seal the difference of two answers was that of two noisy values."""
    parties = Parties(Masked(), AVG)
    parties.run_round(0)
    before, asked = parties.backup("silo0"), replace(parties.last("update"), round=1)
    one = parties.restored("silo0", before).answer(asked).arrays["masked"]
    other = parties.restored("silo0", before).answer(nudge(asked)).arrays["masked"]
    bits = Masked().ring(parties.spec)[0].bits
    difference = np.abs((one - other).astype(np.int64 if bits == 64 else np.int32).astype(np.float64))
    noise = 5.0 * 2**20  # no value is longer: σ clips on the finest grid
    assert np.median(difference) > 20 * noise, "uniform in the ring"
    assert "request" in (replace(parties.last("open")).fields)


def test_what_stored_answers_refuse_the_gate_and_the_seals_refuse_too():
    """A silo whose store lost the answers of a round, and kept its state or its noise, neither opens nor masks anew."""
    parties = Parties(Masked(), AVG)
    parties.run_round(0)
    silo, asked = parties.silos["silo0"], parties.last("update")
    with refused("gate.open"):
        silo.gate.next_state(parties.last("open"))
    seals = side_of(silo)
    drawn = seals.get_or_draw(asked, seals.attempt(asked), dict)
    assert drawn["noisy"].any()
    with refused("gate.model"):
        seals.get_or_draw(nudge(asked), seals.attempt(asked), dict)


def test_a_store_older_than_its_run_is_noticed_where_every_silo_must_answer():
    parties = Parties(Masked(), AVG)
    parties.run_round(0)
    old = parties.backup("silo0")
    parties.run_round(1)
    parties.silos["silo0"] = parties.restored("silo0", old)
    parties.transport._silos["silo0"] = parties.silos["silo0"]
    with refused("gate.round_left_out"):
        parties.run_round(2)


def test_whoever_reads_a_store_later_cannot_draw_the_noise_of_earlier_rounds():
    parties = Parties(Plain(), AVG)
    keys = []
    for round_ in range(3):
        parties.run_round(round_)
        keys.append(parties.silos["silo0"]._derive_round_key(round_))
    assert len(set(keys)) == 3
    kept = b"".join(copy_entries(parties.stores["silo0"]).values())
    assert keys[2] in kept
    assert keys[0] not in kept
    assert keys[1] not in kept


# --- S6: different models to different silos ---


@pytest.mark.parametrize("aggregator", [Masked(), LATTICE], ids=lambda a: a.name)
def test_silos_that_were_sent_different_models_add_up_to_nothing(aggregator):
    """NaN to all but one made the sum that one silo's part."""
    parties = Parties(aggregator, RECORDS if aggregator is LATTICE else AVG)
    honest = parties.run_round(0).abs().max()
    ask = parties.transport.ask

    def two_faced(requests, timeout=None):
        if "silo1" in requests and requests["silo1"].kind == "update":
            one = requests["silo1"]
            params = one.arrays["params"] + np.float32(1)
            requests = {**requests, "silo1": replace(one, arrays={**one.arrays, "params": params})}
        return ask(requests, timeout)

    parties.transport.ask = two_faced
    with refused("gate.open"):  # silo1 masked another request than the one that is to be opened
        parties.run_round(1)
    masked = {
        name: message
        for name, message in parties.transport.answered
        if (message.kind, message.round) == ("update", 1)
    }
    assert len(masked) == 3
    if aggregator is not LATTICE:
        ring, step = Masked().ring(parties.spec)
        total = sum(message.arrays["masked"] for message in masked.values())
        for name in masked:
            opened = side_of(parties.silos[name])
            request = (
                next(
                    m for n, m in parties.transport.asked if n == name and (m.kind, m.round) == ("update", 1)
                )
                if name != "silo1"
                else two_faced_request(parties)
            )
            total = ring.mask(
                total,
                opened._member.session_of(request).seal_key(*opened.attempt(request).use, request.digest()),
                -1,
            )
        assert np.abs(ring.center(total) * step).max() > 100 * float(honest)


def two_faced_request(parties: Parties) -> Message:
    """What silo1 was asked in truth."""
    one = next(m for n, m in parties.transport.asked if n == "silo1" and (m.kind, m.round) == ("update", 1))
    return one


# --- S11: recipients ---


def test_a_request_for_another_silo_is_refused_before_it_is_read():
    parties = Parties(Plain(), RECORDS)
    server, own = Identity.fresh("server"), Identity.fresh("silo0")
    party = SignedParty(parties.restored("silo0"), own, server.public)
    counts = Message("counts", "run")
    with refused("message.signature"):
        party.receive(sign(counts, server, "silo1"))
    answer = party.receive(sign(counts, server, "silo0"))
    assert verify(answer, own.public, "it", "server", counts.digest()).arrays["counts"].sum() > 0
    for other in (("silo0", counts.digest()), ("server", "")):
        with refused("message.signature"):
            verify(answer, own.public, "it", *other)


# --- S13: secrets of a session ---


@pytest.mark.parametrize("lie", [{"round": 1}, {"attempt": 1}, {"round": 1, "attempt": 1}])
def test_a_session_is_not_begun_anew_once_a_round_was_answered(lie):
    parties = Parties(Masked(), AVG)
    parties.run_round(0)
    before = copy_entries(parties.stores["silo0"])
    with refused("gate.order"):
        parties.silos["silo0"].answer(replace(Message("hello", "run"), **lie))
    assert copy_entries(parties.stores["silo0"]) == before
    parties.run_round(1)


def test_an_earlier_session_is_not_begun_after_a_later_one():
    """Its number would name other secrets than the ones that were confirmed under it."""
    parties = Parties(Masked(), AVG)
    silo = parties.silos["silo0"]
    silo.answer(Message("hello", "run", attempt=2))
    before = copy_entries(parties.stores["silo0"])
    with refused("gate.order"):
        silo.answer(Message("hello", "run", attempt=1))
    assert copy_entries(parties.stores["silo0"]) == before


def test_an_opening_is_not_drawn_again_under_another_round_name():
    """It overwrote the secrets of a confirmed session."""
    parties = Parties(Masked(), AVG)
    before = copy_entries(parties.stores["silo0"])
    with refused("gate.order"):
        parties.silos["silo0"].answer(Message("hello", "run", round=1))
    assert copy_entries(parties.stores["silo0"]) == before


# --- order ---


@pytest.mark.parametrize("name", ["lattice sampled", "lattice hidden", "paillier hidden"])
def test_silo_0_answers_a_round_in_order(name):
    parties = Parties(*RUNS[name])
    parties.run_round(0)
    zero = parties.silos["silo0"]
    with refused("gate.order"):  # an update before its sample
        zero.answer(replace(parties.last("update"), round=1))
    with refused("gate.order"):  # a sample under the name of a further attempt
        zero.answer(replace(parties.last("sample"), round=1, attempt=1))
    parties.run_round(1)
    with refused("gate.order"):  # a sample after the update
        zero.answer(replace(parties.last("sample"), attempt=3))
    with refused("gate.past"):
        zero.answer(replace(parties.last("sample", round_=0), attempt=3))


# --- found by a hostile reading: crashes between two writes, and stores that were set back ---


def dies_before_its_line(silo: Silo, request: Message) -> None:
    """The answer is stored and not yet listed, and nothing was sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "record_answer", lambda self, answer: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            silo.answer(request)


def test_a_seal_whose_process_died_does_not_go_out_after_another_was_opened():
    """Two opened sums of the same noisy values differ by the part of the silo that was in one of them only."""
    parties = Parties(Masked(min_silos=3), AVG, silos=4)
    parties.run_round(0)
    update, silo = replace(parties.last("update"), round=1), parties.silos["silo0"]
    silo.answer(update)
    about = {**update.fields, "request": update.digest()}
    first = replace(update, kind="open", arrays={}, fields=about)
    dies_before_its_line(silo, first)
    silo = parties.started("silo0", ledger=silo.gate.ledger)
    assert silo.gate.state.opened, "listed as if it had been sent"
    again = replace(update, attempt=1, fields={**update.fields, "roster": list(parties.names[:3])})
    with refused("gate.release"):
        silo.answer(again)
    assert silo.answer(first).encode() == silo.answer(first).encode()


def test_an_answer_whose_process_died_goes_out_when_it_is_asked_for_again():
    parties = Parties(Masked(min_silos=3), AVG, silos=4)
    parties.run_round(0)
    update, silo = replace(parties.last("update"), round=1), parties.silos["silo0"]
    dies_before_its_line(silo, update)
    silo = parties.started("silo0", ledger=silo.gate.ledger)
    assert silo.answer(update).encode() == silo.answer(update).encode()
    assert silo.gate.state.round == 1
    assert len(silo.gate.ledger.history) == 2


def test_a_silo_that_missed_rounds_is_charged_by_its_own_ledger():
    """Its records have spent what they spent, whatever the number of the round."""
    federation = small_federation(silos=4).with_budgets(np.full(60, 2.0))
    method = RpdpFilter(
        noise_multiplier=2.0, clip=0.5, local_steps=2, expected_batch_size=4, local_learning_rate=0.1,
        largest_budget=2.0, delta=1e-5,
    )  # fmt: skip
    parties = Parties(Masked(min_silos=3), method, federation=federation, silos=4)
    parties.transport.lost = lambda name, m: name == "silo3" and m.round < 4 and m.kind == "update"
    for round_ in range(6):
        parties.run_round(round_)
    late, whole = (parties.silos[name].gate.ledger for name in ("silo3", "silo0"))
    assert [charge.round for charge in late.history] == [4, 5]
    assert [c.events for c in late.history] == [c.events for c in whole.history[:2]]
    assert late.epsilon("released") > 0.1


def test_a_store_older_than_its_ledger_is_noticed():
    """Else every model, one bit apart, would have an answer that nobody charges."""
    parties = Parties(Plain(), AVG)
    parties.run_round(0)
    old, ledger = copy_entries(parties.stores["silo0"]), parties.silos["silo0"].gate.ledger
    parties.run_round(1)
    set_back(parties.stores["silo0"], old)
    with refused("gate.rollback_detected"):
        parties.started("silo0", ledger=ledger)
    asked = parties.last("update")
    for request in (asked, nudge(asked)):  # and beside a process that runs
        with refused("gate.rollback_detected"):
            parties.silos["silo0"].answer(request)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_ledger_that_was_lost_or_set_back_is_noticed(kept):
    parties, copies = Parties(Masked(), AVG), []
    for round_ in range(2):
        copies.append(parties.backup("silo0"))
        parties.run_round(round_)
    with refused("gate.rollback_detected"):
        parties.started("silo0", ledger=copies[kept].ledger)


def test_a_silo_that_lost_its_store_begins_nothing_anew():
    parties = Parties(Masked(), AVG)
    parties.run_round(0)
    ledger = parties.silos["silo0"].gate.ledger
    set_back(parties.stores["silo0"], {})
    with refused("gate.rollback_detected"):
        parties.started("silo0", ledger=ledger)


@pytest.mark.parametrize("name", ["plain records", "masked uniform", "lattice hidden", "paillier"])
def test_nothing_of_a_round_is_answered_before_the_last_message_of_the_set_up(name):
    """Before it, weights are not there to be checked, and masks are those of a session that is not agreed on."""
    parties = Parties(*RUNS[name])
    parties.run_round(0)
    script = parties.silos["silo0"].gate.script
    silo = parties.restored("silo0")
    for step, due in enumerate(script.setup):
        set_state(silo, step=step)
        with refused("gate.order"):
            silo.answer(replace(parties.last(due.name), round=1))
        for kind in (*script.prepare, script.update, *filter(None, [script.open])):
            with refused("gate.order"):
                silo.answer(parties.last(kind.name))


@pytest.mark.parametrize("name", ["lattice", "paillier", "masked uniform", "plain sampled"])
def test_the_set_up_of_a_session_is_not_gone_on_with_by_another_process(name):
    """In a whole folder that was set back, silo 0 would offer its tables twice: every N[u] was read."""
    sent, copies = [], []
    with Parties.watch("silo0", sent, copies):
        parties = Parties(*RUNS[name])
    kinds = [request.kind for request in sent]
    for place in range(kinds.index("hello") + 1, len(kinds)):
        with refused("gate.restarted"):
            parties.restored("silo0", copies[place]).answer(sent[place])


def test_a_box_is_sealed_under_another_nonce_every_time():
    """Under one nonce the difference of two boxes was that of two samples."""
    parties = Parties(HIDDEN["lattice"], HALF)
    session = side_of(parties.silos["silo0"])._member.session("run")
    one, other = (session.encrypt("silo1", b"the same", "use") for _ in range(2))
    assert one[12:] != other[12:]
    peer = side_of(parties.silos["silo1"])._member.session("run")
    assert peer.decrypt("silo0", one, "use") == peer.decrypt("silo0", other, "use") == b"the same"


@pytest.mark.parametrize("name", ["lattice sampled", "paillier hidden"])
def test_noise_and_seal_depend_on_all_that_a_silo_was_asked(name):
    """Sample and weights are in ciphertexts and boxes there, and no array says them."""
    parties = Parties(*RUNS[name])
    parties.run_round(0)
    silo, asked = parties.silos["silo1"], parties.last("update", "silo1")
    blob = "ciphertexts" if "ciphertexts" in asked.blobs else "sampled"
    content = asked.blobs[blob]
    other = replace(asked, blobs={**asked.blobs, blob: content[:-1] + bytes([content[-1] ^ 1])})
    draws = [
        silo._derive_round_randomness(request, 0).stream("noise").random()
        for request in (asked, asked, other)
    ]
    assert draws[0] == draws[1] != draws[2]
    before = copy_entries(parties.stores["silo1"])
    opening = parties.last("open", "silo1")
    seals = []
    for update in ("0" * 64, asked.digest()):
        set_state(silo, update=update)
        seals.append(side_of(silo).open(opening).blobs["seal"])
    set_back(parties.stores["silo1"], before)
    assert seals[0] != seals[1]


def test_a_greeting_that_nests_brackets_is_one_refusal():
    parties = Parties(Masked(), AVG)
    fresh = parties.restored("silo0")
    for kind in ("setup", "hello"):
        fresh.answer(replace(parties.last(kind)))
    roster = parties.last("roster")
    with refused("message.malformed"):
        fresh.answer(replace(roster, blobs={**roster.blobs, "silo1": b"[" * 3000}))


def test_states_survive_a_restart():
    parties = Parties(Masked(min_silos=3), AVG, silos=4)
    parties.run_round(0)
    state = parties.silos["silo0"].gate.state
    assert copy.deepcopy(parties.started("silo0")).gate.state == state
    assert (state.round, state.attempt, state.opened) == (0, 0, True)


@pytest.mark.parametrize(
    ("aggregator", "method"),
    [(Masked(min_silos=3), AVG), (Select(min_silos=3), PRIMARY), (replace(LATTICE, min_silos=3), RECORDS)],
    ids=["masked", "select", "lattice"],
)
def test_a_store_from_before_the_answer_draws_no_second_noise(aggregator, method):
    """The ledger has the charge. What another attempt would draw is a second release, and only one is charged."""
    parties = Parties(aggregator, method, silos=4, rounds=10)
    copies, charge = [], Gate.charge

    def watched(gate, request):
        charge(gate, request)
        if gate is parties.silos["silo1"].gate:
            copies.append(parties.backup("silo1"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gate, "charge", watched)
        parties.run_round(0)
    asked, store = parties.last("update", "silo1"), parties.store_of("silo1")
    drawn = store.round(0).get("noisy/0")
    before = next(copy for copy in copies if not any("noisy" in name for name in copy.entries))
    with refused("gate.rollback_detected"):  # beside the newest ledger, which lists the answer
        set_back(parties.stores["silo1"], before.entries)
        parties.started("silo1")
    silo = parties.restored("silo1", before)
    roster = ["silo0", "silo1", "silo2"]
    with refused("gate.charged"):
        silo.answer(replace(asked, attempt=1, fields={**asked.fields, "roster": roster}))
    silo.answer(asked)
    store = parties.store_of("silo1")
    assert store.round(0).get("noisy/0") == drawn, "the same request has the same noise"
    assert len(silo.gate.ledger.history) == 1


@pytest.mark.parametrize(
    ("aggregator", "method"),
    [(Masked(), AVG), (Select(), PRIMARY), (LATTICE, RECORDS)],
    ids=["masked", "select", "lattice"],
)
def test_a_store_from_after_a_refusal_answers_nothing_that_was_not_charged(aggregator, method):
    """A server may have a request refused, for example by its session, and wait for a backup to be made."""
    parties = Parties(aggregator, method, rounds=10)
    parties.transport.lost = lambda name, request: (name, request.kind) == ("silo1", "update")
    with pytest.raises(SilodpError, match="silos left"):
        parties.run_round(0)
    silo, asked = parties.silos["silo1"], parties.last("update", "silo1")
    with refused("session.unknown"):
        silo.answer(replace(asked, fields={**asked.fields, "session": "00" * 32}))
    assert len(silo.gate.ledger.history) == 1
    with refused("gate.charged"):
        silo.answer(asked)
