"""Sessions: every lie a server can tell about who takes part is noticed by the silo it is told to, by name."""

from dataclasses import replace

import pytest

from silodp.crypto.keys import ClientHello, HandshakeState, Identity, Session
from silodp.crypto.streams import derive_key, derive_secret, keystream
from silodp.errors import SilodpError
from support.refusals import refused
from support.sessions import IDENTITIES, NAMES, PINS, openings, sessions


def test_every_two_silos_share_keys_that_no_third_has():
    met = sessions()
    for a in NAMES:
        for b in NAMES:
            if a < b:
                assert met[a].mask_key(b, 0, 0) == met[b].mask_key(a, 0, 0)
    keys = {
        met[a].mask_key(b, r, t) for a in NAMES for b in NAMES if a < b for r in range(3) for t in range(2)
    }
    assert len(keys) == 6 * 3 * 2


def test_a_session_has_its_own_keys_though_the_silos_are_the_same():
    first, second = sessions(), sessions()
    assert first["north"].transcript != second["north"].transcript
    assert first["north"].mask_key("east", 0) != second["north"].mask_key("east", 0)
    one = openings()
    hellos = [one[name].hello for name in NAMES]
    a, b = (one["north"].meet(hellos, PINS, constants) for constants in ("d = 5", "d = 6"))
    assert a.mask_key("east", 0) != b.mask_key("east", 0), "constants are bound into every key"


def test_seals_and_masks_disclose_nothing_of_one_another():
    met = sessions()["north"]
    assert len({met.seal_key(0, 0), met.seal_key(0, 1), met.seal_key(1, 0), met.mask_key("east", 0, 0)}) == 4


def test_all_silos_and_only_they_know_the_group_secret():
    met = sessions()
    boxes = {name: session.seal_contributions() for name, session in met.items()}
    secrets = {
        name: session.group_secret({peer: boxes[peer][name] for peer in NAMES if peer != name})
        for name, session in met.items()
    }
    assert len(set(secrets.values())) == 1
    relayed = b"".join(box for name in NAMES for box in boxes[name].values())
    assert all(session.opening.contribution not in relayed for session in met.values())


def test_a_contribution_that_was_altered_or_redirected_is_named():
    met = sessions()
    boxes = {name: session.seal_contributions() for name, session in met.items()}
    for_north = {peer: boxes[peer]["north"] for peer in NAMES if peer != "north"}
    for lie in (
        for_north | {"east": flipped(for_north["east"])},
        for_north | {"east": boxes["east"]["south"]},
        {name: box for name, box in for_north.items() if name != "east"},
    ):
        with pytest.raises(SilodpError, match=r"'east' sent to silo 'north'"):
            met["north"].group_secret(lie)


def test_a_silo_cannot_choose_its_contribution_when_it_knows_the_others_nor_send_two():
    """Else it could try contributions until the coins of a person fall as it likes, or split the silos."""
    met = sessions()
    boxes = {name: session.seal_contributions() for name, session in met.items()}
    east = met["east"]
    other = replace(east, opening=replace(east.opening, contribution=bytes(32)))
    boxes["east"]["north"] = other.seal_contributions()["north"]
    with pytest.raises(SilodpError, match=r"'east' sent silo 'north' another part"):
        met["north"].group_secret({peer: boxes[peer]["north"] for peer in NAMES if peer != "north"})
    met["south"].group_secret({peer: boxes[peer]["south"] for peer in NAMES if peer != "south"})


def flipped(data: bytes, position: int = 0) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_a_key_that_is_not_pinned_is_refused():
    stranger = HandshakeState.fresh(Identity.fresh("east"), "run").hello
    with pytest.raises(SilodpError, match=r"'east' appears with a key that silo 'north' has not pinned"):
        meeting(east=stranger)


def test_two_silos_whose_keys_were_swapped_are_refused():
    parties = openings()
    east, west = parties["east"].hello, parties["west"].hello
    swapped = replace(east, ephemeral=west.ephemeral), replace(west, ephemeral=east.ephemeral)
    with pytest.raises(SilodpError, match=r"signature on the greeting of silo 'east'"):
        meeting(parties, east=swapped[0], west=swapped[1])
    renamed = replace(west, name="east"), replace(east, name="west")
    with pytest.raises(SilodpError, match=r"'east' appears with a key"):
        meeting(parties, east=renamed[0], west=renamed[1])


def meeting(parties: dict[str, HandshakeState] | None = None, **instead: ClientHello) -> Session:
    parties = openings() if parties is None else parties
    return parties["north"].meet([instead.get(n, parties[n].hello) for n in NAMES], PINS, "constants")


@pytest.mark.parametrize("field", ["identity", "ephemeral", "nonce", "signature"])
def test_a_flipped_bit_in_a_greeting_is_refused(field):
    parties = openings()
    hello = parties["east"].hello
    with pytest.raises(SilodpError, match="'east'"):
        meeting(parties, east=replace(hello, **{field: flipped(getattr(hello, field))}))


