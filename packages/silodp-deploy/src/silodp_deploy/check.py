"""What a party can find out before operators compare the code by telephone: address, TLS, clock, versions, policy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

import silodp
from silodp.data.tables.sources.source import open_source
from silodp.errors import SilodpError
from silodp.parsing import MALFORMED, is_format, parse_json
from silodp.text import pluralize, shorten
from silodp.wire.transport import SERVER
from silodp_deploy import IDENTITY, POLICY, PROTOCOL
from silodp_deploy.certificates import RENEWAL, ExpiryWatch, describe_early_end, load_context
from silodp_deploy.consortium import Consortium
from silodp_deploy.https import Proxy, explain_failure, find_proxy, listen_at, make_client
from silodp_deploy.lifetime import describe_shortfall, find_shortfall
from silodp_deploy.policy import Policy
from silodp_deploy.records import load_records
from silodp_deploy.silo import check_participation, find_name, load_identity

_MAX_CLOCK_SECONDS = 300.0
"""Beyond this the times in two audit logs cannot be compared; certificates allow a day."""
_MAX_REPLY = 4096
_SECONDS = 10.0


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Attributes:
        name: Name of the check, for example "tls".
        is_good: Whether the party can take part, as far as this check sees.
        told: A sentence about what was found, and what to do.
    """

    name: str
    is_good: bool
    told: str


def check_party(
    folder: Path,
    consortium: Consortium,
    url: str | None = None,
    table: Path | None = None,
    index: Path | None = None,
    silo: str | None = None,
) -> Iterator[Finding]:
    """Check whether a party could take part now; nothing is written, and no code of the public folder is executed.

    Args:
        folder: Folder of the party. The key in it says which party it is; before the seal its name, or `silo`, does.
        consortium: The public folder. Where it is not sealed yet, the run and the table alone are checked.
        url: Address of the server; None: that of the roster.
        table: The silo's table, which is read as `silodp deploy accept` reads it; None: it is not read.
        index: The file by which a trust center numbers the silo's persons, where the run needs one.
        silo: Name of the silo; None: as `folder` says.

    Yields:
        Findings, each as soon as it is known. They end where a failed check makes the next one impossible.

    Raises:
        SilodpError: The public folder is not sealed, and no table is given (code deploy.not_sealed).
    """
    if consortium.roster is None and table is not None:
        yield from _report_error("run", _check_run(consortium))
    else:
        address = url or consortium.sealed.url
        yield from _report_error("keys", _check_all(folder, consortium, address))
    if table is not None:
        yield from check_table(folder, consortium, table, index, silo)


def check_table(
    folder: Path, consortium: Consortium, table: Path, index: Path | None = None, silo: str | None = None
) -> Iterator[Finding]:
    """Check that a silo's table is as the consortium agreed, with the arguments of `check_party`.

    It is read here, and nothing of it leaves the machine.

    Yields:
        Findings "query" and "table"; an error is the last one.
    """
    yield from _report_error("table", _check_table(folder, consortium, table, index, silo))


