"""Fed-BioMed: `dp_args` of the training arguments; facts are of fedbiomed 6.4.1, and nothing there computes ε.

"local" is DP-SGD of Opacus, made private anew in every round. "central" sets Opacus' noise to 0, and adds noise of
standard deviation sigma · clip to the parameters that a node sends (`fedbiomed.common.privacy.DPController`).
"""

from __future__ import annotations

from dataclasses import replace

from silodp_audit.frameworks import base
from silodp_audit.frameworks.opacus import Opacus


class FedBioMed(Opacus):
    """Fed-BioMed."""

    name = "fedbiomed"
    files = "a flat TOML, JSON or YAML file with the entries of training_args and of its dp_args"
    without_effect = ("clip",)
    noise_names = ("sigma",)
    steps_names = ("num_updates",)
    rounds_names = ("round_limit", "rounds")
    default_rounds = None

    def check(self, settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
        """Return what holds for the type of noise."""
        if settings.choice("type", ("local", "central"), "local") == "local":
            return replace(super().check(settings, delta), stated=None, stated_for="", differences=())
        reason = (
            "clip bounds the gradient of one record in one step, and the noise is for one clip: after several steps, "
            "or with another learning rate than 1, the parameters move by another distance"
        )
        return base.Finding(
            self.name,
            f"noise of {settings.number('sigma'):g} clips on the parameters of a node, and none on its gradients",
            settings.delta(delta, "delta"),
            settings.whole(*self.rounds_names),
            base.no_guarantee(base.SERVER, reason),
        )
