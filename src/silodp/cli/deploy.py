"""`silodp deploy`, `silodp server`, `silodp silo` and `silodp audit-log`: parties on machines of their own."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from socket import create_server
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli._console import Config, Json, Set, Trackers, format_command, log, show
from silodp.cli._logging import log_lines
from silodp.errors import SilodpError, counted

if TYPE_CHECKING:
    from silodp.runtime.train import RoundResult

_log = logging.getLogger(__name__)

deploy_app = typer.Typer(
    help="Set up a consortium whose server and silos are separate programs on separate machines.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

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
LogLevel = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]


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
    as_json: Json = False,
) -> None:
    """Write the public folder of a consortium from a configuration. No data file is opened without --local."""
    from silodp.config.schema import load_config

    settings = load_config(config, set_ or ())
    from silodp.deploy.setup import draft_public, find_list_doubts, make_local

    if settings.seed is not None and not local:
        log(
            "warning: the configuration has a seed, so whoever knows it can remove the noise, and silos refuse the run "
            "unless their policy has allow_seed = true: take the seed out."
        )
    for doubt in find_list_doubts(settings):
        log(f"warning: {doubt}")
    if local:
        chosen = port or _find_free_port()
        made = make_local(settings, settings.federation(), out, chosen)
        result = {"folder": str(out), "digest": made.digest, "port": chosen, "for_tests": True}
        lines = [
            f"Wrote {out}: public/, server/ and silos/ with test keys and the records of every silo.",
            "Everything is on this machine, so this consortium protects nobody. Start it:",
            f"  {format_command('deploy', 'up', out)}",
        ]
    else:
        spec = draft_public(settings, out / "public", settings.public_data(users))
        result = {"folder": str(out / "public"), "silos": list(spec.names), "run": spec.digest}
        lines = [
            f"Wrote {out / 'public'}. Read its files, then send the folder to the server and to every silo.",
            "Each of them runs this command, and sends you the request file that it writes:",
            *(f"  {format_command('deploy', 'keys', name)}" for name in ("server", *spec.names)),
            f"Put the requests into {out / 'requests'}, then run: "
            f"{format_command('deploy', 'seal', out)} --host NAME",
        ]
    show(result, as_json, lines)


@deploy_app.command("keys")
def keys(
    name: Annotated[
        str, typer.Argument(help="Name of the party, as in the public folder: a silo, or server.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="The party's own folder. Default: NAME.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the keys of one party, at that party. Only the request file may leave the folder."""
    from silodp.deploy.setup import make_keys

    request = make_keys(out or Path(name), name)
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
    from silodp.deploy.setup import seal_public

    made = seal_public(
        folder / "public", folder / "requests", folder / "coordinator", host, port, again=again
    )
    lines = [
        f"Sealed {folder / 'public'}. Send the folder to all parties again, and compare this code by telephone:",
        f"  {made.code}",
        "Every silo then runs: silodp deploy accept PUBLIC FOLDER --data FILE",
    ]
    show({"digest": made.digest, "code": made.code}, as_json, lines)


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
    data: Annotated[str, typer.Option("--data", metavar="FILE", help="The silo's table, here or in FOLDER.")],
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
    """Show what is agreed, at one silo, and write its policy when the code is the one that was read out."""
    from silodp.deploy.consortium import take_copy
    from silodp.deploy.setup import accept, describe_agreement
    from silodp.deploy.silo import find_name, load_records

    consortium = take_copy(public, folder)
    agreed = describe_agreement(consortium)
    if not as_json:
        for line in _format_agreement(agreed):
            log(line)
    given = typer.prompt("Code as read out by the coordinator", err=True) if code is None else code
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
    table = _find_file(folder, "data", data)
    numbers = "" if index is None else _find_file(folder, "index", index)
    # What is wrong with the table is seen here, and not when the other silos wait.
    records = load_records(
        Path(table), find_name(folder, consortium), consortium, Path(numbers) if numbers else None
    )
    policy = accept(folder, consortium, table, epsilon, index=numbers, allow_counts=allow_counts)
    persons = len(set(records.user.tolist()))
    lines = [
        f"Read {counted(len(records), 'training record')} of {counted(persons, 'person')} (private to this silo).",
        f"Accepted. Wrote {folder / 'policy.toml'}. Start the silo: {format_command('silo', public, folder)}",
    ]
    show({"digest": consortium.digest, "policy": policy.model_dump(), "agreement": agreed}, as_json, lines)


