"""What a round costs at 10⁶ persons, 100 silos and 10⁷ parameters, from pieces that fit this machine.

    python benchmarks/scale.py

Every piece is measured at two or three sizes, which must grow as its formula says, and is extrapolated by it. Whole
runs at 10⁴ persons, 10 silos and 10⁵ parameters are then compared with the sum of their pieces. CPU seconds of one
thread. A round of `uldp-avg`: every person has one record in each of two silos, and takes one step on it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import torch
from scipy import fft

import lattice
from engines import Mlp
from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Gaussian, PoissonSampled
from silodp.aggregators import Aggregator, Masked, Plain
from silodp.crypto.keys import HandshakeState, Identity, Session
from silodp.crypto.secure_aggregation import RoundAttempt, WordGroup, apply_masks, open_sum
from silodp.data.federation import Federation, SiloData
from silodp.mechanisms.clipping import Bounds, ClippedRowStream, add_weighted_rows, clip_rows
from silodp.mechanisms.noise import Randomness, draw_gaussian, draw_skellam
from silodp.mechanisms.quantization import Quantizer
from silodp.methods import UldpAvg
from silodp.runtime.checkpoint import Checkpoint, encode_checkpoint, save_checkpoint
from silodp.runtime.train import train
from silodp.training import LocalTraining, Task, cross_entropy, user_updates
from silodp_private.crypto.lattice.parameters import LatticeParameters, search_parameters
from silodp_private.crypto.lattice.scheme import LatticeServer
from silodp_private.crypto.products import MaskedRows, add_products
from timing import show_help

# Of the growth from size to size: other work on the machine shows in it, and another power would be 2 or more.
TOLERANCE = 1.8
FEATURES, CLASSES, ROUNDS = 50, 10, 2


@dataclass(frozen=True)
class Setting:
    """U persons, S silos, d parameters."""

    users: int
    silos: int
    dimension: int

    @property
    def rows(self) -> float:
        """Persons with records in one silo, of two silos a person."""
        return 2 * self.users / self.silos

    @property
    def lattice(self) -> LatticeParameters:
        """The encryption that `lattice` would take, with σ = 5, 100 attempts, and at most 50 records a silo."""
        return search_parameters(
            dimension=self.dimension, users=self.users, silos=self.silos, count_cap=50,
            noise_multiplier=5.0, attempts=100, epsilon=10.0, delta=0.1 / self.users,
        )  # fmt: skip


TARGET, REDUCED = Setting(10**6, 100, 10**7), Setting(10**4, 10, 10**5)
Sizes = Mapping[float, Callable[[], object]]
"""Work of a piece in its own unit -> what does that much."""


@dataclass(frozen=True)
class Piece:
    """One part of a round.

    Attributes:
        name: Of the part.
        party: Who does it.
        formula: Its work, in words.
        work: The same as a function.
        sizes: What is measured, or the seconds that were.
    """

    name: str
    party: str
    formula: str
    work: Callable[[Setting], float]
    sizes: Sizes


def measure(sizes: Sizes) -> dict[float, float]:
    """Return the seconds of every size: the median of three turns, after a first one."""
    found: dict[float, list[float]] = {size: [] for size in sizes}
    for turn in range(4):
        for size, work in sizes.items():
            begin = time.process_time()
            taken = work()
            # A piece of a longer run gives its own seconds.
            seconds = taken if isinstance(taken, float) else time.process_time() - begin
            if turn or isinstance(taken, float):
                found[size].append(seconds)
    return {size: statistics.median(values) for size, values in found.items()}


def make_task(dimension: int) -> Task:
    """Return a network with about that many parameters."""
    # w² + (features + classes + 2)·w parameters, and those of the last bias.
    width = round(
        ((FEATURES + CLASSES + 2) ** 2 / 4 + dimension - CLASSES) ** 0.5 - (FEATURES + CLASSES + 2) / 2
    )
    torch.manual_seed(0)
    return Task(Mlp(FEATURES, width), cross_entropy())


def train_rows(rows: int, dimension: int) -> tuple[float, Callable[[], object]]:
    """Return rows·d, and what trains that many persons on one record each."""
    task = make_task(dimension)
    x, y = torch.randn(rows, FEATURES), torch.randint(CLASSES, (rows,))
    start, local = task.initial(0), LocalTraining(0.1)

    def work() -> None:
        for _ in user_updates(task, start, x, y, torch.arange(rows), local, torch.Generator().manual_seed(0)):
            pass

    return rows * task.size, work


def add_rows(rows: int, dimension: int, grid: bool) -> tuple[float, Callable[[], object]]:
    """Return rows·d, and what clips and adds up that many rows, in clear or on the grid of `masked`."""
    values, weights = torch.randn(rows, dimension), torch.full((rows,), 0.5, dtype=torch.float64)

    def work() -> None:
        chunk = clip_rows(torch.arange(rows), values, 1.0)
        stream = ClippedRowStream([chunk], dimension, Bounds(1.0, 1.0, 0.1, 9.0), weighted=True)
        if grid:
            Quantizer(1.0, 1 << 17).fold(stream, weights)
        else:
            add_weighted_rows(stream, weights)

    return rows * dimension, work


def meet(silos: int) -> dict[str, Session]:
    """Return the sessions of silos that have met."""
    identities = [Identity.fresh(f"silo{s}") for s in range(silos)]
    openings = [HandshakeState.fresh(identity, "scale") for identity in identities]
    pins, hellos = {one.name: one.public for one in identities}, [opening.hello for opening in openings]
    return {opening.identity.name: opening.meet(hellos, pins, "") for opening in openings}


def mask(silos: int, dimension: int) -> tuple[float, Callable[[], object]]:
    """Return S·d, and what one silo does to mask and seal a vector."""
    sessions, group = meet(silos), WordGroup(dimension, 32)
    attempt, value = RoundAttempt(0, 0, 0, tuple(sessions), "scale"), np.arange(dimension)
    own = next(iter(sessions.values()))
    return silos * dimension, lambda: apply_masks(group.from_integers(value), group, own, attempt)


def open_masks(silos: int, dimension: int) -> tuple[float, Callable[[], object]]:
    """Return S·d, and how the server adds up and opens the vectors."""
    sessions, group = meet(silos), WordGroup(dimension, 32)
    attempt = RoundAttempt(0, 0, 0, tuple(sessions), "scale")
    seals = {name: own.seal_key(*attempt.use) for name, own in sessions.items()}
    value = np.ones(dimension, "<u4")
    return silos * dimension, lambda: group.center(open_sum([value] * silos, seals, group))


def mask_rows(users: int, dimension: int) -> tuple[float, Callable[[], object]]:
    """Return U·d, and what a silo of `select` does for rows of zeros."""
    keys = np.random.default_rng(0).integers(0, 256, (2, users, 32), np.uint8)
    return users * dimension, lambda: MaskedRows.begin(keys, WordGroup(dimension, 32))


def choose_rows(users: int, dimension: int) -> tuple[float, Callable[[], object]]:
    """Return U·d, and what the server of `select` does with one silo's corrections."""
    keys, sent = (
        np.random.default_rng(0).integers(0, 256, (users, 32), np.uint8),
        bytes(4 * users * dimension),
    )
    bits = np.arange(users) % 2 == 0
    return users * dimension, lambda: add_products(keys, bits, sent, WordGroup(dimension, 32))


