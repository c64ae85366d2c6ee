"""Rounds of the lattice weighting on small rings, and the same sums by Python's integers."""

import secrets
from dataclasses import replace

import numpy as np

from silodp.errors import SilodpError
from silodp_private.crypto.lattice.parameters import LatticeParameters
from silodp_private.crypto.lattice.scheme import LatticeServer, LatticeSilo

CONTEXT = b"transcript, round 1, attempt 1"
RUN = {"silos": 3, "noise_multiplier": 5.0, "attempts": 10, "epsilon": 1.0, "delta": 1e-5}


def toy(**changes):
    """A small ring that is exact and decrypts, but hides nothing."""
    constants = {
        "dimension": 300,
        "users": 5,
        "count_cap": 9,
        "clip_units": 1 << 8,
        "weight_bits": 10,
        "ring_size": 256,
    }
    sizes = {"limb_bits": 16, "limbs": 9, "plaintext_bits": 1, "dropped": 0, "insecure_for_tests": True}
    start = LatticeParameters(**RUN | constants | sizes | changes)
    start = replace(start, plaintext_bits=int(start.sum_bits) + 2)
    room = [start] + [replace(start, dropped=dropped) for dropped in range(1, start.limbs)]
    return start if "dropped" in changes else max((p for p in room if allowed(p)), key=lambda p: p.dropped)


def allowed(parameters):
    try:
        parameters.check()
    except SilodpError:
        return False
    return True


class Seeds(set):
    """What a silo keeps durably."""

    def claim(self, seed):
        fresh = seed not in self
        self.add(seed)
        return fresh


def round_of(parameters, counts, rows, weights, noise, chunk=7):
    """All parties; counts (S, U), rows (S, U, d), weights (U,), noise (S, d). What the server decrypts."""
    digits, shares = parameters.digits, np.frombuffer(secrets.token_bytes(8 * parameters.users), np.uint64)
    server = LatticeServer(parameters)
    request = server.request(weights.astype(np.uint64) - shares, CONTEXT)
    total = digits.zero()
    for s in range(parameters.silos):
        owners = np.random.default_rng(s).permutation(parameters.users)
        parts = [owners[first : first + chunk] for first in range(0, parameters.users, chunk)]
        silo = LatticeSilo(parameters, Seeds().claim)
        chunks = ((some, rows[s, some]) for some in parts)
        answer = silo.answer(request, CONTEXT, counts[s], chunks, shares, noise[s])
        mask = secrets.token_bytes(32)
        sent = digits.from_bytes(digits.to_bytes(digits.mask(answer, mask, 1)))
        total = digits.mask(digits.add(total, sent), mask, -1)
    return server.decrypt(total)


def plain(parameters, counts, rows, weights, noise):
    """The same by Python's integers, centered modulo 2^T."""
    factors = counts.astype(object) * weights.astype(object)
    total = np.einsum("su,sud->d", factors, rows.astype(object)) + noise.astype(object).sum(axis=0)
    half = 1 << (parameters.plaintext_bits - 1)
    return ((total + half) % (2 * half) - half).astype(np.int64)


def rows_like(kind, parameters, rng):
    """(S, U, d) of norm at most C/g, as long as the kind allows."""
    shape, norm = (parameters.silos, parameters.users, parameters.dimension), parameters.clip_units
    rows = np.zeros(shape, np.int64)
    match kind:
        case "random":
            reals = rng.normal(size=shape)
            rows[:] = np.trunc(reals * (norm / np.linalg.norm(reals, axis=-1, keepdims=True)))
        case "one coordinate":
            rows[:, :, int(rng.integers(parameters.dimension))] = norm
        case "one coordinate, minus":
            rows[:, :, -1] = -norm
        case "spread":
            rows[:] = int(norm / parameters.dimension**0.5)
        case "spread, minus":
            rows[:] = -int(norm / parameters.dimension**0.5)
    return rows


def ask(parameters, request=None, seeds=None, **changes):
    """One silo's answer to all-zero inputs but for `changes`."""
    request = request or LatticeServer(parameters).request(np.zeros(parameters.users, np.uint64), CONTEXT)
    inputs = {
        "counts": np.ones(parameters.users, np.int64),
        "chunks": [
            (np.arange(parameters.users), np.zeros((parameters.users, parameters.dimension), np.int32))
        ],
        "shares": np.zeros(parameters.users, np.uint64),
        "noise": np.zeros(parameters.dimension, np.int64),
    }
    silo = LatticeSilo(parameters, (Seeds() if seeds is None else seeds).claim)
    return silo.answer(request, CONTEXT, **inputs | changes)


def rows(parameters, *entries):
    found = np.zeros((1, parameters.dimension), np.int64)
    found[0, : len(entries)] = entries
    return found


def case(parameters, kind="random"):
    """Counts at the cap, rows of a kind, weights and noise: what `round_of` and `plain` take."""
    rng = np.random.default_rng(4)
    counts = np.full((parameters.silos, parameters.users), parameters.count_cap)
    rows = rows_like(kind, parameters, rng)
    weights = rng.integers(0, 1 << parameters.weight_bits, parameters.users)
    return counts, rows, weights, rng.integers(-(2**20), 2**20, (parameters.silos, parameters.dimension))
