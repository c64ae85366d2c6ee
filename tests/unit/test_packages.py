"""The packages of the workspace: one version, parts that can be imported, and no name twice."""

from __future__ import annotations

import tomllib
from collections import Counter
from typing import Any

import pytest

from silodp._lazy import load
from silodp.text import EXTENSIONS
from support.places import ROOT

PROJECTS: dict[str, dict[str, Any]] = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}


def test_all_packages_have_one_version_and_ask_for_it() -> None:
    assert set(PROJECTS) == {"silodp", *(f"silodp-{name}" for name in EXTENSIONS)}
    version = PROJECTS["silodp"]["version"]
    for name, project in PROJECTS.items():
        assert (project["name"], project["version"]) == (name, version)
        extras = project.get("optional-dependencies", {}).values()
        asked = [one for listed in (project["dependencies"], *extras) for one in listed]
        own = [one for one in asked if one.startswith("silodp")]
        assert all(one.endswith(f"=={version}") for one in own)
        assert name == "silodp" or f"silodp=={version}" in own


def test_every_extension_has_an_extra_of_the_core() -> None:
    extras = PROJECTS["silodp"]["optional-dependencies"]
    version = PROJECTS["silodp"]["version"]
    for name in EXTENSIONS:
        assert extras[name] == [f"silodp-{name}=={version}"]
        assert f"silodp-{name}=={version}" in extras["all"]


@pytest.mark.parametrize("name", PROJECTS)
def test_parts_can_be_imported_from_their_own_package(name: str) -> None:
    for group, points in PROJECTS[name].get("entry-points", {}).items():
        assert group.startswith("silodp.")
        for place in points.values():
            assert place.startswith(f"{name.replace('-', '_')}.")
            if "mlflow" not in place:  # an optional dependency
                load(place)


def test_no_two_packages_add_a_part_of_one_name() -> None:
    names = Counter(
        (group, part)
        for project in PROJECTS.values()
        for group, points in project.get("entry-points", {}).items()
        for part in points
    )
    assert [place for place, number in names.items() if number > 1] == []
