"""Seconds and bytes of a round in one process, between processes over TLS, and over other networks, for the same run.

python benchmarks/deployment.py [DATA] [--flower ENVIRONMENT] [--nvflare ENVIRONMENT]: four hospitals of heart_disease;
DATA is the folder of the data sets, and ENVIRONMENT the one of `make test-flower` or `make test-nvflare`. The ways
follow each other on the same machine, so compare within a row. The first round, with the set-up, is left out.

python benchmarks/deployment.py --exchange: seconds that HTTPS adds to an exchange with four silos that answer at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.consortium import Processes

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "silodp.cli.main"]
CONFIG = """
name = "speed"
rounds = {rounds}
seed = 7
isolate_units = false
aggregator = "{aggregator}"
[data]
source = "heart_disease"
users = 50
{root}
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
server_learning_rate = 10.0
weighting = "{weighting}"
[method.local]
learning_rate = 0.001
epochs = 50
batch_size = 4
"""
RUNS = (("plain", "uniform", 20, 5), ("masked", "uniform", 20, 5), ("lattice", "records", 6, 4))
"""Aggregator, weights, rounds, rounds over other networks."""
NETWORKS = ("flower", "nvflare")


def measure_rounds(run: Path) -> tuple[float, int, int]:
    """Return the median seconds of a round after the first, and its bytes down and up."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][2:]
    last = rows[-1]["bytes"]
    return statistics.median(row["seconds"] for row in rows), last["down"], last["up"]


def run_in_one(folder: Path, config: Path) -> Path:
    """Run the simulation; return its directory."""
    _execute("run", str(config), "--out", str(folder / "one"))
    return folder / "one"


def run_over_https(folder: Path, config: Path) -> Path:
    """Run the parties as processes over TLS; return the run's directory."""
    _execute("deploy", "init", str(config), "--local", "--out", str(folder / "many"))
    _execute("deploy", "up", str(folder / "many"))
    return folder / "many" / "server" / "run"


def run_over_network(network: str, folder: Path, config: Path) -> Path:
    """Run the parties as processes between which Flower or NVFlare carries messages; return the run's directory."""
    from support.consortium import Processes

    home = folder / network
    home.mkdir()
    _execute("deploy", "init", str(config), "--local", "--out", str(home / "parties"))
    processes = Processes(home / "parties")
    try:
        for name in processes.names:
            processes.start(name, "--socket", str(home / f"{name}.sock"))
        options = ("--socket", str(home / "server.sock"), "--repeat", "120", "--patience", "500")
        processes.start("server", *options)
        with _start_network(network, home, processes):
            if processes.wait_for_server(1200):
                sys.exit(processes.log("server"))
    finally:
        for name in list(processes.running):
            processes.kill(name)
    return processes.run


@contextmanager
def _start_network(network: str, folder: Path, processes: Processes) -> Iterator[None]:
    """Start what carries the messages between the sockets in a folder."""
    if network == "flower":
        from support.flower import start_flower

        with start_flower(folder, processes):
            yield
    else:
        from support.nvflare import start_federation

        with start_federation(folder, processes.names) as federation:
            federation.carry()
            yield


def _execute(*arguments: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)


def measure_exchanges(count: int = 50, size: int = 10_000) -> list[float]:
    """Return the seconds of exchanges with four silos in threads, which answer at once with as many bytes."""
    from silodp.crypto.keys import Identity
    from silodp_deploy.certificates import Authority, make_context, make_request
    from silodp_deploy.https import HttpsClient, HttpsServer

    class Echo:
        def receive(self, data: bytes) -> bytes:
            return data

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = Authority.fresh("speed")
        (folder / "ca.pem").write_bytes(authority.certificate)
        keys = {name: Identity.fresh(name) for name in ("a", "b", "c", "d")}
        tls = {}
        for party in ("server", *keys):
            key, request = make_request(party)
            hosts = ("127.0.0.1",) if party == "server" else ()
            (folder / f"{party}.key").write_bytes(key)
            (folder / f"{party}.pem").write_bytes(authority.sign(request, party, hosts))
            paths = (folder / "ca.pem", folder / f"{party}.pem", folder / f"{party}.key")
            tls[party] = make_context(*paths, is_server=party == "server")
        publics = {name: key.public for name, key in keys.items()}
        stop, found = threading.Event(), []
        with HttpsServer(
            ("127.0.0.1", 0), tls["server"], publics, "d" * 64, answer_timeout=60, max_bytes=size
        ) as server:
            url = f"https://127.0.0.1:{server.port}"
            for name, key in keys.items():
                client = HttpsClient(url, tls[name], key, "d" * 64, Echo(), size)
                threading.Thread(target=client.run, args=(stop,), daemon=True).start()
            server.wait_for_silos()
            for _ in range(count):
                started = time.perf_counter()
                answers, _ = server.ask(dict.fromkeys(keys, b"x" * size))
                found.append(time.perf_counter() - started)
                assert len(answers) == len(keys)
            stop.set()
        return found


def main() -> None:
    """Print a line for each aggregator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?")
    for network in NETWORKS:
        parser.add_argument(f"--{network}")
    parser.add_argument("--exchange", action="store_true")
    options = parser.parse_args()
    if options.exchange:
        found = sorted(measure_exchanges())
        print(f"{len(found)} exchanges: median {found[len(found) // 2]:.3f} s, longest {found[-1]:.3f} s")
        return
    networks = [network for network in NETWORKS if getattr(options, network)]
    sys.path.insert(0, str(ROOT / "tests"))
    for network in networks:
        os.environ[f"SILODP_{network.upper()}"] = str(Path(getattr(options, network)).resolve())
    root = f'root = "{Path(options.data).resolve()}"' if options.data else ""
    columns = ["in process s", "https s", *(f"{network} s" for network in networks), "bytes down", "bytes up"]
    print(f"{'aggregator':<12}" + "".join(f"{column:>14}" for column in columns))
    for aggregator, weighting, rounds, fewer in RUNS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config, short = folder / "speed.toml", folder / "short.toml"
            for path, length in ((config, rounds), (short, fewer)):
                path.write_text(
                    CONFIG.format(aggregator=aggregator, weighting=weighting, rounds=length, root=root)
                )
            one, _, _ = measure_rounds(run_in_one(folder, config))
            many, down, up = measure_rounds(run_over_https(folder, config))
            others = [measure_rounds(run_over_network(network, folder, short))[0] for network in networks]
            seconds = "".join(f"{one:>14.3f}" for one in (one, many, *others))
            print(f"{aggregator:<12}{seconds}{down:>14,}{up:>14,}", flush=True)


if __name__ == "__main__":
    main()
