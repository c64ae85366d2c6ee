"""`lattice`: secure aggregation weighted by private record counts, with ring-LWE and oblivious transfer.

From the answers the server learns Σ_s Σ_u ⌊2^k/N[u]⌋·n[s,u]·Δ[s,u] plus noise, as integers, and nothing else. A
silo learns neither other silos' counts nor who was sampled. A round consists of attempts with seals, as in
`masked`.

Source: docs/protocols.md, section 3. It replaces Protocol 1 of ULDP-FL (Kato et al., "ULDP-FL: Federated
Learning with Across-Silo User-Level Differential Privacy", PVLDB 2024), and needs no Paillier encryption.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from silodp.accounting import events
from silodp.accounting.accountant import choose_accountant, compute_epsilon
from silodp.accounting.guarantee import UNTIMED
from silodp.accounting.views import Adversary, reads_round
from silodp.aggregators import base
from silodp.aggregators._key_agreement import SessionInfo, current_session
from silodp.aggregators.attempts import MASKING_ASSUMPTIONS, OpenedAttempt, RoundRequest
from silodp.aggregators.run_spec import RunSpec
from silodp.assumption import SERVER_CHOOSERS, SILO_OPERATORS, Assumption
from silodp.crypto.keys import Session
from silodp.crypto.secure_aggregation import RoundAttempt, apply_masks, open_sum
from silodp.crypto.streams import KEY_BYTES
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Bounds
from silodp.mechanisms.noise import MAX_SKELLAM_VARIANCE, draw_skellam
from silodp.mechanisms.quantization import Quantizer
from silodp.settings import Whole
from silodp.wire.messages import Message
from silodp.wire.schemas import Blob, MessageType
from silodp.wire.store import get_or_make, set_once
from silodp_private import _reciprocal_shares, _weight_shares
from silodp_private._private_sampling import blame_silo
from silodp_private._private_weights import (
    EncryptedWeighting,
    MultiplyingSilo,
    Noise,
    PrivateWeightingServer,
    Rows,
)
from silodp_private.crypto.lattice.noise import scale_noise
from silodp_private.crypto.lattice.parameters import LatticeParameters, search_parameters
from silodp_private.crypto.lattice.scheme import LatticeServer, LatticeSilo

ASSUMPTIONS = (
    *MASKING_ASSUMPTIONS,
    Assumption(
        "lattice-cryptography",
        "ring-LWE is hard at the parameters shown, and oblivious transfer over ristretto255 hides choices",
        technical=True,
    ),
    Assumption(
        "common-secret-and-tables",
        "silo 0 offers the tables it should, and no silo tells the server the silos' common secret: together they "
        "would learn all counts",
        SILO_OPERATORS,
    ),
    Assumption(
        "server-not-malicious",
        "the server is not malicious: silos cannot see which weights it encrypts, and a weight of its own choice reads "
        "one person's part; a malicious silo can read the server's shares of the attempt it answers",
        SERVER_CHOOSERS,
    ),
    UNTIMED,
)
# Steps to the clip that ε is computed with while the grid is still unknown: integer noise has more of them (2^17), and
# fewer steps cost more.
_MIN_UNITS = 1 << 12
_NOISE_STEPS = 1 << 17  # of integer noise to the clip (docs/protocols.md, section 3)


@dataclass(frozen=True, repr=False)
class Lattice(EncryptedWeighting):
    """Private weighting for models of any size: ring-LWE encryption and oblivious transfer.

    Source: docs/protocols.md, section 3; the encryption is that of Lyubashevsky, Peikert and Regev (EUROCRYPT 2010).

    Args:
        count_cap: n_max, the largest number of records of one user in one silo that is used; a public constant.
        attempts: the largest number of attempts in the run, repetitions of rounds included; the encryption's
            parameters are chosen for this number.
        min_silos: m, the smallest number of silos whose answers are added up (None: all must answer).
        weight_bits: k; weights are multiples of 2^-k.
        units: grid steps to the clip, a power of two (None: the finest grid for which parameters are found).
        hidden_sample: P; nobody learns who is sampled, at a rate of k/P (None: the server draws the sample, and knows
            it). Silo 0 must answer in every round, and no seed fixes the sample.
    """

    count_cap: int = 100
    attempts: int = 200
    min_silos: int | None = None
    weight_bits: int = 20
    units: int | None = None
    hidden_sample: int | None = None

    name = "lattice"
    protocol_assumptions = ASSUMPTIONS
    first_silo = (
        base.Visibility(
            "Silo 0 (the first)",
            "the same; it also prepares the encrypted tables that weights are looked up in",
            "the same: it does not learn which entries were looked up",
        ),
    )
    delta_share = 0.99

    @property
    def max_rounds(self) -> int:
        """Return `attempts`: every round needs at least one attempt."""
        return self.attempts

    def check(self, spec: RunSpec) -> None:
        """Refuse weights that are no shares of counts, too few silos, and constants for which no encryption is safe."""
        bounds = self.bounds_of(spec)
        self.check_min_silos(spec)
        self.sampling_ratio(spec.method)
        Whole(limit=512).check("weight_bits", self.weight_bits)
        if self.units is not None and (self.units < 1 or self.units & (self.units - 1)):
            raise SilodpError(
                f"units = {self.units}: set a power of two, of grid steps to the clip.",
                code="argument.value",
                field="units",
            )
        # Noise is drawn at 2^17 steps to the clip, whatever the grid of the rows is.
        most = math.sqrt(MAX_SKELLAM_VARIANCE) / _NOISE_STEPS
        if bounds.noise_multiplier > most:
            raise SilodpError(
                f"a silo's share of the noise is {bounds.noise_multiplier:.3g} clips, and 'lattice' can draw {most:.3g}"
                ": lower noise_multiplier, raise min_silos, or sample persons.",
                code="argument.grid",
                field="noise_multiplier",
            )
        self.parameters(spec)

    def parameters(self, spec: RunSpec) -> LatticeParameters:
        """Return the encryption's parameters, a function of public constants alone.

        Raises:
            SilodpError: no parameters meet every rule of docs/protocols.md, section 3.
        """
        return _parameters(self, spec)

    def disclosure(self, spec: RunSpec) -> Mapping[Adversary, float]:
        """Return the total variation by which errors of decryption, which the server alone sees, betray more."""
        return {"server": 2.0 ** self.parameters(spec).log2_tv}

    def grid(self, spec: RunSpec) -> Quantizer:
        """Return the grid that the encryption's parameters are for."""
        return Quantizer(self.bounds_of(spec).clip, self.parameters(spec).clip_units)

    def describe(self, spec: RunSpec) -> dict[str, Any]:
        """Return sizes, limits, and every rule that the encryption meets."""
        p = self.parameters(spec)
        return {
            **self.describe_grid(spec, p.clip_units),
            "weights are multiples of": f"2^-{p.weight_bits}",
            "ring": f"N = {p.ring_size}, Q = 2^{p.modulus_bits} in limbs of {p.limb_bits} bits, T = {p.plaintext_bits}",
            "bytes up, per silo and round": p.digits.size,
            "bytes down, per silo and round": p.bytes_down,
            **self.describe_sampling(spec, lookups=2),
            "exactness": "integers, every block verified",
            "most attempts": self.attempts,
            "δ kept for what ciphertexts disclose": (1 - self.delta_share) * spec.delta,
            "rules": {rule.name: f"{rule.value:.2f} ≤ {rule.limit:.2f}" for rule in p.rules()},
        }

    def constants(self, spec: RunSpec) -> _reciprocal_shares.ShareConstants:
        """Return the constants of the shares of weights."""
        bits = self.parameters(spec).plaintext_bits
        return _reciprocal_shares.ShareConstants(self.count_cap, self.weight_bits, bits)

    def entry_bytes(self, spec: RunSpec) -> int:
        """Return the size of a share, one word."""
        return 8

    def setup_types(self, spec: RunSpec, is_first: bool) -> tuple[MessageType, ...]:
        """Return the messages by which server and silos come to share the weights."""
        return _reciprocal_shares.weight_types(spec, self.constants(spec), is_first)

    def sample_types(self, spec: RunSpec, choice: Mapping[str, Blob]) -> tuple[MessageType, ...]:
        """Return the server's lookup of the sampled shares in silo 0's tables; () where everyone takes part."""
        return _weight_shares.sample_types(spec, self.sampling_ratio(spec.method), choice)

    def update_types(self, spec: RunSpec) -> tuple[dict[str, Blob], dict[str, Blob]]:
        """Return the parts of the server's request, and the masked ciphertexts of the answer."""
        p = self.parameters(spec)
        sent = {part: Blob.of(size) for part, size in p.request_bytes.items()}
        return sent, {"masked": Blob.of(p.digits.size)}

    def server(self, spec: RunSpec) -> base.ServerAggregator:
        """Return the side that holds shares of the weights and the secret key."""
        return _LatticeServer(spec, self)

    def silo(self, spec: RunSpec, context: base.SiloContext) -> base.SiloAggregator:
        """Return the side that multiplies encrypted shares."""
        return _Silo(self, spec, context)


