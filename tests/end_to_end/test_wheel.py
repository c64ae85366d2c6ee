"""The wheels have every file that the program needs: unpacked into an empty folder, they train the demo and report."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"


def run(*arguments: object, cwd: Path, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheels_have_all_files_and_train_the_demo(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    for package in sorted((ROOT / "packages").iterdir()):
        source = tmp_path / package.name
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "tests", "build")
        shutil.copytree(package, source, ignore=ignored)
        name = run("-c", BUILD, tmp_path, cwd=source).splitlines()[-1]
        with zipfile.ZipFile(tmp_path / name) as wheel:
            packed = {entry for entry in wheel.namelist() if ".dist-info/" not in entry}
            wheel.extractall(tmp_path / "installed")
        written = {
            path.relative_to(source / "src").as_posix()
            for path in (source / "src").glob("silodp*/**/*")
            if path.is_file() and ".egg-info" not in path.parts[-2]  # which the build writes
        }
        assert packed == written
    # -P and an empty folder: nothing of the checkout is imported.
    code = "import silodp, sys; from silodp.cli.main import main; print(silodp.__file__, file=sys.stderr); main()"
    empty = tmp_path / "empty"
    empty.mkdir()
    shown = run("-P", "-c", code, "demo", "--json", cwd=empty, PYTHONPATH=str(tmp_path / "installed"))
    assert '"rounds": 20' in shown
    assert (empty / "runs" / "demo" / "report.html").stat().st_size > 20_000
