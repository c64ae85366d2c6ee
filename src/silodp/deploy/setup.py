"""How a consortium is set up: the public folder, keys at every party, the seal of the coordinator, acceptance."""

from __future__ import annotations

import ipaddress
import math
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from silodp.aggregators.run_spec import RunSpec
from silodp.config.plugins import is_reference, split_reference
from silodp.config.resolve import ResolvedRun, resolve
from silodp.config.schema import RunConfig
from silodp.crypto.keys import Identity
from silodp.data.federation import Federation
from silodp.data.identity.linkage import find_key_doubts
from silodp.data.public import PublicData
from silodp.data.tables.schema import Schema, normalize_key
from silodp.deploy import IDENTITY, LOCK, POLICY, TLS_KEY
from silodp.deploy.certificates import Authority, make_request
from silodp.deploy.consortium import (
    AUTHORITY,
    CERTIFICATES,
    ROSTER,
    Consortium,
    Roster,
    check_party_name,
    encode_json,
    format_digest,
    write_public,
)
from silodp.deploy.history import PersonKey
from silodp.deploy.lifetime import compute_lifetime_cost
from silodp.deploy.policy import Policy, accept_digest
from silodp.deploy.records import check_index, save_records
from silodp.deploy.silo import check_participation, find_name, save_identity
from silodp.errors import SilodpError
from silodp.methods.base import supports_separate
from silodp.parsing import UNSOUND, parse_json
from silodp.runtime.guarantees import derive_guarantees, plan_charges
from silodp.runtime.run_directory import hold_lock
from silodp.text import shorten
from silodp.wire.files import PRIVATE_FILE, make_private_folder, write_durably
from silodp.wire.transport import SERVER

REQUEST_ENDING = ".request.json"
_AUTHORITY_KEY = "authority.key"
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def draft_public(resolved: ResolvedRun, folder: Path, data: PublicData) -> RunSpec:
    """Write a public folder without keys.

    Args:
        resolved: The run as configured.
        folder: The folder to write, which must be empty.
        data: Public facts of the data; U must be known.

    Returns:
        The specification of the run.

    Raises:
        SilodpError: The folder is not empty, U is not known, or the run cannot be made.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SilodpError(
            f"{folder} is not empty: choose another folder with --out.", code="run.exists", field="out"
        )
    if data.users is None:
        raise SilodpError(
            "the number of persons U is not known: set data.schema.users to a public list of users, or "
            "data.schema.identity to an identity profile.",
            code="argument.missing",
            field="users",
        )
    for name in data.silos:
        check_party_name(name)
    if resolved.config.separate is None and supports_separate(type(resolved.method)):
        # The server of a deployment is somebody else, who may choose models for an attack.
        resolved = resolve(resolved.config.model_copy(update={"separate": True}))
    spec = resolved.prepare(data, resolved.build_task(data))
    if resolved.config.data["source"] == "tables":
        _check_held_out(resolved, check_index(resolved, spec))
        _check_budgets(resolved, data)
    draft = folder.with_name(folder.name + ".partial")  # renamed when all files are there
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        write_public(draft, _without_private_paths(resolved, draft).to_toml(), data, spec)
        Consortium.load(draft)  # what every party would refuse is refused here
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return spec


def find_list_doubts(resolved: ResolvedRun) -> list[str]:
    """Return sentences where keys of the public list of users may be two spellings of one person, or name none."""
    schema = resolved.table_schema
    listed = None if schema is None else schema.read_users()
    return find_key_doubts({"data.schema.users": dict.fromkeys(map(normalize_key, listed or ()), 1)})


def _check_held_out(resolved: ResolvedRun, schema: Schema) -> None:
    """Refuse an evaluation across silos where no rule says which records of a table are held out."""
    evaluation = resolved.evaluation
    if evaluation is None or evaluation.across == "none":
        return
    if schema.split is None and schema.test_share is None:
        raise SilodpError(
            "evaluation across silos needs a public rule for held-out records: set data.schema.test_share (whole "
            "persons, the same in every silo) or data.schema.split (a column).",
            code="evaluation.no_records",
            field="evaluation.across",
        )


def _check_budgets(resolved: ResolvedRun, data: PublicData) -> None:
    """Refuse budgets of records that are drawn: the draw goes over the records of all silos, which nobody has."""
    budgets = resolved.budget_distribution
    if budgets is not None and budgets.unit == "record" and data.silo_budgets is None:
        raise SilodpError(
            "[budgets] draws privacy budgets over the records of all silos, and in a deployment nobody has these "
            "together: take [budgets] out, and name a column of budgets in the silos' tables (data.schema.budget).",
            code="data.budgets",
            field="budgets",
        )


def _without_private_paths(resolved: ResolvedRun, folder: Path) -> RunConfig:
    """Return the configuration with no path of a silo's data, and copy the public list of users beside it."""
    config = resolved.config
    data = {key: value for key, value in config.data.items() if key != "root"}
    if "files" in data:
        data["files"] = {name: f"{name}.csv" for name in resolved.silos}
    schema = data.get("schema")
    for field, name in (("users", "users.txt"), ("identity", "identity.toml")):
        if isinstance(schema, dict) and isinstance(schema.get(field), str):
            shutil.copyfile(schema[field], folder / name)
            schema = data["schema"] = {**schema, field: name}
    task = config.task
    copied = {field: _copy_code(getattr(task, field), folder) for field in ("model", "loss")}
    metrics = None if task.metrics is None else tuple(str(_copy_code(name, folder)) for name in task.metrics)
    task = task.model_copy(update={**copied, "metrics": metrics})
    return config.model_copy(update={"data": data, "task": task})


