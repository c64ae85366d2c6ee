"""ULDP-AVG and ULDP-SGD: train, clip and weight per person."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from silodp.accounting.accountant import Accountant
from silodp.accounting.events import (
    Event,
    Gaussian,
    NonPrivate,
    PoissonSampled,
    RevealedSample,
    SampledReplacement,
)
from silodp.accounting.guarantee import Unit, View
from silodp.data.federation import Federation
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Bounds, ClippedRowStream, check_clip, clip_rows
from silodp.mechanisms.sampling import check_probability, draw_poisson_sample
from silodp.methods import weighting
from silodp.methods.base import (
    BaseMethod,
    EventsBySurvivors,
    LocalContext,
    Population,
    check_local,
    check_noise_multiplier,
    check_server,
)
from silodp.methods.user_budgets import BudgetCalibration, UserBudgets
from silodp.training.sgd.local import LocalTraining, user_updates


@dataclass(frozen=True)
class UldpAvg(BaseMethod):
    """Δ_s = Σ_u w[s,u]·clip_C(local training on u's records in s) + N(0, (σC/√S)²) (ULDP-FL, Algorithms 3 and 4).

    The sum over silos has sensitivity C, because Σ_s w[s,u] ≤ 1, and noise σC; `noise_multiplier` is σ.
    `user_sampling` q: one coin per person and round, for all silos together. `personal`: how every person's own budget
    is met, by a q_u or a clip of her own; None: all are treated alike.
    """

    noise_multiplier: float
    clip: float
    local: LocalTraining = field(default_factory=lambda: LocalTraining(learning_rate=0.01))
    weighting: weighting.Weighting = "uniform"
    user_sampling: float = 1.0
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0
    personal: UserBudgets | None = None

    name: str = field(default="uldp-avg", init=False)
    unit: Unit | None = field(default="user", init=False)
    clips_records: bool = field(default=False, init=False, repr=False)
    # Found from the constants above and the run's (`calibrated`); what is replaced begins without.
    allowances: BudgetCalibration | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_clip(self.clip)
        check_probability("user_sampling", self.user_sampling)
        check_local(self.local)
        check_server(self.server_learning_rate, self.server_momentum)
        if self.weighting not in ("uniform", "records"):
            raise SilodpError(
                f"weighting = '{self.weighting}' is not known: use 'uniform' or 'records'.",
                code="argument.value",
                field="weighting",
            )
        if self.personal is not None and not isinstance(self.personal, UserBudgets):
            raise SilodpError(
                f"personal is a {type(self.personal).__name__}: set a UserBudgets(by=..., rounds=...), or None.",
                code="argument.type",
                field="personal",
            )
        if self._own_rates and self.user_sampling != 1:
            raise SilodpError(
                f"user_sampling = {self.user_sampling} and personal.by = 'sampling': leave user_sampling out, since "
                "every person has a rate of her own (their mean is personal.mean_sampling).",
                code="argument.conflict",
                field="user_sampling",
            )

    @property
    def _own_rates(self) -> bool:
        return self.personal is not None and self.personal.by == "sampling"

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Who learns what of persons' budgets."""
        return () if self.personal is None else self.personal.assumptions

    @property
    def max_rounds(self) -> int | None:
        """The rounds that persons' budgets are for."""
        return None if self.personal is None else self.personal.rounds

    def check(self, federation: Federation, rounds: int, delta: float) -> None:
        """Budgets that are to be met must be there, and last."""
        if self.personal is None:
            return
        if federation.user_budgets is None:
            raise SilodpError(
                f"{self.name} has personal budgets to meet, and the federation has none: give one ε for every person "
                "(Federation.user_budgets), or leave personal out.",
                code="data.budgets",
                field="personal",
            )
        if rounds > self.personal.rounds:
            raise SilodpError(
                f"rounds = {rounds}: persons' budgets are met over {self.personal.rounds}; take no more, or raise "
                "personal.rounds, which every budget then has to last for.",
                code="argument.conflict",
                field="rounds",
            )

    def calibrated(self, costs: EventsBySurvivors, population: Population, delta: float) -> Self:
        """Knowing everyone's q_u or C_u."""
        if self.personal is None:
            return self
        cases = {
            adversary: [(view, event, self.dp_event(view)) for view, event in known]
            for adversary, known in costs.items()
        }
        method = replace(self)
        own = None if population.budgets is None else np.array(population.budgets)
        object.__setattr__(method, "allowances", BudgetCalibration.of(self.personal, cases, own, delta))
        return method

    def event_for_largest_budget(self, event: Event, view: View) -> Event:
        """With the q_u or C_u of a person with the largest budget."""
        if self.allowances is None:
            return event
        return self.allowances.event_for_largest_budget(event, self.dp_event(view), view)

    def _own(self, population: Population) -> np.ndarray:
        if self.allowances is None or population.budgets is None:
            raise SilodpError(
                "persons' budgets were not turned into rates or clips: give the method to silodp.train, or its setting "
                "to federation.aggregation.calibrated first.",
                code="method.not_set_up",
            )
        return self.allowances.parameters(np.array(population.budgets))

    @property
    def needs_counts(self) -> bool:
        """Weights by records need n[s,u]."""
        return self.weighting == "records"

    def allotments(
        self, counts: np.ndarray | None, population: Population, stream: np.random.Generator
    ) -> np.ndarray:
        """w[s,u]."""
        if self.weighting == "uniform":
            return weighting.weigh_uniformly(population.silos, population.users)
        if counts is None:
            raise SilodpError(
                "weighting = 'records' needs the record counts of every silo: none were given.",
                code="method.not_set_up",
            )
        return weighting.weigh_by_records(counts)

    @property
    def draws_users(self) -> bool:
        """By the one rate, or by everyone's own."""
        return self._own_rates or self.user_sampling != 1

    @property
    def allotment_dtype(self) -> str:
        """Weights."""
        return "float64"

    def allotment_problem(
        self, allotment: np.ndarray, counts: np.ndarray, population: Population, silo: int
    ) -> str | None:
        """Uniform weights are 1/S, and weights by records at most 1 where there are records, 0 elsewhere."""
        if self.weighting == "uniform":
            due = weighting.weigh_uniformly(population.silos, population.users)[silo]
            return None if np.array_equal(allotment, due) else f"is not 1/{population.silos} for every person"
        if not ((allotment >= 0) & (allotment <= 1)).all():
            return "is not between 0 and 1 for every person"
        return "weights a person who has no record here" if (allotment[counts == 0] != 0).any() else None

    def sample(self, population: Population, stream: np.random.Generator) -> np.ndarray | None:
        """One coin per person and round."""
        if self._own_rates:
            return draw_poisson_sample(population.users, self._own(population), stream)
        return (
            None
            if self.user_sampling == 1
            else draw_poisson_sample(population.users, self.user_sampling, stream)
        )

    def silo_update(self, work: LocalContext) -> ClippedRowStream:
        """clip_C(Δ[s,u]) for every u, or to her own clip; people of weight or clip 0 this round are not trained."""
        present = work.allotment[work.user] > 0
        own: Tensor | None = None
        if self.personal is not None and self.personal.by == "clip":
            own = torch.from_numpy(self._own(work.population))
            present = present & (own > 0)[work.user]
        deltas = user_updates(
            work.task,
            work.params,
            work.x[present],
            work.y[present],
            work.user[present],
            self.local,
            work.randomness.torch("batches"),
        )
        rows = (
            clip_rows(users, delta, self.clip, None if own is None else own[users.to(own.device)])
            for users, delta in deltas
        )
        return ClippedRowStream(rows, work.task.size, self.bounds(work.population), weighted=True)

    def bounds(self, population: Population) -> Bounds:
        """A person's rows, weighted, add to at most C over all silos."""
        share = self.share_multiplier(population.m)
        spread_over = population.silos if self.weighting == "uniform" else 1
        return Bounds(self.clip, self.clip, share, population.users * self.clip, spread_over=spread_over)

    def share_multiplier(self, shares_for: int) -> float:
        """One silo's noise in units of C, when m shares are to add to σ."""
        return self.noise_multiplier / math.sqrt(shares_for)

    def server_scale(self, population: Population) -> float:
        """1/(q·U·S): an expected, public number of participants, never the realized one, nor the mean of all q_u."""
        mean = None if self.personal is None else self.personal.mean_sampling
        q = self.user_sampling if mean is None else mean
        return 1.0 / (q * population.users * population.silos)

    def dp_event(self, view: View) -> Event:
        """Return the event of one round (docs/privacy.md, section 3).

        With per-user budgets it is the event of a person who is always in, with the whole clip.
        """
        if self.noise_multiplier == 0:
            return NonPrivate("noise_multiplier is 0")
        if view.counts_disclosed and self.needs_counts:
            return NonPrivate(
                "counts disclosed: weighting by records in clear shows it each person's record counts"
            )
        share = self.share_multiplier(view.m)
        uniform = self.weighting == "uniform"
        if view.adversary == "silo":
            others = view.n - view.colluding
            if others < 1:
                return NonPrivate("no silo is left whose noise the colluding silos do not know")
            if uniform:
                # What they do not know moves by others/S at most; costliest if they are not in the sum themselves.
                others = min(view.n, view.silos - view.colluding)
                reach = others / view.silos
            else:
                # Emptying the other silos raises the weight of a person's own update, hidden from them but known to be
                # theirs: Σ_s w[s,u]·(Δ[s,u] − Δ[own,u]) moves by up to 2.
                if (self.user_sampling < 1 or self._own_rates) and not view.knows_sample:
                    return SampledReplacement(self.user_sampling, Gaussian(share * math.sqrt(others)))
                reach = 2.0
            seen = Gaussian(share * math.sqrt(others) / reach)
        elif view.sees_shares:
            # √Σ_s w[s,u]²: 1/√S for uniform weights; 1 when all of someone's records lie in one silo.
            spread = 1 / math.sqrt(view.silos) if uniform else 1.0
            seen = Gaussian(share / spread)
        else:
            # Uniform weights: each of the n silos in the sum carries 1/S of the clip. By records, one may carry all.
            reach = view.n / view.silos if uniform else 1.0
            seen = Gaussian(share * math.sqrt(view.n) / reach)
        if self.user_sampling == 1:
            return seen
        sampled = RevealedSample if view.knows_sample else PoissonSampled
        return sampled(self.user_sampling, seen)

    def groups(
        self,
        view: View,
        budgets: Sequence[np.ndarray],
        joined: np.ndarray,
        rounds: int,
        delta: float,
        accountant: Accountant,
    ) -> tuple[dict[str, Any], ...]:
        """One entry for each budget that persons have (see `BudgetCalibration.groups`)."""
        if self.allowances is None:
            return ()
        return self.allowances.groups(view.adversary, np.concatenate(budgets), rounds, delta, accountant)


@dataclass(frozen=True)
class UldpSgd(UldpAvg):
    """ULDP-SGD is ULDP-AVG with one full-batch step of unit size: Δ[s,u] = −∇ on u's records in s."""

    local: LocalTraining = field(
        default_factory=lambda: LocalTraining(learning_rate=1.0, epochs=1, batch_size=None), init=False
    )
    name: str = field(default="uldp-sgd", init=False)