def write_checkpoint(dimension: int, folder: Path) -> tuple[float, Callable[[], object]]:
    """Return d, and what writes a model durably."""
    params = torch.randn(dimension)

    def work() -> None:
        save_checkpoint(folder / f"{dimension}", encode_checkpoint(Checkpoint("scale", "0", 1, params)))

    return dimension, work


def account(rounds: Iterator[int]) -> None:
    """Compute ε of sampled rounds, of another number in every turn: what is known is not computed again."""
    compute_epsilon([(PoissonSampled(0.1, Gaussian(5.0)), next(rounds))], 1e-7)


def measure_lattice() -> dict[str, Sizes]:
    """Return the parts of `lattice`; a silo's from whole rounds of benchmarks/lattice.py, which check their sums."""
    parts: dict[str, dict[float, Callable[[], object]]] = {
        "silo": {},
        "request": {},
        "decrypt": {},
        "masks": {},
        "sum": {},
    }
    lattice.round_of(dimension=1000, users=10, count_cap=50)  # imports, and fills caches
    for users, dimension in ((400, 40_000), (1_600, 40_000), (1_600, 80_000)):
        row = lattice.round_of(dimension=dimension, users=users, count_cap=50, dense=True)
        if not row["exact"]:
            raise SystemExit("a sum of lattice is wrong")
        work = Setting(users, 5, dimension).lattice.work
        parts["silo"][work] = partial(float, row["cpu_by_phase"]["silos"] / 5)
    for users, dimension in ((1_000, 4 * 10**5), (2_000, 4 * 10**5), (2_000, 8 * 10**5)):
        p = Setting(users, 5, dimension).lattice
        server, digits = LatticeServer(p), p.digits
        shares, total, other = np.ones(users, np.uint64), digits.zero(), digits.uniform(bytes(32))
        parts["request"][p.polynomials * p.limbs] = partial(server.request, shares, b"scale")
        parts["decrypt"][p.blocks * p.limbs] = partial(server.decrypt, total)
        parts["masks"][digits.size] = partial(digits.mask, other, bytes(32), 1)
        parts["sum"][digits.size] = partial(open_sum, [other], {"silo": bytes(32)}, digits)
    return parts