def _format_agreement(agreed: dict[str, Any]) -> list[str]:
    from silodp.accounting.guarantee import TECHNICAL, describe_unit, format_rounded_up

    told = [f"{name} {format_rounded_up(e)}" for name, e in agreed["epsilon"].items()]
    who = "nobody" if agreed["unit"] is None else describe_unit(agreed["unit"])
    columns = ", ".join(agreed["columns"]) or "as in data.json"
    code = ", ".join(agreed["code_files"])
    lines = [
        f"Consortium {agreed['name']}",
        f"  method      {agreed['method']}",
        *(f"    {name}: {value}" for name, value in agreed["settings"].items()),
        f"  protects    {who}; U = {agreed['users']:,} persons",
        f"  a person is {_format_persons(agreed['persons'])}",
        f"  aggregator  {agreed['aggregator']}",
        *(f"    {name}: {value}" for name, value in agreed["aggregation"].items()),
        f"  ε           at δ = {agreed['delta']:g} for the whole run of {agreed['rounds']} rounds: {'; '.join(told)}",
        *_format_budget(agreed["budget"], agreed["epsilon"]),
        *_format_separate(agreed["separate"]),
        *(f"  assumes     {text.removeprefix(TECHNICAL)}" for text in agreed["assumptions"]),
        *_format_evaluation(agreed["evaluation"], agreed["evaluations"]),
        f"  columns     {columns}",
        f"  label       {agreed['label'] or 'as in data.json'}",
        f"  model       {agreed['model']['size']:,} parameters, loss {agreed['model']['loss']}",
        *([f"  executes    {code}: read it first"] if code else []),
        f"  server      {agreed['server']['address']}, key {agreed['server']['key']}",
        *(f"  silo        {name}, key {key}" for name, key in agreed["silos"].items()),
        *(f"  {row['party']} sees {row['sees']}" for row in agreed["visibility"]),
        *([] if agreed["secret"] else ["  NOT FOR RELEASE: the run has a seed, so the noise is not secret"]),
        *(["  FOR TESTS: all keys were made on one machine"] if agreed["for_tests"] else []),
    ]
    return [_escape_controls(line) for line in lines]


def _format_budget(budget: dict[str, Any] | None, epsilon: Mapping[str, float | None]) -> list[str]:
    """Return a line about a budget that ends the run early: the server keeps it, and the silo its own limits."""
    from silodp.accounting.guarantee import format_rounded_up

    if budget is None or (whole := epsilon[budget["adversary"]]) is None or whole <= budget["epsilon"]:
        return []
    limit = format_rounded_up(budget["epsilon"])
    return [
        f"  budget      the server ends the run before ε against {budget['adversary']} exceeds {limit}; this silo does "
        "not check that, but the limits of its own policy (--lifetime-epsilon, by default ε of the whole run)"
    ]


def _format_separate(separate: bool | None) -> list[str]:
    """Return the line about how persons are computed; none where nothing is computed for single persons."""
    if separate is None:
        return []
    if separate:
        return ["  computes    every person (or record) alone"]
    return [
        "  computes    persons side by side: a server that chooses models for it can learn more of a person than ε says"
    ]


def _format_persons(persons: dict[str, Any]) -> str:
    """Return what names a person, for the operator to compare with the table and with earlier runs."""
    if not persons["column"]:
        return f"what the data set numbers as one (digest {persons['digest']})"
    profile = persons["profile"]
    how = (
        "of the public list of persons"
        if profile is None
        else f"by the identity profile {profile['study']}, {profile['code']}"
    )
    return f"a value of the column '{persons['column']}' {how} (digest {persons['digest']})"


def _format_evaluation(across: str | None, times: int) -> list[str]:
    """Return the line about held-out records of an agreement."""
    if across == "local":
        return ["  evaluation  on this silo's held-out records, by itself; nothing of it leaves the silo"]
    if across == "sums":
        return [
            f"  evaluation  {counted(times, 'noisy sum')} of counts of held-out records, within the ε above"
        ]
    return []


