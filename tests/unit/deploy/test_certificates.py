"""Certificates end: the authority outlives what it signs, and everybody is warned in time."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from silodp.deploy import certificates
from silodp.deploy.certificates import (
    AUTHORITY_DAYS,
    VALID_DAYS,
    WARN_DAYS,
    Authority,
    ExpiryWatch,
    make_request,
    read_expiries,
)
from silodp.deploy.setup import make_keys, seal_public
from support.refusals import refused

PARTIES = ("server", "north")


def move_clock(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """From now on certificates are signed and looked at so many days later."""

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=days)

    monkeypatch.setattr(certificates, "datetime", Later)


def write_public(folder: Path, authority: Authority) -> Path:
    (folder / "certificates").mkdir(parents=True, exist_ok=True)
    (folder / "ca.pem").write_bytes(authority.certificate)
    for name in PARTIES:
        signed = authority.sign(make_request(name)[1], name)
        (folder / "certificates" / f"{name}.pem").write_bytes(signed)
    return folder


@pytest.mark.parametrize("years", [0, 2, 5, 9, 12, 30])
def test_an_authority_outlives_what_it_signs_whenever_it_signs(
    years: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ended together with the certificates of its first seal would make every renewal worthless."""
    first = Authority.fresh("test")
    assert first.valid_until - datetime.now(UTC) > timedelta(days=AUTHORITY_DAYS - 1)
    move_clock(monkeypatch, 365 * years)
    later = first.renew()
    assert later.key == first.key
    assert (later == first) == (365 * years + VALID_DAYS < AUTHORITY_DAYS - 1)
    ends = read_expiries(write_public(tmp_path / "written", later))
    assert all(ends[name] < ends["authority"] for name in PARTIES)
    assert all(
        ends[name] > datetime.now(UTC) + timedelta(days=365 * years + VALID_DAYS - 1) for name in PARTIES
    )


def test_a_certificate_that_ends_is_warned_of_once_a_day_and_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    public = write_public(tmp_path / "written", Authority.fresh("test"))
    caplog.set_level(logging.WARNING)
    watch = ExpiryWatch(public, "north")
    watch.check()
    assert not caplog.records
    days = watch.count_days()
    assert set(days) == {"authority", *PARTIES}
    assert VALID_DAYS - 1 < days["north"] < VALID_DAYS
    for passed, lines in (
        (VALID_DAYS - WARN_DAYS + 1, 1),
        (VALID_DAYS - WARN_DAYS + 1.5, 1),
        (VALID_DAYS - 3, 2),
    ):
        move_clock(monkeypatch, passed)
        watch.warn()
        watch.warn()
        assert len(caplog.records) == lines
    assert "seal --again" in caplog.text
    move_clock(monkeypatch, VALID_DAYS + 1)
    with refused("deploy.certificate"):
        watch.check()
    move_clock(monkeypatch, 0)
    (public / "ca.pem").write_text("nothing")
    with refused("deploy.certificate"):
        ExpiryWatch(public, "north")


def test_a_seal_long_after_the_first_renews_certificates_and_authority(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, private = tmp_path / "requests", tmp_path / "coordinator"
    requests.mkdir()
    for name in ("server", "silo-1", "silo-2"):
        made = make_keys(tmp_path / name, name)
        (requests / made.name).write_bytes(made.read_bytes())
    first = seal_public(tmp_path, "server.example", 8443)
    key, before = (private / "authority.key").read_bytes(), read_expiries(public)
    move_clock(monkeypatch, AUTHORITY_DAYS + 1)
    again = seal_public(tmp_path, "server.example", 8443, again=True)
    after = read_expiries(public)
    assert (private / "authority.key").read_bytes() == key
    assert again.digest != first.digest
    assert again.sealed.silos == first.sealed.silos
    assert all(after[name] > before[name] + timedelta(days=AUTHORITY_DAYS) for name in before)
    assert all(after[name] < after["authority"] for name in after if name != "authority")
