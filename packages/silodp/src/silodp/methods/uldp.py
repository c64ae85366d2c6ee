"""ULDP-AVG and ULDP-SGD: train, clip and weight per person."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

import numpy as np

from silodp._lazy import torch
from silodp.accounting import events
from silodp.accounting.views import Unit, View
from silodp.assumption import ID_GIVERS, Assumption
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Bounds, ClippedRowStream, clip_rows
from silodp.methods import base, roles
from silodp.methods.participation import ALWAYS, Always, Participation, Poisson
from silodp.methods.server_optimizer import NoiseAware
from silodp.settings import Clip, Count, Help, NoiseMultiplier, Positive, Probability, Settings
from silodp.training import sgd
from silodp.training.sgd import LocalTraining

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.training.task import Task


MIN_GRADIENT_NORM = 0.01
"""A gradient norm. With `step`, an update is scaled to norm 1 unless it is shorter than one local step along a gradient
of this norm; then it stays shorter than 1 in proportion. Such an update consists mostly of rounding errors, and scaled
to norm 1 it would move the model as far as the updates of users who still learn. The value is that of AUTO-S (Bu et
al., Automatic Clipping, 2023)."""

GRADIENT_CLIP = 0.5
"""The clip of a gradient where nobody says how far the model moves, and the noise of a round is not much shorter than
the updates of all persons together can be. Rows of one length would make the mean prediction wrong, and with long rows
the noise is longer (benchmarks/defaults.py)."""
_SHORT_NOISE, _MOST_CLIP = 0.2, 8.0
"""Where the noise is shorter than this part of what all updates can be, gradients are clipped less, by the root of the
ratio, and at most this many times less."""
_OF_PAIRS = 0.2
"""The part of that clip for a loss that compares the records of a person (Cox): where events are rare most gradients
are 0 and the others short, so that a longer clip would only make them small beside the noise."""

Weighting = Literal["uniform", "present", "records", "primary_silo"]
"""How a person's weight of 1 is divided among the silos (docs/privacy.md, section 2)."""

_DISCLOSED = {
    "present": "in which silos each person has records",
    "records": "how many records each person has in each silo",
    "primary_silo": "how many records each person has in each silo",
}


@dataclass(frozen=True)
class VerifiedIds(Settings, prefix="verified."):
    """Weights where only some ids are known to be one person in all silos (docs/privacy.md, section 10).

    A person may have one verified id, and beside it one other id in every silo that nobody links: their weights add to
    λ + S·(1 − λ)/S = 1.

    Attributes:
        users: The number K of verified ids, public: the users 0 to K − 1.
        share: λ, the weight of a verified id over all silos, below 1. Every other id weighs (1 − λ)/S in each silo.
    """

    users: Count
    share: Probability = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share == 1:
            raise base.conflict_error(
                "verified.share = 1 leaves no weight for the other ids: take less than 1.", "verified.share"
            )

    def divide(self, weights: np.ndarray) -> np.ndarray:
        """Return λ·w[s,u] for verified ids and (1 − λ)/S for the others.

        Args:
            weights: The weights w[s,u] of a rule, (S, U) float64.

        Returns:
            The weights (S, U) float64.
        """
        verified = np.arange(weights.shape[1]) < self.users
        return np.where(verified, self.share * weights, self._weigh_others(len(weights)))

    def _weigh_others(self, silos: int) -> float:
        """Return (1 − λ)/S, rounded down, so that rounding does not take a person's ids above 1."""
        return float(np.nextafter((1 - self.share) / silos, 0))

    def check(self, weights: np.ndarray, silos: int) -> str | None:
        """Return what is wrong with the weights (U,) of one of S silos, as the end of a sentence; None: nothing."""
        # A person may have one of the other ids in every silo, so each silo keeps its S-th part.
        most = np.where(np.arange(len(weights)) < self.users, self.share, self._weigh_others(silos))
        return "is above what its id may weigh (verified.share)" if (weights > most).any() else None