def list_pieces(folder: Path) -> list[Piece]:
    """Return all parts of a round."""
    stream, enough = Randomness.secret().stream(), (10**5, 10**6)
    of_lattice = measure_lattice()
    words = [(4, 10**6), (8, 10**6), (8, 2 * 10**6)]  # silos, parameters
    table = [(50, 10**5), (200, 10**5), (50, 10**6)]  # persons, parameters
    products = "N · (.4 · log₂N · transforms + .27 · U/U₁ · B · 2K)"
    rows, d, masks, every, once = (
        lambda s: s.rows * s.dimension,
        lambda s: s.dimension,
        lambda s: s.silos * s.dimension,
        lambda s: s.users * s.dimension,
        lambda _: 1,
    )
    return [
        Piece("gradients", "silo", "rows · d", rows, dict(train_rows(64, n) for n in enough)),
        Piece("clip, add", "silo", "rows · d", rows, dict(add_rows(64, n, grid=False) for n in enough)),
        Piece(
            "clip, quantize, add", "silo", "rows · d", rows, dict(add_rows(64, n, grid=True) for n in enough)
        ),
        Piece("Gaussian noise", "silo", "d", d, {n: partial(draw_gaussian, n, 1.0, stream) for n in enough}),
        Piece("Skellam noise", "silo", "d", d, {n: partial(draw_skellam, n, 1e11, stream) for n in enough}),
        Piece("masks and seal", "silo", "S · d", masks, dict(mask(*n) for n in words)),
        Piece("sum, seals opened", "server", "S · d", masks, dict(open_masks(*n) for n in words)),
        Piece("rows masked", "silo", "U · d", every, dict(mask_rows(*n) for n in table)),
        Piece(
            "rows chosen, all silos",
            "server",
            "S · U · d",
            lambda s: s.silos * every(s),
            dict(choose_rows(*n) for n in table),
        ),
        Piece(
            "encryption",
            "server",
            "U/U₁ · K",
            lambda s: s.lattice.polynomials * s.lattice.limbs,
            of_lattice["request"],
        ),
        Piece("products", "silo", products, lambda s: s.lattice.work, of_lattice["silo"]),
        Piece(
            "masks on ciphertexts",
            "silo",
            "S · bytes up",
            lambda s: s.silos * s.lattice.digits.size,
            of_lattice["masks"],
        ),
        Piece(
            "sum, seals of ciphertexts",
            "server",
            "S · bytes up",
            lambda s: s.silos * s.lattice.digits.size,
            of_lattice["sum"],
        ),
        Piece(
            "decryption",
            "server",
            "B · K",
            lambda s: s.lattice.blocks * s.lattice.limbs,
            of_lattice["decrypt"],
        ),
        Piece("checkpoint", "server", "d", d, dict(write_checkpoint(n, folder) for n in (10**6, 10**7))),
        Piece(
            "keys, all silos",
            "once",
            "S²",
            lambda s: s.silos**2,
            {n * n: partial(meet, n) for n in (8, 16, 32)},
        ),
        Piece("ε of 100 rounds", "once", "1", once, {1: partial(account, count(100))}),
    ]


