"""The [budgets] table: from a configuration to budgets of records, or of persons."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from silodp.config.resolve import ResolvedRun, load_config
from silodp.errors import SilodpError
from silodp.methods import UldpAvg
from silodp_budgets.budget_curve import group_budgets
from silodp_budgets.config import build_budget_distribution
from silodp_budgets.rpdp.method import Rpdp
from silodp_budgets.user_budgets import UserBudgets
from silodp_experiments.method_specs import parse_methods
from support.commands import CONFIG, Silodp, assert_sentence
from support.configs import PERSONAL, TABLE, USERS, tables


@pytest.fixture
def personal(config: Path) -> Path:
    path = config.with_name("personal.toml")
    path.write_text(PERSONAL)
    return path


def loaded(path: Path, *overrides: str) -> ResolvedRun:
    return load_config(path, overrides)


def test_every_record_gets_a_budget_by_the_seed(personal: Path) -> None:
    made = loaded(personal)
    federation = made.load_federation()
    own = np.concatenate([silo.budget for silo in federation.silos if silo.budget is not None])
    assert len(own) == sum(len(silo) for silo in federation.silos) == federation.users
    values, counts = np.unique(own, return_counts=True)
    assert values.tolist() == [0.5, 1.0, 5.0]
    assert counts / len(own) == pytest.approx([0.7, 0.2, 0.1], abs=0.01)
    again, other = (loaded(personal, f"budgets.seed={seed}").load_federation() for seed in (3, 4))
    assert again.digest() == federation.digest() != other.digest()


def test_persons_get_budgets(config: Path) -> None:
    config.write_text(CONFIG + USERS)
    made = loaded(config)
    federation = made.load_federation()
    assert federation.user_budgets is not None
    assert federation.user_budgets.shape == (20,)
    assert all(silo.budget is None for silo in federation.silos)


def test_rounds_and_delta_of_budgets_are_the_runs_unless_others_are_named(
    personal: Path, config: Path
) -> None:
    method = loaded(personal, "rounds=7").method
    assert isinstance(method, Rpdp)
    assert (method.rounds, method.delta) == (7, 1e-4)
    method = loaded(personal, "method.rounds=9").method
    assert isinstance(method, Rpdp)
    assert method.rounds == 9
    config.write_text(CONFIG + USERS)
    nested = loaded(config, "rounds=7").method
    assert isinstance(nested, UldpAvg)
    assert nested.personal == UserBudgets(by="clip", rounds=7, largest_budget=5.0)
    assert isinstance(
        plain := loaded(config, "method.personal={by='clip', largest_budget=1, rounds=3}").method, UldpAvg
    )
    assert plain.personal == UserBudgets(by="clip", rounds=3, largest_budget=1.0)


def test_a_configuration_with_budgets_survives_a_round_trip(personal: Path) -> None:
    made = loaded(personal)
    personal.write_text(made.config.to_toml())
    assert loaded(personal) == made


def test_levels_are_distinct_budgets_or_twentieths() -> None:
    assert group_budgets(np.array([1.0, 0.1, 0.1, 5.0])).tolist() == [0.1, 1.0, 5.0]
    budgets = np.linspace(0.1, 10, 1000)
    assert group_budgets(budgets).tolist() == budgets[[*range(50, 1000, 50), 999]].tolist()


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("budgets={}", "config.missing_field"),
        ("budgets.distribution=normal", "argument.value"),
        ("budgets.sed=1", "config.unknown_field"),
        ("budgets.levels=[0.1, nan, 5]", "argument.value"),
        ("budgets.levels=[0.1, 5]", "argument.value"),
        ("budgets.levels=high", "config.value"),
        ("budgets={distribution='pareto', shape=0}", "argument.value"),
        ("budgets.of=users", "data.budgets"),
    ],
)
def test_a_mistake_leaves_nothing_behind(silodp: Silodp, personal: Path, override: str, code: str) -> None:
    for command in (["plan", personal], ["run", personal, "--out", "out"]):
        assert_sentence(silodp(*command, "--set", override), code=code)
    assert not Path("out").exists()


def test_budgets_that_are_asked_for_must_be_there(silodp: Silodp, personal: Path, config: Path) -> None:
    personal.write_text(
        PERSONAL.replace('[budgets]\ndistribution = "three-levels"\nlevels = [0.5, 1, 5]\nseed = 3\n', "")
    )
    nowhere = "data={source='heart_disease', root='/nowhere'}"  # the data would be missing, too
    assert_sentence(silodp("run", personal, "--set", nowhere, "--out", "out"), code="data.budgets")
    config.write_text(CONFIG + USERS[USERS.index("[method.personal]") :])
    assert_sentence(silodp("plan", config), code="data.budgets")
    config.write_text(CONFIG)
    dropout = "rpdp-dropout:threshold=1:local_steps=2:expected_batch_size=4:local_learning_rate=1"
    assert_sentence(silodp("compare", config, "--methods", dropout), code="data.budgets")


STEPS = "method={name='ddp', noise_multiplier=2.0, clip=1.0, local_steps=1, record_sampling=0.1, "
STEPS += "expected_batch_size=1.0, local_learning_rate=0.5}"


def test_budgets_that_nobody_reads_are_refused(
    silodp: Silodp, personal: Path, config: Path, tmp_path: Path
) -> None:
    keep = "(rpdp, rpdp-dropout, rpdp-filter or rpdp-minimum), or take [budgets] out"
    for command in ("plan", "run"):
        refused = silodp(command, personal, "--set", STEPS)
        assert_sentence(
            refused, "[budgets] gives every record a privacy budget", "method ddp ignores them", keep
        )
    column = silodp("plan", tables(tmp_path, ("1",)), "--set", STEPS)
    assert_sentence(
        column, "data.schema.budget gives every record a privacy budget", "or take data.schema.budget out"
    )
    config.write_text(CONFIG + '[budgets]\ndistribution = "mixture"\nof = "users"\n')
    assert_sentence(
        silodp("plan", config), "uldp-avg ignores them", "(uldp-sgd or uldp-avg with [method.personal])"
    )
    labels = [spec.label for spec in parse_methods(loaded(personal), "rpdp,default,uldp-avg:sigma=5")]
    assert labels == ["rpdp", "default", "uldp-avg:sigma=5"]  # beside one that reads them


def test_a_column_tells_who_is_out_of_reach_in_the_report(silodp: Silodp, tmp_path: Path) -> None:
    own = ("--set", "method.noise_multiplier=0.7", "--out", tmp_path / "out", "--json")
    done = silodp("run", tables(tmp_path, ("0.01", "5")), *own)
    assert done.status == 0, done.err
    (warning,) = (text for text in done.json["warnings"] if "take no part" in text)
    assert "2 of 4 records take no part" in warning
    assert "the report shows which" in warning


def test_a_column_of_budgets_will_do(tmp_path: Path) -> None:
    federation = loaded(tables(tmp_path, ("0.5", "1", "2"))).load_federation()
    assert [silo.budget.tolist() for silo in federation.silos if silo.budget is not None] == [[0.5, 1, 2]] * 2


def test_a_plan_reads_no_column(silodp: Silodp, tmp_path: Path) -> None:
    path = tables(tmp_path, ("1",))
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").unlink()
    planned = silodp("plan", path)
    assert planned.status == 0, planned.err
    assert "budgets are in the tables, which were not read" in planned.out
    assert silodp("plan", path, "--json").json["budgets"] is None


@pytest.mark.parametrize("wish", ["0", "-1", "", "nan", "inf", "much"])
def test_a_column_with_wrong_budgets_is_refused_by_their_number(
    silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tables(tmp_path, ("1", wish, wish, "2"))
    outcome = silodp("run", path, "--out", "out")
    assert outcome.status == 2
    assert "2 of 4" in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert not Path("out").exists()


def test_two_sources_of_budgets_are_one_too_many(tmp_path: Path) -> None:
    path = tables(tmp_path, ("1", "2"))
    path.write_text(TABLE.format(more='[budgets]\ndistribution = "pareto"'))
    with pytest.raises(SilodpError, match="take one of them out"):
        loaded(path).load_federation()


def test_options_are_those_of_the_distribution() -> None:
    made = build_budget_distribution({"distribution": "pareto", "shape": 2.0})
    assert made.options == {"shape": 2.0}
    assert (made.draw(1000) >= 0.1).all()
    with pytest.raises(SilodpError, match=r"budgets\.levels is not a field"):
        build_budget_distribution({"distribution": "pareto", "levels": [1.0]})
