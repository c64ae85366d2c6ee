"""Shares of the weights ⌊2^k/N[u]⌋ between the server and the silos; nobody learns a count N[u].

Set-up: masked counts to the server, and one lookup per user in silo 0's tables.

Source: docs/protocols.md, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from silodp.aggregators._key_agreement import SessionInfo
from silodp.aggregators.base import SiloContext
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.keys import Session
from silodp.crypto.secure_aggregation import RoundAttempt, Unsigned, WordGroup, apply_pair_masks, sum_values
from silodp.crypto.streams import Words
from silodp.wire.messages import Message
from silodp.wire.schemas import Array, MessageSchema, MessageType, is_digest
from silodp_private import _private_weights
from silodp_private._private_sampling import OtServer, blame_silo
from silodp_private._weight_shares import ServerShares, SharedWeightsSilo, base_type, lookup_type
from silodp_private.crypto.reciprocals import ReciprocalParameters
from silodp_private.crypto.shares import ShareServer


@dataclass(frozen=True)
class ShareConstants:
    """Public constants of the shares.

    Attributes:
        count_cap: n_max, the largest number of records of one user in one silo.
        weight_bits: k; weights are multiples of 2^-k.
        word_bits: T; shares are integers modulo 2^T.
    """

    count_cap: int
    weight_bits: int
    word_bits: int

    def parameters(self, spec: RunSpec, session: bytes) -> ReciprocalParameters:
        """Return the parameters of the shares of one session."""
        # The largest N[u] that honest silos can cause; a larger one gets the weight 0.
        cap = spec.population.silos * self.count_cap
        return ReciprocalParameters(session, spec.population.users, cap, self.weight_bits, self.word_bits)


def _make_count_group(
    parameters: ReciprocalParameters, roster: tuple[str, ...]
) -> tuple[WordGroup, RoundAttempt]:
    bits = parameters.modulus.bit_length() - 1
    return WordGroup(parameters.users, bits), RoundAttempt(0, 0, 0, roster, "counts")


@dataclass(frozen=True)
class ReciprocalServerShares(ServerShares):
    """The server's shares of weights by records."""

    constants: ShareConstants

    def parameters(self, session: bytes) -> ReciprocalParameters:
        """Return the public constants of the shares in a session."""
        return self.constants.parameters(self.spec, session)

    def exchange(self, info: SessionInfo, server: ShareServer) -> Words:
        """Collect masked counts, and look up one reciprocal per user."""
        parameters = self.parameters(bytes.fromhex(info.session))
        request = Message("masked counts", self.spec.run, 0, info.number, {"session": info.session})
        counts = self.context.ask_all(dict.fromkeys(self.spec.names, request))
        group, _ = _make_count_group(parameters, self.spec.names)
        # Pair masks cancel in the sum; what is left is N[u] + ρ_u modulo M.
        counted: Unsigned = sum_values((answer.arrays["masked"] for answer in counts.values()), group)
        awaited = parameters.ask(server, counted)
        answer = OtServer(self.spec, self.context).ask(info, "reciprocals", request=awaited.message)
        return blame_silo(self.spec.names[0], lambda: awaited.finish(answer.blobs["answer"]))


class ReciprocalSilo(SharedWeightsSilo):
    """A silo's side of shares of weights by records.

    Args:
        aggregator, spec, context: as for every silo.
        constants: the public constants of the shares.
    """

    def __init__(
        self,
        aggregator: _private_weights.PrivateWeighting,
        spec: RunSpec,
        context: SiloContext,
        constants: ShareConstants,
    ) -> None:
        super().__init__(aggregator, spec, context)
        self._constants = constants
        self.handlers = {
            **self.handlers, "masked counts": self._counts, "reciprocals": self._reciprocals
        }  # fmt: skip

    @property
    def capped_counts(self) -> NDArray[np.int64]:
        """min(n[s,u], n_max) (U,)."""
        capped: NDArray[np.int64] = np.minimum(self._context.counts, self._constants.count_cap)
        return capped

    def share_parameters(self, session: Session) -> ReciprocalParameters:
        """Return the public constants of the shares in a session."""
        return self._constants.parameters(self._spec, session.transcript)

    def _counts(self, request: Message) -> Message:
        # Counts are capped here and not at the server, which must see no count.
        session, silo = self._member.session_of(request), self.silo_shares(request.run)
        parameters = self.share_parameters(session)
        group, attempt = _make_count_group(parameters, session.roster)
        value = group.from_integers(self.capped_counts)
        # Pair masks cancel in the sum; ρ_u, which only silo 0 adds, hides the sum N[u] from the server.
        if session.name == session.roster[0]:
            value = group.add(value, group.from_integers(parameters.count_masks(silo).astype(np.int64)))
        return request.answer(masked=apply_pair_masks(value, group, session, attempt))

    def _reciprocals(self, request: Message) -> Message:
        parameters = self.share_parameters(self._member.session_of(request))
        return self.offer_tables(request, parameters.offer)


def weight_types(spec: RunSpec, constants: ShareConstants, is_first: bool) -> tuple[MessageType, ...]:
    """Return the messages of the set-up of shares; silo 0, the first, is asked more than the others."""
    parameters, users = constants.parameters(spec, bytes(32)), spec.population.users
    group, _ = _make_count_group(parameters, spec.names)
    masked = MessageSchema(arrays={"masked": Array(group.dtype.name, (users,))})
    counts = MessageType("masked counts", MessageSchema({"session": is_digest}), masked)
    if not is_first:
        return (counts,)
    return base_type(), counts, lookup_type("reciprocals", users, parameters.modulus)
