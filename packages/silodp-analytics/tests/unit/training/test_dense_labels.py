"""A class for every pixel, voxel or token: one record stays one record, however many labels it has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, jaccard_score
from torch import Tensor, nn

from silodp.data.federation import Federation
from silodp.data.public import UNLABELED, PublicData
from silodp.data.silo_data import SiloData
from silodp.mechanisms.clipping import add_weighted_rows
from silodp.mechanisms.noise import Randomness
from silodp.methods import UldpAvg
from silodp.methods.base import LocalContext
from silodp.methods.roles import FederationSize
from silodp.runtime.prepare import prepare_run
from silodp.training import LocalTraining, Task, binary_cross_entropy, cross_entropy, record_gradients
from silodp.training.losses import Loss
from silodp.training.made_up import make_up_records
from silodp.training.metrics import accuracy, dice, iou
from silodp.training.models import unet
from silodp_analytics.counts import CountTable
from silodp_analytics.evaluation.methods import EvaluationSums
from support.reference import assert_equal_updates, looped, updates
from support.refusals import refused

SHAPES = {"pixels": (1, 8, 8), "voxels": (1, 4, 4, 4)}
METHOD = UldpAvg(1.0, 0.5, LocalTraining(0.1))


def draw(
    shape: tuple[int, ...], count: int, classes: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Images, and classes of their places, of which some records have a few and some have all."""
    coins = np.random.default_rng(seed)
    x = coins.standard_normal((count, *shape)).astype(np.float32)
    y = coins.integers(0, classes, (count, *shape[1:]))
    hidden = coins.random(y.shape) < coins.choice([0, 0.9], (count, *[1] * (len(shape) - 1)))
    hidden[(slice(None), *[0] * (len(shape) - 1))] = False
    return x, np.where(hidden, UNLABELED, y)


def make_task(shape: tuple[int, ...], **options: object) -> Task:
    torch.manual_seed(0)
    return Task(unet(shape, 3, width=4, groups=2, **options).double(), cross_entropy())


def measure_cosine(found: Tensor, wanted: Tensor) -> float:
    return float(nn.functional.cosine_similarity(found, wanted, dim=-1).min())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("local", [LocalTraining(0.1, 2), LocalTraining(0.05, 3, 2, 0.9, 0.01)])
def test_persons_are_trained_as_by_a_loop_with_ordinary_autograd(name, local):
    shape = SHAPES[name]
    task, user = make_task(shape), np.array([0, 2, 2, 1, 2, 4, 4])
    x, y = draw(shape, len(user))
    task.check(x, y)
    start = task.initial(1)
    found, wanted = updates(task, start, x, y, user, local, 2), looped(task, start, x, y, user, local, 2)
    assert_equal_updates(found, wanted, 1e-9)
    assert min(measure_cosine(found[who], wanted[who]) for who in found) > 1 - 1e-9


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_records_are_those_of_torchs_loss(name):
    """The oracle is torch's own mean over the places with a label, of one record."""
    shape = SHAPES[name]
    task, (x, y) = make_task(shape), draw(shape, 6)
    params = task.initial(0)
    inputs, targets = task.tensors(x, y)
    wanted = []
    for i in range(len(y)):
        model = task.load(params).train()
        nn.functional.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]).backward()
        wanted.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    found = torch.cat([rows for _, rows in record_gradients(task, params, x, y)])
    assert torch.allclose(found, torch.stack(wanted), atol=1e-12)
    assert measure_cosine(found, torch.stack(wanted)) > 1 - 1e-9


@pytest.mark.parametrize("places", ["labeled", "all"])
@pytest.mark.parametrize("weights", [None, [1.0, 4.0]])
def test_both_losses_of_two_classes_agree(places, weights):
    _, y = draw((1, 5, 3), 7, classes=2)
    logits, targets, everyone = torch.randn(7, 1, 5, 3).double(), torch.from_numpy(y), torch.ones(7).double()
    two = torch.cat([torch.zeros_like(logits), logits], 1)
    wanted = cross_entropy(weights, places).compute(two, targets, everyone)
    for outputs in (logits, logits[:, 0]):
        assert torch.allclose(
            binary_cross_entropy(weights, places).compute(outputs, targets, everyone), wanted
        )