@lru_cache(maxsize=32)
def _parameters(aggregator: Lattice, spec: RunSpec) -> LatticeParameters:
    """Search parameters for which what ciphertexts disclose fits in the δ kept for it.

    It does at the ε of all that the run may charge: its attempts, and its evaluations with all their releases.
    """
    bounds = aggregator.bounds_of(spec)
    # The search needs ε, since (1 + e^ε)·TV must fit into the rest of δ, and ε needs no ciphertexts.
    silos = spec.population.silos
    # Ciphertexts are seen by the server, so its ε counts: knowing samples, however many silos answer, in every round
    # that the attempts may reach, since noise may change over rounds.
    views = [
        aggregator.views(spec.method, silos, n)["server"]
        for n in range(spec.population.min_survivors, silos + 1)
    ]
    of_rounds = {
        spec.method.dp_event(replace(view, round=r)): None
        for view in views
        # Some 10⁸ attempts may be asked for: rounds that cost alike are looked at once.
        for r in range(max(1, aggregator.attempts) if reads_round(spec.method.dp_event, view) else 1)
    }
    event, spent = events.find_costliest_event([*of_rounds]), 0.0
    if not isinstance(event, events.NonPrivate):
        reach = 1 + math.sqrt(spec.sum_size) / _NOISE_STEPS
        # The uniform part of the noise moves a rounded sum by up to √d steps more, so the sensitivity is a little
        # larger.
        # Weights of few bits on a coarse grid leave fewer steps; the search itself takes no grid below 2^8.
        steps = min(_MIN_UNITS, (aggregator.units or 1 << 8) << aggregator.weight_bits)
        release = events.to_discrete(event, steps, spec.sum_size, reach)
        delta = spec.delta * aggregator.delta_share
        # Every further release of a round has lost a silo, and is charged as of a sample that is known.
        most_in_a_round = 1 + silos - spec.population.min_survivors
        rounds = math.ceil(aggregator.attempts / most_in_a_round)
        further = aggregator.attempts - rounds
        charges = [(release, rounds), (events.remove_amplification(release), further)]
        for series in spec.charged:
            derived = spec.derived[series.name]
            charges.append((derived.costliest_events()["server"], derived.rounds * most_in_a_round))
        spent = compute_epsilon(charges, delta, choose_accountant(event for event, _ in charges))
    return search_parameters(
        dimension=spec.sum_size,
        users=spec.population.users,
        silos=silos,
        count_cap=aggregator.count_cap,
        noise_multiplier=bounds.noise_multiplier * math.sqrt(silos),
        attempts=aggregator.attempts,
        epsilon=spent,
        delta=spec.delta,
        weight_bits=aggregator.weight_bits,
        clip_units=aggregator.units,
    )


