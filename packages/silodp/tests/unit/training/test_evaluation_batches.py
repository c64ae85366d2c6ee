"""Evaluations stay within the memory budget: how many records are evaluated at once is found out on made-up ones."""

import numpy as np
import pytest
import torch
from torch import nn

from silodp.training import Task, squared_error
from silodp.training.sgd._planning import measure_cost
from silodp.training.task import compute_outputs

BUDGET = 4 << 20


@pytest.fixture(autouse=True)
def budget(monkeypatch):
    monkeypatch.setattr("silodp.training.task.default_memory_budget", lambda device: BUDGET)


class Embedding(nn.Module):
    """Of a record of 24 bytes it makes some 24 kB."""

    def __init__(self, width: int):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Embedding(3, width), nn.Tanh()), nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.body(x).mean(1))


# A global, because a model that keeps what it saw is refused.
BATCHES: list[torch.Tensor] = []


class Averaged(nn.Module):
    """It computes from its weights alone, once for all records, half a MB; a record takes some bytes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 1 << 12))

    def forward(self, x):
        BATCHES.append(x.clone())
        return x @ self.weight.tanh().mean(1)


@pytest.mark.parametrize(("records", "width"), [(1000, 1024), (60, 16 * 1024), (2, 16 * 1024)])
def test_an_evaluation_stays_within_the_memory_budget(records, width):
    model = Embedding(width).eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, size=(records, 3)))
    with torch.no_grad():
        together = measure_cost(lambda: model(ids)).peak
    assert (together > 2 * BUDGET) == (records > 2)
    outputs = 2 * records * 2 * 4  # bytes; those of the batches, and all together
    assert measure_cost(lambda: compute_outputs(model, ids)).peak <= BUDGET + outputs
    assert torch.allclose(compute_outputs(model, ids), model(ids), atol=1e-6)


def test_what_weights_take_is_not_counted_for_every_record():
    BATCHES.clear()
    model = Averaged().eval()
    x = torch.full((4000, 32), 7.0)
    assert measure_cost(lambda: compute_outputs(model, x)).peak <= BUDGET
    assert max(map(len, BATCHES)) >= 1000


def test_memory_is_measured_on_made_up_records():
    """A value of a record decides over no batch, and so not over how its neighbors' outputs are rounded."""
    task = Task(Averaged(), squared_error())
    BATCHES.clear()
    task.predict(task.initial(0), torch.full((4000, 32), 7.0))
    real = [len(batch) for batch in BATCHES if bool((batch == 7).any())]
    assert sum(real) == 4000
    assert len(real) < len(BATCHES)


def test_measuring_draws_no_random_numbers():
    """A model that samples in eval mode gives the same outputs whether or not something was measured before."""

    class Sampling(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.randn(len(x), 1)

    torch.manual_seed(0)
    model, x = Sampling(3, 1).eval(), torch.zeros(5, 3)
    torch.manual_seed(1)
    found = compute_outputs(model, x)
    torch.manual_seed(1)
    assert torch.equal(found, model(x).detach())


class Packed(nn.Module):
    """It computes the lengths of sequences from ids, and torch packs none of length 0."""

    def __init__(self):
        super().__init__()
        self.ids, self.body = nn.Embedding(9, 4, padding_idx=0), nn.LSTM(4, 3, batch_first=True)

    def forward(self, x):
        lengths = (x != 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.ids(x), lengths, batch_first=True, enforce_sorted=False
        )
        return self.body(packed)[1][0][-1]


def test_sequences_of_made_up_records_are_not_empty():
    ids = torch.tensor([[3, 0, 0], [1, 2, 0]]).repeat(40, 1)
    assert compute_outputs(Packed().eval(), ids).shape == (80, 3)
