"""Attacks of the server on the oblivious transfers with silo 0: one failed check ends them.

Attacked is the secret vector of the party that offers tables, on which all transfers of a session rest. Every refusal,
and every acceptance, of an altered column tells one bit of it; without the end after the first failed check, the party
that asks would learn all of it and read every entry of the tables, and so the count N[u] of every person.
"""

from dataclasses import replace

import numpy as np
import pytest

from silodp.accounting.accountant import compute_epsilon
from silodp.aggregators._key_agreement import SessionInfo, run_key_agreement
from silodp.crypto.keys import Identity
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.runtime.silo import Silo
from silodp.wire.messages import Message
from silodp.wire.store import MemoryStore, RoundStore
from silodp_private._reciprocal_shares import ReciprocalServerShares
from silodp_private.crypto.oblivious_transfer import _stream_size
from silodp_private.lattice import Lattice
from support.masked import AVG, spec
from support.oracles import logistic_task, small_federation
from support.refusals import refused
from support.wires import set_state

METHOD = replace(AVG, weighting="records", user_sampling=0.5)


class Parties:
    """Three silos in a session with shares of the weights, driven by hand; `desk` is the server's."""

    def __init__(self) -> None:
        federation = small_federation(silos=3)
        self.aggregator = Lattice(count_cap=50)
        self.spec = replace(spec(METHOD), run="run", aggregator=self.aggregator)
        self.sent: list[Message] = []
        identities = {name: Identity.fresh(name) for name in self.spec.names}
        pins = {name: identity.public for name, identity in identities.items()}
        self.silos = {
            data.name: Silo(
                data, logistic_task(), self.spec, Randomness.secret(), MemoryStore(),
                identities[data.name], pins,
            )
            for data in federation.silos
        }  # fmt: skip
        self.ask_all({name: Message("setup", "run") for name in self.spec.names})
        self.store = RoundStore(MemoryStore())
        self.shares = ReciprocalServerShares(self.spec, self, self.aggregator.constants(self.spec))  # type: ignore
        self.met = SessionInfo(run_key_agreement("run", self.spec.names, self.ask_all), 0)
        fields = {"session": self.met.session, "number": 0}
        self.store.run.put("session ready", Message("session", "run", fields=fields).encode())
        self.shares.set_up(self.met)

    def ask_all(self, requests: dict[str, Message]) -> dict[str, Message]:
        self.sent.extend(requests.values())
        return {name: self.silos[name].answer(request) for name, request in requests.items()}


def with_a_flipped_bit(request: bytes, column: int) -> bytes:
    place = 8 + column * _stream_size(12)
    return request[:place] + bytes([request[place] ^ 0x80]) + request[place + 1 :]


def test_one_failed_check_ends_the_transfers_of_a_session():
    """Every refusal and every acceptance of an altered column tells one bit of the secret they all rest on."""
    parties = Parties()
    everyone = np.ones(12, dtype=bool)
    parties.shares.round_shares(0, everyone)
    sample = parties.sent[-1]
    outcomes: list[str] = []
    zero = parties.silos["silo0"]
    for column in range(24):
        kept = parties.shares._load_kept()
        request = parties.shares._load_or_make_lookup(column + 1, everyone, kept).message
        altered = {"request": with_a_flipped_bit(request, column)}
        try:
            set_state(zero, round=column, attempt=0)
            zero.answer(replace(sample, round=column + 1, blobs=altered))
            outcomes.append("")
        except SilodpError as error:
            outcomes.append(str(error))
    first = next(
        number for number, outcome in enumerate(outcomes) if outcome
    )  # half of the columns are noticed
    assert all("has ended its transfers" in outcome for outcome in outcomes[first + 1 :])


def test_requests_of_the_set_up_name_their_session():
    parties = Parties()
    zero = parties.silos["silo0"]
    for kind in ("masked counts", "reciprocals", "base"):
        lie = replace(next(m for m in parties.sent if m.kind == kind), fields={"session": "00" * 32})
        with refused("session.unknown"):
            zero._handlers[kind](lie)
    parties.shares.round_shares(0, np.ones(12, dtype=bool))
    with refused("session.unknown"):
        zero.answer(replace(parties.sent[-1], round=1, fields={"session": "00" * 32}))


def test_a_confirmation_that_comes_late_does_not_bring_an_old_session_back():
    parties = Parties()
    stopped: dict[str, Message] = {}

    def interrupted(requests: dict[str, Message]) -> dict[str, Message]:
        if next(iter(requests.values())).kind == "confirm":
            stopped.update(requests)
            raise KeyboardInterrupt
        return parties.ask_all(requests)

    with pytest.raises(KeyboardInterrupt):
        run_key_agreement("run", parties.spec.names, interrupted, 1)
    run_key_agreement("run", parties.spec.names, parties.ask_all, 2)
    with refused("gate.order"):
        parties.silos["silo0"].answer(stopped["silo0"])


def test_what_a_silo_cannot_draw_is_refused_before_anything_runs():
    loud = replace(METHOD, noise_multiplier=20.0)
    with pytest.raises(SilodpError, match=r"share of the noise is 11\.5 clips"):
        Lattice(count_cap=50).check(spec(loud))
    Lattice(count_cap=50).check(spec(replace(METHOD, noise_multiplier=13.0)))


def test_flooding_is_weighed_against_the_servers_epsilon():
    """The server decrypts and knows the sample: by the released ε, amplified, it would be promised too much."""
    rare = spec(replace(METHOD, user_sampling=0.1))
    lattice = Lattice(count_cap=50)
    delta = rare.delta * lattice.delta_share
    spent = {
        name: compute_epsilon([(lattice.event(rare, view), lattice.attempts)], delta, "rdp")
        for name, view in lattice.views(rare.method, 3).items()
    }
    assert lattice.parameters(rare).epsilon >= spent["server"] > 2 * spent["released"]
