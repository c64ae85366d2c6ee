"""Runs with an evaluation across silos, from the command line: plan, run, report, and every kind of label."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from silodp.accounting.events import Skellam
from silodp.accounting.guarantee import ON_THE_LIST
from silodp.aggregators import Aggregator
from silodp.aggregators.masked import Masked
from silodp.aggregators.run_spec import RunSpec
from silodp.config.resolve import load_config
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.methods import UldpAvg
from silodp.planning.plan import plan_run
from silodp.runtime.prepare import prepare_run
from silodp.runtime.train import train
from silodp.training import Task
from silodp.training.losses import Loss, cox, cross_entropy, squared_error
from silodp.training.metrics import accuracy, concordance
from silodp.training.sgd.local import LocalTraining
from silodp_analytics.counts import CountTable
from silodp_analytics.evaluation.series import Evaluation
from silodp_private.select import Select
from support.commands import Silodp
from support.oracles import logistic_task, small_federation
from support.private import LATTICE
from support.refusals import refused

AVG = UldpAvg(5.0, 0.5, LocalTraining(learning_rate=0.1), server_learning_rate=20.0)
EXACT = Evaluation("sums", noise_multiplier=0.0, clip=1000.0, bins=200)
TIMES = replace(EXACT, times=(0.5, 1.0, 1.5, 2.0, 3.0))
CONFIG = """
name = "evaluated"
rounds = 4
seed = 1
{head}
[data]
source = "embedded"
silos = 3
users = 40
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.5
server_learning_rate = 20.0
[method.local]
learning_rate = 0.3
[evaluation]
across = "sums"
epsilon = 3.0
every = 3
"""


@pytest.fixture
def evaluated(config: Path, request: pytest.FixtureRequest) -> Path:
    head = getattr(request, "param", "")
    config.write_text(CONFIG.format(head=head))
    return config


@pytest.mark.parametrize("evaluated", ["", 'aggregator = "masked"'], indirect=True)
def test_plan_run_and_report_agree(silodp: Silodp, evaluated: Path) -> None:
    planned = silodp("plan", evaluated, "--json").json
    done = silodp("run", evaluated, "--out", "run", "--json").json
    for adversary, found in planned["adversaries"].items():
        assert found["epsilon"] == pytest.approx(done["guarantees"][adversary]["epsilon"], rel=1e-3)
    assert planned["evaluation"]["times"] == 2
    assert planned["evaluation"]["cells"] == 20
    assert planned["evaluation"]["epsilon"]["released"] > 3
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows if row.get("evaluation")] == [3, 4]
    assert rows[-1]["evaluation"]["noise_std"] == pytest.approx(planned["evaluation"]["noise_std"], rel=1e-3)
    assert json.loads(Path("run/guarantee.json").read_text())["evaluation"] == "sums"
    if done["metrics"]:
        assert done["standard_errors"].keys() == done["metrics"].keys()
    page = Path("run/report.html").read_text()
    assert "By noised sums: covered by ε" in page
    assert "the noise comes on top of them" in page  # "low" and "high" bound nothing that has noise
    counts = page[page.index("Noisy counts of records") :]
    assert re.findall(r'scope="col"[^>]*>([^<]+)<', counts[: counts.index("<tbody>")]) == [
        "benign",
        "malignant",
    ]
    assert silodp("report", "run").status == 0
    # ε covers the metrics of this run: page and card speak of other ones.
    for text in (page, Path("run/MODEL_CARD.md").read_text()):
        assert "other metrics computed on private records" in text
        assert not re.search("[^r] metrics computed on private records", text)
        assert text.index("Not protected: ") < text.index("further runs on the same people")
        assert text.count(ON_THE_LIST.replace("'", "&#39;" if text is page else "'")) == 1


def test_a_report_refuses_another_evaluation_than_that_of_the_ledger(silodp: Silodp, evaluated: Path) -> None:
    assert silodp("run", evaluated, "--out", "run").status == 0
    path = Path("run/config.toml")
    path.write_text(path.read_text().replace("epsilon = 3.0", "epsilon = 2.0"))
    assert "[report.contradicted]" in silodp("report", "run").err


@pytest.mark.slow
def test_a_claimed_epsilon_has_the_cost_of_evaluations(silodp: Silodp, evaluated: Path) -> None:
    """A claim is compared with the proven ε, which has it: without it, the claim looks like a far smaller cost."""
    method = (
        '{name = "ddp", noise_multiplier = 3.0, clip = 1.0, local_steps = 2, record_sampling = 0.5, '
        'expected_batch_size = 10, local_learning_rate = 0.1, trajectory = "paper"}'
    )
    changes = ("--set", f"method={method}", "--set", "evaluation.epsilon=5")
    planned = silodp("plan", evaluated, *changes, "--json").json
    done = silodp("run", evaluated, *changes, "--out", "run", "--json").json
    claims = {claim["adversary"]: claim["epsilon"] for claim in planned["claims"]}
    assert claims["released"] > planned["evaluation"]["epsilon"]["released"]
    for adversary, epsilon in claims.items():
        (claim,) = done["guarantees"][adversary]["claims"]
        assert claim["epsilon"] == pytest.approx(epsilon, rel=1e-3)
    assert silodp("report", "run").status == 0


def test_a_run_goes_on_with_more_rounds_and_another_evaluation(silodp: Silodp, evaluated: Path) -> None:
    first = silodp("run", evaluated, "--out", "run", "--json").json
    second = silodp("run", evaluated, "--out", "run", "--resume", "--set", "rounds=5", "--json").json
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows if row.get("evaluation")] == [3, 4, 5]
    assert second["epsilon"] > first["epsilon"] * 1.15
    again = silodp("run", evaluated, "--out", "run", "--resume", "--set", "rounds=5", "--json").json
    assert again["epsilon"] == second["epsilon"]


def test_a_plan_counts_the_rounds_that_a_budget_leaves(evaluated: Path) -> None:
    config = load_config(evaluated, ["budget.epsilon=8", "budget.adversary=server"])
    spec, _ = config.build_public_spec()
    planned = plan_run(spec)["budget"]["rounds"]
    assert planned > 4

    def spend(rounds: int) -> float:
        found: float = plan_run(replace(spec, rounds=rounds, budget=None))["adversaries"]["server"]["epsilon"]
        return found

    assert spend(planned) <= 8 < spend(planned + 1)


def test_a_target_is_met_by_rounds_and_evaluations_together(evaluated: Path) -> None:
    spec, _ = load_config(evaluated).build_public_spec()
    with refused("evaluation.target"):
        plan_run(spec, target=3.0)  # each of two evaluations costs that much
    found = plan_run(spec, target=8.0)["target"]

    def spend(changed: RunSpec) -> float:
        planned: float = plan_run(changed)["adversaries"]["released"]["epsilon"]
        return planned

    rounds = found["rounds"]
    assert spend(replace(spec, rounds=rounds)) <= 8 < spend(replace(spec, rounds=rounds + 1))
    method = replace(spec.method, noise_multiplier=found["noise_multiplier"])
    assert 7.9 < spend(replace(spec, method=method)) <= 8
    assert found["user_sampling"] == 1  # the target leaves more than these rounds cost
    without = plan_run(replace(spec, series=(Evaluation("none"),)), target=8.0)["target"]
    assert without["noise_multiplier"] < found["noise_multiplier"]


def hold_out(federation: Federation, labels: list[np.ndarray], classes: int | None) -> Federation:
    """The same records with other labels, half of each silo's held out."""
    silos = []
    for silo, y in zip(federation.silos, labels, strict=True):
        half = len(y) // 2
        test = SiloData(silo.name, silo.x[:half], y[:half], silo.user[:half])
        silos.append(SiloData(silo.name, silo.x[half:], y[half:], silo.user[half:], test=test))
    return Federation(tuple(silos), federation.users, None, classes=classes)


