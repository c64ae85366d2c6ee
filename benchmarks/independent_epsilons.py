"""Compare the ε that silodp prints with intervals of other programs: docs/independent_epsilons.md.

    python -m venv review && review/bin/pip install --no-deps -r constraints-review.txt
    review/bin/python benchmarks/independent_epsilons.py --silodp PYTHON [--only WORD] [--write FILE]

PYTHON is an interpreter that has silodp: it is asked by its commands, and nothing of it is imported here. The noise
multiplier, rates and numbers of releases of every setting are those that docs/privacy.md states for it, derived here
anew. The exit status is 1 where a printed ε lies below somebody's lower bound, which would be a false guarantee.

Others' programs are dp-accounting (losses rounded down, and up), prv-accountant (one direction: the unit is removed)
and PLD_accounting (random allocation); `integral` is benchmarks/loss_intervals.py. With Skellam noise no program has an
upper bound for d coordinates: `theorem` is the Rényi bound of Agarwal et al. 2021, typed in here, with dp-accounting's
conversion, and the integral is that of one coordinate, which is a lower bound for d.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from loss_intervals import NOTHING, Charges, Coin, Release, bound_epsilon

ROOT = Path(__file__).resolve().parents[1]
HEART, PERSONAL = "examples/heart_disease.toml", "examples/heart_disease_personal.toml"
SECOND_RELEASES = """
import json, sys
from silodp.accounting.accountant import choose_accountant
from silodp.accounting.charges import ChargeCounts
from silodp.config.resolve import load_config
from silodp.runtime.guarantees import count_charges, derive_guarantees
config, further, adversary, *changes = sys.argv[1:]
found = load_config(config, changes)
spec, _ = found.build_public_spec(None)
releases = [("", 0, range(spec.rounds)), ("", 1, range(int(further)))]
charged = count_charges(spec, releases, lambda about, n, release: about.release_events(None, n, release))
accountant = choose_accountant(spec.list_events())
counts = ChargeCounts(spec.noise_delta, accountant, spec.rounds, charged, {}, releases)
print(json.dumps({"epsilon": derive_guarantees(spec, counts)[adversary].cost.epsilon}))
"""
"""What a run states where so many of its rounds were released twice: no command plans for that."""
MARKS = ("<!-- table -->\n", "\n<!-- end of the table -->")


def gaussian(sigma: float) -> Release:
    """Return a Gaussian release with a noise multiplier."""
    return Release(((1 / sigma, 1.0),))


def sampled(q: float, sigma: float) -> Release:
    """Return one on a Poisson sample that nobody knows."""
    return Release(((0.0, 1 - q), (1 / sigma, q)))


def group(k: int, q: float, sigma: float) -> Release:
    """Return one where a person has k records, each drawn with probability q (section 4, G)."""
    return Release(tuple((i / sigma, math.comb(k, i) * q**i * (1 - q) ** (k - i)) for i in range(k + 1)))


def replaced(q: float, sigma: float) -> Release:
    """Return one where what a sampled person adds is replaced (section 4, W)."""
    return Release(((0.0, 1 - q), (1 / sigma, q)), ((0.0, 1 - q), (-1 / sigma, q)))


def skellam(sigma: float, steps: int, q: float = 1.0, shift: int = 1) -> Release:
    """Return integer noise of σ·steps in one coordinate, which a sampled person moves by `shift` times `steps`."""
    moved = ((0.0, 1 - q), (float(shift * steps), q)) if q < 1 else ((float(shift * steps), 1.0),)
    return Release(moved, NOTHING, (sigma * steps) ** 2)


@dataclass(frozen=True)
class Setting:
    """One line of the table.

    Attributes:
        name: What is run, in words.
        adversary: Against whom.
        ask: Arguments of `silodp`; or of `SECOND_RELEASES`, if the first is "second".
        charges: What docs/privacy.md says is released.
        delta: δ.
        find: Takes ε out of the answer.
        kept: The part of δ that no noise is accounted with.
        allocated: σ, b and the number of allocations, for PLD_accounting.
        theorem: (σ, steps, d, q or None, rounds) of every kind of Skellam release.
    """

    name: str
    adversary: str
    ask: tuple[str, ...]
    charges: Charges
    delta: float = 1e-5
    find: Callable[[dict[str, Any]], float] = field(default=lambda found: found["epsilon"])
    kept: float = 0.0
    allocated: tuple[float, int, int] | None = None
    theorem: tuple[tuple[float, int, int, float | None, int], ...] = ()


def list_settings() -> list[Setting]:
    """Return the settings of the table."""
    root = math.sqrt
    settings: list[Setting] = []

    def add(
        name: str, adversary: str, command: str, *charges: tuple[Release | Coin, int], **more: Any
    ) -> None:
        """Add one that `silodp epsilon` is asked about, with options for its adversary and its δ."""
        words = adversary.replace(",", "").split()
        options = ["--adversary", words[-1].rstrip("s") if words[0].isdigit() else words[0]]
        options += ["--colluding", words[0]] if words[0].isdigit() else []
        options += ["--knows-sample"] if "knows" in words else []
        options += ["--delta", str(more.get("delta", 1e-5))]
        if "allocated" in more:
            options += set_all([f'participation={{name="random_allocation",rounds={more["allocated"][1]}}}'])
        ask = ("epsilon", "--method", *command.split(), *options)
        settings.append(Setting(name, adversary, ask, charges, **more))

    # fmt: off
    avg, sgd, naive = (f"uldp-{name} --noise-multiplier" for name in ("avg", "sgd", "naive"))
    # Everyone in each round (section 3).
    add("`uldp-avg`, σ=5, T=100", "released", f"{avg} 5 --rounds 100", (gaussian(5), 100))
    add("the same, S=5", "silo", f"{avg} 5 --rounds 100 --silos 5", (gaussian(5 * root(5 / 4)), 100))
    add("the same, S=10", "4 silos", f"{avg} 5 --rounds 100 --silos 10", (gaussian(5 * root(10 / 6)), 100))
    add("the same, weights by records", "released", f"{avg} 5 --rounds 100 --weighting records", (gaussian(5), 100))
    add("`uldp-sgd`, σ=1, T=1", "server", f"{sgd} 1 --rounds 1", (gaussian(1), 1), delta=1e-3)
    add("`uldp-avg`, σ=50, T=10⁵", "released", f"{avg} 50 --rounds 100000", (gaussian(50), 100_000), delta=1e-12)
    add("`uldp-avg`, σ=.5, T=1", "released", f"{avg} .5 --rounds 1", (gaussian(0.5), 1), delta=1e-9)
    add("`uldp-naive`, σ=5, T=100", "released", f"{naive} 5 --rounds 100", (gaussian(5), 100))
    add("the same, S=5", "2 silos", f"{naive} 5 --rounds 100 --silos 5", (gaussian(5 * root(5 / 3)), 100))
    # Sampled persons (section 3).
    add("`uldp-avg`, σ=5, q=.1, T=100", "released", f"{avg} 5 --rounds 100 --user-sampling .1", (sampled(0.1, 5), 100))
    add("the same, `uldp-sgd`", "server", f"{sgd} 5 --rounds 100 --user-sampling .1", (sampled(0.1, 5), 100))
    add("the same, S=5", "silo", f"{avg} 5 --rounds 100 --user-sampling .1 --silos 5",
        (Coin(0.1, gaussian(5 * root(5 / 4))), 100))
    add("`uldp-avg`, σ=5, q=.5, T=100", "server, knows the sample", f"{avg} 5 --rounds 100 --user-sampling .5",
        (Coin(0.5, gaussian(5)), 100))
    add("`uldp-avg`, σ=2, q=.001, T=10⁴", "released, knows the sample", f"{avg} 2 --rounds 10000 --user-sampling .001",
        (Coin(0.001, gaussian(2)), 10_000), delta=1e-8)
    for sigma, q, rounds, delta in ((1, 0.01, 1000, 1e-5), (0.8, 1e-4, 100_000, 1e-7), (2, 0.5, 30, 1e-3),
                                    (5, 0.01, 10_000, 1e-12), (1, 0.3, 1, 1e-9), (3, 0.9, 1000, 1e-6)):
        add(f"`uldp-avg`, σ={sigma:g}, q={q:g}, T={rounds:,}", "released",
            f"{avg} {sigma} --rounds {rounds} --user-sampling {q}", (sampled(q, sigma), rounds), delta=delta)
    # Groups of records (section 4, G).
    steps = "uldp-group --noise-multiplier 5 --record-sampling .01 --steps 100000 --rounds 1 --silos 1 --group-size"
    for k in (1, 8, 64):
        add(f"`uldp-group`, k={k}, γ=.01, σ=5, 10⁵ steps, S=1", "released", f"{steps} {k}",
            (group(k, 0.01, 5), 100_000))
    steps = "uldp-group --noise-multiplier 2 --record-sampling .05 --steps 20 --rounds 10 --silos 4 --group-size 8"
    add("`uldp-group`, k=8, γ=.05, σ=2, 200 steps, S=4", "released", steps, (group(2, 0.05, 2), 800))
    add("the same", "silo", steps, (group(2, 0.05, 2), 600))
    # A record, with several local steps: σ_total = σ_i·√N and σ_a = 2·σ_total (docs/decoupled.md).
    ddp = "ddp --rounds 10 --noise-multiplier 2 --record-sampling .1 --silos 5 --local-steps"
    total = 2 * root(5)

    def moving(sigma: float) -> float:
        return 1 / root(1 / (2 * total) ** 2 + 1 / sigma**2)

    add("`ddp`, N=5, σ_i=2, q=.1, J=4, T=10", "released", f"{ddp} 4", (sampled(0.1, moving(total)), 30),
        (sampled(0.1, total), 10))
    rest = total * root(3 / 5)
    add("the same", "2 silos", f"{ddp} 4", (sampled(0.1, moving(rest)), 30), (sampled(0.1, rest), 10))
    add("the same, `local`", "released", f"{ddp} 4 --trajectory local", (sampled(0.1, 2), 30),
        (sampled(0.1, total), 10))
    add("the same, J=1", "server", f"{ddp} 1", (sampled(0.1, 2), 10))
    add("the same, a person with 4 records", "released", f"{ddp} 1", (group(4, 0.1, total), 10),
        find=lambda found: next(one["epsilon"] for one in found["persons"] if one["records"] == 4))
    # Two stages, and budgets of records (section 9): q_j is public, and `plan` prints it.
    rpdp = "rpdp --rounds 15 --noise-multiplier 6 --local-steps 50 --record-sampling .05 --client-sampling"
    for chance, adversary in ((0.3, "released"), (0.8, "silo")):
        add(f"`rpdp`, λ={chance}, q=.05, σ=6, τ=50, T=15", adversary, f"{rpdp} {chance} --silos 4",
            (Coin(chance, sampled(0.05, 6), 50), 15), delta=1e-4)
    for place, budget, q in ((0, 0.1, 0.021633389644771274), (2, 5, 0.5827878690329629)):
        settings.append(Setting(
            f"`rpdp`, budget {budget:g}, q={q:.3g}, σ=12.25, τ=50, T=15", "released", ("plan", PERSONAL),
            ((sampled(q, 12.25), 750),), 1e-3, find=partial(find_level, place, q)))
    # Random allocation (section 4, A).
    add("`RandomAllocation(10)`, σ=1, T=20", "released", f"{avg} 1 --rounds 20", allocated=(1.0, 10, 2))
    add("`RandomAllocation(5)`, σ=2, T=10", "server", f"{avg} 2 --rounds 10", allocated=(2.0, 5, 2))
    # Several kinds of releases (sections 10 and 11).
    evaluated = ("evaluation.across=sums", "evaluation.noise_multiplier=4", "evaluation.bins=4", "evaluation.every=10",
                 "method.weighting=uniform")
    for name, adversary, factor, q in (("σ=5, T=50", "released", 1.0, None), ("σ=5, q=.1, T=50", "released", 1.0, 0.1),
                                       ("σ=5, T=50, S=4", "silo", root(4 / 3), None)):
        changes = (*evaluated, *([] if q is None else [f"method.user_sampling={q}"]))
        training = gaussian(5 * factor) if q is None else sampled(q, 5 * factor)
        settings.append(Setting(
            f"`uldp-avg`, {name}, and 5 evaluations, σ=4", adversary, ("plan", HEART, *set_all(changes)),
            ((training, 50), (gaussian(4 * factor), 5)), find=partial(find_adversary, adversary)))
    add("`statistics`, σ=2", "released", "statistics --noise-multiplier 2 --rounds 1", (gaussian(2), 1))
    add("`uldp-avg`, σ=5, q=.1, T=100, another person's id", "released",
        f"{avg} 5 --rounds 100 --user-sampling .1 --silos 4", (replaced(0.1, 5), 100),
        find=partial(find_case, "records filed"))
    add("`uldp-avg`, σ=5, T=100, two ids in every silo", "released", f"{avg} 5 --rounds 100 --silos 4",
        (gaussian(2.5), 100), find=partial(find_case, "two ids in every"))
    # Integer noise (section 3), in steps of the grid; of n answers for m needed the noise is σ√(n/m).
    mask = "--aggregator masked --aggregation units=4096 --dimension 1000"
    add("`masked`, σ=5, T=100, 2¹² steps, d=1,000", "released", f"{avg} 5 --rounds 100 --silos 5 {mask}",
        (skellam(5, 4096), 100), theorem=((5, 4096, 1000, None, 100),))
    add("the same, q=.1", "released", f"{avg} 5 --rounds 100 --user-sampling .1 --silos 5 {mask}",
        (skellam(5, 4096, 0.1), 100), theorem=((5, 4096, 1000, 0.1, 100),))
    honest = 5 * root(5 / 4)
    add("the same, q=1, S=5", "silo", f"{avg} 5 --rounds 100 --silos 5 {mask}", (skellam(honest, 819), 100),
        theorem=((honest, 819, 1000, None, 100),))
    fewer = f"{avg} 5 --rounds 100 --silos 10 --weighting records --aggregation min_silos=5 {mask}"
    add("the same, weights by records, m=5, S=10 answer", "released", fewer, (skellam(5 * root(2), 4096), 100),
        theorem=((5 * root(2), 4096, 1000, None, 100),))
    add("the same, who answers depends on the models", "released", fewer, (skellam(5, 4096), 100),
        find=lambda found: found["any_dropouts"], theorem=((5, 4096, 1000, None, 100),))
    sigma = 5 * 4 / root(3 * 4)
    settings.append(Setting(
        "`masked`, σ=5, q=.1, T=50, m=3, S=4, d=14, two rounds released twice", "released",
        ("second", HEART, "2", "released", "aggregator=masked", "aggregation.min_silos=3", "aggregation.units=4096",
         "method.weighting=uniform", "method.user_sampling=0.1"),
        ((skellam(sigma, 4096, 0.1), 50), (skellam(sigma, 4096), 2)),
        theorem=((sigma, 4096, 14, 0.1, 50), (sigma, 4096, 14, None, 2))))
    # Private weights: δ/100 is kept for ciphertexts; a silo's view moves by two clips (section 4, W).
    private = f"{avg} 5 --rounds 20 --silos 5 --users 100 --dimension 50 --weighting"
    lattice = f"{private} records --aggregator lattice"
    select = f"{private} primary_silo --aggregator select --aggregation units=4096"
    hidden = 5 * root(4 / 5)
    add("`lattice`, σ=5, T=20, S=5, d=50", "released", lattice, (skellam(5, 2**17), 20), kept=0.01)
    add("the same", "silo", lattice, (skellam(hidden, 2**17, shift=2), 20), kept=0.01)
    add("`select`, σ=5, q=.1, T=20, S=5, 2¹² steps, d=50", "released", f"{select} --user-sampling .1",
        (skellam(5, 4096, 0.1), 20), theorem=((5, 4096, 50, 0.1, 20),))
    add("the same", "server", f"{select} --user-sampling .1", (Coin(0.1, skellam(5, 4096)), 20))
    add("the same, q=1", "silo", select, (skellam(hidden, 4096, shift=2), 20),
        theorem=((hidden / 2, 8192, 50, None, 20),))
    # fmt: on
    return settings


def set_all(changes: Sequence[str]) -> tuple[str, ...]:
    """Return the options that change a configuration."""
    return tuple(word for change in changes for word in ("--set", change))


def find_level(place: int, q: float, found: dict[str, Any]) -> float:
    """Return ε of a budget in a plan; the q that was typed in here must be the plan's."""
    level = found["budgets"]["levels"][place]
    assert level["q"] == q, level
    return float(level["epsilon"])


