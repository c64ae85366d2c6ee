"""Regression: how far one person moves each sum, what a round costs, and whether coefficients and errors are right."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from scipy.stats import norm

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Gaussian, Skellam
from silodp.aggregators import Masked, Plain
from silodp.config.resolve import ResolvedRun, load_config
from silodp.mechanisms.clipping import add_weighted_rows
from silodp.methods.roles import FederationSize
from silodp.runtime.train import train
from silodp_analytics.regression import read_result, regress
from silodp_analytics.regression.config import derive_regression
from silodp_analytics.regression.families import Family, Linear, Logistic, Poisson, Survival
from silodp_analytics.regression.method import Regression
from silodp_analytics.regression.newton import LAST, Rounds
from silodp_analytics.regression.page import write_check
from silodp_analytics.regression.result import format_by_width
from support.clinics import KINDS, draw_clinics, write_clinics
from support.refusals import refused
from support.regressions import at_home, derive, fit, iterate, make_rounds
from support.sums import list_streams

Floats = Any
SILENT = "noise_multiplier = 0.0\niterations = 12"
FAMILIES: list[Family] = [
    Logistic(),
    Logistic(typical=0.02),
    Linear(residual=2.0, typical=1.0),
    Poisson(largest=6, typical=2.5),
    Survival(horizon=5, cuts=(1, 2.5)),
    Survival(horizon=5, cuts=(1,), largest_hazard=3.0, typical=0.97),
    Survival(horizon=5, largest_hazard=0.4),
]


def draw_outcomes(family: Family, rng: np.random.Generator, count: int) -> Floats:
    """Outcomes as an attacker would choose them."""
    if family.label == "classes":
        return rng.choice([0.0, 1.0], count)
    if family.label == "real":
        return rng.choice([-1e9, 0.0, 1.5, family.start, 1e9], count)
    times = rng.choice([0.0, 1e-9, 1.0, 1.0001, 2.5, 5.0, 1e9], count)
    return np.column_stack(
        [rng.choice([0.0, 1.0], count), np.where(rng.random(count) < 0.5, times, rng.uniform(0, 6, count))]
    )


def columns_of(frame: pd.DataFrame) -> Floats:
    """The table's own columns, in the order of the coefficients."""
    age = frame.age.to_numpy()
    sex, stages = (
        (frame.sex == "m").to_numpy(float),
        [(frame.stage == one).to_numpy(float) for one in ("II", "III")],
    )
    dose = frame.dose.to_numpy()
    return np.column_stack([np.ones(len(frame)), age, sex, *stages, dose, age * sex])


# --- how far one person moves a sum ---


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(FAMILIES), st.integers(0, 3), st.floats(-8, 3))
def test_a_row_is_never_longer_than_its_round_allows(
    seed: int, family: Family, round_: int, size: float
) -> None:
    rng = np.random.default_rng(seed)
    terms = int(rng.integers(1, 6))
    rounds = make_rounds(terms, family)
    person = np.sort(rng.integers(0, 6, 20))
    corners = rng.choice([-1.0, 1.0], (20, terms))
    features = np.column_stack(
        [np.ones(20), np.where(rng.random((20, 1)) < 0.5, corners, rng.uniform(-1, 1, (20, terms)))]
    )
    outcome = draw_outcomes(family, rng, 20)
    theta = rng.normal(0, 10**size, rounds.size)
    rows = rounds.make_rows(features, outcome, person, theta, round_)
    assert np.linalg.norm(rows, axis=1).max() <= rounds.scales[round_] * (1 + 1e-12)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("round_", [0, 3])
def test_a_person_at_every_limit_reaches_the_bound(family: Family, round_: int) -> None:
    """Without this, bounds could be so wide that the noise is wasted."""
    rng, rounds = np.random.default_rng(0), make_rounds(2, family)
    reached = [
        np.linalg.norm(
            rounds.make_rows(np.ones((30, 3)), draw_outcomes(family, rng, 30), np.arange(30), theta, round_),
            axis=1,
        ).max()
        for theta in rng.choice([-50.0, -1.0, 0.0, 1.0, 50.0], (40, rounds.size))
    ]
    assert max(reached) >= 0.7 * rounds.scales[round_]


