"""`plain`: no secure aggregation; the server sees the noisy share of each silo and adds them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp._lazy import LazyModule
from silodp.aggregators import base
from silodp.aggregators.run_spec import RunSpec
from silodp.mechanisms.clipping import LocallyNoisedUpdate, Share, Update, add_noise

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.aggregators import _key_agreement
    from silodp.wire.messages import Message
    from silodp.wire.schemas import Check, MessageSchedule
else:
    _key_agreement = LazyModule("silodp.aggregators._key_agreement")  # only where users are sampled


@dataclass(frozen=True, repr=False)
class Plain(base.Aggregator):
    """The server adds what it receives: it sees every silo's noisy share.

    With weights by records, counts and weights travel in clear, and a silo can work out each person's total from its
    own count. Where users are sampled, silos agree on a secret that the server does not know, and draw the sample
    with it.
    """

    name = "plain"

    def series_aggregator(self, spec: RunSpec) -> base.Aggregator | None:
        """Return `plain` itself, also for subclasses: they may combine shares in another way."""
        return Plain()

    def describe(self, spec: RunSpec) -> dict[str, Any]:
        """Return the size of a share."""
        return {"bytes up, per silo and round": 8 * spec.sum_size, "exactness": "floating point"}

    def script(self, spec: RunSpec, name: str) -> MessageSchedule:
        """Return the set-up, with a key agreement where users are sampled, then updates in clear."""
        from silodp.wire.schemas import Array, MessageSchedule, MessageSchema, MessageType, is_digest

        share = MessageSchema(arrays={"share": Array("float64", (spec.sum_size,))})
        sampled = spec.method.samples_users
        agreement = _key_agreement.key_agreement_kinds(spec.names, name) if sampled else ()
        fields: dict[str, Check] = {"session": is_digest} if sampled else {}
        return MessageSchedule(
            (*base.setup_kinds(spec), *agreement),
            MessageType("update", MessageSchema(fields, base.round_arrays(spec)), share),
        )

    def server(self, spec: RunSpec) -> base.ServerAggregator:
        """Return the side that asks and adds."""
        return PlainServer(spec)

    def silo(self, spec: RunSpec, context: base.SiloContext) -> base.SiloAggregator:
        """Return the side that weights, sums, adds noise and sends."""
        return _PlainSilo(spec, context)


@dataclass(frozen=True)
class PlainServer:
    """The server's side; a subclass may combine the shares in another way, which is post-processing."""

    spec: RunSpec

    def set_up(self, context: base.ServerContext) -> None:
        """Let the silos agree on a secret, where they draw samples of users."""
        if self.spec.method.samples_users:
            _key_agreement.set_up(self.spec, context)

    def total(
        self, context: base.ServerContext, round_: int, arrays: Mapping[str, np.ndarray]
    ) -> Tensor | None:
        """Charge the round, ask every silo, refuse shares that no honest silo sends, and combine the others."""
        import torch

        from silodp.aggregators.limits import check_sum  # a server alone needs it
        from silodp.wire.messages import Message

        # Charged before the first share can arrive: here every answer is seen at once.
        if not context.charge(round_, 0, self.spec.population.silos):
            return None
        sampled = self.spec.method.samples_users
        fields = {"session": _key_agreement.current_session(context.store.run).session} if sampled else {}
        request = Message("update", self.spec.run, round_, fields=fields, arrays=dict(arrays))
        answers = context.ask_all(dict.fromkeys(self.spec.names, request))
        # In the order of the names: float addition depends on it.
        shares = {name: answers[name].arrays["share"] for name in sorted(answers)}
        for name, share in shares.items():
            check_sum(self.spec, share, round_, 1, name)
        return self.combine(torch.stack([torch.from_numpy(share) for share in shares.values()]))

    def combine(self, shares: Tensor) -> Tensor:
        """Return the sum (d,) of the silos' noisy shares (S, d) float64."""
        return shares.sum(dim=0)


class _PlainSilo:
    def __init__(self, spec: RunSpec, context: base.SiloContext) -> None:
        self._spec, self._context = spec, context
        self.handlers: Mapping[str, base.Handler] = self._member.handlers if spec.method.samples_users else {}

    @cached_property
    def _member(self) -> _key_agreement.SiloKeyAgreement:
        context = self._context
        return _key_agreement.SiloKeyAgreement(
            context.identity, context.pins, self._spec.digest, context.store.run
        )

    def group_secret(self, run: str) -> bytes:
        return self._member.group_secret(run)

    def update(self, request: Message, work: base.LocalUpdateFn) -> tuple[Message, int]:
        if "session" in request.fields:  # silos of different sessions would toss different coins
            self._member.session_of(request)
        share = work(0).make_share(make_noisy_share)
        return request.answer(share=share.value.numpy()), share.refused


def make_noisy_share(update: Update, weights: Tensor, noise: np.random.Generator) -> Share:
    """Return Σ weight·clipped row + Gaussian noise, in floating point.

    Args:
        update: the silo's; one that is noised already is sent as it is.
        weights: (U,) float64.
        noise: the stream of the silo's share of noise.
    """
    if isinstance(update, LocallyNoisedUpdate):
        return Share(update.value, 0.0, update.refused)
    return add_noise(update, weights, noise)
