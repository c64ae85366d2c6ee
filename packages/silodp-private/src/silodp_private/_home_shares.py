"""Shares of every person's home between the server and the silos; nobody learns a count, or who is at home where.

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
from silodp_private.crypto.homes import CLASSES, HomeParameters
from silodp_private.crypto.shares import ShareServer


def home_parameters(spec: RunSpec, session: bytes) -> HomeParameters:
    """Return the public constants of the shares in a session."""
    return HomeParameters(session, spec.population.users, spec.population.silos)


@dataclass(frozen=True)
class HomeServerShares(ServerShares):
    """The server's shares of homes: bit s of a word is of silo s."""

    def parameters(self, session: bytes) -> HomeParameters:
        """Return the public constants of the shares in a session."""
        return home_parameters(self.spec, session)

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
        homes = parameters.ask_homes(server, won)
        answer = offers.ask(info, "homes", request=homes.message)
        return parameters.pack(
            blame_silo(self.spec.names[0], lambda: homes.entries(answer.blobs["answer"], 1))
        )


class HomeSilo(SharedWeightsSilo):
    """A silo's side of shares of homes."""

    def __init__(self, aggregator: PrivateWeighting, spec: RunSpec, context: SiloContext) -> None:
        super().__init__(aggregator, spec, context)
        answered = {"masked classes": self._classes, "comparisons": self._comparisons, "homes": self._homes}
        self.handlers = {**self.handlers, **answered}

    def share_parameters(self, session: Session) -> HomeParameters:
        """Return the public constants of the shares in a session."""
        return home_parameters(self._spec, session.transcript)

    def _classes(self, request: Message) -> Message:
        session = self._member.session_of(request)
        parameters, shares = self.share_parameters(session), self.silo_shares(request.run)
        place = session.roster.index(session.name)
        return request.answer(masked=parameters.mask_classes(shares, place, self._context.counts))

    def _comparisons(self, request: Message) -> Message:
        parameters = self.share_parameters(self._member.session_of(request))
        return self.offer_tables(request, parameters.offer_comparisons)

    def _homes(self, request: Message) -> Message:
        parameters = self.share_parameters(self._member.session_of(request))
        return self.offer_tables(request, parameters.offer_homes)


def home_types(spec: RunSpec, is_first: bool) -> tuple[MessageType, ...]:
    """Return the messages of the set-up of homes; silo 0, the first, is asked more than the others."""
    parameters, users = home_parameters(spec, bytes(32)), spec.population.users
    masked = MessageSchema(arrays={"masked": Array("uint8", (users,))})
    classes = MessageType("masked classes", MessageSchema({"session": is_digest}), masked)
    if not is_first:
        return (classes,)
    comparisons = lookup_type("comparisons", users * len(parameters.pairs), CLASSES**2, width=1)
    homes = lookup_type("homes", users * parameters.silos, parameters.wins, width=1)
    return base_type(), classes, comparisons, homes
