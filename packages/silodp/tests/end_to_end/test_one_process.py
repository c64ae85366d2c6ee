"""One process at a time in a run's directory, and a fresh id for each that was there.

Without the lock, two processes that find a directory empty at the same time both write a checkpoint, and the later one
replaces that of a run whose rounds the ledger has; without the ids, two copies of a directory that are continued apart
release two models under guarantees that look the same.
"""

import fcntl
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from silodp.errors import SilodpError
from silodp.methods import UldpAvg
from silodp.runtime import run_directory as directories
from silodp.runtime.run_directory import hold_lock
from silodp.runtime.train import train
from silodp.training.sgd.local import LocalTraining
from support.oracles import logistic_task, small_federation

METHOD = UldpAvg(5.0, 0.5, LocalTraining(learning_rate=0.1))
# Not forked from here: threads of torch that this process has used do not survive that.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["silodp.runtime.train", "scipy.stats"])  # slow to import: once for all


def run(out, rounds=2, **more):
    return train(small_federation(), logistic_task(), METHOD, rounds=rounds, out=out, **more)


def outcome(pipe, out, wait_at_empty=None, wait=0.0, **more):
    """In a process of its own: what came of a run, and with it the run's id."""
    if wait_at_empty is not None:  # the moment between finding the directory empty and writing to it
        real = directories.Checkpoint.initial

        def slow(*arguments):
            wait_at_empty.wait()  # here it is
            wait_at_empty.wait()  # and now it goes on
            return real(*arguments)

        directories.Checkpoint = SimpleNamespace(initial=slow)
    if wait:
        more["callbacks"] = [lambda row: time.sleep(wait)]
    try:
        run(out, **more)
        pipe.send("done")
    except SilodpError as error:
        pipe.send(error.code)
    except BaseException as error:
        pipe.send(repr(error))


def started(*arguments, **named):
    mine, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=outcome, args=(theirs, *arguments), kwargs=named)
    process.start()
    return process, mine


def told(process, pipe):
    assert pipe.poll(60)
    said = pipe.recv()
    process.join(60)
    return said


def state_of(out):
    """The run's id as each of its files has it, and the rounds that were charged."""
    header, *charges = [
        json.loads(line) for line in (out / "checkpoint" / "ledger.jsonl").read_text().splitlines()
    ]
    guarantee = json.loads((out / "guarantee.json").read_text())
    rows = [json.loads(line)["round"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert guarantee["run"] == header["run"]
    return header["run"], sum("events" in line for line in charges), rows


@pytest.mark.parametrize("attempt", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 5))])
def test_of_two_processes_that_begin_at_once_one_trains(tmp_path, attempt):
    """Both have found the directory empty when the first of them writes."""
    out, barrier = tmp_path / "run", CONTEXT.Barrier(2)
    both = [started(out, barrier, rounds=2 + racer) for racer in (0, 1)]
    said = sorted(told(*each) for each in both)
    assert said[1] in ("run.exists", "run.in_use"), said
    assert said[0] == "done"
    _, charged, rows = state_of(out)
    assert rows == list(range(charged + 1))
    # The checkpoint is that of the run in the ledger: it goes on.
    assert run(out, rounds=5, resume=True).guarantees["released"].rounds == 5


