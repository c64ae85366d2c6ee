"""Synthetic federations of a declared schema, on which settings are tried: no private row is read.

What a schema does not say (how labels depend on columns, how alike the records of a person are) is drawn anew for each
federation, so that settings that do well on all of them do not depend on one guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from silodp.data.allocation import zipf
from silodp.data.federation import Federation
from silodp.data.inputs import CODES, NUMERIC, NamedArrays
from silodp.data.public import PublicData
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.settings import Named, Positive, Range, Settings

_TEST_RECORDS = 2000
Share = Annotated[float, Range(least=0.005, most=0.995, what="share of the second class")]


@dataclass(frozen=True)
class SyntheticSettings(Settings):
    """Assumed properties of private records; each is a public constant that somebody wrote down.

    Attributes:
        records: The mean number of records of a person over all silos.
        prevalence: The share of the second of two classes; None draws one from .1 to .5 for each federation. A smaller
            one than .005 may leave no record of the class among the held-out ones.
        typical_time: The typical time of an event, in the unit that the loss expects; for survival.
    """

    records: Annotated[Positive, Named("records_per_person")] = 10.0
    prevalence: Share | None = None
    typical_time: float = 1.0


def draw_federation(
    public: PublicData, guess: SyntheticSettings, users: int, generator: np.random.Generator
) -> Federation:
    """Draw a federation whose columns, silos and kind of label are the declared ones.

    Columns have common factors; each person's records may be alike; the label follows a linear score with a strength, a
    share of the classes and a few important columns that are drawn too. Persons' records are spread by the law of
    ULDP-FL (`data.allocation.zipf`).

    Args:
        public: the declared facts, of tables.
        guess: what they do not say.
        users: U of the synthetic federation.
        generator: of everything.

    Returns:
        The federation, with 2,000 held-out records.

    Raises:
        SilodpError: records are not rows of tables.
    """
    is_table = len(public.record_shape) == 1 and not public.inputs
    if (not is_table and not public.has_codes) or public.label_shape:
        raise SilodpError(
            f"settings are tuned on synthetic tables, and the records of '{public.name}' have the shape "
            f"{public.record_shape}, hold ids, or have a class in every place: leave --tune out, and begin with the "
            "settings of docs/guides/settings.md.",
            code="plan.no_table",
            field="data.source",
        )
    records = max(1, round(guess.records * users))
    user, silo = zipf(records, users, len(public.silos), generator)
    owner = np.concatenate([user, users + np.arange(_TEST_RECORDS)])
    x, codes = _draw_features(public, owner, generator)
    y = _draw_labels(public, guess, x, codes, generator)
    inputs = _name_arrays(x, codes) if public.has_codes else x
    silos = tuple(
        SiloData(
            name, inputs[:records][silo == s], y[:records][silo == s], user[silo == s], labels=public.labels
        )
        for s, name in enumerate(public.silos)
    )
    # Held-out records are drawn for further persons, none of whom takes part: −1 for "nobody".
    nobody = np.full(_TEST_RECORDS, -1, np.int64)
    test = SiloData("test", inputs[records:], y[records:], nobody, labels=public.labels)
    return Federation(
        silos, users, test, name="synthetic", classes=public.classes, categories=public.categories
    )


def _list_sizes(public: PublicData) -> list[int]:
    """Return the number of categories of each column of codes."""
    found = public.categories
    return found if isinstance(found, list) else []


def _name_arrays(x: NDArray[np.float32], codes: NDArray[np.int64]) -> NamedArrays:
    return NamedArrays({**({NUMERIC: x} if x.shape[1] else {}), CODES: codes})


def _draw_features(
    public: PublicData, owner: NDArray[np.int64], generator: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw (n, d): numeric columns with a few common factors, and one category of each one-hot group; and (n, k) codes.

    A code is the place of a further such column among its quantiles, whose shares are drawn.
    """
    sizes, real = _list_sizes(public), public.feature_count
    n, d = len(owner), real + len(sizes)
    # Drawn, as a schema says nothing of it: settings must do well however strongly columns and persons hang together.
    alike = generator.choice([0.0, 0.3, 0.6])  # share of the variance that a person's records have in common
    factors = generator.standard_normal((max(1, d // 5), d)) * generator.choice([0.0, 0.5, 1.0])

    def draw_scores(rows: int) -> NDArray[np.float64]:
        common = generator.standard_normal((rows, len(factors))) @ factors
        return np.asarray((common + generator.standard_normal((rows, d))) / np.sqrt(1 + (factors**2).sum(0)))

    # A shared and an individual part whose variances add up to 1, so `alike` is the correlation within a person.
    scores = np.sqrt(alike) * draw_scores(owner.max() + 1)[owner] + np.sqrt(1 - alike) * draw_scores(n)
    x = np.asarray(np.clip(scores, -4, 4), dtype=np.float32)
    for columns in _group_categories(public.features):
        chosen = (scores[:, columns] + generator.standard_normal(len(columns))).argmax(axis=1)
        x[:, columns] = np.eye(len(columns), dtype=np.float32)[chosen]
    codes = np.empty((n, len(sizes)), dtype=np.int64)
    for place, size in enumerate(sizes):
        ends = np.cumsum(generator.dirichlet(np.ones(size)))[:-1]
        codes[:, place] = np.searchsorted(np.quantile(scores[:, real + place], ends), scores[:, real + place])
    return x[:, :real], codes


def _group_categories(features: tuple[str, ...]) -> list[list[int]]:
    """Return the places of the features "column=category", column by column."""
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(features):
        column, equals, _ = name.partition("=")
        if equals:
            groups.setdefault(column, []).append(place)
    return [places for places in groups.values() if len(places) > 1]


def _draw_labels(
    public: PublicData,
    guess: SyntheticSettings,
    x: NDArray[np.float32],
    codes: NDArray[np.int64],
    generator: np.random.Generator,
) -> NDArray[np.int64] | NDArray[np.float32]:
    """Draw labels of the declared kind from scores linear in numbers and categories."""
    outputs = public.targets or max(1, public.classes or 1)
    # A factor with heavy tails for each column makes a few of them important, as in real tables.
    effects = generator.standard_normal((x.shape[1], outputs)) * generator.exponential(size=(x.shape[1], 1))
    scores = (x - x.mean(axis=0)) @ effects
    for column, size in zip(codes.T, _list_sizes(public), strict=True):
        scores += (generator.standard_normal((size, outputs)) * generator.exponential())[column]
    # The strength of the signal: standard deviation of the scores against the unit of the noise that is added below.
    scores *= generator.uniform(1.0, 3.0) / np.maximum(scores.std(axis=0), 1e-9)
    if public.targets is not None:
        scores += generator.logistic(size=scores.shape)
        if public.labels == "multilabel":
            shares = (
                generator.uniform(0.1, 0.5, outputs)
                if guess.prevalence is None
                else [guess.prevalence] * outputs
            )
            ends = [np.quantile(one, 1 - share) for one, share in zip(scores.T, shares, strict=True)]
            return np.asarray(scores > ends, dtype=np.float32)
        return np.asarray((scores - scores.mean(0)) / scores.std(0), dtype=np.float32)
    if public.labels == "real":
        numbers = scores[:, 0] + generator.standard_normal(len(x))
        # Of the schema's label_typical: center 0 and spread 1.
        return np.asarray((numbers - numbers.mean()) / numbers.std(), dtype=np.float32)
    if public.labels == "survival":
        # Proportional hazards: the score is the logarithm of a factor of the hazard of an exponential time.
        event_time = generator.exponential(guess.typical_time, len(x)) * np.exp(-scores[:, 0])
        censored = generator.exponential(size=len(x)) * np.quantile(event_time, generator.uniform(0.3, 0.7))
        observed = np.stack([event_time <= censored, np.minimum(event_time, censored)], axis=1)
        return np.asarray(observed, dtype=np.float32)
    if outputs > 2:
        # The largest of scores with Gumbel noise is a draw from their softmax.
        return np.asarray((scores + generator.gumbel(size=scores.shape)).argmax(axis=1), dtype=np.int64)
    # Logistic noise makes the class a draw from the logistic model of the score.
    score = scores[:, -1] + generator.logistic(size=len(x))
    share = generator.uniform(0.1, 0.5) if guess.prevalence is None else guess.prevalence
    return np.asarray(score > np.quantile(score, 1 - share), dtype=np.int64)
