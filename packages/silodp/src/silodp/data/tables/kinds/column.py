"""The base of the kinds of columns: what a schema declares of one column, and what its cells become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import Registry
from silodp.data.tables.columns import read_settings, refuse_schema
from silodp.errors import SilodpError
from silodp.settings import Settings, check_is_dataclass
from silodp.text import is_own, shorten

if TYPE_CHECKING:
    from silodp.data.tables.cells import Cells


@dataclass(frozen=True)
class Column(Settings, ABC):
    """The public constants of one column of features: never values computed from rows.

    A subclass is a frozen dataclass. [data.schema.other.NAME] sets its fields, beside `kind`, which names it; they are
    checked by their annotations (`silodp.settings`), and together by `check`. The features of a record follow from
    these constants and from its own cell alone: what depended on other rows would let persons influence each other, and
    no ε would hold.
    """

    section: ClassVar[str] = "other"
    """The part of the schema that declares such columns."""
    is_number: ClassVar[bool] = False
    """Whether cells are numbers, so that -9.0 is the missing code -9."""

    def __post_init__(self) -> None:
        """Check the fields of a plug-in by their annotations; kinds of silodp say more in `check`.

        Raises:
            SilodpError: as `Settings`.
        """
        if not is_own(type(self)):
            super().__post_init__()

    @classmethod
    def read(cls, name: str, declared: Any) -> Self:
        """Return the column of a table of its fields.

        Args:
            name: The name of the column, for messages.
            declared: The table, or the column itself.

        Raises:
            SilodpError: A wrong type, or constants that do not fit each other.
        """
        where = f"{cls.section} column {name!r}"
        check_is_dataclass(cls)
        try:
            found = read_settings(cls, declared, cls.section, where)
        except SilodpError as error:
            if error.field and error.field.startswith("data.schema"):
                raise
            reason = f"{where}: {str(error).rstrip('.')}"
            raise refuse_schema(f"{cls.section}.{name}.{error.field}", reason, error.code) from None
        if found is None:
            found = cls._read_short(declared)
        if found is None:
            known = ", ".join(one.name for one in fields(cls))
            raise refuse_schema(
                f"{cls.section}.{name}", f"{where} is {shorten(declared)}; give a table of {known}"
            )
        found.check(where)
        return found

    @classmethod
    def _read_short(cls, declared: Any) -> Self | None:
        """Return the column of a short form, such as [low, high] in place of a table; None where there is none."""
        return None

    def check(self, where: str) -> None:
        """Refuse constants that do not fit each other; by default none are refused.

        Args:
            where: What is declared, for messages.

        Raises:
            SilodpError: They do not fit (`refuse_schema`).
        """

    @abstractmethod
    def list_features(self, name: str) -> list[str]:
        """Return the names of the features of the column `name`, each once in the schema."""

    @abstractmethod
    def encode(self, cells: Cells) -> NDArray[Any]:
        """Return the features of the distinct cells.

        Args:
            cells: The distinct cells; `cells.refuse` refuses some of them.

        Returns:
            (d, features) float32, each row from its own cell alone. What stands in rows of refused cells has no
            meaning.
        """

    @abstractmethod
    def describe(self, quote: Callable[[Sequence[Any]], str]) -> tuple[str, str]:
        """Return, for a model card, the values that a cell can have, and what a missing cell counts as.

        Args:
            quote: Returns a list of values as the card shows them.
        """

    def list_values(self) -> Sequence[Any]:
        """Return the values that a mapping of a silo's table may map texts to; none by default."""
        return ()

    def name_features(self, name: str, mapped: Mapping[str, Any], missing: Sequence[str]) -> list[str]:
        """Return what features are made of in one silo's table, by its own words; by default as in the schema.

        Args:
            name: The name of the column in that table.
            mapped: Text of a cell → the declared value that it stands for there.
            missing: Further texts that stand for no value there.
        """
        return self.list_features(name)

    def find_group_fault(self, values: Sequence[Any]) -> str | None:
        """Return what to give in place of `values`, which should name subgroups; None where they do."""
        return "a column of this kind has no subgroups: name a numeric or a categorical one."

    def name_groups(self, values: Sequence[Any]) -> list[str]:
        """Return the names of the subgroups of `values`."""
        raise NotImplementedError

    def split_rows(self, features: NDArray[Any], values: Sequence[Any]) -> list[NDArray[np.bool_]]:
        """Return for each subgroup the rows (n,) in it, by the column's features (n, k)."""
        raise NotImplementedError


COLUMN_KINDS: Registry[type[Column]] = Registry(
    "column_kinds",
    {
        "numeric": "silodp.data.tables.kinds.numeric:NumericColumn",
        "categorical": "silodp.data.tables.kinds.categorical:CategoricalColumn",
    },
)
"""The kinds of columns that [data.schema.other] can name."""
