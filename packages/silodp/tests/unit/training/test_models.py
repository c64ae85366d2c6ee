"""The sizes that plans take for models of silodp are those that the models have."""

import math

import numpy as np
import pytest
import torch

from silodp.training.models import MODELS, SIZES, hog_linear


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("features", "classes"), [(1, 2), (13, 2), (40, 7)])
def test_sizes_without_building(name, features, classes):
    builder, given = MODELS[name], {"features": features, "classes": classes}
    names = builder.__code__.co_varnames[: builder.__code__.co_argcount]
    model = builder(**{key: given[key] for key in given if key in names})
    assert SIZES[name](features, classes) == sum(p.numel() for p in model.parameters())


def test_models_of_codes_and_of_places_are_built_to_be_counted():
    """Their size depends on more than features and classes."""
    assert MODELS.keys() - SIZES.keys() == {"embedding", "unet", "causal_lm"}
    model = MODELS["embedding"](categories=[5, 3], features=4, classes=7, dimension=2)
    assert sum(p.numel() for p in model.parameters()) == 2 * (5 + 3) + (4 + 2 * 2 + 1) * 7


def test_histograms_of_oriented_gradients_pixel_by_pixel():
    """By the definition: each pixel gives its gradient's length to the two bins next to its direction."""
    image = np.random.default_rng(0).uniform(-1, 1, (8, 12))
    framed = np.pad(image, 1)
    cells = np.zeros((8, 4, 4))  # direction, row, column: cells of 2 × 3 pixels
    for i in range(8):
        for j in range(12):
            down, across = framed[i + 2, j + 1] - framed[i, j + 1], framed[i + 1, j + 2] - framed[i + 1, j]
            turn = math.atan2(down, across) % (2 * math.pi) * 8 / (2 * math.pi)
            below = math.floor(turn)
            for place, share in ((below, below + 1 - turn), (below + 1, turn - below)):
                cells[place % 8, i // 2, j // 3] += share * math.hypot(down, across) / 6
    roots = np.sqrt(cells.reshape(-1))
    expected = (roots - roots.mean()) / roots.std() / math.sqrt(128)
    network = hog_linear(classes=3).double()
    body, head = network
    found = body(torch.from_numpy(image)[None, None])
    np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=1e-4)  # layer_norm has an ε
    torch.testing.assert_close(network(torch.from_numpy(image)[None, None]), head(found))
    assert body(torch.zeros(1, 1, 28, 28)).abs().max() == 0
    assert not list(body.parameters())
