"""Metrics, the alerts of the rules file, and the problems of a health check: the same conditions by one name."""

from __future__ import annotations

import json
import math
import operator
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from silodp.wire.transport import Traffic
from silodp_deploy.monitoring import State, describe_party, find_problems, format_metrics, read_state
from silodp_deploy.status import StatusFile, list_transfers, read_status

ROOT = Path(__file__).parents[5]
RULES = ROOT / "packaging" / "prometheus" / "silodp.rules.yml"
ALERTS = {one["alert"]: one for one in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]}
_OTHERS = {"SilodpCertificateEndsSoon", "SilodpUnreachable", "SilodpReportOld", "SilodpAbsent"}
"""Alerts that are no problem yet, or that only Prometheus can see."""

WELL = State(
    {"north": 3.0, "south": None},
    {"north": 4, "south": 0},
    traffic=Traffic(12, 34),
    round=4,
    rounds=10,
    epsilon={"released": 1.0, "server": None},
    epsilon_limit={"released": 2.0, "server": None},
    seconds_since_round=100.0,
    certificate_days={"north": 300.0, "authority": 3000.0},
)
OVER = {"stopped": "rounds", "is_running": False}

CASES = {
    "well": (WELL, set[str]()),
    "ended, the run is not over": (replace(WELL, is_running=False), {"SilodpDown"}),
    "the run is over": (replace(WELL, **OVER, seconds_since_round=1e6, seconds_since_seen={"north": 1e6}), set[str]()),
    "ended long ago": (
        replace(WELL, is_running=False, seconds_since_round=1e6, seconds_since_seen={"north": 1e6}), {"SilodpDown"}
    ),
    "an error": (replace(WELL, error="the disk is full"), {"SilodpError"}),
    "just in time": (replace(WELL, seconds_since_round=3600.0), set[str]()),
    "stuck": (replace(WELL, seconds_since_round=3601.0), {"SilodpStuck"}),
    "heard of": (replace(WELL, seconds_since_seen={"north": 900.0}), set[str]()),
    "silent": (replace(WELL, seconds_since_seen={"north": 1.0, "south": 901.0}), {"SilodpSilent"}),
    "a month": (replace(WELL, certificate_days={"north": 29.9}), {"SilodpCertificateEndsSoon"}),
    "a week": (
        replace(WELL, certificate_days={"north": 300.0, "authority": 6.9}),
        {"SilodpCertificateEnds", "SilodpCertificateEndsSoon"},
    ),
    "ended certificate": (
        replace(WELL, certificate_days={"north": -3.0}),
        {"SilodpCertificateEnds", "SilodpCertificateEndsSoon"},
    ),
    "ε is short": (replace(WELL, epsilon={"released": 1.901}), {"SilodpEpsilonShort"}),
    "ε suffices": (replace(WELL, epsilon={"released": 1.9}), set[str]()),
    "ε at the end": (replace(WELL, round=9, epsilon={"released": 1.99}), set[str]()),
}  # fmt: skip

Samples = dict[frozenset[tuple[str, str]], float]
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


