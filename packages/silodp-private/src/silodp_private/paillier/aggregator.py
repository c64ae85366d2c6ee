"""`paillier`: secure aggregation weighted by private record counts, with Paillier encryption; for small models.

The server learns Σ_s Σ_u n[s,u]/(N[u]+1)·Δ[s,u] plus noise, scaled to integers, and nothing else. A silo learns
neither other silos' counts nor who was sampled. Silo 0 adds one record to the count of every person (the
weights are therefore n/(N+1)), so that nobody can see that a person has no records. A round consists of
attempts with seals, as in `masked`.

Source: Protocol 1 of Kato et al., "ULDP-FL: Federated Learning with Across-Silo User-Level Differential Privacy" (PVLDB
2024), with the repairs of docs/protocols.md, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from silodp.aggregators import base
from silodp.aggregators._key_agreement import SessionInfo
from silodp.aggregators.attempts import MASKING_ASSUMPTIONS, OpenedAttempt, RoundRequest
from silodp.aggregators.run_spec import RunSpec
from silodp.assumption import SERVER_CHOOSERS, SETTING_CHOOSERS, SILO_OPERATORS, Assumption
from silodp.crypto import sampling
from silodp.crypto.keys import Session
from silodp.crypto.sampling import SamplingRatio, transfer_counter
from silodp.crypto.secure_aggregation import RoundAttempt, apply_masks, apply_pair_masks
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Bounds
from silodp.mechanisms.noise import draw_skellam
from silodp.mechanisms.quantization import Quantizer, compute_noise_variance
from silodp.wire.messages import Message
from silodp.wire.schemas import Blob, MessageType, session_type
from silodp.wire.store import get_or_make
from silodp_private import _private_weights
from silodp_private._private_sampling import OtServer
from silodp_private._private_weights import Noise, Rows
from silodp_private.crypto import lookup
from silodp_private.crypto.lookup import Lookup
from silodp_private.paillier import scheme
from silodp_private.paillier.parameters import PaillierParameters
from silodp_private.paillier.weighting import PaillierServer, PaillierSilo

ASSUMPTIONS = (
    *MASKING_ASSUMPTIONS,
    Assumption("paillier-modulus", "nobody but the server factors its Paillier modulus", technical=True),
    Assumption(
        "common-secret",
        "no silo tells the server the silos' common secret: together they would learn every count",
        SILO_OPERATORS,
    ),
    Assumption(
        "server-not-malicious",
        "the server is not malicious: silos cannot see which weights it encrypts, and a weight of its own choice reads "
        "one person's part; a malicious silo can read from the next model how many records persons have, and who was "
        "sampled in any round of its session",
        SERVER_CHOOSERS,
    ),
)
# Every further bit of the grid lengthens all exponents of a silo.
_MAX_UNITS = 1 << 16


@dataclass(frozen=True, repr=False)
class Paillier(_private_weights.EncryptedWeighting):
    """Private weighting for small models.

    Source: Kato et al. (PVLDB 2024), Protocol 1, with the repairs of docs/protocols.md, section 4; Paillier (EUROCRYPT
    1999).

    Args:
        count_cap: n_max, the largest number of records of one user in one silo that is used; a public constant.
        min_silos: m, the smallest number of silos whose answers are added up (None: all must answer).
        units: grid steps to the clip, a power of two (None: 2^16, or the finest grid with exact noise if
            coarser).
        key_bits: length of the Paillier modulus.
        insecure_for_tests: allow `key_bits` below 3072.
        hidden_sample: P; nobody learns who is sampled, at a rate of k/P (None: the server draws the sample, and knows
            it). Silo 0 must answer in every round, and no seed fixes the sample.
    """

    count_cap: int = 100
    min_silos: int | None = None
    units: int | None = None
    key_bits: int = scheme.SECURE_BITS
    insecure_for_tests: bool = False
    hidden_sample: int | None = None

    name = "paillier"
    protocol_assumptions = ASSUMPTIONS

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions of the protocol, and that nobody breaks a short key where there is one."""
        if self.key_bits >= scheme.SECURE_BITS:
            return super().assumptions
        return (
            *super().assumptions,
            Assumption(
                "key-for-tests",
                f"FOR TESTS: a modulus of {self.key_bits} bits can be factored; a silo that does it knows how many "
                "records persons have and who was sampled",
                SETTING_CHOOSERS,
            ),
        )

    def check(self, spec: RunSpec) -> None:
        """Refuse too few silos, weights that are no shares of counts, a coarse grid, and sums beyond a plaintext."""
        self.check_min_silos(spec)
        self.sampling_ratio(spec.method)
        self.parameters(spec)

    def grid(self, spec: RunSpec) -> Quantizer:
        """Return the grid of the rows.

        Raises:
            SilodpError: it has fewer than 64√d steps to the clip, with which the shift of the uniform part would add
                more than 1/64 to the sensitivity.
        """
        bounds = self.bounds_of(spec)
        grid = Quantizer.from_bounds(bounds, self.units, _MAX_UNITS)
        if grid.units < 64 * math.sqrt(spec.sum_size):
            raise SilodpError(
                f"{grid.units} grid steps to the clip are too few for {spec.sum_size} parameters under "
                f"'paillier': set units ≥ {2 ** math.ceil(math.log2(64 * math.sqrt(spec.sum_size)))}, or "
                f"aggregator = 'lattice'.",
                code="argument.grid",
                field="units",
            )
        return grid

    def parameters(self, spec: RunSpec) -> PaillierParameters:
        """Return the encryption's parameters, a function of public constants alone.

        Raises:
            SilodpError: the sum does not fit in a plaintext.
        """
        bounds, grid = self.bounds_of(spec), self.grid(spec)
        return PaillierParameters(
            silos=spec.population.silos,
            users=spec.population.users,
            dimension=spec.sum_size,
            count_cap=self.count_cap,
            row_bound=grid.units,
            noise_std=math.sqrt(compute_noise_variance(bounds, grid)),
            key_bits=self.key_bits,
            insecure_for_tests=self.insecure_for_tests,
        )

    def describe(self, spec: RunSpec) -> dict[str, Any]:
        """Return sizes and limits."""
        p = self.parameters(spec)
        sampling = self.describe_sampling(spec, lookups=1)
        if sampling:  # one of zero and one of the inverse, whatever P
            sampling["encryptions by the server, per round"] = 2 * p.users
        return {
            **self.describe_grid(spec, p.row_bound),
            "key": f"{p.key_bits} bits",
            "parameters in one ciphertext": p.slots,
            "bytes up, per silo and round": p.ciphertexts * p.key_bits // 4,
            "bytes down, per silo and round": p.users * p.key_bits // 4,
            **sampling,
            "exactness": "integers, exact; rounded to a grid step after decryption",
            "security": "none"
            if p.key_bits < scheme.SECURE_BITS
            else "128 bits (NIST SP 800-57: 3072-bit moduli)",
        }

    def entry_bytes(self, spec: RunSpec) -> int:
        """Return the size of a ciphertext."""
        return self.key_bits // 4

    def setup_types(self, spec: RunSpec, is_first: bool) -> tuple[MessageType, ...]:
        """Return the request for blinded counts, which carries the public key and its proof."""
        key = {"key": Blob.of(self.key_bits // 8), "proof": Blob.of(scheme.proof_bytes(self.key_bits))}
        counts = {"counts": Blob.of(spec.population.users * self.key_bits // 8)}
        return (session_type("blinded counts", key, counts),)

    def sample_types(self, spec: RunSpec, choice: Mapping[str, Blob]) -> tuple[MessageType, ...]:
        """Return the request for silo 0's choice; () where the server draws the sample, and encrypts by it."""
        return (session_type("sample", answer=choice),) if choice else ()

    def update_types(self, spec: RunSpec) -> tuple[dict[str, Blob], dict[str, Blob]]:
        """Return the ciphertexts of the inverses, unless silo 0 passes them on, and those of the answer."""
        p = self.parameters(spec)
        hidden = self.sampled_by == "nobody"
        sent = {} if hidden else {"inverses": Blob.of(p.users * p.key_bits // 4)}
        return sent, {"answer": Blob.of(p.ciphertexts * p.key_bits // 4)}

    def server(self, spec: RunSpec) -> base.ServerAggregator:
        """Return the side that holds the private key."""
        return _PaillierServer(spec, self)

    def silo(self, spec: RunSpec, context: base.SiloContext) -> base.SiloAggregator:
        """Return the side that raises ciphertexts to powers."""
        return _Silo(self, spec, context)


@dataclass(frozen=True)
class _PaillierServer(_private_weights.PrivateWeightingServer):
    aggregator: Paillier

    def exchange_counts(self, context: base.ServerContext, session: SessionInfo) -> None:
        """Collect blinded counts under a fresh key."""
        # A fresh key for every session: counts are blinded by session and key, so two exchanges show no ratios of
        # counts.
        server = PaillierServer(self.aggregator.parameters(self.spec))
        # The proof is bound to the session, so that one made for another session is refused.
        blobs = {"key": server.public_key(), "proof": server.key_proof(bytes.fromhex(session.session))}
        named = {"session": session.session}
        request = Message("blinded counts", self.spec.run, 0, session.number, named, blobs=blobs)
        answers = context.ask_all(dict.fromkeys(self.spec.names, request))
        server.receive_counts([answer.blobs["counts"] for answer in answers.values()])
        # After all counts are in: what is stored is the key with the inverses, never the counts.
        context.store.run.put("paillier", server.pack())

    def request(
        self, context: base.ServerContext, round_: int, arrays: Mapping[str, np.ndarray]
    ) -> RoundRequest:
        """Return encryptions of the sampled users' blinded inverses 1/N[u]."""
        p, ratio = self.aggregator.parameters(self.spec), self.aggregator.sampling_ratio(self.spec.method)
        server = self._party(context)
        sampled = arrays.get("sample", np.ones(p.users, dtype=bool))
        sent = {name: array for name, array in arrays.items() if name != "sample"}
        if ratio is not None:
            return RoundRequest.with_samples(sent, self._get_or_make_samples(context, round_, server, ratio))

        def encrypt(attempt: RoundAttempt) -> Mapping[str, bytes]:
            # Fresh ciphertexts for every attempt; stored, so that a repeated request is the same.
            store, name = context.store.round(attempt.round), f"request/{attempt.attempt}"
            return {"inverses": get_or_make(store, name, lambda: server.encrypt_inverses(sampled))}

        return RoundRequest(sent, encrypt)

    def combine(self, context: base.ServerContext, result: OpenedAttempt) -> np.ndarray:
        """Multiply the masked ciphertexts, and decrypt once."""
        server = self._party(context)
        group = scheme.Residues(server.parameters.ciphertexts, int.from_bytes(server.public_key(), "big"))
        sealed = group.zero()
        for key in result.seals.values():
            sealed = group.mask(sealed, key, 1)
        answers = [answer.blobs["answer"] for answer in result.answers.values()]
        scaled = server.compute_scaled_sum(answers, sealed)
        total: np.ndarray = server.round_sum(scaled) * self.aggregator.grid(self.spec).step
        return total

    def _party(self, context: base.ServerContext) -> PaillierServer:
        return PaillierServer.unpack(
            self.aggregator.parameters(self.spec), context.store.run.get("paillier") or b""
        )

    def _get_or_make_samples(
        self, context: base.ServerContext, round_: int, server: PaillierServer, ratio: SamplingRatio
    ) -> dict[str, bytes]:
        """Return what silo 0 chose among this round's ciphertexts, sealed for each other silo."""
        run, store = self.spec.run, context.store.round(round_)

        def draw() -> bytes:
            places = sampling.draw_server_cells(self.spec.population.users, ratio)
            blobs = {"pairs": server.encrypt_pairs()}
            return Message("kept", run, arrays={"places": places}, blobs=blobs).encode()

        def choose() -> bytes:
            # If a restart drew i_u and the ciphertexts again, silo 0 could open entries of two tables of a user.
            drawn = Message.decode(get_or_make(store, "hidden drawn", draw))
            offers = OtServer(self.spec, context)
            tables = server.tables(ratio, drawn.arrays["places"], drawn.blobs["pairs"])
            sealed_samples = offers.relay_entries(
                round_,
                offers.request_sample(round_),
                lambda sender, choice: lookup.answer(sender, transfer_counter(round_), choice, tables),
            )
            return Message("kept", run, blobs=sealed_samples).encode()

        return Message.decode(get_or_make(store, "hidden", choose)).blobs


class _Silo(_private_weights.MultiplyingSilo):
    def __init__(self, aggregator: Paillier, spec: RunSpec, context: base.SiloContext) -> None:
        super().__init__(aggregator, spec, context)
        self._parameters = aggregator.parameters(spec)
        sample = {} if self._choices is None else {"sample": self._choices.sample}
        self.handlers = {**self.handlers, "blinded counts": self._counts, **sample}

    def draw_noise(self, bounds: Bounds, stream: np.random.Generator) -> Noise:
        p, grid = self._parameters, self._aggregator.grid(self._spec)
        noise = draw_skellam(p.dimension, compute_noise_variance(bounds, grid), stream)
        uniform = np.frombuffer(stream.bytes(p.dimension * scheme.wide_bytes(p.scale)), np.uint8)
        return {"noise": noise, "uniform": uniform}

    def multiply(
        self, request: Message, session: Session, attempt: RoundAttempt, rows: Rows, noise: Noise
    ) -> dict[str, bytes]:
        silo = self._party(request.run, session)
        group = scheme.Residues(silo.parameters.ciphertexts, int(silo.public.n))
        masks: list[int] = apply_masks(group.zero(), group, session, attempt, request.digest())
        sent = request.blobs["inverses"] if self._choices is None else self._choices.round_entries(request)
        scale = silo.parameters.scale
        # Centered uniform numbers of width C_LCM, which hide the sum modulo C_LCM.
        uniform = [x - scale // 2 for x in scheme.reduce_bytes(noise["uniform"].tobytes(), scale, "little")]
        return {"answer": silo.answer(sent, rows, noise["noise"], masks, uniform)}

    def open_chosen(self, request: Message, part: Lookup, answer: bytes) -> bytes:
        return part.entries(answer, self._parameters.key_bits // 4).tobytes()

    def _counts(self, request: Message) -> Message:
        session = self._member.session_of(request)
        key = request.blobs["key"]
        public = scheme.PublicKey.from_bytes(key, self._parameters.key_bits)
        scheme.verify_modulus(public, request.blobs["proof"], session.transcript)
        # Only a key that was proven is stored; every later request uses this one and no other.
        self._context.store.run.put("paillier key", key)
        silo = self._party(request.run, session)
        group = scheme.Residues(silo.parameters.users, int(silo.public.n))
        attempt = RoundAttempt(0, 0, 0, session.roster, "counts")
        masks: list[int] = apply_pair_masks(group.zero(), group, session, attempt)
        return request.reply(counts=silo.blind_counts(masks))

    def _party(self, run: str, session: Session) -> PaillierSilo:
        return PaillierSilo(
            self._parameters,
            session.roster.index(session.name),
            np.minimum(self._context.counts, self._parameters.count_cap),
            self._context.store.run.get("paillier key") or b"",
            self._member.group_secret(run),
            session.transcript,
        )
