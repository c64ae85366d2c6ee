"""Workbooks of spreadsheet programs (.xlsx)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, ClassVar

from numpy.typing import NDArray

from silodp.data.tables._text import name_setting
from silodp.data.tables.sources.content import find_other_kind
from silodp.data.tables.sources.source import Source, Values
from silodp.text import name_extra

_MAX_SHEETS = 10
"""The most names of sheets that a message lists."""


class Workbook(Source):
    """One sheet of a workbook, the first row as header."""

    rounds_numbers: ClassVar[bool] = True

    @cached_property
    def _sheet(self) -> str:
        """The name of the sheet that is read.

        Raises:
            SilodpError: openpyxl is not installed, or there is no such sheet.
        """
        if found := find_other_kind(self.path, "xlsx"):
            raise self.refuse(f"the name ends in .xlsx, and the file {found}")
        try:
            import openpyxl
        except ImportError:
            raise self.refuse(
                f"reading .xlsx needs openpyxl; {name_extra('excel')}, or export the table as CSV",
                code="data.no_reader",
            ) from None
        # read_only: else all cells of all sheets would be in memory only to list the names.
        workbook = openpyxl.load_workbook(self.path, read_only=True, data_only=True)
        sheets = [sheet.title for sheet in workbook.worksheets]  # a chart on a sheet of its own has no cells
        workbook.close()
        if not sheets:
            raise self.refuse("the workbook has charts alone and no sheet with cells; export the table again")
        named, fault = self.reader.sheet, ""
        if named is None and len(sheets) > 1:
            fault = f"has {len(sheets)} sheets, {_list_sheets(sheets)}; name the one with the table as"
        elif named is not None and named not in sheets:
            fault = f"has no sheet {named!r}, only {_list_sheets(sheets)}; correct"
        if fault:
            reason = f"the workbook {fault} {name_setting('sheet')}"
            raise self.refuse(reason, field="data.schema.reader.sheet")
        return named or sheets[0]

    @cached_property
    def _cells(self) -> NDArray[Any]:
        """(1 + n, columns) object array of all cells, the header first."""
        import pandas as pd

        # Nothing counts as missing here (na_filter): which texts stand for no value is declared, and "NA" may be a
        # category.
        cells = pd.read_excel(
            self.path, sheet_name=self._sheet, header=None, dtype=object, na_filter=False, engine="openpyxl"
        )
        if cells.empty:
            raise self.refuse_empty()
        return cells.to_numpy(dtype=object)

    def list_columns(self) -> list[str]:
        """Return the cells of the first row."""
        return list(map(str, self._cells[0]))

    def read_columns(self, names: Sequence[str], key: str | None = None) -> dict[str, Values]:
        """Return columns; their cells are text, numbers, dates and truth values, as the program has stored them.

        Raises:
            SilodpError: A cell would count as missing: a formula of which no value is stored, or an error but #N/A.
        """
        import pandas as pd

        header = self.list_columns()
        places = {name: header.index(name) for name in names}
        found = self._cells[1:, list(places.values())]
        if ((found == "") | pd.isna(found)).any():
            self._check_empty_cells({place + 1 for place in places.values()})
        return {name: found[:, place] for place, name in enumerate(places)}

    def _check_empty_cells(self, columns: Collection[int]) -> None:
        """Raise for cells that would count as missing and are not empty, in columns by their numbers from 1."""
        import openpyxl

        # openpyxl gives either formulas or the values that are stored for them, so both are read.
        written, stored = (
            openpyxl.load_workbook(self.path, read_only=True, data_only=only) for only in (False, True)
        )
        for book in (written, stored):
            # Some programs write wrong dimensions, and cells beyond them would be left out.
            book[self._sheet].reset_dimensions()
        for formulas, values in zip(
            written[self._sheet].iter_rows(), stored[self._sheet].iter_rows(), strict=True
        ):
            for formula, value in zip(formulas, values, strict=True):
                if formula.data_type not in ("f", "e") or formula.column not in columns:
                    continue
                fault = ""
                # A stored text may be empty, and has the type str.
                if formula.data_type == "f" and value.value is None and value.data_type != "str":
                    fault = (
                        "has a formula without a stored value; open the workbook in a spreadsheet program and save it, "
                        "or export it as CSV"
                    )
                elif value.data_type == "e" and value.value != "#N/A":
                    fault = f"is the error {value.value}; correct its formula, or empty the cell"
                if fault:
                    raise self.refuse(f"cell {formula.coordinate} {fault}")
        written.close()
        stored.close()


def _list_sheets(sheets: Sequence[str]) -> str:
    """Return the names of the sheets, the first ten of a longer list."""
    more = len(sheets) - _MAX_SHEETS
    named = ", ".join(map(repr, sheets[:_MAX_SHEETS]))
    return f"{named} and {more:,} more" if more > 0 else named
