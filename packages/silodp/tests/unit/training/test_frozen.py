"""Frozen parameters and running statistics in eval mode are constants: kept, hashed and stored; losses of torch.nn are
means over records."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import nn

import silodp
from silodp.errors import SilodpError
from silodp.runtime.prepare import prepare_run
from silodp.training import LocalTraining, Task, binary_cross_entropy, cross_entropy
from silodp.training.model_state import serialize
from silodp.training.sgd import user_updates
from silodp.training.sgd._planning import measure_cost
from support.oracles import small_federation
from support.reference import assert_equal_updates, looped, ragged, updates
from support.refusals import refused


def pretrained(features: int = 3) -> nn.Module:
    """A body with statistics of public records, frozen, and a head to train."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(features, 5), nn.BatchNorm1d(5), nn.ReLU())
    for _ in range(5):
        body(3 * torch.randn(20, features) + 1)
    body.requires_grad_(False).eval()
    return nn.Sequential(body, nn.Dropout(0.0), nn.Linear(5, 2)).double()


def test_frozen_parts_stay_constant_and_in_eval_mode():
    model = pretrained()
    task = Task(model, cross_entropy())
    x, y, user = ragged([4, 1, 6], 0)
    task.check(x, y)
    assert task.model.training
    assert not task.model[0][1].training
    assert task.size == 12
    start = task.initial(1)
    assert torch.equal(start, task.flatten(model))  # a pretrained model starts as it came
    before = copy.deepcopy(task.model.state_dict())
    local = LocalTraining(0.1, 30, 2)
    found = updates(task, start, x, y, user, local, 2)
    with torch.no_grad():  # the head alone, on features that the frozen body has computed
        features = copy.deepcopy(model[0]).eval()(torch.from_numpy(x).double()).numpy()
    head = Task(copy.deepcopy(model[2]), cross_entropy())
    wanted = looped(head, start, features, y, user, local, 2)
    assert_equal_updates(found, wanted, 1e-9)
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
    stored = load(serialize(task.load(start), {}))
    assert torch.equal(stored["0.1.running_mean"], model[0][1].running_mean)


class Dropping(nn.Module):
    """A frozen body with dropout, and a head to train, on ids."""

    def __init__(self, width: int = 4):
        super().__init__()
        body = nn.Sequential(nn.Embedding(3, width), nn.Dropout(0.5), nn.Linear(width, 4))
        self.body, self.head = body.requires_grad_(False), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x).mean(1))


def test_a_frozen_part_in_eval_mode_drops_nothing_out():
    ids, labels = torch.tensor([[0, 1, 2], [2, 2, 1]]), torch.tensor([0, 1])
    for frozen_mode in (True, False):
        model = Dropping()
        model.body.train(frozen_mode)
        task = Task(model, cross_entropy())
        for _ in range(2):  # the checks run the model in both modes, and leave it as it was
            task.check(ids, labels)
            assert task.model.training
            assert [part.training for part in task.model.body.modules()] == [frozen_mode] * 4
        outputs = [task.forward(task.unflatten(task.initial(0)), ids) for _ in range(2)]
        assert torch.equal(*outputs) != frozen_mode
    whole = Task(Dropping().eval(), cross_entropy())  # as pretrained models are loaded
    assert (whole.model.training, whole.model.head.training, whole.model.body.training) == (True, True, False)


def test_what_a_frozen_part_computes_stays_within_the_memory_budget():
    """Records of 24 bytes, of which the frozen part makes 24 kB to end with 48 bytes; batches are prepared together."""
    task = Task(Dropping(1024).eval(), cross_entropy())
    rng = np.random.default_rng(0)
    x, y, user = torch.from_numpy(rng.integers(3, size=(64, 3))), rng.integers(2, size=64), np.arange(64) % 8
    local, budget = LocalTraining(0.1, 80, 2), 4 << 20
    start = task.initial(0)
    updates(task, start, x, y, user, local, 0, memory_budget=budget)  # costs and traces
    y = torch.from_numpy(y)
    peak = measure_cost(
        lambda: list(user_updates(task, start, x, y, user, local, torch.Generator(), memory_budget=budget))
    ).peak
    assert peak <= budget


