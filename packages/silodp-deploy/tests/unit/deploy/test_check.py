"""What `silodp deploy check` sees before the telephone call; addresses of IPv6."""

from __future__ import annotations

import shutil
import socket
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from silodp_deploy import PROTOCOL, certificates
from silodp_deploy import check as check_module
from silodp_deploy.check import check_party
from silodp_deploy.cli.parties import parse_address
from silodp_deploy.consortium import Consortium
from silodp_deploy.https import listen_at
from silodp_deploy.policy import Policy
from silodp_deploy.setup import find_free_port, seal_public
from support.commands import CONFIG, Silodp
from support.consortium import make_parties
from support.https import find_bad, listening
from support.refusals import refused


@pytest.fixture
def parties(tmp_path: Path) -> Path:
    return make_parties(tmp_path, CONFIG, find_free_port())


GOOD = ["keys", "run", "certificates", "policy", "limits", "port", "tls", "clock", "version", "digest"]


def test_a_silo_that_can_take_part_is_told_so_and_nothing_is_written(silodp: Silodp, parties: Path) -> None:
    consortium, home = Consortium.load(parties / "public"), parties / "silos" / "silo-1"
    command = ("deploy", "check", parties / "public", home)
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    with listening(parties, consortium):
        assert [one.name for one in check_party(home, consortium)] == GOOD
        assert silodp(*command).status == 0
    away = silodp(*command, "--json")
    assert away.status == 1
    assert [one["name"] for one in away.json["checks"] if not one["is_good"]] == ["port"]
    assert before == {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}


def test_each_fault_is_named(parties: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    consortium, home = Consortium.load(parties / "public"), parties / "silos" / "silo-1"
    other = make_parties(tmp_path / "other", CONFIG) if (tmp_path / "other").mkdir() is None else None
    with listening(parties, consortium):
        for seconds, bad in ((600, ["clock"]), (-600, ["clock"]), (60, [])):
            with monkeypatch.context() as patch:
                patch.setattr(check_module.time, "time", lambda s=seconds, now=time.time: now() + s)
                assert find_bad(home, consortium) == bad
        with monkeypatch.context() as patch:
            parse = check_module.parse_json
            patch.setattr(check_module, "parse_json", lambda text: {**parse(text), "version": "9.9.9"})
            assert find_bad(home, consortium) == []
            for protocol in (PROTOCOL + 1, True, None):
                patch.setattr(
                    check_module,
                    "parse_json",
                    lambda text, stated=protocol: {**parse(text), "protocol": stated},
                )
                assert find_bad(home, consortium) == ["version"]
        assert find_bad(parties / "server", consortium) == ["port"]  # the server itself: its port is in use
        assert find_bad(other / "silos" / "silo-1", consortium) == ["keys"]
        for name in ("ca.pem", "certificates/silo-1.pem"):
            shutil.copy(other / "public" / name, parties / "public" / name)
        shutil.copy(other / "silos" / "silo-1" / "tls.key", home)
        foreign = Consortium.load(parties / "public")
        assert find_bad(home, foreign) == ["certificates", "tls"]  # another authority
    assert find_bad(parties / "server", consortium) == ["certificates"]


def test_faults_of_a_partys_own_copy_are_named(
    parties: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consortium, home = Consortium.load(parties / "public"), parties / "silos" / "silo-1"

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=certificates.VALID_DAYS + 1)

    changed = shutil.copytree(parties / "public", tmp_path / "changed")
    config = changed / "config.toml"
    config.write_text(config.read_text().replace("clip = 0.1", "clip = 0.2"))
    with listening(parties, consortium):
        with monkeypatch.context() as patch:
            patch.setattr(certificates, "datetime", Later)
            assert find_bad(home, consortium) == ["certificates"]
        assert find_bad(home, Consortium.load(changed)) == ["run", "policy", "digest"]
        shutil.copy(parties / "silos" / "silo-2" / "tls.key", home)
        assert find_bad(home, consortium) == ["tls"]  # it is not the key of the certificate


def test_a_policy_that_does_not_allow_the_run_or_has_no_room_is_named(parties: Path) -> None:
    consortium, home = Consortium.load(parties / "public"), parties / "silos" / "silo-1"
    path = home / "policy.toml"
    policy = Policy.load(path)
    half = {name: epsilon / 2 for name, epsilon in policy.lifetime_epsilon.items()}
    with listening(parties, consortium):
        for changes, bad in (
            ({"accepted": []}, []),  # that comes after the telephone call
            ({"accepted": [], "min_silos": 9}, ["policy"]),
            ({"accepted": [], "lifetime_epsilon": half}, ["limits"]),
            ({"lifetime_epsilon": half}, ["limits"]),  # accepted, too: the run will end early
        ):
            path.write_text(policy.model_copy(update=changes).to_toml())
            assert find_bad(home, consortium) == bad
        path.unlink()
        assert find_bad(home, consortium) == []


def test_a_server_with_another_public_folder_is_named(parties: Path) -> None:
    consortium = Consortium.load(parties / "public")
    older = shutil.copytree(parties / "public", parties / "older")
    with (older / "config.toml").open("a") as file:
        file.write("\n# an earlier draft\n")
    with listening(parties, Consortium.load(older)):
        assert find_bad(parties / "silos" / "silo-1", consortium) == ["digest"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_parties_meet_at_an_address_of_ipv6(parties: Path) -> None:
    for host in ("::1", "localhost"):
        seal_public(parties, host, find_free_port(), again=True)
        consortium = Consortium.load(parties / "public")
        if host == "::1":
            assert consortium.sealed.url == f"https://[::1]:{consortium.sealed.port}"
        with listening(parties, consortium, host="::1" if host == "::1" else ""):  # "" is both, IPv4 and IPv6
            assert find_bad(parties / "silos" / "silo-1", consortium) == []
            for there in ("::1", *(("127.0.0.1",) if host == "localhost" else ())):
                socket.create_connection((there, consortium.sealed.port), timeout=5).close()
    for wrong in ("[::1]", "fe80::1%eth0", "::1]:8443", "a b"):
        with refused("argument.value"):
            seal_public(parties, wrong, 8443, again=True)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("[::1]:8443", ("::1", 8443)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        (":8443", ("", 8443)),
        ("[::]:0", ("::", 0)),
    ],
)
def test_an_address_of_ipv6_is_in_brackets(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "listen") == address


@pytest.mark.parametrize(
    "text",
    ["::1:8443", "[::1]", "[::1:8443", "x", "1.2.3.4:99999", pytest.param("a:" + "1" * 5000, id="long")],
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with refused("argument.value"):
        parse_address(text, "listen")


def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    with refused("deploy.address"):
        listen_at(("2001:db8::1", 8443), "listen")