def pooled(federation: Federation) -> tuple[torch.Tensor, torch.Tensor]:
    x = np.concatenate([silo.held_out.x for silo in federation.silos])
    return torch.from_numpy(x), torch.from_numpy(
        np.concatenate([silo.held_out.y for silo in federation.silos])
    )


def test_more_than_two_classes() -> None:
    base = small_federation(records=240)
    labels = [np.digitize(silo.x[:, 0], [-0.5, 0.5]).astype(np.int64) for silo in base.silos]
    federation = hold_out(base, labels, 3)
    task = Task(torch.nn.Linear(4, 3), cross_entropy(), {"accuracy": accuracy})
    result = train(federation, task, AVG, rounds=3, seed=0, aggregator="masked", evaluation=EXACT)
    x, y = pooled(federation)
    row = result.metrics[-1]
    assert row["metrics"]["accuracy"] == pytest.approx(accuracy(task.predict(result.params, x), y), abs=0.03)
    assert np.array(row["evaluation"]["confusion"]).shape == (3, 3)


def test_survival() -> None:
    base, rng = small_federation(records=240), np.random.default_rng(0)
    labels = []
    for silo in base.silos:
        time = rng.exponential(np.exp(-silo.x[:, 0]))
        labels.append(np.stack([rng.random(len(time)) < 0.7, time], axis=1).astype(np.float32))
    federation = hold_out(base, labels, None)
    task = Task(torch.nn.Linear(4, 1, bias=False), cox(), {"concordance": concordance})
    result = train(federation, task, AVG, rounds=3, seed=0, evaluation=TIMES)
    x, y = pooled(federation)
    found = result.metrics[-1]["evaluation"]["estimates"]["concordance"]
    assert found["low"] <= concordance(task.predict(result.params, x), y) <= found["high"]
    with refused("evaluation.times"):
        prepare_run(federation, task, AVG, rounds=1, evaluation=EXACT)


