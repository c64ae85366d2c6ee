"""MNIST digits, Fashion-MNIST articles of clothing, and images in which every pixel has a class."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from silodp.data.dataset import Dataset, Origin, urls_in
from silodp.data.federation import Federation
from silodp.errors import SilodpError
from silodp.settings import Whole, check_choice
from silodp_experiments.benchmarks._common import (
    Floats,
    Normalize,
    Shares,
    federate_free,
    find_file,
)

Split = Literal["source", "pooled", "tuning"]

PIXELS = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}
"""Mean and standard deviation of the training pixels in [0, 1], as published."""


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
    """Load MNIST digits: x (n, 1, 28, 28), 60,000 train and 10,000 test records, 10 classes.

    Args:
        root: folder of the data sets (see `data_root`).
        users: U; unused with `allocation="own"`.
        silos: S.
        allocation: "uniform", "zipf", or "own", which makes every record a user.
        seed: the seed of the allocation, and of `split`.
        normalize: "private" uses the usual mean .1307 and standard deviation .3081, once computed from the training
            images; "public" maps pixels to [-1, 1].
        labels_per_user: number of classes that a user may hold; None for no limit.
        labels_per_silo: with `allocation="own"`: about how many classes a silo holds.
        split: "source" keeps the published test records; "pooled" puts all 70,000 together and trains on .8 of them;
            "tuning" trains on .7 of these .8, and the rest of them are the test data.

    Raises:
        SilodpError: missing files, or an argument with another value than those above.
    """
    shares = Shares(users, silos, allocation, seed, labels_per_user, labels_per_silo)
    return _load_images(MNIST, root, shares, normalize, split)


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
    """Load Fashion-MNIST; all is as for `mnist`, with mean .2860 and standard deviation .3530."""
    shares = Shares(users, silos, allocation, seed, labels_per_user, labels_per_silo)
    return _load_images(FASHION_MNIST, root, shares, normalize, split)


def _load_images(
    dataset: Dataset, root: str | Path | None, shares: Shares, normalize: Normalize, split: Split
) -> Federation:
    check_choice("normalize", normalize, ("private", "public"))
    mean, deviation = PIXELS[dataset.name] if normalize == "private" else (0.5, 0.5)
    parts = {}
    for part in ("train", "t10k"):
        pixels = read_idx(find_file(root, dataset.name, f"{part}-images-idx3-ubyte.gz"))
        labels = read_idx(find_file(root, dataset.name, f"{part}-labels-idx1-ubyte.gz")).astype(np.int64)
        # In float32 from the start: 70,000 images in float64 would take 440 MB.
        scale, shift = np.float32(1 / (255 * deviation)), np.float32(mean / deviation)
        parts[part] = (pixels[:, None].astype(np.float32) * scale - shift, labels)
    train, test = _split(parts["train"], parts["t10k"], split, shares.seed)
    return federate_free(dataset, train, test, shares, normalize=normalize)


def digit_masks(users: int = 60, silos: int = 4, allocation: str = "zipf", seed: int = 0) -> Federation:
    """Make images (1, 16, 16) of a handwritten digit behind a bar, with a class for every pixel.

    The digits are scikit-learn's 1,797; place, bar and noise are drawn. Classes: 0 background, 1 digit, 2 bar.

    Args:
        users: U; unused with `allocation="own"`.
        silos: S.
        allocation: "uniform", "zipf", or "own", which makes every record a user.
        seed: the seed of images and allocation.

    Raises:
        SilodpError: an argument with another value than those above.
    """
    return _load_masks(DIGIT_MASKS, Shares(users, silos, allocation, seed))


def digit_volumes(users: int = 60, silos: int = 4, allocation: str = "zipf", seed: int = 0) -> Federation:
    """Make volumes (1, 8, 8, 8) of a handwritten digit three voxels thick; all else is as for `digit_masks`."""
    return _load_masks(DIGIT_VOLUMES, Shares(users, silos, allocation, seed))


def _load_masks(dataset: Dataset, shares: Shares) -> Federation:
    from sklearn.datasets import load_digits

    Whole(0).check("seed", shares.seed)
    generator = np.random.default_rng(shares.seed)
    digits = load_digits().images / 16
    sides = dataset.record_shape[1:]
    x = np.zeros((len(digits), *sides))
    y = np.zeros(x.shape, np.int64)
    for image, mask, digit in zip(x, y, digits, strict=True):
        # A digit is 8 by 8, and of three slices where there is depth.
        part = digit if len(sides) == 2 else np.stack([digit] * 3)
        first = [generator.integers(side - size + 1) for side, size in zip(sides, part.shape, strict=True)]
        place = tuple(slice(start, start + size) for start, size in zip(first, part.shape, strict=True))
        image[place] = part
        mask[place] = part > 0.4
        # In front of it, across the whole image, a bar of any direction that is as bright as ink.
        axis = int(generator.integers(len(sides)))
        bar = tuple(
            slice(None) if a == axis else slice((start := generator.integers(side - 1)), start + 2)
            for a, side in enumerate(sides)
        )
        image[bar] = 0.8
        mask[bar] = 2
    x = (2 * np.clip(x + 0.15 * generator.standard_normal(x.shape), 0, 1) - 1).astype(np.float32)
    kept, held = np.split(generator.permutation(len(x)), [round(0.8 * len(x))])
    train, test = ((x[some, None], y[some]) for some in (kept, held))
    return federate_free(dataset, train, test, shares, normalize="public")


def _split(
    train: tuple[Floats, Floats], test: tuple[Floats, Floats], split: Split, seed: int
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """Return train and test as they come; or pooled and cut at .8; or the first .8 of that cut at .7."""
    check_choice("split", split, get_args(Split))
    if split == "source":
        return train, test
    x, y = (np.concatenate(both) for both in zip(train, test, strict=True))
    order = np.random.default_rng(seed).permutation(len(y))
    # Rates are tuned on records that the final test never sees.
    kept, held = np.split(order, [round(0.8 * len(y))])
    if split == "tuning":
        kept, held = np.split(kept, [round(0.7 * len(kept))])
    return (x[kept], y[kept]), (x[held], y[held])


def read_idx(path: str | Path) -> NDArray[np.uint8]:
    """Read a gzipped idx file of bytes (the MNIST format).

    Returns:
        The array, in the shape that the file's header states.

    Raises:
        SilodpError: not a whole idx file of unsigned bytes.
    """
    try:
        content = gzip.decompress(Path(path).read_bytes())
        rank = content[3]
        shape = np.frombuffer(content, ">i4", count=rank, offset=4).astype(int)
        # 0x08 is the code of unsigned bytes; the fourth byte is the number of axes.
        if content[:3] != b"\0\0\x08":
            raise ValueError("no idx header of unsigned bytes")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise SilodpError(
            f"{path} is not a whole idx file ({error}); delete it and fetch it again", code="data.fetch"
        ) from error


def _describe_scaling(name: str) -> str:
    mean, deviation = PIXELS[name]
    return (
        f"Pixels are normalized by the published mean {mean} and standard deviation {deviation}, once computed from "
        "the training images; choose normalize='public' for [-1, 1]."
    )


_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
_FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}

MNIST = Dataset(
    name="mnist",
    loader=mnist,
    record_shape=(1, 28, 28),
    classes=10,
    model="cnn_mnist",
    private_scaling=_describe_scaling("mnist"),
    origin=Origin(
        rows=70_000,
        license="CC BY-SA 3.0, as usually stated",
        publisher="LeCun, Cortes and Burges",
        files=_MNIST_FILES,
        urls=urls_in(
            _MNIST_FILES,
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
    ),
)
FASHION_MNIST = Dataset(
    name="fashion_mnist",
    loader=fashion_mnist,
    record_shape=(1, 28, 28),
    classes=10,
    model="cnn_fashion",
    private_scaling=_describe_scaling("fashion_mnist"),
    origin=Origin(
        rows=70_000,
        license="MIT",
        publisher="Zalando Research",
        files=_FASHION_FILES,
        urls=urls_in(
            _FASHION_FILES,
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
    ),
)


_DIGITS = Origin(
    rows=1797, license="BSD 3-clause (scikit-learn)", publisher="UCI handwritten digits, in scikit-learn"
)
DIGIT_MASKS = Dataset(
    name="digit_masks",
    loader=digit_masks,
    record_shape=(1, 16, 16),
    label_shape=(16, 16),
    classes=3,
    model="unet",
    origin=_DIGITS,
)
DIGIT_VOLUMES = Dataset(
    name="digit_volumes",
    loader=digit_volumes,
    record_shape=(1, 8, 8, 8),
    label_shape=(8, 8, 8),
    classes=3,
    model="unet",
    origin=_DIGITS,
)
