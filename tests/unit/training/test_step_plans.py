"""Plans of steps: what a step takes is within the memory that its chunk leaves to it."""

import torch
from torch import nn

from silodp.errors import SilodpError
from silodp.training import LocalTraining, Task, cross_entropy
from silodp.training.sgd._planning import count_step_bytes, plan_chunks
from silodp.training.sgd._schedule import UserBatches
from silodp.training.sgd._trainer import Trainer


def make_trainer(local: LocalTraining) -> Trainer:
    task = Task(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), cross_entropy())
    x, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    return Trainer(task, task.initial(0), x, y, local)


def group(counts: list[int], local: LocalTraining) -> UserBatches:
    return UserBatches.of(torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)), local)


def assert_steps_fit(trainer: Trainer, chunks: list[tuple[torch.Tensor, int]]) -> dict:
    """Check the steps that really run, with their padding; return which shapes run as which."""
    plans, shapes = trainer.plan(chunks)
    for (_, step_bytes), segments in zip(chunks, plans, strict=True):
        for segment in segments:
            lanes, width = shapes.get(segment.shape, segment.shape)
            assert lanes * count_step_bytes(trainer.cost(width)) <= step_bytes, (lanes, width)
    return shapes


def test_the_padding_of_the_longest_batch_is_within_the_budget():
    """A batch of 900 records is padded to 960: a budget that holds 900 of them, and no more, is refused."""
    local = LocalTraining(0.1)
    trainer, users = make_trainer(local), group([900, 3, 2], local)
    row_bytes = trainer.task.size * 4
    unpadded = 8 * (2 * row_bytes + count_step_bytes(trainer.cost(900))) // 7 + 8
    accepted = 0
    for budget in range(unpadded, unpadded * 5 // 4, unpadded // 50):
        try:
            plan = plan_chunks(users, local, trainer.cost, row_bytes, budget, torch.device("cpu"))
        except SilodpError:
            continue
        accepted += 1
        counts = [users.counts[chunk] for chunk in plan.chunks]
        assert_steps_fit(trainer, list(zip(counts, plan.step_bytes, strict=True)))
    assert accepted > 5


def test_a_rare_step_runs_as_a_larger_one_only_where_that_fits():
    """Steps of one chunk are common, and twice as large as what the other chunk can hold."""
    trainer = make_trainer(LocalTraining(0.1, batch_size=16))
    many, few = torch.full((64,), 160), torch.full((8,), 9)
    one_user = count_step_bytes(trainer.cost(16))
    roomy = assert_steps_fit(trainer, [(many, 16 * one_user), (few, 16 * one_user)])
    assert roomy[8, 9] == (16, 16)
    tight = assert_steps_fit(trainer, [(many, 16 * one_user), (few, 8 * one_user)])
    assert (8, 9) not in tight  # it is interpreted
