"""Attack what others claim, and print the rows of RESULTS.md, section "What others claim".

    python benchmarks/attack_others.py          all rows: about a CPU minute

Opacus is the library itself. The mechanism of a paper is run by silodp with the noise that the paper states; that of a
framework which is not installed here is drawn by its formula. Nothing has a seed, so numbers differ from call to call.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from silodp.accounting.accountant import EventCount, choose_accountant, compute_epsilon
from silodp.accounting.events import Gaussian, PoissonSampled
from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.trade_off import TradeOff, compose_trade_off
from silodp.mechanisms.clipping import Bounds
from silodp.methods.roles import FederationSize
from silodp.training.sgd import LocalTraining
from silodp_audit.attack.audit_run import AttackResult, attack_method
from silodp_audit.attack.evidence import Evidence, NoiseFamily, bound_share, compute_p, weigh_evidence
from silodp_budgets.rpdp.method import Rpdp
from silodp_experiments.uldp_baselines import UldpNaive
from timing import show_help

Scores = NDArray[np.float64]

DELTA, LEVEL = 1e-5, 0.001


@dataclass(frozen=True)
class Claim:
    """One claim, what is proven for it, and what an attack measured.

    Attributes:
        who: Whose claim it is, and about what.
        claimed: The ε that is stated.
        proven: The ε that holds.
        evidence: What the scores say against the claimed curve.
    """

    who: str
    claimed: float
    proven: float
    evidence: Evidence

    def format(self) -> str:
        """Return the line of the table."""
        found = self.evidence
        leak = found.epsilon_lower or 0.0
        says = "contradicted" if found.is_violation else "not contradicted"
        numbers = f"{format_epsilon(self.claimed)} | {format_epsilon(self.proven)} | ≥ {leak:.2f}"
        return f"| {self.who} | {numbers} | {found.auc:.3f}, p = {found.p:.1g} | {says} |"


def spend(charges: list[EventCount], delta: float = DELTA) -> float:
    """Return the ε of charges."""
    return compute_epsilon(charges, delta, choose_accountant(event for event, _ in charges))


def judge(
    who: str,
    members: Scores,
    others: Scores,
    claimed: list[EventCount],
    proven: list[EventCount],
    stated: float | None = None,
) -> Claim:
    """Weigh scores against the curve of what is claimed; the smallest leak is that of what is proven, scaled."""
    found = weigh_evidence(
        members, others, compose_trade_off(claimed), delta=DELTA, family=NoiseFamily(proven), level=LEVEL
    )
    return Claim(who, spend(claimed) if stated is None else stated, spend(proven), found)


# --- the papers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class PaperNaive(UldpNaive):
    """ULDP-NAIVE with the noise of its Theorem 1, which is for an update that moves by C; it moves by 2C."""

    def bounds(self, population: FederationSize) -> Bounds:
        """Return the bounds with half the sensitivity."""
        return replace(super().bounds(population), sensitivity=self.clip)


def attack_naive() -> Claim:
    """Each round of the canary run is a trial of the claim of one round."""
    sigma = 2.0
    result = attack_method(
        PaperNaive(sigma, 1.0, LocalTraining(learning_rate=0.01)), rounds=400, adversaries=("released",)
    )
    claimed: list[EventCount] = [(Gaussian(sigma), 1)]
    who = f"ULDP-FL, Theorem 1 (ULDP-NAIVE), σ = {sigma:g}, one round, a person"
    return judge_again(who, result, compose_trade_off(claimed), spend(claimed), [(Gaussian(sigma / 2), 1)])


def attack_rpdp(budget: float = 0.1, delta: float = 1e-3) -> Claim:
    """Records that ask for ε = 0.1, sampled by the fitted curve (SCF), in the schedule of the paper's heart_disease."""
    method = Rpdp(
        noise_multiplier=1.0, clip=1.0, local_steps=50, rounds=15, delta=delta, expected_batch_size=8.0,
        local_learning_rate=1.0, largest_budget=budget, calibration="scf",
    )  # fmt: skip
    result = attack_method(method, rounds=15, canaries=600, delta=delta, adversaries=("server",))
    (row,) = result.rows
    assert row.promise is not None
    who = f"rPDP-FL, fitted curve (SCF), T = 15, τ = 50, σ = 1, δ = {delta:g}, a record that asks for {budget:g}"
    return judge_again(who, result, TradeOff.of_pair(budget, delta), budget, list(row.promise.charges))


