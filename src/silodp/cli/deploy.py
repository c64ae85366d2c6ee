"""`silodp deploy`, `silodp server`, `silodp silo` and `silodp audit-log`: parties on machines of their own."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from socket import create_server
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli._console import Config, Json, Names, Set, Trackers, format_command, log, show
from silodp.cli._logging import LEVELS, log_lines
from silodp.errors import SilodpError
from silodp.text import pluralize

if TYPE_CHECKING:
    from silodp.runtime.train import RoundResult

_log = logging.getLogger(__name__)

deploy_app = typer.Typer(
    help="Set up a consortium whose server and silos are separate programs on separate machines.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_MAX_STATUS_SECONDS = 60.0
"""A process that runs writes its status.json every ten seconds."""

Public = Annotated[Path, typer.Argument(metavar="PUBLIC", help="The consortium's public folder.")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The party's own folder, with its keys.")]
Socket = Annotated[
    Path | None,
    typer.Option(
        "--socket", metavar="PATH", help="Unix socket for a courier, in place of HTTPS; see docs/couriers.md."
    ),
]
SocketGroup = Annotated[
    str | None,
    typer.Option(
        "--socket-group",
        metavar="GROUP",
        help="Group whose members may use the socket. Default: this user alone.",
    ),
]
LogLevel = Annotated[
    str, typer.Option("--log-level", click_type=Names(LEVELS), help="Least severe records that are logged.")
]


@deploy_app.command("init")
def init(
    config: Config,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write.")] = Path("consortium"),
    set_: Set = None,
    users: Annotated[
        int | None, typer.Option("--users", help="Number of persons U, where no public list states it.")
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local", help="For tests: make all parties, with their keys and data, on this machine."
        ),
    ] = False,
    port: Annotated[int, typer.Option("--port", help="Port of the server, with --local. 0: a free one.")] = 0,
    after: Annotated[
        Path | None,
        typer.Option(
            "--after",
            metavar="DIR",
            help="An earlier consortium: its parties keep their folders and keys, and their requests are copied.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the public folder of a consortium from a configuration. No data file is opened without --local."""
    from silodp.config.resolve import load_config

    if local and after is not None:
        raise SilodpError(
            f"after = '{after}' is for parties with keys of their own, and --local makes all keys: give one of both.",
            code="argument.conflict",
            field="after",
        )

    resolved = load_config(config, set_ or ())
    from silodp.deploy.setup import copy_requests, draft_public, find_list_doubts, make_local

    if resolved.config.seed is not None and not local:
        log(
            "warning: the configuration has a seed, so whoever knows it can remove the noise, and silos refuse the run "
            "unless their policy has allow_seed = true: take the seed out."
        )
    for doubt in find_list_doubts(resolved):
        log(f"warning: {doubt}")
    if local:
        chosen = port or _find_free_port()
        made = make_local(resolved, resolved.load_federation(), out, chosen)
        result = {"folder": str(out), "digest": made.digest, "port": chosen, "for_tests": True}
        lines = [
            f"Wrote {out}: public/, server/ and silos/ with test keys and the records of every silo.",
            "Everything is on this machine, so this consortium protects nobody. Start it:",
            f"  {format_command('deploy', 'up', out)}",
        ]
    else:
        data = resolved.read_public_data(users)
        asked = ["server", *data.silos]
        if after is not None:
            asked = copy_requests(after / "requests", out / "requests", data.silos)
        spec = draft_public(resolved, out / "public", data)
        result = {"folder": str(out / "public"), "silos": list(spec.names), "run": spec.digest, "keys": asked}
        lines = [
            f"Wrote {out / 'public'}. Read its files, then send the folder to the server and to every silo."
        ]
        if after is not None:
            lines.append("Parties of the earlier consortium keep their keys and their folders.")
        if asked:
            lines.append("These parties run this command, and send you the request file that it writes:")
            lines += [f"  {format_command('deploy', 'keys', name)}" for name in asked]
            lines.append(f"Put the requests into {out / 'requests'}.")
        lines.append(f"Then run: {format_command('deploy', 'seal', out)} --host NAME")
    show(result, as_json, lines)


