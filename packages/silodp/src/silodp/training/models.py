"""Models of the papers' experiments (ULDP-FL, 5.1.1; rPDP-FL, 7; DDP, 5), with their numbers of parameters.

Every builder returns a fresh `torch.nn.Module` that ends in logits or log hazards, without a final softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from silodp._lazy import nn, torch
from silodp.errors import SilodpError

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
"""Of the networks below: raised when one of them computes something else from the same parameters."""


@dataclass(frozen=True)
class Architecture:
    """Where a model came from, so that it can be built again elsewhere; all of it is public.

    Attributes:
        source: "silodp" (a name in `MODELS`), "file" or "module" (a function or module of a user's code), or "caller"
            (a `torch.nn.Module` that a program passed, of which nothing is known).
        name: The name of the function; "" for "caller".
        arguments: The arguments of the function, JSON-ready.
        module: The dotted name of the Python module, for "module".
        sha256: The SHA-256 (hex) of the file with the code, for "file" and "module".
        version: The version of silodp's networks, for "silodp".
        code: The content of the file, for "file"; it is kept with the model.
    """

    source: Literal["silodp", "file", "module", "caller"] = "caller"
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    sha256: str = ""
    version: int = 0
    code: bytes = field(default=b"", repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return what is set, JSON-ready, without the code."""
        return {name: value for name, value in vars(self).items() if value and name != "code"}


def logistic(features: int, classes: int = 2) -> nn.Module:
    """Build logistic regression: one logit for two classes (heart: 13 features, 14 parameters), else one per class."""
    _check_min("classes", classes, 2)
    return nn.Linear(_check_min("features", features, 1), 1 if classes == 2 else classes)


def cox_linear(features: int, outputs: int = 1) -> nn.Module:
    """Build a linear log hazard with bias (TCGA: 39 features, 40 parameters).

    Args:
        features: The number of features of a record.
        outputs: The outputs of the layer, where a record has several labels.

    Source: Ogier du Terrail et al. 2022, "FLamby", Fed-TCGA-BRCA.
    """
    return nn.Linear(_check_min("features", features, 1), _check_min("outputs", outputs, 1))


def embedding(
    categories: Sequence[int],
    features: int = 0,
    classes: int | None = None,
    dimension: int = 2,
    outputs: int = 1,
) -> nn.Module:
    """Build a linear model of numbers and embedded categories; its inputs are the arrays "numeric" and "codes".

    Args:
        categories: The number of categories in each column of codes.
        features: The number of columns of numbers; with 0 there is no array "numeric".
        classes: The number of classes: one logit for two, else one per class. With None, `outputs` decides.
        dimension: The numbers that embed a category.
        outputs: The outputs without classes: one number or log hazard, or as many as a record has labels.
    """
    _check_min("dimension", dimension, 1)
    if classes is not None:
        outputs = 1 if _check_min("classes", classes, 2) == 2 else classes

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = nn.ModuleList(nn.Embedding(number, dimension) for number in categories)
            self.last = nn.Linear(features + dimension * len(categories), outputs)

        def forward(self, codes: Tensor, numeric: Tensor | None = None) -> Tensor:
            columns = [embed(codes[:, place]) for place, embed in enumerate(self.embeddings)]
            scores: Tensor = self.last(torch.cat(columns if numeric is None else [numeric, *columns], 1))
            return scores

    return Embedding()


def mlp(
    features: int = 30,
    classes: int | None = 2,
    width: int = 30,
    layers: int = 5,
    groups: int = 3,
    outputs: int = 1,
) -> nn.Module:
    """Build `layers` × (linear, GroupNorm, ReLU), then linear; the default is ULDP-FL's creditcard network.

    Args:
        features: The number of features of a record.
        classes: The logits of the last layer. With None, `outputs` decides.
        width: The width of every hidden layer, a multiple of `groups` and at least three times as much: of pairs of
            numbers, GroupNorm leaves a sign, and of single ones nothing.
        layers: The number of hidden layers.
        groups: The groups of GroupNorm.
        outputs: The outputs without classes: one number or log hazard, or as many as a record has labels.

    Returns:
        The model; with the defaults it has 5,012 parameters.

    Raises:
        SilodpError: a width that is not such a multiple of `groups`, or a number below 1.

    Source: ULDP-FL (Kato et al. 2024), section 5.1.1, "Creditcard".
    """
    _check_multiple(width, "groups", groups)
    if width < 3 * groups:
        raise SilodpError(
            f"width {width} gives each group {width // groups} numbers, of which GroupNorm leaves a sign or nothing: "
            f"take groups = 1, or a width of at least {3 * groups}",
            code="argument.value",
            field="width",
        )
    sizes = [features] + [width] * _check_min("layers", layers, 1)
    blocks: list[nn.Module] = []
    for inside, outside in pairwise(sizes):
        blocks += [nn.Linear(inside, outside), nn.GroupNorm(groups, outside), nn.ReLU()]
    return nn.Sequential(*blocks, nn.Linear(width, classes or _check_min("outputs", outputs, 1)))


def cnn_mnist(classes: int = 10, dropout: float = 0.0) -> nn.Module:
    """Build conv10-conv20-fc50-fc10 on (1, 28, 28): the classic PyTorch example, 21,840 parameters.

    `dropout` is the probability of the example's two dropout layers (there 0.5); 0 leaves them out.
    """
    if not 0 <= dropout < 1:
        raise SilodpError(
            f"dropout must be at least 0 and below 1, not {dropout}", code="argument.value", field="dropout"
        )
    channels = [nn.Dropout2d(dropout)] if dropout else []
    units = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        *channels,
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        *units,
        nn.Linear(50, classes),
    )


