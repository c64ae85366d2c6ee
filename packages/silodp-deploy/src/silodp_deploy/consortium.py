"""The public folder of a consortium: what all parties have agreed on, the same files everywhere.

    config.toml      the settings of the run; it names no file of a silo
    data.json        public facts of the data: silos, U, shapes, classes, features
    run_spec.json    the specification that follows from both; every party derives it again and compares the digest
    roster.json      address of the server, and every party's name and public key
    *.py             a model file, where the configuration names one
    users.txt        the public list of users, or identity.toml, the identity profile
    ca.pem           the certificate of the consortium's authority
    certificates/    NAME.pem for every party

One digest covers all files but the certificates, whose keys are in the roster: a certificate ends, and can be renewed
while a run is in progress. Operators compare it by telephone, and a party takes part only under a digest that its
operator has accepted. Before that no code of the folder is run, and nothing outside it is read: it has no links, its
size is bounded, and only the model, the loss and the metrics may be code.
"""

from __future__ import annotations

import ipaddress
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field

from silodp.aggregators.run_spec import FORMAT as SPEC_FORMAT
from silodp.aggregators.run_spec import ModelSpec, RunSpec
from silodp.config.resolve import ResolvedRun, load_config
from silodp.data.persons import PersonKey
from silodp.data.public import PublicData
from silodp.data.tables.columns import TableMapping
from silodp.errors import SilodpError
from silodp.parsing import MALFORMED, explain_malformed, is_format, parse_json
from silodp.plugins import is_reference, refuse_plugins, split_reference
from silodp.text import shorten
from silodp.wire.files import make_private_folder, write_durably
from silodp.wire.transport import SERVER
from silodp_deploy import public_files
from silodp_deploy.certificates import AUTHORITY_NAME, renew_copy
from silodp_deploy.public_files import PublicFile, read_facts, refuse_public

if TYPE_CHECKING:
    from silodp.training.task import Task

CONFIG, DATA, SPEC, ROSTER = "config.toml", "data.json", "run_spec.json", "roster.json"
FORMAT = 1
"""Of roster.json."""
_NAME = re.compile(r"\w[\w .-]{0,99}")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_NO_CODE = (
    "only the model, the loss and the metrics of a deployment ([task]) may be code outside silodp: choose one of "
    "silodp's here"
)
_CODE_MODULES = ("silodp.training.losses", "silodp.training.metrics", "silodp.training.models", "torch.nn")
"""Modules that a reference may name. What they define reads no file, and starts and imports nothing."""
# Facts that are in data.json and follow from config.toml too: by them a silo reads its table.
_FACTS = (
    "silos",
    "users",
    "record_shape",
    "inputs",
    "labels",
    "label_shape",
    "classes",
    "features",
    "identity_digest",
)


