"""Newton's method by noisy sums: the blocks of a person's row, the steps, and the variance of the result.

Each iteration releases one sum of rows of persons. A row has three blocks: the score g, the upper triangle of the
curvature H, and in the last iteration that of M, the outer product of the person's score; each divided by the longest
that it can be, times the root of its share of the budget. So a row is never longer than 1 (`Rounds.factors`), and
nothing is clipped. Everything after the sums is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from silodp.settings import Whole
from silodp_analytics.regression.families import Family

Floats = NDArray[np.float64]

MIN_ITERATIONS, MAX_ITERATIONS = 3, 50
Iterations = Annotated[int, Whole(MIN_ITERATIONS, most=MAX_ITERATIONS, what="iterations")]

LAST, BEFORE = 0.60, 0.25
"""Shares of the budget (squared noise-to-signal ratio) of the last iteration and of the one before; the others
divide the rest evenly. Found by simulation (benchmarks/regression.py)."""
MAX_STEP = 3.0
"""The longest step, in scaled coefficients."""
FLOOR = 2.0
"""Eigenvalues of H below this multiple of σ_H·√p are raised to it before the last step; in that, to a quarter of it."""
WEAK = 2.0
"""A direction whose eigenvalue of the last H is below this multiple of σ_H·√p is lost in the noise. Of the last H,
not of the average: under separation the curvature falls from step to step."""
MAX_NOISE_SHARE = 0.8
"""A coefficient of whose variance more than this is noise is lost."""
MAX_FALLEN, SURE = 0.25, 3.0
"""A coefficient along which the last H is lower than the average by more than this part of it, and by more than so many
standard deviations of the noise, has not converged either."""
MAX_LAST_STEP = 3.0
"""A coefficient that the last step would move by more than this many standard deviations of what noise alone moves
it, and by more than its standard error, has not converged. Under separation steps never end: errors look small
there because the fit is perfect."""


@dataclass(frozen=True)
class Rounds:
    """The public constants of all iterations.

    Attributes:
        size: p, the number of coefficients, those of K baselines first.
        terms: The number of terms; each is at most 1 long, and so is the baseline of a residual.
        family: The family.
        iterations: The number of iterations, at least 3.
    """

    size: int
    terms: int
    family: Family
    iterations: int

    @property
    def baselines(self) -> int:
        """K, the number of baselines."""
        return len(self.family.baselines)

    @property
    def triangle(self) -> int:
        """The number of entries of an upper triangle."""
        return self.size * (self.size + 1) // 2

    @property
    def sum_size(self) -> int:
        """The number of entries of a sum."""
        return self.size + 2 * self.triangle

    @cached_property
    def shares(self) -> Floats:
        """The share of every iteration in the budget, (iterations,)."""
        others = (1 - LAST - BEFORE) / (self.iterations - 2)
        return np.array([others] * (self.iterations - 2) + [BEFORE, LAST])

    @cached_property
    def scales(self) -> Floats:
        """The longest row s_r ≤ 1 of every iteration, (iterations,): 1 in the last one."""
        return np.sqrt(self.shares / LAST)

    def factors(self, round_: int) -> tuple[float, float, float]:
        """Return what g, H and M of a person are multiplied by; 0 where a block is not released.

        |g| ≤ R·B, ‖H‖_F ≤ V·B² and ‖M‖_F = |g|², for features of B² = 1 + terms and some (R, V) between the corners
        of the family. The length of a row is convex in them, so it is the longest, s_r, at a corner.
        """
        family, terms = self.family, max(self.terms, 1)
        corners = family.list_corners(terms, is_first=round_ == 0)
        blocks = family.last_blocks if round_ == self.iterations - 1 else family.early_blocks
        ends = np.array([(one.score, one.curvature, one.score**2) for one in corners])
        longest = ends.max(0)
        parts = np.sqrt(blocks) / longest
        square = 1.0 + terms
        parts = parts / np.linalg.norm(parts * ends, axis=1).max() / [math.sqrt(square), square, square]
        g, h, m = (float(self.scales[round_]) * parts).tolist()
        return g, h, m

    @cached_property
    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows and columns of the entries of an upper triangle."""
        rows, columns = np.triu_indices(self.size)
        return rows, columns

    @cached_property
    def roots(self) -> Floats:
        """1 on the diagonal and √2 beside it: then the 2-norm of a triangle is the Frobenius norm of the matrix."""
        rows, columns = self.places
        return np.where(rows == columns, 1.0, math.sqrt(2))

    @cached_property
    def known(self) -> Floats:
        """1 for the entries of H that can differ from 0 (p, p): a residual belongs to one baseline."""
        k = self.baselines
        found = np.ones((self.size, self.size))
        found[:k, :k] = np.eye(k)
        return found

    def make_rows(
        self, features: Floats, outcome: Floats, person: NDArray[np.int64], theta: Floats, round_: int
    ) -> Floats:
        """Return the rows of persons in one silo: means over their records there, (persons, sum_size).

        Args:
            features: Scaled features (n, 1 + p − K), the first one 1, sorted by person.
            outcome: (n,), or (n, 2) for survival.
            person: The person of each record, ascending (n,).
            theta: The scaled coefficients (p,); 0 in the first round, as its bounds demand.
            round_: Counted from 0.
        """
        if len(person) == 0:
            return np.zeros((0, self.sum_size))
        theta = theta if round_ else np.zeros(self.size)
        k = self.baselines
        ones, x = np.repeat(features[:, :1], k, axis=1), features[:, 1:]
        # Summed along each row, and persons one by one: the bits of a row depend on its own records alone.
        eta = ones * theta[:k] + (x * theta[k:]).sum(1, keepdims=True) + self.family.start
        residual, curvature = self.family.compare(outcome.reshape(len(x), -1), eta)
        first = np.flatnonzero(np.diff(person, prepend=person[0] - 1))
        count = np.diff(first, append=len(person))[:, None]
        rows, columns = self.places
        scores = np.concatenate([residual, x * residual.sum(1, keepdims=True)], axis=1)
        score = np.add.reduceat(scores, first) / count
        left = np.concatenate([curvature, x * curvature.sum(1, keepdims=True)], axis=1)
        right = np.concatenate([ones, x], axis=1)
        outer = left[:, rows] * right[:, columns] * (self.roots * self.known[self.places])
        by_g, by_h, by_m = self.factors(round_)
        parts = [by_g * score, by_h * (np.add.reduceat(outer, first) / count)]
        parts.append(by_m * score[:, rows] * score[:, columns] * self.roots)
        return np.concatenate(parts, axis=1)

    def _square(self, triangle: Floats) -> Floats:
        """Return the symmetric matrix (p, p) of a triangle."""
        found = np.zeros((self.size, self.size))
        found[self.places] = triangle / self.roots
        return found + np.triu(found, 1).T

    def read_release(self, total: Floats, noise_std: float, round_: int) -> Release:
        """Return the blocks of one noisy sum (sum_size,) in their own units."""
        by_g, by_h, by_m = self.factors(round_)
        p, q = self.size, self.triangle
        return Release(
            total[:p] / by_g,
            self._square(total[p : p + q] / by_h) * self.known,
            None if by_m == 0 else self._square(total[p + q :] / by_m),
            noise_std / by_g,
            noise_std / by_h,
        )

    def follow(self, sums: Floats, noise_std: float) -> Path:
        """Return where the noisy sums of the first iterations lead.

        Args:
            sums: (k, sum_size) float64, k ≤ iterations.
            noise_std: The standard deviation of the noise in every entry.
        """
        path = Path(self, np.zeros(self.size))
        for round_, total in enumerate(sums):
            path = path.step(self.read_release(total, noise_std, round_), round_)
        return path