def _copy_code(reference: str | None, folder: Path) -> str | None:
    """Copy the file of a reference "file.py:name" into the folder, and return the reference to the copy."""
    if reference is None or not (is_reference(reference) and split_reference(reference)[0].endswith(".py")):
        return reference
    place, name = split_reference(reference)
    path = Path(place)
    copy = folder / path.name
    if copy.exists() and copy.read_bytes() != path.read_bytes():
        raise SilodpError(
            f"{path} and another file with code have the same name, and both would be copied: rename one of them.",
            code="argument.conflict",
            field="task",
        )
    shutil.copyfile(path, copy)
    return f"{path.name}:{name}"


def make_keys(folder: Path, name: str, *, again: bool = False) -> Path:
    """Make the keys of a party in its own folder, and a request for the coordinator.

    Args:
        folder: Folder of the party. Where it does not exist, it is made for its owner alone.
        name: Name of the silo in the public description of the data, or "server".
        again: Whether new keys replace those in the folder. Its ledgers and all other files stay.

    Returns:
        The path of the request, the only file that leaves the party. It holds public keys.

    Raises:
        SilodpError: There are keys already (code deploy.key), or with `again` none, or a process uses them (code
            run.in_use).
    """
    if name != SERVER:
        check_party_name(name)
    path, has_keys = folder / f"{name}{REQUEST_ENDING}", (folder / IDENTITY).exists()
    if again and not has_keys:
        raise SilodpError(
            f"{folder} has no keys to replace: give the party's one folder, which has its ledgers, and without a key "
            "there leave --again out.",
            code="deploy.key",
        )
    make_private_folder(folder)
    # Never advise another folder: it has no ledgers, so what earlier runs have spent would not be counted.
    if has_keys and not again:
        raise SilodpError(
            f"{folder} has keys, which serve for every run: send the coordinator {path} again; if the keys were lost "
            "or others know them, 'silodp deploy keys --again' replaces them, and the ledgers in the folder stay.",
            code="deploy.key",
        )
    with hold_lock(folder / LOCK, folder):
        identity = Identity.fresh(name)
        key, request = make_request(name)
        save_identity(folder, identity)
        write_durably(folder / TLS_KEY, key, PRIVATE_FILE)
        content = {"name": name, "identity": identity.public.hex(), "certificate_request": request.decode()}
        write_durably(path, encode_json(content))
    return path


