"""`paillier`: weights by records that nobody sees, by the ULDP-FL paper's Protocol 1, repaired (PROTOCOLS 2a).

For small models. The server learns Σ_s Σ_u n[s,u]/N[u]·Δ[s,u] plus noise, scaled to integers, and nothing else; a silo
learns nothing of other silos' counts, nor who was sampled. Silo 0 counts one record more for everyone, so that weights
are n/(N+1) and nobody's absence shows. Rounds are attempts with seals, as in `masked`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silodp.crypto.keys import Session
from silodp.crypto.paillier import SECURE_BITS, PublicKey, uniform_residues
from silodp.crypto.paillier_parameters import PaillierParameters
from silodp.crypto.paillier_weighting import PaillierServer, PaillierSilo
from silodp.crypto.secure_aggregation import Attempt, masked, pair_masked
from silodp.errors import SilodpError
from silodp.federation.aggregation import Desk, Handler, Own, ServerSide, Setting, SiloSide, Work
from silodp.federation.attempts import Attempts, Seals
from silodp.federation.masked import ASSUMPTIONS as SECURE_AGGREGATION
from silodp.federation.masked import check_survivors
from silodp.federation.messages import Message
from silodp.federation.private_weights import HiddenWeights, check_private_weights, integer_rows
from silodp.federation.sessions import Member, Met, set_up
from silodp.mechanisms.clipping import ClippedStream
from silodp.mechanisms.grid import Grid, noise_variance
from silodp.mechanisms.noise import skellam
from silodp.privacy.events import Event, discrete
from silodp.privacy.guarantee import View

ASSUMPTIONS = (
    *SECURE_AGGREGATION,
    "nobody but the server factors its Paillier modulus, and no silo tells the server the silos' common secret: "
    "together they would learn every count",
)
_MOST_UNITS = 1 << 16


@dataclass(frozen=True)
class Residues:
    """Lists of `count` integers modulo n: the group that masks Paillier plaintexts."""

    count: int
    modulus: int

    def zero(self) -> list[int]:
        """All zeros."""
        return [0] * self.count

    def add(self, value: list[int], other: list[int]) -> list[int]:
        """Modulo n."""
        return [(a + b) % self.modulus for a, b in zip(value, other, strict=True)]

    def mask(self, value: list[int], key: bytes, sign: int) -> list[int]:
        """value ± residues drawn with 128 bits to spare."""
        drawn = uniform_residues(key, self.count, self.modulus)
        return [(a + sign * b) % self.modulus for a, b in zip(value, drawn, strict=True)]


@dataclass(frozen=True)
class Paillier(HiddenWeights):
    """Private weighting for small models.

    `count_cap` n_max: at most so many records of one person in one silo count (a public constant). `min_silos` as for
    `masked`. `units`: grid steps to the clip (None: 2^16). `key_bits` below 3072 need `insecure_for_tests`.
    """

    count_cap: int = 100
    min_silos: int | None = None
    units: int | None = None
    key_bits: int = SECURE_BITS
    insecure_for_tests: bool = False

    name: str = field(default="paillier", init=False)
    exact: bool = field(default=True, init=False)
    weights_privately: bool = field(default=True, init=False)
    most_rounds: None = field(default=None, init=False, repr=False)
    delta_share: float = field(default=1.0, init=False, repr=False)
    assumptions: tuple[str, ...] = field(default=ASSUMPTIONS, init=False, repr=False)

    def check(self, setting: Setting) -> None:
        """Weights by records, enough silos, a grid, and room in a plaintext."""
        check_survivors(setting)
        self.parameters(setting)

    def grid(self, setting: Setting) -> Grid:
        """Of the rows; at least 64√d steps to the clip, so that the shift of the uniform part costs little."""
        bounds = check_private_weights(setting, self.name)
        finest = Grid.for_(bounds).units
        grid = Grid.for_(bounds, min(finest, _MOST_UNITS) if self.units is None else self.units)
        if grid.units < 64 * math.sqrt(setting.size):
            raise SilodpError(
                f"{grid.units} grid steps to the clip are too few for {setting.size} parameters under 'paillier': set "
                f"units ≥ {2 ** math.ceil(math.log2(64 * math.sqrt(setting.size)))}, or aggregator = 'lattice'."
            )
        return grid

    def parameters(self, setting: Setting) -> PaillierParameters:
        """A function of public constants alone."""
        bounds, grid = check_private_weights(setting, self.name), self.grid(setting)
        return PaillierParameters(
            silos=setting.population.silos,
            users=setting.population.users,
            dimension=setting.size,
            count_cap=self.count_cap,
            row_bound=grid.units,
            noise_std=math.sqrt(noise_variance(bounds, grid)),
            key_bits=self.key_bits,
            insecure_for_tests=self.insecure_for_tests,
        )

    def event(self, setting: Setting, view: View) -> Event:
        """The method's, with Skellam noise at the scale C_LCM, and the shift of the uniform part charged."""
        p = self.parameters(setting)
        return discrete(
            setting.method.dp_event(view), int(p.sensitivity), setting.size, p.sensitivity / p.row_bound
        )

    def describe(self, setting: Setting) -> dict[str, Any]:
        """What it costs."""
        p = self.parameters(setting)
        return {
            "silos needed in a sum": setting.population.m,
            "count cap per person and silo": self.count_cap,
            "grid steps to the clip": p.row_bound,
            "key": f"{p.key_bits} bits",
            "parameters in one ciphertext": p.slots,
            "bytes up, per silo and round": p.ciphertexts * p.key_bits // 4,
            "bytes down, per silo and round": p.users * p.key_bits // 4,
            "exactness": "integers, exact; rounded to a grid step after decryption",
            "security": "128 bits (NIST SP 800-57: 3072-bit moduli)" if p.key_bits >= SECURE_BITS else "none",
        }

    def server(self, setting: Setting) -> ServerSide:
        """Holds the private key."""
        return _Server(self, setting)

    def silo(self, setting: Setting, own: Own) -> SiloSide:
        """Raises ciphertexts to powers."""
        return _Silo(self, setting, own)


