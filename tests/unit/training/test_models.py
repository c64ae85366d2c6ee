"""The sizes that plans take for models of silodp are those that the models have."""

import pytest

from silodp.training.models import MODELS, SIZES


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("features", "classes"), [(1, 2), (13, 2), (40, 7)])
def test_sizes_without_building(name, features, classes):
    builder, given = MODELS[name], {"features": features, "classes": classes}
    names = builder.__code__.co_varnames[: builder.__code__.co_argcount]
    model = builder(**{key: given[key] for key in given if key in names})
    assert SIZES[name](features, classes) == sum(p.numel() for p in model.parameters())
