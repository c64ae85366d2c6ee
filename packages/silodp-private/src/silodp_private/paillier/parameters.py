"""Public constants of `paillier` (docs/protocols.md, section 4); how coordinates share a plaintext."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from silodp.errors import SilodpError, require
from silodp_private.paillier.scheme import SECURE_BITS

_SPARE_BITS = 64  # a sum whose masks did not cancel passes for a result with probability 2⁻⁶⁴
_TAIL = 72  # a Skellam share leaves its bound with probability below 2·e⁻⁷²


@dataclass(frozen=True)
class PaillierParameters:
    """Public constants, the same for all parties; checks that every sum fits before anything is sent.

    Attributes:
        silos: S, the number of silos.
        users: U, the number of users.
        dimension: d, the number of coordinates of a vector.
        count_cap: n_max, the largest number of records of one user in one silo.
        row_bound: C/g, the largest norm ‖Δ[s,u]‖₂ in grid units.
        noise_std: The standard deviation of one silo's share of the noise, in grid units.
        key_bits: The length of the modulus n in bits, a multiple of 16.
        dummy: Whether silo 0 counts one record more for every user, so that weights are n/(N+1); without it the server
            sees which users have no record at all.
        insecure_for_tests: Whether keys below 3072 bits are allowed.

    Raises:
        SilodpError: a number is out of range, or the sums do not fit into plaintexts.
    """

    silos: int
    users: int
    dimension: int
    count_cap: int
    row_bound: int
    noise_std: float
    key_bits: int = SECURE_BITS
    dummy: bool = True
    insecure_for_tests: bool = False

    def __post_init__(self) -> None:
        smallest = {"silos": 2, "users": 1, "dimension": 1, "count_cap": 1, "row_bound": 1, "noise_std": 0}
        for name, least in smallest.items():
            value = getattr(self, name)
            what = f"{name} is {value}: it must be at least {least}"
            require(value >= least, what, code="argument.value", field=name)
        require(
            self.key_bits % 16 == 0 and self.key_bits >= (256 if self.insecure_for_tests else SECURE_BITS),
            f"key_bits is {self.key_bits}: it must be a multiple of 16, at least {SECURE_BITS}",
            code="argument.value",
            field="key_bits",
        )
        require(
            self._largest_in_grid < 1 << 62,
            "users · row_bound or noise_std leaves 64-bit integers: use a coarser grid",
            code="argument.grid",
        )
        # Asked first, since computing the lcm of very many numbers would take long.
        if self.largest_count > self.key_bits or not self.slots:  # lcm(1..N) ≥ 2^N for N ≥ 7
            enough = (
                math.ceil(1.5 * self.largest_count) + self._largest_in_grid.bit_length() + _SPARE_BITS + 2
            )
            raise SilodpError(
                f"count_cap {self.count_cap} in {self.silos} silos needs lcm(1..{self.largest_count}), with the rows"
                f" more than {self.key_bits} bits: lower count_cap, or raise key_bits to {-(-enough // 16) * 16}",
                code="crypto.parameters",
            )

    @property
    def largest_count(self) -> int:
        """N_max, the largest N[u] there can be, the dummy included."""
        return self.silos * self.count_cap + self.dummy

    @cached_property
    def scale(self) -> int:
        """C = lcm(1..N_max), which every N[u] divides.

        Source: Kato et al. (PVLDB 2024), Protocol 1, step 1 (a). It has at most 1.5·N_max bits: Rosser and Schoenfeld,
        Illinois Journal of Mathematics 6, 1962, theorem 12.
        """
        return math.lcm(*range(1, self.largest_count + 1))

    @property
    def noise_bound(self) -> int:
        """What one silo's Skellam noise stays below, in grid units: √(2·72)·std + 2·72/3.

        Source: Bernstein's inequality (Boucheron, Lugosi and Massart, "Concentration Inequalities", 2013, section 2.8).
        """
        return math.ceil(math.sqrt(2 * _TAIL) * self.noise_std + 2 * _TAIL / 3)

    @property
    def sensitivity(self) -> float:
        """What one user changes in the result, grid units, with the shift of the uniform part: C/g + √d.

        It is to be charged instead of C/g; below one part in 64 above it where row_bound ≥ 64·√d.
        """
        return self.row_bound + math.sqrt(self.dimension)

    @property
    def _largest_in_grid(self) -> int:
        return self.users * self.row_bound + self.silos * (self.noise_bound + 1)  # Σ_s n/N ≤ 1 for each user

    @property
    def largest_sum(self) -> int:
        """Largest absolute value of a coordinate of the scaled sum, its noise and uniform parts included."""
        return self.scale * self._largest_in_grid

    @property
    def slot_bits(self) -> int:
        """Bits one signed coordinate takes in a plaintext."""
        return self.largest_sum.bit_length() + 1

    @property
    def slots(self) -> int:
        """Coordinates in one plaintext: sums stay within ±n/2, and 64 bits are left to notice a wrong one.

        As many as fit, then evenly over the ciphertexts; 0 if none fits.
        """
        # One bit for the sign of the plaintext, which lies in ±n/2.
        fitting = (self.key_bits - 1 - _SPARE_BITS) // self.slot_bits
        return fitting and -(-self.dimension // -(-self.dimension // fitting))

    @property
    def ciphertexts(self) -> int:
        """Ciphertexts of one answer, and so its masks."""
        return -(-self.dimension // self.slots)

    def pack(self, coordinates: Sequence[int]) -> list[int]:
        """Return plaintexts Σ_k x[k]·2^(slot_bits·k) of d coordinates, `slots` to each."""
        return [
            sum(x << (k * self.slot_bits) for k, x in enumerate(coordinates[first : first + self.slots]))
            for first in range(0, self.dimension, self.slots)
        ]

    def unpack(self, plaintexts: Sequence[int]) -> list[int]:
        """Return the d coordinates of plaintexts.

        Raises:
            SilodpError: no sum of answers has these plaintexts (code crypto.decryption).
        """
        # Slots are signed: a negative coordinate borrows from the slot above, and is taken off before that is read.
        # What is left above the last slot must be 0: masks that did not cancel leave random bits there.
        half, coordinates = 1 << (self.slot_bits - 1), list[int]()
        for i, value in enumerate(plaintexts):
            for _ in range(min(self.slots, self.dimension - i * self.slots)):
                x = (value + half) % (2 * half) - half
                coordinates.append(x)
                value = (value - x) >> self.slot_bits
            require(
                value == 0,
                "the sum is out of range: its masks do not add to 0, or answers of two attempts mix",
                code="crypto.decryption",
            )
        return coordinates
