"""The privacy loss of a mixture of Gaussians, apart from `pld`, which imports dp_accounting only when it needs it."""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, MixtureGaussianPrivacyLoss
from numpy.typing import NDArray

__all__ = ["AdjacencyType", "GaussianMixture"]

Array = NDArray[np.float64]


class GaussianMixture(MixtureGaussianPrivacyLoss):  # type: ignore[misc]
    """The library's mixture, its loss inverted for all values at once: 20 times faster, see the tests."""

    def inverse_privacy_losses(self, privacy_losses: Array, precision: float = 1e-8) -> Array:
        """Return where the loss, which decreases in x, takes each value, by bisection to `precision` · σ.

        A point a little off the best threshold lowers δ by the square of the error only. Values are looked
        for where all but 1e-22 of the probability lies.
        """
        sign = 1 if self.adjacency_type == AdjacencyType.ADD else -1
        slopes = sign * self.sensitivities / self._variance
        offsets = np.log(self.sampling_probs) - self.sensitivities**2 / (2 * self._variance)
        tail, sigma = self.privacy_loss_tail(), self._standard_deviation
        low = np.full(len(privacy_losses), tail.lower_x_truncation - sigma)
        high = np.full(len(privacy_losses), tail.upper_x_truncation + sigma)
        # With k records the loss is the logarithm of a sum of k + 1 exponentials, which has no inverse in closed form.
        for _ in range(math.ceil(math.log2((high[0] - low[0]) / (precision * sigma)))):
            middle = (low + high) / 2
            exponents = offsets + np.outer(middle, slopes)
            top = exponents.max(axis=1)  # taken out first, since e^exponents overflows
            loss = -sign * (top + np.log(np.exp(exponents - top[:, None]).sum(axis=1)))
            below = loss < privacy_losses
            low, high = np.where(below, low, middle), np.where(below, middle, high)
        return high
