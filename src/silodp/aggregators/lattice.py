"""`lattice`: weights by records that nobody sees, by ring-LWE and oblivious transfer (docs/protocols.md, section 3).

The server learns Σ_s Σ_u ⌊2^k/N[u]⌋·n[s,u]·Δ[s,u] plus noise, as integers, and nothing else; a silo learns nothing of
other silos' counts, nor who was sampled. Rounds are attempts with seals, as in `masked`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp.accounting.accountant import compute_epsilon, default_accountant
from silodp.accounting.events import Event, NonPrivate, costliest_event, to_discrete, without_amplification
from silodp.accounting.guarantee import TECHNICAL, View
from silodp.aggregators._key_agreement import current, key_agreement_kinds, set_up
from silodp.aggregators._private_sampling import box_blob
from silodp.aggregators._private_weights import (
    PrivateWeighting,
    check_private_weights,
    described_sampling,
    integer_rows,
)
from silodp.aggregators._weight_shares import (
    Constants,
    ServerShares,
    SiloWeights,
    sampling_kinds,
    weight_kinds,
)
from silodp.aggregators.attempts import ServerAttempts, SiloAttempts, open_kind, update_kind
from silodp.aggregators.base import (
    Handler,
    LocalUpdateFn,
    ServerAggregator,
    ServerContext,
    SiloAggregator,
    SiloContext,
    Visibility,
    round_arrays,
    setup_kinds,
)
from silodp.aggregators.masked import ASSUMPTIONS as SECURE_AGGREGATION
from silodp.aggregators.masked import check_survivors
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.lattice._parameter_search import search_parameters
from silodp.crypto.lattice.noise import scale_noise
from silodp.crypto.lattice.parameters import LatticeParameters
from silodp.crypto.lattice.scheme import LatticeServer, LatticeSilo
from silodp.crypto.secure_aggregation import RoundAttempt, apply_masks, open_sum
from silodp.crypto.streams import KEY_BYTES
from silodp.errors import SilodpError, check_whole
from silodp.mechanisms.clipping import Bounds, ClippedRowStream
from silodp.mechanisms.noise import MOST_SKELLAM_VARIANCE, draw_skellam
from silodp.mechanisms.quantization import Quantizer
from silodp.wire.messages import Message
from silodp.wire.schemas import Blob, Schema, Script
from silodp.wire.store import claim

if TYPE_CHECKING:
    from torch import Tensor


ASSUMPTIONS = (
    *SECURE_AGGREGATION,
    TECHNICAL
    + "ring-LWE is hard at the parameters shown, and oblivious transfer over ristretto255 hides choices",
    "silo 0 offers the tables it should, and no silo tells the server the silos' common secret: together they would "
    "learn all counts",
    "against a malicious server no ε is promised: silos cannot see which weights it encrypts, and a weight of its own "
    "choice reads one person's part; a malicious silo can read the server's shares of the attempt it answers",
    "how long a silo takes may tell how many persons have records in it",
)
_FEWEST_UNITS = 1 << 12
_NOISE_STEPS = 1 << 17  # of integer noise to the clip (docs/protocols.md, section 3)


@dataclass(frozen=True, repr=False)
class Lattice(PrivateWeighting):
    """Private weighting for models of any size.

    `count_cap` n_max: at most so many records of one person in one silo count (a public constant). `attempts`: most
    rounds of the run, repeated ones included. `min_silos` as for `masked`. `weight_bits` k: weights are multiples of
    2^-k. `units`: grid steps to the clip, a power of two (None: the finest for which there is an encryption).
    `hidden_sample` P: nobody learns who is sampled, at a rate of k/P (None: the server draws the sample, and knows it);
    silo 0 must answer in every round, and no seed fixes whom it draws.
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
        Visibility(
            "Silo 0 (the first)",
            "the same; it also prepares the encrypted tables that weights are looked up in",
            "the same: it does not learn which entries were looked up",
        ),
    )
    delta_share = 0.99

    @property
    def max_rounds(self) -> int:
        """Every round is an attempt."""
        return self.attempts

    def check(self, setting: RunSpec) -> None:
        """Weights by records, enough silos, and an encryption that meets every rule."""
        bounds = check_private_weights(setting, self.name)
        check_survivors(setting)
        self.law(setting.method)
        check_whole("weight_bits", self.weight_bits, most=512)
        if self.units is not None and (self.units < 1 or self.units & (self.units - 1)):
            raise SilodpError(
                f"units = {self.units}: set a power of two, of grid steps to the clip.",
                code="argument.value",
                field="units",
            )
        most = math.sqrt(MOST_SKELLAM_VARIANCE) / _NOISE_STEPS
        if bounds.noise_multiplier > most:
            raise SilodpError(
                f"a silo's share of the noise is {bounds.noise_multiplier:.3g} clips, and 'lattice' can draw {most:.3g}"
                ": lower noise_multiplier, raise min_silos, or sample persons.",
                code="argument.grid",
                field="noise_multiplier",
            )
        self.parameters(setting)

    def parameters(self, setting: RunSpec) -> LatticeParameters:
        """The encryption that this run uses: a function of public constants alone."""
        return _parameters(self, setting)

    def event(self, setting: RunSpec, view: View) -> Event:
        """The method's, with Skellam noise at the scale of 2^r, and the shift of the uniform part charged."""
        p = self.parameters(setting)
        reach = p.sensitivity / math.ldexp(p.clip_units, p.weight_bits - p.noise_shift)
        return to_discrete(setting.method.dp_event(view), int(p.sensitivity), setting.sum_size, reach)

    def describe(self, setting: RunSpec) -> dict[str, Any]:
        """What it costs, and every rule it meets."""
        p = self.parameters(setting)
        return {
            "silos needed in a sum": setting.population.m,
            "count cap per person and silo": self.count_cap,
            "grid steps to the clip": p.clip_units,
            "weights are multiples of": f"2^-{p.weight_bits}",
            "ring": f"N = {p.ring_size}, Q = 2^{p.modulus_bits} in limbs of {p.limb_bits} bits, T = {p.plaintext_bits}",
            "bytes up, per silo and round": round(p.bytes_up * setting.sum_size),
            "bytes down, per silo and round": p.bytes_down,
            **described_sampling(
                self.law(setting.method), setting.population.silos, setting.population.users, 8, 2
            ),
            "exactness": "integers, every block verified",
            "most attempts": self.attempts,
            "δ kept for what ciphertexts disclose": (1 - self.delta_share) * setting.delta,
            "rules": {rule.name: f"{rule.value:.2f} ≤ {rule.limit:.2f}" for rule in p.rules()},
        }

    def constants(self, setting: RunSpec) -> Constants:
        """Of the shares of weights."""
        bits = self.parameters(setting).plaintext_bits
        return Constants(self.count_cap, self.weight_bits, bits, self.hidden_sample)

    def script(self, setting: RunSpec, name: str) -> Script:
        """Set-up, the silos' meeting, shares of weights; then the round's sample, of silo 0, and attempts."""
        p, constants, law = self.parameters(setting), self.constants(setting), self.law(setting.method)
        sent = {part: Blob.of(size) for part, size in p.request_bytes.items()}
        box = {} if law is None else box_blob(setting, name, 8)
        return Script(
            (
                *setup_kinds(setting, weights_privately=True),
                *key_agreement_kinds(setting.names, name),
                *weight_kinds(setting, constants, name),
            ),
            update_kind(
                setting,
                round_arrays(setting, shows_sample=False),
                {**sent, **box},
                Schema(blobs={"masked": Blob.of(p.digits.size)}),
            ),
            sampling_kinds(setting, constants, name),
            open_kind(setting),
        )

    def server(self, setting: RunSpec) -> ServerAggregator:
        """Holds shares and the secret key."""
        return _Server(self, setting)

    def silo(self, setting: RunSpec, own: SiloContext) -> SiloAggregator:
        """Multiplies encrypted shares."""
        return _Silo(self, setting, own)


