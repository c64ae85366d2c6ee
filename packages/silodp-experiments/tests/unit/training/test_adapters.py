"""LoRA adapters of peft on a causal model: gradients per person, frozen weights, and what a person moves.

Run by `make test-pretrained`; skipped where peft is not installed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import silodp
from silodp.training import LocalTraining, Task, cross_entropy, record_gradients, user_updates
from silodp.training.models import causal_lm
from silodp_experiments.sequences import pack_sequences
from support.oracles import add_up
from support.reference import assert_equal_updates, looped, updates

peft = pytest.importorskip("peft")

WORDS, LENGTH, WIDTH, LAYERS, RANK = 11, 6, 8, 2, 2


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    network = causal_lm(WORDS, (LENGTH,), width=WIDTH, layers=LAYERS, heads=2)
    config = peft.LoraConfig(r=RANK, target_modules=["query", "value"])
    model = peft.inject_adapter_in_model(config, network).to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # they come as zeros, with which the others have no gradient
            nn.init.normal_(parameter)
    return model


def draw_records(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    coins = np.random.default_rng(seed)
    texts = [coins.integers(1, WORDS, coins.integers(5, 15)).tolist() for _ in range(30)]
    return pack_sequences(texts, coins.integers(0, 7, 30).tolist(), LENGTH)


def test_adapters_are_trained_per_person_as_by_a_loop_with_ordinary_autograd() -> None:
    task = Task(make_model(), cross_entropy())
    x, y, user = draw_records()
    start = task.initial(0)
    for local in (LocalTraining(0.3, 1), LocalTraining(0.1, 3, 2, 0.9)):
        found, wanted = updates(task, start, x, y, user, local, 2), looped(task, start, x, y, user, local, 2)
        assert_equal_updates(found, wanted, 1e-9)
        cosine = nn.functional.cosine_similarity
        assert all(float(cosine(found[who], wanted[who], 0)) > 1 - 1e-9 for who in found)


def test_gradients_of_rows_are_those_of_autograd() -> None:
    task = Task(make_model(), cross_entropy())
    x, y, _ = draw_records()
    start = task.initial(0)
    inputs, targets = task.tensors(x[:8], y[:8])
    wanted = []
    for row in range(8):
        model = task.load(start)
        nn.functional.cross_entropy(model(inputs[row : row + 1]), targets[row : row + 1]).backward()
        wanted.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    found = torch.cat([rows for _, rows in record_gradients(task, start, x[:8], y[:8])])
    assert found.shape == (8, task.size)
    assert float(nn.functional.cosine_similarity(found, torch.stack(wanted), dim=1).min()) > 1 - 1e-9


def test_frozen_weights_neither_move_nor_are_in_the_sum() -> None:
    model = make_model(torch.float32)
    x, y, user = draw_records()
    north = silodp.SiloData("north", x, y, user)
    federation = silodp.Federation((north,), users=7, test=None, classes=WORDS, categories=WORDS)
    task, local = Task(model, cross_entropy()), LocalTraining(0.5, 2, 2)
    # Two matrices for each of two layers in each block; `updates` asserts that rows are as long.
    assert task.size == LAYERS * 2 * 2 * WIDTH * RANK
    updates(task, task.initial(0), x, y, user, local, 0)
    method = silodp.methods.UldpAvg(noise_multiplier=1.0, step=1.0, local=local)
    trained = silodp.train(federation, task, method, rounds=2, seed=0).model
    before = dict(model.named_parameters())
    for name, after in trained.named_parameters():
        assert torch.equal(after, before[name]) == ("lora" not in name), name


def test_a_person_moves_the_sum_by_at_most_one_clip() -> None:
    task = Task(make_model(), cross_entropy())
    x, y, user = draw_records()
    start, local = task.initial(0), LocalTraining(5.0, 3)  # updates are longer than the clip of 1

    def add(rows: np.ndarray) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return add_up(user_updates(task, start, x[rows], y[rows], user[rows], local, generator), task.size)

    everyone = add(user >= 0)
    moves = [float((everyone - add(user != person)).norm()) for person in np.unique(user)]
    assert max(moves) == pytest.approx(1, abs=1e-3)
    assert max(moves) <= 1 + 1e-6
