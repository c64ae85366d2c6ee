"""Claims of others, attacked: the evidence contradicts what does not hold, and leaves alone what holds."""

from __future__ import annotations

import pytest

from support.benchmark_scripts import load_benchmark

attack_others = load_benchmark("attack_others")


@pytest.mark.slow
def test_opacus_holds_with_poisson_samples_and_not_with_batches_in_order() -> None:
    right, wrong = attack_others.attack_opacus(True), attack_others.attack_opacus(False)
    assert not right.evidence.is_violation
    assert right.claimed == pytest.approx(right.proven, rel=0.01)
    # The engine prints one ε for both.
    assert wrong.claimed == right.claimed
    assert wrong.evidence.is_violation
    assert wrong.claimed < wrong.evidence.epsilon_lower < wrong.proven


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attack_naive", "attack_rpdp", "attack_flower"])
def test_other_claims_are_contradicted(name: str) -> None:
    claim = getattr(attack_others, name)()
    assert claim.evidence.is_violation
    assert claim.claimed < claim.evidence.epsilon_lower < claim.proven * 1.01