def test_numbers_as_labels_are_refused() -> None:
    base = small_federation()
    federation = hold_out(base, [silo.x[:, 0].astype(np.float32) for silo in base.silos], None)
    task = Task(torch.nn.Linear(4, 1), squared_error())
    with refused("evaluation.labels"):
        prepare_run(federation, task, AVG, rounds=1, evaluation=EXACT)
    prepare_run(federation, task, AVG, rounds=1, evaluation=Evaluation("local"))


def test_outputs_that_fit_no_cell_are_refused_before_a_label_meets_them() -> None:
    """With three outputs for two classes, a held-out record could stop its silo, by its label."""
    own = Loss.per_record("own", lambda outputs, targets: (outputs.sum(1) - targets) ** 2)
    federation = small_federation(held_out=20)
    for width in (1, 2):
        prepare_run(federation, Task(torch.nn.Linear(4, width), own), AVG, rounds=1, evaluation=EXACT)
    three = Task(torch.nn.Linear(4, 3), own)
    with refused("evaluation.outputs"):
        prepare_run(federation, three, AVG, rounds=1, evaluation=EXACT)
    prepare_run(federation, three, AVG, rounds=1, evaluation=Evaluation("local"))
    table, labels = CountTable("classes", classes=3), torch.tensor([0, 1, 2])
    assert table.find_cells(torch.eye(3), labels)[:, 0].tolist() == [0, 4, 8]
    for outputs in (torch.zeros(3, 4), torch.zeros(3, 2), torch.zeros(3), torch.zeros(3, 3, 1)):
        with refused("evaluation.outputs"):
            table.find_cells(outputs, labels)


def test_silos_must_have_held_out_records() -> None:
    for evaluation in (Evaluation("local"), EXACT):
        with refused("evaluation.no_records"):
            prepare_run(small_federation(), logistic_task(), AVG, rounds=1, evaluation=evaluation)
    prepare_run(small_federation(), logistic_task(), AVG, rounds=1, evaluation=Evaluation("none"))


@pytest.mark.parametrize(
    "settings",
    [
        {"across": "local", "noise_multiplier": 3.0},
        {"across": "local", "epsilon": 3.0},
        {"across": "local", "clip": 2.0},
        {"across": "local", "bins": 20},
        {"across": "local", "times": (1.0, 2.0)},
        {"across": "none", "every": 3},
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any]) -> None:
    with refused("argument.conflict") as caught:
        Evaluation(**settings)
    assert caught.value.field == f"evaluation.{list(settings)[1]}"


def test_edges_of_times_are_refused_where_labels_are_classes() -> None:
    with refused("argument.conflict"):
        prepare_run(small_federation(held_out=20), logistic_task(), AVG, rounds=1, evaluation=TIMES)
    prepare_run(small_federation(held_out=20), logistic_task(), AVG, rounds=1, evaluation=EXACT)


@pytest.mark.parametrize(("aggregator", "weighting"), [(LATTICE, "records"), (Select(), "primary_silo")])
def test_counts_are_masked_wherever_updates_are_hidden(aggregator: Aggregator, weighting: Any) -> None:
    settings = {"rounds": 1, "evaluation": replace(EXACT, noise_multiplier=1.0)}
    federation, method = small_federation(held_out=20), replace(AVG, weighting=weighting)
    spec = prepare_run(federation, logistic_task(), method, aggregator=aggregator, **settings)  # type: ignore[arg-type]
    derived = spec.derived["evaluation"]
    assert isinstance(derived.aggregator, Masked)
    assert all(isinstance(event, Skellam) for event in derived.round_events().values())


def test_dropouts_are_charged_with_the_noise_that_is_left() -> None:
    """With three of four silos both the noise and a person's part are smaller."""
    federation = small_federation(silos=4, held_out=20)
    spec = prepare_run(
        federation, logistic_task(), AVG, rounds=1, aggregator=Masked(min_silos=3),
        evaluation=replace(EXACT, noise_multiplier=1.0),
    )  # fmt: skip
    derived = spec.derived["evaluation"]
    everyone, fewer = (derived.round_events(survivors)["released"] for survivors in (4, 3))
    assert isinstance(everyone, Skellam)
    assert isinstance(fewer, Skellam)
    # σ·S/√(m·n), docs/privacy.md, section 3.
    assert everyone.noise_multiplier == pytest.approx(4 / np.sqrt(3 * 4))
    assert fewer.noise_multiplier == pytest.approx(4 / np.sqrt(3 * 3))