@dataclass(frozen=True)
class Roster:
    """The parties of a consortium, in the public order of the silos.

    Attributes:
        host, port: Address of the server, as silos reach it.
        server: Ed25519 public key of the server, 32 bytes.
        silos: Ed25519 public keys of the silos by name, 32 bytes each.
        authority: SHA-256 of the public key of the authority that signs certificates (RFC 5280, subjectPublicKeyInfo).
        tls: The same of the TLS keys of all parties by name, the server included.
        for_tests: Whether the keys were made for a test on one machine.
    """

    host: str
    port: int
    server: bytes
    silos: Mapping[str, bytes]
    authority: bytes
    tls: Mapping[str, bytes]
    for_tests: bool = False

    @property
    def address(self) -> str:
        """HOST:PORT of the server; an IPv6 address is in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Address of the server for silos that connect over HTTPS."""
        return f"https://{self.address}"

    def to_json(self) -> bytes:
        """Return the content of roster.json."""
        return public_files.encode_json({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: bytes) -> Roster:
        """Return the inverse of `to_json`.

        Raises:
            ValueError: It is no roster of this format.
        """
        stored = _StoredRoster.model_validate(parse_json(text))
        is_whole = is_host(stored.host) and set(stored.tls) == {SERVER, *stored.silos}
        if not is_whole or not is_format(stored.format, FORMAT):
            raise ValueError(f"no roster of format {FORMAT}")
        return cls(
            stored.host,
            stored.port,
            bytes.fromhex(stored.server),
            {name: bytes.fromhex(key) for name, key in stored.silos.items()},
            bytes.fromhex(stored.authority),
            {name: bytes.fromhex(key) for name, key in stored.tls.items()},
            stored.for_tests,
        )


_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _StoredRoster(BaseModel, strict=True, extra="forbid"):
    """The entries of roster.json; strict, so that true is no number."""

    format: int
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    server: _Hex
    silos: dict[str, _Hex]
    authority: _Hex
    tls: dict[str, _Hex]
    for_tests: bool


@dataclass(frozen=True)
class Consortium:
    """The public folder of a consortium, read.

    Attributes:
        folder: Path of the folder.
        resolved: The run as config.toml describes it.
        data: Public facts of the data.
        roster: The parties; None before the coordinator has sealed the folder.
        files: All files by name, as the digest covers them.
        source: The folder that `folder` is a copy of, where renewed certificates come to lie; None: `folder` itself.
    """

    folder: Path
    resolved: ResolvedRun
    data: PublicData
    roster: Roster | None
    files: Mapping[str, PublicFile]
    source: Path | None = None

    @classmethod
    def load(cls, folder: Path) -> Consortium:
        """Read the folder; none of its code is run, and no file outside it is read.

        Raises:
            SilodpError: A file is missing, cannot be read, or names other silos than the others; the folder has a link,
                or is too large; or the configuration names a file outside it (code deploy.public), or code where a
                deployment takes none (code report.foreign_code).
        """
        files = public_files.list_files(folder)
        if f"public/{DATA}" in files:
            raise refuse_public(
                f"{folder} has another public folder in it, which was copied into one that was there",
                "delete the folder, and copy it again",
            )
        try:
            data = PublicData.from_dict(parse_json(read_facts(folder / DATA)))
            roster = Roster.from_json(read_facts(folder / ROSTER)) if ROSTER in files else None
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            raise refuse_public(f"{folder} has no file {missing}", public_files.GIVE_FOLDER) from None
        except MALFORMED as error:
            reason = explain_malformed(error)
            raise refuse_public(f"the public folder {folder} cannot be read ({reason})") from None
        if roster is not None and tuple(roster.silos) != data.silos:
            raise refuse_public(
                f"{folder / ROSTER} lists the silos {', '.join(roster.silos)}, and {DATA} {', '.join(data.silos)}"
            )
        # A name becomes a path (certificates, folders): it is checked before anything is opened by it.
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
        for field in _FACTS:
            stated, expected = getattr(self.data, field), getattr(declared, field)
            is_free = field == "users" and expected is None  # U is then stated in data.json alone
            if stated != expected and not is_free:
                raise refuse_public(
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
        if self.resolved.config.callbacks:
            raise refuse_public(
                f"{self.folder / CONFIG} has callbacks, which belong to one machine",
                "take them out; 'silodp server --log' logs the rounds",
                "callbacks",
            )
        for field, reference in self.references.items():
            place, name = split_reference(reference)
            # No dots and no leading underscore: neither attributes of attributes nor internals of a module.
            is_known = place in _CODE_MODULES and name.isidentifier() and not name.startswith("_")
            if not (self._has_file(Path(place)) if place.endswith(".py") else is_known):
                remedy = (
                    "put the code into a .py file, which 'silodp deploy init' copies, or take it from "
                    f"{', '.join(_CODE_MODULES)}"
                )
                raise self._coverage_error(field, reference, remedy)

    def _has_file(self, path: Path) -> bool:
        """Return whether a file is one that the digest covers."""
        # Resolved first, so that ".." and links cannot lead out of the folder.
        home, found = self.folder.resolve(), path.resolve()
        return found.is_relative_to(home) and found.relative_to(home).as_posix() in self.files

    def _coverage_error(self, field: str, value: str, remedy: str) -> SilodpError:
        problem = (
            f"{self.folder / CONFIG} has {field} = {shorten(value)}, which is no file of the public folder"
        )
        return refuse_public(problem, remedy, field)

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
        return {name: file for name, file in self.files.items() if name not in (CONFIG, DATA, SPEC, ROSTER)}

    def list_columns(self, silo: str) -> dict[str, list[str]]:
        """Return what the run reads of a silo's table, by the names and texts of that table.

        The configuration may call a column of this table by the name of another one (`data.schema.silos`), so its own
        names say nothing to the silo.

        Args:
            silo: Name of the silo; "" for the names of the configuration.

        Returns:
            By field of the policy: "columns" (features, and the column of the split), "labels" (the label, or event and
            time), "budget", and "queries" (the text by which the table is read from a database); where no schema names
            columns, only the features of data.json.
        """
        schema = self.resolved.table_schema
        if schema is None:
            return {"columns": list(self.data.features), "labels": [], "budget": [], "queries": []}
        names, query = schema.name_columns(silo), schema.silos.get(silo, TableMapping()).query

        def name(*columns: str | None) -> list[str]:
            return [names[column] for column in columns if column is not None]

        return {
            "columns": [*schema.name_features(silo), *name(schema.split)],
            "labels": name(*schema.label_columns, schema.event, schema.time),
            "budget": name(schema.budget),
            "queries": [] if query is None else [query],
        }

    def identify_persons(self, silo: str | None) -> PersonKey:
        """Return how records of a silo's table are assigned to persons; None: as the configuration names the column."""
        source = str(self.resolved.config.data["source"])
        return PersonKey.of(self.resolved.table_schema, source, self.data.users, silo)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over the names and contents of all files."""
        return public_files.digest_files(self.files)

    @property
    def code(self) -> str:
        """The digest in groups, for a comparison by telephone."""
        return public_files.format_digest(self.digest)

    @property
    def sealed(self) -> Roster:
        """The roster.

        Raises:
            SilodpError: The folder is not sealed yet (code deploy.not_sealed).
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
            SilodpError: Settings, data and model of the folder lead to another one (code deploy.spec).
        """
        spec = self._derive_stated(self._stated[1])
        # Its digest would do for programs; people read the rest.
        if self._stated[0] != parse_json(spec.to_json()):
            raise refuse_public(
                f"{self.folder / SPEC} states other settings than {CONFIG} leads to, under the digest of these"
            )
        return spec

    @cached_property
    def task(self) -> Task:
        """The model, its loss and its metrics; a model file of the folder is executed, so it must be accepted."""
        with refuse_plugins(_NO_CODE, but=self.references.values()):
            return self.resolved.build_task(self.data)

    @cached_property
    def spec(self) -> RunSpec:
        """The specification of the run, with the model that is trained here.

        Raises:
            SilodpError: It is not the one that the folder states: this version, or a model file, differs
                (code deploy.spec).
        """
        return self._derive_stated(self.task)

    @cached_property
    def _stated(self) -> tuple[dict[str, Any], ModelSpec]:
        """Everything that run_spec.json states, and the model of it."""
        try:
            stated = parse_json(read_facts(self.folder / SPEC))
            if not is_format(stated["format"], SPEC_FORMAT):
                raise ValueError("format")
            other_code = bool(stated.get("other_code", False))
            return stated, ModelSpec(**stated["model"], other_code=other_code)
        except (OSError, *MALFORMED) as error:
            raise refuse_public(f"{self.folder / SPEC} cannot be read") from error

    def _derive_stated(self, task: Task | ModelSpec) -> RunSpec:
        with refuse_plugins(_NO_CODE):
            spec = self.resolved.prepare(self.data, task)
        stated = str(self._stated[0].get("digest"))
        if spec.digest != stated:
            raise SilodpError(
                f"the run that follows here from {self.folder / CONFIG} has the digest {spec.digest[:16]}, and "
                f"{SPEC} states {stated[:16]}: install the version of silodp, and give the model the frozen values, "
                "the modes (train or eval) and the numbers in plain attributes, that the coordinator has.",
                code="deploy.spec",
            )
        return spec


def is_host(text: str) -> bool:
    """Return whether a text is a name in ASCII, or an IP address that means the same on every machine."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return _HOST.fullmatch(text) is not None
    # fe80::1%eth0 names an interface of one machine (RFC 4007, section 11).
    return getattr(address, "scope_id", None) is None


def check_party_name(name: str) -> None:
    """Refuse a silo's name that cannot be the name of a file, or is the server's.

    Raises:
        SilodpError: It is (code deploy.name).
    """
    if _NAME.fullmatch(name) is None or name in (SERVER, AUTHORITY_NAME):
        raise SilodpError(
            f"a silo is called {shorten(name)}: give it a name of letters, digits, spaces, '.', '-' and '_' that does "
            "not begin with a sign, other than 'server' and 'authority'.",
            code="deploy.name",
        )


def take_copy(folder: Path, home: Path) -> Consortium:
    """Copy the public folder into a party's own folder, and load the copy.

    What is digested, accepted and executed is then the same bytes, whoever else may write to the public folder; files
    that are no part of it, such as compiled Python, are not copied. The copy's certificates are those that end last.

    Args:
        folder: The public folder.
        home: Folder of the party, which its owner alone may enter.

    Raises:
        SilodpError: As `Consortium.load`, the folder changes while it is copied (code deploy.public), or a certificate
            is not for the key in the roster (code deploy.certificate).
    """
    # The folder may lie on a share that others write to: it is digested, copied, and the copy digested again.
    digest = public_files.compute_digest(folder)
    copy = home / "agreed" / digest
    make_private_folder(home / "agreed")
    if not copy.exists() or public_files.compute_digest(copy) != digest:
        shutil.rmtree(copy, ignore_errors=True)
        for name, content in public_files.read_files(folder):
            path = copy / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, content)
        if public_files.compute_digest(copy) != digest:
            raise refuse_public(
                f"{folder} was changed while it was read", "repeat the command when nobody writes to it"
            )
    consortium = Consortium.load(copy)
    if consortium.roster is not None:
        renew_copy(folder, copy, consortium.roster)
    return replace(consortium, source=folder)
