"""Losses against torch, lifelines and torchsurv; metrics against scikit-learn and lifelines."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap
from torch.nn import functional as F

from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.methods import FederationSize, UldpAvg
from silodp.runtime.inspection import describe_model, inspect_model
from silodp.training import (
    Loss,
    Task,
    accuracy,
    average_precision,
    binary_cross_entropy,
    concordance,
    cox,
    cross_entropy,
    exponential_survival,
    mean_absolute_error,
    r2,
    roc_auc,
    squared_error,
)
from silodp.training.losses import LOSSES, _log_risk_pairwise, _log_risk_sorted
from silodp.training.metrics import METRICS
from support.refusals import refused
from support.specs import make_spec


def survival(n, seed, ties=False):
    rng = np.random.default_rng(seed)
    time = rng.integers(1, 5, n) if ties else rng.permutation(n) + 1
    return (
        torch.tensor(rng.normal(size=n)),
        torch.tensor(np.stack([rng.integers(0, 2, n), time], 1), dtype=torch.float64),
    )


CASES = {
    "cross_entropy": (cross_entropy(), lambda g, n: torch.randint(0, 3, (n,), generator=g), 3),
    "weighted": (cross_entropy([0.5, 1.0, 2.0]), lambda g, n: torch.randint(0, 3, (n,), generator=g), 3),
    "binary": (binary_cross_entropy(), lambda g, n: torch.randint(0, 2, (n,), generator=g), 1),
    "squared": (squared_error(), lambda g, n: torch.randn(n, generator=g), 1),
    "cox": (cox(), lambda g, n: torch.rand(n, 2, generator=g).round(decimals=1), 1),
    "exponential": (
        exponential_survival(0.5),
        lambda g, n: torch.rand(n, 2, generator=g).round(decimals=1),
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
@given(n=st.integers(1, 6), padding=st.integers(0, 4), seed=st.integers(0, 999))
@settings(max_examples=25, deadline=None)
def test_the_mask_hides_padding_and_its_gradient(name, n, padding, seed):
    loss, draw, width = CASES[name]
    g = torch.Generator().manual_seed(seed)
    outputs, targets = torch.randn(n + padding, width, generator=g).double(), draw(g, n + padding)
    mask = torch.cat([torch.ones(n), torch.zeros(padding)]).double()
    alone = loss.function(outputs[:n], targets[:n], mask[:n])
    assert torch.allclose(loss.function(outputs, targets, mask), alone)
    slope = grad(loss.function)(outputs, targets, mask)
    assert torch.allclose(slope[:n], grad(loss.function)(outputs[:n], targets[:n], mask[:n]))
    assert (slope[n:] == 0).all()
    nobody = torch.zeros_like(mask)
    assert loss.function(outputs, targets, nobody) == 0
    assert (grad(loss.function)(outputs, targets, nobody) == 0).all()


def test_values_are_torchs():
    z, k = torch.randn(7, 3), torch.randint(0, 3, (7,))
    one, weights = torch.ones(7), [0.5, 1.0, 2.0]
    assert torch.allclose(cross_entropy().function(z, k, one), F.cross_entropy(z, k))
    weighted = (F.cross_entropy(z, k, reduction="none") * torch.tensor(weights)[k]).mean()
    assert torch.allclose(cross_entropy(weights).function(z, k, one), weighted)
    y = torch.randint(0, 2, (7,))
    wanted = F.binary_cross_entropy_with_logits(z[:, 0], y.float())
    for outputs in (z[:, 0], z[:, :1]):
        assert torch.allclose(binary_cross_entropy().function(outputs, y, one), wanted)
        assert torch.allclose(binary_cross_entropy().function(outputs, y.float(), one), wanted)
    per = F.binary_cross_entropy_with_logits(z[:, 0], y.float(), reduction="none")
    wanted = (per * torch.where(y == 1, 3.0, 0.5)).mean()
    assert torch.allclose(binary_cross_entropy([0.5, 3.0]).function(z[:, 0], y, one), wanted)
    target = torch.randn(7)
    assert torch.allclose(squared_error().function(z[:, :1], target, one), F.mse_loss(z[:, 0], target))
    far = torch.tensor([-200.0, 200.0, 1e30])  # no overflow
    assert binary_cross_entropy().function(far, torch.tensor([0, 1, 1]), torch.ones(3)) == 0


def test_wrong_shapes_and_weights_are_named():
    with pytest.raises(SilodpError, match="one output per record"):
        binary_cross_entropy().function(torch.randn(3, 2), torch.zeros(3), torch.ones(3))
    with pytest.raises(SilodpError, match="needs 2 numbers"):
        binary_cross_entropy([1.0])
    for wrong in ([], [-1.0], [float("nan")]):
        with pytest.raises(SilodpError, match="class_weights"):
            cross_entropy(wrong)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(3))
def test_cox_is_lifelines_and_torchsurvs_partial_likelihood(seed):
    lifelines, torchsurv = pytest.importorskip("lifelines"), pytest.importorskip("torchsurv.loss.cox")
    import pandas as pd

    score, target = survival(30, seed)
    found = float(cox().function(score, target, torch.ones(30).double())) * 30
    frame = pd.DataFrame({"x": score.numpy(), "event": target[:, 0].numpy(), "time": target[:, 1].numpy()})
    # lifelines' log likelihood at its own optimum β is ours at the scores β·x.
    fitted = lifelines.CoxPHFitter().fit(frame, "time", "event")
    at_optimum = cox().function(score * float(fitted.params_["x"]), target, torch.ones(30).double()) * 30
    assert float(at_optimum) == pytest.approx(-fitted.log_likelihood_, rel=1e-6)
    wanted = torchsurv.neg_partial_log_likelihood(score, target[:, 0].bool(), target[:, 1], reduction="sum")
    assert found == pytest.approx(float(wanted), rel=1e-6)


def test_exponential_survival_is_poisson_regression_with_the_time_as_exposure():
    score, target = survival(30, 0)
    event, time = target.T
    at_risk = torch.nn.functional.poisson_nll_loss(score + torch.log(time / 7.0), event, reduction="sum")
    constant = float((event * torch.log(time / 7.0)).sum())  # does not depend on the model
    found = exponential_survival(7.0).function(score[:, None], target, torch.ones(30).double()) * 30
    assert float(found) == pytest.approx(float(at_risk) + constant, rel=1e-12)


def test_a_constant_hazard_is_events_per_time_whatever_the_typical_time():
    _, target = survival(30, 1)
    event, time = target.T
    for typical in (0.1, 7.0, 900.0):
        best = torch.log(event.sum() / time.sum() * typical).expand(30)
        slope = grad(exponential_survival(typical).function)(best, target, torch.ones(30).double())
        assert float(slope.sum()) == pytest.approx(0.0, abs=1e-12)
        assert float(slope.abs().sum()) > 0.1


def test_cox_breaks_ties_as_breslow():
    score, target = survival(20, 0, ties=True)
    wanted = 0.0
    for i in range(20):
        if target[i, 0]:
            at_risk = target[:, 1] >= target[i, 1]
            wanted += float(score[at_risk].exp().sum().log() - score[i]) / 20
    assert float(cox().function(score, target, torch.ones(20).double())) == pytest.approx(wanted)


@given(n=st.integers(1, 30), padded=st.integers(0, 9), seed=st.integers(0, 999), ties=st.booleans())
@settings(max_examples=50, deadline=None)
def test_the_sorted_and_the_pairwise_risk_sums_agree(n, padded, seed, ties):
    score, target = survival(n + padded, seed, ties)
    mask = torch.ones(n + padded).double()
    mask[torch.randperm(n + padded, generator=torch.Generator().manual_seed(seed))[:padded]] = 0
    real = mask == 1
    a, b = (f(score, target[:, 1], mask)[real] for f in (_log_risk_pairwise, _log_risk_sorted))
    assert torch.allclose(a, b)
    slopes = [
        grad(lambda s, f=f: (mask * f(s, target[:, 1], mask)).sum())(score)
        for f in (_log_risk_pairwise, _log_risk_sorted)
    ]
    assert torch.allclose(*slopes, atol=1e-9)


def test_the_sorted_risk_sum_runs_for_many_users():
    score, time, mask = torch.randn(4, 9), torch.rand(4, 9).round(decimals=1), torch.ones(4, 9)
    found = vmap(_log_risk_sorted)(score, time, mask)
    assert torch.allclose(found, vmap(_log_risk_pairwise)(score, time, mask), atol=1e-5)


def test_cox_without_events_is_zero_with_zero_gradient():
    score, target = survival(5, 0)
    target[:, 0] = 0
    mask = torch.ones(5).double()
    assert cox().function(score, target, mask) == 0
    assert (grad(cox().function)(score, target, mask) == 0).all()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_concordance_is_lifelines(seed, ties, monkeypatch):
    utils = pytest.importorskip("lifelines.utils")
    monkeypatch.setattr("silodp.training.metrics._PAIRS_AT_ONCE", 100)
    score, target = survival(60, seed, ties)
    if ties:
        score = score.round(decimals=0)
    wanted = utils.concordance_index(target[:, 1].numpy(), -score.numpy(), target[:, 0].numpy())
    assert concordance(score, target) == pytest.approx(wanted)


def test_two_class_metrics_are_scikit_learns():
    from sklearn import metrics

    z, y = torch.randn(40, 2), torch.randint(0, 2, (40,))
    difference = (z[:, 1] - z[:, 0]).double()
    for name, reference in (("roc_auc", "roc_auc_score"), ("average_precision", "average_precision_score")):
        wanted = getattr(metrics, reference)(y, difference)
        assert METRICS[name](z, y) == METRICS[name](difference, y) == pytest.approx(wanted)
    assert accuracy(z, y) == pytest.approx(float((z.argmax(1) == y).double().mean()))
    assert accuracy(torch.tensor([[1.0], [-1.0], [2.0]]), torch.tensor([1, 1, 0])) == pytest.approx(1 / 3)
    with pytest.raises(SilodpError, match="two classes"):
        roc_auc(torch.randn(4, 3), torch.zeros(4))


def test_metrics_of_numbers_are_scikit_learns():
    from sklearn.metrics import mean_absolute_error as reference
    from sklearn.metrics import r2_score

    z, y = torch.randn(40, 1), torch.randn(40)
    assert r2(z, y) == r2(z[:, 0], y) == pytest.approx(r2_score(y, z))
    assert mean_absolute_error(z, y) == pytest.approx(reference(y, z))
    assert mean_absolute_error(z, y, spread=15.0) == pytest.approx(reference(15 * y, 15 * z))
    with refused("metric.wrong_labels"):
        r2(torch.randn(40, 2), y)
    with refused("metric.wrong_labels"):
        mean_absolute_error(z, torch.ones(40, 2))


@pytest.mark.filterwarnings("error")
def test_undefined_metrics_of_numbers_are_nan():
    z, y = torch.randn(4), torch.arange(4.0)
    assert math.isnan(r2(z, torch.ones(4)))
    assert math.isnan(r2(z[:1], y[:1]))
    for metric in (r2, mean_absolute_error):
        assert math.isnan(metric(z[:0], y[:0]))
        assert math.isnan(metric(torch.tensor([1.0, math.inf, 2.0, 3.0]), y))


def test_undefined_metrics_are_nan():
    z, ones = torch.randn(4), torch.ones(4)
    assert math.isnan(roc_auc(z, ones))
    assert math.isnan(average_precision(z, ones))
    assert math.isnan(concordance(z, torch.zeros(4, 2)))
    assert math.isnan(accuracy(z[:0], ones[:0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metric", [roc_auc, average_precision])
def test_scores_that_are_not_finite_have_no_ranking(metric, bad):
    z, y = torch.tensor([0.3, -1.0, 2.0, 0.5]), torch.tensor([0, 0, 1, 1])
    assert metric(z, y) == 1.0
    z[1] = bad
    assert math.isnan(metric(z, y))
    assert math.isnan(metric(torch.stack([-z, z], 1), y))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_hazards_that_are_not_finite_have_no_concordance(bad):
    hazard, target = torch.tensor([0.3, -1.0, 2.0]), torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 1.0]])
    assert concordance(hazard, target) == 1.0
    hazard[1] = bad
    assert math.isnan(concordance(hazard, target))


Z, CLASSES = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda o, t: F.cross_entropy(o, t), ()),  # the mean, in place of reduction="none"
        (lambda o, t: F.mse_loss(o[:, :1], t.to(o.dtype), reduction="none"), (4, 4)),  # (n, 1) against (n,)
        (lambda o, t: F.mse_loss(o, o.detach(), reduction="none"), (4, 3)),
        (lambda o, t: F.cross_entropy(o, t, reduction="none").unsqueeze(1), (4, 1)),
        (lambda o, t: F.cross_entropy(o, t, reduction="none")[:2], (2,)),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_of_records_that_is_no_number_per_record_is_refused(function, shape):
    assert function(Z, CLASSES).shape == shape
    with pytest.raises(SilodpError) as caught:
        Loss.per_record("own", function).compute(Z, CLASSES, torch.ones(4))
    assert caught.value.code == "loss.not_per_record"
    assert ('reduction="none"' in str(caught.value)) == (shape == ())


def test_a_single_number_is_refused_where_one_record_is_trained_alone():
    loss = Loss.per_record("own", lambda o, t: F.cross_entropy(o, t))
    with pytest.raises(SilodpError) as caught:
        loss.compute(Z[:1], CLASSES[:1], torch.ones(1))
    assert caught.value.code == "loss.not_per_record"


def explode(*_):
    raise ZeroDivisionError("no " * 1000)


def leave(*_):
    raise SystemExit(0)


@pytest.mark.parametrize("function", [explode, leave])
def test_what_a_loss_or_metric_raises_is_one_short_sentence_with_its_type(function):
    kind = ZeroDivisionError if function is explode else SystemExit
    task = Task(torch.nn.Linear(3, 3), cross_entropy(), {"own": function})
    for code, call in (
        ("loss.raised", lambda: Loss.per_record("own", function).compute(Z, CLASSES, torch.ones(4))),
        ("metric.raised", lambda: task.evaluate(task.initial(0), Z, CLASSES)),
    ):
        with pytest.raises(SilodpError) as caught:
            call()
        assert caught.value.code == code
        assert isinstance(caught.value.__cause__, kind)
        assert kind.__name__ in str(caught.value)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", [None, "good", torch.ones(2)])
def test_a_metric_that_is_no_number_is_refused(value):
    task = Task(torch.nn.Linear(3, 3), cross_entropy(), {"own": lambda o, t: value})
    with pytest.raises(SilodpError) as caught:
        task.evaluate(task.initial(0), Z, CLASSES)
    assert caught.value.code == "metric.raised"


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "code"),
    [
        (cross_entropy(), Z[:, :1], CLASSES, "loss.output_shape"),
        (cross_entropy(), Z, CLASSES.float(), "loss.wrong_labels"),
        (cox(), Z[:, :1], CLASSES, "loss.wrong_labels"),
        (exponential_survival(1.0), Z[:, :1], CLASSES, "loss.wrong_labels"),
        (exponential_survival(1.0), Z, torch.ones(4, 2), "loss.output_shape"),
        (binary_cross_entropy(), Z[:, :1], torch.ones(4, 2), "loss.wrong_labels"),
        (squared_error(), Z[:, :2], torch.ones(4), "loss.output_shape"),
        (squared_error(), Z[:, :1], torch.ones(4, 2), "loss.output_shape"),
        (Loss("own", lambda o, t, mask: mask * o[:, 0]), Z, CLASSES, "loss.not_scalar"),
        (Loss("own", lambda o, t, mask: 1.0), Z, CLASSES, "loss.not_scalar"),
    ],
)
def test_losses_refuse_outputs_and_labels_that_do_not_fit(loss, outputs, targets, code):
    with pytest.raises(SilodpError) as caught:
        loss.compute(outputs, targets, torch.ones(4))
    assert caught.value.code == code


@pytest.mark.parametrize("wrong", ["cross_entropy", "binary_cross_entropy", "squared_error", "cox"])
@pytest.mark.parametrize(
    ("outputs", "labels", "classes", "fitting"),
    [
        (1, "classes", 2, "binary_cross_entropy"),
        (3, "classes", 3, "cross_entropy"),
        (1, "real", None, "squared_error"),
        (1, "survival", None, "cox"),
    ],
)
def test_a_refused_loss_names_the_one_that_fits_first(outputs, labels, classes, fitting, wrong):
    public = PublicData("test", ("a", "b"), 10, (3,), labels, classes)
    task = Task(torch.nn.Linear(3, outputs), LOSSES[wrong]())
    if wrong == fitting or (wrong, labels) == ("binary_cross_entropy", "real"):
        inspect_model(public, task, UldpAvg(noise_multiplier=1.0))
        return
    with refused("loss.wrong_labels", "loss.output_shape") as caught:
        inspect_model(public, task, UldpAvg(noise_multiplier=1.0))
    named = [name for name in re.findall(r"\w+", str(caught.value)) if name in LOSSES and name != wrong]
    assert named[:1] == [fitting]
    if labels == "real":
        assert caught.value.code == "loss.wrong_labels"


@pytest.mark.parametrize(
    ("metric", "targets"),
    [
        (concordance, CLASSES),
        (accuracy, torch.rand(4, 2)),
        (accuracy, torch.tensor([0.5, 1.0, 0.0, 1.0])),
        (roc_auc, torch.rand(4, 2)),
        (average_precision, torch.tensor([0.5, 1.0, 0.0, 1.0])),
    ],
)
def test_metrics_refuse_labels_that_do_not_fit(metric, targets):
    with pytest.raises(SilodpError) as caught:
        metric(Z[:, :1], targets)
    assert caught.value.code == "metric.wrong_labels"


def test_what_is_no_function_is_refused():
    for make, code in (
        (lambda: Loss.per_record("own", 7), "loss.not_callable"),
        (lambda: Loss("own", 7), "loss.not_callable"),
        (lambda: Task(torch.nn.Linear(3, 3), cross_entropy(), {"own": 7}), "metric.not_callable"),
    ):
        with pytest.raises(SilodpError) as caught:
            make()
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("weights", "code"),
    [
        ("ab", "argument.type"),
        (3, "argument.type"),
        ([1.0], "argument.shape"),
        ([1.0, -1.0], "argument.value"),
    ],
)
def test_class_weights_that_are_none_are_refused(weights, code):
    with pytest.raises(SilodpError) as caught:
        binary_cross_entropy(weights)
    assert caught.value.code == code


class Remembering(torch.nn.Linear):
    """A layer that could keep what it has seen."""


def own(outputs, targets):
    return (outputs.squeeze(1) - targets) ** 2


def with_backward_hook():
    model = torch.nn.Linear(3, 1)
    model.register_full_backward_hook(lambda *_: None)
    return model


def with_hook():
    model = torch.nn.Linear(3, 1)
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "loss", "metrics", "is_other"),
    [
        (torch.nn.Linear(3, 1), squared_error(), {"r2": r2}, False),
        (torch.nn.Sequential(torch.nn.Linear(3, 1)), torch.nn.HuberLoss(), {}, False),
        (torch.nn.Linear(3, 1), exponential_survival(30.0), {"concordance": concordance}, False),
        (torch.nn.Sequential(Remembering(3, 1)), squared_error(), {}, True),
        (with_hook(), squared_error(), {}, True),
        (with_backward_hook(), squared_error(), {}, True),
        (torch.nn.TransformerEncoderLayer(4, 2, activation=torch.tanh), squared_error(), {}, False),
        (torch.nn.TransformerEncoderLayer(4, 2, activation=lambda x: x), squared_error(), {}, True),
        (torch.nn.Linear(3, 1), Loss.per_record("own", own), {}, True),
        (torch.nn.Linear(3, 1), Loss("own", lambda outputs, targets, mask: outputs.sum()), {}, True),
        (torch.nn.Linear(3, 1), squared_error(), {"own": lambda outputs, targets: 1.0}, True),
    ],
)
def test_code_of_others_is_told_from_ours(model, loss, metrics, is_other):
    task = Task(model, loss, metrics)
    assert task.has_other_code == is_other
    assert describe_model(task).other_code == is_other


def test_whose_code_it_is_does_not_change_which_run_it_is():
    spec = make_spec("", ("a", "b"), UldpAvg(5.0, 1.0), FederationSize(2, 10), 4)
    other = replace(spec, model=replace(spec.model, other_code=True))
    assert spec.digest == other.digest
    assert json.loads(other.to_json()) == json.loads(spec.to_json()) | {"other_code": True}