def find_adversary(name: str, found: dict[str, Any]) -> float:
    """Return ε against an adversary in a plan."""
    return float(found["adversaries"][name]["epsilon"])


def find_case(case: str, found: dict[str, Any]) -> float:
    """Return ε of a person who is not recognized."""
    return float(next(one["epsilon"] for one in found["linkage"] if one["case"].startswith(case)))


class Google:
    """Intervals of dp_accounting."""

    name = "dp-accounting"

    def bound(self, setting: Setting) -> tuple[float, float] | None:
        """Return bounds, the lower 0 where rounding down would make it useless; None: it has no such release."""
        from dp_accounting.pld import privacy_loss_distribution as library

        releases = [(one, count) for one, count in setting.charges if isinstance(one, Release)]
        if len(releases) < len(setting.charges) or not releases:
            return None
        if any(one.variance is not None or one.absent != NOTHING for one, _ in releases):
            return None
        total = sum(count for _, count in releases)
        found = []
        for up in (False, True):
            if not up and total > 100:
                found.append(0.0)
                continue
            options = {
                "pessimistic_estimate": up,
                "value_discretization_interval": 2e-4 if up else min(2e-4, 2e-2 / total),
                "use_connect_dots": up,
            }
            composed = None
            for one, count in releases:
                shifts, weights = zip(*one.present, strict=True)
                if len(shifts) > 2:
                    made = library.from_mixture_gaussian_mechanism(1.0, shifts, weights, **options)
                else:
                    made = library.from_gaussian_mechanism(
                        1 / shifts[-1], sampling_prob=weights[-1], **options
                    )
                made = made.self_compose(count)
                composed = made if composed is None else composed.compose(made)
            found.append(composed.get_epsilon_for_delta(setting.delta))
        return found[0], found[1]


