"""Download the benchmark data from where it is published, and check what is there.

Nothing is trusted that does not have the pinned SHA-256; nothing is left behind that does not have it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pooch

from silodp.data.catalog import DATASETS, find_dataset
from silodp.data.dataset import Dataset, Origin
from silodp.errors import SilodpError
from silodp_experiments.benchmarks import data_root

TIMEOUT = 60.0
"""Seconds without a byte."""


@dataclass(frozen=True)
class FileCheck:
    """One file: `state` is "ok", "missing" or "differs" (another SHA-256 than the pinned one)."""

    path: Path
    state: str


@dataclass(frozen=True)
class DatasetCheck:
    """The findings of `check`. `rows` counts the records of a load (None where files are missing)."""

    name: str
    files: tuple[FileCheck, ...]
    rows: int | None
    expected_rows: int

    @property
    def ok(self) -> bool:
        """Whether all files are there and byte-identical, and the row count is the published one."""
        return self.rows == self.expected_rows and all(file.state == "ok" for file in self.files)


@dataclass(frozen=True)
class Listing:
    """One line of `list_datasets`."""

    name: str
    rows: int
    license: str
    origin: str
    present: bool


def fetch(
    dataset: str | Dataset, destination: str | Path, urls: Mapping[str, tuple[str, ...]] | None = None
) -> list[Path]:
    """Download a data set into `destination`/NAME/; files already there and right are kept.

    Args:
        dataset: its name, or the data set itself where it is not registered.
        destination: the folder of all data sets (which SILODP_DATA names); made when missing.
        urls: file name → addresses (https, http or file), such as those of a mirror, instead of the published
            ones.

    Returns:
        The paths of the files, all with the pinned SHA-256; or of the alternative, if it is there.

    Raises:
        SilodpError: an unknown name, a publisher that asks for manual steps (the sentence says which), no connection,
            or other bytes than the pinned ones (no part of such a file stays behind).
    """
    name, origin = _with_origin(dataset)
    folder = Path(destination).expanduser() / name
    addresses = origin.urls if urls is None else urls
    if origin.alternative and (folder / origin.alternative).is_file():
        return [folder / origin.alternative]
    for file, digest in origin.files.items():
        # A file with other bytes is fetched again: it may be the rest of an older program.
        if _check_file(folder / file, digest) != "ok":
            if not addresses.get(file):
                raise SilodpError(
                    f"{name} cannot be fetched into {folder}: {origin.manual}", code="data.fetch"
                )
            _download(addresses[file], folder / file, digest)
    return [folder / file for file in origin.files]


def check(dataset: str | Dataset, root: str | Path | None = None) -> DatasetCheck:
    """Hash the files of a data set under `root` (see `benchmarks.data_root`) and count the rows it loads.

    Args:
        dataset: its name, or the data set itself where it is not registered.
        root: folder of all data sets.

    Raises:
        SilodpError: an unknown name, no folder of data sets, or files that do not load.
    """
    name, origin = _with_origin(dataset)
    found = find_dataset(dataset) if isinstance(dataset, str) else dataset
    files = []
    if origin.files:
        folder = data_root(root) / name
        files = [
            FileCheck(folder / file, _check_file(folder / file, pin)) for file, pin in origin.files.items()
        ]
        substitute = folder / origin.alternative if origin.alternative else None
        if substitute is not None and substitute.is_file() and files[0].state == "missing":
            files = [FileCheck(substitute, "differs")]  # other rows than the pinned file's, so never "ok"
    rows = None
    if not any(file.state == "missing" for file in files):
        federation = found.load({"root": root} if origin.files else {})
        held = 0 if federation.test is None else len(federation.test)
        rows = sum(len(silo) for silo in federation.silos) + held
    return DatasetCheck(name, tuple(files), rows, origin.rows)


def list_datasets(root: str | Path | None = None) -> list[Listing]:
    """List every published data set, and whether its files are under `root`.

    Without such a folder only those are present that need no files.
    """
    try:
        # A list is of use without a folder, too: it tells what can be fetched.
        folder: Path | None = data_root(root)
    except SilodpError:
        folder = None
    listings = []
    for name, origin in _list_origins().items():
        # Data sets of an installed package have no files of their own.
        present = not origin.files
        if folder is not None and not present:
            here = folder / name
            present = all((here / file).is_file() for file in origin.files)
            if origin.alternative:
                present = present or (here / origin.alternative).is_file()
        listings.append(Listing(name, origin.rows, origin.license, origin.publisher, present))
    return listings


def _list_origins() -> dict[str, Origin]:
    return {name: dataset.origin for name, dataset in DATASETS.items() if dataset.origin is not None}


def _with_origin(dataset: str | Dataset) -> tuple[str, Origin]:
    """Return the name of a data set and where it is published."""
    if isinstance(dataset, str):
        dataset = find_dataset(dataset, "name")
    if dataset.origin is None:
        raise SilodpError(
            f"data set {dataset.name!r} is not published: choose one of {', '.join(_list_origins())}",
            code="argument.value",
            field="name",
        )
    return dataset.name, dataset.origin


def _check_file(path: Path, digest: str) -> str:
    return "missing" if not path.is_file() else "ok" if pooch.file_hash(str(path)) == digest else "differs"


def _download(urls: tuple[str, ...], path: Path, digest: str) -> None:
    """Write the first of `urls` that yields the right bytes to `path`, in one rename."""
    pooch.get_logger().setLevel("WARNING")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SilodpError(
            f"{path.parent} cannot be made ({error}); name another destination", code="data.fetch"
        ) from error
    failures = []
    for url in urls:
        try:
            # pooch compares the hash of a temporary file and renames it: a download that stops leaves nothing.
            pooch.retrieve(url, f"sha256:{digest}", path.name, path.parent, downloader=_read_url)
            return
        except OSError as error:  # those of requests are OSErrors, too
            failures.append(f"{urlsplit(url).netloc or url} does not answer ({error})")
        except ValueError:
            failures.append(f"{url} has another SHA-256 than {digest[:12]}…")
    raise SilodpError(
        f"{path.name} could not be fetched: {'; '.join(failures)}; check the connection and try again, or copy "
        f"the published file to {path}",
        code="data.fetch",
    )


def _read_url(url: str, target: str, _: object) -> None:
    """Copy what an address holds into the temporary file that pooch checks and renames."""
    if url.startswith("file:"):
        shutil.copyfile(url2pathname(urlsplit(url).path), target)
    else:
        # "identity": a transfer that the server compressed would unpack the bytes of a .gz file on arrival.
        headers = {"Accept-Encoding": "identity"}
        pooch.HTTPDownloader(timeout=TIMEOUT, chunk_size=1 << 20, headers=headers)(url, target, None)
    Path(target).chmod(
        0o644
    )  # a temporary file has 0600, which would hide a shared folder's data from others
