"""The page of results says what the committed lines say, and the command behind a line gives that line again."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import results
import results_piece
from results import JOBS, PRINTED, TABLES
from results_job import Job, Table, stepped
from results_piece import Piece
from silodp.runtime.run_directory import RunDirectory
from silodp_integrations.workers import Workers

TINY = Job(
    "tiny",
    "tiny",
    "U=20",
    "heart_disease",
    {"source": "embedded", "users": 20, "silos": 2},
    2,
    {"ours": stepped(1.0, 5.0, "uniform")},
    1,
    seeds=2,
)


def test_pieces_are_run_once_and_a_lost_line_comes_back(tmp_path, monkeypatch, capsys):
    assert results.run_missing([TINY], tmp_path) == 0
    path = tmp_path / "tiny.jsonl"
    lines = path.read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [0, 1]
    assert all(len(line.encode()) <= 200 for line in lines)

    path.write_text(lines[0] + "\n")
    assert "1 finished   1 missing" in results.list_jobs([TINY], tmp_path)
    results.run_missing([TINY], tmp_path)
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line | {"seconds": 0} for line in again] == [json.loads(line) | {"seconds": 0} for line in lines]

    monkeypatch.setattr(results_piece, "run", lambda piece, out: pytest.fail(f"{piece} is finished"))
    capsys.readouterr()
    results.run_missing([TINY], tmp_path)
    assert capsys.readouterr().out == "nothing is missing\n"
    assert len(results.finished(TINY, tmp_path)) == 2
    changed = replace(TINY, methods={"ours": stepped(2.0, 5.0, "uniform")})
    assert results.finished(changed, tmp_path) == {}
    assert results.finished(replace(TINY, rounds=3), tmp_path) == {}


@pytest.mark.slow
def test_workers_write_the_same_lines(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(results_piece.ROOT / "benchmarks"))  # as of a script that lies there
    broken = replace(TINY, name="broken", task={"model": "cnn_mnist"})  # of images, for a table
    assert results.run_missing([TINY], tmp_path / "alone") == 0
    assert results.run_missing([broken, TINY], tmp_path / "workers", executor=Workers(2)) == 2
    alone, together = (
        {line["seed"]: line | {"seconds": 0} for line in results.read_lines(TINY, tmp_path / name)}
        for name in ("alone", "workers")
    )
    assert alone == together
    assert len(alone) == 2


def test_a_long_piece_continues_after_its_last_round(tmp_path, monkeypatch):
    whole = results_piece.run(Piece(TINY, "ours", 0))
    monkeypatch.setattr(results, "UNFINISHED", tmp_path / "unfinished")
    monkeypatch.setattr(results, "LONG_SECONDS", 0)
    save, saved = RunDirectory.save_state, []

    def stop_after_one_round(directory, content):
        save(directory, content)
        saved.append(content)
        if len(saved) == 2:  # the untrained model, and the first round
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "save_state", stop_after_one_round)
    with pytest.raises(KeyboardInterrupt):
        results.run_missing([TINY], tmp_path, seeds=1)
    monkeypatch.setattr(RunDirectory, "save_state", save)
    assert len(next((tmp_path / "unfinished").glob("*/0/metrics.jsonl")).read_text().splitlines()) == 2
    assert results.run_missing([TINY], tmp_path, seeds=1) == 0
    [line] = results.read_lines(TINY, tmp_path)
    assert line | {"seconds": 0} == whole | {"seconds": 0}
    assert not list((tmp_path / "unfinished").glob("*/*"))


def test_the_printed_command_gives_the_numbers_of_the_line(silodp, tmp_path, monkeypatch):
    piece = Piece(TINY, "ours", 1)
    line = results_piece.run(piece)
    monkeypatch.chdir(results_piece.ROOT)
    assert silodp(*shlex.split(piece.command())[1:], "--out", tmp_path / "run").status == 0
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [round(value, 4) for value in rows[-1]["metrics"].values()] == line["final"]
    assert [row["round"] for row in rows][-1] == line["rounds"] == 2
    assert line["epsilon"] == pytest.approx(
        [rows[-1]["epsilon"][a] for a in results_piece.ADVERSARIES], abs=1e-3
    )


def test_a_line_that_is_too_long_is_not_written(tmp_path):
    line = {"method": "m" * 160, "seed": 0, "final": [0.5], "id": "01234567"}
    with pytest.raises(ValueError, match="at most 200"):
        results.append(tmp_path / "long.jsonl", line)
    assert not list(tmp_path.iterdir())


def test_a_table_has_mean_and_spread_of_the_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "JOBS", [TINY])
    monkeypatch.setitem(results.TABLES, "tiny", Table(after=1, published={"others": {"U=20": ".7"}}))
    for seed, end in ((0, 0.8), (1, 0.9)):
        line = {"method": "ours", "seed": seed, "rounds": 2, "curve": [0.5, end - 0.1], "final": [end, 0.25]}
        line |= {"epsilon": [6.571, 6.571, None], "seconds": 2.0, "id": Piece(TINY, "ours", 0).id}
        results.append(tmp_path / "tiny.jsonl", line)
    page = "a\n<!-- table tiny -->\nold\n<!-- end -->\nb"
    assert results.write_tables(page, tmp_path).splitlines() == [
        "a",
        "<!-- table tiny -->",
        "",
        "| method | T | ε released / server / silo | U=20 | seeds | s a run |",
        "| --- | --- | --- | --- | --- | --- |",
        "| ours | 2 | 6.58 / 6.58 / none | .750 → .850 ± .071 / .250 ± .000 | 2 | 2 |",
        "| others | | | .7 | | |",
        "",
        "<!-- end -->",
        "b",
    ]


def test_the_page_shows_every_table_as_the_lines_have_it():
    page = results.PAGE.read_text(encoding="utf-8")
    for name in TABLES:
        assert page.count(f"<!-- table {name} -->") == 1
    assert results.write_tables(page) == page, "make results ARGS=--tables"


def test_committed_lines_are_pieces_of_the_job_list():
    jobs = {job.name: job for job in (*JOBS, *PRINTED)}
    assert len(jobs) == len(JOBS) + len(PRINTED)
    for path in results.LINES.glob("*.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert all(len(line.encode()) <= results.MOST_BYTES for line in lines)
        assert len(results.finished(jobs[path.stem])) == len(lines), (
            f"{path.name} has lines of other settings"
        )
