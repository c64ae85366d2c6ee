"""The survival family: its intervals, its end of follow-up, and what statsmodels and Cox's model find."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from silodp.config.resolve import load_config
from silodp_analytics.regression.config import derive_regression
from silodp_analytics.regression.families import Survival
from silodp_analytics.regression.newton import Path as NewtonPath
from silodp_analytics.regression.page import write_check
from silodp_analytics.regression.plan import plan_regression
from support.clinics import draw_clinics, write_clinics
from support.refusals import refused
from support.regressions import at_home, derive, fit, iterate, make_rounds

Floats = Any
SILENT = "noise_multiplier = 0.0\niterations = 12"


def draw(seed: int, persons: int, records: int = 1, slopes: Any = (0.6, -0.4, 0.0)) -> tuple[Floats, ...]:
    """Features (n, 4), event and time (n, 2), and persons (n,)."""
    rng = np.random.default_rng(seed)
    person = np.repeat(np.arange(persons), rng.integers(1, records + 1, persons))
    x = rng.uniform(-1, 1, (len(person), 3))
    died, left = rng.exponential(30 * np.exp(-x @ np.array(slopes))), rng.uniform(0, 90, len(x))
    times = np.minimum(died, left).astype(np.float32).astype(float)
    return np.column_stack([np.ones(len(x)), x]), np.column_stack([died <= left, times]), person


# --- events and expected events of a record ---


def test_a_record_has_exposure_in_the_intervals_before_its_time_and_its_event_in_the_last() -> None:
    family = Survival(horizon=10, cuts=(2, 5), largest_hazard=50)
    outcome = np.array([[1, 3.0], [0, 3.0], [1, 2.0], [1, 0.0], [0, 0.0], [1, 10.0], [1, 11.0], [0, 99.0]])
    residual, expected = family.compare(outcome, np.full((8, 3), math.log(0.1)))
    exposure = [[2, 1, 0], [2, 1, 0], [2, 0, 0], [0, 0, 0], [0, 0, 0], [2, 3, 5], [2, 3, 5], [2, 3, 5]]
    # An event at the end of an interval is in it, one at 0 in the first, and one behind the horizon nowhere.
    events = [[0, 1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert expected == pytest.approx(0.1 * np.array(exposure))
    assert residual + expected == pytest.approx(np.array(events))


def test_times_are_compared_as_they_are_read() -> None:
    """6.3 in single precision is above 6.3."""
    family = Survival(horizon=10, cuts=(6.3,), largest_hazard=50)
    time = float(np.float32(6.3))
    assert time > 6.3
    residual, expected = family.compare(np.array([[1.0, time]]), np.zeros((1, 2)))
    assert (residual + expected).tolist() == [[1, 0]]
    assert expected[0, 1] == 0


def test_follow_up_ends_where_the_largest_hazard_is_reached() -> None:
    family = Survival(horizon=10, cuts=(2, 5), largest_hazard=1.0)
    eta = np.log([[0.1, 0.3, 0.5]])
    # Expected events: .2 up to 2, 1.1 up to 5; 1 at 4⅔.
    for time, events, expected in (
        (4.6, 1, [0.2, 0.78, 0]),
        (4.7, 0, [0.2, 0.8, 0]),
        (9.0, 0, [0.2, 0.8, 0]),
    ):
        residual, found = family.compare(np.array([[1.0, time]]), eta)
        assert found[0] == pytest.approx(expected)
        assert (residual + found).sum() == pytest.approx(events)


def test_the_end_of_follow_up_leaves_the_mean_score_at_zero() -> None:
    """Cutting expected events alone, and not the events behind, would not."""
    rng = np.random.default_rng(0)
    times = rng.exponential(4.0, 200_000)
    outcome = np.column_stack([np.ones(len(times)), times])
    eta = np.full((len(times), 1), math.log(1 / 4))
    for most in (0.3, 1.0, 50.0):
        residual, expected = Survival(horizon=10, largest_hazard=most).compare(outcome, eta)
        assert abs(residual.mean()) < 4 * residual.std() / math.sqrt(len(times))
        # What expected events say of events holds for curvature and variance, too.
        assert (residual**2).mean() == pytest.approx(expected.mean(), rel=0.02)


@pytest.mark.parametrize("hazard", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("cuts", [(), (1.0,), (1.0, 2.0)])
def test_no_record_is_longer_than_the_corners_say(hazard: float, cuts: Any) -> None:
    """By search over events, times and rates; and some record reaches them."""
    rng, reached = np.random.default_rng(1), 0.0
    for terms in (1, 4):
        rounds = make_rounds(terms, Survival(horizon=5, cuts=cuts, largest_hazard=hazard))
        features = np.ones((400, 1 + terms))
        for _ in range(60):
            theta = np.zeros(rounds.size)
            theta[: rounds.baselines] = rng.choice([-60.0, 0.0, 2.0, 60.0]) + rng.normal(
                0, 30, rounds.baselines
            )
            times = rng.choice([0, 1e-12, 1, 2, 5], 400) * rng.choice([1, 0.9], 400)
            outcome = np.column_stack([rng.choice([0, 1], 400), times])
            rows = rounds.make_rows(features, outcome, np.arange(400), theta, 3)
            reached = max(reached, np.linalg.norm(rows, axis=1).max())
    assert 0.999 < reached <= 1 + 1e-12


def test_without_a_largest_hazard_it_is_twice_the_typical_one() -> None:
    most = {typical: Survival(horizon=5, typical=typical).most_events for typical in (0.001, 0.3, 0.9)}
    assert most == pytest.approx({0.001: 0.1, 0.3: -2 * math.log(0.7), 0.9: 0.8})


# --- coefficients and errors without noise ---


def split(outcome: Floats, edges: Floats) -> tuple[Floats, ...]:
    """For each record and interval that it enters: record, interval, exposure, event."""
    time = outcome[:, 1:]
    exposure = np.clip(time - edges[:-1], 0, np.diff(edges))
    event = (outcome[:, :1] == 1) & (time > edges[:-1]) & (time <= edges[1:])
    record, interval = np.nonzero(exposure)
    return record, interval, exposure[record, interval], event[record, interval].astype(float)


def test_statsmodels_finds_the_same_to_eight_digits() -> None:
    sm = pytest.importorskip("statsmodels.api")
    family = Survival(horizon=60, cuts=(6, 12, 24), largest_hazard=50, typical=0.7)
    features, outcome, person = draw(3, 300, records=4)
    found = iterate(make_rounds(3, family, 12), features, outcome, person)
    record, interval, exposure, event = split(outcome, np.array(family.edges))
    # The mean is over the records of a person, not over the rows of the split table.
    weight = (1 / np.bincount(person))[person][record]
    with pytest.warns(match="freq_weights"):  # they are no whole numbers
        other = sm.GLM(
            event, np.column_stack([np.eye(4)[interval], features[record, 1:]]), sm.families.Poisson(),
            exposure=exposure, freq_weights=weight,
        ).fit(
            tol=1e-14, tol_criterion="params", cov_type="cluster",
            cov_kwds={"groups": person[record], "use_correction": False},
        )  # fmt: skip
    assert found.theta + family.start * (np.arange(7) < 4) == pytest.approx(other.params, rel=1e-8, abs=1e-10)
    assert found.covariance == pytest.approx(other.cov_params(), rel=1e-8, abs=1e-12)


def test_with_cuts_at_all_times_it_is_the_model_of_cox_with_ties_as_breslow() -> None:
    phreg = pytest.importorskip("statsmodels.duration.hazard_regression").PHReg
    features, outcome, person = draw(5, 120)
    outcome[:, 1] = np.maximum(np.ceil(outcome[:, 1] / 3) * 3, 3)  # with ties
    times = np.unique(outcome[:, 1])
    last = outcome[outcome[:, 0] == 1, 1].max()
    family = Survival(horizon=last, cuts=tuple(times[times < last]), largest_hazard=100, typical=0.9)
    found = iterate(make_rounds(3, family, 25), features, outcome, person)
    other = phreg(outcome[:, 1], features[:, 1:], outcome[:, 0], ties="breslow").fit(
        groups=person,
    )
    assert found.theta[-3:] == pytest.approx(other.params, rel=1e-6, abs=1e-8)
    # PHReg has no error for records that are censored before the first event.
    assert np.sqrt(np.diag(found.covariance))[-3:] == pytest.approx(other.bse, rel=1e-6)


def test_a_center_finds_the_same_by_the_lines_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("statsmodels.api")
    frame = draw_clinics(300, records=3, most_silos=2)
    result = fit(derive(tmp_path, frame, family="survival", asked=SILENT, hazard="50"))
    lines = write_check(result).replace("print(fit.summary())", "")
    known: dict[str, Any] = {"table": at_home(frame).rename(columns={"patient": "person"})}
    with pytest.warns(match="freq_weights"):
        exec(lines, known)
    assert [one.estimate for one in result.coefficients] == pytest.approx(
        known["fit"].params, rel=1e-4, abs=1e-5
    )
    assert [one.standard_error for one in result.coefficients] == pytest.approx(known["fit"].bse, rel=1e-4)


def test_baseline_rates_are_those_of_a_record_in_the_middle(tmp_path: Path) -> None:
    result = fit(derive(tmp_path, draw_clinics(300), family="survival", asked=SILENT, hazard="50"))
    found = {one.term: one.estimate for one in result.coefficients}
    # Ages are 18 to 98, doses 0 to 10; sex and stage are the first ones, and so is their product with age.
    middle = 58 * found["age"] + 5 * found["dose"]
    assert [one.term for one in result.baseline] == ["(rate 0 to 6)", "(rate 6 to 12.3)", "(rate 12.3 to 30)"]
    for one in result.baseline:
        assert one.estimate == pytest.approx(found[one.term] + middle)
        assert one.standard_error < next(c for c in result.coefficients if c.term == one.term).standard_error
    assert [one.term for one in result.shown] == [
        "age", "sex=m", "stage=II", "stage=III", "dose", "age:sex=m",
    ]  # fmt: skip
    rows = result.to_json()["coefficients"]
    assert ["ratio" in row for row in rows] == [False] * 3 + [True] * 6
    assert list(result.table().term) == [one.term for one in result.shown]


def test_the_first_step_starts_where_each_interval_has_the_rate_of_its_own() -> None:
    features, outcome, person = draw(7, 400)
    features = np.column_stack([features[:, 0], np.sign(features[:, 1])])
    family = Survival(horizon=60, cuts=(6, 24), largest_hazard=50, typical=0.05)
    rounds = make_rounds(1, family)
    first = rounds.make_rows(features, outcome, person, np.zeros(4), 0).sum(0, keepdims=True)
    record, interval, exposure, event = split(outcome, np.array(family.edges))
    rates = np.bincount(interval, event) / np.bincount(interval, exposure)
    # The step of Newton's method from there.
    x = np.column_stack([np.eye(3)[interval], features[record, 1]])
    expected = exposure * rates[interval]
    step = np.linalg.solve(x.T @ (x * expected[:, None]), x.T @ (event - expected))
    start = np.append(np.log(rates) - family.start, 0)
    assert rounds.follow(first, 0.0).theta == pytest.approx(start + step)


# --- with noise ---


def test_entries_of_the_curvature_that_can_only_be_noise_are_left_out() -> None:
    rounds = make_rounds(1, Survival(horizon=60, cuts=(6, 24)))
    noise = np.random.default_rng(0).normal(0, 1, (3, rounds.sum_size))
    path = rounds.follow(noise, 1.0)
    for curvature, _ in path.curvatures:
        assert np.count_nonzero(curvature) == 16 - 6
        assert curvature[[0, 0, 1], [1, 2, 2]].tolist() == [0, 0, 0]


def test_the_noise_of_the_curvature_moves_the_step_by_what_is_counted() -> None:
    rng, rounds = np.random.default_rng(0), make_rounds(1, Survival(horizon=60, cuts=(6, 24)))
    step, noise = np.array([1.0, -2.0, 0.5, 1.5]), rng.normal(0, 1, (40_000, 4, 4))
    noise = (noise + noise.transpose(0, 2, 1)) / math.sqrt(2) * rounds.known
    assert np.cov((noise @ step).T) == pytest.approx(NewtonPath(rounds, step).spread(step), abs=0.25)


def test_intervals_cover() -> None:
    """60 seeds; benchmarks/regression.py has the table."""
    truth, persons = np.array([0.6, -0.4, 0.0]), 4000
    rounds = make_rounds(3, Survival(horizon=30, cuts=(6, 12), typical=0.4))
    sigma = 3.73 * math.sqrt((rounds.scales**2).sum())  # ε = 1 at δ = 10⁻⁵
    covered, lost, wide = [], [], []
    for seed in range(60):
        data = draw(seed, persons)
        found = iterate(rounds, *data, sigma, np.random.default_rng([seed, 1]))
        error = np.sqrt(np.diag(found.covariance))[-3:]
        lost.append([why is not None for why in found.find_lost(np.eye(rounds.size))[-3:]])
        covered.append(np.abs(found.theta[-3:] - truth) <= 1.96 * error)
        wide.append(error[2] / math.sqrt(3 / data[1][data[1][:, 1] <= 30, 0].sum()))
    assert np.mean(lost) < 0.03
    assert 0.91 <= np.mean(covered) <= 0.985
    assert np.median(wide) < 1.5


def test_an_interval_without_events_is_lost_and_spoils_no_other(tmp_path: Path) -> None:
    frame = draw_clinics(3000)
    frame = frame[(frame.died == 0) | (frame.months > 6)]
    result = fit(derive(tmp_path, frame, family="survival", asked="epsilon = 8.0", head="seed = 5"))
    assert result.baseline[0].lost is not None
    assert result.baseline[2].lost is None
    slopes = {one.term: one for one in result.slopes}
    assert slopes["stage=III"].lost is None
    assert abs(slopes["stage=III"].estimate - 1.0) < 5 * slopes["stage=III"].standard_error


def test_a_plan_expects_errors_of_intervals_and_terms(tmp_path: Path) -> None:
    resolved = derive(tmp_path, draw_clinics(10), family="survival", asked="epsilon = 1.0")
    plan = plan_regression(resolved, 100_000)
    assert [one["term"] for one in plan["coefficients"]] == resolved.method.design.names
    # At time t a share of .6^(t/30) is without an event; all log rates have the same part of the terms.
    variance = [one["without_noise"] ** 2 for one in plan["coefficients"][:3]]
    events = [100_000 * (0.6 ** (low / 30) - 0.6 ** (high / 30)) for low, high in ((0, 6), (12.3, 30))]
    assert variance[0] - variance[2] == pytest.approx(1 / events[0] - 1 / events[1])
    # .4 of the persons have an event, and a number is spread evenly: 1/√(n·.4/3).
    assert plan["coefficients"][7]["without_noise"] == pytest.approx(math.sqrt(3 / 40_000) / 5, rel=0.01)
    assert not plan["warnings"]
    assert plan_regression(resolved, 100)["warnings"]


# --- refusals ---


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ("cuts = [6, 6]", "argument.value"),
        ("cuts = [12, 6]", "argument.value"),
        ("cuts = [0, 6]", "argument.value"),
        ("cuts = [6, 30]", "argument.value"),
        ("cuts = [29.99999999]", "argument.value"),
        ("cuts = [nan]", "argument.value"),
        ("cuts = 6", None),
        ("horizon = 0", "argument.value"),
        ("horizon = inf", "argument.value"),
        ("largest_hazard = 0", "argument.value"),
        ("typical = 1.0", "argument.value"),
        ("name = 'logistic'", None),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(asked: str, code: str | None, tmp_path: Path) -> None:
    path = write_clinics(tmp_path, draw_clinics(5), family="survival", asked="epsilon = 1.0")
    name, _, value = asked.partition(" = ")
    with refused(code) if code else pytest.raises(Exception, match="cuts"):
        derive_regression(load_config(path, [f"regression.family.{name}={value}"]))


def test_the_label_must_be_a_time_until_an_event(tmp_path: Path) -> None:
    path = write_clinics(tmp_path, draw_clinics(5), asked="epsilon = 1.0")
    with refused("regression.outcome"):
        derive_regression(load_config(path, ["regression.family={name='survival', horizon=30}"]))
    path = write_clinics(tmp_path, draw_clinics(5), family="survival", asked="epsilon = 1.0")
    for wrong in ("outcome='months'", "event='1'", "family='logistic'"):
        with refused("regression.outcome"):
            derive_regression(load_config(path, [f"regression.{wrong}"]))


def test_a_method_is_made_again_from_its_table(tmp_path: Path) -> None:
    resolved = derive(tmp_path, draw_clinics(5), family="survival", asked="epsilon = 1.0")
    (tmp_path / "run.toml").write_text(resolved.config.to_toml())
    again = load_config(tmp_path / "run.toml").method
    assert again == resolved.method
    assert hash(again) == hash(resolved.method)
