"""Attacks of one silo that departs from the protocol, while the server and the other silos follow it.

Attacked are the model, the weights, the ε of the others, and the run itself. Each test is a row of the table of
docs/malicious_silo.md, and asserts how large the harm is, or with which code it is refused. The silo misbehaves where
its noise is drawn, or where its answer leaves it: whoever has its key can sign any answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from silodp.accounting import events
from silodp.aggregators import Aggregator, Plain, RunSpec, SiloContext, limits
from silodp.aggregators.limits import find_longest_sum
from silodp.aggregators.masked import Masked
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.mechanisms import clipping, quantization
from silodp.methods import FederationSize, Method
from silodp.runtime.silo import Silo
from silodp.runtime.train import train
from silodp.wire.messages import Message
from silodp_analytics.evaluation.methods import EvaluationSums
from silodp_analytics.statistics.count import ClassCount
from silodp_analytics.statistics.method import Statistics
from silodp_private import lattice, select
from silodp_private.paillier import aggregator as paillier
from silodp_private.paillier.weighting import PaillierSilo
from support.masked import AVG
from support.oracles import logistic_task, small_federation
from support.private import LATTICE, PAILLIER, PRIMARY, RECORDS, SELECT, Parties, spec
from support.refusals import refused

BAD = "silo1"
RUNS = {
    "plain": (Plain(), AVG),
    "masked": (Masked(), AVG),
    "select": (SELECT, PRIMARY),
    "lattice": (LATTICE, RECORDS),
    "paillier": (PAILLIER, RECORDS),
}
EVERY = pytest.mark.parametrize("name", RUNS)
HIDDEN = pytest.mark.parametrize("name", [name for name in RUNS if name != "plain"])

Change = Callable[[np.ndarray], np.ndarray]
"""The silo's noise, in clips (d,) -> what it adds in its place."""
EPSILON_HONEST, EPSILON_LOST = 0.389, 1.130
"""ε of 3 rounds at q = .3, noise for 3 of 4 silos; and where a silo is lost in each of them."""


@contextmanager
def noise_of(silo: str, change: Change, share: float) -> Iterator[None]:
    """One silo ("": all) adds something else to its clipped sum than its noise, of standard deviation `share` clips."""
    acting, answer = [""], Silo.answer

    def act(self: Silo, request: Message) -> Message:
        acting[0] = self.name
        return answer(self, request)

    def gaussian(size: int, std: float, stream: np.random.Generator) -> torch.Tensor:
        drawn = honest_gaussian(size, std, stream)
        if silo not in ("", acting[0]):
            return drawn
        return torch.from_numpy(change(drawn.numpy() * share / std) * std / share)

    def skellam(size: int, variance: float, stream: np.random.Generator) -> np.ndarray:
        drawn, steps = honest_skellam(size, variance, stream), math.sqrt(variance) / share
        return np.rint(change(drawn / steps) * steps).astype(np.int64) if silo in ("", acting[0]) else drawn

    def multiply(self: PaillierSilo, *asked: Any) -> bytes:
        made, p = honest_multiply(self, *asked), self.parameters
        if not beyond:
            return made
        public, extra = self.public, [int(x) * p.scale for x in beyond.pop()]
        values = zip(public.ciphertexts_from_bytes(made, p.ciphertexts, silo), p.pack(extra), strict=True)
        return public.ciphertexts_to_bytes([c * (1 + m * public.n) % public.n_squared for c, m in values])

    def skellam_of_paillier(size: int, variance: float, stream: np.random.Generator) -> np.ndarray:
        """The program of a silo refuses so much noise; this silo multiplies the rest into its ciphertexts."""
        drawn, most = skellam(size, variance, stream), math.ceil(12 * math.sqrt(variance))
        if np.abs(drawn).max() > most:
            beyond.append(drawn - drawn.clip(-most, most))
        return drawn.clip(-most, most)

    beyond: list[np.ndarray] = []
    honest_gaussian, honest_skellam = clipping.draw_gaussian, quantization.draw_skellam
    honest_multiply = PaillierSilo.answer
    with ExitStack() as stack:
        stack.enter_context(patch.object(Silo, "answer", act))
        stack.enter_context(patch.object(clipping, "draw_gaussian", gaussian))
        stack.enter_context(patch.object(paillier, "draw_skellam", skellam_of_paillier))
        stack.enter_context(patch.object(PaillierSilo, "answer", multiply))
        for module in (quantization, select, lattice):
            stack.enter_context(patch.object(module, "draw_skellam", skellam))
        yield


