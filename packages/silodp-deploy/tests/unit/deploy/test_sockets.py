"""The sockets where couriers meet server and silos: a courier can lose, repeat and delay messages, and nothing else."""

from __future__ import annotations

import errno
import grp
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import silodp
from silodp.crypto.keys import Identity
from silodp.errors import DISK_FULL, SilodpError
from silodp.wire.transport import SERVER, DeliveryFailure, Endpoint, InProcess, sign, verify
from silodp_deploy import PROTOCOL, agreement, courier
from silodp_deploy.agreement import AgreedTransport, answer_join
from silodp_deploy.courier import Reply, ask_silo, give_reply, receive_frame, send_frame, take_request
from silodp_deploy.sockets import ServerSocket, SiloSocket, SocketOptions
from support.echo import Echo
from support.places import SOURCES

NAMES = ("north", "south")
KEYS = {name: Identity.fresh(name) for name in (*NAMES, "server")}
DIGEST = "d" * 64


@contextmanager
def serving(
    path: Path, endpoint: Endpoint, max_bytes: int = 10**6, group: str | None = None
) -> Iterator[None]:
    """A silo that serves in a thread until the end."""
    silo, stop = SiloSocket(path, endpoint, max_bytes, group), threading.Event()
    thread = threading.Thread(target=silo.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def server_at(path: Path, repeat: float = 30.0, **changes) -> ServerSocket:
    options = SocketOptions(path, repeat=repeat)
    return ServerSocket(options, NAMES, **{"answer_timeout": 10.0, "max_bytes": 10**6, **changes})


@contextmanager
def asking(server: ServerSocket, requests: dict[str, bytes], **changes) -> Iterator[Future]:
    with ThreadPoolExecutor() as pool:
        yield pool.submit(server.ask, requests, **changes)


# --- a silo's socket ---


def test_a_silo_answers_one_request_after_the_other(tmp_path: Path) -> None:
    inside = []

    def answer(data: bytes) -> bytes:
        inside.append(data)
        assert len(inside) == 1
        time.sleep(0.02)
        inside.remove(data)
        return data[::-1]

    with serving(tmp_path / "s", Echo(answer)), ThreadPoolExecutor(8) as pool:
        sent = [b"", *(bytes([i]) * 10**5 + b"end" for i in range(12))]
        assert [r.body for r in pool.map(lambda d: ask_silo(tmp_path / "s", d), sent)] == [
            d[::-1] for d in sent
        ]


def test_a_silo_that_starts_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with pytest.raises(FileNotFoundError):
        ask_silo(path, b"request")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask_silo, path, b"request", wait=30.0)
        time.sleep(0.2)
        assert not asked.done()
        with serving(path, Echo()):
            assert asked.result() == Reply(b"tseuqer")


def test_a_refusal_leaves_as_its_code_alone(tmp_path: Path) -> None:
    def refuse(data: bytes) -> bytes:
        if data.startswith(b"disk"):
            raise OSError(int(data.split()[1]), "No space left on device", "/data/patients/17")
        if data == b"odd":
            raise ValueError("person 17 has the diagnosis X")
        raise SilodpError("person 17 has the diagnosis X", code="gate.rounds")

    with serving(tmp_path / "s", Echo(refuse)):
        for sent, code in ((b"1", "gate.rounds"), (b"odd", "deploy.silo_failed")):
            assert ask_silo(tmp_path / "s", sent) == Reply(b"", code)
        for number in DISK_FULL:  # a full quota is a full disk for the operator
            assert ask_silo(tmp_path / "s", b"disk %d" % number) == Reply(b"", "run.disk_full")


def test_a_request_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    echo = Echo()
    with serving(tmp_path / "s", echo, max_bytes=1000):
        with pytest.raises(ConnectionError):
            ask_silo(tmp_path / "s", b"x" * 10**7)
        assert ask_silo(tmp_path / "s", b"12").body == b"21"
    assert echo.asked == [b"12"]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">IQ", 1 << 31, 0),
        struct.pack(">IQ", 2, 0) + b"[]",
        struct.pack(">IQ", 4000, 0) + b"[" * 4000,
        struct.pack(">IQ", 13, 5) + b'{"do": "take"}',
        struct.pack(">IQ", 16, 1 << 62) + b'{"do": "answer"}',
    ],
)
def test_a_silo_survives_what_is_no_frame(sent: bytes, tmp_path: Path) -> None:
    echo = Echo()
    with serving(tmp_path / "s", echo):
        with socket.socket(socket.AF_UNIX) as odd:
            odd.connect(str(tmp_path / "s"))
            odd.sendall(sent)
            odd.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionError):
                receive_frame(odd)
        assert ask_silo(tmp_path / "s", b"12").body == b"21"
    assert echo.asked == [b"12"]