@dataclass(frozen=True)
class _Server:
    aggregator: Paillier
    setting: Setting

    def set_up(self, desk: Desk) -> None:
        """Sessions, then blinded counts under a fresh key."""

        def prepare(met: Met) -> None:
            server = PaillierServer(self.aggregator.parameters(self.setting))
            blobs = {"key": server.public_key()}
            named = {"session": met.session}
            request = Message("blinded counts", self.setting.run, 0, met.number, named, blobs=blobs)
            answers = desk.ask_all({name: request for name in self.setting.names})
            size = self.setting.population.users * self.aggregator.key_bits // 8
            server.receive_counts(_sized(answers, "counts", size))
            desk.store.put("paillier", server.pack())

        set_up(self.setting.run, self.setting.names, desk.store, desk.ask_all, prepare)

    def total(self, desk: Desk, round_: int, arrays: Mapping[str, np.ndarray]) -> Tensor | None:
        """Encrypt inverses, collect, open, multiply, decrypt once."""
        p = self.aggregator.parameters(self.setting)
        server = PaillierServer.unpack(p, desk.store.get("paillier") or b"")
        sampled = arrays.get("sample", np.ones(p.users, dtype=bool))

        def request(attempt: Attempt) -> Mapping[str, bytes]:
            """Fresh ciphertexts for every attempt, kept so that a repeated request is the same."""
            name = f"request/{attempt.round}/{attempt.attempt}"
            stored = desk.store.get(name)
            if stored is None:
                stored = server.encrypted_inverses(sampled)
                desk.store.put(name, stored)
            return {"inverses": stored}

        attempts = Attempts(self.setting, desk, self.setting.population.m)
        result = attempts.collect(round_, {"params": arrays["params"]}, request)
        if result is None:
            return None
        answers, seals = result
        group = Residues(p.ciphertexts, int.from_bytes(server.public_key(), "big"))
        sealed = group.zero()
        for key in seals.values():
            sealed = group.mask(sealed, key, 1)
        scaled = server.scaled_sum(_sized(answers, "answer", p.ciphertexts * p.key_bits // 4), sealed)
        return torch.from_numpy(server.rounded(scaled) * self.aggregator.grid(self.setting).step)


def _sized(answers: Mapping[str, Message], blob: str, size: int) -> list[bytes]:
    """What each silo sent, if it has the length that is due; the silo is named when not."""
    for name, answer in answers.items():
        sent = len(answer.blobs.get(blob, b""))
        if sent != size:
            raise SilodpError(
                f"silo '{name}' sent {sent} bytes where {size} were due: it has other settings, or another version."
            )
    return [answer.blobs[blob] for answer in answers.values()]


class _Silo:
    def __init__(self, aggregator: Paillier, setting: Setting, own: Own) -> None:
        self._aggregator, self._setting, self._own = aggregator, setting, own
        self._member = Member(own.identity, own.pins, setting.constants(aggregator), own.store)
        self._seals = Seals(self._member, own.store, setting.population.m)
        self.handlers: Mapping[str, Handler] = {
            **self._member.handlers,
            "blinded counts": self._counts,
            "open": self._seals.open,
        }

    def update(self, request: Message, work: Work) -> tuple[Message, int]:
        """Powers of the ciphertexts, noise, masks and seal."""
        session, attempt = self._seals.admitted(request)
        update, _, stream = work(attempt.release)
        if not isinstance(update, ClippedStream):
            raise SilodpError("private weighting needs the clipped rows of every person.")
        silo, public = self._party(request.run, session)
        p, grid = silo.parameters, self._aggregator.grid(self._setting)
        kept = self._seals.kept(request, attempt)
        if kept is None:
            noise = skellam(p.dimension, noise_variance(update.bounds, grid), stream)
            drawn = np.frombuffer(stream.bytes(p.dimension * _width(p)), np.uint8)
            kept = self._seals.keep(request, attempt, {"noise": noise, "uniform": drawn})
        group = Residues(p.ciphertexts, int(public.n))
        masks: list[int] = masked(group.zero(), group, session, attempt)
        refused = [0]
        answer = silo.answer(
            request.blobs.get("inverses", b""),
            integer_rows(update, grid, refused),
            kept["noise"],
            masks,
            uniform_parts(kept["uniform"].tobytes(), p),
        )
        self._seals.record(request, attempt)
        return request.reply(answer=answer), refused[0]

    def _counts(self, request: Message) -> Message:
        session = self._member.once(request)  # two keys under one mask would show who has records here
        self._own.store.put(f"{request.run}/paillier key", request.blobs.get("key", b""))
        silo, public = self._party(request.run, session)
        group = Residues(silo.parameters.users, int(public.n))
        attempt = Attempt(0, 0, 0, session.roster, "counts")
        masks: list[int] = pair_masked(group.zero(), group, session, attempt)
        return request.reply(counts=silo.blinded_counts(masks))

    def _party(self, run: str, session: Session) -> tuple[PaillierSilo, PublicKey]:
        key = self._own.store.get(f"{run}/paillier key") or b""
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
