"""`silodp server`, `silodp silo` and `silodp audit-log`: the processes of the parties, and what left a silo."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from silodp.cli._console import Json, Names, Trackers, log, show
from silodp.errors import SilodpError
from silodp.text import pluralize
from silodp_deploy.cli._logging import LEVELS, log_lines
from silodp_deploy.cli.deploy import Folder, Public, Url

if TYPE_CHECKING:
    from silodp.runtime.callback import RoundResult

_log = logging.getLogger(__name__)

Socket = Annotated[
    Path | None,
    Option(metavar="PATH", help="Unix socket for a courier, in place of HTTPS; see docs/couriers.md."),
]
SocketGroup = Annotated[
    str | None,
    Option(metavar="GROUP", help="Group whose members may use the socket. Default: this user alone."),
]
LogLevel = Annotated[str, Option(click_type=Names(LEVELS), help="Least severe records that are logged.")]


def server(
    public: Public,
    folder: Folder,
    listen: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Default: all addresses, port of the roster.")
    ] = None,
    patience: Annotated[
        float,
        Option(
            help="Seconds that a silo has from a request to the last byte of its answer: computing and sending count.",
            min=1.0,
        ),
    ] = 300.0,
    socket: Socket = None,
    socket_group: SocketGroup = None,
    repeat: Annotated[
        float, Option(help="Seconds after which a request is offered to couriers again.", min=0.1)
    ] = 30.0,
    monitor: Annotated[
        str | None,
        Option(
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
        _end_at(signal.SIGTERM)  # as the first process of a container it would not end before it is killed
        from silodp.accounting.guarantee import format_epsilon
        from silodp_deploy.consortium import take_copy

        _refuse_with_socket(socket, listen=listen, monitor=monitor)
        consortium = take_copy(public, folder)

        from silodp.config.callbacks import read_log_options
        from silodp.report.skill import read_skill
        from silodp.text import format_duration
        from silodp_deploy.server import serve  # torch, after what is refused without it
        from silodp_deploy.sockets import SocketOptions

        def log_progress(done: RoundResult) -> None:
            spent = ", ".join(f"{name} {format_epsilon(e)}" for name, e in done.epsilon.items())
            left = f", about {format_duration(done.seconds_left)} left" if done.seconds_left else ""
            text = f"round {done.round} of {done.rounds} is done, ε {spent or 0}{left}"
            _log.info("%s", text, extra={"fields": {"round": done.round, "epsilon": dict(done.epsilon)}})

        result = serve(
            folder,
            consortium,
            listen=SocketOptions(socket, socket_group, repeat) if socket else parse_address(listen, "listen"),
            answer_timeout=patience,
            monitor=parse_address(monitor, "monitor"),
            # The server has no records, so no tracker gets a metric that no ε covers.
            callbacks=[log_progress, *read_log_options(log_ or (), private=False)],
        )
        done = result.guarantees["released"].rounds
        skill = read_skill(folder / "run")  # by noised sums, where the run has any
        summary = {
            "run": str(folder / "run"),
            "rounds": done,
            "stopped": result.stopped,
            "skill": None if skill is None else skill.to_dict(),
        }
        lines = [f"{done} rounds, stopped by the {result.stopped}.", *map(str, result.guarantees.values())]
        lines += [] if skill is None else skill.describe()
        show(summary, as_json, lines)


def silo(
    public: Public,
    folder: Folder,
    url: Url = None,
    socket: Socket = None,
    socket_group: SocketGroup = None,
    keep: Annotated[
        bool,
        Option("--keep", help="Go on when the run is over, and wait for another one; --socket always does."),
    ] = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve one silo until the run is over, or it is stopped. It alone opens the silo's records."""
    with log_lines(log_level):
        from silodp_deploy.consortium import take_copy

        _refuse_with_socket(socket, url=url)
        _end_at(signal.SIGTERM, signal.SIGINT)
        consortium = take_copy(public, folder)

        from silodp.wire.transport import SERVER, SIGNED_BYTES
        from silodp_deploy.certificates import ExpiryWatch, load_context, reload_context
        from silodp_deploy.https import HttpsClient, find_proxy
        from silodp_deploy.silo import open_silo  # torch, after what is refused without it
        from silodp_deploy.sockets import SiloSocket
        from silodp_deploy.status import STATUS, StatusFile, list_transfers

        address = url or consortium.sealed.url
        proxy = (
            None if socket is not None else find_proxy(folder, address)
        )  # a mistake in it before the records
        with open_silo(folder, consortium) as service:
            max_bytes = service.max_bytes + SIGNED_BYTES
            if socket is not None:
                SiloSocket(socket, service, max_bytes, socket_group).run(threading.Event())
                return
            # At a socket there is no TLS: messages are signed by keys that do not end.
            expiry = ExpiryWatch(consortium, service.name)
            expiry.check()
            tls = load_context(consortium, service.name, folder)

            def prepare() -> None:
                if expiry.refresh():
                    reload_context(tls, consortium, service.name, folder)
                expiry.check()

            def describe() -> dict[str, Any]:
                stopped = "server" if client.is_over else None
                sending = {} if client.sending is None else {SERVER: client.sending}
                days, transfers = expiry.count_days(), list_transfers(sending)
                return {"certificate_days": days, "stopped": stopped, "transfers": transfers}

            client = HttpsClient(
                address,
                tls,
                service.identity,
                consortium.digest,
                service,
                max_bytes,
                count_answers=lambda: service.answers,
                keep=keep,
                on_problem=lambda problem: file.try_write(error=problem),
                proxy=proxy,
                prepare=prepare,
            )
            file = StatusFile(
                folder / STATUS,
                lambda: {SERVER: client.seconds_since_seen()},
                consortium.spec.rounds,
                lambda: {service.name: service.answers},
                describe,
            )

            def note_round(done: int, epsilon: Mapping[Any, float | None]) -> None:
                file.try_write(round=done, epsilon=dict(epsilon))
                expiry.warn()

            service.on_round = note_round
            # Until the next answer, nobody shall read that nothing was spent.
            limits = dict(service.lifetime.limits)
            file.try_write(
                digest=consortium.digest,
                epsilon_limit=limits,
                **_read_spent(folder / STATUS, consortium.digest),
            )
            with file.record_end(), file.keep_fresh():
                client.run(threading.Event())


