"""An attack that saw nothing does not say "consistent".

Attacked is the attack: canaries that never arrive, models that do not move, scores that are all alike or have the wrong
sign. A verdict of "consistent" would then reassure about code that nobody looked at.
"""

from __future__ import annotations

import pytest

from silodp.methods import UldpAvg
from silodp_audit.attack.audit_run import attack_method
from support.attacked import AVG, attack
from support.faults import BLINDED


@pytest.mark.parametrize("name", BLINDED)
def test_a_blind_attack_reassures_nobody(name: str) -> None:
    with BLINDED[name].inject():
        result = attack(BLINDED[name].setting, 200)
    assert result.verdict == "noise"  # the shift of members is not what was charged


def test_with_next_to_no_noise_nothing_could_be_found() -> None:
    """Every attacker may be right nearly always: no number of right guesses contradicts that."""
    method = UldpAvg(**AVG | {"noise_multiplier": 0.2})
    result = attack_method(method, rounds=4, canaries=200, adversaries=("released",), seed=1)
    [row] = result.rows
    assert row.verdict == "not seen"