def test_couriers_that_hang_do_not_keep_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("silodp_deploy.sockets._READ_SECONDS", 0.3)
    with serving(tmp_path / "s", Echo()):
        hanging = [socket.socket(socket.AF_UNIX) for _ in range(10)]
        for one in hanging:
            one.connect(str(tmp_path / "s"))
        assert ask_silo(tmp_path / "s", b"12", timeout=20).body == b"21"
        for one in hanging:
            one.close()


# --- who may use a socket ---


def test_the_user_alone_or_a_group_may_connect(tmp_path: Path) -> None:
    mine = grp.getgrgid(os.getgid()).gr_name
    for group, mode in ((None, 0o600), (mine, 0o660)):
        with serving(tmp_path / "s", Echo(), group=group):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode
        assert not (tmp_path / "s").exists()
    with pytest.raises(SilodpError) as caught:
        SiloSocket(tmp_path / "s", Echo(), 10, "no-such-group")
    assert caught.value.field == "socket_group"


def test_a_socket_never_has_wider_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `chmod` would narrow later was seen by whoever looked between the two calls."""
    seen = []

    def look(path: Path, mode: int) -> None:
        seen.append((stat.S_IMODE(path.stat().st_mode), mode))

    monkeypatch.setattr(Path, "chmod", look)
    with serving(tmp_path / "s", Echo()):
        pass
    assert seen == [(0o600, 0o600)]


def test_a_group_of_which_the_user_is_no_member_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    with pytest.raises(SilodpError) as caught:
        SiloSocket(tmp_path / "s", Echo(), 10, grp.getgrgid(os.getgid()).gr_name)
    assert (caught.value.code, caught.value.field) == ("argument.value", "socket_group")


def test_a_courier_is_told_at_which_socket_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        ask_silo(tmp_path / "none", b"1")
    assert caught.value.filename == str(tmp_path / "none")


def _connect_as(user: int, path: Path) -> bool:
    """Return whether a process of another user can connect."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(str(path))
            status = 0
        except PermissionError:
            status = 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return status == 0


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_another_user_cannot_connect(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    nobody = 65534
    for group, is_allowed in ((None, False), (grp.getgrgid(nobody).gr_name, True)):
        with serving(tmp_path / "s", Echo(), group=group):
            assert _connect_as(nobody, tmp_path / "s") is is_allowed


def test_a_socket_that_was_left_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    with serving(tmp_path / "s", Echo()):
        for path in (tmp_path / "s", tmp_path / "file", tmp_path / "none" / "s", tmp_path / ("x" * 120)):
            (tmp_path / "file").write_text("no socket")
            with pytest.raises(SilodpError) as caught:
                SiloSocket(path, Echo(), 10)
            assert caught.value.code == "deploy.address"
        assert ask_silo(tmp_path / "s", b"12").body == b"21"
    assert (tmp_path / "file").read_text() == "no socket"


# --- the server's socket ---


def test_answers_reach_the_server_whatever_their_order(tmp_path: Path) -> None:
    with server_at(tmp_path / "s") as server, asking(server, {"north": b"1n", "south": b"1s"}) as asked:
        taken = [take_request(tmp_path / "s"), take_request(tmp_path / "s")]
        assert take_request(tmp_path / "s", wait=0.1) is None
        for request in reversed(taken):
            assert give_reply(tmp_path / "s", request.exchange, Reply(request.body[::-1]))
        assert asked.result() == ({"north": b"n1", "south": b"s1"}, {})
        assert (server.traffic.down, server.traffic.up) == (4, 4)
        assert None not in server.seconds_since_seen().values()


def test_a_request_without_an_answer_is_offered_again(tmp_path: Path) -> None:
    with server_at(tmp_path / "s", repeat=0.3) as server, asking(server, {"north": b"1"}) as asked:
        first = take_request(tmp_path / "s")  # a courier that dies
        assert take_request(tmp_path / "s", wait=0.1) is None
        assert take_request(tmp_path / "s", wait=5) == first
        assert give_reply(tmp_path / "s", first.exchange, Reply(b"x"))
        assert not give_reply(tmp_path / "s", first.exchange, Reply(b"y"))  # repeated
        assert asked.result() == ({"north": b"x"}, {})


def test_a_courier_that_waits_gets_a_request_at_once(tmp_path: Path) -> None:
    with server_at(tmp_path / "s") as server, ThreadPoolExecutor() as pool:
        waiting = pool.submit(take_request, tmp_path / "s", 20)
        time.sleep(0.3)
        asked = pool.submit(server.ask, {"north": b"1"})
        started = time.monotonic()
        request = waiting.result()
        assert time.monotonic() - started < 5
        give_reply(tmp_path / "s", request.exchange, Reply(b"x"))
        assert asked.result() == ({"north": b"x"}, {})


def test_an_answer_after_the_servers_patience_is_dropped(tmp_path: Path) -> None:
    with server_at(tmp_path / "s") as server:
        with asking(server, {"north": b"slow"}, timeout=0.5) as asked:
            late = take_request(tmp_path / "s")
            assert asked.result()[1]["north"].kind == "timeout"
        with asking(server, {"north": b"next"}) as asked:
            request = take_request(tmp_path / "s")
            assert not give_reply(tmp_path / "s", late.exchange, Reply(b"wols"))
            give_reply(tmp_path / "s", request.exchange, Reply(b"txen"))
            assert asked.result() == ({"north": b"txen"}, {})


def test_an_answer_that_is_too_long_is_not_read_and_a_refusal_has_a_known_code(tmp_path: Path) -> None:
    with (
        server_at(tmp_path / "s", max_bytes=1000) as server,
        asking(server, {"north": b"1", "south": b"1"}) as asked,
    ):
        taken = {request.silo: request.exchange for request in (take_request(tmp_path / "s") for _ in NAMES)}
        with pytest.raises(ConnectionError):
            give_reply(tmp_path / "s", taken["north"], Reply(b"x" * 10**7))
        give_reply(tmp_path / "s", taken["north"], Reply(b"", "gate.rounds"))
        give_reply(tmp_path / "s", taken["south"], Reply(b"", "<script>"))
        _, failures = asked.result()
        assert [failures[name].code for name in NAMES] == ["gate.rounds", "deploy.silo_failed"]
        assert "<script>" not in failures["south"].reason


@pytest.mark.parametrize("header", [{"do": "take", "wait": "nan"}, {"do": "take"}, {"do": "answer"}, {}])
def test_a_call_that_the_server_does_not_know_ends(header: dict[str, str], tmp_path: Path) -> None:
    with server_at(tmp_path / "s"):
        with socket.socket(socket.AF_UNIX) as odd:
            odd.connect(str(tmp_path / "s"))
            send_frame(odd, header)
            with pytest.raises(ConnectionError):
                receive_frame(odd)
        assert take_request(tmp_path / "s", wait=0.1) is None


def test_a_courier_needs_the_standard_library_alone() -> None:
    code = "import silodp_deploy, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) - sys.stdlib_module_names <= {"silodp_deploy", "__main__"}


def test_the_three_calls_work_from_a_copy_of_their_file_where_silodp_is_not_installed(tmp_path: Path) -> None:
    shutil.copy(courier.__file__, tmp_path / "copied.py")
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from copied import ask_silo, give_reply, take_request
request = take_request("server.sock")
assert give_reply("server.sock", request.exchange, ask_silo("silo.sock", request.body))
assert not [name for name in sys.modules if name.startswith("silodp")]
"""
    with (
        serving(tmp_path / "silo.sock", Echo()),
        server_at(tmp_path / "server.sock") as server,
        asking(server, {"north": b"12"}) as asked,
    ):
        command = [sys.executable, "-I", "-S", "-c", program, str(tmp_path)]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
        assert asked.result()[0] == {"north": b"21"}


# --- the agreement on the public folder ---


class Member:
    """A silo that answers "join", and other requests with their bytes in reverse order."""

    def __init__(self, name: str, digest: str = DIGEST, key: Identity | None = None) -> None:
        self.name, self.digest, self.key = name, digest, key or KEYS[name]
        self.joins: list[bytes] = []
        self.asked: list[bytes] = []

    def receive(self, data: bytes) -> bytes:
        if not data.startswith(b"silodp"):
            self.asked.append(data)
            return data[::-1]
        self.joins.append(data)
        request = verify(data, KEYS["server"].public, "the server", self.name)
        return sign(answer_join(request, self.name, self.digest), self.key, SERVER, request.digest())


def agree(members: list[Endpoint], transport: InProcess | None = None) -> AgreedTransport:
    publics = {name: KEYS[name].public for name in NAMES}
    reached = transport or InProcess(dict(zip(NAMES, members, strict=True)))
    return AgreedTransport(reached, KEYS["server"], publics, DIGEST, answer_timeout=5)


def test_silos_of_the_same_public_folder_are_asked_and_join_once() -> None:
    north, south = Member("north"), Member("south")
    agreed = agree([north, south])
    for _ in range(2):
        assert agreed.ask({"north": b"12", "south": b"34"}) == ({"north": b"21", "south": b"43"}, {})
    assert len(north.joins) == len(south.joins) == 1
    agreed.wait_for_silos(0.1)
    assert len(north.joins) == 1


@pytest.mark.parametrize(
    ("south", "code"),
    [
        (Member("south", "e" * 64), "deploy.digest"),
        (Member("south", key=KEYS["north"]), "message.signature"),
        (Echo(lambda data: b"silodp 2" + bytes(200)), "message.signature"),
    ],
    ids=["another digest", "another key", "no answer to join"],
)
def test_a_silo_that_has_not_agreed_is_asked_nothing_else(south: Member, code: str) -> None:
    north = Member("north")
    agreed = agree([north, south])
    agreed.wait_for_silos(timeout=0.2)
    answers, failures = agreed.ask({"north": b"12", "south": b"34"})
    assert answers == {"north": b"21"}
    assert failures["south"].code == code
    assert b"34" not in south.asked


@pytest.mark.parametrize(
    ("changed", "code"), [("silodp.__version__", None), ("agreement.PROTOCOL", "deploy.version")]
)
def test_another_protocol_is_named_and_another_version_is_none(
    changed: str, code: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Member):
        def receive(self, data: bytes) -> bytes:
            with monkeypatch.context() as patch:
                if code is None:
                    patch.setattr(silodp, "__version__", "0.0.9")
                else:
                    patch.setattr(agreement, "PROTOCOL", PROTOCOL + 1)
                return super().receive(data)

    answers, failures = agree([Member("north"), Other("south")]).ask({"south": b"34"})
    assert (code is None) == (answers == {"south": b"43"})
    assert [failure.code for failure in failures.values()] == [code] * bool(code)


def test_an_answer_to_join_cannot_be_played_back() -> None:
    """A courier that has seen a silo join before would otherwise let it join with another folder later."""
    before = Member("south")

    class Replaying:
        first: bytes = b""

        def receive(self, data: bytes) -> bytes:
            self.first = self.first or before.receive(data)
            return self.first

    replaying = Replaying()
    assert agree([Member("north"), replaying]).ask({"south": b"12"})[1] == {}
    _, failures = agree([Member("north"), replaying]).ask({"south": b"12"})
    assert failures["south"].code == "message.signature"


def test_a_silo_that_comes_late_joins_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_PAUSE_SECONDS", 0.01)

    class Away(InProcess):
        calls = 0

        def ask(self, requests, timeout=None):
            self.calls += 1
            here = {name: data for name, data in requests.items() if name == "north" or self.calls > 3}
            answers, failures = super().ask(here, timeout)
            return answers, {
                **failures,
                **{n: DeliveryFailure("timeout", "") for n in requests if n not in here},
            }

    joined = []
    agreed = agree([], Away({name: Member(name) for name in NAMES}))
    agreed.on_change = lambda: joined.append(set(agreed.joined))
    agreed.wait_for_silos()
    assert joined == [{"north"}, {"north", "south"}]
