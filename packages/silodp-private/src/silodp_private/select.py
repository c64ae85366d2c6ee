"""`select`: secure aggregation of each person's row from their primary silo alone, by oblivious transfer without
encryption.

A person counts with all their weight in one silo that holds most of their records, and nobody learns in which one:
server and silos hold shares of it. In a round the server selects, by transfers with each silo, the rows of the persons
whose primary silo it is; it gets them as shares of a sum, and the silo's share comes with noise under masks and a seal,
as in `masked`. All persons' rows are sent, U·d words a silo, so `select` is for models and populations of U·d up to
10⁷; `lattice` is for larger ones.

Source: docs/protocols.md, section 7.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from silodp.accounting.events import Event, to_discrete
from silodp.accounting.guarantee import SERVER_CHOOSES_PRIMARY_SILOS, UNTIMED
from silodp.accounting.views import View
from silodp.aggregators import base
from silodp.aggregators._key_agreement import SessionInfo, current_session
from silodp.aggregators.attempts import KEYS_COMPARED, UNBROKEN, OpenedAttempt, RoundRequest
from silodp.aggregators.run_spec import RunSpec
from silodp.assumption import SILO_OPERATORS, Assumption
from silodp.crypto.keys import Session
from silodp.crypto.secure_aggregation import RoundAttempt, WordGroup, apply_masks, open_sum
from silodp.errors import SilodpError, require
from silodp.mechanisms.noise import draw_skellam
from silodp.mechanisms.quantization import Quantizer, choose_ring_bits, compute_noise_variance
from silodp.wire.messages import Message
from silodp.wire.schemas import Blob, MessageType
from silodp.wire.store import get_or_make
from silodp_private import _primary_silo_shares, _private_weights, _weight_shares
from silodp_private._private_sampling import blame_silo, load_transfers
from silodp_private.crypto import oblivious_transfer as ot
from silodp_private.crypto.primary_silos import MAX_SILOS, PrimarySiloParameters, compute_max_users
from silodp_private.crypto.products import MaskedRows, add_products, bind_keys

ASSUMPTIONS = (
    KEYS_COMPARED,
    SERVER_CHOOSES_PRIMARY_SILOS,
    UNBROKEN,
    Assumption("transfer-cryptography", "oblivious transfer over ristretto255 hides choices", technical=True),
    Assumption(
        "common-secret-and-tables",
        "silo 0 offers the tables it should, and no silo tells the server the silos' common secret: together they "
        "would learn every person's primary silo",
        SILO_OPERATORS,
    ),
    UNTIMED,
)
PRODUCTS = "server chooses among a silo's streams"  # purpose of the base transfers
_BASE = "product base"  # the message that makes them
_RECEIVER = "products/"
_MAX_UNITS = 1 << 16  # grid steps to the clip: with them, words of 32 bits hold sums over 2^14 persons


@dataclass(frozen=True, repr=False)
class Select(_private_weights.PrivateWeighting):
    """Private weighting of small models: each person counts in their primary silo alone, and nobody learns where that
    is.

    Source: docs/protocols.md, section 7; products by correlated transfers as in Gilboa (CRYPTO 1999).

    Args:
        min_silos: m, the smallest number of silos whose answers are added up (None: all must answer).
        units: grid steps to the clip, a power of two (None: 2^16, or the finest grid with exact noise if coarser).
        hidden_sample: P; nobody learns who is sampled, at a rate of k/P (None: the server draws the sample, and knows
            it). Silo 0 must answer in every round, and no seed fixes the sample.
    """

    min_silos: int | None = None
    units: int | None = None
    hidden_sample: int | None = None

    name = "select"
    protocol_assumptions = ASSUMPTIONS
    weight_rules = ("primary_silo",)
    sum_seen = "only the noisy sum of one row for each person, that of their primary silo"
    weights_unseen = "persons' primary silos"
    first_silo = (
        base.Visibility(
            "Silo 0 (the first)",
            "the same; it also prepares the masked tables by which primary silos are found",
            "the same: it does not learn which entries were looked up",
        ),
    )

    def check(self, spec: RunSpec) -> None:
        """Refuse other weights, too few or too many silos or persons, and a grid or a ring that does not exist."""
        self.check_min_silos(spec)
        silos, users = spec.population.silos, spec.population.users
        if silos > MAX_SILOS:
            limit = f"among {MAX_SILOS} at most"
        elif users > compute_max_users(silos):
            limit = f"for {compute_max_users(silos):,} persons at most among so many silos"
        else:
            limit = ""
        require(
            not limit,
            f"{users:,} persons and {silos} silos: 'select' finds primary silos {limit}; set aggregator = 'lattice' "
            "and weighting = 'records', or merge silos.",
            code="argument.value",
            field="aggregator",
        )
        self.sampling_ratio(spec.method)
        self.ring(spec)

    def grid(self, spec: RunSpec) -> Quantizer:
        """Return the grid of the rows."""
        return Quantizer.from_bounds(self.bounds_of(spec), self.units, _MAX_UNITS)

    def ring(self, spec: RunSpec) -> WordGroup:
        """Return the ring that rows and sums live in."""
        bits = choose_ring_bits(self.bounds_of(spec), self.grid(spec), spec.population.silos)
        return WordGroup(spec.sum_size, bits)

    def noise_step(self, spec: RunSpec) -> float:
        """Return the step of the grid of the rows."""
        return self.grid(spec).step

    def event(self, spec: RunSpec, view: View) -> Event:
        """Return the method's event, with Skellam noise on the grid of the rows: no weight divides a row.

        Source: docs/privacy.md, section 3.
        """
        return to_discrete(spec.method.dp_event(view), self.grid(spec).units, spec.sum_size)

    def describe(self, spec: RunSpec) -> dict[str, Any]:
        """Return grid, ring, and what travels."""
        ring, users = self.ring(spec), spec.population.users
        choices = ot.choice_bytes(users)
        return {
            "silos needed in a sum": spec.population.min_survivors,
            "grid steps to the clip": self.grid(spec).units,
            "sums modulo": f"2^{ring.bits}",
            "bytes up, per silo and round": (users + 1) * ring.size * ring.dtype.itemsize,
            "bytes down, per silo and round": choices,
            **self.describe_sampling(spec, lookups=2),
            "exactness": "integers, exact",
            "security": "X25519, Ed25519, ristretto255, HKDF-SHA256, ChaCha20: 128 bits",
        }

    def entry_bytes(self, spec: RunSpec) -> int:
        """Return the size of a share, one word."""
        return 8

    def setup_types(self, spec: RunSpec, is_first: bool) -> tuple[MessageType, ...]:
        """Return the messages by which server and silos share primary silos, and the base transfers of products."""
        return *_primary_silo_shares.primary_silo_types(spec, is_first), _weight_shares.base_type(_BASE)

    def sample_types(self, spec: RunSpec, choice: Mapping[str, Blob]) -> tuple[MessageType, ...]:
        """Return the server's lookup of the sampled shares in silo 0's tables; () where everyone takes part."""
        return _weight_shares.sample_types(spec, self.sampling_ratio(spec.method), choice)

    def update_types(self, spec: RunSpec) -> tuple[dict[str, Blob], dict[str, Blob]]:
        """Return the server's choices, and the masked share of the answer with its corrections."""
        ring, users = self.ring(spec), spec.population.users
        row = ring.size * ring.dtype.itemsize
        # A further attempt at a release has no corrections: they were sent.
        answer = {"masked": Blob.of(row), "corrections": Blob(0, users * row)}
        return {base.CHOICES_BLOB: Blob.of(ot.choice_bytes(users))}, answer

    def product_counter(self, spec: RunSpec, round_: int, release: int) -> int:
        """Return the counter of the transfers of a release; a later release has a larger one."""
        # A round has at most 1 + S − m releases, since each further one has lost a silo.
        most = 1 + spec.population.silos - spec.population.min_survivors
        return round_ * most + release

    def server(self, spec: RunSpec) -> base.ServerAggregator:
        """Return the side that chooses rows without seeing them."""
        return _SelectServer(spec, self)

    def silo(self, spec: RunSpec, context: base.SiloContext) -> base.SiloAggregator:
        """Return the side that sends every person's row under two streams."""
        return _Silo(self, spec, context)


