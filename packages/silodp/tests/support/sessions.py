"""Parties whose keys have been exchanged."""

from __future__ import annotations

from silodp.crypto.keys import HandshakeState, Identity, Session

NAMES = ("north", "east", "south", "west")
IDENTITIES = {name: Identity.fresh(name) for name in NAMES}
PINS = {name: identity.public for name, identity in IDENTITIES.items()}


def openings(run: str = "run") -> dict[str, HandshakeState]:
    return {name: HandshakeState.fresh(identity, run) for name, identity in IDENTITIES.items()}


def sessions(parties: dict[str, HandshakeState] | None = None) -> dict[str, Session]:
    parties = openings() if parties is None else parties
    hellos = [parties[name].hello for name in NAMES]
    return {name: opening.meet(hellos, PINS, "constants") for name, opening in parties.items()}
