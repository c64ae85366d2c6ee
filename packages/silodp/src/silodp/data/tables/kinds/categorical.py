"""Columns of public categories, one-hot or as codes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from silodp.data.tables._cells import format_names
from silodp.data.tables.cells import Cells
from silodp.data.tables.columns import check_values, refuse_schema, text_of, to_cell
from silodp.data.tables.kinds.column import Column
from silodp.text import shorten

_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
TRUE, FALSE = frozenset({"true", "yes", "1"}), frozenset({"false", "no", "0"})
"""Texts, in lower case, that a declared true or false stands for."""


@dataclass(frozen=True)
class CategoricalColumn(Column):
    """The public categories of a column.

    Attributes:
        categories: at least two, all different.
        missing: the category that a missing cell counts as; None refuses missing cells.
        codes: False: one column of 0 and 1 for each category. True: the number of the category, from 0 in the order
            of `categories`, in the array "codes" of the model's inputs; its model embeds it.
    """

    categories: Sequence[Any]
    missing: Any = None
    codes: bool = False

    section: ClassVar[str] = "categorical"

    @classmethod
    def _read_short(cls, declared: Any) -> CategoricalColumn:
        return cls(declared)

    def check(self, where: str) -> None:
        """Refuse fewer than two categories, and a setting of another type."""
        if not isinstance(self.codes, bool):
            raise refuse_schema("categorical", f"{where} has codes {shorten(self.codes)}; give true or false")
        check_values(where, self.categories)
        if self.missing is not None and text_of(self.missing) not in self.texts:
            reason = (
                f"{where} has missing {short(self.missing)}, which is none of its categories; add it to them"
            )
            raise refuse_schema("categorical", reason)

    @property
    def texts(self) -> list[str]:
        """The categories as cells are compared with them."""
        return [text_of(value) for value in self.categories]

    def list_features(self, name: str) -> list[str]:
        """Return the names of the features of the column `name`; the one of codes says which category has which."""
        if not self.codes:
            return [f"{name}={value}" for value in self.categories]
        # Escaped, so that parties who compare the name agree on every category: "a|b" is not "a" and "b".
        escaped = [text.replace("\\", r"\\").replace("|", r"\|") for text in self.texts]
        return [f"{name}={'|'.join(escaped)}"]

    def encode(self, cells: Cells) -> NDArray[Any]:
        """Return (d, categories) float32 of 0 and 1, or with `codes` (d, 1) int64."""
        remedy = "add it to the public categories, or change the cells before the run"
        if_empty = "declare which category stands for missing cells (missing), or fill the cells in"
        codes = read_codes(cells, self.categories, remedy, if_empty, self.missing)
        if self.codes:
            return codes[:, None]
        # While faults are collected, a refused cell has the code -1: its 1 stands in the last column, and nobody gets
        # the array.
        one_hot = np.zeros((len(codes), len(self.categories)), dtype=np.float32)
        one_hot[np.arange(len(codes)), codes] = 1
        return one_hot

    def describe(self, quote: Callable[[Sequence[Any]], str]) -> tuple[str, str]:
        """Return the categories, and which one a missing cell counts as."""
        policy = "refused" if self.missing is None else f"count as {quote([self.missing])}"
        return f"one of {quote(self.categories)}", policy

    def list_values(self) -> Sequence[Any]:
        """Return the categories."""
        return self.categories

    def name_features(self, name: str, mapped: Mapping[str, Any], missing: Sequence[str]) -> list[str]:
        """Return "NAME=TEXT" for every text that counts as a category, also one that stands for no value."""
        # A mapped text is no longer the category that it spells.
        own = [*(text for text in map(to_cell, self.categories) if text not in mapped), *mapped]
        if self.missing is not None:
            own += map(text_of, missing)
        return [f"{name}={text}" for text in dict.fromkeys(own)]

    def find_group_fault(self, values: Sequence[Any]) -> str | None:
        """Return what to give in place of `values` as subgroups; None where all are categories, each once."""
        given, declared = set(map(text_of, values)), set(self.texts)
        if values and len(given) == len(values) and given <= declared:
            return None
        return f"list categories that the schema declares ({', '.join(sorted(declared))}), each once."

    def name_groups(self, values: Sequence[Any]) -> list[str]:
        """Return the names of the subgroups of some categories."""
        return list(map(text_of, values))

    def split_rows(self, features: NDArray[Any], values: Sequence[Any]) -> list[NDArray[np.bool_]]:
        """Return for each category given the rows (n,) in it, by codes (n, 1) or one-hot features (n, categories)."""
        places = [self.texts.index(text_of(value)) for value in values]
        return [features[:, 0] == x if self.codes else features[:, x] > 0.5 for x in places]


def read_codes(
    cells: Cells, values: Sequence[Any], remedy: str, if_empty: str, missing: Any = None
) -> NDArray[np.int64]:
    """Return (d,) positions in `values`; that of `missing` where a cell is missing, which is refused without it.

    Args:
        cells: The distinct cells.
        values: The declared values.
        remedy: What to do about a cell that is none of them.
        if_empty: What to do about a missing cell.
        missing: The value that a missing cell counts as.
    """
    numbers = {text_of(v): number for number, v in enumerate(values) if not isinstance(v, bool)}
    words = {
        word: number
        for number, value in enumerate(values)
        if isinstance(value, bool)
        for word in sorted(TRUE if value else FALSE)
    }
    has_commas = cells.reader.decimal == ","

    def find(text: str) -> int:
        place = numbers.get(text, words.get(text.lower(), -1))
        if place < 0 and has_commas and _DECIMAL_COMMA.fullmatch(text):
            place = numbers.get(text_of(text.replace(",", ".")), -1)  # "0,0" is the category 0
        return place

    # The order matters: spellings and missing cells are told apart only among texts that are no declared value.
    codes = cells.map(find, int)
    # Where 'none' is a category, 'None' is a spelling of it rather than no value, unless the reader declares it.
    spellings, declared = {text.lower() for text in numbers}, set(cells.reader.missing)
    misspelt = (codes < 0) & cells.mark(lambda text: text.lower() in spellings and text not in declared)
    why = "differs from a declared one in upper and lower case only"
    # A spelling is not folded in silence: "m" and "M" may be two codes.
    cells.refuse(misspelt, why, cells.advise(remedy))
    if missing is not None:
        codes[(codes < 0) & cells.is_missing] = [text_of(value) for value in values].index(text_of(missing))
    cells.refuse((codes < 0) & cells.is_missing, "stands for no value", cells.advise(if_empty))
    why = f"is none of {format_names([*numbers, *words])}"
    cells.refuse(codes < 0, why, cells.advise(remedy))
    return codes


def read_answers(cells: Cells, why: str, remedy: str) -> NDArray[np.float64]:
    """Return (d,) 1 and 0 for cells that say yes and no."""
    words = {**dict.fromkeys(TRUE, 1.0), **dict.fromkeys(FALSE, 0.0)}
    found = cells.map(lambda text: words.get(text.lower(), np.nan), float)
    cells.refuse(~np.isin(found, (0, 1)), why, remedy)
    return found
