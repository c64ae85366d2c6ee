import numpy as np
import pytest
from scipy import stats

from silodp.mechanisms.noise import Randomness, draw_gaussian
from support.oracles import judges_std


def test_a_seeded_stream_repeats_and_purposes_are_independent():
    first, again = Randomness.from_seed(3), Randomness.from_seed(3)
    draws = {
        purpose: first.child("silo", "a").stream(*purpose).random(1000)
        for purpose in [("noise", 0), ("noise", 1), ("noise",), ("batches", 0), ("noise", 0, 0)]
    }
    for purpose, values in draws.items():
        np.testing.assert_array_equal(values, again.child("silo", "a").stream(*purpose).random(1000))
    matrix = np.corrcoef(np.stack(list(draws.values())))
    assert np.abs(matrix - np.eye(len(draws))).max() < 0.2


def test_prefix_and_purpose_cannot_be_confused():
    base = Randomness.from_seed(0)
    assert base.child("ab").stream("c").random() != base.child("a").stream("bc").random()
    assert base.child("1").stream().random() != base.child(1).stream().random()


def test_secret_streams_never_repeat():
    secret = Randomness.secret()
    assert not secret.reproducible
    assert secret.stream("noise", 0).random() != secret.stream("noise", 0).random()
    assert secret.torch("batches").initial_seed() != secret.torch("batches").initial_seed()


@pytest.mark.parametrize("randomness", [Randomness.from_seed(1), Randomness.secret()])
def test_gaussian_noise_has_the_std_asked_for(randomness):
    draws = draw_gaussian(200_000, 2.5, randomness.stream("noise")).numpy()
    assert judges_std(draws, 2.5)  # of so many, to within 0.8 %
    assert stats.kstest(draws / 2.5, "norm").pvalue > 1e-6
    assert np.abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.1
