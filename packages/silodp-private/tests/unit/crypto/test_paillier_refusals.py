import math

import numpy as np
import pytest

from silodp.errors import SilodpError
from silodp_private.paillier.parameters import PaillierParameters
from silodp_private.paillier.weighting import PaillierServer, PaillierSilo
from support.toys import Parties

SMALL = {"silos": 2, "users": 3, "dimension": 4, "count_cap": 2, "row_bound": 100, "noise_std": 1.0}
TEST_KEY = {"key_bits": 512, "insecure_for_tests": True}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"key_bits": 2048, "insecure_for_tests": False}, "at least 3072"),
        ({"key_bits": 520}, "multiple of 16"),
        ({"silos": 1}, "silos is 1: it must be at least 2"),
        ({"count_cap": 0}, "count_cap is 0"),
        ({"row_bound": 0}, "row_bound is 0"),
        ({"noise_std": -1.0}, "noise_std is -1"),
        ({"noise_std": math.nan}, "noise_std is nan"),
        ({"row_bound": 1 << 61}, "coarser grid"),
    ],
)
def test_constants_out_of_range_are_refused(change, problem):
    with pytest.raises(SilodpError, match=problem):
        PaillierParameters(**{**SMALL, **TEST_KEY, **change})


@pytest.mark.parametrize("cap", [180, 600, 10_000_000])
def test_a_scale_that_does_not_fit_says_what_to_raise(cap):
    with pytest.raises(SilodpError, match=r"lower count_cap, or raise key_bits to \d+") as refused:
        PaillierParameters(**{**SMALL, **TEST_KEY, "count_cap": cap})
    if cap < 1000:
        bits = int(str(refused.value).rsplit(" ", 1)[1])
        assert bits < 3.1 * cap + 200
        assert PaillierParameters(**{**SMALL, **TEST_KEY, "count_cap": cap, "key_bits": bits}).slots == 1


def test_the_sensitivity_counts_the_uniform_part():
    assert (
        PaillierParameters(**{**SMALL, "row_bound": 1 << 12, "dimension": 10**6}).sensitivity
        == (1 << 12) + 1000
    )


def test_one_session_sends_its_counts_once():
    parties = Parties(np.ones((2, 1), np.int64), dimension=1)
    with pytest.raises(SilodpError, match="counts were sent before"):
        parties.silos[0].blind_counts([5])
    with pytest.raises(SilodpError, match="were received before"):
        parties.server.receive_counts(parties.blinded)


def a_silo(counts, index=0, **change) -> PaillierSilo:
    server = PaillierServer(PaillierParameters(**SMALL, **TEST_KEY))
    return PaillierSilo(
        server.parameters,
        index,
        counts,
        **({"public_key": server.public_key(), "secret": bytes(32), "session": b"s"} | change),
    )


@pytest.mark.parametrize("counts", [[0, 1, 3], [0, -1, 2], [2**62, 0, 0]])
def test_counts_beyond_the_cap_are_refused_by_the_silo(counts):
    with pytest.raises(SilodpError, match=r"outside 0\.\.2: raise count_cap or drop records"):
        a_silo(np.array(counts))


@pytest.mark.parametrize(
    ("counts", "change", "problem"),
    [
        (np.ones(4, np.int64), {}, "give an array of shape"),
        (np.ones(3), {}, "give an array of shape"),
        (np.ones(3, np.int64), {"index": 2}, "not in a roster"),
        (np.ones(3, np.int64), {"public_key": bytes(64)}, "0 bits, 512 were agreed"),
    ],
)
def test_a_silo_refuses_what_does_not_fit_the_session(counts, change, problem):
    with pytest.raises(SilodpError, match=problem):
        a_silo(counts, **change)