class Microsoft:
    """Intervals of prv-accountant, of removing a unit."""

    name = "prv-accountant"

    def bound(self, setting: Setting) -> tuple[float, float] | None:
        """Return bounds; None: it has no such release, or floats are too coarse for this δ."""
        import prv_accountant as library

        if not setting.charges or setting.delta < 1e-9:
            return None
        parts, counts = [], []
        for one, count in setting.charges:
            if (
                isinstance(one, Coin)
                or one.variance is not None
                or one.absent != NOTHING
                or len(one.present) > 2
            ):
                return None
            (shift, weight) = one.present[-1]
            parts.append(
                library.GaussianMechanism(1 / shift)
                if weight == 1
                else library.PoissonSubsampledGaussianMechanism(
                    sampling_probability=weight, noise_multiplier=1 / shift
                )
            )
            counts.append(count)
        accountant = library.PRVAccountant(
            parts, max_self_compositions=counts, eps_error=0.005, delta_error=setting.delta / 1000
        )
        low, _, high = accountant.compute_epsilon(setting.delta, counts)
        return low, high


class Allocation:
    """Intervals of PLD_accounting."""

    name = "PLD_accounting"

    def bound(self, setting: Setting) -> tuple[float, float] | None:
        """Return bounds; None: nothing is allocated."""
        if setting.allocated is None:
            return None
        from PLD_accounting import gaussian_allocation_epsilon_range

        sigma, steps, times = setting.allocated
        high, low = gaussian_allocation_epsilon_range(
            delta=setting.delta, sigma=sigma, num_steps=steps, num_epochs=times, epsilon_accuracy=0.02
        )
        return low, high


