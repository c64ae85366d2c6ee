"""What a file begins with, whatever its name says."""

from __future__ import annotations

import gzip
import zipfile
from io import BytesIO
from pathlib import Path
from typing import IO, cast

_STRICT = b"http://purl.oclc.org/ooxml/"
"""The names of elements begin so in workbooks of the strict variant of ISO/IEC 29500, which openpyxl does not know."""
_SIGNATURES = {
    b"\x1f\x8b": "is compressed by gzip; let its name end in .gz",
    b"BZh91AY&SY": "is compressed by bzip2; unpack it",
    b"\xfd7zXZ\0": "is compressed by xz; unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it",
    b"7z\xbc\xaf\x27\x1c": "is a 7z archive; unpack it",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "is a workbook in the old format .xls, or has a password; save it as .xlsx, "
    "without one",
    b"ARROW1\0\0": "is an Arrow file; save it as .parquet",
    b"SQLite format 3\0": "is an SQLite database; let its name end in .sqlite, and give a query for its rows",
    b"%PDF-": "is a PDF; export the table as CSV",
}
"""First bytes of files that are no text, what such a file is, and the remedy."""


def find_other_kind(path: Path, ending: str) -> str:
    """Return what a file is and the remedy where its name says something else; "" where it does not.

    An error of its parser would name another fault.

    Args:
        path: The file.
        ending: One of "csv", "tsv", "csv.gz", "tsv.gz", "parquet" and "xlsx".
    """
    start = read_start(path)
    found = next((what for mark, what in _SIGNATURES.items() if start.startswith(mark)), "")
    is_archive = start.startswith(b"PK\x03\x04")
    if is_archive or (start.startswith(b"PAR1") and ending != "parquet"):
        with open_bytes(path) as file:
            content = file.read()
        # A text file may begin with this name of a column, so its end is looked at, too.
        found = "is a Parquet file; let its name end in .parquet" if content.endswith(b"PAR1") else ""
        found = _describe_archive(content, ending) if is_archive else found
    return found


def _describe_archive(content: bytes, ending: str) -> str:
    """Return what a zip archive is and the remedy; "" for a workbook that can be read, and for a damaged one."""
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            parts = archive.namelist()
            is_workbook = "xl/workbook.xml" in parts
            is_strict = is_workbook and _STRICT in archive.read("xl/workbook.xml")
    except Exception:  # damaged archives raise exceptions of any type
        return "" if ending == "xlsx" else "is a damaged zip archive; export the table again"
    if is_strict:
        return "is a workbook of the variant 'Strict Open XML'; save it as an ordinary one ('Excel Workbook')"
    if is_workbook:
        return "" if ending == "xlsx" else "is a workbook; let its name end in .xlsx"
    is_other = "xl/workbook.bin" in parts or "content.xml" in parts
    return "is a workbook of another format; save it as .xlsx" if is_other else "is a zip archive; unpack it"


def read_start(path: Path) -> bytes:
    """Return the first bytes of a file, unpacked where its name ends in .gz."""
    with open_bytes(path) as file:
        return file.read(4096)


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file, unpacked where its name ends in .gz."""
    return cast(IO[bytes], gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else path.open("rb")
