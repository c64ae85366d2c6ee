"""`paillier`: weights by records that nobody sees, by ULDP-FL's Protocol 1, repaired (docs/protocols.md, section 4).

For small models. The server learns Σ_s Σ_u n[s,u]/N[u]·Δ[s,u] plus noise, scaled to integers, and nothing else; a silo
learns nothing of other silos' counts, nor who was sampled. Silo 0 counts one record more for everyone, so that weights
are n/(N+1) and nobody's absence shows. Rounds are attempts with seals, as in `masked`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp.accounting.events import Event, to_discrete
from silodp.accounting.guarantee import TECHNICAL, View
from silodp.aggregators._key_agreement import SessionInfo, key_agreement_kinds, set_up
from silodp.aggregators._private_sampling import (
    OtClient,
    OtServer,
    box_blob,
    choice_blob,
    choice_kinds,
    chosen_kind,
)
from silodp.aggregators._private_weights import (
    PrivateWeighting,
    check_private_weights,
    described_sampling,
    integer_rows,
)
from silodp.aggregators.attempts import ServerAttempts, SiloAttempts, open_kind, update_kind
from silodp.aggregators.base import (
    Handler,
    LocalUpdateFn,
    ServerAggregator,
    ServerContext,
    SiloAggregator,
    SiloContext,
    round_arrays,
    setup_kinds,
)
from silodp.aggregators.masked import ASSUMPTIONS as SECURE_AGGREGATION
from silodp.aggregators.masked import check_survivors
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
from silodp.mechanisms.clipping import ClippedRowStream
from silodp.mechanisms.noise import draw_skellam
from silodp.mechanisms.quantization import Quantizer, noise_variance
from silodp.wire.messages import Message
from silodp.wire.schemas import Blob, Check, Kind, Schema, Script, is_digest

if TYPE_CHECKING:
    from torch import Tensor


ASSUMPTIONS = (
    *SECURE_AGGREGATION,
    TECHNICAL + "nobody but the server factors its Paillier modulus",
    "no silo tells the server the silos' common secret: together they would learn every count",
    "against a malicious server no ε is promised: silos cannot see which weights it encrypts, and a weight of its own "
    "choice reads one person's part",
)
_MOST_UNITS = 1 << 16


@dataclass(frozen=True, repr=False)
class Paillier(PrivateWeighting):
    """Private weighting for small models.

    `count_cap` n_max: at most so many records of one person in one silo count (a public constant). `min_silos` as for
    `masked`. `units`: grid steps to the clip (None: 2^16). `key_bits` below 3072 need `insecure_for_tests`.
    `hidden_sample` P: nobody learns who is sampled, at a rate of k/P (None: the server draws the sample, and knows it);
    silo 0 must answer in every round, and no seed fixes whom it draws.
    """

    count_cap: int = 100
    min_silos: int | None = None
    units: int | None = None
    key_bits: int = SECURE_BITS
    insecure_for_tests: bool = False
    hidden_sample: int | None = None

    name = "paillier"
    protocol_assumptions = ASSUMPTIONS

    def check(self, setting: RunSpec) -> None:
        """Weights by records, enough silos, a grid, and room in a plaintext."""
        check_survivors(setting)
        self.law(setting.method)
        self.parameters(setting)

    def grid(self, setting: RunSpec) -> Quantizer:
        """Of the rows; at least 64√d steps to the clip, so that the shift of the uniform part costs little."""
        bounds = check_private_weights(setting, self.name)
        finest = Quantizer.for_(bounds).units
        grid = Quantizer.for_(bounds, min(finest, _MOST_UNITS) if self.units is None else self.units)
        if grid.units < 64 * math.sqrt(setting.sum_size):
            raise SilodpError(
                f"{grid.units} grid steps to the clip are too few for {setting.sum_size} parameters under "
                f"'paillier': set units ≥ {2 ** math.ceil(math.log2(64 * math.sqrt(setting.sum_size)))}, or "
                f"aggregator = 'lattice'.",
                code="argument.grid",
                field="units",
            )
        return grid

    def parameters(self, setting: RunSpec) -> PaillierParameters:
        """A function of public constants alone."""
        bounds, grid = check_private_weights(setting, self.name), self.grid(setting)
        return PaillierParameters(
            silos=setting.population.silos,
            users=setting.population.users,
            dimension=setting.sum_size,
            count_cap=self.count_cap,
            row_bound=grid.units,
            noise_std=math.sqrt(noise_variance(bounds, grid)),
            key_bits=self.key_bits,
            insecure_for_tests=self.insecure_for_tests,
        )

    def event(self, setting: RunSpec, view: View) -> Event:
        """The method's, with Skellam noise at the scale C_LCM, and the shift of the uniform part charged."""
        p = self.parameters(setting)
        return to_discrete(
            setting.method.dp_event(view), int(p.sensitivity), setting.sum_size, p.sensitivity / p.row_bound
        )

    def describe(self, setting: RunSpec) -> dict[str, Any]:
        """What it costs."""
        p, law = self.parameters(setting), self.law(setting.method)
        sampling = described_sampling(law, p.silos, p.users, 8 * p.entry_words, 1)
        if sampling:  # one of zero and one of the inverse, whatever P
            sampling["encryptions by the server, per round"] = 2 * p.users
        return {
            "silos needed in a sum": setting.population.m,
            "count cap per person and silo": self.count_cap,
            "grid steps to the clip": p.row_bound,
            "key": f"{p.key_bits} bits",
            "parameters in one ciphertext": p.slots,
            "bytes up, per silo and round": p.ciphertexts * p.key_bits // 4,
            "bytes down, per silo and round": p.users * p.key_bits // 4,
            **sampling,
            "exactness": "integers, exact; rounded to a grid step after decryption",
            "security": "128 bits (NIST SP 800-57: 3072-bit moduli)" if p.key_bits >= SECURE_BITS else "none",
        }

    def script(self, setting: RunSpec, name: str) -> Script:
        """Set-up, the silos' meeting, blinded counts; then the round's sample, of silo 0, and attempts."""
        p, law, first = self.parameters(setting), self.law(setting.method), name == setting.names[0]
        session: dict[str, Check] = {"session": is_digest}
        key = {"key": Blob.of(p.key_bits // 8), "proof": Blob.of(proof_bytes(p.key_bits))}
        counts = Schema(blobs={"counts": Blob.of(p.users * p.key_bits // 8)})
        prepare: tuple[Kind, ...] = ()
        if law is not None and first:
            choice = Schema(blobs={"choice": choice_blob(setting, law)})
            sample = Kind("sample", Schema(session), choice)
            prepare = (sample, chosen_kind(setting, law, p.entry_words, p.key_bits // 4))
        sent = {} if law is not None else {"inverses": Blob.of(p.users * p.key_bits // 4)}
        box = {} if law is None else box_blob(setting, name, p.key_bits // 4)
        return Script(
            (
                *setup_kinds(setting, weights_privately=True),
                *key_agreement_kinds(setting.names, name),
                Kind("blinded counts", Schema(session, blobs=key), counts),
                *(choice_kinds() if law is not None and first else ()),
            ),
            update_kind(
                setting,
                round_arrays(setting, shows_sample=False),
                {**sent, **box},
                Schema(blobs={"answer": Blob.of(p.ciphertexts * p.key_bits // 4)}),
            ),
            prepare,
            open_kind(setting),
        )

    def server(self, setting: RunSpec) -> ServerAggregator:
        """Holds the private key."""
        return _Server(self, setting)

    def silo(self, setting: RunSpec, own: SiloContext) -> SiloAggregator:
        """Raises ciphertexts to powers."""
        return _Silo(self, setting, own)


@dataclass(frozen=True)
class _Server:
    aggregator: Paillier
    setting: RunSpec

    def set_up(self, desk: ServerContext) -> None:
        """Sessions, then blinded counts under a fresh key."""

        def prepare(met: SessionInfo) -> None:
            server = PaillierServer(self.aggregator.parameters(self.setting))
            # Bound to the session, so that a proof made for another one is not one here.
            blobs = {"key": server.public_key(), "proof": server.key_proof(bytes.fromhex(met.session))}
            named = {"session": met.session}
            request = Message("blinded counts", self.setting.run, 0, met.number, named, blobs=blobs)
            answers = desk.ask_all({name: request for name in self.setting.names})
            server.receive_counts([answer.blobs["counts"] for answer in answers.values()])
            if self.aggregator.samples_users_privately:
                OtServer(self.setting, desk).set_up(met)
            desk.store.run.put("paillier", server.pack())

        set_up(self.setting.run, self.setting.names, desk.store.run, desk.ask_all, prepare)

    def total(self, desk: ServerContext, round_: int, arrays: Mapping[str, np.ndarray]) -> Tensor | None:
        """Encrypt inverses, collect, open, multiply, decrypt once."""
        import torch

        p, law = self.aggregator.parameters(self.setting), self.aggregator.law(self.setting.method)
        server = PaillierServer.unpack(p, desk.store.run.get("paillier") or b"")
        sampled = arrays.get("sample", np.ones(p.users, dtype=bool))

        def request(attempt: RoundAttempt) -> Mapping[str, bytes]:
            """Fresh ciphertexts for every attempt, kept so that a repeated request is the same."""
            store, name = desk.store.round(attempt.round), f"request/{attempt.attempt}"
            stored = store.get(name)
            if stored is None:
                stored = server.encrypt_inverses(sampled)
                store.put(name, stored)
            return {"inverses": stored}

        attempts = ServerAttempts(self.setting, desk, self.setting.population.m)
        sent = {name: value for name, value in arrays.items() if name != "sample"}
        if law is None:
            result = attempts.collect(round_, sent, request)
        else:
            result = attempts.collect(round_, sent, boxes=self._boxes(desk, round_, server, law))
        if result is None:
            return None
        answers, seals, _ = result
        group = Residues(p.ciphertexts, int.from_bytes(server.public_key(), "big"))
        sealed = group.zero()
        for key in seals.values():
            sealed = group.mask(sealed, key, 1)
        scaled = server.compute_scaled_sum([answer.blobs["answer"] for answer in answers.values()], sealed)
        return torch.from_numpy(server.rounded(scaled) * self.aggregator.grid(self.setting).step)

    def _boxes(
        self, desk: ServerContext, round_: int, server: PaillierServer, law: SamplingRatio
    ) -> dict[str, bytes]:
        """What silo 0 chose among this round's ciphertexts, sealed for each other silo."""
        done = desk.store.round(round_).get("hidden")
        if done is not None:
            return Message.decode(done).blobs
        drawn, offers = self._drawn(desk, round_, server, law), OtServer(self.setting, desk)
        places = drawn.arrays["places"]
        tables = server.tables(law, places, drawn.blobs["pairs"])
        boxes = offers.passed_on(
            round_,
            offers.asked(round_),
            lambda sender, choice: lookup.answer(sender, transfer_counter(round_), choice, tables),
        )
        desk.store.round(round_).put("hidden", Message("kept", self.setting.run, blobs=boxes).encode())
        return boxes

    def _drawn(self, desk: ServerContext, round_: int, server: PaillierServer, law: SamplingRatio) -> Message:
        """i_u and the ciphertexts of a round: kept before they are used, since two tables would show two entries."""
        stored = desk.store.round(round_).get("hidden drawn")
        if stored is None:
            places = private_sampling.draw_server_cells(self.setting.population.users, law)
            kept = Message(
                "kept", self.setting.run, arrays={"places": places}, blobs={"pairs": server.encrypt_pairs()}
            )
            stored = kept.encode()
            desk.store.round(round_).put("hidden drawn", stored)
        return Message.decode(stored)


class _Silo:
    def __init__(self, aggregator: Paillier, setting: RunSpec, own: SiloContext) -> None:
        self._aggregator, self._setting, self._own = aggregator, setting, own
        self._seals = SiloAttempts.of(aggregator, setting, own)
        self._member = self._seals.member
        law = aggregator.law(setting.method)
        self._choices = None if law is None else OtClient(setting, law, self._member, own.store, self._chosen)
        hidden = {} if self._choices is None else {**self._choices.handlers, "sample": self._choices.sample}
        self.handlers: Mapping[str, Handler] = {
            **self._seals.handlers,
            "blinded counts": self._counts,
            **hidden,
        }

    def update(self, request: Message, work: LocalUpdateFn) -> tuple[Message, int]:
        """Powers of the ciphertexts, noise, masks and seal."""
        session, attempt = self._seals.session(request), self._seals.attempt(request)
        update, _, stream = work(attempt.release)
        if not isinstance(update, ClippedRowStream):
            raise SilodpError("private weighting needs the clipped rows of every person.", code="method.rows")
        silo, public = self._party(request.run, session)
        p, grid = silo.parameters, self._aggregator.grid(self._setting)

        def draw() -> dict[str, np.ndarray]:
            noise = draw_skellam(p.dimension, noise_variance(update.bounds, grid), stream)
            return {
                "noise": noise,
                "uniform": np.frombuffer(stream.bytes(p.dimension * _width(p)), np.uint8),
            }

        drawn = self._seals.get_or_draw(request, attempt, draw)
        group = Residues(p.ciphertexts, int(public.n))
        masks: list[int] = apply_masks(group.zero(), group, session, attempt, request.digest())
        refused = [0]
        answer = silo.answer(
            request.blobs["inverses"] if self._choices is None else self._choices.of_round(request),
            integer_rows(update, grid, refused),
            drawn["noise"],
            masks,
            uniform_parts(drawn["uniform"].tobytes(), p),
        )
        return request.reply(answer=answer), refused[0]

    def _chosen(self, request: Message, part: Lookup, answer: bytes) -> bytes:
        p = self._aggregator.parameters(self._setting)
        return unpack_ciphertexts(p, part.entries(answer, p.entry_words))

    def _counts(self, request: Message) -> Message:
        session = self._member.session(request.run, request.fields["session"])
        p, key = self._aggregator.parameters(self._setting), request.blobs["key"]
        verify_modulus(PublicKey.from_bytes(key, p.key_bits), request.blobs["proof"], session.transcript)
        self._own.store.run.put("paillier key", key)
        silo, public = self._party(request.run, session)
        group = Residues(silo.parameters.users, int(public.n))
        attempt = RoundAttempt(0, 0, 0, session.roster, "counts")
        masks: list[int] = apply_pair_masks(group.zero(), group, session, attempt)
        return request.reply(counts=silo.blind_counts(masks))

    def _party(self, run: str, session: Session) -> tuple[PaillierSilo, PublicKey]:
        key = self._own.store.run.get("paillier key") or b""
        p = self._aggregator.parameters(self._setting)
        silo = PaillierSilo(
            p,
            session.roster.index(session.name),
            np.minimum(self._own.counts, self._aggregator.count_cap),
            key,
            self._member.group_secret(run),
            session.transcript,
        )
        return silo, PublicKey.from_bytes(key, p.key_bits)


def _width(p: PaillierParameters) -> int:
    return (p.scale.bit_length() + 128 + 7) // 8


def uniform_parts(drawn: bytes, p: PaillierParameters) -> list[int]:
    """d integers, centered uniform of width C_LCM, from that many times 128 bits more than they need."""
    width = _width(p)
    numbers = (int.from_bytes(drawn[i : i + width], "little") for i in range(0, len(drawn), width))
    return [number % p.scale - p.scale // 2 for number in numbers]
