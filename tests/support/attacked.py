"""Made-up attack.json files, as an attack on the run of a directory would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from silodp.methods import Ddp, Method, UldpAvg
from silodp.training.sgd import LocalTraining
from silodp_audit.attack.audit_run import AttackResult, attack_method
from silodp_budgets.random_allocation import RandomAllocation
from silodp_experiments.uldp_baselines import UldpGroup, UldpNaive


def make_view(adversary: str, epsilon: float | None, leak: float = 1.0, mu: float = 0.6) -> dict[str, Any]:
    """Return the entry of one adversary: a Gaussian attacker who sees `leak` times the shift that is claimed."""
    fpr = np.concatenate([np.geomspace(1e-3, 0.1, 20), np.linspace(0.12, 1, 30)])
    pairs, auc = 1500, float(norm.cdf(leak * mu / np.sqrt(2)))
    tpr = norm.cdf(norm.ppf(fpr) + leak * mu)
    band = 2 * np.sqrt(tpr * (1 - tpr) / pairs)
    claim, claimed_auc = None, float(norm.cdf(mu / np.sqrt(2)))
    if epsilon is not None:
        claim = {"epsilon": epsilon, "accountant": "pld", "accuracy": 0.6, "auc": claimed_auc, "tpr_1": 0.05}
    measured = {
        "score": "likelihood",
        "pairs": pairs,
        "wins": round(auc * pairs),
        "auc": auc,
        "p": None if epsilon is None else 0.49 if leak <= 1 else 1e-9,
        "auc_lower": auc - 0.02,
        "auc_upper": auc + 0.02,
        "noise_share": 0.93,
        "epsilon_lower": None if epsilon is None else 0.86 * leak * epsilon,
        "epsilon_delong": None,
        "epsilon_one_run": None if epsilon is None else 0.4 * epsilon,
        "accuracy": 0.6,
        "detectable": 0.78,
        "roc": {
            "fpr": fpr.tolist(),
            "tpr": tpr.tolist(),
            "tpr_low": np.clip(tpr - band, 0, 1).tolist(),
            "tpr_high": np.clip(tpr + band, 0, 1).tolist(),
            "claimed_tpr": None if epsilon is None else norm.cdf(norm.ppf(fpr) + mu).tolist(),
        },
    }
    verdict = "no guarantee" if epsilon is None else "consistent" if leak <= 1 else "violation"
    reason = "counts disclosed: weights in clear" if epsilon is None else ""
    return {
        "adversary": adversary,
        "claim": claim,
        "measured": measured,
        "verdict": verdict,
        "reason": reason,
    }


def make_noise(ratio: float = 1.0) -> list[dict[str, Any]]:
    """Return tests of noise, of a program that adds `ratio` times the noise that it states."""
    rows = [(f"noise of silo {s}", ratio + 0.004 * s, 1.0) for s in range(2)]
    rows += [("correlation between rounds", 0.03, 0.0), ("shift of members", 1.01, 1.0)]
    return [
        {
            "test": name,
            "value": value,
            "low": value - 0.05,
            "high": value + 0.05,
            "expected": expected,
            "passed": abs(value - expected) < 0.05,
        }
        for name, value, expected in rows
    ]


def make_attack(directory: Path, **changes: Any) -> dict[str, Any]:
    """Return attack.json of the run of a directory; each key of `changes` replaces one of the file."""
    stated = json.loads((directory / "guarantee.json").read_text())["guarantees"]
    record = {
        "format": 1,
        "version": "0.1",
        "spec": json.loads((directory / "run_spec.json").read_text())["digest"],
        "method": "uldp-avg",
        "aggregator": "plain",
        "unit": "user",
        "silos": 2,
        "dimensions": 3000,
        "rounds": stated[0]["rounds"],
        "claimed_rounds": stated[0]["rounds"],
        "canaries": 1500,
        "delta": 1e-5,
        "level": 0.05,
        "model": "canary",
        "time": "2026-11-26T08:00:00Z",
        "adversaries": [make_view(one["adversary"], one["epsilon"]) for one in stated],
        "noise": make_noise(),
        "untested": ["A silo that drops out."],
        **changes,
    }
    verdicts = [view["verdict"] for view in record["adversaries"]]
    failed = not all(one["passed"] for one in record["noise"])
    by_parts = "violation" if "violation" in verdicts else "noise" if failed else "consistent"
    return {"verdict": by_parts, **record}


def write_attack(directory: Path, record: Any) -> None:
    (directory / "attack.json").write_text(json.dumps(record, sort_keys=True))


AVG: dict[str, Any] = {"noise_multiplier": 2.0, "clip": 1.0, "local": LocalTraining(0.01)}
STEPS: dict[str, Any] = {
    "noise_multiplier": 2.0,
    "clip": 1.0,
    "expected_batch_size": 10.0,
    "local_learning_rate": 1.0,
}
SETTINGS: dict[str, tuple[Method, str, int]] = {
    "uniform": (UldpAvg(**AVG), "plain", 6),
    "sampled": (UldpAvg(**AVG, user_sampling=0.3), "plain", 10),
    "allocated": (UldpAvg(**AVG, participation=RandomAllocation(4)), "plain", 20),
    "masked": (UldpAvg(**AVG), "masked", 6),
    "records": (UldpAvg(**AVG, weighting="records"), "plain", 6),
    "group": (UldpGroup(**STEPS, group_size=12, local_steps=1, record_sampling=0.1), "plain", 10),
    "ddp": (Ddp(**STEPS, local_steps=4, record_sampling=0.2), "plain", 5),
    "naive": (UldpNaive(**AVG), "plain", 4),
}


def attack(setting: str, canaries: int) -> AttackResult:
    method, aggregator, rounds = SETTINGS[setting]
    return attack_method(method, rounds=rounds, aggregator=aggregator, canaries=canaries, seed=1)
