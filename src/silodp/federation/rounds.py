"""One round: charge, ask, sum, step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from silodp.errors import SilodpError
from silodp.federation.aggregation import Aggregator
from silodp.federation.messages import Message
from silodp.federation.store import Store
from silodp.federation.transport import Transport
from silodp.mechanisms.noise import Randomness
from silodp.methods.method import Method, Population
from silodp.privacy.events import Event, NoGuarantee
from silodp.privacy.guarantee import Adversary
from silodp.privacy.ledger import Ledger


@dataclass(frozen=True)
class Server:
    """The coordinating party of a run: it holds no records, only what it needs to ask and to add."""

    run: str
    names: tuple[str, ...]
    method: Method
    population: Population
    transport: Transport
    aggregator: Aggregator
    ledger: Ledger
    store: Store
    randomness: Randomness

    @property
    def events(self) -> dict[Adversary, Event]:
        """What a round costs against each adversary."""
        views = self.aggregator.views(self.method, self.population.silos)
        return {adversary: self.method.dp_event(view) for adversary, view in views.items()}

    def reason(self, adversary: Adversary) -> str | None:
        """Why nothing is promised against an adversary; None where something is."""
        event = self.events[adversary]
        return event.reason if isinstance(event, NoGuarantee) else self.ledger.reason(adversary)

    def spent(self) -> dict[Adversary, float | None]:
        """ε so far against each adversary; None, from the first round on, where nothing is promised."""
        return {
            adversary: None if isinstance(event, NoGuarantee) else self.ledger.epsilon(adversary)
            for adversary, event in self.events.items()
        }

    def set_up(self) -> None:
        """Give every silo its allotments; counts are asked for only when the method needs them."""
        allotments = self._once("allotments", self._allot)
        self._ask(
            {
                name: Message(
                    "setup", self.run, arrays={"allotment": allotments[s]} if allotments.size else {}
                )
                for s, name in enumerate(self.names)
            }
        )

    def play(self, round_: int, params: Tensor) -> Tensor | None:
        """The sum of the silos' noisy shares for one round, charged before it is asked for; None: budget spent.

        Raises:
            SilodpError: when a silo gives no answer; resuming repeats the round, the same bytes, charged once.
        """
        if not self.ledger.charged(round_, 0) and not self.ledger.affords(self.events):
            return None
        sample = self._once(f"sample/{round_}", lambda: self._sample(round_))
        self.ledger.charge(round_, 0, self.events)
        arrays = {"params": params.cpu().numpy(), **({"sample": sample} if sample.size else {})}
        answers = self._ask(
            {name: Message("update", self.run, round_, 0, arrays=arrays) for name in self.names}
        )
        return self.aggregator.total(answers)

    def step(self, params: Tensor, velocity: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """x ← x + η_g · scale · v with v ← momentum·v + Σ_s Δ_s; params (d,), velocity (d,) float64."""
        velocity = self.method.server_momentum * velocity + total
        rate = self.method.server_learning_rate * self.method.server_scale(self.population)
        return params + (rate * velocity).to(params), velocity

    def _ask(self, requests: dict[str, Message]) -> dict[str, Message]:
        answers, failures = self.transport.ask(requests)
        if failures:
            name, failure = next(iter(failures.items()))
            raise SilodpError(
                f"silo '{name}' gave no answer ({failure.kind}: {failure.reason}); nothing was released, "
                "mend it and resume: the round will be repeated and charged once."
            )
        return answers

    def _allot(self) -> np.ndarray:
        counts = None
        if self.method.needs_counts:
            answers = self._ask({name: Message("counts", self.run) for name in self.names})
            counts = np.stack([answers[name].arrays["counts"] for name in self.names])
        allotments = self.method.allotments(counts, self.population, self.randomness.stream("allotments"))
        return np.empty(0) if allotments is None else allotments

    def _sample(self, round_: int) -> np.ndarray:
        sample = self.method.sample(self.population, self.randomness.stream("sample", round_))
        return np.empty(0, dtype=bool) if sample is None else sample

    def _once(self, key: str, draw: Callable[[], np.ndarray]) -> np.ndarray:
        """What was drawn under this key before, or a draw that is stored durably before it is used."""
        stored = self.store.get(key)
        if stored is None:
            stored = Message("kept", self.run, arrays={"value": draw()}).encode()
            self.store.put(key, stored)
        return Message.decode(stored).arrays["value"]


def is_finite(total: Tensor) -> bool:
    """Whether a sum may enter the model."""
    return bool(torch.isfinite(total).all())