def test_the_longest_row_of_a_logistic_regression_is_that_of_its_round() -> None:
    """At residuals from 0 to 1 with all features at their ends: long scores have little curvature."""
    rounds = make_rounds(3, Logistic())
    eta = np.linspace(-30, 30, 2001)
    for round_ in (1, 3):
        rows = [
            rounds.make_rows(
                np.ones((1, 4)), np.array([y]), np.zeros(1, int), np.array([one, 0, 0, 0]), round_
            )
            for one in eta
            for y in (0.0, 1.0)
        ]
        longest = np.linalg.norm(np.concatenate(rows), axis=1).max() / rounds.scales[round_]
        assert 0.99 < longest <= 1 + 1e-12


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_bits_of_a_row_depend_on_the_records_of_its_person_alone(family: Family) -> None:
    """Else rounding lets others move it, with a model chosen for that."""
    rng = np.random.default_rng(2)
    rounds = make_rounds(5, family)
    person = np.sort(rng.integers(0, 90, 333))
    features = np.column_stack([np.ones(333), rng.uniform(-1, 1, (333, 5))])
    outcome, theta = draw_outcomes(family, rng, 333), rng.normal(0, 3, rounds.size)
    rows = rounds.make_rows(features, outcome, person, theta, 3)
    for place, who in enumerate(np.unique(person)):
        own = person == who
        alone = rounds.make_rows(features[own], outcome[own], person[own], theta, 3)
        assert alone[0].tobytes() == rows[place].tobytes()


def test_a_record_that_is_not_finite_spoils_the_row_of_its_person_alone() -> None:
    rounds = Rounds(2, 1, Logistic(), 4)
    features = np.array([[1, 0.5], [1, np.nan], [1, 0.25]])
    rows = rounds.make_rows(features, np.ones(3), np.arange(3), np.ones(2), 3)
    assert np.isfinite(rows).all(1).tolist() == [True, False, True]


def exact_sums(
    method: Regression, resolved: ResolvedRun, theta: Floats, round_: int, skip: int | None
) -> Floats:
    federation = resolved.load_federation()
    task = resolved.build_task(federation)
    total = np.zeros(method.sum_size(0))
    for stream, weights in list_streams(method, federation, task, skip, round=round_, state={"theta": theta}):
        chunks = list(stream.chunks)
        # The clip is a guard only: it shortens nobody.
        assert all(bool((chunk.factors == 1).all()) for chunk in chunks)
        total += add_weighted_rows(replace(stream, chunks=chunks), weights).value.numpy()
    return total


@pytest.mark.parametrize(
    ("weighting", "family"),
    [
        *(("primary_silo", one) for one in KINDS),
        *((one, "logistic") for one in ("uniform", "present", "records")),
    ],
)
def test_removing_a_person_moves_each_sum_by_at_most_the_length_of_its_round(
    weighting: str, family: str, tmp_path: Path
) -> None:
    resolved = derive(tmp_path, draw_clinics(25, records=6, most_silos=3), family=family, asked=SILENT)
    method = replace(resolved.method, weighting=weighting)
    size = method.rounds.size
    for round_, theta in ((0, np.zeros(size)), (3, np.full(size, 0.7)), (11, np.full(size, -9.0))):
        whole = exact_sums(method, resolved, theta, round_, None)
        moves = [np.linalg.norm(whole - exact_sums(method, resolved, theta, round_, u)) for u in range(25)]
        scale = method.rounds.scales[round_]
        assert max(moves) <= scale * (1 + 1e-9)
        assert max(moves) > 0.05 * scale


# --- what is drawn is what is charged ---


def test_rounds_are_charged_with_the_noise_that_is_drawn(tmp_path: Path) -> None:
    resolved = derive(tmp_path, draw_clinics(40), asked="epsilon = 1.0")
    spec, _ = resolved.build_public_spec(80)
    method = spec.method
    assert isinstance(method, Regression)
    sigma, scales = method.noise_multiplier, method.rounds.scales
    # Drawn: the deviation of the noise in the sum of all silos, in every round the same.
    drawn = method.noise_std(spec.population)
    assert drawn == pytest.approx(sigma)
    # Charged: in round r, noise per length of a row.
    events = [spec.round_events(None, r)["released"] for r in range(4)]
    assert events == [Gaussian(sigma / scale) for scale in scales]
    # As one Gaussian release of the whole: 1/σ² is what all rounds together cost.
    whole = 1 / math.sqrt(sum((scale / sigma) ** 2 for scale in scales))
    assert whole == pytest.approx(sigma * math.sqrt(LAST))
    printed = compute_epsilon(Counter(events).items(), 1e-5, "pld")
    mu = 1 / whole
    delta = norm.cdf(-printed / mu + mu / 2) - math.exp(printed) * norm.cdf(-printed / mu - mu / 2)
    assert printed <= 1.0
    assert delta == pytest.approx(1e-5, rel=2e-3)


