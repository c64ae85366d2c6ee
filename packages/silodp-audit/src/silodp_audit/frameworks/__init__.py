"""Settings of other frameworks: the ε that holds for a client, a record and a person. One module per framework.

A new framework derives from `Framework`, and is an entry point in the group "silodp.frameworks".
"""

from __future__ import annotations

from collections.abc import Sequence

from silodp._lazy import Registry
from silodp.errors import lookup
from silodp_audit.frameworks.base import Finding, Framework

FRAMEWORKS: Registry[type[Framework]] = Registry("frameworks", {})
"""By the name in the option --framework: entry points in the group "silodp.frameworks"."""


def check_framework(name: str, given: Sequence[str], delta: float | None = None) -> Finding:
    """Compute which ε holds under the settings of another framework.

    Args:
        name: a key of `FRAMEWORKS`.
        given: see `Framework.check_given`.
        delta: δ; None: that of the settings, else 1e-5.

    Raises:
        SilodpError: an unknown name, or as `Framework.check_given`.
    """
    return lookup(name, FRAMEWORKS, "framework")().check_given(given, delta)


__all__ = ["FRAMEWORKS", "Finding", "Framework", "check_framework"]
