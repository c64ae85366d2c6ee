"""A silo verifies a session once, and again as soon as anything is not what it was.

Attacked is the memory of verified sessions, which saves signature checks in every round. If it outlived a change of the
store, of a pinned key or of the session, a server could replace the keys of other silos after the first round and open
the masks of a silo.
"""

from dataclasses import replace

import pytest

from silodp.aggregators._key_agreement import SiloKeyAgreement, run_key_agreement
from silodp.crypto import keys
from silodp.errors import SilodpError
from silodp.wire.messages import Message
from support.refusals import refused
from support.stores import side_of
from support.wires import Parties, set_state


@pytest.fixture
def verified(monkeypatch) -> list[str]:
    """What was verified, in order."""
    seen: list[str] = []
    verify = keys._verify
    monkeypatch.setattr(
        keys,
        "_verify",
        lambda public, signature, message, what: (
            seen.append(what) or verify(public, signature, message, what)
        ),
    )
    return seen


def member(parties: Parties) -> SiloKeyAgreement:
    return side_of(parties.silos["silo0"])._member


def alter(parties: Parties, what: str, blob: str) -> bytes:
    """One bit of something that silo0 keeps of its session; gives what was there."""
    store, key = member(parties).store, f"session/{what}/0"
    before = store.get(key)
    kept = Message.decode(before)
    # The last byte but one is within the last key or signature, whatever stands around it.
    flipped = kept.blobs[blob]
    place = len(flipped) - 4
    flipped = flipped[:place] + bytes([flipped[place] ^ 1]) + flipped[place + 1 :]
    store.put(key, replace(kept, blobs={**kept.blobs, blob: flipped}).encode())
    return before


def test_signatures_are_verified_once_in_a_session(verified):
    parties = Parties()
    assert len(verified) == 4 * (4 + 4), "every silo: a greeting and a signature of the transcript of each"
    for round_ in range(3):
        update = parties.request("update", round_=round_)
        parties.ask({name: update for name in parties.names})
        parties.ask({name: parties.opening(update) for name in parties.names})
    assert len(verified) == 4 * (4 + 4)
    for silo in parties.silos.values():
        set_state(silo, round=-1)  # as if no round had begun
    another = run_key_agreement("run", parties.names, parties.ask, 1)
    assert another != parties.session
    assert len(verified) == 2 * 4 * (4 + 4)


def test_a_silo_that_starts_again_verifies_again(verified):
    parties = Parties()
    own = member(parties)
    again = SiloKeyAgreement(own.identity, own.pins, own.constants, own.store)
    verified.clear()
    assert again.session("run") == own.session("run")
    assert len(verified) == 4


@pytest.mark.parametrize(
    ("what", "blob", "says"),
    [
        ("roster", "silo1", r"the signature on the greeting of silo 'silo1' does not hold"),
        ("roster", "silo0", r"the signature on the greeting of silo 'silo0' does not hold"),
        ("opening", "nonce", r"'silo0' was shown a greeting in its name that it never sent"),
        ("opening", "ephemeral", r"'silo0' was shown a greeting in its name that it never sent"),
    ],
)
def test_a_changed_store_is_noticed_at_the_next_request(what, blob, says):
    parties = Parties()
    silo = parties.silos["silo0"]
    update = parties.request("update")
    silo.answer(update)
    before = alter(parties, what, blob)
    with pytest.raises(SilodpError, match=says):
        silo.answer(parties.opening(update))
    member(parties).store.put(f"session/{what}/0", before)
    assert silo.answer(parties.opening(update)).blobs["seal"]


def test_secrets_put_in_place_of_others_are_not_answered_with_the_old_ones():
    """No signature covers the seal's secret: what is read is what is used."""
    parties = Parties()
    silo, own = parties.silos["silo0"], member(parties)
    before = own.session("run").seal_key("use")
    alter(parties, "opening", "seal")
    assert own.session("run").seal_key("use") != before
    assert silo.answer(parties.request("update")).arrays["masked"].shape == (5,)


def test_a_key_that_is_pinned_anew_is_noticed_at_the_next_request():
    parties = Parties()
    silo, own = parties.silos["silo0"], member(parties)
    update = parties.request("update")
    silo.answer(update)
    own.pins["silo2"] = bytes(32)
    with pytest.raises(SilodpError, match=r"'silo2' appears with a key that silo 'silo0' has not pinned"):
        silo.answer(parties.opening(update))


def test_another_session_takes_the_place_of_the_last_and_the_last_is_refused():
    parties = Parties()
    silo, old = parties.silos["silo0"], parties.request("update")
    parties.session = run_key_agreement("run", parties.names, parties.ask, 1)
    with refused("session.unknown"):
        silo.answer(old)
    # What was charged first holds the release: a silo that was not asked for the old one.
    parties = Parties()
    silo = parties.silos["silo0"]
    parties.session = run_key_agreement("run", parties.names, parties.ask, 1)
    assert silo.answer(parties.request("update")).arrays["masked"].shape == (5,)
    assert len(member(parties)._last_session) == 1, "secrets of a session that is over do not stay in memory"


def test_secrets_do_not_show_when_a_member_is_printed():
    parties = Parties()
    own = member(parties)
    session = own.session("run")
    assert "_last_session" not in repr(own)
    assert session.transcript.hex() not in repr(own)
