"""What one silo that departs from the protocol can do within the limit of a sum, and what proofs would cost.

SILODP_DATA=DIR python benchmarks/malicious_silo.py heart     lengths of sums, and accuracy with such a silo
python benchmarks/malicious_silo.py proofs                    one commitment for each number, by size of the model
"""

from __future__ import annotations

import argparse
import secrets
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import rbcl
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.aggregators.limits import find_longest_sum
from silodp.config.resolve import ResolvedRun, load_config
from silodp.crypto.secure_aggregation import WordGroup
from silodp.runtime.silo import Silo
from silodp.runtime.train import train
from silodp.wire.messages import Message
from timing import measure_in_turn

HEART = Path(__file__).resolve().parents[1] / "examples" / "heart_disease.toml"
SEEDS = range(5)
SIZES, REPEATED = (10**4, 10**5, 10**6), 2000


def play(
    config: ResolvedRun, seed: int, liar: str | None
) -> tuple[list[dict[str, np.ndarray]], float, float]:
    """Run once; a silo sends the longest share that is taken, against the direction of its own sum, in every round.

    Returns:
        Every round's honest shares by silo, the longest share that is taken, the accuracy at the end.
    """
    federation = config.load_federation()
    rounds: list[dict[str, np.ndarray]] = []
    longest = 0.0
    answer = Silo.answer

    def act(self: Silo, request: Message) -> Message:
        nonlocal longest
        made = answer(self, request)
        if "share" not in made.arrays:
            return made
        if request.round == len(rounds):
            rounds.append({})
        share = rounds[request.round][self.name] = made.arrays["share"]
        longest = find_longest_sum(self._spec, 1, is_share=True) or 0.0
        if self.name != liar:
            return made
        return made.answer(share=-share * (0.999999 * longest / np.linalg.norm(share)))

    with patch.object(Silo, "answer", act):
        result = train(
            federation, config.build_task(federation), config.method, rounds=config.config.rounds, seed=seed
        )
    return rounds, longest, float(result.metrics[-1]["metrics"]["accuracy"])


def measure_heart() -> None:
    """Print lengths and accuracies, with uniform weights and by records."""
    for weighting in ("uniform", "records"):
        config = load_config(HEART, [f"method.weighting={weighting}"])
        clip = config.method.clip
        honest, lied, sums, longest = [], [], [], 0.0
        for seed in SEEDS:
            rounds, longest, accuracy = play(config, seed, None)
            honest.append(accuracy)
            sums += [float(np.linalg.norm(sum(shares.values()))) for shares in rounds]
            names = sorted(rounds[0])
            lied += [play(config, seed, name)[2] for name in (names[0], names[-1])]
        print(
            f"{weighting}: a round's sum {statistics.median(sums) / clip:.1f} clips long, the longest share taken "
            f"{longest / clip:.1f}; accuracy {statistics.mean(honest):.3f} with honest silos, "
            f"{statistics.mean(lied):.3f} with one that is not (smallest {min(lied):.3f})"
        )


def measure_proofs() -> None:
    """Print the time of one commitment to a number, of one for every number of a model, and what masking costs."""
    peer, own = X25519PrivateKey.generate().public_key(), X25519PrivateKey.generate()
    other = rbcl.crypto_scalarmult_ristretto255_base(rbcl.crypto_core_ristretto255_scalar_random())
    value = (12345).to_bytes(32, "little")

    def commit() -> None:
        hidden = rbcl.crypto_scalarmult_ristretto255_base(rbcl.crypto_core_ristretto255_scalar_random())
        rbcl.crypto_core_ristretto255_add(hidden, rbcl.crypto_scalarmult_ristretto255(value, other))

    def repeat(one: Callable[[], object]) -> Callable[[], None]:
        return lambda: [one() for _ in range(REPEATED)] and None

    cases = {"commitment": repeat(commit), "X25519": repeat(lambda: own.exchange(peer))}
    seconds = {name: time_ / REPEATED for name, time_ in measure_in_turn(cases, 7).items()}
    print(", ".join(f"{name}: {time_ * 1e6:.0f} µs" for name, time_ in seconds.items()))
    key = secrets.token_bytes(32)
    for size in SIZES:
        group = WordGroup(size, 32)
        masking = measure_in_turn({"": partial(group.mask, group.zero(), key, 1)}, 5)[""]
        print(
            f"d = {size:,}: {seconds['commitment'] * size:.1f} s and {32 * size / 1e6:.1f} MB; "
            f"one mask {masking * 1e3:.2f} ms and {4 * size / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["heart", "proofs"])
    {"heart": measure_heart, "proofs": measure_proofs}[parser.parse_args().part]()
