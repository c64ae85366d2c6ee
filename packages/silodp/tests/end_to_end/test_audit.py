"""A report believes no guarantee that the run's own ledger contradicts."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.charges import PERSONS_RECORDS, scale_to_person
from silodp.accounting.events import Event, Gaussian, NonPrivate, PoissonSampled, RevealedSample
from silodp.accounting.guarantee import NOT_COVERED, Guarantee
from silodp.accounting.ledger import Budget, Ledger, LedgerHeader, SiloHeader
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.cli.main import main
from silodp.config.build import build_aggregator
from silodp.errors import SilodpError
from silodp.report.audit import LEDGER, audit_run
from silodp.report.page import write_report
from support.commands import Silodp, assert_sentence
from support.configs import DDP
from support.rewriting import read_ledger, summarize_run, write_ledger

ROUNDS = 7
EVENTS: dict[Adversary, Event] = {
    "released": PoissonSampled(0.5, Gaussian(5.0)),
    "server": RevealedSample(0.5, Gaussian(5.0)),
    "silo": NonPrivate("counts disclosed"),
}
BUDGET = Budget(epsilon=4.0, delta=1e-5)
SUBJECT = LedgerHeader("uldp-avg", "UldpAvg()", "user", "plain", secret=True)
SUMMARY = summarize_run(method="uldp-avg", settings="UldpAvg()", rounds=ROUNDS)
PLAIN = build_aggregator("plain", {})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A finished run of seven rounds, with the ledger that its guarantees were computed from."""
    (tmp_path / LEDGER).parent.mkdir()
    with Ledger(tmp_path / LEDGER, 1e-5, "pld", BUDGET, run="it", subject=SUBJECT) as ledger:
        for round_ in range(ROUNDS):
            ledger.charge(round_, 0, EVENTS)
        ledger.record_files({})
        made = [promise(a, None if a == "silo" else ledger.epsilon(a)) for a in ADVERSARIES]
    rows = [{"round": r, "loss": 1 / (r + 1), "metrics": {}, "epsilon": {}} for r in range(ROUNDS + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "guarantee.json").write_text(json.dumps({**SUMMARY, "guarantees": made}))
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
        not_covered=NOT_COVERED,
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
    assert "<strong>Not checked.</strong>" in page[: page.index("protected by")]
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
        ({"delta": 1e-6}, "delta = 1e-06, and by its ledger and settings it is 1e-05"),
        ({"delta": 1e-4}, "delta = 0.0001, and by its ledger and settings it is 1e-05"),
        ({"rounds": ROUNDS - 1}, "rounds = 6, and by its ledger and settings it is 7"),
        ({"accountant": "rdp"}, "accountant = rdp, and by its ledger and settings it is pld"),
    ],
)
def test_another_setting_is_refused(directory: Path, fields: dict[str, Any], says: str) -> None:
    change(directory, "server", **fields)
    with pytest.raises(SilodpError, match=says):
        write_report(directory)


def test_a_promise_where_the_ledger_has_none_is_refused(directory: Path) -> None:
    change(directory, "silo", epsilon=100.0, private=True)
    with pytest.raises(SilodpError, match=r"against 'silo' .* there is no guarantee \(counts disclosed\)"):
        write_report(directory)


def test_an_adversary_that_was_never_charged_is_promised_nothing(tmp_path: Path) -> None:
    (tmp_path / LEDGER).parent.mkdir()
    with Ledger(tmp_path / LEDGER, 1e-5, run="it", subject=SUBJECT) as ledger:
        for round_ in range(ROUNDS):
            ledger.charge(round_, 0, {"released": EVENTS["released"]})
    said = [Guarantee.from_dict(promise(one, None)) for one in ("released", "silo")]
    said.append(Guarantee.from_dict(promise("server", 3.0)))
    with pytest.raises(SilodpError, match="no charge against that adversary"):
        audit_run(tmp_path, said[::-1], SUMMARY | {"private": False}, PLAIN)


def test_a_run_of_no_rounds_has_spent_nothing(tmp_path: Path) -> None:
    (tmp_path / LEDGER).parent.mkdir()
    with Ledger(tmp_path / LEDGER, 1e-5, run="it", subject=SUBJECT) as ledger:
        ledger.record_files({})
    said = Guarantee.from_dict(promise("released", 0.0) | {"rounds": 0})
    found = audit_run(tmp_path, [said], SUMMARY | {"rounds": 0}, PLAIN)
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


# --- what the events are about ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_about_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("about_records")
    (folder / "steps.toml").write_text(DDP)
    with pytest.raises(SystemExit) as left:
        main(["run", str(folder / "steps.toml"), "--out", str(folder / "run")])
    assert left.value.code == 0
    return folder / "run"


@pytest.fixture
def about_records(run_about_records: Path, config: Path) -> Path:
    """A seeded run about records."""
    config.write_text(DDP)
    return Path(shutil.copytree(run_about_records, config.with_name("run")))


