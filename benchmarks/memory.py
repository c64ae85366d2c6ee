"""Peak memory of parties in real processes, in multiples of a message.

python benchmarks/memory.py echo [MB]        a courier alone: a silo answers a request of MB megabytes (200) with itself
python benchmarks/memory.py run [WIDTH]      a masked run on four silos, with a model of 1,000 × WIDTH weights
python benchmarks/memory.py rounds [T]       how a simulated run of T rounds (1,000) grows in a round

Of every process of "echo" and "run" the peak is measured twice, with a short and with a long message; the difference is
what the message costs, since a process needs about 300 MB for its libraries. Seconds are this machine's.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from timing import show_help

ROOT = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "silodp.cli.main")
NAMES = ("north",)
MODEL = """
import torch

def Net(features):
    return torch.nn.Sequential(torch.nn.Linear(features, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, {width}),
        torch.nn.Tanh(), torch.nn.Linear({width}, 2))
"""
CONFIG = """
name = "memory"
rounds = 2
seed = 7
aggregator = "masked"
[data]
source = "embedded"
silos = 4
users = 8
[task]
model = "net.py:Net"
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.5
[method.local]
learning_rate = 0.1
"""


# --- a courier alone ---


def _serve_echo(folder: Path, size: int, way: str) -> None:
    """Ask a silo for an echo, twice, in this process."""
    from silodp.crypto.keys import Identity
    from silodp_deploy.certificates import make_context
    from silodp_deploy.https import HttpsServer
    from silodp_deploy.sockets import ServerSocket, SocketOptions

    publics = {name: Identity(name, bytes(32)).public for name in NAMES}
    if way == "https":
        tls = make_context(folder / "ca.pem", folder / "server.pem", folder / "server.key", is_server=True)
        server = HttpsServer(("127.0.0.1", 0), tls, publics, "d" * 64, answer_timeout=60, max_bytes=size)
    else:
        server = ServerSocket(SocketOptions(folder / "server.sock"), NAMES, answer_timeout=60, max_bytes=size)
    data = b"x" * size
    with server:
        (folder / "port.partial").write_text(str(getattr(server, "port", 0)))
        (folder / "port.partial").rename(folder / "port")
        for _ in range(2):
            started = time.perf_counter()
            answers, failures = server.ask({"north": data})
            seconds = time.perf_counter() - started
            assert not failures, failures
            assert answers["north"] == data
            del answers
    _report("server", seconds)


def _answer_echo(folder: Path, size: int, way: str) -> None:
    """Serve a silo that answers with what it is asked."""
    import threading

    from silodp.crypto.keys import Identity
    from silodp_deploy.certificates import make_context
    from silodp_deploy.https import HttpsClient
    from silodp_deploy.sockets import SiloSocket

    class Echo:
        def receive(self, data: bytes) -> bytes:
            return data

    if way == "https":
        while not (folder / "port").exists():
            time.sleep(0.05)
        tls = make_context(folder / "ca.pem", folder / "north.pem", folder / "north.key", is_server=False)
        url = f"https://127.0.0.1:{(folder / 'port').read_text()}"
        silo = HttpsClient(url, tls, Identity("north", bytes(32)), "d" * 64, Echo(), size)
    else:
        silo = SiloSocket(folder / "north.sock", Echo(), size)
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    silo.run(stop)


def _relay(folder: Path) -> None:
    """Carry messages between two sockets, until the server has gone."""
    from silodp_deploy import ask_silo, give_reply, take_request

    while True:
        try:
            request = take_request(folder / "server.sock", wait=1.0)
            if request is not None:
                give_reply(
                    folder / "server.sock", request.exchange, ask_silo(folder / "north.sock", request.body)
                )
        except OSError:
            time.sleep(0.05)


def _report(who: str, seconds: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"who": who, "peak": peak, "seconds": seconds}), flush=True)


def measure_echo(size: int, way: str) -> dict[str, float]:
    """Return the peak bytes of every process, and the seconds of one exchange."""
    from silodp_deploy.certificates import Authority, make_request

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = Authority.fresh("echo")
        (folder / "ca.pem").write_bytes(authority.certificate)
        for party in ("server", *NAMES):
            key, request = make_request(party)
            (folder / f"{party}.key").write_bytes(key)
            (folder / f"{party}.pem").write_bytes(
                authority.sign(request, party, ("127.0.0.1",) * (party == "server"))
            )
        here = [sys.executable, __file__]
        options = [str(folder), str(size), way]
        silo = subprocess.Popen([*here, "-silo", *options], stdin=subprocess.PIPE)
        relay = subprocess.Popen([*here, "-relay", *options]) if way == "sockets" else None
        server = subprocess.run([*here, "-server", *options], check=True, stdout=subprocess.PIPE)
        found = json.loads(server.stdout)
        if relay is not None:
            relay.terminate()
        silo.terminate()
        peaks = {"server": found["peak"], "silo": _wait(silo)}
        if relay is not None:
            peaks["courier"] = _wait(relay)
        return {**peaks, "seconds": found["seconds"]}


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; return its peak memory in bytes."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_maxrss * 1024


def show_echo(megabytes: int) -> None:
    """Print a line for every process of every courier."""
    size = megabytes * 10**6
    print(
        f"{'courier':<10}{'process':<10}{'peak MB':>10}{'of the message':>16}{'× message':>11}{'seconds':>9}"
    )
    for way in ("https", "sockets"):
        short, long = (measure_echo(s, way) for s in (1000, size))
        seconds = long.pop("seconds")
        for who, peak in long.items():
            more = peak - short[who]
            print(
                f"{way:<10}{who:<10}{peak / 1e6:>10.0f}{more / 1e6:>16.0f}{more / size:>11.2f}{seconds:>9.2f}"
            )


# --- a run ---


def measure_run(width: int) -> tuple[dict[str, int], list[dict[str, float]]]:
    """Return the peak bytes of the server and the silos, and the rows of metrics."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "net.py").write_text(MODEL.format(width=width))
        (folder / "run.toml").write_text(CONFIG)
        parties = folder / "parties"
        init = [*COMMAND, "deploy", "init", str(folder / "run.toml"), "--local", "--out", str(parties)]
        subprocess.run(init, check=True, capture_output=True)
        logs = {
            party: folder / f"{party}.log" for party in ("server", "silo-1", "silo-2", "silo-3", "silo-4")
        }
        running = {}
        for party, log in logs.items():
            home = parties / "server" if party == "server" else parties / "silos" / party
            kind = "server" if party == "server" else "silo"
            running[party] = _start([*COMMAND, kind, str(parties / "public"), str(home)], log)
        peaks = {"server": _wait(running["server"])}
        for party, process in running.items():
            if party != "server":
                process.terminate()
                peaks[party] = _wait(process)
        if running["server"].returncode:
            sys.exit(logs["server"].read_text())
        rows = (parties / "server" / "run" / "metrics.jsonl").read_text().splitlines()
        return peaks, [json.loads(row) for row in rows]


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})


