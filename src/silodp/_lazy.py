"""Lazy imports, and the version of the package.

A package imports a module when one of its names is first used, since torch and pandas take seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def export_lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package (PEP 562).

    Args:
        package: its `__name__`.
        homes: for each exported name the module that defines it; a name that is a module stands for itself.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module = importlib.import_module(homes[name])
        return module if homes[name] == f"{package}.{name}" else getattr(module, name)

    return get


class LazyModule:
    """A module of another project that is imported when one of its names is first used.

    Args:
        name: with dots, for example "scipy.special".
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def find_version() -> str:
    """Return the version of silodp; "0.0.0" in a checkout that is not installed."""
    import importlib.metadata  # takes a tenth of a second

    try:
        return importlib.metadata.version("silodp")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"
