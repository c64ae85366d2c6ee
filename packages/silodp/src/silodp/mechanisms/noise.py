"""Random streams of a run, one for each purpose; Gaussian and Skellam noise, and Poisson samples.

Each purpose ("noise", "sample", "batches") has its own stream, so that no two draws share bits and a repeated round
repeats exactly the draws it made before. Streams are ChaCha20 keyed with 256 bits: from the operating system for a run
that may be released, from a seed for an experiment.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from randomgen import ChaCha

from silodp.errors import SilodpError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Randomness:
    """A family of independent streams, named by their purpose.

    `key` is None for secret randomness: then every call of `stream` draws a fresh key from the operating system, which
    is kept nowhere, and what must be repeated has to be stored. With a key (from a seed) a stream is a function of its
    purpose, and guarantees say "not for release".
    """

    key: bytes | None = field(repr=False)
    prefix: tuple[str | int, ...] = ()

    @classmethod
    def secret(cls) -> Randomness:
        """Return streams with fresh keys from the operating system."""
        return cls(None)

    @classmethod
    def from_seed(cls, seed: int) -> Randomness:
        """Return reproducible streams, for experiments only."""
        return cls(hashlib.sha256(f"silodp seed {seed}".encode()).digest())

    @classmethod
    def of_run(cls, seed: int | None) -> Randomness:
        """Return the streams of a run: secret without a seed, reproducible with one."""
        return cls.secret() if seed is None else cls.from_seed(seed)

    @property
    def reproducible(self) -> bool:
        """Whether the same purposes give the same numbers again (then nothing drawn here may be released)."""
        return self.key is not None

    def child(self, *purpose: str | int) -> Randomness:
        """Return the family of streams whose purposes begin with `purpose`."""
        return Randomness(self.key, self.prefix + purpose)

    def stream(self, *purpose: str | int) -> np.random.Generator:
        """Return a ChaCha20 generator (RFC 8439) for this purpose, good for noise and for private samples."""
        return np.random.Generator(ChaCha(key=int.from_bytes(self.derive_key(*purpose), "little"), rounds=20))

    def torch(self, *purpose: str | int, device: str = "cpu") -> torch.Generator:
        """Return a torch generator for batch order, dropout and initial weights; never noise (64 bits of seed)."""
        import torch

        generator = torch.Generator(device)
        # torch takes a signed seed of 64 bits.
        return generator.manual_seed(int.from_bytes(self.derive_key(*purpose)[:8], "little") >> 1)

    def derive_key(self, *purpose: str | int) -> bytes:
        """Return a key of 32 bytes for this purpose; it is as secret as the streams.

        Source: keyed BLAKE2b (RFC 7693) of the purpose. JSON separates the words, so that no two purposes collide.
        """
        # Fresh at every call: if noise could be drawn again, the difference of two releases would be free of it.
        if self.key is None:
            return secrets.token_bytes(32)
        # `person` separates these keys from any other use of the same secret.
        return hashlib.blake2b(
            json.dumps([*self.prefix, *purpose]).encode(),
            key=self.key,
            digest_size=32,
            person=b"silodp stream",
        ).digest()


def draw_gaussian(size: int, std: float, stream: np.random.Generator) -> torch.Tensor:
    """Draw `size` independent values of N(0, std²), float64; `std` is in units of the sum that they are added to."""
    import torch

    # By numpy from the ChaCha20 stream: generators of torch have 64 bits of seed, which can be searched.
    return torch.from_numpy(stream.standard_normal(size) * std)


MAX_SKELLAM_VARIANCE = 1e12
"""Here rounding in numpy's sampler changes a probability of the noise by 8e-7 of it (docs/privacy.md, section 3)."""


def draw_skellam(size: int, variance: float, stream: np.random.Generator) -> NDArray[np.int64]:
    """Draw `size` independent values of Poisson(V/2) - Poisson(V/2): integers of mean 0 and this variance V.

    A sum of such draws of variances V_s is one draw of variance Σ V_s, which is why silos can each add a share.

    Raises:
        SilodpError: the variance is above `MAX_SKELLAM_VARIANCE`.

    Source: Agarwal, Kairouz and Liu 2021, "The Skellam Mechanism for Differentially Private Federated Learning".
    """
    if not 0 <= variance <= MAX_SKELLAM_VARIANCE:
        raise SilodpError(
            f"integer noise of variance {variance:.4g} cannot be drawn: choose a coarser grid (at most "
            f"{MAX_SKELLAM_VARIANCE:.0e}).",
            code="argument.grid",
        )
    # The difference of two Poisson draws, exactly an integer: no low bits as those of floating-point noise.
    draws: NDArray[np.int64] = stream.poisson(variance / 2, size) - stream.poisson(variance / 2, size)
    return draws


def draw_poisson_sample(count: int, q: float | np.ndarray, stream: np.random.Generator) -> np.ndarray:
    """Draw a sample (count,) bool, each True independently with probability q (to within 2⁻⁵³).

    Args:
        count: The number of units.
        q: One probability for all units, or (count,) one for each.
        stream: The random numbers; secret ones where the sample is private.

    Source: the samples ("lots") of Abadi et al. 2016, "Deep Learning with Differential Privacy", section 3.1.
    """
    # One draw for every unit, whatever its q is, so that whether a unit is drawn does not depend on another's q.
    return stream.random(count) < q
