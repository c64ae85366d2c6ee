"""The file by which a trust center numbers the persons of one silo: columns `id` and `position`."""

from __future__ import annotations

from pathlib import Path

from silodp.data.identity import IdentityProfile
from silodp.data.tables._table import read_cells
from silodp.errors import SilodpError


def read_person_index(path: Path, profile: IdentityProfile) -> dict[str, int]:
    """Read the positions of a silo's persons.

    A trust center that knows the identifiers of all silos gives everyone who has several records, in whatever silos,
    one position. Positions should be drawn at random below U, so that they say nothing of the persons.

    Args:
        path: a CSV or Parquet file with the columns `id`, read by the profile, and `position`, from 0 to U − 1.
        profile: the identity profile of the run.

    Returns:
        Positions by identifier, as the profile writes it.

    Raises:
        SilodpError: the file cannot be read, the profile refuses an identifier, or an identifier or a position is there
            twice, missing or out of range (code identity.index).
    """
    identifiers = profile.normalize_column(read_cells(path, "id"), f"{path}: column 'id'")
    index: dict[str, int] = {}
    taken = set[int]()
    for row, (identifier, cell) in enumerate(
        zip(identifiers, read_cells(path, "position"), strict=True), start=1
    ):
        text = str(cell)
        position = int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else -1
        if not 0 <= position < profile.population:
            raise _fault(path, row, f"the position is not a whole number from 0 to {profile.population - 1}")
        if identifier is None:
            raise _fault(path, row, "the identifier is missing")
        if identifier in index or position in taken:
            raise _fault(path, row, "the identifier or the position was there before")
        index[identifier] = position
        taken.add(position)
    return index


def _fault(path: Path, row: int, what: str) -> SilodpError:
    return SilodpError(
        f"{path}: in data row {row} {what}; ask the trust center for a new file.",
        code="identity.index",
        field="index",
    )
