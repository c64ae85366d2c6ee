"""Callbacks: what a program learns of a run and when, what its failure does to the run, and the trackers."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import torch

from silodp import Callback, RoundResult, RunStart
from silodp.config.callbacks import SafeCallback, read_log_options
from silodp.errors import SilodpError
from silodp.methods import UldpAvg
from silodp.runtime.callback import Result
from silodp.runtime.train import train
from silodp.tracking import MLflow, TensorBoard, Tracker, is_local, print_progress
from silodp.training.sgd.local import LocalTraining
from support.commands import CONFIG, Silodp, assert_sentence
from support.oracles import logistic_task, small_federation

METHOD = UldpAvg(5.0, 0.5, LocalTraining(learning_rate=0.1))


def run(callback, rounds=4, **more):
    return train(small_federation(), logistic_task(), METHOD, rounds=rounds, callbacks=[callback], **more)


class Memory(Tracker):
    """Keeps what is logged."""

    name = "memory"

    def __init__(self, target=None, *, private=None):
        super().__init__(target, private=private)
        self.logged = {}

    def log(self, run, round_, numbers):
        self.logged[round_] = numbers


# --- the results of rounds ---


def test_every_round_is_told_once_and_agrees_with_the_rows_and_the_guarantees():
    seen: list[RoundResult] = []
    result = run(seen.append, evaluate_every=2)
    assert [each.round for each in seen] == [0, 1, 2, 3, 4]
    assert {each.rounds for each in seen} == {4}
    assert len({each.run for each in seen}) == 1
    for each, row in zip(seen, result.metrics, strict=True):
        assert dict(each.epsilon) == row["epsilon"]
        assert dict(each.metrics) == row.get("metrics", {})
        assert each.loss == row.get("loss")
        assert not each.is_covered
    assert [bool(each.metrics) for each in seen] == [True, False, True, False, True]
    assert seen[-1].epsilon["released"] == result.epsilon
    assert [each.seconds_left is None for each in seen] == [True, True, False, False, False]
    assert seen[2].seconds_left > seen[4].seconds_left == 0.0


def test_the_last_round_is_evaluated_also_where_the_budget_ends_the_run():
    enough_for_three = train(small_federation(), logistic_task(), METHOD, rounds=3).epsilon
    seen: list[RoundResult] = []
    result = run(seen.append, evaluate_every=2, budget={"epsilon": enough_for_three, "delta": 1e-5})
    assert result.stopped == "budget"
    assert [bool(each.metrics) for each in seen] == [True, False, True, True]


def test_a_result_cannot_be_changed():
    seen: list[RoundResult] = []
    result = run(seen.append, rounds=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen[1].round = 7
    with pytest.raises(TypeError):
        seen[1].epsilon["released"] = 0.0
    with pytest.raises(TypeError):
        seen[1].metrics["auc"] = 1.0
    assert result.metrics[1]["epsilon"]["released"] == result.epsilon


@pytest.mark.parametrize("failure", [RuntimeError("no space"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_after_a_failure_the_run_goes_on_with_the_next_round(tmp_path, failure, at):
    whole: list[int] = []
    expected = run(lambda done: whole.append(done.round), seed=3)

    def fail(done):
        if done.round == at:
            raise failure

    with pytest.raises(type(failure)):
        run(fail, seed=3, out=tmp_path / "run")
    later: list[int] = []
    result = run(lambda done: later.append(done.round), seed=3, out=tmp_path / "run", resume=True)
    assert later == whole[at + 1 :]
    assert torch.equal(result.params, expected.params)
    assert result.guarantees["released"].rounds == 4
    assert result.epsilon == expected.epsilon


class Recorder(Callback):
    """Notes the calls of its hooks in a list, and raises an exception in one of them."""

    def __init__(self, calls: list[Any], name: str = "", fails: str = "") -> None:
        self.calls, self.name, self.fails = calls, name, fails

    def note(self, hook: str, what: object) -> None:
        self.calls.append((self.name + hook, what))
        if hook == self.fails:
            raise RuntimeError(hook)

    def on_start(self, run: RunStart) -> None:
        self.note("start", (run.round, run.rounds, run.directory))

    def before_round(self, round_: int) -> None:
        self.note("before", round_)

    def after_round(self, result: RoundResult) -> None:
        self.note("after", result.round)

    def on_end(self, result: Result | None) -> None:
        self.note("end", None if result is None else result.guarantees["released"].rounds)


def test_hooks_are_called_in_order_and_ended_in_the_reverse_order():
    calls: list[Any] = []
    callbacks = [Recorder(calls, "a "), Recorder(calls, "b ")]
    train(small_federation(), logistic_task(), METHOD, rounds=2, callbacks=callbacks)
    hooks = [("start", (0, 2, None)), ("after", 0), ("before", 1), ("after", 1), ("before", 2), ("after", 2)]
    both = [(f"{name} {hook}", what) for hook, what in hooks for name in "ab"]
    assert calls == [*both, ("b end", 2), ("a end", 2)]


@pytest.mark.parametrize(("hook", "done"), [("start", 0), ("before", 0), ("after", 0), ("end", 2)])
def test_every_callback_that_was_started_is_ended_once_whichever_raises(tmp_path, hook, done):
    calls: list[Any] = []
    parts = small_federation(), logistic_task(), METHOD
    settings = {"rounds": 2, "out": tmp_path / "run", "seed": 3}
    expected = train(*parts, rounds=2, seed=3)
    callbacks = [Recorder(calls, "a "), Recorder(calls, "b ", hook), Recorder(calls, "c ")]
    with pytest.raises(RuntimeError, match=hook):
        train(*parts, callbacks=callbacks, **settings)
    started = ["a", "b"] if hook == "start" else ["a", "b", "c"]
    ends = [(f"{name} end", 2 if hook == "end" else None) for name in reversed(started)]
    assert calls[-len(ends) :] == ends
    calls.clear()
    resumed = train(*parts, callbacks=callbacks[:1], resume=True, **settings)
    assert calls[0] == ("a start", (done, 2, tmp_path / "run"))
    assert torch.equal(resumed.params, expected.params)
    assert resumed.epsilon == expected.epsilon


def test_a_run_that_is_refused_starts_no_callback(tmp_path):
    (tmp_path / "file").touch()
    calls: list[Any] = []
    with pytest.raises(SilodpError):
        run(Recorder(calls), out=tmp_path)
    assert calls == []


OWN = """
from pathlib import Path
from silodp import Callback
class Follow(Callback):
    def __init__(self, file: str, fail: bool = False):
        self.file, self.fail = Path(file), fail
    def after_round(self, result):
        with self.file.open("a") as file:
            print(result.round, file=file)
        if self.fail:
            raise OSError("the disk is gone")
