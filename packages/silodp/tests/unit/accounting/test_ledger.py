"""ε is never under-counted: not after a kill at any byte, not after damage, not by two processes."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silodp.accounting import _append_log
from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import (
    Gaussian,
    Group,
    NonPrivate,
    PoissonSampled,
    RevealedSample,
    SelfComposed,
    event_from_dict,
    event_to_dict,
)
from silodp.accounting.ledger import FORMAT, Budget, Ledger
from silodp.accounting.progress import TRAINING
from silodp.errors import SilodpError

DELTA = 1e-5
COSTLY = {
    "released": PoissonSampled(0.5, Gaussian(2.0)),
    "server": NonPrivate("counts disclosed"),
    "silo": RevealedSample(0.5, Gaussian(1.0)),
}


def book(path, **changes):
    return Ledger(path, **{"delta": DELTA, "run": "a", **changes})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def three_rounds(path):
    """The content, and its size after each durable charge."""
    sizes = []
    with book(path) as ledger:
        sizes.append(path.stat().st_size)
        for round in range(3):
            ledger.charge(round, 0, COSTLY)
            sizes.append(path.stat().st_size)
    return path.read_bytes(), sizes


def test_a_book_reopened_says_the_same(path):
    with book(path, budget=Budget(9.0, 1e-6)) as ledger:
        for round in range(3):
            ledger.charge(round, 0, COSTLY)
        ledger.charge(2, 1, COSTLY)
        before = {a: ledger.epsilon(a) for a in COSTLY}, ledger.history, ledger.rounds
    with book(path, budget=Budget(9.0, 1e-6)) as ledger:
        assert ({a: ledger.epsilon(a) for a in COSTLY}, ledger.history, ledger.rounds) == before
        assert ledger.epsilon("released") == compute_epsilon([(COSTLY["released"], 4)], DELTA)
        assert ledger.epsilon("released", 1e-6) == compute_epsilon([(COSTLY["released"], 4)], 1e-6)
        assert ledger.rounds == 3
        assert len(ledger.history) == 4
        assert ledger.charged(2, 1)
        assert not ledger.charged(3)
        assert ledger.epsilon("server") is None
        assert ledger.to_counts().compute_cost("server").reason == "counts disclosed"
        assert ledger.to_counts().compute_cost("released").reason is None


def test_a_book_in_memory():
    ledger = book(None)
    assert ledger.epsilon("released") == 0.0
    ledger.charge(0, 0, COSTLY)
    assert ledger.epsilon("released") == compute_epsilon([(COSTLY["released"], 1)], DELTA)


def test_no_noise_has_a_reason_and_no_epsilon():
    ledger = book(None)
    ledger.charge(0, 0, {"released": Gaussian(0.0)})
    assert ledger.epsilon("released") is None
    assert "no noise" in ledger.to_counts().compute_cost("released").reason


def test_no_guarantee_once_is_none_for_ever():
    ledger = book(None)
    ledger.charge(0, 0, {"released": NonPrivate("the sample was published")})
    ledger.charge(1, 0, {"released": Gaussian(5.0)})
    assert ledger.epsilon("released") is None
    assert ledger.to_counts().compute_cost("released").reason == "the sample was published"


# A kill at any byte


def test_killed_at_any_byte_no_durable_charge_is_forgotten(path, three_rounds, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)  # 2,000 openings; the disk has its own test
    content, sizes = three_rounds
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        durable = sum(size <= cut for size in sizes[1:])
        with book(path) as ledger:
            assert ledger.rounds == durable
            assert path.stat().st_size == max(size for size in sizes if size <= max(cut, sizes[0]))
            if cut % 97 == 0:  # and it goes on
                ledger.charge(9, 0, COSTLY)
                assert ledger.rounds == durable + 1
        if cut % 97 == 0:
            with book(path) as ledger:
                assert ledger.rounds == durable + 1


def test_a_power_cut_may_leave_zeros(path, three_rounds):
    content, sizes = three_rounds
    path.write_bytes(content[: sizes[2]] + bytes(40))
    with book(path) as ledger:
        assert ledger.rounds == 2
    path.write_bytes(bytes(30))
    with book(path) as ledger:
        assert ledger.rounds == 0


@pytest.mark.parametrize("length", [1, 16, 200])
def test_zeros_in_a_charge_that_was_on_disk_are_not_taken_for_a_torn_line(path, three_rounds, length):
    content, sizes = three_rounds
    path.write_bytes(content[: sizes[2]] + bytes(length) + content[sizes[2] + length :])
    with pytest.raises(SilodpError, match="is damaged in line 4"):
        book(path)


def test_a_changed_byte_is_never_taken_for_a_torn_line(path, three_rounds):
    content, sizes = three_rounds
    for at in range(0, len(content) - 1, 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(SilodpError, match=r"is damaged in line \d|was begun with"):
            book(path)
    # The end of the last line itself: as if it had been torn there.
    path.write_bytes(content[:-1] + b"x")
    with book(path) as ledger:
        assert ledger.rounds == 2
    assert len(sizes) == 4


def test_lines_cannot_be_taken_out_moved_or_doubled(path, three_rounds):
    content, _ = three_rounds
    header, one, two, three = content.splitlines(keepends=True)
    for lines in (
        [header, two, three],
        [header, one, three],
        [header, two, one, three],
        [header, one, one],
        [one],
    ):
        path.write_bytes(b"".join(lines))
        with pytest.raises(SilodpError, match="damaged"):
            book(path)


def test_a_line_of_another_book_is_refused(path, tmp_path, three_rounds):
    content, _ = three_rounds
    other = tmp_path / "other.jsonl"
    with book(other, run="b") as ledger:
        ledger.charge(0, 0, {"released": Gaussian(100.0)})
    path.write_bytes(content.splitlines(keepends=True)[0] + other.read_bytes().splitlines(keepends=True)[1])
    with pytest.raises(SilodpError, match="damaged in line 2"):
        book(path)


@pytest.mark.parametrize(
    "content", [b"learning_rate = 0.1", b"learning_rate = 0.1\n", b'{"format":1}\n', b"\n"]
)
def test_a_file_that_is_not_a_ledger_is_left_alone(path, content):
    path.write_bytes(content)
    with pytest.raises(SilodpError, match=r"not a ledger|damaged"):
        book(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "b"},
        {"delta": 1e-6},
        {"accountant": "rdp"},
        {"budget": Budget(2.0, 1e-5)},
    ],
)
def test_a_foreign_book_is_refused(path, three_rounds, changes):
    with pytest.raises(SilodpError, match=f"begun with {next(iter(changes))} ="):
        book(path, **changes)
    assert path.read_bytes() == three_rounds[0]


def test_a_newer_format_is_refused(path, three_rounds):
    header = json.loads(three_rounds[0].splitlines()[0])
    del header["hash"], header["previous"]
    path.write_bytes(_append_log._line({**header, "format": FORMAT + 1}, ""))
    with pytest.raises(SilodpError, match=f"begun with format = {FORMAT + 1}"):
        book(path)


KILLED = """
import sys
from pathlib import Path
from silodp.accounting.events import Gaussian
from silodp.accounting.ledger import Ledger
with Ledger(Path(sys.argv[1]), 1e-5, "rdp", run="a") as ledger:
    for round in range(10**6):
        ledger.charge(round, 0, {"released": Gaussian(50.0)})
        print(round, flush=True)