def test_a_run_reports_the_epsilon_of_its_unequal_rounds(tmp_path: Path) -> None:
    resolved = derive(tmp_path, draw_clinics(40), asked="epsilon = 1.0")
    federation = resolved.load_federation()
    result = train(federation, resolved.build_task(federation), resolved.method, **resolved.settings())
    spent = [row["epsilon"]["released"] for row in result.metrics]
    assert 0.99 <= spent[-1] <= 1.0
    assert result.guarantees["released"].epsilon == pytest.approx(spent[-1])
    sigma, scales = resolved.method.noise_multiplier, resolved.method.rounds.scales
    assert [result.charges.charged["released"][Gaussian(sigma / s)] for s in scales] == [2, 2, 1, 1]
    # The first rounds have a small share of the budget, and are charged with it alone.
    assert spent[1] < 0.4 < spent[3] < 0.7


def test_integer_noise_is_charged_with_the_steps_of_the_shortest_rows(tmp_path: Path) -> None:
    resolved = derive(tmp_path, draw_clinics(40), asked="epsilon = 1.0", head='aggregator = "masked"')
    spec, _ = resolved.build_public_spec(80)
    scales = spec.method.rounds.scales
    (units,) = {int(spec.aggregator.ring(spec)[1] ** -1)}
    for round_ in range(4):
        event = spec.round_events(None, round_)["released"]
        assert isinstance(event, Skellam)
        assert event.units <= units * scales.min()
        assert event.noise_multiplier == pytest.approx(spec.method.noise_multiplier / scales[round_])


def test_the_noise_in_sums_has_the_stated_deviation(tmp_path: Path) -> None:
    frame = draw_clinics(30)
    resolved = derive(tmp_path, frame, asked="noise_multiplier = 3.0")
    drawn = [
        np.array(row["regression"]["sum"]) for seed in range(12) for row in _rows(resolved, seed=seed)[1:2]
    ]
    silent = np.array(
        _rows(replace(resolved, method=replace(resolved.method, noise_multiplier=0.0)))[1]["regression"][
            "sum"
        ]
    )
    assert (np.stack(drawn) - silent).std() == pytest.approx(3.0, rel=0.1)


def _rows(resolved: ResolvedRun, **changes: Any) -> Any:
    federation = resolved.load_federation()
    return train(
        federation, resolved.build_task(federation), resolved.method, **{**resolved.settings(), **changes}
    ).metrics


# --- coefficients and errors without noise ---


def solve(x: Floats, y: Floats, weight: Floats, person: Floats, family: str) -> tuple[Floats, Floats, Floats]:
    """Coefficients, their covariance and the inverse curvature: the root of the weighted score, and its sandwich."""
    center, spread = x.mean(0), np.where(x.std(0) > 0, x.std(0), 1)
    center[0], beta = 0.0, np.zeros(x.shape[1])
    z = (x - center) / spread
    mean = {"logistic": expit, "poisson": np.exp, "linear": lambda eta: eta}[family]
    if family == "poisson":
        beta[0] = math.log(y.mean())
    for _ in range(60):
        mu = mean(z @ beta)
        v = {"logistic": mu * (1 - mu), "poisson": mu, "linear": np.ones_like(mu)}[family]
        beta = beta + np.linalg.solve((z * (v * weight)[:, None]).T @ z, z.T @ (weight * (y - mu)))
    change = np.diag(1 / spread)
    change[0] -= center / spread
    mu = mean(z @ beta)
    v = {"logistic": mu * (1 - mu), "poisson": mu, "linear": np.ones_like(mu)}[family]
    inverse = np.linalg.inv((x * (v * weight)[:, None]).T @ x)
    scores = pd.DataFrame(x * (weight * (y - mu))[:, None]).groupby(person).sum().to_numpy()
    return change @ beta, inverse @ (scores.T @ scores) @ inverse, inverse