def test_a_silo_refuses_what_does_not_fit_the_round():
    parties = Parties(np.ones((2, 2), np.int64), dimension=3, row_bound=100, noise_std=10.0)
    silo, bound = parties.silos[0], parties.parameters.noise_bound
    request = parties.server.encrypt_inverses(np.ones(2, bool))
    zero, masks = np.zeros(3, np.int64), [1] * parties.parameters.ciphertexts
    longest = np.array([[100, 0, 0]])

    def refused(problem, chunks=(), noise=zero, masks=masks, inverses=request):
        with pytest.raises(SilodpError, match=problem):
            silo.answer(inverses, chunks, noise, masks)

    refused("norm is above row_bound 100", [(np.array([0]), np.array([[100, 1, 0]]))])
    refused("norm is above row_bound 100", [(np.array([0]), np.array([[-(2**63), 0, 0]]))])
    refused(
        "norm is above row_bound 100", [(np.array([0]), np.array([[2**32, 0, 0]]))]
    )  # its square is 0 mod 2^64
    refused("second row", [(np.array([0, 0]), np.repeat(longest, 2, 0))])
    refused("second row", [(np.array([0]), longest)] * 2)
    refused("unknown", [(np.array([2]), longest)])
    refused("unknown", [(np.array([-1]), longest)])
    refused("int64 of shape", [(np.array([0]), longest.astype(float))])
    refused("int64 of shape", [(np.array([0]), longest[:, :2])])
    refused("give 3 int64", noise=np.zeros(3))
    refused("give 3 int64", noise=np.zeros(2, np.int64))
    refused("raise noise_std", noise=np.array([0, 0, bound + 1]))
    refused("raise noise_std", noise=np.array([-(2**63), 0, 0]))
    refused("draw one mod n", masks=[])
    refused("draw one mod n", masks=[parties.n])
    refused("draw one mod n", masks=[-1])
    refused(r"the server \(inverses\) sent 255 bytes where 2 numbers of 128", inverses=request[1:])
    refused("no Paillier ciphertext", inverses=bytes(256))
    # a refusal leaves nothing used up
    assert len(silo.answer(request, [(np.array([0]), longest)], np.array([0, 0, bound]), masks)) == 128
    refused("masks were used before")


def test_the_server_refuses_what_does_not_fit():
    parties = Parties(np.ones((3, 2), np.int64), dimension=40)
    fresh = PaillierServer(parties.parameters)
    with pytest.raises(SilodpError, match="run its setup"):
        fresh.encrypt_inverses(np.ones(2, bool))
    with pytest.raises(SilodpError, match="2 of 3 silos sent counts"):
        fresh.receive_counts(parties.blinded[:2])
    with pytest.raises(SilodpError, match=r"silo 1 \(counts\) sent 127 bytes where 2 numbers of 64"):
        fresh.receive_counts([bytes(128), bytes(127), bytes(128)])
    with pytest.raises(SilodpError, match=r"silo 2 \(counts\) sent a number beyond"):
        fresh.receive_counts([bytes(128), bytes(128), b"\xff" * 128])
    with pytest.raises(SilodpError, match="one entry for each user"):
        parties.server.encrypt_inverses(np.ones(3, bool))
    zero = np.zeros((3, 2, 40), np.int64)
    answers = parties.answers(zero, zero[:, 0])
    with pytest.raises(SilodpError, match="0 answers of 3 silos"):
        parties.server.compute_scaled_sum([])
    with pytest.raises(SilodpError, match="4 answers of 3 silos"):
        parties.server.compute_scaled_sum([*answers, answers[0]])
    with pytest.raises(SilodpError, match=r"answer 1 sent \d+ bytes"):
        parties.server.compute_scaled_sum([answers[0], answers[1][1:]])
    with pytest.raises(SilodpError, match="masks do not add to 0"):
        parties.server.compute_scaled_sum(answers[:2])
    assert len(parties.server.compute_scaled_sum(answers)) == 40


def test_a_sum_whose_masks_did_not_cancel_is_noticed_by_64_spare_bits():
    for cap in range(1, 120):
        p = PaillierParameters(**{**SMALL, **TEST_KEY, "count_cap": cap, "dimension": 1000})
        assert p.slots * p.slot_bits + 64 < 512