"""


def test_a_configuration_names_callbacks_which_stop_no_run_and_no_report_runs(
    tmp_path, silodp: Silodp, caplog
):
    (tmp_path / "own.py").write_text(OWN)
    config, seen = tmp_path / "config.toml", tmp_path / "seen"
    follow = f'\n[[callbacks]]\nname = "own.py:Follow"\nfile = "{seen}"\n'
    config.write_text(CONFIG + follow)
    assert silodp("run", str(config), "--out", str(tmp_path / "a")).status == 0
    assert seen.read_text().split() == ["0", "1", "2"]
    seen.unlink()
    config.write_text(f"{CONFIG}{follow}fail = true\n")
    assert silodp("run", str(config), "--out", str(tmp_path / "b")).status == 0
    assert caplog.text.count("the disk is gone") == 1
    assert seen.read_text().split() == ["0"]
    (tmp_path / "own.py").write_text("raise AssertionError")
    assert silodp("report", str(tmp_path / "b")).status == 0


@pytest.mark.parametrize(
    ("table", "code", "field"),
    [
        ('name = "tensorbord"', "argument.value", "callbacks.name"),
        ("target = 1", "config.missing_field", "callbacks.name"),
        ('name = "tensorboard"\nfolder = "x"', "config.unknown_field", "callbacks.folder"),
        ('name = "pathlib:Path"', "config.value", "callbacks.name"),
    ],
)
def test_a_callback_that_cannot_be_made_is_refused_before_the_run(
    tmp_path, silodp: Silodp, table, code, field
):
    (tmp_path / "config.toml").write_text(f"{CONFIG}\n[[callbacks]]\n{table}\n")
    told = silodp("run", str(tmp_path / "config.toml"), "--out", str(tmp_path / "run"), "--json")
    assert_sentence(told, code=code)
    assert told.json["error"]["field"] == field
    assert not (tmp_path / "run").exists()


def test_the_import_that_fails_is_named(tmp_path, monkeypatch):
    """A package that is there, and lacks another one, is installed."""
    (tmp_path / "half_a_package.py").write_text("import what_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Memory, "packages", ("half_a_package",))
    with pytest.raises(SilodpError, match=r"'half_a_package' \(ModuleNotFoundError: .*'what_it_needs'\)"):
        Memory.check_installed()


# --- what trackers may see ---


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("runs/a/tensorboard", True),
        ("/somewhere/else", True),
        ("file:///tmp/a", True),
        ("sqlite:////tmp/a.db", True),
        ("https://tracking.example.org", False),
        ("http://localhost:5000", False),  # a server passes on what it gets
        ("s3://bucket/logs", False),
        ("databricks://profile", False),
        ("postgresql://db.example.org/a", False),
        ("file://host/share", False),
    ],
)
def test_only_files_of_this_machine_are_local(target, expected):
    assert is_local(target) is expected
    assert Memory(target).private is expected


def test_no_private_number_goes_to_a_server_unless_asked_to():
    tracker = Memory("https://tracking.example.org")
    run(tracker)
    assert all(all(name.startswith("epsilon/") for name in row) for row in tracker.logged.values())
    assert tracker.logged[4]["epsilon/released"] > tracker.logged[1]["epsilon/released"] > 0
    everything = Memory("https://tracking.example.org", private=True)
    run(everything)
    private = {name for name in everything.logged[4] if not name.startswith("epsilon/")}
    assert {"private/loss", "private/seconds"} < private
    assert all(name.startswith("private/") for name in private)


def test_a_tracker_that_fails_is_given_up_and_the_run_ends_as_it_should(caplog):
    class Broken(Memory):
        def log(self, run, round_, numbers):
            super().log(run, round_, numbers)
            if round_ >= 2:
                raise ConnectionError("refused")

        def close(self):
            raise AssertionError("a tracker that was given up is left alone")

    tracker = Broken("a")
    with caplog.at_level(logging.WARNING):
        result = run(SafeCallback(tracker, "memory"))
    assert list(tracker.logged) == [0, 1, 2]
    assert result.guarantees["released"].rounds == 4
    warnings = [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]
    assert len(warnings) == 1
    assert "ConnectionError" in warnings[0]


def test_trackers_are_found_by_name():
    with pytest.raises(SilodpError) as caught:
        read_log_options(["tensorbord"], None)
    assert (caught.value.code, caught.value.field) == ("argument.value", "log")
    assert "tensorboard" in str(caught.value)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused_before_the_run(
    tmp_path, monkeypatch, silodp: Silodp, name
):
    monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "config.toml").write_text(CONFIG)
    out = tmp_path / "run"
    outcome = silodp("run", str(tmp_path / "config.toml"), "--out", str(out), "--log", name)
    assert_sentence(outcome, code="argument.missing")
    assert not out.exists()


# --- trackers that are installed ---


def run_in_two_parts(out: Path, make: Callable[[], Tracker]) -> Result:
    """Fail in round 2, after it was logged, and resume with another tracker."""

    def fail(done):
        if done.round == 2:
            raise RuntimeError

    settings = {"rounds": 4, "out": out, "seed": 1}
    with pytest.raises(RuntimeError):
        train(small_federation(), logistic_task(), METHOD, callbacks=[make(), fail], **settings)
    return run(make(), resume=True, **settings)


def logged_by_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {
        name: [(point.step, point.value) for point in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }


def test_tensorboard_shows_every_round_once_even_of_a_run_that_was_interrupted(tmp_path):
    pytest.importorskip("tensorboard")
    folder = tmp_path / "run" / "tensorboard"

    result = run_in_two_parts(tmp_path / "run", lambda: TensorBoard(folder))
    logged = logged_by_tensorboard(folder)
    assert logged["epsilon/released"] == [
        (row["round"], pytest.approx(row["epsilon"]["released"])) for row in result.metrics
    ]
    assert [step for step, _ in logged["private/loss"]] == [0, 1, 2, 3, 4]
    assert not any(name.startswith("metrics/") for name in logged)


def test_mlflow_keeps_one_run_for_a_run_that_was_interrupted(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://nowhere.invalid")  # is not read
    folder = tmp_path / "run" / "mlflow"
    result = run_in_two_parts(tmp_path / "run", lambda: MLflow(folder))
    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("silodp").experiment_id])
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "epsilon/released")
    assert {point.step: point.value for point in history} == {
        row["round"]: row["epsilon"]["released"] for row in result.metrics
    }


def test_a_server_that_cannot_be_reached_is_given_up_within_seconds(caplog):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and not listening: connections are refused
        safe = SafeCallback(MLflow(f"http://127.0.0.1:{closed.getsockname()[1]}"), "mlflow")
        begun = time.monotonic()
        with caplog.at_level(logging.WARNING, "silodp"):
            result = run(safe)
    assert time.monotonic() - begun < 30  # MLflow alone takes four minutes
    assert result.guarantees["released"].rounds == 4
    assert len([record for record in caplog.records if record.name == "silodp.config.callbacks"]) == 1


class FakeClient:
    """An MLflow client that notes how long each request may take."""

    seen: ClassVar[list[tuple[str | None, str | None]]] = []

    def __init__(self, tracking_uri: str) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def request(*arguments: object, **options: object) -> Any:
            limits = (os.environ.get(WAIT), os.environ.get(RETRIES))
            self.seen.append(limits)
            return [] if name == "search_runs" else MagicMock()

        return request


WAIT, RETRIES = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


@pytest.mark.parametrize("own", [None, "60"])
def test_requests_to_mlflow_wait_for_seconds_unless_the_user_says_otherwise(monkeypatch, own):
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setattr(sys.modules["mlflow"], "MlflowClient", FakeClient, raising=False)
    monkeypatch.setattr(MLflow, "packages", ("mlflow",))
    monkeypatch.setattr(FakeClient, "seen", [])
    monkeypatch.delenv(RETRIES, raising=False)
    monkeypatch.delenv(WAIT, raising=False) if own is None else monkeypatch.setenv(WAIT, own)
    run(MLflow("http://tracking.example.org"), rounds=1)
    assert len(FakeClient.seen) > 5
    assert set(FakeClient.seen) == {(own or "5", "1")}
    assert (os.environ.get(WAIT), os.environ.get(RETRIES)) == (own, None)  # as before


def test_silodp_run_logs_into_the_directory_of_the_run(tmp_path, silodp: Silodp):
    pytest.importorskip("tensorboard")
    (tmp_path / "config.toml").write_text(CONFIG)
    out = tmp_path / "run"
    command = ("run", str(tmp_path / "config.toml"), "--out", str(out), "--log", "tensorboard")
    assert silodp(*command).status == 0
    logged = logged_by_tensorboard(out / "tensorboard")
    assert [step for step, _ in logged["epsilon/released"]] == [0, 1, 2]
    assert any(name.startswith("private/metrics/") for name in logged)
    assert silodp("report", str(out)).status == 0
    assert silodp(*command, "--resume").status == 0  # nothing is left to do


# --- progress ---


def test_progress_says_how_much_time_is_left(capsys):
    run(print_progress)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"round {i}/4" for i in range(5)]
    assert [" left" in line for line in lines] == [False, False, True, True, False]
    run(print_progress, rounds=60)
    assert len(capsys.readouterr().err.splitlines()) == 21


def test_the_version_is_that_of_the_package(silodp: Silodp):
    import silodp as package

    outcome = silodp("--version")
    assert (outcome.status, outcome.out) == (0, f"silodp {package.__version__}\n")
