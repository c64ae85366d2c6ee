"""Real parties whose network has one way out, an HTTP proxy: the model of the simulation, and what gets in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from silodp_deploy.acceptance import write_policy
from silodp_deploy.consortium import Consortium
from silodp_deploy.policy import Policy, accept_digest
from silodp_deploy.setup import seal_public
from support.connect_proxy import ConnectProxy, make_interceptor
from support.consortium import Processes, start_consortium
from support.deployed import MASKED, assert_same_run, simulate, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAME = "server.test"
"""A name that this machine cannot resolve: a silo reaches it through a proxy or not at all."""
USER, PASSWORD = "nurse", "pass:word"


def seal_by_name(processes: Processes) -> None:
    """Give the server a name in its certificate, and have all parties accept it."""
    port = Consortium.load(processes.public).sealed.port
    consortium = seal_public(processes.folder, NAME, port, again=True, for_tests=True)
    accept_digest(processes.home("server"), consortium.digest)
    for silo in processes.names:
        home = processes.home(silo)
        write_policy(home, consortium, Policy.load(home / "policy.toml").data)


def write_settings(home: Path, url: str, password: str) -> None:
    (home / "silo.toml").write_text(f'[network]\nproxy = "{url}"\nproxy_login = "proxy.login"\n')
    (home / "proxy.login").write_text(f"{USER}:{password}\n")
    (home / "proxy.login").chmod(0o600)


def test_silos_behind_proxies_train_the_model_of_the_simulation(tmp_path: Path) -> None:
    """One of them with its own settings, three by the environment; first with a wrong password and an interceptor."""
    simulated = simulate(tmp_path, MASKED)
    closed, open_ = ConnectProxy((USER, PASSWORD)), ConnectProxy()
    inspecting = ConnectProxy(interceptor=make_interceptor(tmp_path / "inspection", "Inspection", (NAME,)))
    with start_consortium(tmp_path, MASKED) as processes:
        seal_by_name(processes)
        one, two, *others = processes.names
        processes.start("server")
        for silo in others:
            processes.start(silo, HTTPS_PROXY=open_.url)
        # Whoever repeats a wrong password may have the account locked: the silo ends.
        write_settings(processes.home(one), closed.url, "wrong-word")
        assert processes.start(one).wait(60) == 2
        assert "[deploy.proxy_login]" in processes.log(one)
        assert closed.replied == [407]
        write_settings(processes.home(one), closed.url, PASSWORD)
        processes.start(one, "--log-level", "debug")
        # What reads TLS gets nothing, and the silo goes on when its host is exempted.
        processes.start(two, https_proxy=inspecting.url)
        wait_for(processes, lambda: "[deploy.intercepted]" in processes.log(two))
        assert "'Inspection consortium'" in processes.log(two)
        assert (
            "[deploy.intercepted]" in json.loads((processes.home(two) / "status.json").read_text())["error"]
        )
        assert inspecting.decrypted == b""
        assert not (processes.home(two) / "audit.jsonl").exists()
        inspecting.interceptor = None
        assert processes.wait_for_server() == 0, processes.log("server")
        assert_same_run(processes, simulated)
        for silo in processes.names:
            assert processes.running[silo].wait(30) == 0
        logs = "".join(
            path.read_text()
            for path in processes.folder.rglob("*")
            if path.name in ("log.txt", "status.json")
        )
        assert PASSWORD not in logs
        assert "wrong-word" not in logs
        address = f"{NAME}:{Consortium.load(processes.public).sealed.port}"
        for proxy in (closed, open_, inspecting):
            assert set(proxy.asked) == {address}
            assert proxy.seen
            assert b"/v1/" not in proxy.seen
            proxy.close()
