"""Units of systemd and the container file: they name commands that exist, and are closed where they can be."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import click
import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from silodp.cli.main import app

ROOT = Path(__file__).parents[5]
SYSTEMD = ROOT / "packaging" / "systemd"
UNITS = sorted(SYSTEMD.glob("*[!@].service"))
CONTAINER = ROOT / "packaging" / "Containerfile"
COMPOSE = ROOT / "packaging" / "compose.yaml"


def read_unit(path: Path) -> dict[str, dict[str, str]]:
    """Sections of a unit; of an option that is given twice, the last value."""
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return {name: dict(parser[name]) for name in parser.sections()}


def parse_command(arguments: list[str]) -> dict[str, object]:
    """What the real command line reads from arguments; nothing is executed."""
    command, rest = typer.main.get_command(app), arguments
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), rest[0])
        assert found is not None, rest[0]
        command, rest = found, rest[1:]
    return command.make_context(command.name, rest).params


def read_container() -> list[tuple[str, str]]:
    """Instructions of the container file."""
    text = re.sub(r"^#.*\n", "", CONTAINER.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(None, 1)[1]) for line in text.splitlines() if line]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_a_command_that_exists_and_is_closed(path: Path) -> None:
    service = read_unit(path)["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "silodp"
    assert Path(str(parse_command(arguments)["folder"])).parent == Path("/var/lib/silodp")
    assert service["ReadWritePaths"] == "/var/lib/silodp"
    assert service["User"] not in ("", "root")
    assert service["Restart"] == "on-failure"
    assert service["UMask"] == "0077"
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "ProtectKernelTunables", "RestrictSUIDSGID"):
        assert service[name] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert int(service["LimitNOFILE"]) >= 4096
    assert service["LimitCORE"] == "0"  # a core has the records and the keys
    for name in ("TasksMax", "LogRateLimitBurst", "LogRateLimitIntervalSec"):
        assert int(service[name]) > 0
    assert service["MemoryMax"].endswith("%")


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_accepts_a_unit_and_finds_little_exposed(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace("/opt/silodp/bin/silodp", sys.executable))
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert path.name not in verified.stderr, verified.stderr
    security = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)]
    found = subprocess.run(security, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout  # exposure of at most 2.0 of 10


def test_the_unit_that_looks_for_problems_runs_a_command_that_exists_and_tells_somebody() -> None:
    unit = read_unit(SYSTEMD / "silodp-check@.service")
    arguments = shlex.split(unit["Service"]["ExecStart"].replace("%i", "silo"))[1:]
    params = parse_command(arguments)
    assert (str(params["folder"]), params["is_check"]) == ("/var/lib/silodp/silo", True)
    alert = unit["Unit"]["OnFailure"].replace("%i.service", ".service")
    page = (ROOT / "docs" / "deployment_admin.md").read_text()
    assert alert in page  # the administrator writes it
    assert (SYSTEMD / "silodp-check@.timer").exists()
    if shutil.which("systemd-analyze") is not None:
        checked = subprocess.run(
            ["systemd-analyze", "verify", *map(str, sorted(SYSTEMD.glob("silodp-check@*")))],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Unknown" not in checked.stderr, checked.stderr


def test_both_roles_have_a_unit() -> None:
    assert [path.stem for path in UNITS] == ["silodp-server", "silodp-silo"]


def test_the_container_runs_a_command_that_exists_and_not_as_root() -> None:
    found = read_container()
    instructions = dict(found)
    assert json.loads(instructions["ENTRYPOINT"]) == ["silodp"]
    arguments = json.loads(instructions["CMD"])
    assert str(parse_command(arguments)["folder"]).startswith(instructions["VOLUME"])
    assert int(instructions["USER"]) > 0
    assert [name for name, _ in found].index("USER") < [name for name, _ in found].index("ENTRYPOINT")
    sources = instructions["COPY"].split()[:-1]
    assert (ROOT / sources[0]).exists()
    assert sources[1] == "dist/*.whl"
    assert "DO_NOT_TRACK=1" in instructions["ENV"]
    comments = [line.lstrip("# ") for line in CONTAINER.read_text().splitlines() if line.startswith("#")]
    (run,) = (line for line in comments if line.startswith("--volume"))
    parse_command(shlex.split(run.partition(" silodp ")[2]))
    page = (ROOT / "docs" / "deployment_admin.md").read_text()
    (shown,) = re.findall(r'^RUN="(docker run .*?)"$', page, flags=re.MULTILINE | re.DOTALL)
    for option, started in product(
        (
            "--read-only",
            "--cap-drop ALL",
            "--ulimit nofile=",
            "--pids-limit",
            "--log-opt max-size=",
        ),
        (" ".join(comments), shown),
    ):
        assert option in started


@pytest.mark.parametrize("name", yaml.safe_load(COMPOSE.read_text())["services"])
def test_a_party_of_the_compose_file_has_its_own_folder_and_reaches_the_server_alone(name: str) -> None:
    found = yaml.safe_load(COMPOSE.read_text())
    services, networks = found["services"], found["networks"]
    party = services[name]
    command = parse_command(party["command"])
    assert str(command["public"]) == "/var/lib/silodp/public"
    assert str(command["folder"]) == f"/var/lib/silodp/{name}"
    public, own = (volume.rpartition("}")[2] for volume in party["volumes"])
    assert public == "/public:/var/lib/silodp/public:ro"
    home = name if name == "server" else f"silos/{name}"
    assert own == f"/{home}:/var/lib/silodp/{name}"
    assert networks == {f"to-{other}": {"internal": True} for other in services if other != "server"}
    assert party["networks"] == (list(networks) if name == "server" else [f"to-{name}"])
    assert (party["read_only"], party["cap_drop"]) == (True, ["ALL"])
    assert party["security_opt"] == ["no-new-privileges:true"]
    assert "ports" not in party
    assert "environment" not in party


ADVISORIES = {"starlette": "0.49.1", "jinja2": "3.1.6", "h11": "0.16.0"}
"""First versions without the advisories that matter here: requests that take a server's time or are read in two ways,
and templates that leave their sandbox."""


@pytest.mark.parametrize("package", ADVISORIES)
def test_no_version_with_a_known_advisory_is_allowed(package: str) -> None:
    texts = [
        (ROOT / "packages" / name / "pyproject.toml").read_text() for name in ("silodp", "silodp-deploy")
    ]
    listed = {one for text in texts for one in tomllib.loads(text)["project"]["dependencies"]}
    (requirement,) = (one for one in map(Requirement, listed) if one.name == package)
    (bound,) = (one for one in requirement.specifier if one.operator == ">=")
    assert Version(bound.version) >= Version(ADVISORIES[package])
    lines = (ROOT / "constraints.txt").read_text().lower().splitlines()
    (tested,) = (line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))
    assert requirement.specifier.contains(tested)
