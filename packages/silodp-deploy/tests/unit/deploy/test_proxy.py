"""A silo behind the HTTP proxy of its network: what the proxy sees, what it refuses, and one that intercepts TLS.

An interceptor shows a certificate of its own in place of the server's. A silo that trusted the authorities of its
machine would take it, and the interceptor would read every message that the aggregator does not hide.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from silodp.crypto.keys import Identity
from silodp.errors import SilodpError
from silodp_deploy.certificates import Authority, make_context, make_request
from silodp_deploy.check import check_party
from silodp_deploy.consortium import Consortium
from silodp_deploy.https import HttpsClient, HttpsServer, Proxy, find_proxy
from silodp_deploy.setup import find_free_port
from support.commands import CONFIG
from support.connect_proxy import ConnectProxy, make_interceptor
from support.consortium import make_parties
from support.echo import Echo
from support.https import find_bad, listening, wait_until
from support.refusals import refused

NAME = "server.test"
"""A name that this machine cannot resolve: whoever reaches it has asked the proxy."""
NORTH = Identity.fresh("north")
USER, PASSWORD = "nurse", "pass:word %40"
VARIABLES = ("HTTPS_PROXY", "NO_PROXY", "HTTP_PROXY", "ALL_PROXY")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


# --- settings ------------------------------------------------------------------------------------------------


def write_settings(folder: Path, text: str, login: str | None = None, mode: int = 0o600) -> None:
    (folder / "silo.toml").write_text(text)
    if login is not None:
        (folder / "proxy.login").write_text(login)
        (folder / "proxy.login").chmod(mode)


def find(folder: Path, host: str = NAME) -> str | None:
    found = find_proxy(folder, f"https://{host}:8443")
    return None if found is None else found.url


def test_the_environment_names_the_proxy_unless_the_silo_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find(tmp_path) is None
    monkeypatch.setenv("HTTP_PROXY", "http://other:1")  # for http:// alone
    assert find(tmp_path) is None
    monkeypatch.setenv("https_proxy", "small:3128/")
    assert find(tmp_path) == "http://small:3128"
    monkeypatch.setenv("https_proxy", "http://big:3128")
    assert find(tmp_path) == "http://big:3128"
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert find(tmp_path, host) is None
    for skipped, is_skipped in (
        (NAME, True),
        (".test", True),
        ("*", True),
        ("other.test", False),
        (f"{NAME}:8443", True),
    ):
        monkeypatch.setenv("NO_PROXY", skipped)
        assert (find(tmp_path) is None) == is_skipped
    write_settings(tmp_path, '[network]\nproxy = "http://own:8080"\n')
    monkeypatch.setenv("NO_PROXY", "*")
    assert find(tmp_path) == find(tmp_path, "127.0.0.1") == "http://own:8080"
    monkeypatch.delenv("NO_PROXY")
    write_settings(tmp_path, '[network]\nproxy = ""\n')
    assert find(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('proxy = "http://own:8080"', "config.unknown_field"),
        ('[network]\nproxi = "http://own:8080"', "config.unknown_field"),
        ("[network]\nproxy = 8080", "config.value"),
        ('network = "http://own:8080"', "config.value"),
        ('[network]\nproxy = "http://own"', "deploy.proxy"),
        ('[network]\nproxy = "socks5://own:8080"', "deploy.proxy"),
        ('[network]\nproxy = "https://own:8080"', "deploy.proxy"),
        ('[network]\nproxy = "http://own:8080/path"', "deploy.proxy"),
        ('[network]\nproxy = "http://own:eighty"', "deploy.proxy"),
        ('[network]\nproxy = "http://nurse:secret7@own:8080"', "deploy.proxy"),
    ],
)
def test_a_setting_that_is_no_proxy_is_refused(text: str, code: str, tmp_path: Path) -> None:
    write_settings(tmp_path, text)
    with refused(code) as caught:
        find(tmp_path)
    assert "secret7" not in str(caught.value)


@pytest.mark.parametrize("value", ["http://nurse:secret7@own", "socks5://nurse:secret7@own:1"])
def test_a_variable_that_is_no_proxy_is_refused_and_not_shown(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", value)
    with refused("deploy.proxy") as caught:
        find(tmp_path)
    assert "secret7" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "mode"),
    [
        ("nurse:secret7", 0o644),
        ("nurse:secret7", 0o640),
        ("nurse", 0o600),
        ("a:b\nc:d\n", 0o600),
        (None, 0),
        ("", 0o600),
    ],
)
def test_user_and_password_are_in_a_file_that_only_this_user_may_read(
    content: str | None, mode: int, tmp_path: Path
) -> None:
    text = '[network]\nproxy = "http://own:8080"\nproxy_login = "proxy.login"\n'
    write_settings(tmp_path, text, content, mode)
    with refused("deploy.proxy_login") as caught:
        find(tmp_path)
    assert "secret7" not in str(caught.value)
    write_settings(tmp_path, text, f"{USER}:{PASSWORD}\n")
    found = find_proxy(tmp_path, f"https://{NAME}:8443")
    assert found is not None
    assert found.login == (USER, PASSWORD)
    assert PASSWORD not in repr(found)


# --- connections ---------------------------------------------------------------------------------------------


class Network:
    """A server, and the silo "north", which can reach it through a proxy alone."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.authority = Authority.fresh("ours")
        (folder / "ca.pem").write_bytes(self.authority.certificate)
        self.folder = folder

    def tls(self, name: str) -> ssl.SSLContext:
        key, request = make_request(name)
        (self.folder / f"{name}.key").write_bytes(key)
        hosts = (NAME,) if name == "server" else ()
        (self.folder / f"{name}.pem").write_bytes(self.authority.sign(request, name, hosts))
        files = (self.folder / "ca.pem", self.folder / f"{name}.pem", self.folder / f"{name}.key")
        return make_context(*files, is_server=name == "server")

    @contextmanager
    def serve(
        self, proxy: Proxy | None, told: list[str | None], ended: list[SilodpError]
    ) -> Iterator[HttpsServer]:
        silos = {"north": NORTH.public}
        with HttpsServer(
            ("127.0.0.1", 0), self.tls("server"), silos, "d" * 64, answer_timeout=20, max_bytes=10**6
        ) as server:
            client = HttpsClient(
                f"https://{NAME}:{server.port}",
                self.tls("north"),
                NORTH,
                "d" * 64,
                Echo(),
                10**6,
                0.2,
                on_problem=told.append,
                proxy=proxy,
            )
            stop = threading.Event()

            def run() -> None:
                try:
                    client.run(stop)
                except SilodpError as error:
                    ended.append(error)

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            yield server
            stop.set()


