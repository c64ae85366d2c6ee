"""Evaluation across silos in processes of their own: the numbers of the simulation, whoever is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from silodp.accounting.ledger import reopen_ledger
from silodp.errors import SilodpError
from silodp.report.page import write_report
from silodp_deploy.acceptance import describe_agreement
from silodp_deploy.consortium import Consortium
from silodp_deploy.policy import Policy
from support.consortium import Processes, start_consortium
from support.deployed import AVG, PLAIN, assert_same_run, config, simulate, wait_for_round

MASKED = config(AVG, head='aggregator = "masked"\n', silos=4)
SUMS = '\n[evaluation]\nacross = "sums"\nnoise_multiplier = 1.0\nevery = 2\n'
LOCAL = '\n[evaluation]\nacross = "local"\nevery = 2\n'


def rows_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def measured(run: Path) -> list[tuple[object, ...]]:
    return [(row["round"], row.get("metrics"), row.get("evaluation"), row["epsilon"]) for row in rows_of(run)]


def assert_charged(processes: Processes, evaluations: int) -> None:
    """Every silo's ledger has each evaluation once, and at least the ε of the server's."""
    spent = {g["adversary"]: g["epsilon"] for g in processes.guarantees()}
    for silo in processes.names:
        (path,) = (processes.home(silo) / "ledgers").iterdir()
        processes.kill(silo)
        with reopen_ledger(path) as ledger:
            numbers = [charge.round for charge in ledger.history if charge.series == "evaluation"]
            assert numbers == list(range(evaluations))
            assert all(ledger.epsilon(a) >= e * (1 - 1e-9) for a, e in spent.items())  # type: ignore[operator]


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "parts"),
    [(MASKED, ""), (PLAIN, ""), (MASKED, "by_silo = true\n")],
    ids=["masked", "plain", "masked, by silo"],
)
def test_sums_over_tls_are_those_of_the_simulation(text: str, parts: str, tmp_path: Path) -> None:
    simulated = simulate(tmp_path, text + SUMS + parts)
    with start_consortium(tmp_path, text + SUMS + parts) as processes:
        processes.start_all()
        assert processes.wait_for_server() == 0, processes.log("server")
        assert_same_run(processes, simulated)
        assert measured(processes.run) == measured(simulated)
        assert [row["round"] for row in rows_of(processes.run) if "evaluation" in row] == [2, 3]
        page = write_report(processes.run).read_text()
        assert "covered by ε" in page
        for silo in processes.names:
            about = [one["about"] for one in processes.audit(silo) if one["kind"] == "update"]
            assert about == ["training", "training", "evaluation", "training", "evaluation"]
            limits = Policy.load(processes.home(silo) / "policy.toml").lifetime_epsilon
            spent = {str(g["adversary"]): g["epsilon"] for g in processes.guarantees()}
            assert all(spent[a] <= limits[a] < 1.1 * spent[a] for a in limits)  # type: ignore[operator]
        assert_charged(processes, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_silo_that_evaluates_for_itself_keeps_the_metrics(tmp_path: Path) -> None:
    simulated = simulate(tmp_path, PLAIN + LOCAL)
    with start_consortium(tmp_path, PLAIN + LOCAL) as processes:
        processes.start_all()
        assert processes.wait_for_server() == 0, processes.log("server")
        assert_same_run(processes, simulated)
        assert all(not row.get("metrics") and row.get("loss") is None for row in rows_of(processes.run))
        for place, silo in enumerate(processes.names):
            path = processes.home(silo) / "metrics.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            theirs = simulated / "checkpoint" / "silo_metrics" / f"{place:03}.jsonl"
            expected = [json.loads(line) for line in theirs.read_text().splitlines()]
            assert [line["round"] for line in lines] == [2, 3]
            assert [line["records"] for line in lines] == [line["records"] for line in expected]
            for line, other in zip(lines, expected, strict=True):  # a process may add up in another order
                assert {"loss": line["loss"], **line["metrics"]} == pytest.approx(
                    {"loss": other["loss"], **other["metrics"]}, rel=1e-5
                )
            assert all("accuracy" in line["metrics"] for line in lines)
            assert path.stat().st_mode & 0o077 == 0
            assert "none of them was sent" in processes.log(silo)
            sizes = {one["bytes"] for one in processes.audit(silo) if one["about"] == "evaluation"}
            assert max(sizes) < 400  # marker, signature and the name of the request  # type: ignore[type-var]
        assert_charged(processes, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["silo-2", "server"])
def test_whoever_is_killed_no_evaluation_is_charged_twice(victim: str, tmp_path: Path) -> None:
    """Every round is evaluated, so that a kill meets an evaluation as often as a round."""
    text = MASKED.replace("rounds = 3", "rounds = 10") + SUMS.replace("every = 2", "every = 1")
    simulated = simulate(tmp_path, text)
    with start_consortium(tmp_path, text) as processes:
        processes.start_all()
        for round_ in (1, 3, 5, 7):
            wait_for_round(processes, round_)
            processes.kill(victim)
            processes.start(victim)
        assert processes.wait_for_server() == 0, processes.log("server")
        assert_same_run(processes, simulated)
        assert measured(processes.run) == measured(simulated)
        assert_charged(processes, 10)


@pytest.mark.parametrize(("parts", "kind"), [("", "sums"), ("by_silo = true\n", "sums by silo")])
def test_the_operator_decides_about_evaluations(parts: str, kind: str, tmp_path: Path) -> None:
    """Whoever allows sums over all silos has not allowed to be compared with the others."""
    with start_consortium(tmp_path, PLAIN + SUMS + parts) as processes:
        consortium = Consortium.load(processes.public)
        agreed = describe_agreement(consortium)
        assert [agreed["series"]["evaluation"][name] for name in ("kind", "times")] == [kind, 2]
        policy = Policy.load(processes.home("silo-1") / "policy.toml")
        assert policy.evaluation == [kind]
        columns = consortium.list_columns("silo-1")
        policy.check(consortium.digest, consortium.spec, columns)
        for allowed in (["none"], ["none", "local", *["sums"] * bool(parts)]):
            with pytest.raises(SilodpError) as caught:
                policy.model_copy(update={"evaluation": allowed}).check(
                    consortium.digest, consortium.spec, columns
                )
            assert (caught.value.code, caught.value.field) == ("policy.not_allowed", "evaluation")
