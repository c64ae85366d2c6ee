"""Lazy imports: exported names, modules and registries that import what they name when it is first used.

A command that needs no torch and no pandas, which take seconds, does not import them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from silodp.errors import SilodpError
from silodp.text import is_own_module, name_extra

T = TypeVar("T")


def load(place: str) -> Any:
    """Import what "package.module:name" is."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def load_extension(extra: str, name: str) -> Any:
    """Import a function of an extension package.

    Args:
        extra: The package without "silodp_", for example "audit": `pip install 'silodp[audit]'` installs it.
        name: "module:function" in the package.

    Raises:
        SilodpError: `extension.missing`: the package is not installed.
    """
    package = f"silodp_{extra}"
    # Asked before it is imported: an ImportError inside an installed package is a fault, and must be seen.
    if importlib.util.find_spec(package) is None:
        raise make_missing_error(extra)
    return load(f"{package}.{name}")


def make_missing_error(extra: str, what: str = "this") -> SilodpError:
    """Return the error for something that needs an extension package which is not installed."""
    return SilodpError(
        f"{what} needs the package silodp-{extra}, which is not installed: {name_extra(extra)}.",
        code="extension.missing",
    )


class Registry(Mapping[str, T], Generic[T]):
    """The parts of one kind (methods, aggregators) by name; a part is imported when it is first used.

    Those of the core stand in a table. An installed distribution adds parts by an entry point in the group
    "silodp.KIND". The parts of our extension packages are items of this mapping, like those of the core; others are
    code of strangers and no items: `find_reference` translates their names into references "package.module:Name",
    which are imported in one place (`silodp.plugins.import_reference`) or refused there. No distribution can
    take a name of the core's table, and a name in it costs no search of the installed distributions.

    Args:
        kind: The kind of the parts, for example "methods".
        places: "package.module:name" of the core's parts, by the name of the part.
    """

    def __init__(self, kind: str, places: Mapping[str, str]) -> None:
        self.kind, self._core = kind, dict(places)

    @property
    def places(self) -> dict[str, str]:
        """ "package.module:name" of the core's parts and those of our extension packages, by name."""
        added = {name: place for name, place in self._find_installed().items() if is_own_module(place)}
        return {**added, **self._core} if added else self._core

    @property
    def references(self) -> dict[str, str]:
        """ "package.module:name" of the parts that distributions of strangers add, by name."""
        own = {name.replace("_", "-") for name in self}
        found = self._find_installed().items()
        return {name: place for name, place in found if name.replace("_", "-") not in own}

    def _find_installed(self) -> Mapping[str, str]:
        return _read_entry_points(f"silodp.{self.kind}", tuple(sys.path))

    def _find_place(self, name: str) -> str | None:
        return self._core.get(name) or self.places.get(name)

    def __getitem__(self, name: str) -> T:
        place = self._find_place(name)
        if place is None:
            raise KeyError(name)
        return cast(T, load(place))

    def load_required(self, name: str, extra: str, what: str = "this") -> T:
        """Return a part of one of our extension packages.

        Args:
            name: The name of the part.
            extra: The package without "silodp-".
            what: What needs the part, in words.

        Raises:
            SilodpError: `extension.missing`: the package is not installed.
        """
        if name not in self:
            raise make_missing_error(extra, what)
        return self[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._core
        yield from (name for name in self.places if name not in self._core)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        # Mapping would take the part out, and thereby import it.
        return isinstance(name, str) and self._find_place(name) is not None

    def find_reference(self, name: str) -> str | None:
        """Return "package.module:Name" of a part that a stranger's distribution adds under this name; None: none does.

        Nothing is imported. A name of our own, with "-" or with "_", is never looked up there.
        """
        # An installed distribution must not take the place of a part whose guarantees are proven; of the core's
        # table none is searched for.
        if any(own.replace("_", "-") == name.replace("_", "-") for own in self._core):
            return None
        return self.references.get(name)


@lru_cache(maxsize=32)
def _read_entry_points(group: str, path: tuple[str, ...]) -> Mapping[str, str]:
    """Return the entry points of a group, by name; our own packages come before those of strangers.

    Args:
        group: The group.
        path: `sys.path`, so that what is found is looked up again where it changes.
    """
    # Imported where it is used: it takes a twentieth of a second, and few names are not of the core.
    from importlib.metadata import entry_points

    found = sorted(entry_points(group=group), key=lambda point: (not is_own_module(point.module), point.name))
    places: dict[str, str] = {}
    for point in found:
        places.setdefault(point.name, point.value)
    return places


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