def _report_error(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield findings; where an error ends them, it becomes the last one, under this name."""
    try:
        yield from findings
    except SilodpError as error:
        yield Finding(name, False, f"{error} [{error.code}]")


def _check_all(folder: Path, consortium: Consortium, url: str) -> Iterator[Finding]:
    """Yield what `check_party` finds; only an error about the keys ends it, since the others depend on the party."""
    roster = consortium.sealed
    is_server = load_identity(folder, SERVER).public == roster.server
    name = SERVER if is_server else find_name(folder, consortium)
    yield Finding("keys", True, f"the roster lists the key in {folder / IDENTITY} as that of '{name}'")
    yield from _report_error("run", _check_run(consortium))
    yield from _report_error("certificates", _check_certificates(consortium, name))
    if is_server:
        yield from _report_error("port", _check_port(roster.port))
        return
    yield from _report_error("policy", _check_policy(folder, consortium, name))
    yield from _report_error("tls", _check_server(folder, consortium, name, url))


def _judge(name: str, is_good: bool, good: str, bad: str) -> Finding:
    return Finding(name, is_good, good if is_good else bad)


def _check_run(consortium: Consortium) -> Iterator[Finding]:
    digest = consortium.stated_spec.digest[:16]
    yield Finding("run", True, f"the run that follows here has the digest {digest}, as stated")


def _check_table(
    folder: Path, consortium: Consortium, table: Path, index: Path | None, silo: str | None
) -> Iterator[Finding]:
    """Yield what `check_table` finds."""
    name = silo or (folder.resolve().name if consortium.roster is None else find_name(folder, consortium))
    if name not in consortium.data.silos:
        raise SilodpError(
            f"'{name}' is no silo of the public folder, which has {', '.join(consortium.data.silos)}: name one of them "
            "with --silo.",
            code="argument.value",
            field="silo",
        )
    yield from _check_query(table, consortium, name)
    records = load_records(table, name, consortium, index)
    if (folder / POLICY).exists():
        Policy.load(folder / POLICY).check_persons(records)
    persons = len(set(records.user.tolist()))
    told = f"{pluralize(len(records), 'training record')} of {pluralize(persons, 'person')} (private to this silo)"
    yield Finding("table", True, f"{table} is as the configuration says for '{name}': {told}")


def _check_query(table: Path, consortium: Consortium, name: str) -> Iterator[Finding]:
    """Yield that the query of a silo with a database runs there; no row is asked for."""
    schema = consortium.resolved.table_schema
    mapping = None if schema is None else schema.silos.get(name)
    if schema is None or mapping is None or mapping.query is None:
        return
    columns = open_source(table, schema.readers.get(name, schema.reader), mapping.query).list_columns()
    yield Finding("query", True, f"the query runs at {table}, and gives the columns {', '.join(columns)}")


def _check_certificates(consortium: Consortium, name: str) -> Iterator[Finding]:
    watch = ExpiryWatch(consortium, name)
    watch.check()
    days = watch.count_days()
    first = min(days, key=days.__getitem__)
    told = (
        f"all are valid by the clock here; the first to end is that of '{first}', in {days[first]:.0f} days"
    )
    if ended := [name for name, left in days.items() if left <= 0]:
        told = f"the certificate of {' and of '.join(ended)} has ended, so nobody there connects: {RENEWAL}"
        yield Finding("certificates", False, told)
        return
    if early := describe_early_end(days, Policy.model_fields["max_run_days"].default):
        told += f"; {early.removesuffix('.')}"
    yield Finding("certificates", True, told)


def _check_port(port: int) -> Iterator[Finding]:
    listen_at(("", port), "listen").close()
    told = f"port {port} is free here; whether a firewall admits the silos, only they can see"
    yield Finding("port", True, told)


def _check_policy(folder: Path, consortium: Consortium, name: str) -> Iterator[Finding]:
    """Yield whether a silo's policy allows the run, and whether the run fits in what earlier ones have left."""
    path = folder / POLICY
    if not path.exists():
        yield Finding("policy", True, f"there is none yet: 'silodp deploy accept' writes {path}")
        return
    policy = Policy.load(path)
    is_accepted = consortium.digest in policy.accepted
    # As if the code were compared already: what else the policy refuses is seen before the telephone call.
    accepting = policy.model_copy(update={"accepted": [consortium.digest]})
    check_participation(folder, consortium, accepting)
    yield from _report_error("query", _check_query(folder / policy.data, consortium, name))
    short = find_shortfall(folder, consortium.stated_spec, name, policy)
    told = "this public folder is accepted"
    yield Finding("policy", True, told if is_accepted else "it allows the run; the code is not accepted yet")
    if short:
        yield Finding("limits", False, describe_shortfall(short, policy.lifetime_epsilon))
    else:
        yield Finding("limits", True, "all rounds of the run fit in lifetime_epsilon, after all earlier runs")


def _report_reached(url: str, proxy: Proxy | None) -> Iterator[Finding]:
    """Yield that the server's port was reached, and the proxy on the way."""
    if proxy is not None:
        login = f"; user and password are in {proxy.login_source}" if proxy.login else ""
        yield Finding("proxy", True, f"{proxy.url} lets connections through (set in {proxy.source}{login})")
    yield Finding("port", True, f"{url} can be reached")


def _locate_failure(told: str, code: str, url: str, proxy: Proxy | None) -> Iterator[Finding]:
    """Yield how far a connection came, as `explain_failure` found."""
    name = {"deploy.address": "port", "deploy.proxy": "proxy", "deploy.proxy_login": "proxy"}.get(code, "tls")
    if name == "tls":
        yield from _report_reached(url, proxy)
    yield Finding(name, False, told)


def _check_server(folder: Path, consortium: Consortium, name: str, url: str) -> Iterator[Finding]:
    """Yield what can be seen of the server from here, through the same proxy as the silo."""
    tls = load_context(consortium, name, folder)
    try:
        proxy = find_proxy(folder, url)
        client = make_client(url, tls, proxy, _SECONDS)
    except SilodpError as error:
        yield Finding("port" if error.field == "url" else "proxy", False, f"{error} [{error.code}]")
        return
    try:
        # /health says nothing private, and is answered to every party with a certificate.
        with client, client.stream("GET", "/health") as reply:
            # The first bytes alone: a reply that is longer, or does not end, is no JSON then.
            body, date = next(reply.iter_raw(_MAX_REPLY), b""), reply.headers.get("Date", "")
    except httpx.HTTPError as error:
        failure = explain_failure(error, url, tls, proxy)
        yield from _locate_failure(f"{failure} [{failure.code}]", failure.code, url, proxy)
        return
    yield from _report_reached(url, proxy)
    try:
        stated, theirs_date = parse_json(body), parsedate_to_datetime(date)
        version, protocol, theirs = str(stated["version"]), stated["protocol"], str(stated.get("digest"))
    except MALFORMED as error:
        told = (
            f"the server at {url} does not answer as one of silodp ({shorten(str(error))}): check the address"
        )
        yield Finding("tls", False, told)
        return
    yield Finding("tls", True, "both ends have a certificate of this consortium")
    # The header Date has whole seconds, which is exact enough here.
    off = theirs_date.timestamp() - time.time()
    told = f"the server's clock is {abs(off):.0f} s {'ahead' if off > 0 else 'behind'}"
    yield _judge("clock", abs(off) <= _MAX_CLOCK_SECONDS, told, told + ": set both by a time server")
    yield _judge(
        "version",
        is_format(protocol, PROTOCOL),
        f"both have protocol {PROTOCOL} (silodp {shorten(version)} there, {silodp.__version__} here)",
        f"the server has protocol {shorten(str(protocol))} (silodp {shorten(version)}), and here is {PROTOCOL} (silodp "
        f"{silodp.__version__}): install a version with the same protocol",
    )
    yield _judge(
        "digest",
        theirs == consortium.digest,
        "the server has the same public folder",
        "the server has another public folder: get it again from the coordinator, or tell the server's operator",
    )
