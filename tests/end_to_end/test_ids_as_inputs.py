"""Token ids, and categories beside numbers, from the records to the trained model: in a simulation, in a deployment's
files, and refused before the first round where an id is not one of the public categories."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import silodp
from silodp.data.inputs import NamedArrays, map_arrays
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.runtime.prepare import prepare_run
from silodp.training import accuracy, cross_entropy
from silodp.training.made_up import make_up_records
from silodp.training.model_state import call_model
from silodp_budgets.rpdp.method import Rpdp
from silodp_deploy.records import load_records, save_records
from support.refusals import refused
from support.sequences import TOKENS, Mixed, Recurrent, Tied, Transformer, federation, mixed, tokens

LOCAL = silodp.LocalTraining(learning_rate=0.1, epochs=2, batch_size=4)
METHODS = {
    "uldp-avg": silodp.methods.UldpAvg(noise_multiplier=1.0, clip=0.5, local=LOCAL),
    "rpdp": Rpdp(
        noise_multiplier=1.0,
        clip=0.5,
        local_steps=2,
        rounds=2,
        delta=1e-5,
        largest_budget=8.0,
        expected_batch_size=4,
        local_learning_rate=0.1,
    ),
}
CASES = {
    "lstm": (lambda: Recurrent(nn.LSTM), tokens, TOKENS),
    "gru": (lambda: Recurrent(nn.GRU), tokens, TOKENS),
    "transformer": (lambda: Transformer(dropout=0.1), tokens, TOKENS),
    "tied": (Tied, tokens, [TOKENS] * 4),
    "mixed": (Mixed, mixed, {"categories": [4, 7]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_models_of_ids_are_trained(name, method):
    build, draw, categories = CASES[name]
    data = federation(draw(60), categories, budget=8.0 if method == "rpdp" else None)
    task = silodp.Task(build(), cross_entropy(), {"accuracy": accuracy})
    result = silodp.train(data, task, METHODS[method], rounds=2, seed=1)
    assert 0 <= result.metrics[-1]["metrics"]["accuracy"] <= 1
    assert result.epsilon > 0
    first, again = (silodp.train(data, task, METHODS[method], rounds=n, seed=1).params for n in (0, 2))
    assert not torch.equal(first, result.params)
    assert torch.equal(again, result.params)


@pytest.mark.parametrize("name", CASES)
def test_a_round_without_noise_equals_a_plain_loop_over_users(name):
    """The oracle: torch.optim.SGD for each user in each silo, clipped, averaged; no code of the engine."""
    build, draw, categories = CASES[name]
    data = federation(draw(60), categories)
    model = build().eval() if name == "transformer" else build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # which masks are drawn is no question of correctness
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    task = silodp.Task(model, cross_entropy())
    local, clip = silodp.LocalTraining(learning_rate=0.1, epochs=3), 0.05
    method = silodp.methods.UldpAvg(
        noise_multiplier=0.0, clip=clip, local=local, server_learning_rate=2.0, weighting="uniform"
    )
    start, found = (silodp.train(data, task, method, rounds=n, seed=1).params for n in (0, 1))
    total, clipped = torch.zeros_like(start), 0
    for silo in data.silos:
        for user in np.unique(silo.user):
            rows = np.flatnonzero(silo.user == user)
            x, y = silo.x[rows], torch.from_numpy(silo.y[rows])
            trained = task.load(start).train()
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                outputs = (
                    trained(**x.map(torch.from_numpy))
                    if isinstance(x, NamedArrays)
                    else trained(torch.from_numpy(x))
                )
                nn.functional.cross_entropy(outputs, y).backward()
                optimizer.step()
            delta = task.flatten(trained) - start
            clipped += int(delta.norm() > clip)
            total += delta * min(1.0, clip / float(delta.norm()))
    assert clipped > 0
    # The weight 1/S of every silo, and the server's scale 1/(U·S).
    wanted = start + 2.0 * total / len(data.silos) / (data.users * len(data.silos))
    assert torch.allclose(found, wanted, atol=1e-6)
    assert not torch.allclose(found, start, atol=1e-5)


def test_ids_without_a_declared_number_are_refused():
    for x in (tokens(20), mixed(20)):
        with pytest.raises(SilodpError) as caught:
            federation(x, None)
        assert caught.value.code == "model.integer_inputs"


@pytest.mark.parametrize(
    ("x", "categories", "code"),
    [
        (tokens(20), TOKENS - 2, "data.federation"),
        (tokens(20) - 1, TOKENS, "data.federation"),
        (mixed(20), [4, 5], "data.federation"),
        (tokens(20), [TOKENS] * 3, "data.categories"),
        (tokens(20), 0, "data.categories"),
        (tokens(20), True, "data.categories"),
        (tokens(20), "12", "data.categories"),
        (mixed(20), {"numeric": 3, "categories": 7}, "data.categories"),
        (mixed(20)["numeric"], 3, "data.categories"),
    ],
)
def test_ids_and_their_number_must_fit(x, categories, code):
    if not isinstance(x, dict) and x.dtype == np.float32:
        x = {"numeric": x}
    with pytest.raises(SilodpError) as caught:
        federation(x, categories)
    assert caught.value.code == code


def test_held_out_ids_must_be_of_the_categories_too():
    data = federation(tokens(60), TOKENS)
    first = data.silos[0]
    wrong = replace(first.test, x=first.test.x + TOKENS)
    with pytest.raises(SilodpError) as caught:
        replace(data, silos=(replace(first, test=wrong), *data.silos[1:]))
    assert caught.value.code == "data.federation"


def test_a_model_with_fewer_rows_than_there_are_ids_is_refused_before_the_first_round():
    data = federation(tokens(60), TOKENS + 5)  # no record has an id above TOKENS - 1
    task = silodp.Task(Recurrent(nn.GRU), cross_entropy())
    with pytest.raises(SilodpError) as caught:
        silodp.train(data, task, METHODS["uldp-avg"], rounds=1)
    assert caught.value.code == "data.categories"


def test_made_up_records_reach_the_largest_id_of_every_column():
    public = federation(mixed(40), [4, 7]).public()
    x, _ = make_up_records(public)
    assert x["numeric"].dtype == np.float32
    assert x["categories"].dtype == np.int64
    assert x["categories"].max(0).tolist() == [3, 6]
    assert x["categories"].min() >= 0


def test_the_public_facts_name_the_inputs_and_identify_the_run():
    one, other = (federation(mixed(40), {"categories": K}).public() for K in ([4, 7], [4, 8]))
    assert PublicData.from_dict(one.to_dict()) == one
    assert (one.feature_count, one.categories) == (3, [4, 7])
    assert one.record_shape == ()
    task = silodp.Task(Mixed(), cross_entropy())
    specs = [prepare_run(data, task, METHODS["uldp-avg"], rounds=1) for data in (one,)]
    with pytest.raises(SilodpError):  # the probe asks for category 7 of the second column
        prepare_run(other, task, METHODS["uldp-avg"], rounds=1)
    wide = silodp.Task(Mixed(categories=(4, 8)), cross_entropy())
    assert prepare_run(other, wide, METHODS["uldp-avg"], rounds=1).digest != specs[0].digest


def test_records_of_several_arrays_are_stored_for_a_deployment_and_read_back(tmp_path):
    silo = federation(mixed(40), [4, 7]).silos[0]
    path = tmp_path / "records.npz"
    save_records(path, silo)
    with np.load(path) as stored:
        assert {"x.numeric", "x.categories", "test_x.numeric"} <= set(stored)
    public = federation(mixed(40), [4, 7]).public()
    resolved = SimpleNamespace(config=SimpleNamespace(task=SimpleNamespace(loss=None)))
    unchecked = SimpleNamespace(
        method=METHODS["uldp-avg"]
    )  # the unit is a person: no number of records is checked
    read = load_records(
        path, silo.name, SimpleNamespace(data=public, stated_spec=unchecked, resolved=resolved)
    )
    assert read.digest() == silo.digest()
    assert read.test.digest() == silo.test.digest()
    narrow = SimpleNamespace(
        data=federation(mixed(40), [9, 7]).public(), stated_spec=unchecked, resolved=resolved
    )
    load_records(path, silo.name, narrow)  # ids that do not occur are no fault
    too_few = replace(public, inputs=(public.inputs[0], replace(public.inputs[1], categories=(2, 7))))
    with pytest.raises(SilodpError) as caught:
        load_records(path, silo.name, SimpleNamespace(data=too_few, stated_spec=unchecked, resolved=resolved))
    assert caught.value.code == "deploy.data"
    assert len(str(caught.value)) < 400


def test_named_arrays_tell_no_values():
    silo = federation(mixed(40), [4, 7]).silos[0]
    for text in (repr(silo), repr(silo.x)):
        assert "numeric" in text
        assert "." not in text.replace("x.numeric", "").replace("x.categories", "")
    renamed = {"numeric": silo.x["numeric"], "codes": silo.x["categories"]}
    assert replace(silo, test=None).digest() != replace(silo, x=renamed, test=None).digest()


@pytest.mark.parametrize(
    "x",
    [
        {},
        {"two words": np.ones((4, 1), np.float32)},
        {"a": np.ones((4, 1), np.float32), "b": np.ones((3, 1), np.float32)},
        {"a": [1.0, 2.0]},
        {"a": np.ones(4, np.float32)},
        {"a": np.full((4, 1), np.nan, np.float32)},
    ],
)
def test_arrays_that_are_no_inputs_are_refused(x):
    with pytest.raises(SilodpError) as caught:
        silodp.SiloData("a", x, np.zeros(4, np.int64), np.arange(4))
    assert caught.value.code == "data.array"


@pytest.mark.parametrize("name", ["tied", "mixed"])
def test_a_finished_run_predicts_from_ids_and_named_arrays(name, tmp_path):
    """From the directory alone, for inputs as the model takes them; what does not fit is one sentence."""
    build, draw, categories = CASES[name]
    data = federation(draw(60), categories)
    silodp.train(
        data, silodp.Task(build(), cross_entropy()), METHODS["uldp-avg"], rounds=1, out=tmp_path / "run"
    )
    loaded = silodp.load(tmp_path / "run", model=build())
    x = data.silos[0].x
    inputs = x if isinstance(x, np.ndarray) else {key: x[key] for key in x.keys()}  # noqa: SIM118
    found = loaded.predict(inputs)
    assert found.shape[0] == len(x)
    np.testing.assert_allclose(found.sum(axis=1), 1)
    with torch.no_grad():
        direct = call_model(loaded.model, map_arrays(torch.from_numpy, x)).softmax(1)
    np.testing.assert_allclose(found, direct.numpy(), rtol=1e-5)
    wrong = {"a": np.zeros((2, 1)), "b": np.zeros((3, 1))} if name == "mixed" else {"a": np.zeros((2, 1))}
    with refused("argument.shape"):
        loaded.predict(wrong)
    for unseen in (-1, 1000):
        ids = map_arrays(
            lambda one, unseen=unseen: np.full_like(one, unseen) if one.dtype.kind == "i" else one, x
        )
        with refused("argument.value"):
            loaded.predict(ids)