@pytest.mark.parametrize("family", ["logistic", "linear", "poisson"])
def test_without_noise_coefficients_and_errors_are_those_of_a_weighted_glm(
    family: str, tmp_path: Path
) -> None:
    frame = draw_clinics(150, records=4, most_silos=3)
    asked = SILENT.replace("12", "25") if family == "poisson" else SILENT
    result = fit(derive(tmp_path, frame, family=family, asked=asked))
    home = at_home(frame)
    x, person = columns_of(home), home.patient.to_numpy()
    y = (home.readmitted == "yes").to_numpy(float) if family == "logistic" else home.days.to_numpy(float)
    weight = 1 / home.groupby("patient").patient.transform("size").to_numpy()
    beta, covariance, _ = solve(x, y, weight, person, family)
    assert [one.term for one in result.coefficients] == [
        "(intercept)", "age", "sex=m", "stage=II", "stage=III", "dose", "age:sex=m",
    ]  # fmt: skip
    # Features are single precision: 10⁻⁷ of a range.
    assert [one.estimate for one in result.coefficients] == pytest.approx(beta, rel=2e-5, abs=1e-6)
    assert [one.standard_error for one in result.coefficients] == pytest.approx(
        np.sqrt(np.diag(covariance)), rel=1e-5
    )
    assert result.covariance == pytest.approx(covariance, rel=1e-4, abs=1e-9)
    assert [one.noise_share for one in result.coefficients] == [0] * 7