@dataclass(frozen=True)
class Release:
    """The blocks of one noisy sum.

    Attributes:
        score: (p,).
        curvature: (p, p).
        meat: M (p, p); None before the last iteration.
        score_std: σ_g.
        curvature_std: σ_H, of an entry on the diagonal; beside it, σ_H/√2.
    """

    score: Floats
    curvature: Floats
    meat: Floats | None
    score_std: float
    curvature_std: float


@dataclass(frozen=True)
class Path:
    """The scaled coefficients after some iterations.

    Attributes:
        rounds: The public constants.
        theta: (p,).
        curvatures: Curvatures with their σ_H, of all iterations but the first.
        step_: The last step (p,), whole; None before the first one.
        score_std, curvature_std: σ_g of the last iteration, and σ_H of the averaged curvature in its step.
        fit: The result, after the last iteration.
    """

    rounds: Rounds
    theta: Floats
    curvatures: tuple[tuple[Floats, float], ...] = ()
    step_: Floats | None = None
    score_std: float = 0.0
    curvature_std: float = 0.0
    fit: Fit | None = None

    def step(self, release: Release, round_: int) -> Path:
        """Return the path after one more iteration."""
        # At the start all records have one curvature, so that of the first iteration says little of the later ones.
        theta = self.theta
        if round_ == 0:
            theta, release = self._restart(release)
        known = (*self.curvatures, (release.curvature, release.curvature_std)) if round_ else ()
        curvature, std = _average(known) if known else (release.curvature, release.curvature_std)
        values, vectors = np.linalg.eigh(curvature)
        noise = std * math.sqrt(self.rounds.size)
        is_last = round_ == self.rounds.iterations - 1
        floor = max((FLOOR / 4 if is_last else FLOOR) * noise, 1e-12 * max(values[-1], 1.0))
        inverse: Floats = (vectors / np.maximum(values, floor)) @ vectors.T
        step = inverse @ release.score
        length = float(np.linalg.norm(step))
        step = step * min(1.0, MAX_STEP / length) if length else step
        if not is_last:
            return Path(self.rounds, theta + step, known, step, release.score_std, std)
        assert release.meat is not None
        assert self.step_ is not None
        part = self._find_part(release, inverse)
        of_score = (part * release.score_std) ** 2 + ((1 - part) * self.score_std) ** 2
        noise_of = of_score * np.eye(len(step))
        noise_of += self.spread(step) * (part * std) ** 2 / 2
        noise_of += self.spread(self.step_) * ((1 - part) * self.curvature_std) ** 2 / 2
        of_step = (release.score_std**2 + self.score_std**2) * np.eye(len(step))
        of_step += self.spread(step) * std**2 / 2 + self.spread(self.step_) * self.curvature_std**2 / 2
        heights, axes = np.linalg.eigh(release.meat)
        meat = (axes * np.maximum(heights, 0)) @ axes.T
        last_values, last_vectors = np.linalg.eigh(release.curvature)
        weak = last_vectors[:, last_values < WEAK * release.curvature_std * math.sqrt(self.rounds.size)]
        fit = Fit(
            theta + part * step,
            inverse @ (meat + noise_of) @ inverse,
            inverse @ noise_of @ inverse,
            step,
            weak,
            inverse,
            inverse @ of_step @ inverse,
            curvature - release.curvature,
            math.sqrt(max(release.curvature_std**2 - std**2, 0.0)),
        )
        return Path(self.rounds, fit.theta, known, step, fit=fit)

    def _restart(self, release: Release) -> tuple[Floats, Release]:
        """Return the coefficients of the mean outcome alone, and what the first sums are there.

        Where all records have one η, the column of H of a baseline is Σx over its residuals, times their common
        curvature v: so the score of another η is g + (μ₀ − μ)·Σx, and the curvature is H·v/v₀ (that of the terms, by
        the mean of all baselines). An outcome that is rare then costs no further iterations.
        """
        family, k = self.rounds.family, self.rounds.baselines
        theta, score = self.theta.copy(), release.score.copy()
        start, ratio = family.first_curvature, np.ones(k)
        for at in range(k):
            total = release.curvature[:, at] / start
            if total[at] <= 4 * release.curvature_std / start:  # too few persons to know a mean
                continue
            found = family.restart(family.first_mean + release.score[at] / total[at])
            if found is not None:
                mean, eta, curvature = found
                theta[at], ratio[at] = eta - family.start, curvature / start
                score += (family.first_mean - mean) * total
        heights = np.maximum(release.curvature.diagonal()[:k], 1e-300)
        by = np.full(release.curvature.shape, ratio @ heights / heights.sum())
        by[:k], by[:, :k] = ratio[:, None], ratio
        return theta, replace(
            release,
            score=score,
            curvature=release.curvature * by,
            curvature_std=release.curvature_std * float(ratio.max()),
        )

    def spread(self, step: Floats) -> Floats:
        """Return the covariance of E·s, for E the noise of H with variance 2 on the diagonal, and 1 beside it."""
        known = self.rounds.known
        found: Floats = np.diag(known @ step**2) + known * np.outer(step, step)
        return found

    def _find_part(self, release: Release, inverse: Floats) -> float:
        """Return which part λ of the last step is taken.

        The step before led here by a noisy score of its own. With a part λ of the last step the two noises have the
        weights λ and 1 − λ, as in an average of two estimates, of which the first is off by up to |s|²/2, because
        the score is no straight line. λ is the best for their variances.
        """
        assert self.step_ is not None
        height = float((inverse**2).sum()) / len(inverse)
        off = float(self.step_ @ self.step_) / 2
        here, before = height * release.score_std**2, height * self.score_std**2 + off**2
        return before / (here + before) if here + before > 0 else 1.0