@dataclass(frozen=True, repr=False)
class UldpAvg(base.Method):
    """Δ_s = Σ_u w[s,u]·clip_C(local training on u's records in s) + N(0, (σC/√S)²).

    The sum over silos has sensitivity C, because Σ_s w[s,u] ≤ 1, and noise σC.

    How far the model moves is said in one of three ways. By default updates are clipped by `gradient_clip`, and the
    server optimizer is `NoiseAware`: the more of the sums is noise, the less the model moves. With `step` every update
    Δ is scaled to norm 1 (to ‖Δ‖/ν if ‖Δ‖ < ν = .01 × the local learning rate), and the model moves by their mean times
    `step`. With `clip` and `server_learning_rate` (the papers' way) updates are only shortened; the longest move is
    then server_learning_rate·clip/S.

    Attributes:
        noise_multiplier: The multiplier σ of the sum over all silos, in units of the clip.
        clip: The 2-norm C that a person's update is clipped to; 1 with `step` and `gradient_clip`.
        local: The training on one person's records.
        weighting: How a person's weight of 1 is divided. "uniform": w[s,u] = 1/S; "present": 1 over the number of silos
            in which u has records, in these silos; "records": n[s,u]/N[u]; "primary_silo": 1 in the silo with most of
            u's records (the first of equals).
        user_sampling: The probability q of the coin for every person and round, one for all silos together.
        participation: The rule by which persons take part in rounds, drawn for all silos together; `Poisson(q)` is the
            same as `user_sampling = q`. None: the rule of `user_sampling`.
        personal: How every person's own budget is met, by their own q_u or clip; None treats all alike.
        step: The longest move of the model in a round, in its parameters' units: that of a round for which all
            persons' updates have one direction. 1 if neither `step` nor `clip` is given, and a momentum or a server
            optimizer that knows nothing of noise is.
        gradient_clip: The norm G of a gradient to which updates are clipped, once for every local epoch and for the
            local learning rate η: they are divided by max(‖Δ‖, η·epochs·G). Where the noise of a round is short, G is
            larger, and for a Cox loss a fifth (`find_clip`). .5 if neither `step` nor `clip` is given.
        verified: Which ids are one person in all silos, and their weight beside the ids that nobody links; None: a
            person has one id.

    Source: ULDP-FL (Kato et al. 2024), Algorithms 3 and 4, weights by records: Eq. 3; .01 is the γ of AUTO-S (Bu et al.
    2023, Automatic Clipping). The events against silos and shares are not in the paper: docs/privacy.md, section 3.
    """

    noise_multiplier: NoiseMultiplier
    clip: Clip = field(default=None)  # type: ignore[assignment]  # `__post_init__` puts a number in the place of None
    local: LocalTraining = field(default_factory=lambda: LocalTraining(learning_rate=0.01))
    weighting: Annotated[Weighting, Help("Weights of a person in the silos.")] = "uniform"
    user_sampling: Annotated[Probability, Help("Sampling probability q of a person in a round.")] = 1.0
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0
    personal: roles.PersonalBudgets | None = None
    step: Positive | None = field(default=None, metadata=base.OMIT_NONE)
    gradient_clip: Positive | None = field(default=None, metadata=base.OMIT_NONE)
    verified: VerifiedIds | None = field(default=None, metadata=base.OMIT_NONE)
    participation: Participation | None = field(default=None, metadata=base.OMIT_NONE)

    name: str = field(default="uldp-avg", init=False)
    unit: Unit | None = field(default="user", init=False)
    # Found from the constants above and the run's (`calibrate`); a copy made by `replace` begins without.
    budget_calibration: roles.UnitBudgets | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is None and self.step is None and self.gradient_clip is None:
            self._take_defaults()
        for name in ("step", "gradient_clip"):
            if getattr(self, name) is not None:
                self._check_alone(name)
                object.__setattr__(self, "clip", 1.0)
        if self.gradient_clip is not None and self.server_optimizer is None:
            object.__setattr__(self, "server_optimizer", NoiseAware())
        if self._own_rates and self.user_sampling != 1:
            raise base.conflict_error(
                f"user_sampling = {self.user_sampling} and personal.by = 'sampling': leave user_sampling out, since "
                "every person has their own rate (their mean is personal.mean_sampling).",
                "user_sampling",
            )
        if self.participation is not None and (self.user_sampling != 1 or self.personal is not None):
            raise base.conflict_error(
                f"participation and {'user_sampling' if self.personal is None else 'personal'}: both say who takes "
                "part in a round; leave one out.",
                "participation",
            )
        if self.participation is not None and type(self.participation) in (Always, Poisson):
            # One way to write a coin, so that equal methods have equal settings.
            object.__setattr__(self, "user_sampling", self.participation.rate)
            object.__setattr__(self, "participation", None)
        if self.verified is not None:
            self._check_verified()

    def _take_defaults(self) -> None:
        """Set how far the model moves, where neither `step` nor `clip` says it."""
        if self.server_learning_rate != 1:
            raise base.conflict_error(
                f"server_learning_rate = {self.server_learning_rate:g} without clip: give clip as well, or step "
                "instead of both.",
                "clip",
            )
        optimizer = self.server_optimizer
        if self.server_momentum != 0 or (optimizer is not None and not optimizer.needs_noise):
            object.__setattr__(self, "step", 1.0)
        else:
            object.__setattr__(self, "gradient_clip", GRADIENT_CLIP)

    def _check_alone(self, name: str) -> None:
        """Refuse another setting of how far the model moves beside this one."""
        others = {
            "step": name != "step" and self.step is not None,
            "clip": self.clip not in (None, 1.0),
            "server_learning_rate": self.server_learning_rate != 1,
        }
        for other, is_set in others.items():
            if is_set:
                raise base.conflict_error(
                    f"{name} = {getattr(self, name):g} and {other}: give {name} alone, or clip and "
                    "server_learning_rate without it.",
                    name,
                )

    def _check_verified(self) -> None:
        if self.weighting == "uniform":
            raise base.conflict_error(
                "verified and weighting = 'uniform': uniform weights need no verified ids; leave verified out, or take "
                "weighting = 'primary_silo'.",
                "verified",
            )
        # The ids of one person would have a coin, or a budget, each.
        set_beside = [
            name
            for name, is_set in (
                ("user_sampling", self.user_sampling != 1),
                ("participation", self.participation is not None),
                ("personal", self.personal is not None),
            )
            if is_set
        ]
        if set_beside:
            raise base.conflict_error(
                f"verified and {set_beside[-1]}: a person with several ids "
                "would be sampled, or have a budget, by each of them, which is not proven; leave one out.",
                "verified",
            )

    @property
    def _own_rates(self) -> bool:
        return self.personal is not None and self.personal.by == "sampling"

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions about persons' budgets, and about their ids."""
        if self.verified is not None:
            return (
                Assumption(
                    "verified-ids",
                    f"a person has at most one of the first {self.verified.users} ids, which are verified, and beside "
                    "it at most one other id in each silo",
                    ID_GIVERS,
                ),
            )
        return () if self.personal is None else self.personal.assumptions

    # --- Budgets of single persons ---

    budgets_of: ClassVar[Unit | None] = "user"
    can_isolate_units: ClassVar[bool] = True
    can_split: ClassVar[bool] = True

    @property
    def budgets(self) -> roles.UnitBudgets:
        """The persons' budgets, where `personal` is set."""
        if self.personal is None:
            return roles.NO_BUDGETS
        return self.budget_calibration or roles.UnitBudgets(**self.personal.role)

    def without_budgets(self) -> Self:
        """Return the method without `personal`."""
        return replace(self, personal=None)

    def check(self, data: PublicData, rounds: int, delta: float) -> None:
        """Check that there are as many ids as are verified, and that budgets to be met are there for all rounds."""
        if self.verified is not None and data.users is not None and self.verified.users > data.users:
            raise SilodpError(
                f"verified.users = {self.verified.users}, and the federation has {data.users} users: take at most as "
                "many.",
                code="argument.value",
                field="verified.users",
            )
        if self.personal is None:
            return
        if data.user_budgets is None:
            raise SilodpError(
                f"{self.name} has personal budgets to meet, and the federation has none: give one ε for every person "
                "(Federation.user_budgets), or leave personal out.",
                code="data.budgets",
                field="personal",
            )
        if rounds > self.personal.rounds:
            raise base.conflict_error(
                f"rounds = {rounds}: persons' budgets are met over {self.personal.rounds}; take no more, or raise "
                "personal.rounds, which every budget then has to last for.",
                "rounds",
            )

    def calibrate(
        self, costs: roles.EventsBySurvivors, population: roles.FederationSize, delta: float
    ) -> Self:
        """Return the method with everyone's q_u or C_u."""
        if self.personal is None:
            return self
        # A copy, because frozen: `replace` leaves the calibration out, which is set below.
        method = replace(self)
        own = None if population.budgets is None else np.array(population.budgets)
        found = self.personal.calibrate(costs, self.dp_event, own, delta)
        object.__setattr__(method, "budget_calibration", found)
        return method

    def _find_own_parameters(self, population: roles.FederationSize) -> np.ndarray:
        if self.budget_calibration is None or population.budgets is None:
            raise SilodpError(
                "the per-user privacy budgets were not turned into sampling probabilities or clips: give the method to "
                "silodp.train, or to prepare_run first.",
                code="method.not_set_up",
            )
        return self.budget_calibration.parameters(np.array(population.budgets))

    # --- Weights and samples ---

    @property
    def needs_counts(self) -> bool:
        """Whether weights depend on records, as all but uniform ones do."""
        return self.weighting != "uniform"

    @property
    def weight_rule(self) -> roles.WeightRule | None:
        """The rule of private weighting; weights by presence are by records of which each silo has one."""
        if self.weighting == "uniform" or self.verified is not None:
            return None
        return "primary_silo" if self.weighting == "primary_silo" else "shares"

    def count_for_weights(self, counts: np.ndarray) -> np.ndarray:
        """Return the counts, or 1 for each that is above 0 where only presence matters."""
        return np.minimum(counts, 1) if self.weighting == "present" else counts

    def user_weights(self, counts: np.ndarray | None, population: roles.FederationSize) -> np.ndarray:
        """Return w[s,u], (S, U) float64."""
        if self.weighting == "uniform":
            return np.broadcast_to(
                roles.uniform_weight(population.silos), (population.silos, population.users)
            )
        if counts is None:
            raise SilodpError(
                f"weighting = '{self.weighting}' needs the record counts of every silo: none were given.",
                code="method.not_set_up",
            )
        counted = self.count_for_weights(counts)
        by_rule = (
            roles.weigh_primary_silo(counted)
            if self.weighting == "primary_silo"
            else roles.weigh_by_records(counted)
        )
        if self.verified is None:
            return by_rule
        return np.where(counts > 0, self.verified.divide(by_rule), 0.0)

    @property
    def allows_several_ids(self) -> bool:
        """Whether a person may have other ids beside a verified one."""
        return self.verified is not None

    def check_weights(
        self, weights: np.ndarray, counts: np.ndarray, population: roles.FederationSize
    ) -> str | None:
        """Check that weights are at most 1 with records, and 0 without; all or nothing with "primary_silo"."""
        problem = super().check_weights(weights, counts, population)
        if problem is None and (weights[counts == 0] != 0).any():
            problem = "is for a person who has no record here"
        whole, meaning = 1.0, "1"
        if problem is None and self.verified is not None:
            problem = self.verified.check(weights, population.silos)
            weights = weights[: self.verified.users]
            whole, meaning = self.verified.share, "verified.share"
        if problem is None and self.weighting == "primary_silo" and not np.isin(weights, (0.0, whole)).all():
            problem = f"is neither 0 nor {meaning}"
        return problem

    @property
    def participation_rule(self) -> Participation:
        """The rule of `participation`, or that of `user_sampling`."""
        if self.participation is not None:
            return self.participation
        # Persons with their own rates have coins, though of no common rate.
        return Poisson(self.user_sampling) if self.user_sampling != 1 or self._own_rates else ALWAYS

    @property
    def common_sampling_rate(self) -> float | None:
        """The rate of the rule; None where everyone has their own."""
        return None if self._own_rates else self.participation_rule.rate

    @property
    def mean_sampling(self) -> float:
        """q, or the public mean of persons' own rates."""
        mean = None if self.personal is None else self.personal.mean_sampling
        return mean or super().mean_sampling

    def sampling_rates(self, population: roles.FederationSize) -> float | np.ndarray:
        """Return q, or everyone's own q_u (U,)."""
        rate = self.common_sampling_rate
        return self._find_own_parameters(population) if rate is None else rate

    # --- A round ---

    def local_update(self, context: base.LocalContext) -> ClippedRowStream:
        """Train for every person, and clip to C or their own clip; those of weight or clip 0 are left out."""
        # Nobody trains for users who are not in the sample: their rows would be multiplied by 0.
        present = context.weights[context.user] > 0
        own: Tensor | None = None
        if self.personal is not None and self.personal.by == "clip":
            own = torch.from_numpy(self._find_own_parameters(context.population))
            present = present & (own > 0)[context.user]
        deltas = sgd.compute_updates(
            context.task,
            context.params,
            context.x[present],
            context.y[present],
            context.user[present],
            self.local,
            context.randomness.torch("batches"),
            isolate_units=context.isolate_units,
        )
        rows = (
            clip_rows(
                users,
                delta,
                self.clip,
                clip_fraction=None if own is None else own[users.to(own.device)],
                min_norm=self._find_min_norm(context.task, context.population),
            )
            for users, delta in deltas
        )
        return ClippedRowStream(rows, context.task.size, self.bounds(context.population), weighted=True)

    def _find_min_norm(self, task: Task, population: roles.FederationSize) -> float | None:
        """Return the norm from which on updates have the norm 1, and below which they are shorter in proportion."""
        if self.gradient_clip is not None:
            return self.find_clip(task, population.users) * self.local.learning_rate * self.local.epochs
        return None if self.step is None else MIN_GRADIENT_NORM * self.local.learning_rate

    def find_clip(self, task: Task, users: int) -> float:
        """Return the norm of a gradient to which updates are clipped, by public constants.

        Args:
            task: The model, of d parameters, and its loss.
            users: U, the number of persons.
        """
        # Of rows of norm 1, the noise beside the longest sum of all persons in the sample.
        noise = self.noise_multiplier * math.sqrt(task.size) / (self.mean_sampling * users)
        less = _MOST_CLIP if noise == 0 else min(max(1.0, math.sqrt(_SHORT_NOISE / noise)), _MOST_CLIP)
        assert self.gradient_clip is not None
        compares = task.loss.labels == ("survival",) and not task.loss.separable
        return self.gradient_clip * less * (_OF_PAIRS if compares else 1.0)

    def bounds(self, population: roles.FederationSize) -> Bounds:
        """Return the bounds: a person's rows, weighted, add to at most C over all silos."""
        share = self.share_multiplier(population.min_survivors)
        # Uniform weights put 1/S of a person's clip into every silo; others may put all of it into one.
        sharing, total = population.silos if self.weighting == "uniform" else 1, population.users * self.clip
        return Bounds(self.clip, self.clip, share, total, silos_sharing_weight=sharing)

    def longest_sums(
        self, population: roles.FederationSize, record_counts: Sequence[int] | None
    ) -> tuple[float, float]:
        """Return the norms where all persons' rows have the length of the clip and one direction.

        Of a Poisson sample of rate q these are n = qU + √(2qUx) + x/3 persons: more are sampled with probability below
        e^(-x) = 10⁻¹⁹ (Bernstein's inequality). Whoever adds more than one row per person overrides this.
        """
        persons, bounds = float(population.users), self.bounds(population)
        # Of another rule, a subclass of this one included, coins of several persons may depend on one another.
        if type(self.participation_rule) is Poisson and self.common_sampling_rate is not None:
            expected, x = self.common_sampling_rate * persons, base.REFUSAL_LOG_CHANCE
            persons = min(persons, expected + math.sqrt(2 * expected * x) + x / 3)
        total = persons * bounds.clip
        return total / bounds.silos_sharing_weight, total

    def share_multiplier(self, noise_sized_for: int) -> float:
        """Return one silo's noise in units of C, such that m shares add to σ."""
        return self.noise_multiplier / math.sqrt(noise_sized_for)

    def server_scale(self, population: roles.FederationSize) -> float:
        """Return 1/(q·U·S), by the expected, public number of participants; step/(q·U) with `step`.

        The sum is not divided by the realized number of participants, which is private, nor by the mean of all q_u,
        which depends on budgets.
        """
        q = self.mean_sampling
        if self.step is not None:
            return self.step / (q * population.users)
        return 1.0 / (q * population.users * population.silos)

    def dp_event(self, view: View) -> events.Event:
        """Return the event of one round (docs/privacy.md, section 3).

        With per-user budgets it is the event of a person who takes part in every round with the full clip.
        """
        if self.noise_multiplier == 0:
            return base.NO_NOISE
        if view.counts_disclosed and self.needs_counts:
            by = "by records" if self.weighting == "records" else f"'{self.weighting}'"
            return events.NonPrivate(
                f"counts disclosed: weighting {by} tells it, without noise, {_DISCLOSED[self.weighting]}"
            )
        if view.unknown_shares < 1:
            return base.ALL_NOISE_KNOWN
        share, is_silo = self.share_multiplier(view.min_survivors), view.adversary == "silo"
        if view.sees_shares and not is_silo:
            # √Σ_s w[s,u]²: 1/√S for uniform weights; 1 when all of someone's records lie in one silo.
            spread = 1 / math.sqrt(view.silos) if self.weighting == "uniform" else 1.0
            seen = events.Gaussian(share / spread)
        elif self.weighting == "uniform":
            # Each silo in the sum carries 1/S of the clip. Colluding silos know their own parts, so that what they do
            # not know moves farthest, by others/S, where they are not in the sum themselves.
            others = base.count_honest_shares(view)
            seen = events.Gaussian(share * math.sqrt(others) / (others / view.silos))
        else:
            # One silo may carry a person's whole clip. Removing their records from the other silos raises the weight of
            # their update in a colluding silo, which knows it: Σ_s w[s,u]·(Δ[s,u] − Δ[own,u]) moves by up to 2 clips.
            hidden = share * math.sqrt(view.unknown_shares)
            if is_silo:
                return self.participation_rule.sample_replacement(events.Gaussian(hidden), view)
            seen = events.Gaussian(hidden)
        return self.participation_rule.sample_event(seen, view)

    def linkage_cases(self, event: events.Event, view: View) -> tuple[base.LinkageCase, ...]:
        """Return the cases of docs/privacy.md, section 10; every further id is another person, with another coin."""
        if events.explain_not_private(event) is not None:
            return ()
        if self.weighting == "uniform":
            in_sum = base.count_honest_shares(view)
            # Of the shares, the 2-norm of what moves them counts; of a sum, how far they move it together.
            one = math.sqrt((in_sum + 3) / in_sum) if view.sees_shares else (in_sum + 1) / in_sum
            factors = {"two ids in one silo": one, "two ids in every silo": 2.0}
        elif self.verified is not None:
            share = self.verified.share
            factors = {
                "two verified ids": 1 + share,
                "a verified id, and two others in every silo": 2 - share,
            }
        else:
            factors = {f"{ids} ids over all silos": float(ids) for ids in (2, 3, 4)}
        several = [
            base.LinkageCase(case, events.scale_shift(event, factor), self.samples_users)
            for case, factor in factors.items()
        ]
        return (
            *several,
            base.LinkageCase("records filed under another person's id", events.replace_unit(event)),
        )


@dataclass(frozen=True, repr=False)
class UldpSgd(UldpAvg):
    """ULDP-SGD is ULDP-AVG with one full-batch step of unit size: Δ[s,u] = −∇ on u's records in s.

    Source: ULDP-FL (Kato et al. 2024), Algorithm 3, "ULDP-SGD".
    """

    local: LocalTraining = field(
        default_factory=lambda: LocalTraining(learning_rate=1.0, epochs=1, batch_size=None), init=False
    )
    name: str = field(default="uldp-sgd", init=False)
