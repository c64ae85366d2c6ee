"""The files of a public folder, which others may have made up to do harm: listed, digested, and read within bounds."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silodp.errors import SilodpError
from silodp_deploy import AUTHORITY, CERTIFICATES

GET_AGAIN = "get the public folder again from the coordinator"
GIVE_FOLDER = "give the consortium's public folder, as 'silodp deploy init' writes it"

_MAX_FILES, _MAX_DEPTH = 10_000, 8
_MAX_FILE_BYTES, _MAX_BYTES = 1 << 30, 2 << 30
"""Of one file, such as the values of a frozen model, and of all files."""
_MAX_FACTS_BYTES = 64 << 20
"""Of a JSON file: what it becomes in memory is many times as long."""


@dataclass(frozen=True)
class PublicFile:
    """A file of the public folder.

    Attributes:
        bytes: Length of the file in bytes.
        digest: SHA-256 of its content, 64 hexadecimal digits.
    """

    bytes: int
    digest: str


def refuse_public(problem: str, remedy: str = GET_AGAIN, field: str | None = None) -> SilodpError:
    """Return the error about a public folder that cannot be used, with what to do."""
    return SilodpError(f"{problem}: {remedy}.", code="deploy.public", field=field)


def compute_digest(folder: Path) -> str:
    """Return the SHA-256 (hex) over the names and contents of all files of a public folder (see `list_files`)."""
    return digest_files(list_files(folder))


def list_files(folder: Path) -> dict[str, PublicFile]:
    """Return the files of a public folder and its subfolders by name.

    Files and folders whose names begin with a dot, and what Python leaves, are no part of it: operating systems make
    them. Certificates are no part either: they are renewed while a run is in progress, and the roster pins their keys
    (`certificates.read_certificates`).

    Raises:
        SilodpError: It has a link or a special file, or more or larger files than a public folder needs (code
            deploy.public).
    """
    found = {
        name: PublicFile(len(content), hashlib.sha256(content).hexdigest())
        for name, content in read_files(folder)
    }
    # The digest depends on the order: that of the parts of a name.
    return dict(sorted(found.items(), key=lambda item: item[0].split("/")))


def read_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of every file of a public folder.

    Raises:
        SilodpError: As `list_files`.
    """
    home, count, total = folder.resolve(), 0, 0
    if not home.is_dir():
        raise refuse_public(f"{folder} is not there, or no folder", GIVE_FOLDER)
    # By descriptors: a folder that is exchanged for a link meanwhile leads nowhere else.
    for place, folders, names, descriptor in os.fwalk(home, onerror=_raise):
        inside = Path(place).relative_to(home)
        # In place: `fwalk` then does not enter what is no part.
        folders[:] = [name for name in folders if _is_part(inside / name)]
        for name in sorted({*folders, *(name for name in names if _is_part(inside / name))}):
            path = (inside / name).as_posix()
            count += 1
            if count > _MAX_FILES:
                raise _refuse_file(folder / path, f"one of more than {_MAX_FILES:,} files and folders")
            if path.count("/") > _MAX_DEPTH:
                raise _refuse_file(folder / path, f"below more than {_MAX_DEPTH} folders")
            if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                continue
            # Opened by its name in the open folder: the path that was looked at cannot be exchanged in between.
            content = read_regular(name, folder / path, _MAX_FILE_BYTES, descriptor)
            total += len(content)
            if total > _MAX_BYTES:
                raise _refuse_file(folder / path, f"in a folder of more than {_MAX_BYTES >> 20:,} MiB")
            yield path, content


def _is_part(path: Path) -> bool:
    is_hidden = path.name.startswith(".") or path.name == "__pycache__"
    return not is_hidden and path.as_posix() not in (AUTHORITY, CERTIFICATES)


def _raise(error: OSError) -> None:
    # By itself `os.fwalk` leaves out folders that it cannot read, and the digest would not cover them.
    raise error


def read_regular(name: str | Path, path: Path, max_bytes: int, descriptor: int | None = None) -> bytes:
    """Return the content of a file that is neither a link nor special, and not longer than `max_bytes`.

    Args:
        name: Path of the file, relative to the folder of `descriptor` if there is one.
        path: Path of the file for the message of an error.
        max_bytes: The largest length in bytes.
        descriptor: File descriptor of the folder; None: `name` is opened as it is.
    """
    try:
        # Without blocking: to open a pipe for reading would wait for its writer.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _refuse_file(path, "a link or a special file") from None
        raise
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise _refuse_file(path, "a link or a special file")
        if status.st_size > max_bytes:
            raise _refuse_file(path, f"longer than {max_bytes >> 20:,} MiB")
        with open(opened, "rb", closefd=False) as file:
            # One byte more than the length: a file that grows meanwhile is noticed, and memory is bounded.
            content = file.read(status.st_size + 1)
        if len(content) != status.st_size:
            raise _refuse_file(path, "written to at this moment")
    finally:
        os.close(opened)
    return content


def read_facts(path: Path) -> bytes:
    """Return the content of a JSON file of a public folder."""
    return read_regular(path, path, _MAX_FACTS_BYTES)


def _refuse_file(path: Path, what: str) -> SilodpError:
    return refuse_public(f"{path} is {what}, and a public folder holds none")


def digest_files(files: Mapping[str, PublicFile]) -> str:
    """Return the SHA-256 (hex) over the names and contents of files, in their order."""
    state = hashlib.sha256()
    for name, file in files.items():
        # JSON has one line for each file, whatever its name holds, so that two folders never give the same text.
        state.update(json.dumps([name, file.digest]).encode() + b"\n")
    return state.hexdigest()


def format_digest(digest: str, digits: int = 32) -> str:
    """Return the first hexadecimal digits of a digest or key in groups of four, for a comparison by telephone."""
    return " ".join(digest[i : i + 4] for i in range(0, digits, 4))


def encode_json(content: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file that people may read; bytes, such as keys, become hexadecimal digits."""
    return (json.dumps(content, indent=1, ensure_ascii=False, default=bytes.hex) + "\n").encode()
