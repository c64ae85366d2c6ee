"""Settings of other frameworks: the ε that holds for a client, a record and a person. One module per framework.

A new framework derives from `Framework`; add one line to `FRAMEWORKS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from silodp._lazy import Registry
from silodp.errors import lookup
from silodp_checks.base import Finding, Framework, format_finding, read_settings

FRAMEWORKS: Registry[type[Framework]] = Registry(
    "frameworks",
    {
        "flower": "silodp_checks.flower:Flower",
        "nvflare": "silodp_checks.nvflare:NvFlare",
        "opacus": "silodp_checks.opacus:Opacus",
        "fl4health": "silodp_checks.fl4health:Fl4Health",
        "jax_privacy": "silodp_checks.jax_privacy:JaxPrivacy",
        "pfl": "silodp_checks.pfl:Pfl",
        "fedbiomed": "silodp_checks.fedbiomed:FedBioMed",
        "appfl": "silodp_checks.appfl:Appfl",
    },
)
"""By the name in the option --framework."""


def check_framework(name: str, given: Sequence[str], delta: float | None = None) -> Finding:
    """Compute which ε holds under the settings of another framework.

    Args:
        name: a key of `FRAMEWORKS`.
        given: files of the framework, and settings KEY=VALUE; a later one replaces an earlier one.
        delta: δ; None: that of the settings, else 1e-5.

    Raises:
        SilodpError: an unknown name, a file that cannot be read, or a setting that is missing, out of range, or
            given as KEY=VALUE and not known.
    """
    framework = lookup(name, FRAMEWORKS, "framework")()
    settings = read_settings(framework, given)
    finding = framework.check(settings, delta)
    few = f"there are far fewer than 1/δ = {1 / finding.delta:,.3g} persons"
    return replace(
        finding,
        assumptions=(*finding.assumptions, few),
        unread=settings.list_unread(framework.without_effect),
    )


__all__ = ["FRAMEWORKS", "Finding", "Framework", "check_framework", "format_finding"]