class Theorem:
    """The upper bound of Agarwal et al. 2021 (docs/privacy.md, section 3), by dp_accounting's conversion."""

    name = "theorem"

    def bound(self, setting: Setting) -> tuple[float, float] | None:
        """Return 0 and an upper bound; None: no Skellam noise."""
        if not setting.theorem:
            return None
        from dp_accounting.rdp import compute_epsilon

        orders = np.array([*range(2, 257), 512, 1024, 2048, 4096])
        spent = np.zeros(len(orders))
        for sigma, steps, dimension, q, rounds in setting.theorem:
            most = min(math.sqrt(dimension), steps)

            def renyi(a: Any, sigma: float = sigma, s: float = steps, most: float = most) -> Any:
                small = (2 * a - 1) / (4 * s**2 * sigma**4) + 3 * most / (2 * s**3 * sigma**4)
                return a / (2 * sigma**2) + np.minimum(small, 3 * most / (2 * s * sigma**2))

            if q is None:
                spent += rounds * renyi(orders)
                continue
            for place, order in enumerate(orders):
                j = np.arange(2, order + 1)
                terms = (
                    special.gammaln(order + 1) - special.gammaln(j + 1) - special.gammaln(order - j + 1)
                    + (order - j) * math.log1p(-q) + j * math.log(q) + (j - 1) * renyi(j)
                )  # fmt: skip
                start = (order - 1) * math.log1p(-q) + math.log1p((order - 1) * q)
                spent[place] += rounds * special.logsumexp([start, *terms]) / (order - 1)
        return 0.0, float(compute_epsilon(orders, spent, setting.delta)[0])


