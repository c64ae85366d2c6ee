"""However a command fails: a sentence, a stable code, an exit status, and a JSON object where asked for."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from silodp.cli._console import UNEXPECTED, describe_failure
from silodp.errors import CODES, SilodpError, list_codes
from silodp.settings import Range, Whole
from silodp.text import shorten
from support.commands import CONFIG, Silodp, assert_sentence
from support.places import SOURCES

ROOT = Path(__file__).parents[2]

# --- codes --------------------------------------------------------------------------------------------------


def test_the_documented_codes_are_all_codes_and_no_others() -> None:
    assert (ROOT / "docs" / "errors.md").read_text(encoding="utf-8") == list_codes(), "run: make errors"
    for code in CODES:
        assert f"| `{code}` | {CODES[code]} |" in list_codes()
    assert list(CODES) == sorted(CODES)


@pytest.mark.parametrize(
    ("arguments", "code", "field"),
    [
        ("run nowhere.toml", "config.path", None),
        ("run small.toml --set method.clip=x", "config.value", "method.clip"),
        ("run small.toml --set nothing", "cli.usage", "--set"),
        ("run small.toml --set seed=18446744073709551616", "config.too_large", "seed"),
        ("run small.toml --set data.seed=-1", "argument.value", "data.seed"),
        ("run small.toml --set method.noise_multiplier=1e300", "argument.out_of_range", "noise_multiplier"),
        ("run small.toml --set method.user_sampling=1e-320", "argument.out_of_range", "user_sampling"),
        ("run small.toml --set method.local.learning_rate=1e300", "argument.out_of_range", "learning_rate"),
        ("run small.toml --set name=2020-01-01", "config.type", "name"),
        ("run small.toml --set 'task.model=\"a\\u0000\"'", "config.type", "task.model"),
        (
            "epsilon --method uldp-avg --noise-multiplier 1e300 --rounds 3",
            "argument.out_of_range",
            "noise_multiplier",
        ),
        ("epsilon --method uldp-avg --noise-multiplier five --rounds 3", "cli.usage", "--noise-multiplier"),
        ("epsilon --rounds 3", "cli.usage", "--method"),
        ("epsilon --method uldp-avg --rounds 3 --set clip", "cli.usage", "--set"),
        ("run", "cli.usage", "CONFIG.toml"),
        ("data check", "cli.usage", "NAME"),
        ("run small.toml --out out --resume", "run.nothing_to_resume", "out"),
        ("bogus", "cli.usage", None),
        ("report nowhere", "report.missing", None),
    ],
)
def test_by_json_an_error_is_one_object_on_standard_output(
    silodp: Silodp, config: Path, arguments: str, code: str, field: str | None
) -> None:
    told = silodp(*shlex.split(arguments), "--json")
    assert_sentence(told, code=code)
    assert told.json["error"]["field"] == field
    plain = silodp(*shlex.split(arguments))
    assert (plain.out, plain.err) == ("", told.err)  # a reader of either output misses nothing
    assert {path.name for path in Path().iterdir()} == {"small.toml"}


def test_an_argument_with_a_nul_is_refused(silodp: Silodp, config: Path) -> None:
    assert_sentence(silodp("run", config, "--out", "a\0b"), code="cli.usage")


def test_an_error_that_nobody_expected_is_told_in_a_sentence_with_its_traceback_in_a_file(
    silodp: Silodp, config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a" * 10_000 + "\n")

    monkeypatch.setattr("silodp.cli.run.run", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = silodp("run", config, "--json")
    assert (told.status, told.json["error"]["code"]) == (UNEXPECTED, "cli.unexpected")
    assert len(told.err.splitlines()) == 1
    assert len(told.err) < 1000
    (kept,) = tmp_path.glob("silodp-traceback-*.txt")
    assert str(kept) in told.err
    assert "in broken" in kept.read_text()
    monkeypatch.undo()
    assert describe_failure(MemoryError()).code == "cli.memory"
    assert (
        describe_failure(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")).code
        == "cli.memory"
    )


def test_a_file_of_another_user_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most frequent mistake in a container, where the user of the image must own the folders."""
    monkeypatch.setattr("os.geteuid", lambda: 10_001)
    error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "server" / "identity.key"))
    told = describe_failure(error).sentence
    assert f"of user {tmp_path.stat().st_uid}, while this is user 10001" in told
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid)
    assert "of user" not in describe_failure(error).sentence


def test_numbers_are_checked_before_anything_computes_with_them() -> None:
    for good in (0, -0.0, 1e-50, -1e38, float("inf"), float("nan"), 10**9):
        Range().check("x", good)
    for bad in (1e39, -1e39, 1e-51, 5e-324, 10**400):
        with pytest.raises(SilodpError) as caught:
            Range().check("x", bad)
        assert (caught.value.code, caught.value.field) == ("argument.out_of_range", "x")
    for bad in (True, "1", None, [1]):
        with pytest.raises(SilodpError, match="set a number"):
            Range().check("x", bad)
    Whole().check("x", 10**9)
    for bad, code in (
        (10**9 + 1, "argument.out_of_range"),
        (0, "argument.value"),
        (1.0, "argument.value"),
        (True, "argument.value"),
    ):
        with pytest.raises(SilodpError) as caught:
            Whole().check("x", bad)
        assert caught.value.code == code
    assert len(shorten("a" * 10**6)) < 150
    assert len(shorten(10**5000)) < 150