def show_run(width: int) -> None:
    """Print a line for the server and for the silo that needs most."""
    (short, _), (long, rows) = measure_run(10), measure_run(width)
    sent = rows[-1]["bytes"]
    size = max(sent["down"], sent["up"]) / 4
    print(
        f"d = {1000 * width:,}; per silo and round {sent['down'] / 4e6:.1f} MB down, {sent['up'] / 4e6:.1f} MB up"
    )
    print(f"{'process':<10}{'peak MB':>10}{'of the run':>12}{'× bytes of a silo':>19}")
    more = {party: peak - short[party] for party, peak in long.items()}
    silo = max((party for party in more if party != "server"), key=lambda party: more[party])
    for party in ("server", silo):
        print(f"{party:<10}{long[party] / 1e6:>10.0f}{more[party] / 1e6:>12.0f}{more[party] / size:>19.2f}")


# --- many rounds ---


def show_rounds(rounds: int) -> None:
    """Print by how much the process grows in a round, after a tenth, a third and two thirds of all."""
    import gc
    import re

    import torch

    import silodp
    from silodp.training import binary_cross_entropy, roc_auc

    held: dict[int, tuple[int, int]] = {}
    points = (rounds // 10, rounds // 3, 2 * rounds // 3, rounds)

    def hold(done: silodp.RoundResult) -> None:
        if done.round in points:
            gc.collect()
            status = Path("/proc/self/status").read_text()
            held[done.round] = int(re.findall(r"VmRSS:\s+(\d+)", status)[0]), sys.getallocatedblocks()

    federation = silodp.data.embedded(users=50, silos=3)
    task = silodp.Task(torch.nn.Linear(30, 1), binary_cross_entropy(), {"roc_auc": roc_auc})
    method = silodp.methods.UldpSgd(noise_multiplier=40.0, step=0.1)
    with tempfile.TemporaryDirectory() as folder:
        silodp.train(federation, task, method, rounds=rounds, callbacks=[hold], out=Path(folder) / "run")
    for first, last in itertools.pairwise(points):
        grown, blocks = ((b - a) / (last - first) for a, b in zip(held[first], held[last], strict=True))
        print(f"rounds {first} to {last}: {grown:.1f} kB a round, in {blocks:.0f} blocks of Python's memory")


def main() -> None:
    """Measure what is asked for."""
    match sys.argv[1:]:
        case ["-server", folder, size, way]:
            _serve_echo(Path(folder), int(size), way)
        case ["-silo", folder, size, way]:
            _answer_echo(Path(folder), int(size), way)
        case ["-relay", folder, *_]:
            _relay(Path(folder))
        case ["echo", *rest]:
            show_echo(int(rest[0]) if rest else 200)
        case ["run", *rest]:
            show_run(int(rest[0]) if rest else 1000)
        case ["rounds", *rest]:
            show_rounds(int(rest[0]) if rest else 1000)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    show_help(__doc__)
    main()
