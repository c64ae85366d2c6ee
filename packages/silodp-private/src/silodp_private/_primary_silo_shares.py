"""Shares of every person's primary silo between server and silos; nobody learns a count, or whose it is.

Set-up: masked classes of counts to the server, then two lookups in silo 0's tables.

Source: docs/protocols.md, section 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from silodp.aggregators._key_agreement import SessionInfo
from silodp.aggregators.base import SiloContext
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.keys import Session
from silodp.crypto.streams import Words
from silodp.wire.messages import Message
from silodp.wire.schemas import Array, MessageSchema, MessageType, is_digest
from silodp_private._private_sampling import OtServer, blame_silo
from silodp_private._private_weights import PrivateWeighting
from silodp_private._weight_shares import ServerShares, SharedWeightsSilo, base_type, lookup_type
from silodp_private.crypto.primary_silos import CLASSES, PrimarySiloParameters
from silodp_private.crypto.shares import ShareServer


def primary_silo_parameters(spec: RunSpec, session: bytes) -> PrimarySiloParameters:
    """Return the public constants of the shares in a session."""
    return PrimarySiloParameters(session, spec.population.users, spec.population.silos)


@dataclass(frozen=True)
class PrimarySiloServerShares(ServerShares):
    """The server's shares of primary silos: bit s of a word is of silo s."""

    def parameters(self, session: bytes) -> PrimarySiloParameters:
        """Return the public constants of the shares in a session."""
        return primary_silo_parameters(self.spec, session)

    def exchange(self, info: SessionInfo, server: ShareServer) -> Words:
        """Collect masked classes; look up who wins each pair, and who has won against all."""
        parameters, offers = self.parameters(bytes.fromhex(info.session)), OtServer(self.spec, self.context)
        request = Message("masked classes", self.spec.run, 0, info.number, {"session": info.session})
        answers = self.context.ask_all(dict.fromkeys(self.spec.names, request))
        sent = {name: answers[name].arrays["masked"] for name in self.spec.names}
        for name, classes in sent.items():
            blame_silo(name, partial(parameters.validate, classes, CLASSES, "masked classes"))
        masked = np.stack([*sent.values()])
        pairs = parameters.ask_comparisons(server, masked)
        answer = offers.ask(info, "comparisons", request=pairs.message)
        won = blame_silo(self.spec.names[0], lambda: pairs.entries(answer.blobs["answer"], 1))
        primary = parameters.ask_primary_silos(server, won)
        answer = offers.ask(info, "primary silos", request=primary.message)
        return parameters.pack(
            blame_silo(self.spec.names[0], lambda: primary.entries(answer.blobs["answer"], 1))
        )


class PrimarySharesSilo(SharedWeightsSilo):
    """A silo's side of shares of primary silos."""

    def __init__(self, aggregator: PrivateWeighting, spec: RunSpec, context: SiloContext) -> None:
        super().__init__(aggregator, spec, context)
        self.handlers = {
            **self.handlers,
            "masked classes": self._classes,
            "comparisons": self._comparisons,
            "primary silos": self._primary_silos,
        }

    def share_parameters(self, session: Session) -> PrimarySiloParameters:
        """Return the public constants of the shares in a session."""
        return primary_silo_parameters(self._spec, session.transcript)

    def _classes(self, request: Message) -> Message:
        session = self._member.session_of(request)
        parameters, shares = self.share_parameters(session), self.silo_shares(request.run)
        place = session.roster.index(session.name)
        return request.answer(masked=parameters.mask_classes(shares, place, self._context.counts))

    def _comparisons(self, request: Message) -> Message:
        parameters = self.share_parameters(self._member.session_of(request))
        return self.offer_tables(request, parameters.offer_comparisons)

    def _primary_silos(self, request: Message) -> Message:
        parameters = self.share_parameters(self._member.session_of(request))
        return self.offer_tables(request, parameters.offer_primary_silos)


def primary_silo_types(spec: RunSpec, is_first: bool) -> tuple[MessageType, ...]:
    """Return the messages of the set-up of primary silos; silo 0, the first, is asked more than the others."""
    parameters, users = primary_silo_parameters(spec, bytes(32)), spec.population.users
    masked = MessageSchema(arrays={"masked": Array("uint8", (users,))})
    classes = MessageType("masked classes", MessageSchema({"session": is_digest}), masked)
    if not is_first:
        return (classes,)
    comparisons = lookup_type("comparisons", users * len(parameters.pairs), CLASSES**2, width=1)
    primary = lookup_type("primary silos", users * parameters.silos, parameters.wins, width=1)
    return base_type(), classes, comparisons, primary