def test_an_untouched_run_is_borne_out_and_resumes(silodp: Silodp, about_records: Path) -> None:
    assert silodp("report", about_records).status == 0
    longer = ("--out", about_records, "--resume", "--set", "rounds=3")
    assert silodp("run", about_records / "config.toml", *longer).status == 0
    assert silodp("report", about_records).status == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"unit": "user"}, "unit = user, and by its ledger and settings it is record"),
        ({"unit": None}, "unit = None, and by its ledger and settings it is record"),
        ({"method": "uldp-avg"}, "method = uldp-avg, and by its ledger and settings it is ddp"),
        ({"releasable": True}, "may be released, and by the ledger its noise follows from a seed"),
        ({"persons": []}, "no ε of a person with 2 records"),
        ({"persons": [[2, 1e6], [4, 1e6], [16, 1e6]]}, "no ε of a person with 8 records"),
    ],
)
def test_a_guarantee_about_something_else_is_refused(
    silodp: Silodp, about_records: Path, fields: dict[str, Any], says: str
) -> None:
    change(about_records, "server", **fields)
    assert_sentence(silodp("report", about_records), "against 'server' it says", says)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"method": "uldp-avg"}, "method = uldp-avg, and the ledger says ddp"),
        ({"settings": "Ddp(noise_multiplier=9)"}, "settings = Ddp(noise_multiplier=9), and the ledger says"),
        ({"aggregator": {"name": "masked"}}, "aggregator = masked, and the ledger says plain"),
        ({"aggregator": {"name": "best"}}, "names an aggregator that cannot be read"),
    ],
)
def test_a_run_of_another_kind_is_refused(
    silodp: Silodp, about_records: Path, fields: dict[str, Any], says: str
) -> None:
    path = about_records / "guarantee.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert_sentence(silodp("report", about_records), says)


def test_a_part_of_delta_is_not_hidden_by_naming_another_aggregator(directory: Path) -> None:
    """With `lattice` the ledger's δ is a part of the guarantee's: to name `plain` must not make that part the whole."""
    (directory / LEDGER).unlink()
    about = LedgerHeader("uldp-avg", "UldpAvg()", "user", "lattice", secret=True)
    with Ledger(directory / LEDGER, 1e-5, "pld", BUDGET, run="it", subject=about) as ledger:
        for round_ in range(ROUNDS):
            ledger.charge(round_, 0, EVENTS)
    with pytest.raises(SilodpError, match="aggregator = plain, and the ledger says lattice"):
        write_report(directory)


def test_nothing_is_released_that_promises_nothing(directory: Path) -> None:
    change(directory, "silo", releasable=True)
    with pytest.raises(SilodpError, match="may be released, and gives no guarantee"):
        write_report(directory)


def test_less_may_be_claimed(directory: Path) -> None:
    change(directory, "released", releasable=False)
    change(directory, "server", epsilon=None, private=False, releasable=False)
    write_report(directory)


def test_what_a_person_gets_is_what_her_records_cost(about_records: Path) -> None:
    persons = json.loads((about_records / "guarantee.json").read_text())["guarantees"][0]["persons"]
    with Ledger(about_records / LEDGER, 1e-5, "rdp", run=_run(about_records)) as ledger:
        assert ledger.subject is not None
        assert (ledger.subject.unit, ledger.subject.secret) == ("record", False)
        events = [charge.events["released"] for charge in ledger.history]
    spent = {
        k: compute_epsilon([(scale_to_person(event, k), 1) for event in events], 1e-5, "rdp")
        for k in PERSONS_RECORDS
    }
    assert persons == [[k, epsilon] for k, epsilon in spent.items()]


def _run(directory: Path) -> str:
    return str(json.loads((directory / LEDGER).read_text().splitlines()[0])["run"])


def test_a_ledger_that_is_not_a_servers_is_one_sentence(directory: Path) -> None:
    (directory / LEDGER).unlink()
    with Ledger(directory / LEDGER, 1e-5, "pld", BUDGET, run="it", silo=SiloHeader("user")) as ledger:
        for round_ in range(ROUNDS):
            ledger.charge(round_, 0, EVENTS)
    with pytest.raises(SilodpError, match="does not name the method and the unit") as error:
        write_report(directory)
    assert error.value.code == "ledger.damaged"


@pytest.mark.parametrize("format_", [2, True, "1", None])
def test_a_ledger_of_another_format_is_refused(directory: Path, format_: Any) -> None:
    header, *lines = read_ledger(directory / LEDGER)
    write_ledger(directory / LEDGER, [header | {"format": format_}, *lines])
    with pytest.raises(SilodpError) as error:
        write_report(directory)
    assert error.value.code == "ledger.version"


@pytest.mark.parametrize(
    "other", [{"unit": "record"}, {"method": "uldp-sgd"}, {"secret": False}, {"aggregator": "masked"}]
)
def test_a_book_is_not_gone_on_with_about_something_else(directory: Path, other: dict[str, Any]) -> None:
    with pytest.raises(SilodpError, match="was begun with subject = "):
        Ledger(directory / LEDGER, 1e-5, "pld", BUDGET, run="it", subject=replace(SUBJECT, **other))
    with Ledger(directory / LEDGER, 1e-5, "pld", BUDGET, run="it") as ledger:
        assert ledger.subject == SUBJECT
