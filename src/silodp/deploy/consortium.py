"""The public folder of a consortium: what all parties have agreed on, the same files everywhere.

    config.toml      the settings of the run; it names no file of a silo
    data.json        public facts of the data: silos, U, shapes, classes, features
    run_spec.json    the specification that follows from both; every party derives it again and compares the digest
    roster.json      address of the server, and every party's name and public key
    ca.pem           the certificate of the consortium's authority
    certificates/    NAME.pem for every party
    *.py             a model file, where the configuration names one
    users.txt        the public list of users, or identity.toml, the identity profile

One digest covers all files. Operators compare it by telephone, and a silo takes part only under a digest that its
operator has accepted.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.aggregators.run_spec import ModelSpec, RunSpec
from silodp.config.plugins import refuse_plugins
from silodp.config.schema import RunConfig, load_config
from silodp.data.public import PublicData
from silodp.errors import SilodpError, shorten
from silodp.runtime.prepare import prepare_run
from silodp.wire.store import make_private_folder, write_durably
from silodp.wire.transport import SERVER

if TYPE_CHECKING:
    from silodp.training.task import Task

CONFIG, DATA, SPEC, ROSTER, AUTHORITY = "config.toml", "data.json", "run_spec.json", "roster.json", "ca.pem"
CERTIFICATES = "certificates"
FORMAT = 1
"""Of roster.json."""
_NAME = re.compile(r"\w[\w .-]{0,99}")


@dataclass(frozen=True)
class Roster:
    """The parties of a consortium, in the public order of the silos.

    Attributes:
        host, port: of the server, as silos reach it.
        server: its Ed25519 public key, 32 bytes.
        silos: name → Ed25519 public key, 32 bytes.
        for_tests: whether the keys were made for a test on one machine.
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
        return json.dumps(fields, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> Roster:
        """Return the inverse of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: it is no roster of this format.
        """
        fields = json.loads(text)
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
        folder: its path.
        config: settings of the run.
        data: public facts of the data.
        roster: the parties; None before the coordinator has sealed the folder.
        digest: SHA-256 (hex) over the names and contents of all files.
    """

    folder: Path
    config: RunConfig
    data: PublicData
    roster: Roster | None
    digest: str

    @classmethod
    def load(cls, folder: Path) -> Consortium:
        """Read the folder.

        Raises:
            SilodpError: a file is missing, cannot be read, or names other silos than the others (code deploy.public).
        """
        try:
            data = PublicData.from_dict(json.loads((folder / DATA).read_bytes()))
            roster_file = folder / ROSTER
            roster = Roster.from_json(roster_file.read_bytes()) if roster_file.exists() else None
            digest = compute_digest(folder)
        except FileNotFoundError as error:
            raise SilodpError(
                f"{folder} has no file {Path(error.filename).name}: give the consortium's public folder, as 'silodp "
                "deploy init' writes it.",
                code="deploy.public",
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SilodpError(
                f"the public folder {folder} cannot be read ({type(error).__name__}: {error}): get it again from the "
                "coordinator.",
                code="deploy.public",
            ) from None
        if roster is not None and tuple(roster.silos) != data.silos:
            raise SilodpError(
                f"{folder / ROSTER} lists the silos {', '.join(roster.silos)}, and {DATA} {', '.join(data.silos)}: get "
                "the public folder again from the coordinator.",
                code="deploy.public",
            )
        for name in data.silos:
            check_party_name(name)
        with refuse_plugins("a consortium"):
            config = load_config(folder / CONFIG)
        consortium = cls(folder, config, data, roster, digest)
        consortium._check_paths()
        consortium._check_facts()
        return consortium

    def _check_facts(self) -> None:
        """Refuse facts of the data that are not those of the configuration, by which a silo reads its table."""
        declared = self.config.public_data()
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
                raise SilodpError(
                    f"{self.folder / DATA} states {field} = {shorten(stated)}, and {CONFIG} leads to "
                    f"{shorten(expected)}: get the public folder again from the coordinator.",
                    code="deploy.public",
                    field=field,
                )

    def _check_paths(self) -> None:
        """Refuse a configuration that names a file outside the folder: it would not be covered by the digest."""
        _, arguments = self.config.resolve_data()
        schema, task = arguments.get("schema"), self.config.task_section
        named = [getattr(schema, field, None) for field in ("users", "identity")]
        references = [task.model, task.loss, *(task.metrics or ())]
        named += [name.rpartition(":")[0] for name in references if name is not None and ".py:" in name]
        home = self.folder.resolve()
        for path in named:
            if isinstance(path, str | Path) and not Path(path).resolve().is_relative_to(home):
                raise SilodpError(
                    f"{self.folder / CONFIG} names {path}, which is not in the public folder: the coordinator writes "
                    "the folder with 'silodp deploy init'.",
                    code="deploy.public",
                )

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
        try:
            model = ModelSpec(**self._stated["model"])
        except (KeyError, TypeError) as error:
            raise self._unreadable() from error
        return self._compared(derive_spec(self.config, self.data, model))

    @cached_property
    def task(self) -> Task:
        """The model, its loss and its metrics; a model file of the folder is executed."""
        return self.config.task(self.data)

    @cached_property
    def spec(self) -> RunSpec:
        """The specification of the run, with the model that is trained here.

        Raises:
            SilodpError: it is not the one that the folder states: this version, or a model file, differs
                (code deploy.spec).
        """
        return self._compared(derive_spec(self.config, self.data, self.task))

    @cached_property
    def _stated(self) -> dict[str, Any]:
        try:
            stated = json.loads((self.folder / SPEC).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise self._unreadable() from error
        if not isinstance(stated, dict):
            raise self._unreadable()
        return stated

    def _unreadable(self) -> SilodpError:
        return SilodpError(
            f"{self.folder / SPEC} cannot be read: get the public folder again from the coordinator.",
            code="deploy.public",
        )

    def _compared(self, spec: RunSpec) -> RunSpec:
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


def derive_spec(config: RunConfig, data: PublicData, task: Task | ModelSpec) -> RunSpec:
    """Return the specification of a configured run of these data; no data file is opened.

    Raises:
        SilodpError: it cannot be run.
    """
    return prepare_run(data, task, config.method(), **config.settings())


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
    """Return the SHA-256 (hex) over the names and contents of all files of a public folder (see `_read_files`)."""
    return _digest_files(_read_files(folder))


def _read_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a public folder and its subfolders by name.

    Files and folders whose names begin with a dot, and what Python leaves, are no part of it: operating systems make
    them.
    """
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not any(part.startswith(".") or part == "__pycache__" for part in name.split("/")):
            found[name] = path.read_bytes()
    return found


def _digest_files(files: Mapping[str, bytes]) -> str:
    state = hashlib.sha256()
    for name, content in files.items():
        state.update(json.dumps([name, hashlib.sha256(content).hexdigest()]).encode() + b"\n")
    return state.hexdigest()


def take_copy(folder: Path, home: Path) -> Consortium:
    """Copy the public folder into a party's own folder, and load the copy.

    What is digested, accepted and executed is then the same bytes, whoever else may write to the public folder; files
    that are no part of it, such as compiled Python, are not copied.

    Args:
        folder: the public folder.
        home: folder of the party, which its owner alone may enter.

    Raises:
        SilodpError: as `Consortium.load`.
    """
    files = _read_files(folder)
    copy = home / "agreed" / _digest_files(files)
    if copy.exists() and compute_digest(copy) != copy.name:
        shutil.rmtree(copy)
    make_private_folder(home / "agreed")
    for name, content in files.items():
        path = copy / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, content)
    shutil.rmtree(copy / "__pycache__", ignore_errors=True)
    return Consortium.load(copy)


def format_digest(digest: str) -> str:
    """Return the first 128 bits of a digest in eight groups of four characters."""
    return " ".join(digest[i : i + 4] for i in range(0, 32, 4))


def write_public(folder: Path, config_text: str, data: PublicData, spec: RunSpec) -> None:
    """Write the files of a new public folder that do not depend on keys."""
    facts: dict[str, Any] = data.to_dict()
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / CONFIG, config_text.encode())
    write_durably(folder / DATA, (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode())
    write_durably(folder / SPEC, spec.to_json().encode())
