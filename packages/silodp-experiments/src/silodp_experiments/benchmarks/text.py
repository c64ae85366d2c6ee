"""Texts that every installation of Python has: the docstrings of its standard library, module by module."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from silodp.data.dataset import Dataset, Origin
from silodp.data.federation import Federation
from silodp.data.inputs import Input
from silodp.data.silo_data import SiloData
from silodp.settings import Whole
from silodp_experiments.benchmarks._common import hold_out, make_test
from silodp_experiments.sequences import pack_sequences

LENGTH, CHARACTERS = 64, 97
"""Characters of a row, and how many there are: 0 between texts, 1 a new line, 2 to 96 those of ASCII that print."""
_MOST_TEXTS, _MOST_CHARACTERS = 40, 600
"""Of one module: no module is the author of a large part of all rows."""
_HELD_OUT, _HOME = 0.2, 0.8


def encode(text: str) -> list[int]:
    """Return the ids of a text's characters; others than those of ASCII that print are left out."""
    return [1 if one == "\n" else ord(one) - 30 for one in text if one == "\n" or 32 <= ord(one) < 127]


def docstrings(silos: int = 3, seed: int = 0) -> Federation:
    """Load rows of 64 characters from the docstrings of Python's standard library: x (n, 64) ids, y the next character.

    A module stands for a person, who has up to 40 texts. Four fifths of a person's rows are in one silo, and the others
    anywhere. A fifth of the persons is held out. How many there are depends on the version of Python.

    Args:
        silos: S.
        seed: the seed of the draws of silos and of held-out persons.

    Raises:
        SilodpError: an argument with another value than those above.
    """
    Whole(1).check("silos", silos)
    Whole(0).check("seed", seed)
    texts, authors = [], []
    for number, found in enumerate(_read_modules()):
        texts += found
        authors += [number] * len(found)
    x, y, author = pack_sequences([encode(text) for text in texts], authors, LENGTH)
    random = np.random.default_rng(seed)
    persons = random.permutation(author.max() + 1)
    kept = np.sort(persons[round(_HELD_OUT * len(persons)) :])
    is_kept = np.isin(author, kept)
    home = random.integers(silos, size=len(persons))
    place = np.where(random.random(len(x)) < _HOME, home[author], random.integers(silos, size=len(x)))
    tables = []
    for silo in range(silos):
        mine, theirs = is_kept & (place == silo), ~is_kept & (place == silo)
        user = np.searchsorted(kept, author[mine])
        name = f"silo-{silo + 1}"
        tables.append(SiloData(name, x[mine], y[mine], user, test=hold_out(name, x[theirs], y[theirs])))
    test = make_test(x[~is_kept], y[~is_kept])
    return Federation(
        tuple(tables), len(kept), test, name="docstrings", classes=CHARACTERS, categories=CHARACTERS
    )


def read_docstrings(path: Path) -> list[str]:
    """Return the docstrings of a file of Python, each cut to 600 characters."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_bytes())
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, nodes)]
    return [text[:_MOST_CHARACTERS] for text in found if encode(text)]


def _read_modules() -> Iterator[list[str]]:
    """Yield the docstrings of every module of the standard library that has at least two."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts = read_docstrings(path)[:_MOST_TEXTS]
        if len(texts) >= 2:
            yield texts


DOCSTRINGS = Dataset(
    name="docstrings",
    loader=docstrings,
    inputs=(Input("", (LENGTH,), CHARACTERS),),
    record_shape=(LENGTH,),
    label_shape=(LENGTH,),
    classes=CHARACTERS,
    model="causal_lm",
    origin=Origin(
        rows=0, license="Python Software Foundation License 2", publisher="the installed version of Python"
    ),
)
