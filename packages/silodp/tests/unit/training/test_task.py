"""Parameters as one vector, evaluation, parameter counts, and what is refused by name."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from silodp.errors import SilodpError
from silodp.training import Task, accuracy, concordance, cox, cross_entropy, roc_auc
from silodp.training.models import MODELS, cnn_mnist, mlp


@pytest.mark.parametrize(
    ("name", "arguments", "shape", "parameters"),
    [
        ("logistic", {"features": 13}, (13,), 14),
        ("logistic", {"features": 5, "classes": 3}, (5,), 18),
        ("cox_linear", {"features": 39}, (39,), 40),
        ("mlp", {}, (30,), 5012),
        ("cnn_mnist", {}, (1, 28, 28), 21840),
        ("cnn_mnist", {"dropout": 0.5}, (1, 28, 28), 21840),
        ("cnn_fashion", {}, (1, 28, 28), 26010),
        ("cnn_rpdp", {}, (1, 28, 28), 26010),
        ("hog_linear", {}, (1, 28, 28), 1290),
    ],
)
def test_models_by_name(name, arguments, shape, parameters):
    task = Task(MODELS[name](**arguments), cross_entropy())
    assert task.size == parameters
    task.check(np.random.default_rng(0).normal(size=(4, *shape)).astype(np.float32))


def test_bad_model_arguments_are_named():
    for name, arguments, word in (
        ("mlp", {"width": 31}, "groups"),
        ("cnn_mnist", {"dropout": 1.0}, "dropout"),
        ("logistic", {"features": 0}, "features"),
        ("logistic", {"features": 3, "classes": 1}, "classes"),
    ):
        with pytest.raises(SilodpError, match=word):
            MODELS[name](**arguments)


def test_initial_parameters_follow_the_seed_alone():
    task, other = Task(mlp(), cross_entropy()), Task(mlp(), cross_entropy())
    state = torch.random.get_rng_state()
    first = task.initial(3)
    assert torch.equal(first, task.initial(3))
    assert torch.equal(first, other.initial(3))
    assert not torch.equal(first, task.initial(4))
    assert not torch.equal(task.initial(None), task.initial(None))
    assert torch.equal(state, torch.random.get_rng_state())
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)  # resets under a private name
    task = Task(nn.Sequential(attention, nn.Flatten(), nn.Linear(12, 2)), cross_entropy())
    assert float((task.initial(1) != task.initial(2)).double().mean()) > 0.5


def test_flat_vectors_round_trip():
    task = Task(cnn_mnist(), cross_entropy())
    params = task.initial(0)
    assert torch.equal(task.flatten(task.load(params)), params)
    assert torch.equal(torch.cat([p.flatten() for p in task.unflatten(params)]), params)
    assert [tuple(p.shape) for p in task.unflatten(params.expand(3, -1))] == [(3, *s) for s in task.shapes]
    assert not task.load(params).training
    with pytest.raises(SilodpError, match="21840 parameters"):
        task.load(params[:-1])


def test_the_callers_model_is_left_alone():
    model = nn.Linear(3, 2)
    task = Task(model, cross_entropy())
    params = task.flatten(model)
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(task.flatten(task.model), params)


def test_evaluation_is_in_eval_mode_and_in_batches(monkeypatch):
    monkeypatch.setattr("silodp.training.task._EVALUATION_BATCH", 7)
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.9))
    task = Task(model, cross_entropy(), {"accuracy": accuracy, "auc": roc_auc})
    x, y = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32), np.arange(30) % 2
    x.flags.writeable = False
    params = task.initial(0)
    found = task.evaluate(params, x, y)
    outputs = task.load(params)(torch.tensor(x.copy())).detach()
    assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, torch.tensor(y))))
    assert found["accuracy"] == accuracy(outputs, torch.tensor(y))
    assert task.evaluate(params, x, np.zeros(30, np.int64)).keys() == {
        "loss",
        "accuracy",
    }  # no AUC of one class
    with pytest.raises(SilodpError, match="no records"):
        task.evaluate(params, x[:0], y[:0])


def test_a_cox_loss_is_evaluated_on_all_records_at_once(monkeypatch):
    task = Task(nn.Linear(3, 1), cox(), {"c": concordance})
    x = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    y = np.abs(x[:, :2]).round(1)
    whole = task.evaluate(task.initial(0), x, y)
    monkeypatch.setattr("silodp.training.task._EVALUATION_BATCH", 4)
    assert task.evaluate(task.initial(0), x, y) == pytest.approx(whole)


class Mixes(nn.Module):
    """Subtracts the batch's mean."""

    def forward(self, x):
        return x - x.mean(0)


class MixesALittle(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x) + 0.01 * x.sum() / len(x)


class DividesByRows(nn.Module):
    def forward(self, x):
        return x / len(x)


