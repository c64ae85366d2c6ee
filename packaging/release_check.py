"""Build all packages from the last commit, and try them as a user gets them: make release-check.

python packaging/release_check.py [TEST...]: each TEST is a file or folder of tests, in place of the fast ones below.

Into dist/ go the archives, an SBOM (CycloneDX) for each Python, and SHA256SUMS of all; into build/release/ what can be
deleted. The packages are installed into new environments for the oldest and the newest Python that their classifiers
name: with the versions of constraints.txt for the oldest, and with the newest versions that they allow for the newest.
One line is printed for each step. An interpreter that is missing is an error, unless ALLOW_MISSING lists its version.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping
from configparser import ConfigParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "release"
FAST = [
    f"packages/silodp/tests/unit/{folder}"
    for folder in ("accounting", "crypto", "mechanisms", "test_checks.py", "wire")
]
"""Of the core: what decides about privacy, without training."""
KINDS = {".html", ".jinja", ".md", ".py", ".toml", ".txt", ".typed"}
"""Files that packages have: anything else may be data, a key or a result."""
GENERATED = re.compile(r"PKG-INFO|setup\.cfg|src/\w+\.egg-info/[\w.-]+")
"""What the build adds to a source archive."""
INSTALLED = """
import importlib, pathlib, sys, sysconfig
def assert_installed(names):
    site = pathlib.Path(sysconfig.get_paths()["purelib"]).resolve()
    for name in names:
        place = pathlib.Path(importlib.import_module(name).__file__).resolve()
        assert place.is_relative_to(site), f"{name} is imported from {place}, not from {site}"
"""
"""A program of an environment: what it imports was installed there, and does not lie in a checkout."""
SECRET = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
MACHINE_PATH = re.compile(rb"(?<![\w./-])(/home/|/Users/|/root/|[A-Z]:\\+Users\\+)\w")


class Refused(Exception):
    """What is wrong with the release, in one sentence."""


# --- what is tried ---------------------------------------------------------------------------------------------------


def read_projects(root: Path) -> dict[str, dict[str, Any]]:
    """Return the table [project] of every package, by the name of the package."""
    paths = sorted(root.glob("packages/*/pyproject.toml"))
    return {path.parent.name: tomllib.loads(path.read_text())["project"] for path in paths}


def name_pythons(project: Mapping[str, Any]) -> list[str]:
    """Return the oldest and the newest Python that the classifiers of a package name, such as "3.11"."""
    named = re.findall(r"Python :: 3\.(\d+)\n", "\n".join([*project["classifiers"], ""]))
    return list(dict.fromkeys(f"3.{minor}" for minor in (min(map(int, named)), max(map(int, named)))))


def find_python(version: str) -> Path | None:
    """Return an interpreter of this version, on PATH or of pyenv, that starts and says that it has it."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = [folder / "bin" for folder in sorted(pyenv.glob(f"{version}.*"), reverse=True)]
    for path in (folder / f"python{version}" for folder in [*folders, *installed]):
        if path.is_file() and os.access(path, os.X_OK):
            # A file of pyenv is there for every version that is installed, and fails where it is not chosen.
            said = subprocess.run([path, "-c", "import sys; print(*sys.version_info[:2], sep='.')"],
                                  capture_output=True, text=True, check=False)  # fmt: skip
            if said.returncode == 0 and said.stdout.strip() == version:
                return path
    return None


def find_pythons(versions: Iterable[str], allowed: Iterable[str]) -> dict[str, Path]:
    """Return an interpreter for each version.

    Args:
        versions: Such as "3.11".
        allowed: The versions that may be missing.

    Raises:
        Refused: one is missing that may not be.
    """
    found = {version: find_python(version) for version in versions}
    missing = [version for version, path in found.items() if path is None]
    for version in missing:
        print(
            f"Python {version}: NO INTERPRETER (neither on PATH nor of pyenv): nothing is tried with it",
            flush=True,
        )
    if refused := sorted(set(missing) - set(allowed)):
        raise Refused(
            f"Python {', '.join(refused)} is missing; ALLOW_MISSING={' '.join(refused)} passes over it"
        )
    present = {version: path for version, path in found.items() if path is not None}
    if not present:
        raise Refused("no Python is left to try")
    return present


# --- archives --------------------------------------------------------------------------------------------------------


def normalize_archive(path: Path, epoch: int) -> None:
    """Rewrite a source archive without what depends on who builds it where: order, times, owners and modes."""
    content = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.pax_headers = {}
            member.mode = 0o755 if member.isdir() else 0o644
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with path.open("wb") as file, gzip.GzipFile("", "wb", mtime=epoch, fileobj=file) as packed:
        packed.write(content.getvalue())


