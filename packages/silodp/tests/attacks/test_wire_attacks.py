"""Attacks of the wire, or of the server, on a run under secure aggregation.

Attacked are the masks: of any two sums that contain the same noisy values, the difference is the part of one silo. The
attacks flip bits, replay answers, repeat attempts and rounds, and change rosters or models. Without the refusals, the
server would read updates of single silos. Each attack ends in one error that names a party, and the run continues.
"""

from dataclasses import replace

import pytest
import torch

from silodp.errors import SilodpError
from silodp.methods import UldpSgd
from silodp.wire.messages import Message
from support.masked import run
from support.refusals import refused
from support.wires import Parties, Wire, altered, parts, wire  # noqa: F401

KINDS = ("hello", "roster", "confirm", "setup", "update", "open")
RECORDS = UldpSgd(5.0, 0.5, weighting="records")


@pytest.mark.parametrize("direction", ["to_silo", "to_server"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_anywhere_is_noticed_and_the_run_goes_on_afterwards(kind, direction, wire, tmp_path):  # noqa: F811
    seen: list[str] = []

    def listen(name, message):
        if message.kind == kind and name == "silo1" and not seen:
            seen.extend(parts(message))
        return message

    setattr(wire, direction, staticmethod(listen))
    whole = run(rounds=2, method=RECORDS)
    assert len(seen) >= 4
    for number, part in enumerate(seen):
        done = []
        out = tmp_path if number == len(seen) - 1 else None  # one of them goes on

        def tamper(name, message, part=part, done=done):
            due = message.kind == kind and message.round == (kind in ("update", "open")) and name == "silo1"
            if due and not done:
                done.append(part)
                return altered(message, part)
            return message

        setattr(wire, direction, staticmethod(tamper))
        with pytest.raises(SilodpError, match="silo1"):
            run(rounds=2, method=RECORDS, out=out)
        assert done, part
    resumed = run(rounds=2, method=RECORDS, out=out, resume=True)
    assert torch.equal(resumed.params, whole.params)
    assert resumed.epsilon == whole.epsilon


@pytest.mark.parametrize("kind", ["update", "open"])
def test_an_answer_played_back_from_an_earlier_round_is_refused(kind, wire):  # noqa: F811
    first: dict[str, Message] = {}

    def play_back(name, message):
        if message.kind != kind:
            return message
        return first.setdefault(name, message)

    wire.to_server = staticmethod(play_back)
    with pytest.raises(SilodpError, match=r"silo 'silo0'.*played back"):
        run(rounds=2)


def test_an_answer_of_another_silo_or_another_run_is_refused(wire):  # noqa: F811
    kept: list[Message] = []

    def keep(name, message):
        if message.kind == "update":
            kept.append(message)
        return message

    wire.to_server = staticmethod(keep)
    run(rounds=1)
    other_run = kept[1]
    wire.to_server = staticmethod(lambda name, m: other_run if (name, m.kind) == ("silo1", "update") else m)
    with pytest.raises(SilodpError, match="silo1"):
        run(rounds=1)
    last: list[Message] = []

    def swap(name, message):
        last.append(message)
        return last[-2] if (name, message.kind) == ("silo1", "update") else message

    wire.to_server = staticmethod(swap)
    with pytest.raises(SilodpError, match="silo1"):
        run(rounds=1)


def test_a_request_repeated_gets_the_same_bytes(wire):  # noqa: F811
    answers: list[bytes] = []

    def twice(name, message):
        again = wire.last.parties[name].silo.answer(wire.last.request)
        answers.append(again.encode())
        assert again.encode() == message.encode()
        return message

    def remember(name, message):
        wire.last.request = message
        return message

    wire.to_silo, wire.to_server = staticmethod(remember), staticmethod(twice)
    run(rounds=2, seed=None)
    assert len(answers) > 20


# --- a server that lies, and signs its lies ---


def test_no_two_attempts_with_the_same_noisy_values_are_opened():
    """Opened sums over four and over three silos would differ by one silo's part."""
    parties = Parties(fewest=3)
    three = parties.names[:3]
    silo = parties.silos["silo0"]
    first, second = (
        parties.request("update", roster, attempt=attempt)
        for attempt, roster in enumerate((parties.names, three))
    )
    silo.answer(first)
    silo.answer(second)
    silo.answer(parties.opening(second))
    with refused("gate.open"):
        silo.answer(parties.opening(first))


def test_values_that_were_opened_are_not_masked_again():
    parties = Parties(fewest=3)
    three, silo = parties.names[:3], parties.silos["silo0"]
    first = parties.request("update")
    silo.answer(first)
    silo.answer(parties.opening(first))
    with refused("gate.release"):
        silo.answer(parties.request("update", three, attempt=2))
    for release in (2, 7):
        with refused("gate.release"):
            silo.answer(parties.request("update", three, attempt=2, release=release))
    fresh = silo.answer(parties.request("update", three, attempt=3, release=1))
    assert fresh.arrays["masked"].shape == (5,)


def test_a_seal_is_opened_only_for_the_roster_and_request_it_was_masked_for():
    parties = Parties(fewest=3)
    silo, update = parties.silos["silo0"], parties.request("update")
    with refused("gate.order"):
        silo.answer(parties.opening(update))
    silo.answer(update)
    for lie in ({"roster": list(parties.names[:3])}, {"release": 1}, {"request": "0" * 64}):
        with refused("gate.open"):
            silo.answer(parties.opening(update, **lie))
    with refused("gate.open"):
        silo.answer(replace(parties.opening(update), attempt=1))


@pytest.mark.parametrize(
    ("roster", "code"),
    [
        (("silo0", "silo1"), "gate.roster"),
        (("silo1", "silo2", "silo3"), "gate.roster"),
        (("silo1", "silo0", "silo2"), "message.malformed"),
        (("silo0", "silo1", "silo1"), "message.malformed"),
        (("silo0", "silo1", "mallory"), "message.malformed"),
        ((), "gate.roster"),
    ],
)
def test_a_roster_too_small_or_not_of_the_session_is_refused(roster, code):
    parties = Parties(fewest=3)
    with refused(code):
        parties.silos["silo0"].answer(parties.request("update", roster))


def test_a_further_attempt_has_lost_a_silo():
    """Else attempts, and releases, of a round would have no end."""
    parties = Parties(fewest=3)
    silo = parties.silos["silo0"]
    silo.answer(parties.request("update"))
    with refused("gate.roster"):
        silo.answer(parties.request("update", attempt=1))
    silo.answer(parties.request("update", parties.names[:3], attempt=1))
    with refused("gate.roster"):
        silo.answer(parties.request("update", ("silo0", "silo2", "silo3"), attempt=2))


def test_attempts_of_a_round_are_numbered_upwards():
    """Else the silo's state would go back to an attempt that was given up, and whose sum others may know."""
    parties = Parties(fewest=3)
    silo = parties.silos["silo0"]
    silo.answer(parties.request("update", attempt=2))
    with refused("gate.attempt"):
        silo.answer(parties.request("update", parties.names[:3], attempt=1))
    assert silo.gate.state.attempt == 2


def test_another_model_within_a_round_is_refused():
    """The same noise under two models would be subtracted away."""
    parties = Parties(fewest=3)
    parties.silos["silo0"].answer(parties.request("update"))
    for release in (0, 1):
        lie = parties.request("update", parties.names[:3], attempt=1, release=release, value=1.0)
        with refused("gate.model"):
            parties.silos["silo0"].answer(lie)
    with refused("gate.answered"):
        parties.silos["silo0"].answer(parties.request("update", value=1.0))


def test_old_rounds_are_not_opened_after_a_dropout():
    parties = Parties(fewest=3)
    silo, first = parties.silos["silo0"], parties.request("update")
    silo.answer(first)
    silo.answer(parties.request("update", round_=1))
    for request in (parties.opening(first), replace(first, attempt=1)):
        with refused("gate.past"):
            silo.answer(request)


def test_a_setup_is_not_repeated_within_a_run_and_another_run_is_not_answered():
    parties = Parties()
    silo = parties.silos["silo0"]
    with refused("message.malformed"):
        silo.answer(Message("roster", "run", fields={"order": list(parties.names[:3])}))
    with refused("gate.run"):
        silo.answer(parties.request("update", run="other"))


def test_a_message_of_another_session_is_refused():
    parties, others = Parties(), Parties()
    with refused("session.unknown"):
        parties.silos["silo0"].answer(others.request("update"))
    parties = Parties()  # the release of the first ones is charged for what was refused
    silo, update = parties.silos["silo0"], parties.request("update")
    silo.answer(update)
    with refused("session.unknown"):
        silo.answer(parties.opening(update, session=others.session))


def test_an_interrupted_set_up_is_begun_anew_with_other_secrets(wire, tmp_path):  # noqa: F811
    """Going on with the old secrets would mask twice with one key."""
    wire.fails = staticmethod(lambda name, request: "before" if request.kind == "confirm" else None)
    with pytest.raises(SilodpError, match="silo0"):
        run(rounds=1, out=tmp_path)
    first = [message.blobs["hello"] for _, message in wire.received if message.kind == "hello"]
    wire.fails = staticmethod(lambda name, request: None)
    run(rounds=1, out=tmp_path, resume=True)
    hellos = [message.blobs["hello"] for _, message in wire.received if message.kind == "hello"]
    assert len(set(hellos)) == 2 * len(set(first)) == 6


def test_a_vector_of_the_wrong_length_is_refused_by_name(monkeypatch):
    from silodp.crypto.secure_aggregation import WordGroup

    original = WordGroup.from_integers
    monkeypatch.setattr(
        WordGroup, "from_integers", lambda self, value: original(WordGroup(4, self.bits), value[:4])
    )
    monkeypatch.setattr(WordGroup, "mask", lambda self, value, key, sign: value)
    with refused("message.malformed"):
        run(rounds=1)