@contextmanager
def answer_of(silo: str, kind: str, change: Callable[[Message], Message]) -> Iterator[None]:
    """One silo sends other answers than it made and stored."""
    answer = Silo.answer

    def act(self: Silo, request: Message) -> Message:
        made = answer(self, request)
        return change(made) if (self.name, made.kind) == (silo, kind) else made

    with patch.object(Silo, "answer", act):
        yield


@contextmanager
def without_limit() -> Iterator[None]:
    """The server takes any sum."""
    with patch.object(limits, "check_sum", lambda *sum_: None):
        yield


def share_of(parties: Parties) -> float:
    """The standard deviation of a silo's noise, in clips."""
    bounds = parties.spec.bounds
    return bounds.noise_multiplier * bounds.sensitivity / bounds.clip


def limit_of(parties: Parties) -> float:
    """The longest sum that the server takes, or share under `plain`, in clips."""
    is_share = parties.spec.aggregator.name == "plain"
    longest = find_longest_sum(parties.spec, 1 if is_share else 3, is_share)
    return longest / parties.spec.bounds.clip


def along(length: float) -> Change:
    """A vector of this length, in clips, on top of the noise."""
    return lambda noise: noise + length / math.sqrt(len(noise))


# --- the sum ---


@pytest.mark.parametrize("factor", [1.5, 10])
@EVERY
def test_a_sum_that_no_honest_silo_sends_is_refused_and_charged(name, factor):
    parties = Parties(*RUNS[name])
    # What leaves its place in a plaintext of `paillier` is refused before.
    code = "crypto.decryption" if name == "paillier" and factor == 10 else "run.long_sum"
    wrong = noise_of(BAD, along(factor * limit_of(parties)), share_of(parties))
    with wrong, refused(code) as caught:
        parties.run_round(0)
    assert parties.server.charged(0, 0)
    # Only where the server sees shares it knows whose it is.
    assert (BAD in str(caught.value)) == (name == "plain")
    assert "silo0" not in str(caught.value)


@EVERY
def test_without_the_limit_one_silo_moves_the_sum_as_far_as_it_likes(name):
    parties = Parties(*RUNS[name])
    # Plaintexts hold little more than honest sums.
    length = limit_of(parties) * (1.5 if name in ("lattice", "paillier") else 10)
    with noise_of(BAD, along(length), share_of(parties)), without_limit():
        total = parties.run_round(0) / parties.spec.bounds.clip
    assert total.norm() > 0.9 * length


@EVERY
def test_within_the_limit_one_silo_moves_the_sum_by_all_that_rows_and_noise_could(name):
    """What is left: as far as everybody's rows and all noise, or a silo's own where the server sees its share."""
    parties = Parties(*RUNS[name])
    # It cannot know the noise of the others, whose length is below 25 clips but by chance of less than 1e-5.
    length = limit_of(parties) * 0.999 - (0 if name == "plain" else 25)
    rows, all_noise = (4, 5 / math.sqrt(3)) if name == "plain" else (12, 5)
    assert length > rows + all_noise * (9.3 + math.sqrt(5)) - 25
    with noise_of(BAD, lambda noise: noise * 0 + (length - 4) / math.sqrt(5), share_of(parties)):
        total = parties.run_round(0) / parties.spec.bounds.clip
    # Its own rows, and the others', are at most 12 clips; their noise in one direction is below 6 deviations.
    assert total.sum() / math.sqrt(5) == pytest.approx(length, abs=4 + 12 + 6 * 5 * math.sqrt(2 / 3))


