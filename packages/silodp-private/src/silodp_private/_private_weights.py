"""Private weighting by record counts: the common parts of `select`, `lattice` and `paillier`.

With `lattice` and `paillier` the server sends encryptions in a round (of its share of 1/N[u], or of the blinded 1/N[u],
for every person). Every silo multiplies them by n[s,u] times the person's clipped row on a grid, and adds noise, masks
and a seal (docs/protocols.md, sections 3 to 5). `select` needs no encryption (section 7).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from silodp.accounting.events import Event, to_discrete
from silodp.accounting.views import Adversary, View
from silodp.aggregators import attempts, base
from silodp.aggregators._key_agreement import SessionInfo
from silodp.aggregators.masked import Masked
from silodp.aggregators.run_spec import RunSpec
from silodp.assumption import Assumption
from silodp.crypto.keys import Session
from silodp.crypto.sampling import SamplingRatio
from silodp.crypto.secure_aggregation import RoundAttempt
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Bounds, ClippedRowStream
from silodp.mechanisms.quantization import Quantizer
from silodp.methods import roles
from silodp.methods.base import Method
from silodp.text import join_names
from silodp.wire.messages import Message
from silodp.wire.schemas import Blob, MessageSchedule, MessageSchema, MessageType
from silodp_private import _private_sampling as hidden
from silodp_private.crypto.lookup import Lookup

Rows = Iterator[tuple[np.ndarray, np.ndarray]]
"""Chunks of (owners (r,), rows in grid steps (r, d))."""
Noise = dict[str, np.ndarray]
"""What a silo draws for a release, by name: integer noise (d,), and what else hides the low part of the sum."""

_WEIGHTINGS: dict[roles.WeightRule, tuple[str, ...]] = {
    "shares": ("records", "present"),
    "primary_silo": ("primary_silo",),
}
"""The weightings of a configuration, by rule."""

_UNSEEN = f"{base.COUNTS_OF_PERSONS}, not even whether somebody has any; any single silo's sum; records"
_SAMPLE_UNKNOWN = base.Visibility(
    "Silo 0 (the first)",
    "the same; it also takes from the server, and passes to the other silos, what they multiply with",
    "the same: whether that counts a person in or out is encrypted, or shared with the server",
)


class PrivateWeighting(attempts.MaskedAggregator):
    """Base class of the aggregators under which no party learns another party's record counts.

    Subclasses have the field `hidden_sample`. With `hidden_sample` = P nobody learns who is
    sampled: for each person the server draws one of P cells, and the silos derive another one. A person takes
    part if (server's cell − silos' cell) mod P < k. The sampling rate must be k/P.
    """

    hidden_sample: int | None

    weights_privately = True
    weight_rules: tuple[roles.WeightRule, ...] = ("shares",)
    """The rules by which weights are found without anybody's knowing them."""
    protocol_assumptions: tuple[Assumption, ...]
    """The assumptions under which the counts stay hidden."""
    sum_seen = "only the noisy weighted sum"
    weights_unseen = "weights"
    first_silo: tuple[base.Visibility, ...] = ()
    """What silo 0 sees in addition to the other silos, where the server draws the sample."""

    @property
    def sampled_by(self) -> base.SampledBy:
        """The server, or nobody where the sample is hidden."""
        return "server" if self.hidden_sample is None else "nobody"

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions of the protocol, and of the private sample where there is one."""
        more = (hidden.SAMPLE_HIDDEN,) if self.sampled_by == "nobody" else ()
        return (*self.protocol_assumptions, *more)

    @property
    def visibility(self) -> tuple[base.Visibility, ...]:
        """Nobody sees counts or weights; the server sees the sample where it draws it."""
        is_unknown = self.sampled_by == "nobody"
        seen = "which silos answered" if is_unknown else "who was sampled"
        unseen = f"who was sampled; {self.weights_unseen}" if is_unknown else self.weights_unseen
        return (
            base.Visibility("The server", f"{self.sum_seen}; {seen}", f"{unseen}; {_UNSEEN}"),
            base.Visibility(
                "Each silo",
                "the global models",
                f"{base.OTHER_SILOS}; {self.weights_unseen}; who was sampled",
            ),
            *((_SAMPLE_UNKNOWN,) if is_unknown else self.first_silo),
            base.RECIPIENT,
        )

    def sampling_ratio(self, method: Method) -> SamplingRatio | None:
        """Return k and P of the hidden sample (rate k/P); None where the server draws the sample."""
        return hidden.sampling_ratio(method, self.hidden_sample)

    def views(self, method: Method, silos: int, survivors: int | None = None) -> dict[Adversary, View]:
        """Return the view of each adversary: all see the sum, the server sees the sample if it draws it.

        No adversary sees counts.
        """
        # Noise is sized for the fewest silos, m: where more answer, the sum has more noise, which the view says by
        # `survivors`.
        m, known = self.min_silos_for(silos), self.sampling_ratio(method) is None
        return {
            "released": View("released", silos, noise_sized_for=m, survivors=survivors),
            "server": View("server", silos, knows_sample=known, noise_sized_for=m, survivors=survivors),
            "silo": View("silo", silos, noise_sized_for=m, survivors=survivors),
        }

    def series_aggregator(self, spec: RunSpec) -> base.Aggregator | None:
        """Return `masked`: counts have no weights to hide."""
        return Masked(min_silos=spec.min_silos)

    def bounds_of(self, spec: RunSpec) -> Bounds:
        """Return the bounds of the rows; refuse methods that have no weights to hide.

        Raises:
            SilodpError: the method's weights follow another rule, or none.
        """
        bounds = spec.bounds
        if bounds is None or spec.method.weight_rule not in self.weight_rules:
            known = [f"'{name}'" for rule in self.weight_rules for name in _WEIGHTINGS[rule]]
            raise SilodpError(
                f"aggregator = '{self.name}' computes and hides the weights {join_names(known)} alone, and "
                f"{spec.method.name} as it is set has others or none: set weighting = {join_names(known, 'or')} "
                "(uldp-avg, uldp-sgd, without verified), or aggregator = 'masked'.",
                code="argument.conflict",
                field="aggregator",
            )
        return bounds

    @abstractmethod
    def grid(self, spec: RunSpec) -> Quantizer:
        """Return the grid of the rows, of all silos; raise if there is none for these constants."""

    # --- messages ---

    @abstractmethod
    def entry_bytes(self, spec: RunSpec) -> int:
        """Return the size in bytes of the entry that silo 0 chooses for one person where nobody knows the sample."""

    @abstractmethod
    def setup_types(self, spec: RunSpec, is_first: bool) -> tuple[MessageType, ...]:
        """Return the messages that exchange counts, as silo 0, the first, or another silo is asked them."""

    @abstractmethod
    def sample_types(self, spec: RunSpec, choice: Mapping[str, Blob]) -> tuple[MessageType, ...]:
        """Return the request "sample" to silo 0 in a round, () if there is none.

        Args:
            spec: public constants.
            choice: further blobs of its answer where nobody knows the sample; {} where the server draws it.
        """

    @abstractmethod
    def update_types(self, spec: RunSpec) -> tuple[dict[str, Blob], dict[str, Blob]]:
        """Return the blobs of an update, the same for all silos, and those of its answer."""

    def script(self, spec: RunSpec, name: str) -> MessageSchedule:
        """Return set-up, key agreement, the exchange of counts; then, of silo 0, a round's sample, and attempts."""
        ratio, is_first = self.sampling_ratio(spec.method), name == spec.names[0]
        setup, (blobs, answer) = self.setup_types(spec, is_first), self.update_types(spec)
        choice: dict[str, Blob] = {}
        chosen: tuple[MessageType, ...] = ()
        if ratio is not None and is_first:
            setup, choice = (*setup, *hidden.CHOICE_SETUP), {"choice": hidden.choice_blob(spec, ratio)}
            chosen = (hidden.chosen_type(spec, ratio, self.entry_bytes(spec)),)
        elif ratio is not None:
            blobs[base.SEALED_SAMPLE_BLOB] = hidden.sealed_sample_blob(spec, self.entry_bytes(spec))
        prepare = (*self.sample_types(spec, choice), *chosen) if is_first else ()
        return self.attempt_script(
            spec, name, MessageSchema(blobs=answer), setup=setup, prepare=prepare, blobs=blobs
        )

    def describe_sampling(self, spec: RunSpec, lookups: int) -> dict[str, Any]:
        """Return the entries of `describe` about the hidden sample and its cost; {} where the server draws it.

        Args:
            spec: public constants.
            lookups: number of tables per person and round from which silo 0 and the server choose.
        """
        ratio, silos, users = self.sampling_ratio(spec.method), spec.population.silos, spec.population.users
        if ratio is None:
            return {}
        entry = self.entry_bytes(spec)
        # The entries of a table, and the transfers by which one of them is chosen.
        table = ratio.denominator * entry + 16 * (ratio.denominator - 1).bit_length()
        size = users * (lookups * table + (silos - 1) * entry)
        return {
            "sampling": f"{ratio.numerator} of {ratio.denominator} cells for every person; nobody knows who is sampled",
            "bytes between server and silo 0 for it, per round": size,
        }