"""


def test_a_process_really_killed(path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    with process:
        released = [process.stdout.readline() for _ in range(20)]
        with pytest.raises(SilodpError, match="in use by another process"):
            book(path, accountant="rdp")
        process.send_signal(signal.SIGKILL)
        released += process.stdout.readlines()
    last = int([line for line in released if line.endswith("\n")][-1])
    with book(path, accountant="rdp") as ledger:
        assert ledger.rounds >= last + 1
        assert ledger.epsilon("released") >= compute_epsilon([(Gaussian(50.0), last + 1)], DELTA, "rdp")


def test_a_charge_is_on_disk_when_it_returns(path, monkeypatch):
    """Every write is followed by an fsync of the same file, and the file's name is synced on opening."""
    deeds, real = [], {name: getattr(os, name) for name in ("write", "fsync")}

    def watched(name):
        def deed(file, *rest):
            deeds.append((name, str(Path(f"/proc/self/fd/{file}").readlink())))
            return real[name](file, *rest)

        return deed

    for name in real:
        monkeypatch.setattr(os, name, watched(name))
    ledger = book(path)
    assert ("fsync", str(path.parent)) in deeds
    for round in range(2):
        deeds.clear()
        ledger.charge(round, 0, COSTLY)
        assert deeds == [("write", str(path)), ("fsync", str(path))]
    deeds.clear()
    ledger.charge(1, 0, COSTLY)
    assert deeds == []
    ledger.close()
    # A line of a killed process is in the file but perhaps not on disk: it is synced before it counts.
    deeds.clear()
    with book(path):
        assert deeds[0] == ("fsync", str(path))


