"""`make release-check` refuses what must not be published, and the workflow of a fork has a job for every package."""

from __future__ import annotations

import io
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.places import ROOT
from support.scripts import load_script

PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
AUDIT = PROJECTS["silodp-audit"]
ABOUT = f"silodp_audit-{AUDIT['version']}.dist-info"
TRACKED = {"LICENSE", "README.md", "pyproject.toml", "src/silodp_audit/py.typed", "tests/test_it.py"}


release = load_script("packaging/release_check.py")


def make_wheel(**changed: bytes | None) -> dict[str, bytes]:
    """Return the files of a wheel; an entry that is None is left out."""
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in parts.items())
        for group, parts in AUDIT["entry-points"].items()
    )
    files = {
        "silodp_audit/py.typed": b"",
        f"{ABOUT}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
        f"{ABOUT}/entry_points.txt": points.encode(),
    }
    return {name: content for name, content in (files | changed).items() if content is not None}


def check_wheel(files: dict[str, bytes]) -> None:
    release.check_wheel("a wheel", files, TRACKED, AUDIT)


def test_a_whole_wheel_passes() -> None:
    check_wheel(make_wheel())


@pytest.mark.parametrize(
    "changed",
    [
        {"silodp_audit/py.typed": None},
        {"silodp_audit/more.py": b""},
        {f"{ABOUT}/licenses/LICENSE": None},
        {f"{ABOUT}/licenses/LICENSE": b"another one"},
        {f"{ABOUT}/entry_points.txt": None},
        {f"{ABOUT}/entry_points.txt": b"[silodp.commands]\nattack = silodp_audit.cli.attack:attack\n"},
    ],
    ids=str,
)
def test_a_wheel_that_lacks_a_part_or_has_one_more_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(release.Refused):
        check_wheel(make_wheel(**changed))


def test_a_source_archive_has_what_the_commit_has() -> None:
    files = dict.fromkeys(
        TRACKED - {"tests/test_it.py"} | {"PKG-INFO", "src/silodp_audit.egg-info/SOURCES.txt"}, b""
    )
    release.check_source("an archive", files, TRACKED)
    for wrong in (
        files | {"src/silodp_audit/notes.py": b""},
        {key: files[key] for key in files.keys() - {"LICENSE"}},
    ):
        with pytest.raises(release.Refused):
            release.check_source("an archive", wrong, TRACKED)


@pytest.mark.parametrize(
    "path",
    [
        "rows.csv",
        "a/identity.key",
        "a/ca.pem",
        "run/model.safetensors",
        "run/metrics.jsonl",
        "a/__pycache__/b.pyc",
        ".env",
    ],
)
def test_data_keys_results_and_caches_are_refused(path: str) -> None:
    release.check_files("an archive", {"a/b.py": b"import torch\n", "LICENSE": b"", "a/py.typed": b""})
    with pytest.raises(release.Refused, match=re.escape(path)):
        release.check_files("an archive", {path: b""})


@pytest.mark.parametrize(
    "content",
    [
        b"-----BEGIN PRIVATE KEY-----\n",
        b"-----BEGIN EC PRIVATE KEY-----\n",
        b'place = "/home/ann/silodp"\n',
        b'place = "C:\\\\Users\\\\ann"\n',
        bytes(ROOT) + b"/packages",
    ],
)
def test_private_keys_and_paths_of_machines_are_refused(content: bytes) -> None:
    with pytest.raises(release.Refused):
        release.check_files("an archive", {"a/b.py": b"# " + content})


def write_archive(path: Path, names: list[str], mtime: int, owner: str) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uname, member.mode = len(name), mtime, owner, 0o600 + mtime % 8
            archive.addfile(member, io.BytesIO(name.encode()))


def test_source_archives_do_not_depend_on_who_builds_them(tmp_path: Path) -> None:
    one, other = tmp_path / "one.tar.gz", tmp_path / "other.tar.gz"
    write_archive(one, ["p/a.py", "p/b.py"], 1, "ann")
    write_archive(other, ["p/b.py", "p/a.py"], 2, "bob")
    assert one.read_bytes() != other.read_bytes()
    for path in (one, other):
        release.normalize_archive(path, 1_700_000_000)
    assert one.read_bytes() == other.read_bytes()
    assert release.read_archive(one) == {"a.py": b"p/a.py", "b.py": b"p/b.py"}


def test_a_link_in_an_archive_is_refused(tmp_path: Path) -> None:
    member = tarfile.TarInfo("p/a.py")
    member.type, member.linkname = tarfile.SYMTYPE, "elsewhere"
    with tarfile.open(tmp_path / "one.tar.gz", "w:gz") as archive:
        archive.addfile(member)
    with pytest.raises(release.Refused):
        release.read_archive(tmp_path / "one.tar.gz")


def test_an_interpreter_that_is_missing_is_an_error_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is there but does not start, or is of another version, is missing, too."""
    for version, says in {"3.11": "echo 3.11", "3.12": "exit 127", "3.13": "echo 3.11"}.items():
        path = tmp_path / f"python{version}"
        path.write_text(f"#!/bin/sh\n{says}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert release.find_pythons(["3.11"], []) == {"3.11": tmp_path / "python3.11"}
    for version in ("3.12", "3.13", "3.14"):
        with pytest.raises(release.Refused, match=version):
            release.find_pythons(["3.11", version], ["3.9"])
        assert list(release.find_pythons(["3.11", version], [version])) == ["3.11"]
        assert f"Python {version}: NO INTERPRETER" in capsys.readouterr().out
        with pytest.raises(release.Refused):
            release.find_pythons([version], [version])


def test_the_packages_name_the_same_pythons_and_have_the_license() -> None:
    for name, project in PROJECTS.items():
        oldest, newest = release.name_pythons(project)
        assert project["requires-python"] == f">={oldest}"
        assert (oldest, newest) == ("3.11", "3.13")
        assert (ROOT / "packages" / name / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_workflow_has_a_job_for_every_package_and_may_only_read() -> None:
    text = (ROOT / ".github" / "workflows" / "checks.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["jobs"]["package"]["strategy"]["matrix"]["package"] == list(PROJECTS)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("permissions" not in job for job in workflow["jobs"].values())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(re.search(r"@v\d+\.\d+\.\d+$", step["uses"]) for step in steps if "uses" in step)
    assert "secrets." not in text
    for version in release.name_pythons(PROJECTS["silodp"]):
        assert version in workflow["jobs"]["release-check"]["steps"][1]["with"]["python-version"].split()