def copy_requests(earlier: Path, later: Path, silos: Iterable[str]) -> list[str]:
    """Copy the requests of the parties of an earlier consortium that take part in a new one: their keys stay.

    Args:
        earlier: The folder with the earlier requests.
        later: The folder of the new requests; it is made where it does not exist.
        silos: Names of the silos of the new consortium.

    Returns:
        The parties, the server included, that still have to send a request.

    Raises:
        SilodpError: An earlier request is damaged (code deploy.request).
    """
    names, found = (SERVER, *silos), _read_requests(earlier)
    if SERVER not in found:
        raise SilodpError(
            f"{earlier} has no request of the server: give the folder of an earlier consortium, with requests/.",
            code="deploy.request",
            field="after",
        )
    later.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name in found:
            write_durably(later / f"{name}{REQUEST_ENDING}", encode_json(found[name]))
    return [name for name in names if name not in found]


def seal_public(
    folder: Path,
    requests: Path,
    private: Path,
    host: str,
    port: int,
    *,
    for_tests: bool = False,
    again: bool = False,
) -> Consortium:
    """Sign the requests of all parties, and write roster and certificates into the public folder.

    Args:
        folder: The public folder.
        requests: The folder with the request of every silo and of the server.
        private: The folder of the coordinator, where the authority's key is kept.
        host: Name or address of the server, as silos reach it.
        port: Port of the server, 1 to 65535.
        for_tests: Whether the keys of all parties were made on one machine.
        again: Whether a sealed folder is sealed anew. Its authority stays.

    Returns:
        The sealed folder.

    Raises:
        SilodpError: A request is missing, damaged, or of no silo (code deploy.request), or the folder is sealed (code
            deploy.sealed).
    """
    if not _is_host(host) or not 1 <= port <= 65535:
        raise SilodpError(
            f"host = {shorten(host)}, port = {port}: give a name in ASCII or an IP address, without brackets and port, "
            "and a port from 1 to 65535.",
            code="argument.value",
            field="host",
        )
    consortium = Consortium.load(folder)
    if consortium.roster is not None and not again:
        raise SilodpError(
            f"{folder} is sealed: parties that have accepted it would have to accept it again; with --again it is "
            "sealed anew.",
            code="deploy.sealed",
            field="again",
        )
    names = (*consortium.data.silos, SERVER)
    found = _read_requests(requests)
    if set(found) != set(names):
        missing, unknown = sorted(set(names) - set(found)), sorted(set(found) - set(names))
        raise SilodpError(
            f"{requests} should hold one request for each of {', '.join(names)}"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; not expected: {', '.join(unknown)}" if unknown else "")
            + ".",
            code="deploy.request",
        )
    keys = {name: bytes.fromhex(found[name]["identity"]) for name in names}
    if len(set(keys.values())) < len(keys):
        raise SilodpError(
            f"two requests in {requests} have the same key: every party makes its own with 'silodp deploy keys'.",
            code="deploy.request",
        )
    make_private_folder(private)
    authority = _get_authority(folder / AUTHORITY, private / _AUTHORITY_KEY, consortium.resolved.config.name)
    (folder / CERTIFICATES).mkdir(exist_ok=True)
    for name in names:
        hosts = tuple(dict.fromkeys((host, "localhost", "127.0.0.1"))) if name == SERVER else ()
        certificate = authority.sign(found[name]["certificate_request"].encode(), name, hosts)
        write_durably(consortium.certificate(name), certificate)
    roster = Roster(host, port, keys[SERVER], {name: keys[name] for name in consortium.data.silos}, for_tests)
    write_durably(folder / ROSTER, roster.to_json().encode())
    return Consortium.load(folder)


