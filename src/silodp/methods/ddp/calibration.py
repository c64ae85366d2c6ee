"""Calibration of `ddp`: the noise of the release and of the local steps for a target ε."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from silodp.accounting.accountant import Accountant
from silodp.accounting.calibration import calibrate_noise_multiplier
from silodp.accounting.events import Event
from silodp.accounting.guarantee import View
from silodp.errors import SilodpError, check_positive
from silodp.methods.ddp.method import Ddp


def calibrate_ddp(
    method: Ddp,
    target_epsilon: float,
    rounds: int,
    clients: int,
    delta: float,
    accountant: Accountant | str = "pld",
    most_trajectory_noise: float | None = None,
    event: Callable[[Ddp], Event] | None = None,
) -> Ddp:
    """Return the method with the least noise whose `rounds` cost at most `target_epsilon` at `delta`.

    All clients' noise is scaled alike. More trajectory noise always makes the released noise smaller, so the ratio R
    alone has no best value: with `most_trajectory_noise` (σ_a, in units of the clip, the largest over clients) R is
    what makes σ_a just that, and the released noise is the least possible; without it `trajectory_ratio` stays.
    `event`: what a round costs (None: whoever sees the sum of all clients, Gaussian noise); give an aggregator's for
    the integers that it adds.

    Raises:
        SilodpError: no noise meets the target; with trajectory noise held fixed, that may be too little of it.
    """
    relative = method.noise_multiplier
    largest = max(relative) if isinstance(relative, tuple) else relative
    if largest <= 0:
        raise SilodpError(
            "noise_multiplier = 0: set the clients' noise in proportion, for example 1.0.",
            code="argument.value",
            field="noise_multiplier",
        )
    if most_trajectory_noise is not None:
        check_positive("most_trajectory_noise", most_trajectory_noise)

    def made(sigma: float) -> Ddp:
        scaled = tuple(sigma * one / largest for one in relative) if isinstance(relative, tuple) else sigma
        noisy = replace(method, noise_multiplier=scaled)
        if most_trajectory_noise is None:
            return noisy
        everyone = noisy.clients_of(clients)
        widest = max(replace(noisy, trajectory_ratio=1.0).trajectory_noise(c, everyone) for c in everyone)
        return replace(noisy, trajectory_ratio=most_trajectory_noise / widest)

    def cost(sigma: float) -> Event:
        return made(sigma).dp_event(View("released", clients)) if event is None else event(made(sigma))

    return made(calibrate_noise_multiplier(cost, rounds, target_epsilon, delta, accountant))
