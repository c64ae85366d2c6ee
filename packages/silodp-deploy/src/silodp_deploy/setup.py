"""How a consortium is set up: the public folder, keys at every party, the seal of the coordinator, acceptance."""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from silodp.aggregators.run_spec import RunSpec
from silodp.config.resolve import ResolvedRun, resolve
from silodp.config.schema import RunConfig
from silodp.crypto.keys import Identity
from silodp.data.federation import Federation
from silodp.data.identity.linkage import list_key_warnings
from silodp.data.public import PublicData
from silodp.data.tables.schema import normalize_key
from silodp.errors import SilodpError, require
from silodp.methods.base import supports
from silodp.parsing import MALFORMED, parse_json
from silodp.plugins import is_reference, split_reference
from silodp.runtime.run_directory import hold_lock
from silodp.text import shorten
from silodp.wire.files import PRIVATE_FILE, make_private_folder, write_durably
from silodp.wire.transport import SERVER
from silodp_deploy import AUTHORITY, CERTIFICATES, IDENTITY, LOCK, TLS_KEY
from silodp_deploy.certificates import Authority, find_certificate, hash_request_key, make_request
from silodp_deploy.consortium import CONFIG, DATA, ROSTER, SPEC, Consortium, Roster, check_party_name, is_host
from silodp_deploy.policy import accept_digest
from silodp_deploy.public_files import encode_json

PUBLIC, REQUESTS = "public", "requests"
"""In the coordinator's folder: the public folder, and the requests that all parties have sent."""
REQUEST_ENDING = ".request.json"
_AUTHORITY_KEY = "authority.key"
_PORT = 8443


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
    # Names become paths of certificates and folders.
    for name in data.silos:
        check_party_name(name)
    if resolved.config.isolate_units is None and supports(type(resolved.method), "can_isolate_units"):
        # The server of a deployment is somebody else, who may choose models for an attack.
        resolved = resolve(resolved.config.model_copy(update={"isolate_units": True}))
    spec = resolved.prepare(data, resolved.build_task(data))
    if resolved.config.data["source"] == "tables":
        from silodp_deploy.records import check_index

        schema = check_index(resolved, spec)
        if resolved.evaluation is not None:
            resolved.evaluation.check_schema(schema)
        _check_budgets(resolved, data)
    # A folder that is half written would be sent to the parties as if it were whole.
    draft = folder.with_name(folder.name + ".partial")  # renamed when all files are there
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        write_durably(draft / CONFIG, _without_private_paths(resolved, draft).to_toml().encode())
        write_durably(draft / DATA, encode_json(data.to_dict()))
        write_durably(draft / SPEC, spec.to_json().encode())
        Consortium.load(draft)  # what every party would refuse is refused here
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return spec