@HIDDEN
def test_numbers_that_wrap_around_are_sums_like_any_other(name):
    """2^20 clips leave the ring, and come back somewhere in it: what is decoded is refused, or within the limit."""
    parties = Parties(*RUNS[name])
    wrong = noise_of(BAD, lambda noise: noise + 2.0**20 / 3, share_of(parties))
    with wrong, refused("run.long_sum", "crypto.decryption"):
        parties.run_round(0)
    assert parties.server.charged(0, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_numbers_that_are_not_finite_are_refused_and_named(value):
    def spoil(answer: Message) -> Message:
        share = answer.arrays["share"].copy()
        share[2] = value
        return answer.answer(share=share)

    parties = Parties(Plain(), AVG)
    with answer_of(BAD, "update", spoil), refused("run.long_sum") as caught:
        parties.run_round(0)
    assert BAD in str(caught.value)


@EVERY
def test_an_answer_of_another_type_or_length_is_refused_before_it_is_added(name):
    def cut(answer: Message) -> Message:
        return replace(
            answer,
            arrays={key: value[:-1] for key, value in answer.arrays.items()},
            blobs={key: value[:-1] for key, value in answer.blobs.items()},
        )

    def widen(answer: Message) -> Message:
        return replace(
            answer,
            arrays={key: value.astype(np.float32) for key, value in answer.arrays.items()},
            blobs={key: value + b"\xff" for key, value in answer.blobs.items()},
        )

    for change in (cut, widen):
        parties = Parties(*RUNS[name])
        with answer_of(BAD, "update", change), refused("message.malformed") as caught:
            parties.run_round(0)
        assert BAD in str(caught.value)


def test_residues_that_are_no_ciphertexts_are_refused_and_named():
    parties = Parties(*RUNS["paillier"])

    def saturate(answer: Message) -> Message:
        return replace(answer, blobs={key: b"\xff" * len(value) for key, value in answer.blobs.items()})

    with answer_of(BAD, "update", saturate), refused("message.malformed", "crypto.ciphertext") as caught:
        parties.run_round(0)
    assert BAD in str(caught.value) or "answer" in str(caught.value)


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_after_a_refusal_the_model_is_as_it_was_and_a_resumed_run_goes_on(aggregator, tmp_path):
    federation, task = small_federation(), logistic_task()

    def go(resume: bool, rounds: int = 2):
        out = tmp_path / "run"
        return train(
            federation, task, AVG, rounds=rounds, seed=1, aggregator=aggregator, out=out, resume=resume
        )

    def lengthen(answer: Message) -> Message:
        name = "share" if aggregator == "plain" else "masked"
        if answer.round == 0:
            return answer
        array = answer.arrays[name]
        return answer.answer(**{name: array + array.dtype.type(10**9)})

    whole = train(federation, task, AVG, rounds=2, seed=1, aggregator=aggregator)
    with answer_of(BAD, "update", lengthen), refused("run.long_sum"):
        go(resume=False)
    # The same silo, which now sends what it had stored: the round is repeated, and charged once.
    resumed = go(resume=True)
    assert torch.equal(resumed.params, whole.params)
    assert resumed.epsilon == whole.epsilon


# --- noise ---


@pytest.mark.parametrize("name", ["plain", "masked"])
def test_a_silo_without_noise_takes_one_share_of_it_away(name):
    parties = Parties(*RUNS[name], federation=small_federation(features=300))
    with noise_of(BAD, lambda noise: noise * 0, share_of(parties)):
        total = parties.run_round(0) / parties.spec.bounds.clip
    # Persons move the sum by at most 12 clips in all 301 coordinates together.
    assert total.std() == pytest.approx(5 * math.sqrt(2 / 3), rel=0.2)


@pytest.mark.parametrize("q", [1.0, 0.3])
@pytest.mark.parametrize("aggregator", [Plain(), Masked()], ids=lambda one: one.name)
def test_the_epsilon_against_a_silo_covers_uniform_weights_without_its_noise(aggregator, q):
    """The records of the other S − 1 silos, under their noise: whoever else sees it all knows no more than that silo.

    They move the sum by (S−1)/S of the clip under S − 1 shares of σC/√S, and each of their shares by 1/S.
    """
    parties = Parties(aggregator, replace(AVG, user_sampling=q), silos=5)
    silos, sigma = 5, 5.0
    of_sum = sigma / math.sqrt(silos) * math.sqrt(silos - 1) / ((silos - 1) / silos)
    of_shares = sigma / math.sqrt(silos) / (math.sqrt(silos - 1) / silos)
    assert of_sum == pytest.approx(of_shares)
    known = parties.spec.method.dp_event(parties.spec.views()["silo"])
    gaussian = known if q == 1 else known.event
    assert gaussian == events.Gaussian(pytest.approx(of_sum))
    assert q == 1 or isinstance(known, events.RevealedSample)
    # What is printed against the others costs more than a silo's noise can take away.
    for adversary in ("released", "server"):
        printed = parties.spec.method.dp_event(parties.spec.views()[adversary])
        assert (printed if q == 1 else printed.event).noise_multiplier < of_sum


@pytest.mark.parametrize("name", ["select", "lattice", "paillier"])
def test_the_epsilon_against_a_silo_covers_private_weights_without_its_noise_where_all_take_part(name):
    """One silo may carry a whole clip, under S − 1 shares; against a silo two clips are charged, under as many."""
    aggregator, method = RUNS[name]
    parties = Parties(aggregator, method)
    without = 5 * math.sqrt(2 / 3)
    event = parties.spec.method.dp_event(parties.spec.views()["silo"])
    assert event.noise_multiplier == pytest.approx(without / 2)
    # Not covered by what is printed against the server: that is for all three shares.
    assert parties.spec.method.dp_event(parties.spec.views()["server"]).noise_multiplier > without


# --- weights ---


def test_a_silo_that_claims_too_many_records_leaves_others_no_weight_and_nobody_more_than_one():
    def lie(answer: Message) -> Message:
        return answer.answer(counts=answer.arrays["counts"] * 10**15)

    with answer_of(BAD, "counts", lie):
        parties = Parties(Plain(), RECORDS)
    weights = {name: parties.last("setup", name).arrays["weights"] for name in parties.names}
    claimed = weights[BAD] > 0
    assert 0 < claimed.sum() <= 12
    assert max(weights[name][claimed].max() for name in ("silo0", "silo2")) < 1e-12
    assert sum(weights.values()).max() <= 1


@pytest.mark.parametrize("aggregator", [Plain(), Masked()], ids=lambda one: one.name)
def test_negative_counts_in_clear_are_refused(aggregator):
    def lie(answer: Message) -> Message:
        return answer.answer(counts=answer.arrays["counts"] - 2)

    with answer_of(BAD, "counts", lie), refused("argument.value"):
        Parties(aggregator, RECORDS)


@pytest.mark.parametrize(
    ("aggregator", "count"), [(LATTICE, -5), (PAILLIER, -6)], ids=["lattice", "paillier"]
)
def test_a_count_below_zero_gives_a_person_of_other_silos_several_clips_unnoticed(aggregator, count):
    """Of 3 records in each honest silo the silo leaves N = 1 (with the dummy record of `paillier`): weights of 3."""
    honest, lying = (measure_one_person(aggregator, claimed) for claimed in (0, count))
    assert honest == pytest.approx(1 if aggregator is LATTICE else 6 / 7, rel=0.01)
    assert lying == pytest.approx(6, rel=0.01)
    # As many clips as honest silos have records of the person: no limit of the sum notices it.
    assert lying < limit_of(Parties(aggregator, RECORDS))


def test_a_silo_that_claims_a_person_of_others_as_its_own_lets_them_count_nowhere():
    """Under `select` the largest class of counts wins; the silo that claims it has no row to send."""
    assert measure_one_person(SELECT, 0, PRIMARY) == pytest.approx(1, rel=0.01)
    assert measure_one_person(SELECT, 40, PRIMARY) == pytest.approx(0, abs=0.01)


def measure_one_person(aggregator: Aggregator, claimed: int, method: Method = RECORDS) -> float:
    """How many clips a person with 3 records in each of two silos moves the sum; a third claims a count for them."""
    x, y, user = np.full((3, 4), 50, np.float32), np.zeros(3, np.int64), np.zeros(3, np.int64)
    none = SiloData(BAD, x[:0], y[:0], user[:0])
    federation = Federation(
        (SiloData("silo0", x, y, user), none, SiloData("silo2", x, y, user)), 12, None, classes=2
    )

    def add_masked(answer: Message) -> Message:
        masked = answer.arrays["masked"].copy()
        modulus = aggregator.constants(spec(RECORDS)).parameters(spec(RECORDS), bytes(32)).modulus
        masked[0] = (int(masked[0]) + claimed) % modulus
        return answer.answer(masked=masked)

    def add_blinded(self: PaillierSilo, masks: list[int]) -> bytes:
        lie = claimed * int(self._blinding[0]) * (self._index == 1)
        return blind(self, [int((masks[0] + lie) % self.public.n), *masks[1:]])

    def claim(self: Any, aggregator: Aggregator, spec: RunSpec, context: SiloContext) -> None:
        counts = context.counts.copy()
        counts[0] += claimed * (context.identity.name == BAD)
        make(self, aggregator, spec, replace(context, counts=counts))

    blind, make = PaillierSilo.blind_counts, select._Silo.__init__
    with ExitStack() as stack:
        stack.enter_context(answer_of(BAD, "masked counts", add_masked))
        stack.enter_context(patch.object(PaillierSilo, "blind_counts", add_blinded))
        stack.enter_context(patch.object(select._Silo, "__init__", claim))
        parties = Parties(aggregator, method, federation=federation)
    with noise_of("", lambda noise: noise * 0, share_of(parties)):
        return float(parties.run_round(0).norm()) / parties.spec.bounds.clip


# --- others' ε, and the run ---


@pytest.mark.parametrize("rounds", [3])
def test_a_silo_that_drops_out_while_seals_open_doubles_what_others_are_charged(rounds):
    """Every round is released twice, the second time without it and without amplification; it is back in the next."""
    honest, lost = (
        Parties(Masked(min_silos=3), replace(AVG, user_sampling=0.3), silos=4, rounds=rounds)
        for _ in range(2)
    )
    lost.transport.lost = lambda name, request: (name, request.kind) == (BAD, "open")
    for round_ in range(rounds):
        honest.run_round(round_)
        lost.run_round(round_)
    ledgers = [parties.server.ledger for parties in (honest, lost)]
    assert [sum(ledger.charged(r, 1) for r in range(rounds)) for ledger in ledgers] == [0, rounds]
    spent = [ledger.epsilon("released") for ledger in ledgers]
    assert spent[1] > 1.5 * spent[0]
    assert spent == pytest.approx([EPSILON_HONEST, EPSILON_LOST], rel=1e-2)
    # Honest silos have charged for it, too: their own limits hold.
    of_silo = lost.silos["silo0"].gate.ledger.epsilon("released")
    assert of_silo >= spent[1]


@HIDDEN
def test_a_silo_that_drops_out_where_all_must_answer_stops_the_run(name):
    parties = Parties(*RUNS[name])
    parties.transport.lost = lambda asked, request: (asked, request.kind) == (BAD, "open")
    with refused("run.too_few_silos"):
        parties.run_round(0)


@EVERY
def test_an_answer_of_an_earlier_round_is_refused_and_named(name):
    parties, kept = Parties(*RUNS[name]), []

    def replay(answer: Message) -> Message:
        kept.append(answer)
        return kept[0]

    with answer_of(BAD, "update", replay):
        parties.run_round(0)
        with refused("message.unexpected") as caught:
            parties.run_round(1)
    assert BAD in str(caught.value)


@pytest.mark.parametrize("kind", ["hello", "roster"])
@HIDDEN
def test_a_silo_that_says_something_else_to_others_stops_the_set_up(name, kind):
    """The server passes greetings, parts of the secret and confirmations on: each is bound to what was signed."""

    def lie(answer: Message) -> Message:
        entry, blob = next(iter(answer.blobs.items()))
        return replace(answer, blobs={**answer.blobs, entry: blob[:-1] + bytes([blob[-1] ^ 1])})

    with answer_of(BAD, kind, lie), pytest.raises(SilodpError) as caught:
        Parties(*RUNS[name])
    assert BAD in str(caught.value)


def test_a_silo_that_ends_in_another_session_stops_the_set_up():
    def lie(answer: Message) -> Message:
        return replace(answer, fields={"session": "0" * 64})

    with answer_of(BAD, "confirm", lie), refused("session.altered"):
        Parties(*RUNS["masked"])


def test_an_evaluation_takes_any_finite_counts_and_statistics_those_of_all_persons():
    """How many records are held out is not public; the room for a million persons in a ring is no limit."""
    size = FederationSize(3, 12)
    assert EvaluationSums(noise_multiplier=1.0).longest_sums(size, None) == (math.inf, math.inf)
    method = Statistics(
        noise_multiplier=1.0, tables=(ClassCount("class", classes=("a", "b")),), records=2, persons=0.0
    )
    clip = method.bounds(size).clip
    assert method.bounds(size).total > 10**6 * clip
    assert method.longest_sums(size, None) == pytest.approx((4 * clip, 12 * clip))
