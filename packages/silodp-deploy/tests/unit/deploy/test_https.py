"""The courier over HTTPS: it can lose, repeat and delay messages, and nothing else."""

from __future__ import annotations

import asyncio
import errno
import http.server
import json
import math
import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from datetime import datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request

from silodp.accounting.guarantee import format_epsilon
from silodp.crypto.keys import Identity
from silodp.errors import SilodpError
from silodp_deploy import certificates
from silodp_deploy.https import HttpsClient, HttpsServer, _client, _protocol
from silodp_deploy.https._monitor import render_page
from silodp_deploy.https._server import _find_wait as find_wait
from silodp_deploy.monitoring import State, describe_party, format_metrics
from silodp_deploy.setup import find_free_port
from support.echo import Echo
from support.https import DIGEST, SILOS, Parties, serving, sign_challenge, wait_until
from support.proxy import Proxy


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Parties:
    return Parties(tmp_path_factory.mktemp("tls"))


def test_requests_and_answers_arrive_unchanged(parties: Parties) -> None:
    north, south = Echo(), Echo()
    with (
        parties.server() as server,
        serving(parties, server.port, "north", north),
        serving(parties, server.port, "south", south),
    ):
        for sent in (b"first", b"second " * 10_000, b""):
            answers, failures = server.ask({"north": sent + b"n", "south": sent + b"s"})
            assert failures == {}
            assert answers == {"north": (sent + b"n")[::-1], "south": (sent + b"s")[::-1]}
        assert len(north.asked) == len(south.asked) == 3
        assert server.traffic.down == server.traffic.up


def test_a_silo_that_does_not_come_is_a_failure_and_the_other_one_answers(parties: Parties) -> None:
    with parties.server() as server, serving(parties, server.port, "north", Echo()):
        answers, failures = server.ask({"north": b"1", "south": b"1"}, timeout=1.5)
        assert set(answers) == {"north"}
        assert failures["south"].kind == "offline"


