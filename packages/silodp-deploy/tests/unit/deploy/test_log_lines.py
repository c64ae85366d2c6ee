"""The log of a server or a silo does not grow with what others send."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from silodp.errors import SilodpError
from silodp_deploy.cli import _logging
from silodp_deploy.cli._logging import log_lines
from silodp_deploy.mailbox import answer_request
from support.echo import Echo

_log = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)


def read_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def refuse(data: bytes) -> bytes:
    raise SilodpError("no", code="message.signature") if data else ValueError("odd")


@pytest.mark.parametrize("request_", [b"forged", b""], ids=["refused", "failed, with a traceback"])
def test_requests_that_are_refused_again_and_again_fill_no_disk(
    request_: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(_logging.time, "monotonic", lambda: now)
    with log_lines("info"):
        for _ in range(5000):
            answer_request(Echo(refuse), request_)
        assert len(read_lines(capsys)) == 60
        _log.info("another statement is not held back")
        assert len(read_lines(capsys)) == 1
        now += 120
        for _ in range(5):
            answer_request(Echo(refuse), request_)
    first, second = read_lines(capsys)
    assert "4,940" in first["message"]
    assert "left out" not in second["message"]


def test_every_round_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with log_lines("info"):
        for round_ in range(500):
            _log.info("round %d is done", round_, extra={"fields": {"round": round_}})
    assert [line["round"] for line in read_lines(capsys)] == list(range(500))


def test_what_an_operator_asks_for_is_not_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    with log_lines("debug"):
        for number in range(500):
            _log.debug("answer %d", number)
    assert len(read_lines(capsys)) == 500