@dataclass(frozen=True)
class _SelectServer(_private_weights.PrivateWeightingServer):
    aggregator: Select

    def exchange_counts(self, context: base.ServerContext, session: SessionInfo) -> None:
        """Make shares of primary silos with silo 0, and base transfers with every silo."""
        self._shares(context).set_up(session)
        receivers = _weight_shares.make_base_transfers(
            self.spec, context, session, _BASE, PRODUCTS, self.spec.names
        )
        for name, receiver in receivers.items():
            context.store.run.put(_RECEIVER + name, receiver.pack())

    def request(
        self, context: base.ServerContext, round_: int, arrays: Mapping[str, np.ndarray]
    ) -> RoundRequest:
        """Return choices in the transfers with every silo, anew for every release."""
        ratio = self.aggregator.sampling_ratio(self.spec.method)
        sample = arrays.get("sample") if ratio is None else ratio
        words, sealed_samples = self._shares(context).round_shares(round_, sample)
        sent = {name: array for name, array in arrays.items() if name != "sample"}
        bits = self._parameters(context).unpack(words)

        def own_blobs(attempt: RoundAttempt) -> dict[str, dict[str, bytes]]:
            own = {}
            for name in attempt.roster:
                choices = self._choices(context, attempt, name, bits[self.spec.names.index(name)])
                own[name] = {base.CHOICES_BLOB: choices.blobs["message"]}
                if name in sealed_samples:
                    own[name][base.SEALED_SAMPLE_BLOB] = sealed_samples[name]
            return own

        return RoundRequest(sent, own_blobs=own_blobs, keep=partial(self._keep, context))

    def combine(self, context: base.ServerContext, result: OpenedAttempt) -> np.ndarray:
        """Add the silos' shares, their seals taken off, and the server's shares of the products."""
        ring, store = self.aggregator.ring(self.spec), context.store.round(result.attempt.round)
        values = (np.frombuffer(a.blobs["masked"], ring.dtype) for a in result.answers.values())
        total = open_sum(values, result.seals, ring)
        for name in result.attempt.roster:
            kept = Message.decode(store.get(_product_key(result.attempt, name)) or b"")
            total = ring.add(total, kept.arrays["share"])
        value: np.ndarray = ring.center(total) * self.aggregator.grid(self.spec).step
        return value

    def _shares(self, context: base.ServerContext) -> _primary_silo_shares.PrimarySiloServerShares:
        return _primary_silo_shares.PrimarySiloServerShares(self.spec, context)

    def _parameters(self, context: base.ServerContext) -> PrimarySiloParameters:
        session = current_session(context.store.run).session
        return _primary_silo_shares.primary_silo_parameters(self.spec, bytes.fromhex(session))

    def _choices(
        self, context: base.ServerContext, attempt: RoundAttempt, name: str, bits: np.ndarray
    ) -> Message:
        """Return the choices of a release in the transfers with one silo, drawn and stored before they are sent."""

        def choose() -> bytes:
            counter = self.aggregator.product_counter(self.spec, attempt.round, attempt.release)
            receiver = ot.TransferReceiver.unpack(context.store.run.get(_RECEIVER + name) or b"", counter)
            message, keys = receiver.choose(counter, bits.astype(np.int64))
            arrays = {"bits": bits, "keys": keys}
            return Message("kept", self.spec.run, arrays=arrays, blobs={"message": message}).encode()

        # The same bytes in every attempt at a release: two choices under one counter show where they differ.
        store = context.store.round(attempt.round)
        return Message.decode(get_or_make(store, _choices_key(attempt, name), choose))

    def _keep(
        self,
        context: base.ServerContext,
        attempt: RoundAttempt,
        requests: Mapping[str, Message],
        answers: Mapping[str, Message],
    ) -> None:
        """Store the server's shares of a release; silos send corrections in its first attempt alone.

        Raises:
            SilodpError: a silo sent corrections that are not all persons' (code message.malformed).
        """
        ring, store = self.aggregator.ring(self.spec), context.store.round(attempt.round)
        for name, answer in answers.items():
            if store.get(_product_key(attempt, name)) is not None:
                continue
            kept = Message.decode(store.get(_choices_key(attempt, name)) or b"")
            keys = bind_keys(kept.arrays["keys"], requests[name].digest())
            bits, corrections = kept.arrays["bits"], answer.blobs["corrections"]
            share = blame_silo(name, partial(add_products, keys, bits, corrections, ring))
            stored = Message("kept", self.spec.run, arrays={"share": share})
            store.put(_product_key(attempt, name), stored.encode())