def cnn_fashion(classes: int = 10) -> nn.Module:
    """Build DDP's CNN on (1, 28, 28): conv16 8×8/2, pool, conv32 4×4/2, pool, fc32, fc10, tanh; 26,010 parameters.

    Source: DDP (Heikkilä), section 5, after Papernot et al. 2021 (Tempered Sigmoid Activations).
    """
    return _two_convolutions(classes, nn.Tanh)


def cnn_rpdp(classes: int = 10) -> nn.Module:
    """Build rPDP-FL's MNIST network: the layers of `cnn_fashion` with ReLU; 26,010 parameters.

    Source: rPDP-FL (Liu et al. 2024), section 7, "MNIST-IID and MNIST-NIID".
    """
    return _two_convolutions(classes, nn.ReLU)


def _two_convolutions(classes: int, activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        activation(),
        nn.Linear(32, classes),
    )


def hog_linear(classes: int = 10) -> nn.Module:
    """Build a linear model of histograms of oriented gradients of grey images (1, height, width); 1,290 parameters.

    The features have no parameters and no constant from data: for each of 4 × 4 cells, how much the image gets brighter
    in each of 8 directions; the square roots are scaled to mean 0 and norm 1 record by record. With little noise a
    convolutional network is better, with much noise this is, because the noise of a round grows with the number of
    parameters.

    Args:
        classes: The outputs of the linear layer.

    Source: Dalal and Triggs 2005 (Histograms of Oriented Gradients) for the features, Tramèr and Boneh 2021
    (Differentially Private Learning Needs Better Features) for their use under privacy.
    """
    directions, cells = 8, 4
    size = directions * cells**2

    class OrientedGradients(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            # Padded by zeros, so that pixels at the border have a gradient, too, and sizes stay the same.
            wide, high = (nn.functional.pad(x, pad) for pad in ((1, 1, 0, 0), (0, 0, 1, 1)))
            across, down = wide[..., 2:] - wide[..., :-2], high[..., 2:, :] - high[..., :-2, :]
            angle = torch.atan2(down, across) * (directions / (2 * torch.pi))
            # On the circle, the nearest direction is this one, or this one less a whole turn.
            distance = angle - torch.arange(directions, device=x.device).reshape(-1, 1, 1)
            # Each pixel votes for the two nearest directions, in proportion to how near they are.
            share = (1 - torch.minimum(distance.abs(), (distance + directions).abs())).clamp(min=0)
            histograms = nn.functional.adaptive_avg_pool2d(share * torch.hypot(across, down), cells)
            # Norm 1 whatever the record: the gradient of a linear layer is bounded by that of its logits.
            features: Tensor = nn.functional.layer_norm(histograms.flatten(1).sqrt(), (size,)) / size**0.5
            return features

    return nn.Sequential(OrientedGradients(), nn.Linear(size, classes))


def unet(
    record_shape: Sequence[int], classes: int | None, width: int = 8, levels: int = 2, groups: int = 4
) -> nn.Module:
    """Build a U-Net with GroupNorm, which gives every pixel or voxel of an image the logits of its classes.

    Args:
        record_shape: (channels, height, width), or (channels, depth, height, width); all but the channels are multiples
            of 2**levels.
        classes: The classes K of a place.
        width: The channels of the first level, a multiple of `groups`; every level below has twice as many.
        levels: How many times the resolution is halved.
        groups: The groups of GroupNorm.

    Returns:
        A model of images (n, *record_shape) to logits (n, K, ...).

    Raises:
        SilodpError: a shape, a width or a number that does not fit.

    Source: Ronneberger et al. 2015 (U-Net) and Çiçek et al. 2016 (3D U-Net), with GroupNorm (Wu and He 2018) in place
    of batch statistics, which would mix persons, and with repeated values in place of transposed convolutions.
    """
    if classes is None:
        raise SilodpError(
            "unet gives every place a class, and the labels are no classes: choose another model",
            code="argument.value",
            field="classes",
        )
    sides, factor = tuple(record_shape[1:]), 2 ** _check_min("levels", levels, 1)
    if len(sides) not in (2, 3) or any(side % factor for side in sides):
        raise SilodpError(
            "unet takes images (channels, height, width) or (channels, depth, height, width) whose sides are multiples "
            f"of {factor}, and records have the shape {tuple(record_shape)}: pad or crop them, or lower levels",
            code="argument.value",
            field="record_shape",
        )
    _check_multiple(_check_min("width", width, 1), "groups", groups)
    outputs = _check_min("classes", classes, 2)
    convolution = (nn.Conv2d, nn.Conv3d)[len(sides) - 2]
    pool = (nn.MaxPool2d, nn.MaxPool3d)[len(sides) - 2]

    def block(inside: int, outside: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (inside, outside):
            layers += [convolution(channels, outside, 3, padding=1), nn.GroupNorm(groups, outside), nn.ReLU()]
        return nn.Sequential(*layers)

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [width * 2**level for level in range(levels + 1)]
            self.down = nn.ModuleList(block(*pair) for pair in pairwise([record_shape[0], *widths]))
            self.pool = pool(2)
            self.up = nn.ModuleList(block(below + above, above) for above, below in pairwise(widths))
            self.last = convolution(width, outputs, 1)

        def forward(self, x: Tensor) -> Tensor:
            skipped = [x := self.down[0](x)]
            for level in self.down[1:]:
                skipped.append(x := level(self.pool(x)))
            for level, beside in zip(reversed(self.up), reversed(skipped[:-1]), strict=True):
                # Each value is repeated: a view and a copy, for which vmap needs no rule of its own.
                for axis in range(2, x.dim()):
                    x = x.repeat_interleave(2, axis)
                x = level(torch.cat([beside, x], 1))
            logits: Tensor = self.last(x)
            return logits

    return UNet()


def causal_lm(
    categories: int, record_shape: Sequence[int], width: int = 64, layers: int = 2, heads: int = 4
) -> nn.Module:
    """Build a small transformer that predicts, for every token of a row, the token that follows.

    Every token is seen by itself and by later ones alone. Embeddings of tokens are the weights of the last layer.

    Args:
        categories: The number V of ids of tokens.
        record_shape: (L,), the tokens of a row.
        width: The numbers of an embedding, a multiple of `heads`.
        layers: The layers of attention.
        heads: The heads of a layer.

    Returns:
        A model of ids (n, L) to logits (n, V, L).

    Raises:
        SilodpError: records of another shape, or a width that is not a multiple of `heads`.

    Source: Vaswani et al. 2017 (Transformer), with the norm first, and tied embeddings (Press and Wolf 2017).
    """
    if not isinstance(categories, int) or len(record_shape) != 1:
        raise SilodpError(
            f"causal_lm takes rows of ids with one number of categories, and records have the shape "
            f"{tuple(record_shape)}: give x (records, length) as int64, and categories as one number",
            code="argument.value",
            field="record_shape",
        )
    _check_multiple(_check_min("width", width, 1), "heads", heads)
    length = record_shape[0]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            seen = self.attention_norm(x)
            query, key, value = (
                layer(seen).unflatten(2, (heads, -1)).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
            found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(found.transpose(1, 2).flatten(2))
            changed: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
            return changed

    class CausalLm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(categories, width), nn.Embedding(length, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(_check_min("layers", layers, 1))))
            self.norm = nn.LayerNorm(width)

        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[1], device=x.device)
            found = self.norm(self.blocks(self.tokens(x) + self.places(places)))
            return nn.functional.linear(found, self.tokens.weight / width**0.5).transpose(1, 2)

    return CausalLm()


def _check_min(name: str, value: int, smallest: int) -> int:
    if value < smallest:
        raise SilodpError(
            f"{name} must be at least {smallest}, not {value}", code="argument.value", field=name
        )
    return value


def _check_multiple(width: int, name: str, number: int) -> None:
    if width % _check_min(name, number, 1):
        raise SilodpError(
            f"width {width} is not a multiple of {name} {number}", code="argument.value", field="width"
        )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "cox_linear": cox_linear,
    "embedding": embedding,
    "mlp": mlp,
    "cnn_mnist": cnn_mnist,
    "cnn_fashion": cnn_fashion,
    "cnn_rpdp": cnn_rpdp,
    "hog_linear": hog_linear,
    "unet": unet,
    "causal_lm": causal_lm,
}
"""Name in a config -> builder."""


def name_linear_model(classes: int | None, has_codes: bool = False) -> str:
    """Return the name of the linear model for records with such labels.

    Args:
        classes: The number of classes; None for numbers and survival.
        has_codes: Whether some columns are given as codes.
    """
    if has_codes:
        return "embedding"
    return "logistic" if classes else "cox_linear"


SIZES: dict[str, Callable[[int, int], int]] = {
    "logistic": lambda features, classes: (features + 1) * (1 if classes == 2 else classes),
    "cox_linear": lambda features, classes: features + 1,
    "mlp": lambda features, classes: (features + 1) * 30 + 4 * 31 * 30 + 5 * 60 + 31 * classes,
    "cnn_mnist": lambda features, classes: 260 + 5020 + 16_050 + 51 * classes,
    "cnn_fashion": lambda features, classes: 1040 + 8224 + 16_416 + 33 * classes,
    "cnn_rpdp": lambda features, classes: 1040 + 8224 + 16_416 + 33 * classes,
    "hog_linear": lambda features, classes: 129 * classes,
}
"""Name in a config -> number of parameters, of features and classes, with all other arguments at their defaults.

A plan needs no more, and so does not import torch. A model that is not here is built and counted.
"""