def _escape_controls(text: str) -> str:
    """Return the text with characters that steer a terminal made visible: others wrote it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@deploy_app.command("up")
def up(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Written by: silodp deploy init --local.")],
    as_json: Json = False,
) -> None:
    """For tests: start server and silos of a local consortium as separate processes, and wait for the end."""
    command = [sys.executable, "-m", "silodp.cli.main"]
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
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The server's folder.")],
    as_json: Json = False,
) -> None:
    """Show at the server who is connected, how far the run is, ε so far, and the last error."""
    from silodp.accounting.guarantee import format_rounded_up
    from silodp.deploy.server import STATUS

    path = folder / STATUS
    if not path.exists():
        raise SilodpError(
            f"{path} is not there: give the folder of a server that was started.",
            code="cli.file",
            field="folder",
        )
    found = json.loads(path.read_bytes())
    spent = [f"{name} {format_rounded_up(e)}" for name, e in found["epsilon"].items()]
    since = time.time() - found["written"]
    lines = [
        f"round {found['round']} of {found['rounds']}, ε so far: {'; '.join(spent) or '0'}",
        *(
            f"  {name}: {'not connected yet' if seen is None else f'last seen {seen + since:.0f} s ago'}"
            for name, seen in found["seconds_since_seen"].items()
        ),
        *([f"last error: {found['error']}"] if found["error"] else []),
    ]
    show(found, as_json, lines)


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
        from silodp.accounting.guarantee import format_rounded_up
        from silodp.deploy.consortium import take_copy
        from silodp.deploy.server import SocketOptions, serve
        from silodp.tracking import open_trackers
        from silodp.tracking.progress import format_duration

        _refuse_both("listen", listen, socket)
        _refuse_both("monitor", monitor, socket)
        consortium = take_copy(public, folder)

        def tell(done: RoundResult) -> None:
            spent = ", ".join(f"{name} {format_rounded_up(e)}" for name, e in done.epsilon.items())
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
                patience=patience,
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
        from silodp.deploy.certificates import make_context
        from silodp.deploy.consortium import AUTHORITY, take_copy
        from silodp.deploy.https import HttpsClient
        from silodp.deploy.silo import TLS_KEY, open_silo
        from silodp.deploy.sockets import SiloSocket
        from silodp.wire.transport import SIGNED_BYTES

        _refuse_both("url", url, socket)
        for number in (signal.SIGTERM, signal.SIGINT):  # safe at any moment, as a crash is
            signal.signal(number, lambda *_: sys.exit(0))
        consortium = take_copy(public, folder)
        with open_silo(folder, consortium) as service:
            most_bytes = service.most_bytes + SIGNED_BYTES
            if socket is not None:
                SiloSocket(socket, service, most_bytes, socket_group).run(threading.Event())
                return
            tls = make_context(
                consortium.folder / AUTHORITY,
                consortium.certificate(service.name),
                folder / TLS_KEY,
                is_server=False,
            )
            roster = consortium.sealed
            client = HttpsClient(
                url or f"https://{roster.host}:{roster.port}",
                tls,
                service.identity,
                consortium.digest,
                service,
                most_bytes,
                count_answers=lambda: service.answers,
                keep=keep,
            )
            client.run(threading.Event())


def audit_log(
    folder: Folder,
    as_json: Json = False,
) -> None:
    """Show everything that left a silo: time, kind, round, bytes and hash of every answer, and the ε spent so far."""
    from silodp.deploy.limits import read_audit
    from silodp.deploy.silo import AUDIT, POLICY, read_spent

    path = folder / AUDIT
    if not path.exists() and not (folder / POLICY).exists():
        raise SilodpError(
            f"{folder} is not the folder of a silo: it has neither {AUDIT} nor {POLICY}; a server has no audit log, "
            "see 'silodp deploy status' there.",
            code="cli.file",
            field="folder",
        )
    entries, cut_off = read_audit(path)
    text = [
        f"{one['time']}  run {one['run'][:8]}  {_name_answer(one)}  round {one['round'] + 1}  {one['bytes']:,} bytes  "
        f"sha256 {one['sha256'][:16]}  charges {one['charges']}"
        for one in entries
    ]
    if cut_off:
        log(f"note: {counted(cut_off, 'line')} of {path} was cut off by a crash; nothing left the silo there")
    spent = read_spent(folder, entries)
    text = [*(text or ["nothing has left this silo"]), *_format_spent(spent)]
    show({"entries": entries, "spent": spent}, as_json, text)


def _format_spent(spent: dict[str, Any] | None) -> list[str]:
    """Return what all runs of a silo have spent, by adversary, beside the limits of its policy."""
    from silodp.accounting.guarantee import describe_unit, format_rounded_up

    if spent is None:
        return []
    unit = f" for {describe_unit(spent['unit'])}" if spent["unit"] in ("user", "record") else ""
    lines = [
        f"spent in {counted(spent['runs'], 'run')} by the ledgers of this silo, at δ = {spent['delta']:g}{unit}:"
    ]
    for adversary, epsilon in spent["epsilon"].items():
        limit = spent["limits"][adversary]
        told = "no guarantee" if epsilon is None else f"ε = {format_rounded_up(epsilon)}"
        if limit is not None:
            told += f" of at most {format_rounded_up(limit)}"
        lines.append(f"  {adversary:<9} {told}")
    return lines


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
    if not (port.isascii() and port.isdigit() and int(port) <= 65535 and host.isascii()):
        raise SilodpError(
            f"{option} = '{text}': give HOST:PORT, for example 0.0.0.0:8443.",
            code="argument.value",
            field=option,
        )
    return host, int(port)


def _find_free_port() -> int:
    with create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
