"""Models whose operations vmap cannot run train at once all the same, with the gradients of plain autograd."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from silodp.training import LocalTraining, Task, cross_entropy, record_gradients, silo_update
from silodp.training.gradients import is_looped, select_gradient
from silodp.training.per_record import is_per_record
from support.reference import assert_equal_updates, looped, ragged, updates


class Joins(nn.Module):
    """Puts columns side by side, as tabm does its features."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.column_stack([self.first(x).relu(), x, x[:, 0].square()]))


class Joins1d(Joins):
    def forward(self, x):
        return self.last(torch.column_stack([x[:, 0], x[:, 1], self.first(x), x[:, 2], x.sum(1)]))


class Bilinear(nn.Module):
    """A layer that torch composes of others, and lists for nobody."""

    def __init__(self):
        super().__init__()
        self.inside, self.last = nn.Bilinear(3, 3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.inside(x, x.tanh()))


class Masks(nn.Module):
    """Attends to what is positive, and leaves the mask out where it hides nothing, as transformers do."""

    def __init__(self):
        super().__init__()
        self.into, self.last = nn.Linear(1, 8), nn.Linear(8, 2)

    def forward(self, x):
        hidden, mask = self.into(x.unsqueeze(2)), x > -0.5
        if not torch.compiler.is_compiling() and mask.all():
            mask = None
        found = F.scaled_dot_product_attention(
            hidden, hidden, hidden, None if mask is None else mask[:, None, :]
        )
        return self.last(found.nan_to_num().mean(1))


class Writes(nn.Module):
    """Writes into zeros."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        wide = torch.zeros(len(x), 4, dtype=x.dtype)
        wide[:, :3] = x
        wide[:, 3].add_(1)
        wide += x.mean(1, keepdim=True)
        return self.last(wide)


class Integrates(nn.Module):
    """Fills in the states at some times, step by step, as torchdiffeq does at fixed steps."""

    def __init__(self):
        super().__init__()
        self.slope, self.last = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), nn.Linear(3, 2)

    def forward(self, x):
        times = torch.linspace(0, 1, 5, dtype=x.dtype)
        states = torch.empty(len(times), *x.shape, dtype=x.dtype)
        states[0] = x
        for place in range(1, len(times)):
            x = x + (times[place] - times[place - 1]) * self.slope(x)
            states[place] = x
        return self.last(states[-1] + states[2])


class Recomputes(nn.Module):
    """Runs its first layers again in the backward pass; inputs are asked for gradients, as transformers do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 2)

    def forward(self, x):
        hidden = (1 * x).requires_grad_(True)
        return self.last(checkpoint(self.first, hidden, use_reentrant=False))


