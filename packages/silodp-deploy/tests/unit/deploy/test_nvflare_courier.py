"""The controller that carries messages over NVIDIA FLARE, with stand-ins for NVFlare: what it takes and sends.

A client decides what it sends, and nothing of it may end the job, which carries the messages of all silos. A request
that is offered again must not be sent again, unless its client has left the job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from silodp_deploy import Reply, Request

EXAMPLE = Path(__file__).resolve().parents[5] / "examples" / "nvflare"
PLACES = {
    "nvflare.apis.client": ("Client",),
    "nvflare.apis.controller_spec": ("ClientTask",),
    "nvflare.apis.fl_context": ("FLContext",),
    "nvflare.apis.signal": ("Signal",),
}


class Controller:
    """What the courier uses of NVFlare's."""

    def __init__(self) -> None:
        self.tasks: list[Any] = []
        self.panics: list[str] = []

    def send(self, task: Any, fl_ctx: Any, targets: list[str]) -> None:
        self.tasks.append((targets, task))

    def system_panic(self, reason: str, fl_ctx: Any) -> None:
        self.panics.append(reason)

    def log_info(self, fl_ctx: Any, text: str) -> None:
        pass


class Shareable(dict[str, Any]):
    code = "OK"

    def get_return_code(self) -> str:
        return self.code


def make_task(name: str, data: Any, **options: Any) -> Any:
    return SimpleNamespace(name=name, data=data, **options)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    modules = {name: ModuleType(name) for name in PLACES}
    for name, types in PLACES.items():
        for type_ in types:
            setattr(modules[name], type_, SimpleNamespace)
    modules["nvflare.apis.controller_spec"].Task = make_task  # type: ignore[attr-defined]
    for name, values in {
        "fl_constant": {"ReservedTopic": SimpleNamespace(SYNC_RUNNER="sync")},
        "impl.controller": {"Controller": Controller},
        "shareable": {"ReturnCode": SimpleNamespace(OK="OK"), "Shareable": Shareable},
    }.items():
        modules[f"nvflare.apis.{name}"] = ModuleType(name)
        vars(modules[f"nvflare.apis.{name}"]).update(values)
    for name, one in modules.items():
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield import_module("silodp_courier.controller")
    for name in [name for name in sys.modules if name.startswith("silodp_courier")]:
        del sys.modules[name]


def refuse() -> Shareable:
    result = Shareable(body=b"x", refused="")
    result.code = "EXECUTION_EXCEPTION"
    return result


@pytest.mark.parametrize(
    "odd",
    [
        Shareable(),
        Shareable(body=7, refused=""),
        Shareable(body=b"x", refused=None),
        Shareable(body=b"x", refused="y" * 10**6),
        Shareable(body=b"not taken", refused=""),
        refuse(),
    ],
    ids=lambda odd: str(odd)[:40],
)
def test_what_one_client_sends_ends_nothing(
    odd: Shareable, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, Reply]] = []

    def give(path: str, exchange: str, reply: Reply) -> bool:
        if reply.body == b"not taken":  # it was too long for the server
            raise BrokenPipeError
        given.append((exchange, reply))
        return True

    monkeypatch.setattr(module, "give_reply", give)
    controller = module.CourierController("socket")
    for exchange, result in (("one", odd), ("two", Shareable(body=b"answer", refused=""))):
        task = SimpleNamespace(props={"exchange": exchange})
        client = SimpleNamespace(name="north")
        controller._give(SimpleNamespace(task=task, client=client, result=result), None)
    assert given[-1] == ("two", Reply(b"answer"))
    assert all(len(reply.refused) <= 100 for _, reply in given)


class Abort:
    """Not triggered for a number of looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def triggered(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_request_that_is_offered_again_is_sent_once_while_its_client_is_there(
    is_alive: bool, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = [Request("one", "north", b"request") for _ in range(5)]
    monkeypatch.setattr(module, "take_request", lambda path, wait: offered.pop() if offered else None)
    replies = {"north": Shareable()} if is_alive else None
    engine = SimpleNamespace(send_aux_request=lambda targets, *_, **__: replies)
    context = SimpleNamespace(get_engine=lambda: engine)
    controller = module.CourierController("socket")
    controller.control_flow(Abort(10), context)
    ((targets, task),) = controller.tasks
    assert (targets, task.data["body"]) == (["north"], b"request")
    assert len(controller.panics) == (0 if is_alive else 1)
    # The task is over without an answer, so the next offer is sent.
    task.task_done_cb(task, context)
    offered.append(Request("one", "north", b"request"))
    controller.control_flow(Abort(1), context)
    assert len(controller.tasks) == 2