@pytest.mark.parametrize("family", ["logistic", "linear", "poisson"])
def test_in_double_precision_statsmodels_finds_the_same_to_eight_digits(family: str) -> None:
    sm = pytest.importorskip("statsmodels.api")
    kinds = {
        "logistic": Logistic(),
        "linear": Linear(residual=50.0),
        "poisson": Poisson(largest=50, typical=1.0),
    }
    links = {"logistic": sm.families.Binomial, "linear": sm.families.Gaussian, "poisson": sm.families.Poisson}
    rng = np.random.default_rng(3)
    person = np.repeat(np.arange(200), rng.integers(1, 5, 200))
    z = np.column_stack([np.ones(len(person)), rng.uniform(-1, 1, (len(person), 3))])
    eta = z @ [0.2, 0.8, -0.5, 0.0]
    y = {"logistic": (rng.random(len(eta)) < expit(eta)) * 1.0, "linear": eta + rng.normal(0, 1, len(eta)),
         "poisson": rng.poisson(np.exp(eta)) * 1.0}[family]  # fmt: skip
    rounds = Rounds(4, 3, kinds[family], 20)
    found = iterate(rounds, z, y, person)
    scale, start = kinds[family].scale, kinds[family].start
    weight = 1 / np.bincount(person)[person]
    kwds = {"groups": person, "use_correction": False}
    with pytest.warns(match="freq_weights"):  # they are no whole numbers
        other = sm.GLM(y, z, links[family](), freq_weights=weight).fit(
            tol=1e-14, tol_criterion="params", cov_type="cluster", cov_kwds=kwds
        )
    assert np.add(found.theta, [start, 0, 0, 0]) * scale == pytest.approx(other.params, rel=1e-8, abs=1e-10)
    assert found.covariance * scale**2 == pytest.approx(other.cov_params(), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("family", ["logistic", "poisson"])
def test_a_center_finds_the_same_of_limited_and_missing_numbers(family: str, tmp_path: Path) -> None:
    pytest.importorskip("statsmodels.api")
    frame = draw_clinics(300, records=3, most_silos=2)
    frame.loc[frame.index % 7 == 0, "age"] = np.nan
    path = write_clinics(tmp_path, frame, family=family, asked=SILENT.replace("12", "25"))
    path.write_text(
        path.read_text()
        .replace("[data.schema]", '[data.schema]\nout_of_range = "clip"')
        .replace("age = [18, 98]", 'age = { range = [18, 90], missing = "indicator" }')
    )
    result = fit(derive_regression(load_config(path)))
    known: dict[str, Any] = {"table": at_home(frame).rename(columns={"patient": "person"})}
    with pytest.warns(match="freq_weights"):  # they are no whole numbers
        exec(write_check(result).replace("print(fit.summary())", ""), known)
    assert (known["table"].age > 90).any()
    assert list(known["fit"].params.index) == [one.term for one in result.coefficients]
    assert [one.estimate for one in result.coefficients] == pytest.approx(
        known["fit"].params.to_numpy(), rel=1e-4, abs=1e-5
    )
    assert [one.standard_error for one in result.coefficients] == pytest.approx(
        known["fit"].bse.to_numpy(), rel=1e-4
    )
    known["table"].loc[known["table"].index[0], "stage"] = None
    with pytest.raises(AssertionError):
        exec(write_check(result), known)


@pytest.mark.parametrize("noise", ["noise_multiplier = 0.0", "noise_multiplier = 9.0"])
@pytest.mark.parametrize("family", ["logistic", "linear", "poisson", "survival"])
def test_the_page_counts_persons_and_events(family: str, noise: str, tmp_path: Path) -> None:
    frame = draw_clinics(900, records=3, most_silos=2)
    result = fit(derive(tmp_path, frame, family=family, asked=noise, residual="2.5", hazard="40"))
    home = at_home(frame)
    if family == "survival":
        late = home.months > 30
        event, months = (home.died == 1) & ~late, home.months.clip(upper=30)
        count = home.groupby("patient").patient.transform("size")
        expected = [(event / count).sum(), (months / count).sum()]
    else:
        y = (home.readmitted == "yes") if family == "logistic" else home.days
        mean = y.groupby(home.patient).mean()
        within = (abs(home.days - 3) <= 2.5).groupby(home.patient).mean()
        expected = [within.sum()] if family == "linear" else [len(mean), mean.sum()]
    assert len(result.totals) == len(expected)
    for one, value in zip(result.totals, expected, strict=True):
        # Without noise rounded times and outcomes are left; seven errors of noise are hardly ever exceeded.
        assert abs(one.value - value) <= 7 * one.error + 1e-4 * value
        assert (one.error > 0) == ("9.0" in noise)
    assert "By the noisy sums" in "".join(result.format())


def test_totals_have_the_stated_error() -> None:
    rng, rounds = np.random.default_rng(2), Rounds(3, 2, Logistic(typical=0.3), 4)
    found = []
    for _ in range(400):
        release = rounds.read_release(rng.normal(0, 5.0, rounds.sum_size), 5.0, 0)
        totals = rounds.family.list_totals(
            release.score[:1], release.curvature.diagonal()[:1], release.score_std, release.curvature_std
        )
        found.append([one.value / one.error for one in totals])
    assert np.std(found, axis=0) == pytest.approx([1, 1], abs=0.12)


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (1.02843, 0.0040, "1.0284"),
        (1.3737, 0.25, "1.37"),
        (9109.3, 85.0, "9109"),
        (-2.4, 0.28, "-2.40"),
        (1.23456e9, 2e7, "1.235e+09"),
        (1.23e-12, 4e-14, "1.23e-12"),
        (0.5, 0.0, "0.5"),
        (0.00099, 0.000099, "0.000990"),
    ],
)
def test_a_number_has_two_figures_of_its_interval(value: float, width: float, text: str) -> None:
    assert format_by_width(value, width) == text


