"""Clipped sums of gradients of single records, beside Opacus, and of persons, beside a loop: CPU ms and peak memory.

python benchmarks/engines.py [MODEL ...]

Two tables, each measured in turn: of 128 records, and of 20 persons with 5 records each (`uldp-sgd`). Peers, and models
of packages, are left out where these are not installed. An environment with them, from the root of the project:

python -m venv peers && peers/bin/pip install -c constraints.txt -e packages/silodp "opacus==1.6.*" \\
    "transformers==4.*" diffusers tabm rtdl_revisiting_models
peers/bin/python benchmarks/engines.py

"non-private" is one backward pass over the batch, which clips nothing. Opacus sums in single precision, silodp in
double; a step of silodp is one of the 100 of a round, which small models trace. Memory is that of new tensors, as
multiples of the non-private pass. One thread, medians of 15 turns. "loop" is one backward pass for each person, whose
gradient is clipped and added up. Models are in train mode; with dropout, sums are not compared.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from silodp.data.inputs import NamedArrays, map_arrays
from silodp.mechanisms.clipping import clip_rows, sum_rows
from silodp.training import LocalTraining, Loss, Task, cross_entropy
from silodp.training.model_state import call_model
from silodp.training.models import cnn_mnist
from silodp.training.sgd import RecordGradients, compute_updates
from silodp.training.sgd._planning import measure_cost
from timing import measure_in_turn, show_help

RECORDS, TURNS, CLIP, CLASSES, BATCHES = 128, 15, 1.0, 10, 100
PEERS = ("Opacus hooks", "Opacus functorch", "Opacus ghost")


class Mlp(nn.Module):
    """Three linear layers in a module of its own."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(features, width),
            nn.Linear(width, width),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n, classes) of numbers (n, features)."""
        out: Tensor = self.last(self.second(self.first(x).relu()).relu())
        return out


class Block(nn.Module):
    """One layer of a transformer with its four projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states (n, places, width) after this layer."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)
        x = self.first(x + self.project((weights @ value).transpose(1, 2).flatten(2)))
        out: Tensor = self.second(x + self.narrow(nn.functional.gelu(self.wide(x))))
        return out


class Bert(nn.Module):
    """Embeddings of tokens and places, and a few layers of a transformer."""

    def __init__(self, tokens: int = 1000, length: int = 32, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n, classes) of tokens (n, places)."""
        places = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        h = self.norm(self.embedding(x) + self.places(places))
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(h.mean(1))
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: Mlp(30, 64), lambda: torch.randn(RECORDS, 30)),
    "mlp of 10⁶": (lambda: Mlp(500, 780), lambda: torch.randn(RECORDS, 500)),
    "cnn": (lambda: cnn_mnist(CLASSES), lambda: torch.randn(RECORDS, 1, 28, 28)),
    "bert": (Bert, lambda: torch.randint(1000, (RECORDS, 32))),
}


PERSONS, EACH, VOCABULARY, LENGTH = 20, 5, 500, 32


class Texts(nn.Module):
    """A body of `transformers` and a head; token 0 is padding."""

    def __init__(self, body: nn.Module, width: int, place: int) -> None:
        super().__init__()
        self.body, self.head, self.place = body, nn.Linear(width, 2), place

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n, 2) of tokens (n, places)."""
        states = self.body(input_ids=x, attention_mask=(x != 0).long()).last_hidden_state
        out: Tensor = self.head(states[:, self.place])
        return out


class Average(nn.Module):
    """The mean output of an ensemble."""

    def __init__(self, members: nn.Module) -> None:
        super().__init__()
        self.members = members

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return the logits (n, 2) of numbers (n, features) and codes (n, columns)."""
        out: Tensor = self.members(numbers, codes).mean(1)
        return out


class Tabular(nn.Module):
    """A transformer of the features of a table."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return the logits (n, 2) of numbers (n, features) and codes (n, columns)."""
        out: Tensor = self.body(numbers, codes)
        return out


class Denoiser(nn.Module):
    """A U-Net at one step of a diffusion."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Return the noise (n, pixels) of images (n, 1, height, width)."""
        out: Tensor = self.body(x, 10).sample.flatten(1)
        return out


