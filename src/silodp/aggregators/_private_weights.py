"""What `lattice` and `paillier` share: weights by records that are applied where nobody sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from silodp.accounting.guarantee import Adversary, View
from silodp.aggregators._private_sampling import ASSUMPTION as SAMPLING_ASSUMPTION
from silodp.aggregators._private_sampling import sampling_ratio
from silodp.aggregators.base import RECIPIENT, Aggregator, Visibility
from silodp.aggregators.masked import MinSilosMixin
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.private_sampling import SamplingRatio
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Bounds, ClippedRowStream
from silodp.mechanisms.quantization import Quantizer
from silodp.methods.base import Method

_EACH_SILO = Visibility(
    "Each silo",
    "the global models",
    "other silos' record counts, sums and records; the weights; who was sampled",
)
_SAMPLE_DRAWN_BY_SERVER = (
    Visibility(
        "The server",
        "only the noisy weighted sum, and whom it sampled",
        "record counts, not even whether a person has any; weights; any single silo's sum; records",
    ),
    _EACH_SILO,
)
_SAMPLE_UNKNOWN = (
    Visibility(
        "The server",
        "only the noisy weighted sum, and which silos answered",
        "who was sampled; record counts, not even whether a person has any; weights; any single silo's sum; records",
    ),
    _EACH_SILO,
    Visibility(
        "Silo 0 (the first)",
        "the same; it also takes from the server, and passes to the other silos, what they multiply with",
        "the same: whether that counts a person in or out is encrypted, or shared with the server",
    ),
)


class PrivateWeighting(MinSilosMixin, Aggregator):
    """Aggregators under which nobody learns a count; `hidden_sample` P is a field of theirs.

    With P cells, nobody learns who is sampled either: the server draws one cell for each person, the silos another
    one, and a person takes part where the one is within k cells of the other; the sampling rate must be k/P.
    """

    hidden_sample: int | None

    adds_integers = True
    weights_privately = True
    protocol_assumptions: tuple[str, ...]
    """Of the protocol while the server draws the sample."""
    first_silo: tuple[Visibility, ...] = ()
    """What else silo 0 sees then, if anything."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Those of the protocol, and of the private sample where there is one."""
        more = (SAMPLING_ASSUMPTION,) if self.samples_users_privately else ()
        return (*self.protocol_assumptions, *more)

    @property
    def visibility(self) -> tuple[Visibility, ...]:
        """Nobody sees counts or weights; the server sees the sample where it draws it."""
        if self.samples_users_privately:
            return (*_SAMPLE_UNKNOWN, RECIPIENT)
        return (*_SAMPLE_DRAWN_BY_SERVER, *self.first_silo, RECIPIENT)

    @property
    def samples_users_privately(self) -> bool:
        """Whether nobody, the server included, knows who is sampled."""
        return self.hidden_sample is not None

    def law(self, method: Method) -> SamplingRatio | None:
        """How persons are drawn, where nobody is to know whom."""
        return sampling_ratio(method, self.hidden_sample)

    def views(self, method: Method, silos: int, survivors: int | None = None) -> dict[Adversary, View]:
        """Everyone sees the sum; the server alone, if it draws the sample, knows it; nobody knows counts."""
        m, known = self.min_silos_for(silos), self.law(method) is None
        return {
            "released": View("released", silos, shares_for=m, survivors=survivors),
            "server": View("server", silos, knows_sample=known, shares_for=m, survivors=survivors),
            "silo": View("silo", silos, shares_for=m, survivors=survivors),
        }


def check_private_weights(setting: RunSpec, name: str) -> Bounds:
    """Refuse methods that have no weights to hide."""
    bounds = setting.bounds
    if bounds is None or not setting.method.needs_counts:
        raise SilodpError(
            f"aggregator = '{name}' hides weights by records, and {setting.method.name} as it is set uses none: set "
            "weighting = 'records' (uldp-avg, uldp-sgd), or aggregator = 'masked'.",
            code="argument.conflict",
            field="aggregator",
        )
    return bounds


def described_sampling(
    law: SamplingRatio | None, silos: int, users: int, entry: int, lookups: int
) -> dict[str, Any]:
    """What it costs that nobody knows the sample, for people; `entry`: bytes that silo 0 chooses for one person."""
    if law is None:
        return {}
    table = law.places * entry + 16 * (law.places - 1).bit_length()  # entries, and transfers to choose one
    return {
        "sampling": f"{law.drawn} of {law.places} cells for every person; nobody knows who is sampled",
        "bytes between server and silo 0 for it, per round": users * (lookups * table + (silos - 1) * entry),
    }


def integer_rows(
    update: ClippedRowStream, grid: Quantizer, refused: list[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(owners, rows in grid steps), chunk by chunk; counts the rows that were not finite."""
    for chunk in update.chunks:
        refused[0] += chunk.refused
        yield chunk.owners.cpu().numpy(), grid.truncated(chunk)