def test_a_write_that_fails_releases_nothing_and_stops_the_book(path, monkeypatch):
    ledger = book(path)
    ledger.charge(0, 0, COSTLY)
    real = os.write

    def full(file, data):
        real(file, bytes(data)[:30])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SilodpError, match="No space left"):
        ledger.charge(1, 0, COSTLY)
    monkeypatch.undo()
    assert not ledger.charged(1)
    with pytest.raises(SilodpError, match="open it again"):
        ledger.charge(1, 0, COSTLY)  # would land behind a torn line
    ledger.close()
    with book(path) as ledger:
        assert ledger.rounds == 1
        ledger.charge(1, 0, COSTLY)
    with book(path) as ledger:
        assert ledger.rounds == 2


def test_a_write_may_take_several_calls(path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, bytes(data)[:11]))
    with book(path) as ledger:
        ledger.charge(0, 0, COSTLY)
    monkeypatch.undo()
    with book(path) as ledger:
        assert ledger.rounds == 1


# One charge for one release


def test_charging_is_idempotent_by_round_and_release(path):
    with book(path) as ledger:
        ledger.charge(0, 0, COSTLY)
        size, once = path.stat().st_size, ledger.epsilon("released")
        ledger.charge(0, 0, dict(COSTLY))
        assert (path.stat().st_size, ledger.epsilon("released")) == (size, once)
        with pytest.raises(SilodpError, match="release 1 of round 1 is in the ledger"):
            ledger.charge(0, 0, {**COSTLY, "released": Gaussian(9.0)})
        assert path.stat().st_size == size
        ledger.charge(0, 1, {**COSTLY, "released": Gaussian(9.0)})
        assert ledger.epsilon("released") > once
    with book(path) as ledger:
        with pytest.raises(SilodpError, match="release 2 of round 1 is in the ledger"):
            ledger.charge(0, 1, COSTLY)
        ledger.charge(0, 0, COSTLY)
        assert len(ledger.history) == 2
        ledger.charge(1, 0, COSTLY)
        ledger.charge(2, 0, COSTLY)
        assert ledger.to_counts().releases == [
            (TRAINING, 0, (0,)),
            (TRAINING, 1, (0,)),
            (TRAINING, 0, (1, 2)),
        ]


def test_rounds_that_cost_the_same_take_little_memory(path):
    grown = []
    with book(path) as ledger:
        for _ in range(2):
            for round_ in range(200):
                ledger.charge(len(grown) * 200 + round_, 0, dict(COSTLY))
            grown.append(sys.getallocatedblocks())
    # An entry and its key; with the line of the file it is 18.
    assert (grown[1] - grown[0]) / 200 < 12


def test_every_adversary_is_charged_every_time():
    ledger = book(None)
    ledger.charge(0, 0, COSTLY)
    with pytest.raises(SilodpError, match="same adversaries"):
        ledger.charge(1, 0, {"released": COSTLY["released"]})
    for events in ({}, {"nobody": Gaussian(1.0)}):
        with pytest.raises(SilodpError, match="adversaries among"):
            book(None).charge(0, 0, events)
    assert ledger.rounds == 1


def test_an_event_out_of_range_is_not_written(path):
    with book(path) as ledger:
        size = path.stat().st_size
        for event in (Gaussian(-1.0), Gaussian(math.nan), PoissonSampled(2.0, Gaussian(1.0))):
            with pytest.raises(SilodpError):
                ledger.charge(0, 0, {"released": event})
        assert path.stat().st_size == size


# The budget


