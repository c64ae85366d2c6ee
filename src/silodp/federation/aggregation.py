"""How silos' shares become their sum, and therefore who sees what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from silodp.federation.messages import Message
from silodp.mechanisms.clipping import Finished, Share, Update, fold
from silodp.methods.method import Method
from silodp.privacy.guarantee import Adversary, View


class Aggregator(Protocol):
    """Sums shares; which adversary sees what follows from how."""

    name: str

    def views(self, method: Method, silos: int) -> dict[Adversary, View]:
        """What each adversary sees of a round in which every silo answers."""

    def share(self, update: Update, weights: Tensor, noise: np.random.Generator) -> Share:
        """In the silo: weight, sum, add the silo's share of noise; weights (U,) float64."""

    def total(self, answers: Mapping[str, Message]) -> Tensor:
        """In the server: Σ_s share_s (d,) float64."""


class Plain:
    """The server adds what it receives: it sees every silo's noisy share, and drew the user sample itself.

    Allotments travel in clear. A silo sees which persons have weight 0 this round, and with weights by records it can
    work out each person's total from its own count.
    """

    name = "plain"

    def views(self, method: Method, silos: int) -> dict[Adversary, View]:
        """SPEC section 2, second column."""
        return {
            "released": View("released", silos),
            "server": View(
                "server", silos, sees_shares=True, knows_sample=True, counts_disclosed=method.needs_counts
            ),
            "silo": View("silo", silos, knows_sample=True, counts_disclosed=method.needs_counts),
        }

    def share(self, update: Update, weights: Tensor, noise: np.random.Generator) -> Share:
        """Σ weight·clipped row + Gaussian noise, in floating point."""
        if isinstance(update, Finished):
            return Share(update.value, 0.0, update.refused)
        return fold(update, weights).release(update.noise_multiplier, noise)

    def total(self, answers: Mapping[str, Message]) -> Tensor:
        """The sum, in the order of the silos' names (float addition depends on it)."""
        return torch.stack([torch.from_numpy(answers[name].arrays["share"]) for name in sorted(answers)]).sum(
            dim=0
        )


AGGREGATORS: dict[str, Callable[[], Aggregator]] = {"plain": Plain}
