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

from silodp.accounting.assumptions import TECHNICAL
from silodp.aggregators._key_agreement import SessionInfo
from silodp.aggregators._private_sampling import (
    OtClient,
    OtServer,
    choice_blob,
    choice_kinds,
    chosen_kind,
    sealed_sample_type,
)
from silodp.aggregators._private_weights import PrivateWeighting, PrivateWeightingSilo, Rows
from silodp.aggregators.attempts import MASKING_ASSUMPTIONS, MaskedServer, OpenedAttempt, RoundRequest
from silodp.aggregators.base import ServerAggregator, ServerContext, SiloAggregator, SiloContext
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto import lookup, private_sampling
from silodp.crypto.keys import Session
from silodp.crypto.lookup import Lookup
from silodp.crypto.paillier.parameters import PaillierParameters
from silodp.crypto.paillier.scheme import SECURE_BITS, PublicKey, Residues, proof_bytes, verify_modulus
from silodp.crypto.paillier.weighting import PaillierServer, PaillierSilo, unpack_ciphertexts
from silodp.crypto.private_sampling import SamplingRatio, transfer_counter
from silodp.crypto.secure_aggregation import RoundAttempt, apply_masks, apply_pair_masks
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Bounds
from silodp.mechanisms.noise import draw_skellam
from silodp.mechanisms.quantization import Quantizer, compute_noise_variance
from silodp.wire.messages import Message
from silodp.wire.schemas import Blob, Check, MessageSchedule, MessageSchema, MessageType, is_digest
from silodp.wire.store import get_or_make

ASSUMPTIONS = (
    *MASKING_ASSUMPTIONS,
    TECHNICAL + "nobody but the server factors its Paillier modulus",
    "no silo tells the server the silos' common secret: together they would learn every count",
    "against a malicious server no ε is promised: silos cannot see which weights it encrypts, and a weight of its own "
    "choice reads one person's part; a malicious silo can read from the next model how many records persons have, and "
    "who was sampled in any round of its session",
)
_MOST_UNITS = 1 << 16


