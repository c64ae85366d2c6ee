"""Digits and articles of clothing."""

from __future__ import annotations

import gzip
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from silodp.data.benchmarks.files import file_of
from silodp.data.benchmarks.sharing import (
    Floats,
    Normalize,
    Shares,
    check_normalize,
    free_silos,
    persons_of,
    pooled_test,
)
from silodp.data.federation import Federation
from silodp.errors import SilodpError

Split = Literal["source", "pooled", "tuning"]

PIXELS = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}  # mean and sd of pixels in [0, 1]


def mnist(
    root: str | Path | None = None,
    users: int = 100,
    silos: int = 5,
    allocation: str = "zipf",
    seed: int = 0,
    normalize: Normalize = "private",
    labels_per_user: int | None = None,
    labels_per_silo: int | None = None,
    split: Split = "source",
) -> Federation:
    """MNIST digits: x (n, 1, 28, 28), 60,000 train and 10,000 test, 10 classes.

    `normalize="private"` uses the usual mean .1307 and sd .3081, once computed from the training images;
    "public" maps pixels to [-1, 1]. `split="pooled"`: all 70,000 together, of which .8 are trained on, drawn with
    `seed`; "tuning": of these .8, .7 are trained on and the rest are the test data. With `allocation="own"` every
    record is a person of its own; `labels_per_silo` then gives every silo about so many classes.
    """
    shares = Shares(users, silos, allocation, seed, labels_per_user, labels_per_silo)
    return _images("mnist", root, shares, normalize, split)


def fashion_mnist(
    root: str | Path | None = None,
    users: int = 100,
    silos: int = 5,
    allocation: str = "zipf",
    seed: int = 0,
    normalize: Normalize = "private",
    labels_per_user: int | None = None,
    labels_per_silo: int | None = None,
    split: Split = "source",
) -> Federation:
    """Fashion-MNIST articles: as `mnist`, with mean .2860 and sd .3530."""
    shares = Shares(users, silos, allocation, seed, labels_per_user, labels_per_silo)
    return _images("fashion_mnist", root, shares, normalize, split)


def _images(
    dataset: str, root: str | Path | None, shares: Shares, normalize: Normalize, split: Split
) -> Federation:
    check_normalize(normalize, "private", "public")
    mean, deviation = PIXELS[dataset] if normalize == "private" else (0.5, 0.5)
    parts = {}
    for part in ("train", "t10k"):
        pixels = read_idx(file_of(root, dataset, f"{part}-images-idx3-ubyte.gz"))
        labels = read_idx(file_of(root, dataset, f"{part}-labels-idx1-ubyte.gz")).astype(np.int64)
        scale, shift = np.float32(1 / (255 * deviation)), np.float32(mean / deviation)
        parts[part] = (pixels[:, None].astype(np.float32) * scale - shift, labels)
    train, test = _split(parts["train"], parts["t10k"], split, shares.seed)
    assumptions: tuple[str, ...] = ()
    if normalize == "private":
        assumptions = (
            f"Pixels are normalized by the published mean {mean} and standard deviation {deviation}, once "
            "computed "
            "from the training images; choose normalize='public' for [-1, 1].",
        )
    return Federation(
        silos=free_silos(*train, **asdict(shares)),
        users=persons_of(shares.allocation, shares.users, len(train[1])),
        test=pooled_test(*test),
        assumptions=assumptions,
        name=dataset,
        classes=10,
    )


def _split(
    train: tuple[Floats, Floats], test: tuple[Floats, Floats], split: Split, seed: int
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """Train and test as they come; or pooled and cut at .8; or the first .8 of that cut at .7."""
    if split not in get_args(Split):
        raise SilodpError(
            f"split is {split!r}; choose one of {', '.join(map(repr, get_args(Split)))}",
            code="argument.value",
            field="split",
        )
    if split == "source":
        return train, test
    x, y = (np.concatenate(both) for both in zip(train, test, strict=True))
    order = np.random.default_rng(seed).permutation(len(y))
    kept, held = np.split(order, [round(0.8 * len(y))])
    if split == "tuning":
        kept, held = np.split(kept, [round(0.7 * len(kept))])
    return (x[kept], y[kept]), (x[held], y[held])


def read_idx(path: str | Path) -> NDArray[np.uint8]:
    """A gzipped idx file of bytes (the MNIST format), in the shape its header says.

    Raises:
        SilodpError: not a whole idx file of unsigned bytes.
    """
    try:
        content = gzip.decompress(Path(path).read_bytes())
        rank = content[3]
        shape = np.frombuffer(content, ">i4", count=rank, offset=4).astype(int)
        if content[:3] != b"\0\0\x08":
            raise ValueError("no idx header of unsigned bytes")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise SilodpError(
            f"{path} is no whole idx file ({error}); delete it and fetch it again", code="data.fetch"
        ) from error