def read_samples(text: str) -> dict[str, Samples]:
    """Metrics in the text format of Prometheus: name -> labels -> value."""
    found: dict[str, Samples] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            assert match is not None, line
            labels = frozenset(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            found.setdefault(match[1], {})[labels] = float(match[3])
    return found


def evaluate(expression: str, metrics: dict[str, Samples]) -> Samples:
    """What an expression of the simple form of the rules file selects: comparisons of products, joined by "and"."""
    selected: Samples | None = None
    for part in re.split(r"\s+(?=and )", expression):
        clause = re.fullmatch(
            r"(?:and (?:ignoring\((\w+)\) )?)?(\w+) (==|<|>) (?:([\d.]+) \* )?([\w.]+)", part
        )
        assert clause is not None, part
        ignored, name, comparison, factor, other = clause.groups()
        holds = _COMPARISONS[comparison]
        right = metrics[other] if other.startswith("silodp_") else None
        found = {
            labels: value
            for labels, value in metrics.get(name, {}).items()
            if holds(
                value, float(factor or 1) * (float(other) if right is None else right.get(labels, math.nan))
            )
        }
        if selected is None:
            selected = found
        else:
            selected = {
                labels: value
                for labels, value in selected.items()
                if frozenset(one for one in labels if one[0] != ignored) in found
            }
    return selected or {}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("folder", [None, "silo"])
def test_an_alert_fires_when_a_health_check_names_the_same_problem(name: str, folder: str | None) -> None:
    state, expected = CASES[name]
    metrics = read_samples(format_metrics(state, folder))
    fired = {
        alert
        for alert, rule in ALERTS.items()
        if alert not in _OTHERS - {"SilodpCertificateEndsSoon"} and evaluate(rule["expr"], metrics)
    }
    assert fired == expected
    assert find_problems(state).keys() == expected - _OTHERS


def test_every_condition_has_an_alert_and_every_alert_a_metric() -> None:
    assert set().union(*(expected for _, expected in CASES.values())) == ALERTS.keys() - {
        "SilodpUnreachable",
        "SilodpReportOld",
        "SilodpAbsent",
    }
    shown = read_samples(format_metrics(WELL)).keys()
    for rule in ALERTS.values():
        named = set(re.findall(r"silodp_\w+", rule["expr"]))
        assert named <= shown
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


@pytest.mark.parametrize("name", CASES)
def test_prometheus_itself_fires_the_same_alerts(name: str, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    state, expected = CASES[name]
    series = [
        {"series": re.sub(r" \S+$", "", line), "values": " ".join([line.rpartition(" ")[2]] * 31)}
        for line in format_metrics(state, "silo").splitlines()
        if not line.startswith("#")
    ]
    asked = [
        {"expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) > 0', "eval_time": "20m",
         "exp_samples": [{"labels": "{}", "value": 1}] if alert in expected else []}
        for alert in ALERTS if alert not in ("SilodpReportOld", "SilodpAbsent")
    ]  # fmt: skip
    (tmp_path / "test.yml").write_text(
        yaml.safe_dump({
            "rule_files": [str(RULES)],
            "evaluation_interval": "1m",
            "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": asked}],
        })
    )  # fmt: skip
    found = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_what_a_process_writes_is_what_its_metrics_say(tmp_path: Path) -> None:
    days = {"north": 12.5}
    file = StatusFile(
        tmp_path / "status.json",
        lambda: {"north": 2.0},
        7,
        lambda: {"north": 5},
        lambda: {"certificate_days": days, "transfers": list_transfers({"north": (34_000_000, 120_000_000)})},
    )
    file.write(round=3, epsilon={"released": 1.5}, epsilon_limit={"released": 2.5})
    time.sleep(0.3)
    file.write(round=3, error="away")
    found = read_status(tmp_path / "status.json")
    assert 0.25 < found["seconds_since_round"] < 30
    state = read_state(found, 10.0)
    assert state.seconds_since_seen == {"north": 12.0}
    assert state.seconds_since_round == found["seconds_since_round"] + 10
    assert describe_party(state, "north") == "last seen 12 s ago, 34.0 of 120.0 MB of an answer have passed"
    assert find_problems(state).keys() == {"SilodpError"}
    assert find_problems(state, 10.0).keys() == {"SilodpError", "SilodpStuck"}
    metrics = read_samples(format_metrics(state, "silo"))
    assert metrics["silodp_epsilon_limit"] == {
        frozenset({("folder", "silo"), ("adversary", "released")}): 2.5
    }
    assert metrics["silodp_certificate_days_left"] == {
        frozenset({("folder", "silo"), ("party", "north")}): 12.5
    }
    file.write(round=4)
    assert json.loads((tmp_path / "status.json").read_text())["seconds_since_round"] < 0.25
    assert find_problems(read_state(found, 61.0)).keys() == {"SilodpDown", "SilodpError"}