def _choices_key(attempt: RoundAttempt, name: str) -> str:
    return f"choices/{attempt.release}/{name}"


def _product_key(attempt: RoundAttempt, name: str) -> str:
    return f"product/{attempt.release}/{name}"


def _hash_choices(request: Message) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(request.blobs[base.CHOICES_BLOB]).digest(), np.uint8)


class _Silo(_primary_silo_shares.PrimarySharesSilo):
    _aggregator: Select

    def __init__(self, aggregator: Select, spec: RunSpec, context: base.SiloContext) -> None:
        super().__init__(aggregator, spec, context)
        self._ring = aggregator.ring(spec)
        self.handlers = {**self.handlers, _BASE: self._product_base}

    def answer(
        self, request: Message, session: Session, attempt: RoundAttempt, work: base.LocalUpdateFn
    ) -> tuple[Message, int]:
        """Answer an update: rows of all persons under two streams, and this silo's share, noise in it, masked."""
        drawn = self.get_or_draw(request, attempt, lambda: self._multiply(request, attempt, work))
        if not np.array_equal(_hash_choices(request), drawn["choices"]):
            raise SilodpError(
                f"silo '{session.name}' was sent other choices for a release of round {attempt.round + 1} than before: "
                "with both the server could read rows; nothing was sent.",
                code="crypto.reused",
            )
        corrections = b""
        # Corrections are of the release: sent once, and to the byte again where that answer is repeated.
        if int(drawn["attempt"][0]) == attempt.attempt:
            # After what was drawn is stored: a process that dies in between has sent nothing, and sends the same.
            self._use_up(request, attempt.release)
            corrections = drawn["corrections"].tobytes()
        masked = apply_masks(drawn["share"].copy(), self._ring, session, attempt, request.digest())
        return request.reply(masked=masked.tobytes(), corrections=corrections), int(drawn["refused"][0])

    def _multiply(
        self, request: Message, attempt: RoundAttempt, work: base.LocalUpdateFn
    ) -> dict[str, np.ndarray]:
        """Return the corrections and the noisy share of one release."""
        ring, grid = self._ring, self._aggregator.grid(self._spec)
        keys = bind_keys(self._open_transfers(request, attempt.release), request.digest())
        rows = MaskedRows.begin(keys, ring)
        update, stream = _private_weights.compute_rows(work, attempt.release)
        noise = draw_skellam(ring.size, compute_noise_variance(update.bounds, grid), stream)
        share = ring.add(rows.share, ring.from_integers(noise))
        here = self._bits_here(request)
        refused = [0]
        for owners, whole in _private_weights.integer_rows(update, grid, refused):
            # With θ', the silos' share of "has its primary silo here", e·(1 − 2θ')·D + θ'·D is D where e ⊕ θ' is 1, and
            # else 0.
            words, own = ring.from_integers(whole), here[owners][:, None]
            rows.add(owners, np.where(own, -words, words))
            share = ring.add(share, np.where(own, words, 0).sum(axis=0, dtype=ring.dtype))
        return {
            "share": share,
            "corrections": rows.corrections,
            "choices": _hash_choices(request),
            "attempt": np.array([attempt.attempt]),
            "refused": np.array(refused),
        }

    def _bits_here(self, request: Message) -> np.ndarray:
        """Return this silo's bits (U,) of the silos' shares of primary silos in a round."""
        session = self._member.session_of(request)
        primary = self.share_parameters(session).unpack(self.round_shares(request))
        here: np.ndarray = primary[session.roster.index(session.name)]
        return here

    def _open_transfers(self, request: Message, release: int) -> np.ndarray:
        """Return both keys of each person's transfer in a release, shape (2, U, 32).

        Raises:
            SilodpError: the choices fail the check of the transfers, or these were used or have ended.
        """
        counter = self._aggregator.product_counter(self._spec, request.round, release)
        sender = self._load_transfers(request, counter)
        try:
            return sender.keys(counter, self._spec.population.users, request.blobs[base.CHOICES_BLOB])
        except SilodpError:
            # A failed check ends the transfers for good: it has told a cheat one bit of what they rest on.
            if sender.has_ended:
                self._context.store.run.put(self._products_key(request), sender.pack())
            raise

    def _use_up(self, request: Message, release: int) -> None:
        """Store that the transfers of a release are used; a repeated call does nothing."""
        following = self._aggregator.product_counter(self._spec, request.round, release) + 1
        sender = self._load_transfers(request, following)
        self._context.store.run.put(self._products_key(request), sender.pack())

    def _load_transfers(self, request: Message, counter: int) -> ot.TransferSender:
        """Return the transfers from `counter` on; raise if it was used."""
        key = self._products_key(request)
        packed = load_transfers(self._context.store.run, key, self._member.identity.name)
        return ot.TransferSender.unpack(packed, counter)

    def _product_base(self, request: Message) -> Message:
        return self.accept_transfers(request, PRODUCTS, self._products_key(request))

    def _products_key(self, request: Message) -> str:
        return f"products/{request.fields['session']}"