def test_the_two_means_weigh_records_or_labels_alike():
    targets = torch.full((2, 10), UNLABELED)
    targets[0, 0], targets[1, :] = 1, 1
    outputs, everyone = torch.randn(2, 2, 10), torch.ones(2)
    each = nn.functional.cross_entropy(outputs, targets, reduction="none")
    labeled = cross_entropy().compute(outputs, targets, everyone)
    assert labeled == pytest.approx(float((each[0, 0] + each[1].mean()) / 2))
    everywhere = cross_entropy(places="all").compute(outputs, targets, everyone)
    assert everywhere == pytest.approx(float(each.sum() / 20))
    of_torch = Task(nn.Conv1d(1, 2, 1), nn.CrossEntropyLoss()).loss
    assert of_torch.compute(outputs, targets, everyone) == pytest.approx(float(everywhere))
    with refused("argument.value"):
        cross_entropy(places="some")  # type: ignore[arg-type]


def test_places_without_a_label_are_in_no_loss_of_torch():
    """BCEWithLogitsLoss would take −100 for a probability."""
    task = Task(nn.Conv1d(1, 1, 1), nn.BCEWithLogitsLoss())
    logits, targets = torch.randn(2, 1, 4), torch.tensor([[0, 1, 1, UNLABELED], [1, 0, UNLABELED, UNLABELED]])
    each = nn.functional.binary_cross_entropy_with_logits(
        logits[:, 0], targets.clamp(min=0).float(), reduction="none"
    )
    wanted = (each * (targets >= 0)).sum(1).mean() / 4
    assert task.loss.compute(logits, targets, torch.ones(2)) == pytest.approx(float(wanted))


@pytest.mark.parametrize("classes", [2, 4])
def test_overlap_is_that_of_scikit_learn(classes):
    torch.manual_seed(3)
    outputs, targets = torch.randn(5, classes, 6, 6), torch.randint(classes, (5, 6, 6))
    true, found = targets.flatten().numpy(), outputs.argmax(1).flatten().numpy()
    labels = list(range(1, classes))
    expected = {"labels": labels, "average": "macro"}
    assert dice(outputs, targets) == pytest.approx(f1_score(true, found, **expected))
    assert iou(outputs, targets) == pytest.approx(jaccard_score(true, found, **expected))
    assert accuracy(outputs, targets) == pytest.approx((true == found).mean())
    if classes == 2:
        one = (outputs[:, 1] - outputs[:, 0]).double()
        assert dice(one, targets) == dice(one[:, None], targets) == pytest.approx(dice(outputs, targets))


def test_a_class_that_is_nowhere_is_left_out_of_the_overlap():
    targets = torch.zeros(2, 4, dtype=torch.int64)
    outputs = torch.stack([torch.ones(2, 4), torch.zeros(2, 4), torch.zeros(2, 4)], 1)
    assert np.isnan(dice(outputs, targets))
    targets[0, 0] = 2
    assert dice(outputs, targets) == 0


def count(table: CountTable, outputs: Tensor, targets: Tensor) -> Tensor:
    cells, shares = table.find_cells(outputs, targets), table.find_shares(targets)
    assert shares is not None
    return torch.bincount(cells.flatten(), shares.flatten(), table.size)