class DividesInTraining(nn.Module):
    """Where dropout draws other random numbers for another number of rows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 20), nn.Dropout(0.5), nn.Linear(20, 2))

    def forward(self, x):
        return self.layers(x) / (len(x) if self.training else 1)


class MixesInEvaluation(nn.Linear):
    """Trains on each record alone; what a record is predicted to be depends on the others that are evaluated."""

    def forward(self, x):
        found = super().forward(x)
        return found if self.training else found - found.mean(0)


class CountsInEvaluation(nn.Linear):
    def __init__(self, *shape):
        super().__init__(*shape)
        self.calls = 0

    def forward(self, x):
        self.calls += not self.training
        return super().forward(x)


class KnowsItsPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x) * torch.linspace(0, 1, len(x)).unsqueeze(1)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


class Breaks(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 0


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), ["'1' (BatchNorm1d)", "GroupNorm or LayerNorm"]),
        (nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)), ["'1' (SyncBatchNorm)", "GroupNorm"]),
        (
            nn.Sequential(nn.Conv1d(1, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True)),
            ["'1' (InstanceNorm1d)", "track_running_stats=False"],
        ),
        (nn.Sequential(nn.LazyLinear(2)), ["'0' (", "run the model once"]),
        (nn.Flatten(), ["no trainable parameters"]),
        (nn.Linear(3, 2).requires_grad_(False), ["no trainable parameters"]),
        (nn.Linear(3, 2).half(), ["float16", "float32"]),
        (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double()), ["float32", "float64"]),
    ],
)
def test_refused_at_sight(model, words):
    with pytest.raises(SilodpError) as caught:
        Task(model, cross_entropy())
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": nn.Linear}, "model is a type: give a torch.nn.Module"),
        ({"model": None}, "model is a NoneType: give"),
        ({"model": lambda x: x}, "model is a function: give"),
        ({"metrics": ["accuracy"]}, "metrics is a list: give a mapping"),
        ({"metrics": accuracy}, "metrics is a function: give a mapping"),
        ({"metrics": ()}, "metrics is a tuple: give a mapping"),
    ],
)
def test_a_task_is_made_of_the_right_things(arguments, words):
    with pytest.raises(SilodpError, match=f"^{words}"):
        Task(**({"model": nn.Linear(3, 2), "loss": cross_entropy()} | arguments))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            nn.Sequential(nn.Linear(3, 3), Mixes(), nn.Linear(3, 2)),
            ["layer '1' (Mixes)", "mixes the records"],
        ),
        (MixesALittle(), ["forward of MixesALittle mixes"]),
        (nn.Sequential(nn.Linear(3, 2), nn.Softmax(dim=0)), ["layer '1' (Softmax)"]),
        (
            nn.Sequential(nn.Linear(3, 3), DividesByRows(), nn.Linear(3, 2)),
            ["layer '1' (DividesByRows) change with the number of rows"],
        ),
        (DividesInTraining(), ["forward of DividesInTraining change with the number of rows"]),
        (KnowsItsPlace(), ["forward of KnowsItsPlace change with the number of rows"]),
        (MixesInEvaluation(3, 2), ["forward of MixesInEvaluation mixes"]),
        (Counts(), ["state 'calls'"]),
        (CountsInEvaluation(3, 2), ["state 'calls'"]),
        (Breaks(3, 2), ["not finite on a finite example"]),
        (nn.Linear(4, 2), ["fails on records of shape (3,)"]),
        (nn.Sequential(nn.Linear(3, 1), nn.Flatten(0), nn.Unflatten(0, (1, -1))), ["one row per record"]),
        (nn.LSTM(3, 2), ["must return one tensor"]),
    ],
)
def test_refused_on_an_example(model, words, rows):
    task = Task(model, cross_entropy())
    before = copy.deepcopy(task.model.state_dict())
    with pytest.raises(SilodpError) as caught:
        task.check(np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())


def test_spectral_norm_has_a_state_and_is_refused():
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(30, 30))
    with pytest.raises(SilodpError, match="changes its state"):
        Task(model, cross_entropy()).check(torch.randn(3, 30))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(
            nn.Conv1d(1, 4, 1), nn.GroupNorm(2, 4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 2)
        ),
        nn.Sequential(nn.Conv1d(1, 4, 1), nn.InstanceNorm1d(4), nn.Flatten(), nn.Linear(12, 2)),
        nn.Sequential(nn.Flatten(), nn.LayerNorm(3), nn.Linear(3, 2)),
        nn.Sequential(
            nn.Linear(3, 4),
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
            nn.Flatten(),
            nn.Linear(4, 2),
        ),
    ],
)
def test_layers_that_keep_records_apart_pass(model):
    state = torch.random.get_rng_state()
    Task(model, cross_entropy()).check(torch.randn(4, 1, 3, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(state, torch.random.get_rng_state())


def test_token_ids_are_fine():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2))
    Task(model, cross_entropy()).check(np.array([[0, 1, 6], [2, 3, 4], [5, 5, 1]]))