def test_the_budget_stops_a_run_at_the_last_round_that_fits():
    budget = Budget(3.0, 1e-6, "silo")
    events = {"released": Gaussian(50.0), "silo": PoissonSampled(0.3, Gaussian(2.0))}
    ledger = book(None, budget=budget)
    while ledger.affords(events):
        ledger.charge(ledger.rounds, 0, events)
    charges = ledger.rounds
    assert charges > 1
    assert (
        compute_epsilon([(events["silo"], charges)], 1e-6)
        <= 3.0
        < compute_epsilon([(events["silo"], charges + 1)], 1e-6)
    )
    assert ledger.epsilon("silo", 1e-6) <= 3.0
    assert not ledger.affords({**events, "silo": Gaussian(0.0)})


def test_without_a_budget_everything_is_afforded():
    assert book(None).affords({"released": NonPrivate("no noise")})


def test_a_budget_cannot_be_kept_where_nothing_is_promised():
    ledger = book(None, budget=Budget(3.0, 1e-5, "server"))
    with pytest.raises(SilodpError, match=r"'server'.*counts disclosed"):
        ledger.affords(COSTLY)
    ledger.charge(0, 0, COSTLY)
    with pytest.raises(SilodpError, match=r"'server'.*counts disclosed"):
        ledger.affords({**COSTLY, "server": Gaussian(5.0)})
    with pytest.raises(SilodpError, match="no event"):
        ledger.affords({"released": Gaussian(5.0)})


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ((0.0, 1e-5), "budget.epsilon"),
        ((math.inf, 1e-5), "budget.epsilon"),
        ((math.nan, 1e-5), "budget.epsilon"),
        ((1.0, 0.0), "delta"),
        ((1.0, 1e-5, "nobody"), "budget.adversary"),
    ],
)
def test_a_budget_is_checked(values, field):
    with pytest.raises(SilodpError, match=field):
        Budget(*values)


@pytest.mark.parametrize("wrong", ["1e-5", None, True, [1e-5]])
def test_a_budget_is_made_of_numbers(wrong):
    with pytest.raises(SilodpError, match=r"^budget\.epsilon = .*: set a number\.$"):
        Budget(wrong, 1e-5)
    for refused in (
        lambda: Budget(1.0, wrong),
        lambda: book(None, delta=wrong),
        lambda: compute_epsilon([], wrong),
    ):
        with pytest.raises(SilodpError, match=r"^delta = .*: set a number\.$"):
            refused()


# One process at a time


def test_two_books_on_one_file_are_refused(path):
    with book(path), pytest.raises(SilodpError, match="in use by another process"):
        book(path)
    book(path).close()


def test_a_closed_book_takes_no_charges(path):
    ledger = book(path)
    ledger.close()
    with pytest.raises(SilodpError, match="closed"):
        ledger.charge(0, 0, COSTLY)
    assert ledger.rounds == 0


def _sleep():
    time.sleep(60)


def test_a_forked_worker_does_not_keep_the_lock(path):
    ledger = book(path)
    worker = multiprocessing.get_context("fork").Process(target=_sleep)
    worker.start()
    try:
        ledger.close()
        deadline = time.monotonic() + 10
        while True:  # the worker lets go as soon as it runs
            try:
                book(path).close()
                break
            except SilodpError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        worker.kill()
        worker.join()


def test_a_path_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(SilodpError, match=r"nowhere.*No such file"):
        book(tmp_path / "nowhere" / "ledger.jsonl")


# Events as JSON

multipliers = st.floats(0, math.inf)
gaussians = st.builds(Gaussian, multipliers)
mechanisms = st.one_of(
    gaussians,
    st.builds(PoissonSampled, st.floats(0, 1), gaussians),
    st.builds(RevealedSample, st.floats(0, 1), gaussians),
    st.builds(Group, st.integers(0, 100), st.builds(PoissonSampled, st.floats(0, 1), gaussians)),
)
any_event = st.one_of(
    mechanisms, st.builds(SelfComposed, mechanisms, st.integers(0, 10**6)), st.builds(NonPrivate, st.text())
)


@given(any_event)
def test_events_survive_json(event):
    assert event_from_dict(json.loads(json.dumps(event_to_dict(event), allow_nan=False))) == event


@pytest.mark.parametrize(
    "fields", [{}, {"kind": "Magic"}, {"kind": "Gaussian"}, {"kind": "Gaussian", "sigma": 1}]
)
def test_what_is_not_an_event_is_refused(fields):
    with pytest.raises(SilodpError, match="not an event"):
        event_from_dict(fields)