def test_with_several_silos_the_errors_are_those_of_the_sum_over_silos(tmp_path: Path) -> None:
    """M = Σ_p Σ_s w·uuᵀ, which no package has."""
    frame = draw_clinics(150, records=3, most_silos=3)
    result = fit(derive(tmp_path, frame, asked=SILENT + '\nweighting = "records"'))
    x, y = columns_of(frame), (frame.readmitted == "yes").to_numpy(float)
    total = frame.groupby("patient").patient.transform("size").to_numpy()
    here = frame.groupby(["patient", "hospital"]).patient.transform("size").to_numpy()
    # w = here/total times the mean over the records here: 1/total each.
    beta, _, inverse = solve(x, y, 1 / total, frame.patient.to_numpy(), "logistic")
    scores = x * ((y - expit(x @ beta)) / here)[:, None]
    keys = [frame.patient.to_numpy(), frame.hospital.to_numpy()]
    u = pd.DataFrame(scores).groupby(keys).sum().to_numpy()
    w = pd.Series(here / total).groupby(keys).first().to_numpy()
    expected = inverse @ ((u * w[:, None]).T @ u) @ inverse
    assert [one.estimate for one in result.coefficients] == pytest.approx(beta, rel=2e-5, abs=1e-6)
    assert result.covariance == pytest.approx(expected, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("family", ["logistic", "linear", "poisson", "survival"])
def test_a_silo_where_nobody_counts_takes_part(family: str, tmp_path: Path) -> None:
    """Each of its patients has more records elsewhere."""
    frame = draw_clinics(150)
    frame.loc[frame.hospital == "west", "hospital"] = "north"
    twice = pd.concat([frame, frame])
    asked = SILENT.replace("12", "25")
    found = []
    for step in (5, 10):  # other patients in the west
        few = frame[frame.index % step == 0].assign(hospital="west")
        result = fit(derive(tmp_path, pd.concat([twice, few]), family=family, asked=asked))
        found.append([one.estimate for one in result.coefficients])
    assert found[0] == found[1]


def test_residuals_beyond_the_bound_count_as_the_bound(tmp_path: Path) -> None:
    frame = draw_clinics(120)
    result = fit(derive(tmp_path, frame, family="linear", asked=SILENT.replace("12", "30"), residual="1.5"))
    home = at_home(frame)
    x, y = columns_of(home), home.days.to_numpy(float)
    weight = 1 / home.groupby("patient").patient.transform("size").to_numpy()
    beta = np.array([one.estimate for one in result.coefficients])
    score = x.T @ (weight * np.clip(y - x @ beta, -1.5, 1.5))
    assert (np.abs(y - x @ beta) > 1.5).mean() > 0.05
    assert np.abs(score / np.abs(x).max(0)).max() < 1e-3


def test_the_first_class_can_be_the_event(tmp_path: Path) -> None:
    frame = draw_clinics(100)
    second = fit(derive(tmp_path, frame, asked=SILENT))
    first = fit(derive(tmp_path, frame, asked=SILENT + '\nevent = "no"'))
    assert [one.estimate for one in first.coefficients] == pytest.approx(
        [-one.estimate for one in second.coefficients]
    )


def test_masked_sums_give_what_plain_ones_do(tmp_path: Path) -> None:
    frame = draw_clinics(300)
    estimates = []
    for aggregator in (Plain(), Masked()):
        # Noise so small that the truncation of rows is what is left.
        resolved = derive(tmp_path, frame, asked="noise_multiplier = 0.001")
        result = fit(resolved, aggregator=aggregator)
        estimates.append([one.estimate / one.standard_error for one in result.coefficients])
    assert estimates[0] == pytest.approx(estimates[1], abs=0.05)


# --- what is said of what is lost ---


def test_a_category_whose_records_all_have_the_event_is_lost(tmp_path: Path) -> None:
    frame = draw_clinics(2000)
    frame.loc[frame.stage == "III", "readmitted"] = "yes"
    result = fit(derive(tmp_path, frame, asked="epsilon = 8.0", head="seed = 5"))
    found = {one.term: one for one in result.coefficients}
    lost = found["stage=III"]
    assert lost.lost is not None
    assert lost.interval is None
    assert lost.p is None
    assert lost.z is None
    assert found["stage=II"].lost is None
    row = next(one for one in result.to_json()["coefficients"] if one["term"] == "stage=III")
    assert row["ratio"] is None
    assert row["ratio_interval"] is None


def test_few_persons_are_lost_in_the_noise_and_the_plan_says_so(tmp_path: Path) -> None:
    from silodp_analytics.regression.plan import format_regression_plan, plan_regression

    resolved = derive(tmp_path, draw_clinics(60), asked="epsilon = 0.5")
    assert all(one.lost for one in fit(resolved).coefficients[1:])
    plan = plan_regression(resolved, 60)
    assert plan["warnings"]
    assert all(one["lost"] for one in plan["coefficients"][1:])
    assert "for predictions alone, train a model" in format_regression_plan(plan)[-2]
    of_many = plan_regression(resolved, 10**6)
    assert not of_many["warnings"]
    assert "for predictions it is as good" in format_regression_plan(of_many)[-1]
    assert 1 <= of_many["error_ratio"] < 1.1 < plan["error_ratio"]


def test_intervals_cover_and_tests_keep_their_size() -> None:
    """150 seeds; benchmarks/regression.py has the table."""
    rng, rounds = np.random.default_rng(0), Rounds(3, 2, Logistic(), 4)
    truth, seeds = np.array([-0.5, 0.7, 0.0]), 150
    # ε = 1 at δ = 10⁻⁵ is one Gaussian release of σ = 3.73.
    sigma = 3.73 * math.sqrt((rounds.scales**2).sum())
    covered, sizes, wide, lost = [], [], [], []
    for _ in range(seeds):
        z = np.column_stack([np.ones(4000), rng.uniform(-1, 1, (4000, 2))])
        y = (rng.random(4000) < expit(z @ truth)).astype(float)
        found = iterate(rounds, z, y, np.arange(4000), sigma, rng)
        theta, error = found.theta, np.sqrt(np.diag(found.covariance))
        lost.append([why is not None for why in found.find_lost(np.eye(3))])
        covered.append(np.abs(theta - truth) <= 1.96 * error)
        sizes.append(abs(theta[2]) > 1.96 * error[2])
        wide.append(error[2] / math.sqrt(1 / (4000 * 0.22 / 3)))
    assert np.mean(lost) < 0.02
    assert 0.92 <= np.mean(covered) <= 0.98
    assert np.mean(sizes) <= 0.1
    assert np.median(wide) < 1.35


# --- refusals, and the forms of a result ---


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ('terms = ["age", "weight"]', "regression.terms"),
        ('terms = ["age", "age"]', "regression.terms"),
        ('terms = ["age:sex", "age", "sex", "sex:age"]', "regression.terms"),
        ('terms = ["age", "age:sex"]', "regression.terms"),
        ('terms = ["age:age"]', "regression.terms"),
        ("terms = []", "regression.terms"),
        ('outcome = "age"', "regression.outcome"),
        ('event = "maybe"', "regression.outcome"),
        ('family = { name = "poisson", largest = 20 }', "regression.outcome"),
        ('family = "logit"', None),
        ("iterations = 2", "argument.value"),
        ("iterations = 1000", "argument.value"),
        ("interval = 1.0", "argument.value"),
        ("noise_multiplier = 3.0", "argument.conflict"),
        ("epsilon = 0.0", "argument.value"),
    ],
)
def test_what_cannot_be_is_refused_before_any_data_are_read(
    asked: str, code: str | None, tmp_path: Path
) -> None:
    path = write_clinics(tmp_path, draw_clinics(5), asked="epsilon = 1.0")
    for hospital in ("north", "south", "west"):
        (tmp_path / f"{hospital}.csv").write_text("not a table")
    name, _, value = asked.partition(" = ")
    with refused(code) if code else pytest.raises(Exception, match="logit"):
        derive_regression(load_config(path, [f"regression.{name}={value}"]))