class EncryptionParameters(Protocol):
    """What noise is accounted by, of the parameters of any encryption."""

    @property
    def row_bound(self) -> float:
        """C/g, the largest norm ‖Δ[s,u]‖₂ in grid units."""

    @property
    def sensitivity(self) -> float:
        """What one user changes in the result, in grid units."""


class EncryptedWeighting(PrivateWeighting):
    """Base class of the aggregators under which silos multiply encryptions; they have the field `count_cap`."""

    count_cap: int

    @abstractmethod
    def parameters(self, spec: RunSpec) -> EncryptionParameters:
        """Return the encryption's parameters, a function of public constants alone.

        Raises:
            SilodpError: there are none for these constants.
        """

    def event(self, spec: RunSpec, view: View) -> Event:
        """Return the method's event, with Skellam noise in the units that the sum is rounded to (2^r, or C_LCM).

        The uniform part of the noise, as wide as such a unit, is not counted as protection. It lets a row move the
        rounded sum by up to √d more, which the sensitivity includes.

        Source: docs/protocols.md, sections 3 and 4; docs/privacy.md, section 3.
        """
        p = self.parameters(spec)
        event, reach = spec.method.dp_event(view), p.sensitivity / p.row_bound
        return to_discrete(event, int(p.sensitivity), spec.sum_size, reach)

    def describe_grid(self, spec: RunSpec, units: int) -> dict[str, Any]:
        """Return the first lines of `describe`; `units`: grid steps to the clip."""
        return {
            "silos needed in a sum": spec.population.min_survivors,
            "count cap per person and silo": self.count_cap,
            "grid steps to the clip": units,
        }


