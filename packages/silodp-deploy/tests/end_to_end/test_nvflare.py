"""Messages over NVIDIA FLARE between real processes: the model of the simulation (`make test-nvflare`).

Whoever may submit a job decides what the clients execute, unless their sites forbid it; and NVFlare neither takes a
client that was started again into a job that runs, nor goes on with a job after its server was killed. Neither may
change a model or what is charged.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from silodp_deploy.sockets import ServerSocket, SiloSocket, SocketOptions
from support.consortium import Processes, start_consortium
from support.deployed import AVG, assert_same_run, config, simulate, wait_for_round
from support.echo import Echo
from support.nvflare import BIN, SERVER, Federation, start_federation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not (BIN / "nvflare").exists(), reason="NVFlare is not installed: make test-nvflare"),
]
NAMES = ("silo-1", "silo-2", "silo-3", "silo-4")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One job carries the messages of several runs, one after the other: it keeps nothing of them."""
    with start_federation(tmp_path_factory.mktemp("nvflare"), NAMES) as federation:
        federation.carry()
        yield federation


def start_parties(folder: Path, processes: Processes, *options: str) -> None:
    """Start a server and its silos at the sockets that the job asks."""
    for name in NAMES:
        processes.start(name, "--socket", str(folder / f"{name}.sock"))
    processes.start("server", "--socket", str(folder / "server.sock"), *options)


def write_run(aggregator: str, rounds: int = 3) -> str:
    text = config(AVG, head=f'aggregator = "{aggregator}"\n', silos=len(NAMES))
    return text.replace("rounds = 3", f"rounds = {rounds}")


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
def test_four_silos_train_the_model_of_the_simulation_over_nvflare(
    aggregator: str, federation: Federation, tmp_path: Path
) -> None:
    text = write_run(aggregator)
    simulated = simulate(tmp_path, text)
    with start_consortium(tmp_path, text, forked=False) as processes:
        start_parties(federation.home.parent, processes)
        assert processes.wait_for_server(150) == 0, (processes.log("server"), federation.log("carry"))
        assert_same_run(processes, simulated)
        for name in NAMES:
            assert [one["round"] for one in processes.audit(name) if one["kind"] == "update"] == [0, 1, 2]
        state = json.loads((processes.home("server") / "status.json").read_text())
        assert None not in state["seconds_since_seen"].values()


def test_messages_of_10_megabytes_arrive_as_they_were_sent(federation: Federation) -> None:
    folder, size, stop = federation.home.parent, 10**7, threading.Event()
    sent = {name: bytes([number]) * (size - 1) + b"!" for number, name in enumerate(NAMES)}
    silos = [SiloSocket(folder / f"{name}.sock", Echo(), size) for name in NAMES]
    threads = [threading.Thread(target=silo.run, args=(stop,)) for silo in silos]
    options = SocketOptions(folder / "server.sock")
    for thread in threads:
        thread.start()
    try:
        with ServerSocket(options, NAMES, answer_timeout=120, max_bytes=size) as server:
            assert server.ask(sent) == ({name: data[::-1] for name, data in sent.items()}, {})
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_client_and_the_server_of_nvflare_that_are_killed_change_nothing(
    federation: Federation, tmp_path: Path
) -> None:
    text = write_run("masked", rounds=40)
    simulated = simulate(tmp_path, text)
    with start_consortium(tmp_path, text, forked=False) as processes:
        start_parties(federation.home.parent, processes, "--repeat", "5")
        for round_, name in ((3, NAMES[0]), (10, SERVER)):
            wait_for_round(processes, round_)
            federation.kill(name)
        assert processes.wait_for_server(250) == 0, (processes.log("server"), federation.log("carry"))
        assert_same_run(processes, simulated)
        for name in NAMES:
            updates = [one["round"] for one in processes.audit(name) if one["kind"] == "update"]
            assert sorted(set(updates)) == list(range(40))


STRANGER = """
from pathlib import Path
from nvflare.apis.executor import Executor

class Stranger(Executor):
    def __init__(self, proof):
        Path(proof).touch()

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        return shareable
"""


def test_a_job_with_code_is_executed_where_no_policy_forbids_it(tmp_path: Path) -> None:
    """A job is sent whose executor is a stranger's code: with the policy of `prepare_site.py` it is refused.

    The second site, and the server, have the policy with which NVFlare provisions them, and so the code is executed.
    """
    names = ("guarded", "open")
    with start_federation(tmp_path, names, unguarded=(SERVER, "open")) as federation:
        custom = federation.job / "app" / "custom"
        custom.mkdir()
        (custom / "stranger.py").write_text(STRANGER)
        path = federation.job / "app" / "config" / "config_fed_client.json"
        content = json.loads(path.read_text())
        proof = str(tmp_path / "{SITE_NAME}.proof")
        content["executors"][0]["executor"] = {"path": "stranger.Stranger", "args": {"proof": proof}}
        path.write_text(json.dumps(content))
        federation.carry()
        end = time.monotonic() + 90
        while not (tmp_path / "open.proof").exists() or "BYOC not permitted" not in federation.describe_job():
            assert time.monotonic() < end, federation.describe_job()
            time.sleep(0.2)
    assert not (tmp_path / "guarded.proof").exists()
