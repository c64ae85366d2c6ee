"""The app that carries messages over Flower, with stand-ins for Flower: what it takes from SuperNodes and sends them.

Whoever may start a SuperNode decides what it sends. One such node must not end the app, which carries the messages of
all silos, nor lose what came with its own. And a SuperNode answers one message after the other, for seconds each: if
a request is sent again faster than that, its copies pile up before the next one, and the run stands still.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from silodp_deploy import Reply, Request

APP = Path(__file__).resolve().parents[5] / "examples" / "flower"


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


def test_copies_of_a_request_do_not_pile_up_at_a_node(
    server_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, sent, came = [1000.0], [], []
    grid = SimpleNamespace(
        push_messages=lambda messages: sent.append(now[0]) or [str(len(sent))], pull_messages=lambda _: came
    )
    offered: list[Request] = []
    monkeypatch.setattr(server_app, "take_request", lambda path, wait: offered.pop() if offered else None)
    monkeypatch.setattr(server_app, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(server_app, "Message", lambda *_, **__: None)
    monkeypatch.setattr(server_app, "wrap", lambda *_, **__: None)
    courier = server_app.Courier(grid, "socket")
    for _ in range(60):  # `--repeat 1`, and no answer for a minute
        courier._nodes = {"north": 1}
        offered.append(Request("one", "north", b"request"))
        courier.carry()
        now[0] += 1
    assert 2 <= len(sent) <= 4
    assert courier._held == []
    # A copy that Flower gives back as undeliverable is replaced at the next offer.
    came.append(
        SimpleNamespace(
            metadata=SimpleNamespace(reply_to_message_id=str(len(sent))),
            has_error=lambda: True,
            error=SimpleNamespace(reason="Node Unavailable"),
        )
    )
    courier.carry()
    came.clear()
    courier._nodes, before = {"north": 2}, len(sent)
    offered.append(Request("one", "north", b"request"))
    courier.carry()
    assert len(sent) == before + 1


def test_requests_of_a_round_leave_in_one_call(server_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[list[int]] = []

    def push(messages: list[Any]) -> list[str | None]:
        pushed.append([message.dst_node_id for message in messages])
        return ["1", None, "3"]  # Flower did not take the second one

    names = ("north", "south", "west")
    offered = [Request(f"to {name}", name, b"") for name in names]
    monkeypatch.setattr(server_app, "take_request", lambda path, wait: offered.pop(0) if offered else None)
    monkeypatch.setattr(server_app, "Message", lambda content, **fields: SimpleNamespace(**fields))
    monkeypatch.setattr(server_app, "wrap", lambda *_, **__: None)
    grid = SimpleNamespace(push_messages=push, pull_messages=lambda _: [])
    courier = server_app.Courier(grid, "socket")
    courier._nodes = {name: number for number, name in enumerate(names)}
    courier.carry()
    assert pushed == [[0, 1, 2]]
    assert {id_: sent[0] for id_, sent in courier._sent.items()} == {"1": "to north", "3": "to west"}


def test_a_node_that_answers_with_errors_is_not_asked_all_the_time(
    server_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [1000.0], []

    def fail(ids: list[str]) -> list[Any]:
        error = SimpleNamespace(reason="the app could not be loaded")
        return [
            SimpleNamespace(
                metadata=SimpleNamespace(reply_to_message_id=id_), has_error=lambda: True, error=error
            )
            for id_ in ids
        ]

    grid = SimpleNamespace(
        get_node_ids=lambda: [7],
        push_messages=lambda messages: asked.append(now[0]) or [str(len(asked))],
        pull_messages=fail,
    )
    offered = [Request("exchange", "south", b"")]
    monkeypatch.setattr(server_app, "take_request", lambda path, wait: offered.pop() if offered else None)
    monkeypatch.setattr(server_app, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(server_app, "Message", lambda *_, **__: None)
    monkeypatch.setattr(server_app, "wrap", lambda *_, **__: None)
    courier = server_app.Courier(grid, "socket")
    for _ in range(300):  # a minute
        courier.carry()
        now[0] += 0.2
    assert len(asked) == 3