@pytest.mark.parametrize("classes", [2, 3])
def test_counts_give_the_metrics_and_their_noise(classes):
    _, y = draw((1, 6, 6), 300, classes)
    targets = torch.from_numpy(y)
    outputs = torch.randn(300, classes, 6, 6) + 2 * nn.functional.one_hot(
        targets.clamp(min=0), classes
    ).movedim(-1, 1)
    table = CountTable("dense_labels", classes)
    counts = count(table, outputs, targets)
    assert table.count_records(counts) == pytest.approx(300)
    exact = table.estimate(counts, 0.0)
    for name, metric in {"accuracy": accuracy, "dice": dice, "iou": iou}.items():
        assert exact[name].value == pytest.approx(metric(outputs, targets))
        assert exact[name].standard_error == 0
    coins = torch.Generator().manual_seed(1)
    noisy = [counts + torch.randn(len(counts), generator=coins).double() for _ in range(400)]
    for name in exact:
        found = table.estimate(noisy[0], 1.0)[name]
        spread = np.std([table.estimate(one, 1.0)[name].value for one in noisy])
        assert found.standard_error == pytest.approx(spread, rel=0.2)


def test_dice_is_never_below_iou_where_a_class_is_lost_in_the_noise():
    """The second class is predicted nowhere, and noise makes the count of its agreement negative."""
    table = CountTable("dense_labels", 3)
    counts = torch.tensor([[90.0, 2.0, 30.0], [8.0, 40.0, 20.0], [60.0, 25.0, -12.0]], dtype=torch.float64)
    found = table.estimate(counts.flatten(), 5.0)
    of_first = 40 / (8 + 40 + 20 + 2 + 25)
    assert found["iou"].value == pytest.approx(of_first / 2)
    assert found["dice"].value == pytest.approx(of_first / (1 + of_first))
    # The error is as large as if nothing were cut off: noise may as well have gone the other way.
    errors = []
    for agreed in (-1e-6, 1e-6):
        counts[2, 2] = agreed
        errors.append(
            {name: one.standard_error for name, one in table.estimate(counts.flatten(), 5.0).items()}
        )
    assert errors[0] == pytest.approx(errors[1])


@pytest.mark.parametrize("labels", [1, 7, 64])
@pytest.mark.parametrize("unit", ["user", "record"])
def test_removal_moves_no_sum_by_more_than_a_clip(unit, labels):
    """Also of a record with many labels, and with few: neither its loss nor its counts grow with them."""
    shape = SHAPES["pixels"]
    task, (x, y) = make_task(shape), draw(shape, 12)
    y[0] = UNLABELED
    y[0].flat[:labels] = 1
    user = np.array([0, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8])
    params = task.initial(0)
    methods = [EvaluationSums(unit, 1.0, 1.0, CountTable("dense_labels", 3))]
    if unit == "user":
        methods.append(METHOD)
    for method in methods:
        sums = []
        for first in (0, 1):
            inputs, targets = task.tensors(x[first:], y[first:])
            weights = torch.ones(9, dtype=torch.float64)
            data = params, inputs, targets, torch.from_numpy(user[first:]), weights
            context = LocalContext(task, *data, FederationSize(1, 9), Randomness.from_seed(0))
            sums.append(add_weighted_rows(method.local_update(context), weights).value)
        moved = float((sums[0] - sums[1]).norm())
        clip = 1.0 if isinstance(method, EvaluationSums) else 0.5
        assert 0 < moved <= clip * (1 + 1e-9)
        if isinstance(method, EvaluationSums) and labels == 1:
            assert moved == pytest.approx(clip)  # one cell has it all


@pytest.mark.parametrize("table", [CountTable("dense_labels", 3), CountTable("tokens", 3)])
def test_a_person_with_many_records_moves_counts_by_one_clip(table):
    """Twenty equal records with a few labels each: without the clip they would move the counts by twenty."""
    shape = SHAPES["pixels"]
    task, (x, y) = make_task(shape), draw(shape, 12)
    x, y = (np.concatenate([part, part[:1].repeat(20, 0)]) for part in (x, y))
    user, params = np.array([*range(1, 13), *[0] * 20]), task.initial(0)
    method = EvaluationSums("user", 1.0, 1.0, table)
    sums = []
    for kept in (user >= 0, user > 0):
        inputs, targets = task.tensors(x[kept], y[kept])
        data = params, inputs, targets, torch.from_numpy(user[kept]), torch.ones(13, dtype=torch.float64)
        context = LocalContext(task, *data, FederationSize(1, 13), Randomness.from_seed(0))
        sums.append(
            add_weighted_rows(method.local_update(context), torch.ones(13, dtype=torch.float64)).value
        )
    moved = float((sums[0] - sums[1]).norm())
    assert moved == pytest.approx(method.row_clip)
    assert method.row_clip == pytest.approx(table.entries**0.5)


