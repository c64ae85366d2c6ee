"""Where the data sets lie."""

from __future__ import annotations

import os
from pathlib import Path

from silodp.errors import SilodpError


def data_root(root: str | Path | None = None) -> Path:
    """The folder of the data sets: `root`, else $SILODP_DATA, else the nearest shared/data above here.

    Raises:
        SilodpError: none of them is a folder.
    """
    named = root if root is not None else os.environ.get("SILODP_DATA")
    if named:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            where = "root" if root is not None else "SILODP_DATA"
            raise SilodpError(
                f"{where} is {str(named)!r}, which is no folder; run `silodp data fetch NAME` and name its "
                "folder",
                code="data.no_dataset",
                field=where,
            )
        return folder
    for above in (Path.cwd(), *Path.cwd().parents):
        if (above / "shared" / "data").is_dir():
            return above / "shared" / "data"
    raise SilodpError(
        "no folder of data sets found (no root, no SILODP_DATA, no shared/data above here); "
        "run `silodp data fetch NAME` and set SILODP_DATA to its folder",
        code="data.no_dataset",
    )


def file_of(root: str | Path | None, dataset: str, name: str) -> Path:
    """A data set's file, which must be there."""
    path = data_root(root) / dataset / name
    if not path.is_file():
        raise SilodpError(
            f"{path} is missing; get it with `silodp data fetch {dataset}`", code="data.no_dataset"
        )
    return path
