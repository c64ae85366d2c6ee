"""The parameters of `lattice`: the rules that they must meet, and the search for the cheapest ones.

Everything here is a public constant; nothing is estimated from data. Sizes are in bits: `log2_tv = -44` is 2^−44.

Source: docs/protocols.md, section 3. Security: Albrecht et al., "Homomorphic Encryption Standard", 2018, table 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from silodp.errors import SilodpError, require
from silodp.text import pluralize
from silodp_private.crypto.lattice.ring import LimbGroup, Ring

ERROR_ETA = 21  # centered binomial errors: standard deviation √(η/2) = 3.24
STANDARD_128 = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438}
"""Largest modulus, in bits, by ring size, for 128 bits of security and a ternary secret."""
MAX_PLANNED = 47.0  # √U·n_max·(C/g)·2^w ≤ 2^47: largest rounding error measured .10
MIN_FLOODING = -40.0
PIECE_BITS = 14  # of the multipliers, when a product must be repeated in pieces
CHECK_PIECE_BITS = 16  # of the random test polynomials
MIN_OUTPUTS = 64  # coefficients of a vector in a block: numbers are packed to bytes 64 at a time
# A silo with many users goes through them in batches, each of which can be computed a second time.
_BUFFER = (
    5 << 28
)  # bytes of multipliers held at a time, from which a product can be repeated, and of their spectra


class Rule(NamedTuple):
    """One inequality that parameters must meet.

    Attributes:
        name: What is limited, and in which unit.
        value: What these parameters reach.
        limit: What `value` must not exceed.
        advice: What to change where it does.
        safety: Whether the rule protects data; the others are about correctness, which `insecure_for_tests` does not
            waive.
    """

    name: str
    value: float
    limit: float
    advice: str
    safety: bool = True

    @property
    def holds(self) -> bool:
        """Return whether value ≤ limit."""
        return self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class LatticeParameters:
    """Public constants of the weighting and of its encryption.

    Attributes:
        dimension: d, the number of coordinates of a vector.
        users: U, the number of users.
        silos: S, the number of silos.
        count_cap: n_max, the largest number of records of one user in one silo.
        clip_units: C/g, the number of grid steps to the clip.
        noise_multiplier: The standard deviation of the sum of all silos' noise, in units of C.
        attempts: The number of rounds of the whole run and of their repetitions.
        epsilon, delta: The guarantee of the run.
        weight_bits: k; weights are multiples of 2^−k.
        ring_size: N, the number of coefficients of a polynomial.
        limb_bits: w, the number of bits of a limb.
        limbs: K, the number of limbs of a coefficient; the modulus is 2^(w·K).
        plaintext_bits: T; plaintexts are integers modulo 2^T.
        dropped: The number of low limbs that a silo does not send.
        packed: U₁, the number of users whose shares one polynomial holds: a power of two, at most N/64.
        insecure_for_tests: Whether the rules of security and planning are waived; those of correctness never are.
    """

    dimension: int
    users: int
    silos: int
    count_cap: int
    clip_units: int
    noise_multiplier: float
    attempts: int
    epsilon: float
    delta: float
    weight_bits: int = 20
    ring_size: int
    limb_bits: int
    limbs: int
    plaintext_bits: int
    dropped: int
    packed: int = 1
    insecure_for_tests: bool = False

    @property
    def modulus_bits(self) -> int:
        """Q = w·K."""
        return self.limb_bits * self.limbs

    @property
    def polynomials(self) -> int:
        """⌈U/U₁⌉, the ciphertexts of all users' shares."""
        return -(-self.users // self.packed)

    @property
    def outputs(self) -> int:
        """N/U₁, the coefficients of a ciphertext that hold numbers of the vector: every U₁-th, from U₁ − 1 on."""
        return self.ring_size // self.packed

    @property
    def blocks(self) -> int:
        """B, ciphertexts that hold the vector's d numbers."""
        return -(-self.dimension // self.outputs)

    @property
    def sent_bits(self) -> int:
        """Q − drop·w, bits a coefficient on the way up."""
        return self.modulus_bits - self.dropped * self.limb_bits

    @property
    def ring(self) -> Ring:
        """The ring of ciphertexts."""
        return Ring(self.ring_size, self.limb_bits, self.limbs)

    @property
    def kept(self) -> Ring:
        """The ring of what is left when low limbs are dropped."""
        return Ring(self.ring_size, self.limb_bits, self.limbs - self.dropped)

    @property
    def digits(self) -> LimbGroup:
        """The group of what silos send: of each block c0 at its outputs, then all of c1, modulo 2^sent_bits."""
        return LimbGroup(self.sent_bits, self.blocks * (self.outputs + self.ring_size))

    @property
    def bytes_up(self) -> float:
        """Bytes that a silo sends per parameter."""
        return self.digits.size / self.dimension

    @property
    def request_bytes(self) -> dict[str, int]:
        """Bytes of every part of the server's request: one polynomial for U₁ users each, and one of the public key.

        The other halves follow from the nonce.
        """
        element = self.modulus_bits * self.ring_size // 8
        return {"nonce": 32, "public key": element, "ciphertexts": self.polynomials * element}

    @property
    def bytes_down(self) -> int:
        """Bytes that a silo is sent in a round."""
        return sum(self.request_bytes.values())

    @property
    def bytes(self) -> int:
        """Bytes that a silo sends and is sent in a round."""
        return self.bytes_down + self.digits.size

    @property
    def noise_shift(self) -> int:
        """r = k + log2(C/g) − 17: integer noise is drawn at a scale of 2^r (docs/protocols.md, section 3)."""
        # Noise is drawn at 2^17 steps to the clip: at finer ones its variance would leave the range that is drawn
        # exactly (`mechanisms.noise.MAX_SKELLAM_VARIANCE`).
        return max(0, self.weight_bits + math.floor(math.log2(self.clip_units)) - 17)

    @property
    def row_bound(self) -> float:
        """The largest norm of a row times its weight, in units of 2^r."""
        return math.ldexp(self.clip_units, self.weight_bits - self.noise_shift)

    @property
    def sensitivity(self) -> float:
        """2^(k−r)·C/g + √d, in units of 2^r: what the integer noise is charged for."""
        return self.row_bound + (math.sqrt(self.dimension) if self.noise_shift else 0.0)

    @property
    def sum_bits(self) -> float:
        """log2 of what the sum must hold: 2^k·U·C/g + 12σ, and the uniform part of the noise."""
        clip = math.ldexp(self.clip_units, self.weight_bits)
        # A normal variable leaves 12 standard deviations with probability below 2^-107; a sum that did would wrap
        # around.
        noise = 12 * self.noise_multiplier * clip + self.silos * 2.0**self.noise_shift
        return math.log2(self.users * clip + noise)

    @property
    def multiplier_bound(self) -> int:
        """n_max·C/g, which bounds every coefficient of a multiplier M."""
        return self.count_cap * self.clip_units

    @property
    def multiplier_norm(self) -> float:
        """√U₁·n_max·C/g, which bounds ‖M‖₂: a multiplier holds the vectors of U₁ users."""
        return math.sqrt(self.packed) * self.multiplier_bound

    @property
    def pieces(self) -> int:
        """Balanced 14-bit pieces that hold every coefficient of a multiplier."""
        return max(1, -(-((self.multiplier_bound - 1).bit_length() + 1) // PIECE_BITS))

    @property
    def batch_polynomials(self) -> int:
        """Multipliers that are held together, until their products are verified; a multiple of 32."""
        # int32 multipliers; of a ciphertext the spectra of 2K limb rows, which a product is computed from.
        fits = _BUFFER // (4 * self.blocks * self.ring_size + 16 * self.limbs * self.ring_size)
        return max(32, min(fits, self.polynomials + 31) // 32 * 32)

    @property
    def planning_bits(self) -> float:
        """log2 of √⌈U/U₁⌉·√U₁·n_max·(C/g)·2^w, about √U·n_max·(C/g)·2^w."""
        return 0.5 * math.log2(self.polynomials) + math.log2(self.multiplier_norm) + self.limb_bits

    @property
    def check_bits(self) -> float:
        """The same for the products with random test polynomials: 2K of norm 2^15·√(N/3) for every user."""
        # A uniform 16-bit piece has the standard deviation 2^16/√12 = 2^15/√3, so N of them have the norm 2^15·√(N/3).
        norm = CHECK_PIECE_BITS - 1 + 0.5 * math.log2(self.ring_size / 3)
        return 0.5 * math.log2(2 * self.limbs) + norm + self.limb_bits

    @property
    def error_spectrum(self) -> float:
        """‖ê‖_∞ above which the server draws an error again: 2^10 at N = 8192 (2 % of the draws), ∝ √N elsewhere."""
        return 1024 * math.sqrt(self.ring_size / 8192)

    @property
    def flooding_bits(self) -> int:
        """F = Q − T − 2 − ⌈log2 S⌉."""
        # The flooding of S silos is at most S·2^(F−1) in size: a quarter of the room 2^(Q−T−1) at decryption.
        return self.modulus_bits - self.plaintext_bits - 2 - (self.silos - 1).bit_length()

    @property
    def log2_leakage(self) -> float:
        """log2 of Σ S·‖M‖₂·‖ê‖_∞ over all polynomials, which bounds the 2-norm of what the errors add to the sum."""
        # ‖M·e‖₂ ≤ ‖M‖₂·‖ê‖_∞, by Parseval's identity, for each of S silos.
        return math.log2(self.polynomials * self.silos * self.multiplier_norm * self.error_spectrum)

    @property
    def log2_tv(self) -> float:
        """log2 of the total variation by which decryption errors betray more than the sum, over the whole run.

        Source: docs/protocols.md, section 3, "Flooding"; the smudging lemma of Asharov et al. (EUROCRYPT 2012).
        """
        # Uniform flooding of width 2^F, moved by s, is at total variation |s|/2^F. Over all coefficients that are sent
        # the shifts add up in the 1-norm, which is at most √(N/U₁·B) times the 2-norm that `log2_leakage` bounds.
        coefficients = 0.5 * math.log2(self.outputs * self.blocks)
        return math.log2(self.attempts) + coefficients + self.log2_leakage - self.flooding_bits

    @property
    def log2_delta(self) -> float:
        """log2 of (1+e^ε)·TV, to be added to δ.

        Source: docs/privacy.md, section 3.
        """
        # log(1 + e^ε), written so that a large ε does not overflow.
        exponential = max(self.epsilon, 0.0) + math.log1p(math.exp(-abs(self.epsilon)))
        return exponential / math.log(2) + self.log2_tv

    @property
    def room_bits(self) -> float:
        """log2 of the largest error at decryption: flooding, leakage, dropped limbs, re-randomization."""
        slack = 1 + 2.0 ** (1 - self.limb_bits)  # balanced limbs reach a little beyond half of their range
        flooding = self.silos * 2.0 ** (self.flooding_bits - 1)
        rounding = self.silos * 2.0 ** (self.dropped * self.limb_bits - 1) * slack * (self.ring_size + 1)
        fresh = self.silos * ERROR_ETA * (2 * self.ring_size + 1)
        return math.log2(flooding + 2**self.log2_leakage + rounding + fresh)

    @property
    def log2_limb_row(self) -> float:
        """log2 of the largest limb row of a batch, worst case: Σ‖M‖₁·2^(w−1)."""
        # ‖M‖₁ ≤ √N·‖M‖₂, by Cauchy and Schwarz.
        norm1 = math.log2(self.multiplier_norm) + 0.5 * math.log2(self.ring_size)
        return math.log2(self.batch_polynomials) + norm1 + self.limb_bits - 1

    def rules(self) -> tuple[Rule, ...]:
        """Return every inequality that these parameters must meet."""
        low_bits = self.modulus_bits - self.plaintext_bits
        # A hundredth of δ pays for what the ciphertexts disclose (`Lattice.delta_share` is .99).
        dropped, row = self.dropped * self.limb_bits, STANDARD_128.get(self.ring_size, 0)
        share = math.log2(self.delta / 100)
        coarser = "take a coarser grid (smaller C/g) or a smaller count cap"
        larger, fewer = "take a larger modulus or a coarser grid", "drop fewer limbs"
        return (
            Rule("modulus bits", self.modulus_bits, row, "take a larger ring"),
            Rule("planning, log2", self.planning_bits, MAX_PLANNED, coarser),
            Rule("test products, log2", self.check_bits, MAX_PLANNED, "take narrower limbs"),
            Rule("flooding, log2 of TV", self.log2_tv, MIN_FLOODING, larger),
            Rule("flooding, log2 of (1+e^ε)·TV", self.log2_delta, share, larger),
            Rule("sum, log2", self.sum_bits, self.plaintext_bits - 1, "take more plaintext bits", False),
            Rule("plaintext bits", self.plaintext_bits, 62, coarser, False),
            Rule("dropped bits", dropped, min(low_bits - 1, self.flooding_bits), fewer, False),
            Rule("decryption room, log2", self.room_bits, low_bits - 1 - 1e-9, fewer, False),
            Rule("multipliers, log2", math.log2(self.multiplier_bound), 30.99, coarser, False),
            Rule("limb rows, log2", self.log2_limb_row, 62.9, coarser, False),
        )

    def check(self) -> None:
        """Refuse parameters that break a rule.

        Raises:
            SilodpError: names the first rule broken, its value and limit, and what to do.
        """
        for rule in self.rules():
            require(
                rule.holds or (rule.safety and self.insecure_for_tests),
                f"the lattice breaks the rule '{rule.name}': {rule.value:.2f} where at most {rule.limit:.2f} is "
                f"allowed; {rule.advice}",
                code="crypto.parameters",
            )

    @property
    def work(self) -> float:
        """Nanoseconds of one core for one silo's round: transforms, and the product over users (measured factors)."""
        rows = 2 * self.limbs
        transforms = self.polynomials * (rows + self.blocks + 64 // CHECK_PIECE_BITS) + rows * self.blocks
        products = self.polynomials * self.blocks * rows
        return self.ring_size * (0.4 * math.log2(self.ring_size) * transforms + 0.27 * products)


def search_parameters(clip_units: int | None = None, **constants: Any) -> LatticeParameters:
    """Return the cheapest encryption that meets every rule.

    Of those that send at most a fifth more bytes than the one that sends the fewest, it is the one of least work.

    Args:
        clip_units: C/g. None: the finest grid C/g ≤ 2^17 for which there is an encryption, not below 64√d, so that the
            charge for rounding stays small.
        constants: the fields `dimension` to `weight_bits` of `LatticeParameters`, by name.

    Raises:
        SilodpError: none passes; it names the rules that the nearest one breaks (code crypto.parameters).
    """
    start = LatticeParameters(
        clip_units=clip_units or 1 << 17,
        ring_size=0,
        limb_bits=0,
        limbs=0,
        plaintext_bits=0,
        dropped=0,
        **constants,
    )
    positive = ("dimension", "users", "silos", "count_cap", "attempts", "delta", "weight_bits", "clip_units")
    require(
        all(getattr(start, name) > 0 for name in positive),
        "the constants of a private weighting must be positive; check users, silos, caps and delta",
        code="argument.value",
    )
    # The finest grid comes first; below 64√d steps, truncation would add more than 1/64 to the sensitivity.
    grids = [1 << bits for bits in range(17, 7, -1) if 1 << bits >= 64 * math.sqrt(start.dimension)]
    tried: list[LatticeParameters] = []
    for units in [clip_units] if clip_units else grids or [1 << 17]:
        start = replace(start, clip_units=units)
        tried = list(_encryptions(replace(start, plaintext_bits=math.floor(start.sum_bits) + 2)))
        passing = [one for one in tried if all(rule.holds for rule in one.rules())]
        if passing:
            most = 1.2 * min(one.bytes for one in passing)
            return min((one for one in passing if one.bytes <= most), key=lambda one: (one.work, one.bytes))
    nearest = min(tried, key=lambda one: sum(max(0.0, rule.value - rule.limit) for rule in one.rules()))
    broken = [
        f"{rule.name} {rule.value:.1f} > {rule.limit:.1f}" for rule in nearest.rules() if not rule.holds
    ]
    raise SilodpError(
        f"no lattice holds {pluralize(start.users, 'user')} with up to {pluralize(start.count_cap, 'record')} a silo "
        f"at C/g = {nearest.clip_units}: the nearest breaks {', '.join(broken)}; lower the count cap, or take fewer "
        "rounds or weight bits",
        code="crypto.parameters",
    )


def _encryptions(start: LatticeParameters) -> Iterator[LatticeParameters]:
    """Yield every ring and modulus, each with as many limbs dropped as decryption allows."""
    for ring_size in (4096, 8192, 16384):
        for limb_bits in range(12, 25):
            for limbs in range(3, STANDARD_128[ring_size] // limb_bits + 1):
                one = replace(start, ring_size=ring_size, limb_bits=limb_bits, limbs=limbs)
                if one.flooding_bits < 1:
                    continue
                one = _pack_users(one)
                # Dropping limbs saves traffic; each dropped limb adds to the error at decryption.
                least = min(one.modulus_bits - one.plaintext_bits - 1, one.flooding_bits)
                most = replace(one, dropped=least // limb_bits)
                while most.dropped and most.room_bits >= one.modulus_bits - one.plaintext_bits - 1 - 1e-9:
                    most = replace(most, dropped=most.dropped - 1)
                yield most


def _pack_users(one: LatticeParameters) -> LatticeParameters:
    """Return the parameters with the U₁ that sends the fewest bytes before low limbs are dropped.

    More users in a polynomial are fewer ciphertexts and more blocks.
    """
    most = min(one.ring_size // MIN_OUTPUTS, 1 << (one.users - 1).bit_length())
    return min(
        (replace(one, packed=1 << bits) for bits in range(most.bit_length())), key=lambda packed: packed.bytes
    )
