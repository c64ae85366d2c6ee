"""Personal budgets: the papers' distributions, whole federations of them, and columns of tables."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from silodp.data.federation import Federation
from silodp.data.tables.reader import Schema
from silodp.errors import SilodpError
from silodp_budgets.budget_distributions import BOUNDS, PREFERENCES, mixture, pareto, three_levels
from support.oracles import small_federation


def draw(name: str, count: int, seed: int = 0) -> np.ndarray:
    return PREFERENCES[name](count, np.random.default_rng(seed))


@pytest.mark.parametrize("name", PREFERENCES)
def test_every_preference_is_seeded_within_bounds_and_in_no_order(name):
    budgets = draw(name, 4000)
    assert budgets.shape == (4000,)
    assert budgets.dtype == np.float64
    assert (budgets >= BOUNDS[0]).all()
    assert (budgets <= BOUNDS[1]).all()
    np.testing.assert_array_equal(budgets, draw(name, 4000))
    assert not np.array_equal(budgets, draw(name, 4000, seed=1))
    # In file order, the first half would ask for less than the second.
    order = stats.spearmanr(np.arange(4000), budgets).statistic
    assert abs(order) < 5 / np.sqrt(4000)


@pytest.mark.parametrize(("count", "expected"), [(1000, (700, 200, 100)), (7, (5, 1, 1)), (1, (1, 0, 0))])
def test_three_levels_keep_their_shares(count, expected):
    budgets = draw("three-levels", count)
    assert tuple(int((budgets == level).sum()) for level in (0.1, 1.0, 5.0)) == expected


def test_pareto_has_the_bounded_law():
    """Truncated, Pareto with shape 1 from .1 on has P(ε ≤ x) = (1 − .1/x)/(1 − .1/10)."""
    law = lambda x: (1 - 0.1 / x) / (1 - 0.1 / 10)  # noqa: E731
    budgets = draw("pareto", 20_000)
    assert stats.kstest(budgets, law).pvalue > 1e-6
    wrong = pareto(20_000, np.random.default_rng(0), scale=1.0)  # what the paper's own code draws
    assert stats.kstest(wrong, law).pvalue < 1e-12
    assert 10 * np.median(budgets) / np.median(wrong) == pytest.approx(2, abs=0.4), "1.1 and .2, cut at 10"


def test_the_components_of_the_mixture_keep_their_shares_though_one_lies_at_the_edge():
    """Redrawn from the whole mixture, the first component would have 54 % and not 70 %."""
    budgets = draw("mixture", 20_000)
    share = (budgets < 0.2).mean()
    assert abs(share - 0.7) < 5 * np.sqrt(0.7 * 0.3 / 20_000)
    assert abs((budgets > 3).mean() - 0.1) < 5 * np.sqrt(0.1 * 0.9 / 20_000)
    last = budgets[budgets > 3]
    assert stats.kstest((last - 5) / 0.5, "norm").pvalue > 1e-6
    first = budgets[budgets < 0.2]
    assert stats.kstest((first - 0.1) / 0.01, stats.halfnorm.cdf).pvalue > 1e-6


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda g: three_levels(10, g, levels=(0.1, -1.0, 5.0)), "levels"),
        (lambda g: three_levels(10, g, shares=(0.5, 0.5)), "shares"),
        (lambda g: three_levels(10, g, shares=(0.5, 0.5, 0.5)), "shares"),
        (lambda g: pareto(10, g, shape=0.0), "shape"),
        (lambda g: pareto(10, g, scale=float("nan")), "scale"),
        (lambda g: mixture(10, g, deviations=(0.1, 0.1)), "deviations"),
        (lambda g: mixture(10, g, means=(50.0, 50.0, 50.0)), "outside"),
    ],
)
def test_distributions_that_make_no_sense_are_refused(make, word):
    with pytest.raises(SilodpError, match=word):
        make(np.random.default_rng(0))


def test_a_federation_gets_budgets_by_name_function_or_array():
    federation = small_federation()
    sizes = [len(silo) for silo in federation.silos]
    drawn = federation.with_budgets("three-levels", seed=3)
    pooled = np.concatenate([silo.budget for silo in drawn.silos])
    np.testing.assert_array_equal(pooled, draw("three-levels", sum(sizes), seed=3))
    again = federation.with_budgets(three_levels, seed=3)
    np.testing.assert_array_equal(pooled, np.concatenate([silo.budget for silo in again.silos]))
    one = federation.with_budgets(np.arange(1, 61))
    apart = federation.with_budgets([silo.budget for silo in one.silos])
    for silo, other, size in zip(one.silos, apart.silos, sizes, strict=True):
        assert silo.budget.shape == (size,)
        assert silo.budget.dtype == np.float64
        np.testing.assert_array_equal(silo.budget, other.budget)
    assert one.silos[0].digest() != federation.silos[0].digest(), "a resumed run must have the same budgets"
    users = federation.with_budgets("mixture", seed=1, unit="user")
    assert users.user_budgets.shape == (federation.users,)
    assert all(silo.budget is None for silo in users.silos)


@pytest.mark.parametrize(
    ("budgets", "word"),
    [
        ("gauss", "budgets is 'gauss'; choose one of three-levels, pareto, mixture"),
        (np.ones(59), r"not an array \(60,\)"),
        (
            np.array([0.0, -1.0, np.nan, np.inf] + [1.0] * 56),
            "4 of 60 budgets are missing, infinite or not above 0",
        ),
        (np.array(["a"] * 60), r"not an array \(60,\) of float64"),
    ],
)
def test_budgets_that_are_none_are_refused_and_counted(budgets, word):
    with pytest.raises(SilodpError, match=word):
        small_federation().with_budgets(budgets)


SCHEMA = Schema(
    user="id", label="sick", classes=[0, 1], numeric={"age": (0.0, 100.0)}, split="split", budget="epsilon"
)


def table(folder: Path, cells: list[str]) -> Path:
    rows = [f"u{i},{i % 2},{20 + i},train,{cell}" for i, cell in enumerate(cells)]
    path = folder / "clinic.csv"
    path.write_text("\n".join(["id,sick,age,split,epsilon", *rows, "u0,1,50,test,"]) + "\n")
    return path


def test_a_column_of_budgets_belongs_to_its_training_records(tmp_path):
    federation = Federation.from_tables([table(tmp_path, ["0.1", "5", "2.5"])], SCHEMA)
    np.testing.assert_array_equal(federation.silos[0].budget, [0.1, 5.0, 2.5])
    assert federation.test is not None
    assert federation.test.budget is None, "nobody trains on it"
    assert federation.features == ("age",), "a budget is no feature"


def test_missing_zero_negative_and_infinite_budgets_of_a_table_are_counted_in_one_sentence(tmp_path):
    path = table(tmp_path, ["0.1", "", "0", "-3", "nan", "inf", "much"])
    with pytest.raises(SilodpError, match="'epsilon': 6 of 7 budgets are missing, infinite or not above 0"):
        Federation.from_tables([path], SCHEMA)


@pytest.mark.parametrize("wrong", [0, float("nan"), None, {}, []])
def test_what_is_no_budgets_is_refused_in_a_sentence(wrong):
    with pytest.raises(SilodpError, match="budgets is a"):
        small_federation().with_budgets(wrong)
    with pytest.raises(SilodpError, match="budgets"):
        small_federation().with_budgets([1.0, 2.0])