@dataclass(frozen=True)
class Fit:
    """The result in scaled coefficients.

    Attributes:
        theta: (p,).
        covariance: (p, p), the noise included.
        noise: The part of the covariance that is noise.
        last_step: The whole last step (p,).
        weak: Directions (p, k) whose curvature is lost in the noise.
        inverse: The inverse of the averaged curvature (p, p).
        fallen, fallen_std: What the averaged H has more than the last one (p, p), and σ_H of the difference.
        step_noise: The covariance that noise alone gives the last step (p, p).
    """

    theta: Floats
    covariance: Floats
    noise: Floats
    last_step: Floats
    weak: Floats
    inverse: Floats
    step_noise: Floats
    fallen: Floats
    fallen_std: float

    def find_lost(self, change: Floats) -> list[str | None]:
        """Return why each coefficient is lost, or None, in the units to which `change` (p, p) leads."""
        variance = np.einsum("ij,jk,ik->i", change, self.covariance, change)
        noise = np.einsum("ij,jk,ik->i", change, self.noise, change)
        height = np.einsum("ij,jk,ik->i", change, self.inverse, change)
        in_weak = self.inverse @ self.weak
        weak = np.einsum("ik,kj,ij->i", change, in_weak @ self.weak.T, change)
        moved = np.abs(change @ self.last_step)
        wobble = np.einsum("ij,jk,ik->i", change, self.step_noise, change)
        along = change @ self.inverse
        fallen = np.einsum("ij,jk,ik->i", along, self.fallen, along)
        least = np.maximum(MAX_FALLEN * height, SURE * self.fallen_std * (along**2).sum(1))
        found: list[str | None] = []
        for j in range(len(variance)):
            if weak[j] > 0.1 * height[j]:
                found.append("curvature")
            elif fallen[j] > least[j] or moved[j] > max(
                MAX_LAST_STEP * math.sqrt(wobble[j]), math.sqrt(variance[j])
            ):
                found.append("not converged")
            elif noise[j] > MAX_NOISE_SHARE * variance[j]:
                found.append("noise")
            else:
                found.append(None)
        return found


def _average(known: tuple[tuple[Floats, float], ...]) -> tuple[Floats, float]:
    """Return the best average of curvatures, and its σ_H; without noise the last one."""
    if known[-1][1] == 0:
        return known[-1]
    weights = [std**-2 for _, std in known]
    mean = sum(weight * curvature for weight, (curvature, _) in zip(weights, known, strict=True))
    return np.asarray(mean / sum(weights)), sum(weights) ** -0.5