@lru_cache(maxsize=32)
def _parameters(aggregator: Lattice, setting: RunSpec) -> LatticeParameters:
    bounds = check_private_weights(setting, aggregator.name)
    silos = setting.population.silos
    # Ciphertexts are seen by the server, so its ε counts: knowing samples, and however many silos answer.
    views = (
        aggregator.views(setting.method, silos, n)["server"] for n in range(setting.population.m, silos + 1)
    )
    event, spent = costliest_event([setting.method.dp_event(view) for view in views]), 0.0
    if not isinstance(event, NonPrivate):
        reach = 1 + math.sqrt(setting.sum_size) / _NOISE_STEPS
        release = to_discrete(event, _FEWEST_UNITS, setting.sum_size, reach)
        delta = setting.delta * aggregator.delta_share
        # Every further release of a round has lost a silo, and is charged as of a sample that is known.
        most_in_a_round = 1 + silos - setting.population.m
        rounds = math.ceil(aggregator.attempts / most_in_a_round)
        further = aggregator.attempts - rounds
        charges = [(release, rounds), (without_amplification(release), further)]
        spent = compute_epsilon(charges, delta, default_accountant([release]))
    return search_parameters(
        dimension=setting.sum_size,
        users=setting.population.users,
        silos=silos,
        count_cap=aggregator.count_cap,
        noise_multiplier=bounds.noise_multiplier * math.sqrt(silos),
        attempts=aggregator.attempts,
        epsilon=spent,
        delta=setting.delta,
        weight_bits=aggregator.weight_bits,
        clip_units=aggregator.units,
    )


def noise_std(bounds: Bounds, parameters: LatticeParameters) -> float:
    """Of one silo's Skellam share, in units of 2^r."""
    scale = math.ldexp(parameters.clip_units, parameters.weight_bits - parameters.noise_shift)
    return bounds.noise_multiplier * bounds.sensitivity / bounds.clip * scale


