"""Plans of steps: what a step takes is within the memory that its chunk leaves to it, and planning is in proportion to
the users."""

import gc

import torch
from torch import nn

from silodp.errors import SilodpError
from silodp.training import LocalTraining, Task, cross_entropy
from silodp.training.sgd import _packing, _planning, _trainer
from silodp.training.sgd._packing import Segment, StepTime
from silodp.training.sgd._planning import count_step_bytes, plan_chunks
from silodp.training.sgd._schedule import UserBatches
from silodp.training.sgd._trainer import Trainer
from support.reference import assert_equal_updates, ragged, updates


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
        for segment in segments():
            padded_users, width = shapes.get(segment.shape, segment.shape)
            assert padded_users * count_step_bytes(trainer.cost(width)) <= step_bytes, (padded_users, width)
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


def count_compared(monkeypatch, users: int) -> tuple[int, int]:
    """Return how many users the planner looked at, all segments together, and the number of segments."""
    looked_at = []
    join = _packing._join_kinds

    def counted(kinds, *rest):
        looked_at.append(len(kinds))
        return join(kinds, *rest)

    monkeypatch.setattr(_packing, "_join_kinds", counted)
    counts = torch.arange(users).remainder(5).add(1).sort(descending=True).values
    time = StepTime(1.0, 5.0, lambda width: 0.5 * width)  # at most 16 users of two records a step
    segments = list(_packing.plan_segments(counts, LocalTraining(0.1, 2, 2), time, lambda width: 16))
    monkeypatch.undo()
    begun = torch.cat([segment.users[segment.done == 0] for segment in segments])
    assert torch.equal(begun.sort().values, torch.arange(users))
    return sum(looked_at), len(segments)


def test_planning_takes_time_in_proportion_to_the_users(monkeypatch):
    few, segments = count_compared(monkeypatch, 3000)
    many, more = count_compared(monkeypatch, 24_000)
    assert 7 * segments < more < 9 * segments
    assert many < 9 * few


def test_the_segments_in_memory_are_bounded(monkeypatch):
    """Those beyond a number are planned again when they run, and are the same."""
    local = LocalTraining(0.1, 2, 2)
    task = make_trainer(local).task
    x, y, user = ragged([1 + n % 5 for n in range(600)], 0)
    gc.collect()
    gc.freeze()  # what is there already is not looked at at every step, which took most of the test's time
    alive = []
    run = Trainer._run

    def count(self, segment, *rest):
        alive.append(sum(type(thing) is Segment for thing in gc.get_objects()))
        return run(self, segment, *rest)

    monkeypatch.setattr(Trainer, "_run", count)
    monkeypatch.setattr(_planning, "_WORKING_SET", {"cpu": 8000})  # small chunks and steps
    found = []
    try:
        for limit in (6, 10**6):
            monkeypatch.setattr(_trainer, "_KEPT_SEGMENTS", limit)
            alive.clear()
            found.append(updates(task, task.initial(0), x, y, user, local, 0))
            assert len(alive) > 20
            assert (max(alive) <= 6 + 2) == (limit == 6)
    finally:
        gc.unfreeze()
    assert_equal_updates(*found, 0)
