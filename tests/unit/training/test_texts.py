"""Next-token prediction: packing that mixes no persons, a causal model, its gradients, and perplexity with noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.data.public import UNLABELED
from silodp.training import LocalTraining, Task, cross_entropy, record_gradients
from silodp.training.metrics import accuracy, perplexity
from silodp.training.models import causal_lm
from silodp_analytics.counts import CountTable
from silodp_experiments.benchmarks import docstrings
from silodp_experiments.sequences import pack_sequences
from support.reference import assert_equal_updates, looped, updates
from support.refusals import refused

WORDS, LENGTH = 11, 6


def draw_texts(seed: int = 0) -> tuple[list[list[int]], list[int]]:
    coins = np.random.default_rng(seed)
    texts = [coins.integers(1, WORDS, coins.integers(1, 15)).tolist() for _ in range(40)]
    return texts, coins.integers(0, 7, 40).tolist()


def make_task() -> Task:
    torch.manual_seed(0)
    return Task(causal_lm(WORDS, (LENGTH,), width=8, layers=2, heads=2).double(), cross_entropy())


def test_packed_rows_are_the_texts_of_one_person_in_order() -> None:
    texts, persons = draw_texts()
    x, y, user = pack_sequences(texts, persons, LENGTH)
    assert x.shape == y.shape == (len(user), LENGTH)
    for person in set(persons):
        mine = user == person
        known = y[mine] != UNLABELED
        joined = [0]
        for text, owner in zip(texts, persons, strict=True):
            if owner == person:
                joined += [*text, 0]
        # What is seen and what follows are the person's texts, one place apart: nothing is lost or there twice.
        assert x[mine][known].tolist() == joined[:-1]
        assert y[mine][known].tolist() == joined[1:]
        # Only the last row of a person has places without a label.
        assert known[:-1].all()


def test_rows_of_a_person_do_not_depend_on_others() -> None:
    texts, persons = draw_texts()
    x, y, user = pack_sequences(texts, persons, LENGTH)
    others = [number for number, person in enumerate(persons) if person != 3]
    fewer = pack_sequences([texts[n] for n in others], [persons[n] for n in others], LENGTH)
    kept = user != 3
    for found, wanted in zip(fewer, (x[kept], y[kept], user[kept]), strict=True):
        assert found.tolist() == wanted.tolist()


def test_wrong_texts_are_refused() -> None:
    with refused("argument.shape"):
        pack_sequences([[1], [2]], [0], 4)
    with refused("argument.value"):
        pack_sequences([[1, 0, 2]], [0], 4)
    with refused("argument.value"):
        pack_sequences([[1]], [0], 0)
    assert pack_sequences([], [], 4)[0].shape == (0, 4)


def test_a_token_is_predicted_from_those_before_it_alone() -> None:
    model = make_task().model
    x = torch.from_numpy(pack_sequences(*draw_texts(), LENGTH)[0])
    before = model(x)
    changed = x.clone()
    changed[:, 3] = (changed[:, 3] + 1) % WORDS
    after = model(changed)
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert not torch.allclose(before[:, :, 3:], after[:, :, 3:])


@pytest.mark.parametrize("local", [LocalTraining(0.3, 2), LocalTraining(0.1, 3, 2, 0.9, 0.01)])
def test_persons_are_trained_as_by_a_loop_with_ordinary_autograd(local: LocalTraining) -> None:
    task = make_task()
    x, y, user = pack_sequences(*draw_texts(), LENGTH)
    task.check(x, y)
    start = task.initial(1)
    found, wanted = updates(task, start, x, y, user, local, 2), looped(task, start, x, y, user, local, 2)
    assert_equal_updates(found, wanted, 1e-9)
    cosine = nn.functional.cosine_similarity
    assert all(float(cosine(found[who], wanted[who], 0)) > 1 - 1e-9 for who in found)


def test_gradients_of_rows_are_those_of_torchs_loss() -> None:
    task = make_task()
    x, y, _ = pack_sequences(*draw_texts(), LENGTH)
    params = task.initial(0)
    inputs, targets = task.tensors(x[:8], y[:8])
    wanted = []
    for row in range(8):
        model = task.load(params).train()
        nn.functional.cross_entropy(model(inputs[row : row + 1]), targets[row : row + 1]).backward()
        wanted.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    found = torch.cat([rows for _, rows in record_gradients(task, params, x[:8], y[:8])])
    assert torch.allclose(found, torch.stack(wanted), atol=1e-12)
    assert float(nn.functional.cosine_similarity(found, torch.stack(wanted), dim=1).min()) > 1 - 1e-9


def test_perplexity_is_that_of_torch_where_rows_are_full() -> None:
    outputs, targets = torch.randn(5, WORDS, LENGTH), torch.randint(WORDS, (5, LENGTH))
    expected = math.exp(nn.functional.cross_entropy(outputs, targets))
    assert perplexity(outputs, targets) == pytest.approx(expected)
    assert perplexity(torch.zeros(5, WORDS, LENGTH), targets) == pytest.approx(WORDS)
    half = targets.clone()
    half[:, 3:] = UNLABELED
    expected = math.exp(nn.functional.cross_entropy(outputs[:, :, :3], targets[:, :3]))
    assert perplexity(outputs, half) == pytest.approx(expected)
    half[:2] = UNLABELED  # these records say nothing, and are no perfect predictions
    assert perplexity(torch.zeros(5, WORDS, LENGTH), half) == pytest.approx(WORDS)
    with refused("metric.wrong_labels"):
        perplexity(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64))


def count(table: CountTable, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    cells, shares = table.find_cells(outputs, targets), table.find_shares(targets)
    assert shares is not None
    assert cells.shape == shares.shape
    # So the norm of a row is at most √2, which is the clip of one record.
    assert torch.allclose(shares.sum(1), torch.full((len(shares),), 2.0).double())
    return torch.bincount(cells.flatten(), shares.flatten(), table.size)


def test_counts_give_perplexity_within_their_bins_and_its_noise() -> None:
    _, y, _ = pack_sequences(*draw_texts(), LENGTH)
    targets = torch.from_numpy(np.tile(y, (20, 1)))
    outputs = torch.randn(len(targets), WORDS, LENGTH)
    table = CountTable("tokens", WORDS, bins=20)
    counts = count(table, outputs, targets)
    assert table.count_records(counts) == pytest.approx(len(targets))
    exact = table.estimate(counts, 0.0)
    assert exact["accuracy"].value == pytest.approx(accuracy(outputs, targets))
    assert exact["perplexity"].low <= perplexity(outputs, targets) <= exact["perplexity"].high
    coins = torch.Generator().manual_seed(1)
    noisy = [counts + 3 * torch.randn(len(counts), generator=coins).double() for _ in range(300)]
    found = table.estimate(noisy[0], 3.0)
    for name in exact:
        spread = np.std([table.estimate(one, 3.0)[name].value for one in noisy])
        assert found[name].standard_error == pytest.approx(spread, rel=0.25)


def test_good_predictions_are_in_the_bin_of_their_perplexity() -> None:
    targets = torch.randint(WORDS, (200, LENGTH))
    outputs = 4.0 * nn.functional.one_hot(targets, WORDS).transpose(1, 2).float() + torch.randn(
        200, WORDS, LENGTH
    )
    exact = CountTable("tokens", WORDS, bins=100)
    found = exact.estimate(count(exact, outputs, targets), 0.0)["perplexity"]
    assert found.low <= perplexity(outputs, targets) <= found.high
    worst = exact.estimate(count(exact, 1000 * outputs.roll(1, 1), targets), 0.0)["perplexity"]
    assert worst.value == pytest.approx(
        WORDS**2, rel=0.03
    )  # what lies beyond counts as the square of their number
    broken = outputs.clone()
    broken[0] = float("nan")
    assert exact.find_cells(broken, targets)[0, 0] == 99


@pytest.mark.parametrize("option", [{"width": 6, "heads": 4}, {"heads": 0}, {"layers": 0}])
def test_a_model_that_does_not_fit_is_refused(option: dict[str, int]) -> None:
    with refused("argument.value"):
        causal_lm(WORDS, (LENGTH,), **option)
    for categories, shape in ((WORDS, (2, 3)), ([3, 4], (2,))):
        with refused("argument.value"):
            causal_lm(categories, shape)  # type: ignore[arg-type]


def test_docstrings_are_rows_of_modules() -> None:
    federation = docstrings(silos=2, seed=3)
    assert federation.digest() == docstrings(silos=2, seed=3).digest() != docstrings(silos=2).digest()
    assert federation.users > 50
    assert federation.test is not None
    held_out = sum(len(silo.held_out) for silo in federation.silos)
    assert held_out == len(federation.test) > 500
    # Persons are held out whole, and most of a person's rows are in one silo.
    counts = federation.counts()
    assert 0.7 < counts.max(0).sum() / counts.sum() < 1
    assert (counts.sum(0) > 0).all()
    with refused("argument.value"):
        docstrings(silos=0)