def build_masked_bert() -> nn.Module:
    """Return two layers of BERT."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes)
    return Texts(BertModel(config, add_pooling_layer=False), 128, 0)


def build_llama() -> nn.Module:
    """Return two layers of Llama."""
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        num_key_value_heads=2,
        use_cache=False,
        **sizes,
    )
    return Texts(LlamaModel(config), 64, -1)


def build_tabm() -> nn.Module:
    """Return an ensemble of 16 networks of three layers, which share their weights."""
    import tabm

    sizes = {"n_num_features": 20, "cat_cardinalities": [3, 4], "d_out": 2}
    return Average(tabm.TabM.make(**sizes, n_blocks=3, d_block=128, k=16))


def build_ft_transformer() -> nn.Module:
    """Return three layers of an FT-Transformer."""
    from rtdl_revisiting_models import FTTransformer

    options = FTTransformer.get_default_kwargs(n_blocks=3)
    return Tabular(FTTransformer(n_cont_features=20, cat_cardinalities=[3, 4], d_out=2, **options))


def build_unet() -> nn.Module:
    """Return a U-Net of two levels with attention at the lower one."""
    from diffusers import UNet2DModel

    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    body = UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        **blocks,
    )
    return Denoiser(body)


def draw_texts() -> Tensor:
    """Draw texts of 5 to 32 tokens, padded by token 0."""
    x = torch.randint(1, VOCABULARY, (PERSONS * EACH, LENGTH))
    lengths = torch.randint(5, LENGTH + 1, (len(x), 1))
    return x.masked_fill(torch.arange(LENGTH) >= lengths, 0)


def draw_table() -> NamedArrays:
    """Draw 20 numbers and two codes for every record."""
    count = PERSONS * EACH
    return NamedArrays({"numbers": torch.randn(count, 20), "codes": torch.randint(3, (count, 2))})


PERSON_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "masked bert": (build_masked_bert, draw_texts),
    "llama": (build_llama, draw_texts),
    "tabm": (build_tabm, draw_table),
    "ft-transformer": (build_ft_transformer, draw_table),
    "u-net": (build_unet, lambda: torch.randn(PERSONS * EACH, 1, 16, 16)),
}

DROPPING = ("masked bert", "tabm", "ft-transformer")


def sum_steps(build: Callable[[], nn.Module], x: Any, loss: Loss, y: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the ways of computing the clipped sum of one step of every person, from the same parameters."""

    def make() -> Task:
        torch.manual_seed(0)
        return Task(build().to(y.device), loss, pretrained=True)

    task, others = make(), make()
    params, local = task.flatten(task.model), LocalTraining(1.0)
    owner = torch.arange(PERSONS).repeat_interleave(EACH)
    model = others.model.train()
    trained = [p for p in model.parameters() if p.requires_grad]

    def compute() -> Tensor:
        total = torch.zeros(task.size, dtype=torch.float64, device=y.device)
        for ids, rows in compute_updates(task, params, x, y, owner, local, torch.Generator().manual_seed(0)):
            clipped = clip_rows(ids, rows, CLIP)
            total += sum_rows(clipped, clipped.factors)
        return total

    def differentiate(records: slice) -> tuple[Tensor, ...]:
        inputs = x[records]
        outputs = call_model(model, inputs)
        value = loss.compute(outputs, y[records], torch.ones(len(outputs)))
        return torch.autograd.grad(value, trained, materialize_grads=True)

    def loop() -> Tensor:
        total = torch.zeros(task.size, device=y.device)
        for first in range(0, len(owner), EACH):
            row = torch.cat([g.flatten() for g in differentiate(slice(first, first + EACH))])
            total -= row * min(1.0, CLIP / float(row.norm()))
        return total

    return {"non-private": lambda: differentiate(slice(None)), "silodp": compute, "loop": loop}


def list_steps(name: str, device: str = "cpu") -> dict[str, Callable[[], Any]]:
    """Return all ways of computing the sum of persons' steps for a model of `PERSON_MODELS`.

    Raises:
        ImportError: The package of the model is not installed.
    """
    build, draw = PERSON_MODELS[name]
    torch.manual_seed(1)
    x = map_arrays(lambda part: part.to(device), draw())
    if name == "u-net":
        loss = Loss.per_record("squares", lambda outputs, targets: (outputs - targets).square().mean(1))
        y = torch.randn(PERSONS * EACH, 256)
    else:
        loss, y = cross_entropy(), torch.randint(2, (PERSONS * EACH,))
    return sum_steps(build, x, loss, y.to(device))