def test_a_roster_without_someone_or_with_someone_twice_is_refused():
    parties = openings()
    hellos = [parties[name].hello for name in NAMES]
    for lie, odd in (
        (hellos[:-1], "west"),
        (hellos + hellos[1:2], "east"),
        ([*hellos, HandshakeState.fresh(Identity.fresh("mallory"), "run").hello], "mallory"),
    ):
        with pytest.raises(SilodpError, match=f"roster shown to silo 'north'.*{odd}"):
            parties["north"].meet(lie, PINS, "constants")


def test_a_greeting_of_another_run_or_of_ones_own_past_is_refused():
    old = openings("an earlier run")
    with pytest.raises(SilodpError, match=r"greeting of silo 'east'"):
        meeting(east=old["east"].hello)
    with pytest.raises(SilodpError, match=r"never sent"):
        meeting(north=openings()["north"].hello)


def test_a_server_that_tells_silos_different_stories_is_caught_by_the_transcript():
    """It shows one silo another order, or silos know other constants: nobody confirms."""
    parties = openings()
    hellos = [parties[name].hello for name in NAMES]
    for lie in ((hellos[::-1], "constants"), (hellos, "another model size")):
        met = {name: opening.meet(hellos, PINS, "constants") for name, opening in parties.items()}
        met["east"] = parties["east"].meet(*(lie[0], PINS, lie[1]))
        signatures = {name: session.signature() for name, session in met.items()}
        with pytest.raises(SilodpError, match=r"transcript of silo 'east'"):
            met["north"].confirm(signatures)
        with pytest.raises(SilodpError, match=r"transcript of silo '(north|west)'"):
            met["east"].confirm(signatures)
    with pytest.raises(SilodpError, match=r"transcript of silo 'north'"):
        sessions()["north"].confirm({})


def test_a_key_of_small_order_is_refused():
    parties = openings()
    weak = replace(parties["east"].hello, ephemeral=bytes(32))
    weak = replace(weak, signature=IDENTITIES["east"].sign(weak.signature_input("run")))
    with pytest.raises(SilodpError, match=r"'east' sent a key that hides nothing"):
        meeting(parties, east=weak)


def test_greetings_survive_the_wire_and_nothing_else_does():
    hello = openings()["east"].hello
    assert ClientHello.from_bytes(hello.to_bytes(), "east") == hello
    for damaged in (b"", b"{}", hello.to_bytes()[:-9], hello.to_bytes().replace(b'"', b"'"), b'["east"]'):
        with pytest.raises(SilodpError, match="'east'"):
            ClientHello.from_bytes(damaged, "east")


def test_a_name_that_steers_a_terminal_is_shown_without_what_steers():
    """An error names who is not on the roster, and a log shows it."""
    hello = replace(openings()["east"].hello, name="x\x1b[2K\n12:00 INFO")
    with refused("session.pins") as caught:
        meeting(openings(), east=ClientHello.from_bytes(hello.to_bytes(), "east"))
    assert str(caught.value).isprintable()


def test_a_silo_may_be_called_as_its_table_is():
    """The name of a file may have the space of Japanese, which is not printable by Python."""
    hello = HandshakeState.fresh(Identity.fresh("東京\u3000病院"), "run").hello
    assert ClientHello.from_bytes(hello.to_bytes(), "b") == hello


def test_streams_are_chacha20_and_long_ones_go_on_where_short_ones_end():
    # RFC 8439, A.1, test vector 1: all-zero key and nonce, counter 0.
    assert keystream(bytes(32), 32).tobytes().hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    )
    long = keystream(bytes(32), 700_000)
    assert (keystream(bytes(32), 300_001) == long[:300_001]).all()
    with pytest.raises(ValueError, match="counter"):
        keystream(bytes(32), 2**39)


def test_derived_keys_follow_rfc_5869_and_differ_by_purpose():
    import hmac

    pseudorandom = hmac.digest(b"salt", b"material", "sha256")
    expected = hmac.digest(pseudorandom, b'["silodp", "a", 1]' + b"\x01", "sha256")
    assert derive_secret(b"material", b"salt", "a", 1) == expected
    assert derive_key(pseudorandom, "a", 1) == expected
    assert len({derive_key(bytes(32), *use) for use in (("a", 1), ("a", "1"), ("a1",), ("a", 1, ""))}) == 4


def test_secrets_do_not_show_when_printed():
    identity = Identity.fresh("a")
    opening = HandshakeState.fresh(identity, "run")
    for secret in (identity.seed, opening.ephemeral, opening.seal, opening.contribution):
        assert repr(secret)[2:-1] not in repr(opening) + repr(identity)
