"""What Opacus states, by its installed package; for others see tests/end_to_end/test_installed_frameworks.py."""

from __future__ import annotations

import math
import warnings

import pytest

from silodp_audit.frameworks import check_framework

CASES = [
    (1.0, 0.01, 1000),
    (1.0, 0.001, 1000),
    (0.5, 0.01, 10),
    (0.5, 0.2, 10),
    (0.3, 0.05, 100),
    (5.0, 0.5, 100),
    (20.0, 0.01, 10),
    (1.0, 0.05, 7),
    (1.0, 1.0, 3),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("noise", "rate", "steps"), CASES)
@pytest.mark.parametrize("name", ["prv", "rdp", "gdp"])
def test_the_stated_number_is_that_of_opacus(name, noise, rate, steps):
    from opacus.accountants import create_accountant

    accountant = create_accountant(mechanism=name)
    accountant.history = [(noise, rate, steps)]
    try:
        theirs = pytest.approx(accountant.get_epsilon(delta=1e-5), rel=1e-6, abs=1e-9)
    except ValueError:  # GDP above 500
        theirs = None
    given = [f"noise_multiplier={noise}", f"sample_rate={rate}", f"steps={steps}", f"accountant={name}"]
    assert check_framework("opacus", given).stated == theirs


@pytest.mark.parametrize("name", ["prv", "rdp", "gdp"])
def test_what_opacus_cannot_compute_is_not_stated(name):
    """Noise so small that numbers overflow, and a δ below the digits of a grid."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = ["noise_multiplier=0.001", "sample_rate=0.5", "steps=1000", f"accountant={name}"]
        stated = check_framework("opacus", given).stated
        assert stated is None or math.isfinite(stated)
        tiny = check_framework(
            "opacus", ["noise_multiplier=1", "sample_rate=0.01", "steps=1000", f"accountant={name}"], 1e-18
        )
        assert tiny.stated is None or tiny.stated > 0