def test_a_sum_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    method = derive(tmp_path, draw_clinics(10), asked="epsilon = 1.0").method
    size = FederationSize(3, 20)
    state = method.initial_state(size)
    total = torch.full((method.sum_size(0),), math.nan, dtype=torch.float64)
    _, after = method.split_sum(total, state, size)
    assert all((after[name] == state[name]).all() for name in state)


def test_a_run_has_as_many_rounds_as_iterations(tmp_path: Path) -> None:
    resolved = derive(tmp_path, draw_clinics(10), asked="epsilon = 1.0")
    federation = resolved.load_federation()
    settings_ = {**resolved.settings(), "rounds": 3}
    with refused("regression.rounds"):
        train(federation, resolved.build_task(federation), resolved.method, **settings_)


def test_a_result_is_a_table_a_picture_and_json(tmp_path: Path) -> None:
    path = write_clinics(tmp_path, draw_clinics(400), asked="epsilon = 6.0", head="seed = 2")
    result = regress(path, out=tmp_path / "run")
    table = result.table()
    assert list(table.term) == [one.term for one in result.coefficients]
    known = table[table.lost == ""]
    assert (known["ratio low"] < known["odds ratio"]).all()
    assert np.log(known["odds ratio"]).to_numpy() == pytest.approx(known.coefficient.to_numpy())
    again = read_result(tmp_path / "run")
    assert again.to_json() == result.to_json()
    assert result.epsilon["released"] == pytest.approx(6.0, rel=0.02)
    assert len(result.plot().axes[0].get_yticks()) == 6