def list_rows(
    setting: Setting, unit: Mapping[str, float], pieces: Mapping[str, Piece]
) -> list[tuple[str, str, str, float]]:
    """Return aggregator, part, party, and seconds of that party in a round."""
    common = ["gradients"]
    of = {
        "plain": ["clip, add", "Gaussian noise", "checkpoint"],
        "masked": ["clip, quantize, add", "Skellam noise", "masks and seal", "sum, seals opened", "checkpoint"],
        "select": ["clip, quantize, add", "Skellam noise", "rows masked", "rows chosen, all silos",
                   "masks and seal", "sum, seals opened", "checkpoint"],
        "lattice": ["clip, quantize, add", "Skellam noise", "encryption", "products", "masks on ciphertexts",
                    "sum, seals of ciphertexts", "decryption", "checkpoint"],
    }  # fmt: skip
    return [
        (aggregator, name, pieces[name].party, unit[name] * pieces[name].work(setting))
        for aggregator, names in of.items()
        for name in common + names
    ]


def list_bytes(setting: Setting) -> list[tuple[str, float, float, float, float]]:
    """Return, for each aggregator, bytes up and down of a silo in a round, and memory of a silo and of the server."""
    d, words, p = setting.dimension, 4 * setting.dimension, setting.lattice
    every = setting.users * words
    limbs = 8 * p.limbs * p.blocks * p.ring_size * 2  # both halves of an answer before low limbs are dropped
    multipliers = 4 * p.batch_polynomials * p.blocks * p.ring_size
    vector = 8 * ((p.sent_bits + 63) // 64) * p.digits.count  # an answer in words
    return [
        # A chunk of rows takes 2^30 bytes at most; a sum of doubles or integers besides.
        ("plain", 8 * d, 4 * d, 2**30 + 8 * d, 8 * d * (setting.silos + 1)),
        ("masked", words, 4 * d, 2**30 + 12 * d, words * (setting.silos + 1) + 8 * d),
        ("select", every + words, 4 * d, every + 12 * d, every + words * (setting.silos + 1)),
        ("lattice", p.digits.size, p.bytes_down, limbs + multipliers, vector * (setting.silos + 1)),
    ]


def simulate(aggregator: Aggregator, setting: Setting) -> float:
    """Return the CPU seconds of a whole round in one process: the last one."""
    rng = np.random.default_rng(0)
    silos = []
    for s in range(setting.silos):
        user = np.flatnonzero(
            (np.arange(setting.users) % setting.silos == s)
            | ((np.arange(setting.users) + 1) % setting.silos == s)
        )
        x = rng.standard_normal((len(user), FEATURES), np.float32)
        silos.append(SiloData(f"silo{s}", x, rng.integers(0, CLASSES, len(user)), user))
    federation = Federation(tuple(silos), setting.users, None, classes=CLASSES)
    passed = [time.process_time()]
    train(
        federation, make_task(setting.dimension), UldpAvg(5.0, 1.0, LocalTraining(0.1)), rounds=ROUNDS,
        aggregator=aggregator, seed=0, callbacks=[lambda _: passed.append(time.process_time())],
    )  # fmt: skip
    return passed[-1] - passed[-2]


def find_floor(setting: Setting) -> tuple[float, float]:
    """Return the seconds that FFTs and matrix products alone take in a `lattice` round of all silos."""
    p, rng = setting.lattice, np.random.default_rng(0)
    half, rows = p.ring_size // 2, 2 * p.limbs
    folded = rng.standard_normal((16, half)) + 1j
    left, right = (rng.standard_normal((half, *shape)) + 1j for shape in ((8, 32), (32, rows)))
    [of_16] = measure({1: partial(fft.fft, folded, axis=-1)}).values()
    [of_256] = measure({1: partial(np.matmul, left, right)}).values()
    batches = -(-p.polynomials // p.batch_polynomials)
    transforms = p.blocks * (p.polynomials + batches * rows) + p.polynomials * rows
    return setting.silos * transforms * of_16 / 16, setting.silos * p.polynomials * p.blocks * of_256 / 256


def write_seconds(seconds: float) -> str:
    """Return seconds in the largest unit below which they are not small."""
    for size, unit in ((86400 * 365, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"


def write_bytes(size: float) -> str:
    """Return bytes in MB, GB or TB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e3:.3g} kB"


def print_table(columns: str, rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table in Markdown, line by line."""
    names = columns.split(" | ")
    print(f"\n| {columns} |\n{'|---' * len(names)}|")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> bool:
    """Print the tables; whether every piece grew as its formula says."""
    torch.set_num_threads(1)
    unit: dict[str, float] = {}
    pieces: dict[str, Piece] = {}
    ratios: list[float] = []

    def measure_pieces() -> Iterator[tuple[str, ...]]:
        with tempfile.TemporaryDirectory() as folder:
            for piece in list_pieces(Path(folder)):
                seconds = measure(piece.sizes)
                growth = [seconds[b] / seconds[a] / (b / a) for a, b in pairwise(seconds)]
                ratios.extend(growth)
                largest = max(seconds)
                unit[piece.name], pieces[piece.name] = seconds[largest] / largest, piece
                numbers = " / ".join(f"{one:.2g}" for one in seconds.values())
                yield piece.name, piece.formula, numbers, " / ".join(f"{one:.2f}" for one in growth)

    def compare_runs() -> Iterator[tuple[str, ...]]:
        for aggregator in (Plain(), Masked()):
            rows = [row for row in list_rows(REDUCED, unit, pieces) if row[0] == aggregator.name]
            total = sum(seconds * (REDUCED.silos if party == "silo" else 1) for _, _, party, seconds in rows)
            whole = simulate(aggregator, REDUCED)
            yield aggregator.name, f"{whole:.3g}", f"{total:.3g}", f"{whole / total:.2f}"

    print_table("piece, measured | grows as | s | growth, measured / formula", measure_pieces())
    print_table(
        "round of 10⁴ · 10 · 10⁵, all parties | simulated, s | sum of pieces, s | ratio", compare_runs()
    )
    print_table(
        "extrapolated to 10⁶ · 100 · 10⁷ | part | formula | one party, one thread",
        (
            (aggregator, f"{name}: {party}", pieces[name].formula, write_seconds(seconds))
            for aggregator, name, party, seconds in list_rows(TARGET, unit, pieces)
        ),
    )
    print_table(
        "once a run | formula | extrapolated",
        (
            (name, pieces[name].formula, write_seconds(unit[name] * pieces[name].work(TARGET)))
            for name in ("keys, all silos", "ε of 100 rounds")
        ),
    )
    print_table(
        "by formula | up, a silo | down, a silo | up at 1 Gbit/s | memory of a silo | of the server",
        (
            (name, write_bytes(up), write_bytes(down), write_seconds(8 * up / 1e9), *map(write_bytes, memory))
            for name, up, down, *memory in list_bytes(TARGET)
        ),
    )
    print_table(
        "`lattice`, d = 10⁶, U = 1,000, 5 silos | FFTs alone, s | matrix products alone, s",
        [
            (
                "by the speed of numpy and scipy",
                *(f"{one:.3g}" for one in find_floor(Setting(1_000, 5, 10**6))),
            )
        ],
    )
    return all(1 / TOLERANCE <= one <= TOLERANCE for one in ratios)


if __name__ == "__main__":
    show_help(__doc__)
    sys.exit(not main())