@deploy_app.command("keys")
def keys(
    name: Annotated[
        str, typer.Argument(help="Name of the party, as in the public folder: a silo, or server.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="The party's own folder. Default: NAME.")
    ] = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Replace keys that were lost, or that others know; the folder's ledgers stay."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make the keys of one party, once for all runs, at that party. Only the request file may leave the folder."""
    from silodp.deploy.setup import make_keys

    request = make_keys(out or Path(name), name, again=again)
    lines = [f"Wrote {request}: send this file, and no other file of the folder, to the coordinator."]
    show({"request": str(request)}, as_json, lines)


@deploy_app.command("seal")
def seal(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with public/ and requests/.")],
    host: Annotated[str, typer.Option("--host", help="Name or address of the server, as silos reach it.")],
    port: Annotated[int, typer.Option("--port", help="Port of the server.")] = 8443,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Seal a sealed folder anew, under the same authority: all parties accept again."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Sign the requests of all parties, at the coordinator, and write roster and certificates to public/."""
    from silodp.deploy.certificates import read_expiries
    from silodp.deploy.setup import seal_public

    made = seal_public(
        folder / "public", folder / "requests", folder / "coordinator", host, port, again=again
    )
    ends = read_expiries(made.folder)
    first = min(ends, key=ends.__getitem__)
    lines = [
        f"Sealed {folder / 'public'}. Send the folder to all parties again, and compare this code by telephone:",
        f"  {made.code}",
        "The server then runs: silodp deploy accept PUBLIC FOLDER",
        "and every silo:       silodp deploy accept PUBLIC FOLDER --data FILE",
        f"The certificates are valid until {ends[first]:%Y-%m-%d}; before that day, and when no run is in progress, "
        "run this command with --again.",
    ]
    valid = {name: f"{end:%Y-%m-%d}" for name, end in ends.items()}
    show({"digest": made.digest, "code": made.code, "valid_until": valid}, as_json, lines)


def _find_file(folder: Path, field: str, name: str) -> str:
    """Return the absolute path of a file that an operator named, here or in the silo's folder."""
    found = next((path for path in (Path(name), folder / name) if path.is_file()), None)
    if found is None:
        raise SilodpError(
            f"there is no file {name}, neither here nor in {folder}: give the path of the silo's {field} file.",
            code="data.no_file",
            field=field,
        )
    return str(found.resolve())


@deploy_app.command("accept")
def accept_command(
    public: Public,
    folder: Folder,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="FILE", help="The silo's table, here or in FOLDER. The server has none."
        ),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            "--index",
            metavar="FILE",
            help="The file by which a trust center numbers the silo's persons, for weights that depend on records.",
        ),
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            "--code", help="The code that the coordinator read to you. Default: you are asked for it."
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            "--lifetime-epsilon",
            help="Most ε that all runs of this silo may spend against each adversary. Default: that of this run.",
        ),
    ] = None,
    allow_counts: Annotated[
        bool,
        typer.Option(
            "--allow-counts",
            help="Let the server and other silos of this run and later ones see each person's record counts.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what is agreed, at a silo or the server, and accept it when the code is the one that was read out.

    A silo's policy is written then, and at the server the list of what it may run.
    """
    from silodp.deploy.consortium import take_copy
    from silodp.deploy.lifetime import describe_shortfall, find_shortfall
    from silodp.deploy.policy import ACCEPTED, accept_digest
    from silodp.deploy.records import load_records
    from silodp.deploy.setup import accept, describe_agreement
    from silodp.deploy.silo import find_name, load_identity

    consortium = take_copy(public, folder)
    is_server = load_identity(folder, "").public == consortium.sealed.server
    options = {
        "data": data,
        "index": index,
        "lifetime_epsilon": epsilon,
        "allow_counts": allow_counts or None,
    }
    _check_options(is_server, options)
    agreed = describe_agreement(consortium)
    if not as_json:
        for line in _format_agreement(agreed):
            log(line)
    given = typer.prompt("Code as read out by the coordinator", err=True) if code is None else code
    # How people group and capitalize what they hear makes no difference.
    if "".join(c for c in given.lower() if c.isalnum()) != "".join(consortium.code.split()):
        if re.fullmatch(r"\s*[a-z]{4}(-[a-z]{4}){7}\s*", given.lower()):
            raise SilodpError(
                "this is the agreement code of an identity profile (letters and hyphens): type the code of the "
                "consortium, eight groups of digits and the letters a to f.",
                code="deploy.digest",
                field="code",
            )
        raise SilodpError(
            "the code is not that of this public folder, and nothing was accepted: type it again; if it still differs, "
            "the coordinator has another folder, so get the folder again.",
            code="deploy.digest",
            field="code",
        )
    if is_server:
        accept_digest(folder, consortium.digest)
        start = format_command("server", public, folder)
        lines = [f"Accepted. Wrote {folder / ACCEPTED}. Start the server: {start}"]
        show({"digest": consortium.digest, "policy": None, "agreement": agreed}, as_json, lines)
        return
    table = _find_file(folder, "data", str(data))
    numbers = "" if index is None else _find_file(folder, "index", index)
    # What is wrong with the table is seen here, and not when the other silos wait.
    name = find_name(folder, consortium)
    records = load_records(Path(table), name, consortium, Path(numbers) if numbers else None)
    is_new = not _has_accepted(folder, consortium.digest)
    policy = accept(folder, consortium, table, epsilon, index=numbers, allow_counts=allow_counts)
    # Of a run that was begun, the ledgers have charges already.
    short = find_shortfall(folder, consortium.stated_spec, name, policy) if is_new else {}
    if short:
        log(f"warning: {describe_shortfall(short, policy.lifetime_epsilon)}")
    persons = len(set(records.user.tolist()))
    lines = [
        f"Read {pluralize(len(records), 'training record')} of {pluralize(persons, 'person')} (private to this silo).",
        f"Accepted. Wrote {folder / 'policy.toml'}. Start the silo: {format_command('silo', public, folder)}",
    ]
    result = {"digest": consortium.digest, "policy": policy.model_dump(), "agreement": agreed}
    show(result | {"exceeded_limits": sorted(short)}, as_json, lines)


def _has_accepted(folder: Path, digest: str) -> bool:
    """Return whether the policy in a silo's folder lists a digest."""
    from silodp.deploy import POLICY
    from silodp.deploy.policy import Policy

    path = folder / POLICY
    return path.exists() and digest in Policy.load(path).accepted


def _check_options(is_server: bool, options: Mapping[str, object]) -> None:
    """Refuse options of a silo at the server, which has no records, and a silo without its table."""
    given = [name for name, value in options.items() if value is not None]
    if is_server and given:
        raise SilodpError(
            f"{given[0]} is given, and the folder is the server's, which has no records: leave the option out, or name "
            "the silo's folder.",
            code="argument.conflict",
            field=given[0],
        )
    if not is_server and "data" not in given:
        raise SilodpError(
            "a silo accepts with its table, which is read to see whether it fits: add --data FILE.",
            code="argument.missing",
            field="data",
        )


def _format_agreement(agreed: dict[str, Any]) -> list[str]:
    """Return the lines of agreement.txt: what an operator reads before they accept.

    Others wrote the names and texts in it. Each is escaped before it is inserted, so that none adds a line of its own.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from silodp.accounting.assumptions import TECHNICAL
    from silodp.accounting.guarantee import describe_unit, format_epsilon

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=False,  # text for a terminal, no HTML
        finalize=lambda value: _escape_controls(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        pluralize=pluralize, describe_unit=describe_unit, format_epsilon=format_epsilon
    )
    budget = agreed["budget"]
    whole = None if budget is None else agreed["epsilon"][budget["adversary"]]
    text = environment.get_template("agreement.txt").render(
        agreed,
        assumptions=[text.removeprefix(TECHNICAL) for text in agreed["assumptions"]],
        # The server keeps this budget, and a silo its own limits.
        ends_early=whole is not None and whole > budget["epsilon"],
    )
    return text.removesuffix("\n").split("\n")


def _escape_controls(text: str) -> str:
    """Return the text with characters that steer a terminal made visible: others wrote it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@deploy_app.command("check")
def check(
    public: Public,
    folder: Folder,
    url: Annotated[
        str | None, typer.Option("--url", help="Address of the server. Default: that of the roster.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check address, TLS, clock, versions and policy before the code is compared; status 1 if something is wrong."""
    from silodp.deploy.consortium import Consortium

    consortium = Consortium.load(public)
    from silodp.deploy.check import check_party  # torch, after what is refused without it

    found = []
    for one in check_party(folder, consortium, url):
        found.append(one)
        if not as_json:
            line = f"{'ok  ' if one.is_good else 'FAIL'}  {one.name:<12}  {_escape_controls(one.told)}"
            show({}, as_json, [line])
    if as_json:
        show({"checks": [asdict(one) for one in found]}, as_json, [])
    if not all(one.is_good for one in found):
        raise typer.Exit(1)


@deploy_app.command("up")
def up(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Written by: silodp deploy init --local.")],
    as_json: Json = False,
) -> None:
    """For tests: start server and silos of a local consortium as separate processes, and wait for the end."""
    # As an installed command: -P keeps modules of the current folder from being imported.
    command = [sys.executable, "-P", "-m", "silodp.cli.main"]
    public = str(folder / "public")
    with ExitStack() as ending:
        for home in sorted((folder / "silos").iterdir()):
            log_file = ending.enter_context((home / "log.txt").open("ab"))
            silo = subprocess.Popen([*command, "silo", public, str(home)], stderr=log_file)
            ending.callback(_stop, silo)
        server = [*command, "server", public, str(folder / "server")]
        output = subprocess.DEVNULL if as_json else None  # one object on standard output
        status = subprocess.run(server, check=False, stdout=output).returncode
    if status:
        raise SilodpError(
            f"the server stopped with an error (above); the silos' logs are {folder / 'silos'}/*/log.txt.",
            code="deploy.silo_failed",
        )
    show({"run": str(folder / "server" / "run")}, as_json, [f"The run is in {folder / 'server' / 'run'}."])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill it if it does not, for example while it computes."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@deploy_app.command("status")
def status(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the server or of a silo.")],
    is_check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Exit with status 1 where no process runs, or it has a problem: for a health check.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show at the server or a silo who is connected, how far the run is, ε so far, and the last problem."""
    from silodp.accounting.guarantee import format_epsilon
    from silodp.deploy.status import STATUS, read_status

    path = folder / STATUS
    if not path.exists():
        raise SilodpError(
            f"{path} is not there: give the folder of a server, or of a silo over HTTPS, that was started.",
            code="cli.file",
            field="folder",
        )
    found = {"epsilon": {}, "error": None, "seconds_since_seen": {}, **read_status(path)}
    if missing := {"round", "rounds", "written"} - found.keys():
        raise SilodpError(
            f"{path} does not say {sorted(missing)[0]}: start the server, which writes the file anew.",
            code="checkpoint.damaged",
        )
    spent = [f"{name} {format_epsilon(e)}" for name, e in found["epsilon"].items()]
    since = time.time() - found["written"]
    lines = [
        f"round {found['round']} of {found['rounds']}, ε so far: {'; '.join(spent) or '0'}",
        *(
            f"  {name}: {'not connected yet' if seen is None else f'last seen {seen + since:.0f} s ago'}"
            for name, seen in found["seconds_since_seen"].items()
        ),
        *([f"last error: {found['error']}"] if found["error"] else []),
    ]
    is_running = since < _MAX_STATUS_SECONDS
    if not is_running:
        lines.append(f"no process has written this for {since:.0f} s: it has ended, or hangs")
    show(found, as_json, lines)
    if is_check and (not is_running or found["error"]):
        raise typer.Exit(1)


def server(
    public: Public,
    folder: Folder,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="Default: all addresses, port of the roster."),
    ] = None,
    patience: Annotated[
        float, typer.Option("--patience", help="Seconds that a silo has for an answer.", min=1.0)
    ] = 300.0,
    socket: Socket = None,
    socket_group: SocketGroup = None,
    repeat: Annotated[
        float,
        typer.Option("--repeat", help="Seconds after which a request is offered to couriers again.", min=0.1),
    ] = 30.0,
    monitor: Annotated[
        str | None,
        typer.Option(
            "--monitor",
            metavar="HOST:PORT",
            help="Answer /health and /metrics here without TLS, for example 127.0.0.1:9464.",
        ),
    ] = None,
    log_: Trackers = None,
    log_level: LogLevel = "info",
    as_json: Json = False,
) -> None:
    """Run the server of a consortium to the end of its run. It resumes by itself where it was stopped."""
    with log_lines(log_level, as_json):
        from silodp.accounting.guarantee import format_epsilon
        from silodp.deploy.consortium import take_copy

        _refuse_both("listen", listen, socket)
        _refuse_both("monitor", monitor, socket)
        consortium = take_copy(public, folder)

        from silodp.deploy.server import SocketOptions, serve  # torch, after what is refused without it
        from silodp.tracking import format_duration, open_trackers

        def tell(done: RoundResult) -> None:
            spent = ", ".join(f"{name} {format_epsilon(e)}" for name, e in done.epsilon.items())
            left = f", about {format_duration(done.seconds_left)} left" if done.seconds_left else ""
            text = f"round {done.round} of {done.rounds} is done, ε {spent or 0}{left}"
            _log.info("%s", text, extra={"fields": {"round": done.round, "epsilon": dict(done.epsilon)}})
            log_round(done)

        way = (
            _parse_address(listen, "listen")
            if socket is None
            else SocketOptions(socket, socket_group, repeat)
        )
        with open_trackers(log_ or (), folder, private=False) as log_round:
            result = serve(
                folder,
                consortium,
                listen=way,
                answer_timeout=patience,
                monitor=_parse_address(monitor, "monitor"),
                on_round=tell,
            )
        done = result.guarantees["released"].rounds
        summary = {"run": str(folder / "run"), "rounds": done, "stopped": result.stopped}
        show(
            summary,
            as_json,
            [f"{done} rounds, stopped by the {result.stopped}.", *map(str, result.guarantees.values())],
        )


def silo(
    public: Public,
    folder: Folder,
    url: Annotated[
        str | None, typer.Option("--url", help="Address of the server. Default: that of the roster.")
    ] = None,
    socket: Socket = None,
    socket_group: SocketGroup = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", help="Go on when the run is over, and wait for another one; --socket always does."
        ),
    ] = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve one silo until the run is over, or it is stopped. It alone opens the silo's records."""
    with log_lines(log_level):
        from silodp.deploy import TLS_KEY
        from silodp.deploy.consortium import AUTHORITY, take_copy

        _refuse_both("url", url, socket)
        for number in (signal.SIGTERM, signal.SIGINT):  # safe at any moment, as a crash is
            signal.signal(number, lambda *_: sys.exit(0))
        consortium = take_copy(public, folder)

        from silodp.deploy.certificates import ExpiryWatch, make_context
        from silodp.deploy.https import HttpsClient
        from silodp.deploy.silo import open_silo  # torch, after what is refused without it
        from silodp.deploy.sockets import SiloSocket
        from silodp.deploy.status import STATUS, StatusFile
        from silodp.wire.transport import SERVER, SIGNED_BYTES

        with open_silo(folder, consortium) as service:
            max_bytes = service.max_bytes + SIGNED_BYTES
            if socket is not None:
                SiloSocket(socket, service, max_bytes, socket_group).run(threading.Event())
                return
            expiry = ExpiryWatch(consortium.folder, service.name)
            expiry.check()
            tls = make_context(
                consortium.folder / AUTHORITY,
                consortium.certificate(service.name),
                folder / TLS_KEY,
                is_server=False,
            )
            client = HttpsClient(
                url or consortium.sealed.url,
                tls,
                service.identity,
                consortium.digest,
                service,
                max_bytes,
                count_answers=lambda: service.answers,
                keep=keep,
                on_problem=lambda problem: file.try_write(error=problem),
            )
            file = StatusFile(
                folder / STATUS,
                lambda: {SERVER: client.seconds_since_seen()},
                consortium.spec.rounds,
                lambda: {service.name: service.answers},
            )

            def note_round(done: int, epsilon: Mapping[Any, float | None]) -> None:
                file.try_write(round=done, epsilon=dict(epsilon))
                expiry.warn()

            service.on_round = note_round
            file.try_write(digest=consortium.digest)
            with file.keep_fresh():
                client.run(threading.Event())


FIXED_RUNS = (
    "(this holds if the runs, with their settings and rounds, were fixed before the first model was seen; if somebody "
    "chooses a later run after seeing models, the ε of all runs together may be somewhat larger)"
)
"""What the ε over several runs assumes (docs/privacy.md, section 3)."""


def audit_log(folder: Folder, as_json: Json = False) -> None:
    """Show everything that left a silo: time, kind, round, bytes and hash of every answer, and the ε spent so far."""
    from silodp.deploy import AUDIT, POLICY

    path = folder / AUDIT
    if not path.exists() and not (folder / POLICY).exists():
        raise SilodpError(
            f"{folder} is not the folder of a silo: it has neither {AUDIT} nor {POLICY}; a server has no audit log, "
            "see 'silodp deploy status' there.",
            code="cli.file",
            field="folder",
        )
    from silodp.deploy.lifetime import read_spent
    from silodp.deploy.limits import read_audit

    entries, cut_off = read_audit(path)
    text = [
        f"{one['time']}  run {one['run'][:8]}  {_name_answer(one)}  round {one['round'] + 1}  {one['bytes']:,} bytes  "
        f"sha256 {one['sha256'][:16]}  charges {one['charges']}"
        for one in entries
    ]
    if cut_off:
        log(
            f"note: {pluralize(cut_off, 'line')} of {path} was cut off by a crash; nothing left the silo there"
        )
    spent = read_spent(folder, entries)
    text = [*(text or ["nothing has left this silo"]), *_format_spent(spent)]
    show({"entries": entries, "spent": spent}, as_json, text)


def _format_spent(spent: dict[str, Any] | None) -> list[str]:
    """Return what all runs of a silo have spent, by adversary, beside the limits of its policy."""
    from silodp.accounting.guarantee import describe_unit, format_epsilon

    if spent is None:
        return []
    unit = f" for {describe_unit(spent['unit'])}" if spent["unit"] in ("user", "record") else ""
    lines = [
        f"spent in {pluralize(spent['runs'], 'run')} by the ledgers of this silo, at δ = {spent['delta']:g}{unit}:"
    ]
    for adversary, epsilon in spent["epsilon"].items():
        limit = spent["limits"][adversary]
        told = "no guarantee" if epsilon is None else f"ε = {format_epsilon(epsilon)}"
        if limit is not None:
            told += f" of at most {format_epsilon(limit)}"
        lines.append(f"  {adversary:<9} {told}")
    return [*lines, f"  {FIXED_RUNS}"]


def _refuse_both(name: str, value: str | None, socket: Path | None) -> None:
    if value is not None and socket is not None:
        raise SilodpError(
            f"{name} = '{value}' is for HTTPS, and the socket is for other couriers: give --{name} or --socket.",
            code="argument.conflict",
            field=name,
        )


def _name_answer(entry: dict[str, Any]) -> str:
    is_evaluation = entry.get("about") == "evaluation"
    return f"{entry['kind']} of the evaluation" if is_evaluation else str(entry["kind"])


def _parse_address(text: str | None, option: str) -> tuple[str, int] | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    has_brackets = host.startswith("[") and host.endswith("]")
    is_port = port.isascii() and port.isdigit() and int(port) <= 65535
    # Without brackets, the last part of an IPv6 address would be taken for the port.
    if not is_port or not host.isascii() or (":" in host and not has_brackets):
        raise SilodpError(
            f"{option} = '{text}': give HOST:PORT, for example 0.0.0.0:8443 or [::1]:8443.",
            code="argument.value",
            field=option,
        )
    return host[1:-1] if has_brackets else host, int(port)


def _find_free_port() -> int:
    with create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