PUBLIC = PublicData("toy", ("a", "b"), 9, (1, 8, 8), "classes", 3, label_shape=(8, 8))


class Flat(nn.Module):
    """One class for a whole image."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1))


@pytest.mark.parametrize(
    ("model", "loss", "codes"),
    [
        (Flat(), cross_entropy(), ["loss.output_shape"]),
        (unet((1, 8, 8), 2), cross_entropy(), ["loss.output_shape"]),
        (nn.Conv2d(1, 1, 1), cross_entropy(), ["loss.output_shape"]),
        (nn.Conv2d(1, 1, 1), binary_cross_entropy(), ["loss.wrong_labels"]),
        # A loss of the user's own that takes −100 for the last class but 99.
        (
            unet((1, 8, 8), 3),
            Loss.per_record("own", lambda o, t: -o.log_softmax(1).gather(1, t[:, None]).flatten(1).mean(1)),
            ["loss.raised"],
        ),
    ],
)
def test_a_model_or_loss_that_does_not_fit_is_refused_on_made_up_records(model, loss, codes):
    with refused(*codes):
        prepare_run(PUBLIC, Task(model, loss), METHOD, rounds=1)


@pytest.mark.parametrize("option", [{"width": 6}, {"levels": 4}, {"levels": 0}, {"groups": 0}])
def test_a_u_net_that_does_not_fit_is_refused(option):
    with refused("argument.value"):
        unet((1, 8, 8), 3, **option)


def test_a_u_net_takes_images_and_volumes_alone():
    for shape in ((8,), (1, 8), (1, 2, 8, 8, 8)):
        with refused("argument.value"):
            unet(shape, 3)


def test_public_facts_and_made_up_records_have_the_places():
    x, y = make_up_records(PUBLIC)
    assert (x.shape, y.shape) == ((8, 1, 8, 8), (8, 8, 8))
    assert (y[-1] == UNLABELED).all()
    assert set(np.unique(y)) == {UNLABELED, 0, 1, 2}
    assert PublicData.from_dict(PUBLIC.to_dict()) == PUBLIC
    assert "label_shape" not in PublicData("toy", ("a",), 9, (3,), "classes", 3).to_dict()


@pytest.mark.parametrize(
    "y", [np.zeros((3, 0), np.int64), np.zeros((3, 2), np.int32), np.zeros((3, 2, 2), np.float32)]
)
def test_labels_of_other_types_are_refused(y):
    with refused("data.array"):
        SiloData("a", np.ones((3, 2), np.float32), y, np.zeros(3, np.int64))


@pytest.mark.parametrize(("shape", "label", "is_right"), [((3,), UNLABELED, False), ((3, 2), UNLABELED, True),
    ((3, 2), -1, False), ((3, 2), 4, False)])  # fmt: skip
def test_only_a_place_may_be_without_a_label(shape, label, is_right):
    y = np.zeros(shape, np.int64)
    y[0] = label
    silo = SiloData("a", np.ones((3, 2), np.float32), y, np.zeros(3, np.int64))
    if is_right:
        assert Federation((silo,), 1, None, classes=4).label_shape == (2,)
    else:
        with refused("data.federation"):
            Federation((silo,), 1, None, classes=4)


def test_whole_numbers_in_columns_are_classes_only_where_their_number_is_declared():
    """They could be event and time, or yes and no."""
    silo = SiloData("a", np.ones((3, 2), np.float32), np.zeros((3, 2), np.int64), np.zeros(3, np.int64))
    with refused("data.federation"):
        Federation((silo,), 1, None)
    with refused("argument.value"):
        unet((1, 8, 8), None)
