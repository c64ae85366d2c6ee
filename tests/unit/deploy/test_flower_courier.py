"""The app that carries messages over Flower, with stand-ins for Flower: what a SuperNode sends that belongs to nobody.

Whoever may start a SuperNode decides what it sends. One such node must not end the app, which carries the messages of
all silos, nor lose what came with its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from silodp.deploy import Reply

APP = Path(__file__).resolve().parents[3] / "examples" / "flower"


class App:
    """A `ServerApp` whose main function stays an ordinary one."""

    def main(self) -> Callable[[Any], Any]:
        return lambda function: function


def make_modules() -> dict[str, ModuleType]:
    """The names that the app imports of Flower."""
    modules = {
        name: ModuleType(name) for name in ("flwr", "flwr.app", "flwr.common.logger", "flwr.serverapp")
    }
    for name in ("Array", "ArrayRecord", "ConfigRecord", "RecordDict", "Context", "Message"):
        setattr(modules["flwr.app"], name, SimpleNamespace)
    modules["flwr.common.logger"].log = lambda *_: None  # type: ignore[attr-defined]
    modules["flwr.serverapp"].Grid = object  # type: ignore[attr-defined]
    modules["flwr.serverapp"].ServerApp = App  # type: ignore[attr-defined]
    return modules


def make_reply(id_: str, content: Any) -> Any:
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=id_), has_error=lambda: False, content=content
    )


def make_content(body: object, **texts: object) -> Any:
    return {"body": {"body": SimpleNamespace(data=body)}, "texts": texts}


@pytest.fixture
def server_app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, module in make_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(APP))
    yield import_module("silodp_courier.server_app")
    for name in [name for name in sys.modules if name.startswith("silodp_courier")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"body": {"body": 7}, "texts": {}},
        {"body": {"body": SimpleNamespace(data=7)}, "texts": {"refused": ""}},
        {"body": {"body": SimpleNamespace(data=b"x")}, "texts": None},
        make_content(b"x"),
        make_content(b"x", silo="south"),
        make_content(b"x", refused="y" * 10**6),
        make_content(b"not taken", refused=""),
    ],
    ids=lambda odd: str(odd)[:50],
)
def test_what_one_node_sends_does_not_keep_the_others_from_being_heard(
    odd: Any, server_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, Reply]] = []

    def give(path: str, exchange: str, reply: Reply) -> bool:
        if reply.body == b"not taken":  # it was too long for the server
            raise BrokenPipeError
        given.append((exchange, reply))
        return True

    monkeypatch.setattr(server_app, "give_reply", give)
    replies = [make_reply("1", odd), make_reply("2", make_content(b"answer", refused=""))]
    courier = server_app.Courier(SimpleNamespace(pull_messages=lambda _: replies), "socket")
    courier._nodes = {"south": 2}
    courier._sent = {"1": ("one", float("inf"), 1), "2": ("two", float("inf"), 2)}
    courier._receive()
    assert given[-1] == ("two", Reply(b"answer"))
    assert all(len(reply.refused) <= 100 for _, reply in given)
    assert courier._nodes == {"south": 2}
