"""Lazy imports: exported names, modules and registries that import what they name when it is first used.

A command that needs no torch and no pandas, which take seconds, does not import them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

T = TypeVar("T")


def load(place: str) -> Any:
    """Import what "package.module:name" is."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


class Registry(Mapping[str, T], Generic[T]):
    """The parts of one kind (methods, aggregators) that silodp has, by name; a part is imported when it is first used.

    An installed distribution can add parts by an entry point in the group "silodp.KIND". They are code outside silodp,
    so they are no items of this mapping: `find_reference` translates their names into references "package.module:Name",
    which are imported in one place (`silodp.config.plugins.import_reference`) or refused there. The names of silodp's
    own parts stand in a table and not in entry points: they cannot be taken by another distribution, they hold in a
    checkout that is not installed, and an unused table costs no search of the installed distributions.

    Args:
        kind: The kind of the parts, for example "methods".
        places: "package.module:name" by the name of the part.
    """

    def __init__(self, kind: str, places: Mapping[str, str]) -> None:
        self.kind, self.places = kind, dict(places)

    def __getitem__(self, name: str) -> T:
        return cast(T, load(self.places[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        # Mapping would take the part out, and thereby import it.
        return name in self.places

    def find_reference(self, name: str) -> str | None:
        """Return "package.module:Name" of a part that an installed distribution adds under this name; None: none does.

        Nothing is imported. A name of silodp's own, with "-" or with "_", is never looked up there.
        """
        # An installed distribution must not take the place of a part whose guarantees are proven.
        if any(own.replace("_", "-") == name.replace("_", "-") for own in self):
            return None
        # Imported where it is used: it takes a twentieth of a second, and few names are not silodp's own.
        from importlib.metadata import entry_points

        found = entry_points(group=f"silodp.{self.kind}", name=name)
        return next((point.value for point in found), None)


def export_lazily(package: str, exports: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package (PEP 562).

    Args:
        package: The `__name__` of the package.
        exports: The names that it exports, by the module in it that defines them; () exports the module itself.
    """
    homes = {name: module for module, names in exports.items() for name in names or (module,)}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module = importlib.import_module(f"{package}.{homes[name]}")
        return getattr(module, name) if exports[homes[name]] else module

    return get


class LazyModule:
    """A module of another project that is imported when one of its names is first used.

    Args:
        name: The name with dots, for example "scipy.special".
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)

    def __reduce__(self) -> tuple[type[LazyModule], tuple[str]]:
        # A copy has no name yet when `pickle` asks it for a method, and would look for its name for ever.
        return LazyModule, (self._name,)


def find_version() -> str:
    """Return the version of silodp; "0.0.0" in a checkout that is not installed."""
    # Imported where it is used: it takes a tenth of a second.
    import importlib.metadata

    try:
        return importlib.metadata.version("silodp")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"


if TYPE_CHECKING:
    import torch as torch
    from torch import nn as nn
else:  # seconds to import, and a plan needs none of it
    torch, nn = LazyModule("torch"), LazyModule("torch.nn")
