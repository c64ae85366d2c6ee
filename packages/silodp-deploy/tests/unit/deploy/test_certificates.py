"""Certificates end, and are renewed under the same digest: the authority outlives what it signs, the keys stay."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from silodp_deploy import certificates
from silodp_deploy.certificates import (
    AUTHORITY_DAYS,
    VALID_DAYS,
    WARN_DAYS,
    Authority,
    ExpiryWatch,
    describe_early_end,
    find_certificate,
    load_context,
    make_request,
    read_certificates,
)
from silodp_deploy.check import check_party
from silodp_deploy.consortium import Consortium, take_copy
from silodp_deploy.setup import make_keys, seal_public
from support.refusals import refused

PARTIES = ("server", "silo-1", "silo-2")


def move_clock(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """From now on certificates are signed and looked at so many days later."""

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=days)

    monkeypatch.setattr(certificates, "datetime", Later)


@pytest.fixture
def sealed(public: Path, tmp_path: Path) -> Consortium:
    """A sealed folder; the parties' own ones are beside it."""
    (tmp_path / "requests").mkdir()
    for name in PARTIES:
        shutil.copy(make_keys(tmp_path / name, name), tmp_path / "requests")
    return seal_public(tmp_path, "server.example", 8443)


def read_ends(consortium: Consortium) -> dict[str, datetime]:
    found = read_certificates(consortium.folder, consortium.sealed)
    return {name: one.not_valid_after_utc for name, one in found.items()}