@dataclass(frozen=True)
class _LatticeServer(PrivateWeightingServer):
    aggregator: Lattice

    def exchange_counts(self, context: base.ServerContext, session: SessionInfo) -> None:
        """Make shares of the weights with silo 0."""
        self._shares(context).set_up(session)

    def request(
        self, context: base.ServerContext, round_: int, arrays: Mapping[str, np.ndarray]
    ) -> RoundRequest:
        """Return encryptions of the server's shares of the sampled users' weights, anew for every attempt."""
        p, ratio = self.aggregator.parameters(self.spec), self.aggregator.sampling_ratio(self.spec.method)
        sample = arrays.get("sample") if ratio is None else ratio
        shares, sealed_samples = self._shares(context).round_shares(round_, sample)
        session = current_session(context.store.run).session

        def encrypt(attempt: RoundAttempt) -> Mapping[str, bytes]:
            key = self._key(context, attempt)
            return LatticeServer(p, key).request(shares, ciphertext_context(session, attempt), key)

        # The sample is in the encrypted shares; silos must not learn it.
        sent = {name: array for name, array in arrays.items() if name != "sample"}
        return RoundRequest.with_samples(sent, sealed_samples, encrypt)

    def combine(self, context: base.ServerContext, result: OpenedAttempt) -> np.ndarray:
        """Add the masked ciphertexts, take the seals off, and decrypt once."""
        p = self.aggregator.parameters(self.spec)
        values = [
            blame_silo(name, partial(p.digits.from_bytes, answer.blobs["masked"]))
            for name, answer in result.answers.items()
        ]
        # The key of this attempt, from the store; keys of other attempts decrypt nothing of it.
        server = LatticeServer(p, self._key(context, result.attempt))
        total: np.ndarray = server.decrypt(open_sum(values, result.seals, p.digits))
        return total * (self.aggregator.grid(self.spec).step / 2.0**p.weight_bits)

    def _shares(self, context: base.ServerContext) -> _reciprocal_shares.ReciprocalServerShares:
        constants = self.aggregator.constants(self.spec)
        return _reciprocal_shares.ReciprocalServerShares(self.spec, context, constants)

    def _key(self, context: base.ServerContext, attempt: RoundAttempt) -> bytes:
        """Return the seed of one attempt, from which its secret key and its encryptions are derived.

        The seed is stored before it is used, so that a repeated request has the same bytes. It is deleted with
        its round. Whoever learns the seed of one attempt cannot read any other attempt.
        """

        def draw() -> bytes:
            self._count(context, attempt)
            return secrets.token_bytes(KEY_BYTES)

        return get_or_make(context.store.round(attempt.round), f"request/{attempt.attempt}", draw)

    def _count(self, context: base.ServerContext, attempt: RoundAttempt) -> None:
        """Count an attempt on disk before its key is made; the count is kept when keys are deleted.

        Raises:
            SilodpError: the run has made all attempts that its encryption was chosen for (code run.attempts).
        """
        stored = context.store.run.get("attempts made")
        counted: dict[str, Any] = {"made": 0, "last": ""} if stored is None else Message.decode(stored).fields
        this = f"{attempt.round}/{attempt.attempt}"
        if counted["last"] == this:
            return  # counted by a process that died before it had made the key
        if counted["made"] >= self.aggregator.attempts:
            raise SilodpError(
                f"this run has made the {counted['made']} attempts its encryption was chosen for: begin a new run with "
                "more (aggregation.attempts), which adds its own ε.",
                code="run.attempts",
                field="attempts",
            )
        counted = {"made": counted["made"] + 1, "last": this}
        context.store.run.put("attempts made", Message("attempts", self.spec.run, fields=counted).encode())


