"""What `lattice` and `paillier` share: weights by records that are applied where nobody sees them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from silodp.errors import SilodpError
from silodp.federation.aggregation import Setting
from silodp.federation.masked import FewestSilos
from silodp.mechanisms.clipping import Bounds, ClippedStream
from silodp.mechanisms.grid import Grid
from silodp.methods.method import Method
from silodp.privacy.guarantee import Adversary, View


class HiddenWeights(FewestSilos):
    """Aggregators under which nobody learns a count."""

    def views(self, method: Method, silos: int, survivors: int | None = None) -> dict[Adversary, View]:
        """Everyone sees the sum; only the server, which draws it, knows the sample; nobody knows counts."""
        m = self.shares_for(silos)
        return {
            "released": View("released", silos, shares_for=m, survivors=survivors),
            "server": View("server", silos, knows_sample=True, shares_for=m, survivors=survivors),
            "silo": View("silo", silos, shares_for=m, survivors=survivors),
        }


def check_private_weights(setting: Setting, name: str) -> Bounds:
    """Refuse methods that have no weights to hide."""
    bounds = setting.bounds
    if bounds is None or not setting.method.needs_counts:
        raise SilodpError(
            f"aggregator = '{name}' hides weights by records, and {setting.method.name} as it is set uses none: set "
            "weighting = 'records' (uldp-avg, uldp-sgd), or aggregator = 'masked'."
        )
    return bounds


def integer_rows(
    update: ClippedStream, grid: Grid, refused: list[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(owners, rows in grid steps), chunk by chunk; counts the rows that were not finite."""
    for chunk in update.chunks:
        refused[0] += chunk.refused
        yield chunk.owners.cpu().numpy(), grid.truncated(chunk)