class Recurs(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inside, self.last = kind(1, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.inside(x.unsqueeze(2))[0][:, -1])


class Packs(nn.Module):
    """Runs a layer on packed sequences of their own lengths, and takes their last states and outputs."""

    def __init__(self, kind, **options):
        super().__init__()
        self.inside, self.last = kind(1, 4, batch_first=True, **options), nn.LazyLinear(2)
        self.double()(torch.randn(2, 3, dtype=torch.float64))

    def forward(self, x):
        lengths = (x > -0.5).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            x.unsqueeze(2), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        outputs, state = self.inside(packed)
        state = torch.cat(state, 2) if isinstance(state, tuple) else state
        padded, same = nn.utils.rnn.pad_packed_sequence(outputs, True, -0.5, total_length=4)
        return self.last(
            torch.cat([state.transpose(0, 1).flatten(1), padded.square().mean(1), same[:, None] / 3], 1)
        )


class Projects(nn.Module):
    """Projects states of packed sequences of one step to one number, as which wider states would pass, too."""

    def __init__(self):
        super().__init__()
        self.inside, self.last = nn.LSTM(3, 4, proj_size=1, batch_first=True), nn.Linear(1, 2)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(
            x.unsqueeze(1), (x[:, 0] > 0).long().clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        return self.last(self.inside(packed)[1][0][0].sum(1, keepdim=True))


class Pads(nn.Module):
    """Packs sequences, and pads them again."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        lengths = (x > -0.5).sum(1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.last(nn.utils.rnn.pad_packed_sequence(packed, True, total_length=3)[0])


class Views(Writes):
    """Writes into a part of zeros, which is another tensor on the same memory."""

    def forward(self, x):
        wide = torch.zeros(len(x), 4, dtype=x.dtype)
        part = wide[:, :3]
        part += x
        return self.last(wide)


class Aliases(Writes):
    """Looks at zeros that were written into by another tensor on the same memory."""

    def forward(self, x):
        wide = torch.zeros(len(x), 4, dtype=x.dtype)
        other = wide.detach()
        wide[:, :3] = x
        return self.last(other + 0 * wide)


AT_ONCE = {
    "columns": Joins,
    "columns of numbers": Joins1d,
    "bilinear": Bilinear,
    "mask": Masks,
    "writes": Writes,
    "integral": Integrates,
    "checkpoints": Recomputes,
    "lstm": lambda: Recurs(nn.LSTM),
    "gru": lambda: Recurs(nn.GRU),
    "packed lstm": lambda: Packs(nn.LSTM, num_layers=2, bidirectional=True),
    "packed gru": lambda: Packs(nn.GRU, bias=False, bidirectional=True),
    "packed numbers": Pads,
    "packed rnn": lambda: Packs(nn.RNN, num_layers=2, nonlinearity="relu"),
}
IN_TURN = {"view": Views, "alias": Aliases, "packed projections": lambda: Packs(nn.LSTM, proj_size=2),
           "packed projections to a number": Projects}  # fmt: skip


def build(name) -> Task:
    torch.manual_seed(0)
    return Task({**AT_ONCE, **IN_TURN}[name]().double(), cross_entropy())


@pytest.mark.parametrize("name", [*AT_ONCE, *IN_TURN])
@pytest.mark.parametrize("local", [LocalTraining(0.1, 3), LocalTraining(0.01, 30, 2, 0.9, 0.01)])
def test_updates_are_those_of_a_loop_over_users(name, local):
    task = build(name)
    x, y, user = ragged([4, 1, 0, 7, 3], 1)
    task.check(x, y)
    assert is_looped(select_gradient("user", task, *task.tensors(x, y))) == (name in IN_TURN)
    start = task.initial(1)
    found = updates(task, start, x, y, user, local, 2)
    assert_equal_updates(found, looped(task, start, x, y, user, local, 2), 1e-9)
    everyone = np.zeros(len(x), dtype=np.int64)
    whole = silo_update(task, start, x, y, local, torch.Generator().manual_seed(2))
    assert_equal_updates({0: whole}, looped(task, start, x, y, everyone, local, 2), 1e-9)


@pytest.mark.parametrize("name", [*AT_ONCE, *IN_TURN])
def test_gradients_of_records_are_those_of_autograd(name):
    task = build(name)
    x, y, _ = ragged([9], 1)
    params = task.initial(0)
    inputs, targets = task.tensors(x, y)
    assert is_looped(select_gradient("record", task, inputs, targets)) == (name in IN_TURN)
    wanted = []
    for i in range(len(x)):
        model = task.load(params).train()
        task.loss.compute(model(inputs[i : i + 1]), targets[i : i + 1], torch.ones(1)).backward()
        wanted.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    found = torch.cat([rows for _, rows in record_gradients(task, params, x, y)])
    assert torch.allclose(found, torch.stack(wanted), atol=1e-10)


@pytest.mark.parametrize(("kind", "size", "expected"), [(nn.LSTM, 64, 0), (nn.LSTM, 65, 1), (nn.GRU, 65, 0)])
def test_layers_with_faster_kernels_for_one_user_run_for_one_after_another(kind, size, expected, caplog):
    model = Recurs(kind)
    model.inside, model.last = kind(1, size, batch_first=True), nn.Linear(size, 2)
    task = Task(model, cross_entropy())
    x, y, _ = ragged([4], 1)
    found = [is_looped(select_gradient(unit, task, *task.tensors(x, y))) for unit in ("user", "record")]
    assert (found, caplog.records) == ([expected] * 2, [])


@pytest.mark.parametrize(
    ("join", "is_apart"),
    [
        (lambda x: torch.column_stack([x, x[:, :1]]), True),
        (lambda x: torch.column_stack([x.sum(1), x[:, 0]]), True),
        (lambda x: torch.hstack([x, x]), True),
        (lambda x: torch.dstack([x, x]).flatten(1), True),
        (lambda x: torch.hstack([x[:, 0], x[:, 1]]).reshape(-1, 2), False),
        (lambda x: torch.column_stack([x.sum(1), x]), True),
        (lambda x: torch.dstack([x[:, 0], x[:, 1]])[0], False),
    ],
)
def test_columns_are_proven_to_keep_records_apart_where_they_do(join, is_apart):
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.LazyLinear(2)

        def forward(self, x):
            return self.last(join(x))

    model = Joined()
    x = torch.randn(4, 3)
    model(x)
    assert is_per_record(Task(model, cross_entropy()), x) == is_apart


class Mixes(nn.Module):
    """Mixes records in the branch for compilers alone."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.first(x)
        if torch.compiler.is_compiling():
            hidden = hidden + 0 * hidden.mean(0)
        return self.last(hidden)


def test_a_branch_for_compilers_is_proven_too():
    assert not is_per_record(Task(Mixes(), cross_entropy()), torch.randn(4, 3))


def masked_bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 5, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    kind = transformers.BertConfig(**sizes, intermediate_size=8, max_position_embeddings=4)
    kind.hidden_dropout_prob = kind.attention_probs_dropout_prob = 0.0

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = transformers.BertModel(kind, add_pooling_layer=False)
            self.last = nn.Linear(8, 2)

        def forward(self, x):
            ids = (2 * x.abs()).long().clamp(max=4)
            ids = torch.cat([torch.ones_like(ids[:, :1]), ids], 1)
            return self.last(self.body(ids, attention_mask=(ids > 0).long()).last_hidden_state[:, 0])

    return Reads()


def tabm() -> nn.Module:
    made = pytest.importorskip("tabm").TabM.make(
        n_num_features=3, d_out=2, n_blocks=1, d_block=8, k=3, dropout=0.0
    )

    class Averages(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = made

        def forward(self, x):
            return self.inside(x).mean(1)

    return Averages()


def solver() -> nn.Module:
    odeint = pytest.importorskip("torchdiffeq").odeint

    class Solves(Integrates):
        def forward(self, x):
            times = torch.linspace(0, 1, 4, dtype=x.dtype)
            return self.last(odeint(lambda _, state: self.slope(state), x, times, method="rk4")[-1])

    return Solves()


@pytest.mark.parametrize("make", [masked_bert, tabm, solver])
def test_models_of_libraries_train_at_once(make):
    torch.manual_seed(0)
    task = Task(make().double(), cross_entropy())
    x, y, user = ragged([4, 1, 0, 7, 3], 1)
    assert not is_looped(select_gradient("user", task, *task.tensors(x, y)))
    for local in (LocalTraining(0.1, 2), LocalTraining(0.01, 12, 2)):
        given = task, task.initial(1), x, y, user, local, 2
        assert_equal_updates(updates(*given), looped(*given), 1e-9)