class Integral:
    """Intervals of loss_intervals.py."""

    name = "integral"

    def bound(self, setting: Setting) -> tuple[float, float] | None:
        """Return bounds; the upper one is infinite for integer noise in d coordinates; None: nothing to integrate."""
        if not setting.charges:
            return None
        low, high = bound_epsilon(setting.charges, setting.delta * (1 - setting.kept))
        release, _ = setting.charges[0]
        noise = release.release if isinstance(release, Coin) else release
        return low, math.inf if noise.variance is not None else high


PROGRAMS = (Integral(), Google(), Microsoft(), Allocation(), Theorem())


def ask_silodp(python: str, setting: Setting) -> float:
    """Return ε as silodp states it."""
    if setting.ask[0] == "second":
        command = [python, "-c", SECOND_RELEASES, *setting.ask[1:]]
    else:
        command = [python, "-m", "silodp", *setting.ask, "--json"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"{setting.name}: {answer.stderr}")
    return setting.find(json.loads(answer.stdout))


def round_out(value: float, up: bool) -> str:
    """Return four decimals, rounded up or down."""
    if math.isinf(value):
        return "–"
    return f"{(math.ceil if up else math.floor)(value * 1e4 - (1e-7 if up else -1e-7)) / 1e4:.4f}"


def format_percent(part: float) -> str:
    """Return two digits of a part, in percent."""
    return "< .001 %" if part < 1e-5 else f"{100 * part:.2g} %"


