"""The sizes that plans take for models of silodp are those that the models have."""

import pytest

from silodp.training.models import MODELS, SIZES


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("features", "classes"), [(1, 2), (13, 2), (40, 7)])
def test_sizes_without_building(name, features, classes):
    builder, given = MODELS[name], {"features": features, "classes": classes}
    names = builder.__code__.co_varnames[: builder.__code__.co_argcount]
    model = builder(**{key: given[key] for key in given if key in names})
    assert SIZES[name](features, classes) == sum(p.numel() for p in model.parameters())


def test_the_model_of_codes_is_built_to_be_counted():
    """Its size depends on more than features and classes."""
    assert MODELS.keys() - SIZES.keys() == {"embedding"}
    model = MODELS["embedding"](categories=[5, 3], features=4, classes=7, dimension=2)
    assert sum(p.numel() for p in model.parameters()) == 2 * (5 + 3) + (4 + 2 * 2 + 1) * 7