def list_user_list_warnings(resolved: ResolvedRun) -> list[str]:
    """Return sentences where keys of the public list of users may be two spellings of one person, or name none."""
    schema = resolved.table_schema
    listed = None if schema is None else schema.read_users()
    return list_key_warnings({"data.schema.users": dict.fromkeys(map(normalize_key, listed or ()), 1)})


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
    # Paths at the coordinator say something about its machine, and no other party needs them.
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
    # Neither message advises another folder: it has no ledgers, so what earlier runs have spent would not be counted.
    require(
        has_keys or not again,
        f"{folder} has no keys to replace: give the party's one folder, which has its ledgers, and without a key "
        "there leave --again out.",
        code="deploy.key",
    )
    require(
        again or not has_keys,
        f"{folder} has keys, which serve for every run: send the coordinator {path} again; if the keys were lost or "
        "others know them, 'silodp deploy keys --again' replaces them, and the ledgers in the folder stay.",
        code="deploy.key",
    )
    make_private_folder(folder)
    from silodp_deploy.silo import save_identity  # with torch: what is refused above need not wait for it

    # No process may use the old key while it is replaced: its answers would not verify any more.
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
        earlier: The folder of the earlier consortium, with requests/.
        later: The folder of the new one, where requests/ is made if it is not there.
        silos: Names of the silos of the new consortium.

    Returns:
        The parties, the server included, that still have to send a request.

    Raises:
        SilodpError: An earlier request is damaged (code deploy.request).
    """
    names, found = (SERVER, *silos), _read_requests(earlier / REQUESTS)
    if SERVER not in found:
        raise _refuse_request(
            f"{earlier / REQUESTS} has no request of the server: give the folder of an earlier consortium, with "
            "requests/.",
            "after",
        )
    (later / REQUESTS).mkdir(parents=True, exist_ok=True)
    for name in names:
        if name in found:
            write_durably(later / REQUESTS / f"{name}{REQUEST_ENDING}", encode_json(found[name]))
    return [name for name in names if name not in found]


def seal_public(
    folder: Path,
    host: str | None,
    port: int | None = None,
    *,
    for_tests: bool = False,
    again: bool = False,
) -> Consortium:
    """Sign the requests of all parties, and write roster and certificates into the public folder.

    Sealed again from the same requests, for the same address, the digest stays: the certificates alone are new.

    Args:
        folder: Folder of the coordinator with public/, requests/ (of every silo and the server), and coordinator/,
            where the key of the authority is kept; the last one is made if it is not there.
        host: Name or address of the server, as silos reach it; None: that of the roster, with `again`.
        port: Port of the server, 1 to 65535; None: that of the roster, or 8443.
        for_tests: Whether the keys of all parties were made on one machine.
        again: Whether a sealed folder is sealed anew. Its authority stays.

    Returns:
        The sealed folder.

    Raises:
        SilodpError: A request is missing, damaged, or of no silo (code deploy.request), or the folder is sealed (code
            deploy.sealed).
    """
    public, requests, private = folder / PUBLIC, folder / REQUESTS, folder / "coordinator"
    consortium = Consortium.load(public)
    earlier = consortium.roster
    if earlier is not None:
        host, port = host or earlier.host, earlier.port if port is None else port
        for_tests = for_tests or earlier.for_tests
    if host is None:
        raise SilodpError(
            "the folder is sealed for the first time: give the name or address of the server with --host.",
            code="argument.missing",
            field="host",
        )
    port = _PORT if port is None else port
    if not is_host(host) or not 1 <= port <= 65535:
        raise SilodpError(
            f"host = {shorten(host)}, port = {port}: give a name in ASCII or an IP address, without brackets and port, "
            "and a port from 1 to 65535.",
            code="argument.value",
            field="host",
        )
    if earlier is not None and not again:
        raise SilodpError(
            f"{public} is sealed: parties that have accepted it would have to accept it again; with --again it is "
            "sealed anew.",
            code="deploy.sealed",
            field="again",
        )
    names = (*consortium.data.silos, SERVER)
    found = _read_requests(requests)
    if set(found) != set(names):
        missing, unknown = sorted(set(names) - set(found)), sorted(set(found) - set(names))
        raise _refuse_request(
            f"{requests} should hold one request for each of {', '.join(names)}"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; not expected: {', '.join(unknown)}" if unknown else "")
            + ".",
        )
    # One key for two parties would let one of them answer for both.
    keys = {name: bytes.fromhex(found[name]["identity"]) for name in names}
    if len(set(keys.values())) < len(keys):
        raise _refuse_request(
            f"two requests in {requests} have the same key: every party makes its own with 'silodp deploy keys'.",
        )
    make_private_folder(private)
    authority = _get_authority(public / AUTHORITY, private / _AUTHORITY_KEY, consortium.resolved.config.name)
    (public / CERTIFICATES).mkdir(exist_ok=True)
    for name in names:
        # Silos of a test, and health checks on the server's own machine, reach it as localhost.
        hosts = tuple(dict.fromkeys((host, "localhost", "127.0.0.1"))) if name == SERVER else ()
        certificate = authority.sign(found[name]["certificate_request"].encode(), name, hosts)
        write_durably(find_certificate(public, name), certificate)
    roster = Roster(
        host,
        port,
        keys[SERVER],
        {name: keys[name] for name in consortium.data.silos},
        authority.key_hash,
        {name: hash_request_key(found[name]["certificate_request"]) for name in names},
        for_tests,
    )
    write_durably(public / ROSTER, roster.to_json())
    return Consortium.load(public)


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
            hash_request_key(request["certificate_request"])
        except (OSError, *MALFORMED):
            raise _refuse_request(
                f"{path} is no request, or the second one of its party: ask the party to run 'silodp deploy keys'.",
            ) from None
        found[request["name"]] = request
    return found


def _refuse_request(problem: str, field: str | None = None) -> SilodpError:
    return SilodpError(problem, code="deploy.request", field=field)


def find_free_port() -> int:
    """Return a port of 127.0.0.1 that nothing uses, below those that systems give to outgoing connections.

    A port that the system chooses (port 0) can be given to any connection before the server listens at it.
    """
    while True:
        port = 10_000 + secrets.randbelow(32_768 - 10_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def make_local(
    resolved: ResolvedRun, federation: Federation, folder: Path, port: int, host: str = "127.0.0.1"
) -> Consortium:
    """Make a whole consortium on one machine, with the keys of all parties: for tests.

    Args:
        resolved: The run as configured.
        federation: The records of all silos, which are written to the folders of the silos.
        folder: The folder to write, with public/, server/ and silos/NAME/.
        port: Port of the server.
        host: Name or address of the server, as silos reach it.
    """
    from silodp_deploy.acceptance import write_policy
    from silodp_deploy.records import save_records

    data = federation.public(with_records=resolved.method.unit == "record")
    draft_public(resolved, folder / PUBLIC, data)
    (folder / REQUESTS).mkdir(parents=True)
    homes = {SERVER: folder / SERVER, **{name: folder / "silos" / name for name in data.silos}}
    for name, home in homes.items():
        shutil.copy(make_keys(home, name), folder / REQUESTS)
    consortium = seal_public(folder, host, port, for_tests=True)
    accept_digest(homes[SERVER], consortium.digest)
    needs_counts, has_seed = consortium.stated_spec.method.needs_counts, resolved.config.seed is not None
    for silo in federation.silos:
        home = homes[silo.name]
        save_records(home / "records.npz", silo)
        write_policy(home, consortium, "records.npz", allow_counts=needs_counts, allow_seed=has_seed)
    return consortium