def ciphertext_context(session: str, attempt: RoundAttempt) -> bytes:
    """Return the context that the ciphertexts of an attempt are bound to."""
    return f"{session} round {attempt.round} attempt {attempt.attempt}".encode()


class _Silo(_reciprocal_shares.ReciprocalSilo, MultiplyingSilo):
    def __init__(self, aggregator: Lattice, spec: RunSpec, context: base.SiloContext) -> None:
        super().__init__(aggregator, spec, context, aggregator.constants(spec))
        self._parameters = aggregator.parameters(spec)

    def draw_noise(self, bounds: Bounds, stream: np.random.Generator) -> Noise:
        p = self._parameters
        std = bounds.noise_multiplier * bounds.sensitivity / bounds.clip * p.row_bound  # in units of 2^r
        return {"noise": scale_noise(draw_skellam(p.dimension, std**2, stream), p.noise_shift, stream)}

    def multiply(
        self, request: Message, session: Session, attempt: RoundAttempt, rows: Rows, noise: Noise
    ) -> dict[str, bytes]:
        p = self._parameters
        digits = LatticeSilo(p, lambda seed: self._claim(request, seed)).answer(
            {part: request.blobs[part] for part in p.request_bytes},
            ciphertext_context(session.transcript.hex(), attempt),
            self.capped_counts,
            rows,
            self.round_shares(request),
            noise["noise"],
        )
        return {
            "masked": p.digits.to_bytes(apply_masks(digits, p.digits, session, attempt, request.digest()))
        }

    def _claim(self, request: Message, seed: bytes) -> bool:
        """Return whether a seed is new, or of this very request: a repeated request is the same to the byte."""
        store = self._context.store.round(request.round)
        return set_once(store, f"seeds/{seed.hex()}", request.digest().encode())
