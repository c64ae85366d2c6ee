"""A report believes no guarantee that the run's own ledger contradicts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from silodp.app.audit import LEDGER, audited
from silodp.app.report import write_report
from silodp.errors import SilodpError
from silodp.privacy.events import Event, Gaussian, KnownSample, NoGuarantee, PoissonSampled
from silodp.privacy.guarantee import ADVERSARIES, Adversary, Guarantee
from silodp.privacy.ledger import Budget, Ledger

ROUNDS = 7
EVENTS: dict[Adversary, Event] = {
    "released": PoissonSampled(0.5, Gaussian(5.0)),
    "server": KnownSample(0.5, Gaussian(5.0)),
    "silo": NoGuarantee("counts disclosed"),
}
BUDGET = Budget(epsilon=4.0, delta=1e-5)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A finished run of seven rounds, with the ledger that its guarantees were computed from."""
    (tmp_path / LEDGER).parent.mkdir()
    with Ledger(tmp_path / LEDGER, 1e-5, "pld", BUDGET, run="it") as ledger:
        for round_ in range(ROUNDS):
            ledger.charge(round_, 0, EVENTS)
        made = [promise(a, None if a == "silo" else ledger.epsilon(a)) for a in ADVERSARIES]
    rows = [{"round": r, "loss": 1 / (r + 1), "metrics": {}, "epsilon": {}} for r in range(ROUNDS + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"method": "uldp-avg", "settings": "UldpAvg()", "stopped": "rounds", "guarantees": made}
    (tmp_path / "guarantee.json").write_text(json.dumps(summary))
    return tmp_path


def promise(adversary: Adversary, epsilon: float | None) -> dict[str, Any]:
    return Guarantee(
        adversary=adversary,
        unit="user",
        epsilon=epsilon,
        delta=1e-5,
        rounds=ROUNDS,
        accountant="pld",
        method="uldp-avg",
        private=epsilon is not None,
        releasable=epsilon is not None,
        reason=None if epsilon is not None else "counts disclosed",
    ).to_dict()


def change(directory: Path, adversary: Adversary, **fields: Any) -> None:
    path = directory / "guarantee.json"
    summary = json.loads(path.read_text())
    summary["guarantees"][ADVERSARIES.index(adversary)] |= fields
    path.write_text(json.dumps(summary))


def epsilon(directory: Path, adversary: Adversary) -> float:
    summary = json.loads((directory / "guarantee.json").read_text())
    return float(summary["guarantees"][ADVERSARIES.index(adversary)]["epsilon"])


def test_a_report_says_whether_it_was_checked(directory: Path) -> None:
    page = write_report(directory).read_text()
    assert f"checked against the ledger ({ROUNDS} rounds)" in page
    assert "ε ≤ 4.0 at δ = 0.00001" in page  # there is no config.toml: the ledger knows its budget
    (directory / LEDGER).unlink()
    page = write_report(directory).read_text()
    assert "Not checked: the ledger is not here." in page
    assert "hecked against" not in page


def test_the_check_leaves_the_ledger_as_it_was(directory: Path) -> None:
    before = (directory / LEDGER).read_bytes()
    write_report(directory)
    write_report(directory)  # and lets go of it
    assert (directory / LEDGER).read_bytes() == before


@pytest.mark.parametrize("adversary", ["released", "server"])
def test_a_smaller_epsilon_is_refused_and_a_larger_one_is_not(directory: Path, adversary: Adversary) -> None:
    kept = epsilon(directory, adversary)
    change(directory, adversary, epsilon=kept * 1.01)
    write_report(directory)
    change(directory, adversary, epsilon=kept * 0.9999)
    with pytest.raises(
        SilodpError, match=rf"against '{adversary}' it says ε = .*ledger's rounds cost"
    ) as error:
        write_report(directory)
    assert "\n" not in str(error.value)
    change(directory, adversary, epsilon=kept * (1 - 1e-9))  # the last digits, on another machine
    write_report(directory)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"delta": 1e-6}, "delta = 1e-06, and the ledger says 1e-05"),
        ({"delta": 1e-4}, "delta = 0.0001, and the ledger says 1e-05"),
        ({"rounds": ROUNDS - 1}, "rounds = 6, and the ledger says 7"),
        ({"accountant": "rdp"}, "accountant = rdp, and the ledger says pld"),
    ],
)
def test_another_setting_is_refused(directory: Path, fields: dict[str, Any], says: str) -> None:
    change(directory, "server", **fields)
    with pytest.raises(SilodpError, match=says):
        write_report(directory)


def test_a_promise_where_the_ledger_has_none_is_refused(directory: Path) -> None:
    change(directory, "silo", epsilon=100.0, private=True)
    with pytest.raises(SilodpError, match=r"against 'silo' .* nothing is promised \(counts disclosed\)"):
        write_report(directory)


def test_an_adversary_that_was_never_charged_is_promised_nothing(tmp_path: Path) -> None:
    (tmp_path / LEDGER).parent.mkdir()
    with Ledger(tmp_path / LEDGER, 1e-5, run="it") as ledger:
        for round_ in range(ROUNDS):
            ledger.charge(round_, 0, {"released": EVENTS["released"]})
    said = Guarantee.from_dict(promise("server", 3.0))
    with pytest.raises(SilodpError, match="no charge against that adversary"):
        audited(tmp_path, [said])


def test_a_run_of_no_rounds_has_spent_nothing(tmp_path: Path) -> None:
    (tmp_path / LEDGER).parent.mkdir()
    Ledger(tmp_path / LEDGER, 1e-5, run="it").close()
    said = Guarantee.from_dict(promise("server", 0.0) | {"rounds": 0})
    found = audited(tmp_path, [said])
    assert found is not None
    assert (found.rounds, found.budget) == (0, None)


@pytest.mark.parametrize("line", [1, 2, 5])
def test_a_damaged_ledger_is_one_sentence(directory: Path, line: int) -> None:
    lines = (directory / LEDGER).read_text().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].replace("5", "6", 1) if line > 1 else '{"format": 1}\n'
    (directory / LEDGER).write_text("".join(lines))
    with pytest.raises(SilodpError, match=f"is damaged in line {line}") as error:
        write_report(directory)
    assert "\n" not in str(error.value)


def test_a_ledger_in_use_is_not_read(directory: Path) -> None:
    with (
        Ledger(directory / LEDGER, 1e-5, "pld", BUDGET, run="it"),
        pytest.raises(SilodpError, match="in use by another process"),
    ):
        write_report(directory)


def test_infinity_is_no_promise(directory: Path) -> None:
    change(directory, "released", epsilon=math.inf)
    with pytest.raises(SilodpError, match="does not hold a guarantee"):
        write_report(directory)