# --- files --------------------------------------------------------------------------------------------------


class FullDisk:
    """From the n-th write on, every write to a file below a folder says that the disk is full."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 10**9
        self.folder = str(folder)
        real_open, real_write = io.open, os.write
        disk = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                disk.count()
                return super().write(data)

        def opened(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            if "r" in mode or not str(file).startswith(disk.folder):
                return real_open(file, mode, *arguments, **named)
            raw = File(file, mode.replace("b", "").replace("t", ""))
            buffered = io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

        def write(descriptor: int, data: Any) -> int:
            if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(disk.folder):
                disk.count()
            return real_write(descriptor, data)

        monkeypatch.setattr(io, "open", opened)
        monkeypatch.setattr(builtins, "open", opened)
        monkeypatch.setattr(os, "write", write)

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write(2): it knows no file name


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stride", [24, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_is_named_with_the_file_wherever_it_fills_up(
    silodp: Silodp, config: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    """The disk fills at every n-th write of a run; then there is room again, and the run goes on to the same end."""
    folder = Path("runs").resolve()
    disk = FullDisk(folder, monkeypatch)
    assert silodp("run", config, "--out", folder / "whole").status == 0
    expected = json.loads((folder / "whole" / "guarantee.json").read_text())["guarantees"]
    named = set()
    writes = 0
    while True:
        disk.left = writes
        out = folder / str(writes)
        told = silodp("run", config, "--out", out, "--json")
        disk.left = 10**9
        if told.status == 0:
            break
        assert told.status == 2
        error = told.json["error"]
        # A silo with a full disk gives no answer; the server, which asked it, passes on why.
        full = "No space left on device" if "silo '" in error["message"] else "the disk is full"
        assert error["code"] == "run.disk_full" or full in error["message"], error
        named |= {
            name for name in (path.name for path in folder.rglob("*")) if f"/{name} " in error["message"]
        }
        assert str(out) in error["message"]
        begun = (out / "checkpoint" / "state.safetensors").exists()
        again = silodp("run", config, "--out", out, *(["--resume"] if begun else []))
        assert again.status == 0, again.err
        found = json.loads((out / "guarantee.json").read_text())["guarantees"]
        assert found == expected
        writes += stride
    assert writes > 20
    assert stride > 1 or named >= {"ledger.jsonl", "metrics.jsonl", "report.html", "epsilon.svg"}


def test_a_result_that_nobody_can_take_is_no_traceback(config: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": SOURCES, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-m", "silodp.cli.main"]
    question = ["epsilon", "--method", "uldp-avg", "--noise-multiplier", "5", "--rounds", "3"]
    listed = ["data", "list"]  # imports little
    with Path("/dev/full").open("w") as full:
        told = subprocess.run(
            [*command, *listed, "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            check=False,
        )
    assert told.returncode == 2
    assert told.stderr.startswith("error: standard output cannot be written: the disk or your quota is full")
    assert told.stderr.count("\n") == 1
    reader, writer = os.pipe()
    os.close(reader)
    told = subprocess.run(
        [*command, *listed], stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    os.close(writer)
    assert (told.returncode, told.stderr) == (1, "")  # whoever read it has gone, as `head` does
    latin = {**environment, "PYTHONIOENCODING": "latin-1"}  # which has no ε
    told = subprocess.run([*command, *question], capture_output=True, env=latin, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith(b"\\u03b5 = ")


ENVIRONMENT = {**os.environ, "PYTHONPATH": SOURCES, "PYTHONUNBUFFERED": ""}
FAILING = """
import os, sys
from silodp.cli.main import main
import silodp.report.page  # once for all
folder, *kinds = sys.argv[1:]
for stream in (1, 2):
    for kind in kinds:
        if not (child := os.fork()):
            name = f"{folder}/{stream} {kind}"
            if kind == "unread":
                reader, target = os.pipe()
                os.close(reader)
            else:
                path, mode = {"full": ("/dev/full", os.O_WRONLY), "for reading": (os.devnull, os.O_RDONLY)}[kind]
                target = os.open(path, mode)
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), 3 - stream)
            os.dup2(target, stream)
            main(["report", f"{folder}/none", "--json"])
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"{stream}/{kind}/{status}", flush=True)
"""


def assert_failure_was_told(stream: str, status: int, left: str) -> None:
    """What is left of two streams, one of which could not be written to."""
    assert status == 2, left
    if stream == "1":
        assert left.count("\n") == 1
        assert left.endswith("[report.missing]\n")
    else:
        assert json.loads(left)["error"]["code"] == "report.missing"


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_failure_is_told_by_its_status_where_a_stream_is_closed(tmp_path: Path, stream: str) -> None:
    """Service managers and cron close streams."""
    command = [sys.executable, "-m", "silodp.cli.main", "report", str(tmp_path / "none"), "--json"]
    closing = ["sh", "-c", f'exec "$@" {stream}>&-', "sh", *command]
    told = subprocess.run(closing, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert_failure_was_told(stream, told.returncode, told.stderr if stream == "1" else told.stdout)


@pytest.mark.slow
def test_a_failure_is_told_by_its_status_where_a_stream_cannot_be_written(tmp_path: Path) -> None:
    """They also lead them to a full disk. Every command is a fork, which ends as a command of its own does."""
    kinds = ("full", "for reading", "unread")
    command = [sys.executable, "-c", FAILING, str(tmp_path), *kinds]
    told = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    ended = [line.split("/") for line in told.stdout.splitlines()]
    assert [(stream, kind) for stream, kind, _ in ended] == [(s, kind) for s in "12" for kind in kinds]
    for stream, kind, status in ended:
        assert_failure_was_told(stream, int(status), (tmp_path / f"{stream} {kind}").read_text())


def test_a_file_does_not_take_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """Else what a library prints goes into the next file that is opened, for example the ledger."""
    code = (
        "import os\n"
        "from silodp.cli.main import app, main\n"
        "@app.command()\n"
        "def opened() -> None:\n"
        f"    os.write(os.open({str(tmp_path / 'kept')!r}, os.O_CREAT | os.O_WRONLY), b'kept')\n"
        "    os.write(1, b'printed')\n"
        "main(['opened'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert (tmp_path / "kept").read_text() == "kept"


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_no_traceback(config: Path) -> None:
    """The limit on the size of a file (`ulimit -f`) ends a write as a full disk does."""
    code = (
        "import resource\n"
        "from silodp.cli import main as cli\n"
        "import silodp.cli.run\n"  # whose libraries write larger files when they are imported
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        f"cli.main(['run', {str(config)!r}, '--out', 'limited'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert told.returncode == 2, told.stderr
    assert told.stderr.splitlines()[-1].endswith("[run.disk_full]")
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize("out", ["small.toml", "small.toml/below", "a" * 300])
def test_a_place_that_cannot_be_written_is_named(silodp: Silodp, config: Path, out: str) -> None:
    told = silodp("run", config, "--out", out)
    assert_sentence(told, out[:100], code="cli.file")


# --- the configuration as a file ----------------------------------------------------------------------------


def test_a_byte_order_mark_is_no_mistake(silodp: Silodp, config: Path) -> None:
    expected = silodp("plan", config, "--json").json
    config.write_bytes(b"\xef\xbb\xbf" + CONFIG.replace("\n", "\r\n").encode())
    assert silodp("plan", config, "--json").json == expected


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (CONFIG.encode("utf-16"), "config.not_toml"),
        (CONFIG.replace("small", "sm\xe4ll").encode("latin-1"), "config.not_toml"),
        (CONFIG.replace("clip = 0.1", "clip = 0,1").encode(), "config.not_toml"),
        (b"\0" * 100, "config.not_toml"),
        (b"x = " + b"[" * 100_000, "config.too_large"),
        (b"x = " + b"{a = " * 100_000, "config.too_large"),
        (b"a" + b".a" * 3000 + b" = 1\n" + CONFIG.encode(), "config.too_large"),
        (CONFIG.encode() + b"x = " + b"[" * 50 + b"]" * 50, "config.too_large"),
        (CONFIG.encode() + b"x = " + b"9" * 5000, "config.not_toml"),
        (CONFIG.encode() + b"x = " + b"9" * 20, "config.too_large"),
        (CONFIG.encode() + b"x = '" + b"a" * 200_000 + b"'", "config.too_large"),
        (b"#" * (5 << 20), "config.too_large"),
        (b"", "config.missing_field"),
    ],
)
def test_what_is_no_configuration(silodp: Silodp, config: Path, content: bytes, code: str) -> None:
    config.write_bytes(content)
    assert_sentence(silodp("plan", config, "--json"), code=code)


def test_an_override_that_is_too_deep_or_has_two_lines(silodp: Silodp, config: Path) -> None:
    for text in ("x=" + "[" * 20_000, "a" + ".a" * 5000 + "=1"):
        assert_sentence(silodp("plan", config, "--set", text), code="config.too_large")
    # The second line was passed over once.
    assert_sentence(silodp("plan", config, "--set", "rounds=3\nseed=4"), "rounds = ")


def test_what_cannot_be_read_is_named(silodp: Silodp, config: Path) -> None:
    for path in (Path("/proc/self/mem"), Path("small.toml/below"), Path("a" * 300)):
        assert_sentence(silodp("plan", path), str(path)[:100])
    told = silodp("plan", "/dev/zero")
    assert_sentence(told, code="config.too_large")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("compare small.toml --methods uldp-avg --epsilon 3", "method.noise_multiplier"),
        ("run small.toml --rounds 3", "--set"),
        ("epsilon --bogus 3", None),
    ],
)
def test_a_setting_given_as_an_option_is_told_its_place(
    silodp: Silodp, config: Path, arguments: str, hint: str | None
) -> None:
    refused = silodp(*arguments.split())
    assert_sentence(refused, *([] if hint is None else [hint]), code="cli.usage")
    assert hint is not None or "--set" not in refused.err