def test_whose_answer_is_awaited_is_logged(
    parties: Parties, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silodp_deploy.mailbox.REMINDER_SECONDS", 0.4)
    caplog.set_level("INFO")
    with parties.server() as server, serving(parties, server.port, "north", Echo()):
        server.ask({"north": b"1", "south": b"1"}, timeout=1.5)
    assert "waiting for the answers of south (not connected yet)" in caplog.text


def test_a_silo_that_comes_late_is_offered_the_same_request(parties: Parties) -> None:
    found = {}
    with parties.server() as server:
        asking = threading.Thread(target=lambda: found.update(server.ask({"north": b"late"})[0]))
        asking.start()
        time.sleep(0.3)
        with serving(parties, server.port, "north", Echo()):
            asking.join(10)
    assert found == {"north": b"etal"}


def test_an_answer_after_the_servers_patience_is_dropped(parties: Parties) -> None:
    def sleep(data: bytes) -> bytes:
        if data == b"slow":
            time.sleep(1.2)
        return data[::-1]

    north = Echo(sleep)
    with parties.server() as server, serving(parties, server.port, "north", north):
        server.ask({"north": b"warm"})
        _, failures = server.ask({"north": b"slow"}, timeout=0.5)
        assert failures["north"].kind == "timeout"
        answers, _ = server.ask({"north": b"next"})
        assert answers == {"north": b"txen"}  # not the answer to the request before


def test_a_refusal_crosses_as_its_code_alone(parties: Parties) -> None:
    def refuse(data: bytes) -> bytes:
        if data == b"odd":
            raise ValueError("person 17 has the diagnosis X")
        raise SilodpError("person 17 has the diagnosis X", code="gate.rounds")

    with parties.server() as server, serving(parties, server.port, "north", Echo(refuse)):
        for sent, code in ((b"1", "gate.rounds"), (b"odd", "deploy.silo_failed")):
            _, failures = server.ask({"north": sent})
            assert failures["north"].code == code
            assert "17" not in failures["north"].reason


def test_a_silo_knows_what_keeps_it_from_its_server(parties: Parties) -> None:
    """Its operator sees it in the silo's status: at the server a silo that never came is only missing."""
    port, told = find_free_port(), []
    with serving(parties, port, "north", Echo(), on_problem=told.append):
        wait_until(lambda: len(told) > 0)
        assert "cannot be reached" in told[-1]
        with parties.server(port, digest="e" * 64):
            wait_until(lambda: "deploy.digest" in (told[-1] or ""))
        with parties.server(port) as server:
            assert server.ask({"north": b"12"})[0] == {"north": b"21"}
            assert told[-1] is None


def test_a_silo_comes_back_to_a_server_that_was_restarted(parties: Parties) -> None:
    port = find_free_port()
    north = Echo()
    with serving(parties, port, "north", north):
        for request in (b"1", b"2"):
            with parties.server(port, answer_timeout=60) as server:
                assert server.ask({"north": request}) == ({"north": request}, {})


@pytest.mark.timeout(60)
def test_a_silo_waits_for_less_time_where_a_firewall_forgets_silent_connections(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one wait that was too long, 4 seconds, no connection is silent for long enough to be forgotten."""
    monkeypatch.setattr(_protocol, "POLL_SECONDS", 4)
    monkeypatch.setattr(_protocol, "MARGIN_SECONDS", 1)
    told: list[str | None] = []
    with parties.server() as server:
        firewall = Proxy(server.port)
        firewall.forget_after(2.0)
        with serving(parties, firewall.port, "north", Echo(), on_problem=told.append):
            wait_until(lambda: told.count(None) == 2)
            time.sleep(3)
            assert server.ask({"north": b"12"}, timeout=1)[0] == {"north": b"21"}
            assert firewall.forgotten == 1
            assert told.count(None) == 2
        firewall.close()


@pytest.mark.parametrize(
    ("stated", "seconds"),
    [
        ("5", 5),
        ("1", 1),
        ("0", 1),
        ("20", 20),
        ("900", 20),
        ("", 20),
        ("-1", 20),
        ("nan", 20),
        ("9" * 5000, 20),
        ("٣", 20),
    ],
)
def test_a_silo_states_how_long_its_call_is_held_within_bounds(stated: str, seconds: int) -> None:
    scope = {"type": "http", "headers": [(b"x-silodp-wait", stated.encode("utf-8"))]}
    assert find_wait(Request(scope)) == seconds


def test_a_connection_that_was_idle_while_the_silo_computed_is_not_used_again(parties: Parties) -> None:
    """A firewall may have forgotten it, and the answer would be sent in vain."""

    def compute(data: bytes) -> bytes:
        time.sleep(3)
        return data

    with parties.server() as server:
        firewall = Proxy(server.port)
        firewall.forget_after(2.5)
        with serving(parties, firewall.port, "north", Echo(compute)):
            assert server.ask({"north": b"12"}, timeout=10)[0] == {"north": b"12"}
        firewall.close()


@pytest.mark.timeout(90)
def test_both_ends_see_how_much_of_a_long_answer_has_passed(
    parties: Parties, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a line that is slow, and then stands still: else nobody could tell it from a silo that computes."""
    caplog.set_level("INFO")
    monkeypatch.setattr(_client, "_PROGRESS_SECONDS", 0.2)
    size = 24_000_000
    with parties.server(max_bytes=size, answer_timeout=60) as server:
        line = Proxy(server.port)
        client = HttpsClient(
            f"https://127.0.0.1:{line.port}",
            parties.tls("north"),
            SILOS["north"],
            DIGEST,
            Echo(lambda data: bytes(size)),
            10**6,
        )
        running = threading.Thread(target=client.run, args=(threading.Event(),), daemon=True)
        running.start()
        assert (client.sending, server.transfers()) == (None, {})
        line.delay(0.001)
        asked = threading.Thread(target=server.ask, args=({"north": b"12"},), daemon=True)
        asked.start()
        wait_until(lambda: server.transfers().get("north", (0, 0))[0] > 1_000_000)
        line.hold()
        time.sleep(1)
        arrived, length = server.transfers()["north"]
        left = client.sending
        assert length == size
        assert left is not None
        assert left[1] == size
        assert arrived <= left[0] + (1 << 18) < size  # the system holds some of what has left
        time.sleep(0.5)
        assert (server.transfers()["north"], client.sending) == ((arrived, size), left)
        state = State(server.seconds_since_seen(), {}, traffic=server.traffic, transfers=server.transfers())
        assert re.search(r"[1-9]\d?\.\d of 24\.0 MB of an answer have passed", describe_party(state, "north"))
        assert f'silodp_transfer_bytes{{party="north"}} {arrived}\n' in format_metrics(state)
        assert "of 24.0 MB" in render_page(state)
        line.delay(0)
        line.restore()
        asked.join(60)
        wait_until(lambda: client.sending is None)
        assert server.transfers() == {}
        assert server.seconds_since_seen()["north"] is not None
        assert "sending an answer" in caplog.text
        server.end_run(0.5)
        running.join(10)
        line.close()


@pytest.mark.parametrize("keep", [False, True])
def test_a_silo_learns_that_the_run_is_over(
    keep: bool, parties: Parties, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ended = threading.Event()
    with parties.server() as server:
        client = HttpsClient(
            f"https://127.0.0.1:{server.port}",
            parties.tls("north"),
            SILOS["north"],
            DIGEST,
            Echo(),
            10**6,
            max_pause=0.2,
            keep=keep,
        )
        stop = threading.Event()
        thread = threading.Thread(target=lambda: (client.run(stop), ended.set()), daemon=True)
        thread.start()
        assert server.ask({"north": b"12"})[0] == {"north": b"21"}
        assert not ended.wait(0.3)
        started = time.monotonic()
        server.end_run(0.5)
        assert time.monotonic() - started >= 0.5  # "south" has not asked
        assert ended.wait(0.5) is not keep
        assert "the run is over" in caplog.text
        assert client.is_over  # one that waits for another run is not stuck
        stop.set()


def test_a_silo_that_has_answered_waits_for_the_next_request(parties: Parties) -> None:
    """Without the wait it would ask again and again until the slowest silo has answered."""
    calls = []

    def sleep(data: bytes) -> bytes:
        time.sleep(1.0)
        return data

    with (
        parties.server() as server,
        serving(parties, server.port, "north", Echo()),
        serving(parties, server.port, "south", Echo(sleep)),
    ):
        server.wait_for_silos(10)
        counting = threading.Thread(
            target=lambda: [(calls.append(server._seen["north"]), time.sleep(0.01)) for _ in range(100)]
        )
        counting.start()
        assert len(server.ask({"north": b"1", "south": b"2"})[0]) == 2
        counting.join()
    # Times at which the server heard of north: few, also on a machine that stands still at times.
    assert len(set(calls)) <= 10


def test_challenges_of_one_silo_do_not_keep_another_one_out(parties: Parties) -> None:
    with parties.server() as server, httpx.Client(verify=parties.tls("south")) as client:
        url = f"https://127.0.0.1:{server.port}/v1/challenge"
        for _ in range(300):
            client.post(url, json={"name": "north"})
        assert client.post(url, json={"name": ["north"]}).status_code == 400
        assert client.post(url, content=b"[" * 5000).status_code in (400, 413)
        with serving(parties, server.port, "north", Echo()):
            assert server.ask({"north": b"12"})[0] == {"north": b"21"}
        assert not server._used or len(server._used) < 10


@pytest.mark.parametrize("reply", [b"<html>", b"[]", b'{"challenge": 1}', b'{"token": "x"}'])
def test_a_silo_survives_what_is_no_silodp_server(
    reply: bytes, parties: Parties, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd) as odd:
        odd.socket = parties.tls("server", True).wrap_socket(odd.socket, server_side=True)
        thread = threading.Thread(target=odd.serve_forever, daemon=True)
        thread.start()
        endpoint = Echo()
        with serving(parties, odd.server_address[1], "north", endpoint):
            time.sleep(0.5)
        odd.shutdown()
    assert endpoint.asked == []
    assert "is not that of a silodp server" in caplog.text


@pytest.mark.parametrize(("status", "encoding"), [(200, ""), (500, ""), (200, "gzip")])
def test_a_reply_without_end_fills_no_memory(
    status: int, encoding: str, parties: Parties, caplog: pytest.LogCaptureFixture
) -> None:
    """Who plays the server could end the silo's process, and others on its machine."""
    sent = []

    class Endless(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(10**12))
            if encoding:
                self.send_header("Content-Encoding", encoding)
            self.end_headers()
            with suppress(OSError):
                while sum(sent) < 10**8:
                    self.wfile.write(bytes(1 << 20))
                    sent.append(1 << 20)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless) as endless:
        endless.socket = parties.tls("server", True).wrap_socket(endless.socket, server_side=True)
        threading.Thread(target=endless.serve_forever, daemon=True).start()
        with serving(parties, endless.server_address[1], "north", Echo()) as stop:
            end = time.monotonic() + 20
            while caplog.text.count("cannot be reached") < 2 and time.monotonic() < end:
                time.sleep(0.02)
            stop.set()
        endless.shutdown()
    assert caplog.text.count("cannot be reached") >= 2
    assert sum(sent) < 10**8


def test_a_silo_keeps_nothing_that_a_reply_sets(parties: Parties) -> None:
    """Cookies of the server's choice would pile up in memory, and in the header of every further call."""

    class Sticky(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Set-Cookie", "c=1; Path=/; Max-Age=1000000")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sticky) as sticky:
        sticky.socket = parties.tls("server", True).wrap_socket(sticky.socket, server_side=True)
        threading.Thread(target=sticky.serve_forever, daemon=True).start()
        url = f"https://127.0.0.1:{sticky.server_address[1]}"
        client = HttpsClient(url, parties.tls("north"), SILOS["north"], DIGEST, Echo(), 10)
        assert client._post("/v1/challenge", {}) == {}
        assert len(client._client.cookies) == 0
        sticky.shutdown()


def test_a_silo_that_comes_back_in_the_middle_of_its_answer_sends_it_again(parties: Parties) -> None:
    """A firewall forgot its connection: for the server the first body would be on its way until patience is over."""
    found: dict[str, bytes] = {}
    north = Echo()
    with parties.server(answer_timeout=10) as server, httpx.Client(verify=parties.tls("north")) as client:
        url = f"https://127.0.0.1:{server.port}/v1"
        token = client.post(f"{url}/connect", json=sign_challenge(client, server.port)).json()["token"]
        asking = threading.Thread(target=lambda: found.update(server.ask({"north": b"12"})[0]))
        asking.start()
        headers = {"Authorization": f"Bearer {token}"}
        exchange = client.post(f"{url}/next", headers=headers).headers["X-Silodp-Exchange"]
        head = f"POST /v1/answer/{exchange} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        with (
            socket.create_connection(("127.0.0.1", server.port)) as plain,
            parties.tls("north").wrap_socket(plain, server_hostname="127.0.0.1") as half,
        ):
            half.sendall(f"{head}Content-Length: 2\r\n\r\n2".encode())
            while server._connections["north"].reading is None:
                time.sleep(0.01)
            with serving(parties, server.port, "north", north):
                asking.join(20)
    assert found == {"north": b"21"}
    assert north.asked == [b"12"]


def test_a_connection_that_breaks_off_in_the_middle_of_an_answer_is_no_error(
    parties: Parties, caplog: pytest.LogCaptureFixture
) -> None:
    with parties.server(answer_timeout=10) as server, httpx.Client(verify=parties.tls("north")) as client:
        url = f"https://127.0.0.1:{server.port}/v1"
        token = client.post(f"{url}/connect", json=sign_challenge(client, server.port)).json()["token"]
        asking = threading.Thread(target=lambda: server.ask({"north": b"12"}))
        asking.start()
        headers = {"Authorization": f"Bearer {token}"}
        exchange = client.post(f"{url}/next", headers=headers).headers["X-Silodp-Exchange"]
        head = f"POST /v1/answer/{exchange} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            half = parties.tls("north").wrap_socket(plain, server_hostname="127.0.0.1")
            half.sendall(f"{head}Content-Length: 2\r\n\r\n2".encode())
            while server._connections["north"].reading is None:
                time.sleep(0.01)
            half.close()
        while server._connections["north"].reading is not None:
            time.sleep(0.01)
        with serving(parties, server.port, "north", Echo()):
            asking.join(20)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_an_answer_that_arrives_as_its_silo_connects_again_is_not_counted_twice(parties: Parties) -> None:
    """The silo stated a number that has it: one more, and it would be refused later, as restored from a backup."""

    def make_request(body: bytes, token: str = "", exchange: str = "") -> Request:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": body}

        headers = [(b"authorization", f"Bearer {token}".encode())]
        scope = {"type": "http", "headers": headers, "path_params": {"exchange": exchange}}
        return Request(scope, receive)

    async def answer_and_connect(server: HttpsServer, token: str, again: dict[str, str]) -> int:
        connection, (exchange,) = server._connections["north"], server.find_pending("north")
        answering = asyncio.create_task(server._answer(make_request(b"21", token, exchange.id)))
        while connection.reading is None or not connection.reading.done():
            await asyncio.sleep(0)
        assert not answering.done()
        await server._connect(make_request(json.dumps(again).encode()))
        return (await answering).status_code

    with parties.server(answer_timeout=10) as server, httpx.Client(verify=parties.tls("north")) as client:
        url = f"https://127.0.0.1:{server.port}/v1"
        token = client.post(f"{url}/connect", json=sign_challenge(client, server.port)).json()["token"]
        asking = threading.Thread(target=lambda: server.ask({"north": b"12"}))
        asking.start()
        client.post(f"{url}/next", headers={"Authorization": f"Bearer {token}"})
        again = sign_challenge(client, server.port, answers="1")
        both = asyncio.run_coroutine_threadsafe(answer_and_connect(server, token, again), server._loop)
        assert both.result(20) == 410
        assert server.answers()["north"] == 1
        with serving(parties, server.port, "north", Echo(), count_answers=lambda: 1):
            asking.join(20)
        assert server.answers()["north"] == 2


def test_a_request_that_is_too_long_or_compressed_is_not_taken(parties: Parties) -> None:
    north = Echo()
    with parties.server(answer_timeout=1) as server, serving(parties, server.port, "north", north):
        assert server.ask({"north": b"x" * (10**6 + 1)})[0] == {}
        assert server.ask({"north": b"12"}, timeout=20)[0] == {"north": b"21"}
    assert north.asked == [b"12"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://::1:8443"])
def test_an_address_that_is_none_is_refused(url: str, parties: Parties) -> None:
    with pytest.raises(SilodpError) as caught:
        HttpsClient(url, parties.tls("north"), SILOS["north"], DIGEST, Echo(), 10)
    assert caught.value.field == "url"


def test_an_answer_that_is_too_long_is_not_read_to_its_end(parties: Parties) -> None:
    with (
        parties.server(max_bytes=1000, answer_timeout=2) as server,
        serving(parties, server.port, "north", Echo(lambda data: b"x" * 10**6)),
    ):
        answers, failures = server.ask({"north": b"1"})
        assert answers == {}
        assert failures["north"].kind == "timeout"


@pytest.mark.parametrize(
    "changes",
    [{"identity": Identity.fresh("north")}, {"identity": Identity.fresh("unknown")}, {"digest": "e" * 64}],
    ids=["another key", "not in the roster", "another digest"],
)
def test_who_does_not_belong_is_not_connected(
    parties: Parties, changes: dict, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = Echo()
    with (
        parties.server(answer_timeout=1) as server,
        serving(parties, server.port, "north", endpoint, **changes),
    ):
        _, failures = server.ask({"north": b"1"})
        assert failures["north"].kind == "offline"
    assert endpoint.asked == []
    assert "refused the connection" in caplog.text


def test_a_certificate_of_another_authority_does_not_connect(
    parties: Parties, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Parties(tmp_path / "other")
    endpoint = Echo()
    with (
        parties.server(answer_timeout=1) as server,
        serving(parties, server.port, "north", endpoint, tls=other.tls("north")),
    ):
        _, failures = server.ask({"north": b"1"})
        assert failures["north"].kind == "offline"
    assert endpoint.asked == []
    assert "[deploy.intercepted]" in caplog.text


def test_an_expired_certificate_does_not_connect(
    parties: Parties, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "VALID_DAYS", -0.5)  # valid from yesterday until twelve hours ago
    expired = Parties(tmp_path / "expired", parties.authority)
    endpoint = Echo()
    with (
        parties.server(answer_timeout=1) as server,
        serving(parties, server.port, "north", endpoint, tls=expired.tls("north")),
    ):
        assert server.ask({"north": b"1"})[1]["north"].kind == "offline"
    assert endpoint.asked == []


def test_certificates_of_before_connect_under_a_renewed_authority(
    parties: Parties, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key and name stay, so a renewal ends no certificate that is still valid."""
    before = Parties(tmp_path / "before", parties.authority)
    monkeypatch.setattr(certificates, "VALID_DAYS", certificates.AUTHORITY_DAYS)
    renewed = parties.authority.renew()
    assert renewed.certificate != parties.authority.certificate
    monkeypatch.setattr(certificates, "VALID_DAYS", 825)
    after = Parties(tmp_path / "after", renewed)
    with after.server() as server, serving(after, server.port, "north", Echo(), tls=before.tls("north")):
        assert server.ask({"north": b"12"})[0] == {"north": b"21"}


def test_a_clock_that_is_an_hour_off_does_not_matter(
    parties: Parties, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(hours=1)

    monkeypatch.setattr(certificates, "datetime", Later)
    early = Parties(tmp_path / "early", parties.authority)  # signed by a coordinator whose clock is ahead
    with parties.server() as server, serving(parties, server.port, "north", Echo(), tls=early.tls("north")):
        assert server.ask({"north": b"12"})[0] == {"north": b"21"}


def test_a_silo_whose_disk_is_full_says_so(parties: Parties) -> None:
    def fill(data: bytes) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device", "/data/patients/secret")

    with parties.server() as server, serving(parties, server.port, "north", Echo(fill)):
        failure = server.ask({"north": b"1"})[1]["north"]
        assert failure.code == "run.disk_full"
        assert "secret" not in failure.reason


def test_nobody_is_served_without_a_token_or_a_certificate(parties: Parties) -> None:
    with parties.server() as server:
        url = f"https://127.0.0.1:{server.port}"
        with httpx.Client(verify=parties.tls("north")) as client:
            assert client.post(f"{url}/v1/next", headers={"Authorization": "Bearer x"}).status_code == 401
            assert client.post(f"{url}/v1/answer/1", content=b"x").status_code == 401
            assert client.get(f"{url}/health").json()["status"] == "ok"
            assert 'silo="north"' in client.get(f"{url}/metrics").text
        anonymous = ssl.create_default_context(cafile=str(parties.folder / "ca.pem"))
        with httpx.Client(verify=anonymous) as client, pytest.raises(httpx.HTTPError):
            client.get(f"{url}/health")


_SAMPLE = re.compile(r'([a-z_]+)(?:\{([a-z]+)="((?:[^"\\\n]|\\["\\n])*)"\})? (NaN|-?\d+(?:\.\d+)?)')


def test_metrics_are_in_the_text_format_of_prometheus(parties: Parties) -> None:
    """Also where no certificate is needed, on an address of the machine."""
    port = find_free_port()
    known = {"rounds": 9, "round": 4, "epsilon": {"released": 1.23456, "server": None}}
    days = {"authority": 3000.5, "north": -1.25}
    with (
        parties.server(
            monitor=("127.0.0.1", port), describe=lambda: {**known, "certificate_days": days}
        ) as server,
        serving(parties, server.port, "north", Echo()),
    ):
        server.ask({"north": b"123"})
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).json()["ended"] == ["north"]
        assert httpx.post(f"http://127.0.0.1:{port}/v1/next", trust_env=False).status_code == 404
    kinds: dict[str, str] = {}
    values: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            _, what, name, rest = line.split(" ", 3)
            assert what in ("HELP", "TYPE")
            if what == "TYPE":
                kinds[name] = rest
            continue
        found = _SAMPLE.fullmatch(line)
        assert found is not None, line
        assert found[1] in kinds  # its kind stands before its first value
        values[found[1], found[3] or ""] = float(found[4])
    assert text.endswith("\n")
    assert set(kinds.values()) == {"counter", "gauge"}
    assert values["silodp_bytes_total", "down"] == values["silodp_bytes_total", "up"] == 3
    assert values["silodp_answers_total", "north"] == 1
    assert math.isnan(values["silodp_seconds_since_seen", "south"])
    assert (values["silodp_rounds_done", ""], values["silodp_rounds", ""]) == (4, 9)
    assert values["silodp_epsilon", "released"] == 1.2346  # a bound is rounded up
    assert math.isnan(values["silodp_epsilon", "server"])
    assert values["silodp_certificate_days_left", "north"] == -1.25


class _Loads(HTMLParser):
    """What a page loads or executes, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        loads = {"src", "href", "srcset", "action", "data", "formaction"}
        self.found += [f"{tag} {name}" for name, _ in attrs if name in loads or name.startswith("on")]
        self.found += [tag] * (tag in ("script", "link", "iframe", "object", "form", "a", "svg", "img"))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_status_page_executes_and_loads_nothing_whatever_parties_are_called(parties: Parties) -> None:
    """Names and texts are of others. Without escaping, a silo's name would run a script in the operator's browser."""
    port = find_free_port()
    evil = '<script>alert(1)</script><img src="https://evil.example/x" onerror="alert(1)">'
    state = {
        "name": evil,
        "code": "0123 4567",
        "error": evil,
        "round": 2,
        "rounds": 8,
        "epsilon": {"released": 0.70301, evil: None},
        "certificate_days": {"authority": 3000.0, "north": 12.0, "server": 12.0},
        "seconds_left": 61.0,
    }
    with (
        parties.server(monitor=("127.0.0.1", port), describe=lambda: state) as server,
        serving(parties, server.port, "north", Echo()),
    ):
        server.ask({"north": b"1"})
        found = httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
        for method in ("POST", "PUT", "DELETE"):
            assert httpx.request(method, f"http://127.0.0.1:{port}/", trust_env=False).status_code == 405
    assert found.status_code == 200
    assert "default-src 'none'" in found.headers["Content-Security-Policy"]
    page = _Loads()
    page.feed(found.text)
    assert page.found == []
    assert evil in page.text
    assert format_epsilon(0.70301) in page.text
    assert "Waiting for south to connect" in page.text
    assert "2 of 8 rounds are done, about 2 min left" in page.text
    assert "no guarantee" in page.text
    with (
        parties.server() as server,
        httpx.Client(verify=parties.tls("north"), trust_env=False) as client,
    ):
        assert client.get(f"https://127.0.0.1:{server.port}/").status_code == 404  # for the operator alone


def test_a_challenge_is_signed_once(parties: Parties) -> None:
    """Whoever has read a signature cannot connect with it again."""
    with parties.server() as server, httpx.Client(verify=parties.tls("south")) as client:
        url, fields = f"https://127.0.0.1:{server.port}/v1", sign_challenge(client, server.port)
        assert client.post(f"{url}/connect", json=fields).status_code == 200
        assert client.post(f"{url}/connect", json=fields).status_code == 403


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol": "0"}, "deploy.version"),
        ({"digest": "e" * 64}, "deploy.key"),  # signed for another digest
        ({"signature": "00" * 64}, "deploy.key"),
        ({"answers": "-1"}, "deploy.key"),
        ({"name": "south"}, "deploy.unknown_silo"),  # the challenge is north's
    ],
    ids=["protocol", "digest", "signature", "answers", "name"],
)
def test_nobody_makes_the_servers_log_blame_another_silo(
    changes: dict[str, str], code: str, parties: Parties, caplog: pytest.LogCaptureFixture
) -> None:
    """South, with a certificate of its own, connects in the name of north; what north has not signed blames nobody."""
    with parties.server() as server, httpx.Client(verify=parties.tls("south")) as client:
        fields = sign_challenge(client, server.port)
        if "protocol" in changes:
            fields["signature"] = "00" * 64
        url = f"https://127.0.0.1:{server.port}/v1/connect"
        assert client.post(url, json={**fields, **changes}).text == code
        told = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
        assert all("from 127.0.0.1 in the name of silo 'north'" in line for line in told)
        assert len(told) == (code != "deploy.unknown_silo")
        client.post(url, json={**sign_challenge(client, server.port), "protocol": "0"})
    assert "refused the connection of silo 'north'" in caplog.text  # signed: its protocol


def test_a_challenge_that_is_no_text_is_refused(parties: Parties) -> None:
    """Half of a character, which JSON can write and UTF-8 cannot."""
    with parties.server() as server, httpx.Client(verify=parties.tls("north")) as client:
        asked = client.post(f"https://127.0.0.1:{server.port}/v1/challenge", json={"name": "north"})
        fields = {"name": "north", "challenge": asked.json()["challenge"] + "\ud800"}
        found = client.post(f"https://127.0.0.1:{server.port}/v1/connect", content=json.dumps(fields))
    assert found.status_code == 403


def test_a_challenge_is_for_the_process_that_made_it(parties: Parties) -> None:
    """A server that was started again has forgotten which ones were used."""
    with (
        parties.server() as earlier,
        parties.server() as later,
        httpx.Client(verify=parties.tls("south")) as client,
    ):
        fields = sign_challenge(client, earlier.port)
        url = f"https://127.0.0.1:{later.port}/v1"
        assert client.post(f"{url}/connect", json=fields).status_code == 403


def test_a_silo_that_knows_of_fewer_answers_than_its_server_is_refused(
    parties: Parties, caplog: pytest.LogCaptureFixture
) -> None:
    """Its machine was restored from a backup: its ledger may have less than it has spent."""
    port = find_free_port()
    with (
        parties.server(port) as server,
        serving(parties, port, "north", Echo(), count_answers=lambda: 3),
    ):
        for asked in (b"12", b"34"):
            assert server.ask({"north": asked})[0] == {"north": asked[::-1]}
        assert server.answers() == {"north": 5, "south": 0}
    for count, refused in ((4, True), (5, False)):
        north = Echo()
        with (
            parties.server(port, answers=server.answers()) as server,
            serving(parties, port, "north", north, count_answers=lambda count=count: count),
        ):
            answers, _ = server.ask({"north": b"56"}, timeout=1 if refused else 20)
            assert (answers == {}) is refused
            assert (north.asked == []) is refused
    assert "deploy.rollback_detected" in caplog.text


def test_a_server_waits_for_its_silos(parties: Parties) -> None:
    with parties.server() as server, serving(parties, server.port, "north", Echo()):
        started = time.monotonic()
        server.wait_for_silos(timeout=0.5)  # "south" is missing
        assert time.monotonic() - started >= 0.5
        with serving(parties, server.port, "south", Echo()):
            server.wait_for_silos(timeout=30)
        assert None not in server.seconds_since_seen().values()


def test_a_port_in_use_is_named(parties: Parties) -> None:
    with parties.server() as server, pytest.raises(SilodpError) as caught:
        parties.server(server.port)
    assert caught.value.code == "deploy.address"


def test_a_silo_whose_certificate_ends_comes_back_when_it_is_renewed(
    parties: Parties, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither process is started again, and log, page and /health of the server name the cause until then."""
    monkeypatch.setattr(certificates, "VALID_DAYS", -0.5)
    ended = Parties(tmp_path / "ended", parties.authority)
    tls, days, problems = ended.tls("north"), {"north": -0.5, "server": 800.0}, []
    can_renew = threading.Event()

    def prepare() -> None:
        if can_renew.is_set():
            certificates._fill_context(
                tls, *(parties.folder / name for name in ("ca.pem", "north.pem", "north.key"))
            )
        elif days["north"] > -0.5:
            raise SilodpError("the certificate of north has ended", code="deploy.certificate")

    monkeypatch.setattr("silodp_deploy.mailbox.REMINDER_SECONDS", 0.2)
    caplog.set_level("INFO")
    with (
        parties.server(
            answer_timeout=1,
            monitor=("127.0.0.1", port := find_free_port()),
            describe=lambda: {"certificate_days": days},
        ) as server,
        serving(parties, server.port, "north", Echo(), tls=tls, prepare=prepare, on_problem=problems.append),
    ):
        failure = server.ask({"north": b"1"})[1]["north"]
        assert "certificate of north has ended" in failure.reason
        assert "--patience" in failure.reason
        assert "north (not connected yet; the certificate of north has ended)" in caplog.text
        url = f"http://127.0.0.1:{port}"
        health = httpx.get(f"{url}/health", trust_env=False)
        assert (health.status_code, health.json()["ended"]) == (503, ["north"])
        assert "The certificate of north has ended" in httpx.get(url, trust_env=False).text
        days["north"] = -0.4
        wait_until(lambda: any("[deploy.certificate]" in str(one) for one in problems))
        can_renew.set()
        days["north"] = 800.0
        assert server.ask({"north": b"12"}, 30)[0] == {"north": b"21"}
        health = httpx.get(f"{url}/health", trust_env=False)
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert "has ended" not in httpx.get(url, trust_env=False).text


def test_a_server_uses_its_renewed_certificate_in_new_connections(parties: Parties, tmp_path: Path) -> None:
    renewed = Parties(tmp_path / "renewed", parties.authority)
    files = [renewed.folder / name for name in ("ca.pem", "server.pem", "server.key")]
    with parties.server() as server:

        def read_shown() -> str:
            return ssl.get_server_certificate(("127.0.0.1", server.port))

        assert read_shown() == (parties.folder / "server.pem").read_text()
        server.reload(lambda tls: certificates._fill_context(tls, *files))
        wait_until(lambda: read_shown() == (renewed.folder / "server.pem").read_text())
