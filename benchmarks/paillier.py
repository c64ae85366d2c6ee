"""What private weighting by Paillier encryption costs: `python benchmarks/paillier.py [--json] [--quick]`.

CPU seconds of one process at 3072 bits, all silos in turn, on random counts and rows of norm 2^16 grid units.
`blanks` needs no data and no round; a silo makes them in the round. `answers` is what else a round costs all silos,
`request` and `decryption` the server. Textbook: one full-length exponentiation per silo, user and parameter and no
re-randomization, timed on a few and scaled. `ratio` compares answers, `ratio_total` blanks, request and decryption as
well.
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gmpy2 import mpz, powmod

from silodp_private.paillier.parameters import PaillierParameters
from silodp_private.paillier.scheme import PrivateKey
from silodp_private.paillier.weighting import PaillierServer, PaillierSilo

GRID = 1 << 16
SETTINGS = {  # silos, users, parameters, most records of a user in a silo
    "paper figure 11": (3, 20, 16, 50),
    "heart_disease": (4, 10, 14, 50),
    "heart_disease, N_max 2001": (4, 10, 14, 500),
    "heart_disease, 100 users": (4, 100, 14, 50),
    "tcga_brca": (6, 10, 40, 50),
    "tcga_brca, 100 users": (6, 100, 40, 50),
    "1,000 parameters": (3, 20, 1000, 50),
}


def measure(name: str, textbook: dict[str, float]) -> dict[str, Any]:
    """Seconds by phase of one session and one round, checked against the plain sum."""
    silos, users, dimension, cap = SETTINGS[name]
    p = PaillierParameters(silos, users, dimension, cap, GRID, 5 * GRID / silos**0.5)
    generator = np.random.default_rng(0)
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(phase: str) -> Iterator[None]:
        begun = time.process_time()
        yield
        seconds[phase] = time.process_time() - begun

    def masks(count: int) -> list[list[int]]:
        free = [[secrets.randbelow(n) for _ in range(count)] for _ in range(silos - 1)]
        return [*free, [-sum(column) % n for column in zip(*free, strict=True)]]

    counts = generator.integers(0, cap + 1, (silos, users))
    rows = generator.normal(size=(silos, users, dimension))
    rows = np.trunc(rows * GRID / np.linalg.norm(rows, axis=2, keepdims=True)).astype(np.int64)
    noise = np.rint(generator.normal(0, p.noise_std, (silos, dimension))).astype(np.int64)

    with timed("keys"):
        server = PaillierServer(p)
    key, secret = server.public_key(), secrets.token_bytes(32)
    n = int.from_bytes(key, "big")
    of_users, of_round, everybody = masks(users), masks(p.ciphertexts), np.arange(users)
    with timed("setup"):
        parties = [PaillierSilo(p, s, counts[s], key, secret, b"benchmark") for s in range(silos)]
        server.receive_counts([silo.blind_counts(m) for silo, m in zip(parties, of_users, strict=True)])
    with timed("blanks"):  # as many as the answers make for themselves
        for silo in parties:
            for _ in range(p.ciphertexts + 1):
                silo.public.blank()
    with timed("request"):
        request = server.encrypt_inverses(np.ones(users, bool))
    with timed("answers"):
        answers = [
            silo.answer(request, [(everybody, rows[s])], noise[s], of_round[s])
            for s, silo in enumerate(parties)
        ]
    seconds["answers"] -= seconds["blanks"]
    with timed("decryption"):
        scaled = server.compute_scaled_sum(answers)

    weighted = (counts[:, :, None] / (counts.sum(0) + 1)[None, :, None] * rows).sum((0, 1)) + noise.sum(0)
    if np.abs(server.round_sum(scaled) - weighted).max() > (silos + 1) / 2 + 1e-3:
        raise RuntimeError("the protocol's sum is not the plain one")
    by_textbook = silos * users * dimension * textbook["exponentiation"]
    ours = sum(seconds[phase] for phase in ("blanks", "request", "answers", "decryption"))
    return {
        "name": name,
        "silos": silos,
        "users": users,
        "parameters": dimension,
        "scale_bits": p.scale.bit_length(),
        "parameters_per_ciphertext": p.slots,
        "bytes_up_per_silo": len(answers[0]),
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
        "session_and_round": round(sum(seconds.values()), 3),
        "textbook_answers": round(by_textbook, 1),
        "ratio": round(by_textbook / seconds["answers"], 1),
        "ratio_total": round((by_textbook + dimension * textbook["decryption"]) / ours, 1),
    }


def textbook_costs(repeats: int = 8) -> dict[str, float]:
    """CPU seconds of one full-length exponentiation mod n² and of one decryption."""
    key = PrivateKey.generate()
    ciphertexts = [key.encrypt(k) for k in range(repeats)]
    exponents = [mpz(secrets.randbelow(int(key.public.n))) for _ in ciphertexts]
    begun = time.process_time()
    for ciphertext, exponent in zip(ciphertexts, exponents, strict=True):
        powmod(ciphertext, exponent, key.public.n_squared)
    between = time.process_time()
    for ciphertext in ciphertexts:
        key.decrypt(ciphertext)
    return {
        "exponentiation": (between - begun) / repeats,
        "decryption": (time.process_time() - between) / repeats,
    }


def measure_all() -> list[dict[str, Any]]:
    """A row for every setting."""
    textbook = textbook_costs()
    return [measure(name, textbook) for name in SETTINGS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    parser.add_argument("--quick", action="store_true", help="the first setting only")
    arguments = parser.parse_args()
    textbook = textbook_costs()
    rows = [measure(name, textbook) for name in list(SETTINGS)[: 1 if arguments.quick else None]]
    if not arguments.json:
        phases = list(rows[0]["seconds"])
        print(f"{'':28}{'S':>3}{'U':>5}{'d':>6}{'slots':>6}" + "".join(f"{x:>11}" for x in phases), end="")
        print(f"{'all':>9}{'ratio':>8}{'total':>8}")
        for row in rows:
            print(f"{row['name']:28}{row['silos']:3}{row['users']:5}{row['parameters']:6}", end="")
            print(f"{row['parameters_per_ciphertext']:6}", end="")
            print("".join(f"{row['seconds'][phase]:11.3f}" for phase in phases), end="")
            print(f"{row['session_and_round']:9.2f}{row['ratio']:8.1f}{row['ratio_total']:8.1f}")
    print(json.dumps({"textbook_seconds": {k: round(v, 5) for k, v in textbook.items()}, "rows": rows}))


if __name__ == "__main__":
    main()