def main() -> int:
    """Print the table; return 1 where a printed ε is too small."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--silodp", default=sys.executable, metavar="PYTHON", help="an interpreter that has silodp"
    )
    parser.add_argument("--only", default="", help="a word of the settings to try")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [
        "| | setting | against | δ | silodp | at least | at most | by | silodp over the least | over the most |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    wrong = 0
    for number, setting in enumerate(list_settings(), 1):
        if options.only not in f"{setting.name} {setting.adversary}":
            continue
        begun = time.monotonic()
        stated = ask_silodp(options.silodp, setting)
        found, took = {}, {"silodp": round(time.monotonic() - begun)}
        for one in PROGRAMS:
            begun = time.monotonic()
            if (bounds := one.bound(setting)) is not None:
                found[one.name], took[one.name] = bounds, round(time.monotonic() - begun)
        low, high = max(low for low, _ in found.values()), min(high for _, high in found.values())
        below = [name for name, (least, _) in found.items() if stated < least]
        names = ", ".join(found)
        shown = round_out(stated, True)
        over = "–" if math.isinf(high) else "within" if stated <= high else format_percent(stated / high - 1)
        gap = "BELOW" if below else format_percent(float(shown) / float(round_out(low, False)) - 1)
        line = (
            f"| {number} | {setting.name} | {setting.adversary} | {setting.delta:g} | {shown} | "
            f"{round_out(low, False)} | {round_out(high, True)} | {names} | {gap} | {over} |"
        )
        lines.append(line)
        print(line, flush=True)
        print(f"  {took}", found, file=sys.stderr, flush=True)
        if low > high:
            print(f"{setting.name}: the programs contradict each other: {found}", file=sys.stderr, flush=True)
        if below:
            wrong += 1
            print(
                f"FALSE GUARANTEE: {setting.name}: {stated} is below {below}: {found}",
                file=sys.stderr,
                flush=True,
            )
    versions = ", ".join(
        f"{name} {version(name)}"
        for name in ("dp-accounting", "prv-accountant", "PLD_accounting", "numpy", "scipy")
    )
    lines += ["", f"With {versions}."]
    print("\n".join(lines[-2:]))
    if options.write:
        before, begin, rest = options.write.read_text().partition(MARKS[0])
        _, end, after = rest.partition(MARKS[1])
        options.write.write_text("".join([before, begin, "\n", "\n".join(lines), "\n", end, after]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