def _is_host(text: str) -> bool:
    """Return whether a text is a name in ASCII, or an IP address that means the same on every machine."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return _HOST.fullmatch(text) is not None
    return getattr(address, "scope_id", None) is None


def _get_authority(certificate: Path, key: Path, name: str) -> Authority:
    """Return the authority of a consortium: made by the first seal, and renewed by a later one if it ends too early."""
    if certificate.exists() or key.exists():
        authority = Authority.load(certificate, key).renew()
    else:
        authority = Authority.fresh(name)
        write_durably(key, authority.key, PRIVATE_FILE)
    write_durably(certificate, authority.certificate)
    return authority


def _read_requests(folder: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob(f"*{REQUEST_ENDING}")):
        try:
            stated = parse_json(path.read_bytes())
            request = {key: str(stated[key]) for key in ("name", "identity", "certificate_request")}
            if len(bytes.fromhex(request["identity"])) != 32 or request["name"] in found:
                raise ValueError
        except (OSError, *UNSOUND):
            raise SilodpError(
                f"{path} is no request, or the second one of its party: ask the party to run 'silodp deploy keys'.",
                code="deploy.request",
            ) from None
        found[request["name"]] = request
    return found


def describe_agreement(consortium: Consortium) -> dict[str, Any]:
    """Return what an operator accepts, JSON-ready: method, unit, ε of the whole run, columns, model, parties."""
    spec, roster = consortium.stated_spec, consortium.sealed
    derived = derive_guarantees(spec, plan_charges(spec, spec.accountant))
    all_answer = spec.min_silos == len(spec.names)
    schema = consortium.resolved.table_schema
    persons = PersonKey.of(consortium)
    profile = None if schema is None else schema.read_identity()
    # A method with one bounded row per silo computes no person; sums of counts do.
    computes_persons = supports_separate(type(spec.method)) or spec.charged_evaluation
    return {
        "name": consortium.resolved.config.name,
        "method": spec.method.name,
        "settings": describe_settings(spec.method),
        "assumptions": [*spec.method.assumptions, *spec.aggregator.assumptions],
        "unit": spec.method.unit,
        "aggregator": spec.aggregator.name,
        "aggregation": describe_settings(spec.aggregator),
        "rounds": spec.rounds,
        "delta": spec.delta,
        "epsilon": {a: one.cost.epsilon if all_answer else one.any_dropouts for a, one in derived.items()},
        "budget": None if spec.budget is None else asdict(spec.budget),
        "separate": spec.separate if computes_persons else None,
        "evaluation": None if spec.evaluation is None else spec.evaluation.across,
        "evaluations": spec.evaluations,
        "columns": list(spec.data.features),
        "labels": list(consortium.labels),
        "references": {
            field: reference.removeprefix(f"{consortium.folder.resolve()}/")
            for field, reference in consortium.references.items()
        },
        "files": {name: asdict(file) for name, file in consortium.other_files.items()},
        "mappings": {} if schema is None else {silo: asdict(one) for silo, one in schema.silos.items()},
        "users": spec.data.users,
        "persons": {
            **asdict(persons),
            "digest": persons.digest,
            "profile": None if profile is None else {"study": profile.study, "code": profile.agreement_code},
        },
        "model": {"size": spec.model.size, "architecture": spec.model.architecture, "loss": spec.model.loss},
        "server": {"address": roster.address, "key": format_key(roster.server)},
        "silos": {name: format_key(key) for name, key in roster.silos.items()},
        "visibility": [
            {"party": one.party, "sees": one.sees, "not_seen": one.not_seen}
            for one in spec.aggregator.visibility
        ],
        "secret": spec.is_secret,
        "for_tests": roster.for_tests,
        "digest": consortium.digest,
        "code": consortium.code,
    }


def describe_settings(part: Any) -> dict[str, str]:
    """Return the settings of a method, an aggregator or a part of one, by name, as text.

    Settings that are None are left out, and those that an agreement states elsewhere (name, unit, needs_counts).
    """
    found = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if value is None or not field.compare or field.name in ("name", "unit", "needs_counts"):
            continue
        if is_dataclass(value):
            text = ", ".join(f"{name} {inner}" for name, inner in describe_settings(value).items())
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value)
        found[field.name.replace("_", " ")] = text
    return found


def format_key(key: bytes) -> str:
    """Return the first 64 bits of a public key in groups of four hexadecimal digits."""
    return format_digest(key.hex(), 16)


def accept(
    folder: Path,
    consortium: Consortium,
    data: str,
    lifetime_epsilon: float | None = None,
    *,
    index: str = "",
    allow_counts: bool = False,
    allow_seed: bool = False,
) -> Policy:
    """Write the policy of a silo, or add the digest to the one that is there.

    Args:
        folder: Folder of the silo.
        consortium: The public folder, whose digest the operator has compared.
        data: Path of the file with the silo's records.
        lifetime_epsilon: For a new policy, the largest ε against each adversary that all runs together may spend, at
            the run's δ; None: as much as this run needs.
        index: Path of the file by which a trust center numbers the silo's persons, where the run needs one.
        allow_counts: Whether the run may ask for the number of records of each person in clear.
        allow_seed: For tests: whether the run may have a seed.

    Returns:
        The policy that was written.

    Raises:
        SilodpError: The roster does not list the silo's key, the policy does not allow the run, or a person is
            somebody else in it than in earlier runs of the folder (code policy.persons).
    """
    name = find_name(folder, consortium)
    path = folder / POLICY
    if path.exists():
        if lifetime_epsilon is not None:
            raise SilodpError(
                f"{path} has limits already, which hold for all runs together: change lifetime_epsilon there, and "
                "leave the option out.",
                code="argument.conflict",
                field="lifetime_epsilon",
            )
        policy = Policy.load(path)
        digests = [*policy.accepted, *({consortium.digest} - set(policy.accepted))]
        changes = {"accepted": digests, "data": data, "index": index}
        policy = policy.model_copy(update=changes | {"allow_counts": policy.allow_counts or allow_counts})
    else:
        spec = consortium.stated_spec
        needed = compute_lifetime_cost(spec, name, spec.delta)
        policy = Policy(
            accepted=[consortium.digest],
            data=data,
            index=index,
            delta=spec.delta,
            lifetime_epsilon={
                adversary: _round_up(e) if lifetime_epsilon is None else lifetime_epsilon
                for adversary, e in needed.items()
            },
            methods=[spec.method.name],
            aggregators=[spec.aggregator.name],
            evaluation=["none" if spec.evaluation is None else spec.evaluation.across],
            columns=list(spec.data.features),
            labels=list(consortium.labels),
            allow_counts=allow_counts,
            require_separate=spec.separate,
            min_silos=spec.min_silos,
            allow_seed=allow_seed,
        )
    check_participation(folder, consortium, policy)
    write_durably(path, policy.to_toml().encode(), PRIVATE_FILE)
    return policy


def _round_up(epsilon: float) -> float:
    """Return ε with four digits after the point, not below the value."""
    return math.ceil(epsilon * 10_000 + 1e-6) / 10_000


def make_local(resolved: ResolvedRun, federation: Federation, folder: Path, port: int) -> Consortium:
    """Make a whole consortium on one machine, with the keys of all parties: for tests.

    Args:
        resolved: The run as configured.
        federation: The records of all silos, which are written to the folders of the silos.
        folder: The folder to write, with public/, server/ and silos/NAME/.
        port: Port of the server on 127.0.0.1.
    """
    data = federation.public(with_records=resolved.method.unit == "record")
    draft_public(resolved, folder / "public", data)
    requests = folder / "requests"
    requests.mkdir(parents=True)
    homes = {SERVER: folder / SERVER, **{name: folder / "silos" / name for name in data.silos}}
    for name, home in homes.items():
        shutil.copy(make_keys(home, name), requests)
    consortium = seal_public(
        folder / "public", requests, folder / "coordinator", "127.0.0.1", port, for_tests=True
    )
    accept_digest(homes[SERVER], consortium.digest)
    needs_counts = consortium.stated_spec.method.needs_counts
    for silo in federation.silos:
        home = homes[silo.name]
        save_records(home / "records.npz", silo)
        accept(
            home,
            consortium,
            "records.npz",
            allow_counts=needs_counts,
            allow_seed=consortium.resolved.config.seed is not None,
        )
    return consortium
