"""The attack finds every injected fault, and nothing in right code.

Attacked is the program's claim that it does what its ε says. Each fault (`support.faults`) leaves ε as it is and makes
more leak, or makes the noise another one than is stated. If one of these tests fails, an error of this kind could be
released without `silodp attack` seeing it. The canary runs have seeds, so their numbers are always the same.
"""

from __future__ import annotations

import pytest

from silodp_audit.attack.audit_run import AttackResult
from support.attacked import SETTINGS, attack
from support.faults import FAULTS

CAUGHT: dict[str, tuple[set[str], set[str]]] = {
    "half of the noise": ({"released", "server", "silo"}, {"noise of silo 0"}),
    "noise times .9": (set(), {"noise of silo 0"}),
    "σ/S in place of σ/√S": ({"released", "server", "silo"}, {"noise of silo 0"}),
    "1/√S forgotten": (set(), {"noise of silo 0"}),
    "clipped after weighting": ({"released", "server", "silo"}, {"shift of members"}),
    "weight 1 in every silo": ({"released", "server", "silo"}, {"shift of members"}),
    "weights add to 1.5": ({"released"}, {"shift of members"}),
    "a silo without noise": ({"server"}, {"noise of silo 0"}),
    "no clipping": ({"released", "server", "silo"}, {"shift of members"}),
    "clip of the largest coordinate": (set(), {"shift of members, dense"}),
    "a coin per silo": (set(), {"shift of members not in the sample"}),
    "samples with 2q": ({"released", "server"}, {"shift of members not in the sample"}),
    "a coin in every round": (set(), {"in one round of each allocation"}),
    "the same round of every allocation": (set(), {"sampled in two rounds"}),
    "one allocation charged": ({"released", "silo"}, set()),
    "every second round not charged": ({"released"}, {"charged rounds"}),
    "the same noise in every round": (set(), {"correlation between rounds"}),
    "the same noise in every silo": (set(), {"correlation between silos"}),
    "half of the Skellam variance": ({"released", "server", "silo"}, {"noise of the sum"}),
    "k records in every silo": ({"server"}, set()),
    "noise of one step": ({"server"}, {"noise of silo 0"}),
    "the noise of Theorem 1": (set(), {"noise of silo 0"}),
    "one person under two ids": ({"released"}, {"shift of members"}),
    "two ids in one silo": ({"released"}, {"shift of members"}),
}
"""By fault: against whom more leaks than was charged, and which tests of noise, shift and samples fail."""
FAST = {
    "half of the noise",
    "1/√S forgotten",
    "weights add to 1.5",
    "a silo without noise",
    "every second round not charged",
}
EVERY = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CAUGHT]


def find_failures(result: AttackResult) -> tuple[set[str], set[str]]:
    return (
        {row.adversary for row in result.rows if row.verdict == "violation"},
        {test.test for test in result.noise if not test.passed},
    )


@pytest.mark.parametrize("name", EVERY)
def test_a_fault_is_caught(name: str) -> None:
    leaks, tests = CAUGHT[name]
    with FAULTS[name].inject():
        result = attack(FAULTS[name].setting, 300 if name in FAST else 1000)
    violated, failed = find_failures(result)
    assert leaks <= violated
    assert tests <= failed
    assert result.verdict == ("violation" if violated else "noise")
    # What leaks no more than was charged is no violation, however wrong it is.
    if name in ("1/√S forgotten", "the same noise in every round", "a coin per silo"):
        assert violated == set()


@pytest.mark.parametrize(
    "setting",
    ["uniform", *(pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS if name != "uniform")],
)
def test_right_code_passes(setting: str) -> None:
    result = attack(setting, 300)
    assert find_failures(result) == (set(), set())
    assert result.verdict == "consistent"


def test_every_fault_has_its_place() -> None:
    assert CAUGHT.keys() == FAULTS.keys()
