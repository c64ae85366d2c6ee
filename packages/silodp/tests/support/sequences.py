"""Models of token ids, and of categories beside numbers, as people bring them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from silodp.data.federation import Federation, SiloData

TOKENS, LENGTH = 12, 4
"""The public number of tokens, and the tokens of a record; token 0 is padding."""


class Recurrent(nn.Module):
    """The last state of an LSTM or GRU over embedded tokens."""

    def __init__(self, layer: type[nn.RNNBase], layers: int = 1):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4, padding_idx=0)
        self.layer = layer(4, 5, num_layers=layers, batch_first=True, bidirectional=layers > 1)
        self.last = nn.Linear(5 * (1 + (layers > 1)), 2)

    def forward(self, x):
        return self.last(self.layer(self.embedding(x))[0][:, -1])


class Transformer(nn.Module):
    """Two encoder layers with an attention mask for padding, mean pooled."""

    def __init__(self, dropout: float = 0.0, norm_first: bool = False, batch_first: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.positions = nn.Parameter(torch.randn(LENGTH, 8) * 0.1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.embedding(x) + self.positions
        masked = None if not self.encoder.layers[0].self_attn.batch_first else x == 0
        return self.last(self.encoder(hidden, src_key_padding_mask=masked).mean(1))


class Tied(nn.Module):
    """Scores every token with the weights that embed it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 5)
        self.norm = nn.LayerNorm(5)
        self.last = nn.Linear(5, TOKENS, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, x):
        return self.last(self.norm(self.embedding(x).mean(1)))[:, :2]


class Mixed(nn.Module):
    """Categories, embedded column by column, beside numbers."""

    def __init__(self, numbers: int = 3, categories: tuple[int, ...] = (4, 7)):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(number, 2) for number in categories)
        self.last = nn.Sequential(nn.Linear(numbers + 2 * len(categories), 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, numeric, categories):
        columns = [layer(categories[:, place]) for place, layer in enumerate(self.embeddings)]
        return self.last(torch.cat([numeric, *columns], 1))


def tokens(count: int, seed: int = 0) -> np.ndarray:
    """Token ids (count, LENGTH), each record padded at its end."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, TOKENS, (count, LENGTH))
    return np.where(np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (count, 1)), ids, 0)


def mixed(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Three numbers and two categories of each record."""
    rng = np.random.default_rng(seed)
    codes = np.stack([rng.integers(0, 4, count), rng.integers(0, 7, count)], 1)
    return {"numeric": rng.normal(size=(count, 3)).astype(np.float32), "categories": codes}


def take(x, rows):
    """These rows of one array, or of each of several."""
    return {name: array[rows] for name, array in x.items()} if isinstance(x, dict) else x[rows]


def federation(x, categories, users: int = 6, silos: int = 2, budget: float | None = None) -> Federation:
    """Records spread over users and silos; the label is whether a number, or the mean token, is above its middle."""
    score = x["numeric"][:, 0] if isinstance(x, dict) else x.mean(1) - TOKENS / 3
    y, rng = (score > 0).astype(np.int64), np.random.default_rng(3)
    user, silo = rng.integers(0, users, len(y)), rng.integers(0, silos, len(y))
    parts = []
    for s in range(silos):
        rows = np.flatnonzero(silo == s)
        budgets = None if budget is None else np.full(len(rows), budget)
        test = SiloData(f"s{s}", take(x, rows[:4]), y[rows[:4]], np.arange(4))
        parts.append(SiloData(f"s{s}", take(x, rows), y[rows], user[rows], budgets, test))
    pooled = SiloData("test", x, y, np.full(len(y), -1))
    return Federation(tuple(parts), users, pooled, classes=2, categories=categories)