@dataclass(frozen=True)
class _Server:
    aggregator: Lattice
    setting: RunSpec

    def set_up(self, desk: ServerContext) -> None:
        """Sessions, then shares of the weights."""
        shares = ServerShares(self.setting, self.aggregator.constants(self.setting), desk)
        run, names = self.setting.run, self.setting.names
        set_up(run, names, desk.store.run, desk.ask_all, shares.set_up)

    def total(self, desk: ServerContext, round_: int, arrays: Mapping[str, np.ndarray]) -> Tensor | None:
        """Encrypt shares, collect, open, decrypt once."""
        import torch

        p, names = self.aggregator.parameters(self.setting), self.setting.names
        constants = self.aggregator.constants(self.setting)
        sample, law = arrays.get("sample"), self.aggregator.law(self.setting.method)
        held = ServerShares(self.setting, constants, desk)
        shares, boxes = (
            (held.of_round(round_, sample), None) if law is None else held.of_hidden_round(round_, law)
        )
        session = current(desk.store.run).session

        def request(attempt: RoundAttempt) -> Mapping[str, bytes]:
            key = self._key(desk, attempt)
            return LatticeServer(p, key).request(shares, context(session, attempt), key)

        sent = {name: value for name, value in arrays.items() if name != "sample"}
        attempts = ServerAttempts(self.setting, desk, self.setting.population.m)
        result = attempts.collect(round_, sent, request, boxes)
        if result is None:
            return None
        answers, seals, attempt = result
        values = [self._digits(name, answers[name]) for name in names if name in answers]
        total = LatticeServer(p, self._key(desk, attempt)).decrypt(open_sum(values, seals, p.digits))
        bounds = check_private_weights(self.setting, self.aggregator.name)
        return torch.from_numpy(total * (bounds.clip / p.clip_units / 2.0**p.weight_bits))

    def _key(self, desk: ServerContext, attempt: RoundAttempt) -> bytes:
        """Of one attempt: secret key and encryptions follow from it. Kept before it is used, so that a repeated
        request is the same, and forgotten with its round: whoever learns one of them reads no other attempt.
        """
        store, name = desk.store.round(attempt.round), f"request/{attempt.attempt}"
        key = store.get(name)
        if key is None:
            self._count(desk, attempt)
            key = secrets.token_bytes(KEY_BYTES)
            store.put(name, key)
        return key

    def _count(self, desk: ServerContext, attempt: RoundAttempt) -> None:
        """One attempt more, durably, before its key is made: keys are forgotten with their rounds, their number never.

        Raises:
            SilodpError: the encryption was chosen for no more.
        """
        stored = desk.store.run.get("attempts made")
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
        desk.store.run.put("attempts made", Message("attempts", self.setting.run, fields=counted).encode())

    def _digits(self, name: str, answer: Message) -> np.ndarray:
        try:
            return self.aggregator.parameters(self.setting).digits.from_bytes(answer.blobs["masked"])
        except SilodpError as error:
            raise SilodpError(f"silo '{name}': {error}", code=error.code) from None


def context(session: str, attempt: RoundAttempt) -> bytes:
    """What the ciphertexts of an attempt are bound to."""
    return f"{session} round {attempt.round} attempt {attempt.attempt}".encode()


class _Silo:
    def __init__(self, aggregator: Lattice, setting: RunSpec, own: SiloContext) -> None:
        self._aggregator, self._setting, self._own = aggregator, setting, own
        self._seals = SiloAttempts.of(aggregator, setting, own)
        self._member = self._seals.member
        constants = aggregator.constants(setting)
        self._weights = SiloWeights(setting, constants, self._member, own.store, own.counts)
        self.handlers: Mapping[str, Handler] = {**self._seals.handlers, **self._weights.handlers}

    def update(self, request: Message, work: LocalUpdateFn) -> tuple[Message, int]:
        """Encrypted shares times this silo's vectors, its noise, masks and seal."""
        session, attempt = self._seals.session(request), self._seals.attempt(request)
        p = self._aggregator.parameters(self._setting)
        update, _, stream = work(attempt.release)
        if not isinstance(update, ClippedRowStream):
            raise SilodpError("private weighting needs the clipped rows of every person.", code="method.rows")
        drawn = self._seals.get_or_draw(request, attempt, lambda: self._noise(update.bounds, stream))
        refused = [0]
        digits = LatticeSilo(p, lambda seed: self._claim(request, seed)).answer(
            {part: request.blobs[part] for part in p.request_bytes},
            context(session.transcript.hex(), attempt),
            self._weights.capped,
            integer_rows(update, Quantizer(update.bounds.clip, p.clip_units), refused),
            self._weights.of_round(request),
            drawn["noise"],
        )
        hidden = apply_masks(digits, p.digits, session, attempt, request.digest())
        return request.reply(masked=p.digits.to_bytes(hidden)), refused[0]

    def _noise(self, bounds: Bounds, stream: np.random.Generator) -> dict[str, np.ndarray]:
        p = self._aggregator.parameters(self._setting)
        share = draw_skellam(self._setting.sum_size, noise_std(bounds, p) ** 2, stream)
        return {"noise": scale_noise(share, p.noise_shift, stream)}

    def _claim(self, request: Message, seed: bytes) -> bool:
        """Whether a seed is new, or this very request's (a request that was repeated is the same to the byte)."""
        store = self._own.store.round(request.round)
        return claim(store, f"seeds/{seed.hex()}", request.digest().encode())