def sum_with_silodp(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """Return what computes the clipped sum (d,) as DP-SGD does."""
    task = Task(model, cross_entropy(), pretrained=True)
    params, batch = task.flatten(task.model), torch.arange(RECORDS)
    gradients = RecordGradients(task, x, y, BATCHES, torch.Generator())

    def compute() -> Tensor:
        total = torch.zeros(task.size, dtype=torch.float64, device=x.device)
        for owners, rows in gradients.of(params, batch):
            clipped = clip_rows(owners, rows, CLIP)
            sum_rows(clipped, clipped.factors, total)
        return total

    return compute


def sum_with_opacus(model: nn.Module, x: Tensor, y: Tensor, mode: str) -> Callable[[], Tensor]:
    """Return what computes the clipped sum (d,) in one of Opacus' modes."""
    from opacus.grad_sample import (
        GradSampleModule,
        GradSampleModuleExpandedWeights,
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {
        "noise_multiplier": 0.0,
        "max_grad_norm": CLIP,
        "expected_batch_size": RECORDS,
        "loss_reduction": "sum",
    }
    if mode == "ghost":
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=CLIP, use_ghost_clipping=True, loss_reduction="sum"
        )
        private = DPOptimizerFastGradientClipping(optimizer, **options)
        loss = DPLossFastGradientClipping(
            wrapped, private, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum"
        )

        def compute() -> Tensor:
            wrapped.zero_grad(set_to_none=True)
            loss(wrapped(x), y).backward()
            return torch.cat([p.grad.flatten() for p in model.parameters()])

        return compute
    if mode == "ew":
        wrapped = GradSampleModuleExpandedWeights(model, loss_reduction="sum")
    else:
        wrapped = GradSampleModule(model, loss_reduction="sum", force_functorch=mode == "functorch")
    per_record = DPOptimizer(optimizer, **options)

    def compute_rows() -> Tensor:
        per_record.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
        per_record.clip_and_accumulate()
        return torch.cat([p.summed_grad.flatten() for p in model.parameters()])

    return compute_rows


def list_ways(build: Callable[[], nn.Module], x: Tensor, y: Tensor) -> dict[str, Callable[[], Any]]:
    """Return all ways of computing the sum, on the device of x, each on a model with the same parameters."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return build().to(x.device)

    plain = make()

    def step() -> None:
        plain.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(plain(x), y, reduction="sum").backward()

    ways: dict[str, Callable[[], Any]] = {
        "non-private": step,
        "silodp": sum_with_silodp(make(), x, y),
    }
    for name in PEERS:
        with contextlib.suppress(ImportError):
            ways[name] = sum_with_opacus(make(), x, y, name.split()[1])
    return ways


def measure_records(name: str) -> None:
    """Print the lines of a model in the table of records."""
    build, draw = MODELS[name]
    torch.manual_seed(1)
    x, y = draw(), torch.randint(CLASSES, (RECORDS,))
    print_ways(name, list_ways(build, x, y))


def measure_persons(name: str) -> None:
    """Print the lines of a model in the table of persons."""
    with contextlib.suppress(ImportError):
        print_ways(name, list_steps(name), drops=name in DROPPING)


def print_ways(name: str, ways: dict[str, Callable[[], Any]], *, drops: bool = False) -> None:
    """Print a line for every way of computing a sum."""
    seconds = measure_in_turn(ways, TURNS)
    peaks = {way: measure_cost(compute).peak for way, compute in ways.items()}
    wanted = ways["silodp"]()
    for way, taken in seconds.items():
        is_peer = way not in ("non-private", "silodp") and not drops
        apart = float((ways[way]().double() - wanted).norm() / wanted.norm()) if is_peer else 0.0
        print(
            f"{name:<16}{way:<18}{1e3 * taken:>8.2f}{peaks[way] / peaks['non-private']:>9.2f}{apart:>12.1e}"
            f"{seconds['silodp'] / taken:>13.2f}",
            flush=True,
        )


def main(names: list[str]) -> None:
    """Print both tables, or the lines of some models."""
    print(f"{'':<16}{'':<18}{'ms':>8}{'memory':>9}{'difference':>12}{'silodp / it':>13}")
    for models, measure in ((MODELS, measure_records), (PERSON_MODELS, measure_persons)):
        for name in models:
            if not names or name in names:
                measure(name)


if __name__ == "__main__":
    show_help(__doc__)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    main(sys.argv[1:])