def test_a_process_that_comes_late_leaves_a_finished_run_alone(tmp_path):
    """It had found the directory empty, then slept until the other run was over."""
    out, barrier = tmp_path / "run", CONTEXT.Barrier(2)
    late = started(out, barrier)
    barrier.wait()
    run(out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    barrier.wait()
    assert told(*late) == "run.exists"
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_neither_a_new_run_nor_a_resumed_one_disturbs_a_run_in_progress(tmp_path):
    out = tmp_path / "run"
    busy = started(out, None, 0.3, rounds=4)
    while not (out / "metrics.jsonl").exists():
        time.sleep(0.02)
    for resume, code in ((True, "run.in_use"), (False, "run.exists")):
        with pytest.raises(SilodpError) as refused:
            run(out, resume=resume)
        assert refused.value.code == code
    assert told(*busy) == "done"
    _, charged, rows = state_of(out)
    assert (charged, rows) == (4, [0, 1, 2, 3, 4])
    assert [start["round"] for start in json.loads((out / "guarantee.json").read_text())["starts"]] == [0]


def test_the_lock_ends_with_its_process_and_is_not_left_with_a_worker_of_it(tmp_path):
    path = tmp_path / "checkpoint" / "lock"
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = hold_lock(path)
        held.__enter__()
        worker = os.fork()  # inherits the open file
        if worker == 0:
            time.sleep(30)
            os._exit(0)
        os.write(writer, f"{worker} ".encode())
        os._exit(9)
    os.waitpid(pid, 0)
    worker = int(os.read(reader, 20))
    try:
        time.sleep(0.2)
        with hold_lock(path):
            with pytest.raises(SilodpError) as refused, hold_lock(path):
                pass
            assert refused.value.code == "run.in_use"
        with hold_lock(path):
            pass
    finally:
        os.kill(worker, 9)


def test_a_file_that_is_deleted_between_opening_and_locking_it_locks_nothing(tmp_path, monkeypatch):
    """`silodp demo` deletes its own earlier run: a lock on a file that nobody else can open would exclude nobody."""
    path, real, calls = tmp_path / "checkpoint" / "lock", fcntl.flock, []

    def flock(file, how):
        calls.append(how)
        if len(calls) == 1:
            shutil.rmtree(path.parent)
        return real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with hold_lock(path):
        assert len(calls) == 2
        with pytest.raises(SilodpError), hold_lock(path):
            pass


def test_a_run_killed_before_it_wrote_anything_is_begun_anew(tmp_path):
    out = tmp_path / "run"
    with hold_lock(out / "checkpoint" / "lock"):
        pass
    assert run(out).guarantees["released"].rounds == 2


def starts_of(out: Path):
    guarantee = json.loads((out / "guarantee.json").read_text())
    return guarantee["run"], [(start["id"], start["round"]) for start in guarantee["starts"]]


def test_two_copies_that_are_continued_apart_say_so(tmp_path):
    """Secret noise: each copy draws its own for the third round, and two models are released."""
    out, copy = tmp_path / "run", tmp_path / "copy"
    run(out)
    shutil.copytree(out, copy)
    run(out, rounds=3, resume=True)
    run(copy, rounds=3, resume=True)
    (run_, mine), (same, theirs) = starts_of(out), starts_of(copy)
    assert run_ == same
    assert [round_ for _, round_ in mine] == [round_ for _, round_ in theirs] == [0, 2]
    assert mine[0] == theirs[0]
    assert mine[1][0] != theirs[1][0]
    # The same directory continued twice is no copy: the earlier starts stay the first of the later ones.
    run(out, rounds=4, resume=True)
    assert starts_of(out)[1][:2] == mine
    assert len(starts_of(out)[1]) == 3
    guarantees = json.loads((out / "guarantee.json").read_text())["guarantees"]
    assert guarantees[0]["rounds"] == 4


def test_a_copy_made_during_a_start_is_told_by_the_rounds_of_the_next_one(tmp_path):
    """The lists alone do not tell: both runs share the start in which the directory was copied."""
    out, copy = tmp_path / "run", tmp_path / "copy"

    def copy_once(row):
        if row.round == 1:
            shutil.copytree(out, copy)

    run(out, rounds=3, callbacks=[copy_once])
    run(copy, rounds=3, resume=True)
    (_, mine), (_, theirs) = starts_of(out), starts_of(copy)
    assert mine == theirs[:1]
    rounds = json.loads((out / "guarantee.json").read_text())["rounds"]
    assert rounds > theirs[1][1]
    # Of an earlier moment of the same run they are not more.
    earlier = json.loads((copy / "guarantee.json").read_text())
    run(copy, rounds=4, resume=True)
    assert earlier["rounds"] == starts_of(copy)[1][2][1] == 3


def test_a_seed_fixes_no_start(tmp_path):
    for name in ("a", "b"):
        run(tmp_path / name, seed=1)
    assert starts_of(tmp_path / "a") != starts_of(tmp_path / "b")


def test_fewer_rounds_than_were_done_are_refused_before_anything_is_written(tmp_path):
    out = tmp_path / "run"
    run(out, rounds=3)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(SilodpError) as refused:
        run(out, rounds=2, resume=True)
    assert (refused.value.code, refused.value.field) == ("run.rounds_done", "rounds")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