def _end_at(*numbers: signal.Signals) -> None:
    """End the process with status 0 at any of these signals: that is safe at any moment, as a crash is."""

    def end(number: int, _: object) -> None:
        _log.info("stopped by %s; the next start goes on", signal.Signals(number).name)
        sys.exit(0)

    for number in numbers:
        signal.signal(number, end)


def _read_spent(path: Path, digest: str) -> dict[str, Any]:
    """Return ε of all runs as the last process of the silo wrote it, and the round if it served the same folder."""
    from silodp_deploy.status import read_status

    try:
        found = read_status(path)
    except SilodpError as error:  # the file is written anew, and nothing depends on it
        _log.warning("%s", error)
        return {}
    names = ("epsilon", "round") if found.get("digest") == digest else ("epsilon",)
    return {name: found[name] for name in names if name in found}


def _refuse_with_socket(socket: Path | None, **options: str | None) -> None:
    """Refuse options that are for HTTPS beside a socket."""
    for name, value in options.items():
        if value is not None and socket is not None:
            raise SilodpError(
                f"{name} = '{value}' is for HTTPS, and the socket is for other couriers: give --{name} or --socket.",
                code="argument.conflict",
                field=name,
            )


def parse_address(text: str | None, option: str) -> tuple[str, int] | None:
    """Return host and port of HOST:PORT, without the brackets of an IPv6 address; None for None.

    Args:
        text: The address.
        option: The option that gives it, for the message of an error.

    Raises:
        SilodpError: It is no such address (code argument.value).
    """
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    has_brackets = host.startswith("[") and host.endswith("]")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    # Without brackets, the last part of an IPv6 address would be taken for the port.
    if not is_port or not host.isascii() or (":" in host and not has_brackets):
        raise SilodpError(
            f"{option} = '{text}': give HOST:PORT, for example 0.0.0.0:8443 or [::1]:8443.",
            code="argument.value",
            field=option,
        )
    return host[1:-1] if has_brackets else host, int(port)


FIXED_RUNS = (
    "(this holds if the runs, with their settings and rounds, were fixed before the first model was seen; if somebody "
    "chooses a later run after seeing models, the ε of all runs together may be somewhat larger)"
)
"""What the ε over several runs assumes (docs/privacy.md, section 3)."""
FILTERED_RUNS = (
    "(ε holds if the runs were fixed before the first model was seen; the limits hold however later runs are chosen, "
    "since the silo refuses by a privacy filter, which needs somewhat more than ε)"
)
"""The same where the policy has a filter (docs/privacy.md, section 12)."""


def audit_log(folder: Folder, as_json: Json = False) -> None:
    """Show everything that left a silo: time, kind, round, bytes and hash of every answer, and the ε spent so far."""
    from silodp_deploy import AUDIT, POLICY

    path = folder / AUDIT
    if not path.exists() and not (folder / POLICY).exists():
        raise SilodpError(
            f"{folder} is not the folder of a silo: it has neither {AUDIT} nor {POLICY}; a server has no audit log, "
            "see 'silodp deploy status' there.",
            code="cli.file",
            field="folder",
        )
    from silodp_deploy.lifetime import read_spent
    from silodp_deploy.limits import read_audit

    entries, cut_off = read_audit(path)
    if cut_off:
        log(
            f"note: {pluralize(cut_off, 'line')} of {path} was cut off by a crash; nothing left the silo there"
        )
    # Of all runs: a limit of the policy holds for them together, and so does what a person has lost.
    spent = read_spent(folder, entries)
    lines = [*map(_format_entry, entries)] or ["nothing has left this silo"]
    show({"entries": entries, "spent": spent}, as_json, [*lines, *format_spent(spent)])


def _format_entry(entry: Mapping[str, Any]) -> str:
    """Return the line of one answer."""
    return (
        f"{entry['time']}  run {entry['run'][:8]}  {describe_kind(entry)}  round {entry['round'] + 1}  "
        f"{entry['bytes']:,} bytes  sha256 {entry['sha256'][:16]}  charges {entry['charges']}"
    )


def describe_kind(entry: Mapping[str, Any]) -> str:
    """Return what an answer of the audit log was."""
    about = entry.get("about", "training")
    return str(entry["kind"]) if about == "training" else f"{entry['kind']} of the {about}"


def format_spent(spent: Mapping[str, Any] | None) -> list[str]:
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
    return [*lines, f"  {FILTERED_RUNS if spent['filter_bounds'] else FIXED_RUNS}"]