def judge_again(
    who: str, result: AttackResult, claim: TradeOff, claimed: float, proven: list[EventCount]
) -> Claim:
    """Return what the scores of a canary run say against another claim than that of silodp."""
    (row,) = result.rows
    assert row.measured is not None
    family, measured = NoiseFamily(proven), row.measured
    p = compute_p(measured.wins, measured.pairs, claim.auc)
    factor = family.find_factor(bound_share(measured.wins, measured.pairs, LEVEL)[0])
    leak = family.compute_epsilon(result.delta, factor) if factor else 0.0
    found = replace(measured, p=p, is_violation=p < LEVEL, epsilon_lower=leak)
    return Claim(who, claimed, spend(proven, result.delta), found)


# --- frameworks -----------------------------------------------------------------------------------------------------


def attack_opacus(poisson: bool, records: int = 2000, batch: int = 50, epochs: int = 10) -> Claim:
    """Train by Opacus on records that each own a coordinate; as many coordinates belong to nobody.

    The attacker sees every model. Where batches follow the order of the file, they know in which batch a record is.
    """
    from opacus import PrivacyEngine

    model = torch.nn.Linear(2 * records, 1, bias=False)
    x = torch.eye(records, 2 * records)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        poisson_sampling=poisson,
    )  # fmt: skip
    before, steps = model.weight.detach().clone(), []
    for _ in range(epochs):
        for (some,) in loader:
            optimizer.zero_grad()
            # Of a record's output the gradient is 1e4 in its own coordinate alone, so the clip bounds it.
            (-1e4 * private(some)).mean().backward()
            optimizer.step()
            after = model.weight.detach().clone()
            steps.append(((after - before) * batch).flatten().double().numpy())
            before = after
    sums, rate = np.stack(steps), batch / records  # (T, 2n): the noisy sums, in clips
    if poisson:
        scores = np.log1p(rate * np.expm1(sums - 0.5)).sum(axis=0)
    else:
        place = np.tile(np.arange(records) // batch, 2)  # the batch of a record, or of one in its place
        scores = sums.reshape(epochs, records // batch, -1).sum(axis=0)[place, np.arange(2 * records)]
    sampled: list[EventCount] = [(PoissonSampled(rate, Gaussian(1.0)), len(steps))]
    proven: list[EventCount] = sampled if poisson else [(Gaussian(1.0), epochs)]
    how = "Poisson samples" if poisson else "poisson_sampling=False, batches in the order of the file"
    who = f"Opacus, {how}, a record"
    return judge(who, scores[:records], scores[records:], sampled, proven, engine.get_epsilon(DELTA))


def attack_flower(clients: int = 2000) -> Claim:
    """`LocalDpMod` by its formula: clients clip to 1, and add noise for a sensitivity that nobody compares with it."""
    epsilon, sensitivity = 0.9, 0.1
    std = sensitivity * math.sqrt(2 * math.log(1.25 / DELTA)) / epsilon
    noise = np.random.default_rng().normal(0, std, (2, clients))
    claimed: list[EventCount] = [(Gaussian(std / sensitivity), 1)]
    who = "Flower, `LocalDpMod` with sensitivity 0.1 under clip 1 (by its formula), a client"
    return judge(who, 1 + noise[0], noise[1], claimed, [(Gaussian(std), 1)], epsilon)


def list_claims() -> Iterator[Claim]:
    """Yield the claims as they are attacked."""
    yield attack_naive()
    yield attack_rpdp()
    yield attack_opacus(True)
    yield attack_opacus(False)
    yield attack_flower()


def main() -> None:
    """Attack, and print the table."""
    # Of Opacus: inputs need no gradient here, and its generator is not that of a release.
    for message in ("Full backward hook", "Secure RNG"):
        warnings.filterwarnings("ignore", message=message)
    print("| claim | ε claimed | proven | leaks | area and p under the claim | the claim is |")
    print("|---|---|---|---|---|---|")
    for claim in list_claims():
        print(claim.format(), flush=True)


if __name__ == "__main__":
    show_help(__doc__)
    main()
