"""The methods, and the one registry of their names."""

from collections.abc import Callable
from typing import Any

from silodp.methods.default import Default
from silodp.methods.group import UldpGroup
from silodp.methods.method import Method, Population, SiloWork
from silodp.methods.naive import UldpNaive
from silodp.methods.uldp import UldpAvg, UldpSgd

METHODS: dict[str, Callable[..., Any]] = {
    "default": Default,
    "uldp-naive": UldpNaive,
    "uldp-group": UldpGroup,
    "uldp-sgd": UldpSgd,
    "uldp-avg": UldpAvg,
}

__all__ = [
    "METHODS",
    "Default",
    "Method",
    "Population",
    "SiloWork",
    "UldpAvg",
    "UldpGroup",
    "UldpNaive",
    "UldpSgd",
]