@pytest.mark.parametrize("years", [0, 2, 5, 9, 12, 30])
def test_an_authority_outlives_what_it_signs_whenever_it_signs(
    years: int, sealed: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ended together with the certificates of its first seal would make every renewal worthless."""
    first = Authority.load(sealed.folder / "ca.pem", tmp_path / "coordinator" / "authority.key")
    assert first.valid_until - datetime.now(UTC) > timedelta(days=AUTHORITY_DAYS - 1)
    move_clock(monkeypatch, 365 * years)
    again = seal_public(tmp_path, None, again=True)
    later = Authority.load(again.folder / "ca.pem", tmp_path / "coordinator" / "authority.key")
    assert (later == first) == (365 * years + VALID_DAYS < AUTHORITY_DAYS - 1)
    ends = read_ends(again)
    assert all(ends[name] < ends["authority"] for name in PARTIES)
    assert all(
        ends[name] > datetime.now(UTC) + timedelta(days=365 * years + VALID_DAYS - 1) for name in PARTIES
    )
    # Keys and address stay, and with them the digest: nobody accepts again.
    assert (again.digest, again.sealed) == (sealed.digest, sealed.sealed)


def test_a_certificate_that_ends_is_warned_of_once_a_day_and_then_refused(
    sealed: Consortium, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    watch = ExpiryWatch(sealed, "silo-1")
    watch.check()
    assert not caplog.records
    days = watch.count_days()
    assert set(days) == {"authority", *PARTIES}
    assert VALID_DAYS - 1 < days["silo-1"] < VALID_DAYS
    for passed, lines in (
        (VALID_DAYS - WARN_DAYS + 1, 1),
        (VALID_DAYS - WARN_DAYS + 1.5, 1),
        (VALID_DAYS - 0.1, 2),
        (VALID_DAYS + 0.1, 3),  # less than a day later, and ended
    ):
        move_clock(monkeypatch, passed)
        watch.warn()
        watch.warn()
        assert len(caplog.records) == lines
    assert "seal DIR --again" in caplog.text
    with refused("deploy.certificate"):
        watch.check()
    # By a clock that is two days behind, a certificate of today has not begun.
    move_clock(monkeypatch, -2)
    with refused("deploy.certificate"):
        watch.check()
    move_clock(monkeypatch, -0.9)
    watch.check()


def test_whether_a_certificate_may_end_before_the_run_is_said() -> None:
    assert describe_early_end({"silo-1": 366.0, "server": 365.0}, 365) is None
    told = describe_early_end({"silo-1": 364.0, "server": 100.0, "authority": 3000.0}, 365)
    assert told is not None
    assert all(word in told for word in ("'silo-1'", "'server'", "in 100 days"))
    assert "authority" not in told


def test_a_clock_or_a_certificate_that_is_wrong_is_found_by_check(
    sealed: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(days: float) -> tuple[bool, str]:
        move_clock(monkeypatch, days)
        (found,) = [one for one in check_party(tmp_path / "server", sealed) if one.name == "certificates"]
        return found.is_good, found.told

    assert check(0)[0]
    assert "may end before" not in check(0)[1]
    assert check(VALID_DAYS - 300)[0]
    assert "may end before" in check(VALID_DAYS - 300)[1]
    assert not check(VALID_DAYS + 1)[0]
    assert not check(-2)[0]


# --- renewed while a run is in progress: the digest covers keys, and not certificates --------------------------


def test_a_renewed_certificate_is_taken_without_being_accepted(
    sealed: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that starts (`take_copy`), and by one that runs (`refresh`)."""
    home = tmp_path / "silo-1"
    copy = take_copy(sealed.folder, home)
    watch = ExpiryWatch(copy, "silo-1")
    assert not watch.refresh()
    first = read_ends(copy)
    move_clock(monkeypatch, AUTHORITY_DAYS - VALID_DAYS + 100)  # the authority is renewed, too
    assert seal_public(tmp_path, None, again=True).digest == sealed.digest
    assert read_ends(copy) == first
    assert watch.refresh()
    assert not watch.refresh()
    assert watch.count_days()["silo-1"] > VALID_DAYS - 1
    assert all(end > first[name] for name, end in read_ends(copy).items())
    load_context(copy, "silo-1", home)
    # An older certificate is not taken in place of a newer one, whoever puts it back.
    find_certificate(sealed.folder, "silo-1").write_bytes(
        find_certificate(copy.folder, "silo-1").read_bytes()
    )
    move_clock(monkeypatch, 1)
    seal_public(tmp_path, None, again=True)
    renewed = read_ends(copy)
    assert not watch.refresh()
    assert read_ends(take_copy(sealed.folder, home)) == renewed


def put_other_authority(public: Path, authority: Authority, requests: Path) -> None:
    """Another authority, which signs the same requests: a man in the middle."""
    other = Authority.fresh("test")
    (public / "ca.pem").write_bytes(other.certificate)
    for name in PARTIES:
        request = make_request(name)[1]
        find_certificate(public, name).write_bytes(other.sign(request, name))


def put_other_key(public: Path, authority: Authority, requests: Path) -> None:
    """The consortium's own authority signs another key for a silo."""
    find_certificate(public, "silo-1").write_bytes(authority.sign(make_request("silo-1")[1], "silo-1"))


def put_other_issuer(public: Path, authority: Authority, requests: Path) -> None:
    """For the silo's own key, which is public, and of another authority: taken, it would lock the silo out."""
    request = json.loads((requests / "silo-1.request.json").read_text())["certificate_request"].encode()
    forged = Authority.fresh(authority_name(authority)).sign(request, "silo-1")
    find_certificate(public, "silo-1").write_bytes(forged)


def authority_name(authority: Authority) -> str:
    subject = x509.load_pem_x509_certificate(authority.certificate).subject.rfc4514_string()
    return subject.removeprefix("CN=").removesuffix(" consortium")


def put_certificate_of_another_silo(public: Path, authority: Authority, requests: Path) -> None:
    find_certificate(public, "silo-1").write_bytes(find_certificate(public, "silo-2").read_bytes())


def damage(public: Path, authority: Authority, requests: Path) -> None:
    find_certificate(public, "silo-1").write_bytes(
        b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----"
    )


def take_away(public: Path, authority: Authority, requests: Path) -> None:
    find_certificate(public, "silo-1").unlink()


def link(public: Path, authority: Authority, requests: Path) -> None:
    path = find_certificate(public, "silo-1")
    path.rename(public.parent / "elsewhere.pem")
    path.symlink_to(public.parent / "elsewhere.pem")


@pytest.mark.parametrize(
    "attack",
    [
        put_other_authority,
        put_other_key,
        put_other_issuer,
        put_certificate_of_another_silo,
        damage,
        take_away,
        link,
    ],
)
def test_whoever_exchanges_certificates_cannot_exchange_a_key(
    attack: Callable[[Path, Authority, Path], None],
    sealed: Consortium,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The digest does not cover certificates: the roster, which it covers, pins their keys."""
    home = tmp_path / "silo-1"
    copy = take_copy(sealed.folder, home)
    before = {path: path.read_bytes() for path in copy.folder.rglob("*.pem")}
    watch = ExpiryWatch(copy, "silo-1")
    authority = Authority.load(sealed.folder / "ca.pem", tmp_path / "coordinator" / "authority.key")
    attack(sealed.folder, authority, tmp_path / "requests")
    assert Consortium.load(sealed.folder).digest == sealed.digest
    for _ in range(2):
        assert not watch.refresh()  # a process that runs goes on with what it has
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1
    assert {path: path.read_bytes() for path in copy.folder.rglob("*.pem")} == before
    assert watch.count_days()["silo-1"] > VALID_DAYS - 1
    for start in (lambda: take_copy(sealed.folder, home), lambda: ExpiryWatch(sealed, "silo-1")):
        with refused("deploy.public" if attack is link else "deploy.certificate"):
            start()


def test_a_second_certificate_behind_that_of_the_authority_is_trusted_by_nobody(
    sealed: Consortium, tmp_path: Path
) -> None:
    """OpenSSL trusts every certificate of a file, and the roster pins the first: the others must not get there."""
    path = sealed.folder / "ca.pem"
    path.write_bytes(path.read_bytes() + Authority.fresh("evil").certificate)
    home = tmp_path / "silo-1"
    for consortium in (sealed, take_copy(sealed.folder, home)):
        trusted = load_context(consortium, "silo-1", home).get_ca_certs()
        assert len(trusted) == 1
        assert "evil" not in str(trusted)


def test_what_lies_beside_certificates_is_no_part_of_the_folder(sealed: Consortium, tmp_path: Path) -> None:
    """It is not digested, so it is neither copied nor read: a configuration cannot name it."""
    (sealed.folder / "certificates" / "evil.py").write_text("raise SystemExit")
    (sealed.folder / "certificates" / "silo-9.pem").write_text("patient\n1\n")
    copy = take_copy(sealed.folder, tmp_path / "silo-1")
    assert {path.stem for path in (copy.folder / "certificates").iterdir()} == set(PARTIES)
    config = sealed.folder / "config.toml"
    text = config.read_text()
    for name in ("certificates/evil.py:Net", "ca.pem:Net"):
        config.write_text(text.replace("[data]", f'[task]\nmodel = "{name}"\n[data]'))
        with refused("deploy.public"):
            Consortium.load(sealed.folder)


@pytest.mark.parametrize(
    "request_", ["", "x", "\ud800", "-----BEGIN CERTIFICATE REQUEST-----\nAA==\n-----END"]
)
def test_a_request_without_a_key_is_refused(request_: str, sealed: Consortium, tmp_path: Path) -> None:
    path = tmp_path / "requests" / "silo-1.request.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "certificate_request": request_}))
    with refused("deploy.request"):
        seal_public(tmp_path, None, again=True)
    assert Consortium.load(sealed.folder).digest == sealed.digest
