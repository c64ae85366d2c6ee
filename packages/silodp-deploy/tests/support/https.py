"""Parties that speak HTTPS on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from silodp.crypto.keys import Identity
from silodp_deploy import PROTOCOL
from silodp_deploy.certificates import Authority, load_context, make_context, make_request
from silodp_deploy.check import check_party
from silodp_deploy.consortium import Consortium
from silodp_deploy.https import HttpsClient, HttpsServer
from silodp_deploy.https._protocol import format_connect_text
from support.echo import Echo


@contextmanager
def listening(parties: Path, consortium: Consortium, host: str = "127.0.0.1") -> Iterator[None]:
    """A server that has a public folder."""
    tls = load_context(consortium, "server", parties / "server")
    roster = consortium.sealed
    with HttpsServer(
        (host, roster.port), tls, roster.silos, consortium.digest, answer_timeout=1, max_bytes=1000
    ):
        yield


def find_bad(folder: Path, consortium: Consortium) -> list[str]:
    return [one.name for one in check_party(folder, consortium) if not one.is_good]


DIGEST = "d" * 64
SILOS = {name: Identity.fresh(name) for name in ("north", "south")}


class Parties:
    """Certificates of a server and two silos, of one authority."""

    def __init__(self, folder: Path, authority: Authority | None = None) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.authority = authority or Authority.fresh("test")
        (folder / "ca.pem").write_bytes(self.authority.certificate)
        for name in ("server", *SILOS):
            key, request = make_request(name)
            hosts = ("127.0.0.1",) if name == "server" else ()
            (folder / f"{name}.key").write_bytes(key)
            (folder / f"{name}.pem").write_bytes(self.authority.sign(request, name, hosts))

    def tls(self, name: str, is_server: bool = False):
        return make_context(
            self.folder / "ca.pem",
            self.folder / f"{name}.pem",
            self.folder / f"{name}.key",
            is_server=is_server,
        )

    def server(
        self,
        port: int = 0,
        answer_timeout: float = 20,
        digest: str = DIGEST,
        max_bytes: int = 10**6,
        **changes,
    ):
        publics = {name: identity.public for name, identity in SILOS.items()}
        return HttpsServer(
            ("127.0.0.1", port),
            self.tls("server", True),
            publics,
            digest,
            answer_timeout=answer_timeout,
            max_bytes=max_bytes,
            **changes,
        )


@contextmanager
def serving(parties: Parties, port: int, name: str, endpoint: Echo, **changes) -> Iterator[threading.Event]:
    """A silo that serves in a thread until the end."""
    fields = {"identity": SILOS[name], "digest": DIGEST, "tls": parties.tls(name), **changes}
    client = HttpsClient(
        f"https://127.0.0.1:{port}",
        fields["tls"],
        fields["identity"],
        fields["digest"],
        endpoint,
        max_bytes=10**6,
        max_pause=0.2,
        count_answers=changes.get("count_answers", lambda: 0),
        on_problem=changes.get("on_problem", lambda problem: None),
        proxy=changes.get("proxy"),
        prepare=changes.get("prepare", lambda: None),
    )
    stop = threading.Event()
    thread = threading.Thread(target=client.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()


def wait_until(happened: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def sign_challenge(client: httpx.Client, port: int, answers: str = "0") -> dict[str, str]:
    """Ask a server for a challenge as north; return what north then sends to connect."""
    asked = client.post(f"https://127.0.0.1:{port}/v1/challenge", json={"name": "north"})
    challenge = asked.json()["challenge"]
    return {
        "name": "north",
        "challenge": challenge,
        "digest": DIGEST,
        "protocol": str(PROTOCOL),
        "answers": answers,
        "signature": SILOS["north"].sign(format_connect_text(DIGEST, "north", challenge, answers)).hex(),
    }