@pytest.fixture
def network(tmp_path: Path) -> Network:
    return Network(tmp_path / "network")


def test_tls_passes_a_proxy_unread_and_the_password_stands_in_no_log(
    network: Network, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    proxy = ConnectProxy((USER, PASSWORD))
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    write_settings(tmp_path, '[network]\nproxy_login = "proxy.login"\n', f"{USER}:{PASSWORD}\n")
    with network.serve(find_proxy(tmp_path, f"https://{NAME}:1"), [], []) as server:
        sent = b"a noisy share " * 100
        assert server.ask({"north": sent})[0] == {"north": sent[::-1]}
        assert set(proxy.asked) == {f"{NAME}:{server.port}"}
    assert len(proxy.seen) > 2 * len(sent)
    for hidden in (b"noisy share", sent[::-1][:20], b"/v1/", b"Bearer", b"north"):
        assert hidden not in proxy.seen
    assert proxy.url in caplog.text
    assert PASSWORD not in caplog.text
    proxy.close()


@pytest.mark.parametrize("login", [None, (USER, "wrong")])
def test_a_password_that_a_proxy_refuses_is_tried_once(
    login: tuple[str, str] | None, network: Network
) -> None:
    """Somebody who repeats a wrong one may have the account locked."""
    proxy, told, ended = ConnectProxy((USER, PASSWORD)), [], []
    with network.serve(Proxy(proxy.url, "silo.toml", login, "proxy.login" if login else ""), told, ended):
        wait_until(lambda: len(ended) == 1)
    assert ended[0].code == "deploy.proxy_login"
    assert "[deploy.proxy_login]" in told[-1]
    assert proxy.replied == [407]
    proxy.close()


@pytest.mark.parametrize("status", [403, 502])
def test_a_proxy_that_lets_nothing_through_is_named_and_tried_again(status: int, network: Network) -> None:
    proxy, told, ended = ConnectProxy(status=status), [], []
    with network.serve(Proxy(proxy.url, "silo.toml"), told, ended) as server:
        wait_until(lambda: len(told) > 2)
        assert "[deploy.proxy]" in told[-1]
        assert str(status) in told[-1]
        proxy.status = 200
        assert server.ask({"north": b"12"})[0] == {"north": b"21"}
    assert ended == []
    proxy.close()


def test_a_proxy_that_is_not_there_is_named_and_not_gone_around(network: Network) -> None:
    told: list[str | None] = []
    address = f"http://127.0.0.1:{find_free_port()}"
    with network.serve(Proxy(address, "silo.toml"), told, []) as server:
        wait_until(lambda: len(told) > 2)
        assert "[deploy.proxy]" in told[-1]
        assert address in told[-1]
        assert server.seconds_since_seen() == {"north": None}


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_an_interceptor_is_named_and_gets_nothing(
    version: ssl.TLSVersion, network: Network, tmp_path: Path
) -> None:
    tls = make_interceptor(tmp_path / "interceptor", "Inspection\x1b[31m\nof TLS", (NAME,))
    tls.minimum_version = tls.maximum_version = version
    proxy, told = ConnectProxy(interceptor=tls), []
    with network.serve(Proxy(proxy.url, "silo.toml"), told, []) as server:
        wait_until(lambda: len(told) > 2)
        assert "[deploy.intercepted]" in told[-1]
        assert "Inspection" in told[-1]
        assert told[-1].isprintable()
        assert len(proxy.handshakes) > 2
        assert proxy.decrypted == b""
        proxy.interceptor = None  # the host was exempted
        assert server.ask({"north": b"12"})[0] == {"north": b"21"}
    proxy.close()


def test_an_interceptor_with_the_name_of_our_authority_is_noticed_by_its_signature(
    network: Network, tmp_path: Path
) -> None:
    proxy, told = ConnectProxy(interceptor=make_interceptor(tmp_path / "interceptor", "ours", (NAME,))), []
    with network.serve(Proxy(proxy.url, "silo.toml"), told, []):
        wait_until(lambda: len(told) > 0)
        assert "[deploy.intercepted]" in told[-1]
        assert proxy.decrypted == b""
    proxy.close()


# --- silodp deploy check -------------------------------------------------------------------------------------


def test_check_goes_through_the_same_proxy_and_names_what_is_wrong_with_it(tmp_path: Path) -> None:
    parties = make_parties(tmp_path, CONFIG, find_free_port())
    consortium, home = Consortium.load(parties / "public"), parties / "silos" / "silo-1"
    proxy = ConnectProxy((USER, PASSWORD))
    text = f'[network]\nproxy = "{proxy.url}"\nproxy_login = "proxy.login"\n'
    write_settings(home, text, f"{USER}:{PASSWORD}\n")
    with listening(parties, consortium):
        found = list(check_party(home, consortium))
        assert [one.name for one in found if not one.is_good] == []
        assert "proxy" in [one.name for one in found]
        assert len(proxy.asked) == 1
        assert not any(PASSWORD in one.told for one in found)
        proxy.interceptor = make_interceptor(tmp_path / "interceptor", "Inspection")
        assert find_bad(home, consortium) == ["tls"]
        assert proxy.decrypted == b""
        proxy.interceptor, proxy.status = None, 403
        assert find_bad(home, consortium) == ["proxy"]
        write_settings(home, text, f"{USER}:wrong\n")
        assert find_bad(home, consortium) == ["proxy"]
        write_settings(home, text, f"{USER}:{PASSWORD}\n", 0o644)
        assert find_bad(home, consortium) == ["proxy"]
        proxy.close()
        assert find_bad(home, consortium) == ["proxy"]