@dataclass(frozen=True)
class PrivateWeightingServer(attempts.MaskedServer):
    """The server's side: it exchanges counts that it cannot read, and sends encryptions that silos multiply."""

    aggregator: PrivateWeighting

    def prepare(self, context: base.ServerContext, session: SessionInfo) -> None:
        """Exchange counts and, where nobody is to know the sample, make base transfers."""
        self.exchange_counts(context, session)
        if self.aggregator.sampled_by == "nobody":
            hidden.OtServer(self.spec, context).set_up(session)

    @abstractmethod
    def exchange_counts(self, context: base.ServerContext, session: SessionInfo) -> None:
        """Obtain, once in a session, what weights follow from; store it for the run."""


class PrivateWeightingSilo(attempts.MaskedSilo):
    """A silo's side: it chooses for all silos where nobody knows the sample, if it is silo 0."""

    _aggregator: PrivateWeighting

    def __init__(self, aggregator: PrivateWeighting, spec: RunSpec, context: base.SiloContext) -> None:
        super().__init__(aggregator, spec, context)
        ratio = aggregator.sampling_ratio(spec.method)
        self._choices: hidden.OtClient | None = None
        if ratio is not None:
            self._choices = hidden.OtClient(spec, ratio, self._member, context.store, self.open_chosen)
            self.handlers = {**self.handlers, **self._choices.handlers}

    @abstractmethod
    def open_chosen(self, request: Message, part: Lookup, answer: bytes) -> bytes:
        """Return what silos need of a round's hidden sample, `entry_bytes` a person.

        Args:
            request: "chosen", of the round.
            part: silo 0's lookup.
            answer: the server's answer to it.
        """


class MultiplyingSilo(PrivateWeightingSilo):
    """A silo's side where it multiplies encryptions: its rows on the grid, and its noise."""

    def answer(
        self, request: Message, session: Session, attempt: RoundAttempt, work: base.LocalUpdateFn
    ) -> tuple[Message, int]:
        """Answer an update: clip, draw the noise of the release once, multiply chunk by chunk."""
        update, stream = compute_rows(work, attempt.release)
        # Noise alone is stored, and rows are computed again: they follow from model and data, and take more space.
        drawn = self.get_or_draw(request, attempt, lambda: self.draw_noise(update.bounds, stream))
        # A list, since a generator cannot return its count before it is consumed.
        refused = [0]
        rows = integer_rows(update, self._aggregator.grid(self._spec), refused)
        # Consumes `rows`, which counts into `refused`.
        blobs = self.multiply(request, session, attempt, rows, drawn)
        return request.reply(**blobs), refused[0]

    @abstractmethod
    def draw_noise(self, bounds: Bounds, stream: np.random.Generator) -> Noise:
        """Draw this silo's share of noise for one release; it is kept for further attempts at the release."""

    @abstractmethod
    def multiply(
        self, request: Message, session: Session, attempt: RoundAttempt, rows: Rows, noise: Noise
    ) -> dict[str, bytes]:
        """Return the blobs of the answer: the weighted sum of the rows, noise, masks and seal."""


def compute_rows(work: base.LocalUpdateFn, release: int) -> tuple[ClippedRowStream, np.random.Generator]:
    """Return the clipped rows of every person for a release, and the stream of this silo's share of noise."""
    own = work(release)
    update = own.compute_update()
    if not isinstance(update, ClippedRowStream):
        raise SilodpError("private weighting needs the clipped rows of every person.", code="method.rows")
    return update, own.noise


def integer_rows(update: ClippedRowStream, grid: Quantizer, refused: list[int]) -> Rows:
    """Yield an update's rows on the grid, chunk by chunk; add the rows that were not finite to `refused`."""
    for chunk in update.chunks:
        refused[0] += chunk.refused
        yield chunk.owners.cpu().numpy(), grid.truncate(chunk)
