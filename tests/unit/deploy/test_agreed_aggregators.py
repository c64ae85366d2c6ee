"""Who accepts a consortium is shown what ε assumes of an aggregator that encrypts."""

from __future__ import annotations

from pathlib import Path

import pytest

from silodp_deploy.acceptance import describe_agreement
from silodp_deploy.cli.deploy import format_agreement
from silodp_deploy.consortium import Consortium
from support.commands import CONFIG
from support.consortium import make_parties


def test_who_accepts_reads_what_epsilon_assumes_of_the_server(tmp_path: Path) -> None:
    """Under lattice no ε holds against a server that departs from the protocol: the operator learns it before."""
    aggregator = 'aggregator = "lattice"\n[aggregation]\ncount_cap = 5\nattempts = 10\n'
    config = CONFIG.replace("seed = 1\n", aggregator).replace("clip =", 'weighting = "records"\nclip =')
    consortium = Consortium.load(make_parties(tmp_path, config) / "public")
    lines = format_agreement(describe_agreement(consortium))
    assert any(line.startswith("  assumes     the server is not malicious") for line in lines)


@pytest.mark.parametrize(("bits", "is_told"), [(256, True), (3072, False)])
def test_who_accepts_sees_that_a_key_is_for_tests(bits: int, is_told: bool, tmp_path: Path) -> None:
    """Whoever factors it knows who was sampled, which the ε that is shown does not cover."""
    aggregator = f'aggregator = "paillier"\n[aggregation]\ncount_cap = 5\nkey_bits = {bits}\n'
    aggregator += f"insecure_for_tests = {str(is_told).lower()}\n"
    config = CONFIG.replace("seed = 1\n", aggregator).replace("clip =", 'weighting = "records"\nclip =')
    agreed = describe_agreement(Consortium.load(make_parties(tmp_path, config) / "public"))
    lines = format_agreement(agreed)
    assert f"    key bits: {bits}" in lines
    assert "    count cap: 5" in lines
    assert any(line.startswith("  assumes     FOR TESTS: a modulus of 256 bits") for line in lines) == is_told
