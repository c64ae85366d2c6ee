"""APPFL: `train_configs` of a client with `use_dp`; facts are of appfl 1.12.0 (`VanillaTrainer`).

"laplace" and "gaussian" add noise to the trained parameters of a client, once in a round, for a sensitivity of
2 · clip_value · lr. "opacus" is DP-SGD, with one privacy engine for all rounds.
"""

from __future__ import annotations

import math

from silodp.accounting.accountant import EventCount
from silodp.accounting.events import Gaussian
from silodp_audit.frameworks import base
from silodp_audit.frameworks.opacus import Opacus

_OWN_DELTA = 1e-5
"""The δ of "gaussian", which no setting changes."""
_UNCLIPPED = "clip_grad is not true, so nothing is clipped: use_dp alone only asks for clip_value"


class Appfl(Opacus):
    """APPFL."""

    name = "appfl"
    files = "a flat TOML, JSON or YAML file with the entries of train_configs, of its optim_args and of its dp_config"
    without_effect = ("use_dp", "max_grad_norm")
    has_one_engine = True
    steps_names = ("num_local_steps",)
    epochs_names = ("num_local_epochs",)
    loader_prefix = "train_"
    rounds_names = ("num_global_epochs", "rounds")
    default_rounds = None

    def check(self, settings: base.FrameworkSettings, delta: float | None) -> base.Finding:
        """Return what holds for the mechanism."""
        mechanism = settings.choice("dp_mechanism", ("laplace", "gaussian", "opacus"), "laplace")
        if not settings.flag("use_dp", default=True):
            rounds, found = settings.whole(*self.rounds_names), settings.delta(delta, "delta")
            return base.Finding(
                self.name, "no noise", found, rounds, base.no_guarantee(base.SERVER, "use_dp is false")
            )
        if mechanism == "opacus":
            return super().check(settings, delta)
        finding = self._check_output(settings, delta, mechanism)
        return base.exclude_entries(finding, settings, "buffers", base.BUFFERS)

    def _check_output(
        self, settings: base.FrameworkSettings, delta: float | None, mechanism: str
    ) -> base.Finding:
        """Check noise on the parameters after `steps` steps, each of which moves them by at most clip_value · lr."""
        epsilon, rounds = settings.number("epsilon"), settings.whole(*self.rounds_names)
        settings.number("clip_value")
        found = settings.delta(delta, "delta")
        steps = self.count_steps(settings)
        norm = settings.number("clip_norm") if settings.flag("clip_grad", default=False) else None
        # In units of clip_value · lr: noise is for 2, an emptied client is `steps` away, and a record moves a client
        # from one point of that ball to another.
        std = 2 * math.sqrt(2 * math.log(1.25 / _OWN_DELTA)) / epsilon

        def charges(records: int) -> list[EventCount]:
            return [(Gaussian(std / (steps * (2 if records else 1))), rounds * max(records, 1))]

        needed = 1.0 if mechanism == "laplace" else 2.0
        if norm != needed:
            bounds = base.no_guarantee(
                base.SERVER,
                _UNCLIPPED
                if norm is None
                else f"clip_norm = {norm:g}, and {mechanism} noise is for a clip in the {needed:g}-norm",
            )
        elif mechanism == "gaussian":
            bounds = base.bound_units(base.SERVER, found, charges)
        else:
            # Pure differential privacy: ε for a move by 2, and it adds up over rounds and over clients.
            bounds = tuple(
                base.Bound(base.SERVER, unit, epsilon / 2 * steps * rounds * max(1, 2 * records))
                for unit, records in base.UNITS.items()
            )
        differences = []
        if steps > 1:
            differences.append(f"it is for one step, and a client takes {steps:,} in a round")
        if rounds > 1:
            differences.append("it is about one round, and the rounds add up")
        if mechanism == "gaussian" and epsilon >= 1:
            differences.append("the formula √(2·ln(1.25/δ))/ε for the noise is proven for ε below 1 only")
        return base.Finding(
            self.name,
            f"{mechanism} noise on the parameters, for 2 · clip_value · lr, after {steps:,} steps",
            found,
            rounds,
            bounds,
            epsilon,
            f"by the setting epsilon, in each round{f' at δ = {_OWN_DELTA:g}' if mechanism == 'gaussian' else ''}",
            tuple(differences),
            (
                "optim is SGD with the lr of the noise, without momentum or weight decay: other optimizers move the "
                "parameters further than clip_value · lr in a step",
                "a client may be in every round, and whether it is does not depend on its records",
                "a client that is emptied still answers, with the parameters that it received",
                "the number of steps is public, and every gradient is finite",
                "clients send the numbers of their records and their metrics in clear; no ε here covers these",
            ),
        )
