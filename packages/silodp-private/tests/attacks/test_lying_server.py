"""Attacks of a server that lies while silos agree on keys and signs its lies, and of a wire that replays messages.

Attacked is the agreement on who takes part. Without signed rosters and confirmations a server could give each silo
another list of members, add parties that it controls until the masks of one silo are all known to it, or have an old
answer counted again. Each attack ends in one error that names a silo, and the run continues unchanged.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from silodp.aggregators import _key_agreement
from silodp.aggregators.masked import Masked
from silodp.crypto.keys import ClientHello, HandshakeState, Identity
from silodp.errors import SilodpError
from silodp.wire.messages import Message
from silodp.wire.transport import sign, verify
from support.oracles import small_federation
from support.private import LATTICE, PAILLIER, SAMPLED, Parties, run
from support.refusals import refused
from support.wires import Wire, altered, parts, tampered, wire  # noqa: F401

AGGREGATORS = {"masked": Masked(), "lattice": LATTICE, "paillier": PAILLIER}
ALL = pytest.mark.parametrize("name", AGGREGATORS)


def few(name: str, silos: int = 3, **more):
    aggregator = AGGREGATORS[name] if silos == 3 else replace(AGGREGATORS[name], min_silos=3)
    return run(aggregator, SAMPLED, federation=small_federation(silos=silos, users=5), **more)


@cache
def whole(name: str):
    return few(name)


def assert_goes_on(name: str, out) -> None:
    resumed = few(name, out=out, resume=True)
    assert torch.equal(resumed.params, whole(name).params)
    assert resumed.epsilon == whole(name).epsilon


# --- while silos meet ---


def hellos_of(roster: Message) -> dict[str, ClientHello]:
    return {name: ClientHello.from_bytes(blob, name) for name, blob in roster.blobs.items()}


def shown(roster: Message, **hellos: ClientHello) -> Message:
    return replace(roster, blobs=roster.blobs | {name: hello.to_bytes() for name, hello in hellos.items()})


def with_names_swapped(to: str, roster: Message) -> Message:
    one, two = (hellos_of(roster)[name] for name in ("silo1", "silo2"))
    return shown(roster, silo1=replace(two, name="silo1"), silo2=replace(one, name="silo2"))


def with_session_keys_swapped(to: str, roster: Message) -> Message:
    one, two = (hellos_of(roster)[name] for name in ("silo1", "silo2"))
    return shown(
        roster, silo1=replace(one, ephemeral=two.ephemeral), silo2=replace(two, ephemeral=one.ephemeral)
    )


def with_a_key_of_its_own(to: str, roster: Message) -> Message:
    return shown(roster, silo1=HandshakeState.fresh(Identity.fresh("silo1"), roster.run).hello)


def without_a_silo(to: str, roster: Message) -> Message:
    blobs = {name: blob for name, blob in roster.blobs.items() if name != "silo2"}
    return replace(roster, fields={"order": ["silo0", "silo1"]}, blobs=blobs)


def with_one_too_many(to: str, roster: Message) -> Message:
    stranger = HandshakeState.fresh(Identity.fresh("silo3"), roster.run).hello
    return shown(replace(roster, fields={"order": [*roster.fields["order"], "silo3"]}), silo3=stranger)


def in_another_order_to_one(to: str, roster: Message) -> Message:
    order = roster.fields["order"]
    return replace(roster, fields={"order": order[::-1] if to == "silo1" else order})


LIES = {
    with_names_swapped: r"silo 'silo1' appears with a key that silo 'silo0' has not pinned",
    with_session_keys_swapped: r"the signature on the greeting of silo 'silo1' does not hold",
    with_a_key_of_its_own: r"silo 'silo1' appears with a key that silo 'silo0' has not pinned",
    without_a_silo: r"silo 'silo0' sent a malformed message of kind 'roster'",
    with_one_too_many: r"silo 'silo0' sent a malformed message of kind 'roster'",
    in_another_order_to_one: r"silo 'silo1' sent a malformed message of kind 'roster'",
}


# Silos of all aggregators meet in the same way: all lies to one of them, and one lie to each.
TOLD = [
    pytest.param(
        name,
        lie,
        id=f"{lie.__name__}-{name}",
        marks=pytest.mark.slow if name != "masked" and lie is not with_a_key_of_its_own else (),
    )
    for lie in LIES
    for name in AGGREGATORS
]


@pytest.mark.parametrize(("name", "lie"), TOLD)
def test_a_server_that_lies_about_who_takes_part_is_found_out_by_the_silos(name, lie, monkeypatch, tmp_path):
    meet = _key_agreement.run_key_agreement

    def lying(run, names, ask, number=0):
        def told(requests):
            return ask({to: lie(to, m) if m.kind == "roster" else m for to, m in requests.items()})

        return meet(run, names, told, number)

    with monkeypatch.context() as patch:
        patch.setattr(_key_agreement, "run_key_agreement", lying)
        with pytest.raises(SilodpError, match=LIES[lie]):
            few(name, out=tmp_path)
    assert_goes_on(name, tmp_path)


# --- played back ---

KINDS = [(name, kind) for name in AGGREGATORS for kind in ("update", "open")] + [("lattice", "sample")]


@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize("direction", ["to_silo", "to_server"])
def test_a_message_of_an_earlier_round_is_refused(name, kind, direction, wire, tmp_path):  # noqa: F811
    first: dict[str, Message] = {}

    def play_back(to, message):
        return first.setdefault(to, message) if message.kind == kind else message

    setattr(wire, direction, staticmethod(play_back))
    with pytest.raises(SilodpError, match=r"silo 'silo0'.*(played back|will not repeat round 1)"):
        few(name, out=tmp_path)
    setattr(wire, direction, staticmethod(lambda to, message: message))
    assert_goes_on(name, tmp_path)


@ALL
def test_an_answer_to_an_earlier_attempt_is_refused(name, wire, tmp_path):  # noqa: F811
    """A silo that answers twice: what it sent before another silo was lost comes again."""

    def fails(silo, message):
        return "before" if (silo, message.kind) == ("silo3", "update") else None

    wire.fails = staticmethod(fails)
    undisturbed = few(name, silos=4)
    first: dict[int, Message] = {}

    def again(silo, message):
        if (silo, message.kind) != ("silo1", "update"):
            return message
        return first.setdefault(message.round, message)

    wire.to_server = staticmethod(again)
    with pytest.raises(SilodpError, match=r"silo 'silo1'.*played back"):
        few(name, silos=4, out=tmp_path)
    assert first[0].attempt == 0
    wire.to_server = staticmethod(lambda silo, message: message)
    resumed = few(name, silos=4, out=tmp_path, resume=True)
    assert torch.equal(resumed.params, undisturbed.params)
    assert resumed.epsilon == undisturbed.epsilon


@pytest.mark.parametrize("aggregator", [LATTICE, PAILLIER], ids=lambda a: a.name)
def test_a_message_of_another_session_is_refused(aggregator):
    parties, others = Parties(aggregator), Parties(aggregator)
    others.run_round(0)
    weights = {"lattice": ["masked counts", "reciprocals", "sample"], "paillier": ["blinded counts"]}
    for kind in ("update", "open", *weights[aggregator.name]):
        # Not through the gate, which refuses most of them for their order already.
        with refused("session.unknown"):
            parties.silos["silo0"]._handlers[kind](others.last(kind))
    parties.run_round(0)


# --- altered ---


@ALL
def test_every_part_of_every_message_is_under_its_signature(name):
    parties, identity = Parties(AGGREGATORS[name]), Identity.fresh("sender")
    for round_ in (0, 1):
        parties.run_round(round_)
    seen = {(m.kind, "request"): m for _, m in parties.transport.asked}
    seen |= {(m.kind, "answer"): m for _, m in parties.transport.answered}
    assert {kind for kind, _ in seen} >= {"setup", "hello", "roster", "confirm", "update", "open"}
    for (kind, direction), message in seen.items():
        sent = sign(message, identity, "silo0", "of this request")
        read = (identity.public, "them", "silo0", "of this request")
        assert verify(sent, *read).digest() == message.digest(), (kind, direction)
        for part in parts(message):
            lie = tampered(sent, lambda message, part=part: altered(message, part))
            assert lie != sent
            with refused("message.signature"):
                verify(lie, *read)
        for place in range(0, 72):
            with refused("message.signature"):
                verify(sent[:place] + bytes([sent[place] ^ 1]) + sent[place + 1 :], *read)
        for others in (("silo1", "of this request"), ("silo0", "of another request")):
            with refused("message.signature"):
                verify(sent, identity.public, "them", *others)
        with refused("message.too_large"):
            verify(sent, *read, max_bytes=len(sent) - 100)


@ALL
def test_bytes_are_counted_per_round(name):
    """What travels, not much more, and no set-up."""
    result = few(name, rounds=3)
    assert "bytes" not in result.metrics[0]
    spec = Parties(AGGREGATORS[name], federation=small_federation(users=5)).spec
    needed = AGGREGATORS[name].describe(spec).get("bytes up, per silo and round", 5 * 4)
    for row in result.metrics[1:]:
        assert 3 * needed < row["bytes"]["up"] < 3 * (needed + 8_000), name
        assert row["bytes"]["down"] > 3 * 5 * 4


@pytest.mark.parametrize("release", [False, 0.0, "0", None, -1])
def test_a_release_is_a_whole_number(release):
    """Masks are drawn by its value and what was opened is kept by its name, so there must be one name for a value."""
    parties = Parties(Masked(), SAMPLED)
    parties.run_round(0)
    asked = parties.last("update")
    for request in (asked, parties.last("open")):
        forged = replace(request, round=1, fields=request.fields | {"release": release})
        with refused("message.malformed"):
            parties.silos["silo0"].answer(forged)
