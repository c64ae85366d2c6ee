"""Metrics from tables of counts: exact where a table keeps what the metric needs, inside the band where it does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, mean_absolute_error, r2_score

from silodp.training.metrics import accuracy, concordance, roc_auc
from silodp_analytics.counts import CountTable
from support.refusals import refused


def count(table: CountTable, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.bincount(table.find_cells(outputs, targets).flatten(), minlength=table.size).double()


def two_classes(seed: int, records: int = 300, ties: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = (torch.rand(records, generator=generator) < 0.4).long()
    scores = torch.randn(records, generator=generator) * 2 + targets
    return (scores.round() if ties else scores), targets


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("bins", [2, 10, 100])
def test_two_classes(seed: int, ties: bool, bins: int) -> None:
    outputs, targets = two_classes(seed, ties=ties)
    table = CountTable("scores", bins=bins)
    counts = count(table, outputs, targets)
    found = table.estimate(counts, 0.0)
    assert found["accuracy"].value == pytest.approx(accuracy(outputs, targets), abs=1e-12)
    assert found["accuracy"].low == found["accuracy"].high == found["accuracy"].value
    auc = found["roc_auc"]
    assert auc.low - 1e-12 <= roc_auc(outputs, targets) <= auc.high + 1e-12
    assert auc.low < auc.value < auc.high
    assert auc.standard_error == 0
    confusion = table.confusion(counts)
    assert confusion is not None
    assert np.array_equal(confusion.numpy(), confusion_matrix(targets, outputs > 0))


def numbers(seed: int, records: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels as a model gets them, in spreads, some of them beyond four; outputs that explain a part of them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randn(records, generator=generator) * 1.5
    return 0.7 * labels + 0.6 * torch.randn(records, generator=generator), labels


def survival(seed: int, records: int = 150) -> tuple[torch.Tensor, torch.Tensor]:
    """Log hazards, and pairs of event and time."""
    generator = torch.Generator().manual_seed(seed)
    hazard = torch.randn(records, generator=generator)
    time = torch.rand(records, generator=generator) * 10 * torch.exp(-hazard / 2)
    event = (torch.rand(records, generator=generator) < 0.6).float()
    return hazard, torch.stack([event, time], dim=1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bins", [8, 32, 1000])
def test_numbers(seed: int, bins: int) -> None:
    """By scikit-learn, of values that count as four spreads beyond four: inside the band, and close with fine bins."""
    outputs, labels = numbers(seed)
    found = (table := CountTable("numbers", bins=bins, spread=12.0)).estimate(
        count(table, outputs, labels), 0.0
    )
    error = (labels.double() - outputs.double()).clamp(-4, 4)
    label = labels.double().clamp(-4, 4)
    assert bool((labels.abs() > 4).any())
    exact = {
        "mean_absolute_error": 12.0 * mean_absolute_error(error, torch.zeros_like(error)),
        "r2": r2_score(label, label - error),
    }
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        one = found[name]
        assert one.low <= value <= one.high
        assert one.low < one.value < one.high
        assert one.value == pytest.approx(value, abs={8: 1.5, 32: 0.3, 1000: 0.01}[bins])


def test_r2_is_left_out_where_labels_lie_in_one_bin() -> None:
    table, labels = CountTable("numbers"), torch.full((50,), 0.3)
    assert table.estimate(count(table, torch.zeros(50), labels), 0.0).keys() == {"mean_absolute_error"}


def test_values_beyond_and_infinite_ones_have_a_bin() -> None:
    table = CountTable("numbers", bins=8)
    labels = torch.tensor([-9.0, -4.0, 0.0, 3.99, 4.0, 9.0])
    assert table.find_cells(torch.zeros(6), labels).tolist() == [[b, 10 + b] for b in (0, 1, 5, 8, 9, 9)]
    lost = torch.tensor([math.nan, math.inf, -math.inf])
    assert table.find_cells(lost, torch.zeros(3))[:, 0].tolist() == [9, 0, 9]


@pytest.mark.parametrize("kind", ["scores", "classes", "numbers", "survival"])
def test_the_sampling_error_is_that_of_another_sample(kind: str) -> None:
    """Samples of 400 records are drawn many times: values scatter by the stated error, which each of them states."""
    values: dict[str, list[float]] = {}
    stated: dict[str, list[float]] = {}
    for seed in range(400):
        if kind == "numbers":
            table, (outputs, targets) = CountTable("numbers", bins=32), numbers(seed, 400)
        elif kind == "survival":
            edges = tuple(np.linspace(0.1, 9, 20).tolist())
            table, (outputs, targets) = CountTable("survival", bins=20, times=edges), survival(seed, 400)
        else:
            outputs, targets = two_classes(seed, 400)
            table = CountTable(kind, bins=20)  # type: ignore[arg-type]
            outputs = torch.stack([-outputs / 2, outputs / 2], 1) if kind == "classes" else outputs
        for name, one in table.estimate(count(table, outputs, targets), 0.0).items():
            if one.sampling_error is not None:
                values.setdefault(name, []).append(one.value)
                stated.setdefault(name, []).append(one.sampling_error)
    expected = {
        "scores": {"accuracy", "roc_auc"},
        "classes": {"accuracy"},
        "numbers": {"mean_absolute_error", "r2"},
        "survival": {"concordance"},
    }
    assert values.keys() == expected[kind]
    for name, found in values.items():
        # Hanley and McNeil's is for exponential scores: for others it is a little too large or too small.
        if name == "r2":  # an upper bound
            assert np.std(found) <= np.mean(stated[name]) <= 1.8 * np.std(found)
            continue
        assert np.mean(stated[name]) == pytest.approx(np.std(found), rel=0.12), name


def test_finer_bins_narrow_the_band() -> None:
    outputs, targets = two_classes(0)
    widths = [
        (auc := table.estimate(count(table, outputs, targets), 0.0)["roc_auc"]).high - auc.low
        for table in (CountTable("scores", bins=bins) for bins in (4, 20, 200))
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.02


def test_one_bin_of_each_score_gives_the_area_itself() -> None:
    """Scores that lie in bins of their own have no ties but real ones."""
    outputs, targets = two_classes(1, ties=True)
    table = CountTable("scores", bins=1000)
    found = table.estimate(count(table, outputs, targets), 0.0)["roc_auc"]
    assert found.value == pytest.approx(roc_auc(outputs, targets), abs=1e-12)


def test_one_and_two_logits_give_the_same_cells() -> None:
    outputs, targets = two_classes(2)
    outputs = torch.cat([outputs, torch.zeros(1)])  # a tie of two logits is class 0
    targets = torch.cat([targets, torch.ones(1, dtype=torch.int64)])
    table = CountTable("scores")
    pairs = torch.stack([torch.zeros_like(outputs), outputs], dim=1)
    expected = table.find_cells(outputs, targets)
    assert torch.equal(table.find_cells(pairs, targets), expected)
    assert torch.equal(table.find_cells(outputs[:, None], targets), expected)
    assert accuracy(pairs, targets) == pytest.approx(
        table.estimate(count(table, pairs, targets), 0.0)["accuracy"].value
    )


def test_more_classes() -> None:
    generator = torch.Generator().manual_seed(3)
    outputs, targets = torch.randn(200, 5, generator=generator), torch.arange(200) % 5
    table = CountTable("classes", classes=5)
    counts = count(table, outputs, targets)
    assert table.estimate(counts, 0.0)["accuracy"].value == pytest.approx(accuracy(outputs, targets))
    confusion = table.confusion(counts)
    assert confusion is not None
    assert np.array_equal(confusion.numpy(), confusion_matrix(targets, outputs.argmax(1)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bins", [10, 1000])
@pytest.mark.parametrize("steps", [3, 30])
def test_survival_lies_in_the_band(seed: int, bins: int, steps: int) -> None:
    hazard, targets = survival(seed)
    table = CountTable("survival", bins=bins, times=tuple(np.linspace(0.1, 9, steps).tolist()))
    counts = count(table, hazard, targets)
    found = table.estimate(counts, 0.0)["concordance"]
    assert found.low - 1e-12 <= concordance(hazard, targets) <= found.high + 1e-12
    assert table.confusion(counts) is None


def test_survival_with_a_bin_for_each_time_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    hazard = torch.randint(-3, 4, (60,), generator=generator).float()
    event, time = torch.rand(60, generator=generator) < 0.7, torch.randperm(60, generator=generator) + 1.0
    targets = torch.stack([event.float(), time], dim=1)
    table = CountTable("survival", bins=1000, times=tuple(float(t) for t in range(2, 61)))
    found = table.estimate(count(table, hazard, targets), 0.0)["concordance"]
    assert found.value == pytest.approx(concordance(hazard, targets), abs=1e-12)


def test_a_time_at_an_edge_belongs_to_the_bin_above_it() -> None:
    """In single precision 6.1 is less than the double 6.1."""
    table = CountTable("survival", bins=4, times=(0.7, 6.1))
    targets = torch.tensor([[1.0, 0.7], [1.0, 6.1], [1.0, 6.05]])
    counts = count(table, torch.zeros(3), targets).reshape(3, 2, 4).sum(dim=(1, 2))
    assert counts.tolist() == [0, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scores", "survival", "numbers"])
def test_the_standard_error_is_that_of_the_noise(kind: str) -> None:
    """Noise of the stated size is drawn many times: values scatter by the standard error, around the exact metric."""
    generator = torch.Generator().manual_seed(4)
    if kind == "scores":
        table, (outputs, targets) = CountTable("scores"), two_classes(4, 5000)
    elif kind == "numbers":
        table, (outputs, targets) = CountTable("numbers", bins=20, spread=12.0), numbers(4, 5000)
    else:
        table, outputs = CountTable("survival", times=(1.0, 2.0, 3.0)), torch.randn(5000, generator=generator)
        time = torch.rand(5000, generator=generator) * 4 - outputs.clamp(max=0)
        targets = torch.stack([torch.ones(5000), time], dim=1)
    counts, std = count(table, outputs, targets), 8.0
    exact = table.estimate(counts, 0.0)
    drawn = [
        table.estimate(counts + std * torch.randn(table.size, generator=generator).double(), std)
        for _ in range(800)
    ]
    for name, metric in exact.items():
        values = torch.tensor([one[name].value for one in drawn])
        stated = table.estimate(counts, std)[name].standard_error
        assert float(values.std()) == pytest.approx(stated, rel=0.08)
        assert float(values.mean()) == pytest.approx(
            metric.value, abs=4 * stated / math.sqrt(800) + 0.05 * stated
        )


def test_metrics_that_are_lost_in_the_noise_are_left_out() -> None:
    table = CountTable("scores")
    outputs, targets = two_classes(5, 50)
    counts = count(table, outputs, targets)
    assert table.estimate(counts, 0.0).keys() == {"accuracy", "roc_auc"}
    assert table.estimate(counts, 100.0) == {}
    assert table.estimate(torch.zeros(table.size).double(), 0.0) == {}
    one_class = count(table, outputs, torch.zeros(50, dtype=torch.int64))
    assert table.estimate(one_class, 0.0).keys() == {"accuracy"}


def test_values_that_are_no_number_have_a_cell() -> None:
    table = CountTable("scores", bins=20)
    outputs = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    assert table.find_cells(outputs, torch.zeros(4, dtype=torch.int64))[:, 0].tolist() == [0, 19, 0, 9]
    pairs = torch.tensor([[math.nan, math.nan], [math.inf, -math.inf], [math.inf, math.inf]])
    assert table.find_cells(pairs, torch.ones(3, dtype=torch.int64))[:, 0].tolist() == [29, 20, 29]


@pytest.mark.parametrize(
    ("settings", "field"), [({"bins": 7}, "bins"), ({"bins": 0}, "bins"), ({"times": (2.0, 1.0)}, "times")]
)
def test_wrong_bins_are_refused(settings: dict[str, object], field: str) -> None:
    with refused("argument.value") as caught:
        CountTable("scores", **settings)  # type: ignore[arg-type]
    assert caught.value.field == field