def read_archive(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel or of a source archive, without the folder that holds all of the latter.

    Raises:
        Refused: it holds a link or another thing that is not a file.
    """
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                found[member.name.partition("/")[2]] = file.read()
            elif not member.isdir():
                raise Refused(f"{path.name} has {member.name}, which is not a file")
    return found


def check_content(name: str, path: str, content: bytes) -> None:
    """Refuse a file with a private key or with a path of a machine.

    Raises:
        Refused: with the name of the file.
    """
    if SECRET.search(content):
        raise Refused(f"{name} has a private key in {path}")
    own = [bytes(place) + b"/" for place in (ROOT, Path.home()) if place != Path("/")]
    if any(place in content for place in own) or MACHINE_PATH.search(content):
        raise Refused(f"{name} has a path of a machine in {path}")


def check_files(name: str, files: Mapping[str, bytes]) -> None:
    """Refuse files that are of no kind that a package has, and those that `check_content` refuses.

    Raises:
        Refused: with the name of the file.
    """
    for path, content in files.items():
        last = path.rsplit("/", 1)[-1]
        described = ".dist-info/" in path or GENERATED.fullmatch(path)
        # "_" before a name that is a suffix alone, as ".env" is.
        if not described and last != "LICENSE" and Path(f"_{last}").suffix not in KINDS:
            raise Refused(f"{name} has {path}: packages have no files of this kind")
        check_content(name, path, content)


def check_wheel(name: str, files: Mapping[str, bytes], tracked: set[str], project: Mapping[str, Any]) -> None:
    """Check that a wheel has every tracked file of the source and no other, its license, its marker and its parts.

    Args:
        name: The file name of the wheel.
        files: Its files.
        tracked: Those that the commit has in the folder of the package.
        project: The table [project] of the package.

    Raises:
        Refused: with what is missing or too much.
    """
    source = {path.removeprefix("src/") for path in tracked if path.startswith("src/")}
    packed = {path for path in files if ".dist-info/" not in path}
    if packed != source:
        raise Refused(f"{name} and the commit do not have the same files: {sorted(packed ^ source)[:5]}")
    module = project["name"].replace("-", "_")
    about = f"{module}-{project['version']}.dist-info"
    for path in (f"{module}/py.typed", f"{about}/licenses/LICENSE"):
        if path not in files:
            raise Refused(f"{name} lacks {path}")
    if files[f"{about}/licenses/LICENSE"] != (ROOT / "LICENSE").read_bytes():
        raise Refused(f"{name} has another LICENSE than the repository")
    stated = {**project.get("entry-points", {})}
    if "scripts" in project:
        stated["console_scripts"] = project["scripts"]
    parser = ConfigParser(delimiters="=", interpolation=None)
    parser.optionxform = str  # names keep their capitals
    parser.read_string(files.get(f"{about}/entry_points.txt", b"").decode())
    if {group: dict(parser[group]) for group in parser.sections()} != stated:
        raise Refused(f"{name} has other entry points than pyproject.toml")


def check_source(name: str, files: Mapping[str, bytes], tracked: set[str]) -> None:
    """Check that a source archive has what a wheel is built from, and nothing that the commit has not.

    Raises:
        Refused: with what is missing or too much.
    """
    added = {path for path in files if path not in tracked and not GENERATED.fullmatch(path)}
    needed = {path for path in tracked if path.startswith("src/")} | {
        "LICENSE",
        "README.md",
        "pyproject.toml",
    }
    if wrong := added | (needed - files.keys()):
        raise Refused(f"{name} and the commit do not have the same files: {sorted(wrong)[:5]}")


def digest_all(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a folder, in hexadecimal, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


# --- the steps -------------------------------------------------------------------------------------------------------


def take(title: str, step: Callable[..., str], *arguments: object) -> None:
    """Take a step, and print one line: what it is, what it says and how long it took."""
    print(f"{title}: ", end="", flush=True)
    begun = time.monotonic()
    said = step(*arguments)
    print(f"{said} ({time.monotonic() - begun:.0f} s)", flush=True)


def run(*arguments: object, cwd: Path = ROOT, log: str = "", **more: str) -> str:
    """Run a program, without this process's PYTHONPATH, and return what it prints.

    Args:
        arguments: The program and its arguments.
        cwd: The folder in which it runs.
        log: The file in build/release/ that is to have what it prints.
        more: Variables of the environment.

    Raises:
        Refused: it fails; with the end of what it prints.
    """
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    environment = {"OMP_NUM_THREADS": "1", **kept, **more}
    done = subprocess.run([str(one) for one in arguments], cwd=cwd, env=environment, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    if log:
        (WORK / log).write_text(done.stdout)
    if done.returncode:
        raise Refused(f"{' '.join(map(str, arguments))[:300]} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def export_commit(folder: Path) -> None:
    """Write the files of the last commit, with its time and the modes 644 and 755, into an empty folder."""
    folder.mkdir(parents=True)
    packed = WORK / "commit.tar"
    run("git", "-c", "tar.umask=022", "archive", "--output", packed, "HEAD")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="tar")


def make_tools(python: Path, tools: Path, commit: Path) -> str:
    """Make the environment of the interpreter `tools`, which builds, installs and lists."""
    run(python, "-m", "venv", tools.parents[1])
    wanted = ("build", "cyclonedx-bom", "pip", "setuptools")
    constraints = ("--constraint", commit / "constraints-release.txt")
    run(tools, "-m", "pip", "install", "--quiet", "--upgrade", *constraints, *wanted)
    return ", ".join(wanted)


def install(tools: Path, python: Path, *arguments: object) -> None:
    """Install into an environment, which has no pip of its own: its SBOM lists what the program needs, and no more."""
    run(
        tools,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *arguments,
    )


def build_all(tools: Path, commit: Path, into: Path, epoch: int) -> str:
    """Build the archives of all packages, each wheel from its source archive."""
    into.mkdir(parents=True)
    for package, project in read_projects(commit).items():
        build = (tools, "-m", "build", "--no-isolation", "--outdir", into)
        run(*build, "--sdist", commit / "packages" / package, SOURCE_DATE_EPOCH=str(epoch))
        stem = f"{package.replace('-', '_')}-{project['version']}"
        normalize_archive(into / f"{stem}.tar.gz", epoch)
        with tarfile.open(into / f"{stem}.tar.gz") as archive:
            archive.extractall(commit / "unpacked", filter="tar")
        run(*build, "--wheel", commit / "unpacked" / stem, SOURCE_DATE_EPOCH=str(epoch))
    return f"{len(list(into.iterdir()))} archives"


def build_again(tools: Path, commit: Path, epoch: int) -> str:
    """Build another copy of the commit, and compare."""
    folder = commit.with_name("dist")
    build_all(tools, commit, folder, epoch)
    one, other = digest_all(DIST), digest_all(folder)
    if different := sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name)):
        raise Refused(f"two builds differ: {', '.join(different)}")
    return f"{len(one)} archives"


def check_archives(commit: Path) -> str:
    """Check every archive in dist/."""
    projects = read_projects(commit)
    for package, project in projects.items():
        tracked = set(
            run("git", "ls-tree", "-r", "--name-only", "HEAD", cwd=ROOT / "packages" / package).split("\n")[
                :-1
            ]
        )
        stem = f"{package.replace('-', '_')}-{project['version']}"
        wheel, source = f"{stem}-py3-none-any.whl", f"{stem}.tar.gz"
        for name in (wheel, source):
            check_files(name, read_archive(DIST / name))
        check_wheel(wheel, read_archive(DIST / wheel), tracked, project)
        check_source(source, read_archive(DIST / source), tracked)
    expected = 2 * len(projects)
    if (found := len(list(DIST.iterdir()))) != expected:
        raise Refused(
            f"dist/ has {found} files, not a wheel and a source archive of {len(projects)} packages"
        )
    return f"{expected} archives"


def install_release(tools: Path, python: Path, commit: Path, pinned: Iterable[object]) -> str:
    """Install what the packages need from the configured index, and the packages from dist/ alone.

    Args:
        tools: The interpreter with pip.
        python: That of the environment.
        commit: The folder with the files of the commit.
        pinned: Options of pip that pin versions.
    """
    projects = read_projects(commit)
    asked = {
        one
        for project in projects.values()
        for one in project["dependencies"]
        if not one.startswith("silodp")
    }
    install(tools, python, *pinned, *sorted(asked))
    version = projects["silodp"]["version"]
    install(tools, python, "--no-index", "--find-links", DIST, f"silodp[all]=={version}")
    run(tools, "-m", "pip", "--python", python, "check")
    modules = [name.replace("-", "_") for name in projects]
    run(python, "-P", "-c", f"{INSTALLED}\nassert_installed({modules})", cwd=WORK)
    said = run(python.with_name("silodp"), "--version", cwd=WORK).strip()
    if version not in said:
        raise Refused(f"silodp --version prints {said!r}, not {version}")
    return f"{len(modules)} packages in site-packages"


def train_demo(python: Path) -> str:
    """Train the demo in an empty folder."""
    folder = python.parents[1] / "demo"
    folder.mkdir()
    run(python.with_name("silodp"), "demo", "--out", "run", cwd=folder)
    if not (folder / "run" / "report.html").is_file():
        raise Refused("silodp demo has written no report")
    return "report written"


def list_parts(tools: Path, python: Path, commit: Path, path: Path, epoch: int) -> str:
    """Write the SBOM of an environment, before the tools of the tests are installed there."""
    run(
        tools.with_name("cyclonedx-py"),
        *("environment", "--output-reproducible", "--pyproject", commit / "packages/silodp/pyproject.toml"),
        *("--output-file", path, python),
        SOURCE_DATE_EPOCH=str(epoch),
    )
    check_content(DIST.name, path.name, path.read_bytes())
    listed = json.loads(path.read_text())
    parts = {
        part["name"]: part["version"] for part in (listed["metadata"]["component"], *listed["components"])
    }
    for name, project in read_projects(commit).items():
        if parts.get(name) != project["version"]:
            raise Refused(f"{path.name} does not list {name} {project['version']}")
    return f"{path.name}, {len(parts)} parts"


def run_tests(tools: Path, python: Path, commit: Path, pinned: Iterable[object], tests: list[str]) -> str:
    """Run tests with the installed packages, in a copy of the commit that lacks the source of these."""
    folder = python.parents[1] / "tests"
    shutil.copytree(commit, folder, ignore=lambda place, names: {"src"} & set(names))
    install(tools, python, *pinned, "--requirement", commit / "requirements" / "test.txt")
    code = f"{INSTALLED}\nassert_installed(['silodp'])\nimport pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    said = run(
        python,
        "-P",
        "-c",
        code,
        "-p",
        "no:cacheprovider",
        *tests,
        cwd=folder,
        log=f"{folder.parent.name}-tests.log",
    )
    last = said.strip().splitlines()[-1]
    # No test is as bad as one that fails.
    if not re.search(r"\b\d+ passed", last):
        raise Refused(f"no test has run: {last}")
    return last.strip("= ")


def check_release(tests: list[str], allowed: list[str]) -> None:
    """Take all steps, and print a line for each.

    Args:
        tests: Files or folders of tests.
        allowed: Versions of Python that may be missing.

    Raises:
        Refused: what is wrong with the release.
    """
    if changed := run("git", "status", "--porcelain"):
        raise Refused(f"commit first, since the last commit is what is built; not committed:\n{changed}")
    oldest, *_ = versions = name_pythons(read_projects(ROOT)["silodp"])
    pythons = find_pythons(versions, allowed)
    epoch = int(run("git", "log", "-1", "--format=%ct"))
    for folder in (DIST, WORK):
        shutil.rmtree(folder, ignore_errors=True)
    # Paths of two lengths, which a build must not depend on.
    commit, again = WORK / "commit", WORK / "once-more" / "commit"
    for folder in (commit, again):
        export_commit(folder)
    head = run("git", "rev-parse", "--short=12", "HEAD").strip()
    tools = WORK / "tools" / "bin" / "python"
    take("tools", make_tools, next(iter(pythons.values())), tools, commit)
    take(f"build the commit {head}", build_all, tools, commit, DIST, epoch)
    first = digest_all(DIST)
    take("what is in the archives", check_archives, commit)
    take("build elsewhere, with the same digests", build_again, tools, again, epoch)
    for version, interpreter in pythons.items():
        python, title = WORK / f"python{version}" / "bin" / "python", f"Python {version}: "
        pinned = ("--constraint", commit / "constraints.txt") if version == oldest else ()
        run(interpreter, "-m", "venv", "--without-pip", python.parents[1])
        take(f"{title}install into a new environment", install_release, tools, python, commit, pinned)
        take(f"{title}silodp demo", train_demo, python)
        take(
            f"{title}SBOM",
            list_parts,
            tools,
            python,
            commit,
            DIST / f"silodp-python{version}.cdx.json",
            epoch,
        )
        take(f"{title}tests of what is installed", run_tests, tools, python, commit, pinned, tests)
    sums = digest_all(DIST)
    if any(sums[name] != value for name, value in first.items()):
        raise Refused("an archive was changed after it was built")
    (DIST / "SHA256SUMS").write_text("".join(f"{value}  {name}\n" for name, value in sums.items()))
    print(f"dist/: {len(sums)} files and SHA256SUMS; tried with Python {', '.join(pythons)}", flush=True)
    if missing := sorted(set(versions) - pythons.keys()):
        print(f"NOT TRIED with Python {', '.join(missing)}", flush=True)


def main() -> None:
    """Check the release, and end with status 1 where it is refused."""
    try:
        check_release(sys.argv[1:] or FAST, os.environ.get("ALLOW_MISSING", "").replace(",", " ").split())
    except Refused as error:
        sys.exit(f"REFUSED: {error}")


if __name__ == "__main__":
    main()