@dataclass(frozen=True, repr=False)
class Paillier(PrivateWeighting):
    """Private weighting for small models.

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
    key_bits: int = SECURE_BITS
    insecure_for_tests: bool = False
    hidden_sample: int | None = None

    name = "paillier"
    protocol_assumptions = ASSUMPTIONS

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of the protocol, and that nobody breaks a short key where there is one."""
        if self.key_bits >= SECURE_BITS:
            return super().assumptions
        return (
            *super().assumptions,
            f"FOR TESTS: a modulus of {self.key_bits} bits can be factored; a silo that does it knows how many records "
            "persons have and who was sampled",
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
        finest = Quantizer.from_bounds(bounds).units
        grid = Quantizer.from_bounds(bounds, min(finest, _MOST_UNITS) if self.units is None else self.units)
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
        sampling = self.describe_sampling(spec, entry=8 * p.entry_words, lookups=1)
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
            "security": "128 bits (NIST SP 800-57: 3072-bit moduli)" if p.key_bits >= SECURE_BITS else "none",
        }

    def script(self, spec: RunSpec, name: str) -> MessageSchedule:
        """Return set-up, key agreement, blinded counts; then, of silo 0, a round's sample, and attempts."""
        p, ratio, first = self.parameters(spec), self.sampling_ratio(spec.method), name == spec.names[0]
        session: dict[str, Check] = {"session": is_digest}
        key = {"key": Blob.of(p.key_bits // 8), "proof": Blob.of(proof_bytes(p.key_bits))}
        counts = MessageSchema(blobs={"counts": Blob.of(p.users * p.key_bits // 8)})
        prepare: tuple[MessageType, ...] = ()
        if ratio is not None and first:
            choice = MessageSchema(blobs={"choice": choice_blob(spec, ratio)})
            sample = MessageType("sample", MessageSchema(session), choice)
            prepare = (sample, chosen_kind(spec, ratio, p.entry_words, p.key_bits // 4))
        sent = {} if ratio is not None else {"inverses": Blob.of(p.users * p.key_bits // 4)}
        box = {} if ratio is None else sealed_sample_type(spec, name, p.key_bits // 4)
        blinded = MessageType("blinded counts", MessageSchema(session, blobs=key), counts)
        return self.attempt_script(
            spec,
            name,
            MessageSchema(blobs={"answer": Blob.of(p.ciphertexts * p.key_bits // 4)}),
            setup=(blinded, *(choice_kinds() if ratio is not None and first else ())),
            prepare=prepare,
            blobs={**sent, **box},
        )

    def server(self, spec: RunSpec) -> ServerAggregator:
        """Return the side that holds the private key."""
        return _PaillierServer(spec, self)

    def silo(self, spec: RunSpec, context: SiloContext) -> SiloAggregator:
        """Return the side that raises ciphertexts to powers."""
        return _Silo(self, spec, context)


@dataclass(frozen=True)
class _PaillierServer(MaskedServer):
    aggregator: Paillier

    def prepare(self, context: ServerContext, session: SessionInfo) -> None:
        """Collect blinded counts under a fresh key."""
        server = PaillierServer(self.aggregator.parameters(self.spec))
        # The proof is bound to the session, so that one made for another session is refused.
        blobs = {"key": server.public_key(), "proof": server.key_proof(bytes.fromhex(session.session))}
        named = {"session": session.session}
        request = Message("blinded counts", self.spec.run, 0, session.number, named, blobs=blobs)
        answers = context.ask_all({name: request for name in self.spec.names})
        server.receive_counts([answer.blobs["counts"] for answer in answers.values()])
        if self.aggregator.sampled_by == "nobody":
            OtServer(self.spec, context).set_up(session)
        context.store.run.put("paillier", server.pack())

    def request(self, context: ServerContext, round_: int, arrays: Mapping[str, np.ndarray]) -> RoundRequest:
        """Return encryptions of the sampled users' blinded inverses 1/N[u]."""
        p, ratio = self.aggregator.parameters(self.spec), self.aggregator.sampling_ratio(self.spec.method)
        server = self._party(context)
        sampled = arrays.get("sample", np.ones(p.users, dtype=bool))
        sent = {name: array for name, array in arrays.items() if name != "sample"}
        if ratio is not None:
            return RoundRequest(
                sent, sealed_samples=self._get_or_make_samples(context, round_, server, ratio)
            )

        def encrypt(attempt: RoundAttempt) -> Mapping[str, bytes]:
            # Fresh ciphertexts for every attempt; stored, so that a repeated request is the same.
            store, name = context.store.round(attempt.round), f"request/{attempt.attempt}"
            return {"inverses": get_or_make(store, name, lambda: server.encrypt_inverses(sampled))}

        return RoundRequest(sent, encrypt)

    def combine(self, context: ServerContext, result: OpenedAttempt) -> np.ndarray:
        """Multiply the masked ciphertexts, and decrypt once."""
        server = self._party(context)
        group = Residues(server.parameters.ciphertexts, int.from_bytes(server.public_key(), "big"))
        sealed = group.zero()
        for key in result.seals.values():
            sealed = group.mask(sealed, key, 1)
        scaled = server.compute_scaled_sum(
            [answer.blobs["answer"] for answer in result.answers.values()], sealed
        )
        total: np.ndarray = server.round_sum(scaled) * self.aggregator.grid(self.spec).step
        return total

    def _party(self, context: ServerContext) -> PaillierServer:
        return PaillierServer.unpack(
            self.aggregator.parameters(self.spec), context.store.run.get("paillier") or b""
        )

    def _get_or_make_samples(
        self, context: ServerContext, round_: int, server: PaillierServer, ratio: SamplingRatio
    ) -> dict[str, bytes]:
        """Return what silo 0 chose among this round's ciphertexts, sealed for each other silo."""
        run, store = self.spec.run, context.store.round(round_)

        def draw() -> bytes:
            places = private_sampling.draw_server_cells(self.spec.population.users, ratio)
            blobs = {"pairs": server.encrypt_pairs()}
            return Message("kept", run, arrays={"places": places}, blobs=blobs).encode()

        def choose() -> bytes:
            # If a restart drew i_u and the ciphertexts again, silo 0 could open entries of two tables of a user.
            drawn, offers = (
                Message.decode(get_or_make(store, "hidden drawn", draw)),
                OtServer(self.spec, context),
            )
            tables = server.tables(ratio, drawn.arrays["places"], drawn.blobs["pairs"])
            sealed_samples = offers.relay_entries(
                round_,
                offers.request_sample(round_),
                lambda sender, choice: lookup.answer(sender, transfer_counter(round_), choice, tables),
            )
            return Message("kept", run, blobs=sealed_samples).encode()

        return Message.decode(get_or_make(store, "hidden", choose)).blobs


class _Silo(PrivateWeightingSilo):
    def __init__(self, aggregator: Paillier, spec: RunSpec, context: SiloContext) -> None:
        super().__init__(spec, context)
        self._aggregator = aggregator
        ratio = aggregator.sampling_ratio(spec.method)
        self._choices = (
            None if ratio is None else OtClient(spec, ratio, self._member, context.store, self._open_chosen)
        )
        hidden = {} if self._choices is None else {**self._choices.handlers, "sample": self._choices.sample}
        self.handlers = {**self.handlers, "blinded counts": self._counts, **hidden}

    def grid(self, bounds: Bounds) -> Quantizer:
        return self._aggregator.grid(self._spec)

    def draw_noise(self, bounds: Bounds, stream: np.random.Generator) -> dict[str, np.ndarray]:
        p = self._aggregator.parameters(self._spec)
        noise = draw_skellam(p.dimension, compute_noise_variance(bounds, self.grid(bounds)), stream)
        return {"noise": noise, "uniform": np.frombuffer(stream.bytes(p.dimension * _width(p)), np.uint8)}

    def multiply(
        self,
        request: Message,
        session: Session,
        attempt: RoundAttempt,
        rows: Rows,
        noise: dict[str, np.ndarray],
    ) -> dict[str, bytes]:
        silo, public = self._party(request.run, session)
        group = Residues(silo.parameters.ciphertexts, int(public.n))
        masks: list[int] = apply_masks(group.zero(), group, session, attempt, request.digest())
        sent = request.blobs["inverses"] if self._choices is None else self._choices.round_entries(request)
        uniform = uniform_parts(noise["uniform"].tobytes(), silo.parameters)
        return {"answer": silo.answer(sent, rows, noise["noise"], masks, uniform)}

    def _open_chosen(self, request: Message, part: Lookup, answer: bytes) -> bytes:
        p = self._aggregator.parameters(self._spec)
        return unpack_ciphertexts(p, part.entries(answer, p.entry_words))

    def _counts(self, request: Message) -> Message:
        session = self._member.session(request.run, request.fields["session"])
        p, key = self._aggregator.parameters(self._spec), request.blobs["key"]
        verify_modulus(PublicKey.from_bytes(key, p.key_bits), request.blobs["proof"], session.transcript)
        self._context.store.run.put("paillier key", key)
        silo, public = self._party(request.run, session)
        group = Residues(silo.parameters.users, int(public.n))
        attempt = RoundAttempt(0, 0, 0, session.roster, "counts")
        masks: list[int] = apply_pair_masks(group.zero(), group, session, attempt)
        return request.reply(counts=silo.blind_counts(masks))

    def _party(self, run: str, session: Session) -> tuple[PaillierSilo, PublicKey]:
        key = self._context.store.run.get("paillier key") or b""
        p = self._aggregator.parameters(self._spec)
        silo = PaillierSilo(
            p,
            session.roster.index(session.name),
            np.minimum(self._context.counts, self._aggregator.count_cap),
            key,
            self._member.group_secret(run),
            session.transcript,
        )
        return silo, PublicKey.from_bytes(key, p.key_bits)


def _width(p: PaillierParameters) -> int:
    return (p.scale.bit_length() + 128 + 7) // 8


def uniform_parts(drawn: bytes, p: PaillierParameters) -> list[int]:
    """Return d integers from the centered uniform distribution of width C_LCM.

    Args:
        drawn: random bytes; each integer uses 128 bits more than it needs, so the bias of reducing is
            negligible.
        p: parameters.
    """
    width = _width(p)
    numbers = (int.from_bytes(drawn[i : i + width], "little") for i in range(0, len(drawn), width))
    return [number % p.scale - p.scale // 2 for number in numbers]
