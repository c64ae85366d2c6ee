"""Every file that a party reads, damaged in every field and in its bytes: it is used, or refused with a code.

Others write some of these files, and disks and editors damage the rest. An exception of another kind ends a process
with a traceback in place of a sentence, at worst in the middle of a run.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
import typer

from silodp.errors import CODES, SilodpError
from support.damage import damage_file
from support.stored_files import World

COUNT = int(os.environ.get("SILODP_DAMAGED", "2000"))
"""Damaged files in the slow test, over all files together."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def attack(world: World, count: int) -> tuple[Counter[str], list[str]]:
    """Read so many damaged files; return how each reading ended, and what ended in another way than it may."""
    ends, wrong, generator = Counter[str](), [], random.Random(count)
    found = {path: list(dict.fromkeys(damage_file(path, generator))) for path in world.files}
    # The same number for each file; those with fewer places first, so that the others take what these leave.
    for done, path in enumerate(sorted(found, key=lambda path: len(found[path]))):
        whole, read = path.read_bytes(), world.files[path]
        quota = -(-(count - ends.total() - len(wrong)) // (len(found) - done))
        # A sample, so that a smaller number still has damage of every kind.
        for content in generator.sample(found[path], min(len(found[path]), quota)):
            path.write_bytes(content)
            try:
                read()
                ends["used"] += 1
            except typer.Exit:
                ends["used"] += 1
            except SilodpError as error:
                ends[error.code] += 1
                if error.code not in CODES or "\n" in str(error):
                    wrong.append(f"{path.name}: {error} [{error.code}]")
            except Exception as error:
                wrong.append(f"{path.name}: {type(error).__name__}: {error}; {content[:3000]!r}")
        path.write_bytes(whole)
        read()
    return ends, wrong


def test_a_damaged_file_is_used_or_refused_with_a_code(world: World) -> None:
    ends, wrong = attack(world, 400)
    assert not wrong, (len(wrong), wrong[:3])
    assert ends["used"] < ends.total() / 2


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_fields_of_every_file(world: World) -> None:
    ends, wrong = attack(world, COUNT)
    assert not wrong, (len(wrong), wrong[:10])
    assert ends.total() >= COUNT
    assert ends["used"] < ends.total() / 2
