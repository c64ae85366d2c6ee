"""The public folder of a consortium: what all parties have agreed on, the same files everywhere.

    config.toml      the settings of the run; it names no file of a silo
    data.json        public facts of the data: silos, U, shapes, classes, features
    run_spec.json    the specification that follows from both; every party derives it again and compares the digest
    roster.json      address of the server, and every party's name and public key
    ca.pem           the certificate of the consortium's authority
    certificates/    NAME.pem for every party
    *.py             a model file, where the configuration names one
    users.txt        the public list of users, or identity.toml, the identity profile

One digest covers all files. Operators compare it by telephone, and a party takes part only under a digest that its
operator has accepted. Before that no code of the folder is run, and nothing outside it is read: it has no links, its
size is bounded, and only the model, the loss and the metrics may be code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.aggregators.run_spec import ModelSpec, RunSpec
from silodp.config.plugins import is_reference, refuse_plugins, split_reference
from silodp.config.resolve import ResolvedRun, load_config
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.parsing import UNSOUND, parse_json, refuse_unsound
from silodp.text import shorten
from silodp.wire.files import make_private_folder, write_durably
from silodp.wire.transport import SERVER

if TYPE_CHECKING:
    from silodp.training.task import Task

CONFIG, DATA, SPEC, ROSTER, AUTHORITY = "config.toml", "data.json", "run_spec.json", "roster.json", "ca.pem"
CERTIFICATES = "certificates"
FORMAT = 1
"""Of roster.json."""
_NAME = re.compile(r"\w[\w .-]{0,99}")
_MAX_FILES, _MAX_DEPTH = 10_000, 8
_MAX_FILE_BYTES, _MAX_BYTES = 1 << 30, 2 << 30
"""Of one file, such as the values of a frozen model, and of all files."""
_MAX_FACTS_BYTES = 64 << 20
"""Of a JSON file: what it becomes in memory is many times as long."""
_NO_CODE = (
    "only the model, the loss and the metrics of a deployment ([task]) may be code outside silodp: choose one of "
    "silodp's here"
)
_CODE_MODULES = ("silodp.training.losses", "silodp.training.metrics", "silodp.training.models", "torch.nn")
"""Modules that a reference may name. What they define reads no file, and starts and imports nothing."""


_AGAIN = "get the public folder again from the coordinator"
_GIVE = "give the consortium's public folder, as 'silodp deploy init' writes it"


def _public_error(problem: str, remedy: str = _AGAIN, field: str | None = None) -> SilodpError:
    return SilodpError(f"{problem}: {remedy}.", code="deploy.public", field=field)


@dataclass(frozen=True)
class PublicFile:
    """A file of the public folder.

    Attributes:
        bytes: Length of the file in bytes.
        digest: SHA-256 of its content, 64 hexadecimal digits.
    """

    bytes: int
    digest: str


@dataclass(frozen=True)
class Roster:
    """The parties of a consortium, in the public order of the silos.

    Attributes:
        host, port: Address of the server, as silos reach it.
        server: Ed25519 public key of the server, 32 bytes.
        silos: Ed25519 public keys of the silos by name, 32 bytes each.
        for_tests: Whether the keys were made for a test on one machine.
    """

    host: str
    port: int
    server: bytes
    silos: Mapping[str, bytes]
    for_tests: bool = False

    @property
    def address(self) -> str:
        """HOST:PORT of the server; an IPv6 address is in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Address of the server for silos that connect over HTTPS."""
        return f"https://{self.address}"

    def to_json(self) -> str:
        """Return the content of roster.json."""
        fields = {
            "format": FORMAT,
            "host": self.host,
            "port": self.port,
            "server": self.server.hex(),
            "silos": {name: key.hex() for name, key in self.silos.items()},
            "for_tests": self.for_tests,
        }
        return encode_json(fields).decode()

    @classmethod
    def from_json(cls, text: bytes) -> Roster:
        """Return the inverse of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: it is no roster of this format.
        """
        fields = parse_json(text)
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']}")
        silos = {str(name): _public_key(key) for name, key in fields["silos"].items()}
        return cls(
            str(fields["host"]),
            int(fields["port"]),
            _public_key(fields["server"]),
            silos,
            bool(fields["for_tests"]),
        )


def _public_key(text: str) -> bytes:
    key = bytes.fromhex(text)
    if len(key) != 32:
        raise ValueError("a public key of another length")
    return key


@dataclass(frozen=True)
class Consortium:
    """The public folder of a consortium, read.

    Attributes:
        folder: Path of the folder.
        resolved: The run as config.toml describes it.
        data: Public facts of the data.
        roster: The parties; None before the coordinator has sealed the folder.
        files: All files by name, as the digest covers them.
    """

    folder: Path
    resolved: ResolvedRun
    data: PublicData
    roster: Roster | None
    files: Mapping[str, PublicFile]

    @classmethod
    def load(cls, folder: Path) -> Consortium:
        """Read the folder; none of its code is run, and no file outside it is read.

        Raises:
            SilodpError: a file is missing, cannot be read, or names other silos than the others; the folder has a link,
                or is too large; or the configuration names a file outside it (code deploy.public), or code where a
                deployment takes none (code report.foreign_code).
        """
        files = list_files(folder)
        try:
            data = PublicData.from_dict(parse_json(_read_facts(folder / DATA)))
            roster = Roster.from_json(_read_facts(folder / ROSTER)) if ROSTER in files else None
        except FileNotFoundError as error:
            raise _public_error(f"{folder} has no file {Path(error.filename).name}", _GIVE) from None
        except UNSOUND as error:
            reason = f"{type(error).__name__}: {error}"
            raise _public_error(f"the public folder {folder} cannot be read ({reason})") from None
        if roster is not None and tuple(roster.silos) != data.silos:
            raise _public_error(
                f"{folder / ROSTER} lists the silos {', '.join(roster.silos)}, and {DATA} {', '.join(data.silos)}"
            )
        for name in data.silos:
            check_party_name(name)
        with refuse_plugins(_NO_CODE):
            resolved = load_config(folder / CONFIG)
            consortium = cls(folder, resolved, data, roster, files)
            consortium._check_paths()
            consortium._check_facts()
            resolved.settings()
        return consortium

    def _check_facts(self) -> None:
        """Refuse facts of the data that are not those of the configuration, by which a silo reads its table."""
        declared = self.resolved.read_public_data()
        for field in (
            "silos",
            "users",
            "record_shape",
            "inputs",
            "labels",
            "classes",
            "features",
            "identity_digest",
        ):
            stated, expected = getattr(self.data, field), getattr(declared, field)
            is_free = field == "users" and expected is None  # U is then stated in data.json alone
            if stated != expected and not is_free:
                raise _public_error(
                    f"{self.folder / DATA} states {field} = {shorten(stated)}, and {CONFIG} leads to "
                    f"{shorten(expected)}",
                    field=field,
                )

    def _check_paths(self) -> None:
        """Refuse a configuration that names a file or a module that the digest does not cover."""
        schema = self.resolved.table_schema
        for field in ("users", "identity"):
            path = getattr(schema, field, None)
            if isinstance(path, str | Path) and not self._has_file(Path(path)):
                raise self._coverage_error(
                    f"data.schema.{field}", str(path), "let 'silodp deploy init' write the folder"
                )
        for field, reference in self.references.items():
            place, name = split_reference(reference)
            is_known = place in _CODE_MODULES and name.isidentifier() and not name.startswith("_")
            if not (self._has_file(Path(place)) if place.endswith(".py") else is_known):
                remedy = (
                    "put the code into a .py file, which 'silodp deploy init' copies, or take it from "
                    f"{', '.join(_CODE_MODULES)}"
                )
                raise self._coverage_error(field, reference, remedy)

    def _has_file(self, path: Path) -> bool:
        """Return whether a file is one that the digest covers."""
        home, found = self.folder.resolve(), path.resolve()
        return found.is_relative_to(home) and found.relative_to(home).as_posix() in self.files

    def _coverage_error(self, field: str, value: str, remedy: str) -> SilodpError:
        problem = (
            f"{self.folder / CONFIG} has {field} = {shorten(value)}, which is no file of the public folder"
        )
        return _public_error(problem, remedy, field)

    @cached_property
    def references(self) -> dict[str, str]:
        """Every reference to code outside silodp that is imported once the folder is accepted, by its field."""
        task = self.resolved.config.task
        named = {"task.model": task.model, "task.loss": task.loss}
        named |= {f"task.metrics[{number}]": name for number, name in enumerate(task.metrics or ())}
        return {field: name for field, name in named.items() if name is not None and is_reference(name)}

    @property
    def other_files(self) -> dict[str, PublicFile]:
        """The files that silodp did not make up: code, what code may read, and lists; an operator looks at them."""
        parties = (*self.data.silos, SERVER)
        known = {CONFIG, DATA, SPEC, ROSTER, AUTHORITY, *(f"{CERTIFICATES}/{name}.pem" for name in parties)}
        return {name: file for name, file in self.files.items() if name not in known}

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns that a model learns to predict: the label, or event and time; () where no schema names them."""
        schema = self.resolved.table_schema
        if schema is None:
            return ()
        return (
            *schema.label_columns,
            *(column for column in (schema.event, schema.time) if column is not None),
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over the names and contents of all files."""
        return _digest_files(self.files)

    @property
    def code(self) -> str:
        """The digest in groups, for a comparison by telephone."""
        return format_digest(self.digest)

    @property
    def sealed(self) -> Roster:
        """The roster.

        Raises:
            SilodpError: the folder is not sealed yet (code deploy.not_sealed).
        """
        if self.roster is None:
            raise SilodpError(
                f"the public folder {self.folder} has no roster yet: the coordinator runs 'silodp deploy seal' when "
                "the requests of all parties are there.",
                code="deploy.not_sealed",
            )
        return self.roster

    @cached_property
    def stated_spec(self) -> RunSpec:
        """The specification of the run as the folder states it; no code of a model is run.

        Raises:
            SilodpError: settings, data and model of the folder lead to another one (code deploy.spec).
        """
        with refuse_unsound(f"{self.folder / SPEC} cannot be read: {_AGAIN}.", code="deploy.public"):
            model = ModelSpec(**self._stated["model"])
        return self._derive_stated(model)

    @cached_property
    def task(self) -> Task:
        """The model, its loss and its metrics; a model file of the folder is executed, so it must be accepted."""
        with refuse_plugins(_NO_CODE, but=self.references.values()):
            return self.resolved.build_task(self.data)

    @cached_property
    def spec(self) -> RunSpec:
        """The specification of the run, with the model that is trained here.

        Raises:
            SilodpError: it is not the one that the folder states: this version, or a model file, differs
                (code deploy.spec).
        """
        return self._derive_stated(self.task)

    @cached_property
    def _stated(self) -> dict[str, Any]:
        try:
            return {**parse_json(_read_facts(self.folder / SPEC))}
        except (OSError, *UNSOUND) as error:
            raise _public_error(f"{self.folder / SPEC} cannot be read") from error

    def _derive_stated(self, task: Task | ModelSpec) -> RunSpec:
        with refuse_plugins(_NO_CODE):
            spec = self.resolved.prepare(self.data, task)
        stated = str(self._stated.get("digest"))
        if spec.digest != stated:
            raise SilodpError(
                f"the run that follows here from {self.folder / CONFIG} has the digest {spec.digest[:16]}, and "
                f"{SPEC} states {stated[:16]}: install the version of silodp, and give the model the frozen values, "
                "the modes (train or eval) and the numbers in plain attributes, that the coordinator has.",
                code="deploy.spec",
            )
        return spec

    def certificate(self, name: str) -> Path:
        """Return the file with the certificate of a party."""
        return self.folder / CERTIFICATES / f"{name}.pem"


def check_party_name(name: str) -> None:
    """Refuse a silo's name that cannot be the name of a file, or is the server's.

    Raises:
        SilodpError: it is (code deploy.name).
    """
    if _NAME.fullmatch(name) is None or name == SERVER:
        raise SilodpError(
            f"a silo is called {shorten(name)}: give it a name of letters, digits, spaces, '.', '-' and '_' that does "
            "not begin with a sign, other than 'server'.",
            code="deploy.name",
        )


def compute_digest(folder: Path) -> str:
    """Return the SHA-256 (hex) over the names and contents of all files of a public folder (see `list_files`)."""
    return _digest_files(list_files(folder))


def list_files(folder: Path) -> dict[str, PublicFile]:
    """Return the files of a public folder and its subfolders by name.

    Files and folders whose names begin with a dot, and what Python leaves, are no part of it: operating systems make
    them.

    Raises:
        SilodpError: it has a link or a special file, or more or larger files than a public folder needs (code
            deploy.public).
    """
    found = {
        name: PublicFile(len(content), hashlib.sha256(content).hexdigest()) for name, content in _read(folder)
    }
    # The digest depends on the order: that of the parts of a name.
    return dict(sorted(found.items(), key=lambda item: item[0].split("/")))


def _read(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the files of a public folder, which others may have made up to do harm."""
    home, count, total = folder.resolve(), 0, 0
    if not home.is_dir():
        raise _public_error(f"{folder} is not there, or no folder", _GIVE)
    # By descriptors: a folder that is exchanged for a link meanwhile leads nowhere else.
    for place, folders, names, descriptor in os.fwalk(home, onerror=_raise):
        inside = Path(place).relative_to(home)
        folders[:] = filter(_is_part, folders)
        for name in sorted({*folders, *filter(_is_part, names)}):
            path = (inside / name).as_posix()
            count += 1
            if count > _MAX_FILES:
                raise _refuse_file(folder / path, f"one of more than {_MAX_FILES:,} files and folders")
            if path.count("/") > _MAX_DEPTH:
                raise _refuse_file(folder / path, f"below more than {_MAX_DEPTH} folders")
            mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                continue
            content = _read_regular(name, folder / path, _MAX_FILE_BYTES, descriptor)
            total += len(content)
            if total > _MAX_BYTES:
                raise _refuse_file(folder / path, f"in a folder of more than {_MAX_BYTES >> 20:,} MiB")
            yield path, content


def _is_part(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _raise(error: OSError) -> None:
    raise error


def _read_regular(name: str | Path, path: Path, max_bytes: int, descriptor: int | None = None) -> bytes:
    """Return the content of a file that is neither a link nor special, and not longer than `max_bytes`."""
    try:
        # Without blocking: to open a pipe for reading would wait for its writer.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise _refuse_file(path, "a link or a special file") from None
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


def _read_facts(path: Path) -> bytes:
    return _read_regular(path, path, _MAX_FACTS_BYTES)


def _refuse_file(path: Path, what: str) -> SilodpError:
    return _public_error(f"{path} is {what}, and a public folder holds none")


def _digest_files(files: Mapping[str, PublicFile]) -> str:
    state = hashlib.sha256()
    for name, file in files.items():
        # JSON has one line for each file, whatever its name holds, so that two folders never give the same text.
        state.update(json.dumps([name, file.digest]).encode() + b"\n")
    return state.hexdigest()


def take_copy(folder: Path, home: Path) -> Consortium:
    """Copy the public folder into a party's own folder, and load the copy.

    What is digested, accepted and executed is then the same bytes, whoever else may write to the public folder; files
    that are no part of it, such as compiled Python, are not copied.

    Args:
        folder: the public folder.
        home: folder of the party, which its owner alone may enter.

    Raises:
        SilodpError: as `Consortium.load`, or the folder changes while it is copied (code deploy.public).
    """
    digest = compute_digest(folder)
    copy = home / "agreed" / digest
    make_private_folder(home / "agreed")
    if not copy.exists() or compute_digest(copy) != digest:
        shutil.rmtree(copy, ignore_errors=True)
        for name, content in _read(folder):
            path = copy / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, content)
        if compute_digest(copy) != digest:
            raise _public_error(
                f"{folder} was changed while it was read", "repeat the command when nobody writes to it"
            )
    return Consortium.load(copy)


def format_digest(digest: str, digits: int = 32) -> str:
    """Return the first hexadecimal digits of a digest or key in groups of four, for a comparison by telephone."""
    return " ".join(digest[i : i + 4] for i in range(0, digits, 4))


def encode_json(content: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file that people may read."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def write_public(folder: Path, config_text: str, data: PublicData, spec: RunSpec) -> None:
    """Write the files of a new public folder that do not depend on keys."""
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / CONFIG, config_text.encode())
    write_durably(folder / DATA, encode_json(data.to_dict()))
    write_durably(folder / SPEC, spec.to_json().encode())
