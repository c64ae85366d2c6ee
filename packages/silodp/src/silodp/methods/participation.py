"""Who takes part in a round: everyone, each person by a coin of their own, or by the rule of an extension or plug-in.

A rule is a frozen dataclass of public constants. It says how silos draw persons, and what a round with this sample
costs; the two must agree. A new rule is one file: a subclass of `Participation` (docs/extending.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import Registry
from silodp.accounting import events
from silodp.accounting.views import View
from silodp.errors import SilodpError
from silodp.settings import Probability, Settings

if TYPE_CHECKING:
    from silodp.crypto.sampling import PersonCoins


@dataclass(frozen=True)
class SampledRun:
    """What a rule may ask of a run.

    Attributes:
        aggregator: The name of the aggregator.
        sampled_by: Who draws samples of persons: "silos", or another party.
        rounds: The number of rounds.
        silos: The number of silos.
        min_silos: The fewest silos whose answers make a round.
    """

    aggregator: str
    sampled_by: str
    rounds: int
    silos: int
    min_silos: int


@dataclass(frozen=True)
class Participation(Settings, ABC, prefix="participation."):
    """Base class of the rules by which persons take part in rounds, in all of their silos or in none."""

    drawn_by_coins: ClassVar[bool] = False
    """Whether every person and round has an independent coin of probability `rate`, so that a server can draw, too."""

    @classmethod
    def registry(cls) -> Mapping[str, type[Participation]]:
        """Return the classes that a table `[method.participation]` may name."""
        return PARTICIPATIONS

    if TYPE_CHECKING:  # a property here would be in the way of a field of that name

        @property
        def rate(self) -> float:
            """The public probability in (0, 1] with which a person takes part in a round."""

    @property
    def rounds_drawn_together(self) -> int:
        """The number of consecutive rounds that are drawn together: their first one may cost more than the others."""
        return 1

    def draw(self, coins: PersonCoins, round_: int, rates: float | NDArray[np.float64]) -> NDArray[np.bool_]:
        """Draw who takes part in a round, in a silo; all silos find the same for a person.

        Args:
            coins: The coins of the persons of the silo, from a secret that all silos share.
            round_: The number of the round, counted from 0.
            rates: The method's `sampling_rates`: `rate`, or (persons,) one each where persons have their own.

        Returns:
            (persons,) bool.
        """
        return coins.toss(round_, rates)

    @abstractmethod
    def sample_event(self, release: events.Additive, view: View) -> events.Event:
        """Return what a round costs, where a person who is not in the sample adds nothing.

        Args:
            release: What the round costs a person who is in the sample for certain.
            view: The adversary's view, with the number of the round and whether the adversary knows the sample.
        """

    def sample_replacement(self, release: events.Additive, view: View) -> events.Event:
        """Return what a round costs where what a person adds is replaced by something else, and not removed.

        By default it is that of a sample which the adversary knows, which costs no less.

        Args:
            release: What the round costs a person who is in the sample, and removed from it.
            view: The adversary's view.
        """
        # A copy reads the number of the round, and rounds would look as if they cost different amounts.
        known = view if view.knows_sample else replace(view, knows_sample=True)
        return self.sample_event(events.multiply_shift(release, 2), known)

    def check_run(self, run: SampledRun) -> None:
        """Refuse a run that the rule's events do not describe; by default one in which silos do not draw the sample.

        Raises:
            SilodpError: "argument.conflict".
        """
        if not self.drawn_by_coins and run.sampled_by != "silos":
            raise self._conflict_error(
                f"under '{run.aggregator}': only silos draw such samples, and here they do not draw the sample; "
                f"take user_sampling = {self.rate:g}, or aggregator = 'masked' (with uniform weights)"
            )

    def measure_sample(self, drawn: NDArray[np.bool_]) -> dict[str, float]:
        """Return shares of a right sample that are 1, by what they are shares of, for `silodp attack`.

        Args:
            drawn: Who took part, (rounds, persons).
        """
        return {}

    def _conflict_error(self, problem: str) -> SilodpError:
        return SilodpError(
            f"participation = {self!r} {problem}.", code="argument.conflict", field="participation"
        )


@dataclass(frozen=True)
class Always(Participation):
    """Everyone takes part in every round."""

    drawn_by_coins: ClassVar[bool] = True

    @property
    def rate(self) -> float:
        """1."""
        return 1.0

    def sample_event(self, release: events.Additive, view: View) -> events.Event:
        """Return the release itself."""
        return release

    def sample_replacement(self, release: events.Additive, view: View) -> events.Event:
        """Return the release of a sum that moves twice as far."""
        return events.multiply_shift(release, 2)


@dataclass(frozen=True)
class Poisson(Participation):
    """Everyone takes part by a coin of their own in every round.

    Attributes:
        rate: The probability q, the same for all persons and rounds.
    """

    rate: Probability

    drawn_by_coins: ClassVar[bool] = True

    def sample_event(self, release: events.Additive, view: View) -> events.Event:
        """Return the event of a Poisson sample, which the adversary knows or not."""
        if self.rate == 1:
            return release
        sampled = events.RevealedSample if view.knows_sample else events.PoissonSampled
        return sampled(self.rate, release)

    def sample_replacement(self, release: events.Additive, view: View) -> events.Event:
        """Return the event of a replaced unit in a Poisson sample."""
        if view.knows_sample:
            return super().sample_replacement(release, view)
        return events.SampledReplacement(self.rate, release)


ALWAYS = Always()

PARTICIPATIONS: Registry[type[Participation]] = Registry(
    "participations",
    {
        "always": "silodp.methods.participation:Always",
        "poisson": "silodp.methods.participation:Poisson",
    },
)
"""The rules by their names in a configuration; extension packages add theirs (see `Registry`)."""