def test_training_starts_at_the_given_values_only_where_that_is_said_or_parts_are_frozen():
    whole, partly = nn.Linear(3, 2), pretrained()
    start = torch.cat([p.detach().flatten() for p in whole.parameters()])
    assert torch.equal(Task(whole, cross_entropy(), pretrained=True).initial(0), start)
    assert not torch.equal(Task(whole, cross_entropy()).initial(0), start)
    head = torch.cat([p.detach().flatten() for p in partly[2].parameters()])
    assert torch.equal(Task(partly, cross_entropy()).initial(0), head)
    assert not torch.equal(Task(partly, cross_entropy(), pretrained=False).initial(0), head)


def test_pretrained_is_yes_or_no():
    with pytest.raises(SilodpError, match="pretrained is a str: give True, False or None"):
        Task(nn.Linear(3, 2), cross_entropy(), pretrained="no")


def test_frozen_values_identify_the_run():
    federation, method = (
        small_federation(features=3),
        silodp.methods.UldpAvg(noise_multiplier=1.0, clip=0.5, local=LocalTraining(0.1)),
    )
    other = pretrained()
    other[0][1].running_mean += 0.1
    weights = pretrained()
    with torch.no_grad():
        weights[0][0].weight += 0.1
    digests = {
        prepare_run(federation, Task(model, cross_entropy()), method, rounds=1).digest
        for model in (pretrained(), pretrained(), other, weights)
    }
    assert len(digests) == 3


def test_modes_and_a_stated_start_identify_the_run():
    modes = [Dropping().eval(), Dropping()]
    for model in modes:
        model.load_state_dict(modes[0].state_dict())
    assert len({Task(model, cross_entropy()).constants_digest for model in modes}) == 2
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    stated = {Task(model, cross_entropy(), pretrained=True).start_digest for model in (first, second, first)}
    assert len(stated - {""}) == 2
    assert [Task(first, cross_entropy(), pretrained=given).start_digest for given in (None, False)] == [
        ""
    ] * 2


def test_batch_norm_in_train_mode_is_refused():
    model = pretrained()
    model.train()
    with pytest.raises(SilodpError) as caught:
        Task(model, cross_entropy())
    assert caught.value.code == "model.batch_norm"


@pytest.mark.parametrize(
    ("module", "outputs"),
    [
        (nn.CrossEntropyLoss(torch.tensor([0.3, 1.7]), label_smoothing=0.1), 2),
        (nn.CrossEntropyLoss(ignore_index=1), 2),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])), 1),
        (nn.MSELoss(), 1),
        (nn.L1Loss(), 1),
        (nn.SmoothL1Loss(beta=0.5), 1),
        (nn.HuberLoss(delta=0.5), 1),
    ],
)
def test_losses_of_torch_are_means_over_records(module, outputs):
    torch.manual_seed(0)
    task = Task(nn.Linear(3, outputs).double(), module)
    x, y, _ = ragged([5], 0)
    task.check(x, y)
    rows, targets = torch.randn(5, outputs, dtype=torch.float64), torch.from_numpy(y)
    single = copy.deepcopy(module).double()
    single.reduction = "sum"  # of one record: its loss, without any divisor
    shaped = targets if outputs == 2 else targets.double().unsqueeze(1)
    values = [single(rows[i : i + 1], shaped[i : i + 1]) for i in range(5)]
    found = task.loss.compute(rows, targets, torch.ones(5, dtype=torch.float64))
    assert torch.allclose(found, torch.stack(values).mean())
    assert task.loss.separable


def test_a_loss_that_is_no_mean_over_records_is_refused():
    for module in (nn.MSELoss(reduction="sum"), nn.TripletMarginLoss()):
        with pytest.raises(SilodpError, match="reduction"):
            Task(nn.Linear(3, 1), module)


@pytest.mark.parametrize(
    ("module", "instead"),
    [(nn.BCELoss(), "BCEWithLogitsLoss"), (nn.SoftMarginLoss(), "BCEWithLogitsLoss")],
)
def test_a_loss_whose_outputs_are_no_logits_is_refused(module, instead):
    """Metrics and predictions would take the sigmoid of a probability, and labels are 0 and 1, not -1 and 1."""
    with refused("argument.value") as caught:
        Task(nn.Sequential(nn.Linear(3, 1), nn.Sigmoid()), module)
    assert instead in str(caught.value)


def test_names_of_losses_tell_their_constants():
    names = {
        Task(nn.Linear(3, 2), nn.CrossEntropyLoss(torch.tensor(w))).loss.name
        for w in ([1.0, 2.0], [1.0, 3.0])
    }
    assert len(names) == 2
    assert (
        Task(nn.Linear(3, 1), nn.BCEWithLogitsLoss()).loss.most_classes == binary_cross_entropy().most_classes
    )
